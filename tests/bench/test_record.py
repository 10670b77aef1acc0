"""The GPU record: what is merged and what is dropped, how parts are counted, and when a record does not vouch."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fuselm.bench import kernels, record, report, sanitize
from fuselm.bench.processes import Ended, Job
from fuselm.kernels.spec import ops

HEADER = {
    "gpu": "NVIDIA H200",
    "driver": "580.1",
    "versions": {"torch": "2.11.0"},
    "date": "2026-01-01",
    "commit": "abc",
    "sources": {"src/fuselm/kernels/rms_norm.cu": "1"},
}
CHANGED = {**HEADER, "sources": {"src/fuselm/kernels/rms_norm.cu": "2"}}
REPORT = """<testsuites><testsuite>
<testcase classname="tests.kernels.test_generic" name="test_forward[rms_norm-odd]"/>
<testcase classname="tests.kernels.test_generic" name="test_forward[rms_norm-wide]"><failure/></testcase>
<testcase classname="tests.kernels.test_generic" name="test_forward[norm-wide]"/>
<testcase classname="tests.bench.test_harness" name="test_capture"><skipped message="one GPU only"/></testcase>
<testcase classname="tests.bench.test_harness" name="test_set_up"><error/></testcase>
</testsuite></testsuites>"""


def a_row(op: str, **more: Any) -> dict[str, Any]:
    return {**dict.fromkeys(report.ROW_FIELDS, 0), "op": op, "impl": "fused", **more}


def counted(**by_op: tuple[int, int, int]) -> dict[str, Any]:
    by_name = {op: dict(zip(record.COUNTS, numbers, strict=True)) for op, numbers in by_op.items()}
    failures = [f"test_forward[{op}]" for op, numbers in by_op.items() for _ in range(numbers[1])]
    return {"tests": {"ops": by_name, "failures": failures}}


def full_record() -> dict[str, Any]:
    made = record.merge(None, HEADER, counted(rms_norm=(10, 0, 0)), ["rms_norm"])
    clean = {"sanitizer": {tool: {"rms_norm": "clean"} for tool in record.TOOLS}}
    made = record.merge(made, HEADER, clean, ["rms_norm"])
    tables = {"rows": [a_row("rms_norm")], "decode": [], "host": [], "notes": []}
    return record.merge(made, HEADER, tables, ["rms_norm"])


def test_parts_of_the_same_sources_come_together() -> None:
    made = full_record()
    assert set(made) == {*record.HEADER, "tests", "sanitizer", "rows", "decode", "host", "notes"}
    assert record.problems(made, HEADER["sources"], ["rms_norm"]) == []


@pytest.mark.parametrize("header", [CHANGED, {**HEADER, "gpu": "NVIDIA L4"}])
def test_a_part_of_other_sources_or_another_gpu_starts_the_record_anew(header: dict[str, Any]) -> None:
    made = record.merge(full_record(), header, counted(rms_norm=(3, 0, 0)), ["rms_norm"])
    assert made["sources"] == header["sources"]
    assert made["tests"]["passed"] == 3
    assert "rows" not in made
    assert "sanitizer" not in made


def test_a_part_of_some_ops_keeps_what_is_known_of_others() -> None:
    made = record.merge(full_record(), HEADER, counted(softmax=(4, 1, 2)), ["softmax"])
    made = record.merge(made, HEADER, {"rows": [a_row("softmax"), a_row("softmax")]}, ["softmax"])
    made = record.merge(made, HEADER, {"sanitizer": {"memcheck": {"softmax": "clean"}, "racecheck": {}}}, ["softmax"])
    assert (made["tests"]["passed"], made["tests"]["failed"], made["tests"]["skipped"]) == (14, 1, 2)
    assert [row["op"] for row in made["rows"]] == ["rms_norm", "softmax", "softmax"]
    assert made["sanitizer"]["memcheck"] == {"rms_norm": "clean", "softmax": "clean"}
    again = record.merge(made, HEADER, counted(softmax=(5, 0, 0)), ["softmax"])
    assert (again["tests"]["passed"], again["tests"]["failed"], again["tests"]["failures"]) == (15, 0, [])


def test_failed_tests_are_recorded_and_told() -> None:
    made = record.merge(full_record(), HEADER, counted(rms_norm=(9, 1, 0)), ["rms_norm"])
    assert record.problems(made, HEADER["sources"], ["rms_norm"]) == ["1 tests failed: test_forward[rms_norm]"]


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (
            lambda made: made["sanitizer"]["racecheck"].update(rms_norm="3 errors\nlog"),
            "racecheck of rms_norm: 3 errors",
        ),
        (lambda made: made["sanitizer"]["memcheck"].clear(), "memcheck of rms_norm: was not run"),
        (lambda made: made["rows"].clear(), "rms_norm was not measured"),
        (lambda made: made["rows"][0].pop("graph"), "a row of rows has other fields"),
        (lambda made: made["tests"]["ops"].clear(), "no test of rms_norm passed"),
        (lambda made: made.pop("host"), "the record has no host"),
        (lambda made: made["sources"].update({"src/fuselm/kernels/new.cu": "3"}), "new.cu is not what was checked"),
    ],
)
def test_a_record_with_a_gap_does_not_vouch(spoil: Callable[[dict[str, Any]], Any], says: str) -> None:
    made = json.loads(json.dumps(full_record()))
    spoil(made)
    found = record.problems(made, HEADER["sources"], ["rms_norm"])
    assert len(found) == 1
    assert says in found[0]


def test_a_gpu_test_that_saw_no_gpu_is_a_failure_with_its_reason() -> None:
    for attribute, reason in (('message="JAX sees no gpu"', "JAX sees no gpu"), ("", "no reason")):
        skipped = f'<testcase classname="tests.a" name="test_x[rms_norm]"><skipped {attribute}/></testcase>'
        found = record.count_tests([f"<testsuite>{skipped}</testsuite>"], ["rms_norm"])
        assert (found["failed"], found["skipped"]) == (1, 0)
        assert found["failures"] == [f"tests.a.test_x[rms_norm] (skipped: {reason})"]


def test_pytests_own_report_is_understood(tmp_path: Path) -> None:
    reasons = [record.ONE_GPU, "JAX sees no gpu"]
    body = "".join(f"def test_{i}():\n    pytest.skip({reason!r})\n" for i, reason in enumerate(reasons))
    (tmp_path / "test_it.py").write_text(f"import pytest\n{body}def test_passes():\n    pass\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml=report.xml", "test_it.py"]
    subprocess.run(command, cwd=tmp_path, capture_output=True, check=True)
    found = record.count_tests([(tmp_path / "report.xml").read_text()], [])
    assert [found[count] for count in record.COUNTS] == [1, 1, 1]
    assert found["failures"] == ["test_it.test_1 (skipped: JAX sees no gpu)"]


def test_tests_are_counted_for_each_op_and_errors_are_failures() -> None:
    found = record.count_tests([REPORT], ["rms_norm", "norm"])
    assert (found["passed"], found["failed"], found["skipped"]) == (2, 2, 1)
    assert found["ops"]["rms_norm"] == {"passed": 1, "failed": 1, "skipped": 0}
    assert found["ops"]["norm"] == {"passed": 1, "failed": 0, "skipped": 0}
    assert found["ops"]["-"] == {"passed": 0, "failed": 1, "skipped": 1}
    assert found["failures"] == [
        "tests.kernels.test_generic.test_forward[rms_norm-wide]",
        "tests.bench.test_harness.test_set_up",
    ]


def test_a_test_that_two_runs_made_is_counted_once_and_at_its_worst() -> None:
    case = '<testcase classname="tests.a" name="test_x[softmax]">{}</testcase>'
    reports = [f"<testsuite>{case.format(inside)}</testsuite>" for inside in ("", "<failure/>", "")]
    found = record.count_tests(reports, ["softmax"])
    assert found["ops"] == {"softmax": {"passed": 0, "failed": 1, "skipped": 0}}


def test_an_ops_tests_are_not_those_of_one_whose_name_has_its_own_in_it() -> None:
    known = ["cross_entropy", "linear_cross_entropy", "softmax"]
    assert record.only("cross_entropy", known) == "cross_entropy and not linear_cross_entropy"
    assert record.only("linear_cross_entropy", known) == "linear_cross_entropy"


def pretend(monkeypatch: pytest.MonkeyPatch, end: Callable[[str, Job], Ended]) -> dict[str, Job]:
    """Let `end` say how each program would have ended; returns those that were to be run."""
    seen: dict[str, Job] = {}

    def run_all(jobs: dict[str, Job], deadline: float, at_once: int) -> dict[str, Ended]:
        seen.update(jobs)
        return {name: end(name, job) for name, job in jobs.items()}

    monkeypatch.setattr(record, "run_all", run_all)
    return seen


def test_each_op_has_a_process_for_its_tests_and_the_others_have_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def end(name: str, job: Job) -> Ended:
        report = next(part.partition("=")[2] for part in job.command if part.startswith("--junitxml="))
        test = f'<testcase classname="tests.a" name="test_x[{name}]"/>'
        Path(report).write_text(f"<testsuite>{test}</testsuite>")
        return Ended(0, "", 1.0, True)

    jobs = pretend(monkeypatch, end)
    found = record.run_tests(list(ops()), True, math.inf)["tests"]
    assert list(jobs) == [*ops(), record.NO_OP]
    assert jobs["cross_entropy"].command[-1] == "cross_entropy and not linear_cross_entropy"
    assert jobs[record.NO_OP].command[-1] == f"not ({' or '.join(ops())})"
    assert {of: count["passed"] for of, count in found["ops"].items()} == dict.fromkeys(jobs, 1)
    jobs.clear()
    record.run_tests(["softmax"], False, math.inf)
    assert list(jobs) == ["softmax"]


@pytest.mark.parametrize(
    ("ended", "says"),
    [(Ended(-9, "", 1.0, False), "it took too long"), (Ended(4, "", 1.0, True), "exit code 4")],
)
def test_a_run_of_tests_that_did_not_end_is_a_failure_of_its_op(
    ended: Ended, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, lambda name, job: ended)
    found = record.run_tests(["softmax"], False, math.inf)["tests"]
    assert found["ops"] == {"softmax": {"passed": 0, "failed": 1, "skipped": 0}}
    assert says in found["failures"][0]
    again = record.merge({**HEADER, "tests": found}, HEADER, counted(softmax=(5, 0, 0)), ["softmax"])
    assert again["tests"]["failures"] == []


def test_every_tool_and_op_is_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def end(name: str, job: Job) -> Ended:
        if name == "racecheck softmax":
            return Ended(-9, "half", 1.0, False)
        return Ended(0, "========= ERROR SUMMARY: 0 errors\n", 1.0, True)

    monkeypatch.setattr(record.shutil, "which", lambda name: f"/bin/{name}")
    jobs = pretend(monkeypatch, end)
    found = record.run_sanitizer(["rms_norm", "softmax"], math.inf)["sanitizer"]
    assert set(jobs) == {f"{tool} {op}" for tool in record.TOOLS for op in ("rms_norm", "softmax")}
    assert "memcheck" in jobs["memcheck softmax"].command
    assert found["memcheck"] == {"rms_norm": "clean", "softmax": "clean"}
    assert found["racecheck"]["rms_norm"] == "clean"
    assert found["racecheck"]["softmax"].startswith("was not finished")


RACE = """========= Error: Race reported between Read access at {kernel}+0xb00
=========     and Write access at {kernel}+0x2820 [96 hazards]
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""


