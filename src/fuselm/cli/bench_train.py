"""`fuselm bench train`: reads the command line, prints a table, writes files. bench/learning.py measures.

fuselm bench train --quick
fuselm bench train --presets gpt-124m --learners fused,fused-graph --steps 200 --json | tail -1
"""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fuselm.cli.bench_show import check_folder, device_of, no_plots, print_table
from fuselm.cli.errors import told
from fuselm.cli.paths import typed_corpus, typed_path
from fuselm.cli.progress import bar

if TYPE_CHECKING:
    from fuselm.bench.learning import Plan, Results

HELP = """Train one model in several ways, with the same data and seed: do they learn alike, how fast, in what memory?

By torch's ops and by fuselm's, eager, deterministic, as a CUDA graph and under torch.compile; of gpt-124m and
tinystories also a plain PyTorch model; of moe-60m, in fp16, with norms by PyTorch, Liger and fuselm and all else by
torch. Each in a process of its own. Curves agree when they are no farther apart than three times what a rounding error
in the first weights makes of one and the same run, which is measured too and counts as eight units in the last place
of an fp32 loss at least: the table has the limit.

Files: rows.csv, curves.csv, rows.json, with --profile kernels.csv, and a picture for each preset. On a CPU small models
of the same kinds are trained (two layers of 64, rows of 32 tokens), by torch's ops and fuselm's alone, unless
--learners says otherwise: that shows that everything works, and says nothing about the kernels. The exit code is 1 when
a learner fails, or the curve of one of fuselm's differs or cannot be judged.

Examples:

  fuselm bench train --quick

  fuselm bench train --presets naive-char --steps 1000 --out runs/compare

  fuselm bench train --presets gpt-124m --learners fused,fused-graph --corpus book.txt --json | tail -1
"""

# What bench/learning.py takes when nothing is said: the help must not wait for that. A test holds them together.
USUAL, USUAL_MB = "naive-char,gpt-124m,moe-60m", "8"


