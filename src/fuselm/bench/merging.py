"""What a GPU record keeps: how the findings of a part come into it, what it still vouches for, and what it lacks.

Knows the record's shape and the sources that each op is made of (owners.py); runs nothing. `origins` says of which
sources, and of which day, an op's tests, its rows and its sanitizers' findings are:

    {"gpu": ..., "origins": {"tests": {"softmax": {"sources": {...}, ...}}, "rows": {...}, "sanitizer": {...}},
     "rows": [...], "decode": [...], "host": [...], "notes": [...], "sanitizer": {"memcheck": {"softmax": "clean"}},
     "tests": {"passed": 5019, "failed": 0, "skipped": 158, "ops": {...}, "failures": {}}}

    record = merge(load(path), header, {"tests": counts}, owners.sources())
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fuselm.bench import gpu_tests
from fuselm.bench.owners import NO_OP, Sources
from fuselm.bench.report import DECODE_FIELDS, HOST_FIELDS, ROW_FIELDS, Row, shape_text
from fuselm.kernels.adamw import LIST_OPS
from fuselm.kernels.spec import ops

Record = dict[str, Any]

TOOLS = ("memcheck", "racecheck")
HEADER = ("gpu", "driver", "versions", "date", "commit")
ORIGIN = ("date", "commit", "versions")  # kept of each op's figures, which may be of several days
TABLES = {"rows": ROW_FIELDS, "decode": DECODE_FIELDS, "host": HOST_FIELDS}
UNFINISHED = "was not finished: the time of this part was used up"
# What is about latencies: tables of rows, and what notes have as their pass.
LATENCY, LATENCY_TABLES, LATENCY_PASSES = "latencies", ("decode", "host"), ("latency", "decode", "host")


def load(path: Path) -> Record | None:
    """A record, or None when there is none yet."""
    if not path.exists():
        return None
    record: Record = json.loads(path.read_text(encoding="utf-8"))
    for table in (*TABLES, "notes"):
        if isinstance(kept := record.get(table), dict):
            record[table] = [dict(zip(kept["fields"], values, strict=True)) for values in kept["values"]]
    return record


def to_text(record: Record) -> str:
    """The record as a file keeps it: of a table its fields once, and a line for each row.

    With a field's name before each of its values a record of fourteen ops is over a mebibyte.
    """
    parts = []
    for key, value in record.items():
        if key not in (*TABLES, "notes") or not value:
            body = json.dumps(value, indent=1).replace("\n", "\n ")
        elif all(list(row) == list(value[0]) for row in value):
            body = f'{{"fields": {json.dumps(list(value[0]))}, "values": {_lines([[*row.values()] for row in value])}}}'
        else:
            body = _lines(value)
        parts.append(f" {json.dumps(key)}: {body}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _lines(values: Sequence[Any]) -> str:
    return "[\n" + ",\n".join(f"  {json.dumps(value)}" for value in values) + "\n ]"


def merge(old: Record | None, header: Mapping[str, Any], part: Mapping[str, Any], sources: Sources) -> Record:
    """The record with a part's findings in it; what it says of other sources is dropped, the rest kept."""
    record = still_true(old, header["gpu"], sources)
    about = {key: header[key] for key in ORIGIN}
    if "tests" in part:
        record["tests"] = gpu_tests.together([record.get("tests", {"ops": {}, "failures": {}}), part["tests"]])
        tested = sorted(part["tests"]["ops"])
        record["origins"]["tests"] |= {op: {**about, "sources": sources.of_tests(op)} for op in tested}
    if "sanitizer" in part:
        record["sanitizer"] = _merged_statuses(record.get("sanitizer", {}), part["sanitizer"])
        seen = {op for found in part["sanitizer"].values() for op in found}
        record["origins"]["sanitizer"] |= {op: {**about, "sources": sources.of(op)} for op in sorted(seen)}
    if "rows" in part:
        record |= _merged_tables(record, part)
        measured = {row["op"] for table in TABLES for row in part.get(table, [])}
        record["origins"]["rows"] |= {op: {**about, "sources": sources.of(op)} for op in sorted(measured)}
    return {**{key: header[key] for key in HEADER}, **record}


