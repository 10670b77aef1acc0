"""Tensors that lie in memory as no op takes them: refused in one sentence, with what to pass instead."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fuselm import ops
from fuselm.bench.tensors import make_inputs
from fuselm.kernels import spec
from fuselm.kernels.spec import RefusedInput

pytestmark = pytest.mark.filterwarnings("ignore:.*(nested tensors|Sparse CSR|Sparse invariant).*:UserWarning")


def nested(layout: torch.layout) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.nested.nested_tensor([x, x], layout=layout)


LAYOUTS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "sparse_coo": (Tensor.to_sparse, r"got {name} of layout sparse_coo\. Pass {name}\.to_dense\(\)\."),
    "sparse_csr": (Tensor.to_sparse_csr, r"got {name} of layout sparse_csr\. Pass {name}\.to_dense\(\)\."),
    "mkldnn": (Tensor.to_mkldnn, r"got {name} of layout mkldnn\. Pass {name}\.to_dense\(\)\."),
    "jagged": (nested(torch.jagged), r"got a nested {name} of layout jagged\. Pass {name}\.to_padded_tensor\(0\.0\)\."),
    "nested": (nested(torch.strided), r"got a nested {name} of layout strided\. Pass {name}\.to_padded_tensor"),
}
# Tensors of each op that have two dimensions and may learn.
GIVEN = {
    "add": ("x", "y"),
    "cross_entropy": ("logits",),
    "embedding": ("weight",),
    "geglu": ("gate", "up"),
    "gelu": ("x",),
    "layer_norm": ("x", "residual"),
    "linear_cross_entropy": ("hidden", "weight"),
    "mul": ("x", "y"),
    "relu2": ("x",),
    "rms_norm": ("x", "residual"),
    "silu": ("x",),
    "softmax": ("x",),
    "swiglu": ("gate", "up"),
}


def test_every_op_is_here() -> None:
    # Those of rope have four dimensions, and a test of their own.
    assert {*GIVEN, "rope", "rope_qkv"} == set(spec.ops())


@pytest.mark.parametrize("with_grad", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("op_name", "name"), [(op, name) for op, names in GIVEN.items() for name in names])
def test_a_layout_that_no_op_takes_is_refused(op_name: str, name: str, layout: str, with_grad: bool) -> None:
    make, words = LAYOUTS[layout]
    tensors = inputs_with(op_name, name)
    tensors[name] = make(torch.ones_like(tensors[name])).requires_grad_(with_grad and layout != "mkldnn")
    rule = rf"^{op_name}: {name} must be a strided tensor, as torch\.Tensors are by default; "
    with pytest.raises(RefusedInput, match=rule + words.format(name=name)):
        getattr(ops, op_name)(**tensors)


def inputs_with(op_name: str, name: str) -> dict[str, Tensor]:
    """Those of a small case of two dimensions that has a tensor of this name."""
    op = spec.ops()[op_name]
    cases = [
        case for case in op.cases if case.dtype == "float32" and 0 not in case.shape and case.layout == "contiguous"
    ]
    case = next(case for case in cases if name in op.inputs(case) and len(op.inputs(case)[name].shape) == 2)
    return make_inputs(op, case, "cpu")


@pytest.mark.parametrize("name", ["q", "k"])
def test_rope_names_the_one_that_it_cannot_take(name: str) -> None:
    given = {"q": torch.ones(1, 2, 1, 4), "k": torch.ones(1, 2, 1, 4), "cos": torch.ones(2, 2), "sin": torch.ones(2, 2)}
    given[name] = given[name].to_sparse()
    with pytest.raises(RefusedInput, match=rf"^rope: {name} must be a strided tensor.* Pass {name}\.to_dense\(\)\."):
        ops.rope(**given)


def test_rope_qkv_names_the_one_that_it_cannot_take() -> None:
    given = {"qkv": torch.ones(1, 2, 3, 4).to_sparse(), "cos": torch.ones(2, 2), "sin": torch.ones(2, 2)}
    with pytest.raises(RefusedInput, match=r"^rope_qkv: qkv must be a strided tensor.* Pass qkv\.to_dense\(\)\."):
        ops.rope_qkv(**given)
