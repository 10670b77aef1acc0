"""Words: bpe.cpp, its twin in Python, the `regex` module, tiktoken and tokenizers all find the same ones."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given

from fuselm.text import native, reference
from fuselm.text.unicode import LETTERS, NUMBERS, SPACES, parse
from tests.text.samples import (
    BROKEN,
    GPT2_PATTERN,
    LENGTHS,
    byte_texts,
    mixture,
    needs_compiler,
    same_every_run,
    split_by_tiktoken,
    split_by_tokenizers,
    texts,
)

pytestmark = needs_compiler

# One of each kind of character that the pattern can tell from the others.
KINDS = ["a", "s", "l", "é", "中", "7", "½", "'", "!", "😀", " ", "\n", "\u3000"]

EXAMPLES = {
    "Don't stop": ["Don", "'t", " stop"],
    "I'll've re's": ["I", "'ll", "'ve", " re", "'s"],
    "I'LL 'll": ["I", "'", "LL", " '", "ll"],
    "x'lx'l": ["x", "'", "lx", "'", "l"],
    "!'s": ["!'", "s"],
    "''s": ["''", "s"],
    "a  b": ["a", " ", " b"],
    "a \n b": ["a", " \n", " b"],
    "a\n\nb": ["a", "\n", "\n", "b"],
    "a\nb": ["a", "\n", "b"],
    "a  ": ["a", "  "],
    "\t\ta": ["\t", "\t", "a"],
    "\u3000\u3000a": ["\u3000", "\u3000", "a"],
    "\u00a0a": ["\u00a0", "a"],
    "x1y22": ["x", "1", "y", "22"],
    " 1.5½Ⅷ": [" 1", ".", "5½Ⅷ"],
    "né 中文": ["né", " 中文"],
    "e\u0301t": ["e", "\u0301", "t"],
    " \u200b": [" \u200b"],
    "\0\0a": ["\0\0", "a"],
}


@pytest.mark.parametrize("split", [native.split, reference.split])
@pytest.mark.parametrize("text", EXAMPLES)
def test_example_is_split_as_written_by_hand(text, split) -> None:
    assert [word.decode() for word in split(text.encode())] == EXAMPLES[text]


@given(texts)
@same_every_run(250)
def test_text_is_split_alike_and_nothing_is_lost(text: str) -> None:
    words = native.split(text.encode())
    assert words == reference.split(text.encode())
    assert b"".join(words) == text.encode()


@given(byte_texts)
@same_every_run(250)
def test_bytes_that_are_no_text_are_split_alike_and_nothing_is_lost(data: bytes) -> None:
    words = native.split(data)
    assert words == reference.split(data)
    assert b"".join(words) == data
    assert all(words)


@pytest.mark.parametrize("length", [1, 2, 3])
def test_every_short_text_is_split_alike(length: int) -> None:
    for characters in itertools.product([*KINDS, *map(_broken, BROKEN)] if length < 3 else KINDS, repeat=length):
        data = "".join(characters).encode("utf-8", "surrogateescape")
        words = reference.split(data)
        assert native.split(data) == words
        # Far from the end of a text another path is taken; the line feeds there are words of their own.
        far = native.split(data + b"\n" * 40)
        assert far == reference.split(data + b"\n" * 40)


def _broken(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


@pytest.mark.parametrize("length", sorted({*LENGTHS, *range(1, 36)}))
def test_words_around_the_lengths_where_the_path_changes(length: int) -> None:
    for letter, space, behind in itertools.product(
        [b"a", b"Z", "é".encode(), b"5", b"-"],
        [b"", b" ", b"\n", b"  "],
        [b"", b" ", b"!", b"1", b"x", "é".encode(), b"'s", b"\xc3"],
    ):
        for far in (b"", b" " * 40, b"x" * 3, "é".encode() * 20):
            data = space + letter * length + behind + far
            assert native.split(data) == reference.split(data)


def test_text_may_end_anywhere() -> None:
    data = "Don't — 12 é中\u3000\n\n'll  ½😀x'r ".encode() * 2
    for end in range(len(data) + 1):
        for start in range(min(end, 40)):
            assert native.split(data[start:end]) == reference.split(data[start:end])


def test_every_letter_number_and_space_stands_in_its_class() -> None:
    # All edges of all ranges, each between a letter, a digit and a space: a wrong table entry changes the words.
    edges = {
        edge + step
        for text in (LETTERS, NUMBERS, SPACES)
        for pair in parse(text)
        for edge in pair
        for step in (-1, 0, 1)
    }
    data = "".join(f"a{chr(c)}1{chr(c)} {chr(c)}" for c in sorted(edges) if not 0xD800 <= c < 0xE000).encode()
    assert native.split(data) == reference.split(data)


# --- against others --------------------------------------------------------------------------------------------------


@given(texts)
@same_every_run(250)
def test_words_are_those_of_tokenizers(text: str) -> None:
    assert native.split(text.encode()) == split_by_tokenizers()(text)


def test_words_of_a_long_text_are_those_of_tokenizers() -> None:
    text = mixture(60_000, seed=3)
    assert native.split(text.encode()) == split_by_tokenizers()(text)


@given(texts.map(lambda text: text[:30]))
@same_every_run(100)
def test_words_are_those_of_tiktoken(text: str) -> None:
    assert native.split(text.encode()) == split_by_tiktoken()(text)


@pytest.mark.parametrize("split_by", [split_by_tokenizers, split_by_tiktoken])
def test_words_of_every_short_text_are_the_peers(split_by) -> None:
    split = split_by()
    for characters in itertools.product(KINDS, repeat=3 if split_by is split_by_tokenizers else 2):
        text = "".join(characters) + "\n"
        assert native.split(text.encode()) == split(text)


@pytest.fixture(scope="module")
def strangers() -> frozenset[str]:
    """The characters that the `regex` module, being of another Unicode version, puts into another class."""
    regex = pytest.importorskip("regex")
    everything = "".join(chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000)
    different: set[str] = set()
    for pattern, text in ((r"\p{L}", LETTERS), (r"\p{N}", NUMBERS), (r"\s", SPACES)):
        ours = {chr(code) for first, last in parse(text) for code in range(first, last + 1)}
        different |= ours ^ set(regex.findall(pattern, everything))
    assert len(different) < 50_000  # of 1.1 million: ideographs and scripts of newer versions
    return frozenset(different)


@given(text=texts)
@same_every_run(250)
def test_words_are_those_of_the_pattern(text: str, strangers: frozenset[str]) -> None:
    import regex

    known = "".join(character for character in text if character not in strangers)
    assert [word.decode() for word in native.split(known.encode())] == regex.findall(GPT2_PATTERN, known)
