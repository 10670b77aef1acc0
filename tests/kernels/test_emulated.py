"""What an emulated GPU finds out of the kernels beyond the tests of every device; run by `pytest --emulated`."""

from __future__ import annotations

import pytest

from fuselm import ops
from fuselm.bench.sanitize import list_calls
from fuselm.kernels.adamw import LIST_OPS
from fuselm.kernels.spec import Case
from tests.kernels import emulated
from tests.kernels.arrays import assert_same_bits, to_numpy
from tests.kernels.problems import (
    OPS,
    all_numpy,
    assert_all_same_bits,
    each_case,
    each_kind,
    only_with_rows,
    op_of,
    problem_of,
    run,
)

pytestmark = pytest.mark.emulated


@pytest.mark.parametrize(("op_name", "case"), each_kind())
def test_calls_launch_kernels(op_name: str, case: Case) -> None:
    before = emulated.launches()
    run(op_of(op_name), problem_of(op_name, case), "cpu")
    assert emulated.launches() > before or case.size == 0


@pytest.mark.parametrize("op_name", LIST_OPS)
def test_calls_over_lists_launch_kernels_and_have_the_same_bits_on_devices_of_any_size(op_name: str) -> None:
    found = []
    for size in emulated.MULTIPROCESSORS:
        emulated.use(size)
        for lists, options in list_calls(op_name, "cpu"):
            before = emulated.launches()
            result = getattr(ops, op_name)(*lists, **options)
            assert emulated.launches() > before
            written = [tensor for one in (*lists, options.get("masters", ())) for tensor in one]
            found.append([to_numpy(tensor) for tensor in (*written, result) if tensor is not None])
    half = len(found) // len(emulated.MULTIPROCESSORS)
    for one, other in zip(found[:half], found[half:], strict=True):
        for index, (mine, its) in enumerate(zip(one, other, strict=True)):
            assert_same_bits(f"tensor {index}", mine, its)


@pytest.mark.parametrize(("op_name", "case"), each_case())
def test_a_row_has_the_same_bits_on_devices_of_any_size(op_name: str, case: Case) -> None:
    """What is a kernel for few rows on one is a kernel for many on the other."""
    problem, found = problem_of(op_name, case), []
    for size in emulated.MULTIPROCESSORS:
        emulated.use(size)
        outputs, gradients = run(op_of(op_name), problem, "cpu")
        rows = {name: out for name, out in outputs.items() if OPS[op_name].is_row_wise(case)}
        found.append(all_numpy(rows | only_with_rows(problem, gradients)))
    assert_all_same_bits(found[1], found[0])
