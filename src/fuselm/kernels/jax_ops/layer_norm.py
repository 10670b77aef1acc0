"""LayerNorm for JAX: forward and backward as raw calls, custom_vjp over them, and the function people call.

The contract is kernels/layer_norm.py. On CUDA the raw calls run layer_norm*.cu, the same machine code PyTorch runs, so
the results are the same to the bit; elsewhere they are jnp. vmap folds the mapped axis into the rows: one launch, not
many.

    y = layer_norm(x, weight, bias)
    y, residual = layer_norm(x, weight, bias, residual=residual)     # residual <- x + residual; y <- norm of it
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from fuselm.kernels import layer_norm as contract
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


def layer_norm(
    x: jax.Array,
    weight: jax.Array | None = None,
    bias: jax.Array | None = None,
    eps: float = contract.DEFAULT_EPS,
    *,
    residual: jax.Array | None = None,
) -> Any:
    """Subtract the mean of the last axis of x, divide by its standard deviation, scale by weight and add bias.

    Returns y in x's dtype; with `residual`, (y, x + residual), the sum in the residual's dtype. Sums are fp32.
    """
    check_are_arrays(contract.NAME, {"x": x}, {"weight": weight, "bias": bias, "residual": residual})
    x_info = info(x)
    assert x_info is not None
    contract.check(x_info, info(weight), info(bias), info(residual), eps)
    y, residual_out = _layer_norm(*alike_over_mesh(x, weight, bias, residual), float(eps))
    return y if residual is None else (y, residual_out)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _layer_norm(x: Any, weight: Any, bias: Any, residual: Any, eps: float) -> tuple[Any, Any]:
    y, residual_out, _, _ = _forward(eps)(x, *map(_or_absent, (weight, bias, residual)))
    return y, None if residual is None else residual_out


def _vjp_forward(x: Any, weight: Any, bias: Any, residual: Any, eps: float) -> tuple[Any, Any]:
    y, residual_out, mean, rstd = _forward(eps)(x, *map(_or_absent, (weight, bias, residual)))
    # Whether there was a residual travels in the structure, None or (), which tracing keeps static.
    if residual is None:
        return (y, None), (x, mean, rstd, weight, bias, None)
    return (y, residual_out), (residual_out, mean, rstd, weight, bias, ())


def _vjp_backward(eps: float, saved: Any, cotangents: Any) -> tuple[Any, Any, Any, Any]:
    h, mean, rstd, weight, bias, residual_mark = saved
    dy, dresidual_out = cotangents
    optional = map(_or_absent, (weight, bias, dresidual_out))
    dx, dresidual, dweight, dbias = _backward()(dy, h, mean, rstd, *optional)
    if residual_mark is None:
        dresidual = None
    elif is_absent(dresidual):
        dresidual = dx
    return dx, None if weight is None else dweight, None if bias is None else dbias, dresidual


_layer_norm.defvjp(_vjp_forward, _vjp_backward)


def _or_absent(array: Any) -> Any:
    return absent() if array is None else array


# ---- raw calls -----------------------------------------------------------------------------------------------------


def _like(array: Any) -> jax.ShapeDtypeStruct:
    return ABSENT if is_absent(array) else jax.ShapeDtypeStruct(array.shape, array.dtype)


@functools.cache
def _forward(eps: float) -> Any:
    """(x, weight, bias, residual) -> (y, residual_out, mean, rstd); absent tensors in, absent tensors out."""

    @jax.custom_batching.custom_vmap
    def forward(x: Any, weight: Any, bias: Any, residual: Any) -> tuple[Any, ...]:
        of_rows = jax.ShapeDtypeStruct(x.shape[:-1], jnp.float32)
        results = (_like(x), _like(residual), of_rows, of_rows)
        plain = functools.partial(_plain_forward, eps)
        return call("layer_norm_forward", plain, (x, weight, bias, residual), results, (eps,))

    @forward.def_vmap
    def fold(size: int, batched: list[bool], x: Any, weight: Any, bias: Any, residual: Any) -> tuple[Any, Any]:
        if batched[1] or batched[2]:
            return one_by_one(forward, size, batched, (x, weight, bias, residual)), (True,) * 4
        out = forward(in_front(size, batched[0], x), weight, bias, in_front(size, batched[3], residual))
        return out, (True, not is_absent(residual), True, True)

    return once_differentiable("layer_norm", forward)


@functools.cache
def _backward() -> Any:
    """(dy, h, mean, rstd, weight, bias, dresidual_out) -> (dx, dresidual, dweight, dbias)."""

    @jax.custom_batching.custom_vmap
    def backward(dy: Any, h: Any, mean: Any, rstd: Any, weight: Any, bias: Any, dresidual_out: Any) -> tuple[Any, ...]:
        results = (_like(dy), ABSENT if h.dtype == dy.dtype else _like(h), _like(weight), _like(bias))
        tensors = (dy, h, mean, rstd, weight, bias, dresidual_out)
        return call("layer_norm_backward", _plain_backward, tensors, results, ())

    @backward.def_vmap
    def fold(size: int, batched: list[bool], *tensors: Any) -> tuple[Any, Any]:
        if not (is_absent(tensors[4]) and is_absent(tensors[5])):
            # Each member of the batch has its own sums over rows for dweight and dbias: one after another.
            return one_by_one(backward, size, batched, tensors), (True,) * 4
        out = backward(*(in_front(size, b, t) for b, t in zip(batched, tensors, strict=True)))
        return out, (True, not is_absent(out[1]), False, False)

    return once_differentiable("layer_norm", backward)


def _plain_forward(eps: float, x: Any, weight: Any, bias: Any, residual: Any) -> tuple[Any, ...]:
    h = x if is_absent(residual) else (x.astype(jnp.float32) + residual.astype(jnp.float32)).astype(residual.dtype)
    h32 = h.astype(jnp.float32)
    mean = jnp.mean(h32, axis=-1)
    centred = h32 - mean[..., None]
    rstd = jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1) + eps)
    y = centred * rstd[..., None]
    if not is_absent(weight):
        y = y * weight.astype(jnp.float32)
    if not is_absent(bias):
        y = y + bias.astype(jnp.float32)
    return y.astype(x.dtype), residual if is_absent(residual) else h, mean, rstd


def _plain_backward(
    dy: Any, h: Any, mean: Any, rstd: Any, weight: Any, bias: Any, dresidual_out: Any
) -> tuple[Any, ...]:
    dy32, width = dy.astype(jnp.float32), dy.shape[-1]
    xhat = (h.astype(jnp.float32) - mean[..., None]) * rstd[..., None]
    g = dy32 if is_absent(weight) else dy32 * weight.astype(jnp.float32)
    across = jnp.mean(g, axis=-1, keepdims=True) + xhat * jnp.mean(g * xhat, axis=-1, keepdims=True)
    dh = rstd[..., None] * (g - across)
    if not is_absent(dresidual_out):
        dh = dh + dresidual_out.astype(jnp.float32)
    dresidual = absent() if h.dtype == dy.dtype else dh.astype(h.dtype)
    dweight = dbias = absent()
    if not is_absent(weight):
        dweight = jnp.sum((dy32 * xhat).reshape(-1, width), axis=0).astype(weight.dtype)
    if not is_absent(bias):
        dbias = jnp.sum(dy32.reshape(-1, width), axis=0).astype(bias.dtype)
    return dh.astype(dy.dtype), dresidual, dweight, dbias
