"""RoPE on packed q, k and v for JAX: its backward as a raw call, custom_vjp over it, the function people call.

The contract is kernels/rope_qkv.py. Forward is rope's, of slices; backward runs rope_qkv.cu on CUDA, the same machine
code PyTorch runs, and is jnp elsewhere. vmap folds the mapped axis into the batch.

    q, k, v = rope_qkv(qkv, cos, sin)                                  # qkv [B, T, 3 N, H]
    q, k, v = rope_qkv(qkv, cos, sin, kv_heads=2, positions=positions)
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from fuselm.kernels import rope_qkv as contract
from fuselm.kernels.jax_ops import alike_over_mesh, call, check_are_arrays, info, once_differentiable
from fuselm.kernels.jax_ops import rope as turning
from fuselm.kernels.jax_ops.folding import in_front, one_by_one


def rope_qkv(
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    *,
    kv_heads: int | None = None,
    positions: jax.Array | None = None,
    interleaved: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """q, k and v of qkv [B, T, N + 2 K, H], q and k turned as by rope(); qkv's gradient is made in one pass.

    `kv_heads` is K; None: q, k and v have as many heads. cos, sin, positions and interleaved are rope()'s.
    """
    check_are_arrays(contract.NAME, {"qkv": qkv, "cos": cos, "sin": sin}, {"positions": positions})
    given = {"qkv": qkv, "cos": cos, "sin": sin, "positions": positions}
    known: dict[str, Any] = {name: info(array) for name, array in given.items()}
    contract.check(**known, kv_heads=kv_heads, interleaved=interleaved)
    heads = contract.heads_of(qkv.shape[2], kv_heads)[1]
    given_alike = alike_over_mesh(qkv, cos, sin, positions)
    made: tuple[jax.Array, jax.Array, jax.Array] = _rope_qkv(*given_alike, heads, interleaved)
    return made


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _rope_qkv(qkv: Any, cos: Any, sin: Any, positions: Any, kv_heads: int, interleaved: bool) -> tuple[Any, Any, Any]:
    first = qkv.shape[2] - 2 * kv_heads
    q, k, v = jnp.split(qkv, (first, first + kv_heads), axis=2)
    q, k = turning.rope(q, k, cos, sin, positions=positions, interleaved=interleaved)
    return q, k, v


def _vjp_forward(qkv: Any, cos: Any, sin: Any, positions: Any, kv_heads: int, interleaved: bool) -> tuple[Any, Any]:
    return _rope_qkv(qkv, cos, sin, positions, kv_heads, interleaved), (cos, sin, positions)


def _vjp_backward(kv_heads: int, interleaved: bool, saved: Any, cotangents: Any) -> tuple[Any, ...]:
    cos, sin, positions = saved
    return _backward(interleaved)(*cotangents, cos, sin, turning.or_absent(positions))[0], None, None, None


_rope_qkv.defvjp(_vjp_forward, _vjp_backward)


# ---- the raw call --------------------------------------------------------------------------------------------------


@functools.cache
def _backward(interleaved: bool) -> Any:
    """(dq, dk, dv, cos, sin, positions) -> (dqkv,); positions may be absent."""

    @jax.custom_batching.custom_vmap
    def backward(*tensors: Any) -> tuple[Any, ...]:
        dq, dk, dv, *_ = tensors
        batch, tokens, _, width = dq.shape
        heads = sum(part.shape[2] for part in (dq, dk, dv))
        results = (jax.ShapeDtypeStruct((batch, tokens, heads, width), dq.dtype),)
        return call(
            "rope_qkv_backward", functools.partial(_plain_backward, interleaved), tensors, results, (interleaved,)
        )

    @backward.def_vmap
    def fold(size: int, mapped: list[bool], *tensors: Any) -> tuple[Any, Any]:
        *parts, cos, sin, positions = tensors
        if any(mapped[3:5]):
            return one_by_one(backward, size, mapped, tensors), (True,)
        together = turning.folded_positions(size, mapped[5], positions, parts[0].shape[-4])
        parts = [turning.folded(in_front(size, is_mapped, x)) for is_mapped, x in zip(mapped[:3], parts, strict=True)]
        return turning.unfolded(size, backward(*parts, cos, sin, together)), (True,)

    return once_differentiable("rope_qkv", backward)


def _plain_backward(interleaved: bool, *tensors: Any) -> tuple[Any, ...]:
    dq, dk, dv, cos, sin, positions = tensors
    cos, sin = turning.angles(dq.shape[1], cos, sin, positions)
    back = (turning.turned_pairs(x.astype(jnp.float32), cos, -sin, interleaved).astype(x.dtype) for x in (dq, dk))
    return (jnp.concatenate((*back, dv), axis=2),)
