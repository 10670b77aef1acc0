// Embedding, backward: each row of a table's gradient is the sum of dout over the tokens that looked it up. Contract,
// and the order of that sum: embedding.py. No atomics on floats; what a row gets depends on its own tokens alone.
//
// Up to kFew tokens, one kernel: a block has a range of rows, fills it with zeros and sums up what it finds in it.
//
// More tokens, three kernels, the later two launched while the one before them ends:
//
// sort. A stable counting sort without a word between blocks. A block has every blocks-th row and reads all indices: it
// counts those of its rows, warp by warp, and those of the blocks before it, which is where its part of the sorted list
// begins. (Not a range of rows each: words that are frequent have low numbers, and one block would place all of them.)
// That is blocks * tokens * 8 bytes from L2, by the books 2.4 us for 32768 tokens. What does not stay in shared memory,
// from some 80,000 tokens on, is read once more: 150 us for a million, beside 400 for reading dout at a width of 768.
// Rows without a token are filled with zeros.
//
// sum. The sorted list is cut into pieces: kPiece tokens of one row, a row's last piece with what is left over, so that
// a row with fewer than twice as many is one piece. A warp has the pieces that begin in a chunk of the list, and 32
// vectors of their columns: work goes by tokens, however unevenly words are spread. It has kAtOnce rows on their way.
// The sum of a row's only piece is its gradient; sums of others go to the workspace, in fp32.
//
// finish. Adds up the pieces of rows that have several.
//
// The gradient of a table of positions takes the same way. Where positions are counted the list need not be sorted:
// what is at a place is known, and where the table has no other rows the first kernel is left out.
//
// Traffic. dout is read once for each table, and each gradient is written once. Pieces of rows that have several are
// 1/8 of the bytes of a bf16 dout at the most, written and read.
#include "embedding.cuh"

namespace fuselm {
namespace embedding {
namespace {

constexpr uint32_t kPiece = 16;  // tokens: the contract's PIECE. Of 32, sums were half again as wrong as torch's
constexpr int kGroups = 16;      // the contract's GROUPS
constexpr uint32_t kFew = 256;   // tokens that one kernel takes
constexpr int kAtOnce = 8;       // rows of dout that a warp waits for together
constexpr uint32_t kFlag = 1u << 31, kNumber = kFlag - 1;

// How a row with so many tokens is added up.
__device__ inline bool is_long(uint32_t count) { return count >= 2 * kPiece; }
__device__ inline bool begins_piece(uint32_t rank, uint32_t count) {
  return rank % kPiece == 0 && (rank == 0 || rank / kPiece < count / kPiece);
}

// What the sorted list has at a place: a token, with kFlag where its row has several pieces, and the row, with kFlag
// where one of them begins.
__device__ inline uint2 packed_place(uint32_t token, uint32_t row, uint32_t rank, uint32_t count) {
  return make_uint2(token | (is_long(count) ? kFlag : 0), row | (begins_piece(rank, count) ? kFlag : 0));
}

// A table whose gradient is wanted.
struct Table {
  char* out;  // [rows, width], contiguous
  int64_t row_bytes;
  int64_t rows;
  DType dtype;
  int32_t block_rows;  // of a block that takes few tokens, or that sorts, the most
  int32_t ahead;       // of those, rows that are filled before it is known whether they have a token
  uint2* places;       // the sorted list
  uint4* heads;        // see head_of
  uint32_t* valid;     // how many places there are: a token whose index is out of range has none
  float* partial;      // a row for each kPiece-th place: where rows have several pieces, those are no closer together
  Divisor blocks;      // that sort: row r is number r / blocks of block r % blocks
  Divisor batch;       // tokens of a row where positions are counted
  IndexList indices;
};

struct BackwardArgs {
  Rows dout;
  uint32_t tokens;
  int32_t width;
  int64_t stride;  // floats of a partial row
  uint32_t slice;  // tokens that a warp of a sorting block has
  uint32_t chunk;  // places that a summing warp has the beginnings in
  Divisor spans;   // a row's columns in parts of a warp each
  bool cached;     // a sorting block has room for all indices
  bool large;
  Table tables[2];
};

// ---- zeros ----

// Zeros over [begin, end), by `threads` threads of which this is number `index`. Numbers have two bytes or four.
__device__ inline void fill(char* begin, char* end, int index, int threads) {
  char* const first = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(begin) + 15) / 16 * 16);
  char* const last = reinterpret_cast<char*>(reinterpret_cast<uintptr_t>(end) / 16 * 16);
  for (char* at = begin + index * 2; at < end && at < first; at += threads * 2) *reinterpret_cast<uint16_t*>(at) = 0;
#pragma unroll 4
  for (char* at = first + index * 16; at < last; at += threads * 16) store_vector(at, make_uint4(0, 0, 0, 0));
  for (char* at = (first > last ? first : last) + index * 2; at < end; at += threads * 2) {
    *reinterpret_cast<uint16_t*>(at) = 0;
  }
}

// ---- a lane's columns ----

// N numbers as a vector of a row whose dtype is known only at run time.
template <int N>
__device__ inline void store_vector_as(char* row, DType dtype, int vector, const float (&in)[N]) {
  char* to = row + static_cast<int64_t>(vector) * N * element_bytes(dtype);
  auto store16 = [&](auto zero) {
    using T = decltype(zero);
    if constexpr (N == 4) {
      *reinterpret_cast<uint2*>(to) = make_uint2(packed_pair(in[0], in[1], T{}), packed_pair(in[2], in[3], T{}));
    } else {
      store_floats<T>(to, in);
    }
  };
  if (dtype == DType::kFloat32) {
    store_floats<float>(to, in);
  } else if (dtype == DType::kBFloat16) {
    store16(bf16{});
  } else {
    store16(fp16{});
  }
}

// What a lane has of a row of dout, and of the sum: a vector of 16 bytes of dout, or kElements columns a warp apart
// where rows are no vectors. Each column is added up alike in both.
constexpr int kElements = 4;

template <typename G, bool kVectors>
struct Columns {
  static constexpr int N = kVectors ? kVec<G> : kElements;
  const int vector;  // the lane's, of vectors
  const Span span;   // the lane's, of elements
  const bool live;   // the row reaches so far

