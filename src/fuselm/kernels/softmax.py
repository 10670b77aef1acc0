"""Softmax: its mathematics, its contract, its truth in float64, its cases and its cost.

    s = scale * x + mask                                     in fp32
    s = -inf where key j may not be seen by query t          causal: x is [..., T, S], and j <= t + S - T may be
    y = exp(s - max(s)) / sum(exp(s - max(s)))               over the last dimension, in fp32, rounded once to x's dtype

A row in which nothing may be seen (a mask or causal is given, and every s is -inf) is all zeros, and so is its
gradient. Without a mask and causal such a row is NaN, as in torch.

Backward:

    ds    = y * (dy - sum(dy * y))
    dx    = scale * ds                                       in x's dtype
    dmask = ds, summed down to the mask's shape              in the mask's dtype, summed in fp32

Saved for backward: y alone, as it was rounded; y = 0 wherever nothing may be seen, so masks need not be known again.
x and mask may each be fp32, fp16 or bf16. The mask has any shape that broadcasts to x's. Knows numpy and no framework.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fuselm.kernels.spec import (
    DTYPE_BYTES,
    Arrays,
    BadCall,
    Case,
    Cost,
    InputSpec,
    OpSpec,
    TensorInfo,
    check_number,
    refuse,
)

NAME = "softmax"
MAX_WIDTH = 262_144
MAX_RANK = 8
LARGEST_FP32 = 2.0**128 - 2.0**104


def check(x: TensorInfo, mask: TensorInfo | None, scale: float, causal: bool) -> None:
    """Raise RefusedInput for the first rule that is broken; every refusal of this op is worded here."""
    for name, tensor in (("x", x), ("mask", mask)):
        if tensor is not None and tensor.dtype not in DTYPE_BYTES:
            remedy = f"Convert {name} to one of them."
            if name == "mask" and tensor.dtype.startswith(("bool", "int", "uint")):  # what is seen, in other libraries
                remedy = "Pass numbers to add: where(seen, 0.0, -inf)."
            raise refuse(f"softmax: {name} must be float32, float16 or bfloat16", f"{name} {tensor}", remedy)
    if not 1 <= len(x.shape) <= MAX_RANK or not 1 <= x.shape[-1] <= MAX_WIDTH:
        rule = f"softmax: x must have 1 to {MAX_RANK} dimensions and a last one of 1 to {MAX_WIDTH}"
        raise refuse(rule, f"x {x}", "Pass rows of such a width, as (rows, width).")
    if mask is not None:
        _check_mask(x, mask)
    check_number("softmax", "scale", scale)
    if not -LARGEST_FP32 <= scale <= LARGEST_FP32:
        rule = "softmax: scale must be a finite number that fp32 can hold"
        raise refuse(rule, f"scale={scale}", "Pass scale=1.0 to leave x as it is.")
    if not isinstance(causal, bool):
        got = f"causal of type {type(causal).__name__}"
        raise refuse("softmax: causal must be True or False", got, "Pass a bool for causal.")
    if causal and len(x.shape) < 2:
        rule = "softmax: causal wants x as [..., queries, keys], so two dimensions or more"
        raise refuse(rule, f"x {x}", "Give x a dimension of queries, or leave causal out.")


def _check_mask(x: TensorInfo, mask: TensorInfo) -> None:
    pairs = zip(reversed(mask.shape), reversed(x.shape), strict=False)
    if len(mask.shape) > len(x.shape) or any(own not in (1, size) for own, size in pairs):
        raise refuse(
            "softmax: mask must broadcast to x's shape and not enlarge it",
            f"mask {mask} for x {x}",
            "Make every dimension of the mask, counted from the last, 1 or as long as x's.",
        )
    if mask.device != x.device and mask.device and x.device:
        rule = "softmax: all tensors must be on one device"
        raise refuse(rule, f"x on {x.device} and mask on {mask.device}", f"Move mask to {x.device}.")


def oracle(xp: Any, inputs: Arrays, options: Mapping[str, Any]) -> Arrays:
    """Forward in float64."""
    x, causal = inputs["x"], options.get("causal", False)
    scores = x * options.get("scale", 1.0)
    if "mask" in inputs:
        scores = scores + inputs["mask"]
    if causal:
        # Counted from 1 by sums over ones, which both libraries make in x's dtype and, torch, on x's device.
        queries = xp.cumsum(xp.ones_like(x[..., :1]), -2)  # [..., T, 1]
        keys = xp.cumsum(xp.ones_like(x[..., :1, :]), -1)  # [..., 1, S]
        scores = xp.where(keys > queries + (x.shape[-1] - x.shape[-2]), -math.inf, scores)
    top = xp.amax(scores, -1)[..., None]
    if "mask" in inputs or causal:  # a row of nothing but -inf
        top = xp.where(top == -math.inf, 0.0, top)
    shares = xp.exp(scores - top)
    total = shares.sum(-1)[..., None]
    return {"y": shares / xp.where(total == 0.0, 1.0, total)}


def oracle_backward(xp: Any, inputs: Arrays, cotangents: Arrays, options: Mapping[str, Any]) -> Arrays:
    """The formulas of the module's docstring, in float64; of a mask only where it has x's shape, as in `inputs`."""
    y, dy = oracle(xp, inputs, options)["y"], cotangents["y"]
    dscores = y * (dy - (dy * y).sum(-1)[..., None])
    gradients = {"x": options.get("scale", 1.0) * dscores}
    if "mask" in inputs and inputs["mask"].shape == inputs["x"].shape:
        gradients["mask"] = dscores
    return gradients


@dataclass(frozen=True)
class SoftmaxCase(Case):
    """A case that says which of x's dimensions its mask has: "11TS" has the last two of four, "S" is a vector."""

    mask: str = field(default="", kw_only=True)


