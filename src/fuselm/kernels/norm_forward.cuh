// The norm family, forward: RMSNorm (y = h / rms(h) * (offset + weight)) and, with kCentred, LayerNorm
// (y = (h - mean(h)) / std(h) * weight + bias), h = x or x + residual. Contracts: rms_norm.py, layer_norm.py;
// launchers: rms_norm.cu, layer_norm.cu; backward: norm_backward.cuh.
//
// Traffic. x is read once and y written once: the row waits in registers for its own sum. No sum is made by
// atomics: results are bitwise repeatable, and a row's result does not depend on the other rows.
//
// Threads. `kLanes` threads own a row, up to kVecs vectors of 16 bytes each; narrow rows share a block. How many lanes,
// and so the order of a row's sum, follows from the width alone. A row too wide for one block is shared by a cluster of
// them, a part each. Odd widths come in bundles of rows. What is left (odd strides, expanded tensors, odd widths that
// are wide or have a residual, wide rows before sm_90) takes the *_any kernels: slower, same order of sums.
#pragma once
#include "norm_moments.cuh"

namespace fuselm {
namespace norm {

// Each is the fastest of a sweep on an H200, docs/log.md.
using RmsConfigs =
    ConfigList<Config<8, 1, 128, 1>, Config<16, 1, 128, 1>, Config<32, 1, 128, 1>, Config<32, 2, 128, 12>,
               Config<32, 3, 128, 8>, Config<64, 2, 128, 12>, Config<128, 2, 128, 12>, Config<256, 2, 256, 6>,
               Config<256, 4, 256, 4>, Config<512, 4, 512, 2>>;
// LayerNorm has twice as much to do between loading a row and writing it, so much that instructions are what it waits
// for: threads with more elements each spend fewer of them on meeting each other.
using LayerConfigs =
    ConfigList<Config<8, 1, 128, 1>, Config<16, 1, 128, 1>, Config<32, 1, 128, 1>, Config<32, 2, 128, 10>,
               Config<32, 3, 128, 8>, Config<32, 4, 128, 8>, Config<64, 4, 128, 8>, Config<128, 4, 128, 8>,
               Config<256, 4, 256, 4>, Config<512, 4, 512, 2>>;
template <bool kCentred>
using ForwardConfigs = std::conditional_t<kCentred, LayerConfigs, RmsConfigs>;
// A few rows with the usual arguments and no offset, where what counts is how soon the first is done: one row a block,
// the weight asked for while x is still on its way. Lanes as above, or a thread for each vector of a lane, so that a
// row's sum has the same bits in both.
using FewRowsRms = ConfigList<Config<64, 2, 64, 1, Kind::kSoon>, Config<128, 2, 128, 1, Kind::kSoon>,
                              Config<256, 2, 256, 1, Kind::kSoon>, Config<256, 4, 256, 1, Kind::kSoon>,
                              Config<512, 4, 512, 1, Kind::kSoon>>;
using FewRowsLayer = ConfigList<Config<32, 4, 128, 1, Kind::kWide>, Config<64, 4, 256, 1, Kind::kWide>,
                                Config<128, 4, 512, 1, Kind::kWide>, Config<256, 4, 256, 1, Kind::kSoon>,
                                Config<512, 4, 512, 1, Kind::kSoon>>;
template <bool kCentred>
using FewRowsConfigs = std::conditional_t<kCentred, FewRowsLayer, FewRowsRms>;
template <bool kCentred>
constexpr int64_t kFewVectors = kCentred ? 32 : 96;  // narrower rows are as fast without
// How many rows are few, for each multiprocessor. Of up to 128 vectors more: at 1024x1024 LayerNorm takes 5.5 us so and
// 6.0 as many rows do, at 2048 rows it is even; RMSNorm takes 8.5 and 9.4 at 4096x1024.
template <bool kCentred>
constexpr int64_t few_rows(int64_t vectors) {
  return vectors > 128 ? 2 : kCentred ? 8 : 64;
}
// What a wider row is cut into: the first whose clusters hold it.
template <typename X>
using ForwardParts = std::conditional_t<sizeof(X) == 4, ConfigList<Config<256, 8, 256, 4>, Config<512, 8, 512, 1>>,
                                        ConfigList<Config<256, 8, 256, 4>>>;
using FewRowsParts = ConfigList<Config<256, 8, 256, 1, Kind::kSoon>>;
// Of rows of odd width that a block takes, or one round of them: more where a row takes the whole block, since then a
// lane takes few of a row's columns and has as many weights to load.
template <typename C>
constexpr int64_t kBundleBytes = (C::kGroups == 1 ? 32 : 16) << 10;

struct ForwardArgs {
  // What the first loads wait for is in the first 48 bytes, one line of the constant cache, and most of the rest in the
  // next one: the cache is cold when a kernel starts, and each line is most of a microsecond away.
  const char *x, *weight, *bias;
  int64_t x_stride;  // bytes from row to row, where one stride says it all
  int64_t rows;
  int32_t width;
  bool one_stride;
  bool chained;      // launched programmatically
  bool large;        // x and y together are larger than L2
  bool round_first;  // llama: the normalised value is rounded to x's dtype before it meets the weight
  char* y;           // contiguous, as every output is
  float *mean, *rstd;
  float inverse_width, eps, offset;
  Parts parts;
  const char* residual;
  int64_t residual_stride;
  char* residual_out;
  DType weight_dtype, bias_dtype;
  int bundle;      // rows a block takes where they are bundles
  int64_t rounds;  // of rows that blocks that stay take by their number; then by the counter, if there is one
  unsigned long long* counter;
  Rows x_rows, residual_rows, weight_rows, bias_rows;

