"""What the torch ops share: registering a raw op, and loading the CUDA library behind it.

Knows torch and build.py, no op and never JAX. A raw op has a schema, a plain implementation (torch ops only, right on
any device) and a fake one (shapes), all registered here from Python; its CUDA implementation is C++ (bind_torch.cpp),
loaded or built the first time a CUDA tensor arrives. Where it cannot be built the plain one takes its place, with a
warning that says why.

    register("rms_norm_forward(Tensor x, ...) -> Tensor", plain=..., fake=...)
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.autograd import forward_ad

from fuselm.kernels import build
from fuselm.kernels.spec import RefusedInput, TensorInfo, refuse
from fuselm.kernels.torch_ops.distributed import is_distributed

_LIBRARY = torch.library.Library("fuselm", "FRAGMENT")
_PLAIN: dict[str, Callable[..., Any]] = {}
_LOAD_LOCK = threading.Lock()
# Whether inductor writes out all that an op it has not met is computed from, for a log that nobody reads. Each layer of
# a model has the one before it in there twice: for a loss above twelve layers that takes hours.
_WORDY_INDUCTOR = torch.__version__ < "2.13"
# "" until a CUDA tensor has been seen; then "fused" or "plain".
_cuda_state = ""
_transforms_active = torch._C._are_functorch_transforms_active  # asked in every call: looked up once


def register(schema: str, plain: Callable[..., Any], fake: Callable[..., Any], *, made_of_ops: bool = False) -> Any:
    """Define torch op fuselm::<name of the schema> and return the callable that dispatches it.

    One that is `made_of_ops` has no kernel of its own: its plain implementation, which calls other ops, is CUDA's too.
    """
    name = schema.split("(")[0]
    _LIBRARY.define(schema)
    for key in ("CPU", "MPS", "XPU", "CUDA") if made_of_ops else ("CPU", "MPS", "XPU"):
        _LIBRARY.impl(name, plain, key)
    # Raw ops are not differentiated (autograd.Function does that above them): passing this key by saves its fallback.
    _LIBRARY.impl(name, torch.library.fallthrough_kernel, "Autograd")

    def fake_after_loading(*args: Any) -> Any:
        # A compiled graph calls the raw op straight, so tracing is the last chance to load what it will need.
        first = args[0][0] if isinstance(args[0], list | tuple) else args[0]
        if first.device.type == "cuda":
            load_cuda()
        if _WORDY_INDUCTOR:
            _introduce_to_inductor(getattr(torch.ops.fuselm, name).default)
        return fake(*args)

    torch.library.register_fake(f"fuselm::{name}", fake_after_loading, lib=_LIBRARY)
    if not made_of_ops:
        _PLAIN[name] = plain
        if _cuda_state == "plain":  # an op that is imported after the others fell back
            _LIBRARY.impl(name, plain, "CUDA")
    return getattr(torch.ops.fuselm, name).default


def _introduce_to_inductor(op: Any) -> None:
    """Do what inductor would when it meets the op, if it is inductor that traces; it is loaded by then."""
    lowering = sys.modules.get("torch._inductor.lowering")
    if lowering is None or op in lowering.lowerings:
        return
    layout = lowering.tag_to_layout_constraint(lowering.get_layout_constraint_tag(op, with_default=True))
    lowering.make_fallback(op, layout_constraint=layout, warn=False)


def load_cuda() -> bool:
    """Make CUDA tensors work, fused or plain; False if that was done before, so whatever failed will fail again."""
    global _cuda_state
    with _LOAD_LOCK:
        if _cuda_state:
            return False
        _cuda_state = _load_or_fall_back()
    return True


def cuda_state() -> str:
    """How CUDA tensors are served: "fused", "plain", or "" while none has been seen."""
    return _cuda_state


def _load_or_fall_back() -> str:
    try:
        torch.ops.load_library(str(build.library("torch")))
        return "fused"
    except (build.BuildError, OSError) as error:
        if torch.cuda.is_available():
            warnings.warn(f"fuselm: CUDA tensors take the plain torch path: {error}", RuntimeWarning, stacklevel=4)
    for name, plain in _PLAIN.items():
        _LIBRARY.impl(name, plain, "CUDA")
    return "plain"


def direct_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`function.apply` without what Function.apply does first in Python, for calls that nothing traces or transforms.

    That part serves torch.func and takes 5 us of the 9 us an empty function costs.
    """
    apply: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return apply


