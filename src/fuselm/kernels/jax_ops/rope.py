"""Rotary positions for JAX: forward and backward as raw calls, custom_vjp over them, and the function people call.

The contract is kernels/rope.py. On CUDA the raw calls run rope.cu and rope_backward.cu, the same machine code PyTorch
runs, so the results are the same to the bit; elsewhere they are jnp. vmap folds the mapped axis into the batch: one
launch, not many. Nothing is written over: what XLA need not keep it writes over by itself.

    q, k = rope(q, k, cos, sin)                                        # q [B, T, N, H], k [B, T, K, H]
    q, k = rope(q, k, cos, sin, positions=positions)                   # [T] or [B, T]
    q, k = rope(q, k, cos, sin, q_weight=q_weight, k_weight=k_weight)  # with QK-norm
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fuselm.kernels import rope as contract
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


class _Options(NamedTuple):
    """What is known when a call is traced."""

    eps: float
    interleaved: bool


def rope(
    q: jax.Array,
    k: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    *,
    positions: jax.Array | None = None,
    interleaved: bool = False,
    q_weight: jax.Array | None = None,
    k_weight: jax.Array | None = None,
    eps: float | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Turn pairs of q [B, T, N, H] and k [B, T, K, H] by the angles of their positions, in fp32, rounded once.

    cos and sin are fp32 [S, H / 2], a row for each position, and constants: their gradient is 0. `positions` are [T] or
    [B, T], 0 to T - 1 unless given; one that the tables have no row for makes the token's q and k NaN. Pairs are
    (i, i + H / 2), or (2 i, 2 i + 1) with `interleaved`. With weights [H], q and k are first normalised by their root
    mean square (QK-norm); eps=None is 2^-23.
    """
    needed = {"q": q, "k": k, "cos": cos, "sin": sin}
    optional = {"positions": positions, "q_weight": q_weight, "k_weight": k_weight}
    check_are_arrays(contract.NAME, needed, optional)
    known: dict[str, Any] = {name: info(array) for name, array in {**needed, **optional}.items()}
    contract.check(**known, eps=eps, interleaved=interleaved)
    options = _Options(contract.DEFAULT_EPS if eps is None else float(eps), interleaved)
    given = alike_over_mesh(q, k, cos, sin, positions, q_weight, k_weight)
    made: tuple[jax.Array, jax.Array] = _rope(*given, options)
    return made


@functools.partial(jax.custom_vjp, nondiff_argnums=(7,))
def _rope(
    q: Any, k: Any, cos: Any, sin: Any, positions: Any, q_weight: Any, k_weight: Any, options: _Options
) -> tuple[Any, Any]:
    made = _forward(options, False, False)(q, k, cos, sin, *map(or_absent, (positions, q_weight, k_weight)))
    return made[:2]


def _vjp_forward(
    q: Any, k: Any, cos: Any, sin: Any, positions: Any, q_weight: Any, k_weight: Any, options: _Options
) -> tuple[Any, Any]:
    normed = q_weight is not None
    given = (q, k, cos, sin, *map(or_absent, (positions, q_weight, k_weight)))
    q_out, k_out, *rstds = _forward(options, False, normed)(*given)
    kept = (q, k, *rstds) if normed else None
    return (q_out, k_out), (kept, cos, sin, positions, q_weight, k_weight)


def _vjp_backward(options: _Options, saved: Any, cotangents: Any) -> tuple[Any, ...]:
    kept, cos, sin, positions, q_weight, k_weight = saved
    dq_out, dk_out = cotangents
    if kept is None:
        dq, dk, *_ = _forward(options, True, False)(dq_out, dk_out, cos, sin, or_absent(positions), absent(), absent())
        return dq, dk, None, None, None, None, None
    dq, dk, dq_weight, dk_weight = _backward(options)(
        dq_out, dk_out, *kept, cos, sin, or_absent(positions), q_weight, k_weight
    )
    return dq, dk, None, None, None, dq_weight, dk_weight


_rope.defvjp(_vjp_forward, _vjp_backward)


def or_absent(array: Any) -> Any:
    """The array, or what stands for none."""
    return absent() if array is None else array


# ---- raw calls -----------------------------------------------------------------------------------------------------


@functools.cache
def _forward(options: _Options, inverse: bool, with_rstd: bool) -> Any:
    """(q, k, cos, sin, positions, q_weight, k_weight) -> (q_out, k_out, q_rstd, k_rstd); the last three may lack."""

    @jax.custom_batching.custom_vmap
    def forward(*tensors: Any) -> tuple[Any, ...]:
        turned = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in tensors[:2])
        rstds = tuple(jax.ShapeDtypeStruct(x.shape[:-1], jnp.float32) for x in tensors[:2])
        results = (*turned, *(rstds if with_rstd else (ABSENT, ABSENT)))

        def plain(*tensors: Any) -> tuple[Any, ...]:
            made = _plain_forward(options, inverse, *tensors)
            return made if with_rstd else (*made[:2], absent(), absent())

        return call("rope_forward", plain, tensors, results, (*options, inverse))

    @forward.def_vmap
    def fold(size: int, mapped: list[bool], *tensors: Any) -> tuple[Any, Any]:
        q, k, cos, sin, positions, *weights = tensors
        if any(mapped[2:4]) or any(mapped[5:]):
            return one_by_one(forward, size, mapped, tensors), (True,) * 4
        together = folded_positions(size, mapped[4], positions, q.shape[-4])
        q, k = (folded(in_front(size, is_mapped, x)) for is_mapped, x in zip(mapped[:2], (q, k), strict=True))
        made = forward(q, k, cos, sin, together, *weights)
        return unfolded(size, made), (True, True, with_rstd, with_rstd)

    return once_differentiable("rope", forward)


