"""Cross-entropy: its mathematics, its contract, its truth in float64, its cases and its cost.

    t      = logits                              or, with a softcap, softcap * tanh(logits / softcap)
    lse    = log(sum(exp(t) over the last dimension))
    losses = lse - (1 - s) * t[target] - s * mean(t) + z_loss * lse^2          s = label_smoothing
    loss   = losses, their sum, or their sum / the number of targets that count, by `reduction`

A target counts when it is in [0, V) and is not ignore_index. Every other row has loss 0 and gradient 0, and is not
counted; the mean of no counted target is 0. The loss is fp32 whatever the dtype of the logits.

Backward, with g what arrives for a row's loss (for a mean: divided by the count):

    dt      = (1 + 2 * z_loss * lse) * exp(t - lse) - s / V - (1 - s where it is the target)
    dlogits = g * dt * (1 - (t / softcap)^2)     in the logits' dtype; the last factor with a softcap only

A training step nearly always sends g = 1, so forward makes the gradient for it while it has the logits at hand, and
backward has nothing left to do: one read and one write in all. For any other g the gradient is made anew from the
logits, so that it is rounded once. Saved for backward: logits, targets, lse and the count (one fp32 number per row,
and one); in place, the gradient alone, which has taken the place of the logits. Knows numpy and no framework.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
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
    check_number,
    refuse,
)

NAME = "cross_entropy"
MAX_WIDTH = 262_144
MAX_RANK = 8
INDEX_BYTES = {"int32": 4, "int64": 8}
REDUCTIONS = ("mean", "sum", "none")
# What ignore_index may be: the whole numbers that float64, as which XLA's scalars travel, holds exactly.
LARGEST_INDEX = 2**53
LARGEST_FP32 = 2.0**128 - 2.0**104
SMALLEST_FP32 = 2.0**-126  # the smallest whose inverse fp32 has too


def check(
    logits: TensorInfo,
    targets: TensorInfo,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    reduction: str,
) -> None:
    """Raise RefusedInput for the first rule that is broken; every refusal of this op is worded here."""
    _check_tensors(logits, targets)
    check_options(NAME, ignore_index, label_smoothing, z_loss, softcap, reduction)


def _check_tensors(logits: TensorInfo, targets: TensorInfo) -> None:
    if logits.dtype not in DTYPE_BYTES:
        rule = "cross_entropy: logits must be float32, float16 or bfloat16"
        raise refuse(rule, f"logits {logits}", "Convert logits to one of them.")
    if targets.dtype not in INDEX_BYTES:
        remedy = "Convert them, or use another loss for targets that are probabilities."
        raise refuse("cross_entropy: targets must be int32 or int64", f"targets {targets}", remedy)
    if not 1 <= len(logits.shape) <= MAX_RANK or not 1 <= logits.shape[-1] <= MAX_WIDTH:
        raise refuse(
            f"cross_entropy: logits must have 1 to {MAX_RANK} dimensions and a last one of 1 to {MAX_WIDTH}",
            f"logits {logits}",
            "Pass rows of such a width, as (rows, vocabulary).",
        )
    if targets.shape != logits.shape[:-1]:
        raise refuse(
            "cross_entropy: targets must have the shape of the logits without the last dimension",
            f"targets {targets} for logits {logits}",
            f"Pass one target for each row, {list(logits.shape[:-1])}; the vocabulary is the logits' last dimension.",
        )
    if targets.device != logits.device and targets.device and logits.device:
        raise refuse(
            "cross_entropy: all tensors must be on one device",
            f"logits on {logits.device} and targets on {targets.device}",
            f"Move targets to {logits.device}.",
        )


def check_options(
    op: str, ignore_index: int, label_smoothing: float, z_loss: float, softcap: float | None, reduction: str
) -> None:
    """The rules for what is no tensor, which every op that ends in this loss shares."""
    if not isinstance(ignore_index, int) or not -LARGEST_INDEX <= ignore_index <= LARGEST_INDEX:
        rule = f"{op}: ignore_index must be a Python int between -2^53 and 2^53"
        raise refuse(rule, f"ignore_index={ignore_index!r}", "Leave it out for -100.")
    numbers = {"label_smoothing": label_smoothing, "z_loss": z_loss} | ({} if softcap is None else {"softcap": softcap})
    for name, number in numbers.items():
        check_number(op, name, number)
    if not 0 <= label_smoothing <= 1:
        rule = f"{op}: label_smoothing must be a number from 0 to 1"
        raise refuse(rule, f"label_smoothing={label_smoothing}", "Pass 0.1, or leave it out for none.")
    if not 0 <= z_loss <= LARGEST_FP32:
        rule = f"{op}: z_loss must be a finite number, 0 or above"
        raise refuse(rule, f"z_loss={z_loss}", "Pass 1e-4, or leave it out for none.")
    if softcap is not None and not SMALLEST_FP32 <= softcap <= LARGEST_FP32:
        rule = f"{op}: softcap must be None or a finite number above 0, also when it is rounded to fp32"
        raise refuse(rule, f"softcap={softcap}", "Pass softcap=30.0, or None for none.")
    if reduction not in REDUCTIONS:
        rule = f"{op}: reduction must be one of {', '.join(REDUCTIONS)}"
        raise refuse(rule, f"{reduction!r}", "Leave it out for the mean.")


def stray_target(op: str, target: int, place: tuple[int, ...], width: int, ignore_index: int) -> RefusedInput:
    """The words for a target outside of the vocabulary, which is only looked for when debugging."""
    return refuse(
        f"{op}: a target must be at least 0 and below the number of logits in a row, or be ignore_index",
        f"target {target} at {list(place)} for rows of {width} logits and ignore_index={ignore_index}",
        "Correct it; when not debugging, such a target counts as ignored.",
    )


# ---- truth ---------------------------------------------------------------------------------------------------------


def oracle(xp: Any, inputs: Arrays, options: Mapping[str, Any]) -> Arrays:
    """Forward in float64."""
    t, lse, is_target, counts = _forward(xp, inputs, options)
    smoothing, z_loss = options.get("label_smoothing", 0.0), options.get("z_loss", 0.0)
    picked = xp.where(is_target, t, xp.zeros_like(t)).sum(-1)
    losses = lse - (1 - smoothing) * picked - smoothing * t.mean(-1) + z_loss * lse * lse
    losses = xp.where(counts, losses, xp.zeros_like(losses))
    reduction = options.get("reduction", "mean")
    if reduction == "none":
        return {"losses": losses}
    return {"loss": losses.sum() / (_count(counts) if reduction == "mean" else 1)}


def oracle_backward(xp: Any, inputs: Arrays, cotangents: Arrays, options: Mapping[str, Any]) -> Arrays:
    """The formulas of the module's docstring, in float64."""
    t, lse, is_target, counts = _forward(xp, inputs, options)
    smoothing, z_loss, softcap = options.get("label_smoothing", 0.0), options.get("z_loss", 0.0), options.get("softcap")
    reduction = options.get("reduction", "mean")
    if reduction == "none":
        g = cotangents["losses"]
    else:
        g = cotangents["loss"] / (_count(counts) if reduction == "mean" else 1) * xp.ones_like(lse)
    g = xp.where(counts, g, xp.zeros_like(g))
    lse = lse[..., None]
    dt = (1 + 2 * z_loss * lse) * xp.exp(t - lse) - smoothing / t.shape[-1]
    dt = dt - (1 - smoothing) * xp.where(is_target, xp.ones_like(t), xp.zeros_like(t))
    if softcap is not None:
        dt = dt * (1 - (t / softcap) * (t / softcap))
    return {"logits": g[..., None] * dt}


