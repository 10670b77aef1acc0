// Rows, and all that is done with rows in general: addressing them whatever their strides, moving them in vectors,
// holding them until their sum is known, and adding up columns over blocks.
//
// Knows nothing of any op. The house's picture of a row: it is cut into vectors of 16 bytes of the main dtype (8 of
// bf16, 4 of fp32); `lanes` threads own a row, and lane l owns vectors l, l + lanes, l + 2 * lanes, ... so a warp's
// load is one contiguous run. Which elements a thread owns depends on the width alone, never on strides or alignment:
// a row's sum is taken in the same order however the row is stored.
#pragma once
#include <type_traits>

#include "common.cuh"

namespace fuselm {

// ---- addressing ----

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
  bool vectors = true;        // whole, aligned vectors and row() may be called; if not: any_row(), element by element
  bool adjacent = false;      // rows follow one another without a gap
  int32_t outer = 1;          // row dimensions left after folding
  int64_t column_stride = 1;  // in elements
  int64_t sizes[kMaxRank - 1] = {};
  int64_t strides[kMaxRank - 1] = {};
  Divisor divisors[kFastDims];

  __host__ __device__ bool present() const { return dtype != DType::kAbsent; }
  bool plain() const { return vectors && outer == 1; }  // vectors, one stride from row to row

  // Inlined, always: out of line it would take the address of a kernel's parameters, and those are then read from
  // memory, a microsecond each time.
  __device__ __forceinline__ char* row(int64_t index) const {
    if (likely(outer == 1)) return data + index * strides[0];
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
  const bool alone = rows.outer == 1 && rows.sizes[0] <= 1;  // a row that has none beside it
  rows.adjacent = alone || (rows.outer == 1 && rows.strides[0] == width * element_bytes(view.dtype));
  if (rows.outer > 1) rows.vectors &= rows.outer <= kFastDims && count < (int64_t{1} << 31);
  for (int d = 0; rows.vectors && rows.outer > 1 && d < rows.outer; ++d) {
    rows.divisors[d] = Divisor(static_cast<uint32_t>(rows.sizes[d]));
  }
  return rows;
}

// One element of a small tensor whose dtype is known only at run time.
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
    const uint2 raw = *static_cast<const uint2*>(from);
    unpack_pair(raw.x, out[0], out[1], T{}), unpack_pair(raw.y, out[2], out[3], T{});
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

// A vector of a small tensor whose dtype is known only at run time, a weight or a mask: the branches are the same for
// all threads, and a template over every mix of dtypes would triple the kernels. Asked for first and looked at later,
// so that several can be on their way. By the read-only path: the compiler may ask for the next one before the stores
// of this one.
template <int N>
struct ConstantVector {
  uint4 raw[N / 4] = {};

