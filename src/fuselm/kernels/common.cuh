// What every kernel shares: numbers and 16-byte vectors, memory, reductions over the lanes of a row, the device.
//
// Knows nothing of any op, and nothing of rows: those are in rows.cuh.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

#include "fuselm.h"

namespace fuselm {

using bf16 = __nv_bfloat16;
using fp16 = __half;

constexpr int kWarp = 32;

template <typename T>
constexpr int kVec = 16 / static_cast<int>(sizeof(T));  // elements in 16 bytes

template <typename T>
constexpr DType kDType = DType::kUnsupported;
template <>
constexpr DType kDType<float> = DType::kFloat32;
template <>
constexpr DType kDType<fp16> = DType::kFloat16;
template <>
constexpr DType kDType<bf16> = DType::kBFloat16;

__host__ __device__ inline int element_bytes(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

inline bool is_float(DType dtype) {
  return dtype == DType::kFloat32 || dtype == DType::kFloat16 || dtype == DType::kBFloat16;
}

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// ---- numbers -------------------------------------------------------------------------------------------------------

__device__ inline float to_float(float v) { return v; }
__device__ inline float to_float(fp16 v) { return __half2float(v); }
__device__ inline float to_float(bf16 v) { return __bfloat162float(v); }

template <typename T>
__device__ inline T from_float(float v);
template <>
__device__ inline float from_float<float>(float v) {
  return v;
}
template <>
__device__ inline fp16 from_float<fp16>(float v) {
  return __float2half_rn(v);
}
template <>
__device__ inline bf16 from_float<bf16>(float v) {
  return __float2bfloat16_rn(v);
}

template <typename T>
__device__ inline float rounded(float v) {
  return to_float(from_float<T>(v));
}

// Sixteen bytes as kVec<T> numbers. The union is how a 16-byte load becomes typed values without a copy.
template <typename T>
union Pack {
  uint4 raw;
  T value[kVec<T>];

  __device__ Pack() {}
};

template <typename T>
__device__ inline void unpack(const uint4& raw, float (&out)[kVec<T>]) {
  Pack<T> pack;
  pack.raw = raw;
#pragma unroll
  for (int i = 0; i < kVec<T>; ++i) out[i] = to_float(pack.value[i]);
}

// Two numbers a conversion: the instruction that rounds also packs.
__device__ inline uint32_t packed_pair(float low, float high, bf16) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
__device__ inline uint32_t packed_pair(float low, float high, fp16) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

template <typename T>
__device__ inline uint4 packed(const float (&in)[kVec<T>]) {
  if constexpr (sizeof(T) == 4) {
    return make_uint4(__float_as_uint(in[0]), __float_as_uint(in[1]), __float_as_uint(in[2]), __float_as_uint(in[3]));
  } else {
    return make_uint4(packed_pair(in[0], in[1], T{}), packed_pair(in[2], in[3], T{}), packed_pair(in[4], in[5], T{}),
                      packed_pair(in[6], in[7], T{}));
  }
}

// ---- memory --------------------------------------------------------------------------------------------------------

// What is read once is the first to leave L2: then what has just been written is still there when the next kernel reads
// it, and is not written back while this one still wants the memory.
__device__ inline uint64_t evict_first() {
  uint64_t policy = 0;
#if __CUDA_ARCH__ >= 800
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
#endif
  return policy;
}

// Sixteen bytes that this kernel reads once: past L1, and by evict_first().
__device__ inline uint4 load_streaming(const void* address) {
  uint4 v;
#if __CUDA_ARCH__ >= 800
  asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address), "l"(evict_first()));
#else
  v = *static_cast<const uint4*>(address);
#endif
  return v;
}

__device__ inline void store_vector(void* address, const uint4& v) { *static_cast<uint4*>(address) = v; }

// Sixteen bytes from global to this thread's place in shared memory, without passing through registers. Only the
// thread that asked may read them back after copy_async_wait: no barrier is needed, and none is given. (No evict_first
// here: with a cache hint ptxas 13.0 writes a descriptor in an odd uniform register, and the copy faults.)
__device__ inline void copy_async(void* shared, const void* global) {
#if __CUDA_ARCH__ >= 800
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(global) : "memory");
#else
  *static_cast<uint4*>(shared) = *static_cast<const uint4*>(global);
#endif
}

__device__ inline void copy_async_commit() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until at most kPending of this thread's committed groups are still under way.
template <int kPending>
__device__ inline void copy_async_wait() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#endif
}

// A barrier in shared memory that counts bytes: one thread announces how many are to come, the copy engine of sm_90
// brings them, all wait. Used once, then thrown away.
__device__ inline void expect_bytes(uint64_t* barrier, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(barrier));
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(address) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address), "r"(bytes) : "memory");
#endif
}

// A run of bytes, a multiple of 16 at a multiple of 16, from global to shared memory by the copy engine.
__device__ inline void copy_bulk(void* shared, const void* global, uint32_t bytes, uint64_t* barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
          "r"(static_cast<uint32_t>(__cvta_generic_to_shared(shared))),
      "l"(global), "r"(bytes), "r"(static_cast<uint32_t>(__cvta_generic_to_shared(barrier))), "l"(evict_first())
      : "memory");
