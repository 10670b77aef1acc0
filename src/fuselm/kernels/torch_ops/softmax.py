"""Softmax for PyTorch: the raw ops, their plain and fake implementations, autograd, and the function people call.

The contract is kernels/softmax.py. On CUDA the raw ops run softmax.cu; elsewhere the plain implementations below.

    y = softmax(x)
    y = softmax(scores, scale=0.125, causal=True)      # scores [B, N, T, S]
    y = softmax(scores, mask=mask)                     # mask [B, 1, 1, S], -inf where nothing may be seen
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from fuselm.kernels import softmax as contract
from fuselm.kernels.torch_ops import (
    check_are_tensors,
    direct_apply,
    info,
    is_transformed,
    load_cuda,
    refuse_second_gradient,
    register,
    see_now,
)

_FIRST = 1  # mask of wanted outputs: both raw ops have one
_SCALE = 1.0  # the default, known again by being the same object


def softmax(x: Tensor, *, scale: float = _SCALE, causal: bool = False, mask: Tensor | None = None) -> Tensor:
    """Softmax of scale * x + mask over the last dimension, in fp32, rounded once to x's dtype.

    With `causal`, x is [..., T, S], the T queries being the last of the S positions: query t sees keys up to t + S - T.
    The mask has any dtype that x may have and any shape that broadcasts to x's; it may learn. With a mask or causal, a
    row in which nothing may be seen is all zeros, and so is its gradient; without them it is NaN, as in torch. Inside
    torch.func transforms and forward-mode differentiation the plain formula runs, with every derivative torch has.
    """
    compiling = is_compiling()
    if not compiling and is_transformed():
        _check(x, mask, scale, causal)
        return softmax_reference(x, scale=scale, causal=causal, mask=mask)
    # The fast path asks nothing it need not: the launcher refuses bad input, and only then check() looks for the words.
    try:
        given = not compiling and (causal is not False or scale is not _SCALE)
        if given and (type(causal) is not bool or type(scale) is not float):  # a launcher would convert them
            _check(x, mask, scale, causal)
        elif compiling:
            see_now(scale)
        if (x.requires_grad or (mask is not None and mask.requires_grad)) and torch.is_grad_enabled():
            y: Tensor = (_Softmax.apply if compiling else _apply)(x, mask, scale, causal)
        elif given or compiling or mask is not None:
            y = (_forward if compiling else _forward_now)(x, mask, scale, causal, _FIRST)
        else:
            y = _forward_now(x)  # four arguments that are their defaults would cost 0.6 us if they were passed
        return y
    except (RuntimeError, TypeError, AttributeError, OverflowError) as caught:
        error = caught
    _check(x, mask, scale, causal)
    # No CUDA implementation yet: this is the first CUDA tensor.
    if isinstance(error, NotImplementedError) and x.is_cuda and load_cuda():
        return softmax(x, scale=scale, causal=causal, mask=mask)
    raise error


def softmax_reference(x: Tensor, *, scale: float = 1.0, causal: bool = False, mask: Tensor | None = None) -> Tensor:
    """The same in plain torch, through torch's own kernel where it has one: the yardstick for errors and speed.

    It has one for x alone, which adds up in fp32 and rounds once. Else the formula is written out. Its gradient is then
    that of a 16-bit softmax all the same, made from the rounded result; compilers and transforms differentiate the
    formula itself.
    """
    maybe_blind = causal or mask is not None
    if scale == 1 and not maybe_blind:
        return torch.softmax(x, dim=-1)
    scores = _scores(x, mask, scale, causal)
    if x.dtype == scores.dtype or is_compiling() or is_transformed():
        return _shares(scores, maybe_blind).to(x.dtype)
    y: Tensor = _RoundedShares.apply(scores, maybe_blind, x.dtype)
    return y


def _scores(x: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    """scale * x + mask in fp32 (in float64 where x is), -inf where nothing may be seen."""
    scores = (x if x.dtype == torch.float64 else x.float()) * scale
    if mask is not None:
        scores = scores + mask.to(scores.dtype)
    if causal:
        queries, keys = x.shape[-2:]
        hidden = torch.ones(queries, keys, dtype=torch.bool, device=x.device).triu(keys - queries + 1)  # [T, S]
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores


def _shares(scores: Tensor, maybe_blind: bool) -> Tensor:
    """Softmax of fp32 scores, with zeros for a row of nothing but -inf if there may be one."""
    if not maybe_blind:
        return torch.softmax(scores, dim=-1)
    # Before and after: softmax of nothing but -inf is NaN, and so would be its gradient.
    blind = (scores == -torch.inf).all(-1, keepdim=True)
    return torch.softmax(scores.masked_fill(blind, 0.0), dim=-1).masked_fill(blind, 0.0)


class _RoundedShares(torch.autograd.Function):
    """Softmax of fp32 scores in 16 bits, with the gradient torch's own softmax of 16 bits has: from what it returned.

    Differentiating the formula would keep an fp32 copy of the result, and be more exact than any op that does not.
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor, maybe_blind: bool, dtype: torch.dtype) -> Tensor:
        y = _shares(scores, maybe_blind).to(dtype)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        (y,) = ctx.saved_tensors
        return _softmax_backward(dy.float(), y.float()), None, None


