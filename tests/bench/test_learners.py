"""A learner's run on a CPU, with small models: the trainer's own steps, the yardstick's the same, and what it says."""

from __future__ import annotations

import dataclasses
import gc
import json
import math
import os
import subprocess
import sys
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fuselm.bench import learners, liger, plain_trainer, step_profile
from fuselm.bench.learners import LEARNERS, Task, begun, make_ready, run
from fuselm.bench.learning import Plan, prepared
from fuselm.bench.plain_trainer import PlainTrainer
from fuselm.config import PRESETS
from fuselm.kernels import build

STEPS = 12


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str | int, str]:
    """A few stories by characters and by a small BPE."""
    scratch = tmp_path_factory.mktemp("tokens")
    plan = Plan(("naive-char", "tiny"), device="cpu", corpus_mb=0.05, small=True)
    names = {"characters": "naive-char", 512: "tiny"}
    return {tokens: str(prepared(plan, name, scratch)) for tokens, name in names.items()}


@pytest.fixture(autouse=True)
def _undo_determinism() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)


def task(preset: str, data: dict[str | int, str], **more: Any) -> Task:
    one = Task(preset, "", STEPS, device="cpu", small=True)
    return dataclasses.replace(one, data=data[one.chosen().tokens], **more)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_has_a_small_sister_of_its_kind_that_learns(
    name: str, data: dict[str | int, str], tmp_path: Path
) -> None:
    row = run("fused", task(name, data), tmp_path)
    assert (row["preset"], row["learner"], row["precision"], row["steps"]) == (name, "fused", "fp32", STEPS)
    assert len(row["losses"]) == STEPS
    assert all(math.isfinite(loss) for loss in row["losses"])
    assert row["tokens_per_second"] == pytest.approx(1e3 * row["tokens_per_step"] / row["step_ms"], rel=0.01)
    assert row["seconds"] >= row["first_step_s"] + (STEPS - 6) * row["step_ms"] / 1e3 - 0.02
    assert row["peak_memory_gib"] > 0.05
    assert row["step_ms_p10"] is None  # of one span
    assert row["mfu"] is None  # of a CPU no peak is known
    full, small = PRESETS[name].model(256), task(name, data).chosen().model(256)
    kind = ("norm", "positions", "activation", "attention_path", "num_experts", "dropout", "bias", "tied")
    assert [getattr(small, field) for field in kind] == [getattr(full, field) for field in kind]


def test_a_run_is_what_the_trainer_does(data: dict[str | int, str], tmp_path: Path) -> None:
    told: list[int] = []
    row = run("torch", task("tiny", data), tmp_path / "measured", told.append)
    trainer = begun("torch", task("tiny", data), tmp_path / "alone")
    for _ in range(STEPS):
        trainer.advance()
    assert row["losses"] == [round(loss, 7) for loss in trainer.losses()]
    assert told == [10]
    assert trainer.model.ops.impls["rms_norm"] == "torch"


