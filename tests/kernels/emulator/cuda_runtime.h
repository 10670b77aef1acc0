// What the kernels' sources need of CUDA to be compiled for a CPU by g++: words, vector types, intrinsics, launches.
//
// Found instead of the toolkit's header of this name. A launch runs at once, block after block, those of a cluster
// together, each thread as a fiber that goes on until it waits: at a barrier, for lanes of its warp that exchange
// numbers, for the copy engine. Knows no kernel. What it cannot tell: how fast a kernel is, what hangs on blocks of
// several clusters at a time, and what tensor cores make.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <tuple>
#include <type_traits>
#include <utility>

// ---- words ----

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))

// ---- vectors ----

struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

// ---- threads ----

// Of the thread that runs now; fibers.cpp changes them from one to the next.
extern dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulated {

void* dynamic_shared();
// Where a block has what its kernel declares of this type: `type` is the address of something that the type has alone.
void* own_place(const void* type, size_t bytes, size_t alignment);
template <typename Shared>
Shared& own_shared() {
  static const char type = 0;
  return *static_cast<Shared*>(own_place(&type, sizeof(Shared), alignof(Shared)));
}
// Where shared memory lies in 32 bits: this block's, the same place in another block of the cluster; and back.
uint32_t shared_number(const void* pointer);
uint32_t far_number(uint32_t number, uint32_t rank);
void* shared_pointer(uint32_t number);

// Waits for all threads of the block that have not ended; what they bring is given to each of them, or-ed.
bool meet_block(bool mine);
// Waits for the lanes of the mask that have not ended. `all` has what each of them brought, `there` who they are.
struct Lanes {
  uint64_t all[32];
  uint32_t there;
};
Lanes meet_warp(uint32_t mask, uint64_t mine);
int lane();

// Waits for all threads of the cluster, in two steps.
void cluster_arrive();
void cluster_wait();

// The copy engine, see copies.cpp. A barrier is passed when its phase of this parity is over; who asks in vain yields.
void init_barrier(uint32_t barrier, uint32_t arrivals);
void expect_bytes(uint32_t barrier, uint32_t bytes);
bool is_passed(uint32_t barrier, uint32_t parity);
void copy_bulk(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier);
void send(uint32_t to, float value, uint32_t barrier);
void store_bulk(void* to, uint32_t from, uint32_t bytes);
void wait_for_stores(int pending);
// And how rows travel on sm_80: each thread asks for 16 bytes and waits for its own.
void copy_async(uint32_t to, const void* from);
void commit_copies();
void wait_for_copies(int pending);

template <typename To, typename From>
inline To bits(const From& from) {
  static_assert(sizeof(To) <= 8 && sizeof(From) <= 8, "a number");
  To to{};
  std::memcpy(&to, &from, std::min(sizeof(To), sizeof(From)));
  return to;
}

template <typename T>
inline T from_lane(uint32_t mask, T mine, int lane_in_group, int width, bool inside) {
  const Lanes lanes = meet_warp(mask, bits<uint64_t>(mine));
  const int first = lane() / width * width;
  const int from = inside ? first + lane_in_group : lane();
  // What a lane that is not there would have brought nobody knows.
  return lanes.there >> from & 1 ? bits<T>(lanes.all[from]) : bits<T>(uint64_t{0x7fc12345});
}

}  // namespace emulated

inline void __syncthreads() { emulated::meet_block(false); }
inline int __syncthreads_or(int mine) { return emulated::meet_block(mine != 0); }
inline void __syncwarp(uint32_t mask = 0xffffffffu) { emulated::meet_warp(mask, 0); }

template <typename T>
inline T __shfl_sync(uint32_t mask, T mine, int lane, int width = 32) {
  return emulated::from_lane(mask, mine, lane & (width - 1), width, true);
}
template <typename T>
inline T __shfl_xor_sync(uint32_t mask, T mine, int step, int width = 32) {
  const int wanted = (emulated::lane() & (width - 1)) ^ step;
  return emulated::from_lane(mask, mine, wanted, width, wanted < width);
}
template <typename T>
inline T __shfl_up_sync(uint32_t mask, T mine, unsigned step, int width = 32) {
  const int wanted = (emulated::lane() & (width - 1)) - static_cast<int>(step);
  return emulated::from_lane(mask, mine, wanted, width, wanted >= 0);
}
inline uint32_t __ballot_sync(uint32_t mask, int mine) {
  const emulated::Lanes lanes = emulated::meet_warp(mask, mine != 0);
  uint32_t found = 0;
  for (int i = 0; i < 32; ++i) found |= (lanes.there >> i & 1 & static_cast<uint32_t>(lanes.all[i])) << i;
  return found;
}
inline int __any_sync(uint32_t mask, int mine) { return __ballot_sync(mask, mine) != 0; }
template <typename T>
inline uint32_t __match_any_sync(uint32_t mask, T mine) {
  const emulated::Lanes lanes = emulated::meet_warp(mask, emulated::bits<uint64_t>(mine));
  uint32_t found = 0;
  for (int i = 0; i < 32; ++i) {
    found |= (lanes.there >> i & 1 & (lanes.all[i] == emulated::bits<uint64_t>(mine))) << i;
  }
  return found;
}

