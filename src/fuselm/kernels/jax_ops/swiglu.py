"""SwiGLU for JAX: the function people call.

The contract is kernels/swiglu.py; activations.py has all that is behind it.

    y = swiglu(gate, up)
    y = swiglu(packed)                  # its last axis is [gate | up]
"""

from __future__ import annotations

from typing import Any

import jax

from fuselm.kernels import swiglu as contract
from fuselm.kernels.jax_ops import activations, check_are_arrays, info


def swiglu(gate: jax.Array, up: jax.Array | None = None) -> Any:
    """silu(gate) * up, in fp32, rounded once to gate's dtype.

    Without `up`, gate is packed: its first half the gate, its second half up.
    """
    check_are_arrays(contract.NAME, {"gate": gate}, {"up": up})
    gate_info = info(gate)
    assert gate_info is not None
    contract.check(gate_info, info(up))
    return _packed(gate, ()) if up is None else _apart(gate, up, ())


_packed = activations.gated(contract.NAME, activations.silu, activations.silu_slope)
_apart = activations.apart(contract.NAME, activations.silu, activations.silu_slope)
