"""`fuselm bench train`: the files it writes, its JSON line, and what it says when it is asked for something wrong."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fuselm.bench import learning, learning_report
from fuselm.bench.learning import LearnerFailed
from fuselm.cli import app, bench_train
from tests.bench.test_bench_command import in_one_line
from tests.torchlm.runs import child_environment

SHORT = ["bench", "train", "--device", "cpu", "--presets", "tiny", "--steps", "20", "--limit-mb", "0.05"]


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def a_row(preset: str, learner: str, loss: float = 4.0) -> dict[str, Any]:
    facts = {
        "precision": "fp32", "steps": 20, "tokens_per_step": 100, "tokens_per_second": 300, "step_ms": 333.0,
        "mfu": None, "first_step_s": 1.0, "seconds": 2.0, "process_s": 3.0, "peak_memory_gib": 1.5, "micro_batch": 4,
    }  # fmt: skip
    return {"preset": preset, "learner": learner, **facts, "losses": [loss] * 20}


def test_a_comparison_from_the_command_line_with_its_processes(tmp_path: Path) -> None:
    options = ["--json", "--precision", "bf16", "--seed", "3", "--profile"]
    result = invoke(*SHORT, "--out", str(tmp_path / "new" / "folder"), *options)
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout.splitlines()[-1])
    assert [(row["learner"], row["agrees"]) for row in document["rows"]] == [
        ("torch", None), ("nudged", None), ("fused", True),
    ]  # fmt: skip
    assert {row["precision"] for row in document["rows"]} == {"bf16"}
    assert (document["small"], document["seed"], document["gpu"]) == (True, 3, None)
    folder = tmp_path / "new" / "folder"
    kinds = {(row["learner"], row["kind"]) for row in document["kernels"]}
    assert ("fused", "fuselm") in kinds
    assert ("torch", "fuselm") not in kinds
    assert {("torch", "matmul"), ("torch", "nothing"), ("nudged", "attention")} <= kinds
    names = ["curves.csv", "kernels.csv", "rows.csv", "rows.json", "tiny.png"]
    assert sorted(path.name for path in folder.iterdir()) == names
    assert sorted(Path(name).name for name in document["files"]) == names
    kept = json.loads((folder / "rows.json").read_text())
    assert (kept["device"], kept["small"], kept["seed"], kept["corpus"]) == ("cpu", True, 3, "stories")
    assert "small models of the same kinds" in result.stderr


def test_a_table_for_people_and_an_exit_code_when_ours_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "child", lambda name, task, _: a_row("tiny", name, 4.0 + (name == "fused")))
    result = invoke(*SHORT, "--out", str(tmp_path))
    assert result.exit_code == 1
    assert "DIFFERS" in result.stdout
    assert "small tiny, fp32" in result.stdout
    assert [line.split()[-1] for line in result.stdout.splitlines()[2:5]] == ["base", "noise", "DIFFERS"]
    monkeypatch.setattr(learning, "child", lambda name, task, _: a_row("tiny", name))
    assert invoke(*SHORT, "--out", str(tmp_path)).exit_code == 0


def test_a_profile_that_could_not_be_made_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"torch": {"not_profiled": "It may lack the right to look."}}
    monkeypatch.setattr(learning, "child", lambda name, task, _: {**a_row("tiny", name), **row.get(name, {})})
    result = invoke(*SHORT, "--profile", "--out", str(tmp_path))
    assert result.exit_code == 0
    assert "not profiled: tiny torch: It may lack the right to look." in result.stderr.splitlines()


@pytest.mark.parametrize("failing", ["fused", "nudged", "torch", "torch-compile"])
def test_a_learner_that_fails_is_told_and_what_cannot_be_judged_is_an_error(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def child(name: str, task: Any, on_made: Any) -> dict[str, Any]:
        if name == failing:
            raise LearnerFailed("no module named so", "all that it said")
        return a_row("tiny", name)

    monkeypatch.setattr(learning, "child", child)
    result = invoke(*SHORT, "--learners", "torch-compile,fused", "--out", str(tmp_path))
    assert result.exit_code == 1
    assert f"not trained: tiny {failing}: no module named so" in result.stderr
    [note] = json.loads((tmp_path / "rows.json").read_text())["notes"]
    assert (note["learner"], note["log"]) == (failing, "all that it said")


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_when_nothing_is_trained_that_is_an_error_and_why_is_kept(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def child(name: str, task: Any, on_made: Any) -> dict[str, Any]:
        raise LearnerFailed("no room", "all that it said")

    monkeypatch.setattr(learning, "child", child)
    result = invoke(*SHORT, "--out", str(tmp_path), *options)
    assert result.exit_code == 1
    assert "not trained: tiny fused: no room" in result.stderr
    assert "rows.json has the end of what they said" in result.stderr
    kept = json.loads((tmp_path / "rows.json").read_text())
    assert (kept["rows"], {note["log"] for note in kept["notes"]}) == ([], {"all that it said"})


@pytest.mark.parametrize(("writer", "full_at"), [("write", 4), ("pictures", 1)])
def test_a_full_disk_ends_in_words(writer: str, full_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it is full when all are trained: rows are written after each of the three, and once more."""
    right, calls = getattr(learning_report, writer), []

    def write(*given: Any, **more: Any) -> Any:
        calls.append(1)
        if len(calls) == full_at:
            raise OSError(28, "No space left on device", "rows.csv")
        return right(*given, **more)

    monkeypatch.setattr(learning_report, writer, write)
    monkeypatch.setattr(learning, "child", lambda name, task, _: a_row("tiny", name))
    result = invoke(*SHORT, "--out", str(tmp_path))
    assert (result.exit_code, type(result.exception)) == (1, SystemExit)
    assert "error: rows.csv: No space left on device" in result.stderr


