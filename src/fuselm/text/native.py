"""bpe.cpp from Python: built by g++ on first use, loaded by ctypes.

The library is kept in the user cache under a hash of its sources, the command and the compiler. Every call lets other
Python threads run. What the functions mean is said in reference.py, which does the same in plain Python.

    encoder = NativeEncoder(byte_ids, merges, specials, special_ids)
    encoder.encode(b"Once upon a time")                       # uint32 ids
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import hashlib
import json
import os
import platform
import sys
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, NoReturn

import numpy as np

from fuselm import compiler
from fuselm.files import cache_dir
from fuselm.text.reference import Batch, RefusedSpecial
from fuselm.text.unicode import class_table

SOURCE_DIR = Path(__file__).resolve().parent
FLAGS = ("-O3", "-std=c++20", "-fPIC", "-fvisibility=hidden", "-pthread", "-shared")
# Room for the ids of texts up to this long is used again, because fresh pages cost more than encoding into them.
KEPT_BYTES = 1 << 20
ROOM_STEP = 1 << 16

_POINTER, _BYTES, _INT = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int64
_SIGNATURES: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "specials_new": (_POINTER, (_BYTES, _POINTER, _INT)),
    "specials_free": (None, (_POINTER,)),
    "find_cut": (_INT, (_BYTES, _POINTER, _POINTER, _INT, _INT)),
    "split": (_INT, (_BYTES, _POINTER, _INT, _POINTER)),
    "counter_new": (_POINTER, ()),
    "counter_free": (None, (_POINTER,)),
    "counter_count": (_INT, (_POINTER, _BYTES, _POINTER, _POINTER, _POINTER, _INT)),
    "counter_add": (_INT, (_POINTER, _POINTER)),
    "trainer_new": (_POINTER, (_POINTER,)),
    "trainer_free": (None, (_POINTER,)),
    "trainer_merge": (_INT, (_POINTER, _INT)),
    "trainer_merges": (_POINTER, (_POINTER, _POINTER)),
    "encoder_new": (_POINTER, (_BYTES, _POINTER, _POINTER, _POINTER, _POINTER, _INT)),
    "encoder_free": (None, (_POINTER,)),
    "scratch_new": (_POINTER, (_POINTER,)),
    "scratch_free": (None, (_POINTER,)),
    "encode": (_INT, (_POINTER, _POINTER, _INT, _BYTES, _BYTES, _POINTER)),
    "pool_new": (_POINTER, (_POINTER, _INT)),
    "pool_free": (None, (_POINTER,)),
    "pool_put": (_INT, (_POINTER, _BYTES, _POINTER, _INT, _BYTES, _BYTES, _POINTER, _POINTER)),
    "pool_ready": (ctypes.c_bool, (_POINTER,)),
    "pool_finish": (_INT, (_POINTER,)),
    "pool_stop": (None, (_POINTER,)),
    "decode": (_INT, (_BYTES, _POINTER, _INT, _POINTER, _INT, _POINTER)),
}


@functools.cache
def library() -> ctypes.CDLL:
    """The loaded library; a BuildError says why there is none."""
    path = build()
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError:  # damaged, or of another system: make it anew, and this time say what is wrong
        path.unlink(missing_ok=True)
        loaded = ctypes.CDLL(str(build()))
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(loaded, f"fuselm_{name}")
        function.restype, function.argtypes = result, arguments
    return loaded


def build() -> Path:
    """The path of the library, compiled first when the cache has none of these sources by this compiler."""
    host = compiler.find_host_compiler()
    if host is None:
        raise compiler.BuildError("The tokenizer is compiled by g++; it is not on PATH. Install g++ 11 or newer.")
    root = cache_dir() / "text"
    path = root / _key(host)
    if path.exists():
        return path
    with compiler.build_lock(root):
        if not path.exists():  # another process may have built it while this one waited for the lock
            print("fuselm: compiling the tokenizer, once, in a few seconds", file=sys.stderr)
            command = (str(host), *FLAGS, str(SOURCE_DIR / "bpe.cpp"))
            compiler.run(command, output=path, log=root / f"{path.stem}.log", title="bpe.cpp")
            if _key(host) != path.name:  # it would be kept under the name of what the sources were before
                path.unlink()
                raise compiler.BuildError("A source of the tokenizer was edited while it was compiled. Try again.")
    return path


def is_built() -> bool:
    """Whether `build` would return at once. Never builds."""
    host = compiler.find_host_compiler()
    return host is not None and (cache_dir() / "text" / _key(host)).exists()


def _key(host: Path) -> str:
    """The library's file name: a hash of all that goes into it."""
    sources = sorted(path for path in SOURCE_DIR.iterdir() if path.suffix in (".cpp", ".h"))
    texts = [(path.name, path.read_text(encoding="utf-8")) for path in sources]
    key = json.dumps([texts, FLAGS, compiler.version_text(host), platform.machine()])
    return f"bpe-{hashlib.sha256(key.encode()).hexdigest()[:20]}.so"