@functools.cache
def _backward(options: _Options) -> Any:
    """(dq_out, dk_out, q, k, q_rstd, k_rstd, cos, sin, positions, q_weight, k_weight) -> (dq, dk, and the weights')."""

    @jax.custom_batching.custom_vmap
    def backward(*tensors: Any) -> tuple[Any, ...]:
        likes = (*tensors[2:4], *tensors[-2:])
        results = tuple(jax.ShapeDtypeStruct(like.shape, like.dtype) for like in likes)
        plain = functools.partial(_plain_backward, options)
        return call("rope_backward", plain, tensors, results, (options.interleaved,))

    @backward.def_vmap
    def fold(size: int, mapped: list[bool], *tensors: Any) -> tuple[Any, Any]:
        # Each member of the batch has its own sums over tokens and heads: they are run one after another.
        return one_by_one(backward, size, mapped, tensors), (True,) * 4

    return once_differentiable("rope", backward)


def folded(array: Any) -> Any:
    """The mapped axis and the batch as one."""
    return array.reshape(array.shape[0] * array.shape[1], *array.shape[2:])


def unfolded(size: int, arrays: tuple[Any, ...]) -> tuple[Any, ...]:
    """The mapped axis and the batch as two again; what is absent stays so."""
    return tuple(a if is_absent(a) else a.reshape(size, a.shape[0] // size, *a.shape[1:]) for a in arrays)


def folded_positions(size: int, is_mapped: bool, positions: Any, batch: int) -> Any:
    """Positions for a batch that a mapped axis was folded into: still [T] where all share them."""
    if is_absent(positions) or (not is_mapped and positions.ndim == 1):
        return positions
    positions = in_front(size, is_mapped, positions)  # [size, T] or [size, B, T]
    if positions.ndim == 2:
        positions = jnp.broadcast_to(positions[:, None], (size, batch, positions.shape[-1]))
    return folded(positions)


# ---- jnp -----------------------------------------------------------------------------------------------------------


def _plain_forward(options: _Options, inverse: bool, *tensors: Any) -> tuple[Any, ...]:
    q, k, cos, sin, positions, *weights = tensors
    cos, sin = angles(q.shape[1], cos, sin, positions)
    turned, rstds = [], []
    for x, weight in zip((q, k), weights, strict=True):
        y, rstd = x.astype(jnp.float32), absent()
        if not is_absent(weight):
            rstd = jax.lax.rsqrt(jnp.mean(y * y, axis=-1) + options.eps)
            y = y * rstd[..., None] * weight.astype(jnp.float32)
        turned.append(turned_pairs(y, cos, -sin if inverse else sin, options.interleaved).astype(x.dtype))
        rstds.append(rstd)
    return *turned, *rstds


def _plain_backward(options: _Options, *tensors: Any) -> tuple[Any, ...]:
    dq_out, dk_out, q, k, q_rstd, k_rstd, cos, sin, positions, q_weight, k_weight = tensors
    cos, sin = angles(q.shape[1], cos, sin, positions)
    vectors, weights = [], []
    for dx_out, x, rstd, weight in ((dq_out, q, q_rstd, q_weight), (dk_out, k, k_rstd, k_weight)):
        g = turned_pairs(dx_out.astype(jnp.float32), cos, -sin, options.interleaved)
        xhat = x.astype(jnp.float32) * rstd[..., None]
        weights.append(jnp.sum((g * xhat).reshape(-1, x.shape[-1]), axis=0).astype(weight.dtype))
        g = g * weight.astype(jnp.float32)
        dx = rstd[..., None] * (g - xhat * jnp.mean(g * xhat, axis=-1, keepdims=True))
        vectors.append(dx.astype(x.dtype))
    return *vectors, *weights


def angles(tokens: int, cos: Any, sin: Any, positions: Any) -> tuple[Any, Any]:
    """cos and sin of every token, one for all heads: [T, 1, H/2] or [B, T, 1, H/2]."""
    if is_absent(positions):
        return cos[:tokens, None], sin[:tokens, None]
    rows = cos.shape[0]
    if rows == 0:
        nothing = jnp.full((*positions.shape, 1, cos.shape[1]), jnp.nan, jnp.float32)
        return nothing, nothing
    near = jnp.clip(positions, 0, rows - 1)
    inside = (near == positions)[..., None, None]
    cos, sin = (jnp.where(inside, table[near][..., None, :], jnp.nan) for table in (cos, sin))
    return cos, sin


def turned_pairs(x: Any, cos: Any, sin: Any, interleaved: bool) -> Any:
    """Heads with each pair turned by its angle."""
    if interleaved:
        a, b = x[..., 0::2], x[..., 1::2]
        return jnp.stack((a * cos - b * sin, b * cos + a * sin), axis=-1).reshape(x.shape)
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate((a * cos - b * sin, b * cos + a * sin), axis=-1)
