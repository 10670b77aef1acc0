// RMSNorm, forward and backward: y = h / rms(h) * (offset + weight), h = x or x + residual. Contract: rms_norm.py.
//
// Traffic. Forward reads x once and writes y once: the row waits in registers for its own sum. Backward reads dy and h
// once and writes dx once: rows come to shared memory ahead of use, and the weight's gradient is summed in registers
// over all rows a block sees; each block leaves one partial row, and a second kernel adds the partial rows in a fixed
// order. No atomics: results are bitwise repeatable, and a row's result does not depend on the other rows.
//
// Threads. `kLanes` threads own a row, up to kVecs vectors of 16 bytes each; narrow rows share a block. How many lanes,
// and so the order of a row's sum, follows from the width alone. Rows too wide for a configuration take the *_wide
// kernels, rows that are not whole aligned vectors (odd widths, odd strides, expanded tensors) the *_any kernels:
// slower, same order of sums.
#include <cmath>

#include "rows.cuh"

namespace fuselm {
namespace {

// ---- forward -------------------------------------------------------------------------------------------------------

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
constexpr int kWideLanes = 1024;

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
template <typename X, typename H, bool kResidual, bool kUsual>
__global__ void __launch_bounds__(kWideLanes, fitting_blocks(kWideLanes, kResidual ? 1 : 2))
    rms_norm_forward_wide_kernel(const __grid_constant__ ForwardArgs a) {
  constexpr int kH = kVec<X> * sizeof(H);
  __shared__ float scratch[kWideLanes / kWarp];
  const int64_t row = blockIdx.x;
  const int count = a.width / kVec<X>;
  const char* x_row = a.x_row(row);
  const char* residual_row = kResidual ? a.residual_row(row) : nullptr;
  char* h_row = a.residual_out + row * a.width * static_cast<int64_t>(sizeof(H));
  char* y_row = a.y + row * a.width * static_cast<int64_t>(sizeof(X));
  const uint64_t policy = read_policy(a.large);

  float sum = 0.0f;
#pragma unroll 4
  for (int at = threadIdx.x; at < count; at += kWideLanes) {
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
  sum = row_sum<kWideLanes>(sum, scratch);
  const float rstd = inverse_rms<X>(sum, a.inverse_width, a.eps);
  if (a.rstd != nullptr && threadIdx.x == 0) a.rstd[row] = rstd;

#pragma unroll 2
  for (int at = threadIdx.x; at < count; at += kWideLanes) {
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

// Any strides, any alignment, any mix of dtypes: elements one by one. kPlain is what an odd width leaves of that: no
// residual, a weight of x's dtype, columns next to each other; all loads of a span can then be under way together.
template <typename X, int kLanes, bool kPlain>
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
  const bool summed = !kPlain && a.residual_rows.present();
  const int64_t column_stride = kPlain ? 1 : a.x_rows.column_stride;
  const char* x_row = a.x_rows.any_row(row);
  const char* residual_row = a.residual_rows.any_row(row);
  char* h_row = a.residual_out + row * a.width * element_bytes(h_dtype);
  char* y_row = a.y + row * a.width * static_cast<int64_t>(sizeof(X));

  float sum = 0.0f;
  for (int base = 0; base < width; base += kLanes * N) {
    const Span span = span_of<N, kLanes>(lane, base, width);
    float h[N];
    load_elements(x_row, kDType<X>, column_stride, span, h);
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
      load_elements(x_row, kDType<X>, column_stride, span, h);
    }
    load_weight_elements<kPlain, X>(a.weight_rows, a.offset, span, weight);
#pragma unroll
    for (int i = 0; i < N; ++i) h[i] = normalised<X>(h[i], rstd, a.round_first) * weight[i];
    store_elements(y_row, kDType<X>, span, h);
  }
}

template <typename X, int kLanes>
void launch_forward_any(const ForwardArgs& a, cudaStream_t stream) {
  constexpr int kThreads = any_threads(kLanes);
  const bool plain = !a.residual_rows.present() && is_plain<X>(a.x_rows) && is_plain<X>(a.weight_rows);
  const auto kernel =
      plain ? rms_norm_forward_any_kernel<X, kLanes, true> : rms_norm_forward_any_kernel<X, kLanes, false>;
  kernel<<<static_cast<unsigned>(divide_up(a.rows, kThreads / kLanes)), kThreads, 0, stream>>>(a);
}

template <typename X, typename H, bool kResidual, bool kUsual>
Status launch_forward_vectors(ForwardArgs& a, int device, cudaStream_t stream) {
  const int64_t count = a.width / kVec<X>;
  const DeviceFacts& facts = device_facts(device);
  const bool few = a.rows <= 2 * facts.multiprocessors;
  a.chained = few && facts.capability >= 90;
  a.large = 2 * a.rows * a.width * static_cast<int64_t>(sizeof(X)) > facts.l2_bytes;
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
  rms_norm_forward_wide_kernel<X, H, kResidual, kUsual><<<static_cast<unsigned>(a.rows), kWideLanes, 0, stream>>>(a);
  return launch_status();
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
  if (a.x_rows.vectors && a.weight_rows.vectors && a.residual_rows.vectors) {
    if (residual == DType::kAbsent) return launch_forward_vectors<X, X, false>(a, device, stream);
    if (residual == kDType<X>) return launch_forward_vectors<X, X, true>(a, device, stream);
    if (residual == DType::kFloat32) return launch_forward_vectors<X, float, true>(a, device, stream);
  }
  auto any = [&](auto config) { launch_forward_any<X, decltype(config)::kLanes>(a, stream); };
  if (!ForwardConfigs::pick(divide_up(a.width, kVec<X>), any)) launch_forward_any<X, kWideLanes>(a, stream);
  return launch_status();
}

// ---- backward ------------------------------------------------------------------------------------------------------

// Each is the fastest of a sweep on an H200, docs/log.md. Few blocks leave few partial rows to add up; at 1024 and
// below many small ones wait less for each other.
using BackwardConfigs16 =
    ConfigList<Config<8, 1, 256, 4>, Config<16, 1, 256, 4>, Config<32, 1, 256, 4>, Config<32, 2, 256, 2>,
               Config<32, 3, 128, 4>, Config<64, 2, 256, 2>, Config<128, 2, 512, 1>, Config<256, 2, 512, 1>,
               Config<512, 2, 512, 1>, Config<512, 4, 512, 1>>;
using BackwardConfigs32 =
    ConfigList<Config<8, 1, 256, 4>, Config<16, 1, 256, 4>, Config<32, 1, 256, 4>, Config<32, 2, 256, 2>,
               Config<32, 3, 128, 4>, Config<64, 2, 256, 2>, Config<128, 2, 512, 1>, Config<256, 2, 512, 1>,
               Config<512, 2, 512, 1>, Config<512, 4, 512, 1>, Config<512, 8, 512, 1>>;
template <typename X>
using BackwardConfigs = std::conditional_t<sizeof(X) == 4, BackwardConfigs32, BackwardConfigs16>;

constexpr int kMaxStages = 3;
constexpr int64_t kStageLimit = 128 << 10;  // bytes a block has under way: with more 8192x16384 is 3 % slower
constexpr int kMostBlocks = 4;              // of the configurations above
constexpr int kWideThreads = 1024;
constexpr int kWideColumnThreads = 128;
constexpr int kWideBlocks = 16;  // of kWideColumnThreads, wanted on a multiprocessor

struct BackwardArgs {
  Rows dy, h, weight_rows, dresidual_out;
  const char* weight;
  DType weight_dtype;
  char *dx, *dresidual;  // contiguous; dresidual is null when it would be dx again
  const float* rstd;
  float* partial;  // one row of `partial_stride` floats per block; null when the weight's gradient is not wanted
  int64_t partial_stride;
  int64_t rows;
  int32_t width;
  float inverse_width, offset;
  int stages;  // rounds of rows a block has under way in shared memory
  bool large;  // dy, h and dx together are larger than L2
};

// Where the rows of one round are in shared memory: those of dy, then of h, then of the sum's gradient.
template <typename X, typename H, typename C>
struct Stage {
  static constexpr int kH = kVec<X> * sizeof(H);
  char* base;
  int vectors;

  __host__ __device__ static int bytes(int vectors, bool with_residual) {
    return C::kGroups * vectors * (16 + kH + (with_residual ? kH : 0));
  }
  __device__ char* dy(int group) const { return base + group * vectors * 16; }
  __device__ char* h(int group) const { return base + C::kGroups * vectors * 16 + group * vectors * kH; }
  __device__ char* r(int group) const { return h(group) + C::kGroups * vectors * kH; }

  // Asks for the kGroups rows from `first` on.
  __device__ void fetch(const BackwardArgs& a, int64_t first, uint64_t* arrived) const {
    if (!fetches()) return;
    const int here = a.rows - first < C::kGroups ? static_cast<int>(a.rows - first) : C::kGroups;
    const bool with_residual = a.dresidual_out.present();
    expect_bytes(arrived, here * vectors * (16 + kH + (with_residual ? kH : 0)));
    const uint64_t policy = read_policy(a.large);
    fetch_rows<C, 16>(a.dy, first, here, vectors, dy(0), arrived, policy);
    fetch_rows<C, kH>(a.h, first, here, vectors, h(0), arrived, policy);
    if (with_residual) fetch_rows<C, kH>(a.dresidual_out, first, here, vectors, r(0), arrived, policy);
  }
};

// Waits for the oldest of the rounds under way.
__device__ inline void wait_for_round(const BackwardArgs& a, uint64_t* arrived, int parity) {
  if (kCopyEngine) {
    wait_for_bytes(arrived, parity);
  } else if (a.stages == 3) {
    copy_async_wait<2>();
  } else if (a.stages == 2) {
    copy_async_wait<1>();
  } else {
    copy_async_wait<0>();
  }
}

// dx, and dw into this thread's sums, for one vector. With s = mean(dy * w * xhat) the docstring's formula is
// dy * rstd * w - h * (rstd^2 * s) + dh: two roundings before the last.
template <int N>
__device__ inline void gradients(const float (&dy)[N], const float (&h)[N], const float (&weight)[N], float rstd,
                                 float slope, float (&dx)[N], float (&dw)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const float scaled = dy[i] * rstd;
    dw[i] = fmaf(scaled, h[i], dw[i]);
    dx[i] = fmaf(scaled, weight[i], -(h[i] * slope));
  }
}

template <int N>
__device__ inline void add(const float (&from)[N], float (&to)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) to[i] += from[i];
}

// Leaves this block's share of dw in its partial row. Groups of the block meet in shared memory, in order.
template <typename X, typename C>
__device__ inline void store_partial(const BackwardArgs& a, int group, int lane, float* shared,
                                     const float (&dw)[C::kVecs][kVec<X>]) {
  constexpr int N = kVec<X>;
  float* out = a.partial + blockIdx.x * a.partial_stride;
  float* mine = C::kGroups > 1 ? shared + group * a.width : out;
  if (C::kGroups > 1) __syncthreads();  // the rows' memory is about to be used for something else
#pragma unroll
  for (int v = 0; v < C::kVecs; ++v) {
    const int column = (lane + v * C::kLanes) * N;
    if (column < a.width) store_floats<float>(mine + column, dw[v]);
  }
  if (C::kGroups == 1) return;
  __syncthreads();
#pragma unroll 1
  for (int column = threadIdx.x * 4; column < a.width; column += C::kThreads * 4) {
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int g = 0; g < C::kGroups; ++g) {
      const float4 share = *reinterpret_cast<const float4*>(shared + g * a.width + column);
      sum.x += share.x, sum.y += share.y, sum.z += share.z, sum.w += share.w;
    }
    *reinterpret_cast<float4*>(out + column) = sum;
  }
}