  __device__ const char* x_row(int64_t row) const { return likely(one_stride) ? x + row * x_stride : x_rows.row(row); }
  __device__ const char* residual_row(int64_t row) const {
    return likely(one_stride) ? residual + row * residual_stride : residual_rows.row(row);
  }
};

// xhat * weight + bias. Without a bias +0 is added, in every kernel: a result of -0 has the same bits in all of them.
template <bool kCentred>
__device__ inline float placed(float xhat, float weight, float bias) {
  return kCentred ? fmaf(xhat, weight, bias) : xhat * weight;
}

__device__ inline void store_moments(const ForwardArgs& a, int64_t row, const Moments& m) {
  if (a.rstd != nullptr) a.rstd[row] = m.rstd;
  if (a.mean != nullptr) a.mean[row] = m.mean;
}

// A vector of the weight and of the bias as they come, where those are the usual ones: of x's dtype.
template <bool kCentred>
struct Usual {
  uint4 weight, bias;

  __device__ void load(const ForwardArgs& a, int at) {
    weight = __ldg(reinterpret_cast<const uint4*>(a.weight) + at);
    if (kCentred) bias = a.bias != nullptr ? __ldg(reinterpret_cast<const uint4*>(a.bias) + at) : uint4{};
  }
  __device__ void forget() {  // see PackedVector
    asm volatile("" : "+r"(weight.x), "+r"(weight.y), "+r"(weight.z), "+r"(weight.w));
    if (kCentred) asm volatile("" : "+r"(bias.x), "+r"(bias.y), "+r"(bias.z), "+r"(bias.w));
  }
  __device__ void load_now(const ForwardArgs& a, int at) {
    weight = load_constant_now(a.weight + at * 16);
    if (kCentred) bias = a.bias != nullptr ? load_constant_now(a.bias + at * 16) : uint4{};
  }
};

// y of one vector. kUsual leaves out what the usual arguments do not need, and with it the branches that keep the
// compiler from asking for the next vector's weight early: 145 us became 134 at 32768x4096.
template <bool kCentred, typename X, typename H, bool kUsual, bool kOffset, typename Normalised>
__device__ inline void scaled(const ForwardArgs& a, const Held<X, H>& held, const Normalised& normalised, int index,
                              const Usual<kCentred>& usual, float (&y)[kVec<X>]) {
  float weight[kVec<X>], bias[kVec<X>] = {};
  held.get(y);
  if constexpr (kUsual) {
    unpack<X>(usual.weight, weight);
    if constexpr (kCentred) unpack<X>(usual.bias, bias);
#pragma unroll
    for (int i = 0; i < kVec<X>; ++i) {
      y[i] = placed<kCentred>(normalised(y[i]), !kCentred && kOffset ? weight[i] + a.offset : weight[i], bias[i]);
    }
  } else {
    load_weight(a.weight, a.weight_dtype, a.offset, index, weight);
    if (kCentred && a.bias != nullptr) load_constant(a.bias, a.bias_dtype, index, bias);
#pragma unroll
    for (int i = 0; i < kVec<X>; ++i) {
      const float xhat = normalised(y[i]);
      y[i] = placed<kCentred>(!kCentred && a.round_first ? rounded<X>(xhat) : xhat, weight[i], bias[i]);
    }
  }
}

// y of a row or a part. `usual` holds the lane's weights where they were asked for early; else they are asked for all
// at once or, where a thread has many vectors or a bias too, some at a time: there are no registers for more.
template <bool kCentred, typename X, typename H, typename C, bool kUsual, typename Place, typename Normalised>
__device__ inline void write_row(const ForwardArgs& a, char* y_row, const Place& at, const Normalised& normalised,
                                 const Held<X, H> (&held)[C::kHeld], Usual<kCentred> (&usual)[C::kHeld]) {
  constexpr int kAtOnce = kCentred ? 2 : C::kHeld > 4 ? 4 : C::kHeld;
#pragma unroll
  for (int v = 0; v < C::kHeld; ++v) {
    if (kUsual && !C::kSoon && v % kAtOnce == 0) {
#pragma unroll
      for (int next = v; next < v + kAtOnce; ++next) {
        const int i = at.lane + next * C::kLanes;
        if (next < C::kHeld && i < at.count) usual[next].load(a, at.skip + i);
      }
    }
    const int i = at.lane + v * C::kLanes;
    if (!kUsual && i >= at.count) continue;
    float y[kVec<X>];
    scaled<kCentred, X, H, kUsual, !C::kSoon>(a, held[v], normalised, at.skip + i, usual[v], y);
    if (i < at.count) store_floats<X>(y_row + i * 16, y);
  }
}

// A residual doubles what a thread has under way: half as many blocks, twice the registers.
template <typename C, bool kResidual>
constexpr int kForwardBlocks = fitting_blocks(C::kThreads, kResidual&& C::kBlocks > 1 ? C::kBlocks / 2 : C::kBlocks);

template <bool kCentred, typename X, typename H, bool kResidual, typename C, bool kUsual, bool kParted>
__global__ void __launch_bounds__(C::kThreads, (kForwardBlocks<C, kResidual>))
    norm_forward_kernel(const __grid_constant__ ForwardArgs a) {
  constexpr int kH = kVec<X> * sizeof(H);  // bytes of a vector of h
  constexpr bool kSoon = C::kSoon;
  using Sums = Gathered<kCentred>;
  // In a chain of small kernels starting one takes as long as running it: let the next start now, then wait for the
  // last.
  if (kSoon) warm(a.x), warm(a.eps);
  if (kSoon || a.chained) {
    allow_next_kernel();
    wait_for_previous_kernel();
  }
  __shared__ alignas(16) float scratch[C::kGroups * kScratch<C>];
  __shared__ std::conditional_t<kParted, Exchange<Sums::kNumbers>, char> exchange;
  if constexpr (kParted) exchange.init();
  const Place<X, C, kParted> at(a.parts, a.rows, a.width);
  const int64_t row = at.row;

  // One product of 32 bits where a row is waited for: for kSoon strides are below 2^32.
  auto soon = [&](const char* rows, int64_t stride) {
    return rows + uint64_t{static_cast<uint32_t>(row)} * static_cast<uint32_t>(stride);
  };
  const char* x_row = (kSoon ? soon(a.x, a.x_stride) : a.x_row(row)) + at.skip * 16;
  const char* residual_row = nullptr;
  if (kResidual) residual_row = (kSoon ? soon(a.residual, a.residual_stride) : a.residual_row(row)) + at.skip * kH;
  Loaded<X, H, kResidual> loaded[C::kHeld];
#pragma unroll
  for (int v = 0; v < C::kHeld; ++v) {
    const int i = at.lane + v * C::kLanes;
    if constexpr (kSoon) {
      loaded[v].load_if(i < at.count, x_row + i * 16, residual_row + i * kH);
    } else {
      loaded[v].load_if(i < at.count, x_row + i * 16, residual_row + i * kH, read_policy(a.large));
    }
  }

  Usual<kCentred> usual[C::kHeld];
#pragma unroll
  for (int v = 0; kSoon && v < C::kHeld; ++v) {  // asked for while x is still on its way
    const int i = at.lane + v * C::kLanes;
    if (i < at.count) usual[v].load_now(a, at.skip + i);
  }

  const int64_t element = row * a.width + at.skip * kVec<X>;
  Held<X, H> held[C::kHeld];
#pragma unroll
  for (int v = 0; v < C::kHeld; ++v) {
    const int i = at.lane + v * C::kLanes;
    held[v] = loaded[v].sum();
    if (kResidual && i < at.count) {
      float h[kVec<X>];
      held[v].get(h);
      store_floats<H>(a.residual_out + element * static_cast<int64_t>(sizeof(H)) + i * kH, h);
    }
  }
  auto each = [&](const auto& f) {
#pragma unroll
    for (int v = 0; v < C::kHeld; ++v) {
      float h[kVec<X>];
      held[v].get(h);
      f(h, at.lane + v * C::kLanes < at.count ? kVec<X> : 0);
      if (kCentred) held[v].forget();
    }
  };
  const float count = static_cast<float>(at.count * kVec<X>);
  float* const own = scratch + at.group * kScratch<C>;
  const float share = kParted ? inverse(count) : a.inverse_width;
  constexpr bool kOnce = kCentred && sizeof(X) == 2;
  Sums gathered = Sums::template of_row<kVec<X>, C, true>(each, count, share, kOnce, own);
  if constexpr (kParted) {
    float mine[Sums::kNumbers];
    gathered.numbers(mine);
    exchange.share(mine, a.parts.count, at.rank);
    gathered = Sums::of_parts(a.parts.count, a.inverse_width, [&](int p) -> const auto& { return exchange.values[p]; });
  }
  const Moments m = gathered.template moments<X>(a.inverse_width, a.eps, kOnce);
  if (at.lane == 0 && at.rank == 0 && at.count > 0) store_moments(a, row, m);

  char* y_row = a.y + element * static_cast<int64_t>(sizeof(X));
  if (kOnce && likely(m.near)) {
    write_row<kCentred, X, H, C, kUsual>(a, y_row, at, Normalise<kCentred, true>(m), held, usual);
  } else {
    write_row<kCentred, X, H, C, kUsual>(a, y_row, at, Normalise<kCentred, false>(m), held, usual);
  }
}

// Many rows of 16 bits in two parts, with the usual arguments: a block stays, and takes both parts of a row after
// another. Rows come to shared memory ahead of use and leave it behind it, y in x's place. The weights stay in
// registers: they are as many bytes as a row, and blocks that come and go ask L2 for them as often.
//
// Memory serves some multiprocessors better than others: of 31 rows each the first had theirs after 102 us, the last
// after 131. So only the first rounds are shared out beforehand, every gridDim.x-th row a block. From then on each
// takes the next row there is, by a counter that the first block has set. What the memory held before cannot do harm: a
// row that is taken twice is written twice the same, and those that count are left to whoever asks after the counter
// was set, the first block at the latest.
using Stay = Config<256, 8, 512, 1>;
constexpr int kStayStages = 3;
constexpr int64_t kStayRounds = 8;  // are worth staying for
constexpr int64_t kSharedOut = 8;   // rounds at most that are shared out beforehand; the counter should be set by then
constexpr int64_t kCounterBytes = sizeof(unsigned long long);

template <typename X>
__global__ void __launch_bounds__(Stay::kThreads, Stay::kBlocks)
    layer_norm_stay_kernel(const __grid_constant__ ForwardArgs a) {
  using C = Stay;
  using Sums = Gathered<true>;
  constexpr int N = kVec<X>, kWarps = C::kThreads / kWarp;
  extern __shared__ __align__(128) uint4 stage_bytes[];
  __shared__ uint64_t arrived[kStayStages];
  __shared__ int64_t row_of[kStayStages];
  __shared__ float scratch[3][kWarps];
  const int vectors = a.width / N;
  const int lane = threadIdx.x % C::kLanes;
  const int skip = static_cast<int>(threadIdx.x) / C::kLanes * a.parts.vectors;
  const int count = min(a.parts.vectors, vectors - skip);
  auto stage_at = [&](int s) { return stage_bytes + s * vectors; };
  int64_t round = 0;
  bool more = a.counter != nullptr;
  auto next_row = [&]() -> int64_t {
    if (round < a.rounds) return blockIdx.x + round++ * gridDim.x;
    const uint64_t end = static_cast<uint64_t>(a.rows), drawn = more ? atomicAdd(a.counter, 1ull) : end;
    more = drawn < end;  // who has drawn no row stops there, and so must not draw another
    return static_cast<int64_t>(more ? drawn : end);
  };
  auto fetch = [&](int64_t row, int s) {  // by the first thread; rows past the end are news too
    row_of[s] = row;
    const uint32_t bytes = row < a.rows ? vectors * 16 : 0;
    expect_bytes(&arrived[s], bytes);
    if (bytes > 0) copy_bulk(stage_at(s), a.x_row(row), bytes, &arrived[s], read_policy(a.large));
  };
  if (threadIdx.x < kStayStages) init_barrier(&arrived[threadIdx.x]);
  __syncthreads();  // nobody asks a barrier before it is there
  if (threadIdx.x == 0) {
    if (blockIdx.x == 0 && a.counter != nullptr) atomicExch(a.counter, static_cast<uint64_t>(a.rounds) * gridDim.x);
    fetch(next_row(), 0);
  }
  Usual<true> usual[C::kVecs];
#pragma unroll
  for (int v = 0; v < C::kVecs; ++v) {
    if (lane + v * C::kLanes < count) usual[v].load_now(a, skip + lane + v * C::kLanes);
  }
  // The other rows are asked for after the weights: else the first would wait for them all, a microsecond longer.
#pragma unroll
  for (int v = 0; v < C::kVecs; ++v) usual[v].forget();
  for (int s = 1; threadIdx.x == 0 && s < kStayStages; ++s) fetch(next_row(), s);
  // The sum of each part's lanes, in the order of row_sum.
  auto sums_of = [&](const float* between, float (&of)[2]) {
    const float mine = lane_sum<kWarps / 2>(between[threadIdx.x % kWarps]);
    const float other = __shfl_xor_sync(0xffffffffu, mine, kWarps / 2);
    const bool second = threadIdx.x & kWarps / 2;
    of[0] = second ? other : mine, of[1] = second ? mine : other;
  };
  const float counts[2] = {static_cast<float>(a.parts.vectors * N),
                           static_cast<float>((vectors - a.parts.vectors) * N)};
  const float shares[2] = {inverse(counts[0]), inverse(counts[1])};

  int s = 0, parity = 0;
  for (bool first = true;; first = false) {
    wait_for_bytes(&arrived[s], parity);
    const int64_t row = row_of[s];
    if (row >= a.rows) break;
    const int64_t later = threadIdx.x == 0 && !first ? next_row() : 0;  // is known by the time it is fetched
    uint4* const stage = stage_at(s) + skip;
    auto vector = [&](int v) {
      const int i = lane + v * C::kLanes;
      return PackedVector<X>{i < count ? stage[i] : make_uint4(0, 0, 0, 0)};
    };
    float sums[2] = {};
#pragma unroll
    for (int v = 0; v < C::kVecs; ++v) {
      float h[N];
      vector(v).get(h);
      sums[0] += sum_of(h);
      sums[1] += sum_of_squares(h);
    }
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      sums[k] = lane_sum<kWarp>(sums[k]);
      if (threadIdx.x % kWarp == 0) scratch[k][threadIdx.x / kWarp] = sums[k];
    }
    __syncthreads();
    float met[2][2];
#pragma unroll
    for (int k = 0; k < 2; ++k) sums_of(scratch[k], met[k]);
    Sums parts[2];
#pragma unroll
    for (int p = 0; p < 2; ++p) parts[p] = Sums::of_sums({met[0][p], met[1][p]}, counts[p], shares[p]);
    if (unlikely(!parts[0].lies_near() || !parts[1].lies_near())) {
      const float mean = threadIdx.x < C::kLanes ? parts[0].mean : parts[1].mean;
      float squares = 0.0f;
#pragma unroll
      for (int v = 0; v < C::kVecs; ++v) {
        float h[N];
        vector(v).get(h);
        squares += sum_of_squares_around<true>(h, mean, lane + v * C::kLanes < count ? N : 0);
      }
      squares = lane_sum<kWarp>(squares);
      if (threadIdx.x % kWarp == 0) scratch[2][threadIdx.x / kWarp] = squares;
      __syncthreads();
      sums_of(scratch[2], met[0]);
#pragma unroll
      for (int p = 0; p < 2; ++p) {
        if (!parts[p].lies_near()) parts[p].squares = met[0][p];
      }
    }
    float numbers[2][Sums::kNumbers];
#pragma unroll
    for (int p = 0; p < 2; ++p) parts[p].numbers(numbers[p]);
    const Sums whole = Sums::of_parts(2, a.inverse_width, [&](int p) -> const auto& { return numbers[p]; });
    const Moments m = whole.template moments<X>(a.inverse_width, a.eps, true);
    if (threadIdx.x == 0) store_moments(a, row, m);
    auto write = [&](const auto& normalised) {
#pragma unroll
      for (int v = 0; v < C::kVecs; ++v) {
        const int i = lane + v * C::kLanes;
        float y[N];
        usual[v].forget();
        scaled<true, X, X, true, true>(a, vector(v), normalised, skip + i, usual[v], y);
        if (i < count) store_floats<X>(stage + i, y);
      }
    };
    if (likely(m.near)) {
      write(Normalise<true, true>(m));
    } else {
      write(Normalise<true, false>(m));
    }
    fence_copies();
    __syncthreads();
    if (threadIdx.x == 0) {
      store_bulk(a.y + row * vectors * 16, stage_at(s), vectors * 16);
      if (!first) {  // the row before this one has left its stage
        wait_for_stores<1>();
        fetch(later, s == 0 ? kStayStages - 1 : s - 1);
      }
    }
    if (++s == kStayStages) s = 0, parity ^= 1;
  }
  if (threadIdx.x == 0) wait_for_stores<0>();
}

// Blocks of a multiprocessor whose threads have registers for a row, for its weights where they are kept, and for the
// rest.
template <typename X, typename C>
constexpr bool kKeepWeight = C::kVecs * kVec<X> <= 24;
template <typename X, typename C>
constexpr int kBundleBlocks =
    fitting_blocks(C::kThreads, 65536 / ((C::kVecs * kVec<X> * (kKeepWeight<X, C> ? 2 : 1) + 32) * C::kThreads));

// Rows of odd width that follow one another: a block takes a bundle of them. y takes the place of x in shared memory.
template <bool kCentred, typename X, typename C>
__global__ void __launch_bounds__(C::kThreads, (kBundleBlocks<X, C>))
    norm_forward_bundle_kernel(const __grid_constant__ ForwardArgs a) {
  constexpr int N = kVec<X>;
  constexpr int kSpan = C::kLanes * N;
  extern __shared__ __align__(128) uint4 bundle_bytes[];
  __shared__ uint64_t arrived;
  __shared__ float scratch[2][C::kGroups * kScratch<C>];
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
    float h[C::kVecs][N];
    bool loaded = false;
    auto each = [&](const auto& f) {
#pragma unroll
      for (int v = 0; v < C::kVecs; ++v) {
        if (v * kSpan >= a.width) break;
        if (!loaded) load_columns<C::kLanes>(row, v * kSpan + lane, width, h[v]);
        f(h[v], Span{v * kSpan + lane, C::kLanes, width}.template count<N>());
      }
      loaded = true;
    };
    float* const own = &scratch[r / C::kGroups % 2][group * kScratch<C>];
    const auto gathered =
        Gathered<kCentred>::template of_row<N, C, false>(each, static_cast<float>(width), a.inverse_width, false, own);
    const Moments m = gathered.template moments<X>(a.inverse_width, a.eps, false);
    if (lane == 0 && width > 0) store_moments(a, first + r, m);
    const Normalise<kCentred, false> normalised(m);
#pragma unroll
    for (int v = 0; v < C::kVecs; ++v) {
      if (v * kSpan >= a.width) break;
      if (!kKeepWeight<X, C>) load_weight_of(v);
      float bias[N] = {};
      if (kCentred && a.bias != nullptr) {
        load_row_columns<C::kLanes>(a.bias, a.bias_dtype, v * kSpan + lane, a.width, bias);
      }
#pragma unroll
      for (float& one : h[v]) one = normalised(one);
      if (!kCentred && a.round_first) {
#pragma unroll
        for (float& one : h[v]) one = rounded<X>(one);
      }
#pragma unroll
      for (int i = 0; i < N; ++i) h[v][i] = placed<kCentred>(h[v][i], weight[v][i], bias[i]);
      store_columns<C::kLanes>(row, v * kSpan + lane, width, h[v]);
    }
  }
  __syncthreads();
  store_run<X, C::kThreads>(a.y, run, bundle);
}

