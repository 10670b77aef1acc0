"""The GPU record's parts and its command: what is run, what is merged when, and what is told."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from fuselm.bench import gpu_tests, kernels, merging, record, report, sanitize
from fuselm.bench.owners import Sources
from fuselm.bench.processes import Ended, Job
from fuselm.kernels.adamw import LIST_OPS
from fuselm.kernels.spec import op_names, ops
from fuselm.kernels.torch_ops import adamw, global_norm

HEADER = {
    "gpu": "NVIDIA H200",
    "driver": "580.1",
    "versions": {"torch": "2.11.0"},
    "date": "2026-01-01",
    "commit": "abc",
}
HERE = Sources({"one.cu": "1"}, {op: ["one.cu"] for op in [*op_names(), *LIST_OPS]})


def a_row(op: str, **more: Any) -> dict[str, Any]:
    case = ops()[op].bench_cases[0]
    what = {"op": op, "impl": "fused", "case": case.name, "dtype": case.dtype, "shape": list(case.shape)}
    return {**dict.fromkeys(report.ROW_FIELDS, 0), **what, **more}


def a_host(op: str) -> dict[str, Any]:
    return {**dict.fromkeys(report.HOST_FIELDS, 0), "op": op, "impl": "fused", "shape": [1, 8]}


def counts(names: Sequence[str], failed: int = 0) -> dict[str, Any]:
    numbers = {"passed": 10, "failed": failed, "skipped": 0}
    return gpu_tests.together([{"ops": dict.fromkeys(names, numbers), "failures": {}}])


def pretend(monkeypatch: pytest.MonkeyPatch, end: Callable[[str, Job], Ended]) -> dict[str, Job]:
    """Let `end` say how each program would have ended; returns those that were to be run."""
    seen: dict[str, Job] = {}

    def run_all(jobs: dict[str, Job], deadline: float, at_once: int) -> dict[str, Ended]:
        seen.update(jobs)
        return {name: end(name, job) for name, job in jobs.items()}

    monkeypatch.setattr(record, "run_all", run_all)
    return seen


def test_every_tool_and_op_is_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def end(name: str, job: Job) -> Ended:
        if name == "racecheck softmax":
            return Ended(-9, "half", 1.0, False)
        if name == "memcheck rms_norm":
            return Ended(-1, "was not run", 0.0, False)
        return Ended(0, "========= ERROR SUMMARY: 0 errors\n", 1.0, True)

    monkeypatch.setattr(record.shutil, "which", lambda name: f"/bin/{name}")
    jobs = pretend(monkeypatch, end)
    found = record.run_sanitizer(["rms_norm", "softmax"], math.inf)["sanitizer"]
    assert set(jobs) == {f"{tool} {op}" for tool in record.TOOLS for op in ("rms_norm", "softmax")}
    assert "memcheck" in jobs["memcheck softmax"].command
    assert found["memcheck"] == {"softmax": "clean"}  # and nothing of what never began
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


class Machine:
    """A machine with a GPU on which every part finds everything fine; notes what was asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        self.folder, self.asked, self.seconds = tmp_path / "gpu", {}, []  # type: ignore[var-annotated]
        monkeypatch.setattr(record, "_start", lambda: (HEADER, HERE))
        monkeypatch.setattr(gpu_tests, "run", self.tests)
        monkeypatch.setattr(record, "run_sanitizer", self.sanitizer)
        monkeypatch.setattr(record, "run_bench", self.bench)

    def tests(self, names: Sequence[str], deadline: float) -> dict[str, Any]:
        self.asked["tests"] = list(names)
        self.seconds.append(deadline - time.monotonic())
        return counts(names)

    def sanitizer(self, names: Sequence[str], deadline: float) -> dict[str, Any]:
        self.asked["sanitizer"] = list(names)
        return {"sanitizer": {tool: dict.fromkeys(names, "clean") for tool in merging.TOOLS}}

    def bench(
        self, names: Sequence[str], deadline: float, done: frozenset[str], keep: Callable[[Any], object]
    ) -> dict[str, Any]:
        self.asked["bench"], self.done = list(names), done
        keep({"rows": [a_row(names[0])], "decode": [], "host": [], "notes": []})
        self.kept = merging.load(self.folder / "h200.json")
        return {"rows": [a_row(op) for op in names], "decode": [], "host": [a_host(op) for op in names], "notes": []}

    def run(self, *arguments: str) -> Any:
        with pytest.raises(SystemExit) as ending:
            record.main(["--folder", str(self.folder), *arguments])
        return ending.value.code

    @property
    def written(self) -> dict[str, Any]:
        return merging.load(self.folder / "h200.json") or {}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    return Machine(monkeypatch, tmp_path)


