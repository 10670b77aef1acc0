"""`fuselm tokenizer`: train, use, look at and convert tokenizers. Reads the command line and prints.

fuselm tokenizer train stories --vocab-size 4096 --out tokenizer.json
fuselm tokenizer encode tokenizer.json "Once upon a time"
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fuselm.cli.errors import told
from fuselm.cli.paths import check_writable, typed_corpus, typed_path
from fuselm.cli.progress import bar, under

if TYPE_CHECKING:
    import numpy as np

    from fuselm.text.tokenizer import Tokenizer

app = typer.Typer(no_args_is_help=True, help="Train, use, look at and convert tokenizers.")

TokenizerPath = Annotated[
    Path,
    typer.Argument(
        parser=typed_path, help="A tokenizer.json, a folder with GPT-2's two files, or a .tiktoken rank file."
    ),
]
CorpusName = Annotated[
    str, typer.Argument(parser=typed_corpus, help="A corpus's name, or the path of a file or folder with text.")
]
GivenTokenizer = Annotated[
    Path | None, typer.Option(parser=typed_path, help="A tokenizer of any format; else one is made.")
]
VocabSize = Annotated[
    int | None, typer.Option(help="Tokens of a trained BPE: 256 bytes, merges, special tokens.", show_default="10000")
]
UNITS = {"tokenizer: merge": "merges"}
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]

TRAIN_HELP = """Train a byte-level BPE tokenizer on a corpus and write it as tokenizer.json.

A corpus is a name (stories, little-stories, tinyshakespeare, wizard-of-oz, tinystories) or the path of a file or
folder: text or .jsonl, also compressed, or .parquet. Only its training part is read, for --characters both parts. The
file can be read by Hugging Face tokenizers too. The same text gives the same tokenizer, whatever the number of threads.
A file that is there already is refused; --overwrite replaces it.

Examples:

  fuselm tokenizer train stories --vocab-size 4096

  fuselm tokenizer train notes/ --vocab-size 10000 --special '<|user|>' --out notes.json

  fuselm tokenizer train tinyshakespeare --characters
"""

ENCODE_HELP = """Print the token ids of a text, given as an argument, by --file, or on stdin.

A text that contains a special token is refused unless --special says what it is: `allow` makes it one token, `text`
encodes it letter by letter like any other text.

Examples:

  fuselm tokenizer encode tokenizer.json "Once upon a time"

  fuselm tokenizer encode tokenizer.json --file book.txt --special text --out book.npy
"""

DECODE_HELP = """Print the text of token ids, given as arguments or on stdin, or of a .npy file by --file.

Ids that are none, and bytes that make no character, are shown as U+FFFD.

Example:

  fuselm tokenizer encode tokenizer.json "Once upon a time" | fuselm tokenizer decode tokenizer.json
"""

SHOW_HELP = """Say what a tokenizer is; with a text, show the tokens it is cut into.

Examples:

  fuselm tokenizer show tokenizer.json

  fuselm tokenizer show tokenizer.json "The quick brown fox"
"""

CONVERT_HELP = """Write a tokenizer in another format.

--to json: tokenizer.json, as Hugging Face tokenizers has it. --to gpt2: a folder with vocab.json and merges.txt. --to
tiktoken: a file of ranks.

Example:

  fuselm tokenizer convert gpt2-files/ --to json --out tokenizer.json
