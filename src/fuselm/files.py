"""Files that are whole or not there, the user cache, and locks between processes. Stdlib only.

write_whole(Path("rows.json"), text)            # whoever reads it sees the old text or the new
with whole_file(Path("train.tokens")) as file:  # the same for what is written bit by bit
    file.write(header)
"""

from __future__ import annotations

import fcntl
import glob
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


def cache_dir() -> Path:
    """The user cache: `$FUSELM_CACHE_DIR`, else `$XDG_CACHE_HOME/fuselm`, else `~/.cache/fuselm`. It need not exist."""
    if configured := os.environ.get("FUSELM_CACHE_DIR"):
        return Path(configured)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "fuselm"


def write_whole(path: Path, text: str | bytes) -> None:
    """Write beside the file, then rename."""
    with whole_file(path) as file:
        file.write(text.encode() if isinstance(text, str) else text)


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write, read and seek in that takes its name when the block ends well; otherwise nothing is left of it.

    A killed process may leave the hidden partial file behind, never a half-written `path`; `remove_partials` is the
    broom.
    """
    partial = partial_path(path)
    try:
        with partial.open("w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # the rename must not reach the disk before the bytes
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def partial_path(path: Path) -> Path:
    """Where this process writes `path` until it is whole: beside it, so that the rename stays on one file system."""
    return path.with_name(f".{path.name}.{os.getpid()}.partial")


def remove_partials(path: Path) -> None:
    """Remove what processes that were killed while they wrote `path` have left behind."""
    for partial in path.parent.glob(f".{glob.escape(path.name)}.*.partial"):
        pid = partial.name.split(".")[-2]
        if not (pid.isdigit() and _is_running(int(pid))):
            partial.unlink(missing_ok=True)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # somebody else's, and alive
    return True


@contextmanager
def locked(path: Path, waiting: str) -> Iterator[None]:
    """Hold a lock that other processes respect; whoever has to wait says why on stderr."""
    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(waiting, file=sys.stderr)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
