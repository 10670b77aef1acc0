"""AdamW for JAX: one step over whole pytrees, and the state it keeps.

The contract is kernels/adamw.py. On CUDA one launch of adamw_step.cu steps every leaf, the same machine code PyTorch
runs; elsewhere it is jnp. Everything is an argument and a result: under jit, donate params and state, and they are
stepped where they lie.

    state = adamw_init(params)
    params, state = adamw(params, grads, state, lr=3e-4, weight_decay=0.1)
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fuselm.kernels import adamw as contract
from fuselm.kernels.jax_ops import as_listed, axes_over_mesh, call, check_are_arrays, info, is_absent
from fuselm.kernels.spec import check_number, refuse


class AdamWState(NamedTuple):
    """Steps taken (a 0-dim fp32 array), both averages, and masters: pytrees like the parameters, or None."""

    step: Any
    exp_avg: Any
    exp_avg_sq: Any
    master: Any = None


class _Group(NamedTuple):
    """What leaves are stepped by, as far as it is known when a call is traced."""

    beta1: float
    beta2: float
    eps: float
    weight_decay: float


def adamw_init(params: Any, *, master_weights: bool = False) -> AdamWState:
    """The state before the first step: averages of 0 in fp32 and, if asked for, fp32 twins of 16-bit parameters.

    An fp32 parameter needs no twin: it has an array without an element there.
    """
    zeros = functools.partial(jax.tree.map, lambda leaf: jnp.zeros(leaf.shape, jnp.float32))
    master = jax.tree.map(_twin, params) if master_weights else None
    return AdamWState(jnp.zeros((), jnp.float32), zeros(params), zeros(params), master)


def _twin(leaf: Any) -> Any:
    return jnp.zeros((0,), jnp.float32) if leaf.dtype == jnp.float32 else leaf.astype(jnp.float32)


def adamw(
    params: Any,
    grads: Any,
    state: AdamWState,
    *,
    lr: Any,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: Any = 0.01,
    grad_scale: Any = None,
    skip: Any = None,
) -> tuple[Any, AdamWState]:
    """New parameters and state. Trees of grads and state have the form of params.

    A None is no leaf, as in every pytree: all trees may have it at a place, and where params have a leaf it is refused.

    `lr` is a number or a 0-dim array; `weight_decay` a number, or a pytree of numbers like params. `grad_scale`, a
    0-dim array, multiplies every gradient. Where `skip`, a 0-dim bool array, is true, nothing changes, nor the count
    of steps.
    """
    leaves, form = jax.tree.flatten(params)
    trees = {"grads": grads, "exp_avgs": state.exp_avg, "exp_avg_sqs": state.exp_avg_sq}
    others = {name: _leaves(name, tree, form) for name, tree in trees.items()}
    masters = [] if state.master is None else _leaves("masters", state.master, form)
    for name, given in {"params": leaves, **others, "masters": masters}.items():
        check_are_arrays("adamw", {f"{name}[{index}]": leaf for index, leaf in enumerate(given)}, {})
    check_number("adamw", "eps", eps)
    infos = _infos(leaves)
    if wrong := [i for i, one in enumerate(infos) if one.dtype == "float64"]:
        rule = "adamw: for JAX a parameter must be float32, bfloat16 or float16"
        raise refuse(rule, f"params[{wrong[0]}] of float64", "Convert it.")
    contract.check(infos, {name: _infos(given) for name, given in others.items()}, _infos(masters), [betas])
    decays = _decays(weight_decay, form)
    for name, scalar in {"lr": lr, "grad_scale": grad_scale, "skip": skip}.items():
        if scalar is not None and (name != "lr" or hasattr(scalar, "shape")):  # numbers for lr: check_rates
            contract.check_scalars({name: info(scalar) if hasattr(scalar, "shape") else scalar})
    for decay in set(decays):
        contract.check_rates(lr=lr, eps=eps, weight_decay=decay)
    wanted = [_Group(float(betas[0]), float(betas[1]), float(eps), decay) for decay in decays]
    groups = tuple(dict.fromkeys(wanted))
    whose = tuple(groups.index(group) for group in wanted)
    # fp32 counts steps to 16 million, as torch's state does.
    made = state.step + 1.0
    step = made if skip is None else jnp.where(skip, state.step, made)
    if not leaves:
        return params, state._replace(step=step)
    scalars = [jnp.asarray(lr, jnp.float32).reshape(()), made] * len(groups)
    more = [_scalar(grad_scale, jnp.float32), _scalar(skip, jnp.bool_)]
    new = _step_filled([leaves, *others.values(), masters], [scalars, more], groups, whose)
    rebuilt = [jax.tree.unflatten(form, one) if one else None for one in new]
    return rebuilt[0], AdamWState(step, *rebuilt[1:])


def _leaves(name: str, tree: Any, form: Any) -> list[Any]:
    leaves, own = jax.tree.flatten(tree)
    if own != form:
        raise refuse(f"adamw: {name} must be a pytree of params' form", f"{own} for {form}", "Pass one like params.")
    return leaves


def _infos(arrays: list[Any]) -> Any:
    return [info(array) for array in arrays]


def _decays(weight_decay: Any, form: Any) -> list[float]:
    """A weight decay for each leaf."""
    if jax.tree_util.treedef_is_leaf(jax.tree.structure(weight_decay)):
        check_number("adamw", "weight_decay", weight_decay)
        return [float(weight_decay)] * form.num_leaves
    leaves = _leaves("weight_decay", weight_decay, form)
    for leaf in leaves:
        check_number("adamw", "weight_decay", leaf)
    return [float(leaf) for leaf in leaves]


def _scalar(value: Any, dtype: Any) -> Any:
    return None if value is None else jnp.asarray(value, dtype).reshape(())


def _step_filled(
    lists: list[list[Any]], more: list[list[Any]], groups: tuple[_Group, ...], whose: tuple[int, ...]
) -> list[list[Any]]:
    """`_step` of the leaves that have an element, all in a shape and a dtype that the launcher takes."""
    params, _, exp_avgs, exp_avg_sqs, masters = lists
    there = [index for index, param in enumerate(params) if param.size]
    written = [params, exp_avgs, exp_avg_sqs, masters]
    if not there:
        return written
    new = [list(one) for one in written]
    # Inside of shard_map what a launch makes varies as all that it is given: a launch for leaves that vary alike.
    alike: dict[Any, list[int]] = {}
    for index in there:
        alike.setdefault(axes_over_mesh(one[index] for one in lists if one), []).append(index)
    for indices in alike.values():
        given = [[as_listed(one[index]) for index in indices] if one else [] for one in lists]
        made = _step([*given, *more], groups, tuple(whose[index] for index in indices))
        for place, changed in zip(new, made, strict=True):
            for index, array in zip(indices if place else [], changed, strict=True):
                place[index] = array.reshape(place[index].shape)
    return new


def _step(lists: list[list[Any]], groups: tuple[_Group, ...], whose: tuple[int, ...]) -> list[list[Any]]:
    """New params, exp_avgs, exp_avg_sqs and masters."""
    params, _, exp_avgs, exp_avg_sqs, masters, _, _ = lists
    count, twins = len(params), len(masters)
    tensors = [tensor for one in lists for tensor in one]
    written = (params, exp_avgs, exp_avg_sqs, masters)
    results = [jax.ShapeDtypeStruct(tensor.shape, tensor.dtype) for one in written for tensor in one]
    places = [*range(count), *range(2 * count, 4 * count + twins)]  # of what is written, among the tensors
    # What the host does not know is read on the device: learning rate and step, here 0 and 1.
    numbers = [number for g in groups for number in (0.0, g.beta1, g.beta2, g.eps, g.weight_decay, 1.0)]
    lengths = [float(len(one)) for one in lists[:-1]]
    attribute = [*lengths, float(len(numbers)), *numbers, float(count), *map(float, whose)]
    plain = functools.partial(_plain, count, twins, groups, whose)
    aliases = {place: result for result, place in enumerate(places)}
    made = call("adamw_step", plain, tensors, results, attribute, aliases)
    ends = (0, count, 2 * count, 3 * count, 3 * count + twins)
    return [list(made[begin:end]) for begin, end in itertools.pairwise(ends)]


def _plain(count: int, twins: int, groups: tuple[_Group, ...], whose: tuple[int, ...], *tensors: Any) -> Any:
    params, grads, exp_avgs, exp_avg_sqs = (tensors[i * count : (i + 1) * count] for i in range(4))
    masters = tensors[4 * count : 4 * count + twins]
    lr, step = tensors[4 * count + twins : 4 * count + twins + 2]
    grad_scale, skip = tensors[-2:]
    new: list[list[Any]] = [[], [], [], []]
    for index, param in enumerate(params):
        group = groups[whose[index]]
        has_twin = twins and masters[index].size
        old = masters[index] if has_twin else param.astype(jnp.float32)
        g = grads[index].astype(jnp.float32) * (1.0 if is_absent(grad_scale) else grad_scale)
        m = exp_avgs[index] + (1 - group.beta1) * (g - exp_avgs[index])
        v = group.beta2 * exp_avg_sqs[index] + (1 - group.beta2) * g * g
        root = jnp.sqrt(_correction(step, group.beta2))
        rate = lr * root / _correction(step, group.beta1)
        p = old - lr * group.weight_decay * old - rate * (m / (jnp.sqrt(v) + group.eps * root))
        before = (param, exp_avgs[index], exp_avg_sqs[index], old)
        for place, (now, was) in enumerate(zip((p.astype(param.dtype), m, v, p), before, strict=True)):
            new[place].append(now if is_absent(skip) else jnp.where(skip, was, now))
        if twins and not has_twin:
            new[3][-1] = masters[index]
    return tuple(tensor for one in new[: 4 if twins else 3] for tensor in one)


def _correction(step: Any, beta: float) -> Any:
    """1 - beta^step; by expm1, since in fp32 the difference would lose four digits at step 1 with beta 0.9999."""
    return -jnp.expm1(step * (math.log(beta) if beta else -jnp.inf))
