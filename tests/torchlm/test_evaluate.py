"""The evaluation protocol: which targets count, in which windows, and bits per byte, against float64 by hand."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fuselm.data import open_prepared
from fuselm.text.tokenizer import Tokenizer
from fuselm.torchlm.evaluate import evaluate, text_bytes
from tests.torchlm.runs import LATENT, begin, memory_shard, prepared

CPU = torch.device("cpu")
END = "<|endoftext|>"


class Watching:
    """A loss that notes what it is asked about. A target's loss depends on all inputs before it in its window."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []
        self.pairs: list[tuple[int, int]] = []
        self.rows: list[list[int]] = []

    def __call__(self, inputs: Tensor, targets: Tensor, reduction: str) -> tuple[Tensor, Tensor]:
        assert reduction == "sum"
        assert inputs.dtype == targets.dtype == torch.int64
        counted = targets != -100
        self.shapes.append(tuple(inputs.shape))
        self.pairs += list(zip(inputs[counted].tolist(), targets[counted].tolist(), strict=True))
        self.rows += [row[seen].tolist() for row, seen in zip(inputs, counted, strict=True)]
        losses = losses_of(inputs.double().cumsum(-1), targets.double())
        return losses[counted].sum(), torch.zeros(())


def losses_of(history: Any, target: Any) -> Any:
    return (history * 0.37 + target * 0.11) % 5.0


def by_hand(tokens: list[int], context: int) -> float:
    """The protocol, one target after another."""
    total = 0.0
    for place in range(1, len(tokens)):
        window = (place - 1) // context * context
        total += losses_of(float(sum(tokens[window:place])), float(tokens[place]))
    return total / (len(tokens) - 1)


@pytest.mark.parametrize("batch_size", [1, 3, 64])
@pytest.mark.parametrize("count", [2, 8, 9, 10, 24, 25, 26, 100])
def test_every_target_counts_once_in_windows_that_do_not_overlap(count: int, batch_size: int) -> None:
    loss = Watching()
    found = evaluate(loss, memory_shard(range(count)), batch_size=batch_size, context=8, device=CPU)
    assert loss.pairs == [(place, place + 1) for place in range(count - 1)]
    assert loss.rows == [list(range(first, min(first + 8, count - 1))) for first in range(0, count - 1, 8)]
    assert all(rows <= batch_size and context == 8 for rows, context in loss.shapes)
    assert found.targets == count - 1


@pytest.mark.parametrize("count", [2, 9, 26, 333])
def test_the_loss_is_the_mean_of_all_targets_whatever_the_batch(count: int) -> None:
    tokens = np.random.default_rng(count).integers(0, 1000, count)
    expected = by_hand(tokens.tolist(), context=8)
    for batch_size in (1, 2, 5, 100):
        found = evaluate(Watching(), memory_shard(tokens), batch_size=batch_size, context=8, device=CPU)
        assert found.loss == pytest.approx(expected, rel=1e-12)
        assert found.bits_per_byte is None


def test_progress_is_told_and_ends_at_all_targets() -> None:
    told: list[tuple[int, int]] = []
    shard = memory_shard(range(50))
    evaluate(
        Watching(),
        shard,
        batch_size=2,
        context=8,
        device=CPU,
        on_progress=lambda done, total: told.append((done, total)),
    )
    assert told == [(16, 49), (32, 49), (48, 49), (49, 49)]


@pytest.mark.parametrize("count", [0, 1])
def test_a_split_without_a_target_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match=f"at least 2 tokens; this one has {count}"):
        evaluate(Watching(), memory_shard(range(count)), batch_size=2, context=8, device=CPU)


@pytest.mark.parametrize("model", [{}, LATENT, {"norm": "layer", "positions": "learned"}])
def test_a_models_loss_is_that_of_its_logits_in_float64(model: dict[str, Any], tmp_path: Path) -> None:
    trainer, _ = begin(tmp_path / "run", prepared(tmp_path / "data"), model={"dropout": 0.5, **model})
    tokens = trainer.shards["valid"].tokens.astype(np.int64)
    total = 0.0
    with torch.no_grad():
        still = copy.deepcopy(trainer.model).eval()
        for first in range(0, tokens.size - 1, 16):
            window = torch.from_numpy(tokens[first : first + 17])
            logits = still(window[None, :-1])[0].double()
            total -= float(torch.log_softmax(logits, -1).gather(1, window[1:, None]).sum())
    found = trainer.evaluation()
    assert found.loss == pytest.approx(total / (tokens.size - 1), rel=2e-6)
    assert trainer.model.training


# --- bits per byte ---------------------------------------------------------------------------------------------------


def byte_pairs() -> Tokenizer:
    vocab = {byte: bytes([byte]) for byte in range(256)} | {256: b"he", 257: b"the"}
    return Tokenizer(vocab, [(b"h", b"e"), (b"t", b"he")], [END])


TEXT = "the hen, the Häher and the 🐓: their the thé."


@pytest.mark.parametrize("tokenizer", [byte_pairs(), Tokenizer.characters(TEXT, [END])], ids=["pairs", "characters"])
def test_bits_are_per_byte_of_the_text_that_targets_stand_for(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT + END + TEXT + END, allowed_special="all")
    assert tokenizer.end_of_text in ids
    found = evaluate(Watching(), memory_shard(ids), batch_size=2, context=8, device=CPU, tokenizer=tokenizer)
    plain = [token for token in ids[1:] if token != tokenizer.end_of_text]  # the first token is no target
    size = len(tokenizer.decode(plain).encode())
    assert size == 2 * len(TEXT.encode()) - len(tokenizer.decode_bytes(ids[:1]))
    assert found.bits_per_byte == pytest.approx(found.loss * (len(ids) - 1) / math.log(2) / size, rel=1e-12)


def test_special_tokens_stand_for_no_bytes() -> None:
    tokenizer = byte_pairs()
    special = tokenizer.special_tokens[END]
    assert text_bytes(np.array([special] * 5, dtype=np.uint16), tokenizer) == 0
    assert text_bytes(np.array([special, 257, special, 256, 65], dtype=np.uint16), tokenizer) == 6
    only = evaluate(Watching(), memory_shard([special] * 5), batch_size=1, context=8, device=CPU, tokenizer=tokenizer)
    assert only.bits_per_byte is None  # nothing to divide by


def test_the_stories_bits_per_byte_are_of_their_decoded_text(tmp_path: Path) -> None:
    data = prepared(tmp_path / "data")
    trainer, _ = begin(tmp_path / "run", data)
    shard = open_prepared(data)["valid"]
    found = trainer.evaluation()
    text = trainer.tokenizer.decode(shard.tokens[1:].tolist()).replace(END, "")
    assert found.bits_per_byte == pytest.approx(found.loss * found.targets / math.log(2) / len(text.encode()), rel=1e-9)
