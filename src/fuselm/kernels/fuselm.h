// Every launcher of fuselm, declared once: what the bindings (bind_torch.cpp, bind_jax.cc) and the kernels agree on.
//
// Knows nothing of PyTorch, JAX or CUDA headers. A launcher's parameters say all a binding needs to know:
//   Input / OptionalInput   a tensor that comes in
//   double, int64_t, bool   a scalar
//   InOut                   a tensor that comes in and is written over
//   Like<i>, RowStat<i>     a tensor that goes out, contiguous, with the shape it must be given; absent when input i is
//                           absent, and whenever the caller does not want it
//   Scalar                  one float32 that goes out
//   Workspace, Stream       scratch memory of <op>_workspace() bytes, and where to run
// so each binding derives its registration from the signature by one template. A launcher allocates nothing,
// synchronises nothing, and refuses with a Status: the words for a refusal are written in Python, by the op's check().
#pragma once
#include <cstdint>

namespace fuselm {

#define FUSELM_EXPORT __attribute__((visibility("default")))

constexpr int kMaxRank = 8;

enum class DType : int32_t { kAbsent, kFloat32, kFloat16, kBFloat16, kInt32, kInt64, kUnsupported };

enum class Status : int32_t { kOk, kBadDtype, kBadShape, kBadScalar, kBadDevice, kBadWorkspace, kCudaError };

// A tensor without an owner. Strides are in elements and may be anything, 0 and negative included.
struct TensorView {
  void* data = nullptr;
  DType dtype = DType::kAbsent;
  int32_t rank = 0;
  int64_t sizes[kMaxRank] = {};
  int64_t strides[kMaxRank] = {};

  bool present() const { return dtype != DType::kAbsent; }
};

struct Input : TensorView {};
struct OptionalInput : TensorView {};
struct InOut : TensorView {};

// An output with the sizes and the dtype of input kInput.
template <int kInput>
struct Like : TensorView {};

// A float32 output with one number per row of input kInput: its sizes without the last.
template <int kInput>
struct RowStat : TensorView {};

// A float32 output without dimensions.
struct Scalar : TensorView {};

struct Workspace {
  void* data = nullptr;
  int64_t bytes = 0;
};

// `device` is the CUDA ordinal the stream belongs to, or -1 for the current one.
struct Stream {
  void* handle = nullptr;
  int32_t device = -1;
};

// copy.cu: for a binding that must hand a launcher its own memory.
FUSELM_EXPORT Status copy_bytes(void* to, const void* from, int64_t bytes, Stream stream);

// overwrite_l2.cu: for the benchmarks.
FUSELM_EXPORT Status overwrite_l2(const InOut& buffer, Stream stream);

// rms_norm.cu and rms_norm_backward.cu; the mathematics and the contract are in rms_norm.py.
FUSELM_EXPORT Status rms_norm_forward(const Input& x, const OptionalInput& weight, const OptionalInput& residual,
                                      double eps, double offset, bool round_first, const Like<0>& y,
                                      const Like<2>& residual_out, const RowStat<0>& rstd, Stream stream);
FUSELM_EXPORT Status rms_norm_backward(const Input& dy, const Input& h, const Input& rstd, const OptionalInput& weight,
                                       const OptionalInput& dresidual_out, double offset, const Like<0>& dx,
                                       const Like<1>& dresidual, const Like<3>& dweight, Workspace workspace,
                                       Stream stream);
FUSELM_EXPORT int64_t rms_norm_backward_workspace(const TensorView& dy, Stream stream);

// layer_norm.cu and layer_norm_backward.cu; layer_norm.py.
FUSELM_EXPORT Status layer_norm_forward(const Input& x, const OptionalInput& weight, const OptionalInput& bias,
                                        const OptionalInput& residual, double eps, const Like<0>& y,
                                        const Like<3>& residual_out, const RowStat<0>& mean, const RowStat<0>& rstd,
                                        Workspace workspace, Stream stream);
FUSELM_EXPORT int64_t layer_norm_forward_workspace(const TensorView& x, Stream stream);
FUSELM_EXPORT Status layer_norm_backward(const Input& dy, const Input& h, const Input& mean, const Input& rstd,
                                         const OptionalInput& weight, const OptionalInput& bias,
                                         const OptionalInput& dresidual_out, const Like<0>& dx,
                                         const Like<1>& dresidual, const Like<4>& dweight, const Like<5>& dbias,
                                         Workspace workspace, Stream stream);
FUSELM_EXPORT int64_t layer_norm_backward_workspace(const TensorView& dy, Stream stream);

// softmax.cu; softmax.py.
FUSELM_EXPORT Status softmax_forward(const Input& x, const OptionalInput& mask, double scale, bool causal,
                                     const Like<0>& y, Stream stream);
FUSELM_EXPORT Status softmax_backward(const Input& dy, const Input& y, double scale, const Like<0>& dx, Stream stream);

// cross_entropy.cu; cross_entropy.py.
FUSELM_EXPORT Status cross_entropy_forward(const Input& logits, const Input& targets, const OptionalInput& count,
                                           int64_t ignore_index, double label_smoothing, double z_loss, double softcap,
                                           bool mean, const Scalar& loss, const RowStat<0>& losses,
                                           const RowStat<0>& lse, const Scalar& counted, const Like<0>& dlogits,
                                           Stream stream);
FUSELM_EXPORT Status cross_entropy_inplace(const InOut& logits, const Input& targets, const OptionalInput& count,
                                           int64_t ignore_index, double label_smoothing, double z_loss, double softcap,
                                           bool mean, const Scalar& loss, const RowStat<0>& losses,
                                           const RowStat<0>& lse, const Scalar& counted, Stream stream);
FUSELM_EXPORT Status cross_entropy_pieces(const InOut& first, const InOut& rest, const Input& targets,
                                          const OptionalInput& count, int64_t words, int64_t ignore_index,
                                          double label_smoothing, double z_loss, double softcap, bool mean,
                                          const Scalar& loss, const RowStat<0>& losses, const RowStat<0>& lse,
                                          const Scalar& counted, Stream stream);
FUSELM_EXPORT Status cross_entropy_backward(const Input& logits, const Input& targets, const Input& lse,
                                            const Input& dloss, const OptionalInput& count, int64_t ignore_index,
                                            double label_smoothing, double z_loss, double softcap,
                                            const Like<0>& dlogits, Stream stream);
FUSELM_EXPORT Status cross_entropy_correct(const InOut& dlogits, const OptionalInput& logits,
                                           const OptionalInput& targets, const OptionalInput& lse, const Input& dloss,
                                           const OptionalInput& count, int64_t ignore_index, double label_smoothing,
                                           double z_loss, double softcap, Stream stream);

// linear_cross_entropy.cu and linear_cross_entropy_dweight.cu; linear_cross_entropy.py.
FUSELM_EXPORT Status linear_cross_entropy_scale(const InOut& gradient, const Input& factor, Stream stream);
FUSELM_EXPORT Status linear_cross_entropy_dweight(const Input& dlogits, const Input& hidden, const InOut& dweight,
                                                  const InOut& exponents, bool first, bool last, Stream stream);

}  // namespace fuselm