// A block takes kGroups rows a round, every gridDim.x-th round. What a thread reads for the row's sum it keeps for dx
// where there are registers (kKeep); else it reads shared memory twice.
template <typename X, typename H, typename C>
__global__ void __launch_bounds__(C::kThreads, fitting_blocks(C::kThreads, C::kBlocks))
    rms_norm_backward_kernel(const __grid_constant__ BackwardArgs a) {
  constexpr int N = kVec<X>;
  constexpr int kH = N * sizeof(H);
  constexpr bool kKeep = C::kVecs * N <= 24;
  extern __shared__ __align__(128) uint4 stage_bytes[];
  __shared__ uint64_t arrived[kMaxStages];
  __shared__ float scratch[2][C::kThreads / kWarp];
  const int group = threadIdx.x / C::kLanes;
  const int lane = threadIdx.x % C::kLanes;
  const int vectors = a.width / N;
  const int size = Stage<X, H, C>::bytes(vectors, a.dresidual_out.present());
  const int64_t step = static_cast<int64_t>(gridDim.x) * C::kGroups;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * C::kGroups;
  auto stage_at = [&](int s) { return Stage<X, H, C>{reinterpret_cast<char*>(stage_bytes) + s * size, vectors}; };

  if (threadIdx.x < a.stages) init_barrier(&arrived[threadIdx.x]);
  __syncthreads();  // nobody asks a barrier before it is there
#pragma unroll 1
  for (int s = 0; s + 1 < a.stages; ++s) {
    if (first + s * step < a.rows) stage_at(s).fetch(a, first + s * step, &arrived[s]);
    copy_async_commit();
  }

  float weight[C::kVecs][N], dw[C::kVecs][N] = {};
  load_weights<X, C>(a.weight, a.weight_dtype, a.offset, lane, vectors, weight);

  float next_rstd = first + group < a.rows ? a.rstd[first + group] : 0.0f;
  int s = 0, parity = 0, side = 0;
  const bool early = kKeep && !a.dresidual_out.present();
  // The bound is the block's, not the row's: every thread of the block makes the same number of rounds.
  for (int64_t round = first; round < a.rows; round += step) {
    // The stage of the last round is free once every thread has read it for the last time: where rows are kept that was
    // before they met in row_sum. (In the first round the stage is one that nobody has used.)
    if (!early || C::kLanes <= kWarp) __syncthreads();
    const int64_t ahead = round + (a.stages - 1) * step;
    const int free = s == 0 ? a.stages - 1 : s - 1;
    if (ahead < a.rows) stage_at(free).fetch(a, ahead, &arrived[free]);
    copy_async_commit();

    const Stage<X, H, C> stage = stage_at(s);
    const int64_t row = round + group;
    const int count = row < a.rows ? vectors : 0;
    char* const dx_row = a.dx + row * a.width * static_cast<int64_t>(sizeof(X));
    char* const dresidual_row = a.dresidual + row * a.width * static_cast<int64_t>(sizeof(H));
    const float rstd = next_rstd;
    next_rstd = row + step < a.rows ? a.rstd[row + step] : 0.0f;
    wait_for_round(a, &arrived[s], parity);

    Loaded<X, H, true> kept[kKeep ? C::kVecs : 1];  // dy, and h in the residual's place
    float dot = 0.0f;
#pragma unroll
    for (int v = 0; v < C::kVecs; ++v) {
      const int at = lane + v * C::kLanes;
      Loaded<X, H, true>& loaded = kept[kKeep ? v : 0];
      loaded.load_if(at < count, stage.dy(group) + at * 16, stage.h(group) + at * kH);
      float dy[N], h[N];
      unpack<X>(loaded.x, dy);
      load_floats<H>(loaded.residual, h);
#pragma unroll
      for (int i = 0; i < N; ++i) dot = fmaf(dy[i] * weight[v][i], h[i], dot);
    }
    dot = row_sum<C::kLanes>(dot, &scratch[side][group * C::kLanes / kWarp]);
    const float slope = dot * a.inverse_width * rstd * rstd * rstd;

#pragma unroll
    for (int v = 0; v < C::kVecs; ++v) {
      const int at = lane + v * C::kLanes;
      Loaded<X, H, true>& loaded = kept[kKeep ? v : 0];
      if (!kKeep) loaded.load_if(at < count, stage.dy(group) + at * 16, stage.h(group) + at * kH);
      float dy[N], h[N], dx[N];
      unpack<X>(loaded.x, dy);
      load_floats<H>(loaded.residual, h);
      gradients(dy, h, weight[v], rstd, slope, dx, dw[v]);
      if (at >= count) continue;
      if (a.dresidual_out.present()) {
        load_floats<H>(stage.r(group) + at * kH, h);
        add(h, dx);
      }
      store_floats<X>(dx_row + at * 16, dx);
      if (a.dresidual != nullptr) store_floats<H>(dresidual_row + at * kH, dx);
    }
    side ^= 1;
    if (++s == a.stages) s = 0, parity ^= 1;
  }
  copy_async_wait<0>();
  allow_next_kernel();
  if (a.partial != nullptr) store_partial<X, C>(a, group, lane, reinterpret_cast<float*>(stage_bytes), dw);
}