def _forward(xp: Any, inputs: Arrays, options: Mapping[str, Any]) -> tuple[Any, Any, Any, Any]:
    t, targets, softcap = inputs["logits"], inputs["targets"], options.get("softcap")
    width = t.shape[-1]
    if softcap is not None:
        t = softcap * xp.tanh(t / softcap)
    top = xp.amax(t, -1)
    lse = top + xp.log(xp.exp(t - top[..., None]).sum(-1))
    columns = xp.cumsum(xp.ones_like(t), -1) - 1  # an arange that lies where t does
    counts = (targets != options.get("ignore_index", -100)) & (targets >= 0) & (targets < width)
    return t, lse, (columns == targets[..., None]), counts


def _count(counts: Any) -> int:
    return max(int(counts.sum()), 1)


# ---- cases ---------------------------------------------------------------------------------------------------------


def inputs(case: Case) -> dict[str, InputSpec]:
    """Logits and targets; the case's `draw` says which targets: all inside, some beyond either end, or 5 for all."""
    width = case.shape[-1]
    drawn = {"": (0, width), "beyond": (-3, width + 3), "fives": (5, 6)}[case.draw]
    targets = InputSpec(case.shape[:-1], case.tensors["targets"], differentiable=False, integers=drawn)
    return {"logits": InputSpec(case.shape, case.dtype, scale=2.0), "targets": targets}


