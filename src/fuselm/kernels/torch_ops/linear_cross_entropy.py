"""The loss of a head for PyTorch: logits a block of rows at a time, their gradients made where they lie.

The contract is kernels/linear_cross_entropy.py. A block's logits come from torch's matmul (cuBLAS) into one workspace,
the raw ops of cross_entropy.py turn them into losses and gradients, and more matmuls carry these on to hidden, weight
and bias: for "mean" and "sum" in the forward pass already, for an incoming gradient of 1, which backward then applies.
It is made of other ops, so that the same code runs on every device; linear_cross_entropy.cu has that last factor only.

    loss = linear_cross_entropy(hidden, head_weight, targets)      # [..., D], [V, D], [...] -> ()
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fuselm.kernels import linear_cross_entropy as contract
from fuselm.kernels.torch_ops import (
    check_are_tensors,
    cuda_state,
    info,
    is_transformed,
    load_cuda,
    pieces,
    refuse_second_gradient,
    register,
)
from fuselm.kernels.torch_ops import cross_entropy as rows_loss
from fuselm.kernels.torch_ops.blocks import DBIAS, DHIDDEN, DWEIGHT, Blocks, Gradients, sum_dtype
from fuselm.kernels.torch_ops.cross_entropy_plain import wide_dtype
from fuselm.kernels.torch_ops.pieces import Pieces

# So many losses at most, of one block of rows, are counted and added up by the loss's own block of threads; more by
# torch's kernels, which have a whole GPU for it.
FEW_LOSSES = 1 << 14
# Mask of wanted outputs, for (loss, losses, lse, dhidden, dweight, dbias); the last three as in blocks.py.
_LOSS, _LOSSES, _LSE, _GRADIENTS = 1, 2, 4, 8


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
    max_bytes: int | None = None,
) -> Tensor:
    """The loss of hidden [..., D] through a head [V, D]: cross_entropy(hidden @ weight.T + bias, targets), in fp32.

    `max_bytes` bounds what memory logits take, in hidden's dtype (None: 256 MiB): rows are worked off in blocks. On a
    CPU 16 bits are multiplied as fp32, and that counts too.
    Weight and bias are rounded to hidden's dtype, whatever autocast says; their gradients come in their own. Options,
    and targets that do not count, are as in cross_entropy. Inside torch.func transforms and forward-mode
    differentiation the plain formula runs, all logits at once.
    """
    options = (ignore_index, label_smoothing, z_loss, softcap, reduction, max_bytes)
    compiling = torch.compiler.is_compiling()
    try:
        usual = max_bytes is None and type(label_smoothing) is type(z_loss) is float and not compiling
        if usual and _is_plain(hidden, weight, targets, bias):
            if not cuda_state() and hidden.is_cuda:
                load_cuda()  # else the first loss would be another path's
            if softcap is not None or ignore_index != -100:  # what a launcher could not tell from what is allowed
                contract.check_options(*options)
            logits = F.linear(hidden, weight, bias)
            return rows_loss.loss_now(
                logits, targets, (ignore_index, label_smoothing, z_loss, softcap or 0.0), reduction
            )
    except (RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError, OverflowError):
        pass  # the checks below have the words
    contract.check_options(*options)
    if not compiling:
        _check(hidden, weight, targets, bias, options)
        if is_transformed():
            named: dict[str, Any] = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
            named |= {"z_loss": z_loss, "softcap": softcap, "reduction": reduction}
            return linear_cross_entropy_reference(hidden, weight, targets, bias, **named)
        if torch.is_anomaly_enabled():
            rows_loss.refuse_strays(contract.NAME, len(weight), targets, ignore_index)
    scalars = (ignore_index, float(label_smoothing), float(z_loss), float(softcap or 0.0))
    limit = contract.DEFAULT_MAX_BYTES if max_bytes is None else max_bytes
    wanted = 0
    if torch.is_grad_enabled():
        wanted = (DHIDDEN if hidden.requires_grad else 0) | (DWEIGHT if weight.requires_grad else 0)
        wanted |= DBIAS if bias is not None and bias.requires_grad else 0
    if reduction == "none":
        if wanted:
            return _Losses.apply(hidden, weight, targets, bias, wanted, limit, *scalars)
        return _forward(hidden, weight, targets, bias, *scalars, False, limit, _LOSSES)[1]
    if not wanted:
        return _forward(hidden, weight, targets, bias, *scalars, reduction == "mean", limit, _LOSS)[0]
    function = _LossTraced if compiling else _Loss
    return function.apply(hidden, weight, targets, bias, wanted, limit, *scalars, reduction == "mean")


def _is_plain(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None) -> bool:
    """Whether a matmul and a loss are all there is to do: no gradient, no conversion, no block but one.

    It is the call of a small evaluation, where blocks would cost several times the host time of the two.
    """
    dtype, vocabulary, on_cuda = hidden.dtype, weight.shape[0], hidden.is_cuda
    return (
        not (torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad))
        and (bias is None or (bias.dtype == dtype and bias.shape == weight.shape[:1] and not bias.requires_grad))
        and weight.dtype == dtype
        and (dtype == torch.float32 or (dtype == torch.bfloat16 and on_cuda))
        and (on_cuda or hidden.is_cpu)
        and targets.shape == hidden.shape[:-1]
        and 0 < targets.numel() * vocabulary * dtype.itemsize <= contract.DEFAULT_MAX_BYTES
        and hidden.numel() > 0
        and targets.numel() <= FEW_LOSSES
        and vocabulary % 8 == 0
        and hidden.data_ptr() % 16 == 0
        and weight.data_ptr() % 16 == 0
        and hidden.is_contiguous()
        and weight.is_contiguous()
        and not torch.is_autocast_enabled("cuda" if on_cuda else "cpu")  # hidden.device.type takes half a us
        and not torch.is_anomaly_enabled()
        and not is_transformed()
    )


def linear_cross_entropy_reference(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    *,
    max_bytes: int | None = None,
    **options: Any,
) -> Tensor:
    """The same in plain torch, all logits at once, as it is mostly written: the yardstick for errors and speed."""
    dtype = hidden.dtype
    if hidden.device.type == "cpu" and dtype.itemsize == 2:
        # Not every CPU multiplies 16 bits. The sums are fp32 this way, rounded once, as they are on a GPU.
        head = weight.to(dtype).float(), None if bias is None else bias.to(dtype).float()
        logits = F.linear(hidden.float(), *head).to(dtype)  # [..., V]
    else:
        logits = F.linear(hidden, weight.to(dtype), None if bias is None else bias.to(dtype))
    return rows_loss.cross_entropy_reference(logits, targets, **options)


def _check(hidden: Any, weight: Any, targets: Any, bias: Any, options: tuple[Any, ...]) -> None:
    check_are_tensors(contract.NAME, {"hidden": hidden, "weight": weight, "targets": targets}, {"bias": bias})
    hidden_info, weight_info, targets_info = info(hidden), info(weight), info(targets)
    assert hidden_info is not None
    assert weight_info is not None
    assert targets_info is not None
    contract.check(hidden_info, weight_info, targets_info, info(bias), *options)


# ---- autograd ------------------------------------------------------------------------------------------------------


class _Loss(torch.autograd.Function):
    """A mean or a sum: forward makes the gradients, the first backward scales them where they lie and gives them away.

    A second backward over a kept graph makes them again, with the same bits.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, wanted: int, *options: Any
    ) -> Tensor:
        ctx.wanted, ctx.options = wanted, options
        ctx.save_for_backward(hidden, weight, targets, bias)
        loss, *ctx.gradients = _loss_and_gradients(hidden, weight, targets, bias, wanted, options)
        return loss

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> Any:
        hidden, weight, targets, bias = ctx.saved_tensors
        gradients, ctx.gradients = ctx.gradients, None
        with torch.no_grad():
            if gradients is None:
                gradients = _loss_and_gradients(hidden, weight, targets, bias, ctx.wanted, ctx.options)[1:]
            factor = _factor(dloss, hidden, weight, targets, ctx.options)
            if rows_loss._is_batch(dloss):  # one memory cannot hold what it makes
                gradients = _scaled(gradients, factor)
            else:
                for gradient in filter(torch.is_tensor, gradients):
                    _scale(gradient, factor, 0)
            gradients = _in_own_dtypes(gradients, weight, bias)
        if torch.is_grad_enabled():
            gradients = refuse_second_gradient("linear_cross_entropy", gradients, [dloss, hidden, weight, bias])
        return _per_argument(gradients, ctx.options)


