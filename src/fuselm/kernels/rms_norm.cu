// RMSNorm: y = h / rms(h) * (offset + weight), h = x or x + residual. Contract: rms_norm.py; kernels: norm_forward.cuh;
// backward: rms_norm_backward.cu.
#include "norm_forward.cuh"

namespace fuselm {

Status rms_norm_forward(const Input& x, const OptionalInput& weight, const OptionalInput& residual, double eps,
                        double offset, bool round_first, const Like<0>& y, const Like<2>& residual_out,
                        const RowStat<0>& rstd, Stream stream) {
  return norm::Forward<false>::run(x, weight, {}, residual, eps, offset, round_first, y, residual_out, {}, rstd, {},
                                   stream);
}

}  // namespace fuselm
