// RMSNorm, backward. Contract: rms_norm.py; forward, and how threads own rows: rms_norm.cu.
//
// Traffic. dy and h are read once and dx is written once: rows come to shared memory ahead of use, and the weight's
// gradient is summed in registers over all rows a block sees; each block leaves one partial row, and a second kernel
// adds the partial rows in a fixed order. No atomics.
//
// Threads. As in forward. A row too wide for one block is shared by a cluster of them, a part each; the parts' sums
// meet in shared memory. Odd widths come in bundles of rows. What is left (odd strides, expanded tensors, odd widths
// that are wide or have a residual, wide rows before sm_90) takes the *_any kernels: slower, same order of sums.
#include "rows.cuh"

namespace fuselm {
namespace {

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
constexpr int64_t kStageLimit = 130 << 10;  // bytes a block has under way: with more 8192x16384 is 3 % slower
constexpr int kMostBlocks = 4;              // of the configurations above
constexpr int64_t kBundleBytes = 48 << 10;  // of rows of odd width that a multiprocessor takes a round
constexpr int kColumnThreads = 128;
constexpr int kColumnBlocks = 16;  // of kColumnThreads, wanted on a multiprocessor
constexpr int kMaxParts = 16;

// What a row too wide for one block is cut into, one part for each block of a cluster.
template <typename X>
using Part = Config<512, sizeof(X) == 4 ? 8 : 4, 512, 1>;

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
  int bundle;        // rows a block takes a round where they are bundles
  int stages;        // rounds of rows a block has under way in shared memory
  int parts;         // of a row: a power of two
  int part_vectors;  // of all parts but the last, which may have fewer
  bool large;        // dy, h and dx together are larger than L2
};

// Where the rows of one round are in shared memory: those of dy, then of h, then of the sum's gradient.
template <typename X, typename H, typename C>
struct Stage {
  static constexpr int kH = kVec<X> * sizeof(H);
  char* base;
  int skip, vectors;  // of each row

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
    fetch_rows<C, 16>(a.dy, first, here, skip, vectors, dy(0), arrived, policy);
    fetch_rows<C, kH>(a.h, first, here, skip, vectors, h(0), arrived, policy);
    if (with_residual) fetch_rows<C, kH>(a.dresidual_out, first, here, skip, vectors, r(0), arrived, policy);
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

// Leaves this block's share of dw in `out`, its partial row. `put` writes a group's share to where it is told; groups
// of the block meet in shared memory, in order.
template <typename C, typename Put>
__device__ inline void store_partial(const BackwardArgs& a, float* out, int group, float* shared, const Put& put) {
  if constexpr (C::kGroups == 1) {
    put(out);
    return;
  }
  const int width = static_cast<int>(a.partial_stride);
  __syncthreads();  // the rows' memory is about to be used for something else
  put(shared + group * width);
  __syncthreads();
#pragma unroll 1
  for (int column = threadIdx.x * 4; column < a.width; column += C::kThreads * 4) {
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int g = 0; g < C::kGroups; ++g) {
      const float4 share = *reinterpret_cast<const float4*>(shared + g * width + column);
      sum.x += share.x, sum.y += share.y, sum.z += share.z, sum.w += share.w;
    }
    *reinterpret_cast<float4*>(out + column) = sum;
  }
}

// Where the sums of a row's parts meet: each block of the cluster sends its own to all of them. Two places by turns:
// a block sends for the round after next when it has had the next from all others, so they are done with this one.
struct Meeting {
  float sums[2][kMaxParts];
  uint64_t arrived[2];

