"""Add for PyTorch: the raw ops, their plain and fake implementations, autograd, and the function people call.

The contract is kernels/add.py. On CUDA the raw ops run add.cu; elsewhere the plain implementations below.

    x = add(x, residual, scale=0.5)      # x + 0.5 * residual, rounded once
    y = add(x, bias)                     # bias [D] for every row of x [B, T, D]
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from fuselm.kernels import add as contract
from fuselm.kernels.elementwise import is_row
from fuselm.kernels.torch_ops import direct_apply, is_transformed, load_cuda, refuse_second_gradient, register
from fuselm.kernels.torch_ops.elementwise import columns, empty_result, infos, promoted, shared_dtype, summed_to

_FIRST = 1  # mask of wanted outputs: each raw op has one
_SCALE = 1.0  # the default, known again by being the same object


def add(x: Tensor, y: Tensor, *, scale: float = _SCALE) -> Tensor:
    """x + scale * y with broadcasting, in fp32, rounded once to the dtype that x and y have.

    Where their dtypes differ the result is fp32, by dtypes alone: a tensor without dimensions counts like any other. A
    number is no tensor: x + 2.0 needs no op. Inside torch.func transforms and forward-mode differentiation the plain
    formula runs, with every derivative torch has.
    """
    compiling = is_compiling()
    if not compiling and is_transformed():
        _check(x, y, scale)
        return add_reference(x, y, scale=scale)
    # The fast path asks nothing it need not: the launcher refuses bad input, and only then check() looks for the words.
    try:
        # A launcher would convert it. A compiler's numbers have types of its own: there only a bool is known to be one.
        if scale is not _SCALE and type(scale) is not float and (not compiling or isinstance(scale, bool)):
            _check(x, y, scale)
        if compiling and x is y:  # of which a Function may have one only
            y = x.view_as(x)
        if (x.requires_grad or y.requires_grad) and torch.is_grad_enabled():
            out: Tensor = (_Add.apply if compiling else _apply)(x, y, scale)
        elif compiling:
            out = _forward(x, y, scale)
        else:  # an argument that is its default would cost 0.15 us if it were passed
            out = _forward_now(x, y) if scale is _SCALE else _forward_now(x, y, scale)
        return out
    except (RuntimeError, TypeError, AttributeError, OverflowError) as caught:
        error = caught
    _check(x, y, scale)
    # No CUDA implementation yet: this is the first CUDA tensor.
    if isinstance(error, NotImplementedError) and x.is_cuda and load_cuda():
        return add(x, y, scale=scale)
    raise error


def add_reference(x: Tensor, y: Tensor, *, scale: float = 1.0) -> Tensor:
    """The same by torch's own kernel: the yardstick for errors and speed.

    On CUDA that one rounds once, as ours does. On a CPU it rounds scale to 16 bits first, so the sum is taken in fp32.
    """
    x, y = promoted(x, y)
    if scale == 1 or x.is_cuda or x.dtype.itemsize > 2 or y.dtype.itemsize > 2:
        return torch.add(x, y, alpha=scale)
    return torch.add(x.float(), y.float(), alpha=scale).to(shared_dtype(x, y))


def _check(x: Any, y: Any, scale: float) -> None:
    contract.check(*infos(contract.NAME, contract.SIGN, x, y), scale)


class _Add(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, scale: float) -> Tensor:
        ctx.looks = x.shape, x.dtype, y.shape, y.dtype
        ctx.scale = scale
        out: Tensor = (_forward if is_compiling() else _forward_now)(x, y, scale)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        x_shape, x_dtype, y_shape, y_dtype = ctx.looks
        dx = dy = None
        with torch.no_grad():
            if ctx.needs_input_grad[0]:
                dx = _gradient(dout, 1.0, x_shape, x_dtype)
            if ctx.needs_input_grad[1]:
                dy = _gradient(dout, ctx.scale, y_shape, y_dtype)
        if torch.is_grad_enabled():
            dx, dy = refuse_second_gradient(contract.NAME, [dx, dy], [dout])
        return dx, dy, None


def _gradient(dout: Tensor, scale: float, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """scale * dout, summed to a shape; dout itself where that is all of it."""
    if dout.shape == shape:
        return (dout if scale == 1 else _backward(dout, scale, _FIRST)).to(dtype)
    if is_row(shape, dout.shape):
        return _backward_row(dout, dout.new_empty(shape, dtype=dtype), scale, _FIRST)
    return (summed_to(dout, shape) * scale).to(dtype)


_apply = direct_apply(_Add)

# ---- raw ops -------------------------------------------------------------------------------------------------------


# Defaults as in the schema: torch leaves out what is one when it calls these.
def _plain_forward(x: Tensor, y: Tensor, scale: float = _SCALE, outputs: int = _FIRST) -> Tensor:
    _check(x, y, scale)
    x32, y32 = x.float(), y.float()
    if scale != 1:  # of what is repeated along a row torch rounds some products before it adds them, on a CPU
        x32, y32 = (tensor.contiguous() for tensor in torch.broadcast_tensors(x32, y32))
    return torch.add(x32, y32, alpha=scale).to(shared_dtype(x, y)).contiguous()


def _fake_forward(x: Tensor, y: Tensor, scale: float = _SCALE, outputs: int = _FIRST) -> Tensor:
    _check(x, y, scale)
    return empty_result(x, y)


def _plain_backward(dout: Tensor, scale: float, outputs: int) -> Tensor:
    return (dout.float() * scale).to(dout.dtype).contiguous()


def _fake_backward(dout: Tensor, scale: float, outputs: int) -> Tensor:
    return dout.new_empty(dout.shape)


def _plain_backward_row(dout: Tensor, y: Tensor, scale: float, outputs: int) -> Tensor:
    """`y` says what the gradient looks like; nothing else is asked of it."""
    return (columns(dout).sum(0) * scale).to(y.dtype).view(y.shape)


def _fake_backward_row(dout: Tensor, y: Tensor, scale: float, outputs: int) -> Tensor:
    return y.new_empty(y.shape)


_forward = register(
    "add_forward(Tensor x, Tensor y, float scale=1.0, int outputs=1) -> Tensor", _plain_forward, _fake_forward
)
# The same dispatch without a Python frame around it (0.2 us a call). Dynamo knows only the overload.
_forward_now = _forward._op
_backward = register("add_backward(Tensor dout, float scale, int outputs) -> Tensor", _plain_backward, _fake_backward)
_backward_row = register(
    "add_backward_row(Tensor dout, Tensor y, float scale, int outputs) -> Tensor",
    _plain_backward_row,
    _fake_backward_row,
)
