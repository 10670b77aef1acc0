"""ops.adamw against float64 and against torch's own AdamW, on the CPU and on CUDA: numbers, memory, bits and refusals.

Truth is the contract's oracle, in float64. What has a meaning on CUDA only is in test_adamw_cuda.py, and what an
optimizer makes of the op in tests/test_optim*.py.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fuselm import ops
from fuselm.kernels import adamw as contract
from fuselm.kernels.spec import RefusedInput, Tolerance
from fuselm.kernels.torch_ops.adamw import adamw_reference
from tests.kernels.arrays import assert_same_bits, assert_within_rule, lay_out, to_numpy
from tests.kernels.problems import DEVICES

F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
# Nothing, one element, less than a vector, more than a chunk of a block (4096) and no whole vectors, other dimensions.
SHAPES = ((0,), (3, 0), (), (1,), (3,), (4096 * 4 + 3,), (33, 20), (2, 3, 8))
# An eps that fp16, in which torch keeps its own averages, has.
OPTIONS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-3, "weight_decay": 0.1}

on_each_device = pytest.mark.parametrize("device", DEVICES, indirect=True)
in_each_dtype = pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
# Of a parameter, and whether it has a master.
KINDS = [(F32, False), (BF16, False), (BF16, True), (F16, False), (F16, True)]
in_each_kind = pytest.mark.parametrize(
    ("dtype", "master"), KINDS, ids=[f"{kind}{'-master' * master}" for kind, master in KINDS]
)


@functools.cache
def drawn(seed: int, shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype) -> list[Tensor]:
    """Normal numbers, the same on every device, that float64 holds exactly."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def gradients(
    step: int, dtype: torch.dtype, device: str = "cpu", shapes: tuple[tuple[int, ...], ...] = SHAPES
) -> list[Tensor]:
    return [one.to(device) for one in drawn(100 + step, shapes, dtype)]


@dataclass
class Lists:
    """What is stepped. A parameter that is not in 16 bits has a master without an element."""

    params: list[Tensor]
    with_masters: bool = False
    exp_avgs: list[Tensor] = field(init=False)
    exp_avg_sqs: list[Tensor] = field(init=False)
    masters: list[Tensor] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        wide = [F64 if param.dtype == F64 else F32 for param in self.params]
        pairs = list(zip(self.params, wide, strict=True))
        self.exp_avgs, self.exp_avg_sqs = ([torch.zeros_like(p, dtype=d) for p, d in pairs] for _ in range(2))
        if self.with_masters:
            self.masters = [p.detach().to(d) if p.dtype != d else p.new_empty(0, dtype=d) for p, d in pairs]

    def step(self, grads: Sequence[Tensor], op: Callable[..., None] = ops.adamw, **options: Any) -> None:
        op(self.params, grads, self.exp_avgs, self.exp_avg_sqs, masters=self.masters, **{**OPTIONS, **options})

    def all(self) -> list[Tensor]:
        return [*self.params, *self.exp_avgs, *self.exp_avg_sqs, *(self.masters or [])]

    def chosen(self, indices: Sequence[int]) -> Lists:
        """A part of the lists: the same tensors."""
        part = Lists([self.params[i] for i in indices])
        part.exp_avgs, part.exp_avg_sqs = ([t[i] for i in indices] for t in (self.exp_avgs, self.exp_avg_sqs))
        part.masters = None if self.masters is None else [self.masters[i] for i in indices]
        return part


def started(dtype: torch.dtype, device: str = "cpu", master: bool = False, shapes: Any = SHAPES) -> Lists:
    return Lists([one.to(device, copy=True) for one in drawn(0, shapes, dtype)], master)


def mixed(device: str, masters: bool = True) -> Lists:
    """Every dtype there is, in one call."""
    dtypes = (F32, BF16, F32, F16, BF16, F32, F16, F64)
    return Lists(
        [one.to(device, dtype, copy=True) for one, dtype in zip(drawn(0, SHAPES, F32), dtypes, strict=True)], masters
    )


