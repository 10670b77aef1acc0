"""Promises, held against rows made up for it: which hold, which do not, and what is told of those that do not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fuselm.bench import promises, report

LARGE = report.LARGE_BYTES


def a_row(op: str, which: str, impl: str, us: float, **more: Any) -> dict[str, Any]:
    row = {**dict.fromkeys(report.ROW_FIELDS, 0), "op": op, "pass": which, "impl": impl, "gpu_us": us, "case": "plain"}
    return {**row, "dtype": "bfloat16", "shape": [8, 64], "bytes": LARGE, "copy_us": 1.0, "share_of_copy": 1.0, **more}


def a_host(impl: str, us: float) -> dict[str, Any]:
    figures = {"op": "softmax", "case": "decode", "dtype": "bfloat16", "shape": [1, 64], "impl": impl, "call_us": us}
    return {**dict.fromkeys(report.HOST_FIELDS, 0), **figures}


def missed(rows: list[dict[str, Any]], host: list[dict[str, Any]] | None = None) -> list[str]:
    return [str(found) for found in promises.findings({"rows": rows, "host": host or []}) if not found.held]


@pytest.mark.parametrize(
    ("op", "which", "limit"),
    [
        ("layer_norm", "forward", 0.95),
        ("layer_norm", "backward", 0.88),
        ("softmax", "forward", 0.95),
        ("swiglu", "backward", 0.95),
        ("add", "forward", 0.95),
        ("rope", "backward", 0.93),
        ("embedding", "backward", 0.50),
    ],
)
def test_large_rows_reach_a_share_of_a_copy(op: str, which: str, limit: float) -> None:
    assert missed([a_row(op, which, "fused", 1.0, share_of_copy=limit)]) == []
    (told,) = missed([a_row(op, which, "fused", 1.0, share_of_copy=limit - 0.02)])
    assert told == f"{which} plain 8x64 bfloat16: share of a copy's speed {limit - 0.02:.3f}, at least {limit:.3f}"
    assert missed([a_row(op, which, "fused", 1.0, share_of_copy=0.1, bytes=LARGE - 1)]) == []


def test_no_peer_is_faster_and_the_fastest_one_is_named() -> None:
    peers = [a_row("rms_norm", "forward", "torch", 20.0), a_row("rms_norm", "forward", "liger", 10.0)]
    assert missed([a_row("rms_norm", "forward", "fused", 10.2), *peers]) == []
    (told,) = missed([a_row("rms_norm", "forward", "fused", 10.3), *peers])
    assert "µs (liger 10.000) 10.300, at most 10.200" in told
    elsewhere = a_row("rms_norm", "forward", "compile", 1.0, shape=[8, 128])
    assert missed([a_row("rms_norm", "forward", "fused", 10.2), elsewhere]) == []


def test_host_time_is_held_against_torchs() -> None:
    assert missed([], [a_host("fused", 12.0), a_host("torch", 10.0)]) == []
    (told,) = missed([], [a_host("fused", 12.1), a_host("torch", 10.0)])
    assert "host decode 1x64 bfloat16: µs of host time for a call 12.100, at most 12.000" in told


def test_quacks_figures_are_scaled_by_todays_copy() -> None:
    def rows(us: float, copy_tb: float) -> list[dict[str, Any]]:
        more = {"bytes": 10**9, "copy_us": 1e3 / copy_tb}
        shapes = ([8192, 50304], [8192, 131072])
        return [a_row("cross_entropy", "both", "fused", us, shape=shape, **more) for shape in shapes]

    assert missed(rows(0.65 * 750 - 1, copy_tb=4.22)) == []
    assert missed(rows(0.65 * 750 * 2 - 1, copy_tb=2.11)) == []  # half the copy, twice the time
    (told,) = missed(rows(0.65 * 750 + 1, copy_tb=4.22))
    assert "8192x50304" in told
    absent = missed(rows(1.0, copy_tb=4.22)[:1])
    assert absent == ["both 8192x131072: µs (beside QuACK) not measured, at most 1,682.000"]


def test_a_head_is_held_against_its_matmuls_and_its_memory() -> None:
    work = {"flops": (report.ARITHMETIC + 1) * LARGE}
    floor = a_row("linear_cross_entropy", "both", "matmuls", 100.0, **work)
    fine = a_row("linear_cross_entropy", "both", "fused", 114.0, extra_bytes=299 << 20, **work)
    assert missed([fine, floor]) == []
    assert len(missed([{**fine, "gpu_us": 116.0, "extra_bytes": 301 << 20}, floor])) == 2
    assert ["not measured" in told for told in missed([{**fine, "extra_bytes": None}])] == [True, True]
    few_rows = {"flops": report.ARITHMETIC * LARGE}
    assert missed([{**fine, **few_rows, "gpu_us": 116.0}, {**floor, **few_rows}]) == []


def test_the_command_reports_each_op_and_fails_for_a_miss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [a_row("softmax", "forward", "fused", 1.0), a_row("layer_norm", "forward", "fused", 1.0, share_of_copy=0.5)]
    path = tmp_path / "record.json"
    path.write_text(json.dumps({"rows": rows, "host": []}))
    with pytest.raises(SystemExit) as ending:
        promises.main([str(path)])
    assert ending.value.code == 1
    printed = capsys.readouterr().out
    assert printed.endswith("\nadamw: no sanitizer has looked at it\nglobal_norm: no sanitizer has looked at it\n")
    assert "softmax: 1 of 1 promises hold\nlayer_norm: 0 of 1 promises hold\n  missed: forward plain" in printed
    with pytest.raises(SystemExit):
        promises.main([str(path), "--json"])
    assert [finding["held"] for finding in json.loads(capsys.readouterr().out)] == [True, False]


def test_what_is_no_record_is_refused_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text('{"rows": [{}], "host": []}')
    for name in ("absent.json", "old.json"):
        with pytest.raises(SystemExit, match="make gpu-check"):
            promises.main([str(tmp_path / name)])
