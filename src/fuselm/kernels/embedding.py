"""Embedding: its mathematics, its contract, its truth in float64, its cases and its cost.

    out = weight[ids]                                        rows of weight [V, D]: ids' shape, and D behind it
    out = weight[ids] + position_weight[positions]           with learned positions, added in fp32

rounded once to `dtype`, weight's own unless told. Positions are 0 to T - 1 along ids' last dimension T, or given, as
many as there are ids or T of them. An fp32 table looked up as bf16 saves a model the pass that converts activations.

Backward, for each of the two tables:

    dweight[v] = sum of dout over the tokens whose id is v   in weight's dtype, summed in fp32, rounded once

On CUDA the order of that sum hangs on the row's own tokens alone, and so do its bits. They are taken in their order, in
pieces of PIECE, the last of which has what is left over too. Pieces are added up one after another; where there are
more than GROUPS of them, every GROUPS-th first. (Elsewhere tokens are added up one after another.)

An id outside of [0, V), or a position outside of its table: on the CPU torch refuses it. On CUDA, where to look would
be to wait for the device, and in JAX, which has no words for a value, that row of the result is NaN and adds nothing to
the gradient of that table.

Saved for backward: ids and positions, no table. They are int32 or int64, of any shape up to MAX_RANK dimensions; the
tables may each be fp32, fp16 or bf16. Knows numpy and no framework.
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
    RefusedInput,
    TensorInfo,
    as_whole,
    refuse,
)

NAME = "embedding"
MAX_WIDTH = 262_144
MAX_RANK = 7  # of ids: the result has one dimension more
MOST = 2**31 - 1  # rows of a table, and ids of a call
INDEX_BYTES = {"int32": 4, "int64": 8}
# The numbers by which a launcher knows dtypes, fuselm.h's; 0 is weight's own.
DTYPE_NUMBERS = {"float32": 1, "float16": 2, "bfloat16": 3}
# How a row of a gradient is added up on CUDA: embedding_backward.cu has the same numbers.
PIECE, GROUPS = 16, 16


def check(
    ids: TensorInfo,
    weight: TensorInfo,
    position_weight: TensorInfo | None,
    positions: TensorInfo | None,
    dtype: str | None,
) -> None:
    """Raise RefusedInput for the first rule that is broken; every refusal of this op is worded here."""
    _check_dtypes(ids, weight, position_weight, positions, dtype)
    if len(ids.shape) > MAX_RANK:
        rule = f"embedding: ids must have at most {MAX_RANK} dimensions"
        raise refuse(rule, f"ids {ids}", "Flatten some of them, and reshape the result.")
    if _is_more_than(MOST, math.prod(ids.shape)):
        raise refuse(f"embedding: ids must be at most {MOST}", f"ids {ids}", "Take them in parts.")
    for name, table in (("weight", weight), ("position_weight", position_weight)):
        if table is None:
            continue
        if len(table.shape) != 2 or 0 in table.shape or any(map(_is_more_than, (MOST, MAX_WIDTH), table.shape)):
            rule = f"embedding: {name} must be [rows, width], with 1 to {MOST} rows and a width of 1 to {MAX_WIDTH}"
            raise refuse(rule, f"{name} {table}", "Pass a table with one row for each id.")
    if position_weight is not None:
        _check_places(ids, weight, position_weight, positions)
    for name, tensor in (("weight", weight), ("position_weight", position_weight), ("positions", positions)):
        if tensor is not None and tensor.device != ids.device and tensor.device and ids.device:
            rule = "embedding: all tensors must be on one device"
            raise refuse(rule, f"ids on {ids.device} and {name} on {tensor.device}", f"Move {name} to {ids.device}.")


def _is_more_than(limit: int, size: int) -> bool:
    """Whether a size breaks a limit; one that is no number yet, as in an export, is not compared."""
    return isinstance(size, int) and size > limit


def _check_dtypes(
    ids: TensorInfo,
    weight: TensorInfo,
    position_weight: TensorInfo | None,
    positions: TensorInfo | None,
    dtype: str | None,
) -> None:
    for name, indices in (("ids", ids), ("positions", positions)):
        if indices is not None and indices.dtype not in INDEX_BYTES:
            remedy = f"Convert {name} to one of them."
            if name == "ids" and weight.dtype in INDEX_BYTES:
                remedy = "The ids come first, weight second."
            raise refuse(f"embedding: {name} must be int32 or int64", f"{name} {indices}", remedy)
    for name, table in (("weight", weight), ("position_weight", position_weight)):
        if table is not None and table.dtype not in DTYPE_BYTES:
            rule = f"embedding: {name} must be float32, float16 or bfloat16"
            raise refuse(rule, f"{name} {table}", f"Convert {name} to one of them.")
    if dtype is not None and dtype not in DTYPE_NUMBERS:
        rule = "embedding: dtype must be float32, float16, bfloat16 or None"
        raise refuse(rule, f"dtype {dtype}", "Leave it out for weight's own.")
    if positions is not None and position_weight is None:
        rule = "embedding: positions are places in a position_weight, which must be there too"
        raise refuse(rule, f"positions {positions} alone", "Pass position_weight, or leave positions out.")


def _check_places(
    ids: TensorInfo, weight: TensorInfo, position_weight: TensorInfo, positions: TensorInfo | None
) -> None:
    if position_weight.shape[1] != weight.shape[1]:
        rule = "embedding: position_weight must be as wide as weight"
        got = f"position_weight {position_weight} for weight {weight}"
        raise refuse(rule, got, f"Pass [rows, {weight.shape[1]}].")
    if positions is not None and positions.shape not in (ids.shape, ids.shape[-1:]):
        rule = "embedding: positions must have the shape of ids, or of ids' last dimension"
        remedy = f"Pass {list(ids.shape)} or {list(ids.shape[-1:])} of them."
        raise refuse(rule, f"positions {positions} for ids {ids}", remedy)
    if positions is None and tokens_of(ids.shape) > position_weight.shape[0]:
        rule = "embedding: position_weight must have a row for each place in ids' last dimension"
        got = f"position_weight {position_weight} for ids {ids}"
        raise refuse(rule, got, "Pass fewer tokens, a longer table, or positions that say which rows to take.")


def tokens_of(shape: tuple[int, ...]) -> int:
    """T: how many places ids of that shape have, unless positions say which; a single id is at the first."""
    return shape[-1] if shape else 1


def stray(name: str, value: int, place: tuple[int, ...], table: TensorInfo) -> RefusedInput:
    """The words for an id, or a position, that its table has no row for."""
    of = "weight" if name == "ids" else "position_weight"
    return refuse(
        f"embedding: {name} must be at least 0 and below the number of rows of {of}",
        f"{value} at {list(place)} for {of} {table}",
        "Correct it; on CUDA, where values are not looked at, such a token's row is NaN.",
    )


# ---- truth ---------------------------------------------------------------------------------------------------------


def padding_row(rows: int, padding_idx: int) -> int:
    """The row that padding_idx names in a table of so many, counted from the end where it is negative, as in torch."""
    row = as_whole(padding_idx)
    if row is None or not -rows <= row < rows:
        rule = f"embedding: padding_idx must be a row of weight, a whole number from {-rows} to {rows - 1}"
        raise refuse(rule, f"padding_idx={padding_idx!r}", "Name such a row, or leave padding_idx out.")
    return row % rows


def oracle(xp: Any, inputs: Arrays, options: Mapping[str, Any]) -> Arrays:
    """Forward in float64."""
    ids = inputs["ids"]
    out = inputs["weight"][ids]
    if "positions" in inputs:
        out = out + inputs["position_weight"][inputs["positions"]]
    elif "position_weight" in inputs:
        out = out + inputs["position_weight"][: tokens_of(ids.shape)].reshape(*ids.shape[-1:], -1)
    return {"out": out}


def oracle_backward(xp: Any, inputs: Arrays, cotangents: Arrays, options: Mapping[str, Any]) -> Arrays:
    """Each row of dout added to the row that it came from."""
    ids, dout = inputs["ids"], cotangents["out"]
    rows = dout.reshape(math.prod(ids.shape), dout.shape[-1])  # [N, D]
    gradients = {"weight": _added_at(xp, inputs["weight"], ids.reshape(-1), rows)}
    if "positions" in inputs:
        places = xp.broadcast_to(inputs["positions"], ids.shape).reshape(-1)
        gradients["position_weight"] = _added_at(xp, inputs["position_weight"], places, rows)
    elif "position_weight" in inputs:
        tokens = tokens_of(ids.shape)
        total = xp.zeros_like(inputs["position_weight"])
        batch = rows.shape[0] // max(tokens, 1)
        total[:tokens] = rows.reshape(batch, tokens, rows.shape[1]).sum(0)
        gradients["position_weight"] = total
    return gradients


def _added_at(xp: Any, table: Any, indices: Any, rows: Any) -> Any:
    total = xp.zeros_like(table)
    if hasattr(total, "index_put_"):  # torch's
        return total.index_put_((indices.long(),), rows, accumulate=True)
    xp.add.at(total, indices, rows)
    return total


# ---- cases ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EmbeddingCase(Case):
    """A case whose dtype is weight's. It says how many rows the tables have, and where ids and positions are from."""

    vocabulary: int = field(default=1, kw_only=True)
    drawn: tuple[int, int] | None = field(default=None, kw_only=True)  # ids are from [low, high); None: all rows
    places: int = field(default=0, kw_only=True)  # rows of position_weight
    positions: str = field(default="", kw_only=True)  # "ids": one for each id; "last": for the last dimension


