// What every kernel shares: 16-byte vectors, rows of any strides, reductions over the lanes of a row, device facts.
//
// Knows nothing of any op. The house's picture of a row: it is cut into vectors of 16 bytes of the main dtype (8 of
// bf16, 4 of fp32); `lanes` threads own a row, and lane l owns vectors l, l + lanes, l + 2 * lanes, ... so a warp's
// load is one contiguous run. Which elements a thread owns depends on the width alone, never on strides or alignment:
// a row's sum is taken in the same order however the row is stored.
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

template <typename T>
__device__ inline uint4 packed(const float (&in)[kVec<T>]) {
  Pack<T> pack;
#pragma unroll
  for (int i = 0; i < kVec<T>; ++i) pack.value[i] = from_float<T>(in[i]);
  return pack.raw;
}

// ---- memory --------------------------------------------------------------------------------------------------------

// Activations are read once and written once: they are kept out of L1 and marked as the first to leave L2, so that
// weights and partial sums stay.
__device__ inline uint4 load_streaming(const void* address) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address));
  return v;
}

__device__ inline void store_vector(void* address, const uint4& v) { *static_cast<uint4*>(address) = v; }

// Sixteen bytes from global to this thread's place in shared memory, without passing through registers. Only the
// thread that asked may read them back after copy_async_wait: no barrier is needed, and none is given.
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
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(shared))),
               "l"(global), "r"(bytes), "r"(static_cast<uint32_t>(__cvta_generic_to_shared(barrier)))
               : "memory");
#endif
}

__device__ inline void wait_for_bytes(uint64_t* barrier) {
#if __CUDA_ARCH__ >= 900
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(barrier));
  uint32_t done = 0;
  while (!done) {
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0; selp.u32 %0, 1, 0, p; }"
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

// ---- rows of any strides -------------------------------------------------------------------------------------------

// Division of a row number below 2^31 by a constant, as a multiplication (Granlund and Montgomery 1994).
struct Divisor {
  uint32_t value = 1, multiplier = 1, shift = 0;

  Divisor() = default;
  explicit Divisor(uint32_t d) : value(d > 0 ? d : 1) {  // a dimension of size 0 has no row to ask about
    while ((uint64_t{1} << shift) < value) ++shift;
    multiplier = static_cast<uint32_t>((uint64_t{1} << 32) * ((uint64_t{1} << shift) - value) / value + 1);
  }
  __device__ uint32_t divide(uint32_t n) const { return (__umulhi(multiplier, n) + n) >> shift; }
};

constexpr int kFastDims = 3;

// A tensor as rows: all dimensions but the last make the row number; neighbours that share a stride are folded into one
// on the host. Strides are in bytes. Passed to kernels by value.
struct Rows {
  char* data = nullptr;
  DType dtype = DType::kAbsent;
  bool vectors = true;  // whole, aligned vectors and row() may be called; if not: any_row(), element by element
  int32_t outer = 1;    // row dimensions left after folding
  int64_t column_stride = 1;  // in elements
  int64_t sizes[kMaxRank - 1] = {};
  int64_t strides[kMaxRank - 1] = {};
  Divisor divisors[kFastDims];

  __host__ __device__ bool present() const { return dtype != DType::kAbsent; }

  __device__ char* row(int64_t index) const {
    if (outer == 1) return data + index * strides[0];
    char* at = data;
    uint32_t rest = static_cast<uint32_t>(index);
#pragma unroll
    for (int d = kFastDims - 1; d > 0; --d) {
      if (d < outer) {
        const uint32_t quotient = divisors[d].divide(rest);
        at += static_cast<int64_t>(rest - quotient * divisors[d].value) * strides[d];
        rest = quotient;
      }
    }
    return at + rest * strides[0];
  }

  __device__ char* any_row(int64_t index) const {
    if (outer == 1) return data + index * strides[0];
    char* at = data;
#pragma unroll 1
    for (int d = outer - 1; d >= 0; --d) {
      at += index % sizes[d] * strides[d];
      index /= sizes[d];
    }
    return at;
  }
};

inline void fold_dimensions(const TensorView& view, Rows& rows) {
  int used = 0;
  for (int d = 0; d < view.rank - 1; ++d) {
    if (view.sizes[d] == 1) continue;
    const int64_t stride = view.strides[d] * element_bytes(view.dtype);
    if (used > 0 && rows.strides[used - 1] == view.sizes[d] * stride) {
      rows.sizes[used - 1] *= view.sizes[d];
      rows.strides[used - 1] = stride;
    } else {
      rows.sizes[used] = view.sizes[d];
      rows.strides[used++] = stride;
    }
  }
  rows.outer = used > 0 ? used : 1;
}

