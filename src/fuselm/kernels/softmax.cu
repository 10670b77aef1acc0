// Softmax over rows: y = softmax(scale * x + mask), and dx = scale * y * (dy - sum(dy * y)). Contract: softmax.py; how
// a row is held and added up: softmax.cuh.
//
// Traffic. Forward reads x once and writes y once, backward reads dy and y once and writes dx once: the row waits in
// registers. What a causal mask hides is not read. No atomics.
#include <cmath>

#include "softmax.cuh"

namespace fuselm {
namespace softmax {
namespace {

struct ForwardArgs {
  const char* x;
  char* y;  // contiguous
  int64_t x_stride;
  int64_t rows;
  int32_t width;
  float scale;  // to scores
  bool one_stride, chained, large;
  bool causal;
  int32_t queries;  // rows of a causal square
  Parts parts;
  Rows x_rows, mask;

  __device__ const char* x_row(int64_t row) const { return one_stride ? x + row * x_stride : x_rows.row(row); }

  // Columns that a row may see: query t of T sees the keys up to t + width - T.
  __device__ int visible(int64_t row) const {
    if (!causal) return width;
    const int64_t columns = row % queries + width - queries + 1;
    return columns < 0 ? 0 : static_cast<int>(columns);
  }
};

struct BackwardArgs {
  Rows dy, y;
  char* dx;  // contiguous
  int64_t rows;
  int32_t width;
  float scale;
  bool chained, large;
  Parts parts;
};

// Scores of one vector where there is a mask: in fp32 and ready, so that the mask is read once. `seen` is how many of
// the vector's columns may be seen.
template <typename X>
__device__ inline void masked_scores(float scale, const float (&mask)[kVec<X>], int seen, float (&value)[kVec<X>]) {
#pragma unroll
  for (int i = 0; i < kVec<X>; ++i) {
    value[i] = i < seen ? fmaf(value[i], scale, mask[i] * Base<X>::kUnit) : -infinity();
  }
}

template <typename C, bool kMasked>
constexpr int kForwardBlocks = fitting_blocks(C::kThreads, kMasked&& C::kBlocks > 1 ? C::kBlocks / 2 : C::kBlocks);

template <typename X, typename C, bool kParted, bool kMasked>
__global__ void __launch_bounds__(C::kThreads, (kForwardBlocks<C, kMasked>))
    softmax_forward_kernel(const __grid_constant__ ForwardArgs a) {
  constexpr int N = kVec<X>;
  __shared__ float scratch[2 * C::kThreads / kWarp];
  __shared__ std::conditional_t<kParted, Exchange<2>, char> exchange;
  if (a.chained) {
    allow_next_kernel();
    wait_for_previous_kernel();
  }
  if constexpr (kParted) exchange.init();
  const Place<X, C, kParted> at(a.parts, a.rows, a.width);
  const int seen = kMasked ? (at.count > 0 ? a.visible(at.row) : 0) : a.width;
  const char* x_row = a.x_row(at.row) + at.skip * 16;
  const uint64_t policy = read_policy(a.large);

  const char* mask_row = kMasked && a.mask.present() && at.count > 0 ? a.mask.row(at.row) : nullptr;
  uint4 raw[C::kVecs];
#pragma unroll
  for (int v = 0; v < C::kVecs; ++v) {
    const int i = at.lane + v * C::kLanes;
    raw[v] = make_uint4(0, 0, 0, 0);
    if (i < at.count && (!kMasked || (at.skip + i) * N < seen)) raw[v] = load_vector(x_row + i * 16, policy);
  }

  // Asked for while x is still on its way, where a thread has registers for it.
  constexpr bool kMaskFirst = kMasked && C::kVecs * N <= 32;
  float mask[kMaskFirst ? C::kVecs : 1][N] = {};
  auto load_mask = [&](int v, float (&out)[N]) {
    const int i = at.lane + v * C::kLanes;
    if (mask_row != nullptr && i < at.count) load_constant(mask_row, a.mask.dtype, at.skip + i, out);
  };
#pragma unroll
  for (int v = 0; kMaskFirst && v < C::kVecs; ++v) load_mask(v, mask[v]);

  std::conditional_t<kMasked, FloatVector<X>, PackedVector<X>> held[C::kVecs];
  const float unit = kMasked ? 1.0f : a.scale;
  Power<X> mine = {-infinity(), 0.0f};
#pragma unroll
  for (int v = 0; v < C::kVecs; ++v) {
    const int i = at.lane + v * C::kLanes;
    float value[N];
    unpack<X>(raw[v], value);
    if constexpr (kMasked) {
      if (!kMaskFirst) load_mask(v, mask[0]);
      const int column = (at.skip + i) * N;
      masked_scores<X>(a.scale, mask[kMaskFirst ? v : 0], i < at.count ? seen - column : 0, value);
      held[v].set(value);
    } else {
      held[v].raw = raw[v];
    }
    if (kMasked && i < at.count) mine.top = largest(value, unit, mine.top);
  }
  if constexpr (!kMasked) {
    const bool falls = a.scale < 0.0f;  // then the largest score is that of the smallest number
    float extreme_value = falls ? infinity() : -infinity();
#pragma unroll
    for (int v = 0; v < C::kVecs; ++v) {
      if (at.lane + v * C::kLanes >= at.count) continue;
      extreme_value = falls ? extreme<X, true>(raw[v], extreme_value) : extreme<X, false>(raw[v], extreme_value);
    }
    if (at.lane < at.count) mine.top = __fmul_rn(extreme_value, unit);
  }
#pragma unroll
  for (int v = 0; v < C::kVecs; ++v) {
    float value[N];
    held[v].get(value);
    if (at.lane + v * C::kLanes < at.count) mine.sum += sum_of_powers<X>(value, unit, subtracted(mine.top));
  }
  Power<X> whole = meet<C::kLanes>(mine, scratch + 2 * at.group * C::kLanes / kWarp);
  if constexpr (kParted) {
    exchange.share({whole.top, whole.sum}, a.parts.count, at.rank);
    whole =
        sum_of_parts<X>(a.parts.count, [&](int p) { return Power<X>{exchange.values[p][0], exchange.values[p][1]}; });
  }
  const float inverse = kMasked && whole.sum == 0.0f ? 0.0f : 1.0f / whole.sum;
  const float top = subtracted(whole.top);
  char* y_row = a.y + (at.row * a.width + at.skip * N) * static_cast<int64_t>(sizeof(X));
#pragma unroll
  for (int v = 0; v < C::kVecs; ++v) {
    const int i = at.lane + v * C::kLanes;
    float value[N];
    held[v].get(value);
#pragma unroll
    for (float& one : value) one = Base<X>::power(fmaf(one, unit, -top)) * inverse;
    if (i < at.count) store_floats<X>(y_row + i * 16, value);
  }
}

// Any strides, any alignment, any mask: elements one by one, a row by the lanes that would hold it or its parts.
template <typename X, int kLanes>
__global__ void __launch_bounds__(any_threads(kLanes), 1024 / any_threads(kLanes))
    softmax_forward_any_kernel(const __grid_constant__ ForwardArgs a) {
  constexpr int N = kVec<X>;
  constexpr int kScratch = 2 * any_threads(kLanes) / kWarp;
  __shared__ float scratch[2][kScratch];
  const int group = threadIdx.x / kLanes;
  const int lane = threadIdx.x % kLanes;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * (any_threads(kLanes) / kLanes) + group;
  const int width = index < a.rows ? a.width : 0;
  const int64_t row = index < a.rows ? index : 0;
  const bool masked = a.causal || a.mask.present();
  const int seen = a.visible(row);
  const float unit = masked ? 1.0f : a.scale;
  const char* x_row = a.x_rows.any_row(row);
  const char* mask_row = a.mask.present() ? a.mask.any_row(row) : nullptr;
  auto values = [&](const Span& span, float (&value)[N]) {
    load_elements(x_row, kDType<X>, a.x_rows.column_stride, span.until(seen), value);
    if (!masked) return;
    float mask[N] = {};
    if (a.mask.present()) load_elements(mask_row, a.mask.dtype, a.mask.column_stride, span, mask);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      value[i] = span.until(seen).has(i) ? fmaf(value[i], a.scale, mask[i] * Base<X>::kUnit) : -infinity();
    }
  };
  auto each = [&](int begin, int end, const auto& f) {
    for (int base = begin; base < end; base += kLanes * N) {
      const Span span = span_of<N, kLanes>(lane, base, width).until(end);
      float value[N];
      values(span, value);
      f(span, value, span.template count<N>());
    }
  };