def mask_shape(case: Case) -> tuple[int, ...]:
    """The shape of a case's mask; () where it has none."""
    dimensions = case.mask if isinstance(case, SoftmaxCase) else ""
    pairs = zip(reversed(dimensions), reversed(case.shape), strict=False)
    return tuple(1 if letter == "1" else size for letter, size in pairs)[::-1]


def inputs(case: Case) -> dict[str, InputSpec]:
    """x, and a mask where the case names one.

    A mask smaller than x counts as constant here: its gradient is a sum over rows, which each framework takes in an
    order of its own, so no bits can be promised. tests/kernels/test_softmax.py measures it.
    """
    made = {"x": InputSpec(case.shape, case.dtype)}
    if "mask" in case.tensors:
        shape = mask_shape(case)
        made["mask"] = InputSpec(shape, case.tensors["mask"], differentiable=shape == case.shape)
    return made


def cost(case: Case, which: str) -> Cost:
    """Forward: x in, y out, the mask once, as it is stored. Backward: dy and y in, dx out. Causal saves nothing."""
    n, own = case.size, case.size * DTYPE_BYTES[case.dtype]
    if which == "backward":
        return Cost(3 * own, 4 * n)
    mask = math.prod(mask_shape(case)) * DTYPE_BYTES[case.tensors["mask"]] if "mask" in case.tensors else 0
    return Cost(2 * own + mask, 5 * n)


F32, F16, BF16 = "float32", "float16", "bfloat16"


def _case(name: str, shape: tuple[int, ...], dtype: str, mask: str = "", mask_dtype: str = "", **more: Any) -> Case:
    """`mask` as in SoftmaxCase, in x's dtype unless told; `more` is layout, huge, and the options of the op."""
    layout, huge = more.pop("layout", "contiguous"), more.pop("huge", False)
    tensors = {"mask": mask_dtype or dtype} if mask else {}
    row_wise = not mask and not more.get("causal", False)
    return SoftmaxCase(name, shape, dtype, more, tensors, layout, huge, row_wise, mask=mask)


