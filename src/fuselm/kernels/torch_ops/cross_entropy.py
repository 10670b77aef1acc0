"""Cross-entropy for PyTorch: the raw ops, their plain and fake implementations, autograd, and the function people call.

The contract is kernels/cross_entropy.py. On CUDA the raw ops run cross_entropy.cu; elsewhere the plain implementations
below, of the formulas in cross_entropy_plain.py. Where a gradient will be wanted, forward makes it at once, for an
incoming gradient of 1; backward hands it out, corrected if something else arrives.

    loss = cross_entropy(logits, targets)
    losses = cross_entropy(logits, targets, reduction="none", softcap=30.0)
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from fuselm.kernels import cross_entropy as contract
from fuselm.kernels.spec import refuse
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
from fuselm.kernels.torch_ops.cross_entropy_plain import counting, gradient_of, losses_of, parts, wide_dtype
from fuselm.kernels.torch_ops.places import shares_places

# Mask of wanted outputs, for (loss, losses, lse, counted, dlogits).
_LOSS, _LOSSES, _LSE, _COUNTED, _DLOGITS = 1, 2, 4, 8, 16
_NO_OUTPUTS = 0
# By reduction: what forward makes (losses always, the launcher adds them up), and what it needs for a gradient.
_MADE = {"mean": _LOSS | _LOSSES, "sum": _LOSS | _LOSSES, "none": _LOSSES}
_COUNT = {"mean": _COUNTED, "sum": 0, "none": 0}

Scalars = tuple[int, float, float, float]  # ignore_index, label_smoothing, z_loss, softcap (0: none)


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
    inplace: bool = False,
) -> Tensor:
    """Cross-entropy in fp32 of logits [..., V] and integer targets [...].

    `softcap` bends the logits to softcap * tanh(logits / softcap) first; `z_loss` adds that many times the square of
    each row's log-sum-exp. A target that is `ignore_index`, or outside of [0, V), has loss 0 and gradient 0 and is not
    counted; "mean" is over those that count, and 0 where none does. While torch.autograd's anomaly detection is on, a
    target outside that is not `ignore_index` is refused (not under torch.compile, nor inside torch.func transforms).

    `inplace` writes the gradient over the logits, which then hold no logits any more: it saves their size in memory,
    and one backward is all there can be. A gradient other than 1 that arrives is multiplied in and rounded again. It
    does nothing where no gradient is wanted, nor under torch.compile, which plans memory itself. Inside torch.func
    transforms and forward-mode differentiation the plain formula runs.
    """
    compiling = torch.compiler.is_compiling()
    if not compiling and (is_transformed() or torch.is_anomaly_enabled()):
        _check(logits, targets, ignore_index, label_smoothing, z_loss, softcap, reduction)
        if is_transformed():
            options: dict[str, Any] = {"z_loss": z_loss, "softcap": softcap, "reduction": reduction}
            options |= {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
            return cross_entropy_reference(logits, targets, **options)
        refuse_strays(contract.NAME, logits.shape[-1], targets, ignore_index)
    # The fast path asks nothing it need not: the launcher refuses bad input, and only then check() looks for the words.
    try:
        # What a launcher would convert, or could not tell from what is allowed.
        converted = not compiling and not type(label_smoothing) is type(z_loss) is float
        if softcap is not None or ignore_index != -100 or converted:
            contract.check_options("cross_entropy", ignore_index, label_smoothing, z_loss, softcap, reduction)
        scalars = (ignore_index, label_smoothing, z_loss, 0.0 if softcap is None else softcap)
        if torch.is_grad_enabled() and logits.requires_grad:
            targets = targets.contiguous()
            if compiling:
                see_now(label_smoothing, z_loss)
                apply = _TracedCrossEntropy.apply
            elif inplace:
                _refuse_what_cannot_be_overwritten(logits)
                apply = _apply_inplace
            else:
                apply = _apply
            return apply(logits, targets, scalars, reduction)
        return loss_now(logits, targets, scalars, reduction, compiling)
    except (RuntimeError, TypeError, KeyError, AttributeError, OverflowError) as caught:
        error = caught
    _check(logits, targets, ignore_index, label_smoothing, z_loss, softcap, reduction)
    # No CUDA implementation yet: this is the first CUDA tensor.
    if isinstance(error, NotImplementedError) and logits.is_cuda and load_cuda():
        more: dict[str, Any] = {"z_loss": z_loss, "softcap": softcap, "reduction": reduction, "inplace": inplace}
        return cross_entropy(logits, targets, ignore_index=ignore_index, label_smoothing=label_smoothing, **more)
    raise error


def loss_now(logits: Tensor, targets: Tensor, scalars: Scalars, reduction: str, compiling: bool = False) -> Tensor:
    """What cross_entropy returns where no gradient is wanted and nothing is to be refused."""
    forward = _forward if compiling else _forward_now
    loss, losses, *_ = forward(logits, targets.contiguous(), None, *scalars, reduction == "mean", _MADE[reduction])
    made: Tensor = losses if loss is None else loss
    return made


def cross_entropy_reference(
    logits: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
    inplace: bool = False,
) -> Tensor:
    """The same in plain torch, through torch's own loss: the yardstick for errors, and without use for `inplace`.

    What torch's loss does not take or answers otherwise (targets outside, a mean of nothing) costs four small kernels.
    """
    width = logits.shape[-1]
    flat = targets.reshape(-1).long()
    flat = torch.where(flat == flat.clamp(0, width - 1), flat, ignore_index)
    how = "sum" if reduction == "mean" else reduction
    loss = torch_loss(
        logits.reshape(-1, width), flat, ignore_index, label_smoothing, z_loss, softcap=softcap, reduction=how
    )
    if reduction == "none":
        return loss.reshape(targets.shape)
    return loss / (flat != ignore_index).sum().clamp(min=1) if reduction == "mean" else loss


def torch_loss(
    rows: Tensor,
    targets: Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    *,
    softcap: float | None = None,
    reduction: str = "mean",
) -> Tensor:
    """What people write in torch for rows [M, V] and targets [M] that are all in range: the yardstick for speed.

    In fp32, or in float64 where the rows are.
    """
    rows = rows if rows.dtype == torch.float64 else rows.float()
    if softcap is not None:
        rows = softcap * torch.tanh(rows / softcap)
    loss = F.cross_entropy(
        rows, targets, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction=reduction
    )
    if not z_loss:
        return loss
    counts = targets != ignore_index
    squares = z_loss * torch.logsumexp(rows, dim=-1).square() * counts
    if reduction == "none":
        return loss + squares
    return loss + squares.sum() / (counts.sum() if reduction == "mean" else 1)


def _check(
    logits: Any,
    targets: Any,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    reduction: str,
) -> None:
    check_are_tensors(contract.NAME, {"logits": logits, "targets": targets}, {})
    logits_info, targets_info = info(logits), info(targets)
    assert logits_info is not None
    assert targets_info is not None
    contract.check(logits_info, targets_info, ignore_index, label_smoothing, z_loss, softcap, reduction)


def refuse_strays(op: str, width: int, targets: Tensor, ignore_index: int) -> None:
    """Wait for the device and look at every target: for debugging."""
    if isinstance(targets, FakeTensor) or targets.is_meta:  # without numbers there is nothing to look at
        return
    wide = targets.long()
    strays = ((wide < 0) | (wide >= width)) & (wide != ignore_index)
    places = strays.nonzero()
    if len(places):
        place = tuple(places[0].tolist())
        raise contract.stray_target(op, int(wide[place]), place, width, ignore_index)


def _refuse_what_cannot_be_overwritten(logits: Tensor) -> None:
    base = logits if logits._base is None else logits._base
    if base.is_leaf and base.requires_grad:
        raise refuse(
            "cross_entropy: inplace cannot write over a leaf that requires a gradient, nor over a view of one",
            f"such logits, {info(logits)}",
            "Pass what a model computed, or leave inplace out.",
        )
    if shares_places(logits):
        raise refuse(
            "cross_entropy: inplace cannot write over logits of which several share a place in memory",
            f"such logits, {info(logits)}",
            "Pass logits.contiguous(), or leave inplace out.",
        )


class _CrossEntropy(torch.autograd.Function):
    """The gradient for an incoming 1 is made by forward and handed out by the first backward."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, scalars: Scalars, reduction: str) -> Tensor:
        wanted = _MADE[reduction] | _COUNT[reduction] | _LSE | _DLOGITS
        mean = reduction == "mean"
        loss, losses, lse, counted, dlogits = _forward_now(logits, targets, None, *scalars, mean, wanted)
        ctx.save_for_backward(logits, targets, lse, counted)
        ctx.dlogits = dlogits
        ctx.scalars = scalars
        return losses if loss is None else loss

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> Any:
        logits, targets, lse, counted = ctx.saved_tensors
        dlogits, ctx.dlogits = ctx.dlogits, None
        with torch.no_grad():
            sent = dloss.contiguous()
            # A second time over a graph that was kept, or with a batch of gradients, which one memory cannot hold.
            if dlogits is None or _is_batch(sent):
                dlogits = _backward(logits, targets, lse, sent, counted, *ctx.scalars, 1)
            else:
                _correct(dlogits, logits, targets, lse, sent, counted, *ctx.scalars, _NO_OUTPUTS)
        if torch.is_grad_enabled():
            (dlogits,) = refuse_second_gradient("cross_entropy", [dlogits], [dloss, logits])
        return dlogits, None, None, None


