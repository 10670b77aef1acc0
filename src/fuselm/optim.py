"""The one AdamW, drop-in for torch.optim.AdamW, and what is done to gradients before it: their norm, and clipping.

Knows torch and fuselm.ops, no model and no schedule. State dicts go from torch's AdamW to this one and back.

    optimizer = AdamW(decay_groups(model.named_parameters(), weight_decay=0.1), lr=3e-4, betas=(0.9, 0.95))
    loss.backward()
    norm = global_norm([p.grad for p in model.parameters() if p.grad is not None])
    optimizer.step(grad_scale=clip_scale(norm, 1.0))   # clips without a pass over the gradients, and without waiting
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from numbers import Real
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from fuselm import ops

__all__ = ["AdamW", "clip_scale", "decay_groups", "global_norm"]

# What torch's groups hold besides: choices between its own implementations, and three that ours does not have.
_TORCHS_CHOICES = ("foreach", "fused", "capturable", "decoupled_weight_decay")
_NOT_OURS = ("amsgrad", "maximize", "differentiable")
# The methods themselves, without a wrapper that imports all of torch.compile: 4 s at the start of every eager run.
_ADD_PARAM_GROUP = getattr(torch.optim.Optimizer.add_param_group, "__wrapped__", torch.optim.Optimizer.add_param_group)
_ZERO_GRAD = getattr(torch.optim.Optimizer.zero_grad, "__wrapped__", torch.optim.Optimizer.zero_grad)


class AdamW(torch.optim.Optimizer):
    """AdamW in one call of `fuselm.ops.adamw` for all groups of a device, with torch's arguments, state and groups.

    States are fp32 for bf16 and fp16 parameters (torch keeps those in 16 bits), else of the parameter's dtype. With
    `master_weights` each 16-bit parameter also has an fp32 master, made of it at its first step and kept in the state:
    steps too small for 16 bits add up there. It is an option of a group, as the others are; whoever writes over such a
    parameter later must drop its "master". A learning rate that is a 0-dim tensor on the parameters' device can be
    changed without a host synchronisation. `impl` is as in `ops.choose`: "torch" is for comparing. `foreach` and
    `fused` choose between torch's implementations; here all parameters are stepped at once whatever they say.
    """

    _compiled: Any = None  # what `compile` has made; not part of a copy or a state
    _narrowed: Mapping[Tensor, _Narrow] = MappingProxyType({})  # by parameter; neither are these
    _counted: tuple[dict[str, Any], ...] = ()  # the states that the last step has counted
    _loading: Any = None  # the state dict that is being loaded, as hooks have left it
    impl = "auto"

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        master_weights: bool = False,
        impl: str = "auto",
    ) -> None:
        _op(impl)  # a word that is none is refused now
        self.impl = impl
        _refuse_capturable(capturable)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        defaults |= {"master_weights": master_weights}
        _check_options({**defaults, "amsgrad": amsgrad, "maximize": maximize, "differentiable": differentiable})
        super().__init__(params, defaults)

    def compile(self) -> None:
        """Where there is no kernel a step is one graph of torch.compile from now on: one pass over memory, not nine."""
        if not self._has_kernel():
            self._compiled = torch.compile(_op(self.impl), fullgraph=True, dynamic=False)

    def _has_kernel(self) -> bool:
        """Whether every parameter is one that a kernel steps: torch.compile has nothing to add there."""
        params = [param for group in self.param_groups for param in group["params"]]
        return self.impl != "torch" and all(param.is_cuda and param.dtype != torch.float64 for param in params)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; options of the group and dtypes of its parameters are checked first."""
        options = {**self.defaults, **param_group}
        _refuse_capturable(options.get("capturable"))
        _check_options(options)
        _ADD_PARAM_GROUP(self, param_group)
        if kinds := {str(p.dtype) for p in self.param_groups[-1]["params"] if p.is_complex()}:
            del self.param_groups[-1]
            raise ValueError(
                f"AdamW is for real parameters; got one of {', '.join(kinds)}. Train its torch.view_as_real instead."
            )

    def narrow(self, param: Tensor, dtype: torch.dtype) -> Tensor:
        """A copy of an fp32 parameter in 16 bits, to compute with in its place: `master_weights` the other way round.

        The copy is a leaf. A step takes its gradient for the parameter's and writes both: nobody casts weights before
        each use, nor gradients after it. Asked again it is the same one. A parameter that has a copy and a gradient of
        its own is refused at the next step; one that wants no gradient stays as it is. Whoever writes over the
        parameter otherwise, or freezes it, calls `refresh`. What knows parameters alone, as torch's `clip_grad_norm_`,
        `GradScaler`, a module's `zero_grad` and hooks on a parameter, misses the copies' gradients: take the norm of
        these, clip and scale by `grad_scale`, and call the optimiser's `zero_grad`. Gradients of several backwards add
        up in 16 bits. Copies are no part of a state dict or of a copied optimiser.

            weight = optimizer.narrow(layer.weight, torch.bfloat16)
            loss = torch.nn.functional.linear(x, weight).float().square().mean()
        """
        kind = getattr(param, "dtype", type(param).__name__)
        if not isinstance(param, Tensor) or kind != torch.float32 or dtype not in (torch.bfloat16, torch.float16):
            raise ValueError(
                f"AdamW.narrow makes 16-bit copies of fp32 parameters; got {kind} and {dtype!r}. Pass one parameter "
                f"and torch.bfloat16, or compute with the parameter."
            )
        if all(param is not ours for group in self.param_groups for ours in group["params"]):
            raise ValueError(
                f"AdamW.narrow is for parameters that it steps; got another one, of shape {list(param.shape)}. Add it "
                f"to a group first."
            )
        if (known := self._narrowed.get(param)) is not None:
            if known.tensor.dtype != dtype:
                raise ValueError(
                    f"AdamW.narrow makes one copy of a parameter; got {dtype} beside {known.tensor.dtype}. Compute "
                    f"with the one there is."
                )
            self.refresh()
            return known.tensor
        with torch.inference_mode(False):  # no step could write what is made in there
            copy = param.detach().to(dtype, memory_format=torch.preserve_format)
        self._narrowed = {**self._narrowed, param: _Narrow(copy.requires_grad_(param.requires_grad), param)}
        return copy

    @torch.no_grad()
    def refresh(self, everything: bool = False) -> None:
        """Write narrow copies anew whose parameters somebody else has written over, as whoever loads weights does.

        Those are known by the parameter's place and its version, which torch counts, but not where it is written to by
        way of `param.data`: then ask for `everything`. A copy wants a gradient if its parameter does.
        """
        for param, narrow in self._narrowed.items():
            if everything or not narrow.is_of(param):
                narrow.tensor.copy_(param)
                narrow.note(param)
            if narrow.tensor.requires_grad != param.requires_grad:
                narrow.tensor.requires_grad_(param.requires_grad)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; the gradients of narrow copies too."""
        _ZERO_GRAD(self, set_to_none)
        for narrow in self._narrowed.values():
            if set_to_none:
                narrow.tensor.grad = None
            elif (grad := narrow.tensor.grad) is not None:
                if grad.grad_fn is not None:  # of a backward that recorded itself
                    grad.detach_()
                grad.requires_grad_(False).zero_()

    def step(self, closure: Any = None, *, grad_scale: Tensor | None = None, skip: Tensor | None = None) -> Any:
        """One step with the gradients there are, each times `grad_scale`; the closure's loss, if there is a closure.

        Where the 0-dim bool tensor `skip` is true nothing changes but the count of steps: whoever learns later that it
        was true takes that back with `uncount`. So a compiled step need not wait for the answer.
        The step's number is read on the host, so a CUDA graph cannot record this: record `fuselm.ops.adamw`.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._counted = ()
        together: dict[Any, _Taken] = {}
        for index, group in enumerate(self.param_groups):
            for param in group["params"]:
                narrow = self._narrowed.get(param) if self._narrowed else None
                grad = param.grad if narrow is None else narrow.gradient(param)
                if grad is not None:
                    # Parameters that were without a gradient now and then have taken fewer steps than others.
                    number = int(self._state_of(param, grad, group["master_weights"])["step"].item()) + 1
                    # A compiled graph has one set of options; the kernel has many.
                    key = (param.device, index, number) if self._compiled else param.device
                    together.setdefault(key, _Taken()).add(param, narrow, grad, number, group)
        for taken in together.values():
            self._step_taken(taken, grad_scale, skip)
        return loss

    def uncount(self) -> None:
        """Take back what the last step has counted, since it was skipped."""
        for state in self._counted:
            state["step"] -= 1
        self._counted = ()

    def _step_taken(self, taken: _Taken, grad_scale: Tensor | None, skip: Tensor | None) -> None:
        device = taken.params[0].device
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "AdamW.step counts its steps on the host, and a CUDA graph would repeat one number for ever; got a "
                "stream that records. Record fuselm.ops.adamw, with tensors for step and lr."
            )
        states = [self.state[param] for param in taken.params]
        none = torch.empty(0, device=device)
        rows = list(zip(taken.params, taken.narrowed, states, strict=True))
        masters = [state.get("master", none) if narrow is None else param for param, narrow, state in rows]
        # A step that is skipped writes nothing: a copy that was stale before it stays so, and is known to be.
        fresh = [(param, narrow) for param, narrow, _ in rows if narrow is not None and narrow.is_of(param)]
        (self._compiled or _op(self.impl))(
            [param if narrow is None else narrow.tensor for param, narrow, _ in rows],
            taken.grads,
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            masters=masters if any(master is not none for master in masters) else None,
            grad_scale=grad_scale,
            skip=skip,
            **(taken.options if self._compiled is None else taken.as_tensors()),
        )
        for param, narrow in fresh:
            narrow.version = param._version
        torch._foreach_add_([state["step"] for state in states], 1)
        self._counted += tuple(states)

    def _state_of(self, param: Tensor, grad: Tensor, master: bool) -> dict[str, Any]:
        if grad.layout != torch.strided:
            raise RuntimeError(
                f"AdamW updates every element and takes dense gradients; got one with layout {grad.layout}. "
                f"Use an embedding with sparse=False, or torch.optim.SparseAdam."
            )
        state = self.state[param]
        if not state:
            state["step"] = _step_count(0.0)
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(param, dtype=_state_dtype(param), memory_format=torch.preserve_format)
        if not master:
            state.pop("master", None)
        elif "master" not in state and _state_dtype(param) != param.dtype:
            state["master"] = param.detach().to(_state_dtype(param), memory_format=torch.preserve_format)
        return state

    # --- state ------------------------------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, for the state of this optimizer or of torch's AdamW; averages keep their fp32 digits."""
        # Behind the hooks that others have registered, which may make another state of it.
        last = self.register_load_state_dict_pre_hook(lambda _, given: self._with_own_options(given))
        try:
            super().load_state_dict(state_dict)
        finally:
            last.remove()
            self._loading = None

    def _with_own_options(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        groups = state_dict["param_groups"]
        if len(groups) == len(self.param_groups):  # else torch has words for it
            own = [{"master_weights": group["master_weights"]} for group in self.param_groups]  # torch's have none
            groups = [{**mine, **saved} for mine, saved in zip(own, groups, strict=True)]
        self._loading = {**state_dict, "param_groups": groups}
        return self._loading

    def _take_digits_again(self, given: dict[str, Any]) -> None:
        """Averages and masters as they were saved: torch has cast them to the parameter's dtype."""
        ours = [param for group in given["param_groups"] for param in group["params"]]
        saved = [index for group in self._loading["param_groups"] for index in group["params"]]
        for param, index in zip(ours, saved, strict=True):
            dtype, state = _state_dtype(param), given["state"].get(param, {})
            if dtype == param.dtype:
                continue
            for name in state.keys() & {"exp_avg", "exp_avg_sq", "master"}:
                state[name] = self._loading["state"][index][name].to(param.device, dtype, copy=True)
            # One in 16 bits has been through torch's AdamW, which carries it along while the parameter moves on.
            if "master" in state and self._loading["state"][index]["master"].dtype != dtype:
                del state["master"]

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "impl": self.impl}

    def __setstate__(self, state: dict[str, Any]) -> None:
        defaults = state.get("defaults", self.__dict__.get("defaults", {}))
        for group in state["param_groups"]:
            _check_options(group)
            group.setdefault("master_weights", defaults.get("master_weights", False))  # torch's groups have none
            for name in (*_TORCHS_CHOICES, *_NOT_OURS):
                group.pop(name, None)
        for values in state["state"].values():
            if "step" in values:  # torch's fused and capturable ones count on the device
                values["step"] = _step_count(float(values["step"]))
        if self._loading is not None:
            self._take_digits_again(state)
        self._counted = ()  # the states that were, and all memory of theirs
        super().__setstate__(state)


