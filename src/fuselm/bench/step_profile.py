"""Where a training step's time goes, kernel by kernel: torch's profiler over a few steps, summed by kind of work.

Knows the profiler and how kernels are called; of a step it knows that it can be made. On a GPU it counts kernels and
copies on the device, on a CPU the time that torch's ops take by themselves.

    found = profiled(trainer.advance, torch.device("cuda"))
    found["kernels"], found["gap_ms"]          # what ran, and how long in a step nothing did
    found["slower_ms"]                         # how much longer a step takes when nobody looks
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

Row = dict[str, Any]
STEPS = 5  # that are profiled: kernels differ little from step to step
MOST_KERNELS = 60  # that are kept, by their time; the rest is one row

# The first that fits names the kind. Names are those of cuBLAS, cuDNN, flash attention, Triton, ATen, and of CPU ops.
KINDS = (
    ("fuselm", r"fuselm"),
    ("attention", r"fmha|flash|sdpa|attention|mha_"),
    ("torch.compile", r"^triton_|^cpp_fused"),
    ("matmul", r"gemm|nvjet|cutlass|cublas|splitk|gemv|::mm$|::addmm$|::bmm$|::linear$|::_grouped_mm$|::matmul$"),
    ("copy", r"[mM]emcpy|[mM]emset|copy_|CatArray|direct_copy|::clone$|::cat$|::fill_$|::zero_$|FillFunctor"),
    ("reduction", r"LpNorm|_foreach_norm"),
    ("optimizer", r"multi_tensor_apply|_foreach_|FusedAdam|_fused_adam"),
    ("dropout", r"dropout|bernoulli"),
    ("sort and index", r"sort|[sS]can|index|gather|scatter|topk|embedding|cub::"),
    ("reduction", r"reduce|norm|softmax|sum|mean|nll_loss|dot$"),
    ("elementwise", r"elementwise|^aten::(mul|add|sub|div|neg|pow|rsqrt|exp|log|where|silu|gelu|sigmoid|tanh)"),
)
OTHER = "other"
REST = {"gap_ms": "nothing", "slower_ms": "longer without a profiler"}  # what is of no kernel


def kind_of(name: str) -> str:
    """The kind of work that a kernel, or an op, does."""
    return next((kind for kind, pattern in KINDS if re.search(pattern, name)), OTHER)


def short(name: str) -> str:
    """A kernel's name without return type, arguments and templates; of ours the launcher's."""
    if found := re.search(r"(\w+)_kernel\b", name) if "fuselm" in name else None:
        return f"fuselm {'elementwise' if found[1] in ('flat', 'strided', 'any', 'backward_row') else found[1]}"
    bare = re.sub(r"^void\s+|\(anonymous namespace\)::", "", name)
    while bare != (bare := re.sub(r"<[^<>]*>", "", bare)):  # from the innermost out
        pass
    return bare.partition("(")[0].replace("at::native::", "").strip()[:80] or name[:80]


def profiled(step: Callable[[], object], device: torch.device, steps: int = STEPS) -> Row:
    """A step's kernels with calls and milliseconds, and its length; `gap_ms` is when the device had nothing to do.

    That is the lesser of two figures: what kernels leave of a step without a profiler, which makes a host slower and
    its gaps longer; and what they leave of the profile, for kernels may be faster there, as is suspected of a GPU at
    its limit of power that has waited for a moment. `slower_ms` is what kernels and gaps leave of a step.
    """
    from torch.profiler import ProfilerActivity, profile

    on_gpu = device.type == "cuda"
    step()  # whatever happened in between is behind us
    wait(device)
    # The clock runs over steps without a profiler: it makes every launch slower.
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    wait(device)
    step_ms = 1e3 * (time.perf_counter() - begin) / steps
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    with profile(activities=[activity], acc_events=True) as profiler:  # without which some releases of torch warn
        for _ in range(steps):
            step()
        wait(device)
    kernels = summed(_events(profiler, on_gpu), steps)
    if not kernels:
        raise RuntimeError(f"A step has kernels; the profiler saw none on {device}. It may lack the right to look.")
    left = max(step_ms - sum(row["ms"] for row in kernels), 0.0)
    times = {"step_ms": step_ms, "gap_ms": left}
    if on_gpu:
        times["gap_ms"] = min(left, idle_us(_spans(profiler)) / 1e3 / steps)
        times["slower_ms"] = left - times["gap_ms"]
    return {**{name: round(ms, 4) for name, ms in times.items()}, "kernels": _largest(kernels)}


def wait(device: torch.device) -> None:
    """Until a GPU has done all that was launched."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _events(profiler: Any, on_gpu: bool) -> list[tuple[str, float, int]]:
    """Name, microseconds and calls of everything that ran."""
    if not on_gpu:
        return [(event.key, event.self_cpu_time_total, event.count) for event in profiler.key_averages()]
    return [(event.name, event.time_range.elapsed_us(), 1) for event in _on_device(profiler)]


def _on_device(profiler: Any) -> list[Any]:
    # An annotation spans kernels that are there themselves.
    return [e for e in profiler.events() if e.device_type.name == "CUDA" and not e.is_user_annotation]


def _spans(profiler: Any) -> list[tuple[float, float]]:
    return [(event.time_range.start, event.time_range.end) for event in _on_device(profiler)]


def idle_us(spans: Sequence[tuple[float, float]]) -> float:
    """Between the first beginning and the last end, how long nothing ran; two at a time count once."""
    idle, until = 0.0, math.inf
    for start, end in sorted(spans):
        idle += max(start - until, 0.0)
        until = end if until == math.inf else max(until, end)
    return idle


def summed(events: Sequence[tuple[str, float, int]], steps: int) -> list[Row]:
    """A row for each kernel: its kind, calls and milliseconds of a step; the longest first."""
    rows: dict[tuple[str, str], Row] = {}
    for name, us, calls in events:
        if re.match(r"ProfilerStep|Optimizer\.|## |cuda[A-Z]|Activity Buffer", name):  # annotations, launches, waiting
            continue
        # By both: torch's elementwise kernels have one name for copies, fills and arithmetic.
        key = kind_of(name), short(name)
        row = rows.setdefault(key, {"kind": key[0], "kernel": key[1], "calls": 0.0, "ms": 0.0})
        row["calls"] += calls / steps
        row["ms"] += us / 1e3 / steps
    return sorted((row for row in rows.values() if row["ms"] > 0), key=lambda row: -row["ms"])


def _largest(rows: Sequence[Row]) -> list[Row]:
    """Those that count; the rest as one."""
    kept, rest = list(rows[:MOST_KERNELS]), rows[MOST_KERNELS:]
    if rest:
        calls, ms = (sum(row[name] for row in rest) for name in ("calls", "ms"))
        kept.append({"kind": OTHER, "kernel": f"{len(rest)} more", "calls": calls, "ms": ms})
    return [{**row, "calls": round(row["calls"], 2), "ms": round(row["ms"], 5)} for row in kept]


def by_kind(found: Row) -> list[Row]:
    """Milliseconds of a step for each kind of work, for none, and what it takes longer when nobody looks."""
    kinds: dict[str, float] = {}
    for row in found["kernels"]:
        kinds[row["kind"]] = kinds.get(row["kind"], 0.0) + row["ms"]
    ordered = sorted(kinds.items(), key=lambda pair: -pair[1])
    rest = [(words, found[name]) for name, words in REST.items() if name in found]
    return [{"kind": kind, "ms": round(ms, 4)} for kind, ms in (*ordered, *rest)]
