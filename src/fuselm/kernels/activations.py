"""What the activations share: formulas, refusals, oracles, cases, cost, and the calls that each of them must refuse.

One family, element by element, in fp32, rounded once to the dtype that came in:

    y  = f(x)                                   gelu, silu, relu2
    dx = dy * f'(x)
    y     = f(gate) * up                        swiglu (f = silu), geglu (f = gelu)
    dgate = dy * up * f'(gate)
    dup   = dy * f(gate)

Saved for backward: what came in. A gated one takes gate and up apart, or packed: without `up`, gate's last dimension is
[gate | up], and so is its gradient's. All tensors are fp32, fp16 or bf16, of one dtype. Of NaN and of numbers so large
that an exponential overflows the results are those of torch's CUDA kernels: f(-inf) is NaN, being -inf * 0, except for
relu2. Knows numpy and no framework.

    check_rows("silu", "x", x)
    SPEC = unary_spec("silu", silu, ...)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from fuselm.kernels.spec import DTYPE_BYTES, Arrays, BadCall, Case, Cost, InputSpec, OpSpec, TensorInfo, refuse

MAX_RANK = 8
# torch's words for the two formulas of gelu: the normal distribution's share, and GPT-2's tanh.
TANH = {"none": False, "tanh": True}

F32, F16, BF16 = "float32", "float16", "bfloat16"

# ---- refusals ------------------------------------------------------------------------------------------------------


def check_numbers(op: str, x: TensorInfo) -> None:
    """Refuse the x of y = f(x) whose dtype or shape is not served; one number may come without dimensions."""
    check_rows(op, "x", x, least_rank=0)


def check_rows(op: str, name: str, x: TensorInfo, least_rank: int = 1) -> None:
    """Refuse a tensor whose dtype or shape is not served."""
    if x.dtype not in DTYPE_BYTES:
        remedy = f"Convert {name} to one of them."
        raise refuse(f"{op}: {name} must be float32, float16 or bfloat16", f"{name} {x}", remedy)
    if not least_rank <= len(x.shape) <= MAX_RANK or 0 in x.shape[-1:]:
        rule = f"{op}: {name} must have {least_rank} to {MAX_RANK} dimensions and a last one of at least 1"
        raise refuse(rule, f"{name} {x}", f"Reshape {name} to (rows, width).")


def check_gated(op: str, gate: TensorInfo, up: TensorInfo | None) -> None:
    """Refuse a gate and an up that do not belong together, or a packed gate that has no halves."""
    check_rows(op, "gate", gate)
    if up is None:
        if gate.shape[-1] % 2:
            rule = f"{op}: without up, gate is packed as [gate | up] and its last dimension must be even"
            raise refuse(rule, f"gate {gate}", "Pass gate and up apart, or both in one tensor.")
        return
    check_rows(op, "up", up)
    if (up.shape, up.dtype) != (gate.shape, gate.dtype):
        remedy = "Expand or convert one of them."
        raise refuse(f"{op}: up must have gate's shape and dtype", f"up {up} for gate {gate}", remedy)
    if up.device != gate.device and up.device and gate.device:
        arrived = f"gate on {gate.device} and up on {up.device}"
        raise refuse(f"{op}: all tensors must be on one device", arrived, f"Move up to {gate.device}.")


def check_approximate(op: str, approximate: str) -> None:
    """Refuse what names no formula of gelu."""
    if not isinstance(approximate, str) or approximate not in TANH:
        rule = f"{op}: approximate must be 'none' (the error function) or 'tanh'"
        raise refuse(rule, f"approximate={approximate!r}", "Leave it out for 'none'.")


# ---- formulas: a value and its derivative --------------------------------------------------------------------------

Formula = Callable[[Any, Any, Mapping[str, Any]], tuple[Any, Any]]


def silu(xp: Any, x: Any, options: Mapping[str, Any]) -> tuple[Any, Any]:
    """x s, with s = 1 / (1 + exp(-x)); its derivative is s (1 + x (1 - s))."""
    share = 1 / (1 + xp.exp(-x))
    return x * share, share * (1 + x * (1 - share))


def gelu(xp: Any, x: Any, options: Mapping[str, Any]) -> tuple[Any, Any]:
    """x Phi(x), Phi being the normal distribution's share below x; or GPT-2's formula, if the options say tanh.

    The share by erfc: 1 + erf would leave nothing of it far below 0.
    """
    if TANH[options.get("approximate", "none")]:
        return _tanh_gelu(xp, x)
    share = 0.5 * _erfc(xp, -x * math.sqrt(0.5))
    density = xp.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    return x * share, share + x * density


def _tanh_gelu(xp: Any, x: Any) -> tuple[Any, Any]:
    """x (1 + tanh(u)) / 2 = x s, with u = sqrt(2 / pi) (x + 0.044715 x^3) and s = 1 / (1 + exp(-2 u)).

    By exp(-|2 u|), which never overflows and of which nothing cancels.
    """
    unit = math.sqrt(8 / math.pi)
    power = xp.exp(-xp.abs(unit * (x + 0.044715 * x * x * x)))
    larger = 1 / (1 + power)  # of s and 1 - s
    share = xp.where(x < 0, power * larger, larger)
    slope = unit * (1 + 3 * 0.044715 * x * x)  # of 2 u
    return x * share, share + x * power * larger * larger * slope


def _erfc(xp: Any, x: Any) -> Any:
    """numpy has none; the C library's, number by number, in its place."""
    if xp is not np:
        return xp.erfc(x)
    return np.vectorize(math.erfc, otypes=[np.float64])(x).astype(x.dtype)


