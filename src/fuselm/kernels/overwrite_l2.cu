// Empties L2 for the benchmarks, of lines too that a kernel has marked to leave last. An ordinary overwrite leaves
// those: 8 MiB that were read so are read again 1.4 us sooner than cold ones after 256 MiB of zeros, and a kernel that
// marks what it reads, as torch.compile's do, would be timed with its input half warm.
#include "common.cuh"

namespace fuselm {
namespace {

constexpr int kThreads = 512, kBlocksOfMultiprocessor = 4, kLine = 128;

// What leaves last is displaced by what leaves last.
__global__ void __launch_bounds__(kThreads) overwrite_kernel(uint4* buffer, int64_t vectors) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
#pragma unroll 4
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < vectors; i += step) {
#if __CUDA_ARCH__ >= 800
    asm volatile("st.global.L2::cache_hint.v4.u32 [%0], {%1, %1, %1, %1}, %2;" ::"l"(buffer + i), "r"(0),
                 "l"(read_policy(true))
                 : "memory");
#else
    buffer[i] = make_uint4(0, 0, 0, 0);
#endif
  }
}

// And then takes the mark off again; ordinary zeros over it leave an L2 full of ordinary lines. (Without those a copy
// of 512 MiB took 136 us instead of 130, and short calls up to half as long again.)
__global__ void __launch_bounds__(kThreads) unmark_kernel(char* buffer, int64_t lines) {
#if __CUDA_ARCH__ >= 800
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
#pragma unroll 4
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < lines; i += step) {
    asm volatile("applypriority.global.L2::evict_normal [%0], 128;" ::"l"(buffer + i * kLine) : "memory");
  }
#endif
}

}  // namespace

Status overwrite_l2(const InOut& buffer, Stream stream) {
  if (buffer.dtype != DType::kInt32) return Status::kBadDtype;
  const bool lines = buffer.sizes[0] % (kLine / 4) == 0 && reinterpret_cast<uintptr_t>(buffer.data) % kLine == 0;
  if (buffer.rank != 1 || buffer.strides[0] != 1 || !lines) return Status::kBadShape;
  const DeviceGuard guard(stream.device);
  if (!guard.ok()) return Status::kBadDevice;
  const int64_t bytes = buffer.sizes[0] * 4;
  const unsigned blocks = static_cast<unsigned>(device_facts(guard.device()).multiprocessors * kBlocksOfMultiprocessor);
  overwrite_kernel<<<blocks, kThreads, 0, cuda_stream(stream)>>>(static_cast<uint4*>(buffer.data), bytes / 16);
  unmark_kernel<<<blocks, kThreads, 0, cuda_stream(stream)>>>(static_cast<char*>(buffer.data), bytes / kLine);
  if (cudaMemsetAsync(buffer.data, 0, static_cast<size_t>(bytes), cuda_stream(stream)) != cudaSuccess) {
    return Status::kCudaError;
  }
  return launch_status();
}

}  // namespace fuselm
