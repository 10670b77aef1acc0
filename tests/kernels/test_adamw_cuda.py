"""ops.adamw on its way to the kernel, and what has a meaning on CUDA only: waiting, graphs, streams, 64-bit offsets.

Numbers and refusals, on CUDA too, are in test_adamw.py, whose tensors these are.
"""

from __future__ import annotations

import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from fuselm.kernels.spec import RefusedInput
from fuselm.kernels.torch_ops import adamw as module
from tests.kernels.arrays import lay_out
from tests.kernels.test_adamw import (
    BF16,
    F32,
    F64,
    Lists,
    as_tensors,
    assert_close,
    assert_equal,
    copies,
    gradients,
    in_each_kind,
    mixed,
    options_of,
    started,
    their_gradients,
)

# ---- the way to the kernel, without one ------------------------------------------------------------------------------


class PretendsCuda(Tensor):
    """A CPU tensor that is taken for one on CUDA: the raw op has a plain implementation for it."""

    is_cuda = property(lambda self: True)  # type: ignore[assignment]


class PretendKernel:
    """The raw op: not there until it is loaded, and refusing what the kernel refuses."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, loaded: bool) -> None:
        self.raw, self.loaded, self.taken, self.loads = module._step, loaded, list[int](), 0
        monkeypatch.setattr(module, "_step", self)
        monkeypatch.setattr(module, "load_cuda", self.load)

    def load(self) -> bool:
        self.loads, was_loaded, self.loaded = self.loads + 1, self.loaded, True
        return not was_loaded

    def __call__(self, params: list[Tensor], grads: list[Tensor], *more: Any) -> None:
        if not self.loaded:
            raise NotImplementedError
        if any(F64 in (p.dtype, g.dtype) or p.stride() != g.stride() for p, g in zip(params, grads, strict=True)):
            raise RuntimeError("a kernel was refused")
        self.taken.append(len(params))
        self.raw(params, grads, *more)


@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize("on_device", [False, True], ids=["numbers", "tensors"])
def test_what_the_kernel_does_not_take_goes_the_plain_way(
    loaded: bool, on_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """7 is float64, the gradient of 6 lies otherwise, that of 5 is float64; the rest is one call."""
    kernel = PretendKernel(monkeypatch, loaded)
    found, expected = mixed("cpu"), mixed("cpu")
    found.params = [param.as_subclass(PretendsCuda) for param in found.params]
    grads = their_gradients(found, 1)
    grads[5], grads[6] = grads[5].double(), lay_out(grads[6], "transposed")
    groups = [as_tensors(options_of(i % 3), "cpu") if on_device else options_of(i % 3) for i in range(8)]
    options = {name: [group[name] for group in groups] for name in groups[0]}
    for lists in (found, expected):
        lists.step(grads, **options, grad_scale=torch.tensor(0.3), skip=torch.tensor(False))
    (assert_close if on_device else assert_equal)(found.all(), expected.all())
    assert kernel.taken == [5]
    kernel.taken.clear()
    found.chosen(range(5)).step(grads[:5], step=3)
    assert kernel.taken == [5]
    assert kernel.loads <= 1


@pytest.mark.parametrize("name", ["params", "grads", "exp_avgs", "exp_avg_sqs", "masters"])
def test_a_none_that_the_raw_op_cannot_read_is_refused_in_words(name: str) -> None:
    lists = Lists([torch.ones(3).as_subclass(PretendsCuda), torch.ones(2)], with_masters=True)
    grads: list[Any] = [torch.ones(3), torch.ones(2)]
    (grads if name == "grads" else getattr(lists, name))[1] = None
    with pytest.raises(RefusedInput, match=rf"^adamw: each of {name} must be a tensor; got {name}\[1\], which is None"):
        lists.step(grads, step=1)
    assert torch.equal(lists.params[0], torch.ones(3))


def test_a_refusal_that_has_no_words_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(module, "_step", broken)
    lists = Lists([torch.ones(3).as_subclass(PretendsCuda)])
    with pytest.raises(RuntimeError, match="illegal memory access"):
        lists.step([torch.ones(3)], step=1)


# ---- what only a GPU has ---------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_the_host_never_waits_for_the_device(cuda: str) -> None:
    shapes = tuple((50 + index,) for index in range(700))
    lists = started(BF16, cuda, master=True, shapes=shapes)
    grads = gradients(1, BF16, cuda, shapes)
    for_all: dict[str, Any] = {
        "step": torch.tensor(2.0, device=cuda),
        "lr": [torch.tensor(1e-3, device=cuda), 1e-3] * 350,
        "grad_scale": torch.tensor(0.5, device=cuda),
        "skip": torch.tensor(True, device=cuda),
    }

    def work() -> None:
        lists.step(grads, **for_all)
        lists.step(grads, step=2, skip=for_all["skip"])

    work()  # what is loaded on first use is there now
    torch.cuda.synchronize()
    before = copies(lists.all())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the mode itself is a prototype
            torch.cuda.set_sync_debug_mode("error")
            work()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_equal(lists.all(), before)


@pytest.mark.gpu
@pytest.mark.parametrize("count", [8, 700])
def test_a_captured_graph_follows_step_rate_scale_and_skip(cuda: str, count: int) -> None:
    shapes = tuple((3 + index,) for index in range(count))
    replayed, eager = (started(BF16, cuda, True, shapes) for _ in range(2))
    grads = gradients(1, BF16, cuda, shapes)
    step, lr, scale = (torch.zeros((), device=cuda) for _ in range(3))
    skip = torch.zeros((), dtype=torch.bool, device=cuda)

    def work(lists: Lists) -> None:
        lists.step(grads, step=step, lr=lr, grad_scale=scale, skip=skip)

    skip.fill_(True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work(replayed)  # loads the kernels, changes nothing
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.add_(1.0)
        work(replayed)
    step.zero_()
    for number in range(1, 6):
        lr.fill_(1e-3 * number)
        scale.fill_(0.5 + number)
        skip.fill_(number == 3)
        graph.replay()
        assert step.item() == number
        work(eager)
        assert_equal(replayed.all(), eager.all())


@pytest.mark.gpu
def test_work_goes_to_the_current_stream(cuda: str) -> None:
    """The gradients arrive late on a side stream: an op that ran on another one would see what was there before."""
    late, expected = started(F32, cuda), started(F32, cuda)
    real = gradients(1, F32, cuda)
    expected.step(real, step=1)
    grads = [torch.zeros_like(grad) for grad in real]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # about 10 ms
        torch._foreach_copy_(grads, real)
        late.step(grads, step=1)
    torch.cuda.synchronize()
    assert_equal(late.all(), expected.all())


@pytest.mark.gpu
@pytest.mark.parametrize("made", ["torch.ones(4, 6, dtype=torch.float64)", "torch.ones(4, 6)[:, :3]"])
def test_the_first_tensors_of_a_process_may_be_what_no_kernel_takes(cuda: str, made: str) -> None:
    """The first call loads the kernels, which then refuse them."""
    program = (
        f"import torch; from fuselm import ops; torch.set_default_device('cuda'); p = {made}\n"
        "a, b = (torch.zeros_like(p) for _ in range(2))\n"
        "ops.adamw([p], [torch.ones_like(p)], [a], [b], step=1, lr=0.5, weight_decay=0.0)\n"
        "assert torch.allclose(p, torch.full_like(p, 0.5)), p"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)


@pytest.mark.gpu
@in_each_kind
def test_every_place_of_a_vector_and_a_chunk_is_stepped_once(cuda: str, dtype: torch.dtype, master: bool) -> None:
    """Lengths around vectors, blocks and chunks, each tensor aligned and one element off."""
    sizes = [*range(1, 18), 511, 512, 513, 1023, 1025, 4095, 4096, 4097, 8191, 8192, 8193, 12291]
    shapes = tuple((size,) for size in sizes)
    aligned = started(dtype, cuda, master, shapes)
    grads = gradients(1, dtype, cuda, shapes)
    off = Lists([lay_out(one, "offset") for one in started(dtype, cuda, False, shapes).params])
    off.exp_avgs, off.exp_avg_sqs = ([lay_out(one, "offset") for one in t] for t in (off.exp_avgs, off.exp_avg_sqs))
    if aligned.masters is not None:
        off.masters = [lay_out(one, "offset") for one in copies(aligned.masters)]
    aligned.step(grads, step=2)
    off.step([lay_out(grad, "offset") for grad in grads], step=2)
    assert_equal(off.all(), aligned.all())
    on_cpu = started(dtype, "cpu", master, shapes)
    on_cpu.step(gradients(1, dtype, "cpu", shapes), step=2)
    assert_close([one.cpu() for one in aligned.all()], on_cpu.all())


@pytest.mark.gpu
def test_more_elements_than_32_bits_can_count_huge(cuda: str) -> None:
    size = 2**31 + 4096 * 3 + 7
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < 14 * size:
        pytest.skip("not enough GPU memory is free")
    made = torch.Generator(cuda).manual_seed(0)
    param, grad = (torch.empty(size, dtype=BF16, device=cuda) for _ in range(2))
    param.normal_(generator=made)
    grad.uniform_(0.5, 1.5, generator=made)
    lists = Lists([param])
    windows = [slice(max(0, edge - 5000), min(size, edge + 5000)) for edge in (0, 2**30, 2**31, size)]
    parts = [Lists([param[window].clone()]) for window in windows]
    lists.step([grad], step=1, lr=0.5)
    for window, part in zip(windows, parts, strict=True):
        part.step([grad[window].clone()], step=1, lr=0.5)
        assert_equal([tensors[0][window] for tensors in (lists.params, lists.exp_avgs, lists.exp_avg_sqs)], part.all())
    assert min(float(lists.exp_avgs[0].min()), float(lists.exp_avg_sqs[0].min())) > 0  # each of them was reached
    del param, grad, lists, parts
    torch.cuda.empty_cache()
