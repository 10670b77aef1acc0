// Rotary positions, forward and in place, q and k in one launch, with QK-norm or without; backward without QK-norm is
// the same with the sines' sign changed. Contract: rope.py; who has which pairs: rope.cuh; the rest: rope_backward.cu.
//
// Traffic. q and k are read once and written once. A job takes up to four heads, eight with QK-norm, so that the
// token's cosines and sines, which heads and rows of the batch share, are asked of L1 and L2 once for them; all loads
// of a round are under way before the first is used. A few tokens (decoding) have a job for each head, and what they
// wait for is one load after another: the position, its cosines and sines; without positions and QK-norm, which is the
// usual thing, all loads at once, by a kernel of its own.
#include "rope.cuh"

namespace fuselm {
namespace rope {
namespace {

constexpr int kThreads = 128;
constexpr int64_t kMostSlots = 1 << 20;  // of a token

// The kernel for the usual few tokens: the most pairs of a thread, the most threads of a multiprocessor, all of which
// it holds at once (with four times as many 4x1024x12x64 took 14.0 us, and 11.9 by the kernel for many), and whether it
// may be set up while the kernel before it ends.
constexpr int kBriefPairs = 4;
constexpr int64_t kBriefThreads = 2048;
constexpr bool kBriefChained = true;

// With QK-norm a lane has eight pairs, so that few lanes meet; without it two vectors, so that more lanes read what
// follows one another.
template <typename T, int V, bool kInterleaved, bool kNorm>
using Turned = Part<T, V, kInterleaved, kNorm ? kLanePairs : V, kNorm>;

// What is q's or k's own.
template <typename N>
struct Side {
  Strided<N> from;
  N heads;
  char* to;       // contiguous
  int32_t slots;  // jobs of a token; each takes every slots-th head

  Side() = default;
  template <typename M>
  explicit Side(const Side<M>& s) : from(s.from), heads(static_cast<N>(s.heads)), to(s.to), slots(s.slots) {}
};

// What only QK-norm asks for: of q, and of k.
struct Norm {
  const char* weight[2];
  float* rstd[2];  // contiguous, or null
  DType dtype[2];
  float inverse_width, eps;
};

// In the order in which they are asked for.
template <typename N>
struct ForwardArgs {
  int32_t q_blocks;  // of a few tokens: how many of a token's blocks have q
  int32_t chunks, half_bytes;
  bool inplace, large;
  Side<N> q, k;
  Tables<N> tables;
  float sign;     // of the sines
  int32_t turns;  // of many tokens: heads of a job, the most that one has
  Jobs jobs;
  Norm norm;

  ForwardArgs() = default;
  template <typename M>
  explicit ForwardArgs(const ForwardArgs<M>& a)
      : q_blocks(a.q_blocks),
        chunks(a.chunks),
        half_bytes(a.half_bytes),
        inplace(a.inplace),
        large(a.large),
        q(a.q),
        k(a.k),
        tables(a.tables),
        sign(a.sign),
        turns(a.turns),
        jobs(a.jobs),
        norm(a.norm) {}
};

// What a thread works on: of q or of k, decided once.
template <typename N>
struct Mine {
  const char* from;
  char* to;
  N heads, head, step, from_head, to_head;  // the first head, which is next, and how far it is to the next one

  __device__ Mine(const ForwardArgs<N>& a, const Job& job, bool second, int first_head) {
    from = second ? a.k.from.of(job) : a.q.from.of(job);
    from_head = second ? a.k.from.head : a.q.from.head;
    const N all = second ? a.k.heads : a.q.heads;
    heads = job.live ? all : 0;
    head = first_head, step = second ? a.k.slots : a.q.slots;
    const int bytes = 2 * a.half_bytes;
    char* made = second ? a.k.to : a.q.to;
    to = a.inplace ? const_cast<char*>(from) : made + static_cast<int64_t>(static_cast<N>(job.token) * all) * bytes;
    to_head = a.inplace ? from_head : bytes;
  }
  __device__ N at(int turn) const { return head + turn * step; }
  __device__ const char* source(N head) const { return from + static_cast<int64_t>(head) * from_head; }
  __device__ char* target(N head) const { return to + static_cast<int64_t>(head) * to_head; }
};

// How a head's vectors are turned, normalised before that or not.
template <typename S, bool kNorm>
struct Turn {
  typename S::Floats cos, sin, a_weight, b_weight;

