// Elementwise kernels: any function of the elements of a few tensors of one shape, whatever their strides.
//
// Knows no op: a functor says what is computed. A tensor that is repeated along a dimension has stride 0 there.
//
//   struct Sum {
//     static constexpr int kIn = 2, kOut = 1;
//     template <bool kExact>  // the tensors are fp32: as exact as can be, else as fast as 16 bits allow
//     __device__ void operator()(const float (&in)[kIn], float (&out)[kOut]) const { out[0] = in[0] + in[1]; }
//   };
//   elementwise(Sum{}, {&x, &y}, {&out}, stream);
//
// Traffic. Every tensor once, in vectors of 16 bytes, several of a thread under way together: nothing is reused, so
// bandwidth is all there is. Which kernel runs depends on how the tensors lie, all of them taken together:
//   flat       no gaps anywhere: one long run of vectors; a last vector that is not whole goes element by element
//   pitched    rows of whole vectors, one stride from row to row in each tensor, as halves of packed rows have, or 0
//   strided    rows of whole vectors in up to kMaxFolded dimensions, as heads that were transposed; one number for a
//              whole row (a stride of 0 along it) too
//   any        everything else, an element at a time: odd widths with gaps, columns apart, dtypes that differ
// The function sees the same numbers in all of them, so how a tensor lies changes no bit.
#pragma once
#include "rows.cuh"

namespace fuselm {
namespace pointwise {

// Up to one vector for each thread the device holds, a thread has one; beyond that two, and reads by the policy for
// what is larger than L2: with 128 threads a block the fastest of 1 to 8 vectors by 64 to 1024 threads, of seven
// functions and both layouts, from 4096x4096 on (docs/log.md).
constexpr int kThreads = 128, kManyVecs = 2;
constexpr int kMaxFolded = 4;
constexpr int kAnyRows = 8;  // rows of a block of the any kernel, a warp each

// Dimensions that all tensors can fold into their neighbour are one; strides are in elements.
template <int kTensors>
struct Folded {
  int rank = 0;
  int64_t sizes[kMaxRank] = {};
  int64_t strides[kTensors][kMaxRank] = {};

