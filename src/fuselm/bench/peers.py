"""Who is measured: fuselm's op, torch's own kernel, the same under torch.compile, and Liger and QuACK where they are.

Knows how each peer is called and which cases it can do; times nothing. A peer that is not installed, or has nothing for
an op or a case, is there with a note that says so. Peers are called as their authors mean them to be: through their
public autograd functions with their defaults, in the rounding order of the case. "matmuls" is no peer but a floor: the
matrix products that a linear layer with its loss cannot do without, and nothing else; other ops do not have it.

    for name, peer in implementations(op.name, case, "cuda").items():
        y = peer.call(**tensors, **case.options) if peer.call else peer.note
"""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fuselm.kernels import layer_norm, rms_norm
from fuselm.kernels.spec import Case, ops

NAMES = ("fused", "torch", "compile", "liger", "quack", "matmuls")
# Implementations that only some ops have, and that are not missed elsewhere.
FLOORS = {"matmuls": ("linear_cross_entropy",)}
PASSES = ("forward", "backward", "both")
# The widest row that Liger's norms and softmax take, by the settings they all ask for.
LIGER_WIDTH = 65536

Op = Callable[..., Any]


@dataclass(frozen=True)
class Peer:
    """One implementation of a case; `call` is None when it cannot do it, and `note` says why."""

    call: Op | None
    note: str = ""
    passes: tuple[str, ...] = PASSES  # those it can be timed in; `note` says why not in others
    overwrites: tuple[str, ...] = ()  # inputs that it writes into when a gradient is wanted
    capture: bool = True  # False: it waits for the GPU in the middle, which no CUDA graph can hold
    compares: bool = True  # False: what it returns is not the op's result


class CannotDo(Exception):
    """A peer has no counterpart of this case; the message says what is missing."""


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
    """What a user of torch would write for this case, where it is a plain one; our reference for others.

    Without the reference's branches, and without what it does for accuracy: people hand bf16 logits to torch's loss as
    they are, which moves less than half of the bytes, so that this and nothing slower is what a loss competes with.
    """
    written = _BARE.get(op)
    if written is None or case.options or not _multiplies(op, case, device):
        return reference(op)
    return written if set(inspect.signature(written).parameters) == set(ops()[op].inputs(case)) else reference(op)


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
    compiled: Op = torch.compile(bare_torch(op, case, device), dynamic=False)
    return compiled


def _settle_triton_cache() -> None:
    """Say where Triton's cache is, which is where it would be: torch.compile moves it when it makes a new kernel."""
    os.environ.setdefault("TRITON_CACHE_DIR", str(Path.home() / ".triton" / "cache"))


def compile_cache() -> str:
    """How often torch.compile has found its work done on disk so far, in words."""
    from torch._dynamo.utils import counters

    found = counters["aot_autograd"]
    return f"{found['autograd_cache_hit']} found on disk, {found['autograd_cache_miss']} compiled"


def _bare_layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.nn.functional.layer_norm(x, (x.shape[-1],), weight, bias)


def _bare_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten())


def _bare_linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return _bare_cross_entropy(torch.nn.functional.linear(hidden, weight), targets)


_BARE: dict[str, Op] = {
    "rms_norm": lambda x, weight: torch.nn.functional.rms_norm(x, (x.shape[-1],), weight),
    "layer_norm": _bare_layer_norm,
    "softmax": lambda x: torch.softmax(x, -1),
    "cross_entropy": _bare_cross_entropy,
    "linear_cross_entropy": _bare_linear_cross_entropy,
}


# ---- Liger ---------------------------------------------------------------------------------------------------------


def _liger(op: str, case: Case, device: str) -> Op | Peer:
    _need_gpu(device)
    _settle_triton_cache()
    if op not in _LIGER:
        raise CannotDo(f"no counterpart of {op} is wired up")
    return _LIGER[op](case)


def _liger_rms_norm(case: Case) -> Op:
    settings = (case.options.get("eps") or rms_norm.DEFAULT_EPS, case.options.get("offset", 0.0), _cast_mode(case))
    if "residual" not in case.tensors:
        plain = importlib.import_module("liger_kernel.ops.rms_norm").LigerRMSNormFunction
        # Its default writes dx over dy, which saves it a fill: it is timed at its best.
        return lambda x, weight=None, **_: plain.apply(x, weight, *settings)
    if "weight" not in case.tensors or case.tensors["residual"] != case.dtype:
        raise CannotDo("its fused add wants a weight, and a residual in x's dtype")
    added = importlib.import_module("liger_kernel.ops.fused_add_rms_norm").LigerFusedAddRMSNormFunction
    return lambda x, weight, residual, **_: added.apply(x, residual, weight, *settings)


def _liger_layer_norm(case: Case) -> Op:
    if set(case.tensors) != {"weight", "bias"}:
        raise CannotDo("it has a weight and a bias always, and a residual never")
    _need_width(case, LIGER_WIDTH)
    plain = importlib.import_module("liger_kernel.ops.layer_norm").LigerLayerNormFunction
    eps = case.options.get("eps", layer_norm.DEFAULT_EPS)
    return lambda x, weight, bias, **_: plain.apply(x, weight, bias, eps)


