"""Mul for PyTorch: the raw ops, their plain and fake implementations, autograd, and the function people call.

The contract is kernels/mul.py. On CUDA the raw ops run mul.cu; elsewhere the plain implementations below.

    y = mul(x, gate)
    y = mul(x, weight)      # weight [D] for every row of x [B, T, D]
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from fuselm.kernels import mul as contract
from fuselm.kernels.elementwise import is_row
from fuselm.kernels.torch_ops import direct_apply, is_transformed, load_cuda, refuse_second_gradient, register
from fuselm.kernels.torch_ops.elementwise import columns, empty_result, infos, promoted, shared_dtype, summed_to

_FIRST, _SECOND = 1, 2  # masks of wanted outputs, dx and dy in backward
_BOTH = _FIRST | _SECOND


def mul(x: Tensor, y: Tensor) -> Tensor:
    """x * y with broadcasting, in fp32, rounded once to the dtype that x and y have.

    Where their dtypes differ the result is fp32, by dtypes alone: a tensor without dimensions counts like any other. A
    number is no tensor: x * 2.0 needs no op. Inside torch.func transforms and forward-mode differentiation the plain
    formula runs, with every derivative torch has.
    """
    compiling = is_compiling()
    if not compiling and is_transformed():
        _check(x, y)
        return mul_reference(x, y)
    # The fast path asks nothing it need not: the launcher refuses bad input, and only then check() looks for the words.
    try:
        if compiling and x is y:  # of which a Function may have one only
            y = x.view_as(x)
        if (x.requires_grad or y.requires_grad) and torch.is_grad_enabled():
            out: Tensor = (_Mul.apply if compiling else _apply)(x, y)
        else:
            out = _forward(x, y) if compiling else _forward_now(x, y)
        return out
    except (RuntimeError, TypeError, AttributeError) as caught:
        error = caught
    _check(x, y)
    # No CUDA implementation yet: this is the first CUDA tensor.
    if isinstance(error, NotImplementedError) and x.is_cuda and load_cuda():
        return mul(x, y)
    raise error


def mul_reference(x: Tensor, y: Tensor) -> Tensor:
    """The same by torch's own kernel, which rounds once too: the yardstick for errors and speed."""
    x, y = promoted(x, y)
    return torch.mul(x, y)


def _check(x: Any, y: Any) -> None:
    contract.check(*infos(contract.NAME, contract.SIGN, x, y))


class _Mul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        wants_x, wants_y = ctx.needs_input_grad
        ctx.save_for_backward(x if wants_y else None, y if wants_x else None)
        if not (wants_x and wants_y):
            ctx.looks = x.shape, x.dtype, y.shape, y.dtype
        out: Tensor = (_forward if is_compiling() else _forward_now)(x, y)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        x, y = ctx.saved_tensors
        with torch.no_grad():
            if x is not None and y is not None:
                dx, dy = _gradients(dout, x, y)
            elif y is not None:
                dx, dy = _gradient(dout, y, *ctx.looks[:2]), None
            else:
                dx, dy = None, _gradient(dout, x, *ctx.looks[2:])
        if torch.is_grad_enabled():
            dx, dy = refuse_second_gradient(contract.NAME, [dx, dy], [dout, x, y])
        return dx, dy


def _gradients(dout: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Both, in one launch where that can be."""
    full = dout.shape
    if x.shape == full == y.shape:
        dx, dy = _backward(dout, x, y, _BOTH)
    elif x.shape == full and is_row(y.shape, full):
        dx, dy = _backward_row(dout, x, y, _BOTH)
    elif y.shape == full and is_row(x.shape, full):
        dy, dx = _backward_row(dout, y, x, _BOTH)
    else:
        dx, dy = _gradient(dout, y, x.shape, x.dtype), _gradient(dout, x, y.shape, y.dtype)
    return dx, dy


def _gradient(dout: Tensor, other: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """dout times the other factor, summed to the shape of this one."""
    if other.shape == dout.shape != shape and is_row(shape, dout.shape):
        row: Tensor = _backward_row(dout, other, dout.new_empty(shape, dtype=dtype), _SECOND)[1]
        return row
    product: Tensor = _forward(dout, other)
    return product.to(dtype) if product.shape == shape else summed_to(product, shape).to(dtype)


_apply = direct_apply(_Mul)

# ---- raw ops -------------------------------------------------------------------------------------------------------


# Defaults as in the schema: torch leaves out what is one when it calls these.
def _plain_forward(x: Tensor, y: Tensor, outputs: int = _FIRST) -> Tensor:
    _check(x, y)
    return (x.float() * y.float()).to(shared_dtype(x, y)).contiguous()


def _fake_forward(x: Tensor, y: Tensor, outputs: int = _FIRST) -> Tensor:
    _check(x, y)
    return empty_result(x, y)


def _plain_backward(dout: Tensor, x: Tensor, y: Tensor, outputs: int) -> tuple[Tensor | None, Tensor | None]:
    dx = (dout.float() * y.float()).to(x.dtype).contiguous() if outputs & _FIRST else None
    dy = (dout.float() * x.float()).to(y.dtype).contiguous() if outputs & _SECOND else None
    return dx, dy


def _plain_backward_row(dout: Tensor, x: Tensor, y: Tensor, outputs: int) -> tuple[Tensor | None, Tensor | None]:
    """y is one row; where dx is not wanted it only says what dy looks like."""
    dx = (dout.float() * y.float()).to(x.dtype).contiguous() if outputs & _FIRST else None
    dy = (columns(dout) * columns(x)).sum(0).to(y.dtype).view(y.shape) if outputs & _SECOND else None
    return dx, dy


def _fake_backward(dout: Tensor, x: Tensor, y: Tensor, outputs: int) -> tuple[Tensor | None, Tensor | None]:
    return x.new_empty(x.shape) if outputs & _FIRST else None, y.new_empty(y.shape) if outputs & _SECOND else None


_forward = register("mul_forward(Tensor x, Tensor y, int outputs=1) -> Tensor", _plain_forward, _fake_forward)
# The same dispatch without a Python frame around it (0.2 us a call). Dynamo knows only the overload.
_forward_now = _forward._op
_backward = register(
    "mul_backward(Tensor dout, Tensor x, Tensor y, int outputs) -> (Tensor, Tensor)", _plain_backward, _fake_backward
)
_backward_row = register(
    "mul_backward_row(Tensor dout, Tensor x, Tensor y, int outputs) -> (Tensor, Tensor)",
    _plain_backward_row,
    _fake_backward,
)
