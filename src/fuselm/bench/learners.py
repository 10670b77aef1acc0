"""Ways to train one model, and a measured run of each: losses, tokens per second, first step, peak memory, MFU.

A learner says whose ops, under torch.compile or as a CUDA graph; a task says what all learners have in common: model,
data, seed, steps. It knows the trainer, which does the work as it does it for `fuselm train`, and compares nothing:
that is learning.py. A run is a process of its own, so that the first step is a first step and the peak its own peak:

    python -m fuselm.bench.learners fused-graph '{"preset": "tiny", "data": "runs/stories", "steps": 100}'

It prints how many steps are made, now and then, and the row as JSON on its last line.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fuselm.config import Preset, TrainConfig, preset

if TYPE_CHECKING:
    import torch

    from fuselm.bench.plain_trainer import PlainTrainer
    from fuselm.checkpoint import Run
    from fuselm.torchlm.train import Trainer

Row = dict[str, Any]
WARM_UP = 5  # steps after the first that are made and not timed
EVERY = 10  # steps between two words about progress
STATUS = Path("/proc/self/status")  # of a Linux process


@dataclass(frozen=True)
class Learner:
    """One way to train; `title` is for people."""

    title: str
    ops: str = "torch"  # ModelConfig.impl
    norm: str = ""  # whose RMSNorm, where that is another's
    plain: bool = False  # not our model at all but plain_model.py
    cudnn: bool = False  # with cuDNN's attention first, as our trainer has it
    compile: bool = False
    cuda_graph: bool = False
    deterministic: bool = False
    nudged: bool = False  # begins with weights a rounding error away: how far apart such runs end, is noise

    @property
    def fused(self) -> bool:
        """Whether it has kernels of ours."""
        return self.ops != "torch" or self.norm == "fused"


LEARNERS = {
    "plain-compile": Learner("plain PyTorch, torch.compile", plain=True, compile=True),
    "plain-cudnn": Learner("plain PyTorch, torch.compile, cuDNN attention", plain=True, compile=True, cudnn=True),
    "torch": Learner("torch's ops"),
    "torch-compile": Learner("torch's ops, --compile", compile=True),
    "liger-norm": Learner("torch's ops, Liger's RMSNorm", norm="liger"),
    "fused-norm": Learner("torch's ops, fuselm's RMSNorm", norm="fused"),
    "fused": Learner("fuselm, eager", ops="auto"),
    "fused-graph": Learner("fuselm, CUDA graph", ops="auto", cuda_graph=True),
    "fused-compile": Learner("fuselm, eager, --compile", ops="auto", compile=True),
    "fused-deterministic": Learner("fuselm, eager, --deterministic", ops="auto", deterministic=True),
    "nudged": Learner("torch's ops, nudged", nudged=True),
}


@dataclass(frozen=True)
class Task:
    """What all learners have in common."""

    preset: str
    data: str  # a prepared folder
    steps: int
    precision: str = "auto"
    device: str = "auto"
    seed: int = 0
    profile: bool = False  # a few steps more, to see where their time goes
    small: bool = False  # a small model of the same kind: what a CPU can train in seconds

    def chosen(self) -> Preset:
        """The preset, or its small sister."""
        return smaller(preset(self.preset)) if self.small else preset(self.preset)

    def training(self, learner: str) -> TrainConfig:
        """How this learner trains: to the end of its schedule in `steps`, with a warm-up of a tenth of them at most."""
        one, chosen = LEARNERS[learner], self.chosen()
        return chosen.train(
            steps=self.steps, warmup=min(chosen.train().warmup, self.steps // 10), precision=self.precision,
            seed=self.seed, compile=one.compile and not one.plain, cuda_graph=one.cuda_graph,
            deterministic=one.deterministic,
        )  # fmt: skip


def smaller(chosen: Preset) -> Preset:
    """A preset of the same kind, with two narrow layers and short rows."""
    shape = {**chosen.shape, "num_layers": 2, "width": 64, "num_heads": 4, "ffn_width": 96, "context": 32}
    tokens = chosen.tokens if isinstance(chosen.tokens, str) else 512
    training = {**chosen.training, "batch_size": 8, "learning_rate": 3e-3}
    return dataclasses.replace(chosen, shape=shape, tokens=tokens, training=training, vocab_multiple=1)


# --- a run -----------------------------------------------------------------------------------------------------------


def run(name: str, task: Task, folder: Path, on_steps: Callable[[int], object] = lambda made: None) -> Row:
    """Train as this learner does, in this process; the run folder goes into `folder`."""
    from fuselm.bench.plain_trainer import PlainTrainer
    from fuselm.torchlm.precision import attention_backends, pick_device

    learner = LEARNERS[name]
    make_ready(learner, pick_device(task.device))
    record = recorded(name, task, folder)
    begin = time.monotonic()
    trainer = built(name, task, record)
    one: Trainer | PlainTrainer = trainer
    if learner.plain:
        one = PlainTrainer(trainer, compiled=learner.compile)
        begin = time.monotonic() - one.build_seconds  # its own, and not our model's, which is gone now
    picked = nullcontext() if learner.plain and not learner.cudnn else attention_backends(learner.deterministic)
    with picked:
        found = _timed(one, task.steps, begin, on_steps)
        if task.profile:
            found |= _profile(one)
    facts = {"precision": trainer.precision, "micro_batch": one.micro_batch, "mfu": _mfu(trainer, found)}
    facts |= {"found_compiled": True} if learner.compile and was_compiled() else {}
    return {"preset": task.preset, "learner": name, **facts, **found}


def was_compiled() -> bool:
    """Whether torch.compile has found on disk whatever this process wanted of it."""
    from torch._dynamo.utils import counters

    code, whole = counters["inductor"], counters["aot_autograd"]
    made = code["fxgraph_cache_miss"] + code["fxgraph_cache_bypass"]
    return not made and bool(code["fxgraph_cache_hit"] + whole["autograd_cache_hit"])


def make_ready(learner: Learner, device: torch.device) -> None:
    """What no first step is to wait for: a CUDA context, and kernels, which a machine builds once."""
    import torch

    from fuselm.kernels import build

    if device.type != "cuda":
        return
    torch.zeros(1, device=device)
    if learner.fused:
        build.library("torch")


def begun(name: str, task: Task, folder: Path) -> Trainer:
    """The trainer of a task before its first step, or where the run in the folder stands."""
    return built(name, task, recorded(name, task, folder))


def recorded(name: str, task: Task, folder: Path) -> Run:
    """The run of a task, in its folder."""
    from fuselm.checkpoint import create
    from fuselm.data.readers import TOKENIZER
    from fuselm.text import Tokenizer

    learner, chosen, tokenizer = LEARNERS[name], task.chosen(), Tokenizer.load(Path(task.data) / TOKENIZER)
    # A BPE of a short text may have fewer tokens than the preset's; the model is of the preset's size all the same.
    vocabulary = tokenizer.vocab_size if isinstance(chosen.tokens, str) else int(chosen.tokens)
    model = chosen.model(max(vocabulary, tokenizer.vocab_size), impl=_impl(learner, task), op_impl=_norm_of(learner))
    return create(folder / "run", model=model, train=task.training(name), data={}, tokenizer=tokenizer)


def built(name: str, task: Task, record: Run) -> Trainer:
    """The trainer of a run."""
    from fuselm.data.prepare import open_prepared
    from fuselm.torchlm.train import Trainer

    learner, trainer = LEARNERS[name], Trainer(record, open_prepared(task.data), device=task.device)
    if learner.norm == "liger":
        from fuselm.bench.liger import model_norm

        trainer.model.ops.__dict__["rms_norm"] = model_norm()  # one object, which all modules of a model share
    if learner.nudged:
        nudge(trainer)
    return trainer


def _impl(learner: Learner, task: Task) -> str:
    """On a GPU kernels or an error: what fell back to torch would be measured as ours."""
    from fuselm.torchlm.precision import pick_device

    return "fused" if learner.ops == "auto" and pick_device(task.device).type == "cuda" else learner.ops


def _norm_of(learner: Learner) -> dict[str, str]:
    return {"rms_norm": "fused"} if learner.norm == "fused" else {}


def nudge(trainer: Trainer) -> None:
    """Move every weight that is not 0 by up to half a unit in the last place of the run's precision, up or down."""
    import torch

    from fuselm.torchlm.precision import DTYPES

    reach = torch.finfo(DTYPES[trainer.precision]).eps / 2
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in trainer.parameters:
            way = 2 * torch.rand(parameter.shape, generator=generator) - 1
            parameter.mul_(1 + reach * way.to(parameter.device))


