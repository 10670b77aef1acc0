"""What `fuselm train` shows while it runs, on stderr: a bar with loss, speed and time left; a line for what happens.

On a terminal the bar stays at the bottom and lines pass above it; in a log there is a line every few seconds instead.
"""

from __future__ import annotations

import time
import unicodedata
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import typer

SECONDS_BETWEEN_LINES = 5.0
LINES_OF_A_SPEED = 6  # so many lines back the time that is left is reckoned from
Listener = Callable[[Mapping[str, Any]], None]


@contextmanager
def shown(steps: int, first: int) -> Iterator[tuple[Listener, Callable[[int, int], None], Callable[[int], None]]]:
    """Listeners for the records of a run of so many steps, for evaluations under way, and for each step."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        lines = _Lines(steps)
        yield lines, lambda done, total: None, lines.stepped
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None),
        TextColumn("{task.completed}/{task.total}"),
        TextColumn("{task.fields[facts]}", markup=False),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("training", total=steps, completed=first, facts="")

        def listen(record: Mapping[str, Any]) -> None:
            if record["kind"] == "step":
                progress.update(task, completed=record["step"], description="training", facts=facts(record))
            if line := sentence(record):
                console.print(line, markup=False, highlight=False)

        def evaluating(done: int, total: int) -> None:
            progress.update(task, description=f"evaluating {100 * done // total} %")

        yield listen, evaluating, lambda step: progress.update(task, completed=step)


class _Lines:
    """For logs and pipes."""

    def __init__(self, steps: int) -> None:
        self.steps, self.told = steps, time.monotonic() - SECONDS_BETWEEN_LINES
        self.before: deque[tuple[int, float]] = deque(maxlen=LINES_OF_A_SPEED)  # step and seconds of lines so far
        self.begun: tuple[int, float] | None = None  # the first step that was heard of, and when
        self.was_bare = False  # whether the last line had no loss: then one with it need not wait

    def stepped(self, step: int) -> None:
        """A line without a loss, where records are far between: steps of seconds are told of too."""
        now = time.monotonic()
        self.begun = self.begun or (step, now)
        first, begin = self.begun
        if step > first and now - self.told >= SECONDS_BETWEEN_LINES:
            self.told, self.was_bare = now, True
            seconds = (now - begin) / (step - first)
            left = (self.steps - step) * seconds
            typer.echo(f"step {step}/{self.steps}: {seconds:.1f} s a step, {left:.0f} s left", err=True)

    def __call__(self, record: Mapping[str, Any]) -> None:
        now = time.monotonic()
        if record["kind"] == "step" and (self.was_bare or now - self.told >= SECONDS_BETWEEN_LINES):
            self.told, self.was_bare = now, False
            left = (self.steps - record["step"]) * self._seconds_per_step(record)
            typer.echo(f"step {record['step']}/{self.steps}: {facts(record)}, {left:.0f} s left", err=True)
        if line := sentence(record):
            typer.echo(line, err=True)

    def _seconds_per_step(self, record: Mapping[str, Any]) -> float:
        """Of late: a run that was resumed, or has its cores to itself again, is as fast as it is now."""
        step, seconds = record["step"], record["seconds"]
        self.before.append((step, seconds))
        first, begin = self.before[0]
        if step > first:
            return float(seconds - begin) / (step - first)
        return float(record["tokens"] / max(1, step) / max(record["tokens_per_second"], 1e-9))


def facts(record: Mapping[str, Any]) -> str:
    """loss 1.234, 9,120 tok/s, MFU 41 %."""
    loss = "loss none" if record["loss"] is None else f"loss {record['loss']:.3f}"
    share = f", MFU {100 * record['mfu']:.0f} %" if record.get("mfu") else ""
    return f"{loss}, {record['tokens_per_second']:,.0f} tok/s{share}"


def sentence(record: Mapping[str, Any]) -> str | None:
    """What is worth a line of its own."""
    step = record["step"]
    if record["kind"] == "eval":
        bits = "" if record["bits_per_byte"] is None else f", {record['bits_per_byte']:.3f} bits per byte"
        best = ", the best so far" if record["best"] else ""
        return f"step {step}: validation loss {record['loss']:.4f}{bits}{best}"
    if record["kind"] == "sample":
        return "  | " + printable(record["text"]).strip().replace("\n", "\n  | ")
    if record["kind"] == "skip":
        return f"step {step} was not made: {record['reason']}"
    return None


def printable(text: str) -> str:
    """A sampled text as a terminal can take it.

    A model draws any byte in its first steps, and what moves a cursor or rings a bell is no text; it is shown as bytes
    that make no character are.
    """
    lines = text.replace("\r\n", "\n")
    return "".join("\ufffd" if unicodedata.category(c) == "Cc" and c not in "\n\t" else c for c in lines)
