"""What people of torch.nn.functional would write and no op here takes: refused with what to write instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fuselm import ops
from fuselm.bench.tensors import make_inputs
from fuselm.kernels import spec
from fuselm.kernels.spec import RefusedInput

NUMBERS = {
    "add": ("scale",),
    "rms_norm": ("eps", "offset"),
    "layer_norm": ("eps",),
    "rope": ("eps",),
    "softmax": ("scale",),
    "cross_entropy": ("label_smoothing", "z_loss", "softcap"),
    "linear_cross_entropy": ("label_smoothing", "z_loss", "softcap"),
}


@pytest.mark.parametrize("with_grad", [False, True])
@pytest.mark.parametrize("number", [torch.tensor(0.5), np.float32(0.5), True], ids=["tensor", "numpy", "bool"])
@pytest.mark.parametrize(("op_name", "option"), [(op, name) for op, names in NUMBERS.items() for name in names])
def test_what_only_converts_to_a_number_is_refused(op_name: str, option: str, number: Any, with_grad: bool) -> None:
    op = spec.ops()[op_name]
    case = next(case for case in op.cases if case.dtype == "float32" and not case.options)
    tensors = make_inputs(op, case, "cpu", grad=with_grad)
    with pytest.raises(RefusedInput, match=f"{op_name}: {option} must be a Python number; got {option} of type "):
        getattr(ops, op_name)(**tensors, **{option: number})


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x: ops.layer_norm(x, (8,)), "got a tuple. .* leave normalized_shape out"),
        (lambda x: ops.rms_norm(x, [8]), "got a list. .* leave normalized_shape out"),
        (lambda x: ops.layer_norm(x, np.ones(8)), r"got a ndarray. Pass torch.as_tensor\(weight\)"),
        (lambda x: ops.softmax([1.0, 2.0]), r"got a list. Pass torch.as_tensor\(x\)"),
        (
            lambda x: ops.linear_cross_entropy(x, torch.nn.Linear(8, 8), torch.zeros(4, dtype=torch.long)),
            "got a Linear. Pass its parameter, weight.weight",
        ),
    ],
)
def test_what_is_no_tensor_is_refused_with_what_to_pass_instead(call: Callable[[Tensor], Any], words: str) -> None:
    with pytest.raises(RefusedInput, match=f"must be a torch.Tensor; {words}"):
        call(torch.randn(4, 8))