"""


@app.command(help=TRAIN_HELP)
def train(
    corpus: CorpusName,
    vocab_size: VocabSize = None,
    special: Annotated[
        list[str] | None, typer.Option(help="A special token besides <|endoftext|>; may be given several times.")
    ] = None,
    characters: Annotated[bool, typer.Option("--characters", help="One token for each character instead.")] = False,
    limit_mb: Annotated[float | None, typer.Option(help="Use at most this many megabytes of the corpus.")] = None,
    threads: Annotated[int | None, typer.Option(help="Default: one for each core.")] = None,
    out: Annotated[Path, typer.Option(parser=typed_path, help="File to write, or a folder for tokenizer.json.")] = Path(
        "tokenizer.json"
    ),
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file that is there.")] = False,
    as_json: Json = False,
) -> None:
    """Train; the help text is TRAIN_HELP."""
    from fuselm.cli.data import check_tokenizer, make_tokenizer, open_named
    from fuselm.text.formats import json_path

    begin = time.monotonic()
    with told(), bar(UNITS) as step:
        check_tokenizer(vocab_size, characters, special or [])
        path = json_path(out)  # a name that cannot be is refused now, not after the work
        if path.exists() and not overwrite:
            raise ValueError(
                f"A tokenizer is written to a file that is not there yet; {path} is. Name another with --out, or give "
                "--overwrite to replace it."
            )
        check_writable(path.parent, "--out is a file in a folder")
        source = open_named(corpus, limit_mb, step)
        tokenizer = make_tokenizer(source, vocab_size, characters, special or [], threads, under("tokenizer", step))
        path = tokenizer.save(out)
    seconds = time.monotonic() - begin
    if as_json:
        typer.echo(json.dumps({**facts(tokenizer), "path": str(path), "seconds": round(seconds, 3)}))
        return
    typer.echo(f"{path}: {_sentence(tokenizer)}, trained on {source.name} in {seconds:.1f} s")


@app.command(help=ENCODE_HELP)
def encode(
    tokenizer: TokenizerPath,
    text: Annotated[str | None, typer.Argument(help="The text; left out, it is read from --file or stdin.")] = None,
    file: Annotated[Path | None, typer.Option(parser=typed_path, help="A text file of any size.")] = None,
    special: Annotated[str, typer.Option(help="refuse, allow, or text.")] = "refuse",
    threads: Annotated[int | None, typer.Option(help="Default: one for each core.")] = None,
    out: Annotated[
        Path | None, typer.Option(parser=typed_path, help="Write the ids to this .npy file instead of printing them.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Encode; the help text is ENCODE_HELP."""
    with told():
        if out is not None and out.suffix != ".npy":
            raise ValueError(f"--out is a .npy file; got {out}. Name it {out.with_suffix('.npy')}.")
        loaded = load(tokenizer)
        ids = _encode(loaded, text, file, special, threads)
        if out is not None:
            _write_npy(out, ids, loaded.vocab_size)
    if as_json:
        shown: dict[str, Any] = {"ids": ids.tolist()} if out is None else {"path": str(out)}
        typer.echo(json.dumps({"count": len(ids), **shown}))
    elif out is not None:
        typer.echo(f"{out}: {len(ids):,} ids")
    else:
        typer.echo(" ".join(map(str, ids.tolist())))


@app.command(help=DECODE_HELP)
def decode(
    tokenizer: TokenizerPath,
    ids: Annotated[list[str] | None, typer.Argument(help="Token ids; left out, they are read from stdin.")] = None,
    file: Annotated[Path | None, typer.Option(parser=typed_path, help="A .npy file of ids, or a .tokens file.")] = None,
    as_json: Json = False,
) -> None:
    """Decode; the help text is DECODE_HELP."""
    with told():
        if ids and file is not None:
            raise ValueError("Ids are given as arguments or by --file; got both. Leave one out.")
        loaded = load(tokenizer)
        text = loaded.decode(_read_ids(file, loaded) if file is not None else _ids(ids))
    if as_json:
        typer.echo(json.dumps({"text": text}))
    else:
        sys.stdout.buffer.write(text.encode() + (b"\n" if sys.stdout.isatty() and not text.endswith("\n") else b""))
        sys.stdout.flush()


@app.command(help=SHOW_HELP)
def show(
    tokenizer: TokenizerPath,
    text: Annotated[str | None, typer.Argument(help="A text to cut into tokens.")] = None,
    as_json: Json = False,
) -> None:
    """Show; the help text is SHOW_HELP."""
    with told():
        loaded = load(tokenizer)
        pieces = None if text is None else _pieces(loaded, text)
    if as_json:
        typer.echo(json.dumps({**facts(loaded), **({} if pieces is None else {"tokens": pieces})}))
        return
    typer.echo(f"{tokenizer}: {_sentence(loaded)}")
    typer.echo(f"fingerprint: {loaded.fingerprint}")
    for name, token in loaded.special_tokens.items():
        typer.echo(f"special: {token} {name}")
    if pieces is None:
        longest = sorted(loaded.vocab.values(), key=len, reverse=True)[:8]
        typer.echo("longest tokens: " + " ".join(repr(token.decode("utf-8", "replace")) for token in longest))
    for piece in pieces or []:
        raw = bytes.fromhex(piece["bytes"])
        shown = piece["text"] if piece["text"].encode() == raw else raw  # part of a character has no other name
        typer.echo(f"{piece['id']:>8}  {shown!r}")


