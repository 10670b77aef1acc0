"""A run that was stopped or killed and resumed ends with the bits of one that never was."""

from __future__ import annotations

import dataclasses
import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fuselm.checkpoint import RunError, open_run
from fuselm.torchlm import train as train_module
from fuselm.torchlm.log import JsonLines, read_log
from fuselm.torchlm.precision import LossScaler
from fuselm.torchlm.state import restore
from fuselm.torchlm.train import Interrupted, Trainer
from tests.torchlm.runs import (
    LATENT,
    MOE,
    Records,
    assert_same_arrays,
    assert_same_state,
    begin,
    bend_loss,
    child_environment,
    of_kind,
    prepared,
    stop_after,
)

KINDS: dict[str, dict[str, dict[str, Any]]] = {
    "plain": {},
    "dropout": {"model": {"dropout": 0.2, "num_layers": 2}},
    "experts": {"model": {**MOE, "shared_expert": True, "dropout": 0.1}},
    "latent": {"model": LATENT},
    "parts": {"train": {"micro_batch": 1}, "model": {"dropout": 0.1}},
    "documents": {"train": {"rows": "documents", "schedule": "wsd"}},
    "samples": {"train": {"sample_every": 1, "sample_tokens": 4}, "model": {"dropout": 0.2}},
    "epochs": {"train": {"batch_size": 256, "micro_batch": 64}},  # two batches are all there is
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared(tmp_path_factory.mktemp("data"))


def losses(records: Records) -> list[tuple[int, float]]:
    return [(record["step"], record["loss"]) for record in of_kind(records, "step")]


@pytest.mark.parametrize("kind", KINDS)
def test_stopped_and_resumed_is_as_in_one_go(kind: str, data: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {**KINDS[kind], "train": {"log_every": 1, **KINDS[kind].get("train", {})}}
    whole, expected = begin(tmp_path / "whole", data, **options)
    whole.train()
    seen: Records = []
    for stop in (1, 5, 8, None):
        trainer, records = begin(tmp_path / "parts", data, **options)
        if stop is None:
            trainer.train()
        else:
            stop_after(trainer, stop)
            with pytest.raises(Interrupted):
                trainer.train()
            assert trainer.progress.step == trainer.run.saved["last"] == stop
            assert records[-1] == {**records[-1], "kind": "end", "reason": "stopped"}
        seen += records
    assert_same_state(trainer.run, whole.run)
    assert_same_arrays(trainer.run.load("best").weights, whole.run.load("best").weights)
    assert losses(seen) == losses(expected)
    texts = [[(r["step"], r["text"]) for r in of_kind(records, "sample")] for records in (seen, expected)]
    assert texts[0] == texts[1]


def test_bad_steps_and_the_loss_scale_are_resumed_too(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scaler = LossScaler(enabled=True, scale=256.0, patience=3)
    monkeypatch.setattr(train_module, "LossScaler", lambda enabled: dataclasses.replace(scaler))

    def begun(folder: str) -> Trainer:
        trainer, _ = begin(tmp_path / folder, data, train={"log_every": 1, "eval_every": 100})
        bend_loss(trainer, lambda step, loss: loss * float("nan") if step in (3, 6) else loss)
        return trainer

    whole = begun("whole")
    whole.train()
    assert whole.progress.updates == 10
    for stop in (3, 4, 7, None):
        trainer = begun("parts")
        if stop is not None:
            stop_after(trainer, stop)
            with pytest.raises(Interrupted):
                trainer.train()
    trainer.train()
    assert_same_state(trainer.run, whole.run)
    assert trainer.scaler.scale == whole.scaler.scale == 256.0  # halved at 3 and 6, doubled after 9 and 12


def test_a_finished_run_has_nothing_left_to_do(data: Path, tmp_path: Path) -> None:
    begin(tmp_path / "run", data)[0].train()
    before = (tmp_path / "run" / "checkpoints.json").read_bytes()
    trainer, records = begin(tmp_path / "run", data)
    assert trainer.finished
    trainer.train()
    assert records == []
    assert (tmp_path / "run" / "checkpoints.json").read_bytes() == before


def test_the_best_is_kept_while_the_last_moves_on(data: Path, tmp_path: Path) -> None:
    trainer, records = begin(tmp_path / "run", data, train={"steps": 12, "eval_every": 3, "save_every": 2})
    values = iter([3.0, 1.0, 2.0, 2.5])
    evaluation = trainer.evaluation

    def pretended() -> Any:
        return dataclasses.replace(evaluation(), loss=next(values))

    trainer.evaluation = pretended  # type: ignore[method-assign]
    weights = {}

    def note(record: Any) -> None:
        if record["kind"] == "eval":
            weights[record["step"]] = {n: p.detach().numpy().copy() for n, p in trainer.model.named_parameters()}

    trainer.listeners.append(note)
    trainer.train()
    run = open_run(tmp_path / "run")
    assert run.saved == {"last": 12, "best": 6}
    assert run.best_loss == 1.0
    assert (trainer.progress.best_step, trainer.progress.best_loss) == (6, 1.0)
    assert_same_arrays(run.load("best").weights, weights[6])
    assert_same_arrays(run.load("last").weights, weights[12])
    assert not np.array_equal(weights[6]["embedding"], weights[12]["embedding"])
    assert sorted(path.name for path in run.folder.glob("step-*")) == ["step-00000006", "step-00000012"]
    assert [(record["step"], record["best"]) for record in of_kind(records, "eval")] == [
        (3, True),
        (6, True),
        (9, False),
        (12, False),
    ]


def test_a_best_between_two_saves_is_of_weights_alone_and_the_last_stays(data: Path, tmp_path: Path) -> None:
    trainer, _ = begin(tmp_path / "run", data, train={"eval_every": 3, "save_every": 4})
    stop_after(trainer, 6)
    states = []

    def note(record: Any) -> None:
        if record["kind"] == "save":
            states.append(trainer.run.saved)

    trainer.listeners.append(note)
    with pytest.raises(Interrupted):
        trainer.train()
    assert states == [{"best": 3}, {"best": 3, "last": 4}, {"best": 6, "last": 4}, {"best": 6, "last": 6}]


def saved_state(run: Path, **changes: Any) -> None:
    """Edit the state of the last checkpoint; None takes a field out."""
    path = run / json.loads((run / "checkpoints.json").read_text())["last"] / "state.json"
    state = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: value for name, value in state.items() if value is not None}))