def _softmax_backward(dy: Tensor, y: Tensor) -> Tensor:
    """y * (dy - sum(dy * y)) in fp32, by torch's own kernel, whose derivative torch knows too."""
    dscores: Tensor = torch.ops.aten._softmax_backward_data(dy, y, -1, torch.float32)
    return dscores


def _check(x: Any, mask: Any, scale: float, causal: bool) -> None:
    check_are_tensors(contract.NAME, {"x": x}, {"mask": mask})
    x_info = info(x)
    assert x_info is not None
    contract.check(x_info, info(mask), scale, causal)


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
        y: Tensor = (_forward if is_compiling() else _forward_now)(x, mask, scale, causal, _FIRST)
        ctx.save_for_backward(y)
        ctx.scale = scale
        if mask is not None:
            ctx.mask_shape, ctx.mask_dtype = mask.shape, mask.dtype
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        (y,) = ctx.saved_tensors
        wants_x, wants_mask = ctx.needs_input_grad[:2]
        dx = dmask = None
        with torch.no_grad():
            if wants_x:
                dx = _backward(dy, y, ctx.scale, _FIRST)
            if wants_mask:
                dscores = dx if dx is not None and ctx.scale == 1 else _backward(dy, y, 1.0, _FIRST)
                dmask = _summed_to(dscores, ctx.mask_shape, ctx.mask_dtype)
        if torch.is_grad_enabled():
            dx, dmask = refuse_second_gradient("softmax", [dx, dmask], [dy, y])
        return dx, dmask, None, None


def _summed_to(gradient: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """The sum, in fp32, over the dimensions along which a mask was broadcast; memory of its own in any case."""
    added = gradient.dim() - len(shape)
    spread = [i for i, size in enumerate(gradient.shape) if i < added or shape[i - added] != size]
    if not spread:
        return gradient.to(dtype, copy=True).view(shape)
    return gradient.sum(spread, keepdim=True, dtype=torch.float32).to(dtype).view(shape)


_apply = direct_apply(_Softmax)

# ---- raw ops -------------------------------------------------------------------------------------------------------


# Defaults as in the schema: torch leaves out what is one when it calls these.
def _plain_forward(
    x: Tensor, mask: Tensor | None = None, scale: float = _SCALE, causal: bool = False, outputs: int = _FIRST
) -> Tensor:
    _check(x, mask, scale, causal)
    # Contiguous: torch adds up in the order of the strides, and a row's sum must not depend on those.
    return _shares(_scores(x.contiguous(), mask, scale, causal), causal or mask is not None).to(x.dtype)


def _fake_forward(
    x: Tensor, mask: Tensor | None = None, scale: float = _SCALE, causal: bool = False, outputs: int = _FIRST
) -> Tensor:
    _check(x, mask, scale, causal)
    return x.new_empty(x.shape)


def _plain_backward(dy: Tensor, y: Tensor, scale: float, outputs: int) -> Tensor:
    dscores = _softmax_backward(dy.float().contiguous(), y.float().contiguous())
    return (dscores * scale).to(dy.dtype)


def _fake_backward(dy: Tensor, y: Tensor, scale: float, outputs: int) -> Tensor:
    return dy.new_empty(dy.shape)


_forward = register(
    "softmax_forward(Tensor x, Tensor? mask=None, float scale=1.0, bool causal=False, int outputs=1) -> Tensor",
    _plain_forward,
    _fake_forward,
)
# The same dispatch without a Python frame around it (0.2 us a call). Dynamo knows only the overload.
_forward_now = _forward._op
_backward = register(
    "softmax_backward(Tensor dy, Tensor y, float scale, int outputs) -> Tensor", _plain_backward, _fake_backward
)
