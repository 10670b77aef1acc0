// Rotary positions: what rope.cu and rope_backward.cu share. Contract: rope.py.
//
// Knows which thread has which pairs of which head, how pairs come from memory and go back, and how a pair is turned;
// nothing of what is done to a head before or after.
//
// Threads. A job is a token and a few heads of its q, or of its k: `lanes` threads do it, head after head, and keep the
// token's cosines and sines in registers meanwhile. Jobs follow one another from thread to thread, so that a block is
// full whatever the number of heads.
//
// A head is cut into chunks of P pairs, and lane l has chunks l, l + lanes, ...: of half-split pairs a chunk is a
// vector of each half, of interleaved pairs it is one vector. How long a vector is, 16 bytes or, where H / 2 is no
// multiple of that, fewer, depends on H and the dtype alone, never on strides or alignment: where lanes add up a head,
// for QK-norm, the sum has one order. Tensors that cannot be moved in such vectors take the *_any kernels, element by
// element and to the same bits (but for the gradients of QK-norm's weights, whose sums over tokens have another order).
#pragma once
#include <initializer_list>

#include "norm_moments.cuh"

namespace fuselm {
namespace rope {

constexpr int kMaxHead = 512;                          // elements: 32 lanes have kLanePairs pairs each
constexpr int kLanePairs = 8;                          // the most that a lane has of a head
constexpr int64_t kMostJobs = (int64_t{1} << 31) - 1;  // of a launch: what Divisor divides

// ---- who does what ----

// How many there are. A block is blockDim.x lanes by blockDim.y jobs.
struct Jobs {
  Divisor by_slots, by_tokens;  // by_slots: jobs of a token
  uint32_t count;

  Jobs() = default;
  Jobs(int64_t batch, int64_t tokens, int64_t slots)
      : by_slots(static_cast<uint32_t>(slots)),
        by_tokens(static_cast<uint32_t>(tokens)),
        count(static_cast<uint32_t>(batch * tokens * slots)) {}
};

// A thread's. Where there is none left for it, `live` is false and the rest is what the first job has.
struct Job {
  int32_t lane, slot, batch, place;  // place: which token of its row of the batch
  uint32_t token;                    // of all
  bool live;

  Job() = default;
  __device__ Job(const Jobs& jobs, uint32_t block)
      : Job(jobs, block * blockDim.y + threadIdx.y, static_cast<int32_t>(threadIdx.x)) {}
  __device__ Job(const Jobs& jobs, uint32_t wanted, int32_t lane_) {
    lane = lane_;
    live = wanted < jobs.count;
    const uint32_t index = live ? wanted : 0;
    token = jobs.by_slots.divide(index), slot = index - token * jobs.by_slots.value;
    batch = jobs.by_tokens.divide(token), place = token - batch * jobs.by_tokens.value;
  }
};

// Where q or k begins and how far it is from one to the next, in bytes. With N = int32_t for calls that take a
// microsecond: the constant cache is cold when a kernel starts, and each line of parameters is waited for.
template <typename N>
struct Strided {
  const char* data;
  N batch, token, head;

  Strided() = default;
  template <typename M>
  explicit Strided(const Strided<M>& s)
      : data(s.data), batch(static_cast<N>(s.batch)), token(static_cast<N>(s.token)), head(static_cast<N>(s.head)) {}
  __device__ const char* of(const Job& job) const {
    return data + static_cast<int64_t>(job.batch) * batch + static_cast<int64_t>(job.place) * token;
  }
};

// ---- cosines and sines ----

// A position on its way from memory: not looked at before number() is asked.
struct Position {
  uint32_t low, high;
  bool wide;

  __device__ int64_t number() const {
    const uint32_t above = wide ? high : static_cast<uint32_t>(static_cast<int32_t>(low) >> 31);
    return static_cast<int64_t>(static_cast<uint64_t>(above) << 32 | low);
  }
};

template <typename N>
struct Tables {
  const char *cos, *sin, *positions;  // no positions: a token's place is its position
  N cos_row, sin_row;                 // bytes from row to row
  N position_batch, position_token;   // and from position to position
  N rows;
  bool wide;  // positions are int64

