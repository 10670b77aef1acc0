"""Ops that have no kernel yet: their final names and signatures, and plain torch behind them.

An op moves out of here into a file of its own the day it gets a kernel; nobody who calls it has to change. Sums are
fp32, results keep the dtype of what came in, as in the kernels. Shapes: B batch, T tokens, N heads, H head dimension.

    y, residual = layer_norm(x, weight, bias, residual=residual)
    loss = linear_cross_entropy(hidden, head_weight, targets)
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

LAYER_NORM_EPS = 1e-5
REDUCTIONS = ("mean", "sum", "none")


# --- norms and softmax -----------------------------------------------------------------------------------------------


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = LAYER_NORM_EPS,
    *,
    residual: Tensor | None = None,
) -> Any:
    """Subtract the mean of the last dimension, divide by its standard deviation, scale and shift.

    With `residual`, (the norm of x + residual, x + residual), as in rms_norm.
    """
    h = x if residual is None else (x + residual).to(residual.dtype)
    width = (x.shape[-1],)
    if weight is not None and weight.dtype != h.dtype:  # fp32 weights of a 16-bit stream
        y = F.layer_norm(h.float(), width, weight.float(), None if bias is None else bias.float(), eps).to(x.dtype)
    else:
        y = F.layer_norm(h, width, weight, bias, eps).to(x.dtype)
    return y if residual is None else (y, h)


def softmax(x: Tensor, *, scale: float = 1.0, causal: bool = False, mask: Tensor | None = None) -> Tensor:
    """Softmax of scale * x + mask over the last dimension.

    With `causal`, x is [..., T, S], the T queries being the last of the S positions: query t sees keys up to t + S - T.
    A row in which nothing may be seen is all zeros.
    """
    scores = x.float() * scale
    if mask is not None:
        scores = scores + mask.float()
    if causal:
        rows, columns = x.shape[-2:]
        hidden = torch.ones(rows, columns, dtype=torch.bool, device=x.device).triu(columns - rows + 1)  # [T, S]
        scores = scores.masked_fill(hidden, -torch.inf)
    if mask is None and not (causal and x.shape[-2] > x.shape[-1]):
        return torch.softmax(scores, dim=-1).to(x.dtype)
    # Before and after: softmax of nothing but -inf is NaN, and so would be its gradient.
    blind = (scores == -torch.inf).all(-1, keepdim=True)
    probabilities = torch.softmax(scores.masked_fill(blind, 0.0), dim=-1)
    return probabilities.masked_fill(blind, 0.0).to(x.dtype)


# --- losses ----------------------------------------------------------------------------------------------------------


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
    inplace: bool = False,
) -> Tensor:
    """Cross-entropy in fp32 of logits [..., V] and integer targets [...].

    `softcap` bends the logits to softcap * tanh(logits / softcap) first; `z_loss` adds that many times the square of
    each row's log-sum-exp. "mean" is over the targets that are not `ignore_index`, and 0 where there are none.
    `inplace` allows the logits to be overwritten; plain torch does not make use of it.
    """
    if reduction not in REDUCTIONS:
        raise ValueError(f"cross_entropy: reduction is one of {', '.join(REDUCTIONS)}; got {reduction!r}.")
    if logits.shape[:-1] != targets.shape:
        raise ValueError(
            f"cross_entropy: targets have the shape of the logits without the last dimension; got "
            f"{list(targets.shape)} for logits {list(logits.shape)}. Reshape one of them."
        )
    rows = logits.reshape(-1, logits.shape[-1]).float()  # [M, V]
    flat = targets.reshape(-1).long()
    if softcap is not None:
        rows = softcap * torch.tanh(rows / softcap)
    loss = F.cross_entropy(rows, flat, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="none")
    counted = flat != ignore_index
    if z_loss:
        loss = loss + z_loss * torch.logsumexp(rows, dim=-1).square() * counted
    if reduction == "none":
        return loss.reshape(targets.shape)
    total = loss.sum()
    return total if reduction == "sum" else total / counted.sum().clamp(min=1)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
    max_bytes: int | None = None,
) -> Tensor:
    """The loss of hidden [..., D] through a head [V, D]: cross_entropy(hidden @ weight.T + bias, targets).

    `max_bytes` bounds what logits may take at a time, in fp32: rows are then worked off in blocks, whose logits are
    made again for the backward pass. None: all at once.
    """
    options: dict[str, Any] = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "z_loss": z_loss}
    options |= {"softcap": softcap}
    rows, flat = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    block = len(rows) if max_bytes is None else max(1, max_bytes // (4 * weight.shape[0]))

    def part(some: Tensor, wanted: Tensor, how: str) -> Tensor:
        logits = F.linear(some, weight.to(some.dtype), None if bias is None else bias.to(some.dtype))  # [M, V]
        return cross_entropy(logits, wanted, reduction=how, **options)

    if block >= len(rows):
        loss = part(rows, flat, reduction)
        return loss.reshape(targets.shape) if reduction == "none" else loss
    parts = [
        torch.utils.checkpoint.checkpoint(
            part, some, wanted, "none" if reduction == "none" else "sum", use_reentrant=False
        )
        for some, wanted in zip(rows.split(block), flat.split(block), strict=True)
    ]
    if reduction == "none":
        return torch.cat(parts).reshape(targets.shape)
    total = torch.stack(parts).sum()
    return total if reduction == "sum" else total / (flat != ignore_index).sum().clamp(min=1)


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