@functools.cache
def _op(impl: str) -> Any:
    return ops.adamw if impl == "auto" else ops.choose(impl).adamw


class _Narrow:
    """A parameter in 16 bits, which version of the parameter it is, and of what memory: kept, or other numbers might
    come to lie there."""

    def __init__(self, tensor: Tensor, param: Tensor) -> None:
        self.tensor = tensor
        self.note(param)

    def note(self, param: Tensor) -> None:
        """Take it for what the parameter is now."""
        self.version, self.memory = param._version, param.detach()

    def is_of(self, param: Tensor) -> bool:
        """Whether nobody has written over the parameter since, nor put other memory in its place."""
        return self.version == param._version and self.memory.is_set_to(param)

    def gradient(self, param: Tensor) -> Tensor | None:
        """The one to step by; none of a parameter that was frozen after it was found."""
        if not param.requires_grad:
            return None
        if param.grad is not None:
            raise RuntimeError(
                f"AdamW steps a parameter that has a narrow copy by the copy's gradient; got one of its own, of shape "
                f"{list(param.shape)}. Compute with the copy alone, and call zero_grad if that gradient is an old one."
            )
        return self.tensor.grad


class _Taken:
    """The parameters of a device that take a step, and the options of each."""

    def __init__(self) -> None:
        self.params: list[Tensor] = []
        self.narrowed: list[_Narrow | None] = []
        self.grads: list[Tensor] = []
        self.options: dict[str, list[Any]] = {name: [] for name in ("step", "lr", "betas", "eps", "weight_decay")}

    def add(self, param: Tensor, narrow: _Narrow | None, grad: Tensor, number: int, group: dict[str, Any]) -> None:
        self.params.append(param)
        self.narrowed.append(narrow)
        self.grads.append(grad)
        self.options["step"].append(number)
        self.options["betas"].append(tuple(group["betas"]))  # a list, once it has been through JSON
        for name in ("lr", "eps", "weight_decay"):
            self.options[name].append(group[name])

    def as_tensors(self) -> dict[str, Any]:
        """One set of options, step and learning rate on the device: a graph that held their numbers would be compiled
        anew at each step."""
        one = {name: values[0] for name, values in self.options.items()}
        device = self.params[0].device
        return one | {
            name: torch.full((), float(one[name]), dtype=torch.float32, device=device) for name in ("step", "lr")
        }


