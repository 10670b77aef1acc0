// What both passes of the embedding share: indices of any shape and strides, and what is asked of the tensors of a
// call.
//
// Knows no kernel. An index is an id or a position: a row of a table, if the table has one of that number.
#pragma once
#include "rows.cuh"

namespace fuselm {
namespace embedding {

constexpr int64_t kMost = (int64_t{1} << 31) - 1;  // rows of a table, and tokens of a call

inline bool is_index(DType dtype) { return dtype == DType::kInt32 || dtype == DType::kInt64; }

// The indices of all tokens, by a token's number in the order of ids' shape. Neighbouring dimensions that share a
// stride are folded into one on the host. Strides are in bytes.
struct IndexList {
  const char* data = nullptr;  // null: the index is counted, from 0 along the last dimension of `tokens`
  int64_t step = 0;            // from one index to the next, where all are one dimension
  int32_t outer = 1;           // dimensions left after folding
  bool wide = false;           // int64, else int32
  bool flat = false;           // one after another, without a gap
  Divisor tokens;
  Divisor sizes[kMaxRank - 1];
  int64_t strides[kMaxRank - 1] = {};

  __host__ __device__ bool counted() const { return data == nullptr; }
  __device__ int64_t at(const char* place) const {
    return wide ? *reinterpret_cast<const int64_t*>(place) : *reinterpret_cast<const int32_t*>(place);
  }
  // The same of flat ones.
  template <typename T>
  __device__ int64_t near(uint32_t token) const {
    return reinterpret_cast<const T*>(data)[token];
  }
  // Tokens are fewer than 2^31: divisions are multiplications.
  __device__ int64_t of(uint32_t token) const {
    if (counted()) return token - tokens.divide(token) * tokens.value;
    if (likely(outer == 1)) return at(data + token * step);
    const char* place = data;
#pragma unroll 1
    for (int d = outer - 1; d > 0; --d) {
      const uint32_t quotient = sizes[d].divide(token);
      place += (token - quotient * sizes[d].value) * strides[d];
      token = quotient;
    }
    return at(place + token * strides[0]);
  }
};

// Calls f with what reads a token's index: it is asked once how they lie, and several are then asked for together.
template <typename F>
__device__ inline auto with_reader(const IndexList& indices, const F& f) {
  if (likely(indices.flat && indices.wide)) return f([&](uint32_t token) { return indices.near<int64_t>(token); });
  if (indices.flat) return f([&](uint32_t token) { return indices.near<int32_t>(token); });
  return f([&](uint32_t token) { return indices.of(token); });
}

inline int64_t last_size(const TensorView& ids) { return ids.rank > 0 ? ids.sizes[ids.rank - 1] : 1; }

// `view` has the shape of ids, or that of ids' last dimension and counts for all others; absent, it is counted.
inline IndexList make_indices(const TensorView& view, const TensorView& ids) {
  IndexList made;
  made.tokens = Divisor(static_cast<uint32_t>(last_size(ids)));
  if (!view.present()) return made;
  made.data = static_cast<const char*>(view.data);
  made.wide = view.dtype == DType::kInt64;
  const int64_t bytes = made.wide ? 8 : 4;
  int used = 0;
  for (int d = 0; d < ids.rank; ++d) {
    if (ids.sizes[d] == 1) continue;
    const int from = d - (ids.rank - view.rank);
    const int64_t stride = from < 0 ? 0 : view.strides[from] * bytes;
    if (used > 0 && made.strides[used - 1] == ids.sizes[d] * stride) {
      made.sizes[used - 1] = Divisor(static_cast<uint32_t>(made.sizes[used - 1].value * ids.sizes[d]));
      made.strides[used - 1] = stride;
    } else {
      made.sizes[used] = Divisor(static_cast<uint32_t>(ids.sizes[d]));
      made.strides[used++] = stride;
    }
  }
  made.outer = used > 0 ? used : 1;
  made.step = made.strides[0];
  made.flat = used == 0 || (used == 1 && made.step == bytes);
  return made;
}

inline int64_t count_indices(const TensorView& ids) {
  int64_t count = 1;
  for (int d = 0; d < ids.rank; ++d) count *= ids.sizes[d];
  return count;
}

// A weight, a table of positions, or the gradient of one.
inline Status check_table(const TensorView& table, int64_t width) {
  if (!is_float(table.dtype)) return Status::kBadDtype;
  const bool fits = table.rank == 2 && table.sizes[0] >= 1 && table.sizes[0] <= kMost && table.sizes[1] == width;
  return fits && width >= 1 && width <= kMaxWidth ? Status::kOk : Status::kBadShape;
}

inline Status check_ids(const TensorView& ids) {
  if (!is_index(ids.dtype)) return Status::kBadDtype;
  return ids.rank < kMaxRank && count_indices(ids) <= kMost ? Status::kOk : Status::kBadShape;
}

// Positions may be absent: the table must then have a row for each token of ids' last dimension.
inline Status check_positions(const TensorView& positions, const TensorView& ids, const TensorView& table) {
  if (!positions.present()) return last_size(ids) <= table.sizes[0] ? Status::kOk : Status::kBadShape;
  if (!is_index(positions.dtype)) return Status::kBadDtype;
  const bool last = positions.rank == 1 && ids.rank > 0 && positions.sizes[0] == last_size(ids);
  return last || same_sizes(positions, ids) ? Status::kOk : Status::kBadShape;
}

}  // namespace embedding
}  // namespace fuselm
