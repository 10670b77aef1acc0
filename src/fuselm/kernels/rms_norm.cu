// RMSNorm, forward and backward: y = h / rms(h) * (offset + weight), h = x or x + residual. Contract: rms_norm.py.
//
// Traffic. Forward reads x once and writes y once: the row waits in registers for its own sum. Backward reads dy and h
// once and writes dx once: rows wait in shared memory, copied ahead of use, and the weight's gradient is summed in
// registers over all rows a block sees; each block leaves one partial row, and a second kernel adds the partial rows
// in a fixed order. No atomics: results are bitwise repeatable, and a row's result does not depend on the other rows.
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

// Rows that wait in registers: the narrow ones. Measured on an H200, docs/log.md.
using NarrowConfigs = ConfigList<Config<8, 1, 128, 1>, Config<16, 1, 128, 1>, Config<32, 1, 128, 1>,
                                 Config<32, 2, 128, 1>, Config<32, 3, 64, 1>, Config<64, 2, 64, 1>>;
// And a few rows of the usual kind (is_lean), where what counts is how soon the first is done: a third of the code,
// since a kernel of a microsecond waits for its instructions as much as for its data.
using FewRowsConfigs = ConfigList<Config<64, 2, 64, 1, true>, Config<64, 4, 64, 1, true>, Config<128, 4, 128, 1, true>>;

// Rows that wait in shared memory. Lanes as in FewRowsConfigs, so that a row's sum has the same bits in both.
using StagedConfigs = ConfigList<Config<64, 4, 64, 24>, Config<128, 4, 128, 12>, Config<256, 4, 256, 6>,
                                 Config<512, 4, 512, 3>, Config<1024, 4, 1024, 2>>;
using WideConfig = Config<1024, 0, 1024, 1>;  // no limit: what does not fit into shared memory is read twice

struct ForwardArgs {
  // What every launch reads comes first and close together: the constant cache is cold when a kernel starts, and each
  // line it has to fetch is a few hundred cycles on the way to the first load.
  const char *x, *residual, *weight;
  int64_t x_stride, residual_stride;  // bytes from row to row, where one stride says it all
  char *y, *residual_out;             // contiguous, as every output is
  float* rstd;
  int64_t rows;
  int32_t width;
  float inverse_width, eps, offset;
  DType weight_dtype;
  bool round_first;  // llama: the normalised value is rounded to x's dtype before it meets the weight
  bool one_stride;
  bool chained;  // launched programmatically
  Rows x_rows, residual_rows, weight_rows;

  __device__ const char* x_row(int64_t row) const { return one_stride ? x + row * x_stride : x_rows.row(row); }
  __device__ const char* residual_row(int64_t row) const {
    return one_stride ? residual + row * residual_stride : residual_rows.row(row);
  }
};

// Adds up the squares of a vector in the order of its elements.
template <typename X, typename H>
__device__ inline float sum_of_squares(const Held<X, H>& held) {
  float h[kVec<X>], sum = 0.0f;
  held.get(h);
#pragma unroll
  for (int i = 0; i < kVec<X>; ++i) sum = fmaf(h[i], h[i], sum);
  return sum;
}

// __frsqrt_rn is correctly rounded; rsqrtf is off by up to 2 ulp, which a whole fp32 row would inherit. The mean is a
// product: what that loses for widths that are no power of two is a quarter of an ulp of rstd, and a division is 50
// cycles that a single row has to wait for.
__device__ inline float inverse_rms(float sum, float inverse_width, float eps) {
  return __frsqrt_rn(fmaf(sum, inverse_width, eps));
}

template <typename X>
__device__ inline float normalised(float h, float rstd, bool round_first) {
  return round_first ? rounded<X>(h * rstd) : h * rstd;
}

template <typename X, typename H, bool kLean = false>
__device__ inline void scale_and_store(const ForwardArgs& a, char* y_row, int64_t index, const Held<X, H>& held,
                                       float rstd, const float (&weight)[kVec<X>]) {
  float y[kVec<X>];
  held.get(y);
  if (!kLean && a.round_first) {
#pragma unroll
    for (int i = 0; i < kVec<X>; ++i) y[i] = rounded<X>(y[i] * rstd) * weight[i];
  } else {
#pragma unroll
    for (int i = 0; i < kVec<X>; ++i) y[i] = y[i] * rstd * weight[i];
  }
  store_floats<X>(y_row + index * 16, y);
}