#endif
}

__device__ inline void wait_for_bytes(uint64_t* barrier) {
#if __CUDA_ARCH__ >= 900
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(barrier));
  uint32_t done = 0;
  while (!done) {
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done)
                 : "r"(address)
                 : "memory");
  }
#endif
}

// Programmatic dependent launch: the next kernel may be set up while this one ends. Nothing before sm_90 has it.
__device__ inline void allow_next_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ inline void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// ---- reductions ----------------------------------------------------------------------------------------------------

// The sum over groups of kLanes lanes of a warp, given to each of them; a fixed butterfly, so bitwise repeatable.
template <int kLanes>
__device__ inline float lane_sum(float v) {
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) v += __shfl_xor_sync(0xffffffffu, v, step);
  return v;
}

// The sum over the kLanes threads that own a row, given to each of them. Rows of several warps meet in `scratch`
// (kLanes / 32 floats of this row's own); every thread of the block must come here together. A caller that loops
// alternates between two scratch areas: then one barrier per row is enough. (Barriers of their own for the rows of a
// block were tried: with a barrier number in a register the compiler reserves all 16, and only 4 blocks fit.)
template <int kLanes>
__device__ inline float row_sum(float v, float* scratch) {
  if constexpr (kLanes <= kWarp) {
    return lane_sum<kLanes>(v);
  } else {
    constexpr int kWarps = kLanes / kWarp;
    v = lane_sum<kWarp>(v);
    const int lane = threadIdx.x % kLanes;
    if (lane % kWarp == 0) scratch[lane / kWarp] = v;
    __syncthreads();
    return lane_sum<kWarps>(scratch[lane % kWarps]);
  }
}

// ---- the device ----------------------------------------------------------------------------------------------------

struct DeviceFacts {
  int multiprocessors = 0;
  int shared_bytes = 0;  // the most one block can have
  int capability = 0;    // 90 for sm_90
};

constexpr int kMaxDevices = 64;

// Asked of the driver once per device; a second thread that asks meanwhile gets the same answer.
inline const DeviceFacts& device_facts(int device) {
  static DeviceFacts facts[kMaxDevices];
  static std::atomic<bool> known[kMaxDevices];
  if (!known[device].load(std::memory_order_acquire)) {
    DeviceFacts f;
    int major = 0, minor = 0;
    cudaDeviceGetAttribute(&f.multiprocessors, cudaDevAttrMultiProcessorCount, device);
    cudaDeviceGetAttribute(&f.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    f.capability = 10 * major + minor;
    facts[device] = f;
    known[device].store(true, std::memory_order_release);
  }
  return facts[device];
}

// Makes the stream's device current for the length of a launcher.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    if (cudaGetDevice(&current_) != cudaSuccess) current_ = -1;
    previous_ = current_;
    if (device >= 0 && device != current_ && cudaSetDevice(device) == cudaSuccess) current_ = device;
  }
  ~DeviceGuard() {
    if (previous_ != current_) cudaSetDevice(previous_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

  bool ok() const { return current_ >= 0 && current_ < kMaxDevices; }
  int device() const { return current_; }

 private:
  int previous_ = -1;
  int current_ = -1;
};

inline int64_t at_most(int64_t value, int64_t limit) { return value < limit ? value : limit; }

// Raises a kernel's limit of dynamic shared memory, once per device; `allowed` remembers, one static array per kernel.
template <typename Kernel>
bool allow_shared(Kernel kernel, int device, int64_t bytes, std::atomic<int64_t> (&allowed)[kMaxDevices]) {
  if (bytes <= allowed[device].load(std::memory_order_relaxed)) return true;
  const int wanted = static_cast<int>(bytes);
  if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, wanted) != cudaSuccess) return false;
  allowed[device].store(bytes, std::memory_order_relaxed);
  return true;
}

// Launches a kernel. With `programmatic` (sm_90 and later) it may start while the kernel before it ends: such a kernel
// must call wait_for_previous_kernel() before it touches memory.
template <typename... Parameters, typename... Arguments>
Status launch(void (*kernel)(Parameters...), dim3 grid, int threads, int64_t shared, bool programmatic,
              cudaStream_t stream, const Arguments&... arguments) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = programmatic ? 1 : 0;
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...);
  return error == cudaSuccess ? Status::kOk : Status::kCudaError;
}

template <typename F>
Status with_dtype(DType dtype, F&& f) {
  if (dtype == DType::kFloat32) return f(float{});
  return dtype == DType::kFloat16 ? f(fp16{}) : f(bf16{});
}

inline cudaStream_t cuda_stream(const Stream& stream) { return static_cast<cudaStream_t>(stream.handle); }

inline Status launch_status() { return cudaGetLastError() == cudaSuccess ? Status::kOk : Status::kCudaError; }

}  // namespace fuselm