def _step_count(taken: float) -> Tensor:
    """On the host, as torch's, whatever the default device is: reading it waits for nothing."""
    return torch.tensor(taken, dtype=torch.float32, device="cpu")


def _state_dtype(param: Tensor) -> torch.dtype:
    return torch.float32 if param.dtype in (torch.bfloat16, torch.float16) else param.dtype


def _refuse_capturable(wanted: Any) -> None:
    """In a saved state it is not refused: of another optimiser it says nothing about this one."""
    if wanted:
        raise ValueError(
            "AdamW counts its steps on the host; got capturable=True. For a CUDA graph record fuselm.ops.adamw, with "
            "tensors for step and lr."
        )


def _check_options(options: dict[str, Any]) -> None:
    if missing := [name for name in ("lr", "betas", "eps", "weight_decay") if name not in options]:
        raise ValueError(
            f"A group of AdamW has lr, betas, eps and weight_decay; got one without {', '.join(missing)}. "
            f"Load the state of an AdamW."
        )
    if wanted := [name for name in _NOT_OURS if options.get(name)]:
        raise ValueError(
            f"This AdamW is without {', '.join(_NOT_OURS[:-1])} and {_NOT_OURS[-1]}; got a group with "
            f"{' and '.join(wanted)}. Use torch.optim.AdamW."
        )
    lr, betas, eps, decay = (options[name] for name in ("lr", "betas", "eps", "weight_decay"))
    for name, value in (("lr", lr), ("eps", eps), ("weight_decay", decay)):
        if isinstance(value, bool) or not (isinstance(value, Real) or (name == "lr" and isinstance(value, Tensor))):
            raise ValueError(f"AdamW: {name} is a number; got {value!r}. Leave it out for AdamW's own.")
    if isinstance(lr, Tensor) and lr.dim():
        raise ValueError(
            f"AdamW: lr is a number or a 0-dim tensor; got shape {list(lr.shape)}. Give each group its own."
        )
    if not lr >= 0:
        raise ValueError(f"AdamW: the learning rate lr is 0 or more; got {lr}. Try 3e-4.")
    if (
        not isinstance(betas, tuple | list)
        or len(betas) != 2
        or not all(isinstance(beta, float | int) and 0 <= beta < 1 for beta in betas)
    ):
        raise ValueError(f"AdamW: betas are two numbers, 0 or more and below 1; got {betas}. Try (0.9, 0.999).")
    if not eps >= 0:
        raise ValueError(f"AdamW: eps is 0 or more; got {eps}. Try 1e-8.")
    if not decay >= 0:
        raise ValueError(f"AdamW: weight_decay is 0 or more; got {decay}. Try 0.1, or 0 for none.")
    if not isinstance(masters := options.get("master_weights", False), bool):
        raise ValueError(f"AdamW: master_weights is True or False; got {masters!r}. Leave it out for False.")