  // The position comes last: a thread waits for it before it asks for anything else.
  template <typename N>
  __device__ void load(const ForwardArgs<N>& a, const Job& job, const Cut& cut, bool second) {
    const DType dtype = kNorm ? a.norm.dtype[second] : DType::kAbsent;
    std::conditional_t<kNorm, Weight<S>, char> weight;
    if constexpr (kNorm) weight.load(a.norm.weight[second], dtype, cut);
    load_angles<S>(a.tables, a.tables.position(job).number(), cut, cos, sin);
    if constexpr (kNorm) weight.get(dtype, a_weight, b_weight);
#pragma unroll
    for (float& one : sin) one *= a.sign;
  }
  __device__ void apply(typename S::Vectors& raw) const {
    typename S::Floats first, second;
    get_pairs<S>(raw, first, second);
#pragma unroll
    for (int i = 0; i < S::kPairs; ++i) turn(first[i], second[i], cos[i], sin[i]);
    set_pairs<S>(first, second, raw);
  }
  __device__ void apply(typename S::Vectors& raw, float rstd) const {
    typename S::Floats first, second;
    get_pairs<S>(raw, first, second);
#pragma unroll
    for (int i = 0; i < S::kPairs; ++i) {
      first[i] = __fmul_rn(__fmul_rn(first[i], rstd), a_weight[i]);
      second[i] = __fmul_rn(__fmul_rn(second[i], rstd), b_weight[i]);
      turn(first[i], second[i], cos[i], sin[i]);
    }
    set_pairs<S>(first, second, raw);
  }
};

// rstd of kHeads heads, by all lanes of a warp.
template <typename S, int kHeads>
__device__ inline void find_rstd(const typename S::Vectors (&raw)[kHeads], const Norm& norm, int lanes,
                                 float (&rstd)[kHeads]) {
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    typename S::Floats first, second;
    get_pairs<S>(raw[h], first, second);
    rstd[h] = sum_of_products(first, second, first, second);
  }
  sum_lanes(lanes, rstd);
#pragma unroll
  for (float& one : rstd) one = norm::inverse_rms<typename S::T>(one, norm.inverse_width, norm.eps);
}

__device__ inline void keep_rstd(float* to, const Job& job, int64_t heads, int64_t head, float rstd) {
  if (to != nullptr && job.lane == 0 && head < heads) to[job.token * heads + head] = rstd;
}

// A few tokens: a block has heads of one token, all of q or all of k, and a group of lanes has one head. Nothing is
// divided, and nothing asked that the grid knows. Chained to the kernel before it.
template <typename T, int V, bool kInterleaved, bool kNorm>
__global__ void __launch_bounds__(kThreads, 1) rope_forward_few_kernel(const __grid_constant__ ForwardArgs<int32_t> a) {
  using S = Turned<T, V, kInterleaved, kNorm>;
  const bool second = static_cast<int>(blockIdx.x) >= a.q_blocks;
  Job job;
  job.lane = threadIdx.x, job.place = blockIdx.y, job.batch = blockIdx.z;
  job.token = blockIdx.z * gridDim.y + blockIdx.y;
  job.slot = (blockIdx.x - (second ? a.q_blocks : 0)) * blockDim.y + threadIdx.y;
  job.live = job.slot < (second ? a.k.heads : a.q.heads);
  if (!kNorm && !job.live) return;  // where heads are added up, all lanes of a warp stay
  const Mine<int32_t> mine(a, job, second, job.slot);
  const Cut cut{job.lane, static_cast<int32_t>(blockDim.x), a.chunks, a.half_bytes};
  const char* from = mine.source(mine.head);
  char* to = mine.target(mine.head);
  warm(from), warm(to);
  allow_next_kernel();
  wait_for_previous_kernel();
  typename S::Vectors raw[1];
  load_part<S>(from, !kNorm || job.live, cut, Usual{}, raw[0]);
  Turn<S, kNorm> turn;
  turn.load(a, job, cut, second);
  if constexpr (kNorm) {
    float rstd[1];
    find_rstd<S>(raw, a.norm, cut.lanes, rstd);
    keep_rstd(a.norm.rstd[second], job, mine.heads, mine.head, rstd[0]);
    turn.apply(raw[0], rstd[0]);
  } else {
    turn.apply(raw[0]);
  }
  store_part<S>(to, !kNorm || job.live, cut, raw[0]);
}

// Where q or k is, or goes to: bytes from one to the next. All of it is within 2^31 bytes.
struct BriefStrides {
  int32_t batch, token, head;

