// The norm family, forward: RMSNorm (y = h / rms(h) * (offset + weight)) and, with kCentred, LayerNorm
// (y = (h - mean(h)) / std(h) * weight + bias), h = x or x + residual. Contracts: rms_norm.py, layer_norm.py;
// launchers: rms_norm.cu, layer_norm.cu; backward: norm_backward.cuh.
//
// Traffic. x is read once and y written once: the row waits in registers for its own sum. No atomics: results are
// bitwise repeatable, and a row's result does not depend on the other rows.
//
// Threads. `kLanes` threads own a row, up to kVecs vectors of 16 bytes each; narrow rows share a block. How many lanes,
// and so the order of a row's sum, follows from the width alone. A row too wide for one block is shared by a cluster of
// them, a part each. Odd widths come in bundles of rows. What is left (odd strides, expanded tensors, odd widths that
// are wide or have a residual, wide rows before sm_90) takes the *_any kernels: slower, same order of sums.
#pragma once
#include <cmath>

#include "parts.cuh"

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
// the weight asked for while x is still on its way. Lanes as above, so that a row's sum has the same bits in both.
using FewRowsRms = ConfigList<Config<64, 2, 64, 1, Kind::kSoon>, Config<128, 2, 128, 1, Kind::kSoon>,
                              Config<256, 2, 256, 1, Kind::kSoon>, Config<256, 4, 256, 1, Kind::kSoon>,
                              Config<512, 4, 512, 1, Kind::kSoon>>;
using FewRowsLayer = ConfigList<Config<32, 4, 32, 1, Kind::kSoon>, Config<64, 4, 64, 1, Kind::kSoon>,
                                Config<128, 4, 128, 1, Kind::kSoon>, Config<256, 4, 256, 1, Kind::kSoon>,
                                Config<512, 4, 512, 1, Kind::kSoon>>;
template <bool kCentred>
using FewRowsConfigs = std::conditional_t<kCentred, FewRowsLayer, FewRowsRms>;
constexpr int64_t kFewVectors = 96;  // narrower rows are as fast without
// What a wider row is cut into: the first whose clusters hold it.
template <typename X>
using ForwardParts = std::conditional_t<sizeof(X) == 4, ConfigList<Config<512, 4, 512, 2>, Config<512, 8, 512, 1>>,
                                        ConfigList<Config<256, 8, 256, 4>>>;
// Of rows of odd width that a block takes, or one round of them: more where a row takes the whole block, since then a
// lane takes few of a row's columns and has as many weights to load.
template <typename C>
constexpr int64_t kBundleBytes = (C::kGroups == 1 ? 32 : 16) << 10;

struct ForwardArgs {
  // What every launch reads comes first and close together: the constant cache is cold when a kernel starts, and each
  // line it has to fetch is a few hundred cycles on the way to the first load.
  const char *x, *weight, *bias;
  char* y;  // contiguous, as every output is
  float *mean, *rstd;
  int64_t x_stride;  // bytes from row to row, where one stride says it all
  int64_t rows;
  int32_t width;
  float inverse_width, eps, offset;
  const char* residual;
  int64_t residual_stride;
  char* residual_out;
  DType weight_dtype, bias_dtype;
  bool round_first;  // llama: the normalised value is rounded to x's dtype before it meets the weight
  bool one_stride;
  bool chained;  // launched programmatically
  bool large;    // x and y together are larger than L2
  int bundle;    // rows a block takes where they are bundles
  Parts parts;
  Rows x_rows, residual_rows, weight_rows, bias_rows;

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

// rsqrtf is off by up to 2 ulp, which a whole fp32 row would inherit, so there it is the correctly rounded one;
// rounding to 16 bits hides it, and a single row has 50 cycles less to wait for. The mean is a product for the same
// reason: what that loses for widths that are no power of two is a quarter of an ulp of rstd.
template <typename X>
__device__ inline float inverse_rms(float sum, float inverse_width, float eps) {
  const float mean = fmaf(sum, inverse_width, eps);
  return sizeof(X) == 4 ? __frsqrt_rn(mean) : rsqrtf(mean);
}

// What a row is moved and scaled by.
struct Moments {
  float mean, rstd;
};

template <int N>
__device__ inline float sum_of(const float (&h)[N]) {
  float even = h[0], odd = h[1];
#pragma unroll
  for (int i = 2; i < N; i += 2) even += h[i], odd += h[i + 1];
  return even + odd;
}

// Of the first `here` elements: kWhole of all or none.
template <bool kWhole, int N>
__device__ inline float sum_of_squares_around(const float (&h)[N], float mean, int here) {
  float sums[2] = {};
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const float d = kWhole || i < here ? h[i] - mean : 0.0f;
    sums[i % 2] = i < 2 ? d * d : fmaf(d, d, sums[i % 2]);
  }
  return kWhole && here == 0 ? 0.0f : sums[0] + sums[1];
}

