"""SiLU for JAX: the function people call.

The contract is kernels/silu.py; activations.py has all that is behind it.

    y = silu(x)
"""

from __future__ import annotations

from typing import Any

import jax

from fuselm.kernels import silu as contract
from fuselm.kernels.jax_ops import activations, check_are_arrays, info


def silu(x: jax.Array) -> Any:
    """x times its logistic function, in fp32, rounded once to x's dtype."""
    check_are_arrays(contract.NAME, {"x": x}, {})
    x_info = info(x)
    assert x_info is not None
    contract.check(x_info)
    return _silu(x, ())


_silu = activations.unary(contract.NAME, activations.silu, activations.by_slope(activations.silu_slope))
