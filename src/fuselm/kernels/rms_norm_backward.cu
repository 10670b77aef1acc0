// RMSNorm, backward. Contract: rms_norm.py; kernels: norm_backward.cuh.
#include "norm_backward.cuh"

namespace fuselm {

int64_t rms_norm_backward_workspace(const TensorView& dy, Stream stream) {
  return norm::Backward<false>::workspace(dy, stream);
}

Status rms_norm_backward(const Input& dy, const Input& h, const Input& rstd, const OptionalInput& weight,
                         const OptionalInput& dresidual_out, double offset, const Like<0>& dx, const Like<1>& dresidual,
                         const Like<3>& dweight, Workspace workspace, Stream stream) {
  return norm::Backward<false>::run(dy, h, {}, rstd, weight, {}, dresidual_out, offset, dx, dresidual, dweight, {},
                                    workspace, stream);
}

}  // namespace fuselm
