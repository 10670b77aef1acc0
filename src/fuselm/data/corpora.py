"""What a corpus is: documents for training and for validation, from a name or from a path.

    corpus = open_corpus("tinystories", limit_bytes=50_000_000, on_progress=bar.update)
    for document in corpus.documents("train"):  # bytes, one at a time
        ...
    open_corpus("notes/")  # any text, .jsonl, .parquet, compressed file or folder: see readers.py

The names are `stories` and `little-stories` (built in: no network, no end, their own validation stories; the second
told from a small world, for models that are trained in minutes) and those in SPECS, which are downloaded once to
`fuselm.files.cache_dir()/corpora/<name>/` and verified. Which documents are for validation is fixed, so that a run
today and a run next year compare:

| corpus | validation |
|---|---|
| `stories`, `little-stories`, `tinystories`, a folder with `train.*` and `valid.*` (or `validation.*`) | their own |
| anything else with 20 documents or more | documents 19, 39, 59, …, counted from 0 |
| anything else with fewer (one book, `tinyshakespeare`, `wizard-of-oz`) | what follows 90 % of the bytes |

It does not know tokens, nor how a file is read (readers.py) or fetched (download.py).
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain, islice
from pathlib import Path
from typing import Protocol

from fuselm.data.download import Progress, fetch
from fuselm.data.readers import SEPARATOR, CorpusError, is_blank, read_documents, size_hint, text_files
from fuselm.files import cache_dir

__all__ = [
    "SEPARATOR",
    "SPECS",
    "SPLITS",
    "Corpus",
    "CorpusError",
    "CorpusSpec",
    "RemoteFile",
    "corpus_names",
    "open_corpus",
    "open_spec",
    "strip_gutenberg",
]

SPLITS = ("train", "valid")
# The built-in corpora, and how many options of any choice each takes: None is all of them, see story/world.py.
STORIES: dict[str, int | None] = {"stories": None, "little-stories": 2}
STORIES_BYTES = 20_000_000  # for training, unless a limit says otherwise
STORIES_VALID, STORIES_VALID_LEAST = 20, 50_000  # for validation, one byte for so many of those; bytes at the least
VALID_EVERY = 20
TRAIN_SHARE = 0.9
# Folders that come split: train.txt, train.jsonl.gz, train-00000-of-00004.parquet; valid or validation likewise.
SPLIT_NAME = re.compile(r"(train|valid|validation)(-\d+-of-\d+)?\.", re.IGNORECASE)


# --- what a corpus is ------------------------------------------------------------------------------------------------


class Source(Protocol):
    """Where documents come from, before any limit; `documents` may leave blank ones in."""

    def documents(self, split: str) -> Iterator[bytes]: ...
    def bytes_hint(self, split: str) -> int | None: ...
    def about(self) -> str: ...


@dataclass(frozen=True)
class Corpus:
    """Documents in a fixed order. With a limit, whole documents are given as long as they fit into that many bytes."""

    name: str
    source: Source
    limits: dict[str, int | None]
    separator: str = SEPARATOR

    def documents(self, split: str) -> Iterator[bytes]:
        """The documents of "train" or "valid", from the first on at each call; what must be downloaded is, first."""
        _check_split(split)
        documents: Iterator[bytes] = (text for text in self.source.documents(split) if not is_blank(text))
        limit = self.limits[split]
        if limit is not None:
            documents = _limited(documents, limit)
        first = next(documents, None)
        if first is None:
            purpose = "training" if split == "train" else "validation"
            raise CorpusError(
                f"{self.name} is too small: its part for {purpose} has no text. Add text, or give a folder with a "
                "train.txt and a valid.txt."
            )
        return chain((first,), documents)

    def bytes_hint(self, split: str) -> int | None:
        """About how many bytes a split has, for progress bars; None where only reading would tell."""
        _check_split(split)
        known = [size for size in (self.source.bytes_hint(split), self.limits[split]) if size is not None]
        return min(known, default=None)

    def describe(self) -> str:
        """One line: what it is, how it is split, how much of it is used."""
        train, valid = (self.limits[split] for split in SPLITS)
        limited = f"; at most {train:,} bytes for training and {valid:,} for validation" if train and valid else ""
        return f"{self.name}: {self.source.about()}{limited}"


def _check_split(split: str) -> None:
    if split not in SPLITS:
        raise ValueError(f"A split is one of {', '.join(SPLITS)}; got {split!r}.")


def _limited(documents: Iterable[bytes], limit: int) -> Iterator[bytes]:
    """Whole documents up to a number of bytes. A first one that is longer is cut: a book is a single document."""
    left = limit
    for document in documents:
        if len(document) > left:
            if left == limit and (at := _boundary(document, left, forward=False)):
                yield document[:at]
            return
        yield document
        left -= len(document)


def _boundary(document: bytes, at: int, *, forward: bool) -> int:
    """The position nearest to `at`, in one direction, where no UTF-8 character is cut in two."""
    at = min(max(at, 0), len(document))
    # A character has at most three bytes after its first: where there are more, it is not UTF-8 and any cut will do.
    for _ in range(3):
        if not (0 < at < len(document) and 0x80 <= document[at] < 0xC0):
            break
        at += 1 if forward else -1
    return at


# --- splits ----------------------------------------------------------------------------------------------------------


def _by_index(documents: Iterable[bytes], split: str) -> Iterator[bytes]:
    for index, document in enumerate(documents):
        if (index % VALID_EVERY == VALID_EVERY - 1) == (split == "valid"):
            yield document


def _by_position(documents: Iterable[bytes], total: int, split: str) -> Iterator[bytes]:
    """Cut the text, all documents end to end, at int(0.9 × total) bytes; the document that is there is cut in two."""
    cut = max(1, int(TRAIN_SHARE * total))
    for document in documents:
        at = _boundary(document, cut, forward=True)
        yield document[:at] if split == "train" else document[at:]
        cut -= len(document)


# --- built in --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Stories:
    seed: int
    variety: int | None

    def documents(self, split: str) -> Iterator[bytes]:
        # Imported here: only those who want stories load the words they are made of.
        from fuselm.data.stories import stories

        return (story.encode() for story in stories(self.seed, split=split, variety=self.variety))

    def bytes_hint(self, split: str) -> int | None:
        return None  # endless: the limit is what there is

    def about(self) -> str:
        world = "" if self.variety is None else " from a small world"
        how = "written as they are read; other ones for validation"
        return f"made-up stories{world} in simple English, seed {self.seed}, {how}"


# --- downloads -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RemoteFile:
    """A file to download. Without a checksum, what a spec's `clean` makes of it decides whether it is the right one."""

    url: str
    size: int | None = None
    sha256: str | None = None

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]


