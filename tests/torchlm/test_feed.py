"""Batches on a device: the loader's rows, whether they are read on the host or gathered from a corpus on the GPU.

The GPU is a pretended one that keeps its tensors on the CPU; tests/torchlm/test_train_gpu.py has the real one.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fuselm.data.loader import Loader
from fuselm.data.shards import Shard
from fuselm.torchlm import feed as feed_module
from fuselm.torchlm.feed import Feed
from tests.torchlm.runs import memory_shard, prepared

CPU = torch.device("cpu")
PLACE: dict[str, Any] = {"batch_size": 6, "context": 8, "seed": 5}


def tokens(dtype: str, count: int = 600) -> Shard:
    """Ids all over the dtype's range: of uint16, half of them negative as int16."""
    top = 2**16 if dtype == "uint16" else 2**31
    return memory_shard(np.random.default_rng(0).integers(0, top, count), dtype)


def pretend_gpu(monkeypatch: pytest.MonkeyPatch, free: int) -> Any:
    """A device of type cuda to which tensors move by staying where they are."""

    class Moving:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor

        def pin_memory(self) -> Moving:
            return self

        def to(self, device: Any, non_blocking: bool = False) -> Tensor:
            assert device is gpu
            return self.tensor

    gpu = SimpleNamespace(type="cuda")
    pretended = SimpleNamespace(
        from_numpy=lambda array: Moving(torch.from_numpy(array)),
        arange=lambda count, device: torch.arange(count),
        cuda=SimpleNamespace(mem_get_info=lambda device: (free, free)),
        int16=torch.int16,
    )
    monkeypatch.setattr(feed_module, "torch", pretended)
    return gpu


def joined(parts: Any) -> tuple[Tensor, Tensor]:
    inputs, targets = zip(*parts, strict=True)
    return torch.cat(inputs), torch.cat(targets)


def assert_rows_of_the_loader(feed: Feed, loader: Loader, batches: int, micro_batch: int) -> None:
    for _ in range(batches):
        batch = next(loader)
        parts = list(feed.next(micro_batch))
        assert [len(inputs) for inputs, _ in parts] == [micro_batch] * (6 // micro_batch)
        inputs, targets = joined(parts)
        assert inputs.dtype == targets.dtype == torch.int64
        assert inputs.tolist() == batch.inputs.tolist()
        assert targets.tolist() == batch.targets.tolist()
        assert feed.state() == loader.state()


@pytest.mark.parametrize("micro_batch", [1, 3, 6])
@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_rows_read_on_the_host_are_the_loaders(dtype: str, micro_batch: int) -> None:
    shard = tokens(dtype)
    feed = Feed(shard, device=CPU, **PLACE)
    assert not feed.resident
    assert_rows_of_the_loader(feed, Loader(shard, **PLACE), 15, micro_batch)  # over the end of an epoch


@pytest.mark.parametrize("micro_batch", [1, 6])
@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_rows_gathered_from_a_resident_corpus_are_the_loaders(
    dtype: str, micro_batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = tokens(dtype)
    feed = Feed(shard, device=pretend_gpu(monkeypatch, free=10**6), **PLACE)
    assert feed.resident
    assert int(np.asarray(shard.tokens).max()) > 32767
    assert_rows_of_the_loader(feed, Loader(shard, **PLACE), 15, micro_batch)


def test_rows_of_documents_are_gathered_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fuselm.data import open_prepared

    shard = open_prepared(prepared(tmp_path))["train"]
    feed = Feed(shard, rows="documents", device=pretend_gpu(monkeypatch, free=10**9), **PLACE)
    assert feed.resident
    assert_rows_of_the_loader(feed, Loader(shard, rows="documents", **PLACE), 5, 3)


@pytest.mark.parametrize(("dtype", "width"), [("uint16", 2), ("uint32", 4)])
def test_a_corpus_is_resident_while_it_takes_a_tenth_of_the_memory(
    dtype: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = tokens(dtype)
    assert Feed(shard, device=pretend_gpu(monkeypatch, free=600 * width * 10), **PLACE).resident
    feed = Feed(shard, device=pretend_gpu(monkeypatch, free=600 * width * 10 - 10), **PLACE)
    assert not feed.resident
    assert_rows_of_the_loader(feed, Loader(shard, **PLACE), 3, 6)


@pytest.mark.parametrize("resident", [True, False])
def test_a_feed_goes_on_where_another_stood(resident: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    device = pretend_gpu(monkeypatch, free=10**6) if resident else CPU
    shard = tokens("uint16")
    first = Feed(shard, device=device, **PLACE)
    for _ in range(14):
        list(first.next(6))
    place: dict[str, Any] = {**PLACE, **first.state()}
    second = Feed(shard, device=device, **place)
    for _ in range(14):
        assert torch.equal(joined(first.next(2))[0], joined(second.next(2))[0])
