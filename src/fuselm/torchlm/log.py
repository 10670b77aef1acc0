"""What a run says of itself, line by line: JSONL always, CSV and TensorBoard when asked for.

A record is a dict with "kind" (step, eval, sample, skip, save, end), "step" and numbers; whoever listens gets each one.
Knows no model. After a crash, lines of steps that the resumed run makes again are dropped first.

    log = JsonLines(run.folder / LOG, keep_until=400)
    log({"kind": "step", "step": 410, "loss": 1.23})
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from fuselm.files import write_whole

LOG = "log.jsonl"
Record = Mapping[str, Any]
Listener = Callable[[Record], None]
CSV_FIELDS = (
    "step", "seconds", "tokens", "train_loss", "valid_loss", "bits_per_byte", "learning_rate", "gradient_norm",
    "tokens_per_second", "mfu", "loss_scale", "balance",
)  # fmt: skip


def read_log(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a log; a last line that was cut off by a crash is left out."""
    for line in path.read_bytes().split(b"\n"):  # as bytes: it may be cut inside a character
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and "kind" in record:
            yield record


class JsonLines:
    """A record on each line, written out at once."""

    def __init__(self, path: Path, keep_until: int) -> None:
        kept = [r for r in read_log(path) if r.get("step", 0) <= keep_until] if path.exists() else []
        write_whole(path, "".join(_line(record) for record in kept))
        self._file: TextIO = path.open("a", encoding="utf-8")

    def __call__(self, record: Record) -> None:
        self._file.write(_line(record))
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _line(record: Record) -> str:
    # JSON has no NaN: a loss that is none is told as null.
    plain = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
    return json.dumps(plain, ensure_ascii=False) + "\n"


class CsvLines:
    """Numbers of steps and evaluations in one table, an empty cell where there is none."""

    def __init__(self, path: Path, log: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w", encoding="utf-8", newline="")
        self._writer = csv.DictWriter(self._file, CSV_FIELDS, extrasaction="ignore")
        self._writer.writeheader()
        for record in read_log(log) if log.exists() else ():  # what a resumed run had before
            self(record)

    def __call__(self, record: Record) -> None:
        if record["kind"] in ("step", "eval"):
            loss = "train_loss" if record["kind"] == "step" else "valid_loss"
            self._writer.writerow({**record, loss: record["loss"]})
            self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """The same numbers as scalars, samples as text."""

    def __init__(self, folder: Path, step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ImportError("--tensorboard needs the package tensorboard. Install it, or leave it out.") from None
        self._writer: Any = SummaryWriter(str(folder), purge_step=step + 1)

    def __call__(self, record: Record) -> None:
        kind, step = record["kind"], record["step"]
        if kind == "sample":
            self._writer.add_text("sample", record["text"], step)
        if kind not in ("step", "eval"):
            return
        group = "train" if kind == "step" else "valid"
        for name, value in record.items():
            if name not in ("kind", "step") and isinstance(value, int | float) and not isinstance(value, bool):
                self._writer.add_scalar(f"{group}/{name}", value, step)

    def close(self) -> None:
        self._writer.close()
