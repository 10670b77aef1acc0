"""Softmax for JAX: forward and backward as raw calls, custom_vjp over them, and the function people call.

The contract is kernels/softmax.py. On CUDA the raw calls run softmax.cu, the same machine code PyTorch runs, so the
results are the same to the bit; elsewhere they are jnp. vmap makes the mapped axis a leading one: one launch, not many.

    y = softmax(x)
    y = softmax(scores, scale=0.125, causal=True)      # scores [B, N, T, S]
    y = softmax(scores, mask=mask)                     # mask [B, 1, 1, S], -inf where nothing may be seen
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fuselm.kernels import softmax as contract
from fuselm.kernels.jax_ops import absent, alike_over_mesh, call, check_are_arrays, info, is_absent, once_differentiable
from fuselm.kernels.spec import TensorInfo


class _Options(NamedTuple):
    """What is known when a call is traced."""

    scale: float
    causal: bool
    mask: TensorInfo | None


def softmax(x: jax.Array, *, scale: float = 1.0, causal: bool = False, mask: jax.Array | None = None) -> Any:
    """Softmax of scale * x + mask over the last axis, in fp32, rounded once to x's dtype.

    With `causal`, x is [..., T, S], the T queries being the last of the S positions: query t sees keys up to t + S - T.
    The mask has any float dtype and any shape that broadcasts to x's; it may learn. With a mask or causal, a row in
    which nothing may be seen is all zeros, and so is its gradient; without them it is NaN.
    """
    check_are_arrays(contract.NAME, {"x": x}, {"mask": mask})
    x_info, mask_info = info(x), info(mask)
    assert x_info is not None
    contract.check(x_info, mask_info, scale, causal)
    return _softmax(*alike_over_mesh(x, mask), _Options(float(scale), causal, mask_info))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _softmax(x: Any, mask: Any, options: _Options) -> Any:
    return _forward(options.scale, options.causal)(x, absent() if mask is None else mask)


def _vjp_forward(x: Any, mask: Any, options: _Options) -> tuple[Any, Any]:
    y = _forward(options.scale, options.causal)(x, absent() if mask is None else mask)
    return y, y


def _vjp_backward(options: _Options, y: Any, dy: Any) -> tuple[Any, Any]:
    dx = _backward(options.scale)(dy, y)
    if options.mask is None:
        return dx, None
    # Where the mask's gradient is not asked for, XLA drops this.
    dscores = dx if options.scale == 1 else _backward(1.0)(dy, y)
    return dx, _summed_to(dscores, options.mask)


_softmax.defvjp(_vjp_forward, _vjp_backward)


def _summed_to(gradient: Any, mask: TensorInfo) -> Any:
    """The sum, in fp32, over the axes along which a mask was broadcast."""
    added = gradient.ndim - len(mask.shape)
    spread = tuple(i for i, size in enumerate(gradient.shape) if i < added or mask.shape[i - added] != size)
    return gradient.astype(jnp.float32).sum(spread, keepdims=True).reshape(mask.shape).astype(mask.dtype)


# ---- raw calls -----------------------------------------------------------------------------------------------------


@functools.cache
def _forward(scale: float, causal: bool) -> Any:
    """(x, mask) -> y; the mask may be absent."""

    @jax.custom_batching.custom_vmap
    def forward(x: Any, mask: Any) -> Any:
        plain = functools.partial(_plain_forward, scale, causal)
        results = (jax.ShapeDtypeStruct(x.shape, x.dtype),)
        return call("softmax_forward", plain, (x, mask), results, (scale, causal))[0]

    @forward.def_vmap
    def fold(size: int, batched: list[bool], x: Any, mask: Any) -> tuple[Any, bool]:
        x = _batched(size, batched[0], x)
        if x.ndim > contract.MAX_RANK and is_absent(mask):
            row = x.shape[-2:] if causal else x.shape[-1:]
            rows = math.prod(x.shape[: x.ndim - len(row)])
            return forward(x.reshape(rows, *row), mask).reshape(x.shape), True
        if x.ndim > contract.MAX_RANK:
            masks = _batched(size, batched[1], mask)
            return jax.lax.map(lambda pair: forward(*pair), (x, masks)), True
        if batched[1]:  # its own axes stay those of x that they were, counted from the last
            mask = mask.reshape(size, *(1,) * (x.ndim - mask.ndim), *mask.shape[1:])
        return forward(x, mask), True

    return once_differentiable("softmax", forward)


@functools.cache
def _backward(scale: float) -> Any:
    """(dy, y) -> dx."""

    @jax.custom_batching.custom_vmap
    def backward(dy: Any, y: Any) -> Any:
        plain = functools.partial(_plain_backward, scale)
        return call("softmax_backward", plain, (dy, y), (jax.ShapeDtypeStruct(dy.shape, dy.dtype),), (scale,))[0]

    @backward.def_vmap
    def fold(size: int, batched: list[bool], dy: Any, y: Any) -> tuple[Any, bool]:
        shape = (size, *(dy.shape[1:] if batched[0] else dy.shape))
        rows = (math.prod(shape[:-1]), shape[-1])  # all that matters: x's rank may be the largest there is
        dy, y = (_batched(size, b, array).reshape(rows) for b, array in zip(batched, (dy, y), strict=True))
        return backward(dy, y).reshape(shape), True

    return once_differentiable("softmax", backward)


def _batched(size: int, is_batched: bool, array: Any) -> Any:
    return array if is_batched else jnp.broadcast_to(array, (size, *array.shape))


def _plain_forward(scale: float, causal: bool, x: Any, mask: Any) -> tuple[Any, ...]:
    scores = x.astype(jnp.float32) * scale
    if not is_absent(mask):
        scores = scores + mask.astype(jnp.float32)
    if causal:
        queries, keys = x.shape[-2:]
        hidden = jnp.arange(keys) > jnp.arange(queries)[:, None] + (keys - queries)  # [T, S]
        scores = jnp.where(hidden, -jnp.inf, scores)
    top = jnp.max(scores, axis=-1, keepdims=True)
    if causal or not is_absent(mask):  # a row of nothing but -inf
        top = jnp.where(top == -jnp.inf, 0.0, top)
    shares = jnp.exp(scores - top)
    total = jnp.sum(shares, axis=-1, keepdims=True)
    return ((shares / jnp.where(total == 0, 1.0, total)).astype(x.dtype),)


def _plain_backward(scale: float, dy: Any, y: Any) -> tuple[Any, ...]:
    dy32, y32 = dy.astype(jnp.float32), y.astype(jnp.float32)
    dscores = y32 * (dy32 - jnp.sum(dy32 * y32, axis=-1, keepdims=True))
    return ((scale * dscores).astype(dy.dtype),)
