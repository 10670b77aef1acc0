// Cross-entropy of rows of logits and their gradient in one pass. Contract: cross_entropy.py; how a row is held and
// added up: softmax.cuh.
//
// Traffic. Where the gradient is wanted the logits are read once and the gradient is written once, over the logits if
// asked: the row waits in registers for its sum. When the incoming gradient comes (cross_entropy_correct) and is 1, as
// in training, nothing is left to do. No atomics.
#include <cmath>

#include "softmax.cuh"

namespace fuselm {
namespace softmax {
namespace {

struct Targets {
  const void* data;
  int64_t ignored;
  int64_t rows;
  int32_t width;
  bool wide;  // int64, else int32

  // The column of a row's target, -1 where the row does not count: never one outside the row.
  __device__ int of(int64_t row) const {
    const int64_t target = wide ? static_cast<const int64_t*>(data)[row] : static_cast<const int32_t*>(data)[row];
    return target != ignored && target >= 0 && target < width ? static_cast<int>(target) : -1;
  }
};

// The loss of a row: nll + smoothing * (mean nll of all columns - nll) + z_loss * lse^2, of logits bent by softcap.
struct Formula {
  float smoothing, z_loss, softcap, inverse_softcap;  // softcap 0: none

  __device__ float bent(float x) const { return __fmul_rn(softcap, tanhf(x * inverse_softcap)); }
  __device__ float slope(float bent) const {
    const float share = bent * inverse_softcap;
    return fmaf(-share, share, 1.0f);
  }
};

// Logits [rows, V] that lie in pieces of V, each [rows, so many vectors]: the first where `logits` say, the others in
// `rest`, so many bytes apart. A part of a row has no more vectors than a piece, so it lies in two of them at most.
struct Pieces {
  int vectors = 0;
  char* rest = nullptr;
  int64_t apart = 0;
};

// Where the vectors of a row, or of a part of one, are: one after another, and in pieces from the `until`-th on
// further.
template <bool kPieces>
struct Stretch {
  char* data;

  __device__ char* at(int i) const { return data + i * 16; }
};
template <>
struct Stretch<true> {
  char* data;
  int until;
  int64_t further;

  __device__ char* at(int i) const { return data + i * 16 + (i < until ? 0 : further); }
};

struct LossArgs {
  // What every launch reads comes first, in one line of the constant cache: see softmax.cu.
  const char* logits;
  bool adjacent;  // the logits are contiguous
  bool chained, large;
  bool after_count;  // the kernel before this one makes the count, and has waited for those before it
  Targets targets;
  Formula formula;
  const float* count;   // of targets, where the loss is their mean; null: their sum
  float *losses, *lse;  // null where they are known
  // The incoming gradient where it is known: one, or one for each row. With unless_one, rows whose gradient it would
  // not change are left alone.
  const float* dloss;
  bool each_row, unless_one;
  Parts parts;
  Rows logits_rows, out;  // out: the gradient, absent when it is not wanted
  Pieces pieces;

  __device__ float incoming(int64_t row) const { return dloss == nullptr ? 1.0f : dloss[each_row ? row : 0]; }
  template <typename X>
  __device__ const char* row(int64_t index) const {
    return likely(adjacent) ? logits + index * targets.width * static_cast<int64_t>(sizeof(X)) : logits_rows.row(index);
  }
  // The part of a row that begins with its vector `skip`.
  __device__ Stretch<true> in_pieces(int64_t index, int skip) const {
    const int piece = skip / pieces.vectors, before = piece * pieces.vectors;
    const int64_t row_bytes = pieces.vectors * int64_t{16};
    char* const own = piece == 0 ? const_cast<char*>(logits) : pieces.rest + (piece - 1) * pieces.apart;
    char* const next = pieces.rest + piece * pieces.apart;
    return {own + index * row_bytes + (skip - before) * 16, before + pieces.vectors - skip, next - own - row_bytes};
  }
};

__device__ inline float share_of_mean(const float* count) {
  return count == nullptr ? 1.0f : 1.0f / fmaxf(*count, 1.0f);
}

// What the gradient of each column is made of: factor * Base^(score - level) - base, less `one` at the target.
template <typename X>
struct Gradient {
  Level level;
  float factor, base, one;

  __device__ Gradient(const Formula& f, const Level& level_, float inverse_sum, float lse, float g, int width)
      : level(level_),
        factor(g * inverse_sum * fmaf(2.0f * f.z_loss, lse, 1.0f)),
        base(g * f.smoothing / static_cast<float>(width)),
        one(g * (1.0f - f.smoothing)) {}

