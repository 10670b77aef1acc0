"""Progress bars of the verbs, on stderr: a rate and an estimate on a terminal, a line with both now and then elsewhere.

with bar({"merges": "merges"}) as step:
    step("reading", 3_000_000, 10_000_000)      # stage, done, total (None: not known)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import typer

Step = Callable[[str, int, int | None], None]
SECONDS_BETWEEN_LINES = 5.0


@contextmanager
def bar(units: dict[str, str] | None = None, whole: Sequence[str] = ()) -> Iterator[Step]:
    """A bar for each stage. `units` names what is counted in a stage; bytes where it says nothing.

    Where all of the work is many stages, `whole`, in this order, one more bar is for all of it, and each goes when the
    next begins.
    """
    from rich.console import Console

    console = Console(stderr=True)
    if console.is_terminal:
        with _live(console, units or {}, whole) as step:
            yield step
    else:
        yield _lines(units or {}, whole)


def under(title: str, step: Step) -> Step:
    """The same bars, their stages named under a title."""
    return lambda stage, done, total: step(f"{title}: {stage}", done, total)


@contextmanager
def _live(console: object, units: dict[str, str], whole: Sequence[str]) -> Iterator[Step]:
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    text = TextColumn("{task.description}", markup=False)
    counts = TextColumn("{task.fields[counts]}", markup=False)
    with Progress(text, BarColumn(), counts, TimeRemainingColumn(), console=console, transient=True) as progress:  # type: ignore[arg-type]
        tasks: dict[str, TaskID] = {}
        clock = _Clock()
        everything = progress.add_task("all", total=len(whole), counts="", visible=bool(whole))

        def step(stage: str, done: int, total: int | None) -> None:
            if stage not in tasks:
                for before in tasks.values() if whole else ():
                    progress.update(before, visible=False)
                tasks[stage] = progress.add_task(stage, total=total, counts="")
            counts = _counts(done, total, units.get(stage, ""), clock.seconds(stage))
            progress.update(tasks[stage], completed=done, total=total, counts=counts)
            if stage in whole:
                place = whole.index(stage)
                share = done / total if total else 0.0
                progress.update(everything, completed=place + share, counts=f"{place + 1} of {len(whole)}")

        yield step


def _lines(units: dict[str, str], whole: Sequence[str]) -> Step:
    """For logs and pipes: work that takes seconds says nothing, longer work a line every few seconds."""
    clock = _Clock()
    told = [time.monotonic() - SECONDS_BETWEEN_LINES + 2]  # the first after two seconds

    def step(stage: str, done: int, total: int | None) -> None:
        seconds, left, now = clock.seconds(stage), clock.left(stage, done, total), time.monotonic()
        if now - told[0] >= SECONDS_BETWEEN_LINES:
            told[0] = now
            which = f" ({whole.index(stage) + 1} of {len(whole)})" if stage in whole else ""
            typer.echo(f"{stage}{which} {_counts(done, total, units.get(stage, ''), seconds)}{left}", err=True)

    return step


class _Clock:
    """How long a stage has taken. It begins when the one before it was last heard of, not with its own first word."""

    def __init__(self) -> None:
        self.begun: dict[str, float] = {}
        self.first: dict[str, tuple[int, float]] = {}
        self.heard = time.monotonic()

    def seconds(self, stage: str) -> float:
        begin = self.begun.setdefault(stage, self.heard)
        self.heard = time.monotonic()
        return self.heard - begin

    def left(self, stage: str, done: int, total: int | None) -> str:
        """An estimate by the speed since something was done: what comes before, as a compiler's work, comes once."""
        now = time.monotonic()
        first, since = self.first.setdefault(stage, (done, now)) if done else (0, now)
        if not total or not first < done < total:
            return ""
        return f", {(now - since) / (done - first) * (total - done):.0f} s left"


def _counts(done: int, total: int | None, unit: str, seconds: float) -> str:
    """12.0/100.0 MB, 35 MB/s."""
    rate = done / max(seconds, 1e-3)
    if unit:
        return f"{done:,}{f'/{total:,}' if total else ''} {unit}, {rate:,.0f}/s"
    whole = f"/{total / 1e6:.1f}" if total else ""
    return f"{done / 1e6:.1f}{whole} MB, {rate / 1e6:.0f} MB/s"
