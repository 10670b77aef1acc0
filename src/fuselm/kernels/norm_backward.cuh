// The norm family, backward: RMSNorm and, with kCentred, LayerNorm. Contracts: rms_norm.py, layer_norm.py; forward, and
// how threads own rows: norm_forward.cuh; launchers: rms_norm_backward.cu, layer_norm_backward.cu.
//
// Traffic. dy and h are read once and dx is written once: rows come to shared memory ahead of use, and the gradients of
// weight and bias are summed in registers over all rows a block sees; each block leaves one partial row of each, and a
// second kernel adds the partial rows in a fixed order. No atomics.
//
// Threads. As in forward. A row too wide for one block is shared by a cluster of them, a part each; the parts' sums
// meet in shared memory. Odd widths come in bundles of rows. What is left (odd strides, expanded tensors, odd widths
// that are wide or have a residual, wide rows before sm_90) takes the *_any kernels: slower, same order of sums.
#pragma once
#include "parts.cuh"

namespace fuselm {
namespace norm {

// Each is the fastest of a sweep on an H200, docs/log.md. Few blocks leave few partial rows to add up; at 1024 and
// below many small ones wait less for each other.
template <typename... Wider>
using UpTo = ConfigList<Config<8, 1, 256, 4>, Config<16, 1, 256, 4>, Config<32, 1, 256, 4>, Config<32, 2, 256, 2>,
                        Config<32, 3, 128, 4>, Config<64, 2, 256, 2>, Config<128, 2, 512, 1>, Config<256, 2, 512, 1>,
                        Config<512, 2, 512, 1>, Wider...>;
// LayerNorm sums up two gradients and has registers for 16 elements a thread, RMSNorm for 32. Wider rows come in parts.
template <bool kCentred, typename X>
using BackwardConfigs = std::conditional_t<
    sizeof(X) == 4,
    std::conditional_t<kCentred, UpTo<Config<512, 4, 512, 1>>, UpTo<Config<512, 4, 512, 1>, Config<512, 8, 512, 1>>>,
    std::conditional_t<kCentred, UpTo<>, UpTo<Config<512, 4, 512, 1>>>>;

constexpr int kMaxStages = 3, kMaxPartStages = 6;
constexpr int64_t kStageLimit = 130 << 10;  // bytes a block has under way: with more 8192x16384 is 3 % slower
constexpr int kMostBlocks = 4;              // of the configurations above
constexpr int64_t kBundleBytes = 48 << 10;  // of rows of odd width that a multiprocessor takes a round
constexpr int kColumnThreads = 128;
constexpr int kColumnBlocks = 16;  // of kColumnThreads, wanted on a multiprocessor

// What a row too wide for one block is cut into, one part for each block of a cluster: two small blocks of a
// multiprocessor, since one works while the other waits for its cluster, or larger ones where a cluster cannot have as
// many.
template <typename X>
using PartConfigs = ConfigList<Config<256, 32 / kVec<X>, 256, 2>, Config<512, 32 / kVec<X>, 512, 1>>;

struct BackwardArgs {
  Rows dy, h, weight_rows, dresidual_out;
  const char* weight;
  DType weight_dtype;
  char *dx, *dresidual;  // contiguous; dresidual is null when it would be dx again
  const float *mean, *rstd;
  // Per block one row of `partial_stride` floats for the weight and, in LayerNorm, after all of those one for the bias;
  // null when neither gradient is wanted.
  float *partial, *partial_bias;
  int64_t partial_stride;
  int64_t rows;
  int32_t width;
  float inverse_width, offset;
  int bundle;        // rows a block takes a round where they are bundles
  int stages;        // rounds of rows a block has under way in shared memory
  int parts;         // of a row: a power of two
  int part_vectors;  // of all parts but the last, which may have fewer
  bool large;        // dy, h and dx together are larger than L2
};

// Where the rows of one round are in shared memory: those of dy, then of h, then of the sum's gradient.
template <typename X, typename H, typename C>
struct Stage {
  static constexpr int kH = kVec<X> * sizeof(H);
  char* base;
  int skip, vectors;  // of each row

  __host__ __device__ static int bytes(int vectors, bool with_residual) {
    return C::kGroups * vectors * (16 + kH + (with_residual ? kH : 0));
  }
  __device__ char* dy(int group) const { return base + group * vectors * 16; }
  __device__ char* h(int group) const { return base + C::kGroups * vectors * 16 + group * vectors * kH; }
  __device__ char* r(int group) const { return h(group) + C::kGroups * vectors * kH; }

  // Asks for the kGroups rows from `first` on.
  __device__ void fetch(const BackwardArgs& a, int64_t first, uint64_t* arrived) const {
    if (!fetches()) return;
    const int here = a.rows - first < C::kGroups ? static_cast<int>(a.rows - first) : C::kGroups;
    const bool with_residual = a.dresidual_out.present();
    expect_bytes(arrived, here * vectors * (16 + kH + (with_residual ? kH : 0)));
    const uint64_t policy = read_policy(a.large);
    fetch_rows<C, 16>(a.dy, first, here, skip, vectors, dy(0), arrived, policy);
    fetch_rows<C, kH>(a.h, first, here, skip, vectors, h(0), arrived, policy);
    if (with_residual) fetch_rows<C, kH>(a.dresidual_out, first, here, skip, vectors, r(0), arrived, policy);
  }
};

// Waits for the oldest of the rounds under way.
__device__ inline void wait_for_round(const BackwardArgs& a, uint64_t* arrived, int parity) {
  if (kCopyEngine) {
    wait_for_bytes(arrived, parity);
  } else if (a.stages == 3) {
    copy_async_wait<2>();
  } else if (a.stages == 2) {
    copy_async_wait<1>();
  } else {
    copy_async_wait<0>();
  }
}

// Whether LayerNorm takes the mean away after multiplying, four instructions an element less: in parts of rows of 16
// bits. That costs digits where a row lies far from 0: beyond 1024 standard deviations, where 16 bits leave it hardly
// two different numbers, its differences from the mean take the place of h, rounded as h is.
template <bool kCentred, typename H>
constexpr bool kLateMean = kCentred && sizeof(H) == 2;

// What of the mean is taken away when: from h itself, or after multiplying.
struct Centre {
  float first, late;

  __device__ Centre(float mean, float rstd) : first(0.0f), late(mean) {
    if (!(fabsf(mean) * rstd <= 1024.0f)) first = mean, late = 0.0f;
  }
};

template <typename X>
__device__ inline uint4 centred(const uint4& raw, float mean) {
  float h[kVec<X>];
  unpack<X>(raw, h);
#pragma unroll
  for (float& one : h) one -= mean;
  return packed<X>(h);
}

// The sums over a row that dx needs: of dy * w * h and, in LayerNorm, where h is h - mean, of dy * w.
template <bool kCentred>
struct Sums {
  static constexpr int kCount = kCentred ? 2 : 1;
  float value[kCount] = {};

  // `mean` is 0 where it is late. A vector's own sums first, then added: whether a lane has one vector or several.
  template <int N>
  __device__ void add(const float (&dy)[N], const float (&h)[N], const float (&weight)[N], float mean) {
    float own[kCount] = {};
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float g = __fmul_rn(dy[i], weight[i]);
      own[0] = fmaf(g, kCentred ? h[i] - mean : h[i], own[0]);
      if constexpr (kCentred) own[1] += g;
    }
#pragma unroll
    for (int k = 0; k < kCount; ++k) value[k] += own[k];
  }
};

// A row's own numbers in the formula of dx.
template <bool kCentred>
struct Slope {
  float mean, rstd, slope, level = 0.0f;
  float shift, steep, sunk;  // where the mean is late