CASES = (
    _case("one number", (1,), F32),
    _case("one row", (1, 64), F32),
    _case("width one", (5, 1), BF16),
    _case("odd width fp32", (37, 77), F32),
    _case("odd width", (13, 1001), BF16),
    _case("odd width, wide", (4, 5001), F16),
    _case("odd width, wider", (5, 8191), F16),
    _case("not a power of two", (9, 768), BF16),
    _case("width 1000", (6, 1000), F16),
    _case("width 3000", (4, 3000), BF16),
    _case("no rows", (0, 256), BF16),
    _case("no rows, three dimensions", (2, 0, 256), F32),
    _case("three dimensions", (4, 8, 512), F32),
    _case("scaled", (2, 3, 5, 200), BF16, scale=0.125),
    _case("scaled below 0", (50, 333), F32, scale=-1.5),
    _case("scaled by 0", (4, 40), F16, scale=0),
    _case("strided rows", (33, 256), BF16, layout="strided"),
    _case("misaligned", (17, 512), BF16, layout="offset"),
    _case("transposed heads", (3, 4, 5, 64), BF16, layout="transposed"),
    _case("columns apart", (96, 40), F32, layout="columns"),
    _case("many rows", (1500, 64), BF16),
    _case("many rows fp32", (700, 640), F32),
    _case("4096 wide", (5, 4096), F32),
    _case("8192 wide", (3, 8192), BF16),
    _case("16384 wide", (3, 16384), F32),
    _case("32768 wide", (2, 32768), BF16),
    _case("40968 wide", (3, 40968), F16),
    _case("131072 wide", (2, 131072), F32),
    _case("262144 wide", (2, 262144), BF16),
    _case("causal", (2, 2, 33, 33), F32, causal=True, scale=0.125),
    _case("causal bf16", (2, 2, 40, 40), BF16, causal=True),
    _case("causal, one query", (3, 1, 50), F16, causal=True),
    _case("causal, fewer queries than keys", (2, 9, 77), BF16, causal=True, scale=0.125),
    _case("causal, more queries than keys", (3, 21, 8), F32, causal=True),
    _case("causal, no batch", (5, 5), F32, causal=True),
    _case("causal, wide", (2, 6, 4104), BF16, causal=True),
    _case("causal, very wide", (1, 3, 40968), F32, causal=True),
    _case("causal, strided rows", (2, 33, 48), BF16, causal=True, layout="strided"),
    _case("causal, transposed heads", (2, 3, 16, 16), BF16, causal=True, layout="transposed"),
    _case("mask of x's shape", (4, 24, 40), F32, "BTS"),
    _case("mask of x's shape, scaled", (2, 2, 9, 65), BF16, "BNTS", scale=0.125),
    _case("mask of x's shape, strided", (6, 136), F16, "TS", layout="strided"),
    _case("mask of x's shape, columns apart", (64, 30), F32, "TS", layout="columns"),
    _case("mask of one row", (4, 5, 256), BF16, "S"),
    _case("mask for all heads", (2, 3, 8, 72), F16, "11TS"),
    _case("mask of keys", (3, 2, 7, 64), BF16, "B11S", scale=0.125),
    _case("mask with one number a row", (2, 3, 5, 48), F32, "BNT1"),
    _case("mask of one number", (40, 24), F32, "1"),
    _case("fp32 mask", (2, 3, 9, 100), BF16, "B11S", F32),
    _case("bf16 mask, fp32 rows", (3, 16, 128), F32, "1TS", BF16),
    _case("fp16 mask, bf16 rows", (2, 6, 1001), BF16, "S", F16),
    _case("mask, wide", (2, 2, 8200), BF16, "1S"),
    _case("mask, no rows", (0, 4, 16), F32, "TS"),
    _case("mask, causal and scaled", (2, 2, 33, 40), F32, "11TS", causal=True, scale=0.3),
    _case("fp32 mask, causal and scaled", (2, 2, 12, 8), BF16, "B1TS", F32, causal=True, scale=0.125),
    _case("past 2^31 elements", (2_200_000, 1024), BF16, huge=True),
    _case("past 2^31 elements, odd width", (2_150_000, 1001), BF16, huge=True),
)

