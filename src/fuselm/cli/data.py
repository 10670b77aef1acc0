"""`fuselm data`: tokenise corpora for training, and look at what was made. Reads the command line and prints.

fuselm data prepare stories --vocab-size 4096 --out data/stories
fuselm data info data/stories
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fuselm.cli.errors import told
from fuselm.cli.paths import check_writable, typed_path
from fuselm.cli.progress import Step, bar, under
from fuselm.cli.tokenizer import UNITS, CorpusName, GivenTokenizer, VocabSize, load

if TYPE_CHECKING:
    from fuselm.data.corpora import Corpus
    from fuselm.data.shards import Shard
    from fuselm.text.tokenizer import Tokenizer

app = typer.Typer(no_args_is_help=True, help="Tokenise corpora for training, and look at what was made.")

PREPARE_HELP = """Tokenise a corpus into a folder that training reads: train.tokens, valid.tokens and tokenizer.json.

A corpus is a name or a path. Names: stories and little-stories (built in, made here, no network), tinyshakespeare,
wizard-of-oz and tinystories (downloaded once, kept in the user cache). Paths: a text file or .jsonl, also as .gz, .xz,
.bz2 or .zst, a .parquet file, or a folder of such files. <|endoftext|> in a text, on a line of its own or not,
separates documents.

The tokenizer is given by --tokenizer; else one is trained on the corpus, of --vocab-size tokens, or of single
characters. A folder that has such files already is refused; with --overwrite they are replaced when everything is
complete, and not before.

Examples:

  fuselm data prepare stories --vocab-size 4096 --out data/stories

  fuselm data prepare tinyshakespeare --characters --out data/shakespeare

  fuselm data prepare notes/ --tokenizer tokenizer.json --out data/notes
"""

INFO_HELP = """Say what a prepared folder, a .tokens file or a .npy file of ids holds.

--verify reads all of it and compares its checksum. Exit code 1 when something is wrong with it.

Examples:

  fuselm data info data/stories

  fuselm data info data/stories/train.tokens --verify --json
"""


@app.command(help=PREPARE_HELP)
def prepare(
    corpus: CorpusName,
    out: Annotated[Path, typer.Option(parser=typed_path, help="Folder to write; made when it is not there.")],
    tokenizer: GivenTokenizer = None,
    vocab_size: VocabSize = None,
    characters: Annotated[bool, typer.Option("--characters", help="One token for each character instead.")] = False,
    limit_mb: Annotated[float | None, typer.Option(help="Use at most this many megabytes of each split.")] = None,
    seed: Annotated[int | None, typer.Option(help="Which of the endless built-in stories.", show_default="0")] = None,
    threads: Annotated[int | None, typer.Option(help="Default: one for each core.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what --out holds.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Prepare; the help text is PREPARE_HELP."""
    from fuselm.data import prepare as preparing

    begin = time.monotonic()
    with told():
        if tokenizer is not None and (characters or vocab_size is not None):
            raise ValueError("--tokenizer says which tokenizer to use, --characters and --vocab-size do too. Choose.")
        check_tokenizer(vocab_size, characters, [])
        _check_out(out, corpus)
        if not overwrite:
            _check_unused(out, tokenizer)
        with bar(UNITS) as step:
            source = open_named(corpus, limit_mb, step, seed=seed)
            typer.echo(source.describe(), err=True)
            if tokenizer is not None:
                chosen = load(tokenizer)
            else:
                chosen = make_tokenizer(source, vocab_size, characters, [], threads, under("tokenizer", step))
            shards = preparing.prepare(source, chosen, out, threads=threads, on_progress=under("tokenising", step))
    seconds = time.monotonic() - begin
    found = {split: describe(shard) for split, shard in shards.items()}
    if as_json:
        typer.echo(json.dumps({"folder": str(out), "seconds": round(seconds, 3), "splits": found}))
        return
    for split, facts in found.items():
        typer.echo(_sentence(split, facts))
    typer.echo(f"wrote {out} in {seconds:.1f} s; {chosen!r}")


