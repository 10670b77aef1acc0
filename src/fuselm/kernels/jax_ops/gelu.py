"""GELU for JAX: the function people call.

The contract is kernels/gelu.py; activations.py has all that is behind it.

    y = gelu(x)
    y = gelu(x, approximate="tanh")     # GPT-2's
"""

from __future__ import annotations

from typing import Any

import jax

from fuselm.kernels import gelu as contract
from fuselm.kernels.activations import TANH
from fuselm.kernels.jax_ops import activations, check_are_arrays, info


def gelu(x: jax.Array, *, approximate: str = "none") -> Any:
    """x times the normal distribution's share below x, in fp32, rounded once to x's dtype.

    approximate="tanh" is GPT-2's formula.
    """
    check_are_arrays(contract.NAME, {"x": x}, {})
    x_info = info(x)
    assert x_info is not None
    contract.check(x_info, approximate)
    return _gelu(x, (TANH[approximate],))


_gelu = activations.unary(contract.NAME, activations.gelu, activations.by_slope(activations.gelu_slope))
