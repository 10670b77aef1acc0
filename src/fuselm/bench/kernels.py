"""The roofline rows: every op of the registry, its cases, both passes, each implementation, against a copy's time.

Knows the registry, the timer and the peers; neither prints nor writes. A case's memory is made once and freed after it.
What cannot be measured becomes a note with its reason and never ends the run; so does what a time budget left out.

    results = Results()
    run(Plan(ops=("rms_norm",), device="cuda"), results, on_step=print)
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fuselm.bench import latency, peers
from fuselm.bench.accuracy import Errors, backward_truth, errors, forward_truth
from fuselm.bench.harness import Timer
from fuselm.bench.report import ROW_FIELDS, Results, Row, as_row, shape_text
from fuselm.bench.tensors import as_tuple, make_cotangents, make_inputs
from fuselm.kernels.spec import Case, OpSpec, ops

PASSES = ("forward", "backward")
# A CPU gets the same cases with fewer rows: elements of the largest, and of the largest with --quick.
CPU_ELEMENTS, CPU_QUICK_ELEMENTS = 1 << 21, 1 << 18


class DeviceLost(RuntimeError):
    """The GPU has failed in a way that ends the process's use of it."""


@dataclass(frozen=True)
class Plan:
    """What to measure. `seconds` bounds the whole run; whatever is left over then is noted as skipped."""

    ops: tuple[str, ...]
    device: str
    impls: tuple[str, ...] = peers.NAMES
    quick: bool = False
    containing: str = ""
    seconds: float = math.inf
    label: str = ""

    def cases(self, op: OpSpec) -> list[Case]:
        """The bench cases of an op that this plan wants, in the registry's order."""
        chosen = first_of_each_kind(op.bench_cases) if self.quick else list(op.bench_cases)
        if self.device == "cpu":
            limit = CPU_QUICK_ELEMENTS if self.quick else CPU_ELEMENTS
            cut = (with_fewer_rows(case, limit) for case in chosen)
            chosen = list({repr(case): case for case in cut}.values())  # two that differed in rows alone are now one
        return [case for case in chosen if self.containing.lower() in case_label(op.name, case).lower()]


@dataclass
class Bench:
    """One op's case while it is measured: its tensors and everything they are compared with."""

    op: OpSpec
    case: Case
    timer: Timer
    device: str
    tensors: dict[str, Tensor]
    cotangents: tuple[Tensor, ...] = ()
    truth: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    reference: dict[str, Errors] = field(default_factory=dict)


def run(plan: Plan, results: Results, on_step: Callable[[str], None] = lambda text: None) -> None:
    """Measure everything the plan names into `results`, which is right at any moment it is interrupted."""
    deadline = time.monotonic() + plan.seconds
    timer = Timer(plan.device)
    for op in (ops()[name] for name in plan.ops):
        for case in plan.cases(op):
            if time.monotonic() > deadline:
                results.notes.append(_note(op, case, "", "all", "skipped: the time budget was used up"))
                continue
            on_step(case_label(op.name, case))
            with timer.lane():
                _measure_case(op, case, timer, plan, results)
            timer.release()
        on_step(f"{op.name} latencies")
        try:
            latency.measure(op, plan.device, plan.impls, timer, results, device_name(plan))
        except Exception as error:
            _failed(results, timer, _note(op, op.bench_cases[0], "latency", "fused", _words(error)))


def steps(plan: Plan) -> int:
    """How many times `run` will report a step."""
    return sum(len(plan.cases(ops()[name])) + 1 for name in plan.ops)


def device_name(plan: Plan) -> str:
    """What `device` says in a row: "cpu", or the label, or the GPU's name."""
    return "cpu" if plan.device == "cpu" else plan.label or torch.cuda.get_device_name()


def case_label(op: str, case: Case) -> str:
    """A case in words; `--filter` looks for its text in this."""
    return f"{op} {case.name} {shape_text(case.shape)} {case.dtype}"


def first_of_each_kind(cases: Sequence[Case]) -> list[Case]:
    """The first case of each name and dtype."""
    kinds: dict[tuple[str, str], Case] = {}
    for case in cases:
        kinds.setdefault((case.name, case.dtype), case)
    return list(kinds.values())


