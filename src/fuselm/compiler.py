"""Runs compilers: finds g++, tells one version from another, and turns a failed command into words. Stdlib only.

It knows neither sources nor keys: kernels/build.py and text/native.py do.

    run((str(find_host_compiler()), "-shared", "bpe.cpp"), output=path, log=log, title="bpe.cpp")
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fuselm.files import locked, partial_path


class BuildError(RuntimeError):
    """A build that cannot be done; the message says the rule, what was found, and what to do."""


def find_host_compiler() -> Path | None:
    """g++ on PATH."""
    found = shutil.which("g++")
    return Path(found) if found else None


@functools.cache
def version_text(compiler: Path) -> str:
    """What `compiler --version` prints; asked once a process, since it is on the way to every library."""
    return subprocess.run((str(compiler), "--version"), capture_output=True, text=True, check=False).stdout.strip()


def run(command: Sequence[str], *, output: Path, log: Path, title: str, verbose: bool = False) -> None:
    """Run a compiler or linker into a file of another name, then rename: a killed build leaves no half a library."""
    partial = partial_path(output)
    for folder in (output.parent, log.parent):
        folder.mkdir(parents=True, exist_ok=True)
    full = [*command, "-o", str(partial)]
    if verbose:
        print(" ".join(full), file=sys.stderr)
    finished = subprocess.run(full, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    log.write_text(" ".join(full) + "\n" + finished.stdout)
    if finished.returncode != 0:
        partial.unlink(missing_ok=True)
        lines = finished.stdout.splitlines()
        shown = [line for line in lines if re.search(r"error|undefined|cannot find", line)][:5] or lines[-5:]
        raise BuildError("\n  ".join([f"fuselm: {title} did not compile:", *shown, f"Full log: {log}"]))
    with partial.open("rb") as file:
        os.fsync(file.fileno())  # a library that a power cut has shortened would be found, and not load, ever after
    partial.replace(output)


@contextmanager
def build_lock(root: Path) -> Iterator[None]:
    """One build at a time in a folder of the cache: the processes of one job all reach their first call together."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        (root / "lock").touch()
    except OSError as error:
        raise BuildError(
            f"What fuselm compiles is kept in {root}, which cannot be written ({error.strerror}). "
            "Set FUSELM_CACHE_DIR to a folder that can."
        ) from error
    with locked(root / "lock", f"fuselm: waiting for another process that is building in {root}"):
        yield