  __device__ float sum_of_parts(float mine, int parts, int rank, int side, int parity) {
    if (threadIdx.x == 0) expect_bytes(&arrived[side], parts * static_cast<int>(sizeof(float)));
    if (threadIdx.x < parts) send(mine, &sums[side][rank], &arrived[side], threadIdx.x);
    wait_for_bytes(&arrived[side], parity);
    float sum = sums[side][0];
    for (int part = 1; part < parts; ++part) sum += sums[side][part];
    return sum;
  }
};

// A block takes kGroups rows a round, or its part of one row (kParted), every gridDim.x-th round. What a thread reads
// for the row's sum it keeps for dx where there are registers (kKeep); else it reads shared memory twice.
template <typename X, typename H, typename C, bool kParted>
__global__ void __launch_bounds__(C::kThreads, fitting_blocks(C::kThreads, C::kBlocks))
    rms_norm_backward_kernel(const __grid_constant__ BackwardArgs a) {
  constexpr int N = kVec<X>;
  constexpr int kH = N * sizeof(H);
  constexpr bool kKeep = C::kVecs * N <= 24;
  extern __shared__ __align__(128) uint4 stage_bytes[];
  __shared__ uint64_t arrived[kMaxStages];
  __shared__ float scratch[2][C::kThreads / kWarp];
  __shared__ std::conditional_t<kParted, Meeting, uint64_t> meeting;
  const int group = threadIdx.x / C::kLanes;
  const int lane = threadIdx.x % C::kLanes;
  const int parts = kParted ? a.parts : 1;
  const int rank = kParted ? static_cast<int>(blockIdx.x) % parts : 0;
  const int skip = kParted ? rank * a.part_vectors : 0;
  const int vectors = kParted ? min(a.part_vectors, a.width / N - skip) : a.width / N;
  const int size = Stage<X, H, C>::bytes(kParted ? a.part_vectors : vectors, a.dresidual_out.present());
  const int64_t step = static_cast<int64_t>(gridDim.x) / parts * C::kGroups;
  const int64_t first = static_cast<int64_t>(blockIdx.x) / parts * C::kGroups;
  auto stage_at = [&](int s) { return Stage<X, H, C>{reinterpret_cast<char*>(stage_bytes) + s * size, skip, vectors}; };

  if (threadIdx.x < a.stages) init_barrier(&arrived[threadIdx.x]);
  if constexpr (kParted) {
    if (threadIdx.x < 2) init_barrier(&meeting.arrived[threadIdx.x]);
    cluster_barrier();  // nor sends to one
  }
  __syncthreads();  // nobody asks a barrier before it is there
#pragma unroll 1
  for (int s = 0; s + 1 < a.stages; ++s) {
    if (first + s * step < a.rows) stage_at(s).fetch(a, first + s * step, &arrived[s]);
    copy_async_commit();
  }

  float weight[C::kVecs][N], dw[C::kVecs][N] = {};
  load_weights<X, C>(a.weight + skip * N * element_bytes(a.weight_dtype), a.weight_dtype, a.offset, lane, vectors,
                     weight);

  float next_rstd = first + group < a.rows ? a.rstd[first + group] : 0.0f;
  int s = 0, parity = 0, side = 0, meeting_parity = 0;
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
    const int64_t element = row * a.width + skip * N;
    char* const dx_row = a.dx + element * static_cast<int64_t>(sizeof(X));
    char* const dresidual_row = a.dresidual + element * static_cast<int64_t>(sizeof(H));
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
    if constexpr (kParted) dot = meeting.sum_of_parts(dot, parts, rank, side, meeting_parity);
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
    if (side == 1) meeting_parity ^= 1;
    side ^= 1;
    if (++s == a.stages) s = 0, parity ^= 1;
  }
  copy_async_wait<0>();
  allow_next_kernel();
  if (kParted) cluster_barrier();  // a block's memory stays until nobody sends to it any more
  if (a.partial == nullptr) return;
  float* out = a.partial + blockIdx.x / parts * a.partial_stride + skip * N;
  store_partial<C>(a, out, group, reinterpret_cast<float*>(stage_bytes), [&](float* to) {
#pragma unroll
    for (int v = 0; v < C::kVecs; ++v) {
      const int at = lane + v * C::kLanes;
      if (at < vectors) store_floats<float>(to + at * N, dw[v]);
    }
  });
}

// The block that takes rows of odd width. Several of a multiprocessor work while others wait: as many as have registers
// for dw and the weight, and 48 more, or 32 where that makes two of one.
template <typename X, typename C>
struct Bundle {
  static constexpr int kThreads = C::kLanes > 256 ? C::kLanes : 256;
  static constexpr int kRegisters = 2 * C::kVecs * kVec<X> + (kThreads > 256 ? 32 : 48);
  static constexpr int kBlocks = static_cast<int>(at_most(65536 / (kRegisters * kThreads), kMostBlocks));
  using type = Config<C::kLanes, C::kVecs, kThreads, kBlocks>;
};

