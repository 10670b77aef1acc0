// Embedding, forward: rows of a table, those of a second one for positions added in fp32, rounded once. Contract:
// embedding.py.
//
// Traffic. A row is read for each token and written once; rows that many tokens ask for come from L2. Threads. A group
// of lanes takes a part of a token's row, as many vectors of 16 bytes for a lane as can be on their way at once, so the
// wait for the index is one wait for the whole part. Three kernels: rows that are copied as they are; rows that are
// converted, or added to; and any others, element by element. How rows lie changes no bit of the result.
#include "embedding.cuh"

namespace fuselm {
namespace embedding {
namespace {

constexpr int kThreads = 128;

// What stands for a row that is not there: NaN, in the bits that rounding one to 16 bits gives.
constexpr uint32_t kNan32 = 0x7fffffffu, kNan16 = 0x7fff7fffu;

// What every launch reads comes first: the constant cache is cold when a kernel starts, see softmax.cu.
struct CopyArgs {
  const char* ids;  // of contiguous ids
  const char* weight;
  char* out;  // contiguous
  int64_t row_stride;
  uint32_t rows, tokens;
  int32_t vectors;  // of a row
  bool flat, wide, chained, large;
  uint32_t nan;
  Divisor parts;      // of a row, where it has several
  IndexList indices;  // of ids that are not contiguous
};

// Which token and which part of its row a group of kLanes lanes has; `first` is the lane's first vector.
template <int kLanes, int kVecs>
struct Part {
  uint32_t token;
  int first;

  __device__ Part(int vectors, const Divisor& parts) {
    token = blockIdx.x * (kThreads / kLanes) + threadIdx.x / kLanes;
    first = threadIdx.x % kLanes;
    if (vectors <= kLanes * kVecs) return;
    const uint32_t unit = token;
    token = parts.divide(unit);
    first += static_cast<int>(unit - token * parts.value) * kLanes * kVecs;
  }
};

template <int kLanes, int kVecs>
__global__ void __launch_bounds__(kThreads, fitting_blocks(kThreads, 16))
    embedding_copy_kernel(const __grid_constant__ CopyArgs a) {
  const Part<kLanes, kVecs> part(a.vectors, a.parts);
  if (a.chained) {
    allow_next_kernel();
    wait_for_previous_kernel();
  }
  if (part.token >= a.tokens) return;
  // Lanes past the row's end load its last vector once more: were loads left to some lanes, each would have its address
  // made anew, after the wait for the index.
  uint32_t at[kVecs];
#pragma unroll
  for (int v = 0; v < kVecs; ++v) at[v] = now(static_cast<uint32_t>(min(part.first + v * kLanes, a.vectors - 1)) * 16);
  const uint64_t policy = read_policy(a.large);
  int64_t id;
  if (likely(a.flat)) {
    id = a.wide ? reinterpret_cast<const int64_t*>(a.ids)[part.token]
                : reinterpret_cast<const int32_t*>(a.ids)[part.token];
  } else {
    id = a.indices.of(part.token);
  }
  const bool known = static_cast<uint64_t>(id) < a.rows;  // below 0 is above all
  const char* const row = a.weight + (known ? id : 0) * a.row_stride;
  char* const out = a.out + part.token * (int64_t{16} * a.vectors);
  uint4 raw[kVecs];
#pragma unroll
  for (int v = 0; v < kVecs; ++v) raw[v] = load_vector(row + at[v], policy);
  if (unlikely(!known)) {
#pragma unroll
    for (uint4& one : raw) one = make_uint4(a.nan, a.nan, a.nan, a.nan);
  }
#pragma unroll
  for (int v = 0; v < kVecs; ++v) {
    if (part.first + v * kLanes < a.vectors) store_vector(out + at[v], raw[v]);
  }
}

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
  Divisor parts;
  IndexList ids, positions;