@pytest.mark.parametrize("name", ["tinystories", "gpt-124m"])
def test_the_yardstick_learns_what_we_learn(
    name: str, data: dict[str | int, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[Any] = []
    monkeypatch.setattr(torch, "compile", lambda model: compiled.append(model) or model)
    plain = run("plain-compile", task(name, data), tmp_path / "plain")
    ours = run("torch", task(name, data), tmp_path / "ours")
    assert [type(model).__name__ for model in compiled] == ["PlainModel"]
    assert plain["micro_batch"] == 8
    assert plain["losses"] == pytest.approx(ours["losses"], rel=2e-5)
    assert ours["losses"][-1] < ours["losses"][0] - 0.05


def test_a_nudge_is_within_a_rounding_error_and_no_less(data: dict[str | int, str], tmp_path: Path) -> None:
    nudged, base = (
        begun(name, task("naive-char", data, precision="bf16"), tmp_path / name) for name in ("nudged", "torch")
    )
    moved = torch.cat(
        [
            ((one - other) / other)[other != 0].detach().abs().flatten()
            for one, other in zip(nudged.parameters, base.parameters, strict=True)
        ]
    )
    assert 0.9 * 2**-8 < float(moved.max()) <= 2**-8 * 1.0001
    assert float((moved > 0).float().mean()) > 0.99


def test_spans_of_steps_have_a_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([5.0, 5.0, 5.1, 5.3, 5.4, 6.4])  # the first is where the clock begins
    monkeypatch.setattr(learners.time, "monotonic", lambda: next(moments))
    marks = learners.Marks(torch.device("cpu"))
    for _ in range(4):
        marks.set()
    assert marks.begin == 5.0
    assert marks.spread() == (10.0, 100.0)


class Gpu:
    """What of torch.cuda a measurement asks; it must not ask about a GPU that the task has nothing to do with."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[str] = []
        asked = self.asked

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                pass

            def record(self, stream: str = "the current stream") -> None:
                asked.append(f"event on {stream}")

        for name, fake in {
            "Event": Event,
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "current_stream": lambda device: f"the stream of {device}",
            "synchronize": lambda device=None: asked.append(f"wait for {device}"),
            "max_memory_reserved": lambda device=None: asked.append(f"memory of {device}") or 3,
        }.items():
            monkeypatch.setattr(torch.cuda, name, fake)


@pytest.mark.parametrize("index", [0, 1])
def test_what_is_measured_is_the_device_of_the_task(index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, device = Gpu(monkeypatch), torch.device("cuda", index)
    step_profile.wait(device)
    learners.Marks(device)
    assert learners._peak_bytes(device) == 3
    assert gpu.asked == [f"wait for {device}", f"event on the stream of {device}", f"memory of {device}"]


def test_on_a_cpu_no_gpu_of_the_machine_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, device = Gpu(monkeypatch), torch.device("cpu")
    step_profile.wait(device)
    learners.Marks(device)
    assert learners._peak_bytes(device) > 50e6
    assert gpu.asked == []


def test_the_peak_of_a_process_is_not_what_its_parent_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = "import torch; from fuselm.bench.learners import _peak_bytes; print(_peak_bytes(torch.device('cpu')))"
    held = bytearray(3 << 28)
    held[:: 1 << 12] = b"x" * (len(held) >> 12)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    answer = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment
    )
    assert 50e6 < int(answer.stdout) < len(held)
    monkeypatch.setattr(learners, "STATUS", tmp_path / "there is none")
    assert learners._peak_bytes(torch.device("cpu")) > len(held)


def test_context_and_kernels_are_there_before_the_clock_runs(
    data: dict[str | int, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    now = learners.time.monotonic
    clock = SimpleNamespace(monotonic=lambda: said.append("clock") or now())
    monkeypatch.setattr(learners, "time", clock)
    monkeypatch.setattr(learners, "make_ready", lambda learner, device: said.append(f"{learner.title} on {device}"))
    run("fused", task("tiny", data), tmp_path)
    assert said[:2] == ["fuselm, eager on cpu", "clock"]


def test_a_process_knows_whether_its_code_was_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo import utils

    for counts, found in (
        ({}, False),
        ({("inductor", "fxgraph_cache_hit"): 2}, True),
        ({("aot_autograd", "autograd_cache_hit"): 1}, True),
        ({("inductor", "fxgraph_cache_hit"): 2, ("inductor", "fxgraph_cache_miss"): 1}, False),
        ({("aot_autograd", "autograd_cache_hit"): 1, ("inductor", "fxgraph_cache_bypass"): 1}, False),
    ):
        counters: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for (part, name), count in counts.items():
            counters[part][name] = count
        monkeypatch.setattr(utils, "counters", counters)
        assert learners.was_compiled() is found


def test_kernels_are_built_for_those_who_have_some(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(torch, "zeros", lambda size, device: made.append(device))
    monkeypatch.setattr(build, "library", made.append)
    gpu = torch.device("cuda")
    for name in ("plain-compile", "torch", "liger-norm", "fused-norm", "fused-graph"):
        made.append(name)
        make_ready(LEARNERS[name], gpu)
    make_ready(LEARNERS["fused"], torch.device("cpu"))
    assert made == [
        "plain-compile", gpu, "torch", gpu, "liger-norm", gpu, "fused-norm", gpu, "torch", "fused-graph", gpu, "torch",
    ]  # fmt: skip


def test_what_a_plain_model_takes_to_build_is_all_of_it_and_nothing_of_ours(
    data: dict[str | int, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, now = begun("torch", task("tinystories", data), tmp_path), [0]

    def takes(seconds: int, does: Any) -> Any:
        def call(*given: Any, **more: Any) -> Any:
            now[0] += seconds
            return does(*given, **more)

        return call

    monkeypatch.setattr(plain_trainer, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(plain_trainer.PlainModel, "take", takes(10_000, plain_trainer.PlainModel.take))
    monkeypatch.setattr(plain_trainer.PlainModel, "to", takes(1000, plain_trainer.PlainModel.to))
    monkeypatch.setattr(plain_trainer, "PlainModel", takes(100, plain_trainer.PlainModel))
    monkeypatch.setattr(plain_trainer, "Feed", takes(10, plain_trainer.Feed))
    monkeypatch.setattr(torch.optim, "AdamW", takes(1, torch.optim.AdamW))
    assert PlainTrainer(trainer, compiled=False).build_seconds == 1111


def test_our_model_is_gone_before_a_plain_one_is_measured(data: dict[str | int, str], tmp_path: Path) -> None:
    trainer = begun("torch", task("tinystories", data), tmp_path)
    ours = weakref.ref(trainer.model)
    plain = PlainTrainer(trainer, compiled=False)
    gc.collect()
    assert ours() is None
    assert plain.build_seconds > 0
    plain.advance()
    assert len(plain.losses()) == 1


def test_a_deterministic_run_is_one(data: dict[str | int, str], tmp_path: Path) -> None:
    run("fused-deterministic", task("tiny", data), tmp_path)
    assert torch.are_deterministic_algorithms_enabled()


def test_ligers_norm_is_called_as_its_authors_mean_it(
    data: dict[str | int, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Liger has kernels for GPUs alone; in its place something that says how it was called, and computes the same."""
    called: list[tuple[Any, ...]] = []

    class Plain:
        @staticmethod
        def apply(x: Any, weight: Any, *rest: Any) -> Any:
            called.append(rest)
            return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, rest[0])

    class Added:
        @staticmethod
        def apply(x: Any, residual: Any, weight: Any, *rest: Any) -> Any:
            total = x + residual
            return Plain.apply(total, weight, *rest), total

    names = {
        ("rms_norm", "LigerRMSNormFunction"): Plain,
        ("fused_add_rms_norm", "LigerFusedAddRMSNormFunction"): Added,
    }
    monkeypatch.setattr(liger, "_function", lambda *name: names[name])
    row = run("liger-norm", task("moe-60m", data), tmp_path / "liger")
    assert set(called) == {(1e-5, 0.0, "gemma")}
    assert len(called) == STEPS * 5  # two layers of two norms, and the last
    assert row["losses"] == pytest.approx(run("torch", task("moe-60m", data), tmp_path / "torch")["losses"], rel=1e-5)


def test_what_is_measured_is_kept_where_nobody_may_profile(
    data: dict[str | int, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_profile, "_events", lambda profiler, on_gpu: [])
    row = run("torch", task("tiny", data, profile=True), tmp_path)
    assert len(row["losses"]) == STEPS
    assert "profile" not in row
    assert row["not_profiled"].startswith("A step has kernels; the profiler saw none on cpu.")


def test_the_command_says_how_far_it_is_and_prints_the_row_last(
    data: dict[str | int, str], capsys: pytest.CaptureFixture[str]
) -> None:
    learners.main(["torch", json.dumps(dataclasses.asdict(task("tiny", data)))])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "step 10"
    assert json.loads(lines[-1])["learner"] == "torch"


def test_what_needs_a_gpu_is_refused_without_one(data: dict[str | int, str], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the device is cpu"):
        run("fused-graph", task("tiny", data), tmp_path / "graph")
    with pytest.raises(ValueError, match="'fused' runs kernels"):
        run("fused-norm", task("tiny", data), tmp_path / "norm")


# --- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
@pytest.mark.parametrize(
    ("preset", "name", "precision"),
    [
        ("naive-char", "fused", "bf16"),
        ("naive-char", "fused-graph", "bf16"),
        ("naive-char", "fused-graph", "fp16"),
        ("tinystories", "fused-graph", "bf16"),
        ("tinystories", "fused-deterministic", "bf16"),
        ("moe-60m", "fused-norm", "fp16"),
        ("moe-60m", "fused", "fp16"),
        ("moe-60m", "fused-graph", "bf16"),
    ],
)
def test_on_a_gpu_a_learner_runs_kernels_and_learns_what_torchs_ops_do(
    preset: str, name: str, precision: str, data: dict[str | int, str], tmp_path: Path
) -> None:
    one = task(preset, data, device="cuda", precision=precision, profile=True)
    row, base = (run(who, one, tmp_path / who) for who in (name, "torch"))
    assert row["precision"] == precision
    assert row["losses"] == pytest.approx(base["losses"], rel=0.02)
    kinds = [{kernel["kind"] for kernel in found["profile"]["kernels"]} for found in (row, base)]
    assert {"fuselm", "matmul"} <= kinds[0]
    assert "fuselm" not in kinds[1]
    assert 0 < row["peak_memory_gib"] < 4
