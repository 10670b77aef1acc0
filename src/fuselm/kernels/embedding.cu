// Embedding, forward: rows of a table, those of a second one for positions added in fp32, rounded once. Contract:
// embedding.py.
//
// Traffic. A row is read for each token and written once. Of many tokens, words come again: 32768 drawn from 50304 ask
// for 24070 rows. Rows of all of them are more than L2 holds, a stripe of 512 bytes of each is not. So a warp takes a
// stripe of kTokens tokens, its lanes a vector of 16 bytes each, and blocks take the first stripe of all tokens, then
// the second: what comes again comes from L2. Threads. The wait for a lane's indices is one wait, and so is that for
// its rows. Four kernels: rows that are copied as they are, for few tokens and for many; rows that are converted, or
// added to; and any others, element by element. How rows lie changes no bit of the result.
#include "embedding.cuh"

namespace fuselm {
namespace embedding {
namespace {

constexpr int kThreads = 128, kTokens = 4;

// What stands for a row that is not there: NaN, in the bits that rounding one to 16 bits gives.
constexpr uint32_t kNan32 = 0x7fffffffu, kNan16 = 0x7fff7fffu;

// ---- few tokens, copied ----

// All of it in one line of the constant cache, which is cold when a kernel starts, see softmax.cu.
struct FewArgs {
  const char* ids;
  const char* weight;
  char* out;  // contiguous
  int64_t row_stride;
  uint32_t rows, vectors;  // vectors of a row
  uint32_t step;           // bytes from one id to the next
  uint32_t nan;
};

// A block has 128 vectors of one token: nothing is divided, and whatever does not hang on the id is made before it is
// asked for, while the kernel before ends.
template <typename Id, bool kChained>
__global__ void __launch_bounds__(kThreads) embedding_few_kernel(const __grid_constant__ FewArgs a) {
  const uint32_t vector = blockIdx.y * kThreads + threadIdx.x;
  if (vector >= a.vectors) return;
  const char* const place = a.ids + static_cast<uint64_t>(blockIdx.x) * a.step;
  const char* const column = a.weight + vector * 16;
  char* const out = a.out + (static_cast<uint64_t>(blockIdx.x) * a.vectors + vector) * 16;
  if constexpr (kChained) {
    warm(place), warm(column), warm(out);
    allow_next_kernel();
    wait_for_previous_kernel();
  }
  const int64_t id = *reinterpret_cast<const Id*>(place);
  uint4 raw = make_uint4(a.nan, a.nan, a.nan, a.nan);
  if (likely(static_cast<uint64_t>(id) < a.rows)) {  // below 0 is above all
    raw = load_vector(column + static_cast<uint32_t>(id) * a.row_stride);
  }
  store_vector(out, raw);
}

// ---- many tokens, copied ----

struct CopyArgs {
  const char* weight;
  char* out;  // contiguous
  int64_t row_stride;
  uint32_t rows, tokens, vectors;
  uint32_t nan;
  bool large;
  IndexList ids;
};

// The token that is number k of a lane's; of those past the last, its first once more.
__device__ inline uint32_t nth_token(uint32_t first, uint32_t step, uint32_t k, uint32_t tokens) {
  return first + k * step < tokens ? first + k * step : first;
}

template <int kLanes>
__global__ void __launch_bounds__(kThreads, fitting_blocks(kThreads, 16))
    embedding_many_kernel(const __grid_constant__ CopyArgs a) {
  const uint32_t first = (blockIdx.x * (kThreads / kLanes) + threadIdx.x / kLanes) * kTokens;
  const uint32_t vector = blockIdx.y * kLanes + threadIdx.x % kLanes;
  if (first >= a.tokens || vector >= a.vectors) return;
  const uint64_t policy = read_policy(a.large);
  int64_t id[kTokens];
  with_reader(a.ids, [&](const auto& read) {
#pragma unroll
    for (int k = 0; k < kTokens; ++k) id[k] = read(nth_token(first, 1, k, a.tokens));
  });
  uint4 raw[kTokens];
#pragma unroll
  for (int k = 0; k < kTokens; ++k) {
    const uint32_t row = static_cast<uint64_t>(id[k]) < a.rows ? static_cast<uint32_t>(id[k]) : 0;
    raw[k] = load_vector(a.weight + row * a.row_stride + vector * 16, policy);
  }
  char* const out = a.out + (static_cast<uint64_t>(first) * a.vectors + vector) * 16;
#pragma unroll
  for (int k = 0; k < kTokens; ++k) {
    if (unlikely(static_cast<uint64_t>(id[k]) >= a.rows)) raw[k] = make_uint4(a.nan, a.nan, a.nan, a.nan);
    if (first + k < a.tokens) store_vector(out + static_cast<uint64_t>(k) * a.vectors * 16, raw[k]);
  }
}

// ---- converted, or added to ----

// A table as its rows are read; strides between rows are in bytes, between columns in elements.
struct Source {
  const char* data = nullptr;
  int64_t rows = 0, row_stride = 0, column_stride = 1;
  DType dtype = DType::kAbsent;