  Power<X> met[kMaxParts];
  for (int part = 0; part < a.parts.count; ++part) {
    const int begin = part * a.parts.vectors * N, end = min(width, begin + a.parts.vectors * N);
    Power<X> mine = {-infinity(), 0.0f};
    each(begin, end,
         [&](const Span&, const float (&value)[N], int here) { mine.top = largest(value, unit, mine.top, here); });
    each(begin, end, [&](const Span&, const float (&value)[N], int here) {
      mine.sum += sum_of_powers<X>(value, unit, subtracted(mine.top), here);
    });
    met[part] = meet<kLanes>(mine, &scratch[part % 2][2 * group * kLanes / kWarp]);
  }
  const Power<X> whole = a.parts.count == 1 ? met[0] : sum_of_parts<X>(a.parts.count, [&](int p) { return met[p]; });
  const float inverse = masked && whole.sum == 0.0f ? 0.0f : 1.0f / whole.sum;
  const float top = subtracted(whole.top);
  char* y_row = a.y + row * a.width * static_cast<int64_t>(sizeof(X));
  each(0, width, [&](const Span& span, float (&value)[N], int) {
#pragma unroll
    for (float& one : value) one = Base<X>::power(fmaf(one, unit, -top)) * inverse;
    store_elements(y_row, kDType<X>, span, value);
  });
}

// ---- backward ----

// Adds up dy * y of a vector: even and odd elements apart.
template <int N>
__device__ inline float sum_of_products(const float (&dy)[N], const float (&y)[N]) {
  float sums[2] = {};
#pragma unroll
  for (int i = 0; i < N; ++i) sums[i % 2] = fmaf(dy[i], y[i], sums[i % 2]);
  return sums[0] + sums[1];
}

template <int N>
__device__ inline void gradient(float (&dy)[N], const float (&y)[N], float dot, float scale) {
#pragma unroll
  for (int i = 0; i < N; ++i) dy[i] = (dy[i] - dot) * y[i] * scale;
}

// Two tensors wait in registers: half as many blocks, twice the registers.
template <typename C>
constexpr int kBackwardBlocks = fitting_blocks(C::kThreads, C::kBlocks > 1 ? C::kBlocks / 2 : 1);

template <typename X, typename C, bool kParted>
__global__ void __launch_bounds__(C::kThreads, (kBackwardBlocks<C>))
    softmax_backward_kernel(const __grid_constant__ BackwardArgs a) {
  constexpr int N = kVec<X>;
  __shared__ float scratch[C::kThreads / kWarp];
  __shared__ std::conditional_t<kParted, Exchange<1>, char> exchange;
  if (a.chained) {
    allow_next_kernel();
    wait_for_previous_kernel();
  }
  if constexpr (kParted) exchange.init();
  const Place<X, C, kParted> at(a.parts, a.rows, a.width);
  const int64_t row = at.count > 0 ? at.row : 0;
  const char* dy_row = a.dy.row(row) + at.skip * 16;
  const char* y_row = a.y.row(row) + at.skip * 16;
  const uint64_t policy = read_policy(a.large);
  Loaded<X, X, true> loaded[C::kVecs];  // dy, and y in the residual's place
#pragma unroll
  for (int v = 0; v < C::kVecs; ++v) {
    const int i = at.lane + v * C::kLanes;
    loaded[v].load_if(i < at.count, dy_row + i * 16, y_row + i * 16, policy);
  }
  float dot = 0.0f;
#pragma unroll
  for (int v = 0; v < C::kVecs; ++v) {
    float dy[N], y[N];
    unpack<X>(loaded[v].x, dy), unpack<X>(loaded[v].residual[0], y);
    dot += sum_of_products(dy, y);
  }
  dot = row_sum<C::kLanes>(dot, scratch + at.group * C::kLanes / kWarp);
  if constexpr (kParted) {
    exchange.share({dot}, a.parts.count, at.rank);
    dot = 0.0f;
    for (int p = 0; p < a.parts.count; ++p) dot += exchange.values[p][0];
  }
  char* dx_row = a.dx + (at.row * a.width + at.skip * N) * static_cast<int64_t>(sizeof(X));
#pragma unroll
  for (int v = 0; v < C::kVecs; ++v) {
    const int i = at.lane + v * C::kLanes;
    float dy[N], y[N];
    unpack<X>(loaded[v].x, dy), unpack<X>(loaded[v].residual[0], y);
    gradient(dy, y, dot, a.scale);
    if (i < at.count) store_floats<X>(dx_row + i * 16, dy);
  }
}

template <typename X, int kLanes>
__global__ void __launch_bounds__(any_threads(kLanes), 1024 / any_threads(kLanes))
    softmax_backward_any_kernel(const __grid_constant__ BackwardArgs a) {
  constexpr int N = kVec<X>;
  __shared__ float scratch[2][any_threads(kLanes) / kWarp];
  const int group = threadIdx.x / kLanes;
  const int lane = threadIdx.x % kLanes;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * (any_threads(kLanes) / kLanes) + group;
  const int width = index < a.rows ? a.width : 0;
  const int64_t row = index < a.rows ? index : 0;
  const char* dy_row = a.dy.any_row(row);
  const char* y_row = a.y.any_row(row);
  auto load = [&](const Span& span, float (&dy)[N], float (&y)[N]) {
    load_elements(dy_row, kDType<X>, a.dy.column_stride, span, dy);
    load_elements(y_row, kDType<X>, a.y.column_stride, span, y);
  };
  float dot = 0.0f;
  for (int part = 0; part < a.parts.count; ++part) {
    const int begin = part * a.parts.vectors * N, end = min(width, begin + a.parts.vectors * N);
    float sum = 0.0f;
    for (int base = begin; base < end; base += kLanes * N) {
      float dy[N], y[N];
      load(span_of<N, kLanes>(lane, base, width).until(end), dy, y);
      sum += sum_of_products(dy, y);
    }
    sum = row_sum<kLanes>(sum, &scratch[part % 2][group * kLanes / kWarp]);
    dot = a.parts.count == 1 ? sum : dot + sum;
  }
  for (int base = 0; base < width; base += kLanes * N) {
    const Span span = span_of<N, kLanes>(lane, base, width);
    float dy[N], y[N];
    load(span, dy, y);
    gradient(dy, y, dot, a.scale);
    store_elements(a.dx + row * a.width * static_cast<int64_t>(sizeof(X)), kDType<X>, span, dy);
  }
}

// ---- launchers ----

template <typename X, bool kMasked>
Status launch_forward(ForwardArgs& a, bool vectors, const DeviceFacts& facts, int device, cudaStream_t stream) {
  Status status = Status::kOk;
  auto any = [&](auto config) {
    constexpr int kLanes = decltype(config)::kLanes;
    const unsigned blocks = static_cast<unsigned>(divide_up(a.rows, any_threads(kLanes) / kLanes));
    softmax_forward_any_kernel<X, kLanes><<<blocks, any_threads(kLanes), 0, stream>>>(a);
    status = launch_status();
  };
  auto held = [&](auto config) {
    using C = decltype(config);
    if (!vectors) return any(config);
    const dim3 grid(static_cast<unsigned>(divide_up(a.rows, C::kGroups)));
    status = launch(softmax_forward_kernel<X, C, false, kMasked>, grid, C::kThreads, 0, a.chained, stream, a);
  };
  auto parted = [&](auto config) {
    using C = decltype(config);
    static std::atomic<int> clusters[kMaxDevices][kMaxParts + 1];
    const auto kernel = softmax_forward_kernel<X, C, true, kMasked>;
    if (vectors && a.parts.count <= kMaxParts &&
        launch_parts(kernel, a, a.rows, a.parts.count, C::kThreads, a.chained, facts, clusters[device][a.parts.count],
                     stream)) {
      return;
    }
    any(config);
  };
  with_config<X>(a.parts, held, parted);
  return status;
}

template <typename X>
Status launch_backward(BackwardArgs& a, const DeviceFacts& facts, int device, cudaStream_t stream) {
  const bool vectors = a.dy.vectors && a.y.vectors;
  Status status = Status::kOk;
  auto any = [&](auto config) {
    constexpr int kLanes = decltype(config)::kLanes;
    const unsigned blocks = static_cast<unsigned>(divide_up(a.rows, any_threads(kLanes) / kLanes));
    softmax_backward_any_kernel<X, kLanes><<<blocks, any_threads(kLanes), 0, stream>>>(a);
    status = launch_status();
  };
  auto held = [&](auto config) {
    using C = decltype(config);
    if (!vectors) return any(config);
    const dim3 grid(static_cast<unsigned>(divide_up(a.rows, C::kGroups)));
    status = launch(softmax_backward_kernel<X, C, false>, grid, C::kThreads, 0, a.chained, stream, a);
  };
  auto parted = [&](auto config) {
    using C = decltype(config);
    static std::atomic<int> clusters[kMaxDevices][kMaxParts + 1];
    const auto kernel = softmax_backward_kernel<X, C, true>;
    if (vectors && a.parts.count <= kMaxParts &&
        launch_parts(kernel, a, a.rows, a.parts.count, C::kThreads, a.chained, facts, clusters[device][a.parts.count],
                     stream)) {
      return;
    }
    any(config);
  };
  with_config<X>(a.parts, held, parted);
  return status;
}

// The mask as a tensor of x's sizes, strides of 0 where it is repeated. False when it does not fit.
bool broadcast(const TensorView& mask, const TensorView& x, TensorView& out) {
  out = mask;
  if (!mask.present()) return true;
  if (mask.rank > x.rank) return false;
  out.rank = x.rank;
  for (int d = 0; d < x.rank; ++d) {
    const int from = d - (x.rank - mask.rank);
    const bool repeated = from < 0 || (mask.sizes[from] == 1 && x.sizes[d] != 1);
    if (!repeated && mask.sizes[from] != x.sizes[d]) return false;
    out.sizes[d] = x.sizes[d];
    out.strides[d] = repeated ? 0 : mask.strides[from];
  }
  return true;
}

}  // namespace
}  // namespace softmax