class _LossTraced(torch.autograd.Function):
    """The same for torch.compile, which wants functions without side effects."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, wanted: int, *options: Any
    ) -> Tensor:
        ctx.options = options
        loss, *gradients = _loss_and_gradients(hidden, weight, targets, bias, wanted, options)
        ctx.save_for_backward(hidden, weight, targets, bias, *gradients)
        return loss

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> Any:
        hidden, weight, targets, bias, *gradients = ctx.saved_tensors
        factor = _factor(dloss, hidden, weight, targets, ctx.options)
        return _per_argument(_in_own_dtypes(_scaled(gradients, factor), weight, bias), ctx.options)


class _Losses(torch.autograd.Function):
    """One loss a row: what comes in for each must be known before gradients are added up, so backward makes them."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, wanted: int, *options: Any
    ) -> Tensor:
        max_bytes, *scalars = options
        made = _forward(hidden, weight, targets, bias, *scalars, False, max_bytes, _LOSSES | _LSE)
        ctx.wanted, ctx.options = wanted, options
        ctx.save_for_backward(hidden, weight, targets, bias, made[2])
        losses: Tensor = made[1]
        return losses

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> Any:
        hidden, weight, targets, bias, lse = ctx.saved_tensors
        max_bytes, *scalars = ctx.options
        with torch.no_grad():
            made = _backward(hidden, weight, targets, bias, lse, dloss, *scalars, max_bytes, ctx.wanted)
            gradients = _in_own_dtypes(made, weight, bias)
        if torch.is_grad_enabled():
            gradients = refuse_second_gradient("linear_cross_entropy", gradients, [dloss, hidden, weight, bias])
        return _per_argument(gradients, ctx.options)


