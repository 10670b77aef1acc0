"""Paths as people type them: a shell expands ~ at the beginning of a word alone, so --out=~/runs arrives as it is.

    out: Annotated[Path, typer.Option(parser=typed_path)]

Taken as it is, that is a folder whose name is a tilde, and `rm -r ~` removes another one.
"""

from __future__ import annotations

import os
from pathlib import Path


def typed_path(text: str | Path) -> Path:
    """The path that somebody means."""
    return Path(os.path.expanduser(text))


def typed_corpus(text: str) -> str:
    """A corpus's name as it is, or the path that somebody means."""
    return os.path.expanduser(text)
