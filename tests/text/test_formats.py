"""Tokenizers in files: where they are looked for, GPT-2's pair, tiktoken's ranks; and what is said of broken ones."""

from __future__ import annotations

import base64
import random
from itertools import pairwise
from pathlib import Path

import pytest

from fuselm.text import formats
from fuselm.text.bpe import Merges, Vocab
from fuselm.text.tokenizer import Tokenizer
from tests.text.file_samples import (
    FIRST_SPECIAL,
    SPECIALS,
    byte_vocabulary,
    read,
    samples,
    with_hard_specials,
    write,
)
from tests.text.samples import GPT2_PATTERN, mixture


@pytest.fixture(scope="module")
def tokenizer(vocabulary: tuple[Vocab, Merges]) -> Tokenizer:
    return with_hard_specials(vocabulary)


# --- where files are -------------------------------------------------------------------------------------------------


def test_a_tokenizer_is_saved_to_a_file_or_into_a_folder(tmp_path: Path) -> None:
    tokenizer = Tokenizer.characters("ab")
    (tmp_path / "v1.2").mkdir()
    assert tokenizer.save(tmp_path / "a" / "b" / "mine.json") == tmp_path / "a" / "b" / "mine.json"
    assert tokenizer.save(str(tmp_path / "new" / "run")) == tmp_path / "new" / "run" / "tokenizer.json"
    assert tokenizer.save(tmp_path / "v1.2") == tmp_path / "v1.2" / "tokenizer.json"
    assert [path.name for path in (tmp_path / "v1.2").iterdir()] == ["tokenizer.json"]
    for place in ("a/b/mine.json", "new/run", "v1.2"):
        assert Tokenizer.load(tmp_path / place) == tokenizer
    with pytest.raises(ValueError, match=r"ending in \.json"):
        tokenizer.save(tmp_path / "mine.txt")