def _liger_softmax(case: Case) -> Op:
    _need_plain_softmax(case)
    _need_width(case, LIGER_WIDTH)
    plain = importlib.import_module("liger_kernel.ops.softmax").LigerSoftmaxFunction
    return lambda x, **_: plain.apply(x)


# Both of its losses find the gradient in the forward already, and ask the GPU how many targets count before they go on.
_LIGER_LOSS: dict[str, Any] = {
    "note": "its forward has computed the gradient: there is no backward to time alone",
    "passes": ("forward", "both"),
    "capture": False,
}


def _liger_cross_entropy(case: Case) -> Peer:
    loss = importlib.import_module("liger_kernel.ops.cross_entropy").LigerCrossEntropyFunction
    settings = _liger_loss_settings(case)

    def call(logits: Tensor, targets: Tensor, **_: Any) -> Tensor:
        found: Tensor = loss.apply(logits.flatten(0, -2), targets.flatten(), None, *settings)[0]
        return found

    # The gradient is written over the logits.
    return Peer(call, overwrites=("logits",), **_LIGER_LOSS)


def _liger_linear_cross_entropy(case: Case) -> Peer:
    loss = importlib.import_module("liger_kernel.ops.fused_linear_cross_entropy").LigerFusedLinearCrossEntropyFunction
    settings = _liger_loss_settings(case)

    def call(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = None, **_: Any) -> Tensor:
        found: Tensor = loss.apply(hidden.flatten(0, -2), weight, targets.flatten(), bias, None, *settings)[0]
        return found

    return Peer(call, **_LIGER_LOSS)


def _liger_loss_settings(case: Case) -> tuple[Any, ...]:
    """ignore_index, z-loss, smoothing, reduction and soft cap, in the order both of its losses take them."""
    _need_known(case, ("ignore_index", "z_loss", "label_smoothing", "reduction", "softcap"))
    given = case.options.get
    settings = (given("ignore_index", -100), given("z_loss", 0.0), given("label_smoothing", 0.0))
    return (*settings, given("reduction", "mean"), given("softcap"))


_LIGER: dict[str, Callable[[Case], Op | Peer]] = {
    "rms_norm": _liger_rms_norm,
    "layer_norm": _liger_layer_norm,
    "softmax": _liger_softmax,
    "cross_entropy": _liger_cross_entropy,
    "linear_cross_entropy": _liger_linear_cross_entropy,
}

# ---- QuACK ---------------------------------------------------------------------------------------------------------


def _quack(op: str, case: Case, device: str) -> Op:
    _need_gpu(device)
    if op not in _QUACK:
        raise CannotDo(f"no counterpart of {op} is wired up")
    return _QUACK[op](case)


def _quack_rms_norm(case: Case) -> Op:
    if _cast_mode(case) != "gemma" and case.dtype != "float32":
        raise CannotDo("it multiplies before it rounds; the case rounds first")
    rmsnorm = importlib.import_module("quack").rmsnorm
    eps, offset = case.options.get("eps") or rms_norm.DEFAULT_EPS, case.options.get("offset", 0.0)
    return lambda x, weight=None, residual=None, **_: rmsnorm(
        x, weight, residual=residual, eps=eps, prenorm=residual is not None, weight_offset=offset
    )


def _quack_softmax(case: Case) -> Op:
    _need_plain_softmax(case)
    softmax = importlib.import_module("quack").softmax
    return lambda x, **_: softmax(x.flatten(0, -2)).view(x.shape)


def _quack_cross_entropy(case: Case) -> Op:
    _need_known(case, ("ignore_index", "reduction"))
    loss = importlib.import_module("quack").cross_entropy
    return lambda logits, targets, **options: loss(logits.flatten(0, -2), targets.flatten(), **options)


_QUACK: dict[str, Callable[[Case], Op]] = {
    "rms_norm": _quack_rms_norm,
    "softmax": _quack_softmax,
    "cross_entropy": _quack_cross_entropy,
}

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


# ---- what they ask of a case ---------------------------------------------------------------------------------------


def _cast_mode(case: Case) -> str:
    return str(case.options.get("cast_mode", "gemma"))


def _multiplies(op: str, case: Case, device: str) -> bool:
    """Whether torch's matmul can be had for a case, if it wants one: on some CPUs 16 bits end the process."""
    return op != "linear_cross_entropy" or device == "cuda" or case.dtype == "float32"


def _need_gpu(device: str) -> None:
    if device != "cuda":
        raise CannotDo("it has kernels for GPUs alone")


def _need_width(case: Case, widest: int) -> None:
    if case.shape[-1] > widest:
        raise CannotDo(f"it takes rows of at most {widest}; the case's have {case.shape[-1]}")


def _need_plain_softmax(case: Case) -> None:
    if "mask" in case.tensors or case.options.get("causal") or case.options.get("scale", 1.0) != 1.0:
        raise CannotDo("it has no mask, no causal and no scale")


def _need_known(case: Case, known: Sequence[str]) -> None:
    if unknown := [name for name in case.options if name not in known]:
        raise CannotDo(f"it has no {', '.join(unknown)}")


_FINDERS: dict[str, Callable[[str, Case, str], Op | Peer]] = {
    "fused": _fused,
    "torch": _torch,
    "compile": _compile,
    "liger": _liger,
    "quack": _quack,
    "matmuls": _matmuls,
}
