"""`fuselm doctor`: what this machine has, which ops run fused on it, which fall back, and what to do about it.

It looks and builds nothing. PyTorch and JAX are asked in processes of their own, so a broken install is a line in the
report and not a traceback, and no GPU memory is claimed. Exit code 0 when all is well, which a machine without a GPU
is; 1 when something is broken (a framework that does not import, a GPU that kernels cannot be built for).

    fuselm doctor            # tables on a terminal, plain lines in a pipe
    fuselm doctor --json     # the same report as one JSON object
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

HELP = """Say what this machine has, which ops run fused here, and what to do about the others.

It looks and builds nothing. The exit code is 1 when something is broken; a machine without a GPU is not.

Examples:

  fuselm doctor

  fuselm doctor --json
"""
PROBES = {
    "torch": (
        "import json, torch\n"
        "print(json.dumps(dict(version=torch.__version__, gpu=torch.cuda.is_available(),\n"
        "    detail=f'CUDA {torch.version.cuda} build' if torch.version.cuda else 'CPU build')))"
    ),
    "jax": (
        "import json, jax\n"
        "platforms = sorted({device.platform for device in jax.devices()})\n"
        "print(json.dumps(dict(version=jax.__version__, gpu='gpu' in platforms,\n"
        "    detail='platforms: ' + ', '.join(platforms))))"
    ),
}
CUDA_BUILDS = {"torch": "a CUDA build of torch", "jax": 'jax with its CUDA plugin (the extra "jax[cuda13]")'}


@dataclass(frozen=True)
class Framework:
    """PyTorch or JAX as it answered; `version` is empty when it is not installed or does not import."""

    name: str
    version: str = ""
    detail: str = "not installed"
    gpu: bool = False
    error: str = ""


@dataclass(frozen=True)
class Machine:
    """What kernels are built with and for. `build_error` is why they cannot be built here, empty when they can."""

    gpus: list[dict[str, str]]
    architectures: tuple[str, ...]
    driver: str
    nvcc: str
    host_compiler: str
    cache_dir: str
    built: dict[str, bool]
    build_error: str
    tokenizer: str = ""


@dataclass(frozen=True)
class Verdict:
    """How one op runs in one framework: fused, fallback, absent (the framework or the op is not there) or broken."""

    op: str
    framework: str
    runs: str
    why: str
    remedy: str = ""


@dataclass(frozen=True)
class Report:
    """Everything doctor says; the fields are those of `--json`."""

    fuselm: str
    python: str
    platform: str
    machine: Machine
    frameworks: list[Framework]
    ops: list[Verdict]
    problems: list[str]


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Look; the help text is HELP."""
    report = examine()
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(report), indent=2))
    else:
        _render(report, Console())
    raise typer.Exit(1 if report.problems else 0)


# --- looking ---------------------------------------------------------------------------------------------------------


def examine() -> Report:
    """Look at everything; slow only as far as importing torch and jax is."""
    from fuselm import __version__

    with ThreadPoolExecutor(len(PROBES)) as pool:
        frameworks = list(pool.map(probe_framework, PROBES))
    machine = look_at_machine()
    verdicts: list[Verdict] = []
    problems: list[str] = []
    for op in _op_names(problems):
        verdicts += [judge(op, framework, machine) for framework in frameworks]
    problems += [f"{framework.name} does not import: {framework.error}" for framework in frameworks if framework.error]
    if machine.architectures and machine.build_error:  # a GPU that is merely too old falls back, as a CPU does
        problems.append(machine.build_error)
    python = f"{platform.python_version()} ({sys.executable})"
    return Report(__version__, python, platform.platform(), machine, frameworks, verdicts, problems)


def probe_framework(name: str) -> Framework:
    """Ask a framework about itself in a process of its own."""
    if importlib.util.find_spec(name) is None:
        return Framework(name)
    # Without this JAX would take three quarters of a GPU's memory to answer which platform it is on.
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    # -P: the current folder is not on the path, so a jax.py in it is not taken for JAX.
    command = (sys.executable, "-P", "-c", PROBES[name])
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=True)
        return Framework(name, **json.loads(answer.stdout.splitlines()[-1]))
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines() or [f"exit status {error.returncode}"]
        return Framework(name, detail="does not import", error=lines[-1])
    except (subprocess.TimeoutExpired, ValueError, IndexError) as error:
        return Framework(name, detail="does not import", error=f"no answer: {error}")


def look_at_machine() -> Machine:
    """The GPUs, the compilers and the build cache."""
    from fuselm import compiler
    from fuselm.kernels import build, toolchain
    from fuselm.text import native

    found, build_error = toolchain.gpus(), ""
    architectures: tuple[str, ...] = ()
    try:
        architectures = build.detect_architectures()
        toolchain.find_compilers(architectures)
    except build.BuildError as error:
        build_error = str(error)
    nvcc, host = toolchain.find_nvcc(), compiler.find_host_compiler()
    nvcc_version = ".".join(map(str, toolchain.nvcc_version(nvcc))) if nvcc else ""
    return Machine(
        gpus=[{"name": gpu.name, "capability": f"{gpu.capability[0]}.{gpu.capability[1]}"} for gpu in found],
        architectures=architectures,
        driver=_driver_version() if found else "",
        nvcc=f"{nvcc_version} ({nvcc})" if nvcc else "",
        host_compiler=compiler.version_text(host).partition("\n")[0] if host else "",
        cache_dir=str(build.cache_dir()),
        built={which: build.is_built(which) for which in build.LIBRARIES},
        build_error=build_error,
        tokenizer=_tokenizer_state(host is not None, native.is_built()),
    )


