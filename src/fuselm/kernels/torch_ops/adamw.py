"""One step of AdamW over lists of tensors, in place, for PyTorch.

Knows tensors alone: no optimizer, no parameter groups, no schedule. The contract is kernels/adamw.py. On CUDA all
tensors are stepped by one launch of adamw_step.cu; elsewhere, inside torch.compile, and for what does not fill its
memory, by torch's foreach ops.

    adamw([weight], [weight.grad], [exp_avg], [exp_avg_sq], step=1, lr=3e-4, weight_decay=0.1)
    adamw(params, grads, exp_avgs, exp_avg_sqs, step=1, lr=3e-4, weight_decay=[0.1, 0.1, 0.0])
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from fuselm.kernels import adamw as contract
from fuselm.kernels.torch_ops import check_are_tensors, fills_memory, info, is_on_gpu, load_cuda, register
from fuselm.kernels.torch_ops.distributed import any_distributed, is_spread_as, part_here
from fuselm.kernels.torch_ops.places import shares_places

# Of masters there are none, or one for each parameter.
_NAMES = ("params", "grads", "exp_avgs", "exp_avg_sqs", "masters")
_Lists = tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor], list[Tensor]]
_ALIKE = (int, float, tuple)  # options of these are told apart by what they are


def adamw(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    *,
    step: Any,
    lr: Any,
    betas: Any = (0.9, 0.999),
    eps: Any = 1e-8,
    weight_decay: Any = 0.01,
    masters: Sequence[Tensor] | None = None,
    grad_scale: Tensor | None = None,
    skip: Tensor | None = None,
) -> None:
    """Update params, exp_avgs, exp_avg_sqs and masters in place; grads stay as they are.

    `step` is the number of this step, from 1, and `lr` the learning rate: numbers, or 0-dim tensors on the device,
    which torch.compile and CUDA graphs take as inputs. These two, `betas`, `eps` and `weight_decay` are one for all
    tensors, or a list with one for each. `masters` are the fp32 twins of 16-bit parameters, without an element for a
    parameter that has none: they are stepped, and the parameters become what they round to, whatever those were before
    (so an fp32 parameter wants none). `grad_scale` is a 0-dim tensor that multiplies every gradient. `skip` is a 0-dim
    bool tensor: where it is true nothing changes, whatever the gradients are; without a kernel an eager call with
    `skip` waits for the device. A tensor's new bits do not depend on which other tensors are in the lists. Of DTensors,
    as FSDP2 makes, each rank steps what it has; gradients come to lie as their parameters do.
    """
    lists: _Lists = (list(params), list(grads), list(exp_avgs), list(exp_avg_sqs), list(masters or ()))
    if not is_compiling() and any_distributed([*lists[0], grad_scale, skip]):
        options: Any = {"step": step, "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        _step_parts(adamw, lists, grad_scale, skip, options)
        return
    table = _Table.of(len(lists[0]), step, lr, betas, eps, weight_decay)
    grad_scale, skip = contract.of_numpy(grad_scale), contract.of_numpy(skip)
    if is_compiling() or not (lists[0] and is_on_gpu(lists[0][0])):
        _check(lists, table, grad_scale, skip)
        _plain(lists, table, grad_scale, skip)
        return
    try:
        _fused(lists, table, grad_scale, skip)
        return
    except (RuntimeError, TypeError) as caught:
        error = caught
    _check(lists, table, grad_scale, skip)
    # No CUDA implementation yet: these are the first CUDA tensors.
    if isinstance(error, NotImplementedError) and load_cuda():
        options = {"step": step, "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        adamw(*lists[:4], masters=lists[4], grad_scale=grad_scale, skip=skip, **options)
        return
    regular = [index for index in range(len(lists[0])) if _is_regular(lists, index)]
    if len(regular) == len(lists[0]):
        raise error
    odd = sorted(set(range(len(lists[0]))) - set(regular))
    if regular:
        _fused(_chosen(lists, regular), table.chosen(regular), grad_scale, skip)
    _plain(_chosen(lists, odd), table.chosen(odd), grad_scale, skip)


def adamw_reference(*lists: Any, masters: Sequence[Tensor] | None = None, **options: Any) -> None:
    """The same by torch's foreach ops, on every device: the yardstick for errors."""
    given: _Lists = (*(list(tensors) for tensors in lists), list(masters or ()))  # type: ignore[assignment]
    grad_scale, skip = options.pop("grad_scale", None), options.pop("skip", None)
    if not is_compiling() and any_distributed([*given[0], grad_scale, skip]):
        _step_parts(adamw_reference, given, grad_scale, skip, options)
        return
    defaults = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
    table = _Table.of(len(given[0]), **{**defaults, **options})
    _check(given, table, grad_scale, skip)
    _plain(given, table, grad_scale, skip)