  explicit Folded(const TensorView* const (&views)[kTensors]) {
    const TensorView& first = *views[0];
    for (int d = 0; d < first.rank; ++d) {
      if (first.sizes[d] == 1) continue;
      bool joins = rank > 0;
      for (int t = 0; joins && t < kTensors; ++t) {
        joins = !views[t]->present() || strides[t][rank - 1] == first.sizes[d] * views[t]->strides[d];
      }
      sizes[rank - joins] = joins ? sizes[rank - 1] * first.sizes[d] : first.sizes[d];
      for (int t = 0; t < kTensors; ++t) strides[t][rank - joins] = views[t]->strides[d];
      rank += !joins;
    }
    if (rank == 0) {  // one element
      sizes[0] = 1, rank = 1;
      for (auto& stride : strides) stride[0] = 1;
    }
  }
  int64_t width() const { return sizes[rank - 1]; }
  int64_t count() const {
    int64_t all = 1;
    for (int d = 0; d < rank; ++d) all *= sizes[d];
    return all;
  }
};

// ---- flat ----

template <typename F>
struct FlatArgs {
  const char* in[F::kIn];
  char* out[F::kOut];  // null where it is not wanted
  int64_t count;       // elements
  bool large;          // all tensors together are larger than L2
};

// The function over vector number `at` of each tensor, whose bytes have been asked for already.
template <typename T, typename F>
__device__ inline void apply(const F& f, const uint4 (&raw)[F::kIn], uint4 (&made)[F::kOut]) {
  constexpr int N = kVec<T>;
  float in[F::kIn][N], out[F::kOut][N];
#pragma unroll
  for (int t = 0; t < F::kIn; ++t) unpack<T>(raw[t], in[t]);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    float one[F::kIn], result[F::kOut];
#pragma unroll
    for (int t = 0; t < F::kIn; ++t) one[t] = in[t][i];
    f.template operator()<sizeof(T) == 4>(one, result);
#pragma unroll
    for (int t = 0; t < F::kOut; ++t) out[t][i] = result[t];
  }
#pragma unroll
  for (int t = 0; t < F::kOut; ++t) made[t] = packed<T>(out[t]);
}

template <typename T, typename F, int kVecs, bool kChained>
__global__ void __launch_bounds__(kThreads) flat_kernel(const __grid_constant__ FlatArgs<F> a, const F f) {
  constexpr int N = kVec<T>;
  if (kChained) {
    allow_next_kernel();
    wait_for_previous_kernel();
  }
  const int64_t vectors = a.count / N;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * (kThreads * kVecs) + threadIdx.x;
  const uint64_t policy = read_policy(kVecs > 1 && a.large);
  uint4 raw[kVecs][F::kIn];
#pragma unroll
  for (int v = 0; v < kVecs; ++v) {
    const int64_t at = first + v * kThreads;
    if (at < vectors) {
#pragma unroll
      for (int t = 0; t < F::kIn; ++t) {
        raw[v][t] = kVecs > 1 ? load_vector(a.in[t] + at * 16, policy) : load_vector(a.in[t] + at * 16);
      }
    }
  }
#pragma unroll
  for (int v = 0; v < kVecs; ++v) {
    const int64_t at = first + v * kThreads;
    if (at < vectors) {
      uint4 made[F::kOut];
      apply<T>(f, raw[v], made);
#pragma unroll
      for (int t = 0; t < F::kOut; ++t) {
        if (a.out[t] != nullptr) store_vector(a.out[t] + at * 16, made[t]);
      }
    }
  }
  // Fewer elements than a vector has, for the last block.
  const int64_t at = vectors * N + threadIdx.x;
  if (unlikely(blockIdx.x == gridDim.x - 1 && at < a.count)) {
    float in[F::kIn], out[F::kOut];
#pragma unroll
    for (int t = 0; t < F::kIn; ++t) in[t] = to_float(reinterpret_cast<const T*>(a.in[t])[at]);
    f.template operator()<sizeof(T) == 4>(in, out);
#pragma unroll
    for (int t = 0; t < F::kOut; ++t) {
      if (a.out[t] != nullptr) reinterpret_cast<T*>(a.out[t])[at] = from_float<T>(out[t]);
    }
  }
}

// ---- pitched and strided ----

// kDims row dimensions and the columns behind them. Fewer than 2^31 vectors in all, so that a multiplication divides.
template <typename F, int kDims>
struct StridedArgs {
  char* data[F::kIn + F::kOut];
  int64_t strides[F::kIn + F::kOut][kDims];  // bytes; the outermost first
  Divisor sizes[kDims];                      // of the dimensions behind each of those: the last is vectors of a row
  uint32_t vectors;
  uint32_t splats;  // bit t: tensor t has one number for a row
  bool large;
};

template <typename T, typename F, int kDims, int kVecs, bool kChained>
__global__ void __launch_bounds__(kThreads) strided_kernel(const __grid_constant__ StridedArgs<F, kDims> a, const F f) {
  constexpr int kTensors = F::kIn + F::kOut;
  if (kChained) {
    allow_next_kernel();
    wait_for_previous_kernel();
  }
  const uint32_t first = blockIdx.x * (kThreads * kVecs) + threadIdx.x;
  const uint64_t policy = read_policy(kVecs > 1 && a.large);
  uint4 raw[kVecs][F::kIn];
  // Where vector `at` is in each tensor. Made once for the loads and, unless registers are dear, kept for the stores.
  auto locate = [&](uint32_t at, int64_t (&offset)[kTensors]) {
#pragma unroll
    for (int64_t& one : offset) one = 0;
    uint32_t rest = at;
#pragma unroll
    for (int d = kDims - 1; d >= 0; --d) {
      const uint32_t quotient = a.sizes[d].divide(rest), digit = rest - quotient * a.sizes[d].value;
#pragma unroll
      for (int t = 0; t < kTensors; ++t) {
        if (d == kDims - 1) {
          offset[t] = kDims > 1 && a.splats >> t & 1 ? 0 : digit * int64_t{16};
        } else {
          offset[t] += digit * a.strides[t][d + 1];
        }
      }
      rest = quotient;
    }
#pragma unroll
    for (int t = 0; t < kTensors; ++t) offset[t] += rest * a.strides[t][0];
  };
#pragma unroll
  for (int v = 0; v < kVecs; ++v) {
    const uint32_t at = first + v * kThreads;
    if (at < a.vectors) {
      int64_t offset[kTensors];
      locate(at, offset);
#pragma unroll
      for (int t = 0; t < F::kIn; ++t) {
        const char* from = a.data[t] + offset[t];
        if (kDims > 1 && a.splats >> t & 1) {
          const float one = to_float(*reinterpret_cast<const T*>(from));
          float all[kVec<T>];
#pragma unroll
          for (float& each : all) each = one;
          raw[v][t] = packed<T>(all);
        } else {
          raw[v][t] = kVecs > 1 ? load_vector(from, policy) : load_vector(from);
        }
      }
    }
  }
#pragma unroll
  for (int v = 0; v < kVecs; ++v) {
    const uint32_t at = first + v * kThreads;
    if (at < a.vectors) {
      int64_t offset[kTensors];
      locate(at, offset);
      uint4 made[F::kOut];
      apply<T>(f, raw[v], made);
#pragma unroll
      for (int t = 0; t < F::kOut; ++t) {
        if (a.data[F::kIn + t] != nullptr) store_vector(a.data[F::kIn + t] + offset[F::kIn + t], made[t]);
      }
    }
  }
}

// ---- any ----

template <typename F>
struct AnyArgs {
  char* data[F::kIn + F::kOut];
  DType dtypes[F::kIn + F::kOut];
  int32_t rank;
  int64_t sizes[kMaxRank];
  int64_t strides[F::kIn + F::kOut][kMaxRank];  // elements
  int64_t rows;
};

// A row belongs to one warp of each block in its grid column, whose lanes walk it side by side; to all of them where
// there are fewer rows than a block has warps.
template <typename F, bool kExact>
__global__ void __launch_bounds__(kAnyRows* kWarp) any_kernel(const __grid_constant__ AnyArgs<F> a, const F f) {
  constexpr int kTensors = F::kIn + F::kOut;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (row >= a.rows) return;
  char* rows[kTensors];
#pragma unroll
  for (int t = 0; t < kTensors; ++t) {
    int64_t rest = row, offset = 0;
    for (int d = a.rank - 2; d >= 0; --d) {
      offset += rest % a.sizes[d] * a.strides[t][d];
      rest /= a.sizes[d];
    }
    rows[t] = a.data[t] == nullptr ? nullptr : a.data[t] + offset * element_bytes(a.dtypes[t]);
  }
  const int last = a.rank - 1;
  const int64_t step = static_cast<int64_t>(gridDim.y) * blockDim.x;
  for (int64_t at = static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x; at < a.sizes[last]; at += step) {
    float in[F::kIn], out[F::kOut];
#pragma unroll
    for (int t = 0; t < F::kIn; ++t) in[t] = element(rows[t], a.dtypes[t], at * a.strides[t][last]);
    f.template operator()<kExact>(in, out);
#pragma unroll
    for (int t = 0; t < F::kOut; ++t) {
      char* to = rows[F::kIn + t];
      if (to != nullptr) set_element(to, a.dtypes[F::kIn + t], at * a.strides[F::kIn + t][last], out[t]);
    }
  }
}

// ---- launching ----

struct Place {
  const DeviceFacts& facts;
  cudaStream_t stream;
  bool large;

