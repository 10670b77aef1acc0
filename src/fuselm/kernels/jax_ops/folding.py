"""How raw calls take vmap: an axis that is put before all others, or one call for each member.

Knows JAX and what an absent array is, and no op. A row-wise op takes a mapped axis as more rows, in one launch; where
a weight is mapped too, or summed over the rows of each member, the members are run one after another.

    y = forward(in_front(size, is_mapped, x), weight)
    ys = one_by_one(forward, size, mapped, (x, weight))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fuselm.kernels.jax_ops import is_absent


def in_front(size: int, is_mapped: bool, array: Any) -> Any:
    """The array with the mapped axis first, repeated along it where it is not mapped; an absent one stays as it is."""
    if is_mapped or is_absent(array):
        return array
    return jnp.broadcast_to(array, (size, *array.shape))


def one_by_one(function: Callable[..., Any], size: int, mapped: Sequence[bool], arrays: Sequence[Any]) -> Any:
    """The results of each member, stacked: every one of them is mapped, the absent ones too."""
    stacked = tuple(
        array if is_mapped else jnp.broadcast_to(array, (size, *array.shape))
        for is_mapped, array in zip(mapped, arrays, strict=True)
    )
    return jax.lax.map(lambda member: function(*member), stacked)