def their_gradients(lists: Lists, step: int) -> list[Tensor]:
    grads = gradients(step, F32, shapes=tuple(tuple(p.shape) for p in lists.params))
    return [g.to(p.device, p.dtype) for g, p in zip(grads, lists.params, strict=True)]


def assert_equal(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
    for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        assert_same_bits(f"tensor {index}", to_numpy(one), to_numpy(other))


def assert_close(ours: Sequence[Tensor], theirs: Sequence[Tensor], ulps: float = 4) -> None:
    for one, other in zip(ours, theirs, strict=True):
        eps = torch.finfo(one.dtype).eps
        torch.testing.assert_close(one, other, rtol=ulps * eps, atol=ulps * 0.05 * eps)


def copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in tensors]


# ---- numbers ---------------------------------------------------------------------------------------------------------


def truth(dtype: torch.dtype, steps: int) -> list[np.ndarray]:
    """All parameters, and both averages, in float64, one after another."""
    columns: list[list[np.ndarray]] = [[], [], []]
    for index, param in enumerate(drawn(0, SHAPES, dtype)):
        now = (param.double().numpy(), np.zeros(param.shape), np.zeros(param.shape))
        for step in range(1, steps + 1):
            now = contract.oracle(
                now[0], gradients(step, dtype)[index].double().numpy(), *now[1:], step=step, **OPTIONS
            )
        for column, array in zip(columns, now, strict=True):
            column.append(np.ravel(array))
    return [np.concatenate(column) for column in columns]


def torchs(dtype: torch.dtype, wide: torch.dtype, steps: int, device: str) -> list[np.ndarray]:
    """The same by torch's optimizer, whose tensors are all of dtype `wide`."""
    params = [torch.nn.Parameter(one.to(device, wide, copy=True)) for one in drawn(0, SHAPES, dtype)]
    how = {"fused": True} if device == "cuda" else {"foreach": True}
    optimizer = torch.optim.AdamW(params, **OPTIONS, **how)
    for step in range(1, steps + 1):
        for param, grad in zip(params, gradients(step, dtype, device), strict=True):
            param.grad = grad.to(wide)
        optimizer.step()
    averages = [[optimizer.state[p][name] for p in params] for name in ("exp_avg", "exp_avg_sq")]
    return [flat(column) for column in (params, *averages)]


def flat(tensors: Sequence[Tensor]) -> np.ndarray:
    return to_numpy(torch.cat([tensor.detach().flatten() for tensor in tensors]))


@on_each_device
@in_each_kind
@pytest.mark.parametrize("on_device", [False, True], ids=["numbers", "tensors"])
def test_errors_are_no_larger_than_torchs(device: str, dtype: torch.dtype, master: bool, on_device: bool) -> None:
    steps = 12
    lists = started(dtype, device, master)
    lr = torch.tensor(OPTIONS["lr"], dtype=F32, device=device) if on_device else OPTIONS["lr"]
    for step in range(1, steps + 1):
        number = torch.tensor(float(step), device=device) if on_device else step
        lists.step(gradients(step, dtype, device), step=number, lr=lr)
    exact, wide = truth(dtype, steps), torchs(dtype, F32, steps, device)
    stepped, reference = lists.params, torchs(dtype, dtype, steps, device)[0]
    if lists.masters is not None:
        assert_equal(lists.params, [one.to(dtype) for one in lists.masters])
        stepped, reference = lists.masters, wide[0]
    columns = (
        ("stepped", stepped, reference),
        ("exp_avg", lists.exp_avgs, wide[1]),
        ("exp_avg_sq", lists.exp_avg_sqs, wide[2]),
    )
    for (what, found, theirs), right in zip(columns, exact, strict=True):
        assert_within_rule(what, flat(found), theirs, right, Tolerance())


@on_each_device
@in_each_kind
def test_the_kernel_and_torchs_foreach_ops_agree_to_a_few_roundings(
    device: str, dtype: torch.dtype, master: bool
) -> None:
    ours, plain = (started(dtype, device, master) for _ in range(2))
    for step in range(1, 4):
        scale = torch.tensor(0.7, device=device)
        for lists, op in ((ours, ops.adamw), (plain, adamw_reference)):
            lists.step(gradients(step, dtype, device), op, step=step, grad_scale=scale)
    assert_close(ours.all(), plain.all())


