"""`fuselm plot`: where it writes, what it prints, its JSON, its refusals and exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from fuselm.cli import plot

pytest.importorskip("matplotlib")

LOG = """{"kind": "step", "step": 10, "seconds": 5.0, "loss": 4.0, "tokens": 40960, "tokens_per_second": 8000.0}
{"kind": "eval", "step": 10, "seconds": 5.0, "loss": 3.5, "bits_per_byte": 1.25, "best": true, "took": 0.5}
{"kind": "end", "step": 10, "seconds": 6.0, "reason": "done"}
"""


def fuselm_plot(*arguments: str | Path) -> Result:
    app = typer.Typer()
    app.command(name="plot", help=plot.PLOT_HELP)(plot.plot)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "demo")


def make_run(folder: Path, log: str = LOG) -> Path:
    folder.mkdir()
    (folder / "log.jsonl").write_text(log)
    return folder


def test_one_run_is_drawn_into_its_folder_and_told(run: Path) -> None:
    result = fuselm_plot(run)
    assert result.exit_code == 0, result.output
    assert (run / "curve.png").read_bytes().startswith(b"\x89PNG")
    header, row, _, last = result.stdout.splitlines()
    assert header.split("  ")[0] == "run"
    assert row.split()[-4:] == ["3.5000", "1.2500", "10", "6.0"]
    assert last == f"wrote {run / 'curve.png'}"


def test_several_runs_need_a_place_for_the_picture(run: Path, tmp_path: Path) -> None:
    other = make_run(tmp_path / "other", LOG.splitlines(keepends=True)[0])
    refused = fuselm_plot(run, other)
    assert refused.exit_code == 1
    assert refused.stderr == ("error: A picture of one run lies in its folder; got 2 runs. Say where with --out.\n")
    result = fuselm_plot(run, other, "--out", tmp_path / "compare.png", "--x", "tokens", "--log-y")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "compare.png").is_file()
    assert result.stdout.splitlines()[2].split()[-3:] == ["-", "-", "5.0"]


def test_json_is_one_object_with_the_numbers_of_each_run(run: Path, tmp_path: Path) -> None:
    result = fuselm_plot(run, "--out", tmp_path / "a.png", "--json")
    answer = json.loads(result.stdout)
    assert answer["picture"] == str(tmp_path / "a.png")
    [facts] = answer["runs"]
    assert (facts["run"], facts["best_loss"], facts["bits_per_byte"]) == (str(run), 3.5, 1.25)
    assert (facts["finished"], facts["tokens_per_second"]) == ("done", 8000.0)
    assert answer["unit"] == "nats per token"


@pytest.mark.parametrize(
    ("log", "says", "unit"),
    [
        (LOG, "losses per token cannot be compared: bits per byte are drawn.", "bits per byte"),
        (LOG.splitlines(keepends=True)[0], "not all of them say bits per byte.", "nats per token, of different tokens"),
    ],
)
def test_runs_of_different_tokenizers_are_not_compared_without_a_word(
    log: str, says: str, unit: str, run: Path, tmp_path: Path
) -> None:
    other = make_run(tmp_path / "other", log)
    command = (run, other, "--out", tmp_path / "compare.png", "--json")
    for folder in (run, other):
        (folder / "tokenizer.json").write_text("one")
    assert fuselm_plot(*command).stderr == ""
    (other / "tokenizer.json").write_text("another")
    result = fuselm_plot(*command)
    assert result.exit_code == 0, result.output
    assert result.stderr.startswith("warning: These runs have different tokenizers")
    assert says in result.stderr
    assert json.loads(result.stdout)["unit"] == unit


def test_refusals_are_sentences_without_a_traceback(run: Path, tmp_path: Path) -> None:
    for arguments, says in (
        ((tmp_path / "nowhere",), "nowhere is not there. Give the folder of a run."),
        ((run, "--x", "epoch"), "The x axis is one of step, tokens, seconds; got 'epoch'. Choose one."),
        ((run, "--out", "curve.jpg"), "curve.jpg does not. Name another."),
    ):
        result = fuselm_plot(*arguments)
        assert result.exit_code == 1
        assert result.stderr.startswith("error: ")
        assert says in result.stderr
        assert isinstance(result.exception, SystemExit)


def test_help_has_examples() -> None:
    result = fuselm_plot("--help")
    assert result.exit_code == 0
    assert "fuselm plot runs/a runs/b --x tokens" in " ".join(result.stdout.replace("│", " ").split())
