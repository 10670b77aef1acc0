"""One model, the same data and seed, trained in several ways: do they learn alike, how fast, in how much memory?

It knows who there is (learners.py) and starts a process for each; it draws and prints nothing (learning_report.py).

Whether two curves agree is asked of a third. Two runs that differ in rounding alone drift apart, the more the longer
they are; how far is measured: the run by torch's ops is made twice, the second time from weights moved by half a unit
in the last place. A curve agrees that is at most APART times as far from torch's as that one is. (Another seed would be
no measure: it has other batches, and its curve is hundreds of times as far away. On a CPU, in fp32 and in bf16, three
nudged runs lay within a factor of 2.5 of one another; a norm whose gradient is 5 % too large was beyond the limit.)
Losses are fp32 themselves, so that noise is never below a few units of their last place.

    plan = Plan(("naive-char",), device="cuda", steps=500)
    run(plan, Path("scratch"), results := Results(), on_step=print)
    judged(results.rows)
"""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from fuselm.bench.learners import LEARNERS, Row, Task
from fuselm.config import ConfigError, preset

BASE, NUDGED = "torch", "nudged"  # what all are compared with, and what says how far apart noise is
APART = 3.0
LEAST_NOISE = 2.0**-20  # of a loss: eight units in the last place of fp32
SHARE = 0.05  # of a new loss in the running mean
CORPUS_MB = 8.0

USUAL = ("torch", "torch-compile", "fused", "fused-graph", "fused-compile")
PLAIN = ("plain-compile", *USUAL, "fused-deterministic")
NORMS = ("torch", "liger-norm", "fused-norm", "fused")
BY_PRESET = {"gpt-124m": PLAIN, "tinystories": PLAIN, "moe-60m": NORMS}
PRESETS = ("naive-char", "gpt-124m", "moe-60m")
PRECISIONS = {"moe-60m": "fp16"}  # on a GPU, where nobody says otherwise
STEPS, SMALL_STEPS = 500, 100
FEWEST_STEPS = 10

OnStep = Callable[[str, int, int], object]  # what is at work, steps made, steps in all


class LearnerFailed(RuntimeError):
    """A learner ended without a row; the message is the last thing it said."""


@dataclass(frozen=True)
class Plan:
    """What is compared. `learners` () takes those of each preset that the device can run."""

    presets: tuple[str, ...] = PRESETS
    device: str = "cuda"
    steps: int = STEPS
    learners: tuple[str, ...] = ()
    precision: str = ""
    corpus: str = "stories"
    corpus_mb: float = CORPUS_MB
    seed: int = 0
    small: bool = False
    profile: bool = False
    label: str = ""

    def __post_init__(self) -> None:
        _check(self)

    def learners_of(self, name: str) -> tuple[str, ...]:
        """In the order in which they run: first what the others are compared with."""
        usual = BY_PRESET.get(name, USUAL)
        able = tuple(one for one in usual if self.device == "cuda" or not (LEARNERS[one].compile or needs_gpu(one)))
        chosen = self.learners or able
        return tuple(dict.fromkeys((BASE, NUDGED, *chosen)))

    def task(self, name: str, data: Path) -> Task:
        """What all learners of a preset have in common."""
        precision = self.precision or (PRECISIONS.get(name, "auto") if self.device == "cuda" else "auto")
        more: dict[str, Any] = {"seed": self.seed, "small": self.small, "profile": self.profile}
        return Task(name, str(data), self.steps, precision, self.device, **more)


@dataclass
class Results:
    """Rows in the order in which they came; `notes` are learners without one, each with its reason."""

    rows: list[Row] = field(default_factory=list)
    notes: list[Row] = field(default_factory=list)


def needs_gpu(learner: str) -> bool:
    """Whether there is no such thing on a CPU."""
    one = LEARNERS[learner]
    return one.cuda_graph or one.norm != ""


def _check(plan: Plan) -> None:
    for name in plan.presets:
        preset(name)
    for name in plan.learners:
        if name not in LEARNERS:
            raise ConfigError(f"There is no learner {name!r}; there are {', '.join(LEARNERS)}.")
        if plan.device == "cpu" and needs_gpu(name):
            raise ConfigError(f"{name} needs a GPU; the device is the CPU. Leave it out.")
        for one in plan.presets:
            _check_fits(name, one)
    if plan.steps < FEWEST_STEPS:
        raise ConfigError(f"A curve has {FEWEST_STEPS} steps or more; got {plan.steps}.")
    for name in plan.presets:
        plan.task(name, Path()).training(plan.learners_of(name)[0])
    if not 0 < plan.corpus_mb < math.inf:
        raise ConfigError(f"The corpus is a number of megabytes above 0; got {plan.corpus_mb}.")


def _check_fits(learner: str, name: str) -> None:
    from fuselm.bench.plain_model import unlike

    chosen = preset(name)
    if LEARNERS[learner].plain and (reason := unlike(chosen.model(256))):
        raise ConfigError(f"{learner} is a model with RMSNorm, RoPE and SwiGLU; {name} has {reason}. Leave one out.")
    if LEARNERS[learner].norm and chosen.shape.get("norm", "rms") != "rms":
        raise ConfigError(f"{learner} exchanges RMSNorms; {name} has none. Leave one out.")


