"""LayerNorm: its mathematics, its contract, its truth in float64, its cases and its cost.

    h    = x                                     or, with a residual, h = x + residual, rounded to the residual's dtype
    mean = mean(h over the last dimension)
    rstd = 1 / sqrt(mean((h - mean)^2) + eps)    mean(h^2) - mean^2 would cancel where the mean is large
    xhat = (h - mean) * rstd
    y    = xhat * weight + bias                  in fp32, then rounded to x's dtype
    with a residual the result is (y, h): y is exactly the norm of the h that is returned

Backward, with g = dy * weight and dh what arrives for h (0 without a residual):

    dx        = rstd * (g - mean(g) - xhat * mean(g * xhat)) + dh      in x's dtype
    dresidual = the same sum                                           in the residual's dtype
    dweight   = sum over rows of dy * xhat                             in the weight's dtype, summed in fp32
    dbias     = sum over rows of dy                                    in the bias's dtype, summed in fp32

Saved for backward: h (x itself, or the sum), mean and rstd (an fp32 number each per row), weight, and bias for its
dtype. Rounding counts as identity. x, weight, bias and residual may each be fp32, fp16 or bf16, and weight and bias be
there or not, each by itself. Knows numpy and no framework; norms.py has what norms share.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from fuselm.kernels import norms
from fuselm.kernels.norms import BF16, F16, F32, outputs
from fuselm.kernels.spec import Arrays, BadCall, Case, Cost, InputSpec, OpSpec, TensorInfo

NAME = "layer_norm"
DEFAULT_EPS = 1e-5


def check(
    x: TensorInfo,
    weight: TensorInfo | None,
    bias: TensorInfo | None,
    residual: TensorInfo | None,
    eps: float,
) -> None:
    """Raise RefusedInput for the first rule that is broken."""
    norms.check_tensors(NAME, x, {"weight": weight, "bias": bias}, residual)
    norms.check_eps(NAME, eps, "Pass eps=1e-5.")


def oracle(xp: Any, inputs: Arrays, options: Mapping[str, Any]) -> Arrays:
    """Forward in float64."""
    h, _, xhat = _forward(xp, inputs, options)
    y = xhat * inputs["weight"] if "weight" in inputs else xhat
    y = y + inputs["bias"] if "bias" in inputs else y
    return {"y": y, "residual_out": h} if "residual" in inputs else {"y": y}


def oracle_backward(xp: Any, inputs: Arrays, cotangents: Arrays, options: Mapping[str, Any]) -> Arrays:
    """The formulas of the module's docstring, in float64."""
    _, rstd, xhat = _forward(xp, inputs, options)
    dy = cotangents["y"]
    g = dy * inputs["weight"] if "weight" in inputs else dy
    dh = rstd * (g - g.mean(-1)[..., None] - xhat * (g * xhat).mean(-1)[..., None])
    if "residual" in inputs:
        dh = dh + cotangents["residual_out"]
    width = dy.shape[-1]
    found = {
        "x": dh,
        "weight": (dy * xhat).reshape(-1, width).sum(0),
        "bias": dy.reshape(-1, width).sum(0),
        "residual": dh,
    }
    return {name: found[name] for name in inputs}


