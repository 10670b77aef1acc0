"""Mul for JAX: forward and backward as raw calls, custom_vjp over them, and the function people call.

The contract is kernels/mul.py. On CUDA the raw calls run mul.cu, the same machine code PyTorch runs, so the results are
the same to the bit, but for sums that XLA takes; elsewhere they are jnp.

    y = mul(x, gate)
    y = mul(x, weight)      # weight [D] for every row of x [B, T, D]
"""

from __future__ import annotations

from typing import Any

import jax

from fuselm.kernels import mul as contract
from fuselm.kernels.elementwise import is_row
from fuselm.kernels.jax_ops import alike_over_mesh
from fuselm.kernels.jax_ops.elementwise import broadcasting, columns, gradients, infos, summed_to


def mul(x: jax.Array, y: jax.Array) -> Any:
    """x * y with broadcasting, in fp32, rounded once to the dtype that x and y have, or fp32 where they differ.

    A number is no array: x * 2.0 needs no op.
    """
    contract.check(*infos(contract.NAME, contract.SIGN, x, y))
    return _mul(*alike_over_mesh(x, y))


@jax.custom_vjp
def _mul(x: Any, y: Any) -> Any:
    return _forward(x, y)


def _vjp_forward(x: Any, y: Any) -> tuple[Any, Any]:
    return _forward(x, y), (x, y)


def _vjp_backward(saved: Any, dout: Any) -> tuple[Any, Any]:
    x, y = saved
    if x.shape == dout.shape == y.shape:
        dx, dy = _backward(dout, x, y)
    elif x.shape == dout.shape and is_row(y.shape, dout.shape):
        dx, dy = _backward_row(dout, x, y)
    elif y.shape == dout.shape and is_row(x.shape, dout.shape):
        dy, dx = _backward_row(dout, y, x)
    else:
        dx, dy = (summed_to(_forward(dout, other), own.shape).astype(own.dtype) for own, other in ((x, y), (y, x)))
    return dx, dy


_mul.defvjp(_vjp_forward, _vjp_backward)

# ---- raw calls -----------------------------------------------------------------------------------------------------

_forward = broadcasting(contract.NAME, "mul_forward", lambda x, y: x * y)  # (x, y) -> out
# (dout, x, y) -> (dx, dy); y is one row in the second
_backward = gradients(contract.NAME, "mul_backward", lambda dout, x, y: (dout * y, dout * x), (1, 2))
_backward_row = gradients(
    contract.NAME,
    "mul_backward_row",
    lambda dout, x, y: (dout * y, (columns(dout) * columns(x)).sum(0)),
    (1, 2),
    sums=True,
)
