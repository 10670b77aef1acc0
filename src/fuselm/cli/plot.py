"""`fuselm plot`: the loss curves of one run or of several as a picture, and their best losses. Reads the command line.

fuselm plot runs/demo
fuselm plot runs/a runs/b --x tokens --out compare.png
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from fuselm.cli.bench_show import print_table
from fuselm.cli.errors import told
from fuselm.cli.paths import typed_path

PLOT_HELP = """Draw the loss curves of a run, or of several runs over one another, into a PNG.

The thin line is the training loss, the one with markers the validation loss; its best value is a star. A run alone also
gets its learning rate and its tokens/s. A run is a folder that fuselm train made; it may be under way.

Losses of runs with the same tokenizer and corpus can be compared; others cannot, since they are per token. Where
tokenizers differ, bits per byte are drawn, which can be compared on one corpus.

Examples:

  fuselm plot runs/demo

  fuselm plot runs/demo --x seconds --log-y --out demo.png

  fuselm plot runs/a runs/b --x tokens --out compare.png --json
"""


def plot(
    runs: Annotated[list[Path], typer.Argument(parser=typed_path, help="Folders of runs.", metavar="RUN")],
    out: Annotated[
        Path | None,
        typer.Option(parser=typed_path, help="PNG to write; needed for several runs.", show_default="RUN/curve.png"),
    ] = None,
    x: Annotated[str, typer.Option(help="What to draw over: step, tokens or seconds.")] = "step",
    log_y: Annotated[bool, typer.Option("--log-y", help="A logarithmic axis for the losses.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Draw; the help text is PLOT_HELP."""
    from fuselm.bench.curves import NATS, curve
    from fuselm.bench.run_report import CURVE, summary

    with told():
        if out is None and len(runs) > 1:
            raise ValueError(f"A picture of one run lies in its folder; got {len(runs)} runs. Say where with --out.")
        picture = runs[0] / CURVE if out is None else out
        unit = curve(runs, picture, x=x, log_y=log_y)
        found = [(str(run), summary(run)) for run in runs]
        if unit != NATS:
            typer.echo(f"warning: {_hint(unit)}", err=True)
    if as_json:
        facts = [{"run": run, **facts} for run, facts in found]
        typer.echo(json.dumps({"picture": str(picture), "unit": unit, "runs": facts}))
        return
    print_table("run|best validation loss|bits per byte|step|seconds", [_cells(run, facts) for run, facts in found])
    typer.echo(f"wrote {picture}")


def _hint(unit: str) -> str:
    from fuselm.bench.curves import BITS

    rule = "These runs have different tokenizers, so that losses per token cannot be compared"
    if unit == BITS:
        return f"{rule}: bits per byte are drawn."
    return f"{rule}, and not all of them say bits per byte. Draw those that have been evaluated."


def _cells(run: str, facts: dict[str, Any]) -> tuple[str, ...]:
    formats = (("best_loss", "{:.4f}"), ("bits_per_byte", "{:.4f}"), ("best_step", "{:,}"), ("seconds", "{:,.1f}"))
    return run, *("-" if facts[name] is None else words.format(facts[name]) for name, words in formats)
