"""Every way to encode much gives the ids of `encode`: arrays, batches, iterables cut anywhere, blocks, threads."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuselm.text.tokenizer import Tokenizer
from tests.text.conftest import SPECIALS
from tests.text.samples import byte_texts, cut_at, mixture, needs_compiler, same_every_run, texts

pytestmark = needs_compiler

ALL = {"allowed_special": "all"}
with_specials = st.lists(texts | st.sampled_from([*SPECIALS, "<|pad", "|>", "   \n"]), max_size=6).map("".join)


@pytest.fixture(scope="module")
def book() -> str:
    """A text with special tokens in the midst of words, of spaces and of one another."""
    text = mixture(24_000, seed=21).replace("\n\n", SPECIALS[0]).replace(". ", f" {SPECIALS[1]}  ")
    return text.replace("ba", f"{SPECIALS[2]}{SPECIALS[2]}", 200)


@pytest.fixture(scope="module")
def book_ids(trained: Tokenizer, book: str) -> list[int]:
    return trained.encode(book, **ALL)


# --- iterables -------------------------------------------------------------------------------------------------------


@given(text=with_specials, places=st.lists(st.integers(0, 400), max_size=10), size=st.sampled_from([1, 2, 7, 30, 1000]))
@same_every_run(140)
def test_pieces_cut_anywhere_give_the_ids_of_the_whole(trained, set_block_size, text, places, size) -> None:
    expected = trained.encode(text, **ALL)
    set_block_size(size)
    pieces = cut_at(text.encode(), places)
    assert list(trained.encode_iterable(pieces, **ALL)) == expected
    characters = [
        text[a:b] for a, b in itertools.pairwise([0, *sorted(p % (len(text) + 1) for p in places), len(text)])
    ]
    assert list(trained.encode_iterable(characters, **ALL)) == expected


@given(data=byte_texts, places=st.lists(st.integers(0, 400), max_size=10), size=st.sampled_from([1, 2, 7, 30]))
@same_every_run(140)
def test_bytes_that_are_no_text_may_be_cut_anywhere_too(trained, set_block_size, data, places, size) -> None:
    expected = trained.encode_bytes(data)
    set_block_size(size)
    assert list(trained.encode_iterable(cut_at(data, places), disallowed_special=())) == expected


@pytest.mark.parametrize("size", [1, 5, 64, 1000])
def test_single_bytes_and_lines_give_the_ids_of_the_whole(trained, book, book_ids, set_block_size, size: int) -> None:
    set_block_size(size)
    part = book[:6000]
    assert list(trained.encode_iterable((part.encode()[i : i + 1] for i in range(len(part.encode()))), **ALL)) == (
        trained.encode(part, **ALL)
    )
    assert list(trained.encode_iterable(book.splitlines(keepends=True), **ALL)) == book_ids


def test_spaces_and_specials_across_pieces(trained: Tokenizer, set_block_size) -> None:
    text = f"a   \n\n   b{SPECIALS[2]}  {SPECIALS[0]}{SPECIALS[1]}x'll  "
    expected = trained.encode(text, **ALL)
    for size in (1, 3, 8):
        set_block_size(size)
        for first, second in itertools.combinations(range(len(text) + 1), 2):
            pieces = [text[:first], "", text[first:second], text[second:]]
            assert list(trained.encode_iterable(pieces, **ALL)) == expected


def test_ids_come_before_the_last_piece_is_asked_for(trained: Tokenizer, set_block_size) -> None:
    set_block_size(50)
    asked: list[int] = []

    def pieces():
        for number in range(1000):
            asked.append(number)
            yield "some words and more words "

    ids = trained.encode_iterable(pieces())
    next(ids)
    assert len(asked) < 20
    assert len(list(ids)) > 1000


def test_special_in_pieces_is_refused_wherever_it_is_cut(trained: Tokenizer, set_block_size) -> None:
    set_block_size(4)
    text = f"some words {SPECIALS[0]} more words"
    for cut in range(len(text)):
        with pytest.raises(ValueError, match="contains the special token"):
            list(trained.encode_iterable([text[:cut], text[cut:]]))
        ids = list(trained.encode_iterable([text[:cut], text[cut:]], disallowed_special=()))
        assert ids == trained.encode_ordinary(text)


def test_no_pieces_give_no_ids(trained: Tokenizer) -> None:
    assert list(trained.encode_iterable([])) == list(trained.encode_iterable(["", b""])) == []
    assert list(trained.encode_blocks(iter(()))) == []


# --- blocks and threads ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 2, 8])
@pytest.mark.parametrize("size", [60, 700, 1 << 19])
def test_neither_blocks_nor_threads_change_the_ids(trained, book, book_ids, set_block_size, size, threads) -> None:
    set_block_size(size)
    assert trained.encode(book, **ALL, threads=threads) == book_ids
    assert trained.encode_array(book, **ALL, threads=threads).tolist() == book_ids
    assert trained.encode_array(book.encode(), **ALL, threads=threads).tolist() == book_ids
    ordinary = trained.encode_ordinary(book, threads=threads)
    assert ordinary == trained.encode_bytes(book.encode(), threads=threads)
    found = list(trained.encode_blocks([book[:999], book[999:]], **ALL, threads=threads))
    assert all(block.dtype == np.uint32 for block in found)
    assert np.concatenate(found).tolist() == book_ids


def test_small_blocks_are_many_blocks(trained: Tokenizer, book: str, set_block_size) -> None:
    set_block_size(700)
    pieces = cut_at(book.encode(), range(0, 1 << 20, 500))
    found = [len(ids) for ids in trained.encode_blocks(pieces, **ALL, threads=1)]
    assert len(found) > 25
    assert max(found) < 1200


@given(data=byte_texts, size=st.sampled_from([1, 2, 5, 20]))
@same_every_run(120)
def test_text_in_memory_may_be_cut_into_blocks_of_any_size(trained, set_block_size, data: bytes, size: int) -> None:
    set_block_size(1 << 19)
    expected = trained.encode_bytes(data)
    set_block_size(size)
    assert trained.encode_bytes(data) == expected
    assert trained.encode_array(data, disallowed_special=()).tolist() == expected


@given(batch=st.lists(with_specials, max_size=8), size=st.sampled_from([1, 40, 1 << 19]))
@same_every_run(50)
def test_batch_gives_the_ids_of_each_text(trained, set_block_size, batch: list[str], size: int) -> None:
    expected = [trained.encode(text, **ALL) for text in batch]
    ordinary = [trained.encode_ordinary(text) for text in batch]
    set_block_size(size)
    assert trained.encode_batch(batch, **ALL, threads=1) == expected
    assert trained.encode_batch(batch, disallowed_special=(), threads=1) == ordinary


@pytest.mark.parametrize("threads", [1, 2, 8, None])
def test_threads_do_not_change_a_batch(trained, book, set_block_size, threads: int | None) -> None:
    batch = book.split("\n")
    expected = [trained.encode(text, **ALL) for text in batch]
    assert len(batch) > 50
    for size in (100, 5000, 1 << 19):
        set_block_size(size)
        assert trained.encode_batch(batch, **ALL, threads=threads) == expected


def test_batch_with_a_refused_special_is_refused(trained: Tokenizer) -> None:
    with pytest.raises(ValueError, match="contains the special token"):
        trained.encode_batch(["fine", f"not {SPECIALS[0]}"])


def test_number_of_threads_is_at_least_one(trained: Tokenizer, set_block_size) -> None:
    set_block_size(4)
    with pytest.raises(ValueError, match=r"1 to 1024, .*; got 0"):
        trained.encode("a long text", threads=0)
    with pytest.raises(ValueError, match=r"1 to 1024, .*; got -1"):
        trained.encode_batch(["text"], threads=-1)
    with pytest.raises(ValueError, match=r"1 to 1024, .*; got 0"):
        list(trained.encode_blocks(["text"], threads=0))


def test_one_tokenizer_serves_eight_threads_at_once(vocabulary, book: str) -> None:
    alone, shared = (Tokenizer(*vocabulary, SPECIALS) for _ in range(2))
    parts = [part for part in book.split("\n") if part][:60]
    expected = [alone.encode(part, **ALL) for part in parts]
    together = threading.Barrier(8)

    def work(number: int) -> None:
        together.wait(timeout=30)
        for i in range(len(parts)):
            place = (i * 7 + number) % len(parts)
            ids = shared.encode(parts[place], **ALL)
            assert ids == expected[place]
            assert shared.decode(ids) == parts[place]
        assert shared.encode_batch(parts, **ALL, threads=2) == expected

    with ThreadPoolExecutor(8) as pool:
        for result in [pool.submit(work, number) for number in range(8)]:
            result.result()
