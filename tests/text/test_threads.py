"""Threads of C++ that encode: they end when nobody wants more, read little ahead, and share what they have learnt."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from fuselm import compiler
from fuselm.text.native import SOURCE_DIR
from fuselm.text.tokenizer import SpecialTokenError, Tokenizer
from tests.text.conftest import SPECIALS
from tests.text.samples import mixture, needs_compiler

pytestmark = needs_compiler

BLOCK = 2000


@pytest.fixture
def pieces(set_block_size) -> list[bytes]:
    set_block_size(BLOCK)
    data = mixture(60 * BLOCK).encode()
    return [data[start : start + BLOCK] for start in range(0, len(data), BLOCK)]


def running_threads() -> int:
    return sum(1 for _ in Path("/proc/self/task").iterdir())


@pytest.fixture
def threads_before() -> int:
    if not Path("/proc/self/task").exists():
        pytest.skip("counts threads where Linux shows them")
    return running_threads()


def test_threads_run_while_there_is_work_and_end_with_it(trained: Tokenizer, pieces, threads_before: int) -> None:
    found = trained.encode_blocks(pieces, threads=4, disallowed_special=())
    next(found)
    assert running_threads() == threads_before + 3  # the calling thread is one of the four
    rest = list(found)
    assert len(rest) > 20
    assert running_threads() == threads_before


def test_threads_end_when_the_rest_is_not_wanted(trained: Tokenizer, pieces, threads_before: int) -> None:
    found = trained.encode_blocks(pieces, threads=4, disallowed_special=())
    next(found)
    del found
    assert running_threads() == threads_before


def test_one_block_needs_no_thread(trained: Tokenizer, pieces, threads_before: int) -> None:
    def watched() -> Iterator[bytes]:
        yield pieces[0][: BLOCK // 2]
        assert running_threads() == threads_before

    assert len(list(trained.encode_blocks(watched(), threads=4, disallowed_special=()))) == 1


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


def test_an_error_of_the_reader_comes_out(trained: Tokenizer, pieces: list[bytes], threads_before: int) -> None:
    def breaking() -> Iterator[bytes]:
        yield from pieces[:30]
        raise OSError("disk")

    found = trained.encode_blocks(breaking(), threads=4, disallowed_special=())
    with pytest.raises(OSError, match="disk"):
        list(found)
    assert running_threads() == threads_before


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


def test_what_is_read_of_a_shared_record_is_what_one_thread_wrote(tmp_path: Path) -> None:
    source, program = Path(__file__).with_name("torn_reads.cpp"), tmp_path / "torn_reads"
    command = (str(compiler.find_host_compiler()), "-O2", "-std=c++20", "-pthread", f"-I{SOURCE_DIR}")
    subprocess.run((*command, str(source), "-o", str(program)), check=True)
    output = subprocess.run(program, check=True, capture_output=True, text=True, timeout=120).stdout
    whole, none, torn = map(int, output.split())
    assert whole > 0
    assert whole + none == 4_000_000
    assert torn == 0
