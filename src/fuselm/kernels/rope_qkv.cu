// RoPE over packed q, k and v, backward: dq and dk turned back and dv as it is, all into one tensor, which is the
// gradient of one matmul's output. Forward is rope.cu's, over views. Contract: rope_qkv.py; who has which pairs:
// rope.cuh.
//
// Traffic. dq, dk and dv are read once and dqkv is written once. (By rope_forward and torch.cat two thirds of that are
// moved twice.) A job takes up to four heads of a token's q, k or v, all of whose loads are under way together; those
// of q and k share the token's cosines and sines.
#include "rope.cuh"

namespace fuselm {
namespace rope {
namespace {

constexpr int kThreads = 128;
constexpr int kAtOnce = 4;                   // heads of a job whose loads are under way together
constexpr int64_t kMostSlots = 1 << 20;      // of a token
constexpr int kParts = 3, kTurnedParts = 2;  // q and k, and then v
constexpr int kBlocks = 5;                   // of a multiprocessor: with six some kernels would spill

// What is q's, k's or v's own.
struct JoinPart {
  Strided<int64_t> from;
  int64_t heads, columns;  // columns: the stride from one to the next, in elements
  int64_t to;              // bytes from a token's first head to the part's
  int32_t slots;           // jobs of a token; each takes every slots-th head
};

struct JoinArgs {
  int32_t chunks, half_bytes, turns;  // turns: heads of a job, the most that one has
  bool large;
  JoinPart parts[kParts];
  char* to;
  int64_t to_token;  // bytes
  AnyTables tables;
  Jobs jobs;
  // Of elements one by one.
  int32_t half, chunk_bits;
  bool interleaved;
};

// What a thread works on, decided once.
struct JoinJob {
  const char* from;
  char* to;
  int64_t heads, from_head, head, step, columns;
  bool turned;

