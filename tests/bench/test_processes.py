"""Programs side by side: what comes back of each, how many there are at a time, and how time's end ends them."""

from __future__ import annotations

import math
import time

import pytest

from fuselm.bench.processes import Job, run_all


def shell(text: str, **environment: str) -> Job:
    return Job(["sh", "-c", text], environment)


def test_output_and_exit_code_of_each_come_back(capsys: pytest.CaptureFixture[str]) -> None:
    ended = run_all(
        {"good": shell("echo $WORD", WORD="here"), "bad": shell("echo no >&2; exit 3")}, math.inf, at_once=2
    )
    assert [(name, result.code, result.output) for name, result in ended.items()] == [
        ("good", 0, "here\n"),
        ("bad", 3, "no\n"),
    ]
    printed = capsys.readouterr().out
    assert "--- bad: exit code 3" in printed
    assert printed.count("here\n") == 1


def test_no_more_run_at_a_time_than_allowed(tmp_path) -> None:
    # Each leaves a mark while it runs, and says how many there are.
    job = shell(f"touch {tmp_path}/$$; ls {tmp_path} | wc -l; sleep 0.1; rm {tmp_path}/$$")
    ended = run_all({str(index): job for index in range(5)}, math.inf, at_once=2)
    assert max(int(result.output) for result in ended.values()) <= 2


def test_time_up_ends_what_runs_with_its_children_and_begins_nothing_more(tmp_path) -> None:
    slow = shell(f"echo begun; (sleep 1; touch {tmp_path}/outlived) & sleep 60")
    ended = run_all({"slow": slow, "next": shell("echo never")}, time.monotonic() + 0.4, at_once=1)
    assert (ended["slow"].in_time, ended["slow"].output) == (False, "begun\n")
    assert (ended["next"].in_time, ended["next"].code) == (False, -1)
    time.sleep(1.0)
    assert not (tmp_path / "outlived").exists()


def test_an_error_here_leaves_nothing_running(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("fuselm.bench.processes.time.sleep", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run_all({"slow": shell(f"sleep 0.7; touch {tmp_path}/outlived")}, math.inf, at_once=1)
    time.sleep(0.9)
    assert not (tmp_path / "outlived").exists()