template <typename X, typename H, bool kResidual, typename C>
__global__ void __launch_bounds__(C::kThreads, C::kBlocks)
    rms_norm_forward_kernel(const __grid_constant__ ForwardArgs a) {
  constexpr int kH = kVec<X> * sizeof(H);  // bytes of a vector of h
  // In a chain of small kernels starting one takes as long as running it: let the next start now, then wait for the
  // last.
  if (a.chained) {
    allow_next_kernel();
    wait_for_previous_kernel();
  }
  __shared__ float scratch[C::kThreads / kWarp];
  const int group = threadIdx.x / C::kLanes;
  const int lane = threadIdx.x % C::kLanes;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * C::kGroups + group;
  // Threads of rows past the end stay for the sums of their block; with no vectors to their name they touch nothing.
  const int count = row < a.rows ? a.width / kVec<X> : 0;

  Loaded<X, H, kResidual> loaded[C::kVecs];
  const char* x_row = C::kLean ? a.x + row * a.x_stride : a.x_row(row);
  const char* residual_row = nullptr;
  if (kResidual) residual_row = C::kLean ? a.residual + row * a.residual_stride : a.residual_row(row);
#pragma unroll
  for (int v = 0; v < C::kVecs; ++v) {
    const int at = lane + v * C::kLanes;
    if (at < count) {
      loaded[v].load(x_row + at * 16, residual_row + at * kH);
    } else {
      loaded[v].clear();
    }
  }

  uint4 lean_weight[C::kLean ? C::kVecs : 1];  // asked for while x is still on its way
#pragma unroll
  for (int v = 0; C::kLean && v < C::kVecs; ++v) {
    const int at = lane + v * C::kLanes;
    if (at < count) lean_weight[v] = __ldg(reinterpret_cast<const uint4*>(a.weight) + at);
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
  const float rstd = inverse_rms(sum, a.inverse_width, a.eps);
  if (a.rstd != nullptr && lane == 0 && count > 0) a.rstd[row] = rstd;

  char* y_row = a.y + row * a.width * static_cast<int64_t>(sizeof(X));
#pragma unroll
  for (int v = 0; v < C::kVecs; ++v) {
    const int at = lane + v * C::kLanes;
    if (at >= count) continue;
    float weight[kVec<X>];
    if constexpr (C::kLean) {
      unpack<X>(lean_weight[v], weight);
#pragma unroll
      for (int i = 0; i < kVec<X>; ++i) weight[i] += a.offset;
    } else {
      load_weight(a.weight, a.weight_dtype, a.offset, at, weight);
    }
    scale_and_store<X, H, C::kLean>(a, y_row, at, held[v], rstd, weight);
  }
}

// Brings the rows of a block into shared memory: by the copy engine from sm_90 on, one request a row; before that each
// thread asks for the vectors it will read. Rows lie one after another, x first, then the residuals.
template <typename X, typename H, bool kResidual, typename C>
struct Stage {
  static constexpr int kH = kVec<X> * sizeof(H);
  char* base;
  int staged;  // vectors of a row that are brought here

  __device__ char* x(int group, int at) const { return base + (group * staged + at) * 16; }
  __device__ char* residual(int group, int at) const {
    return base + C::kGroups * staged * 16 + (group * staged + at) * kH;
  }

  __device__ void fetch(const ForwardArgs& a, int64_t first_row, uint64_t* barrier) const {
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x == 0) {
      const int rows = a.rows - first_row < C::kGroups ? static_cast<int>(a.rows - first_row) : C::kGroups;
      expect_bytes(barrier, rows * staged * (kResidual ? 16 + kH : 16));
      for (int g = 0; g < rows; ++g) {
        copy_bulk(x(g, 0), a.x_row(first_row + g), staged * 16, barrier);
        if (kResidual) copy_bulk(residual(g, 0), a.residual_row(first_row + g), staged * kH, barrier);
      }
    }
    __syncthreads();  // nobody asks the barrier before it is there
#else
    const int group = threadIdx.x / C::kLanes;
    const int64_t row = first_row + group;
    for (int at = threadIdx.x % C::kLanes; row < a.rows && at < staged; at += C::kLanes) {
      copy_async(x(group, at), a.x_row(row) + at * 16);
      for (int o = 0; kResidual && o < kH; o += 16) {
        copy_async(residual(group, at) + o, a.residual_row(row) + at * kH + o);
      }
    }
    copy_async_commit();
#endif
  }

  __device__ void wait(uint64_t* barrier) const {
#if __CUDA_ARCH__ >= 900
    wait_for_bytes(barrier);
#else
    copy_async_wait<0>();
#endif
  }
};