def inputs(case: Case) -> dict[str, InputSpec]:
    """ids, weight and, where the case has them, a table of positions and positions."""
    assert isinstance(case, EmbeddingCase)
    shape, width, tensors = case.shape[:-1], case.shape[-1], case.tensors
    made = {
        "ids": InputSpec(shape, tensors["ids"], differentiable=False, integers=case.drawn or (0, case.vocabulary)),
        "weight": InputSpec((case.vocabulary, width), case.dtype),
    }
    if "position_weight" in tensors:
        made["position_weight"] = InputSpec((case.places, width), tensors["position_weight"])
    if "positions" in tensors:
        own = shape if case.positions == "ids" else shape[-1:]
        made["positions"] = InputSpec(own, tensors["positions"], differentiable=False, integers=(0, case.places))
    return made


def cost(case: Case, which: str) -> Cost:
    """Forward reads the rows that are asked for, and writes as many as there are ids; backward the other way round.

    A row of a table is read once, however many ask for it; each of its gradient's rows is written once.
    """
    assert isinstance(case, EmbeddingCase)
    width, specs = case.shape[-1], inputs(case)
    ids = math.prod(case.shape[:-1])
    low, high = case.drawn or (0, case.vocabulary)
    indices = sum(math.prod(spec.shape) * INDEX_BYTES[spec.dtype] for spec in specs.values() if spec.integers)
    activations = case.size * DTYPE_BYTES[case.options.get("dtype") or case.dtype]
    rows = {"weight": min(ids, high - low)}
    if "position_weight" in specs:
        rows["position_weight"] = min(case.places, tokens_of(case.shape[:-1]))
    if which == "backward":
        rows = {name: specs[name].shape[0] for name in rows}
    tables = sum(count * width * DTYPE_BYTES[specs[name].dtype] for name, count in rows.items())
    return Cost(indices + activations + tables, case.size * (len(rows) - (which == "forward")))


