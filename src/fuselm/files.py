"""Files that are whole or not there, the user cache, and locks between processes. Stdlib only.

write_whole(Path("rows.json"), text)            # whoever reads it sees the old text or the new
with whole_file(Path("train.tokens")) as file:  # the same for what is written bit by bit
    file.write(header)
"""

from __future__ import annotations

import fcntl
import glob
import os
import platform
import secrets
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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

    A killed process may leave the hidden partial file behind, never a half-written `path`; whoever writes `path` next
    sweeps it up. Folders above it are made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    sweep(path)
    partial = partial_path(path)
    try:
        with partial.open("x+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # the rename must not reach the disk before the bytes
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def whole_folder(folder: Path, *, last: str) -> Iterator[Path]:
    """A folder inside `folder` whose files take their places there together when the block ends well, `last` last.

    A file system cannot replace several files at once. This comes close: everything is on the disk before the first
    rename, so only a process killed between two renames leaves old and new side by side, and `last`, still the old one
    then, can tell what belongs together.
    """
    with not_left_empty(folder):
        folder.mkdir(parents=True, exist_ok=True)
        sweep(folder / "files")
        staging = partial_path(folder / "files")
        try:
            staging.mkdir()
            yield staging
            for name in sorted((path.name for path in staging.iterdir()), key=lambda name: (name == last, name)):
                (staging / name).replace(folder / name)
        finally:
            shutil.rmtree(staging, ignore_errors=True)


@contextmanager
def not_left_empty(folder: Path) -> Iterator[None]:
    """Remove the folder again, and those above it, where they came with the block and nothing came into them."""
    absent = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        yield
    finally:
        with suppress(OSError):  # one is not empty, as it should be
            for path in absent:
                path.rmdir()


def sync_folder(folder: Path) -> None:
    """Put the names in a folder on the disk, which a file's own fsync does not."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def partial_path(path: Path) -> Path:
    """Where something is written until it is whole: beside `path`, so that the rename stays on one file system.

    A new name at each call, with the machine and the process in it, so that whoever finds it can tell a writer that is
    still at work from one that was killed.
    """
    return path.with_name(f".{path.name}.{_machine()}-{os.getpid()}-{secrets.token_hex(4)}.partial")


def sweep(path: Path) -> None:
    """Remove what processes of this machine that were killed while they wrote `path` have left behind."""
    for partial in path.parent.glob(f".{glob.escape(path.name)}.{glob.escape(_machine())}-*.partial"):
        pid = partial.name.split("-")[-2]
        if pid.isdigit() and not _is_running(int(pid)):
            shutil.rmtree(partial) if partial.is_dir() else partial.unlink(missing_ok=True)


def _machine() -> str:
    """The machine's name: containers that share a folder do not share process numbers."""
    return platform.node().replace("/", "_") or "here"


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