// Rows wait in shared memory, so that all of a row is under way at once and registers are left for many blocks. With
// WideConfig, what is past `staged` vectors is read as it is needed, twice, the second time from L2 if it is still
// there.
template <typename X, typename H, bool kResidual, typename C>
__global__ void __launch_bounds__(C::kThreads, C::kBlocks)
    rms_norm_forward_staged_kernel(const __grid_constant__ ForwardArgs a, int staged) {
  constexpr int kH = kVec<X> * sizeof(H);
  constexpr bool kWhole = C::kVecs > 0;
  extern __shared__ __align__(128) uint4 row_bytes[];  // the copy engine is a tenth slower at multiples of 16 alone
  __shared__ uint64_t barrier;
  __shared__ float scratch[C::kThreads / kWarp];
  const Stage<X, H, kResidual, C> stage{reinterpret_cast<char*>(row_bytes), staged};
  const int group = threadIdx.x / C::kLanes;
  const int lane = threadIdx.x % C::kLanes;
  const int64_t first_row = static_cast<int64_t>(blockIdx.x) * C::kGroups;
  const int64_t row = first_row + group;
  const int count = row < a.rows ? a.width / kVec<X> : 0;
  stage.fetch(a, first_row, &barrier);
  const char* x_row = kWhole ? nullptr : a.x_row(row);
  const char* residual_row = kWhole || !kResidual ? nullptr : a.residual_row(row);
  char* h_row = a.residual_out + row * a.width * static_cast<int64_t>(sizeof(H));
  char* y_row = a.y + row * a.width * static_cast<int64_t>(sizeof(X));
  stage.wait(&barrier);

  float sum = 0.0f;
#pragma unroll 2
  for (int at = lane; at < count; at += C::kLanes) {
    Loaded<X, H, kResidual> loaded;
    if (kWhole || at < staged) {
      loaded.x = *reinterpret_cast<const uint4*>(stage.x(group, at));
#pragma unroll
      for (int p = 0; kResidual && p < kH / 16; ++p) {
        loaded.residual[p] = reinterpret_cast<const uint4*>(stage.residual(group, at))[p];
      }
    } else {
      loaded.load(x_row + at * 16, residual_row + static_cast<int64_t>(at) * kH);
    }
    const Held<X, H> held = loaded.sum();
    sum += sum_of_squares<X, H>(held);
    if constexpr (kResidual) {
      float h[kVec<X>];
      held.get(h);
      store_floats<H>(h_row + static_cast<int64_t>(at) * kH, h);
      if (kWhole || at < staged) *reinterpret_cast<Held<X, H>*>(stage.residual(group, at)) = held;
    }
  }
  sum = row_sum<C::kLanes>(sum, scratch + group * C::kLanes / kWarp);
  const float rstd = inverse_rms(sum, a.inverse_width, a.eps);
  if (a.rstd != nullptr && lane == 0 && count > 0) a.rstd[row] = rstd;

#pragma unroll 2
  for (int at = lane; at < count; at += C::kLanes) {
    float weight[kVec<X>];
    load_weight(a.weight, a.weight_dtype, a.offset, at, weight);
    Held<X, H> held;
    if (kWhole || at < staged) {
      held = *reinterpret_cast<const Held<X, H>*>(kResidual ? stage.residual(group, at) : stage.x(group, at));
    } else {
      float h[kVec<X>];
      load_floats<H>(kResidual ? h_row + static_cast<int64_t>(at) * kH : x_row + at * 16, h);
      held.set(h);
    }
    scale_and_store<X, H>(a, y_row, at, held, rstd, weight);
  }
}

// Elements a lane of the *_any kernels takes at a time. Where the width is whole vectors it is a vector, each element
// by the lane that would own it and in the same order, so that a row's sum has the same bits here and in the kernels
// above. Other widths have no such kernel, and neighbouring lanes take neighbouring elements.
template <typename X>
__device__ inline int any_run(int64_t width) {
  return width % kVec<X> == 0 ? kVec<X> : 1;
}