def _loss_and_gradients(
    hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, wanted: int, options: tuple[Any, ...]
) -> list[Any]:
    """Loss, dhidden, dweight and dbias."""
    max_bytes, *scalars = options  # the last of them is `mean`
    made = _forward(hidden, weight, targets, bias, *scalars, max_bytes, _LOSS | _GRADIENTS * wanted)
    return [made[0], *made[3:]]


def _factor(dloss: Tensor, hidden: Tensor, weight: Tensor, targets: Tensor, options: tuple[Any, ...]) -> Tensor:
    """What the gradients of the forward pass are still to be multiplied by."""
    if hidden.dtype != torch.float16 or not options[-1]:
        return dloss
    count = _count(targets, options[1], weight.shape[0])
    return dloss * (_mantissa(count) / count)  # 2^-k, exactly


def _scaled(gradients: list[Tensor | None], factor: Tensor) -> list[Tensor | None]:
    return [None if g is None else (g.float() * factor).to(g.dtype) for g in gradients]


def _in_own_dtypes(gradients: Any, weight: Tensor, bias: Tensor | None) -> list[Tensor | None]:
    """The raw ops leave sums over rows in fp32 where those would not fit their dtype."""
    dhidden, dweight, dbias = gradients
    return [
        dhidden,
        None if dweight is None else dweight.to(weight.dtype),
        None if dbias is None or bias is None else dbias.to(bias.dtype),
    ]


def _per_argument(gradients: list[Tensor | None], options: tuple[Any, ...]) -> tuple[Tensor | None, ...]:
    dhidden, dweight, dbias = gradients
    return dhidden, dweight, None, dbias, None, *(None for _ in options)


# ---- numbers -------------------------------------------------------------------------------------------------------


def _count(targets: Tensor, ignore_index: int, vocabulary: int) -> Tensor:
    """How many targets count, at least 1: an fp32 number on the device."""
    ids = targets.long()
    counted = (ids != ignore_index) & (ids >= 0) & (ids < vocabulary)
    return counted.sum().clamp(min=1).float()


def _total(losses: Tensor, count: Tensor | None) -> Tensor:
    """Their sum, or their mean over `count`, rounded once: many fp32 losses make a sum that fp32 is coarse for."""
    total = losses.sum(dtype=wide_dtype(losses))
    return total.float() if count is None else torch.div(total, count, out=losses.new_empty(()))


def _mantissa(count: Tensor) -> Tensor:
    """count / 2^k, in [1, 2)."""
    return torch.frexp(count).mantissa * 2


# ---- raw ops -------------------------------------------------------------------------------------------------------


def _ready(hidden: Tensor) -> Any:
    """What these ops are made of can run on hidden's device, and means what it says: autocast would round fp32."""
    if hidden.is_cuda:
        load_cuda()
    return torch._C._DisableAutocast()


