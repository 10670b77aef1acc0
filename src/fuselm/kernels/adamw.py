"""AdamW and the norm of all gradients: their mathematics, their contract and their truth in float64.

With g the gradient times `grad_scale`,

    exp_avg    <- beta1 exp_avg    + (1 - beta1) g
    exp_avg_sq <- beta2 exp_avg_sq + (1 - beta2) g²
    param      <- (1 - lr weight_decay) param - lr / c1 · exp_avg / (sqrt(exp_avg_sq) / sqrt(c2) + eps)

where c1 = 1 - beta1^step and c2 = 1 - beta2^step undo the zeros the averages started from. Both averages are fp32 for
16-bit parameters and of the parameter's dtype otherwise; all arithmetic is in their dtype. A 16-bit parameter may have
an fp32 twin, its master: then that is what is stepped, and the parameter is the master, rounded. Without one, updates
smaller than half of the parameter's last digit are lost. An fp32 parameter wants no master: it becomes a copy
of one that it is given, whatever it was before.

A gradient that is NaN or infinite makes its element NaN, as in torch, unless `skip` says that nothing is to change.

It is no function of tensors with a gradient, so it is not in the registry (spec.py): tests/kernels/test_adamw.py and
bench/optimizer.py are its own. Knows numpy and no framework.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fuselm.kernels.spec import RefusedInput, TensorInfo, is_of_numpy, refuse

# What the averages of a parameter are kept in.
STATE_DTYPES = {"float64": "float64", "float32": "float32", "bfloat16": "float32", "float16": "float32"}
# The ops whose contract this is, and the source of each.
LIST_OPS = {"adamw": "adamw_step.cu", "global_norm": "global_norm.cu"}
NORM_CHUNK = 8192  # elements whose squares one block of global_norm.cu adds up

Infos = Sequence[TensorInfo]


def check(params: Infos, others: Mapping[str, Infos], masters: Infos, betas: Sequence[Any]) -> None:
    """Raise RefusedInput for the first rule that is broken; `others` are grads, exp_avgs and exp_avg_sqs by name.

    `masters` is empty or has one for each parameter, without an element where there is none. A None is refused where a
    tensor must be.
    """
    if any(len(tensors) != len(params) for tensors in others.values()) or len(masters) not in (0, len(params)):
        named = {"params": params, **others, **({"masters": masters} if masters else {})}
        raise refuse(
            f"adamw: the {'five' if masters else 'four'} lists must have one length",
            ", ".join(f"{len(tensors)} {name}" for name, tensors in named.items()),
            "Leave a parameter without a gradient out of all of them.",
        )
    _check_there({"params": params, **others, "masters": masters})
    for pair in betas:
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not all(_is_beta(beta) for beta in pair):
            raise refuse(
                "adamw: betas must be two numbers, 0 or more and below 1",
                str(pair),
                "Pass a tuple of two for all tensors, or a list with one for each.",
            )
    check_params(params)
    for name, tensors in others.items():
        for index, tensor in enumerate(tensors):
            _check_like(f"{name}[{index}]", name, tensor, params[index])
    for index, master in enumerate(masters):
        if math.prod(master.shape):
            _check_like(f"masters[{index}]", "masters", master, params[index])
        elif master.device != params[index].device:
            raise refuse(
                "adamw: each of masters must be on its parameter's device, also one without an element",
                f"masters[{index}] on {master.device} for a parameter on {params[index].device}",
                f"Move it to {params[index].device}.",
            )
    _check_dtypes(params, others, masters)


def check_lengths(count: int, lengths: Mapping[str, int]) -> None:
    """Refuse options that are lists of another length than the tensors'."""
    for name, length in lengths.items():
        if length != count:
            rule = f"adamw: {name} must be one for all tensors, or a list with one for each"
            raise refuse(rule, f"a list of {length} for {count}", "Give each parameter its own, or all of them one.")


def check_scalars(scalars: Mapping[str, Any], device: str = "") -> None:
    """Refuse a step, learning rate, scale or word to skip that is neither a number nor a tensor without dimensions.

    A tensor comes as its TensorInfo. One on meta holds no number, which parameters on a `device` of memory want.
    """
    for name, scalar in scalars.items():
        rule = f"adamw: {name} must be a number or a 0-dim tensor"
        if not isinstance(scalar, TensorInfo):
            if not isinstance(of_numpy(scalar), int | float):
                raise refuse(rule, f"a {type(scalar).__name__}", "Pass one number or one such tensor, for all of them.")
        elif scalar.dtype.startswith("complex"):
            raise refuse(rule, f"{name} {scalar}", "Take its real part.")
        elif scalar.shape:
            or_list = "" if name in ("grad_scale", "skip") else ", or a list with one for each"
            raise refuse(rule, f"{name} {scalar}", f"Take the one element that counts{or_list}.")
        elif scalar.device == "meta" and device not in ("", "meta"):
            raise refuse(rule, f"{name} {scalar}, where no numbers are", f"Make it on {device}, or pass a number.")


def of_numpy(value: Any) -> Any:
    """A real number of numpy's, also in an array without dimensions, as Python has it; else what came."""
    if not is_of_numpy(value) or getattr(value, "shape", None) != ():
        return value
    number = value.item()
    return number if isinstance(number, int | float) else value


