"""tokenizer.json: what is written reads back and gives Hugging Face's ids; what would give other ids is refused."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fuselm.text.bpe import Merges, Vocab
from fuselm.text.tokenizer import Tokenizer
from tests.text.file_samples import (
    SPECIALS,
    byte_vocabulary,
    ids_of,
    read,
    samples,
    with_hard_specials,
    write,
)
from tests.text.samples import english, mixture


@pytest.fixture(scope="module")
def tokenizer(vocabulary: tuple[Vocab, Merges]) -> Tokenizer:
    return with_hard_specials(vocabulary)


@pytest.fixture(scope="module")
def document(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return read(tokenizer.save(tmp_path_factory.mktemp("document")))


def hugging_face_ids(path: Path) -> list[list[int]]:
    library = pytest.importorskip("tokenizers")
    loaded = library.Tokenizer.from_file(str(path))
    return [loaded.encode(text).ids for text in samples()]


def test_a_saved_tokenizer_is_the_same_when_loaded(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tokenizer.save(tmp_path / "tokenizer.json")
    assert Tokenizer.load(path).fingerprint == tokenizer.fingerprint
    assert ids_of(Tokenizer.load(path)) == ids_of(tokenizer)


def test_hugging_face_reads_what_is_saved_and_gives_the_same_ids(tokenizer: Tokenizer, tmp_path: Path) -> None:
    assert hugging_face_ids(tokenizer.save(tmp_path / "tokenizer.json")) == ids_of(tokenizer)


def test_hugging_face_decodes_what_it_encoded(tokenizer: Tokenizer, tmp_path: Path) -> None:
    library = pytest.importorskip("tokenizers")
    loaded = library.Tokenizer.from_file(str(tokenizer.save(tmp_path / "tokenizer.json")))
    text = mixture(20_000, seed=4) + "<|endoftext|>"
    assert loaded.decode(tokenizer.encode(text, allowed_special="all"), skip_special_tokens=False) == text


def test_what_hugging_face_writes_is_read(tokenizer: Tokenizer, tmp_path: Path) -> None:
    library = pytest.importorskip("tokenizers")
    library.Tokenizer.from_file(str(tokenizer.save(tmp_path / "ours.json"))).save(str(tmp_path / "theirs.json"))
    assert isinstance(read(tmp_path / "theirs.json")["model"]["merges"][0], list)  # pairs, where we write strings
    assert Tokenizer.load(tmp_path / "theirs.json") == tokenizer


def test_a_tokenizer_trained_by_hugging_face_is_read_with_its_ids(tmp_path: Path) -> None:
    library = pytest.importorskip("tokenizers")
    made = library.Tokenizer(library.models.BPE())
    made.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.post_processor = library.processors.ByteLevel(trim_offsets=True)
    alphabet = library.pre_tokenizers.ByteLevel.alphabet()
    trainer = library.trainers.BpeTrainer(
        vocab_size=700, special_tokens=["<|pad|>", "<|end|>"], initial_alphabet=alphabet
    )
    made.train_from_iterator([english(random.Random(5), 30_000)], trainer)
    made.add_special_tokens(["<|", "\n\n"])  # behind the vocabulary, and listed as added tokens only
    made.save(str(tmp_path / "theirs.json"))
    assert ids_of(Tokenizer.load(tmp_path / "theirs.json")) == hugging_face_ids(tmp_path / "theirs.json")


def test_the_old_layout_of_gpt2s_own_file_is_read(
    tokenizer: Tokenizer, document: dict[str, Any], tmp_path: Path
) -> None:
    model = {key: value for key, value in document["model"].items() if key in ("vocab", "merges")}
    nothing = {"dropout": None, "unk_token": "", "continuing_subword_prefix": "", "end_of_word_suffix": ""}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    old = document | {"model": {**nothing, "fuse_unk": False, **model}, "pre_tokenizer": byte_level}
    old |= {"post_processor": byte_level, "decoder": byte_level}
    old["added_tokens"] = [token | {"normalized": True} for token in document["added_tokens"]]
    path = write(tmp_path / "tokenizer.json", old)
    assert Tokenizer.load(path) == tokenizer
    assert hugging_face_ids(path) == ids_of(tokenizer)


def test_ids_with_gaps_and_specials_among_them_survive(tmp_path: Path) -> None:
    vocab = {2 * token + 5: data for token, data in byte_vocabulary(b"ab", b" the", b"\n\n").items()}
    merges = [(b"a", b"b"), (b"\n", b"\n")]
    tokenizer = Tokenizer(vocab, merges, {"<|end|>": 6, "<|endoftext|>": 3000, "\n\n": 5 + 2 * 258})
    path = tokenizer.save(tmp_path / "tokenizer.json")
    assert Tokenizer.load(path) == tokenizer
    assert hugging_face_ids(path) == ids_of(tokenizer)


def test_a_special_token_may_have_the_bytes_of_an_ordinary_one(tmp_path: Path) -> None:
    tokenizer = Tokenizer(byte_vocabulary(b"\n\n"), [(b"\n", b"\n")], {"\n\n": 300})
    path = tokenizer.save(tmp_path / "tokenizer.json")
    assert Tokenizer.load(path) == tokenizer
    assert Tokenizer.load(path).encode_ordinary("\n\n") == [256]
    assert hugging_face_ids(path) == ids_of(tokenizer)


@pytest.mark.parametrize("unknown", [None, "?", "\ufffd"])
def test_a_character_tokenizer_is_the_same_when_loaded_and_in_hugging_face(unknown: str | None, tmp_path: Path) -> None:
    text = "".join(samples())
    tokenizer = Tokenizer.characters(text, SPECIALS, unknown=unknown)
    path = tokenizer.save(tmp_path / "tokenizer.json")
    loaded = Tokenizer.load(path)
    assert (loaded.fingerprint, loaded.unknown) == (tokenizer.fingerprint, unknown)
    assert hugging_face_ids(path) == ids_of(loaded) == ids_of(tokenizer)
    library = pytest.importorskip("tokenizers").Tokenizer.from_file(str(path))
    assert library.decode(tokenizer.encode_ordinary(text), skip_special_tokens=False) == text


@pytest.mark.parametrize("unknown", [None, "x"])
def test_characters_that_are_not_there_are_treated_alike(unknown: str | None, tmp_path: Path) -> None:
    path = Tokenizer.characters("wxyz", unknown=unknown).save(tmp_path)
    loaded, theirs = Tokenizer.load(path), pytest.importorskip("tokenizers").Tokenizer.from_file(str(path))
    if unknown:
        assert loaded.encode("w?é") == theirs.encode("w?é").ids == [0, 1, 1]
    else:
        with pytest.raises(ValueError, match="knows the characters"):
            loaded.encode("w?")
        with pytest.raises(Exception, match="UNK"):
            theirs.encode("w?")


def change(*path: str, to: object) -> Callable[[dict[str, Any]], None]:
    def apply(document: dict[str, Any]) -> None:
        for key in path[:-1]:
            document = document[key]
        document[path[-1]] = to

    return apply


def added(**options: object) -> Callable[[dict[str, Any]], None]:
    return lambda document: document["added_tokens"][0].update(options)


def add_special_that_spells_other_bytes(document: dict[str, Any]) -> None:
    """Hugging Face would give "né" the id of the bytes n and 0xE9, which are printed as "né"."""
    document["model"]["vocab"]["né"] = 9000
    document["model"]["merges"].append("n é")
    document["added_tokens"].append(document["added_tokens"][0] | {"content": "né", "id": 9000})


LLAMA_3 = {
    "type": "Sequence",
    "pretokenizers": [{"type": "Split", "pattern": {"Regex": "x"}, "behavior": "Isolated", "invert": False}],
}
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
REFUSALS = {
    "a normalizer": (change("normalizer", to={"type": "NFC"}), 'normalizer.*NFC.*Set "normalizer" to null'),
    "truncation": (change("truncation", to={"max_length": 8}), "truncation.*max_length"),
    "padding": (change("padding", to={"strategy": "BatchLongest"}), "padding.*BatchLongest"),
    "a template": (change("post_processor", to={"type": "TemplateProcessing"}), "adds tokens.*TemplateProcessing"),
    "Llama 3's words": (change("pre_tokenizer", to=LLAMA_3), "as GPT-2 does.*Split"),
    "Metaspace": (change("pre_tokenizer", to={"type": "Metaspace"}), "as GPT-2 does.*Metaspace"),
    "no words": (change("pre_tokenizer", to=None), "as GPT-2 does.*null"),
    "a space in front": (change("pre_tokenizer", to=BYTE_LEVEL | {"add_prefix_space": True}), "add_prefix_space"),
    "no pattern": (change("pre_tokenizer", to=BYTE_LEVEL | {"use_regex": False}), "use_regex"),
    "dropout": (change("model", "dropout", to=0.1), "dropout is 0.1"),
    "ignored merges": (change("model", "ignore_merges", to=True), "ignore_merges is true"),
    "a prefix": (change("model", "continuing_subword_prefix", to="##"), "continuing_subword_prefix"),
    "a suffix": (change("model", "end_of_word_suffix", to="</w>"), "end_of_word_suffix"),
    "Unigram": (change("model", "type", to="Unigram"), 'BPE.*"Unigram"'),
    "whole words": (change("model", "type", to="WordLevel"), "each character is a word.*ByteLevel"),
    "another version": (change("version", to="2.0"), '"1.0"; got "2.0"'),
    "no model": (change("model", to=None), 'has an object "model".*give the folder'),
    "no vocabulary": (change("model", "vocab", to=[]), "object of texts and ids"),
    "a byte missing": (lambda document: document["model"]["vocab"].pop("Ā"), "256 bytes"),
    "an id that is text": (change("model", "vocab", "ab", to="7"), """whole number.*'ab' has "7"."""),
    "an id that is a bool": (change("model", "vocab", "ab", to=True), "whole number.*has true"),
    "a negative id": (change("model", "vocab", "ab", to=-1), "whole number.*has -1"),
    "a huge id": (change("model", "vocab", "ab", to=1 << 40), "whole number"),
    "an id twice": (change("model", "vocab", "unheard of", to=70), "stands for one token; 70"),
    "bytes twice": (change("model", "vocab", "\n", to=9000), r"same bytes.*b'\\n'"),
    "half a surrogate pair": (change("model", "vocab", "\ud800", to=9000), "surrogate"),
    "merges of words": (change("model", "merges", to={}), "merges of a BPE model are a list"),
    "a merge of three": (change("model", "merges", to=["a b c"]), 'two tokens.*"a b c"'),
    "a merge of numbers": (change("model", "merges", to=[[1, 2]]), "two tokens"),
    "a merge of nothing": (change("model", "merges", to=[["a", ""]]), "two tokens"),
    "a merge that is not printed": (change("model", "merges", to=[["a", " "]]), "printable alphabet.*' '"),
    "a merge twice": (change("model", "merges", to=["t h", "t h"]), "b't' . b'h' comes twice"),
    "a merge of what is not there": (change("model", "merges", to=["z Ā"]), "different tokenizers"),
    "an added token that is not special": (added(special=False), "special true"),
    "an added token that strips": (added(lstrip=True), "lstrip"),
    "an added word": (added(single_word=True), "single_word"),
    "an added token found later": (added(normalized=True), '"normalized" is the same'),
    "an added token with another id": (added(id=3), r"'<\|endoftext\|>' has the id 3256.*got id 3"),
    "an added token numbered on": (added(content="<|new|>", id=3300), "has the id 3264.*got id 3300"),
    "an added token without text": (added(content=None), '"content"'),
    "an added token that is other bytes": (add_special_that_spells_other_bytes, r"'né' cannot have the id 9000"),
    "added tokens that are none": (change("added_tokens", to=["<|end|>"]), "list of objects"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_file_that_would_give_other_ids_or_is_none_is_refused(
    case: str, document: dict[str, Any], tmp_path: Path
) -> None:
    changed = json.loads(json.dumps(document))
    REFUSALS[case][0](changed)
    path = write(tmp_path / "odd.json", changed)
    with pytest.raises(ValueError, match=REFUSALS[case][1]) as caught:
        Tokenizer.load(path)
    assert str(caught.value).startswith(f"{path}: ")


@pytest.mark.parametrize(
    ("vocab", "merges", "specials", "message"),
    [
        ([b"ab"], [(b"a", b"b")], {"ab": 300}, "'ab' would stand for 256 and for 300"),
        ([b" the"], [], {"Ġthe": 300}, "'Ġthe' would stand for 256 and for 300"),
        ([b"ab", b"ab"], [(b"a", b"b")], {}, "256 and 257 are both b'ab'"),
        ([b"ab"], [(b"a", b"b")] * 2, {}, "comes twice"),
    ],
)
def test_what_a_file_cannot_say_is_not_saved(
    vocab: list[bytes], merges: list[tuple[bytes, bytes]], specials: dict[str, int], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        Tokenizer(byte_vocabulary(*vocab), merges, specials).save(tmp_path)
    assert not list(tmp_path.iterdir())
