// Rotary positions with QK-norm, backward: gradients of q, k and their weights. Contract: rope.py; who has which pairs:
// rope.cuh; forward, and backward without QK-norm: rope.cu.
//
// Traffic. What arrives for a head and the head itself are read once, its gradient is written once. The blocks stay:
// each takes jobs of q, one after another, and then jobs of k, and adds up the weight's gradient in registers over all
// of them; a lane has the same columns of every head. Each block leaves one partial row for q's weight and one for
// k's, and a second kernel adds the partial rows in a fixed order. No atomics. Of a few tokens q and k have blocks of
// their own, and a thread has all its loads under way together; where one block has all of a side, its sum is the
// gradient, and there is no second kernel.
#include "rope.cuh"

namespace fuselm {
namespace rope {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / kWarp;
constexpr int kBlocks = 2;      // of a multiprocessor
constexpr int kHeadsOfJob = 4;  // what one look at the tables serves
constexpr int kMostSlots = 1 << 20;
constexpr int kFewHeads = 2;  // of a job where tokens are few: 32 heads of 128 are a block

// A lane has four pairs of a head, of the widest eight: beside each pair's numbers wait its cosine, sine, weights and
// sums, and registers are what there is least of.
constexpr int lane_pairs(int64_t width) { return width > kMaxHead / 2 ? 8 : 4; }

struct BackwardSide {
  Jobs jobs;
  Strided<int64_t> dy, x;
  char* dx;           // contiguous; null: not wanted
  const float* rstd;  // contiguous
  const char* weight;
  char* dweight;  // null: not wanted
  DType dtype;    // the weight's
  int64_t heads;
  int32_t slots, turns;
  int64_t dy_columns, x_columns, weight_columns;  // in elements, for what is not moved in vectors
};

struct BackwardArgs {
  BackwardSide sides[2];  // q's and k's
  AnyTables tables;
  // A row for each block, and `partial_apart` floats further on those of k; null where no weight's gradient is wanted.
  float* partial;
  int64_t partial_apart;
  int32_t partial_stride, width;
  int32_t lane_pairs, chunks, half_bytes, chunk_bits;
  float inverse_width;
  bool large, interleaved;
  bool alone;  // one block has all of a side, and writes the weight's gradient
};

// What a lane knows of a job's token and its weight, and what it has added up so far.
template <int kPairs>
struct Lane {
  using Floats = float[kPairs];
  Floats cos, sin, a_weight, b_weight, a_sum, b_sum;  // sin with the other sign: that turns back

  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) a_sum[i] = b_sum[i] = 0.0f;
  }
  // d becomes what arrives for the weight's product, turned back, and x becomes xhat.
  __device__ void turn_back(float rstd, Floats& da, Floats& db, Floats& xa, Floats& xb) const {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      turn(da[i], db[i], cos[i], sin[i]);
      xa[i] = __fmul_rn(xa[i], rstd), xb[i] = __fmul_rn(xb[i], rstd);
    }
  }
  __device__ void add(const Floats& da, const Floats& db, const Floats& xa, const Floats& xb) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      a_sum[i] = fmaf(da[i], xa[i], a_sum[i]), b_sum[i] = fmaf(db[i], xb[i], b_sum[i]);
    }
  }
  __device__ void weigh(Floats& da, Floats& db) const {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) da[i] = __fmul_rn(da[i], a_weight[i]), db[i] = __fmul_rn(db[i], b_weight[i]);
  }
};

// d becomes dx; `mean` is that of d * xhat over the head.
template <int kPairs>
__device__ inline void finish(float rstd, float mean, float (&da)[kPairs], float (&db)[kPairs],
                              const float (&xa)[kPairs], const float (&xb)[kPairs]) {
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    da[i] = __fmul_rn(rstd, fmaf(-xa[i], mean, da[i])), db[i] = __fmul_rn(rstd, fmaf(-xb[i], mean, db[i]));
  }
}