  bool operator==(const BriefStrides& s) const { return batch == s.batch && token == s.token && head == s.head; }
};

// In the order of use, and what is needed before the loads in the first two lines of the constant cache: the kernel's
// parameters begin 48 bytes before the end of a line of 64.
struct BriefArgs {
  const char *q, *k, *cos, *sin;
  int32_t q_blocks, heads_of_block, q_heads, k_heads;
  BriefStrides q_from, k_from;
  int32_t cos_row, sin_row;
  // Of halves: where in a head the first numbers of pairs are, and how much farther on the second ones. Turning back is
  // turning with the two exchanged, to the same bits, and costs no multiplication. Neighbours need the sign.
  int32_t first, apart;
  float sign;
  char *q_out, *k_out;
  BriefStrides q_to, k_to;  // where they are not as in q_from and k_from
};

// Of q's and k's the one that a block needs, both asked for by every thread before it is known which.
template <typename N>
__device__ inline N either(bool second, N q, N k) {
  const N of_q = now(q), of_k = now(k);
  return second ? of_k : of_q;
}

// The usual few tokens: neither positions nor QK-norm. Threads as in rope_forward_few_kernel, half as much each, and
// between the start and the loads nothing but what those need: all parameters are asked for at once and by all threads,
// and a place in memory is a sum of 32 bits. Its code is not in a cache when it starts, so that what it takes goes with
// how much there is of it: 46 instructions and all four loads, where there are 61 before the first, 104 before those of
// the tables, and parameters that are asked for by what others say. kSame: out lies as in. (Not found where there
// is one token, one head or one row of the batch: in is said to have stride 0 there, and out its real one.)
template <typename T, int V, bool kInterleaved, bool kSame>
__global__ void __launch_bounds__(kThreads) rope_forward_brief_kernel(const __grid_constant__ BriefArgs a) {
  using S = Part<T, V, kInterleaved, kInterleaved ? V / 2 : V, false>;
  if (kBriefChained) allow_next_kernel();
  const int lane = threadIdx.x, place = blockIdx.y, batch = blockIdx.z;
  const bool second = static_cast<int>(blockIdx.x) >= a.q_blocks;
  const int head = (blockIdx.x - (second ? a.q_blocks : 0)) * a.heads_of_block + threadIdx.y;
  auto offset = [&](const BriefStrides& q, const BriefStrides& k) {
    return lane * S::kBytes + (kInterleaved ? 0 : a.first) + head * either(second, q.head, k.head) +
           place * either(second, q.token, k.token) + batch * either(second, q.batch, k.batch);
  };
  const int at = offset(a.q_from, a.k_from);
  const char* from = either(second, a.q, a.k) + at;
  const char* cos_at = now(a.cos) + (place * now(a.cos_row) + lane * (S::P * 4));
  const char* sin_at = now(a.sin) + (place * now(a.sin_row) + lane * (S::P * 4));
  if (head >= either(second, a.q_heads, a.k_heads)) return;
  if (kBriefChained) wait_for_previous_kernel();
  typename S::Vectors raw;
  raw[0][0].load(from, Usual{});
  if (S::kVectors > 1) raw[0][S::kVectors - 1].load(from + a.apart, Usual{});
  Turn<S, false> turn;
  load_fp32<S::P>(cos_at, turn.cos), load_fp32<S::P>(sin_at, turn.sin);
  char* to = either(second, a.q_out, a.k_out) + (kSame ? at : offset(a.q_to, a.k_to));
  if constexpr (kInterleaved) {
#pragma unroll
    for (float& one : turn.sin) one *= a.sign;
  }
  turn.apply(raw);
  raw[0][0].store(to);
  if (S::kVectors > 1) raw[0][S::kVectors - 1].store(to + a.apart);
}

// Heads whose loads are under way together. With QK-norm weights wait in registers too.
template <typename T, bool kNorm>
constexpr int kAtOnce = kNorm ? (sizeof(T) == 4 ? 1 : 2) : 4;

// Of a multiprocessor. Where it holds fewer threads the assembler would spill for a sixth.
constexpr int kPlainBlocks = kResidentThreads < 2048 ? 5 : 6;

// The same of rope_forward_across_kernel, which has one vector of each: all of 25 heads in five jobs, and of 5 in one.
constexpr int kAcrossHeads = 5, kAcrossBlocks = 6;

template <typename T, int V, bool kInterleaved, bool kNorm>
__global__ void __launch_bounds__(kThreads, kNorm ? 4 : kPlainBlocks)
    rope_forward_kernel(const __grid_constant__ ForwardArgs<int64_t> a) {
  using S = Turned<T, V, kInterleaved, kNorm>;
  constexpr int kHeads = kAtOnce<T, kNorm>;
  const Job job(a.jobs, blockIdx.x);
  if (!kNorm && !job.live) return;
  const bool second = job.slot >= a.q.slots;
  const Mine<int64_t> mine(a, job, second, second ? job.slot - a.q.slots : job.slot);
  const Cut cut{job.lane, static_cast<int32_t>(blockDim.x), a.chunks, a.half_bytes};
  const uint64_t policy = read_policy(a.large);
  typename S::Vectors raw[kHeads];
  auto load = [&](int turn) {
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      const int64_t head = mine.at(turn + h);
      load_part<S>(mine.source(head), head < mine.heads, cut, policy, raw[h]);
    }
  };
  load(0);
  Turn<S, kNorm> turn;
  turn.load(a, job, cut, second);
#pragma unroll 1
  for (int done = 0;;) {
    float rstd[kHeads] = {};
    if constexpr (kNorm) find_rstd<S>(raw, a.norm, cut.lanes, rstd);
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      const int64_t head = mine.at(done + h);
      if constexpr (kNorm) {
        keep_rstd(a.norm.rstd[second], job, mine.heads, head, rstd[h]);
        if (kHeads > 1) forget<S>(raw[h]);
        turn.apply(raw[h], rstd[h]);
      } else {
        turn.apply(raw[h]);
      }
      store_part<S>(mine.target(head), head < mine.heads, cut, raw[h]);
    }
    done += kHeads;
    if (done >= a.turns) return;
    load(done);
  }
}