def _tokenizer_state(has_compiler: bool, is_built: bool) -> str:
    if not has_compiler:
        return "plain Python, hundreds of times slower: install g++ 11 or newer"
    return "C++, built" if is_built else "C++, built on first use"


def _driver_version() -> str:
    command = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        kernel_module = Path("/proc/driver/nvidia/version")  # containers often come without nvidia-smi
        text = kernel_module.read_text() if kernel_module.exists() else ""
        match = re.search(r"Kernel Module.*?(\d+\.\d+(?:\.\d+)?)", text)
        return match[1] if match else "unknown"


def _op_names(problems: list[str]) -> list[str]:
    try:
        from fuselm.kernels.adamw import LIST_OPS
        from fuselm.kernels.spec import ops
    except ImportError as error:
        problems.append(f"The registry of ops does not import: {error}. Reinstall fuselm.")
        return []
    return sorted([*ops(), *LIST_OPS])


# --- judging ---------------------------------------------------------------------------------------------------------


def judge(op: str, framework: Framework, machine: Machine) -> Verdict:
    """Whether this op runs fused in this framework on this machine; the first obstacle is the one named."""
    runs, why, remedy = _obstacle(op, framework, machine) or _readiness(framework, machine)
    return Verdict(op, framework.name, runs, why, remedy)


def _obstacle(op: str, framework: Framework, machine: Machine) -> tuple[str, str, str] | None:
    from fuselm.kernels import build

    name = framework.name
    if framework.error:
        return "broken", f"{name} does not import", f"Reinstall {name}: {framework.error}"
    if not framework.version:
        return "absent", f"{name} is not installed", f"Install {name} to use fuselm from it."
    # One op, one stem: an op serves a framework exactly when it has a file there.
    if not (build.SOURCE_DIR / f"{name}_ops" / f"{op}.py").exists():
        return "absent", f"the op has no {name} version", ""
    if not machine.gpus:
        return "fallback", "no NVIDIA GPU is visible", "Fine on a CPU; fused kernels want a GPU of sm_75 or newer."
    if not machine.architectures:
        return "fallback", "the GPU is older than sm_75", "Use a GPU of compute capability 7.5 or newer."
    if not framework.gpu:
        why = f"{name} {framework.version} does not see the GPU ({framework.detail})"
        return "fallback", why, f"Install {CUDA_BUILDS[name]}."
    return None


def _readiness(framework: Framework, machine: Machine) -> tuple[str, str, str]:
    if machine.built[framework.name]:
        return "fused", "kernels are built", ""
    if machine.build_error:
        return "broken", "kernels cannot be built here", machine.build_error
    return "fused", "kernels are built on first use", "`fuselm build` builds them now."


# --- printing --------------------------------------------------------------------------------------------------------


def _facts(report: Report) -> Iterator[tuple[str, str]]:
    machine = report.machine
    yield "fuselm", report.fuselm
    yield "Python", report.python
    yield "platform", report.platform
    for framework in report.frameworks:
        yield framework.name, f"{framework.version} ({framework.detail})" if framework.version else framework.detail
    for gpu in machine.gpus:
        yield "GPU", f"{gpu['name']}, compute capability {gpu['capability']}, driver {machine.driver}"
    if not machine.gpus:
        yield "GPU", "none visible"
    yield "nvcc", machine.nvcc or "not found"
    yield "g++", machine.host_compiler or "not found"
    yield "tokenizer", machine.tokenizer
    yield "build cache", machine.cache_dir
    built = [which for which, is_built in machine.built.items() if is_built]
    yield "libraries", f"built for this source: {', '.join(built)}" if built else "none built for this source"


def _alike(verdicts: list[Verdict]) -> Iterator[tuple[tuple[str, ...], str, Verdict]]:
    """Ops, frameworks, and what is the same of them: nearly always one obstacle is that of all."""
    ops: dict[Verdict, list[str]] = {}
    for verdict in verdicts:
        ops.setdefault(dataclasses.replace(verdict, op=""), []).append(verdict.op)
    frameworks: dict[tuple[Verdict, tuple[str, ...]], list[str]] = {}
    for shared, names in ops.items():
        frameworks.setdefault((dataclasses.replace(shared, framework=""), tuple(names)), []).append(shared.framework)
    for (shared, together), where in frameworks.items():
        yield together, " and ".join(where), shared


def _render(report: Report, console: Console) -> None:
    rows = [(", ".join(ops), where, one.runs, one.why, one.remedy) for ops, where, one in _alike(report.ops)]
    if console.is_terminal:
        names = max((len(verdict.op) for verdict in report.ops), default=0) + 1  # one and its comma stay whole
        facts = Table("", "", show_header=False)
        ops = Table(Column("ops", width=max(names, console.width // 3)), "in", "run", "why", "what to do")
        for fact in _facts(report):
            facts.add_row(*map(Text, fact))  # Text: a bracket in a path is not markup
        for row in rows:
            ops.add_row(*map(Text, row))
        console.print(facts, ops)
    else:
        for name, value in _facts(report):
            typer.echo(f"{name}: {value}")
        for together, where, runs, why, remedy in rows:
            typer.echo(f"ops in {where}: {runs} ({why}){'. ' + remedy if remedy else ''}")
            typer.echo(f"  {together}")
    for problem in report.problems:
        typer.echo(f"problem: {problem}")
    typer.echo("something is broken: see above" if report.problems else "all is well")