@torch.no_grad()
def _plain_forward(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    mean: bool,
    max_bytes: int,
    outputs: int,
) -> tuple[Tensor | None, ...]:
    scalars = (ignore_index, label_smoothing, z_loss, softcap)
    with _ready(hidden):
        blocks = Blocks(hidden, weight, targets, bias, max_bytes, outputs // _GRADIENTS)
        loss, losses, lse = _in_blocks(blocks, scalars, mean, outputs)
        gradients = blocks.gradients(hidden.shape)
    return (
        loss,
        losses.view(targets.shape) if outputs & _LOSSES else None,
        lse.view(targets.shape) if outputs & _LSE else None,
        *gradients,
    )


def _in_blocks(
    blocks: Blocks, scalars: rows_loss.Scalars, mean: bool, outputs: int
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Loss, losses and lse, the first and the last if wanted; the gradients are left in the blocks."""
    hidden, targets, wanted = blocks.hidden, blocks.targets, outputs // _GRADIENTS
    # 1 / count would push the gradients of fp16 logits below what fp16 holds: its power of two comes last.
    in_parts = hidden.dtype == torch.float16
    by_loss = blocks.is_one and len(targets) <= FEW_LOSSES and not in_parts
    count = _count(targets, scalars[0], len(blocks.weight)) if mean and not by_loss else None
    divisor = _mantissa(count) if in_parts and count is not None else count
    made_by_loss = outputs & _LSE | _LOSSES
    if by_loss:
        made_by_loss |= outputs & _LOSS | (rows_loss._COUNTED if mean and wanted else 0)
    loss: Tensor | None = None
    losses: list[Tensor] = []
    lses: list[Tensor] = []
    raw = rows_loss._inplace if wanted else rows_loss._forward
    for block in blocks:
        logits = blocks.logits(block)
        take: Any = pieces.inplace if isinstance(logits, Pieces) else raw
        made = take(logits, targets[block], divisor, *scalars, mean, made_by_loss)
        losses.append(made[1])
        if outputs & _LSE:
            lses.append(made[2])
        loss = made[0]
        if wanted:
            blocks.add(block, logits)
    whole = _joined(losses, hidden)
    if outputs & _LOSS and loss is None:
        loss = _total(whole, count)
    return loss, whole, _joined(lses, hidden)


def _joined(parts: list[Tensor], hidden: Tensor) -> Tensor:
    """A number for each row, of as many blocks as there are."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts) if parts else hidden.new_empty(0, dtype=torch.float32)


def _fake_forward(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    mean: bool,
    max_bytes: int,
    outputs: int,
) -> tuple[Tensor | None, ...]:
    options = (ignore_index, label_smoothing, z_loss, softcap or None, "mean", max_bytes)
    _check(hidden, weight, targets, bias, options)
    loss = hidden.new_empty((), dtype=torch.float32) if outputs & _LOSS else None
    rows = (hidden.new_empty(targets.shape, dtype=torch.float32) if outputs & bit else None for bit in (_LOSSES, _LSE))
    return loss, *rows, *_fake_gradients(hidden, weight, outputs // _GRADIENTS)


def _fake_gradients(hidden: Tensor, weight: Tensor, wanted: int) -> Gradients:
    dweight = weight.new_empty(weight.shape, dtype=sum_dtype(hidden, weight)) if wanted & DWEIGHT else None
    dbias = weight.new_empty(weight.shape[:1], dtype=torch.float32) if wanted & DBIAS else None
    return hidden.new_empty(hidden.shape) if wanted & DHIDDEN else None, dweight, dbias


@torch.no_grad()
def _plain_backward(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    lse: Tensor,
    dloss: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    max_bytes: int,
    outputs: int,
) -> Gradients:
    scalars = (ignore_index, label_smoothing, z_loss, softcap)
    with _ready(hidden):
        blocks = Blocks(hidden, weight, targets, bias, max_bytes, outputs, held=2)  # logits and their gradients
        flat_lse, flat_dloss = lse.reshape(-1), dloss.reshape(-1).contiguous()  # [M]
        for block in blocks:
            given = (blocks.logits(block), blocks.targets[block], flat_lse[block], flat_dloss[block], None)
            blocks.add(block, rows_loss._backward(*given, *scalars, 1))
        return blocks.gradients(hidden.shape)


def _fake_backward(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    lse: Tensor,
    dloss: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    max_bytes: int,
    outputs: int,
) -> Gradients:
    return _fake_gradients(hidden, weight, outputs)


def _plain_scale(gradient: Tensor, factor: Tensor, outputs: int) -> None:
    gradient.copy_(gradient.float() * factor)


def _fake_scale(gradient: Tensor, factor: Tensor, outputs: int) -> None:
    return None


_HEAD = "Tensor hidden, Tensor weight, Tensor targets, Tensor? bias"
_SCALARS = "int ignore_index, float label_smoothing, float z_loss, float softcap"
_forward = register(
    f"linear_cross_entropy_forward({_HEAD}, {_SCALARS}, bool mean, int max_bytes, int outputs)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _plain_forward,
    _fake_forward,
    made_of_ops=True,
)
_backward = register(
    f"linear_cross_entropy_backward({_HEAD}, Tensor lse, Tensor dloss, {_SCALARS}, int max_bytes, int outputs)"
    " -> (Tensor, Tensor, Tensor)",
    _plain_backward,
    _fake_backward,
    made_of_ops=True,
)
_scale = register(
    "linear_cross_entropy_scale(Tensor(a!) gradient, Tensor factor, int outputs) -> ()", _plain_scale, _fake_scale
)
