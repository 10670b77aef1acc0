// The activations: what is computed of an element, forward and backward, and the launch code of the family.
//
// Knows no single op: gelu.cu, silu.cu and relu2.cu are y = f(x), swiglu.cu and geglu.cu are y = f(gate) * up. The
// mathematics are in activations.py and the ops' own contracts. How tensors lie, which thread has which element and
// what moves is elementwise.cuh's: every tensor once, and nothing kept.
//
// In 16 bits an H200 moves an element of y = f(x) in the time of some 24 instructions of a multiprocessor, of which a
// MUFU (ex2, rcp) takes the place of 8 in a unit of its own: hence two MUFU and at most 20 others here. In fp32 there
// is twice the time, and the formulas are torch's, with functions that are exact to an ulp or two.
// fmaf is written out wherever the compiler could choose what to fuse: all kernels must round alike.
#pragma once
#include "elementwise.cuh"

namespace fuselm {
namespace activation {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kSqrtHalf = 0.70710678118654752f;
constexpr float kDensity = 0.39894228040143268f;  // of the normal distribution at 0: 1 / sqrt(2 pi)
constexpr float kUnit = 0.79788456080286536f;     // sqrt(2 / pi)
constexpr float kCube = 0.044715f;

// ---- f: a value, and its slope ----

// The logistic function s of v from power = -v log2(e), and s (1 - s). Of -v so large that exp(-v) is infinite s is 0,
// and so it is where 1 / exp(-v) is no normal number.
__device__ inline void fast_logistic(float power, float& share, float& spread) {
  const float e = power_of_two(power);
  share = fast_inverse(1.0f + e);
  // Where s is next to 1 by e: it will be multiplied by v, and 1 - s would be what an inverse of 1 is off by.
  spread = e < 1.0f ? e * share * share : fmaf(-share, share, share);
}

// x s, NaN for -inf, as torch has it; its slope is s + x s (1 - s).
struct Silu {
  template <bool kExact>
  __device__ static void both(float x, float& value, float& slope) {
    float share, spread;
    if constexpr (kExact) {
      const float divisor = 1.0f + expf(-x);
      value = x / divisor, share = 1.0f / divisor;
      spread = fmaf(-share, share, share);
    } else {
      fast_logistic(x * -kLog2E, share, spread);
      value = x * share;
    }
    slope = fmaf(x, spread, share);
  }
};

// Phi(-|x|) = t P(t) exp(-x^2 / 2) with t = 1 / (1 + kFitUnit |x|): within 7.1e-7 of it for |x| < 6 and within 4e-4 up
// to 13 (gelu.py has the same numbers, and a test of them). Unlike 1 + erf it cancels nowhere.
struct Gelu {
  template <bool kExact>
  __device__ static void both(float x, float& value, float& slope) {
    float share, density;
    if constexpr (kExact) {
      share = 0.5f * (1.0f + erff(x * kSqrtHalf));
      density = expf(-0.5f * x * x) * kDensity;
    } else {
      constexpr float kFitUnit = 0.294030488f;
      constexpr float kFit[] = {0.118649155f, 0.102058791f, 0.17756173f, -0.0814407691f, 0.271951079f, -0.0887802914f};
      const float t = fast_inverse(fmaf(kFitUnit, fabsf(x), 1.0f));
      const float power = power_of_two(x * x * (-0.5f * kLog2E));
      float sum = kFit[5];
#pragma unroll
      for (int i = 4; i >= 0; --i) sum = fmaf(sum, t, kFit[i]);
      sum *= t;
      share = x < 0.0f ? sum * power : fmaf(-sum, power, 1.0f);  // NaN is not below 0, and stays
      density = power * kDensity;
    }
    value = x * share;
    slope = fmaf(x, density, share);
  }
};

// x times the logistic function of 2 u, u = kUnit (x + kCube x^3).
struct TanhGelu {
  template <bool kExact>
  __device__ static void both(float x, float& value, float& slope) {
    const float square = x * x;
    if constexpr (kExact) {
      const float t = tanhf(kUnit * fmaf(kCube, square * x, x));
      const float share = 0.5f * (1.0f + t);
      value = x * share;
      slope = fmaf(0.5f * x * fmaf(-t, t, 1.0f), kUnit * fmaf(3.0f * kCube, square, 1.0f), share);
    } else {
      constexpr float kLinear = 2.0f * kUnit, kCubic = kLinear * kCube;
      float share, spread;
      fast_logistic(x * fmaf(-kLog2E * kCubic, square, -kLog2E * kLinear), share, spread);
      value = x * share;
      // x s (1 - s) before (2 u)': where the square is large the one is 0 long before the other is infinite.
      slope = fmaf(x * spread, fmaf(3.0f * kCubic, square, kLinear), share);
    }
  }
};

// ---- what a kernel computes ----

// y = f(x).
template <typename F>
struct Forward {
  static constexpr int kIn = 1, kOut = 1;
  template <bool kExact>
  __device__ void operator()(const float (&in)[kIn], float (&out)[kOut]) const {
    float slope;
    F::template both<kExact>(in[0], out[0], slope);
  }
};

// dx of dy and x.
template <typename F>
struct Backward {
  static constexpr int kIn = 2, kOut = 1;
  template <bool kExact>
  __device__ void operator()(const float (&in)[kIn], float (&out)[kOut]) const {
    float value, slope;
    F::template both<kExact>(in[1], value, slope);
    out[0] = in[0] * slope;
  }
};

// y = f(gate) * up.
template <typename F>
struct GatedForward {
  static constexpr int kIn = 2, kOut = 1;
  template <bool kExact>
  __device__ void operator()(const float (&in)[kIn], float (&out)[kOut]) const {
    float value, slope;
    F::template both<kExact>(in[0], value, slope);
    out[0] = value * in[1];
  }
};

// dgate and dup of dy, gate and up. The products are torch's, in its order.
template <typename F>
struct GatedBackward {
  static constexpr int kIn = 3, kOut = 2;
  template <bool kExact>
  __device__ void operator()(const float (&in)[kIn], float (&out)[kOut]) const {
    float value, slope;
    F::template both<kExact>(in[1], value, slope);
    out[0] = in[0] * in[2] * slope;
    out[1] = in[0] * value;
  }
};

// The square of what is positive. Not by a slope: where x is not positive its gradient is 0 whatever dy is, and NaN is
// neither.
struct SquareForward {
  static constexpr int kIn = 1, kOut = 1;
  template <bool kExact>
  __device__ void operator()(const float (&in)[kIn], float (&out)[kOut]) const {
    const float kept = in[0] <= 0.0f ? 0.0f : in[0];
    out[0] = kept * kept;
  }
};

struct SquareBackward {
  static constexpr int kIn = 2, kOut = 1;
  template <bool kExact>
  __device__ void operator()(const float (&in)[kIn], float (&out)[kOut]) const {
    out[0] = in[1] <= 0.0f ? 0.0f : in[0] * (2.0f * in[1]);
  }
};

// ---- launching ----

// What the family asks of its first tensor; the others must be like it, of which elementwise() checks the sizes.
inline Status check_rows(const TensorView& x) {
  if (!is_float(x.dtype)) return Status::kBadDtype;
  return x.rank < 1 || x.rank > kMaxRank || x.sizes[x.rank - 1] < 1 ? Status::kBadShape : Status::kOk;
}

// Runs `f` on inputs of one dtype. An absent one is JAX's buffer of no elements: there is nothing to do.
template <typename F>
Status run(const F& f, const TensorView* const (&in)[F::kIn], const TensorView* const (&out)[F::kOut], Stream stream) {
  for (const TensorView* one : in) {
    if (!one->present()) return Status::kOk;
    const Status status = check_rows(*one);
    if (status != Status::kOk) return status;
    if (one->dtype != in[0]->dtype) return Status::kBadDtype;
  }
  return elementwise(f, in, out, stream);
}

// The first half of each row of a packed tensor, or the second: a view with the same strides.
inline TensorView half(const TensorView& packed, int which) {
  TensorView view = packed;
  if (!packed.present()) return view;
  const int last = packed.rank - 1;
  view.sizes[last] /= 2;
  const int64_t skipped = which * view.sizes[last] * view.strides[last] * element_bytes(packed.dtype);
  view.data = static_cast<char*>(packed.data) + skipped;
  return view;
}

inline Status check_packed(const TensorView& packed) {
  const Status status = check_rows(packed);
  if (status != Status::kOk) return status;
  return packed.sizes[packed.rank - 1] % 2 == 0 ? Status::kOk : Status::kBadShape;
}

template <typename F>
Status packed_forward(const TensorView& packed, const TensorView& y, Stream stream) {
  if (!packed.present()) return Status::kOk;
  const Status status = check_packed(packed);
  if (status != Status::kOk) return status;
  const TensorView gate = half(packed, 0), up = half(packed, 1);
  return run(GatedForward<F>{}, {&gate, &up}, {&y}, stream);
}

template <typename F>
Status packed_backward(const TensorView& dy, const TensorView& packed, const TensorView& dpacked, Stream stream) {
  if (!packed.present()) return Status::kOk;
  const Status status = check_packed(packed);
  if (status != Status::kOk) return status;
  const TensorView gate = half(packed, 0), up = half(packed, 1), dgate = half(dpacked, 0), dup = half(dpacked, 1);
  return run(GatedBackward<F>{}, {&dy, &gate, &up}, {&dgate, &dup}, stream);
}

}  // namespace activation
}  // namespace fuselm
