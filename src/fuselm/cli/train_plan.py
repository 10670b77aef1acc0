"""What `fuselm train` is asked to do, worked out before any time is spent: config, data, run folder.

Everything that can be refused is refused here, the cheapest first.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from fuselm.cli.data import check_outside, check_tokenizer, make_tokenizer, open_named
from fuselm.cli.progress import bar, under
from fuselm.cli.tokenizer import UNITS, load

if TYPE_CHECKING:
    from fuselm.checkpoint import Run
    from fuselm.config import Preset, TrainConfig
    from fuselm.data.shards import Shard
    from fuselm.text.tokenizer import Tokenizer

TEXT_ENDING = re.compile(r"(\.(txt|text|md|jsonl|ndjson|parquet))?(\.(gz|xz|bz2|zst))?$", re.IGNORECASE)
BYTES_PER_PARAMETER = 28  # on the disk: weights and two averages, twice while one replaces the other, and the best's


@dataclass(frozen=True)
class Plan:
    """A run that was asked for."""

    preset_name: str
    preset: Preset
    corpus: str
    out: Path
    model_changes: dict[str, Any]
    train: TrainConfig
    tokenizer: Path | None
    limit_mb: float | None
    overwrite: bool
    unasked: frozenset[str]  # fields of its training that are fitted, nobody having asked for them

    @property
    def prepared(self) -> Path | None:
        """The corpus, where it is one that `fuselm data prepare` made; a built-in one's name is no folder's."""
        from fuselm.data.corpora import corpus_names
        from fuselm.data.readers import MANIFEST

        is_folder = self.corpus not in corpus_names() and (Path(self.corpus) / MANIFEST).is_file()
        return Path(self.corpus) if is_folder else None

    @property
    def place(self) -> str:
        """The corpus as a run remembers it: the same, however its path was typed and wherever that was."""
        return _place(self.corpus) if self.prepared is None else str(self.prepared.resolve())

    def request(self) -> dict[str, Any]:
        """What of the data was asked for: another request is another run."""
        if self.prepared is not None:
            return {"preset": self.preset_name, "corpus": self.place}
        tokens = self.preset.tokens if self.tokenizer is None else load(self.tokenizer).fingerprint
        return {"preset": self.preset_name, "corpus": self.place, "tokens": tokens, "limit_mb": self.limit_mb}


def make_plan(
    preset_name: str,
    corpus: str | None,
    out: Path | None,
    changes: dict[str, Any],
    settings: list[str],
    tokenizer: Path | None,
    limit_mb: float | None,
    overwrite: bool,
) -> Plan:
    """Put preset and options together; every rule about sizes is checked here, whatever the vocabulary will be."""
    from fuselm.config import ModelConfig, TrainConfig, changed, preset

    chosen = preset(preset_name)
    changes = {name: value for name, value in changes.items() if value is not None} | _parsed(settings)
    shape = {name: value for name, value in changes.items() if name in ModelConfig.__dataclass_fields__}
    training = {name: value for name, value in changes.items() if name in TrainConfig.__dataclass_fields__}
    train = chosen.train(**_fitted(chosen, training))
    wished = {"vocab_size": shape.pop("vocab_size")} if "vocab_size" in shape else {}
    changed(chosen.model(256, **shape), **wished)
    plan = Plan(
        preset_name,
        dataclasses.replace(chosen, tokens=wished.get("vocab_size", chosen.tokens)),
        corpus or chosen.corpus,
        out or _usual_folder(preset_name, chosen, corpus),
        shape,
        train,
        tokenizer,
        chosen.limit_mb if limit_mb is None and corpus in (None, chosen.corpus) else limit_mb,
        overwrite,
        _unasked(training, train.steps < chosen.train().steps),
    )
    if plan.prepared is not None and (tokenizer is not None or limit_mb is not None):
        raise ValueError(f"{corpus} is tokenised already; --tokenizer and --limit-mb come too late. Leave them out.")
    if wished:
        _check_trains_tokenizer(plan, chosen)
        check_tokenizer(wished["vocab_size"], False, [])
    return plan


def _unasked(asked: Mapping[str, Any], is_short: bool) -> frozenset[str]:
    """Of the fields that are fitted to a corpus or to few steps those that nobody has asked for."""
    names = {"batch_size", "log_every"} | ({"eval_every"} if is_short else set())
    return frozenset(names - asked.keys() - ({"batch_size"} if "micro_batch" in asked else set()))


def _check_trains_tokenizer(plan: Plan, chosen: Preset) -> None:
    """vocab_size asks for a tokenizer of that size: refuse it where the run trains none."""
    if plan.prepared is not None:
        found = "the prepared corpus has its own"
    elif plan.tokenizer is not None:
        found = "--tokenizer names another"
    elif isinstance(chosen.tokens, str):
        found = f"{plan.preset_name} has a token for each character"
    else:
        return
    raise ValueError(f"vocab_size is that of a tokenizer which the run trains; {found}. Leave vocab_size out.")


def _place(corpus: str) -> str:
    """A corpus's name, or where it lies."""
    from fuselm.data.corpora import corpus_names

    return corpus if corpus in corpus_names() else os.path.realpath(os.path.expanduser(corpus))


