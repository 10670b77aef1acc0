"""Liger's counterparts of the ops, as their authors mean them to be called: autograd functions with their defaults.

Knows Liger's signatures and which cases it can do; imports it only when it is asked for. Of what Liger writes into (the
logits of its loss, gate and up of its activations, q and k of its rope) it gets copies, made before the clock runs.

    peer = find("swiglu", case, "cuda")      # a function, or a Peer; raises CannotDo with what is missing
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from fuselm.bench.bare import with_tables
from fuselm.bench.peer import CannotDo, Op, Peer, cast_mode, need_gpu, need_known, need_plain_softmax, need_width
from fuselm.kernels import layer_norm, rms_norm
from fuselm.kernels.spec import Case, InputSpec, ops

# The widest row that its kernels take which hold a row whole, by the settings they all ask for.
WIDTH = 65536

Inputs = Mapping[str, InputSpec]


def find(op: str, case: Case, device: str) -> Op | Peer:
    """Liger's implementation of a case."""
    need_gpu(device)
    if op not in _LIGER:
        raise CannotDo(f"no counterpart of {op} is wired up")
    return _LIGER[op](case, ops()[op].inputs(case))


def _function(module: str, name: str) -> Any:
    return getattr(import_module(f"liger_kernel.ops.{module}"), name)


# ---- norms, softmax ------------------------------------------------------------------------------------------------


def _rms_norm(case: Case, inputs: Inputs) -> Op:
    settings = (case.options.get("eps") or rms_norm.DEFAULT_EPS, case.options.get("offset", 0.0), cast_mode(case))
    if "residual" not in case.tensors:
        plain = _function("rms_norm", "LigerRMSNormFunction")
        # Its default writes dx over dy, which saves it a fill: it is timed at its best.
        return lambda x, weight=None, **_: plain.apply(x, weight, *settings)
    if "weight" not in case.tensors or case.tensors["residual"] != case.dtype:
        raise CannotDo("its fused add wants a weight, and a residual in x's dtype")
    added = _function("fused_add_rms_norm", "LigerFusedAddRMSNormFunction")
    return lambda x, weight, residual, **_: added.apply(x, residual, weight, *settings)


def model_norm() -> Op:
    """Its RMSNorm as a model of ours calls one: with a residual it gives the sum as well."""
    plain = _function("rms_norm", "LigerRMSNormFunction")
    added = _function("fused_add_rms_norm", "LigerFusedAddRMSNormFunction")
    settings = (0.0, "gemma")  # no offset, and rounded once, as ours

    def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Any:
        if residual is None:
            return plain.apply(x, weight, eps, *settings)
        return added.apply(x, residual, weight, eps, *settings)

    return rms_norm


def _layer_norm(case: Case, inputs: Inputs) -> Op:
    if set(case.tensors) != {"weight", "bias"}:
        raise CannotDo("it has a weight and a bias always, and a residual never")
    need_width(case.shape[-1], WIDTH)
    plain = _function("layer_norm", "LigerLayerNormFunction")
    eps = case.options.get("eps", layer_norm.DEFAULT_EPS)
    return lambda x, weight, bias, **_: plain.apply(x, weight, bias, eps)


def _softmax(case: Case, inputs: Inputs) -> Op:
    need_plain_softmax(case)
    need_width(case.shape[-1], WIDTH)
    plain = _function("softmax", "LigerSoftmaxFunction")
    return lambda x, **_: plain.apply(x)


# ---- losses --------------------------------------------------------------------------------------------------------

# Both of its losses find the gradient in the forward already, and ask the GPU how many targets count before they go on.
_LOSS: dict[str, Any] = {
    "note": "its forward has computed the gradient: there is no backward to time alone",
    "passes": ("forward", "both"),
    "capture": False,
}


def _cross_entropy(case: Case, inputs: Inputs) -> Peer:
    loss = _function("cross_entropy", "LigerCrossEntropyFunction")
    settings = _loss_settings(case)

    def call(logits: Tensor, targets: Tensor, **_: Any) -> Tensor:
        found: Tensor = loss.apply(logits.flatten(0, -2), targets.flatten(), None, *settings)[0]
        return found

    # The gradient is written over the logits.
    return Peer(call, overwrites=("logits",), **_LOSS)