# --- options ----------------------------------------------------------------------------------------------------------


class _Options(NamedTuple):
    """What a tensor is stepped by."""

    step: Any
    lr: Any
    betas: tuple[float, float]
    eps: float
    weight_decay: float


class _Table(NamedTuple):
    """The different options there are, and which of them is whose."""

    options: list[_Options]
    groups: list[int]

    @classmethod
    def of(cls, count: int, step: Any, lr: Any, betas: Any, eps: Any, weight_decay: Any) -> _Table:
        given = (step, lr, betas, eps, weight_decay)
        lengths = {name: len(one) for name, one in zip(_Options._fields, given, strict=True) if isinstance(one, list)}
        if not lengths:
            contract.check_step(step)
            contract.check_rates(lr=lr, eps=eps, weight_decay=weight_decay)
            return cls([_Options(*given)], [0] * count)
        contract.check_lengths(count, lengths)
        known: dict[Any, int] = {}
        options: list[_Options] = []
        groups = []
        for row in zip(*(option if isinstance(option, list) else [option] * count for option in given), strict=True):
            key = tuple(o if isinstance(o, _ALIKE) else _key(o) for o in row)
            if key not in known:
                known[key] = len(options)
                options.append(_Options(*row))
                contract.check_step(row[0])
                contract.check_rates(lr=row[1], eps=row[3], weight_decay=row[4])
            groups.append(known[key])
        return cls(options, groups)

    def chosen(self, indices: Sequence[int]) -> _Table:
        return _Table(self.options, [self.groups[index] for index in indices])


def _key(option: Any) -> Any:
    """What an option is told apart by that has no hash, or, as a tensor, one that says nothing of its number."""
    if isinstance(option, list):
        return tuple(option)
    return id(option) if isinstance(option, Tensor) or type(option).__hash__ is None else option


def _chosen(lists: _Lists, indices: Sequence[int]) -> _Lists:
    return tuple([tensors[index] for index in indices] if tensors else [] for tensors in lists)  # type: ignore[return-value]


def _check(lists: _Lists, table: _Table, grad_scale: Any, skip: Any) -> None:
    device = str(lists[0][0].device) if lists[0] and isinstance(lists[0][0], Tensor) else ""
    scalars = [pair for pair in (("grad_scale", grad_scale), ("skip", skip)) if pair[1] is not None]
    for options in table.options:
        scalars += [pair for pair in zip(_Options._fields, options, strict=True) if isinstance(pair[1], Tensor)]
    for name, scalar in scalars:
        contract.check_scalars({name: info(scalar) if isinstance(scalar, Tensor) else scalar}, device)
    for list_name, tensors in zip(_NAMES, lists, strict=True):
        # What is None is left to the contract, which has the remedy.
        there = {f"{list_name}[{index}]": tensor for index, tensor in enumerate(tensors) if tensor is not None}
        check_are_tensors("adamw", there, {})
    params, grads, exp_avgs, exp_avg_sqs, masters = ([info(t) for t in tensors] for tensors in lists)
    others: Any = {"grads": grads, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs}
    contract.check(params, others, masters, [options.betas for options in table.options])  # type: ignore[arg-type]
    if not is_compiling():
        _check_places(lists)


def _check_places(lists: _Lists) -> None:
    """Refuse what has less memory than elements: torch would, when other tensors have been written over."""
    for name, tensors in zip(_NAMES, lists, strict=True):
        # torch sees at once what is usual: of most lists nothing else is asked.
        odd = name != "grads" and any(map(torch._debug_has_internal_overlap, tensors))
        for index, tensor in enumerate(tensors if odd else ()):
            if shares_places(tensor):
                raise contract.cannot_overwrite(f"{name}[{index}]", name, info(tensor))


# --- DTensors ---------------------------------------------------------------------------------------------------------


def _step_parts(step: Any, lists: _Lists, grad_scale: Any, skip: Any, options: Any) -> None:
    """Step what lies here of each parameter."""
    for name, tensors in zip(_NAMES, lists, strict=True):
        if name == "grads":  # what is only read may come from elsewhere
            continue
        for index, (tensor, param) in enumerate(zip(tensors, lists[0], strict=False)):
            if isinstance(tensor, Tensor) and tensor.numel() and not is_spread_as(tensor, param):
                raise contract.spread_otherwise(f"{name}[{index}]", name)
    # As long as they came, whose words the contract has.
    here = [[part_here(*pair) for pair in itertools.zip_longest(one, lists[0])][: len(one)] for one in lists]
    step(*here[:4], masters=here[4], grad_scale=part_here(grad_scale, None), skip=part_here(skip, None), **options)
    torch.autograd.graph.increment_version([*lists[0], *lists[2], *lists[3], *lists[4]])