// dx of a row that no configuration holds: one block, one row, read twice.
template <typename X, typename H>
__global__ void __launch_bounds__(kWideThreads) rms_norm_backward_wide_kernel(const __grid_constant__ BackwardArgs a) {
  constexpr int N = kVec<X>;
  constexpr int kH = N * sizeof(H);
  __shared__ float scratch[kWideThreads / kWarp];
  const int64_t row = blockIdx.x;
  const int count = a.width / N;
  const char* dy_row = a.dy.row(row);
  const char* h_row = a.h.row(row);
  const char* r_row = a.dresidual_out.row(row);
  const float rstd = a.rstd[row];

  float dot = 0.0f;
#pragma unroll 2
  for (int at = threadIdx.x; at < count; at += kWideThreads) {
    float dy[N], h[N], weight[N];
    load_floats<X>(dy_row + at * 16, dy);
    load_floats<H>(h_row + at * kH, h);
    load_weight(a.weight, a.weight_dtype, a.offset, at, weight);
#pragma unroll
    for (int i = 0; i < N; ++i) dot = fmaf(dy[i] * weight[i], h[i], dot);
  }
  dot = row_sum<kWideThreads>(dot, scratch);
  const float slope = dot * a.inverse_width * rstd * rstd * rstd;

#pragma unroll 2
  for (int at = threadIdx.x; at < count; at += kWideThreads) {
    float dy[N], h[N], weight[N], dx[N], unused[N] = {};
    load_floats<X>(dy_row + at * 16, dy);
    load_floats<H>(h_row + at * kH, h);
    load_weight(a.weight, a.weight_dtype, a.offset, at, weight);
    gradients(dy, h, weight, rstd, slope, dx, unused);
    if (a.dresidual_out.present()) {
      load_floats<H>(r_row + at * kH, h);
      add(h, dx);
    }
    const int64_t element = row * a.width + at * N;
    store_floats<X>(a.dx + element * static_cast<int64_t>(sizeof(X)), dx);
    if (a.dresidual != nullptr) store_floats<H>(a.dresidual + element * static_cast<int64_t>(sizeof(H)), dx);
  }
}

