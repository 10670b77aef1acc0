"""What add and mul share: which tensors they take together, what is summed in their gradients, cases, refusals, bytes.

    x and y            each fp32, fp16 or bf16, of at most 8 dimensions, of shapes that broadcast as torch's do
    the result         of the shape they broadcast to, in the dtype both have, or fp32 where they differ: by dtypes
                       alone, where torch makes bf16 of a bf16 tensor and an fp32 one without dimensions
    the arithmetic     fp32, rounded once

A tensor that was repeated has a gradient that is summed, in fp32. Where it is one row for all (its last dimension is
the result's, all before it are 1 or missing) a kernel adds up the columns, in an order that depends on the shape and
the device alone. Along other dimensions the framework's own sum adds up what the kernels leave. Knows numpy and no
framework, and neither op.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fuselm.kernels.spec import DTYPE_BYTES, BadCall, Case, InputSpec, TensorInfo, refuse

MAX_RANK = 8
F32, F16, BF16 = "float32", "float16", "bfloat16"
Shape = tuple[int, ...]

# ---- the contract ---------------------------------------------------------------------------------------------------


def refuse_numbers(op: str, sign: str, given: Mapping[str, Any]) -> None:
    """Refuse a Python number, which torch's own operators take: with the operator's sign, as in x + 2.0."""
    for name, value in given.items():
        if isinstance(value, int | float | complex):
            remedy = f"For a number write x {sign} 2.0."
            raise refuse(f"{op}: {name} must be a tensor", f"a {type(value).__name__}", remedy)


def check(op: str, x: TensorInfo, y: TensorInfo) -> None:
    """Raise RefusedInput for the first rule of two tensors that is broken."""
    for name, tensor in (("x", x), ("y", y)):
        if tensor.dtype not in DTYPE_BYTES:
            rule = f"{op}: {name} must be float32, float16 or bfloat16"
            raise refuse(rule, f"{name} {tensor}", f"Convert {name} to one of them.")
        if len(tensor.shape) > MAX_RANK:
            rule = f"{op}: {name} must have at most {MAX_RANK} dimensions"
            raise refuse(rule, f"{name} {tensor}", "Reshape x and y to fewer.")
    if any(a != b and 1 not in (a, b) for a, b in zip(reversed(x.shape), reversed(y.shape), strict=False)):
        raise refuse(
            f"{op}: x and y must have shapes that broadcast",
            f"x {x} and y {y}",
            "Make their dimensions, counted from the last, equal, or 1 in one of them.",
        )
    if x.device != y.device and x.device and y.device:
        rule = f"{op}: all tensors must be on one device"
        raise refuse(rule, f"x on {x.device} and y on {y.device}", f"Move y to {x.device}.")


def is_row(shape: Shape, full: Shape) -> bool:
    """Whether a tensor that was repeated to `full` is one row for all of its rows."""
    return 0 < len(shape) <= len(full) and shape[-1] == full[-1] and all(size == 1 for size in shape[:-1])


def repeated(shape: Shape, full: Shape) -> tuple[int, ...]:
    """The dimensions of `full` along which a tensor of that shape was repeated."""
    added = len(full) - len(shape)
    return tuple(i for i, size in enumerate(full) if i < added or shape[i - added] != size)


def has_kernels(shape: Shape, other: Shape, full: Shape) -> bool:
    """Whether kernels do all of a gradient: that of a tensor that was not repeated, or is one row beside such a one."""
    return shape == full or (other == full and is_row(shape, full))


# ---- truth ----------------------------------------------------------------------------------------------------------


def summed(gradient: Any, shape: Shape) -> Any:
    """A gradient summed down to one row, or as it is; numpy or torch."""
    if tuple(gradient.shape) == shape:
        return gradient
    rows = math.prod(gradient.shape[:-1])
    return gradient.reshape(rows, gradient.shape[-1]).sum(0).reshape(shape)


# ---- cases ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PairCase(Case):
    """A case that says which dimensions of its shape x and y have: "1D" the last of two, "" none, None all of them."""

    x: str | None = field(default=None, kw_only=True)
    y: str | None = field(default=None, kw_only=True)


def shapes(case: Case) -> tuple[Shape, Shape]:
    """The shapes of a case's x and y."""
    assert isinstance(case, PairCase)
    return _with_dimensions(case.x, case.shape), _with_dimensions(case.y, case.shape)


def _with_dimensions(letters: str | None, shape: Shape) -> Shape:
    if letters is None:
        return shape
    pairs = zip(reversed(letters), reversed(shape), strict=False)
    return tuple(1 if letter == "1" else size for letter, size in pairs)[::-1]


def inputs(case: Case) -> dict[str, InputSpec]:
    """x and y.

    One whose gradient the framework adds up counts as constant here: each does so in an order of its own, so no bits
    can be promised. tests/kernels/test_add_mul.py measures those.
    """
    x, y = shapes(case)
    return {
        "x": InputSpec(x, case.dtype, differentiable=has_kernels(x, y, case.shape)),
        "y": InputSpec(y, case.tensors["y"], differentiable=has_kernels(y, x, case.shape)),
    }