def _is_batch(tensor: Tensor) -> bool:
    """Whether it stands for several, as in torch.autograd.grad(..., is_grads_batched=True)."""
    return is_transformed() or torch._C._functorch.is_legacy_batchedtensor(tensor)


class _InplaceCrossEntropy(torch.autograd.Function):
    """The gradient takes the place of the logits: there is no second memory, and nothing to make it anew from."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, scalars: Scalars, reduction: str) -> Tensor:
        wanted = _MADE[reduction] | _COUNT[reduction]
        loss, losses, _, _ = _inplace(logits, targets, None, *scalars, reduction == "mean", wanted)
        # Who kept the logits for a backward of their own is to hear of it.
        torch.autograd.graph.increment_version(logits)
        ctx.save_for_backward(logits)
        ctx.scalars = scalars
        ctx.used = False
        return losses if loss is None else loss

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> Any:
        if ctx.used:
            raise RuntimeError(
                "fuselm.ops.cross_entropy with inplace=True has one backward, its gradient having been handed out; got "
                "a second one. Leave inplace out where a graph is kept."
            )
        (logits,) = ctx.saved_tensors
        ctx.used = True
        with torch.no_grad():
            dlogits = logits.detach()
            _correct(dlogits, None, None, None, dloss.contiguous(), None, *ctx.scalars, _NO_OUTPUTS)
        torch.autograd.graph.increment_version(dlogits)
        if torch.is_grad_enabled():
            (dlogits,) = refuse_second_gradient("cross_entropy", [dlogits], [dloss, logits])
        return dlogits, None, None, None


class _TracedCrossEntropy(torch.autograd.Function):
    """For torch.compile: nothing is written over and nothing kept that is not saved."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, scalars: Scalars, reduction: str) -> Tensor:
        wanted = _MADE[reduction] | _COUNT[reduction] | _LSE
        mean = reduction == "mean"
        loss, losses, lse, counted, _ = _forward(logits, targets, None, *scalars, mean, wanted)
        ctx.save_for_backward(logits, targets, lse, counted if mean else None)
        ctx.scalars = scalars
        return losses if loss is None else loss

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> Any:
        logits, targets, lse, counted = ctx.saved_tensors
        dlogits = _backward(logits, targets, lse, dloss.contiguous(), counted, *ctx.scalars, 1)
        return dlogits, None, None, None


