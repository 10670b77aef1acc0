"""Blocks: cuts change nothing that is made of the parts; order, errors and patience of work in several threads."""

from __future__ import annotations

import functools
import io
import itertools
import os
import random
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuselm.text import blocks, reference
from fuselm.text.bpe import Encoder
from fuselm.text.characters import CharacterEncoder
from fuselm.text.native import NativeEncoder
from fuselm.text.reference import ReferenceEncoder
from tests.text.samples import BROKEN, byte_texts, cut_at, english, mixture, needs_compiler, same_every_run

SPECIALS = (b"<a>", b"<a>b ", b" x y ", "é!".encode())
IDS = [1000, 1001, 1002, 1003]


@functools.cache
def make_encoder(kind: str, specials: tuple[bytes, ...]) -> Encoder:
    """An encoder of single bytes or characters: its cuts are what is looked at."""
    if kind == "characters":
        alphabet = {chr(code): code for code in range(0x20000) if not 0xD800 <= code < 0xE000}
        return CharacterEncoder(alphabet, specials, IDS[: len(specials)], "\ufffd")
    table = np.empty((0, 3), np.uint32)
    made = NativeEncoder if kind == "native" else ReferenceEncoder
    return made(range(256), table, specials, IDS[: len(specials)])


each_kind = pytest.mark.parametrize("kind", [pytest.param("native", marks=needs_compiler), "reference", "characters"])


# --- cuts ------------------------------------------------------------------------------------------------------------


def cuts(find_cut: blocks.FindCut, data: bytes) -> list[tuple[int, int]]:
    """Every cut that is found when the text is known up to `end`, with that end."""
    found = [(find_cut(data, 0, 0, end), end) for end in range(len(data) + 1)]
    return [(cut, end) for cut, end in found if cut]


pieces = st.sampled_from(
    [*SPECIALS, *BROKEN, b" ", b"  ", b"a", b"'", b"s", b"'ll", b"1", b"!", "é中".encode(), b"<a", b"x y"]
)


@each_kind
@given(data=st.lists(pieces | byte_texts.map(lambda data: data[:8]), min_size=1, max_size=10).map(b"".join))
@same_every_run(80)
def test_cut_text_gives_the_words_and_ids_of_the_whole(kind: str, data: bytes) -> None:
    encoder = make_encoder(kind, SPECIALS)
    for cut, end in cuts(encoder.find_cut, data):
        assert 0 < cut < end
        if kind != "characters":
            assert reference.split(data[:cut]) + reference.split(data[cut:]) == reference.split(data)
        for allowed in (None, b"\1" * 4, b"\1\0\1\0"):
            parts = [encoder.encode(part, allowed).tolist() for part in (data[:cut], data[cut:])]
            assert parts[0] + parts[1] == encoder.encode(data, allowed).tolist()


@pytest.mark.parametrize("kind", [pytest.param("native", marks=needs_compiler), "reference"])
def test_every_short_text_may_be_cut_where_cuts_are_found(kind: str) -> None:
    find_cut, seen = make_encoder(kind, ()).find_cut, 0
    for letters in itertools.product(["a", "s", "é", "7", "'", "!", " ", "\n", "\u3000"], repeat=3):
        data = "".join((*letters, "a's ")).encode()  # a cut is only found where four bytes follow
        for cut, _ in cuts(find_cut, data):
            seen += 1
            assert reference.split(data[:cut]) + reference.split(data[cut:]) == reference.split(data)
    assert seen > 200


@needs_compiler
def test_native_cut_is_the_last_one_that_is_safe_whatever_follows() -> None:
    encoder = make_encoder("native", ())
    for data, cut in [
        (b"one two three", 7),  # before the last space that four bytes follow
        (b"one two", 3),
        (b"abc123def", 3),
        (b"abc12345", 3),
        (b"abc'll 12", 3),
        (b"don't!?...", 5),
        (b"don't", 0),
        (b"'tis the", 4),
        (b"a   bcd", 1),  # neither among spaces nor behind them
        (b"    abcdefg", 0),
        (b"...abcdef", 0),  # three dots and a letter: the last may be an apostrophe's place
        ("né中 文xyz".encode(), 6),
    ]:
        assert encoder.find_cut(data, 0, 0, len(data)) == cut, data


@needs_compiler
def test_cut_is_looked_for_between_searched_and_end_only() -> None:
    data = b"one two three four five six"
    for kind in ("native", "reference"):
        encoder = make_encoder(kind, ())
        assert encoder.find_cut(data, 0, 0, len(data)) == 23
        assert encoder.find_cut(data, 0, 0, 22) == 18
        assert encoder.find_cut(data, 8, 13, len(data)) == 23
        assert encoder.find_cut(data, 8, 13, 17) == 0
        assert encoder.find_cut(data, 4, 7, 17) == 13
        assert encoder.find_cut(data, 13, 13, 16) == 0


@each_kind
def test_text_has_a_cut_every_few_words(kind: str) -> None:
    # The twin in Python knows fewer cuts: those of text with spaces.
    text = english(random.Random(5), 20_000) if kind == "reference" else mixture(20_000, seed=5)
    for end in range(1000, len(text), 997):
        assert make_encoder(kind, SPECIALS).find_cut(text.encode(), 0, 0, end) > end - 100


@each_kind
def test_no_cut_goes_through_a_special_be_it_whole_or_still_coming(kind: str) -> None:
    data = b"aa x y bb"
    special = range(data.index(b" x y ") + 1, data.index(b"bb"))
    for filler in (b"", b"cc dd ee ff gg"):
        for cut, _ in cuts(make_encoder(kind, SPECIALS).find_cut, data + filler):
            assert cut not in special


