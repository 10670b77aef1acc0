"""The two small modules of which the rest is made: a linear layer and a norm.

Weights are fp32, the master copy that the optimiser changes; each is cast to the dtype of what flows through when it is
used, so bf16 and fp16 need no autocast and no second set of weights. Training may have one all the same: narrow copies
in that dtype, which AdamW writes with the masters, so that no matrix is cast, and no gradient of one (`narrow`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuselm.config import ModelConfig
from fuselm.ops import Ops


class Casting(nn.Module):
    """A module with matrices that are cast when they are used: those of `casts`, by name."""

    casts: tuple[str, ...] = ()

    def __init__(self) -> None:
        super().__init__()
        self.narrowed: dict[str, tuple[Tensor, Tensor]] = {}  # by name: a weight and its copy

    def used(self, name: str, dtype: torch.dtype) -> Tensor:
        """The weight in the dtype of what flows through: in training its narrow copy if it has one, else itself, cast.

        The bits are the same. In evaluation a copy might be of other weights than were loaded since the last step; and
        a weight that was put in the place of the one it is of, as torch.func.functional_call does, has none.
        """
        weight: Tensor = getattr(self, name)
        if self.training and name in self.narrowed:
            original, copy = self.narrowed[name]
            if original is weight and copy.dtype == dtype:
                return copy
        return weight.to(dtype)

    def __getstate__(self) -> dict[str, Any]:
        """Without narrow copies: no optimiser writes those of a copied or saved module."""
        return {**self.__dict__, "narrowed": {}}


class Linear(Casting):
    """y = x @ weight.T + bias, in x's dtype. Weights are set by Transformer's initialisation.

    Without `casts` its weight has no narrow copy: what flows through is fp32, or somebody else uses the weight.
    """

    def __init__(self, inputs: int, outputs: int, bias: bool = False, *, casts: bool = True) -> None:
        super().__init__()
        self.casts = ("weight",) if casts else ()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.zeros(outputs)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.used("weight", x.dtype), bias)


def narrow(model: nn.Module, copy_of: Callable[[nn.Parameter], Tensor]) -> dict[nn.Parameter, Tensor]:
    """Have a narrow copy used in the place of each weight that is cast; returns the copies by parameter.

    A weight with a hook on its gradient has none: the hook would not be called any more.
    """
    copies: dict[nn.Parameter, Tensor] = {}
    for module in model.modules():
        if isinstance(module, Casting):
            weights = {name: getattr(module, name) for name in module.casts}
            module.narrowed = {name: (one, copy_of(one)) for name, one in weights.items() if not is_hooked(one)}
            copies |= dict(module.narrowed.values())  # type: ignore[arg-type]
    return copies


def is_hooked(parameter: nn.Parameter) -> bool:
    """Whether somebody wants to be called with its gradient."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


class Norm(nn.Module):
    """RMSNorm or LayerNorm of x + residual; gives that sum too, which is the residual of the next one."""

    def __init__(self, config: ModelConfig, ops: Ops) -> None:
        super().__init__()
        self.ops, self.eps, self.kind = ops, config.norm_eps, config.norm
        self.weight = nn.Parameter(torch.ones(config.width))
        self.bias = nn.Parameter(torch.zeros(config.width)) if config.bias and config.norm == "layer" else None

    def forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        out: Any
        if self.kind == "rms":
            out = self.ops.rms_norm(x, self.weight, self.eps, residual=residual)
        else:
            out = self.ops.layer_norm(x, self.weight, self.bias, self.eps, residual=residual)
        return (out, x) if residual is None else out