def test_ctrl_c_keeps_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def child(name: str, task: Any, on_made: Any) -> dict[str, Any]:
        if name == "nudged":
            raise KeyboardInterrupt
        return a_row("tiny", name)

    monkeypatch.setattr(learning, "child", child)
    result = invoke(*SHORT, "--out", str(tmp_path))
    assert result.exit_code == 130
    assert "interrupted: what was measured until then is kept" in result.stderr
    assert [row["learner"] for row in json.loads((tmp_path / "rows.json").read_text())["rows"]] == ["torch"]
    assert not list(tmp_path.glob(".bench*"))


def processes_of(parent: int) -> list[int]:
    found = []
    for status in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError):
            if f"PPid:\t{parent}\n" in status.read_text():
                found.append(int(status.parent.name))
    return found


def test_sigterm_ends_as_ctrl_c_does_and_leaves_no_folder_and_no_process(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fuselm", *SHORT, "--steps", "1000000", "--out", str(tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=child_environment()) as process:
        until = time.monotonic() + 120
        while not list(tmp_path.glob(".bench*/*/run/config.json")):
            assert time.monotonic() < until
            assert process.poll() is None
            time.sleep(0.05)
        learners = processes_of(process.pid)
        assert learners
        process.terminate()
        process.terminate()
        assert process.wait(60) == 130
        assert process.stderr is not None
        assert "interrupted: before there was anything to keep" in process.stderr.read()
    assert list(tmp_path.iterdir()) == []
    for learner in learners:
        with pytest.raises(ProcessLookupError):
            os.kill(learner, 0)


def test_a_signal_means_afterwards_what_it_meant_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "child", lambda name, task, _: a_row("tiny", name))
    before = signal.getsignal(signal.SIGTERM)
    invoke(*SHORT, "--out", str(tmp_path))
    assert signal.getsignal(signal.SIGTERM) is before