  // Products are numbers of their own (__fmul_rn), never part of another instruction: the same bits in all kernels.
  __device__ Slope(const Sums<kCentred>& sums, float mean_, float rstd_, float inverse_width, bool late)
      : mean(mean_), rstd(rstd_) {
    float sum = sums.value[0];
    if constexpr (kCentred) {
      if (late) sum = fmaf(-mean, sums.value[1], sum);
      level = __fmul_rn(sums.value[1], inverse_width);
    }
    slope = __fmul_rn(__fmul_rn(sum, inverse_width), rstd);
    if constexpr (!kCentred) slope = __fmul_rn(slope, __fmul_rn(rstd, rstd));
    shift = __fmul_rn(-mean, rstd), steep = __fmul_rn(slope, rstd), sunk = __fmul_rn(-level, rstd);
  }
};

// dx, and dw and db into this thread's sums, for one vector. With s = mean(dy * w * xhat) the docstring's formula is
// dy * rstd * w - h * (rstd^2 * s) + dh: two roundings before the last.
// LayerNorm has h - mean for h, and takes `level`, the mean of dy * w, away from dy * w first: where that is nearly all
// of it, what is left keeps its digits.
template <bool kLate, bool kCentred, int N>
__device__ inline void gradients(const float (&dy)[N], const float (&h)[N], const float (&weight)[N],
                                 const Slope<kCentred>& row, float (&dx)[N], float (&dw)[N], float (&db)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if constexpr (kCentred && kLate) {
      const float xhat = fmaf(h[i], row.rstd, row.shift);
      dw[i] = fmaf(dy[i], xhat, dw[i]);
      db[i] += dy[i];
      dx[i] = fmaf(-xhat, row.steep, fmaf(__fmul_rn(dy[i], weight[i]), row.rstd, row.sunk));
    } else if constexpr (kCentred) {
      const float xhat = (h[i] - row.mean) * row.rstd;
      dw[i] = fmaf(dy[i], xhat, dw[i]);
      db[i] += dy[i];
      dx[i] = __fmul_rn(row.rstd, fmaf(-xhat, row.slope, __fmul_rn(dy[i], weight[i]) - row.level));
    } else {
      const float scaled = dy[i] * row.rstd;
      dw[i] = fmaf(scaled, h[i], dw[i]);
      dx[i] = fmaf(scaled, weight[i], -(h[i] * row.slope));
    }
  }
}

template <int N>
__device__ inline void add(const float (&from)[N], float (&to)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) to[i] += from[i];
}

// Leaves this block's share of dw in `out`, its partial row. `put` writes a group's share to where it is told; groups
// of the block meet in shared memory, in order.
template <typename C, typename Put>
__device__ inline void store_partial(const BackwardArgs& a, float* out, int group, float* shared, const Put& put) {
  if constexpr (C::kGroups == 1) {
    put(out);
    return;
  }
  const int width = static_cast<int>(a.partial_stride);
  __syncthreads();  // the rows' memory is about to be used for something else
  put(shared + group * width);
  __syncthreads();
#pragma unroll 1
  for (int column = threadIdx.x * 4; column < a.width; column += C::kThreads * 4) {
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int g = 0; g < C::kGroups; ++g) {
      const float4 share = *reinterpret_cast<const float4*>(shared + g * width + column);
      sum.x += share.x, sum.y += share.y, sum.z += share.z, sum.w += share.w;
    }
    *reinterpret_cast<float4*>(out + column) = sum;
  }
}

// Writes the N sums of a lane's vector `at`, of `vectors`; those of vector 0 belong at `to`. Memory takes 32 bytes at a
// time and a thread gives 16: on the way there (not to shared memory) neighbours exchange halves of their 8 sums, so
// that both give theirs to the same 32 bytes.
template <bool kToMemory, int N>
__device__ inline void store_sums(float* to, int at, int vectors, const float (&sums)[N]) {
  if constexpr (kToMemory && N == 8) {
    const bool odd = at & 1;
    float first[4], second[4];  // of the even neighbour's vector, of the odd one's
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float other = __shfl_xor_sync(0xffffffffu, odd ? sums[i] : sums[i + 4], 1);
      first[i] = odd ? other : sums[i], second[i] = odd ? sums[i + 4] : other;
    }
    if ((at | 1) < vectors) {
      float* const pair = to + (at & ~1) * N + (odd ? 4 : 0);
      store_floats<float>(pair, first), store_floats<float>(pair + N, second);
      return;
    }
  }
  if (at < vectors) store_floats<float>(to + at * N, sums);
}

// Leaves the sums of a lane's vectors, and of the other lanes of its block, in its partial row from `column` on.
template <typename C, int N>
__device__ inline void leave(const BackwardArgs& a, float* partial, int64_t row, int64_t column, int group, int lane,
                             int vectors, void* shared, const float (&sums)[C::kVecs][N]) {
  float* const out = partial + row * a.partial_stride + column;
  store_partial<C>(a, out, group, static_cast<float*>(shared), [&](float* to) {
#pragma unroll
    for (int v = 0; v < C::kVecs; ++v) {
      store_sums<C::kGroups == 1>(to, lane + v * C::kLanes, vectors, sums[v]);
    }
  });
}

// dx of one vector, with the gradient of the sum added where there is one, written to where it belongs.
template <typename X, typename H, int N>
__device__ inline void store_dx(const BackwardArgs& a, int64_t element, int at, const char* r_row, float (&dx)[N]) {
  constexpr int kH = N * sizeof(H);
  if (a.dresidual_out.present()) {
    float r[N];
    load_floats<H>(r_row + at * kH, r);
    add(r, dx);
  }
  store_floats<X>(a.dx + element * static_cast<int64_t>(sizeof(X)) + at * 16, dx);
  if (a.dresidual != nullptr) {
    store_floats<H>(a.dresidual + element * static_cast<int64_t>(sizeof(H)) + at * kH, dx);
  }
}

