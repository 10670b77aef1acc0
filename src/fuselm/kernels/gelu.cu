// GELU: y = x Phi(x), or GPT-2's formula of tanh. Contract: gelu.py; formulas: activations.cuh; kernels:
// elementwise.cuh.
#include "activations.cuh"

namespace fuselm {

Status gelu_forward(const Input& x, bool tanh, const Like<0>& y, Stream stream) {
  if (tanh) return activation::run(activation::Forward<activation::TanhGelu>{}, {&x}, {&y}, stream);
  return activation::run(activation::Forward<activation::Gelu>{}, {&x}, {&y}, stream);
}

Status gelu_backward(const Input& dy, const Input& x, bool tanh, const Like<1>& dx, Stream stream) {
  if (tanh) return activation::run(activation::Backward<activation::TanhGelu>{}, {&dy, &x}, {&dx}, stream);
  return activation::run(activation::Backward<activation::Gelu>{}, {&dy, &x}, {&dx}, stream);
}

}  // namespace fuselm