@dataclass(frozen=True)
class CorpusSpec:
    """A corpus with a name. Without a validation file, the train file is one text and is split by position.

    `clean` takes from that one text what is not the work itself, and raises ValueError for a file that is another; the
    checksum of what it leaves is `clean_sha256` for the edition that was looked at when this was written.
    """

    name: str
    title: str
    train: RemoteFile
    valid: RemoteFile | None = None
    clean: Callable[[bytes], bytes] | None = None
    clean_sha256: str | None = None

    def path(self, file: RemoteFile) -> Path:
        """Where the file is, or goes when it is put there by hand."""
        return cache_dir() / "corpora" / self.name / file.name


def strip_gutenberg(raw: bytes, title: str) -> bytes:
    """The book alone: what stands between Gutenberg's START and END lines, without BOM, CRLF and outer blanks."""
    text = raw.removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n")
    start = re.search(rb"^\*\*\* ?START OF [^\n]*\n", text, re.MULTILINE)
    end = re.compile(rb"^\*\*\* ?END OF ", re.MULTILINE).search(text, start.end()) if start else None
    if start is None or end is None:
        raise CorpusError("A Project Gutenberg text has lines *** START OF … and *** END OF …; this one lacks them.")
    if title.upper().encode() not in start[0].upper():
        raise CorpusError(f"It is not {title} but {start[0].decode(errors='replace').strip()}.")
    # Older editions repeat before the END line, in words, that this was the end.
    return re.sub(
        rb"\s*^End of (the )?Project Gutenberg[^\n]*\Z", b"", text[start.end() : end.start()].strip(), flags=re.M
    )


_TINYSTORIES_URL = "https://huggingface.co/datasets/roneneldan/TinyStories/resolve/main/TinyStoriesV2-GPT4-{}.txt"

