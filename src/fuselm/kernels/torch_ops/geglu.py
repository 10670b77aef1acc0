"""GEGLU for PyTorch: the function people call, and what it is measured against.

The contract is kernels/geglu.py. On CUDA the raw ops run geglu.cu; elsewhere the plain formulas of activations.py,
which also has the autograd of the family.

    y = geglu(gate, up, approximate="tanh")
    y = geglu(packed)                   # its last dimension is [gate | up]
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling

from fuselm.kernels import geglu as contract
from fuselm.kernels.activations import TANH
from fuselm.kernels.torch_ops import activations, check_are_tensors, info, is_transformed, load_cuda


def geglu(gate: Tensor, up: Tensor | None = None, *, approximate: str = "none") -> Tensor:
    """gelu(gate) * up, in fp32, rounded once to gate's dtype; approximate="tanh" is GPT-2's formula.

    Without `up`, gate is packed: its first half the gate, its second half up. Inside torch.func transforms and
    forward-mode differentiation the plain formula runs, with every derivative torch has.
    """
    compiling = is_compiling()
    if not compiling and is_transformed():
        _check(gate, up, approximate)
        return geglu_reference(gate, up, approximate=approximate)
    # The fast path asks nothing it need not: the launcher refuses bad input, and only then check() looks for the words.
    try:
        tanh = TANH[approximate]
        if up is None:
            if gate.requires_grad and torch.is_grad_enabled():
                y: Tensor = (_packed.function.apply if compiling else _apply_packed)(gate, tanh)
            else:
                y = (_packed.forward if compiling else _packed_now)(gate, tanh)
        elif (gate.requires_grad or up.requires_grad) and torch.is_grad_enabled():
            y = (_apart.function.apply if compiling else _apply_apart)(gate, up, tanh)
        else:
            y = (_apart.forward if compiling else _apart_now)(gate, up, tanh)
        return y
    except (RuntimeError, TypeError, AttributeError, KeyError) as caught:
        error = caught
    _check(gate, up, approximate)
    # No CUDA implementation yet: this is the first CUDA tensor.
    if isinstance(error, NotImplementedError) and gate.is_cuda and load_cuda():
        return geglu(gate, up, approximate=approximate)
    raise error


def geglu_reference(gate: Tensor, up: Tensor | None = None, *, approximate: str = "none") -> Tensor:
    """The same in plain torch, which rounds the activation and then the product: the yardstick for errors and speed."""
    gate, up = activations.halves(gate, up)
    return F.gelu(gate, approximate=approximate) * up


def _check(gate: Any, up: Any, approximate: str) -> None:
    check_are_tensors(contract.NAME, {"gate": gate}, {"up": up})
    gate_info = info(gate)
    assert gate_info is not None
    contract.check(gate_info, info(up), approximate)


def _check_raw(gate: Tensor, up: Tensor | None, tanh: bool = False) -> None:
    _check(gate, up, "tanh" if tanh else "none")


_packed = activations.gated(contract.NAME, _check_raw, activations.gelu, activations.gelu_slope, tanh=True)
_apart = activations.apart(contract.NAME, _check_raw, activations.gelu, activations.gelu_slope, tanh=True)
# Looked up once: each attribute of a tuple costs a call what a global does.
_packed_now, _apply_packed = _packed.forward_now, _packed.apply
_apart_now, _apply_apart = _apart.forward_now, _apart.apply
