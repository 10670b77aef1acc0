"""`fuselm bench`: measure what this machine does. Reads the command line, prints a table, writes files.

It knows how to ask and how to print; bench/kernels.py measures, bench/report.py and bench/plots.py write. What
measures the tokenizer and training is asked for in bench_tokenizer.py and bench_train.py.

    fuselm bench kernels --quick                       # a minute on a GPU, half of one on a CPU
    fuselm bench kernels --ops rms_norm --json | tail -1
    fuselm bench tokenizer --quick
    fuselm bench train --quick
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fuselm.cli.bench_show import check_folder, device_of, no_plots, print_table, progress
from fuselm.cli.bench_tokenizer import HELP as TOKENIZER_HELP
from fuselm.cli.bench_tokenizer import tokenizer
from fuselm.cli.bench_train import HELP as TRAIN_HELP
from fuselm.cli.bench_train import train
from fuselm.cli.paths import typed_path

if TYPE_CHECKING:
    from fuselm.bench.kernels import Plan
    from fuselm.bench.report import Results

LARGEST_RATIO = 100.0  # of two errors: a larger one says how small the formula's is, and little of the other
# The names of bench/peers.py, which imports torch: the help must not wait for that. A test holds them together.
IMPLS = ("fused", "torch", "compile", "liger", "quack", "matmuls")

app = typer.Typer(no_args_is_help=True, help="Measure kernels, tokenizer and training on this machine.")

KERNELS_HELP = """Time every op against its peers and against a copy of the same bytes.

For each op, case and pass: microseconds on the device (L2-cold, median), microseconds of host time for a call, the
share of a plain copy's speed that the op reaches (100 % is the ceiling of an op that is bound by memory), and the error
against float64 as a multiple of that of the op's plain formula; both errors where that is hundreds of times smaller. On
a GPU also latencies of decode-sized calls.

Files: rows.csv, rows.json, roofline.png and, on a GPU, decode.png. On a CPU the same ops run in plain torch on fewer
rows: that shows that everything works, and says nothing about the kernels.

Examples:

  fuselm bench kernels --quick

  fuselm bench kernels --ops rms_norm --impl fused,torch --filter residual

  fuselm bench kernels --json --out runs/h200 | tail -1
"""


@app.callback()
def _group() -> None:
    pass


@app.command(help=KERNELS_HELP)
def kernels(
    ops: Annotated[str, typer.Option(help="Ops to measure, separated by commas. Default: all.")] = "",
    quick: Annotated[bool, typer.Option("--quick", help="One case of each kind instead of all.")] = False,
    device: Annotated[str, typer.Option(help="auto (a GPU if there is one), cpu or cuda.")] = "auto",
    label: Annotated[str, typer.Option(help="What to call this machine in rows and plots. Default: its name.")] = "",
    out: Annotated[
        Path, typer.Option(parser=typed_path, help="Folder to write into; made when it is not there.")
    ] = Path("results"),
    impl: Annotated[
        str,
        typer.Option(help=f"Which of {', '.join(IMPLS)}. Default: all on a GPU, {', '.join(IMPLS[:2])} on a CPU."),
    ] = "",
    containing: Annotated[
        str,
        typer.Option("--filter", help='Only cases whose label, such as "rms_norm plain 32768x768" (on a GPU), has it.'),
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Time every op; the help text is KERNELS_HELP."""
    from fuselm.bench.kernels import DeviceLost, run, steps
    from fuselm.bench.report import Results

    plan = _plan(ops, quick, device, label, impl, containing)
    check_folder(out)
    if plan.device == "cpu":
        typer.echo(
            "CPU figures: plain torch on fewer rows and smaller heads. They say nothing about the CUDA kernels.",
            err=True,
        )
    results, ending = Results(), ""
    try:
        with progress(steps(plan)) as on_step:
            run(plan, results, on_step)
    except KeyboardInterrupt:
        ending = "interrupted: what was measured until then is kept"
    except DeviceLost as error:
        ending = str(error)
    written = _write(out, plan, results)
    _print(plan, results, written, ending, as_json)
    broken = [note for note in results.notes if note["impl"] == "fused"]
    raise typer.Exit(130 if ending.startswith("interrupted") else 1 if ending or broken else 0)


app.command(name="tokenizer", help=TOKENIZER_HELP)(tokenizer)
app.command(name="train", help=TRAIN_HELP)(train)


# --- what was asked for ----------------------------------------------------------------------------------------------