// A block takes kGroups rows a round, every gridDim.x-th round. What a thread reads for the row's sum it keeps for dx
// where there are registers (kKeep); else it reads shared memory twice.
template <bool kCentred, typename X, typename H, typename C>
__global__ void __launch_bounds__(C::kThreads, fitting_blocks(C::kThreads, C::kBlocks))
    norm_backward_kernel(const __grid_constant__ BackwardArgs a) {
  constexpr int N = kVec<X>;
  constexpr int kH = N * sizeof(H);
  constexpr bool kKeep = C::kVecs * N <= (kCentred ? 16 : 24);
  using RowSums = Sums<kCentred>;
  extern __shared__ __align__(128) uint4 stage_bytes[];
  __shared__ uint64_t arrived[kMaxStages];
  __shared__ float scratch[2][RowSums::kCount * C::kThreads / kWarp];
  const int group = threadIdx.x / C::kLanes;
  const int lane = threadIdx.x % C::kLanes;
  const int vectors = a.width / N;
  const int size = Stage<X, H, C>::bytes(vectors, a.dresidual_out.present());
  const int64_t step = static_cast<int64_t>(gridDim.x) * C::kGroups;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * C::kGroups;
  auto stage_at = [&](int s) { return Stage<X, H, C>{reinterpret_cast<char*>(stage_bytes) + s * size, 0, vectors}; };

  if (threadIdx.x < a.stages) init_barrier(&arrived[threadIdx.x]);
  __syncthreads();  // nobody asks a barrier before it is there
#pragma unroll 1
  for (int s = 0; s + 1 < a.stages; ++s) {
    if (first + s * step < a.rows) stage_at(s).fetch(a, first + s * step, &arrived[s]);
    copy_async_commit();
  }

  float weight[C::kVecs][N], dw[C::kVecs][N] = {}, db[kCentred ? C::kVecs : 1][N] = {};
  load_weights<X, C>(a.weight, a.weight_dtype, a.offset, lane, vectors, weight);

  float next_rstd = first + group < a.rows ? a.rstd[first + group] : 0.0f;
  float next_mean = kCentred && first + group < a.rows ? a.mean[first + group] : 0.0f;
  int s = 0, parity = 0, side = 0;
  const bool early = kKeep && !a.dresidual_out.present();
  // The bound is the block's, not the row's: every thread of the block makes the same number of rounds.
  for (int64_t round = first; round < a.rows; round += step) {
    // The stage of the last round is free once every thread has read it for the last time: where rows are kept that was
    // before they met in row_sum. (In the first round the stage is one that nobody has used.)
    if (!early || C::kLanes <= kWarp) __syncthreads();
    const int64_t ahead = round + (a.stages - 1) * step;
    const int free = s == 0 ? a.stages - 1 : s - 1;
    if (ahead < a.rows) stage_at(free).fetch(a, ahead, &arrived[free]);
    copy_async_commit();

    const Stage<X, H, C> stage = stage_at(s);
    const int64_t row = round + group;
    const int count = row < a.rows ? vectors : 0;
    const float rstd = next_rstd, mean = next_mean;
    next_rstd = row + step < a.rows ? a.rstd[row + step] : 0.0f;
    if (kCentred) next_mean = row + step < a.rows ? a.mean[row + step] : 0.0f;
    wait_for_round(a, &arrived[s], parity);

    Loaded<X, H, true> kept[kKeep ? C::kVecs : 1];  // dy, and h in the residual's place
    RowSums sums;
#pragma unroll
    for (int v = 0; v < C::kVecs; ++v) {
      const int at = lane + v * C::kLanes;
      Loaded<X, H, true>& loaded = kept[kKeep ? v : 0];
      loaded.load_if(at < count, stage.dy(group) + at * 16, stage.h(group) + at * kH);
      float dy[N], h[N];
      unpack<X>(loaded.x, dy);
      load_floats<H>(loaded.residual, h);
      sums.add(dy, h, weight[v], mean);
    }
    row_sums<C::kLanes>(sums.value, &scratch[side][RowSums::kCount * group * C::kLanes / kWarp]);
    const Slope<kCentred> slope(sums, mean, rstd, a.inverse_width, false);

#pragma unroll
    for (int v = 0; v < C::kVecs; ++v) {
      const int at = lane + v * C::kLanes;
      Loaded<X, H, true>& loaded = kept[kKeep ? v : 0];
      if (!kKeep) loaded.load_if(at < count, stage.dy(group) + at * 16, stage.h(group) + at * kH);
      float dy[N], h[N], dx[N];
      unpack<X>(loaded.x, dy);
      load_floats<H>(loaded.residual, h);
      gradients<false>(dy, h, weight[v], slope, dx, dw[v], db[kCentred ? v : 0]);
      if (at < count) store_dx<X, H>(a, row * a.width, at, stage.r(group), dx);
    }
    side ^= 1;
    if (++s == a.stages) s = 0, parity ^= 1;
  }
  copy_async_wait<0>();
  allow_next_kernel();
  if (a.partial == nullptr) return;
  leave<C>(a, a.partial, blockIdx.x, 0, group, lane, vectors, stage_bytes, dw);
  if constexpr (kCentred) leave<C>(a, a.partial_bias, blockIdx.x, 0, group, lane, vectors, stage_bytes, db);
}

// The weights of a lane's vectors in a part of a row; anything finite past the part's end. LayerNorm sums up two
// gradients, and has no registers for the weights in fp32: they wait as they came, where that is x's dtype, and come
// from L1 each time where it is not.
template <bool kCentred, typename X, typename C>
struct PartWeights {
  static constexpr int N = kVec<X>;
  float value[kCentred ? 1 : C::kVecs][N];
  uint4 raw[kCentred ? C::kVecs : 1];

  __device__ PartWeights(const BackwardArgs& a, int skip, int lane, int vectors) {
    if constexpr (!kCentred) {
      load_weights<X, C>(a.weight + skip * N * element_bytes(a.weight_dtype), a.weight_dtype, a.offset, lane, vectors,
                         value);
    } else {
      float ones[N];
#pragma unroll
      for (float& one : ones) one = 1.0f;
#pragma unroll
      for (int v = 0; v < C::kVecs; ++v) {
        const int at = lane + v * C::kLanes;
        raw[v] = packed<X>(ones);
        if (a.weight_dtype == kDType<X> && at < vectors) {
          raw[v] = __ldg(reinterpret_cast<const uint4*>(a.weight) + skip + at);
        }
      }
    }
  }
  __device__ void get(const BackwardArgs& a, int v, int index, float (&out)[N]) const {
    if constexpr (!kCentred) {
#pragma unroll
      for (int i = 0; i < N; ++i) out[i] = value[v][i];
    } else if (a.weight_dtype == kDType<X> || a.weight_dtype == DType::kAbsent) {
      unpack<X>(raw[v], out);
    } else {
      load_constant(a.weight, a.weight_dtype, index, out);
    }
  }
};