  // kPlain: neither softcap nor smoothing. The target's column is written again, by at_target: to look for it in every
  // vector would cost as much as the rest.
  template <bool kPlain, int N>
  __device__ void apply(const Formula& f, float (&value)[N]) const {
#pragma unroll
    for (float& one : value) one = of<kPlain>(f, one, base);
  }
  template <bool kPlain>
  __device__ float at_target(const Formula& f, float bent) const {
    return of<kPlain>(f, bent, base + one);
  }

 private:
  template <bool kPlain>
  __device__ float of(const Formula& f, float bent, float taken) const {
    const float power = Base<X>::power(fmaf(bent, level.unit, -level.score));
    const float gradient = fmaf(factor, power, -taken);
    return !kPlain && f.softcap != 0.0f ? gradient * f.slope(bent) : gradient;
  }
};

// What log(sum(e^x)) is more than the largest x. What rounding has taken from the largest score is in the sum, if it
// shows there at all.
template <typename X>
__device__ inline float log_of_sum(const Power<X>& whole, const Level& level) {
  const float lost = fmaf(-whole.top, level.unit, level.score);
  return fmaf(fabsf(lost) > 5.96e-8f ? lost : 0.0f, Base<X>::kLog, logf(whole.sum));
}

// Writes what a row is worth; called by the one thread that has the target's value.
template <typename X>
__device__ inline void store_loss(const LossArgs& a, int64_t row, const Power<X>& whole, const Level& level,
                                  float linear, float target) {
  if (a.losses == nullptr) return;
  // From the largest logit on: a loss close to 0 keeps its digits.
  const float rest = log_of_sum(whole, level);
  const float lse = whole.top + rest;
  float loss = (whole.top - target) + rest;
  const float mean = linear / static_cast<float>(a.targets.width);
  if (a.formula.smoothing != 0.0f) loss = fmaf(a.formula.smoothing, whole.top - mean + rest - loss, loss);
  a.losses[row] = fmaf(a.formula.z_loss * lse, lse, loss);
  if (a.lse != nullptr) a.lse[row] = lse;
}

__device__ inline void store_no_loss(const LossArgs& a, int64_t row) {
  if (a.losses != nullptr) a.losses[row] = 0.0f;
  if (a.lse != nullptr) a.lse[row] = 0.0f;
}

template <typename C, bool kPlain>
constexpr int kLossBlocks = fitting_blocks(C::kThreads, !kPlain && C::kBlocks > 1 ? C::kBlocks / 2 : C::kBlocks);

template <typename X, typename C, bool kParted, bool kPlain, bool kPieces = false>
__global__ void __launch_bounds__(C::kThreads, (kLossBlocks<C, kPlain>))
    cross_entropy_kernel(const __grid_constant__ LossArgs a) {
  constexpr int N = kVec<X>;
  __shared__ float scratch[3 * C::kThreads / kWarp];
  __shared__ std::conditional_t<kParted, Exchange<kPlain ? 2 : 3>, char> exchange;
  if (a.chained) {
    allow_next_kernel();
    if (!a.after_count) wait_for_previous_kernel();
  }
  if constexpr (kParted) exchange.init();
  const Place<X, C, kParted> at(a.parts, a.targets.rows, a.targets.width);
  // Gradients of 16 bits are corrected by the kernel below; those of 32 are worth the sums they were made with.
  const float incoming = sizeof(X) == 4 && at.count > 0 ? a.incoming(at.row) : 1.0f;
  const bool left_alone = sizeof(X) == 4 && a.unless_one && incoming == 1.0f;
  Stretch<kPieces> row;
  if constexpr (kPieces) {
    row = a.in_pieces(at.row, at.skip);
  } else {
    row.data = const_cast<char*>(a.row<X>(at.row)) + at.skip * 16;
  }
  const uint64_t policy = read_policy(a.large);
  // A row is asked for before it is known whether it counts: to wait for its target first would cost every row a tenth
  // of its time.
  uint4 raw[C::kVecs];
#pragma unroll
  for (int v = 0; v < C::kVecs; ++v) {
    const int i = at.lane + v * C::kLanes;
    raw[v] = make_uint4(0, 0, 0, 0);
    if (i < at.count && !left_alone) raw[v] = load_vector(row.at(i), policy);
  }
  const int target = at.count > 0 ? a.targets.of(at.row) : -1;
  const int count = target >= 0 && !left_alone ? at.count : 0;
  if (a.chained && a.after_count) wait_for_previous_kernel();
  // Asked for while the row is on its way: the share of a row, and the target's logit, by the thread that will write
  // over it if anybody does. (An index into registers would put all of them into memory.)
  const float share = a.out.present() ? share_of_mean(a.count) : 0.0f;
  const int place = target / N - at.skip;  // of the target's vector, in this part
  const bool owner = count > 0 && place >= 0 && place < count && place % C::kLanes == at.lane;
  const float own = owner ? to_float(reinterpret_cast<const X*>(row.at(place))[target % N]) : 0.0f;

  std::conditional_t<kPlain, PackedVector<X>, FloatVector<X>> held[C::kVecs];
  Power<X> mine = {-infinity(), 0.0f};
  float linear = 0.0f;
#pragma unroll
  for (int v = 0; v < C::kVecs; ++v) {
    float value[N];
    unpack<X>(raw[v], value);
    if constexpr (kPlain) {
      held[v].raw = raw[v];
    } else {
      if (a.formula.softcap != 0.0f) {
#pragma unroll
        for (float& one : value) one = a.formula.bent(one);
      }
      held[v].set(value);
      linear += sum_of(value);
    }
    if (!kPlain && at.lane + v * C::kLanes < count) mine.top = largest(value, mine.top);
  }
#pragma unroll
  for (int v = 0; kPlain && v < C::kVecs; ++v) {
    if (at.lane + v * C::kLanes < count) mine.top = extreme<X, false>(raw[v], mine.top);
  }
  constexpr float kUnit = Base<X>::kUnit;
  const Level near(mine.top, kUnit);
#pragma unroll
  for (int v = 0; v < C::kVecs; ++v) {
    turn<C>(v, at.lane + v * C::kLanes < count, [&](bool there) {
      float value[N];
      held[v].get(value);
      to_powers<X>(value, near);
      const float sum = sum_of(value);
      mine.sum += there ? sum : 0.0f;
    });
  }
  if (!kPlain) linear = row_sum<C::kLanes>(linear, scratch + (2 * C::kThreads + at.group * C::kLanes) / kWarp);
  Power<X> whole = meet<C::kLanes>(mine, kUnit, scratch + 2 * at.group * C::kLanes / kWarp);
  if constexpr (kParted) {
    if constexpr (kPlain) {
      exchange.share({whole.top, whole.sum}, a.parts.count, at.rank);
    } else {
      exchange.share({whole.top, whole.sum, linear}, a.parts.count, at.rank);
      linear = 0.0f;
      for (int p = 0; p < a.parts.count; ++p) linear += exchange.values[p][2];
    }
    whole = sum_of_parts<X>(a.parts.count, kUnit,
                            [&](int p) { return Power<X>{exchange.values[p][0], exchange.values[p][1]}; });
  }
  const Level level(whole.top, kUnit);
  if (target < 0 && at.count > 0 && at.lane == 0 && at.rank == 0) store_no_loss(a, at.row);

  const float bent_own = !kPlain && a.formula.softcap != 0.0f ? a.formula.bent(own) : own;
  if (owner) store_loss(a, at.row, whole, level, linear, bent_own);
  if (!a.out.present() || left_alone || at.count == 0) return;

  Stretch<kPieces> out = row;
  if constexpr (!kPieces) out.data = a.out.row(at.row) + at.skip * 16;
  if (target < 0) {
    for (int i = at.lane; i < at.count; i += C::kLanes) store_vector(out.at(i), make_uint4(0, 0, 0, 0));
    return;
  }
  const float lse = a.formula.z_loss != 0.0f ? whole.top + log_of_sum(whole, level) : 0.0f;
  const Gradient<X> gradient(a.formula, level, 1.0f / whole.sum, lse, share * incoming, a.targets.width);
#pragma unroll
  for (int v = 0; v < C::kVecs; ++v) {
    const int i = at.lane + v * C::kLanes;
    turn<C>(v, i < count, [&](bool there) {
      float value[N];
      held[v].get(value);
      gradient.template apply<kPlain>(a.formula, value);
      if (there) store_floats<X>(out.at(i), value);
    });
  }
  if (owner) {
    reinterpret_cast<X*>(out.at(place))[target % N] =
        from_float<X>(gradient.template at_target<kPlain>(a.formula, bent_own));
  }
}

// Any strides, any alignment: elements one by one, a row by the lanes that would hold it or its parts. What is written
// over the logits is written by the thread that read it.
template <typename X, int kLanes>
__global__ void __launch_bounds__(any_threads(kLanes), 1024 / any_threads(kLanes))
    cross_entropy_any_kernel(const __grid_constant__ LossArgs a) {
  constexpr int N = kVec<X>;
  constexpr float kUnit = Base<X>::kUnit;
  __shared__ float scratch[2][3 * any_threads(kLanes) / kWarp];
  const int group = threadIdx.x / kLanes;
  const int lane = threadIdx.x % kLanes;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * (any_threads(kLanes) / kLanes) + group;
  const bool live = index < a.targets.rows;
  const int64_t row = live ? index : 0;
  const int target = live ? a.targets.of(row) : -1;
  const float incoming = a.incoming(row);
  const bool left_alone = a.unless_one && incoming == 1.0f;
  const int width = target >= 0 && !left_alone ? a.targets.width : 0;
  const bool plain = a.formula.softcap == 0.0f && a.formula.smoothing == 0.0f;
  const char* logits_row = a.logits_rows.any_row(row);
  auto each = [&](int begin, int end, const auto& f) {
    for (int base = begin; base < end; base += kLanes * N) {
      const Span span = span_of<N, kLanes>(lane, base, width).until(end);
      float value[N];
      load_elements(logits_row, kDType<X>, a.logits_rows.column_stride, span, value);
      if (a.formula.softcap != 0.0f) {
#pragma unroll
        for (float& one : value) one = a.formula.bent(one);
      }
      f(span, value, span.template count<N>());
    }
  };

  Power<X> met[kMaxParts];
  float linear = 0.0f;
  for (int part = 0; part < a.parts.count; ++part) {
    const int begin = part * a.parts.vectors * N, end = min(width, begin + a.parts.vectors * N);
    Power<X> mine = {-infinity(), 0.0f};
    float sum = 0.0f;
    each(begin, end, [&](const Span&, const float (&value)[N], int here) {
      mine.top = largest(value, mine.top, here);
      sum += sum_of(value);
    });
    const Level near(mine.top, kUnit);
    each(begin, end, [&](const Span&, float (&value)[N], int here) {
      to_powers<X>(value, near);
      mine.sum += sum_of(value, here);
    });
    float* const own = scratch[part % 2];
    if (!plain) sum = row_sum<kLanes>(sum, own + (2 * any_threads(kLanes) + group * kLanes) / kWarp);
    met[part] = meet<kLanes>(mine, kUnit, own + 2 * group * kLanes / kWarp);
    linear = a.parts.count == 1 ? sum : linear + sum;
  }
  const Power<X> whole =
      a.parts.count == 1 ? met[0] : sum_of_parts<X>(a.parts.count, kUnit, [&](int p) { return met[p]; });
  const Level level(whole.top, kUnit);
  if (live && target < 0 && lane == 0) store_no_loss(a, row);

  const bool wanted = a.out.present() && !left_alone;
  const float lse = a.formula.z_loss != 0.0f ? whole.top + log_of_sum(whole, level) : 0.0f;
  const float g = wanted && target >= 0 ? incoming * share_of_mean(a.count) : 0.0f;
  const Gradient<X> gradient(a.formula, level, 1.0f / whole.sum, lse, g, a.targets.width);
  char* out_row = wanted ? a.out.any_row(row) : nullptr;
  each(0, width, [&](const Span& span, float (&value)[N], int) {
    bool owner = false;
#pragma unroll
    for (int i = 0; i < N; ++i) owner |= span.has(i) && span.column(i) == target;
    float own = 0.0f;
    if (owner) {
      own = element(logits_row, kDType<X>, target * a.logits_rows.column_stride);
      own = a.formula.softcap != 0.0f ? a.formula.bent(own) : own;
      store_loss(a, row, whole, level, linear, own);
    }
    if (!wanted) return;
    gradient.template apply<false>(a.formula, value);
    store_spread(out_row, kDType<X>, a.out.column_stride, span, value);
    if (owner) {
      const float taken = gradient.template at_target<false>(a.formula, own);
      set_element(out_row, kDType<X>, target * a.out.column_stride, taken);
    }
  });
  for (int column = lane; wanted && live && target < 0 && column < a.targets.width; column += kLanes) {
    set_element(out_row, kDType<X>, column * a.out.column_stride, 0.0f);
  }
}

// ---- counting, and adding up ----

constexpr int kOneBlock = kWarp * kWarp;

__device__ inline float counted_targets(const Targets& targets) {
  __shared__ float scratch[kOneBlock / kWarp];
  float count = 0.0f;  // exact up to 2^24 for each thread, and their sum
#pragma unroll 8
  for (int64_t row = threadIdx.x; row < targets.rows; row += kOneBlock) count += targets.of(row) >= 0 ? 1.0f : 0.0f;
  return row_sum<kOneBlock>(count, scratch);
}

__global__ void __launch_bounds__(kOneBlock) count_kernel(const __grid_constant__ Targets targets, float* counted) {
  // In this order: the next kernel reads logits before it waits for this one, so those before must be done.
  wait_for_previous_kernel();
  allow_next_kernel();
  const float count = counted_targets(targets);
  if (threadIdx.x == 0) *counted = count;
}

// A sum over the block in float64: many fp32 losses make one that fp32 is coarse for.
__device__ inline double wide_block_sum(double v) {
  __shared__ double scratch[kOneBlock / kWarp];
  auto over_warp = [](double own) {
#pragma unroll
    for (int step = kWarp / 2; step > 0; step /= 2) own += __shfl_xor_sync(0xffffffffu, own, step);
    return own;
  };
  v = over_warp(v);
  if (threadIdx.x % kWarp == 0) scratch[threadIdx.x / kWarp] = v;
  __syncthreads();
  return over_warp(scratch[threadIdx.x % kWarp]);  // of as many warps as a warp has lanes
}

// The loss of all rows, their sum or their mean, and how many they are where that is not known yet. One block, one
// order, rounded once.
__global__ void __launch_bounds__(kOneBlock) finish_kernel(const __grid_constant__ Targets targets, const float* losses,
                                                           const float* count, float* counted, float* loss, bool mean) {
  allow_next_kernel();
  wait_for_previous_kernel();
  const float known = mean && count != nullptr ? *count : 1.0f;
  double sum = 0.0;
#pragma unroll 8
  for (int64_t row = threadIdx.x; row < targets.rows; row += kOneBlock) sum += losses[row];
  sum = wide_block_sum(sum);
  const float rows = mean && count == nullptr ? counted_targets(targets) : known;
  if (threadIdx.x > 0) return;
  if (counted != nullptr && mean && count == nullptr) *counted = rows;
  if (loss != nullptr) *loss = static_cast<float>(sum / fmaxf(rows, 1.0f));
}

// ---- when the incoming gradient is known ----

struct CorrectArgs {
  Rows logits, out;
  Targets targets;
  Formula formula;
  const float *lse, *dloss, *count;
  bool each_row;    // dloss has a number for each row
  bool unless_one;  // out holds the gradient for 1
  bool large;
};

constexpr int kCorrectThreads = 512;

// A block takes every gridDim.x-th row, and of it the gridDim.y-th part of the columns. kElements: one by one.
template <typename X, bool kElements>
__global__ void __launch_bounds__(kCorrectThreads, 2)
    cross_entropy_correct_kernel(const __grid_constant__ CorrectArgs a) {
  constexpr int N = kElements ? 1 : kVec<X>;
  allow_next_kernel();
  wait_for_previous_kernel();
  const int steps = a.targets.width / N;
  const uint64_t policy = read_policy(a.large);
  const float share = share_of_mean(a.count);
  for (int64_t row = blockIdx.x; row < a.targets.rows; row += gridDim.x) {
    const float g = a.dloss[a.each_row ? row : 0];
    if (a.unless_one && g == 1.0f) {
      if (!a.each_row) return;
      continue;
    }
    char* out_row = kElements ? a.out.any_row(row) : a.out.row(row);
    const int target = a.logits.present() ? a.targets.of(row) : 0;
    const float lse = a.logits.present() && target >= 0 ? a.lse[row] : 0.0f;
    // Beside logits so large that lse has no digits for how many they are, what is there is multiplied instead.
    const bool far = a.unless_one && fabsf(lse) >= 16384.0f;
    const bool anew = a.logits.present() && !far;
    const char* from = !anew ? out_row : kElements ? a.logits.any_row(row) : a.logits.row(row);
    const int64_t from_step = kElements ? (anew ? a.logits.column_stride : a.out.column_stride) : 1;
    const Level level(lse, Base<X>::kUnit);
    const float lost = Base<X>::power(fmaf(-lse, level.unit, level.score));  // what rounding has added to the score
    const Gradient<X> gradient(a.formula, level, lost, lse, g * share, a.targets.width);
#pragma unroll 4
    for (int i = blockIdx.y * kCorrectThreads + threadIdx.x; i < steps; i += gridDim.y * kCorrectThreads) {
      float value[N];
      if constexpr (kElements) {
        value[0] = target < 0 ? 0.0f : to_float(reinterpret_cast<const X*>(from)[i * from_step]);
      } else {
        unpack<X>(target < 0 ? make_uint4(0, 0, 0, 0) : load_vector(from + i * 16, policy), value);
      }
      if (!anew) {
#pragma unroll
        for (float& one : value) one *= g;
      } else if (target >= 0) {
        if (a.formula.softcap != 0.0f) {
#pragma unroll
          for (float& one : value) one = a.formula.bent(one);
        }
        gradient.template apply<false>(a.formula, value);
      }
      if constexpr (kElements) {
        reinterpret_cast<X*>(out_row)[i * a.out.column_stride] = from_float<X>(value[0]);
      } else {
        store_floats<X>(out_row + i * 16, value);
      }
      if (anew && target >= 0 && i == target / N) {
        const float own = to_float(reinterpret_cast<const X*>(from)[target * from_step]);
        const float bent = a.formula.softcap != 0.0f ? a.formula.bent(own) : own;
        reinterpret_cast<X*>(out_row)[target * (kElements ? a.out.column_stride : 1)] =
            from_float<X>(gradient.template at_target<false>(a.formula, bent));
      }
    }
  }
}

// ---- launchers ----

template <typename X, bool kPlain>
struct LossKernels {
  using Whole = UpTo1024Vectors;
  static constexpr bool kEveryKind = false;
  template <typename C, bool kParted>
  static auto of() {
    return cross_entropy_kernel<X, C, kParted, kPlain>;
  }
  template <int kLanes>
  static auto any() {
    return cross_entropy_any_kernel<X, kLanes>;
  }
};

// What the launchers below ask of what they have in common.
Status check_loss(const TensorView& logits, const TensorView& targets, double smoothing, double z_loss,
                  double softcap) {
  const Status status = check_tensors(logits, {}, {});
  if (status != Status::kOk) return status;
  const bool rows = count_rows(logits) > 0;  // a binding may not be able to tell the targets of no rows from none
  if (rows && targets.dtype != DType::kInt32 && targets.dtype != DType::kInt64) return Status::kBadDtype;
  if (rows && !is_row_stat(targets, logits)) return Status::kBadShape;
  if (!(smoothing >= 0.0 && smoothing <= 1.0)) return Status::kBadScalar;
  if (!(z_loss >= 0.0) || !std::isfinite(static_cast<float>(z_loss))) return Status::kBadScalar;
  const float cap = static_cast<float>(softcap);
  return cap >= 0.0f && std::isfinite(cap) ? Status::kOk : Status::kBadScalar;
}

Targets make_targets(const TensorView& logits, const TensorView& targets, int64_t ignore_index) {
  const int64_t width = logits.sizes[logits.rank - 1];
  return {targets.data, ignore_index, count_rows(logits), static_cast<int32_t>(width), targets.dtype == DType::kInt64};
}

Formula make_formula(double smoothing, double z_loss, double softcap) {
  const float cap = static_cast<float>(softcap);
  const float inverse = cap != 0.0f ? static_cast<float>(1.0 / softcap) : 0.0f;
  return {static_cast<float>(smoothing), static_cast<float>(z_loss), cap, inverse};
}

template <typename X>
LossArgs make_loss_args(const TensorView& logits, const Targets& targets, const TensorView& out,
                        const DeviceFacts& facts) {
  LossArgs a = {};
  a.logits_rows = make_rows(logits, targets.width, kVec<X>), a.out = make_rows(out, targets.width, kVec<X>);
  a.logits = a.logits_rows.data, a.adjacent = a.logits_rows.adjacent;
  a.targets = targets;
  a.parts = parts_of<X>(targets.width);
  a.chained = facts.capability >= 90;
  const int64_t bytes = targets.rows * targets.width * static_cast<int64_t>(sizeof(X));
  a.large = out.present() && 2 * bytes > facts.l2_bytes;
  return a;
}

// Logits in pieces: a cluster for each row.
template <typename X, bool kPlain>
Status launch_pieces(const LossArgs& a, const DeviceFacts& facts, int device, cudaStream_t stream) {
  bool launched = false;
  WideConfigs<X, true>::pick(a.parts.vectors, [&](auto config) {
    using C = decltype(config);
    static std::atomic<int> clusters[kMaxDevices][kMaxParts + 1];
    launched = launch_parts(cross_entropy_kernel<X, C, true, kPlain, true>, a, a.targets.rows, a.parts.count,
                            C::kThreads, a.chained, facts, clusters[device][a.parts.count], stream);
  });
  return launched ? Status::kOk : Status::kBadDevice;
}

template <typename X>
Status launch_loss(const LossArgs& a, const DeviceFacts& facts, int device, cudaStream_t stream) {
  const bool plain = a.formula.softcap == 0.0f && a.formula.smoothing == 0.0f;
  if (a.pieces.vectors > 0) {
    if constexpr (std::is_same_v<X, bf16>) {
      return plain ? launch_pieces<X, true>(a, facts, device, stream)
                   : launch_pieces<X, false>(a, facts, device, stream);
    }
    return Status::kBadDtype;
  }
  const bool vectors = a.logits_rows.vectors && a.out.vectors;
  const auto launch =
      plain ? launch_rows<X, LossKernels<X, true>, LossArgs> : launch_rows<X, LossKernels<X, false>, LossArgs>;
  return launch(a, a.targets.rows, vectors, facts, device, stream);
}

bool is_scalar(const TensorView& view) {
  int64_t numbers = 1;
  for (int d = 0; d < view.rank; ++d) numbers *= view.sizes[d];
  return view.dtype == DType::kFloat32 && numbers == 1;
}

// The whole chain: count, losses and gradients, their sum.
Status run_loss(const TensorView& logits, const TensorView& targets, const TensorView& count, int64_t ignore_index,
                double smoothing, double z_loss, double softcap, bool mean, const TensorView& loss,
                const TensorView& losses, const TensorView& lse, const TensorView& counted, const TensorView& out,
                Stream stream, const Pieces& pieces = {}) {
  const Status status = check_loss(logits, targets, smoothing, z_loss, softcap);
  if (status != Status::kOk) return status;
  if (count.present() && !is_scalar(count)) return Status::kBadShape;
  const DeviceGuard guard(stream.device);
  if (!guard.ok()) return Status::kBadDevice;
  const DeviceFacts& facts = device_facts(guard.device());
  const cudaStream_t queue = cuda_stream(stream);
  const int64_t rows = count_rows(logits);
  const bool before = mean && !count.present() && out.present();  // the gradient has to know how many there are
  if (rows > 0 && !losses.present()) return Status::kBadShape;
  if (before && !counted.present()) return Status::kBadShape;
  const Targets wanted = make_targets(logits, targets, ignore_index);
  const bool programmatic = facts.capability >= 90;
  float* counted_at = static_cast<float*>(counted.data);
  const float* count_at = static_cast<const float*>(count.data);
  Status result = Status::kOk;
  if (before) result = launch(count_kernel, dim3(1), kOneBlock, 0, programmatic, queue, wanted, counted_at);
  if (before) count_at = counted_at;
  if (result == Status::kOk && rows > 0) {
    result = with_dtype(logits.dtype, [&](auto zero) {
      using X = decltype(zero);
      LossArgs a = make_loss_args<X>(logits, wanted, out, facts);
      a.formula = make_formula(smoothing, z_loss, softcap);
      a.count = mean ? count_at : nullptr, a.after_count = before;
      a.losses = static_cast<float*>(losses.data), a.lse = static_cast<float*>(lse.data);
      a.pieces = pieces;
      return launch_loss<X>(a, facts, guard.device(), queue);
    });
  }
  if (result != Status::kOk || (!loss.present() && (before || !counted.present()))) return result;
  return launch(finish_kernel, dim3(1), kOneBlock, 0, programmatic, queue, wanted,
                static_cast<const float*>(losses.data), count_at, counted_at, static_cast<float*>(loss.data), mean);
}

Status run_correct(const TensorView& out, const TensorView& logits, const TensorView& targets, const TensorView& lse,
                   const TensorView& dloss, const TensorView& count, int64_t ignore_index, double smoothing,
                   double z_loss, double softcap, bool unless_one, Stream stream) {
  const bool anew = logits.present();
  Status status = anew ? check_loss(logits, targets, smoothing, z_loss, softcap) : check_tensors(out, {}, {});
  if (status != Status::kOk) return status;
  const int64_t rows = count_rows(out), width = out.sizes[out.rank - 1];
  if (rows == 0) return Status::kOk;
  if (anew && (!same_sizes(out, logits) || !is_row_stat(lse, logits))) return Status::kBadShape;
  if (anew && (out.dtype != logits.dtype || lse.dtype != DType::kFloat32)) return Status::kBadDtype;
  if (dloss.dtype != DType::kFloat32) return Status::kBadDtype;
  if (!is_scalar(dloss) && !is_row_stat(dloss, out)) return Status::kBadShape;
  if (count.present() && !is_scalar(count)) return Status::kBadShape;
  const DeviceGuard guard(stream.device);
  if (!guard.ok()) return Status::kBadDevice;
  const DeviceFacts& facts = device_facts(guard.device());
  const bool each_row = dloss.rank > 0 && !(rows > 1 && is_scalar(dloss));
  if (anew && out.dtype == DType::kFloat32) {
    LossArgs a = make_loss_args<float>(logits, make_targets(logits, targets, ignore_index), out, facts);
    a.formula = make_formula(smoothing, z_loss, softcap);
    a.count = static_cast<const float*>(count.data), a.dloss = static_cast<const float*>(dloss.data);
    a.each_row = each_row, a.unless_one = unless_one;
    return launch_loss<float>(a, facts, guard.device(), cuda_stream(stream));
  }
  return with_dtype(out.dtype, [&](auto zero) {
    using X = decltype(zero);
    CorrectArgs a = {};
    a.logits = make_rows(logits, width, kVec<X>), a.out = make_rows(out, width, kVec<X>);
    a.targets = make_targets(out, targets, ignore_index), a.formula = make_formula(smoothing, z_loss, softcap);
    a.lse = static_cast<const float*>(lse.data), a.dloss = static_cast<const float*>(dloss.data);
    a.count = anew ? static_cast<const float*>(count.data) : nullptr;
    a.each_row = each_row, a.unless_one = unless_one;
    a.large = 2 * rows * width * static_cast<int64_t>(sizeof(X)) > facts.l2_bytes;
    const bool vectors = a.logits.vectors && a.out.vectors;
    // Few rows are shared by blocks; many blocks would cost time where there is nothing to do.
    const int64_t most = 2 * static_cast<int64_t>(facts.multiprocessors);
    const int64_t pieces = divide_up(width / (vectors ? kVec<X> : 1) + 1, 4 * kCorrectThreads);
    const dim3 grid(static_cast<unsigned>(at_most(rows, most)),
                    static_cast<unsigned>(at_most(pieces, divide_up(most, rows))));
    const auto kernel = vectors ? cross_entropy_correct_kernel<X, false> : cross_entropy_correct_kernel<X, true>;
    return launch(kernel, grid, kCorrectThreads, 0, facts.capability >= 90, cuda_stream(stream), a);
  });
}

}  // namespace
}  // namespace softmax

Status cross_entropy_forward(const Input& logits, const Input& targets, const OptionalInput& count,
                             int64_t ignore_index, double label_smoothing, double z_loss, double softcap, bool mean,
                             const Scalar& loss, const RowStat<0>& losses, const RowStat<0>& lse, const Scalar& counted,
                             const Like<0>& dlogits, Stream stream) {
  return softmax::run_loss(logits, targets, count, ignore_index, label_smoothing, z_loss, softcap, mean, loss, losses,
                           lse, counted, dlogits, stream);
}

Status cross_entropy_inplace(const InOut& logits, const Input& targets, const OptionalInput& count,
                             int64_t ignore_index, double label_smoothing, double z_loss, double softcap, bool mean,
                             const Scalar& loss, const RowStat<0>& losses, const RowStat<0>& lse, const Scalar& counted,
                             Stream stream) {
  return softmax::run_loss(logits, targets, count, ignore_index, label_smoothing, z_loss, softcap, mean, loss, losses,
                           lse, counted, logits, stream);
}

Status cross_entropy_pieces(const InOut& first, const InOut& rest, const Input& targets, const OptionalInput& count,
                            int64_t words, int64_t ignore_index, double label_smoothing, double z_loss, double softcap,
                            bool mean, const Scalar& loss, const RowStat<0>& losses, const RowStat<0>& lse,
                            const Scalar& counted, Stream stream) {
  constexpr int N = kVec<bf16>;
  if (first.dtype != DType::kBFloat16 || rest.dtype != DType::kBFloat16) return Status::kBadDtype;
  const int64_t rows = first.sizes[0], piece = first.sizes[1];
  const bool fit = first.rank == 2 && first.strides[1] == 1 && first.strides[0] == piece && rest.rank == 3 &&
                   rest.sizes[1] == rows && rest.sizes[2] == piece && rest.strides[2] == 1 &&
                   rest.strides[1] == piece && rest.strides[0] >= rows * piece;
  const auto aligned = [](const TensorView& view) { return reinterpret_cast<uintptr_t>(view.data) % 16 == 0; };
  if (!fit || piece % N != 0 || words % N != 0 || rest.strides[0] % N != 0 || !aligned(first) || !aligned(rest)) {
    return Status::kBadShape;
  }
  // The last piece may have fewer words; a part of a row fits into a piece, and a row has several parts.
  const Parts parts = softmax::parts_of<bf16>(words);
  if (words <= rest.sizes[0] * piece || words > (rest.sizes[0] + 1) * piece) return Status::kBadShape;
  if (parts.count == 1 || parts.count > kMaxParts || parts.vectors > piece / N) return Status::kBadShape;
  TensorView logits = first;
  logits.sizes[1] = words;
  const softmax::Pieces pieces = {static_cast<int>(piece / N), static_cast<char*>(rest.data), rest.strides[0] * 2};
  return softmax::run_loss(logits, targets, count, ignore_index, label_smoothing, z_loss, softcap, mean, loss, losses,
                           lse, counted, logits, stream, pieces);
}

Status cross_entropy_backward(const Input& logits, const Input& targets, const Input& lse, const Input& dloss,
                              const OptionalInput& count, int64_t ignore_index, double label_smoothing, double z_loss,
                              double softcap, const Like<0>& dlogits, Stream stream) {
  if (!dlogits.present() || !logits.present()) return Status::kBadShape;
  return softmax::run_correct(dlogits, logits, targets, lse, dloss, count, ignore_index, label_smoothing, z_loss,
                              softcap, false, stream);
}

Status cross_entropy_correct(const InOut& dlogits, const OptionalInput& logits, const OptionalInput& targets,
                             const OptionalInput& lse, const Input& dloss, const OptionalInput& count,
                             int64_t ignore_index, double label_smoothing, double z_loss, double softcap,
                             Stream stream) {
  return softmax::run_correct(dlogits, logits, targets, lse, dloss, count, ignore_index, label_smoothing, z_loss,
                              softcap, true, stream);
}

}  // namespace fuselm
