"""One token for each character: ids, what is not in the alphabet, special tokens, and texts cut anywhere."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuselm.text.characters import CharacterEncoder
from fuselm.text.tokenizer import Tokenizer
from tests.text.samples import byte_texts, cut_at, same_every_run

# Decoding is the library's where there is one; here it does not matter.
pytestmark = pytest.mark.filterwarnings("ignore:The tokenizer runs in plain Python:RuntimeWarning")

ALPHABET = "\n !'<>|abdené中😀\ufffd"
SPECIALS = ["<|end|>", "<|", "a b"]
letters = st.sampled_from(ALPHABET)
with_specials = st.lists(letters | st.sampled_from(SPECIALS), max_size=30).map("".join)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.characters(ALPHABET, SPECIALS)


def test_ids_are_in_the_order_of_code_points_and_specials_follow() -> None:
    tokenizer = Tokenizer.characters("hello, é中a", ["<|end|>"])
    assert [tokenizer.vocab[i].decode() for i in range(9)] == [*" ,aehloé", "中"]
    assert tokenizer.encode("hé中<|end|>", allowed_special="all") == [4, 7, 8, 9]
    assert tokenizer.special_tokens == {"<|end|>": 9}
    assert tokenizer.vocab_size == 10
    assert tokenizer.kind == "characters"
    assert tokenizer.merges == []
    assert tokenizer.end_of_text is None


@given(text=with_specials)
@same_every_run(100)
def test_text_has_an_id_for_each_character_and_comes_back(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode_ordinary(text)
    assert [tokenizer.vocab[token].decode() for token in ids] == list(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(tokenizer.encode(text, allowed_special="all")) == text


def test_longest_special_wins_and_others_are_refused(tokenizer: Tokenizer) -> None:
    end, opening, spaced = (tokenizer.special_tokens[name] for name in SPECIALS)
    assert tokenizer.encode("<|end|><|a b", allowed_special="all") == [end, opening, spaced]
    with pytest.raises(ValueError, match=r"contains the special token 'a b'"):
        tokenizer.encode("a b")


def test_character_outside_the_alphabet_is_refused_and_shown_where_it_stands(set_block_size) -> None:
    tokenizer = Tokenizer.characters("abc <>", ["<a>"])
    with pytest.raises(
        ValueError, match=r"'x', in 'abx c', is not one of them\. Make the vocabulary of text that has it"
    ):
        tokenizer.encode("b<a>abx c", allowed_special="all")
    set_block_size(8)
    with pytest.raises(ValueError, match=r"'é', in .*é.*, is not one of them"):
        tokenizer.encode("abc " * 10 + "é" + "abc " * 10)


def test_unknown_character_stands_for_what_the_alphabet_has_not() -> None:
    tokenizer = Tokenizer.characters("abc", unknown="?")
    assert tokenizer.decode(tokenizer.encode("a😀x c")) == "a???c"
    assert tokenizer.unknown == "?"
    replacement = Tokenizer.characters("abc", unknown="\ufffd")
    assert replacement.decode(replacement.encode_bytes(b"a\xff\xe4\xb8b")) == "a\ufffd\ufffdb"
    assert replacement.decode(replacement.encode("a\ud800b")) == "a\ufffdb"


@pytest.mark.parametrize("unknown", ["", "ab"])
def test_unknown_character_is_one_character(unknown: str) -> None:
    with pytest.raises(ValueError, match=r"one of the vocabulary|single character"):
        Tokenizer.characters("abc", unknown=unknown)


def test_alphabet_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"made of a text's characters; got an empty text"):
        Tokenizer.characters("")


def test_alphabet_of_longer_strings_is_refused() -> None:
    with pytest.raises(ValueError, match=r"single characters; got 'ab'"):
        CharacterEncoder({"ab": 0}, [], [], None)


def test_fingerprint_tells_unknowns_and_kinds_apart() -> None:
    kinds = [
        Tokenizer.characters("ab?"),
        Tokenizer.characters("ab?", unknown="?"),
        Tokenizer.characters("ab?", ["<x>"]),
    ]
    assert len({tokenizer.fingerprint for tokenizer in kinds}) == 3
    assert kinds[1] == Tokenizer.characters("ab", unknown="?")


@given(text=with_specials, places=st.lists(st.integers(0, 100), max_size=8), size=st.sampled_from([1, 3, 10]))
@same_every_run(120)
def test_pieces_blocks_and_batches_give_the_ids_of_the_whole(tokenizer, set_block_size, text, places, size) -> None:
    set_block_size(1 << 19)
    expected = tokenizer.encode(text, allowed_special="all")
    set_block_size(size)
    assert list(tokenizer.encode_iterable(cut_at(text.encode(), places), allowed_special="all")) == expected
    assert tokenizer.encode(text, allowed_special="all") == expected
    assert tokenizer.encode_array(text, allowed_special="all").tolist() == expected
    assert tokenizer.encode_batch([text, "", text], allowed_special="all", threads=1) == [expected, [], expected]


@pytest.fixture(scope="module")
def lenient() -> Tokenizer:
    return Tokenizer.characters(ALPHABET, SPECIALS, unknown="\ufffd")


@given(data=byte_texts, places=st.lists(st.integers(0, 100), max_size=8), size=st.sampled_from([1, 3, 10]))
@same_every_run(120)
def test_bytes_that_are_no_text_may_be_cut_anywhere(lenient, set_block_size, data: bytes, places, size: int) -> None:
    set_block_size(1 << 19)
    expected = lenient.encode_bytes(data)
    assert len(expected) == len(data.decode("utf-8", "replace"))
    set_block_size(size)
    assert list(lenient.encode_iterable(cut_at(data, places), disallowed_special=())) == expected
    assert lenient.encode_bytes(data) == expected


def test_ids_are_uint32_and_may_be_any(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode_array("abba").dtype == np.uint32
    encoder = CharacterEncoder({"a": (1 << 31) - 1, "b": 0}, [b"<x>"], [7], None)
    assert encoder.encode(b"ab<x>", b"\1").tolist() == [(1 << 31) - 1, 0, 7]


def test_special_of_one_character_of_the_alphabet_leaves_it_in_ordinary_text() -> None:
    tokenizer = Tokenizer.characters("aé", ["é"])
    assert tokenizer.decode(tokenizer.encode_ordinary("aé")) == "aé"
