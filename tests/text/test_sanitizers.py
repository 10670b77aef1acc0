"""bpe.cpp reads and writes only what is its own: random bytes, with every memory access watched."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fuselm import compiler
from tests.text.samples import needs_compiler


def runtime_libraries() -> list[Path]:
    """What a sanitized library needs loaded before anything else; libstdc++ too, whose exceptions are watched."""
    names = ("libasan.so", "libubsan.so", "libstdc++.so.6")
    command = (str(compiler.find_host_compiler()), "-print-file-name=")
    found = [
        subprocess.run((command[0], command[1] + name), capture_output=True, text=True, check=True) for name in names
    ]
    return [Path(result.stdout.strip()) for result in found]


@pytest.mark.slow
@needs_compiler
def test_random_bytes_touch_no_foreign_memory(request: pytest.FixtureRequest) -> None:
    libraries = runtime_libraries()
    if not all(path.is_absolute() for path in libraries):
        pytest.skip("needs g++'s sanitizers")
    environment = dict(os.environ) | {
        "LD_PRELOAD": " ".join(map(str, libraries)),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python leaves much to the end of the process
        "PYTHONMALLOC": "malloc",  # so that the end of every bytes object is watched
        "FUSELM_CACHE_DIR": str(request.config.cache.mkdir("fuselm-text")),
    }
    program = Path(__file__).with_name("under_sanitizers.py")
    finished = subprocess.run(
        (sys.executable, str(program)), env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert (finished.returncode, finished.stdout) == (0, "nothing found\n"), finished.stderr[-4000:]
