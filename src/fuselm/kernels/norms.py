"""What the norms share: the refusals, the making of inputs, the cost, and the calls that each of them must refuse.

A norm takes rows x [..., width], parameters [width] (weight, bias) and a residual of x's shape, each fp32, fp16 or
bf16; it gives y and, with a residual, the sum that it normalised. Knows no framework and no single norm: mathematics
and cases are in rms_norm.py and layer_norm.py.

    check_tensors("rms_norm", x, {"weight": weight}, residual)
    check_eps("rms_norm", eps, "Pass eps=1e-6.")
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fuselm.kernels.spec import DTYPE_BYTES, BadCall, Case, Cost, InputSpec, TensorInfo, check_number, refuse

MAX_WIDTH = 262_144
MAX_RANK = 8
SMALLEST_EPS = 2.0**-150  # what rounds to 0 in fp32
LARGEST_FP32 = 2.0**128 - 2.0**104

F32, F16, BF16 = "float32", "float16", "bfloat16"

# ---- refusals ------------------------------------------------------------------------------------------------------


def check_tensors(
    op: str, x: TensorInfo, parameters: Mapping[str, TensorInfo | None], residual: TensorInfo | None
) -> None:
    """Raise RefusedInput for the first tensor that breaks a rule; `parameters` have one number per column."""
    others = {**parameters, "residual": residual}
    _check_dtypes(op, {"x": x, **others})
    _check_shapes(op, x, parameters, residual)
    _check_devices(op, x, others)


def check_eps(op: str, eps: float, remedy: str) -> None:
    """Refuse an eps that is 0 or infinite, or becomes so in fp32."""
    check_number(op, "eps", eps)
    if not SMALLEST_EPS < eps <= LARGEST_FP32:
        rule = f"{op}: eps must be a finite number above 0, also when it is rounded to fp32"
        raise refuse(rule, f"eps={eps}", remedy)


def _check_dtypes(op: str, tensors: Mapping[str, TensorInfo | None]) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dtype not in DTYPE_BYTES:
            raise refuse(
                f"{op}: {name} must be float32, float16 or bfloat16",
                f"{name} {tensor}",
                f"Convert {name} to one of them.",
            )


def _check_shapes(
    op: str, x: TensorInfo, parameters: Mapping[str, TensorInfo | None], residual: TensorInfo | None
) -> None:
    if not 1 <= len(x.shape) <= MAX_RANK or not 1 <= x.shape[-1] <= MAX_WIDTH:
        raise refuse(
            f"{op}: x must have 1 to {MAX_RANK} dimensions and a last one of 1 to {MAX_WIDTH}",
            f"x {x}",
            "Pass rows of such a width, as (rows, width).",
        )
    for name, tensor in parameters.items():
        if tensor is not None and tensor.shape != x.shape[-1:]:
            raise refuse(
                f"{op}: {name} must be one-dimensional and as long as x's last dimension",
                f"{name} {tensor} for x {x}",
                f"Pass a {name} of shape [{x.shape[-1]}].",
            )
    if residual is not None and residual.shape != x.shape:
        raise refuse(
            f"{op}: residual must have x's shape",
            f"residual {residual} for x {x}",
            "Expand or reshape the residual to x's shape.",
        )


def _check_devices(op: str, x: TensorInfo, others: Mapping[str, TensorInfo | None]) -> None:
    for name, tensor in others.items():
        if tensor is not None and tensor.device != x.device and tensor.device and x.device:
            raise refuse(
                f"{op}: all tensors must be on one device",
                f"x on {x.device} and {name} on {tensor.device}",
                f"Move {name} to {x.device}.",
            )


# ---- cases ---------------------------------------------------------------------------------------------------------


def case(name: str, shape: tuple[int, ...], dtype: str, tensors: Mapping[str, str], **more: Any) -> Case:
    """A case with those of `tensors` whose dtype is not ""; `more` is layout, huge, and the options of the op."""
    layout, huge = more.pop("layout", "contiguous"), more.pop("huge", False)
    return Case(name, shape, dtype, more, {k: v for k, v in tensors.items() if v}, layout, huge)


def inputs(case: Case) -> dict[str, InputSpec]:
    """x, and whichever of weight, bias and residual the case names."""
    made = {"x": InputSpec(case.shape, case.dtype)}
    if "weight" in case.tensors:
        made["weight"] = InputSpec(case.shape[-1:], case.tensors["weight"], mean=1.0, scale=0.5)
    if "bias" in case.tensors:
        made["bias"] = InputSpec(case.shape[-1:], case.tensors["bias"], scale=0.5)
    if "residual" in case.tensors:
        made["residual"] = InputSpec(case.shape, case.tensors["residual"])
    return made


def outputs(case: Case) -> tuple[str, ...]:
    """y, and the sum where a residual comes in."""
    return ("y", "residual_out") if "residual" in case.tensors else ("y",)


def moved_bytes(case: Case, which: str, statistics: int) -> int:
    """Every tensor once. Backward: dy, h, a residual's gradient in, dx out, twice if the residual's dtype differs.

    `statistics` is how many fp32 numbers per row backward reads.
    """
    n, width = case.size, case.shape[-1]
    own = n * DTYPE_BYTES[case.dtype]
    sizes = {name: DTYPE_BYTES[dtype] for name, dtype in case.tensors.items()}
    residual = n * sizes.pop("residual", 0)
    # A weight is read in both passes and its gradient written; of a bias backward writes the gradient alone.
    weight, bias = width * sizes.get("weight", 0), width * sizes.get("bias", 0)
    if which == "forward":
        return 2 * own + weight + bias + 2 * residual
    second_out = residual if residual and case.tensors["residual"] != case.dtype else 0
    saved = residual or own
    return 2 * own + saved + residual + second_out + 2 * weight + bias + n // max(width, 1) * 4 * statistics


def cost(case: Case, which: str, flops: int, statistics: int) -> Cost:
    """The bytes of `moved_bytes` and so many operations per element."""
    return Cost(moved_bytes(case, which, statistics), flops * case.size)


# ---- calls to refuse -----------------------------------------------------------------------------------------------

ROWS = InputSpec((4, 8), F32)
PARAMETER = InputSpec((8,), F32)

BAD_CALLS = (
    BadCall("integer x", {"x": InputSpec((4, 8), "int32")}, {}, ("x must be float32", "int32[4, 8]")),
    BadCall(
        "integer weight", {"x": ROWS, "weight": InputSpec((8,), "int32")}, {}, ("weight must be float32", "int32[8]")
    ),
    BadCall(
        "complex residual", {"x": ROWS, "residual": InputSpec((4, 8), "complex64")}, {}, ("residual must be float32",)
    ),
    BadCall("no dimensions", {"x": InputSpec((), F32)}, {}, ("1 to 8 dimensions", "float32[]")),
    BadCall("width 0", {"x": InputSpec((4, 0), F32)}, {}, ("a last one of 1 to 262144", "float32[4, 0]")),
    BadCall("too wide", {"x": InputSpec((1, MAX_WIDTH + 1), F32)}, {}, ("262144", "float32[1, 262145]")),
    BadCall("weight too long", {"x": ROWS, "weight": InputSpec((9,), F32)}, {}, ("as long as x's last", "float32[9]")),
    BadCall("weight not flat", {"x": ROWS, "weight": InputSpec((1, 8), F32)}, {}, ("one-dimensional", "float32[1, 8]")),
    BadCall(
        "residual of another shape", {"x": ROWS, "residual": InputSpec((8,), F32)}, {}, ("x's shape", "float32[8]")
    ),
    BadCall(
        "eps 0", {"x": ROWS, "weight": PARAMETER}, {"eps": 0.0}, ("eps must be a finite number above 0", "eps=0.0")
    ),
    BadCall("eps negative", {"x": ROWS}, {"eps": -1e-6}, ("eps must be", "eps=-1e-06")),
    BadCall("eps 0 in fp32", {"x": ROWS}, {"eps": 1e-50}, ("rounded to fp32", "eps=1e-50")),
    BadCall("eps NaN", {"x": ROWS}, {"eps": float("nan")}, ("eps must be", "eps=nan")),
    BadCall("eps infinite", {"x": ROWS}, {"eps": float("inf")}, ("eps must be", "eps=inf")),
    BadCall("eps above fp32", {"x": ROWS}, {"eps": 1e39}, ("rounded to fp32", "eps=1e+39")),
    BadCall("eps no number", {"x": ROWS}, {"eps": "small"}, ("eps must be a Python number", "str")),
    BadCall("eps a truth value", {"x": ROWS}, {"eps": True}, ("eps must be a Python number", "bool")),
)
