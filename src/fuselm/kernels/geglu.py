"""GEGLU: its mathematics, its contract, its cases and its cost. activations.py has what the family shares.

    y     = gelu(gate) up                       in fp32, rounded once to gate's dtype; gelu.py has both of its formulas
    dgate = dy up gelu'(gate)
    dup   = dy gelu(gate)

Without `up`, gate is packed: its last dimension is [gate | up], and so is its gradient's. Timed with
approximate="tanh", which is what models have.
"""

from __future__ import annotations

from fuselm.kernels import activations
from fuselm.kernels.spec import TensorInfo

NAME = "geglu"


def check(gate: TensorInfo, up: TensorInfo | None, approximate: str) -> None:
    """Raise RefusedInput for the first rule that is broken."""
    activations.check_gated(NAME, gate, up)
    activations.check_approximate(NAME, approximate)


_ERF_SHAPES = ((32768, 2 * 4096), (4096, 2 * 14336))

SPEC = activations.gated_spec(
    NAME,
    activations.gelu,
    flops=(18, 24),
    cases=activations.gated_cases({"approximate": "tanh"}, {}),
    bench_cases=(
        *activations.gated_bench(approximate="tanh"),
        *(activations.gated_case("packed, erf", shape, activations.BF16) for shape in _ERF_SHAPES),
    ),
    decode_cases=activations.gated_decode(approximate="tanh"),
    bad_calls=(*activations.GATED_BAD_CALLS, *activations.bad_approximations("gate")),
)