// Any strides, any alignment, any mix of dtypes: elements one by one.
template <bool kCentred, typename X, int kLanes>
__global__ void __launch_bounds__(any_threads(kLanes), 1024 / any_threads(kLanes))
    norm_forward_any_kernel(const __grid_constant__ ForwardArgs a) {
  constexpr int N = kVec<X>;
  using Sums = Gathered<kCentred>;
  using C = Config<kLanes, 1, any_threads(kLanes), 1>;
  __shared__ float scratch[2][C::kGroups * kScratch<C>];
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

  // h, left in residual_out where there is one: it is read from there again.
  for (int base = 0; summed && base < width; base += kLanes * N) {
    const Span span = span_of<N, kLanes>(lane, base, width);
    float h[N], r[N];
    load_elements(x_row, kDType<X>, a.x_rows.column_stride, span, h);
    load_elements(residual_row, h_dtype, a.residual_rows.column_stride, span, r);
#pragma unroll
    for (int i = 0; i < N; ++i) h[i] = round_to(h_dtype, h[i] + r[i]);
    store_elements(h_row, h_dtype, span, h);
  }
  // Lanes of other warps may have left what this one reads: parts are shared out from their own beginnings.
  __syncthreads();
  auto load_h = [&](const Span& span, float (&h)[N]) {
    if (summed) {
      load_elements(h_row, h_dtype, 1, span, h);
    } else {
      load_elements(x_row, kDType<X>, a.x_rows.column_stride, span, h);
    }
  };

  const bool once = sizeof(X) == 2 && a.width % N == 0;
  float met[kMaxParts][Sums::kNumbers];
  Sums gathered;
  for (int part = 0; part < a.parts.count; ++part) {
    const int begin = part * a.parts.vectors * N, end = min(width, begin + a.parts.vectors * N);
    auto each = [&](const auto& f) {
      for (int base = begin; base < end; base += kLanes * N) {
        const Span span = span_of<N, kLanes>(lane, base, width).until(end);
        float h[N];
        load_h(span, h);
        f(h, span.template count<N>());
      }
    };
    float* const own = &scratch[part % 2][group * kScratch<C>];
    const float count = static_cast<float>(end - begin);
    const float share = a.parts.count == 1 ? a.inverse_width : inverse(count);
    gathered = Sums::template of_row<N, C, false>(each, count, share, once, own);
    gathered.numbers(met[part]);
  }
  if (a.parts.count > 1) {
    gathered = Sums::of_parts(a.parts.count, a.inverse_width, [&](int p) -> const auto& { return met[p]; });
  }
  const Moments m = gathered.template moments<X>(a.inverse_width, a.eps, once);
  if (lane == 0 && width > 0) store_moments(a, index, m);
  const Normalise<kCentred, true> near(m);
  const Normalise<kCentred, false> far(m);

  for (int base = 0; base < width; base += kLanes * N) {
    const Span span = span_of<N, kLanes>(lane, base, width);
    float h[N], weight[N], bias[N] = {};
    load_h(span, h);
    load_weight_elements(a.weight_rows, a.offset, span, weight);
    if (kCentred && a.bias_rows.present()) {
      load_elements(a.bias_rows.data, a.bias_dtype, a.bias_rows.column_stride, span, bias);
    }
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float xhat = m.near ? near(h[i]) : far(h[i]);
      h[i] = placed<kCentred>(!kCentred && a.round_first ? rounded<X>(xhat) : xhat, weight[i], bias[i]);
    }
    store_elements(y_row, kDType<X>, span, h);
  }
}

