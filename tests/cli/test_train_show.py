"""What a run that is not watched says of the time that is left."""

from __future__ import annotations

from typing import Any

import pytest

from fuselm.cli import train_show


def record(step: int, seconds: float, speed: float) -> dict[str, Any]:
    """Of a run of 100 tokens a step."""
    return {
        "kind": "step",
        "step": step,
        "seconds": seconds,
        "loss": 1.0,
        "tokens": 100 * step,
        "tokens_per_second": speed,
    }


def left(
    records: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> list[int]:
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr(train_show.time, "monotonic", lambda: next(clock))
    lines = train_show._Lines(1000)
    for one in records:
        lines(one)
    said = capsys.readouterr().err.splitlines()
    return [int(line.removesuffix(" s left").rpartition(" ")[2]) for line in said]


def test_a_resumed_run_is_as_fast_as_it_is_now(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slow_before = [record(100, 1000.0, 1000.0), record(200, 1010.0, 1000.0)]  # 0.1 s a step
    assert left(slow_before, monkeypatch, capsys) == [90, 80]


def test_a_run_whose_speed_changes_is_soon_as_fast_as_it_is_now(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = [record(step, float(step), 100.0) for step in range(10, 110, 10)]  # 1 s a step
    fast = [record(100 + step, 100.0 + step / 10, 1000.0) for step in range(100, 800, 100)]
    found = left([*slow, *fast], monkeypatch, capsys)
    assert found[len(slow) - 1] == 900
    assert found[-1] == 20


def test_steps_of_seconds_are_told_of_before_there_is_a_loss(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ten steps lie between two records, or 40 s; what is quick stays as quiet as it was."""
    now = [0.0]
    monkeypatch.setattr(train_show.time, "monotonic", lambda: now[0])
    lines = train_show._Lines(1000)
    for step in range(1, 6):
        now[0] += 4.0
        lines.stepped(step)
    now[0] += 0.1
    lines(record(5, 20.0, 25.0))
    for step in range(6, 106):
        now[0] += 0.04
        lines.stepped(step)
    said = capsys.readouterr().err.splitlines()
    assert said == [
        "step 2/1000: 4.0 s a step, 3992 s left",
        "step 4/1000: 4.0 s a step, 3984 s left",
        "step 5/1000: loss 1.000, 25 tok/s, 3980 s left",
    ]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\x1b[2Jb\x00\x07\x85c\x7f", "a\ufffd[2Jb\ufffd\ufffd\ufffdc\ufffd"),
        ("one\r\n\ttwo\rthree\n", "one\n  | \ttwo\ufffdthree"),
        (
            "Ein Häns\u00a0chen \u4e2d\ufffd \U0001f469\u200d\U0001f33e",
            "Ein Häns\u00a0chen \u4e2d\ufffd \U0001f469\u200d\U0001f33e",
        ),
    ],
)
def test_a_sample_is_shown_without_control_characters(text: str, shown: str) -> None:
    assert train_show.sentence({"kind": "sample", "step": 1, "text": text}) == f"  | {shown}"
