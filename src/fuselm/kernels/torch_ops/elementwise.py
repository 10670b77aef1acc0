"""What add and mul share for PyTorch: two tensors that broadcast, the dtype they make, and sums of their gradients.

Knows torch and the words of kernels/elementwise.py, and neither op.

    out = x.new_empty(torch.broadcast_shapes(x.shape, y.shape), dtype=shared_dtype(x, y))
    dy = summed_to(dout, y.shape).to(y.dtype)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fuselm.kernels import elementwise as contract
from fuselm.kernels.spec import TensorInfo
from fuselm.kernels.torch_ops import check_are_tensors, info


def infos(op: str, sign: str, x: Any, y: Any) -> tuple[TensorInfo, TensorInfo]:
    """What check() needs to know of x and y; what is no tensor is refused."""
    contract.refuse_numbers(op, sign, {"x": x, "y": y})
    check_are_tensors(op, {"x": x, "y": y}, {})
    x_info, y_info = info(x), info(y)
    assert x_info is not None
    assert y_info is not None
    return x_info, y_info


def shared_dtype(x: Tensor, y: Tensor) -> torch.dtype:
    """The dtype of the result."""
    return x.dtype if x.dtype == y.dtype else torch.float32


def promoted(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """x and y so that torch makes a result of that dtype: it gives way to no tensor without dimensions."""
    if x.dtype == y.dtype or (x.dim() > 0) == (y.dim() > 0) or torch.float64 in (x.dtype, y.dtype):
        return x, y
    return x.float(), y.float()


def empty_result(x: Tensor, y: Tensor) -> Tensor:
    """Room for the result."""
    return x.new_empty(torch.broadcast_shapes(x.shape, y.shape), dtype=shared_dtype(x, y))


def summed_to(gradient: Tensor, shape: torch.Size) -> Tensor:
    """The sum, in fp32, over the dimensions along which a tensor of that shape was repeated."""
    spread = contract.repeated(shape, gradient.shape)
    if not spread:
        return gradient.float().view(shape)
    return gradient.sum(spread, keepdim=True, dtype=torch.float32).view(shape)


def columns(tensor: Tensor) -> Tensor:
    """All rows of a tensor in fp32, as [rows, width]."""
    return tensor.float().reshape(tensor.shape[:-1].numel(), tensor.shape[-1])
