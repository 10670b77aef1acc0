// The gradient of a head's weight, a block of rows at a time: dweight += dlogits^T @ hidden, summed in 16 bits.
// Contract: linear_cross_entropy.py; who calls it: torch_ops/weight_sum.py and jax_ops/weight_sum.py.
//
// A sum that is rounded to bf16 after each of 16 blocks has three times the error of one rounding, and 1.4 times that
// of the gradient as a whole; fp32 would be another 2 GiB for a vocabulary of 128k. So while there is more to come the
// sum is fp16, three bits finer, in dweight's own memory, and every 64 numbers of a row share a power of two, chosen
// anew for each block: rows of rare words, whose gradients are below what fp16 holds, keep their digits. The last block
// leaves bf16. After 16 blocks that is 1.06 times one rounding, after 64 1.2 times.
//
// A matmul for Hopper. A block of the grid makes 128 words x 256 columns: a thread of its first warpgroup asks the copy
// engine for the operands, the two others multiply 64 words each. Both operands have the words and columns next to each
// other and not the rows they are summed over, which the tensor cores read as they are. Two blocks of neighbouring
// words are a cluster and fetch half of hidden's tile each, for both. The sums so far come to shared memory while the
// tile is multiplied, are added in registers, and leave from where they came while the next tile is multiplied.
//
// Floors, at 1024 rows of 4096 x 128256 on an H200: 2.4 GB to move, 0.6 ms; 1.08 TFLOP, 1.6 ms at what cuBLAS gets.
#include <cuda.h>

#include "common.cuh"

namespace fuselm {
namespace {

constexpr int kWords = 128, kColumns = 256, kDepth = 64;  // of a tile; kDepth rows are multiplied at a time
constexpr int kStages = 3;
constexpr int kGroups = 2;  // warpgroups that multiply
constexpr int kGroupThreads = 128, kThreads = (kGroups + 1) * kGroupThreads;
constexpr int kBox = 64;  // columns of 16 bits that the copy engine brings as one: 128 bytes, swizzled
constexpr int kBoxBytes = kBox * kBox * 2;
constexpr int kPair = 2;  // blocks of a cluster

struct Tiles {
  uint8_t words[kStages][kWords / kBox][kBoxBytes];
  uint8_t columns[kStages][kColumns / kBox][kBoxBytes];
  uint8_t sums[kGroups][kColumns / kBox][kBoxBytes];
  uint64_t full[kStages], empty[kStages];  // of the operands
  uint64_t come[kGroups], made[kGroups];   // of the sums
};
constexpr int kAlignment = 1024;  // of what is swizzled

struct Args {
  CUtensorMap dlogits, hidden, dweight;
  int8_t* exponents;        // [tile of columns][word][thread of four]
  int64_t exponents_apart;  // those of one tile from those of the next
  int words, steps, tiles, tiles_across;
  bool first, last;
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
constexpr int kWordsOfGroup = kWords / kGroups;
// The largest of 64 numbers is below 2^(kTop + 1) once multiplied; the powers of two, and their inverses, are normal.
constexpr int kTop = 14, kLeastExponent = -111, kMostExponent = 127;

// ---- what the hardware is asked ----

__device__ inline void arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// At the barrier of block `rank` of the cluster. What is released was only read, so nothing has to be made visible.
__device__ inline void arrive_at(uint64_t* barrier, uint32_t rank) {
  asm volatile(
      "{ .reg .b32 far; mapa.shared::cluster.u32 far, %0, %1;\n mbarrier.arrive.shared::cluster.b64 _, [far]; }" ::"r"(
          shared_address(barrier)),
      "r"(rank)
      : "memory");
}

// A box of a matrix, from column x and row y on, to shared memory; kBoth: of both blocks of the cluster.
template <bool kBoth>
__device__ inline void load_box(uint8_t* to, const CUtensorMap& map, int x, int y, uint64_t* barrier) {
  if constexpr (kBoth) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared_address(to)),
        "l"(&map), "r"(x), "r"(y), "r"(shared_address(barrier)), "h"(static_cast<uint16_t>((1 << kPair) - 1))
        : "memory");
  } else {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
            shared_address(to)),
        "l"(&map), "r"(x), "r"(y), "r"(shared_address(barrier))
        : "memory");
  }
}