// Rows too wide for one block, from sm_90 on: a cluster takes a row a round, each of its blocks a part. What the parts
// find takes a microsecond to get around, so a block sends its sums of the next row before it waits for those of this
// one.
template <bool kCentred, typename X, typename H, typename C>
__global__ void __launch_bounds__(C::kThreads, fitting_blocks(C::kThreads, C::kBlocks))
    norm_backward_parts_kernel(const __grid_constant__ BackwardArgs a) {
  constexpr int N = kVec<X>;
  constexpr int kH = N * sizeof(H);
  constexpr bool kLate = kLateMean<kCentred, H>;
  using RowSums = Sums<kCentred>;
  extern __shared__ __align__(128) uint4 stage_bytes[];
  __shared__ uint64_t arrived[kMaxPartStages];
  __shared__ float scratch[2][RowSums::kCount * C::kThreads / kWarp];
  __shared__ Meeting<RowSums::kCount> meeting;
  keep_in_place(a);
  const int lane = threadIdx.x;
  const int rank = static_cast<int>(blockIdx.x) % a.parts;
  const int skip = rank * a.part_vectors;
  const int vectors = min(a.part_vectors, a.width / N - skip);
  const int size = Stage<X, H, C>::bytes(a.part_vectors, a.dresidual_out.present());
  const int64_t step = gridDim.x / a.parts, first = blockIdx.x / a.parts;
  auto stage_at = [&](int s) { return Stage<X, H, C>{reinterpret_cast<char*>(stage_bytes) + s * size, skip, vectors}; };
  auto fetch = [&](int64_t row, int s) {
    if (row < a.rows) stage_at(s).fetch(a, row, &arrived[s]);
  };

  if (threadIdx.x < a.stages) init_barrier(&arrived[threadIdx.x]);
  meeting.init();
  cluster_barrier();  // nobody asks a barrier, or sends to one, before it is there
#pragma unroll 1
  for (int s = 0; s < a.stages; ++s) fetch(first + s * step, s);

  float dw[C::kVecs][N] = {}, db[kCentred ? C::kVecs : 1][N] = {};
  const PartWeights<kCentred, X, C> weights(a, skip, lane, vectors);
  auto mean_of = [&](int64_t row) { return kCentred && row < a.rows ? a.mean[row] : 0.0f; };
  auto rstd_of = [&](int64_t row) { return row < a.rows ? a.rstd[row] : 0.0f; };
  // Waits for a round, adds up this block's part of its row and sends the sums to the others.
  auto begin = [&](int64_t round, int s, int parity, float mean) {
    wait_for_bytes(&arrived[s], parity);
    const Stage<X, H, C> stage = stage_at(s);
    if constexpr (kLate) {
      if (unlikely(mean != 0.0f)) {  // each thread's own vectors, for itself
#pragma unroll 1
        for (int at = lane; at < vectors; at += C::kLanes) {
          uint4* const own = reinterpret_cast<uint4*>(stage.h(0)) + at;
          *own = centred<X>(*own, mean);
        }
        fence_copies();
      }
    }
    RowSums sums;
#pragma unroll
    for (int v = 0; v < C::kVecs; ++v) {
      const int at = lane + v * C::kLanes;
      Loaded<X, H, true> loaded;
      loaded.load_if(at < vectors, stage.dy(0) + at * 16, stage.h(0) + at * kH);
      float dy[N], h[N], weight[N];
      unpack<X>(loaded.x, dy);
      load_floats<H>(loaded.residual, h);
      weights.get(a, v, skip + (at < vectors ? at : 0), weight);
      sums.add(dy, h, weight, kLate ? 0.0f : mean);
    }
    row_sums<C::kLanes>(sums.value, scratch[round % 2]);
    meeting.send_all(sums.value, a.parts, rank, round);
  };

  // What is taken from a row first is known a round before it is needed; mean and rstd are read again where they are
  // used, since there is no register in which they could wait.
  auto first_of = [](float mean, float rstd) { return kLate ? Centre(mean, rstd).first : mean; };
  float next_first = first_of(mean_of(first + step), rstd_of(first + step));
  int64_t row = first;
  int s = 0, parity = 0;
  if (row < a.rows) begin(0, s, parity, first_of(mean_of(first), rstd_of(first)));
  for (int64_t round = 0; row < a.rows; row += step, ++round) {
    const int next = s + 1 == a.stages ? 0 : s + 1;
    const int next_parity = next == 0 ? parity ^ 1 : parity;
    const float mean = mean_of(row), rstd = rstd_of(row);
    const float after_next_mean = mean_of(row + 2 * step), after_next_rstd = rstd_of(row + 2 * step);
    if (row + step < a.rows) begin(round + 1, next, next_parity, next_first);
    RowSums sums;
    meeting.sum_of_parts(sums.value, a.parts, round);
    const Slope<kCentred> slope(sums, kLate ? Centre(mean, rstd).late : mean, rstd, a.inverse_width, kLate);
    const Stage<X, H, C> stage = stage_at(s);
#pragma unroll
    for (int v = 0; v < C::kVecs; ++v) {
      const int at = lane + v * C::kLanes;
      Loaded<X, H, true> loaded;
      loaded.load_if(at < vectors, stage.dy(0) + at * 16, stage.h(0) + at * kH);
      float dy[N], h[N], weight[N], dx[N];
      unpack<X>(loaded.x, dy);
      load_floats<H>(loaded.residual, h);
      weights.get(a, v, skip + (at < vectors ? at : 0), weight);
      gradients<kLate>(dy, h, weight, slope, dx, dw[v], db[kCentred ? v : 0]);
      if (at < vectors) store_dx<X, H>(a, row * a.width + skip * N, at, stage.r(0), dx);
    }
    __syncthreads();  // every thread has read the stage for the last time
    fetch(row + a.stages * step, s);
    s = next, parity = next_parity;
    next_first = first_of(after_next_mean, after_next_rstd);
  }
  allow_next_kernel();
  cluster_barrier();  // a block's memory stays until nobody sends to it any more
  if (a.partial == nullptr) return;
  leave<C>(a, a.partial, first, skip * N, 0, lane, vectors, stage_bytes, dw);
  if constexpr (kCentred) leave<C>(a, a.partial_bias, first, skip * N, 0, lane, vectors, stage_bytes, db);
}

// The block that takes rows of odd width. Several of a multiprocessor work while others wait: as many as have registers
// for dw, db and the weight, and 48 more, or 32 where that makes two of one.
template <bool kCentred, typename X, typename C>
struct Bundle {
  static constexpr int kThreads = C::kLanes > 256 ? C::kLanes : 256;
  static constexpr int kRegisters = (kCentred ? 3 : 2) * C::kVecs * kVec<X> + (kThreads > 256 ? 32 : 48);
  static constexpr int kBlocks = static_cast<int>(at_most(65536 / (kRegisters * kThreads), kMostBlocks));
  using type = Config<C::kLanes, C::kVecs, kThreads, kBlocks>;
};

// Rows of odd width that follow one another: a bundle of them a round. dx takes the place of dy in shared memory.
template <bool kCentred, typename X, typename C>
__global__ void __launch_bounds__(C::kThreads, fitting_blocks(C::kThreads, C::kBlocks))
    norm_backward_bundle_kernel(const __grid_constant__ BackwardArgs a) {
  constexpr int N = kVec<X>;
  constexpr int kSpan = C::kLanes * N;
  extern __shared__ __align__(128) uint4 stage_bytes[];
  __shared__ uint64_t arrived[2];
  __shared__ float scratch[2][Sums<kCentred>::kCount * C::kThreads / kWarp];
  const int group = threadIdx.x / C::kLanes;
  const int lane = threadIdx.x % C::kLanes;
  const int row_bytes = a.width * static_cast<int>(sizeof(X));
  const int room = static_cast<int>(Run::room(a.bundle, row_bytes));
  const int64_t step = static_cast<int64_t>(gridDim.x) * a.bundle;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * a.bundle;
  const uint64_t policy = read_policy(a.large);
  auto stage_at = [&](int s) { return reinterpret_cast<char*>(stage_bytes) + s * 2 * room; };  // dy, then h
  auto rows_from = [&](int64_t row) { return a.rows - row < a.bundle ? static_cast<int>(a.rows - row) : a.bundle; };
  auto run_from = [&](int64_t row) { return Run(row, rows_from(row), row_bytes, a.rows); };
  auto fetch = [&](int64_t row, int s) {
    const Run run = run_from(row);
    if (threadIdx.x == 0) expect_bytes(&arrived[s], 2 * run.whole);
    fetch_run<X, C::kThreads>(a.dy.data, run, stage_at(s), &arrived[s], policy);
    fetch_run<X, C::kThreads>(a.h.data, run, stage_at(s) + room, &arrived[s], policy);
  };

  if (threadIdx.x < 2) init_barrier(&arrived[threadIdx.x]);
  __syncthreads();
  fetch(first, 0);
  copy_async_commit();
  float weight[C::kVecs][N], dw[C::kVecs][N] = {}, db[kCentred ? C::kVecs : 1][N] = {};
#pragma unroll
  for (int v = 0; v < C::kVecs; ++v) {
    load_weight_columns<C::kLanes>(a.weight, a.weight_dtype, a.offset, v * kSpan + lane, a.width, weight[v]);
  }

  int s = 0, parity = 0, side = 0;
  for (int64_t round = first; round < a.rows; round += step) {
    fence_copies();
    __syncthreads();  // the other stage, or the only one, has been written out
    const int64_t ahead = round + (a.stages - 1) * step;
    if (ahead > first && ahead < a.rows) fetch(ahead, a.stages == 1 ? 0 : s ^ 1);
    copy_async_commit();
    wait_for_round(a, &arrived[s], parity);
    if (a.stages == 1 || !kCopyEngine) __syncthreads();  // what other threads have brought is there
    const Run run = run_from(round);
    const int here = rows_from(round);
    // Every group makes the same number of turns: they meet in row_sum.
#pragma unroll 1
    for (int r = group; r < a.bundle; r += C::kGroups) {
      X* const dy_row = reinterpret_cast<X*>(stage_at(s) + run.lead) + r * a.width;
      const X* const h_row = reinterpret_cast<const X*>(stage_at(s) + room + run.lead) + r * a.width;
      const int width = r < here ? a.width : 0;
      const float rstd = r < here ? a.rstd[round + r] : 0.0f;
      const float mean = kCentred && r < here ? a.mean[round + r] : 0.0f;
      Sums<kCentred> sums;
#pragma unroll
      for (int v = 0; v < C::kVecs; ++v) {
        if (v * kSpan >= a.width) break;
        float dy[N], h[N];
        load_columns<C::kLanes>(dy_row, v * kSpan + lane, width, dy);
        load_columns<C::kLanes>(h_row, v * kSpan + lane, width, h);
        sums.add(dy, h, weight[v], mean);
      }
      row_sums<C::kLanes>(sums.value, &scratch[side][Sums<kCentred>::kCount * group * C::kLanes / kWarp]);
      side ^= 1;
      const Slope<kCentred> slope(sums, mean, rstd, a.inverse_width, false);
#pragma unroll
      for (int v = 0; v < C::kVecs; ++v) {
        if (v * kSpan >= a.width) break;
        float dy[N], h[N], dx[N];
        load_columns<C::kLanes>(dy_row, v * kSpan + lane, width, dy);
        load_columns<C::kLanes>(h_row, v * kSpan + lane, width, h);
        gradients<false>(dy, h, weight[v], slope, dx, dw[v], db[kCentred ? v : 0]);
        store_columns<C::kLanes>(dy_row, v * kSpan + lane, width, dx);
      }
    }
    __syncthreads();
    store_run<X, C::kThreads>(a.dx, run, stage_at(s));
    s = a.stages == 1 ? 0 : s ^ 1;
    if (s == 0) parity ^= 1;
  }
  allow_next_kernel();
  if (a.partial == nullptr) return;
  auto leave = [&](float* partial, const float (&sums)[C::kVecs][N]) {
    float* out = partial + blockIdx.x * a.partial_stride;
    store_partial<C>(a, out, group, reinterpret_cast<float*>(stage_bytes), [&](float* to) {
#pragma unroll
      for (int v = 0; v < C::kVecs; ++v) store_columns<C::kLanes>(to, v * kSpan + lane, a.width, sums[v]);
    });
  };
  leave(a.partial, dw);
  if constexpr (kCentred) leave(a.partial_bias, db);
}

