// AdamW over all parameters in one launch. Contract: adamw.py.
//
// Traffic. Of an fp32 parameter 28 bytes: parameter, gradient and both averages are read, all but the gradient written;
// of a 16-bit parameter with its fp32 twin 28 too. Nothing is reused, so bandwidth is all there is.
//
// Threads. A block takes a chunk of a tensor (tensor_lists.cuh). Learning rate, step, scale and whether to step at all
// may be on the device: nothing here is known to the host only after it has waited.
#include <cmath>

#include "tensor_lists.cuh"

namespace fuselm {
namespace {

using namespace lists;

// Four elements a thread; with four times as many in a chunk a step over 124 M parameters took 2 % longer.
constexpr int kChunk = kThreads * 4;
constexpr int kGroups = 8;             // of one launch
constexpr int kOptions = 6;            // of one group
constexpr int kFew = 64, kMany = 590;  // tensors of one launch: what 4 and 32 KiB of parameters hold

// ---- a step ----

struct Group {
  float one_minus_beta1, beta2, one_minus_beta2, eps, decay;
  float log_beta1, log_beta2;
  float fade, shift, rate;  // where the host knows learning rate and step
  const float *lr, *step;   // where the device does
};

// What a thread does to its elements.
struct Rule {
  float one_minus_beta1, beta2, one_minus_beta2, fade, shift, rate, scale;

  __device__ Rule(const Group& g, const float* grad_scale)
      : one_minus_beta1(g.one_minus_beta1),
        beta2(g.beta2),
        one_minus_beta2(g.one_minus_beta2),
        fade(g.fade),
        shift(g.shift),
        rate(g.rate),
        scale(grad_scale == nullptr ? 1.0f : *grad_scale) {
    if (g.lr == nullptr) return;
    // 1 - beta^step loses four digits at step 1 with beta 0.9999; expm1 loses none.
    const float lr = *g.lr, step = *g.step;
    const float first = -expm1f(step * g.log_beta1), root = sqrtf(-expm1f(step * g.log_beta2));
    fade = lr * g.decay, shift = g.eps * root, rate = lr * root / first;
  }

  // Multiplying by the root of the second correction above and below the fraction leaves one division. The decay is
  // taken off, not multiplied by 1 - fade: that, rounded, would be wrong the same way at every step.
  __device__ void apply(float& param, float grad, float& exp_avg, float& exp_avg_sq) const {
    const float g = __fmul_rn(grad, scale);  // fused with nothing: all kernels round alike
    exp_avg = fmaf(one_minus_beta1, g - exp_avg, exp_avg);
    exp_avg_sq = fmaf(one_minus_beta2 * g, g, beta2 * exp_avg_sq);
    param -= fmaf(fade, param, rate * (exp_avg / (sqrtf(exp_avg_sq) + shift)));
  }
};

template <int kCapacity>
struct StepArgs {
  char* param[kCapacity];
  const char* grad[kCapacity];
  float* exp_avg[kCapacity];
  float* exp_avg_sq[kCapacity];
  float* master[kCapacity];  // null where there is none
  int64_t count[kCapacity];
  Chunks<kCapacity> chunks;
  uint8_t traits[kCapacity];
  Group groups[kGroups];
  const float* grad_scale;
  const bool* skip;
};
static_assert(sizeof(StepArgs<kFew>) <= 4096 && sizeof(StepArgs<kMany>) <= kMostParameters,
              "what a kernel's parameters may take");

__device__ inline void store_quad(char* tensor, DType dtype, int64_t element, const float (&in)[4]) {
  if (dtype == DType::kFloat32) {
    store_vector(tensor + element * 4, packed<float>(in));
  } else {
    const bool bf = dtype == DType::kBFloat16;
    const uint2 half = {bf ? packed_pair(in[0], in[1], bf16{}) : packed_pair(in[0], in[1], fp16{}),
                        bf ? packed_pair(in[2], in[3], bf16{}) : packed_pair(in[2], in[3], fp16{})};
    *reinterpret_cast<uint2*>(tensor + element * 2) = half;
  }
}

// One tensor as a block sees it. kWide: everything is fp32 and there is no twin, known when this is compiled.
template <bool kWide>
struct Tensors {
  char* param;
  const char* grad;
  float *exp_avg, *exp_avg_sq, *master;
  Traits traits;