__device__ inline void store_box(const CUtensorMap& map, int x, int y, const uint8_t* from) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&map), "r"(x),
               "r"(y), "r"(shared_address(from))
               : "memory");
}

__device__ inline void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// How the tensor cores find an operand: swizzled by 128 bytes, boxes kBoxBytes apart, eight rows of one 1024 bytes.
__device__ inline uint64_t described(const uint8_t* operand) {
  return (shared_address(operand) & 0x3ffff) >> 4 | uint64_t{kBoxBytes >> 4} << 16 | uint64_t{1024 >> 4} << 32 |
         uint64_t{1} << 62;
}

// sums (+)= 64 words x 256 columns of 16 rows, begun here; both operands are transposed as they are read.
#define FUSELM_4(i) "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3])
#define FUSELM_32(i)                                                                                   \
  FUSELM_4(i), FUSELM_4(i + 4), FUSELM_4(i + 8), FUSELM_4(i + 12), FUSELM_4(i + 16), FUSELM_4(i + 20), \
      FUSELM_4(i + 24), FUSELM_4(i + 28)
__device__ inline void multiply(float (&sums)[128], uint64_t words, uint64_t columns, bool add) {
  asm volatile(
      "{ .reg .pred p;\n setp.ne.b32 p, %130, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
      "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
      "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "
      "%128, %129, p, 1, 1, 1, 1; }"
      : FUSELM_32(0), FUSELM_32(32), FUSELM_32(64), FUSELM_32(96)
      : "l"(words), "l"(columns), "r"(static_cast<int>(add)));
}
#undef FUSELM_4
#undef FUSELM_32

template <int kPending>
__device__ inline void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// ---- who does what ----

// Which tile a block has: two neighbours in words are a cluster's, those with the same words follow one another.
struct Tile {
  int word, column, across;
  __device__ Tile(const Args& a, int index, uint32_t rank)
      : word((index / a.tiles_across * kPair + static_cast<int>(rank)) * kWords),
        column(index % a.tiles_across * kColumns),
        across(index % a.tiles_across) {}
};

// One thread: the operands, a stage after another.
__device__ inline void fetch_operands(const Args& a, Tiles& tiles, uint32_t rank, int first, int step) {
  constexpr int kShare = kColumns / kBox / kPair;  // boxes of hidden that this block fetches for both
  int stage = 0, parity = 1;
  for (int index = first; index < a.tiles; index += step) {
    const Tile tile(a, index, rank);
    for (int k = 0; k < a.steps; ++k) {
      wait_for_bytes(&tiles.empty[stage], parity);
      expect_bytes(&tiles.full[stage], (kWords + kColumns) / kBox * kBoxBytes);
      for (int box = 0; box < kWords / kBox; ++box) {
        load_box<false>(tiles.words[stage][box], a.dlogits, tile.word + box * kBox, k * kDepth, &tiles.full[stage]);
      }
      for (int i = 0; i < kShare; ++i) {
        const int box = static_cast<int>(rank) * kShare + i;
        load_box<true>(tiles.columns[stage][box], a.hidden, tile.column + box * kBox, k * kDepth, &tiles.full[stage]);
      }
      if (++stage == kStages) stage = 0, parity ^= 1;
    }
  }
}

// One thread for each group that multiplies: its sums so far come, and leave when they are made.
__device__ inline void carry_sums(const Args& a, Tiles& tiles, uint32_t rank, int group, int first, int step) {
  int parity = 0;
  for (int index = first; index < a.tiles; index += step, parity ^= 1) {
    const Tile tile(a, index, rank);
    const int word = tile.word + group * kWordsOfGroup;
    if (a.first) {
      arrive(&tiles.come[group]);
    } else {
      expect_bytes(&tiles.come[group], sizeof(tiles.sums[group]));
      for (int box = 0; box < kColumns / kBox; ++box) {
        load_box<false>(tiles.sums[group][box], a.dweight, tile.column + box * kBox, word, &tiles.come[group]);
      }
    }
    wait_for_bytes(&tiles.made[group], parity);
    for (int box = 0; box < kColumns / kBox; ++box) {
      store_box(a.dweight, tile.column + box * kBox, word, tiles.sums[group][box]);
    }
    commit_stores();
    wait_for_stores<0>();
  }
}