// dx for any strides, alignment and dtypes: elements one by one, read twice.
template <bool kCentred, typename X, int kLanes>
__global__ void __launch_bounds__(any_threads(kLanes), 1024 / any_threads(kLanes))
    norm_backward_any_kernel(const __grid_constant__ BackwardArgs a) {
  constexpr int N = kVec<X>;
  constexpr int kCount = Sums<kCentred>::kCount;
  __shared__ float scratch[2][kCount * any_threads(kLanes) / kWarp];
  const int group = threadIdx.x / kLanes;
  const int lane = threadIdx.x % kLanes;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * (any_threads(kLanes) / kLanes) + group;
  const int width = index < a.rows ? a.width : 0;
  const int64_t row = index < a.rows ? index : 0;
  const char* dy_row = a.dy.any_row(row);
  const char* h_row = a.h.any_row(row);
  const char* r_row = a.dresidual_out.any_row(row);
  const float rstd = a.rstd[row], mean = kCentred ? a.mean[row] : 0.0f;
  const DType h_dtype = a.h.dtype;
  const bool late = kCentred && a.parts > 1 && h_dtype != DType::kFloat32;
  const Centre centre(mean, rstd);
  auto load_h = [&](const Span& span, float (&h)[N]) {
    load_elements(h_row, h_dtype, a.h.column_stride, span, h);
#pragma unroll
    for (int i = 0; late && centre.first != 0.0f && i < N; ++i) h[i] = round_to(h_dtype, h[i] - centre.first);
  };

  Sums<kCentred> whole;
  for (int part = 0; part < a.parts; ++part) {
    const int begin = part * a.part_vectors * N;
    const int end = min(width, begin + a.part_vectors * N);
    Sums<kCentred> sums;
    for (int base = begin; base < end; base += kLanes * N) {
      const Span span = span_of<N, kLanes>(lane, base, width).until(end);
      float dy[N], h[N], weight[N];
      load_elements(dy_row, kDType<X>, a.dy.column_stride, span, dy);
      load_h(span, h);
      load_weight_elements(a.weight_rows, a.offset, span, weight);
      sums.add(dy, h, weight, late ? 0.0f : mean);
    }
    row_sums<kLanes>(sums.value, &scratch[part % 2][kCount * group * kLanes / kWarp]);
#pragma unroll
    for (int k = 0; k < kCount; ++k) {  // not from 0: that would lose the sign of a sum that is -0
      whole.value[k] = part == 0 ? sums.value[k] : whole.value[k] + sums.value[k];
    }
  }
  const Slope<kCentred> slope(whole, late ? centre.late : mean, rstd, a.inverse_width, late);

  for (int base = 0; base < width; base += kLanes * N) {
    const Span span = span_of<N, kLanes>(lane, base, width);
    float dy[N], h[N], weight[N], dx[N], unused[2][N] = {};
    load_elements(dy_row, kDType<X>, a.dy.column_stride, span, dy);
    load_h(span, h);
    load_weight_elements(a.weight_rows, a.offset, span, weight);
    if (late) {
      gradients<true>(dy, h, weight, slope, dx, unused[0], unused[1]);
    } else {
      gradients<false>(dy, h, weight, slope, dx, unused[0], unused[1]);
    }
    if (a.dresidual_out.present()) {
      load_elements(r_row, a.dresidual_out.dtype, a.dresidual_out.column_stride, span, h);
      add(h, dx);
    }
    store_elements(a.dx + row * a.width * static_cast<int64_t>(sizeof(X)), kDType<X>, span, dx);
    if (a.dresidual != nullptr) {
      store_elements(a.dresidual + row * a.width * element_bytes(h_dtype), h_dtype, span, dx);
    }
  }
}

// dw and db of the same: blockIdx.x picks columns, blockIdx.y every gridDim.y-th row; a thread has kRows of them under
// way at a time.
template <bool kCentred, typename X>
__global__ void __launch_bounds__(kColumnThreads)
    norm_backward_any_weight_kernel(const __grid_constant__ BackwardArgs a) {
  constexpr int kRows = 8;
  const int column = static_cast<int>(blockIdx.x) * kColumnThreads + static_cast<int>(threadIdx.x);
  const Span span{column, 1, a.width};
  float dw = 0.0f, db = 0.0f;
  for (int64_t row = blockIdx.y; row < a.rows; row += kRows * gridDim.y) {
    float dy[kRows][1], h[kRows][1], rstd[kRows], mean[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int64_t at = row + r * static_cast<int64_t>(gridDim.y);
      const int64_t there = at < a.rows ? at : row;  // loaded for nothing
      load_elements(a.dy.any_row(there), kDType<X>, a.dy.column_stride, span, dy[r]);
      load_elements(a.h.any_row(there), a.h.dtype, a.h.column_stride, span, h[r]);
      rstd[r] = a.rstd[there];
      mean[r] = kCentred ? a.mean[there] : 0.0f;
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (row + r * static_cast<int64_t>(gridDim.y) >= a.rows) continue;
      dw = fmaf(dy[r][0] * rstd[r], kCentred ? h[r][0] - mean[r] : h[r][0], dw);
      if (kCentred) db += dy[r][0];
    }
  }
  if (column >= a.width) return;
  a.partial[blockIdx.y * a.partial_stride + column] = dw;
  if (kCentred) a.partial_bias[blockIdx.y * a.partial_stride + column] = db;
}

// ---- few rows ----

constexpr int64_t kFewRows = 128;

struct FewArgs {
  // In the order of use: see ForwardArgs.
  const char *dy, *h, *weight;
  const float* rstd;
  int32_t row_blocks;  // blocks that take rows; those after them take columns
  int32_t rows, width;
  bool adjacent;  // dy and h are contiguous
  const float* mean;
  char* dx;
  float inverse_width, offset;
  Parts parts;
  int64_t dy_stride, h_stride;
  const char* dresidual_out;
  int64_t dresidual_out_stride;
  char *dweight, *dbias;  // of x's dtype; null when they are not wanted
};

