"""How many rows go through the model at once: what fits, in equal parts, and words where nothing does."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fuselm import cost
from fuselm.config import ModelConfig
from fuselm.torchlm import memory
from fuselm.torchlm.memory import free_bytes, logits_bytes, pick_micro_batch
from tests.torchlm.runs import LATENT, MODEL

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def config(**changes: Any) -> ModelConfig:
    return ModelConfig(**{"vocab_size": 50, **MODEL, "context": 128, **changes})


def room_for(rows: int, precision: str = "fp32", **changes: Any) -> int:
    """Free bytes of which so many rows fill what may be used."""
    width = 4 if precision == "fp32" else 2
    one = config(**changes)
    used = cost.training_state_bytes(one) + cost.activation_bytes(one, rows, one.context, width)
    return int(used / memory.SHARE) + 2


def with_free(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda device: size)
    with_memory(monkeypatch, 8)


def with_memory(monkeypatch: pytest.MonkeyPatch, gib: int) -> None:
    properties = SimpleNamespace(total_memory=gib << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("fits", "taken"), [(24, 24), (23, 12), (12, 12), (11, 8), (7, 6), (5, 4), (1, 1)])
def test_a_gpu_takes_the_largest_equal_part_that_fits(
    fits: int, taken: int, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_free(monkeypatch, room_for(fits, precision))
    assert pick_micro_batch(config(), 24, GPU, precision) == taken


@given(st.integers(1, 200), st.sampled_from([128, 1024, 8192]))
def test_a_part_always_divides_the_batch_and_a_cpu_takes_few_tokens(batch_size: int, context: int) -> None:
    rows = pick_micro_batch(config(context=context), batch_size, CPU, "fp32")
    most = max(1, memory.CPU_TOKENS // context)
    assert batch_size % rows == 0
    assert rows <= most
    assert not any(batch_size % more == 0 for more in range(rows + 1, most + 1))


@pytest.mark.parametrize("changes", [{"dropout": 0.1}, LATENT])
def test_on_a_cpu_attention_that_makes_matrices_is_counted_so(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_free(monkeypatch, room_for(8, **changes))
    assert pick_micro_batch(config(**changes), 8, GPU, "fp32") == 8
    assert pick_micro_batch(config(**changes), 8, CPU, "fp32") < 8
    with_free(monkeypatch, room_for(8, attention_path="written", **changes))
    assert pick_micro_batch(config(**changes), 8, CPU, "fp32") == 8


@pytest.mark.parametrize(("gib", "mib"), [(8, 256), (32, 256), (80, 640), (140, 1120)])
def test_a_loss_may_hold_more_logits_on_a_gpu_of_much_memory(
    gib: int, mib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_memory(monkeypatch, gib)
    assert logits_bytes(GPU) == mib << 20
    assert logits_bytes(CPU) == cost.LOGITS_BYTES


def test_more_logits_are_counted_where_a_micro_batch_is_picked(monkeypatch: pytest.MonkeyPatch) -> None:
    large = config(vocab_size=500_000)
    with_free(monkeypatch, room_for(4, vocab_size=500_000))
    assert pick_micro_batch(large, 4, GPU, "fp32") == 4
    with_memory(monkeypatch, 140)
    assert pick_micro_batch(large, 4, GPU, "fp32") < 4


def test_where_not_even_a_row_fits_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with_free(monkeypatch, 1000)
    with pytest.raises(ValueError, match=r"memory for the model and one row at least.* free on cpu\. Use a smaller"):
        pick_micro_batch(config(), 4, CPU, "fp32")


def test_the_free_memory_of_this_machine_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def lines(path: Path) -> list[str]:
        assert path == Path("/proc/meminfo")
        return ["MemTotal:       16000 kB", "MemAvailable:    9000 kB"]

    assert free_bytes(CPU) > 1 << 20
    monkeypatch.setattr(memory, "_lines", lines)
    assert free_bytes(CPU) == 9000 * 1024
    monkeypatch.setattr(memory, "_lines", lambda path: [])
    assert free_bytes(CPU) > 1 << 20  # all there is, where nobody says what of it is free
