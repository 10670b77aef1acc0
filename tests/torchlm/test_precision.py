"""Which device and dtype a run computes with, how the loss scale moves, and what determinism switches on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fuselm.torchlm.precision import LossScaler, attention_backends, make_deterministic, pick_device, pick_precision

GPU = torch.device("cuda")
CPU = torch.device("cpu")
DETERMINISTIC: Any = torch.utils.deterministic  # a module of properties, of which mypy sees none


def test_an_overflow_halves_the_scale_and_patience_doubles_it() -> None:
    scaler = LossScaler(enabled=True, scale=1024.0, patience=3)
    scaler.update(False)
    assert scaler.scale == 512.0
    for scale in (512.0, 512.0, 1024.0, 1024.0, 1024.0, 2048.0):
        scaler.update(True)
        assert scaler.scale == scale


def test_an_overflow_begins_the_count_of_good_steps_anew() -> None:
    scaler = LossScaler(enabled=True, scale=1024.0, patience=3)
    for finite in (True, True, False, True, True):
        scaler.update(finite)
    assert scaler.scale == 512.0
    scaler.update(True)
    assert scaler.scale == 1024.0


@given(st.lists(st.booleans(), max_size=80), st.integers(1, 4))
def test_the_scale_stays_a_power_of_two_between_1_and_2_to_the_24(outcomes: list[bool], patience: int) -> None:
    scaler = LossScaler(enabled=True, patience=patience)
    for finite in outcomes:
        scaler.update(finite)
        assert scaler.scale in [2.0**power for power in range(25)]


@pytest.mark.parametrize(("finite", "end"), [(False, 1.0), (True, 2.0**24)])
def test_the_scale_ends_at_its_bounds(finite: bool, end: float) -> None:
    scaler = LossScaler(enabled=True, patience=1)
    for _ in range(40):
        scaler.update(finite)
    assert scaler.scale == end


def test_without_fp16_the_scale_is_1_for_ever() -> None:
    scaler = LossScaler(enabled=False, scale=512.0, patience=1)
    for finite in (True, False, True):
        scaler.update(finite)
        assert scaler.scale == 1.0


@pytest.mark.parametrize(("capability", "automatic"), [((7, 5), "fp32"), ((8, 0), "bf16"), ((9, 0), "bf16")])
def test_auto_is_bf16_on_a_gpu_that_has_it(
    capability: tuple[int, int], automatic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert pick_precision("auto", GPU) == automatic
    assert pick_precision("fp16", GPU) == "fp16"
    assert pick_precision("auto", CPU) == "fp32"
    if automatic == "fp32":
        with pytest.raises(ValueError, match=r"bf16 needs a GPU from Ampere .*Use --precision fp16"):
            pick_precision("bf16", GPU)


def test_fp16_on_a_cpu_is_refused() -> None:
    with pytest.raises(ValueError, match=r"fp16 trains on a GPU; the device is the CPU\. Use --precision fp32"):
        pick_precision("fp16", CPU)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gpu", "A device is auto, cpu, cuda or cuda:1; got 'gpu'"),
        ("meta", "trains on cpu and cuda; got 'meta'"),
        ("cuda:2", "has 2 CUDA devices; got 'cuda:2'"),
    ],
)
def test_a_device_that_is_not_there_is_refused(name: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match=words):
        pick_device(name)
    assert pick_device("cuda:1") == torch.device("cuda:1")


@pytest.mark.parametrize(("there", "device"), [(True, GPU), (False, CPU)])
def test_auto_is_the_gpu_where_there_is_one(there: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    assert pick_device("auto") == device


@pytest.fixture
def _as_before() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    fill = DETERMINISTIC.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(before)
    DETERMINISTIC.fill_uninitialized_memory = fill


@pytest.mark.usefixtures("_as_before")
def test_determinism_is_asked_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    make_deterministic()
    assert torch.are_deterministic_algorithms_enabled()
    assert DETERMINISTIC.fill_uninitialized_memory is False


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_deterministic_run_does_without_cudnns_attention(deterministic: bool) -> None:
    with attention_backends(deterministic):
        assert torch.backends.cuda.cudnn_sdp_enabled() is not deterministic
        assert torch.backends.cuda.flash_sdp_enabled()
        assert torch.backends.cuda.math_sdp_enabled()