  Tables() = default;
  template <typename M>
  explicit Tables(const Tables<M>& t)
      : cos(t.cos),
        sin(t.sin),
        positions(t.positions),
        cos_row(static_cast<N>(t.cos_row)),
        sin_row(static_cast<N>(t.sin_row)),
        position_batch(static_cast<N>(t.position_batch)),
        position_token(static_cast<N>(t.position_token)),
        rows(static_cast<N>(t.rows)),
        wide(t.wide) {}
  __device__ Position position(const Job& job) const {
    Position position = {static_cast<uint32_t>(job.place), 0, true};
    if (positions == nullptr) return position;
    const char* at =
        positions + static_cast<int64_t>(job.batch) * position_batch + static_cast<int64_t>(job.place) * position_token;
    position.wide = wide;
    if (wide) {
      const uint2 both = *reinterpret_cast<const uint2*>(at);
      position.low = both.x, position.high = both.y;
    } else {
      position.low = *reinterpret_cast<const uint32_t*>(at);
    }
    return position;
  }
  // One comparison for both ends: as unsigned, what is below 0 is far above.
  __device__ bool has(int64_t position) const { return static_cast<uint64_t>(position) < static_cast<uint64_t>(rows); }
};

__device__ inline float not_a_number() { return __uint_as_float(0x7fffffffu); }

// Words of a table or a weight, aligned to as many, up to 16 bytes. Asked for here: left to itself the compiler asks
// for some when it has used others.
template <int kWords>
__device__ inline void load_words(const char* from, uint32_t* out) {
  if constexpr (kWords == 1) {
    out[0] = __ldg(reinterpret_cast<const uint32_t*>(from));
  } else if constexpr (kWords == 2) {
    asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(out[0]), "=r"(out[1]) : "l"(from));
  } else {
#pragma unroll
    for (int i = 0; i < kWords; i += 4) {
      const uint4 four = load_constant_now(from + i * 4);
      out[i] = four.x, out[i + 1] = four.y, out[i + 2] = four.z, out[i + 3] = four.w;
    }
  }
}

template <int P>
__device__ inline void load_fp32(const char* from, float* out) {
  uint32_t word[P];
  load_words<P>(from, word);
#pragma unroll
  for (int i = 0; i < P; ++i) out[i] = __uint_as_float(word[i]);
}

// ---- vectors ----

// In the place of a policy for L2 where the tensors are small.
struct Usual {};

// kBytes of a head as they come: 16, 8 or 4.
template <int kBytes>
struct Raw {
  static constexpr int kWords = kBytes / 4;
  uint32_t word[kWords];

  __device__ void clear() {
#pragma unroll
    for (uint32_t& one : word) one = 0;
  }
  __device__ void load(const char* from, Usual) {
    if constexpr (kBytes == 16) {
      const uint4 four = load_vector(from, Global{});
      word[0] = four.x, word[1] = four.y, word[2] = four.z, word[3] = four.w;
    } else if constexpr (kBytes == 8) {
      asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(word[0]), "=r"(word[1]) : "l"(from));
    } else {
      asm volatile("ld.global.u32 %0, [%1];" : "=r"(word[0]) : "l"(from));
    }
  }
  __device__ void load(const char* from, uint64_t policy) {
    if constexpr (kBytes == 16) {
      const uint4 four = load_vector(from, policy);
      word[0] = four.x, word[1] = four.y, word[2] = four.z, word[3] = four.w;
    } else if constexpr (kBytes == 8) {
#if __CUDA_ARCH__ >= 800
      asm volatile("ld.global.L2::cache_hint.v2.u32 {%0, %1}, [%2], %3;"
                   : "=r"(word[0]), "=r"(word[1])
                   : "l"(from), "l"(policy));
#else
      const uint2 two = *reinterpret_cast<const uint2*>(from);
      word[0] = two.x, word[1] = two.y;
#endif
    } else {
#if __CUDA_ARCH__ >= 800
      asm volatile("ld.global.L2::cache_hint.u32 %0, [%1], %2;" : "=r"(word[0]) : "l"(from), "l"(policy));
#else
      word[0] = *reinterpret_cast<const uint32_t*>(from);
#endif
    }
  }
  __device__ void store(char* to) const {
    if constexpr (kBytes == 16) {
      store_vector(to, make_uint4(word[0], word[1], word[2], word[3]));
    } else if constexpr (kBytes == 8) {
      *reinterpret_cast<uint2*>(to) = make_uint2(word[0], word[1]);
    } else {
      *reinterpret_cast<uint32_t*>(to) = word[0];
    }
  }