def _case(name: str, shape: tuple[int, ...], vocabulary: int, dtype: str, **more: Any) -> Case:
    """`more`: what Case and EmbeddingCase have; the dtypes of ids, of the table of positions, and of the result, `to`.

    Positions, where there are any, are int32.
    """
    tensors = {"ids": more.pop("ids", "int64")}
    if more.get("places"):
        tensors["position_weight"] = more.pop("table", dtype)
    if more.get("positions"):
        tensors["positions"] = "int32"
    options = {"dtype": more.pop("to")} if "to" in more else {}
    return EmbeddingCase(name, shape, dtype, options, tensors, vocabulary=vocabulary, **more)


F32, F16, BF16, I32 = "float32", "float16", "bfloat16", "int32"

CASES = (
    _case("plain", (33, 256), 50, BF16),
    _case("one id", (1, 64), 7, F32),
    _case("no dimensions", (40,), 5, F32),
    _case("odd width", (13, 77), 20, F16, ids=I32),
    _case("three dimensions", (3, 5, 31), 11, F32, ids=I32),
    _case("all ids equal", (300, 24), 9, F32, drawn=(3, 4)),
    _case("all ids equal, few", (70, 40), 9, BF16, drawn=(3, 4)),
    _case("many tokens, few ids", (1100, 16), 5, F32, ids=I32),
    _case("many tokens, odd width", (700, 19), 300, BF16),
    _case("few tokens, many ids", (4, 32), 3000, BF16),
    _case("no ids", (0, 64), 6, BF16),
    _case("no ids, three dimensions", (2, 0, 16), 6, F32, ids=I32),
    _case("fp32 to bf16", (40, 96), 30, F32, to=BF16),
    _case("fp32 to fp16, odd width", (9, 31), 12, F32, to=F16),
    _case("bf16 to fp32", (400, 48), 90, BF16, to=F32),
    _case("positions", (3, 10, 64), 13, F32, places=16),
    _case("positions of their own", (2, 9, 40), 13, BF16, places=20, positions="ids"),
    _case("positions for all", (4, 7, 25), 13, F32, places=7, table=BF16, positions="last", ids=I32, to=F16),
    _case("positions, a large batch", (150, 5, 24), 13, F32, places=6),
    _case("positions of their own, a large batch", (150, 5, 24), 13, F16, places=8, table=F32, positions="ids", to=F32),
    _case("strided ids", (5, 13, 32), 40, BF16, layout="strided"),
    _case("transposed ids", (3, 4, 5, 24), 17, F32, layout="transposed"),
    _case("ids apart", (30, 16), 12, F16, ids=I32, layout="columns"),
    _case("262144 wide", (3, 262144), 4, BF16),
    _case("past 2^31 elements", (2_200_000, 1024), 1000, BF16, huge=True),
)