// Adds up what the lanes of a block have, and writes it as the block's partial row. Lanes of a warp that have the same
// columns meet by shuffles, warps in shared memory.
template <int kPairs>
__device__ inline void leave_sums(const BackwardArgs& a, int side, const AnyCut& cut, Lane<kPairs>& lane,
                                  float (&sums)[kWarps][kMaxHead]) {
  if (a.partial == nullptr) return;
#pragma unroll 1
  for (int step = cut.lanes; step < kWarp; step *= 2) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      lane.a_sum[i] += __shfl_xor_sync(0xffffffffu, lane.a_sum[i], step);
      lane.b_sum[i] += __shfl_xor_sync(0xffffffffu, lane.b_sum[i], step);
    }
  }
  const int thread = threadIdx.y * blockDim.x + threadIdx.x, warp = thread / kWarp;
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    if (thread % kWarp >= cut.lanes || !cut.has(i)) continue;
    sums[warp][cut.first(i)] = lane.a_sum[i], sums[warp][cut.second(i)] = lane.b_sum[i];
  }
  __syncthreads();
  float* row = a.partial + side * a.partial_apart + static_cast<int64_t>(blockIdx.x) * a.partial_stride;
  char* const out = a.sides[side].dweight;
  for (int column = thread; column < a.partial_stride; column += kThreads) {
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += column < a.width ? sums[w][column] : 0.0f;
    if (!a.alone) {
      row[column] = sum;
    } else if (out != nullptr && column < a.width) {
      set_element(out, a.sides[side].dtype, column, sum);
    }
  }
  __syncthreads();  // the other side's sums take the place of these
}

// A job's heads of one side, for one thread.
struct Heads {
  const char *dy, *x;
  char* dx;
  const float* rstd;
  int64_t count;  // 0 where there is no job

  __device__ Heads(const BackwardSide& side, const Job& job) {
    dy = side.dy.of(job), x = side.x.of(job);
    dx = side.dx, rstd = side.rstd + static_cast<int64_t>(job.token) * side.heads;
    count = job.live ? side.heads : 0;
  }
};

// kHeads heads of a lane: dy becomes dx, and what they add to the weight's gradient is added.
template <typename S, int kPairs, int kHeads>
__device__ inline void turn_heads(Lane<kPairs>& lane, int lanes, float inverse_width, const float (&rstd)[kHeads],
                                  typename S::Vectors (&dy)[kHeads], typename S::Vectors (&x)[kHeads]) {
  typename S::Floats da, db, xa, xb;
  float means[kHeads];
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    get_pairs<S>(dy[h], da, db), get_pairs<S>(x[h], xa, xb);
    lane.turn_back(rstd[h], da, db, xa, xb);
    lane.add(da, db, xa, xb);
    lane.weigh(da, db);
    means[h] = sum_of_products(da, db, xa, xb);
  }
  sum_lanes(lanes, means);
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    if constexpr (kHeads > 1) {  // made once more: two heads' numbers have no room beside the sums
      forget<S>(dy[h]), forget<S>(x[h]);
      get_pairs<S>(dy[h], da, db), get_pairs<S>(x[h], xa, xb);
      lane.turn_back(rstd[h], da, db, xa, xb);
      lane.weigh(da, db);
    }
    finish(rstd[h], means[h] * inverse_width, da, db, xa, xb);
    set_pairs<S>(da, db, dy[h]);
  }
}

// A few tokens: a group of lanes has one job, of q or of k, and asks for all of it at once.
template <typename T, int V, bool kInterleaved, int kPairs>
__global__ void __launch_bounds__(kThreads, 1) rope_backward_few_kernel(const __grid_constant__ BackwardArgs a) {
  using S = Part<T, V, kInterleaved, kPairs, true>;
  __shared__ float sums[kWarps][kMaxHead];
  const int lanes = blockDim.x;
  const Cut cut{static_cast<int32_t>(threadIdx.x), lanes, a.chunks, a.half_bytes};
  const BackwardSide& side = a.sides[blockIdx.y];
  const Job job(side.jobs, blockIdx.x);
  const Heads heads(side, job);
  typename S::Vectors dy[kFewHeads], x[kFewHeads];
  float rstd[kFewHeads];
#pragma unroll
  for (int h = 0; h < kFewHeads; ++h) {
    const int64_t head = job.slot + h * side.slots;
    const bool live = head < heads.count;
    load_part<S>(heads.dy + head * side.dy.head, live, cut, Usual{}, dy[h]);
    load_part<S>(heads.x + head * side.x.head, live, cut, Usual{}, x[h]);
    rstd[h] = live ? __ldg(heads.rstd + head) : 0.0f;
  }
  Weight<S> weight;
  weight.load(side.weight, side.dtype, cut);
  Lane<kPairs> lane;
  lane.clear();
  load_angles<S>(a.tables, a.tables.position(job).number(), cut, lane.cos, lane.sin);
#pragma unroll
  for (float& one : lane.sin) one = -one;
  weight.get(side.dtype, lane.a_weight, lane.b_weight);
  turn_heads<S>(lane, lanes, a.inverse_width, rstd, dy, x);
#pragma unroll
  for (int h = 0; h < kFewHeads; ++h) {
    const int64_t head = job.slot + h * side.slots;
    char* to = heads.dx + (static_cast<int64_t>(job.token) * side.heads + head) * (2 * a.half_bytes);
    store_part<S>(to, heads.dx != nullptr && head < heads.count, cut, dy[h]);
  }
  const AnyCut columns{cut.lane, lanes, kPairs, a.width / 2, a.chunk_bits, kInterleaved};
  leave_sums(a, blockIdx.y, columns, lane, sums);
}

