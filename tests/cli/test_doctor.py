"""`fuselm doctor`: the verdict for each kind of machine, its words, its exit code, and one real run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fuselm import compiler
from fuselm.cli import app, doctor
from fuselm.cli.doctor import Framework, Machine
from fuselm.kernels import build, toolchain
from fuselm.kernels.adamw import LIST_OPS
from fuselm.kernels.spec import ops
from fuselm.text import native

OP = sorted(ops())[0]
CPU_TORCH = Framework("torch", "2.13.0+cpu", "CPU build")
GPU_TORCH = Framework("torch", "2.13.0", "CUDA 13.0 build", gpu=True)
NO_NVCC = "Building the kernels needs nvcc; none was found."


def machine(
    gpu: bool = True, architectures: tuple[str, ...] = ("90a",), built: bool = False, error: str = ""
) -> Machine:
    return Machine(
        gpus=[{"name": "NVIDIA H200", "capability": "9.0"}] if gpu else [],
        architectures=architectures if gpu else (),
        driver="580.1" if gpu else "",
        nvcc="" if error else "13.0 (nvcc)",
        host_compiler="g++ 12.2.0",
        cache_dir="cache",
        built=dict.fromkeys(build.LIBRARIES, built),
        build_error=error,
    )


def pretend(monkeypatch: pytest.MonkeyPatch, machine: Machine, torch: Framework) -> None:
    frameworks = {"torch": torch, "jax": Framework("jax")}
    monkeypatch.setattr(doctor, "probe_framework", frameworks.__getitem__)
    monkeypatch.setattr(doctor, "look_at_machine", lambda: machine)


@pytest.mark.parametrize(
    ("machine", "torch", "runs", "why", "remedy"),
    [
        (machine(gpu=False), CPU_TORCH, "fallback", "no NVIDIA GPU", "sm_75 or newer"),
        (machine(gpu=False, error=NO_NVCC), CPU_TORCH, "fallback", "no NVIDIA GPU", "Fine on a CPU"),
        (machine(architectures=()), GPU_TORCH, "fallback", "older than sm_75", "7.5 or newer"),
        (machine(), CPU_TORCH, "fallback", "does not see the GPU (CPU build)", "Install a CUDA build of torch"),
        (machine(), GPU_TORCH, "fused", "built on first use", "fuselm build"),
        (machine(built=True), GPU_TORCH, "fused", "kernels are built", ""),
        (machine(error=NO_NVCC), GPU_TORCH, "broken", "cannot be built", "needs nvcc"),
        (machine(), Framework("torch"), "absent", "not installed", "Install torch"),
        (machine(), Framework("torch", error="ImportError: x"), "broken", "does not import", "ImportError: x"),
    ],
)
def test_verdict_names_the_first_obstacle_and_its_remedy(machine, torch, runs, why, remedy) -> None:
    verdict = doctor.judge(OP, torch, machine)
    assert verdict.runs == runs
    assert why in verdict.why
    assert remedy in verdict.remedy


def test_op_without_a_version_for_the_framework_is_absent() -> None:
    verdict = doctor.judge("no_such_op", GPU_TORCH, machine())
    assert (verdict.runs, verdict.why) == ("absent", "the op has no torch version")


@pytest.mark.parametrize("op", [*ops(), *LIST_OPS])
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_every_op_runs_fused_in_both_frameworks_where_all_is_there(op: str, framework: str) -> None:
    seen = Framework(framework, "1.0", "with CUDA", gpu=True)
    assert doctor.judge(op, seen, machine(built=True)) == doctor.Verdict(op, framework, "fused", "kernels are built")


def test_ops_that_run_alike_share_a_line(monkeypatch) -> None:
    pretend(monkeypatch, machine(gpu=False), CPU_TORCH)
    lines = CliRunner().invoke(app, ["doctor"]).output.splitlines()
    told = [at for at, line in enumerate(lines) if line.startswith("ops in ")]
    assert [lines[at].partition(" (")[0] for at in told] == ["ops in torch: fallback", "ops in jax: absent"]
    for at in told:  # ops over lists stand among the others
        assert lines[at + 1].strip().split(", ") == sorted([*ops(), "adamw", "global_norm"])
    assert sum("Fine on a CPU" in line for line in lines) == 1


def test_frameworks_that_run_alike_share_a_line(monkeypatch) -> None:
    pretend(monkeypatch, machine(gpu=False), CPU_TORCH)
    monkeypatch.setattr(doctor, "probe_framework", lambda name: Framework(name, "1.0", "CPU build"))
    lines = CliRunner().invoke(app, ["doctor"]).output.splitlines()
    [line] = [line for line in lines if line.startswith("ops in ")]
    assert line.startswith("ops in torch and jax: fallback (no NVIDIA GPU is visible). Fine on a CPU;")


def test_ops_that_run_otherwise_have_a_line_of_their_own(monkeypatch) -> None:
    pretend(monkeypatch, machine(built=True), GPU_TORCH)
    judge = doctor.judge

    def judged(op: str, framework: Framework, machine: Machine) -> doctor.Verdict:
        if (op, framework.name) == ("rope", "torch"):
            return doctor.Verdict(op, "torch", "absent", "the op has no torch version")
        return judge(op, framework, machine)

    monkeypatch.setattr(doctor, "judge", judged)
    lines = CliRunner().invoke(app, ["doctor"]).output.splitlines()
    at = lines.index("ops in torch: absent (the op has no torch version)")
    assert lines[at + 1].strip() == "rope"
    fused = lines[lines.index("ops in torch: fused (kernels are built)") + 1]
    assert "rope" not in fused.strip().split(", ")


def test_healthy_cpu_machine_exits_with_zero_and_prints_plain_lines(monkeypatch) -> None:
    pretend(monkeypatch, machine(gpu=False), CPU_TORCH)
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0
    assert "ops in torch: fallback (no NVIDIA GPU is visible)" in result.output
    assert "all is well" in result.output
    assert not set("│┃━─") & set(result.output)


def test_gpu_that_kernels_cannot_be_built_for_is_a_problem(monkeypatch) -> None:
    pretend(monkeypatch, machine(error=NO_NVCC), GPU_TORCH)
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert f"problem: {NO_NVCC}" in result.output


def test_json_says_the_same_as_the_text(monkeypatch) -> None:
    pretend(monkeypatch, machine(built=True), GPU_TORCH)
    result = CliRunner().invoke(app, ["doctor", "--json"])
    report = json.loads(result.output)
    assert result.exit_code == 0
    assert report["problems"] == []
    assert report["machine"]["gpus"] == [{"name": "NVIDIA H200", "capability": "9.0"}]
    assert {"op": OP, "framework": "torch", "runs": "fused", "why": "kernels are built", "remedy": ""} in report["ops"]


def test_tables_on_a_terminal_show_brackets_as_they_are(monkeypatch, capsys) -> None:
    pretend(monkeypatch, machine(), Framework("torch", "2.13.0", "[odd]"))
    console = doctor.Console(force_terminal=True, width=200)
    doctor._render(doctor.examine(), console)
    assert "2.13.0 ([odd])" in capsys.readouterr().out


def test_names_of_ops_stay_whole_in_eighty_columns(monkeypatch, capsys) -> None:
    pretend(monkeypatch, machine(gpu=False), CPU_TORCH)
    monkeypatch.setattr(doctor, "probe_framework", lambda name: Framework(name, "1.0", "CPU build"))
    doctor._render(doctor.examine(), doctor.Console(force_terminal=True, width=80))
    words = capsys.readouterr().out.replace(",", "").split()
    assert [words.count(op) for op in [*ops(), *LIST_OPS]] == [1] * len([*ops(), *LIST_OPS])
    assert words.count("fallback") == 1
    assert "newer." in words  # the end of what to do


def test_framework_that_does_not_import_is_reported_and_not_raised(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('libcudart.so.13: cannot open')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = doctor.probe_framework("torch")
    assert (found.version, found.detail) == ("", "does not import")
    assert found.error == "ImportError: libcudart.so.13: cannot open"


def test_framework_that_is_not_installed_is_absent(monkeypatch) -> None:
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    assert doctor.probe_framework("jax") == Framework("jax")


def test_machine_is_looked_at_with_the_tools_it_has(pretend_compilers, monkeypatch) -> None:
    monkeypatch.setattr(toolchain, "gpus", lambda: [toolchain.Gpu("H200", (9, 0))])
    monkeypatch.setattr(doctor, "_driver_version", lambda: "580.1")
    seen = doctor.look_at_machine()
    assert (seen.gpus, seen.architectures) == ([{"name": "H200", "capability": "9.0"}], ("90a",))
    assert seen.nvcc.startswith("13.0 (")
    assert seen.build_error == ""
    assert seen.built == {"core": False, "torch": False, "jax": False}


def test_gpu_that_is_too_old_falls_back_and_nothing_is_broken(pretend_compilers, monkeypatch) -> None:
    monkeypatch.setattr(toolchain, "gpus", lambda: [toolchain.Gpu("V100", (7, 0))])
    monkeypatch.setattr(doctor, "_driver_version", lambda: "580.1")
    seen = doctor.look_at_machine()
    assert "V100" in seen.build_error
    pretend(monkeypatch, seen, GPU_TORCH)
    report = doctor.examine()
    assert report.problems == []
    assert {verdict.runs for verdict in report.ops} == {"fallback", "absent"}


def test_real_command_reports_every_op_in_both_frameworks() -> None:
    # The GPU is hidden, so the answer is a CPU machine's wherever this runs.
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "fuselm", "doctor", "--json"]
    answer = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    report = json.loads(answer.stdout)
    assert {(verdict["op"], verdict["framework"]) for verdict in report["ops"]} == {
        (op, framework) for op in (*ops(), *LIST_OPS) for framework in ("torch", "jax")
    }
    assert {verdict["runs"] for verdict in report["ops"]} <= {"fallback", "absent"}


def test_the_tokenizer_says_how_it_runs_here(pretend_compilers, monkeypatch) -> None:
    assert doctor.look_at_machine().tokenizer == "C++, built on first use"
    native.build()
    assert doctor.look_at_machine().tokenizer == "C++, built"
    monkeypatch.setattr(compiler, "find_host_compiler", lambda: None)
    assert "install g++" in doctor.look_at_machine().tokenizer
