"""Every op in PyTorch: its numbers, its gradients, its invariances and its refusals, on CPU and CUDA.

Knows no op by name: `spec.ops()` says what there is, and each op's `SPEC` what is true. The error rule is
arrays.assert_within_rule; its yardstick is the op's `<op>_reference`, on the same device.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fuselm.bench.record import ONE_GPU
from fuselm.kernels.spec import BadCall, Case, InputSpec, RefusedInput, has_rows
from tests.kernels.arrays import (
    LAYOUTS,
    assert_same_bits,
    float64,
    random_tensor,
    to_numpy,
)
from tests.kernels.problems import (
    DEVICES,
    OPS,
    Problem,
    Tensors,
    all_numpy,
    as_tuple,
    assert_all_same_bits,
    assert_gradients,
    assert_outputs,
    assert_rounded_alike,
    backward,
    each_bad_call,
    each_case,
    forward,
    only_with_rows,
    op_of,
    problem_of,
    reference_of,
    reference_run,
    refusal,
    run,
    small,
    solve,
    torch_cotangents,
    torch_inputs,
)

on_each_device = pytest.mark.parametrize("device", DEVICES, indirect=True)
over_cases = pytest.mark.parametrize(("op_name", "case"), each_case())
over_small_cases = pytest.mark.parametrize(("op_name", "case"), each_case(small))


# ---- the oracle ----------------------------------------------------------------------------------------------------


@over_cases
def test_oracle_backward_is_the_derivative_of_the_oracle(op_name: str, case: Case) -> None:
    problem = problem_of(op_name, case)
    inputs = {k: torch.from_numpy(v) for k, v in float64(problem.inputs).items()}
    for name in problem.differentiable:
        inputs[name].requires_grad_()
    outputs = problem.op.oracle(torch, inputs, case.options)
    derived = backward(outputs, {k: torch.from_numpy(v) for k, v in float64(problem.cotangents).items()}, inputs)
    assert derived.keys() == problem.gradients.keys()
    for name, gradient in derived.items():
        np.testing.assert_allclose(problem.gradients[name], gradient.numpy(), rtol=1e-9, atol=1e-12)


@over_cases
def test_oracle_says_the_same_in_numpy_and_torch(op_name: str, case: Case) -> None:
    problem = problem_of(op_name, case)
    inputs = {k: torch.from_numpy(v) for k, v in float64(problem.inputs).items()}
    outputs = problem.op.oracle(torch, inputs, case.options)
    assert tuple(outputs) == problem.op.outputs(case)
    for name, output in outputs.items():
        np.testing.assert_allclose(problem.truth[name], output.numpy(), rtol=1e-12, atol=1e-12)


# ---- numbers -------------------------------------------------------------------------------------------------------


@on_each_device
@over_cases
def test_outputs_are_as_exact_as_torchs(op_name: str, case: Case, device: str) -> None:
    problem = problem_of(op_name, case)
    outputs = forward(op_of(op_name), problem, torch_inputs(problem, device))
    reference = reference_run(op_name, case, device)[0]
    assert all(output.is_contiguous() for name, output in outputs.items() if name not in problem.op.views)
    assert_outputs(problem, all_numpy(outputs), reference)
    if problem.op.rounds_alike:
        assert_rounded_alike(all_numpy(outputs), reference)


@on_each_device
@over_cases
def test_gradients_are_as_exact_as_torchs(op_name: str, case: Case, device: str) -> None:
    problem = problem_of(op_name, case)
    outputs, gradients = run(op_of(op_name), problem, device)
    reference_outputs, reference_gradients = reference_run(op_name, case, device)
    assert_outputs(problem, all_numpy(outputs), reference_outputs)
    assert tuple(gradients) == problem.differentiable
    assert_gradients(problem, all_numpy(gradients), reference_gradients)


@on_each_device
@over_cases
def test_inputs_are_left_as_they_were(op_name: str, case: Case, device: str) -> None:
    problem = problem_of(op_name, case)
    inputs = torch_inputs(problem, device, wanted=problem.differentiable)
    cotangents = torch_cotangents(problem, device)
    backward(forward(op_of(op_name), problem, inputs), cotangents, inputs)
    assert_all_same_bits(all_numpy(inputs), problem.inputs)
    assert_all_same_bits(all_numpy(cotangents), problem.cotangents)


# ---- which gradients are asked for, and how they arrive ------------------------------------------------------------


@on_each_device
@over_small_cases
def test_gradients_do_not_depend_on_which_are_asked_for(op_name: str, case: Case, device: str) -> None:
    problem = problem_of(op_name, case)
    everything = all_numpy(run(op_of(op_name), problem, device)[1])
    cotangents = torch_cotangents(problem, device)
    for count in range(1, len(problem.differentiable)):
        for wanted in itertools.combinations(problem.differentiable, count):
            inputs = torch_inputs(problem, device, wanted=wanted)
            some = backward(forward(op_of(op_name), problem, inputs), cotangents, inputs)
            assert tuple(some) == wanted
            assert_gradients(problem, all_numpy(some), reference_run(op_name, case, device)[1])
            some_rows = only_with_rows(problem, all_numpy(some))
            assert_all_same_bits(some_rows, {name: everything[name] for name in some_rows})


@on_each_device
@pytest.mark.parametrize(
    ("op_name", "case"), [p for p in each_case(small) if len(OPS[p.values[0]].outputs(p.values[1])) > 1]
)
def test_gradients_when_only_one_output_is_used(op_name: str, case: Case, device: str) -> None:
    for used in OPS[op_name].outputs(case):
        made = problem_of(op_name, case)
        cotangents = {k: v if k == used else np.zeros_like(v) for k, v in made.cotangents.items()}
        problem = solve(made.op, case, made.inputs, cotangents)
        sent = {used: torch_cotangents(problem, device)[used]}
        ours = gradients_with(op_of(op_name), problem, device, sent)
        reference = gradients_with(reference_of(op_name), problem, device, sent)
        assert_gradients(problem, all_numpy(ours), all_numpy(reference))


def gradients_with(function: Callable[..., Any], problem: Problem, device: str, cotangents: Tensors) -> Tensors:
    inputs = torch_inputs(problem, device, wanted=problem.differentiable)
    return backward(forward(function, problem, inputs), cotangents, inputs)


@on_each_device
@over_small_cases
def test_an_expanded_cotangent_counts_as_its_contiguous_copy(op_name: str, case: Case, device: str) -> None:
    """What y.sum().backward() sends has stride 0 everywhere."""
    made = problem_of(op_name, case)
    problem = solve(made.op, case, made.inputs, {k: np.ones_like(v) for k, v in made.cotangents.items()})
    inputs = torch_inputs(problem, device, wanted=problem.differentiable)
    outputs = forward(op_of(op_name), problem, inputs)
    total = sum(output.sum(dtype=torch.float32) for output in outputs.values())
    summed = torch.autograd.grad(total, [inputs[name] for name in problem.differentiable])
    expanded = all_numpy(dict(zip(problem.differentiable, summed, strict=True)))
    contiguous, reference = (
        all_numpy(gradients_with(function, problem, device, torch_cotangents(problem, device)))
        for function in (op_of(op_name), reference_of(op_name))
    )
    # Rows must have the bits of the contiguous copy; to ask more of them would be to compare noise, the gradient of a
    # row's sum being 0 where the op makes that sum constant.
    if sums := {k: v for k, v in expanded.items() if k not in only_with_rows(problem, expanded)}:
        assert_gradients(problem, sums, reference)
    assert_all_same_bits(only_with_rows(problem, expanded), only_with_rows(problem, contiguous))


@on_each_device
@over_small_cases
@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout != "contiguous"])
def test_a_cotangent_may_lie_anyhow(op_name: str, case: Case, device: str, layout: str) -> None:
    problem = problem_of(op_name, case)
    lying = torch_cotangents(problem, device, layout)
    gradients = all_numpy(gradients_with(op_of(op_name), problem, device, lying))
    plain = all_numpy(run(op_of(op_name), problem, device)[1])
    assert_gradients(problem, gradients, reference_run(op_name, case, device)[1])
    assert_all_same_bits(only_with_rows(problem, gradients), only_with_rows(problem, plain))


@on_each_device
@over_small_cases
def test_layout_changes_no_bit_of_a_row(op_name: str, case: Case, device: str) -> None:
    problem = problem_of(op_name, case)
    cotangents = torch_cotangents(problem, device)
    results = []
    for layout in LAYOUTS:
        inputs = torch_inputs(problem, device, layout, wanted=problem.differentiable)
        outputs = forward(op_of(op_name), problem, inputs)
        gradients = only_with_rows(problem, backward(outputs, cotangents, inputs))
        results.append(all_numpy(outputs | {f"d{name}": gradient for name, gradient in gradients.items()}))
    for result in results[1:]:
        assert_all_same_bits(result, results[0])


# ---- repeats and batches -------------------------------------------------------------------------------------------


@on_each_device
@over_cases
def test_repeats_are_equal_to_the_bit(op_name: str, case: Case, device: str) -> None:
    problem = problem_of(op_name, case)
    repeats = 1000 if device == "cuda" else 3 if small(case) else 1
    inputs = torch_inputs(problem, device, wanted=problem.differentiable)
    cotangents = torch_cotangents(problem, device)

    def once() -> list[torch.Tensor]:
        outputs = forward(op_of(op_name), problem, inputs)
        gradients = backward(outputs, cotangents, inputs)
        return [t.detach().reshape(-1).view(torch.uint8) for t in (*outputs.values(), *gradients.values()) if t.numel()]

    first = once()
    different = torch.zeros((), dtype=torch.bool, device=device)
    for _ in range(repeats):  # compared where they lie: one look at the answer, after the last repeat
        for again, before in zip(once(), first, strict=True):
            different |= (again != before).any()
    assert not different.item()


def row_cases() -> list[Any]:
    """One case per width, dtypes and options, of row-wise ops: rows of ordinary width, at any alignment."""

    def keep(case: Case) -> bool:
        return case.layout == "contiguous" and 1 < case.shape[-1] <= 5000 and 0 not in case.shape

    return [p for p in each_case(keep) if OPS[p.values[0]].is_row_wise(p.values[1])]


@on_each_device
@pytest.mark.parametrize(("op_name", "case"), row_cases())
def test_a_row_does_not_depend_on_its_batch(op_name: str, case: Case, device: str) -> None:
    """Row i alone, in a small slice and among all rows: the same bits of every output and gradient that has rows."""
    op = OPS[op_name]
    rows = 32768 if device == "cuda" else 300
    case = dataclasses.replace(case, shape=(rows, case.shape[-1]))
    generator = torch.Generator(device).manual_seed(0)
    whole = {name: random_tensor(spec, generator) for name, spec in op.inputs(case).items()}
    everything = row_results(op_name, case, whole, slice(0, rows))
    assert everything
    for row in (0, 1, 17, rows // 2 + 1, rows - 1):
        for taken in (slice(row, row + 1), slice(max(row - 2, 0), row + 5)):
            part = row_results(op_name, case, whole, taken)
            for name, values in part.items():
                expected = to_numpy(everything[name][row])
                assert_same_bits(f"{name}, row {row}", to_numpy(values[row - taken.start]), expected)


def row_results(op_name: str, case: Case, tensors: Tensors, rows: slice) -> Tensors:
    """Outputs and gradients that have rows, of a call on some of the rows."""
    op = OPS[op_name]
    with_rows, specs = op.row_inputs(case), op.inputs(case)
    inputs = {name: tensor[rows] if name in with_rows else tensor for name, tensor in tensors.items()}
    wanted = [name for name in with_rows if specs[name].differentiable]
    inputs = {name: tensor.detach().requires_grad_(name in wanted) for name, tensor in inputs.items()}
    outputs = dict(zip(op.outputs(case), as_tuple(op_of(op_name)(**inputs, **case.options)), strict=True))
    taken = dataclasses.replace(case, shape=(len(range(case.shape[0])[rows]), *case.shape[1:]))
    generator = torch.Generator(next(iter(tensors.values())).device).manual_seed(5)
    cotangents = {}
    for name, out in outputs.items():
        apart = has_rows(taken, tuple(out.shape))
        shape = (case.shape[0], *out.shape[1:]) if apart else tuple(out.shape)  # for all rows, whichever are taken
        sent = random_tensor(InputSpec(shape, str(out.dtype).removeprefix("torch.")), generator)
        cotangents[name] = sent[rows] if apart else sent
    gradients = backward(outputs, cotangents, inputs)
    by_row = {name: out for name, out in outputs.items() if has_rows(taken, tuple(out.shape))}
    return by_row | {f"d{name}": gradient for name, gradient in gradients.items()}


# ---- empty tensors and refusals ------------------------------------------------------------------------------------


@on_each_device
@pytest.mark.parametrize(("op_name", "case"), each_case(lambda case: 0 in case.shape))
def test_empty_tensors_give_empty_results_and_zero_sums(op_name: str, case: Case, device: str) -> None:
    problem = problem_of(op_name, case)
    outputs, gradients = run(op_of(op_name), problem, device)
    for name, output in outputs.items():
        assert output.shape == problem.truth[name].shape
        assert output.device.type == device
    for name, gradient in gradients.items():
        assert gradient.shape == problem.inputs[name].shape
        assert torch.equal(gradient, torch.zeros_like(gradient))


@on_each_device
@pytest.mark.parametrize("with_grad", [False, True])
@pytest.mark.parametrize(("op_name", "bad"), each_bad_call())
def test_bad_calls_are_refused_in_the_ops_own_words(op_name: str, bad: BadCall, device: str, with_grad: bool) -> None:
    def call(**arguments: Any) -> Any:
        for argument in arguments.values():
            if isinstance(argument, torch.Tensor) and argument.is_floating_point():
                argument.requires_grad_(with_grad)
        return op_of(op_name)(**arguments)

    words = refusal(call, bad, device)
    for say in bad.says:
        assert say in words
    assert words == refusal(op_of(op_name), bad, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("op_name", "case"), [p for p in each_case(small) if len(OPS[p.values[0]].inputs(p.values[1])) > 1]
)
def test_tensors_of_two_devices_are_refused(op_name: str, case: Case, cuda: str) -> None:
    problem = problem_of(op_name, case)
    for name in problem.inputs:
        tensors = torch_inputs(problem, cuda)
        tensors[name] = tensors[name].cpu()
        with pytest.raises(RefusedInput, match="one device"):
            forward(op_of(op_name), problem, tensors)


@pytest.mark.gpu
@pytest.mark.parametrize(("op_name", "case"), each_case(small))
def test_the_second_gpu_gives_what_the_first_gives(op_name: str, case: Case, cuda: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip(ONE_GPU)
    problem = problem_of(op_name, case)
    first, second = run(op_of(op_name), problem, "cuda:0"), run(op_of(op_name), problem, "cuda:1")
    for here, there in zip(first, second, strict=True):
        assert_all_same_bits(all_numpy(there), all_numpy(here))