  // Has the numbers taken out anew next time: the compiler would keep them, in registers it does not have.
  __device__ void forget() {
#pragma unroll
    for (uint32_t& one : word) asm volatile("" : "+r"(one));
  }

  template <typename T>
  __device__ void get(float* out) const {
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      if constexpr (sizeof(T) == 4) {
        out[w] = __uint_as_float(word[w]);
      } else {
        unpack_pair(word[w], out[2 * w], out[2 * w + 1], T{});
      }
    }
  }
  template <typename T>
  __device__ void set(const float* in) {
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      if constexpr (sizeof(T) == 4) {
        word[w] = __float_as_uint(in[w]);
      } else {
        word[w] = packed_pair(in[2 * w], in[2 * w + 1], T{});
      }
    }
  }
};

// ---- heads in vectors ----

// The part of a head that a lane has: kPairs pairs. V elements are a vector. With kSums the lanes are a power of two,
// and some may have less.
template <typename T_, int V_, bool kInterleaved_, int kPairs_, bool kSums>
struct Part {
  using T = T_;
  static constexpr int V = V_;
  static constexpr bool kInterleaved = kInterleaved_;
  static constexpr int P = kInterleaved ? V / 2 : V;
  static constexpr int kPairs = kPairs_;
  static constexpr int kChunks = kPairs / P;
  static constexpr int kVectors = kInterleaved ? 1 : 2;  // of a chunk
  static constexpr int kBytes = V * static_cast<int>(sizeof(T));
  static constexpr bool kAll = !kSums && kChunks == 1;  // a lane for each chunk, none without
  static_assert(kChunks * P == kPairs, "whole chunks");
  using Vectors = Raw<kBytes>[kChunks][kVectors];
  using Floats = float[kPairs];
};

// Where that part is, for one thread.
struct Cut {
  int32_t lane, lanes, chunks, half_bytes;  // chunks of a head

  __device__ int chunk(int j) const { return lane + j * lanes; }
};

// From and to the head's first byte.
template <typename S, typename Policy>
__device__ inline void load_part(const char* head, bool live, const Cut& cut, Policy policy, typename S::Vectors& out) {
#pragma unroll
  for (int j = 0; j < S::kChunks; ++j) {
    const bool there = live && (S::kAll || cut.chunk(j) < cut.chunks);
#pragma unroll
    for (int v = 0; v < S::kVectors; ++v) {
      out[j][v].clear();  // zeros add nothing to a sum
      if (there) out[j][v].load(head + cut.chunk(j) * S::kBytes + v * cut.half_bytes, policy);
    }
  }
}

template <typename S>
__device__ inline void store_part(char* head, bool live, const Cut& cut, const typename S::Vectors& in) {
#pragma unroll
  for (int j = 0; j < S::kChunks; ++j) {
    if (!live || !(S::kAll || cut.chunk(j) < cut.chunks)) continue;
#pragma unroll
    for (int v = 0; v < S::kVectors; ++v) {
      in[j][v].store(head + cut.chunk(j) * S::kBytes + v * cut.half_bytes);
    }
  }
}

// The pairs (a, b) in vectors, whichever way they lie there.
template <typename S>
__device__ inline void get_pairs(const typename S::Vectors& from, float* a, float* b) {
  using T = typename S::T;
#pragma unroll
  for (int j = 0; j < S::kChunks; ++j) {
    if constexpr (S::kInterleaved) {
      float value[S::V];
      from[j][0].template get<T>(value);
#pragma unroll
      for (int i = 0; i < S::P; ++i) a[j * S::P + i] = value[2 * i], b[j * S::P + i] = value[2 * i + 1];
    } else {
      from[j][0].template get<T>(a + j * S::P);
      from[j][S::kVectors - 1].template get<T>(b + j * S::P);
    }
  }
}