// A thread's sums, as the tensor cores leave them: of words `row` and `row + 8` of its group's 64, columns 8 * j + 2 *
// (lane % 4) and the next one, in sums[4 * j] on. Four squares of 8 x 8 move at a time between them and shared memory:
// columns 8 * j and 8 * (j + 1) on, j even, each of both halves of the warp's 16 words, of which a lane names one row.
struct Fragment {
  uint32_t at;

  // The swizzle gives the rows of a square different banks.
  __device__ Fragment(const uint8_t* group_sums, int warp, int lane)
      : at(shared_address(group_sums) + (warp * 16 + lane % 16) * kBox * 2 + ((lane / 16 ^ lane % 8) << 4)) {}
  __device__ uint32_t squares(int j) const { return (at ^ j % 8 << 4) + j / 8 * kBoxBytes; }
  __device__ void load(int j, uint32_t (&pairs)[4]) const {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(pairs[0]), "=r"(pairs[1]), "=r"(pairs[2]), "=r"(pairs[3])
                 : "r"(squares(j))
                 : "memory");
  }
  __device__ void store(int j, const uint32_t (&pairs)[4]) const {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(squares(j)), "r"(pairs[0]),
                 "r"(pairs[1]), "r"(pairs[2]), "r"(pairs[3])
                 : "memory");
  }
};

__device__ inline float power(int exponent) { return __uint_as_float(static_cast<uint32_t>(127 + exponent) << 23); }

// Adds what was there before: fp16, a power of two for each word.
__device__ inline void add_before(float (&sums)[128], const Fragment& fragment, const int (&exponents)[2]) {
  const float units[2] = {power(exponents[0] - kTop), power(exponents[1] - kTop)};
#pragma unroll
  for (int j = 0; j < kColumns / 8; j += 2) {
    uint32_t pairs[4];
    fragment.load(j, pairs);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float low, high;
      unpack_pair(pairs[i], low, high, fp16{});
      float* const own = &sums[4 * j + 2 * i];
      own[0] = fmaf(low, units[i % 2], own[0]), own[1] = fmaf(high, units[i % 2], own[1]);
    }
  }
}

// The exponent of the largest of a word's 64 sums. (An infinity among them takes the small ones' digits.)
__device__ inline int exponent_of(const float (&sums)[128], int which) {
  float most = 0.0f;
#pragma unroll
  for (int j = 0; j < kColumns / 8; ++j) {
    most = fmaxf(most, fmaxf(fabsf(sums[4 * j + 2 * which]), fabsf(sums[4 * j + 2 * which + 1])));
  }
  const int exponent = static_cast<int>(__float_as_uint(most) >> 23) - 127;
  return min(max(exponent, kLeastExponent), kMostExponent);
}

// Leaves the sums of both words in 16 bits, each word's multiplied by a power of two.
template <typename X>
__device__ inline void leave_sums(const float (&sums)[128], const Fragment& fragment, const int (&shifts)[2]) {
  const float scales[2] = {power(shifts[0]), power(shifts[1])};
#pragma unroll
  for (int j = 0; j < kColumns / 8; j += 2) {
    uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* const own = &sums[4 * j + 2 * i];
      pairs[i] = packed_pair(own[0] * scales[i % 2], own[1] * scales[i % 2], X{});
    }
    fragment.store(j, pairs);
  }
}

