"""The one timing protocol of ops: every figure that says how long a kernel took comes from a `Timer`.

Knows torch and a device; knows no op, no peer and no file. On a GPU a call is warmed up, captured into a CUDA graph (so
that what is timed is the GPU at work, not Python between two kernels) and replayed between two events, each time after
the L2 cache has been overwritten. On a CPU a call is timed by the clock, warm, and nothing is flushed.

    timer = Timer("cuda")
    with timer.lane():                      # make tensors and autograd graphs in here: see lane()
        print(timer.device_time(fn).us, timer.copy_time(nbytes).us, timer.call_time(fn))
"""

from __future__ import annotations

import functools
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fuselm.bench.l2 import empty_l2, l2_buffer

Call = Callable[[], Any]

# How long the repeats of one figure may take together, and how many there are at least and at most.
GPU_SECONDS, GPU_REPEATS = 0.15, (10, 120)
CPU_SECONDS, CPU_REPEATS = 0.05, (3, 100)
# About a millisecond of spinning: the host enqueues a call that is not a graph while the GPU is busy with this.
SPIN_CYCLES = 2_000_000
# How long the GPU may need for one batch of calls whose host time is taken.
BATCH_GPU_US = 20_000
DECODE_CALLS, DECODE_REPLAYS, SYNC_CALLS = 50, 200, 300
# How long a GPU that has idled is kept busy before its first figure, which would be up to a tenth slower.
SPIN_UP_SECONDS = 0.1