template <typename S>
__device__ inline void forget(typename S::Vectors& vectors) {
#pragma unroll
  for (auto& chunk : vectors) {
#pragma unroll
    for (auto& vector : chunk) vector.forget();
  }
}

template <typename S>
__device__ inline void set_pairs(const float* a, const float* b, typename S::Vectors& to) {
  using T = typename S::T;
#pragma unroll
  for (int j = 0; j < S::kChunks; ++j) {
    if constexpr (S::kInterleaved) {
      float value[S::V];
#pragma unroll
      for (int i = 0; i < S::P; ++i) value[2 * i] = a[j * S::P + i], value[2 * i + 1] = b[j * S::P + i];
      to[j][0].template set<T>(value);
    } else {
      to[j][0].template set<T>(a + j * S::P);
      to[j][S::kVectors - 1].template set<T>(b + j * S::P);
    }
  }
}

// The cosines and sines of a position; NaN where the tables, which have a row at least, have none.
template <typename S, typename N>
__device__ inline void load_angles(const Tables<N>& tables, int64_t position, const Cut& cut, float* cos, float* sin) {
  const bool inside = tables.has(position);
  const int64_t row = inside ? position : 0;
  const char *cos_row = tables.cos + row * tables.cos_row, *sin_row = tables.sin + row * tables.sin_row;
#pragma unroll
  for (int j = 0; j < S::kChunks; ++j) {
    const bool there = S::kAll || cut.chunk(j) < cut.chunks;
    const int offset = (there ? cut.chunk(j) : 0) * (S::P * 4);  // what no pair is turned by may be anything
    load_fp32<S::P>(cos_row + offset, cos + j * S::P);
    load_fp32<S::P>(sin_row + offset, sin + j * S::P);
  }
  if (unlikely(!inside)) {
#pragma unroll
    for (int i = 0; i < S::kPairs; ++i) cos[i] = sin[i] = not_a_number();
  }
}

// A weight's numbers for the pairs of a lane: all of them asked for first and looked at later. Its dtype is known only
// at run time; the branch is the same for all threads that have q, and for all that have k.
template <typename S>
struct Weight {
  uint32_t word[S::kChunks][S::kVectors][S::V];

  __device__ void load(const char* weight, DType dtype, const Cut& cut) {
    const int bytes = S::V * element_bytes(dtype);
#pragma unroll
    for (int j = 0; j < S::kChunks; ++j) {
      const int chunk = cut.chunk(j) < cut.chunks ? cut.chunk(j) : 0;  // what no pair is multiplied by may be anything
#pragma unroll
      for (int v = 0; v < S::kVectors; ++v) {
        const char* from = weight + (chunk + v * cut.chunks) * bytes;  // the second half is as many chunks further on
        load_words<S::V / 2>(from, word[j][v]);
        if (dtype == DType::kFloat32) load_words<S::V / 2>(from + S::V * 2, word[j][v] + S::V / 2);
      }
    }
  }
  __device__ void get(DType dtype, float* a, float* b) const {
    auto get = [&](auto zero) {
      using W = decltype(zero);
#pragma unroll
      for (int j = 0; j < S::kChunks; ++j) {
        float value[S::kVectors][S::V];
#pragma unroll
        for (int v = 0; v < S::kVectors; ++v) {
#pragma unroll
          for (int i = 0; i < S::V; i += 4 / static_cast<int>(sizeof(W))) {
            if constexpr (sizeof(W) == 4) {
              value[v][i] = __uint_as_float(word[j][v][i]);
            } else {
              unpack_pair(word[j][v][i / 2], value[v][i], value[v][i + 1], W{});
            }
          }
        }
#pragma unroll
        for (int i = 0; i < S::P; ++i) {
          a[j * S::P + i] = S::kInterleaved ? value[0][2 * i] : value[0][i];
          b[j * S::P + i] = S::kInterleaved ? value[0][2 * i + 1] : value[S::kVectors - 1][i];
        }
      }
    };
    if (dtype == DType::kFloat32) {
      get(float{});
    } else if (dtype == DType::kBFloat16) {
      get(bf16{});
    } else {
      get(fp16{});
    }
  }
};

