"""DTensors, as FSDP2 makes of parameters: what of them lies here, for ops over lists, which take elements one by one.

Knows DTensors once torch has loaded them, and neither op. Kernels know memory alone, and torch's foreach ops are partly
without rules for DTensors.

    if any_distributed(params):
        grad = part_here(grad, param)          # spread as its parameter is
    norm = norm_of_parts(local_norm, tensors)  # of all that there is of the tensors, on every rank
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_HOME = "torch.distributed.tensor"


def is_distributed(tensor: Any) -> bool:
    """Whether it is a DTensor: there is none before its module is loaded."""
    return _HOME in sys.modules and isinstance(tensor, sys.modules[_HOME].DTensor)


def any_distributed(tensors: Sequence[Any]) -> bool:
    """Whether any is a DTensor; of a list that has none asked in some nanoseconds each."""
    if _HOME not in sys.modules:
        return False
    return any(issubclass(kind, sys.modules[_HOME].DTensor) for kind in set(map(type, tensors)))


def is_spread_as(tensor: Any, like: Any) -> bool:
    """Whether the same elements of both lie here."""
    if not (is_distributed(tensor) and is_distributed(like)):
        return not (is_distributed(tensor) or is_distributed(like))
    same: bool = tensor.device_mesh == like.device_mesh and tensor.placements == like.placements
    return same


@torch.no_grad()
def part_here(tensor: Any, like: Any) -> Any:
    """The elements that lie here of what is to be read: those that lie here of `like`, wherever they were."""
    if not is_distributed(tensor):
        return tensor
    if not is_distributed(like):
        return tensor.full_tensor()
    if not is_spread_as(tensor, like):
        tensor = tensor.redistribute(like.device_mesh, like.placements)
    return tensor.to_local()


@torch.no_grad()
def norm_of_parts(norm: Callable[[list[Tensor]], Tensor], tensors: Sequence[Any]) -> Tensor:
    """The Euclidean norm of all elements of all tensors, by that of those that lie here; each rank must ask for it."""
    spread: dict[Any, list[Any]] = {}
    for tensor in tensors:
        if is_distributed(tensor):
            tensor = _without_partial_sums(tensor)
            spread.setdefault((tensor.device_mesh, tensor.placements), []).append(tensor.to_local())
        else:
            spread.setdefault(None, []).append(tensor)
    squares = [_square_everywhere(norm(parts), *(where or ())) for where, parts in spread.items()]
    return torch.stack([square.to(squares[0].device) for square in squares]).sum().sqrt().float()


def _without_partial_sums(tensor: Any) -> Any:
    """Summed, where each rank has a share of each element, as of a gradient that nobody has looked at."""
    if not any(place.is_partial() for place in tensor.placements):  # to redistribute it as it is takes host time, too
        return tensor
    whole = sys.modules[_HOME].Replicate()
    placements = [whole if place.is_partial() else place for place in tensor.placements]
    return tensor.redistribute(tensor.device_mesh, placements)


def _square_everywhere(norm: Tensor, mesh: Any = None, placements: Any = ()) -> Tensor:
    """A norm's square, in float64, of which 32 bits may have none, added up over the ranks that elements lie on."""
    square = norm.double().square()
    if mesh is None:
        return square
    home = sys.modules[_HOME]
    sums = [home.Replicate() if place.is_replicate() else home.Partial() for place in placements]
    everywhere: Tensor = home.DTensor.from_local(square, mesh, sums, run_check=False).full_tensor()
    return everywhere
