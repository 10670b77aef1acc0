// RMSNorm: y = h / rms(h) * (offset + weight), h = x or x + residual. Contract: rms_norm.py; backward:
// rms_norm_backward.cu.
//
// Traffic. x is read once and y written once: the row waits in registers for its own sum. No atomics: results are
// bitwise repeatable, and a row's result does not depend on the other rows.
//
// Threads. `kLanes` threads own a row, up to kVecs vectors of 16 bytes each; narrow rows share a block. How many lanes,
// and so the order of a row's sum, follows from the width alone. Rows too wide to wait in registers are read twice by
// the *_wide kernels. Odd widths come in bundles of rows. What is left (odd strides, expanded tensors, odd widths that
// are wide or have a residual) takes the *_any kernels: slower, same order of sums.
#include <cmath>

#include "rows.cuh"

namespace fuselm {
namespace {

// Each is the fastest of a sweep on an H200, docs/log.md.
using ForwardConfigs =
    ConfigList<Config<8, 1, 128, 1>, Config<16, 1, 128, 1>, Config<32, 1, 128, 1>, Config<32, 2, 128, 12>,
               Config<32, 3, 128, 8>, Config<64, 2, 128, 12>, Config<128, 2, 128, 12>, Config<256, 2, 256, 6>,
               Config<256, 4, 256, 4>, Config<512, 4, 512, 2>>;
// A few rows with the usual arguments and no offset, where what counts is how soon the first is done: one row a block,
// the weight asked for while x is still on its way. Lanes as above, so that a row's sum has the same bits in both.
using FewRowsConfigs = ConfigList<Config<64, 2, 64, 1, Kind::kSoon>, Config<128, 2, 128, 1, Kind::kSoon>,
                                  Config<256, 2, 256, 1, Kind::kSoon>, Config<256, 4, 256, 1, Kind::kSoon>,
                                  Config<512, 4, 512, 1, Kind::kSoon>>;
constexpr int64_t kFewVectors = 96;  // narrower rows are as fast without
// Wider rows are read twice, the second time from L1 while all rows of a multiprocessor fit there.
using WideConfigs = ConfigList<Config<512, 6, 512, 4>, Config<1024, 256, 1024, 2>>;
// Of rows of odd width that a block takes, or one round of them: more where a row takes the whole block, since then a
// lane takes few of a row's columns and has as many weights to load.
template <typename C>
constexpr int64_t kBundleBytes = (C::kGroups == 1 ? 32 : 16) << 10;

struct ForwardArgs {
  // What every launch reads comes first and close together: the constant cache is cold when a kernel starts, and each
  // line it has to fetch is a few hundred cycles on the way to the first load.
  const char *x, *weight;
  char* y;  // contiguous, as every output is
  float* rstd;
  int64_t x_stride;  // bytes from row to row, where one stride says it all
  int64_t rows;
  int32_t width;
  float inverse_width, eps, offset;
  const char* residual;
  int64_t residual_stride;
  char* residual_out;
  DType weight_dtype;
  bool round_first;  // llama: the normalised value is rounded to x's dtype before it meets the weight
  bool one_stride;
  bool chained;  // launched programmatically
  bool large;    // x and y together are larger than L2
  int bundle;    // rows a block takes where they are bundles
  Rows x_rows, residual_rows, weight_rows;

