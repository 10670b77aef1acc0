"""SwiGLU: its mathematics, its contract, its cases and its cost. activations.py has what the family shares.

    y     = silu(gate) up                       in fp32, rounded once to gate's dtype; silu.py has silu
    dgate = dy up s (1 + gate (1 - s))          s = 1 / (1 + exp(-gate))
    dup   = dy silu(gate)

Without `up`, gate is packed: its last dimension is [gate | up], and so is its gradient's.
"""

from __future__ import annotations

from fuselm.kernels import activations
from fuselm.kernels.spec import TensorInfo

NAME = "swiglu"


def check(gate: TensorInfo, up: TensorInfo | None) -> None:
    """Raise RefusedInput for the first rule that is broken."""
    activations.check_gated(NAME, gate, up)


SPEC = activations.gated_spec(
    NAME,
    activations.silu,
    flops=(5, 11),
    cases=activations.gated_cases({}),
    bench_cases=activations.gated_bench(),
    decode_cases=activations.gated_decode(),
    bad_calls=activations.GATED_BAD_CALLS,
)