// dw of such rows: blockIdx.x picks columns, blockIdx.y every gridDim.y-th row.
template <typename X, typename H>
__global__ void __launch_bounds__(kWideColumnThreads)
    rms_norm_backward_wide_weight_kernel(const __grid_constant__ BackwardArgs a) {
  constexpr int N = kVec<X>;
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kWideColumnThreads + threadIdx.x;
  if (at * N >= a.width) return;
  float dw[N] = {};
#pragma unroll 4
  for (int64_t row = blockIdx.y; row < a.rows; row += gridDim.y) {
    float dy[N], h[N];
    load_floats<X>(a.dy.row(row) + at * 16, dy);
    load_floats<H>(a.h.row(row) + at * N * static_cast<int64_t>(sizeof(H)), h);
    const float rstd = a.rstd[row];
#pragma unroll
    for (int i = 0; i < N; ++i) dw[i] = fmaf(dy[i] * rstd, h[i], dw[i]);
  }
  store_floats<float>(a.partial + blockIdx.y * a.partial_stride + at * N, dw);
}

// Backward for any strides, alignment and dtypes, dx and dw apart as for wide rows; kPlain as in forward.
template <typename X, int kLanes, bool kPlain>
__global__ void __launch_bounds__(any_threads(kLanes), 1024 / any_threads(kLanes))
    rms_norm_backward_any_kernel(const __grid_constant__ BackwardArgs a) {
  constexpr int N = kVec<X>;
  __shared__ float scratch[any_threads(kLanes) / kWarp];
  const int group = threadIdx.x / kLanes;
  const int lane = threadIdx.x % kLanes;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * (any_threads(kLanes) / kLanes) + group;
  const int width = index < a.rows ? a.width : 0;
  const int64_t row = index < a.rows ? index : 0;
  const char* dy_row = a.dy.any_row(row);
  const char* h_row = a.h.any_row(row);
  const char* r_row = a.dresidual_out.any_row(row);
  const float rstd = a.rstd[row];
  const DType h_dtype = kPlain ? kDType<X> : a.h.dtype;
  const int64_t dy_stride = kPlain ? 1 : a.dy.column_stride, h_stride = kPlain ? 1 : a.h.column_stride;

  float dot = 0.0f;
  for (int base = 0; base < width; base += kLanes * N) {
    const Span span = span_of<N, kLanes>(lane, base, width);
    float dy[N], h[N], weight[N];
    load_elements(dy_row, kDType<X>, dy_stride, span, dy);
    load_elements(h_row, h_dtype, h_stride, span, h);
    load_weight_elements<kPlain, X>(a.weight_rows, a.offset, span, weight);
#pragma unroll
    for (int i = 0; i < N; ++i) dot = fmaf(dy[i] * weight[i], h[i], dot);
  }
  dot = row_sum<kLanes>(dot, scratch + group * kLanes / kWarp);
  const float slope = dot * a.inverse_width * rstd * rstd * rstd;

  for (int base = 0; base < width; base += kLanes * N) {
    const Span span = span_of<N, kLanes>(lane, base, width);
    float dy[N], h[N], weight[N], dx[N], unused[N] = {};
    load_elements(dy_row, kDType<X>, dy_stride, span, dy);
    load_elements(h_row, h_dtype, h_stride, span, h);
    load_weight_elements<kPlain, X>(a.weight_rows, a.offset, span, weight);
    gradients(dy, h, weight, rstd, slope, dx, unused);
    if (!kPlain && a.dresidual_out.present()) {
      load_elements(r_row, a.dresidual_out.dtype, a.dresidual_out.column_stride, span, h);
      add(h, dx);
    }
    store_elements(a.dx + row * a.width * static_cast<int64_t>(sizeof(X)), kDType<X>, span, dx);
    if (!kPlain && a.dresidual != nullptr) {
      store_elements(a.dresidual + row * a.width * element_bytes(h_dtype), h_dtype, span, dx);
    }
  }
}