_ATTENTION = (4, 16, 1024, 1024)
BENCH_CASES = (
    *(
        _case("plain", (rows, width), BF16)
        for width in (768, 1000, 1024, 4096, 8192, 32768)
        for rows in (1, 64, 4096, 32768)
    ),
    _case("plain", (8192, 131072), BF16),
    _case("plain", (32768, 4096), F32),
    _case("causal", _ATTENTION, BF16, causal=True, scale=0.125),
    _case("mask", _ATTENTION, BF16, "B11S"),
)

DECODE_CASES = tuple(_case("decode", (rows, 1, 4096), BF16) for rows in (1, 4, 8))

_X = InputSpec((4, 8), F32)


def _bad_mask(name: str, shape: tuple[int, ...], says: tuple[str, ...], dtype: str = F32) -> BadCall:
    return BadCall(name, {"x": _X, "mask": InputSpec(shape, dtype)}, {}, says)


BAD_CALLS = (
    BadCall("integer x", {"x": InputSpec((4, 8), "int32")}, {}, ("x must be float32", "int32[4, 8]")),
    BadCall("no dimensions", {"x": InputSpec((), F32)}, {}, ("1 to 8 dimensions", "float32[]")),
    BadCall("nine dimensions", {"x": InputSpec((1,) * 8 + (3,), F32)}, {}, ("1 to 8 dimensions", "1, 3]")),
    BadCall("width 0", {"x": InputSpec((4, 0), F32)}, {}, ("a last one of 1 to 262144", "float32[4, 0]")),
    BadCall("too wide", {"x": InputSpec((1, MAX_WIDTH + 1), F32)}, {}, ("262144", "float32[1, 262145]")),
    _bad_mask("integer mask", (4, 8), ("mask must be float32", "int32[4, 8]", "where(seen, 0.0, -inf)"), "int32"),
    _bad_mask("complex mask", (8,), ("mask must be float32", "complex64[8]"), "complex64"),
    _bad_mask("mask too long", (9,), ("must broadcast to x's shape", "float32[9] for x float32[4, 8]")),
    _bad_mask("mask with other rows", (3, 8), ("must broadcast", "float32[3, 8]")),
    _bad_mask("mask that enlarges x", (2, 4, 8), ("not enlarge it", "float32[2, 4, 8]")),
    _bad_mask("mask with more dimensions", (1, 4, 8), ("not enlarge it", "float32[1, 4, 8]")),
    _bad_mask("empty mask", (0, 8), ("must broadcast", "float32[0, 8]")),
    BadCall("scale NaN", {"x": _X}, {"scale": float("nan")}, ("scale must be a finite number", "scale=nan")),
    BadCall("scale infinite", {"x": _X}, {"scale": float("-inf")}, ("scale must be a finite number", "scale=-inf")),
    BadCall("scale above fp32", {"x": _X}, {"scale": 1e39}, ("fp32 can hold", "scale=1e+39")),
    BadCall("scale no number", {"x": _X}, {"scale": "large"}, ("scale must be a Python number", "str")),
    BadCall("scale a truth value", {"x": _X}, {"scale": True}, ("scale must be a Python number", "bool")),
    BadCall("scale None", {"x": _X}, {"scale": None}, ("scale must be a Python number", "NoneType")),
    BadCall("causal no bool", {"x": _X}, {"causal": "yes"}, ("causal must be True or False", "str")),
    BadCall("causal a number", {"x": _X}, {"causal": 1}, ("causal must be True or False", "int")),
    BadCall("causal row", {"x": InputSpec((8,), F32)}, {"causal": True}, ("two dimensions or more", "float32[8]")),
)

SPEC = OpSpec(
    name=NAME,
    inputs=inputs,
    outputs=lambda case: ("y",),
    oracle=oracle,
    oracle_backward=oracle_backward,
    cost=cost,
    cases=CASES,
    bench_cases=BENCH_CASES,
    decode_cases=DECODE_CASES,
    bad_calls=BAD_CALLS,
)
