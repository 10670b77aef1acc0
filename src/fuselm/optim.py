"""The one AdamW, drop-in for torch.optim.AdamW, and what is done to gradients before it: their norm, and clipping.

Knows torch and fuselm.ops, no model and no schedule. State dicts go from torch's AdamW to this one and back.

    optimizer = AdamW(decay_groups(model.named_parameters(), weight_decay=0.1), lr=3e-4, betas=(0.9, 0.95))
    loss.backward()
    norm = global_norm([p.grad for p in model.parameters() if p.grad is not None])
    optimizer.step(grad_scale=clip_scale(norm, 1.0))   # clips without a pass over the gradients, and without waiting
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from fuselm import ops

__all__ = ["AdamW", "clip_scale", "decay_groups", "global_norm"]

# What torch's groups hold besides: choices between its own implementations, and three that ours does not have.
_TORCHS_CHOICES = ("foreach", "fused", "capturable", "decoupled_weight_decay")
_NOT_OURS = ("amsgrad", "maximize", "differentiable")
# The method itself, without a wrapper that imports all of torch.compile: 4 s at the start of every eager run.
_ADD_PARAM_GROUP = getattr(torch.optim.Optimizer.add_param_group, "__wrapped__", torch.optim.Optimizer.add_param_group)


class AdamW(torch.optim.Optimizer):
    """AdamW in one pass of `fuselm.ops.adamw` per group, with torch's arguments, state and groups.

    States are fp32 for bf16 and fp16 parameters (torch keeps those in 16 bits), else of the parameter's dtype. A
    learning rate that is a 0-dim tensor on the parameters' device can be changed without a host synchronisation.
    """

    _compiled: Any = None  # what `compile` has made; not part of a copy or a state
    _counted: tuple[dict[str, Any], ...] = ()  # the states that the last step has counted

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        _check_options(defaults)
        super().__init__(params, defaults)

    def compile(self) -> None:
        """From now on each group's step is one graph of torch.compile: one pass over memory instead of nine."""
        self._compiled = torch.compile(ops.adamw, fullgraph=True, dynamic=False)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; options of the group and dtypes of its parameters are checked first."""
        _check_options({**self.defaults, **param_group})
        _ADD_PARAM_GROUP(self, param_group)
        if kinds := {str(p.dtype) for p in self.param_groups[-1]["params"] if p.is_complex()}:
            del self.param_groups[-1]
            raise ValueError(
                f"AdamW is for real parameters; got one of {', '.join(kinds)}. Train its torch.view_as_real instead."
            )

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
        for group in self.param_groups:
            self._step_group(group, grad_scale, skip)
        return loss

    def uncount(self) -> None:
        """Take back what the last step has counted, since it was skipped."""
        for state in self._counted:
            state["step"] -= 1
        self._counted = ()

    def _step_group(self, group: dict[str, Any], grad_scale: Tensor | None, skip: Tensor | None) -> None:
        # Parameters that were without a gradient now and then have taken fewer steps, and so have other corrections.
        alike: dict[tuple[int, torch.device], list[Tensor]] = {}
        for param in group["params"]:
            if param.grad is not None:
                taken = int(self._state_of(param)["step"].item())
                alike.setdefault((taken, param.device), []).append(param)
        options = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")}
        for (taken, device), params in alike.items():
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    "AdamW.step counts its steps on the host, and a CUDA graph would repeat one number for ever; got a "
                    "stream that records. Record fuselm.ops.adamw, with tensors for step and lr."
                )
            states = [self.state[param] for param in params]
            number: Any = taken + 1
            if self._compiled is not None:  # as tensors: a graph that holds numbers would be compiled anew at each step
                number = torch.full((), taken + 1.0, device=device)
                options["lr"] = torch.full((), float(options["lr"]), device=device)
            (self._compiled or ops.adamw)(
                params,
                [param.grad for param in params],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                step=number,
                grad_scale=grad_scale,
                skip=skip,
                **options,
            )
            torch._foreach_add_([state["step"] for state in states], 1)
            self._counted += tuple(states)

    def _state_of(self, param: Tensor) -> dict[str, Any]:
        assert param.grad is not None
        if param.grad.layout != torch.strided:
            raise RuntimeError(
                f"AdamW updates every element and takes dense gradients; got one with layout {param.grad.layout}. "
                f"Use an embedding with sparse=False, or torch.optim.SparseAdam."
            )
        state = self.state[param]
        if not state:
            state["step"] = _step_count(0.0)
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(param, dtype=_state_dtype(param), memory_format=torch.preserve_format)
        return state

    # --- state ------------------------------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, for the state of this optimizer or of torch's AdamW; averages keep their fp32 digits."""
        super().load_state_dict(state_dict)
        ours = [param for group in self.param_groups for param in group["params"]]
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        for param, index in zip(ours, saved, strict=True):
            dtype = _state_dtype(param)
            if dtype != param.dtype:  # torch has cast these to the parameter's dtype: take them again
                for name in self.state.get(param, {}).keys() & {"exp_avg", "exp_avg_sq"}:
                    self.state[param][name] = state_dict["state"][index][name].to(param.device, dtype, copy=True)

    def __setstate__(self, state: dict[str, Any]) -> None:
        for group in state["param_groups"]:
            _check_options(group)
            for name in (*_TORCHS_CHOICES, *_NOT_OURS):
                group.pop(name, None)
        for values in state["state"].values():
            if "step" in values:  # torch's fused and capturable ones count on the device
                values["step"] = _step_count(float(values["step"]))
        super().__setstate__(state)


