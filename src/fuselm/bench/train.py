"""The record of training on a GPU, gpu/train.json: how fast models train beside a plain PyTorch model and with torch's
ops in the kernels' place, and whether they learn the same; whether a resumed run is the same run; whole runs.

The README's table is made from it (readme.py). `speed` is what `fuselm bench train` does, row by row: a row is written
down as soon as it is there, and one alone can be measured anew.

    python -m fuselm.bench.train --part speed                         # also resume, runs; all without --part
    python -m fuselm.bench.train --part speed --only "gpt-124m fused" # these rows anew, the others stay
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fuselm.bench import learning, machine
from fuselm.bench.learners import EVERY, Row, Task, begun
from fuselm.bench.learning import LearnerFailed, Plan
from fuselm.files import write_whole

PRESETS = ("tinystories", "gpt-124m", "naive-char", "moe-60m")
# Runs whose result is written down: name, and the command after `fuselm train`.
RUNS = {"tinylm": ["--preset", "tinylm"], "naive-char": ["--preset", "naive-char"]}
PARTS = ("speed", "resume", "runs")
CHECK_STEPS = 40


# --- speed and learning ----------------------------------------------------------------------------------------------


def rows_with(text: str, plan: Plan) -> list[tuple[str, str]]:
    """Preset and learner of the rows that have this text in their names."""
    names = [(preset, learner) for preset in plan.presets for learner in plan.learners_of(preset)]
    return [name for name in names if text in " ".join(name)]


def speed(out: Path, plan: Plan, only: str = "") -> int:
    """A row for each learner of each preset, or of those that have this text in their names; how many there are not."""
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        for preset, learner in rows_with(only, plan):
            scratch = Path(folder)
            data = learning.prepared(plan, preset, scratch)
            try:
                row = learning.child(learner, plan.task(preset, data), lambda made: None)
            except LearnerFailed as error:
                print(f"not measured: {preset} {learner}: {error}\n{error.log}", flush=True)
                failed += 1
                continue
            print(json.dumps({name: value for name, value in row.items() if name != "losses"}), flush=True)
            _keep(out, "speed", merged(_kept(out).get("speed", []), _short(row), plan))
    return failed


def _short(row: Row) -> Row:
    """With its date, and of its running mean every tenth value: a record is kept in git."""
    means = learning.smoothed(row["losses"])
    kept = {name: value for name, value in row.items() if name != "losses"}
    return {**kept, "date": machine.today(), "curve": [round(mean, 5) for mean in means[EVERY - 1 :: EVERY]]}


def merged(rows: Sequence[Row], new: Row, plan: Plan) -> list[Row]:
    """Rows with a new one in the place of the one of its name, in the order in which they are measured."""
    found = {(row["preset"], row["learner"]): row for row in (*rows, new)}
    return [found[name] for name in rows_with("", plan) if name in found]


# --- resuming --------------------------------------------------------------------------------------------------------


def weights_after(task: Task, folder: Path, steps: int) -> str:
    """Go on to a step, save, and give a digest of weights and averages; a process of its own each time."""
    from fuselm.torchlm.precision import attention_backends
    from fuselm.torchlm.state import snapshot

    trainer = begun("fused-deterministic", task, folder)
    with attention_backends(True):
        while trainer.progress.step < steps:
            trainer.advance()
        trainer.save()
    weights, optimizer, _ = snapshot(trainer)
    digest = hashlib.sha256()
    for name, array in sorted({**weights, **optimizer}.items()):
        digest.update(name.encode() + array.tobytes())
    return digest.hexdigest()


def resume_check(plan: Plan, folder: Path) -> Row:
    """The same run three times: whole, again, and stopped half-way and resumed in another process."""
    name = plan.presets[0]
    data = learning.prepared(plan, name, folder)
    task = json.dumps(dataclasses.asdict(dataclasses.replace(plan.task(name, data), steps=CHECK_STEPS)))

    def child(run: str, steps: int) -> str:
        found: str = _child("--weights-after", task, str(folder / run), str(steps))["sha256"]
        return found

    whole, again = child("whole", CHECK_STEPS), child("again", CHECK_STEPS)
    child("resumed", CHECK_STEPS // 2)
    resumed = child("resumed", CHECK_STEPS)
    return {"steps": CHECK_STEPS, "sha256": whole, "again_equal": whole == again, "resumed_equal": whole == resumed}


# --- the record ------------------------------------------------------------------------------------------------------


def _child(*arguments: str) -> Row:
    """A row from a process of its own: its last line of output."""
    command = [sys.executable, "-m", "fuselm.bench.train", *arguments]
    begin = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    found: Row = json.loads(done.stdout.strip().splitlines()[-1])
    return {**found, "process_s": round(time.monotonic() - begin, 1)}


def whole_runs(pictures: Path) -> list[Row]:
    """Each run of RUNS through the command line, alone on the machine; its curve beside the record."""
    rows = []
    for name, arguments in RUNS.items():
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder) / name
            command = [sys.executable, "-m", "fuselm", "train", *arguments, "--out", str(run), "--json"]
            begin = time.monotonic()
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
            found = json.loads(done.stdout.strip().splitlines()[-1])
            shutil.copy(run / "curve.png", pictures / f"{name}.png")
        found.pop("run")
        facts = {"name": name, "command": f"fuselm train {' '.join(arguments)}"}
        rows.append({**facts, **found, "process_s": round(time.monotonic() - begin, 1)})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def record(out: Path, parts: Sequence[str], plan: Plan, only: str = "") -> int:
    """Measure and write the file; what is not measured now stays as it is. How many rows of speed there are not."""
    failed = 0
    for part in parts:
        if part == "speed":
            failed = speed(out, plan, only)
        elif part == "runs":
            _keep(out, part, whole_runs(out.parent))
        else:
            with tempfile.TemporaryDirectory() as folder:
                found = resume_check(plan, Path(folder))
            print(json.dumps(found), flush=True)
            _keep(out, part, found)
    return failed


def _kept(out: Path) -> dict[str, Any]:
    kept: dict[str, Any] = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
    return kept


def _keep(out: Path, part: str, found: Any) -> None:
    """Write a part, with the date on which each part was measured: the file's own is that of the last one."""
    kept = _kept(out)
    if part == "speed":
        kept.pop("curves", None)  # of records before 2026-11-18: rows have their own
    measured = {**kept.get("measured", {}), part: machine.today()}
    write_whole(
        out, json.dumps({**kept, **machine.describe("cuda"), "measured": measured, part: found}, indent=1) + "\n"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure; needs a CUDA device."""
    parser = argparse.ArgumentParser(prog="python -m fuselm.bench.train", description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("gpu/train.json"))
    parser.add_argument("--part", choices=PARTS, help="measure this alone")
    parser.add_argument("--only", default="", metavar="TEXT", help="of speed, the rows with this in their names")
    parser.add_argument("--weights-after", nargs=3, metavar=("TASK", "FOLDER", "STEPS"))
    given = parser.parse_args(arguments)
    plan = Plan(PRESETS)
    if given.only and (given.part != "speed" or not rows_with(given.only, plan)):
        names = ", ".join(" ".join(name) for name in rows_with("", plan))
        parser.error(
            f"--only is for --part speed and has to be in one of its rows; got {given.only!r}. They are: {names}"
        )
    if given.weights_after:
        task, folder, steps = given.weights_after
        print(json.dumps({"sha256": weights_after(Task(**json.loads(task)), Path(folder), int(steps))}))
    else:
        sys.exit(min(1, record(given.out, [given.part] if given.part else PARTS, plan, given.only)))


if __name__ == "__main__":
    main()