// ---- heads element by element ----

// Which pairs a lane has where nothing can be moved in vectors: those it has in Part with kSums, in the same order.
// Strides from column to column are in elements.
struct AnyCut {
  int32_t lane, lanes, lane_pairs, half;  // half: pairs of a head
  int32_t chunk_bits;                     // a chunk has 2^chunk_bits pairs
  bool interleaved;

  // The same, of which the compiler does not know it: it would keep every address for the next head, in registers it
  // does not have.
  __device__ AnyCut anew() const { return {now(lane), lanes, lane_pairs, half, chunk_bits, interleaved}; }
  __device__ bool has(int i) const { return i < lane_pairs && pair(i) < half; }
  __device__ int pair(int i) const {
    return ((lane + (i >> chunk_bits) * lanes) << chunk_bits) + (i & ((1 << chunk_bits) - 1));
  }
  __device__ int first(int i) const { return interleaved ? 2 * pair(i) : pair(i); }
  __device__ int second(int i) const { return interleaved ? 2 * pair(i) + 1 : pair(i) + half; }
};

template <typename T>
__device__ inline void load_any(const char* head, int64_t columns, bool live, const AnyCut& known, float* a, float* b) {
  const AnyCut cut = known.anew();
  const T* from = reinterpret_cast<const T*>(head);
#pragma unroll
  for (int i = 0; i < kLanePairs; ++i) {
    const bool there = live && cut.has(i);
    a[i] = there ? to_float(from[cut.first(i) * columns]) : 0.0f;
    b[i] = there ? to_float(from[cut.second(i) * columns]) : 0.0f;
  }
}

template <typename T>
__device__ inline void store_any(char* head, int64_t columns, bool live, const AnyCut& known, const float* a,
                                 const float* b) {
  const AnyCut cut = known.anew();
  T* to = reinterpret_cast<T*>(head);
#pragma unroll
  for (int i = 0; i < kLanePairs; ++i) {
    if (!live || !cut.has(i)) continue;
    to[cut.first(i) * columns] = from_float<T>(a[i]);
    to[cut.second(i) * columns] = from_float<T>(b[i]);
  }
}

__device__ inline void load_any_weights(const char* weight, DType dtype, int64_t columns, const AnyCut& cut, float* a,
                                        float* b) {
#pragma unroll
  for (int i = 0; i < kLanePairs; ++i) {
    const bool there = cut.has(i);
    a[i] = there ? element(weight, dtype, cut.first(i) * columns) : 0.0f;
    b[i] = there ? element(weight, dtype, cut.second(i) * columns) : 0.0f;
  }
}

struct AnyTables : Tables<int64_t> {
  int64_t cos_column, sin_column;  // in elements

  __device__ void load(int64_t position, bool live, const AnyCut& cut, float* c, float* s) const {
    const bool inside = has(position);
    const int64_t row = inside ? position : 0;
#pragma unroll
    for (int i = 0; i < kLanePairs; ++i) {
      const int pair = cut.pair(i);
      const bool there = live && cut.has(i);
      c[i] = s[i] = there && !inside ? not_a_number() : 0.0f;
      if (there && inside) {
        c[i] = __ldg(reinterpret_cast<const float*>(cos + row * cos_row) + pair * cos_column);
        s[i] = __ldg(reinterpret_cast<const float*>(sin + row * sin_row) + pair * sin_column);
      }
    }
  }
};

// ---- arithmetic ----

// Every product and sum is written out, so that no compiler joins them otherwise in one kernel than in another.
__device__ inline void turn(float& a, float& b, float cos, float sin) {
  const float turned = fmaf(a, cos, -__fmul_rn(b, sin));
  b = fmaf(b, cos, __fmul_rn(a, sin));
  a = turned;
}

// The sum over a lane's pairs of x * y: first and second ones of the pairs apart.
template <int kPairs>
__device__ inline float sum_of_products(const float (&xa)[kPairs], const float (&xb)[kPairs], const float (&ya)[kPairs],
                                        const float (&yb)[kPairs]) {
  float first = 0.0f, second = 0.0f;
#pragma unroll
  for (int i = 0; i < kPairs; ++i) first = fmaf(xa[i], ya[i], first), second = fmaf(xb[i], yb[i], second);
  return first + second;
}