# --- gradients and groups ---------------------------------------------------------------------------------------------


def global_norm(tensors: Iterable[Tensor]) -> Tensor:
    """The Euclidean norm of all elements of all tensors: a 0-dim fp32 tensor on the first one's device; 0 of none.

    Sums are fp32, or float64 where a tensor is; the same bits every time for the same tensors in the same order.
    """
    norm: Tensor = ops.global_norm(tensors)
    return norm


def clip_scale(norm: Tensor, max_norm: float) -> Tensor:
    """What to multiply gradients of this norm by so that it is at most max_norm: min(1, max_norm / (norm + 1e-6)).

    As torch's clip_grad_norm_ has it, but for a norm of infinity, where it is NaN as for a norm of NaN (torch's 0 would
    turn an infinite gradient into NaN and the others into 0): look at it, and skip the step.
    """
    if not isinstance(norm, Tensor):
        kind = type(norm).__name__
        raise TypeError(f"clip_scale takes a norm as a tensor; got a {kind}. Pass what global_norm gives.")
    if not max_norm > 0:
        raise ValueError(f"max_norm is above 0; got {max_norm}. To clip nothing, leave the scale out.")
    # By a tensor: torch would divide a number by multiplying it with the reciprocal, in two launches.
    above = norm + 1e-6  # of an integer, too, a number with a fraction
    share = torch.div(torch.as_tensor(max_norm, dtype=above.dtype, device="cpu"), above)
    return torch.add(share.clamp(max=1.0), norm, alpha=0.0)  # NaN if the norm is not finite


def decay_groups(named_parameters: Iterable[tuple[str, Tensor]], weight_decay: float) -> list[dict[str, Any]]:
    """Two groups for an optimizer: matrices decay; vectors (norm weights) and whatever is named a bias do not.

    Both groups are there even if one is empty, so that state dicts of similar models have one form.
    """
    decayed: list[Tensor] = []
    kept: list[Tensor] = []
    for named in named_parameters:
        if not isinstance(named, tuple) or len(named) != 2:
            raise TypeError(
                f"decay_groups takes pairs of a name and a parameter; got a {type(named).__name__}. Pass "
                f"model.named_parameters()."
            )
        name, parameter = named
        # By name too: the biases of experts are a matrix, a row for each.
        (decayed if parameter.dim() >= 2 and not name.endswith("bias") else kept).append(parameter)
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": kept, "weight_decay": 0.0}]