# --- blocks ----------------------------------------------------------------------------------------------------------


def cut_behind_lines(data: bytes, start: int, searched: int, end: int) -> int:
    """The last place behind a line feed: the simplest of cuts."""
    found = data.rfind(b"\n", max(start, searched), end - 1)
    return found + 1 if found >= 0 else 0


@given(
    data=st.binary(max_size=300).map(lambda data: bytes(b"ab\n"[byte % 3] for byte in data)),
    places=st.lists(st.integers(0, 300), max_size=30),
    size=st.sampled_from([1, 4, 20, 400]),
)
@same_every_run(150)
def test_blocks_are_the_text_cut_where_it_may_be(set_block_size, data, places, size) -> None:
    set_block_size(size)
    made = list(blocks.blocks(iter(cut_at(data, places)), cut_behind_lines))
    assert b"".join(made) == data
    assert all(block.endswith(b"\n") for block in made[:-1])
    assert all(made)


def test_blocks_are_about_as_long_as_they_should_be(set_block_size) -> None:
    set_block_size(100)
    data = b"123456789\n" * 100
    made = list(blocks.blocks([data[i : i + 7] for i in range(0, 1000, 7)], cut_behind_lines))
    assert {len(block) for block in made[:-1]} <= {80, 90, 100}


@given(text=st.text(st.sampled_from("aé中😀\ud83d\ude00"), max_size=40), size=st.sampled_from([1, 3, 8]))
@same_every_run(150)
def test_slices_add_up_and_keep_surrogate_pairs_together(set_block_size, text: str, size: int) -> None:
    set_block_size(size)
    made = list(blocks.slices(text))
    assert "".join(made) == text
    assert b"".join(map(blocks.utf8, made)) == blocks.utf8(text)
    assert all(len(part) == size or part[-2] in "\ud83d" for part in made[:-1])


def test_long_piece_is_cut_into_blocks_too(set_block_size) -> None:
    set_block_size(100)
    made = list(blocks.blocks([b"123456789\n" * 100], cut_behind_lines))
    assert max(map(len, made)) <= 200


def test_text_without_a_cut_is_searched_once_and_not_again_and_again(set_block_size) -> None:
    set_block_size(10)
    data = b"a" * 100_000
    searches: list[tuple[int, int]] = []

    def find_cut(data: bytes, start: int, searched: int, end: int) -> int:
        searches.append((searched, end))
        return 0

    assert list(blocks.blocks([data[i : i + 10] for i in range(0, len(data), 10)], find_cut)) == [data]
    assert len(searches) < 40  # twice as far each time
    assert all(before[1] == after[0] for before, after in itertools.pairwise(searches))


def test_pieces_of_a_file_are_its_bytes(tmp_path: Path, set_block_size) -> None:
    set_block_size(7)
    data = bytes(range(256)) * 3
    (tmp_path / "file").write_bytes(data)
    heard: list[int] = []
    assert b"".join(blocks.file_pieces(tmp_path / "file", heard.append)) == data
    assert sum(heard) == len(data)
    assert max(heard) == 7
    assert b"".join(blocks.read_pieces(io.BytesIO(data))) == data
    assert list(blocks.read_pieces(io.BytesIO(b""))) == []


@pytest.mark.parametrize(
    ("text", "data"),
    [("é", b"\xc3\xa9"), (b"\xff", b"\xff"), ("", b""), ("\ud800", b"\xef\xbf\xbd"), ("a\udc00b", b"a\xef\xbf\xbdb")],
)
def test_utf8_of_anything(text: str | bytes, data: bytes) -> None:
    assert blocks.utf8(text) == data


# --- threads ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 2, 8])
def test_results_come_in_the_order_of_the_items(threads: int) -> None:
    late = threading.Event()

    def work(item: int) -> int:
        if item == 0 and threads > 1:
            assert late.wait(timeout=30)  # the first is done after another
        if item > 0:
            late.set()
        return item * item

    assert list(blocks.in_order(work, range(50), threads)) == [item * item for item in range(50)]


@pytest.mark.parametrize("threads", [1, 3])
def test_few_items_are_taken_before_their_time(threads: int) -> None:
    taken: list[int] = []

    def items():
        for item in range(1000):
            taken.append(item)
            yield item

    results = blocks.in_order(lambda item: item, items(), threads)
    assert next(results) == 0
    assert len(taken) <= 2 * threads + 1
    results.close()


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("where", ["in the work", "in the items"])
def test_error_comes_out_and_ends_the_work(threads: int, where: str) -> None:
    done: list[int] = []

    def items():
        for item in range(1000):
            if item == 20 and where == "in the items":
                raise OSError("disk")
            yield item

    def work(item: int) -> int:
        if item == 20 and where == "in the work":
            raise OSError("disk")
        done.append(item)
        return item

    with pytest.raises(OSError, match="disk"):
        list(blocks.in_order(work, items(), threads))
    assert len(done) < 100


def test_several_threads_do_work_at_the_same_time() -> None:
    both_are_there = threading.Barrier(2)

    def work(item: int) -> int:
        both_are_there.wait(timeout=30)
        return item

    assert list(blocks.in_order(work, range(2), 2)) == [0, 1]


def test_number_of_threads_is_that_of_the_cores_unless_given() -> None:
    assert blocks.thread_count(3) == 3
    assert 1 <= blocks.thread_count(None) <= (os.cpu_count() or 1)
    for wrong in (0, -2, 100_000):
        with pytest.raises(ValueError, match=rf"is 1 to 1024, or None for one on each core; got {wrong}\."):
            blocks.thread_count(wrong)
    with pytest.raises(TypeError, match=r"or None for one on each core; got 2\.5"):
        blocks.thread_count(2.5)
