"""Embedding for JAX: forward and backward as raw calls, custom_vjp over them, and the function people call.

The contract is kernels/embedding.py. On CUDA the raw calls run embedding*.cu, the same machine code PyTorch runs, so
the results are the same to the bit; elsewhere they are jnp. vmap over ids is one launch; over tables, and of gradients,
which are sums of each member's own, one after another.

    x = embedding(ids, weight)                                # [B, T] and [V, D] -> [B, T, D]
    x = embedding(ids, weight, position_weight=places)        # + places[0 .. T - 1], added in fp32
    x = embedding(ids, weight, dtype=jnp.bfloat16)            # of an fp32 weight: rounded on the way
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fuselm.kernels import embedding as contract
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
from fuselm.kernels.spec import TensorInfo


class _Tables(NamedTuple):
    """What backward must know of the tables, of which it keeps none."""

    weight: TensorInfo
    position_weight: TensorInfo | None


def embedding(
    ids: jax.Array,
    weight: jax.Array,
    *,
    position_weight: jax.Array | None = None,
    positions: jax.Array | None = None,
    dtype: Any = None,
) -> Any:
    """Rows of weight [V, D] for ids of any shape: ids' shape, and D behind it, in `dtype` or, left out, weight's.

    With `position_weight`, rows of it are added in fp32 before the one rounding: row t to the token at place t of ids'
    last axis, or those that `positions` say, of ids' shape or of its last axis. Gradients are sums in fp32 of a fixed
    order. An id or a position that its table has no row for makes that row NaN and adds nothing to that
    table's gradient.
    """
    optional = {"position_weight": position_weight, "positions": positions}
    check_are_arrays(contract.NAME, {"ids": ids, "weight": weight}, optional)
    ids_info, weight_info, places_info = info(ids), info(weight), info(position_weight)
    assert ids_info is not None
    assert weight_info is not None
    name = _name(dtype)
    contract.check(ids_info, weight_info, places_info, info(positions), name)
    if position_weight is not None and positions is None and not ids.ndim:
        positions = jnp.zeros((), jnp.int32)  # for vmap, which gives the id an axis that is none of tokens
    tables = _Tables(weight_info, places_info)
    given = alike_over_mesh(ids, weight, position_weight, positions)
    return _embedding(*given, name or weight_info.dtype, tables)


def _name(dtype: Any) -> str | None:
    """What check() calls a dtype; of what is none, its own words."""
    if dtype is None or isinstance(dtype, str):
        return dtype
    try:
        return str(jnp.dtype(dtype))
    except TypeError:
        return str(dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _embedding(ids: Any, weight: Any, position_weight: Any, positions: Any, dtype: str, tables: _Tables) -> Any:
    return _forward(dtype)(ids, weight, _or_absent(position_weight), _or_absent(positions))


def _vjp_forward(
    ids: Any, weight: Any, position_weight: Any, positions: Any, dtype: str, tables: _Tables
) -> tuple[Any, Any]:
    return _embedding(ids, weight, position_weight, positions, dtype, tables), (ids, positions)


def _vjp_backward(dtype: str, tables: _Tables, saved: Any, dout: Any) -> tuple[None, Any, Any, None]:
    ids, positions = saved
    dweight, dplaces = _backward(tables)(dout, ids, _or_absent(positions))
    return None, dweight, None if tables.position_weight is None else dplaces, None


_embedding.defvjp(_vjp_forward, _vjp_backward)


def _or_absent(array: Any) -> Any:
    return absent() if array is None else array


# ---- raw calls -----------------------------------------------------------------------------------------------------


@functools.cache
def _forward(dtype: str) -> Any:
    """(ids, weight, position_weight, positions) -> out; the last two may be absent."""

    @jax.custom_batching.custom_vmap
    def forward(ids: Any, weight: Any, position_weight: Any, positions: Any) -> Any:
        results = (jax.ShapeDtypeStruct((*ids.shape, weight.shape[1]), dtype),)
        plain = functools.partial(_plain_forward, dtype)
        tensors = (ids, weight, position_weight, positions)
        return _call("embedding_forward", plain, ids, tensors, results, (contract.DTYPE_NUMBERS[dtype],))[0]

    @forward.def_vmap
    def fold(size: int, mapped: list[bool], *tensors: Any) -> tuple[Any, bool]:
        ids, weight, position_weight, positions = tensors
        if mapped[1] or mapped[2]:
            return one_by_one(forward, size, mapped, tensors), True
        own = ids.shape[1:] if mapped[0] else ids.shape  # of a member's ids
        ids = in_front(size, mapped[0], ids)
        if not is_absent(positions) and (mapped[3] or positions.shape != own[-1:]):
            spread = (size, *(1,) * (len(own) - positions.ndim + 1), *positions.shape[1:]) if mapped[3] else own
            positions = jnp.broadcast_to(positions.reshape(spread), ids.shape)
        # An axis more than there may be becomes part of the next one.
        folded = ids.shape if ids.ndim <= contract.MAX_RANK else (math.prod(ids.shape[:2]), *ids.shape[2:])
        if positions.shape == ids.shape:
            positions = positions.reshape(folded)
        out = forward(ids.reshape(folded), weight, position_weight, positions)
        return out.reshape(*ids.shape, weight.shape[1]), True

    return once_differentiable("embedding", forward)


@functools.cache
def _backward(tables: _Tables) -> Any:
    """(dout, ids, positions) -> (dweight, dposition_weight); positions may be absent."""

    @jax.custom_batching.custom_vmap
    def backward(dout: Any, ids: Any, positions: Any) -> tuple[Any, ...]:
        weight, places = (t and jax.ShapeDtypeStruct(t.shape, t.dtype) for t in tables)
        results = (weight, places or ABSENT)

        def plain(dout: Any, ids: Any, _: Any, __: Any, positions: Any) -> tuple[Any, ...]:
            return _plain_backward(tables, dout, ids, positions)

        # The launcher reads off its results what the tables look like. It has no scalars, but XLA wants one.
        return _call("embedding_backward", plain, ids, (dout, ids, absent(), absent(), positions), results, (0.0,))

    @backward.def_vmap
    def fold(size: int, mapped: list[bool], *tensors: Any) -> tuple[Any, Any]:
        return one_by_one(backward, size, mapped, tensors), (True, True)

    return once_differentiable("embedding", backward)


def _call(name: str, plain: Any, ids: Any, tensors: Any, results: Any, scalars: Any) -> tuple[Any, ...]:
    # No ids may have the shape that stands for no tensor; a launcher would have nothing to look up anyway.
    if 0 in ids.shape:
        made: tuple[Any, ...] = plain(*tensors)
        return made
    return call(name, plain, tensors, results, scalars)


# ---- jnp -----------------------------------------------------------------------------------------------------------


def _plain_forward(dtype: str, ids: Any, weight: Any, position_weight: Any, positions: Any) -> tuple[Any, ...]:
    out = _looked_up(ids, weight)
    if not is_absent(position_weight):
        if is_absent(positions):
            added = position_weight[: contract.tokens_of(ids.shape)]  # [T, D]
        else:
            added = _looked_up(positions, position_weight)
        out = out.astype(jnp.float32) + added.astype(jnp.float32)
    return (out.astype(dtype),)


def _looked_up(indices: Any, table: Any) -> Any:
    inside = jnp.clip(indices, 0, table.shape[0] - 1)
    rows = jnp.take(table, inside, axis=0, mode="clip")
    return jnp.where((inside == indices)[..., None], rows, jnp.nan)


def _plain_backward(tables: _Tables, dout: Any, ids: Any, positions: Any) -> tuple[Any, ...]:
    dweight = _summed(dout, ids, tables.weight)
    if tables.position_weight is None:
        return dweight, absent()
    if not is_absent(positions):
        return dweight, _summed(dout, jnp.broadcast_to(positions, ids.shape), tables.position_weight)
    rows, width = tables.position_weight.shape
    tokens = contract.tokens_of(ids.shape)
    batch = dout.astype(jnp.float32).reshape(ids.size // max(tokens, 1), tokens, width)  # [B, T, D]
    dplaces = jnp.zeros((rows, width), tables.position_weight.dtype)
    return dweight, dplaces.at[:tokens].set(batch.sum(0).astype(dplaces.dtype))


def _summed(dout: Any, indices: Any, table: TensorInfo) -> Any:
    """A table's gradient, added up in fp32."""
    rows, width = table.shape
    known = jnp.where((indices >= 0) & (indices < rows), indices, rows).reshape(-1)  # past the end: dropped
    sent = dout.astype(jnp.float32).reshape(known.size, width)
    return jnp.zeros((rows, width), jnp.float32).at[known].add(sent, mode="drop").astype(table.dtype)
