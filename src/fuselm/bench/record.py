"""The GPU record, gpu/<gpu>.json: which native sources were checked on which GPU, by which tests, and how fast.

Run on a machine with a GPU from the root of the repository, with an interpreter that has what is needed: this installs
nothing. Each part takes under ten minutes and is merged into the record when the record is of the very same sources;
otherwise the record starts anew with that part. tests/test_gpu_record.py reads it everywhere else. Tests and sanitizer
run side by side, a process for each op; the bench has the GPU to itself.

    python -m fuselm.bench.record                          # tests, sanitizer and bench in turn
    python -m fuselm.bench.record --part bench --ops rms_norm --also runs/copy-of-record

`tests` are counted for each op, so that a run of some ops can replace just those; tests that name no op are under "-".
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fuselm.bench import machine
from fuselm.bench.processes import Ended, Job, run_all
from fuselm.bench.report import DECODE_FIELDS, HOST_FIELDS, ROW_FIELDS, Results, to_json
from fuselm.files import write_whole
from fuselm.kernels import build
from fuselm.kernels.spec import ops

Record = dict[str, Any]

PARTS = ("tests", "sanitizer", "bench")
TOOLS = ("memcheck", "racecheck")
SECONDS = 530  # of a part and the building before it, so that with starting and ending it stays under ten minutes
LAST_CASE_SECONDS = 40  # of those, what the bench keeps for the case that is being measured when time is up
SANITIZERS_AT_ONCE = 8  # each slows its kernels a hundredfold and leaves most of the GPU idle
FINE_PYTEST_CODES = (0, 1, 5)  # all passed, some failed, none there: in these the report is complete
HEADER = ("gpu", "driver", "versions", "date", "commit", "sources")
TABLES = {"rows": ROW_FIELDS, "decode": DECODE_FIELDS, "host": HOST_FIELDS}
COUNTS = ("passed", "failed", "skipped")
NO_OP = "-"  # what tests that name no op are counted under
FOUND = 9  # the exit code a sanitizer is told to have when it has found something
ONE_GPU = "one GPU only"  # the reason of a test that wants a second one, and the only good one to skip a GPU test
MAKE_ONE = "Make one on a machine with a GPU: make gpu-check"


class CannotRecord(Exception):
    """This machine cannot run a part; the message says what is missing and what to do."""


# --- merging ---------------------------------------------------------------------------------------------------------


def merge(old: Record | None, header: Mapping[str, Any], part: Mapping[str, Any], names: Sequence[str]) -> Record:
    """The record with a part's findings in it; what it says of other sources is dropped, of other ops kept."""
    same = old is not None and old.get("sources") == header["sources"] and old.get("gpu") == header["gpu"]
    record: Record = {key: value for key, value in (old or {}).items() if same and key not in HEADER}
    if "tests" in part:
        record["tests"] = _merge_tests(record.get("tests"), part["tests"])
    if "sanitizer" in part:
        before = record.get("sanitizer", {})
        record["sanitizer"] = {tool: {**before.get(tool, {}), **found} for tool, found in part["sanitizer"].items()}
    for table in (*TABLES, "notes"):
        if table in part:
            record[table] = [row for row in record.get(table, []) if row["op"] not in names] + part[table]
    return {**{key: header[key] for key in HEADER}, **record}


def _merge_tests(old: Record | None, new: Record) -> Record:
    by_op = {**(old or {}).get("ops", {}), **new["ops"]}
    totals = {count: sum(of[count] for of in by_op.values()) for count in COUNTS}
    kept = [name for name in (old or {}).get("failures", []) if op_of_test(name, list(by_op)) not in new["ops"]]
    return {**totals, "ops": by_op, "failures": kept + new["failures"]}