__device__ inline void multiply_tiles(const Args& a, Tiles& tiles, uint32_t rank, int group, int first, int step) {
  const int thread = threadIdx.x % kGroupThreads, lane = thread % kWarp;
  const int row = thread / kWarp * 16 + lane / 4;
  const Fragment fragment(tiles.sums[group][0], thread / kWarp, lane);
  // One arrival of a group at each block of the cluster: what both have read both may overwrite.
  auto release = [&](int stage) {
    if (thread < kPair) arrive_at(&tiles.empty[stage], thread);
  };
  int stage = 0, parity = 0, sums_parity = 0;
  float sums[128];
  for (int index = first; index < a.tiles; index += step, sums_parity ^= 1) {
    const Tile tile(a, index, rank);
    const int word = tile.word + group * kWordsOfGroup + row;
    int8_t* const exponents = a.exponents + tile.across * a.exponents_apart + static_cast<int64_t>(word) * 4 + lane % 4;
    int before[2] = {};
#pragma unroll
    for (int which = 0; which < 2; ++which) {  // asked for before they are needed
      if (!a.first && word + 8 * which < a.words) before[which] = exponents[which * 8 * 4];
    }
    int previous = 0;
    for (int k = 0; k < a.steps; ++k) {
      wait_for_bytes(&tiles.full[stage], parity);
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
      const uint64_t words = described(tiles.words[stage][group]), columns = described(tiles.columns[stage][0]);
#pragma unroll
      for (int i = 0; i < kDepth / 16; ++i) {
        constexpr int kRows = 16 * kBox * 2 >> 4;  // how far 16 rows are, in a description
        multiply(sums, words + i * kRows, columns + i * kRows, k > 0 || i > 0);
      }
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      if (k > 0) {  // the products before these are done, while these are made
        wait_for_products<1>();
        release(previous);
      }
      previous = stage;
      if (++stage == kStages) stage = 0, parity ^= 1;
    }
    wait_for_products<0>();
    release(previous);
    wait_for_bytes(&tiles.come[group], sums_parity);
    if (!a.first) add_before(sums, fragment, before);
    if (a.last) {
      leave_sums<bf16>(sums, fragment, {0, 0});
    } else {
      const int found[2] = {exponent_of(sums, 0), exponent_of(sums, 1)};
      leave_sums<fp16>(sums, fragment, {kTop - found[0], kTop - found[1]});
#pragma unroll
      for (int which = 0; which < 2; ++which) {
        if (word + 8 * which < a.words) exponents[which * 8 * 4] = static_cast<int8_t>(found[which]);
      }
    }
    fence_copies();
    arrive(&tiles.made[group]);
  }
}
#endif

__global__ void __launch_bounds__(kThreads, 1) linear_cross_entropy_dweight_kernel(const __grid_constant__ Args a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ uint8_t tile_bytes[];
  Tiles& tiles =
      *reinterpret_cast<Tiles*>((reinterpret_cast<uintptr_t>(tile_bytes) + kAlignment - 1) / kAlignment * kAlignment);
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) init_barrier(&tiles.full[i]), init_barrier(&tiles.empty[i], kPair * kGroups);
    for (int i = 0; i < kGroups; ++i) init_barrier(&tiles.come[i]), init_barrier(&tiles.made[i], kGroupThreads);
  }
  __syncthreads();
  cluster_barrier();
  const int first = static_cast<int>(blockIdx.x) / kPair, step = static_cast<int>(gridDim.x) / kPair;
  const int group = threadIdx.x / kGroupThreads;
  if (group == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    const int warp = threadIdx.x / kWarp;
    if (threadIdx.x % kWarp == 0 && warp == 0) fetch_operands(a, tiles, rank, first, step);
    if (threadIdx.x % kWarp == 0 && warp >= 1 && warp <= kGroups) carry_sums(a, tiles, rank, warp - 1, first, step);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    multiply_tiles(a, tiles, rank, group - 1, first, step);
  }
  cluster_barrier();  // nobody leaves while the other may still send to it
#else
  __trap();  // the launcher refuses to come here
#endif
}

// ---- the host ----

// Of the driver, which is not linked against.
using MapEncoder = decltype(&cuTensorMapEncodeTiled);

MapEncoder map_encoder() {
  static const MapEncoder encoder = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result = {};
    constexpr char kName[] = "cuTensorMapEncodeTiled";
#if CUDART_VERSION >= 12050
    const cudaError_t error = cudaGetDriverEntryPointByVersion(kName, &found, 12000, cudaEnableDefault, &result);
#else
    const cudaError_t error = cudaGetDriverEntryPoint(kName, &found, cudaEnableDefault, &result);
#endif
    if (error != cudaSuccess) cudaGetLastError(), found = nullptr;
    return reinterpret_cast<MapEncoder>(found);
  }();
  return encoder;
}

