"""What tests of several rooms share: a build cache of their own, compilers that only pretend, options, and an
emulated GPU.

The pretended nvcc and g++ are shell scripts that note each call and write an output file, so the rules of the build
(keys, reuse, locks, messages) are tested in milliseconds and on machines without a CUDA toolkit.

    pytest -m gpu --of-op softmax --outcomes told.jsonl     # as fuselm.bench.gpu_tests runs them; "-" is of no op
    pytest --emulated -k rope tests/kernels/test_generic_torch.py   # tests on a CPU are then of the CUDA sources
    pytest --emulated --sm 80 -k rope tests/kernels/test_generic_torch.py   # of what older GPUs run instead
"""

from __future__ import annotations

import gc
import json
import os
import signal
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fuselm import compiler
from fuselm.bench.owners import NO_OP, is_huge, op_of_test
from fuselm.bench.warm import turn
from fuselm.kernels.spec import op_names

# The tensors here are small: a second thread costs more than it does, on a busy machine several times as much. Read
# when torch is loaded, which is later, and by the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell that runs tests in the background (`make test &` in a script) has them ignore Ctrl-C, and the processes that
# they start to be interrupted would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Processes that may run a huge test at the same time: one takes up to 35 GB of a GPU's memory.
HUGE_AT_ONCE = 2

# The garbage collector looks through all there is, again and again, and sixteen thousand tests, torch and JAX are a lot
# to look through: a tenth of the time of all tests went there, and seconds for one that calls it.
GARBAGE = (20_000, 20, 20)


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GARBAGE)


# ---- options -------------------------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fuselm")
    group.addoption("--of-op", metavar="OP", help=f"only the tests of this op; {NO_OP!r} for those of none")
    group.addoption("--emulated", action="store_true", help="run the kernels' own sources on this CPU, see emulated.py")
    group.addoption(
        "--sm", type=int, default=90, metavar="75|80|90", help="as what GPU they are emulated; 90 unless given"
    )
    group.addoption("--outcomes", metavar="FILE", help="a file that gets a line of JSON when a test begins and ends")


def pytest_configure(config: pytest.Config) -> None:
    if path := config.getoption("--outcomes"):
        config.pluginmanager.register(Outcomes(Path(path)))
    if config.getoption("--emulated"):
        from tests.kernels import emulated

        architecture, there = config.getoption("--sm"), emulated.ARCHITECTURES
        if architecture not in there:
            raise pytest.UsageError(f"--sm is one of {', '.join(map(str, there))}; got {architecture}.")
        emulated.load(architecture)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    op, names = config.getoption("--of-op"), op_names()
    if op not in (None, *names, NO_OP):
        raise pytest.UsageError(f"--of-op is one of {', '.join(names)} or {NO_OP}; got {op!r}.")

    def is_wanted(item: pytest.Item) -> bool:
        there = config.getoption("--emulated") or "emulated" not in item.keywords
        return there and (op is None or op_of_test(item.nodeid, names) == op)

    config.hook.pytest_deselected(items=[item for item in items if not is_wanted(item)])
    items[:] = [item for item in items if is_wanted(item)]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Let a huge test wait for its turn among the processes of this user, whoever has started them."""
    if not is_huge(item.nodeid):
        return (yield)
    folder = Path(tempfile.gettempdir()) / f"fuselm-huge-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    with turn(folder, HUGE_AT_ONCE):
        return (yield)


class Outcomes:
    """Writes what becomes of each test, at once: a process that is ended has told what it found until then."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.tell(test=nodeid, outcome="begun")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        skip = {"reason": reason_of(report)} if report.skipped else {}
        self.tell(test=report.nodeid, outcome=report.outcome, **skip)

    def tell(self, **line: Any) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def reason_of(report: pytest.TestReport) -> str:
    """Why a test was skipped."""
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ") or "no reason"
    return getattr(report, "wasxfail", "") or "no reason"


# ---- an emulated GPU -----------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def emulated_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With --emulated a large or a small GPU, by the test's name: kernels for few rows and for many are both run."""
    if not request.config.getoption("--emulated"):
        return
    from tests.kernels import emulated

    sizes = list(emulated.MULTIPROCESSORS)
    size = sizes[zlib.crc32(request.node.nodeid.encode()) % len(sizes)]
    emulated.use(size)
    facts = SimpleNamespace(multi_processor_count=emulated.MULTIPROCESSORS[size])
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: facts)


# ---- compilers that pretend ----------------------------------------------------------------------------------------

COMPILER = """#!/bin/sh
if [ "$1" = --version ]; then echo "{version}"; exit 0; fi
echo "$*" >> "{log}"
{extra}
while [ $# -gt 1 ]; do if [ "$1" = -o ]; then echo output > "$2"; fi; shift; done
"""


class PretendCompilers:
    """nvcc and g++ as scripts in a folder; `calls` is what they were called with."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.log = folder, folder / "calls.log"
        (folder / "bin").mkdir(parents=True)
        self.install("nvcc")
        self.install("g++", version="g++ 12.2.0")

    def install(
        self, name: str, version: str = "Cuda compilation tools, release 13.0, V13.0.88", extra: str = ""
    ) -> None:
        script = self.folder / "bin" / name
        script.write_text(COMPILER.format(version=version, log=self.log, extra=extra))
        script.chmod(0o755)
        compiler.version_text.cache_clear()

    @property
    def calls(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []


@pytest.fixture
def build_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty build cache that only this test sees."""
    monkeypatch.setenv("FUSELM_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def pretend_compilers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, build_cache: Path) -> PretendCompilers:
    """Pretended compilers that are found before any real ones, and an empty build cache."""
    compilers = PretendCompilers(tmp_path / "toolkit")
    monkeypatch.setenv("CUDA_HOME", str(compilers.folder))
    monkeypatch.setenv("PATH", f"{compilers.folder / 'bin'}{os.pathsep}{os.environ['PATH']}")
    return compilers
