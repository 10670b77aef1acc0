"""Progress of the verbs: what a terminal of 80 columns shows, and what a pipe gets."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import rich.progress
from rich.console import Console
from rich.progress import Progress

from fuselm.bench.learning import stage
from fuselm.cli import progress

STAGES = stage("gpt-124m", "plain-cudnn"), stage("tinystories", "fused-deterministic")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A time that passes when a test says so."""
    now = [100.0]
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """What is on a terminal of some width after these steps."""
    made: list[Progress] = []

    class Kept(Progress):
        def __init__(self, *columns: Any, **more: Any) -> None:
            super().__init__(*columns, **more)
            made.append(self)

    monkeypatch.setattr(rich.progress, "Progress", Kept)

    def shown(width: int, *steps: tuple[str, int, int], whole: tuple[str, ...] = STAGES) -> list[str]:
        console = Console(file=io.StringIO(), width=width, color_system=None)
        with progress._live(console, dict.fromkeys(STAGES, "steps"), whole) as step:
            for one in steps:
                step(*one)
            with console.capture() as text:
                console.print(made[0].get_renderable())
        return [line.rstrip() for line in text.get().splitlines() if line.strip()]

    return shown


@pytest.mark.parametrize("width", [80, 200])
def test_a_narrow_terminal_shows_name_bar_counts_and_time_of_this_and_of_all(
    width: int, screen: Callable[..., list[str]]
) -> None:
    steps = [(STAGES[0], 500, 500), (STAGES[1], 0, 500), (STAGES[1], 250, 500)]
    every, this = screen(width, *steps)
    assert re.fullmatch(r"all +━+\S* +2 of 2 +(\d:\d\d:\d\d|-:--:--)", every)
    assert re.fullmatch(r"tinystories fused-deterministic +━+\S* +250/500 steps, [\d,]+/s +\S+", this)
    assert len(every) <= width


def test_without_a_whole_every_stage_stays(screen: Callable[..., list[str]]) -> None:
    assert len(screen(80, (STAGES[0], 500, 500), (STAGES[1], 1, 500), whole=())) == 2


def test_a_pipe_hears_which_of_how_many_and_how_long_it_takes(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    with progress.bar(dict.fromkeys(STAGES, "steps"), STAGES) as step:
        step(STAGES[0], 0, 500)
        for done in (10, 110, 500):  # a minute until the first ten, and 10 steps a second from then on
            clock[0] += 60 if done == 10 else 10 if done == 110 else 39
            step(STAGES[0], done, 500)
        clock[0] += 6
        step("gpt-124m tokens train", 3_000_000, None)
    assert capsys.readouterr().err.splitlines() == [
        "gpt-124m plain-cudnn (1 of 2) 10/500 steps, 0/s",
        "gpt-124m plain-cudnn (1 of 2) 110/500 steps, 2/s, 39 s left",
        "gpt-124m plain-cudnn (1 of 2) 500/500 steps, 5/s",
        "gpt-124m tokens train 3.0 MB, 0 MB/s",
    ]