# --- one launch -------------------------------------------------------------------------------------------------------


def _fused(lists: _Lists, table: _Table, grad_scale: Tensor | None, skip: Tensor | None) -> None:
    like = lists[0][0]
    on_device = any(isinstance(one, Tensor) for options in table.options for one in options[:2])
    scalars = [_on(like, one) for options in table.options for one in (options.lr, options.step)] if on_device else []
    numbers = [
        float(number)
        for o in table.options
        for number in (0.0 if on_device else o.lr, *o.betas, o.eps, o.weight_decay, 1.0 if on_device else o.step)
    ]
    scale = None if grad_scale is None else _on(like, grad_scale)
    skips = None if skip is None else _on(like, skip, torch.bool)
    _step(*lists, scalars, numbers, table.groups, scale, skips, 0)
    torch.autograd.graph.increment_version([*lists[0], *lists[2], *lists[3], *lists[4]])


def _on(like: Tensor, scalar: Any, dtype: torch.dtype = torch.float32) -> Tensor:
    """A scalar as a tensor on the device."""
    if not isinstance(scalar, Tensor):
        return torch.full((), scalar, dtype=dtype, device=like.device)
    if scalar.dim() or scalar.is_complex():
        raise TypeError("a scalar with dimensions, or two parts")  # for which check() has the words
    return scalar.detach().to(like.device, dtype, non_blocking=True)


def _is_regular(lists: _Lists, index: int) -> bool:
    """Whether a kernel takes a parameter: one without gaps, whose company lies in memory as it does."""
    param, masters = lists[0][index], lists[4]
    others = [tensors[index] for tensors in lists[1:4]] + [m for m in masters[index : index + 1] if m.numel()]
    dense = torch.float64 not in (param.dtype, lists[1][index].dtype) and fills_memory(param)
    return dense and param.dim() <= 8 and all(_strides(other) == _strides(param) for other in others)


def _strides(tensor: Tensor) -> list[int]:
    """Those that matter: of what has one element along a dimension the stride there says nothing."""
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1]


# --- by torch's own ops -----------------------------------------------------------------------------------------------


def _plain(lists: _Lists, table: _Table, grad_scale: Tensor | None, skip: Tensor | None) -> None:
    compiling = is_compiling()
    if skip is not None and not compiling and bool(skip):
        return
    params, _, exp_avgs, exp_avg_sqs, masters = lists
    with torch.no_grad():
        # In a compiled graph copies cost nothing: old and new values meet in registers.
        changing = [*params, *exp_avgs, *exp_avg_sqs, *masters] if skip is not None and compiling else []
        before = [tensor.clone() for tensor in changing]
        for batch, options in _batches(lists, table):
            _update(batch, _Scalars.of(batch[2][0], *options), options.betas, grad_scale)
        for tensor, old in zip(changing, before, strict=True):
            tensor.copy_(torch.where(skip, old, tensor))  # type: ignore[arg-type]


class _Scalars(NamedTuple):
    """What is the same for all elements: numbers, or tensors if `step` or `lr` is one."""

    decay: Any  # lr weight_decay, or None without a decay
    shift: Any  # eps sqrt(c2)
    rate: Any  # lr sqrt(c2) / c1

    @classmethod
    def of(cls, like: Tensor, step: Any, lr: Any, betas: tuple[float, float], eps: float, decay: float) -> _Scalars:
        # Multiplying by sqrt(c2) above and below the fraction leaves one pass over the denominator fewer.
        step, lr = _beside(like, step), _beside(like, lr)
        root = _correction(step, betas[1]) ** 0.5
        return cls(lr * decay if decay else None, eps * root, lr * root / _correction(step, betas[0]))


def _beside(like: Tensor, scalar: Any) -> Any:
    """A scalar tensor with the states' dtype and on their device, as foreach kernels want it; a number as it is."""
    return scalar.to(like.device, like.dtype, non_blocking=True) if isinstance(scalar, Tensor) else scalar


def _correction(step: Any, beta: float) -> Any:
    """1 - beta^step."""
    if not isinstance(step, Tensor):
        return 1 - beta**step
    # In fp32 the difference would lose four digits at step 1 with beta 0.9999; expm1 loses none.
    return -torch.expm1(step * (math.log(beta) if beta else -math.inf))


