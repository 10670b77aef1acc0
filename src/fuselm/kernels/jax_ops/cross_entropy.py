"""Cross-entropy for JAX: the raw calls, custom_vjp over them, and the function people call.

The contract is kernels/cross_entropy.py. On CUDA the raw calls run cross_entropy.cu, the same machine code PyTorch
runs, so the results are the same to the bit; elsewhere they are jnp. Under differentiation forward makes the gradient
for an incoming 1, and backward corrects it in place if something else arrives. vmap folds the mapped axis into the rows
where each row has its own loss; sums and means run one member after another.

    loss = cross_entropy(logits, targets)
    losses = cross_entropy(logits, targets, reduction="none", softcap=30.0)
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fuselm.kernels import cross_entropy as contract
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

Options = tuple[int, float, float, float, str]  # ignore_index, label_smoothing, z_loss, softcap (0: none), reduction


def cross_entropy(
    logits: jax.Array,
    targets: jax.Array,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
    inplace: bool = False,
) -> Any:
    """Cross-entropy in fp32 of logits [..., V] and integer targets [...].

    `softcap` bends the logits to softcap * tanh(logits / softcap) first; `z_loss` adds that many times the square of
    each row's log-sum-exp. A target that is `ignore_index`, or outside of [0, V), has loss 0 and gradient 0 and is not
    counted; "mean" is over those that count, and 0 where none does. With jax_debug_nans, and outside of jit, a target
    outside that is not `ignore_index` is refused. `inplace` lets the gradient take the memory of the logits where
    nothing else needs them (XLA copies them otherwise); a gradient other than 1 that arrives is then multiplied in and
    rounded again.
    """
    check_are_arrays(contract.NAME, {"logits": logits, "targets": targets}, {})
    logits_info, targets_info = info(logits), info(targets)
    assert logits_info is not None
    assert targets_info is not None
    contract.check(logits_info, targets_info, ignore_index, label_smoothing, z_loss, softcap, reduction)
    debugging = jax.config.jax_debug_nans  # type: ignore[attr-defined]  # known to JAX at run time only
    if debugging and not isinstance(targets, jax.core.Tracer):
        refuse_strays(contract.NAME, np.asarray(targets), logits.shape[-1], ignore_index)
    cap = 0.0 if softcap is None else float(softcap)
    options = (int(ignore_index), float(label_smoothing), float(z_loss), cap, reduction)
    return _cross_entropy(*alike_over_mesh(logits, targets), options, bool(inplace))


def refuse_strays(op: str, targets: np.ndarray, width: int, ignore_index: int) -> None:
    """Look at every target: for debugging."""
    strays = np.argwhere(((targets < 0) | (targets >= width)) & (targets != ignore_index))
    if len(strays):
        place = tuple(int(index) for index in strays[0])
        raise contract.stray_target(op, int(targets[place]), place, width, ignore_index)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _cross_entropy(logits: Any, targets: Any, options: Options, inplace: bool) -> Any:
    loss, losses, *_ = _forward(options, False)(logits, targets)
    return losses if options[-1] == "none" else loss


def _vjp_forward(logits: Any, targets: Any, options: Options, inplace: bool) -> tuple[Any, Any]:
    if inplace:
        dlogits, loss, losses = _inplace(options)(logits, targets)
        saved = (dlogits, None, None, None, None)
    else:
        loss, losses, lse, counted, dlogits = _forward(options, True)(logits, targets)
        saved = (dlogits, logits, targets, lse, counted)
    return losses if options[-1] == "none" else loss, saved


def _vjp_backward(options: Options, inplace: bool, saved: Any, dloss: Any) -> tuple[Any, None]:
    dlogits, *others, counted = (absent() if array is None else array for array in saved)
    return _correct(options)(dlogits, *others, dloss, counted), None


_cross_entropy.defvjp(_vjp_forward, _vjp_backward)


# ---- raw calls -----------------------------------------------------------------------------------------------------


@functools.cache
def _forward(options: Options, with_gradient: bool) -> Any:
    """(logits, targets) -> (loss, losses, lse, counted, dlogits); losses always, the launcher adds them up."""
    *numbers, reduction = options
    mean, by_row = reduction == "mean", reduction == "none"

    @jax.custom_batching.custom_vmap
    def forward(logits: Any, targets: Any) -> tuple[Any, ...]:
        scalar, row = jax.ShapeDtypeStruct((), jnp.float32), jax.ShapeDtypeStruct(targets.shape, jnp.float32)
        results = (
            ABSENT if by_row else scalar,
            row,
            row if with_gradient else ABSENT,
            scalar if with_gradient and mean else ABSENT,
            jax.ShapeDtypeStruct(logits.shape, logits.dtype) if with_gradient else ABSENT,
        )

        def plain(logits: Any, targets: Any, count: Any) -> tuple[Any, ...]:
            made = _plain_forward(options, logits, targets)
            return tuple(absent() if spec is ABSENT else array for spec, array in zip(results, made, strict=True))

        return _call("cross_entropy_forward", plain, (logits, targets, None), results, (*numbers, mean))

    @forward.def_vmap
    def fold(size: int, mapped: list[bool], logits: Any, targets: Any) -> tuple[Any, Any]:
        if not by_row or 0 in logits.shape:
            return one_by_one(forward, size, mapped, (logits, targets)), (True,) * 5
        made = forward(in_front(size, mapped[0], logits), in_front(size, mapped[1], targets))
        return made, (False, True, with_gradient, False, with_gradient)

    return once_differentiable("cross_entropy", forward)


@functools.cache
def _inplace(options: Options) -> Any:
    """(logits, targets) -> (dlogits in the place of the logits, loss, losses)."""
    *numbers, reduction = options
    mean, by_row = reduction == "mean", reduction == "none"

    @jax.custom_batching.custom_vmap
    def inplace(logits: Any, targets: Any) -> tuple[Any, ...]:
        scalar, row = jax.ShapeDtypeStruct((), jnp.float32), jax.ShapeDtypeStruct(targets.shape, jnp.float32)
        over = jax.ShapeDtypeStruct(logits.shape, logits.dtype)
        results = (over, ABSENT if by_row else scalar, row, ABSENT, scalar if mean else ABSENT)

        def plain(logits: Any, targets: Any, count: Any) -> tuple[Any, ...]:
            loss, losses, _, counted, dlogits = _plain_forward(options, logits, targets)
            return dlogits, absent() if by_row else loss, losses, absent(), counted if mean else absent()

        tensors, scalars = (logits, targets, None), (*numbers, mean)
        return _call("cross_entropy_inplace", plain, tensors, results, scalars, aliases={0: 0})[:3]

    @inplace.def_vmap
    def fold(size: int, mapped: list[bool], logits: Any, targets: Any) -> tuple[Any, Any]:
        if not by_row or 0 in logits.shape:
            return one_by_one(inplace, size, mapped, (logits, targets)), (True,) * 3
        made = inplace(in_front(size, mapped[0], logits), in_front(size, mapped[1], targets))
        return made, (True, False, True)

    return once_differentiable("cross_entropy", inplace)


@functools.cache
def _correct(options: Options) -> Any:
    """(dlogits for an incoming 1, logits, targets, lse, dloss, counted) -> dlogits for dloss; all but two may lack."""
    *numbers, reduction = options

    @jax.custom_batching.custom_vmap
    def correct(dlogits: Any, *others: Any) -> Any:
        def plain(dlogits: Any, logits: Any, targets: Any, lse: Any, dloss: Any, counted: Any) -> tuple[Any, ...]:
            if is_absent(logits):
                factor = dloss[..., None] if dloss.ndim else dloss
                return ((dlogits.astype(jnp.float32) * factor).astype(dlogits.dtype),)
            return (_plain_gradient(options, logits, targets, lse, dloss, counted),)

        results = (jax.ShapeDtypeStruct(dlogits.shape, dlogits.dtype),)
        return _call("cross_entropy_correct", plain, (dlogits, *others), results, numbers, aliases={0: 0})[0]

    @correct.def_vmap
    def fold(size: int, mapped: list[bool], *tensors: Any) -> tuple[Any, Any]:
        if reduction != "none" or 0 in tensors[0].shape:
            return one_by_one(correct, size, mapped, tensors), True
        return correct(*(in_front(size, is_mapped, t) for is_mapped, t in zip(mapped, tensors, strict=True))), True

    return once_differentiable("cross_entropy", correct)


def _call(name: str, plain: Any, tensors: Any, results: Any, scalars: Any, aliases: Any = None) -> tuple[Any, ...]:
    # Targets of no row have the shape that stands for no tensor, and a launcher would have nothing to do.
    if 0 in tensors[0].shape:
        made: tuple[Any, ...] = plain(*(absent() if tensor is None else tensor for tensor in tensors))
        return made
    return call(name, plain, tensors, results, scalars, aliases)


# ---- jnp -----------------------------------------------------------------------------------------------------------


def _plain_forward(options: Options, logits: Any, targets: Any) -> tuple[Any, ...]:
    _, smoothing, z_loss, _, reduction = options
    t = _capped(options, logits)
    top = jnp.max(t, axis=-1)
    below = t - top[..., None]
    log_sum = jnp.log(jnp.sum(jnp.exp(below), axis=-1))
    lse = top + log_sum
    counts, inside = _counting(options, targets, logits.shape[-1])
    losses = log_sum - (1 - smoothing) * jnp.take_along_axis(below, inside[..., None], axis=-1)[..., 0]
    if smoothing:
        losses = losses - smoothing * jnp.mean(below, axis=-1)
    if z_loss:
        losses = losses + z_loss * lse * lse
    losses = jnp.where(counts, losses, 0.0)
    counted = jnp.sum(counts, dtype=jnp.float32)
    loss = jnp.sum(losses) / (jnp.maximum(counted, 1.0) if reduction == "mean" else 1.0)
    one = jnp.ones((), jnp.float32)
    dlogits = _plain_gradient(options, logits, targets, lse, one, counted if reduction == "mean" else absent())
    return loss, losses, lse, counted, dlogits


def _plain_gradient(options: Options, logits: Any, targets: Any, lse: Any, dloss: Any, counted: Any) -> Any:
    _, smoothing, z_loss, softcap, _ = options
    counts, inside = _counting(options, targets, logits.shape[-1])
    factor = dloss if is_absent(counted) else dloss / jnp.maximum(counted, 1.0)
    factor = jnp.where(counts, factor, 0.0)[..., None]  # [..., 1]
    t = _capped(options, logits)
    gradient = jax.nn.softmax(t, axis=-1)  # exp(t - lse) would carry the rounding of the lse
    if z_loss:
        gradient = gradient * (1 + 2 * z_loss * lse[..., None])
    if smoothing:
        gradient = gradient - smoothing / logits.shape[-1]
    columns = jax.lax.broadcasted_iota(inside.dtype, logits.shape, logits.ndim - 1)
    gradient = gradient - jnp.where(columns == inside[..., None], 1 - smoothing, 0.0)
    if softcap:
        gradient = gradient * (1 - jnp.square(t / softcap))
    # A row that does not count has gradient 0 whatever its logits are, NaN included.
    return jnp.where(counts[..., None], factor * gradient, 0.0).astype(logits.dtype)


def _capped(options: Options, logits: Any) -> Any:
    t, softcap = logits.astype(jnp.float32), options[3]
    return softcap * jnp.tanh(t / softcap) if softcap else t


def _counting(options: Options, targets: Any, width: int) -> tuple[Any, Any]:
    """Which targets count, and all of them brought into range, to index with."""
    inside = jnp.clip(targets, 0, width - 1)
    counts = targets == inside
    # No target of a narrower type can be what does not fit into it.
    limits, ignore_index = jnp.iinfo(targets.dtype), options[0]
    if limits.min <= ignore_index <= limits.max:
        counts &= targets != ignore_index
    return counts, inside
