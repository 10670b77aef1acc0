"""Rotary positions (RoPE) on q and k: mathematics, contract, truth in float64, cases and cost.

    n      = x                                  or, with weights (QK-norm), n = x * rstd * weight, a head at a time
    rstd   = 1 / sqrt(mean(x^2 over a head) + eps)
    c, s   = cos[p], sin[p]                     p the token's position: positions[t], positions[b, t], or t itself
    out_a  = n_a * c - n_b * s                  in fp32, rounded once to x's dtype
    out_b  = n_b * c + n_a * s

q is [B, T, N, H] and k [B, T, K, H], of one dtype; x is either. (a, b) are the numbers i and i + H/2 of a head, or with
`interleaved` 2 i and 2 i + 1; column i of the tables cos and sin, fp32 [S, H/2], is theirs. N and K are any numbers.

Backward turns back: g_a = d_a * c + d_b * s, g_b = d_b * c - d_a * s, with d what arrives. Then

    dx      = g                                                            without weights
    dx      = rstd * (g * weight - xhat * mean(g * weight * xhat))         xhat = x * rstd
    dweight = sum over tokens and heads of g * xhat                        in the weight's dtype, summed in fp32

Saved for backward: the tables and positions; with weights q, k, their rstd (one fp32 number per head) and the weights.
The tables have no gradient. A position outside of the tables makes the token's q and k NaN; torch on a CPU, where
looking is cheap, refuses it instead. Knows numpy and no framework.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fuselm.kernels import norms, rms_norm
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
    refuse,
)

NAME = "rope"
DEFAULT_EPS = rms_norm.DEFAULT_EPS
MAX_WIDTH = 512  # of a head: 32 lanes of a warp hold 8 pairs each
INDEX_BYTES = {"int32": 4, "int64": 8}

# ---- refusals ------------------------------------------------------------------------------------------------------


def check(
    q: TensorInfo,
    k: TensorInfo,
    cos: TensorInfo,
    sin: TensorInfo,
    positions: TensorInfo | None,
    q_weight: TensorInfo | None,
    k_weight: TensorInfo | None,
    eps: float | None,
    interleaved: bool,
) -> None:
    """Raise RefusedInput for the first rule that is broken; every refusal of this op is worded in this file."""
    _check_heads(q, k)
    _check_tables(q, cos, sin)
    _check_positions(q, cos, positions)
    _check_weights(q, q_weight, k_weight)
    others = {"k": k, "cos": cos, "sin": sin, "positions": positions, "q_weight": q_weight, "k_weight": k_weight}
    for name, tensor in others.items():
        if tensor is not None and tensor.device != q.device and tensor.device and q.device:
            arrived = f"q on {q.device} and {name} on {tensor.device}"
            raise refuse("rope: all tensors must be on one device", arrived, f"Move {name} to {q.device}.")
    if eps is not None:
        norms.check_eps(NAME, eps, "Pass eps=1e-6, or None for 2^-23.")
    check_flag("interleaved", interleaved)


def _check_heads(q: TensorInfo, k: TensorInfo) -> None:
    if q.dtype not in DTYPE_BYTES:
        raise refuse("rope: q must be float32, float16 or bfloat16", f"q {q}", "Convert q to one of them.")
    if k.dtype != q.dtype:
        raise refuse("rope: k must have q's dtype", f"k {k} for q {q}", f"Convert k to {q.dtype}.")
    if len(q.shape) != 4 or q.shape[-1] % 2 or not 2 <= q.shape[-1] <= MAX_WIDTH:
        rule = f"rope: q must be [batch, tokens, heads, head_dim], with an even head_dim of 2 to {MAX_WIDTH}"
        raise refuse(rule, f"q {q}", "Reshape q; heads come before head_dim.")
    if len(k.shape) != 4 or (*k.shape[:2], k.shape[3]) != (*q.shape[:2], q.shape[3]):
        rule = "rope: k must be [batch, tokens, heads, head_dim], with any number of heads and all else as in q"
        raise refuse(rule, f"k {k} for q {q}", "Pass the keys of the same tokens.")


def _check_tables(q: TensorInfo, cos: TensorInfo, sin: TensorInfo) -> None:
    for name, table in (("cos", cos), ("sin", sin)):
        if table.dtype != "float32":
            remedy = f"Keep {name} in float32 whatever q's dtype is: 16 bits cannot tell far positions apart."
            raise refuse(f"rope: {name} must be float32", f"{name} {table}", remedy)
        if len(table.shape) != 2 or table.shape[1] != q.shape[-1] // 2:
            rule = f"rope: {name} must be [positions, head_dim / 2], a column for each pair"
            remedy = f"Pass {name} of {q.shape[-1] // 2} columns, without the second half of those some libraries have."
            raise refuse(rule, f"{name} {table} for q {q}", remedy)
    if sin.shape != cos.shape:
        rule, arrived = "rope: sin must have the shape of cos", f"sin {sin} and cos {cos}"
        raise refuse(rule, arrived, "Make both tables of the same positions.")


def _check_positions(q: TensorInfo, cos: TensorInfo, positions: TensorInfo | None) -> None:
    batch, tokens = q.shape[:2]
    if positions is None:
        if tokens > cos.shape[0]:
            rule = "rope: without positions the tables must have a row for each token"
            remedy = "Make longer tables, or pass positions."
            raise refuse(rule, f"cos {cos} for q {q}, which has {tokens} tokens", remedy)
        return
    if positions.dtype not in INDEX_BYTES:
        rule = "rope: positions must be int32 or int64"
        raise refuse(rule, f"positions {positions}", "Convert positions to one of them.")
    if positions.shape not in ((tokens,), (batch, tokens)):
        rule = "rope: positions must be [tokens] or [batch, tokens]"
        remedy = f"Pass positions of shape [{tokens}] or [{batch}, {tokens}]."
        raise refuse(rule, f"positions {positions} for q {q}", remedy)


def _check_weights(q: TensorInfo, q_weight: TensorInfo | None, k_weight: TensorInfo | None) -> None:
    if (q_weight is None) != (k_weight is None):
        missing = "q_weight" if q_weight is None else "k_weight"
        rule = "rope: q_weight and k_weight must come together"
        raise refuse(rule, f"no {missing}", "Pass both for QK-norm, or leave both out.")
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        if weight is None:
            continue
        if weight.dtype not in DTYPE_BYTES:
            rule = f"rope: {name} must be float32, float16 or bfloat16"
            raise refuse(rule, f"{name} {weight}", f"Convert {name} to one of them.")
        if weight.shape != q.shape[-1:]:
            rule = f"rope: {name} must have one number for each of a head's"
            raise refuse(rule, f"{name} {weight} for q {q}", f"Pass a {name} of shape [{q.shape[-1]}].")


def check_flag(name: str, flag: object) -> None:
    """Refuse what only converts to True or False."""
    if not isinstance(flag, bool):
        raise refuse(f"rope: {name} must be True or False", f"{name} of type {type(flag).__name__}", "Pass a bool.")


def stray_position(position: int, place: tuple[int, ...], rows: int) -> RefusedInput:
    """The words for a position that the tables have no row for, which is looked for on a CPU alone."""
    return refuse(
        "rope: a position must be at least 0 and below the number of rows of cos and sin",
        f"position {position} at {list(place)} for tables of {rows} rows",
        "Make longer tables, or correct it.",
    )


def learned_table(name: str) -> RefusedInput:
    """The words for a table that wants a gradient."""
    arrived = f"a {name} that requires one"
    return refuse("rope: cos and sin are constants and have no gradient", arrived, f"Pass {name}.detach().")


def inplace_with_norm() -> RefusedInput:
    """The words for writing over what backward needs."""
    return refuse(
        "rope: inplace with weights works where no gradient is recorded, since backward needs q and k as they were",
        "inplace=True with weights and gradients wanted",
        "Leave inplace out, or call under torch.no_grad().",
    )


def cannot_overwrite(op: str, name: str, tensor: TensorInfo | None, why: str) -> RefusedInput:
    """The words for a tensor that may not be written over."""
    remedy = f"Pass {name}.clone(), or leave inplace out."
    return refuse(f"{op}: inplace cannot write over {why}", f"such a {name}, {tensor}", remedy)


# ---- truth ---------------------------------------------------------------------------------------------------------


def oracle(xp: Any, inputs: Arrays, options: Mapping[str, Any]) -> Arrays:
    """Forward in float64."""
    cos, sin = _angles(inputs)
    made = {}
    for name in ("q", "k"):
        xhat, _, weight = _normed(xp, inputs, name, options)
        made[f"{name}_out"] = _turned(xp, xhat * weight, cos, sin, options)
    return made


def oracle_backward(xp: Any, inputs: Arrays, cotangents: Arrays, options: Mapping[str, Any]) -> Arrays:
    """The formulas of the module's docstring, in float64."""
    cos, sin = _angles(inputs)
    gradients = {}
    for name in ("q", "k"):
        xhat, rstd, weight = _normed(xp, inputs, name, options)
        g = _turned(xp, cotangents[f"{name}_out"], cos, -sin, options)
        if f"{name}_weight" in inputs:
            gradients[f"{name}_weight"] = (g * xhat).reshape(-1, g.shape[-1]).sum(0)
            g = g * weight
            g = rstd * (g - xhat * (g * xhat).mean(-1)[..., None])
        gradients[name] = g
    return {name: gradients[name] for name in ("q", "k", "q_weight", "k_weight") if name in gradients}


