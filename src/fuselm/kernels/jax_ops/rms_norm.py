"""RMSNorm for JAX: forward and backward as raw calls, custom_vjp over them, and the function people call.

The contract is kernels/rms_norm.py. On CUDA the raw calls run rms_norm*.cu, the same machine code PyTorch runs, so the
results are the same to the bit; elsewhere they are jnp. vmap folds the mapped axis into the rows: one launch, not many.

    y = rms_norm(x, weight)
    y, residual = rms_norm(x, weight, residual=residual)     # residual <- x + residual; y <- norm of it
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from fuselm.kernels import rms_norm as contract
from fuselm.kernels.jax_ops import (
    ABSENT,
    absent,
    alike_over_mesh,
    call,
    check_are_arrays,
    info,
    is_absent,
    once_differentiable,
)
from fuselm.kernels.jax_ops.folding import in_front, one_by_one

Scalars = tuple[float, float, bool]  # eps, offset, round_first


def rms_norm(
    x: jax.Array,
    weight: jax.Array | None = None,
    eps: float | None = None,
    *,
    residual: jax.Array | None = None,
    offset: float = 0.0,
    cast_mode: str = "gemma",
) -> Any:
    """Normalise the last axis of x by its root mean square and scale it by (offset + weight).

    Returns y in x's dtype; with `residual`, (y, x + residual), the sum in the residual's dtype. eps=None is 2^-23.
    cast_mode "gemma" multiplies before it rounds, "llama" rounds before it multiplies. Sums are fp32.
    """
    check_are_arrays(contract.NAME, {"x": x}, {"weight": weight, "residual": residual})
    x_info = info(x)
    assert x_info is not None
    contract.check(x_info, info(weight), info(residual), eps, offset, cast_mode)
    scalars = (contract.DEFAULT_EPS if eps is None else float(eps), float(offset), cast_mode == "llama")
    y, residual_out = _rms_norm(*alike_over_mesh(x, weight, residual), scalars)
    return y if residual is None else (y, residual_out)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _rms_norm(x: Any, weight: Any, residual: Any, scalars: Scalars) -> tuple[Any, Any]:
    y, residual_out, _ = _forward(scalars)(x, _or_absent(weight), _or_absent(residual))
    return y, None if residual is None else residual_out


def _vjp_forward(x: Any, weight: Any, residual: Any, scalars: Scalars) -> tuple[Any, Any]:
    y, residual_out, rstd = _forward(scalars)(x, _or_absent(weight), _or_absent(residual))
    h = x if residual is None else residual_out
    # Whether there was a residual travels in the structure, None or (), which tracing keeps static.
    return (y, None if residual is None else residual_out), (h, rstd, weight, None if residual is None else ())


def _vjp_backward(scalars: Scalars, saved: Any, cotangents: Any) -> tuple[Any, Any, Any]:
    h, rstd, weight, residual_mark = saved
    has_residual = residual_mark is not None
    dy, dresidual_out = cotangents
    dx, dresidual, dweight = _backward(scalars)(dy, h, rstd, _or_absent(weight), _or_absent(dresidual_out))
    if has_residual and is_absent(dresidual):
        dresidual = dx
    return dx, None if weight is None else dweight, dresidual if has_residual else None


_rms_norm.defvjp(_vjp_forward, _vjp_backward)


def _or_absent(array: Any) -> Any:
    return absent() if array is None else array


# ---- raw calls -----------------------------------------------------------------------------------------------------


@functools.cache
def _forward(scalars: Scalars) -> Any:
    """(x, weight, residual) -> (y, residual_out, rstd); absent tensors in, absent tensors out."""

    @jax.custom_batching.custom_vmap
    def forward(x: Any, weight: Any, residual: Any) -> tuple[Any, ...]:
        results = (
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            ABSENT if is_absent(residual) else jax.ShapeDtypeStruct(residual.shape, residual.dtype),
            jax.ShapeDtypeStruct(x.shape[:-1], jnp.float32),
        )
        plain = functools.partial(_plain_forward, scalars)
        return call("rms_norm_forward", plain, (x, weight, residual), results, scalars)

    @forward.def_vmap
    def fold(size: int, batched: list[bool], x: Any, weight: Any, residual: Any) -> tuple[Any, Any]:
        if batched[1]:
            return one_by_one(forward, size, batched, (x, weight, residual)), (True,) * 3
        x, residual = in_front(size, batched[0], x), in_front(size, batched[2], residual)
        y, residual_out, rstd = forward(x, weight, residual)
        return (y, residual_out, rstd), (True, not is_absent(residual_out), True)

    return once_differentiable("rms_norm", forward)


@functools.cache
def _backward(scalars: Scalars) -> Any:
    """(dy, h, rstd, weight, dresidual_out) -> (dx, dresidual, dweight)."""

    @jax.custom_batching.custom_vmap
    def backward(dy: Any, h: Any, rstd: Any, weight: Any, dresidual_out: Any) -> tuple[Any, ...]:
        results = (
            jax.ShapeDtypeStruct(dy.shape, dy.dtype),
            ABSENT if h.dtype == dy.dtype else jax.ShapeDtypeStruct(h.shape, h.dtype),
            ABSENT if is_absent(weight) else jax.ShapeDtypeStruct(weight.shape, weight.dtype),
        )
        plain = functools.partial(_plain_backward, scalars)
        tensors = (dy, h, rstd, weight, dresidual_out)
        return call("rms_norm_backward", plain, tensors, results, scalars[1:2])

    @backward.def_vmap
    def fold(size: int, batched: list[bool], *tensors: Any) -> tuple[Any, Any]:
        if not is_absent(tensors[3]):
            # Each member of the batch has its own sum over rows for dweight: they are run one after another.
            return one_by_one(backward, size, batched, tensors), (True,) * 3
        dx, dresidual, dweight = backward(*(in_front(size, b, t) for b, t in zip(batched, tensors, strict=True)))
        return (dx, dresidual, dweight), (True, not is_absent(dresidual), False)

    return once_differentiable("rms_norm", backward)


def _plain_forward(scalars: Scalars, x: Any, weight: Any, residual: Any) -> tuple[Any, ...]:
    eps, offset, round_first = scalars
    h = x if is_absent(residual) else (x.astype(jnp.float32) + residual.astype(jnp.float32)).astype(residual.dtype)
    h32 = h.astype(jnp.float32)
    rstd = jax.lax.rsqrt(jnp.mean(h32 * h32, axis=-1) + eps)
    xhat = h32 * rstd[..., None]
    if round_first:
        xhat = xhat.astype(x.dtype).astype(jnp.float32)
    y = xhat if is_absent(weight) else xhat * (weight.astype(jnp.float32) + offset)
    return y.astype(x.dtype), residual if is_absent(residual) else h, rstd


def _plain_backward(scalars: Scalars, dy: Any, h: Any, rstd: Any, weight: Any, dresidual_out: Any) -> tuple[Any, ...]:
    offset = scalars[1]
    dy32, xhat = dy.astype(jnp.float32), h.astype(jnp.float32) * rstd[..., None]
    g = dy32 if is_absent(weight) else dy32 * (weight.astype(jnp.float32) + offset)
    dh = rstd[..., None] * (g - xhat * jnp.mean(g * xhat, axis=-1, keepdims=True))
    if not is_absent(dresidual_out):
        dh = dh + dresidual_out.astype(jnp.float32)
    dresidual = absent() if h.dtype == dy.dtype else dh.astype(h.dtype)
    dweight = absent()
    if not is_absent(weight):
        dweight = jnp.sum((dy32 * xhat).reshape(-1, dy.shape[-1]), axis=0).astype(weight.dtype)
    return dh.astype(dy.dtype), dresidual, dweight