@on_each_device
@pytest.mark.parametrize(
    ("dtype", "grad_dtype"), [(F32, BF16), (F32, F16), (F32, F64), (BF16, F32), (F16, BF16), (F64, F32)], ids=str
)
def test_a_gradient_may_have_another_dtype(device: str, dtype: torch.dtype, grad_dtype: torch.dtype) -> None:
    """It is what its numbers are, taken to the dtype of the averages."""
    found, expected = started(dtype, device), started(dtype, device)
    grads = [(8 * grad).round() / 8 for grad in gradients(1, F32, device)]  # numbers that all dtypes have
    found.step([grad.to(grad_dtype) for grad in grads], step=1)
    expected.step([grad.to(dtype) for grad in grads], step=1)
    (assert_close if grad_dtype == F64 else assert_equal)(found.all(), expected.all())


@on_each_device
def test_a_gradient_that_is_no_number_spoils_its_element_alone(device: str) -> None:
    for bad in (math.nan, math.inf, -math.inf):
        for dtype, master in ((F32, False), (BF16, True)):
            lists, clean = started(dtype, device, master), started(dtype, device, master)
            grads = copies(gradients(1, dtype, device))
            clean.step(grads, step=1)
            grads[5][4097] = bad
            lists.step(grads, step=1)
            for found, right in zip(lists.all(), clean.all(), strict=True):
                spoiled = found.shape == grads[5].shape
                if spoiled:
                    assert not found[4097].isfinite()
                    found[4097] = right[4097]
                assert torch.equal(found, right)


# ---- options ---------------------------------------------------------------------------------------------------------

NUMBER = 12  # of groups: more than a launch of the kernel takes


def options_of(index: int) -> dict[str, Any]:
    index %= NUMBER
    return {
        "step": 1 + index,
        "lr": 1e-3 * (1 + index),
        "betas": (0.9 - 0.05 * index, 0.99 if index % 2 else 0.95),
        "eps": 1e-8 if index % 3 else 1e-3,
        "weight_decay": 0.0 if index == 5 else 0.1,
    }


def as_tensors(options: dict[str, Any], device: str) -> dict[str, Any]:
    return options | {name: torch.tensor(float(options[name]), device=device) for name in ("step", "lr")}


@on_each_device
@pytest.mark.parametrize("on_device", [False, True], ids=["numbers", "tensors"])
def test_many_groups_in_one_call_have_the_bits_of_a_call_each(device: str, on_device: bool) -> None:
    """Neighbours are of different groups, and every group comes back."""
    shapes = tuple((5 + index,) for index in range(40))
    apart, together = started(F32, device, shapes=shapes), started(F32, device, shapes=shapes)
    grads = gradients(1, F32, device, shapes)
    groups = [as_tensors(options_of(i), device) if on_device else options_of(i) for i in range(NUMBER)]
    for index in range(40):
        apart.chosen([index]).step([grads[index]], **groups[index % NUMBER])
    together.step(grads, **{name: [groups[i % NUMBER][name] for i in range(40)] for name in groups[0]})
    assert_equal(together.all(), apart.all())


@on_each_device
def test_tensors_for_some_and_numbers_for_others_do_what_numbers_do(device: str) -> None:
    numbers, both = started(F32, device), started(F32, device)
    grads = gradients(1, F32, device)
    numbers.step(grads, step=[1, 2] * 4, lr=1e-3)
    step = torch.tensor(2.0)  # from the CPU, too
    both.step(grads, step=[1, step] * 4, lr=[1e-3, torch.tensor(1e-3, device=device)] * 4)
    assert_close(both.all(), numbers.all())


