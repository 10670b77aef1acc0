"""The timer: on a CPU against a pretended clock, so that every figure is known; on a GPU, that graphs are captured."""

from __future__ import annotations

import pytest
import torch

from fuselm.bench import harness
from fuselm.bench.harness import Timer
from fuselm.bench.l2 import empty_l2, l2_buffer


class PretendedClock:
    """A clock that only moves when a function under test says so; seconds, as time.perf_counter."""

    def __init__(self) -> None:
        self.now, self.calls = 0.0, 0

    def __call__(self) -> float:
        return self.now

    def function(self, *microseconds: float):
        """A function that takes these times in turn, over and over."""

        def fn() -> None:
            self.now += microseconds[self.calls % len(microseconds)] * 1e-6
            self.calls += 1

        return fn


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> PretendedClock:
    pretended = PretendedClock()
    monkeypatch.setattr(harness.time, "perf_counter", pretended)
    return pretended


def test_device_time_on_a_cpu_is_the_median_of_the_clock(clock: PretendedClock) -> None:
    timing = Timer("cpu").device_time(clock.function(100, 100, 100, 100, 1000))
    assert timing.us == pytest.approx(100)
    assert timing.p10 == pytest.approx(100)
    assert timing.p90 == pytest.approx(1000)
    assert not timing.graph


def test_repeats_fill_the_time_budget_within_limits(clock: PretendedClock) -> None:
    fast, slow = clock.function(1), clock.function(10_000_000)
    Timer("cpu").device_time(fast)
    assert clock.calls == 3 + 1 + harness.CPU_REPEATS[1]  # warm-up, probe, repeats
    clock.calls = 0
    Timer("cpu").device_time(slow)
    assert clock.calls == 1 + 1 + harness.CPU_REPEATS[0]  # one slow call is warm-up enough


def test_call_time_is_host_time_of_one_call(clock: PretendedClock) -> None:
    assert Timer("cpu").call_time(clock.function(7), calls=10, batches=3) == pytest.approx(7)


def test_fewer_calls_make_a_batch_where_the_gpu_is_slow(clock: PretendedClock) -> None:
    Timer("cpu").call_time(clock.function(7), calls=20, batches=1, gpu_us=harness.BATCH_GPU_US / 5)
    assert clock.calls == 3 + 5  # warm-up, and five for one batch
    clock.calls = 0
    Timer("cpu").call_time(clock.function(7), calls=20, batches=1, gpu_us=1e9)
    assert clock.calls == 3 + 3


def test_memory_is_not_told_of_a_cpu() -> None:
    assert Timer("cpu").extra_memory(lambda: torch.ones(4)) is None


def test_copy_time_moves_the_bytes_asked_for_and_measures_each_size_at_one_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timer, copied = Timer("cpu"), []

    def noted(fn, capture) -> harness.Timing:
        copied.append(fn().nbytes)
        return harness.Timing(1.0, 1.0, 1.0, False)

    monkeypatch.setattr(timer, "device_time", noted)
    for nbytes in (4096, 4096, 8192):
        timer.copy_time(nbytes)
    assert copied == [2048, 2048, 4096, 4096]  # each size timed in two ways; read and written: twice these bytes


def test_the_ceiling_is_the_faster_of_a_copy_in_a_graph_and_one_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timer = Timer("cpu")
    for in_graph, called in ((3.0, 2.0), (2.0, 3.0)):
        times = {True: in_graph, False: called}
        monkeypatch.setattr(timer, "_copies", {})
        monkeypatch.setattr(timer, "device_time", lambda fn, capture, t=times: harness.Timing(t[capture], 0, 0, False))
        assert timer.copy_time(4096).us == 2.0


def test_latency_percentiles_on_a_cpu(clock: PretendedClock) -> None:
    found = Timer("cpu").decode_latency(clock.function(5))
    assert (found.p50, found.p95, found.p99, found.sync_p50) == pytest.approx((5, 5, 5, 5))


@pytest.mark.gpu
def test_extra_memory_is_what_a_call_holds_beyond_its_result() -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    kept = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")

    def call() -> torch.Tensor:
        scratch = torch.empty(3 << 20, dtype=torch.uint8, device="cuda")
        return kept + scratch[: 1 << 20]

    assert Timer("cuda").extra_memory(call) == 3 << 20
    assert Timer("cuda").extra_memory(lambda: kept) == 0


@pytest.mark.gpu
def test_forward_and_backward_are_captured_into_graphs() -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    timer = Timer("cuda")
    with timer.lane():
        x = torch.randn(64, 512, device="cuda", requires_grad=True)
        y = torch.nn.functional.rms_norm(x, (512,))
        cotangent = torch.ones_like(y)
        backward = timer.device_time(lambda: torch.autograd.grad(y, x, cotangent, retain_graph=True))
        with torch.no_grad():
            forward = timer.device_time(lambda: torch.nn.functional.rms_norm(x, (512,)))
        samples, graph = timer.device_samples(lambda: x.detach() + 1, most=4)
    assert (len(samples), graph) == (4, True)
    assert forward.graph
    assert backward.graph
    assert timer.decode_latency(harness.empty_kernel("cuda")).graph


def test_emptying_l2_overwrites_the_buffer_without_a_kernel_too() -> None:
    buffer = torch.ones(64, dtype=torch.int32)
    empty_l2(buffer)
    assert not buffer.any()


@pytest.mark.gpu
def test_emptying_l2_overwrites_twice_the_cache_and_refuses_what_is_no_whole_line() -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    device = torch.device("cuda")
    buffer = l2_buffer(device)
    assert buffer.nbytes >= 2 * torch.cuda.get_device_properties(device).L2_cache_size
    buffer.fill_(1)
    empty_l2(buffer)
    assert not buffer.any()
    for wrong in (buffer[:-1], buffer[1:], buffer[:64].view(2, 32), buffer[:64].float()):
        with pytest.raises(RuntimeError, match="refused"):
            empty_l2(wrong)
