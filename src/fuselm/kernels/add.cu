// Add, forward and backward: out = x + scale * y, and dy = scale * dout, summed where y is one row. Contract: add.py;
// how tensors broadcast and rows are summed: broadcast.cuh.
//
// Traffic. Every tensor once. A gradient that is dout itself has no kernel.
#include <cmath>

#include "broadcast.cuh"

namespace fuselm {
namespace {

struct ScaledSum {
  static constexpr int kIn = 2, kOut = 1;
  float scale;
  template <bool kExact>
  __device__ void operator()(const float (&in)[kIn], float (&out)[kOut]) const {
    out[0] = fmaf(in[1], scale, in[0]);
  }
};

struct Scaled {
  static constexpr int kIn = 1, kOut = 1;
  float scale;
  template <bool kExact>
  __device__ void operator()(const float (&in)[kIn], float (&out)[kOut]) const {
    out[0] = in[0] * scale;
  }
};

bool is_finite(double scale) { return std::isfinite(static_cast<float>(scale)); }

}  // namespace

Status add_forward(const Input& x, const Input& y, double scale, const Broadcast<0, 1>& out, Stream stream) {
  if (!is_finite(scale)) return Status::kBadScalar;
  return broadcast::forward(ScaledSum{static_cast<float>(scale)}, x, y, out, stream);
}

Status add_backward(const Input& dout, double scale, const Like<0>& dy, Stream stream) {
  if (!dout.present()) return Status::kOk;
  if (!is_finite(scale)) return Status::kBadScalar;
  return elementwise(Scaled{static_cast<float>(scale)}, {&dout}, {&dy}, stream);
}

Status add_backward_row(const Input& dout, const Input& y, double scale, const Like<1>& dy, Workspace workspace,
                        Stream stream) {
  if (!dout.present() || !y.present()) return Status::kOk;  // JAX's binding takes an empty row for none
  const Status status = broadcast::check_pair(dout, y);
  if (status != Status::kOk) return status;
  if (!is_finite(scale)) return Status::kBadScalar;
  if (!broadcast::is_row(y, dout) || !dy.present()) return Status::kBadShape;
  TensorView wide_dy;
  if (count_rows(dout) == 1 && broadcast::spread(dy, dout, wide_dy)) {  // nothing to sum
    return elementwise(Scaled{static_cast<float>(scale)}, {&dout}, {&wide_dy}, stream);
  }
  return broadcast::backward_row<false>(dout, {}, {}, scale, {}, dy, workspace, stream);
}

int64_t add_backward_row_workspace(const TensorView& dout, Stream stream) {
  return broadcast::row_workspace(dout, stream);
}

}  // namespace fuselm