// blockIdx.x picks columns, blockIdx.y every gridDim.y-th row; a thread has kRows of them under way at a time.
template <typename X, bool kPlain>
__global__ void __launch_bounds__(kWideColumnThreads)
    rms_norm_backward_any_weight_kernel(const __grid_constant__ BackwardArgs a) {
  constexpr int kRows = 8;
  const int column = static_cast<int>(blockIdx.x) * kWideColumnThreads + static_cast<int>(threadIdx.x);
  const Span span{column, 1, a.width};
  const DType h_dtype = kPlain ? kDType<X> : a.h.dtype;
  float dw = 0.0f;
  for (int64_t row = blockIdx.y; row < a.rows; row += kRows * gridDim.y) {
    float dy[kRows][1], h[kRows][1], rstd[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int64_t at = row + r * static_cast<int64_t>(gridDim.y);
      const int64_t there = at < a.rows ? at : row;  // loaded for nothing
      const char* dy_row = kPlain ? a.dy.data + there * a.dy.strides[0] : a.dy.any_row(there);
      const char* h_row = kPlain ? a.h.data + there * a.h.strides[0] : a.h.any_row(there);
      load_elements(dy_row, kDType<X>, kPlain ? 1 : a.dy.column_stride, span, dy[r]);
      load_elements(h_row, h_dtype, kPlain ? 1 : a.h.column_stride, span, h[r]);
      rstd[r] = a.rstd[there];
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (row + r * static_cast<int64_t>(gridDim.y) < a.rows) dw = fmaf(dy[r][0] * rstd[r], h[r][0], dw);
    }
  }
  if (column < a.width) a.partial[blockIdx.y * a.partial_stride + column] = dw;
}