  __device__ Columns(int part, int lane, int width)
      : vector(part * kWarp + lane),
        span{part * kWarp * kElements + lane, kWarp, width},
        live(kVectors ? vector < width / N : span.has(0)) {}

  // Of the row that begins at `row`. A lane past the row's end takes what its first lane takes: a load that some lanes
  // do not do leaves the compiler to wait for it and move what came.
  __device__ uint4 load(const char* row, const Rows& dout, uint64_t policy) const {
    if constexpr (kVectors) {
      return load_vector(row + (live ? vector : 0) * 16, policy);
    } else {
      float value[kElements];
      load_elements(row, kDType<G>, dout.column_stride, span, value);
      return packed<float>(value);  // as bits
    }
  }
  __device__ static void add(const uint4& raw, float (&sum)[N]) {
    float value[N];
    unpack<std::conditional_t<kVectors, G, float>>(raw, value);
#pragma unroll
    for (int i = 0; i < N; ++i) sum[i] += value[i];
  }
  __device__ void store(char* row, DType dtype, const float (&sum)[N]) const {
    if (!live) return;
    if constexpr (kVectors) {
      store_vector_as(row, dtype, vector, sum);
    } else {
      store_elements(row, dtype, span, sum);
    }
  }
};

template <int N>
__device__ inline void clear(float (&sum)[N]) {
#pragma unroll
  for (float& one : sum) one = 0.0f;
}

// Where a token's row of dout begins.
template <bool kVectors>
__device__ inline const char* row_of(const Rows& dout, uint32_t token) {
  return kVectors ? dout.row(token) : dout.any_row(token);
}

// Adds up rows first to count - 1 in turn, and calls before(k) before each; row(k) is where row k begins. All threads
// of a warp come here together.
template <typename G, bool kVectors, typename Row, typename Before>
__device__ inline void walk(const BackwardArgs& a, const Columns<G, kVectors>& mine, uint64_t policy, int first,
                            int count, float (&sum)[Columns<G, kVectors>::N], const Row& row, const Before& before) {
#pragma unroll 1
  for (int j = first; j < count; j += kAtOnce) {
    uint4 raw[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) raw[k] = mine.load(row(min(j + k, count - 1)), a.dout, policy);
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {  // all of them have been asked for
      if (j + k >= count) break;
      before(j + k);
      mine.add(raw[k], sum);
    }
  }
}

// ---- few tokens ----

constexpr int kFewThreads = kFew, kFewWarps = kFewThreads / kWarp;

// A block's number for each thread for which `there` holds, in the order of threads, and how many there are in all.
struct Numbered {
  uint32_t number, all;

  __device__ Numbered(bool there, uint32_t* scratch) {
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    const uint32_t mask = __ballot_sync(0xffffffffu, there);
    if (lane == 0) scratch[warp] = __popc(mask);
    __syncthreads();
    number = __popc(mask & ((1u << lane) - 1)), all = 0;
#pragma unroll
    for (int w = 0; w < kFewWarps; ++w) {
      number += w < warp ? scratch[w] : 0;
      all += scratch[w];
    }
  }
};

// The tokens of a block's rows, sorted by row and, of one row, in their order: segment s is places begin[s] and on.
struct FewTokens {
  uint32_t found_row[kFew], found_token[kFew], row[kFew], token[kFew], begin[kFew + 1], scratch[2][kFewWarps];

