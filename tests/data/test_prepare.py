"""A corpus and a tokenizer into a folder: what is in it, that threads do not matter, that nothing is half there."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fuselm.data.corpora import CorpusError, open_corpus
from fuselm.data.prepare import character_tokenizer, open_prepared, prepare, train_tokenizer
from fuselm.data.shards import ShardError
from fuselm.text import blocks, bpe, tokenizer
from fuselm.text.tokenizer import Tokenizer

COLOURS = ("red", "green", "blue")
DOCUMENTS = [f"Story {i}: the {COLOURS[i % 3]} box has {i * 7} marbles.\n\nThe end." for i in range(200)]


@pytest.fixture
def corpus_file(tmp_path: Path) -> Path:
    path = tmp_path / "stories.txt"
    path.write_text("\n<|endoftext|>\n".join(DOCUMENTS) + "\n<|endoftext|>\n")
    return path


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks so small that there are many of them in a small text."""
    for module in (blocks, bpe, tokenizer):
        monkeypatch.setattr(module, "BLOCK_BYTES", 300)


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_prepared_folder_has_every_document_once_in_its_split(corpus_file: Path, tmp_path: Path) -> None:
    corpus = open_corpus(corpus_file)
    shards = prepare(corpus, train_tokenizer(corpus, 400), tmp_path / "out")
    words = Tokenizer.load(tmp_path / "out")
    found = {}
    for split, shard in shards.items():
        ends = [*shard.documents[1:], len(shard)]
        ids = [shard.tokens[a:b] for a, b in zip(shard.documents, ends, strict=True)]
        assert all(row[-1] == words.end_of_text for row in ids)
        found[split] = [words.decode(row[:-1]) for row in ids]
    assert found["valid"] == DOCUMENTS[19::20]
    assert found["train"] == [text for i, text in enumerate(DOCUMENTS) if i % 20 != 19]
    assert shards["train"].header.source == {"corpus": "stories.txt", "split": "train"}


@pytest.mark.usefixtures("small_blocks")
def test_files_are_the_same_bytes_for_any_number_of_threads(corpus_file: Path, tmp_path: Path) -> None:
    made = set()
    for threads in (1, 2, 8):
        corpus, out = open_corpus(corpus_file), tmp_path / f"out{threads}"
        prepare(corpus, train_tokenizer(corpus, 400, threads=threads), out, threads=threads)
        made.add(tuple(digest(out / name) for name in ("train.tokens", "valid.tokens", "tokenizer.json")))
    assert len(made) == 1


def test_a_failure_leaves_the_old_files(corpus_file: Path, tmp_path: Path) -> None:
    corpus, out = open_corpus(corpus_file), tmp_path / "out"
    prepare(corpus, train_tokenizer(corpus, 300), out)
    before = {path.name: digest(path) for path in out.iterdir()}
    alphabet = Tokenizer.characters("abc", ["<|endoftext|>"])
    with pytest.raises(ValueError, match="knows the characters it was made of"):
        prepare(corpus, alphabet, out)
    assert {path.name: digest(path) for path in out.iterdir()} == before


def test_characters_of_a_single_text_need_no_separator(tmp_path: Path) -> None:
    path = tmp_path / "one.txt"
    path.write_text("to be or not to be\n" * 50)
    corpus = open_corpus(path)
    words = character_tokenizer(corpus)
    assert (words.vocab_size, words.special_tokens) == (len(set(path.read_text())), {})
    shards = prepare(corpus, words, tmp_path / "out")
    text = "".join(words.decode(shards[split].tokens) for split in ("train", "valid"))
    assert text == path.read_text()
    assert len(shards["train"].documents) == 1


def test_several_documents_without_a_separator_are_refused(corpus_file: Path, tmp_path: Path) -> None:
    corpus = open_corpus(corpus_file)
    bare = Tokenizer.characters(corpus_file.read_text())
    with pytest.raises(CorpusError, match="kept apart by the special token"):
        prepare(corpus, bare, tmp_path / "out")
    assert character_tokenizer(corpus).special_tokens  # which is why this one has it


def test_files_that_were_not_made_together_are_refused(corpus_file: Path, tmp_path: Path) -> None:
    corpus, out, other = open_corpus(corpus_file), tmp_path / "out", tmp_path / "other"
    words = train_tokenizer(corpus, 300)
    prepare(corpus, words, out)
    prepare(open_corpus("stories", limit_bytes=3000), words, other)
    (other / "valid.tokens").replace(out / "valid.tokens")  # as if killed between two renames
    with pytest.raises(ShardError, match="made together"):
        open_prepared(out)
    (out / "prepared.json").write_text("{")
    with pytest.raises(ShardError, match="is not JSON"):
        open_prepared(out)


def test_a_document_that_contains_the_separator_is_several(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text('{"text": "one<|endoftext|>two"}\n' * 40)
    corpus = open_corpus(path)
    shards = prepare(corpus, train_tokenizer(corpus, 260), tmp_path / "out")
    assert len(shards["train"].documents) == 2 * 38


def test_a_folder_with_another_tokenizer_is_refused(corpus_file: Path, tmp_path: Path) -> None:
    corpus, out = open_corpus(corpus_file), tmp_path / "out"
    prepare(corpus, train_tokenizer(corpus, 300), out)
    train_tokenizer(corpus, 310).save(out / "tokenizer.json")
    with pytest.raises(ShardError, match="tokenizer"):
        open_prepared(out)


def test_other_specials_in_the_text_are_text(tmp_path: Path) -> None:
    path = tmp_path / "talk.txt"
    path.write_text("<|user|>hello there\n<|endoftext|>\n" * 40)
    corpus = open_corpus(path)
    words = train_tokenizer(corpus, 262, ["<|user|>"])
    shards = prepare(corpus, words, tmp_path / "out")
    assert words.special_tokens["<|user|>"] not in np.asarray(shards["train"].tokens)
    assert words.decode(shards["train"].tokens).startswith("<|user|>hello there<|endoftext|>")


PREPARING = """
import sys
from pathlib import Path
from fuselm.data.corpora import open_corpus
from fuselm.data.prepare import prepare
from fuselm.text.tokenizer import Tokenizer
folder = Path(sys.argv[1])
def slow(split, done, total):
    print("working", flush=True)
prepare(open_corpus("stories", limit_bytes=400_000_000), Tokenizer.load(folder), folder, on_progress=slow)
"""


def test_a_killed_run_leaves_the_old_files_and_the_next_one_sweeps_up(corpus_file: Path, tmp_path: Path) -> None:
    corpus, out = open_corpus(corpus_file), tmp_path / "out"
    words = train_tokenizer(corpus, 300)
    prepare(corpus, words, out)
    before = {path.name: digest(path) for path in out.iterdir()}
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", PREPARING, str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "working\n"
        process.send_signal(signal.SIGKILL)
    partials = {path.name for path in out.iterdir()} - set(before)
    assert partials, "the run was to be killed while it wrote"
    assert {name: digest(out / name) for name in before} == before
    assert set(open_prepared(out)) == {"train", "valid"}
    prepare(corpus, words, out)
    assert {path.name for path in out.iterdir()} == set(before)
