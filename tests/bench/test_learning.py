"""Learners side by side: when curves agree, what a comparison runs, what it writes, and what it refuses."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fuselm.bench import learners, learning, learning_report
from fuselm.bench.learners import LEARNERS, Task
from fuselm.bench.learning import LearnerFailed, Plan, Results, child, curve, gap, judged, prepared, run, smoothed
from fuselm.config import ConfigError

SMALL: dict[str, Any] = {"device": "cpu", "steps": 40, "corpus_mb": 0.1, "small": True}


# --- verdicts --------------------------------------------------------------------------------------------------------


def rows(preset: str = "tiny", **curves: list[float]) -> list[dict[str, Any]]:
    return [{"preset": preset, "learner": name.replace("_", "-"), "losses": losses} for name, losses in curves.items()]


def verdicts(found: list[dict[str, Any]]) -> dict[str, Any]:
    return {row["learner"]: row["agrees"] for row in judged(found)}


def test_a_running_mean_begins_with_the_first_loss() -> None:
    assert smoothed([4.0, 2.0, 2.0]) == pytest.approx([4.0, 3.9, 3.805])
    assert gap([4.0, 3.0], [4.0, 3.5]) == pytest.approx(math.sqrt(0.125))
    assert math.isnan(gap([4.0, math.nan], [4.0, 3.5]))


def test_a_curve_agrees_up_to_three_times_the_noise() -> None:
    base = [4.0] * 50
    found = rows(torch=base, nudged=[4.01] * 50, fused=[4.029] * 50, fused_graph=[3.969] * 50)
    assert verdicts(found) == {"torch": None, "nudged": None, "fused": True, "fused-graph": False}
    row = judged(found)[2]
    assert (row["gap"], row["noise"]) == (pytest.approx(0.029), pytest.approx(0.01))


def test_every_step_counts_and_a_loss_that_is_no_number_never_agrees() -> None:
    base = [4.0] * 50
    nudged = [*base[:25], 4.1, *base[26:]]
    spike, lost = [*base[:10], 5.0, *base[11:]], [*base[:49], math.nan]
    assert verdicts(rows(torch=base, nudged=nudged, fused=spike, fused_compile=lost)) == {
        "torch": None, "nudged": None, "fused": False, "fused-compile": False,
    }  # fmt: skip


def test_noise_is_never_less_than_a_loss_can_show() -> None:
    base = [4.0] * 20
    assert verdicts(rows(torch=base, nudged=base, fused=[4.0 + 2**-19] * 20))["fused"] is True
    assert verdicts(rows(torch=base, nudged=base, fused=[4.0001] * 20))["fused"] is False


def test_a_comparison_that_is_lost_itself_says_nothing() -> None:
    lost, fine = [math.nan] * 20, [4.0] * 20
    for curves in ({"torch": lost, "nudged": fine, "fused": fine}, {"torch": fine, "nudged": lost, "fused": fine}):
        assert verdicts(rows(**curves))["fused"] is None
        assert learning.fused_disagrees(judged(rows(**curves)))  # nobody can say that it agrees


def test_curves_of_other_lengths_are_not_compared() -> None:
    assert verdicts(rows(torch=[4.0] * 20, nudged=[4.0] * 20, fused=[4.0] * 30))["fused"] is None
    assert verdicts(rows(torch=[4.0] * 20, nudged=[4.0] * 30, fused=[4.0] * 20))["fused"] is None


def test_nothing_is_said_without_something_to_compare_with() -> None:
    curves = {"torch": [4.0] * 20, "nudged": [4.1] * 20, "fused": [4.0] * 20}
    for missing in ("torch", "nudged"):
        assert verdicts(rows(**{k: v for k, v in curves.items() if k != missing}))["fused"] is None
    other = [*rows("small", fused=[9.0] * 20), *rows(**curves)]
    assert [row["agrees"] for row in judged(other)] == [None, None, None, True]


def test_under_torch_compile_dropout_has_masks_of_its_own() -> None:
    curves = {"torch": [4.0] * 20, "nudged": [4.0] * 20, "fused": [4.5] * 20, "fused_compile": [4.5] * 20}
    assert verdicts(rows("naive-char", **curves))["fused-compile"] is None
    assert verdicts(rows("naive-char", **curves))["fused"] is False
    assert not learning.fused_disagrees(judged(rows("naive-char", torch=curves["torch"], fused_compile=[9.0] * 20)))
    apart = {"torch": [4.0] * 20, "nudged": [4.0] * 20, "fused_deterministic": [4.5] * 20}
    assert verdicts(rows("tinylm", **apart))["fused-deterministic"] is None  # another fused attention
    assert verdicts(rows("naive-char", **apart))["fused-deterministic"] is False  # written out
    assert verdicts(rows("tiny", **curves))["fused-compile"] is False


def test_a_row_of_a_record_has_its_curve_already() -> None:
    assert curve({"curve": [3.0, 2.0]}) == [3.0, 2.0]
    assert curve({"losses": [4.0, 2.0]}) == pytest.approx([4.0, 3.9])
    old = [{"preset": "tiny", "learner": name} for name in ("torch", "fused")]
    assert [row["gap"] for row in judged(old)] == [None, None]


# --- running ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Learners without processes of their own: a tenth of the time."""

    def here(name: str, task: Task, on_made: Callable[[int], object]) -> dict[str, Any]:
        folder = tmp_path / f"{task.preset}-{name}"
        folder.mkdir()
        return {**learners.run(name, task, folder, on_made), "process_s": 0.1}

    monkeypatch.setattr(learning, "child", here)


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_fused_ops_learn_as_torchs_do(precision: str, tmp_path: Path) -> None:
    plan, results, told = Plan(("moe-60m", "naive-char"), precision=precision, **SMALL), Results(), []
    run(plan, tmp_path, results, lambda what, made, of: told.append((what, made, of)))
    found = judged(results.rows)
    names = [("torch", None), ("nudged", None), ("fused", True)]
    assert [(row["learner"], row["agrees"]) for row in found] == names * 2
    assert results.notes == []
    assert ("naive-char fused", 40, 40) in told
    assert all(0 < row["noise"] < 0.05 for row in found if row["noise"] is not None)
    assert all(row["losses"][-1] < row["losses"][0] - 0.3 for row in found)


