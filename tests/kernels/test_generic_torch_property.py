"""Every row-wise op on shapes, dtypes, options and layouts that nobody thought of.

Knows no op by name: a registered case lends its options and its choice of tensors, Hypothesis picks the rest. The draws
are the same in every run.
"""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fuselm.kernels.spec import DTYPE_BYTES, Case
from tests.kernels.arrays import LAYOUTS
from tests.kernels.problems import (
    OPS,
    all_numpy,
    assert_gradients,
    assert_outputs,
    each_op,
    make_problem,
    op_of,
    reference_of,
    run,
)

over_row_wise_ops = pytest.mark.parametrize("op_name", each_op(lambda op: op.row_wise))
# Fixtures here are names only: nothing of theirs changes between examples.
same_every_run = settings(
    deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
dtypes = st.sampled_from(sorted(DTYPE_BYTES))
# Ordinary widths, and those next to a whole number of 16-byte vectors, where tails begin and end. Not 1: there dx is
# nothing but rounding, which has registered cases of its own.
widths = st.integers(2, 5000) | st.builds(lambda n, step: max(2, 8 * n + step), st.integers(0, 600), st.integers(-1, 1))


@st.composite
def cases(draw: st.DrawFn, op_name: str) -> Case:
    """A registered case on other rows."""
    case = draw(st.sampled_from([case for case in OPS[op_name].cases if not case.huge]))
    return dataclasses.replace(
        case,
        name=f"drawn {draw(st.integers(0, 2**31 - 1))}",
        shape=(draw(st.integers(0, 70)), draw(widths)),
        dtype=draw(dtypes),
        tensors={name: draw(dtypes) for name in case.tensors},
        layout=draw(st.sampled_from(LAYOUTS)),
    )


def check(op_name: str, case: Case, device: str) -> None:
    problem = make_problem(OPS[op_name], case)
    outputs, gradients = run(op_of(op_name), problem, device)
    reference_outputs, reference_gradients = run(reference_of(op_name), problem, device)
    assert_outputs(problem, all_numpy(outputs), all_numpy(reference_outputs))
    assert_gradients(problem, all_numpy(gradients), all_numpy(reference_gradients))


@over_row_wise_ops
@given(data=st.data())
@settings(same_every_run, max_examples=40)
def test_any_rows_on_cpu(op_name: str, data: st.DataObject) -> None:
    check(op_name, data.draw(cases(op_name)), "cpu")


@pytest.mark.gpu
@over_row_wise_ops
@given(data=st.data())
@settings(same_every_run, max_examples=150)
def test_any_rows_on_cuda(op_name: str, cuda: str, data: st.DataObject) -> None:
    check(op_name, data.draw(cases(op_name)), cuda)