__device__ inline float inverse(float count) { return count > 0.0f ? __frcp_rn(count) : 0.0f; }

// What is gathered of a row, or of a part of one, by all its lanes together. `each` calls a function with each N
// elements of the lane in turn and how many of them are the row's (kWhole: all or none), the others being 0; `count` is
// how many the lanes have in all. Parts exchange kNumbers numbers and are added up in their order. `scratch` has
// kNumbers * kLanes / 32 floats of this row's own.
template <bool kCentred>
struct Gathered;

template <>
struct Gathered<false> {
  static constexpr int kNumbers = 1;
  float squares = 0.0f;

  template <int N, int kLanes, bool kWhole, typename Each>
  __device__ static Gathered of_row(const Each& each, float, float, float* scratch) {
    Gathered row;
    each([&](const float (&h)[N], int) { row.squares += sum_of_squares(h); });
    row.squares = row_sum<kLanes>(row.squares, scratch);
    return row;
  }
  __device__ void numbers(float (&out)[kNumbers]) const { out[0] = squares; }

  template <typename NumbersOf>
  __device__ static Gathered of_parts(int parts, float, const NumbersOf& of) {
    Gathered all;
    for (int p = 0; p < parts; ++p) all.squares += of(p)[0];
    return all;
  }

  template <typename X>
  __device__ Moments moments(float inverse_width, float eps) const {
    return {0.0f, inverse_rms<X>(squares, inverse_width, eps)};
  }
};

// Two passes over what waits in registers, first the mean, then the squares around it: a row far from 0 loses nothing.
// (One pass, around the row's first element or a point of each lane's own, was no faster: docs/log.md.) Parts take the
// squares around their own means, and move them to the mean of all.
template <>
struct Gathered<true> {
  static constexpr int kNumbers = 3;
  float mean = 0.0f, count = 0.0f, squares = 0.0f;

  template <int N, int kLanes, bool kWhole, typename Each>
  __device__ static Gathered of_row(const Each& each, float count, float inverse_count, float* scratch) {
    float sum = 0.0f, squares = 0.0f;
    each([&](const float (&h)[N], int) { sum += sum_of(h); });
    // A number, never part of another product: it has the same bits in all kernels.
    const float mean = __fmul_rn(row_sum<kLanes>(sum, scratch), inverse_count);
    each([&](const float (&h)[N], int here) { squares += sum_of_squares_around<kWhole>(h, mean, here); });
    squares = row_sum<kLanes>(squares, scratch + (kLanes < kWarp ? 0 : kLanes / kWarp));
    return {mean, count, squares};
  }
  __device__ void numbers(float (&out)[kNumbers]) const { out[0] = mean, out[1] = count, out[2] = squares; }

  template <typename NumbersOf>
  __device__ static Gathered of_parts(int parts, float inverse_width, const NumbersOf& of) {
    Gathered all;
    for (int p = 0; p < parts; ++p) all.mean = fmaf(of(p)[0], of(p)[1], all.mean), all.count += of(p)[1];
    all.mean = __fmul_rn(all.mean, inverse_width);
    for (int p = 0; p < parts; ++p) {
      const float d = of(p)[0] - all.mean;
      all.squares += fmaf(__fmul_rn(of(p)[1], d), d, of(p)[2]);
    }
    return all;
  }

  template <typename X>
  __device__ Moments moments(float inverse_width, float eps) const {
    return {mean, inverse_rms<X>(squares, inverse_width, eps)};
  }
};

template <bool kCentred, typename X>
__device__ inline float normalised(float h, const Moments& m, bool round_first) {
  const float xhat = (kCentred ? h - m.mean : h) * m.rstd;
  return round_first ? rounded<X>(xhat) : xhat;
}

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
  __device__ void load_now(const ForwardArgs& a, int at) {
    weight = load_constant_now(a.weight + at * 16);
    if (kCentred) bias = a.bias != nullptr ? load_constant_now(a.bias + at * 16) : uint4{};
  }
};

// y of one vector. kUsual leaves out what the usual arguments do not need, and with it the branches that keep the
// compiler from asking for the next vector's weight early: 145 us became 134 at 32768x4096.
template <bool kCentred, typename X, typename H, bool kUsual, bool kOffset = true>
__device__ inline void scaled(const ForwardArgs& a, const Held<X, H>& held, const Moments& m, int index,
                              const Usual<kCentred>& usual, float (&y)[kVec<X>]) {
  float weight[kVec<X>], bias[kVec<X>] = {};
  held.get(y);
  if constexpr (kUsual) {
    unpack<X>(usual.weight, weight);
    if constexpr (kCentred) unpack<X>(usual.bias, bias);
#pragma unroll
    for (int i = 0; i < kVec<X>; ++i) {
      const float xhat = (kCentred ? y[i] - m.mean : y[i]) * m.rstd;
      y[i] = placed<kCentred>(xhat, !kCentred && kOffset ? weight[i] + a.offset : weight[i], bias[i]);
    }
  } else {
    load_weight(a.weight, a.weight_dtype, a.offset, index, weight);
    if (kCentred && a.bias != nullptr) load_constant(a.bias, a.bias_dtype, index, bias);
#pragma unroll
    for (int i = 0; i < kVec<X>; ++i) {
      y[i] = placed<kCentred>(normalised<kCentred, X>(y[i], m, !kCentred && a.round_first), weight[i], bias[i]);
    }
  }
}