SPECS: dict[str, CorpusSpec] = {
    spec.name: spec
    for spec in (
        CorpusSpec(
            "tinyshakespeare",
            "40,000 lines of Shakespeare's plays",
            RemoteFile(
                "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
                1_115_394,
                "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
            ),
        ),
        CorpusSpec(
            "wizard-of-oz",
            "The Wonderful Wizard of Oz by L. Frank Baum (Project Gutenberg #55)",
            # No checksum of the file: Gutenberg rewrites its header now and then, and corrects the book itself too
            # (quotation marks became typographic after 2008, and misprints are still being mended). That it is this
            # book and that it is whole is seen by its START and END lines.
            RemoteFile("https://www.gutenberg.org/cache/epub/55/pg55.txt"),
            clean=partial(strip_gutenberg, title="The Wonderful Wizard of Oz"),
            # The edition of 1 July 2008, 208,346 bytes; `describe` says when a copy is another.
            clean_sha256="34f239e4661183e50d4e9bc7150f98e2d10c5d3b9cba94f6e342703328b24b73",
        ),
        CorpusSpec(
            "tinystories",
            "2.7 million short stories by GPT-4 for small children's vocabulary (TinyStoriesV2-GPT4)",
            # Sizes and sums as several people who hold both files have published them, independently and alike.
            RemoteFile(
                _TINYSTORIES_URL.format("train"),
                2_227_753_162,
                "6418d412de72888f52b5142c761ac21a582f7d1166f0bfbdb5f03ccfdec90443",
            ),
            RemoteFile(
                _TINYSTORIES_URL.format("valid"),
                22_502_601,
                "6874bae9a4c1a4e7edcf0e53b86c17817e9cf881fc75ff2368da457b80c0585d",
            ),
        ),
    )
}


@dataclass(frozen=True)
class _Download:
    spec: CorpusSpec
    on_progress: Progress | None

    def documents(self, split: str) -> Iterator[bytes]:
        path = self._fetch(split)
        if self.spec.valid:
            return read_documents(path)
        text = self._clean(path)
        return _by_position([text], len(text), split)

    def bytes_hint(self, split: str) -> int | None:
        size = self._file(split).size
        if size is None or self.spec.valid:
            return size
        train = int(TRAIN_SHARE * size)
        return train if split == "train" else size - train

    def about(self) -> str:
        how = "with a validation file of its own" if self.spec.valid else "the last tenth is for validation"
        return f"{self.spec.title}, {how}{self._edition()}"

    def _edition(self) -> str:
        path = self.spec.path(self.spec.train)
        if self.spec.clean_sha256 is None or not path.exists():
            return ""
        digest = hashlib.sha256(self._clean(path)).hexdigest()
        return "" if digest == self.spec.clean_sha256 else f"; an edition of its own (sha256 {digest[:16]}…)"

    def _clean(self, path: Path) -> bytes:
        raw = path.read_bytes()
        return self.spec.clean(raw) if self.spec.clean else raw

    def _fetch(self, split: str) -> Path:
        file = self._file(split)
        path = self.spec.path(file)
        return fetch(
            file.url, path, sha256=file.sha256, size=file.size, check=self._check, on_progress=self.on_progress
        )

    def _check(self, path: Path) -> None:
        if self.spec.clean:
            self._clean(path)

    def _file(self, split: str) -> RemoteFile:
        return self.spec.valid if self.spec.valid and split == "valid" else self.spec.train


# --- local files -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Files:
    """Files, one after the other, as one corpus without a split of its own."""

    paths: tuple[Path, ...]

    def documents(self, split: str) -> Iterator[bytes]:
        count, size = self._beginning
        documents = _read_all(self.paths)
        return _by_index(documents, split) if count >= VALID_EVERY else _by_position(documents, size, split)

    def bytes_hint(self, split: str) -> int | None:
        size = _total_hint(self.paths)
        if size is None:
            return None
        train = 1 - 1 / VALID_EVERY if self._beginning[0] >= VALID_EVERY else TRAIN_SHARE
        return int(size * (train if split == "train" else 1 - train))

    def about(self) -> str:
        count = self._beginning[0]
        every = f"{VALID_EVERY} documents or more, every {VALID_EVERY}th for validation"
        few = f"{count} document{'s' * (count > 1)}, the last tenth of the text for validation"
        return f"{_counted(self.paths)}, {every if count >= VALID_EVERY else few}"

    @cached_property
    def _beginning(self) -> tuple[int, int]:
        """How many of the first 20 documents there are, and their bytes: of the whole corpus where there are fewer."""
        sizes = [len(document) for document in islice(_read_all(self.paths), VALID_EVERY)]
        return len(sizes), sum(sizes)