  __device__ void load(const char* from, DType dtype, int64_t index) {
    const char* at = from + index * N * element_bytes(dtype);
    const bool wide = dtype == DType::kFloat32;
    if constexpr (N == 4) {
      if (wide) {
        raw[0] = __ldg(reinterpret_cast<const uint4*>(at));
      } else {
        const uint2 half = __ldg(reinterpret_cast<const uint2*>(at));
        raw[0].x = half.x, raw[0].y = half.y;
      }
    } else {
      raw[0] = __ldg(reinterpret_cast<const uint4*>(at));
      if (wide) raw[1] = __ldg(reinterpret_cast<const uint4*>(at) + 1);
    }
  }
  __device__ void get(DType dtype, float (&out)[N]) const {
    if (dtype == DType::kFloat32) {
      load_floats<float>(raw, out);
    } else if (dtype == DType::kBFloat16) {
      load_floats<bf16>(raw, out);
    } else {
      load_floats<fp16>(raw, out);
    }
  }
};

// Vector number `index`.
template <int N>
__device__ inline void load_constant(const char* from, DType dtype, int64_t index, float (&out)[N]) {
  ConstantVector<N> vector;
  vector.load(from, dtype, index);
  vector.get(dtype, out);
}

inline bool same_sizes(const TensorView& a, const TensorView& b) {
  bool same = a.rank == b.rank;
  for (int d = 0; same && d < a.rank; ++d) same = a.sizes[d] == b.sizes[d];
  return same;
}

// One number for each row of x, without gaps.
inline bool is_row_stat(const TensorView& stat, const TensorView& x) {
  bool fits = stat.rank == x.rank - 1;
  int64_t stride = 1;
  for (int d = stat.rank - 1; fits && d >= 0; --d) {
    fits = stat.sizes[d] == x.sizes[d] && (stat.sizes[d] == 1 || stat.strides[d] == stride);
    stride *= stat.sizes[d];
  }
  return fits;
}

constexpr int64_t kMaxWidth = 262144;

// What an op over rows asks of them, of a weight for their columns, and of a tensor like them.
inline Status check_tensors(const TensorView& x, const TensorView& weight, const TensorView& other) {
  if (!is_float(x.dtype) || (weight.present() && !is_float(weight.dtype)) ||
      (other.present() && !is_float(other.dtype))) {
    return Status::kBadDtype;
  }
  if (x.rank < 1 || x.rank > kMaxRank) return Status::kBadShape;
  const int64_t width = x.sizes[x.rank - 1];
  if (width < 1 || width > kMaxWidth) return Status::kBadShape;
  if (weight.present() && (weight.rank != 1 || weight.sizes[0] != width)) return Status::kBadShape;
  if (other.present() && !same_sizes(other, x)) return Status::kBadShape;
  return Status::kOk;
}

inline int64_t count_rows(const TensorView& x) {
  int64_t rows = 1;
  for (int d = 0; d < x.rank - 1; ++d) rows *= x.sizes[d];
  return rows;
}

// ---- who owns what ----

enum class Kind {
  kMany,  // compiled for throughput
  kNear,  // the same for rows that follow one another in tensors that fit L2: nothing is left to ask
  kSoon,  // for a few rows: compiled for what comes soonest
  kWide,  // the same, with a thread for each vector of a lane
};

template <int lanes, int vecs, int threads, int blocks, Kind kind = Kind::kMany>
struct Config {
  static constexpr int kLanes = lanes;      // threads that own a row
  static constexpr int kVecs = vecs;        // vectors of the row each of them has
  static constexpr int kThreads = threads;  // threads of a block
  static constexpr int kBlocks = blocks;    // of a multiprocessor: what the compiler may spend registers by
  static constexpr Kind kKind = kind;
  static constexpr bool kSoon = kind == Kind::kSoon || kind == Kind::kWide;
  static constexpr bool kNear = kSoon || kind == Kind::kNear;
  static constexpr int kHeld = kind == Kind::kWide ? 1 : vecs;               // vectors a thread holds
  static constexpr int kGroups = kind == Kind::kWide ? 1 : threads / lanes;  // rows of a block
};

template <typename... Configs>
struct ConfigList {
  // Calls f with the first configuration that holds `vectors`; false if none does.
  template <typename F>
  static bool pick(int64_t vectors, F&& f) {
    return ((vectors <= Configs::kLanes * Configs::kVecs && (f(Configs{}), true)) || ...);
  }
};

// ---- rows in shared memory ----

// Whether this thread takes part in fetch_rows.
__device__ inline bool fetches() { return !kCopyEngine || threadIdx.x == 0; }

// Brings `vectors` vectors, without the `skip` before them, of `count` rows from `first` on into shared memory, one row
// after another. kBytes is what a vector has in this tensor.
template <typename C, int kBytes>
__device__ inline void fetch_rows(const Rows& from, int64_t first, int count, int skip, int vectors, char* to,
                                  uint64_t* barrier, uint64_t policy) {
  const int bytes = vectors * kBytes;
  if constexpr (kCopyEngine) {
    if constexpr (C::kGroups == 1) {
      copy_bulk(to, from.row(first) + skip * kBytes, bytes, barrier, policy);
      return;
    }
    // Rows without a gap are one long run: 4 % faster than a request a row in backward at a width of 1024.
    const int runs = from.adjacent ? 1 : count;
    const uint32_t run_bytes = from.adjacent ? count * bytes : bytes;
#pragma unroll 1
    for (int r = 0; r < runs; ++r) {
      copy_bulk(to + r * bytes, from.row(first + r) + skip * kBytes, run_bytes, barrier, policy);
    }
  } else {
    const int group = threadIdx.x / C::kLanes;
    if (group >= count) return;
    const char* row = from.row(first + group) + skip * kBytes;
#pragma unroll 1
    for (int at = threadIdx.x % C::kLanes; at < vectors; at += C::kLanes) {
#pragma unroll
      for (int o = 0; o < kBytes; o += 16) copy_async(to + group * bytes + at * kBytes + o, row + at * kBytes + o);
    }
  }
}

// ---- rows that wait ----

// How a vector waits for its row's sum: as it came, or in fp32 when the residual is fp32 and x is not.
template <typename X>
struct PackedVector {
  uint4 raw;
  __device__ void load(const char* from) { raw = load_vector(from); }
  __device__ void get(float (&out)[kVec<X>]) const { unpack<X>(raw, out); }
  __device__ void set(const float (&in)[kVec<X>]) { raw = packed<X>(in); }
  // Has the numbers taken out anew next time: the compiler would keep them, in registers it does not have.
  __device__ void forget() { asm volatile("" : "+r"(raw.x), "+r"(raw.y), "+r"(raw.z), "+r"(raw.w)); }
};

template <typename X>
struct FloatVector {
  float value[kVec<X>];
  __device__ void load(const char* from) { load_floats<float>(from, value); }
  __device__ void get(float (&out)[kVec<X>]) const {
#pragma unroll
    for (int i = 0; i < kVec<X>; ++i) out[i] = value[i];
  }
  __device__ void set(const float (&in)[kVec<X>]) {
#pragma unroll
    for (int i = 0; i < kVec<X>; ++i) value[i] = in[i];
  }
  __device__ void forget() {}
};

template <typename X, typename H>
using Held = std::conditional_t<std::is_same_v<X, H>, PackedVector<X>, FloatVector<X>>;

// A vector of x and, where there is one, of the residual, asked for and not yet looked at.
template <typename X, typename H, bool kResidual>
struct Loaded {
  static constexpr int kPieces = sizeof(H) / sizeof(X);
  uint4 x;
  uint4 residual[kResidual ? kPieces : 1];

