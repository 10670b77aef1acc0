// Softmax over rows: y = softmax(scale * x + mask), and dx = scale * y * (dy - sum(dy * y)). Contract: softmax.py; how
// a row is held and added up: softmax.cuh.
//
// Traffic. Forward reads x once and writes y once, backward reads dy and y once and writes dx once: the row waits in
// registers. What a causal mask hides is not read. No atomics.
#include <cfloat>
#include <cmath>

#include "softmax.cuh"

namespace fuselm {
namespace softmax {
namespace {

// What the kernels for rows that follow one another are given. Others are given it first: the constant cache is cold
// when a kernel starts, and each line of it after the first 48 bytes would be most of a microsecond on the way to the
// first load.
struct NearForward {
  static constexpr bool falls = false, chained = false, large = false;  // see ForwardArgs
  const char* x;
  char* y;  // contiguous
  int64_t rows;
  int32_t width;
  float unit;  // x to scores where there is no mask

  __device__ static Parts cut() { return {}; }  // how a row is shared out
  // How the scores around a row's largest value are taken.
  __device__ Level level(float top, bool other_sign) const {
    Level taken(top, unit);
    if (other_sign) taken.unit = -taken.unit;
    return taken;
  }
};

struct ForwardArgs : NearForward {
  bool adjacent;  // x is contiguous too
  bool falls;     // x is to be taken with the other sign
  bool chained, large;
  Parts parts;
  float scale;  // x to what the mask is added to
  bool masked, causal;
  int32_t queries;  // rows of a causal square
  Divisor by_queries;
  Rows x_rows, mask;
  bool shared;  // `heads` rows, `rows_apart` from each other, have one row of the mask
  Divisor heads, rows_apart;

  __device__ Parts cut() const { return parts; }
  // Rows that share a row of the mask are taken one after another, while that is still near: at 2x8x2048x4096, where
  // the mask has 32 MiB, 157 us instead of 189.
  __device__ int64_t place(int64_t index) const {
    if (!shared) return index;
    const uint32_t low = static_cast<uint32_t>(index), above = heads.divide(low), outer = rows_apart.divide(above);
    const uint32_t head = low - above * heads.value, row = above - outer * rows_apart.value;
    return (outer * heads.value + head) * rows_apart.value + row;
  }

  // Columns that a row may see: query t of T sees the keys up to t + width - T.
  __device__ int visible(int64_t row) const {
    if (!causal) return width;
    const uint32_t low = static_cast<uint32_t>(row);
    // The product is half the price; row numbers of 2^31 and more are for the long way.
    const int query = rows >> 31 == 0 ? static_cast<int>(low - by_queries.divide(low) * by_queries.value)
                                      : static_cast<int>(row % queries);
    return max(query + width - queries + 1, 0);
  }
};

struct NearBackward {
  static constexpr bool chained = false;  // costs 0.07 us, and what comes before a backward is never this short
  static constexpr bool large = false;    // see BackwardArgs
  const char *dy, *y;
  char* dx;  // contiguous
  int64_t rows;
  int32_t width;
  float scale;

  __device__ static Parts cut() { return {}; }
};

struct BackwardArgs : NearBackward {
  bool adjacent;  // dy and y are contiguous too
  bool large;
  Parts parts;
  Rows dy_rows, y_rows;

