"""ops.global_norm against float64, on the CPU and on CUDA: sizes, dtypes, memory, bits, and numbers that are none.

The norm of pytrees is tested in test_adamw_jax.py, clipping by it in tests/test_optim.py.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from fuselm import ops
from fuselm.kernels.adamw import NORM_CHUNK
from fuselm.kernels.spec import RefusedInput
from fuselm.kernels.torch_ops import global_norm as module
from fuselm.kernels.torch_ops.global_norm import global_norm_reference
from tests.kernels.arrays import lay_out
from tests.kernels.problems import DEVICES

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
# Around a vector, around what a block adds up at once, and several of those.
SIZES = [1, 3, 4, 5, 1023, NORM_CHUNK - 1, NORM_CHUNK, NORM_CHUNK + 1, 3 * NORM_CHUNK + 5]

on_each_device = pytest.mark.parametrize("device", DEVICES, indirect=True)
in_each_dtype = pytest.mark.parametrize("dtype", FLOATS, ids=str)


def drawn(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def truth(tensors: Sequence[Tensor]) -> float:
    return math.sqrt(math.fsum(float(tensor.double().square().sum()) for tensor in tensors))


def assert_norm(tensors: Sequence[Tensor]) -> None:
    """A 0-dim fp32 tensor beside the tensors, right to a few roundings and the same every time."""
    ulps = 4 if all(tensor.is_cuda for tensor in tensors) else 32  # torch's sums on a CPU are long ones
    found, again = ops.global_norm(tensors), ops.global_norm(iter(tensors))
    assert (found.shape, found.dtype, found.device) == ((), torch.float32, tensors[0].device)
    assert torch.equal(found, again)
    assert abs(float(found) - truth(tensors)) <= ulps * 2.0**-23 * truth(tensors)


# ---- sizes and dtypes ------------------------------------------------------------------------------------------------


@on_each_device
@in_each_dtype
def test_tensors_of_every_size_have_their_norm(device: str, dtype: torch.dtype) -> None:
    for size in SIZES:
        assert_norm([drawn(size, dtype=dtype, device=device, seed=size)])
    assert_norm([drawn(size, dtype=dtype, device=device, seed=size) for size in SIZES])


@on_each_device
def test_every_element_counts_and_counts_once(device: str) -> None:
    """Ones among zeros, at both ends of everything there is."""
    for size in SIZES:
        for at in sorted({0, size // 2, size - 1}):
            tensors = [torch.zeros(n, device=device) for n in (7, size, 5)]
            tensors[1][at] = 3.0
            assert float(ops.global_norm(tensors)) == 3.0
    assert float(ops.global_norm([torch.ones(8 * NORM_CHUNK, device=device)])) == math.sqrt(8 * NORM_CHUNK)


@on_each_device
def test_dtypes_and_dimensions_may_differ(device: str) -> None:
    tensors = [
        drawn(33, 20, device=device),
        drawn(5, dtype=torch.bfloat16, device=device, seed=1),
        drawn(device=device, seed=2),
        drawn(2, 3, 4, 5, dtype=torch.float16, device=device, seed=3),
        drawn(*[1] * 9, 3, device=device, seed=4),  # more dimensions than a kernel takes
        drawn(0, device=device),
    ]
    assert_norm(tensors[:4])
    assert_norm(tensors)
    assert_norm([*tensors, drawn(7, dtype=torch.float64, device=device)])
    large = [torch.full((5,), 1e30, dtype=torch.float64, device=device), *tensors]
    assert float(ops.global_norm(large)) == pytest.approx(1e30 * math.sqrt(5), rel=1e-6)  # 1e60 is no fp32


@on_each_device
def test_the_norm_of_nothing_is_0(device: str) -> None:
    assert torch.equal(ops.global_norm([]), torch.zeros(()))
    for shapes in ([(0,)], [(3, 0)], [(0,), (2, 0, 4), (0, 5)]):
        tensors = [torch.zeros(shape, device=device) for shape in shapes]
        found = ops.global_norm(tensors)
        assert (float(found), found.shape, found.dtype, found.device) == (0, (), torch.float32, tensors[0].device)
        assert float(ops.global_norm([*tensors, torch.full((2, 2), 2.0, device=device)])) == 4.0


@on_each_device
@pytest.mark.parametrize("count", [1300, 1301, 2000])
def test_thousands_of_tensors_are_one_list(device: str, count: int) -> None:
    """1300 is what one launch takes; some are without an element, one takes several blocks."""
    sizes = [0 if i % 11 == 3 else 3 * NORM_CHUNK if i == 1299 else 1 + i % 9 for i in range(count)]
    flat = drawn(sum(sizes), device=device)
    assert_norm(flat.split(sizes))


# ---- memory ----------------------------------------------------------------------------------------------------------


@on_each_device
@in_each_dtype
@pytest.mark.parametrize("layout", ["strided", "offset", "transposed", "columns"])
def test_however_a_tensor_lies_its_norm_is_the_same(device: str, dtype: torch.dtype, layout: str) -> None:
    """What lies between its elements is NaN."""
    x, y = drawn(100, 203, dtype=dtype, device=device), drawn(7, 3, 40, dtype=dtype, device=device, seed=1)
    assert_norm([lay_out(x, layout), lay_out(y, layout)])


@pytest.mark.parametrize("layout", ["columns", "transposed"])
def test_a_long_sum_with_gaps_does_not_stop_growing(layout: str) -> None:
    size = 2**24 + 2**22
    ones = torch.ones(size, 2)[:, 0] if layout == "columns" else torch.ones(size // 4, 4).t()
    assert float(ops.global_norm([ones])) == pytest.approx(math.sqrt(size), rel=1e-6)


@on_each_device
def test_an_element_that_stands_for_many_counts_as_many(device: str) -> None:
    assert float(ops.global_norm([torch.full((1, 4), 2.0, device=device).expand(9, 4)])) == 12.0


@on_each_device
def test_nothing_is_differentiated_or_changed(device: str) -> None:
    leaf = drawn(50, device=device).requires_grad_()
    before, version = leaf.detach().clone(), leaf._version
    assert not ops.global_norm([leaf]).requires_grad
    assert torch.equal(leaf, before)
    assert leaf._version == version


@on_each_device
@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16], ids=str)
def test_torchs_default_dtype_means_nothing_here(device: str, default: torch.dtype) -> None:
    tensors = [drawn(9000, device=device), drawn(5, device=device)]
    expected = ops.global_norm(tensors)
    torch.set_default_dtype(default)
    try:
        found, none = ops.global_norm(tensors), ops.global_norm([])
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found, expected)
    assert none.dtype == torch.float32


# ---- what is no number, and refusals ---------------------------------------------------------------------------------


@on_each_device
@in_each_dtype
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_anywhere_shows(device: str, dtype: torch.dtype, bad: float) -> None:
    for size, at in ((1, 0), (5, 4), (NORM_CHUNK + 3, NORM_CHUNK + 2), (3 * NORM_CHUNK, NORM_CHUNK)):
        tensors = [torch.ones(n, dtype=dtype, device=device) for n in (20, size)]
        tensors[1][at] = bad
        found = float(ops.global_norm(tensors))
        assert math.isnan(found) if math.isnan(bad) else found == math.inf
    tensors[0][3] = math.nan  # beside an infinity too
    assert math.isnan(float(ops.global_norm(tensors)))


@on_each_device
def test_squares_that_fp32_does_not_have_are_infinite_or_0(device: str) -> None:
    assert float(ops.global_norm([torch.full((3,), 1e30, device=device)])) == math.inf
    assert float(ops.global_norm([torch.full((3,), 1e-30, device=device)])) == 0.0


@on_each_device
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64], ids=str)
def test_what_is_no_real_number_is_refused(device: str, dtype: torch.dtype) -> None:
    wrong = torch.ones(3, dtype=dtype, device=device)
    words = f"real floating-point dtype; got number 1 of {dtype}. Leave it out"
    with pytest.raises(RefusedInput, match=f"^global_norm: .*{words}"):
        ops.global_norm([torch.ones(3, device=device), wrong])


# ---- the way to the kernel, without one ------------------------------------------------------------------------------


class PretendsCuda(Tensor):
    is_cuda = property(lambda self: True)  # type: ignore[assignment]


def pretending(*tensors: Tensor) -> list[Tensor]:
    return [tensor.as_subclass(PretendsCuda) for tensor in tensors]


def test_the_kernel_gets_what_it_takes_and_room_for_every_block(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[int, int]] = []
    raw, loaded = module._norm, []

    def kernel(tensors: list[Tensor], partial: Tensor, outputs: int) -> Any:
        if not loaded:
            raise NotImplementedError
        assert all(tensor.numel() for tensor in tensors)
        calls.append((len(tensors), partial.numel()))
        return raw(tensors, partial, outputs)

    monkeypatch.setattr(module, "_norm", kernel)
    monkeypatch.setattr(module, "load_cuda", lambda: loaded.append(1) or len(loaded) == 1)
    given = [drawn(NORM_CHUNK + 1), drawn(0), drawn(3, 0), drawn(4, 6).T, drawn(2 * NORM_CHUNK, dtype=torch.bfloat16)]
    found = ops.global_norm(pretending(*given))
    assert calls == [(3, 5)]
    # Emulated it is the kernel's, and nearer to the truth.
    within = 1e-5 if request.config.getoption("--emulated") else 0.0
    assert float(found) == pytest.approx(float(global_norm_reference(given)), rel=within, abs=0.0)
    # One tensor that it does not take: all go the plain way, one sum.
    for odd in (drawn(4, 6)[:, :3], drawn(3, dtype=torch.float64), drawn(*[1] * 9)):
        ops.global_norm(pretending(*given, odd))
    ops.global_norm([*pretending(*given[1:3])])
    assert calls == [(3, 5)]


# ---- what only a GPU has ---------------------------------------------------------------------------------------------


@pytest.mark.gpu
@in_each_dtype
def test_aligned_or_not_the_bits_are_the_same(cuda: str, dtype: torch.dtype) -> None:
    for size in SIZES:
        x = drawn(size, dtype=dtype, device=cuda, seed=size)
        assert torch.equal(ops.global_norm([x]), ops.global_norm([lay_out(x, "offset")]))


@pytest.mark.gpu
def test_tensors_on_several_devices_have_one_norm(cuda: str) -> None:
    tensors = [drawn(50, device=cuda), drawn(60)]
    for order in (tensors, tensors[::-1]):
        assert_norm(order)


@pytest.mark.gpu
def test_the_host_never_waits_for_the_device(cuda: str) -> None:
    tensors = [drawn(1 + index, device=cuda) for index in range(1500)]
    ops.global_norm(tensors)
    torch.cuda.synchronize()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the mode itself is a prototype
            torch.cuda.set_sync_debug_mode("error")
            found = ops.global_norm(tensors)
            ops.global_norm([torch.zeros(0, device=cuda)])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert float(found) == pytest.approx(truth(tensors), rel=1e-6)


@pytest.mark.gpu
def test_a_captured_graph_follows_its_tensors(cuda: str) -> None:
    tensors = [drawn(1 + 37 * (index % 300), device=cuda, seed=index) for index in range(1400)]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        ops.global_norm(tensors)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = ops.global_norm(tensors)
    for factor in (1.0, 3.0, 0.5):
        torch._foreach_mul_(tensors, factor)
        graph.replay()
        assert torch.equal(captured, ops.global_norm(tensors))
        assert float(captured) == pytest.approx(truth(tensors), rel=1e-6)


@pytest.mark.gpu
def test_norms_that_follow_one_another_do_not_meet(cuda: str) -> None:
    """The memory of a call's sums is free for the next call while its last kernel may still be starting."""
    many = [[torch.full((NORM_CHUNK * 40,), float(value), device=cuda)] for value in range(1, 9)]
    found = [ops.global_norm(tensors) for _ in range(20) for tensors in many]
    expected = [value * math.sqrt(NORM_CHUNK * 40) for _ in range(20) for value in range(1, 9)]
    assert torch.stack(found).tolist() == pytest.approx(expected, rel=1e-6)


@pytest.mark.gpu
@in_each_dtype
def test_more_elements_than_32_bits_can_count_huge(cuda: str, dtype: torch.dtype) -> None:
    size = 2**31 + NORM_CHUNK * 2 + 5
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < 6 * size:
        pytest.skip("not enough GPU memory is free")
    x = torch.zeros(size, dtype=dtype, device=cuda)
    places = [0, 2**30 - 1, 2**30, 2**31 - 1, 2**31, size - 1]
    for count, place in enumerate(places, 1):
        x[place] = 1.0
        assert float(ops.global_norm([x])) == pytest.approx(math.sqrt(count), rel=1e-7)
    x.fill_(1.0)
    assert float(ops.global_norm([x])) == pytest.approx(math.sqrt(size), rel=1e-7)
    del x
    torch.cuda.empty_cache()


def test_a_parameter_without_a_gradient_is_refused_with_a_remedy() -> None:
    with pytest.raises(RefusedInput, match=r"must be torch\.Tensors; got number 1, a NoneType\. .* is not None\]\.$"):
        ops.global_norm([torch.ones(3), None])