// dx and dw together; says through `partial_rows` how many partial rows it leaves, and false when this device's shared
// memory does not hold one round.
template <typename X, typename H, typename C>
bool launch_backward_config(BackwardArgs a, const DeviceFacts& facts, int device, cudaStream_t stream,
                            int64_t& partial_rows) {
  static std::atomic<bool> allowed[kMaxDevices];
  const int64_t stage = Stage<X, H, C>::bytes(a.width / kVec<X>, a.dresidual_out.present());
  // What a block's share of shared memory holds (each pays 1 KiB to the system too), but one round in any case.
  const int64_t room = at_most((facts.shared_bytes + 1024) / C::kBlocks - 1024 - kOwnShared, kStageLimit);
  const int64_t stages = at_most(room / stage, kMaxStages);
  a.stages = stages > 0 ? static_cast<int>(stages) : 1;
  const auto kernel = rms_norm_backward_kernel<X, H, C>;
  if (!allow_shared(kernel, device, a.stages * stage, allowed)) return false;
  partial_rows = at_most(divide_up(a.rows, C::kGroups), static_cast<int64_t>(facts.multiprocessors) * C::kBlocks);
  kernel<<<static_cast<unsigned>(partial_rows), C::kThreads, static_cast<size_t>(a.stages * stage), stream>>>(a);
  return true;
}

