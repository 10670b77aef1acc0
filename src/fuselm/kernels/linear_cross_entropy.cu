// What the linear layer that ends in a cross-entropy needs besides matmuls and cross_entropy.cu: its gradients, made
// for an incoming gradient of 1, are multiplied by the one that comes. Contract: linear_cross_entropy.py.
//
// Traffic. None when the factor is 1, as it is in training; else one read and one write.
#include "rows.cuh"

namespace fuselm {
namespace {

constexpr int kScaleThreads = 256;
constexpr int kScaleVectors = 4;  // a thread has under way

template <typename X>
__global__ void __launch_bounds__(kScaleThreads)
    linear_cross_entropy_scale_kernel(X* gradient, int64_t elements, const float* factor) {
  constexpr int N = kVec<X>;
  const float by = *factor;
  if (by == 1.0f) return;
  const int64_t vectors = elements / N, step = static_cast<int64_t>(gridDim.x) * kScaleThreads;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kScaleThreads + threadIdx.x;
  uint4* const at = reinterpret_cast<uint4*>(gradient);
#pragma unroll 1
  for (int64_t i = first; i < vectors; i += kScaleVectors * step) {
    uint4 raw[kScaleVectors];
#pragma unroll
    for (int v = 0; v < kScaleVectors; ++v) {
      if (i + v * step < vectors) raw[v] = at[i + v * step];
    }
#pragma unroll
    for (int v = 0; v < kScaleVectors; ++v) {
      if (i + v * step >= vectors) continue;
      float value[N];
      unpack<X>(raw[v], value);
#pragma unroll
      for (float& one : value) one *= by;
      at[i + v * step] = packed<X>(value);
    }
  }
  const int64_t rest = vectors * N + first;
  if (rest < elements) gradient[rest] = from_float<X>(to_float(gradient[rest]) * by);
}

}  // namespace

Status linear_cross_entropy_scale(const InOut& gradient, const Input& factor, Stream stream) {
  if (!is_float(gradient.dtype) || factor.dtype != DType::kFloat32) return Status::kBadDtype;
  int64_t elements = 1, stride = 1;
  for (int d = gradient.rank - 1; d >= 0; --d) {
    if (gradient.sizes[d] != 1 && gradient.strides[d] != stride) return Status::kBadShape;
    stride *= gradient.sizes[d], elements *= gradient.sizes[d];
  }
  for (int d = 0; d < factor.rank; ++d) {
    if (factor.sizes[d] != 1) return Status::kBadShape;
  }
  if (reinterpret_cast<uintptr_t>(gradient.data) % 16 != 0) return Status::kBadShape;
  if (elements == 0) return Status::kOk;
  const DeviceGuard guard(stream.device);
  if (!guard.ok()) return Status::kBadDevice;
  const int64_t most = static_cast<int64_t>(device_facts(guard.device()).multiprocessors) * 8;
  return with_dtype(gradient.dtype, [&](auto zero) {
    using X = decltype(zero);
    const int64_t blocks = at_most(divide_up(elements, kScaleThreads * kVec<X>), most);
    linear_cross_entropy_scale_kernel<X><<<static_cast<unsigned>(blocks), kScaleThreads, 0, cuda_stream(stream)>>>(
        static_cast<X*>(gradient.data), elements, static_cast<const float*>(factor.data));
    return launch_status();
  });
}

}  // namespace fuselm