  bool few(int64_t vectors) const { return vectors <= int64_t{2048} * facts.multiprocessors; }
};

template <typename T, bool kChained, typename F>
Status launch_flat(const F& f, const FlatArgs<F>& a, const Place& place) {
  const int64_t vectors = a.count / kVec<T>;
  auto with = [&](auto kernel, int vecs, bool chained) {
    const int64_t blocks = divide_up(vectors > 0 ? vectors : 1, vecs * kThreads);
    return launch(kernel, dim3(static_cast<unsigned>(blocks)), kThreads, 0, chained, place.stream, a, f);
  };
  if (!place.few(vectors)) return with(flat_kernel<T, F, kManyVecs, false>, kManyVecs, false);
  return with(flat_kernel<T, F, 1, kChained>, 1, kChained && place.facts.capability >= 90);
}

template <typename T, int kDims, bool kChained, typename F, int kTensors>
Status launch_strided(const F& f, const Folded<kTensors>& folded, const TensorView* const (&views)[kTensors],
                      uint32_t splats, const Place& place) {
  StridedArgs<F, kDims> a = {};
  a.splats = splats, a.large = place.large;
  // A dimension of size 1 before the others where there are fewer than kDims.
  const int missing = kDims + 1 - folded.rank;
  for (int t = 0; t < kTensors; ++t) {
    a.data[t] = static_cast<char*>(views[t]->data);
    for (int d = 0; d < kDims; ++d) {
      a.strides[t][d] = d < missing ? 0 : folded.strides[t][d - missing] * static_cast<int64_t>(sizeof(T));
    }
  }
  for (int d = 0; d < kDims - 1; ++d) {
    a.sizes[d] = Divisor(d + 1 < missing ? 1 : static_cast<uint32_t>(folded.sizes[d + 1 - missing]));
  }
  a.sizes[kDims - 1] = Divisor(static_cast<uint32_t>(folded.width() / kVec<T>));
  a.vectors = static_cast<uint32_t>(folded.count() / kVec<T>);
  auto with = [&](auto kernel, int vecs, bool chained) {
    const dim3 grid(static_cast<unsigned>(divide_up(a.vectors, vecs * kThreads)));
    return launch(kernel, grid, kThreads, 0, chained, place.stream, a, f);
  };
  if (!place.few(a.vectors)) return with(strided_kernel<T, F, kDims, kManyVecs, false>, kManyVecs, false);
  return with(strided_kernel<T, F, kDims, 1, kChained>, 1, kChained && place.facts.capability >= 90);
}

template <typename F, int kTensors>
Status launch_any(const F& f, const Folded<kTensors>& folded, const TensorView* const (&views)[kTensors], bool exact,
                  const Place& place) {
  AnyArgs<F> a = {};
  a.rank = folded.rank;
  for (int d = 0; d < folded.rank; ++d) a.sizes[d] = folded.sizes[d];
  for (int t = 0; t < kTensors; ++t) {
    a.data[t] = static_cast<char*>(views[t]->data), a.dtypes[t] = views[t]->dtype;
    for (int d = 0; d < folded.rank; ++d) a.strides[t][d] = folded.strides[t][d];
  }
  a.rows = folded.count() / folded.width();
  constexpr int64_t kMaxGridY = 65535;
  const dim3 block = a.rows < kAnyRows ? dim3(kWarp * kAnyRows) : dim3(kWarp, kAnyRows);
  const dim3 grid(static_cast<unsigned>(divide_up(a.rows, block.y)),
                  static_cast<unsigned>(at_most(divide_up(folded.width(), block.x), kMaxGridY)));
  const auto kernel = exact ? any_kernel<F, true> : any_kernel<F, false>;
  kernel<<<grid, block, 0, place.stream>>>(a, f);
  return launch_status();
}

// How all tensors of a call lie, by which its kernel is chosen.
template <typename T, int kIn, int kTensors>
struct Lie {
  bool flat = true;     // without gaps
  bool strided = true;  // rows of whole vectors, and tensors that have one number for a row
  uint32_t splats = 0;

