"""Paths as people type them: a shell expands ~ at the beginning of a word alone, so --out=~/runs arrives as it is.

    out: Annotated[Path, typer.Option(parser=typed_path)]

Taken as it is, that is a folder whose name is a tilde, and `rm -r ~` removes another one.
"""

from __future__ import annotations

import os
from pathlib import Path

import typer


def typed_path(text: str | Path) -> Path:
    """The path that somebody means."""
    return Path(os.path.expanduser(_something(text)))


def typed_corpus(text: str) -> str:
    """A corpus's name as it is, or the path that somebody means."""
    return os.path.expanduser(str(_something(text)))


def _something(text: str | Path) -> str | Path:
    """Refuse nothing, which Path takes for the current folder: so much is left of a variable that is not set."""
    if text == "":
        raise typer.BadParameter("a name or a path is not empty; got ''. Is a variable not set? This folder is `.`.")
    return text


def check_writable(folder: Path, what: str) -> None:
    """Refuse before the work what could not be written after it; `what` is the option and what it names."""
    target = folder.resolve()
    there = next(path for path in (target, *target.parents) if path.exists())
    if not there.is_dir():
        raise ValueError(f"{what}; {there} is a file. Name another.")
    if not os.access(there, os.W_OK):
        raise ValueError(f"{what} that can be written; {there} cannot. Name another.")