// Whether the kernel was compiled for sm_90a: for anything else it is empty, and has few registers.
bool has_tensor_code() {
  static const bool has = [] {
    cudaFuncAttributes found = {};
    const cudaError_t error = cudaFuncGetAttributes(&found, linear_cross_entropy_dweight_kernel);
    return error == cudaSuccess ? found.numRegs > 128 : (cudaGetLastError(), false);
  }();
  return has;
}

bool is_matrix(const TensorView& m, int64_t rows, int64_t columns) {
  return m.rank == 2 && m.sizes[0] == rows && m.sizes[1] == columns && m.strides[1] == 1 && m.strides[0] % 8 == 0 &&
         m.strides[0] >= columns && reinterpret_cast<uintptr_t>(m.data) % 16 == 0;
}

bool describe_matrix(const TensorView& m, CUtensorMap& map) {
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(m.sizes[1]), static_cast<cuuint64_t>(m.sizes[0])};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(m.strides[0]) * 2};
  const cuuint32_t box[2] = {kBox, kBox}, steps[2] = {1, 1};
  const auto encode = map_encoder();
  return encode != nullptr &&
         encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, m.data, sizes, strides, box, steps,
                CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace

Status linear_cross_entropy_dweight(const Input& dlogits, const Input& hidden, const InOut& dweight,
                                    const InOut& exponents, bool first, bool last, Stream stream) {
  for (const DType dtype : {dlogits.dtype, hidden.dtype, dweight.dtype}) {
    if (dtype != DType::kBFloat16) return Status::kBadDtype;
  }
  if (exponents.dtype != DType::kInt32) return Status::kBadDtype;
  const int64_t rows = dlogits.sizes[0], words = dlogits.sizes[1], width = hidden.sizes[1];
  const int64_t across = divide_up(width, kColumns);
  const bool fit =
      is_matrix(dlogits, rows, words) && is_matrix(hidden, rows, width) && is_matrix(dweight, words, width);
  const bool scales = exponents.rank == 2 && exponents.sizes[0] == across && exponents.sizes[1] == words &&
                      exponents.strides[1] == 1 && (across == 1 || exponents.strides[0] >= words);
  if (!fit || !scales || rows < 1 || words < 1 || width < 1 || rows > INT32_MAX - kDepth) return Status::kBadShape;
  const int64_t tiles = across * divide_up(words, kPair * kWords);
  if (tiles > INT32_MAX / 2 || words > INT32_MAX / 2 || width > INT32_MAX / 2) return Status::kBadShape;
  const DeviceGuard guard(stream.device);
  if (!guard.ok()) return Status::kBadDevice;
  const DeviceFacts& facts = device_facts(guard.device());
  static std::atomic<bool> allowed[kMaxDevices];
  constexpr int kBytes = sizeof(Tiles) + kAlignment;
  if (facts.capability != 90 || !has_tensor_code()) return Status::kBadDevice;
  if (!allow_shared(linear_cross_entropy_dweight_kernel, guard.device(), kBytes, allowed)) return Status::kBadDevice;
  Args a = {};
  if (!describe_matrix(dlogits, a.dlogits) || !describe_matrix(hidden, a.hidden) ||
      !describe_matrix(dweight, a.dweight)) {
    return Status::kCudaError;
  }
  a.exponents = static_cast<int8_t*>(exponents.data), a.exponents_apart = exponents.strides[0] * 4;
  a.words = static_cast<int>(words), a.steps = static_cast<int>(divide_up(rows, kDepth));
  a.tiles = static_cast<int>(tiles), a.tiles_across = static_cast<int>(across);
  a.first = first, a.last = last;
  const int64_t blocks = kPair * at_most(tiles, facts.multiprocessors / kPair);
  Launch how(dim3(static_cast<unsigned>(blocks)), kThreads, kBytes, cuda_stream(stream));
  how.clusters(kPair);
  return how(linear_cross_entropy_dweight_kernel, a);
}

}  // namespace fuselm
