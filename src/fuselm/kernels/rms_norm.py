"""RMSNorm: its mathematics, its contract, its truth in float64, its cases and its cost.

    h    = x                                     or, with a residual, h = x + residual, rounded to the residual's dtype
    rstd = 1 / sqrt(mean(h^2 over the last dimension) + eps)
    xhat = h * rstd                              rounded to x's dtype first with cast_mode="llama"
    y    = xhat * (offset + weight)              in fp32, then rounded to x's dtype; offset = 1 is Gemma's
    with a residual the result is (y, h): y is exactly the norm of the h that is returned

Backward, with g = dy * (offset + weight) and dh what arrives for h (0 without a residual):

    dx        = rstd * (g - xhat * mean(g * xhat)) + dh      in x's dtype
    dresidual = the same sum                                 in the residual's dtype
    dweight   = sum over rows of dy * xhat                   in the weight's dtype, summed in fp32

Saved for backward: h (x itself, or the sum), rstd (one fp32 number per row) and weight. Rounding counts as identity.
x, weight and residual may each be fp32, fp16 or bf16. Knows numpy and no framework; norms.py has what norms share.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fuselm.kernels import norms
from fuselm.kernels.norms import BF16, F16, F32, LARGEST_FP32, inputs, outputs
from fuselm.kernels.spec import Arrays, BadCall, Case, Cost, OpSpec, TensorInfo, check_number, refuse

NAME = "rms_norm"
# What torch means by eps=None: the epsilon of the type that is computed in, for every input dtype.
DEFAULT_EPS = 2.0**-23
CAST_MODES = ("gemma", "llama")


def check(
    x: TensorInfo,
    weight: TensorInfo | None,
    residual: TensorInfo | None,
    eps: float | None,
    offset: float,
    cast_mode: str,
) -> None:
    """Raise RefusedInput for the first rule that is broken; every refusal of this op is worded here."""
    norms.check_tensors(NAME, x, {"weight": weight}, residual)
    if eps is not None:
        norms.check_eps(NAME, eps, "Pass eps=1e-6, or None for 2^-23.")
    check_number(NAME, "offset", offset)
    if not -LARGEST_FP32 <= offset <= LARGEST_FP32 or (weight is None and offset != 0):
        raise refuse(
            "rms_norm: offset must be a finite number, and 0 without a weight",
            f"offset={offset} {'with' if weight else 'without'} a weight",
            "Pass a weight, or leave offset out." if weight is None else "Pass an offset that fp32 can hold.",
        )
    if cast_mode not in CAST_MODES:
        raise refuse(
            "rms_norm: cast_mode must be 'gemma' (multiply, then round) or 'llama' (round, then multiply)",
            f"cast_mode={cast_mode!r}",
            "Leave it out for torch's own order, 'gemma'.",
        )


def oracle(xp: Any, inputs: Arrays, options: Mapping[str, Any]) -> Arrays:
    """Forward in float64. Rounding modes have no meaning here: this is what all of them aim at."""
    h, _, xhat, scale = _forward(xp, inputs, options)
    return {"y": xhat * scale, "residual_out": h} if "residual" in inputs else {"y": xhat * scale}


def oracle_backward(xp: Any, inputs: Arrays, cotangents: Arrays, options: Mapping[str, Any]) -> Arrays:
    """The formulas of the module's docstring, in float64."""
    _, rstd, xhat, scale = _forward(xp, inputs, options)
    dy = cotangents["y"]
    g = dy * scale
    dh = rstd * (g - xhat * (g * xhat).mean(-1)[..., None])
    if "residual" in inputs:
        dh = dh + cotangents["residual_out"]
    gradients = {"x": dh}
    if "residual" in inputs:
        gradients["residual"] = dh
    if "weight" in inputs:
        gradients["weight"] = (dy * xhat).reshape(-1, dy.shape[-1]).sum(0)
    return gradients


def _forward(xp: Any, inputs: Arrays, options: Mapping[str, Any]) -> tuple[Any, Any, Any, Any]:
    h = inputs["x"] + inputs["residual"] if "residual" in inputs else inputs["x"]
    eps = options.get("eps")
    rstd = 1 / xp.sqrt((h * h).mean(-1) + (DEFAULT_EPS if eps is None else eps))[..., None]
    scale = options.get("offset", 0.0) + inputs["weight"] if "weight" in inputs else 1.0
    return h, rstd, h * rstd, scale


def cost(case: Case, which: str) -> Cost:
    """Every tensor once; backward reads rstd."""
    return norms.cost(case, which, flops=4 if which == "forward" else 9, statistics=1)


def _case(name: str, shape: tuple[int, ...], dtype: str, weight: str = "", residual: str = "", **more: Any) -> Case:
    return norms.case(name, shape, dtype, {"weight": weight, "residual": residual}, **more)


