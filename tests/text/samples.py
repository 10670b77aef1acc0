"""Texts for the tests of text/: seeded corpora, Hypothesis strategies, and the peers' way to split and encode.

Knows no test. Everything is the same in every run.

    english(random.Random(1), 5000)        # some 5,000 characters that look like sentences
    @given(texts)                          # str of every script, space and contraction, no lone surrogate
"""

from __future__ import annotations

import functools
import itertools
import random
import re
from collections.abc import Callable, Iterable

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from fuselm import compiler

GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""

needs_compiler = pytest.mark.skipif(compiler.find_host_compiler() is None, reason="needs g++")


def same_every_run(examples: int) -> settings:
    """Hypothesis settings. Fixtures are shared by the examples of a test: nothing of theirs changes between them."""
    return settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[
            HealthCheck.function_scoped_fixture,
            HealthCheck.too_slow,
            HealthCheck.data_too_large,
            HealthCheck.large_base_example,
        ],
    )


# --- corpora ---------------------------------------------------------------------------------------------------------

SYLLABLES = re.findall("..", "babebodadofafigahoinkalalelomaminanooupararerisasesotathunwawhyo")
# First code points of stretches of letters, marks, digits and pictures of several scripts, 1 to 4 bytes each in UTF-8.
SCRIPTS = (0xE0, 0x3B1, 0x430, 0x5D0, 0x627, 0x905, 0xE01, 0x1200, 0x3042, 0x4E00, 0xAC00, 0x660, 0x1D400, 0x1F600)


def _often_the_first(chooser: random.Random, words: list[str]) -> str:
    """One of the words; the first ones far more often, as in any language."""
    return words[int(len(words) * chooser.random() ** 3)]


def english(chooser: random.Random, size: int) -> str:
    """Sentences of invented words, with capitals, numbers, contractions and paragraphs."""
    words = ["".join(chooser.choices(SYLLABLES, k=chooser.randint(1, 4))) for _ in range(400)]
    text: list[str] = []
    while sum(map(len, text)) < size:
        sentence = [_often_the_first(chooser, words) for _ in range(chooser.randint(3, 12))]
        sentence[0] = sentence[0].title()
        sentence[-1] += chooser.choice(["'s", "'t", "n't", "'ll", " 1984", " 3.14", "", ""])
        text.append(" ".join(sentence) + chooser.choice([". ", ". ", "!\n", "?\n\n", ", ", "...  "]))
    return "".join(text)


def scripts(chooser: random.Random, size: int) -> str:
    """Words of many scripts between one another and between pictures."""
    text = ""
    while len(text) < size:
        first = chooser.choice(SCRIPTS)
        text += "".join(chr(first + chooser.randrange(12)) for _ in range(chooser.randint(1, 6)))
        text += chooser.choice([" ", " ", "\u3000", "\u00a0", "、", "\n", ""])
    return text


