"""The loss on a whole validation split, by a protocol that never changes, so that runs can be compared.

The split is one stream, cut into windows of `context` tokens that do not overlap, from its first token on; the last
window is shorter. Every token but the first is a target once. Losses are summed in fp32 within a batch and in float64
over batches, and divided by the number of targets. Bits per byte is the same sum in bits, divided by the bytes of text
that the targets stand for; special tokens stand for no text, their loss counts all the same.

    result = evaluate(model.loss, shards["valid"], batch_size=64, context=256, device=device)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fuselm.data.shards import Shard
from fuselm.text.tokenizer import Tokenizer

IGNORED = -100
Loss = Callable[[Tensor, Tensor, str], Any]  # (inputs, targets, "sum") -> (summed loss, balance)


@dataclass(frozen=True)
class Evaluation:
    """A loss in nats a token, and what it was measured on."""

    loss: float
    targets: int
    bits_per_byte: float | None  # None where no tokenizer says how many bytes there are


@torch.no_grad()
def evaluate(
    loss: Loss,
    shard: Shard,
    *,
    batch_size: int,
    context: int,
    device: torch.device,
    tokenizer: Tokenizer | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """The loss of every target of a split; the model must be in eval mode."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    count = shard.tokens.size - 1
    for done, (inputs, targets) in enumerate(_windows(shard.tokens, batch_size, context), start=1):
        total += loss(inputs.to(device), targets.to(device), "sum")[0].double()
        if on_progress:
            on_progress(min(done * batch_size * context, count), count)
    nats = float(total)
    size = 0 if tokenizer is None else text_bytes(shard.tokens[1:], tokenizer)
    return Evaluation(nats / count, count, nats / math.log(2) / size if size else None)


def _windows(tokens: np.ndarray, batch_size: int, context: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and targets [B, T], always of that shape: what is missing at the end is filled up and not counted."""
    count = tokens.size - 1
    if count < 1:
        raise ValueError(f"A validation split has at least 2 tokens; this one has {tokens.size}. Use a longer corpus.")
    size = batch_size * context
    for first in range(0, count, size):
        part = tokens[first : first + size + 1].astype(np.int64)
        inputs = np.zeros(size, dtype=np.int64)
        targets = np.full(size, IGNORED, dtype=np.int64)
        inputs[: part.size - 1], targets[: part.size - 1] = part[:-1], part[1:]
        rows = -(-(part.size - 1) // context)  # rows that are filled up whole would cost time and count for nothing
        yield (
            torch.from_numpy(inputs.reshape(batch_size, context)[:rows]),
            torch.from_numpy(targets.reshape(batch_size, context)[:rows]),
        )


def text_bytes(tokens: np.ndarray, tokenizer: Tokenizer) -> int:
    """How many bytes of text the tokens stand for; special tokens stand for none."""
    lengths = np.zeros(tokenizer.vocab_size, dtype=np.int64)
    specials = set(tokenizer.special_tokens.values())
    for token, text in tokenizer.vocab.items():
        lengths[token] = 0 if token in specials else len(text)
    counts = np.bincount(tokens, minlength=tokenizer.vocab_size)
    return int(counts[: len(lengths)] @ lengths)