def test_loading_says_what_it_looked_for(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json or vocab\.json with merges\.txt or encoder\.json"):
        Tokenizer.load(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"there is none at .*absent"):
        Tokenizer.load(tmp_path / "absent.json")
    (tmp_path / "merges.txt").write_text("")
    with pytest.raises(ValueError, match=r"\.tiktoken file, or a folder"):
        Tokenizer.load(tmp_path / "merges.txt")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "JSON"),
        (b'{"model":', "Is the file whole"),
        (b"[" * 100_000, "JSON"),
        (b"[1, 2]", "JSON object"),
        (b"\xff\xfe{", "UTF-8 text; byte 0"),
        (b'{"a": 1' + b"0" * 5000 + b"}", "JSON"),
        (b'{"model": {"vocab": {"a": 1, "a": 2}}}', "'a' comes twice"),
    ],
)
def test_a_broken_json_file_is_told_in_words(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        Tokenizer.load(tmp_path)


def test_a_file_of_absurd_size_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(formats.MAX_FILE_BYTES + 1)
    with pytest.raises(ValueError, match="at most"):
        Tokenizer.load(tmp_path)


# --- GPT-2's files ---------------------------------------------------------------------------------------------------


def test_gpt2s_files_carry_a_whole_tokenizer(tokenizer: Tokenizer, tmp_path: Path) -> None:
    formats.write_gpt2(tokenizer, tmp_path / "gpt2")
    assert sorted(path.name for path in (tmp_path / "gpt2").iterdir()) == ["merges.txt", "vocab.json"]
    assert Tokenizer.load(tmp_path / "gpt2") == tokenizer
    (tmp_path / "gpt2" / "vocab.json").rename(tmp_path / "gpt2" / "encoder.json")
    (tmp_path / "gpt2" / "merges.txt").rename(tmp_path / "gpt2" / "vocab.bpe")
    assert Tokenizer.load(tmp_path / "gpt2") == tokenizer


def test_hugging_face_reads_gpt2s_files_as_we_write_them(tokenizer: Tokenizer, tmp_path: Path) -> None:
    library = pytest.importorskip("tokenizers")
    formats.write_gpt2(tokenizer, tmp_path)
    theirs = library.Tokenizer(library.models.BPE.from_file(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt")))
    theirs.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    text = mixture(20_000, seed=4)
    assert theirs.encode(text).ids == tokenizer.encode_ordinary(text)


def gpt2_files(folder: Path, tokens: dict[str, int], merges: str) -> tuple[Path, Path]:
    base = read(Tokenizer(byte_vocabulary(), []).save(folder / "base.json"))["model"]["vocab"]
    (folder / "merges.txt").write_bytes(merges.encode())
    return write(folder / "vocab.json", base | tokens), folder / "merges.txt"


@pytest.mark.parametrize("merges", ["#version: 0.2\n# #\na b\n", "# #\na b", "#version: 0.2\r\n# #\r\na b\r\n"])
def test_merges_may_begin_with_a_hash_and_end_in_any_way(merges: str, tmp_path: Path) -> None:
    tokenizer = formats.read_gpt2(*gpt2_files(tmp_path, {"##": 256, "ab": 257}, merges))
    assert tokenizer.merges == [(b"#", b"#"), (b"a", b"b")]


def test_special_tokens_of_gpt2s_files_are_what_no_merge_makes(tmp_path: Path) -> None:
    tokens = {"ab": 256, "<|endoftext|>": 257, "[PAD]": 260, "né ": 259}
    files = gpt2_files(tmp_path, tokens, "a b\n")
    assert formats.read_gpt2(*files).special_tokens == {"<|endoftext|>": 257, "[PAD]": 260, "né ": 259}
    more = formats.read_gpt2(*files, special_tokens=["<|new|>", "ab"]).special_tokens
    assert (more["<|new|>"], more["ab"], more["[PAD]"]) == (261, 256, 260)


def test_a_special_token_that_looks_like_hidden_bytes_has_to_be_named(tmp_path: Path) -> None:
    files = gpt2_files(tmp_path, {"ĠĠ": 256}, "")
    with pytest.raises(ValueError, match="name it in special_tokens"):
        formats.read_gpt2(*files)
    assert formats.read_gpt2(*files, special_tokens=["ĠĠ"]).encode("ĠĠ", allowed_special="all") == [256]


def test_end_of_text_is_special_in_gpt2s_files_even_if_merges_make_it(tmp_path: Path) -> None:
    steps = ["<|", "<|endoftext|>"[:3], *("<|endoftext|>"[:end] for end in range(4, 14))]
    merges = "".join(f"{step[:-1]} {step[-1]}\n" for step in steps)
    tokens = {step: 256 + i for i, step in enumerate(steps)}
    assert formats.read_gpt2(*gpt2_files(tmp_path, tokens, merges)).special_tokens == {"<|endoftext|>": 267}


@pytest.mark.parametrize(
    ("tokens", "merges", "message"),
    [
        ({"Ġt": 256, "Ġth": 257}, "Ġ t\n", "'Ġth' is made by no merge.*merges.txt.*special_tokens"),
        ({"ab": 256}, "a b\nb c\n", "vocab.json: .*b'bc' of the merge"),
        ({"ab": 256}, "a b\na\n", "merges.txt: line 2: .*two tokens"),
        ({"ab": 256}, "#version: 0.2\n\na b\n", "line 2: .*two tokens"),
        ({"ab": 256}, "a b\na b\n", "comes twice"),
        ({"ab": 256, "cd": 256}, "a b\nc d\n", "one token; 256"),
        ({"ab": "x"}, "a b\n", "whole number"),
    ],
)
def test_gpt2s_files_that_do_not_fit_together_are_refused(
    tokens: dict[str, int], merges: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        formats.read_gpt2(*gpt2_files(tmp_path, tokens, merges))


@pytest.mark.parametrize(
    ("vocab", "merges", "specials", "lost"),
    [
        ([b"ab"], [(b"a", b"b")], ["ab"], "ab"),  # made by a merge too, so nothing shows that it is special
        ([b"ab"], [], [], "ab"),  # made by no merge, so it would be special
        ([], [], ["ĠĠ"], "ĠĠ"),  # looks like two spaces
    ],
)
def test_gpt2s_files_are_not_written_when_they_would_read_back_otherwise(
    vocab: list[bytes], merges: list[tuple[bytes, bytes]], specials: list[str], lost: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=f"whether '{lost}' is one. Save a tokenizer.json"):
        formats.write_gpt2(Tokenizer(byte_vocabulary(*vocab), merges, specials), tmp_path / "files")
    assert not (tmp_path / "files").exists()


# --- tiktoken's ranks ------------------------------------------------------------------------------------------------


def ranks_file(folder: Path, *more: bytes) -> Path:
    path = folder / "ranks.tiktoken"
    tokens = byte_vocabulary(*more).items()
    path.write_text("".join(f"{base64.b64encode(data).decode()} {rank}\n" for rank, data in tokens))
    return path


def test_tiktoken_reads_the_ranks_and_gives_the_same_ids(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiktoken, loader = pytest.importorskip("tiktoken"), pytest.importorskip("tiktoken.load")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")  # no copy of the file anywhere
    path = formats.write_tiktoken(tokenizer, tmp_path / "new" / "ranks.tiktoken")
    ranks = loader.load_tiktoken_bpe(str(path))
    # Of specials that contain one another tiktoken takes any; so none that do.
    specials = {name: tokenizer.special_tokens[name] for name in ["<|", "of text", "†é", "\n\n\n"]}
    theirs = tiktoken.Encoding("x", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens=specials)
    ours = formats.read_tiktoken(path, specials)
    for text in samples():
        assert ours.encode(text, allowed_special="all") == theirs.encode(text, allowed_special="all")


def test_ranks_and_special_tokens_make_the_whole_tokenizer(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = formats.write_tiktoken(tokenizer, tmp_path / "ranks.tiktoken")
    assert formats.read_tiktoken(path, tokenizer.special_tokens) == tokenizer
    assert formats.read_tiktoken(path, SPECIALS) == tokenizer
    assert Tokenizer.load(path).special_tokens == {"<|endoftext|>": FIRST_SPECIAL}


def test_special_tokens_take_the_gaps_that_ranks_leave(tmp_path: Path) -> None:
    vocab = {token + (token >= 256): data for token, data in byte_vocabulary(b"ab", b"abab").items()}
    tokenizer = Tokenizer(vocab, [(b"a", b"b"), (b"ab", b"ab")], {"<|endoftext|>": 256, "<|end|>": 259})
    path = formats.write_tiktoken(tokenizer, tmp_path / "ranks.tiktoken")
    assert formats.read_tiktoken(path, ["<|endoftext|>", "<|end|>"]) == tokenizer
    assert formats.read_tiktoken(path, ["abab"]).special_tokens == {"abab": 258}
    with pytest.raises(TypeError, match="Put it into a list"):
        formats.read_tiktoken(path, "<|end|>")


def random_ranks(chooser: random.Random) -> dict[bytes, int]:
    """Tokens made of others, in any order: parts may have higher ranks than what they make, and some are never made."""
    tokens = list(byte_vocabulary().values())
    few = [b"a", b"b"]
    for _ in range(chooser.randint(1, 16)):
        few.append(chooser.choice(few) + chooser.choice(few))
    order = sorted({*tokens, *few})
    chooser.shuffle(order)
    return {token: rank for rank, token in enumerate(order)}


def merges_reach_all(ranks: dict[bytes, int]) -> bool:
    """Whether joining neighbours of lowest rank makes each token out of its bytes, slowly."""
    for token in ranks:
        parts = [bytes([byte]) for byte in token]
        while found := [(ranks[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in ranks]:
            place = min(found)[1]
            parts[place : place + 2] = [parts[place] + parts[place + 1]]
        if parts != [token]:
            return False
    return True


def test_merges_are_found_for_all_ranks_that_merging_can_reach(tmp_path: Path) -> None:
    tiktoken = pytest.importorskip("tiktoken")
    chooser, path, counts = random.Random(11), tmp_path / "ranks.tiktoken", [0, 0]
    for _ in range(60):
        ranks = random_ranks(chooser)
        path.write_text("".join(f"{base64.b64encode(data).decode()} {rank}\n" for data, rank in ranks.items()))
        reached = merges_reach_all(ranks)
        counts[reached] += 1
        if not reached:
            with pytest.raises(ValueError, match="merging ends at"):
                formats.read_tiktoken(path)
            continue
        ours = formats.read_tiktoken(path)
        theirs = tiktoken.Encoding("x", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens={})
        for _ in range(20):
            text = "".join(chooser.choices("ab", k=chooser.randint(1, 30)))
            assert ours.encode(text) == theirs.encode(text)
    assert min(counts) > 5


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("YWI=\n", "line 257: a line is a token in base64"),
        ("YWI= 256 1\n", "line 257"),
        ("YWI= -1\n", "line 257"),
        ("YWI= 99999999999\n", "line 257"),
        ("?!?! 256\n", "line 257"),
        ("YWI= 256\nYWI= 257\n", "line 258: .*b'ab'"),
        ("YWI= 7\n", "line 257: .*has come before"),
        ("YWJj 256\n", r"b'abc' of rank 256 is not, as merging ends at b'a' \+ b'b' \+ b'c'"),
        ("Lgo= 256\n", r"b'\.\\n' is in none of them.*another way to split"),
        ("YWI= 999999999\n", "ids are from 0 to 4194303"),
    ],
)
def test_ranks_that_cannot_be_are_refused(lines: str, message: str, tmp_path: Path) -> None:
    path = ranks_file(tmp_path)
    path.write_text(path.read_text() + lines)
    with pytest.raises(ValueError, match=message) as caught:
        formats.read_tiktoken(path)
    assert str(caught.value).startswith(f"{path}: ")


@pytest.mark.parametrize(
    ("vocab", "merges"),
    [
        ([b"bc", b"ab"], [(b"a", b"b"), (b"b", b"c")]),  # the ids are in another order
        ([b"ab", b"bc", b"abc"], [(b"a", b"b"), (b"b", b"c"), (b"a", b"bc")]),  # ab comes first, so c is added to it
        ([b"ab", b"bc", b"abc"], [(b"a", b"b"), (b"b", b"c"), (b"ab", b"c"), (b"a", b"bc")]),  # two ways to abc
        ([b"ab"], []),  # ranks would make it
    ],
)
def test_ranks_are_not_written_when_ids_are_not_in_the_order_of_merges(
    vocab: list[bytes], merges: list[tuple[bytes, bytes]], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"would read back as .* Save a tokenizer\.json"):
        formats.write_tiktoken(Tokenizer(byte_vocabulary(*vocab), merges), tmp_path / "ranks.tiktoken")
    assert not list(tmp_path.iterdir())


def test_only_byte_level_tokenizers_fit_gpt2s_and_tiktokens_files(tmp_path: Path) -> None:
    tokenizer = Tokenizer.characters("ab")
    with pytest.raises(ValueError, match=r"one of characters. Save a tokenizer\.json"):
        formats.write_gpt2(tokenizer, tmp_path / "files")
    with pytest.raises(ValueError, match=r"one of characters. Save a tokenizer\.json"):
        formats.write_tiktoken(tokenizer, tmp_path / "ranks.tiktoken")
    with pytest.raises(ValueError, match=r"its ending, \.tiktoken"):
        formats.write_tiktoken(Tokenizer(byte_vocabulary(), []), tmp_path / "ranks.txt")
    assert not list(tmp_path.iterdir())