COPY_GRAIN = 2**19  # elements of bf16 in a MiB


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call on the device: median, 10th and 90th percentile; whether a CUDA graph was replayed."""

    us: float
    p10: float
    p90: float
    graph: bool


@dataclass(frozen=True)
class Latency:
    """Percentiles in microseconds of one small call inside a graph of many, and of call + synchronize from the host."""

    p50: float
    p95: float
    p99: float
    sync_p50: float
    sync_p95: float
    sync_p99: float
    graph: bool


class Timer:
    """Times calls on one device. Owns a side stream, a buffer that covers L2, and the copies it has measured so far."""

    def __init__(self, device: str | torch.device) -> None:
        self.device = torch.device(device)
        self.on_gpu = self.device.type == "cuda"
        self._copies: dict[int, Timing] = {}
        self._spun_up = False
        if self.on_gpu:
            self.stream = torch.cuda.Stream(self.device)
            self._flush = l2_buffer(self.device)

    @contextmanager
    def lane(self) -> Iterator[None]:
        """Run on the timer's stream. Autograd runs a backward where its forward ran, so both belong in here."""
        if not self.on_gpu:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            yield
        torch.cuda.current_stream(self.device).wait_stream(self.stream)

    def device_time(self, fn: Call, capture: bool = True) -> Timing:
        """How long the device works on one call, as a CUDA graph unless told otherwise or it cannot be captured."""
        return timing_of(*self.device_samples(fn, capture))

    def device_samples(self, fn: Call, capture: bool = True, most: int = GPU_REPEATS[1]) -> tuple[list[float], bool]:
        """Microseconds of each repeat, of which a GPU makes so many at most; whether a CUDA graph was replayed."""
        if not self.on_gpu:
            return self._cpu_samples(fn), False
        with self.lane():
            self._spin_up()
            self._warm_up(fn)
            graph = self._capture(fn, calls=1) if capture else None
            samples = self._cold_samples(fn if graph is None else graph.replay, graph is None, most)
        return samples, graph is not None

    def call_time(self, fn: Call, calls: int = 20, batches: int = 5, gpu_us: float = 0.0) -> float:
        """Microseconds the host needs for one call, launch included, when calls follow each other without waiting.

        Fewer calls make a batch where the GPU needs `gpu_us` for one: the host's time is known after a few, and waiting
        for the GPU to catch up is a run's time and no figure's.
        """
        calls = _clamp(BATCH_GPU_US / max(gpu_us, 1.0), (min(3, calls), calls))
        with self.lane():
            self._warm_up(fn)
            per_call = []
            for _ in range(batches):
                start = time.perf_counter()
                for _ in range(calls):
                    fn()
                per_call.append((time.perf_counter() - start) / calls * 1e6)
                self.synchronize()  # between batches: a full launch queue would make the host wait for the GPU
        return statistics.median(per_call)

    def copy_time(self, nbytes: int) -> Timing:
        """The ceiling: a bf16 copy that reads and writes `nbytes` in all. Measured once for each size.

        A ceiling that is too low flatters every kernel, and on an H200 the driver's copy had two ways to be slow: of
        536,879,104 bytes (a norm with its weight) it took half as long again as of 512 MiB, and as a node of a graph a
        copy of 1 GiB took 392 us, called 256. So sizes are rounded to whole MiB, and the faster of graph and call
        counts. On a CPU, where there is no graph, that is the better of two: one hiccup of a busy host is no ceiling.
        """
        elements = max(nbytes // 4, 1)
        if elements > 16 * COPY_GRAIN:
            elements = round(elements / COPY_GRAIN) * COPY_GRAIN
        if elements not in self._copies:
            with self.lane():
                # Numbers of a generator of its own: torch's default one is out of order once a capture has failed.
                noise = torch.Generator(self.device).manual_seed(0)
                source = torch.empty(elements, dtype=torch.bfloat16, device=self.device).normal_(generator=noise)
                copy = functools.partial(torch.empty_like(source).copy_, source)
                timings = [self.device_time(copy, capture) for capture in (True, False)]
                self._copies[elements] = min(timings, key=lambda timing: timing.us)
        return self._copies[elements]

    def extra_memory(self, fn: Call) -> int | None:
        """Bytes that a call holds at its peak beyond what was there before and what it returns; None on a CPU."""
        if not self.on_gpu:
            return None
        with self.lane():
            fn()  # what stays from call to call, as cuBLAS's workspace does, was there before
            self.synchronize()
            torch.cuda.reset_peak_memory_stats(self.device)
            result = fn()
            peak, kept = torch.cuda.max_memory_allocated(self.device), torch.cuda.memory_allocated(self.device)
            self.synchronize()
            del result
        return peak - kept

    def decode_latency(self, fn: Call, capture: bool = True) -> Latency:
        """Latency of a small call as a decode step sees it: L2-warm, one of many in a replayed CUDA graph."""
        with self.lane():
            self._warm_up(fn)
            graph = self._capture(fn, DECODE_CALLS) if self.on_gpu and capture else None
            if graph is not None:
                samples = [us / DECODE_CALLS for us in self._event_samples(graph.replay, DECODE_REPLAYS)]
            elif self.on_gpu:
                samples = self._event_samples(fn, DECODE_REPLAYS)
            else:
                samples = self._cpu_samples(fn)
            waits = self._sync_samples(fn)
        p50, p95, p99 = map(float, np.percentile(samples, (50, 95, 99)))
        sync_p50, sync_p95, sync_p99 = map(float, np.percentile(waits, (50, 95, 99)))
        return Latency(p50, p95, p99, sync_p50, sync_p95, sync_p99, graph is not None)

    def synchronize(self) -> None:
        """Wait until the device is idle; raises when something it ran has failed."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def release(self) -> None:
        """Give back what the calls measured so far have left in the allocator."""
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()

    def _spin_up(self) -> None:
        start = time.perf_counter()
        while not self._spun_up and time.perf_counter() - start < SPIN_UP_SECONDS:
            empty_l2(self._flush)
            self.synchronize()
        self._spun_up = True

    def _warm_up(self, fn: Call) -> None:
        start = time.perf_counter()
        for _ in range(3):
            fn()
            if not self.on_gpu and time.perf_counter() - start > CPU_SECONDS:
                break  # a busy machine: more calls would not make the next one any warmer
        self.synchronize()

    def _capture(self, fn: Call, calls: int) -> torch.cuda.CUDAGraph | None:
        """`calls` calls as a graph, or None when the function cannot be captured."""
        graph = torch.cuda.CUDAGraph()
        try:
            # thread_local: autograd launches a backward from a thread of its own, which a global capture would forbid
            # to allocate.
            with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
                for _ in range(calls):
                    fn()
            graph.replay()
            self.synchronize()
        except Exception:
            self.synchronize()  # a failed capture is fine; a broken device is raised from here
            return None
        return graph

    def _cold_samples(self, launch: Call, spin: bool, most: int) -> list[float]:
        """Repeats, each after L2 was overwritten. Enqueued together: the flush hides the launch that follows it."""
        probe = statistics.median(self._event_samples(launch, 3, before=lambda: self._overwrite_l2(spin)))
        # The flush takes about as long as writing its bytes three times at 3 TB/s, and counts towards the time spent.
        flush_us = 3 * self._flush.nbytes / 3e6 + (1000 if spin else 0)
        repeats = _clamp(GPU_SECONDS * 1e6 / (probe + flush_us), (min(GPU_REPEATS[0], most), most))
        return self._event_samples(launch, repeats, before=lambda: self._overwrite_l2(spin))

    def _overwrite_l2(self, spin: bool) -> None:
        if spin:
            torch.cuda._sleep(SPIN_CYCLES)
        empty_l2(self._flush)

    def _event_samples(self, launch: Call, repeats: int, before: Call | None = None) -> list[float]:
        pairs = []
        for _ in range(repeats):
            if before is not None:
                before()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            launch()
            end.record()
            pairs.append((start, end))
        self.synchronize()
        return [start.elapsed_time(end) * 1e3 for start, end in pairs]

    def _cpu_samples(self, fn: Call) -> list[float]:
        self._warm_up(fn)
        first = _clock(fn)
        repeats = _clamp(CPU_SECONDS * 1e6 / max(first, 1e-3), CPU_REPEATS)
        return [_clock(fn) for _ in range(repeats)]

    def _sync_samples(self, fn: Call) -> list[float]:
        def wait() -> None:
            fn()
            self.synchronize()

        return [_clock(wait) for _ in range(SYNC_CALLS)]


def empty_kernel(device: str | torch.device) -> Call:
    """The smallest launch there is, to say how much of a decode step's latency is launching at all."""
    # A kernel of one thread that waits for 0 cycles.
    return lambda: torch.cuda._sleep(0)


def _clock(fn: Call) -> float:
    start = time.perf_counter()
    fn()
    return (time.perf_counter() - start) * 1e6


def _clamp(wanted: float, limits: tuple[int, int]) -> int:
    return int(min(max(wanted, limits[0]), limits[1]))


def timing_of(samples: Sequence[float], graph: bool) -> Timing:
    """What is said of a call's repeats."""
    p10, median, p90 = map(float, np.percentile(samples, (10, 50, 90)))
    return Timing(median, p10, p90, graph)