def problems(record: Record, sources: Mapping[str, str], names: Sequence[str]) -> list[str]:
    """Why a record does not vouch for these sources and ops, in sentences; [] when it does."""
    if missing := [key for key in (*HEADER, "tests", "sanitizer", *TABLES) if key not in record]:
        return [f"the record has no {', '.join(missing)}"]
    found = [
        f"{path} is not what was checked on the GPU"
        for path in sorted({*sources, *record["sources"]})
        if sources.get(path) != record["sources"].get(path)
    ]
    found += _test_problems(record["tests"], names)
    for tool in TOOLS:
        status = record["sanitizer"].get(tool, {})
        found += [f"{tool} of {op}: {status.get(op, 'was not run')}" for op in names if status.get(op) != "clean"]
    for table, fields in TABLES.items():
        wrong = [row for row in record[table] if set(row) != set(fields)]
        found += [f"a row of {table} has other fields than {', '.join(fields)}: {wrong[0]}"] if wrong else []
    measured = {row["op"] for row in record["rows"] if row["impl"] == "fused"}
    return found + [f"{op} was not measured" for op in names if op not in measured]


def _test_problems(tests: Record, names: Sequence[str]) -> list[str]:
    found = [f"{tests['failed']} tests failed: {', '.join(tests['failures'][:5])}"] if tests["failed"] else []
    return found + [f"no test of {op} passed" for op in names if not tests["ops"].get(op, {}).get("passed")]


def load(path: Path) -> Record | None:
    """A record, or None when there is none yet."""
    if not path.exists():
        return None
    record: Record = json.loads(path.read_text(encoding="utf-8"))
    return record


# --- the parts -------------------------------------------------------------------------------------------------------


def run_tests(names: Sequence[str], everything: bool, deadline: float) -> Record:
    """pytest's GPU tests, counted: a process for each op and, with everything, one for the tests that name none."""
    groups = {op: only(op, list(ops())) for op in names}
    if everything:
        groups[NO_OP] = f"not ({' or '.join(names)})"
    environment = {
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # torch and JAX share the GPU's memory
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // len(groups))),
    }
    with tempfile.TemporaryDirectory() as folder:
        reports = {group: Path(folder) / f"{index}.xml" for index, group in enumerate(groups)}
        pytest = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider"]
        jobs = {
            group: Job([*pytest, f"--junitxml={reports[group]}", "-k", chosen], environment)
            for group, chosen in groups.items()
        }
        ended = run_all(jobs, deadline, at_once=len(jobs))
        found = [path.read_text(encoding="utf-8") for path in reports.values() if path.exists()]
        broken = {group: ended[group] for group in groups if _is_broken(ended[group], reports[group])}
        return {"tests": count_tests(found, names, broken)}


def only(op: str, known: Sequence[str]) -> str:
    """pytest's -k for an op's tests and not for those of an op whose name has this one's in it."""
    return " and not ".join([op, *(other for other in known if op in other and op != other)])


def _is_broken(ended: Ended, report: Path) -> bool:
    return not (ended.in_time and ended.code in FINE_PYTEST_CODES and report.exists())


def count_tests(reports: Sequence[str], names: Sequence[str], broken: Mapping[str, Ended] | None = None) -> Record:
    """passed, failed and skipped of JUnit reports: in all, and for each op.

    Errors count as failures, and so do tests that found no GPU or no framework: they vouch for nothing. A run of pytest
    that did not come to its end is one failure more. A test that two runs have made is counted once, at its worst.
    """
    outcomes: dict[str, tuple[str, str]] = {}  # by name: which count, and the words of a failure
    for case in (case for report in reports for case in ElementTree.fromstring(report).iter("testcase")):
        name = f"{case.get('classname', '')}.{case.get('name', '')}"
        skipped = case.find("skipped")
        reason = "" if skipped is None else skipped.get("message", "no reason")
        failed = case.find("failure") is not None or case.find("error") is not None or reason not in ("", ONE_GPU)
        if failed or name not in outcomes:
            words = f"{name} (skipped: {reason})" if reason else name
            outcomes[name] = ("failed" if failed else "skipped" if reason else "passed", words)
    for group, ended in (broken or {}).items():
        how = f"exit code {ended.code}" if ended.in_time else "it took too long"
        outcomes[group] = ("failed", f"pytest of {group} did not come to its end ({how})")
    by_op: dict[str, dict[str, int]] = {}
    for name, (count, _) in outcomes.items():
        by_op.setdefault(op_of_test(name, names), dict.fromkeys(COUNTS, 0))[count] += 1
    failures = [words for count, words in outcomes.values() if count == "failed"]
    return _merge_tests(None, {"ops": by_op, "failures": failures})