def bytes_of(case: Case) -> tuple[int, int, int]:
    """Bytes of x, y and the result."""
    x, y = shapes(case)
    dtype = case.dtype if case.dtype == case.tensors["y"] else F32
    sized = ((x, case.dtype), (y, case.tensors["y"]), (case.shape, dtype))
    made = tuple(math.prod(shape) * DTYPE_BYTES[one] for shape, one in sized)
    return made[0], made[1], made[2]


def pair_case(name: str, shape: Shape, dtype: str, y_dtype: str = "", **more: Any) -> Case:
    """`more` is x and y as in PairCase, layout, huge, and the options of the op; y has x's dtype unless told."""
    layout, huge = more.pop("layout", "contiguous"), more.pop("huge", False)
    x, y = more.pop("x", None), more.pop("y", None)
    return PairCase(name, shape, dtype, more, {"y": y_dtype or dtype}, layout, huge, x=x, y=y)


def cases_of_one_shape(**options: Any) -> tuple[Case, ...]:
    """x and y have one shape; by these options of the op."""

    def case(name: str, shape: Shape, dtype: str, y_dtype: str = "", **more: Any) -> Case:
        return pair_case(name, shape, dtype, y_dtype, **more, **options)

    return (
        case("odd width", (13, 1001), BF16),
        case("odd width fp32", (37, 77), F32),
        case("one number", (1,), F32),
        case("one row", (1, 64), BF16),
        case("no rows", (0, 256), BF16),
        case("three dimensions", (4, 8, 512), F32),
        case("strided rows", (33, 256), F16, layout="strided"),
        case("misaligned", (17, 512), BF16, layout="offset"),
        case("transposed heads", (3, 4, 5, 64), BF16, layout="transposed"),
        case("columns apart", (96, 40), F32, layout="columns"),
        case("fp32 y", (6, 200), BF16, F32),
        case("fp16 x, bf16 y", (4, 513), F16, BF16),
        case("past 2^31 elements", (2_200_000, 1024), BF16, huge=True),
    )


REPEATED_CASES = (
    pair_case("one row for few", (9, 264), BF16, y="D"),
    pair_case("one row for many", (700, 72), F32, y="D"),
    pair_case("one row for many, odd width", (523, 257), BF16, y="1D"),
    pair_case("one row for all heads, strided", (5, 30, 320), F16, y="D", layout="strided"),
    pair_case("one row, x", (150, 136), F16, x="1D"),
    pair_case("one fp32 row", (140, 96), BF16, F32, y="D"),
    pair_case("one row for none", (2, 0, 64), F32, y="D"),
    pair_case("one number a row", (2, 7, 48), BF16, y="BT1"),
    pair_case("one number for all", (40, 24), F32, y=""),
    pair_case("for all heads", (2, 3, 8, 72), F16, y="B1TD"),
    pair_case("past 2^31 elements, one row, odd width", (2_150_000, 1001), BF16, y="D", huge=True),
)

WIDTHS, ROWS = (768, 1000, 4096, 14336), (1, 64, 4096, 32768)
ROW_SHAPES = ((1, 4096), (4096, 4096), (32768, 768), (32768, 14336))


def bench_cases(**options: Any) -> tuple[Case, ...]:
    """Two tensors of one shape, by these options, and one row for all."""
    return (
        *(pair_case("plain", (rows, width), BF16, **options) for width in WIDTHS for rows in ROWS),
        pair_case("plain", (32768, 4096), F32, **options),
        *(pair_case("row", shape, BF16, y="D") for shape in ROW_SHAPES),
    )


DECODE_CASES = tuple(pair_case("decode", (rows, 1, 4096), BF16) for rows in (1, 4, 8))

ROWS_SPEC = InputSpec((4, 8), F32)


def _bad(name: str, x: InputSpec, y: InputSpec, *says: str) -> BadCall:
    return BadCall(name, {"x": x, "y": y}, {}, says)


BAD_CALLS = (
    _bad("integer x", InputSpec((4, 8), "int32"), ROWS_SPEC, "x must be float32", "int32[4, 8]"),
    _bad("integer y", ROWS_SPEC, InputSpec((8,), "int32"), "y must be float32", "int32[8]"),
    _bad("bool y", ROWS_SPEC, InputSpec((4, 8), "bool"), "y must be float32", "bool[4, 8]"),
    _bad("complex y", ROWS_SPEC, InputSpec((8,), "complex64"), "y must be float32", "complex64[8]"),
    _bad("nine dimensions, x", InputSpec((1,) * 8 + (3,), F32), InputSpec((3,), F32), "x must have at most 8", "1, 3]"),
    _bad("nine dimensions, y", InputSpec((3,), F32), InputSpec((1,) * 8 + (3,), F32), "y must have at most 8", "1, 3]"),
    _bad("another width", ROWS_SPEC, InputSpec((9,), F32), "that broadcast", "x float32[4, 8] and y float32[9]"),
    _bad("other rows", ROWS_SPEC, InputSpec((3, 8), BF16), "that broadcast", "y bfloat16[3, 8]"),
    _bad("no rows for some", ROWS_SPEC, InputSpec((0, 8), F32), "that broadcast", "y float32[0, 8]"),
    BadCall(
        "a number for y", {"x": ROWS_SPEC}, {"y": 2.0}, ("y must be a tensor", "got a float", "For a number write")
    ),
    BadCall("a number for x", {"y": ROWS_SPEC}, {"x": 3}, ("x must be a tensor", "got a int", "For a number write")),
)
