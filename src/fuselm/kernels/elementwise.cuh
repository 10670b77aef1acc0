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
//   small      flat or pitched, and so few that the device has a thread for each vector: 8 bytes a thread, in whole
//              blocks, so that there is nothing to ask before they are read; where no block size fits, the next two
//   flat       no gaps anywhere: one long run of vectors; a last vector that is not whole goes element by element
//   pitched    rows of whole vectors, one stride from row to row in each tensor, as halves of packed rows have, or 0
//   strided    rows of whole vectors in up to kMaxFolded dimensions, as heads that were transposed; one number for a
//              whole row (a stride of 0 along it) too
//   any        everything else, an element at a time: odd widths with gaps, columns apart, dtypes that differ
// The function sees the same numbers in all of them, so how a tensor lies changes no bit.
#pragma once
#include "rows.cuh"

namespace fuselm {

// As for vectors of 16 bytes: pieces of 8.
template <typename T>
__device__ inline void unpack(const uint2& raw, float (&out)[kVec<T> / 2]) {
  if constexpr (sizeof(T) == 4) {
    out[0] = __uint_as_float(raw.x), out[1] = __uint_as_float(raw.y);
  } else {
    unpack_pair(raw.x, out[0], out[1], T{}), unpack_pair(raw.y, out[2], out[3], T{});
  }
}

template <typename T>
__device__ inline uint2 packed(const float (&in)[kVec<T> / 2]) {
  if constexpr (sizeof(T) == 4) {
    return make_uint2(__float_as_uint(in[0]), __float_as_uint(in[1]));
  } else {
    return make_uint2(packed_pair(in[0], in[1], T{}), packed_pair(in[2], in[3], T{}));
  }
}

namespace pointwise {

// Up to one vector for each thread the device holds, a thread has one; beyond that two, and reads by the policy for
// what is larger than L2: with 128 threads a block the fastest of 1 to 8 vectors by 64 to 1024 threads, of seven
// functions and both layouts, from 4096x4096 on (docs/log.md).
constexpr int kThreads = 128, kManyVecs = 2;
constexpr int kMaxFolded = 4;
constexpr int kAnyRows = 8;  // rows of a block of the any kernel, a warp each
// Blocks of the small kernel. It runs up to one vector for each thread the device holds, as far as it was found to be
// faster than a vector a thread: by 0.06 to 0.32 us from 768 elements on, and still 7.42 beside 7.55 at 917504, 0.42 of
// that limit on an H200. Beyond it there are two vectors a thread, and bandwidth counts.
constexpr int kSmallThreads = 256, kLeastSmallThreads = 64;

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

// ---- what all kernels do ----

// The function over one vector of each tensor, whose bytes have been asked for already.
template <typename T, typename Vector, typename F>
__device__ inline void apply(const F& f, const Vector (&raw)[F::kIn], Vector (&made)[F::kOut]) {
  constexpr int N = sizeof(Vector) / sizeof(T);
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

// ---- small: flat or pitched ----

// What is needed before a load comes first, in one line of the constant cache, which is cold when a kernel starts.
template <typename F, bool kPitched>
struct SmallArgs {
  const char* in[F::kIn];
  uint32_t in_pitch[kPitched ? F::kIn : 1];  // bytes from row to row
  char* out[F::kOut];                        // null where it is not wanted
  uint32_t out_pitch[kPitched ? F::kOut : 1];
};

// Every thread has a piece; blockIdx.y is its row where there are pitches. So there is nothing before the first load
// but its address: it is the 9th instruction, and the 23rd where a count is read, divided and compared first (SiLU in
// bf16). With half a vector a thread there is less code to be fetched, too: 40 instructions, not 112.
template <typename T, typename Piece, typename F, bool kPitched, bool kChained>
__global__ void __launch_bounds__(kSmallThreads)
    small_kernel(const __grid_constant__ SmallArgs<F, kPitched> a, const F f) {
  const uint32_t piece = blockIdx.x * blockDim.x + threadIdx.x;
  const Piece* from[F::kIn];
#pragma unroll
  for (int t = 0; t < F::kIn; ++t) {
    const uint64_t row = kPitched ? blockIdx.y * static_cast<uint64_t>(a.in_pitch[t]) : 0;
    from[t] = reinterpret_cast<const Piece*>(a.in[t] + row) + piece;
  }
  if (kChained) {
#pragma unroll
    for (const Piece* one : from) warm(one);
    allow_next_kernel();
    wait_for_previous_kernel();
  }
  Piece raw[F::kIn], made[F::kOut];
#pragma unroll
  for (int t = 0; t < F::kIn; ++t) raw[t] = *from[t];
  apply<T>(f, raw, made);
#pragma unroll
  for (int t = 0; t < F::kOut; ++t) {
    const uint64_t row = kPitched ? blockIdx.y * static_cast<uint64_t>(a.out_pitch[t]) : 0;
    // Of one output it is known that it is wanted.
    if (F::kOut == 1 || a.out[t] != nullptr) reinterpret_cast<Piece*>(a.out[t] + row)[piece] = made[t];
  }
}

// ---- flat ----

template <typename F>
struct FlatArgs {
  const char* in[F::kIn];
  char* out[F::kOut];  // null where it is not wanted
  int64_t count;       // elements
  bool large;          // all tensors together are larger than L2
};

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

// The threads of a block such that whole blocks have so many pieces; whole warps where that can be. 0: there are none,
// or they were not looked for: every number of threads would be 0.4 us of the host's where none fits.
inline int whole_block(int64_t pieces) {
  if (pieces <= kSmallThreads) return static_cast<int>(pieces);
  for (int step : {kWarp, 8}) {
    for (int threads = kSmallThreads; threads >= kLeastSmallThreads; threads -= step) {
      if (static_cast<uint32_t>(pieces) % static_cast<uint32_t>(threads) == 0) return threads;
    }
  }
  return 0;
}

// The threads of a block of the small kernel, 0 where another one must run. Rows of fewer pieces than are worth a block
// of their own are for the pitched kernel.
template <typename T, bool kPitched, int kTensors>
int small_block(const Folded<kTensors>& folded, const TensorView* const (&views)[kTensors], const Place& place) {
  constexpr int N = kVec<T> / 2;
  if (!place.few(folded.count() / kVec<T>) || folded.width() % N != 0) return 0;
  const int64_t pieces = folded.width() / N;
  if constexpr (kPitched) {
    constexpr int64_t kMaxGridY = 65535, kMaxPitch = INT64_C(0xffffffff) / static_cast<int64_t>(sizeof(T));
    if (folded.sizes[0] > kMaxGridY || pieces < kLeastSmallThreads) return 0;
    for (int t = 0; t < kTensors; ++t) {
      if (views[t]->present() && (folded.strides[t][0] < 0 || folded.strides[t][0] > kMaxPitch)) return 0;
    }
  }
  return whole_block(pieces);
}

template <typename T, bool kPitched, bool kChained, typename F, int kTensors>
Status launch_small(const F& f, const Folded<kTensors>& folded, const TensorView* const (&views)[kTensors], int threads,
                    const Place& place) {
  SmallArgs<F, kPitched> a = {};
  for (int t = 0; t < F::kIn; ++t) a.in[t] = static_cast<const char*>(views[t]->data);
  for (int t = 0; t < F::kOut; ++t) a.out[t] = static_cast<char*>(views[F::kIn + t]->data);
  if constexpr (kPitched) {
    auto pitch = [&](int t) { return static_cast<uint32_t>(folded.strides[t][0] * static_cast<int64_t>(sizeof(T))); };
    for (int t = 0; t < F::kIn; ++t) a.in_pitch[t] = pitch(t);
    for (int t = 0; t < F::kOut; ++t) a.out_pitch[t] = pitch(F::kIn + t);
  }
  const auto across = static_cast<unsigned>(folded.width() / (kVec<T> / 2) / threads);
  const dim3 grid(across, kPitched ? static_cast<unsigned>(folded.sizes[0]) : 1);
  return launch(small_kernel<T, uint2, F, kPitched, kChained>, grid, threads, 0,
                kChained && place.facts.capability >= 90, place.stream, a, f);
}

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
    const int threads = small_block<T, false>(folded, views, place);
    if (threads > 0) return launch_small<T, false, kChained>(f, folded, views, threads, place);
    FlatArgs<F> a = {};
    for (int t = 0; t < F::kIn; ++t) a.in[t] = static_cast<const char*>(views[t]->data);
    for (int t = 0; t < F::kOut; ++t) a.out[t] = static_cast<char*>(views[F::kIn + t]->data);
    a.count = folded.count(), a.large = place.large;
    return launch_flat<T, kChained>(f, a, place);
  }
  if (!lie.strided) return launch_any(f, folded, views, sizeof(T) == 4, place);
  if (folded.rank == 2 && lie.splats == 0) {
    const int threads = small_block<T, true>(folded, views, place);
    if (threads > 0) return launch_small<T, true, kChained>(f, folded, views, threads, place);
    return launch_strided<T, 1, kChained>(f, folded, views, 0, place);
  }
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