template <typename T, int V, bool kInterleaved, int kPairs>
__global__ void __launch_bounds__(kThreads, kPairs > 4 ? 1 : kBlocks)
    rope_backward_kernel(const __grid_constant__ BackwardArgs a) {
  using S = Part<T, V, kInterleaved, kPairs, true>;
  constexpr int kHeads = (sizeof(T) == 4 || S::kChunks > 1 ? 8 : 16) / kPairs;  // whose loads are under way together
  __shared__ float sums[kWarps][kMaxHead];
  const int lanes = blockDim.x;
  const Cut cut{static_cast<int32_t>(threadIdx.x), lanes, a.chunks, a.half_bytes};
  const AnyCut columns{cut.lane, lanes, kPairs, a.width / 2, a.chunk_bits, kInterleaved};
  const uint64_t policy = read_policy(a.large);
#pragma unroll 1
  for (int which = 0; which < 2; ++which) {
    const BackwardSide& side = a.sides[which];
    Lane<kPairs> lane;
    lane.clear();
    Weight<S> weight;
    weight.load(side.weight, side.dtype, cut);
    weight.get(side.dtype, lane.a_weight, lane.b_weight);
#pragma unroll 1
    for (uint32_t block = blockIdx.x; block * blockDim.y < side.jobs.count; block += gridDim.x) {
      const Job job(side.jobs, block);
      const Heads heads(side, job);
      typename S::Vectors dy[kHeads], x[kHeads];
      float rstd[kHeads];
      auto load = [&](int turn) {
#pragma unroll
        for (int h = 0; h < kHeads; ++h) {
          const int64_t head = job.slot + static_cast<int64_t>(turn + h) * side.slots;
          const bool live = head < heads.count;
          load_part<S>(heads.dy + head * side.dy.head, live, cut, policy, dy[h]);
          load_part<S>(heads.x + head * side.x.head, live, cut, policy, x[h]);
          rstd[h] = live ? __ldg(heads.rstd + head) : 0.0f;
        }
      };
      load(0);
      load_angles<S>(a.tables, a.tables.position(job).number(), cut, lane.cos, lane.sin);
#pragma unroll
      for (float& one : lane.sin) one = -one;
#pragma unroll 1
      for (int done = 0;;) {
        turn_heads<S>(lane, lanes, a.inverse_width, rstd, dy, x);
#pragma unroll
        for (int h = 0; h < kHeads; ++h) {
          const int64_t head = job.slot + static_cast<int64_t>(done + h) * side.slots;
          char* to = heads.dx + (static_cast<int64_t>(job.token) * side.heads + head) * (2 * a.half_bytes);
          store_part<S>(to, heads.dx != nullptr && head < heads.count, cut, dy[h]);
        }
        done += kHeads;
        if (done >= side.turns) break;
        load(done);
      }
    }
    leave_sums(a, which, columns, lane, sums);
  }
}

