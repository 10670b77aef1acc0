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

// Of the floating-point dtypes.
__host__ __device__ inline int element_bytes(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

inline bool is_float(DType dtype) {
  return dtype == DType::kFloat32 || dtype == DType::kFloat16 || dtype == DType::kBFloat16;
}

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// What a branch is expected to find: the code for the other case goes out of the way. A kernel that takes microseconds
// waits for its own code.
__host__ __device__ constexpr bool likely(bool condition) { return __builtin_expect(condition, true); }
__host__ __device__ constexpr bool unlikely(bool condition) { return __builtin_expect(condition, false); }

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

// The two numbers of a word. By bits: taking a bf16 out of a union costs the compiler two more instructions each.
__device__ inline void unpack_pair(uint32_t word, float& low, float& high, bf16) {
  low = __uint_as_float(word << 16);
  high = __uint_as_float(word & 0xffff0000u);
}
__device__ inline void unpack_pair(uint32_t word, float& low, float& high, fp16) {
  const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&word));
  low = pair.x, high = pair.y;
}

template <typename T>
__device__ inline void unpack(const uint4& raw, float (&out)[kVec<T>]) {
  if constexpr (sizeof(T) == 4) {
    out[0] = __uint_as_float(raw.x), out[1] = __uint_as_float(raw.y);
    out[2] = __uint_as_float(raw.z), out[3] = __uint_as_float(raw.w);
  } else {
    unpack_pair(raw.x, out[0], out[1], T{}), unpack_pair(raw.y, out[2], out[3], T{});
    unpack_pair(raw.z, out[4], out[5], T{}), unpack_pair(raw.w, out[6], out[7], T{});
  }
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

// The larger of each of two pairs, or the smaller.
template <bool kSmallest>
__device__ inline uint32_t pair_extreme(uint32_t a, uint32_t b, bf16) {
  const auto x = *reinterpret_cast<const __nv_bfloat162*>(&a), y = *reinterpret_cast<const __nv_bfloat162*>(&b);
  const __nv_bfloat162 z = kSmallest ? __hmin2(x, y) : __hmax2(x, y);
  return *reinterpret_cast<const uint32_t*>(&z);
}
template <bool kSmallest>
__device__ inline uint32_t pair_extreme(uint32_t a, uint32_t b, fp16) {
  const auto x = *reinterpret_cast<const __half2*>(&a), y = *reinterpret_cast<const __half2*>(&b);
  const __half2 z = kSmallest ? __hmin2(x, y) : __hmax2(x, y);
  return *reinterpret_cast<const uint32_t*>(&z);
}

// ---- memory --------------------------------------------------------------------------------------------------------

// What L2 does with lines that are read. Where a call's tensors together are larger than L2, they are read as what
// leaves it last: what leaves is then what has been written, soon and in order, and a kernel that reads once and writes
// once gains 4 % on an H200; marked to leave first, reads cost it 4 %. Where they are smaller they are read as usual,
// so that what is written stays for the next kernel.
__device__ inline uint64_t read_policy(bool larger_than_l2) {
  uint64_t last = 0, normal = 0;
#if __CUDA_ARCH__ >= 800
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(last));
  asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(normal));
#endif
  return larger_than_l2 ? last : normal;
}

__device__ inline uint4 load_vector(const void* address) { return *static_cast<const uint4*>(address); }

// From an address of which the compiler does not know any more that it is a global one: see now().
struct Global {};
__device__ inline uint4 load_vector(const void* address, Global) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(address));
  return v;
}

__device__ inline uint4 load_vector(const void* address, uint64_t policy) {
#if __CUDA_ARCH__ >= 800
  uint4 v;
  asm volatile("ld.global.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address), "l"(policy));
  return v;
#else
  return load_vector(address);
#endif
}

// The same past L1, which is left to what many rows share: of a mask of one row for all, asked for by every block at
// once, L2 gives a tenth of what it gives of rows apart.
__device__ inline uint4 load_vector_once(const void* address, uint64_t policy) {
#if __CUDA_ARCH__ >= 800
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address), "l"(policy));
  return v;
#else
  return load_vector(address);
#endif
}

// The same by the read-only path, asked for here and not where the compiler would: it moves an ordinary load to just
// before its use, behind barriers too.
__device__ inline uint4 load_constant_now(const void* address) {
  uint4 v;
  asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address));
  return v;
}

