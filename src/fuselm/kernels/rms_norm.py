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
x, weight and residual may each be fp32, fp16 or bf16. Knows numpy and no framework.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fuselm.kernels.spec import DTYPE_BYTES, Arrays, BadCall, Case, Cost, InputSpec, OpSpec, TensorInfo, refuse

NAME = "rms_norm"
MAX_WIDTH = 262_144
MAX_RANK = 8
# What torch means by eps=None: the epsilon of the type that is computed in, for every input dtype.
DEFAULT_EPS = 2.0**-23
SMALLEST_EPS = 2.0**-150  # what rounds to 0 in fp32
LARGEST_FP32 = 2.0**128 - 2.0**104
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
    _check_dtypes({"x": x, "weight": weight, "residual": residual})
    _check_shapes(x, weight, residual)
    _check_devices(x, {"weight": weight, "residual": residual})
    for name, number in (("eps", eps), ("offset", offset)):
        if not isinstance(number, int | float) and not (name == "eps" and number is None):
            got = f"{name} of type {type(number).__name__}"
            raise refuse(f"rms_norm: {name} must be a Python number", got, f"Pass a float for {name}.")
    if eps is not None and not SMALLEST_EPS < eps <= LARGEST_FP32:
        rule = "rms_norm: eps must be a finite number above 0, also when it is rounded to fp32"
        raise refuse(rule, f"eps={eps}", "Pass eps=1e-6, or None for 2^-23.")
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


def _check_dtypes(tensors: Mapping[str, TensorInfo | None]) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dtype not in DTYPE_BYTES:
            raise refuse(
                f"rms_norm: {name} must be float32, float16 or bfloat16",
                f"{name} {tensor}",
                f"Convert {name} to one of them.",
            )


def _check_shapes(x: TensorInfo, weight: TensorInfo | None, residual: TensorInfo | None) -> None:
    if not 1 <= len(x.shape) <= MAX_RANK or not 1 <= x.shape[-1] <= MAX_WIDTH:
        raise refuse(
            f"rms_norm: x must have 1 to {MAX_RANK} dimensions and a last one of 1 to {MAX_WIDTH}",
            f"x {x}",
            "Reshape x to (rows, width).",
        )
    if weight is not None and weight.shape != x.shape[-1:]:
        raise refuse(
            "rms_norm: weight must be one-dimensional and as long as x's last dimension",
            f"weight {weight} for x {x}",
            f"Pass a weight of shape [{x.shape[-1]}].",
        )
    if residual is not None and residual.shape != x.shape:
        raise refuse(
            "rms_norm: residual must have x's shape",
            f"residual {residual} for x {x}",
            "Expand or reshape the residual to x's shape.",
        )


def _check_devices(x: TensorInfo, others: Mapping[str, TensorInfo | None]) -> None:
    for name, tensor in others.items():
        if tensor is not None and tensor.device != x.device and tensor.device and x.device:
            raise refuse(
                "rms_norm: all tensors must be on one device",
                f"x on {x.device} and {name} on {tensor.device}",
                f"Move {name} to {x.device}.",
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


def inputs(case: Case) -> dict[str, InputSpec]:
    """x, and whichever of weight and residual the case names."""
    made = {"x": InputSpec(case.shape, case.dtype)}
    if "weight" in case.tensors:
        made["weight"] = InputSpec(case.shape[-1:], case.tensors["weight"], mean=1.0, scale=0.5)
    if "residual" in case.tensors:
        made["residual"] = InputSpec(case.shape, case.tensors["residual"])
    return made


def outputs(case: Case) -> tuple[str, ...]:
    """y, and the sum where a residual comes in."""
    return ("y", "residual_out") if "residual" in case.tensors else ("y",)


def cost(case: Case, which: str) -> Cost:
    """Every tensor once. Backward: dy, h, a residual's gradient in, dx out, twice if the residual's dtype differs."""
    n, width = case.size, case.shape[-1]
    own = n * DTYPE_BYTES[case.dtype]
    weight = width * DTYPE_BYTES[case.tensors["weight"]] if "weight" in case.tensors else 0
    residual = n * DTYPE_BYTES[case.tensors["residual"]] if "residual" in case.tensors else 0
    if which == "forward":
        return Cost(2 * own + weight + 2 * residual, 4 * n)
    rstd = n // max(width, 1) * 4
    second_out = residual if residual and case.tensors["residual"] != case.dtype else 0
    saved = residual or own
    return Cost(2 * own + saved + residual + second_out + 2 * weight + rstd, 9 * n)


def _case(name: str, shape: tuple[int, ...], dtype: str, weight: str = "", residual: str = "", **more: Any) -> Case:
    tensors = {k: v for k, v in (("weight", weight), ("residual", residual)) if v}
    layout, huge = more.pop("layout", "contiguous"), more.pop("huge", False)
    return Case(name, shape, dtype, more, tensors, layout, huge)


F32, F16, BF16 = "float32", "float16", "bfloat16"

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

_X = InputSpec((4, 8), F32)
_W = InputSpec((8,), F32)

BAD_CALLS = (
    BadCall("integer x", {"x": InputSpec((4, 8), "int32")}, {}, ("x must be float32", "int32[4, 8]")),
    BadCall(
        "integer weight", {"x": _X, "weight": InputSpec((8,), "int32")}, {}, ("weight must be float32", "int32[8]")
    ),
    BadCall(
        "complex residual", {"x": _X, "residual": InputSpec((4, 8), "complex64")}, {}, ("residual must be float32",)
    ),
    BadCall("no dimensions", {"x": InputSpec((), F32)}, {}, ("1 to 8 dimensions", "float32[]")),
    BadCall("width 0", {"x": InputSpec((4, 0), F32)}, {}, ("a last one of 1 to 262144", "float32[4, 0]")),
    BadCall("too wide", {"x": InputSpec((1, MAX_WIDTH + 1), F32)}, {}, ("262144", "float32[1, 262145]")),
    BadCall("weight too long", {"x": _X, "weight": InputSpec((9,), F32)}, {}, ("as long as x's last", "float32[9]")),
    BadCall("weight not flat", {"x": _X, "weight": InputSpec((1, 8), F32)}, {}, ("one-dimensional", "float32[1, 8]")),
    BadCall("residual of another shape", {"x": _X, "residual": InputSpec((8,), F32)}, {}, ("x's shape", "float32[8]")),
    BadCall("eps 0", {"x": _X, "weight": _W}, {"eps": 0.0}, ("eps must be a finite number above 0", "eps=0.0")),
    BadCall("eps negative", {"x": _X}, {"eps": -1e-6}, ("eps must be", "eps=-1e-06")),
    BadCall("eps 0 in fp32", {"x": _X}, {"eps": 1e-50}, ("rounded to fp32", "eps=1e-50")),
    BadCall("eps NaN", {"x": _X}, {"eps": float("nan")}, ("eps must be", "eps=nan")),
    BadCall("eps infinite", {"x": _X}, {"eps": float("inf")}, ("eps must be", "eps=inf")),
    BadCall("offset without weight", {"x": _X}, {"offset": 1.0}, ("0 without a weight", "offset=1.0")),
    BadCall("eps above fp32", {"x": _X}, {"eps": 1e39}, ("rounded to fp32", "eps=1e+39")),
    BadCall("eps no number", {"x": _X}, {"eps": "small"}, ("eps must be a Python number", "str")),
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