@on_each_device
def test_a_scale_multiplies_every_gradient_and_leaves_it_alone(device: str) -> None:
    scaled, plain = mixed(device), mixed(device)
    grads = their_gradients(scaled, 1)
    before = copies(grads)
    scaled.step(grads, step=1, grad_scale=torch.tensor(0.25, device=device))
    plain.step([grad * 0.25 for grad in grads], step=1)  # a power of two: exact in every dtype
    assert_equal(scaled.all(), plain.all())
    assert_equal(grads, before)
    again = mixed(device)
    again.step(grads, step=1, grad_scale=torch.tensor(0.25, dtype=F64))  # from elsewhere, of another dtype
    assert_equal(again.all(), scaled.all())


@on_each_device
def test_what_is_skipped_changes_in_no_bit_whatever_the_gradients(device: str) -> None:
    lists = mixed(device)
    lists.step(their_gradients(lists, 1), step=1)
    before = copies(lists.all())
    bad = [grad * math.nan for grad in their_gradients(lists, 2)]
    for skip in (torch.tensor(True, device=device), torch.tensor(True), torch.tensor(1, device=device)):
        lists.step(bad, step=2, skip=skip, grad_scale=torch.tensor(math.inf, device=device))
        assert_equal(lists.all(), before)


@on_each_device
def test_what_is_not_skipped_is_as_without_the_word(device: str) -> None:
    found, expected = mixed(device), mixed(device)
    found.step(their_gradients(found, 1), step=1, skip=torch.tensor(False, device=device))
    expected.step(their_gradients(expected, 1), step=1)
    assert_equal(found.all(), expected.all())


@on_each_device
@pytest.mark.parametrize("default", [F64, BF16], ids=str)
def test_torchs_default_dtype_means_nothing_here(device: str, default: torch.dtype) -> None:
    results = []
    for kind in (F32, default):
        torch.set_default_dtype(kind)
        try:
            lists = started(BF16, device, master=True)
            lr = torch.tensor(2.0**-9, dtype=F32, device=device)
            lists.step(gradients(1, BF16, device), step=257, lr=lr)
        finally:
            torch.set_default_dtype(F32)
        results.append(lists.all())
    assert_equal(*results)


# ---- memory ----------------------------------------------------------------------------------------------------------

WIDE = ((32, 48), (3, 16, 8))


def laid_out(device: str, layouts: Sequence[str], dtype: torch.dtype = F32) -> tuple[Lists, list[Tensor]]:
    """Lists and gradients whose four tensors lie as the four words say."""
    lists = started(dtype, device, shapes=WIDE)
    grads = gradients(1, dtype, device, WIDE)
    names = ("params", "exp_avgs", "exp_avg_sqs")
    for name, layout in zip(names, (layouts[0], *layouts[2:]), strict=True):
        setattr(lists, name, [lay_out(one, layout) for one in getattr(lists, name)])
    return lists, [lay_out(grad, layouts[1]) for grad in grads]


@on_each_device
@in_each_dtype
@pytest.mark.parametrize("layout", ["transposed", "offset"])
def test_tensors_without_gaps_have_the_bits_of_contiguous_ones(device: str, dtype: torch.dtype, layout: str) -> None:
    plain, its_grads = laid_out(device, ["contiguous"] * 4, dtype)
    other, grads = laid_out(device, [layout] * 4, dtype)
    for lists, given in ((plain, its_grads), (other, grads)):
        for step in (1, 2):
            lists.step(given, step=step)
    assert_equal(other.all(), plain.all())


@on_each_device
@in_each_dtype
@pytest.mark.parametrize(
    "layouts",
    [
        ["strided"] * 4,
        ["columns", "contiguous", "contiguous", "contiguous"],
        ["contiguous", "transposed", "contiguous", "contiguous"],
        ["contiguous", "columns", "contiguous", "contiguous"],
        ["transposed", "contiguous", "transposed", "transposed"],
        ["contiguous", "contiguous", "transposed", "strided"],
        ["offset", "contiguous", "contiguous", "contiguous"],
    ],
    ids="-".join,
)
def test_however_tensors_lie_the_numbers_are_the_same(device: str, dtype: torch.dtype, layouts: list[str]) -> None:
    plain, its_grads = laid_out(device, ["contiguous"] * 4, dtype)
    other, grads = laid_out(device, layouts, dtype)
    for lists, given in ((plain, its_grads), (other, grads)):
        for step in (1, 2):
            lists.step(given, step=step)
    assert_close(other.all(), plain.all(), ulps=8)


