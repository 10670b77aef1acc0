"""SiLU for PyTorch: the function people call, and what it is measured against.

The contract is kernels/silu.py. On CUDA the raw ops run silu.cu; elsewhere the plain formulas of activations.py, which
also has the autograd of the family.

    y = silu(x)
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling

from fuselm.kernels import silu as contract
from fuselm.kernels.torch_ops import activations, check_are_tensors, info, is_transformed, load_cuda


def silu(x: Tensor) -> Tensor:
    """x times its logistic function, in fp32, rounded once to x's dtype.

    Inside torch.func transforms and forward-mode differentiation torch's own runs, with every derivative torch has.
    """
    compiling = is_compiling()
    if compiling:  # a graph calls the launcher straight, and that takes rows
        if isinstance(x, Tensor) and not x.dim():
            return activations.of_one_number(silu, x)
    elif is_transformed():
        _check(x)
        return silu_reference(x)
    # The fast path asks nothing it need not: the launcher refuses bad input, and only then check() looks for the words.
    try:
        if x.requires_grad and torch.is_grad_enabled():
            y: Tensor = (_function.apply if compiling else _apply)(x)
        else:
            y = (_forward if compiling else _forward_now)(x)
        return y
    except (RuntimeError, TypeError, AttributeError) as caught:
        error = caught
    _check(x)
    # No CUDA implementation yet: this is the first CUDA tensor.
    if isinstance(error, NotImplementedError) and x.is_cuda and load_cuda():
        return silu(x)
    if not x.dim():  # no row, so the launcher refused it
        return activations.of_one_number(silu, x)
    raise error


def silu_reference(x: Tensor) -> Tensor:
    """The same by torch's own kernel: the yardstick for errors and speed."""
    return F.silu(x)


def _check(x: Any) -> None:
    check_are_tensors(contract.NAME, {"x": x}, {})
    x_info = info(x)
    assert x_info is not None
    contract.check(x_info)


_forward, _forward_now, _function, _apply = activations.unary(
    contract.NAME, _check, activations.silu, activations.by_slope(activations.silu_slope)
)
