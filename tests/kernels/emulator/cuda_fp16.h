// fp16 for a CPU, found instead of the toolkit's: see cuda_runtime.h beside this.
#pragma once
#include "cuda_runtime.h"

struct __half {
  uint16_t bits;
};
struct alignas(4) __half2 {
  __half x, y;
};

inline float __half2float(__half v) { return static_cast<float>(emulated::bits<_Float16>(v.bits)); }
inline __half __float2half_rn(float v) {
  if (v != v) return {0x7fff};
  return {emulated::bits<uint16_t>(static_cast<_Float16>(v))};
}
inline float2 __half22float2(__half2 v) { return {__half2float(v.x), __half2float(v.y)}; }
inline __half2 __floats2half2_rn(float low, float high) { return {__float2half_rn(low), __float2half_rn(high)}; }
inline __half2 __hmin2(__half2 a, __half2 b) {
  return __floats2half2_rn(std::fmin(__half2float(a.x), __half2float(b.x)),
                           std::fmin(__half2float(a.y), __half2float(b.y)));
}
inline __half2 __hmax2(__half2 a, __half2 b) {
  return __floats2half2_rn(std::fmax(__half2float(a.x), __half2float(b.x)),
                           std::fmax(__half2float(a.y), __half2float(b.y)));
}
