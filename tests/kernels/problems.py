"""Problems for the generic tests: a case of an op with its inputs, its truth, and what torch's own kernel makes of it.

Knows the registry, torch and pytest's parameters, and no op by name. A problem is made once and shared by all tests and
devices. "Row" means the last dimension of the case's main shape; a tensor has rows when it has something for each of
them: a row of its own, or one number, as targets and losses have.

    @pytest.mark.parametrize(("op_name", "case"), each_case())
    def test_it(op_name, case): problem = problem_of(op_name, case)
"""

from __future__ import annotations

import functools
import importlib
import math
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

import fuselm.ops
from fuselm.kernels.spec import BadCall, Case, InputSpec, OpSpec, RefusedInput, ops
from tests.kernels.arrays import (
    Arrays,
    Error,
    assert_same_bits,
    assert_within_rule,
    cast_floats,
    error,
    float64,
    make_arrays,
    to_numpy,
    torch_tensor,
)

OPS = ops()
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
# How many neighbouring inputs the noise of plain fp32 is averaged over.
NOISE_DRAWS = 4

Tensors = dict[str, torch.Tensor]


def case_id(op_name: str, case: Case) -> str:
    """The name a test goes by: `pytest -k rms_norm` picks an op."""
    return f"{op_name}-{case.name}".replace(",", "").replace(" ", "-")


def each_op(keep: Callable[[OpSpec], bool] = lambda op: True) -> list[Any]:
    """Every op's name."""
    return [pytest.param(name, id=name) for name, op in OPS.items() if keep(op)]


def each_case(keep: Callable[[Case], bool] = lambda case: True, huge: bool = False) -> list[Any]:
    """Every (op name, case) that is huge or is not, as asked."""
    return [
        pytest.param(name, case, id=case_id(name, case))
        for name, op in OPS.items()
        for case in op.cases
        if case.huge == huge and keep(case)
    ]


def each_bad_call() -> list[Any]:
    """Every (op name, bad call)."""
    return [
        pytest.param(name, bad, id=f"{name}-{bad.name.replace(' ', '-')}")
        for name, op in OPS.items()
        for bad in op.bad_calls
    ]


def small(case: Case) -> bool:
    """Whether a case is cheap enough to be run many times over."""
    return case.size <= 20_000


def each_kind(layouts: bool = True) -> list[Any]:
    """The first small case of each kind that matters to what surrounds a kernel: for tests that take a second each.

    A kind is which tensors there are and come out, whether their dtypes differ, whether there are rows, whether those
    are independent and, if asked, the layout.
    """
    kinds: dict[Any, Any] = {}
    for param in each_case(small):
        op_name, case = param.values
        mixed = any(dtype != case.dtype for dtype in case.tensors.values())
        lies = case.layout if layouts else ""
        kind = (op_name, tuple(case.tensors), OPS[op_name].outputs(case), mixed, case.size > 0, case.row_wise, lies)
        kinds.setdefault(kind, param)
    return list(kinds.values())


@dataclass(frozen=True)
class Problem:
    """A case with everything that is known about it."""

    op: OpSpec
    case: Case
    inputs: Arrays
    cotangents: Arrays  # by output
    truth: Arrays  # float64, by output
    gradients: Arrays  # float64, by differentiable input
    noise: Mapping[str, Error]  # by output, and by input with a "d" before it

    @property
    def differentiable(self) -> tuple[str, ...]:
        return tuple(name for name, spec in self.op.inputs(self.case).items() if spec.differentiable)

    def groups(self, shape: tuple[int, ...]) -> int:
        """How many independent errors an array of that shape carries: one per row, or per element if those are fewer.

        A sum over rows has the errors its rows share (of a norm, say) in each of its elements, so it counts as they do.
        """
        return min(math.prod(self.case.shape[:-1]), math.prod(shape))

    @functools.cached_property
    def with_rows(self) -> frozenset[str]:
        """The inputs, and so the gradients, that have something for each row of the case."""
        return self.op.row_inputs(self.case)