// The block for few rows: of as many lanes a row, or part of one, as that for many; where a lane has two or three
// vectors and a block room for it, with a thread for each.
template <typename C>
constexpr int kFewThreads = C::kVecs > 1 && C::kVecs < 4 ? C::kLanes * kSlots<C::kVecs> : 0;
template <typename C, bool kParted>
using Few = std::conditional_t<!kParted && kFewThreads<C> >= 128 && kFewThreads<C> <= 512,
                               Config<C::kLanes, C::kVecs, kFewThreads<C>, 1, Kind::kWide>,
                               Config<C::kLanes, C::kVecs, (C::kLanes < 128 ? 128 : C::kLanes), 1>>;

constexpr int kColumnLanes = 8;  // threads that own a row's vectors of the columns that a block takes

// dx of a row, or a part of one, of each group of lanes. The order of the sums is that of the kernels for many rows.
template <bool kCentred, typename X, typename C, bool kParted>
__device__ inline void few_rows(const FewArgs& a) {
  using RowSums = Sums<kCentred>;
  constexpr int N = kVec<X>, kCount = RowSums::kCount;
  constexpr bool kLate = kParted && kLateMean<kCentred, X>;
  __shared__ alignas(16) float scratch[kCount * C::kThreads / kWarp];
  __shared__ std::conditional_t<kParted, Exchange<kCount>, char> exchange;
  if constexpr (kParted) exchange.init();
  const Place<X, C, kParted> at(a.parts, a.rows, a.width);
  const int64_t row = at.row;
  const int64_t offset = (row * a.width + at.skip * N) * static_cast<int64_t>(sizeof(X));
  const char *dy_row = a.dy + offset, *h_row = a.h + offset;
  if (!likely(a.adjacent)) {
    dy_row = a.dy + row * a.dy_stride + at.skip * 16, h_row = a.h + row * a.h_stride + at.skip * 16;
  }
  const char* r_row = a.dresidual_out + row * a.dresidual_out_stride + at.skip * 16;
  warm(a.dx + offset);
  Loaded<X, X, true> loaded[C::kHeld];  // dy, and h in the residual's place
  uint4 raw[C::kHeld];
#pragma unroll
  for (int v = 0; v < C::kHeld; ++v) {
    const int i = at.lane + v * C::kLanes;
    loaded[v].load_if(i < at.count, dy_row + i * 16, h_row + i * 16);
  }
#pragma unroll
  for (int v = 0; v < C::kHeld; ++v) {
    const int i = at.lane + v * C::kLanes;
    raw[v] = make_uint4(0, 0, 0, 0);
    if (a.weight != nullptr && i < at.count) raw[v] = load_constant_now(a.weight + (at.skip + i) * 16);
  }
  const float rstd = at.count > 0 ? a.rstd[row] : 0.0f, mean = kCentred && at.count > 0 ? a.mean[row] : 0.0f;
  const Centre centre(mean, rstd);
#pragma unroll
  for (int v = 0; kLate && v < C::kHeld; ++v) {
    if (unlikely(centre.first != 0.0f)) loaded[v].residual[0] = centred<X>(loaded[v].residual[0], centre.first);
  }
  auto each = [&](int v, float (&dy)[N], float (&h)[N], float (&weight)[N]) {
    unpack<X>(loaded[v].x, dy), unpack<X>(loaded[v].residual[0], h), unpack<X>(raw[v], weight);
#pragma unroll
    for (float& one : weight) one = a.weight != nullptr ? one + a.offset : 1.0f;
  };
  RowSums sums;
#pragma unroll
  for (int v = 0; v < C::kHeld; ++v) {
    float dy[N], h[N], weight[N];
    each(v, dy, h, weight);
    sums.add(dy, h, weight, kLate ? 0.0f : mean);
  }
  if constexpr (C::kKind == Kind::kWide) {
    wide_sums<C::kLanes, C::kVecs>(sums.value, scratch);
  } else {
    row_sums<C::kLanes, true>(sums.value, scratch + kCount * at.group * C::kLanes / kWarp);
  }
  if constexpr (kParted) {
    exchange.share(sums.value, a.parts.count, at.rank);
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      sums.value[k] = exchange.values[0][k];
      for (int part = 1; part < a.parts.count; ++part) sums.value[k] += exchange.values[part][k];
    }
  }
  const Slope<kCentred> slope(sums, kLate ? centre.late : mean, rstd, a.inverse_width, kLate);
  char* dx_row = a.dx + offset;
#pragma unroll
  for (int v = 0; v < C::kHeld; ++v) {
    const int i = at.lane + v * C::kLanes;
    float dy[N], h[N], weight[N], dx[N], unused[2][N] = {};
    each(v, dy, h, weight);
    gradients<kLate>(dy, h, weight, slope, dx, unused[0], unused[1]);
    if (i >= at.count) continue;
    if (a.dresidual_out != nullptr) {
      float r[N];
      load_floats<X>(r_row + i * 16, r);
      add(r, dx);
    }
    store_floats<X>(dx_row + i * 16, dx);
  }
}

// dw and db of some columns: every group of kColumnLanes lanes takes some of the rows.
template <bool kCentred, typename X, int kThreads>
__device__ inline void few_columns(const FewArgs& a) {
  constexpr int N = kVec<X>, kLanes = kColumnLanes, kWarps = kThreads / kWarp, kCount = kCentred ? 2 : 1;
  __shared__ float shares[kWarps][kCount][kLanes * N];
  const int lane = threadIdx.x % kLanes;
  const int first = (static_cast<int>(blockIdx.x) - a.row_blocks) * kLanes;
  const bool live = first + lane < a.width / N;
  float sums[2][N] = {};  // dw, db
#pragma unroll 2
  for (int row = threadIdx.x / kLanes; row < a.rows; row += kThreads / kLanes) {
    Loaded<X, X, true> loaded;
    loaded.load_if(live, a.dy + row * a.dy_stride + (first + lane) * 16, a.h + row * a.h_stride + (first + lane) * 16);
    const float rstd = a.rstd[row], mean = kCentred ? a.mean[row] : 0.0f;
    float dy[N], h[N];
    unpack<X>(loaded.x, dy), unpack<X>(loaded.residual[0], h);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      sums[0][i] = fmaf(dy[i] * rstd, kCentred ? h[i] - mean : h[i], sums[0][i]);
      sums[1][i] += dy[i];
    }
  }
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
#pragma unroll
      for (int step = kWarp / 2; step >= kLanes; step /= 2) {
        sums[k][i] += __shfl_xor_sync(0xffffffffu, sums[k][i], step);
      }
      if (threadIdx.x % kWarp < kLanes) shares[threadIdx.x / kWarp][k][lane * N + i] = sums[k][i];
    }
  }
  __syncthreads();
  const int k = threadIdx.x / (kLanes * N), column = threadIdx.x % (kLanes * N);
  char* const out = k == 0 ? a.dweight : a.dbias;
  if (k >= kCount || out == nullptr || first * N + column >= a.width) return;
  float sum = 0.0f;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) sum += shares[w][k][column];
  reinterpret_cast<X*>(out)[first * N + column] = from_float<X>(sum);
}

// A few rows with the usual arguments, where what counts is how soon the last is done: some blocks take rows, for dx,
// others columns, for dw and db. Rows are read twice, once from L2, and nothing is left for another kernel to add up.
// Not launched programmatically: that costs 0.07 us, and what comes before a backward is never this short.
template <bool kCentred, typename X, typename C, bool kParted>
__global__ void __launch_bounds__(C::kThreads) norm_backward_few_kernel(const __grid_constant__ FewArgs a) {
  warm(a.mean), warm(a.dweight);
  if (static_cast<int>(blockIdx.x) < a.row_blocks) {
    few_rows<kCentred, X, C, kParted>(a);
  } else {
    few_columns<kCentred, X, C::kThreads>(a);
  }
}