def test_a_run_goes_on_in_the_precision_it_began_with(data: Path, tmp_path: Path) -> None:
    begin(tmp_path / "run", data)[0].train()
    saved_state(tmp_path / "run", precision="bf16")
    assert begin(tmp_path / "run", data)[0].precision == "bf16"  # and not what "auto" is here
    saved_state(tmp_path / "run", precision="fp16")
    with pytest.raises(ValueError, match="fp16 trains on a GPU; the device is the CPU"):
        begin(tmp_path / "run", data)


@pytest.mark.parametrize("field", ["loader", "progress", "loss_scale", "micro_batch"])
def test_a_state_that_lacks_something_is_refused(field: str, data: Path, tmp_path: Path) -> None:
    begin(tmp_path / "run", data)[0].train()
    saved_state(tmp_path / "run", **{field: None})
    with pytest.raises(RunError, match=f"that of step 12 lacks '{field}'"):
        begin(tmp_path / "run", data)


def test_weights_alone_cannot_be_resumed(data: Path, tmp_path: Path) -> None:
    trainer, _ = begin(tmp_path / "run", data)
    trainer.train()
    with pytest.raises(RunError, match="Step 12 holds weights only"):
        restore(trainer, trainer.run.load("last", weights_only=True))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w: w.pop("norm.weight"), "lacks norm.weight and has none besides"),
        (lambda w: w.update(extra=w["norm.weight"]), "lacks none and has extra besides"),
        (lambda w: w.update({"norm.weight": w["norm.weight"][:3]}), r"norm.weight .* another shape: \[3\] for \[16\]"),
    ],
)
def test_weights_of_another_model_are_refused(change: Any, words: str, data: Path, tmp_path: Path) -> None:
    trainer, _ = begin(tmp_path / "run", data)
    trainer.train()
    checkpoint = trainer.run.load("last")
    change(checkpoint.weights)
    with pytest.raises(RunError, match=words + r".*Was it made with another config\?"):
        restore(trainer, checkpoint)