def relu2(xp: Any, x: Any, options: Mapping[str, Any]) -> tuple[Any, Any]:
    """The square of x where it is positive, else 0; NaN stays what it is."""
    kept = xp.where(x <= 0, 0.0, x)
    return kept * kept, 2 * kept


# ---- oracles -------------------------------------------------------------------------------------------------------


def unary_spec(name: str, formula: Formula, flops: tuple[int, int], **lists: Any) -> OpSpec:
    """The spec of y = f(x); `flops` are the operations of an element forward and backward, `lists` OpSpec's own."""

    def oracle(xp: Any, inputs: Arrays, options: Mapping[str, Any]) -> Arrays:
        return {"y": formula(xp, inputs["x"], options)[0]}

    def oracle_backward(xp: Any, inputs: Arrays, cotangents: Arrays, options: Mapping[str, Any]) -> Arrays:
        return {"x": cotangents["y"] * formula(xp, inputs["x"], options)[1]}

    def cost(case: Case, which: str) -> Cost:
        """Forward: x in, y out. Backward: dy and x in, dx out."""
        own = case.size * DTYPE_BYTES[case.dtype]
        return Cost(2 * own, flops[0] * case.size) if which == "forward" else Cost(3 * own, flops[1] * case.size)

    return _spec(name, unary_inputs, oracle, oracle_backward, cost, **lists)


def gated_spec(name: str, formula: Formula, flops: tuple[int, int], **lists: Any) -> OpSpec:
    """The spec of y = f(gate) * up; `flops` as above, of an element of y."""

    def oracle(xp: Any, inputs: Arrays, options: Mapping[str, Any]) -> Arrays:
        gate, up = halves(inputs)
        return {"y": formula(xp, gate, options)[0] * up}

    def oracle_backward(xp: Any, inputs: Arrays, cotangents: Arrays, options: Mapping[str, Any]) -> Arrays:
        gate, up = halves(inputs)
        value, slope = formula(xp, gate, options)
        dgate, dup = cotangents["y"] * up * slope, cotangents["y"] * value
        if "up" in inputs:
            return {"gate": dgate, "up": dup}
        return {"gate": xp.stack([dgate, dup], -2).reshape(inputs["gate"].shape)}

    def cost(case: Case, which: str) -> Cost:
        """Forward: gate and up in, y out. Backward: dy, gate and up in, dgate and dup out."""
        size = case.size if "up" in case.tensors else case.size // 2
        own = size * DTYPE_BYTES[case.dtype]
        return Cost(3 * own, flops[0] * size) if which == "forward" else Cost(5 * own, flops[1] * size)

    return _spec(name, gated_inputs, oracle, oracle_backward, cost, rounds_alike=False, **lists)