class _Handle:
    """A C++ object that is freed when its Python object goes; what it `keeps` goes later, even out of a cycle."""

    def __init__(self, kind: str, *arguments: object, keeps: Sequence[object] = ()) -> None:
        self.pointer = getattr(library(), f"fuselm_{kind}_new")(*arguments)
        if not self.pointer:
            raise MemoryError(f"no memory for a {kind} of the tokenizer")
        self.process = os.getpid()
        end = weakref.finalize(self, _free, kind, self.pointer, self.process, keeps)
        end.atexit = False  # the system takes the memory then, and a daemon thread may still be using it

    def __reduce__(self) -> NoReturn:
        raise TypeError("A C++ object cannot be copied or sent elsewhere; send the Tokenizer, which builds its own.")


def _free(kind: str, pointer: int, process: int, keeps: Sequence[object]) -> None:
    if os.getpid() == process:  # a forked one has the memory, but not the threads that use it
        getattr(library(), f"fuselm_{kind}_free")(pointer)


def _done(result: int) -> int:
    if result >= 0:
        return result
    if result < -1:
        raise RefusedSpecial(-2 - result)
    raise MemoryError("The tokenizer has no memory left, or met a single word of 4 GiB.")


def _address(data: bytes) -> int:
    return np.frombuffer(data, np.uint8).ctypes.data


def split(data: bytes) -> list[bytes]:
    """The words of a text."""
    ends = np.empty(len(data), np.int64)
    count = library().fuselm_split(class_table(), data, len(data), ends.ctypes.data)
    places = [0, *ends[:count].tolist()]
    return [data[a:b] for a, b in pairwise(places)]


class _Cutter:
    """Knows the special tokens, and so where a text may be cut."""

    def __init__(self, specials: Sequence[bytes]) -> None:
        self._table = class_table()  # the C++ side keeps its address
        ends = np.cumsum([len(text) for text in specials], dtype=np.int64)
        self._specials = _Handle("specials", b"".join(specials), ends.ctypes.data, len(specials))

    def find_cut(self, data: bytes, start: int, searched: int, end: int) -> int:
        """The last place in data[searched:end] where data[start:end] can be cut without changing its words, or 0."""
        arguments = (_address(data) + start, searched - start, end - start)
        found = library().fuselm_find_cut(self._table, self._specials.pointer, *arguments)
        return start + found if found else 0


class NativeTrainer(_Cutter):
    """Counts words in as many counters as there are threads, then merges pairs."""

    def __init__(self, specials: Sequence[bytes]) -> None:
        super().__init__(specials)
        self._idle: list[_Handle] = []
        self._trainer: _Handle | None = None

    def count(self, data: bytes, ends: Sequence[int]) -> None:
        """Count the words of texts that lie one behind the other in `data`. Any number of threads may call it."""
        try:
            counter = self._idle.pop()  # atomic: a counter is in one thread's hands at a time
        except IndexError:
            counter = _Handle("counter")
        places = np.asarray(ends, np.int64)
        arguments = (self._table, self._specials.pointer, data, places.ctypes.data, len(places))
        _done(library().fuselm_counter_count(counter.pointer, *arguments))
        self._idle.append(counter)

    def merge(self, wanted: int) -> int:
        """Make up to `wanted` more merges; fewer when no pair is left. Returns how many."""
        if self._trainer is None:
            total = self._idle.pop() if self._idle else _Handle("counter")
            while self._idle:
                other = self._idle.pop()  # by name: the C++ object lives as long as its Python object
                _done(library().fuselm_counter_add(total.pointer, other.pointer))
            self._trainer = _Handle("trainer", total.pointer)
        return _done(library().fuselm_trainer_merge(self._trainer.pointer, wanted))

    def merges(self) -> list[tuple[int, int]]:
        """All merges so far as pairs of ids: 0 to 255 are the bytes, 256 + i is what merge i made."""
        if self._trainer is None:
            return []
        count = _INT()
        pointer = library().fuselm_trainer_merges(self._trainer.pointer, ctypes.addressof(count))
        if not count.value:
            return []
        flat = np.ctypeslib.as_array((ctypes.c_uint32 * (2 * count.value)).from_address(pointer)).tolist()
        return list(zip(flat[::2], flat[1::2], strict=True))


class _Scratch(_Handle):
    """What one thread encodes with, and room for the ids of a block."""

    def __init__(self, encoder: _Handle) -> None:
        super().__init__("scratch", encoder.pointer, keeps=(encoder,))
        self.kept = self._room(1 << 12)

    def room_for(self, size: int) -> tuple[np.ndarray, int]:
        """Memory for ids and its address."""
        if size + 4 <= len(self.kept[0]):
            return self.kept
        room = self._room(size)
        if size <= KEPT_BYTES:
            self.kept = room
        return room

    def _room(self, size: int) -> tuple[np.ndarray, int]:
        room = np.empty(size + 4, np.uint32)
        return room, room.ctypes.data


class _Job(NamedTuple):
    """What a thread reads and writes: it must stay in memory while one may."""

    data: bytes
    ends: np.ndarray
    counts: np.ndarray
    room: np.ndarray


