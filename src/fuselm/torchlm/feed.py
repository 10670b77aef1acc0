"""Batches where the model is: rows of the loader as tensors on a device.

On a GPU the whole corpus is kept there when it fits well, and a batch is a gather on the GPU; else rows are read here
and copied. Both give the same rows. It knows no model.

    feed = Feed(shards["train"], batch_size=64, context=256, seed=1, device=device)
    for inputs, targets in feed.next(micro_batch=16): ...        # [16, T] each, four of them
    Feed(..., **feed.state())                                    # goes on with the next batch
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from fuselm.data.loader import Loader, RowMode
from fuselm.data.shards import Shard

RESIDENT_SHARE = 0.1  # of the memory that is free on the GPU: the corpus may take this much


class Feed:
    """The batches of a run, in the order that the seed names."""

    def __init__(
        self,
        shard: Shard,
        *,
        batch_size: int,
        context: int,
        seed: int,
        rows: RowMode = "stream",
        device: torch.device,
        epoch: int = 0,
        position: int = 0,
    ) -> None:
        self.device = device
        self.loader = Loader(
            shard, batch_size=batch_size, context=context, seed=seed, rows=rows, epoch=epoch, position=position
        )
        self._window = torch.arange(context + 1, device=device)
        self._tokens = _resident(shard.tokens, device)

    @property
    def resident(self) -> bool:
        """Whether the corpus is in the GPU's memory."""
        return self._tokens is not None

    def next(self, micro_batch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs and targets of the next batch, [rows, T] int64 each, `micro_batch` rows at a time."""
        if self._tokens is None:
            batch = next(self.loader)
            pairs = torch.from_numpy(np.stack(batch))  # [2, B, T] int32
            if self.device.type == "cuda":
                pairs = pairs.pin_memory().to(self.device, non_blocking=True)
            inputs, targets = pairs.long().unbind(0)
        else:
            # Pinned: a copy from pageable memory would wait until the GPU has done everything before it.
            starts = torch.from_numpy(self.loader.next_starts()).pin_memory().to(self.device, non_blocking=True)  # [B]
            ids = self._tokens[starts[:, None] + self._window].long()  # [B, T + 1]
            ids = ids & 0xFFFF if self._tokens.dtype == torch.int16 else ids
            inputs, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
        yield from zip(inputs.split(micro_batch), targets.split(micro_batch), strict=True)

    def state(self) -> dict[str, int]:
        """Where the next batch stands."""
        return self.loader.state()


def _resident(tokens: np.ndarray, device: torch.device) -> Tensor | None:
    """The corpus in GPU memory, two bytes a token as they are: torch has no arithmetic for uint16, so as int16."""
    if device.type != "cuda":
        return None
    narrow = tokens.dtype.itemsize == 2
    size = tokens.size * (2 if narrow else 4)
    if size > RESIDENT_SHARE * torch.cuda.mem_get_info(device)[0]:
        return None
    signed = tokens.view(np.int16) if narrow else tokens.astype(np.int32)
    return torch.from_numpy(np.array(signed)).to(device)  # a copy: a memory map cannot be written, and torch minds