  // The rows of a token; both the first of their tables, and false, where it has not both.
  __device__ bool find(uint32_t token, const char*& row, const char*& place) const {
    const int64_t id = ids.of(token);
    bool known = weight.has(id);
    int64_t at = 0;
    if (places.dtype != DType::kAbsent) {
      at = positions.of(token);
      known &= places.has(at);
    }
    row = weight.row(known ? id : 0), place = places.row(known ? at : 0);
    return known;
  }
};

constexpr int kGatherVecs = 2;

// Vectors are of the result: 16 bytes of it, from 16 or 32 of weight.
template <typename W, typename O, bool kPlaces>
__global__ void __launch_bounds__(kThreads) embedding_gather_kernel(const __grid_constant__ GatherArgs a) {
  constexpr int N = kVec<O>, kPieces = sizeof(W) / sizeof(O);
  const int vectors = a.width / N;
  const Part<kWarp, kGatherVecs> part(vectors, a.parts);
  if (a.chained) {
    allow_next_kernel();
    wait_for_previous_kernel();
  }
  if (part.token >= a.tokens) return;
  const char *row, *place;
  const bool known = a.find(part.token, row, place);
  char* out = a.out + part.token * (int64_t{16} * vectors);
  const uint64_t policy = read_policy(a.large);
  uint4 raw[kGatherVecs][kPieces];
  ConstantVector<N> added[kGatherVecs];
#pragma unroll
  for (int v = 0; v < kGatherVecs; ++v) {
    const int at = part.first + v * kWarp;
    if (at >= vectors) continue;
#pragma unroll
    for (int p = 0; p < kPieces; ++p) raw[v][p] = load_vector(row + (at * kPieces + p) * 16, policy);
    if constexpr (kPlaces) added[v].load(place, a.places.dtype, at);
  }
#pragma unroll
  for (int v = 0; v < kGatherVecs; ++v) {
    const int at = part.first + v * kWarp;
    if (at >= vectors) continue;
    float value[N];
    load_floats<W>(raw[v], value);
    if constexpr (kPlaces) {
      float more[N];
      added[v].get(a.places.dtype, more);
#pragma unroll
      for (int i = 0; i < N; ++i) value[i] += more[i];
    }
#pragma unroll
    for (float& one : value) one = known ? one : __uint_as_float(kNan32);
    store_floats<O>(out + at * 16, value);
  }
}

constexpr int kAnyColumns = 8;  // of a lane

// Any strides, any alignment, any mix of dtypes: elements one by one, neighbouring lanes neighbouring ones.
__global__ void __launch_bounds__(kThreads) embedding_any_kernel(const __grid_constant__ GatherArgs a) {
  const Part<kWarp, kAnyColumns> part(a.width, a.parts);
  if (part.token >= a.tokens) return;
  const char *row, *place;
  const bool known = a.find(part.token, row, place);
  const Span span{part.first, kWarp, a.width};
  float value[kAnyColumns];
  load_elements(row, a.weight.dtype, a.weight.column_stride, span, value);
  if (a.places.dtype != DType::kAbsent) {
    float more[kAnyColumns];
    load_elements(place, a.places.dtype, a.places.column_stride, span, more);
#pragma unroll
    for (int i = 0; i < kAnyColumns; ++i) value[i] += more[i];
  }
#pragma unroll
  for (float& one : value) one = known ? one : __uint_as_float(kNan32);
  store_elements(a.out + part.token * (int64_t{a.width} * element_bytes(a.dtype)), a.dtype, span, value);
}

// ---- launching ----

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

// `held` is how many vectors, or columns, a group takes of a row; `row` how many there are.
template <typename Args>
Status launch_units(void (*kernel)(Args), Args a, int64_t row, int64_t held, int lanes, cudaStream_t stream) {
  const int64_t parts = divide_up(row, held), units = a.tokens * parts;
  if (units > kMost) return Status::kBadShape;  // more than any memory holds
  a.parts = Divisor(static_cast<uint32_t>(parts));
  const dim3 grid(static_cast<unsigned>(divide_up(units, kThreads / lanes)));
  return launch(kernel, grid, kThreads, 0, a.chained, stream, a);
}

Status launch_copy(const GatherArgs& from, int64_t vectors, cudaStream_t stream) {
  const Source& weight = from.weight;
  CopyArgs a = {};
  a.ids = from.ids.data, a.weight = weight.data, a.out = from.out, a.row_stride = weight.row_stride;
  a.rows = static_cast<uint32_t>(weight.rows), a.tokens = from.tokens, a.vectors = static_cast<int32_t>(vectors);
  a.flat = from.ids.flat, a.wide = from.ids.wide, a.chained = from.chained, a.large = from.large;
  a.nan = from.dtype == DType::kFloat32 ? kNan32 : kNan16;
  a.indices = from.ids;
  // Narrow rows share a warp.
  if (vectors <= 16) return launch_units(embedding_copy_kernel<8, 2>, a, vectors, 16, 8, stream);
  return launch_units(embedding_copy_kernel<kWarp, 4>, a, vectors, 4 * kWarp, kWarp, stream);
}

template <typename W, typename O>
Status launch_gather(GatherArgs a, cudaStream_t stream) {
  auto kernel = embedding_gather_kernel<W, O, true>;
  if constexpr (!std::is_same_v<W, O>) {  // those alike, without positions, are copied
    if (a.places.dtype == DType::kAbsent) kernel = embedding_gather_kernel<W, O, false>;
  }
  return launch_units(kernel, a, a.width / kVec<O>, kGatherVecs * kWarp, kWarp, stream);
}

Status launch_any(GatherArgs a, cudaStream_t stream) {
  a.chained = false;
  return launch_units(embedding_any_kernel, a, a.width, kAnyColumns * kWarp, kWarp, stream);
}

Status launch_rows(const GatherArgs& a, cudaStream_t stream) {
  const int vec = 16 / element_bytes(a.dtype);
  const bool aligned = reinterpret_cast<uintptr_t>(a.out) % 16 == 0 && has_vectors(a.weight, a.width, vec) &&
                       has_vectors(a.places, a.width, vec);
  if (!aligned) return launch_any(a, stream);
  if (a.weight.dtype == a.dtype) {
    if (a.places.dtype == DType::kAbsent) return launch_copy(a, a.width / vec, stream);
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
  return launch_rows(a, cuda_stream(stream));
}

}  // namespace fuselm