  Lie(const Folded<kTensors>& folded, const TensorView* const (&views)[kTensors]) {
    constexpr int64_t kMost = int64_t{1} << 31;
    flat = folded.rank == 1;
    strided = folded.rank <= kMaxFolded + 1 && folded.width() % kVec<T> == 0 && folded.count() / kVec<T> < kMost;
    for (int t = 0; t < kTensors; ++t) {
      if (!views[t]->present()) continue;
      const int64_t* strides = folded.strides[t];
      const bool same = views[t]->dtype == kDType<T>;
      bool aligned = same && reinterpret_cast<uintptr_t>(views[t]->data) % 16 == 0;
      flat &= aligned && (strides[folded.rank - 1] == 1 || folded.count() == 1);
      if (t < kIn && strides[folded.rank - 1] == 0) {
        splats |= 1u << t;
        strided &= same;
        continue;
      }
      for (int d = 0; d < folded.rank - 1; ++d) aligned &= strides[d] % kVec<T> == 0;
      strided &= aligned && strides[folded.rank - 1] == 1;
    }
  }
};

template <typename T, bool kChained, typename F, int kTensors>
Status launch_as_they_lie(const F& f, const TensorView* const (&views)[kTensors], const Place& place) {
  const Folded<kTensors> folded(views);
  const Lie<T, F::kIn, kTensors> lie(folded, views);
  if (lie.flat) {
    FlatArgs<F> a = {};
    for (int t = 0; t < F::kIn; ++t) a.in[t] = static_cast<const char*>(views[t]->data);
    for (int t = 0; t < F::kOut; ++t) a.out[t] = static_cast<char*>(views[F::kIn + t]->data);
    a.count = folded.count(), a.large = place.large;
    return launch_flat<T, kChained>(f, a, place);
  }
  if (!lie.strided) return launch_any(f, folded, views, sizeof(T) == 4, place);
  if (folded.rank == 2 && lie.splats == 0) return launch_strided<T, 1, kChained>(f, folded, views, 0, place);
  return launch_strided<T, kMaxFolded, kChained>(f, folded, views, lie.splats, place);
}

}  // namespace pointwise

