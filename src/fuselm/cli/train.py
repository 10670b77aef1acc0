"""`fuselm train`: from a corpus to a trained model in one command. Reads the command line and wires rooms together.

fuselm train --preset demo
fuselm train book.txt --preset tiny --steps 500 --out runs/book
fuselm train --resume runs/book
"""

from __future__ import annotations

import atexit
import json
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fuselm.cli.errors import told
from fuselm.cli.paths import typed_corpus, typed_path
from fuselm.cli.tokenizer import GivenTokenizer
from fuselm.cli.train_end import finish, list_presets
from fuselm.cli.train_plan import Plan, check_room, make_plan, open_data, open_or_make
from fuselm.cli.train_show import shown

if TYPE_CHECKING:
    from fuselm.checkpoint import Run
    from fuselm.data.shards import Shard
    from fuselm.torchlm.train import Trainer

HELP = """Train a model on a corpus: tokenise, train, evaluate, sample, and keep everything in one folder.

CORPUS is a name (stories, little-stories, tinyshakespeare, wizard-of-oz, tinystories), a path with text, or a folder
that `fuselm data prepare` made; left out, it is the one that the preset was made for. A preset is a model and a way to
train it, see --list; --set changes any field of either.

The run folder gets config.json, tokenizer.json, weights as safetensors (the last and the best), log.jsonl, curve.png
and report.md. Ctrl-C saves and stops; the same command, or --resume, goes on exactly where it was.

Examples:

  fuselm train --preset demo

  fuselm train book.txt --preset tiny --steps 500 --out runs/book

  fuselm train tinystories --preset tinystories --compile --set learning_rate=0.004 --set dropout=0.1

  fuselm train --resume runs/book
"""

DEFAULT_PRESET = "demo"
SAME_WISH_SECONDS = 1.0  # between two signals that ask for one thing

Out = Annotated[
    Path | None,
    typer.Option(parser=typed_path, help="Run folder.", show_default="runs/PRESET; of another text runs/TEXT-PRESET"),
]
CudaGraph = Annotated[
    bool | None,
    typer.Option(
        "--cuda-graph/--no-cuda-graph", help="Launch a step as one CUDA graph.", show_default="on a GPU, if it fits"
    ),
]
Deterministic = Annotated[
    bool | None, typer.Option("--deterministic/--no-deterministic", help="The same bits again, on a GPU too.")
]


def train(
    corpus: Annotated[
        str | None, typer.Argument(parser=typed_corpus, help="Name or path; default: the preset's.", show_default=False)
    ] = None,
    preset: Annotated[str | None, typer.Option(help="Model and training; see --list.", show_default="demo")] = None,
    out: Out = None,
    resume: Annotated[Path | None, typer.Option(parser=typed_path, help="Go on with the run in this folder.")] = None,
    steps: Annotated[int | None, typer.Option(help="Steps of training.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Rows of a step.")] = None,
    micro_batch: Annotated[int | None, typer.Option(help="Rows at once; default: what fits the memory.")] = None,
    context: Annotated[int | None, typer.Option(help="Tokens of a row.")] = None,
    learning_rate: Annotated[float | None, typer.Option("--learning-rate", "--lr", help="At its peak.")] = None,
    precision: Annotated[str | None, typer.Option(help="auto, fp32, bf16 or fp16.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:1.")] = "auto",
    impl: Annotated[str | None, typer.Option(help="Ops: auto, fused or torch.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of weights, order and dropout.")] = None,
    compiled: Annotated[bool | None, typer.Option("--compile/--no-compile", help="Use torch.compile.")] = None,
    cuda_graph: CudaGraph = None,
    deterministic: Deterministic = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help="name=value, of any field; repeat it.")] = None,
    tokenizer: GivenTokenizer = None,
    limit_mb: Annotated[float | None, typer.Option(help="Use at most this many megabytes of text.")] = None,
    samples: Annotated[int, typer.Option(help="Texts to sample from the best weights at the end.")] = 1,
    log_csv: Annotated[Path | None, typer.Option(parser=typed_path, help="Also write the numbers as CSV.")] = None,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Also write RUN/tensorboard.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Begin anew in a folder that holds a run.")] = False,
    presets: Annotated[bool, typer.Option("--list", help="List the presets and leave.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end.")] = False,
) -> None:
    """Train; the help text is HELP."""
    if presets:
        list_presets(as_json)
        return
    changes: dict[str, Any] = {
        "steps": steps, "batch_size": batch_size, "micro_batch": micro_batch, "context": context, "seed": seed,
        "learning_rate": learning_rate, "precision": precision, "impl": impl, "compile": compiled,
        "cuda_graph": cuda_graph, "deterministic": deterministic,
    }  # fmt: skip
    with told():
        _check_options(samples, log_csv)
        if resume is not None:
            given = {"CORPUS": corpus, "--preset": preset, "--out": out, "--tokenizer": tokenizer, **changes}
            given |= {"--set": settings, "--limit-mb": limit_mb, "--overwrite": overwrite or None}
            run, shards = _resumed(resume, given)
        else:
            name = preset or DEFAULT_PRESET
            plan = make_plan(name, corpus, out, changes, settings or [], tokenizer, limit_mb, overwrite)
            _check_device(device, plan)
            cuda_graph = plan.train.cuda_graph
            with _told_of_out():
                run, shards = open_or_make(plan, device)
        _look_into_folder(run, overwrite)
        with run.claimed(), _told_of_interrupts(run):
            trainer = _trained(run, shards, device, cuda_graph, log_csv, tensorboard)
            command = None if resume is not None else shlex.join(["fuselm", *sys.argv[1:]])
            # With --json, stdout is for the object alone.
            result = finish(trainer, samples, command, lambda text: typer.echo(text, err=as_json))
    if as_json:
        typer.echo(json.dumps(result))