// Any strides, any alignment: elements one by one, by the lanes and in the order of the vectors.
template <typename T>
__global__ void __launch_bounds__(kThreads, 1) rope_backward_any_kernel(const __grid_constant__ BackwardArgs a) {
  __shared__ float sums[kWarps][kMaxHead];
  const int lanes = blockDim.x;
  const AnyCut cut{static_cast<int32_t>(threadIdx.x), lanes, a.lane_pairs, a.width / 2, a.chunk_bits, a.interleaved};
#pragma unroll 1
  for (int which = 0; which < 2; ++which) {
    const BackwardSide& side = a.sides[which];
    Lane<kLanePairs> lane;
    lane.clear();
    load_any_weights(side.weight, side.dtype, side.weight_columns, cut, lane.a_weight, lane.b_weight);
#pragma unroll 1
    for (uint32_t block = blockIdx.x; block * blockDim.y < side.jobs.count; block += gridDim.x) {
      const Job job(side.jobs, block);
      const Heads heads(side, job);
      a.tables.load(a.tables.position(job).number(), job.live, cut, lane.cos, lane.sin);
#pragma unroll
      for (float& one : lane.sin) one = -one;
#pragma unroll 1
      for (int done = 0; done < side.turns; ++done) {
        const int64_t head = job.slot + static_cast<int64_t>(done) * side.slots;
        const bool live = head < heads.count;
        const float rstd = live ? heads.rstd[head] : 0.0f;
        float da[kLanePairs], db[kLanePairs], xa[kLanePairs], xb[kLanePairs];
        load_any<T>(heads.dy + head * side.dy.head, side.dy_columns, live, cut, da, db);
        load_any<T>(heads.x + head * side.x.head, side.x_columns, live, cut, xa, xb);
        lane.turn_back(rstd, da, db, xa, xb);
        lane.add(da, db, xa, xb);
        lane.weigh(da, db);
        float mean[1] = {sum_of_products(da, db, xa, xb)};
        sum_lanes(lanes, mean);
        finish(rstd, mean[0] * a.inverse_width, da, db, xa, xb);
        char* to = heads.dx + (static_cast<int64_t>(job.token) * side.heads + head) * (2 * a.half_bytes);
        store_any<T>(to, 1, live && heads.dx != nullptr, cut, da, db);
      }
    }
    leave_sums(a, which, cut, lane, sums);
  }
}

// ---- launchers ----

int64_t most_blocks(const DeviceFacts& facts) { return int64_t{kBlocks} * facts.multiprocessors; }
int64_t padded(int64_t width) { return divide_up(width, 4) * 4; }
int64_t workspace_bytes(int64_t width, const DeviceFacts& facts) {
  return 2 * most_blocks(facts) * padded(width) * static_cast<int64_t>(sizeof(float));
}

void fill_side(BackwardSide& side, const TensorView& dy, const TensorView& x, const TensorView& rstd,
               const TensorView& weight, const TensorView& dx, const TensorView& dweight) {
  side.dy = strided(dy), side.x = strided(x), side.dx = static_cast<char*>(dx.data);
  side.rstd = static_cast<const float*>(rstd.data);
  side.weight = static_cast<const char*>(weight.data), side.dtype = weight.dtype;
  side.dweight = static_cast<char*>(dweight.data);
  side.heads = dx.present() || dweight.present() ? x.sizes[2] : 0;
  const int64_t least = divide_up(side.heads, kMostSlots), most = least > kHeadsOfJob ? least : kHeadsOfJob;
  side.slots = static_cast<int32_t>(divide_up(side.heads, most));
  side.turns = side.slots > 0 ? static_cast<int32_t>(divide_up(side.heads, side.slots)) : 0;
  side.dy_columns = dy.strides[3], side.x_columns = x.strides[3], side.weight_columns = weight.strides[0];
}

// The kernel for every piece of the tokens; how many partial rows they leave.
template <typename Kernel>
Status launch_pieces(const BackwardArgs& whole, Kernel kernel, int64_t batches, int64_t tokens, int lanes,
                     const DeviceFacts& facts, cudaStream_t stream, int64_t& partial_rows) {
  const int64_t slots = whole.sides[0].slots > whole.sides[1].slots ? whole.sides[0].slots : whole.sides[1].slots;
  const int groups = kThreads / lanes;
  int64_t pieces = 0;
  for_pieces(batches, tokens, slots, [&](const Piece&) { return ++pieces, Status::kOk; });
  return for_pieces(batches, tokens, slots, [&](const Piece& piece) {
    BackwardArgs a = whole;
    int64_t jobs = 0;
    for (BackwardSide& side : a.sides) {
      side.jobs = Jobs(piece.batches, piece.tokens, side.slots);
      jobs = side.jobs.count > jobs ? side.jobs.count : jobs;
      move_to(piece, side.dy), move_to(piece, side.x);
      const int64_t heads = piece.first_token(tokens) * side.heads;  // before the piece's
      if (side.dx != nullptr) side.dx += heads * 2 * a.half_bytes;
      side.rstd += heads;
    }
    move_to(piece, a.tables);
    const int64_t room = most_blocks(facts) / pieces, blocks = at_most(divide_up(jobs, groups), room > 1 ? room : 1);
    if (a.partial != nullptr) a.partial += partial_rows * a.partial_stride;
    partial_rows += blocks;
    Launch how(dim3(static_cast<unsigned>(blocks)), kThreads, 0, stream);
    how.config.blockDim = dim3(static_cast<unsigned>(lanes), static_cast<unsigned>(groups));
    return how(kernel, a);
  });
}

