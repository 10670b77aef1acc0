"""Mul: its mathematics, its contract, its truth in float64, its cases and its cost.

    out = x * y                with broadcasting, in fp32, rounded once

Backward:

    dx = dout * y              summed to x's shape, in x's dtype
    dy = dout * x              summed to y's shape, in y's dtype

Saved for backward: x where y has a gradient, and y where x has one. Where kernels sum, products stay fp32 until the sum
is rounded; where the framework does, they are first rounded to dout's dtype, as torch's own are. elementwise.py says
which tensors go together and how sums are taken. Knows numpy and no framework.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fuselm.kernels import elementwise
from fuselm.kernels.elementwise import has_kernels, inputs, summed
from fuselm.kernels.spec import Arrays, Case, Cost, OpSpec, TensorInfo

NAME, SIGN = "mul", "*"


def check(x: TensorInfo, y: TensorInfo) -> None:
    """Raise RefusedInput for the first rule that is broken; elementwise.py has the words."""
    elementwise.check(NAME, x, y)


def oracle(xp: Any, inputs: Arrays, options: Mapping[str, Any]) -> Arrays:
    """Forward in float64."""
    return {"out": inputs["x"] * inputs["y"]}


def oracle_backward(xp: Any, inputs: Arrays, cotangents: Arrays, options: Mapping[str, Any]) -> Arrays:
    """The formulas of the module's docstring, in float64; of those that kernels make, as in `inputs`."""
    dout, x, y = cotangents["out"], inputs["x"], inputs["y"]
    full, gradients = tuple(dout.shape), {}
    if has_kernels(tuple(x.shape), tuple(y.shape), full):
        gradients["x"] = summed(dout * y, tuple(x.shape))
    if has_kernels(tuple(y.shape), tuple(x.shape), full):
        gradients["y"] = summed(dout * x, tuple(y.shape))
    return gradients


def cost(case: Case, which: str) -> Cost:
    """Every tensor once: backward reads dout, x and y and writes dx and dy."""
    x, y, out = elementwise.bytes_of(case)
    if which == "forward":
        return Cost(x + y + out, case.size)
    return Cost(out + 2 * (x + y), 3 * case.size)


SPEC = OpSpec(
    name=NAME,
    inputs=inputs,
    outputs=lambda case: ("out",),
    oracle=oracle,
    oracle_backward=oracle_backward,
    cost=cost,
    cases=(*elementwise.cases_of_one_shape(), *elementwise.REPEATED_CASES),
    bench_cases=elementwise.bench_cases(),
    decode_cases=elementwise.DECODE_CASES,
    bad_calls=elementwise.BAD_CALLS,
)