# --- running ---------------------------------------------------------------------------------------------------------


def run(plan: Plan, scratch: Path, results: Results, on_step: OnStep = lambda what, made, of: None) -> None:
    """Train all of the plan, one after another; rows and notes are in `results` as they come."""
    for name in plan.presets:
        task = plan.task(name, scratch)
        data = prepared(plan, task.chosen().tokens, scratch)
        for learner in plan.learners_of(name):
            what = f"{name}: {LEARNERS[learner].title}"
            try:
                row = child(learner, plan.task(name, data), partial(_tell, on_step, what, plan.steps))
            except LearnerFailed as error:
                results.notes.append({"preset": name, "learner": learner, "note": str(error)})
            else:
                results.rows.append(row)


def _tell(on_step: OnStep, what: str, of: int, made: int) -> None:
    on_step(what, made, of)


def prepared(plan: Plan, tokens: str | int, scratch: Path) -> Path:
    """The corpus as a folder of tokens: characters, or a BPE of some size; made once for all presets that have it."""
    from fuselm.data.corpora import open_corpus
    from fuselm.data.prepare import character_tokenizer, prepare, train_tokenizer

    folder = scratch / f"tokens-{tokens}"
    if folder.exists():
        return folder
    corpus = open_corpus(plan.corpus, limit_bytes=int(plan.corpus_mb * 1e6))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a short text has fewer merges: the model has its size anyway
        made = character_tokenizer(corpus) if isinstance(tokens, str) else train_tokenizer(corpus, tokens)
    prepare(corpus, made, folder)
    return folder


def child(learner: str, task: Task, on_made: Callable[[int], object]) -> Row:
    """A learner's row, made in a process of its own."""
    command = [sys.executable, "-m", "fuselm.bench.learners", learner, json.dumps(dataclasses.asdict(task))]
    begin, last = time.monotonic(), ""
    on_made(0)
    with tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process:
            try:
                assert process.stdout is not None
                for line in process.stdout:
                    last = line
                    if line.startswith("step "):
                        on_made(int(line.split()[1]))
            except BaseException:  # somebody has had enough
                process.kill()
                raise
        if process.returncode:
            errors.seek(0)
            said = [line for line in errors.read().splitlines() if line.strip()]
            raise LearnerFailed(said[-1].strip() if said else f"it ended with exit code {process.returncode}")
    row: Row = json.loads(last)
    return {**row, "process_s": round(time.monotonic() - begin, 1)}


# --- judging ---------------------------------------------------------------------------------------------------------


def smoothed(losses: Sequence[float]) -> list[float]:
    """The running mean; a loss that is no number makes the rest of it none."""
    means: list[float] = []
    for loss in losses:
        means.append(loss if not means else means[-1] + SHARE * (loss - means[-1]))
    return means


def curve(row: Row) -> list[float]:
    """The running mean of a row's loss; of a row that is kept in a record every tenth value is there, or none."""
    kept: list[float] = row.get("curve", [])
    return smoothed(row["losses"]) if "losses" in row else kept


def gap(means: Sequence[float], others: Sequence[float]) -> float:
    """How far apart two curves are: the root of the mean square over the steps. (Where they are farthest is chance.)"""
    squares = [(one - other) ** 2 for one, other in zip(means, others, strict=True)]
    return math.sqrt(sum(squares) / len(squares))


def judged(rows: Sequence[Row]) -> list[Row]:
    """The rows with `gap`, `noise` and `agrees`, as far as the base and the nudged run of their preset are there."""
    return [{**row, **_verdict(row, rows)} for row in rows]


def _verdict(row: Row, rows: Sequence[Row]) -> Row:
    there = {one["learner"]: curve(one) for one in rows if one["preset"] == row["preset"]}
    base, nudged, own = there.get(BASE), there.get(NUDGED), curve(row)
    if row["learner"] == BASE or not base or not own:
        return {"gap": None, "noise": None, "agrees": None}
    found = gap(own, base)
    noise = None if not nudged else max(gap(nudged, base), LEAST_NOISE * max(base))
    if row["learner"] == NUDGED or noise is None or _has_other_masks(row):
        return {"gap": found, "noise": noise, "agrees": None}
    return {"gap": found, "noise": noise, "agrees": found <= APART * noise}  # never of a NaN


def _has_other_masks(row: Row) -> bool:
    """torch.compile draws random numbers of its own, so that with dropout its run is another one."""
    return LEARNERS[row["learner"]].compile and preset(row["preset"]).shape.get("dropout", 0.0) > 0


def fused_disagrees(rows: Sequence[Row]) -> bool:
    """Whether one of ours did not learn as torch's ops did."""
    return any(row["agrees"] is False and is_fused(row["learner"]) for row in rows)


def is_fused(learner: str) -> bool:
    """Whether it is one of ours."""
    return LEARNERS[learner].ops != "torch" or LEARNERS[learner].norm == "fused"
