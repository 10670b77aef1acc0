"""The tests of a record: a process for each op, how outcomes are counted, and what an ended process has told."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fuselm.bench import gpu_tests
from fuselm.bench.processes import Ended, Job

FINE, FAILED = Ended(0, "", 1.0, True), Ended(1, "", 1.0, True)


def line(test: str, outcome: str, **more: str) -> dict[str, str]:
    return {"test": test, "outcome": outcome, **more}


def counted(lines: list[dict[str, str]], ended: Ended = FAILED) -> tuple[dict[str, int], list[str]]:
    found = gpu_tests.count(lines, "softmax", ended)
    return found["ops"]["softmax"], found["failures"].get("softmax", [])


def test_outcomes_are_counted_and_failures_named() -> None:
    lines = [line("a", "begun"), line("a", "passed"), line("b", "begun"), line("b", "failed"), line("c", "passed")]
    assert counted(lines) == ({"passed": 2, "failed": 1, "skipped": 0}, ["b"])
    assert counted([], FINE) == ({"passed": 0, "failed": 0, "skipped": 0}, [])


def test_a_gpu_test_that_saw_no_gpu_is_a_failure_with_its_reason() -> None:
    lines = [
        line("a", "skipped", reason=gpu_tests.ONE_GPU),
        line("b", "skipped", reason="JAX sees no gpu"),
        line("c", "skipped", reason="no reason"),
    ]
    failures = ["b (skipped: JAX sees no gpu)", "c (skipped: no reason)"]
    assert counted(lines) == ({"passed": 0, "failed": 2, "skipped": 1}, failures)


def test_a_test_that_fails_at_its_end_is_counted_once_and_as_failed() -> None:
    lines = [line("a", "passed"), line("a", "failed"), line("b", "failed"), line("b", "passed")]
    assert counted(lines) == ({"passed": 0, "failed": 2, "skipped": 0}, ["a", "b"])


@pytest.mark.parametrize(
    ("ended", "says"),
    [(Ended(-9, "", 1.0, False), "it took too long"), (Ended(139, "", 1.0, True), "exit code 139")],
)
def test_a_process_that_did_not_end_has_told_what_it_found_and_where_it_was(ended: Ended, says: str) -> None:
    lines = [line("a", "begun"), line("a", "passed"), line("b", "begun")]
    sentence = f"pytest of softmax did not come to its end ({says})"
    assert counted(lines, ended) == ({"passed": 1, "failed": 1, "skipped": 0}, [f"{sentence} in b"])
    assert counted(lines[:2], ended)[1] == [sentence]
    assert counted([], ended) == ({"passed": 0, "failed": 1, "skipped": 0}, [sentence])


def test_counts_of_an_op_are_replaced_and_others_kept() -> None:
    def of(op: str, passed: int, failed: int) -> dict[str, Any]:
        lines = [line(f"p{i}", "passed") for i in range(passed)] + [line(f"f{i}", "failed") for i in range(failed)]
        return gpu_tests.count(lines, op, FAILED)

    both = gpu_tests.together([of("softmax", 3, 1), of("rope", 5, 2)])
    assert [both[which] for which in gpu_tests.COUNTS] == [8, 3, 0]
    again = gpu_tests.together([both, of("rope", 7, 0)])
    assert [again[which] for which in gpu_tests.COUNTS] == [10, 1, 0]
    assert again["failures"] == {"softmax": ["f0"]}
    assert gpu_tests.together([]) == {"passed": 0, "failed": 0, "skipped": 0, "ops": {}, "failures": {}}


def pretend(monkeypatch: pytest.MonkeyPatch, end: Callable[[str, Path], Ended]) -> tuple[dict[str, Job], list[int]]:
    """Let `end` write outcomes and say how each process would have ended; returns those that were to be run."""
    seen: dict[str, Job] = {}
    at_a_time: list[int] = []

    def run_all(jobs: dict[str, Job], deadline: float, at_once: int) -> dict[str, Ended]:
        seen.update(jobs)
        at_a_time.append(at_once)
        return {name: end(name, Path(option(job, "--outcomes"))) for name, job in jobs.items()}

    monkeypatch.setattr(gpu_tests, "run_all", run_all)
    return seen, at_a_time


def option(job: Job, name: str) -> str:
    return next(word.partition("=")[2] for word in job.command if word.startswith(f"{name}="))


def test_each_op_has_a_process_and_those_of_none_have_some(monkeypatch: pytest.MonkeyPatch) -> None:
    def end(name: str, told: Path) -> Ended:
        outcome = "failed" if name == "- tests/bench" else "passed"
        told.write_text(json.dumps(line(f"test_x[{name}]", outcome)) + "\n" + '{"test": "cut of')
        return FINE

    jobs, at_a_time = pretend(monkeypatch, end)
    of_none = ["- tests", *(f"- {folder}" for folder in gpu_tests.FOLDERS)]
    monkeypatch.setattr(gpu_tests.os, "cpu_count", lambda: 2)
    found = gpu_tests.run(["softmax", "rope", "-"], math.inf)
    assert list(jobs) == [*of_none, "softmax tests", "rope tests"]
    assert [f"{option(job, '--of-op')} {job.command[-1]}" for job in jobs.values()] == list(jobs)
    ignored = [word.partition("=")[2] for word in jobs["- tests"].command if word.startswith("--ignore=")]
    assert ignored == list(gpu_tests.FOLDERS)
    assert not any("ignore" in word for name, job in jobs.items() if name != "- tests" for word in job.command)
    assert at_a_time == [2]
    assert {op: counts["passed"] for op, counts in found["ops"].items()} == {"-": 3, "softmax": 1, "rope": 1}
    assert (found["failed"], found["failures"]) == (1, {"-": ["test_x[- tests/bench]"]})
    assert gpu_tests.run([], math.inf)["ops"] == {}


def test_the_folders_of_tests_that_have_a_process_are_there() -> None:
    root = Path(__file__).resolve().parents[2]
    assert all((root / folder).is_dir() for folder in (gpu_tests.ROOT, *gpu_tests.FOLDERS))


def test_what_never_began_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    never = Ended(-1, "was not run: the time of this part was used up\n", 0.0, False)
    late = ("rope tests", "- tests/torchlm")
    pretend(monkeypatch, lambda name, told: never if name in late else Ended(-9, "", 1.0, False))
    found = gpu_tests.run(["softmax", "rope", "-"], math.inf)
    assert found["ops"] == {"softmax": {"passed": 0, "failed": 1, "skipped": 0}}