def _timed(trainer: Trainer | PlainTrainer, steps: int, begin: float, on_steps: Callable[[int], object]) -> Row:
    from fuselm.bench.step_profile import wait

    device = trainer.device
    trainer.advance()
    wait(device)
    first = time.monotonic()
    untimed = min(1 + WARM_UP, steps - 1)
    for _ in range(1, untimed):
        trainer.advance()
    wait(device)
    marks = Marks(device)
    for made in range(untimed + 1, steps + 1):
        trainer.advance()
        if (made - untimed) % EVERY == 0:
            marks.set()
        if made % EVERY == 0:
            on_steps(made)
    wait(device)
    end = time.monotonic()
    seconds = (end - marks.begin) / (steps - untimed)
    lows, highs = marks.spread()
    return {
        "steps": steps,
        "tokens_per_step": trainer.tokens_per_step,
        "tokens_per_second": round(trainer.tokens_per_step / seconds),
        "step_ms": round(1e3 * seconds, 3),
        "step_ms_p10": lows,
        "step_ms_p90": highs,
        "first_step_s": round(first - begin, 2),
        "seconds": round(end - begin, 2),
        "peak_memory_gib": round(_peak_bytes(device) / 2**30, 2),
        "losses": [round(loss, 7) for loss in trainer.losses()],
    }


