"""Training: merges are those of the definition, whatever the threads, the blocks and the order of documents."""

from __future__ import annotations

import random
import re
import warnings
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuselm.text import blocks, bpe, native, reference
from fuselm.text.bpe import Merges, train_bpe
from tests.text.samples import (
    byte_texts,
    code,
    english,
    mixture,
    needs_compiler,
    same_every_run,
    scripts,
    split_at_specials,
    texts,
)

pytestmark = needs_compiler

CORPORA = {
    "english": english(random.Random(1), 6000),
    "scripts": scripts(random.Random(2), 1500),
    "code": code(random.Random(3), 4000),
    "runs": "".join("ab -\n"[i % 5] * (i % 19) for i in range(300)),
    "overlapping pairs": "aaaa aaaaa aaaaaaa abab ababa bababab aabaabaab",
    "ties": " ".join(a + b for a in "abcdefgh" for b in "hgfedcba"),
    "one word": "abcabcbcacab" * 20,
    "long words": " ".join("".join(random.Random(length).choices("abc", k=length)) for length in range(10, 70)),
    "nothing to merge": "a b c 1 ! é",
    "zero bytes": "\0\0 \0\0\0 a\0a\0a",
}
FEW = 120  # merges: the twin in Python looks at every pair for each


def naive_merges(documents: Iterable[bytes], wanted: int) -> Merges:
    """The definition with nothing remembered: count all pairs anew for every merge."""
    counts = Counter(word for document in documents for word in reference.split(document))
    words = {word: [bytes([byte]) for byte in word] for word in counts}
    merges: Merges = []
    while len(merges) < wanted:
        pairs: Counter[tuple[bytes, bytes]] = Counter()
        for word, symbols in words.items():
            for pair in pairwise(symbols):
                pairs[pair] += counts[word]
        if not pairs:
            break
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        merges.append(best)
        for symbols in words.values():
            for i in range(len(symbols)):  # shrinks on the way
                if tuple(symbols[i : i + 2]) == best:
                    symbols[i : i + 2] = [best[0] + best[1]]
    return merges


def train(source: str | Path | Iterable[str | bytes], merges: int, specials: Iterable[str] = (), **options) -> Merges:
    """The merges alone. Small texts give fewer than wanted, which is warned of and not what these tests are about."""
    specials = list(specials)
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        return train_bpe(source, 256 + merges + len(specials), specials, **{"threads": 1, **options})[1]


def by_the_twin(documents: Iterable[str | bytes], merges: int, specials: Iterable[str] = ()) -> Merges:
    trainer = reference.ReferenceTrainer([special.encode() for special in specials])
    for document in documents:
        data = blocks.utf8(document)
        trainer.count(data, [len(data)])
    trainer.merge(merges)
    return vocabulary_of(trainer.merges())


def vocabulary_of(pairs: Iterable[tuple[int, int]]) -> Merges:
    """Pairs of ids as pairs of bytes."""
    tokens = [bytes([byte]) for byte in range(256)]
    merges: Merges = []
    for left, right in pairs:
        merges.append((tokens[left], tokens[right]))
        tokens.append(tokens[left] + tokens[right])
    return merges


# --- the definition --------------------------------------------------------------------------------------------------


def test_textbook_example_gives_the_merges_worked_out_by_hand() -> None:
    documents = ["low"] * 5 + ["lower"] * 2 + ["widest"] * 3 + ["newest"] * 6
    made = "s t, e st, o w, l ow, w est, n e, ne west, w i, wi d, wid est, low e, lowe r"
    expected = [tuple(part.encode() for part in pair.split()) for pair in made.split(", ")]
    assert train(documents, 12) == by_the_twin(documents, 12) == expected


@pytest.mark.parametrize("name", CORPORA)
def test_merges_are_the_twins(name: str) -> None:
    assert train([CORPORA[name]], FEW) == by_the_twin([CORPORA[name]], FEW)


