"""Text from a model while it is being trained: a batch of samples at a time, with a cache of keys and values.

It knows a model and ids; what the ids mean is the tokenizer's. Every row starts with the same prompt.

    rows = sample(model, [separator], count=20, max_tokens=250, temperature=0.8, seed=1, stop=separator)
    rows[0].ids, rows[0].finished
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fuselm.torchlm.cache import Cache
from fuselm.torchlm.model import Transformer


class Sample(NamedTuple):
    """The ids after the prompt, without the stop token; `finished` says whether that came."""

    ids: list[int]
    finished: bool


@torch.no_grad()
def sample(
    model: Transformer,
    prompt: Sequence[int],
    *,
    count: int = 1,
    max_tokens: int = 120,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
    stop: int | None = None,
    vocab_size: int | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[Sample]:
    """`count` continuations of a prompt of one token or more; temperature 0 takes the likeliest token.

    A row ends at the stop token, after max_tokens, or where the model's context is full. Ids from `vocab_size` on,
    which a padded head has and the tokenizer has not, are never drawn. No global random state is touched.
    """
    _check(prompt, count, temperature, top_k, model.config.context)
    was_training = model.training
    model.eval()
    try:
        drawn = _drawn(model, prompt, count, max_tokens, (temperature, top_k, seed), stop, vocab_size, on_progress)
    finally:
        model.train(was_training)
    return [_ended(row, stop) for row in drawn]


def _drawn(
    model: Transformer,
    prompt: Sequence[int],
    count: int,
    max_tokens: int,
    how: tuple[float, int | None, int],
    stop: int | None,
    vocab_size: int | None,
    on_progress: Callable[[int, int], None] | None,
) -> list[list[int]]:
    temperature, top_k, seed = how
    device = model.embedding.device
    steps = min(max_tokens, model.config.context - len(prompt) + 1)
    generator = torch.Generator(device=device).manual_seed(seed)
    cache = Cache(model.config.num_layers, count, model.config.context)
    ids = torch.tensor([list(prompt)] * count, device=device)  # [B, T]
    drawn: list[Tensor] = []
    running = torch.ones(count, dtype=torch.bool, device=device)
    for step in range(steps):
        hidden, _ = model.hidden(ids, cache)
        logits = model.logits(hidden[:, -1]).float()[:, :vocab_size]  # [B, V]
        ids = _draw(logits, temperature, top_k, generator)  # [B, 1]
        drawn.append(ids)
        running &= ids[:, 0] != (-1 if stop is None else stop)
        if on_progress:
            on_progress(step + 1, steps)
        if not bool(running.any()):
            break
    return torch.cat(drawn, dim=1).tolist() if drawn else [[] for _ in range(count)]


def _draw(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> Tensor:
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    if top_k is not None and top_k < logits.shape[-1]:
        least = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    # The largest becomes 0 first: divided by a tiny temperature it would be infinite.
    scaled = (logits - logits.max(-1, keepdim=True).values) / temperature
    # What a model says that has lost its numbers is anything; it must not end a run that has a policy for bad steps.
    scaled = scaled.nan_to_num(nan=0.0, neginf=-torch.inf)
    return torch.multinomial(torch.softmax(scaled, dim=-1), 1, generator=generator)


def _ended(ids: list[int], stop: int | None) -> Sample:
    if stop is not None and stop in ids:
        return Sample(ids[: ids.index(stop)], True)
    return Sample(ids, False)


def _check(prompt: Sequence[int], count: int, temperature: float, top_k: int | None, context: int) -> None:
    if not prompt or count < 1:
        raise ValueError(f"Samples go on from a prompt of one token or more; got {len(prompt)} tokens, {count} rows.")
    if len(prompt) > context:
        raise ValueError(f"A prompt has at most context = {context} tokens; got {len(prompt)}. Cut it.")
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature is 0 or more and finite; got {temperature}.")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k is at least 1, or None for all; got {top_k}.")