def _check_options(samples: int, log_csv: Path | None) -> None:
    if samples < 0:
        raise ValueError(f"--samples is 0 or more; got {samples}.")
    if log_csv is not None and log_csv.is_dir():
        raise ValueError(f"--log-csv is a file; {log_csv} is a folder. Name a file in it.")


def _resumed(folder: Path, given: dict[str, Any]) -> tuple[Run, dict[str, Shard]]:
    from fuselm.checkpoint import open_run

    # Whether steps are a graph is a session's.
    if wrong := [name for name, value in given.items() if value is not None and name != "cuda_graph"]:
        names = ", ".join(name if name[0] in "-C" else f"--{name.replace('_', '-')}" for name in wrong)
        raise ValueError(f"--resume goes on with the config in the folder; got {names} as well. Leave that out.")
    run = open_run(folder)
    if run.train is None:
        raise ValueError(f"{folder} holds weights without a training config. Begin a new run.")
    return run, open_data(run)


def _look_into_folder(run: Run, overwrite: bool) -> None:
    """Refuse one without room, and tell of what was lost in it."""
    check_room(run)
    if not overwrite:
        _tell_of_a_lost_beginning(run)


def _tell_of_a_lost_beginning(run: Run) -> None:
    """A run that was killed before it saved has a log and nothing to go on from."""
    from fuselm.torchlm.log import LOG

    if not run.has_checkpoint and (run.folder / LOG).exists():
        typer.echo("from the beginning: the run in this folder was ended before it saved", err=True)


def _check_device(device: str, plan: Plan) -> None:
    """What the device cannot do is refused before the corpus is read."""
    from fuselm.ops import choose
    from fuselm.torchlm.graph import check_device
    from fuselm.torchlm.precision import pick_device, pick_precision

    found = pick_device(device)
    pick_precision(plan.train.precision, found)
    if plan.train.cuda_graph:
        check_device(found)
    model = plan.preset.model(256, **plan.model_changes)
    choose(model.impl, model.op_impl, device=str(found))


@contextmanager
def _told_of_out() -> Iterator[None]:
    """ "Use another folder": how, only the command line knows."""
    from fuselm.checkpoint import FolderError

    try:
        yield
    except FolderError as error:
        raise FolderError(f"{error} --out names the folder.") from error