def _profile(trainer: Trainer | PlainTrainer) -> Row:
    """Where its steps' time goes, or why nobody can say: what has been measured is not lost for that."""
    from fuselm.bench.step_profile import profiled

    try:
        return {"profile": profiled(trainer.advance, trainer.device)}
    except RuntimeError as error:
        return {"not_profiled": str(error).strip().partition("\n")[0]}


class Marks:
    """Moments between every so many steps: on a GPU of the GPU, which the host may be far ahead of."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.on_gpu = device, device.type == "cuda"
        self.begin = time.monotonic()
        self._moments: list[Any] = []
        self.set()

    def set(self) -> None:
        """One more."""
        import torch

        if not self.on_gpu:
            self._moments.append(1e3 * time.monotonic())
            return
        self._moments.append(torch.cuda.Event(enable_timing=True))
        self._moments[-1].record(torch.cuda.current_stream(self.device))

    def spread(self) -> tuple[float | None, float | None]:
        """The 10th and the 90th percentile of milliseconds a step; None of fewer than three spans. After a wait."""
        if len(self._moments) < 4:
            return None, None
        pairs = zip(self._moments, self._moments[1:], strict=False)
        spans = sorted((a.elapsed_time(b) if self.on_gpu else b - a) / EVERY for a, b in pairs)
        low, high = (spans[round(share * (len(spans) - 1))] for share in (0.1, 0.9))
        return round(low, 3), round(high, 3)


def _mfu(trainer: Trainer, found: Row) -> float | None:
    from fuselm import cost

    return round(cost.mfu(trainer.run.model, found["tokens_per_second"], trainer.peak), 4) if trainer.peak else None


def _peak_bytes(device: torch.device) -> int:
    """Of a GPU what torch has taken at most, of a CPU what the process has held.

    Taken, and not allocated: what a CUDA graph computes with it has for itself, and allocates nothing any more.
    """
    import resource

    import torch

    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    try:
        found = re.search(r"^VmHWM:\s*(\d+) kB", STATUS.read_text(), re.MULTILINE)
    except OSError:
        found = None
    # ru_maxrss outlives exec: it would be what the parent held, where that is more.
    kilobytes = int(found[1]) if found else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kilobytes * 1024


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one learner and print its row."""
    parser = argparse.ArgumentParser(prog="python -m fuselm.bench.learners", description=__doc__.partition("\n")[0])
    parser.add_argument("learner", choices=LEARNERS)
    parser.add_argument("task", type=json.loads, help="the fields of Task, as JSON")
    given = parser.parse_args(arguments)
    import torch  # noqa: F401  before the clock runs

    # Where whoever has started this will clear up, should this be ended.
    with tempfile.TemporaryDirectory(dir=Path(given.task["data"]).parent) as folder:
        row = run(given.learner, Task(**given.task), Path(folder), lambda made: print(f"step {made}", flush=True))
    print(json.dumps(row))


if __name__ == "__main__":
    main()