@pytest.mark.parametrize("name", ["overlapping pairs", "ties", "one word", "zero bytes", "nothing to merge"])
def test_merges_of_both_are_those_of_the_definition(name: str) -> None:
    expected = naive_merges([CORPORA[name].encode()], FEW)
    assert train([CORPORA[name]], FEW) == expected
    assert by_the_twin([CORPORA[name]], FEW) == expected


few_letters = st.text(st.sampled_from("aab ab'\n"), min_size=1, max_size=60)


@given(st.lists(few_letters | st.text(st.sampled_from("a"), min_size=1, max_size=30), min_size=1, max_size=6))
@same_every_run(150)
def test_merges_of_few_letters_are_those_of_the_definition(documents: list[str]) -> None:
    expected = naive_merges(map(str.encode, documents), 40)
    assert train(documents, 40) == expected
    assert by_the_twin(documents, 40) == expected


@given(st.lists(byte_texts, min_size=1, max_size=4).filter(any))
@same_every_run(70)
def test_any_bytes_can_be_trained_on(documents: list[bytes]) -> None:
    assert train(documents, 60) == by_the_twin(documents, 60)


def test_ties_go_to_the_pair_whose_byte_strings_are_greatest() -> None:
    assert train(["ab", "é", "zA"], 3) == [(b"\xc3", b"\xa9"), (b"z", b"A"), (b"a", b"b")]
    assert train(["ab", "cd", "ce", "Zz"], 4) == [(b"c", b"e"), (b"c", b"d"), (b"a", b"b"), (b"Z", b"z")]
    # By bytes and not by ids: " t" was made after "h" and is the smaller.
    made = train([" th"] * 2 + [" t"] * 8 + ["he"] * 2, 3)
    assert made == [(b" ", b"t"), (b"h", b"e"), (b" t", b"h")]
    # A string that goes on is greater than its beginning.
    assert train(["ab"] * 5 + ["abz", "az"], 2)[1] == (b"ab", b"z")


def test_more_merges_go_on_where_the_last_ones_stopped() -> None:
    data = CORPORA["english"].encode()
    whole, stepwise = native.NativeTrainer([]), native.NativeTrainer([])
    for trainer in (whole, stepwise):
        trainer.count(data, [len(data)])
    assert stepwise.merges() == []
    assert whole.merge(90) == 90
    assert [stepwise.merge(step) for step in (0, 1, 39, 50)] == [0, 1, 39, 50]
    assert stepwise.merges() == whole.merges()
    assert len(whole.merges()) == 90


# --- vocabularies ----------------------------------------------------------------------------------------------------


def test_vocabulary_has_bytes_then_merges_then_specials() -> None:
    vocab, merges = train_bpe([CORPORA["english"]], 300, ["<|b|>", "<|a|>"])
    assert list(vocab) == list(range(300))
    assert [vocab[i] for i in range(256)] == [bytes([i]) for i in range(256)]
    assert [vocab[256 + i] for i in range(42)] == [left + right for left, right in merges]
    assert [vocab[298], vocab[299]] == [b"<|b|>", b"<|a|>"]
    assert len(set(vocab.values())) == 300


def test_larger_vocabulary_begins_with_the_smaller_one() -> None:
    small, large = train([CORPORA["code"]], 50), train([CORPORA["code"]], 100)
    assert large[:50] == small
    assert len(large) == 100


def test_vocabulary_of_bytes_alone_is_allowed() -> None:
    vocab, merges = train_bpe(["some text"], 257, ["<|x|>"])
    assert merges == []
    assert vocab[256] == b"<|x|>"


def test_vocabulary_too_small_for_bytes_and_specials_is_refused() -> None:
    with pytest.raises(ValueError, match=r"here 257 entries; got vocab_size=256\. Ask for more"):
        train_bpe(["some text"], 256, ["<|x|>"])