@on_each_device
def test_what_lies_between_elements_is_left_alone(device: str) -> None:
    buffer = torch.full((32, 64), 7.0, device=device)
    lists = Lists([buffer[:, 3:35]])
    lists.step([torch.ones(32, 32, device=device)], step=1)
    inside = torch.zeros(32, 64, dtype=torch.bool, device=device)
    inside[:, 3:35] = True
    assert torch.equal(buffer != 7.0, inside)
    flat_buffer = torch.full((4097 + 16,), 7.0, device=device)
    for begin, end in ((1, 4098), (8, 4096 + 15)):
        Lists([flat_buffer[begin:end]]).step([torch.ones(end - begin, device=device)], step=1)
        outside = torch.cat([flat_buffer[:begin], flat_buffer[end:]])
        assert torch.equal(outside, torch.full_like(outside, 7.0))
        assert (flat_buffer[begin:end] != 7.0).all()
        flat_buffer.fill_(7.0)


@on_each_device
@pytest.mark.parametrize("count", [64, 65, 700])
def test_hundreds_of_tensors_have_the_bits_they_have_one_by_one(device: str, count: int) -> None:
    """64 and 590 are what one launch takes; every seventh has no element, one has several blocks."""
    shapes = tuple((0 if i % 7 == 3 else 9000 if i == 40 else 1 + i % 23,) for i in range(count))
    together, apart = (Lists([one.to(device, copy=True) for one in drawn(0, shapes, F32)]) for _ in range(2))
    grads = gradients(1, F32, device, shapes)
    together.step(grads, step=3)
    for index in {*range(0, count, 29), 40, count - 1}:
        apart.chosen([index]).step([grads[index]], step=3)
        assert_equal(together.chosen([index]).all(), apart.chosen([index]).all())
    for param, old in zip(together.params, drawn(0, shapes, F32), strict=True):
        assert not param.numel() or not torch.equal(param.cpu(), old)


@on_each_device
def test_bits_depend_neither_on_the_company_nor_on_the_day(device: str) -> None:
    """In 16 bits or fp32, with masters or without, alone or together."""
    results = []
    for parts in ([range(8)], [range(8)], [[i] for i in range(8)], [[7, 5], [0, 6, 1], [4, 2, 3]]):
        lists = mixed(device)
        grads = their_gradients(lists, 1)
        for part in parts:
            lists.chosen(list(part)).step(
                [grads[i] for i in part], step=5, grad_scale=torch.tensor(0.37, device=device)
            )
        results.append(lists.all())
    for other in results[1:]:
        assert_equal(other, results[0])


@on_each_device
def test_autograd_learns_that_a_parameter_has_changed(device: str) -> None:
    """So that a backward pass that needs the old one is refused instead of wrong."""
    for master in (False, True):
        lists = Lists([torch.ones(3, dtype=BF16, device=device, requires_grad=True)], master)
        (param,) = lists.params
        before = param._version
        y = (param * param).sum()
        lists.step([torch.ones(3, dtype=BF16, device=device)], step=1)
        assert param._version > before
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()


@on_each_device
@in_each_dtype
def test_a_parameter_becomes_what_its_master_rounds_to_whatever_it_was(device: str, dtype: torch.dtype) -> None:
    """Of an fp32 parameter too, which wants none."""
    found, expected = started(dtype, device), started(dtype, device)
    found.masters = [param.to(F32, copy=True) for param in expected.params]
    for param in found.params:
        param.fill_(7.0)
    expected.masters = copies(found.masters) if dtype != F32 else None
    for lists in (found, expected):
        lists.step(gradients(1, dtype, device), step=1)
    assert_equal(found.params, expected.params)
    assert_equal(found.params, [master.to(dtype) for master in found.masters])


