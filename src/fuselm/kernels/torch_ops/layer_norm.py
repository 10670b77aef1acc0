"""LayerNorm for PyTorch: the raw ops, their plain and fake implementations, autograd, and the function people call.

The contract is kernels/layer_norm.py. On CUDA the raw ops run layer_norm*.cu; elsewhere the plain implementations
below.

    y = layer_norm(x, weight, bias)
    y, residual = layer_norm(x, weight, bias, residual=residual)     # residual <- x + residual; y <- norm of it
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fuselm.kernels import layer_norm as contract
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

# Masks of wanted outputs, for (y, residual_out, mean, rstd) and (dx, dresidual, dweight, dbias).
_Y, _RESIDUAL_OUT, _MEAN, _RSTD = 1, 2, 4, 8
_DX, _DRESIDUAL, _DWEIGHT, _DBIAS = 1, 2, 4, 8

Outputs = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = contract.DEFAULT_EPS,
    *,
    residual: Tensor | None = None,
) -> Any:
    """Subtract the mean of the last dimension of x, divide by its standard deviation, scale by weight and add bias.

    Returns y in x's dtype; with `residual`, (y, x + residual), the sum in the residual's dtype. Sums are fp32 whatever
    autocast says; the result keeps x's dtype. Inside torch.func transforms and forward-mode differentiation the plain
    formula runs, with every derivative torch has.
    """
    compiling = torch.compiler.is_compiling()
    if not compiling and is_transformed():
        _check(x, weight, bias, residual, eps)
        return layer_norm_reference(x, weight, bias, eps, residual=residual)
    # The fast path asks nothing it need not: the launcher refuses bad input, and only then check() looks for the words.
    try:
        if compiling:
            see_now(eps)
        elif type(eps) is not float:  # a launcher would convert it
            _check(x, weight, bias, residual, eps)
        if torch.is_grad_enabled() and (
            x.requires_grad
            or (weight is not None and weight.requires_grad)
            or (bias is not None and bias.requires_grad)
            or (residual is not None and residual.requires_grad)
        ):
            if residual is None:
                return (_LayerNorm.apply if compiling else _apply)(x, weight, bias, eps)
            return (_AddLayerNorm.apply if compiling else _apply_add)(x, weight, bias, residual, eps)
        forward = _forward if compiling else _forward_now
        if residual is None:
            return forward(x, weight, bias, None, eps, _Y)[0]
        return forward(x, weight, bias, residual, eps, _Y | _RESIDUAL_OUT)[:2]
    except (RuntimeError, TypeError, AttributeError, OverflowError) as caught:
        error = caught
    _check(x, weight, bias, residual, eps)
    # No CUDA implementation yet: this is the first CUDA tensor.
    if isinstance(error, NotImplementedError) and x.is_cuda and load_cuda():
        return layer_norm(x, weight, bias, eps, residual=residual)
    raise error


def layer_norm_reference(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = contract.DEFAULT_EPS,
    *,
    residual: Tensor | None = None,
) -> Any:
    """The same in plain torch, through torch's own kernel: the yardstick for errors and speed."""
    h = x if residual is None else (x + residual).to(residual.dtype)
    width = (x.shape[-1],)
    if all(tensor is None or tensor.dtype == x.dtype for tensor in (h, weight, bias)):
        y = torch.nn.functional.layer_norm(h, width, weight, bias, eps)
    else:
        # Torch's kernel wants one dtype: in fp32, as a model with an fp32 residual stream or fp32 weights does it.
        scale, shift = (None if tensor is None else tensor.float() for tensor in (weight, bias))
        y = torch.nn.functional.layer_norm(h.float(), width, scale, shift, eps).to(x.dtype)
    return y if residual is None else (y, h)


def _check(x: Any, weight: Any, bias: Any, residual: Any, eps: float) -> None:
    check_are_tensors(contract.NAME, {"x": x}, {"weight": weight, "bias": bias, "residual": residual})
    x_info = info(x)
    assert x_info is not None
    contract.check(x_info, info(weight), info(bias), info(residual), eps)


