"""The roofline rows: every op of the registry, its cases and passes, each implementation, against a copy's time.

Knows the registry, the timer and the peers; neither prints nor writes. A case's memory is made once and freed after it.
What cannot be measured becomes a note with its reason and never ends the run; so does what a time budget left out. For
that to hurt least, ops take turns and each begins with its large cases; at the end rows are in the registry's order.

    results = Results()
    run(Plan(ops=("rms_norm",), device="cuda"), results, on_step=print)
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from fuselm.bench import latency, peers
from fuselm.bench.accuracy import Errors, backward_truth, errors, forward_truth
from fuselm.bench.harness import Timer, Timing, timing_of
from fuselm.bench.latency import cut_down
from fuselm.bench.passes import Call, make_call, named
from fuselm.bench.peers import Peer
from fuselm.bench.report import LARGE_BYTES, ROW_FIELDS, Results, Row, as_row, is_arithmetic, shape_text
from fuselm.bench.tensors import as_tuple, make_cotangents, make_inputs
from fuselm.kernels.spec import Case, OpSpec, ops

# A CPU gets the same cases with fewer rows and words: elements of the largest, and of the largest with --quick.
CPU_ELEMENTS, CPU_QUICK_ELEMENTS = 1 << 21, 1 << 18
# Calls shorter than this take turns; those bound by arithmetic, as fast as a GPU at its limit of power, do too. But not
# those that take so many times as long as the best of their pass: of them the first figure is exact enough.
SHORT_US, FAR_BEHIND = 20.0, 1.3
TOO_LATE = "skipped: the time budget was used up"


@dataclass(frozen=True)
class Turns:
    """How many turns calls take, and how many repeats each; then more turns where the best of a pass are close.

    `more` has, one after another, how many turns there are then and how close is close: within what factor of the best.
    """

    first: int
    repeats: int
    more: tuple[tuple[int, float], ...] = ()
    moved: float = math.inf  # bytes of an input, above which it stays in its place


# The repeats of a turn share its moment and its place, so turns make a figure exact, and another one says more than
# more repeats. Twelve tell apart what differs by a tenth; only what differs by less than a twenty-fifth needs all 48. A
# short call cannot read the whole of a table above 128 MiB: where its rows lie is by chance anyway, and 48 copies of it
# would not fit.
SHORT, HOT = Turns(12, 16, ((12, 1.10), (24, 1.04)), moved=128 << 20), Turns(4, 10)


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
    done: frozenset[str] = frozenset()  # labels of steps that are left out, having been measured before

    def has_latencies(self, op: OpSpec) -> bool:
        """Whether it wants an op's latencies: where all cases are wanted, or some of the op's."""
        return not self.containing or bool(self.cases(op))

    def cases(self, op: OpSpec) -> list[Case]:
        """The bench cases of an op that this plan wants, in the registry's order."""
        chosen = first_of_each_kind(op.bench_cases) if self.quick else list(op.bench_cases)
        if self.device == "cpu":
            limit = CPU_QUICK_ELEMENTS if self.quick else CPU_ELEMENTS
            cut = (cut_down(case, limit) for case in chosen)
            chosen = list({repr(case): case for case in cut}.values())  # two that differed in rows alone are now one
        return [case for case in chosen if self.containing.lower() in case_label(op.name, case).lower()]


@dataclass
class Bench:
    """One op's case while it is measured: its tensors and everything they are compared with."""

    op: OpSpec
    case: Case
    timer: Timer
    tensors: dict[str, Tensor]
    cotangents: tuple[Tensor, ...] = ()
    truth: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    reference: dict[str, Errors] = field(default_factory=dict)

    def call(self, which: str, peer: Peer) -> Call:
        """An implementation's pass over this case as a function without arguments."""
        tensors = self.tensors
        if peer.in_place and which == "forward":  # in other passes it gets copies anyway
            tensors = {name: tensor.clone() if name in peer.overwrites else tensor for name, tensor in tensors.items()}
        return make_call(which, self.op, self.case, tensors, peer, self.cotangents)

    def elsewhere(self, largest: float) -> Bench:
        """The same with its inputs, of so many bytes at most, copied to other memory, where they lie as they did."""
        small = {name: tensor for name, tensor in self.tensors.items() if tensor.untyped_storage().nbytes() <= largest}
        return replace(self, tensors=self.tensors | {name: _copy(tensor) for name, tensor in small.items()})


def run(plan: Plan, results: Results, on_step: Callable[[str], None] = lambda text: None) -> None:
    """Measure everything the plan names into `results`, which is right at any moment it is interrupted."""
    deadline = time.monotonic() + plan.seconds
    timer = Timer(plan.device)
    try:
        for op, case in in_turn(plan):
            if time.monotonic() > deadline:
                which = "latency" if case is None else ""
                results.notes.append(_note(op, case or op.bench_cases[0], which, "all", TOO_LATE))
                continue
            on_step(step_label(op, case))
            if case is None:
                _measure_latencies(op, timer, plan, results)
            else:
                with timer.lane():
                    _measure_case(op, case, timer, plan, results)
                timer.release()
            # Looking through what torch.compile has loaded takes a fifth of a second, after each case: only once.
            if not gc.get_freeze_count():
                gc.freeze()
    finally:
        gc.unfreeze()
        _sort(plan, results)


