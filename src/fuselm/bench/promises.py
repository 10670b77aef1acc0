"""What the kernels promise, held against a GPU record: says for each op which rows hold, and prints those that do not.

Knows rows and limits, and measures nothing. The peers' figures are of the same record. QuACK's are of another day, kept
here with the speed of a copy on that day: they are scaled by what a copy does in the record. Exit code 1 for a miss.
What no sanitizer has looked at, or no bench, is told too, and is no miss.

    python -m fuselm.bench.promises gpu/h200.json
    python -m fuselm.bench.promises gpu/h200.json --json | jq '.[] | select(.held | not)'
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fuselm.bench import merging
from fuselm.bench.report import LARGE_BYTES, Row, is_arithmetic, shape_text

# The share of a copy's speed that large rows reach at least, by op and pass.
ELEMENTWISE = ("gelu", "silu", "relu2", "swiglu", "geglu", "add", "mul")
SHARES = {
    **{(op, which): 0.95 for op in ELEMENTWISE for which in ("forward", "backward")},
    **{(op, which): 0.93 for op in ("rope", "rope_qkv") for which in ("forward", "backward")},
    ("embedding", "backward"): 0.50,
    ("layer_norm", "forward"): 0.95,
    ("layer_norm", "backward"): 0.88,
    ("softmax", "forward"): 0.95,
    ("cross_entropy", "both"): 0.90,
}
# No peer is faster by more than the noise of a measurement.
PEERS, SLOWER = ("torch", "compile", "liger"), 1.02
HOST_SLOWER = 1.2
# Forward and backward of bf16 logits by QuACK 0.6.5 on an H200 on which a copy of this size did 4.22 TB/s.
QUACK_US, QUACK_COPY_TB, QUACK_SHARE = {(8192, 50304): 750.0, (8192, 131072): 1682.0}, 4.22, 0.65
FLOOR_SLOWER, EXTRA_BYTES = 1.15, 300 << 20


@dataclass(frozen=True)
class Finding:
    """One promise at one place: the value found (None when there is no such row) and the limit it is held against."""

    op: str
    promise: str
    where: str
    value: float | None
    limit: float
    at_least: bool = False

    @property
    def held(self) -> bool:
        """Whether the promise is kept; what was not measured is not kept."""
        if self.value is None:
            return False
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def __str__(self) -> str:
        found = "not measured" if self.value is None else f"{self.value:,.3f}"
        return f"{self.where}: {self.promise} {found}, at {'least' if self.at_least else 'most'} {self.limit:,.3f}"


def findings(record: Mapping[str, Any]) -> list[Finding]:
    """Every promise at every row it is about."""
    groups: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in record["rows"]:
        key = (row["op"], row["pass"], row["case"], row["dtype"], tuple(row["shape"]))
        groups.setdefault(key, {})[row["impl"]] = row
    found = [finding for group in groups.values() if "fused" in group for finding in _of_group(group)]
    return found + _of_hosts(record["host"]) + list(_missing(record["rows"]))


def _of_group(group: Mapping[str, Row]) -> Iterator[Finding]:
    """The promises about one op, pass, case, dtype and shape, of which `group` has a row for each implementation."""
    row = group["fused"]
    op, us, where = row["op"], row["gpu_us"], _where(row)
    share = SHARES.get((op, row["pass"]))
    if share is not None and row["bytes"] >= LARGE_BYTES:
        yield Finding(op, "share of a copy's speed", where, row["share_of_copy"], share, at_least=True)
    if there := [group[name] for name in PEERS if name in group]:
        best = min(there, key=lambda peer: peer["gpu_us"])
        yield Finding(op, f"µs ({best['impl']} {best['gpu_us']:,.3f})", where, us, SLOWER * best["gpu_us"])
    if (op, row["pass"], row["dtype"]) == ("cross_entropy", "both", "bfloat16") and tuple(row["shape"]) in QUACK_US:
        copy_tb = row["bytes"] / row["copy_us"] / 1e6
        quack_us = QUACK_US[tuple(row["shape"])] * QUACK_COPY_TB / copy_tb
        yield Finding(op, f"µs (QuACK {quack_us:,.0f})", where, us, QUACK_SHARE * quack_us)
    if (op, row["pass"]) == ("linear_cross_entropy", "both"):
        if is_arithmetic(row):  # of few rows a loss takes as long as a tenth of their matmuls
            floor = group["matmuls"]["gpu_us"] if "matmuls" in group else None
            beside = None if floor is None else us / floor
            yield Finding(op, "times the three matmuls", where, beside, FLOOR_SLOWER)
        extra = None if row["extra_bytes"] is None else row["extra_bytes"] / 2**20
        yield Finding(op, "MiB beyond inputs, loss and gradients", where, extra, EXTRA_BYTES / 2**20)


def _of_hosts(rows: Sequence[Row]) -> list[Finding]:
    """Host time of a call beside torch's, for each op that has both."""
    by = {(row["op"], row["impl"]): row for row in rows}
    return [
        Finding(op, "µs of host time for a call", _where(row), row["call_us"], HOST_SLOWER * by[op, "torch"]["call_us"])
        for (op, impl), row in by.items()
        if impl == "fused" and (op, "torch") in by
    ]


