"""How `fuselm train` ends: samples from the best weights, the curve, the report, and what to type next."""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING, Any

import typer

from fuselm.cli.progress import bar

if TYPE_CHECKING:
    from fuselm.torchlm.train import Trainer

TEMPERATURE = 0.8
NO_PLOT = "curve.png and report.md were not drawn: {}"


def finish(trainer: Trainer, samples: int, command: str) -> dict[str, Any]:
    """Say how it went; returns the same as plain data."""
    run = trainer.run
    texts = _texts(trainer, samples) if samples else []
    if texts:
        typer.echo(f"\n{texts[0][0].strip()}\n")
    stories = _checked(texts) if texts and run.data.get("corpus") in ("stories", "little-stories") else None
    best, step = trainer.progress.best_loss, trainer.progress.best_step
    result: dict[str, Any] = {"run": str(run.folder), "best_loss": best, "best_step": step}
    result |= {"stories": stories} if stories else {}
    result |= _drawn(trainer, command, [text for text, _ in texts])
    if stories:
        typer.echo(
            f"{stories['stories']} sampled stories, by the grammar's own rules: {stories['grammatical']} grammatical, "
            f"{stories['keep_hero']} keep their hero, {stories['end']} end; all three: {stories['good']}"
        )
    if best is not None:
        seconds = trainer.progress.seconds
        typer.echo(f"best validation loss {best:.4f} at step {step}, after {seconds:.0f} s of training")
    folder = shlex.quote(str(run.folder))
    typer.echo(f"wrote {folder}: curve.png, report.md, weights. Next:")
    typer.echo(f"  fuselm plot {folder}                                  # the curve, also of several runs")
    typer.echo(
        f"  fuselm train your-text.txt --preset {run.data['preset']} --out runs/mine   # the same on your own text"
    )
    return result


def _texts(trainer: Trainer, count: int) -> list[tuple[str, bool]]:
    """Samples of the best weights, and whether each came to its end."""
    from fuselm.torchlm.sample import sample
    from fuselm.torchlm.state import load_weights

    run, tokenizer = trainer.run, trainer.tokenizer
    if "best" in run.saved:
        load_weights(trainer.model, run.load("best", weights_only=True).weights)
    separator = tokenizer.end_of_text
    start = int(trainer.shards["valid"].tokens[0]) if separator is None else separator
    with bar({"sampling": "tokens"}) as step:
        found = sample(
            trainer.model,
            [start],
            count=count,
            max_tokens=run.model.context,
            temperature=TEMPERATURE,
            seed=trainer.config.seed,
            stop=separator,
            vocab_size=tokenizer.vocab_size,
            on_progress=lambda done, total: step("sampling", done, total),
        )
    lead = [] if separator is not None else [start]
    return [(tokenizer.decode([*lead, *one.ids]), one.finished) for one in found]


def _checked(texts: list[tuple[str, bool]]) -> dict[str, int]:
    from fuselm.data.story.check import check, tally

    return tally([check(text, finished=finished) for text, finished in texts])


def _drawn(trainer: Trainer, command: str, samples: list[str]) -> dict[str, Any]:
    """The curve and the report; without matplotlib a run is complete all the same."""
    folder = trainer.run.folder
    try:
        from fuselm.bench.curves import curve
        from fuselm.bench.run_report import summary, write_report

        curve([folder], folder / "curve.png")
        write_report(folder, _facts(trainer, command, samples))
        return summary(folder)
    except ImportError as error:
        typer.echo(f"warning: {NO_PLOT.format(error)}", err=True)
        return {}


def _facts(trainer: Trainer, command: str, samples: list[str]) -> dict[str, Any]:
    import torch

    from fuselm import cost

    cuda = trainer.device.type == "cuda"
    facts: dict[str, Any] = {"model": cost.describe(trainer.run.model), "command": command, "samples": samples}
    facts |= {"device": torch.cuda.get_device_name(trainer.device) if cuda else "cpu", "precision": trainer.precision}
    facts |= {"micro_batch": trainer.micro_batch, "torch": torch.__version__}
    if cuda:
        facts["peak_memory_bytes"] = torch.cuda.max_memory_allocated(trainer.device)
    return facts


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