  // Of a token for each thread; returns how many segments there are.
  __device__ uint32_t sort(bool there, uint32_t own_row) {
    const Numbered found(there, scratch[0]);
    if (there) found_row[found.number] = own_row, found_token[found.number] = threadIdx.x;
    __syncthreads();
    const uint32_t thread = threadIdx.x, count = found.all;
    if (thread < count) {
      const uint32_t mine = found_row[thread];
      uint32_t place = 0;
      for (uint32_t other = 0; other < count; ++other) {
        const uint32_t theirs = found_row[other];
        place += theirs < mine || (theirs == mine && other < thread);
      }
      row[place] = mine, token[place] = found_token[thread];
    }
    __syncthreads();
    const bool begins = thread < count && (thread == 0 || row[thread - 1] != row[thread]);
    const Numbered segment(begins, scratch[1]);
    if (begins) begin[segment.number] = thread;
    if (thread == 0) begin[segment.all] = count;
    __syncthreads();
    return segment.all;
  }
};

template <typename G, bool kVectors>
__global__ void __launch_bounds__(kFewThreads, fitting_blocks(kFewThreads, kVectors ? 3 : 2))
    embedding_few_kernel(const __grid_constant__ BackwardArgs a) {
  using Mine = Columns<G, kVectors>;
  __shared__ FewTokens few;
  const Table& t = a.tables[blockIdx.y];
  const int64_t low = static_cast<int64_t>(blockIdx.x) * t.block_rows;
  if (low >= t.rows) return;
  const int64_t rows = t.rows - low < t.block_rows ? t.rows - low : t.block_rows;
  char* const out = t.out + low * t.row_bytes;
  const int64_t index = threadIdx.x < a.tokens ? t.indices.of(threadIdx.x) : -1;
  const bool there = index >= low && index < low + rows;
  // While indices are on their way, and tokens after them, there is something to write. Sums come after a barrier.
  const int64_t ahead = rows < t.ahead ? rows : t.ahead;
  fill(out, out + ahead * t.row_bytes, threadIdx.x, kFewThreads);
  const uint32_t segments = few.sort(there, static_cast<uint32_t>(index - low));

  const uint64_t policy = read_policy(a.large);
  const uint32_t spans = a.spans.value;
  for (uint32_t unit = threadIdx.x / kWarp; unit < segments * spans; unit += kFewWarps) {
    const uint32_t segment = a.spans.divide(unit), begin = few.begin[segment];
    const Mine mine(static_cast<int>(unit - segment * spans), threadIdx.x % kWarp, a.width);
    const uint32_t count = few.begin[segment + 1] - begin;
    float sum[Mine::N], piece[Mine::N];
    clear(sum), clear(piece);
    auto take_piece = [&] {
#pragma unroll
      for (int i = 0; i < Mine::N; ++i) sum[i] += piece[i];
      clear(piece);
    };
    walk(
        a, mine, policy, 0, static_cast<int>(count), piece,
        [&](uint32_t k) { return row_of<kVectors>(a.dout, few.token[begin + k]); },
        [&](uint32_t k) {
          if (begins_piece(k, count)) take_piece();
        });
    take_piece();
    mine.store(out + few.row[begin] * t.row_bytes, t.dtype, sum);
  }

  // The rows between those.
  for (uint32_t s = 0; s <= segments; ++s) {
    const int64_t after = s == 0 ? 0 : int64_t{few.row[few.begin[s - 1]]} + 1;
    const int64_t end = s == segments ? rows : int64_t{few.row[few.begin[s]]};
    const int64_t from = after > ahead ? after : ahead;
    if (from < end) fill(out + from * t.row_bytes, out + end * t.row_bytes, threadIdx.x, kFewThreads);
  }
}

// ---- sort ----

constexpr int kSortThreads = 1024, kSortWarps = kSortThreads / kWarp;
constexpr int kMostBlockRows = kSortThreads;  // a thread for each
constexpr uint32_t kNoRow = 0xffff;           // more than any row has as its number within a block
// What a block writes before it knows better costs no time, there being little else to do for memory; but a row that
// has a token is then written twice.
constexpr int64_t kAheadBytes = 128 * 1024;

__device__ inline uint32_t warp_sum(uint32_t v) {
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) v += __shfl_xor_sync(0xffffffffu, v, step);
  return v;
}

// What a sorting block has in shared memory.
struct Sorting {
  uint32_t* counts;   // [warp][row]: tokens of a row that a warp has, then those that the warps before it have
  uint32_t* starts;   // [row + 1]: of the block's sorted part
  uint16_t* numbers;  // of each token's row within the block, where there is room for all

  __device__ Sorting(uint32_t* memory, int block_rows)
      : counts(memory),
        starts(memory + kSortWarps * block_rows),
        numbers(reinterpret_cast<uint16_t*>(starts + block_rows + 1)) {}
  static int64_t bytes(int64_t block_rows, int64_t cached_tokens) {
    return ((kSortWarps + 1) * block_rows + 1) * 4 + cached_tokens * 2;
  }
};

// The block that has an index's row, and the row's number there; what is no row of the table is of a block past all.
struct Home {
  uint32_t block = 0xffffffffu, number = 0;

