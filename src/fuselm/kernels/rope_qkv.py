"""RoPE on packed q, k and v: q and k as rope.py has them, and one gradient for the tensor that all three came in.

    q_out, k_out = rope(q, k)                 of qkv's first N heads and of the K behind them
    v            = the last K heads           in PyTorch a view of qkv

qkv is [B, T, N + 2 K, H], what one matmul gives. Backward turns dq and dk back and puts them and dv side by side:

    dqkv = [turned back dq, turned back dk, dv]        rounded once, in qkv's dtype

which as rope() of views and a concatenation would be moved nearly twice. Saved for backward: the tables and positions.
QK-norm, whose backward needs q and k as they were, is rope()'s alone. Knows numpy and no framework.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fuselm.kernels import rope
from fuselm.kernels.spec import (
    DTYPE_BYTES,
    Arrays,
    BadCall,
    Case,
    Cost,
    InputSpec,
    OpSpec,
    TensorInfo,
    as_whole,
    refuse,
)

NAME = "rope_qkv"

# ---- refusals ------------------------------------------------------------------------------------------------------


def check(
    qkv: TensorInfo,
    cos: TensorInfo,
    sin: TensorInfo,
    positions: TensorInfo | None,
    kv_heads: int | None,
    interleaved: bool,
) -> None:
    """Raise RefusedInput for the first rule that is broken; what tables and positions must be is rope's to say."""
    _check_packed(qkv)
    q_heads, kv_heads = heads_of(qkv.shape[2], kv_heads)
    shape = (*qkv.shape[:2], q_heads, qkv.shape[3])
    for name, tensor in {"cos": cos, "sin": sin, "positions": positions}.items():
        if tensor is not None and tensor.device != qkv.device and tensor.device and qkv.device:
            arrived = f"qkv on {qkv.device} and {name} on {tensor.device}"
            raise refuse("rope_qkv: all tensors must be on one device", arrived, f"Move {name} to {qkv.device}.")
    q, k = (TensorInfo((*shape[:2], heads, shape[3]), qkv.dtype, qkv.device) for heads in (q_heads, kv_heads))
    rope.check(q, k, cos, sin, positions, None, None, None, interleaved)


def _check_packed(qkv: TensorInfo) -> None:
    if qkv.dtype not in DTYPE_BYTES:
        raise refuse("rope_qkv: qkv must be float32, float16 or bfloat16", f"qkv {qkv}", "Convert it to one of them.")
    if len(qkv.shape) != 4 or qkv.shape[-1] % 2 or not 2 <= qkv.shape[-1] <= rope.MAX_WIDTH:
        rule = "rope_qkv: qkv must be [batch, tokens, q heads + 2 kv heads, head_dim], with an even head_dim of 2 to "
        raise refuse(f"{rule}{rope.MAX_WIDTH}", f"qkv {qkv}", "View it so; heads come before head_dim.")


def heads_of(all_heads: int, kv_heads: int | None) -> tuple[int, int]:
    """How many heads q has, and how many k and v have each."""
    if kv_heads is None:
        if all_heads % 3:
            rule = "rope_qkv: without kv_heads q, k and v have a third of the heads each"
            raise refuse(rule, f"{all_heads} heads", "Pass kv_heads.")
        return all_heads // 3, all_heads // 3
    count = as_whole(kv_heads)
    if count is None or not 0 <= 2 * count <= all_heads:
        rule = "rope_qkv: kv_heads must be a whole number from 0 to half of all heads"
        raise refuse(rule, f"kv_heads={kv_heads!r} of {all_heads} heads", "Pass how many heads k has.")
    return all_heads - 2 * count, count


# ---- truth ---------------------------------------------------------------------------------------------------------


def oracle(xp: Any, inputs: Arrays, options: Mapping[str, Any]) -> Arrays:
    """Forward in float64."""
    q, k, v = _parts(inputs["qkv"], options)
    turned = rope.oracle(xp, {**inputs, "q": q, "k": k}, _of_rope(options))
    return {**turned, "v": v}