  __device__ bool has(int64_t index) const { return static_cast<uint64_t>(index) < static_cast<uint64_t>(rows); }
  __device__ const char* row(int64_t index) const { return data + index * row_stride; }
};

struct GatherArgs {
  Source weight, places;  // places may be absent
  char* out;              // contiguous
  uint32_t tokens;
  int32_t width;
  DType dtype;
  bool chained, large;
  IndexList ids, positions;
};

// Which rows of the second table there are: none, one for each token, or one for the same token of every sequence.
enum class Places { kNone, kOwn, kShared };

// Tokens of a lane: 64 bytes of rows under way, or 32 of both tables.
template <typename W, typename O, Places kPlaces>
constexpr int kGatherTokens = (kPlaces == Places::kOwn ? 2 : 4) / static_cast<int>(sizeof(W) / sizeof(O));

// Vectors are of the result: 16 bytes of it, from 16 or 32 of weight. With kShared a lane's tokens are those at one
// place of several sequences, for which the second table is read once.
template <typename W, typename O, Places kPlaces>
__global__ void __launch_bounds__(kThreads) embedding_gather_kernel(const __grid_constant__ GatherArgs a) {
  constexpr int N = kVec<O>, kPieces = sizeof(W) / sizeof(O), kMine = kGatherTokens<W, O, kPlaces>;
  constexpr int kAdded = kPlaces == Places::kNone ? 0 : kPlaces == Places::kShared ? 1 : kMine;
  const uint32_t group = blockIdx.x * (kThreads / kWarp) + threadIdx.x / kWarp;
  const int vectors = a.width / N, vector = static_cast<int>(blockIdx.y * kWarp + threadIdx.x % kWarp);
  if (a.chained) {
    allow_next_kernel();
    wait_for_previous_kernel();
  }
  uint32_t first = group * kMine, step = 1, at = 0;
  if constexpr (kPlaces == Places::kShared) {
    step = a.positions.tokens.value;
    const uint32_t sequences = a.positions.tokens.divide(group);
    at = group - sequences * step;
    first = sequences * kMine * step + at;
  }
  if (first >= a.tokens || vector >= vectors) return;
  const uint64_t policy = read_policy(a.large);
  int64_t id[kMine], place[kAdded + 1] = {at};
  with_reader(a.ids, [&](const auto& read) {
#pragma unroll
    for (int k = 0; k < kMine; ++k) id[k] = read(nth_token(first, step, k, a.tokens));
  });
  if constexpr (kPlaces == Places::kOwn) {
#pragma unroll
    for (int k = 0; k < kMine; ++k) place[k] = a.positions.of(nth_token(first, step, k, a.tokens));
  }
  uint4 raw[kMine][kPieces];
  ConstantVector<N> added[kAdded + 1];
#pragma unroll
  for (int k = 0; k < kMine; ++k) {
    const char* const row = a.weight.row(a.weight.has(id[k]) ? id[k] : 0);
#pragma unroll
    for (int p = 0; p < kPieces; ++p) raw[k][p] = load_vector(row + (vector * kPieces + p) * 16, policy);
    if (k < kAdded) added[k].load(a.places.row(a.places.has(place[k]) ? place[k] : 0), a.places.dtype, vector);
  }
#pragma unroll
  for (int k = 0; k < kMine; ++k) {
    const uint32_t token = first + k * step;
    if (token >= a.tokens) break;
    bool known = a.weight.has(id[k]);
    float value[N];
    load_floats<W>(raw[k], value);
    if constexpr (kAdded > 0) {
      constexpr int kLast = kAdded - 1;
      const int from = k < kLast ? k : kLast;
      known &= a.places.has(place[from]);
      float more[N];
      added[from].get(a.places.dtype, more);
#pragma unroll
      for (int i = 0; i < N; ++i) value[i] += more[i];
    }
#pragma unroll
    for (float& one : value) one = known ? one : __uint_as_float(kNan32);
    store_floats<O>(a.out + (static_cast<uint64_t>(token) * vectors + vector) * 16, value);
  }
}

// ---- any others ----

constexpr int kAnyColumns = 8;  // of a lane

// Any strides, any alignment, any mix of dtypes: elements one by one, neighbouring lanes neighbouring ones.
__global__ void __launch_bounds__(kThreads) embedding_any_kernel(const __grid_constant__ GatherArgs a) {
  const uint32_t token = blockIdx.x * (kThreads / kWarp) + threadIdx.x / kWarp;
  if (token >= a.tokens) return;
  const int64_t id = a.ids.of(token);
  bool known = a.weight.has(id);
  const Span span{static_cast<int>(blockIdx.y * kAnyColumns * kWarp + threadIdx.x % kWarp), kWarp, a.width};
  float value[kAnyColumns];
  load_elements(a.weight.row(known ? id : 0), a.weight.dtype, a.weight.column_stride, span, value);
  if (a.places.dtype != DType::kAbsent) {
    const int64_t at = a.positions.of(token);
    const bool has = a.places.has(at);
    known &= has;
    float more[kAnyColumns];
    load_elements(a.places.row(has ? at : 0), a.places.dtype, a.places.column_stride, span, more);
#pragma unroll
    for (int i = 0; i < kAnyColumns; ++i) value[i] += more[i];
  }
#pragma unroll
  for (float& one : value) one = known ? one : __uint_as_float(kNan32);
  store_elements(a.out + token * (int64_t{a.width} * element_bytes(a.dtype)), a.dtype, span, value);
}

// ---- launching ----

// Blocks of a multiprocessor up to which tokens are few: one wave.
constexpr int64_t kFewBlocks = 16;

Source make_source(const TensorView& table) {
  if (!table.present()) return {};
  const int64_t bytes = element_bytes(table.dtype);
  return {static_cast<const char*>(table.data), table.sizes[0], table.strides[0] * bytes,
          table.sizes[1] > 1 ? table.strides[1] : 1, table.dtype};
}

// Whether rows are whole vectors of `vec` elements, each where a vector may be.
bool has_vectors(const Source& source, int64_t width, int vec) {
  if (source.dtype == DType::kAbsent) return true;
  return source.column_stride == 1 && width % vec == 0 && reinterpret_cast<uintptr_t>(source.data) % 16 == 0 &&
         (source.rows == 1 || source.row_stride % 16 == 0);
}

// Groups of `lanes` lanes, each of which takes `lanes * each` vectors, or columns, of a row's `row`.
template <typename Args>
Status launch_groups(void (*kernel)(Args), const Args& a, int64_t groups, int64_t row, int lanes, int each,
                     bool chained, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(divide_up(groups, kThreads / lanes)),
                  static_cast<unsigned>(divide_up(row, lanes * each)));
  return launch(kernel, grid, kThreads, 0, chained, stream, a);
}

template <typename Id>
Status launch_few(const GatherArgs& from, const FewArgs& a, const dim3& grid, cudaStream_t stream) {
  const auto kernel = from.chained ? embedding_few_kernel<Id, true> : embedding_few_kernel<Id, false>;
  return launch(kernel, grid, kThreads, 0, from.chained, stream, a);
}

Status launch_copy(const GatherArgs& from, int64_t vectors, const DeviceFacts& facts, cudaStream_t stream) {
  const Source& weight = from.weight;
  const auto rows = static_cast<uint32_t>(weight.rows), row = static_cast<uint32_t>(vectors);
  const uint32_t nan = from.dtype == DType::kFloat32 ? kNan32 : kNan16;
  const int64_t blocks = divide_up(vectors, kThreads);  // of a token, of few tokens
  const IndexList& ids = from.ids;
  if (from.tokens * blocks <= kFewBlocks * facts.multiprocessors && ids.outer == 1 && ids.step >> 31 == 0) {
    const FewArgs a = {ids.data, weight.data, from.out, weight.row_stride, rows, row, static_cast<uint32_t>(ids.step),
                       nan};
    const dim3 grid(from.tokens, static_cast<unsigned>(blocks));
    return ids.wide ? launch_few<int64_t>(from, a, grid, stream) : launch_few<int32_t>(from, a, grid, stream);
  }
  const CopyArgs a = {weight.data, from.out, weight.row_stride, rows, from.tokens, row, nan, from.large, ids};
  const int64_t groups = divide_up(a.tokens, kTokens);
  // Narrow rows share a warp.
  if (vectors <= 16) return launch_groups(embedding_many_kernel<8>, a, groups, vectors, 8, 1, false, stream);
  return launch_groups(embedding_many_kernel<kWarp>, a, groups, vectors, kWarp, 1, false, stream);
}

template <typename W, typename O, Places kPlaces>
Status launch_gather_with(const GatherArgs& a, cudaStream_t stream) {
  constexpr int kMine = kGatherTokens<W, O, kPlaces>;
  const int64_t place = a.positions.tokens.value;  // tokens of a sequence
  const int64_t groups =
      kPlaces == Places::kShared ? divide_up(a.tokens / place, kMine) * place : divide_up(a.tokens, kMine);
  return launch_groups(embedding_gather_kernel<W, O, kPlaces>, a, groups, a.width / kVec<O>, kWarp, 1, a.chained,
                       stream);
}

template <typename W, typename O>
Status launch_gather(const GatherArgs& a, cudaStream_t stream) {
  if constexpr (!std::is_same_v<W, O>) {  // those alike, without positions, are copied
    if (a.places.dtype == DType::kAbsent) return launch_gather_with<W, O, Places::kNone>(a, stream);
  }
  const bool shared = a.positions.counted() && a.tokens >= kTokens * int64_t{a.positions.tokens.value};
  return shared ? launch_gather_with<W, O, Places::kShared>(a, stream)
                : launch_gather_with<W, O, Places::kOwn>(a, stream);
}

Status launch_any(const GatherArgs& a, cudaStream_t stream) {
  return launch_groups(embedding_any_kernel, a, a.tokens, a.width, kWarp, kAnyColumns, false, stream);
}

Status launch_rows(const GatherArgs& a, const DeviceFacts& facts, cudaStream_t stream) {
  const int vec = 16 / element_bytes(a.dtype);
  const bool aligned = reinterpret_cast<uintptr_t>(a.out) % 16 == 0 && has_vectors(a.weight, a.width, vec) &&
                       has_vectors(a.places, a.width, vec);
  if (!aligned) return launch_any(a, stream);
  if (a.weight.dtype == a.dtype) {
    if (a.places.dtype == DType::kAbsent) return launch_copy(a, a.width / vec, facts, stream);
    return with_dtype(a.dtype, [&](auto zero) { return launch_gather<decltype(zero), decltype(zero)>(a, stream); });
  }
  if (a.weight.dtype != DType::kFloat32) return launch_any(a, stream);
  return a.dtype == DType::kBFloat16 ? launch_gather<float, bf16>(a, stream) : launch_gather<float, fp16>(a, stream);
}

}  // namespace
}  // namespace embedding

