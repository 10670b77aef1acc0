"""The Euclidean norm of all elements of all tensors of a list, for PyTorch: what gradients are clipped by.

On CUDA two launches of global_norm.cu, however many tensors there are; elsewhere, inside torch.compile and for float64,
torch's foreach ops.

    norm = global_norm([p.grad for p in model.parameters() if p.grad is not None])
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from fuselm.kernels.adamw import NORM_CHUNK
from fuselm.kernels.spec import refuse
from fuselm.kernels.torch_ops import check_are_tensors, fills_memory, is_on_gpu, load_cuda, register
from fuselm.kernels.torch_ops.distributed import any_distributed, norm_of_parts

_FIRST = 1
_SUMMED = (torch.float32, torch.float16, torch.bfloat16)  # what the kernel takes
_DTYPES = (*_SUMMED, torch.float64)


def global_norm(tensors: Iterable[Tensor]) -> Tensor:
    """A 0-dim fp32 tensor on the first tensor's device; 0 of no tensors. One tensor by itself is a list of one.

    Sums are fp32, or float64 where a tensor is; the same bits every time for the same tensors in the same order. A NaN
    or an infinity anywhere makes the norm NaN or infinite. Of DTensors it is the norm of all there is of them on all
    ranks, each of which must ask for it, in a plain tensor.
    """
    return _with_words(_norm_of, tensors)


def global_norm_reference(tensors: Iterable[Tensor]) -> Tensor:
    """The same by torch's foreach ops."""
    return _with_words(_by_foreach, tensors)


# --- refusals ---------------------------------------------------------------------------------------------------------


def _with_words(norm: Callable[[list[Tensor]], Tensor], tensors: Any) -> Tensor:
    given = _listed(tensors)
    if is_compiling():
        return _by_foreach(given)
    try:
        return norm_of_parts(norm, given) if any_distributed(given) else norm(given)
    except RuntimeError:
        _check(given)  # only now: each question to each tensor would cost host time
        raise


def _listed(tensors: Any) -> list[Tensor]:
    if isinstance(tensors, Tensor):
        tensors = [tensors]
    elif not isinstance(tensors, Iterable):
        remedy = "Pass [p.grad for p in params if p.grad is not None]."
        raise refuse("global_norm: tensors must be a list of torch.Tensors", f"a {type(tensors).__name__}", remedy)
    given = list(tensors)
    for index, tensor in enumerate(given):
        if not isinstance(tensor, Tensor):
            remedy = "Leave out what has no gradient: [p.grad for p in params if p.grad is not None]."
            raise refuse(
                "global_norm: tensors must be torch.Tensors", f"number {index}, a {type(tensor).__name__}", remedy
            )
        given[index] = tensor.detach()
        if not tensor.is_floating_point():
            rule = "global_norm: tensors must be of a real floating-point dtype"
            raise refuse(rule, f"number {index} of {tensor.dtype}", "Leave it out, or take its torch.view_as_real.")
    return given


def _check(tensors: list[Tensor]) -> None:
    """The words for what only an error has shown."""
    for index, tensor in enumerate(tensors):
        check_are_tensors("global_norm", {f"tensors[{index}]": tensor}, {})
        if tensor.dtype not in _DTYPES:
            rule = "global_norm: tensors must be float64, float32, bfloat16 or float16"
            raise refuse(rule, f"number {index} of {tensor.dtype}", "Convert it.")
        if tensor.is_meta != tensors[0].is_meta:
            rule = "global_norm: all tensors must have memory, or none"
            arrived = f"number 0 on {tensors[0].device} and number {index} on {tensor.device}"
            raise refuse(rule, arrived, "Leave out what is on meta.")


# --- sums -------------------------------------------------------------------------------------------------------------


def _norm_of(given: list[Tensor]) -> Tensor:
    if not given or not is_on_gpu(given[0]) or not all(_fits(tensor, given[0]) for tensor in given):
        return _by_foreach(given)
    device, given = given[0].device, [tensor for tensor in given if tensor.numel()]
    if not given:
        return torch.zeros((), dtype=torch.float32, device=device)
    partial = torch.empty(sum(-(-t.numel() // NORM_CHUNK) for t in given), dtype=torch.float32, device=device)
    try:
        found: Tensor = _norm(given, partial, _FIRST)
        return found
    except NotImplementedError:
        if not load_cuda():  # these were not the first CUDA tensors
            raise
    found = _norm(given, partial, _FIRST)
    return found


def _by_foreach(tensors: list[Tensor]) -> Tensor:
    if tensors and tensors[0].is_meta:
        _check(tensors)  # to whom a tensor with memory could go, and its number would be lost
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(_without_gaps(tensor.detach()))
    norms: list[Tensor] = []
    for dtype, alike in by_dtype.items():
        norms += torch._foreach_norm(alike, 2, dtype=torch.promote_types(dtype, torch.float32))
    if not norms:
        return torch.zeros((), dtype=torch.float32)
    together = torch.stack([norm.to(norms[0].device) for norm in norms])  # [number of tensors]
    return torch.linalg.vector_norm(together).to(torch.float32)


def _without_gaps(tensor: Tensor) -> Tensor:
    """On a CPU torch adds up an fp32 tensor with gaps one by one: of ones, 2^24 at most, and no more."""
    if is_compiling() or tensor.device.type != "cpu" or tensor.is_contiguous() or fills_memory(tensor):
        return tensor
    return tensor.contiguous()


def _fits(tensor: Tensor, first: Tensor) -> bool:
    """Whether the kernel takes a tensor: on the first one's GPU, and without gaps."""
    if tensor.device != first.device or tensor.dtype not in _SUMMED or tensor.dim() > 8:
        return False
    return tensor.is_contiguous() or fills_memory(tensor)


def _plain_norm(tensors: list[Tensor], partial: Tensor, outputs: int) -> Tensor:
    return _by_foreach(tensors)


def _fake_norm(tensors: list[Tensor], partial: Tensor, outputs: int) -> Any:
    return partial.new_empty(())


_norm = register("global_norm(Tensor[] tensors, Tensor(a!) partial, int outputs) -> Tensor", _plain_norm, _fake_norm)