// A thread for every part of kFewHeads heads where the card has a multiprocessor for each block.
template <typename Kernel>
bool launch_few(BackwardArgs& a, Kernel kernel, int64_t batches, int64_t tokens, int lanes, const DeviceFacts& facts,
                cudaStream_t stream, int64_t& partial_rows, Status& status) {
  const int64_t groups = kThreads / lanes;
  int64_t slots[2], most = 1;
  for (int i : {0, 1}) {
    slots[i] = divide_up(a.sides[i].heads, kFewHeads);
    most = slots[i] > most ? slots[i] : most;
  }
  const int64_t fitting = groups * (facts.multiprocessors / 2);
  if (most > fitting || tokens > fitting || batches > fitting || batches * tokens * most > fitting) return false;
  for (int i : {0, 1}) {
    a.sides[i].slots = static_cast<int32_t>(slots[i]);
    a.sides[i].jobs = Jobs(batches, tokens, slots[i]);
  }
  partial_rows = divide_up(batches * tokens * most, groups);
  a.alone = partial_rows == 1;
  Launch how(dim3(static_cast<unsigned>(partial_rows), 2), kThreads, 0, stream);
  how.config.blockDim = dim3(static_cast<unsigned>(lanes), static_cast<unsigned>(groups));
  status = how(kernel, a);
  return true;
}

template <typename T, bool kInterleaved>
Status launch_dtype(BackwardArgs& a, const TensorView (&heads)[4], const TensorView (&weights)[2],
                    const DeviceFacts& facts, cudaStream_t stream, int64_t& partial_rows) {
  const int64_t batches = heads[0].sizes[0], tokens = heads[0].sizes[1], width = heads[0].sizes[3];
  const Shape shape(width, sizeof(T), kInterleaved, lane_pairs(width));
  const int bytes = shape.vector * static_cast<int>(sizeof(T));
  bool vectors = in_vectors(a.tables, shape.pairs, width / 2);
  for (const TensorView& x : heads) vectors = vectors && (x.sizes[2] == 0 || in_vectors(x, bytes));
  for (const TensorView& w : weights) vectors = vectors && w.strides[0] == 1 && is_aligned(w.data, 16);
  a.lane_pairs = shape.lane_pairs, a.chunks = shape.chunks, a.chunk_bits = shape.chunk_bits();
  a.interleaved = kInterleaved;
  const int lanes = shape.sum_lanes();
  Status status = Status::kOk;
  auto run = [&](auto kernel, auto few) {
    if (launch_few(a, few, batches, tokens, lanes, facts, stream, partial_rows, status)) return status;
    return launch_pieces(a, kernel, batches, tokens, lanes, facts, stream, partial_rows);
  };
  // The longest vectors that four pairs are, and half as long ones; of eight pairs the longest alone.
  constexpr int V = kInterleaved || sizeof(T) == 4 ? kVec<T> : 4;
  if (vectors && shape.lane_pairs == 8 && shape.vector == kVec<T>) {
    return run(rope_backward_kernel<T, kVec<T>, kInterleaved, 8>,
               rope_backward_few_kernel<T, kVec<T>, kInterleaved, 8>);
  }
  if (vectors && shape.lane_pairs == 4 && shape.vector == V) {
    return run(rope_backward_kernel<T, V, kInterleaved, 4>, rope_backward_few_kernel<T, V, kInterleaved, 4>);
  }
  if constexpr (V * sizeof(T) == 16) {
    if (vectors && shape.lane_pairs == 4 && shape.vector == V / 2) {
      return run(rope_backward_kernel<T, V / 2, kInterleaved, 4>, rope_backward_few_kernel<T, V / 2, kInterleaved, 4>);
    }
  }
  return launch_pieces(a, rope_backward_any_kernel<T>, batches, tokens, lanes, facts, stream, partial_rows);
}

