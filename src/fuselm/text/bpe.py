"""Byte-level BPE: trains vocabularies, and chooses between bpe.cpp and its twin in plain Python.

Words are cut as GPT-2 cuts them; special tokens are cut out first and never merged. The most frequent pair of
neighbours is merged, ties go to the pair whose byte strings are greatest, so a vocabulary depends on the text alone and
not on threads, machines or the order of documents. Knows files and documents; corpora are data/'s.

    vocab, merges = train_bpe("stories.txt", 10_000, ["<|endoftext|>"])
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Protocol

import numpy as np

from fuselm.compiler import BuildError
from fuselm.text import native, reference
from fuselm.text.blocks import BLOCK_BYTES, blocks, file_pieces, in_order, thread_count, utf8

Vocab = dict[int, bytes]
Merges = list[tuple[bytes, bytes]]
# Stage ("count" in bytes read, "merge" in merges made), how far it is, and how far it goes (None: not known).
Progress = Callable[[str, int, int | None], None]

NOT_PLAIN = (".gz", ".xz", ".bz2", ".zst", ".jsonl", ".ndjson", ".parquet")
MERGES_PER_CALL = 200  # between two of them Ctrl-C is heard and progress shown


class Trainer(Protocol):
    """What native.py and reference.py both have."""

    def count(self, data: bytes, ends: Sequence[int]) -> None: ...
    def find_cut(self, data: bytes, start: int, searched: int, end: int) -> int: ...
    def merge(self, wanted: int) -> int: ...
    def merges(self) -> list[tuple[int, int]]: ...


class Encoder(Protocol):
    """What native.py, reference.py and characters.py have."""

    def encode(self, data: bytes, allowed: bytes | None = None, refused: bytes | None = None) -> np.ndarray: ...
    def encode_batches(
        self, batches: Iterable[reference.Batch], allowed: bytes | None, refused: bytes | None, threads: int
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]: ...
    def find_cut(self, data: bytes, start: int, searched: int, end: int) -> int: ...


@functools.cache
def backend() -> ModuleType:
    """native.py where bpe.cpp can be compiled, else reference.py, with a warning."""
    try:
        native.library()
    except (BuildError, OSError) as error:
        warnings.warn(
            f"The tokenizer runs in plain Python, hundreds of times slower: bpe.cpp cannot be used here. {error}",
            RuntimeWarning,
            stacklevel=3,
        )
        return reference
    return native


def make_encoder(
    byte_ids: Sequence[int], merges: np.ndarray, specials: Sequence[bytes], special_ids: Sequence[int]
) -> Encoder:
    """An encoder for a vocabulary of ids."""
    chosen = backend()
    if chosen is native:
        return native.NativeEncoder(byte_ids, merges, specials, special_ids)
    return reference.ReferenceEncoder(byte_ids, merges, specials, special_ids)


def train_bpe(
    source: str | Path | Iterable[str | bytes],
    vocab_size: int,
    special_tokens: Sequence[str] = (),
    *,
    threads: int | None = None,
    on_progress: Progress | None = None,
) -> tuple[Vocab, Merges]:
    """Train on a text file, or on documents, and return the vocabulary and the merges in the order they were made.

    Ids 0 to 255 are the bytes, then come the merges, then the special tokens, `vocab_size` in all. A text too small for
    that many gives fewer, with a warning; an empty one is refused.
    """
    _check_source(source)
    specials, wanted = check_special_tokens(special_tokens), merges_wanted(vocab_size, special_tokens)
    trainer, parallel = _trainer(specials)
    if not _count(trainer, source, thread_count(threads) if parallel else 1, on_progress):
        raise ValueError(f"A tokenizer is trained on text; {_named(source)} has none. Give a file that is not empty.")
    made = 0
    while made < wanted and (step := trainer.merge(min(MERGES_PER_CALL, wanted - made))):
        made += step
        if on_progress:
            on_progress("merge", made, wanted)
    if made < wanted:
        warnings.warn(
            f"The text gives {made} merges, not {wanted}: the vocabulary has {256 + made + len(specials)} entries "
            f"instead of {vocab_size}. More text, or a smaller vocab_size, would fill it.",
            UserWarning,
            stacklevel=2,
        )
    return _vocabulary(trainer.merges(), specials)


def merges_wanted(vocab_size: int, special_tokens: Sequence[str] = ()) -> int:
    """How many merges a vocabulary of that size has; one that is too small is refused."""
    specials = check_special_tokens(special_tokens)
    wanted = vocab_size - 256 - len(specials)
    if wanted < 0:
        raise ValueError(
            f"A byte-level vocabulary has at least 256 bytes and its special tokens, here {256 + len(specials)} "
            f"entries; got vocab_size={vocab_size}. Ask for more, or for fewer special tokens."
        )
    return wanted


def _check_source(source: str | Path | Iterable[str | bytes]) -> None:
    if isinstance(source, bytes):
        raise TypeError("A tokenizer is trained on a file or on documents; got bytes. Put them into a list.")
    if isinstance(source, str | Path) and (Path(source).is_dir() or Path(source).suffix.lower() in NOT_PLAIN):
        raise ValueError(
            f"train_bpe reads one file of plain text; {source} is not. Give it documents instead: "
            'fuselm.data.open_corpus(path).documents("train") reads folders, .jsonl, .parquet and compressed files.'
        )


def check_special_tokens(special_tokens: Iterable[str]) -> list[bytes]:
    """The bytes of special tokens, or what is wrong with them."""
    if isinstance(special_tokens, str):
        raise TypeError(f"special_tokens is a list of strings; got the string {special_tokens!r}. Put it into a list.")
    specials = [utf8(token) for token in special_tokens]
    for token in specials:
        if len(token) < 2:
            raise ValueError(
                f"A special token is at least two bytes long (each byte alone is a token already); got {token!r}."
            )
    if twice := [token for token in specials if specials.count(token) > 1]:
        raise ValueError(f"Special tokens are all different; got {twice[0]!r} twice. Leave one out.")
    return specials


def _trainer(specials: Sequence[bytes]) -> tuple[Trainer, bool]:
    if backend() is native:
        return native.NativeTrainer(specials), True
    return reference.ReferenceTrainer(specials), False


def _count(
    trainer: Trainer, source: str | Path | Iterable[str | bytes], threads: int, on_progress: Progress | None
) -> int:
    """Count the words of a file or of documents; returns the number of bytes seen."""
    total = Path(source).stat().st_size if isinstance(source, str | Path) else None
    parts = _file_parts(source, trainer) if isinstance(source, str | Path) else _document_parts(source)
    seen = 0

    def count(part: tuple[bytes, list[int]]) -> int:
        trainer.count(*part)
        return len(part[0])

    for size in in_order(count, parts, threads):
        seen += size
        if on_progress:
            on_progress("count", seen, total)
    return seen


def _file_parts(path: str | Path, trainer: Trainer) -> Iterator[tuple[bytes, list[int]]]:
    for block in blocks(file_pieces(path), trainer.find_cut):
        yield block, [len(block)]


def _document_parts(documents: Iterable[str | bytes]) -> Iterator[tuple[bytes, list[int]]]:
    """Documents joined into blocks, with the place where each one ends: no word crosses from one to the next."""
    held: list[bytes] = []
    ends: list[int] = []
    size = 0
    for document in documents:
        held.append(utf8(document))
        size += len(held[-1])
        ends.append(size)
        if size >= BLOCK_BYTES:
            yield b"".join(held), ends
            held, ends, size = [], [], 0
    if size:
        yield b"".join(held), ends


def _vocabulary(pairs: Sequence[tuple[int, int]], specials: Sequence[bytes]) -> tuple[Vocab, Merges]:
    tokens = [bytes([byte]) for byte in range(256)]
    merges: Merges = []
    for left, right in pairs:
        merges.append((tokens[left], tokens[right]))
        tokens.append(tokens[left] + tokens[right])
    return dict(enumerate([*tokens, *specials])), merges


def _named(source: object) -> str:
    return str(source) if isinstance(source, str | Path) else "the documents given"
