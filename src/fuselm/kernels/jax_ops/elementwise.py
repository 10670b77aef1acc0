"""What add and mul share for JAX: raw calls over two arrays that broadcast or over arrays of one shape, with vmap.

Knows JAX and the words of kernels/elementwise.py, and neither op. `formula` is the call in jnp, over fp32 arrays.

    forward = broadcasting("mul", "mul_forward", lambda x, y: x * y)
    backward = gradients("mul", "mul_backward", lambda dout, x, y: (dout * y, dout * x), like=(1, 2))
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fuselm.kernels import elementwise as contract
from fuselm.kernels.jax_ops import call, check_are_arrays, info, once_differentiable
from fuselm.kernels.jax_ops.folding import one_by_one
from fuselm.kernels.spec import TensorInfo

Formula = Callable[..., Any]


def infos(op: str, sign: str, x: Any, y: Any) -> tuple[TensorInfo, TensorInfo]:
    """What check() needs to know of x and y; what is no array is refused."""
    contract.refuse_numbers(op, sign, {"x": x, "y": y})
    check_are_arrays(op, {"x": x, "y": y}, {})
    x_info, y_info = info(x), info(y)
    assert x_info is not None
    assert y_info is not None
    return x_info, y_info


def summed_to(gradient: Any, shape: tuple[int, ...]) -> Any:
    """The sum, in fp32, over the axes along which an array of that shape was repeated."""
    spread = contract.repeated(shape, gradient.shape)
    return gradient.astype(jnp.float32).sum(spread, keepdims=True).reshape(shape)


def columns(array: Any) -> Any:
    """All rows of an array, as [rows, width]."""
    return array.reshape(math.prod(array.shape[:-1]), array.shape[-1])


def broadcasting(op: str, name: str, formula: Formula, scalars: Sequence[float] = ()) -> Any:
    """(x, y) -> out. A mapped axis is put before all others: one launch, not many."""

    @jax.custom_batching.custom_vmap
    def forward(x: Any, y: Any) -> Any:
        dtype = x.dtype if x.dtype == y.dtype else jnp.float32
        result = jax.ShapeDtypeStruct(jnp.broadcast_shapes(x.shape, y.shape), dtype)
        return call(name, _in_fp32(formula, (result,)), (x, y), (result,), scalars)[0]

    @forward.def_vmap
    def fold(size: int, batched: list[bool], x: Any, y: Any) -> tuple[Any, bool]:
        rank = 1 + max(x.ndim - batched[0], y.ndim - batched[1])
        if rank > contract.MAX_RANK:
            return one_by_one(forward, size, batched, (x, y)), True
        # Behind the mapped axis the others stay what they were, counted from the last.
        x, y = (
            array.reshape(size, *(1,) * (rank - array.ndim), *array.shape[1:]) if is_mapped else array
            for is_mapped, array in zip(batched, (x, y), strict=True)
        )
        return forward(x, y), True

    return once_differentiable(op, forward)


def gradients(
    op: str, name: str, formula: Formula, like: Sequence[int], scalars: Sequence[float] = (), *, sums: bool = False
) -> Any:
    """Arrays -> results that look like some of them.

    All have one shape, and a mapped axis only makes them longer. Where a result `sums` over rows each member has its
    own: they are run one after another.
    """

    @jax.custom_batching.custom_vmap
    def backward(*arrays: Any) -> tuple[Any, ...]:
        results = [jax.ShapeDtypeStruct(arrays[i].shape, arrays[i].dtype) for i in like]
        return call(name, _in_fp32(formula, results), arrays, results, scalars)

    @backward.def_vmap
    def fold(size: int, batched: list[bool], *arrays: Any) -> tuple[Any, Any]:
        all_mapped = (True,) * len(like)
        if sums:
            return one_by_one(backward, size, batched, arrays), all_mapped
        shape = (size, *arrays[0].shape[batched[0] :])
        flat = (jnp.broadcast_to(array, shape).reshape(-1) for array in arrays)
        return tuple(made.reshape(shape) for made in backward(*flat)), all_mapped

    return once_differentiable(op, backward)


def _in_fp32(formula: Formula, results: Sequence[Any]) -> Formula:
    """The call in jnp: what comes in becomes fp32, what goes out is rounded once."""

    @functools.wraps(formula)
    def plain(*arrays: Any) -> tuple[Any, ...]:
        made = formula(*(array.astype(jnp.float32) for array in arrays))
        made = made if isinstance(made, tuple) else (made,)
        return tuple(one.reshape(like.shape).astype(like.dtype) for one, like in zip(made, results, strict=True))

    return plain