// Heads of whole vectors whose halves are not, as 40 numbers of 16 bits: in vectors of 8 bytes 32x1024x25x40 took 52 us
// where a copy takes 42. A lane has a vector of 16 bytes, which is two chunks of four pairs' numbers, and what its
// numbers are paired with is the second chunk of one lane and the first of another. A warp has as many groups of lanes
// as are whole, and each group a job.
struct AcrossArgs : ForwardArgs<int64_t> {
  Divisor by_vectors;  // of a head, which are as many as chunks of a half, an odd number
  int32_t groups;      // of a warp
};

template <typename T>
__global__ void __launch_bounds__(kThreads, kAcrossBlocks)
    rope_forward_across_kernel(const __grid_constant__ AcrossArgs a) {
  using S = Part<T, 4, false, 8, true>;  // for its tables: two chunks
  const int vectors = static_cast<int>(a.by_vectors.value), thread = threadIdx.x;
  const int group = static_cast<int>(a.by_vectors.divide(thread)), lane = thread - group * vectors;
  const bool spare = group >= a.groups;
  Job job(a.jobs, (blockIdx.x * blockDim.y + threadIdx.y) * a.groups + (spare ? 0 : group), lane);
  job.live = job.live && !spare;
  const bool second = job.slot >= a.q.slots;
  const Mine<int64_t> mine(a, job, second, second ? job.slot - a.q.slots : job.slot);
  const uint64_t policy = read_policy(a.large);
  uint4 raw[kAcrossHeads];
  auto load = [&](int turn) {
#pragma unroll
    for (int h = 0; h < kAcrossHeads; ++h) {
      const int64_t head = mine.at(turn + h);
      raw[h] = make_uint4(0, 0, 0, 0);
      if (head < mine.heads) raw[h] = load_vector(mine.source(head) + lane * 16, policy);
    }
  };
  load(0);
  // Of a head's 2 * vectors chunks number i is paired with number i + vectors, or i - vectors.
  const int first = 2 * lane, next = first + 1;
  const int first_column = first % vectors, next_column = next % vectors;
  const int whose_next = group * vectors + (first + vectors) % (2 * vectors) / 2;
  const int whose_first = group * vectors + (next + vectors) % (2 * vectors) / 2;
  const Cut cut{first_column, next_column - first_column, vectors, 0};
  float cos[S::kPairs], sin[S::kPairs];
  load_angles<S>(a.tables, a.tables.position(job).number(), cut, cos, sin);
#pragma unroll
  for (int i = 0; i < S::kPairs; ++i) sin[i] *= (i < S::P ? first : next) < vectors ? -a.sign : a.sign;
#pragma unroll 1
  for (int done = 0;;) {
#pragma unroll
    for (int h = 0; h < kAcrossHeads; ++h) {
      uint4 pairs;
      pairs.x = __shfl_sync(0xffffffffu, raw[h].z, whose_next),
      pairs.y = __shfl_sync(0xffffffffu, raw[h].w, whose_next);
      pairs.z = __shfl_sync(0xffffffffu, raw[h].x, whose_first);
      pairs.w = __shfl_sync(0xffffffffu, raw[h].y, whose_first);
      float own[8], other[8];
      unpack<T>(raw[h], own), unpack<T>(pairs, other);
#pragma unroll
      for (int i = 0; i < 8; ++i) own[i] = fmaf(own[i], cos[i], __fmul_rn(other[i], sin[i]));  // as turn() does
      const int64_t head = mine.at(done + h);
      if (head < mine.heads) store_vector(mine.target(head) + lane * 16, packed<T>(own));
    }
    done += kAcrossHeads;
    if (done >= a.turns) return;
    load(done);
  }
}

// Any strides, any alignment: elements one by one, by the lanes and in the order of the vectors.
struct AnyArgs : ForwardArgs<int64_t> {
  AnyTables any_tables;
  int64_t columns[2], weight_columns[2];  // strides in elements, of q and of k
  int32_t half, chunk_bits;
  bool interleaved;
};