@dataclass(frozen=True)
class _SplitFiles:
    """Files of which each belongs to one split."""

    paths: dict[str, tuple[Path, ...]]

    def documents(self, split: str) -> Iterator[bytes]:
        return _read_all(self.paths[split])

    def bytes_hint(self, split: str) -> int | None:
        return _total_hint(self.paths[split])

    def about(self) -> str:
        return f"{_counted(self.paths['train'])} for training, {_counted(self.paths['valid'])} for validation"


def _read_all(paths: Iterable[Path]) -> Iterator[bytes]:
    return chain.from_iterable(read_documents(path) for path in paths)


def _total_hint(paths: Iterable[Path]) -> int | None:
    sizes = [size_hint(path) for path in paths]
    return None if None in sizes else sum(size for size in sizes if size is not None)


def _counted(paths: tuple[Path, ...]) -> str:
    return f"{len(paths)} file{'s' * (len(paths) > 1)}"


def _local(path: Path) -> Source:
    if path.is_dir():
        source = _folder(path)
    elif path.is_file():
        source = _Files((path,))
    else:  # a pipe cannot be read twice, and a corpus is read at least twice
        raise CorpusError(f"A corpus is a file or a folder; {path} is neither. Save the text to a file first.")
    if isinstance(source, _Files):
        if next(_read_all(source.paths), None) is None:
            raise CorpusError(f"{path} has no text: {'its files are' if path.is_dir() else 'it is'} empty or blank.")
        return source
    for split in SPLITS:
        if next(source.documents(split), None) is None:
            names = ", ".join(file.name for file in source.paths[split])
            raise CorpusError(f"{path} has no text for {split}: {names} is empty or blank.")
    return source


def _folder(folder: Path) -> _Files | _SplitFiles:
    files = text_files(folder)
    if not files:
        raise CorpusError(f"{folder} has no text: below it are no files, or only hidden and binary ones.")
    paths: dict[str, list[Path]] = {split: [] for split in SPLITS}
    for file in files:
        if (match := SPLIT_NAME.match(file.name)) and file.parent == folder:
            paths["train" if match[1].lower() == "train" else "valid"].append(file)
    if all(paths.values()):
        return _SplitFiles({split: tuple(of_split) for split, of_split in paths.items()})
    return _Files(tuple(files))


# --- opening ---------------------------------------------------------------------------------------------------------


def corpus_names() -> tuple[str, ...]:
    """The corpora that have a name; any other is a path."""
    return (*STORIES, *SPECS)


def open_corpus(
    name_or_path: str | os.PathLike[str],
    *,
    seed: int = 0,
    limit_bytes: int | None = None,
    on_progress: Progress | None = None,
) -> Corpus:
    """The corpus of that name, or of the file or folder at that path (`./stories` for one that has a corpus's name).

    `seed` chooses among the endless built-in stories and is nothing to the others. `limit_bytes` is the most that each
    split gives; built-in stories, which would never end, give 20 MB for training unless it says otherwise, and for
    validation a twentieth of that, but 50 kB if there are as many.
    `on_progress` is told of downloads: bytes there, bytes in all.
    """
    limits = _limits(limit_bytes)
    if isinstance(name_or_path, str) and name_or_path in STORIES:
        train = limits["train"] or STORIES_BYTES
        return Corpus(
            name_or_path,
            _Stories(seed, STORIES[name_or_path]),
            {"train": train, "valid": min(train, max(train // STORIES_VALID, STORIES_VALID_LEAST))},
        )
    if isinstance(name_or_path, str) and name_or_path in SPECS:
        return open_spec(SPECS[name_or_path], limit_bytes=limit_bytes, on_progress=on_progress)
    path = Path(os.path.expanduser(name_or_path))  # where Path's own method ends in an error, ~nobody stays as it is
    if not path.exists():
        raise CorpusError(
            f"A corpus is one of {', '.join(corpus_names())}, or the path of a file or folder with text; "
            f"{os.fspath(name_or_path)!r} is neither."
        )
    return Corpus(os.fspath(name_or_path), _local(path), limits)


def open_spec(spec: CorpusSpec, *, limit_bytes: int | None = None, on_progress: Progress | None = None) -> Corpus:
    """A corpus that is downloaded when its documents are asked for."""
    return Corpus(spec.name, _Download(spec, on_progress), _limits(limit_bytes))


def _limits(limit_bytes: int | None) -> dict[str, int | None]:
    if limit_bytes is not None and limit_bytes < 1:
        raise ValueError(f"limit_bytes is at least 1, or None for no limit; got {limit_bytes}.")
    return dict.fromkeys(SPLITS, limit_bytes)
