// GEGLU: y = gelu(gate) * up, gate and up apart or packed. Contract: geglu.py; formulas: activations.cuh; kernels:
// elementwise.cuh.
#include "activations.cuh"

namespace fuselm {

namespace {

using activation::Gelu;
using activation::TanhGelu;

}  // namespace

Status geglu_forward(const Input& gate, const Input& up, bool tanh, const Like<0>& y, Stream stream) {
  if (tanh) return activation::run(activation::GatedForward<TanhGelu>{}, {&gate, &up}, {&y}, stream);
  return activation::run(activation::GatedForward<Gelu>{}, {&gate, &up}, {&y}, stream);
}

Status geglu_backward(const Input& dy, const Input& gate, const Input& up, bool tanh, const Like<1>& dgate,
                      const Like<2>& dup, Stream stream) {
  if (tanh) {
    return activation::run(activation::GatedBackward<TanhGelu>{}, {&dy, &gate, &up}, {&dgate, &dup}, stream);
  }
  return activation::run(activation::GatedBackward<Gelu>{}, {&dy, &gate, &up}, {&dgate, &dup}, stream);
}

Status geglu_packed_forward(const Input& packed, bool tanh, const Halved<0>& y, Stream stream) {
  return tanh ? activation::packed_forward<TanhGelu>(packed, y, stream)
              : activation::packed_forward<Gelu>(packed, y, stream);
}

Status geglu_packed_backward(const Input& dy, const Input& packed, bool tanh, const Like<1>& dpacked, Stream stream) {
  return tanh ? activation::packed_backward<TanhGelu>(dy, packed, dpacked, stream)
              : activation::packed_backward<Gelu>(dy, packed, dpacked, stream);
}

}  // namespace fuselm