template <typename T, bool kNorm>
__global__ void __launch_bounds__(kThreads, 4) rope_forward_any_kernel(const __grid_constant__ AnyArgs a) {
  const Job job(a.jobs, blockIdx.x);
  const bool second = job.slot >= a.q.slots;
  const Mine<int64_t> mine(a, job, second, second ? job.slot - a.q.slots : job.slot);
  const AnyCut cut{job.lane, static_cast<int32_t>(blockDim.x), kLanePairs, a.half, a.chunk_bits, a.interleaved};
  float cos[kLanePairs], sin[kLanePairs], a_weight[kLanePairs], b_weight[kLanePairs];
  a.any_tables.load(a.any_tables.position(job).number(), job.live, cut, cos, sin);
  if constexpr (kNorm) {
    load_any_weights(a.norm.weight[second], a.norm.dtype[second], a.weight_columns[second], cut, a_weight, b_weight);
  }
#pragma unroll 1
  for (int done = 0; done < a.turns; ++done) {
    const int64_t head = mine.at(done);
    const bool live = head < mine.heads;
    float first[kLanePairs], other[kLanePairs], rstd[1] = {};
    load_any<T>(mine.source(head), a.columns[second], live, cut, first, other);
    if constexpr (kNorm) {
      rstd[0] = sum_of_products(first, other, first, other);
      sum_lanes(cut.lanes, rstd);
      rstd[0] = norm::inverse_rms<T>(rstd[0], a.norm.inverse_width, a.norm.eps);
      keep_rstd(a.norm.rstd[second], job, mine.heads, head, rstd[0]);
    }
#pragma unroll
    for (int i = 0; i < kLanePairs; ++i) {
      if constexpr (kNorm) {
        first[i] = __fmul_rn(__fmul_rn(first[i], rstd[0]), a_weight[i]);
        other[i] = __fmul_rn(__fmul_rn(other[i], rstd[0]), b_weight[i]);
      }
      turn(first[i], other[i], cos[i], sin[i] * a.sign);
    }
    store_any<T>(mine.target(head), a.inplace ? a.columns[second] : 1, live, cut, first, other);
  }
}

// ---- launchers ----

// Everything a call is given.
struct Call {
  const TensorView &q, &k, &q_weight, &k_weight, &q_rstd, &k_rstd;
  void *q_to, *k_to;  // in place, what q and k are
  bool q_wanted, k_wanted, interleaved, normed;

  int64_t tokens() const { return q.sizes[0] * q.sizes[1]; }
};

// So many heads to a job, more only of a token that has millions.
void share_out(int64_t heads_of_job, AnyArgs& a) {
  a.turns = 1;
  for (Side<int64_t>* side : {&a.q, &a.k}) {
    const int64_t least = divide_up(side->heads, kMostSlots), most = heads_of_job > least ? heads_of_job : least;
    side->slots = static_cast<int32_t>(divide_up(side->heads, most));
    const int64_t turns = side->slots > 0 ? divide_up(side->heads, side->slots) : 0;
    if (turns > a.turns) a.turns = static_cast<int32_t>(turns);
  }
}

template <typename Kernel, typename Args>
Status launch_block(Kernel kernel, dim3 grid, int lanes, bool chained, cudaStream_t stream, const Args& a) {
  Launch how(grid, kThreads, 0, stream);
  how.config.blockDim = dim3(static_cast<unsigned>(lanes), static_cast<unsigned>(kThreads / lanes));
  if (chained) how.programmatic();
  return how(kernel, a);
}

// `groups` of lanes, with a job each, are in a block.
template <typename Args, typename Kernel>
Status launch_pieces(const Args& whole, Kernel kernel, int lanes, int groups, const Call& call, cudaStream_t stream) {
  const int64_t batches = call.q.sizes[0], tokens = call.q.sizes[1], slots = whole.q.slots + whole.k.slots;
  return for_pieces(batches, tokens, slots, [&](const Piece& piece) {
    Args a = whole;
    a.jobs = Jobs(piece.batches, piece.tokens, slots);
    for (Side<int64_t>* side : {&a.q, &a.k}) {
      move_to(piece, side->from);
      if (side->to != nullptr) side->to += piece.first_token(tokens) * side->heads * 2 * a.half_bytes;
    }
    const int64_t heads[2] = {a.q.heads, a.k.heads};
    for (int i : {0, 1}) {
      if (a.norm.rstd[i] != nullptr) a.norm.rstd[i] += piece.first_token(tokens) * heads[i];
    }
    move_to(piece, a.tables);
    if constexpr (std::is_same_v<Args, AnyArgs>) move_to(piece, a.any_tables);
    const dim3 grid(static_cast<unsigned>(divide_up(a.jobs.count, groups)));
    return launch_block(kernel, grid, lanes, false, stream, a);
  });
}