@pytest.mark.parametrize(
    ("code", "output", "status"),
    [
        (0, "========= ERROR SUMMARY: 0 errors\n", "clean"),
        (0, "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n", "clean"),
        (9, "========= Invalid read\n========= ERROR SUMMARY: 4 errors\n", "4 errors"),
        (0, "========= RACECHECK SUMMARY: 2 hazards displayed (0 errors, 2 warnings)\n", "2 errors"),
        (1, "Traceback: no library\n========= ERROR SUMMARY: 0 errors\n", "failed with exit code 1"),
        (0, "it did not start", "failed with exit code 0"),
        (9, RACE.format(kernel="nvjet_sm90_tst_64x8"), "clean"),
        (9, RACE.format(kernel="void fuselm::norm::norm_forward_kernel<true>(fuselm::norm::ForwardArgs)"), "1 errors"),
        (1, RACE.format(kernel="nvjet_sm90_tst_64x8"), "1 errors"),
    ],
)
def test_a_sanitizer_is_clean_only_when_it_says_so(code: int, output: str, status: str) -> None:
    assert record.sanitizer_status(code, output).partition("\n")[0] == status


def test_the_command_writes_the_record_and_a_copy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clean = {"sanitizer": {tool: {"rms_norm": "clean"} for tool in record.TOOLS}}
    tables = {"rows": [a_row("rms_norm")], "decode": [], "host": [], "notes": []}
    parts = {"tests": counted(rms_norm=(10, 0, 0)), "sanitizer": clean, "bench": tables}
    monkeypatch.setattr(record, "_start", lambda: HEADER)
    monkeypatch.setattr(record, "_run_part", lambda part, names, everything, deadline: parts[part])
    with pytest.raises(SystemExit) as ending:
        record.main(["--folder", str(tmp_path / "gpu"), "--also", str(tmp_path / "copy")])
    assert ending.value.code == 0
    written = (tmp_path / "gpu" / "h200.json").read_text()
    assert record.problems(json.loads(written), HEADER["sources"], ["rms_norm"]) == []
    assert (tmp_path / "copy" / "h200.json").read_text() == written