  __device__ Home(const Table& t, int64_t index) {
    if (static_cast<uint64_t>(index) >= static_cast<uint64_t>(t.rows)) return;
    number = t.blocks.divide(static_cast<uint32_t>(index));
    block = static_cast<uint32_t>(index) - number * t.blocks.value;
  }
};

// Counts a warp's tokens by row; returns how many of the lane's are of blocks before this. Counting commutes, so
// the order of these atomics does not show. (Two indices in a load of 16 bytes would save nothing: L2 is waited for.)
template <typename Read>
__device__ inline uint32_t count_tokens(const BackwardArgs& a, const Table& t, const Sorting& shared, uint32_t begin,
                                        uint32_t end, const Read& read) {
  uint32_t* const counts = shared.counts + threadIdx.x / kWarp * t.block_rows;
  uint32_t below = 0;
#pragma unroll 1
  for (uint32_t first = begin + threadIdx.x % kWarp; first < end; first += kAtOnce * kWarp) {
    int64_t index[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) index[k] = first + k * kWarp < end ? read(first + k * kWarp) : -1;
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const uint32_t token = first + k * kWarp;
      const Home home(t, index[k]);
      const bool own = home.block == blockIdx.x;
      if (own) atomicAdd(counts + home.number, 1u);
      if (a.cached && token < end) shared.numbers[token] = static_cast<uint16_t>(own ? home.number : kNoRow);
      below += home.block < blockIdx.x;
    }
  }
  return below;
}

// Counts of each warp become those of the warps before it; then starts of rows. Returns where the block's part of the
// list begins. Every thread comes here, with its share of what is before it.
__device__ inline uint32_t scan_counts(const Table& t, const Sorting& shared, uint32_t own_rows, uint32_t below) {
  __shared__ uint32_t totals[kSortWarps], belows[kSortWarps];
  const uint32_t thread = threadIdx.x, lane = thread % kWarp, warp = thread / kWarp;
  below = warp_sum(below);
  if (lane == 0) belows[warp] = below;
  __syncthreads();  // all are counted
  uint32_t total = 0;
  if (thread < own_rows) {
#pragma unroll 1
    for (int w = 0; w < kSortWarps; w += kAtOnce) {
      uint32_t* const column = shared.counts + w * t.block_rows + thread;
      uint32_t count[kAtOnce];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) count[k] = column[k * t.block_rows];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        column[k * t.block_rows] = total;
        total += count[k];
      }
    }
  }
  uint32_t upto = total;  // of the rows of this warp's lanes
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const uint32_t other = __shfl_up_sync(0xffffffffu, upto, step);
    upto += lane >= step ? other : 0;
  }
  if (lane == kWarp - 1) totals[warp] = upto;
  __syncthreads();
  upto += warp_sum(lane < warp ? totals[lane] : 0);
  if (thread < own_rows) shared.starts[thread + 1] = upto;
  if (thread == 0) shared.starts[0] = 0;
  const uint32_t start = warp_sum(belows[lane]);
  __syncthreads();
  return start;
}

// Puts a warp's tokens into their places, 32 after 32, so that those of a row keep their order.
template <typename Read>
__device__ inline void place_tokens(const BackwardArgs& a, const Table& t, const Sorting& shared, uint32_t begin,
                                    uint32_t end, uint32_t start, const Read& read) {
  uint32_t* const counts = shared.counts + threadIdx.x / kWarp * t.block_rows;
  const uint32_t lane = threadIdx.x % kWarp;
#pragma unroll 1
  for (uint32_t group = begin; group < end; group += kAtOnce * kWarp) {
    uint32_t number[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const uint32_t token = group + k * kWarp + lane;
      number[k] = kNoRow;
      if (token >= end) continue;
      if (a.cached) {
        number[k] = shared.numbers[token];
      } else {
        const Home home(t, read(token));
        if (home.block == blockIdx.x) number[k] = home.number;
      }
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const bool own = number[k] != kNoRow;
      const uint32_t mask = __ballot_sync(0xffffffffu, own);
      if (mask == 0) continue;
      uint32_t alike = 0, rank = 0;
      if (own) {
        alike = __match_any_sync(mask, number[k]);
        rank = counts[number[k]] + __popc(alike & ((1u << lane) - 1));
      }
      __syncwarp();  // all have read what the first of each row now raises
      if (own && (alike & ((1u << lane) - 1)) == 0) counts[number[k]] += __popc(alike);
      __syncwarp();
      if (!own) continue;
      const uint32_t first = shared.starts[number[k]], count = shared.starts[number[k] + 1] - first;
      const uint32_t place = start + first + rank, row = blockIdx.x + number[k] * t.blocks.value;
      const uint32_t token = group + k * kWarp + lane;
      t.places[place] = packed_place(token, row, rank, count);
      if (place % kPiece == 0) {
        t.heads[place / kPiece] = make_uint4(row, place - rank, is_long(count) && rank < kPiece ? count : 0, 0);
      }
    }
  }
}