  __device__ Parts cut() const { return parts; }
};

// x of one vector with the mask: in fp32 and ready, so that the mask is read once. `seen` is how many of the vector's
// columns may be seen.
template <int N>
__device__ inline void mask_values(float scale, const float (&mask)[N], int seen, float (&value)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) value[i] = fmaf(value[i], scale, mask[i]);
#pragma unroll
  for (int i = 0; seen < N && i < N; ++i) value[i] = i < seen ? value[i] : -infinity();
}

// Where a row with a mask waits in fp32, powers can wait in the values' place: those of a part are taken by a
// multiplication to where the row's largest value counts as 0, instead of made once more. That is one rounding more,
// which rows of 16 bits do not show.
template <typename X>
constexpr bool kPowersWait = sizeof(X) == 2;

// More elements a thread than without a mask: there is more to be done once for all of them.
using MaskedConfigs = ConfigList<Config<8, 1, 128, 1>, Config<16, 1, 128, 1>, Config<32, 1, 128, 1>,
                                 Config<32, 2, 128, 10>, Config<32, 3, 128, 10>, Config<32, 4, 128, 10>,
                                 Config<64, 4, 128, 10>, Config<128, 4, 128, 10>, Config<256, 4, 256, 4>>;
// A row waits in fp32 where there is a mask: threads that have registers for so many numbers each.
constexpr int masked_threads(int floats) { return floats > 32 ? 512 : floats > 16 ? 1024 : 1280; }
template <typename X, typename C, bool kMasked>
constexpr int kForwardBlocks = fitting_blocks(
    C::kThreads, kMasked&& C::kBlocks > 1 ? masked_threads(C::kVecs * kVec<X>) / C::kThreads : C::kBlocks);

// Where a row of a contiguous tensor begins: below 2^32 where L2 holds the tensor.
template <typename X, bool kNear>
__device__ inline int64_t row_offset(int64_t row, int32_t width) {
  const int64_t bytes = width * static_cast<int64_t>(sizeof(X));
  return kNear ? static_cast<uint32_t>(row) * static_cast<uint32_t>(bytes) : row * bytes;
}

template <typename X, typename C, bool kParted, bool kMasked>
__global__ void __launch_bounds__(C::kThreads, (kForwardBlocks<X, C, kMasked>))
    softmax_forward_kernel(const __grid_constant__ std::conditional_t<C::kNear, NearForward, ForwardArgs> a) {
  constexpr int N = kVec<X>;
  constexpr bool kNear = C::kNear, kWide = C::kKind == Kind::kWide;
  __shared__ alignas(16) float scratch[2][C::kThreads / kWarp];
  __shared__ std::conditional_t<kParted, Exchange<2>, char> exchange;
  if constexpr (kParted) exchange.init();
  Place<X, C, kParted> at(a.cut(), a.rows, a.width);
  int seen = a.width;
  const char* mask_row = nullptr;
  if constexpr (kMasked) {
    at.row = a.place(at.row);
    seen = at.count > 0 ? a.visible(at.row) : 0;
    if (a.mask.present() && at.count > 0) mask_row = a.mask.row(at.row);
  }
  const int64_t offset = row_offset<X, kNear>(at.row, a.width) + at.skip * 16;
  const char* x_row = a.x + offset;
  if constexpr (!kNear) {
    if (unlikely(!a.adjacent)) x_row = a.x_rows.row(at.row) + at.skip * 16;
  } else {
    warm(x_row), warm(a.y + offset);
  }
  if (C::kSoon || a.chained) {
    allow_next_kernel();
    wait_for_previous_kernel();
  }
  const uint64_t policy = read_policy(a.large);
  const bool falls = a.falls;

  // Whether any column of a lane's vector may be seen: those that may not are neither read nor raised to any power.
  auto shows = [&](int v) {
    const int i = at.lane + v * C::kLanes;
    return i < at.count && (!kMasked || (at.skip + i) * N < seen);
  };
  uint4 raw[C::kHeld];
#pragma unroll
  for (int v = 0; v < C::kHeld; ++v) {
    const char* from = x_row + (at.lane + v * C::kLanes) * 16;
    raw[v] = make_uint4(0, 0, 0, 0);
    if (shows(v))
      raw[v] = kNear ? load_vector(from) : kMasked ? load_vector_once(from, policy) : load_vector(from, policy);
  }

  // Asked for while x is still on its way, where a thread has registers for it.
  constexpr bool kMaskFirst = kMasked && C::kHeld * N <= 32;
  ConstantVector<N> mask[kMaskFirst ? C::kHeld : 1];
  auto load_mask = [&](int v, ConstantVector<N>& to) {
    if constexpr (kMasked) {
      if (mask_row != nullptr && shows(v)) to.load(mask_row, a.mask.dtype, at.skip + at.lane + v * C::kLanes);
    }
  };
#pragma unroll
  for (int v = 0; kMaskFirst && v < C::kHeld; ++v) load_mask(v, mask[v]);

  // What waits: x, with a mask in fp32, until its powers take its place or are made once more.
  constexpr bool kPowers = C::kSoon || (kMasked && kPowersWait<X>);
  std::conditional_t<kMasked || kPowers, FloatVector<X>, PackedVector<X>> held[C::kHeld];
  Power<X> mine = {-infinity(), 0.0f};  // of the row, or of the part of it that this block has
  if constexpr (kMasked) {
#pragma unroll
    for (int v = 0; v < C::kHeld; ++v) {
      if (!shows(v)) continue;
      float value[N], added[N] = {};
      unpack<X>(raw[v], value);
      if (!kMaskFirst) load_mask(v, mask[0]);
      if (mask_row != nullptr) mask[kMaskFirst ? v : 0].get(a.mask.dtype, added);
      mask_values(a.scale, added, seen - (at.skip + at.lane + v * C::kLanes) * N, value);
      held[v].set(value);
      mine.top = largest(value, mine.top);
    }
  } else {
    float smallest = infinity();
#pragma unroll
    for (int v = 0; v < C::kHeld; ++v) {
      if (!shows(v)) continue;
      if (unlikely(falls)) {
        smallest = extreme<X, true>(raw[v], smallest);
      } else {
        mine.top = extreme<X, false>(raw[v], mine.top);
      }
    }
    if (falls) mine.top = -smallest;
  }
  constexpr int kTogether = kWide ? C::kThreads : C::kLanes;  // threads of a row
  mine.top = row_max<kTogether, C::kSoon>(mine.top, scratch[0] + at.group * C::kLanes / kWarp);
  const Level near = a.level(mine.top, falls);
#pragma unroll
  for (int v = 0; v < C::kHeld; ++v) {
    if constexpr (!kMasked && !kPowers) held[v].raw = raw[v];
    if (!shows(v)) continue;
    float value[N];
    if constexpr (kMasked) {
      held[v].get(value);
    } else {
      unpack<X>(raw[v], value);
    }
    to_powers<X>(value, near);
    mine.sum += sum_of(value);
    if constexpr (kPowers) held[v].set(value);
  }
  if constexpr (kWide) {
    float sums[1] = {mine.sum};
    wide_sums<C::kLanes, C::kVecs>(sums, scratch[1]);
    mine.sum = sums[0];
  } else {
    mine.sum = row_sum<C::kLanes, C::kSoon>(mine.sum, scratch[1] + at.group * C::kLanes / kWarp);
  }
  Power<X> whole = mine;
  if constexpr (kParted) {
    exchange.share({mine.top, mine.sum}, a.parts.count, at.rank);
    whole = sum_of_parts<X>(a.parts.count, a.unit,
                            [&](int p) { return Power<X>{exchange.values[p][0], exchange.values[p][1]}; });
  }
  const float inverse = kMasked && whole.sum == 0.0f ? 0.0f : Base<X>::inverse(whole.sum);
  const Level level = kParted ? a.level(whole.top, falls) : near;
  const float share = kParted && kPowers ? mine.share(whole.top, a.unit) * inverse : inverse;
  char* y_row = a.y + offset;
#pragma unroll
  for (int v = 0; v < C::kHeld; ++v) {
    const int i = at.lane + v * C::kLanes;
    if (i >= at.count) continue;
    float value[N];
    if (!kMasked || shows(v)) {
      if constexpr (!kPowers) held[v].forget();
      held[v].get(value);
      if (!kPowers) to_powers<X>(value, level);
#pragma unroll
      for (float& one : value) one *= share;
    } else {
#pragma unroll
      for (float& one : value) one = 0.0f * inverse;  // NaN where the row has one
    }
    store_floats<X>(y_row + i * 16, value);
  }
}

// Any strides, any alignment, any mask: elements one by one, a row by the lanes that would hold it or its parts.
template <typename X, int kLanes>
__global__ void __launch_bounds__(any_threads(kLanes), 1024 / any_threads(kLanes))
    softmax_forward_any_kernel(const __grid_constant__ ForwardArgs a) {
  constexpr int N = kVec<X>;
  __shared__ float scratch[2][any_threads(kLanes) / kWarp];
  const int group = threadIdx.x / kLanes;
  const int lane = threadIdx.x % kLanes;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * (any_threads(kLanes) / kLanes) + group;
  const int width = index < a.rows ? a.width : 0;
  const int64_t row = index < a.rows ? index : 0;
  const bool masked = a.masked;
  const int seen = a.visible(row);
  const char* x_row = a.x_rows.any_row(row);
  const char* mask_row = a.mask.present() ? a.mask.any_row(row) : nullptr;
  auto values = [&](const Span& span, float (&value)[N]) {
    load_elements(x_row, kDType<X>, a.x_rows.column_stride, span.until(seen), value);
    if (!masked) return;
    float mask[N] = {};
    if (a.mask.present()) load_elements(mask_row, a.mask.dtype, a.mask.column_stride, span, mask);
    mask_values(a.scale, mask, span.until(seen).template count<N>(), value);
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
    float top = -infinity(), sum = 0.0f;
    each(begin, end, [&](const Span&, float (&value)[N], int here) {
#pragma unroll
      for (float& one : value) one = a.falls ? -one : one;
      top = largest(value, top, here);
    });
    top = row_max<kLanes>(top, scratch[0] + group * kLanes / kWarp);
    const Level near = a.level(top, a.falls);
    each(begin, end, [&](const Span&, float (&value)[N], int here) {
      to_powers<X>(value, near);
      sum += sum_of(value, here);
    });
    met[part] = {top, row_sum<kLanes>(sum, scratch[1] + group * kLanes / kWarp)};
  }
  const Power<X> whole =
      a.parts.count == 1 ? met[0] : sum_of_parts<X>(a.parts.count, a.unit, [&](int p) { return met[p]; });
  const float inverse = masked && whole.sum == 0.0f ? 0.0f : Base<X>::inverse(whole.sum);
  char* y_row = a.y + row_offset<X, false>(row, a.width);
  for (int part = 0; part < a.parts.count; ++part) {
    const int begin = part * a.parts.vectors * N, end = min(width, begin + a.parts.vectors * N);
    const bool powers = masked && kPowersWait<X> && a.parts.count > 1;
    const Level level = a.level(powers ? met[part].top : whole.top, a.falls);
    const float share = powers ? met[part].share(whole.top, a.unit) * inverse : inverse;
    each(begin, end, [&](const Span& span, float (&value)[N], int) {
      to_powers<X>(value, level);
#pragma unroll
      for (float& one : value) one *= share;
      store_elements(y_row, kDType<X>, span, value);
    });
  }
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
    softmax_backward_kernel(const __grid_constant__ std::conditional_t<C::kNear, NearBackward, BackwardArgs> a) {
  constexpr int N = kVec<X>;
  constexpr bool kNear = C::kNear, kWide = C::kKind == Kind::kWide;
  __shared__ alignas(16) float scratch[C::kThreads / kWarp];
  __shared__ std::conditional_t<kParted, Exchange<1>, char> exchange;
  if constexpr (kParted) exchange.init();
  const Place<X, C, kParted> at(a.cut(), a.rows, a.width);
  const int64_t offset = row_offset<X, kNear>(at.row, a.width) + at.skip * 16;
  const char *dy_row = a.dy + offset, *y_row = a.y + offset;
  if constexpr (!kNear) {
    if (unlikely(!a.adjacent)) {
      dy_row = a.dy_rows.row(at.row) + at.skip * 16, y_row = a.y_rows.row(at.row) + at.skip * 16;
    }
  } else if constexpr (C::kSoon) {  // of the thread's first vector
    dy_row = now(now(a.dy) + (offset + at.lane * 16)), y_row = now(now(a.y) + (offset + at.lane * 16));
  } else {
    warm(dy_row), warm(y_row), warm(a.dx + offset);
  }
  const uint64_t policy = read_policy(a.large);
  Loaded<X, X, true> loaded[C::kHeld];  // dy, and y in the residual's place
#pragma unroll
  for (int v = 0; v < C::kHeld; ++v) {
    const int i = at.lane + v * C::kLanes;
    if constexpr (C::kSoon) {
      const int step = v * C::kLanes * 16;
      loaded[v].load_if(i < at.count, dy_row + step, y_row + step, Global{});
    } else if constexpr (kNear) {
      loaded[v].load_if(i < at.count, dy_row + i * 16, y_row + i * 16);
    } else {
      loaded[v].load_if(i < at.count, dy_row + i * 16, y_row + i * 16, policy);
    }
  }
  float dot = 0.0f;
#pragma unroll
  for (int v = 0; v < C::kHeld; ++v) {
    float dy[N], y[N];
    unpack<X>(loaded[v].x, dy), unpack<X>(loaded[v].residual[0], y);
    dot += sum_of_products(dy, y);
  }
  if constexpr (kWide) {
    float dots[1] = {dot};
    wide_sums<C::kLanes, C::kVecs>(dots, scratch);
    dot = dots[0];
  } else {
    dot = row_sum<C::kLanes, C::kSoon>(dot, scratch + at.group * C::kLanes / kWarp);
  }
  if constexpr (kParted) {
    exchange.share({dot}, a.parts.count, at.rank);
    dot = 0.0f;
    for (int p = 0; p < a.parts.count; ++p) dot += exchange.values[p][0];
  }
  char* dx_row = a.dx + offset;
#pragma unroll
  for (int v = 0; v < C::kHeld; ++v) {
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
  const char* dy_row = a.dy_rows.any_row(row);
  const char* y_row = a.y_rows.any_row(row);
  auto load = [&](const Span& span, float (&dy)[N], float (&y)[N]) {
    load_elements(dy_row, kDType<X>, a.dy_rows.column_stride, span, dy);
    load_elements(y_row, kDType<X>, a.y_rows.column_stride, span, y);
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
    store_elements(a.dx + row_offset<X, false>(row, a.width), kDType<X>, span, dy);
  }
}

// ---- launchers ----

template <typename X, bool kMasked>
struct ForwardKernels {
  using Whole = std::conditional_t<kMasked, MaskedConfigs, UpTo1024Vectors>;
  static constexpr bool kEveryKind = !kMasked;
  template <typename C, bool kParted>
  static auto of() {
    return softmax_forward_kernel<X, C, kParted, kMasked>;
  }
  template <int kLanes>
  static auto any() {
    return softmax_forward_any_kernel<X, kLanes>;
  }
};

template <typename X>
struct BackwardKernels {
  using Whole = UpTo1024Vectors;
  static constexpr bool kEveryKind = true;
  template <typename C, bool kParted>
  static auto of() {
    return softmax_backward_kernel<X, C, kParted>;
  }
  template <int kLanes>
  static auto any() {
    return softmax_backward_any_kernel<X, kLanes>;
  }
};

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
    a.x = a.x_rows.data, a.adjacent = a.x_rows.adjacent;
    a.y = static_cast<char*>(y.data);
    a.rows = rows, a.width = static_cast<int32_t>(width), a.scale = static_cast<float>(scale);
    // A scale of 0 is for the kernel that multiplies by it first: the score of a lane without a value would be NaN.
    const bool masked = causal || mask.present() || a.scale == 0.0f;
    a.unit = std::fmin(softmax::Base<X>::kUnit * (masked ? 1.0f : std::fabs(a.scale)), FLT_MAX),
    a.falls = !masked && scale < 0.0;
    a.masked = masked, a.causal = causal, a.queries = causal ? static_cast<int32_t>(x.sizes[x.rank - 2]) : 1;
    a.by_queries = Divisor(static_cast<uint32_t>(a.queries));
    const int last = a.mask.outer - 1;
    a.shared = a.mask.vectors && last > 0 && a.mask.strides[last - 1] == 0;
    if (a.shared) a.heads = a.mask.divisors[last - 1], a.rows_apart = a.mask.divisors[last];
    a.parts = softmax::parts_of<X>(width);
    a.chained = facts.capability >= 90 && rows <= 2 * facts.multiprocessors;
    a.large = 2 * rows * width * static_cast<int64_t>(sizeof(X)) > facts.l2_bytes;
    const bool vectors = a.x_rows.vectors && a.mask.vectors;
    a.adjacent &= !a.falls;  // the kernels for rows that follow one another do not ask for it
    const auto launch = masked ? softmax::launch_rows<X, softmax::ForwardKernels<X, true>, softmax::ForwardArgs>
                               : softmax::launch_rows<X, softmax::ForwardKernels<X, false>, softmax::ForwardArgs>;
    return launch(a, rows, vectors, facts, guard.device(), cuda_stream(stream));
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
    a.dy_rows = make_rows(dy, width, kVec<X>), a.y_rows = make_rows(y, width, kVec<X>);
    a.dy = a.dy_rows.data, a.y = a.y_rows.data, a.adjacent = a.dy_rows.adjacent && a.y_rows.adjacent;
    a.dx = static_cast<char*>(dx.data);
    a.rows = rows, a.width = static_cast<int32_t>(width), a.scale = static_cast<float>(scale);
    a.parts = softmax::parts_of<X>(width);
    a.large = 3 * rows * width * static_cast<int64_t>(sizeof(X)) > facts.l2_bytes;
    return softmax::launch_rows<X, softmax::BackwardKernels<X>>(a, rows, a.dy_rows.vectors && a.y_rows.vectors, facts,
                                                                guard.device(), cuda_stream(stream));
  });
}

}  // namespace fuselm
