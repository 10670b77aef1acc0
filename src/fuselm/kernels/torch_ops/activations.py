"""What the activations of PyTorch share: plain formulas, and the raw ops and autograd of one input or of gate and up.

Knows torch and no op of the family: each of its files passes its name, check and formulas, and has its own function for
people to call. A raw op takes tensors, the options of the op (`tanh`, or none) and the mask of wanted outputs, of which
all are optional; autograd is an autograd.Function over it.

    raw = unary("silu", check, silu, by_slope(silu_slope))
    y = raw.forward_now(x)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from fuselm.kernels.torch_ops import direct_apply, refuse_second_gradient, register

_FIRST, _SECOND = 1, 2  # masks of wanted outputs
_TANH = "bool tanh=False, "

# ---- plain formulas, in fp32 ---------------------------------------------------------------------------------------
# Of exp and erfc alone: torch's CPU kernels of silu, gelu and sigmoid give the last few numbers of a tensor by
# other code than those before, and a number's result may not depend on its place. Each step is taken in the memory of
# the one before: on a CPU a new array of a megabyte costs more than the arithmetic that fills it.


def silu(x: Tensor) -> Tensor:
    """x / (1 + exp(-x))."""
    below = _one_and_exp(torch.neg(x))
    return torch.div(x, below, out=below)


def silu_slope(x: Tensor) -> Tensor:
    """Its derivative: s (1 + x (1 - s)), s being 1 / (1 + exp(-x))."""
    share = _one_and_exp(torch.neg(x)).reciprocal_()
    return torch.rsub(share, 1).mul_(x).add_(1).mul_(share)


def gelu(x: Tensor, tanh: bool = False) -> Tensor:
    """x times the normal distribution's share below x, or GPT-2's formula."""
    if not tanh:
        return _normal_share(x).mul_(x)
    below = _one_and_exp(_twice_u(x).neg_())
    return torch.div(x, below, out=below)


def gelu_slope(x: Tensor, tanh: bool = False) -> Tensor:
    """Its derivative."""
    if not tanh:
        density = torch.mul(x, -0.5).mul_(x).exp_().div_(math.sqrt(2 * math.pi))
        return density.mul_(x).add_(_normal_share(x))
    # Of exp(-|2 u|), of which nothing cancels.
    power = _twice_u(x).abs_().neg_().exp_()
    larger = (power + 1).reciprocal_()
    smaller = power.mul_(larger)
    share = torch.where(x < 0, smaller, larger)
    steepness = torch.mul(x, 3 * 0.044715).mul_(x).add_(1).mul_(math.sqrt(8 / math.pi))
    return smaller.mul_(larger).mul_(x).mul_(steepness).add_(share)


def relu2(x: Tensor) -> Tensor:
    """The square of x where it is positive, else 0."""
    return torch.relu(x).square_()


def relu2_gradient(dy: Tensor, x: Tensor) -> Tensor:
    """0 where x is not positive, whatever dy is."""
    gradient: Tensor = torch.ops.aten.threshold_backward(torch.mul(x, 2).mul_(dy), x, 0)
    return gradient


def _one_and_exp(x: Tensor) -> Tensor:
    """1 + exp(x), in x's memory."""
    return x.exp_().add_(1)


def _normal_share(x: Tensor) -> Tensor:
    return torch.mul(x, -math.sqrt(0.5)).erfc_().mul_(0.5)


def _twice_u(x: Tensor) -> Tensor:
    """sqrt(8 / pi) (x + 0.044715 x^3)."""
    return torch.mul(x, 0.044715).mul_(x).mul_(x).add_(x).mul_(math.sqrt(8 / math.pi))


# ---- raw ops and autograd ------------------------------------------------------------------------------------------


class Raw(NamedTuple):
    """How a raw op is called, without and with a gradient."""

    forward: Any  # the overload: all that Dynamo knows
    forward_now: Any  # the same dispatch without a Python frame around it (0.2 us a call)
    function: type[torch.autograd.Function]
    apply: Callable[..., Any]  # its `apply`, for calls that nothing traces or transforms


