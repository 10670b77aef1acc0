// Every launcher of fuselm, declared once: what the bindings (bind_torch.cpp, bind_jax.cc) and the kernels agree on.
//
// Knows nothing of PyTorch, JAX or CUDA headers. A launcher's parameters say all a binding needs to know:
//   Input / OptionalInput   a tensor that comes in
//   double, int64_t, bool   a scalar
//   InOut                   a tensor that comes in and is written over
//   InputList, InOutList    any number of such tensors
//   Numbers, Indices        any number of scalars
//   Like<i>, RowStat<i>     a tensor that goes out, contiguous, with the shape it must be given; absent when input i is
//                           absent, and whenever the caller does not want it
//   Halved<i>, Broadcast<i, j>, Gathered<i, j>, Joined<i, j, k>   the same, of other shapes
//   Wanted                  the dtype of a Gathered
//   Scalar                  one float32 that goes out
//   Workspace, Stream       scratch memory of <op>_workspace() bytes, and where to run
// so each binding derives its registration from the signature by one template. A launcher allocates nothing,
// synchronises nothing, and refuses with a Status: the words for a refusal are written in Python, by the op's check().
#pragma once
#include <cstdint>

namespace fuselm {

#define FUSELM_EXPORT __attribute__((visibility("default")))

constexpr int kMaxRank = 8;

enum class DType : int32_t { kAbsent, kFloat32, kFloat16, kBFloat16, kInt32, kInt64, kBool, kUnsupported };

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

// Views that somebody else keeps for the length of a call.
struct TensorList {
  const TensorView* views = nullptr;
  int64_t count = 0;

