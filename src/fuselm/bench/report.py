"""The shape of rows and how they are written: field names, CSV and JSON, and files that are whole or not there.

Knows no measurement and no framework. `rows` come from kernels.py, `decode` and `host` from latency.py.

    write_rows(Path("results"), {"label": "H200", ...}, results)
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fuselm.files import write_whole

Row = dict[str, Any]

# A row of `rows`. Times are microseconds on `device`, which is "cpu" or a GPU's name: on a CPU, gpu_us is the clock's
# time of a call. Errors are relative to the rms of the float64 truth, the worst tensor counting; None: not compared.
# extra_bytes is what a pass "both" holds at its peak on a GPU beyond inputs, loss and gradients; None elsewhere.
ROW_FIELDS = (
    "op",
    "pass",
    "case",
    "dtype",
    "shape",
    "impl",
    "device",
    "gpu_us",
    "gpu_us_p10",
    "gpu_us_p90",
    "call_us",
    "bytes",
    "flops",
    "copy_us",
    "share_of_copy",
    "tbytes_per_s",
    "max_error",
    "rms_error",
    "reference_error",
    "reference_rms_error",
    "graph",
    "extra_bytes",
)
# What a pass must move at least for its row to count as large: there the launch no longer shows.
LARGE_BYTES = 256 << 20
# Operations for each byte from which on arithmetic bounds a row, so that a copy is no measure of it.
ARITHMETIC = 100
# A row of `decode`: p50_us.. inside a CUDA graph, sync_p50_us.. called one by one with a wait after each.
DECODE_FIELDS = (
    "op",
    "case",
    "dtype",
    "shape",
    "impl",
    "device",
    "p50_us",
    "p95_us",
    "p99_us",
    "rows_per_s",
    "empty_us",
    "sync_p50_us",
    "sync_p95_us",
    "sync_p99_us",
    "graph",
)
# A row of `host`: microseconds of host time for one call, without and with a gradient wanted.
HOST_FIELDS = ("op", "case", "dtype", "shape", "impl", "device", "call_us", "call_grad_us")


@dataclass
class Results:
    """What a run has found so far. `notes` are things that could not be measured, each with its reason."""

    rows: list[Row] = field(default_factory=list)
    decode: list[Row] = field(default_factory=list)
    host: list[Row] = field(default_factory=list)
    notes: list[Row] = field(default_factory=list)

    def tables(self) -> dict[str, list[Row]]:
        """The three tables and the notes, under the names they have in files."""
        return {"rows": self.rows, "decode": self.decode, "host": self.host, "notes": self.notes}


def write_rows(folder: Path, header: Mapping[str, Any], results: Results) -> list[Path]:
    """rows.csv and rows.json in a folder that is made when it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "rows.csv", to_csv(results.rows, ROW_FIELDS))
    write_whole(folder / "rows.json", to_json({**header, **results.tables()}))
    return [folder / "rows.csv", folder / "rows.json"]


def to_csv(rows: Sequence[Row], fields: Sequence[str]) -> str:
    """Rows as CSV with a header line; a shape is written as 32768x768."""
    text = io.StringIO()
    writer = csv.DictWriter(text, fields, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow(row | {"shape": shape_text(row["shape"])} if "shape" in row else row)
    return text.getvalue()


def to_json(document: Mapping[str, Any]) -> str:
    """JSON with one line for each row of a table: short enough to keep, and a diff shows which row moved."""
    lines = []
    for key, value in document.items():
        if isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
            body = "[\n" + ",\n".join(f"  {json.dumps(row)}" for row in value) + "\n ]"
        else:
            body = json.dumps(value, indent=1).replace("\n", "\n ")
        lines.append(f" {json.dumps(key)}: {body}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def is_arithmetic(row: Row) -> bool:
    """Whether arithmetic bounds it, and not memory."""
    return bool(row["flops"] > ARITHMETIC * row["bytes"])


def ops_of_arithmetic(rows: Sequence[Row]) -> set[str]:
    """The ops of which some row is bound by arithmetic: none of theirs is shown beside a copy."""
    return {row["op"] for row in rows if is_arithmetic(row)}


def shape_text(shape: Sequence[int]) -> str:
    """(32768, 768) as 32768x768."""
    return "x".join(map(str, shape))


def as_row(values: Mapping[str, Any], fields: Sequence[str]) -> Row:
    """The fields in their order, floats with five digits: a clock does not give more, and a record is kept in git."""
    return {key: float(f"{values[key]:.5g}") if isinstance(values[key], float) else values[key] for key in fields}
