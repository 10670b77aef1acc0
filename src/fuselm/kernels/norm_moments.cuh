// The moments of a row, for the norms' forward: what its elements are moved and scaled by, and how that is done.
//
// Every kernel gathers them by the functions below, so that a row's moments have the same bits in all of them.
#pragma once
#include <cmath>

#include "parts.cuh"

namespace fuselm {
namespace norm {

// Adds up the squares of a vector: even and odd elements apart, since one sum after another is what a single row waits
// for.
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

// What a row is moved and scaled by. `near`: the mean is so near to 0 that it may be taken away after multiplying.
struct Moments {
  float mean, rstd;
  bool near;
};

// Whether the block has to do something for any of its rows; all of its threads must ask.
template <int kLanes, int kThreads>
__device__ inline bool for_any_row(bool mine) {
  if constexpr (kLanes == kThreads) return mine;
  if constexpr (kLanes <= kWarp) return __any_sync(0xffffffffu, mine);
  return __syncthreads_or(mine);
}

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

// sum / count, rounded once where it is a normal number: the mean of a row of one number is that number.
__device__ inline float quotient(float sum, float count, float inverse_count) {
  const float near = __fmul_rn(sum, inverse_count);
  return fmaf(fmaf(-near, count, sum), inverse_count, near);
}

// Floats in which the lanes of a row meet for up to three numbers.
template <typename C>
constexpr int kScratch =
    3 * (C::kKind == Kind::kWide ? kWideScratch<C::kLanes, C::kVecs> : (C::kLanes + kWarp - 1) / kWarp);

// What is gathered of a row, or of a part of one, by all its lanes together. `each` calls a function with each N
// elements of the lane in turn and how many of them are the row's (kWhole: all or none), the others being 0; `count` is
// how many the lanes have in all. Parts exchange kNumbers numbers and are added up in their order. `scratch` has
// kScratch<C> floats of this row's own.
template <bool kCentred>
struct Gathered;

template <>
struct Gathered<false> {
  static constexpr int kNumbers = 1;
  float squares = 0.0f;

  template <int N, typename C, bool kWhole, typename Each>
  __device__ static Gathered of_row(const Each& each, float, float, bool, float* scratch) {
    Gathered row;
    each([&](const float (&h)[N], int) { row.squares += sum_of_squares(h); });
    row.squares = row_sum<C::kLanes>(row.squares, scratch);
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
  __device__ Moments moments(float inverse_width, float eps, bool) const {
    return {0.0f, inverse_rms<X>(squares, inverse_width, eps), false};
  }
};

// The squares are those around the mean. Whole vectors of 16 bits have them in one pass (`once`), from the squares
// around 0: that loses at most 64 times what fp32 rounds, nothing beside what y is rounded by. Rows further from 0, and
// all others, take a second pass over what waits in registers, and lose nothing. (One pass around the row's first
// element or a point of each lane's own was no faster than two: docs/log.md.) Parts take the squares around their own
// means, and move them to the mean of all.
template <>
struct Gathered<true> {
  static constexpr int kNumbers = 3;
  float mean = 0.0f, count = 0.0f, squares = 0.0f;

  __device__ static Gathered of_sums(const float (&sums)[2], float count, float inverse_count) {
    const float mean = quotient(sums[0], count, inverse_count);
    return {mean, count, fmaf(-mean, sums[0], sums[1])};
  }
  // Whether the elements lie around 0 rather than around a point far from it: |mean| is at most 8 standard deviations.
  // Not where these are no numbers.
  __device__ bool lies_near() const {
    const float room = 64.0f * squares;
    return mean * mean * count <= room && room < INFINITY;
  }

  template <int N, typename C, bool kWhole, typename Each>
  __device__ static Gathered of_row(const Each& each, float count, float inverse_count, bool once, float* scratch) {
    float sums[2] = {};
    each([&](const float (&h)[N], int) {
      sums[0] += sum_of(h);
      if (once) sums[1] += sum_of_squares(h);
    });
    auto meet = [&](auto& numbers, float* where) {
      if constexpr (C::kKind == Kind::kWide) {
        wide_sums<C::kLanes, C::kVecs>(numbers, where);
      } else {
        row_sums<C::kLanes>(numbers, where);
      }
    };
    if (once) {
      meet(sums, scratch);
    } else {
      float only[1] = {sums[0]};
      meet(only, scratch);
      sums[0] = only[0];
    }
    Gathered row = of_sums(sums, count, inverse_count);
    const bool far = !once || !row.lies_near();
    if (!once || unlikely(for_any_row<C::kThreads / C::kGroups, C::kThreads>(far))) {
      float squares[1] = {};
      each([&](const float (&h)[N], int here) { squares[0] += sum_of_squares_around<kWhole>(h, row.mean, here); });
      meet(squares, scratch + 2 * kScratch<C> / 3);
      if (far) row.squares = squares[0];
    }
    return row;
  }
  __device__ void numbers(float (&out)[kNumbers]) const { out[0] = mean, out[1] = count, out[2] = squares; }

  template <typename NumbersOf>
  __device__ static Gathered of_parts(int parts, float inverse_width, const NumbersOf& of) {
    Gathered all;
    for (int p = 0; p < parts; ++p) all.mean = fmaf(of(p)[0], of(p)[1], all.mean), all.count += of(p)[1];
    all.mean = quotient(all.mean, all.count, inverse_width);
    for (int p = 0; p < parts; ++p) {
      const float d = of(p)[0] - all.mean;
      all.squares += fmaf(__fmul_rn(of(p)[1], d), d, of(p)[2]);
    }
    return all;
  }

  template <typename X>
  __device__ Moments moments(float inverse_width, float eps, bool once) const {
    return {mean, inverse_rms<X>(squares, inverse_width, eps), once && lies_near()};
  }
};

// How the elements of a row are normalised: where it lies near 0 with an instruction less.
template <bool kCentred, bool kNear>
struct Normalise {
  float mean, rstd, shift;

  __device__ explicit Normalise(const Moments& m) : mean(m.mean), rstd(m.rstd), shift(-m.mean * m.rstd) {}
  __device__ float operator()(float h) const {
    if constexpr (!kCentred) return h * rstd;
    return kNear ? fmaf(h, rstd, shift) : (h - mean) * rstd;
  }
};

}  // namespace norm
}  // namespace fuselm
