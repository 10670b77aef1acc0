"""Local files to documents: text, .jsonl and .parquet, the first two also compressed, one at a time and in order.

A document is bytes, as they stand: UTF-8 is expected and never enforced, so a stray byte costs nothing. This file does
not know what a corpus is, how one is split (corpora.py) or where files come from (download.py). Memory is constant but
for the largest document, and a file that is broken is an error, never a shorter corpus.

    for document in read_documents(Path("stories.jsonl.gz")):
        ...
    files = text_files(Path("notes"))  # everything readable in a folder, sorted

| file | documents |
|---|---|
| text (.txt, .md, any file that is text) | what stands between `<|endoftext|>`, or the whole file where there is none |
| .jsonl, .ndjson | the "text" of each line |
| .parquet | the "text" of each row (needs pyarrow) |
| .gz, .xz, .bz2, .zst of text or .jsonl | as of the file inside (.zst needs zstandard) |
"""

from __future__ import annotations

import bz2
import gzip
import importlib
import json
import lzma
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from fuselm.text.tokenizer import END_OF_TEXT

SEPARATOR = END_OF_TEXT
TOKENIZER, MANIFEST = "tokenizer.json", "prepared.json"  # what prepare.py writes beside the tokens
TEXT_FIELD = "text"
CHUNK = 1 << 20  # bytes read at once
SNIFF = 8192  # bytes by which a file is known as text
# Control characters that plain text has no use for: all but backspace, tab, line feed, \v, \f, \r and escape.
CONTROLS = bytes({*range(32), 127} - {8, 9, 10, 11, 12, 13, 27})
# Of random bytes a tenth are such controls, of text none: anything between tells them apart.
MOST_CONTROLS = 0.02
ROWS_AT_ONCE = 256  # of a parquet file: they are in memory together


class CorpusError(ValueError):
    """Text that cannot be had as asked: nothing there, a broken file, a line that is not what it should be."""


class MissingPackageError(CorpusError, ImportError):
    """A kind of file whose reader is an optional package."""


# --- any file --------------------------------------------------------------------------------------------------------


def read_documents(path: Path) -> Iterator[bytes]:
    """The documents of one file; blank ones are left out."""
    kind = _kind(path)
    if kind == "parquet":
        documents = _parquet_documents(path)
    elif kind == "jsonl":
        documents = _jsonl_documents(path, chunks(path))
    else:
        documents = split_documents(_text_chunks(path))
    return (document for document in documents if not is_blank(document))


def text_files(folder: Path) -> list[Path]:
    """Every file below a folder that can be read, sorted by its path there.

    Hidden and binary ones are passed over, and what fuselm writes there itself: a tokenizer beside the text it was
    trained on must not change the next one.
    """
    found: list[Path] = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        paths = (Path(parent, name) for name in names if not name.startswith(".") and name not in (TOKENIZER, MANIFEST))
        # is_file: a broken link or a socket is no file
        found += [path for path in paths if path.is_file() and (_kind(path) != "text" or _starts_as_text(path))]
    return sorted(found, key=lambda path: path.relative_to(folder).as_posix())


def size_hint(path: Path) -> int | None:
    """About how many bytes of text a file holds; None where only reading it would tell."""
    return None if _kind(path) == "parquet" or _decompressor(path) else path.stat().st_size


def is_blank(document: bytes) -> bool:
    """Whether there is nothing in a document but white space."""
    return not document or document.isspace()


def is_text(head: bytes) -> bool:
    """Whether a file that starts like this is text; judged by control characters, so any 8-bit encoding passes."""
    controls = len(head) - len(head.translate(None, CONTROLS))
    return b"\0" not in head and controls <= MOST_CONTROLS * len(head)


def _kind(path: Path) -> str:
    """What is inside: "text", "jsonl" or "parquet"; a compressed file is what it is without its last suffix."""
    packed = _decompressor(path) is not None
    suffix = Path(path.stem if packed else path.name).suffix.lower()
    if suffix == ".parquet" and packed:
        raise CorpusError(f"A .parquet file is compressed inside and is read as it is; unpack {path} first.")
    return {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}.get(suffix, "text")


