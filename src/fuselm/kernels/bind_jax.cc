// The JAX binding: an XLA FFI handler, symbol fuselm_<launcher>, for every launcher of fuselm.h that is part of an op.
//
// Knows XLA's FFI headers and no op. What a handler takes is read off its launcher's signature: buffers for the inputs
// and outputs in order, and one attribute, `scalars`, an array of doubles with the scalars in order; a list, of tensors
// or of numbers, has its length there, before the numbers. An absent tensor
// is a buffer of shape [0]: no tensor that is there can look like that and have work to do. Scratch memory is one more
// result, of as many bytes as fuselm_<launcher>_workspace says. (XLA's own scratch allocator refused to serve.) What a
// launcher writes over is an argument and, before its outputs, a result that XLA has been told to keep in the same
// place.
#include <array>
#include <deque>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "fuselm.h"
#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = xla::ffi;
using fuselm::DType;
using fuselm::Status;
using fuselm::TensorView;

DType dtype_of(ffi::DataType type) {
  switch (type) {
    case ffi::DataType::F32:
      return DType::kFloat32;
    case ffi::DataType::F16:
      return DType::kFloat16;
    case ffi::DataType::BF16:
      return DType::kBFloat16;
    case ffi::DataType::S32:
      return DType::kInt32;
    case ffi::DataType::S64:
      return DType::kInt64;
    case ffi::DataType::PRED:
      return DType::kBool;
    default:
      return DType::kUnsupported;
  }
}

template <typename Parameter>
Parameter view_of(ffi::AnyBuffer buffer) {
  Parameter view;
  const auto sizes = buffer.dimensions();
  if (sizes.size() == 1 && sizes[0] == 0) return view;
  view.data = buffer.untyped_data();
  view.dtype = dtype_of(buffer.element_type());
  view.rank = static_cast<int32_t>(sizes.size());
  int64_t stride = 1;
  for (int d = view.rank - 1; d >= 0; --d) {
    if (d >= fuselm::kMaxRank) continue;
    view.sizes[d] = sizes[d];
    view.strides[d] = stride;
    stride *= sizes[d] > 0 ? sizes[d] : 1;
  }
  return view;
}

// One call: hands out buffers and scalars in the order of the launcher's parameters.
struct Call {
  void* stream_handle;
  ffi::RemainingArgs& arguments;
  ffi::RemainingRets& results;
  ffi::Span<const double> scalars;
  size_t next_input = 0, next_output = 0, next_scalar = 0;
  bool complete = true;
  std::deque<std::vector<TensorView>> lists = {};  // which stay where they are when another comes
  std::vector<double> numbers = {};
  std::vector<int64_t> indices = {};

  template <typename Parameter>
  Parameter make() {
    if constexpr (std::is_same_v<Parameter, fuselm::Input> || std::is_same_v<Parameter, fuselm::OptionalInput>) {
      auto buffer = arguments.get<ffi::AnyBuffer>(next_input++);
      complete &= buffer.has_value();
      return buffer.has_value() ? view_of<Parameter>(*buffer) : Parameter{};
    } else if constexpr (std::is_same_v<Parameter, fuselm::InOut>) {
      auto buffer = arguments.get<ffi::AnyBuffer>(next_input++);
      auto same = results.get<ffi::AnyBuffer>(next_output++);
      complete &= buffer.has_value() && same.has_value();
      return complete ? written_over(*buffer, **same) : Parameter{};
    } else if constexpr (std::is_same_v<Parameter, fuselm::InputList>) {
      return {list<fuselm::Input>()};
    } else if constexpr (std::is_same_v<Parameter, fuselm::InOutList>) {
      return {list<fuselm::InOut>()};
    } else if constexpr (std::is_same_v<Parameter, fuselm::Numbers>) {
      const auto count = make<int64_t>();
      for (int64_t i = 0; complete && i < count; ++i) numbers.push_back(make<double>());
      return {numbers.data(), static_cast<int64_t>(numbers.size())};
    } else if constexpr (std::is_same_v<Parameter, fuselm::Indices>) {
      const auto count = make<int64_t>();
      for (int64_t i = 0; complete && i < count; ++i) indices.push_back(make<int64_t>());
      return {indices.data(), static_cast<int64_t>(indices.size())};
    } else if constexpr (std::is_same_v<Parameter, fuselm::Stream>) {
      return {stream_handle, -1};
    } else if constexpr (std::is_same_v<Parameter, fuselm::Workspace>) {
      return workspace();
    } else if constexpr (std::is_same_v<Parameter, fuselm::Wanted>) {
      return {static_cast<DType>(make<int64_t>())};  // the result that XLA brings has it already
    } else if constexpr (std::is_arithmetic_v<Parameter>) {
      complete &= next_scalar < scalars.size();
      return complete ? static_cast<Parameter>(scalars[next_scalar++]) : Parameter{};
    } else {
      auto buffer = results.get<ffi::AnyBuffer>(next_output++);
      complete &= buffer.has_value();
      return buffer.has_value() ? view_of<Parameter>(**buffer) : Parameter{};
    }
  }

  template <typename Tensor>
  fuselm::TensorList list() {
    const auto count = make<int64_t>();
    std::vector<TensorView>& views = lists.emplace_back();
    for (int64_t i = 0; complete && i < count; ++i) views.push_back(make<Tensor>());
    return {views.data(), static_cast<int64_t>(views.size())};
  }

