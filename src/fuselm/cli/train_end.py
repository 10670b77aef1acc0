"""How `fuselm train` ends: samples from the best weights, the curve, the report, and what to type next."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import typer

from fuselm.cli.progress import bar
from fuselm.cli.train_show import printable

if TYPE_CHECKING:
    from fuselm.torchlm.train import Trainer

Say = Callable[[str], None]


def finish(trainer: Trainer, samples: int, command: str | None, say: Say) -> dict[str, Any]:
    """Say how it went; returns the same as plain data. `command` made the run, None if it was resumed."""
    from fuselm.data.corpora import corpus_names

    run, progress = trainer.run, trainer.progress
    texts = _texts(trainer, samples) if samples else []
    if texts:
        say(f"\n{printable(texts[0][0]).strip()}\n")
    stories = _checked(texts) if texts and run.data.get("corpus") in ("stories", "little-stories") else None
    result: dict[str, Any] = {"run": str(run.folder), "best_loss": progress.best_loss, "best_step": progress.best_step}
    result |= {"stories": stories} if stories else {}
    written, numbers = _drawn(trainer, _facts(trainer, command, texts[0][0] if texts else None, stories))
    result |= numbers
    if stories:
        say(
            f"{stories['stories']} sampled stories, by the grammar's own rules: {stories['grammatical']} grammatical, "
            f"{stories['keep_hero']} keep their hero, {stories['end']} end; all three: {stories['good']}"
        )
    if progress.best_loss is not None:
        best = f"best validation loss {progress.best_loss:.4f} at step {progress.best_step}"
        say(f"{best}, after {progress.seconds:.0f} s of training")
    folder = shlex.quote(str(run.folder))
    say(f"wrote {folder}: {', '.join(['weights', *written])}. Next:")
    say(f"  fuselm plot {folder}    # the curve, also of several runs")
    if run.data["corpus"] in corpus_names():
        say(
            f"  fuselm train your-text.txt --preset {run.data['preset']} --out runs/mine    # the same on your own text"
        )
    return result


def _texts(trainer: Trainer, count: int) -> list[tuple[str, bool]]:
    """Texts by the best weights, and whether each came to its end."""
    from fuselm.torchlm.state import load_weights

    run = trainer.run
    if "best" in run.saved:
        load_weights(trainer.model, run.load("best", weights_only=True).weights)
    with bar({"sampling": "tokens"}) as step:
        return trainer.texts(
            count, run.model.context, trainer.config.seed, lambda done, total: step("sampling", done, total)
        )


def _checked(texts: list[tuple[str, bool]]) -> dict[str, int]:
    from fuselm.data.story.check import check, tally

    return tally([check(text, finished=finished) for text, finished in texts])


def _drawn(trainer: Trainer, facts: dict[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """Draw the curve, write the report: the names of what was written, and the run's numbers."""
    from fuselm.bench.curves import curve
    from fuselm.bench.run_report import CURVE, REPORT, summary, write_report

    folder, written = trainer.run.folder, [REPORT]
    try:
        curve([folder], folder / CURVE)
        written.insert(0, CURVE)
    except ImportError as error:  # without matplotlib a run is complete all the same
        typer.echo(f"warning: {CURVE} was not drawn. {error}", err=True)
    write_report(folder, facts)
    return written, summary(folder)


def _facts(trainer: Trainer, command: str | None, sample: str | None, stories: dict[str, int] | None) -> dict[str, Any]:
    """What the report cannot find in the run's files."""
    import torch

    from fuselm import cost

    run, cuda = trainer.run, trainer.device.type == "cuda"
    parameters = cost.parameters(run.model)
    return {
        "parameters": parameters.total,
        "active_parameters": parameters.active,
        "train_tokens": run.data.get("train_tokens"),
        "valid_tokens": run.data.get("valid_tokens"),
        "tokenizer": repr(trainer.tokenizer),
        "device": torch.cuda.get_device_name(trainer.device) if cuda else "cpu",
        "precision": trainer.precision,
        "micro_batch": trainer.micro_batch,
        "cuda_graph": trainer.is_graphed,
        "torch": torch.__version__,
        "peak_memory_bytes": torch.cuda.max_memory_allocated(trainer.device) if cuda else None,
        "sample": sample,
        "stories": stories,
        "command": command,
        "resume": ["fuselm", "train", "--resume", str(run.folder)],
    }


def list_presets(as_json: bool) -> None:
    """A line for each preset."""
    from fuselm import cost
    from fuselm.config import PRESETS

    rows: list[dict[str, Any]] = []
    for name, preset in PRESETS.items():
        size = 70 if isinstance(preset.tokens, str) else preset.tokens
        total = cost.parameters(preset.model(size)).total
        rows.append({"name": name, "parameters": total, "corpus": preset.corpus, "about": preset.about})
    if as_json:
        typer.echo(json.dumps(rows))
        return
    for row in rows:
        typer.echo(f"{row['name']:14} {row['parameters'] / 1e6:7.1f} M  {row['corpus']:16} {row['about']}")