  // With a policy for L2 where it comes from global memory and is not waited for.
  template <typename... Policy>
  __device__ void load(const char* x_at, const char* residual_at, Policy... policy) {
    x = load_vector(x_at, policy...);
#pragma unroll
    for (int p = 0; kResidual && p < kPieces; ++p) residual[p] = load_vector(residual_at + p * 16, policy...);
  }

  // Zeros past the row's end: they add nothing to a sum, so that all lanes can go on together and only loads and stores
  // ask where the row ends.
  template <typename... Policy>
  __device__ void load_if(bool live, const char* x_at, const char* residual_at, Policy... policy) {
    if (live) {
      load(x_at, residual_at, policy...);
    } else {
      x = make_uint4(0, 0, 0, 0);
#pragma unroll
      for (auto& piece : residual) piece = make_uint4(0, 0, 0, 0);
    }
  }

  // h, rounded as the residual is: what is normalised is exactly what is returned, so backward can start from it.
  __device__ Held<X, H> sum() const {
    Held<X, H> held;
    if constexpr (!kResidual) {
      held.raw = x;
    } else {
      float h[kVec<X>], r[kVec<X>];
      unpack<X>(x, h);
      load_floats<H>(residual, r);
#pragma unroll
      for (int i = 0; i < kVec<X>; ++i) h[i] += r[i];
      held.set(h);
    }
    return held;
  }
};

// ---- weights ----

// offset + weight for one vector of columns; 1 where there is no weight.
template <int N>
__device__ inline void load_weight(const char* weight, DType dtype, float offset, int64_t index, float (&out)[N]) {
  if (weight != nullptr) {
    load_constant(weight, dtype, index, out);
#pragma unroll
    for (int i = 0; i < N; ++i) out[i] += offset;
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) out[i] = 1.0f;
  }
}

// The same for all vectors of a lane, anything finite past the row's end. The dtype is asked for once, so that all
// loads are under way together: one after another they take a microsecond each when the weight is not in L2.
template <typename X, typename C, int N>
__device__ inline void load_weights(const char* weight, DType dtype, float offset, int lane, int vectors,
                                    float (&out)[C::kVecs][N]) {
  auto load = [&](auto zero) {
    using T = decltype(zero);
#pragma unroll
    for (int v = 0; v < C::kVecs; ++v) {
      const int at = lane + v * C::kLanes;
#pragma unroll
      for (int i = 0; i < N; ++i) out[v][i] = 0.0f;
      if (at < vectors) load_floats<T>(weight + at * N * static_cast<int>(sizeof(T)), out[v]);
#pragma unroll
      for (int i = 0; i < N; ++i) out[v][i] += offset;
    }
  };
  if (dtype == kDType<X>) {
    load(X{});
  } else if (dtype == DType::kAbsent) {
#pragma unroll
    for (auto& vector : out) {
#pragma unroll
      for (float& one : vector) one = 1.0f;
    }
  } else if (dtype == DType::kFloat32) {
    load(float{});
  } else if (dtype == DType::kBFloat16) {
    load(bf16{});
  } else {
    load(fp16{});
  }
}

