// SiLU: y = x / (1 + exp(-x)). Contract: silu.py; formulas: activations.cuh; kernels: elementwise.cuh.
#include "activations.cuh"

namespace fuselm {

Status silu_forward(const Input& x, const Like<0>& y, Stream stream) {
  return activation::run(activation::Forward<activation::Silu>{}, {&x}, {&y}, stream);
}

Status silu_backward(const Input& dy, const Input& x, const Like<1>& dx, Stream stream) {
  return activation::run(activation::Backward<activation::Silu>{}, {&dy, &x}, {&dx}, stream);
}

}  // namespace fuselm
