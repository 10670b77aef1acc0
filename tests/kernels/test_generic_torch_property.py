"""Every row-wise op on shapes, dtypes, options and layouts that nobody thought of.

Knows no op by name: a registered case lends its options and its choice of tensors, Hypothesis picks the rest. The draws
are the same in every run.
"""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fuselm.kernels.spec import DTYPE_BYTES, Case, Tolerance
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

over_row_wise_ops = pytest.mark.parametrize("op_name", each_op(lambda op: any(map(op.is_row_wise, op.cases))))
# Fixtures here are names only: nothing of theirs changes between examples.
same_every_run = settings(
    deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
dtypes = st.sampled_from(sorted(DTYPE_BYTES))
# Ordinary widths, and those next to a whole number of 16-byte vectors, where tails begin and end. No rows of a few
# numbers: there gradients are little but rounding, which has registered cases of its own.
widths = st.integers(8, 5000) | st.builds(lambda n, step: max(8, 8 * n + step), st.integers(0, 600), st.integers(-1, 1))
# Of so many draws some are unlucky, and most are small. What is wrong is wrong by more than this.
UNLUCKY = Tolerance(rms=1.5, max=2.0, ulps=2.0, rms_ulps=1.0)


@st.composite
def cases(draw: st.DrawFn, op_name: str) -> Case:
    """A registered case on other rows."""
    op = OPS[op_name]
    case = draw(st.sampled_from([case for case in op.cases if op.is_row_wise(case) and not case.huge]))
    return dataclasses.replace(
        case,
        name=f"drawn {draw(st.integers(0, 2**31 - 1))}",
        shape=(draw(st.integers(0, 70)), draw(widths)),
        dtype=draw(dtypes),
        tensors={name: draw(dtypes) if old in DTYPE_BYTES else old for name, old in case.tensors.items()},
        layout=draw(st.sampled_from(LAYOUTS)),
    )


def check(op_name: str, case: Case, device: str) -> None:
    problem = make_problem(dataclasses.replace(OPS[op_name], tolerance=UNLUCKY), case)
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
