"""Squared ReLU: its mathematics, its contract, its cases and its cost. activations.py has what the family shares.

    y  = max(x, 0)^2            in fp32, rounded once to x's dtype
    dx = 2 x dy                 where x is positive, else 0, whatever dy is; so torch has it

NaN stays NaN in both. Of inf y and dx are inf, of -inf 0.
"""

from __future__ import annotations

from fuselm.kernels import activations
from fuselm.kernels.spec import TensorInfo

NAME = "relu2"


def check(x: TensorInfo) -> None:
    """Raise RefusedInput for the first rule that is broken."""
    activations.check_numbers(NAME, x)


SPEC = activations.unary_spec(
    NAME,
    activations.relu2,
    flops=(2, 3),
    cases=activations.unary_cases({}),
    bench_cases=activations.unary_bench(),
    decode_cases=activations.unary_decode(),
    bad_calls=activations.UNARY_BAD_CALLS,
)
