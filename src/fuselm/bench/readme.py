"""Writes the figures of README.md, and gpu/roofline.png, from the records in gpu/; nobody types a figure.

Knows the records' rows and the marks in the README, nothing else: roofline from gpu/h200.json, training from
gpu/train.json, AdamW from gpu/optimizer.json.

    python -m fuselm.bench.readme            # write
    python -m fuselm.bench.readme --check    # exit code 1 when the README says something else than the record
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fuselm.bench import machine, merging
from fuselm.bench.peers import FLOORS, NAMES
from fuselm.bench.promises import Finding, findings
from fuselm.bench.readme_training import TRAINING_BEGIN, TRAINING_END, training_block
from fuselm.bench.report import LARGE_BYTES, Row, ops_of_arithmetic, shape_text
from fuselm.files import write_whole

BEGIN, END = "<!-- roofline:begin -->", "<!-- roofline:end -->"
RECORD, PICTURE, README = Path("gpu/h200.json"), Path("gpu/roofline.png"), Path("README.md")
TRAINING = Path("gpu/train.json")
OPTIMIZER, OPTIMIZER_BEGIN, OPTIMIZER_END = Path("gpu/optimizer.json"), "<!-- adamw:begin -->", "<!-- adamw:end -->"
TITLES = {
    "fused": "fuselm",
    "torch": "torch",
    "compile": "torch.compile",
    "liger": "Liger",
    "quack": "QuACK",
    "matmuls": "its matmuls alone",
}
# Cases of an op that the table shows: a page is read, a record is looked things up in.
MOST_CASES = 3

Groups = dict[tuple[str, ...], dict[str, Row]]  # op, pass, case, shape, dtype: a row for each implementation


def block(record: Mapping[str, Any]) -> str:
    """The text between the marks, marks included."""
    groups = _groups(record["rows"])
    of_arithmetic = ops_of_arithmetic(record["rows"])
    copied = {key: members for key, members in groups.items() if key[0] not in of_arithmetic}
    bound = {key: members for key, members in groups.items() if key[0] in of_arithmetic}
    return "\n".join(
        [
            BEGIN,
            "Microseconds and, in brackets, percent of the speed of a plain copy that moves the same bytes, "
            f"{machine.sentence(record)}{_older(record)}. L2-cold medians; the copy and every peer are measured in the "
            "same run; the fastest of a row is bold. This table shows of each op cases that move "
            f"{LARGE_BYTES >> 20} MiB or more, {MOST_CASES} at most, of every kind first; all {len(groups)} cases and "
            f"passes there are stand in {RECORD.as_posix()}.",
            "",
            *_table(_shown(copied), _copy_cell),
            "",
            *_memory(bound),
            *_decode(record["decode"]),
            *_missed(record),
            f"![Share of copy speed for each shape and implementation]({PICTURE.as_posix()})",
            END,
        ]
    )


def _older(record: Mapping[str, Any]) -> str:
    """The ops whose rows are of another day than the record, which they outlive while their sources stay."""
    days: dict[str, list[str]] = {}
    for op, origin in record.get("origins", {}).get("rows", {}).items():
        if origin["date"] != record["date"]:
            days.setdefault(origin["date"], []).append(op)
    words = "; ".join(f"{', '.join(days[date])}: {date}" for date in sorted(days))
    return f" ({words})" if words else ""


def _missed(record: Mapping[str, Any]) -> list[str]:
    """What the table of large cases would hide."""
    found = findings(record)
    missed = [finding for finding in found if not finding.held]
    counted = Counter(finding.op for finding in missed)
    late = sum(map(merging.is_late, record.get("notes", [])))
    words = ", ".join(f"{count} of {op} ({_by(op, missed)})" for op, count in counted.items())
    return [
        f"Of {len(found)} promises (no peer more than 2 % faster, and limits on shares, memory and host time) "
        f"{len(found) - len(missed)} hold."
        + (f" {late} cases of these sources wait to be measured." if late else "")
        + (f" Missed: {words}; `python -m fuselm.bench.promises` says which." if missed else ""),
        "",
    ]


def _by(op: str, missed: Sequence[Finding]) -> str:
    """How far the worst of an op's findings is beyond its limit, whichever side of it is the good one."""
    values = [(finding.value, finding.limit) for finding in missed if finding.op == op and finding.value]
    worst = max((max(value / limit, limit / value) for value, limit in values), default=None)
    return "not measured" if worst is None else f"beyond the limit by {worst - 1:.1%} at worst"


def optimizer_block(record: Mapping[str, Any]) -> str:
    """A paragraph on AdamW and the norm of gradients, marks included."""
    rows = {(row["op"], row["case"], row["impl"]): row for row in record["rows"]}
    us = {key: f"{row['gpu_us']:,.0f}" for key, row in rows.items()}
    step = ("adamw", "fp32")
    return "\n".join(
        [
            OPTIMIZER_BEGIN,
            f"A step of AdamW over the {record['parameters'] / 1e6:.0f} M fp32 parameters of {record['preset']} takes "
            f"{us[*step, 'fused']} µs on an {record['gpu']} (torch {record['versions']['torch']}, {record['date']}), "
            f"{rows[*step, 'fused']['share_of_copy']:.2f} times as fast as a copy of the same bytes; torch's fused one "
            f"takes {us[*step, 'torch']}, its `foreach` one {us[*step, 'torch, foreach']}. With bf16 parameters and "
            f"fp32 masters it takes {us['adamw', 'bf16 with masters', 'fused']}. The norm of all gradients takes "
            f"{us['global_norm', 'fp32', 'fused']} µs, torch's {us['global_norm', 'fp32', 'torch']}. The figures are "
            f"those of `{OPTIMIZER.as_posix()}`, which `python -m fuselm.bench.optimizer` writes.",
            OPTIMIZER_END,
        ]
    )


