"""Latencies of small calls: the decode table (inside a CUDA graph, and with a wait) and the host time of one call.

Knows the registry, the timer and the peers; neither prints nor writes. The decode table needs a GPU: on a CPU there is
no graph to be inside of. Host times are for fuselm and for what a user of torch would write, on the smallest case; one
that is not small is cut down, for a GPU that is behind fills the launch queue and then the host waits.

    measure(op, "cuda", peers.NAMES, timer, results, "NVIDIA H200")
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fuselm.bench import peers
from fuselm.bench.harness import Timer, empty_kernel
from fuselm.bench.report import DECODE_FIELDS, HOST_FIELDS, Results, Row, as_row
from fuselm.bench.tensors import make_inputs
from fuselm.kernels.embedding import EmbeddingCase
from fuselm.kernels.linear_cross_entropy import HeadCase
from fuselm.kernels.spec import Case, OpSpec

HOST_CALLS, HOST_BATCHES, HOST_ROUNDS = 200, 3, 7
# Of the case whose host time is taken. A CPU works on it in that time, which says little however large it is.
HOST_ELEMENTS, CPU_HOST_ELEMENTS = 1 << 17, 1 << 12


def measure(op: OpSpec, device: str, impls: Sequence[str], timer: Timer, results: Results, device_name: str) -> None:
    """Add an op's latencies to the results; what cannot be measured is noted."""
    if device == "cuda":
        with timer.lane():
            for case in op.decode_cases:
                _decode(op, case, device, impls, timer, results, device_name)
    with timer.lane():
        _host(op, device, impls, timer, results, device_name)
    timer.release()


def _decode(
    op: OpSpec, case: Case, device: str, impls: Sequence[str], timer: Timer, results: Results, device_name: str
) -> None:
    empty_us = timer.decode_latency(empty_kernel(device)).p50
    tensors = make_inputs(op, case, device)
    for name, peer in peers.implementations(op.name, case, device, impls).items():
        head = _head(op, case, name, device_name)
        if peer.call is None:
            results.notes.append({**head, "pass": "decode", "note": peer.note})
            continue
        try:
            with torch.no_grad():
                found = timer.decode_latency(_call(peer.call, tensors, case), capture=peer.capture)
        except Exception as error:
            results.notes.append({**head, "pass": "decode", "note": f"{type(error).__name__}: {error}"})
            continue
        measured = {f"{key}_us": us for key, us in dataclasses.asdict(found).items() if key != "graph"}
        rows_per_s = case.size / case.shape[-1] / found.p50 * 1e6
        row = {**head, **measured, "rows_per_s": rows_per_s, "empty_us": empty_us, "graph": found.graph}
        results.decode.append(as_row(row, DECODE_FIELDS))


def _host(op: OpSpec, device: str, impls: Sequence[str], timer: Timer, results: Results, device_name: str) -> None:
    """Host time of one call, without and with grad. The two are timed in turn, and the best round of each counts.

    A host's clock is no steadier than a GPU's: the same call took 50 us and, between two rounds of that, 38.
    """
    smallest = min(op.decode_cases or op.bench_cases, key=lambda case: case.size)
    case = cut_down(smallest, HOST_ELEMENTS if timer.on_gpu else CPU_HOST_ELEMENTS)
    fused = peers.implementations(op.name, case, device, ("fused",))["fused"]
    both = {"fused": fused, "torch": peers.Peer(peers.bare_torch(op.name, case, device))}
    calls = {name: peer for name, peer in both.items() if name in impls}
    samples: dict[str, dict[str, list[float]]] = {name: {"call_us": [], "call_grad_us": []} for name in calls}
    for _ in range(HOST_ROUNDS if timer.on_gpu else 1):
        for name, peer in calls.items():
            try:
                if peer.call is None:
                    raise peers.CannotDo(peer.note)
                for key, us in _host_times(op, case, device, peer.call, timer).items():
                    samples[name][key].append(us)
            except Exception as error:
                head = _head(op, case, name, device_name)
                results.notes.append({**head, "pass": "host", "note": f"{type(error).__name__}: {error}"})
    for name, found in samples.items():
        if found["call_us"]:
            best = {key: min(us) for key, us in found.items()}
            results.host.append(as_row({**_head(op, case, name, device_name), **best}, HOST_FIELDS))


def _host_times(
    op: OpSpec, case: Case, device: str, implementation: Callable[..., Any], timer: Timer
) -> dict[str, float]:
    calls = (HOST_CALLS, HOST_BATCHES) if timer.on_gpu else (20, 5)
    with torch.no_grad():
        bare = timer.call_time(_call(implementation, make_inputs(op, case, device), case), *calls)
    with torch.enable_grad():
        graph = timer.call_time(_call(implementation, make_inputs(op, case, device, grad=True), case), *calls)
    return {"call_us": bare, "call_grad_us": graph}


def cut_down(case: Case, elements: int) -> Case:
    """The case with fewer rows, and a smaller vocabulary, so that no input has more than so many elements.

    The last dimension stays as it is; those before it are cut one by one, the first one first, to one at the least. A
    name that says how large the vocabulary is says so of the smaller one.
    """
    if isinstance(case, HeadCase):
        vocabulary = _fewer_words(case.vocabulary, case, elements)
        name = case.name.replace(str(case.vocabulary), str(vocabulary))
        case = dataclasses.replace(case, name=name, vocabulary=vocabulary, targets=(0, vocabulary))
    elif isinstance(case, EmbeddingCase):
        case = dataclasses.replace(case, vocabulary=_fewer_words(case.vocabulary, case, elements), drawn=None)
    shape = list(case.shape)
    for place in range(len(shape) - 1):
        shape[place] = max(1, min(shape[place], elements // max(math.prod(shape[place + 1 :]), 1)))
    return dataclasses.replace(case, shape=tuple(shape))


def _fewer_words(vocabulary: int, case: Case, elements: int) -> int:
    return max(1, min(vocabulary, elements // max(case.shape[-1], 1)))


def _call(implementation: Callable[..., Any], tensors: dict[str, Any], case: Case) -> Callable[[], Any]:
    return lambda: implementation(**tensors, **case.options)


def _head(op: OpSpec, case: Case, impl: str, device: str) -> Row:
    return {
        "op": op.name,
        "case": case.name,
        "dtype": case.dtype,
        "shape": list(case.shape),
        "impl": impl,
        "device": device,
    }
