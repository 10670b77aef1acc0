"""One step of training: gradients of a batch, a little at a time, and what is done with them.

It knows a model's loss, an optimiser and a precision; it knows no data, files or schedules. Whether a step is made, is
decided on the device; the numbers behind it are read when somebody asks, so that the host can launch the next step
before this one is done. A step that is not made leaves no trace.

    found = gradients(loss, parameters, feed.next(16), parts=4, scale=scaler.scale)
    update(optimizer, found, learning_rate=1e-3, clip=1.0, limit=math.inf)
    outcome = found.outcome()                          # waits for the device
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fuselm.optim import AdamW, clip_scale, global_norm

Loss = Callable[[Tensor, Tensor], Any]  # (inputs, targets) -> (mean loss, balance)
Norm = Callable[[Sequence[Tensor]], Tensor]


class Outcome(NamedTuple):
    """What a batch's gradients were like: mean loss, balance loss and the gradient's norm, without the loss scale."""

    loss: float
    balance: float
    norm: float

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.norm)


class Sums(NamedTuple):
    """What a batch comes to on the device, each a 0-dim fp32 tensor; the norm is of gradients times the loss scale."""

    loss: Tensor
    balance: Tensor
    scaled_norm: Tensor


class Found:
    """An outcome on the device, on its way to the host."""

    def __init__(self, loss: Tensor, balance: Tensor, scaled_norm: Tensor, scale: float) -> None:
        self.loss, self.scale = loss, scale
        self.norm = scaled_norm if scale == 1.0 else scaled_norm / scale  # 0-dim fp32
        numbers = torch.stack([loss, balance, self.norm])  # [3]
        self._arrived: torch.cuda.Event | None = None
        if numbers.is_cuda:
            self._numbers = torch.empty(3, pin_memory=True).copy_(numbers, non_blocking=True)
            self._arrived = torch.cuda.Event()
            # On the stream of the copy: by itself an event takes that of the current device, which may be another.
            self._arrived.record(torch.cuda.current_stream(numbers.device))
        else:
            self._numbers = numbers

    def is_bad(self, limit: float) -> Tensor:
        """Whether the step must not be made: a 0-dim bool tensor on the device."""
        # A norm that is not finite makes the sum NaN, which is not below anything. (Each launch leaves the device idle
        # for longer than it takes.)
        return ~(torch.add(self.loss, self.norm, alpha=0.0) <= limit)

    def outcome(self) -> Outcome:
        """The numbers, as soon as they are there."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return Outcome(*self._numbers.tolist())


def gradients(
    loss: Loss,
    parameters: Sequence[Tensor],
    batches: Iterable[tuple[Tensor, Tensor]],
    *,
    parts: int,
    scale: float = 1.0,
    balance_weight: float = 0.0,
    norm: Norm = global_norm,
) -> Found:
    """Accumulate the gradients of `parts` micro-batches of one size: those of their mean loss, times `scale`.

    The mean over equal parts of means is the mean over all targets, so the loss is that of one big batch. The balance
    loss of experts is a product of means, and is balanced within each part. `norm` is that of all gradients.
    """
    fixed: dict[str, Any] = {"parts": parts, "balance_weight": balance_weight, "norm": norm}
    sums = accumulate(loss, parameters, batches, scale=scale, **fixed)
    return Found(*sums, scale)


def accumulate(
    loss: Loss,
    parameters: Sequence[Tensor],
    batches: Iterable[tuple[Tensor, Tensor]],
    *,
    parts: int,
    scale: float | Tensor,
    balance_weight: float,
    norm: Norm,
) -> Sums:
    """The work of `gradients` on the device alone: nothing of it waits, so that a CUDA graph can hold it."""
    for parameter in parameters:
        parameter.grad = None
    losses, balances = [], []
    share = scale if parts == 1 else scale / parts
    for inputs, targets in batches:
        value, balance = loss(inputs, targets)
        whole = value + balance_weight * balance if balance_weight else value
        # Begun with the share: a loss times it would begin with 1, and come to the same bits by three launches.
        share = share if isinstance(share, Tensor) else torch.full_like(whole, share)
        whole.backward(share)
        losses.append(value.detach())
        balances.append(balance.detach())
    length = norm([parameter.grad for parameter in parameters if parameter.grad is not None])
    return Sums(_mean(losses), _mean(balances), length)


def _mean(numbers: Sequence[Tensor]) -> Tensor:
    return numbers[0] if len(numbers) == 1 else torch.stack(list(numbers)).mean()


def update(optimizer: AdamW, found: Found, *, learning_rate: float, clip: float, limit: float = math.inf) -> None:
    """Step with the gradients that are there, unless they are not finite or the loss is above `limit`.

    Their norm is cut to `clip` (0: as they are), and the loss scale taken out, while the optimiser reads them.
    """
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    factor: Tensor | None = None
    if clip:
        factor = clip_scale(found.norm, clip)
        factor = factor if found.scale == 1.0 else factor / found.scale
    elif found.scale != 1.0:
        factor = torch.full_like(found.norm, 1 / found.scale)
    optimizer.step(grad_scale=factor, skip=found.is_bad(min(limit, torch.finfo(torch.float32).max)))