Status embedding_forward(const Input& ids, const Input& weight, const OptionalInput& position_weight,
                         const OptionalInput& positions, Wanted dtype, const Gathered<0, 1>& out, Stream stream) {
  using namespace embedding;
  const int64_t width = weight.rank == 2 ? weight.sizes[1] : 0;
  Status status = check_table(weight, width);
  if (status == Status::kOk) status = check_ids(ids);
  if (status == Status::kOk && position_weight.present()) {
    status = check_table(position_weight, width);
    if (status == Status::kOk) status = check_positions(positions, ids, position_weight);
  }
  if (status != Status::kOk) return status;
  if (!out.present() || (positions.present() && !position_weight.present())) return Status::kBadShape;
  if (!is_float(out.dtype) || (dtype.dtype != DType::kAbsent && dtype.dtype != out.dtype)) return Status::kBadDtype;
  const DeviceGuard guard(stream.device);
  if (!guard.ok()) return Status::kBadDevice;
  const int64_t tokens = count_indices(ids);
  if (tokens == 0) return Status::kOk;
  const DeviceFacts& facts = device_facts(guard.device());
  GatherArgs a = {};
  a.weight = make_source(weight), a.places = make_source(position_weight);
  a.out = static_cast<char*>(out.data), a.dtype = out.dtype;
  a.tokens = static_cast<uint32_t>(tokens), a.width = static_cast<int32_t>(width);
  a.ids = make_indices(ids, ids), a.positions = make_indices(positions, ids);
  a.chained = facts.capability >= 90 && tokens <= 2 * facts.multiprocessors;
  a.large = tokens * width * (element_bytes(weight.dtype) + element_bytes(out.dtype)) > facts.l2_bytes;
  return launch_rows(a, facts, cuda_stream(stream));
}

}  // namespace fuselm