@contextmanager
def _told_of_interrupts(run: Run) -> Iterator[None]:
    """Ctrl-C where nothing is saved first: while samples are drawn, or a second time while it trains."""
    try:
        yield
    except KeyboardInterrupt:
        saved = f"step {run.saved['last']} is the last that is saved" if run.has_checkpoint else "nothing was saved yet"
        typer.echo(f"interrupted: {saved}; go on with: {_resume_command(run)}", err=True)
        raise typer.Exit(130) from None


def _resume_command(run: Run) -> str:
    return f"fuselm train --resume {shlex.quote(str(run.folder))}"


def _trained(
    run: Run, shards: dict[str, Shard], device: str, cuda_graph: bool | None, log_csv: Path | None, tensorboard: bool
) -> Trainer:
    """Train to the end, with everything that listens; Ctrl-C saves and leaves."""
    import torch

    from fuselm import cost
    from fuselm.torchlm.log import LOG, CsvLines, JsonLines, TensorBoard
    from fuselm.torchlm.train import Interrupted, Trainer, TrainingFailed

    trainer = Trainer(run, shards, device=device, cuda_graph=cuda_graph)
    begun = trainer.progress.step
    typer.echo(_opening(trainer, cost.describe(run.model)), err=True)
    logs: list[Any] = []
    try:
        logs.append(JsonLines(run.folder / LOG, keep_until=begun))
        logs += [CsvLines(log_csv, run.folder / LOG)] if log_csv is not None else []
        logs += [TensorBoard(run.folder / "tensorboard", begun)] if tensorboard else []
        with shown(trainer.config.steps, begun) as (show, evaluating, stepped), _stopped_by_signals(trainer):
            trainer.listeners += [*logs, show]
            trainer.on_evaluation, trainer.on_step = evaluating, stepped
            trainer.train()
    except Interrupted:
        typer.echo(f"stopped at step {trainer.progress.step}; everything is saved", err=True)
        typer.echo(f"go on with: {_resume_command(run)}", err=True)
        raise typer.Exit(130) from None
    except TrainingFailed as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
    except torch.OutOfMemoryError:
        fewer = max(1, trainer.micro_batch // 2)
        typer.echo(
            f"error: {trainer.micro_batch} rows at once do not fit the GPU's memory. Begin again with --overwrite "
            f"--micro-batch {fewer}, or a divisor of {trainer.config.batch_size} below that.",
            err=True,
        )
        raise typer.Exit(1) from None
    finally:
        for log in logs:
            log.close()
    return trainer


def _opening(trainer: Trainer, description: str) -> str:
    config, step = trainer.config, trainer.progress.step
    where = str(trainer.device)
    if trainer.device.type == "cuda":
        import torch

        where = torch.cuda.get_device_name(trainer.device)
    held = ", the corpus in its memory" if trainer.feed.resident else ""
    parts = config.batch_size // trainer.micro_batch
    batch = f"{config.batch_size} rows of {trainer.run.model.context} tokens a step"
    batch += f", {trainer.micro_batch} at a time" if parts > 1 else ""
    begin = f"going on from step {step} of {config.steps}" if step else f"{config.steps} steps"
    begin = f"finished already at step {step} of {config.steps}" if trainer.finished else begin
    return f"{description}\n{where}{held}, {trainer.precision}; {begin}, {batch}"


@contextmanager
def _stopped_by_signals(trainer: Trainer) -> Iterator[None]:
    """The first SIGINT or SIGTERM asks the run to save and stop, a later one does not ask.

    What follows at once is the same wish: `timeout` signals a whole group of processes, and make hands it on.
    """
    asked: list[float] = []

    def handle(number: int, frame: Any) -> None:
        if not asked:
            asked.append(time.monotonic())
            trainer.stop()
            typer.echo("\nstopping after this step; once more to leave without saving", err=True)
        elif time.monotonic() - asked[0] > SAME_WISH_SECONDS:
            for name in previous:
                signal.signal(name, previous[name])
            signal.raise_signal(number)

    previous = {name: signal.getsignal(name) for name in (signal.SIGINT, signal.SIGTERM)}
    for name in previous:
        signal.signal(name, handle)
    try:
        yield
    finally:
        for name, handler in previous.items():
            if asked:  # a wish may be repeated while the process ends, where Python has no handlers any more
                atexit.register(signal.signal, name, signal.SIG_IGN)
            else:
                signal.signal(name, handler)
