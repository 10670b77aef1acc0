// Two tensors that broadcast, for add and mul: their views of one shape, and the gradient of one row that all rows
// share.
//
// Knows neither op. Forward, and all gradients that sum nothing, are elementwise.cuh's.
//
// Traffic of a row's gradient. dout is read once, for a product x too, and dx is written once, in one pass. Threads. A
// block is kThreads and has some columns, a vector of them for each of kLanes lanes, and every gridDim.y-th of the
// groups of rows: it takes kGroups rows at a time, one for each group of lanes. A thread adds up its columns in
// registers; at the end the groups meet in shared memory, and what a block has found is a part of one partial row. So
// there are few of those whatever the width, half a megabyte in all, and column_sums (rows.cuh) adds them up. Of few
// rows a block takes all, and there is nothing left to add. The order of a sum depends on the shape, the dtype and the
// device, not on how tensors lie: the kernel for elements one by one has the same groups. No atomics.
#pragma once
#include "elementwise.cuh"

namespace fuselm {
namespace broadcast {

// ---- views ----

// A tensor as one of `full`'s sizes, strides of 0 where it is repeated. False when it does not fit.
inline bool spread(const TensorView& view, const TensorView& full, TensorView& out) {
  out = view;
  if (view.rank > full.rank) return false;
  out.rank = full.rank;
  for (int d = 0; d < full.rank; ++d) {
    const int from = d - (full.rank - view.rank);
    const bool repeated = from < 0 || (view.sizes[from] == 1 && full.sizes[d] != 1);
    if (!repeated && view.sizes[from] != full.sizes[d]) return false;
    out.sizes[d] = full.sizes[d];
    out.strides[d] = repeated ? 0 : view.strides[from];
  }
  return true;
}

// Whether a tensor is one row for all rows of `full`.
inline bool is_row(const TensorView& view, const TensorView& full) {
  bool one = view.rank > 0 && view.rank <= full.rank && view.sizes[view.rank - 1] == full.sizes[full.rank - 1];
  for (int d = 0; one && d < view.rank - 1; ++d) one = view.sizes[d] == 1;
  return one;
}

inline Status check_pair(const TensorView& x, const TensorView& y) {
  if (!is_float(x.dtype) || !is_float(y.dtype)) return Status::kBadDtype;
  return x.rank > kMaxRank || y.rank > kMaxRank ? Status::kBadShape : Status::kOk;
}

// f of two tensors that broadcast. Small ones are set up while the kernel before them ends: in a model that is a small
// one too. (JAX's binding takes an empty tensor for none; whatever it goes together with then has no elements either.)
template <typename F>
Status forward(const F& f, const TensorView& x, const TensorView& y, const TensorView& out, Stream stream) {
  if (!x.present() || !y.present()) return Status::kOk;
  const Status status = check_pair(x, y);
  if (status != Status::kOk) return status;
  TensorView wide_x, wide_y;
  if (!out.present() || !spread(x, out, wide_x) || !spread(y, out, wide_y)) return Status::kBadShape;
  return elementwise<true>(f, {&wide_x, &wide_y}, {&out}, stream);
}

// ---- the gradient of a row ----

constexpr int kThreads = 256;
constexpr int kBlocks = 4;         // of a multiprocessor: 64 registers a thread
constexpr int64_t kFewRows = 128;  // which one block takes
constexpr int kFewLanes = 8;       // then more blocks of fewer columns
constexpr int kLeastRows = 4;      // of a thread, before rows are shared out among more blocks
// Rows of a thread that are under way together: 64 KiB of a multiprocessor and more, twice what its share of the
// bandwidth needs. Where columns come element by element a row is N loads.
template <bool kProduct, bool kVectors>
constexpr int kAtOnce = kVectors ? (kProduct ? 2 : 6) : (kProduct ? 1 : 2);

// In the order of use: the constant cache is cold when a kernel starts, and vectors need its first lines alone.
struct RowArgs {
  const char *dout, *x, *y;       // x and y are null in a sum
  int64_t dout_stride, x_stride;  // from row to row, in bytes
  int64_t rows, width;
  char* dx;        // contiguous, as dy is; null when it is not wanted
  float* partial;  // null where one block sees all rows
  int64_t partial_stride;
  char* dy;
  float scale;
  DType dy_dtype, dx_dtype;
  bool large;  // all tensors together are larger than L2
  Rows dout_rows, x_rows, y_rows;
};

// A thread's columns of one row, asked for and not yet looked at. `row` is for vectors, `index` for elements.
template <typename X, bool kVectors>
struct Columns {
  static constexpr int N = kVec<X>;
  uint4 raw;

  __device__ void load(const char* row, const Rows&, DType, int64_t, int64_t base, const Span& span, uint64_t policy) {
    raw = load_vector(row + (base + span.first) * static_cast<int64_t>(sizeof(X)), policy);
  }
  __device__ void get(float (&out)[N]) const { unpack<X>(raw, out); }
};

template <typename X>
struct Columns<X, false> {
  static constexpr int N = kVec<X>;
  float value[N];