__device__ inline void store_vector(void* address, const uint4& v) { *static_cast<uint4*>(address) = v; }

// Rows come to shared memory in one of two ways. From sm_90 on a copy engine brings runs of bytes; a barrier in shared
// memory counts them, one thread announces and asks, all wait. Before that (copy_async) each thread asks for the 16
// bytes it will read itself, and waits for its own: no barrier is needed, and none is given.
#if __CUDA_ARCH__ >= 900
constexpr bool kCopyEngine = true;
#else
constexpr bool kCopyEngine = false;
#endif

__device__ inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}
__device__ inline void store_shared(uint32_t address, float v) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(v) : "memory");
}
__device__ inline float4 load_shared(uint32_t address) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

// So many arrivals make the barrier's first phase complete, once the bytes announced with them are there too.
__device__ inline void init_barrier(uint64_t* barrier, uint32_t arrivals = 1) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

__device__ inline void expect_bytes(uint64_t* barrier, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
#endif
}

// A run of bytes, a multiple of 16 at a multiple of 16, from global to shared memory by the copy engine. Fastest at
// multiples of 128 in shared memory.
__device__ inline void copy_bulk(void* shared, const void* global, uint32_t bytes, uint64_t* barrier, uint64_t policy) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
          "r"(shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
#endif
}

// The way back. The copy engine sees what threads have written after fence_copies() and a barrier.
__device__ inline void store_bulk(void* global, const void* shared, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n cp.async.bulk.commit_group;" ::"l"(global),
      "r"(shared_address(shared)), "r"(bytes)
      : "memory");
#endif
}

// Waits until all but the last kPending runs that this thread has stored have left shared memory.
template <int kPending>
__device__ inline void wait_for_stores() {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
#endif
}

// Waits until the phase of this parity is complete: 0 for the first time a barrier is used, 1 for the second, ...
__device__ inline void wait_for_bytes(const uint64_t* barrier, uint32_t parity) {
#if __CUDA_ARCH__ >= 900
  uint32_t done = 0;
  while (!done) {
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done)
                 : "r"(shared_address(barrier)), "r"(parity)
                 : "memory");
  }
#endif
}

// What threads have written to shared memory is there before the copy engine reads it or writes over it; a barrier must
// follow.
__device__ inline void fence_copies() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

__device__ inline void copy_async(void* shared, const void* global) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(shared)), "l"(global) : "memory");
#else
  *static_cast<uint4*>(shared) = *static_cast<const uint4*>(global);
#endif
}

__device__ inline void copy_async_commit() {
#if __CUDA_ARCH__ >= 800 && __CUDA_ARCH__ < 900
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until at most kPending of this thread's committed groups are still under way.
template <int kPending>
__device__ inline void copy_async_wait() {
#if __CUDA_ARCH__ >= 800 && __CUDA_ARCH__ < 900
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#endif
}

// A cluster is blocks that run at the same time and reach each other's shared memory, from sm_90 on.
__device__ inline void cluster_barrier() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.aligned;\n barrier.cluster.wait.aligned;" ::: "memory");
#endif
}

// The same in two steps, with work in between, for barriers that init_barrier has fenced: what has been asked of memory
// before is not waited for.
__device__ inline void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
__device__ inline void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// 2^x, to 2 ulp; 0 for -inf. What is smaller than a normal number is 0.
__device__ inline float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x, to 1 ulp.
__device__ inline float fast_inverse(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Puts a number where `slot` is in the shared memory of block `rank` of the cluster, and counts its 4 bytes on the
// barrier that is there where `barrier` is here.
__device__ inline void send(float value, const float* slot, const uint64_t* barrier, uint32_t rank) {
#if __CUDA_ARCH__ >= 900
  uint32_t far_slot, far_barrier;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(far_slot) : "r"(shared_address(slot)), "r"(rank));
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(far_barrier) : "r"(shared_address(barrier)), "r"(rank));
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(far_slot),
               "f"(value), "r"(far_barrier)
               : "memory");
#endif
}

// Programmatic dependent launch: the next kernel may be set up while this one ends. Nothing before sm_90 has it.
__device__ inline void allow_next_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Has a kernel's parameters read where they are, each time: the compiler would keep some in registers, and a kernel
// that is short of those would spill others for them.
template <typename Args>
__device__ inline void keep_in_place(const Args& a) {
  asm volatile("" ::"l"(&a) : "memory");
}

