// LayerNorm, backward. Contract: layer_norm.py; kernels: norm_backward.cuh.
#include "norm_backward.cuh"

namespace fuselm {

int64_t layer_norm_backward_workspace(const TensorView& dy, Stream stream) {
  return norm::Backward<true>::workspace(dy, stream);
}

Status layer_norm_backward(const Input& dy, const Input& h, const Input& mean, const Input& rstd,
                           const OptionalInput& weight, const OptionalInput& bias, const OptionalInput& dresidual_out,
                           const Like<0>& dx, const Like<1>& dresidual, const Like<4>& dweight, const Like<5>& dbias,
                           Workspace workspace, Stream stream) {
  return norm::Backward<true>::run(dy, h, mean, rstd, weight, bias, dresidual_out, 0.0, dx, dresidual, dweight, dbias,
                                   workspace, stream);
}

}  // namespace fuselm