// Any strides, any alignment, any mix of dtypes: elements one by one.
template <typename X, int kLanes>
__global__ void __launch_bounds__(any_threads(kLanes))
    rms_norm_forward_any_kernel(const __grid_constant__ ForwardArgs a) {
  __shared__ float scratch[any_threads(kLanes) / kWarp];
  const int group = threadIdx.x / kLanes;
  const int lane = threadIdx.x % kLanes;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * (any_threads(kLanes) / kLanes) + group;
  const int64_t width = index < a.rows ? a.width : 0;
  const int64_t row = index < a.rows ? index : 0;
  const int run = any_run<X>(a.width);
  const DType h_dtype = a.residual_rows.dtype;
  const bool summed = a.residual_rows.present();
  const char* x_row = a.x_rows.any_row(row);
  const char* residual_row = a.residual_rows.any_row(row);
  char* h_row = a.residual_out + row * a.width * element_bytes(h_dtype);
  char* y_row = a.y + row * a.width * static_cast<int64_t>(sizeof(X));

  float sum = 0.0f;
  for (int64_t first = lane * run; first < width; first += kLanes * run) {
    float part = 0.0f;
    for (int64_t c = first; c < first + run && c < width; ++c) {
      float h = element(x_row, a.x_rows.dtype, c * a.x_rows.column_stride);
      if (summed) {
        h = round_to(h_dtype, h + element(residual_row, h_dtype, c * a.residual_rows.column_stride));
        set_element(h_row, h_dtype, c, h);
      }
      part = fmaf(h, h, part);
    }
    sum += part;
  }
  sum = row_sum<kLanes>(sum, scratch + group * kLanes / kWarp);
  const float rstd = inverse_rms(sum, a.inverse_width, a.eps);
  if (a.rstd != nullptr && lane == 0 && width > 0) a.rstd[index] = rstd;

  for (int64_t first = lane * run; first < width; first += kLanes * run) {
    for (int64_t c = first; c < first + run && c < width; ++c) {
      const float h = summed ? element(h_row, h_dtype, c) : element(x_row, a.x_rows.dtype, c * a.x_rows.column_stride);
      const float weight = element_of_weight(a.weight_rows, a.offset, c);
      set_element(y_row, kDType<X>, c, normalised<X>(h, rstd, a.round_first) * weight);
    }
  }
}

template <typename X, int kLanes>
void launch_forward_any(const ForwardArgs& a, cudaStream_t stream) {
  constexpr int kThreads = any_threads(kLanes);
  const unsigned blocks = static_cast<unsigned>(divide_up(a.rows, kThreads / kLanes));
  rms_norm_forward_any_kernel<X, kLanes><<<blocks, kThreads, 0, stream>>>(a);
}

template <typename X, typename H, bool kResidual, typename C>
bool launch_forward_staged(const ForwardArgs& a, int device, cudaStream_t stream) {
  static std::atomic<int64_t> allowed[kMaxDevices];
  constexpr int64_t kSlot = kResidual ? 16 + kVec<X> * sizeof(H) : 16;
  const int64_t room = (device_facts(device).shared_bytes - 1024) / (kSlot * C::kGroups);
  const int64_t staged = at_most(a.width / kVec<X>, room);
  if (C::kVecs > 0 && staged * kVec<X> < a.width) return false;
  const int64_t bytes = staged * kSlot * C::kGroups;
  const auto kernel = rms_norm_forward_staged_kernel<X, H, kResidual, C>;
  if (!allow_shared(kernel, device, bytes, allowed)) return false;
  const unsigned blocks = static_cast<unsigned>(divide_up(a.rows, C::kGroups));
  kernel<<<blocks, C::kThreads, static_cast<size_t>(bytes), stream>>>(a, static_cast<int>(staged));
  return true;
}

// The usual kind: a weight of x's dtype, multiplied before rounding, and rows a constant stride apart.
template <typename X>
bool is_lean(const ForwardArgs& a) {
  return a.weight_dtype == kDType<X> && !a.round_first && a.one_stride;
}

template <typename X, typename H, bool kResidual>
Status launch_forward_vectors(ForwardArgs& a, int device, cudaStream_t stream) {
  const int64_t count = a.width / kVec<X>;
  const DeviceFacts& facts = device_facts(device);
  const bool few = a.rows <= 2 * facts.multiprocessors;
  a.chained = few && facts.capability >= 90;
  Status status = Status::kOk;
  auto held = [&](auto config) {
    using C = decltype(config);
    const dim3 grid(static_cast<unsigned>(divide_up(a.rows, C::kGroups)));
    status = launch(rms_norm_forward_kernel<X, H, kResidual, C>, grid, C::kThreads, 0, a.chained, stream, a);
  };
  if constexpr (std::is_same_v<X, H>) {
    if (few && count > 96 && is_lean<X>(a) && FewRowsConfigs::pick(count, held)) return status;
  }
  if (NarrowConfigs::pick(count, held)) return status;
  bool done = false;
  StagedConfigs::pick(
      count, [&](auto config) { done = launch_forward_staged<X, H, kResidual, decltype(config)>(a, device, stream); });
  if (!done) done = launch_forward_staged<X, H, kResidual, WideConfig>(a, device, stream);
  return done ? launch_status() : Status::kCudaError;
}

template <typename X>
Status launch_forward(ForwardArgs& a, int device, cudaStream_t stream) {
  const DType residual = a.residual_rows.dtype;
  if (a.x_rows.vectors && a.weight_rows.vectors && a.residual_rows.vectors) {
    if (residual == DType::kAbsent) return launch_forward_vectors<X, X, false>(a, device, stream);
    if (residual == kDType<X>) return launch_forward_vectors<X, X, true>(a, device, stream);
    if (residual == DType::kFloat32) return launch_forward_vectors<X, float, true>(a, device, stream);
  }
  const int64_t count = divide_up(a.width, kVec<X>);
  auto any = [&](auto config) { launch_forward_any<X, decltype(config)::kLanes>(a, stream); };
  if (!NarrowConfigs::pick(count, any) && !StagedConfigs::pick(count, any)) any(WideConfig{});
  return launch_status();
}