CASES = (
    _case("one row", (1, 64), F32, F32),
    _case("one number", (1,), F32, F32),
    _case("width one", (5, 1), BF16, BF16),
    _case("no weight", (7, 128), F16),
    _case("odd width", (13, 1001), BF16, BF16),
    _case("odd width fp32", (3, 77), F32, F32),
    _case("odd width, many rows", (523, 257), BF16, F32),
    _case("odd width, wide", (5, 8191), F16, F16),
    _case("not a power of two", (9, 768), BF16, BF16),
    _case("width 3000", (4, 3000), F16, F16),
    _case("no rows", (0, 256), BF16, BF16),
    _case("no rows, residual", (2, 0, 256), F32, F32, F32),
    _case("three dimensions", (2, 3, 512), F32, F32, eps=1e-5),
    _case("fp32 weight", (6, 1024), BF16, F32),
    _case("bf16 weight, fp32 rows", (6, 1024), F32, BF16),
    _case("fp16 weight, bf16 rows", (6, 200), BF16, F16),
    _case("gemma", (8, 2048), BF16, BF16, eps=1e-6, offset=1.0, cast_mode="gemma"),
    _case("llama", (8, 2048), BF16, BF16, eps=1e-6, cast_mode="llama"),
    _case("llama fp16, fp32 weight", (8, 640), F16, F32, eps=1e-6, cast_mode="llama"),
    _case("llama odd width", (8, 333), BF16, BF16, eps=1e-6, cast_mode="llama"),
    _case("residual", (8, 4096), BF16, BF16, BF16),
    _case("residual, no weight", (5, 96), F16, "", F16),
    _case("fp32 residual", (8, 1024), BF16, BF16, F32),
    _case("fp32 residual, odd width", (5, 1023), BF16, F32, F32),
    _case("bf16 residual, fp32 rows", (4, 512), F32, F32, BF16),
    _case("fp16 residual, bf16 rows", (4, 512), BF16, BF16, F16, cast_mode="llama"),
    _case("strided rows", (33, 256), BF16, BF16, layout="strided"),
    _case("strided rows, residual", (33, 256), F32, F32, F32, layout="strided"),
    _case("misaligned", (17, 512), BF16, BF16, layout="offset"),
    _case("transposed heads", (3, 4, 5, 64), BF16, BF16, layout="transposed"),
    _case("columns apart", (12, 40), F32, F32, layout="columns"),
    _case("many rows", (1500, 64), BF16, BF16),
    _case("many rows fp32", (700, 640), F32, F32),
    _case("8192 wide", (3, 8192), BF16, BF16),
    _case("16384 wide", (3, 16384), BF16, BF16),
    _case("32768 wide", (2, 32768), BF16, BF16, BF16),
    _case("40968 wide", (3, 40968), BF16, BF16),
    _case("65536 wide fp32", (2, 65536), F32, F32),
    _case("262144 wide", (2, 262144), BF16, BF16),
    _case("262144 wide, fp32 residual", (2, 262144), BF16, BF16, F32),
    _case("past 2^31 elements", (2_200_000, 1024), BF16, BF16, huge=True),
    _case("past 2^31 elements, odd width", (2_150_000, 1001), BF16, BF16, huge=True),
)

# rows x width of the record; the widths people use, and rows that fill the card.
_BENCH_SHAPES = (
    (32768, 768),
    (32768, 1024),
    (32768, 2048),
    (32768, 4096),
    (16384, 8192),
    (8192, 16384),
    (4096, 32768),
    (8192, 1024),
    (8192, 4096),
)

BENCH_CASES = (
    *(_case("plain", shape, BF16, BF16) for shape in _BENCH_SHAPES),
    *(_case("plain", shape, F32, F32) for shape in ((32768, 1024), (32768, 4096), (16384, 8192), (8192, 16384))),
    *(_case("residual", shape, BF16, BF16, BF16) for shape in ((32768, 1024), (32768, 4096), (16384, 8192))),
    _case("fp32 residual", (32768, 4096), BF16, BF16, F32),
    _case("odd", (32768, 1001), BF16, BF16),
    _case("odd", (8192, 5001), BF16, BF16),
    _case("wide", (1024, 131072), BF16, BF16),
)

DECODE_CASES = tuple(_case("decode", (rows, 1, 4096), BF16, BF16) for rows in (1, 4, 8))

_X, _W = norms.ROWS, norms.PARAMETER

BAD_CALLS = (
    *norms.BAD_CALLS,
    BadCall("offset without weight", {"x": _X}, {"offset": 1.0}, ("0 without a weight", "offset=1.0")),
    BadCall("offset None", {"x": _X, "weight": _W}, {"offset": None}, ("offset must be a Python number", "NoneType")),
    BadCall("offset NaN", {"x": _X, "weight": _W}, {"offset": float("nan")}, ("offset must be", "offset=nan")),
    BadCall("offset above fp32", {"x": _X, "weight": _W}, {"offset": 1e39}, ("1e+39 with a weight", "fp32 can hold")),
    BadCall("unknown cast mode", {"x": _X}, {"cast_mode": "none"}, ("cast_mode must be", "'none'")),
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