def halves(inputs: Arrays) -> tuple[Any, Any]:
    """gate and up, whether they come apart or packed."""
    gate = inputs["gate"]
    if "up" in inputs:
        return gate, inputs["up"]
    width = gate.shape[-1] // 2
    return gate[..., :width], gate[..., width:]


def _spec(name: str, inputs: Any, oracle: Any, oracle_backward: Any, cost: Any, **lists: Any) -> OpSpec:
    return OpSpec(
        name=name,
        inputs=inputs,
        outputs=lambda case: ("y",),
        oracle=oracle,
        oracle_backward=oracle_backward,
        cost=cost,
        **lists,
    )


# ---- cases ---------------------------------------------------------------------------------------------------------

Options = Mapping[str, Any]
ROWS = (1, 64, 4096, 32768)
WIDTHS = (768, 1000, 4096, 14336)


def unary_inputs(case: Case) -> dict[str, InputSpec]:
    """x. A case drawn "wide", of fp32, reaches where an activation is flat.

    In 16 bits torch, after whose roundings the tests look, has 1 + erf far below 0 and few correct digits there; all
    numbers that 16 bits have are in tests/kernels/test_activations.py.
    """
    return {"x": InputSpec(case.shape, case.dtype, scale=_spread(case))}


def gated_inputs(case: Case) -> dict[str, InputSpec]:
    """gate and up, or a packed gate; up has gate's dtype, whatever a case says.

    An odd width of a packed gate, which only the random shapes of the tests have, loses its last column.
    """
    if "up" in case.tensors:
        gate = InputSpec(case.shape, case.dtype, scale=_spread(case))
        return {"gate": gate, "up": InputSpec(case.shape, case.dtype)}
    width = case.shape[-1] // 2 * 2
    return {"gate": InputSpec((*case.shape[:-1], width), case.dtype, scale=_spread(case))}


def _spread(case: Case) -> float:
    return 4.0 if case.draw == "wide" else 1.0


def _case(name: str, shape: tuple[int, ...], dtype: str, tensors: Mapping[str, str], **more: Any) -> Case:
    """`more` is layout, huge, draw, and the options of the op."""
    own = {key: more.pop(key) for key in ("layout", "huge", "draw") if key in more}
    return Case(name, shape, dtype, more, tensors, **own)


def unary_case(name: str, shape: tuple[int, ...], dtype: str, **more: Any) -> Case:
    """A case of y = f(x)."""
    return _case(name, shape, dtype, {}, **more)


def gated_case(name: str, shape: tuple[int, ...], dtype: str, **more: Any) -> Case:
    """A case of y = f(gate) * up, packed unless its name says separate; the shape is gate's, as it is passed."""
    return _case(name, shape, dtype, {"up": dtype} if "separate" in name else {}, **more)


