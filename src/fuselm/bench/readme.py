"""Writes the figures of README.md, and gpu/roofline.png, from the records in gpu/; nobody types a figure.

Knows the records' rows and the marks in the README, nothing else: roofline from gpu/h200.json, training from
gpu/train.json.

    python -m fuselm.bench.readme            # write
    python -m fuselm.bench.readme --check    # exit code 1 when the README says something else than the record
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fuselm.bench.peers import NAMES
from fuselm.bench.report import Row, shape_text
from fuselm.files import write_whole

BEGIN, END = "<!-- roofline:begin -->", "<!-- roofline:end -->"
RECORD, PICTURE, README = Path("gpu/h200.json"), Path("gpu/roofline.png"), Path("README.md")
TRAINING, TRAINING_BEGIN, TRAINING_END = Path("gpu/train.json"), "<!-- training:begin -->", "<!-- training:end -->"
TITLES = {"fused": "fuselm", "torch": "torch", "compile": "torch.compile", "liger": "Liger", "quack": "QuACK"}


def block(record: Mapping[str, Any]) -> str:
    """The text between the marks, marks included."""
    present = [name for name in NAMES if any(row["impl"] == name for row in record["rows"])]
    return "\n".join(
        [
            BEGIN,
            f"Microseconds and, in brackets, percent of the speed of a plain copy that moves the same bytes, "
            f"{_machine(record)}. L2-cold medians; the copy and every peer are measured in the same run; the fastest "
            "of a row is bold.",
            "",
            *_roofline(record["rows"], present),
            "",
            *_decode(record["decode"]),
            f"![Share of copy speed for each shape and implementation]({PICTURE.as_posix()})",
            END,
        ]
    )


def training_block(record: Mapping[str, Any]) -> str:
    """The same for training: speed beside plain PyTorch, a resumed run, and runs from beginning to end."""
    resume, slower = record["resume"], _deterministic_cost(record["speed"])
    equal = "are" if resume["again_equal"] and resume["resumed_equal"] else "are NOT"
    return "\n".join(
        [
            TRAINING_BEGIN,
            f"{_machine(record)}, bf16, one run; each row in a process of its own, the first step from building the "
            "model on (kernels built before), memory as torch's peak.",
            "",
            "| preset | tokens a step | model | tokens/s | first step | peak memory |",
            "|---|---:|---|---:|---:|---:|",
            *(_speed_line(row) for row in record["speed"]),
            "",
            f"With `--deterministic`, {resume['steps']} steps run twice, and stopped half-way and resumed in another "
            f"process, {equal} the same to the bit in weights and averages. Its speed is {slower} of an eager run's.",
            "",
            "| command | best validation loss | at step | seconds of training | whole command |",
            "|---|---:|---:|---:|---:|",
            *(
                f"| `{run['command']}` | {run['best_loss']:.4f} | {run['best_step']:,} | {run['seconds']:.0f} "
                f"| {run['process_s']:.0f} s |"
                for run in record["runs"]
            ),
            "",
            *(f"![Loss of {run['name']} over steps](gpu/{run['name']}.png)" for run in record["runs"]),
            TRAINING_END,
        ]
    )


def _speed_line(row: Row) -> str:
    who = "plain PyTorch, torch.compile" if row["model"] == "plain" else f"fuselm, {row['mode']}"
    who = who.replace("compile", "`--compile`").replace("torch.`--compile`", "torch.compile")
    who = who.replace("eager deterministic", "`--deterministic`")
    return (
        f"| {row['preset']} | {row['tokens_per_step']:,} | {who} | {row['tokens_per_second'] / 1e6:.3f} M "
        f"| {row['first_step_s']:.1f} s | {row['peak_memory_gib']:.1f} GiB |"
    )


def _deterministic_cost(rows: Sequence[Row]) -> str:
    by = {(row["preset"], row["mode"]): row["tokens_per_second"] for row in rows if row["model"] == "ours"}
    shares = [
        f"{100 * by[preset, mode] / by[preset, 'eager']:.0f} % ({preset})"
        for preset, mode in by
        if mode == "eager deterministic"
    ]
    return " and ".join(shares)


def replaced(readme: str, new: str, begin: str = BEGIN, end: str = END) -> str:
    """The README with a block exchanged."""
    if readme.count(begin) != 1 or readme.count(end) != 1 or readme.index(begin) > readme.index(end):
        raise ValueError(f"README.md must have {begin} and, after it, {end}, once each. Put them where the table goes.")
    head, tail = readme.partition(begin)[0], readme.partition(end)[2]
    return head + new + tail


def _machine(record: Mapping[str, Any]) -> str:
    versions = record["versions"]
    parts = [f"torch {versions.get('torch', '?')}", f"CUDA {versions.get('cuda', '?')}"]
    parts += [f"{TITLES[name]} {versions[name]}" for name in ("liger", "quack") if name in versions]
    return f"{record['gpu']}, {', '.join(parts)}, {record['date']}"


def _roofline(rows: Sequence[Row], impls: Sequence[str]) -> list[str]:
    groups: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in rows:
        key = (row["op"], row["pass"], row["case"], shape_text(row["shape"]), row["dtype"])
        groups.setdefault(key, {})[row["impl"]] = row
    lines = [
        "| op | pass | case | shape | dtype | " + " | ".join(TITLES[name] for name in impls) + " |",
        "|---|---|---|---|---|" + "---:|" * len(impls),
    ]
    for names, members in groups.items():
        lines.append(f"| {' | '.join(names)} | {' | '.join(_cells(members, impls))} |")
    return lines


def _cells(members: Mapping[str, Row], impls: Sequence[str]) -> list[str]:
    """Microseconds and, where there was a copy to compare with, percent of its speed; the fastest bold."""
    best = min(row["gpu_us"] for row in members.values())
    cells = []
    for name in impls:
        row = members.get(name)
        if row is None:
            cells.append("")
            continue
        share = "" if row["share_of_copy"] is None else f" ({100 * row['share_of_copy']:.0f})"
        cells.append(f"**{row['gpu_us']:.1f}**{share}" if row["gpu_us"] == best else f"{row['gpu_us']:.1f}{share}")
    return cells


def _decode(rows: Sequence[Row]) -> list[str]:
    """One sentence for each decode shape: latency of a small call inside a CUDA graph."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["op"], shape_text(row["shape"])), []).append(row)
    lines = []
    for (op, shape), members in groups.items():
        times = ", ".join(f"{TITLES[row['impl']]} {row['p50_us']:.2f}" for row in members)
        lines.append(f"- {op} {shape} in a CUDA graph, µs: {times}; an empty kernel {members[0]['empty_us']:.2f}.")
    return [*lines, ""] if lines else []


def main(arguments: Sequence[str] | None = None) -> None:
    """Write or check; run from the root of the repository."""
    parser = argparse.ArgumentParser(prog="python -m fuselm.bench.readme", description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing; say whether the README is up to date")
    given = parser.parse_args(arguments)
    for path in (RECORD, README):
        if not path.exists():
            sys.exit(f"readme: {path} is not here. Run this from the root of the repository, after `make gpu-check`.")
    record, readme = json.loads(RECORD.read_text(encoding="utf-8")), README.read_text(encoding="utf-8")
    try:
        wanted = replaced(readme, block(record))
        if TRAINING.exists():
            training = json.loads(TRAINING.read_text(encoding="utf-8"))
            wanted = replaced(wanted, training_block(training), TRAINING_BEGIN, TRAINING_END)
    except ValueError as error:
        sys.exit(f"readme: {error}")
    if given.check:
        sys.exit(0 if wanted == readme else "readme: README.md is behind the record: python -m fuselm.bench.readme")
    from fuselm.bench import plots

    write_whole(README, wanted)
    plots.roofline(record["rows"], PICTURE, record["gpu"])


if __name__ == "__main__":
    main()
