"""Add: its mathematics, its contract, its truth in float64, its cases and its cost.

    out = x + scale * y        with broadcasting, in fp32, rounded once: the scaled residual add

Backward:

    dx = dout                  summed to x's shape, in x's dtype; dout itself where that is its shape and dtype
    dy = scale * dout          summed to y's shape, in y's dtype; the same for a scale of 1

Nothing is saved but scale and what x and y looked like. elementwise.py says which tensors go together and how sums are
taken. Knows numpy and no framework.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fuselm.kernels import elementwise
from fuselm.kernels.elementwise import BF16, F32, ROWS_SPEC, has_kernels, inputs, pair_case, shapes, summed
from fuselm.kernels.spec import Arrays, BadCall, Case, Cost, OpSpec, TensorInfo, check_number, refuse

NAME, SIGN = "add", "+"
LARGEST_FP32 = 2.0**128 - 2.0**104


def check(x: TensorInfo, y: TensorInfo, scale: float) -> None:
    """Raise RefusedInput for the first rule that is broken; elementwise.py has the words for the two tensors."""
    elementwise.check(NAME, x, y)
    check_number(NAME, "scale", scale)
    if not -LARGEST_FP32 <= scale <= LARGEST_FP32:
        rule = "add: scale must be a finite number that fp32 can hold"
        raise refuse(rule, f"scale={scale}", "Pass scale=1.0 for the plain sum.")


def oracle(xp: Any, inputs: Arrays, options: Mapping[str, Any]) -> Arrays:
    """Forward in float64."""
    return {"out": inputs["x"] + inputs["y"] * options.get("scale", 1.0)}


def oracle_backward(xp: Any, inputs: Arrays, cotangents: Arrays, options: Mapping[str, Any]) -> Arrays:
    """The formulas of the module's docstring, in float64; of those that kernels make, as in `inputs`."""
    dout, x, y = cotangents["out"], tuple(inputs["x"].shape), tuple(inputs["y"].shape)
    full, gradients = tuple(dout.shape), {}
    if has_kernels(x, y, full):
        gradients["x"] = summed(dout, x)
    if has_kernels(y, x, full):
        gradients["y"] = summed(dout, y) * options.get("scale", 1.0)
    return gradients


def cost(case: Case, which: str) -> Cost:
    """Forward: every tensor once. Backward: dout in, and out what is not dout itself; nothing where all is."""
    x, y, out = elementwise.bytes_of(case)
    if which == "forward":
        return Cost(x + y + out, 2 * case.size)
    x_shape, y_shape = shapes(case)
    written = 0 if x_shape == case.shape and x == out else x
    written += 0 if y_shape == case.shape and y == out and case.options.get("scale", 1.0) == 1 else y
    return Cost(out + written if written else 0, case.size)


# Scaled, here and in the benchmarks: the gradients of an unscaled sum are dout itself, and no kernel runs.
CASES = (
    *elementwise.cases_of_one_shape(scale=0.3),
    *elementwise.REPEATED_CASES,
    pair_case("not scaled", (9, 768), BF16),
    pair_case("not scaled, bf16 y", (5, 33), F32, BF16),
    pair_case("scaled below 0", (50, 333), F32, scale=-1.7),
    pair_case("scaled by 0", (4, 40), BF16, scale=0),
    pair_case("scaled row", (260, 200), BF16, y="D", scale=0.125),
)

BENCH_CASES = elementwise.bench_cases(scale=0.5)

_PAIR = {"x": ROWS_SPEC, "y": ROWS_SPEC}

BAD_CALLS = (
    *elementwise.BAD_CALLS,
    BadCall("scale NaN", _PAIR, {"scale": float("nan")}, ("scale must be a finite number", "scale=nan")),
    BadCall("scale infinite", _PAIR, {"scale": float("-inf")}, ("scale must be a finite number", "scale=-inf")),
    BadCall("scale above fp32", _PAIR, {"scale": 1e39}, ("fp32 can hold", "scale=1e+39")),
    BadCall("scale no number", _PAIR, {"scale": "large"}, ("scale must be a Python number", "str")),
    BadCall("scale a truth value", _PAIR, {"scale": True}, ("scale must be a Python number", "bool")),
    BadCall("scale None", _PAIR, {"scale": None}, ("scale must be a Python number", "NoneType")),
)

SPEC = OpSpec(
    name=NAME,
    inputs=inputs,
    outputs=lambda case: ("out",),
    oracle=oracle,
    oracle_backward=oracle_backward,
    cost=cost,
    cases=CASES,
    bench_cases=BENCH_CASES,
    decode_cases=elementwise.DECODE_CASES,
    bad_calls=BAD_CALLS,
)