def op_of_test(name: str, names: Sequence[str]) -> str:
    """The op a test's name names, the longest one that fits; NO_OP when none does."""
    return max((op for op in names if op in name), key=len, default=NO_OP)


def run_sanitizer(names: Sequence[str], deadline: float) -> Record:
    """memcheck and racecheck over every small case of each op."""
    sanitizer = shutil.which("compute-sanitizer") or _beside_nvcc("compute-sanitizer")
    if sanitizer is None:
        raise CannotRecord("compute-sanitizer was not found; it comes with the CUDA toolkit: put its folder on PATH.")
    # racecheck takes longest, so it begins.
    jobs = {f"{tool} {op}": _sanitizer_job(sanitizer, tool, op) for tool in reversed(TOOLS) for op in names}
    ended = run_all(jobs, deadline, SANITIZERS_AT_ONCE)
    return {"sanitizer": {tool: {op: _status(ended[f"{tool} {op}"]) for op in names} for tool in TOOLS}}


def _sanitizer_job(sanitizer: str, tool: str, op: str) -> Job:
    # API errors that frameworks provoke and handle while they start are not about our kernels; ours are raised anyway.
    options = ["--report-api-errors", "no"] if tool == "memcheck" else []
    program = [sys.executable, "-m", "fuselm.bench.sanitize", "--ops", op]
    # torch's caching allocator hands out parts of large blocks, in which reading out of bounds goes unseen.
    environment = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": "2"}
    return Job([sanitizer, "--tool", tool, "--error-exitcode", str(FOUND), *options, *program], environment)


def _status(ended: Ended) -> str:
    if not ended.in_time:
        return f"was not finished: the time of this part was used up\n{ended.output[-1000:]}"
    return sanitizer_status(ended.code, ended.output)


def sanitizer_status(code: int, output: str) -> str:
    """ "clean", or what was found with the end of the log."""
    summary = re.findall(r"(\d+) (?:errors?|hazards?)", " ".join(re.findall(r"SUMMARY: .*", output)))
    if code == 0 and summary and not any(int(number) for number in summary):
        return "clean"
    # cuBLAS, which linear_cross_entropy calls, has hazards of its own that racecheck reports: not ours to mend.
    accesses = re.findall(r"access at (\S.*?)\+0x", output)
    if code == FOUND and accesses and not any("fuselm" in kernel for kernel in accesses):
        return "clean"
    tail = "\n".join(output.strip().splitlines()[-25:])
    count = max((int(number) for number in summary), default=0)
    return f"{count} errors\n{tail}" if count else f"failed with exit code {code}\n{tail}"


def run_bench(names: Sequence[str], deadline: float) -> Record:
    """The roofline rows, latencies, and notes on what was not measured."""
    from fuselm.bench import peers
    from fuselm.bench.kernels import DeviceLost, Plan, run

    results, start, shown = Results(), time.monotonic(), set[int]()

    def on_step(text: str) -> None:
        # As they come: whoever's time on the machine ends before this part does has at least these.
        for row in results.rows:
            if id(row) not in shown:
                print(_line(row))
                shown.add(id(row))
        print(f"{time.monotonic() - start:5.0f} s  {text}", flush=True)

    try:
        run(Plan(tuple(names), "cuda", seconds=deadline - time.monotonic() - LAST_CASE_SECONDS), results, on_step)
    except DeviceLost as error:
        raise CannotRecord(str(error)) from error
    on_step(f"done; torch.compile: {peers.compile_cache()}")
    for note in results.notes:
        print("not measured:", *(note[key] for key in ("impl", "op", "pass", "case", "shape", "note")))
    return dict(results.tables())