_apply = direct_apply(_CrossEntropy)
_apply_inplace = direct_apply(_InplaceCrossEntropy)

# ---- raw ops -------------------------------------------------------------------------------------------------------


def _plain_forward(logits: Tensor, *others: Any) -> tuple[Tensor | None, ...]:
    dlogits = torch.empty_like(logits, memory_format=torch.contiguous_format) if others[-1] & _DLOGITS else None
    return *_plain_into(dlogits, logits, *others), dlogits


def _plain_inplace(logits: Tensor, *others: Any) -> tuple[Tensor | None, ...]:
    return _plain_into(logits, logits, *others)


def _plain_into(
    into: Tensor | None,
    logits: Tensor,
    targets: Tensor,
    count: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    mean: bool,
    outputs: int,
) -> tuple[Tensor | None, ...]:
    """Loss, losses, lse and how many counted, as far as wanted; the gradient, where there is a place for it."""
    scalars = (ignore_index, label_smoothing, z_loss, softcap)
    _check_raw(logits, targets, *scalars)
    counted = counting(targets, logits.shape[-1], ignore_index)[0].sum(dtype=torch.float32) if count is None else count
    one = torch.ones((), dtype=torch.float32, device=logits.device)
    losses, lse = (torch.empty(targets.shape, dtype=torch.float32, device=logits.device) for _ in range(2))
    for own, own_targets, own_losses, own_lse, own_into in parts(logits, targets, losses, lse, into):
        found, found_lse = losses_of(own, own_targets, *scalars)
        own_losses.copy_(found), own_lse.copy_(found_lse)
        if into is not None:
            own_into.copy_(gradient_of(own, own_targets, found_lse, one, counted if mean else None, *scalars))
    total = losses.sum(dtype=wide_dtype(losses))
    loss = (total / counted.clamp(min=1) if mean else total).float()
    made = (loss, losses, lse, counted if count is None else None)
    return tuple(tensor if outputs & (1 << at) else None for at, tensor in enumerate(made))


