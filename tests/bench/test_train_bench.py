"""Training speed's bench: the yardstick does the same work, and what is measured reaches the README as it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fuselm.bench import learning, readme, readme_training
from fuselm.bench import train as bench
from fuselm.bench.learning import Plan
from fuselm.bench.plain_model import PlainModel
from fuselm.config import ModelConfig
from fuselm.torchlm.model import Transformer

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("tied", [False, True])
def test_the_yardstick_computes_what_our_model_computes(tied: bool) -> None:
    config = ModelConfig(vocab_size=50, context=12, num_layers=2, width=16, num_heads=2, ffn_width=24, tied=tied)
    ours = Transformer(config, seed=3)
    plain = PlainModel(config)
    plain.take(ours)
    ids = torch.randint(0, 50, (3, 13), generator=torch.Generator().manual_seed(1))
    inputs, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    torch.testing.assert_close(plain(inputs, targets), ours.loss(inputs, targets)[0], rtol=1e-5, atol=1e-6)
    assert sum(p.numel() for p in plain.parameters()) == sum(p.numel() for p in ours.parameters())


@pytest.mark.parametrize(
    ("change", "says"),
    [({"norm": "layer"}, "norm layer"), ({"num_kv_heads": 1}, "kv_heads 1"), ({"dropout": 0.1}, "dropout 0.1")],
)
def test_a_model_that_the_yardstick_is_not_is_refused(change: dict[str, Any], says: str) -> None:
    config = ModelConfig(vocab_size=50, context=12, num_layers=1, width=16, num_heads=2, ffn_width=24, **change)
    with pytest.raises(ValueError, match=says):
        PlainModel(config)


# --- measuring -------------------------------------------------------------------------------------------------------


PLAN = Plan(("tinystories",), device="cpu", small=True, corpus_mb=0.05, steps=20)


def test_the_digest_after_resuming_is_that_of_a_whole_run(tmp_path: Path) -> None:
    task = PLAN.task("tinystories", learning.prepared(PLAN, "tinystories", tmp_path))
    whole = bench.weights_after(task, tmp_path / "whole", 4)
    half = bench.weights_after(task, tmp_path / "parts", 2)
    assert bench.weights_after(task, tmp_path / "parts", 4) == whole != half
    torch.use_deterministic_algorithms(False)


def test_a_run_is_made_whole_and_again_and_in_two_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []

    def child(flag: str, task: str, folder: str, steps: str) -> dict[str, Any]:
        assert (flag, json.loads(task)["steps"]) == ("--weights-after", bench.CHECK_STEPS)
        asked.append((Path(folder).name, steps))
        return {"sha256": f"after {steps}" + " but not so" * (asked[-1][0] == "again")}

    monkeypatch.setattr(bench, "_child", child)
    found = bench.resume_check(PLAN, tmp_path)
    assert asked == [("whole", "40"), ("again", "40"), ("resumed", "20"), ("resumed", "40")]
    assert (found["again_equal"], found["resumed_equal"]) == (False, True)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """What was asked for, of one preset whose deterministic learner fails."""
    asked: list[tuple[str, str]] = []

    def child(learner: str, task: Any, on_made: Any) -> dict[str, Any]:
        asked.append((task.preset, learner))
        if learner == "fused-deterministic":
            raise learning.LearnerFailed("lost")
        made = {"preset": task.preset, "learner": learner, "steps": task.steps}
        return {**made, "step_ms": len(asked), "losses": [4.0] * 20}

    monkeypatch.setattr(bench, "PRESETS", ("tinystories",))
    monkeypatch.setattr(bench.learning, "child", child)
    monkeypatch.setattr(bench.learning, "prepared", lambda plan, name, scratch: scratch)
    monkeypatch.setattr(bench.machine, "describe", lambda device: {"date": "2026-01-02"})
    monkeypatch.setattr(bench.machine, "today", lambda: "2026-01-02")
    return asked


def test_rows_are_kept_one_by_one_and_in_order(tmp_path: Path, asked: list[tuple[str, str]]) -> None:
    out = tmp_path / "train.json"
    old = {"preset": "tinystories", "learner": "fused-deterministic", "steps": 500, "step_ms": 7, "date": "2026-01-01"}
    kept = {"speed": [old], "resume": "as it was", "measured": {"resume": "2026-01-01"}}
    out.write_text(json.dumps(kept))
    for only, code in (("tinystories", 1), ("tinystories plain-compile", 0)):
        with pytest.raises(SystemExit) as caught:
            bench.main(["--out", str(out), "--part", "speed", "--only", only])
        assert caught.value.code == code
    found = json.loads(out.read_text())
    assert found["resume"] == "as it was"
    assert found["measured"] == {"resume": "2026-01-01", "speed": "2026-01-02"}
    learners = tuple(dict.fromkeys(("torch", "nudged", *learning.PLAIN)))
    assert asked == [*(("tinystories", name) for name in learners), ("tinystories", "plain-compile")]
    assert [(row["learner"], row["step_ms"], row["date"]) for row in found["speed"]] == [
        ("torch", 1, "2026-01-02"),
        ("nudged", 2, "2026-01-02"),
        ("plain-compile", 10, "2026-01-02"),
        *((name, place, "2026-01-02") for place, name in enumerate(learners[3:-1], 4)),
        ("fused-deterministic", 7, "2026-01-01"),
    ]
    assert found["speed"][0]["curve"] == [4.0, 4.0]
    assert "losses" not in found["speed"][0]


def test_the_rest_is_what_is_not_of_these_sources(
    tmp_path: Path, asked: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--out", str(tmp_path / "train.json"), "--part", "speed", "--rest"]
    found = []
    for sources in ("then", "then", "now"):
        monkeypatch.setattr(bench, "sources", lambda sources=sources: sources)
        with pytest.raises(SystemExit):
            bench.main(arguments)
        found.append([learner for _, learner in asked])
        asked.clear()
    assert "torch" in found[0]
    assert "fused-deterministic" in found[0]
    assert found[1] == ["fused-deterministic"]  # of which there is no row
    assert found[2] == found[0]


def test_rows_of_other_steps_are_neither_kept_nor_taken_for_done(
    tmp_path: Path, asked: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "sources", lambda: "the same")
    out = tmp_path / "train.json"
    for steps in ("500", "40"):
        with pytest.raises(SystemExit):
            bench.main(
                ["--out", str(out), "--part", "speed", "--rest", "--only", "tinystories torch", "--steps", steps]
            )
        assert {(row["learner"], row["steps"]) for row in json.loads(out.read_text())["speed"]} == {
            (learner, int(steps)) for learner in ("torch", "torch-compile")
        }
    assert len(asked) == 4


def test_rows_are_as_long_as_those_there_are(tmp_path: Path, asked: list[tuple[str, str]]) -> None:
    out = tmp_path / "train.json"
    arguments = ["--out", str(out), "--part", "speed"]
    for more in (["--only", "tinystories fused-graph", "--steps", "200"], ["--only", "tinystories torch"], ["--rest"]):
        with pytest.raises(SystemExit):
            bench.main([*arguments, *more])
    found = json.loads(out.read_text())["speed"]
    assert {row["steps"] for row in found} == {200}
    assert {"torch", "torch-compile", "fused-graph", "nudged"} < {row["learner"] for row in found}
    assert len(asked) == len(found) + 1  # nothing twice, and the one that fails


@pytest.mark.parametrize("steps", ["19", "0"])
def test_too_few_steps_for_a_curve_are_refused(steps: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(["--part", "speed", "--steps", steps])
    assert f"--steps is 20 or more; got {steps}" in capsys.readouterr().err


def test_no_row_begins_when_time_is_up(
    tmp_path: Path, asked: list[tuple[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        bench.main(["--out", str(tmp_path / "train.json"), "--part", "speed", "--seconds", "0"])
    assert (caught.value.code, asked) == (0, [])
    assert f"{len(bench.rows_with('', bench.Plan(bench.PRESETS)))} rows wait for --rest" in capsys.readouterr().out


def test_sources_change_with_what_a_step_is_made_of_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("__init__.py", "optim.py", "bench/train.py", "cli/train.py", "torchlm/step.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    monkeypatch.setattr(bench.fuselm, "__file__", str(tmp_path / "__init__.py"))
    before = bench.sources()
    for name, counts in (("bench/train.py", False), ("cli/train.py", False), ("torchlm/step.py", True)):
        (tmp_path / name).write_text("edited = True")
        assert (bench.sources() != before) == counts, name


@pytest.mark.parametrize("more", [["--rest"], ["--seconds", "5"]])
def test_rest_and_seconds_are_refused_without_speed(more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(["--part", "resume", *more])
    assert "are for --part speed alone" in capsys.readouterr().err


@pytest.mark.parametrize(
    "given", [["--part", "speed", "--only", "tinystorys"], ["--part", "resume", "--only", "torch"]]
)
def test_rows_that_are_not_there_are_refused(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(given)
    told = capsys.readouterr().err
    assert f"got {given[-1]!r}" in told
    assert "gpt-124m fused-compile" in told


# --- what the README says --------------------------------------------------------------------------------------------


def a_record() -> dict[str, Any]:
    def row(learner: str, speed: int, curve: list[float], **more: Any) -> dict[str, Any]:
        facts = {"preset": "tinystories", "tokens_per_step": 65536, "first_step_s": 1.41, "peak_memory_gib": 6.21}
        facts |= {"precision": "bf16", "mfu": 0.4123, "steps": 500}
        return {**facts, "learner": learner, "tokens_per_second": speed, "curve": curve, **more}

    run = {"name": "tinylm", "command": "fuselm train --preset tinylm", "best_loss": 1.44261, "best_step": 2100}
    return {
        "gpu": "NVIDIA H200",
        "date": "2026-01-01",
        "measured": dict.fromkeys(bench.PARTS, "2026-01-01"),
        "versions": {"torch": "2.11.0", "cuda": "13.0"},
        "speed": [
            row("torch", 900_000, [3.0, 2.0]),
            row("nudged", 900_000, [3.01, 2.01]),
            row("plain-compile", 3_012_670, [3.0, 2.02], found_compiled=True),
            row("fused", 1_600_000, [3.02, 1.98]),
            row("fused-compile", 3_064_741, [3.1, 2.1]),
            row("fused-deterministic", 1_200_000, [3.0004, 2.0004]),
            row("fused", 500_000, [3.0, 2.0], preset="moe-60m", precision="fp16", mfu=None, steps=200),
        ],
        "resume": {"steps": 40, "sha256": "", "again_equal": True, "resumed_equal": True},
        "runs": [{**run, "seconds": 76.594, "process_s": 84.3}],
    }


def test_what_is_of_another_day_says_so() -> None:
    record = a_record()
    record["measured"] |= {"resume": "2025-12-30", "runs": "2025-12-29"}
    record["speed"][4]["date"], record["speed"][3]["date"] = "2025-12-31", record["date"]
    text = readme.training_block(record)
    assert "| fuselm, eager, `--compile` (2025-12-31) | 3.065 M" in text
    assert "| fuselm, eager | 1.600 M" in text
    assert "weights and averages (2025-12-30). Its" in text
    assert "| command (2025-12-29) |" in text


def test_the_table_says_what_was_measured_and_how_far_curves_are_apart() -> None:
    text = readme.training_block(a_record())
    line = "| tinystories | 65,536 | {} M | {} | 6.2 GiB | 41.2% | {} |"
    assert line.format("torch's ops | 0.900", "1.4 s", "") in text
    assert line.format("plain PyTorch, torch.compile | 3.013", "1.4 s †", "0.0141 (noise 0.0100)") in text
    assert line.format("fuselm, eager | 1.600", "1.4 s", "0.0200 (noise 0.0100)") in text
    assert line.format("fuselm, eager, `--compile` | 3.065", "1.4 s", "0.1000 (noise 0.0100) differs") in text
    assert line.format("fuselm, eager, `--deterministic` | 1.200", "1.4 s", "0.000400 (noise 0.0100)") in text
    assert "| moe-60m, fp16 | 65,536 | fuselm, eager | 0.500 M | 1.4 s | 6.2 GiB |  |  |" in text
    assert "nudged |" not in text
    words = readme_training.APART_WORDS.format(steps="500 steps, of moe-60m 200")
    assert f"{words} †: torch.compile had compiled these" in text
    assert "| `fuselm train --preset tinylm` | 1.4426 | 2,100 | 77 | 84 s |" in text
    assert "are the same to the bit in weights and averages. Its speed is 75 % (tinystories)" in text


def test_ours_stand_beside_the_plain_model_where_there_is_one() -> None:
    record = a_record()
    words = "Tokens/s beside plain PyTorch under torch.compile: tinystories 0.53 (eager), 1.02 (`--compile`)."
    assert words in readme.training_block(record)
    record["speed"] = [row for row in record["speed"] if row["learner"] != "plain-compile"]
    text = readme.training_block(record)
    assert "beside plain" not in text
    assert "†" not in text


def test_a_resumed_run_that_differs_is_not_passed_over() -> None:
    record = a_record()
    record["resume"]["resumed_equal"] = False
    assert "are NOT the same to the bit" in readme.training_block(record)


def test_the_record_here_has_what_is_promised() -> None:
    record = json.loads((ROOT / "gpu" / "train.json").read_text(encoding="utf-8"))
    speed = {(row["preset"], row["learner"]): row for row in record["speed"]}
    for preset in ("tinystories", "gpt-124m"):
        plain = speed[preset, "plain-compile"]
        for learner in ("fused", "fused-graph", "fused-compile"):
            assert speed[preset, learner]["tokens_per_second"] >= 1.1 * plain["tokens_per_second"]
            assert speed[preset, learner]["peak_memory_gib"] < plain["peak_memory_gib"]
        assert speed[preset, "fused"]["first_step_s"] < 5
    assert not learning.fused_disagrees(learning.judged(record["speed"]))
    assert record["resume"]["again_equal"]
    assert record["resume"]["resumed_equal"]
    assert {run["name"]: run["best_loss"] for run in record["runs"]}["tinylm"] <= 1.47