__global__ void __launch_bounds__(kSortThreads, 1) embedding_sort_kernel(const __grid_constant__ BackwardArgs a) {
  extern __shared__ uint32_t memory[];
  const Table& t = a.tables[blockIdx.y];
  if (blockIdx.x >= t.blocks.value) return;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  if (t.indices.counted()) {  // only rows that no token has are left to be seen to
    const int64_t low = static_cast<int64_t>(blockIdx.x) * t.block_rows, high = low + t.block_rows;
    const int64_t used = t.indices.tokens.value, from = used > low ? used : low, end = high < t.rows ? high : t.rows;
    if (from < end) fill(t.out + from * t.row_bytes, t.out + end * t.row_bytes, threadIdx.x, kSortThreads);
    return;
  }
  const uint32_t own_rows = t.blocks.divide(static_cast<uint32_t>(t.rows) - 1 - blockIdx.x) + 1;
  auto fill_row = [&](uint32_t number) {
    char* const row = t.out + (blockIdx.x + static_cast<int64_t>(number) * t.blocks.value) * t.row_bytes;
    fill(row, row + t.row_bytes, lane, kWarp);
  };
  const Sorting shared(memory, t.block_rows);
  for (int i = threadIdx.x; i < kSortWarps * t.block_rows; i += kSortThreads) shared.counts[i] = 0;
  const uint32_t ahead = own_rows < t.ahead ? own_rows : t.ahead;
  for (uint32_t r = warp; r < ahead; r += kSortWarps) fill_row(r);
  __syncthreads();
  const uint32_t begin = warp * a.slice < a.tokens ? warp * a.slice : a.tokens;
  const uint32_t end = a.tokens - begin < a.slice ? a.tokens : begin + a.slice;
  const uint32_t before =
      with_reader(t.indices, [&](const auto& read) { return count_tokens(a, t, shared, begin, end, read); });
  const uint32_t start = scan_counts(t, shared, own_rows, before);
  allow_next_kernel();
  with_reader(t.indices, [&](const auto& read) { place_tokens(a, t, shared, begin, end, start, read); });
  if (threadIdx.x == 0 && blockIdx.x == t.blocks.value - 1) *t.valid = start + shared.starts[own_rows];
  for (uint32_t r = ahead + warp; r < own_rows; r += kSortWarps) {
    if (shared.starts[r] == shared.starts[r + 1]) fill_row(r);
  }
}

// ---- sum ----

constexpr int kSumThreads = 256, kSumWarps = kSumThreads / kWarp;

// What the sorted list has at a place; past its end, where a piece would begin.
__device__ inline uint2 place_of(const BackwardArgs& a, const Table& t, uint32_t at, uint32_t valid) {
  if (t.indices.counted()) {
    const uint32_t count = t.batch.value, row = t.batch.divide(at), rank = at - row * count;
    const uint32_t token = rank * t.indices.tokens.value + row;
    if (at < valid) return packed_place(token, row, rank, count);
  } else if (at < a.tokens) {
    const uint2 place = t.places[at];
    if (at < valid) return place;
  }
  return make_uint2(0, kFlag);
}

template <typename G, bool kVectors>
__global__ void __launch_bounds__(kSumThreads, fitting_blocks(kSumThreads, 3))
    embedding_sum_kernel(const __grid_constant__ BackwardArgs a) {
  using Mine = Columns<G, kVectors>;
  const Table& t = a.tables[blockIdx.y];
  const uint32_t unit = blockIdx.x * kSumWarps + threadIdx.x / kWarp, chunk = a.spans.divide(unit);
  const int lane = threadIdx.x % kWarp;
  const Mine mine(static_cast<int>(unit - chunk * a.spans.value), lane, a.width);
  const uint64_t policy = read_policy(a.large);
  allow_next_kernel();
  wait_for_previous_kernel();
  const uint32_t valid = t.indices.counted() ? a.tokens : *t.valid;
  const uint32_t first = chunk * a.chunk;
  if (first >= valid) return;
  const uint32_t stop = valid - first < a.chunk ? valid : first + a.chunk;

  float sum[Mine::N];
  clear(sum);
  char* to = nullptr;  // where the sum of the piece under way goes, and as what
  DType dtype = DType::kFloat32;
  auto close = [&] {
    if (to != nullptr) mine.store(to, dtype, sum);
    clear(sum);
  };
#pragma unroll 1
  for (uint32_t base = first;; base += kWarp) {
    // Each lane has a place: what must be known of it is found for 32 at once, and handed round when its turn comes.
    const uint2 own = place_of(a, t, base + lane, valid);
    const char* own_row = row_of<kVectors>(a.dout, own.x & kNumber);
    const bool own_part = own.x & kFlag;  // of a row that has more of them
    char* own_to = t.out + (own.y & kNumber) * t.row_bytes;
    if (own_part) own_to = reinterpret_cast<char*>(t.partial + (base + lane) / kPiece * a.stride);
    const uint32_t parts = __ballot_sync(0xffffffffu, own_part), begins = __ballot_sync(0xffffffffu, own.y & kFlag);
    // Pieces that begin from `stop` on are another warp's; the one before them may go on until there.
    const uint32_t beyond = base >= stop ? 0xffffffffu : stop - base >= kWarp ? 0 : 0xffffffffu << (stop - base);
    const int until = begins & beyond ? __ffs(begins & beyond) - 1 : kWarp;
    const uint32_t mine_begin = begins & ~beyond;
    int from = 0;
    if (base == first) {
      if (mine_begin == 0) return;  // all of it is of a piece that began before
      from = __ffs(mine_begin) - 1;
    }
    walk(
        a, mine, policy, from, until, sum,
        [&](int k) {
          return reinterpret_cast<const char*>(
              __shfl_sync(0xffffffffu, reinterpret_cast<unsigned long long>(own_row), k));
        },
        [&](int k) {
          if ((mine_begin >> k & 1) == 0) return;
          close();
          to = reinterpret_cast<char*>(__shfl_sync(0xffffffffu, reinterpret_cast<unsigned long long>(own_to), k));
          dtype = parts >> k & 1 ? DType::kFloat32 : t.dtype;
        });
    if (until < kWarp) break;
  }
  close();
}