  __device__ const char* x_row(int64_t row) const { return one_stride ? x + row * x_stride : x_rows.row(row); }
  __device__ const char* residual_row(int64_t row) const {
    return one_stride ? residual + row * residual_stride : residual_rows.row(row);
  }
};

// Adds up the squares of a vector: even and odd elements apart, since one sum after another is what a single row waits
// for. Every kernel sums this way, so that a row's sum has the same bits in all of them.
template <int N>
__device__ inline float sum_of_squares(const float (&h)[N]) {
  float even = 0.0f, odd = 0.0f;
#pragma unroll
  for (int i = 0; i < N; i += 2) {
    even = fmaf(h[i], h[i], even);
    odd = fmaf(h[i + 1], h[i + 1], odd);
  }
  return even + odd;
}

template <typename X, typename H>
__device__ inline float sum_of_squares(const Held<X, H>& held) {
  float h[kVec<X>];
  held.get(h);
  return sum_of_squares(h);
}

// rsqrtf is off by up to 2 ulp, which a whole fp32 row would inherit, so there it is the correctly rounded one;
// rounding to 16 bits hides it, and a single row has 50 cycles less to wait for. The mean is a product for the same
// reason: what that loses for widths that are no power of two is a quarter of an ulp of rstd.
template <typename X>
__device__ inline float inverse_rms(float sum, float inverse_width, float eps) {
  const float mean = fmaf(sum, inverse_width, eps);
  return sizeof(X) == 4 ? __frsqrt_rn(mean) : rsqrtf(mean);
}

template <typename X>
__device__ inline float normalised(float h, float rstd, bool round_first) {
  return round_first ? rounded<X>(h * rstd) : h * rstd;
}

// y of one vector. kUsual leaves out what the usual arguments do not need, and with it the branches that keep the
// compiler from asking for the next vector's weight early: 145 us became 134 at 32768x4096.
template <typename X, typename H, bool kUsual, bool kOffset = true>
__device__ inline void scaled(const ForwardArgs& a, const Held<X, H>& held, float rstd, int index, const uint4& usual,
                              float (&y)[kVec<X>]) {
  float weight[kVec<X>];
  held.get(y);
  if constexpr (kUsual) {
    unpack<X>(usual, weight);
#pragma unroll
    for (int i = 0; i < kVec<X>; ++i) y[i] = y[i] * rstd * (kOffset ? weight[i] + a.offset : weight[i]);
  } else {
    load_weight(a.weight, a.weight_dtype, a.offset, index, weight);
#pragma unroll
    for (int i = 0; i < kVec<X>; ++i) y[i] = normalised<X>(y[i], rstd, a.round_first) * weight[i];
  }
}

// y of a whole row. `usual` holds the lane's weights where they were asked for early.
template <typename X, typename H, typename C, bool kUsual>
__device__ inline void write_row(const ForwardArgs& a, char* y_row, int lane, int count, float rstd,
                                 const Held<X, H> (&held)[C::kVecs], uint4 (&usual)[C::kVecs]) {
#pragma unroll
  for (int v = 0; kUsual && C::kKind != Kind::kSoon && v < C::kVecs; ++v) {
    const int at = lane + v * C::kLanes;
    if (at < count) usual[v] = __ldg(reinterpret_cast<const uint4*>(a.weight) + at);
  }
#pragma unroll
  for (int v = 0; v < C::kVecs; ++v) {
    const int at = lane + v * C::kLanes;
    if (!kUsual && at >= count) continue;
    float y[kVec<X>];
    scaled<X, H, kUsual, C::kKind != Kind::kSoon>(a, held[v], rstd, at, usual[v], y);
    if (at < count) store_floats<X>(y_row + at * 16, y);
  }
}

// A residual doubles what a thread has under way: half as many blocks, twice the registers.
template <typename C, bool kResidual>
constexpr int kForwardBlocks = fitting_blocks(C::kThreads, kResidual&& C::kBlocks > 1 ? C::kBlocks / 2 : C::kBlocks);

template <typename X, typename H, bool kResidual, typename C, bool kUsual>
__global__ void __launch_bounds__(C::kThreads, (kForwardBlocks<C, kResidual>))
    rms_norm_forward_kernel(const __grid_constant__ ForwardArgs a) {
  constexpr int kH = kVec<X> * sizeof(H);  // bytes of a vector of h
  constexpr bool kSoon = C::kKind == Kind::kSoon;
  // In a chain of small kernels starting one takes as long as running it: let the next start now, then wait for the
  // last.
  if (kSoon) warm(a.x), warm(a.eps);
  if (kSoon || a.chained) {
    allow_next_kernel();
    wait_for_previous_kernel();
  }
  __shared__ float scratch[C::kThreads / kWarp];
  const int group = threadIdx.x / C::kLanes;
  const int lane = threadIdx.x % C::kLanes;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * C::kGroups + group;
  const int vectors = static_cast<unsigned>(a.width) / kVec<X>;
  // Threads of rows past the end stay for the sums of their block; with no vectors to their name they touch nothing.
  const int count = kSoon || row < a.rows ? vectors : 0;

  // One product of 32 bits where a row is waited for: for kSoon strides are below 2^32.
  auto soon = [&](const char* rows, int64_t stride) {
    return rows + uint64_t{blockIdx.x} * static_cast<uint32_t>(stride);
  };
  const char* x_row = kSoon ? soon(a.x, a.x_stride) : a.x_row(row);
  const char* residual_row = nullptr;
  if (kResidual) residual_row = kSoon ? soon(a.residual, a.residual_stride) : a.residual_row(row);
  Loaded<X, H, kResidual> loaded[C::kVecs];
#pragma unroll
  for (int v = 0; v < C::kVecs; ++v) {
    const int at = lane + v * C::kLanes;
    if constexpr (kSoon) {
      loaded[v].load_if(at < count, x_row + at * 16, residual_row + at * kH);
    } else {
      loaded[v].load_if(at < count, x_row + at * 16, residual_row + at * kH, read_policy(a.large));
    }
  }

  uint4 weight[C::kVecs];
#pragma unroll
  for (int v = 0; kSoon && v < C::kVecs; ++v) {  // asked for while x is still on its way
    const int at = lane + v * C::kLanes;
    if (at < count) weight[v] = load_constant_now(a.weight + at * 16);
  }

  Held<X, H> held[C::kVecs];
  float sum = 0.0f;
#pragma unroll
  for (int v = 0; v < C::kVecs; ++v) {
    const int at = lane + v * C::kLanes;
    held[v] = loaded[v].sum();
    sum += sum_of_squares<X, H>(held[v]);
    if (kResidual && at < count) {
      float h[kVec<X>];
      held[v].get(h);
      store_floats<H>(a.residual_out + row * a.width * static_cast<int64_t>(sizeof(H)) + at * kH, h);
    }
  }
  sum = row_sum<C::kLanes>(sum, scratch + group * C::kLanes / kWarp);
  const float rstd = inverse_rms<X>(sum, a.inverse_width, a.eps);
  if (a.rstd != nullptr && lane == 0 && count > 0) a.rstd[row] = rstd;

  char* y_row = a.y + row * a.width * static_cast<int64_t>(sizeof(X));
  write_row<X, H, C, kUsual>(a, y_row, lane, count, rstd, held, weight);
}

// A row that no configuration holds: one block, and what is normalised is read again, from L1 where it is still there
// (two rows of 32768 in 16 bits are), else from L2.
template <typename X, typename H, bool kResidual, typename C, bool kUsual>
__global__ void __launch_bounds__(C::kThreads, (kForwardBlocks<C, kResidual>))
    rms_norm_forward_wide_kernel(const __grid_constant__ ForwardArgs a) {
  constexpr int kH = kVec<X> * sizeof(H);
  __shared__ float scratch[C::kLanes / kWarp];
  const int64_t row = blockIdx.x;
  const int count = a.width / kVec<X>;
  const char* x_row = a.x_row(row);
  const char* residual_row = kResidual ? a.residual_row(row) : nullptr;
  char* h_row = a.residual_out + row * a.width * static_cast<int64_t>(sizeof(H));
  char* y_row = a.y + row * a.width * static_cast<int64_t>(sizeof(X));
  const uint64_t policy = read_policy(a.large);

  float sum = 0.0f;
#pragma unroll 4
  for (int at = threadIdx.x; at < count; at += C::kLanes) {
    Loaded<X, H, kResidual> loaded;
    if constexpr (kResidual) {
      loaded.load(x_row + at * 16, residual_row + at * kH, policy);
    } else {
      loaded.x = load_vector_first(x_row + at * 16, policy);
    }
    const Held<X, H> held = loaded.sum();
    sum += sum_of_squares<X, H>(held);
    if constexpr (kResidual) {
      float h[kVec<X>];
      held.get(h);
      store_floats<H>(h_row + at * kH, h);
    }
  }
  sum = row_sum<C::kLanes>(sum, scratch);
  const float rstd = inverse_rms<X>(sum, a.inverse_width, a.eps);
  if (a.rstd != nullptr && threadIdx.x == 0) a.rstd[row] = rstd;

#pragma unroll 2
  for (int at = threadIdx.x; at < count; at += C::kLanes) {
    uint4 usual;
    if (kUsual) usual = __ldg(reinterpret_cast<const uint4*>(a.weight) + at);
    float y[kVec<X>];
    Held<X, H> held;
    if constexpr (kResidual) {
      held.load(h_row + at * kH);
    } else {
      held.raw = load_vector_again(x_row + at * 16);
    }
    scaled<X, H, kUsual>(a, held, rstd, at, usual, y);
    store_floats<X>(y_row + at * 16, y);
  }
}

// Blocks of a multiprocessor whose threads have registers for a row, for its weights where they are kept, and for the
// rest.
template <typename X, typename C>
constexpr bool kKeepWeight = C::kVecs * kVec<X> <= 24;
template <typename X, typename C>
constexpr int kBundleBlocks =
    fitting_blocks(C::kThreads, 65536 / ((C::kVecs * kVec<X> * (kKeepWeight<X, C> ? 2 : 1) + 32) * C::kThreads));

// Rows of odd width that follow one another: a block takes a bundle of them. y takes the place of x in shared memory.
template <typename X, typename C>
__global__ void __launch_bounds__(C::kThreads, (kBundleBlocks<X, C>))
    rms_norm_forward_bundle_kernel(const __grid_constant__ ForwardArgs a) {
  constexpr int N = kVec<X>;
  constexpr int kSpan = C::kLanes * N;
  extern __shared__ __align__(128) uint4 bundle_bytes[];
  __shared__ uint64_t arrived;
  __shared__ float scratch[2][C::kThreads / kWarp];
  char* const bundle = reinterpret_cast<char*>(bundle_bytes);
  const int group = threadIdx.x / C::kLanes;
  const int lane = threadIdx.x % C::kLanes;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * a.bundle;
  const int here = a.rows - first < a.bundle ? static_cast<int>(a.rows - first) : a.bundle;
  const Run run(first, here, a.width * static_cast<int>(sizeof(X)), a.rows);

  if (threadIdx.x == 0) init_barrier(&arrived);
  __syncthreads();  // nobody asks a barrier before it is there
  if (threadIdx.x == 0) expect_bytes(&arrived, run.whole);
  fetch_run<X, C::kThreads>(a.x, run, bundle, &arrived, read_policy(a.large));
  copy_async_commit();
  float weight[C::kVecs][N];
  auto load_weight_of = [&](int v) {
    load_weight_columns<C::kLanes>(a.weight, a.weight_dtype, a.offset, v * kSpan + lane, a.width, weight[v]);
  };
#pragma unroll
  for (int v = 0; kKeepWeight<X, C> && v < C::kVecs; ++v) load_weight_of(v);
  copy_async_wait<0>();
  __syncthreads();
  wait_for_bytes(&arrived, 0);

  // Every group makes the same number of rounds: they meet in row_sum.
#pragma unroll 1
  for (int r = group; r < a.bundle; r += C::kGroups) {
    X* const row = reinterpret_cast<X*>(bundle + run.lead) + r * a.width;
    const int width = r < here ? a.width : 0;
    float h[C::kVecs][N], sum = 0.0f;
#pragma unroll
    for (int v = 0; v < C::kVecs; ++v) {
      if (v * kSpan >= a.width) break;
      load_columns<C::kLanes>(row, v * kSpan + lane, width, h[v]);
      sum += sum_of_squares(h[v]);
    }
    sum = row_sum<C::kLanes>(sum, &scratch[r / C::kGroups % 2][group * C::kLanes / kWarp]);
    const float rstd = inverse_rms<X>(sum, a.inverse_width, a.eps);
    if (a.rstd != nullptr && lane == 0 && width > 0) a.rstd[first + r] = rstd;
#pragma unroll
    for (int v = 0; v < C::kVecs; ++v) {
      if (v * kSpan >= a.width) break;
      if (!kKeepWeight<X, C>) load_weight_of(v);
#pragma unroll
      for (float& one : h[v]) one *= rstd;
      if (a.round_first) {
#pragma unroll
        for (float& one : h[v]) one = rounded<X>(one);
      }
#pragma unroll
      for (int i = 0; i < N; ++i) h[v][i] *= weight[v][i];
      store_columns<C::kLanes>(row, v * kSpan + lane, width, h[v]);
    }
  }
  __syncthreads();
  store_run<X, C::kThreads>(a.y, run, bundle);
}

// Any strides, any alignment, any mix of dtypes: elements one by one.
template <typename X, int kLanes>
__global__ void __launch_bounds__(any_threads(kLanes), 1024 / any_threads(kLanes))
    rms_norm_forward_any_kernel(const __grid_constant__ ForwardArgs a) {
  constexpr int N = kVec<X>;
  __shared__ float scratch[any_threads(kLanes) / kWarp];
  const int group = threadIdx.x / kLanes;
  const int lane = threadIdx.x % kLanes;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * (any_threads(kLanes) / kLanes) + group;
  const int width = index < a.rows ? a.width : 0;  // rows past the end stay for the sums of their block
  const int64_t row = index < a.rows ? index : 0;
  const DType h_dtype = a.residual_rows.dtype;
  const bool summed = a.residual_rows.present();
  const char* x_row = a.x_rows.any_row(row);
  const char* residual_row = a.residual_rows.any_row(row);
  char* h_row = a.residual_out + row * a.width * element_bytes(h_dtype);
  char* y_row = a.y + row * a.width * static_cast<int64_t>(sizeof(X));

  float sum = 0.0f;
  for (int base = 0; base < width; base += kLanes * N) {
    const Span span = span_of<N, kLanes>(lane, base, width);
    float h[N];
    load_elements(x_row, kDType<X>, a.x_rows.column_stride, span, h);
    if (summed) {
      float r[N];
      load_elements(residual_row, h_dtype, a.residual_rows.column_stride, span, r);
#pragma unroll
      for (int i = 0; i < N; ++i) h[i] = round_to(h_dtype, h[i] + r[i]);
      store_elements(h_row, h_dtype, span, h);
    }
    sum += sum_of_squares(h);
  }
  sum = row_sum<kLanes>(sum, scratch + group * kLanes / kWarp);
  const float rstd = inverse_rms<X>(sum, a.inverse_width, a.eps);
  if (a.rstd != nullptr && lane == 0 && width > 0) a.rstd[index] = rstd;

  for (int base = 0; base < width; base += kLanes * N) {
    const Span span = span_of<N, kLanes>(lane, base, width);
    float h[N], weight[N];
    if (summed) {
      load_elements(h_row, h_dtype, 1, span, h);
    } else {
      load_elements(x_row, kDType<X>, a.x_rows.column_stride, span, h);
    }
    load_weight_elements(a.weight_rows, a.offset, span, weight);
#pragma unroll
    for (int i = 0; i < N; ++i) h[i] = normalised<X>(h[i], rstd, a.round_first) * weight[i];
    store_elements(y_row, kDType<X>, span, h);
  }
}

template <typename X, int kLanes>
void launch_forward_any(const ForwardArgs& a, cudaStream_t stream) {
  constexpr int kThreads = any_threads(kLanes);
  const unsigned blocks = static_cast<unsigned>(divide_up(a.rows, kThreads / kLanes));
  rms_norm_forward_any_kernel<X, kLanes><<<blocks, kThreads, 0, stream>>>(a);
}

// False when the rows are no bundles.
template <typename X, typename C>
bool launch_forward_bundle(ForwardArgs& a, int device, cudaStream_t stream) {
  static std::atomic<bool> allowed[kMaxDevices];
  const int64_t row_bytes = a.width * static_cast<int64_t>(sizeof(X));
  const bool alone = !a.residual_rows.present() && a.weight_rows.column_stride == 1;
  if (!alone || !bundles<X>(a.x_rows, a.width) || reinterpret_cast<uintptr_t>(a.y) % 16 != 0) return false;
  const int64_t rounds = kBundleBytes<C> / (C::kGroups * row_bytes);
  a.bundle = C::kGroups * static_cast<int>(rounds > 1 ? rounds : 1);
  const auto kernel = rms_norm_forward_bundle_kernel<X, C>;
  const int64_t bytes = Run::room(a.bundle, row_bytes);
  if (!allow_shared(kernel, device, bytes, allowed)) return false;
  const unsigned blocks = static_cast<unsigned>(divide_up(a.rows, a.bundle));
  kernel<<<blocks, C::kThreads, static_cast<size_t>(bytes), stream>>>(a);
  return true;
}

template <typename X, typename H, bool kResidual, bool kUsual>
Status launch_forward_vectors(ForwardArgs& a, int device, cudaStream_t stream) {
  const int64_t count = a.width / kVec<X>;
  const DeviceFacts& facts = device_facts(device);
  const bool few = a.rows <= 2 * facts.multiprocessors;
  a.chained = few && facts.capability >= 90;
  Status status = Status::kOk;
  auto held = [&](auto config) {
    using C = decltype(config);
    const dim3 grid(static_cast<unsigned>(divide_up(a.rows, C::kGroups)));
    status = launch(rms_norm_forward_kernel<X, H, kResidual, C, kUsual>, grid, C::kThreads, 0, a.chained, stream, a);
  };
  if constexpr (kUsual && std::is_same_v<X, H>) {
    const bool near = a.one_stride && (a.x_stride | a.residual_stride) >> 32 == 0;
    if (few && near && count > kFewVectors && a.offset == 0.0f && FewRowsConfigs::pick(count, held)) return status;
  }
  if (ForwardConfigs::pick(count, held)) return status;
  WideConfigs::pick(count, [&](auto config) {
    using C = decltype(config);
    const dim3 grid(static_cast<unsigned>(a.rows));
    status = launch(rms_norm_forward_wide_kernel<X, H, kResidual, C, kUsual>, grid, C::kThreads, 0, false, stream, a);
  });
  return status;
}

// The usual arguments: a weight of x's dtype, multiplied before rounding.
template <typename X, typename H, bool kResidual>
Status launch_forward_vectors(ForwardArgs& a, int device, cudaStream_t stream) {
  const bool usual = a.weight_dtype == kDType<X> && !a.round_first;
  return usual ? launch_forward_vectors<X, H, kResidual, true>(a, device, stream)
               : launch_forward_vectors<X, H, kResidual, false>(a, device, stream);
}

template <typename X>
Status launch_forward(ForwardArgs& a, int device, cudaStream_t stream) {
  const DType residual = a.residual_rows.dtype;
  a.large = 2 * a.rows * a.width * static_cast<int64_t>(sizeof(X)) > device_facts(device).l2_bytes;
  if (a.x_rows.vectors && a.weight_rows.vectors && a.residual_rows.vectors) {
    if (residual == DType::kAbsent) return launch_forward_vectors<X, X, false>(a, device, stream);
    if (residual == kDType<X>) return launch_forward_vectors<X, X, true>(a, device, stream);
    if (residual == DType::kFloat32) return launch_forward_vectors<X, float, true>(a, device, stream);
  }
  const int64_t count = divide_up(a.width, kVec<X>);
  auto any = [&](auto config) { launch_forward_any<X, decltype(config)::kLanes>(a, stream); };
  auto bundle_or_any = [&](auto config) {
    if (!launch_forward_bundle<X, decltype(config)>(a, device, stream)) any(config);
  };
  if (!ForwardConfigs::pick(count, bundle_or_any)) WideConfigs::pick(count, any);
  return launch_status();
}

}  // namespace

Status rms_norm_forward(const Input& x, const OptionalInput& weight, const OptionalInput& residual, double eps,
                        double offset, bool round_first, const Like<0>& y, const Like<2>& residual_out,
                        const RowStat<0>& rstd, Stream stream) {
  const Status status = check_tensors(x, weight, residual);
  if (status != Status::kOk) return status;
  if (!y.present() || residual_out.present() != residual.present()) return Status::kBadShape;
  if (!(static_cast<float>(eps) > 0.0f) || !std::isfinite(static_cast<float>(eps))) return Status::kBadScalar;
  if (!std::isfinite(static_cast<float>(offset)) || (!weight.present() && offset != 0.0)) return Status::kBadScalar;
  const DeviceGuard guard(stream.device);
  if (!guard.ok()) return Status::kBadDevice;
  const int64_t rows = count_rows(x), width = x.sizes[x.rank - 1];
  if (rows == 0) return Status::kOk;
  return with_dtype(x.dtype, [&](auto zero) {
    using X = decltype(zero);
    auto as_rows = [&](const TensorView& view) { return make_rows(view, width, kVec<X>); };
    ForwardArgs a = {};
    a.x_rows = as_rows(x), a.residual_rows = as_rows(residual), a.weight_rows = as_rows(weight);
    a.x = a.x_rows.data, a.residual = a.residual_rows.data, a.weight = a.weight_rows.data;
    a.x_stride = a.x_rows.strides[0], a.residual_stride = a.residual_rows.strides[0];
    a.one_stride = a.x_rows.outer == 1 && a.residual_rows.outer == 1;
    a.y = static_cast<char*>(y.data), a.residual_out = static_cast<char*>(residual_out.data);
    a.rstd = static_cast<float*>(rstd.data);
    a.rows = rows, a.width = static_cast<int32_t>(width), a.inverse_width = 1.0f / static_cast<float>(width);
    a.eps = static_cast<float>(eps), a.offset = exact_offset(offset);
    a.weight_dtype = weight.dtype, a.round_first = round_first;
    return launch_forward<X>(a, guard.device(), cuda_stream(stream));
  });
}

}  // namespace fuselm