// The sums over `lanes` neighbouring lanes, a power of two, given to each of them; all lanes of the warp come here.
template <int kCount>
__device__ inline void sum_lanes(int lanes, float (&sums)[kCount]) {
#pragma unroll 1
  for (int step = 1; step < lanes; step *= 2) {
#pragma unroll
    for (float& sum : sums) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  }
}

// ---- host ----

// How a head is cut where a lane has up to `lane_pairs` pairs of it, by its width and dtype alone.
struct Shape {
  int lane_pairs, vector, pairs, chunks;  // elements of a vector, pairs of a chunk, chunks of a head

  Shape(int64_t width, int element_size, bool interleaved, int lane_pairs_) : lane_pairs(lane_pairs_) {
    const int64_t half = width / 2;
    vector = static_cast<int>(at_most(16 / element_size, interleaved ? 2 * lane_pairs : lane_pairs));
    while (half % (interleaved ? vector / 2 : vector) != 0) vector /= 2;
    pairs = interleaved ? vector / 2 : vector;
    chunks = static_cast<int>(half / pairs);
  }
  int lanes(int chunks_of_lane) const { return static_cast<int>(divide_up(chunks, chunks_of_lane)); }
  // Where they add up: the next power of two.
  int sum_lanes() const {
    int power = 1;
    while (power < lanes(lane_pairs / pairs)) power *= 2;
    return power;
  }
  int chunk_bits() const {
    int bits = 0;
    while (1 << bits < pairs) ++bits;
    return bits;
  }
};

inline int64_t stride_of(const TensorView& view, int d, int64_t bytes) {
  return view.sizes[d] > 1 ? view.strides[d] * bytes : 0;  // from one to itself is no distance, whatever it is called
}

inline Strided<int64_t> strided(const TensorView& x) {
  const int64_t bytes = element_bytes(x.dtype);
  Strided<int64_t> s;
  s.data = static_cast<const char*>(x.data);
  s.batch = stride_of(x, 0, bytes), s.token = stride_of(x, 1, bytes), s.head = stride_of(x, 2, bytes);
  return s;
}

inline bool in_32_bits(std::initializer_list<int64_t> numbers) {
  for (const int64_t number : numbers) {
    if (number != static_cast<int32_t>(number)) return false;
  }
  return true;
}
inline bool in_32_bits(const Strided<int64_t>& s) { return in_32_bits({s.batch, s.token, s.head}); }
inline bool in_32_bits(const Tables<int64_t>& t) {
  return in_32_bits({t.cos_row, t.sin_row, t.position_batch, t.position_token, t.rows});
}

inline bool is_aligned(const void* data, int bytes) { return reinterpret_cast<uintptr_t>(data) % bytes == 0; }

// Whether no two elements share a place because a dimension was repeated.
inline bool is_spread_out(const TensorView& x) {
  for (int d = 0; d < x.rank; ++d) {
    if (x.sizes[d] > 1 && x.strides[d] == 0) return false;
  }
  return true;
}

// Whether every head can be moved in vectors of so many bytes.
inline bool in_vectors(const TensorView& x, int bytes) {
  const Strided<int64_t> s = strided(x);
  const bool apart = s.batch % bytes != 0 || s.token % bytes != 0 || s.head % bytes != 0;
  return is_aligned(x.data, bytes) && !apart && x.strides[3] == 1;
}

inline AnyTables make_tables(const TensorView& cos, const TensorView& sin, const TensorView& positions) {
  AnyTables t = {};
  t.cos = static_cast<const char*>(cos.data), t.sin = static_cast<const char*>(sin.data);
  t.cos_row = stride_of(cos, 0, 4), t.sin_row = stride_of(sin, 0, 4), t.rows = cos.sizes[0];
  t.cos_column = stride_of(cos, 1, 1), t.sin_column = stride_of(sin, 1, 1);
  t.positions = static_cast<const char*>(positions.data), t.wide = positions.dtype == DType::kInt64;
  if (positions.present()) {
    const int last = positions.rank - 1, bytes = t.wide ? 8 : 4;
    t.position_token = stride_of(positions, last, bytes);
    t.position_batch = last > 0 ? stride_of(positions, 0, bytes) : 0;
  }
  return t;
}

