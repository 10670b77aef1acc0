"""RMSNorm for PyTorch: the raw ops, their plain and fake implementations, autograd, and the function people call.

The contract is kernels/rms_norm.py. On CUDA the raw ops run rms_norm*.cu; elsewhere the plain implementations below.

    y = rms_norm(x, weight)
    y, residual = rms_norm(x, weight, residual=residual)     # residual <- x + residual; y <- norm of it
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fuselm.kernels import rms_norm as contract
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

# Masks of wanted outputs, for (y, residual_out, rstd) and (dx, dresidual, dweight).
_Y, _RESIDUAL_OUT, _RSTD = 1, 2, 4
_DX, _DRESIDUAL, _DWEIGHT = 1, 2, 4
_ROUND_FIRST = {"gemma": False, "llama": True}


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    residual: Tensor | None = None,
    offset: float = 0.0,
    cast_mode: str = "gemma",
) -> Any:
    """Normalise the last dimension of x by its root mean square and scale it by (offset + weight).

    Returns y in x's dtype; with `residual`, (y, x + residual), the sum in the residual's dtype. eps=None is 2^-23, as
    in torch. cast_mode "gemma" multiplies before it rounds (torch's order), "llama" rounds before it multiplies. Sums
    are fp32 whatever autocast says; the result keeps x's dtype. Inside torch.func transforms and forward-mode
    differentiation the plain formula runs, with every derivative torch has.
    """
    compiling = torch.compiler.is_compiling()
    if not compiling and is_transformed():
        _check(x, weight, residual, eps, offset, cast_mode)
        return rms_norm_reference(x, weight, eps, residual=residual, offset=offset, cast_mode=cast_mode)
    # The fast path asks nothing it need not: the launcher refuses bad input, and only then check() looks for the words.
    try:
        round_first = _ROUND_FIRST[cast_mode]
        eps_value = contract.DEFAULT_EPS if eps is None else eps
        if compiling:
            see_now(eps_value, offset)
        elif not type(eps_value) is type(offset) is float:  # a launcher would convert them
            _check(x, weight, residual, eps, offset, cast_mode)
        if torch.is_grad_enabled() and (
            x.requires_grad
            or (weight is not None and weight.requires_grad)
            or (residual is not None and residual.requires_grad)
        ):
            if residual is None:
                return (_RMSNorm.apply if compiling else _apply)(x, weight, eps_value, offset, round_first)
            apply = _AddRMSNorm.apply if compiling else _apply_add
            return apply(x, weight, residual, eps_value, offset, round_first)
        forward = _forward if compiling else _forward_now
        if residual is None:
            return forward(x, weight, None, eps_value, offset, round_first, _Y)[0]
        return forward(x, weight, residual, eps_value, offset, round_first, _Y | _RESIDUAL_OUT)[:2]
    except (RuntimeError, TypeError, KeyError, AttributeError, OverflowError) as caught:
        error = caught
    _check(x, weight, residual, eps, offset, cast_mode)
    # No CUDA implementation yet: this is the first CUDA tensor.
    if isinstance(error, NotImplementedError) and x.is_cuda and load_cuda():
        return rms_norm(x, weight, eps, residual=residual, offset=offset, cast_mode=cast_mode)
    raise error


def rms_norm_reference(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    residual: Tensor | None = None,
    offset: float = 0.0,
    cast_mode: str = "gemma",
) -> Any:
    """The same in plain torch, through torch's own kernel where it has one: the yardstick for errors and speed."""
    h = x if residual is None else (x + residual).to(residual.dtype)
    width = (x.shape[-1],)
    eps_value = contract.DEFAULT_EPS if eps is None else eps
    if cast_mode == "llama":
        xhat = torch.nn.functional.rms_norm(h.float(), width, None, eps_value).to(x.dtype)
        y = xhat if weight is None else (xhat * (weight + offset if offset else weight)).to(x.dtype)
    elif h.dtype != x.dtype or (weight is not None and (offset or weight.dtype != x.dtype)):
        # Torch's kernel wants one dtype: in fp32, as a model with an fp32 residual stream or fp32 weights does it.
        scale = None if weight is None else weight.float() + offset
        y = torch.nn.functional.rms_norm(h.float(), width, scale, eps_value).to(x.dtype)
    else:
        y = torch.nn.functional.rms_norm(h, width, weight, eps_value)
    return y if residual is None else (y, h)


def _check(x: Any, weight: Any, residual: Any, eps: float | None, offset: float, cast_mode: str) -> None:
    check_are_tensors(contract.NAME, {"x": x}, {"weight": weight, "residual": residual})
    x_info = info(x)
    assert x_info is not None
    contract.check(x_info, info(weight), info(residual), eps, offset, cast_mode)


class _RMSNorm(torch.autograd.Function):
    """Without a residual: nothing is kept on ctx that need not be, each attribute is a tenth of a microsecond."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, eps: float, offset: float, round_first: bool) -> Tensor:
        forward = _forward if torch.compiler.is_compiling() else _forward_now
        y, _, rstd = forward(x, weight, None, eps, offset, round_first, _Y | _RSTD)
        ctx.save_for_backward(x, rstd, weight)
        ctx.offset = offset
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, rstd, weight = ctx.saved_tensors
        with torch.no_grad():
            wanted = _DX | _DWEIGHT if ctx.needs_input_grad[1] else _DX
            dx, _, dweight = _backward(dy, x, rstd, weight, None, ctx.offset, wanted)
        if torch.is_grad_enabled():
            dx, dweight = refuse_second_gradient("rms_norm", [dx, dweight], [dy, x, weight])
        return dx, dweight, None, None, None


class _AddRMSNorm(torch.autograd.Function):
    """With a residual: two outputs, either of which may go unused."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, residual: Tensor, eps: float, offset: float, round_first: bool
    ) -> tuple[Tensor, Tensor]:
        y, h, rstd = _forward(x, weight, residual, eps, offset, round_first, _Y | _RSTD | _RESIDUAL_OUT)
        ctx.save_for_backward(h, rstd, weight)
        ctx.offset, ctx.x_dtype = offset, x.dtype
        ctx.set_materialize_grads(False)
        return y, h

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dh: Tensor | None) -> Any:
        h, rstd, weight = ctx.saved_tensors
        wants_x, wants_weight, wants_residual = ctx.needs_input_grad[:3]
        two_dtypes = wants_residual and h.dtype != ctx.x_dtype
        with torch.no_grad():
            if dy is None:  # only the sum was used: its gradient is everybody's
                dx, dresidual, dweight = dh.to(ctx.x_dtype) if dh is not None else None, dh, None
            else:
                wanted = _DX | (_DRESIDUAL if two_dtypes else 0) | (_DWEIGHT if wants_weight else 0)
                dx, dresidual, dweight = _backward(dy, h, rstd, weight, dh, ctx.offset, wanted)
                dresidual = dresidual if two_dtypes else dx
        if torch.is_grad_enabled():
            found = [dx, dresidual, dweight]
            dx, dresidual, dweight = refuse_second_gradient("rms_norm", found, [dy, dh, h, weight])
        return dx if wants_x else None, dweight, dresidual if wants_residual else None, None, None, None