// Rows of odd width that follow one another: a bundle of them a round. dx takes the place of dy in shared memory.
template <typename X, typename C>
__global__ void __launch_bounds__(C::kThreads, fitting_blocks(C::kThreads, C::kBlocks))
    rms_norm_backward_bundle_kernel(const __grid_constant__ BackwardArgs a) {
  constexpr int N = kVec<X>;
  constexpr int kSpan = C::kLanes * N;
  extern __shared__ __align__(128) uint4 stage_bytes[];
  __shared__ uint64_t arrived[2];
  __shared__ float scratch[2][C::kThreads / kWarp];
  const int group = threadIdx.x / C::kLanes;
  const int lane = threadIdx.x % C::kLanes;
  const int row_bytes = a.width * static_cast<int>(sizeof(X));
  const int room = static_cast<int>(Run::room(a.bundle, row_bytes));
  const int64_t step = static_cast<int64_t>(gridDim.x) * a.bundle;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * a.bundle;
  const uint64_t policy = read_policy(a.large);
  auto stage_at = [&](int s) { return reinterpret_cast<char*>(stage_bytes) + s * 2 * room; };  // dy, then h
  auto rows_from = [&](int64_t row) { return a.rows - row < a.bundle ? static_cast<int>(a.rows - row) : a.bundle; };
  auto run_from = [&](int64_t row) { return Run(row, rows_from(row), row_bytes, a.rows); };
  auto fetch = [&](int64_t row, int s) {
    const Run run = run_from(row);
    if (threadIdx.x == 0) expect_bytes(&arrived[s], 2 * run.whole);
    fetch_run<X, C::kThreads>(a.dy.data, run, stage_at(s), &arrived[s], policy);
    fetch_run<X, C::kThreads>(a.h.data, run, stage_at(s) + room, &arrived[s], policy);
  };

  if (threadIdx.x < 2) init_barrier(&arrived[threadIdx.x]);
  __syncthreads();
  fetch(first, 0);
  copy_async_commit();
  float weight[C::kVecs][N], dw[C::kVecs][N] = {};
#pragma unroll
  for (int v = 0; v < C::kVecs; ++v) {
    load_weight_columns<C::kLanes>(a.weight, a.weight_dtype, a.offset, v * kSpan + lane, a.width, weight[v]);
  }

  int s = 0, parity = 0, side = 0;
  for (int64_t round = first; round < a.rows; round += step) {
    fence_copies();
    __syncthreads();  // the other stage, or the only one, has been written out
    const int64_t ahead = round + (a.stages - 1) * step;
    if (ahead > first && ahead < a.rows) fetch(ahead, a.stages == 1 ? 0 : s ^ 1);
    copy_async_commit();
    wait_for_round(a, &arrived[s], parity);
    if (a.stages == 1 || !kCopyEngine) __syncthreads();  // what other threads have brought is there
    const Run run = run_from(round);
    const int here = rows_from(round);
    // Every group makes the same number of turns: they meet in row_sum.
#pragma unroll 1
    for (int r = group; r < a.bundle; r += C::kGroups) {
      X* const dy_row = reinterpret_cast<X*>(stage_at(s) + run.lead) + r * a.width;
      const X* const h_row = reinterpret_cast<const X*>(stage_at(s) + room + run.lead) + r * a.width;
      const int width = r < here ? a.width : 0;
      const float rstd = r < here ? a.rstd[round + r] : 0.0f;
      float dot = 0.0f;
#pragma unroll
      for (int v = 0; v < C::kVecs; ++v) {
        if (v * kSpan >= a.width) break;
        float dy[N], h[N];
        load_columns<C::kLanes>(dy_row, v * kSpan + lane, width, dy);
        load_columns<C::kLanes>(h_row, v * kSpan + lane, width, h);
#pragma unroll
        for (int i = 0; i < N; ++i) dot = fmaf(dy[i] * weight[v][i], h[i], dot);
      }
      dot = row_sum<C::kLanes>(dot, &scratch[side][group * C::kLanes / kWarp]);
      side ^= 1;
      const float slope = dot * a.inverse_width * rstd * rstd * rstd;
#pragma unroll
      for (int v = 0; v < C::kVecs; ++v) {
        if (v * kSpan >= a.width) break;
        float dy[N], h[N], dx[N];
        load_columns<C::kLanes>(dy_row, v * kSpan + lane, width, dy);
        load_columns<C::kLanes>(h_row, v * kSpan + lane, width, h);
        gradients(dy, h, weight[v], rstd, slope, dx, dw[v]);
        store_columns<C::kLanes>(dy_row, v * kSpan + lane, width, dx);
      }
    }
    __syncthreads();
    store_run<X, C::kThreads>(a.dx, run, stage_at(s));
    s = a.stages == 1 ? 0 : s ^ 1;
    if (s == 0) parity ^= 1;
  }
  allow_next_kernel();
  if (a.partial == nullptr) return;
  float* out = a.partial + blockIdx.x * a.partial_stride;
  store_partial<C>(a, out, group, reinterpret_cast<float*>(stage_bytes), [&](float* to) {
#pragma unroll
    for (int v = 0; v < C::kVecs; ++v) store_columns<C::kLanes>(to, v * kSpan + lane, a.width, dw[v]);
  });
}