def test_the_command_writes_the_record_and_a_copy(gpu: Machine, tmp_path: Path) -> None:
    assert gpu.run("--also", str(tmp_path / "copy")) == 0
    names = op_names()
    assert gpu.asked == {"tests": [*names, "-"], "sanitizer": [*names, *LIST_OPS], "bench": names}
    assert merging.problems(gpu.written, HERE, names) == []
    assert merging.load(tmp_path / "copy" / "h200.json") == gpu.written
    assert {row["op"] for row in gpu.kept["rows"]} == {names[0]}  # while the bench was running


def test_the_command_does_some_ops_in_the_seconds_it_is_given(gpu: Machine) -> None:
    gpu.run("--part", "tests", "--ops=-,softmax", "--seconds", "77")
    assert gpu.asked == {"tests": ["-", "softmax"]}
    assert 70 < gpu.seconds[0] <= 77
    gpu.run("--part", "bench", "--ops", "softmax rms_norm")
    assert gpu.asked["bench"] == ["softmax", "rms_norm"]
    assert gpu.done == frozenset()
    assert set(gpu.written["tests"]["ops"]) == {"-", "softmax"}


def test_ops_over_lists_are_for_the_sanitizers_alone(gpu: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    gpu.run("--ops", "softmax")
    assert "to do: no sanitizer has looked at adamw to its end\n" in capsys.readouterr().out
    gpu.asked.clear()
    gpu.run("--ops", "adamw,global_norm")
    assert gpu.asked == {"sanitizer": ["adamw", "global_norm"]}
    assert set(gpu.written["origins"]["sanitizer"]) == {"softmax", "adamw", "global_norm"}
    assert "no sanitizer" not in capsys.readouterr().out
    with pytest.raises(SystemExit):
        record.main(["--part", "tests", "--ops", "adamw"])
    assert "tests has nothing to do for adamw" in capsys.readouterr().err


def test_the_rest_is_what_the_record_lacks(gpu: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    gpu.run("--ops", "softmax")
    assert "to do: no test of no op passed" in capsys.readouterr().out
    gpu.run("--rest")
    others = [op for op in op_names() if op != "softmax"]
    assert gpu.asked == {"tests": [*others, "-"], "sanitizer": [*others, *LIST_OPS], "bench": op_names()}
    case = ops()["softmax"].bench_cases[0]
    assert gpu.done == {kernels.case_label("softmax", case), "softmax latencies"}
    assert merging.problems(gpu.written, HERE, op_names()) == []


def test_the_command_tells_what_waits_for_time(gpu: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    note = {"op": "softmax", "pass": "", "case": "", "dtype": "", "shape": [1], "impl": "all", "note": kernels.TOO_LATE}
    old = merging.merge(None, HEADER, {"rows": [a_row("softmax")], "notes": [note]}, HERE)
    gpu.folder.mkdir()
    (gpu.folder / "h200.json").write_text(json.dumps(old))
    gpu.run("--part", "tests")
    assert "to do: 1 cases or latencies wait for a bench with --rest" in capsys.readouterr().out


def test_the_command_fails_when_tests_failed_and_still_records_it(
    gpu: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_tests, "run", lambda names, deadline: counts(names, failed=1))
    assert gpu.run("--part", "tests", "--ops", "softmax") == 1
    assert gpu.written["tests"]["failed"] == 1


@pytest.mark.parametrize("arguments", [["--ops", "softmacks"], ["--part", "bench", "--ops", "softmax,-,x"]])
def test_an_op_that_is_not_there_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        record.main(arguments)
    assert "there is no op" in capsys.readouterr().err


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


def test_every_op_over_lists_is_sanitized(capsys: pytest.CaptureFixture[str]) -> None:
    sanitize.main(["--ops", "adamw global_norm", "--device", "cpu"])
    adamw_line, norm_line = capsys.readouterr().out.splitlines()
    assert adamw_line == f"adamw: {len(list(sanitize.list_calls('adamw', 'cpu')))} cases ran"
    assert norm_line.startswith("global_norm: ")
    with pytest.raises(SystemExit):
        sanitize.main(["--ops", "adamv", "--device", "cpu"])
    assert "softmax, swiglu, adamw, global_norm" in capsys.readouterr().err


def test_sanitized_steps_are_such_as_the_kernels_take_and_of_every_kind() -> None:
    """What a kernel refuses would go to torch's ops, and no sanitizer would see anything of ours."""
    seen: set[tuple[Any, ...]] = set()
    tensors, groups, skips = set(), set(), set()
    for lists, options in sanitize.list_calls("adamw", "cpu"):
        params, masters = lists[0], options.get("masters", [])
        assert all(adamw._is_regular((*lists, masters), index) for index in range(len(params)))
        twins = [bool(master.numel()) for master in masters] or [False] * len(params)
        for param, grad, twin in zip(params, lists[1], twins, strict=True):
            misaligned, turned = param.storage_offset() == 1, not param.is_contiguous()
            seen.add((param.dtype, grad.dtype, twin, misaligned, turned))
        tensors.add(sum(param.numel() > 0 for param in params))
        groups.add(len(set(options.get("weight_decay", [0]))))
        skips.add((isinstance(options["step"], torch.Tensor), "grad_scale" in options, bool(options.get("skip"))))
    kinds = {(torch.float32, False), *((half, twin) for half in (torch.bfloat16, torch.float16) for twin in (0, 1))}
    for dtype, twin in kinds:
        ways = {(grad, *lies) for own, grad, has, *lies in seen if (own, has) == (dtype, bool(twin))}
        assert ways >= {(dtype, False, False), (dtype, True, False), (dtype, False, True)}
        assert {grad for grad, *_ in ways} == {torch.float32, torch.bfloat16, torch.float16}
    assert {65, 591} < tensors  # one more than one launch of either kernel takes
    assert groups == {1, 9}
    assert skips == {(False, False, False), (True, True, False), (True, False, True)}


def test_sanitized_norms_are_such_as_the_kernel_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))
    found = [lists[0] for lists, _ in sanitize.list_calls("global_norm", "cpu")]
    assert all(global_norm._fits(tensor, tensors[0]) for tensors in found for tensor in tensors)
    assert {len({tensor.dtype for tensor in tensors}) for tensors in found} == {1, 3}
    assert max(map(len, found)) == 1301


def test_the_bench_part_prints_rows_as_they_come(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(plan: kernels.Plan, results: report.Results, on_step: Callable[[str], None]) -> None:
        assert (plan.ops, plan.device, plan.done) == (("rms_norm",), "cuda", {"a case"})
        on_step("first case")
        row = a_row("rms_norm", shape=[8, 64], gpu_us=2.0, share_of_copy=0.5, dtype="float32", case="odd")
        results.rows.append({**row, "pass": "forward"})
        on_step("second case")

    monkeypatch.setattr(kernels, "run", run)
    monkeypatch.setattr(record, "KEEP_SECONDS", -1)
    kept: list[int] = []
    found = record.run_bench(
        ["rms_norm"], math.inf, frozenset({"a case"}), keep=lambda found: kept.append(len(found["rows"]))
    )
    assert len(found["rows"]) == 1
    assert kept == [0, 1, 1]  # what there was between steps
    printed = capsys.readouterr().out
    assert printed.index("first case") < printed.index("for odd float32 8x64 fused: 2.0 us 50 %")
    assert printed.count("8x64") == 1


def test_a_lost_gpu_is_told_and_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*arguments: object) -> None:
        raise kernels.DeviceLost("The GPU failed during rms_norm backward")

    monkeypatch.setattr(kernels, "run", run)
    with pytest.raises(record.CannotRecord, match="The GPU failed"):
        record.run_bench(["rms_norm"], deadline=math.inf)
