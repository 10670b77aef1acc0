"""What an implementation says of itself to be measured, and what peers ask of a case before they say they can do it.

Knows the registry's words; neither calls nor times. peers.py lists who is measured.

    need_known(case, ("eps",))
    return Peer(lambda x, **_: theirs(x), overwrites=("x",))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fuselm.kernels.spec import Case

Op = Callable[..., Any]

PASSES = ("forward", "backward", "both")


@dataclass(frozen=True)
class Peer:
    """One implementation of a case; `call` is None when it cannot do it, and `note` says why."""

    call: Op | None
    note: str = ""
    passes: tuple[str, ...] = PASSES  # those it can be timed in; `note` says why not in others
    overwrites: tuple[str, ...] = ()  # inputs that it writes into when a gradient is wanted
    in_place: bool = False  # True: it writes into them without one as well
    capture: bool = True  # False: it waits for the GPU in the middle, which no CUDA graph can hold
    compares: bool = True  # False: what it returns is not the op's result


class CannotDo(Exception):
    """A peer has no counterpart of this case; the message says what is missing."""


def need_gpu(device: str) -> None:
    """Refuse anything but a GPU."""
    if device != "cuda":
        raise CannotDo("it has kernels for GPUs alone")


def need_width(width: int, widest: int) -> None:
    """Refuse rows that are too long."""
    if width > widest:
        raise CannotDo(f"it takes rows of at most {widest}; the case's have {width}")


def need_plain_softmax(case: Case) -> None:
    """Refuse a softmax with a mask or a scale."""
    if "mask" in case.tensors or case.options.get("causal") or case.options.get("scale", 1.0) != 1.0:
        raise CannotDo("it has no mask, no causal and no scale")


def need_known(case: Case, known: Sequence[str]) -> None:
    """Refuse options that are not known."""
    if unknown := [name for name in case.options if name not in known]:
        raise CannotDo(f"it has no {', '.join(unknown)}")


def cast_mode(case: Case) -> str:
    """In which order a norm rounds and multiplies."""
    return str(case.options.get("cast_mode", "gemma"))