def with_fewer_rows(case: Case, elements: int) -> Case:
    """The case with its first dimension cut so that it has at most so many elements (and at least one row)."""
    rows = max(1, min(case.shape[0], elements // max(math.prod(case.shape[1:]), 1)))
    return replace(case, shape=(rows, *case.shape[1:])) if len(case.shape) > 1 else case


def _measure_case(op: OpSpec, case: Case, timer: Timer, plan: Plan, results: Results) -> None:
    try:
        bench = _prepare(op, case, timer, plan.device)
    except Exception as error:
        _failed(results, timer, _note(op, case, "", "torch", _words(error)))
        return
    for name, peer in peers.implementations(op.name, case, plan.device, plan.impls).items():
        if peer.call is None:
            results.notes.append(_note(op, case, "", name, peer.note))
            continue
        for which in PASSES:
            try:
                row = _row(bench, which, name, device_name(plan), _measure(bench, which, peer.call))
            except Exception as error:
                _failed(results, timer, _note(op, case, which, name, _words(error)))
                continue
            results.rows.append(row)


def _prepare(op: OpSpec, case: Case, timer: Timer, device: str) -> Bench:
    """Inputs, cotangents, the float64 truth, and the errors of torch's own kernel that others are compared with."""
    bench = Bench(op, case, timer, device, make_inputs(op, case, device))
    torch_op = peers.reference(op.name)
    outputs = as_tuple(_forward(bench, torch_op)())
    bench.cotangents = make_cotangents(outputs, case)
    named = dict(zip(op.outputs(case), bench.cotangents, strict=True))
    bench.truth["forward"] = forward_truth(op, case, bench.tensors)
    bench.truth["backward"] = backward_truth(op, case, bench.tensors, named)
    for which in PASSES:
        bench.reference[which] = _errors(bench, which, _CALLS[which](bench, torch_op))
    return bench


def _measure(bench: Bench, which: str, implementation: Callable[..., Any]) -> dict[str, Any]:
    call = _CALLS[which](bench, implementation)
    found = _errors(bench, which, call)  # before it is timed: a peer may overwrite what it is given
    if found.max is not None and not math.isfinite(found.max):
        raise ArithmeticError("the result is NaN or infinite where float64's is not")
    with torch.set_grad_enabled(which == "backward"):
        timing = bench.timer.device_time(call)
        call_us = bench.timer.call_time(call) if bench.timer.on_gpu else timing.us
    return {
        "gpu_us": timing.us,
        "gpu_us_p10": timing.p10,
        "gpu_us_p90": timing.p90,
        "call_us": call_us,
        "max_error": found.max,
        "rms_error": found.rms,
        "graph": timing.graph,
    }


def _forward(bench: Bench, implementation: Callable[..., Any]) -> Callable[[], Any]:
    """The forward of a user who wants no gradient: `_measure` switches grad off around it."""
    tensors, options = bench.tensors, bench.case.options
    return lambda: implementation(**tensors, **options)


def _backward(bench: Bench, implementation: Callable[..., Any]) -> Callable[[], Any]:
    """The backward alone, over a graph that one forward has made and that is kept."""
    specs = bench.op.inputs(bench.case)
    leaves = {k: t.detach().requires_grad_(specs[k].differentiable) for k, t in bench.tensors.items()}
    with torch.enable_grad():
        outputs = as_tuple(implementation(**leaves, **bench.case.options))
    wanted = [leaf for leaf in leaves.values() if leaf.requires_grad]
    # Cotangents of its own: Liger writes dx over dy unless told otherwise.
    cotangents = [cotangent.clone() for cotangent in bench.cotangents]
    return lambda: torch.autograd.grad(outputs, wanted, cotangents, retain_graph=True)


_CALLS = {"forward": _forward, "backward": _backward}


def _errors(bench: Bench, which: str, call: Callable[[], Any]) -> Errors:
    if which == "forward":
        with torch.no_grad():
            got = dict(zip(bench.op.outputs(bench.case), as_tuple(call()), strict=True))
    else:
        specs = bench.op.inputs(bench.case)
        got = dict(zip((k for k, s in specs.items() if s.differentiable), call(), strict=True))
    return errors(bench.case, got, bench.truth[which])


def _row(bench: Bench, which: str, impl: str, device: str, measured: Mapping[str, Any]) -> Row:
    case, cost = bench.case, bench.op.cost(bench.case, which)
    copy_us = bench.timer.copy_time(cost.bytes).us
    reference = bench.reference[which]
    return as_row(
        {
            "op": bench.op.name,
            "pass": which,
            "case": case.name,
            "dtype": case.dtype,
            "shape": list(case.shape),
            "impl": impl,
            "device": device,
            **measured,
            "bytes": cost.bytes,
            "flops": cost.flops,
            "copy_us": copy_us,
            "share_of_copy": copy_us / measured["gpu_us"],
            "tbytes_per_s": cost.bytes / measured["gpu_us"] / 1e6,
            "reference_error": reference.max,
            "reference_rms_error": reference.rms,
        },
        ROW_FIELDS,
    )


def _note(op: OpSpec, case: Case, which: str, impl: str, words: str) -> Row:
    what = {"case": case.name, "dtype": case.dtype, "shape": list(case.shape)}
    return {"op": op.name, "pass": which, **what, "impl": impl, "note": words}


def _failed(results: Results, timer: Timer, note: Row) -> None:
    """Note a failure and go on, unless the device itself is lost: then nothing measured after it would be true."""
    results.notes.append(note)
    try:
        timer.synchronize()
    except Exception as error:
        where = f"{note['op']} {note['pass']} {note['impl']} {shape_text(note['shape'])}"
        raise DeviceLost(f"The GPU failed during {where}: {_words(error)}. Run that case alone to see more.") from error
    timer.release()


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:300]}"