inline int __reduce_max_sync(uint32_t mask, int mine) {
  const emulated::Lanes lanes = emulated::meet_warp(mask, emulated::bits<uint64_t>(mine));
  int most = mine;
  for (int i = 0; i < 32; ++i) {
    if (lanes.there >> i & 1) most = std::max(most, emulated::bits<int>(lanes.all[i]));
  }
  return most;
}

template <typename T, typename U>
inline T atomicAdd(T* at, U more) {
  return std::exchange(*at, static_cast<T>(*at + more));
}
template <typename T, typename U>
inline T atomicExch(T* at, U other) {
  return std::exchange(*at, static_cast<T>(other));
}

// ---- numbers ----

// Kept from being fused with an addition, as the intrinsic is.
inline float __fmul_rn(float a, float b) {
  volatile float product = a * b;
  return product;
}
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __frsqrt_rn(float x) { return static_cast<float>(1.0 / std::sqrt(static_cast<double>(x))); }
inline float rsqrtf(float x) { return __frsqrt_rn(x); }
inline float __uint_as_float(uint32_t x) { return emulated::bits<float>(x); }
inline uint32_t __float_as_uint(float x) { return emulated::bits<uint32_t>(x); }
inline float __int_as_float(int32_t x) { return emulated::bits<float>(x); }
inline int32_t __float_as_int(float x) { return emulated::bits<int32_t>(x); }
inline uint32_t __umulhi(uint32_t a, uint32_t b) { return static_cast<uint32_t>(uint64_t{a} * b >> 32); }
inline int __popc(uint32_t x) { return __builtin_popcount(x); }
inline int __ffs(uint32_t x) { return __builtin_ffs(static_cast<int>(x)); }
template <typename T>
inline T __ldg(const T* from) {
  return *from;
}
template <typename T>
inline T min(T a, T b) {
  return b < a ? b : a;
}
template <typename T>
inline T max(T a, T b) {
  return a < b ? b : a;
}

// ---- what PTX does, see emulated.py ----

namespace emulated {
template <int kWords, typename... Words>
inline void load_words(uint64_t address, Words&... words) {
  static_assert(sizeof...(Words) == kWords, "a word each");
  if (address % (4 * kWords) != 0) __builtin_trap();  // a GPU stops at such a vector, too
  const auto* from = reinterpret_cast<const uint32_t*>(address);
  int i = 0;
  ((std::memcpy(&words, from + i++, 4)), ...);
}
inline uint64_t number(const void* pointer) { return reinterpret_cast<uint64_t>(pointer); }
inline uint64_t number(uint64_t address) { return address; }
}  // namespace emulated

// ---- the device ----

using cudaStream_t = void*;
using cudaError_t = int;
constexpr cudaError_t cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorLaunchFailure = 719;
enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount,
  cudaDevAttrMaxSharedMemoryPerBlockOptin,
  cudaDevAttrL2CacheSize,
  cudaDevAttrComputeCapabilityMajor,
  cudaDevAttrComputeCapabilityMinor,
};
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int device);
cudaError_t cudaGetDevice(int* device);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaGetLastError();

enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize, cudaFuncAttributeNonPortableClusterSizeAllowed };
namespace emulated {
cudaError_t set_attribute(const void* kernel, cudaFuncAttribute which, int value);
}
template <typename Kernel>
cudaError_t cudaFuncSetAttribute(Kernel kernel, cudaFuncAttribute which, int value) {
  return emulated::set_attribute(reinterpret_cast<const void*>(kernel), which, value);
}
enum cudaMemcpyKind { cudaMemcpyDeviceToDevice };
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}

enum cudaLaunchAttributeID { cudaLaunchAttributeProgrammaticStreamSerialization, cudaLaunchAttributeClusterDimension };
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    int programmaticStreamSerializationAllowed;
    struct {
      unsigned x, y, z;
    } clusterDim;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};
namespace emulated {
cudaError_t most_clusters(int* count, const void* kernel, const cudaLaunchConfig_t& how);
// Runs every thread of every block; an error where the launch has no sense.
cudaError_t run(const cudaLaunchConfig_t& how, const void* kernel, const std::function<void()>& thread);
}  // namespace emulated
template <typename Kernel>
cudaError_t cudaOccupancyMaxActiveClusters(int* count, Kernel kernel, const cudaLaunchConfig_t* how) {
  return emulated::most_clusters(count, reinterpret_cast<const void*>(kernel), *how);
}
template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* how, void (*kernel)(Parameters...), Arguments&&... arguments) {
  // A kernel has its arguments from when it is launched on.
  const std::tuple<std::decay_t<Parameters>...> kept(std::forward<Arguments>(arguments)...);
  return emulated::run(*how, reinterpret_cast<const void*>(kernel), [&] { std::apply(kernel, kept); });
}

// kernel<<<grid, threads, shared, stream>>>(...) in words.
namespace emulated {
void failed(cudaError_t error);
template <typename... Parameters>
auto chevrons(void (*kernel)(Parameters...), dim3 grid, dim3 threads, size_t shared_bytes = 0, cudaStream_t = nullptr) {
  return [=](auto... arguments) {
    const cudaLaunchConfig_t how = {grid, threads, shared_bytes, nullptr, nullptr, 0};
    failed(cudaLaunchKernelEx(&how, kernel, static_cast<Parameters>(arguments)...));
  };
}
}  // namespace emulated
