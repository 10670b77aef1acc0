// The softmax family: rows as sums of powers of two, for softmax.cu and cross_entropy.cu.
//
// Knows how a row is held, where its parts meet and in which order they are added up; nothing of what the values are or
// what becomes of them. A value times `unit` is a score, such that e^s is Base to the power of it.
//
// Threads. As in the norms: `kLanes` threads own a row, or a part of one, and hold it in registers, so that it is read
// once. A row too wide for a block is shared by a cluster of them. Rows that are no vectors take the *_any kernels,
// which read each element three times and add up in the same order, so to the same bits.
#pragma once
#include "parts.cuh"

namespace fuselm {
namespace softmax {

// Lanes and vectors as in the norms' forward up to 8192 elements of 16 bits. Above, few vectors too many leave lanes
// without work: a vocabulary of 10000 needs 5 of 256 lanes.
template <int kLanes, int kBlocks, int kUpTo7 = kBlocks>
using FiveToEight = ConfigList<Config<kLanes, 5, kLanes, kUpTo7>, Config<kLanes, 6, kLanes, kUpTo7>,
                               Config<kLanes, 7, kLanes, kUpTo7>, Config<kLanes, 8, kLanes, kBlocks>>;
using UpTo1024Vectors = ConfigList<Config<8, 1, 128, 1>, Config<16, 1, 128, 1>, Config<32, 1, 128, 1>,
                                   Config<32, 2, 128, 10>, Config<32, 3, 128, 8>, Config<64, 2, 128, 10>,
                                   Config<128, 2, 128, 10>, Config<256, 2, 256, 5>, Config<256, 4, 256, 4>>;
// A few rows: one a block, of the same lanes or a thread for each vector of a lane, so that a row's sum has the same
// bits in both.
using FewRows = ConfigList<Config<32, 3, 128, 1, Kind::kWide>, Config<64, 2, 128, 1, Kind::kWide>,
                           Config<128, 2, 128, 1, Kind::kSoon>, Config<256, 2, 256, 1, Kind::kSoon>,
                           Config<256, 4, 256, 1, Kind::kSoon>>;
// Rows that follow one another in tensors that fit L2. The code for strides lies between a kernel's start and its
// loads, and a call of ten microseconds waits for it: 0.2 us at 4096x768.
using NearRows = ConfigList<Config<32, 2, 128, 10, Kind::kNear>, Config<32, 3, 128, 8, Kind::kNear>,
                            Config<64, 2, 128, 10, Kind::kNear>, Config<128, 2, 128, 10, Kind::kNear>>;
// Up to 16384 elements of 16 bits or 32: a row, and a part of one. Blocks of a cluster wait for each other, and a fifth
// fills the time; a block that has its row for itself would pay for it with registers.
template <typename X, bool kParted>
using WideConfigs = std::conditional_t<sizeof(X) == 4, ConfigList<Config<512, 4, 512, 2>, Config<512, 8, 512, 1>>,
                                       FiveToEight<256, 4, kParted ? 5 : 4>>;
template <typename X>
Parts parts_of(int64_t width) {
  constexpr int kLanes = sizeof(X) == 4 ? 512 : 256;
  return Parts::of<X, Config<kLanes, 8, kLanes, 1>>(width);
}

// Whether a lane takes a turn with vector v. The last one may be missing in most warps: those jump over it, where the
// others are counted as nothing.
template <typename C, typename F>
__device__ inline void turn(int v, bool there, const F& f) {
  if (v < C::kVecs - 1) {
    f(there);
  } else if (there) {
    f(true);
  }
}

// ---- sums of powers ----

// What is raised to the scores. For rows of 16 bits it is 2, whose powers are one instruction, to 2 ulp; rows of 32
// show more than that, and have twice the time: e, to 1 ulp.
template <typename X>
struct Base {
  static constexpr bool kTwo = sizeof(X) == 2;
  static constexpr float kUnit = kTwo ? 1.4426950408889634f : 1.0f;  // e^x is the base to the power x * kUnit
  static constexpr float kLog = kTwo ? 0.6931471805599453f : 1.0f;   // the base's natural logarithm
  __device__ static float power(float score) { return kTwo ? power_of_two(score) : expf(score); }
  __device__ static float inverse(float sum) { return kTwo ? fast_inverse(sum) : 1.0f / sum; }
};

__device__ inline float infinity() { return __uint_as_float(0x7f800000u); }

// Scores from kFar on are so far apart that two values are the same or nothing beside each other, while rounding a
// product shifts a score by more than powers hold. From kHuge on the product would overflow.
constexpr float kFar = 1073741824.0f;            // 2^30
constexpr float kHuge = 8.507059173023462e+37f;  // 2^126

// How the scores around `top`, the largest value, are taken: value * unit - score.
struct Level {
  float unit, score;