def test_the_command_fails_when_tests_failed_and_still_records_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(record, "_start", lambda: HEADER)
    monkeypatch.setattr(record, "_run_part", lambda *arguments: counted(rms_norm=(9, 1, 0)))
    with pytest.raises(SystemExit) as ending:
        record.main(["--part", "tests", "--folder", str(tmp_path)])
    assert ending.value.code == 1
    assert json.loads((tmp_path / "h200.json").read_text())["tests"]["failed"] == 1


def test_the_command_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit, match="fuselm doctor"):
        record.main(["--part", "tests"])


def test_sanitized_cases_are_small_and_cover_every_layout(capsys: pytest.CaptureFixture[str]) -> None:
    op = ops()["rms_norm"]
    cases = sanitize.small_cases(op)
    assert {case.layout for case in cases} == {case.layout for case in op.cases}
    assert all(case.size <= sanitize.MAX_ELEMENTS and not case.huge for case in cases)
    sanitize.main(["--ops", "rms_norm", "--device", "cpu"])
    assert capsys.readouterr().out == f"rms_norm: {len(cases)} cases ran forward and backward\n"


def test_the_bench_part_prints_rows_as_they_come(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(plan: kernels.Plan, results: report.Results, on_step: Callable[[str], None]) -> None:
        assert (plan.ops, plan.device) == (("rms_norm",), "cuda")
        on_step("first case")
        row = a_row("rms_norm", shape=[8, 64], gpu_us=2.0, share_of_copy=0.5, dtype="float32", case="odd")
        results.rows.append({**row, "pass": "forward"})
        on_step("second case")

    monkeypatch.setattr(kernels, "run", run)
    found = record.run_bench(["rms_norm"], deadline=math.inf)
    assert len(found["rows"]) == 1
    printed = capsys.readouterr().out
    assert printed.index("first case") < printed.index("for odd float32 8x64 fused: 2.0 us 50 %")
    assert printed.count("8x64") == 1


def test_a_lost_gpu_is_told_and_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*arguments: object) -> None:
        raise kernels.DeviceLost("The GPU failed during rms_norm backward")

    monkeypatch.setattr(kernels, "run", run)
    with pytest.raises(record.CannotRecord, match="The GPU failed"):
        record.run_bench(["rms_norm"], deadline=math.inf)
