"""The README's block about training, made from gpu/train.json: speed, curves, a resumed run, whole runs.

Knows that record's parts and the marks; readme.py puts the text where it belongs.

    training_block(record)
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from fuselm.bench import machine
from fuselm.bench.learners import LEARNERS, Row
from fuselm.bench.learning import NUDGED, judged

TRAINING_BEGIN, TRAINING_END = "<!-- training:begin -->", "<!-- training:end -->"
APART_WORDS = (
    "Memory is what torch took of the GPU at most. "
    "Loss apart: how far the running mean of the loss is from the one with torch's ops, on the same batches from the "
    "same weights (rms over the steps). Noise is how far it is after a rounding error in those weights; a curve "
    "differs that is more than three times as far."
)
OLD_MARK = "†"  # of a row that is older than others
OLD_WORDS = (
    "{rows} are of the sources before the kernels of embedding, activations, RoPE and AdamW, and of random tokens; "
    "the plain model neither clipped its gradients nor had a schedule; memory is "
    "what torch had allocated."
)


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
            f"With `--deterministic`, {resume['steps']} steps run twice, and stopped half-way and resumed in another "
            f"process, {equal} the same to the bit in weights and averages{when}. "
            f"Its speed is {slower} of an eager run's.",
            "",
            *((_curves_line(record["curves"]), "") if "curves" in record else ()),  # of records before 2026-11-18
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
    learnt = any("curve" in row for row in shown)  # not in records before 2026-11-18
    old = [row for row in shown if "curve" not in row]
    more = (" MFU | loss apart |", "---:|---:|") if learnt else ("", "")
    words = [APART_WORDS] if learnt else []
    words += [OLD_WORDS.format(rows=f"Rows with {OLD_MARK}" if learnt else "These rows")] if old else []
    return [
        "| preset | tokens a step | trained by | tokens/s | first step | peak memory |" + more[0],
        "|---|---:|---|---:|---:|---:|" + more[1],
        *(_speed_line(row, date, learnt) for row in shown),
        "",
        " ".join(words),
    ]


def _speed_line(row: Row, date: str, learnt: bool) -> str:
    who = re.sub(r"(--[\w-]+)", r"`\1`", LEARNERS[row["learner"]].title)
    who += f" {OLD_MARK}" if learnt and "curve" not in row else ""
    who += "" if row.get("date", date) == date else f" ({row['date']})"
    what = row["preset"] + ("" if row.get("precision", "bf16") == "bf16" else f", {row['precision']}")
    line = (
        f"| {what} | {row['tokens_per_step']:,} | {who} | {row['tokens_per_second'] / 1e6:.3f} M "
        f"| {row['first_step_s']:.1f} s | {row['peak_memory_gib']:.1f} GiB |"
    )
    if not learnt:
        return line
    share = "" if row.get("mfu") is None else f"{row['mfu']:.1%}"
    noise = "" if row["noise"] is None else f" (noise {row['noise']:.4f})"
    apart = "" if row["gap"] is None else f"{row['gap']:.4f}{noise}"
    return f"{line} {share} | {apart}{' differs' if row['agrees'] is False else ''} |"


def _curves_line(rows: Sequence[Row]) -> str:
    """How far learning with the kernels is from learning with torch's ops, beside how far another seed is."""
    found = {(row["preset"], row["impl"], row["seed"]): row["losses"] for row in rows}
    steps, parts = len(rows[0]["losses"]) * rows[0]["every"], []
    for name in dict.fromkeys(row["preset"] for row in rows):
        torchs = found[name, "torch", 0]
        ours, other = (_farthest(found[name, *who], torchs) for who in (("auto", 0), ("torch", 1)))
        parts.append(
            f"{ours:.4f} ({name}, which goes from {torchs[0]:.2f} to {torchs[-1]:.2f}; another seed {other:.4f})"
        )
    return (
        f"Over the first {steps} steps on the built-in stories, the running mean of the loss is at most "
        f"{' and '.join(parts)} from the one with torch's ops."
    )


def _farthest(some: Sequence[float], others: Sequence[float]) -> float:
    return max(abs(one - other) for one, other in zip(some, others, strict=True))


def _deterministic_cost(rows: Sequence[Row]) -> str:
    by = {(row["preset"], row["learner"]): row["tokens_per_second"] for row in rows}
    shares = [
        f"{100 * by[preset, learner] / by[preset, 'fused']:.0f} % ({preset})"
        for preset, learner in by
        if learner == "fused-deterministic"
    ]
    return " and ".join(shares)