def check_step(step: Any) -> None:
    """Refuse a step below 1, or none; a tensor, which nobody reads, passes. Asked as `check_rates` is."""
    number = of_numpy(step)
    if not isinstance(number, int | float):
        if is_of_numpy(step) or not hasattr(step, "shape"):
            rule = "adamw: step must be a number or a 0-dim tensor"
            raise refuse(rule, f"a {type(step).__name__}", "Count the first step as 1.")
    elif not number >= 1:
        raise refuse("adamw: step must be 1 or more", str(step), "Count the first step as 1.")


def check_rates(**rates: Any) -> None:
    """Refuse a learning rate, weight decay or eps that is below 0 or no number; tensors, which nobody reads, pass.

    Asked in every call, once for each set of options: a step uphill would go unnoticed.
    """
    for name, rate in rates.items():
        number = of_numpy(rate)
        if hasattr(number, "shape") and not is_of_numpy(number):
            continue
        if isinstance(number, bool) or not isinstance(number, int | float) or not number >= 0:
            rule = f"adamw: {name} must be a number, 0 or more" + (", or a 0-dim tensor" if name == "lr" else "")
            raise refuse(rule, repr(rate), f"Pass such a number for {name}.")


def _is_beta(beta: Any) -> bool:
    return isinstance(beta, int | float) and 0 <= beta < 1


def _check_there(lists: Mapping[str, Sequence[TensorInfo | None]]) -> None:
    for name, tensors in lists.items():
        for index, tensor in enumerate(tensors):
            if tensor is None:
                remedy = "Leave a parameter without a gradient out of all lists."
                if name == "masters":
                    remedy = "Pass a tensor without an element for a parameter that has no master."
                raise refuse(f"adamw: each of {name} must be a tensor", f"{name}[{index}], which is None", remedy)


def check_params(params: Infos) -> None:
    """Refuse parameters of a dtype that no step is for, or on several devices."""
    for index, param in enumerate(params):
        if param.dtype not in STATE_DTYPES:
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


def cannot_overwrite(which: str, name: str, tensor: TensorInfo | None) -> RefusedInput:
    """The words for a tensor of which several elements are one number in memory."""
    rule = f"adamw: each of {name} must have a place in memory for each of its elements"
    return refuse(rule, f"{which} {tensor}, of which several share one", f"Pass {name} that are cloned.")


def spread_otherwise(which: str, name: str) -> RefusedInput:
    """The words for a DTensor that is to be written over and has other elements on a rank than its parameter."""
    rule = f"adamw: each of {name} must be spread over ranks as its parameter is"
    return refuse(rule, f"{which} spread otherwise", f"Make {name} by torch.zeros_like of parameters.")


def _check_like(which: str, name: str, tensor: TensorInfo, param: TensorInfo) -> None:
    if tensor.shape != param.shape or tensor.device != param.device:
        where, there = (f" on {info.device}" if info.device else "" for info in (tensor, param))
        raise refuse(
            f"adamw: each of {name} must have its parameter's shape and device",
            f"{which} {list(tensor.shape)}{where} for a parameter {list(param.shape)}{there}",
            "Keep the lists in one order.",
        )


def _check_dtypes(params: Infos, others: Mapping[str, Infos], masters: Infos) -> None:
    for index, param in enumerate(params):
        wanted = STATE_DTYPES[param.dtype]
        for name in ("exp_avgs", "exp_avg_sqs"):
            if others[name][index].dtype != wanted:
                raise refuse(
                    f"adamw: the states of a {param.dtype} parameter must be {wanted}",
                    f"{name}[{index}] of {others[name][index].dtype}",
                    "Convert the state once, before training.",
                )
        if others["grads"][index].dtype not in STATE_DTYPES:
            raise refuse(
                "adamw: a gradient must be a real floating-point tensor",
                f"grads[{index}] of {others['grads'][index].dtype}",
                "Leave the parameter out.",
            )
        if masters and math.prod(masters[index].shape) and masters[index].dtype != wanted:
            raise refuse(
                f"adamw: the master of a {param.dtype} parameter must be {wanted}",
                f"masters[{index}] of {masters[index].dtype}",
                "Make it by converting the parameter once, before training.",
            )


def oracle(
    param: Any,
    grad: Any,
    exp_avg: Any,
    exp_avg_sq: Any,
    *,
    step: float,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    grad_scale: float = 1.0,
) -> tuple[Any, Any, Any]:
    """New param, exp_avg and exp_avg_sq of one tensor, in float64; nothing is written over."""
    g = grad * grad_scale
    exp_avg = betas[0] * exp_avg + (1 - betas[0]) * g
    exp_avg_sq = betas[1] * exp_avg_sq + (1 - betas[1]) * g * g
    mean = exp_avg / (1 - betas[0] ** step)
    root = (exp_avg_sq / (1 - betas[1] ** step)) ** 0.5
    return (1 - lr * weight_decay) * param - lr * mean / (root + eps), exp_avg, exp_avg_sq


def cost_bytes(sizes: Sequence[int], param_bytes: int = 4, grad_bytes: int = 4, master: bool = False) -> int:
    """The fewest bytes a step over parameters of these sizes can move."""
    # Both averages are read and written; so is what is stepped; and a parameter beside its master is only written.
    each = 16 + grad_bytes + (8 + param_bytes if master else 2 * param_bytes)
    return each * sum(sizes)
