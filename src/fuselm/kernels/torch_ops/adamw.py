"""One step of AdamW over lists of tensors, in place, for PyTorch.

Knows tensors alone: no optimizer, no parameter groups, no schedule. With g the gradient times `grad_scale`,

    exp_avg    <- beta1 exp_avg    + (1 - beta1) g
    exp_avg_sq <- beta2 exp_avg_sq + (1 - beta2) g²
    param      <- (1 - lr weight_decay) param - lr / c1 · exp_avg / (sqrt(exp_avg_sq) / sqrt(c2) + eps)

where c1 = 1 - beta1^step and c2 = 1 - beta2^step undo the zeros the averages started from. Both averages are fp32 for
16-bit parameters and of the parameter's dtype otherwise; all arithmetic is in their dtype.

    adamw([weight], [weight.grad], [exp_avg], [exp_avg_sq], step=1, lr=3e-4, weight_decay=0.1)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fuselm.kernels.spec import refuse

_STATE_DTYPES = {
    torch.float64: torch.float64,
    torch.float32: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
}
# params, grads, exp_avgs, exp_avg_sqs
_Batch = tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]


def adamw(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    *,
    step: int | Tensor,
    lr: float | Tensor,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    grad_scale: Tensor | None = None,
    skip: Tensor | None = None,
) -> None:
    """Update params, exp_avgs and exp_avg_sqs in place; grads stay as they are.

    `step` is the number of this step, from 1, and `lr` the learning rate: numbers, or 0-dim tensors on the device,
    which torch.compile and CUDA graphs take as inputs. `grad_scale` is a 0-dim tensor that multiplies every gradient.
    `skip` is a 0-dim bool tensor: where it is true nothing changes, whatever the gradients are. Only an eager call with
    `skip` waits for the device. A tensor's new bits do not depend on which other tensors are in the lists.
    """
    _check(params, grads, exp_avgs, exp_avg_sqs, step)
    compiling = torch.compiler.is_compiling()
    if skip is not None and not compiling and bool(skip):
        return
    with torch.no_grad():
        # In a compiled graph copies cost nothing: old and new values meet in registers.
        changing = [*params, *exp_avgs, *exp_avg_sqs] if skip is not None and compiling else []
        before = [tensor.clone() for tensor in changing]
        for batch in _batches(params, grads, exp_avgs, exp_avg_sqs):
            _update(batch, _Scalars.of(batch[2][0], step, lr, betas, eps, weight_decay), betas, grad_scale)
        for tensor, old in zip(changing, before, strict=True):
            tensor.copy_(torch.where(skip, old, tensor))  # type: ignore[arg-type]


class _Scalars(NamedTuple):
    """What is the same for all elements: numbers, or tensors if `step` or `lr` is one."""

    keep: Any  # (1 - lr weight_decay), or None without a decay
    shift: Any  # eps sqrt(c2)
    rate: Any  # lr sqrt(c2) / c1

    @classmethod
    def of(cls, like: Tensor, step: Any, lr: Any, betas: tuple[float, float], eps: float, decay: float) -> _Scalars:
        # Multiplying by sqrt(c2) above and below the fraction leaves one pass over the denominator fewer.
        step, lr = _beside(like, step), _beside(like, lr)
        root = _correction(step, betas[1]) ** 0.5
        keep = 1 - lr * decay if decay else None
        return cls(keep, eps * root, lr * root / _correction(step, betas[0]))


def _beside(like: Tensor, scalar: Any) -> Any:
    """A scalar tensor with the states' dtype and on their device, as foreach kernels want it; a number as it is."""
    return scalar.to(like.device, like.dtype, non_blocking=True) if isinstance(scalar, Tensor) else scalar


def _correction(step: Any, beta: float) -> Any:
    """1 - beta^step."""
    if not isinstance(step, Tensor):
        return 1 - beta**step
    # In fp32 the difference would lose four digits at step 1 with beta 0.9999; expm1 loses none.
    return -torch.expm1(step * (math.log(beta) if beta else -math.inf))