@app.command(help=CONVERT_HELP)
def convert(
    tokenizer: TokenizerPath,
    to: Annotated[str, typer.Option(help="json, gpt2 or tiktoken.")],
    out: Annotated[Path, typer.Option(parser=typed_path, help="File or folder to write.")],
    as_json: Json = False,
) -> None:
    """Convert; the help text is CONVERT_HELP."""
    from fuselm.text import formats

    with told():
        writers = {"json": formats.save, "gpt2": formats.write_gpt2, "tiktoken": formats.write_tiktoken}
        if to not in writers:
            raise ValueError(f"A format is one of {', '.join(writers)}; got {to!r}.")
        loaded = load(tokenizer)
        path = writers[to](loaded, out)
    typer.echo(json.dumps({**facts(loaded), "path": str(path)}) if as_json else f"{path}: {_sentence(loaded)}")


def load(path: Path) -> Tokenizer:
    """Read a tokenizer of any format."""
    from fuselm.text.tokenizer import Tokenizer

    return Tokenizer.load(path)


def facts(tokenizer: Tokenizer) -> dict[str, Any]:
    """What `--json` says of a tokenizer."""
    return {
        "kind": tokenizer.kind,
        "vocab_size": tokenizer.vocab_size,
        "merges": len(tokenizer.merges),
        "special_tokens": tokenizer.special_tokens,
        "fingerprint": tokenizer.fingerprint,
    }


def _sentence(tokenizer: Tokenizer) -> str:
    kind = "byte-level BPE" if tokenizer.kind == "bpe" else "characters"
    return f"{kind}, {tokenizer.vocab_size:,} tokens, {len(tokenizer.special_tokens)} of them special"


def _encode(tokenizer: Tokenizer, text: str | None, file: Path | None, special: str, threads: int | None) -> np.ndarray:
    import numpy as np

    from fuselm.text.blocks import file_pieces, read_pieces
    from fuselm.text.tokenizer import SpecialTokenError

    options: dict[str, Any] = {
        "refuse": {},
        "allow": {"allowed_special": "all"},
        "text": {"disallowed_special": ()},
    }
    if special not in options:
        raise ValueError(f"--special is one of {', '.join(options)}; got {special!r}.")
    if text is not None and file is not None:
        raise ValueError("A text is given as an argument or by --file; got both. Leave one out.")
    with bar() as step:
        done, total = 0, file.stat().st_size if file is not None else None

        def on_read(size: int) -> None:
            nonlocal done
            done += size
            step("encoding", done, total)

        stdin = read_pieces(sys.stdin.buffer, on_read)
        pieces = [text] if text is not None else file_pieces(file, on_read) if file is not None else stdin
        try:
            parts = list(tokenizer.encode_blocks(pieces, threads=threads, **options[special]))
        except SpecialTokenError as error:
            remedy = "--special allow makes it one token, --special text encodes it as text."
            raise SpecialTokenError(error.token, remedy) from None
    return np.concatenate([np.empty(0, np.uint32), *parts])


def _ids(words: list[str] | None) -> list[int]:
    ids = []
    for word in " ".join(words or [sys.stdin.read()]).replace(",", " ").split():
        try:
            ids.append(int(word))
        except ValueError:
            raise ValueError(f"Token ids are whole numbers; got {word!r}.") from None
    return ids


def _pieces(tokenizer: Tokenizer, text: str) -> list[dict[str, Any]]:
    ids = tokenizer.encode(text, allowed_special="all")
    texts = [(token, tokenizer.token_bytes(token)) for token in ids]
    return [{"id": token, "text": text.decode("utf-8", "replace"), "bytes": text.hex()} for token, text in texts]


def _write_npy(path: Path, ids: np.ndarray, vocab_size: int) -> None:
    import numpy as np

    from fuselm.files import whole_file

    with whole_file(path) as file:
        np.save(file, ids.astype(np.uint16) if vocab_size <= 1 << 16 else ids)


def _read_ids(path: Path, tokenizer: Tokenizer) -> np.ndarray:
    from fuselm.data.shards import open_shard

    return open_shard(path, fingerprint=tokenizer.fingerprint).tokens
