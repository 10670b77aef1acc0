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
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from fuselm.bench.learners import EVERY, LEARNERS, Row, Task
from fuselm.config import ConfigError, preset

BASE, NUDGED = "torch", "nudged"  # what all are compared with, and what says how far apart noise is
APART = 3.0
LEAST_NOISE = 2.0**-20  # of a loss: eight units in the last place of fp32
SHARE = 0.05  # of a new loss in the running mean
CORPUS_MB = 8.0

USUAL = ("torch", "torch-compile", "fused", "fused-graph", "fused-compile")
PLAIN = ("plain-compile", "plain-cudnn", *USUAL, "fused-deterministic")
NORMS = ("torch", "liger-norm", "fused-norm", "fused")
BY_PRESET = {"gpt-124m": PLAIN, "tinystories": PLAIN, "moe-60m": NORMS}
PRESETS = ("naive-char", "gpt-124m", "moe-60m")
PRECISIONS = {"moe-60m": "fp16"}  # on a GPU, where nobody says otherwise
STEPS, SMALL_STEPS = 500, 100
FEWEST_STEPS = 20
SILENCE_SECONDS = 300.0  # within which a process has made EVERY steps, however long it compiled

OnStep = Callable[[str, int, int | None], None]  # what is at work, how far it is, and of how much


class LearnerFailed(RuntimeError):
    """A learner ended without a row; the message is why, as far as it said, and `log` the end of all it said."""

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(message)
        self.log = log


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
        able = tuple(one for one in usual if self._is_able(one))
        return tuple(dict.fromkeys((BASE, NUDGED, *(self.learners or able))))

    def _is_able(self, learner: str) -> bool:
        """Whether the device can run it, in seconds if it is a CPU, and in this precision."""
        one = LEARNERS[learner]
        slow = one.compile or needs_gpu(learner)
        return not (self.device == "cpu" and slow) and not (one.plain and self.precision == "fp16")

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
    return one.cuda_graph or one.cudnn or one.norm != ""


def _check(plan: Plan) -> None:
    if not plan.presets:
        raise ConfigError("A comparison is of one preset or more; got none.")
    for name in plan.presets:
        preset(name)
    for name in plan.learners:
        if name not in LEARNERS:
            raise ConfigError(f"There is no learner {name!r}; there are {', '.join(LEARNERS)}.")
        if plan.device == "cpu" and needs_gpu(name):
            raise ConfigError(f"{name} needs a GPU; the device is the CPU. Leave it out.")
        if LEARNERS[name].plain and plan.precision == "fp16":
            raise ConfigError(f"{name} has no loss scale, which fp16 needs; got precision fp16. Use bf16.")
        for one in plan.presets:
            _check_fits(name, one)
    if plan.steps < FEWEST_STEPS:
        raise ConfigError(f"A curve has {FEWEST_STEPS} steps or more; got {plan.steps}.")
    for name in plan.presets:
        plan.task(name, Path()).training(plan.learners_of(name)[0])
    if not 1e-6 <= plan.corpus_mb < math.inf:
        raise ConfigError(f"The corpus is a number of megabytes, a byte at least; got {plan.corpus_mb}.")


def _check_fits(learner: str, name: str) -> None:
    from fuselm.bench.plain_model import unlike

    chosen = preset(name)
    if LEARNERS[learner].plain and (reason := unlike(chosen.model(256))):
        raise ConfigError(f"{learner} is a model with RMSNorm, RoPE and SwiGLU; {name} has {reason}. Leave one out.")
    if LEARNERS[learner].norm and chosen.shape.get("norm", "rms") != "rms":
        raise ConfigError(f"{learner} exchanges RMSNorms; {name} has none. Leave one out.")


# --- running ---------------------------------------------------------------------------------------------------------


def _nobody(what: str, done: int, of: int | None) -> None:
    """Listens to nothing."""


def run(
    plan: Plan,
    scratch: Path,
    results: Results,
    on_step: OnStep = _nobody,
    keep: Callable[[], object] = lambda: None,
) -> None:
    """Train all of the plan, one after another; rows and notes are in `results` as they come, and then kept."""
    for name in plan.presets:
        task = plan.task(name, prepared(plan, name, scratch, on_step))
        for learner in plan.learners_of(name):
            try:
                row = child(learner, task, partial(_tell, on_step, stage(name, learner), plan.steps))
            except LearnerFailed as error:
                results.notes.append({"preset": name, "learner": learner, "note": str(error), "log": error.log})
            else:
                results.rows.append(row)
            keep()


def stage(name: str, learner: str) -> str:
    """What `on_step` hears of a learner's run: short, as a terminal is 80 columns wide."""
    return f"{name} {learner}"


def _tell(on_step: OnStep, what: str, of: int, made: int) -> None:
    on_step(what, made, of)


def _under(title: str, on_step: OnStep) -> OnStep:
    return lambda part, done, of: on_step(f"{title} {part}", done, of)


