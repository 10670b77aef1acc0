"""How far a result is from the truth: a case's float64 oracle, on the device, on as many rows as memory is spared for.

Knows the registry's oracles and torch; times nothing. Rows are taken at even distances over the whole case, so that the
last thread block is looked at as well as the first. A gradient that sums over rows, as a weight's does, is compared
only when all rows are taken; so is an output that sums over them, as a loss does.

    truth = forward_truth(op, case, tensors)
    print(errors(case, dict(zip(op.outputs(case), outputs)), truth))
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fuselm.kernels.spec import Case, OpSpec, has_rows

# Elements compared: in float64, with the oracle's temporaries, about 1 GiB.
MAX_ELEMENTS = 1 << 24

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Errors:
    """Largest and rms error, both relative to the rms of the truth; the worst tensor. None: nothing was compared."""

    max: float | None = None
    rms: float | None = None


def forward_truth(op: OpSpec, case: Case, tensors: Tensors) -> dict[str, Tensor]:
    """The op's outputs in float64 at the rows that are compared; {} when the case cannot be taken apart into rows."""
    if not op.is_row_wise(case) and row_step(case) > 1:
        return {}
    truth: dict[str, Tensor] = op.oracle(torch, _sampled_inputs(op, case, tensors), case.options)
    if row_step(case) > 1:  # a sum over some of the rows is no truth for a sum over all
        fewer = replace(case, shape=(len(range(0, case.shape[0], row_step(case))), *case.shape[1:]))
        truth = {name: value for name, value in truth.items() if has_rows(fewer, tuple(value.shape))}
    return truth


def backward_truth(op: OpSpec, case: Case, tensors: Tensors, cotangents: Tensors) -> dict[str, Tensor]:
    """The op's gradients in float64 at the rows that are compared."""
    if not op.is_row_wise(case) and row_step(case) > 1:
        return {}
    sent = {name: _exact(_rows(case, tensor)) for name, tensor in cotangents.items()}
    truth = op.oracle_backward(torch, _sampled_inputs(op, case, tensors), sent, case.options)
    if row_step(case) > 1:
        truth = {name: value for name, value in truth.items() if name in op.row_inputs(case)}
    return truth


def errors(case: Case, got: Tensors, truth: Tensors) -> Errors:
    """The worst error over the tensors of `truth`."""
    worst_max, worst_rms = 0.0, 0.0
    for name, right in truth.items():
        difference = _rows(case, got[name]).double() - right
        scale = math.sqrt(right.square().mean().item()) or 1.0
        worst_max = _worse(worst_max, difference.abs().max().item() / scale)
        worst_rms = _worse(worst_rms, math.sqrt(difference.square().mean().item()) / scale)
    return Errors(worst_max, worst_rms) if truth else Errors()


def row_step(case: Case) -> int:
    """Every how manieth entry of the first dimension is compared."""
    return max(1, math.ceil(case.size / MAX_ELEMENTS)) if len(case.shape) > 1 else 1


def _worse(a: float, b: float) -> float:
    # max() would drop a NaN or keep it depending on the order, and a NaN is the worst there is.
    return b if math.isnan(b) or b > a else a


def _sampled_inputs(op: OpSpec, case: Case, tensors: Tensors) -> dict[str, Tensor]:
    with_rows = op.row_inputs(case)
    return {name: _exact(_rows(case, t) if name in with_rows else t.detach()) for name, t in tensors.items()}


def _exact(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _rows(case: Case, tensor: Tensor) -> Tensor:
    """The rows that are compared of an output, or of a gradient with rows; all of what has none."""
    tensor = tensor.detach()
    return tensor[:: row_step(case)] if row_step(case) > 1 and has_rows(case, tuple(tensor.shape)) else tensor
