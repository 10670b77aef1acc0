"""Warming: every case once, over all processes; failures told and survived; few heavy ones at a time."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from fuselm.bench import machine, merging, owners, peers, warm
from fuselm.bench.kernels import case_label
from fuselm.bench.processes import Ended, Job
from fuselm.bench.report import ROW_FIELDS
from fuselm.kernels.spec import Case, ops

NORM, LOSS = ops()["rms_norm"], ops()["cross_entropy"]
SMALL = Case("", (4, 8), "float32", {}, {"weight": "float32"})


def test_every_case_of_the_bench_is_compiled_and_decode_shapes_on_a_gpu() -> None:
    names = list(ops())
    found = warm.steps(names, "cuda")
    for op in ops().values():
        assert [case for other, case, _ in found if other is op].count(op.bench_cases[0]) == 1
        passes = {case: passes for other, case, passes in map(_hashable, found) if other is op}
        assert len(passes) == len(op.bench_cases) + len(op.decode_cases)
    assert len(warm.steps(names, "cpu")) < len(found)


def test_what_the_record_of_this_gpu_has_is_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of the same sources: other cases are measured anew, and so are compiled."""
    case, other = NORM.bench_cases[:2]
    row = {**dict.fromkeys(ROW_FIELDS), "op": "rms_norm", "impl": "fused"}
    row |= {"case": case.name, "dtype": case.dtype, "shape": list(case.shape)}
    header = {key: "NVIDIA H200" if key == "gpu" else "" for key in merging.HEADER}
    monkeypatch.setattr(machine, "describe", lambda device: header)
    assert warm.measured(tmp_path) == frozenset()
    sources = owners.sources()
    (tmp_path / "h200.json").write_text(merging.to_text(merging.merge(None, header, {"rows": [row]}, sources)))
    done = warm.measured(tmp_path)
    assert done == {case_label("rms_norm", case)}
    left = [step[1] for step in warm.steps(["rms_norm"], "cuda", done)]
    assert case not in left
    assert other in left
    assert NORM.decode_cases[0] in left
    without = [step[1] for step in warm.steps(["rms_norm"], "cuda", done | {"rms_norm latencies"})]
    assert not any(case in without for case in NORM.decode_cases)
    stale = merging.merge(None, header, {"rows": [row]}, sources)
    stale["origins"]["rows"]["rms_norm"]["sources"] = {"rms_norm.cu": "another"}
    (tmp_path / "h200.json").write_text(merging.to_text(stale))
    assert warm.measured(tmp_path) == frozenset()


def _hashable(step: warm.Step) -> tuple[Any, str, tuple[str, ...]]:
    return step[0], repr(step[1]), step[2]


def test_each_pass_is_called_once_with_the_inputs_of_the_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[bool, bool]] = []

    def noting(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        seen.append((torch.is_grad_enabled(), x.requires_grad))
        return x * weight

    offered = {"compile": peers.Peer(noting), "liger": peers.Peer(None, "not installed")}
    monkeypatch.setattr(peers, "implementations", lambda *arguments: offered)
    assert warm.warm((NORM, SMALL, NORM.passes), "cpu") == []
    assert seen == [(False, False), (True, True)]


def test_a_failure_is_told_and_the_rest_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def broken(**given: Any) -> None:
        raise RuntimeError("no kernel\nand a long trace")

    step = (NORM, SMALL, NORM.passes)
    monkeypatch.setattr(peers, "implementations", lambda *arguments: {"compile": peers.Peer(broken)})
    assert warm.warm(step, "cpu") == [f"compile {which}: RuntimeError: no kernel" for which in NORM.passes]
    monkeypatch.setattr(warm, "steps", lambda *arguments: [step, (NORM, Case("", ()), NORM.passes), step])
    warm.work(["rms_norm"], "cpu", 0, 1, tmp_path)
    printed = capsys.readouterr().out
    assert printed.count("no kernel") == 4
    assert printed.count(" s  rms_norm") == 3


def test_processes_share_the_cases_and_one_that_fails_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[list[str]] = []

    def run_all(jobs: dict[str, Job], deadline: float, at_once: int) -> dict[str, Ended]:
        started.extend(list(job.command) for job in jobs.values())
        return {name: Ended(index, "", 0.0, True) for index, name in enumerate(jobs)}

    monkeypatch.setattr(warm, "run_all", run_all)
    monkeypatch.setattr(warm, "_sees_cuda", lambda: True)
    warm.main(["--ops", "rms_norm", "--jobs", "3"])
    assert not any("--rest" in command for command in started)
    assert [command[command.index("--part") + 1] for command in started] == ["0", "1", "2"]
    assert "3 processes, of which 2 ended early" in capsys.readouterr().out
    found = warm.steps(["rms_norm"], "cuda")
    shares = [found[part::3] for part in range(3)]
    assert sorted(repr(step) for share in shares for step in share) == sorted(map(repr, found))


def test_each_process_leaves_out_what_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    done = frozenset(case_label("rms_norm", case) for case in NORM.bench_cases[1:]) | {"rms_norm latencies"}
    worked: list[Any] = []
    monkeypatch.setattr(warm, "run_all", lambda jobs, deadline, at_once: worked.extend(jobs.values()) or {})
    monkeypatch.setattr(warm, "_sees_cuda", lambda: True)
    monkeypatch.setattr(warm, "measured", lambda folder: done if folder == tmp_path else frozenset())
    monkeypatch.setattr(warm, "work", lambda *given: worked.append(given))
    warm.main(["--ops", "rms_norm", "--jobs", "1", "--rest", "--folder", str(tmp_path)])
    assert "1 cases in 1 processes" in capsys.readouterr().out
    (job,) = worked
    warm.main(job.command[job.command.index("fuselm.bench.warm") + 1 :])
    assert worked[-1][-1] == done


def test_large_tensors_and_matmuls_are_heavy() -> None:
    logits = Case("", (8192, 131072), "bfloat16", {}, {"targets": "int64"}, row_wise=False)
    assert warm.is_heavy((LOSS, logits, LOSS.passes))
    assert not warm.is_heavy((NORM, SMALL, NORM.passes))
    head = ops()["linear_cross_entropy"]
    assert warm.is_heavy((head, head.bench_cases[0], head.passes))


def test_only_so_many_have_a_turn_at_a_time(tmp_path: Path) -> None:
    entered, leave = threading.Semaphore(0), threading.Semaphore(0)

    def hold() -> None:
        with warm.turn(tmp_path, 2):
            entered.release()
            leave.acquire(timeout=30)

    held = [threading.Thread(target=hold) for _ in range(3)]
    for thread in held:
        thread.start()
    assert entered.acquire(timeout=30)
    assert entered.acquire(timeout=30)
    assert not entered.acquire(timeout=0.3)  # the third waits
    leave.release()
    assert entered.acquire(timeout=30)
    leave.release(2)
    for thread in held:
        thread.join(30)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--ops", "rms_nrom"], "no op 'rms_nrom'"),
        (["--jobs", "0"], "at least 1"),
        (["--rest", "--device", "cpu"], "--rest is of a GPU's record; a CPU has none"),
    ],
)
def test_wrong_options_are_refused(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        warm.main(arguments)
    assert says in capsys.readouterr().err


def test_without_a_gpu_it_says_so_instead_of_failing_case_by_case(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(warm, "_sees_cuda", lambda: False)
    with pytest.raises(SystemExit) as ended:
        warm.main(["--ops", "softmax"])
    assert ended.value.code == 2
    assert "torch sees none; pass --device cpu" in capsys.readouterr().err