def make_problem(op: OpSpec, case: Case) -> Problem:
    """Inputs, cotangents and truths of a case; the output dtypes are the reference's."""
    seed = zlib.crc32(case.name.encode())
    inputs = make_arrays(op.inputs(case), seed)
    outputs = op.outputs(case)
    with torch.no_grad():
        made = as_tuple(reference_of(op.name)(**{k: torch_tensor(v) for k, v in inputs.items()}, **case.options))
    specs = {
        name: InputSpec(tuple(out.shape), str(out.dtype).removeprefix("torch."))
        for name, out in zip(outputs, made, strict=True)
    }
    return solve(op, case, inputs, make_arrays(specs, seed + 1))


def solve(op: OpSpec, case: Case, inputs: Arrays, cotangents: Arrays) -> Problem:
    """The problem of given arrays."""
    truth = op.oracle(np, float64(inputs), case.options)
    gradients = op.oracle_backward(np, float64(inputs), float64(cotangents), case.options)
    return Problem(op, case, inputs, cotangents, truth, gradients, fp32_noise(op, case, inputs, cotangents))


@functools.cache
def _problem(op_name: str, index: int) -> Problem:
    return make_problem(OPS[op_name], OPS[op_name].cases[index])


def problem_of(op_name: str, case: Case) -> Problem:
    """The problem of a registered case, made once."""
    return _problem(op_name, OPS[op_name].cases.index(case))


def fp32_noise(op: OpSpec, case: Case, inputs: Arrays, cotangents: Arrays) -> dict[str, Error]:
    """The error of the op's formulas in plain fp32, over a few inputs next to the given ones.

    Neighbours (all inputs a little larger) round differently but are as well or badly conditioned: one lucky input,
    say one that cancels exactly, then does not pass for the absence of noise.
    """
    draws: dict[str, list[Error]] = {}
    for step in range(NOISE_DRAWS):
        near = {k: v if v.dtype.kind in "iu" else v * (1 + step / 4096) for k, v in float64(inputs).items()}
        near32, cot32 = cast_floats(near, np.float32), cast_floats(cotangents, np.float32)
        near64, cot64 = float64(near32), float64(cot32)
        plain = op.oracle(np, near32, case.options)
        exact = op.oracle(np, near64, case.options)
        plain |= {f"d{k}": v for k, v in op.oracle_backward(np, near32, cot32, case.options).items()}
        exact |= {f"d{k}": v for k, v in op.oracle_backward(np, near64, cot64, case.options).items()}
        for name, value in plain.items():
            draws.setdefault(name, []).append(error(value, exact[name]))
    return {
        name: Error(math.sqrt(sum(e.rms**2 for e in errors) / len(errors)), max(e.max for e in errors))
        for name, errors in draws.items()
    }


# ---- running -------------------------------------------------------------------------------------------------------


def op_of(op_name: str) -> Callable[..., Any]:
    """The public torch function of an op."""
    return getattr(fuselm.ops, op_name)


def reference_of(op_name: str) -> Callable[..., Any]:
    """The same call in plain torch: the yardstick."""
    module = importlib.import_module(f"fuselm.kernels.torch_ops.{op_name}")
    return getattr(module, f"{op_name}_reference")


def as_tuple(result: Any) -> tuple[Any, ...]:
    """The outputs of an op, also when there is one."""
    return tuple(result) if isinstance(result, tuple | list) else (result,)


def torch_inputs(problem: Problem, device: str, layout: str | None = None, wanted: tuple[str, ...] = ()) -> Tensors:
    """The problem's tensors; those that have rows lie as the case says, those in `wanted` require grad."""
    layout = problem.case.layout if layout is None else layout
    tensors = {}
    for name, array in problem.inputs.items():
        lies = layout if name in problem.with_rows else "contiguous"
        tensors[name] = torch_tensor(array, device, lies).requires_grad_(name in wanted)
    return tensors


def torch_cotangents(problem: Problem, device: str, layout: str = "contiguous") -> Tensors:
    """A gradient for each output."""
    return {name: torch_tensor(array, device, layout) for name, array in problem.cotangents.items()}


def forward(function: Callable[..., Any], problem: Problem, tensors: Tensors) -> Tensors:
    """Call an op; its outputs by name."""
    outputs = as_tuple(function(**tensors, **problem.case.options))
    return dict(zip(problem.op.outputs(problem.case), outputs, strict=True))


