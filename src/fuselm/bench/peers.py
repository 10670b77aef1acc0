"""Who is measured: fuselm's op, torch's own kernel, the same under torch.compile, and Liger and QuACK where they are.

Knows how each peer is called and which cases it can do; times nothing. A peer that is not installed, or has nothing for
an op or a case, is there with a note that says so. Peers are called as their authors mean them to be: through their
public autograd functions with their defaults, in the rounding order of the case.

    for name, peer in implementations(op.name, case, "cuda").items():
        y = peer.call(**tensors, **case.options) if peer.call else peer.note
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fuselm.kernels.rms_norm import DEFAULT_EPS
from fuselm.kernels.spec import Case

NAMES = ("fused", "torch", "compile", "liger", "quack")

Op = Callable[..., Any]


@dataclass(frozen=True)
class Peer:
    """One implementation of a case; `call` is None when it cannot do it, and `note` says why."""

    call: Op | None
    note: str = ""


class CannotDo(Exception):
    """A peer has no counterpart of this case; the message says what is missing."""


def implementations(op: str, case: Case, device: str, names: Sequence[str] = NAMES) -> dict[str, Peer]:
    """The implementations asked for, in the order of NAMES."""
    return {name: _peer(name, op, case, device) for name in NAMES if name in names}


def _peer(name: str, op: str, case: Case, device: str) -> Peer:
    try:
        return Peer(_FINDERS[name](op, case, device))
    except CannotDo as reason:
        return Peer(None, str(reason))
    except ImportError as error:
        return Peer(None, f"does not import: {error}")
    except Exception as error:  # a peer that breaks on import must not end the run
        return Peer(None, f"{type(error).__name__}: {error}")


def reference(op: str) -> Op:
    """The op in plain torch, through torch's own kernel where it has one."""
    found: Op = getattr(importlib.import_module(f"fuselm.kernels.torch_ops.{op}"), f"{op}_reference")
    return found


def bare_torch(op: str, case: Case) -> Op:
    """What a user of torch would write for this case, without our reference's branches: for host times."""
    if op == "rms_norm" and set(case.tensors) == {"weight"} and not case.options:
        return lambda x, weight: torch.nn.functional.rms_norm(x, (x.shape[-1],), weight)
    return reference(op)


def _fused(op: str, case: Case, device: str) -> Op:
    found: Op = getattr(importlib.import_module("fuselm.ops"), op)
    if device == "cuda":
        from fuselm.kernels.torch_ops import cuda_state, load_cuda

        load_cuda()
        # The plain path must never be measured under the fused name.
        if cuda_state() != "fused":
            raise CannotDo("the kernels are not built here; `fuselm doctor` says why")
    return found


def _torch(op: str, case: Case, device: str) -> Op:
    return reference(op)


def _compile(op: str, case: Case, device: str) -> Op:
    import torch._dynamo
    from torch._functorch import config

    torch._dynamo.reset()  # each case is compiled for its own shape, as a user's model would be
    # A backward that gives its saved tensors away cannot be run twice, and a benchmark runs it many times.
    config.donated_buffer = False
    compiled: Op = torch.compile(reference(op), dynamic=False)
    return compiled


def _liger(op: str, case: Case, device: str) -> Op:
    _need_gpu(device)
    if op != "rms_norm":
        raise CannotDo(f"no counterpart of {op} is wired up")
    settings = (case.options.get("eps") or DEFAULT_EPS, case.options.get("offset", 0.0), _cast_mode(case))
    if "residual" not in case.tensors:
        plain = importlib.import_module("liger_kernel.ops.rms_norm").LigerRMSNormFunction
        # Its default writes dx over dy, which saves it a fill: it is timed at its best.
        return lambda x, weight=None, **_: plain.apply(x, weight, *settings)
    if "weight" not in case.tensors or case.tensors["residual"] != case.dtype:
        raise CannotDo("its fused add wants a weight, and a residual in x's dtype")
    added = importlib.import_module("liger_kernel.ops.fused_add_rms_norm").LigerFusedAddRMSNormFunction
    return lambda x, weight, residual, **_: added.apply(x, residual, weight, *settings)


def _quack(op: str, case: Case, device: str) -> Op:
    _need_gpu(device)
    if op != "rms_norm":
        raise CannotDo(f"no counterpart of {op} is wired up")
    if _cast_mode(case) != "gemma" and case.dtype != "float32":
        raise CannotDo("it multiplies before it rounds; the case rounds first")
    rmsnorm = importlib.import_module("quack").rmsnorm
    eps, offset = case.options.get("eps") or DEFAULT_EPS, case.options.get("offset", 0.0)
    return lambda x, weight=None, residual=None, **_: rmsnorm(
        x, weight, residual=residual, eps=eps, prenorm=residual is not None, weight_offset=offset
    )


def _cast_mode(case: Case) -> str:
    return str(case.options.get("cast_mode", "gemma"))


def _need_gpu(device: str) -> None:
    if device != "cuda":
        raise CannotDo("it has kernels for GPUs alone")


_FINDERS: dict[str, Callable[[str, Case, str], Op]] = {
    "fused": _fused,
    "torch": _torch,
    "compile": _compile,
    "liger": _liger,
    "quack": _quack,
}