// What belongs to q, or to k.
Status check_side(const TensorView& dy, const TensorView& x, const TensorView& rstd) {
  if (x.dtype != dy.dtype) return Status::kBadDtype;
  if (!same_sizes(dy, x)) return Status::kBadShape;
  if (count_rows(x) == 0) return Status::kOk;  // nothing is read
  if (rstd.dtype != DType::kFloat32) return Status::kBadDtype;
  return is_row_stat(rstd, x) ? Status::kOk : Status::kBadShape;
}

}  // namespace
}  // namespace rope

int64_t rope_backward_workspace(const TensorView& dq_out, Stream stream) {
  const DeviceGuard guard(stream.device);
  if (!guard.ok() || dq_out.rank != 4) return 0;
  return rope::workspace_bytes(dq_out.sizes[3], device_facts(guard.device()));
}

Status rope_backward(const Input& dq_out, const Input& dk_out, const Input& q, const Input& k, const Input& q_rstd,
                     const Input& k_rstd, const Input& cos, const Input& sin, const OptionalInput& positions,
                     const Input& q_weight, const Input& k_weight, bool interleaved, const Like<2>& dq,
                     const Like<3>& dk, const Like<9>& dq_weight, const Like<10>& dk_weight, Workspace workspace,
                     Stream stream) {
  Status status = rope::check_heads(dq_out, dk_out);
  if (status == Status::kOk) status = rope::check_side(dq_out, q, q_rstd);
  if (status == Status::kOk) status = rope::check_side(dk_out, k, k_rstd);
  if (status == Status::kOk) status = rope::check_tables(q, cos, sin, positions);
  if (status == Status::kOk) status = rope::check_weights(q, q_weight, k_weight);
  if (status != Status::kOk) return status;
  if (!q_weight.present()) return Status::kBadShape;
  const DeviceGuard guard(stream.device);
  if (!guard.ok()) return Status::kBadDevice;
  const DeviceFacts& facts = device_facts(guard.device());
  const int64_t width = q.sizes[3], tokens = q.sizes[0] * q.sizes[1];
  const bool sums = dq_weight.present() || dk_weight.present();
  if (sums && workspace.bytes < rope::workspace_bytes(width, facts)) return Status::kBadWorkspace;
  rope::BackwardArgs a = {};
  rope::fill_side(a.sides[0], dq_out, q, q_rstd, q_weight, dq, dq_weight);
  rope::fill_side(a.sides[1], dk_out, k, k_rstd, k_weight, dk, dk_weight);
  a.tables = rope::make_tables(cos, sin, positions);
  a.width = static_cast<int32_t>(width), a.inverse_width = 1.0f / static_cast<float>(width);
  const int64_t bytes = width * element_bytes(q.dtype), heads = a.sides[0].heads + a.sides[1].heads;
  a.half_bytes = static_cast<int32_t>(bytes / 2), a.large = 3 * tokens * heads * bytes > facts.l2_bytes;
  a.partial = sums ? static_cast<float*>(workspace.data) : nullptr;
  a.partial_stride = static_cast<int32_t>(rope::padded(width));
  a.partial_apart = rope::most_blocks(facts) * a.partial_stride;
  const float* const partial[2] = {a.partial, a.partial + a.partial_apart};
  int64_t partial_rows = 0;
  if (tokens * heads > 0) {
    status = with_dtype(q.dtype, [&](auto zero) {
      using T = decltype(zero);
      const auto launch = interleaved ? rope::launch_dtype<T, true> : rope::launch_dtype<T, false>;
      return launch(a, {dq_out, dk_out, q, k}, {q_weight, k_weight}, facts, cuda_stream(stream), partial_rows);
    });
  }
  if (status != Status::kOk || !sums || a.alone) return status;
  return column_sums(partial, partial_rows, a.partial_stride, width, {dq_weight, dk_weight}, facts.capability >= 90,
                     cuda_stream(stream));
}

}  // namespace fuselm
