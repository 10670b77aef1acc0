"""What a record keeps when a part is merged into it, what it vouches for, and what it lacks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fuselm.bench import merging, report
from fuselm.bench.kernels import TOO_LATE
from fuselm.bench.owners import Sources
from fuselm.kernels.spec import Case, ops

HEADER = {
    "gpu": "NVIDIA H200",
    "driver": "580.1",
    "versions": {"torch": "2.11.0"},
    "date": "2026-01-01",
    "commit": "abc",
}
LATER = {**HEADER, "date": "2026-02-02", "commit": "def"}
NAMES = ["rms_norm", "softmax"]
FILES = {"rms_norm.cu": "1", "softmax.cu": "2", "rows.cuh": "3", "fuselm.h": "4"}
NEEDS = {"rms_norm": ["rms_norm.cu", "rows.cuh"], "softmax": ["softmax.cu", "rows.cuh"]}
HERE = Sources(FILES, NEEDS)
CASES = {op: ops()[op].bench_cases for op in NAMES}


def changed(name: str) -> Sources:
    return Sources({**FILES, name: "other"}, NEEDS)


def a_row(op: str, case: Case | None = None, **more: Any) -> dict[str, Any]:
    case = case or CASES[op][0]
    what = {"op": op, "impl": "fused", "case": case.name, "dtype": case.dtype, "shape": list(case.shape)}
    return {**dict.fromkeys(report.ROW_FIELDS, 0), **what, "pass": "forward", **more}


def a_host(op: str, us: float = 1.0) -> dict[str, Any]:
    return {**dict.fromkeys(report.HOST_FIELDS, 0), "op": op, "impl": "fused", "shape": [1, 8], "call_us": us}


def a_note(op: str, case: Case, words: str, impl: str = "quack", which: str = "") -> dict[str, Any]:
    what = {"case": case.name, "dtype": case.dtype, "shape": list(case.shape)}
    return {"op": op, "pass": which, **what, "impl": impl, "note": words}


def tables(*ops_measured: str, **more: Any) -> dict[str, Any]:
    rows = [a_row(op) for op in ops_measured]
    return {"rows": rows, "decode": [], "host": [a_host(op) for op in ops_measured], "notes": [], **more}


def counted(**by_op: tuple[int, int, int]) -> dict[str, Any]:
    """Counts of ops; `none` is those of no op."""
    numbers = {op.replace("none", "-"): dict(zip(merging.gpu_tests.COUNTS, n, strict=True)) for op, n in by_op.items()}
    failures = {op: [f"test_forward[{op}]"] * n["failed"] for op, n in numbers.items() if n["failed"]}
    return {"tests": merging.gpu_tests.together([{"ops": numbers, "failures": failures}])}


def clean(*names: str, status: str = "clean") -> dict[str, Any]:
    return {"sanitizer": {tool: dict.fromkeys(names, status) for tool in merging.TOOLS}}


def full_record() -> dict[str, Any]:
    made = merging.merge(None, HEADER, counted(rms_norm=(10, 0, 0), softmax=(20, 0, 1), none=(3, 0, 0)), HERE)
    made = merging.merge(made, HEADER, clean(*NAMES), HERE)
    made = merging.merge(made, HEADER, tables(*NAMES), HERE)
    return json.loads(json.dumps(made))


def test_parts_of_the_same_sources_come_together() -> None:
    made = full_record()
    assert set(made) == {*merging.HEADER, "origins", "tests", "sanitizer", "rows", "decode", "host", "notes"}
    assert merging.problems(made, HERE, NAMES) == []


def test_a_changed_op_loses_its_figures_and_no_other_does() -> None:
    now = changed("softmax.cu")
    made = merging.merge(full_record(), LATER, clean("softmax"), now)
    assert [row["op"] for row in made["rows"]] == ["rms_norm"]
    assert [row["op"] for row in made["host"]] == ["rms_norm"]
    assert set(made["tests"]["ops"]) == {"rms_norm"}
    assert [made["tests"][which] for which in merging.gpu_tests.COUNTS] == [10, 0, 0]
    assert made["origins"]["rows"]["rms_norm"]["date"] == HEADER["date"]
    assert made["origins"]["sanitizer"]["softmax"] == {
        **{key: LATER[key] for key in merging.ORIGIN},
        "sources": now.of("softmax"),
    }
    made = merging.merge(made, LATER, tables("softmax"), now)
    made = merging.merge(made, LATER, counted(rms_norm=(1, 0, 0), softmax=(1, 0, 0), none=(1, 0, 0)), now)
    assert merging.problems(made, now, NAMES) == []
    assert made["date"] == LATER["date"]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("fuselm.h", [f"{op}: fuselm.h is not what was tested on the GPU" for op in (*NAMES, "no op")]),
        (
            "softmax.cu",
            [
                "softmax: softmax.cu is not what was tested on the GPU",
                "softmax: softmax.cu is not what sanitizers looked at",
                "softmax: softmax.cu is not what was measured",
                "no op: softmax.cu is not what was tested on the GPU",
            ],
        ),
    ],
)
def test_a_record_says_which_file_it_does_not_vouch_for(name: str, says: list[str]) -> None:
    assert merging.problems(full_record(), changed(name), NAMES) == says


def test_a_shared_header_is_every_ops() -> None:
    now = changed("rows.cuh")
    assert merging.still_true(full_record(), HEADER["gpu"], now)["rows"] == []
    assert len(merging.problems(full_record(), now, NAMES)) == 7


def test_another_gpu_or_an_older_kind_of_record_starts_anew() -> None:
    old = full_record()
    for other, header in ((old, {**HEADER, "gpu": "NVIDIA L4"}), ({**HEADER, "sources": {}, "rows": []}, HEADER)):
        made = merging.merge(other, header, counted(rms_norm=(3, 0, 0)), HERE)
        assert made["tests"]["passed"] == 3
        assert "rows" not in made
    assert merging.problems({**HEADER, "sources": {}}, HERE, NAMES)[0].startswith("the record has no origins, tests")


def test_tests_of_some_ops_keep_those_of_others_while_all_sources_are_the_same() -> None:
    made = merging.merge(full_record(), HEADER, counted(softmax=(4, 1, 2)), HERE)
    assert [made["tests"][which] for which in ("passed", "failed", "skipped")] == [17, 1, 2]
    assert merging.problems(made, HERE, NAMES) == ["1 tests failed: test_forward[softmax]"]
    again = merging.merge(made, HEADER, counted(softmax=(5, 0, 0)), HERE)
    assert (again["tests"]["failed"], again["tests"]["failures"]) == (0, {})
    declared = changed("fuselm.h")
    assert set(merging.merge(made, HEADER, counted(softmax=(5, 0, 0)), declared)["tests"]["ops"]) == {"softmax"}


def test_a_sanitizer_that_did_not_finish_does_not_take_a_clean_bill_away() -> None:
    late = clean("softmax", status=f"{merging.UNFINISHED}\nlog")
    assert merging.problems(merging.merge(full_record(), HEADER, late, HERE), HERE, NAMES) == []
    worse = merging.merge(full_record(), HEADER, clean("softmax", status="3 errors"), HERE)
    assert merging.problems(worse, HERE, NAMES) == [f"{tool} of softmax: 3 errors" for tool in merging.TOOLS]
    now = changed("softmax.cu")
    assert merging.merge(full_record(), HEADER, late, now)["sanitizer"]["memcheck"]["softmax"] != "clean"


def test_cases_that_time_did_not_allow_keep_their_rows() -> None:
    first, second, third = CASES["softmax"][:3]
    before = tables(rows=[a_row("softmax", first, gpu_us=1), a_row("softmax", second, gpu_us=1)])
    before |= {"host": [a_host("softmax", 1.0)], "notes": [a_note("softmax", second, "not installed")]}
    old = merging.merge(None, HEADER, before, HERE)
    late = [a_note("softmax", case, TOO_LATE, impl="all") for case in (second, third)]
    late += [a_note("softmax", first, TOO_LATE, impl="all", which="latency")]
    found = {"rows": [a_row("softmax", first, gpu_us=2)], "decode": [], "host": [], "notes": late}
    made = merging.merge(old, LATER, found, HERE)
    assert [(row["shape"], row["gpu_us"]) for row in made["rows"]] == [(list(first.shape), 2), (list(second.shape), 1)]
    assert made["host"] == old["host"]
    assert [(note["shape"], note["note"]) for note in made["notes"]] == [
        (list(second.shape), "not installed"),
        (list(third.shape), TOO_LATE),
    ]
    # The rest, at another time.
    rest = {"rows": [a_row("softmax", third, gpu_us=3)], "decode": [], "host": [a_host("softmax", 3.0)], "notes": []}
    made = merging.merge(made, LATER, rest, HERE)
    assert [row["gpu_us"] for row in made["rows"]] == [2, 1, 3]
    assert [row["call_us"] for row in made["host"]] == [3.0]
    assert [note["note"] for note in made["notes"]] == ["not installed"]


def test_a_case_that_failed_anew_or_is_gone_has_no_rows_any_more() -> None:
    first, second = CASES["softmax"][:2]
    gone = Case("of another time", (3, 3))
    before = {"rows": [a_row("softmax", case) for case in (first, second, gone)] + [a_row("rms_norm", gone)]}
    old = merging.merge(None, HEADER, tables(**before), HERE)
    found = {"rows": [], "decode": [], "host": [], "notes": [a_note("softmax", first, "OutOfMemoryError", "torch")]}
    made = merging.merge(old, HEADER, found, HERE)
    assert [(row["op"], row["case"]) for row in made["rows"]] == [("softmax", second.name), ("rms_norm", gone.name)]


def test_rows_are_in_the_registrys_order_whatever_was_measured_first() -> None:
    first, second = CASES["softmax"][:2]
    made = merging.merge(None, HEADER, tables(rows=[a_row("softmax", second)]), HERE)
    made = merging.merge(made, HEADER, tables(rows=[a_row("softmax", first), a_row("rms_norm")]), HERE)
    assert [(row["op"], row["shape"]) for row in made["rows"]] == [
        ("rms_norm", list(CASES["rms_norm"][0].shape)),
        ("softmax", list(first.shape)),
        ("softmax", list(second.shape)),
    ]


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (
            lambda made: made["sanitizer"]["racecheck"].update(rms_norm="3 errors\nlog"),
            "racecheck of rms_norm: 3 errors",
        ),
        (lambda made: made["sanitizer"]["memcheck"].pop("softmax"), "memcheck of softmax: was not run"),
        (lambda made: made["rows"].pop(), "softmax was not measured"),
        (lambda made: made["origins"]["rows"].pop("softmax"), "softmax was not measured"),
        (lambda made: made["rows"][0].pop("graph"), "a row of rows has other fields"),
        (lambda made: made["tests"]["ops"].pop("softmax"), "no test of softmax passed"),
        (lambda made: made["tests"]["ops"].pop("-"), "no test of no op passed"),
        (lambda made: made.pop("host"), "the record has no host"),
        (lambda made: made["origins"]["tests"]["-"]["sources"].update(new="3"), "no op: new is not what was tested"),
        (lambda made: made["origins"]["tests"].pop("softmax"), "no test of softmax passed"),
    ],
)
def test_a_record_with_a_gap_does_not_vouch(spoil: Callable[[dict[str, Any]], Any], says: str) -> None:
    made = full_record()
    spoil(made)
    found = merging.problems(made, HERE, NAMES)
    assert len(found) == 1
    assert says in found[0]


def test_verdicts_on_ops_over_lists_may_be_absent_and_must_be_clean() -> None:
    here = Sources({**FILES, "adamw_step.cu": "5"}, {**NEEDS, "adamw": ["adamw_step.cu"]})
    made = merging.merge(None, HEADER, counted(rms_norm=(1, 0, 0), softmax=(1, 0, 0), none=(1, 0, 0)), here)
    for part in (tables(*NAMES), clean(*NAMES, "adamw")):
        made = merging.merge(made, HEADER, part, here)
    assert merging.problems(made, here, NAMES) == []
    assert merging.unseen(made) == ["global_norm"]
    assert merging.unseen(full_record()) == merging.unseen({}) == ["adamw", "global_norm"]
    for status in ("3 errors\nlog", merging.UNFINISHED):
        made["sanitizer"]["racecheck"]["adamw"] = status
        assert merging.problems(made, here, NAMES) == [f"racecheck of adamw: {status}"]
        assert merging.unsanitized(made, ["adamw"]) == ["adamw"]
    later = Sources({**here.hashes, "adamw_step.cu": "6"}, here.needs)
    assert "adamw: adamw_step.cu is not what sanitizers looked at" in merging.problems(made, later, NAMES)
    assert "adamw" not in merging.merge(made, HEADER, {}, later)["sanitizer"]["racecheck"]


def test_what_a_record_lacks_is_known() -> None:
    made = full_record()
    assert merging.untested(made, [*NAMES, "-"]) == merging.unsanitized(made, NAMES) == []
    made["tests"]["ops"]["softmax"]["failed"] = 1
    made["sanitizer"]["racecheck"]["rms_norm"] = merging.UNFINISHED
    assert merging.untested(made, [*NAMES, "-", "rope"]) == ["softmax", "rope"]
    assert merging.unsanitized(made, [*NAMES, "rope"]) == ["rms_norm", "rope"]
    assert merging.untested({}, NAMES) == merging.unsanitized({}, NAMES) == NAMES
    assert {"softmax latencies", "rms_norm latencies"} < merging.measured_labels(made)
    assert merging.measured_labels({}) == frozenset()


def test_a_file_names_the_fields_of_a_table_once(tmp_path: Path) -> None:
    rows = [{"op": "softmax", "gpu_us": 1.5}, {"op": "softmax", "gpu_us": 2.5}]
    record = {"gpu": "NVIDIA H200", "rows": rows, "notes": [{"op": "add"}, {"op": "mul", "note": "late"}], "host": []}
    path = tmp_path / "h200.json"
    path.write_text(merging.to_text(record))
    assert merging.load(path) == record
    assert path.read_text().count("gpu_us") == 1
