"""RoPE on packed q, k and v for PyTorch: the raw op of its backward, autograd, the function people call.

The contract is kernels/rope_qkv.py. Forward is rope's, over views of what came; backward runs rope_qkv.cu on CUDA, and
elsewhere the plain implementation below.

    q, k, v = rope_qkv(qkv, cos, sin)                                # qkv [B, T, 3 N, H]
    q, k, v = rope_qkv(qkv, cos, sin, kv_heads=2, inplace=True)      # [B, T, N + 2 K, H], which the three are views of
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from fuselm.kernels import rope as rope_contract
from fuselm.kernels import rope_qkv as contract
from fuselm.kernels.torch_ops import (
    check_are_tensors,
    direct_apply,
    info,
    is_transformed,
    refuse_second_gradient,
    register,
)
from fuselm.kernels.torch_ops import rope as turning


def rope_qkv(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    kv_heads: int | None = None,
    positions: Tensor | None = None,
    interleaved: bool = False,
    inplace: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of qkv [B, T, N + 2 K, H], q and k turned as by rope(); qkv's gradient is made in one pass.

    `kv_heads` is K; None: q, k and v have as many heads. cos, sin, positions and interleaved are rope()'s. v is a view
    of qkv. `inplace` allows q and k to be turned where they lie: nobody else may use qkv then. Under torch.compile,
    which plans memory itself, and torch.func's transforms this is rope() of views, and nothing is written over.
    """
    # What is wrong with a call is looked for when it has gone wrong.
    try:
        if type(inplace) is not bool:
            raise TypeError("inplace")
        q, k, v = _parts(qkv, kv_heads)
        traced = is_compiling() or is_transformed()
        learns = qkv.requires_grad and torch.is_grad_enabled()
        if inplace and not traced and (why := turning.why_not_over(qkv, learns)):
            raise rope_contract.cannot_overwrite(contract.NAME, "qkv", info(qkv), why)
        if traced or not learns:
            q, k = _turned(q, k, cos, sin, positions, interleaved, inplace and not traced)
            return q, k, v if traced else v.detach()  # in inference mode a view would ask for gradients as qkv does
        _refuse_learned_tables(cos, sin)
        return _apply(qkv, cos, sin, positions, kv_heads, interleaved, inplace)
    except (RuntimeError, ValueError, TypeError, AttributeError, IndexError) as caught:
        error = caught
    _check(qkv, cos, sin, positions, kv_heads, interleaved, inplace)
    raise error


def rope_qkv_reference(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    kv_heads: int | None = None,
    positions: Tensor | None = None,
    interleaved: bool = False,
    inplace: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """The same in plain torch: the yardstick for errors and speed. It has no use for writing over qkv."""
    q, k, v = _parts(qkv, kv_heads)
    return *turning.rope_reference(q, k, cos, sin, positions=positions, interleaved=interleaved), v


def _turned(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, interleaved: bool, over: bool
) -> tuple[Tensor, Tensor]:
    """By rope(). In place without its question whether q and k meet: parts of what may be written over do not."""
    if over and type(interleaved) is bool:
        with suppress(NotImplementedError):  # these are the first CUDA tensors: rope() loads the kernels
            return turning.written_over((q, k, cos, sin, positions, None, None, rope_contract.DEFAULT_EPS, interleaved))
    return turning.rope(q, k, cos, sin, positions=positions, interleaved=interleaved, inplace=over)


def _parts(qkv: Tensor, kv_heads: int | None) -> tuple[Tensor, Tensor, Tensor]:
    q_heads, kv_heads = contract.heads_of(qkv.shape[2], kv_heads)
    return qkv[:, :, :q_heads], qkv[:, :, q_heads : q_heads + kv_heads], qkv[:, :, q_heads + kv_heads :]


def _check(
    qkv: Any, cos: Any, sin: Any, positions: Any, kv_heads: int | None, interleaved: bool, inplace: bool
) -> None:
    check_are_tensors(contract.NAME, {"qkv": qkv, "cos": cos, "sin": sin}, {"positions": positions})
    given = {"qkv": qkv, "cos": cos, "sin": sin, "positions": positions}
    known: dict[str, Any] = {name: info(tensor) for name, tensor in given.items()}
    contract.check(**known, kv_heads=kv_heads, interleaved=interleaved)
    rope_contract.check_flag("inplace", inplace)


def _refuse_learned_tables(cos: Tensor, sin: Tensor) -> None:
    for name, table in (("cos", cos), ("sin", sin)):
        if table.requires_grad:
            raise rope_contract.learned_table(name)


# ---- gradients -----------------------------------------------------------------------------------------------------


class _RopeQKV(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor | None,
        kv_heads: int | None,
        interleaved: bool,
        inplace: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        # Of a detached tensor: to autograd all three are new, and what they share is this function's to know.
        q, k, v = _parts(qkv.detach(), kv_heads)
        q, k = _turned(q, k, cos, sin, positions, interleaved, inplace)
        if inplace:  # who kept qkv for a backward of their own is to hear of it
            torch.autograd.graph.increment_version(qkv)
        ctx.save_for_backward(cos, sin, positions)
        ctx.interleaved = interleaved
        ctx.shapes = q.shape, k.shape, v.shape
        ctx.dtype = qkv.dtype
        ctx.set_materialize_grads(False)
        return q, k, v

    @staticmethod
    def backward(ctx: Any, *given: Tensor | None) -> Any:
        some = next((one for one in given if one is not None), None)
        if some is None:
            return (None,) * 7
        with torch.no_grad():
            whole = (
                some.new_zeros(shape, dtype=ctx.dtype) if one is None else one
                for one, shape in zip(given, ctx.shapes, strict=True)
            )
            dqkv = _backward(*whole, *ctx.saved_tensors, ctx.interleaved, 1)
        if torch.is_grad_enabled():
            (dqkv,) = refuse_second_gradient(contract.NAME, [dqkv], list(given))
        return dqkv, None, None, None, None, None, None


_apply = direct_apply(_RopeQKV)


# ---- the raw op ----------------------------------------------------------------------------------------------------


def _plain_backward(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    interleaved: bool,
    outputs: int,
) -> Tensor:
    options: dict[str, Any] = {"positions": positions, "interleaved": interleaved}
    parts = (*turning.rope_reference(dq, dk, cos, -sin, **options), dv)
    joined = _fake_backward(dq, dk, dv)
    # Not by torch.cat, which autocast on a CPU has no rule for in fp16.
    for part, place in zip(parts, joined.split([part.shape[2] for part in parts], dim=2), strict=True):
        place.copy_(part)
    return joined


def _fake_backward(dq: Tensor, dk: Tensor, dv: Tensor, *others: Any) -> Tensor:
    batch, tokens, _, width = dq.shape
    return dq.new_empty(batch, tokens, dq.shape[2] + dk.shape[2] + dv.shape[2], width)


_backward = register(
    "rope_qkv_backward(Tensor dq, Tensor dk, Tensor dv, Tensor cos, Tensor sin, Tensor? positions, bool interleaved,"
    " int outputs) -> Tensor",
    _plain_backward,
    _fake_backward,
)