def in_turn(plan: Plan) -> Iterator[tuple[OpSpec, Case | None]]:
    """What is measured, in its order: one of each op and again, large cases first; None is an op's latencies."""
    queues = []
    for op in (ops()[name] for name in plan.ops):
        cases = plan.cases(op)
        large = [case for case in cases if is_large(op, case)]
        small = [case for case in cases if not is_large(op, case)]
        ordered = [*large, *small]
        steps = [(op, case) for case in (*ordered[:1], None, *ordered[1:])]
        queues.append([step for step in steps if step[1] is not None or plan.has_latencies(op)])
    for layer in zip_longest(*queues):
        yield from (step for step in layer if step is not None and step_label(*step) not in plan.done)


def is_large(op: OpSpec, case: Case) -> bool:
    """Whether a pass moves so many bytes that its share of a copy's speed is the kernel's and not the launch's."""
    return any(op.cost(case, which).bytes >= LARGE_BYTES for which in op.passes)


def steps(plan: Plan) -> int:
    """How many times `run` will report a step."""
    return sum(1 for _ in in_turn(plan))


def device_name(plan: Plan) -> str:
    """What `device` says in a row: "cpu", or the label, or the GPU's name."""
    return "cpu" if plan.device == "cpu" else plan.label or torch.cuda.get_device_name()


def case_label(op: str, case: Case) -> str:
    """A case in words; `--filter` looks for its text in this."""
    return f"{op} {case.name} {shape_text(case.shape)} {case.dtype}"


def step_label(op: OpSpec, case: Case | None) -> str:
    """A step in words: a case, or an op's latencies."""
    return f"{op.name} latencies" if case is None else case_label(op.name, case)


def first_of_each_kind(cases: Sequence[Case]) -> list[Case]:
    """The first case of each name and dtype."""
    kinds: dict[tuple[str, str], Case] = {}
    for case in cases:
        kinds.setdefault((case.name, case.dtype), case)
    return list(kinds.values())


def _sort(plan: Plan, results: Results) -> None:
    """Rows in the order of the plan's ops and the registry's cases."""
    cases = ((name, case) for name in plan.ops for case in plan.cases(ops()[name]))
    places = {(name, case.name, case.dtype, case.shape): place for place, (name, case) in enumerate(cases)}
    results.rows.sort(key=lambda row: places.get((row["op"], row["case"], row["dtype"], tuple(row["shape"])), -1))


def _measure_latencies(op: OpSpec, timer: Timer, plan: Plan, results: Results) -> None:
    try:
        latency.measure(op, plan.device, plan.impls, timer, results, device_name(plan))
    except Exception as error:
        _failed(results, timer, _note(op, op.bench_cases[0], "latency", "fused", _words(error)))


def _measure_case(op: OpSpec, case: Case, timer: Timer, plan: Plan, results: Results) -> None:
    try:
        bench = _prepare(op, case, timer, plan.device)
    except Exception as error:
        _failed(results, timer, _note(op, case, "", "torch", _words(error)))
        return
    again: dict[Turns, list[tuple[Row, Peer]]] = {}
    for name, peer in peers.implementations(op.name, case, plan.device, plan.impls).items():
        if peer.call is None:
            results.notes.append(_note(op, case, "", name, peer.note))
            continue
        for which in op.passes:
            if which not in peer.passes:
                results.notes.append(_note(op, case, which, name, peer.note))
                continue
            try:
                row = _row(bench, which, name, device_name(plan), _measure(bench, which, peer))
            except Exception as error:
                _failed(results, timer, _note(op, case, which, name, _words(error)))
                continue
            results.rows.append(row)
            if timer.on_gpu and (turns := turns_of(row)):
                again.setdefault(turns, []).append((row, peer))
    try:
        for turns, timed in again.items():
            take_turns(bench, timed, turns)
    except Exception as error:
        _failed(results, timer, _note(op, case, "", "all", _words(error)))


def turns_of(row: Row) -> Turns | None:
    """Those that a call takes; None where the first figure is exact enough."""
    if row["gpu_us"] < SHORT_US:
        return SHORT
    return HOT if is_arithmetic(row) else None