def replaced(readme: str, new: str, begin: str = BEGIN, end: str = END) -> str:
    """The README with a block exchanged."""
    if readme.count(begin) != 1 or readme.count(end) != 1 or readme.index(begin) > readme.index(end):
        raise ValueError(f"README.md must have {begin} and, after it, {end}, once each. Put them where the table goes.")
    head, tail = readme.partition(begin)[0], readme.partition(end)[2]
    return head + new + tail


def _groups(rows: Sequence[Row]) -> Groups:
    groups: Groups = {}
    for row in rows:
        key = (row["op"], row["pass"], row["case"], shape_text(row["shape"]), row["dtype"])
        groups.setdefault(key, {})[row["impl"]] = row
    return groups


def _bytes(members: Mapping[str, Row]) -> int:
    return max(row["bytes"] for row in members.values())


def _shown(groups: Groups) -> Groups:
    """Of each op the cases of which a pass is large: the largest of every kind, then the next largest, in all passes.

    Sizes count in MiB: a weight must not decide between two cases of one size; the record's order does.
    """
    sizes: dict[tuple[str, ...], int] = {}
    for (op, _, *case), members in groups.items():
        sizes[op, *case] = max(sizes.get((op, *case), 0), _bytes(members) >> 20)
    chosen: set[tuple[str, ...]] = set()
    for op in dict.fromkeys(key[0] for key in sizes):
        large = [key for key, size in sizes.items() if key[0] == op and size >= LARGE_BYTES >> 20]
        large.sort(key=lambda key: -sizes[key])
        kinds = {(case, dtype): (name, case, shape, dtype) for name, case, shape, dtype in reversed(large)}
        first = [key for key in large if key in kinds.values()]
        chosen.update([*first, *(key for key in large if key not in first)][:MOST_CASES])
    return {key: members for key, members in groups.items() if (key[0], *key[2:]) in chosen}


def _table(groups: Groups, cell: Callable[[Row], str]) -> list[str]:
    """A line for each group and a column for each implementation that has a row, the fastest bold; floors are none."""
    present = [name for name in NAMES if any(name in members for members in groups.values())]
    lines = [
        "| op | pass | case | shape | dtype | " + " | ".join(TITLES[name] for name in present) + " |",
        "|---|---|---|---|---|" + "---:|" * len(present),
    ]
    for names, members in groups.items():
        best = min((row["gpu_us"] for name, row in members.items() if name not in FLOORS), default=None)
        cells = [
            "" if row is None else f"{_bold(row['gpu_us'], name not in FLOORS and row['gpu_us'] == best)}{cell(row)}"
            for name, row in ((name, members.get(name)) for name in present)
        ]
        lines.append(f"| {' | '.join(names)} | {' | '.join(cells)} |")
    return lines


def _bold(us: float, fastest: bool) -> str:
    return f"**{us:.1f}**" if fastest else f"{us:.1f}"


def _copy_cell(row: Row) -> str:
    return "" if row["share_of_copy"] is None else f" ({100 * row['share_of_copy']:.0f})"


def _memory_cell(row: Row) -> str:
    return "" if row.get("extra_bytes") is None else f" ({row['extra_bytes'] / 2**20:.0f})"


def _memory(bound: Groups) -> list[str]:
    """The ops that matmuls bound: beside those, and with the memory that they take."""
    if not bound:
        return []
    words = (
        "A copy is no measure of an op that arithmetic bounds from some hundred rows on. Microseconds and, in "
        "brackets, MiB at the peak beyond inputs, results and gradients:"
    )
    return [words, "", *_table(bound, _memory_cell), ""]


def _decode(rows: Sequence[Row]) -> list[str]:
    """One sentence for each op's first, and smallest, decode shape: latency of a small call inside a CUDA graph."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        members = groups.setdefault(row["op"], [])
        members += [row] if not members or row["shape"] == members[0]["shape"] else []
    lines = []
    for op, members in groups.items():
        times = ", ".join(f"{TITLES[row['impl']]} {row['p50_us']:.2f}" for row in members)
        shape, empty = shape_text(members[0]["shape"]), members[0]["empty_us"]
        lines.append(f"- {op} {shape} in a CUDA graph, µs: {times}; an empty kernel {empty:.2f}.")
    return [*lines, ""] if lines else []


# The blocks beside the roofline's, each made of a record of its own.
OTHERS = (
    (TRAINING, training_block, TRAINING_BEGIN, TRAINING_END),
    (OPTIMIZER, optimizer_block, OPTIMIZER_BEGIN, OPTIMIZER_END),
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Write or check; run from the root of the repository."""
    parser = argparse.ArgumentParser(prog="python -m fuselm.bench.readme", description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing; say whether the README is up to date")
    given = parser.parse_args(arguments)
    for path in (RECORD, README):
        if not path.exists():
            sys.exit(f"readme: {path} is not here. Run this from the root of the repository, after `make gpu-check`.")
    record, readme = merging.load(RECORD) or {}, README.read_text(encoding="utf-8")
    try:
        wanted = replaced(readme, block(record))
        for path, made_of, begin, end in OTHERS:
            if path.exists():
                wanted = replaced(wanted, made_of(json.loads(path.read_text(encoding="utf-8"))), begin, end)
    except ValueError as error:
        sys.exit(f"readme: {error}")
    if given.check:
        if wanted != readme:
            sys.exit("readme: README.md is behind the record: python -m fuselm.bench.readme")
        print("README.md is up to date")
        return
    from fuselm.bench import plots

    write_whole(README, wanted)
    plots.roofline(record["rows"], PICTURE, record["gpu"])


if __name__ == "__main__":
    main()