// The launchers of each norm; a struct, so that they find each other and one name says which norm.
template <bool kCentred>
struct Forward {
  template <typename X, typename F>
  static void with_part(int64_t width, const F& f) {
    ForwardParts<X>::pick(divide_up(divide_up(width, kVec<X>), kMaxParts), f);
  }

  template <typename X, int kLanes>
  static void launch_any(const ForwardArgs& a, cudaStream_t stream) {
    constexpr int kThreads = any_threads(kLanes);
    const unsigned blocks = static_cast<unsigned>(divide_up(a.rows, kThreads / kLanes));
    norm_forward_any_kernel<kCentred, X, kLanes><<<blocks, kThreads, 0, stream>>>(a);
  }

  // False when the rows are no bundles.
  template <typename X, typename C>
  static bool launch_bundle(ForwardArgs& a, int device, cudaStream_t stream) {
    static std::atomic<bool> allowed[kMaxDevices];
    const int64_t row_bytes = a.width * static_cast<int64_t>(sizeof(X));
    const bool plain = a.weight_rows.column_stride == 1 && a.bias_rows.column_stride == 1;
    const bool alone = !a.residual_rows.present() && plain;
    if (!alone || !bundles<X>(a.x_rows, a.width) || reinterpret_cast<uintptr_t>(a.y) % 16 != 0) return false;
    const int64_t rounds = kBundleBytes<C> / (C::kGroups * row_bytes);
    a.bundle = C::kGroups * static_cast<int>(rounds > 1 ? rounds : 1);
    const auto kernel = norm_forward_bundle_kernel<kCentred, X, C>;
    const int64_t bytes = Run::room(a.bundle, row_bytes);
    if (!allow_shared(kernel, device, bytes, allowed)) return false;
    const unsigned blocks = static_cast<unsigned>(divide_up(a.rows, a.bundle));
    kernel<<<blocks, C::kThreads, static_cast<size_t>(bytes), stream>>>(a);
    return true;
  }