inline int64_t padded_width(int64_t width) { return divide_up(width, 8) * 8; }

// The most partial rows any kernel leaves.
inline int64_t most_partial_rows(int64_t rows, const DeviceFacts& facts) {
  return at_most(rows, static_cast<int64_t>(facts.multiprocessors) * kMostBlocks);
}

// Rounds of `stage` bytes that a block's share of shared memory holds (each block pays 1 KiB to the system too), but
// one in any case.
inline int stages_of(int64_t stage, int blocks, int most, const DeviceFacts& facts) {
  const int64_t room = at_most((facts.shared_bytes + 1024) / blocks - 1024 - kOwnShared, kStageLimit);
  const int64_t stages = at_most(room / stage, most);
  return stages > 0 ? static_cast<int>(stages) : 1;
}

// The launchers below leave dx, and the partial rows of dw and db, and say through `partial_rows` how many. Those that
// answer false have done nothing: this device cannot.
template <bool kCentred>
struct Backward {
  // The first configuration whose clusters hold rows of this many vectors.
  template <typename X, typename F>
  static void with_part(int64_t vectors, const F& f) {
    PartConfigs<X>::pick(divide_up(vectors, kMaxParts), f);
  }

  template <typename X, typename H, typename C>
  static bool launch_config(BackwardArgs a, const DeviceFacts& facts, int device, cudaStream_t stream,
                            int64_t& partial_rows) {
    static std::atomic<bool> allowed[kMaxDevices];
    const int64_t stage = Stage<X, H, C>::bytes(a.width / kVec<X>, a.dresidual_out.present());
    a.stages = stages_of(stage, C::kBlocks, kMaxStages, facts);
    const auto kernel = norm_backward_kernel<kCentred, X, H, C>;
    if (!allow_shared(kernel, device, a.stages * stage, allowed)) return false;
    partial_rows = at_most(divide_up(a.rows, C::kGroups), static_cast<int64_t>(facts.multiprocessors) * C::kBlocks);
    kernel<<<static_cast<unsigned>(partial_rows), C::kThreads, static_cast<size_t>(a.stages * stage), stream>>>(a);
    return true;
  }

  template <typename X, typename H, typename C>
  static bool launch_parts(BackwardArgs a, const DeviceFacts& facts, int device, cudaStream_t stream,
                           int64_t& partial_rows) {
    static std::atomic<bool> allowed[kMaxDevices];
    static std::atomic<int> clusters[kMaxDevices][kMaxParts + 1];
    if (facts.capability < 90) return false;
    const int64_t stage = Stage<X, H, C>::bytes(a.part_vectors, a.dresidual_out.present());
    a.stages = stages_of(stage, C::kBlocks, kMaxPartStages, facts);
    if (a.stages < 2) return false;  // of two rows at a time
    const auto kernel = norm_backward_parts_kernel<kCentred, X, H, C>;
    if (!allow_shared(kernel, device, a.stages * stage, allowed)) return false;
    Launch how(dim3(static_cast<unsigned>(a.parts)), C::kThreads, a.stages * stage, stream);
    how.clusters(a.parts);
    // Of a few rows each cluster takes some: partial rows are as wide, in fp32, and have to be added up.
    const int64_t few = a.rows <= 8 ? a.rows : 8 + a.rows / 8;
    partial_rows = at_most(few, most_clusters(kernel, how, clusters[device][a.parts]));
    if (partial_rows == 0) return false;
    how.config.gridDim.x = static_cast<unsigned>(partial_rows * a.parts);
    if (how(kernel, a) == Status::kOk) return true;
    cudaGetLastError();  // not to be taken for that of the kernel that runs instead
    return false;
  }

  template <typename X, typename C>
  static bool launch_bundle(BackwardArgs& a, const DeviceFacts& facts, int device, cudaStream_t stream,
                            int64_t& partial_rows) {
    static std::atomic<bool> allowed[kMaxDevices];
    const bool alone = a.dresidual == nullptr && !a.dresidual_out.present() && a.weight_rows.column_stride == 1;
    const bool aligned = reinterpret_cast<uintptr_t>(a.dx) % 16 == 0;
    if (!alone || !aligned || !bundles<X>(a.dy, a.width) || !bundles<X>(a.h, a.width)) return false;
    const int64_t row_bytes = a.width * static_cast<int64_t>(sizeof(X));
    const int64_t turns = kBundleBytes / C::kBlocks / (C::kGroups * row_bytes);
    a.bundle = C::kGroups * static_cast<int>(turns > 1 ? turns : 1);
    const int64_t stage = 2 * Run::room(a.bundle, row_bytes);
    a.stages = stages_of(stage, C::kBlocks, 2, facts);
    const int64_t groups = C::kGroups * a.partial_stride * static_cast<int64_t>(sizeof(float));
    const int64_t bytes = a.stages * stage > groups ? a.stages * stage : groups;
    const auto kernel = norm_backward_bundle_kernel<kCentred, X, C>;
    if (!allow_shared(kernel, device, bytes, allowed)) return false;
    partial_rows = at_most(divide_up(a.rows, a.bundle), static_cast<int64_t>(facts.multiprocessors) * C::kBlocks);
    kernel<<<static_cast<unsigned>(partial_rows), C::kThreads, static_cast<size_t>(bytes), stream>>>(a);
    return true;
  }

  template <typename X, int kLanes>
  static void launch_any(const BackwardArgs& a, cudaStream_t stream) {
    const unsigned blocks = static_cast<unsigned>(divide_up(a.rows, any_threads(kLanes) / kLanes));
    norm_backward_any_kernel<kCentred, X, kLanes><<<blocks, any_threads(kLanes), 0, stream>>>(a);
  }

  template <typename X>
  static Status launch_any(const BackwardArgs& a, const DeviceFacts& facts, cudaStream_t stream,
                           int64_t& partial_rows) {
    auto any = [&](auto config) { launch_any<X, decltype(config)::kLanes>(a, stream); };
    const int64_t count = divide_up(a.width, kVec<X>);
    if (!BackwardConfigs<kCentred, X>::pick(count, any)) with_part<X>(count, any);
    if (a.partial != nullptr) {
      const int64_t across = divide_up(a.width, kColumnThreads);
      const int64_t down = divide_up(static_cast<int64_t>(facts.multiprocessors) * kColumnBlocks, across);
      partial_rows = at_most(down, most_partial_rows(a.rows, facts));
      const dim3 grid(static_cast<unsigned>(across), static_cast<unsigned>(partial_rows));
      norm_backward_any_weight_kernel<kCentred, X><<<grid, kColumnThreads, 0, stream>>>(a);
    }
    return launch_status();
  }

  template <typename X, typename H>
  static bool launch_vectors(const BackwardArgs& a, const DeviceFacts& facts, int device, cudaStream_t stream,
                             int64_t& partial_rows) {
    bool done = false;
    if (a.parts > 1) {
      with_part<X>(a.width / kVec<X>, [&](auto config) {
        done = launch_parts<X, H, decltype(config)>(a, facts, device, stream, partial_rows);
      });
      return done;
    }
    BackwardConfigs<kCentred, X>::pick(a.width / kVec<X>, [&](auto config) {
      done = launch_config<X, H, decltype(config)>(a, facts, device, stream, partial_rows);
    });
    return done;
  }

  template <typename X>
  static void share_out(BackwardArgs& a) {
    const int64_t count = divide_up(a.width, kVec<X>);
    a.parts = 1, a.part_vectors = static_cast<int>(count);
    if (BackwardConfigs<kCentred, X>::pick(count, [](auto) {})) return;
    with_part<X>(count, [&](auto config) {
      const Parts parts = Parts::of<X, decltype(config)>(a.width);
      a.parts = parts.count, a.part_vectors = parts.vectors;
    });
  }