def _plan(ops: str, quick: bool, device: str, label: str, impl: str, containing: str) -> Plan:
    from fuselm.bench.kernels import Plan, case_label
    from fuselm.bench.peers import NAMES
    from fuselm.kernels import spec

    known = spec.ops()
    chosen = _choose(ops, tuple(known), "op", "--ops")
    place = device_of(device)
    impls = _choose(impl, NAMES, "implementation", "--impl") if impl else (NAMES if place == "cuda" else NAMES[:2])
    plan = Plan(chosen, place, impls, quick, containing, label=label)
    if not any(plan.cases(known[name]) for name in chosen):
        everything = Plan(chosen, place, impls, quick)
        labels = [case_label(name, case) for name in chosen for case in everything.cases(known[name])]
        listed = "; ".join(labels)
        raise typer.BadParameter(f"no label has {containing!r} in it; there are: {listed}", param_hint="--filter")
    return plan


def _choose(text: str, known: tuple[str, ...], what: str, option: str) -> tuple[str, ...]:
    names = [name for name in text.replace(",", " ").split() if name]
    for name in names:
        if name not in known:
            raise typer.BadParameter(f"there is no {what} {name!r}; there are: {', '.join(known)}", param_hint=option)
    return tuple(name for name in known if name in names) if names else known


# --- what is shown ---------------------------------------------------------------------------------------------------


def _write(out: Path, plan: Plan, results: Results) -> list[Path]:
    from fuselm.bench import machine
    from fuselm.bench.report import write_rows

    header = {"label": plan.label, "device": plan.device, **machine.describe(plan.device)}
    written = write_rows(out, header, results)
    try:
        from fuselm.bench import plots

        name = plan.label or header["gpu"] or f"CPU ({header['cpu']})"
        if results.rows:
            plots.roofline(results.rows, out / "roofline.png", name)
            written.append(out / "roofline.png")
        if results.decode:
            plots.decode(results.decode, out / "decode.png", name)
            written.append(out / "decode.png")
    except ImportError:
        no_plots()
    return written


def _print(plan: Plan, results: Results, written: list[Path], ending: str, as_json: bool) -> None:
    if as_json:
        files = [str(path) for path in written]
        document = {"device": plan.device, "ending": ending, **results.tables(), "files": files}
        typer.echo(json.dumps(document))
        return
    _print_tables(results)
    for note in results.notes:
        words = " ".join(str(note[key]) for key in ("op", "pass", "case", "impl") if note.get(key))
        typer.echo(f"not measured: {words} {note['shape']}: {note['note']}", err=True)
    if plan.device == "cpu":
        typer.echo("These are CPU figures; run on a GPU for the kernels.")
    typer.echo(f"wrote {', '.join(map(str, written))}")
    if ending:
        typer.echo(ending, err=True)


def _print_tables(results: Results) -> None:
    rows = [
        (*_names(row), row["pass"], row["impl"], f"{row['gpu_us']:.1f}", f"{100 * row['share_of_copy']:.0f} %",
         f"{row['tbytes_per_s']:.2f}", f"{row['call_us']:.1f}", _error_ratio(row))
        for row in results.rows
    ]  # fmt: skip
    print_table("op|case|shape|dtype|pass|impl|µs|of copy|TB/s|call µs|error / formula's", rows)
    decode = [
        (*_names(row), row["impl"], *(f"{row[key]:.2f}" for key in ("p50_us", "p95_us", "p99_us", "empty_us")),
         f"{row['sync_p50_us']:.1f}", f"{row['rows_per_s']:.3g}")
        for row in results.decode
    ]  # fmt: skip
    print_table("op|case|shape|dtype|impl|p50 µs|p95|p99|empty|with a wait|rows/s", decode)
    host = [(*_names(row), row["impl"], f"{row['call_us']:.1f}", f"{row['call_grad_us']:.1f}") for row in results.host]
    print_table("op|case|shape|dtype|impl|host µs per call|with grad", host)


def _names(row: dict[str, Any]) -> tuple[str, str, str, str]:
    from fuselm.bench.report import shape_text

    return row["op"], row["case"], shape_text(row["shape"]), row["dtype"]


def _error_ratio(row: dict[str, Any]) -> str:
    """The ratio; both errors where the formula's is next to nothing, as of a loss in fp32 beside one in bf16."""
    error, reference = row["rms_error"], row["reference_rms_error"]
    if error is None or reference is None:
        return "-"
    if not error:
        return "exact"
    if not reference or error > LARGEST_RATIO * reference:
        return f"{error:.1e} / {reference:.1e}" if reference else f"{error:.1e} / 0"
    return f"{error / reference:.3g}"