// Computes f of tensors that have one shape. The first input says the dtype; where others differ, all is computed as
// for fp32. An output that is absent is not written. kChained: on sm_90 and later a small kernel may be set up while
// the one before it ends, which pays where that one is as small, and costs 0.07 us where it is not.
template <bool kChained = false, typename F>
Status elementwise(const F& f, const TensorView* const (&in)[F::kIn], const TensorView* const (&out)[F::kOut],
                   Stream stream) {
  constexpr int kTensors = F::kIn + F::kOut;
  const TensorView* views[kTensors];
  for (int t = 0; t < F::kIn; ++t) views[t] = in[t];
  for (int t = 0; t < F::kOut; ++t) views[F::kIn + t] = out[t];
  const TensorView& first = *in[0];
  DType dtype = first.dtype;
  int64_t bytes = 0, count = 1;
  bool wanted = false;
  if (first.rank < 0 || first.rank > kMaxRank) return Status::kBadShape;
  for (int d = 0; d < first.rank; ++d) count *= first.sizes[d];
  for (int t = 0; t < kTensors; ++t) {
    const TensorView& view = *views[t];
    if (!view.present() && t >= F::kIn) continue;
    if (!is_float(view.dtype)) return Status::kBadDtype;
    if (!same_sizes(first, view)) return Status::kBadShape;
    if (view.dtype != dtype) dtype = DType::kFloat32;
    bytes += count * element_bytes(view.dtype);
    wanted |= t >= F::kIn;
  }
  const DeviceGuard guard(stream.device);
  if (!guard.ok()) return Status::kBadDevice;
  if (count == 0 || !wanted) return Status::kOk;
  const DeviceFacts& facts = device_facts(guard.device());
  const pointwise::Place place{facts, cuda_stream(stream), bytes > facts.l2_bytes};
  return with_dtype(
      dtype, [&](auto zero) { return pointwise::launch_as_they_lie<decltype(zero), kChained>(f, views, place); });
}

}  // namespace fuselm