Formula = Callable[..., Tensor]  # of fp32 tensors and the options


def of_one_number(function: Callable[..., Tensor], x: Tensor, **options: Any) -> Tensor:
    """What a function of rows makes of a tensor without dimensions."""
    return function(x.reshape(1), **options).reshape(())


def by_slope(slope: Formula) -> Formula:
    """The gradient that is dy times a slope."""
    return lambda dy, x, *options: slope(x, *options).mul_(dy)


def unary(op: str, check: Callable[..., None], value: Formula, gradient: Formula, *, tanh: bool = False) -> Raw:
    """Raw ops <op>_forward and <op>_backward of y = f(x); with `tanh` they have that option."""

    def plain_forward(x: Tensor, *options: Any) -> Tensor:
        return value(_rows(x), *options).to(x.dtype)

    def plain_backward(dy: Tensor, x: Tensor, *options: Any) -> Tensor:
        return gradient(_rows(dy), _rows(x), *options).to(x.dtype)

    def fake_forward(x: Tensor) -> Tensor:
        return x.new_empty(x.shape)

    return _one_input(op, op, "x", check, plain_forward, fake_forward, plain_backward, tanh)


def gated(op: str, check: Callable[..., None], value: Formula, slope: Formula, *, tanh: bool = False) -> Raw:
    """Raw ops <op>_packed_forward and <op>_packed_backward of y = f(gate) * up, the two in one tensor."""

    def plain_forward(packed: Tensor, *options: Any) -> Tensor:
        gate, up = halves(packed, None)
        return value(_rows(gate), *options).mul_(up).to(packed.dtype)

    def plain_backward(dy: Tensor, packed: Tensor, *options: Any) -> Tensor:
        gate, up = halves(packed, None)
        dy, gate = _rows(dy), _rows(gate)
        made = torch.empty(packed.shape, dtype=torch.float32, device=packed.device)
        dgate, dup = halves(made, None)
        torch.mul(slope(gate, *options).mul_(up), dy, out=dgate)
        torch.mul(value(gate, *options), dy, out=dup)
        return made.to(packed.dtype)

    def fake_forward(packed: Tensor) -> Tensor:
        return packed.new_empty((*packed.shape[:-1], packed.shape[-1] // 2))

    def check_packed(packed: Tensor, *options: Any) -> None:
        check(packed, None, *options)

    return _one_input(op, f"{op}_packed", "packed", check_packed, plain_forward, fake_forward, plain_backward, tanh)


def halves(gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    """gate and up, whether they come apart or packed."""
    if up is not None:
        return gate, up
    width = gate.shape[-1] // 2
    return gate[..., :width], gate[..., width:]


def _rows(tensor: Tensor) -> Tensor:
    """In fp32 and contiguous, as results are: torch's are laid out as what they are made of."""
    return tensor.detach().float().contiguous()


def _one_input(
    op: str,
    name: str,
    argument: str,
    check: Callable[..., None],
    plain_forward: Formula,
    fake_forward: Formula,
    plain_backward: Formula,
    tanh: bool,
) -> Raw:
    """The raw ops of one tensor, from plain ones that know no mask, and their autograd."""
    count = 1 if tanh else 0  # options; behind them comes the mask, and torch leaves out what is a default

    def checked_forward(x: Tensor, *rest: Any) -> Tensor:
        check(x, *rest[:count])
        return plain_forward(x, *rest[:count])

    def checked_fake(x: Tensor, *rest: Any) -> Tensor:
        check(x, *rest[:count])
        return fake_forward(x)

    schema = f"{_TANH if tanh else ''}int outputs=1) -> Tensor"
    forward = register(f"{name}_forward(Tensor {argument}, {schema}", checked_forward, checked_fake)
    backward = register(
        f"{name}_backward(Tensor dy, Tensor {argument}, {schema}",
        lambda dy, x, *rest: plain_backward(dy, x, *rest[:count]),
        lambda dy, x, *rest: x.new_empty(x.shape),
    )
    forward_now, nothing = forward._op, (None,) * count

    class OneInput(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, *options: Any) -> Tensor:
            ctx.save_for_backward(x)
            ctx.options = options
            y: Tensor = (forward if is_compiling() else forward_now)(x, *options)
            return y

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Any:
            (x,) = ctx.saved_tensors
            with torch.no_grad():
                dx = backward(dy, x, *ctx.options)
            if torch.is_grad_enabled():
                (dx,) = refuse_second_gradient(op, [dx], [dy, x])
            return dx, *nothing

    return Raw(forward, forward_now, OneInput, direct_apply(OneInput))


def apart(op: str, check: Callable[..., None], value: Formula, slope: Formula, *, tanh: bool = False) -> Raw:
    """Raw ops <op>_forward and <op>_backward of y = f(gate) * up, each in a tensor of its own."""
    count = 1 if tanh else 0

    def plain_forward(gate: Tensor, up: Tensor, *rest: Any) -> Tensor:
        check(gate, up, *rest[:count])
        return value(_rows(gate), *rest[:count]).mul_(up).to(gate.dtype)

    def fake_forward(gate: Tensor, up: Tensor, *rest: Any) -> Tensor:
        check(gate, up, *rest[:count])
        return gate.new_empty(gate.shape)

    def plain_backward(dy: Tensor, gate: Tensor, up: Tensor, *rest: Any) -> tuple[Tensor | None, Tensor | None]:
        options, outputs = rest[:count], _mask(rest[count:])
        dgate = dup = None
        if outputs & _FIRST:
            dgate = slope(_rows(gate), *options).mul_(up).mul_(dy).to(gate.dtype)
        if outputs & _SECOND:
            dup = value(_rows(gate), *options).mul_(dy).to(up.dtype)
        return dgate, dup

    def fake_backward(dy: Tensor, gate: Tensor, up: Tensor, *rest: Any) -> tuple[Tensor | None, Tensor | None]:
        outputs = _mask(rest[count:])
        dgate = gate.new_empty(gate.shape) if outputs & _FIRST else None
        return dgate, up.new_empty(up.shape) if outputs & _SECOND else None

    options = _TANH if tanh else ""
    schema = f"{op}_forward(Tensor gate, Tensor up, {options}int outputs=1) -> Tensor"
    forward = register(schema, plain_forward, fake_forward)
    schema = f"{op}_backward(Tensor dy, Tensor gate, Tensor up, {options}int outputs=3) -> (Tensor, Tensor)"
    function = _two_inputs(op, forward, register(schema, plain_backward, fake_backward), count)
    return Raw(forward, forward._op, function, direct_apply(function))


def _mask(rest: tuple[Any, ...]) -> int:
    """What of both gradients is wanted: both, where torch has left the default out."""
    mask: int = rest[0] if rest else _FIRST | _SECOND
    return mask


def _two_inputs(op: str, forward: Any, backward: Any, count: int) -> type[torch.autograd.Function]:
    """The autograd of gate and up over their raw ops: of what need not be known nothing is computed."""
    forward_now, nothing = forward._op, (None,) * count

    class TwoInputs(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, gate: Tensor, up: Tensor, *options: Any) -> Tensor:
            ctx.save_for_backward(gate, up)
            ctx.options = options
            y: Tensor = (forward if is_compiling() else forward_now)(gate, up, *options)
            return y

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Any:
            gate, up = ctx.saved_tensors
            wants_gate, wants_up = ctx.needs_input_grad[:2]
            wanted = (_FIRST if wants_gate else 0) | (_SECOND if wants_up else 0)
            with torch.no_grad():
                dgate, dup = backward(dy, gate, up, *ctx.options, wanted)
            if torch.is_grad_enabled():
                dgate, dup = refuse_second_gradient(op, [dgate, dup], [dy, gate, up])
            return dgate, dup, *nothing

    return TwoInputs
