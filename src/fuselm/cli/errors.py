"""How verbs end when something is wrong: a sentence on stderr and an exit code, no traceback.

with told():
    ...                    # ValueError, OSError and the like: exit code 1. Ctrl-C: 130
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer


@contextmanager
def told() -> Iterator[None]:
    """Turn what users can cause into words. Anything else is a bug, and keeps its traceback."""
    with warnings.catch_warnings():
        warnings.simplefilter("default", UserWarning)
        warnings.simplefilter("default", RuntimeWarning)
        warnings.showwarning = _show_warning
        try:
            yield
        except KeyboardInterrupt:
            typer.echo("interrupted: files are as they were", err=True)
            raise typer.Exit(130) from None
        except BrokenPipeError:
            raise  # whoever reads has had enough, as `head` does: typer ends without a word
        except (ValueError, OSError, ImportError, MemoryError) as error:
            typer.echo(f"error: {_words(error)}", err=True)
            raise typer.Exit(1) from None


def _words(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.filename}: {error.strerror}"
    return str(error) or type(error).__name__


def _show_warning(message: Warning | str, *rest: Any, **more: Any) -> None:
    typer.echo(f"warning: {message}", err=True)