def test_text_too_small_for_the_vocabulary_gives_fewer_entries_and_a_warning() -> None:
    with pytest.warns(UserWarning, match=r"gives 2 merges, not 43: the vocabulary has 259 entries instead of 300"):
        vocab, merges = train_bpe(["abc"], 300, ["<|x|>"])
    assert merges == [(b"b", b"c"), (b"a", b"bc")]
    assert vocab[258] == b"<|x|>"
    assert len(vocab) == 259


@pytest.mark.parametrize("documents", [[], [""], ["", b""]])
def test_empty_documents_are_refused(documents) -> None:
    with pytest.raises(ValueError, match=r"is trained on text; .*none"):
        train_bpe(documents, 300)


def test_empty_file_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    with pytest.raises(ValueError, match=r"trained on text; .*empty\.txt has none"):
        train_bpe(tmp_path / "empty.txt", 300)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"missing\.txt"):
        train_bpe(tmp_path / "missing.txt", 300)


@pytest.mark.parametrize(
    ("specials", "error", "words"),
    [
        (["<|a|>", "<|b|>", "<|a|>"], ValueError, r"all different; got b'<\|a\|>' twice"),
        ([""], ValueError, r"at least two bytes long .*; got b''"),
        (["x"], ValueError, r"at least two bytes long .*; got b'x'"),
        ("<|a|>", TypeError, r"list of strings; got the string '<\|a\|>'. Put it into a list"),
    ],
)
def test_specials_that_cannot_be_are_refused(specials, error, words: str) -> None:
    with pytest.raises(error, match=words):
        train_bpe(["some text"], 300, specials)


# --- specials --------------------------------------------------------------------------------------------------------

SPECIAL_SETS = {
    "one": ["<|endoftext|>"],
    "one in another": ["<a>", "<a>b", "x<a>"],
    "spaces inside": ["<| a b |>", " and ", "\n\n"],
    "overlapping": ["aba", "bab", "ba "],
    "not ASCII": ["é", "中文", "«ba»"],
}


@pytest.mark.parametrize("name", SPECIAL_SETS)
def test_text_between_specials_is_what_is_counted(name: str) -> None:
    specials = SPECIAL_SETS[name]
    chooser = random.Random(name)
    parts = [*specials, *specials, "ab ", "aba", " b", "abab", "  ", "é", "x", "'s", "<a", "中 "]
    text = "".join(chooser.choices(parts, k=600))
    between = split_at_specials(text, specials)
    assert len(between) > 50
    expected = naive_merges(map(str.encode, between), 30)
    assert train([text], 30, specials) == expected
    assert by_the_twin([text], 30, specials) == expected


def test_special_is_neither_merged_across_nor_taken_apart() -> None:
    text = "aa<|endoftext|>aa<|endoftext|>" * 50 + "b" * 9
    made = {left + right for left, right in train([text], 100, ["<|endoftext|>"])}
    assert made == {b"aa", b"b" * 2, b"b" * 4, b"b" * 8, b"b" * 9}


# --- blocks, threads, files ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def book() -> str:
    specials = ["<|endoftext|>", " <s p> "]
    return "".join(part + random.Random(i).choice(specials) for i, part in enumerate(mixture(15_000).split("\n")))


@pytest.fixture(scope="module")
def book_merges(book: str, library_in_a_cache_of_its_own: None) -> Merges:
    return train([book], 400, ["<|endoftext|>", " <s p> "])


@pytest.mark.parametrize(("size", "threads"), [(1, 1), (17, 2), (60, 8), (60, 1), (1000, 1), (1000, 2), (1000, 8)])
def test_neither_blocks_nor_threads_change_the_merges(book, book_merges, tmp_path, set_block_size, size, threads):
    path = tmp_path / "book.txt"
    path.write_bytes(book.encode())
    set_block_size(size)
    assert train(path, 400, ["<|endoftext|>", " <s p> "], threads=threads) == book_merges
    assert train(str(path), 400, ["<|endoftext|>", " <s p> "], threads=threads) == book_merges


