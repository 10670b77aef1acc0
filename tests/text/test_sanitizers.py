"""bpe.cpp reads and writes only what is its own, and its threads nothing that another one writes: all of it watched."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from fuselm import compiler
from tests.text.samples import needs_compiler

LIBRARIES = {"address,undefined": ("libasan.so", "libubsan.so"), "thread": ("libtsan.so",)}
# The thread sanitizer wants memory where it expects it, and does not start where the system's random addresses are not.
PYTHONS = ((sys.executable,), ("setarch", platform.machine(), "-R", sys.executable))


def run(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    except FileNotFoundError as error:
        return subprocess.CompletedProcess(command, 127, "", str(error))


def runtime_libraries(sanitizers: str) -> list[Path]:
    """What a sanitized library needs loaded before anything else; libstdc++ too, whose exceptions are watched."""
    command = (str(compiler.find_host_compiler()), "-print-file-name=")
    found = [
        subprocess.run((command[0], command[1] + name), capture_output=True, text=True, check=True)
        for name in (*LIBRARIES[sanitizers], "libstdc++.so.6")
    ]
    return [Path(result.stdout.strip()) for result in found]


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("sanitizers", LIBRARIES)
def test_sanitizers_find_nothing(request: pytest.FixtureRequest, sanitizers: str) -> None:
    libraries = runtime_libraries(sanitizers)
    if not all(path.is_absolute() for path in libraries):
        pytest.skip("needs g++'s sanitizers")
    environment = dict(os.environ) | {
        "LD_PRELOAD": " ".join(map(str, libraries)),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python leaves much to the end of the process
        "PYTHONMALLOC": "malloc",  # so that the end of every bytes object is watched
        "OPENBLAS_NUM_THREADS": "1",  # threads of other libraries are not what is watched
        "FUSELM_CACHE_DIR": str(request.config.cache.mkdir("fuselm-text")),
    }
    python = next((one for one in PYTHONS if run((*one, "-c", ""), environment).returncode == 0), None)
    if python is None:
        pytest.skip("g++'s sanitizer does not start here")
    program = Path(__file__).with_name("under_sanitizers.py")
    finished = run((*python, str(program), sanitizers), environment)
    assert (finished.returncode, finished.stdout) == (0, "nothing found\n"), finished.stderr[-4000:]
