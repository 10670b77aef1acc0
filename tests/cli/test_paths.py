"""Paths on the command line: ~ wherever it stands in a word, spaces, letters of any alphabet, a last slash."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import typer
from typer.testing import CliRunner

from fuselm.cli import app
from fuselm.cli.errors import told
from fuselm.cli.paths import typed_corpus, typed_path

TEXT = "Once upon a time there was a little red hen. " * 60


def verbs(group: typer.Typer) -> Iterator[Any]:
    yield from (command.callback for command in group.registered_commands)
    for below in group.registered_groups:
        assert below.typer_instance is not None
        yield from verbs(below.typer_instance)


def test_every_path_may_begin_with_a_home_folder() -> None:
    names = set()
    for verb in verbs(app):
        for name, hint in get_type_hints(verb, include_extras=True).items():
            if "pathlib" in str(hint) or name == "corpus":
                names.add(name)
                [option] = hint.__metadata__
                assert option.parser in (typed_path, typed_corpus), f"{verb.__module__} {name} wants parser=typed_path"
    assert names >= {"corpus", "out", "tokenizer", "path", "file", "runs", "resume", "log_csv", "gpt2_vocab"}


@pytest.mark.parametrize("name", ["with spaces", "häns 母鸡", "a'b\"c", "slash/"])
def test_paths_are_read_and_written_as_they_are_typed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).mkdir()
    (tmp_path / name / "hen.txt").write_text(TEXT)
    for command in (
        ["tokenizer", "train", name, "--characters", f"--out=~/{name}.json" if name[-1] != "/" else "--out=~/t/"],
        ["tokenizer", "show", f"~/{name}.json" if name[-1] != "/" else "~/t/"],
        ["data", "prepare", f"~/{name}", "--characters", f"--out=~/data/{name}"],
        ["data", "info", f"~/data/{name}"],
    ):
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 0, result.output
    assert not (tmp_path / "~").exists()
    assert (tmp_path / "data" / name / "train.tokens").is_file()


@pytest.mark.parametrize(
    "command",
    [
        ["train", ""],
        ["train", "--out", ""],
        ["train", "--resume", ""],
        ["plot", ""],
        ["data", "prepare", "", "--out", "data"],
        ["tokenizer", "train", ""],
    ],
    ids=" ".join,
)
def test_a_variable_that_is_not_set_is_no_path(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty corpus was the preset's own, and an empty path the folder one stands in."""
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2
    assert "is not empty; got ''. Is a variable not set?" in " ".join(result.stderr.replace("│", " ").split())
    assert list(tmp_path.iterdir()) == []


def test_a_tokenizer_that_could_not_be_written_is_not_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hen.txt").write_text(TEXT)
    monkeypatch.setattr("os.access", lambda path, mode: False)
    monkeypatch.setattr("fuselm.cli.data.open_named", lambda *given: pytest.fail("the corpus was opened"))
    result = CliRunner().invoke(
        app, ["tokenizer", "train", str(tmp_path / "hen.txt"), "--out", str(tmp_path / "t.json")]
    )
    assert (result.exit_code, result.stderr.startswith("error: --out is a file in a folder that can be written")) == (
        1,
        True,
    )


def test_whoever_has_read_enough_is_told_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """As `head` does: what was to be done is done, and typer ends without a word."""
    with pytest.raises(BrokenPipeError), told():
        raise BrokenPipeError(32, "Broken pipe")
    assert capfd.readouterr().err == ""
