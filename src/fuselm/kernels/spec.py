"""The registry of ops: what each promises, so that tests and benchmarks can be written once for all of them.

Knows numpy and no framework. An op is a module `kernels/<op>.py` beside `<op>.cu` that holds `SPEC`, an `OpSpec`; it is
found by its file name, nobody lists it. The generic suite (tests/kernels/test_generic*.py) and `fuselm bench kernels`
walk `ops()`: a new op gets its tests against the float64 oracle and its roofline rows from its `SPEC` alone.

    for name, op in ops().items():
        for case in op.cases: ...
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from numbers import Integral
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
# Spacing of the numbers just above 1: the unit in which the tests allow one step of slack.
DTYPE_EPS = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


class RefusedInput(ValueError):
    """An op was called with something outside its contract; the message is the rule, what arrived, and the remedy."""


@dataclass(frozen=True)
class TensorInfo:
    """All that `check()` may look at: a tensor of any framework without its data."""

    shape: tuple[int, ...]
    dtype: str
    device: str = ""  # "" when the framework does not say, as inside a traced JAX function

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}" + (f" on {self.device}" if self.device else "")


@dataclass(frozen=True)
class InputSpec:
    """A tensor argument of a case: how to make it and whether it has a gradient."""

    shape: tuple[int, ...]
    dtype: str
    differentiable: bool = True
    mean: float = 0.0
    scale: float = 1.0
    integers: tuple[int, int] | None = None  # whole numbers drawn evenly from [low, high), as targets are


@dataclass(frozen=True)
class Case:
    """One call of an op: a main shape, a dtype, options, and how the main input lies in memory."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    options: Mapping[str, Any] = field(default_factory=dict)
    # Which optional tensors are there, by dtype: {"weight": "float32"}.
    tensors: Mapping[str, str] = field(default_factory=dict)
    layout: str = "contiguous"  # or strided, offset, transposed, columns: see tests/kernels/arrays.py
    huge: bool = False  # more than 2^31 elements: a GPU, and only rows around the boundary are checked
    row_wise: bool = True  # False where a row's result depends on other rows: a mean over them, a causal mask
    # A word of the op's own for how `inputs` draws this case's numbers. By name only, as what subclasses add: a value
    # meant for them would land here.
    draw: str = field(default="", kw_only=True)

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class BadCall:
    """A call that must be refused; `says` are words the one message must contain, the same from every framework."""

    name: str
    tensors: Mapping[str, InputSpec]
    options: Mapping[str, Any]
    says: tuple[str, ...]


@dataclass(frozen=True)
class Cost:
    """The two floors of a call: the fewest bytes it can move and the operations it must do."""

    bytes: int
    flops: int


@dataclass(frozen=True)
class Tolerance:
    """Error allowed against float64, as multiples of the error of torch's own kernel on the same input."""

    rms: float = 1.05
    max: float = 1.5
    ulps: float = 1.0  # of the largest number, allowed to the max error on top
    rms_ulps: float = 0.0  # and to the rms error


Arrays = dict[str, Any]


@dataclass(frozen=True)
class OpSpec:
    """One op. Functions that take `xp` work with numpy and with torch alike: float64 in, float64 out."""

    name: str
    inputs: Callable[[Case], dict[str, InputSpec]]
    outputs: Callable[[Case], tuple[str, ...]]
    oracle: Callable[[Any, Arrays, Mapping[str, Any]], Arrays]
    oracle_backward: Callable[[Any, Arrays, Arrays, Mapping[str, Any]], Arrays]
    cost: Callable[[Case, str], Cost]  # the pass: one of `passes`
    cases: tuple[Case, ...]
    bench_cases: tuple[Case, ...]
    decode_cases: tuple[Case, ...] = ()  # small shapes, for latency percentiles
    bad_calls: tuple[BadCall, ...] = ()
    tolerance: Tolerance = Tolerance()
    # True when each row's result depends on that row alone: then it must not depend, to the bit, on the other rows.
    # A case may be the exception.
    row_wise: bool = True
    # True when kernels do all of the work: then PyTorch and JAX, eager and compiled, agree to the bit. Matrix products
    # are each framework's own.
    same_bits: bool = True
    # False when torch's own formula, the reference, rounds more often than the op does.
    rounds_alike: bool = True
    # Outputs that PyTorch gives as views of an input, which have gaps.
    views: tuple[str, ...] = ()
    # What is timed: "both" is forward and backward as one training step has them, the incoming gradient being 1.
    passes: tuple[str, ...] = ("forward", "backward")

    def is_row_wise(self, case: Case) -> bool:
        """Whether each row of this case's result depends on that row alone."""
        return self.row_wise and case.row_wise

    def row_inputs(self, case: Case) -> frozenset[str]:
        """The inputs that have something for each row of the case: numbers, or one number, as targets are."""
        specs = self.inputs(case)
        if len(case.shape) < 2:
            return frozenset(name for name, spec in specs.items() if spec.shape == case.shape)
        # Where there are as many rows as columns a weight looks like a target: only one of them grows with the rows.
        taller = self.inputs(replace(case, shape=(case.shape[0] + 1, *case.shape[1:])))
        return frozenset(
            name for name, spec in specs.items() if has_rows(case, spec.shape) and spec.shape != taller[name].shape
        )


def has_rows(case: Case, shape: tuple[int, ...]) -> bool:
    """Whether an output of that shape has something for each row of a case; a sum over rows, say, has not."""
    rows = case.shape[:-1]
    return shape == case.shape or (bool(rows) and shape[: len(rows)] == rows and len(shape) <= len(case.shape))


def op_names(folder: Path = HERE) -> list[str]:
    """Every op of a kernels folder: a stem that has both a .cu and a .py."""
    return sorted(cu.stem for cu in folder.glob("*.cu") if cu.with_suffix(".py").exists())


def ops() -> dict[str, OpSpec]:
    """All ops by name."""
    found = {}
    for name in op_names():
        module = importlib.import_module(f"fuselm.kernels.{name}")
        found[name] = module.SPEC
    return found


def refuse(rule: str, arrived: str, remedy: str) -> RefusedInput:
    """The one shape of every refusal: what must hold, what came, what to do."""
    return RefusedInput(f"{rule}; got {arrived}. {remedy}")


def is_of_numpy(value: Any) -> bool:
    """Whether it is an array or a scalar of numpy's, by name: torch.compile asks too, and knows no np.generic."""
    return type(value).__module__ == "numpy"


def as_whole(given: Any) -> int | None:
    """A whole number as an int, numpy's too, and nothing of what is none; no truth value counts as one."""
    if isinstance(given, int):
        return None if isinstance(given, bool) else given
    return int(given) if is_of_numpy(given) and isinstance(given, Integral) else None


def check_number(op: str, name: str, number: object) -> None:
    """Refuse an option that is no number: tensors, numpy's fp32 and truth values would pass in one framework only."""
    if isinstance(number, bool) or not isinstance(number, int | float):
        got = f"{name} of type {type(number).__name__}"
        raise refuse(f"{op}: {name} must be a Python number", got, f"Pass a float for {name}.")
