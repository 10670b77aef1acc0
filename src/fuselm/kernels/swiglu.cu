// SwiGLU: y = silu(gate) * up, gate and up apart or packed. Contract: swiglu.py; formulas: activations.cuh; kernels:
// elementwise.cuh.
#include "activations.cuh"

namespace fuselm {

Status swiglu_forward(const Input& gate, const Input& up, const Like<0>& y, Stream stream) {
  return activation::run(activation::GatedForward<activation::Silu>{}, {&gate, &up}, {&y}, stream);
}

Status swiglu_backward(const Input& dy, const Input& gate, const Input& up, const Like<1>& dgate, const Like<2>& dup,
                       Stream stream) {
  return activation::run(activation::GatedBackward<activation::Silu>{}, {&dy, &gate, &up}, {&dgate, &dup}, stream);
}

Status swiglu_packed_forward(const Input& packed, const Halved<0>& y, Stream stream) {
  return activation::packed_forward<activation::Silu>(packed, y, stream);
}

Status swiglu_packed_backward(const Input& dy, const Input& packed, const Like<1>& dpacked, Stream stream) {
  return activation::packed_backward<activation::Silu>(dy, packed, dpacked, stream);
}

}  // namespace fuselm