def _line(row: Mapping[str, Any]) -> str:
    shape = "x".join(map(str, row["shape"]))
    share = f"{100 * row['share_of_copy']:.0f} %"
    return f"{row['pass'][:3]} {row['case']} {row['dtype']} {shape} {row['impl']}: {row['gpu_us']:.1f} us {share}"


def _beside_nvcc(program: str) -> str | None:
    nvcc = build.find_nvcc()
    candidate = nvcc.resolve().with_name(program) if nvcc else None
    return str(candidate) if candidate and candidate.exists() else None


# --- the command -----------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> None:
    """Run parts and write the record; exit code 1 when the record does not vouch for what was run."""
    parser = argparse.ArgumentParser(prog="python -m fuselm.bench.record", description=__doc__.partition("\n")[0])
    parser.add_argument("--part", default="", choices=(*PARTS, ""), help="one part; all in turn when left out")
    parser.add_argument("--ops", default="", help="names separated by spaces or commas; all when empty")
    parser.add_argument("--folder", type=Path, default=Path("gpu"), help="where records are kept")
    parser.add_argument("--also", type=Path, help="a folder that gets a copy of the record")
    given = parser.parse_args(arguments)
    known = list(ops())
    names = given.ops.replace(",", " ").split() or known
    if unknown := [name for name in names if name not in known]:
        parser.error(f"there is no op {unknown[0]!r}; there are: {', '.join(known)}")
    began = time.monotonic()
    try:
        header = _start()
        path = given.folder / f"{machine.slug(header['gpu'])}.json"
        for part in [given.part] if given.part else PARTS:
            found = _run_part(part, names, names == known, began + SECONDS)
            record = merge(load(path), header, found, names)
            _keep(record, path, given.also)
            began = time.monotonic()
    except (CannotRecord, build.BuildError) as error:
        sys.exit(f"record: {error}")
    left = problems(record, header["sources"], names)
    print("\n".join([f"{path} is written", *(f"to do: {problem}" for problem in left)]))
    sys.exit(1 if _failed(record) else 0)


def _start() -> Record:
    """What the record will say of this machine and these sources; builds what the parts use."""
    import torch

    if not torch.cuda.is_available():
        raise CannotRecord("torch sees no GPU here; `fuselm doctor` says why.")
    if not Path("tests").is_dir():
        raise CannotRecord("this runs from the root of the repository, where tests/ is; change to it first.")
    sources = build.source_hashes()  # before the build: an edit during a part must not be vouched for
    build.library("torch")
    try:
        build.library("jax")
    except build.Unavailable as reason:
        print(f"without JAX: {reason}")
    return {**machine.describe("cuda"), "sources": sources}


def _run_part(part: str, names: Sequence[str], everything: bool, deadline: float) -> Record:
    if part == "tests":
        return run_tests(names, everything, deadline)
    return run_sanitizer(names, deadline) if part == "sanitizer" else run_bench(names, deadline)


def _keep(record: Record, path: Path, also: Path | None) -> None:
    for target in (path, also / path.name if also else None):
        if target is not None:
            target.parent.mkdir(parents=True, exist_ok=True)
            write_whole(target, to_json(record))


def _failed(record: Record) -> bool:
    """Whether something ran and went wrong; what has not been run yet is no failure of this run."""
    statuses = [status for found in record.get("sanitizer", {}).values() for status in found.values()]
    broken = [note for note in record.get("notes", []) if note["impl"] == "fused"]
    return bool(record.get("tests", {}).get("failed") or any(s != "clean" for s in statuses) or broken)


if __name__ == "__main__":
    main()
