"""A training run on one page of Markdown: what was trained, how, and what came of it. Knows the files of a run.

Every figure is from log.jsonl, from config.json or from the facts that the caller has; what nobody knows is left out.
The curve is shown where it has been drawn (see curves.py) under the name CURVE.

    summary(Path("runs/demo"))["best_loss"]
    write_report(Path("runs/demo"), {"parameters": 2_124_480, "device": "NVIDIA H200", "command": sys.argv})

Facts with a place on the page: preset, parameters, active_parameters, corpus, train_tokens, valid_tokens, vocab_size,
tokenizer; precision, device, micro_batch, compile, and any other fact, which is shown under its own name;
peak_memory_bytes; sample, a text by the best weights, and stories, how many of how many were told well; command and
resume, texts or lists of arguments.
"""

from __future__ import annotations

import math
import re
import shlex
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fuselm.bench.curves import Record, best_evaluation, number, of_kind, read_config, read_records
from fuselm.files import write_whole

REPORT, CURVE = "report.md", "curve.png"
LONGEST_SAMPLE = 2000  # letters; a page is a page
ENDINGS = {
    "done": "after the last step",
    "patience": "early: the validation loss had not got better for long enough",
    "stopped": "when it was asked to stop",
    None: "not as far as the log says: it is under way, or was killed",
}
# Facts that have a place of their own on the page.
PLACED = (
    "preset", "parameters", "active_parameters", "corpus", "train_tokens", "valid_tokens", "vocab_size", "tokenizer",
    "precision", "device", "micro_batch", "compile", "peak_memory_bytes", "sample", "stories",
    "command", "resume",
)  # fmt: skip

Row = tuple[str, str]
Config = Mapping[str, Mapping[str, Any]]


# --- numbers ---------------------------------------------------------------------------------------------------------


def summary(folder: Path) -> dict[str, Any]:
    """The numbers of a run by its log; None for what it does not say.

    The losses best_loss and bits_per_byte are of validation, last_loss is of training. tokens_per_second and mfu are
    medians. finished is why the run ended: done, patience or stopped; None while it is under way or when it was killed.
    """
    return _summary(read_records(folder))


def _summary(records: Sequence[Record]) -> dict[str, Any]:
    steps, best = of_kind(records, "step"), best_evaluation(records) or {}
    last = records[-1] if records else {}
    return {
        "steps": int(max((record["step"] for record in records), default=0)),
        "best_loss": _known(best.get("loss")),
        "best_step": best.get("step"),
        "bits_per_byte": _known(best.get("bits_per_byte")),
        "last_loss": _known(steps[-1].get("loss")) if steps else None,
        "seconds": max(_finite(records, "seconds"), default=None),
        "tokens_per_second": _median(steps, "tokens_per_second"),
        "mfu": _median(steps, "mfu"),
        "skipped": len(of_kind(records, "skip")),
        "finished": last.get("reason") if last.get("kind") == "end" else None,
    }


def _known(value: Any) -> float | None:
    return number(value) if math.isfinite(number(value)) else None


def _finite(records: Sequence[Record], field: str) -> list[float]:
    return [value for record in records if math.isfinite(value := number(record.get(field)))]


def _median(records: Sequence[Record], field: str) -> float | None:
    found = _finite(records, field)
    return statistics.median(found) if found else None


# --- the page --------------------------------------------------------------------------------------------------------


def write_report(folder: Path, facts: Mapping[str, Any]) -> Path:
    """Write RUN/report.md; where it is."""
    records, config = read_records(folder), read_config(folder)
    facts = {name: value for name, value in facts.items() if value is not None}
    figures = _summary(records)
    parts = [
        f"# Run {_cell(folder.resolve().name)}",
        _table("What was trained", _what(config, facts)),
        _table("How", _how(config, facts)),
        _table("Result", _result(figures, config, facts)),
        f"![training and validation loss]({CURVE})" if (folder / CURVE).is_file() else "",
        _sample(records, facts),
        _commands(facts),
    ]
    path = folder / REPORT
    page = "\n\n".join(part for part in parts if part) + "\n"
    # A sample may hold half a character: what cannot be written as UTF-8 becomes a question mark.
    write_whole(path, page.encode("utf-8", "replace"))
    return path


def _what(config: Config, facts: Mapping[str, Any]) -> Iterator[Row]:
    model, data = config["model"], config["data"]
    yield "preset", _text(facts.get("preset", data.get("preset")))
    yield "parameters", _parameters(facts)
    yield "shape", _shape(model)
    yield "vocabulary", _text(facts.get("vocab_size", model.get("vocab_size")), "{:,} tokens")
    yield "tokenizer", _text(facts.get("tokenizer"))
    yield "corpus", _text(facts.get("corpus", data.get("corpus")))
    yield "trained on", _text(facts.get("train_tokens"), "{:,} tokens")
    yield "validated on", _text(facts.get("valid_tokens"), "{:,} tokens")


def _parameters(facts: Mapping[str, Any]) -> str:
    total, active = facts.get("parameters"), facts.get("active_parameters")
    words = _text(total, "{:,}")
    return f"{words}, of which a token meets {active:,}" if words and active not in (None, total) else words