// What is added to a weight. No offset is -0, which changes no weight it is added to: +0 would turn a weight of -0 into
// +0, and a kernel that leaves the addition out would not give the same bits.
inline float exact_offset(double offset) {
  const float rounded_offset = static_cast<float>(offset);
  return rounded_offset == 0.0f ? -0.0f : rounded_offset;
}

__device__ inline float round_to(DType dtype, float v) {
  if (dtype == DType::kFloat32) return v;
  return dtype == DType::kBFloat16 ? rounded<bf16>(v) : rounded<fp16>(v);
}

// ---- rows that are no vectors ----

// Columns first, first + step, ... below end.
struct Span {
  int first, step, end;
  __device__ int column(int i) const { return first + i * step; }
  __device__ bool has(int i) const { return column(i) < end; }
  __device__ Span until(int sooner) const { return {first, step, sooner < end ? sooner : end}; }

  // How many of its first N columns there are.
  template <int N>
  __device__ int count() const {
    int there = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) there += has(i);
    return there;
  }
};

// What lane `lane` of a row of odd width, strides or alignment takes of the N * kLanes columns from `base` on. Where
// the width is whole vectors it is the vector the lane would own, in the same order, so that a row's sum has the same
// bits as from aligned rows. Other widths have no such kernel, and neighbouring lanes take neighbouring elements.
template <int N, int kLanes>
__device__ inline Span span_of(int lane, int base, int width) {
  return width % N == 0 ? Span{base + lane * N, 1, width} : Span{base + lane, kLanes, width};
}

// The elements of a span, zeros past its end. One branch on the dtype for all of them.
template <int N>
__device__ inline void load_elements(const char* row, DType dtype, int64_t column_stride, const Span& span,
                                     float (&out)[N]) {
  auto load = [&](auto zero) {
    const auto* at = reinterpret_cast<const decltype(zero)*>(row) + span.first * column_stride;
    const int64_t step = span.step * column_stride;
#pragma unroll
    for (int i = 0; i < N; ++i) out[i] = span.has(i) ? to_float(at[i * step]) : 0.0f;
  };
  if (dtype == DType::kFloat32) {
    load(float{});
  } else if (dtype == DType::kBFloat16) {
    load(bf16{});
  } else {
    load(fp16{});
  }
}

template <int N>
__device__ inline void store_spread(char* row, DType dtype, int64_t column_stride, const Span& span,
                                    const float (&in)[N]) {
  auto store = [&](auto zero) {
    using T = decltype(zero);
    T* at = reinterpret_cast<T*>(row) + span.first * column_stride;
    const int64_t step = span.step * column_stride;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (span.has(i)) at[i * step] = from_float<T>(in[i]);
    }
  };
  if (dtype == DType::kFloat32) {
    store(float{});
  } else if (dtype == DType::kBFloat16) {
    store(bf16{});
  } else {
    store(fp16{});
  }
}

// Into a contiguous row.
template <int N>
__device__ inline void store_elements(char* row, DType dtype, const Span& span, const float (&in)[N]) {
  store_spread(row, dtype, 1, span, in);
}

// offset + weight of the span's columns; 1 where there is no weight.
template <int N>
__device__ inline void load_weight_elements(const Rows& weight, float offset, const Span& span, float (&out)[N]) {
  if (weight.present()) load_elements(weight.data, weight.dtype, weight.column_stride, span, out);
#pragma unroll
  for (int i = 0; i < N; ++i) out[i] = weight.present() ? out[i] + offset : 1.0f;
}

__host__ __device__ constexpr int any_threads(int lanes) { return lanes < 128 ? 128 : lanes; }

// ---- bundles ----

// Rows of odd width that follow one another are no vectors, but what they lie in is: a bundle of rows comes to shared
// memory, and leaves it, as one run of bytes. In between its elements are taken one by one, neighbouring lanes
// neighbouring elements as in span_of: there that costs an instruction, not a request to memory.
// (Widths that are whole vectors never are: their sums have another order.)
template <typename X>
bool bundles(const Rows& rows, int width) {
  return width % kVec<X> != 0 && rows.dtype == kDType<X> && rows.adjacent && rows.column_stride == 1 &&
         reinterpret_cast<uintptr_t>(rows.data) % 16 == 0;
}

