"""Rotary positions for PyTorch: the raw ops, their plain and fake implementations, autograd, the function people call.

The contract is kernels/rope.py. On CUDA the raw ops run rope.cu and rope_backward.cu; elsewhere the plain
implementations below.

    q, k = rope(q, k, cos, sin)                                        # q [B, T, N, H], k [B, T, K, H]
    q, k = rope(q, k, cos, sin, positions=positions, inplace=True)     # when decoding
    q, k = rope(q, k, cos, sin, q_weight=q_weight, k_weight=k_weight)  # with QK-norm
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.compiler import is_compiling

from fuselm.kernels import norms
from fuselm.kernels import rope as contract
from fuselm.kernels.torch_ops import (
    check_are_tensors,
    direct_apply,
    info,
    is_transformed,
    load_cuda,
    refuse_second_gradient,
    register,
)
from fuselm.kernels.torch_ops.places import share_places, shares_places

# Mask of wanted outputs, for (q_out, k_out, q_rstd, k_rstd); in backward (dq, dk, dq_weight, dk_weight).
_Q, _K, _OF_Q, _OF_K = 1, 2, 4, 8
_BOTH = _Q | _K
_NO_OUTPUTS = 0
_EPS = contract.DEFAULT_EPS  # and a literal where torch.compile would read it: see see_now()
_LEAST_EPS, _MOST_EPS = norms.SMALLEST_EPS, norms.LARGEST_FP32


def rope(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    positions: Tensor | None = None,
    interleaved: bool = False,
    inplace: bool = False,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Turn pairs of q [B, T, N, H] and k [B, T, K, H] by the angles of their positions, in fp32, rounded once.

    cos and sin are fp32 [S, H / 2], a row for each position, and constants; `positions` are [T] or [B, T], 0 to T - 1
    unless given. Pairs are (i, i + H / 2), or (2 i, 2 i + 1) with `interleaved`. With weights [H], q and k are first
    normalised by their root mean square (QK-norm), whose eps is 2^-23 unless given. A position that the tables lack is
    refused on a CPU; elsewhere, where nobody can look without waiting, it makes the token's q and k NaN.

    `inplace` writes the result over q and k and returns them. With weights that works without gradients only: backward
    needs q and k as they were. Inside torch.func transforms and forward-mode differentiation the plain formula runs.
    """
    compiling = is_compiling()
    if not compiling and is_transformed():
        _check(q, k, cos, sin, positions, q_weight, k_weight, eps, interleaved, inplace)
        how: dict[str, Any] = {"q_weight": q_weight, "k_weight": k_weight, "eps": eps, "interleaved": interleaved}
        return rope_reference(q, k, cos, sin, positions=positions, inplace=inplace, **how)
    # The fast path asks nothing it need not: the launcher refuses bad input, and only then check() looks for the words.
    try:
        odd_eps = eps is not None and not compiling and not (type(eps) is float and _LEAST_EPS < eps <= _MOST_EPS)
        odd_eps = odd_eps or (compiling and isinstance(eps, bool))  # a compiler's numbers have types of its own
        if odd_eps or type(interleaved) is not bool or type(inplace) is not bool:  # a launcher would convert them
            _check(q, k, cos, sin, positions, q_weight, k_weight, eps, interleaved, inplace)
        normed = q_weight is not None or k_weight is not None
        learns = q.requires_grad or k.requires_grad or cos.requires_grad or sin.requires_grad
        if normed and not learns:
            learns = q_weight.requires_grad or k_weight.requires_grad  # type: ignore[union-attr]
        learns = learns and torch.is_grad_enabled()
        if learns or inplace or normed or compiling or interleaved or positions is not None or eps is not None:
            given = (q, k, cos, sin, positions, q_weight, k_weight, 2.0**-23 if eps is None else eps, interleaved)
            if learns:
                return _with_gradients(given, normed, inplace, compiling)
            if inplace:
                if not compiling:
                    _refuse_what_cannot_be_overwritten(q, k, False)
                return written_over(given, compiling)
            made = (_forward if compiling else _forward_now)(*given, False, _BOTH)
        else:
            made = _forward_now(q, k, cos, sin)  # seven arguments that are their defaults would cost 1 us
        return made[0], made[1]
    except (RuntimeError, TypeError, AttributeError, OverflowError) as caught:
        error = caught
    _check(q, k, cos, sin, positions, q_weight, k_weight, eps, interleaved, inplace)
    # No CUDA implementation yet: this is the first CUDA tensor.
    if isinstance(error, NotImplementedError) and q.is_cuda and load_cuda():
        again: dict[str, Any] = {"q_weight": q_weight, "k_weight": k_weight, "eps": eps, "interleaved": interleaved}
        return rope(q, k, cos, sin, positions=positions, inplace=inplace, **again)
    raise error