  template <typename X>
  static bool launch_stay(ForwardArgs& a, const DeviceFacts& facts, int device, cudaStream_t stream) {
    static std::atomic<bool> allowed[kMaxDevices];
    const int64_t bytes = kStayStages * a.width * static_cast<int64_t>(sizeof(X));
    if (facts.capability < 90 || !allow_shared(layer_norm_stay_kernel<X>, device, bytes, allowed)) return false;
    const unsigned blocks = static_cast<unsigned>(facts.multiprocessors);
    a.rounds = a.counter == nullptr ? divide_up(a.rows, blocks) : at_most(a.rows / blocks / 2, kSharedOut);
    layer_norm_stay_kernel<X><<<blocks, Stay::kThreads, static_cast<size_t>(bytes), stream>>>(a);
    return true;
  }

  template <typename X, typename H, bool kResidual, bool kUsual>
  static Status launch_vectors(ForwardArgs& a, int device, cudaStream_t stream) {
    const int64_t count = a.width / kVec<X>;
    const DeviceFacts& facts = device_facts(device);
    const bool few = a.rows <= few_rows<kCentred>(count) * facts.multiprocessors;
    a.chained = few && facts.capability >= 90;
    Status status = Status::kOk;
    auto held = [&](auto config) {
      using C = decltype(config);
      const dim3 grid(static_cast<unsigned>(divide_up(a.rows, C::kGroups)));
      const auto kernel = norm_forward_kernel<kCentred, X, H, kResidual, C, kUsual, false>;
      status = launch(kernel, grid, C::kThreads, 0, a.chained, stream, a);
    };
    auto parted = [&](auto config) {
      using C = decltype(config);
      static std::atomic<int> clusters[kMaxDevices][kMaxParts + 1];
      const auto kernel = norm_forward_kernel<kCentred, X, H, kResidual, C, kUsual, true>;
      std::atomic<int>& known = clusters[device][a.parts.count];
      if (launch_parts(kernel, a, a.rows, a.parts.count, C::kThreads, a.chained, facts, known, stream)) return;
      launch_any<X, C::kLanes>(a, stream);
      status = launch_status();
    };
    const bool whole = a.parts.count == 1;
    if constexpr (kUsual && std::is_same_v<X, H>) {
      const bool near = a.one_stride && (a.x_stride | a.residual_stride) >> 32 == 0;
      if (few && near && a.offset == 0.0f && count > kFewVectors<kCentred>) {
        if (whole && FewRowsConfigs<kCentred>::pick(count, held)) return status;
        if (!whole && FewRowsParts::pick(a.parts.vectors, parted)) return status;
      }
    }
    if (ForwardConfigs<kCentred>::pick(count, held)) return status;
    if constexpr (kCentred && sizeof(X) == 2 && !kResidual && kUsual) {
      if (a.parts.count == 2 && a.rows >= kStayRounds * facts.multiprocessors &&
          launch_stay<X>(a, facts, device, stream)) {
        return launch_status();
      }
    }
    with_part<X>(a.width, parted);
    return status;
  }

