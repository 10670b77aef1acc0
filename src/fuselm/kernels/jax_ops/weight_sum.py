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
    if native_library() is None:
        return False
    return all(gpu.compute_capability == HOPPER for gpu in jax.devices() if gpu.platform == "gpu")


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

    def by_share(columns: Any) -> Any:  # [V, D] -> [V, tiles, 32, 4, 2], those past D being 0
        padded = jnp.pad(columns, ((0, 0), (0, tiles * contract.TILE_COLUMNS - width)))
        return padded.reshape(words, tiles, -1, contract.EXPONENTS_OF_WORD, 2)

    def powers(exponent: Any) -> Any:  # of two, for each share
        return jnp.ldexp(jnp.float32(1), exponent)[:, :, None, :, None]

    stored = jax.lax.bitcast_convert_type(exponents, jnp.int8).swapaxes(0, 1).astype(jnp.int32)  # [V, tiles, 4]
    before = by_share(jax.lax.bitcast_convert_type(dweight, jnp.float16).astype(jnp.float32))
    product = jnp.dot(dlogits.T, rows, preferred_element_type=jnp.float32)
    sums = by_share(product) + before * powers(stored - contract.TOP_EXPONENT)
    if last:
        return sums.reshape(words, -1)[:, :width].astype(dweight.dtype), exponents
    largest = jnp.max(jnp.nan_to_num(jnp.abs(sums), nan=0.0), (2, 4))  # the largest number for infinity
    exponent = jnp.where(largest == 0, contract.LEAST_EXPONENT, jnp.frexp(largest)[1] - 1)
    exponent = jnp.clip(exponent, contract.LEAST_EXPONENT, contract.MOST_EXPONENT)
    halves = (sums * powers(contract.TOP_EXPONENT - exponent)).reshape(words, -1)[:, :width].astype(jnp.float16)
    return (
        jax.lax.bitcast_convert_type(halves, dweight.dtype),
        jax.lax.bitcast_convert_type(exponent.astype(jnp.int8).swapaxes(0, 1), exponents.dtype),
    )