// A thread for every part of a head where the card holds them all at once, four times over: none waits for another.
template <typename T, int V, bool kInterleaved, bool kNorm>
bool launch_few(AnyArgs& a, const Call& call, int lanes, const DeviceFacts& facts, cudaStream_t stream,
                Status& status) {
  constexpr int64_t kMostGrid = 65535;
  const int64_t threads = call.tokens() * (a.q.heads + a.k.heads) * lanes;
  const bool small = in_32_bits(a.q.from) && in_32_bits(a.k.from) && in_32_bits(a.tables);
  if (!small || threads > int64_t{512} * facts.multiprocessors || call.q.sizes[0] > kMostGrid ||
      call.q.sizes[1] > kMostGrid) {
    return false;
  }
  const int64_t heads_of_block = kThreads / lanes;
  a.q_blocks = static_cast<int32_t>(divide_up(a.q.heads, heads_of_block));
  const dim3 grid(static_cast<unsigned>(a.q_blocks + divide_up(a.k.heads, heads_of_block)),
                  static_cast<unsigned>(call.q.sizes[1]), static_cast<unsigned>(call.q.sizes[0]));
  const auto kernel = rope_forward_few_kernel<T, V, kInterleaved, kNorm>;
  status = launch_block(kernel, grid, lanes, facts.capability >= 90, stream, ForwardArgs<int32_t>(a));
  return true;
}

// A tensor's strides if no byte of it is 2^31 away from the first.
bool brief_strides(const Strided<int64_t>& x, const TensorView& sizes, BriefStrides& out) {
  const int64_t strides[3] = {x.batch, x.token, x.head};
  int64_t reach = sizes.sizes[3] * element_bytes(sizes.dtype);
  for (int d = 0; d < 3; ++d) {
    if (!in_32_bits({strides[d], sizes.sizes[d]})) return false;
    reach += (strides[d] < 0 ? -strides[d] : strides[d]) * sizes.sizes[d];
  }
  out = {static_cast<int32_t>(x.batch), static_cast<int32_t>(x.token), static_cast<int32_t>(x.head)};
  return in_32_bits({reach});
}

// Where one side comes from and goes to: contiguous, or where it was.
bool brief_side(const AnyArgs& a, const Side<int64_t>& side, const TensorView& x, BriefStrides& from, BriefStrides& to,
                char*& out) {
  if (side.heads == 0) return true;
  Strided<int64_t> made = side.from;
  if (!a.inplace)
    made.head = 2 * a.half_bytes, made.token = made.head * side.heads, made.batch = made.token * x.sizes[1];
  out = a.inplace ? const_cast<char*>(side.from.data) : side.to;
  return brief_strides(side.from, x, from) && brief_strides(made, x, to);
}

template <typename T, int V, bool kInterleaved>
Status launch_brief(BriefArgs b, const Call& call, int lanes, const DeviceFacts& facts, cudaStream_t stream) {
  const int64_t room = kThreads / lanes, most = b.q_heads > b.k_heads ? b.q_heads : b.k_heads;
  b.heads_of_block = static_cast<int32_t>(at_most(room, most));
  b.q_blocks = static_cast<int32_t>(divide_up(b.q_heads, b.heads_of_block));
  Launch how(dim3(static_cast<unsigned>(b.q_blocks + divide_up(b.k_heads, b.heads_of_block)),
                  static_cast<unsigned>(call.q.sizes[1]), static_cast<unsigned>(call.q.sizes[0])),
             kThreads, 0, stream);
  how.config.blockDim = dim3(static_cast<unsigned>(lanes), static_cast<unsigned>(b.heads_of_block));
  if (kBriefChained && facts.capability >= 90) how.programmatic();
  const bool same = b.q_from == b.q_to && b.k_from == b.k_to;
  return how(
      same ? rope_forward_brief_kernel<T, V, kInterleaved, true> : rope_forward_brief_kernel<T, V, kInterleaved, false>,
      b);
}

// A thread for every kBriefPairs pairs of a head. False where that is not the usual thing, or are too many threads.
template <typename T, bool kInterleaved>
bool try_brief(const AnyArgs& a, const Call& call, const DeviceFacts& facts, cudaStream_t stream, Status& status) {
  constexpr int64_t kMostGrid = 65535;
  constexpr int V = static_cast<int>(at_most(kVec<T>, kInterleaved ? 2 * kBriefPairs : kBriefPairs));
  const Shape shape(call.q.sizes[3], sizeof(T), kInterleaved, kBriefPairs);
  const int64_t threads = call.tokens() * (a.q.heads + a.k.heads) * shape.chunks;
  const int64_t rows = a.tables.cos_row > a.tables.sin_row ? a.tables.cos_row : a.tables.sin_row;
  const bool usual = a.tables.positions == nullptr && (shape.vector == V || shape.vector == V / 2);
  if (!usual || threads > kBriefThreads * facts.multiprocessors || shape.chunks > kThreads ||
      call.q.sizes[0] > kMostGrid || call.q.sizes[1] > kMostGrid || a.tables.cos_row < 0 || a.tables.sin_row < 0 ||
      !in_32_bits({rows, rows * a.tables.rows})) {
    return false;
  }
  BriefArgs b = {};
  b.q = a.q.from.data, b.k = a.k.from.data, b.cos = a.tables.cos, b.sin = a.tables.sin;
  b.q_heads = static_cast<int32_t>(a.q.heads), b.k_heads = static_cast<int32_t>(a.k.heads);
  b.cos_row = static_cast<int32_t>(a.tables.cos_row), b.sin_row = static_cast<int32_t>(a.tables.sin_row);
  const bool back = a.sign < 0.0f;
  b.first = back ? a.half_bytes : 0, b.apart = back ? -a.half_bytes : a.half_bytes, b.sign = a.sign;
  if (!brief_side(a, a.q, call.q, b.q_from, b.q_to, b.q_out)) return false;
  if (!brief_side(a, a.k, call.k, b.k_from, b.k_to, b.k_out)) return false;
  if (shape.vector == V) {
    status = launch_brief<T, V, kInterleaved>(b, call, shape.chunks, facts, stream);
  } else {
    status = launch_brief<T, V / 2, kInterleaved>(b, call, shape.chunks, facts, stream);
  }
  return true;
}