// ---- finish ----

constexpr int kFinishThreads = kGroups * kWarp;

// Of each kPiece-th place: row, first place and tokens of a row with several pieces that has its first such place
// there; else no tokens. A row with several pieces has one such place, and no two have the same.
__device__ inline uint4 head_of(const Table& t, uint32_t head) {
  if (!t.indices.counted()) return t.heads[head];
  const uint32_t at = head * kPiece, count = t.batch.value, row = t.batch.divide(at), rank = at - row * count;
  return make_uint4(row, at - rank, is_long(count) && rank < kPiece ? count : 0, 0);
}

__device__ inline void add_to(float4& sum, const float4& one) {
  sum.x += one.x, sum.y += one.y, sum.z += one.z, sum.w += one.w;
}

// The sum of a column's pieces first, first + step, ... below count, four columns a lane.
__device__ inline float4 sum_pieces(const float* pieces, int64_t stride, uint32_t first, uint32_t count,
                                    uint32_t step) {
  float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 1
  for (uint32_t p = first; p < count; p += kAtOnce * step) {
    float4 piece[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (p + k * step < count) piece[k] = *reinterpret_cast<const float4*>(pieces + (p + k * step) * stride);
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (p + k * step < count) add_to(sum, piece[k]);
    }
  }
  return sum;
}

__device__ inline void store_four(const BackwardArgs& a, const Table& t, uint32_t row, int column, const float4& four) {
  char* const to = t.out + row * t.row_bytes;
  const float value[4] = {four.x, four.y, four.z, four.w};
  if (a.width % 4 == 0) {  // outputs are memory of their own, and begin where any vector may
    store_vector_as(to, t.dtype, column / 4, value);
  } else {
    store_elements(to, t.dtype, Span{column, 1, a.width}, value);
  }
}

// A block has 32 heads, and of the columns every gridDim.y-th 128. A row of a few pieces takes one warp, others all.
__global__ void __launch_bounds__(kFinishThreads, 1) embedding_finish_kernel(const __grid_constant__ BackwardArgs a) {
  __shared__ float4 sums[kGroups][kWarp];
  const Table& t = a.tables[blockIdx.z];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  allow_next_kernel();
  wait_for_previous_kernel();
  const uint32_t valid = t.indices.counted() ? a.tokens : *t.valid;
  const uint32_t head = blockIdx.x * kWarp + lane;
  uint4 own = make_uint4(0, 0, 0, 0);
  if (int64_t{head} * kPiece < valid) own = head_of(t, head);
  const uint32_t owners = __ballot_sync(0xffffffffu, own.z > 0);
  // Calls f(row, its pieces, how many) for the rows that are long by the measure of a warp, or are not.
  auto each = [&](bool many, const auto& f) {
    for (uint32_t rest = owners; rest != 0; rest &= rest - 1) {
      const int lead = __ffs(rest) - 1;
      const uint32_t row = __shfl_sync(0xffffffffu, own.x, lead), first = __shfl_sync(0xffffffffu, own.y, lead);
      const uint32_t pieces = __shfl_sync(0xffffffffu, own.z, lead) / kPiece;
      if ((pieces > kGroups) == many) f(row, t.partial + int64_t{first / kPiece} * a.stride, pieces);
    }
  };
  const int step = static_cast<int>(gridDim.y) * kWarp * 4, begin = static_cast<int>(blockIdx.y) * kWarp * 4;
  int turn = 0;
  each(false, [&](uint32_t row, const float* partial, uint32_t pieces) {
    for (int base = begin; base < a.width; base += step) {
      const int column = base + lane * 4;
      if (turn++ % kGroups != warp || column >= a.width) continue;
      store_four(a, t, row, column, sum_pieces(partial + column, a.stride, 0, pieces, 1));
    }
  });
  each(true, [&](uint32_t row, const float* partial, uint32_t pieces) {
    for (int base = begin; base < a.width; base += step) {
      const int column = base + lane * 4;
      if (column < a.width) sums[warp][lane] = sum_pieces(partial + column, a.stride, warp, pieces, kGroups);
      __syncthreads();
      if (warp == 0 && column < a.width) {
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (const auto& group : sums) add_to(sum, group[lane]);
        store_four(a, t, row, column, sum);
      }
      __syncthreads();
    }
  });
}

