"""Streaming: text comes as early as it can, and nothing of a stop string ever does.

The oracle knows neither states nor tokens: after each id it takes all bytes so far and asks which text they make for
certain, whatever follows, and how much of that no stop string can claim.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuselm.text.stream import StreamDecoder
from fuselm.text.tokenizer import Tokenizer
from tests.text.samples import same_every_run

SMILE, FAMILY = "😀", "👩‍👧"
# Tokens that end within characters, that hold several, and one that holds none.
TOKENS = [b"ab", b"aab", b"ba", b"\xf0\x9f", b"\x98\x80a", b"\xed\xa0", b"\xc3", b"\xa9\xe2\x80", b"END", b""]
TOKENS += ["é\u0301".encode(), SMILE.encode(), b"\xf4\x8f\xbf", b"\xbf\n\n", "\ufffd".encode()]
VOCAB = dict(enumerate([*(bytes([byte]) for byte in range(256)), *TOKENS]))
TOKENIZER = Tokenizer(VOCAB, [], {"<|endoftext|>": 300})  # with a gap before it
# Each beginning of a character is completed by one of these and broken by another.
FOLLOWING = [b"", b"a", b"\x80", b"\x80\x80", b"\x80\x80\x80", b"\xa0\x80", b"\x90\x80\x80"]

ids = st.one_of(
    st.sampled_from([*b"aaabb\n", *range(256, 256 + len(TOKENS)), 300]),
    st.sampled_from([*b"\xc3\xa9\xe2\x80\x8d\xed\xa0\xf0\x9f\x98\xf4\x8f\xc0\xff\x9f"]),
    st.sampled_from([-1, 299, 301, 1 << 70]),
    st.integers(0, 255),
)
streams = st.lists(ids, max_size=25)
stops = st.lists(st.text("aab\ufffdé\n😀\u0301E", min_size=1, max_size=4), max_size=4)


def certain(data: bytes) -> str:
    """What the text begins with, whatever bytes follow."""
    texts = [(data + more).decode("utf-8", "replace") for more in FOLLOWING]
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(min(texts), max(texts), strict=False))
    return "".join(character for character, _ in same)


def before_stop(text: str, stop: Sequence[str]) -> tuple[str, str | None]:
    """The text before the stop string that is complete first, and that string; of several the one that starts first."""
    for end in range(1, len(text) + 1):
        if complete := [string for string in stop if text[:end].endswith(string)]:
            found = max(complete, key=len)
            return text[: end - len(found)], found
    return text, None


def out_so_far(tokens: Sequence[int], stop: Sequence[str]) -> tuple[str, str | None]:
    """What a stream has to have given by now, no more and no less."""
    text, found = before_stop(certain(b"".join(map(TOKENIZER.token_bytes, tokens))), stop)
    beginnings = [size for string in stop for size in range(1, len(string)) if text.endswith(string[:size])]
    held = max(beginnings, default=0) if found is None else 0
    return text[: len(text) - held], found


def run(tokens: Iterable[int | list[int]], stop: Sequence[str] = (), tokenizer: Tokenizer = TOKENIZER) -> list[str]:
    """The piece that each push gives, and last what finish gives."""
    stream = StreamDecoder(tokenizer, stop)
    return [*(stream.push(group) for group in tokens), stream.finish()]


# --- characters ------------------------------------------------------------------------------------------------------


@given(streams)
@same_every_run(300)
def test_pieces_add_up_to_the_decoded_text(tokens: list[int]) -> None:
    assert "".join(run(tokens)) == TOKENIZER.decode(tokens)


def test_every_three_bytes_come_out_when_they_are_certain() -> None:
    # The bytes at which UTF-8 changes its mind.
    edges = [*b"a\x7f\x80\x8f\x90\x9f\xa0\xbf\xc0\xc1\xc2\xdf\xe0\xe1\xec\xed\xee\xef\xf0\xf1\xf3\xf4\xf5\xff"]
    for tokens in itertools.product(edges, repeat=3):
        stream = StreamDecoder(TOKENIZER)
        assert stream.push(tokens) == certain(bytes(tokens)), bytes(tokens)
        assert certain(bytes(tokens)) + stream.finish() == bytes(tokens).decode("utf-8", "replace")


def test_a_character_comes_with_its_last_byte() -> None:
    assert run(list("é😀".encode())) == ["", "é", "", "", "", "😀", ""]
    assert run([259, 260]) == ["", "😀a", ""]
    assert run([*b"e", *"\u0301".encode()]) == ["e", "", "\u0301", ""]  # a combining mark is a character of its own
    pieces = [piece for piece in run(list(FAMILY.encode())) if piece]
    assert pieces == list(FAMILY)


def test_a_character_that_stays_unfinished_becomes_a_replacement_at_the_end() -> None:
    assert run([*b"a\xf0\x9f\x98"]) == ["a", "", "", "", "\ufffd"]


def test_bytes_that_can_make_no_character_are_not_waited_for() -> None:
    assert run([*b"\xed\xa0a"]) == ["", "\ufffd\ufffd", "a", ""]
    assert run([*b"\xe2a"]) == ["", "\ufffda", ""]


def test_ids_that_are_none_become_replacements() -> None:
    assert run([97, -1, 299, 1 << 70, 98]) == ["a", "\ufffd", "\ufffd", "\ufffd", "b", ""]


def test_special_tokens_come_as_their_text() -> None:
    assert run([97, 300]) == ["a", "<|endoftext|>", ""]


def test_ids_may_come_alone_in_lists_in_arrays_and_from_generators() -> None:
    stream = StreamDecoder(TOKENIZER)
    given_as = [97, [98, 99], (100,), np.array([101, 102], np.uint32), np.int64(103), (token for token in [104]), []]
    assert [stream.push(group) for group in given_as] == ["a", "bc", "d", "ef", "g", "h", ""]


def test_characters_of_a_character_tokenizer_come_one_by_one() -> None:
    tokenizer = Tokenizer.characters("añ😀")
    assert run(tokenizer.encode("ñ😀a"), tokenizer=tokenizer) == ["ñ", "😀", "a", ""]


# --- stop strings ----------------------------------------------------------------------------------------------------


@given(streams, stops)
@same_every_run(500)
def test_after_each_id_exactly_what_is_certain_is_out(tokens: list[int], stop: list[str]) -> None:
    stream, out = StreamDecoder(TOKENIZER, stop), ""
    for count, token in enumerate(tokens, 1):
        out += stream.push(token)
        assert (out, stream.stopped) == out_so_far(tokens[:count], stop)
    out += stream.finish()
    assert (out, stream.stopped) == before_stop(TOKENIZER.decode(tokens), stop)


@given(st.text("ab", max_size=40), st.lists(st.text("ab", min_size=1, max_size=8), min_size=1, max_size=6))
@same_every_run(500)
def test_stop_strings_that_overlap_one_another_are_found_like_any(text: str, stop: list[str]) -> None:
    stream, out = StreamDecoder(TOKENIZER, stop), ""
    for count in range(len(text)):
        out += stream.push(ord(text[count]))
        assert (out, stream.stopped) == out_so_far(list(text[: count + 1].encode()), stop)


@given(streams, stops, st.lists(st.integers(0, 25), max_size=6))
@same_every_run(300)
def test_grouping_does_not_matter(tokens: list[int], stop: list[str], cuts: list[int]) -> None:
    places = [0, *sorted(cuts), len(tokens)]
    groups = [tokens[start:end] for start, end in itertools.pairwise(places)]
    one, many = StreamDecoder(TOKENIZER, stop), StreamDecoder(TOKENIZER, stop)
    by_one = "".join([*map(one.push, tokens), one.finish()])
    assert ("".join([*map(many.push, groups), many.finish()]), many.stopped) == (by_one, one.stopped)


@pytest.mark.parametrize(
    ("text", "stop", "pieces", "found"),
    [
        ("aaab", ["aab"], ["", "", "a", "", ""], "aab"),
        ("abab!", ["abac"], ["", "", "", "ab", "ab!", ""], None),
        ("xENDy", ["END"], ["x", "", "", "", "", ""], "END"),
        ("abcd", ["bc", "abcd"], ["", "", "a", "", ""], "bc"),  # complete first, though the other began first
        ("abc", ["c", "bc", "abc"], ["", "", "", ""], "abc"),  # complete at once: the one that starts first
        ("abd", ["abc", "b"], ["", "a", "", ""], "b"),
        ("abd", ["abc"], ["", "", "abd", ""], None),
        ("ab", ["abc"], ["", "", "ab"], None),  # the end: it cannot become a stop string any more
        ("a\n\nb", ["\n\n"], ["a", "", "", "", ""], "\n\n"),
        ("[^]-x", ["]-", "^^"], ["[", "", "^", "", "", ""], "]-"),  # characters that mean something to patterns
    ],
)
def test_stop_strings_are_held_back_and_cut_off(
    text: str, stop: list[str], pieces: list[str], found: str | None
) -> None:
    stream = StreamDecoder(TOKENIZER, stop)
    assert [*(stream.push(ord(character)) for character in text), stream.finish()] == pieces
    assert stream.stopped == found


def test_a_stop_string_is_found_across_tokens_and_within_one() -> None:
    across = StreamDecoder(TOKENIZER, ["aé\u0301"])
    assert [across.push(token) for token in (97, 98, 97, 266)] == ["", "ab", "", ""]
    assert across.stopped == "aé\u0301"
    within = StreamDecoder(TOKENIZER, ["N"])
    assert (within.push([97, 264, 98]), within.stopped) == ("aE", "N")


def test_a_stop_string_may_begin_and_end_within_tokens_that_cut_characters() -> None:
    stream = StreamDecoder(TOKENIZER, ["😀a"])
    assert [stream.push(token) for token in (98, 259, 260)] == ["b", "", ""]
    assert stream.stopped == "😀a"


def test_a_stop_string_may_be_completed_by_the_end() -> None:
    stream = StreamDecoder(TOKENIZER, ["a\ufffd"])
    assert [stream.push(98), stream.push([97, 0xF0]), stream.finish()] == ["b", "", ""]
    assert stream.stopped == "a\ufffd"


def test_nothing_comes_behind_a_stop_string() -> None:
    stream = StreamDecoder(TOKENIZER, ["b"])
    assert stream.push([97, 98, 97, 0xC3]) == "a"
    assert [stream.push(97), stream.push([98, 99]), stream.finish(), stream.push(97), stream.finish()] == [""] * 5
    assert stream.stopped == "b"


def test_long_stop_strings_and_many_are_found() -> None:
    length = 2000
    stop = ["a" * length + "b", *(f"{number:05d}" for number in range(length)), "b" * length]
    stream = StreamDecoder(TOKENIZER, stop)
    pieces = [stream.push(97) for _ in range(3 * length)]
    assert pieces == [""] * length + ["a"] * (2 * length)  # never more than the stop string's beginning is held
    assert (stream.push(list(b"c09901999!")), stream.stopped) == ("a" * length + "c099", "01999")


def test_streams_do_not_share_anything() -> None:
    stop = ["ab"]
    first, second = StreamDecoder(TOKENIZER, stop), StreamDecoder(TOKENIZER, stop)
    first.push([97, 98])
    stop.append("c")
    assert [second.push(97), second.push(99), second.stopped] == ["", "ac", None]


# --- refusals --------------------------------------------------------------------------------------------------------


def test_stop_strings_are_strings_of_a_list_and_not_empty() -> None:
    with pytest.raises(TypeError, match=r"got the string 'END'\. Put it into a list\."):
        StreamDecoder(TOKENIZER, "END")
    for wrong in ("", b"END", None, 3):
        with pytest.raises(ValueError, match="at least one character"):
            StreamDecoder(TOKENIZER, ["END", wrong])


def test_a_finished_stream_takes_no_more() -> None:
    stream = StreamDecoder(TOKENIZER, ["ab"])
    assert [stream.push(97), stream.finish(), stream.finish()] == ["", "a", ""]
    with pytest.raises(ValueError, match="finished"):
        stream.push(97)
