"""README figures are the record's: the generator, and that the README in this repository is up to date."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fuselm.bench import plots, readme, report

ROOT = Path(__file__).resolve().parents[2]


def a_record() -> dict[str, Any]:
    def row(impl: str, us: float, share: float) -> dict[str, Any]:
        figures = {"op": "rms_norm", "pass": "forward", "case": "plain", "dtype": "bfloat16", "shape": [32768, 768]}
        return {**dict.fromkeys(report.ROW_FIELDS, 0), **figures, "impl": impl, "gpu_us": us, "share_of_copy": share}

    figures = {"op": "rms_norm", "dtype": "bfloat16", "case": "decode", "shape": [1, 1, 4096], "impl": "fused"}
    latency = {**dict.fromkeys(report.DECODE_FIELDS, 0), **figures, "p50_us": 1.5, "p99_us": 1.7, "empty_us": 1.1}
    return {
        "gpu": "NVIDIA H200",
        "date": "2026-01-01",
        "versions": {"torch": "2.11.0", "cuda": "13.0", "liger": "0.8.5"},
        "rows": [row("fused", 25.04, 0.953), row("torch", 40.0, 0.6), row("liger", 25.04, 0.953)],
        "decode": [latency],
    }


def test_block_has_times_and_shares_with_the_fastest_in_bold() -> None:
    text = readme.block(a_record())
    assert "| op | pass | case | shape | dtype | fuselm | torch | Liger |" in text
    assert "| rms_norm | forward | plain | 32768x768 | bfloat16 | **25.0** (95) | 40.0 (60) | **25.0** (95) |" in text
    assert "- rms_norm 1x1x4096 in a CUDA graph, µs: fuselm 1.50; an empty kernel 1.10." in text
    assert "NVIDIA H200, torch 2.11.0, CUDA 13.0, Liger 0.8.5, 2026-01-01" in text


def test_writing_twice_changes_nothing_more() -> None:
    page = f"# title\n\n{readme.BEGIN}\nstale\n{readme.END}\n\nrest\n"
    once = readme.replaced(page, readme.block(a_record()))
    assert readme.replaced(once, readme.block(a_record())) == once
    assert once.startswith("# title\n\n")
    assert once.endswith("\n\nrest\n")
    assert "stale" not in once


@pytest.mark.parametrize("page", ["no marks", f"{readme.BEGIN} only", f"{readme.END} {readme.BEGIN}"])
def test_a_readme_without_the_marks_is_refused(page: str) -> None:
    with pytest.raises(ValueError, match="once each"):
        readme.replaced(page, "new")


def test_the_command_writes_readme_and_picture_then_finds_them_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpu").mkdir()
    readme.RECORD.write_text(json.dumps(a_record()))
    readme.README.write_text(f"{readme.BEGIN}\n{readme.END}\n")
    with pytest.raises(SystemExit, match="behind the record"):
        readme.main(["--check"])
    readme.main([])
    assert readme.PICTURE.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SystemExit) as ending:
        readme.main(["--check"])
    assert ending.value.code == 0


def test_latency_picture_is_made_of_rows(tmp_path: Path) -> None:
    plots.decode(a_record()["decode"], tmp_path / "decode.png", "H200")
    assert (tmp_path / "decode.png").read_bytes().startswith(b"\x89PNG")


def test_the_readme_here_says_what_the_record_says() -> None:
    page = ROOT / "README.md"
    if not page.exists() or readme.BEGIN not in page.read_text(encoding="utf-8"):
        pytest.skip("the README has no roofline block")
    text = page.read_text(encoding="utf-8")
    recorded = json.loads((ROOT / readme.RECORD).read_text(encoding="utf-8"))
    assert readme.replaced(text, readme.block(recorded)) == text, "run: python -m fuselm.bench.readme"