// ---- backward ------------------------------------------------------------------------------------------------------

// Sixteen columns a thread keep dw and the weight in 32 registers. Measured on an H200, docs/log.md.
using BackwardConfigs16 =
    ConfigList<Config<8, 1, 256, 4>, Config<16, 1, 256, 4>, Config<32, 1, 256, 4>, Config<32, 2, 256, 2>,
               Config<32, 3, 128, 4>, Config<128, 1, 512, 2>, Config<128, 2, 128, 4>, Config<256, 2, 256, 2>,
               Config<512, 2, 512, 1>, Config<512, 4, 512, 1>>;
using BackwardConfigs32 =
    ConfigList<Config<8, 1, 256, 4>, Config<16, 1, 256, 4>, Config<32, 1, 256, 4>, Config<32, 2, 256, 2>,
               Config<32, 4, 128, 4>, Config<128, 2, 128, 4>, Config<256, 2, 256, 2>, Config<512, 2, 512, 1>,
               Config<512, 4, 512, 1>, Config<512, 8, 512, 1>>;
template <typename X>
using BackwardConfigs = std::conditional_t<sizeof(X) == 4, BackwardConfigs32, BackwardConfigs16>;

constexpr int kMaxStages = 3;
constexpr int kMostBlocks = 4;  // of the configurations above
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
  int64_t width;
  float offset;
  int stages;       // rows a thread has under way in shared memory
  bool one_stride;  // of each tensor, from row to row
};

// The part of a row one thread has in shared memory: its vectors of dy, of h and of the sum's gradient, for each stage.
// It alone writes and reads them, so no barrier guards them. Slots of one kind lie side by side across the block, so
// that neighbouring threads meet no bank twice.
template <typename X, typename H, typename C>
struct Ring {
  static constexpr int kN = kVec<X>;
  static constexpr int kH = kN * sizeof(H);
  static constexpr int kSlots = C::kThreads * C::kVecs;

  __device__ static int bytes(const BackwardArgs& a) {
    return kSlots * (16 + kH + (a.dresidual_out.present() ? kH : 0));
  }
  __device__ static char* dy(char* stage, int v) { return stage + (v * C::kThreads + threadIdx.x) * 16; }
  __device__ static char* h(char* stage, int v) { return stage + kSlots * 16 + (v * C::kThreads + threadIdx.x) * kH; }
  __device__ static char* r(char* stage, int v) { return h(stage, v) + kSlots * kH; }

  __device__ static void fetch(const BackwardArgs& a, const char* dy_row, const char* h_row, const char* r_row, int at,
                               char* stage, int v) {
    copy_async(dy(stage, v), dy_row + at * 16);
#pragma unroll
    for (int o = 0; o < kH; o += 16) copy_async(h(stage, v) + o, h_row + at * kH + o);
    if (a.dresidual_out.present()) {
#pragma unroll
      for (int o = 0; o < kH; o += 16) copy_async(r(stage, v) + o, r_row + at * kH + o);
    }
  }
};

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
  constexpr int kColumns = C::kLanes * C::kVecs * N;
  float* out = a.partial + blockIdx.x * a.partial_stride;
  float* mine = C::kGroups > 1 ? shared + group * kColumns : out;
  if (C::kGroups > 1) __syncthreads();  // the ring's memory is about to be used for something else
#pragma unroll
  for (int v = 0; v < C::kVecs; ++v) {
    const int column = (lane + v * C::kLanes) * N;
    if (C::kGroups == 1 && column >= a.width) continue;
#pragma unroll
    for (int i = 0; i < N; i += 4) {
      *reinterpret_cast<float4*>(mine + column + i) = make_float4(dw[v][i], dw[v][i + 1], dw[v][i + 2], dw[v][i + 3]);
    }
  }
  if (C::kGroups == 1) return;
  __syncthreads();
  for (int column = threadIdx.x; column < a.width; column += C::kThreads) {
    float sum = 0.0f;
#pragma unroll
    for (int g = 0; g < C::kGroups; ++g) sum += shared[g * kColumns + column];
    out[column] = sum;
  }
}