def _step_count(taken: float) -> Tensor:
    """On the host, as torch's, whatever the default device is: reading it waits for nothing."""
    return torch.tensor(taken, dtype=torch.float32, device="cpu")


def _state_dtype(param: Tensor) -> torch.dtype:
    return torch.float32 if param.dtype in (torch.bfloat16, torch.float16) else param.dtype


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
    if isinstance(lr, Tensor) and lr.dim():
        raise ValueError(
            f"AdamW: lr is a number or a 0-dim tensor; got shape {list(lr.shape)}. Give each group its own."
        )
    if not lr >= 0:
        raise ValueError(f"AdamW: the learning rate lr is 0 or more; got {lr}. Try 3e-4.")
    if len(betas) != 2 or not all(isinstance(beta, float | int) and 0 <= beta < 1 for beta in betas):
        raise ValueError(f"AdamW: betas are two numbers, 0 or more and below 1; got {betas}. Try (0.9, 0.999).")
    if not eps >= 0:
        raise ValueError(f"AdamW: eps is 0 or more; got {eps}. Try 1e-8.")
    if not decay >= 0:
        raise ValueError(f"AdamW: weight_decay is 0 or more; got {decay}. Try 0.1, or 0 for none.")


# --- gradients and groups ---------------------------------------------------------------------------------------------


def global_norm(tensors: Iterable[Tensor]) -> Tensor:
    """The Euclidean norm of all elements of all tensors: a 0-dim fp32 tensor on the first one's device; 0 of none.

    Sums are fp32, or float64 where a tensor is; the same bits every time for the same tensors in the same order.
    """
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor.detach())
    norms: list[Tensor] = []
    for dtype, alike in by_dtype.items():
        norms += torch._foreach_norm(alike, 2, dtype=torch.promote_types(dtype, torch.float32))
    if not norms:
        return torch.zeros((), dtype=torch.float32)
    together = torch.stack([norm.to(norms[0].device) for norm in norms])  # [number of tensors]
    return torch.linalg.vector_norm(together).to(torch.float32)


def clip_scale(norm: Tensor, max_norm: float) -> Tensor:
    """What to multiply gradients of this norm by so that it is at most max_norm: min(1, max_norm / (norm + 1e-6)).

    As torch's clip_grad_norm_ has it, but for a norm of infinity, where it is NaN as for a norm of NaN (torch's 0 would
    turn an infinite gradient into NaN and the others into 0): look at it, and skip the step.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm is above 0; got {max_norm}. To clip nothing, leave the scale out.")
    return (max_norm / (norm + 1e-6)).clamp(max=1.0) + (norm - norm)


def decay_groups(named_parameters: Iterable[tuple[str, Tensor]], weight_decay: float) -> list[dict[str, Any]]:
    """Two groups for an optimizer: matrices decay; vectors (norm weights) and whatever is named a bias do not.

    Both groups are there even if one is empty, so that state dicts of similar models have one form.
    """
    decayed: list[Tensor] = []
    kept: list[Tensor] = []
    for name, parameter in named_parameters:
        # By name too: the biases of experts are a matrix, a row for each.
        (decayed if parameter.dim() >= 2 and not name.endswith("bias") else kept).append(parameter)
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": kept, "weight_decay": 0.0}]