def outputs(case: Case) -> tuple[str, ...]:
    """One loss, or one for each row."""
    return ("losses",) if case.options.get("reduction") == "none" else ("loss",)


def cost(case: Case, which: str) -> Cost:
    """Logits are read once; with the gradient, which is made in the same go, written once."""
    rows = math.prod(case.shape[:-1])
    logits = case.size * DTYPE_BYTES[case.dtype]
    targets = rows * INDEX_BYTES[case.tensors["targets"]]
    if which == "forward":
        return Cost(logits + targets, 4 * case.size)
    return Cost(2 * logits + targets, 8 * case.size)


def _case(name: str, shape: tuple[int, ...], dtype: str, index: str = "int64", **more: Any) -> Case:
    layout, huge, draw = more.pop("layout", "contiguous"), more.pop("huge", False), more.pop("draw", "")
    alone = more.get("reduction", "mean") != "mean"  # a mean hangs on how many rows count
    return Case(name, shape, dtype, more, {"targets": index}, layout, huge, row_wise=alone, draw=draw)


F32, F16, BF16, I32 = "float32", "float16", "bfloat16", "int32"
_ALL: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 1e-2, "softcap": 3.0}

CASES = (
    _case("one row", (1, 64), F32),
    _case("one row without a batch", (77,), F32, I32),
    _case("one logit", (5, 1), BF16),
    _case("two logits", (5, 2), F32, reduction="none"),
    _case("few logits", (13, 7), F32, reduction="sum"),
    _case("odd width", (13, 1001), BF16, reduction="none"),
    _case("odd width fp32", (3, 77), F32, I32, reduction="none"),
    _case("not a power of two", (9, 1000), F16),
    _case("no rows", (0, 256), BF16),
    _case("no rows, losses", (2, 0, 256), F32, I32, reduction="none"),
    _case("three dimensions", (2, 3, 512), BF16, I32, reduction="none"),
    _case("three dimensions, mean", (2, 3, 512), F32),
    _case("ignored within the vocabulary", (40, 10), F32, ignore_index=3),
    _case("ignored within the vocabulary, losses", (40, 10), BF16, ignore_index=0, reduction="none"),
    _case("ignored below it", (64, 7), F16, I32, ignore_index=-2, draw="beyond"),
    _case("beyond the vocabulary", (64, 7), F32, draw="beyond"),
    _case("beyond the vocabulary, sum", (64, 12), BF16, I32, reduction="sum", draw="beyond"),
    _case("beyond the vocabulary, losses", (64, 9), F16, reduction="none", draw="beyond"),
    _case("all ignored", (6, 100), F32, ignore_index=5, draw="fives"),
    _case("all ignored, everything asked for", (6, 100), BF16, ignore_index=5, draw="fives", **_ALL),
    _case("smoothed", (8, 640), F32, label_smoothing=0.2),
    _case("smoothed, losses", (8, 333), BF16, label_smoothing=0.1, reduction="none"),
    _case("smoothed wholly", (8, 40), F32, label_smoothing=1.0, reduction="sum"),
    _case("z-loss", (8, 640), BF16, z_loss=1e-2),
    _case("softcap", (8, 640), BF16, I32, softcap=2.0, reduction="none"),
    _case("everything asked for", (12, 1000), F32, **_ALL),
    _case("everything asked for, losses", (33, 257), BF16, reduction="none", draw="beyond", **_ALL),
    _case("everything asked for, fp16 sum", (7, 2048), F16, I32, reduction="sum", **_ALL),
    _case("strided rows", (33, 256), BF16, reduction="none", layout="strided"),
    _case("misaligned", (17, 512), BF16, layout="offset"),
    _case("transposed", (3, 4, 5, 64), BF16, I32, reduction="none", layout="transposed"),
    _case("columns apart", (12, 40), F32, reduction="sum", layout="columns"),
    _case("many rows", (1500, 64), BF16),
    _case("many rows fp32", (700, 320), F32, reduction="none"),
    _case("10000 wide", (6, 10000), BF16),
    _case("32768 wide", (4, 32768), BF16, reduction="none"),
    _case("50257 wide", (3, 50257), BF16, I32, **_ALL),
    _case("50257 wide fp32", (2, 50257), F32, reduction="none"),
    _case("50304 wide", (3, 50304), F16),
    _case("131072 wide", (2, 131072), BF16, I32, reduction="sum"),
    _case("262144 wide", (2, 262144), F32, reduction="none"),
    _case("262144 wide, everything asked for", (2, 262144), BF16, **_ALL),
    _case("past 2^31 elements", (50_000, 50304), BF16, reduction="none", huge=True),
    _case("past 2^31 elements, odd width", (50_000, 50257), BF16, I32, reduction="none", huge=True),
)

