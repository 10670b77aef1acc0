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
# Tests of no op take as long as all others together, so these folders of theirs have processes of their own.
ROOT, FOLDERS = "tests", ("tests/bench", "tests/kernels", "tests/torchlm")
ONE_GPU = "one GPU only"  # the reason of a test that wants a second one, and the only good one to skip a GPU test

Counts = dict[str, Any]


def run(names: Sequence[str], deadline: float) -> Counts:
    """The tests of these ops, counted; NO_OP stands for those of none. What could not begin in time is not there."""
    groups = [(NO_OP, place) for place in (ROOT, *FOLDERS) if NO_OP in names]  # which take longest, so they begin
    groups += [(name, ROOT) for name in names if name != NO_OP]
    at_once = max(1, min(len(groups), os.cpu_count() or 1))
    environment = {
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # torch and JAX share the GPU's memory
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // at_once)),
    }
    with tempfile.TemporaryDirectory() as folder:
        told = {group: Path(folder) / f"{index}.jsonl" for index, group in enumerate(groups)}
        jobs = {" ".join(group): _job(*group, told[group], environment) for group in groups}
        ended = run_all(jobs, deadline, at_once)
        ends = {group: ended[" ".join(group)] for group in groups}
        late = {name for (name, _), end in ends.items() if _never_began(end)}  # if only in part: it vouches for nothing
        counts = [count(_lines(told[group]), group[0], end) for group, end in ends.items() if group[0] not in late]
    return together(summed(counts))


def _job(name: str, place: str, told: Path, environment: Mapping[str, str]) -> Job:
    pytest = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider"]
    elsewhere = [f"--ignore={folder}" for folder in FOLDERS if name == NO_OP and place == ROOT]
    # With "=": NO_OP begins as an option does.
    return Job([*pytest, f"--of-op={name}", f"--outcomes={told}", *elsewhere, place], environment)


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


def summed(parts: Iterable[Counts]) -> list[Counts]:
    """The counts of processes, of which an op may have several, as one of each op."""
    found: dict[str, Counts] = {}
    for part in parts:
        for op, numbers in part["ops"].items():
            whole = found.setdefault(op, {"ops": {op: dict.fromkeys(COUNTS, 0)}, "failures": {}})
            whole["ops"][op] = {which: whole["ops"][op][which] + numbers[which] for which in COUNTS}
            if words := part["failures"].get(op):
                whole["failures"][op] = [*whole["failures"].get(op, []), *words]
    return list(found.values())


def of_ops(counts: Counts, names: Iterable[str]) -> Counts:
    """What counts say of these ops."""
    kept = set(names)
    chosen = {part: {op: found for op, found in counts[part].items() if op in kept} for part in ("ops", "failures")}
    return together([chosen])


def together(parts: Iterable[Counts]) -> Counts:
    """Counts of several runs as one, in which a later one of an op replaces an earlier one."""
    ops: dict[str, dict[str, int]] = {}
    failures: dict[str, list[str]] = {}
    for part in parts:
        ops |= part["ops"]
        failures = {op: words for op, words in failures.items() if op not in part["ops"]} | part["failures"]
    return {**{which: sum(of[which] for of in ops.values()) for which in COUNTS}, "ops": ops, "failures": failures}
