// The JAX binding: an XLA FFI handler, symbol fuselm_<launcher>, for every launcher of fuselm.h that is part of an op.
//
// Knows XLA's FFI headers and no op. What a handler takes is read off its launcher's signature: buffers for the inputs
// and outputs in order, and one attribute, `scalars`, an array of doubles with the scalars in order. An absent tensor
// is a buffer of shape [0]: no tensor that is there can look like that and have work to do. Scratch memory is one more
// result, of as many bytes as fuselm_<launcher>_workspace says. (XLA's own scratch allocator refused to serve.) What a
// launcher writes over is an argument and, before its outputs, a result that XLA has been told to keep in the same
// place.
#include <array>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

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
    } else if constexpr (std::is_same_v<Parameter, fuselm::Stream>) {
      return {stream_handle, -1};
    } else if constexpr (std::is_same_v<Parameter, fuselm::Workspace>) {
      return workspace();
    } else if constexpr (std::is_arithmetic_v<Parameter>) {
      complete &= next_scalar < scalars.size();
      return complete ? static_cast<Parameter>(scalars[next_scalar++]) : Parameter{};
    } else {
      auto buffer = results.get<ffi::AnyBuffer>(next_output++);
      complete &= buffer.has_value();
      return buffer.has_value() ? view_of<Parameter>(**buffer) : Parameter{};
    }
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
