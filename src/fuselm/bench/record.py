"""The GPU record, gpu/<gpu>.json: which native sources were checked on which GPU, by which tests, and how fast.

Run on a machine with a GPU from the root of the repository, with an interpreter that has what is needed: this installs
nothing. Each part takes under eight minutes and is merged into the record when the record is of the very same sources;
otherwise the record starts anew with that part. tests/test_gpu_record.py reads it everywhere else.

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
import signal
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fuselm.bench import machine
from fuselm.bench.report import DECODE_FIELDS, HOST_FIELDS, ROW_FIELDS, Results, to_json
from fuselm.files import write_whole
from fuselm.kernels import build
from fuselm.kernels.spec import ops

Record = dict[str, Any]

PARTS = ("tests", "sanitizer", "bench")
TOOLS = ("memcheck", "racecheck")
SECONDS = 450  # of a part, so that with building and starting it stays under eight minutes
HEADER = ("gpu", "driver", "versions", "date", "commit", "sources")
TABLES = {"rows": ROW_FIELDS, "decode": DECODE_FIELDS, "host": HOST_FIELDS}
COUNTS = ("passed", "failed", "skipped")
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


def run_tests(names: Sequence[str], everything: bool) -> Record:
    """pytest's GPU tests, counted."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", f"--junitxml={report}"]
        if not everything:
            command += ["-k", " or ".join(names)]
        _run(command, {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"})  # torch and JAX share the GPU's memory
        if not report.exists():
            raise CannotRecord("pytest left no report: see its output above, mend that, and run this part again.")
        return {"tests": count_tests(report.read_text(encoding="utf-8"), names)}


def count_tests(report: str, names: Sequence[str]) -> Record:
    """passed, failed and skipped of a JUnit report: in all, and for each op.

    Errors count as failures, and so do tests that found no GPU or no framework: they vouch for nothing.
    """
    by_op: dict[str, dict[str, int]] = {}
    failures = []
    for case in ElementTree.fromstring(report).iter("testcase"):
        name = f"{case.get('classname', '')}.{case.get('name', '')}"
        skipped = case.find("skipped")
        reason = "" if skipped is None else skipped.get("message", "no reason")
        failed = case.find("failure") is not None or case.find("error") is not None or reason not in ("", ONE_GPU)
        of = by_op.setdefault(op_of_test(name, names), dict.fromkeys(COUNTS, 0))
        of["failed" if failed else "skipped" if reason else "passed"] += 1
        if failed:
            failures.append(f"{name} (skipped: {reason})" if reason else name)
    return _merge_tests(None, {"ops": by_op, "failures": failures})


def op_of_test(name: str, names: Sequence[str]) -> str:
    """The op a test's name names, the longest one that fits; "-" when none does."""
    return max((op for op in names if op in name), key=len, default="-")


def run_sanitizer(names: Sequence[str]) -> Record:
    """memcheck and racecheck over every small case of each op."""
    sanitizer = shutil.which("compute-sanitizer") or _beside_nvcc("compute-sanitizer")
    if sanitizer is None:
        raise CannotRecord("compute-sanitizer was not found; it comes with the CUDA toolkit: put its folder on PATH.")
    deadline = time.monotonic() + SECONDS
    return {"sanitizer": {tool: {op: _sanitize(sanitizer, tool, op, deadline) for op in names} for tool in TOOLS}}


def _sanitize(sanitizer: str, tool: str, op: str, deadline: float) -> str:
    left = deadline - time.monotonic()
    if left <= 0:
        return "was not run: the time of this part was used up"
    # API errors that frameworks provoke and handle while they start are not about our kernels; ours are raised anyway.
    options = ["--report-api-errors", "no"] if tool == "memcheck" else []
    program = [sys.executable, "-m", "fuselm.bench.sanitize", "--ops", op]
    # torch's caching allocator hands out parts of large blocks, in which reading out of bounds goes unseen.
    environment = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command = [sanitizer, "--tool", tool, "--error-exitcode", "9", *options, *program]
    code, output = _run(command, environment, seconds=left)
    return sanitizer_status(code, output)


def sanitizer_status(code: int, output: str) -> str:
    """ "clean", or what was found with the end of the log."""
    summary = re.findall(r"(\d+) (?:errors?|hazards?)", " ".join(re.findall(r"SUMMARY: .*", output)))
    if code == 0 and summary and not any(int(number) for number in summary):
        return "clean"
    tail = "\n".join(output.strip().splitlines()[-25:])
    count = max((int(number) for number in summary), default=0)
    return f"{count} errors\n{tail}" if count else f"failed with exit code {code}\n{tail}"


def run_bench(names: Sequence[str]) -> Record:
    """The roofline rows, latencies, and notes on what was not measured."""
    from fuselm.bench.kernels import DeviceLost, Plan, run

    results, start, shown = Results(), time.monotonic(), 0

    def on_step(text: str) -> None:
        nonlocal shown
        # As they come: whoever's time on the machine ends before this part does has at least these.
        for row in results.rows[shown:]:
            print(_line(row))
        shown = len(results.rows)
        print(f"{time.monotonic() - start:5.0f} s  {text}", flush=True)

    try:
        run(Plan(tuple(names), "cuda", seconds=SECONDS - 60), results, on_step)
    except DeviceLost as error:
        raise CannotRecord(str(error)) from error
    on_step("done")
    for note in results.notes:
        print("not measured:", *(note[key] for key in ("impl", "op", "pass", "case", "shape", "note")))
    return dict(results.tables())


def _line(row: Mapping[str, Any]) -> str:
    shape = "x".join(map(str, row["shape"]))
    share = f"{100 * row['share_of_copy']:.0f} %"
    return f"{row['pass'][:3]} {row['case']} {row['dtype']} {shape} {row['impl']}: {row['gpu_us']:.1f} us {share}"


def _run(command: Sequence[str], environment: Mapping[str, str], seconds: float = SECONDS) -> tuple[int, str]:
    """Run a program, print what it prints as it comes, and return its exit code and output; killed when time is up."""
    print(" ".join(command), flush=True)
    # A session of its own: a sanitizer that is killed must take the program inside it along.
    started = subprocess.Popen(
        command,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    late = threading.Timer(seconds, os.killpg, (started.pid, signal.SIGKILL))
    late.start()
    lines = []
    with started:
        try:
            for line in started.stdout or ():
                print(line, end="", flush=True)
                lines.append(line)
            return started.wait(), "".join(lines)
        except BaseException:  # Ctrl-C reaches this process alone, since the other is in a session of its own
            os.killpg(started.pid, signal.SIGKILL)
            raise
        finally:
            late.cancel()


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
    try:
        header = _start()
        path = given.folder / f"{machine.slug(header['gpu'])}.json"
        for part in [given.part] if given.part else PARTS:
            record = merge(load(path), header, _run_part(part, names, names == known), names)
            _keep(record, path, given.also)
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


def _run_part(part: str, names: Sequence[str], everything: bool) -> Record:
    if part == "tests":
        return run_tests(names, everything)
    return run_sanitizer(names) if part == "sanitizer" else run_bench(names)


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
