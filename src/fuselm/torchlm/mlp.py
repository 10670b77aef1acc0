"""The feed-forward half of a block: dense, or a choice among experts.

It knows shapes and ops, no attention and no loss but its own: a mixture also says how unevenly it was used.

    y = MLP(config, ops)(x)                         # [B, T, D]
    y, balance = MoE(config, ops)(x)                # balance: 1 when every expert is used alike, E when one does it all
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuselm.config import ModelConfig
from fuselm.ops import Ops
from fuselm.torchlm.layers import Casting, Linear


def activation(config: ModelConfig, ops: Ops) -> Callable[[Tensor], Tensor]:
    """The function between the two projections; a gated one takes gate and up packed in one tensor."""
    function: Callable[[Tensor], Tensor] = getattr(ops, config.activation)
    return function


class MLP(nn.Module):
    """Up, activation, down. Gate and up are one matrix: one matmul instead of two."""

    def __init__(self, config: ModelConfig, ops: Ops) -> None:
        super().__init__()
        self.activation = activation(config, ops)
        self.up = Linear(config.width, config.ffn_width * (2 if config.gated else 1), config.bias)
        self.down = Linear(config.ffn_width, config.width, config.bias)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.activation(self.up(x)))
        return y


class Routing(NamedTuple):
    """Where tokens go: M tokens, k experts each."""

    experts: Tensor  # [M, k] int64
    weights: Tensor  # [M, k] fp32, of each token 1 together
    balance: Tensor  # 0-dim fp32


def route(logits: Tensor, experts_per_token: int, ops: Ops) -> Routing:
    """The k likeliest experts of each token, weighted by their probabilities, which are made to sum to 1.

    The balance loss is E times the sum over experts of (share of visits) * (mean probability): 1 when both are even. A
    share has no gradient; the probability that goes with it does, and is pushed down where the share is high.
    """
    probabilities = ops.softmax(logits.float())  # [M, E]
    weights, experts = probabilities.topk(experts_per_token, dim=-1)  # [M, k]
    weights = weights / weights.sum(-1, keepdim=True)
    count = logits.shape[-1]
    visits = F.one_hot(experts, count).sum((0, 1))  # [E]
    shares = visits.float() / experts.numel()
    return Routing(experts, weights, count * (shares * probabilities.mean(0)).sum())


class MoE(Casting):
    """E experts, each an MLP; a token visits k of them, and no token is ever dropped.

    Visits are sorted by expert, so each expert's tokens are neighbours and one grouped matmul does all experts; how
    many visits each has stays on the device. (In bf16 from Hopper on; elsewhere torch's grouped matmul asks for it, and
    waits.)
    """

    casts = ("up", "down")

    def __init__(self, config: ModelConfig, ops: Ops) -> None:
        super().__init__()
        self.config, self.ops = config, ops
        self.activation = activation(config, ops)
        experts, width, hidden = config.num_experts, config.width, config.ffn_width
        packed = hidden * (2 if config.gated else 1)
        self.router = Linear(width, experts, casts=False)  # in fp32
        self.up = nn.Parameter(torch.empty(experts, width, packed))  # [E, D, F]: as the grouped matmul wants it
        self.down = nn.Parameter(torch.empty(experts, hidden, width))  # [E, F, D]
        self.up_bias = nn.Parameter(torch.zeros(experts, packed)) if config.bias else None
        self.down_bias = nn.Parameter(torch.zeros(experts, width)) if config.bias else None
        self.shared = MLP(config, ops) if config.shared_expert else None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        tokens = x.reshape(-1, x.shape[-1])  # [M, D]
        routing = route(self.router(tokens.float()), self.config.experts_per_token, self.ops)
        y = self._visit(tokens, routing).view_as(x)
        return (y if self.shared is None else self.ops.add(y, self.shared(x))), routing.balance

    def _visit(self, tokens: Tensor, routing: Routing) -> Tensor:
        k, experts = self.config.experts_per_token, self.config.num_experts
        visits = routing.experts.reshape(-1)  # [M k]: token m's are m k to m k + k - 1
        order = visits.argsort(stable=True)
        back = order.argsort()
        sizes = F.one_hot(visits, experts)  # [M k, E]
        ends = sizes.sum(0).cumsum(0).to(torch.int32)  # [E]
        # Repeated first, permuted then: a permutation's gradient is a permutation, and adds nothing up in any order.
        rows = tokens.repeat_interleave(k, dim=0)[order]  # [M k, D], sorted by expert
        which = sizes[order].to(rows.dtype) if self.up_bias is not None else None
        up, down = self.used("up", rows.dtype), self.used("down", rows.dtype)
        hidden = self.activation(_grouped(rows, up, ends, which, self.up_bias))
        out = _grouped(hidden, down, ends, which, self.down_bias)[back]  # [M k, D], sorted by token
        weighted = self.ops.mul(out.view(-1, k, out.shape[-1]), routing.weights.to(out.dtype)[..., None])  # [M, k, D]
        y: Tensor = weighted.sum(1)  # [M, D]
        return y


def _grouped(x: Tensor, weight: Tensor, ends: Tensor, which: Tensor | None, bias: Tensor | None) -> Tensor:
    """Rows up to ends[0] times weight[0], the next up to ends[1] times weight[1], and so on, plus each one's bias."""
    y: Any = F.grouped_mm(x, weight, offs=ends)
    # A matmul rather than a look-up: its gradient has no atomics.
    return y if which is None or bias is None else y + which @ bias.to(x.dtype)