// Has a parameter of the kernel read here and now, or an address made of some: the constant cache is cold when a kernel
// starts, a kernel that waits has the time to fetch a line of it, and one that has waited should ask for its row at
// once.
__device__ inline void warm(const void* parameter) { asm volatile("" ::"l"(parameter)); }
__device__ inline void warm(float parameter) { asm volatile("" ::"f"(parameter)); }

// What only some threads use, made by all of them before it is known by which. Left to itself the compiler asks for
// parameters by a predicate, after what that hangs on: in a kernel of a microsecond, most of what is before its loads.
template <typename T>
__device__ inline T now(T value) {
  if constexpr (sizeof(T) == 8) {
    asm volatile("" : "+l"(value));
  } else {
    asm volatile("" : "+r"(value));
  }
  return value;
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
  for (int step = 1; step < kLanes; step *= 2) v += __shfl_xor_sync(0xffffffffu, v, step);
  return v;
}

template <int kLanes>
__device__ inline float lane_max(float v) {
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, step));
  return v;
}

// Of a whole warp by one instruction: integers that are ordered as the numbers are. (-0 is below 0, which fmaxf need
// not heed; NaN is above or below all, where fmaxf ignores it.) Sooner there by 0.1 us, at the price of registers: the
// loss kernel for 50304 columns, which has none to spare, spilled for it and took a sixth longer.
__device__ inline float warp_max_soon(float v) {
#if __CUDA_ARCH__ >= 800
  auto ordered = [](int bits) { return bits ^ (bits >> 31 & 0x7fffffff); };
  return __int_as_float(ordered(__reduce_max_sync(0xffffffffu, ordered(__float_as_int(v)))));
#else
  return lane_max<kWarp>(v);
#endif
}

// How numbers of lanes become one: the order is that of lane_sum in any case.
struct Sum {
  __device__ static float of(float a, float b) { return a + b; }
  template <int kLanes>
  __device__ static float lanes(float v) {
    return lane_sum<kLanes>(v);
  }
  __device__ static float warp_soon(float v) { return lane_sum<kWarp>(v); }
};
struct Largest {
  __device__ static float of(float a, float b) { return fmaxf(a, b); }
  template <int kLanes>
  __device__ static float lanes(float v) {
    return lane_max<kLanes>(v);
  }
  __device__ static float warp_soon(float v) { return warp_max_soon(v); }
};

// kCount numbers in pairs, and pairs of those: a loop over them would put them into memory.
template <typename Fold, int kCount>
__device__ inline float folded(const float* value) {
  static_assert((kCount & (kCount - 1)) == 0, "pairs all the way");
  if constexpr (kCount == 1) {
    return *value;
  } else {
    return Fold::of(folded<Fold, kCount / 2>(value), folded<Fold, kCount / 2>(value + kCount / 2));
  }
}

// Where warps leave numbers for each other, kWarps together, on two sides of a barrier. With kSoon each thread reads
// all of them as vectors, a shuffle or more less on the way, and they are aligned to 16 bytes. Their address is made
// once: of a name the compiler makes it anew behind the barrier, where all threads wait for it.
template <int kWarps, bool kSoon>
struct FromWarps {
  static constexpr bool kVectors = kSoon && kWarps % 4 == 0;
  float* scratch;
  uint32_t address;

  __device__ explicit FromWarps(float* scratch_)
      : scratch(scratch_), address(kVectors ? now(shared_address(scratch_)) : 0) {}
  __device__ void put(int index, float v) {
    if constexpr (kVectors) {
      store_shared(address + index * 4, v);
    } else {
      scratch[index] = v;
    }
  }
  template <typename Fold>
  __device__ float fold(int first) const {
    if constexpr (kVectors) {
      float value[kWarps];
#pragma unroll
      for (int i = 0; i < kWarps; i += 4) {
        const float4 four = load_shared(address + (first + i) * 4);
        value[i] = four.x, value[i + 1] = four.y, value[i + 2] = four.z, value[i + 3] = four.w;
      }
      return folded<Fold, kWarps>(value);
    } else {
      return Fold::template lanes<kWarps>(scratch[first + threadIdx.x % kWarps]);
    }
  }
};