def rope_reference(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    positions: Tensor | None = None,
    interleaved: bool = False,
    inplace: bool = False,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The same in plain torch, in fp32 (in float64 where q is): the yardstick for errors and speed."""
    cos, sin = _angles(q, cos, sin, positions)
    turned = []
    for x, weight in ((q, q_weight), (k, k_weight)):
        y = x if x.dtype == torch.float64 else x.float()
        if weight is not None:
            y = F.rms_norm(y, (x.shape[-1],), weight.to(y.dtype), _EPS if eps is None else eps)
        turned.append(_turned(y, cos, sin, interleaved).to(x.dtype))
    return (q.copy_(turned[0]), k.copy_(turned[1])) if inplace else (turned[0], turned[1])


def _angles(q: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor]:
    """cos and sin of every token, one for all heads: [T, 1, H/2] or [B, T, 1, H/2]. NaN where the tables have none."""
    if positions is None:
        return cos[: q.shape[1]].unsqueeze(-2), sin[: q.shape[1]].unsqueeze(-2)
    rows, where = cos.shape[0], positions.long()
    if _can_be_seen(positions):
        _refuse_strays(where, rows)
        return cos[where].unsqueeze(-2), sin[where].unsqueeze(-2)
    if rows == 0:
        nothing = cos.new_full((*positions.shape, 1, cos.shape[1]), torch.nan)
        return nothing, nothing
    near = where.clamp(0, rows - 1)
    outside = (near != where)[..., None, None]
    found = (table[near].unsqueeze(-2).masked_fill(outside, torch.nan) for table in (cos, sin))
    return next(found), next(found)


def _can_be_seen(positions: Tensor) -> bool:
    """Whether looking at the values is allowed and costs no waiting."""
    hidden = is_compiling() or is_transformed() or isinstance(positions, FakeTensor)
    return positions.device.type == "cpu" and not hidden


def _refuse_strays(positions: Tensor, rows: int) -> None:
    strays = ((positions < 0) | (positions >= rows)).nonzero()
    if len(strays):
        place = tuple(strays[0].tolist())
        raise contract.stray_position(int(positions[place]), place, rows)


def _turned(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    if interleaved:
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def _check(
    q: Any,
    k: Any,
    cos: Any,
    sin: Any,
    positions: Any,
    q_weight: Any,
    k_weight: Any,
    eps: float | None,
    interleaved: bool,
    inplace: bool = False,
) -> None:
    needed = {"q": q, "k": k, "cos": cos, "sin": sin}
    optional = {"positions": positions, "q_weight": q_weight, "k_weight": k_weight}
    check_are_tensors(contract.NAME, needed, optional)
    known: dict[str, Any] = {name: info(tensor) for name, tensor in {**needed, **optional}.items()}
    contract.check(**known, eps=eps, interleaved=interleaved)
    contract.check_flag("inplace", inplace)


# ---- gradients -----------------------------------------------------------------------------------------------------


Given = tuple[Any, ...]  # the arguments of a raw op but the last two, `inverse` and the outputs


def written_over(given: Given, compiling: bool = False) -> tuple[Tensor, Tensor]:
    """In place where no gradient is recorded, of a q and a k that may be written over."""
    q, k = given[:2]
    _inplace(*given, False, _NO_OUTPUTS)
    if not compiling:  # who kept q or k for a backward of their own is to hear of it
        torch.autograd.graph.increment_version((q, k))
    return q, k


def _with_gradients(given: Given, normed: bool, inplace: bool, compiling: bool) -> tuple[Tensor, Tensor]:
    q, k, cos, sin, positions, *_, interleaved = given
    if cos.requires_grad or sin.requires_grad or (normed and inplace):
        _check(*given)
        table = "cos" if cos.requires_grad else "sin" if sin.requires_grad else ""
        raise contract.learned_table(table) if table else contract.inplace_with_norm()
    made: tuple[Tensor, Tensor]
    if normed:
        made = (_NormedRope.apply if compiling else _apply_normed)(*given)
    elif compiling:  # the compiler plans memory itself
        made = _Rope.apply(q, k, cos, sin, positions, interleaved, False)
        made = (q.copy_(made[0]), k.copy_(made[1])) if inplace else made
    elif not inplace:
        made = _apply(q, k, cos, sin, positions, interleaved, False)
    else:
        _refuse_what_cannot_be_overwritten(q, k, True)
        if q.requires_grad and k.requires_grad and not q._is_view() and not k._is_view():
            return _apply(q, k, cos, sin, positions, interleaved, True)
        # Autograd lets a function write over one view, and then return no other tensor besides.
        for x in (q, k):
            if x.requires_grad:
                _apply_to_one(x, cos, sin, positions, interleaved)
            else:
                _overwrite_one(x, cos, sin, positions, interleaved)
                torch.autograd.graph.increment_version(x)
        made = q, k
    return made


def _refuse_what_cannot_be_overwritten(q: Tensor, k: Tensor, learns: bool) -> None:
    for name, x in (("q", q), ("k", k)):
        if why := why_not_over(x, learns):
            raise contract.cannot_overwrite(contract.NAME, name, info(x), why)
    if share_places(q, k):
        raise contract.cannot_overwrite(contract.NAME, "k", info(k), "a q and a k that share places in memory")


def why_not_over(x: Tensor, learns: bool) -> str:
    """What x is that must not be written over: a leaf, say, or one of several views. Nothing where it may be."""
    if shares_places(x):
        return "a tensor of which several elements share a place in memory"
    if not learns or not x.requires_grad:
        return ""
    base = x if x._base is None else x._base
    if base.is_leaf and base.requires_grad:
        return "a leaf that requires a gradient, nor over a view of one"
    if x._is_view() and torch._C._autograd._get_creation_meta(x) != _ORDINARY_VIEW:
        return "one of several views that were made at once, by split or chunk, where a gradient is recorded"
    return ""


_ORDINARY_VIEW = torch._C._autograd.CreationMeta.DEFAULT


class _Rope(torch.autograd.Function):
    """Without weights; in place where neither q nor k is a view."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor | None,
        interleaved: bool,
        inplace: bool,
    ) -> tuple[Tensor, Tensor]:
        given = (q, k, cos, sin, positions, None, None, 1.0, interleaved, False)
        if inplace:
            _inplace(*given, _NO_OUTPUTS)
            ctx.mark_dirty(q, k)
        else:
            q_learns, k_learns = q.requires_grad, k.requires_grad
            q, k, _, _ = (_forward if is_compiling() else _forward_now)(*given, _BOTH)
            if not (q_learns and k_learns):  # what is made of nothing that learns does not learn
                ctx.mark_non_differentiable(k if q_learns else q)
        ctx.save_for_backward(cos, sin, positions)
        ctx.interleaved = interleaved
        ctx.set_materialize_grads(False)
        return q, k

    @staticmethod
    def backward(ctx: Any, dq_out: Tensor | None, dk_out: Tensor | None) -> Any:
        return *_turned_back(ctx, dq_out, dk_out), None, None, None, None, None


