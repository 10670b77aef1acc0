"""SiLU: its mathematics, its contract, its cases and its cost. activations.py has what the family shares.

    y  = x s                    s = 1 / (1 + exp(-x)), the logistic function; in fp32, rounded once to x's dtype
    dx = dy s (1 + x (1 - s))

silu(inf) is inf and silu(-inf) is NaN, as in torch, whose formula is x / (1 + exp(-x)); the derivative is NaN at both.
In 16 bits, below -87, where 1 / exp(-x) has no normal fp32 number, y is 0 (torch: as little as -1e-36).
"""

from __future__ import annotations

from fuselm.kernels import activations
from fuselm.kernels.spec import TensorInfo

NAME = "silu"


def check(x: TensorInfo) -> None:
    """Raise RefusedInput for the first rule that is broken."""
    activations.check_numbers(NAME, x)


SPEC = activations.unary_spec(
    NAME,
    activations.silu,
    flops=(4, 8),
    cases=activations.unary_cases({}),
    bench_cases=activations.unary_bench(),
    decode_cases=activations.unary_decode(),
    bad_calls=activations.UNARY_BAD_CALLS,
)
