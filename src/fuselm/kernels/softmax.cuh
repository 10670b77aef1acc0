// The softmax family: rows as sums of powers of two, for softmax.cu and cross_entropy.cu.
//
// Knows how a row is held, where its parts meet and in which order they are added up; nothing of what the scores are or
// what becomes of them. A score is a value times `unit`, such that e^s is Base to the power of it.
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
template <int kLanes, int kBlocks>
using FiveToEight = ConfigList<Config<kLanes, 5, kLanes, kBlocks>, Config<kLanes, 6, kLanes, kBlocks>,
                               Config<kLanes, 7, kLanes, kBlocks>, Config<kLanes, 8, kLanes, kBlocks>>;
using UpTo1024Vectors = ConfigList<Config<8, 1, 128, 1>, Config<16, 1, 128, 1>, Config<32, 1, 128, 1>,
                                   Config<32, 2, 128, 10>, Config<32, 3, 128, 8>, Config<64, 2, 128, 10>,
                                   Config<128, 2, 128, 10>, Config<256, 2, 256, 5>, Config<256, 4, 256, 4>>;
// What a wider row is cut into: up to 16384 elements of 16 bits or 32.
template <typename X>
using PartConfigs =
    std::conditional_t<sizeof(X) == 4, ConfigList<Config<512, 4, 512, 2>, Config<512, 8, 512, 1>>, FiveToEight<256, 4>>;
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
};

__device__ inline float infinity() { return __uint_as_float(0x7f800000u); }

// `sum` times the base to the power of `top`, the largest score.
template <typename X>
struct Power {
  float top, sum;

  // What the sum is in units of the base to the power of `other`.
  __device__ float in_units_of(float other) const;
};

// What the top is taken for where it is subtracted: a row of nothing but -inf must not become NaN.
__device__ inline float subtracted(float top) { return top == -infinity() ? 0.0f : top; }

template <typename X>
__device__ inline float Power<X>::in_units_of(float other) const {
  return sum * Base<X>::power(top - subtracted(other));
}

// The largest of the numbers in packed vectors, or with kSmallest the smallest: two at a time, without unpacking them.
// The largest score is that of the largest number, since rounding keeps their order.
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

// A score is never made part of another product (__fmul_rn): it has the same bits in all kernels.
//
// The largest of a lane's scores, and their powers added up: even and odd ones apart, vector after vector. The first
// `here` of the values are the row's.
template <int N>
__device__ inline float largest(const float (&value)[N], float unit, float top, int here = N) {
#pragma unroll
  for (int i = 0; i < N; ++i) top = i < here ? fmaxf(top, __fmul_rn(value[i], unit)) : top;
  return top;
}

template <typename X, int N>
__device__ inline float sum_of_powers(const float (&value)[N], float unit, float top, int here = N) {
  float sums[2] = {};
#pragma unroll
  for (int i = 0; i < N; ++i) sums[i % 2] += i < here ? Base<X>::power(fmaf(value[i], unit, -top)) : 0.0f;
  return sums[0] + sums[1];
}

// The lanes of a row, or of a part, meet: each gets the whole. `scratch` has 2 * kLanes / 32 floats of this row's own.
template <int kLanes, typename X>
__device__ inline Power<X> meet(Power<X> mine, float* scratch) {
  constexpr int kShuffled = kLanes < kWarp ? kLanes : kWarp;
  const float top = lane_max<kShuffled>(mine.top);
  Power<X> met = {top, lane_sum<kShuffled>(mine.in_units_of(top))};
  if constexpr (kLanes > kWarp) {
    constexpr int kWarps = kLanes / kWarp;
    const int lane = threadIdx.x % kLanes;
    if (lane % kWarp == 0) scratch[lane / kWarp] = met.top, scratch[kWarps + lane / kWarp] = met.sum;
    __syncthreads();
    const Power<X> warp = {scratch[lane % kWarps], scratch[kWarps + lane % kWarps]};
    met.top = lane_max<kWarps>(warp.top);
    met.sum = lane_sum<kWarps>(warp.in_units_of(met.top));
  }
  return met;
}

// The parts of a row meet, in their order.
template <typename X, typename PartAt>
__device__ inline Power<X> sum_of_parts(int parts, const PartAt& at) {
  Power<X> whole = {-infinity(), 0.0f};
  for (int p = 0; p < parts; ++p) whole.top = fmaxf(whole.top, at(p).top);
  for (int p = 0; p < parts; ++p) whole.sum += at(p).in_units_of(whole.top);
  return whole;
}

// ---- launching ----

// Calls `held(config)` where one block holds a row of this width, else `parted(config)`, with the configuration for the
// row or for each of its parts.
template <typename X, typename Held, typename Parted>
void with_config(const Parts& parts, const Held& held, const Parted& parted) {
  if (parts.count > 1) {
    PartConfigs<X>::pick(parts.vectors, parted);
  } else if (!UpTo1024Vectors::pick(parts.vectors, held)) {
    PartConfigs<X>::pick(parts.vectors, held);
  }
}

}  // namespace softmax
}  // namespace fuselm
