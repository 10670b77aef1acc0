"""`fuselm bench kernels`: the files it writes, its JSON line, and what it says when it is asked for something wrong."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from fuselm.bench import kernels, peers
from fuselm.bench.report import Results
from fuselm.cli import app, bench
from fuselm.kernels.spec import op_names

ONE_CASE = ["bench", "kernels", "--ops", "rms_norm", "--quick", "--device", "cpu", "--filter", "plain 256x1024"]


def invoke(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


def in_one_line(text: str) -> str:
    """A message without the frame and the line breaks that a terminal's width puts into it."""
    return " ".join(text.replace("│", " ").split())


def test_writes_rows_and_plot_and_prints_a_table(tmp_path: Path) -> None:
    result = invoke(*ONE_CASE, "--out", str(tmp_path / "new" / "folder"))
    assert result.exit_code == 0, result.output
    folder = tmp_path / "new" / "folder"
    assert sorted(path.name for path in folder.iterdir()) == ["roofline.png", "rows.csv", "rows.json"]
    assert (folder / "roofline.png").read_bytes().startswith(b"\x89PNG")
    document = json.loads((folder / "rows.json").read_text())
    assert (document["device"], document["gpu"], len(document["rows"])) == ("cpu", None, 4)
    assert document["versions"]["torch"] == torch.__version__
    assert "CPU figures" in result.output
    assert "256x1024" in result.stdout


@pytest.mark.parametrize(
    ("error", "reference", "words"),
    [
        (None, None, "-"),
        (2.4e-3, 1.6e-3, "1.5"),
        (1.6e-7, 1.6e-9, "100"),
        (0.0014367, 6.8833e-09, "1.4e-03 / 6.9e-09"),
        (0.0014367, 0.0, "1.4e-03 / 0"),
        (0.0, 1.6e-3, "exact"),
        (0.0, 0.0, "exact"),
        (math.nan, 1.6e-3, "nan"),
        (math.nan, 0.0, "nan / 0"),
    ],
)
def test_errors_are_a_ratio_where_that_says_something(error: float | None, reference: float | None, words: str) -> None:
    assert bench._error_ratio({"rms_error": error, "reference_rms_error": reference}) == words


def test_json_is_the_last_line_of_stdout(tmp_path: Path) -> None:
    result = invoke(*ONE_CASE, "--out", str(tmp_path), "--json", "--impl", "fused")
    document = json.loads(result.stdout.splitlines()[-1])
    assert {row["impl"] for row in document["rows"]} == {"fused"}
    assert [Path(name).name for name in document["files"]] == ["rows.csv", "rows.json", "roofline.png"]


def test_help_names_every_implementation() -> None:
    assert bench.IMPLS == peers.NAMES
    help_text = in_one_line(invoke("bench", "kernels", "--help").stdout)
    assert f"Which of {', '.join(peers.NAMES)}." in help_text


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--ops", "rms_nrom"], f"there is no op 'rms_nrom'; there are: {', '.join(op_names())}"),
        (["--impl", "fussed"], f"there is no implementation 'fussed'; there are: {', '.join(peers.NAMES)}"),
        (["--device", "tpu"], "a device is auto, cpu or cuda; got 'tpu'"),
        (["--filter", "12345x1"], f"no label has '12345x1' in it; there are: {op_names()[0]}"),
    ],
)
def test_wrong_options_are_refused_with_what_there_is(arguments: list[str], says: str, tmp_path: Path) -> None:
    result = invoke("bench", "kernels", *arguments, "--out", str(tmp_path))
    assert result.exit_code == 2
    assert in_one_line(says) in in_one_line(result.stderr)


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = invoke("bench", "kernels", "--device", "cuda", "--out", str(tmp_path))
    assert result.exit_code == 2
    assert "fuselm doctor" in in_one_line(result.stderr)


def test_a_file_in_place_of_the_folder_is_refused_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    result = invoke(*ONE_CASE, "--out", str(tmp_path / "taken"))
    assert result.exit_code == 2
    assert "name a folder" in in_one_line(result.stderr)


def test_interrupting_keeps_what_was_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupted(plan: kernels.Plan, results: Results, on_step: object) -> None:
        results.notes.append({"op": "rms_norm", "pass": "", "case": "", "shape": [1], "impl": "torch", "note": "kept"})
        raise KeyboardInterrupt

    monkeypatch.setattr(kernels, "run", interrupted)
    result = invoke(*ONE_CASE, "--out", str(tmp_path))
    assert result.exit_code == 130
    assert json.loads((tmp_path / "rows.json").read_text())["notes"][0]["note"] == "kept"


@pytest.mark.parametrize(("impl", "code"), [("fused", 1), ("liger", 0)])
def test_only_a_failure_of_our_own_op_is_a_failure(
    impl: str, code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def noting(plan: kernels.Plan, results: Results, on_step: object) -> None:
        results.notes.append({"op": "rms_norm", "pass": "", "case": "", "shape": [1], "impl": impl, "note": "broken"})

    monkeypatch.setattr(kernels, "run", noting)
    result = invoke(*ONE_CASE, "--out", str(tmp_path))
    assert result.exit_code == code
    assert "broken" in result.stderr


def test_help_teaches_by_example() -> None:
    shown = in_one_line(invoke("bench", "kernels", "--help").stdout)
    assert "fuselm bench kernels --quick" in shown
    assert "--filter" in shown