def test_what_a_killed_comparison_left_is_swept_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "child", lambda name, task, _: a_row("tiny", name))
    program = (
        "import pathlib, sys; from fuselm.files import partial_path\n"
        "(partial_path(pathlib.Path(sys.argv[1])) / 'tokens').mkdir(parents=True)"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "bench")], check=True, env=child_environment())
    assert list(tmp_path.glob(".bench*"))
    assert invoke(*SHORT, "--out", str(tmp_path)).exit_code == 0
    assert not list(tmp_path.glob(".bench*"))


def test_an_interrupt_before_there_is_a_row_writes_over_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def child(name: str, task: Any, on_made: Any) -> dict[str, Any]:
        raise KeyboardInterrupt

    monkeypatch.setattr(learning, "child", child)
    (tmp_path / "rows.csv").write_text("good")
    result = invoke(*SHORT, "--out", str(tmp_path))
    assert result.exit_code == 130
    assert "nothing: no learner came to its end" in result.stdout
    assert "interrupted: before there was anything to keep" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["rows.csv"]


def test_rows_are_kept_when_the_next_preset_cannot_be_prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = learning.prepared

    def prepared(plan: Any, name: str, *rest: Any) -> Path:
        if name == "small":
            raise ValueError("no room for tokens")
        return right(plan, name, *rest)

    monkeypatch.setattr(learning, "prepared", prepared)
    monkeypatch.setattr(learning, "child", lambda name, task, _: a_row("tiny", name))
    result = invoke(*SHORT, "--presets", "tiny,small", "--out", str(tmp_path))
    assert result.exit_code == 1
    assert "no room for tokens" in result.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [(row["learner"], row["agrees"]) for row in rows] == [("torch", None), ("nudged", None), ("fused", True)]


def test_tokens_are_no_corpus(tmp_path: Path) -> None:
    (tmp_path / "prepared.json").write_text("{}")
    result = invoke(*SHORT, "--corpus", str(tmp_path), "--out", str(tmp_path / "out"))
    assert result.exit_code == 1
    assert "--corpus is text, since each preset has tokens of its own" in in_one_line(result.stderr)


def test_what_the_help_says_is_taken_is_taken() -> None:
    assert bench_train.USUAL.split(",") == list(learning.PRESETS)
    assert float(bench_train.USUAL_MB) == learning.CORPUS_MB
    assert f"{learning.STEPS}, of small models {learning.SMALL_STEPS}" in in_one_line(
        invoke("bench", "train", "--help").stdout
    )


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--presets", "tinny"], 1, "There is no preset 'tinny'"),
        (["--presets", ","], 1, "A comparison is of one preset or more; got none."),
        (["--learners", "fussed"], 1, "There is no learner 'fussed'; there are plain-compile"),
        (["--learners", "fused-graph"], 1, "fused-graph needs a GPU; the device is the CPU."),
        (["--learners", "plain-cudnn"], 1, "plain-cudnn needs a GPU; the device is the CPU."),
        (["--precision", "fp8"], 1, "--precision is auto, fp32, bf16, fp16; got 'fp8'."),
        (["--precision", "fp16"], 1, "fp16 trains on a GPU; the device is the CPU."),
        (["--steps", "19"], 2, "20"),
        (["--limit-mb", "0"], 1, "a number of megabytes, a byte at least; got 0.0"),
        (["--corpus", "no-such-corpus"], 1, "no-such-corpus"),
        (["--seed", "-1"], 1, "seed is 0 or more"),
        (["--device", "tpu"], 2, "a device is auto, cpu or cuda; got 'tpu'"),
    ],
)
def test_wrong_options_are_refused_before_anything_runs(
    arguments: list[str], code: int, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learning, "child", lambda *_: pytest.fail("something ran"))
    result = invoke(*SHORT, *arguments, "--out", str(tmp_path))
    assert result.exit_code == code
    assert in_one_line(says) in in_one_line(result.stderr)
    assert not list(tmp_path.iterdir())