def code(chooser: random.Random, size: int) -> str:
    """Something like a program: indentation, brackets, underscores, hexadecimal numbers."""
    names = ["_".join(chooser.choices(SYLLABLES, k=chooser.randint(1, 3))) for _ in range(60)]
    lines = [
        "    " * chooser.randrange(4)
        + chooser.choice(
            ["if ({0} == {1}) {{", "{0} = {1}[{2}];", "}}", "\t// {0} -> {1}", "return {0}->{1}({2});"]
        ).format(_often_the_first(chooser, names), _often_the_first(chooser, names), hex(chooser.randrange(4096)))
        for _ in range(size // 20)
    ]
    return "\n".join(lines)


def mixture(size: int, seed: int = 7) -> str:
    """All of them, a bit of each after the other."""
    chooser = random.Random(seed)
    return "".join(make(chooser, size // 30) for _ in range(10) for make in (english, scripts, code))


# --- strategies ------------------------------------------------------------------------------------------------------

CONTRACTIONS = [
    "'s",
    "'d",
    "'m",
    "'t",
    "'ll",
    "'ve",
    "'re",
    "'",
    "''",
    "'l",
    "'v",
    "'r",
    "'S",
    "'LL",
    "’s",
    "'sa",
    "'lle",
]
SPACES = [
    " ",
    "  ",
    "   ",
    "\n",
    "\r\n",
    "\t",
    "\v",
    "\x1c",
    "\x85",
    "\xa0",
    "\u2003",
    "\u2028",
    "\u3000",
    "\u200b",
    " " * 40,
]
COMMON = [
    "a",
    "Z",
    "the",
    "0",
    "1984",
    "!",
    "...",
    "é",
    "ß",
    "中文",
    "한국어",
    "٣",
    "½",
    "Ⅷ",
    "e\u0301",
    "😀",
    "\0",
    "\ufffd",
]
# The lengths at which a word leaves the fast path (15, 16), the slack of a text's end (31 to 33), the cache (60, 61).
LENGTHS = [1, 2, 7, 8, 13, 14, 15, 16, 17, 30, 31, 32, 33, 34, 59, 60, 61, 62, 63, 64, 65]

characters = st.characters(exclude_categories=["Cs"])
runs = st.builds(str.__mul__, st.sampled_from(["a", "b", "Q", "1", "-", " ", "é", "中"]), st.sampled_from(LENGTHS))
pieces = st.one_of(
    st.sampled_from(CONTRACTIONS),
    st.sampled_from(SPACES),
    st.sampled_from(COMMON),
    st.text(characters, max_size=4),
    st.text(st.characters(max_codepoint=0x7F), max_size=20),
    runs,
)
texts = st.lists(pieces, max_size=12).map("".join)

# What UTF-8 is not: lonely continuation bytes, characters broken off, overlong forms of A, 0, a space, é and 中,
# surrogates, what is past U+10FFFF, bytes that never occur.
BROKEN = [
    *(b"\x80", b"\xbf\xbf", b"\xc3", b"\xe4\xb8", b"\xf0\x9f\x98"),
    *(b"\xc1\x81", b"\xc0\xb0", b"\xc0\xa0", b"\xe0\x81\x81", b"\xe0\x80\xa0", b"\xe0\x83\xa9", b"\xf0\x84\xb8\xad"),
    *(b"\xed\xa0\x80", b"\xed\xbf\xbf", b"\xf4\x90\x80\x80", b"\xf5\x80\x80\x80", b"\xfe", b"\xff"),
]
byte_texts = st.lists(pieces.map(str.encode) | st.sampled_from(BROKEN) | st.binary(max_size=6), max_size=12).map(
    b"".join
)


# --- peers -----------------------------------------------------------------------------------------------------------


@functools.cache
def printable_bytes() -> list[str]:
    """The character that stands for each byte in GPT-2's files and in tokenizers."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    table = {byte: chr(byte) for byte in shown} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}
    return [table[byte] for byte in range(256)]


def printable(token: bytes) -> str:
    """A token as GPT-2's files write it."""
    table = printable_bytes()
    return "".join(table[byte] for byte in token)


def split_by_tokenizers() -> Callable[[str], list[bytes]]:
    """Pre-tokenisation by Hugging Face tokenizers."""
    tokenizers = pytest.importorskip("tokenizers")
    level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    back = {shown: byte for byte, shown in enumerate(printable_bytes())}
    return lambda text: [bytes(back[c] for c in word) for word, _ in level.pre_tokenize_str(text)]


def split_by_tiktoken() -> Callable[[str], list[bytes]]:
    """Pre-tokenisation by tiktoken, which does not show it: with every part of a text as a token, a word is a token."""
    tiktoken = pytest.importorskip("tiktoken")

    def split(text: str) -> list[bytes]:
        data = text.encode()
        parts = {data[a:b] for a in range(len(data)) for b in range(a + 1, len(data) + 1)}
        ranks = {part: i for i, part in enumerate(sorted({bytes([b]) for b in range(256)} | parts, key=len))}
        encoding = tiktoken.Encoding("parts", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens={})
        return encoding.decode_tokens_bytes(encoding.encode_ordinary(text))

    return split


def cut_at(data: bytes, places: Iterable[int]) -> list[bytes]:
    """The bytes in pieces that end at these places."""
    ends = sorted({place % (len(data) + 1) for place in places} | {0, len(data)})
    return [data[a:b] for a, b in itertools.pairwise(ends)]


def split_at_specials(text: str, specials: Iterable[str]) -> list[str]:
    """A text without its special tokens, the longest of those that begin at one place being taken."""
    longest_first = sorted(specials, key=len, reverse=True)
    return re.split("|".join(map(re.escape, longest_first)), text)
