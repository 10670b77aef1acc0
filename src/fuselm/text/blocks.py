"""Texts of any size as blocks that can be worked on alone, and work on them in several threads, in order.

A block ends where every splitting into words has a boundary, so what is made of the blocks, put together, is what would
be made of the whole. Knows neither words nor ids: whoever calls brings `find_cut`.

    for ids in in_order(encode, blocks(pieces, encoder.find_cut), threads=2): ...
"""

from __future__ import annotations

import operator
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, TypeVar

# Long enough that Python is not noticed (2 ms of encoding), short enough to stay in the cache of a core, ids and all.
BLOCK_BYTES = 1 << 18
MAX_THREADS = 1024  # each has blocks waiting for it: a slip of the finger must not fill the memory

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


def is_short(text: str | bytes) -> bool:
    """Whether a text is worth no cutting; refuses what is no text."""
    return len(text if isinstance(text, str | bytes) else utf8(text)) <= BLOCK_BYTES


def slices(text: str | bytes) -> Iterator[str | bytes]:
    """A long text in pieces: while one is encoded, the next is turned into UTF-8. Surrogate pairs stay together."""
    start = 0
    while start < len(text):
        end = start + BLOCK_BYTES
        while isinstance(text, str) and "\ud800" <= text[end - 1 : end] <= "\udbff":
            end += 1
        yield text[start:end]
        start = end


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
    """function(item) for each item, in the order of the items, in several threads; few items wait at any time.

    The calling thread is one of them: whenever the others have enough to do, it takes an item itself. One thread more
    than there are cores would make every other wait for the interpreter's lock while its holder waits for a core.
    """
    if threads <= 1:
        yield from map(function, items)
        return
    jobs: deque[tuple[T, Future[R]]] = deque()

    def work_here(item: T) -> Future[R]:
        done: Future[R] = Future()
        done.set_result(function(item))
        return done

    def first_result() -> R:
        """Wait for the first job, and work on those meanwhile that no thread has begun."""
        while not jobs[0][1].done():
            mine = next((i for i, (_, future) in enumerate(jobs) if future.cancel()), None)
            if mine is None:
                break
            jobs[mine] = (jobs[mine][0], work_here(jobs[mine][0]))
        return jobs.popleft()[1].result()

    with ThreadPoolExecutor(threads - 1) as pool:
        try:
            for item in items:
                idle = sum(not (future.running() or future.done()) for _, future in jobs) < threads
                jobs.append((item, pool.submit(function, item) if idle else work_here(item)))
                while jobs and (jobs[0][1].done() or len(jobs) > 4 * threads):
                    yield first_result()
            while jobs:
                yield first_result()
        finally:  # an error or Ctrl-C: do not work off what waits
            for _, future in jobs:
                future.cancel()


def thread_count(threads: int | None) -> int:
    """How many threads to use; None is one for each core this process may use."""
    if threads is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return min(cores, MAX_THREADS)
    rule = f"The number of threads is 1 to {MAX_THREADS}, or None for one on each core; got {threads!r}."
    try:
        count = operator.index(threads)
    except TypeError:
        raise TypeError(rule) from None
    if not 1 <= count <= MAX_THREADS:
        raise ValueError(rule)
    return count