def test_no_tensor_at_all_is_nothing_to_do() -> None:
    ops.adamw([], [], [], [], step=1, lr=0.1, masters=[])


# ---- refusals --------------------------------------------------------------------------------------------------------

META = torch.zeros(3, device="meta")
BAD_CALLS: list[tuple[dict[str, Any], str]] = [
    ({"grads": []}, "the four lists must have one length; got 2 params, 0 grads, 2 exp_avgs, 2 exp_avg_sqs"),
    ({"masters": [torch.zeros(3)]}, "the five lists must have one length; got .*, 1 masters"),
    ({"params": [torch.zeros(3), None]}, r"each of params must be a tensor; got params\[1\], which is None"),
    ({"params": [None, torch.zeros(1, 2)]}, r"each of params must be a tensor; got params\[0\], which is None"),
    ({"grads": [torch.zeros(3), None]}, r"each of grads must .*; got grads\[1\], which is None"),
    ({"exp_avgs": [None, None]}, r"each of exp_avgs must be a tensor; got exp_avgs\[0\], which is None"),
    ({"exp_avg_sqs": [torch.zeros(3), None]}, r"each of exp_avg_sqs must be a tensor; got exp_avg_sqs\[1\]"),
    ({"masters": [torch.zeros(3), None]}, r"each of masters .*; got masters\[1\], which is None"),
    ({"grads": [torch.zeros(3), 1.0]}, r"grads\[1\] must be a torch\.Tensor; got a float"),
    ({"exp_avgs": [torch.zeros(3), torch.zeros(2)]}, r"each of exp_avgs .*; got exp_avgs\[1\] \[2\] .* \[1, 2\]"),
    ({"masters": [torch.zeros(3), torch.zeros(2)]}, r"each of masters .* shape and device; got masters\[1\] \[2\]"),
    ({"masters": [META, torch.zeros(1, 2)]}, r"each of masters .*; got masters\[0\] \[3\] on meta"),
    ({"masters": [META[:0], torch.zeros(1, 2)]}, r"also one without an element; got masters\[0\] on meta"),
    (
        {"masters": [torch.zeros(3).half(), torch.zeros(1, 2)]},
        r"master of .* must be float32; got masters\[0\] of float16",
    ),
    ({"masters": [torch.zeros(3).double(), torch.zeros(1, 2)]}, "must be float32; got .* float64"),
    ({"params": [torch.zeros(3), torch.zeros(1, 2, device="meta")]}, r"one device; got params\[0\] on c.*, .* meta"),
    ({"grads": [META, torch.zeros(1, 2)]}, r"each of grads .* device; got grads\[0\] \[3\] on meta"),
    ({"params": [torch.zeros(3).long(), torch.zeros(1, 2)]}, "parameter must be float64, .*; got .* int64"),
    ({"exp_avg_sqs": [torch.zeros(3).bfloat16(), torch.zeros(1, 2)]}, "states of .* must be float32; got .* bfloat16"),
    ({"grads": [torch.zeros(3).int(), torch.zeros(1, 2)]}, "must be a real floating-point tensor; got .* int32"),
    ({"step": 0}, "step must be 1 or more; got 0"),
    ({"step": math.nan}, "step must be 1 or more; got nan"),
    ({"step": [1, -2]}, "step must be 1 or more; got -2"),
    ({"step": np.complex64(1)}, "step must be a number or a 0-dim tensor; got a complex64"),
    ({"step": np.array(0)}, "step must be 1 or more; got 0"),
    ({"step": np.ones(3)}, "step must be a number or a 0-dim tensor; got a ndarray"),
    ({"lr": torch.tensor(1j)}, r"lr must be a number or a 0-dim tensor; got lr complex64\[\]"),
    ({"params": [torch.zeros(1).expand(3), torch.zeros(1, 2)]}, r"a place in memory .*; got params\[0\] float32\[3\]"),
    ({"exp_avg_sqs": [torch.zeros(3), torch.zeros(1).expand(1, 2)]}, r"exp_avg_sqs must .*; got exp_avg_sqs\[1\]"),
    ({"grad_scale": np.datetime64("2020")}, "grad_scale must be a number or a 0-dim tensor; got a datetime64"),
    ({"step": [1, 2, 3]}, "step must be one for all tensors, or a list with one for each; got a list of 3 for 2"),
    ({"weight_decay": [0.1]}, "weight_decay must be one for all .*; got a list of 1 for 2"),
    ({"lr": torch.zeros(2)}, r"lr must be a number or a 0-dim tensor; got lr float32\[2\]"),
    ({"step": [1, torch.ones(1)]}, r"step must be a number or a 0-dim tensor; got step float32\[1\]"),
    ({"grad_scale": torch.ones(2)}, "grad_scale must be a number or a 0-dim tensor"),
    ({"skip": torch.ones(2)}, "skip must be a number or a 0-dim tensor"),
    ({"betas": (0.9, 1.0)}, r"betas must be two numbers, 0 or more and below 1; got \(0.9, 1.0\)"),
    ({"betas": (-0.1, 0.9)}, "betas must be two numbers"),
    ({"betas": (0.9,)}, "betas must be two numbers"),
    ({"betas": [0.9, 0.999]}, r"betas must be two numbers, .*; got 0.9"),
    ({"betas": [(0.9, 0.99), (0.9, math.nan)]}, r"betas must be two numbers, .*; got \(0.9, nan\)"),
]