class _Pool(_Handle):
    """Threads of C++ that encode batches. They never need Python's lock, so they never wait for it."""

    def __init__(self, encoder: _Handle, threads: int, allowed: bytes | None, refused: bytes | None) -> None:
        self.threads = threads  # the caller's is one of them
        self.jobs: deque[_Job] = deque()  # in the order they came, which is the order they are finished in
        self._masks = (allowed, refused)
        self._rooms: list[np.ndarray] = []
        super().__init__("pool", encoder.pointer, threads - 1, keeps=(encoder, self.jobs, self._masks))
        # Its threads must have ended before Python takes down what they read. This also holds the pool until it is
        # stopped: the collector would free one out of a cycle before it closes the generator that uses it.
        atexit.register(self.stop)

    def put(self, data: bytes, ends: np.ndarray) -> None:
        """Have a batch encoded."""
        self._refuse_child()
        job = _Job(data, ends, np.empty(len(ends), np.int64), self._room_for(len(data) + 4))
        self.jobs.append(job)
        places = (job.room.ctypes.data, job.counts.ctypes.data)
        _done(library().fuselm_pool_put(self.pointer, data, ends.ctypes.data, len(ends), *self._masks, *places))

    def ready(self) -> bool:
        """Whether `finish` would return at once."""
        self._refuse_child()
        return library().fuselm_pool_ready(self.pointer)

    def finish(self) -> tuple[np.ndarray, np.ndarray]:
        """The ids and counts of the first batch that is not finished; the ids stand until the next is put."""
        self._refuse_child()
        result = library().fuselm_pool_finish(self.pointer)
        job = self.jobs.popleft()
        if len(job.data) <= KEPT_BYTES:
            self._rooms.append(job.room)
        return job.room[: _done(result)], job.counts

    def stop(self) -> None:
        """Return when the threads have ended. What they have not begun can still be finished."""
        if os.getpid() == self.process:
            library().fuselm_pool_stop(self.pointer)
        atexit.unregister(self.stop)

    def _refuse_child(self) -> None:
        # Before the C++ side is asked anything: one of its threads may have held the lock when the process forked.
        if self.threads > 1 and os.getpid() != self.process:
            raise RuntimeError(
                "Encoding that was begun in several threads cannot go on in a forked process, which has none of them. "
                "Begin it there, or with threads=1."
            )

    def _room_for(self, size: int) -> np.ndarray:
        if self._rooms and len(room := self._rooms.pop()) >= size:
            return room
        return np.empty(-(-size // ROOM_STEP) * ROOM_STEP, np.uint32)  # in steps: one fits the next block too


class NativeEncoder(_Cutter):
    """A vocabulary that encodes; any number of threads may use one."""

    def __init__(
        self, byte_ids: Sequence[int], merges: np.ndarray, specials: Sequence[bytes], special_ids: Sequence[int]
    ) -> None:
        super().__init__(specials)
        merges = np.ascontiguousarray(merges, np.uint32)
        ids = [np.asarray(array, np.uint32) for array in (special_ids, byte_ids)]
        tables = (ids[0].ctypes.data, ids[1].ctypes.data, merges.ctypes.data, len(merges))
        self._encoder = _Handle("encoder", self._table, self._specials.pointer, *tables)
        self._encode = library().fuselm_encode
        self._idle: list[_Scratch] = []

    def encode(self, data: bytes, allowed: bytes | None = None, refused: bytes | None = None) -> np.ndarray:
        """The ids of a text; `allowed` and `refused` have a byte for each special, None names none."""
        scratch = self._take()
        try:
            room, address = scratch.room_for(len(data))
            return room[: _done(self._encode(scratch.pointer, data, len(data), allowed, refused, address))].copy()
        finally:
            self._idle.append(scratch)

    def encode_batches(
        self, batches: Iterable[Batch], allowed: bytes | None, refused: bytes | None, threads: int
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The ids of each batch, and how many each text has; they stand until the next ones are asked for."""
        pool = _Pool(self._encoder, threads, allowed, refused)
        ahead = 2 * threads if threads > 1 else 0  # so many that no thread runs out of work while the caller works too
        try:
            for data, ends in batches:
                pool.put(data, ends)
                while pool.jobs and (len(pool.jobs) > ahead or pool.ready()):
                    yield pool.finish()
            while pool.jobs:
                yield pool.finish()
        finally:  # also when nobody wants the rest, or has wanted it in vain
            pool.stop()

    def _take(self) -> _Scratch:
        try:
            return self._idle.pop()  # atomic: a scratch is in one thread's hands at a time
        except IndexError:
            return _Scratch(self._encoder)


def decode(table: bytes, starts: np.ndarray, ids: np.ndarray) -> memoryview:
    """The bytes of uint32 ids: token i has table[starts[i]:starts[i + 1]], an id that is none the last entry."""
    arguments = (table, starts.ctypes.data, len(starts) - 2, ids.ctypes.data, len(ids))
    out = np.empty(library().fuselm_decode(*arguments, None), np.uint8)
    library().fuselm_decode(*arguments, out.ctypes.data)
    return out.data  # no copy: whoever asked makes a str or bytes of it
