"""Losses and gradients of rows of logits by torch's own ops, some rows at a time: what runs where there is no kernel.

Knows torch and the formulas of kernels/cross_entropy.py; neither raw ops nor autograd. Scalars are ignore_index,
label_smoothing, z_loss and softcap (0: none).

    losses, lse = losses_of(logits, targets, -100, 0.0, 0.0, 0.0)
    dlogits = gradient_of(logits, targets, lse, dloss, count, -100, 0.0, 0.0, 0.0)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

# The formulas below hold half a dozen fp32 arrays of what they are given: no more elements at a time than this.
PART = 1 << 20


def parts(*tensors: Any) -> Iterator[tuple[Any, ...]]:
    """Some rows after others of these, logits first; what has no rows, or is not there, goes with each of them."""
    logits: Tensor = tensors[0]
    if logits.dim() == 1 or logits.numel() <= PART:
        yield tensors
        return
    step = PART // logits[0].numel()
    for start in range(0, len(logits), max(step, 1)):
        own: Any = slice(start, start + step) if step else start
        yield from parts(*(t if t is None or not t.dim() else t[own] for t in tensors))


def losses_of(logits: Tensor, targets: Tensor, *scalars: Any) -> tuple[Tensor, Tensor]:
    """Of each row, with its lse."""
    ignore_index, label_smoothing, z_loss, softcap = scalars
    t = _capped(logits, softcap)
    # One pass, and from the distances to the largest logit: smaller numbers than the lse, and so rounded less.
    log_shares = torch.log_softmax(t, dim=-1)
    counts, inside = counting(targets, logits.shape[-1], ignore_index)
    at_target = log_shares.gather(-1, inside[..., None])[..., 0]
    lse = t.gather(-1, inside[..., None])[..., 0] - at_target
    losses = (label_smoothing - 1) * at_target
    if label_smoothing:
        losses = losses - label_smoothing * log_shares.mean(-1)
    if z_loss:
        losses = losses + z_loss * lse.square()
    return torch.where(counts, losses, 0.0), lse


def wide_dtype(losses: Tensor) -> torch.dtype:
    """What losses are added up in: many of them make a sum that fp32 is coarse for."""
    return torch.float32 if losses.device.type == "mps" else torch.float64  # which MPS lacks


def gradient_of(
    logits: Tensor, targets: Tensor, lse: Tensor, dloss: Tensor, count: Tensor | None, *scalars: Any
) -> Tensor:
    """Of the logits, for `dloss` coming in: one number, or one for each row; of their mean where there is a count."""
    ignore_index, label_smoothing, z_loss, softcap = scalars
    counts, inside = counting(targets, logits.shape[-1], ignore_index)
    factor = dloss if count is None else dloss / count.clamp(min=1)
    factor = torch.where(counts, factor, 0.0)[..., None]  # [..., 1]
    t = _capped(logits, softcap)
    gradient = torch.softmax(t, dim=-1)  # exp(t - lse) would carry the rounding of the lse
    if z_loss:
        gradient.mul_(1 + 2 * z_loss * lse[..., None])
    if label_smoothing:
        gradient.sub_(label_smoothing / logits.shape[-1])
    less = torch.full_like(inside[..., None], label_smoothing - 1, dtype=torch.float32)
    gradient.scatter_add_(-1, inside[..., None], less)
    if softcap:
        gradient.mul_(1 - (t / softcap).square_())
    gradient.mul_(factor)
    if gradient.device.type != "cpu" or not bool(counts.all()):  # on a CPU a look is cheaper than a pass
        # A row that does not count has gradient 0 whatever its logits are, NaN included.
        gradient = torch.where(counts[..., None], gradient, 0.0)
    return gradient.to(logits.dtype)


def _capped(logits: Tensor, softcap: float) -> Tensor:
    """In fp32 and contiguous: torch adds up in the order of the strides, and a row's sum must not depend on those."""
    t = logits.float().contiguous()
    return softcap * torch.tanh(t / softcap) if softcap else t


def counting(targets: Tensor, width: int, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Which targets count, and all of them brought into range, to index with."""
    wide = targets.long()
    inside = wide.clamp(0, width - 1)
    return (wide == inside) & (wide != ignore_index), inside
