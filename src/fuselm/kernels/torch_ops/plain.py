"""Ops that have no kernel yet: their final names and signatures, and plain torch behind them.

An op moves out of here into a file of its own the day it gets a kernel; nobody who calls it has to change. Sums are
fp32, results keep the dtype of what came in, as in the kernels. Shapes: B batch, T tokens, N heads, H head dimension.

    y = swiglu(gate, up)
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# --- embedding, positions --------------------------------------------------------------------------------------------


def embedding(
    ids: Tensor, weight: Tensor, *, position_weight: Tensor | None = None, positions: Tensor | None = None
) -> Tensor:
    """Rows of weight [V, D] for ids [B, T]; plus rows of position_weight for positions, 0 to T - 1 unless given."""
    x = F.embedding(ids, weight)  # [B, T, D]
    if position_weight is None:
        return x
    if positions is None:
        return x + position_weight[: ids.shape[-1]]
    return x + F.embedding(positions, position_weight)


def rope(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    positions: Tensor | None = None,
    interleaved: bool = False,
    inplace: bool = False,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Turn pairs of q [B, T, N, H] and k [B, T, K, H] by the angles of their positions.

    cos and sin are [S, H / 2], a row for each position; `positions` are [T] or [B, T], 0 to T - 1 unless given. Pairs
    are (i, i + H / 2), or (2 i, 2 i + 1) with `interleaved`. With weights [H], q and k are first normalised by their
    root mean square (QK-norm). `inplace` writes the result over q and k.
    """
    if positions is None:
        cos, sin = cos[: q.shape[1]], sin[: q.shape[1]]  # [T, H/2]
    else:
        cos, sin = cos[positions], sin[positions]  # [T, H/2] or [B, T, H/2]
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)  # one for all heads
    turned = []
    for x, weight in ((q, q_weight), (k, k_weight)):
        y = x if weight is None else F.rms_norm(x.float(), (x.shape[-1],), weight.float(), eps)
        y = _turned(y.float(), cos, sin, interleaved).to(x.dtype)
        turned.append(x.copy_(y) if inplace else y)
    return turned[0], turned[1]


def _turned(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    if interleaved:
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


# --- activations, elementwise ----------------------------------------------------------------------------------------


def gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    """x times the normal distribution's share below x; approximate="tanh" is GPT-2's formula."""
    return F.gelu(x, approximate=approximate)


def silu(x: Tensor) -> Tensor:
    """x times its logistic function."""
    return F.silu(x)


def relu2(x: Tensor) -> Tensor:
    """The square of x where it is positive, else 0."""
    return F.relu(x).square()


def swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """silu(gate) * up; without `up`, gate is packed: its first half the gate, its second half up."""
    gate, up = _halves(gate, up)
    return F.silu(gate) * up


def geglu(gate: Tensor, up: Tensor | None = None, *, approximate: str = "none") -> Tensor:
    """gelu(gate) * up; packed or not, as swiglu."""
    gate, up = _halves(gate, up)
    return F.gelu(gate, approximate=approximate) * up


def _halves(gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    if up is not None:
        return gate, up
    first, second = gate.chunk(2, dim=-1)
    return first, second


def add(x: Tensor, y: Tensor, *, scale: float = 1.0) -> Tensor:
    """x + scale * y, with broadcasting."""
    return torch.add(x, y, alpha=scale)


def mul(x: Tensor, y: Tensor) -> Tensor:
    """x * y, with broadcasting."""
    return x * y