def _plain_backward(
    logits: Tensor, targets: Tensor, lse: Tensor, dloss: Tensor, count: Tensor | None, *scalars: Any
) -> Tensor:
    dlogits = torch.empty_like(logits, memory_format=torch.contiguous_format)
    _plain_correct(dlogits, logits, targets, lse, dloss, count, *scalars, unless_one=False)
    return dlogits


def _plain_correct(
    dlogits: Tensor,
    logits: Tensor | None,
    targets: Tensor | None,
    lse: Tensor | None,
    dloss: Tensor,
    count: Tensor | None,
    *scalars_and_outputs: Any,
    unless_one: bool = True,
) -> None:
    if unless_one and dloss.device.type == "cpu" and bool((dloss == 1).all()):
        return
    if logits is None:
        for own, factor in parts(dlogits, dloss):
            own.copy_(own.float() * (factor[..., None] if factor.dim() else factor))
        return
    for own, *given, into in parts(logits, targets, lse, dloss, dlogits):
        into.copy_(gradient_of(own, *given, count, *scalars_and_outputs[:4]))


def _check_raw(logits: Tensor, targets: Tensor, ignore_index: int, smoothing: float, z_loss: float, cap: float) -> None:
    _check(logits, targets, ignore_index, smoothing, z_loss, cap or None, "mean")


def _fake_forward(
    logits: Tensor,
    targets: Tensor,
    count: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    mean: bool,
    outputs: int,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    _check_raw(logits, targets, ignore_index, label_smoothing, z_loss, softcap)
    shapes: tuple[Any, ...] = ((), logits.shape[:-1], logits.shape[:-1], ())
    kept = (outputs & ~_COUNTED) if count is not None else outputs
    numbers = (
        logits.new_empty(shape, dtype=torch.float32) if kept & (1 << at) else None for at, shape in enumerate(shapes)
    )
    return (*numbers, logits.new_empty(logits.shape) if kept & _DLOGITS else None)  # type: ignore[return-value]


def _fake_inplace(*arguments: Any) -> tuple[Tensor | None, ...]:
    return _fake_forward(*arguments)[:4]


def _fake_backward(logits: Tensor, *others: Any) -> Tensor:
    return logits.new_empty(logits.shape)


def _fake_correct(dlogits: Tensor, *others: Any) -> None:
    return None


_SCALARS = "int ignore_index, float label_smoothing, float z_loss, float softcap"
_forward = register(
    f"cross_entropy_forward(Tensor logits, Tensor targets, Tensor? count, {_SCALARS}, bool mean, int outputs)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _plain_forward,
    _fake_forward,
)
# The same dispatch without a Python frame around it (0.2 us a call). Dynamo knows only the overload.
_forward_now = _forward._op
_inplace = register(
    f"cross_entropy_inplace(Tensor(a!) logits, Tensor targets, Tensor? count, {_SCALARS}, bool mean, int outputs)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _plain_inplace,
    _fake_inplace,
)
_backward = register(
    f"cross_entropy_backward(Tensor logits, Tensor targets, Tensor lse, Tensor dloss, Tensor? count, {_SCALARS},"
    " int outputs) -> Tensor",
    _plain_backward,
    _fake_backward,
)
_correct = register(
    "cross_entropy_correct(Tensor(a!) dlogits, Tensor? logits, Tensor? targets, Tensor? lse, Tensor dloss,"
    f" Tensor? count, {_SCALARS}, int outputs) -> ()",
    _plain_correct,
    _fake_correct,
)
