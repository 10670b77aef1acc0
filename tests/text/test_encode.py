"""Encoding: bpe.cpp, its twin in Python, tiktoken and tokenizers give the same ids; any vocabulary, any length."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuselm.text.bpe import Encoder, Merges
from fuselm.text.native import NativeEncoder
from fuselm.text.reference import ReferenceEncoder, RefusedSpecial
from fuselm.text.tokenizer import Tokenizer
from tests.text.conftest import SPECIALS
from tests.text.samples import (
    GPT2_PATTERN,
    LENGTHS,
    byte_texts,
    mixture,
    needs_compiler,
    printable,
    same_every_run,
    texts,
)

pytestmark = needs_compiler

Both = tuple[NativeEncoder, ReferenceEncoder]
# Words that the vocabulary was made of, in orders and with endings that it was not.
of_the_corpus = st.lists(st.sampled_from(mixture(20_000).split(" ")), max_size=15).map(" ".join)
mixed_texts = st.one_of(texts, of_the_corpus, st.tuples(of_the_corpus, texts).map("".join))


def encoders(merges: Merges, specials: Sequence[str] = (), byte_ids: Sequence[int] = range(256)) -> Both:
    """Both encoders of a vocabulary of these merges, be they makeable or not."""
    tokens = dict.fromkeys(token for left, right in merges for token in (left, right, left + right))
    ids = {token: 1000 + i for i, token in enumerate(tokens)}
    ids |= {bytes([byte]): token for byte, token in enumerate(byte_ids)}
    table = np.array([(ids[left], ids[right], ids[left + right]) for left, right in merges], np.uint32).reshape(-1, 3)
    names = [special.encode() for special in specials]
    arguments = (list(byte_ids), table, names, [100_000 + i for i in range(len(names))])
    return NativeEncoder(*arguments), ReferenceEncoder(*arguments)


def encode_parts(
    encoder: Encoder, data: bytes, ends: list[int], allowed: bytes | None
) -> tuple[np.ndarray, np.ndarray]:
    """The ids of texts that lie one behind the other, and how many each one has."""
    return next(encoder.encode_batches([(data, np.array(ends, np.int64))], allowed, None, 1))


def refused_special(encoder: Encoder, data: bytes, refused: bytes) -> int:
    """The special for which a text is refused; -1 if it is not."""
    try:
        encoder.encode(data, None, refused)
    except RefusedSpecial as found:
        return found.index
    return -1


@pytest.fixture(scope="module")
def both(vocabulary) -> Both:
    return encoders(vocabulary[1], SPECIALS)


@pytest.fixture(scope="module")
def encode_by_tiktoken(vocabulary) -> Callable[[str], list[int]]:
    tiktoken = pytest.importorskip("tiktoken")
    ranks = {text: token for token, text in vocabulary[0].items() if text.decode("utf-8", "replace") not in SPECIALS}
    specials = {text.decode(): token for token, text in vocabulary[0].items() if text not in ranks}
    encoding = tiktoken.Encoding("ours", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens=specials)
    return lambda text: encoding.encode(text, allowed_special="all")


@pytest.fixture(scope="module")
def encode_by_tokenizers(vocabulary) -> Callable[[str], list[int]]:
    tokenizers = pytest.importorskip("tokenizers")
    vocab = {printable(text): token for token, text in vocabulary[0].items() if token < 256 + len(vocabulary[1])}
    vocab |= {special: len(vocab) + i for i, special in enumerate(SPECIALS)}
    merges = [(printable(left), printable(right)) for left, right in vocabulary[1]]
    peer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges))
    peer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    peer.add_special_tokens(SPECIALS)
    return lambda text: peer.encode(text, add_special_tokens=False).ids


# --- the same as others ----------------------------------------------------------------------------------------------


@given(text=mixed_texts)
@same_every_run(350)
def test_ids_are_those_of_tiktoken_and_tokenizers(trained, encode_by_tiktoken, encode_by_tokenizers, text: str) -> None:
    ids = trained.encode(text, allowed_special="all")
    assert ids == encode_by_tiktoken(text)
    assert ids == encode_by_tokenizers(text)


@given(data=mixed_texts.map(str.encode) | byte_texts)
@same_every_run(300)
def test_ids_are_the_twins(both: Both, data: bytes) -> None:
    native, twin = both
    assert native.encode(data).tolist() == twin.encode(data).tolist()


def test_ids_of_a_long_text_are_the_peers(trained, encode_by_tiktoken, encode_by_tokenizers) -> None:
    text = mixture(300_000, seed=11).replace("\n\n", "<|endoftext|>")
    ids = trained.encode(text, allowed_special="all")
    assert len(ids) > 60_000
    assert ids == encode_by_tiktoken(text)
    assert ids == encode_by_tokenizers(text)


parts_with_specials = st.lists(
    texts | of_the_corpus | st.sampled_from([*SPECIALS, "<|", "|>", "<|pad", "endoftext|>", "<|two", " words|>"]),
    max_size=8,
).map("".join)


@given(text=parts_with_specials)
@same_every_run(150)
def test_ids_around_specials_are_the_peers(trained, encode_by_tiktoken, encode_by_tokenizers, text: str) -> None:
    ids = trained.encode(text, allowed_special="all")
    assert ids == encode_by_tiktoken(text)
    assert ids == encode_by_tokenizers(text)


@given(
    data=parts_with_specials.map(str.encode) | byte_texts, mask=st.tuples(*[st.booleans()] * 3), cut=st.integers(0, 99)
)
@same_every_run(150)
def test_any_choice_of_specials_and_any_part_of_a_text_are_encoded_as_the_twin_does(both, data, mask, cut) -> None:
    native, twin = both
    allowed = bytes(mask)
    assert native.encode(data, allowed).tolist() == twin.encode(data, allowed).tolist()
    start = cut % (len(data) + 1)
    end = start + (cut * 7) % (len(data) + 1 - start)
    # What lies around a part of a batch must not be seen.
    ids, counts = encode_parts(native, data, [start, end, len(data)], allowed)
    parts = [twin.encode(part, allowed).tolist() for part in (data[:start], data[start:end], data[end:])]
    assert (ids.tolist(), counts.tolist()) == (
        [token for part in parts for token in part],
        [len(part) for part in parts],
    )
    assert refused_special(native, data, allowed) == refused_special(twin, data, allowed)


names = st.lists(st.text("ab<é\x7f中 ", min_size=2, max_size=6), min_size=1, max_size=40, unique=True)


@given(
    specials=names,
    parts=st.lists(st.integers(0, 99) | st.text("ab<é\x7f中 ", max_size=4), max_size=12),
    seed=st.integers(0, 99),
)
@same_every_run(150)
def test_any_list_of_specials_is_found_as_the_twin_finds_it(specials: list[str], parts: list, seed: int) -> None:
    native, twin = encoders([(b"a", b"b")], specials)
    # Numbers choose a special, whole or without its last character.
    chosen = [(specials[part // 2 % len(specials)], part % 2) if isinstance(part, int) else (part, 0) for part in parts]
    data = "".join(text[: len(text) - cut] for text, cut in chosen).encode()
    chooser = random.Random(seed)
    for allowed in (b"\1" * len(specials), bytes(chooser.randrange(2) for _ in specials)):
        assert refused_special(native, data, allowed) == refused_special(twin, data, allowed)
        assert native.encode(data, allowed).tolist() == twin.encode(data, allowed).tolist()


@pytest.mark.parametrize("letter", ["é", "中", "𝐀", "\u3000", "½"])
def test_text_that_ends_within_a_character_is_read_no_further(both: Both, letter: str) -> None:
    native, twin = both
    data = (letter * 30).encode()
    for start, end in itertools.product(range(5), range(len(data))):
        expected = twin.encode(data[start:end]).tolist()
        assert native.encode(data[start:end], None).tolist() == expected
        ids, counts = encode_parts(native, data, [start, end, len(data)], None)
        assert ids[counts[0] : counts[0] + counts[1]].tolist() == expected


# --- lengths and caches ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("space", [b"", b" "])
def test_words_around_the_lengths_where_the_path_changes(both: Both, space: bytes) -> None:
    native, twin = both
    chooser = random.Random(5)
    for length in sorted({*LENGTHS, *range(1, 70)}):
        for _ in range(3):
            word = space + bytes(chooser.choices(b"abelnorst", k=length - len(space)))
            for data in (word, word + b" end", word * 2, b"x, " + word + b"!" + b" " * 40):
                expected = twin.encode(data).tolist()
                assert native.encode(data).tolist() == expected
                assert native.encode(data).tolist() == expected  # and again, from the cache


def test_words_that_differ_in_length_or_in_zero_bytes_alone_are_not_confused(both: Both) -> None:
    native, twin = both
    words = [b"\0" * n for n in range(1, 70)] + [b"!" + b"\0" * n + b"!" for n in range(14)]
    words += [b"abc", b"abc\0", b"\0abc", b"!\0", b"!", b"\0!", b"!" * 15, b"!" * 15 + b"\0", b"!" * 16]
    for _ in range(2):
        for word in words:
            assert native.encode(word).tolist() == twin.encode(word).tolist()


def test_words_that_begin_alike_are_not_confused(both: Both) -> None:
    few_ids = encoders([(b"a" * n, b"a" * n) for n in (1, 2, 4)] + [(b"aa", b"a")])  # 15 letters are three
    assert len(few_ids[0].encode(b"a" * 15)) == 3
    for native, twin in (both, few_ids):
        for word in (b"a" * 72, b"abelnorst" * 8, b" " + b"telnorsab" * 8, b"0123456789" * 8, "é中".encode() * 14):
            for length in (*range(1, 71), *range(70, 0, -1)):
                assert native.encode(word[:length]).tolist() == twin.encode(word[:length]).tolist()


def test_more_words_than_the_caches_hold_are_encoded_right(both: Both) -> None:
    native, twin = both
    # So many that they drive one another out: of few ids, of some, of many, and of more than a place holds.
    chooser = random.Random(8)
    kinds = [("abelnorstw", 3, 7, 100_000), ("abelnorstw", 16, 40, 20_000), ("bcdfgjkpqvxz", 14, 30, 50_000)]
    words = ["".join(chooser.choices(c, k=chooser.randint(a, b))) for c, a, b, count in kinds for _ in range(count)]
    data = " ".join(words).encode()
    ids = native.encode(data)
    assert len(ids) > 1_000_000
    assert np.array_equal(native.encode(data), ids)  # now from the caches, as far as they remember
    for word in chooser.sample(words, 300):
        assert native.encode(word.encode()).tolist() == twin.encode(word.encode()).tolist()


def test_long_words_are_merged_as_short_ones_are(both: Both) -> None:
    native, twin = both
    chooser = random.Random(9)
    for length in (61, 62, 100, 333, 1000):
        for letters in (b"a", b"ab", b"abelnorst", bytes(range(97, 123))):
            word = bytes(chooser.choices(letters, k=length))
            assert native.encode(word).tolist() == twin.encode(word).tolist()


def test_run_of_one_letter_is_doubled_as_far_as_merges_go() -> None:
    powers = [b"a" * (1 << i) for i in range(11)]
    native, _ = encoders([(half, half) for half in powers[:-1]])
    ids = [native.encode(power).tolist() for power in powers]
    assert [len(one) for one in ids] == [1] * 11
    # 1,000,000 = 976 x 1024 + 512 + 64
    assert native.encode(b"a" * 1_000_000).tolist() == ids[10] * 976 + ids[9] + ids[6]


ALPHABETS = ["abelnorstwfk", "0123456789", "!?.,-", "中文字天地玄黃宇宙洪荒日月", "\n\r\t "]


def test_ten_megabytes_in_five_words(trained: Tokenizer) -> None:
    chooser = random.Random(1)
    # Repeated at places that line up with nothing, and cut to 2 MB each: far longer than a block.
    parts = ["".join(chooser.choices(letters, k=4999)) * 401 for letters in ALPHABETS]
    parts[-1] = " " * 2_000_000
    text = "".join(part[: 2_000_000 // len(part[0].encode())] for part in parts)
    ids = trained.encode_array(text)
    assert 1_000_000 < len(ids) < 9_000_000
    assert trained.decode_bytes(ids) == text.encode()


@pytest.mark.parametrize("letters", ALPHABETS)
def test_very_long_words_are_encoded_as_tiktoken_does(trained, encode_by_tiktoken, letters: str) -> None:
    word = "".join(random.Random(2).choices(letters, k=40_000))
    assert trained.encode(word) == encode_by_tiktoken(word)


# --- vocabularies that no training makes -----------------------------------------------------------------------------

STRANGE = {
    # What a later merge makes is part of an earlier one: ranks fall on the way.
    "falling": [(b"abc", b"d"), (b"ab", b"c"), (b"a", b"b"), (b"dab", b"c"), (b"d", b"ab")],
    "overlapping runs": [(b"aa", b"aa"), (b"a", b"aa"), (b"a", b"a"), (b"aa", b"a"), (b"aaa", b"aaa")],
    "two ways to one token": [(b"a", b"b"), (b"b", b"a"), (b"ab", b"a"), (b"a", b"ba"), (b"aba", b"b")],
    "one pair twice": [(b"a", b"b"), (b"b", b"b"), (b"a", b"b"), (b"ab", b"b")],
    "out of reach": [(b"bab", b"a"), (b"a", b"b")],
    "none": [],
}


@pytest.mark.parametrize("name", STRANGE)
@pytest.mark.parametrize("length", [5, 40, 61, 300])
def test_strange_merges_give_the_ids_of_the_definition(name: str, length: int) -> None:
    native, twin = encoders(STRANGE[name])
    chooser = random.Random(length)
    for _ in range(40):
        word = bytes(chooser.choices(b"aabbcd", k=length))
        assert native.encode(word).tolist() == twin.encode(word).tolist()


short_tokens = st.binary(min_size=1, max_size=3).map(lambda data: bytes(97 + byte % 3 for byte in data))


@given(
    merges=st.lists(st.tuples(short_tokens, short_tokens), max_size=25),
    words=st.lists(st.text("abc", min_size=1, max_size=90), max_size=4),
)
@same_every_run(150)
def test_any_list_of_merges_gives_the_ids_of_the_definition(merges: Merges, words: list[str]) -> None:
    native, twin = encoders(merges)
    for word in (*words, "abc" * 25):
        assert native.encode(word.encode()).tolist() == twin.encode(word.encode()).tolist()


def encoders_of_ids(merges: Sequence[tuple[int, int, int]]) -> Both:
    arguments = (list(range(256)), np.array(merges, np.uint32).reshape(-1, 3), [], [])
    return NativeEncoder(*arguments), ReferenceEncoder(*arguments)


def test_bytes_and_merges_may_have_any_ids() -> None:
    shuffled = random.Random(4).sample(range(1 << 31), 256)
    native, twin = encoders([(b"a", b"b"), (b"ab", b"c"), (b"b", b"c")], byte_ids=shuffled)
    data = b"abcabbcab\xffab" * 9
    assert native.encode(data).tolist() == twin.encode(data).tolist()
    assert shuffled[255] in native.encode(data).tolist()
    highest = (1 << 31) - 1
    native, twin = encoders_of_ids([(97, 98, highest), (highest, highest, highest - 1)])
    for data in (b"ab", b"abab", b"ab" * 50):
        assert native.encode(data).tolist() == twin.encode(data).tolist()
    assert native.encode(b"ababab").tolist() == [highest - 1, highest]


def test_merges_whose_pairs_meet_in_the_table_are_told_apart() -> None:
    # As many pairs as fill the table of merges to its half, all of them in use.
    chooser = random.Random(6)
    pairs = chooser.sample([(a, b) for a in range(33, 127) for b in range(33, 127)], 4095)
    native, twin = encoders_of_ids([(a, b, 1000 + rank) for rank, (a, b) in enumerate(pairs)])
    for a, b in chooser.sample(pairs, 1000) + [
        (chooser.randrange(33, 127), chooser.randrange(33, 127)) for _ in range(1000)
    ]:
        assert native.encode(bytes([a, b])).tolist() == twin.encode(bytes([a, b])).tolist()
