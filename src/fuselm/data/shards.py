"""Token files: one tokenised split is one file, written whole or not at all and read through a memory map.

It knows ids and where documents start; it does not know text, tokenizers (only the fingerprint of one) or batches
(loader.py). A `.npy` file, a one-dimensional array of integers, is read as well; it names no tokenizer, so whether it
goes with yours cannot be checked.

    with ShardWriter("train.tokens", vocab_size=50257, fingerprint=tokenizer.fingerprint, separator=50256) as shard:
        shard.append(ids)  # any number of times, blocks of any length
    shard = open_shard("train.tokens", fingerprint=tokenizer.fingerprint)
    shard.tokens[:10], shard.documents[:10], shard.header.source

The layout, every number little-endian: MAGIC, a JSON header and spaces, 4096 bytes together; the tokens; zeros up to a
multiple of 8; the start of each document as uint64. The same ids make the same bytes, in whatever blocks they came.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from fuselm.files import whole_file

MAGIC = b"fuselm tokens\n"
NUMPY_MAGIC = b"\x93NUMPY"
VERSION = 1
HEADER_BYTES = 4096  # a page, so that the tokens are aligned for any reader
INDEX_ALIGNMENT = 8
INDEX_DTYPE = np.dtype("<u8")
DTYPES: dict[str, np.dtype] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
MAX_VOCAB_SIZE = 2**31  # batches are int32
BLOCK = 1 << 22  # ids handled at once: large enough to be quick, small enough to keep memory constant


class ShardError(ValueError):
    """A token file that cannot be written or read as asked."""


@dataclass(frozen=True)
class ShardHeader:
    """What a token file says about itself. Of a `.npy` file, version is 0 and what it does not say is None."""

    version: int
    dtype: str
    num_tokens: int
    num_documents: int
    vocab_size: int | None
    fingerprint: str | None
    sha256: str | None  # of everything after the header
    separator: int | None
    source: Mapping[str, Any]


# --- writing ---------------------------------------------------------------------------------------------------------


class ShardWriter:
    """Streams ids into a token file that appears, whole, when the `with` block ends well.

    A document ends with the separator, which belongs to it; the next one starts after it. Without a separator all is
    one document. Memory does not grow with the tokens, only by 8 bytes for each document.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        vocab_size: int,
        fingerprint: str,
        separator: int | None,
        source: Mapping[str, Any] | None = None,
    ) -> None:
        self.path, self.vocab_size, self.fingerprint = Path(path), vocab_size, fingerprint
        self.separator, self.source = separator, _plain(source or {})
        _check_identity(vocab_size, fingerprint, separator)
        self.dtype = "uint16" if vocab_size <= 2**16 else "uint32"
        _render(self._header(2**63, 2**63, "0" * 64))  # a source that is too large is refused now, not after hours
        self._stack = ExitStack()
        self._file: BinaryIO | None = None

    def __enter__(self) -> Self:
        self._starts = array("Q")  # compact: a list of arrays would cost a hundred bytes for each document
        self._position = 0
        self._digest = hashlib.sha256()
        self._file = self._stack.enter_context(whole_file(self.path))
        # On the stack above the file: when finishing fails (a full disk), the file hears of it and leaves nothing.
        self._stack.push(self._finish)
        self._file.write(bytes(HEADER_BYTES))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._stack.__exit__(kind, error, trace)
        finally:
            self._file = None

    def append(self, ids: np.ndarray) -> None:
        """Write a block of ids. One outside the vocabulary is refused, and then nothing of the block is written."""
        if self._file is None:
            raise ShardError("Ids are appended inside the writer's `with` block; it is not open. Write `with` around.")
        ids = np.asarray(ids)
        if ids.size == 0:  # of any dtype: the ids of an empty text arrive as an empty float array
            return
        _check_ids(ids, self.vocab_size)
        for start in range(0, ids.size, BLOCK):
            block = np.ascontiguousarray(ids[start : start + BLOCK], dtype=DTYPES[self.dtype])
            if self._position == 0:
                self._starts.append(0)
            if self.separator is not None:
                self._starts.frombytes(_starts_after(block, self.separator, self._position).astype(np.uint64).tobytes())
            self._write(block.data)
            self._position += block.size

    def _write(self, data: memoryview | bytes) -> None:
        assert self._file is not None
        self._digest.update(data)
        self._file.write(data)

    def _finish(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None or self._file is None:
            return
        starts = np.frombuffer(self._starts, dtype=np.uint64)
        starts = starts[starts < self._position]  # a final separator starts no document: there is nothing after it
        self._write(bytes(-self._position * DTYPES[self.dtype].itemsize % INDEX_ALIGNMENT))
        self._write(starts.astype(INDEX_DTYPE).data)
        self._file.seek(0)
        self._file.write(_render(self._header(self._position, starts.size, self._digest.hexdigest())))

    def _header(self, num_tokens: int, num_documents: int, sha256: str) -> ShardHeader:
        return ShardHeader(
            version=VERSION,
            dtype=self.dtype,
            num_tokens=num_tokens,
            num_documents=num_documents,
            vocab_size=self.vocab_size,
            fingerprint=self.fingerprint,
            sha256=sha256,
            separator=self.separator,
            source=self.source,
        )


def _plain(source: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return json.loads(json.dumps(dict(source), sort_keys=True, allow_nan=False))
    except (TypeError, ValueError) as error:
        message = "A token file's source is a dict of JSON values, such as the names of corpus and split"
        raise ShardError(f"{message}; got {source!r} ({error}). Give strings and finite numbers.") from error


def _check_identity(vocab_size: int, fingerprint: str, separator: int | None) -> None:
    if not 1 <= vocab_size <= MAX_VOCAB_SIZE:
        raise ShardError(f"vocab_size is 1 to 2**31, as ids are int32; got {vocab_size}. Give the tokenizer's own.")
    if not _is_digest(fingerprint):
        message = f"A fingerprint is 64 lower-case hex digits; got {fingerprint!r}."
        raise ShardError(f"{message} Give the tokenizer's own `fingerprint`.")
    if separator is not None and not 0 <= separator < vocab_size:
        message = f"The separator is an id of the vocabulary, 0 to {vocab_size - 1}; got {separator}."
        raise ShardError(f"{message} Give the id that ends a document, or None.")


def _check_ids(ids: np.ndarray, vocab_size: int) -> None:
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        message = f"Ids are a one-dimensional array of integers; got {ids.dtype} of shape {ids.shape}."
        raise ShardError(f"{message} Flatten it, or convert it to uint32 first.")
    smallest, largest = int(ids.min()), int(ids.max())
    if smallest < 0 or largest >= vocab_size:
        wrong = smallest if smallest < 0 else largest
        message = f"Ids are 0 to {vocab_size - 1}, as vocab_size is {vocab_size}; got {wrong}."
        raise ShardError(f"{message} Encode with the tokenizer whose vocab_size this is.")


def _starts_after(ids: np.ndarray, separator: int, offset: int) -> np.ndarray:
    """Where documents start because a separator stands before; `offset` is the position of ids[0]."""
    return np.flatnonzero(ids == separator) + (offset + 1)


def _render(header: ShardHeader) -> bytes:
    text = MAGIC + json.dumps({**asdict(header), "byte_order": "little"}, sort_keys=True).encode()
    if len(text) >= HEADER_BYTES:
        message = f"A token file's header is {HEADER_BYTES} bytes; with this source it takes {len(text) + 1}."
        raise ShardError(f"{message} Give a smaller source: names, not contents.")
    return text.ljust(HEADER_BYTES - 1) + b"\n"


# --- reading ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Shard:
    """A token file: its ids (a np.memmap: nothing is read before it is used), and where its documents start."""

    path: Path
    header: ShardHeader
    tokens: np.ndarray = field(repr=False)
    documents: np.ndarray = field(repr=False)
    body: np.ndarray | None = field(repr=False)  # the bytes that header.sha256 is of; None for a .npy file

    def __len__(self) -> int:
        return self.header.num_tokens

    def verify(self) -> None:
        """Read it all and refuse it unless it is what was written; of a `.npy` file, unless each id fits an int32."""
        if self.body is None:
            for _, block in _blocks(self.tokens):
                _check_range(block, self.path)
            return
        digest = hashlib.sha256()
        for _, block in _blocks(self.body):
            digest.update(block.data)
        if digest.hexdigest() != self.header.sha256:
            expected, found = _short(self.header.sha256), _short(digest.hexdigest())
            message = f"{self.path} is damaged: its header promises sha256 {expected}, its bytes give {found}."
            raise ShardError(f"{message} Prepare the corpus again.")


def open_shard(path: str | Path, *, fingerprint: str | None = None, separator: int | None = None) -> Shard:
    """Map a token file, and refuse one that another tokenizer than `fingerprint` made.

    `separator` is for `.npy` files, which do not say where documents end: it is searched for, through the whole file.
    Without it such a file is one document.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            block, size = file.read(HEADER_BYTES), os.fstat(file.fileno()).st_size
            if block.startswith(NUMPY_MAGIC):
                return _open_npy(path, separator)
            header = _parse(block, path)
            _check_size(header, size, path)
            raw = np.memmap(file, dtype=np.uint8, mode="r")
    except FileNotFoundError:
        message = f"A token file is needed and {path} does not exist."
        raise ShardError(f"{message} Prepare the corpus, or correct the path.") from None
    except IsADirectoryError:
        raise ShardError(f"A token file is needed and {path} is a folder. Name a file in it.") from None
    _check_asked(header, fingerprint, separator, path)
    end = HEADER_BYTES + header.num_tokens * DTYPES[header.dtype].itemsize
    tokens = raw[HEADER_BYTES:end].view(DTYPES[header.dtype])
    documents = raw[raw.size - header.num_documents * INDEX_DTYPE.itemsize :].view(INDEX_DTYPE)
    return Shard(path, header, tokens, documents, body=raw[HEADER_BYTES:])


def _parse(block: bytes, path: Path) -> ShardHeader:
    if not block:
        raise ShardError(f"A token file starts with a header and {path} is empty. Prepare the corpus again.")
    if not block.startswith(MAGIC) and not MAGIC.startswith(block):
        message = f"A token file starts with {MAGIC!r} (or is a .npy file); {path} starts with {block[: len(MAGIC)]!r}."
        raise ShardError(f"{message} Prepare the corpus to make a token file of text.")
    if len(block) < HEADER_BYTES:
        message = f"{path} is truncated: a header is {HEADER_BYTES} bytes and it has {len(block)}."
        raise ShardError(f"{message} Copy it again, or prepare the corpus again.")
    try:
        fields = json.loads(block[len(MAGIC) :])
    except (ValueError, RecursionError):
        fields = None
    version = fields.get("version") if isinstance(fields, dict) else None
    if type(version) is int and version > VERSION:
        message = f"This fuselm reads token files up to version {VERSION}; {path} is of version {version}."
        raise ShardError(f"{message} Update fuselm, or prepare the corpus again with this one.")
    if not isinstance(fields, dict) or (wrong := _first_wrong(fields)):
        reason = f"{wrong!r} is {fields.get(wrong)!r}" if isinstance(fields, dict) else "it is not JSON"
        raise ShardError(f"The header of {path} is damaged: {reason}. Copy it again, or prepare the corpus again.")
    return ShardHeader(**{name: fields[name] for name in ShardHeader.__dataclass_fields__})


def _first_wrong(fields: Mapping[str, Any]) -> str:
    """The first field of a header that cannot be right; empty when all can."""

    def counts(name: str, low: int, high: float) -> bool:
        return type(fields.get(name)) is int and low <= fields[name] <= high

    right: dict[str, Callable[[], bool]] = {  # in this order: a later one relies on those before
        "version": lambda: counts("version", 1, VERSION),
        "byte_order": lambda: fields.get("byte_order") == "little",
        "dtype": lambda: isinstance(fields.get("dtype"), str) and fields["dtype"] in DTYPES,
        "num_tokens": lambda: counts("num_tokens", 0, float("inf")),
        "num_documents": lambda: counts("num_documents", min(1, fields["num_tokens"]), fields["num_tokens"]),
        "vocab_size": lambda: counts("vocab_size", 1, MAX_VOCAB_SIZE),
        "fingerprint": lambda: _is_digest(fields.get("fingerprint")),
        "sha256": lambda: _is_digest(fields.get("sha256")),
        "separator": lambda: fields.get("separator", "") is None or counts("separator", 0, fields["vocab_size"] - 1),
        "source": lambda: isinstance(fields.get("source"), dict),
    }
    return next((name for name, is_right in right.items() if not is_right()), "")


def _check_size(header: ShardHeader, size: int, path: Path) -> None:
    tokens = header.num_tokens * DTYPES[header.dtype].itemsize
    index = header.num_documents * INDEX_DTYPE.itemsize
    expected = HEADER_BYTES + tokens + -tokens % INDEX_ALIGNMENT + index
    if size != expected:
        state = "truncated" if size < expected else "longer than it should be"
        message = f"{path} is {state}: its header promises {expected} bytes and it has {size}."
        raise ShardError(f"{message} Copy it again, or prepare the corpus again.")


def _check_asked(header: ShardHeader, fingerprint: str | None, separator: int | None, path: Path) -> None:
    if fingerprint is not None and fingerprint != header.fingerprint:
        made, asked = _short(header.fingerprint), _short(fingerprint)
        message = f"Tokens are read with the tokenizer that made them: {path} was made by {made}, and this is {asked}."
        raise ShardError(f"{message} Prepare the corpus again with this tokenizer, or name the one that made the file.")
    if separator is not None and separator != header.separator:
        message = f"The documents of {path} end with id {header.separator}, as its header says; asked for {separator}."
        raise ShardError(f"{message} Leave `separator` out: it is for .npy files.")


def _open_npy(path: Path, separator: int | None) -> Shard:
    try:
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # of a damaged header, numpy lets errors of Python's own tokenizer through as well
        message = f"A .npy token file is a whole array of integers; {path} cannot be mapped ({error})."
        raise ShardError(f"{message} Save the ids again with numpy.save.") from error
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        message = f"A .npy token file is a one-dimensional array of integers; {path} is {tokens.dtype} {tokens.shape}."
        raise ShardError(f"{message} Save the ids as np.uint16 or np.uint32, flattened.")
    starts = [np.zeros(min(1, tokens.size), dtype=np.int64)]
    if separator is not None:
        starts += [_starts_after(block, separator, offset) for offset, block in _blocks(tokens)]
    documents = np.concatenate(starts).astype(INDEX_DTYPE)
    documents = documents[documents < tokens.size]
    header = ShardHeader(0, tokens.dtype.name, tokens.size, documents.size, None, None, None, separator, {})
    return Shard(path, header, tokens, documents, body=None)


def _blocks(tokens: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """The array in blocks, each with its offset."""
    for start in range(0, tokens.size, BLOCK):
        yield start, np.asarray(tokens[start : start + BLOCK])


def _check_range(ids: np.ndarray, path: Path) -> None:
    if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= MAX_VOCAB_SIZE):
        message = f"Ids are 0 to 2**31 - 1; {path} has ids from {ids.min()} to {ids.max()}."
        raise ShardError(f"{message} Save it again without them.")


def _is_digest(text: object) -> bool:
    return isinstance(text, str) and re.fullmatch(r"[0-9a-f]{64}", text) is not None


def _short(digest: str | None) -> str:
    return f"{digest[:12]}…" if digest else "none"


# --- several as one --------------------------------------------------------------------------------------------------


class Concatenated:
    """Shards one after another as one sequence of tokens; they stay in their maps, and only rows are copied.

    A document ends with its shard.
    """

    def __init__(self, shards: Shard | Sequence[Shard]) -> None:
        if isinstance(shards, str | Path):
            raise TypeError(
                f"Tokens are read from shards; got the path {str(shards)!r}. Open it with open_shard, or a prepared "
                'folder with open_prepared(folder)["train"].'
            )
        self.shards = [shards] if isinstance(shards, Shard) else list(shards)
        if not self.shards:
            raise ShardError("Tokens are read from one or more shards; got none. Open one with open_shard.")
        for shard in self.shards[1:]:
            _check_alike(self.shards[0], shard)
        # Without empty ones, each of which would share its offset with the next.
        self._full = [shard for shard in self.shards if len(shard)]
        self._parts = [np.asarray(shard.tokens) for shard in self._full]  # plain: a slice of a memmap takes longer
        self._offsets = np.cumsum([0, *(part.size for part in self._parts)])
        self.num_tokens = int(self._offsets[-1])

    def documents(self) -> np.ndarray:
        """Where every document starts, int64, strictly increasing from 0."""
        starts = [np.zeros(0, dtype=np.int64)]
        for shard, offset in zip(self._full, self._offsets[:-1], strict=True):
            own = shard.documents.astype(np.int64)
            if own[0] != 0 or np.any(np.diff(own, append=len(shard)) <= 0):
                message = f"Documents start at 0 and one after another; those of {shard.path} do not."
                raise ShardError(f"{message} Its index is damaged: prepare the corpus again.")
            starts.append(own + offset)
        return np.concatenate(starts)

    def rows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """The `length` tokens from each start on, in the dtype of the shards: [len(starts), length]."""
        first = np.searchsorted(self._offsets, starts, side="right") - 1
        last = np.searchsorted(self._offsets, starts + (length - 1), side="right") - 1
        if first.size and first.min() == last.max():
            rows = self._inside(int(first[0]), starts, length)
        else:
            rows = np.empty((len(starts), length), dtype=self.shards[0].tokens.dtype)
            for part in np.unique(first[first == last]):
                chosen = np.flatnonzero((first == part) & (last == part))
                rows[chosen] = self._inside(int(part), starts[chosen], length)
            for row in np.flatnonzero(first != last):
                rows[row] = self._across(int(starts[row]), int(first[row]), int(last[row]), length)
        return rows

    def _inside(self, part: int, starts: np.ndarray, length: int) -> np.ndarray:
        # Every window of the part as a view, of which an index copies whole rows: quicker than an index for each token.
        rows = sliding_window_view(self._parts[part], length)[starts - self._offsets[part]]
        return self._checked(rows, part)

    def _across(self, start: int, first: int, last: int, length: int) -> np.ndarray:
        pieces = []
        for part in range(first, last + 1):
            offset = int(self._offsets[part])
            piece = self._parts[part][max(start - offset, 0) : start + length - offset]
            pieces.append(self._checked(piece, part))
        return np.concatenate(pieces)

    def _checked(self, ids: np.ndarray, part: int) -> np.ndarray:
        # What ShardWriter checked needs no second check, nor does what cannot leave the range.
        header = self._full[part].header
        if header.vocab_size is None and header.dtype not in ("uint8", "uint16"):
            _check_range(ids, self._full[part].path)
        return ids


def _check_alike(first: Shard, other: Shard) -> None:
    for name in ("fingerprint", "dtype", "vocab_size"):
        one, two = getattr(first.header, name), getattr(other.header, name)
        if one != two:
            message = f"Shards read as one have the same {name}: {first.path} has {one}, {other.path} has {two}."
            raise ShardError(f"{message} Prepare both with one tokenizer, or read them apart.")