  // The usual arguments: a weight of x's dtype, multiplied before rounding, and a bias of x's dtype or none.
  template <typename X, typename H, bool kResidual>
  static Status launch_vectors(ForwardArgs& a, int device, cudaStream_t stream) {
    const bool usual_bias = a.bias_dtype == kDType<X> || a.bias_dtype == DType::kAbsent;
    const bool usual = a.weight_dtype == kDType<X> && usual_bias && !a.round_first;
    return usual ? launch_vectors<X, H, kResidual, true>(a, device, stream)
                 : launch_vectors<X, H, kResidual, false>(a, device, stream);
  }

  template <typename X>
  static Status launch_rows(ForwardArgs& a, int device, cudaStream_t stream) {
    const DType residual = a.residual_rows.dtype;
    a.large = 2 * a.rows * a.width * static_cast<int64_t>(sizeof(X)) > device_facts(device).l2_bytes;
    if (a.x_rows.vectors && a.weight_rows.vectors && a.bias_rows.vectors && a.residual_rows.vectors) {
      if (residual == DType::kAbsent) return launch_vectors<X, X, false>(a, device, stream);
      if (residual == kDType<X>) return launch_vectors<X, X, true>(a, device, stream);
      if (residual == DType::kFloat32) return launch_vectors<X, float, true>(a, device, stream);
    }
    const int64_t count = divide_up(a.width, kVec<X>);
    auto any = [&](auto config) { launch_any<X, decltype(config)::kLanes>(a, stream); };
    auto bundle_or_any = [&](auto config) {
      if (!launch_bundle<X, decltype(config)>(a, device, stream)) any(config);
    };
    if (!ForwardConfigs<kCentred>::pick(count, bundle_or_any)) with_part<X>(a.width, any);
    return launch_status();
  }