def _forward(xp: Any, inputs: Arrays, options: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    h = inputs["x"] + inputs["residual"] if "residual" in inputs else inputs["x"]
    centred = h - h.mean(-1)[..., None]
    rstd = 1 / xp.sqrt((centred * centred).mean(-1) + options.get("eps", DEFAULT_EPS))[..., None]
    return h, rstd, centred * rstd


def cost(case: Case, which: str) -> Cost:
    """Every tensor once; backward reads mean and rstd, and of the bias only writes the gradient."""
    return norms.cost(case, which, flops=7 if which == "forward" else 13, statistics=2)


# ---- cases ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ShiftedCase(Case):
    """A case whose x is far from 0, where a variance that is not taken from differences has no digits left."""

    mean: float = 100.0


def inputs(case: Case) -> dict[str, InputSpec]:
    """x, and whichever of weight, bias and residual the case names."""
    made = norms.inputs(case)
    if isinstance(case, ShiftedCase):
        made["x"] = dataclasses.replace(made["x"], mean=case.mean)
    return made


def _case(
    name: str,
    shape: tuple[int, ...],
    dtype: str,
    weight: str = "",
    bias: str = "",
    residual: str = "",
    **more: Any,
) -> Case:
    return norms.case(name, shape, dtype, {"weight": weight, "bias": bias, "residual": residual}, **more)


def _affine(name: str, shape: tuple[int, ...], dtype: str, **more: Any) -> Case:
    """All tensors of one dtype, weight and bias there."""
    return _case(name, shape, dtype, dtype, dtype, **more)


CASES = (
    _affine("one row", (1, 64), F32),
    _affine("one number", (1,), F32),
    _affine("width one", (5, 1), BF16),
    _case("no weight, no bias", (7, 128), F16),
    _case("no bias", (6, 200), BF16, BF16),
    _case("bias without weight", (9, 136), F32, "", F32),
    _case("fp32 bias without weight", (5, 99), BF16, "", F32),
    _affine("odd width", (13, 1001), BF16),
    _affine("odd width fp32", (3, 77), F32),
    _case("odd width, many rows", (523, 257), BF16, F32, F32),
    _affine("odd width, wide", (5, 8191), F16),
    _affine("not a power of two", (9, 768), BF16),
    _affine("no rows", (0, 256), BF16),
    _case("no rows, residual", (2, 0, 256), F32, F32, F32, F32),
    _affine("three dimensions", (2, 3, 512), F32, eps=1e-6),
    _case("fp32 weight and bias", (6, 1024), BF16, F32, F32),
    _case("fp32 bias, bf16 rows", (6, 1024), BF16, BF16, F32),
    _case("bf16 bias, fp32 rows", (6, 1024), F32, F32, BF16),
    _case("bf16 weight and bias, fp32 rows", (6, 1024), F32, BF16, BF16),
    _case("fp16 weight, fp32 bias, bf16 rows", (6, 200), BF16, F16, F32),
    ShiftedCase("mean 100", (8, 1000), F32, {}, {"weight": F32, "bias": F32}),
    ShiftedCase("mean 100, bf16", (8, 1024), BF16, {}, {"weight": BF16, "bias": BF16}),
    ShiftedCase("mean 100, wide", (3, 24000), BF16, {}, {"weight": BF16, "bias": BF16}),
    _affine("residual", (8, 4096), BF16, residual=BF16),
    _case("residual, no weight, no bias", (5, 96), F16, residual=F16),
    _affine("fp32 residual", (8, 1024), BF16, residual=F32),
    _case("fp32 residual, odd width", (5, 1023), BF16, F32, F32, F32),
    _affine("bf16 residual, fp32 rows", (4, 512), F32, residual=BF16),
    _affine("fp16 residual, bf16 rows", (4, 512), BF16, residual=F16),
    _affine("strided rows", (33, 256), BF16, layout="strided"),
    _affine("strided rows, residual", (33, 256), F32, residual=F32, layout="strided"),
    _affine("misaligned", (17, 512), BF16, layout="offset"),
    _affine("transposed heads", (3, 4, 5, 64), BF16, layout="transposed"),
    _affine("columns apart", (12, 40), F32, layout="columns"),
    _affine("many rows", (1500, 64), BF16),
    _affine("many rows fp32", (700, 640), F32),
    _affine("32768 wide", (2, 32768), BF16, residual=BF16),
    _affine("40968 wide", (3, 40968), BF16),
    _affine("65536 wide fp32", (2, 65536), F32),
    _affine("262144 wide, fp32 residual", (2, 262144), BF16, residual=F32),
    _affine("past 2^31 elements", (2_200_000, 1024), BF16, huge=True),
    _affine("past 2^31 elements, odd width", (2_150_000, 1001), BF16, huge=True),
)

# One row to a card full of them, at the widths people use and one that is no multiple of a power of two's vectors.
_BENCH_ROWS = (1, 64, 4096, 32768)
_BENCH_WIDTHS = (768, 1000, 1024, 4096, 8192, 32768)

BENCH_CASES = (
    *(_affine("plain", (rows, width), BF16) for width in _BENCH_WIDTHS for rows in _BENCH_ROWS),
    _affine("residual", (32768, 4096), BF16, residual=BF16),
    _affine("plain", (32768, 4096), F32),
)

DECODE_CASES = tuple(_affine("decode", (rows, 1, 4096), BF16) for rows in (1, 4, 8))

_X, _W = norms.ROWS, norms.PARAMETER

BAD_CALLS = (
    *norms.BAD_CALLS,
    BadCall("integer bias", {"x": _X, "bias": InputSpec((8,), "int32")}, {}, ("bias must be float32", "int32[8]")),
    BadCall("bias too short", {"x": _X, "weight": _W, "bias": InputSpec((7,), F32)}, {}, ("bias must", "float32[7]")),
    BadCall("bias not flat", {"x": _X, "bias": InputSpec((8, 1), F32)}, {}, ("one-dimensional", "float32[8, 1]")),
    BadCall("eps None", {"x": _X, "weight": _W}, {"eps": None}, ("eps must be a Python number", "NoneType")),
)

SPEC = OpSpec(
    name=NAME,
    inputs=inputs,
    outputs=outputs,
    oracle=oracle,
    oracle_backward=oracle_backward,
    cost=cost,
    cases=CASES,
    bench_cases=BENCH_CASES,
    decode_cases=DECODE_CASES,
    bad_calls=BAD_CALLS,
)