# --- killed ----------------------------------------------------------------------------------------------------------

KILLED = (
    "--preset", "tiny", "--device", "cpu", "--steps", "40", "--batch-size", "4", "--micro-batch", "2",
    "--context", "16", "--samples", "0", "--set", "num_layers=1", "--set", "width=16", "--set", "num_heads=2",
    "--set", "ffn_width=32", "--set", "num_experts=4", "--set", "dropout=0.2", "--set", "rows=documents",
    "--set", "log_every=1", "--set", "save_every=1", "--set", "eval_every=7", "--set", "sample_every=9",
    "--set", "sample_tokens=5",
)  # fmt: skip


def last_step(folder: Path) -> int:
    """Of the checkpoint that a process which is being killed has saved."""
    path = folder / "checkpoints.json"
    return int(json.loads(path.read_text()).get("last", "-0").split("-")[1]) if path.exists() else 0


def kill_once_it_has_saved(data: Path, folder: Path, delay: float) -> None:
    before, deadline = last_step(folder), time.monotonic() + 120
    command = [sys.executable, "-m", "fuselm", "train", str(data), "--out", str(folder), *KILLED]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=child_environment()
    ) as process:
        while last_step(folder) <= before and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(delay)
        process.kill()
        _, words = process.communicate()
    assert process.returncode == -9, words.decode()
    assert last_step(folder) > before, words.decode()


def test_killed_at_any_moment_it_goes_on_to_the_same_end(data: Path, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from fuselm.cli import app

    dice = random.Random(7)
    for _ in range(2):
        kill_once_it_has_saved(data, tmp_path / "killed", dice.uniform(0.0, 0.08))
    reached = last_step(tmp_path / "killed")
    assert 2 <= reached < 40
    results = [
        CliRunner().invoke(app, ["train", str(data), "--out", str(tmp_path / name), *KILLED])
        for name in ("killed", "whole")
    ]
    assert [result.exit_code for result in results] == [0, 0], results[0].output + results[1].output
    assert f"going on from step {reached} of 40" in results[0].stderr
    killed, whole = open_run(tmp_path / "killed"), open_run(tmp_path / "whole")
    assert_same_state(killed, whole)
    assert killed.saved == whole.saved
    assert_same_arrays(killed.load("best").weights, whole.load("best").weights)
    logs = [list(read_log(run.folder / "log.jsonl")) for run in (killed, whole)]
    assert [step for step, _ in losses(logs[0])] == list(range(1, 41))
    assert losses(logs[0]) == losses(logs[1])
    for kind in ("eval", "sample"):
        found = [[(r["step"], r.get("loss"), r.get("text")) for r in of_kind(log, kind)] for log in logs]
        assert found[0] == found[1]
    assert [path.name for path in killed.folder.glob(".*.partial")] == []


def test_a_log_of_a_killed_run_has_no_step_twice(data: Path, tmp_path: Path) -> None:
    """Killed after the line was written and before the checkpoint was: the line goes, and comes again."""
    path = tmp_path / "run" / "log.jsonl"
    for stop in (5, None):
        trainer, _ = begin(tmp_path / "run", data, train={"log_every": 1, "eval_every": 4, "save_every": 4})
        log = JsonLines(path, keep_until=trainer.progress.step)
        trainer.listeners.append(log)
        while not trainer.finished and trainer.progress.step != stop:
            trainer.advance()
            trainer._after_step()
        log.close()
    assert [step for step, _ in losses(list(read_log(path)))] == list(range(1, 13))
    assert [record["step"] for record in of_kind(list(read_log(path)), "eval")] == [4, 8, 12]