  const TensorView& operator[](int64_t i) const { return views[i]; }
};
struct InputList : TensorList {};
struct InOutList : TensorList {};

struct Numbers {
  const double* data = nullptr;
  int64_t count = 0;
};
struct Indices {
  const int64_t* data = nullptr;
  int64_t count = 0;
};

// An output with the sizes and the dtype of input kInput.
template <int kInput>
struct Like : TensorView {};

// A float32 output with one number per row of input kInput: its sizes without the last.
template <int kInput>
struct RowStat : TensorView {};

// An output with the dtype of input kInput and its sizes but for the last, which is half of it: a packed gate's.
template <int kInput>
struct Halved : TensorView {};

// An output with the sizes that two inputs broadcast to, in the dtype they share, or in float32 where they share none.
// Absent where they do not broadcast.
template <int kFirst, int kSecond>
struct Broadcast : TensorView {};

// An output with the sizes of input kIndices and, behind them, the last size of input kTable: a row for each index. Its
// dtype is the one asked for by a Wanted before it; kAbsent asks for the table's.
template <int kIndices, int kTable>
struct Gathered : TensorView {};
struct Wanted {
  DType dtype = DType::kAbsent;
};

// An output with the dtype and the sizes of input kFirst, but that its last dimension but one is as long as those of
// all three inputs together: heads of q, k and v. Absent where there is no such dimension.
template <int kFirst, int kSecond, int kThird>
struct Joined : TensorView {};

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

// gelu.cu, silu.cu, relu2.cu: one family, activations.py.
FUSELM_EXPORT Status gelu_forward(const Input& x, bool tanh, const Like<0>& y, Stream stream);
FUSELM_EXPORT Status gelu_backward(const Input& dy, const Input& x, bool tanh, const Like<1>& dx, Stream stream);
FUSELM_EXPORT Status silu_forward(const Input& x, const Like<0>& y, Stream stream);
FUSELM_EXPORT Status silu_backward(const Input& dy, const Input& x, const Like<1>& dx, Stream stream);
FUSELM_EXPORT Status relu2_forward(const Input& x, const Like<0>& y, Stream stream);
FUSELM_EXPORT Status relu2_backward(const Input& dy, const Input& x, const Like<1>& dx, Stream stream);

// swiglu.cu, geglu.cu: the gated ones, activations.py. Packed: gate and up are the halves of one tensor's rows.
FUSELM_EXPORT Status swiglu_forward(const Input& gate, const Input& up, const Like<0>& y, Stream stream);
FUSELM_EXPORT Status swiglu_backward(const Input& dy, const Input& gate, const Input& up, const Like<1>& dgate,
                                     const Like<2>& dup, Stream stream);
FUSELM_EXPORT Status swiglu_packed_forward(const Input& packed, const Halved<0>& y, Stream stream);
FUSELM_EXPORT Status swiglu_packed_backward(const Input& dy, const Input& packed, const Like<1>& dpacked,
                                            Stream stream);
FUSELM_EXPORT Status geglu_forward(const Input& gate, const Input& up, bool tanh, const Like<0>& y, Stream stream);
FUSELM_EXPORT Status geglu_backward(const Input& dy, const Input& gate, const Input& up, bool tanh,
                                    const Like<1>& dgate, const Like<2>& dup, Stream stream);
FUSELM_EXPORT Status geglu_packed_forward(const Input& packed, bool tanh, const Halved<0>& y, Stream stream);
FUSELM_EXPORT Status geglu_packed_backward(const Input& dy, const Input& packed, bool tanh, const Like<1>& dpacked,
                                           Stream stream);

// add.cu, mul.cu; add.py, mul.py. Where the second factor or summand is one row for all, the gradients have kernels of
// their own that add up columns.
FUSELM_EXPORT Status add_forward(const Input& x, const Input& y, double scale, const Broadcast<0, 1>& out,
                                 Stream stream);
FUSELM_EXPORT Status add_backward(const Input& dout, double scale, const Like<0>& dy, Stream stream);
FUSELM_EXPORT Status add_backward_row(const Input& dout, const Input& y, double scale, const Like<1>& dy,
                                      Workspace workspace, Stream stream);
FUSELM_EXPORT int64_t add_backward_row_workspace(const TensorView& dout, Stream stream);
FUSELM_EXPORT Status mul_forward(const Input& x, const Input& y, const Broadcast<0, 1>& out, Stream stream);
FUSELM_EXPORT Status mul_backward(const Input& dout, const Input& x, const Input& y, const Like<1>& dx,
                                  const Like<2>& dy, Stream stream);
FUSELM_EXPORT Status mul_backward_row(const Input& dout, const Input& x, const Input& y, const Like<1>& dx,
                                      const Like<2>& dy, Workspace workspace, Stream stream);
FUSELM_EXPORT int64_t mul_backward_row_workspace(const TensorView& dout, Stream stream);

// rope.cu; rope.py. Without weights the backward is the forward, inverse.
FUSELM_EXPORT Status rope_forward(const Input& q, const Input& k, const Input& cos, const Input& sin,
                                  const OptionalInput& positions, const OptionalInput& q_weight,
                                  const OptionalInput& k_weight, double eps, bool interleaved, bool inverse,
                                  const Like<0>& q_out, const Like<1>& k_out, const RowStat<0>& q_rstd,
                                  const RowStat<1>& k_rstd, Stream stream);
FUSELM_EXPORT Status rope_inplace(const InOut& q, const InOut& k, const Input& cos, const Input& sin,
                                  const OptionalInput& positions, const OptionalInput& q_weight,
                                  const OptionalInput& k_weight, double eps, bool interleaved, bool inverse,
                                  Stream stream);
FUSELM_EXPORT Status rope_backward(const Input& dq_out, const Input& dk_out, const Input& q, const Input& k,
                                   const Input& q_rstd, const Input& k_rstd, const Input& cos, const Input& sin,
                                   const OptionalInput& positions, const Input& q_weight, const Input& k_weight,
                                   bool interleaved, const Like<2>& dq, const Like<3>& dk, const Like<9>& dq_weight,
                                   const Like<10>& dk_weight, Workspace workspace, Stream stream);
FUSELM_EXPORT int64_t rope_backward_workspace(const TensorView& dq_out, Stream stream);

// rope_qkv.cu; rope_qkv.py. Forward is rope_forward's, over views.
FUSELM_EXPORT Status rope_qkv_backward(const Input& dq, const Input& dk, const Input& dv, const Input& cos,
                                       const Input& sin, const OptionalInput& positions, bool interleaved,
                                       const Joined<0, 1, 2>& dqkv, Stream stream);

// embedding.cu and embedding_backward.cu; embedding.py.
FUSELM_EXPORT Status embedding_forward(const Input& ids, const Input& weight, const OptionalInput& position_weight,
                                       const OptionalInput& positions, Wanted dtype, const Gathered<0, 1>& out,
                                       Stream stream);
FUSELM_EXPORT Status embedding_backward(const Input& dout, const Input& ids, const Input& weight,
                                        const OptionalInput& position_weight, const OptionalInput& positions,
                                        const Like<2>& dweight, const Like<3>& dposition_weight, Workspace workspace,
                                        Stream stream);
FUSELM_EXPORT int64_t embedding_backward_workspace(const TensorView& dout, Stream stream);

// adamw_step.cu; adamw.py. `masters` is empty, or has for each parameter its fp32 twin, which may have no element: then
// there is none. `scalars` is empty, or has for each group its learning rate and step. `options` are, for each group,
// lr, beta1, beta2, eps, weight decay and step; `groups` says which group a parameter is of.
FUSELM_EXPORT Status adamw_step(const InOutList& params, const InputList& grads, const InOutList& exp_avgs,
                                const InOutList& exp_avg_sqs, const InOutList& masters, const InputList& scalars,
                                const Numbers& options, const Indices& groups, const OptionalInput& grad_scale,
                                const OptionalInput& skip, Stream stream);

// global_norm.cu; adamw.py. `partial` has room for a number for every 8192 elements of a tensor, begun ones counted.
FUSELM_EXPORT Status global_norm(const InputList& tensors, const InOut& partial, const Scalar& norm, Stream stream);

}  // namespace fuselm
