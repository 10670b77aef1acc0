// Mul, forward and backward: out = x * y, dx = dout * y and dy = dout * x, summed where y is one row. Contract: mul.py;
// how tensors broadcast and rows are summed: broadcast.cuh.
//
// Traffic. Every tensor once: both gradients are made in one pass over dout, x and y.
#include "broadcast.cuh"

namespace fuselm {
namespace {

struct Product {
  static constexpr int kIn = 2, kOut = 1;
  template <bool kExact>
  __device__ void operator()(const float (&in)[kIn], float (&out)[kOut]) const {
    out[0] = in[0] * in[1];
  }
};

// Of dout, x and y.
struct Gradients {
  static constexpr int kIn = 3, kOut = 2;
  template <bool kExact>
  __device__ void operator()(const float (&in)[kIn], float (&out)[kOut]) const {
    out[0] = in[0] * in[2], out[1] = in[0] * in[1];
  }
};

// Of tensors of one shape. A factor whose product is not wanted is not read.
Status gradients(const TensorView& dout, const TensorView& x, const TensorView& y, const TensorView& dx,
                 const TensorView& dy, Stream stream) {
  if (!dy.present()) return elementwise(Product{}, {&dout, &y}, {&dx}, stream);
  if (!dx.present()) return elementwise(Product{}, {&dout, &x}, {&dy}, stream);
  return elementwise(Gradients{}, {&dout, &x, &y}, {&dx, &dy}, stream);
}

}  // namespace

Status mul_forward(const Input& x, const Input& y, const Broadcast<0, 1>& out, Stream stream) {
  return broadcast::forward(Product{}, x, y, out, stream);
}

Status mul_backward(const Input& dout, const Input& x, const Input& y, const Like<1>& dx, const Like<2>& dy,
                    Stream stream) {
  if (!dout.present()) return Status::kOk;  // JAX's binding takes empty tensors for none
  return gradients(dout, x, y, dx, dy, stream);
}

Status mul_backward_row(const Input& dout, const Input& x, const Input& y, const Like<1>& dx, const Like<2>& dy,
                        Workspace workspace, Stream stream) {
  if (!dout.present() || !x.present() || !y.present()) return Status::kOk;
  Status status = broadcast::check_pair(dout, x);
  if (status == Status::kOk) status = broadcast::check_pair(dout, y);
  if (status != Status::kOk) return status;
  if (!same_sizes(x, dout) || !broadcast::is_row(y, dout)) return Status::kBadShape;
  TensorView wide_y, wide_dy;
  if (!broadcast::spread(y, dout, wide_y)) return Status::kBadShape;
  if (!dy.present()) return elementwise(Product{}, {&dout, &wide_y}, {&dx}, stream);
  if (count_rows(dout) == 1 && broadcast::spread(dy, dout, wide_dy)) {  // nothing to sum
    return gradients(dout, x, wide_y, dx, wide_dy, stream);
  }
  return broadcast::backward_row<true>(dout, x, y, 1.0, dx, dy, workspace, stream);
}

int64_t mul_backward_row_workspace(const TensorView& dout, Stream stream) {
  return broadcast::row_workspace(dout, stream);
}

}  // namespace fuselm