class _LayerNorm(torch.autograd.Function):
    """Without a residual: nothing is kept on ctx that need not be, each attribute is a tenth of a microsecond."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        forward = _forward if torch.compiler.is_compiling() else _forward_now
        y, _, mean, rstd = forward(x, weight, bias, None, eps, _Y | _MEAN | _RSTD)
        ctx.save_for_backward(x, mean, rstd, weight, bias)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, mean, rstd, weight, bias = ctx.saved_tensors
        _, wants_weight, wants_bias, _ = ctx.needs_input_grad
        with torch.no_grad():
            wanted = _DX | (_DWEIGHT if wants_weight else 0) | (_DBIAS if wants_bias else 0)
            dx, _, dweight, dbias = _backward(dy, x, mean, rstd, weight, bias, None, wanted)
        if torch.is_grad_enabled():
            found = [dx, dweight, dbias]
            dx, dweight, dbias = refuse_second_gradient("layer_norm", found, [dy, x, weight, bias])
        return dx, dweight, dbias, None


class _AddLayerNorm(torch.autograd.Function):
    """With a residual: two outputs, either of which may go unused."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        y, h, mean, rstd = _forward(x, weight, bias, residual, eps, _Y | _RESIDUAL_OUT | _MEAN | _RSTD)
        ctx.save_for_backward(h, mean, rstd, weight, bias)
        ctx.x_dtype = x.dtype
        ctx.set_materialize_grads(False)
        return y, h

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dh: Tensor | None) -> Any:
        h, mean, rstd, weight, bias = ctx.saved_tensors
        wants_x, wants_weight, wants_bias, wants_residual, _ = ctx.needs_input_grad
        two_dtypes = wants_residual and h.dtype != ctx.x_dtype
        with torch.no_grad():
            if dy is None:  # only the sum was used: its gradient is everybody's
                dx, dresidual, dweight, dbias = dh.to(ctx.x_dtype) if dh is not None else None, dh, None, None
            else:
                wanted = _DX | (_DRESIDUAL if two_dtypes else 0)
                wanted |= (_DWEIGHT if wants_weight else 0) | (_DBIAS if wants_bias else 0)
                dx, dresidual, dweight, dbias = _backward(dy, h, mean, rstd, weight, bias, dh, wanted)
                dresidual = dresidual if two_dtypes else dx
        if torch.is_grad_enabled():
            found = [dx, dresidual, dweight, dbias]
            dx, dresidual, dweight, dbias = refuse_second_gradient("layer_norm", found, [dy, dh, h, weight, bias])
        return dx if wants_x else None, dweight, dbias, dresidual if wants_residual else None, None


_apply = direct_apply(_LayerNorm)
_apply_add = direct_apply(_AddLayerNorm)

# ---- raw ops -------------------------------------------------------------------------------------------------------


def _plain_forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, eps: float, outputs: int
) -> Outputs:
    _check(x, weight, bias, residual, eps)
    h = _rows(x) if residual is None else (_rows(x) + _rows(residual)).to(residual.dtype)
    mean = h.float().mean(-1)
    centred = h.float() - mean[..., None]
    rstd = torch.rsqrt(centred.square().mean(-1) + eps)
    y = centred.mul_(rstd[..., None])  # in its place, as below: on a CPU new arrays cost more than the arithmetic
    if weight is not None:
        y.mul_(weight.float())
    if bias is not None:
        y.add_(bias.float())
    residual_out = h if residual is not None and outputs & _RESIDUAL_OUT else None
    return (
        y.to(x.dtype) if outputs & _Y else None,
        residual_out,
        mean if outputs & _MEAN else None,
        rstd if outputs & _RSTD else None,
    )


def _rows(tensor: Tensor) -> Tensor:
    """In fp32 and contiguous: torch adds up in the order of the strides, and a row's sum must not depend on those."""
    return tensor.detach().float().contiguous()


def _fake_forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, eps: float, outputs: int
) -> Outputs:
    _check(x, weight, bias, residual, eps)
    mean, rstd = (
        x.new_empty(x.shape[:-1], dtype=torch.float32) if outputs & wanted else None for wanted in (_MEAN, _RSTD)
    )
    return _made(x, outputs & _Y), _made(residual, outputs & _RESIDUAL_OUT), mean, rstd


def _made(like: Tensor | None, wanted: int) -> Tensor | None:
    return like.new_empty(like.shape) if like is not None and wanted else None


def _plain_backward(
    dy: Tensor,
    h: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    dresidual_out: Tensor | None,
    outputs: int,
) -> Outputs:
    dy32, width = _rows(dy), dy.shape[-1]
    xhat = (_rows(h) - mean[..., None]).mul_(rstd[..., None])
    g = dy32 if weight is None else dy32 * weight.float()
    along = g * xhat
    share = along.mean(-1, keepdim=True)
    dh = (g - g.mean(-1, keepdim=True)).sub_(torch.mul(xhat, share, out=along)).mul_(rstd[..., None])
    if dresidual_out is not None:
        dh.add_(dresidual_out.float())
    dx = dh.to(dy.dtype) if outputs & _DX else None
    dresidual = dh.to(h.dtype, copy=True) if outputs & _DRESIDUAL else None
    dweight = dbias = None
    if weight is not None and outputs & _DWEIGHT:
        dweight = xhat.mul_(dy32).reshape(-1, width).sum(0).to(weight.dtype)
    if bias is not None and outputs & _DBIAS:
        dbias = dy32.reshape(-1, width).sum(0).to(bias.dtype)
    return dx, dresidual, dweight, dbias


def _fake_backward(
    dy: Tensor,
    h: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    dresidual_out: Tensor | None,
    outputs: int,
) -> Outputs:
    dweight, dbias = _made(weight, outputs & _DWEIGHT), _made(bias, outputs & _DBIAS)
    return _made(dy, outputs & _DX), _made(h, outputs & _DRESIDUAL), dweight, dbias


_forward = register(
    "layer_norm_forward(Tensor x, Tensor? weight, Tensor? bias, Tensor? residual, float eps, int outputs)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _plain_forward,
    _fake_forward,
)
# The same dispatch without a Python frame around it (0.2 us a call). Dynamo knows only the overload.
_forward_now = _forward._op
_backward = register(
    "layer_norm_backward(Tensor dy, Tensor h, Tensor mean, Tensor rstd, Tensor? weight, Tensor? bias,"
    " Tensor? dresidual_out, int outputs) -> (Tensor, Tensor, Tensor, Tensor)",
    _plain_backward,
    _fake_backward,
)