template <typename X, typename H, typename C>
__global__ void __launch_bounds__(C::kThreads, C::kBlocks)
    rms_norm_backward_kernel(const __grid_constant__ BackwardArgs a) {
  using Slots = Ring<X, H, C>;
  constexpr int N = kVec<X>;
  extern __shared__ uint4 ring_bytes[];
  __shared__ float scratch[2][C::kThreads / kWarp];
  char* const ring = reinterpret_cast<char*>(ring_bytes);
  const int group = threadIdx.x / C::kLanes;
  const int lane = threadIdx.x % C::kLanes;
  const int count = static_cast<int>(a.width / N);
  const int64_t step = static_cast<int64_t>(gridDim.x) * C::kGroups;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * C::kGroups + group;
  const int stage_bytes = Slots::bytes(a);

  for (int s = 0; s < a.stages; ++s) {
    const int64_t row = first + s * step;
#pragma unroll
    for (int v = 0; v < C::kVecs; ++v) {
      const int at = lane + v * C::kLanes;
      if (row >= a.rows || at >= count) continue;
      Slots::fetch(a, a.dy.row(row), a.h.row(row), a.dresidual_out.row(row), at, ring + s * stage_bytes, v);
    }
    copy_async_commit();
  }

  float weight[C::kVecs][N], dw[C::kVecs][N];
#pragma unroll
  for (int v = 0; v < C::kVecs; ++v) {
    const int at = lane + v * C::kLanes;
    if (at < count) load_weight(a.weight, a.weight_dtype, a.offset, at, weight[v]);
#pragma unroll
    for (int i = 0; i < N; ++i) dw[v][i] = 0.0f;
  }

  // Where this thread's next copies come from and its results go. With one stride they move by a constant from round to
  // round; at a width of 1024 working them out anew each time took a tenth of all instructions.
  const char* dy_at = a.dy.row(first + a.stages * step);
  const char* h_at = a.h.row(first + a.stages * step);
  const char* r_at = a.dresidual_out.row(first + a.stages * step);
  const int64_t dy_step = a.dy.strides[0] * step, h_step = a.h.strides[0] * step;
  const int64_t r_step = a.dresidual_out.strides[0] * step;
  int64_t element = first * a.width + lane * N;
  const int64_t element_step = step * a.width;

  float next_rstd = first < a.rows ? a.rstd[first] : 0.0f;
  int stage = 0, parity = 0;
  // The bound is the block's, not the row's: every thread of the block makes the same number of rounds.
  for (int64_t round = static_cast<int64_t>(blockIdx.x) * C::kGroups; round < a.rows; round += step) {
    const int64_t row = round + group;
    const int live = row < a.rows ? count : 0;
    char* const slots = ring + stage * stage_bytes;
    if (a.stages == 3) {
      copy_async_wait<2>();
    } else if (a.stages == 2) {
      copy_async_wait<1>();
    } else {
      copy_async_wait<0>();
    }
    const float rstd = next_rstd;
    next_rstd = row + step < a.rows ? a.rstd[row + step] : 0.0f;

    float dot = 0.0f;
#pragma unroll
    for (int v = 0; v < C::kVecs; ++v) {
      if (lane + v * C::kLanes >= live) continue;
      float dy[N], h[N];
      load_floats<X>(Slots::dy(slots, v), dy);
      load_floats<H>(Slots::h(slots, v), h);
#pragma unroll
      for (int i = 0; i < N; ++i) dot = fmaf(dy[i] * weight[v][i], h[i], dot);
    }
    dot = row_sum<C::kLanes>(dot, &scratch[parity][group * C::kLanes / kWarp]);
    const float slope = dot / static_cast<float>(a.width) * rstd * rstd * rstd;

    // Once a thread has read a slot for the last time, the row `stages` rounds ahead may come into it.
    const int next = row + a.stages * step < a.rows ? count : 0;
#pragma unroll
    for (int v = 0; v < C::kVecs; ++v) {
      const int at = lane + v * C::kLanes;
      if (at >= live) continue;
      float dy[N], h[N], dx[N];
      load_floats<X>(Slots::dy(slots, v), dy);
      load_floats<H>(Slots::h(slots, v), h);
      gradients(dy, h, weight[v], rstd, slope, dx, dw[v]);
      if (a.dresidual_out.present()) {
        load_floats<H>(Slots::r(slots, v), h);
        add(h, dx);
      }
      if (at < next) Slots::fetch(a, dy_at, h_at, r_at, at, slots, v);
      const int64_t out = element + v * C::kLanes * N;
      store_floats<X>(a.dx + out * static_cast<int64_t>(sizeof(X)), dx);
      if (a.dresidual != nullptr) store_floats<H>(a.dresidual + out * static_cast<int64_t>(sizeof(H)), dx);
    }
    copy_async_commit();
    element += element_step;
    if (a.one_stride) {
      dy_at += dy_step, h_at += h_step, r_at += r_step;
    } else {
      const int64_t ahead = row + (a.stages + 1) * step;
      dy_at = a.dy.row(ahead), h_at = a.h.row(ahead), r_at = a.dresidual_out.row(ahead);
    }
    stage = stage + 1 == a.stages ? 0 : stage + 1;
    parity ^= 1;
  }
  copy_async_wait<0>();
  allow_next_kernel();
  if (a.partial != nullptr) store_partial<X, C>(a, group, lane, reinterpret_cast<float*>(ring_bytes), dw);
}