def train(
    presets: Annotated[
        str, typer.Option(help="Which models, separated by commas; `fuselm train --list` has all.", show_default=USUAL)
    ] = "",
    learners: Annotated[
        str,
        typer.Option(
            help="Which ways to train; a wrong name lists them. torch and nudged, which verdicts need, always run."
        ),
    ] = "",
    steps: Annotated[
        int | None, typer.Option(help="Steps of each.", min=20, show_default="500, of small models 100")
    ] = None,
    precision: Annotated[
        str, typer.Option(help="auto, fp32, bf16 or fp16. Default: auto, of moe-60m on a GPU fp16.")
    ] = "",
    corpus: Annotated[str, typer.Option(parser=typed_corpus, help="Name or path of what is learnt.")] = "stories",
    limit_mb: Annotated[
        float | None, typer.Option(help="Use at most this many megabytes of text.", show_default=USUAL_MB)
    ] = None,
    seed: Annotated[int, typer.Option(help="Of weights, order and dropout.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="Small models of the same kinds; on a CPU always.")] = False,
    profile: Annotated[
        bool, typer.Option("--profile", help="Also say where a step's time goes, kernel by kernel.")
    ] = False,
    device: Annotated[str, typer.Option(help="auto (a GPU if there is one), cpu or cuda.")] = "auto",
    label: Annotated[str, typer.Option(help="What to call this machine in files and pictures.")] = "",
    out: Annotated[
        Path, typer.Option(parser=typed_path, help="Folder to write into; an older comparison there is replaced.")
    ] = Path("results/train"),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Compare; the help text is HELP."""
    from fuselm.bench.learning import CORPUS_MB, PRESETS, SMALL_STEPS, STEPS, Plan, Results, fused_disagrees

    place = device_of(device)
    small = quick or place == "cpu"
    length = (SMALL_STEPS if small else STEPS) if steps is None else steps
    with told():
        plan = Plan(
            _names(presets) if presets else PRESETS, place, length, _names(learners), _precision(precision, place),
            corpus, CORPUS_MB if limit_mb is None else limit_mb, seed, small, profile, label,
        )  # fmt: skip
        _check_corpus(plan)
    check_folder(out)
    if small:
        typer.echo("small models of the same kinds: their figures say nothing about the large ones", err=True)
    if place == "cpu":
        typer.echo("on a CPU fuselm's ops are plain formulas: their speed says nothing about the kernels'", err=True)
    results = Results()
    with told(), _terminated_as_interrupted():
        ending = _measure(out, plan, results)
        written = _write(out, plan, results) + _draw(out, plan, results)
        _print(plan, results, written, ending, as_json)
    bad = bool(results.notes) or fused_disagrees(results.rows)
    raise typer.Exit(130 if ending else int(bad))


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM ends the command as Ctrl-C does, with no process and no folder left behind; a second one is not heard."""

    def handle(number: int, frame: Any) -> None:
        signal.signal(number, signal.SIG_IGN)  # `timeout` and make repeat it while files are written
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _measure(out: Path, plan: Plan, results: Results) -> str:
    """Train, and keep each row as it comes; what is to be said of an early end, or nothing."""
    from fuselm.bench.learning import run

    try:
        with _scratch(out) as scratch, bar(_units(plan), _stages(plan)) as step:
            run(plan, scratch, results, step, keep=lambda: _write(out, plan, results))
    except KeyboardInterrupt:
        kept = "what was measured until then is kept" if results.rows else "before there was anything to keep"
        return f"interrupted: {kept}"
    return ""


@contextmanager
def _scratch(out: Path) -> Iterator[Path]:
    """A folder for tokens and runs; what killed processes have left of theirs goes first."""
    from fuselm.files import partial_path, sweep

    sweep(out / "bench")
    folder = partial_path(out / "bench")
    try:
        folder.mkdir()
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(text.replace(",", " ").split()))


def _precision(name: str, place: str) -> str:
    import torch

    from fuselm.torchlm.precision import DTYPES, pick_precision

    if name and name not in ("auto", *DTYPES):
        raise ValueError(f"--precision is auto, {', '.join(DTYPES)}; got {name!r}.")
    if name:
        pick_precision(name, torch.device(place))
    return name


def _check_corpus(plan: Plan) -> None:
    """A wrong name is refused before anything is made."""
    from fuselm.data.corpora import open_corpus
    from fuselm.data.readers import MANIFEST

    if (Path(plan.corpus) / MANIFEST).is_file():
        raise ValueError(
            f"--corpus is text, since each preset has tokens of its own; {plan.corpus} has tokens. Name the text that "
            "they were made of."
        )
    open_corpus(plan.corpus, limit_bytes=int(plan.corpus_mb * 1e6))


def _stages(plan: Plan) -> list[str]:
    from fuselm.bench.learning import stage

    return [stage(name, learner) for name in plan.presets for learner in plan.learners_of(name)]


def _units(plan: Plan) -> dict[str, str]:
    return dict.fromkeys(_stages(plan), "steps") | {f"{name} tokenizer merge": "merges" for name in plan.presets}


# --- what is shown ---------------------------------------------------------------------------------------------------


def _write(out: Path, plan: Plan, results: Results) -> list[Path]:
    """The figures so far, and why there are no others; nothing is written over while there is neither."""
    from fuselm.bench.learning import judged
    from fuselm.bench.learning_report import write

    if not results.rows and not results.notes:
        return []
    results.rows = judged(results.rows)
    return write(out, _header(plan), results.rows, results.notes)


def _header(plan: Plan) -> dict[str, Any]:
    from fuselm.bench import machine

    facts = {"corpus": plan.corpus, "seed": plan.seed, "small": plan.small}
    return {"label": plan.label, "device": plan.device, **machine.describe(plan.device), **facts}


def _draw(out: Path, plan: Plan, results: Results) -> list[Path]:
    from fuselm.bench import machine
    from fuselm.bench.learning_report import pictures

    name = machine.gpu_name() if plan.device == "cuda" else f"CPU ({machine.cpu_name()})"
    try:
        return pictures(out, results.rows, f"{'a small model, ' * plan.small}{plan.label or name}")
    except ImportError:
        no_plots()
        return []


def _print(plan: Plan, results: Results, written: list[Path], ending: str, as_json: bool) -> None:
    from fuselm.bench.learning_report import as_rows, kernel_rows

    for note in results.notes:
        typer.echo(f"not trained: {note['preset']} {note['learner']}: {note['note']}", err=True)
    if results.notes:
        typer.echo("rows.json has the end of what they said", err=True)
    for row in results.rows:
        if "not_profiled" in row:
            typer.echo(f"not profiled: {row['preset']} {row['learner']}: {row['not_profiled']}", err=True)
    if as_json:
        files = [str(path) for path in written]
        document = {**_header(plan), "ending": ending, "rows": as_rows(results.rows), "notes": results.notes}
        typer.echo(json.dumps({**document, "kernels": kernel_rows(results.rows), "files": files}))
        return
    for name in dict.fromkeys(row["preset"] for row in results.rows):
        _print_preset(name, [row for row in results.rows if row["preset"] == name], plan.small)
    if results.rows:
        typer.echo("×: tokens/s over those of torch; that of nudged, which is the same code, says how exact that is.")
        typer.echo(
            "apart: the running mean of the loss from that of torch, rms over the steps; a curve agrees up to limit."
        )
    typer.echo(f"wrote {', '.join(map(str, written)) or 'nothing: no learner came to its end'}")
    if ending:
        typer.echo(ending, err=True)


def _print_preset(name: str, rows: list[dict[str, Any]], small: bool) -> None:
    typer.echo(f"{'small ' * small}{name}, {rows[0]['precision']}")
    with_mfu = any(row["mfu"] is not None for row in rows)
    header = f"learner|tokens/s|×|step ms|first s|GiB|{'MFU|' * with_mfu}apart|limit|curve"
    print_table(header, [_cells(row, rows, with_mfu) for row in rows], only_first_wraps=True)
    profiled = [_kinds(row) for row in rows if "profile" in row]
    print_table("learner|ms of a step, by kind of work|in none", profiled)


def _cells(row: dict[str, Any], rows: list[dict[str, Any]], with_mfu: bool) -> tuple[str, ...]:
    from fuselm.bench.learning import APART, BASE
    from fuselm.bench.learning_report import verdict

    base = next((one for one in rows if one["learner"] == BASE), None)
    times = "" if base is None else f"{row['tokens_per_second'] / base['tokens_per_second']:.2f}"
    share = ("" if row["mfu"] is None else f"{row['mfu']:.1%}",) if with_mfu else ()
    return (
        row["learner"],
        f"{row['tokens_per_second']:,}",
        times,
        f"{row['step_ms']:.2f}",
        f"{row['first_step_s']:.1f}",
        f"{row['peak_memory_gib']:.2f}",
        *share,
        "" if row["gap"] is None else f"{row['gap']:.1e}",
        "" if row["agrees"] is None else f"{APART * row['noise']:.1e}",
        verdict(row),
    )


def _kinds(row: dict[str, Any]) -> tuple[str, ...]:
    from fuselm.bench.step_profile import REST, by_kind

    found = by_kind(row["profile"])
    kinds, idle = [one for one in found if one["kind"] != REST["gap_ms"]], row["profile"]["gap_ms"]
    return row["learner"], ", ".join(f"{kind['kind']} {kind['ms']:.3g}" for kind in kinds), f"{idle:.3g}"