class _OneInPlace(torch.autograd.Function):
    """q or k alone, which may be a view."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, interleaved: bool) -> Tensor:
        _overwrite_one(x, cos, sin, positions, interleaved)
        ctx.mark_dirty(x)
        ctx.save_for_backward(cos, sin, positions)
        ctx.interleaved = interleaved
        return x

    @staticmethod
    def backward(ctx: Any, dx_out: Tensor) -> Any:
        return _turned_back(ctx, dx_out, None)[0], None, None, None, None


def _overwrite_one(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, interleaved: bool) -> None:
    _inplace(x, _no_heads(x), cos, sin, positions, None, None, _EPS, interleaved, False, _NO_OUTPUTS)


def _no_heads(x: Tensor) -> Tensor:
    """What stands for a q or k that is not there."""
    return x[:, :, :0]


def _turned_back(ctx: Any, dq_out: Tensor | None, dk_out: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """dq and dk without weights; one may not be wanted, and what one is made of may not have come."""
    wanted = _Q if dq_out is not None and ctx.needs_input_grad[0] else 0
    wanted |= _K if dk_out is not None and ctx.needs_input_grad[1] else 0
    if not wanted:
        return None, None
    some: Any = dq_out if wanted & _Q else dk_out
    with torch.no_grad():
        first = dq_out if wanted & _Q else _no_heads(some)
        second = dk_out if wanted & _K else _no_heads(some)
        dq, dk, _, _ = _forward(first, second, *ctx.saved_tensors, None, None, 1.0, ctx.interleaved, True, wanted)
    if torch.is_grad_enabled():
        dq, dk = refuse_second_gradient("rope", [dq, dk], [dq_out, dk_out])
    return dq, dk


class _NormedRope(torch.autograd.Function):
    """With weights: q and k are kept as they came, and one number of each head."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor | None,
        q_weight: Tensor,
        k_weight: Tensor,
        eps: float,
        interleaved: bool,
    ) -> tuple[Tensor, Tensor]:
        forward = _forward if is_compiling() else _forward_now
        wanted = _BOTH | _OF_Q | _OF_K
        made = forward(q, k, cos, sin, positions, q_weight, k_weight, eps, interleaved, False, wanted)
        q_out, k_out, q_rstd, k_rstd = made
        if not (q.requires_grad or q_weight.requires_grad):
            ctx.mark_non_differentiable(q_out)
        elif not (k.requires_grad or k_weight.requires_grad):
            ctx.mark_non_differentiable(k_out)
        ctx.save_for_backward(q, k, q_rstd, k_rstd, cos, sin, positions, q_weight, k_weight)
        ctx.interleaved = interleaved
        ctx.set_materialize_grads(False)
        return q_out, k_out

    @staticmethod
    def backward(ctx: Any, dq_out: Tensor | None, dk_out: Tensor | None) -> Any:
        q, k, q_rstd, k_rstd, *others = ctx.saved_tensors
        wants_q, wants_k, *_, wants_dq_weight, wants_dk_weight = ctx.needs_input_grad[:7]
        wanted = 0
        if dq_out is not None:
            wanted |= (_Q if wants_q else 0) | (_OF_Q if wants_dq_weight else 0)
        if dk_out is not None:
            wanted |= (_K if wants_k else 0) | (_OF_K if wants_dk_weight else 0)
        if not wanted:
            return (None,) * 9
        with torch.no_grad():
            if not wanted & (_Q | _OF_Q):
                dq_out, q, q_rstd = _no_heads(dk_out), _no_heads(q), _no_heads(q_rstd)  # type: ignore[arg-type]
            if not wanted & (_K | _OF_K):
                dk_out, k, k_rstd = _no_heads(dq_out), _no_heads(k), _no_heads(k_rstd)  # type: ignore[arg-type]
            made = _backward(dq_out, dk_out, q, k, q_rstd, k_rstd, *others, ctx.interleaved, wanted)
        if torch.is_grad_enabled():
            made = refuse_second_gradient("rope", list(made), [dq_out, dk_out, q, k, *others[-2:]])
        dq, dk, dq_weight, dk_weight = made
        return dq, dk, None, None, None, dq_weight, dk_weight, None, None