def still_true(old: Record | None, gpu: str, sources: Sources) -> Record:
    """What a record says that is of these sources, op by op. Of another GPU's, nothing."""
    record: Record = {"origins": {"tests": {}, "rows": {}, "sanitizer": {}}}
    if old is None or old.get("gpu") != gpu or "origins" not in old:
        return record
    for about, of in (("tests", sources.of_tests), ("rows", sources.of), ("sanitizer", sources.of)):
        there = (*sources.needs, NO_OP) if about == "tests" else sources.needs
        origins = {op: origin for op, origin in old["origins"].get(about, {}).items() if op in there}
        record["origins"][about] = {op: origin for op, origin in origins.items() if origin["sources"] == of(op)}
    measured, sanitized = record["origins"]["rows"], record["origins"]["sanitizer"]
    for table in (*TABLES, "notes"):
        if table in old:
            record[table] = [row for row in old[table] if row["op"] in measured]
    if "sanitizer" in old:
        record["sanitizer"] = {
            tool: {op: status for op, status in found.items() if op in sanitized}
            for tool, found in old["sanitizer"].items()
        }
    if "tests" in old:
        record["tests"] = gpu_tests.of_ops(old["tests"], record["origins"]["tests"])
    return record


def _merged_statuses(before: Record, found: Mapping[str, Mapping[str, str]]) -> Record:
    """New statuses over old ones of the same sources; one that was not finished does not replace a clean one."""
    merged: Record = {tool: dict(statuses) for tool, statuses in before.items()}
    for tool, statuses in found.items():
        known = merged.setdefault(tool, {})
        known.update({op: new for op, new in statuses.items() if known.get(op) != "clean" or not _unfinished(new)})
    return merged


def _unfinished(status: str) -> bool:
    return status.startswith(UNFINISHED)


def _merged_tables(before: Record, part: Mapping[str, Any]) -> Record:
    """Rows and notes in the place of those about the same, in the registry's order.

    Cases, and latencies, that time did not allow keep the rows they had: those are of the same sources. Cases that an
    op has no longer go when it is measured anew.
    """
    had = {_about(row, table) for table in TABLES for row in before.get(table, [])}
    notes = [note for note in part.get("notes", []) if not (is_late(note) and _about(note) in had)]
    again = {_about(note) for note in notes}
    again |= {_about(row, table) for table in TABLES for row in part.get(table, [])}
    places = _places()
    anew = {op for op, *_ in again}
    gone = {about for about in had if about[0] in anew and about not in places} | again
    merged = {
        table: [row for row in before.get(table, []) if _about(row, table) not in gone] + list(part.get(table, []))
        for table in TABLES
    }
    merged["notes"] = [note for note in before.get("notes", []) if _about(note) not in gone] + notes
    for table, rows in merged.items():
        rows.sort(key=lambda row, table=table: places.get(_about(row, table), len(places)))  # type: ignore[misc]
    return merged


def _about(row: Row, table: str = "notes") -> tuple[Any, ...]:
    """What a row or a note is about: a case of an op, or an op's latencies."""
    if table in LATENCY_TABLES or row.get("pass") in LATENCY_PASSES:
        return row["op"], LATENCY
    return row["op"], row["case"], row["dtype"], tuple(row["shape"])


def is_late(note: Row) -> bool:
    """Whether a note is about what a time budget left out."""
    from fuselm.bench.kernels import TOO_LATE

    return bool(note["note"] == TOO_LATE)


def _places() -> dict[tuple[Any, ...], int]:
    """Where each op's latencies and cases stand in the registry: the place of a row among others."""
    places: dict[tuple[Any, ...], int] = {}
    for op, spec in ops().items():
        places[op, LATENCY] = len(places)
        for case in spec.bench_cases:
            places[op, case.name, case.dtype, case.shape] = len(places)
    return places


