"""Squared ReLU for PyTorch: the function people call, and what it is measured against.

The contract is kernels/relu2.py. On CUDA the raw ops run relu2.cu; elsewhere the plain formulas of activations.py,
which also has the autograd of the family.

    y = relu2(x)
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling

from fuselm.kernels import relu2 as contract
from fuselm.kernels.torch_ops import activations, check_are_tensors, info, is_transformed, load_cuda


def relu2(x: Tensor) -> Tensor:
    """The square of x where it is positive, else 0, in fp32, rounded once to x's dtype.

    Inside torch.func transforms and forward-mode differentiation torch's own ops run, with every derivative torch has.
    """
    compiling = is_compiling()
    if compiling:  # a graph calls the launcher straight, and that takes rows
        if isinstance(x, Tensor) and not x.dim():
            return activations.of_one_number(relu2, x)
    elif is_transformed():
        _check(x)
        return relu2_reference(x)
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
        return relu2(x)
    if not x.dim():  # no row, so the launcher refused it
        return activations.of_one_number(relu2, x)
    raise error


def relu2_reference(x: Tensor) -> Tensor:
    """The same by torch's own kernels: the yardstick for errors and speed."""
    return F.relu(x).square()


def _check(x: Any) -> None:
    check_are_tensors(contract.NAME, {"x": x}, {})
    x_info = info(x)
    assert x_info is not None
    contract.check(x_info)


_forward, _forward_now, _function, _apply = activations.unary(
    contract.NAME, _check, activations.relu2, activations.relu2_gradient
)