  __device__ Level(float top, float unit_) : unit(unit_), score(top * unit_) {
    if (unlikely(fabsf(score) >= kFar)) far(top);
  }

 private:
  // The unit's power of two: products by it are exact. A row of nothing but -inf must not become NaN.
  __device__ void far(float top) {
    if (fabsf(top) < infinity()) {
      unit = __uint_as_float(__float_as_uint(unit) & 0xff800000u) * (fabsf(score) < kHuge ? 1.0f : 0.25f);
      score = top * unit;
    } else if (score < 0.0f) {
      score = 0.0f;
    }
  }
};

// The powers of the scores of some values: `sum`, where the score of `top`, the largest value, counts as 0.
template <typename X>
struct Power {
  float top, sum;

  // What the sum is to be multiplied by where the score of `other`, no smaller, is to count as 0.
  __device__ float share(float other, float unit) const {
    // Scores are never made part of another product (__fmul_rn): they are those of the levels.
    const float score = __fmul_rn(other, unit);
    float distance = __fmul_rn(top, unit) - score;
    if (unlikely(!(fabsf(score) < kFar))) distance = top == other ? 0.0f : (top - other) * unit;
    return Base<X>::power(distance);
  }
  __device__ float below(float other, float unit) const { return __fmul_rn(sum, share(other, unit)); }
};

// The largest of the numbers in packed vectors, or with kSmallest the smallest: two at a time, without unpacking them.
template <typename X, bool kSmallest>
__device__ inline float extreme(const uint4& raw, float so_far) {
  if constexpr (sizeof(X) == 4) {
    float value[kVec<X>];
    unpack<X>(raw, value);
#pragma unroll
    for (float one : value) so_far = kSmallest ? fminf(so_far, one) : fmaxf(so_far, one);
    return so_far;
  } else {
    const uint32_t top = pair_extreme<kSmallest>(pair_extreme<kSmallest>(raw.x, raw.y, X{}),
                                                 pair_extreme<kSmallest>(raw.z, raw.w, X{}), X{});
    float low, high;
    unpack_pair(top, low, high, X{});
    return kSmallest ? fminf(so_far, fminf(low, high)) : fmaxf(so_far, fmaxf(low, high));
  }
}

// The largest of a lane's values, their powers, and the sum: of even and odd ones apart, vector after vector. The first
// `here` of the values are the row's.
template <int N>
__device__ inline float largest(const float (&value)[N], float top, int here = N) {
#pragma unroll
  for (int i = 0; i < N; ++i) top = i < here ? fmaxf(top, value[i]) : top;
  return top;
}

template <typename X, int N>
__device__ inline void to_powers(float (&value)[N], const Level& level) {
#pragma unroll
  for (float& one : value) one = Base<X>::power(fmaf(one, level.unit, -level.score));
}

template <int N>
__device__ inline float sum_of(const float (&power)[N], int here = N) {
  float sums[2] = {};
#pragma unroll
  for (int i = 0; i < N; ++i) sums[i % 2] += i < here ? power[i] : 0.0f;
  return sums[0] + sums[1];
}

// The lanes of a row, or of a part, meet: each gets the whole. `scratch` has 2 * kLanes / 32 floats of this row's own.
template <int kLanes, typename X>
__device__ inline Power<X> meet(Power<X> mine, float unit, float* scratch) {
  constexpr int kShuffled = kLanes < kWarp ? kLanes : kWarp;
  const float top = lane_max<kShuffled>(mine.top);
  Power<X> met = {top, lane_sum<kShuffled>(mine.below(top, unit))};
  if constexpr (kLanes > kWarp) {
    constexpr int kWarps = kLanes / kWarp;
    const int lane = threadIdx.x % kLanes;
    if (lane % kWarp == 0) scratch[lane / kWarp] = met.top, scratch[kWarps + lane / kWarp] = met.sum;
    __syncthreads();
    const Power<X> warp = {scratch[lane % kWarps], scratch[kWarps + lane % kWarps]};
    met.top = lane_max<kWarps>(warp.top);
    met.sum = lane_sum<kWarps>(warp.below(met.top, unit));
  }
  return met;
}

// The parts of a row meet, in their order.
template <typename X, typename PartAt>
__device__ inline Power<X> sum_of_parts(int parts, float unit, const PartAt& at) {
  Power<X> whole = {-infinity(), 0.0f};
  for (int p = 0; p < parts; ++p) whole.top = fmaxf(whole.top, at(p).top);
  for (int p = 0; p < parts; ++p) whole.sum = fmaf(at(p).sum, at(p).share(whole.top, unit), whole.sum);
  return whole;
}

// ---- launching ----

// Calls `held(config)` where one block holds a row of this width, else `parted(config)`, with the configuration for the
// row or for each of its parts.
template <typename X, typename Whole, typename Held, typename Parted>
void with_config(const Parts& parts, const Held& held, const Parted& parted) {
  if (parts.count > 1) {
    WideConfigs<X, true>::pick(parts.vectors, parted);
  } else if (!Whole::pick(parts.vectors, held)) {
    WideConfigs<X, false>::pick(parts.vectors, held);
  }
}

// A kernel over rows: the one of `Kernels` for their width, or for any rows where they are no vectors or this device
// has no clusters. With Kernels::kEveryKind there are kernels for few rows, and for rows that follow one another in
// tensors that L2 holds, which `a.large` denies. `a.chained`: the kernel waits for the one before it by itself.
template <typename X, typename Kernels, typename Args>
Status launch_rows(const Args& a, int64_t rows, bool vectors, const DeviceFacts& facts, int device,
                   cudaStream_t stream) {
  Status status = Status::kOk;
  auto any = [&](auto config) {
    constexpr int kLanes = decltype(config)::kLanes, kThreads = any_threads(kLanes);
    const dim3 grid(static_cast<unsigned>(divide_up(rows, kThreads / kLanes)));
    status = launch(Kernels::template any<kLanes>(), grid, kThreads, 0, false, stream, a);
  };
  auto held = [&](auto config) {
    using C = decltype(config);
    if (!vectors) return any(config);
    const dim3 grid(static_cast<unsigned>(divide_up(rows, C::kGroups)));
    status = launch(Kernels::template of<C, false>(), grid, C::kThreads, 0, a.chained, stream, a);
  };
  auto parted = [&](auto config) {
    using C = decltype(config);
    static std::atomic<int> clusters[kMaxDevices][kMaxParts + 1];
    const bool fits = vectors && a.parts.count <= kMaxParts;
    if (!fits || !launch_parts(Kernels::template of<C, true>(), a, rows, a.parts.count, C::kThreads, a.chained, facts,
                               clusters[device][a.parts.count], stream)) {
      any(config);
    }
  };
  if constexpr (Kernels::kEveryKind) {
    const bool near = vectors && a.adjacent && !a.large && a.parts.count == 1 && a.parts.vectors > kWarp;
    const bool few = rows <= 2 * facts.multiprocessors;
    if (near && (few ? FewRows::pick(a.parts.vectors, held) : NearRows::pick(a.parts.vectors, held))) {
      return status;
    }
  }
  with_config<X, typename Kernels::Whole>(a.parts, held, parted);
  return status;
}

}  // namespace softmax
}  // namespace fuselm
