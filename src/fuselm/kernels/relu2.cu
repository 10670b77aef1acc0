// Squared ReLU: y = max(x, 0)^2. Contract: relu2.py; formulas: activations.cuh; kernels: elementwise.cuh.
#include "activations.cuh"

namespace fuselm {

Status relu2_forward(const Input& x, const Like<0>& y, Stream stream) {
  return activation::run(activation::SquareForward{}, {&x}, {&y}, stream);
}

Status relu2_backward(const Input& dy, const Input& x, const Like<1>& dx, Stream stream) {
  return activation::run(activation::SquareBackward{}, {&dy, &x}, {&dx}, stream);
}

}  // namespace fuselm