class WrongSlope(torch.autograd.Function):
    """The identity with a gradient that is half as large again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * 1.5


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_op_that_is_a_little_wrong_is_found(precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = learners.built

    def built(learner: Any, task: Task, record: Any) -> Any:
        trainer = right(learner, task, record)
        norm = trainer.model.ops.layer_norm
        if learner == "fused":
            wrong = lambda x, *rest, **more: norm(WrongSlope.apply(x), *rest, **more)  # noqa: E731
            trainer.model.ops.__dict__["layer_norm"] = wrong
        return trainer

    monkeypatch.setattr(learners, "built", built)
    results = Results()
    run(Plan(("naive-char",), precision=precision, **SMALL), tmp_path, results)
    assert [row["agrees"] for row in judged(results.rows)] == [None, None, False]
    assert learning.fused_disagrees(judged(results.rows))


def test_a_learner_that_fails_is_a_note_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(name: str, task: Task, on_made: Any) -> dict[str, Any]:
        if name == "nudged":
            raise LearnerFailed("out of luck", "all that it said")
        return {"preset": task.preset, "learner": name, "losses": [1.0]}

    monkeypatch.setattr(learning, "child", fails)
    results, kept = Results(), []
    run(Plan(("tiny",), **SMALL), tmp_path, results, keep=lambda: kept.append(len(results.rows)))
    assert [row["learner"] for row in results.rows] == ["torch", "fused"]
    note = {"preset": "tiny", "learner": "nudged", "note": "out of luck", "log": "all that it said"}
    assert results.notes == [note]
    assert kept == [1, 1, 2]


def test_a_corpus_that_is_too_short_is_refused_once_and_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "child", lambda *_: pytest.fail("something ran"))
    (tmp_path / "short.txt").write_text("one two three four five six seven eight nine ten\n" * 4)
    plan = Plan(("naive-char",), **{**SMALL, "corpus": str(tmp_path / "short.txt")})
    with pytest.raises(ValueError, match=r"this corpus has .* Use a longer corpus\.$"):
        run(plan, tmp_path, Results())


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("Traceback:\n  File x\nValueError: the rule. The remedy.\n", "ValueError: the rule. The remedy."),
        ("torch.AcceleratorError: CUDA error\nCompile with `DSA`\n", "torch.AcceleratorError: CUDA error"),
        ("killed\n\n", "killed"),
        ("", ""),
        ("a.py:7: UserWarning: slow\n  warnings.warn(\n", ""),
        ("no room\na.py:7: UserWarning: slow\n  warnings.warn(\n", "no room"),
        ("a.py:7: UserWarning: slow\n  warn()\nterminate called\n  what():  bad\n", "terminate called"),
    ],
)  # fmt: skip
def test_the_reason_is_the_error_and_not_what_follows_it(said: str, why: str) -> None:
    assert learning.reason(said) == why


@pytest.mark.parametrize(
    ("ends", "why"),
    [
        ("signal.raise_signal(9)", "ended by signal 9 (SIGKILL: perhaps out of memory)"),
        ("sys.stderr.write('no room\\n'); sys.stderr.flush(); os.abort()", "ended by signal 6 (SIGABRT); no room"),
        ("signal.raise_signal(40)", "ended by signal 40 (no name)"),
        ("warnings.warn('slow'); sys.exit(3)", "it ended with exit code 3"),
        ("raise ValueError('the rule. The remedy.')", "ValueError: the rule. The remedy."),
    ],
)
def test_a_process_that_a_signal_ended_is_said_to_be(ends: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    popen = subprocess.Popen

    def ended(command: list[str], **more: Any) -> Any:
        return popen([command[0], "-c", f"import os, signal, sys, warnings; {ends}"], **more)

    monkeypatch.setattr(learning.subprocess, "Popen", ended)
    with pytest.raises(LearnerFailed) as caught:
        child("torch", Task("tiny", "", 20), lambda made: None)
    assert str(caught.value) == why


def test_a_process_that_hangs_is_ended_and_said_to_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    popen = subprocess.Popen
    hangs = "import time; print('step 10', flush=True); time.sleep(600)"
    monkeypatch.setattr(learning.subprocess, "Popen", lambda command, **more: popen([command[0], "-c", hangs], **more))
    monkeypatch.setattr(learning, "SILENCE_SECONDS", 0.5)
    told: list[int] = []
    with pytest.raises(LearnerFailed, match=r"it made no 10 steps in 0\.5 seconds, and was ended"):
        child("torch", Task("tiny", "", 20), told.append)
    assert told in ([0, 10], [0])  # a slow machine may not come so far


def test_tokens_are_heard_of_by_preset_from_the_first_tokenizer_on(tmp_path: Path) -> None:
    plan, told = Plan(("naive-char", "tiny"), **SMALL), []
    for name in plan.presets:
        prepared(plan, name, tmp_path, lambda what, done, of: told.append(what))
    assert list(dict.fromkeys(told)) == [
        "naive-char tokenizer train", "naive-char tokenizer valid", "naive-char tokens train",
        "naive-char tokens valid", "tiny tokenizer train", "tiny tokenizer merge", "tiny tokens train",
        "tiny tokens valid",
    ]  # fmt: skip


def small_task(tmp_path: Path) -> Task:
    plan = Plan(("tiny",), **SMALL)
    return plan.task("tiny", prepared(plan, "tiny", tmp_path))


def test_a_process_gives_its_row_or_its_last_words(tmp_path: Path) -> None:
    task, told = small_task(tmp_path), []
    row = child("torch", task, told.append)
    assert told == [0, 10, 20, 30, 40]
    assert (row["learner"], len(row["losses"]), row["process_s"] >= row["seconds"]) == ("torch", 40, True)
    with pytest.raises(LearnerFailed, match=r"A CUDA graph is of a GPU's work; the device is cpu") as caught:
        child("fused-graph", task, told.append)
    assert "Traceback" in caught.value.log


def test_whoever_interrupts_leaves_no_process_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Any] = []
    popen = learning.subprocess.Popen
    monkeypatch.setattr(learning.subprocess, "Popen", lambda *a, **k: begun.append(popen(*a, **k)) or begun[-1])

    def interrupt(made: int) -> None:
        if made:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        child("torch", dataclasses.replace(small_task(tmp_path), steps=100_000), interrupt)
    assert any(path.name.startswith("tmp") for path in tmp_path.iterdir())  # where the scratch folder is cleared up
    [process] = begun
    assert process.poll() is not None
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


# --- plans -----------------------------------------------------------------------------------------------------------


def test_a_gpu_gets_all_learners_of_a_preset_and_a_cpu_those_it_can_run() -> None:
    plan = Plan()
    assert plan.learners_of("naive-char") == (
        "torch", "nudged", "torch-compile", "fused", "fused-graph", "fused-compile",
    )  # fmt: skip
    assert plan.learners_of("moe-60m") == ("torch", "nudged", "liger-norm", "fused-norm", "fused")
    assert plan.learners_of("gpt-124m")[2] == "plain-compile"
    assert Plan(device="cpu").learners_of("gpt-124m") == ("torch", "nudged", "fused", "fused-deterministic")
    assert "plain-compile" not in Plan(("gpt-124m",), precision="fp16").learners_of("gpt-124m")
    assert Plan(learners=("fused-graph",)).learners_of("tiny") == ("torch", "nudged", "fused-graph")
    for preset in ("naive-char", "gpt-124m", "moe-60m"):
        Plan((preset,), learners=plan.learners_of(preset))  # each is one that this preset can have


def test_fp16_is_for_the_mixture_on_a_gpu_unless_told_otherwise(tmp_path: Path) -> None:
    assert Plan().task("moe-60m", tmp_path).precision == "fp16"
    assert Plan().task("gpt-124m", tmp_path).precision == "auto"
    assert Plan(precision="bf16").task("moe-60m", tmp_path).precision == "bf16"
    assert Plan(device="cpu").task("moe-60m", tmp_path).precision == "auto"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"presets": ("tinny",)}, "There is no preset 'tinny'; the presets are demo"),
        ({"learners": ("fussed",)}, "There is no learner 'fussed'; there are plain-compile, plain-cudnn"),
        ({"learners": ("fused-graph",), "device": "cpu"}, "fused-graph needs a GPU; the device is the CPU."),
        ({"learners": ("plain-compile",)}, "naive-char has norm layer, positions learned, activation gelu"),
        ({"learners": ("liger-norm",)}, "liger-norm exchanges RMSNorms; naive-char has none."),
        ({"steps": 19}, "A curve has 20 steps or more; got 19."),
        ({"corpus_mb": math.nan}, "a number of megabytes, a byte at least; got nan"),
        ({"corpus_mb": 1e-9}, "a number of megabytes, a byte at least; got 1e-09"),
        ({"presets": ()}, "of one preset or more; got none"),
        ({"presets": ("gpt-124m",), "learners": ("plain-compile",), "precision": "fp16"}, "no loss scale"),
    ],
)
def test_what_cannot_be_compared_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Plan(**options)
    assert says in str(caught.value)


# --- files -----------------------------------------------------------------------------------------------------------


def measured() -> list[dict[str, Any]]:
    facts = {
        "precision": "bf16", "steps": 30, "tokens_per_step": 100, "tokens_per_second": 3_000_000, "step_ms": 0.033,
        "first_step_s": 1.0, "seconds": 2.0, "process_s": 3.0, "peak_memory_gib": 1.5, "mfu": 0.25, "micro_batch": 4,
    }  # fmt: skip
    base = [4.0 - 0.05 * step for step in range(30)]
    curves = {"torch": base, "nudged": [loss + 1e-3 for loss in base], "fused": [loss + 2e-3 for loss in base]}
    curves |= {"fused_compile": [math.nan] * 30}
    return judged([{**row, **facts} for row in rows(**curves)])


def test_files_have_a_row_for_each_learner_and_each_step(tmp_path: Path) -> None:
    written = learning_report.write(tmp_path, {"gpu": None}, measured(), [])
    assert [path.name for path in written] == ["rows.csv", "curves.csv", "rows.json"]
    with (tmp_path / "rows.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [(row["learner"], row["agrees"]) for row in table] == [
        ("torch", ""), ("nudged", ""), ("fused", "True"), ("fused-compile", "False"),
    ]  # fmt: skip
    assert (table[2]["gap"], table[2]["noise"], table[2]["mfu"]) == ("0.002", "0.001", "0.25")
    with (tmp_path / "curves.csv").open() as file:
        steps = list(csv.DictReader(file))
    assert len(steps) == 4 * 30
    mean = str(4.001 + 0.05 * (3.951 - 4.001))
    assert steps[31] == {"preset": "tiny", "learner": "nudged", "step": "2", "loss": "3.951", "mean_loss": mean}
    document = json.loads((tmp_path / "rows.json").read_text())
    assert document["rows"][3]["last_loss"] is None
    assert "NaN" not in (tmp_path / "rows.json").read_text()


def test_what_is_of_a_comparison_before_does_not_stay(tmp_path: Path) -> None:
    before = [{**row, "preset": "small", "profile": {"gap_ms": 1.0, "kernels": []}} for row in measured()]
    learning_report.write(tmp_path, {}, before, [])
    for name in ("small.png", "demo.png", "mine.png"):  # the first is of that comparison
        (tmp_path / name).write_text("old")
    learning_report.write(tmp_path, {}, measured(), [])
    names = ["curves.csv", "demo.png", "mine.png", "rows.csv", "rows.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


@pytest.mark.parametrize("there", ["", "[1]", '{"rows": [{"op": "add"}]}', '{"rows": 3}', '{"rows": []}', "{"])
def test_nobody_elses_files_are_removed(there: str, tmp_path: Path) -> None:
    if there:
        (tmp_path / "rows.json").write_text(there)
    for name in ("kernels.csv", "tiny.png", "tinylm.png"):
        (tmp_path / name).write_text("mine")
    learning_report.write(tmp_path, {}, measured(), [])
    assert {path.name for path in tmp_path.iterdir()} >= {"kernels.csv", "tiny.png", "tinylm.png"}


def test_a_preset_has_a_picture_also_where_little_is_known(tmp_path: Path) -> None:
    everything = measured()
    for number, some in enumerate((everything, everything[:1], everything[2:])):
        [path] = learning_report.pictures(tmp_path / str(number), some, "a machine")
        assert path.name == "tiny.png"
        assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("number", [1, 2, 4, len(LEARNERS)])
def test_curves_that_agree_are_all_seen(number: int) -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure(figsize=(7, 3.5))
    canvas = pytest.importorskip("matplotlib.backends.backend_agg").FigureCanvasAgg(figure)
    axis, losses = figure.add_subplot(), [4.0 - 0.05 * step for step in range(30)]
    alike = [{"learner": learner, "losses": losses} for learner in list(LEARNERS)[:number]]
    learning_report._draw_curves(axis, alike)
    axis.get_legend().remove()
    canvas.draw()
    pixels = np.asarray(canvas.buffer_rgba())[..., :3].reshape(-1, 3)
    for row in alike:
        colour = [int(learning_report.COLOURS[row["learner"]][at : at + 2], 16) for at in (1, 3, 5)]
        assert (pixels == colour).all(axis=1).sum() > 30, row["learner"]


def test_a_curve_that_is_the_same_to_the_bit_is_named_where_it_has_no_distance() -> None:
    axis = pytest.importorskip("matplotlib.figure").Figure().add_subplot()
    same = [{**row, "losses": measured()[0]["losses"]} for row in measured()[:3]]
    learning_report._draw_gaps(axis, same)
    assert "fuselm, eager: none at any step" in [text.get_text() for text in axis.get_legend().get_texts()]


def test_every_learner_has_a_colour_of_its_own() -> None:
    assert learning_report.COLOURS.keys() == LEARNERS.keys()
    assert len(set(learning_report.COLOURS.values())) == len(LEARNERS)


def test_verdicts_in_words() -> None:
    found = [learning_report.verdict(row) for row in measured()]
    assert found == ["base", "noise", "agrees", "DIFFERS"]
    assert learning_report.verdict({"preset": "tiny", "learner": "fused", "agrees": None}) == "not known"
    assert learning_report.verdict({"preset": "tinylm", "learner": "fused-compile", "agrees": None}) == (
        "other dropout"
    )