  // For the counter of blocks that stay. Of the sizes alone: what a tensor is made of, and so how many vectors its rows
  // have, is not always known where memory is asked for.
  static int64_t workspace(const TensorView& x) {
    if (x.rank < 1 || x.rank > kMaxRank) return 0;
    constexpr int kHeld = Stay::kThreads * Stay::kVecs * kVec<bf16>;
    const int64_t width = x.sizes[x.rank - 1];
    return kCentred && width > kHeld / 2 && width <= kHeld && count_rows(x) >= kStayRounds ? kCounterBytes : 0;
  }

  static Status run(const TensorView& x, const TensorView& weight, const TensorView& bias, const TensorView& residual,
                    double eps, double offset, bool round_first, const TensorView& y, const TensorView& residual_out,
                    const TensorView& mean, const TensorView& rstd, Workspace workspace, Stream stream) {
    Status status = check_tensors(x, weight, residual);
    if (status == Status::kOk) status = check_tensors(x, bias, residual);
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
      a.x_rows = as_rows(x), a.residual_rows = as_rows(residual);
      a.weight_rows = as_rows(weight), a.bias_rows = as_rows(bias);
      a.x = a.x_rows.data, a.residual = a.residual_rows.data, a.weight = a.weight_rows.data, a.bias = a.bias_rows.data;
      a.x_stride = a.x_rows.strides[0], a.residual_stride = a.residual_rows.strides[0];
      a.one_stride = a.x_rows.outer == 1 && a.residual_rows.outer == 1;
      a.y = static_cast<char*>(y.data), a.residual_out = static_cast<char*>(residual_out.data);
      a.mean = static_cast<float*>(mean.data), a.rstd = static_cast<float*>(rstd.data);
      a.rows = rows, a.width = static_cast<int32_t>(width), a.inverse_width = 1.0f / static_cast<float>(width);
      const bool whole = ForwardConfigs<kCentred>::pick(divide_up(width, kVec<X>), [](auto) {});
      a.parts.vectors = static_cast<int>(divide_up(width, kVec<X>));
      if (!whole) with_part<X>(width, [&](auto config) { a.parts = Parts::of<X, decltype(config)>(width); });
      a.eps = static_cast<float>(eps), a.offset = exact_offset(offset);
      a.weight_dtype = weight.dtype, a.bias_dtype = bias.dtype, a.round_first = round_first;
      if (workspace.bytes >= kCounterBytes) a.counter = static_cast<unsigned long long*>(workspace.data);
      return launch_rows<X>(a, guard.device(), cuda_stream(stream));
    });
  }
};

}  // namespace norm
}  // namespace fuselm