Status softmax_forward(const Input& x, const OptionalInput& mask, double scale, bool causal, const Like<0>& y,
                       Stream stream) {
  Status status = check_tensors(x, {}, {});
  if (status != Status::kOk) return status;
  if (mask.present() && !is_float(mask.dtype)) return Status::kBadDtype;
  TensorView seen;
  if (!y.present() || (causal && x.rank < 2) || !softmax::broadcast(mask, x, seen)) return Status::kBadShape;
  if (!std::isfinite(static_cast<float>(scale))) return Status::kBadScalar;
  const DeviceGuard guard(stream.device);
  if (!guard.ok()) return Status::kBadDevice;
  const int64_t rows = count_rows(x), width = x.sizes[x.rank - 1];
  if (rows == 0) return Status::kOk;
  const DeviceFacts& facts = device_facts(guard.device());
  return with_dtype(x.dtype, [&](auto zero) {
    using X = decltype(zero);
    softmax::ForwardArgs a = {};
    a.x_rows = make_rows(x, width, kVec<X>), a.mask = make_rows(seen, width, kVec<X>);
    a.x = a.x_rows.data, a.x_stride = a.x_rows.strides[0], a.one_stride = a.x_rows.outer == 1;
    a.y = static_cast<char*>(y.data);
    a.rows = rows, a.width = static_cast<int32_t>(width);
    a.scale = static_cast<float>(scale) * softmax::Base<X>::kUnit;
    a.causal = causal, a.queries = causal ? static_cast<int32_t>(x.sizes[x.rank - 2]) : 1;
    a.parts = softmax::parts_of<X>(width);
    a.chained = facts.capability >= 90 && rows <= 2 * facts.multiprocessors;
    a.large = 2 * rows * width * static_cast<int64_t>(sizeof(X)) > facts.l2_bytes;
    const bool vectors = a.x_rows.vectors && a.mask.vectors;
    const auto launch = causal || mask.present() ? softmax::launch_forward<X, true> : softmax::launch_forward<X, false>;
    return launch(a, vectors, facts, guard.device(), cuda_stream(stream));
  });
}