// dx for any strides, alignment and dtypes: elements one by one, read twice.
template <typename X, int kLanes>
__global__ void __launch_bounds__(any_threads(kLanes), 1024 / any_threads(kLanes))
    rms_norm_backward_any_kernel(const __grid_constant__ BackwardArgs a) {
  constexpr int N = kVec<X>;
  __shared__ float scratch[2][any_threads(kLanes) / kWarp];
  const int group = threadIdx.x / kLanes;
  const int lane = threadIdx.x % kLanes;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * (any_threads(kLanes) / kLanes) + group;
  const int width = index < a.rows ? a.width : 0;
  const int64_t row = index < a.rows ? index : 0;
  const char* dy_row = a.dy.any_row(row);
  const char* h_row = a.h.any_row(row);
  const char* r_row = a.dresidual_out.any_row(row);
  const float rstd = a.rstd[row];
  const DType h_dtype = a.h.dtype;

  float dot = 0.0f;
  for (int part = 0; part < a.parts; ++part) {
    const int begin = part * a.part_vectors * N;
    const int end = min(width, begin + a.part_vectors * N);
    float sum = 0.0f;
    for (int base = begin; base < end; base += kLanes * N) {
      const Span span = span_of<N, kLanes>(lane, base, width).until(end);
      float dy[N], h[N], weight[N];
      load_elements(dy_row, kDType<X>, a.dy.column_stride, span, dy);
      load_elements(h_row, h_dtype, a.h.column_stride, span, h);
      load_weight_elements(a.weight_rows, a.offset, span, weight);
#pragma unroll
      for (int i = 0; i < N; ++i) sum = fmaf(dy[i] * weight[i], h[i], sum);
    }
    sum = row_sum<kLanes>(sum, &scratch[part % 2][group * kLanes / kWarp]);
    dot = part == 0 ? sum : dot + sum;  // not from 0: that would lose the sign of a sum that is -0
  }
  const float slope = dot * a.inverse_width * rstd * rstd * rstd;

  for (int base = 0; base < width; base += kLanes * N) {
    const Span span = span_of<N, kLanes>(lane, base, width);
    float dy[N], h[N], weight[N], dx[N], unused[N] = {};
    load_elements(dy_row, kDType<X>, a.dy.column_stride, span, dy);
    load_elements(h_row, h_dtype, a.h.column_stride, span, h);
    load_weight_elements(a.weight_rows, a.offset, span, weight);
    gradients(dy, h, weight, rstd, slope, dx, unused);
    if (a.dresidual_out.present()) {
      load_elements(r_row, a.dresidual_out.dtype, a.dresidual_out.column_stride, span, h);
      add(h, dx);
    }
    store_elements(a.dx + row * a.width * static_cast<int64_t>(sizeof(X)), kDType<X>, span, dx);
    if (a.dresidual != nullptr) {
      store_elements(a.dresidual + row * a.width * element_bytes(h_dtype), h_dtype, span, dx);
    }
  }
}

// dw of the same: blockIdx.x picks columns, blockIdx.y every gridDim.y-th row; a thread has kRows of them under way at
// a time.
template <typename X>
__global__ void __launch_bounds__(kColumnThreads)
    rms_norm_backward_any_weight_kernel(const __grid_constant__ BackwardArgs a) {
  constexpr int kRows = 8;
  const int column = static_cast<int>(blockIdx.x) * kColumnThreads + static_cast<int>(threadIdx.x);
  const Span span{column, 1, a.width};
  float dw = 0.0f;
  for (int64_t row = blockIdx.y; row < a.rows; row += kRows * gridDim.y) {
    float dy[kRows][1], h[kRows][1], rstd[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int64_t at = row + r * static_cast<int64_t>(gridDim.y);
      const int64_t there = at < a.rows ? at : row;  // loaded for nothing
      load_elements(a.dy.any_row(there), kDType<X>, a.dy.column_stride, span, dy[r]);
      load_elements(a.h.any_row(there), a.h.dtype, a.h.column_stride, span, h[r]);
      rstd[r] = a.rstd[there];
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (row + r * static_cast<int64_t>(gridDim.y) < a.rows) dw = fmaf(dy[r][0] * rstd[r], h[r][0], dw);
    }
  }
  if (column < a.width) a.partial[blockIdx.y * a.partial_stride + column] = dw;
}