def is_transformed() -> bool:
    """Whether a torch.func transform or forward-mode differentiation is under way: kernels have no rules for those."""
    return _transforms_active() or forward_ad._current_level >= 0


def see_now(*numbers: float) -> None:
    """Have torch.compile see numbers before it traces a Function that takes them.

    With dynamic shapes a module's or a default number becomes an input of the graph where it is first looked at. Inside
    of one Function that is an input which the next one cannot have: of two norms the compiler ended in an assertion.
    """
    for number in numbers:
        isinstance(number, bool)


def check_are_tensors(op: str, needed: Mapping[str, Any], optional: Mapping[str, Any]) -> None:
    """Refuse the first argument that is no tensor, or none of numbers at regular steps in memory."""
    for name, given in {**needed, **optional}.items():
        if isinstance(given, torch.Tensor):
            if given.layout is not torch.strided or given.is_nested:
                raise _other_layout(op, name, given)
            if is_distributed(given):
                remedy = f"Pass {name}.to_local() or {name}.full_tensor(), or use torch's own op."
                raise refuse(f"{op}: {name} must be a tensor that lies here whole", "a DTensor", remedy)
            continue
        if given is None and name in optional:
            continue
        remedy = f"Pass torch.as_tensor({name})."
        if isinstance(given, torch.nn.Module):
            remedy = f"Pass its parameter, {name}.weight."
        elif op.endswith("_norm") and name == "weight" and isinstance(given, int | list | tuple):
            remedy = "Rows are x's last dimension: leave normalized_shape out."  # whose place this is in torch
        raise refuse(f"{op}: {name} must be a torch.Tensor", f"a {type(given).__name__}", remedy)


def _other_layout(op: str, name: str, tensor: torch.Tensor) -> RefusedInput:
    """The words for a tensor whose numbers do not lie at regular steps: sparse, of oneDNN, or nested."""
    layout = str(tensor.layout).removeprefix("torch.").removeprefix("_")
    arrived, remedy = f"{name} of layout {layout}", f"Pass {name}.to_dense()."
    if tensor.is_nested:  # which has a to_dense() that leaves it nested
        arrived, remedy = f"a nested {arrived}", f"Pass {name}.to_padded_tensor(0.0)."
    return refuse(f"{op}: {name} must be a strided tensor, as torch.Tensors are by default", arrived, remedy)


def info(tensor: torch.Tensor | None) -> TensorInfo | None:
    """What an op's check() needs to know of a tensor."""
    if tensor is None:
        return None
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorInfo(tuple(tensor.shape), dtype, str(tensor.device))


def is_on_gpu(tensor: Any) -> bool:
    """Whether an op over a list, which no dispatcher looks at, takes its kernel. (Tests have one for a CPU as well.)"""
    return bool(getattr(tensor, "is_cuda", False))


def fills_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor has neither gaps nor overlaps, in whatever order of its dimensions."""
    if not tensor.numel():
        return True
    expected = 1
    for stride, size in sorted((t, s) for s, t in zip(tensor.shape, tensor.stride(), strict=True) if s != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def refuse_second_gradient(op: str, gradients: list[Any], sources: list[Any]) -> list[Any]:
    """Pass gradients on, tied to what they were made from: whoever differentiates them again gets a clear sentence."""
    there = [g for g in gradients if g is not None]
    tied = iter(_NoSecondGradient.apply(op, len(there), *there, *(s for s in sources if s is not None)))
    return [None if g is None else next(tied) for g in gradients]


class _NoSecondGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, op: str, count: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.op = op
        return tuple(t.view_as(t) for t in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise RuntimeError(
            f"fuselm.ops.{ctx.op} has no second derivative, its backward being a kernel; got a double backward. "
            f"Use the plain formula, fuselm.kernels.torch_ops.{ctx.op}.{ctx.op}_reference, where you need one."
        )