// y of a row or a part. `usual` holds the lane's weights where they were asked for early; else they are asked for all
// at once or, where a thread has many vectors or a bias too, some at a time: there are no registers for more.
template <bool kCentred, typename X, typename H, typename C, bool kUsual, typename Place>
__device__ inline void write_row(const ForwardArgs& a, char* y_row, const Place& at, const Moments& m,
                                 const Held<X, H> (&held)[C::kVecs], Usual<kCentred> (&usual)[C::kVecs]) {
  constexpr int kAtOnce = kCentred ? 2 : C::kVecs > 4 ? 4 : C::kVecs;
#pragma unroll
  for (int v = 0; v < C::kVecs; ++v) {
    if (kUsual && C::kKind != Kind::kSoon && v % kAtOnce == 0) {
#pragma unroll
      for (int next = v; next < v + kAtOnce; ++next) {
        const int i = at.lane + next * C::kLanes;
        if (next < C::kVecs && i < at.count) usual[next].load(a, at.skip + i);
      }
    }
    const int i = at.lane + v * C::kLanes;
    if (!kUsual && i >= at.count) continue;
    float y[kVec<X>];
    scaled<kCentred, X, H, kUsual, C::kKind != Kind::kSoon>(a, held[v], m, at.skip + i, usual[v], y);
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
  constexpr bool kSoon = C::kKind == Kind::kSoon;
  using Sums = Gathered<kCentred>;
  // In a chain of small kernels starting one takes as long as running it: let the next start now, then wait for the
  // last.
  if (kSoon) warm(a.x), warm(a.eps);
  if (kSoon || a.chained) {
    allow_next_kernel();
    wait_for_previous_kernel();
  }
  __shared__ float scratch[Sums::kNumbers * C::kThreads / kWarp];
  __shared__ std::conditional_t<kParted, Exchange<Sums::kNumbers>, char> exchange;
  if constexpr (kParted) exchange.init();
  const Place<X, C, kParted> at(a.parts, a.rows, a.width);
  const int64_t row = at.row;

  // One product of 32 bits where a row is waited for: for kSoon strides are below 2^32.
  auto soon = [&](const char* rows, int64_t stride) {
    return rows + uint64_t{blockIdx.x} * static_cast<uint32_t>(stride);
  };
  const char* x_row = (kSoon ? soon(a.x, a.x_stride) : a.x_row(row)) + at.skip * 16;
  const char* residual_row = nullptr;
  if (kResidual) residual_row = (kSoon ? soon(a.residual, a.residual_stride) : a.residual_row(row)) + at.skip * kH;
  Loaded<X, H, kResidual> loaded[C::kVecs];
#pragma unroll
  for (int v = 0; v < C::kVecs; ++v) {
    const int i = at.lane + v * C::kLanes;
    if constexpr (kSoon) {
      loaded[v].load_if(i < at.count, x_row + i * 16, residual_row + i * kH);
    } else {
      loaded[v].load_if(i < at.count, x_row + i * 16, residual_row + i * kH, read_policy(a.large));
    }
  }

  Usual<kCentred> usual[C::kVecs];
#pragma unroll
  for (int v = 0; kSoon && v < C::kVecs; ++v) {  // asked for while x is still on its way
    const int i = at.lane + v * C::kLanes;
    if (i < at.count) usual[v].load_now(a, at.skip + i);
  }

  const int64_t element = row * a.width + at.skip * kVec<X>;
  Held<X, H> held[C::kVecs];
#pragma unroll
  for (int v = 0; v < C::kVecs; ++v) {
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
    for (int v = 0; v < C::kVecs; ++v) {
      float h[kVec<X>];
      held[v].get(h);
      f(h, at.lane + v * C::kLanes < at.count ? kVec<X> : 0);
    }
  };
  const float count = static_cast<float>(at.count * kVec<X>);
  float* const own = scratch + Sums::kNumbers * at.group * C::kLanes / kWarp;
  Sums gathered =
      Sums::template of_row<kVec<X>, C::kLanes, true>(each, count, kParted ? inverse(count) : a.inverse_width, own);
  if constexpr (kParted) {
    float mine[Sums::kNumbers];
    gathered.numbers(mine);
    exchange.share(mine, a.parts.count, at.rank);
    gathered = Sums::of_parts(a.parts.count, a.inverse_width, [&](int p) -> const auto& { return exchange.values[p]; });
  }
  const Moments m = gathered.template moments<X>(a.inverse_width, a.eps);
  if (at.lane == 0 && at.rank == 0 && at.count > 0) store_moments(a, row, m);

  char* y_row = a.y + element * static_cast<int64_t>(sizeof(X));
  write_row<kCentred, X, H, C, kUsual>(a, y_row, at, m, held, usual);
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
  constexpr int kNumbers = Gathered<kCentred>::kNumbers;
  __shared__ float scratch[2][kNumbers * C::kThreads / kWarp];
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
    float* const own = &scratch[r / C::kGroups % 2][kNumbers * group * C::kLanes / kWarp];
    const auto gathered =
        Gathered<kCentred>::template of_row<N, C::kLanes, false>(each, static_cast<float>(width), a.inverse_width, own);
    const Moments m = gathered.template moments<X>(a.inverse_width, a.eps);
    if (lane == 0 && width > 0) store_moments(a, first + r, m);
#pragma unroll
    for (int v = 0; v < C::kVecs; ++v) {
      if (v * kSpan >= a.width) break;
      if (!kKeepWeight<X, C>) load_weight_of(v);
      float bias[N] = {};
      if (kCentred && a.bias != nullptr) {
        load_row_columns<C::kLanes>(a.bias, a.bias_dtype, v * kSpan + lane, a.width, bias);
      }
#pragma unroll
      for (float& one : h[v]) one = (kCentred ? one - m.mean : one) * m.rstd;
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
  __shared__ float scratch[2][Sums::kNumbers * any_threads(kLanes) / kWarp];
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
    float* const own = &scratch[part % 2][Sums::kNumbers * group * kLanes / kWarp];
    const float count = static_cast<float>(end - begin);
    const float share = a.parts.count == 1 ? a.inverse_width : inverse(count);
    gathered = Sums::template of_row<N, kLanes, false>(each, count, share, own);
    gathered.numbers(met[part]);
  }
  if (a.parts.count > 1) {
    gathered = Sums::of_parts(a.parts.count, a.inverse_width, [&](int p) -> const auto& { return met[p]; });
  }
  const Moments m = gathered.template moments<X>(a.inverse_width, a.eps);
  if (lane == 0 && width > 0) store_moments(a, index, m);

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
      h[i] = placed<kCentred>(normalised<kCentred, X>(h[i], m, !kCentred && a.round_first), weight[i], bias[i]);
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

  template <typename X, typename H, bool kResidual, bool kUsual>
  static Status launch_vectors(ForwardArgs& a, int device, cudaStream_t stream) {
    const int64_t count = a.width / kVec<X>;
    const DeviceFacts& facts = device_facts(device);
    const bool few = a.rows <= 2 * facts.multiprocessors;
    a.chained = few && facts.capability >= 90;
    Status status = Status::kOk;
    auto held = [&](auto config) {
      using C = decltype(config);
      const dim3 grid(static_cast<unsigned>(divide_up(a.rows, C::kGroups)));
      const auto kernel = norm_forward_kernel<kCentred, X, H, kResidual, C, kUsual, false>;
      status = launch(kernel, grid, C::kThreads, 0, a.chained, stream, a);
    };
    if constexpr (kUsual && std::is_same_v<X, H>) {
      const bool near = a.one_stride && (a.x_stride | a.residual_stride) >> 32 == 0;
      if (few && near && count > kFewVectors && a.offset == 0.0f && FewRowsConfigs<kCentred>::pick(count, held)) {
        return status;
      }
    }
    if (ForwardConfigs<kCentred>::pick(count, held)) return status;
    with_part<X>(a.width, [&](auto config) {
      using C = decltype(config);
      static std::atomic<int> clusters[kMaxDevices][kMaxParts + 1];
      const auto kernel = norm_forward_kernel<kCentred, X, H, kResidual, C, kUsual, true>;
      std::atomic<int>& known = clusters[device][a.parts.count];
      if (launch_parts(kernel, a, a.rows, a.parts.count, C::kThreads, a.chained, facts, known, stream)) return;
      launch_any<X, C::kLanes>(a, stream);
      status = launch_status();
    });
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

  static Status run(const TensorView& x, const TensorView& weight, const TensorView& bias, const TensorView& residual,
                    double eps, double offset, bool round_first, const TensorView& y, const TensorView& residual_out,
                    const TensorView& mean, const TensorView& rstd, Stream stream) {
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
      return launch_rows<X>(a, guard.device(), cuda_stream(stream));
    });
  }
};

}  // namespace norm
}  // namespace fuselm