// The sum over the kLanes threads that own a row, or the largest, given to each of them. Rows of several warps meet in
// `scratch` (kLanes / 32 floats of this row's own, for kSoon aligned to 16 bytes); every thread of the block must come
// here together. A caller that loops alternates between two scratch areas: then one barrier per row is enough.
// (Barriers of their own for the rows of a block were tried: with a barrier number in a register the compiler reserves
// all 16, and only 4 blocks fit.)
template <typename Fold, int kLanes, bool kSoon>
__device__ inline float row_fold(float v, float* scratch) {
  if constexpr (kLanes <= kWarp) {
    return Fold::template lanes<kLanes>(v);
  } else {
    v = kSoon ? Fold::warp_soon(v) : Fold::template lanes<kWarp>(v);
    FromWarps<kLanes / kWarp, kSoon> warps(scratch);
    const int lane = threadIdx.x % kLanes;
    if (lane % kWarp == 0) warps.put(lane / kWarp, v);
    __syncthreads();
    return warps.template fold<Fold>(0);
  }
}
template <int kLanes, bool kSoon = false>
__device__ inline float row_sum(float v, float* scratch) {
  return row_fold<Sum, kLanes, kSoon>(v, scratch);
}
template <int kLanes, bool kSoon = false>
__device__ inline float row_max(float v, float* scratch) {
  return row_fold<Largest, kLanes, kSoon>(v, scratch);
}

// The sums of several numbers with one barrier; `scratch` has room for each.
template <int kLanes, bool kSoon = false, int kCount>
__device__ inline void row_sums(float (&v)[kCount], float* scratch) {
  if constexpr (kCount == 1) {
    v[0] = row_sum<kLanes, kSoon>(v[0], scratch);
  } else if constexpr (kLanes <= kWarp) {
#pragma unroll
    for (float& one : v) one = lane_sum<kLanes>(one);
  } else {
    constexpr int kWarps = kLanes / kWarp;
    FromWarps<kWarps, kSoon> warps(scratch);
    const int lane = threadIdx.x % kLanes;
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      v[k] = lane_sum<kWarp>(v[k]);
      if (lane % kWarp == 0) warps.put(k * kWarps + lane / kWarp, v[k]);
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kCount; ++k) v[k] = warps.template fold<Sum>(k * kWarps);
  }
}

// Where each lane of a row has several threads, one for each of its kTurns vectors. Two or three are neighbours, so
// that they meet within a warp (with three a fourth has nothing): a barrier less, 0.3 us at 64x1024. Four are kLanes
// apart, so that a warp reads 512 bytes that follow one another: 6.0 us instead of 6.5 at 1024x1024.
template <int kTurns>
constexpr bool kNeighbours = kTurns < 4;
template <int kTurns>
constexpr int kSlots = kTurns > 2 ? 4 : 2;

// Which of the row's vectors a thread has, none where it is past the last.
template <int kLanes, int kTurns>
__device__ inline int wide_vector() {
  constexpr int kNear = kSlots<kTurns>;
  return kNeighbours<kTurns> ? threadIdx.x / kNear + threadIdx.x % kNear * kLanes : threadIdx.x;
}

// What a lane would have added up turn after turn, given to all of its threads, which are neighbours.
template <int kTurns>
__device__ inline float turn_sum(float v) {
  if constexpr (kTurns == 2) return v + __shfl_xor_sync(0xffffffffu, v, 1);
  float sum = __shfl_sync(0xffffffffu, v, 0, kSlots<kTurns>);
#pragma unroll
  for (int turn = 1; turn < kTurns; ++turn) sum += __shfl_sync(0xffffffffu, v, turn, kSlots<kTurns>);
  return sum;
}

// The sum over the lanes of a warp that have kStep threads each.
template <int kStep>
__device__ inline float spread_sum(float v) {
#pragma unroll
  for (int step = kStep; step < kWarp; step *= 2) v += __shfl_xor_sync(0xffffffffu, v, step);
  return v;
}

// The same as row_sums<kLanes>, to the bit, where each lane has several threads. `scratch` has kWideScratch floats for
// each number and is aligned to 16 bytes.
template <int kLanes, int kTurns>
constexpr int kWideScratch = kLanes * kSlots<kTurns> / kWarp + (kNeighbours<kTurns> ? 0 : kLanes * kSlots<kTurns>);