// ---- launching ----

int64_t aligned(int64_t bytes) { return divide_up(bytes, 256) * 256; }

// What a table's list and partial rows take of the workspace.
struct Space {
  int64_t places, heads, partial, all;

  Space(int64_t tokens, int64_t width) {
    const int64_t windows = divide_up(tokens, kPiece);
    places = 256;  // after `valid`
    heads = places + aligned(tokens * static_cast<int64_t>(sizeof(uint2)));
    partial = heads + aligned(windows * static_cast<int64_t>(sizeof(uint4)));
    all = partial + aligned(windows * divide_up(width, 4) * 16);
  }
};

Table make_table(const TensorView& out, const IndexList& indices, int64_t tokens, int64_t width, char* space) {
  Table t = {};
  t.out = static_cast<char*>(out.data), t.dtype = out.dtype, t.rows = out.sizes[0];
  t.row_bytes = width * element_bytes(out.dtype);
  t.indices = indices;
  t.batch = Divisor(static_cast<uint32_t>(tokens / indices.tokens.value));
  const Space parts(tokens, width);
  t.valid = reinterpret_cast<uint32_t*>(space), t.places = reinterpret_cast<uint2*>(space + parts.places);
  t.heads = reinterpret_cast<uint4*>(space + parts.heads), t.partial = reinterpret_cast<float*>(space + parts.partial);
  return t;
}

// Blocks of `most_rows` rows at the most, and about `blocks` of them where they are smaller; returns how many.
int64_t share_rows(BackwardArgs& a, int tables, int64_t blocks, int64_t most_rows) {
  int64_t needed = 0;
  for (int i = 0; i < tables; ++i) {
    const int64_t rows = at_most(divide_up(a.tables[i].rows, blocks), most_rows);
    a.tables[i].block_rows = static_cast<int32_t>(rows);
    const int64_t ahead = at_most(kAheadBytes / a.tables[i].row_bytes, rows / 4);
    a.tables[i].ahead = a.tokens <= a.tables[i].rows ? static_cast<int32_t>(ahead) : 0;
    const int64_t own = divide_up(a.tables[i].rows, rows);
    a.tables[i].blocks = Divisor(static_cast<uint32_t>(own));
    needed = own > needed ? own : needed;
  }
  return needed;
}

template <typename G, bool kVectors>
Status launch_few(BackwardArgs a, int tables, const DeviceFacts& facts, cudaStream_t stream) {
  const int64_t blocks = share_rows(a, tables, 3 * facts.multiprocessors, kMost);
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(tables));
  return launch(embedding_few_kernel<G, kVectors>, grid, kFewThreads, 0, false, stream, a);
}

// `tables`: those that have something to be sorted or filled.
Status launch_sort(BackwardArgs a, int tables, const DeviceFacts& facts, int device, cudaStream_t stream) {
  static std::atomic<bool> allowed[kMaxDevices];
  const int64_t room = facts.shared_bytes - kOwnShared;
  const int64_t most = at_most(kMostBlockRows, (room - Sorting::bytes(0, 0)) / (4 * (kSortWarps + 1)));
  const int64_t blocks = share_rows(a, tables, facts.multiprocessors, most);
  int64_t rows = 0;
  for (int i = 0; i < tables; ++i) rows = a.tables[i].block_rows > rows ? a.tables[i].block_rows : rows;
  a.cached = Sorting::bytes(rows, a.tokens) <= room;
  const int64_t bytes = Sorting::bytes(rows, a.cached ? a.tokens : 0);
  if (!allow_shared(embedding_sort_kernel, device, bytes, allowed)) return Status::kCudaError;
  a.slice = static_cast<uint32_t>(divide_up(divide_up(a.tokens, kSortWarps), kWarp) * kWarp);
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(tables));
  return launch(embedding_sort_kernel, grid, kSortThreads, bytes, false, stream, a);
}

