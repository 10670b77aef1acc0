"""Squared ReLU for JAX: the function people call.

The contract is kernels/relu2.py; activations.py has all that is behind it.

    y = relu2(x)
"""

from __future__ import annotations

from typing import Any

import jax

from fuselm.kernels import relu2 as contract
from fuselm.kernels.jax_ops import activations, check_are_arrays, info


def relu2(x: jax.Array) -> Any:
    """The square of x where it is positive, else 0, in fp32, rounded once to x's dtype."""
    check_are_arrays(contract.NAME, {"x": x}, {})
    x_info = info(x)
    assert x_info is not None
    contract.check(x_info)
    return _relu2(x, ())


_relu2 = activations.unary(contract.NAME, activations.relu2, activations.relu2_gradient)
