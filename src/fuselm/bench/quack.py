"""QuACK's counterparts of the ops, by its public functions with their defaults.

Knows their signatures and which cases they can do; imports QuACK only when it is asked for.

    call = find("softmax", case, "cuda")      # raises CannotDo with what is missing
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from fuselm.bench.peer import CannotDo, Op, cast_mode, need_gpu, need_known, need_plain_softmax
from fuselm.kernels import rms_norm
from fuselm.kernels.spec import Case


def find(op: str, case: Case, device: str) -> Op:
    """QuACK's implementation of a case."""
    need_gpu(device)
    if op not in _QUACK:
        raise CannotDo(f"no counterpart of {op} is wired up")
    return _QUACK[op](case)


def _rms_norm(case: Case) -> Op:
    if cast_mode(case) != "gemma" and case.dtype != "float32":
        raise CannotDo("it multiplies before it rounds; the case rounds first")
    rmsnorm = import_module("quack").rmsnorm
    eps, offset = case.options.get("eps") or rms_norm.DEFAULT_EPS, case.options.get("offset", 0.0)
    return lambda x, weight=None, residual=None, **_: rmsnorm(
        x, weight, residual=residual, eps=eps, prenorm=residual is not None, weight_offset=offset
    )


def _softmax(case: Case) -> Op:
    need_plain_softmax(case)
    softmax = import_module("quack").softmax
    return lambda x, **_: softmax(x.flatten(0, -2)).view(x.shape)


def _cross_entropy(case: Case) -> Op:
    need_known(case, ("ignore_index", "reduction"))
    loss = import_module("quack").cross_entropy
    return lambda logits, targets, **options: loss(logits.flatten(0, -2), targets.flatten(), **options)


_QUACK: dict[str, Callable[[Case], Op]] = {
    "rms_norm": _rms_norm,
    "softmax": _softmax,
    "cross_entropy": _cross_entropy,
}
