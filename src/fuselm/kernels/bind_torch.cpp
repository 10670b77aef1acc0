// The PyTorch binding: registers every launcher of fuselm.h as the CUDA implementation of torch op fuselm::<launcher>.
//
// Knows libtorch's stable ABI and no op: one binary serves every torch >= 2.10 and every Python. Schemas, shapes and
// CPU implementations are written in Python (torch_ops/). What an op takes and returns is read off its launcher's
// signature: tensors and scalars in the order of the signature, then one integer, the mask of the outputs that are
// wanted (bit i is output i). An output that is not wanted comes back undefined, which Python sees as None.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <deque>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "fuselm.h"

namespace {

using fuselm::DType;
using fuselm::Status;
using fuselm::TensorView;
using torch::headeronly::ScalarType;

constexpr int kMaxTensors = 12;

void check(AOTITorchError error) {
  STD_TORCH_CHECK(error == AOTI_TORCH_SUCCESS, "fuselm: a call into libtorch failed");
}

// Owns a tensor for the length of a call, or until it is given to the caller.
class Handle {
 public:
  Handle() = default;
  explicit Handle(AtenTensorHandle handle) : handle_(handle) {}
  Handle(Handle&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Handle& operator=(Handle&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~Handle() {
    if (handle_ != nullptr) aoti_torch_delete_tensor_object(handle_);
  }
  AtenTensorHandle get() const { return handle_; }
  AtenTensorHandle release() { return std::exchange(handle_, nullptr); }

 private:
  AtenTensorHandle handle_ = nullptr;
};

DType dtype_of(int32_t scalar_type) {
  switch (static_cast<ScalarType>(scalar_type)) {
    case ScalarType::Float:
      return DType::kFloat32;
    case ScalarType::Half:
      return DType::kFloat16;
    case ScalarType::BFloat16:
      return DType::kBFloat16;
    case ScalarType::Int:
      return DType::kInt32;
    case ScalarType::Long:
      return DType::kInt64;
    case ScalarType::Bool:
      return DType::kBool;
    default:
      return DType::kUnsupported;
  }
}

int32_t scalar_type_of(DType dtype) {
  if (dtype == DType::kFloat32) return static_cast<int32_t>(ScalarType::Float);
  return static_cast<int32_t>(dtype == DType::kFloat16 ? ScalarType::Half : ScalarType::BFloat16);
}

// One call: takes its arguments off the stack in order and makes the outputs as the signature asks for them.
class Call {
 public:
  Call(StableIValue* stack, uint64_t count, int64_t (*workspace_bytes)(const TensorView&, fuselm::Stream))
      : stack_(stack), workspace_bytes_(workspace_bytes) {
    wanted_ = torch::stable::detail::to<int64_t>(stack[count - 1]);
  }

  template <typename Parameter>
  Parameter make() {
    if constexpr (std::is_same_v<Parameter, fuselm::Input> || std::is_same_v<Parameter, fuselm::InOut>) {
      return input<Parameter>(Handle(torch::stable::detail::to<AtenTensorHandle>(stack_[next_++])));
    } else if constexpr (std::is_same_v<Parameter, fuselm::OptionalInput>) {
      return optional_input();
    } else if constexpr (std::is_base_of_v<fuselm::TensorList, Parameter>) {
      return list<Parameter>();
    } else if constexpr (std::is_same_v<Parameter, fuselm::Numbers>) {
      numbers_ = torch::stable::detail::to<std::vector<double>>(stack_[next_++]);
      return {numbers_.data(), static_cast<int64_t>(numbers_.size())};
    } else if constexpr (std::is_same_v<Parameter, fuselm::Indices>) {
      indices_ = torch::stable::detail::to<std::vector<int64_t>>(stack_[next_++]);
      return {indices_.data(), static_cast<int64_t>(indices_.size())};
    } else if constexpr (std::is_same_v<Parameter, fuselm::Stream>) {
      return stream();
    } else if constexpr (std::is_same_v<Parameter, fuselm::Workspace>) {
      return workspace();
    } else if constexpr (std::is_same_v<Parameter, fuselm::Wanted>) {
      wanted_dtype_ = static_cast<DType>(torch::stable::detail::to<int64_t>(stack_[next_++]));
      return {wanted_dtype_};
    } else if constexpr (std::is_arithmetic_v<Parameter>) {
      return torch::stable::detail::to<Parameter>(stack_[next_++]);
    } else {
      return output(Parameter{});
    }
  }

  bool one_device() const { return one_device_; }

  void give_outputs() {
    for (int i = 0; i < num_outputs_; ++i) {
      AtenTensorHandle handle = outputs_[i].release();
      if (handle == nullptr) check(aoti_torch_new_uninitialized_tensor(&handle));
      stack_[i] = torch::stable::detail::from(handle);
    }
  }

 private:
  template <typename Parameter>
  Parameter input(Handle handle) {
    const Parameter view = look_at<Parameter>(handle.get());
    inputs_[num_inputs_] = std::move(handle);
    views_[num_inputs_++] = view;
    return view;
  }

  template <typename Parameter>
  Parameter look_at(AtenTensorHandle tensor) {
    Parameter view;
    int64_t rank = 0;
    int32_t scalar_type = 0, device_type = 0, device = 0;
    int64_t *sizes = nullptr, *strides = nullptr;
    check(aoti_torch_get_dim(tensor, &rank));
    check(aoti_torch_get_dtype(tensor, &scalar_type));
    check(aoti_torch_get_device_type(tensor, &device_type));
    check(aoti_torch_get_device_index(tensor, &device));
    check(aoti_torch_get_sizes(tensor, &sizes));
    check(aoti_torch_get_strides(tensor, &strides));
    check(aoti_torch_get_data_ptr(tensor, &view.data));
    view.dtype = dtype_of(scalar_type);
    view.rank = static_cast<int32_t>(rank);
    for (int d = 0; d < rank && d < fuselm::kMaxRank; ++d) view.sizes[d] = sizes[d], view.strides[d] = strides[d];
    if (!std::exchange(has_device_, true)) device_ = device, device_type_ = device_type;
    one_device_ &= device == device_ && device_type == device_type_;
    return view;
  }

  // Tensors of a list are not among the inputs that an output may be like.
  template <typename List>
  List list() {
    auto tensors = torch::stable::detail::to<std::vector<AtenTensorHandle>>(stack_[next_++]);
    std::vector<TensorView>& views = lists_.emplace_back();
    views.reserve(tensors.size());
    for (AtenTensorHandle tensor : tensors) list_handles_.emplace_back(tensor);  // owned before anything can throw
    for (AtenTensorHandle tensor : tensors) views.push_back(look_at<TensorView>(tensor));
    return {{views.data(), static_cast<int64_t>(views.size())}};
  }

  fuselm::OptionalInput optional_input() {
    auto tensor = torch::stable::detail::to<std::optional<AtenTensorHandle>>(stack_[next_++]);
    if (tensor.has_value()) return input<fuselm::OptionalInput>(Handle(*tensor));
    views_[num_inputs_++] = TensorView{};
    return {};
  }

  template <int kInput>
  fuselm::Like<kInput> output(fuselm::Like<kInput> view) {
    const TensorView& like = views_[kInput];
    return allocate(view, like.present(), like.rank, like.sizes, like.dtype);
  }

  template <int kInput>
  fuselm::RowStat<kInput> output(fuselm::RowStat<kInput> view) {
    const TensorView& like = views_[kInput];
    return allocate(view, like.present(), like.rank > 0 ? like.rank - 1 : 0, like.sizes, DType::kFloat32);
  }

  template <int kInput>
  fuselm::Halved<kInput> output(fuselm::Halved<kInput> view) {
    TensorView like = views_[kInput];
    const bool whole = like.rank > 0 && like.rank <= fuselm::kMaxRank && like.sizes[like.rank - 1] % 2 == 0;
    if (whole) like.sizes[like.rank - 1] /= 2;
    return allocate(view, like.present() && whole, like.rank, like.sizes, like.dtype);
  }

  template <int kFirst, int kSecond>
  fuselm::Broadcast<kFirst, kSecond> output(fuselm::Broadcast<kFirst, kSecond> view) {
    const TensorView &a = views_[kFirst], &b = views_[kSecond];
    const int rank = a.rank > b.rank ? a.rank : b.rank;
    int64_t sizes[fuselm::kMaxRank];
    bool fit = rank <= fuselm::kMaxRank;
    for (int d = 0; fit && d < rank; ++d) {  // counted from the last
      const int64_t one = d < a.rank ? a.sizes[a.rank - 1 - d] : 1, other = d < b.rank ? b.sizes[b.rank - 1 - d] : 1;
      fit = one == other || one == 1 || other == 1;
      sizes[rank - 1 - d] = one == 1 ? other : one;
    }
    const DType dtype = a.dtype == b.dtype ? a.dtype : DType::kFloat32;
    return allocate(view, fit, rank, sizes, dtype);
  }

  template <int kIndices, int kTable>
  fuselm::Gathered<kIndices, kTable> output(fuselm::Gathered<kIndices, kTable> view) {
    const TensorView &indices = views_[kIndices], &table = views_[kTable];
    const bool fit = indices.rank < fuselm::kMaxRank && table.rank > 0 && table.rank <= fuselm::kMaxRank;
    int64_t sizes[fuselm::kMaxRank];
    for (int d = 0; fit && d < indices.rank; ++d) sizes[d] = indices.sizes[d];
    if (fit) sizes[indices.rank] = table.sizes[table.rank - 1];
    const DType dtype = wanted_dtype_ == DType::kAbsent ? table.dtype : wanted_dtype_;
    return allocate(view, fit, indices.rank + 1, sizes, dtype);
  }

  template <int kFirst, int kSecond, int kThird>
  fuselm::Joined<kFirst, kSecond, kThird> output(fuselm::Joined<kFirst, kSecond, kThird> view) {
    TensorView joined = views_[kFirst];
    bool fit = joined.rank > 1 && joined.rank <= fuselm::kMaxRank;
    for (int i : {kSecond, kThird}) {
      fit = fit && views_[i].rank == joined.rank;
      if (fit) joined.sizes[joined.rank - 2] += views_[i].sizes[joined.rank - 2];
    }
    return allocate(view, joined.present() && fit, joined.rank, joined.sizes, joined.dtype);
  }

  fuselm::Scalar output(fuselm::Scalar view) { return allocate(view, true, 0, nullptr, DType::kFloat32); }

  template <typename Parameter>
  Parameter allocate(Parameter view, bool present, int rank, const int64_t* sizes, DType dtype) {
    const int index = num_outputs_++;
    // What the launcher will refuse anyway is not worth memory, and may not have a shape that can be had.
    const bool is_float = dtype == DType::kFloat32 || dtype == DType::kFloat16 || dtype == DType::kBFloat16;
    if (!present || !(wanted_ >> index & 1) || rank > fuselm::kMaxRank || !is_float) return view;
    view.dtype = dtype;
    view.rank = rank;
    int64_t stride = 1;
    for (int d = rank - 1; d >= 0; --d) {
      view.sizes[d] = sizes[d];
      view.strides[d] = stride;
      stride *= sizes[d] > 0 ? sizes[d] : 1;
    }
    outputs_[index] = empty(rank, view.sizes, view.strides, scalar_type_of(dtype));
    check(aoti_torch_get_data_ptr(outputs_[index].get(), &view.data));
    return view;
  }

  Handle empty(int64_t rank, const int64_t* sizes, const int64_t* strides, int32_t scalar_type) const {
    AtenTensorHandle handle = nullptr;
    check(aoti_torch_empty_strided(rank, sizes, strides, scalar_type, device_type_, device_, &handle));
    return Handle(handle);
  }

  // Given back to torch's allocator when the call returns: whatever takes it next runs later on the same stream.
  fuselm::Workspace workspace() {
    const int64_t bytes = workspace_bytes_(views_[0], stream()), stride = 1;
    fuselm::Workspace space{nullptr, bytes};
    if (bytes == 0) return space;
    workspace_ = empty(1, &bytes, &stride, static_cast<int32_t>(ScalarType::Byte));
    check(aoti_torch_get_data_ptr(workspace_.get(), &space.data));
    return space;
  }

  fuselm::Stream stream() {
    if (!stream_.has_value()) {
      stream_.emplace();
      stream_->device = device_;
      check(aoti_torch_get_current_cuda_stream(device_, &stream_->handle));
    }
    return *stream_;
  }

  StableIValue* stack_;
  int64_t (*workspace_bytes_)(const TensorView&, fuselm::Stream);
  int64_t wanted_ = 0;
  DType wanted_dtype_ = DType::kAbsent;
  int next_ = 0, num_inputs_ = 0, num_outputs_ = 0;
  int32_t device_ = -1, device_type_ = 0;
  bool one_device_ = true, has_device_ = false;
  std::optional<fuselm::Stream> stream_;  // asked for once
  Handle inputs_[kMaxTensors], outputs_[kMaxTensors], workspace_;
  std::vector<Handle> list_handles_;
  std::deque<std::vector<TensorView>> lists_;  // which stay where they are when another comes
  std::vector<double> numbers_;
  std::vector<int64_t> indices_;
  TensorView views_[kMaxTensors];
};

template <typename... Parameters>
Status run(Call& call, Status (*launcher)(Parameters...)) {
  // Braces fix the order: the arguments are taken from the stack from left to right.
  std::tuple<std::decay_t<Parameters>...> arguments{call.make<std::decay_t<Parameters>>()...};
  if (!call.one_device()) return Status::kBadDevice;
  return std::apply(launcher, arguments);
}

template <auto launcher, int64_t (*workspace_bytes)(const TensorView&, fuselm::Stream)>
void boxed(StableIValue* stack, uint64_t num_arguments, uint64_t) {
  Call call(stack, num_arguments, workspace_bytes);
  const Status status = run(call, launcher);
  // Python's check() finds the words for a refusal; this one is read only when it finds nothing wrong.
  STD_TORCH_CHECK(status == Status::kOk, "fuselm: a kernel was refused, status ", static_cast<int>(status));
  call.give_outputs();
}

#define FUSELM_OP(name, workspace) m.impl(#name, boxed<&fuselm::name, workspace>)

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fuselm, CUDA, m) {
  FUSELM_OP(rms_norm_forward, nullptr);
  FUSELM_OP(rms_norm_backward, fuselm::rms_norm_backward_workspace);
  FUSELM_OP(layer_norm_forward, fuselm::layer_norm_forward_workspace);
  FUSELM_OP(layer_norm_backward, fuselm::layer_norm_backward_workspace);
  FUSELM_OP(softmax_forward, nullptr);
  FUSELM_OP(softmax_backward, nullptr);
  FUSELM_OP(cross_entropy_forward, nullptr);
  FUSELM_OP(cross_entropy_inplace, nullptr);
  FUSELM_OP(cross_entropy_pieces, nullptr);
  FUSELM_OP(cross_entropy_backward, nullptr);
  FUSELM_OP(cross_entropy_correct, nullptr);
  FUSELM_OP(linear_cross_entropy_scale, nullptr);
  FUSELM_OP(linear_cross_entropy_dweight, nullptr);
  FUSELM_OP(gelu_forward, nullptr);
  FUSELM_OP(gelu_backward, nullptr);
  FUSELM_OP(silu_forward, nullptr);
  FUSELM_OP(silu_backward, nullptr);
  FUSELM_OP(relu2_forward, nullptr);
  FUSELM_OP(relu2_backward, nullptr);
  FUSELM_OP(swiglu_forward, nullptr);
  FUSELM_OP(swiglu_backward, nullptr);
  FUSELM_OP(swiglu_packed_forward, nullptr);
  FUSELM_OP(swiglu_packed_backward, nullptr);
  FUSELM_OP(geglu_forward, nullptr);
  FUSELM_OP(geglu_backward, nullptr);
  FUSELM_OP(geglu_packed_forward, nullptr);
  FUSELM_OP(geglu_packed_backward, nullptr);
  FUSELM_OP(add_forward, nullptr);
  FUSELM_OP(add_backward, nullptr);
  FUSELM_OP(add_backward_row, fuselm::add_backward_row_workspace);
  FUSELM_OP(mul_forward, nullptr);
  FUSELM_OP(mul_backward, nullptr);
  FUSELM_OP(mul_backward_row, fuselm::mul_backward_row_workspace);
  FUSELM_OP(rope_forward, nullptr);
  FUSELM_OP(rope_inplace, nullptr);
  FUSELM_OP(rope_backward, fuselm::rope_backward_workspace);
  FUSELM_OP(rope_qkv_backward, nullptr);
  FUSELM_OP(embedding_forward, nullptr);
  FUSELM_OP(embedding_backward, fuselm::embedding_backward_workspace);
  FUSELM_OP(adamw_step, nullptr);
  FUSELM_OP(global_norm, nullptr);
  FUSELM_OP(overwrite_l2, nullptr);
}