int64_t padded_width(int64_t width) { return divide_up(width, 8) * 8; }

// The most partial rows any kernel leaves.
int64_t most_partial_rows(int64_t rows, const DeviceFacts& facts) {
  return at_most(rows, static_cast<int64_t>(facts.multiprocessors) * kMostBlocks);
}

// Rounds of `stage` bytes that a block's share of shared memory holds (each block pays 1 KiB to the system too), but
// one in any case.
int stages_of(int64_t stage, int blocks, int most, const DeviceFacts& facts) {
  const int64_t room = at_most((facts.shared_bytes + 1024) / blocks - 1024 - kOwnShared, kStageLimit);
  const int64_t stages = at_most(room / stage, most);
  return stages > 0 ? static_cast<int>(stages) : 1;
}

// The launchers below leave dx, and dw's partial rows, and say through `partial_rows` how many. Those that answer false
// have done nothing: this device cannot.

template <typename X, typename H, typename C>
bool launch_backward_config(BackwardArgs a, const DeviceFacts& facts, int device, cudaStream_t stream,
                            int64_t& partial_rows) {
  static std::atomic<bool> allowed[kMaxDevices];
  const int64_t stage = Stage<X, H, C>::bytes(a.width / kVec<X>, a.dresidual_out.present());
  a.stages = stages_of(stage, C::kBlocks, kMaxStages, facts);
  const auto kernel = rms_norm_backward_kernel<X, H, C, false>;
  if (!allow_shared(kernel, device, a.stages * stage, allowed)) return false;
  partial_rows = at_most(divide_up(a.rows, C::kGroups), static_cast<int64_t>(facts.multiprocessors) * C::kBlocks);
  kernel<<<static_cast<unsigned>(partial_rows), C::kThreads, static_cast<size_t>(a.stages * stage), stream>>>(a);
  return true;
}

// Clusters that run at the same time, 0 when there can be none. Asked of the driver once; `known` remembers
// one more than the answer.
template <typename Kernel>
int most_clusters(Kernel kernel, const Launch& how, std::atomic<int>& known) {
  if (const int answer = known.load(std::memory_order_relaxed)) return answer - 1;
  int clusters = 0;
  const bool ok = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1) == cudaSuccess &&
                  cudaOccupancyMaxActiveClusters(&clusters, kernel, &how.config) == cudaSuccess;
  if (!ok) return cudaGetLastError(), 0;
  known.store(clusters + 1, std::memory_order_relaxed);
  return clusters;
}

template <typename X, typename H>
bool launch_backward_parts(BackwardArgs a, const DeviceFacts& facts, int device, cudaStream_t stream,
                           int64_t& partial_rows) {
  static std::atomic<bool> allowed[kMaxDevices];
  static std::atomic<int> clusters[kMaxDevices][kMaxParts + 1];
  using C = Part<X>;
  if (facts.capability < 90) return false;
  const int64_t stage = Stage<X, H, C>::bytes(a.part_vectors, a.dresidual_out.present());
  a.stages = stages_of(stage, C::kBlocks, kMaxStages, facts);
  const auto kernel = rms_norm_backward_kernel<X, H, C, true>;
  if (!allow_shared(kernel, device, a.stages * stage, allowed)) return false;
  Launch how(dim3(static_cast<unsigned>(a.parts)), C::kThreads, a.stages * stage, stream);
  how.clusters(a.parts);
  partial_rows = at_most(a.rows, most_clusters(kernel, how, clusters[device][a.parts]));
  if (partial_rows == 0) return false;
  how.config.gridDim.x = static_cast<unsigned>(partial_rows * a.parts);
  if (how(kernel, a) == Status::kOk) return true;
  cudaGetLastError();  // not to be taken for that of the kernel that runs instead
  return false;
}