def oracle_backward(xp: Any, inputs: Arrays, cotangents: Arrays, options: Mapping[str, Any]) -> Arrays:
    """The formulas of the module's docstring, in float64."""
    q, k, _ = _parts(inputs["qkv"], options)
    back = rope.oracle_backward(xp, {**inputs, "q": q, "k": k}, cotangents, _of_rope(options))
    return {"qkv": xp.concatenate((back["q"], back["k"], cotangents["v"]), 2)}


def _parts(qkv: Any, options: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    q_heads, kv_heads = heads_of(qkv.shape[2], options.get("kv_heads"))
    return qkv[:, :, :q_heads], qkv[:, :, q_heads : q_heads + kv_heads], qkv[:, :, q_heads + kv_heads :]


def _of_rope(options: Mapping[str, Any]) -> dict[str, Any]:
    return {"interleaved": options.get("interleaved", False)}


# ---- cases ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PackedCase(Case):
    """A case, whose shape is qkv's, with the tables' number of rows."""

    table: int = field(default=0, kw_only=True)  # 0: one for each token
    by_batch: bool = field(default=False, kw_only=True)  # positions are [B, T]


def inputs(case: Case) -> dict[str, InputSpec]:
    """qkv, the tables, and positions where the case names them."""
    assert isinstance(case, PackedCase)
    batch, tokens, _, width = case.shape
    rows = case.table or tokens
    made = {"qkv": InputSpec(case.shape, case.dtype)}
    # Any numbers will do for tables: a turn by an angle is one of the matrices that they stand for.
    for name in ("cos", "sin"):
        made[name] = InputSpec((rows, width // 2), F32, differentiable=False, scale=0.7)
    if "positions" in case.tensors:
        shape = (batch, tokens) if case.by_batch else (tokens,)
        made["positions"] = InputSpec(shape, case.tensors["positions"], differentiable=False, integers=(0, rows))
    return made


def cost(case: Case, which: str) -> Cost:
    """Forward reads and writes q and k, and leaves v; backward reads and writes all three."""
    assert isinstance(case, PackedCase)
    batch, tokens, all_heads, width = case.shape
    q_heads, kv_heads = heads_of(all_heads, case.options.get("kv_heads"))
    moved = q_heads + kv_heads if which == "forward" else all_heads
    asked = batch * tokens if case.by_batch else tokens
    tables = min(asked, case.table or tokens) * width * DTYPE_BYTES[F32]  # half of a head's width, twice
    tables += asked * rope.INDEX_BYTES[case.tensors["positions"]] if "positions" in case.tensors else 0
    vectors = batch * tokens * width
    return Cost(2 * vectors * moved * DTYPE_BYTES[case.dtype] + tables, 3 * vectors * (q_heads + kv_heads))


F32, F16, BF16, I32, I64 = "float32", "float16", "bfloat16", "int32", "int64"


def _case(name: str, shape: tuple[int, ...], dtype: str, **more: Any) -> Case:
    """`more` is layout, table, by_batch, huge, the dtype of positions, and the options of the op."""
    index = more.pop("positions", "")
    own = {key: more.pop(key) for key in ("table", "by_batch", "huge") if key in more}
    tensors = {"positions": index} if index else {}
    layout = more.pop("layout", "contiguous")
    # A row's result hangs on which token's it is.
    return PackedCase(name, shape, dtype, more, tensors, layout, row_wise=False, **own)


CASES = (
    _case("one pair each", (1, 1, 3, 2), F32),
    _case("one token", (1, 1, 12, 64), BF16, table=9),
    _case("fewer key heads", (2, 7, 8, 64), F32, kv_heads=2),
    _case("many heads", (2, 5, 30, 64), BF16, kv_heads=5),
    _case("no heads but q's", (2, 3, 4, 32), F16, kv_heads=0),
    _case("no heads of q", (2, 3, 4, 32), F16, kv_heads=2),
    _case("interleaved", (2, 5, 9, 64), BF16, interleaved=True),
    _case("interleaved fp32", (2, 3, 6, 40), F32, kv_heads=1, interleaved=True),
    _case("odd pairs", (2, 3, 6, 6), F32),
    _case("odd pairs, interleaved", (2, 3, 9, 10), F16, interleaved=True),
    _case("vectors of 8 bytes", (2, 4, 11, 40), BF16, kv_heads=3, table=6),
    _case("vectors of 4 bytes", (2, 3, 9, 100), BF16),
    _case("widest head", (1, 3, 6, 512), BF16),
    _case("no tokens", (2, 0, 12, 64), BF16),
    _case("positions of all", (3, 4, 6, 64), BF16, kv_heads=1, positions=I32, table=50, interleaved=True),
    _case("positions of each row", (3, 4, 5, 32), F32, kv_heads=1, positions=I64, table=20, by_batch=True),
    _case("strided heads", (2, 3, 12, 64), BF16, layout="strided"),
    _case("misaligned", (2, 3, 12, 64), BF16, layout="offset"),
    _case("transposed", (2, 5, 12, 32), F32, layout="transposed"),
    _case("columns apart", (2, 3, 12, 40), F16, layout="columns"),
)

# What a training step has of it: gpt-124m's and tinystories' heads, and those of a model with fewer key heads.
BENCH_CASES = (
    _case("plain", (32, 1024, 36, 64), BF16),
    _case("plain", (256, 256, 48, 32), BF16),
    _case("plain", (32, 1024, 48, 128), BF16, kv_heads=8),
    _case("plain", (4, 1024, 36, 64), BF16),
    _case("plain", (32, 1024, 36, 64), F32),
)

_QKV = InputSpec((2, 3, 8, 8), F32)
_TABLE = InputSpec((5, 4), F32, differentiable=False)
_GOOD = {"qkv": _QKV, "cos": _TABLE, "sin": _TABLE}


def _bad(name: str, says: tuple[str, ...], options: Mapping[str, Any] | None = None, **tensors: InputSpec) -> BadCall:
    return BadCall(name, {**_GOOD, **tensors}, {"kv_heads": 2} if options is None else options, says)


def _heads(*shape: int, dtype: str = F32) -> InputSpec:
    return InputSpec(shape, dtype)


BAD_CALLS = (
    _bad("integer qkv", ("qkv must be float32", "int32[2, 3, 8, 8]"), qkv=_heads(2, 3, 8, 8, dtype=I32)),
    _bad("no batch dimension", ("qkv must be [batch, tokens", "float32[3, 8, 8]"), qkv=_heads(3, 8, 8)),
    _bad("odd head_dim", ("an even head_dim", "float32[2, 3, 8, 7]"), qkv=_heads(2, 3, 8, 7)),
    _bad("too wide", ("2 to 512", "514]"), qkv=_heads(1, 1, 3, 514)),
    _bad("no thirds", ("a third of the heads each", "8 heads", "Pass kv_heads"), {}),
    _bad("too many key heads", ("from 0 to half of all heads", "kv_heads=5 of 8 heads"), {"kv_heads": 5}),
    _bad("a negative number of them", ("whole number from 0", "kv_heads=-1"), {"kv_heads": -1}),
    _bad("half a head", ("whole number from 0", "kv_heads=1.5"), {"kv_heads": 1.5}),
    _bad("a truth value for it", ("whole number from 0", "kv_heads=True"), {"kv_heads": True}),
    _bad("bf16 tables", ("cos must be float32", "bfloat16[5, 4]"), cos=_heads(5, 4, dtype=BF16)),
    _bad("tables of whole heads", ("a column for each pair", "[5, 8]", "of 4 columns"), cos=_heads(5, 8)),
    _bad("sin of other positions", ("the shape of cos", "float32[6, 4] and cos float32[5, 4]"), sin=_heads(6, 4)),
    _bad("short tables", ("a row for each token", "[2, 4]", "3 tokens"), cos=_heads(2, 4), sin=_heads(2, 4)),
    _bad("fractional positions", ("positions must be int32 or int64", "float32[3]"), positions=_heads(3)),
    _bad("too many positions", ("[tokens] or [batch, tokens]", "int32[4]"), positions=_heads(4, dtype=I32)),
    _bad("interleaved no bool", ("interleaved must be True or False", "int"), {"kv_heads": 2, "interleaved": 1}),
)

SPEC = OpSpec(
    name=NAME,
    inputs=inputs,
    outputs=lambda case: ("q_out", "k_out", "v"),
    oracle=oracle,
    oracle_backward=oracle_backward,
    cost=cost,
    cases=CASES,
    bench_cases=BENCH_CASES,
    bad_calls=BAD_CALLS,
    row_wise=False,
    views=("v",),
)