// Where `count` rows from `first` on lie in a tensor of `rows` rows, all in bytes. Their ends need not be those of
// vectors: the run begins `lead` bytes before the first row. Only the tensor's own end may cut a vector.
struct Run {
  int64_t begin;
  int lead, end, whole;  // from begin on: the first row, past the last one, past the last whole vector of the tensor

  __device__ Run(int64_t first, int count, int row_bytes, int64_t rows) {
    const int64_t start = first * row_bytes;
    begin = start / 16 * 16;
    lead = static_cast<int>(start - begin);
    end = lead + count * row_bytes;
    const int vectors = (end + 15) / 16 * 16;
    const int64_t there = (rows * row_bytes - begin) / 16 * 16;
    whole = vectors < there ? vectors : static_cast<int>(there);
  }

  // What a run may need of shared memory.
  __host__ __device__ static int64_t room(int64_t count, int64_t row_bytes) {
    return count * row_bytes / 128 * 128 + 256;
  }
};

template <typename X>
__device__ inline void copy_elements(char* to, const char* from, int begin, int end) {
  const int at = begin + static_cast<int>(threadIdx.x * sizeof(X));
  if (at < end) *reinterpret_cast<X*>(to + at) = *reinterpret_cast<const X*>(from + at);
}

// Asks for a run. Every thread takes part; the caller announces run.whole bytes, and sees to a barrier of the block
// between this and the use of what came.
template <typename X, int kThreads>
__device__ inline void fetch_run(const char* tensor, const Run& run, char* to, uint64_t* barrier, uint64_t policy) {
  const char* from = tensor + run.begin;
  if constexpr (kCopyEngine) {
    if (threadIdx.x == 0 && run.whole > 0) copy_bulk(to, from, run.whole, barrier, policy);
  } else {
    for (int at = static_cast<int>(threadIdx.x) * 16; at < run.whole; at += kThreads * 16) {
      copy_async(to + at, from + at);
    }
  }
  copy_elements<X>(to, from, run.whole, run.end);
}

// Writes the run's rows, and nothing beside them.
template <typename X, int kThreads>
__device__ inline void store_run(char* tensor, const Run& run, const char* from) {
  char* to = tensor + run.begin;
  const int begin = (run.lead + 15) / 16 * 16, end = run.end / 16 * 16;
#pragma unroll 4
  for (int at = begin + static_cast<int>(threadIdx.x) * 16; at < end; at += kThreads * 16) {
    store_vector(to + at, load_vector(from + at));
  }
  copy_elements<X>(to, from, run.lead, begin < run.end ? begin : run.end);
  copy_elements<X>(to, from, begin > end ? begin : end, run.end);
}

// Columns first, first + kStep, ... of a row without gaps, zeros from `end` on.
template <int kStep, typename T, int N>
__device__ inline void load_columns(const T* row, int first, int end, float (&out)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) out[i] = i * kStep < end - first ? to_float(row[first + i * kStep]) : 0.0f;
}

template <int kStep, typename T, int N>
__device__ inline void store_columns(T* row, int first, int end, const float (&in)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (i * kStep < end - first) row[first + i * kStep] = from_float<T>(in[i]);
  }
}

// The same of a row whose dtype is known only at run time.
template <int kStep, int N>
__device__ inline void load_row_columns(const char* row, DType dtype, int first, int end, float (&out)[N]) {
  if (dtype == DType::kFloat32) {
    load_columns<kStep>(reinterpret_cast<const float*>(row), first, end, out);
  } else if (dtype == DType::kBFloat16) {
    load_columns<kStep>(reinterpret_cast<const bf16*>(row), first, end, out);
  } else {
    load_columns<kStep>(reinterpret_cast<const fp16*>(row), first, end, out);
  }
}

// offset + weight of those columns; 1 where there is no weight.
template <int kStep, int N>
__device__ inline void load_weight_columns(const char* weight, DType dtype, float offset, int first, int end,
                                           float (&out)[N]) {
  if (dtype == DType::kAbsent) {
#pragma unroll
    for (float& one : out) one = 1.0f;
    return;
  }
  load_row_columns<kStep>(weight, dtype, first, end, out);
#pragma unroll
  for (float& one : out) one += offset;
}

// ---- sums over columns ----

