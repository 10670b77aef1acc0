"""Who is measured: fuselm's op, torch's own kernel, the same under torch.compile, and Liger and QuACK where they are.

Knows who there is; how each is called is in files of their own (bare.py, liger.py, quack.py), as is what a peer says of
itself (peer.py). Times nothing. A peer that is not installed, or has nothing for an op or a case, is there with a note
that says so. Peers are called as their authors mean them to be: through their public autograd functions with their
defaults, in the rounding order of the case. "matmuls" is no peer but a floor: the matrix products that a linear layer
with its loss cannot do without, and nothing else; other ops do not have it.

    for name, peer in implementations(op.name, case, "cuda").items():
        y = peer.call(**tensors, **case.options) if peer.call else peer.note
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fuselm.bench import bare, liger, quack
from fuselm.bench.peer import CannotDo, Op, Peer
from fuselm.kernels.spec import Case, ops

__all__ = [
    "FLOORS",
    "NAMES",
    "CannotDo",
    "Op",
    "Peer",
    "bare_torch",
    "compile_cache",
    "implementations",
    "reference",
]

NAMES = ("fused", "torch", "compile", "liger", "quack", "matmuls")
# Implementations that only some ops have, and that are not missed elsewhere.
FLOORS = {"matmuls": ("linear_cross_entropy",)}


def implementations(op: str, case: Case, device: str, names: Sequence[str] = NAMES) -> dict[str, Peer]:
    """The implementations asked for, in the order of NAMES."""
    there = [name for name in NAMES if name in names and op in FLOORS.get(name, (op,))]
    return {name: _peer(name, op, case, device) for name in there}


def _peer(name: str, op: str, case: Case, device: str) -> Peer:
    try:
        found = _FINDERS[name](op, case, device)
        return found if isinstance(found, Peer) else Peer(found)
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


def bare_torch(op: str, case: Case, device: str) -> Op:
    """What a user of torch would write for this case, where that is plain; our reference for others."""
    written = _written(op, case, device)
    return reference(op) if written is None else bare.ready(op, written)


def _written(op: str, case: Case, device: str) -> Op | None:
    names = [*ops()[op].inputs(case), *case.options]
    return bare.WRITTEN[op] if bare.takes(op, names) and _multiplies(op, case, device) else None


# ---- ours, and torch's ---------------------------------------------------------------------------------------------


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
    return bare_torch(op, case, device)


def _compile(op: str, case: Case, device: str) -> Op:
    import torch._dynamo
    import torch._inductor.config
    from torch._functorch import config

    _settle_triton_cache()
    torch._dynamo.reset()  # each case is compiled for its own shape, as a user's model would be
    # A backward that gives its saved tensors away cannot be run twice, and a benchmark runs it many times.
    config.donated_buffer = False
    # Which of its variants of a kernel is fastest each process finds out for itself: warm.py's processes fill the disk
    # cache with code while they crowd the GPU, and what they found fast there must not be taken for the truth here.
    torch._inductor.config.autotune_local_cache = False
    written = _written(op, case, device)
    compiled: Op = torch.compile(reference(op) if written is None else written, dynamic=False)
    # What is ready before a call, as the tables of rope are, is ready before a compiled one too.
    return compiled if written is None else bare.ready(op, compiled)


def _settle_triton_cache() -> None:
    """Say where Triton's cache is, which is where it would be: torch.compile moves it when it makes a new kernel."""
    os.environ.setdefault("TRITON_CACHE_DIR", str(Path.home() / ".triton" / "cache"))


def compile_cache() -> str:
    """How often torch.compile has found its work done on disk so far, in words."""
    from torch._dynamo.utils import counters

    found = counters["aot_autograd"]
    return f"{found['autograd_cache_hit']} found on disk, {found['autograd_cache_miss']} compiled"


def _liger(op: str, case: Case, device: str) -> Op | Peer:
    _settle_triton_cache()
    return liger.find(op, case, device)


# ---- the floor of a linear layer with its loss ---------------------------------------------------------------------


class _Matmuls(torch.autograd.Function):
    """hidden @ weight.T forward, the two products of its gradients backward; the loss and dlogits are not computed."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight, hidden @ weight.t())  # [M, V]
        return hidden.new_empty((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> Any:
        hidden, weight, dlogits = ctx.saved_tensors  # the logits stand in for their gradient
        return dlogits @ weight, dlogits.t() @ hidden


def _matmuls(op: str, case: Case, device: str) -> Peer:
    if case.tensors.get("weight", case.dtype) != case.dtype or "bias" in case.tensors:
        raise CannotDo("the bare products are for one dtype and no bias")
    if not _multiplies(op, case, device):
        raise CannotDo("not every CPU multiplies 16 bits")

    def call(hidden: Tensor, weight: Tensor, **_: Any) -> Any:
        return _Matmuls.apply(hidden.flatten(0, -2), weight)

    return Peer(call, "it is the floor of a step, forward and backward", passes=("both",), compares=False)


def _multiplies(op: str, case: Case, device: str) -> bool:
    """Whether torch's matmul can be had for a case, if it wants one: on some CPUs 16 bits end the process."""
    return op != "linear_cross_entropy" or device == "cuda" or case.dtype == "float32"


_FINDERS: dict[str, Callable[[str, Case, str], Op | Peer]] = {
    "fused": _fused,
    "torch": _torch,
    "compile": _compile,
    "liger": _liger,
    "quack": quack.find,
    "matmuls": _matmuls,
}
