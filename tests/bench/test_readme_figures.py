"""README figures are the record's: the generator, and that the README in this repository is up to date."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fuselm.bench import kernels, peers, plots, readme, report

ROOT = Path(__file__).resolve().parents[2]


def a_record() -> dict[str, Any]:
    def row(impl: str, us: float, share: float) -> dict[str, Any]:
        figures = {"op": "rms_norm", "pass": "forward", "case": "plain", "dtype": "bfloat16", "shape": [32768, 4096]}
        times = {"gpu_us": us, "share_of_copy": share, "bytes": 512 << 20}
        return {**dict.fromkeys(report.ROW_FIELDS, 0), **figures, **times, "impl": impl}

    figures = {"op": "rms_norm", "dtype": "bfloat16", "case": "decode", "shape": [1, 1, 4096], "impl": "fused"}
    latency = {**dict.fromkeys(report.DECODE_FIELDS, 0), **figures, "p50_us": 1.5, "p99_us": 1.7, "empty_us": 1.1}
    return {
        "gpu": "NVIDIA H200",
        "date": "2026-01-01",
        "versions": {"torch": "2.11.0", "cuda": "13.0", "liger": "0.8.5"},
        "rows": [row("fused", 25.04, 0.953), row("torch", 40.0, 0.6), row("liger", 25.04, 0.953)],
        "decode": [latency],
        "host": [],
    }


def an_optimizer_record() -> dict[str, Any]:
    times = {
        ("adamw", "fp32", "fused"): 801.4,
        ("adamw", "fp32", "torch"): 1013.2,
        ("adamw", "fp32", "torch, foreach"): 2735.0,
        ("adamw", "bf16 with masters", "fused"): 823.0,
        ("global_norm", "fp32", "fused"): 128.1,
        ("global_norm", "fp32", "torch"): 171.0,
    }
    names = ("op", "case", "impl", "gpu_us", "share_of_copy")
    rows = [dict(zip(names, (*key, us, 800 / us), strict=True)) for key, us in times.items()]
    return {**a_record(), "preset": "gpt-124m", "parameters": 123587328, "rows": rows}


def test_adamw_stands_beside_torchs_and_a_copy() -> None:
    text = readme.optimizer_block(an_optimizer_record())
    assert "the 124 M fp32 parameters of gpt-124m takes 801 µs on an NVIDIA H200 (torch 2.11.0, 2026-01-01)" in text
    assert "1.00 times as fast as a copy of the same bytes; torch's fused one takes 1,013, its `foreach` one" in text
    assert "`foreach` one 2,735. With bf16 parameters and fp32 masters it takes 823." in text
    assert "The norm of all gradients takes 128 µs, torch's 171." in text


def test_block_has_times_and_shares_with_the_fastest_in_bold() -> None:
    text = readme.block(a_record())
    assert "| op | pass | case | shape | dtype | fuselm | torch | Liger |" in text
    assert "| rms_norm | forward | plain | 32768x4096 | bfloat16 | **25.0** (95) | 40.0 (60) | **25.0** (95) |" in text
    assert "- rms_norm 1x1x4096 in a CUDA graph, µs: fuselm 1.50; an empty kernel 1.10." in text
    assert "NVIDIA H200, torch 2.11.0, CUDA 13.0, Liger 0.8.5, 2026-01-01" in text


def test_ops_that_were_measured_on_another_day_are_named() -> None:
    days = {"rms_norm": "2025-12-31", "rope": "2026-01-01", "softmax": "2025-12-31", "add": "2025-12-30"}
    record = a_record() | {"origins": {"rows": {op: {"date": date} for op, date in days.items()}}}
    words = "Liger 0.8.5, 2026-01-01 (add: 2025-12-30; rms_norm, softmax: 2025-12-31). L2-cold"
    assert words in readme.block(record)
    assert "2026-01-01. L2-cold" in readme.block(a_record())


def test_promises_that_do_not_hold_are_said() -> None:
    assert "1 hold.\n" in readme.block(a_record())
    slow = a_record()
    slow["rows"][1]["gpu_us"] = 20.0
    missed = "Missed: 1 of rms_norm (beyond the limit by 22.7% at worst); `python -m fuselm.bench.promises` says which."
    assert f"0 hold. {missed}" in readme.block(slow)
    slow["notes"] = [{"note": kernels.TOO_LATE}, {"note": "has no counterpart"}, {"note": kernels.TOO_LATE}]
    assert f"0 hold. 2 cases of these sources wait to be measured. {missed}" in readme.block(slow)


def a_case(case: str, shape: list[int], mib: int, dtype: str = "bfloat16") -> list[dict[str, Any]]:
    """Rows of a softmax in both passes; backward moves half as much again."""
    first = a_record()["rows"][0] | {"op": "softmax", "case": case, "shape": shape, "dtype": dtype}
    return [first | {"pass": "forward", "bytes": mib << 20}, first | {"pass": "backward", "bytes": mib * 3 << 19}]


def shown(rows: list[dict[str, Any]]) -> list[str]:
    """The cases of the table, in its order, each as often as it has passes there."""
    lines = [line.split(" | ") for line in readme.block(a_record() | {"rows": rows}).splitlines() if "| soft" in line]
    return [" ".join(words[2:5]) for words in lines]


def test_table_has_large_cases_alone_and_in_all_their_passes() -> None:
    rows = a_case("plain", [8, 4096], 170) + a_case("plain", [9, 4096], 171) + a_case("plain", [1, 4096], 1)
    assert shown(rows) == ["plain 9x4096 bfloat16"] * 2  # its backward alone is large: 256.5 MiB


def test_table_has_the_largest_of_each_kind_and_then_the_next_largest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readme, "MOST_CASES", 6)
    sizes = (300, 800, 800, 700, 900, 600, 500)
    rows = [row for count, mib in enumerate(sizes) for row in a_case("plain", [count, 4096], mib)]
    rows += a_case("causal", [4, 8, 2048, 2048], 256) + a_case("plain", [7, 4096], 260, "float32")
    expected = ["plain 1x4096 bfloat16", "plain 2x4096 bfloat16", "plain 3x4096 bfloat16", "plain 4x4096 bfloat16"]
    expected += ["causal 4x8x2048x2048 bfloat16", "plain 7x4096 float32"]
    assert shown(rows)[::2] == shown(rows)[1::2] == expected
    assert f"all {len(rows)} cases and passes there are stand in gpu/h200.json" in readme.block(
        a_record() | {"rows": rows}
    )


def test_what_matmuls_bound_stands_beside_them_with_its_memory() -> None:
    figures = {"op": "linear_cross_entropy", "pass": "both", "case": "head of 128256", "flops": 1 << 60}
    times = {"fused": (900.0, 260 << 20), "torch": (1200.0, 3 << 30), "matmuls": (800.0, None)}
    rows = [
        a_record()["rows"][0] | figures | {"impl": impl, "gpu_us": us, "extra_bytes": extra}
        for impl, (us, extra) in times.items()
    ]
    rows += [row | {"case": "few rows of it", "shape": [64, 4096], "flops": 1} for row in rows]  # which a copy bounds
    text = readme.block(a_record() | {"rows": a_record()["rows"] + rows})
    assert text.count("its matmuls alone") == 1
    assert "| op | pass | case | shape | dtype | fuselm | torch | its matmuls alone |" in text
    row = "| linear_cross_entropy | both | head of 128256 | 32768x4096 | bfloat16 "
    assert f"{row}| **900.0** (260) | 1200.0 (3072) | 800.0 |" in text
    assert text.count("linear_cross_entropy") == 2  # its share of a copy is not shown
    assert "its matmuls alone" not in readme.block(a_record())


def test_latency_of_the_smallest_shape_of_an_op_is_told() -> None:
    first = a_record()["decode"][0]
    rows = [first | {"shape": [rows, 1, 4096], "impl": impl} for rows in (1, 4, 8) for impl in ("fused", "torch")]
    text = readme.block(a_record() | {"decode": rows})
    assert "- rms_norm 1x1x4096 in a CUDA graph, µs: fuselm 1.50, torch 1.50; an empty kernel 1.10." in text
    assert text.count("in a CUDA graph") == 1


def test_every_implementation_has_a_title() -> None:
    assert tuple(readme.TITLES) == peers.NAMES


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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpu").mkdir()
    readme.RECORD.write_text(json.dumps(a_record()))
    readme.OPTIMIZER.write_text(json.dumps(an_optimizer_record()))
    page = f"{readme.BEGIN}\n{readme.END}\n{readme.OPTIMIZER_BEGIN}\n{readme.OPTIMIZER_END}\n"
    readme.README.write_text(page)
    with pytest.raises(SystemExit, match="behind the record"):
        readme.main(["--check"])
    readme.main([])
    assert readme.PICTURE.read_bytes().startswith(b"\x89PNG")
    readme.main(["--check"])
    assert capsys.readouterr().out == "README.md is up to date\n"
    readme.README.write_text(readme.README.read_text().replace("takes 823", "takes 822"))
    with pytest.raises(SystemExit, match="behind the record"):
        readme.main(["--check"])


def test_a_picture_of_many_rows_shows_the_largest_and_stays_small(tmp_path: Path) -> None:
    first = a_record()["rows"][0]
    shapes = [[1 << index, 1024] for index in range(plots.MOST_GROUPS + 4)]
    rows = [
        {**first, "op": op, "pass": which, "impl": impl, "shape": shape, "bytes": shape[0], "share_of_copy": 0.9}
        for op in ("rms_norm", "layer_norm", "softmax")
        for which in ("forward", "backward")
        for shape in shapes
        for impl in ("fused", "torch", "compile", "liger", "quack")
    ]
    kept = plots._largest(rows[: len(shapes) * 5], plots.MOST_GROUPS)
    assert [row["shape"] for row in kept[::5]] == shapes[4:]
    plots.roofline(rows, tmp_path / "roofline.png", "H200")
    assert len((tmp_path / "roofline.png").read_bytes()) < 1 << 20


def test_latency_picture_is_made_of_rows(tmp_path: Path) -> None:
    plots.decode(a_record()["decode"], tmp_path / "decode.png", "H200")
    assert (tmp_path / "decode.png").read_bytes().startswith(b"\x89PNG")


def test_the_readme_here_says_what_the_records_say(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = ROOT / "README.md"
    if not page.exists() or readme.BEGIN not in page.read_text(encoding="utf-8"):
        pytest.skip("the README has no roofline block")
    monkeypatch.chdir(ROOT)
    readme.main(["--check"])
    assert capsys.readouterr().out == "README.md is up to date\n"
