"""Threads of C++ that encode: they end when nobody wants more, read little ahead, and share what they have learnt."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fuselm import compiler
from fuselm.text.native import SOURCE_DIR, NativeEncoder, _Pool
from fuselm.text.tokenizer import SpecialTokenError, Tokenizer
from tests.text.conftest import SPECIALS
from tests.text.samples import mixture, needs_compiler

pytestmark = needs_compiler

BLOCK = 2000
TASKS = Path("/proc/self/task")


@pytest.fixture
def pieces(set_block_size) -> list[bytes]:
    set_block_size(BLOCK)
    data = mixture(60 * BLOCK).encode()
    return [data[start : start + BLOCK] for start in range(0, len(data), BLOCK)]


def endless(pieces: list[bytes]) -> Iterator[bytes]:
    while True:
        yield from pieces


def new_threads(before: set[str]) -> int:
    """How many threads there are that were not there before."""
    return len(set(os.listdir(TASKS)) - before)


def all_end(before: set[str]) -> bool:
    """Whether there is no new thread; the system lists one for a moment after its end."""
    for _ in range(500):
        if not new_threads(before):
            return True
        time.sleep(0.01)
    return False


@pytest.fixture
def before() -> set[str]:
    """The threads there are."""
    if not TASKS.exists():
        pytest.skip("counts threads where Linux shows them")
    return set(os.listdir(TASKS))


def test_threads_run_while_there_is_work_and_end_with_it(trained: Tokenizer, pieces, before: set[str]) -> None:
    found = trained.encode_blocks(endless(pieces), threads=4, disallowed_special=())
    for _ in range(20):
        next(found)
    assert 1 <= new_threads(before) <= 3  # the calling thread is one of the four, and no more begin than find work
    found = trained.encode_blocks(pieces, threads=4, disallowed_special=())
    assert len(list(found)) > 20
    assert all_end(before)


def test_threads_end_when_the_rest_is_not_wanted(trained: Tokenizer, pieces, before: set[str]) -> None:
    found = trained.encode_blocks(endless(pieces), threads=4, disallowed_special=())
    for _ in range(20):
        next(found)
    assert new_threads(before) > 0
    del found
    assert all_end(before)


def test_a_thread_begins_with_each_batch_that_waits(trained: Tokenizer, pieces: list[bytes], before: set[str]) -> None:
    assert isinstance(trained._encoder, NativeEncoder)
    pool = _Pool(trained._encoder._encoder, 4, None, None)
    counts = []
    for piece in pieces[:6]:
        pool.put(piece, np.array([len(piece)]))
        counts.append(new_threads(before))
    assert counts == [0, 1, 2, 3, 3, 3]
    pool.stop()
    assert all_end(before)
    found = [pool.finish()[0].tolist() for _ in pieces[:6]]  # also what nobody had begun
    assert found == [trained.encode_bytes(piece) for piece in pieces[:6]]


def test_one_block_needs_no_thread(trained: Tokenizer, pieces, before: set[str]) -> None:
    found = trained.encode_blocks([pieces[0][: BLOCK // 2]], threads=4, disallowed_special=())
    next(found)
    assert new_threads(before) == 0
    assert list(found) == []


@pytest.mark.parametrize("threads", [1, 4])
def test_little_is_read_ahead(trained: Tokenizer, pieces: list[bytes], threads: int) -> None:
    taken: list[bytes] = []

    def watched() -> Iterator[bytes]:
        for piece in pieces:
            taken.append(piece)
            yield piece

    found = trained.encode_blocks(watched(), threads=threads)
    for count in range(1, 20):
        next(found)
        assert count <= len(taken) <= count + 2 * threads + 2


def test_an_error_of_the_reader_ends_the_threads(trained: Tokenizer, pieces, before: set[str]) -> None:
    def breaking() -> Iterator[bytes]:
        yield from pieces[:30]
        raise OSError("disk")

    found = trained.encode_blocks(breaking(), threads=4, disallowed_special=())
    with pytest.raises(OSError, match="disk") as error:
        list(found)
    assert all_end(before)
    assert error.traceback  # which holds all there was to work on


@pytest.mark.parametrize("threads", [1, 4])
def test_what_stands_before_a_refused_special_comes_first(trained: Tokenizer, pieces, threads: int) -> None:
    clean = [piece.replace(b"<", b"(") for piece in pieces]
    expected = [ids.tolist() for ids in trained.encode_blocks(clean, threads=1)]
    spoilt = [*clean[:30], SPECIALS[0].encode(), *clean[30:]]
    seen: list[list[int]] = []
    found = trained.encode_blocks(spoilt, threads=threads)
    with pytest.raises(SpecialTokenError, match="contains the special token"):
        seen.extend(ids.tolist() for ids in found)
    assert len(seen) > 20
    assert seen == expected[: len(seen)]


def test_what_is_done_is_given_while_the_reader_is_slow(trained: Tokenizer, pieces: list[bytes]) -> None:
    given: list[int] = []
    waiting: list[int] = []

    def slow() -> Iterator[bytes]:
        for count, piece in enumerate(pieces):
            time.sleep(0.005)
            waiting.append(count - len(given))
            yield piece

    for ids in trained.encode_blocks(slow(), threads=16, disallowed_special=()):
        given.append(len(ids))
    assert min(waiting[40:]) < 16  # and not the 32 that sixteen threads may have before them


@pytest.mark.parametrize("ending", ["cycle", "fork", "resume", "daemon", "suspended"])
def test_however_a_process_leaves_the_threads_it_ends_well(request: pytest.FixtureRequest, ending: str) -> None:
    program = Path(__file__).with_name("leaving_threads.py")
    environment = dict(os.environ) | {"FUSELM_CACHE_DIR": str(request.config.cache.mkdir("fuselm-text"))}
    command = (sys.executable, str(program), ending)
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert (finished.returncode, finished.stdout) == (0, "left\n"), finished.stderr[-2000:]


def test_what_is_read_of_a_shared_record_is_what_one_thread_wrote(tmp_path: Path) -> None:
    source, program = Path(__file__).with_name("torn_reads.cpp"), tmp_path / "torn_reads"
    command = (str(compiler.find_host_compiler()), "-O2", "-std=c++20", "-pthread", f"-I{SOURCE_DIR}")
    subprocess.run((*command, str(source), "-o", str(program)), check=True)
    output = subprocess.run(program, check=True, capture_output=True, text=True, timeout=120).stdout
    whole, none, torn = map(int, output.split())
    assert whole > 0
    assert whole + none == 4_000_000
    assert torn == 0