def take_turns(bench: Bench, timed: Sequence[tuple[Row, Peer]], turns: Turns) -> None:
    """Time calls anew, one after another and over again, and give each row the median of all these repeats.

    The same kernel over the same memory took 4.2 us in one tenth of a second and 4.8 in the next, on an idle H200, and
    as much less or more over other memory: more than implementations differ by. So each turn has its inputs elsewhere
    and begins with the next call, and what a call holds is given back before the one after it: all are offered the same
    places. And the same matmul took 1.41 ms and, the GPU being hotter, 1.75 two seconds later.
    """
    before: list[Bench] = []  # of each turn so far: they stay where they are
    near = worth_turns(timed)
    samples: list[list[float]] = [[] for _ in near]
    graphs = [True for _ in near]
    for count, within in ((turns.first, math.inf), *turns.more):
        left = close_calls(near, samples, within) if before else list(range(len(near)))  # whose turn comes
        for turn in range(len(before), len(before) + count if left else 0):
            before.append(bench)
            bench = bench.elsewhere(turns.moved)
            for step in range(turn, turn + len(left)):
                place = left[step % len(left)]
                row, peer = near[place]
                with torch.set_grad_enabled(row["pass"] != "forward"):
                    found, graph = bench.timer.device_samples(
                        bench.call(row["pass"], peer), peer.capture, turns.repeats
                    )
                samples[place] += found
                graphs[place] &= graph
    for (row, _), found, graph in zip(near, samples, graphs, strict=True):
        anew = _timed(timing_of(found, graph), row["bytes"], row["copy_us"])
        row.update(as_row(anew, tuple(anew)))


def close_calls(near: Sequence[tuple[Row, Peer]], samples: Sequence[Sequence[float]], within: float) -> list[int]:
    """The places of those that, by the median, are within a factor of the fastest of their pass, if not it alone."""
    found: list[int] = []
    for which in dict.fromkeys(row["pass"] for row, _ in near):
        medians = {p: statistics.median(samples[p]) for p, (row, _) in enumerate(near) if row["pass"] == which}
        close = [place for place, us in medians.items() if us <= within * min(medians.values())]
        found += close if len(close) > 1 else []
    return found


def worth_turns(timed: Sequence[tuple[Row, Peer]]) -> list[tuple[Row, Peer]]:
    """Those that are not far behind the best of their pass."""
    best: dict[str, float] = {}
    for row, _ in timed:
        best[row["pass"]] = min(row["gpu_us"], best.get(row["pass"], math.inf))
    return [(row, peer) for row, peer in timed if row["gpu_us"] < FAR_BEHIND * best[row["pass"]]]


def _copy(tensor: Tensor) -> Tensor:
    """A tensor of the same numbers that lies in memory of its own as this one lies in its."""
    memory = tensor.untyped_storage().clone()
    return tensor.new_empty(0).set_(memory, tensor.storage_offset(), tensor.size(), tensor.stride())


def _prepare(op: OpSpec, case: Case, timer: Timer, device: str) -> Bench:
    """Inputs, cotangents, the float64 truth, and the errors of torch's own kernel that others are compared with."""
    bench = Bench(op, case, timer, make_inputs(op, case, device))
    torch_op = Peer(peers.reference(op.name))
    with torch.no_grad():
        outputs = as_tuple(bench.call("forward", torch_op)())
    names = op.outputs(case)
    bench.cotangents = make_cotangents(outputs, case) if "backward" in op.passes else ()
    ones = tuple(torch.ones_like(output) for output in outputs) if "both" in op.passes else ()
    for which in op.passes:
        if which == "forward":
            bench.truth[which] = forward_truth(op, case, bench.tensors)
        else:
            incoming = bench.cotangents if which == "backward" else ones
            bench.truth[which] = backward_truth(op, case, bench.tensors, dict(zip(names, incoming, strict=True)))
        bench.reference[which] = _errors(bench, which, bench.call(which, torch_op))
    return bench


def _measure(bench: Bench, which: str, peer: Peer) -> dict[str, Any]:
    timer, call = bench.timer, bench.call(which, peer)
    # Errors first: a peer may overwrite what it was given. Nothing is compiled a second time for the timing.
    found = _errors(bench, which, call) if peer.compares else Errors()
    if found.max is not None and not math.isfinite(found.max):
        raise ArithmeticError("the result is NaN or infinite where float64's is not")
    with torch.set_grad_enabled(which != "forward"):
        extra = timer.extra_memory(call) if which == "both" else None
        timing = timer.device_time(call, capture=peer.capture)
        call_us = timer.call_time(call, batches=3, gpu_us=timing.us) if timer.on_gpu else timing.us
    nbytes = bench.op.cost(bench.case, which).bytes
    return {
        **_timed(timing, nbytes, timer.copy_time(nbytes).us),
        "call_us": call_us,
        "max_error": found.max,
        "rms_error": found.rms,
        "extra_bytes": extra,
    }


def _timed(timing: Timing, nbytes: int, copy_us: float) -> dict[str, Any]:
    """What a row says of a call's time, beside that of a copy of as many bytes."""
    return {
        "gpu_us": timing.us,
        "gpu_us_p10": timing.p10,
        "gpu_us_p90": timing.p90,
        "graph": timing.graph,
        "copy_us": copy_us,
        "share_of_copy": copy_us / timing.us,
        "tbytes_per_s": nbytes / timing.us / 1e6,
    }


def _errors(bench: Bench, which: str, call: Call) -> Errors:
    with torch.set_grad_enabled(which != "forward"):
        got = named(bench.op, bench.case, which, call())
    return errors(bench.case, got, bench.truth[which])


def _row(bench: Bench, which: str, impl: str, device: str, measured: Mapping[str, Any]) -> Row:
    case, cost = bench.case, bench.op.cost(bench.case, which)
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
