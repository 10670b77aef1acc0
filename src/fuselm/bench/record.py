"""The GPU record, gpu/<gpu>.json: which native sources were checked on which GPU, by which tests, and how fast.

Run on a machine with a GPU from the root of the repository, with an interpreter that has what is needed: this installs
nothing. Each part takes under ten minutes and is merged into the record. What the record says of an op stays in it
while the sources the op is made of stay what they were (owners.py says which those are; comments do not count), so a
change of one op needs that op's tests and figures anew, the tests of no op, and nothing else.
tests/test_gpu_record.py reads it everywhere else. Tests and sanitizer run side by side, a process for each op; the
bench has the GPU to itself.

    python -m fuselm.bench.record                          # tests, sanitizer and bench in turn
    python -m fuselm.bench.record --part bench --ops "rms_norm softmax" --also runs/copy-of-record
    python -m fuselm.bench.record --part bench --rest --seconds 300     # what the record lacks, as far as time allows

`tests` are counted for each op, so that a run of some ops can replace just those; tests of no op are those of "-".
AdamW and the norm are for the sanitizers alone: their tests are of no op, and their times are optimizer.py's.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fuselm.bench import gpu_tests, machine, merging, owners
from fuselm.bench.gpu_tests import ONE_GPU
from fuselm.bench.merging import TOOLS, UNFINISHED, Record, load, merge, problems, to_text
from fuselm.bench.owners import NO_OP, Sources
from fuselm.bench.processes import Ended, Job, run_all
from fuselm.bench.report import Results
from fuselm.files import write_whole
from fuselm.kernels import build
from fuselm.kernels.adamw import LIST_OPS
from fuselm.kernels.spec import ops

__all__ = ["MAKE_ONE", "ONE_GPU", "main"]

PARTS = ("tests", "sanitizer", "bench")
SECONDS = 530  # of a part and the building before it, so that with starting and ending it stays under ten minutes
LAST_CASE_SECONDS = 40  # of those, what the bench keeps for the case that is being measured when time is up
KEEP_SECONDS = 20  # after which the bench writes down what it has found so far
SANITIZERS_AT_ONCE = 8  # each slows its kernels a hundredfold and leaves most of the GPU idle
FOUND = 9  # the exit code a sanitizer is told to have when it has found something
MAKE_ONE = "Make one on a machine with a GPU: make gpu-check"


class CannotRecord(Exception):
    """This machine cannot run a part; the message says what is missing and what to do."""


# --- the parts -------------------------------------------------------------------------------------------------------


def run_sanitizer(names: Sequence[str], deadline: float) -> Record:
    """memcheck and racecheck over every small case of each op."""
    sanitizer = shutil.which("compute-sanitizer") or _beside_nvcc("compute-sanitizer")
    if sanitizer is None:
        raise CannotRecord("compute-sanitizer was not found; it comes with the CUDA toolkit: put its folder on PATH.")
    # racecheck takes longest, so it begins.
    jobs = {f"{tool} {op}": _sanitizer_job(sanitizer, tool, op) for tool in reversed(TOOLS) for op in names}
    ended = run_all(jobs, deadline, SANITIZERS_AT_ONCE)
    begun = {name for name, result in ended.items() if result.in_time or result.code != -1}
    return {
        "sanitizer": {
            tool: {op: _status(ended[f"{tool} {op}"]) for op in names if f"{tool} {op}" in begun} for tool in TOOLS
        }
    }


def _sanitizer_job(sanitizer: str, tool: str, op: str) -> Job:
    # API errors that frameworks provoke and handle while they start are not about our kernels; ours are raised anyway.
    options = ["--report-api-errors", "no"] if tool == "memcheck" else []
    program = [sys.executable, "-m", "fuselm.bench.sanitize", "--ops", op]
    # torch's caching allocator hands out parts of large blocks, in which reading out of bounds goes unseen.
    environment = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": "2"}
    return Job([sanitizer, "--tool", tool, "--error-exitcode", str(FOUND), *options, *program], environment)


def _status(ended: Ended) -> str:
    if not ended.in_time:
        return f"{UNFINISHED}\n{ended.output[-1000:]}"
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


def run_bench(
    names: Sequence[str],
    deadline: float,
    done: frozenset[str] = frozenset(),
    keep: Callable[[Record], object] = lambda found: None,
) -> Record:
    """The roofline rows, latencies, and notes on what was not measured; labels in `done` are left out.

    `keep` gets what was found so far, between two cases and not too often.
    """
    from fuselm.bench import peers
    from fuselm.bench.kernels import DeviceLost, Plan, run

    results, start, shown = Results(), time.monotonic(), set[int]()
    kept = start

    def on_step(text: str) -> None:
        nonlocal kept
        # As they come: whoever's time on the machine ends before this part does has at least these.
        for row in results.rows:
            if id(row) not in shown:
                print(_line(row))
                shown.add(id(row))
        now = time.monotonic()
        if now - kept > KEEP_SECONDS:
            keep(dict(results.tables()))
            kept = now
        print(f"{now - start:5.0f} s  {text}", flush=True)

    seconds = deadline - time.monotonic() - LAST_CASE_SECONDS
    try:
        run(Plan(tuple(names), "cuda", seconds=seconds, done=done), results, on_step)
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


@dataclass(frozen=True)
class Writer:
    """Where a record is written, and what it says of this machine and these sources."""

    header: Mapping[str, Any]
    sources: Sources
    path: Path
    also: Path | None

    def add(self, old: Record | None, found: Mapping[str, Any]) -> Record:
        """The old record with what a part has found, as it is on disk now."""
        record = merge(old, self.header, found, self.sources)
        for target in (self.path, self.also / self.path.name if self.also else None):
            if target is not None:
                target.parent.mkdir(parents=True, exist_ok=True)
                write_whole(target, to_text(record))
        return record


def main(arguments: Sequence[str] | None = None) -> None:
    """Run parts and write the record; exit code 1 when something that ran went wrong."""
    parser = _parser()
    given = parser.parse_args(arguments)
    known = [*ops(), *LIST_OPS, NO_OP]
    names = given.ops.replace(",", " ").split() or known
    if unknown := [name for name in names if name not in known]:
        parser.error(f"there is no op {unknown[0]!r}; there are: {', '.join(known)}")
    parts = [part for part in ([given.part] if given.part else PARTS) if any(_has(part, name) for name in names)]
    if not parts:
        parser.error(f"{given.part} has nothing to do for {', '.join(names)}")
    began = time.monotonic()
    try:
        header, sources = _start()
        writer = Writer(header, sources, given.folder / f"{machine.slug(header['gpu'])}.json", given.also)
        for part in parts:
            record = _run_part(part, names, given.rest, began + given.seconds, writer)
            began = time.monotonic()
    except (CannotRecord, build.BuildError) as error:
        sys.exit(f"record: {error}")
    left = problems(record, sources, [name for name in names if name in ops()])
    left += [f"no sanitizer has looked at {op} to its end" for op in merging.unseen(record)]
    late = sum(merging.is_late(note) for note in record.get("notes", []))
    left += [f"{late} cases or latencies wait for a bench with --rest"] if late else []
    print("\n".join([f"{writer.path} is written", *(f"to do: {problem}" for problem in left)]))
    sys.exit(1 if _failed(record) else 0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m fuselm.bench.record", description=__doc__.partition("\n")[0])
    parser.add_argument("--part", default="", choices=(*PARTS, ""), help="one part; all in turn when left out")
    parser.add_argument(
        "--ops", default="", help=f"names separated by spaces or commas; all when empty, {NO_OP!r} for tests of none"
    )
    parser.add_argument("--rest", action="store_true", help="only what the record lacks, or found wrong")
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help="for a part, after which it ends with what it has (%(default)s)"
    )
    parser.add_argument("--folder", type=Path, default=Path("gpu"), help="where records are kept")
    parser.add_argument("--also", type=Path, help="a folder that gets a copy of the record")
    return parser


def _start() -> tuple[Record, Sources]:
    """What the record will say of this machine, and the sources here; builds what the parts use."""
    import torch

    if not torch.cuda.is_available():
        raise CannotRecord("torch sees no GPU here; `fuselm doctor` says why.")
    if not Path("tests").is_dir():
        raise CannotRecord("this runs from the root of the repository, where tests/ is; change to it first.")
    sources = owners.sources()  # before the build: an edit during a part must not be vouched for
    build.library("torch")
    try:
        build.library("jax")
    except build.Unavailable as reason:
        print(f"without JAX: {reason}")
    return machine.describe("cuda"), sources


def _run_part(part: str, names: Sequence[str], rest: bool, deadline: float, writer: Writer) -> Record:
    """Run one part of these ops, or the rest of it, and return the record with it."""
    old = load(writer.path)
    known = merging.still_true(old, writer.header["gpu"], writer.sources)
    of_part = [name for name in names if _has(part, name)]
    if part == "tests":
        chosen = merging.untested(known, of_part) if rest else of_part
        return writer.add(old, {"tests": gpu_tests.run(chosen, deadline)})
    if part == "sanitizer":
        return writer.add(old, run_sanitizer(merging.unsanitized(known, of_part) if rest else of_part, deadline))
    done = merging.measured_labels(known) if rest else frozenset()
    return writer.add(old, run_bench(of_part, deadline, done, keep=lambda found: writer.add(old, found)))


def _has(part: str, name: str) -> bool:
    """Whether a part has something to do for a name."""
    return {"tests": name not in LIST_OPS, "sanitizer": name != NO_OP, "bench": name in ops()}[part]


def _failed(record: Record) -> bool:
    """Whether something ran and went wrong; what has not been run yet is no failure of this run."""
    statuses = [status for found in record.get("sanitizer", {}).values() for status in found.values()]
    broken = [note for note in record.get("notes", []) if note["impl"] == "fused"]
    return bool(record.get("tests", {}).get("failed") or any(s != "clean" for s in statuses) or broken)


if __name__ == "__main__":
    main()