  __device__ void load(const char*, const Rows& rows, DType dtype, int64_t index, int64_t base, const Span& span,
                       uint64_t) {
    const char* at = rows.any_row(index) + base * rows.column_stride * element_bytes(dtype);
    load_elements(at, dtype, rows.column_stride, span, value);
  }
  __device__ void get(float (&out)[N]) const {
#pragma unroll
    for (int i = 0; i < N; ++i) out[i] = value[i];
  }
};

// Adds what the groups of a block have found, and leaves it in dy or in the block's partial row. Every thread comes
// here. `column` says which of the block's columns a lane's number i is of.
template <int kLanes, int N, typename Column>
__device__ inline void leave(const RowArgs& a, int64_t base, int here, float (&sums)[N], const Column& column) {
  constexpr int kWarps = kThreads / kWarp, kColumns = kLanes * N;
  static_assert(kColumns <= kThreads, "a thread for each column");
  __shared__ float shares[kWarps][kColumns];
#pragma unroll
  for (int i = 0; i < N; ++i) {
#pragma unroll
    for (int step = kWarp / 2; step >= kLanes; step /= 2) sums[i] += __shfl_xor_sync(0xffffffffu, sums[i], step);
    if (threadIdx.x % kWarp < kLanes) shares[threadIdx.x / kWarp][column(i)] = sums[i];
  }
  __syncthreads();
  const int mine = static_cast<int>(threadIdx.x);
  if (mine >= here) return;
  float found[kWarps];
#pragma unroll
  for (int w = 0; w < kWarps; ++w) found[w] = shares[w][mine];
  const float sum = folded<Sum, kWarps>(found) * a.scale;
  if (a.partial != nullptr) {
    a.partial[blockIdx.y * a.partial_stride + base + mine] = sum;
  } else {
    set_element(a.dy, a.dy_dtype, base + mine, sum);
  }
}

// dy = scale * the sum over rows of dout or, with kProduct, of dout * x; then dx = dout * y too.
template <typename X, bool kProduct, bool kVectors, int kLanes>
__global__ void __launch_bounds__(kThreads, fitting_blocks(kThreads, kBlocks))
    backward_row_kernel(const __grid_constant__ RowArgs a) {
  constexpr int N = kVec<X>, kColumns = kLanes * N, kGroups = kThreads / kLanes;
  constexpr int kRows = kAtOnce<kProduct, kVectors>;
  const int lane = threadIdx.x % kLanes;
  const int64_t base = static_cast<int64_t>(blockIdx.x) * kColumns;
  const int here = a.width - base < kColumns ? static_cast<int>(a.width - base) : kColumns;
  // Vectors, or neighbouring lanes neighbouring elements: a column's sum is the same whoever takes it.
  const Span span = kVectors ? Span{lane * N, 1, here} : Span{lane, kLanes, here};
  const bool live = span.has(0);
  const uint64_t policy = read_policy(a.large);
  Columns<X, kVectors> y;
  if (kProduct && live && a.dx != nullptr) y.load(a.y, a.y_rows, a.y_rows.dtype, 0, base, span, policy);

  float sums[N] = {};
  const int64_t step = static_cast<int64_t>(gridDim.y) * kGroups;
  const int64_t first = static_cast<int64_t>(blockIdx.y) * kGroups + threadIdx.x / kLanes;
  for (int64_t row = live ? first : a.rows; row < a.rows; row += kRows * step) {
    Columns<X, kVectors> dout[kRows], x[kProduct ? kRows : 1];
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
      const int64_t at = row + k * step;
      if (at >= a.rows) break;
      dout[k].load(a.dout + at * a.dout_stride, a.dout_rows, kDType<X>, at, base, span, policy);
      if constexpr (kProduct) x[k].load(a.x + at * a.x_stride, a.x_rows, a.x_rows.dtype, at, base, span, policy);
    }
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
      const int64_t at = row + k * step;
      if (at >= a.rows) break;
      float given[N];
      dout[k].get(given);
      if constexpr (kProduct) {
        float factor[N];
        x[k].get(factor);
#pragma unroll
        for (int i = 0; i < N; ++i) sums[i] = fmaf(given[i], factor[i], sums[i]);
        if (a.dx == nullptr) continue;
        y.get(factor);
#pragma unroll
        for (int i = 0; i < N; ++i) given[i] *= factor[i];
        const int64_t element = at * a.width + base;
        if constexpr (kVectors) {
          store_floats<X>(a.dx + (element + span.first) * static_cast<int64_t>(sizeof(X)), given);
        } else {
          store_elements(a.dx + element * element_bytes(a.dx_dtype), a.dx_dtype, span, given);
        }
      } else {
#pragma unroll
        for (int i = 0; i < N; ++i) sums[i] += given[i];
      }
    }
  }
  allow_next_kernel();
  leave<kLanes>(a, base, here, sums, [&](int i) { return span.column(i); });
}

// How rows are shared out: `across` blocks have all columns, and `down` such sets of them every row. Where those are
// several, each leaves a partial row.
struct RowPlan {
  int lanes;
  int64_t across, down;

