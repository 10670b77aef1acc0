"""GELU: its mathematics, its contract, its cases and its cost. activations.py has what the family shares.

    y  = x Phi(x)               Phi(x) = erfc(-x / sqrt(2)) / 2, the normal distribution's share below x
    dx = dy (Phi(x) + x phi(x))                            phi(x) = exp(-x^2 / 2) / sqrt(2 pi), its density

and with approximate="tanh", the formula of GPT-2:

    y  = x (1 + tanh(u)) / 2 = x s                         u = sqrt(2 / pi) (x + 0.044715 x^3), s = 1 / (1 + exp(-2 u))
    dx = dy (s + x s (1 - s) 2 u')                         u' = sqrt(2 / pi) (1 + 0.134145 x^2)

in fp32, rounded once to x's dtype. In 16 bits the CUDA kernel has, with t = 1 / (1 + FIT_UNIT |x|),

    Phi(-|x|) = t P(t) exp(-x^2 / 2)                       P of degree 5, coefficients FIT, the constant one first

fitted to the smallest relative error where |x| < 6: 7.1e-7 there, 1.5e-6 once fp32 has rounded it, growing to 4e-4 at
13. That is below half a step of bf16 (2e-3), and in fp16 y is 0 there. torch's 1 + erf is off by a tenth at -5 and 0
below -5.5. In fp32 the formulas are torch's own.

gelu(inf) is inf and gelu(-inf) is NaN, as in torch on CUDA (and in fp16 on the CPU; in fp32 and bf16 torch's CPU kernel
has NaN for both). The derivative is NaN at both.
"""

from __future__ import annotations

from fuselm.kernels import activations
from fuselm.kernels.spec import TensorInfo

NAME = "gelu"
# activations.cuh has the same numbers; tests/kernels/test_activations.py compares them and measures the fit.
FIT_UNIT = 0.294030488
FIT = (0.118649155, 0.102058791, 0.17756173, -0.0814407691, 0.271951079, -0.0887802914)


def check(x: TensorInfo, approximate: str) -> None:
    """Raise RefusedInput for the first rule that is broken."""
    activations.check_numbers(NAME, x)
    activations.check_approximate(NAME, approximate)


_TANH_SHAPES = ((1, 768), (4096, 4096), (32768, 14336))

SPEC = activations.unary_spec(
    NAME,
    activations.gelu,
    flops=(17, 20),
    cases=activations.unary_cases({}, {"approximate": "tanh"}),
    bench_cases=(
        *activations.unary_bench(),
        *(activations.unary_case("tanh", shape, activations.BF16, approximate="tanh") for shape in _TANH_SHAPES),
    ),
    decode_cases=activations.unary_decode(),
    bad_calls=(*activations.UNARY_BAD_CALLS, *activations.bad_approximations("x")),
)
