"""What tests of several rooms share: a build cache of their own and compilers that only pretend.

The pretended nvcc and g++ are shell scripts that note each call and write an output file, so the rules of the build
(keys, reuse, locks, messages) are tested in milliseconds and on machines without a CUDA toolkit.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fuselm import compiler

# The tensors here are small: a second thread costs more than it does, on a busy machine several times as much. Read
# when torch is loaded, which is later, and by the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

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
