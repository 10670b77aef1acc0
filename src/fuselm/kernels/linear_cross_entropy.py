"""The loss of a language model's head: its mathematics, its contract, its truth in float64, its cases and its cost.

    logits = hidden @ weight.T + bias            summed in fp32, rounded to hidden's dtype; [M, D] x [V, D] -> [M, V]
    loss   = cross_entropy(logits, targets)      kernels/cross_entropy.py, with all of its options

without memory for all logits: rows are worked off in blocks of `block_rows()`. (In PyTorch on Hopper a large head
begins with as many rows as dweight has columns, in whose memory their logits are: see `first_pieces()`.) Backward, a
block at a time:

    dlogits = those of cross_entropy             rounded to hidden's dtype, where the logits were
    dhidden = dlogits @ weight                   in hidden's dtype
    dweight = dlogits.T @ hidden                 in the weight's dtype, summed in fp32, or between blocks as below
    dbias   = sum of dlogits over rows           in the bias's dtype, summed in fp32

For the reductions "mean" and "sum" all gradients are made in the forward pass, for an incoming gradient of 1, and
multiplied by the one that comes. In 16 bits that is a second rounding wherever it is no power of two: sqrt(2) times the
error of one, which is what the tolerance of 1.5 is for. (test_linear_cross_entropy.py holds an incoming 1, which is
what training sends, to the ordinary one.) Saved for backward: hidden, weight, targets, bias and those gradients; for
"none" the inputs and the log-sum-exp of each row.

dweight over several blocks is summed in fp32 where that takes no more memory than `max_bytes`, and on a CPU,
where a block's share is made in fp32 anyway; a larger bf16 weight's waits in 16 bits, as `weight_sum.py` and
docs/numerics.md have it; so does, being faster, every one that has_many_tiles() where PyTorch has the kernel for it.

hidden, weight and bias may each be fp32, fp16 or bf16; the last two are rounded to hidden's dtype before use. Knows
numpy and no framework.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fuselm.kernels import cross_entropy
from fuselm.kernels.spec import (
    DTYPE_BYTES,
    Arrays,
    BadCall,
    Case,
    Cost,
    InputSpec,
    OpSpec,
    TensorInfo,
    Tolerance,
    refuse,
)

NAME = "linear_cross_entropy"
MAX_VOCABULARY = cross_entropy.MAX_WIDTH
MAX_RANK = cross_entropy.MAX_RANK
# What memory logits take unless told otherwise. Blocks of 1024 rows of a vocabulary of 128k keep a matmul busy.
DEFAULT_MAX_BYTES = 256 << 20
# How a large bf16 weight's gradient waits between blocks, as linear_cross_entropy_dweight.cu has it: as fp16, below
# 2^(TOP_EXPONENT + 1) once multiplied by a power of two, of which a word has four in every tile of columns.
TILE_COLUMNS, EXPONENTS_OF_WORD = 256, 4
TOP_EXPONENT, LEAST_EXPONENT, MOST_EXPONENT = 14, -111, 127
# So many whole tiles of so many words keep a GPU busy, each from its first row to its last. Of fewer, a matmul shares
# out the rows too, and may add up what comes of that in 16 bits.
MANY_TILES, TILE_WORDS = 512, 256
# Blocks start at multiples of so many rows: whole tiles of a matmul, and aligned to 256 bytes whatever the width.
ROWS_OF_TILE = 128
# The loss's kernel shares out the words of a wide row in parts of at most so many, and a piece must not have fewer. A
# cluster has a block for each part, and every GPU that has clusters has those of so many.
PIECE_WORDS, MOST_PARTS = 16384, 8


def block_rows(rows: int, vocabulary: int, element_bytes: int, max_bytes: int) -> int:
    """How many rows a block has, so that its logits take at most max_bytes (or are one row); the last may have fewer.

    All rows, if they fit; else blocks as equal as possible, of a multiple of 128 rows where so many fit.
    """
    most = max(1, max_bytes // (vocabulary * element_bytes))
    if rows <= most:
        return max(rows, 1)
    tile = ROWS_OF_TILE if most >= ROWS_OF_TILE else 1
    blocks = math.ceil(rows / (most // tile * tile))
    return math.ceil(math.ceil(rows / blocks) / tile) * tile


@functools.lru_cache
def first_pieces(
    rows: int, vocabulary: int, width: int, max_bytes: int, multiprocessors: int
) -> tuple[int, int] | None:
    """How many rows of a 16-bit head are worth beginning with at once, their logits in pieces of how many words.

    Pieces lie in the memory of dweight, which has room for the logits of as many rows as it has columns; one piece, and
    the sum of dhidden in fp32, need memory of their own: at most max_bytes. None where a block has as many rows. Of
    the sizes a piece may have it is the one whose matmuls take the fewest waves of tiles.
    """
    taken = min(rows, width, max_bytes // (2 * PIECE_WORDS + 4 * width))
    if taken < rows:
        taken = taken // ROWS_OF_TILE * ROWS_OF_TILE
    if vocabulary % 8 or not PIECE_WORDS < vocabulary <= MOST_PARTS * PIECE_WORDS:
        return None
    if taken <= block_rows(rows, vocabulary, 2, max_bytes):
        return None
    most = min((max_bytes // taken - 4 * width) // 2, vocabulary - 1)

    def waves(words: int) -> int:
        whole, last = divmod(vocabulary, words)
        return whole * _waves(taken, words, multiprocessors) + _waves(taken, last, multiprocessors)

    return taken, min(range(PIECE_WORDS, most + 1, TILE_WORDS), key=lambda words: (waves(words), -words))


def _waves(rows: int, words: int, multiprocessors: int) -> int:
    tiles = math.ceil(rows / ROWS_OF_TILE) * math.ceil(words / TILE_WORDS)
    return math.ceil(tiles / multiprocessors)


def tiles_across(width: int) -> int:
    """How many tiles of columns a row of the weight has."""
    return math.ceil(width / TILE_COLUMNS)


def has_many_tiles(vocabulary: int, width: int) -> bool:
    """Whether a weight's gradient is so large that a GPU need not share out the rows it is summed over."""
    return (width // TILE_COLUMNS) * (vocabulary // TILE_WORDS) >= MANY_TILES


# ---- refusals ------------------------------------------------------------------------------------------------------


def check(
    hidden: TensorInfo,
    weight: TensorInfo,
    targets: TensorInfo,
    bias: TensorInfo | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    reduction: str,
    max_bytes: int | None,
) -> None:
    """Raise RefusedInput for the first rule that is broken; every refusal of this op is worded here."""
    _check_dtypes(hidden, weight, targets, bias)
    _check_shapes(hidden, weight, targets, bias)
    for name, tensor in (("weight", weight), ("targets", targets), ("bias", bias)):
        if tensor is not None and tensor.device != hidden.device and tensor.device and hidden.device:
            raise refuse(
                f"{NAME}: all tensors must be on one device",
                f"hidden on {hidden.device} and {name} on {tensor.device}",
                f"Move {name} to {hidden.device}.",
            )
    check_options(ignore_index, label_smoothing, z_loss, softcap, reduction, max_bytes)


def check_options(
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    reduction: str,
    max_bytes: int | None,
) -> None:
    """Refuse options that mean nothing, whatever the tensors."""
    cross_entropy.check_options(NAME, ignore_index, label_smoothing, z_loss, softcap, reduction)
    if max_bytes is None:
        return
    if isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes < 1:
        got = f"max_bytes={max_bytes!r}"
        remedy = f"Pass max_bytes=1 << 28, or None for {DEFAULT_MAX_BYTES >> 20} MiB."
        raise refuse(f"{NAME}: max_bytes must be a whole number of bytes, 1 at least, or None", got, remedy)


def _check_dtypes(hidden: TensorInfo, weight: TensorInfo, targets: TensorInfo, bias: TensorInfo | None) -> None:
    for name, tensor in (("hidden", hidden), ("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.dtype not in DTYPE_BYTES:
            rule = f"{NAME}: {name} must be float32, float16 or bfloat16"
            raise refuse(rule, f"{name} {tensor}", f"Convert {name} to one of them.")
    if targets.dtype not in ("int32", "int64"):
        rule = f"{NAME}: targets must be int32 or int64, the number of the right word in each row"
        raise refuse(rule, f"targets {targets}", "Convert targets to int64.")


def _check_shapes(hidden: TensorInfo, weight: TensorInfo, targets: TensorInfo, bias: TensorInfo | None) -> None:
    if not 1 <= len(hidden.shape) <= MAX_RANK or hidden.shape[-1] < 1:
        rule = f"{NAME}: hidden must have 1 to {MAX_RANK} dimensions and a last one of 1 or more"
        raise refuse(rule, f"hidden {hidden}", "Pass rows of such a width, as (rows, width).")
    if len(weight.shape) != 2 or weight.shape[1] != hidden.shape[-1]:
        rule = f"{NAME}: weight must be [vocabulary, width], as wide as hidden's last dimension"
        raise refuse(rule, f"weight {weight} for hidden {hidden}", f"Pass a weight of shape [V, {hidden.shape[-1]}].")
    if not 1 <= weight.shape[0] <= MAX_VOCABULARY:
        rule = f"{NAME}: weight must have 1 to {MAX_VOCABULARY} rows, one for each word"
        raise refuse(
            rule, f"weight {weight}", "Pass one row for each word; a larger vocabulary needs a loss of your own."
        )
    if targets.shape != hidden.shape[:-1]:
        rule = f"{NAME}: targets must have hidden's shape without the last dimension"
        raise refuse(
            rule, f"targets {targets} for hidden {hidden}", f"Pass one target for each row, {list(hidden.shape[:-1])}."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        rule = f"{NAME}: bias must have one number for each row of the weight"
        raise refuse(rule, f"bias {bias} for weight {weight}", f"Pass a bias of shape [{weight.shape[0]}].")


# ---- the truth -----------------------------------------------------------------------------------------------------


def oracle(xp: Any, inputs: Arrays, options: Mapping[str, Any]) -> Arrays:
    """Forward in float64: all logits at once."""
    return cross_entropy.oracle(xp, _loss_inputs(inputs), _loss_options(options))


def oracle_backward(xp: Any, inputs: Arrays, cotangents: Arrays, options: Mapping[str, Any]) -> Arrays:
    """The formulas of the module's docstring, in float64."""
    hidden, weight = inputs["hidden"], inputs["weight"]
    made = cross_entropy.oracle_backward(xp, _loss_inputs(inputs), cotangents, _loss_options(options))
    dlogits = made["logits"].reshape(-1, weight.shape[0])  # [M, V]
    gradients = {
        "hidden": (dlogits @ weight).reshape(hidden.shape),
        "weight": dlogits.T @ hidden.reshape(-1, hidden.shape[-1]),
    }
    return gradients | ({"bias": dlogits.sum(0)} if "bias" in inputs else {})


def _loss_inputs(inputs: Arrays) -> Arrays:
    logits = inputs["hidden"] @ inputs["weight"].T
    return {"logits": logits + inputs["bias"] if "bias" in inputs else logits, "targets": inputs["targets"]}


def _loss_options(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name != "max_bytes"}


# ---- cases ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HeadCase(Case):
    """A case that says how large the vocabulary is, and in which range [low, high) its targets are drawn."""

    vocabulary: int = 1
    targets: tuple[int, int] = (0, 1)
    target_dtype: str = "int64"


def inputs(case: Case) -> dict[str, InputSpec]:
    """hidden, weight, targets and, where the case names it, a bias; logits of about unit size."""
    assert isinstance(case, HeadCase)
    width = case.shape[-1]
    made = {
        "hidden": InputSpec(case.shape, case.dtype),
        "weight": InputSpec((case.vocabulary, width), case.tensors["weight"], scale=1.5 / math.sqrt(width)),
        "targets": InputSpec(case.shape[:-1], case.target_dtype, differentiable=False, integers=case.targets),
    }
    if "bias" in case.tensors:
        made["bias"] = InputSpec((case.vocabulary,), case.tensors["bias"], scale=0.5)
    return made


def outputs(case: Case) -> tuple[str, ...]:
    """One loss, or one for each row."""
    return cross_entropy.outputs(case)


def cost(case: Case, which: str) -> Cost:
    """hidden, weight and targets once; dhidden and dweight once; three matmuls, one of them forward."""
    assert isinstance(case, HeadCase)
    rows, width = case.size // case.shape[-1], case.shape[-1]
    read = case.size * DTYPE_BYTES[case.dtype] + case.vocabulary * width * DTYPE_BYTES[case.tensors["weight"]]
    ids = rows * (8 if case.target_dtype == "int64" else 4)
    one = 2 * case.size * case.vocabulary
    if which == "forward":
        return Cost(read + ids, one)
    return Cost(2 * read + ids, 3 * one if which == "both" else 2 * one)


def _case(name: str, shape: tuple[int, ...], vocabulary: int, dtype: str, weight: str = "", **more: Any) -> HeadCase:
    """`weight` is its dtype, hidden's unless told; `more` is layout, bias, targets, target_dtype options."""
    tensors = {"weight": weight or dtype} | ({"bias": more.pop("bias")} if "bias" in more else {})
    own: dict[str, Any] = {key: more.pop(key) for key in ("layout", "target_dtype") if key in more}
    own["targets"] = more.pop("targets", (0, vocabulary))
    return HeadCase(name, shape, dtype, more, tensors, row_wise=False, vocabulary=vocabulary, **own)


F32, F16, BF16 = "float32", "float16", "bfloat16"
_ALL: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 1e-2, "softcap": 3.0}

CASES = (
    _case("one row", (1, 64), 100, F32),
    _case("one row without a batch", (24,), 33, F32),
    _case("one word", (5, 16), 1, F32),
    _case("a bias", (40, 48), 1000, F32, bias=BF16),
    _case("bf16", (70, 128), 1200, BF16),
    _case("fp16, mean", (300, 64), 257, F16),
    _case("fp16, sum", (9, 32), 77, F16, reduction="sum"),
    _case("losses", (33, 40), 130, F32, bias=F32, reduction="none"),
    _case("losses in blocks", (90, 16), 200, BF16, bias=BF16, reduction="none", max_bytes=13_000),
    _case("sum in blocks", (50, 32), 300, F32, bias=F16, reduction="sum", max_bytes=12_000),
    _case("blocks of a row", (7, 24), 90, F32, max_bytes=1),
    _case("blocks of tiles", (300, 32), 64, BF16, max_bytes=128 * 64 * 2),
    _case("blocks of fp16", (100, 16), 70, F16, bias=F32, max_bytes=5000),
    _case("fp32 weight, bf16 rows", (60, 64), 500, BF16, F32, bias=F32, max_bytes=20_000),
    _case("fp16 weight, fp32 rows", (30, 56), 150, F32, F16, bias=BF16),
    _case("large bf16 weight in blocks", (64, 256), 300, BF16, max_bytes=32 * 300 * 2),
    _case("large bf16 weight of whole tiles", (200, 512), 1032, BF16, max_bytes=64 * 1032 * 2),
    _case("ignored", (90, 16), 31, BF16, targets=(-3, 31), ignore_index=-3, max_bytes=2000),
    _case("beyond the vocabulary", (45, 40), 31, F32, targets=(-4, 40), ignore_index=7, target_dtype="int32"),
    _case("all ignored", (12, 32), 50, F16, targets=(-100, -99), **_ALL),
    _case("all ignored, bf16", (12, 32), 50, BF16, targets=(-100, -99)),
    _case("everything", (2, 50, 16), 99, BF16, bias=F32, targets=(-2, 99), ignore_index=-2, **_ALL, max_bytes=6500),
    _case("everything, losses", (4, 6, 48), 190, F32, bias=F32, reduction="none", **_ALL),
    _case("no rows", (0, 32), 40, BF16, bias=F32),
    _case("no rows, losses", (3, 0, 32), 40, F32, reduction="none"),
    _case("strided rows", (33, 32), 60, BF16, layout="strided"),
    _case("misaligned", (17, 64), 72, F32, layout="offset", max_bytes=2000),
    _case("transposed", (3, 5, 16), 40, F32, layout="transposed"),
)

BENCH_CASES = (
    _case("head of 128256", (4096, 4096), 128_256, BF16),
    _case("head of 128256", (16384, 4096), 128_256, BF16),
    *(
        _case(f"head of {vocabulary}", (rows, 4096), vocabulary, BF16)
        for vocabulary in (10_000, 50_304, 131_072)
        for rows in (64, 4096, 8192)
    ),
)

_HIDDEN, _WEIGHT = InputSpec((4, 8), F32), InputSpec((11, 8), F32)
_TARGETS = InputSpec((4,), "int32", differentiable=False, integers=(0, 11))
_GOOD = {"hidden": _HIDDEN, "weight": _WEIGHT, "targets": _TARGETS}


def _bad(name: str, says: tuple[str, ...], options: Mapping[str, Any] | None = None, **changed: InputSpec) -> BadCall:
    return BadCall(name, {**_GOOD, **changed}, options or {}, says)


BAD_CALLS = (
    _bad("integer hidden", ("hidden must be float32", "int32[4, 8]"), hidden=InputSpec((4, 8), "int32")),
    _bad("complex weight", ("weight must be float32", "complex64"), weight=InputSpec((11, 8), "complex64")),
    _bad("integer bias", ("bias must be float32", "int32[11]"), bias=InputSpec((11,), "int32")),
    _bad("fractional targets", ("targets must be int32 or int64", "float32[4]"), targets=InputSpec((4,), F32)),
    _bad("no dimensions", ("1 to 8 dimensions", "float32[]"), hidden=InputSpec((), F32)),
    _bad("width 0", ("1 or more", "float32[4, 0]"), hidden=InputSpec((4, 0), F32), weight=InputSpec((11, 0), F32)),
    _bad("narrow weight", ("as wide as hidden", "float32[11, 7]", "[V, 8]"), weight=InputSpec((11, 7), F32)),
    _bad("flat weight", ("[vocabulary, width]", "float32[8]"), weight=InputSpec((8,), F32)),
    _bad("no words", ("1 to 262144 rows", "float32[0, 8]"), weight=InputSpec((0, 8), F32)),
    _bad(
        "too many words",
        ("1 to 262144 rows", "[262145, 1]", "a loss of your own"),
        hidden=InputSpec((4, 1), F32),
        weight=InputSpec((MAX_VOCABULARY + 1, 1), F32),
    ),
    _bad("too few targets", ("without the last dimension", "[3] for hidden"), targets=InputSpec((3,), "int32")),
    _bad("targets of another shape", ("without the last", "int32[4, 1]"), targets=InputSpec((4, 1), "int32")),
    _bad("bias too long", ("one number for each row of the weight", "[12]"), bias=InputSpec((12,), F32)),
    _bad("smoothing above 1", ("label_smoothing", "1.5"), {"label_smoothing": 1.5}),
    _bad("softcap 0", ("softcap", "0.0"), {"softcap": 0.0}),
    _bad("z_loss infinite", ("z_loss", "inf"), {"z_loss": math.inf}),
    _bad("unknown reduction", ("reduction", "'average'"), {"reduction": "average"}),
    _bad("ignore_index no integer", ("ignore_index must be", "1.5"), {"ignore_index": 1.5}),
    _bad("max_bytes 0", ("max_bytes must be a whole number", "max_bytes=0"), {"max_bytes": 0}),
    _bad("max_bytes a float", ("max_bytes must be a whole number", "max_bytes=1000000.0"), {"max_bytes": 1e6}),
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
    bad_calls=BAD_CALLS,
    tolerance=Tolerance(rms=1.5),
    row_wise=False,  # which kernel a matmul takes, and so the order of its sums, depends on how many rows there are
    same_bits=False,
    passes=("both",),
)