def problems(record: Record, sources: Sources, names: Sequence[str]) -> list[str]:
    """Why a record does not vouch for these sources and ops, in sentences; [] when it does.

    What sanitizers said of an op over lists, whose rows are in another record, counts where it is there (`unseen`).
    """
    if missing := [key for key in (*HEADER, "origins", "tests", "sanitizer", *TABLES) if key not in record]:
        return [f"the record has no {', '.join(missing)}"]
    origins = record["origins"]
    found = _test_problems(gpu_tests.of_ops(record["tests"], origins["tests"]), names)
    for op in (*names, *LIST_OPS, NO_OP):
        for about, words, of in (
            ("tests", "was tested on the GPU", sources.of_tests),
            ("sanitizer", "sanitizers looked at", sources.of),
            ("rows", "was measured", sources.of),
        ):
            if op in origins[about]:
                different = _different(origins[about][op]["sources"], of(op))
                found += [f"{_named(op)}: {path} is not what {words}" for path in different]
    for tool in TOOLS:
        known = {op: status for op, status in record["sanitizer"].get(tool, {}).items() if op in origins["sanitizer"]}
        found += [f"{tool} of {op}: {known.get(op, 'was not run')}" for op in names if known.get(op) != "clean"]
        found += [f"{tool} of {op}: {known[op]}" for op in LIST_OPS if known.get(op, "clean") != "clean"]
    for table, fields in TABLES.items():
        wrong = [row for row in record[table] if set(row) != set(fields)]
        found += [f"a row of {table} has other fields than {', '.join(fields)}: {wrong[0]}"] if wrong else []
    measured = {row["op"] for row in record["rows"] if row["impl"] == "fused"} & set(origins["rows"])
    return found + [f"{op} was not measured" for op in names if op not in measured]


def _different(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    return [path for path in sorted({*before, *now}) if before.get(path) != now.get(path)]


def _test_problems(tests: Record, names: Sequence[str]) -> list[str]:
    failures = [words for of_op in tests["failures"].values() for words in of_op]
    found = [f"{tests['failed']} tests failed: {', '.join(failures[:5])}"] if tests["failed"] else []
    unpassed = [op for op in (*names, NO_OP) if not tests["ops"].get(op, {}).get("passed")]
    return found + [f"no test of {_named(op)} passed" for op in unpassed]


def _named(op: str) -> str:
    return "no op" if op == NO_OP else op


# --- what it lacks ---------------------------------------------------------------------------------------------------


def untested(record: Record, names: Sequence[str]) -> list[str]:
    """The ops, NO_OP too, without tests that passed, or with one that failed."""
    tests = record.get("tests", {"ops": {}})
    counts = {op: tests["ops"].get(op, {"passed": 0, "failed": 0}) for op in names}
    return [op for op, found in counts.items() if found["failed"] or not found["passed"]]


def unsanitized(record: Record, names: Sequence[str]) -> list[str]:
    """The ops that some tool has not found clean."""
    found = record.get("sanitizer", {})
    return [op for op in names if any(found.get(tool, {}).get(op) != "clean" for tool in TOOLS)]


def unseen(record: Record) -> list[str]:
    """The ops over lists that some tool has not looked at, as in every record from before there were cases of them."""
    found = record.get("sanitizer", {})
    return [op for op in LIST_OPS if any(op not in found.get(tool, {}) for tool in TOOLS)]


def measured_labels(record: Record) -> frozenset[str]:
    """The labels, as kernels.py has them, of the cases that have a row of ours, and of the ops that have latencies."""
    rows = {
        f"{row['op']} {row['case']} {shape_text(row['shape'])} {row['dtype']}"
        for row in record.get("rows", [])
        if row["impl"] == "fused"
    }
    return frozenset(rows | {f"{row['op']} {LATENCY}" for row in record.get("host", []) if row["impl"] == "fused"})