_apply = direct_apply(_Rope)
_apply_to_one = direct_apply(_OneInPlace)
_apply_normed = direct_apply(_NormedRope)

# ---- raw ops -------------------------------------------------------------------------------------------------------


# Defaults as in the schema: torch leaves out what is one when it calls these.
def _plain_forward(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None = None,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = _EPS,
    interleaved: bool = False,
    inverse: bool = False,
    outputs: int = _BOTH,
) -> tuple[Tensor | None, ...]:
    _check(q, k, cos, sin, positions, q_weight, k_weight, eps, interleaved)
    cos, sin = _angles(q, cos, sin, positions)
    turned, rstds = [], []
    for x, weight in ((q, q_weight), (k, k_weight)):
        y, rstd = _vectors(x), None
        if weight is not None:
            rstd = torch.rsqrt(y.square().mean(-1) + eps)
            y = y * rstd[..., None] * weight.float()
        turned.append(_turned(y, cos, -sin if inverse else sin, interleaved).to(x.dtype))
        rstds.append(rstd)
    return tuple(tensor if outputs & (1 << at) else None for at, tensor in enumerate((*turned, *rstds)))


def _vectors(tensor: Tensor) -> Tensor:
    """In fp32 and contiguous: torch adds up in the order of the strides, and a head's sum must not depend on those."""
    return tensor.float().contiguous()


