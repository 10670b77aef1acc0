"""The three classes are those of tiktoken and of tokenizers, on every code point."""

from __future__ import annotations

import numpy as np
import pytest

from fuselm.text.unicode import LETTER, LETTERS, NUMBER, NUMBERS, OTHER, SPACE, SPACES, class_table, parse

CLASSES = [(LETTER, LETTERS, "LETTERS"), (NUMBER, NUMBERS, "NUMBERS"), (SPACE, SPACES, "SPACES")]
each_class = pytest.mark.parametrize(("value", "name"), [(value, name) for value, _, name in CLASSES])


def members(value: int) -> set[str]:
    return set(map(chr, np.flatnonzero(np.frombuffer(class_table(), np.uint8) == value).tolist()))


@each_class
def test_class_is_tiktokens(value: int, name: str) -> None:
    pytest.importorskip("tiktoken")
    pytest.importorskip("tokenizers")
    from tests.text.unicode_classes import PROPERTIES, of_tiktoken, ranges

    assert ranges(members(value)) == ranges(of_tiktoken(PROPERTIES[name]))


@each_class
def test_class_is_that_of_tokenizers(value: int, name: str) -> None:
    pytest.importorskip("tiktoken")
    tokenizers = pytest.importorskip("tokenizers")
    from tests.text.unicode_classes import EVERYTHING, PROPERTIES, ranges

    # What is left when the class is replaced by nothing: ten times as quick as splitting at every character.
    others = tokenizers.normalizers.Replace(tokenizers.Regex(PROPERTIES[name]), "").normalize_str(EVERYTHING)
    codes = np.frombuffer(EVERYTHING.encode("utf-32-le"), np.uint32)
    taken = np.setdiff1d(codes, np.frombuffer(others.encode("utf-32-le"), np.uint32), assume_unique=True)
    assert ranges(members(value)) == ranges(set(map(chr, taken.tolist())))


def test_no_character_is_in_two_classes_and_ranges_rise_with_gaps_between_them() -> None:
    for _, text, _ in CLASSES:
        places = [place for pair in parse(text) for place in pair]
        assert places == sorted(places)
        assert all(after > before + 1 for before, after in zip(places[1::2], places[2::2], strict=False))
    sizes = [sum(last + 1 - first for first, last in parse(text)) for _, text, _ in CLASSES]
    assert [class_table().count(value) for value, _, _ in CLASSES] == sizes


def test_table_has_every_code_point_and_surrogates_are_of_no_class() -> None:
    table = class_table()
    assert len(table) == 0x110000
    assert set(table[0xD800:0xE000]) == {OTHER}
    assert [table[ord(c)] for c in "aZ0 \n_'é中½\u0301😀\u200b\u00a0"] == [
        *(LETTER, LETTER, NUMBER, SPACE, SPACE, OTHER, OTHER),
        *(LETTER, LETTER, NUMBER, OTHER, OTHER, OTHER, SPACE),
    ]