// `width` is the last size and `vec` the elements of a vector: 16 bytes of the op's main dtype, which need not be
// this tensor's own.
inline Rows make_rows(const TensorView& view, int64_t width, int vec) {
  Rows rows;
  rows.data = static_cast<char*>(view.data);
  rows.dtype = view.dtype;
  if (!view.present()) return rows;
  fold_dimensions(view, rows);
  rows.column_stride = view.rank > 0 && width > 1 ? view.strides[view.rank - 1] : 1;
  int64_t count = 1;
  rows.vectors = rows.column_stride == 1 && width % vec == 0 && reinterpret_cast<uintptr_t>(view.data) % 16 == 0;
  for (int d = 0; d < rows.outer; ++d) {
    rows.vectors &= rows.strides[d] % 16 == 0;
    count *= rows.sizes[d] > 0 ? rows.sizes[d] : 1;
  }
  if (rows.outer > 1) rows.vectors &= rows.outer <= kFastDims && count < (int64_t{1} << 31);
  for (int d = 0; rows.vectors && rows.outer > 1 && d < rows.outer; ++d) {
    rows.divisors[d] = Divisor(static_cast<uint32_t>(rows.sizes[d]));
  }
  return rows;
}

__device__ inline float element(const char* row, DType dtype, int64_t index) {
  if (dtype == DType::kFloat32) return reinterpret_cast<const float*>(row)[index];
  return dtype == DType::kBFloat16 ? to_float(reinterpret_cast<const bf16*>(row)[index])
                                   : to_float(reinterpret_cast<const fp16*>(row)[index]);
}

__device__ inline void set_element(char* row, DType dtype, int64_t index, float value) {
  if (dtype == DType::kFloat32) {
    reinterpret_cast<float*>(row)[index] = value;
  } else if (dtype == DType::kBFloat16) {
    reinterpret_cast<bf16*>(row)[index] = from_float<bf16>(value);
  } else {
    reinterpret_cast<fp16*>(row)[index] = from_float<fp16>(value);
  }
}

// N numbers of type T from or to aligned memory, in pieces of 16 bytes (8 where there is no more).
template <typename T, int N>
__device__ inline void load_floats(const void* from, float (&out)[N]) {
  if constexpr (N * sizeof(T) == 8) {
    union {
      uint2 raw;
      T value[N];
    } pack = {*static_cast<const uint2*>(from)};
#pragma unroll
    for (int i = 0; i < N; ++i) out[i] = to_float(pack.value[i]);
  } else {
#pragma unroll
    for (int piece = 0; piece < N / kVec<T>; ++piece) {
      float part[kVec<T>];
      unpack<T>(static_cast<const uint4*>(from)[piece], part);
#pragma unroll
      for (int i = 0; i < kVec<T>; ++i) out[piece * kVec<T> + i] = part[i];
    }
  }
}

template <typename T, int N>
__device__ inline void store_floats(void* to, const float (&in)[N]) {
  static_assert(N * sizeof(T) >= 16, "whole vectors only");
#pragma unroll
  for (int piece = 0; piece < N / kVec<T>; ++piece) {
    float part[kVec<T>];
#pragma unroll
    for (int i = 0; i < kVec<T>; ++i) part[i] = in[piece * kVec<T> + i];
    store_vector(static_cast<uint4*>(to) + piece, packed<T>(part));
  }
}

// Vector number `index` of a small tensor whose dtype is known only at run time, a weight: the branch is the same for all
// threads, and a template over every mix of dtypes would triple the kernels. By the read-only path: the compiler may ask
// for the next one before the stores of this one.
template <int N>
__device__ inline void load_constant(const char* from, DType dtype, int64_t index, float (&out)[N]) {
  const char* at = from + index * N * element_bytes(dtype);
  if constexpr (N == 8) {
    const uint4 low = __ldg(reinterpret_cast<const uint4*>(at));
    if (dtype == DType::kFloat32) {
      const uint4 both[2] = {low, __ldg(reinterpret_cast<const uint4*>(at) + 1)};
      load_floats<float>(both, out);
    } else if (dtype == DType::kBFloat16) {
      unpack<bf16>(low, out);
    } else {
      unpack<fp16>(low, out);
    }
  } else if (dtype == DType::kFloat32) {
    unpack<float>(__ldg(reinterpret_cast<const uint4*>(at)), out);
  } else {
    const uint2 raw = __ldg(reinterpret_cast<const uint2*>(at));
    if (dtype == DType::kBFloat16) {
      load_floats<bf16>(&raw, out);
    } else {
      load_floats<fp16>(&raw, out);
    }
  }
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

template <typename F>
Status with_dtype(DType dtype, F&& f) {
  if (dtype == DType::kFloat32) return f(float{});
  return dtype == DType::kFloat16 ? f(fp16{}) : f(bf16{});
}

inline bool same_sizes(const TensorView& a, const TensorView& b) {
  bool same = a.rank == b.rank;
  for (int d = 0; same && d < a.rank; ++d) same = a.sizes[d] == b.sizes[d];
  return same;
}

inline int64_t count_rows(const TensorView& x) {
  int64_t rows = 1;
  for (int d = 0; d < x.rank - 1; ++d) rows *= x.sizes[d];
  return rows;
}

inline cudaStream_t cuda_stream(const Stream& stream) { return static_cast<cudaStream_t>(stream.handle); }

inline Status launch_status() { return cudaGetLastError() == cudaSuccess ? Status::kOk : Status::kCudaError; }

}  // namespace fuselm
