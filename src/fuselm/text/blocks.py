"""Texts of any size as blocks that can be worked on alone, and work on them in several threads, in order.

A block ends where every splitting into words has a boundary, so what is made of the blocks, put together, is what would
be made of the whole. Knows neither words nor ids: whoever calls brings `find_cut`.

    for ids in in_order(encode, blocks(pieces, encoder.find_cut), threads=2): ...
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, TypeVar

# Long enough that Python is not noticed (5 ms of encoding), short enough to stay in the cache of a core.
BLOCK_BYTES = 1 << 19

FindCut = Callable[[bytes, int, int, int], int]
T = TypeVar("T")
R = TypeVar("R")


def utf8(text: str | bytes) -> bytes:
    """UTF-8 of a text. A lone surrogate, which UTF-8 does not have, becomes U+FFFD."""
    if isinstance(text, bytes):
        return text
    if not isinstance(text, str):
        raise TypeError(f"A text is a str (or bytes of UTF-8); got {type(text).__name__}.")
    try:
        return text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace").encode()


def file_pieces(path: str | Path, on_read: Callable[[int], None] | None = None) -> Iterator[bytes]:
    """The bytes of a file, piece by piece; `on_read` hears how many there were in each."""
    with Path(path).open("rb") as file:
        yield from read_pieces(file, on_read)


def read_pieces(file: BinaryIO, on_read: Callable[[int], None] | None = None) -> Iterator[bytes]:
    """The bytes of an open file, piece by piece."""
    while piece := file.read(BLOCK_BYTES):
        yield piece
        if on_read:
            on_read(len(piece))


def blocks(pieces: Iterable[bytes], find_cut: FindCut) -> Iterator[bytes]:
    """The same bytes in blocks of about BLOCK_BYTES; a stretch without any boundary stays in one block."""
    held: list[bytes] = []  # not yet a block
    size = searched = 0
    for piece in pieces:
        held.append(piece)
        size += len(piece)
        if size <= max(BLOCK_BYTES, 2 * searched):
            continue
        data, start = b"".join(held), 0
        while True:
            cut, searched = _next_cut(data, start, searched, find_cut)
            if not cut:
                break
            yield data[start:cut]
            start = searched = cut
        held, size, searched = [data[start:]], len(data) - start, searched - start
    if size:
        yield b"".join(held)


def ranges(data: bytes, find_cut: FindCut) -> Iterator[tuple[int, int]]:
    """Start and end of blocks of a text that is in memory already."""
    start = 0
    while start < len(data):
        cut, _ = _next_cut(data, start, start, find_cut)
        yield start, cut or len(data)
        start = cut or len(data)


def _next_cut(data: bytes, start: int, searched: int, find_cut: FindCut) -> tuple[int, int]:
    """The end of the block at `start`, 0 when there is none yet, and up to where there is no use in looking again.

    Where nothing is found, the next look goes twice as far, and only there: a text of a single word must not be copied
    and searched again and again.
    """
    end = start + max(BLOCK_BYTES, 2 * (searched - start))
    while end < len(data):
        if cut := find_cut(data, start, searched, end):
            return cut, searched
        searched, end = end, end + (end - start)
    return 0, searched


def in_order(function: Callable[[T], R], items: Iterable[T], threads: int) -> Iterator[R]:
    """function(item) for each item, in the order of the items, in several threads; few items wait at any time."""
    if threads <= 1:
        yield from map(function, items)
        return
    waiting: deque[Future[R]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        try:
            for item in items:
                waiting.append(pool.submit(function, item))
                if len(waiting) > 2 * threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:  # an error or Ctrl-C: do not work off what waits
            for future in waiting:
                future.cancel()


def thread_count(threads: int | None) -> int:
    """How many threads to use; None is one for each core this process may use."""
    if threads is None:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if threads < 1:
        raise ValueError(f"The number of threads is at least 1; got {threads}. Leave it out to use every core.")
    return threads