# What kernels treat differently: no gaps, with a whole number of vectors or a tail; rows with gaps; dimensions that do
# not fold; rows that are not vectors; more elements than 32 bits can count.
_UNARY_CASES: tuple[tuple[str, tuple[int, ...], str, Options], ...] = (
    ("one number", (1,), F32, {}),
    ("one row", (1, 64), F32, {}),
    ("width one", (5, 1), BF16, {}),
    ("odd width", (13, 1001), BF16, {}),
    ("odd width fp32", (37, 77), F32, {}),
    ("not a power of two", (9, 768), BF16, {}),
    ("width 1000", (6, 1000), F16, {}),
    ("half a vector more than whole blocks", (1, 1028), BF16, {}),
    ("wide numbers", (6, 300), F32, {"draw": "wide"}),
    ("wide numbers, other options", (6, 300), F32, {"draw": "wide"}),
    ("no rows", (0, 256), BF16, {}),
    ("no rows, three dimensions", (2, 0, 256), F32, {}),
    ("three dimensions", (4, 8, 96), F32, {}),
    ("eight dimensions", (1, 2, 1, 3, 2, 1, 4, 16), F16, {}),
    ("strided rows", (33, 256), BF16, {"layout": "strided"}),
    ("strided rows, odd width", (9, 77), F16, {"layout": "strided"}),
    ("misaligned", (17, 512), BF16, {"layout": "offset"}),
    ("transposed heads", (3, 4, 5, 64), BF16, {"layout": "transposed"}),
    ("columns apart", (96, 40), F32, {"layout": "columns"}),
    ("many rows", (1500, 64), BF16, {}),
    ("past 2^31 elements", (2_200_000, 1024), BF16, {"huge": True}),
    ("past 2^31 elements, odd width", (2_150_000, 1001), BF16, {"huge": True}),
)

# Packed, halves are rows with gaps, even where the whole has none; odd halves are not aligned either.
_GATED_CASES: tuple[tuple[str, tuple[int, ...], str, Options], ...] = (
    ("packed", (9, 1536), BF16, {}),
    ("packed, one number", (2,), F32, {}),
    ("packed, one row", (1, 128), F32, {}),
    ("packed, width one", (5, 2), BF16, {}),
    ("packed, odd halves", (9, 2002), BF16, {}),
    ("packed, odd halves fp32", (37, 154), F32, {}),
    ("packed, width 1000", (6, 2000), F16, {}),
    ("packed, wide numbers", (6, 600), F32, {"draw": "wide"}),
    ("packed, no rows", (2, 0, 256), BF16, {}),
    ("packed, three dimensions", (4, 8, 192), F32, {}),
    ("packed, strided rows", (33, 256), BF16, {"layout": "strided"}),
    ("packed, misaligned", (17, 512), BF16, {"layout": "offset"}),
    ("packed, transposed heads", (3, 4, 5, 128), BF16, {"layout": "transposed"}),
    ("packed, columns apart", (48, 40), F32, {"layout": "columns"}),
    ("separate", (9, 768), BF16, {}),
    ("separate, one number", (1,), F32, {}),
    ("separate, odd width", (13, 1001), BF16, {}),
    ("separate, half a vector more than whole blocks", (1, 1028), BF16, {}),
    ("packed, a row in parts", (3, 4112), BF16, {}),
    ("separate, odd width fp32", (37, 77), F32, {}),
    ("separate, wide numbers", (6, 300), F32, {"draw": "wide"}),
    ("separate, width 1000", (4, 1000), F16, {}),
    ("separate, no rows", (0, 64), F32, {}),
    ("separate, strided rows", (33, 128), F16, {"layout": "strided"}),
    ("separate, misaligned", (17, 256), BF16, {"layout": "offset"}),
    ("separate, transposed heads", (3, 4, 5, 64), BF16, {"layout": "transposed"}),
    ("packed, past 2^31 elements", (1_100_000, 2048), BF16, {"huge": True}),
    ("packed, past 2^31 elements, odd halves", (1_100_000, 2002), BF16, {"huge": True}),
    ("separate, past 2^31 elements", (2_200_000, 1024), BF16, {"huge": True}),
)


def unary_cases(*options: Options) -> tuple[Case, ...]:
    """The cases of y = f(x), taking the sets of options in turn: how a tensor lies and what is computed are apart."""
    return tuple(
        unary_case(name, shape, dtype, **more, **options[i % len(options)])
        for i, (name, shape, dtype, more) in enumerate(_UNARY_CASES)
    )


