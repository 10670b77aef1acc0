// bf16 for a CPU, found instead of the toolkit's: see cuda_runtime.h beside this.
#pragma once
#include "cuda_runtime.h"

struct __nv_bfloat16 {
  uint16_t bits;
};
struct alignas(4) __nv_bfloat162 {
  __nv_bfloat16 x, y;
};

inline float __bfloat162float(__nv_bfloat16 v) { return __uint_as_float(static_cast<uint32_t>(v.bits) << 16); }
inline __nv_bfloat16 __float2bfloat16_rn(float v) {
  const uint32_t word = __float_as_uint(v);
  if (v != v) return {0x7fff};
  return {static_cast<uint16_t>((word + 0x7fff + (word >> 16 & 1)) >> 16)};
}
inline __nv_bfloat162 __floats2bfloat162_rn(float low, float high) {
  return {__float2bfloat16_rn(low), __float2bfloat16_rn(high)};
}
inline __nv_bfloat162 __hmin2(__nv_bfloat162 a, __nv_bfloat162 b) {
  return __floats2bfloat162_rn(std::fmin(__bfloat162float(a.x), __bfloat162float(b.x)),
                               std::fmin(__bfloat162float(a.y), __bfloat162float(b.y)));
}
inline __nv_bfloat162 __hmax2(__nv_bfloat162 a, __nv_bfloat162 b) {
  return __floats2bfloat162_rn(std::fmax(__bfloat162float(a.x), __bfloat162float(b.x)),
                               std::fmax(__bfloat162float(a.y), __bfloat162float(b.y)));
}