_apply = direct_apply(_RMSNorm)
_apply_add = direct_apply(_AddRMSNorm)

# ---- raw ops -------------------------------------------------------------------------------------------------------


def _plain_forward(
    x: Tensor,
    weight: Tensor | None,
    residual: Tensor | None,
    eps: float,
    offset: float,
    round_first: bool,
    outputs: int,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    _check(x, weight, residual, eps, offset, "gemma")
    h = _rows(x) if residual is None else (_rows(x) + _rows(residual)).to(residual.dtype)
    rstd = torch.rsqrt(h.float().square().mean(-1) + eps)
    y = h.float() * rstd[..., None]
    if round_first:
        y = y.to(x.dtype).float()
    if weight is not None:
        y.mul_(weight.float() + offset)  # in its place, as below: on a CPU new arrays cost more than the arithmetic
    y = y.to(x.dtype)
    residual_out = h if residual is not None and outputs & _RESIDUAL_OUT else None
    return y if outputs & _Y else None, residual_out, rstd if outputs & _RSTD else None


def _rows(tensor: Tensor) -> Tensor:
    """In fp32 and contiguous: torch adds up in the order of the strides, and a row's sum must not depend on those."""
    return tensor.detach().float().contiguous()


def _fake_forward(
    x: Tensor,
    weight: Tensor | None,
    residual: Tensor | None,
    eps: float,
    offset: float,
    round_first: bool,
    outputs: int,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    _check(x, weight, residual, eps, offset, "gemma")
    h = None
    if residual is not None and outputs & _RESIDUAL_OUT:
        h = residual.new_empty(residual.shape)
    rstd = x.new_empty(x.shape[:-1], dtype=torch.float32) if outputs & _RSTD else None
    return x.new_empty(x.shape) if outputs & _Y else None, h, rstd


def _plain_backward(
    dy: Tensor,
    h: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    dresidual_out: Tensor | None,
    offset: float,
    outputs: int,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    dy32 = _rows(dy)
    xhat = _rows(h) * rstd[..., None]
    g = dy32 if weight is None else dy32 * (weight.float() + offset)
    dh = g * xhat
    share = dh.mean(-1, keepdim=True)
    torch.sub(g, torch.mul(xhat, share, out=dh), out=dh).mul_(rstd[..., None])
    if dresidual_out is not None:
        dh.add_(dresidual_out.float())
    dx = dh.to(dy.dtype) if outputs & _DX else None
    dresidual = dh.to(h.dtype, copy=True) if outputs & _DRESIDUAL else None
    dweight = None
    if weight is not None and outputs & _DWEIGHT:
        dweight = xhat.mul_(dy32).reshape(-1, dy.shape[-1]).sum(0).to(weight.dtype)
    return dx, dresidual, dweight


def _fake_backward(
    dy: Tensor,
    h: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    dresidual_out: Tensor | None,
    offset: float,
    outputs: int,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    dweight = weight.new_empty(weight.shape) if weight is not None and outputs & _DWEIGHT else None
    dx = dy.new_empty(dy.shape) if outputs & _DX else None
    return dx, h.new_empty(h.shape) if outputs & _DRESIDUAL else None, dweight


_forward = register(
    "rms_norm_forward(Tensor x, Tensor? weight, Tensor? residual, float eps, float offset, bool round_first,"
    " int outputs) -> (Tensor, Tensor, Tensor)",
    _plain_forward,
    _fake_forward,
)
# The same dispatch without a Python frame around it (0.2 us a call). Dynamo knows only the overload.
_forward_now = _forward._op
_backward = register(
    "rms_norm_backward(Tensor dy, Tensor h, Tensor rstd, Tensor? weight, Tensor? dresidual_out, float offset,"
    " int outputs) -> (Tensor, Tensor, Tensor)",
    _plain_backward,
    _fake_backward,
)
