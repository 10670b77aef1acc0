"""Training speed's bench: the yardstick does the same work, and what is measured reaches the README as it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fuselm.bench import readme
from fuselm.bench import train as bench
from fuselm.bench.plain_model import PlainModel
from fuselm.config import PRESETS, ModelConfig
from fuselm.torchlm import train as training
from fuselm.torchlm.model import Transformer

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("tied", [False, True])
def test_the_yardstick_computes_what_our_model_computes(tied: bool) -> None:
    config = ModelConfig(vocab_size=50, context=12, num_layers=2, width=16, num_heads=2, ffn_width=24, tied=tied)
    ours, plain = Transformer(config, seed=3), PlainModel(config)
    weights = dict(ours.named_parameters())
    with torch.no_grad():
        plain.embedding.weight.copy_(weights["embedding"])
        plain.head.weight.copy_(ours.head_weight)
        for index, block in enumerate(plain.blocks):
            layer = f"layers.{index}."
            block.qkv.weight.copy_(weights[layer + "attention.qkv.weight"])
            block.out.weight.copy_(weights[layer + "attention.out.weight"])
            gate, up = weights[layer + "mlp.up.weight"].chunk(2)
            block.gate.weight.copy_(gate)
            block.up.weight.copy_(up)
            block.down.weight.copy_(weights[layer + "mlp.down.weight"])
    ids = torch.randint(0, 50, (3, 13), generator=torch.Generator().manual_seed(1))
    inputs, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    torch.testing.assert_close(plain(inputs, targets), ours.loss(inputs, targets)[0], rtol=1e-5, atol=1e-6)
    assert sum(p.numel() for p in plain.parameters()) == sum(p.numel() for p in ours.parameters())


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bench with a preset that a CPU can train."""
    preset = PRESETS["tinystories"]
    small = {"width": 32, "num_heads": 4, "ffn_width": 64, "num_layers": 1, "context": 16}
    changes: dict[str, Any] = {"tokens": 300, "shape": {**preset.shape, **small}}
    monkeypatch.setitem(
        PRESETS,
        "tinystories",
        type(preset)(**{**vars(preset), **changes, "training": {**preset.training, "batch_size": 4}}),
    )
    monkeypatch.setattr(training, "pick_device", lambda name: torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3 << 30)
    monkeypatch.setattr(bench, "STEPS", {"tinystories": 2})


@pytest.mark.usefixtures("on_cpu")
def test_a_row_is_of_the_trainer_itself(tmp_path: Path) -> None:
    row = bench.our_row("tinystories", "eager", tmp_path)
    assert row["tokens_per_step"] == 64
    assert row["peak_memory_gib"] == 3.0
    assert row["tokens_per_second"] == pytest.approx(64e3 / row["step_ms"], rel=0.01)


@pytest.mark.usefixtures("on_cpu")
def test_a_curve_is_of_the_stories_and_falls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "CURVE_STEPS", 30)
    monkeypatch.setattr(bench, "STORY_BYTES", 20_000)
    found = {
        (impl, seed): bench.losses("tinystories", impl, seed, tmp_path / f"{impl}{seed}")
        for impl, seed in bench.LEARNERS
    }
    first = found["torch", 0]
    assert len(first) == 3
    assert first[0] > first[1] > first[2]
    assert found["auto", 0] == pytest.approx(first, rel=1e-4)
    assert found["torch", 1] != first


@pytest.mark.usefixtures("on_cpu")
def test_the_digest_after_resuming_is_that_of_a_whole_run(tmp_path: Path) -> None:
    whole = bench.weights_after(tmp_path / "whole", 4)
    half = bench.weights_after(tmp_path / "parts", 2)
    assert bench.weights_after(tmp_path / "parts", 4) == whole != half
    torch.use_deterministic_algorithms(False)


def a_record() -> dict[str, Any]:
    def row(model: str, mode: str, speed: int) -> dict[str, Any]:
        facts = {"preset": "tinystories", "tokens_per_step": 65536, "first_step_s": 1.41, "peak_memory_gib": 6.21}
        return {**facts, "model": model, "mode": mode, "tokens_per_second": speed}

    run = {"name": "tinylm", "command": "fuselm train --preset tinylm", "best_loss": 1.44261, "best_step": 2100}
    return {
        "gpu": "NVIDIA H200",
        "date": "2026-01-01",
        "measured": dict.fromkeys(bench.PARTS, "2026-01-01"),
        "versions": {"torch": "2.11.0", "cuda": "13.0"},
        "speed": [
            row("plain", "compile", 3_012_670),
            row("ours", "eager", 1_600_000),
            row("ours", "compile", 3_064_741),
            row("ours", "eager deterministic", 1_200_000),
        ],
        "curves": [
            {"preset": "tinystories", "impl": impl, "seed": seed, "every": 10, "losses": losses}
            for impl, seed, losses in (
                ("auto", 0, [5.0, 3.0, 2.0]),
                ("torch", 0, [5.0, 3.0015, 2.001]),
                ("torch", 1, [5.0, 3.1, 2.0]),
            )
        ],
        "resume": {"steps": 40, "sha256": "", "again_equal": True, "resumed_equal": True},
        "runs": [{**run, "seconds": 76.594, "process_s": 84.3}],
    }