// dx of a row that no configuration holds: one block, one row, read twice.
template <typename X, typename H>
__global__ void __launch_bounds__(kWideThreads) rms_norm_backward_wide_kernel(const __grid_constant__ BackwardArgs a) {
  constexpr int N = kVec<X>;
  constexpr int kH = N * sizeof(H);
  __shared__ float scratch[kWideThreads / kWarp];
  const int64_t row = blockIdx.x;
  const int64_t count = a.width / N;
  const char* dy_row = a.dy.row(row);
  const char* h_row = a.h.row(row);
  const char* r_row = a.dresidual_out.row(row);
  const float rstd = a.rstd[row];

  float dot = 0.0f;
#pragma unroll 2
  for (int64_t at = threadIdx.x; at < count; at += kWideThreads) {
    float dy[N], h[N], weight[N];
    load_floats<X>(dy_row + at * 16, dy);
    load_floats<H>(h_row + at * kH, h);
    load_weight(a.weight, a.weight_dtype, a.offset, at, weight);
#pragma unroll
    for (int i = 0; i < N; ++i) dot = fmaf(dy[i] * weight[i], h[i], dot);
  }
  dot = row_sum<kWideThreads>(dot, scratch);
  const float slope = dot / static_cast<float>(a.width) * rstd * rstd * rstd;

#pragma unroll 2
  for (int64_t at = threadIdx.x; at < count; at += kWideThreads) {
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

// Backward for any strides, alignment and dtypes, dx and dw apart as for wide rows.
template <typename X, int kLanes>
__global__ void __launch_bounds__(any_threads(kLanes))
    rms_norm_backward_any_kernel(const __grid_constant__ BackwardArgs a) {
  __shared__ float scratch[any_threads(kLanes) / kWarp];
  const int group = threadIdx.x / kLanes;
  const int lane = threadIdx.x % kLanes;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * (any_threads(kLanes) / kLanes) + group;
  const int64_t width = index < a.rows ? a.width : 0;
  const int64_t row = index < a.rows ? index : 0;
  const char* dy_row = a.dy.any_row(row);
  const char* h_row = a.h.any_row(row);
  const char* r_row = a.dresidual_out.any_row(row);
  const int run = any_run<X>(a.width);
  const float rstd = a.rstd[row];

  float dot = 0.0f;
  for (int64_t first = lane * run; first < width; first += kLanes * run) {
    for (int64_t c = first; c < first + run && c < width; ++c) {
      const float g =
          element(dy_row, kDType<X>, c * a.dy.column_stride) * element_of_weight(a.weight_rows, a.offset, c);
      dot = fmaf(g, element(h_row, a.h.dtype, c * a.h.column_stride), dot);
    }
  }
  dot = row_sum<kLanes>(dot, scratch + group * kLanes / kWarp);
  const float slope = dot / static_cast<float>(a.width) * rstd * rstd * rstd;

  for (int64_t first = lane * run; first < width; first += kLanes * run) {
    for (int64_t c = first; c < first + run && c < width; ++c) {
      const float scaled = element(dy_row, kDType<X>, c * a.dy.column_stride) * rstd;
      const float h = element(h_row, a.h.dtype, c * a.h.column_stride);
      float dx = fmaf(scaled, element_of_weight(a.weight_rows, a.offset, c), -(h * slope));
      if (a.dresidual_out.present()) dx += element(r_row, a.dresidual_out.dtype, c * a.dresidual_out.column_stride);
      set_element(a.dx, kDType<X>, row * a.width + c, dx);
      if (a.dresidual != nullptr) set_element(a.dresidual, a.h.dtype, row * a.width + c, dx);
    }
  }
}

__global__ void __launch_bounds__(kWideColumnThreads)
    rms_norm_backward_any_weight_kernel(const __grid_constant__ BackwardArgs a) {
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kWideColumnThreads + threadIdx.x;
  if (column >= a.width) return;
  float dw = 0.0f;
#pragma unroll 4
  for (int64_t row = blockIdx.y; row < a.rows; row += gridDim.y) {
    const float dy = element(a.dy.any_row(row), a.dy.dtype, column * a.dy.column_stride);
    dw = fmaf(dy * a.rstd[row], element(a.h.any_row(row), a.h.dtype, column * a.h.column_stride), dw);
  }
  a.partial[blockIdx.y * a.partial_stride + column] = dw;
}

// dx and dw together; says through `partial_rows` how many partial rows it leaves, and false when this device's shared
// memory does not hold one row.
template <typename X, typename H, typename C>
bool launch_backward_ring(BackwardArgs a, const DeviceFacts& facts, int device, cudaStream_t stream,
                          int64_t& partial_rows) {
  static std::atomic<int64_t> allowed[kMaxDevices];
  constexpr int64_t kH = kVec<X> * sizeof(H);
  const int64_t stage = C::kThreads * C::kVecs * (16 + kH + (a.dresidual_out.present() ? kH : 0));
  const int64_t room =
      (facts.shared_bytes + 1024) / C::kBlocks - 2048;  // each block pays 1 KiB to the system, and scratch
  a.stages = static_cast<int>(at_most(room / stage, kMaxStages));
  const auto kernel = rms_norm_backward_kernel<X, H, C>;
  if (a.stages == 0 || !allow_shared(kernel, device, a.stages * stage, allowed)) return false;
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

template <typename X, typename H>
Status launch_backward_vectors(const BackwardArgs& a, const DeviceFacts& facts, int device, cudaStream_t stream,
                               int64_t& partial_rows) {
  bool done = false;
  BackwardConfigs<X>::pick(a.width / kVec<X>, [&](auto config) {
    done = launch_backward_ring<X, H, decltype(config)>(a, facts, device, stream, partial_rows);
  });
  if (done) return launch_status();
  rms_norm_backward_wide_kernel<X, H><<<static_cast<unsigned>(a.rows), kWideThreads, 0, stream>>>(a);
  if (a.partial != nullptr) {
    const dim3 grid = weight_grid(a, a.width / kVec<X>, facts, partial_rows);
    rms_norm_backward_wide_weight_kernel<X, H><<<grid, kWideColumnThreads, 0, stream>>>(a);
  }
  return launch_status();
}

template <typename X, int kLanes>
void launch_backward_any(const BackwardArgs& a, cudaStream_t stream) {
  const unsigned blocks = static_cast<unsigned>(divide_up(a.rows, any_threads(kLanes) / kLanes));
  rms_norm_backward_any_kernel<X, kLanes><<<blocks, any_threads(kLanes), 0, stream>>>(a);
}

template <typename X>
Status launch_backward(const BackwardArgs& a, const DeviceFacts& facts, int device, cudaStream_t stream,
                       int64_t& partial_rows) {
  const bool vectors = a.dy.vectors && a.h.vectors && a.weight_rows.vectors && a.dresidual_out.vectors;
  if (vectors && a.h.dtype == kDType<X>) return launch_backward_vectors<X, X>(a, facts, device, stream, partial_rows);
  if (vectors && a.h.dtype == DType::kFloat32) {
    return launch_backward_vectors<X, float>(a, facts, device, stream, partial_rows);
  }
  const bool held = BackwardConfigs<X>::pick(
      divide_up(a.width, kVec<X>), [&](auto config) { launch_backward_any<X, decltype(config)::kLanes>(a, stream); });
  if (!held) launch_backward_any<X, kWideThreads>(a, stream);
  if (a.partial != nullptr) {
    const dim3 grid = weight_grid(a, a.width, facts, partial_rows);
    rms_norm_backward_any_weight_kernel<<<grid, kWideColumnThreads, 0, stream>>>(a);
  }
  return launch_status();
}

int64_t padded_width(int64_t width) { return divide_up(width, 8) * 8; }

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
  if (!(static_cast<float>(eps) > 0.0f) || !std::isfinite(eps)) return Status::kBadScalar;
  if (!std::isfinite(offset) || (!weight.present() && offset != 0.0)) return Status::kBadScalar;
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
    a.eps = static_cast<float>(eps), a.offset = static_cast<float>(offset);
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
  if (rows > 0 && rstd.rank != dy.rank - 1) return Status::kBadShape;
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
    a.rows = rows, a.width = width;
    a.offset = static_cast<float>(offset);
    a.one_stride = a.dy.outer == 1 && a.h.outer == 1 && a.dresidual_out.outer == 1;
    int64_t partial_rows = 0;
    Status result = Status::kOk;
    if (rows > 0) result = launch_backward<X>(a, facts, guard.device(), cuda_stream(stream), partial_rows);
    if (result != Status::kOk || !dweight.present()) return result;
    return column_sums(a.partial, partial_rows, a.partial_stride, a.width, dweight, facts.capability >= 90,
                       cuda_stream(stream));
  });
}

}  // namespace fuselm
