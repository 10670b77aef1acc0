"""Add for JAX: forward and backward as raw calls, custom_vjp over them, and the function people call.

The contract is kernels/add.py. On CUDA the raw calls run add.cu, the same machine code PyTorch runs, so the results are
the same to the bit, but for sums that XLA takes; elsewhere they are jnp.

    x = add(x, residual, scale=0.5)      # x + 0.5 * residual, rounded once
    y = add(x, bias)                     # bias [D] for every row of x [B, T, D]
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax

from fuselm.kernels import add as contract
from fuselm.kernels.elementwise import is_row
from fuselm.kernels.jax_ops import alike_over_mesh
from fuselm.kernels.jax_ops.elementwise import broadcasting, columns, gradients, infos, summed_to
from fuselm.kernels.spec import TensorInfo


class _Options(NamedTuple):
    """What is known when a call is traced."""

    scale: float
    x: TensorInfo
    y: TensorInfo


def add(x: jax.Array, y: jax.Array, *, scale: float = 1.0) -> Any:
    """x + scale * y with broadcasting, in fp32, rounded once to the dtype that x and y have, or fp32 where they differ.

    A number is no array: x + 2.0 needs no op.
    """
    x_info, y_info = infos(contract.NAME, contract.SIGN, x, y)
    contract.check(x_info, y_info, scale)
    x, y = alike_over_mesh(x, y)
    return _add(x, y, _Options(float(scale), x_info, y_info))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _add(x: Any, y: Any, options: _Options) -> Any:
    return _forward(options.scale)(x, y)


def _vjp_forward(x: Any, y: Any, options: _Options) -> tuple[Any, Any]:
    out = _forward(options.scale)(x, y)
    return out, tuple(row if is_row(row.shape, out.shape) else None for row in (x, y))


def _vjp_backward(options: _Options, rows: Any, dout: Any) -> tuple[Any, Any]:
    return _gradient(dout, 1.0, options.x, rows[0]), _gradient(dout, options.scale, options.y, rows[1])


def _gradient(dout: Any, scale: float, like: TensorInfo, row: Any) -> Any:
    """scale * dout, summed to a shape; dout itself where that is all of it. A row says what its gradient looks like."""
    if dout.shape == like.shape:
        return (dout if scale == 1 else _backward(scale)(dout)[0]).astype(like.dtype)
    if row is not None:
        return _backward_row(scale)(dout, row)[0]
    return (summed_to(dout, like.shape) * scale).astype(like.dtype)


_add.defvjp(_vjp_forward, _vjp_backward)

# ---- raw calls -----------------------------------------------------------------------------------------------------


@functools.cache
def _forward(scale: float) -> Any:
    """(x, y) -> out."""
    return broadcasting(contract.NAME, "add_forward", lambda x, y: x + scale * y, (scale,))


@functools.cache
def _backward(scale: float) -> Any:
    """(dout,) -> (dy,)."""
    return gradients(contract.NAME, "add_backward", lambda dout: scale * dout, (0,), (scale,))


@functools.cache
def _backward_row(scale: float) -> Any:
    """(dout, y) -> (dy,)."""
    return gradients(
        contract.NAME, "add_backward_row", lambda dout, _: scale * columns(dout).sum(0), (1,), (scale,), sums=True
    )