def _usual_folder(preset_name: str, chosen: Preset, corpus: str | None) -> Path:
    """The folder of a run for which nobody names one; another text than the preset's has one of its own.

    It follows from names alone: a run that was begun is found when its text is gone.
    """
    if corpus in (None, chosen.corpus):
        return Path("runs") / preset_name
    text = TEXT_ENDING.sub("", Path(os.path.abspath(corpus)).name) or "text"
    return Path("runs") / f"{text}-{preset_name}"


def _parsed(settings: list[str]) -> dict[str, Any]:
    """--set name=value, of either config."""
    from fuselm.config import parsed

    found = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals:
            raise ValueError(f"--set takes name=value; got {setting!r}.")
        found[name] = parsed(name, text)
    return found


def _fitted(chosen: Preset, training: dict[str, Any]) -> dict[str, Any]:
    """A run shorter than the preset's has a warm-up in proportion and some evaluations, unless told otherwise.

    Of a few steps the curve has twenty points of its training loss all the same, and whoever waits hears of them.
    """
    from fuselm.config import TrainConfig

    whole = TrainConfig(**chosen.training)
    steps = training.get("steps")
    if not isinstance(steps, int) or not 0 < steps < whole.steps:
        return training
    warmup = min(whole.warmup, max(1, whole.warmup * steps // whole.steps))
    often = {
        "eval_every": min(whole.eval_every, max(1, steps // 5)),
        "log_every": min(whole.log_every, -(-steps // 20)),
    }
    return {"warmup": warmup, **often, **training}


# --- the run folder and its data -------------------------------------------------------------------------------------


def open_or_make(plan: Plan, device: str) -> tuple[Run, dict[str, Shard]]:
    """The run that was asked for, new or begun before, and its token files."""
    from fuselm import checkpoint
    from fuselm.data.readers import MANIFEST
    from fuselm.files import not_left_empty

    if (plan.out / checkpoint.CONFIG).is_file():
        there = checkpoint.open_run(plan.out)
        with there.claimed():  # nobody is at work on it
            pass
        # One that was killed before its data had its place is made again, and comes out the same.
        if not plan.overwrite and (data_folder(there) / MANIFEST).is_file():
            return _opened(plan)
    else:
        checkpoint.check_free(plan.out)
    if plan.prepared is None:
        check_outside(plan.out, plan.corpus)
    with not_left_empty(plan.out):
        checkpoint.check_writable(plan.out)
        return _tokenised_and_made(plan, device)


def _tokenised_and_made(plan: Plan, device: str) -> tuple[Run, dict[str, Shard]]:
    from fuselm import checkpoint
    from fuselm.files import partial_path, sweep

    if plan.prepared is not None:
        return _made(plan, plan.prepared, device)
    # Tokenised aside, and put in its place when the run is sure: what a folder had before stays until then.
    sweep(plan.out / checkpoint.DATA)
    staging = partial_path(plan.out / checkpoint.DATA)
    try:
        run, _ = _made(plan, staging, device)
        shutil.rmtree(plan.out / checkpoint.DATA, ignore_errors=True)
        staging.rename(plan.out / checkpoint.DATA)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return run, open_data(run)


def _opened(plan: Plan) -> tuple[Run, dict[str, Shard]]:
    """A run that was begun before; another config is refused."""
    from fuselm import checkpoint
    from fuselm.data.readers import TOKENIZER
    from fuselm.text.tokenizer import Tokenizer

    there = checkpoint.open_run(plan.out)
    data = {**there.data, **plan.request()}
    known = there.data.get("corpus")
    if isinstance(known, str) and _place(known) == plan.place:
        data["corpus"] = known  # older runs have it as it was typed
    elif plan.prepared is None:
        open_named(plan.corpus, plan.limit_mb, lambda *_: None)  # one that is not there is what is wrong first
    model = plan.preset.model(there.model.vocab_size, **plan.model_changes)
    train = plan.train
    if there.train is not None:  # as it was fitted when it was begun; a graph changes no result, and is a session's
        as_begun = {name: getattr(there.train, name) for name in (*plan.unasked, "cuda_graph")}
        train = dataclasses.replace(train, **as_begun)
    folder = data_folder(there)
    lost = not (plan.out / checkpoint.TOKENIZER).is_file() and (folder / TOKENIZER).is_file()  # killed as it was made
    tokenizer = Tokenizer.load(folder / TOKENIZER) if lost else None
    run = checkpoint.create(plan.out, model=model, train=train, data=data, tokenizer=tokenizer)
    return run, open_data(run)


def _made(plan: Plan, folder: Path, device: str) -> tuple[Run, dict[str, Shard]]:
    """A new run on what is, or will be, tokenised in `folder`."""
    from fuselm import checkpoint, cost
    from fuselm.data import open_prepared
    from fuselm.torchlm.checks import check_run

    tokenizer = _prepare(plan, folder)
    shards = open_prepared(folder)
    model = plan.preset.model(tokenizer.vocab_size, **plan.model_changes)
    train = _fitting(plan, model.context, shards["train"])
    train = _evaluating(plan, train, model.context, shards["valid"])
    check_run(model, train, shards, device)  # before the folder belongs to a run that cannot be
    checkpoint.check_writable(plan.out, BYTES_PER_PARAMETER * cost.parameters(model).total)
    place = None if plan.prepared is None else str(plan.prepared.resolve())
    data = {**plan.request(), "folder": place, **_found(shards)}
    run = checkpoint.create(
        plan.out, model=model, train=train, data=data, tokenizer=tokenizer, overwrite=plan.overwrite
    )
    return run, shards


def _fitting(plan: Plan, context: int, shard: Shard) -> TrainConfig:
    """The training that was asked for; on a corpus with fewer rows than the preset's batch, with a smaller batch."""
    from fuselm.data import Loader

    if "batch_size" not in plan.unasked or shard.tokens.size <= context:
        return plan.train
    rows = Loader(shard, batch_size=1, context=context, rows=plan.train.rows).rows_per_epoch
    if rows >= plan.train.batch_size:
        return plan.train
    batch = 1 << rows.bit_length() - 1  # a power of two
    typer.echo(
        f"this corpus has {rows} rows of {context} tokens: {batch} a step, not {plan.train.batch_size}", err=True
    )
    return dataclasses.replace(plan.train, batch_size=batch)


def _evaluating(plan: Plan, train: TrainConfig, context: int, shard: Shard) -> TrainConfig:
    """A short run evaluates for no longer than it trains, or at its end alone; the split is always the whole one."""
    if "eval_every" not in plan.unasked:
        return train
    passes = 3 * train.steps * train.batch_size * context  # forward: a step costs as much as three
    most = max(1, passes // max(1, shard.tokens.size))
    return dataclasses.replace(train, eval_every=max(train.eval_every, -(-train.steps // most)))


def data_folder(run: Run) -> Path:
    """Where the token files of a run are: in it, or in the prepared folder that it was begun with."""
    from fuselm.checkpoint import DATA

    return Path(run.data["folder"]) if run.data.get("folder") else run.folder / DATA


def open_data(run: Run) -> dict[str, Shard]:
    """The token files of a run: its own, or the prepared folder it was begun with, unchanged since."""
    from fuselm.data import open_prepared
    from fuselm.data.readers import MANIFEST

    folder = data_folder(run)
    if not (folder / MANIFEST).is_file():
        raise ValueError(
            f"A run keeps its data; {folder}, with which it was begun, holds no prepared corpus. Put that back there, "
            "or begin a new run."
        )
    shards = open_prepared(folder)
    for name, value in _found(shards).items():
        if run.data.get(name) != value:
            raise ValueError(f"A run keeps its data; {folder} has changed since it began ({name}). Begin a new run.")
    return shards


def check_room(run: Run) -> None:
    """Refuse a disk on which the checkpoints will not fit, beside those that are there and will be replaced."""
    from fuselm import cost

    there = sum(path.stat().st_size for path in run.folder.glob("step-*/*"))
    run.check_writable(max(0, BYTES_PER_PARAMETER * cost.parameters(run.model).total - there))


def _prepare(plan: Plan, folder: Path) -> Tokenizer:
    """Tokenise the corpus unless somebody did that before; the tokenizer it has."""
    from fuselm.data import prepare as preparing
    from fuselm.data.readers import TOKENIZER
    from fuselm.text.tokenizer import Tokenizer

    if plan.prepared is not None:
        return Tokenizer.load(folder / TOKENIZER)
    tokens = plan.preset.tokens
    with bar(UNITS) as step:
        source = open_named(plan.corpus, plan.limit_mb, step)
        typer.echo(source.describe(), err=True)
        if plan.tokenizer is not None:
            chosen = load(plan.tokenizer)
        else:
            size = None if isinstance(tokens, str) else tokens
            chosen = make_tokenizer(source, size, size is None, [], None, under("tokenizer", step))
        preparing.prepare(source, chosen, folder, on_progress=under("tokenising", step))
    return chosen


def _found(shards: dict[str, Shard]) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    for split, shard in shards.items():
        facts[f"{split}_tokens"] = shard.header.num_tokens
        facts[f"{split}_sha256"] = shard.header.sha256
    return facts