def _plain_inplace(*arguments: Any) -> None:
    made = _plain_forward(*arguments[:-1])
    for x, turned in zip(arguments[:2], made[:2], strict=True):
        x.copy_(turned)


def _plain_backward(
    dq_out: Tensor,
    dk_out: Tensor,
    q: Tensor,
    k: Tensor,
    q_rstd: Tensor,
    k_rstd: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    q_weight: Tensor,
    k_weight: Tensor,
    interleaved: bool,
    outputs: int,
) -> tuple[Tensor | None, ...]:
    cos, sin = _angles(q, cos, sin, positions)
    vectors, weights = [], []
    for dx_out, x, rstd, weight in ((dq_out, q, q_rstd, q_weight), (dk_out, k, k_rstd, k_weight)):
        g = _turned(_vectors(dx_out), cos, -sin, interleaved)
        xhat = _vectors(x) * rstd[..., None]
        weights.append((g * xhat).reshape(-1, x.shape[-1]).sum(0).to(weight.dtype))
        g = g * weight.float()
        vectors.append((rstd[..., None] * (g - xhat * (g * xhat).mean(-1, keepdim=True))).to(x.dtype))
    return tuple(tensor if outputs & (1 << at) else None for at, tensor in enumerate((*vectors, *weights)))


def _fake_forward(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None = None,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = _EPS,
    interleaved: bool = False,
    inverse: bool = False,
    outputs: int = _BOTH,
) -> tuple[Tensor | None, ...]:
    _check(q, k, cos, sin, positions, q_weight, k_weight, eps, interleaved)
    turned = (x.new_empty(x.shape) for x in (q, k))
    rstds = (x.new_empty(x.shape[:-1], dtype=torch.float32) for x in (q, k))
    return tuple(tensor if outputs & (1 << at) else None for at, tensor in enumerate((*turned, *rstds)))


def _fake_inplace(*arguments: Any) -> None:
    _check(*arguments[:-2])


def _fake_backward(dq_out: Tensor, dk_out: Tensor, q: Tensor, k: Tensor, *others: Any) -> tuple[Tensor | None, ...]:
    *_, q_weight, k_weight, _, outputs = others
    made = (like.new_empty(like.shape) for like in (q, k, q_weight, k_weight))
    return tuple(tensor if outputs & (1 << at) else None for at, tensor in enumerate(made))


_TABLES = "Tensor cos, Tensor sin, Tensor? positions"
_forward = register(
    f"rope_forward(Tensor q, Tensor k, {_TABLES}=None, Tensor? q_weight=None, Tensor? k_weight=None, float eps={_EPS},"
    " bool interleaved=False, bool inverse=False, int outputs=3) -> (Tensor, Tensor, Tensor, Tensor)",
    _plain_forward,
    _fake_forward,
)
# The same dispatch without a Python frame around it (0.2 us a call). Dynamo knows only the overload.
_forward_now = _forward._op
_inplace = register(
    f"rope_inplace(Tensor(a!) q, Tensor(b!) k, {_TABLES}, Tensor? q_weight, Tensor? k_weight, float eps,"
    " bool interleaved, bool inverse, int outputs) -> ()",
    _plain_inplace,
    _fake_inplace,
)
_backward = register(
    "rope_backward(Tensor dq_out, Tensor dk_out, Tensor q, Tensor k, Tensor q_rstd, Tensor k_rstd,"
    f" {_TABLES}, Tensor q_weight, Tensor k_weight, bool interleaved, int outputs) -> (Tensor, Tensor, Tensor, Tensor)",
    _plain_backward,
    _fake_backward,
)