def gated_cases(*options: Options) -> tuple[Case, ...]:
    """The same of y = f(gate) * up."""
    return tuple(
        gated_case(name, shape, dtype, **more, **options[i % len(options)])
        for i, (name, shape, dtype, more) in enumerate(_GATED_CASES)
    )


def unary_bench(**options: Any) -> tuple[Case, ...]:
    """The rows and widths of the record, as "plain"."""
    shapes = [(rows, width) for width in WIDTHS for rows in ROWS]
    timed = tuple(unary_case("plain", shape, BF16, **options) for shape in shapes)
    return (*timed, unary_case("plain", (32768, 4096), F32, **options))


def gated_bench(**options: Any) -> tuple[Case, ...]:
    """The same with gate and up of those widths: "packed", and some "separate"."""
    shapes = [(rows, 2 * width) for width in WIDTHS for rows in ROWS]
    return (
        *(gated_case("packed", shape, BF16, **options) for shape in shapes),
        gated_case("packed", (32768, 2 * 4096), F32, **options),
        *(gated_case("separate", shape, BF16, **options) for shape in ((1, 4096), (32768, 4096), (4096, 14336))),
    )


def unary_decode(**options: Any) -> tuple[Case, ...]:
    """One token of a few sequences."""
    return tuple(unary_case("decode", (rows, 1, 4096), BF16, **options) for rows in (1, 4, 8))


def gated_decode(**options: Any) -> tuple[Case, ...]:
    """The same, packed."""
    return tuple(gated_case("decode", (rows, 1, 2 * 4096), BF16, **options) for rows in (1, 4, 8))


# ---- calls to refuse -----------------------------------------------------------------------------------------------

_X = InputSpec((4, 8), F32)


def _bad_rows(name: str, least_rank: int) -> tuple[BadCall, ...]:
    """What no first tensor may be."""
    ranks = f"{least_rank} to 8 dimensions"
    return (
        BadCall(f"integer {name}", {name: InputSpec((4, 8), "int32")}, {}, (f"{name} must be float32", "int32[4, 8]")),
        BadCall(f"complex {name}", {name: InputSpec((8,), "complex64")}, {}, (f"{name} must be", "complex64[8]")),
        BadCall("nine dimensions", {name: InputSpec((1,) * 8 + (2,), F32)}, {}, (ranks, "1, 2]")),
        BadCall("width 0", {name: InputSpec((4, 0), F32)}, {}, ("a last one of at least 1", "float32[4, 0]")),
    )


def _bad_up(name: str, up: InputSpec, *says: str) -> BadCall:
    return BadCall(name, {"gate": _X, "up": up}, {}, says)


UNARY_BAD_CALLS = _bad_rows("x", 0)
GATED_BAD_CALLS = (
    *_bad_rows("gate", 1),
    BadCall("no dimensions", {"gate": InputSpec((), F32)}, {}, ("1 to 8 dimensions", "float32[]")),
    BadCall("odd and packed", {"gate": InputSpec((4, 7), F32)}, {}, ("last dimension must be even", "float32[4, 7]")),
    _bad_up("integer up", InputSpec((4, 8), "int32"), "up must be float32", "int32[4, 8]"),
    _bad_up("up of another shape", InputSpec((8, 4), F32), "gate's shape and dtype", "float32[8, 4] for gate"),
    _bad_up("up of one row", InputSpec((8,), F32), "gate's shape and dtype", "float32[8] for gate float32[4, 8]"),
    _bad_up("up of another dtype", InputSpec((4, 8), BF16), "gate's shape and dtype", "bfloat16[4, 8]"),
)


def bad_approximations(name: str) -> tuple[BadCall, ...]:
    """What names no formula of gelu, for an op whose first tensor has this name."""
    wrong = (("unknown", "erf"), ("None", None), ("a truth value", True), ("a list", ["tanh"]))
    return tuple(
        BadCall(f"approximate {what}", {name: _X}, {"approximate": given}, ("must be 'none'", f"approximate={given!r}"))
        for what, given in wrong
    )