// The most partial rows any kernel leaves.
int64_t most_partial_rows(int64_t rows, const DeviceFacts& facts) {
  return at_most(rows, static_cast<int64_t>(facts.multiprocessors) * kMostBlocks);
}

dim3 weight_grid(const BackwardArgs& a, int64_t columns, const DeviceFacts& facts, int64_t& partial_rows) {
  const int64_t across = divide_up(columns, kWideColumnThreads);
  const int64_t down = divide_up(static_cast<int64_t>(facts.multiprocessors) * kWideBlocks, across);
  partial_rows = at_most(at_most(a.rows, down), most_partial_rows(a.rows, facts));
  return dim3(static_cast<unsigned>(across), static_cast<unsigned>(partial_rows));
}

template <typename X, int kLanes, bool kPlain>
void launch_backward_any(const BackwardArgs& a, cudaStream_t stream) {
  const unsigned blocks = static_cast<unsigned>(divide_up(a.rows, any_threads(kLanes) / kLanes));
  rms_norm_backward_any_kernel<X, kLanes, kPlain><<<blocks, any_threads(kLanes), 0, stream>>>(a);
}

template <typename X, bool kPlain>
Status launch_backward_any(const BackwardArgs& a, const DeviceFacts& facts, cudaStream_t stream,
                           int64_t& partial_rows) {
  const bool held = BackwardConfigs<X>::pick(divide_up(a.width, kVec<X>), [&](auto config) {
    launch_backward_any<X, decltype(config)::kLanes, kPlain>(a, stream);
  });
  if (!held) launch_backward_any<X, kWideThreads, kPlain>(a, stream);
  if (a.partial != nullptr) {
    const dim3 grid = weight_grid(a, a.width, facts, partial_rows);
    rms_norm_backward_any_weight_kernel<X, kPlain><<<grid, kWideColumnThreads, 0, stream>>>(a);
  }
  return launch_status();
}

template <typename X, typename H>
Status launch_backward_vectors(const BackwardArgs& a, const DeviceFacts& facts, int device, cudaStream_t stream,
                               int64_t& partial_rows) {
  bool done = false;
  const bool held = BackwardConfigs<X>::pick(a.width / kVec<X>, [&](auto config) {
    done = launch_backward_config<X, H, decltype(config)>(a, facts, device, stream, partial_rows);
  });
  if (done) return launch_status();
  // Too wide for the shared memory of this device: by the kernel with the same lanes, so with the same bits.
  if (held) return launch_backward_any<X, false>(a, facts, stream, partial_rows);
  rms_norm_backward_wide_kernel<X, H><<<static_cast<unsigned>(a.rows), kWideThreads, 0, stream>>>(a);
  if (a.partial != nullptr) {
    const dim3 grid = weight_grid(a, a.width / kVec<X>, facts, partial_rows);
    rms_norm_backward_wide_weight_kernel<X, H><<<grid, kWideColumnThreads, 0, stream>>>(a);
  }
  return launch_status();
}

template <typename X>
Status launch_backward(const BackwardArgs& a, const DeviceFacts& facts, int device, cudaStream_t stream,
                       int64_t& partial_rows) {
  const bool vectors = a.dy.vectors && a.h.vectors && a.weight_rows.vectors && a.dresidual_out.vectors;
  if (vectors && a.h.dtype == kDType<X>) return launch_backward_vectors<X, X>(a, facts, device, stream, partial_rows);
  if (vectors && a.h.dtype == DType::kFloat32) {
    return launch_backward_vectors<X, float>(a, facts, device, stream, partial_rows);
  }
  const bool plain = a.dresidual == nullptr && !a.dresidual_out.present() && is_plain<X>(a.dy) && is_plain<X>(a.h) &&
                     is_plain<X>(a.weight_rows);
  return plain ? launch_backward_any<X, true>(a, facts, stream, partial_rows)
               : launch_backward_any<X, false>(a, facts, stream, partial_rows);
}

