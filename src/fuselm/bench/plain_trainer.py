"""Trains plain_model.py as people train such a model: autocast, torch's fused AdamW and clip_grad_norm_, a schedule.

The yardstick beside our trainer: the same first weights, batches, learning rates, decay and clipping, and the same
interface, so that one loop times both. It does less: it neither looks for bad steps nor splits a batch. Autocast keeps
what is added up from layer to layer in fp32, where ours is in 16 bits. It has no loss scale, and so is not for fp16.

    plain = PlainTrainer(trainer, compiled=True)       # of a Trainer that has made no step
    plain.advance()
    plain.losses()
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from fuselm.bench.plain_model import PlainModel
from fuselm.optim import decay_groups
from fuselm.torchlm.feed import Feed
from fuselm.torchlm.precision import DTYPES
from fuselm.torchlm.train import Trainer


class PlainTrainer:
    """A run of PlainModel in the place of another run's model."""

    def __init__(self, trainer: Trainer, *, compiled: bool) -> None:
        begin = time.monotonic()
        plain = PlainModel(trainer.run.model)
        taking = time.monotonic()
        plain.take(trainer.model)
        self.config, self.device = trainer.config, trainer.device
        self.dtype = DTYPES[trainer.precision]
        self.tokens_per_step, self.micro_batch = trainer.tokens_per_step, self.config.batch_size
        self.rate = trainer.rate
        _forget(trainer)
        taken = time.monotonic()
        shard, context = trainer.shards["train"], trainer.run.model.context
        fixed: dict[str, Any] = {"batch_size": self.config.batch_size, "rows": self.config.rows}
        self.feed = Feed(shard, context=context, seed=self.config.seed, device=self.device, **fixed)
        self.model = plain.to(self.device)
        self.loss: Any = torch.compile(self.model) if compiled else self.model
        on_gpu = self.device.type == "cuda"
        groups = decay_groups(self.model.named_parameters(), self.config.weight_decay)
        self.optimizer = torch.optim.AdamW(groups, betas=self.config.betas, eps=self.config.eps, fused=on_gpu)
        # As ours is built: model, batches and optimiser, on the device. Taking our weights is no part of it.
        self.build_seconds = (taking - begin) + (time.monotonic() - taken)
        self.step = 0
        self._losses: list[Tensor] = []

    def advance(self) -> None:
        """One step on the next batch, all of it at once."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate(self.step)
        [(inputs, targets)] = self.feed.next(self.config.batch_size)
        narrow = torch.autocast(self.device.type, self.dtype) if self.dtype != torch.float32 else nullcontext()
        with narrow:
            loss = self.loss(inputs, targets)
        loss.backward()
        if self.config.clip:
            clip_grad_norm_(self.model.parameters(), self.config.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._losses.append(loss.detach())
        self.step += 1

    def losses(self) -> list[float]:
        """Of every step so far; waits for the device."""
        found: list[float] = torch.stack(self._losses).tolist()
        return found


def _forget(trainer: Trainer) -> None:
    """Our model must neither take memory nor count in the peak, and the corpus not be there twice."""
    del trainer.model, trainer.parameters, trainer.optimizer, trainer.loss, trainer.feed
    if trainer.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(trainer.device)