  __device__ DType param_dtype() const { return kWide ? DType::kFloat32 : traits.param; }
  __device__ DType grad_dtype() const { return kWide ? DType::kFloat32 : traits.grad; }
  __device__ bool has_master() const { return !kWide && master != nullptr; }

  __device__ void update(const Rule& rule, int64_t at) const {
    float p = has_master() ? master[at] : element(param, param_dtype(), at);
    float m = exp_avg[at], v = exp_avg_sq[at];
    rule.apply(p, element(grad, grad_dtype(), at), m, v);
    exp_avg[at] = m, exp_avg_sq[at] = v;
    if (has_master()) master[at] = p;
    set_element(param, param_dtype(), at, p);
  }
};

// Four elements: all that is needed of them is asked for before the first is looked at.
template <bool kWide>
__device__ inline void update_quad(const Tensors<kWide>& t, const Rule& rule, int64_t at) {
  const uint64_t policy = read_policy(true);
  Quad p, g, m, v;
  if (t.has_master()) {
    p.load(reinterpret_cast<const char*>(t.master), DType::kFloat32, at, policy);
  } else {
    p.load(t.param, t.param_dtype(), at, policy);
  }
  g.load(t.grad, t.grad_dtype(), at, policy);
  m.load(reinterpret_cast<const char*>(t.exp_avg), DType::kFloat32, at, policy);
  v.load(reinterpret_cast<const char*>(t.exp_avg_sq), DType::kFloat32, at, policy);
  float param[4], grad[4], exp_avg[4], exp_avg_sq[4];
  p.get(t.has_master() ? DType::kFloat32 : t.param_dtype(), param);
  g.get(t.grad_dtype(), grad);
  m.get(DType::kFloat32, exp_avg), v.get(DType::kFloat32, exp_avg_sq);
#pragma unroll
  for (int i = 0; i < 4; ++i) rule.apply(param[i], grad[i], exp_avg[i], exp_avg_sq[i]);
  store_quad(reinterpret_cast<char*>(t.exp_avg), DType::kFloat32, at, exp_avg);
  store_quad(reinterpret_cast<char*>(t.exp_avg_sq), DType::kFloat32, at, exp_avg_sq);
  if (t.has_master()) store_quad(reinterpret_cast<char*>(t.master), DType::kFloat32, at, param);
  store_quad(t.param, t.param_dtype(), at, param);
}

template <int kCapacity, bool kWide>
__global__ void __launch_bounds__(kThreads) adamw_step_kernel(const __grid_constant__ StepArgs<kCapacity> a) {
  if (a.skip != nullptr && *a.skip) return;
  const int chunk = static_cast<int>(blockIdx.x), index = a.chunks.owner(chunk);
  const Traits traits = unpacked_traits(a.traits[index]);
  const Rule rule(a.groups[traits.group], a.grad_scale);
  const Tensors<kWide> t = {a.param[index],      a.grad[index],   a.exp_avg[index],
                            a.exp_avg_sq[index], a.master[index], traits};
  const int64_t begin = static_cast<int64_t>(chunk - a.chunks.first[index]) * kChunk;
  const int64_t end = min(a.count[index], begin + kChunk);
  const int64_t mine = begin + threadIdx.x * 4;
  if (likely(traits.vectors && mine + 4 <= end)) {
    update_quad(t, rule, mine);
  } else {
    for (int64_t at = mine; at < end && at < mine + 4; ++at) t.update(rule, at);
  }
}

bool make_group(const double* option, const TensorView* scalars, Group& group) {
  const double lr = option[0], beta1 = option[1], beta2 = option[2], eps = option[3], decay = option[4],
               step = option[5];
  if (!(beta1 >= 0 && beta1 < 1 && beta2 >= 0 && beta2 < 1)) return false;
  const double root = std::sqrt(1 - std::pow(beta2, step));
  group.one_minus_beta1 = static_cast<float>(1 - beta1);
  group.beta2 = static_cast<float>(beta2), group.one_minus_beta2 = static_cast<float>(1 - beta2);
  group.eps = static_cast<float>(eps), group.decay = static_cast<float>(decay);
  group.log_beta1 = static_cast<float>(std::log(beta1)), group.log_beta2 = static_cast<float>(std::log(beta2));
  group.fade = static_cast<float>(lr * decay), group.shift = static_cast<float>(eps * root);
  group.rate = static_cast<float>(lr * root / (1 - std::pow(beta1, step)));
  if (scalars != nullptr) {
    group.lr = static_cast<const float*>(scalars[0].data), group.step = static_cast<const float*>(scalars[1].data);
  }
  return true;
}

bool is_scalar(const TensorView& view, DType dtype) {
  return view.rank <= kMaxRank && count_of(view) == 1 && view.dtype == dtype;
}

struct Lists {
  const TensorList &params, &grads, &exp_avgs, &exp_avg_sqs, &masters;