# --- text ------------------------------------------------------------------------------------------------------------


def split_documents(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Cut a stream of text at each separator; one newline on either side of it goes with it."""
    separator = SEPARATOR.encode()
    buffer, search, after = bytearray(), 0, False
    for piece in pieces:
        buffer += piece
        start = 0
        while (at := buffer.find(separator, search)) >= 0:
            yield _trimmed(bytes(buffer[start:at]), after, True)
            start = search = at + len(separator)
            after = True
        del buffer[:start]
        search = max(0, len(buffer) - len(separator) + 1)  # a separator may be cut in two by the end of a piece
    yield _trimmed(bytes(buffer), after, False)


def _trimmed(document: bytes, after: bool, before: bool) -> bytes:
    """Without the newline (\\n or \\r\\n) next to the separator that it comes after or stands before."""
    if after:
        document = document.removeprefix(b"\r\n") if document.startswith(b"\r") else document.removeprefix(b"\n")
    if before and document.endswith(b"\n"):
        document = document[:-1].removesuffix(b"\r")
    return document


def _text_chunks(path: Path) -> Iterator[bytes]:
    stream = chunks(path)
    first = next(stream, b"")
    if not is_text(first[:SNIFF]):
        hint = "; convert UTF-16 with `iconv -t UTF-8`" if first[:2] in (b"\xff\xfe", b"\xfe\xff") else ""
        hint = "; name the folder of token files, to train on them" if path.suffix == ".tokens" else hint
        raise CorpusError(f"A corpus is UTF-8 text; {path} holds binary data{hint}.")
    yield first
    yield from stream


def _starts_as_text(path: Path) -> bool:
    return is_text(next(chunks(path), b"")[:SNIFF])


# --- compression -----------------------------------------------------------------------------------------------------


def chunks(path: Path) -> Iterator[bytes]:
    """The bytes of a file, unpacked if it is compressed; CorpusError where that breaks off or is damaged."""
    decompress = _decompressor(path)
    with path.open("rb") as file:
        if decompress is None:
            yield from iter(lambda: file.read(CHUNK), b"")
            return
        count = 0
        try:
            for chunk in decompress(file):
                count += len(chunk)
                yield chunk
        except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
            raise CorpusError(
                f"{path} breaks off or is damaged after {count:,} unpacked bytes ({error}). None of it is to be used: "
                "fetch or compress it again."
            ) from error


def _gzip_chunks(file: BinaryIO) -> Iterator[bytes]:
    # read1 everywhere: it hands over what there is before it complains, so the count in the error is right.
    with gzip.GzipFile(fileobj=file) as unpacked:
        yield from iter(lambda: unpacked.read1(CHUNK), b"")


def _xz_chunks(file: BinaryIO) -> Iterator[bytes]:
    with lzma.LZMAFile(file) as unpacked:
        yield from iter(lambda: unpacked.read1(CHUNK), b"")


def _bz2_chunks(file: BinaryIO) -> Iterator[bytes]:
    with bz2.BZ2File(file) as unpacked:
        yield from iter(lambda: unpacked.read1(CHUNK), b"")


def _zstd_chunks(file: BinaryIO) -> Iterator[bytes]:
    """Frame by frame: zstandard's own stream reader takes a file that breaks off for one that ends."""
    zstandard = _optional("zstandard", ".zst")
    decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)  # `zstd --long=31` too
    frame = None
    try:
        while packed := file.read(CHUNK >> 3):
            while packed:
                frame = frame or decompressor.decompressobj()
                if unpacked := frame.decompress(packed):
                    yield unpacked
                packed = frame.unused_data
                frame = None if frame.eof else frame
    except zstandard.ZstdError as error:
        raise OSError(str(error)) from error
    if frame is not None:
        raise EOFError("the last zstd frame is not whole")