@pytest.mark.parametrize("threads", [1, 2, 8])
def test_order_and_grouping_of_documents_do_not_change_the_merges(set_block_size, threads: int) -> None:
    documents = re.split(r"(?<=\n)", CORPORA["english"])
    expected = train(documents, FEW)
    set_block_size(100)
    assert train(sorted(documents), FEW, threads=threads) == expected
    assert train((document.encode() for document in documents), FEW, threads=threads) == expected


def test_no_word_crosses_from_one_document_to_the_next() -> None:
    assert train(["ab", "ab", "", "a", "b", "a"], 10) == [(b"a", b"b")]
    assert train(["don", "'t"] * 5, 10) == by_the_twin(["don"] * 5 + ["'t"] * 5, 10)


def test_lone_surrogate_counts_as_the_replacement_character() -> None:
    assert train(["a\ud800b"] * 3, 10) == train(["a\ufffdb"] * 3, 10)


@given(st.lists(texts, min_size=1, max_size=3).filter(any), st.sampled_from([1, 5, 30]))
@same_every_run(50)
def test_file_of_any_text_in_any_blocks_trains_as_one_document(tmp_path, set_block_size, documents, size) -> None:
    path = tmp_path / "text"
    path.write_bytes("".join(documents).encode())
    set_block_size(1 << 19)
    expected = train(["".join(documents)], 30, ["<a>", "a  "])
    set_block_size(size)
    assert train(path, 30, ["<a>", "a  "]) == expected


def test_progress_tells_bytes_read_and_merges_made(tmp_path: Path, set_block_size) -> None:
    path = tmp_path / "text"
    path.write_text(CORPORA["english"])
    size = path.stat().st_size
    set_block_size(1000)
    heard: list[tuple[str, int, int | None]] = []
    train_bpe(path, 256 + 450, on_progress=lambda *progress: heard.append(progress), threads=1)
    counted = [progress for progress in heard if progress[0] == "count"]
    assert len(counted) >= 5
    assert counted[-1] == ("count", size, size)
    assert [done for _, done, _ in counted] == sorted({done for _, done, _ in counted})
    step = bpe.MERGES_PER_CALL
    assert heard[len(counted) :] == [("merge", min(450, made), 450) for made in range(step, 450 + step, step)]
    heard.clear()
    train_bpe(iter([CORPORA["english"]]), 256, on_progress=lambda *progress: heard.append(progress))
    assert heard == [("count", size, None)]


def test_number_of_threads_is_at_least_one() -> None:
    with pytest.raises(ValueError, match=r"1 to 1024, .*; got 0"):
        train_bpe(["some text"], 256, threads=0)


class Hoard(list):
    """Counters that are given back and not lent again before counting is over: as if every call had its own thread."""

    counting = True

    def pop(self, *place):
        if self.counting:
            raise IndexError
        return super().pop(*place)


def test_counts_of_many_counters_and_of_growing_tables_are_added_up() -> None:
    # 12,000 different words, more than a table starts with room for, in parts that share most of them.
    words = [f" w{i:x}" + "y" * (i % 3) * 6 for i in range(12_000)]
    often = " zq" * 9000  # and one that is counted often before the tables grow
    parts = [(often + "".join(words[start : start + 7000])).encode() for start in (0, 1000, 5000)]
    trainer, twin = native.NativeTrainer([]), reference.ReferenceTrainer([])
    trainer._idle = counters = Hoard()
    for part in parts:
        trainer.count(part, [len(part)])
        twin.count(part, [len(part)])
    assert len(counters) == 3
    counters.counting = False
    assert (trainer.merge(4), twin.merge(4)) == (4, 4)
    assert trainer.merges() == twin.merges()


@pytest.mark.parametrize("name", ["text.txt.gz", "TEXT.GZ", "lines.jsonl", "folder"])
def test_what_is_no_plain_text_file_is_refused_with_the_way_to_read_it(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match=r"one file of plain text; .*open_corpus"):
        train_bpe(tmp_path / name, 300)
