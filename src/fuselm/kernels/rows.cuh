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

// ---- addressing
// ------------------------------------------------------------------------------------------------------

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
  int32_t outer = 1;          // row dimensions left after folding
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

// Vector number `index` of a small tensor whose dtype is known only at run time, a weight: the branch is the same for
// all threads, and a template over every mix of dtypes would triple the kernels. By the read-only path: the compiler
// may ask for the next one before the stores of this one.
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

// ---- who owns what ----

template <int lanes, int vecs, int threads, int blocks, bool lean = false>
struct Config {
  static constexpr int kLanes = lanes;      // threads that own a row
  static constexpr int kVecs = vecs;        // vectors of the row each of them holds
  static constexpr int kThreads = threads;  // threads of a block
  static constexpr int kBlocks = blocks;  // blocks wanted on a multiprocessor: what the compiler may spend registers by
  static constexpr bool kLean = lean;     // compiled for the usual arguments alone
  static constexpr int kGroups = threads / lanes;
};

template <typename... Configs>
struct ConfigList {
  // Calls f with the first configuration that holds `vectors`; false if none does.
  template <typename F>
  static bool pick(int64_t vectors, F&& f) {
    return ((vectors <= Configs::kLanes * Configs::kVecs && (f(Configs{}), true)) || ...);
  }
};

// ---- rows that wait ----

// How a vector waits for its row's sum: as it came, or in fp32 when the residual is fp32 and x is not.
template <typename X>
struct PackedVector {
  uint4 raw;
  __device__ void get(float (&out)[kVec<X>]) const { unpack<X>(raw, out); }
  __device__ void set(const float (&in)[kVec<X>]) { raw = packed<X>(in); }
};

template <typename X>
struct FloatVector {
  float value[kVec<X>];
  __device__ void get(float (&out)[kVec<X>]) const {
#pragma unroll
    for (int i = 0; i < kVec<X>; ++i) out[i] = value[i];
  }
  __device__ void set(const float (&in)[kVec<X>]) {
#pragma unroll
    for (int i = 0; i < kVec<X>; ++i) value[i] = in[i];
  }
};

template <typename X, typename H>
using Held = std::conditional_t<std::is_same_v<X, H>, PackedVector<X>, FloatVector<X>>;

// A vector of x and, where there is one, of the residual, asked for and not yet looked at.
template <typename X, typename H, bool kResidual>
struct Loaded {
  static constexpr int kPieces = sizeof(H) / sizeof(X);
  uint4 x;
  uint4 residual[kResidual ? kPieces : 1];

  __device__ void load(const char* x_at, const char* residual_at) {
    x = load_streaming(x_at);
    if constexpr (kResidual) {
#pragma unroll
      for (int p = 0; p < kPieces; ++p) residual[p] = load_streaming(residual_at + p * 16);
    }
  }

  // Past the row's end: zeros, which add nothing to the sum of squares.
  __device__ void clear() {
    x = make_uint4(0, 0, 0, 0);
#pragma unroll
    for (auto& piece : residual) piece = make_uint4(0, 0, 0, 0);
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

__device__ inline float round_to(DType dtype, float v) {
  if (dtype == DType::kFloat32) return v;
  return dtype == DType::kBFloat16 ? rounded<bf16>(v) : rounded<fp16>(v);
}

// offset + weight of one column; 1 where there is no weight.
__device__ inline float element_of_weight(const Rows& weight, float offset, int64_t column) {
  return weight.present() ? element(weight.data, weight.dtype, column * weight.column_stride) + offset : 1.0f;
}

__host__ __device__ constexpr int any_threads(int lanes) { return lanes < 128 ? 128 : lanes; }

// ---- sums over columns ----

// Adds the partial rows: a block takes kColumns columns, 1024 / kColumns threads share the rows of each.
template <int kColumns>
__global__ void __launch_bounds__(1024) column_sums_kernel(const float* partial, int64_t partial_rows, int64_t stride,
                                                           int64_t width, char* out, DType dtype) {
  constexpr int kShares = 1024 / kColumns;
  __shared__ float sums[1024];
  const int share = threadIdx.x / kColumns;
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kColumns + threadIdx.x % kColumns;
  wait_for_previous_kernel();
  float sum = 0.0f;
  if (column < width) {
#pragma unroll 8
    for (int64_t r = share; r < partial_rows; r += kShares) sum += partial[r * stride + column];
  }
  sums[threadIdx.x] = sum;
#pragma unroll
  for (int half = kShares / 2; half > 0; half /= 2) {
    __syncthreads();
    if (share < half) sums[threadIdx.x] += sums[threadIdx.x + half * kColumns];
  }
  if (share == 0 && column < width) set_element(out, dtype, column, sums[threadIdx.x]);
}

// Adds up `partial_rows` rows of `stride` floats into `out`. As many blocks as there are multiprocessors, or about:
// fewer leave the card idle, more come in a second wave. Launched programmatically, so that the 2 us of starting it
// pass while the kernel that wrote the partial rows ends.
inline Status column_sums(const float* partial, int64_t partial_rows, int64_t stride, int64_t width,
                          const TensorView& out, bool programmatic, cudaStream_t stream) {
  auto with_columns = [&](auto kernel, int columns) {
    const dim3 grid(static_cast<unsigned>(divide_up(width, columns)));
    return launch(kernel, grid, 1024, 0, programmatic, stream, partial, partial_rows, stride, width,
                  static_cast<char*>(out.data), out.dtype);
  };
  if (width <= 1024) return with_columns(column_sums_kernel<8>, 8);
  if (width <= 4096) return with_columns(column_sums_kernel<32>, 32);
  return with_columns(column_sums_kernel<128>, 128);
}

}  // namespace fuselm
