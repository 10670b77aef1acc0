// LayerNorm: y = (h - mean(h)) / std(h) * weight + bias, h = x or x + residual. Contract: layer_norm.py; kernels:
// norm_forward.cuh; backward: layer_norm_backward.cu.
#include "norm_forward.cuh"

namespace fuselm {

Status layer_norm_forward(const Input& x, const OptionalInput& weight, const OptionalInput& bias,
                          const OptionalInput& residual, double eps, const Like<0>& y, const Like<3>& residual_out,
                          const RowStat<0>& mean, const RowStat<0>& rstd, Workspace workspace, Stream stream) {
  return norm::Forward<true>::run(x, weight, bias, residual, eps, 0.0, false, y, residual_out, mean, rstd, workspace,
                                  stream);
}

int64_t layer_norm_forward_workspace(const TensorView& x, Stream) { return norm::Forward<true>::workspace(x); }

}  // namespace fuselm