# Vocabularies people train with, by the rows of a small step and of larger ones.
BENCH_CASES = tuple(_case("mean", (rows, width), BF16) for width in (10000, 50304, 131072) for rows in (64, 4096, 8192))

_LOGITS = InputSpec((4, 8), F32)
_TARGETS = InputSpec((4,), I32, differentiable=False, integers=(0, 8))
_GOOD = {"logits": _LOGITS, "targets": _TARGETS}


def _bad_option(name: str, option: str, value: Any, *says: str) -> BadCall:
    return BadCall(name, _GOOD, {option: value}, says)


def _bad_tensor(name: str, says: tuple[str, ...], **tensors: InputSpec) -> BadCall:
    return BadCall(name, {**_GOOD, **tensors}, {}, says)


BAD_CALLS = (
    _bad_tensor("integer logits", ("logits must be float32", "int32[4, 8]"), logits=InputSpec((4, 8), I32)),
    _bad_tensor("complex logits", ("logits must be float32", "complex64"), logits=InputSpec((4, 8), "complex64")),
    _bad_tensor("targets of one dimension more", ("without the last dimension",), targets=InputSpec((4, 1), I32)),
    _bad_tensor("fewer targets", ("int32[3] for logits float32[4, 8]",), targets=InputSpec((3,), I32)),
    _bad_tensor(
        "flat targets", ("one target for each row, [2, 2]", "last dimension"), logits=InputSpec((2, 2, 8), F32)
    ),
    _bad_tensor("probabilities", ("targets must be int32 or int64", "float32[4, 8]"), targets=_LOGITS),
    _bad_tensor("no dimensions", ("1 to 8 dimensions", "float32[]"), logits=InputSpec((), F32)),
    _bad_tensor("no vocabulary", ("a last one of 1 to 262144",), logits=InputSpec((4, 0), F32)),
    _bad_tensor("too wide", ("262144", "262145]"), logits=InputSpec((1, MAX_WIDTH + 1), F32)),
    _bad_option("smoothing negative", "label_smoothing", -0.1, "from 0 to 1", "label_smoothing=-0.1"),
    _bad_option("smoothing above 1", "label_smoothing", 1.5, "from 0 to 1", "label_smoothing=1.5"),
    _bad_option("smoothing NaN", "label_smoothing", math.nan, "from 0 to 1", "label_smoothing=nan"),
    _bad_option("smoothing None", "label_smoothing", None, "must be a Python number", "NoneType"),
    _bad_option("z-loss negative", "z_loss", -1e-4, "z_loss must be", "z_loss=-0.0001"),
    _bad_option("z-loss infinite", "z_loss", math.inf, "z_loss must be", "z_loss=inf"),
    _bad_option("z-loss NaN", "z_loss", math.nan, "z_loss must be", "z_loss=nan"),
    _bad_option("z-loss no number", "z_loss", "small", "must be a Python number", "str"),
    _bad_option("z-loss a truth value", "z_loss", True, "must be a Python number", "bool"),
    _bad_option("softcap 0", "softcap", 0.0, "softcap must be None or", "softcap=0.0"),
    _bad_option("softcap negative", "softcap", -30.0, "softcap must be None or", "softcap=-30.0"),
    _bad_option("softcap 0 in fp32", "softcap", 1e-50, "rounded to fp32", "softcap=1e-50"),
    _bad_option("softcap above fp32", "softcap", 1e39, "rounded to fp32", "softcap=1e+39"),
    _bad_option("softcap NaN", "softcap", math.nan, "softcap must be None or", "softcap=nan"),
    _bad_option("unknown reduction", "reduction", "average", "one of mean, sum, none", "'average'"),
    _bad_option("ignore_index no int", "ignore_index", 1.5, "ignore_index must be a Python int", "1.5"),
    _bad_option("ignore_index None", "ignore_index", None, "ignore_index must be a Python int", "None"),
    _bad_option("ignore_index too large", "ignore_index", 2**60, "between -2^53 and 2^53", str(2**60)),
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
    passes=("forward", "both"),
)
