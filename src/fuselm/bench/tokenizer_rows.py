"""The tokenizer bench's rows: their fields, the figures made of them, and the files they are written into.

Knows no library and measures nothing: samples come from tokenizer.py.

    results.rows.append(make_row("encode", "tiktoken", 1, 10.0, samples))
    print(summary(results.rows)["encode_tiktoken_speedup"])
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fuselm.bench.report import Row, as_row, to_csv, to_json
from fuselm.bench.tokenizer_process import Sample
from fuselm.files import write_whole

ALONE = "one thread"  # fuselm again, with one
# Who takes part in what; fuselm is first.
TASKS = {
    "train": ("fuselm", "tokenizers"),
    "encode": ("fuselm", "tiktoken", "tokenizers"),
    "encode_array": ("fuselm", "tiktoken"),
    "encode_threads": ("fuselm", ALONE),
    "encode_bytes_threads": ("fuselm", ALONE),
    "encode_batch": ("fuselm", "tiktoken", "tokenizers"),
    "decode": ("fuselm", "tiktoken", "tokenizers"),
    "encode_iterable": ("fuselm",),
    "small": ("fuselm", "tiktoken", "tokenizers"),
}
# A row. `megabytes` (of 10^6 bytes) is what this library was given, `seconds` the median of `repeats`; `tokens` are the
# ids made, in train the entries of the vocabulary. Memory is that of a process which did nothing else.
ROW_FIELDS = (
    "task",
    "impl",
    "threads",
    "megabytes",
    "seconds",
    "seconds_min",
    "seconds_max",
    "repeats",
    "mb_per_s",
    "us_per_call",
    "tokens",
    "peak_rss_mb",
    "start_rss_mb",
)


@dataclass
class Results:
    """What a run has found so far; `notes` say what was not measured, or not as asked, and why."""

    megabytes: float = 0.0
    rows: list[Row] = field(default_factory=list)
    notes: list[Row] = field(default_factory=list)

    def note(self, task: str, impl: str, words: str) -> None:
        """Say why something has no row, or one to be read with care."""
        self.notes.append({"task": task, "impl": impl, "note": words})


def make_row(task: str, impl: str, threads: int, megabytes: float, samples: Sequence[Sample]) -> Row:
    """The row of one library in one task."""
    seconds = [sample.seconds for sample in samples]
    median = statistics.median(seconds)
    # Of memory the most there was: a median would hide the worst.
    memory = {
        key: max((getattr(sample, key) for sample in samples if getattr(sample, key) is not None), default=None)
        for key in ("peak_rss_mb", "start_rss_mb")
    }
    return as_row(
        {
            "task": task,
            "impl": impl,
            "threads": threads,
            "megabytes": megabytes,
            "seconds": median,
            "seconds_min": min(seconds),
            "seconds_max": max(seconds),
            "repeats": len(samples),
            "mb_per_s": megabytes / median,
            "us_per_call": median * 1e6 if task == "small" else None,
            "tokens": samples[0].tokens,
            **memory,
        },
        ROW_FIELDS,
    )


def summary(rows: Sequence[Row]) -> dict[str, float]:
    """The figures that matter under names of their own: how many times faster than whom, seconds, memory."""
    found = {(row["task"], row["impl"]): row for row in rows}
    figures: dict[str, float] = {}

    def ratio(name: str, ours: tuple[str, str], other: tuple[str, str]) -> None:
        if ours in found and other in found:
            figures[name] = float(f"{found[ours]['mb_per_s'] / found[other]['mb_per_s']:.4g}")

    for task, (ours, *others) in TASKS.items():
        for other in others:
            ratio(speedup_name(task, other), (task, ours), (task, other))
    for (task, impl), row in found.items():
        prefix = task if impl == "fuselm" else f"{task}_{impl}"
        if row["peak_rss_mb"] is not None:
            figures |= {f"{prefix}_{key}": row[key] for key in ("seconds", "peak_rss_mb", "start_rss_mb")}
    return figures


def speedup_name(task: str, other: str) -> str:
    """What the ratio of our speed to another's in a task is called."""
    return f"{task.removeprefix('encode_')}_speedup" if other == ALONE else f"{task}_{other}_speedup"


def write_rows(folder: Path, header: Mapping[str, Any], results: Results) -> list[Path]:
    """rows.csv and rows.json in a folder."""
    write_whole(folder / "rows.csv", to_csv(results.rows, ROW_FIELDS))
    document = {**header, **summary(results.rows), "rows": results.rows, "notes": results.notes}
    write_whole(folder / "rows.json", to_json(document))
    return [folder / "rows.csv", folder / "rows.json"]