  // A few rows with the usual arguments, dw and db included. False when they are others.
  template <typename X>
  static bool launch_few(const BackwardArgs& a, const TensorView& dweight, const TensorView& dbias,
                         const DeviceFacts& facts, int device, cudaStream_t stream, Status& status) {
    const bool usual =
        a.dy.plain() && a.h.plain() && a.dresidual_out.plain() && a.weight_rows.vectors && a.h.dtype == kDType<X> &&
        a.dresidual == nullptr && (a.weight_dtype == kDType<X> || !a.weight_rows.present()) &&
        (dweight.dtype == kDType<X> || !dweight.present()) && (dbias.dtype == kDType<X> || !dbias.present());
    if (!usual || a.rows == 0 || a.rows > kFewRows) return false;
    FewArgs few = {};
    few.dy = a.dy.data, few.h = a.h.data, few.weight = a.weight, few.dx = a.dx;
    few.mean = a.mean, few.rstd = a.rstd;
    few.dy_stride = a.dy.strides[0], few.h_stride = a.h.strides[0], few.adjacent = a.dy.adjacent && a.h.adjacent;
    few.rows = static_cast<int32_t>(a.rows), few.width = a.width, few.parts = {a.parts, a.part_vectors};
    few.inverse_width = a.inverse_width, few.offset = a.offset;
    few.dresidual_out = a.dresidual_out.data, few.dresidual_out_stride = a.dresidual_out.strides[0];
    few.dweight = static_cast<char*>(dweight.data), few.dbias = static_cast<char*>(dbias.data);
    const bool sums = few.dweight != nullptr || few.dbias != nullptr;
    const int64_t count = a.width / kVec<X>, column_blocks = sums ? divide_up(count, kColumnLanes) : 0;
    bool done = false;
    auto held = [&](auto config) {
      using C = Few<decltype(config), false>;
      few.row_blocks = static_cast<int32_t>(divide_up(a.rows, C::kGroups));
      const dim3 grid(static_cast<unsigned>(few.row_blocks + column_blocks));
      const auto kernel = norm_backward_few_kernel<kCentred, X, C, false>;
      status = launch(kernel, grid, C::kThreads, 0, false, stream, few);
      done = true;
    };
    auto parted = [&](auto config) {
      using C = Few<decltype(config), true>;
      static std::atomic<int> clusters[kMaxDevices][kMaxParts + 1];
      few.row_blocks = static_cast<int32_t>(a.rows * a.parts);
      const int64_t all = a.rows + divide_up(column_blocks, a.parts);  // a cluster takes columns or a row
      const auto kernel = norm_backward_few_kernel<kCentred, X, C, true>;
      done =
          fuselm::launch_parts(kernel, few, all, a.parts, C::kThreads, false, facts, clusters[device][a.parts], stream);
    };
    if (!BackwardConfigs<kCentred, X>::pick(count, held)) with_part<X>(count, parted);
    return done;
  }

  template <typename X>
  static Status launch_rows(BackwardArgs& a, const DeviceFacts& facts, int device, cudaStream_t stream,
                            int64_t& partial_rows) {
    const int64_t count = divide_up(a.width, kVec<X>);
    const bool vectors = a.dy.vectors && a.h.vectors && a.weight_rows.vectors && a.dresidual_out.vectors;
    bool done = false;
    if (vectors && a.h.dtype == kDType<X>) {
      done = launch_vectors<X, X>(a, facts, device, stream, partial_rows);
    } else if (vectors && a.h.dtype == DType::kFloat32) {
      done = launch_vectors<X, float>(a, facts, device, stream, partial_rows);
    } else {
      BackwardConfigs<kCentred, X>::pick(count, [&](auto config) {
        using C = typename Bundle<kCentred, X, decltype(config)>::type;
        done = launch_bundle<X, C>(a, facts, device, stream, partial_rows);
      });
    }
    // By the kernel with the same lanes and parts, so with the same bits.
    return done ? launch_status() : launch_any<X>(a, facts, stream, partial_rows);
  }

  static int64_t workspace(const TensorView& dy, Stream stream) {
    const DeviceGuard guard(stream.device);
    if (!guard.ok() || dy.rank < 1) return 0;
    return workspace_bytes(count_rows(dy), dy.sizes[dy.rank - 1], device_facts(guard.device()));
  }

  static int64_t workspace_bytes(int64_t rows, int64_t width, const DeviceFacts& facts) {
    return (kCentred ? 2 : 1) * most_partial_rows(rows, facts) * padded_width(width) * sizeof(float);
  }

  static Status run(const TensorView& dy, const TensorView& h, const TensorView& mean, const TensorView& rstd,
                    const TensorView& weight, const TensorView& bias, const TensorView& dresidual_out, double offset,
                    const TensorView& dx, const TensorView& dresidual, const TensorView& dweight,
                    const TensorView& dbias, Workspace workspace, Stream stream) {
    Status status = check_tensors(dy, weight, h);
    if (status == Status::kOk) status = check_tensors(dy, bias, dresidual_out);
    if (status != Status::kOk) return status;
    if (!dx.present()) return Status::kBadShape;
    const int64_t rows = count_rows(dy), width = dy.sizes[dy.rank - 1];
    for (const TensorView* stat : {&rstd, kCentred ? &mean : &rstd}) {
      // A binding may not be able to tell the empty statistics of no rows from none.
      if (rows > 0 && stat->dtype != DType::kFloat32) return Status::kBadDtype;
      if (rows > 0 && !is_row_stat(*stat, dy)) return Status::kBadShape;
    }
    if (dresidual_out.present() && dresidual_out.dtype != h.dtype) return Status::kBadDtype;
    const DeviceGuard guard(stream.device);
    if (!guard.ok()) return Status::kBadDevice;
    const DeviceFacts& facts = device_facts(guard.device());
    const bool sums = dweight.present() || dbias.present();
    if (sums && workspace.bytes < workspace_bytes(rows, width, facts)) return Status::kBadWorkspace;
    return with_dtype(dy.dtype, [&](auto zero) {
      using X = decltype(zero);
      auto as_rows = [&](const TensorView& view) { return make_rows(view, width, kVec<X>); };
      BackwardArgs a = {};
      a.dy = as_rows(dy), a.h = as_rows(h), a.weight_rows = as_rows(weight), a.dresidual_out = as_rows(dresidual_out);
      a.weight = a.weight_rows.data, a.weight_dtype = weight.dtype;
      a.dx = static_cast<char*>(dx.data), a.dresidual = static_cast<char*>(dresidual.data);
      a.mean = static_cast<const float*>(mean.data), a.rstd = static_cast<const float*>(rstd.data);
      a.partial_stride = padded_width(width);
      a.partial = sums ? static_cast<float*>(workspace.data) : nullptr;
      if (kCentred && sums) a.partial_bias = a.partial + most_partial_rows(rows, facts) * a.partial_stride;
      a.rows = rows, a.width = static_cast<int32_t>(width), a.inverse_width = 1.0f / static_cast<float>(width);
      a.offset = exact_offset(offset);
      a.large = 3 * rows * width * static_cast<int64_t>(sizeof(X)) > facts.l2_bytes;
      share_out<X>(a);
      int64_t partial_rows = 0;
      Status result = Status::kOk;
      if (launch_few<X>(a, dweight, dbias, facts, guard.device(), cuda_stream(stream), result)) return result;
      if (rows > 0) result = launch_rows<X>(a, facts, guard.device(), cuda_stream(stream), partial_rows);
      if (result != Status::kOk || !sums) return result;
      return column_sums({a.partial, a.partial_bias}, partial_rows, a.partial_stride, a.width, {dweight, dbias},
                         facts.capability >= 90, cuda_stream(stream));
    });
  }
};

}  // namespace norm
}  // namespace fuselm