def backward(outputs: Tensors, cotangents: Tensors, inputs: Tensors, keep: bool = False) -> Tensors:
    """Gradients, by name, of the inputs that require one; outputs that have none, or no cotangent, count as unused."""
    wanted = [name for name, tensor in inputs.items() if tensor.requires_grad]
    used = [name for name, tensor in outputs.items() if name in cotangents and tensor.requires_grad]
    gradients = torch.autograd.grad(
        [outputs[name] for name in used],
        [inputs[name] for name in wanted],
        [cotangents[name] for name in used],
        retain_graph=keep,
        materialize_grads=True,  # an input that no used output depends on has gradient 0
    )
    return dict(zip(wanted, gradients, strict=True))


def run(function: Callable[..., Any], problem: Problem, device: str) -> tuple[Tensors, Tensors]:
    """Outputs and all gradients."""
    inputs = torch_inputs(problem, device, wanted=problem.differentiable)
    outputs = forward(function, problem, inputs)
    return outputs, backward(outputs, torch_cotangents(problem, device), inputs)


def refusal(call: Callable[..., Any], bad: BadCall, device: str) -> str:
    """The words of a refusal, without the device they name."""
    tensors = {k: torch_tensor(v, device) for k, v in make_arrays(bad.tensors, 0).items()}
    with pytest.raises(RefusedInput) as caught:
        call(**tensors, **bad.options)
    return re.sub(r" on (cpu|cuda:\d+)", "", str(caught.value))


@functools.cache
def _reference_run(op_name: str, index: int, device: str) -> tuple[Arrays, Arrays]:
    problem = _problem(op_name, index)
    outputs, gradients = run(reference_of(op_name), problem, device)
    return all_numpy(outputs), all_numpy(gradients)


def reference_run(op_name: str, case: Case, device: str) -> tuple[Arrays, Arrays]:
    """The reference's outputs and gradients on a device, computed once."""
    return _reference_run(op_name, OPS[op_name].cases.index(case), device)


def all_numpy(tensors: Tensors) -> Arrays:
    """Every tensor as a numpy array of its own dtype."""
    return {name: to_numpy(tensor) for name, tensor in tensors.items()}


# ---- comparing -----------------------------------------------------------------------------------------------------


def assert_outputs(problem: Problem, actual: Arrays, reference: Arrays) -> None:
    """Every output obeys the error rule."""
    for name, truth in problem.truth.items():
        groups = problem.groups(truth.shape)
        noise = problem.noise[name]
        assert_within_rule(name, actual[name], reference[name], truth, problem.op.tolerance, noise, groups)


def assert_rounded_alike(actual: Arrays, reference: Arrays) -> None:
    """16-bit outputs are, nearly all, the reference's own: the rounding that an op promises does happen.

    An op that rounds less often than it says is more exact, and still not the op a model was trained with. Sums in
    another order move a few results across a rounding boundary (1 in 8192 per fp32 ulp for fp16, 1 in 65536 for bf16);
    leaving out one rounding to 16 bits moves a quarter of them.
    """
    for name, values in reference.items():
        if values.dtype.itemsize == 2 and values.size >= 500:
            share = np.mean(actual[name] != values)
            assert share < 0.02, f"{name}: {share:.1%} of the elements are not the reference's"


def assert_gradients(problem: Problem, actual: Arrays, reference: Arrays) -> None:
    """Every gradient in `actual` obeys the error rule."""
    truth = problem.gradients
    assert actual, "no gradient came back"
    for name, gradient in actual.items():
        groups = problem.groups(gradient.shape)
        noise = problem.noise[f"d{name}"]
        what = f"gradient of {name}"
        assert_within_rule(what, gradient, reference[name], truth[name], problem.op.tolerance, noise, groups)


def assert_all_same_bits(actual: Arrays, expected: Arrays) -> None:
    """The same names, and the same bits under each."""
    assert actual.keys() == expected.keys()
    for name, array in actual.items():
        assert_same_bits(name, array, expected[name])


def only_with_rows(problem: Problem, gradients: Mapping[str, Any]) -> dict[str, Any]:
    """The gradients that have rows: those whose bits may not depend on how the call was made."""
    return {name: gradient for name, gradient in gradients.items() if name in problem.with_rows}