  __device__ JoinJob(const JoinArgs& a, const Job& job) {
    int which = 0, slot = job.slot;
    for (; which < kParts - 1 && slot >= a.parts[which].slots; ++which) slot -= a.parts[which].slots;
    const JoinPart& part = a.parts[which];
    from = part.from.of(job), from_head = part.from.head, columns = part.columns;
    heads = job.live ? part.heads : 0, head = slot, step = part.slots;
    to = a.to + job.token * a.to_token + part.to;
    turned = which < kTurnedParts;
  }
  __device__ int64_t at(int turn) const { return head + turn * step; }
  __device__ const char* source(int64_t one) const { return from + one * from_head; }
  __device__ char* target(int64_t one, int bytes) const { return to + one * bytes; }
};

template <typename T, int V, bool kInterleaved>
__global__ void __launch_bounds__(kThreads, kBlocks) rope_qkv_backward_kernel(const __grid_constant__ JoinArgs a) {
  using S = Part<T, V, kInterleaved, V, false>;
  const Job job(a.jobs, blockIdx.x);
  if (!job.live) return;
  const JoinJob mine(a, job);
  const Cut cut{job.lane, static_cast<int32_t>(blockDim.x), a.chunks, a.half_bytes};
  const uint64_t policy = read_policy(a.large);
  typename S::Vectors raw[kAtOnce];
  auto load = [&](int turn) {
#pragma unroll
    for (int h = 0; h < kAtOnce; ++h) {
      const int64_t head = mine.at(turn + h);
      load_part<S>(mine.source(head), head < mine.heads, cut, policy, raw[h]);
    }
  };
  load(0);
  typename S::Floats cos, sin;
  if (mine.turned) load_angles<S>(a.tables, a.tables.position(job).number(), cut, cos, sin);
#pragma unroll 1
  for (int done = 0;;) {
#pragma unroll
    for (int h = 0; h < kAtOnce; ++h) {
      const int64_t head = mine.at(done + h);
      if (mine.turned) {
        typename S::Floats first, second;
        get_pairs<S>(raw[h], first, second);
#pragma unroll
        for (int i = 0; i < S::kPairs; ++i) turn(first[i], second[i], cos[i], -sin[i]);
        set_pairs<S>(first, second, raw[h]);
      }
      store_part<S>(mine.target(head, 2 * a.half_bytes), head < mine.heads, cut, raw[h]);
    }
    done += kAtOnce;
    if (done >= a.turns) return;
    load(done);
  }
}

// Any strides, any alignment: elements one by one, by the lanes of the vectors.
template <typename T>
__global__ void __launch_bounds__(kThreads, 4) rope_qkv_backward_any_kernel(const __grid_constant__ JoinArgs a) {
  const Job job(a.jobs, blockIdx.x);
  if (!job.live) return;
  const JoinJob mine(a, job);
  const AnyCut cut{job.lane, static_cast<int32_t>(blockDim.x), kLanePairs, a.half, a.chunk_bits, a.interleaved};
  float cos[kLanePairs], sin[kLanePairs];
  if (mine.turned) a.tables.load(a.tables.position(job).number(), true, cut, cos, sin);
#pragma unroll 1
  for (int done = 0; done < a.turns; ++done) {
    const int64_t head = mine.at(done);
    if (head >= mine.heads) return;
    float first[kLanePairs], second[kLanePairs];
    load_any<T>(mine.source(head), mine.columns, true, cut, first, second);
    if (mine.turned) {
#pragma unroll
      for (int i = 0; i < kLanePairs; ++i) turn(first[i], second[i], cos[i], -sin[i]);
    }
    store_any<T>(mine.target(head, 2 * a.half_bytes), 1, true, cut, first, second);
  }
}

// ---- launchers ----

// So many heads to a job, more only of a token that has millions; how many jobs a token has.
int64_t share_out(JoinArgs& a) {
  int64_t slots = 0;
  a.turns = 1;
  for (JoinPart& part : a.parts) {
    const int64_t least = divide_up(part.heads, kMostSlots), most = least > kAtOnce ? least : kAtOnce;
    part.slots = static_cast<int32_t>(divide_up(part.heads, most));
    const int64_t turns = part.slots > 0 ? divide_up(part.heads, part.slots) : 0;
    if (turns > a.turns) a.turns = static_cast<int32_t>(turns);
    slots += part.slots;
  }
  return slots;
}

template <typename Kernel>
Status launch_join(const JoinArgs& whole, Kernel kernel, int lanes, int64_t slots, const TensorView& dq,
                   cudaStream_t stream) {
  const int64_t tokens = dq.sizes[1];
  return for_pieces(dq.sizes[0], tokens, slots, [&](const Piece& piece) {
    JoinArgs a = whole;
    a.jobs = Jobs(piece.batches, piece.tokens, slots);
    for (JoinPart& part : a.parts) move_to(piece, part.from);
    a.to += piece.first_token(tokens) * a.to_token;
    move_to(piece, a.tables);
    Launch how(dim3(static_cast<unsigned>(divide_up(a.jobs.count, kThreads / lanes))), kThreads, 0, stream);
    how.config.blockDim = dim3(static_cast<unsigned>(lanes), static_cast<unsigned>(kThreads / lanes));
    return how(kernel, a);
  });
}

template <typename T, bool kInterleaved>
Status launch_dtype(JoinArgs& a, const TensorView (&from)[kParts], cudaStream_t stream) {
  const int64_t half = from[0].sizes[3] / 2, slots = share_out(a);
  const Shape shape(2 * half, sizeof(T), kInterleaved, kLanePairs);
  const int bytes = shape.vector * static_cast<int>(sizeof(T));
  bool vectors = shape.vector > 1 && bytes >= 4 && in_vectors(a.tables, shape.pairs, half) && is_aligned(a.to, 16);
  for (const TensorView& x : from) vectors = vectors && (x.sizes[2] == 0 || in_vectors(x, bytes));
  a.chunks = shape.chunks, a.half = static_cast<int32_t>(half), a.chunk_bits = shape.chunk_bits();
  a.interleaved = kInterleaved;
  auto run = [&](auto kernel, int lanes) { return launch_join(a, kernel, lanes, slots, from[0], stream); };
  if (!vectors) return run(rope_qkv_backward_any_kernel<T>, shape.sum_lanes());
  // A lane has a vector of each half or, of neighbours, two vectors.
  const int lanes = shape.lanes(kInterleaved ? 2 : 1);
  if (bytes == 16) return run(rope_qkv_backward_kernel<T, kVec<T>, kInterleaved>, lanes);
  if constexpr (sizeof(T) == 2) {
    if (bytes == 4) return run(rope_qkv_backward_kernel<T, 2, kInterleaved>, lanes);
  }
  return run(rope_qkv_backward_kernel<T, kVec<T> / 2, kInterleaved>, lanes);
}

Status check_parts(const TensorView (&from)[kParts], const TensorView& to) {
  Status status = check_heads(from[0], from[1]);
  if (status == Status::kOk) status = check_heads(from[0], from[2]);
  if (status != Status::kOk) return status;
  if (from[1].sizes[2] != from[2].sizes[2] || to.dtype != from[0].dtype || to.rank != 4) return Status::kBadShape;
  const int64_t heads = from[0].sizes[2] + 2 * from[1].sizes[2];
  return to.sizes[2] == heads ? Status::kOk : Status::kBadShape;
}

}  // namespace
}  // namespace rope

Status rope_qkv_backward(const Input& dq, const Input& dk, const Input& dv, const Input& cos, const Input& sin,
                         const OptionalInput& positions, bool interleaved, const Joined<0, 1, 2>& dqkv, Stream stream) {
  if (!dqkv.present()) return Status::kOk;
  const TensorView from[rope::kParts] = {dq, dk, dv};
  Status status = rope::check_parts(from, dqkv);
  if (status == Status::kOk) status = rope::check_tables(dq, cos, sin, positions);
  if (status != Status::kOk) return status;
  const DeviceGuard guard(stream.device);
  if (!guard.ok()) return Status::kBadDevice;
  const int64_t tokens = dq.sizes[0] * dq.sizes[1], bytes = dq.sizes[3] * element_bytes(dq.dtype);
  if (tokens * dqkv.sizes[2] == 0) return Status::kOk;
  rope::JoinArgs a = {};
  int64_t heads = 0;
  for (int i = 0; i < rope::kParts; ++i) {
    rope::JoinPart& part = a.parts[i];
    part.from = rope::strided(from[i]), part.columns = from[i].strides[3];
    part.heads = from[i].sizes[2], part.to = heads * bytes;
    heads += part.heads;
  }
  a.half_bytes = static_cast<int32_t>(bytes / 2), a.to_token = heads * bytes;
  a.to = static_cast<char*>(dqkv.data), a.tables = rope::make_tables(cos, sin, positions);
  a.large = 2 * tokens * a.to_token > device_facts(guard.device()).l2_bytes;
  return with_dtype(dq.dtype, [&](auto zero) {
    using T = decltype(zero);
    return interleaved ? rope::launch_dtype<T, true>(a, from, cuda_stream(stream))
                       : rope::launch_dtype<T, false>(a, from, cuda_stream(stream));
  });
}

}  // namespace fuselm