def _missing(rows: Sequence[Row]) -> Iterator[Finding]:
    """Shapes that a promise names and that an op in the record was not measured at."""
    measured = {tuple(row["shape"]) for row in rows if (row["op"], row["pass"]) == ("cross_entropy", "both")}
    if any(row["op"] == "cross_entropy" for row in rows):
        for shape in sorted(QUACK_US.keys() - measured):
            yield Finding("cross_entropy", "µs (beside QuACK)", f"both {shape_text(shape)}", None, QUACK_US[shape])


def _where(row: Row) -> str:
    words = (row.get("pass", "host"), row["case"], shape_text(row["shape"]), row["dtype"])
    return " ".join(words)


def report(found: Sequence[Finding]) -> str:
    """A line for each op, and under it one for each promise that is not kept."""
    lines = []
    for op in dict.fromkeys(finding.op for finding in found):
        of_op = [finding for finding in found if finding.op == op]
        missed = [finding for finding in of_op if not finding.held]
        lines.append(f"{op}: {len(of_op) - len(missed)} of {len(of_op)} promises hold")
        lines += [f"  missed: {finding}" for finding in missed]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the report of a record; exit code 1 when a promise is not kept."""
    parser = argparse.ArgumentParser(
        prog="python -m fuselm.bench.promises",
        description=__doc__.partition("\n")[0],
        epilog=f"A peer may be {SLOWER - 1:.0%} faster, within the noise. The exit code is 1 when a promise is missed.",
    )
    parser.add_argument("record", type=Path, nargs="?", default=Path("gpu/h200.json"))
    parser.add_argument("--json", action="store_true", help="a list of all findings instead")
    given = parser.parse_args(arguments)
    try:
        record = merging.load(given.record)
        if record is None:
            sys.exit(f"promises: there is no {given.record}. Name a record, or make one: make gpu-check")
        found = findings(record)
    except (KeyError, TypeError, ValueError) as error:
        sys.exit(f"promises: {given.record} is not a GPU record: {error!r}. Make one with this version: make gpu-check")
    if given.json:
        print(json.dumps([{**dataclasses.asdict(finding), "held": finding.held} for finding in found], indent=1))
    else:
        late = sum(map(merging.is_late, record.get("notes", [])))
        waiting = [f"{late} cases wait to be measured: make gpu-check PART=bench REST=1"] if late else []
        unseen = [f"{op}: no sanitizer has looked at it" for op in merging.unseen(record)]
        print("\n".join([report(found), *unseen, *waiting]))
    sys.exit(0 if all(finding.held for finding in found) else 1)


if __name__ == "__main__":
    main()