// Many heads whose halves end within a vector; warps with less than three quarters of their lanes would lose by it.
template <typename T>
bool try_across(const AnyArgs& a, const Call& call, const Shape& shape, cudaStream_t stream, Status& status) {
  const int64_t vectors = shape.chunks;
  const bool whole = shape.vector == kVec<T> / 2 && vectors % 2 == 1 && vectors <= kWarp;
  if (!whole || kWarp / vectors * vectors < kWarp * 3 / 4) return false;
  if ((a.q.heads > 0 && !in_vectors(call.q, 16)) || (a.k.heads > 0 && !in_vectors(call.k, 16))) return false;
  AnyArgs shared = a;
  share_out(kAcrossHeads, shared);
  AcrossArgs args = {};
  static_cast<ForwardArgs<int64_t>&>(args) = shared;
  args.by_vectors = Divisor(static_cast<uint32_t>(vectors)), args.groups = static_cast<int32_t>(kWarp / vectors);
  const int groups = kThreads / kWarp * args.groups;
  status = launch_pieces(args, rope_forward_across_kernel<T>, kWarp, groups, call, stream);
  return true;
}

template <typename T, int V, bool kInterleaved, bool kNorm>
Status launch_vectors(AnyArgs& a, const Call& call, const Shape& shape, const DeviceFacts& facts, cudaStream_t stream) {
  using S = Turned<T, V, kInterleaved, kNorm>;
  const int lanes = kNorm ? shape.sum_lanes() : shape.lanes(S::kChunks);
  a.chunks = shape.chunks;
  Status status = Status::kOk;
  if constexpr (!kNorm) {
    if (try_brief<T, kInterleaved>(a, call, facts, stream, status)) return status;
  }
  if (launch_few<T, V, kInterleaved, kNorm>(a, call, lanes, facts, stream, status)) return status;
  if constexpr (!kNorm && !kInterleaved && sizeof(T) == 2 && V == kVec<T> / 2) {
    if (try_across<T>(a, call, shape, stream, status)) return status;
  }
  share_out(kNorm ? 8 : 4, a);
  const ForwardArgs<int64_t>& args = a;
  return launch_pieces(args, rope_forward_kernel<T, V, kInterleaved, kNorm>, lanes, kThreads / lanes, call, stream);
}

template <typename T, bool kNorm>
Status launch_any(AnyArgs& a, const Call& call, const Shape& shape, cudaStream_t stream) {
  share_out(4, a);
  a.columns[0] = call.q.strides[3], a.columns[1] = call.k.strides[3];
  a.weight_columns[0] = call.q_weight.strides[0], a.weight_columns[1] = call.k_weight.strides[0];
  a.half = static_cast<int32_t>(call.q.sizes[3] / 2), a.chunk_bits = shape.chunk_bits();
  a.interleaved = call.interleaved;
  const int lanes = shape.sum_lanes();
  return launch_pieces(a, rope_forward_any_kernel<T, kNorm>, lanes, kThreads / lanes, call, stream);
}

template <typename T, bool kInterleaved, bool kNorm>
Status launch_dtype(AnyArgs& a, const Call& call, const DeviceFacts& facts, cudaStream_t stream) {
  const int64_t width = call.q.sizes[3];
  const Shape shape(width, sizeof(T), kInterleaved, kLanePairs);
  const int bytes = shape.vector * static_cast<int>(sizeof(T));
  // With QK-norm the shortest vectors would be many to a lane.
  bool vectors = shape.vector > 1 && bytes >= (kNorm ? 8 : 4) && in_vectors(a.any_tables, shape.pairs, width / 2);
  if (a.q.heads > 0) vectors = vectors && in_vectors(call.q, bytes);
  if (a.k.heads > 0) vectors = vectors && in_vectors(call.k, bytes);
  for (const TensorView* weight : {&call.q_weight, &call.k_weight}) {
    vectors = vectors && (!weight->present() || (weight->strides[0] == 1 && is_aligned(weight->data, 16)));
  }
  if (!vectors) return launch_any<T, kNorm>(a, call, shape, stream);
  if (bytes == 16) return launch_vectors<T, kVec<T>, kInterleaved, kNorm>(a, call, shape, facts, stream);
  if constexpr (sizeof(T) == 2 && !kNorm) {
    if (bytes == 4) return launch_vectors<T, 2, kInterleaved, kNorm>(a, call, shape, facts, stream);
  }
  return launch_vectors<T, kVec<T> / 2, kInterleaved, kNorm>(a, call, shape, facts, stream);
}