  // XLA keeps the two in one place where it can; inside a loop it may not.
  fuselm::InOut written_over(ffi::AnyBuffer from, ffi::AnyBuffer to) {
    if (from.untyped_data() != to.untyped_data()) {
      const auto bytes = static_cast<int64_t>(from.size_bytes());
      const Status copied = fuselm::copy_bytes(to.untyped_data(), from.untyped_data(), bytes, {stream_handle, -1});
      complete &= to.size_bytes() == from.size_bytes() && copied == Status::kOk;
    }
    return view_of<fuselm::InOut>(to);
  }

  fuselm::Workspace workspace() {
    auto buffer = results.get<ffi::AnyBuffer>(next_output++);
    if (!buffer.has_value()) return {};  // none was wanted
    return {(**buffer).untyped_data(), static_cast<int64_t>((**buffer).size_bytes())};
  }
};

template <typename... Parameters>
Status run(Call& call, Status (*launcher)(Parameters...)) {
  // Braces fix the order: arguments are handed out from left to right.
  std::tuple<std::decay_t<Parameters>...> made{call.make<std::decay_t<Parameters>>()...};
  return call.complete ? std::apply(launcher, made) : Status::kBadWorkspace;
}

template <auto launcher>
ffi::Error handle(void* stream, ffi::RemainingArgs arguments, ffi::RemainingRets results,
                  ffi::Span<const double> scalars) {
  Call call{stream, arguments, results, scalars};
  const Status status = run(call, launcher);
  if (status == Status::kOk) return ffi::Error::Success();
  return ffi::Error::Internal("fuselm: a kernel was refused, status " + std::to_string(static_cast<int>(status)));
}

// Bytes of scratch for a first input of these sizes, on the current device.
int64_t workspace_of(int64_t (*bytes)(const TensorView&, fuselm::Stream), int32_t rank, const int64_t* sizes) {
  TensorView first;
  first.rank = rank;
  for (int d = 0; d < rank && d < fuselm::kMaxRank; ++d) first.sizes[d] = sizes[d];
  return bytes == nullptr ? 0 : bytes(first, {});
}

}  // namespace

#define FUSELM_OP(name, workspace)                                                                 \
  extern "C" FUSELM_EXPORT XLA_FFI_Error* fuselm_##name(XLA_FFI_CallFrame* frame) {                \
    static auto* handler = ffi::Ffi::Bind()                                                        \
                               .Ctx<ffi::PlatformStream<void*>>()                                  \
                               .RemainingArgs()                                                    \
                               .RemainingRets()                                                    \
                               .Attr<ffi::Span<const double>>("scalars")                           \
                               .To(handle<&fuselm::name>)                                          \
                               .release();                                                         \
    return handler->Call(frame);                                                                   \
  }                                                                                                \
  extern "C" FUSELM_EXPORT int64_t fuselm_##name##_workspace(int32_t rank, const int64_t* sizes) { \
    return workspace_of(workspace, rank, sizes);                                                   \
  }

FUSELM_OP(rms_norm_forward, nullptr)
FUSELM_OP(rms_norm_backward, fuselm::rms_norm_backward_workspace)
FUSELM_OP(layer_norm_forward, fuselm::layer_norm_forward_workspace)
FUSELM_OP(layer_norm_backward, fuselm::layer_norm_backward_workspace)
FUSELM_OP(softmax_forward, nullptr)
FUSELM_OP(softmax_backward, nullptr)
FUSELM_OP(cross_entropy_forward, nullptr)
FUSELM_OP(cross_entropy_inplace, nullptr)
FUSELM_OP(cross_entropy_backward, nullptr)
FUSELM_OP(cross_entropy_correct, nullptr)
FUSELM_OP(linear_cross_entropy_scale, nullptr)
FUSELM_OP(linear_cross_entropy_dweight, nullptr)
FUSELM_OP(gelu_forward, nullptr)
FUSELM_OP(gelu_backward, nullptr)
FUSELM_OP(silu_forward, nullptr)
FUSELM_OP(silu_backward, nullptr)
FUSELM_OP(relu2_forward, nullptr)
FUSELM_OP(relu2_backward, nullptr)
FUSELM_OP(swiglu_forward, nullptr)
FUSELM_OP(swiglu_backward, nullptr)
FUSELM_OP(swiglu_packed_forward, nullptr)
FUSELM_OP(swiglu_packed_backward, nullptr)
FUSELM_OP(geglu_forward, nullptr)
FUSELM_OP(geglu_backward, nullptr)
FUSELM_OP(geglu_packed_forward, nullptr)
FUSELM_OP(geglu_packed_backward, nullptr)
FUSELM_OP(add_forward, nullptr)
FUSELM_OP(add_backward, nullptr)
FUSELM_OP(add_backward_row, fuselm::add_backward_row_workspace)
FUSELM_OP(mul_forward, nullptr)
FUSELM_OP(mul_backward, nullptr)
FUSELM_OP(mul_backward_row, fuselm::mul_backward_row_workspace)
FUSELM_OP(rope_forward, nullptr)
FUSELM_OP(rope_inplace, nullptr)
FUSELM_OP(rope_backward, fuselm::rope_backward_workspace)
FUSELM_OP(rope_qkv_backward, nullptr)
FUSELM_OP(embedding_forward, nullptr)
FUSELM_OP(embedding_backward, fuselm::embedding_backward_workspace)
FUSELM_OP(adamw_step, nullptr)
FUSELM_OP(global_norm, nullptr)
