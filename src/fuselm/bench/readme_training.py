"""The README's block about training, made from gpu/train.json: speed, distances of curves, a resumed run, whole runs.

Knows that record's parts and the marks; readme.py puts the text where it belongs.

    training_block(record)
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from fuselm.bench import machine
from fuselm.bench.learners import LEARNERS, Row
from fuselm.bench.learning import NUDGED, judged

TRAINING_BEGIN, TRAINING_END = "<!-- training:begin -->", "<!-- training:end -->"
APART_WORDS = (
    "Memory is what torch took of the GPU at most. "
    "Loss apart: how far the running mean of the loss is from the one with torch's ops, on the same batches from the "
    "same weights (rms over {steps}). Noise is how far it is after a rounding error in those weights; a curve "
    "differs that is more than three times as far. `fuselm train` takes a CUDA graph where one fits the memory and the "
    "step; eager is `--no-cuda-graph`."
)
FOUND_MARK = "†"  # of a first step that found on disk what torch.compile had made before
FOUND_WORDS = f"{FOUND_MARK}: torch.compile had compiled these on this machine before."
PLAIN = "plain-compile"  # what others are compared with


def training_block(record: Mapping[str, Any]) -> str:
    """The text between the marks, marks included: speed and curves, a resumed run, and runs from beginning to end."""
    resume, slower = record["resume"], _deterministic_cost(record["speed"])
    when = _on_another_day(record, "resume")
    equal = "are" if resume["again_equal"] and resume["resumed_equal"] else "are NOT"
    return "\n".join(
        [
            TRAINING_BEGIN,
            f"{machine.sentence(record)}, bf16; each row in a process of its own, the first step from building the "
            "model on (kernels built before). Torch's ops: our model and trainer with those "
            "in the place of ours.",
            "",
            *_speed_table(record["speed"], record["date"]),
            "",
            *_lead_lines(record["speed"]),
            f"With `--deterministic`, {resume['steps']} steps run twice, and stopped half-way and resumed in another "
            f"process, {equal} the same to the bit in weights and averages{when}. "
            f"Its speed is {slower} of an eager run's.",
            "",
            f"| command{_on_another_day(record, 'runs')} | best validation loss | at step | seconds of training "
            "| whole command |",
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


def _on_another_day(record: Mapping[str, Any], part: str) -> str:
    """The date of a part that was not measured with the rest."""
    date = record["measured"][part]
    return "" if date == record["date"] else f" ({date})"


def _speed_table(rows: Sequence[Row], date: str) -> list[str]:
    """A line for each learner but the nudged one, which is there to say what noise is."""
    shown = [row for row in judged(rows) if row["learner"] != NUDGED]
    found = any(row.get("found_compiled") for row in shown)
    words = [APART_WORDS.format(steps=_steps(rows)), *([FOUND_WORDS] if found else [])]
    return [
        "| preset | tokens a step | trained by | tokens/s | first step | peak memory | MFU | loss apart |",
        "|---|---:|---|---:|---:|---:|---:|---:|",
        *(_speed_line(row, date) for row in shown),
        "",
        " ".join(words),
    ]


def _speed_line(row: Row, date: str) -> str:
    who = re.sub(r"(--[\w-]+)", r"`\1`", LEARNERS[row["learner"]].title)
    who += "" if row.get("date", date) == date else f" ({row['date']})"
    what = row["preset"] + ("" if row["precision"] == "bf16" else f", {row['precision']}")
    found = f" {FOUND_MARK}" if row.get("found_compiled") else ""
    share = "" if row["mfu"] is None else f"{row['mfu']:.1%}"
    noise = "" if row["noise"] is None else f" (noise {_exact(row['noise'])})"
    apart = "" if row["gap"] is None else f"{_exact(row['gap'])}{noise}"
    return (
        f"| {what} | {row['tokens_per_step']:,} | {who} | {row['tokens_per_second'] / 1e6:.3f} M "
        f"| {row['first_step_s']:.1f} s{found} | {row['peak_memory_gib']:.1f} GiB | {share} "
        f"| {apart}{' differs' if row['agrees'] is False else ''} |"
    )


def _steps(rows: Sequence[Row]) -> str:
    """How many steps curves have: what most have, and those that have others."""
    counts = {row["preset"]: row["steps"] for row in rows}
    usual = statistics.mode(counts.values())
    others = [f"of {preset} {count}" for preset, count in counts.items() if count != usual]
    return ", ".join([f"{usual} steps", *others])


def _exact(distance: float) -> str:
    return f"{distance:.4f}" if distance >= 0.001 else f"{distance:.6f}"


def _lead_lines(rows: Sequence[Row]) -> list[str]:
    """How fast ours are beside a plain model, of presets that have one."""
    speeds = {(row["preset"], row["learner"]): row["tokens_per_second"] for row in rows}
    parts = []
    for preset in (preset for preset, learner in speeds if learner == PLAIN):
        ours = [
            f"{speeds[preset, learner] / speeds[preset, PLAIN]:.2f} ({words})"
            for learner, words in (("fused", "eager"), ("fused-graph", "CUDA graph"), ("fused-compile", "`--compile`"))
            if (preset, learner) in speeds
        ]
        parts += [f"{preset} {', '.join(ours)}"] if ours else []
    return [f"Tokens/s beside plain PyTorch under torch.compile: {'; '.join(parts)}.", ""] if parts else []


def _deterministic_cost(rows: Sequence[Row]) -> str:
    by = {(row["preset"], row["learner"]): row["tokens_per_second"] for row in rows}
    shares = [
        f"{100 * by[preset, learner] / by[preset, 'fused']:.0f} % ({preset})"
        for preset, learner in by
        if learner == "fused-deterministic" and (preset, "fused") in by
    ]
    return " and ".join(shares)