Status softmax_backward(const Input& dy, const Input& y, double scale, const Like<0>& dx, Stream stream) {
  const Status status = check_tensors(dy, {}, y);
  if (status != Status::kOk) return status;
  if (y.dtype != dy.dtype) return Status::kBadDtype;
  if (!dx.present() || !y.present()) return Status::kBadShape;
  if (!std::isfinite(static_cast<float>(scale))) return Status::kBadScalar;
  const DeviceGuard guard(stream.device);
  if (!guard.ok()) return Status::kBadDevice;
  const int64_t rows = count_rows(dy), width = dy.sizes[dy.rank - 1];
  if (rows == 0) return Status::kOk;
  const DeviceFacts& facts = device_facts(guard.device());
  return with_dtype(dy.dtype, [&](auto zero) {
    using X = decltype(zero);
    softmax::BackwardArgs a = {};
    a.dy = make_rows(dy, width, kVec<X>), a.y = make_rows(y, width, kVec<X>);
    a.dx = static_cast<char*>(dx.data);
    a.rows = rows, a.width = static_cast<int32_t>(width), a.scale = static_cast<float>(scale);
    a.parts = softmax::parts_of<X>(width);
    a.chained = facts.capability >= 90 && rows <= 2 * facts.multiprocessors;
    a.large = 3 * rows * width * static_cast<int64_t>(sizeof(X)) > facts.l2_bytes;
    return softmax::launch_backward<X>(a, facts, guard.device(), cuda_stream(stream));
  });
}

}  // namespace fuselm