  RowPlan(int64_t rows, int64_t width, int vec, const DeviceFacts& facts) {
    const int64_t vectors = width > 0 ? divide_up(width, vec) : 1;
    lanes = rows <= kFewRows || vectors <= kFewLanes ? kFewLanes : kWarp;
    across = divide_up(vectors, lanes);
    // One wave: a block more than fits would take as long as all others together.
    const int64_t fitting = static_cast<int64_t>(facts.multiprocessors) * kBlocks / across;
    const int64_t wanted = divide_up(rows, kThreads / lanes * kLeastRows);
    down = rows <= kFewRows || fitting < 1 ? 1 : at_most(wanted, fitting);
  }
  int64_t bytes(int64_t stride) const { return down > 1 ? down * stride * static_cast<int64_t>(sizeof(float)) : 0; }
};

inline int64_t padded_width(int64_t width) { return divide_up(width, 8) * 8; }

// Enough for every dtype: a binding need not know dout's.
inline int64_t row_workspace(const TensorView& dout, Stream stream) {
  const DeviceGuard guard(stream.device);
  if (!guard.ok() || dout.rank < 1 || dout.rank > kMaxRank) return 0;
  const int64_t rows = count_rows(dout), width = dout.sizes[dout.rank - 1], stride = padded_width(width);
  const DeviceFacts& facts = device_facts(guard.device());
  const int64_t wide = RowPlan(rows, width, kVec<float>, facts).bytes(stride);
  const int64_t narrow = RowPlan(rows, width, kVec<bf16>, facts).bytes(stride);
  return wide > narrow ? wide : narrow;
}

template <typename X, bool kProduct, bool kVectors>
Status launch_row(const RowArgs& a, const RowPlan& plan, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(plan.across), static_cast<unsigned>(plan.down));
  if (plan.lanes == kFewLanes) {
    return launch(backward_row_kernel<X, kProduct, kVectors, kFewLanes>, grid, kThreads, 0, false, stream, a);
  }
  return launch(backward_row_kernel<X, kProduct, kVectors, kWarp>, grid, kThreads, 0, false, stream, a);
}

// The gradient of a row, and with kProduct dx beside it; all are there but for dx, which may be absent.
template <bool kProduct>
Status backward_row(const TensorView& dout, const TensorView& x, const TensorView& y, double scale,
                    const TensorView& dx, const TensorView& dy, Workspace workspace, Stream stream) {
  const DeviceGuard guard(stream.device);
  if (!guard.ok()) return Status::kBadDevice;
  const int64_t rows = count_rows(dout), width = dout.sizes[dout.rank - 1];
  if (width == 0) return Status::kOk;
  const DeviceFacts& facts = device_facts(guard.device());
  return with_dtype(dout.dtype, [&](auto zero) {
    using X = decltype(zero);
    const RowPlan plan(rows, width, kVec<X>, facts);
    RowArgs a = {};
    a.dout_rows = make_rows(dout, width, kVec<X>);
    a.dout = a.dout_rows.data, a.dout_stride = a.dout_rows.strides[0];
    if (kProduct) {
      a.x_rows = make_rows(x, width, kVec<X>), a.y_rows = make_rows(y, width, kVec<X>);
      a.x = a.x_rows.data, a.x_stride = a.x_rows.strides[0], a.y = a.y_rows.data;
    }
    a.dx = static_cast<char*>(dx.data), a.dx_dtype = dx.dtype;
    a.dy = static_cast<char*>(dy.data), a.dy_dtype = dy.dtype;
    a.rows = rows, a.width = width, a.scale = static_cast<float>(scale);
    int64_t bytes = element_bytes(dout.dtype);
    for (const TensorView* view : {&x, &dx}) bytes += kProduct && view->present() ? element_bytes(view->dtype) : 0;
    a.large = bytes * rows * width > facts.l2_bytes;
    a.partial_stride = padded_width(width);
    if (plan.down > 1) {
      if (workspace.bytes < plan.bytes(a.partial_stride)) return Status::kBadWorkspace;
      a.partial = static_cast<float*>(workspace.data);
    }
    // One stride from row to row, the usual thing; what lies otherwise comes element by element.
    bool vectors = a.dout_rows.plain();
    if (kProduct) {
      vectors &= a.x_rows.plain() && a.y_rows.plain() && x.dtype == dout.dtype && y.dtype == dout.dtype &&
                 reinterpret_cast<uintptr_t>(dx.data) % 16 == 0;
    }
    const Status status = vectors ? launch_row<X, kProduct, true>(a, plan, cuda_stream(stream))
                                  : launch_row<X, kProduct, false>(a, plan, cuda_stream(stream));
    if (status != Status::kOk || plan.down == 1) return status;
    return column_sums({a.partial, nullptr}, plan.down, a.partial_stride, width, {dy, TensorView{}},
                       facts.capability >= 90, cuda_stream(stream));
  });
}

}  // namespace broadcast
}  // namespace fuselm