def prepared(plan: Plan, name: str, scratch: Path, on_step: OnStep = _nobody) -> Path:
    """The corpus as a folder of tokens, as a preset has them; made once for all presets that have the same.

    One that is too short for a batch is refused here, and not by each learner.
    """
    from fuselm.data.corpora import open_corpus
    from fuselm.data.loader import Loader
    from fuselm.data.prepare import character_tokenizer, open_prepared, prepare, train_tokenizer

    chosen = plan.task(name, scratch).chosen()
    folder = scratch / f"tokens-{chosen.tokens}"
    # A stage is of a preset: what has one name is taken for one piece of work, with one speed.
    learnt, written = _under(f"{name} tokenizer", on_step), _under(f"{name} tokens", on_step)
    if not folder.exists():
        limit = int(plan.corpus_mb * 1e6)
        corpus = open_corpus(plan.corpus, limit_bytes=limit, on_progress=partial(on_step, f"{name} download"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # a short text has fewer merges: the model has its size anyway
            if isinstance(chosen.tokens, str):
                made = character_tokenizer(corpus, on_progress=learnt)
            else:
                made = train_tokenizer(corpus, chosen.tokens, on_progress=learnt)
        prepare(corpus, made, folder, on_progress=written)
    try:
        size, context = chosen.train().batch_size, chosen.model(256).context
        Loader(open_prepared(folder)["train"], batch_size=size, context=context)
    except ValueError as error:  # which also speaks of a smaller batch and a shorter context
        raise ConfigError(f"{str(error).partition(' Use ')[0]} Use a longer corpus.") from None
    return folder


def child(learner: str, task: Task, on_made: Callable[[int], object]) -> Row:
    """A learner's row, made in a process of its own."""
    command = [sys.executable, "-m", "fuselm.bench.learners", learner, json.dumps(dataclasses.asdict(task))]
    begin, last = time.monotonic(), ""
    on_made(0)
    with tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process:
            watch = _Watch(process)
            try:
                assert process.stdout is not None
                for line in process.stdout:
                    last = line
                    watch.heard()
                    if line.startswith("step "):
                        on_made(int(line.split()[1]))
            except BaseException:  # somebody has had enough
                process.kill()
                raise
            finally:
                watch.end()
        if watch.ended_it:
            raise LearnerFailed(f"it made no {EVERY} steps in {SILENCE_SECONDS:g} seconds, and was ended")
        if process.returncode:
            errors.seek(0)
            said = errors.read()
            raise LearnerFailed(how_it_ended(process.returncode, said), said[-3000:])
    row: Row = json.loads(last)
    return {**row, "process_s": round(time.monotonic() - begin, 1)}


class _Watch:
    """Ends a process that nothing has been heard of for too long: one that hangs must not hold up all others."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process, self.ended_it, self._timer = process, False, self._started()

    def heard(self) -> None:
        """Wait anew."""
        self.end()
        self._timer = self._started()

    def end(self) -> None:
        """Watch no more."""
        self._timer.cancel()

    def _started(self) -> threading.Timer:
        timer = threading.Timer(SILENCE_SECONDS, self._kill)
        timer.daemon = True
        timer.start()
        return timer

    def _kill(self) -> None:
        self.ended_it = True
        self.process.kill()


def how_it_ended(code: int, said: str) -> str:
    """Why a process has no row: a signal, which it can say nothing of, and what it said."""
    why = reason(said)
    if code >= 0:
        return why or f"it ended with exit code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else "no name"
    hint = ": perhaps out of memory" if -code == signal.SIGKILL else ""
    return f"ended by signal {-code} ({name}{hint})" + (f"; {why}" if why else "")


def reason(said: str) -> str:
    """The error that a process ended with: what follows it may be advice, or complaints of those who clear up.

    Without one the last line, but not of a warning, which is followed by the line of source that gave it.
    """
    lines = [line for line in said.splitlines() if line.strip() and not re.search(r":\d+: \w*Warning: ", line)]
    errors = [line for line in lines if re.match(r"\s*[\w.]*(Error|Exception|Failed|Interrupt)\b", line)]
    flush = [line for line in lines if not line[0].isspace()]
    return (errors or flush or [""])[-1].strip()


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
    if len(own) != len(base) or not math.isfinite(sum(base)):
        return {"gap": None, "noise": None, "agrees": None}
    found, noise = gap(own, base), None
    if nudged and len(nudged) == len(base) and math.isfinite(sum(nudged)):
        noise = max(gap(nudged, base), LEAST_NOISE * max(base))
    if row["learner"] == NUDGED or noise is None or has_other_masks(row):
        return {"gap": found, "noise": noise, "agrees": None}
    return {"gap": found, "noise": noise, "agrees": found <= APART * noise}  # never of a NaN


def has_other_masks(row: Row) -> bool:
    """Whether its dropout is not that of the others, so that it is another run: torch.compile draws its own numbers.

    So does the attention that a deterministic run takes, where it is fused.
    """
    learner, shape = LEARNERS[row["learner"]], preset(row["preset"]).shape
    draws = learner.compile or (learner.deterministic and shape.get("attention_path") != "written")
    return draws and shape.get("dropout", 0.0) > 0


def fused_disagrees(rows: Sequence[Row]) -> bool:
    """Whether one of ours did not learn as torch's ops did, or nobody can say that it did."""
    ours = [row for row in rows if is_fused(row["learner"]) and not has_other_masks(row)]
    return any(not row["agrees"] for row in ours)


def is_fused(learner: str) -> bool:
    """Whether it is one of ours."""
    return LEARNERS[learner].fused