def _update(lists: _Lists, scalars: _Scalars, betas: tuple[float, float], grad_scale: Tensor | None) -> None:
    params, grads, exp_avgs, exp_avg_sqs, masters = lists
    dtype = exp_avgs[0].dtype
    wide_params = masters or _as_dtype(params, dtype)
    wide_grads = _as_dtype(grads, dtype)
    if grad_scale is not None:
        wide_grads = list(torch._foreach_mul(wide_grads, _beside(exp_avgs[0], grad_scale)))
    torch._foreach_lerp_(exp_avgs, wide_grads, 1 - betas[0])
    torch._foreach_mul_(exp_avg_sqs, betas[1])
    torch._foreach_addcmul_(exp_avg_sqs, wide_grads, wide_grads, 1 - betas[1])
    del wide_grads  # a copy, if there is one, goes before the denominators come
    # Not times 1 - decay: that number's own rounding, the same at every step, is soon the largest error of all.
    if isinstance(scalars.decay, Tensor):
        torch._foreach_sub_(wide_params, torch._foreach_mul(wide_params, scalars.decay))
    elif scalars.decay is not None:
        torch._foreach_add_(wide_params, wide_params, alpha=-scalars.decay)
    denominators = list(torch._foreach_sqrt(exp_avg_sqs))
    torch._foreach_add_(denominators, scalars.shift)
    if isinstance(scalars.rate, Tensor):  # addcdiv takes a number only
        torch._foreach_div_(denominators, -scalars.rate)
        torch._foreach_addcdiv_(wide_params, exp_avgs, denominators)
    else:
        torch._foreach_addcdiv_(wide_params, exp_avgs, denominators, -scalars.rate)
    if masters or params[0].dtype != dtype:
        torch._foreach_copy_(params, wide_params)


def _as_dtype(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The tensors themselves, or copies where they have another dtype."""
    if tensors[0].dtype == dtype:
        return tensors
    copies = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
    torch._foreach_copy_(copies, tensors)
    return copies


def _batches(lists: _Lists, table: _Table) -> list[tuple[_Lists, _Options]]:
    """Parts of the lists that share options and dtypes; what does not lie in memory like its states stands alone.

    A foreach call with one odd tensor takes its slow route for all of them, whose roundings may be others: without this
    a tensor's bits would depend on its company.
    """
    batches: dict[Any, tuple[_Lists, _Options]] = {}
    masters = lists[4]
    for index, (group, *four) in enumerate(zip(table.groups, *lists[:4], strict=True)):
        param, grad, exp_avg, exp_avg_sq = four
        if not param.numel():
            continue
        master = masters[index : index + 1] if masters and masters[index].numel() else []
        strides = param.stride()
        others = (grad, exp_avg, exp_avg_sq, *master)
        regular = param.is_contiguous() and all(other.stride() == strides for other in others)
        key = (group, param.dtype, grad.dtype, len(master), -1 if regular else index)
        batch, _ = batches.setdefault(key, (([], [], [], [], []), table.options[group]))
        for members, tensor in zip(batch, (param, *others), strict=False):
            members.append(tensor)
    return list(batches.values())


# --- the raw op -------------------------------------------------------------------------------------------------------


def _plain_step(*given: Any) -> None:
    lists, table, grad_scale, skip = _given(*given)
    _plain(lists, table, grad_scale, skip)


def _fake_step(*given: Any) -> None:
    """Nothing comes back; tensors of which one has no memory come here too, and are refused."""
    _check(*_given(*given))


def _given(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    masters: list[Tensor],
    scalars: list[Tensor],
    numbers: list[float],
    groups: list[int],
    grad_scale: Tensor | None,
    skip: Tensor | None,
    outputs: int,
) -> tuple[_Lists, _Table, Tensor | None, Tensor | None]:
    """What the raw op was given, as it was before it became lists of numbers."""
    options = []
    for group in range(len(numbers) // 6):
        lr, beta1, beta2, eps, decay, step = numbers[6 * group : 6 * group + 6]
        own = scalars[2 * group : 2 * group + 2] if scalars else (lr, step)
        options.append(_Options(own[1], own[0], (beta1, beta2), eps, decay))
    lists = (list(params), list(grads), list(exp_avgs), list(exp_avg_sqs), list(masters))
    return lists, _Table(options, list(groups)), grad_scale, skip


_step = register(
    "adamw_step(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs,"
    " Tensor(d!)[] masters, Tensor[] scalars, float[] options, int[] groups, Tensor? grad_scale, Tensor? skip,"
    " int outputs) -> ()",
    _plain_step,
    _fake_step,
)