def _update(batch: _Batch, scalars: _Scalars, betas: tuple[float, float], grad_scale: Tensor | None) -> None:
    params, grads, exp_avgs, exp_avg_sqs = batch
    dtype = exp_avgs[0].dtype
    wide_params = _as_dtype(params, dtype)
    wide_grads = _as_dtype(grads, dtype)
    if grad_scale is not None:
        wide_grads = list(torch._foreach_mul(wide_grads, _beside(exp_avgs[0], grad_scale)))
    torch._foreach_lerp_(exp_avgs, wide_grads, 1 - betas[0])
    torch._foreach_mul_(exp_avg_sqs, betas[1])
    torch._foreach_addcmul_(exp_avg_sqs, wide_grads, wide_grads, 1 - betas[1])
    del wide_grads  # a copy, if there is one, goes before the denominators come
    denominators = list(torch._foreach_sqrt(exp_avg_sqs))
    torch._foreach_add_(denominators, scalars.shift)
    if scalars.keep is not None:
        torch._foreach_mul_(wide_params, scalars.keep)
    if isinstance(scalars.rate, Tensor):  # addcdiv takes a number only
        torch._foreach_div_(denominators, -scalars.rate)
        torch._foreach_addcdiv_(wide_params, exp_avgs, denominators)
    else:
        torch._foreach_addcdiv_(wide_params, exp_avgs, denominators, -scalars.rate)
    if params[0].dtype != dtype:
        torch._foreach_copy_(params, wide_params)


def _as_dtype(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The tensors themselves, or copies where they have another dtype."""
    if tensors[0].dtype == dtype:
        return tensors
    copies = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
    torch._foreach_copy_(copies, tensors)
    return copies


# --- lists that one kernel takes --------------------------------------------------------------------------------------


def _batches(*lists: Sequence[Tensor]) -> list[_Batch]:
    """Parts of the lists that share their dtypes; what does not lie in memory like its states stands alone.

    A foreach call with one odd tensor takes its slow route for all of them, whose roundings may be others: without this
    a tensor's bits would depend on its company.
    """
    batches: dict[Any, _Batch] = {}
    for index, four in enumerate(zip(*lists, strict=True)):
        param, grad, exp_avg, exp_avg_sq = four
        if not param.numel():
            continue
        strides = param.stride()
        regular = param.is_contiguous() and grad.stride() == exp_avg.stride() == exp_avg_sq.stride() == strides
        batch = batches.setdefault((param.dtype, grad.dtype, -1 if regular else index), ([], [], [], []))
        for members, tensor in zip(batch, four, strict=True):
            members.append(tensor)
    return list(batches.values())


# --- refusals ---------------------------------------------------------------------------------------------------------


def _check(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    step: int | Tensor,
) -> None:
    named = {"grads": grads, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs}
    if not len(params) == len(grads) == len(exp_avgs) == len(exp_avg_sqs):
        lengths = ", ".join(f"{len(tensors)} {name}" for name, tensors in {"params": params, **named}.items())
        raise refuse(
            "adamw: the four lists must have one length",
            lengths,
            "Leave a parameter without a gradient out of all of them.",
        )
    if not isinstance(step, Tensor) and step < 1:
        raise refuse("adamw: step must be 1 or more", str(step), "Count the first step as 1.")
    _check_params(params)
    shapes = [param.shape for param in params]
    devices = [param.device for param in params]
    for name, tensors in named.items():
        for index, tensor in enumerate(tensors):
            if tensor.shape != shapes[index] or tensor.device != devices[index]:
                raise refuse(
                    f"adamw: each of {name} must have its parameter's shape and device",
                    f"{name}[{index}] {list(tensor.shape)} on {tensor.device} for a parameter "
                    f"{list(shapes[index])} on {devices[index]}",
                    "Keep the four lists in one order.",
                )
    _check_dtypes(params, named)


def _check_params(params: Sequence[Tensor]) -> None:
    for index, param in enumerate(params):
        if param.dtype not in _STATE_DTYPES:
            raise refuse(
                "adamw: a parameter must be float64, float32, bfloat16 or float16",
                f"params[{index}] of {param.dtype}",
                "Leave it out, or convert it.",
            )
        if param.device != params[0].device:
            raise refuse(
                "adamw: all parameters of a call must be on one device",
                f"params[0] on {params[0].device}, params[{index}] on {param.device}",
                "Call it once for each device.",
            )


def _check_dtypes(params: Sequence[Tensor], named: dict[str, Sequence[Tensor]]) -> None:
    for index, param in enumerate(params):
        wanted = _STATE_DTYPES[param.dtype]
        for name in ("exp_avgs", "exp_avg_sqs"):
            if named[name][index].dtype != wanted:
                raise refuse(
                    f"adamw: the states of a {param.dtype} parameter must be {wanted}",
                    f"{name}[{index}] of {named[name][index].dtype}",
                    "Convert the state once, before training.",
                )
        if named["grads"][index].dtype not in _STATE_DTYPES:
            raise refuse(
                "adamw: a gradient must be a real floating-point tensor",
                f"grads[{index}] of {named['grads'][index].dtype}",
                "Leave the parameter out.",
            )
