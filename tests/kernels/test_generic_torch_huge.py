"""Every op past 2^31 elements, on CUDA: offsets that need 64 bits.

Knows no op by name. Inputs are made on the GPU; the rows at both ends and around the counts where 32 bits run out are
checked against float64 like any other rows, and sums over all rows against float64 sums over chunks.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from fuselm.kernels.spec import Case, has_rows
from tests.kernels.arrays import Arrays, assert_within_rule, random_tensor
from tests.kernels.problems import (
    OPS,
    Problem,
    Tensors,
    all_numpy,
    as_tuple,
    assert_gradients,
    assert_outputs,
    backward,
    each_case,
    op_of,
    reference_of,
    run,
    solve,
)

CHUNK = 2**26  # elements whose float64 sums are taken at a time


def checked_rows(case: Case) -> list[int]:
    """The rows at both ends and around elements 2^30 (byte 2^31 in 16 bits) and 2^31."""
    rows, width = case.shape
    edges = (0, 2**30 // width, 2**31 // width, rows - 1)
    picked = {edge + step for edge in edges for step in range(-3, 4)}
    return sorted(row for row in picked if 0 <= row < rows)


def random_tensors(op_name: str, case: Case) -> Tensors:
    generator = torch.Generator("cuda").manual_seed(0)
    return {
        name: random_tensor(spec, generator).requires_grad_(spec.differentiable)
        for name, spec in OPS[op_name].inputs(case).items()
    }


def some_rows(tensors: Tensors, case: Case, rows: list[int]) -> Tensors:
    def taken(tensor: torch.Tensor) -> torch.Tensor:
        # Row by row: views of single rows do not lean on torch's own counting past 2^31.
        return torch.stack([tensor[row] for row in rows]) if has_rows(case, tuple(tensor.shape)) else tensor

    return {name: taken(tensor.detach()) for name, tensor in tensors.items()}


def problem_of_rows(op_name: str, case: Case, tensors: Tensors, cotangents: Tensors, rows: list[int]) -> Problem:
    """The small problem that a few rows of a huge one are."""
    few = dataclasses.replace(case, shape=(len(rows), case.shape[-1]), huge=False)
    inputs, sent = (all_numpy(some_rows(ts, case, rows)) for ts in (tensors, cotangents))
    problem = solve(OPS[op_name], few, inputs, sent)
    by_row = {name: truth for name, truth in problem.truth.items() if has_rows(few, truth.shape)}
    return dataclasses.replace(problem, truth=by_row)  # a sum over a few rows says nothing of one over all


def true_sums(op_name: str, case: Case, tensors: Tensors, cotangents: Tensors) -> Arrays:
    """Float64 gradients of the tensors that have no rows: sums over all rows, chunk by chunk."""
    sums: Tensors = {}
    op = OPS[op_name]
    summed = {name for name, spec in op.inputs(case).items() if spec.differentiable} - op.row_inputs(case)
    step = max(1, CHUNK // case.shape[-1])
    for start in range(0, case.shape[0] if summed else 0, step):
        inputs, sent = (
            {name: chunk(tensor.detach(), case, slice(start, start + step)) for name, tensor in ts.items()}
            for ts in (tensors, cotangents)
        )
        for name, gradient in op.oracle_backward(torch, inputs, sent, case.options).items():
            if name in summed:
                sums[name] = sums.get(name, 0.0) + gradient
    return {name: total.cpu().numpy() for name, total in sums.items()}


def chunk(tensor: torch.Tensor, case: Case, rows: slice) -> torch.Tensor:
    taken = tensor[rows] if has_rows(case, tuple(tensor.shape)) else tensor
    return taken.double() if taken.is_floating_point() else taken


def check_rows(op_name: str, case: Case, tensors: Tensors, cotangents: Tensors, made: Tensors, grads: Tensors) -> None:
    rows = checked_rows(case)
    problem = problem_of_rows(op_name, case, tensors, cotangents, rows)
    reference_outputs, reference_gradients = run(reference_of(op_name), problem, "cuda")
    assert_outputs(problem, all_numpy(some_rows(made, case, rows)), all_numpy(reference_outputs))
    with_rows = {name: gradient for name, gradient in grads.items() if name in OPS[op_name].row_inputs(case)}
    if with_rows:  # of an embedding nothing that has a gradient has rows
        assert_gradients(problem, all_numpy(some_rows(with_rows, case, rows)), all_numpy(reference_gradients))


def check_sums(op_name: str, case: Case, tensors: Tensors, cotangents: Tensors, grads: Tensors) -> None:
    """A 16-bit sum must be the true one rounded: torch's own kernel is not asked to count past 2^31."""
    for name, truth in true_sums(op_name, case, tensors, cotangents).items():
        actual = all_numpy({name: grads[name]})[name]
        rounded = truth.astype(actual.dtype)
        assert np.abs(truth).max() > 0
        assert_within_rule(f"gradient of {name}", actual, rounded, truth, OPS[op_name].tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize(("op_name", "case"), each_case(huge=True))
def test_more_elements_than_32_bits_can_count(op_name: str, case: Case, cuda: str) -> None:
    assert case.size > 2**31
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < 16 * case.size:
        pytest.skip("not enough GPU memory is free")
    torch.manual_seed(0)  # of the cotangents
    tensors = random_tensors(op_name, case)
    results = as_tuple(op_of(op_name)(**tensors, **case.options))
    outputs = dict(zip(OPS[op_name].outputs(case), results, strict=True))
    cotangents = {name: torch.empty_like(output).normal_() for name, output in outputs.items()}
    gradients = backward(outputs, cotangents, tensors)
    check_rows(op_name, case, tensors, cotangents, outputs, gradients)
    check_sums(op_name, case, tensors, cotangents, gradients)
    del tensors, results, outputs, cotangents, gradients
    torch.cuda.empty_cache()