def test_rows_are_kept_one_by_one_and_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, asked = tmp_path / "train.json", []

    def child(*arguments: str) -> dict[str, Any]:
        asked.append(arguments)
        if arguments[1:] == ("gpt-124m", "ours", "compile"):
            raise RuntimeError("lost")
        return {"tokens_per_second": len(asked)}

    monkeypatch.setattr(bench, "_child", child)
    monkeypatch.setattr(bench.machine, "describe", lambda device: {"date": "2026-01-02"})
    monkeypatch.setattr(bench.machine, "today", lambda: "2026-01-02")
    old = {"preset": "gpt-124m", "model": "ours", "mode": "compile", "tokens_per_second": 7, "date": "2026-01-01"}
    out.write_text(json.dumps({"speed": [old], "resume": "as it was", "measured": {"resume": "2026-01-01"}}))
    with pytest.raises(RuntimeError, match="lost"):
        bench.main(["--out", str(out), "--part", "speed"])
    bench.main(["--out", str(out), "--part", "speed", "--only", "tinystories plain"])
    found = json.loads(out.read_text())
    assert found["resume"] == "as it was"
    assert found["measured"] == {"resume": "2026-01-01", "speed": "2026-01-02"}
    assert [(row["preset"], row["mode"], row["tokens_per_second"], row["date"]) for row in found["speed"]] == [
        ("tinystories", "compile", 9, "2026-01-02"),
        *(("tinystories", mode, place, "2026-01-02") for place, (_, mode) in enumerate(bench.ROWS[1:], 2)),
        ("gpt-124m", "compile", 6, "2026-01-02"),
        ("gpt-124m", "eager", 7, "2026-01-02"),
        ("gpt-124m", "compile", 7, "2026-01-01"),
    ]


@pytest.mark.parametrize("asked", [["--part", "speed", "--only", "tinystorys"], ["--part", "curves", "--only", "ours"]])
def test_rows_that_are_not_there_are_refused(asked: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(asked)
    told = capsys.readouterr().err
    assert f"got {asked[-1]!r}" in told
    assert "gpt-124m ours compile" in told


def test_what_is_of_another_day_says_so() -> None:
    record = a_record()
    record["measured"] |= {"resume": "2025-12-30", "runs": "2025-12-29"}
    record["speed"][2]["date"], record["speed"][1]["date"] = "2025-12-31", record["date"]
    text = readme.training_block(record)
    assert "| fuselm, `--compile` (2025-12-31) | 3.065 M" in text
    assert "| fuselm, eager | 1.600 M" in text
    assert "weights and averages (2025-12-30). Its" in text
    assert "| command (2025-12-29) |" in text


def test_the_table_says_what_was_measured() -> None:
    text = readme.training_block(a_record())
    assert "| tinystories | 65,536 | plain PyTorch, torch.compile | 3.013 M | 1.4 s | 6.2 GiB |" in text
    assert "| tinystories | 65,536 | fuselm, `--compile` | 3.065 M | 1.4 s | 6.2 GiB |" in text
    assert "| `fuselm train --preset tinylm` | 1.4426 | 2,100 | 77 | 84 s |" in text
    assert "are the same to the bit in weights and averages. Its speed is 75 % (tinystories)" in text
    assert "first 30 steps" in text
    assert "at most 0.0015 (tinystories, which goes from 5.00 to 2.00; another seed 0.0985) from" in text


def test_a_record_whose_curves_are_yet_to_come_says_nothing_of_them() -> None:
    record = a_record()
    del record["curves"]
    assert "running mean" not in readme.training_block(record)


def test_a_resumed_run_that_differs_is_not_passed_over() -> None:
    record = a_record()
    record["resume"]["resumed_equal"] = False
    assert "are NOT the same to the bit" in readme.training_block(record)


def test_the_record_here_has_what_is_promised() -> None:
    record = json.loads((ROOT / "gpu" / "train.json").read_text(encoding="utf-8"))
    speed = {(row["preset"], row["model"], row["mode"]): row for row in record["speed"]}
    for preset in bench.PRESETS:
        plain, ours = speed[preset, "plain", "compile"], speed[preset, "ours", "compile"]
        assert ours["tokens_per_second"] >= plain["tokens_per_second"]
        assert speed[preset, "ours", "eager"]["first_step_s"] < 5
    curves = {(row["preset"], row["impl"], row["seed"]): row["losses"] for row in record["curves"]}
    for preset in bench.PRESETS:
        torchs = curves[preset, "torch", 0]
        assert len(torchs) * bench.CURVE_EVERY == bench.CURVE_STEPS
        assert readme._farthest(curves[preset, "auto", 0], torchs) < readme._farthest(
            curves[preset, "torch", 1], torchs
        )
    assert record["resume"]["again_equal"]
    assert record["resume"]["resumed_equal"]
    assert {run["name"]: run["best_loss"] for run in record["runs"]}["tinylm"] <= 1.47