@on_each_device
@pytest.mark.parametrize(("change", "words"), BAD_CALLS, ids=range(len(BAD_CALLS)))
def test_the_op_refuses_with_a_reason_and_a_remedy_and_changes_nothing(
    device: str, change: dict[str, Any], words: str
) -> None:
    def there(given: Any) -> Any:
        if not isinstance(given, list):
            return given
        return [one.to(device) if isinstance(one, Tensor) and not one.is_meta else one for one in given]

    names = ("params", "grads", "exp_avgs", "exp_avg_sqs")
    call: dict[str, Any] = {name: [torch.ones(3), torch.ones(1, 2)] for name in names} | {"step": 1, **change}
    call = {name: there(given) for name, given in call.items()}
    lists = [call.pop(name) for name in names]
    for op in (ops.adamw, adamw_reference):
        with pytest.raises(RefusedInput, match=f"^adamw: .*{words}" + r".*\. [A-Z].*\.$"):
            op(*lists, **{"lr": 0.1, **call})
    if "params" not in change:
        assert all(bool((param == 1).all()) for param in lists[0])
    if device == "cuda":
        torch.cuda.synchronize()


def test_numpys_numbers_are_numbers() -> None:
    plain, numpys = ([[torch.ones(3)] for _ in range(4)] for _ in range(2))
    ops.adamw(*plain, step=2, lr=0.5, grad_scale=torch.tensor(0.25), skip=torch.tensor(False))
    ops.adamw(*numpys, step=np.array(2), lr=np.float32(0.5), grad_scale=np.array(0.25), skip=np.array(False))
    assert_equal([one for (one,) in numpys], [one for (one,) in plain])


@pytest.mark.parametrize("name", ["lr", "eps", "weight_decay"])
@pytest.mark.parametrize(
    "wrong",
    [
        *(-0.1, math.nan, "large", None, True),
        *(np.float32(-1), np.float64(-1), np.array(-1.0), np.array([0.1, 0.2]), np.bool_(True), np.complex64(1)),
    ],
    ids=repr,
)
def test_a_rate_below_0_or_no_number_is_refused(name: str, wrong: Any) -> None:
    """By itself and in a list with one for each: a step uphill would go unnoticed."""
    for given in (wrong, [0.1, wrong]):
        lists = [[torch.ones(3), torch.ones(3)] for _ in range(4)]
        options = {"lr": 0.1, "step": 1, name: given}
        with pytest.raises(RefusedInput, match=rf"adamw: {name} must be a number, 0 or more.*; got .*\. Pass such"):
            ops.adamw(*lists, **options)
        assert all(torch.equal(tensor, torch.ones(3)) for tensors in lists for tensor in tensors)
