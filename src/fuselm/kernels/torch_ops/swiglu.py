"""SwiGLU for PyTorch: the function people call, and what it is measured against.

The contract is kernels/swiglu.py. On CUDA the raw ops run swiglu.cu; elsewhere the plain formulas of activations.py,
which also has the autograd of the family.

    y = swiglu(gate, up)
    y = swiglu(packed)                  # its last dimension is [gate | up]
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling

from fuselm.kernels import swiglu as contract
from fuselm.kernels.torch_ops import activations, check_are_tensors, info, is_transformed, load_cuda


def swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """silu(gate) * up, in fp32, rounded once to gate's dtype.

    Without `up`, gate is packed: its first half the gate, its second half up. Inside torch.func transforms and
    forward-mode differentiation the plain formula runs, with every derivative torch has.
    """
    compiling = is_compiling()
    if not compiling and is_transformed():
        _check(gate, up)
        return swiglu_reference(gate, up)
    # The fast path asks nothing it need not: the launcher refuses bad input, and only then check() looks for the words.
    try:
        if up is None:
            if gate.requires_grad and torch.is_grad_enabled():
                y: Tensor = (_packed.function.apply if compiling else _apply_packed)(gate)
            else:
                y = (_packed.forward if compiling else _packed_now)(gate)
        elif (gate.requires_grad or up.requires_grad) and torch.is_grad_enabled():
            y = (_apart.function.apply if compiling else _apply_apart)(gate, up)
        else:
            y = (_apart.forward if compiling else _apart_now)(gate, up)
        return y
    except (RuntimeError, TypeError, AttributeError) as caught:
        error = caught
    _check(gate, up)
    # No CUDA implementation yet: this is the first CUDA tensor.
    if isinstance(error, NotImplementedError) and gate.is_cuda and load_cuda():
        return swiglu(gate, up)
    raise error


def swiglu_reference(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """The same in plain torch, which rounds the activation and then the product: the yardstick for errors and speed."""
    gate, up = activations.halves(gate, up)
    return F.silu(gate) * up


def _check(gate: Any, up: Any) -> None:
    check_are_tensors(contract.NAME, {"gate": gate}, {"up": up})
    gate_info = info(gate)
    assert gate_info is not None
    contract.check(gate_info, info(up))


_packed = activations.gated(contract.NAME, _check, activations.silu, activations.silu_slope)
_apart = activations.apart(contract.NAME, _check, activations.silu, activations.silu_slope)
# Looked up once: each attribute of a tuple costs a call what a global does.
_packed_now, _apply_packed = _packed.forward_now, _packed.apply
_apart_now, _apply_apart = _apart.forward_now, _apart.apply