DECOMPRESSORS: dict[str, Callable[[BinaryIO], Iterator[bytes]]] = {
    ".gz": _gzip_chunks,
    ".xz": _xz_chunks,
    ".bz2": _bz2_chunks,
    ".zst": _zstd_chunks,
}


def _decompressor(path: Path) -> Callable[[BinaryIO], Iterator[bytes]] | None:
    return DECOMPRESSORS.get(path.suffix.lower())


def _optional(package: str, kind: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        name = package.partition(".")[0]
        raise MissingPackageError(f"Reading {kind} files needs {name}: `pip install {name}`.") from error


# --- records ---------------------------------------------------------------------------------------------------------


def _jsonl_documents(path: Path, pieces: Iterable[bytes]) -> Iterator[bytes]:
    for number, line in enumerate(_lines(pieces), 1):
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        if not is_blank(line):
            yield _text_of_record(line, f"{path}, line {number}")


def _lines(pieces: Iterable[bytes]) -> Iterator[bytes]:
    rest: list[bytes] = []  # a line over many pieces is joined once
    for piece in pieces:
        first, *others = piece.split(b"\n")
        rest.append(first)
        for line in others:
            yield b"".join(rest)
            rest = [line]
    yield b"".join(rest)


def _text_of_record(line: bytes, where: str) -> bytes:
    rule = f'a line is a JSON object with a "{TEXT_FIELD}" field that holds a string'
    try:
        # surrogateescape: bytes that are not UTF-8 go through JSON and come out as they were
        record = json.loads(line.decode("utf-8", "surrogateescape"))
    except json.JSONDecodeError as error:
        raise CorpusError(f"{where}: {rule}; this one is not JSON ({error.msg} at column {error.colno}).") from error
    except (RecursionError, ValueError) as error:  # nested too deeply, or a number of thousands of digits
        raise CorpusError(f"{where}: {rule}; this one cannot be read ({error}).") from error
    if not isinstance(record, dict):
        raise CorpusError(f"{where}: {rule}; this one is a JSON {type(record).__name__}.")
    text = record.get(TEXT_FIELD)
    if not isinstance(text, str):
        keys = ", ".join(f'"{key}"' for key in record) or "none"
        kind = f', and its "{TEXT_FIELD}" is a {type(text).__name__}' if TEXT_FIELD in record else ""
        raise CorpusError(f"{where}: {rule}; this one has the keys {keys}{kind}.")
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")  # half of a pair, written as \ud83d: kept, as everything is


def _parquet_documents(path: Path) -> Iterator[bytes]:
    """Row group by row group, the one column alone."""
    arrow, parquet = _optional("pyarrow", ".parquet"), _optional("pyarrow.parquet", ".parquet")
    try:
        with parquet.ParquetFile(path) as file:
            schema = file.schema_arrow
            if TEXT_FIELD not in schema.names:
                names = ", ".join(f'"{name}"' for name in schema.names)
                raise CorpusError(f'{path}: a .parquet file has a "{TEXT_FIELD}" column; this one has {names}.')
            kind = schema.field(TEXT_FIELD).type
            if not _is_string(arrow.types, kind):
                raise CorpusError(f'{path}: the "{TEXT_FIELD}" column holds strings; in this file it holds {kind}.')
            for batch in file.iter_batches(ROWS_AT_ONCE, columns=[TEXT_FIELD], use_threads=False):
                # as binary: Arrow does not look whether a string column is UTF-8, and neither do we
                rows = batch.column(0).cast(arrow.large_binary()).to_pylist()
                yield from (row for row in rows if row is not None)
    except (arrow.ArrowException, OSError) as error:
        raise CorpusError(f"{path} is not a whole .parquet file ({error}). Fetch or write it again.") from error


def _is_string(types: Any, kind: Any) -> bool:
    plain = types.is_string(kind) or types.is_large_string(kind)
    return bool(plain or types.is_binary(kind) or types.is_large_binary(kind))
