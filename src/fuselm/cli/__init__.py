"""The `fuselm` command: one file per verb, wired together here and nowhere else.

A verb's file is light to import (stdlib, typer, rich); what the verb needs it imports when it runs, so `fuselm --help`
answers at once and `fuselm doctor` works where torch does not.
"""

from __future__ import annotations

from typing import Annotated

import typer

from fuselm import __version__
from fuselm.cli import bench, build, data, doctor, plot, tokenizer, train

app = typer.Typer(
    name="fuselm",
    help="A small-language-model stack in Python on hand-written CUDA kernels.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fuselm {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


app.add_typer(bench.app, name="bench")
app.add_typer(data.app, name="data")
app.add_typer(tokenizer.app, name="tokenizer")
app.command(name="build", help=build.HELP)(build.build)
app.command(name="doctor", help=doctor.HELP)(doctor.doctor)
app.command(name="train", help=train.HELP)(train.train)
app.command(name="plot", help=plot.PLOT_HELP)(plot.plot)


def main() -> None:
    """Run the command line: the entry point of `fuselm` and `python -m fuselm`."""
    app(prog_name="fuselm")