template <typename X, typename C>
bool launch_backward_bundle(BackwardArgs& a, const DeviceFacts& facts, int device, cudaStream_t stream,
                            int64_t& partial_rows) {
  static std::atomic<bool> allowed[kMaxDevices];
  const bool alone = a.dresidual == nullptr && !a.dresidual_out.present() && a.weight_rows.column_stride == 1;
  const bool aligned = reinterpret_cast<uintptr_t>(a.dx) % 16 == 0;
  if (!alone || !aligned || !bundles<X>(a.dy, a.width) || !bundles<X>(a.h, a.width)) return false;
  const int64_t row_bytes = a.width * static_cast<int64_t>(sizeof(X));
  const int64_t turns = kBundleBytes / C::kBlocks / (C::kGroups * row_bytes);
  a.bundle = C::kGroups * static_cast<int>(turns > 1 ? turns : 1);
  const int64_t stage = 2 * Run::room(a.bundle, row_bytes);
  a.stages = stages_of(stage, C::kBlocks, 2, facts);
  const int64_t groups = C::kGroups * a.partial_stride * static_cast<int64_t>(sizeof(float));
  const int64_t bytes = a.stages * stage > groups ? a.stages * stage : groups;
  const auto kernel = rms_norm_backward_bundle_kernel<X, C>;
  if (!allow_shared(kernel, device, bytes, allowed)) return false;
  partial_rows = at_most(divide_up(a.rows, a.bundle), static_cast<int64_t>(facts.multiprocessors) * C::kBlocks);
  kernel<<<static_cast<unsigned>(partial_rows), C::kThreads, static_cast<size_t>(bytes), stream>>>(a);
  return true;
}

template <typename X, int kLanes>
void launch_backward_any(const BackwardArgs& a, cudaStream_t stream) {
  const unsigned blocks = static_cast<unsigned>(divide_up(a.rows, any_threads(kLanes) / kLanes));
  rms_norm_backward_any_kernel<X, kLanes><<<blocks, any_threads(kLanes), 0, stream>>>(a);
}

template <typename X>
Status launch_backward_any(const BackwardArgs& a, const DeviceFacts& facts, cudaStream_t stream,
                           int64_t& partial_rows) {
  const bool held = BackwardConfigs<X>::pick(
      divide_up(a.width, kVec<X>), [&](auto config) { launch_backward_any<X, decltype(config)::kLanes>(a, stream); });
  if (!held) launch_backward_any<X, Part<X>::kLanes>(a, stream);
  if (a.partial != nullptr) {
    const int64_t across = divide_up(a.width, kColumnThreads);
    const int64_t down = divide_up(static_cast<int64_t>(facts.multiprocessors) * kColumnBlocks, across);
    partial_rows = at_most(down, most_partial_rows(a.rows, facts));
    const dim3 grid(static_cast<unsigned>(across), static_cast<unsigned>(partial_rows));
    rms_norm_backward_any_weight_kernel<X><<<grid, kColumnThreads, 0, stream>>>(a);
  }
  return launch_status();
}

template <typename X, typename H>
bool launch_backward_vectors(const BackwardArgs& a, const DeviceFacts& facts, int device, cudaStream_t stream,
                             int64_t& partial_rows) {
  if (a.parts > 1) return launch_backward_parts<X, H>(a, facts, device, stream, partial_rows);
  bool done = false;
  BackwardConfigs<X>::pick(a.width / kVec<X>, [&](auto config) {
    done = launch_backward_config<X, H, decltype(config)>(a, facts, device, stream, partial_rows);
  });
  return done;
}

template <typename X>
Status launch_backward(BackwardArgs& a, const DeviceFacts& facts, int device, cudaStream_t stream,
                       int64_t& partial_rows) {
  constexpr int kMost = Part<X>::kLanes * Part<X>::kVecs;  // vectors of a part
  const int count = static_cast<int>(divide_up(a.width, kVec<X>));
  a.parts = 1;
  while (a.parts * kMost < count) a.parts *= 2;
  a.part_vectors = static_cast<int>(divide_up(count, a.parts));

  const bool vectors = a.dy.vectors && a.h.vectors && a.weight_rows.vectors && a.dresidual_out.vectors;
  bool done = false;
  if (vectors && a.h.dtype == kDType<X>) {
    done = launch_backward_vectors<X, X>(a, facts, device, stream, partial_rows);
  } else if (vectors && a.h.dtype == DType::kFloat32) {
    done = launch_backward_vectors<X, float>(a, facts, device, stream, partial_rows);
  } else {
    BackwardConfigs<X>::pick(count, [&](auto config) {
      using C = typename Bundle<X, decltype(config)>::type;
      done = launch_backward_bundle<X, C>(a, facts, device, stream, partial_rows);
    });
  }
  // By the kernel with the same lanes and parts, so with the same bits.
  return done ? launch_status() : launch_backward_any<X>(a, facts, stream, partial_rows);
}

}  // namespace

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
