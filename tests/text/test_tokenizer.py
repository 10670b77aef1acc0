"""Tokenizer: special tokens as tiktoken has them, decoding that never raises, vocabularies that cannot be."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuselm.text.bpe import train_bpe
from fuselm.text.tokenizer import Tokenizer
from tests.text.conftest import SPECIALS
from tests.text.samples import GPT2_PATTERN, byte_texts, needs_compiler, same_every_run, texts

pytestmark = needs_compiler

BYTES = {byte: bytes([byte]) for byte in range(256)}
END, PAD, TWO = SPECIALS


def small(specials=(), merges=((b"a", b"b"),)) -> Tokenizer:
    """The bytes and a merge or two."""
    made = {256 + i: left + right for i, (left, right) in enumerate(merges)}
    return Tokenizer(BYTES | made, merges, specials)


# --- special tokens --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def peer(vocabulary):
    tiktoken = pytest.importorskip("tiktoken")
    specials = {name: 256 + len(vocabulary[1]) + i for i, name in enumerate(SPECIALS)}
    ranks = {text: token for token, text in vocabulary[0].items() if token not in specials.values()}
    return tiktoken.Encoding("ours", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens=specials)


choices = st.just("all") | st.sets(st.sampled_from(SPECIALS))
with_specials = st.lists(st.sampled_from([*SPECIALS, "<|pad", "|>", " words|>", " a", "\n"]) | texts, max_size=6).map(
    "".join
)


@given(text=with_specials, allowed=choices, disallowed=choices)
@same_every_run(180)
def test_specials_are_allowed_and_refused_as_tiktoken_does(trained, peer, text, allowed, disallowed) -> None:
    options = {"allowed_special": allowed, "disallowed_special": disallowed}
    try:
        expected = peer.encode(text, **options)
    except ValueError:
        with pytest.raises(ValueError, match="contains the special token"):
            trained.encode(text, **options)
        with pytest.raises(ValueError, match="contains the special token"):
            trained.encode_array(text, **options)
    else:
        assert trained.encode(text, **options) == expected
        assert trained.encode_array(text, **options).tolist() == expected


@given(text=with_specials)
@same_every_run(60)
def test_ordinary_encoding_knows_no_specials(trained, peer, text: str) -> None:
    ids = trained.encode_ordinary(text)
    assert ids == peer.encode_ordinary(text) == trained.encode(text, disallowed_special=())
    assert not set(ids) & set(trained.special_tokens.values())


def test_refused_special_is_named_with_both_remedies(trained: Tokenizer) -> None:
    with pytest.raises(ValueError, match=r"contains the special token '<\|pad\|>'") as refusal:
        trained.encode(f"one {PAD} two {END}")
    assert f"allowed_special={{{PAD!r}}}" in str(refusal.value)
    assert "disallowed_special=()" in str(refusal.value)
    sent = pickle.loads(pickle.dumps(refusal.value))  # as a process of a pool does
    assert (str(sent), sent.token) == (str(refusal.value), PAD)


def test_special_allowed_and_refused_at_once_is_refused(trained: Tokenizer) -> None:
    with pytest.raises(ValueError, match="contains the special token"):
        trained.encode(PAD, allowed_special="all", disallowed_special={PAD})


def test_longest_special_wins_and_then_the_leftmost() -> None:
    tokenizer = small({"<a>": 300, "<a>b": 301, "<a>bc": 302, "b<": 303})
    assert tokenizer.encode("<a><a>b<a>bc<a>b<a>", allowed_special="all") == [300, 301, 302, 301, 300]
    assert tokenizer.encode("b<a>", allowed_special="all") == [303, *b"a>"]
    assert tokenizer.encode("<a>bc", allowed_special={"<a>", "<a>b"}, disallowed_special=()) == [301, ord("c")]
    assert tokenizer.encode("<a>b", allowed_special={"<a>"}, disallowed_special=()) == [300, ord("b")]
    # A refused special inside an allowed one is still in the text, as in tiktoken.
    with pytest.raises(ValueError, match=r"special token '<a>'"):
        tokenizer.encode("<a>b", allowed_special={"<a>b"})


def test_names_of_specials_are_checked(trained: Tokenizer) -> None:
    with pytest.raises(TypeError, match=r'in a set, or by "all"; got the string'):
        trained.encode("text", allowed_special=PAD)
    for option in ("allowed_special", "disallowed_special"):
        with pytest.raises(ValueError, match=r"'<\|nobody\|>' is not a special token .* it has '<\|endoftext\|>'"):
            trained.encode("text", **{option: {"<|nobody|>"}})


def test_specials_take_given_ids_then_those_of_the_vocabulary_then_free_ones() -> None:
    assert small(["<x>", "<y>"]).special_tokens == {"<x>": 257, "<y>": 258}
    assert small({"<x>": 900}).vocab_size == 901
    in_vocabulary = Tokenizer(BYTES | {256: b"<y>", 300: b"<x>"}, [], ["<x>", "<z>", "<y>"])
    assert in_vocabulary.special_tokens == {"<x>": 300, "<z>": 301, "<y>": 256}


def test_end_of_text_has_an_id_where_there_is_one(trained: Tokenizer) -> None:
    assert trained.end_of_text == trained.encode(END, allowed_special="all")[0]
    assert small(["<x>"]).end_of_text is None


def test_special_that_a_merge_makes_too_is_found_in_ordinary_text() -> None:
    tokenizer = small(["ab"])
    assert tokenizer.special_tokens == {"ab": 256}
    assert tokenizer.encode_ordinary("cab") == [ord("c"), 256]
    with pytest.raises(ValueError, match="special token 'ab'"):
        tokenizer.encode("cab")


# --- vocabularies ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("vocab", "merges", "specials", "words"),
    [
        ({**BYTES, 256: b"ab"}, [(b"a", b"c")], None, r"b'ac' of the merge b'a' \+ b'c' is not"),
        (BYTES, [(b"a", b"b")], None, r"b'ab' of the merge .* belong to different tokenizers"),
        ({token: text for token, text in BYTES.items() if token != 10}, [], None, r"256 bytes; b'\\n' has none"),
        ({}, [], None, r"256 bytes"),
        ({**BYTES, -1: b"xy"}, [], None, r"from 0 to 4194303; got -1"),
        ({**BYTES, 1 << 22: b"xy"}, [], None, r"from 0 to 4194303; got 4194304"),
        (BYTES, [], {"<x>": 65}, r"'<x>' cannot have the id 65: it is b'A'"),
        (BYTES, [], {"<x>": -1}, r"'<x>' cannot have the id -1"),
        (BYTES, [], {"<x>": 300, "<y>": 300}, r"'<y>' cannot have the id 300"),
        (BYTES, [], ["<x>", "<x>"], r"all different; got b'<x>' twice"),
        (BYTES, [], ["x"], r"at least two bytes"),
    ],
)
def test_vocabulary_that_cannot_be_is_refused(vocab, merges, specials, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Tokenizer(vocab, merges, specials)


def test_lowest_of_several_ids_of_one_token_is_used() -> None:
    tokenizer = Tokenizer(BYTES | {256: b"ab", 257: b"ab", 258: b"a"}, [(b"a", b"b")])
    assert tokenizer.encode("aab") == [ord("a"), 256]
    assert tokenizer.decode([256, 257, 258]) == "ababa"


def test_equal_tokenizers_have_one_fingerprint_and_others_another() -> None:
    merges = [(b"a", b"b"), (b"b", b"c")]
    same = [small(["<x>", "<y>"], merges), small({"<y>": 259, "<x>": 258}, merges)]
    assert same[0] == same[1]
    assert hash(same[0]) == hash(same[1])
    others = [small(["<x>"], merges), small(["<y>", "<x>"], merges), small([], merges)]
    others += [Tokenizer(same[0].vocab, merges[::-1], ["<x>", "<y>"]), Tokenizer(same[0].vocab, merges)]
    assert len({tokenizer.fingerprint for tokenizer in (*same, *others)}) == 6
    assert same[0] != "tokenizer"
    assert same[0].kind == "bpe"
    assert repr(same[0]) == "Tokenizer(bpe, 260 ids, 2 special)"


def test_vocabulary_with_specials_is_in_the_order_of_ids() -> None:
    tokenizer = Tokenizer({500: b"ab", **BYTES}, [(b"a", b"b")], {"<x>": 300})
    assert list(tokenizer.vocab) == [*range(256), 300, 500]
    assert tokenizer.vocab_size == 501


# --- there and back --------------------------------------------------------------------------------------------------


@given(text=texts)
@same_every_run(120)
def test_any_text_comes_back(trained: Tokenizer, text: str) -> None:
    assert trained.decode(trained.encode_ordinary(text)) == text
    assert trained.decode_bytes(trained.encode_ordinary(text)) == text.encode()


@given(data=byte_texts | st.binary(max_size=200))
@same_every_run(120)
def test_any_bytes_come_back(trained: Tokenizer, data: bytes) -> None:
    ids = trained.encode_bytes(data)
    assert trained.decode_bytes(ids) == data
    assert trained.decode(ids) == data.decode("utf-8", "replace")


@given(text=st.text(st.characters(), max_size=20) | st.text(st.sampled_from("a\ud800\udfff\ud83d\ude00 "), max_size=6))
@same_every_run(120)
def test_lone_surrogate_comes_back_as_the_replacement_character(trained, peer, text: str) -> None:
    decoded = trained.decode(trained.encode_ordinary(text))
    # What UTF-16 makes of it: a high and a low one behind the other are one character, any other is none.
    assert decoded == text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    assert trained.encode_ordinary(text) == peer.encode_ordinary(text)


def test_each_lone_surrogate_is_one_replacement_character(trained: Tokenizer) -> None:
    assert trained.decode(trained.encode("a\ud800b\udc00\udfff")) == "a\ufffdb\ufffd\ufffd"


def test_specials_decode_to_their_text(trained: Tokenizer) -> None:
    text = f"a{END} b{TWO}{PAD}"
    assert trained.decode(trained.encode(text, allowed_special="all")) == text


numbers = (
    st.integers(-10, 4000)
    | st.integers()
    | st.integers(-(1 << 70), 1 << 70)
    | st.sampled_from([2**31, 2**32, 2**63, 2**64])
)


@given(ids=st.lists(numbers, max_size=20))
@same_every_run(150)
def test_decoding_never_raises_and_what_is_no_id_becomes_a_replacement_character(trained, ids: list[int]) -> None:
    expected = b"".join(trained.vocab.get(token, "\ufffd".encode()) for token in ids).decode("utf-8", "replace")
    assert trained.decode(ids) == expected
    assert trained.decode(tuple(ids)) == expected
    assert trained.decode(iter(ids)) == expected
    assert trained.decode_batch([ids, []]) == [expected, ""]


@given(ids=st.lists(numbers, min_size=1, max_size=12))
@same_every_run(100)
def test_exact_decoding_refuses_what_is_no_id(trained: Tokenizer, ids: list[int]) -> None:
    bad = [token for token in ids if token not in trained.vocab]
    if not bad:
        assert trained.decode_bytes(ids) == b"".join(trained.vocab[token] for token in ids)
        return
    for given_ids in (ids, iter(ids)):
        with pytest.raises(ValueError, match=rf"one of the 3259 in the vocabulary, below 3259; got {bad[0]} at place"):
            trained.decode_bytes(given_ids)


def test_holes_in_a_vocabulary_are_no_ids() -> None:
    tokenizer = Tokenizer(BYTES | {300: b"ab"}, [(b"a", b"b")])
    assert tokenizer.decode([300, 299, 65]) == "ab\ufffdA"
    assert tokenizer.token_bytes(300) == b"ab"
    assert tokenizer.token_bytes(299) == tokenizer.token_bytes(-1) == "\ufffd".encode()
    with pytest.raises(ValueError, match=r"one of the 257 in the vocabulary, below 301; got 299 at place 1"):
        tokenizer.decode_bytes([300, 299])


@pytest.mark.parametrize("dtype", [np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64])
def test_arrays_of_any_integers_are_decoded(dtype: type) -> None:
    tokenizer = small()
    assert tokenizer.decode(np.array([256, 65], dtype)) == "abA"
    assert tokenizer.decode_bytes(np.array([256, 65], dtype)) == b"abA"
    for wrong in (np.iinfo(dtype).max, -1, 257, 2**32 + 65, 65 - 2**32):  # the last two are 65 in 32 bits
        if np.iinfo(dtype).min <= wrong <= np.iinfo(dtype).max:
            assert tokenizer.decode(np.array([wrong, 65], dtype)) == "\ufffdA"
            with pytest.raises(ValueError, match=rf"got {wrong} at place 1"):
                tokenizer.decode_bytes(np.array([65, wrong], dtype))
    assert tokenizer.decode(np.array([], dtype)) == ""
    every_second = np.array([256, 1, 65, 1], dtype)[::2]
    assert tokenizer.decode_bytes(every_second) == b"abA"


def test_numpy_integers_in_a_list_are_ids_too() -> None:
    tokenizer = small()
    assert tokenizer.decode([np.int64(256), np.uint16(65), np.uint32(66)]) == "abAB"
    # Numbers that are no ids do not become some by losing their upper bits.
    for wrong in (np.int64(-1), np.int64(2**32 + 65), np.uint64(2**63 + 65), np.int64(65 - 2**32)):
        assert tokenizer.decode([wrong, 66]) == "\ufffdB"
        with pytest.raises(ValueError, match=rf"got {wrong} at place 0"):
            tokenizer.decode_bytes([wrong, 66])


def test_part_of_a_character_decodes_to_a_replacement_character(trained: Tokenizer) -> None:
    assert trained.decode([0xE4, 0xB8]) == "\ufffd"
    assert trained.decode_bytes([0xE4, 0xB8]) == b"\xe4\xb8"
    assert trained.decode([0xE4, 0xB8, 0xAD]) == "中"


def test_nothing_is_nothing(trained: Tokenizer) -> None:
    assert trained.encode("") == trained.encode_ordinary("") == trained.encode_bytes(b"") == []
    assert trained.encode_array("").tolist() == []
    assert trained.decode([]) == ""
    assert trained.decode_bytes([]) == b""


def test_ids_are_python_integers_and_arrays_are_uint32(trained: Tokenizer) -> None:
    for text in ("a few words", "many words " * 100):
        assert {type(token) for token in trained.encode(text)} == {int}
    assert trained.encode_array("a few words").dtype == np.uint32


def test_trained_vocabulary_goes_straight_into_a_tokenizer() -> None:
    tokenizer = Tokenizer(*train_bpe([" low lower lowest" * 9], 264, ["<|x|>"]), special_tokens=["<|x|>"])
    assert tokenizer.special_tokens == {"<|x|>": 263}
    assert tokenizer.vocab_size == 264
    assert len(tokenizer.encode(" lower lowest")) == 2


# --- copies and odd arguments ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [small, lambda: Tokenizer.characters("abé", ["<x>"], unknown="b")])
def test_copies_build_their_own_native_side(make) -> None:
    tokenizer = make()
    for copied in (copy.deepcopy(tokenizer), pickle.loads(pickle.dumps(tokenizer))):
        assert copied is not tokenizer
        assert copied == tokenizer
        assert copied.encode("ab") == tokenizer.encode("ab")


def test_empty_and_many_dimensional_arrays_are_decoded() -> None:
    tokenizer = small()
    assert tokenizer.decode(np.array([])) == ""
    assert tokenizer.decode(np.array([[65, 66], [67, 9999]])) == "ABC\ufffd"
    with pytest.raises(ValueError, match="got 9999 at place 3"):
        tokenizer.decode_bytes(np.array([[65, 66], [67, 9999]]))
    with pytest.raises(TypeError, match="array of float64"):
        tokenizer.decode(np.array([1.5]))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda t: t.encode(None), "A text is a str"),
        (lambda t: t.encode_array(bytearray(b"a")), "got bytearray"),
        (lambda t: t.encode_bytes(3), "bytes-like object"),
        (lambda t: t.encode_iterable("abc"), "Put it into a list"),
        (lambda t: t.encode_blocks(b"abc"), "Put it into a list"),
        (lambda t: t.encode_batch("abc"), "Put it into a list, or call `encode`"),
        (lambda t: train_bpe(b"abc", 300), "Put them into a list"),
    ],
)
def test_what_is_no_text_is_refused_at_once(call, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        call(small())


def test_streams_refuse_wrong_options_before_they_begin() -> None:
    with pytest.raises(ValueError, match="1 to 1024"):
        small().encode_blocks(["abc"], threads=0)
    with pytest.raises(ValueError, match="is not a special token"):
        small().encode_iterable(["abc"], allowed_special={"<none>"})