int64_t padded_width(int64_t width) { return divide_up(width, 8) * 8; }

// No offset is -0, which changes no weight it is added to: +0 would turn a weight of -0 into +0, and a kernel that
// leaves the addition out would not give the same bits.
float exact_offset(double offset) {
  const float rounded_offset = static_cast<float>(offset);
  return rounded_offset == 0.0f ? -0.0f : rounded_offset;
}

// ---- what both passes ask of their arguments -----------------------------------------------------------------------

Status check_tensors(const TensorView& x, const TensorView& weight, const TensorView& other) {
  if (!is_float(x.dtype) || (weight.present() && !is_float(weight.dtype)) ||
      (other.present() && !is_float(other.dtype))) {
    return Status::kBadDtype;
  }
  if (x.rank < 1 || x.rank > kMaxRank) return Status::kBadShape;
  const int64_t width = x.sizes[x.rank - 1];
  if (width < 1 || width > 262144) return Status::kBadShape;
  if (weight.present() && (weight.rank != 1 || weight.sizes[0] != width)) return Status::kBadShape;
  if (other.present() && !same_sizes(other, x)) return Status::kBadShape;
  return Status::kOk;
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

int64_t rms_norm_backward_workspace(const TensorView& dy, Stream stream) {
  const DeviceGuard guard(stream.device);
  if (!guard.ok() || dy.rank < 1) return 0;
  const int64_t width = dy.sizes[dy.rank - 1];
  return most_partial_rows(count_rows(dy), device_facts(guard.device())) * padded_width(width) * sizeof(float);
}

Status rms_norm_backward(const Input& dy, const Input& h, const Input& rstd, const OptionalInput& weight,
                         const OptionalInput& dresidual_out, double offset, const Like<0>& dx, const Like<1>& dresidual,
                         const Like<3>& dweight, Workspace workspace, Stream stream) {
  Status status = check_tensors(dy, weight, h);
  if (status == Status::kOk) status = check_tensors(dy, weight, dresidual_out);
  if (status != Status::kOk) return status;
  if (!dx.present()) return Status::kBadShape;
  const int64_t rows = count_rows(dy), width = dy.sizes[dy.rank - 1];
  // A binding may not be able to tell the empty rstd of no rows from none.
  if (rows > 0 && rstd.dtype != DType::kFloat32) return Status::kBadDtype;
  if (rows > 0 && !is_row_stat(rstd, dy)) return Status::kBadShape;
  if (dresidual_out.present() && dresidual_out.dtype != h.dtype) return Status::kBadDtype;
  const DeviceGuard guard(stream.device);
  if (!guard.ok()) return Status::kBadDevice;
  const DeviceFacts& facts = device_facts(guard.device());
  if (dweight.present() && workspace.bytes < most_partial_rows(rows, facts) * padded_width(width) * 4) {
    return Status::kBadWorkspace;
  }
  return with_dtype(dy.dtype, [&](auto zero) {
    using X = decltype(zero);
    auto as_rows = [&](const TensorView& view) { return make_rows(view, width, kVec<X>); };
    BackwardArgs a = {};
    a.dy = as_rows(dy), a.h = as_rows(h), a.weight_rows = as_rows(weight), a.dresidual_out = as_rows(dresidual_out);
    a.weight = a.weight_rows.data, a.weight_dtype = weight.dtype;
    a.dx = static_cast<char*>(dx.data), a.dresidual = static_cast<char*>(dresidual.data);
    a.rstd = static_cast<const float*>(rstd.data);
    a.partial = dweight.present() ? static_cast<float*>(workspace.data) : nullptr;
    a.partial_stride = padded_width(width);
    a.rows = rows, a.width = static_cast<int32_t>(width), a.inverse_width = 1.0f / static_cast<float>(width);
    a.offset = exact_offset(offset);
    a.large = 3 * rows * width * static_cast<int64_t>(sizeof(X)) > facts.l2_bytes;
    int64_t partial_rows = 0;
    Status result = Status::kOk;
    if (rows > 0) result = launch_backward<X>(a, facts, guard.device(), cuda_stream(stream), partial_rows);
    if (result != Status::kOk || !dweight.present()) return result;
    return column_sums(a.partial, partial_rows, a.partial_stride, a.width, dweight, facts.capability >= 90,
                       cuda_stream(stream));
  });
}

}  // namespace fuselm
