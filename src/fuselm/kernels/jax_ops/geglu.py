"""GEGLU for JAX: the function people call.

The contract is kernels/geglu.py; activations.py has all that is behind it.

    y = geglu(gate, up, approximate="tanh")
    y = geglu(packed)                   # its last axis is [gate | up]
"""

from __future__ import annotations

from typing import Any

import jax

from fuselm.kernels import geglu as contract
from fuselm.kernels.activations import TANH
from fuselm.kernels.jax_ops import activations, check_are_arrays, info


def geglu(gate: jax.Array, up: jax.Array | None = None, *, approximate: str = "none") -> Any:
    """gelu(gate) * up, in fp32, rounded once to gate's dtype; approximate="tanh" is GPT-2's formula.

    Without `up`, gate is packed: its first half the gate, its second half up.
    """
    check_are_arrays(contract.NAME, {"gate": gate}, {"up": up})
    gate_info = info(gate)
    assert gate_info is not None
    contract.check(gate_info, info(up), approximate)
    options = (TANH[approximate],)
    return _packed(gate, options) if up is None else _apart(gate, up, options)


_packed = activations.gated(contract.NAME, activations.gelu, activations.gelu_slope)
_apart = activations.apart(contract.NAME, activations.gelu, activations.gelu_slope)