_WORDS = 50_304  # GPT-2's, padded
BENCH_CASES = (
    *(
        _case("plain", (rows, width), _WORDS, BF16)
        for width in (768, 1000, 4096, 14336)
        for rows in (1, 64, 4096, 32768)
    ),
    _case("plain", (32768, 4096), _WORDS, F32),
    # Words repeat: 128 times each on average, so that every row is a sum of pieces.
    _case("256 words", (32768, 768), _WORDS, BF16, drawn=(0, 256)),
    _case("fp32 to bf16", (32768, 768), _WORDS, F32, to=BF16),
    _case("positions", (32, 1024, 768), _WORDS, BF16, places=1024),
)

DECODE_CASES = tuple(_case("decode", (rows, 1, 4096), _WORDS, BF16) for rows in (1, 4, 8))

_IDS = InputSpec((2, 3), I32, differentiable=False, integers=(0, 5))
_PLACES = InputSpec((3,), I32, differentiable=False, integers=(0, 3))
_TABLE = InputSpec((5, 8), F32)
_GOOD = {"ids": _IDS, "weight": _TABLE}


def _bad(name: str, says: tuple[str, ...], options: Mapping[str, Any] | None = None, **changed: InputSpec) -> BadCall:
    return BadCall(name, {**_GOOD, **changed}, options or {}, says)


BAD_CALLS = (
    _bad("fractional ids", ("ids must be int32 or int64", "float32[2, 3]"), ids=InputSpec((2, 3), F32)),
    _bad("the wrong way round", ("ids come first, weight second",), ids=_TABLE, weight=_IDS),
    _bad("integer weight", ("weight must be float32", "int32[5, 8]", "Convert"), weight=InputSpec((5, 8), I32)),
    _bad("complex weight", ("weight must be float32", "complex64"), weight=InputSpec((5, 8), "complex64")),
    _bad("eight dimensions", ("at most 7 dimensions", "1, 3]"), ids=InputSpec((1,) * 7 + (3,), I32)),
    _bad("flat weight", ("must be [rows, width]", "float32[8]"), weight=InputSpec((8,), F32)),
    _bad("weight of three dimensions", ("[rows, width]", "[1, 5, 8]"), weight=InputSpec((1, 5, 8), F32)),
    _bad("no rows", ("with 1 to 2147483647 rows", "float32[0, 8]"), weight=InputSpec((0, 8), F32)),
    _bad("width 0", ("a width of 1 to 262144", "float32[5, 0]"), weight=InputSpec((5, 0), F32)),
    _bad("too wide", ("262144", "[1, 262145]"), weight=InputSpec((1, MAX_WIDTH + 1), F32)),
    _bad("integer positions table", ("position_weight must be float32",), position_weight=InputSpec((4, 8), I32)),
    _bad("narrow positions table", ("as wide as weight", "[4, 7]"), position_weight=InputSpec((4, 7), F32)),
    _bad("flat positions table", ("position_weight must be [rows,", "[8]"), position_weight=InputSpec((8,), F32)),
    _bad("short positions table", ("a row for each place", "[2, 8]"), position_weight=InputSpec((2, 8), F32)),
    _bad("positions without a table", ("which must be there too", "int32[3] alone"), positions=_PLACES),
    _bad(
        "fractional positions",
        ("positions must be int32 or int64", "float32[3]"),
        position_weight=_TABLE,
        positions=InputSpec((3,), F32),
    ),
    _bad(
        "positions of another shape",
        ("the shape of ids", "int32[2] for ids int32[2, 3]", "Pass [2, 3] or [3]"),
        position_weight=_TABLE,
        positions=InputSpec((2,), I32),
    ),
    _bad("integer dtype", ("dtype must be float32", "dtype int32"), {"dtype": "int32"}),
    _bad("float64", ("dtype must be float32", "dtype float64"), {"dtype": "float64"}),
    _bad("dtype a number", ("dtype must be float32", "dtype 7"), {"dtype": 7}),
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
    decode_cases=DECODE_CASES,
    bad_calls=BAD_CALLS,
    row_wise=False,  # nothing that learns has rows of the case: every gradient is a sum over them
)
