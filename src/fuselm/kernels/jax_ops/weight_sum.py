"""A head's weight gradient, summed over blocks of rows in 16 bits, for JAX.

The format is that of torch_ops/weight_sum.py. No block is the first: zeros, with exponents of 0, are a sum of nothing.

    exponents = exponents_of(dweight)
    dweight, exponents = added(dweight, exponents, dlogits, rows, last=False)
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from fuselm.kernels import linear_cross_entropy as contract
from fuselm.kernels.jax_ops import call, native_library

HOPPER = "9.0"


def serves(hidden: Any, weight: Any) -> bool:
    """Whether a sum over blocks of these can be taken so."""
    if not hidden.dtype == weight.dtype == jnp.bfloat16 or any(size % 8 for size in weight.shape):
        return False
    gpus = [device for device in jax.devices() if device.platform == "gpu"]
    return not gpus or (native_library() is not None and all(g.compute_capability == HOPPER for g in gpus))


def exponents_of(dweight: Any) -> Any:
    """The exponents of a sum of 0: four bytes for each word and tile of 256 columns."""
    return jnp.zeros((contract.tiles_across(dweight.shape[1]), dweight.shape[0]), jnp.int32)


def added(dweight: Any, exponents: Any, dlogits: Any, rows: Any, *, last: bool) -> tuple[Any, Any]:
    """dlogits [M, V] transposed times rows [M, D] added to the sum so far; `last` leaves bf16."""

    def plain(dlogits: Any, rows: Any, dweight: Any, exponents: Any) -> tuple[Any, Any]:
        return _plain_added(dlogits, rows, dweight, exponents, last)

    results = tuple(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in (dweight, exponents))
    tensors, scalars = (dlogits, rows, dweight, exponents), (False, last)
    made: tuple[Any, Any] = call("linear_cross_entropy_dweight", plain, tensors, results, scalars, {2: 0, 3: 1})
    return made


def _plain_added(dlogits: Any, rows: Any, dweight: Any, exponents: Any, last: bool) -> tuple[Any, Any]:
    words, width = dweight.shape
    tiles = len(exponents)
    column = jnp.arange(width)

    def by_column(stored: Any) -> Any:  # [tiles, V, 4] -> [V, D]
        return stored[column // contract.TILE_COLUMNS, :, column % 8 // 2].T.astype(jnp.int32)

    before = jax.lax.bitcast_convert_type(dweight, jnp.float16).astype(jnp.float32)
    stored = jax.lax.bitcast_convert_type(exponents, jnp.int8)  # [tiles, V, 4]
    total = jnp.dot(dlogits.T, rows, preferred_element_type=jnp.float32)
    total = total + jnp.ldexp(before, by_column(stored) - contract.TOP_EXPONENT)
    if last:
        return total.astype(dweight.dtype), exponents
    finite = jnp.nan_to_num(jnp.abs(total), nan=0.0)  # the largest number for infinity
    padded = jnp.pad(finite, ((0, 0), (0, tiles * contract.TILE_COLUMNS - width)))
    largest = jnp.max(padded.reshape(words, tiles, -1, contract.EXPONENTS_OF_WORD, 2), (2, 4))  # [V, tiles, 4]
    exponent = jnp.where(largest == 0, contract.LEAST_EXPONENT, jnp.frexp(largest)[1] - 1)
    stored = jnp.clip(exponent, contract.LEAST_EXPONENT, contract.MOST_EXPONENT).astype(jnp.int8).swapaxes(0, 1)
    halves = jnp.ldexp(total, contract.TOP_EXPONENT - by_column(stored)).astype(jnp.float16)
    return (
        jax.lax.bitcast_convert_type(halves, dweight.dtype),
        jax.lax.bitcast_convert_type(stored, exponents.dtype),
    )
