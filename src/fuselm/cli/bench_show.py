"""What the bench verbs do alike: choose where to write, show progress, print tables. Knows no measurement."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import typer


def check_folder(out: Path) -> None:
    """Refuse before an hour of measuring, not after it."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        words = f"cannot write into {out}: {error.strerror}; name a folder"
        raise typer.BadParameter(words, param_hint="--out") from None


def device_of(wanted: str) -> str:
    """cuda or cpu; a GPU that is not there is refused."""
    import torch

    there = torch.cuda.is_available()
    if wanted not in ("auto", "cpu", "cuda"):
        raise typer.BadParameter(f"a device is auto, cpu or cuda; got {wanted!r}", param_hint="--device")
    if wanted == "cuda" and not there:
        raise typer.BadParameter(
            "torch sees no GPU here: `fuselm doctor` says why, --device cpu needs none", param_hint="--device"
        )
    return "cuda" if there and wanted != "cpu" else "cpu"


@contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """A bar with an estimate on a terminal, a line for each step elsewhere; on stderr, out of the way of --json."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text: typer.echo(text, err=True)
        return
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=total)
        started = [False]

        def on_step(text: str) -> None:
            bar.update(task, description=text, advance=1 if started[0] else 0)
            started[0] = True

        yield on_step


def print_table(header: str, rows: Sequence[tuple[str, ...]], *, only_first_wraps: bool = False) -> None:
    """A table whose header is written as a|b|c; nothing when there are no rows."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    if not rows:
        return
    console = Console()
    if not console.is_terminal:
        console = Console(width=140)  # a pipe has no width of its own, and a wrapped table cannot be read
    table = Table(box=None, pad_edge=False)
    for index, title in enumerate(header.split("|")):
        table.add_column(title, no_wrap=only_first_wraps and index > 0)
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table)
    console.print()


def no_plots() -> None:
    """Say why there is no picture."""
    typer.echo("no plots: matplotlib is not installed. Install fuselm[bench] for them.", err=True)
