"""The loss of a head for JAX: a loop over blocks of rows, custom_vjp over it, and the function people call.

The contract is kernels/linear_cross_entropy.py. A block's logits are a jnp matmul; on CUDA cross_entropy.cu turns them
into losses and gradients in place. For "mean" and "sum" forward makes all gradients, for an incoming gradient of 1,
which backward then applies; XLA drops those that nobody asks for. Most matmuls being XLA's, results are as exact as
PyTorch's and not the same to the bit. vmap runs one member after another: no more logits are held than without it.

    loss = linear_cross_entropy(hidden, head_weight, targets)      # [..., D], [V, D], [...] -> ()
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fuselm.kernels import linear_cross_entropy as contract
from fuselm.kernels.jax_ops import (
    ABSENT,
    absent,
    alike_over_mesh,
    call,
    check_are_arrays,
    info,
    is_absent,
    native_library,
    once_differentiable,
    weight_sum,
)
from fuselm.kernels.jax_ops import cross_entropy as rows_loss
from fuselm.kernels.jax_ops.folding import one_by_one


class _Options(NamedTuple):
    """What is known when a call is traced."""

    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float  # 0: none
    reduction: str
    max_bytes: int

    @property
    def scalars(self) -> tuple[int, float, float, float]:
        return self[:4]

    @property
    def by_row(self) -> rows_loss.Options:
        """For the formulas of cross_entropy.py: rows are added up and divided here."""
        return (*self.scalars, "none")


def linear_cross_entropy(
    hidden: jax.Array,
    weight: jax.Array,
    targets: jax.Array,
    bias: jax.Array | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
    max_bytes: int | None = None,
) -> Any:
    """The loss of hidden [..., D] through a head [V, D]: cross_entropy(hidden @ weight.T + bias, targets), in fp32.

    `max_bytes` bounds what logits are held at a time, in hidden's dtype (None: 256 MiB): rows are worked off in blocks.
    On a CPU what XLA makes of them in fp32 counts too. Weight and bias are rounded to hidden's dtype; their gradients
    come in their own. Options, and targets that do not count, are as in cross_entropy.
    """
    check_are_arrays(contract.NAME, {"hidden": hidden, "weight": weight, "targets": targets}, {"bias": bias})
    hidden_info, weight_info, targets_info = info(hidden), info(weight), info(targets)
    assert hidden_info is not None
    assert weight_info is not None
    assert targets_info is not None
    asked = (ignore_index, label_smoothing, z_loss, softcap, reduction, max_bytes)
    contract.check(hidden_info, weight_info, targets_info, info(bias), *asked)
    debugging = jax.config.jax_debug_nans  # type: ignore[attr-defined]  # known to JAX at run time only
    if debugging and not isinstance(targets, jax.core.Tracer):
        rows_loss.refuse_strays(contract.NAME, np.asarray(targets), weight.shape[0], ignore_index)
    limit = contract.DEFAULT_MAX_BYTES if max_bytes is None else max_bytes
    numbers = (int(ignore_index), float(label_smoothing), float(z_loss), float(softcap or 0.0))
    given = alike_over_mesh(hidden, weight, targets, bias)
    return _linear_cross_entropy(*given, _Options(*numbers, reduction, limit))


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _linear_cross_entropy(hidden: Any, weight: Any, targets: Any, bias: Any, options: _Options) -> Any:
    return _losses(options)(hidden, weight, targets, _or_absent(bias))[0]


def _vjp_forward(hidden: Any, weight: Any, targets: Any, bias: Any, options: _Options) -> tuple[Any, Any]:
    given = (hidden, weight, targets, _or_absent(bias))
    if options.reduction == "none":
        losses, lse = _losses(options)(*given)
        return losses, (given, lse)
    loss, *gradients = _loss_and_gradients(options)(*given)
    return loss, (given, gradients)


def _vjp_backward(options: _Options, saved: Any, dloss: Any) -> tuple[Any, ...]:
    (hidden, weight, targets, bias), made = saved
    if options.reduction == "none":
        gradients = _gradients(options)(hidden, weight, targets, bias, made, dloss)
    else:
        factor = dloss
        if hidden.dtype == jnp.float16 and options.reduction == "mean":
            count = _count(options, targets, weight.shape[0])
            factor = dloss * (_mantissa(count) / count)  # 2^-k, exactly
        gradients = [_scaled(gradient, factor) for gradient in made]
    dhidden, dweight, dbias = gradients
    return dhidden, dweight.astype(weight.dtype), None, None if is_absent(bias) else dbias.astype(bias.dtype)


_linear_cross_entropy.defvjp(_vjp_forward, _vjp_backward)


def _or_absent(array: Any) -> Any:
    return absent() if array is None else array


# ---- the three passes ----------------------------------------------------------------------------------------------


def _one_at_a_time(function: Callable[..., tuple[Any, ...]]) -> Any:
    """A pass that vmap runs for each member, and that is not differentiated."""
    raw = jax.custom_batching.custom_vmap(function)

    @raw.def_vmap
    def fold(size: int, mapped: list[bool], *arrays: Any) -> tuple[Any, Any]:
        made = one_by_one(raw, size, mapped, arrays)
        return made, (True,) * len(made)

    return once_differentiable("linear_cross_entropy", raw)


@functools.cache
def _losses(options: _Options) -> Any:
    """(hidden, weight, targets, bias) -> (loss or losses, lse)."""

    def losses(hidden: Any, weight: Any, targets: Any, bias: Any) -> tuple[Any, Any]:
        head = _Head(hidden, weight, bias)

        def block(_: None, rows: Any, last: bool) -> tuple[None, Any]:
            own_hidden, own_targets = rows
            return None, _row_losses(options, head.logits(own_hidden), own_targets)

        flat = targets.reshape(-1)
        _, (made, lse) = _over_blocks(block, None, (head.rows, flat), head.block_rows(options))
        return _reduced(options, made, flat, weight.shape[0]).reshape(_result_shape(options, targets)), lse

    return _one_at_a_time(losses)


@functools.cache
def _loss_and_gradients(options: _Options) -> Any:
    """(hidden, weight, targets, bias) -> (loss, dhidden, dweight, dbias) for an incoming gradient of 1."""

    def both(hidden: Any, weight: Any, targets: Any, bias: Any) -> tuple[Any, ...]:
        head, flat, divisor = _Head(hidden, weight, bias), targets.reshape(-1), absent()
        size = head.block_rows(options)
        if options.reduction == "mean":
            count = _count(options, flat, weight.shape[0])
            # 1 / count would push the gradients of fp16 logits below what fp16 holds: its power of two comes last.
            divisor = _mantissa(count) if hidden.dtype == jnp.float16 else count

        def block(sums: Sums, rows: Any, last: bool) -> tuple[Sums, Any]:
            own_hidden, own_targets = rows
            dlogits, losses = _row_gradients(options, head.logits(own_hidden), own_targets, divisor)
            return head.added(sums, dlogits, own_hidden, last), (losses, head.dhidden(dlogits))

        sums, (losses, dhidden) = _over_blocks(block, head.sums(size, options), (head.rows, flat), size)
        loss = _reduced(options, losses, flat, weight.shape[0])
        return loss, dhidden.reshape(hidden.shape), *head.finished(sums)

    return _one_at_a_time(both)


@functools.cache
def _gradients(options: _Options) -> Any:
    """(hidden, weight, targets, bias, lse, dloss of each row) -> (dhidden, dweight, dbias)."""

    def gradients(hidden: Any, weight: Any, targets: Any, bias: Any, lse: Any, dloss: Any) -> tuple[Any, ...]:
        head = _Head(hidden, weight, bias)
        size = head.block_rows(options, held=2)  # logits and their gradients

        def block(sums: Sums, rows: Any, last: bool) -> tuple[Sums, Any]:
            own_hidden, *others = rows
            dlogits = _row_backward(options, head.logits(own_hidden), *others)
            return head.added(sums, dlogits, own_hidden, last), head.dhidden(dlogits)

        rows = (head.rows, targets.reshape(-1), lse, dloss.reshape(-1))
        sums, dhidden = _over_blocks(block, head.sums(size, options), rows, size)
        return dhidden.reshape(hidden.shape), *head.finished(sums)

    return _one_at_a_time(gradients)


def _reduced(options: _Options, losses: Any, targets: Any, vocabulary: int) -> Any:
    if options.reduction == "none":
        return losses
    total = jnp.sum(losses)
    return total if options.reduction == "sum" else total / _count(options, targets, vocabulary)


def _result_shape(options: _Options, targets: Any) -> tuple[int, ...]:
    return tuple(targets.shape) if options.reduction == "none" else ()


def _count(options: _Options, targets: Any, vocabulary: int) -> Any:
    """How many targets count, at least 1, in fp32."""
    counts, _ = rows_loss._counting(options.by_row, targets, vocabulary)
    return jnp.maximum(jnp.sum(counts), 1).astype(jnp.float32)


def _mantissa(count: Any) -> Any:
    """count / 2^k, in [1, 2)."""
    return jnp.frexp(count)[0] * 2


# ---- blocks of rows ------------------------------------------------------------------------------------------------


def _over_blocks(step: Any, carry: Any, arrays: tuple[Any, ...], size: int) -> tuple[Any, Any]:
    """lax.scan over blocks of `size` rows of the arrays, and one step more, told that it is the last."""
    rows = arrays[0].shape[0]
    before = (rows - 1) // size if rows > size else 0  # blocks that others follow
    parts = []
    if before:
        stacked = tuple(array[: before * size].reshape(before, size, *array.shape[1:]) for array in arrays)
        carry, made = jax.lax.scan(functools.partial(step, last=False), carry, stacked)
        parts.append(jax.tree.map(lambda array: array.reshape(before * size, *array.shape[2:]), made))
    carry, made = step(carry, tuple(array[before * size :] for array in arrays), last=True)
    parts.append(made)
    return carry, made if not before else jax.tree.map(lambda *some: jnp.concatenate(some), *parts)


class Sums(NamedTuple):
    """What is added up over blocks; absent where it is not."""

    dweight: Any
    exponents: Any  # of a dweight that waits as weight_sum.py has it
    dbias: Any


class _Head:
    """One call's matrices in hidden's dtype, [M, D] and [V, D], and the products of a block with them."""

    def __init__(self, hidden: Any, weight: Any, bias: Any) -> None:
        self.rows = hidden.reshape(-1, hidden.shape[-1])
        self.weight = weight.astype(hidden.dtype)
        self.bias = bias if is_absent(bias) else bias.astype(hidden.dtype)
        # As PyTorch's: an fp16 sum over many rows could overflow before it is divided by their number.
        self.sum_dtype = jnp.bfloat16 if hidden.dtype == weight.dtype == jnp.bfloat16 else jnp.float32

    def block_rows(self, options: _Options, held: int = 1) -> int:
        """How many rows a block has, `held` arrays of its logits' size being there at once.

        Without the kernels XLA keeps three more, in fp32.
        """
        logit_bytes = held * self.rows.dtype.itemsize + (3 * 4 if native_library() is None else 0)
        return contract.block_rows(self.rows.shape[0], self.weight.shape[0], logit_bytes, options.max_bytes)

    def logits(self, rows: Any) -> Any:
        """[rows, V]."""
        if is_absent(self.bias):
            made = _product(rows, self.weight.T, rows.dtype)
        else:
            product = _product(rows, self.weight.T, jnp.float32)
            made = (product + self.bias.astype(jnp.float32)).astype(rows.dtype)
        # Without it XLA goes on with what was there before the rounding, where it may, and two passes disagree.
        return jax.lax.optimization_barrier(made)

    def dhidden(self, dlogits: Any) -> Any:
        return _product(dlogits, self.weight, self.rows.dtype)

    def sums(self, size: int, options: _Options) -> Sums:
        """Zeros for dweight and dbias; a large 16-bit weight's are added up in 16 bits, to take no more memory.

        Not without the kernels: XLA makes a block's share in fp32 then, of the same size.
        """
        several, small = self.rows.shape[0] > size, 4 * self.weight.size <= options.max_bytes
        in_fp32 = several and (small or native_library() is None)
        dweight = jnp.zeros(self.weight.shape, jnp.float32 if in_fp32 else self.sum_dtype)
        waits = several and dweight.dtype == jnp.bfloat16 and weight_sum.serves(self.rows, self.weight)
        dbias = absent() if is_absent(self.bias) else jnp.zeros(self.weight.shape[:1], jnp.float32)
        return Sums(dweight, weight_sum.exponents_of(dweight) if waits else absent(), dbias)

    def added(self, sums: Sums, dlogits: Any, rows: Any, last: bool) -> Sums:
        dweight, exponents, dbias = sums
        if is_absent(exponents):
            dweight = (dweight + _product(dlogits.T, rows, jnp.float32)).astype(dweight.dtype)
        else:
            dweight, exponents = weight_sum.added(dweight, exponents, dlogits, rows, last=last)
        return Sums(dweight, exponents, dbias if is_absent(dbias) else dbias + jnp.sum(dlogits, 0, dtype=jnp.float32))

    def finished(self, sums: Sums) -> tuple[Any, Any]:
        return sums.dweight.astype(self.sum_dtype), sums.dbias


def _product(a: Any, b: Any, dtype: Any) -> Any:
    """a @ b, summed in fp32: XLA would take TF32 for fp32 operands."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.dot(a, b, precision=precision, preferred_element_type=dtype)


