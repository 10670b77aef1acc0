"""GELU for PyTorch: the function people call, and what it is measured against.

The contract is kernels/gelu.py. On CUDA the raw ops run gelu.cu; elsewhere the plain formulas of activations.py, which
also has the autograd of the family.

    y = gelu(x)
    y = gelu(x, approximate="tanh")     # GPT-2's
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling

from fuselm.kernels import gelu as contract
from fuselm.kernels.activations import TANH
from fuselm.kernels.torch_ops import activations, check_are_tensors, info, is_transformed, load_cuda


def gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    """x times the normal distribution's share below x, in fp32, rounded once to x's dtype.

    approximate="tanh" is GPT-2's formula. Inside torch.func transforms and forward-mode differentiation torch's own
    runs, with every derivative torch has.
    """
    compiling = is_compiling()
    if compiling:  # a graph calls the launcher straight, and that takes rows
        if isinstance(x, Tensor) and not x.dim():
            return activations.of_one_number(gelu, x, approximate=approximate)
    elif is_transformed():
        _check(x, approximate)
        return gelu_reference(x, approximate=approximate)
    # The fast path asks nothing it need not: the launcher refuses bad input, and only then check() looks for the words.
    try:
        tanh = TANH[approximate]
        if x.requires_grad and torch.is_grad_enabled():
            y: Tensor = (_function.apply if compiling else _apply)(x, tanh)
        elif tanh or compiling:
            y = (_forward if compiling else _forward_now)(x, tanh)
        else:
            y = _forward_now(x)  # an argument that is the default would cost 0.15 us if it were passed
        return y
    except (RuntimeError, TypeError, AttributeError, KeyError) as caught:
        error = caught
    _check(x, approximate)
    # No CUDA implementation yet: this is the first CUDA tensor.
    if isinstance(error, NotImplementedError) and x.is_cuda and load_cuda():
        return gelu(x, approximate=approximate)
    if not x.dim():  # no row, so the launcher refused it
        return activations.of_one_number(gelu, x, approximate=approximate)
    raise error


def gelu_reference(x: Tensor, *, approximate: str = "none") -> Tensor:
    """The same by torch's own kernel: the yardstick for errors and speed."""
    return F.gelu(x, approximate=approximate)


def _check(x: Any, approximate: str) -> None:
    check_are_tensors(contract.NAME, {"x": x}, {})
    x_info = info(x)
    assert x_info is not None
    contract.check(x_info, approximate)


def _check_raw(x: Tensor, tanh: bool = False) -> None:
    _check(x, "tanh" if tanh else "none")


_forward, _forward_now, _function, _apply = activations.unary(
    contract.NAME, _check_raw, activations.gelu, activations.by_slope(activations.gelu_slope), tanh=True
)