@app.command(help=INFO_HELP)
def info(
    path: Annotated[Path, typer.Argument(parser=typed_path, help="A prepared folder, a .tokens file or a .npy file.")],
    verify: Annotated[bool, typer.Option("--verify", help="Read everything and compare the checksum.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Look; the help text is INFO_HELP."""
    from fuselm.data.prepare import open_prepared
    from fuselm.data.shards import open_shard

    with told():
        shards = open_prepared(path) if path.is_dir() else {path.name: open_shard(path)}
        if verify:
            for shard in shards.values():
                shard.verify()
    found = {name: describe(shard) for name, shard in shards.items()}
    if as_json:
        typer.echo(json.dumps({"path": str(path), "verified": verify, "splits": found}))
        return
    for name, facts in found.items():
        typer.echo(_sentence(name, facts) + (", checksum verified" if verify else ""))
        source = ", ".join(f"{key} {value}" for key, value in facts["source"].items()) or "unknown"
        typer.echo(f"  tokenizer {(facts['fingerprint'] or 'unknown')[:16]}; source: {source}")


def open_named(name: str, limit_mb: float | None, step: Step, *, seed: int | None = None) -> Corpus:
    """A corpus by name or path; downloads are shown by `step`."""
    from fuselm.data.corpora import STORIES, open_corpus

    if seed is not None and name not in STORIES:
        raise ValueError(f"--seed chooses among the built-in stories; {name} is what it is. Leave it out.")
    if limit_mb is not None and not 0 < limit_mb < math.inf:
        raise ValueError(f"--limit-mb is a number of megabytes above 0; got {limit_mb}.")
    limit = None if limit_mb is None else max(1, int(limit_mb * 1e6))
    return open_corpus(
        name, seed=seed or 0, limit_bytes=limit, on_progress=lambda done, total: step("download", done, total)
    )


def check_tokenizer(vocab_size: int | None, characters: bool, special: list[str]) -> None:
    """Refuse a tokenizer that cannot be, whatever the corpus: before that is opened."""
    from fuselm.data.prepare import VOCAB_SIZE, check_vocab_size

    if not characters:
        check_vocab_size(VOCAB_SIZE if vocab_size is None else vocab_size, special)
    elif vocab_size is not None:
        raise ValueError("--characters makes a token of each character; --vocab-size has no say in that. Leave it out.")


def make_tokenizer(
    corpus: Corpus, vocab_size: int | None, characters: bool, special: list[str], threads: int | None, step: Step
) -> Tokenizer:
    """A tokenizer of a corpus: characters, or a BPE of some size."""
    from fuselm.data.prepare import VOCAB_SIZE, character_tokenizer, train_tokenizer

    if characters:
        return character_tokenizer(corpus, special, on_progress=step)
    size = VOCAB_SIZE if vocab_size is None else vocab_size
    return train_tokenizer(corpus, size, special, threads=threads, on_progress=step)


def describe(shard: Shard) -> dict[str, Any]:
    """What `--json` says of a shard."""
    facts = dataclasses.asdict(shard.header)
    facts["tokens_per_document"] = round(facts["num_tokens"] / max(1, facts["num_documents"]), 1)
    return facts


def check_outside(out: Path, corpus: str) -> None:
    """Refuse to write into the folder that the text is read from."""
    from fuselm.data.corpora import corpus_names

    source = Path(corpus).resolve()
    if corpus not in corpus_names() and source.is_dir() and out.resolve().is_relative_to(source):
        raise ValueError(f"What is made of {corpus} cannot lie inside it: the next run would read it. Move --out.")


def _check_out(out: Path, corpus: str) -> None:
    """Refuse before the work what could not be written after it, or would be read as text the next time."""
    check_outside(out, corpus)
    check_writable(out, "--out is a folder")


def _check_unused(out: Path, tokenizer: Path | None) -> None:
    """Refuse to write over tokens or a tokenizer: a run that was begun with them could not go on.

    The tokenizer that is to be used may lie there, since it comes out as it was.
    """
    from fuselm.data.prepare import FILES

    paths = [out / name for name in FILES if (out / name).exists()]
    if found := [path.name for path in paths if tokenizer is None or not path.samefile(tokenizer)]:
        raise ValueError(
            f"A corpus is prepared into a folder without one; {out} holds {', '.join(found)}. Name another folder, or "
            "give --overwrite to replace them."
        )


def _sentence(name: str, facts: dict[str, Any]) -> str:
    tokens, count = f"{name}: {facts['num_tokens']:,} tokens ({facts['dtype']})", facts["num_documents"]
    each = f"{count:,} documents, {facts['tokens_per_document']:,} each"
    return f"{tokens} in {'1 document' if count == 1 else each}"