// Adds the partial rows. A block takes 4 * kQuads columns: kQuads lanes of a warp a quad each, its other lanes other
// rows, and so do its other warps, kAtOnce at a time; then the lanes meet by shuffles, the warps in shared memory.
// blockIdx.y says which of the sums it is.
struct ColumnSums {
  const float* partial[2];
  char* out[2];
  DType dtype[2];
};

template <int kQuads, int kThreads, int kAtOnce>
__global__ void __launch_bounds__(kThreads) column_sums_kernel(const __grid_constant__ ColumnSums sums_of,
                                                               int64_t partial_rows, int64_t stride, int64_t width) {
  const bool second = blockIdx.y > 0;
  const float* partial = second ? sums_of.partial[1] : sums_of.partial[0];
  char* out = second ? sums_of.out[1] : sums_of.out[0];
  const DType dtype = second ? sums_of.dtype[1] : sums_of.dtype[0];
  constexpr int kWarps = kThreads / kWarp;
  constexpr int kColumns = 4 * kQuads;
  constexpr int kRows = kWarp / kQuads;  // of a warp
  __shared__ float4 sums[kWarps][kQuads];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kColumns + lane % kQuads * 4;
  wait_for_previous_kernel();
  float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  if (column < width) {
    constexpr int kStep = kWarps * kRows;
#pragma unroll 1
    for (int64_t r = warp * kRows + lane / kQuads; r < partial_rows; r += kAtOnce * kStep) {
      float4 row[kAtOnce];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {  // all of them are asked for before the first is needed
        row[k] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (r + k * kStep < partial_rows) {
          row[k] = *reinterpret_cast<const float4*>(partial + (r + k * kStep) * stride + column);
        }
      }
#pragma unroll
      for (const float4& one : row) sum.x += one.x, sum.y += one.y, sum.z += one.z, sum.w += one.w;
    }
  }
#pragma unroll
  for (int step = kWarp / 2; step >= kQuads; step /= 2) {
    sum.x += __shfl_xor_sync(0xffffffffu, sum.x, step), sum.y += __shfl_xor_sync(0xffffffffu, sum.y, step);
    sum.z += __shfl_xor_sync(0xffffffffu, sum.z, step), sum.w += __shfl_xor_sync(0xffffffffu, sum.w, step);
  }
  if (lane < kQuads) sums[warp][lane] = sum;
  __syncthreads();
  const int64_t mine = static_cast<int64_t>(blockIdx.x) * kColumns + threadIdx.x;
  if (threadIdx.x >= kColumns || mine >= width) return;
  float shares[kWarps];
#pragma unroll
  for (int w = 0; w < kWarps; ++w) shares[w] = reinterpret_cast<const float*>(sums)[w * kColumns + threadIdx.x];
#pragma unroll
  for (int step = kWarps / 2; step > 0; step /= 2) {  // in pairs: fewer roundings one after another
#pragma unroll
    for (int w = 0; w < step; ++w) shares[w] += shares[w + step];
  }
  set_element(out, dtype, mine, shares[0]);
}

// Adds up `partial_rows` rows of `stride` floats, a multiple of 4, for each of the outputs that is there. Narrow rows
// are shared by more blocks, so that few columns do not leave the card idle. Launched programmatically, so that
// starting it passes while the kernel that wrote the partial rows ends.
inline Status column_sums(const float* const (&partial)[2], int64_t partial_rows, int64_t stride, int64_t width,
                          const TensorView (&out)[2], bool programmatic, cudaStream_t stream) {
  ColumnSums sums = {};
  unsigned count = 0;
  for (int i = 0; i < 2; ++i) {
    if (!out[i].present()) continue;
    sums.partial[count] = partial[i], sums.out[count] = static_cast<char*>(out[i].data);
    sums.dtype[count++] = out[i].dtype;
  }
  auto with_quads = [&](auto kernel, int quads, int threads) {
    const dim3 grid(static_cast<unsigned>(divide_up(width, 4 * quads)), count);
    return launch(kernel, grid, threads, 0, programmatic, stream, sums, partial_rows, stride, width);
  };
  if (width <= 2048) return with_quads(column_sums_kernel<4, 512, 4>, 4, 512);
  return width <= 8192 ? with_quads(column_sums_kernel<8, 256, 4>, 8, 256)
                       : with_quads(column_sums_kernel<16, 256, 4>, 16, 256);
}

}  // namespace fuselm
