"""The two small modules of which the rest is made: a linear layer and a norm.

Weights are fp32, the master copy that the optimiser changes; each is cast to the dtype of what flows through when it is
used, so bf16 and fp16 need no autocast and no second set of weights.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuselm.config import ModelConfig
from fuselm.ops import Ops


class Linear(nn.Module):
    """y = x @ weight.T + bias, in x's dtype. Weights are set by Transformer's initialisation."""

    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.zeros(outputs)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), bias)


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
