"""`fuselm build` on the shipped sources with pretended compilers: what it prints, skips, refuses and exits with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from fuselm.cli import app
from fuselm.kernels import build, toolchain


def fuselm(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["build", *arguments])


@pytest.fixture(autouse=True)
def pretended(pretend_compilers) -> None:
    """No test here starts a real compiler."""


def test_build_says_what_was_built_and_where(build_cache: Path) -> None:
    result = fuselm("--arch", "90a", "--target", "core")
    assert result.exit_code == 0, result.output
    assert "architectures: sm_90a" in result.output
    assert "core: built in " in result.output
    assert str(build_cache) in result.output


def test_second_build_says_it_was_there() -> None:
    fuselm("--arch", "90a", "--target", "core")
    assert "core: was built already" in fuselm("--arch", "90a", "--target", "core").output


def test_clean_builds_anew() -> None:
    fuselm("--arch", "90a", "--target", "core")
    assert "core: built in " in fuselm("--arch", "90a", "--target", "core", "--clean").output


def test_json_is_one_object_with_a_row_for_each_library() -> None:
    result = fuselm("--arch", "80,90a", "--target", "core", "--json")
    answer = json.loads(result.stdout)
    assert answer["architectures"] == ["80", "90a"]
    (row,) = answer["libraries"]
    assert (row["target"], row["state"]) == ("core", "built")
    assert Path(row["path"]).exists()


def test_verbose_shows_the_commands() -> None:
    assert "-gencode=arch=compute_90a,code=sm_90a" in fuselm("--arch", "90a", "--target", "core", "--verbose").stderr


def test_all_skips_what_this_environment_lacks_and_a_named_target_fails(monkeypatch) -> None:
    def refuse(which: str) -> None:
        raise build.Unavailable(f"no {which} here")

    monkeypatch.setattr(build, "require_linkable", refuse)
    result = fuselm("--arch", "90a")
    assert result.exit_code == 0
    assert "core: built in" in result.output
    assert "torch: skipped. no torch here" in result.output
    named = fuselm("--arch", "90a", "--target", "torch")
    assert named.exit_code == 1
    assert "no torch here" in named.output


def test_auto_without_a_gpu_says_how_to_name_architectures(monkeypatch) -> None:
    monkeypatch.setattr(toolchain, "gpus", list)
    result = fuselm()
    assert result.exit_code == 1
    assert "fuselm build --arch 90a" in result.output


def test_wrong_architecture_and_target_are_refused_in_words() -> None:
    assert "at least 75" in fuselm("--arch", "60").output
    result = fuselm("--arch", "90a", "--target", "everything")
    assert result.exit_code == 2
    assert "core, torch, jax or all" in result.output


def test_missing_nvcc_is_one_sentence_and_no_traceback(monkeypatch) -> None:
    monkeypatch.setattr(toolchain, "find_nvcc", lambda: None)
    result = fuselm("--arch", "90a", "--target", "core")
    assert result.exit_code == 1
    assert "needs nvcc" in result.output
    assert "Traceback" not in result.output
