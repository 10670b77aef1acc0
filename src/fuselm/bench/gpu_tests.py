"""The tests of a GPU record: pytest's tests with the mark `gpu`, a process for each op side by side, and their counts.

Knows processes and the lines that tests/conftest.py writes with `--outcomes`; knows no record. A line is written when a
test begins and one when it ends, so a process whose time was up, or that crashed, has told what it found until then.

    run(["softmax", "-"], deadline=time.monotonic() + 500)      # {"passed": 1401, ..., "ops": {...}, "failures": {}}
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fuselm.bench.owners import NO_OP
from fuselm.bench.processes import Ended, Job, run_all

FINE_PYTEST_CODES = (0, 1, 5)  # all passed, some failed, none there: in these all has been told
COUNTS = ("passed", "failed", "skipped")
ONE_GPU = "one GPU only"  # the reason of a test that wants a second one, and the only good one to skip a GPU test

Counts = dict[str, Any]


def run(names: Sequence[str], deadline: float) -> Counts:
    """The tests of these ops, counted; NO_OP stands for those of none. What could not begin in time is not there."""
    groups = sorted(names, key=lambda name: name != NO_OP)  # those of no op take longest, so they begin
    at_once = max(1, min(len(groups), os.cpu_count() or 1))
    environment = {
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # torch and JAX share the GPU's memory
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // at_once)),
    }
    with tempfile.TemporaryDirectory() as folder:
        told = {group: Path(folder) / f"{index}.jsonl" for index, group in enumerate(groups)}
        jobs = {group: _job(group, told[group], environment) for group in groups}
        ended = run_all(jobs, deadline, at_once)
        begun = {group: ended[group] for group in groups if not _never_began(ended[group])}
        lines = {group: _lines(told[group]) for group in begun}
    return together(count(lines[group], group, ended) for group, ended in begun.items())


def _job(group: str, told: Path, environment: Mapping[str, str]) -> Job:
    pytest = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider"]
    # With "=": NO_OP begins as an option does.
    return Job([*pytest, f"--of-op={group}", f"--outcomes={told}", "tests"], environment)


def _never_began(ended: Ended) -> bool:
    return not ended.in_time and ended.code == -1  # one that was ended has the code of a signal


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    # What ends in the middle of a line was being written when the process was ended.
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line[-1] == "\n"]


def count(lines: Sequence[Mapping[str, Any]], group: str, ended: Ended) -> Counts:
    """passed, failed and skipped of one process.

    Errors count as failures, and so do tests that found no GPU or no framework: they vouch for nothing. A process that
    did not come to its end is one failure more. A test that has told more than once is counted once, at its worst.
    """
    outcomes: dict[str, tuple[str, str]] = {}  # by test: which count, and the words of a failure
    running = ""
    for line in lines:
        name, outcome, reason = line["test"], line["outcome"], line.get("reason", "")
        running = name if outcome == "begun" else running if running != name else ""
        failed = outcome == "failed" or reason not in ("", ONE_GPU)
        if outcome != "begun" and (failed or name not in outcomes):
            words = f"{name} (skipped: {reason})" if reason else name
            outcomes[name] = ("failed" if failed else outcome, words)
    if not (ended.in_time and ended.code in FINE_PYTEST_CODES):
        how = f"exit code {ended.code}" if ended.in_time else "it took too long"
        where = f" in {running}" if running else ""
        outcomes[""] = ("failed", f"pytest of {group} did not come to its end ({how}){where}")
    numbers = {which: sum(outcome == which for outcome, _ in outcomes.values()) for which in COUNTS}
    failures = [words for outcome, words in outcomes.values() if outcome == "failed"]
    return {"ops": {group: numbers}, "failures": {group: failures} if failures else {}}


def together(parts: Iterable[Counts]) -> Counts:
    """Counts of several runs as one, in which a later one of an op replaces an earlier one."""
    ops: dict[str, dict[str, int]] = {}
    failures: dict[str, list[str]] = {}
    for part in parts:
        ops |= part["ops"]
        failures = {op: words for op, words in failures.items() if op not in part["ops"]} | part["failures"]
    return {**{which: sum(of[which] for of in ops.values()) for which in COUNTS}, "ops": ops, "failures": failures}