def _angles(inputs: Arrays) -> tuple[Any, Any]:
    """cos and sin of every token, one for all heads: [T, 1, H/2] or [B, T, 1, H/2]."""
    where = inputs["positions"] if "positions" in inputs else slice(0, inputs["q"].shape[1])
    return inputs["cos"][where][..., None, :], inputs["sin"][where][..., None, :]


def _normed(xp: Any, inputs: Arrays, name: str, options: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """xhat, rstd and the weight; x itself and ones without weights."""
    x = inputs[name]
    if f"{name}_weight" not in inputs:
        return x, 1.0, 1.0
    eps = options.get("eps")
    rstd = 1 / xp.sqrt((x * x).mean(-1) + (DEFAULT_EPS if eps is None else eps))[..., None]
    return x * rstd, rstd, inputs[f"{name}_weight"]


def _turned(xp: Any, x: Any, cos: Any, sin: Any, options: Mapping[str, Any]) -> Any:
    if options.get("interleaved", False):
        a, b = x[..., 0::2], x[..., 1::2]
        return xp.stack((a * cos - b * sin, b * cos + a * sin), -1).reshape(x.shape)
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    return xp.concatenate((a * cos - b * sin, b * cos + a * sin), -1)


# ---- cases ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RopeCase(Case):
    """A case, whose shape is q's, with k's number of heads and the tables' number of rows."""

    kv_heads: int = field(default=1, kw_only=True)
    table: int = field(default=0, kw_only=True)  # 0: one for each token
    by_batch: bool = field(default=False, kw_only=True)  # positions are [B, T]


def inputs(case: Case) -> dict[str, InputSpec]:
    """q, k and the tables, and whichever of positions and weights the case names."""
    assert isinstance(case, RopeCase)
    batch, tokens, _, width = case.shape
    rows = case.table or tokens
    made = {"q": InputSpec(case.shape, case.dtype), "k": InputSpec((batch, tokens, case.kv_heads, width), case.dtype)}
    # Any numbers will do for tables: a turn by an angle is one of the matrices that they stand for.
    for name in ("cos", "sin"):
        made[name] = InputSpec((rows, width // 2), F32, differentiable=False, scale=0.7)
    if "positions" in case.tensors:
        shape = (batch, tokens) if case.by_batch else (tokens,)
        made["positions"] = InputSpec(shape, case.tensors["positions"], differentiable=False, integers=(0, rows))
    for name in ("q_weight", "k_weight"):
        if name in case.tensors:
            made[name] = InputSpec((width,), case.tensors[name], mean=1.0, scale=0.5)
    return made


def cost(case: Case, which: str) -> Cost:
    """q and k in and out, with weights in backward q, k and rstd besides; of the tables the rows that are asked for."""
    assert isinstance(case, RopeCase)
    batch, tokens, heads, width = case.shape
    vectors = batch * tokens * (heads + case.kv_heads)
    own = vectors * width * DTYPE_BYTES[case.dtype]
    asked = batch * tokens if case.by_batch else tokens
    tables = min(asked, case.table or tokens) * width * DTYPE_BYTES[F32]  # half of a head's width, twice
    tables += asked * INDEX_BYTES[case.tensors["positions"]] if "positions" in case.tensors else 0
    weights = sum(width * DTYPE_BYTES[case.tensors[name]] for name in ("q_weight", "k_weight") if name in case.tensors)
    if which == "forward" or not weights:
        return Cost(2 * own + tables + weights, (7 if weights else 3) * vectors * width)
    return Cost(3 * own + tables + 2 * weights + 4 * vectors, 12 * vectors * width)


F32, F16, BF16, I32, I64 = "float32", "float16", "bfloat16", "int32", "int64"


def _case(name: str, shape: tuple[int, ...], dtype: str, kv_heads: int, **more: Any) -> Case:
    """`more` is layout, table, by_batch, the dtypes of positions and of the weights, and the options of the op."""
    layout, table, by_batch = more.pop("layout", "contiguous"), more.pop("table", 0), more.pop("by_batch", False)
    index, weight = more.pop("positions", ""), more.pop("weight", "")
    dtypes = {"positions": index, "q_weight": weight, "k_weight": more.pop("k_weight", weight)}
    tensors = {key: value for key, value in dtypes.items() if value}
    own: dict[str, Any] = {"kv_heads": kv_heads, "table": table, "by_batch": by_batch}
    # A row's result hangs on which token's it is.
    return RopeCase(name, shape, dtype, more, tensors, layout, row_wise=False, **own)


CASES = (
    _case("one pair", (1, 1, 1, 2), F32, 1),
    _case("one token", (1, 1, 8, 64), BF16, 2, table=9),
    _case("fewer key heads", (2, 7, 4, 64), F32, 2),
    _case("as many key heads", (3, 5, 4, 128), BF16, 4),
    _case("more key heads", (2, 3, 2, 32), F16, 5),
    _case("interleaved", (2, 5, 3, 64), BF16, 3, interleaved=True),
    _case("interleaved fp32", (2, 3, 4, 40), F32, 1, interleaved=True),
    _case("odd pairs", (2, 3, 2, 6), F32, 2),
    _case("odd pairs, interleaved", (2, 3, 3, 10), F16, 3, interleaved=True),
    _case("vectors of 8 bytes", (2, 4, 5, 40), BF16, 3, table=6),
    _case("vectors of 4 bytes", (2, 3, 3, 100), BF16, 3),
    _case("widest head", (1, 3, 2, 512), BF16, 2),
    _case("many tokens", (2, 300, 12, 64), BF16, 3),
    _case("many tokens, vectors of 8 bytes", (1, 400, 10, 40), BF16, 5),
    _case("many tokens, interleaved", (1, 300, 7, 40), F16, 0, interleaved=True),
    _case("no tokens", (2, 0, 4, 64), BF16, 2),
    _case("positions of all", (3, 4, 2, 64), BF16, 2, positions=I32, table=50),
    _case("positions of each row", (3, 4, 3, 32), F32, 1, positions=I64, table=20, by_batch=True),
    _case("strided heads", (2, 3, 4, 64), BF16, 4, layout="strided"),
    _case("misaligned", (2, 3, 4, 64), BF16, 4, layout="offset"),
    _case("transposed", (2, 5, 4, 32), F32, 4, layout="transposed"),
    _case("columns apart", (2, 3, 4, 40), F16, 4, layout="columns"),
    _case("QK-norm", (2, 5, 4, 64), BF16, 2, weight=BF16),
    _case("QK-norm fp32", (2, 6, 3, 128), F32, 3, weight=F32),
    _case("QK-norm, odd pairs", (2, 5, 3, 14), F32, 2, weight=F32, eps=1e-5),
    _case("QK-norm, misaligned", (2, 4, 3, 96), F16, 3, weight=F32, k_weight=F16, layout="offset"),
    _case("QK-norm, widest head", (1, 3, 2, 512), F32, 1, weight=BF16),
    _case("QK-norm, no batch", (0, 3, 4, 64), BF16, 2, weight=F32),
    _case(
        "QK-norm at positions", (2, 4, 3, 80), BF16, 3, weight=F32, positions=I64, table=9, eps=1e-6, interleaved=True
    ),
)

# Query heads, head_dim and key heads by the width of q's rows.
_HEADS = {768: (12, 64, 12), 1000: (25, 40, 5), 4096: (32, 128, 8), 14336: (112, 128, 16)}
_TOKENS = {1: (1, 1), 64: (1, 64), 4096: (4, 1024), 32768: (32, 1024)}


def _bench(name: str, rows: int, width: int, dtype: str = "bfloat16", **more: Any) -> Case:
    heads, head_dim, kv_heads = _HEADS[width]
    return _case(name, (*_TOKENS[rows], heads, head_dim), dtype, kv_heads, **more)


BENCH_CASES = (
    *(_bench("plain", rows, width) for width in _HEADS for rows in _TOKENS),
    _bench("plain", 32768, 4096, F32),
    _bench("interleaved", 32768, 4096, interleaved=True),
    _bench("qk-norm", 4096, 4096, weight=BF16),
    _bench("qk-norm", 1, 4096, weight=BF16),
)

DECODE_CASES = tuple(_case("decode", (rows, 1, 32, 128), BF16, 8) for rows in (1, 4, 8))

_Q = InputSpec((2, 3, 4, 8), F32)
_TABLE = InputSpec((5, 4), F32, differentiable=False)
_WEIGHT = InputSpec((8,), F32)
_GOOD = {"q": _Q, "k": InputSpec((2, 3, 2, 8), F32), "cos": _TABLE, "sin": _TABLE}


def _bad(name: str, says: tuple[str, ...], options: Mapping[str, Any] | None = None, **tensors: InputSpec) -> BadCall:
    return BadCall(name, {**_GOOD, **tensors}, options or {}, says)


def _heads(*shape: int, dtype: str = F32) -> InputSpec:
    return InputSpec(shape, dtype)


_NORMED = {"q_weight": _WEIGHT, "k_weight": _WEIGHT}
BAD_CALLS = (
    _bad("integer q", ("q must be float32", "int32[2, 3, 4, 8]"), q=_heads(2, 3, 4, 8, dtype=I32)),
    _bad("k of another dtype", ("k must have q's dtype", "bfloat16[2, 3,"), k=_heads(2, 3, 2, 8, dtype=BF16)),
    _bad("no batch dimension", ("q must be [batch, tokens", "float32[3, 4, 8]"), q=_heads(3, 4, 8)),
    _bad("odd head_dim", ("an even head_dim", "float32[2, 3, 4, 7]"), q=_heads(2, 3, 4, 7)),
    _bad("head_dim 0", ("2 to 512", "float32[2, 3, 4, 0]"), q=_heads(2, 3, 4, 0)),
    _bad("too wide", ("2 to 512", "514]"), q=_heads(1, 1, 1, 514)),
    _bad("k of other tokens", ("all else as in q", "float32[2, 4, 2, 8] for q"), k=_heads(2, 4, 2, 8)),
    _bad("k of another head_dim", ("all else as in q", "float32[2, 3, 2, 6]"), k=_heads(2, 3, 2, 6)),
    _bad("k of three dimensions", ("any number of heads", "float32[2, 3, 8]"), k=_heads(2, 3, 8)),
    _bad("bf16 tables", ("cos must be float32", "bfloat16[5, 4]"), cos=_heads(5, 4, dtype=BF16)),
    _bad("tables of whole heads", ("a column for each pair", "[5, 8]", "of 4 columns"), cos=_heads(5, 8)),
    _bad("sin with a batch", ("sin must be [positions, head_dim / 2]", "float32[2, 5, 4]"), sin=_heads(2, 5, 4)),
    _bad("sin of other positions", ("the shape of cos", "float32[6, 4] and cos float32[5, 4]"), sin=_heads(6, 4)),
    _bad("short tables", ("a row for each token", "[2, 4]", "3 tokens"), cos=_heads(2, 4), sin=_heads(2, 4)),
    _bad("fractional positions", ("positions must be int32 or int64", "float32[3]"), positions=_heads(3)),
    _bad("too many positions", ("[tokens] or [batch, tokens]", "int32[4]"), positions=_heads(4, dtype=I32)),
    _bad("positions of one row", ("[3] or [2, 3]", "int32[1, 3]"), positions=_heads(1, 3, dtype=I32)),
    _bad("one weight", ("must come together", "no k_weight"), q_weight=_WEIGHT),
    _bad("the other weight", ("must come together", "no q_weight"), k_weight=_WEIGHT),
    _bad("integer weight", ("k_weight must be float32",), q_weight=_WEIGHT, k_weight=_heads(8, dtype=I32)),
    _bad("weight too long", ("one number for each of a head's", "float32[9]"), q_weight=_heads(9), k_weight=_WEIGHT),
    _bad("weight not flat", ("Pass a q_weight of shape [8]",), q_weight=_heads(1, 8), k_weight=_WEIGHT),
    _bad("eps 0", ("eps must be a finite number above 0", "eps=0.0"), {"eps": 0.0}, **_NORMED),
    _bad("eps NaN", ("eps must be", "eps=nan"), {"eps": float("nan")}, **_NORMED),
    _bad("eps negative without weights", ("eps must be", "eps=-1e-06"), {"eps": -1e-6}),
    _bad("eps 0 in fp32", ("rounded to fp32", "eps=1e-50"), {"eps": 1e-50}, **_NORMED),
    _bad("eps no number", ("eps must be a Python number", "str"), {"eps": "small"}),
    _bad("eps a truth value", ("eps must be a Python number", "bool"), {"eps": True}),
    _bad("interleaved no bool", ("interleaved must be True or False", "int"), {"interleaved": 1}),
    _bad("interleaved None", ("interleaved must be True or False", "NoneType"), {"interleaved": None}),
)

SPEC = OpSpec(
    name=NAME,
    inputs=inputs,
    outputs=lambda case: ("q_out", "k_out"),
    oracle=oracle,
    oracle_backward=oracle_backward,
    cost=cost,
    cases=CASES,
    bench_cases=BENCH_CASES,
    decode_cases=DECODE_CASES,
    bad_calls=BAD_CALLS,
    row_wise=False,
)