def _linear_cross_entropy(case: Case, inputs: Inputs) -> Peer:
    loss = _function("fused_linear_cross_entropy", "LigerFusedLinearCrossEntropyFunction")
    settings = _loss_settings(case)

    def call(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = None, **_: Any) -> Tensor:
        found: Tensor = loss.apply(hidden.flatten(0, -2), weight, targets.flatten(), bias, None, *settings)[0]
        return found

    return Peer(call, **_LOSS)


def _loss_settings(case: Case) -> tuple[Any, ...]:
    """ignore_index, z-loss, smoothing, reduction and soft cap, in the order both of its losses take them."""
    need_known(case, ("ignore_index", "z_loss", "label_smoothing", "reduction", "softcap"))
    given = case.options.get
    settings = (given("ignore_index", -100), given("z_loss", 0.0), given("label_smoothing", 0.0))
    return (*settings, given("reduction", "mean"), given("softcap"))


# ---- activations ---------------------------------------------------------------------------------------------------


def _relu2(case: Case, inputs: Inputs) -> Op:
    need_width(inputs["x"].shape[-1], WIDTH)
    plain = _function("relu_squared", "LigerReLUSquaredFunction")
    return lambda x: plain.apply(x)


def _swiglu(case: Case, inputs: Inputs) -> Op | Peer:
    if "up" in inputs:
        return _gated(inputs, _function("swiglu", "LigerSiLUMulFunction"))
    need_width(inputs["gate"].shape[-1] // 2, WIDTH)
    packed = _function("swiglu", "LigerFusedGateUpSiLUMulFunction")  # reads both halves where they are
    return lambda gate: packed.apply(gate)


def _geglu(case: Case, inputs: Inputs) -> Op | Peer:
    if case.options.get("approximate", "none") != "tanh":
        raise CannotDo("its gelu is the one by tanh")
    gated = _function("geglu", "LigerGELUMulFunction")
    if "up" in inputs:
        return _gated(inputs, gated)
    need_width(inputs["gate"].shape[-1] // 2, WIDTH)
    # It copies what is not contiguous, as these halves, and writes into the copies: a user pays for that too.
    return lambda gate, **_: gated.apply(*gate.chunk(2, dim=-1))


def _gated(inputs: Inputs, function: Any) -> Peer:
    """Of gate and up apart. Its backward writes both gradients over what it has saved, which is gate and up."""
    need_width(inputs["gate"].shape[-1], WIDTH)
    if inputs["gate"].dtype != inputs["up"].dtype:
        raise CannotDo("it wants gate and up in one dtype")
    return Peer(lambda gate, up, **_: function.apply(gate, up), overwrites=("gate", "up"))


# ---- embedding, positions ------------------------------------------------------------------------------------------


def _embedding(case: Case, inputs: Inputs) -> Op:
    need_known(case, ("dtype",))
    if set(inputs) != {"ids", "weight"}:
        raise CannotDo("it has no positions")
    look_up = _function("experimental.embedding", "LigerEmbeddingFunction")

    def call(ids: Tensor, weight: Tensor, dtype: str | torch.dtype | None = None) -> Tensor:
        rows: Tensor = look_up.apply(weight, ids)
        return rows if dtype is None else rows.to(getattr(torch, dtype) if isinstance(dtype, str) else dtype)

    return call


def _rope(case: Case, inputs: Inputs) -> Peer:
    need_known(case, ("interleaved", "eps"))
    if case.options.get("interleaved"):
        raise CannotDo("it turns halves, not neighbours")
    if {"q_weight", "k_weight"} & set(inputs):
        raise CannotDo("it has no norm of q and k")
    if len(inputs["q"].shape) != 4:
        raise CannotDo("it wants q and k of four dimensions")
    function = _function("rope", "LigerRopeFunction")

    def turn(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        # It wants heads before tokens, [B, N, T, H], as attention does, and turns them where they lie: [B, T, N, H].
        turned: tuple[Tensor, Tensor] = function.apply(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
        return turned[0].transpose(1, 2), turned[1].transpose(1, 2)

    return Peer(with_tables(turn), overwrites=("q", "k"), in_place=True)


_LIGER: dict[str, Callable[[Case, Inputs], Op | Peer]] = {
    "rms_norm": _rms_norm,
    "layer_norm": _layer_norm,
    "softmax": _softmax,
    "cross_entropy": _cross_entropy,
    "linear_cross_entropy": _linear_cross_entropy,
    "relu2": _relu2,
    "swiglu": _swiglu,
    "geglu": _geglu,
    "embedding": _embedding,
    "rope": _rope,
}