# ---- raw calls -----------------------------------------------------------------------------------------------------


def _row_losses(options: _Options, logits: Any, targets: Any) -> tuple[Any, Any]:
    """Losses and lse of a block."""
    row = jax.ShapeDtypeStruct(targets.shape, jnp.float32)

    def plain(logits: Any, targets: Any, count: Any) -> tuple[Any, ...]:
        _, losses, lse, _, _ = rows_loss._plain_forward(options.by_row, logits, targets)
        return absent(), losses, lse, absent(), absent()

    results = (ABSENT, row, row, ABSENT, ABSENT)
    made = rows_loss._call("cross_entropy_forward", plain, (logits, targets, None), results, (*options.scalars, False))
    return made[1], made[2]


def _row_gradients(options: _Options, logits: Any, targets: Any, divisor: Any) -> tuple[Any, Any]:
    """Gradients in the place of the logits, divided by `divisor` where there is one, and losses."""
    row = jax.ShapeDtypeStruct(targets.shape, jnp.float32)

    def plain(logits: Any, targets: Any, count: Any) -> tuple[Any, ...]:
        _, losses, lse, _, _ = rows_loss._plain_forward(options.by_row, logits, targets)
        one = jnp.ones((), jnp.float32)
        dlogits = rows_loss._plain_gradient(options.by_row, logits, targets, lse, one, count)
        return dlogits, absent(), losses, absent(), absent()

    results = (jax.ShapeDtypeStruct(logits.shape, logits.dtype), ABSENT, row, ABSENT, ABSENT)
    scalars = (*options.scalars, options.reduction == "mean")
    tensors = (logits, targets, divisor)
    made = rows_loss._call("cross_entropy_inplace", plain, tensors, results, scalars, aliases={0: 0})
    return made[0], made[2]


def _row_backward(options: _Options, logits: Any, targets: Any, lse: Any, dloss: Any) -> Any:
    """Gradients of a block's logits for what comes in for each row."""

    def plain(*arrays: Any) -> tuple[Any, ...]:
        return (rows_loss._plain_gradient(options.by_row, *arrays),)

    results = (jax.ShapeDtypeStruct(logits.shape, logits.dtype),)
    tensors = (logits, targets, lse, dloss, None)
    return rows_loss._call("cross_entropy_backward", plain, tensors, results, options.scalars)[0]


def _scaled(gradient: Any, factor: Any) -> Any:
    if 0 in gradient.shape:
        return gradient

    def plain(gradient: Any, factor: Any) -> tuple[Any, ...]:
        return ((gradient.astype(jnp.float32) * factor).astype(gradient.dtype),)

    def scale(gradient: Any, factor: Any) -> tuple[Any, ...]:
        results = (jax.ShapeDtypeStruct(gradient.shape, gradient.dtype),)
        # The launcher reads no scalar. One goes along, since an attribute without any has no type to be told by.
        return call("linear_cross_entropy_scale", plain, (gradient, factor), results, (0.0,), aliases={0: 0})

    return _one_at_a_time(scale)(gradient, factor)[0]
