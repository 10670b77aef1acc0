"""`fuselm tokenizer` and `fuselm data`: what they print and write, their JSON, their refusals and exit codes."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from fuselm.cli import app

TEXT = "Once upon a time there was a little red hen. She lived by the sea, and she sang: 'I'll find it!'\n" * 60


def fuselm(*arguments: str | Path, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "hen.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def trained(corpus: Path, tmp_path: Path) -> Path:
    path = tmp_path / "tokenizer.json"
    result = fuselm("tokenizer", "train", corpus, "--vocab-size", "300", "--out", path)
    assert result.exit_code == 0, result.output
    return path


def test_train_writes_a_tokenizer_and_says_so(corpus: Path, tmp_path: Path) -> None:
    options = ("--vocab-size", "300", "--special", "<|user|>", "--out", tmp_path / "t.json")
    result = fuselm("tokenizer", "train", corpus, *options)
    assert result.exit_code == 0, result.output
    assert "byte-level BPE, 300 tokens, 2 of them special" in result.stdout
    answer = json.loads(fuselm("tokenizer", "train", corpus, *options, "--overwrite", "--json").stdout)
    assert (answer["vocab_size"], answer["merges"]) == (300, 300 - 256 - 2)
    assert answer["special_tokens"] == {"<|endoftext|>": 298, "<|user|>": 299}


@pytest.mark.parametrize("named", [True, False])
def test_train_replaces_no_tokenizer_unless_it_is_told_to(
    named: bool, corpus: Path, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = trained.read_bytes()
    command = ("tokenizer", "train", corpus, "--characters", *(("--out", tmp_path) if named else ()))
    refused = fuselm(*command)
    assert refused.exit_code == 1
    assert "tokenizer.json is. Name another with --out, or give --overwrite" in refused.stderr
    assert trained.read_bytes() == before
    assert fuselm(*command, "--overwrite").exit_code == 0
    assert trained.read_bytes() != before


def test_encode_and_decode_are_inverse_by_argument_stdin_and_file(trained: Path, corpus: Path, tmp_path: Path) -> None:
    ids = fuselm("tokenizer", "encode", trained, "a little red hen").stdout
    assert fuselm("tokenizer", "decode", trained, stdin=ids).stdout == "a little red hen"
    assert fuselm("tokenizer", "decode", trained, *ids.split()).stdout == "a little red hen"
    assert fuselm("tokenizer", "encode", trained, stdin="a little red hen").stdout == ids
    result = fuselm("tokenizer", "encode", trained, "--file", corpus, "--out", tmp_path / "ids.npy")
    assert result.exit_code == 0, result.output
    assert np.load(tmp_path / "ids.npy").dtype == np.uint16
    assert fuselm("tokenizer", "decode", trained, "--file", tmp_path / "ids.npy").stdout == TEXT
    answer = json.loads(fuselm("tokenizer", "encode", trained, "a hen", "--json").stdout)
    assert answer["count"] == len(answer["ids"])
    assert json.loads(fuselm("tokenizer", "decode", trained, *map(str, answer["ids"]), "--json").stdout) == {
        "text": "a hen"
    }


def test_special_tokens_are_refused_allowed_or_text(trained: Path) -> None:
    text = "end<|endoftext|>"
    refused = fuselm("tokenizer", "encode", trained, text)
    assert refused.exit_code == 1
    assert "special token '<|endoftext|>'" in refused.stderr
    assert "--special allow" in refused.stderr
    assert fuselm("tokenizer", "encode", trained, text, "--special", "allow").stdout.split()[-1] == "299"
    assert "299" not in fuselm("tokenizer", "encode", trained, text, "--special", "text").stdout.split()


def test_a_refusal_names_the_whole_special_token(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "t.json"
    fuselm("tokenizer", "train", corpus, "--vocab-size", "300", "--special", "<|Dr. No|>", "--out", out)
    refused = fuselm("tokenizer", "encode", out, "<|Dr. No|>")
    assert refused.exit_code == 1
    assert "special token '<|Dr. No|>', which is refused" in refused.stderr


def test_show_says_what_it_is_and_how_a_text_is_cut(trained: Path) -> None:
    assert "special: 299 <|endoftext|>" in fuselm("tokenizer", "show", trained).stdout
    answer = json.loads(fuselm("tokenizer", "show", trained, "the hen", "--json").stdout)
    assert "".join(token["text"] for token in answer["tokens"]) == "the hen"
    assert answer["kind"] == "bpe"
    parts = json.loads(fuselm("tokenizer", "show", trained, "é", "--json").stdout)["tokens"]
    assert b"".join(bytes.fromhex(token["bytes"]) for token in parts) == "é".encode()
    assert r"b'\xc3'" in fuselm("tokenizer", "show", trained, "é").stdout  # half a character


@pytest.mark.parametrize(("to", "name"), [("json", "copy.json"), ("gpt2", "folder"), ("tiktoken", "ranks.tiktoken")])
def test_convert_keeps_the_ids(to: str, name: str, trained: Path, tmp_path: Path) -> None:
    result = fuselm("tokenizer", "convert", trained, "--to", to, "--out", tmp_path / name)
    assert result.exit_code == 0, result.output
    sample = "She lived by the sea."
    assert (
        fuselm("tokenizer", "encode", tmp_path / name, sample).stdout
        == fuselm("tokenizer", "encode", trained, sample).stdout
    )


def test_prepare_and_info_agree(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "data"
    result = fuselm("data", "prepare", corpus, "--vocab-size", "300", "--out", out, "--json")
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout.splitlines()[-1])
    info = json.loads(fuselm("data", "info", out, "--verify", "--json").stdout)
    assert info["splits"] == answer["splits"]
    assert info["splits"]["train"]["dtype"] == "uint16"
    shown = fuselm("data", "info", out / "train.tokens", "--verify")
    assert "(uint16) in 1 document, checksum" in shown.stdout
    assert shown.exit_code == 0
    assert "checksum verified" in shown.stdout


def test_prepare_takes_a_tokenizer_or_characters(corpus: Path, trained: Path, tmp_path: Path) -> None:
    given = fuselm("data", "prepare", corpus, "--tokenizer", trained, "--out", tmp_path / "a", "--json")
    fingerprint = json.loads(fuselm("tokenizer", "show", trained, "--json").stdout)["fingerprint"]
    assert json.loads(given.stdout)["splits"]["train"]["fingerprint"] == fingerprint
    characters = fuselm("data", "prepare", corpus, "--characters", "--out", tmp_path / "b", "--json")
    assert json.loads(characters.stdout)["splits"]["train"]["vocab_size"] == len(set(TEXT))
    both = fuselm("data", "prepare", corpus, "--tokenizer", trained, "--characters", "--out", tmp_path / "c")
    assert both.exit_code == 1
    assert "Choose" in both.stderr
    assert not (tmp_path / "c").exists()


def test_prepare_replaces_nothing_unless_it_is_told_to(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "data"
    command = ("data", "prepare", corpus, "--characters", "--out", out)
    assert fuselm(*command).exit_code == 0
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    corpus.write_text(TEXT.upper())
    refused = fuselm(*command)
    assert refused.exit_code == 1
    assert "holds tokenizer.json, train.tokens, valid.tokens, prepared.json. Name another folder" in refused.stderr
    assert "--overwrite" in refused.stderr
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert fuselm(*command, "--overwrite").exit_code == 0
    assert (out / "train.tokens").read_bytes() != before["train.tokens"]
    assert fuselm("data", "info", out, "--verify").exit_code == 0


def test_a_tokenizer_is_written_over_by_itself_alone(corpus: Path, trained: Path, tmp_path: Path) -> None:
    before = trained.read_bytes()
    refused = fuselm("data", "prepare", corpus, "--characters", "--out", tmp_path)
    assert refused.exit_code == 1
    assert "holds tokenizer.json. Name another folder" in refused.stderr
    assert trained.read_bytes() == before
    assert fuselm("data", "prepare", corpus, "--tokenizer", trained, "--out", tmp_path).exit_code == 0
    assert trained.read_bytes() == before


def test_the_built_in_stories_need_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "stories").mkdir()  # a folder of their name is none of their text
    result = fuselm("data", "prepare", "stories", "--limit-mb", "0.2", "--vocab-size", "600", "--out", "stories")
    assert result.exit_code == 0, result.output
    assert "train: " in result.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("tokenizer", "train", "nowhere.txt", "--overwrite"), "A corpus is one of stories"),
        (("tokenizer", "train", "{corpus}", "--vocab-size", "200", "--overwrite"), "at least 256 bytes"),
        (("tokenizer", "train", "nowhere.txt", "--vocab-size", "0", "--special", "<|a|>"), "here 258 entries; got vo"),
        (("tokenizer", "train", "nowhere.txt", "--characters", "--vocab-size", "300"), "has no say"),
        (("data", "prepare", "nowhere.txt", "--vocab-size", "99", "--out", "out"), "at least 256 bytes"),
        (("tokenizer", "train", "{empty}", "--overwrite"), "empty"),
        (("tokenizer", "show", "nowhere.json"), "nowhere.json"),
        (("tokenizer", "encode", "{trained}", "a", "--special", "maybe"), "refuse, allow, text"),
        (("tokenizer", "encode", "{trained}", "a", "--out", "ids.txt"), ".npy"),
        (("tokenizer", "encode", "{trained}", "a", "--file", "{corpus}"), "got both"),
        (("tokenizer", "encode", "{trained}", "a", "--threads", "0"), "1 to 1024"),
        (("tokenizer", "decode", "{trained}", "1", "two"), "whole numbers; got 'two'"),
        (("tokenizer", "convert", "{trained}", "--to", "pickle", "--out", "x"), "json, gpt2, tiktoken"),
        (("tokenizer", "train", "{corpus}", "--out", "tokenizer.model"), "ending in .json"),
        (("tokenizer", "train", "{corpus}", "--limit-mb", "inf", "--overwrite"), "above 0; got inf"),
        (("tokenizer", "decode", "{trained}", "--", "--5"), "whole numbers; got '--5'"),
        (("tokenizer", "decode", "{trained}", "1", "--file", "{corpus}"), "got both"),
        (("data", "prepare", "{folder}", "--out", "out"), "text"),
        (("data", "prepare", "{folder}", "--out", "{folder}/out"), "cannot lie inside it"),
        (("data", "prepare", "{corpus}", "--seed", "1", "--out", "out"), "chooses among the built-in stories"),
        (("data", "prepare", "{broken}", "--out", "{folder}/out"), "broken.txt.gz"),
        (("data", "prepare", "{corpus}", "--out", "{empty}"), "empty.txt is a file"),
        (("data", "info", "{folder}"), "Make one with `fuselm data prepare`"),
        (("data", "info", "{corpus}"), "hen.txt"),
        (("data", "info", "nowhere"), "nowhere"),
    ],
)
def test_mistakes_are_a_sentence_and_exit_code_1(
    arguments: tuple[str, ...], says: str, corpus: Path, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "folder").mkdir()
    (tmp_path / "broken.txt.gz").write_bytes(gzip.compress(TEXT.encode())[:-20])
    names = {"corpus": corpus, "trained": trained, "empty": tmp_path / "empty.txt", "folder": tmp_path / "folder"}
    filled = [argument.format(**names, broken=tmp_path / "broken.txt.gz") for argument in arguments]
    result = fuselm(*filled)
    assert result.exit_code == 1, result.output
    assert says in " ".join(result.stderr.split())
    assert "Traceback" not in result.output


def test_a_vocabulary_larger_than_the_text_gives_is_smaller_with_a_warning(corpus: Path, tmp_path: Path) -> None:
    result = fuselm("tokenizer", "train", corpus, "--vocab-size", "5000", "--out", tmp_path / "t.json")
    assert result.exit_code == 0
    assert "warning: The text gives" in result.stderr
    assert "UserWarning" not in result.stderr


def test_ctrl_c_leaves_no_file(tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-m", "fuselm", "data", "prepare", "stories", "--limit-mb", "3000", "--out", str(out)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("stories: ")
        assert "tokenizer: train" in process.stderr.readline()  # it has been at work for some seconds
        process.send_signal(signal.SIGINT)
        _, rest = process.communicate(timeout=60)
    assert process.returncode == 130, rest
    assert "interrupted" in rest
    assert not out.exists() or list(out.iterdir()) == []


@pytest.mark.parametrize("verb", [("tokenizer", "train"), ("tokenizer", "encode"), ("data", "prepare")])
def test_help_teaches_by_example(verb: tuple[str, str]) -> None:
    assert f"fuselm {' '.join(verb)} " in " ".join(fuselm(*verb, "--help").stdout.replace("│", " ").split())