Status run(const Call& call, const TensorView& cos, const TensorView& sin, const TensorView& positions, double eps,
           bool inverse, bool inplace, Stream stream) {
  Status status = check_heads(call.q, call.k);
  if (status == Status::kOk) status = check_tables(call.q, cos, sin, positions);
  if (status == Status::kOk) status = check_weights(call.q, call.q_weight, call.k_weight);
  if (status != Status::kOk) return status;
  // What only QK-norm makes, and only of what is turned.
  for (const TensorView* rstd : {&call.q_rstd, &call.k_rstd}) {
    if (rstd->present() && !(call.normed && call.q_wanted && call.k_wanted)) return Status::kBadShape;
  }
  if (inplace && !(is_spread_out(call.q) && is_spread_out(call.k))) return Status::kBadShape;
  if (!(static_cast<float>(eps) > 0.0f) || !std::isfinite(static_cast<float>(eps))) return Status::kBadScalar;
  const DeviceGuard guard(stream.device);
  if (!guard.ok()) return Status::kBadDevice;
  AnyArgs a = {};
  a.q.heads = call.q_wanted ? call.q.sizes[2] : 0, a.k.heads = call.k_wanted ? call.k.sizes[2] : 0;
  const int64_t tokens = call.q.sizes[0] * call.q.sizes[1], width = call.q.sizes[3];
  if (tokens * (a.q.heads + a.k.heads) == 0) return Status::kOk;
  a.q.from = strided(call.q), a.k.from = strided(call.k);
  if (!inplace) a.q.to = static_cast<char*>(call.q_to), a.k.to = static_cast<char*>(call.k_to);
  a.any_tables = make_tables(cos, sin, positions), a.tables = a.any_tables;
  const int64_t bytes = width * element_bytes(call.q.dtype);
  a.half_bytes = static_cast<int32_t>(bytes / 2);
  a.sign = inverse ? -1.0f : 1.0f, a.inplace = inplace;
  a.norm = {{static_cast<const char*>(call.q_weight.data), static_cast<const char*>(call.k_weight.data)},
            {static_cast<float*>(call.q_rstd.data), static_cast<float*>(call.k_rstd.data)},
            {call.q_weight.dtype, call.k_weight.dtype},
            1.0f / static_cast<float>(width),
            static_cast<float>(eps)};
  const DeviceFacts& facts = device_facts(guard.device());
  a.large = 2 * tokens * (a.q.heads + a.k.heads) * bytes > facts.l2_bytes;
  return with_dtype(call.q.dtype, [&](auto zero) {
    using T = decltype(zero);
    if (call.interleaved) {
      return call.normed ? launch_dtype<T, true, true>(a, call, facts, cuda_stream(stream))
                         : launch_dtype<T, true, false>(a, call, facts, cuda_stream(stream));
    }
    return call.normed ? launch_dtype<T, false, true>(a, call, facts, cuda_stream(stream))
                       : launch_dtype<T, false, false>(a, call, facts, cuda_stream(stream));
  });
}

}  // namespace
}  // namespace rope

Status rope_forward(const Input& q, const Input& k, const Input& cos, const Input& sin, const OptionalInput& positions,
                    const OptionalInput& q_weight, const OptionalInput& k_weight, double eps, bool interleaved,
                    bool inverse, const Like<0>& q_out, const Like<1>& k_out, const RowStat<0>& q_rstd,
                    const RowStat<1>& k_rstd, Stream stream) {
  const rope::Call call{q,          k,          q_weight,        k_weight,        q_rstd,      k_rstd,
                        q_out.data, k_out.data, q_out.present(), k_out.present(), interleaved, q_weight.present()};
  return rope::run(call, cos, sin, positions, eps, inverse, false, stream);
}

Status rope_inplace(const InOut& q, const InOut& k, const Input& cos, const Input& sin, const OptionalInput& positions,
                    const OptionalInput& q_weight, const OptionalInput& k_weight, double eps, bool interleaved,
                    bool inverse, Stream stream) {
  const TensorView none;
  const rope::Call call{q,      k,      q_weight, k_weight, none,        none,
                        q.data, k.data, true,     true,     interleaved, q_weight.present()};
  return rope::run(call, cos, sin, positions, eps, inverse, true, stream);
}

}  // namespace fuselm