def _shape(model: Mapping[str, Any]) -> str:
    """4 layers, width 192, 6 heads, feed-forward 512 (swiglu), context 256."""
    heads, kv_heads = model.get("num_heads"), model.get("num_kv_heads")
    words = [
        _text(model.get("num_layers"), "{} layers"),
        _text(model.get("width"), "width {}"),
        _text(heads, "{} heads") + (_text(kv_heads, " ({} of keys and values)") if kv_heads != heads else ""),
        _text(model.get("kv_latent"), "latent of {}"),
        _text(model.get("ffn_width"), "feed-forward {}") + _text(model.get("activation"), " ({})"),
        _text(model.get("num_experts") or None, "{} experts"),
        _text(model.get("context"), "context {}"),
    ]
    return ", ".join(word for word in words if word)


def _how(config: Config, facts: Mapping[str, Any]) -> Iterator[Row]:
    train, context = config["train"], config["model"].get("context")
    batch = train.get("batch_size")
    yield "steps", _text(train.get("steps"), "{:,}")
    rows = _text(batch, "{:,} rows") + (_text(context, " of {:,} tokens") if batch else "")
    yield "batch", rows + (_text(facts.get("micro_batch"), ", {:,} at once") if batch else "")
    yield "learning rate", _learning_rate(train)
    yield "precision", _text(facts.get("precision", train.get("precision")))
    yield "device", _text(facts.get("device"))
    yield "compile", _text(facts.get("compile", train.get("compile")))
    yield "seed", _text(train.get("seed"))
    for name, value in facts.items():
        if name not in PLACED:
            yield name.replace("_", " "), _text(value)


def _learning_rate(train: Mapping[str, Any]) -> str:
    words = _text(train.get("learning_rate"), "{:g}")
    if not words:
        return ""
    return words + _text(train.get("schedule"), ", {}") + _text(train.get("warmup"), ", warm-up of {:,} steps")


def _result(figures: Mapping[str, Any], config: Config, facts: Mapping[str, Any]) -> Iterator[Row]:
    best = _text(figures["best_loss"], "{:.4f}")
    yield "best validation loss", f"{best} at step {figures['best_step']:,}" if best else ""
    yield "bits per byte there", _text(figures["bits_per_byte"], "{:.4f}")
    yield "last training loss", _text(figures["last_loss"], "{:.4f}")
    skipped = f", {figures['skipped']:,} of them skipped"
    yield "steps", _text(figures["steps"], "{:,}") + _text(config["train"].get("steps"), " of {:,}") + skipped
    yield "ended", ENDINGS.get(figures["finished"], str(figures["finished"]))
    yield "time", _text(figures["seconds"], "{:,.1f} s")
    yield "tokens a second, median", _text(figures["tokens_per_second"], "{:,.0f}")
    yield "MFU, median", _text(figures["mfu"], "{:.1%}")
    if told := facts.get("stories"):
        well = f"{told['good']} of {told['stories']} are grammatical, keep their hero and end"
        yield "sampled stories", well
    memory = facts.get("peak_memory_bytes")
    yield "peak memory", "" if memory is None else f"{memory / 1e9:.2f} GB"


def _sample(records: Sequence[Record], facts: Mapping[str, Any]) -> str:
    """What the best weights wrote or, where nobody asked them, what the model wrote last."""
    samples = [record for record in of_kind(records, "sample") if str(record.get("text") or "").strip()]
    if not samples and not facts.get("sample"):
        return ""
    text = str(facts.get("sample") or samples[-1]["text"])
    whose = "the best weights" if facts.get("sample") else f"step {samples[-1]['step']:,}"
    cut = f" (its first {LONGEST_SAMPLE:,} letters)" if len(text) > LONGEST_SAMPLE else ""
    return f"## A sample of {whose}{cut}\n\n{fenced(text[:LONGEST_SAMPLE], 'text')}"


def _commands(facts: Mapping[str, Any]) -> str:
    blocks = [
        f"{title}:\n\n{fenced(_command(facts[name]), 'sh')}"
        for name, title in (("command", "Run it again"), ("resume", "Resume it"))
        if facts.get(name)
    ]
    return "\n\n".join(["## Commands", *blocks]) if blocks else ""


def _command(command: str | Sequence[str]) -> str:
    return command if isinstance(command, str) else shlex.join(map(str, command))


# --- Markdown --------------------------------------------------------------------------------------------------------


def fenced(text: str, language: str = "") -> str:
    """A code block that its own text cannot end: the fence is longer than every row of backticks in it."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}{'' if text.endswith(chr(10)) else chr(10)}{fence}"


def _table(title: str, rows: Iterator[Row]) -> str:
    """A heading and a row for each thing that is known; nothing where none is."""
    known = [f"| {_cell(name)} | {_cell(value)} |" for name, value in rows if value]
    return "\n".join([f"## {title}\n", "| | |", "|---|---|", *known]) if known else ""


def _cell(text: str) -> str:
    """Text that stays in its cell, and is neither HTML nor markup."""
    plain = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;")
    return re.sub(r"([\\`*_|\[\]])", r"\\\1", plain)


def _text(value: Any, words: str = "{}") -> str:
    """A value in words: nothing for None, yes or no for a truth, as it is where the format is not its own."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    try:
        return words.format(value)
    except (ValueError, TypeError):  # a config edited by hand
        return str(value)