  const TensorView* master(int64_t i) const {
    return masters.count > 0 && count_of(masters[i]) ? &masters[i] : nullptr;
  }

  Status check(int64_t i) const {
    const TensorView& param = params[i];
    for (const TensorList* list : {&params, &grads, &exp_avgs, &exp_avg_sqs}) {
      if ((*list)[i].rank > kMaxRank) return Status::kBadShape;
    }
    if (masters.count > 0 && masters[i].rank > kMaxRank) return Status::kBadShape;
    if (count_of(param) == 0) return Status::kOk;  // nothing is done to it
    const TensorView* own[] = {&grads[i], &exp_avgs[i], &exp_avg_sqs[i], master(i)};
    if (!is_float(param.dtype) || !is_float(grads[i].dtype)) return Status::kBadDtype;
    if (!is_dense(param)) return Status::kBadShape;
    for (int k = 0; k < 4; ++k) {
      if (own[k] == nullptr) continue;
      if (k > 0 && own[k]->dtype != DType::kFloat32) return Status::kBadDtype;
      if (!lies_like(*own[k], param)) return Status::kBadShape;
    }
    return Status::kOk;
  }
};

// One launch for tensors `from` to `to` - 1, those without an element left out.
template <int kCapacity>
Status launch_step(const Lists& lists, const InputList& scalars, const Numbers& options, const Indices& groups,
                   const TensorView& grad_scale, const TensorView& skip, int64_t from, int64_t to,
                   cudaStream_t stream) {
  static thread_local StepArgs<kCapacity> a;  // too large for every thread's stack
  bool wide = true;
  int used = 0;
  int64_t known[kGroups], num_groups = 0, chunks = 0;
  for (int64_t i = from; i < to; ++i) {
    const TensorView &param = lists.params[i], &grad = lists.grads[i];
    const TensorView* master = lists.master(i);
    const int64_t count = count_of(param);
    if (count == 0) continue;
    int64_t group = 0;
    while (group < num_groups && known[group] != groups.data[i]) ++group;
    if (group == num_groups) {
      known[num_groups++] = groups.data[i];
      a.groups[group] = {};
      const TensorView* own = scalars.count > 0 ? scalars.views + 2 * groups.data[i] : nullptr;
      if (!make_group(options.data + kOptions * groups.data[i], own, a.groups[group])) return Status::kBadScalar;
    }
    a.param[used] = static_cast<char*>(param.data), a.grad[used] = static_cast<const char*>(grad.data);
    a.exp_avg[used] = static_cast<float*>(lists.exp_avgs[i].data);
    a.exp_avg_sq[used] = static_cast<float*>(lists.exp_avg_sqs[i].data);
    a.master[used] = master == nullptr ? nullptr : static_cast<float*>(master->data);
    a.count[used] = count;
    const bool aligned = is_aligned(param) && is_aligned(grad) && is_aligned(lists.exp_avgs[i]) &&
                         is_aligned(lists.exp_avg_sqs[i]) && (master == nullptr || is_aligned(*master));
    a.traits[used] = packed_traits({param.dtype, grad.dtype, static_cast<uint8_t>(group), aligned});
    wide &= param.dtype == DType::kFloat32 && grad.dtype == DType::kFloat32 && master == nullptr;
    a.chunks.first[used++] = static_cast<int32_t>(chunks);
    chunks += divide_up(count, kChunk);
  }
  if (used == 0) return Status::kOk;
  if (chunks >= int64_t{1} << 31) return Status::kBadShape;
  a.chunks.first[used] = static_cast<int32_t>(chunks), a.chunks.tensors = used;
  a.grad_scale = static_cast<const float*>(grad_scale.data), a.skip = static_cast<const bool*>(skip.data);
  const auto kernel = wide ? adamw_step_kernel<kCapacity, true> : adamw_step_kernel<kCapacity, false>;
  kernel<<<static_cast<unsigned>(chunks), kThreads, 0, stream>>>(a);
  return launch_status();
}

}  // namespace

Status adamw_step(const InOutList& params, const InputList& grads, const InOutList& exp_avgs,
                  const InOutList& exp_avg_sqs, const InOutList& masters, const InputList& scalars,
                  const Numbers& options, const Indices& groups, const OptionalInput& grad_scale,
                  const OptionalInput& skip, Stream stream) {
  const int64_t count = params.count, num_groups = options.count / kOptions;
  if (grads.count != count || exp_avgs.count != count || exp_avg_sqs.count != count || groups.count != count ||
      (masters.count != 0 && masters.count != count) || options.count % kOptions != 0 ||
      (scalars.count != 0 && scalars.count != 2 * num_groups)) {
    return Status::kBadShape;
  }
  const Lists lists{params, grads, exp_avgs, exp_avg_sqs, masters};
  for (int64_t i = 0; i < count; ++i) {
    if (groups.data[i] < 0 || groups.data[i] >= num_groups) return Status::kBadScalar;
    const Status status = lists.check(i);
    if (status != Status::kOk) return status;
  }
  for (int64_t g = 0; g < num_groups; ++g) {  // all of them before anything is launched
    Group group;
    const double step = options.data[kOptions * g + 5];
    if (!(step >= 1) || !make_group(options.data + kOptions * g, nullptr, group)) return Status::kBadScalar;
  }
  for (int64_t i = 0; i < scalars.count; ++i) {
    if (!is_scalar(scalars[i], DType::kFloat32)) return Status::kBadDtype;
  }
  if (grad_scale.present() && !is_scalar(grad_scale, DType::kFloat32)) return Status::kBadDtype;
  if (skip.present() && !is_scalar(skip, DType::kBool)) return Status::kBadDtype;
  const DeviceGuard guard(stream.device);
  if (!guard.ok()) return Status::kBadDevice;
  // As many tensors as a launch takes, and no more than kGroups groups.
  for (int64_t from = 0; from < count;) {
    int64_t to = from, known[kGroups], used = 0;
    for (; to < count && to - from < kMany; ++to) {
      int64_t group = 0;
      while (group < used && known[group] != groups.data[to]) ++group;
      if (group == kGroups) break;
      if (group == used) known[used++] = groups.data[to];
    }
    const auto launch = to - from <= kFew ? launch_step<kFew> : launch_step<kMany>;
    const Status status = launch(lists, scalars, options, groups, grad_scale, skip, from, to, cuda_stream(stream));
    if (status != Status::kOk) return status;
    from = to;
  }
  return Status::kOk;
}

}  // namespace fuselm