template <typename G, bool kVectors>
Status launch_sums(BackwardArgs a, int tables, bool after_sort, const DeviceFacts& facts, cudaStream_t stream) {
  const bool programmatic = facts.capability >= 90;
  const int64_t spans = a.spans.value;
  // A few tokens are spread over more warps: what a chunk is changes no bit.
  a.chunk = kWarp;
  while (a.chunk > kAtOnce && divide_up(a.tokens, a.chunk) * spans < 16 * facts.multiprocessors) a.chunk /= 2;
  const int64_t units = divide_up(a.tokens, a.chunk) * spans;
  if (units > kMost) return Status::kBadShape;  // more than any memory holds
  const dim3 grid(static_cast<unsigned>(divide_up(units, kSumWarps)), static_cast<unsigned>(tables));
  const Status status =
      launch(embedding_sum_kernel<G, kVectors>, grid, kSumThreads, 0, programmatic && after_sort, stream, a);
  if (status != Status::kOk) return status;
  const int64_t heads = divide_up(divide_up(a.tokens, kPiece), kWarp);
  const int64_t columns = at_most(divide_up(a.width, 4 * kWarp), divide_up(2 * facts.multiprocessors, heads));
  const dim3 finish(static_cast<unsigned>(heads), static_cast<unsigned>(columns), static_cast<unsigned>(tables));
  return launch(embedding_finish_kernel, finish, kFinishThreads, 0, programmatic, stream, a);
}

template <typename G, bool kVectors>
Status launch_backward(BackwardArgs a, int tables, const DeviceFacts& facts, int device, cudaStream_t stream) {
  const int64_t columns = kVectors ? kWarp * kVec<G> : kWarp * kElements;
  a.spans = Divisor(static_cast<uint32_t>(divide_up(a.width, columns)));
  if (a.tokens <= kFew) return launch_few<G, kVectors>(a, tables, facts, stream);
  const Table& last = a.tables[tables - 1];
  const bool known = last.indices.counted() && last.rows == last.indices.tokens.value;  // neither sorted nor filled
  const int sorted = known ? tables - 1 : tables;
  if (sorted > 0) {
    const Status status = launch_sort(a, sorted, facts, device, stream);
    if (status != Status::kOk) return status;
  }
  return launch_sums<G, kVectors>(a, tables, sorted > 0, facts, stream);
}

Status check_backward(const TensorView& dout, const TensorView& ids, const TensorView& positions,
                      const TensorView& dweight, const TensorView& dplaces) {
  Status status = check_ids(ids);
  if (status != Status::kOk) return status;
  if (!is_float(dout.dtype)) return Status::kBadDtype;
  if (dout.rank != ids.rank + 1) return Status::kBadShape;
  for (int d = 0; d < ids.rank; ++d) {
    if (dout.sizes[d] != ids.sizes[d]) return Status::kBadShape;
  }
  const int64_t width = dout.sizes[dout.rank - 1];
  if (dweight.present()) status = check_table(dweight, width);
  if (status == Status::kOk && dplaces.present()) {
    status = check_table(dplaces, width);
    if (status == Status::kOk) status = check_positions(positions, ids, dplaces);
  }
  return status;
}

}  // namespace
}  // namespace embedding

// Both tables may be wanted, and their sizes are not known here.
int64_t embedding_backward_workspace(const TensorView& dout, Stream) {
  const int64_t tokens = count_rows(dout), width = dout.rank > 0 ? dout.sizes[dout.rank - 1] : 0;
  return tokens <= embedding::kFew ? 0 : 2 * embedding::Space(tokens, width).all;
}

// What the tables look like is what their gradients do: weight and position_weight are for bindings that make those.
Status embedding_backward(const Input& dout, const Input& ids, const Input&, const OptionalInput&,
                          const OptionalInput& positions, const Like<2>& dweight, const Like<3>& dposition_weight,
                          Workspace workspace, Stream stream) {
  using namespace embedding;
  const Status status = check_backward(dout, ids, positions, dweight, dposition_weight);
  if (status != Status::kOk) return status;
  const DeviceGuard guard(stream.device);
  if (!guard.ok()) return Status::kBadDevice;
  if (workspace.bytes < embedding_backward_workspace(dout, stream)) return Status::kBadWorkspace;
  const DeviceFacts& facts = device_facts(guard.device());
  const int64_t tokens = count_indices(ids), width = dout.sizes[dout.rank - 1];
  BackwardArgs a = {};
  a.tokens = static_cast<uint32_t>(tokens), a.width = static_cast<int32_t>(width);
  a.stride = divide_up(width, 4) * 4;
  char* const space = static_cast<char*>(workspace.data);
  int tables = 0;
  int64_t bytes = tokens * width * element_bytes(dout.dtype);
  auto add = [&](const TensorView& out, const IndexList& indices) {
    if (!out.present()) return;
    a.tables[tables] = make_table(out, indices, tokens, width, space + tables * Space(tokens, width).all);
    bytes += a.tables[tables].rows * a.tables[tables].row_bytes;
    ++tables;
  };
  add(dweight, make_indices(ids, ids));
  add(dposition_weight, make_indices(positions, ids));
  if (tables == 0) return Status::kOk;
  a.large = bytes > facts.l2_bytes;
  return with_dtype(dout.dtype, [&](auto zero) {
    using G = decltype(zero);
    a.dout = make_rows(dout, width, kVec<G>);
    const auto run = a.dout.vectors ? launch_backward<G, true> : launch_backward<G, false>;
    return run(a, tables, facts, guard.device(), cuda_stream(stream));
  });
}

}  // namespace fuselm