template <int kLanes, int kTurns, int kCount>
__device__ inline void wide_sums(float (&v)[kCount], float* scratch) {
  constexpr int kThreads = kLanes * kSlots<kTurns>, kWarps = kThreads / kWarp;
  if constexpr (kNeighbours<kTurns>) {
    FromWarps<kWarps, true> warps(scratch);
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      v[k] = spread_sum<kSlots<kTurns>>(turn_sum<kTurns>(v[k]));
      if (threadIdx.x % kWarp == 0) warps.put(k * kWarps + threadIdx.x / kWarp, v[k]);
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kCount; ++k) v[k] = warps.template fold<Sum>(k * kWarps);
  } else {
    const int lane = threadIdx.x % kLanes, turn = threadIdx.x / kLanes;
#pragma unroll
    for (int k = 0; k < kCount; ++k) scratch[k * kThreads + threadIdx.x] = v[k];
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      v[k] = scratch[k * kThreads + lane];
#pragma unroll
      for (int t = 1; t < kTurns; ++t) v[k] += scratch[k * kThreads + t * kLanes + lane];
    }
    row_sums<kLanes>(v, scratch + kCount * (kThreads + turn * kLanes / kWarp));
  }
}

// ---- the device ----------------------------------------------------------------------------------------------------

constexpr int64_t at_most(int64_t value, int64_t limit) { return value < limit ? value : limit; }

// Threads a multiprocessor holds, for __launch_bounds__: asking for more blocks than fit is a warning of the assembler.
#if __CUDA_ARCH__ == 750
constexpr int kResidentThreads = 1024;
#elif __CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 870 || __CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200
constexpr int kResidentThreads = 1536;
#else
constexpr int kResidentThreads = 2048;
#endif

constexpr int fitting_blocks(int threads, int blocks) {
  return blocks * threads <= kResidentThreads ? blocks : kResidentThreads / threads;
}

struct DeviceFacts {
  int multiprocessors = 0;
  int shared_bytes = 0;  // the most one block can have
  int l2_bytes = 0;
  int capability = 0;  // 90 for sm_90
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
    cudaDeviceGetAttribute(&f.l2_bytes, cudaDevAttrL2CacheSize, device);
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

// Raises a kernel's limit of dynamic shared memory to what a device has, less `kOwnShared` for the kernel's own arrays;
// once per device, `allowed` remembers, one static array per kernel. Always to the same limit: threads may race here.
constexpr int kOwnShared = 1024;

template <typename Kernel>
bool allow_shared(Kernel kernel, int device, int64_t bytes, std::atomic<bool> (&allowed)[kMaxDevices]) {
  const int most = device_facts(device).shared_bytes - kOwnShared;
  if (bytes > most) return false;
  if (allowed[device].load(std::memory_order_relaxed)) return true;
  if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most) != cudaSuccess) {
    cudaGetLastError();  // not to be taken for that of the kernel that runs instead
    return false;
  }
  allowed[device].store(true, std::memory_order_relaxed);
  return true;
}

// How a kernel is launched.
struct Launch {
  cudaLaunchAttribute attributes[2] = {};
  cudaLaunchConfig_t config = {};

  Launch(dim3 grid, int threads, int64_t shared, cudaStream_t stream) {
    config.gridDim = grid;
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.dynamicSmemBytes = static_cast<size_t>(shared);
    config.stream = stream;
    config.attrs = attributes;
  }
  Launch(const Launch&) = delete;  // config points to attributes

  // From sm_90 on the kernel may start while the one before it ends: it must call wait_for_previous_kernel() before it
  // touches memory.
  void programmatic() {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  void clusters(int blocks) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {static_cast<unsigned>(blocks), 1, 1};
  }

  template <typename... Parameters, typename... Arguments>
  Status operator()(void (*kernel)(Parameters...), const Arguments&... arguments) const {
    const cudaError_t error = cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...);
    return error == cudaSuccess ? Status::kOk : Status::kCudaError;
  }
};

template <typename... Parameters, typename... Arguments>
Status launch(void (*kernel)(Parameters...), dim3 grid, int threads, int64_t shared, bool programmatic,
              cudaStream_t stream, const Arguments&... arguments) {
  Launch how(grid, threads, shared, stream);
  if (programmatic) how.programmatic();
  return how(kernel, arguments...);
}

template <typename F>
Status with_dtype(DType dtype, F&& f) {
  if (dtype == DType::kFloat32) return f(float{});
  return dtype == DType::kFloat16 ? f(fp16{}) : f(bf16{});
}

inline cudaStream_t cuda_stream(const Stream& stream) { return static_cast<cudaStream_t>(stream.handle); }

inline Status launch_status() { return cudaGetLastError() == cudaSuccess ? Status::kOk : Status::kCudaError; }

}  // namespace fuselm