// Whether the P numbers of every chunk can be had at once.
inline bool in_vectors(const AnyTables& t, int pairs, int64_t half) {
  const int bytes = pairs < 4 ? 4 * pairs : 16;
  const bool close = half == 1 || (t.cos_column == 1 && t.sin_column == 1);
  return close && t.rows > 0 && is_aligned(t.cos, bytes) && is_aligned(t.sin, bytes) && t.cos_row % bytes == 0 &&
         t.sin_row % bytes == 0;
}

inline Status check_heads(const TensorView& q, const TensorView& k) {
  if (!is_float(q.dtype) || k.dtype != q.dtype) return Status::kBadDtype;
  if (q.rank != 4 || k.rank != 4) return Status::kBadShape;
  for (int d : {0, 1, 3}) {
    if (q.sizes[d] != k.sizes[d]) return Status::kBadShape;
  }
  const int64_t width = q.sizes[3];
  return width % 2 != 0 || width < 2 || width > kMaxHead ? Status::kBadShape : Status::kOk;
}

inline Status check_tables(const TensorView& q, const TensorView& cos, const TensorView& sin,
                           const TensorView& positions) {
  if (cos.dtype != DType::kFloat32 || sin.dtype != DType::kFloat32) return Status::kBadDtype;
  if (cos.rank != 2 || cos.sizes[1] != q.sizes[3] / 2 || !same_sizes(cos, sin)) return Status::kBadShape;
  if (!positions.present()) return q.sizes[1] <= cos.sizes[0] ? Status::kOk : Status::kBadShape;
  if (positions.dtype != DType::kInt32 && positions.dtype != DType::kInt64) return Status::kBadDtype;
  const bool shared = positions.rank == 1 && positions.sizes[0] == q.sizes[1];
  const bool apart = positions.rank == 2 && positions.sizes[0] == q.sizes[0] && positions.sizes[1] == q.sizes[1];
  return shared || apart ? Status::kOk : Status::kBadShape;
}

inline Status check_weights(const TensorView& q, const TensorView& q_weight, const TensorView& k_weight) {
  if (q_weight.present() != k_weight.present()) return Status::kBadShape;
  for (const TensorView* weight : {&q_weight, &k_weight}) {
    if (!weight->present()) continue;
    if (!is_float(weight->dtype)) return Status::kBadDtype;
    if (weight->rank != 1 || weight->sizes[0] != q.sizes[3]) return Status::kBadShape;
  }
  return Status::kOk;
}

// Rows of the batch, and tokens of each, that one launch has: as many as kMostJobs lets it. Either all tokens of some
// rows or, where that is too much, some tokens of one.
struct Piece {
  int64_t batch, batches, token, tokens;

  int64_t first_token(int64_t tokens_of_row) const { return batch * tokens_of_row + token; }
};

template <typename F>
Status for_pieces(int64_t batches, int64_t tokens, int64_t slots, F&& f) {
  const int64_t rows = kMostJobs / (tokens * slots), some = kMostJobs / slots;
  for (int64_t b = 0; b < batches; b += rows > 0 ? rows : 1) {
    for (int64_t t = 0; t < tokens; t += rows > 0 ? tokens : some) {
      const Piece piece{b, at_most(batches - b, rows > 0 ? rows : 1), t, rows > 0 ? tokens : at_most(tokens - t, some)};
      const Status status = f(piece);
      if (status != Status::kOk) return status;
    }
  }
  return Status::kOk;
}

inline void move_to(const Piece& piece, Strided<int64_t>& x) {
  x.data += piece.batch * x.batch + piece.token * x.token;
}

inline void move_to(const Piece& piece, Tables<int64_t>& t) {
  if (t.positions != nullptr) {
    t.positions += piece.batch * t.position_batch + piece.token * t.position_token;
  } else {  // a token's place begins at 0 in every piece, and so do the tables
    t.cos += piece.token * t.cos_row, t.sin += piece.token * t.sin_row, t.rows -= piece.token;
  }
}

}  // namespace rope
}  // namespace fuselm
