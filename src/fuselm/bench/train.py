"""The record of training on a GPU, gpu/train.json: how fast models train beside a plain PyTorch model and with torch's
ops in the kernels' place, and whether they learn the same; whether a resumed run is the same run; whole runs.

The README's table is made from it (readme.py). `speed` is what `fuselm bench train` does, row by row: a row is written
down as soon as it is there, and one alone can be measured anew.

    python -m fuselm.bench.train --part speed                         # also resume, runs; all without --part
    python -m fuselm.bench.train --part speed --only "gpt-124m fused" # these rows anew, the others stay
    python -m fuselm.bench.train --part speed --rest --seconds 420    # those not of these sources, as time allows
    python -m fuselm.bench.train --part speed --only moe-60m --steps 200
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import math
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fuselm
from fuselm.bench import learning, machine
from fuselm.bench.learners import EVERY, Row, Task, begun
from fuselm.bench.learning import FEWEST_STEPS, STEPS, LearnerFailed, Plan
from fuselm.files import write_whole
from fuselm.kernels import build

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


@dataclass(frozen=True)
class Ask:
    """Which rows of speed are wanted, and until when one may begin."""

    only: str = ""  # with this text in their names
    rest: bool = False  # not those that are of these sources
    seconds: float = math.inf
    steps: int | None = None  # of each; left out, as many as the rows there are

    def plans(self, kept: Sequence[Row], plan: Plan) -> dict[str, Plan]:
        """Of each preset how it is measured: curves of other lengths cannot be compared with those there are."""
        there = {row["preset"]: row["steps"] for row in kept if row.get("steps")}  # of a preset all have as many
        return {name: dataclasses.replace(plan, steps=self.steps or there.get(name, STEPS)) for name in plan.presets}


def sources() -> str:
    """A digest of what a step is made of: kernels and all Python, but of benchmarks and commands."""
    digest = hashlib.sha256(json.dumps(build.source_hashes(), sort_keys=True).encode())
    package = Path(fuselm.__file__).parent
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package).as_posix()
        if not name.startswith(("bench/", "cli/")):
            digest.update(name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def wanted(kept: Sequence[Row], plans: Mapping[str, Plan], ask: Ask) -> list[tuple[str, str]]:
    """The rows to measure."""
    here = sources()
    same = [row for row in kept if row.get("sources") == here and row["preset"] in plans]
    whole = [row for row in same if row.get("steps") == plans[row["preset"]].steps]
    done = {(row["preset"], row["learner"]) for row in whole if ask.rest}
    names = [name for preset, plan in plans.items() for name in rows_with(ask.only, plan) if name[0] == preset]
    return [name for name in names if name not in done]


def speed(out: Path, plan: Plan, ask: Ask) -> int:
    """A row for each learner of each preset, or of those that are asked for; how many could not be measured."""
    failed, begin, here = 0, time.monotonic(), sources()
    kept = _kept(out).get("speed", [])
    plans = ask.plans(kept, plan)
    names = wanted(kept, plans, ask)
    with tempfile.TemporaryDirectory() as folder:
        for place, (preset, learner) in enumerate(names):
            if time.monotonic() - begin > ask.seconds:
                print(f"to do: {len(names) - place} rows wait for --rest, from {preset} {learner} on", flush=True)
                break
            scratch = Path(folder)
            data = learning.prepared(plans[preset], preset, scratch)
            try:
                row = learning.child(learner, plans[preset].task(preset, data), lambda made: None)
            except LearnerFailed as error:
                print(f"not measured: {preset} {learner}: {error}\n{error.log}", flush=True)
                failed += 1
                continue
            print(json.dumps({name: value for name, value in row.items() if name != "losses"}), flush=True)
            _keep(out, "speed", merged(_kept(out).get("speed", []), {**_short(row), "sources": here}, plan))
    return failed


def _short(row: Row) -> Row:
    """With its date, and of its running mean every tenth value: a record is kept in git."""
    means = learning.smoothed(row["losses"])
    kept = {name: value for name, value in row.items() if name != "losses"}
    return {**kept, "date": machine.today(), "curve": [round(mean, 5) for mean in means[EVERY - 1 :: EVERY]]}


def merged(rows: Sequence[Row], new: Row, plan: Plan) -> list[Row]:
    """Rows with a new one in the place of the one of its name, in the order in which they are measured.

    Those of its preset with other steps go: curves of other lengths cannot be compared.
    """
    alike = [row for row in rows if row["preset"] != new["preset"] or row.get("steps") == new.get("steps")]
    found = {(row["preset"], row["learner"]): row for row in (*alike, new)}
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


def record(out: Path, parts: Sequence[str], plan: Plan, ask: Ask) -> int:
    """Measure and write the file; what is not measured now stays as it is. How many rows of speed there are not."""
    failed = 0
    for part in parts:
        if part == "speed":
            failed = speed(out, plan, ask)
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
    parser.add_argument("--rest", action="store_true", help="of speed, the rows that are not of these sources")
    parser.add_argument(
        "--seconds",
        type=float,
        default=math.inf,
        help="of speed, after which no row begins; one takes up to two minutes",
    )
    parser.add_argument(
        "--steps",
        type=int,
        help=f"of speed, those of each row: as many as a preset's rows have, or {STEPS}; rows of other steps go",
    )
    parser.add_argument("--weights-after", nargs=3, metavar=("TASK", "FOLDER", "STEPS"))
    given = parser.parse_args(arguments)
    if given.steps is not None and given.steps < FEWEST_STEPS:
        parser.error(f"--steps is {FEWEST_STEPS} or more; got {given.steps}")
    plan, ask = Plan(PRESETS), Ask(given.only, given.rest, given.seconds, given.steps)
    if given.part != "speed" and (given.rest or given.seconds < math.inf or given.steps is not None):
        parser.error("--rest, --seconds and --steps are for --part speed alone; add it, or leave them out")
    if given.only and (given.part != "speed" or not rows_with(given.only, plan)):
        names = ", ".join(" ".join(name) for name in rows_with("", plan))
        parser.error(
            f"--only is for --part speed and has to be in one of its rows; got {given.only!r}. They are: {names}"
        )
    if given.weights_after:
        task, folder, steps = given.weights_after
        print(json.dumps({"sha256": weights_after(Task(**json.loads(task)), Path(folder), int(steps))}))
    else:
        sys.exit(min(1, record(given.out, [given.part] if given.part else PARTS, plan, ask)))


if __name__ == "__main__":
    main()
