"""The sum of a head's weight gradient over blocks, in 16 bits: as exact as one rounding, whatever the size of its rows.

On a GPU the kernel is held to float64 and to the plain implementation, which is also what a CPU runs.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from fuselm import ops
from fuselm.kernels.linear_cross_entropy import EXPONENTS_OF_WORD, LEAST_EXPONENT, MOST_EXPONENT
from fuselm.kernels.torch_ops import load_cuda, weight_sum
from tests.kernels.problems import DEVICES

BLOCKS = 16
on_each_device = pytest.mark.parametrize("device", DEVICES, indirect=True)
# Rows of a block, words, columns: one tile, parts of one, parts of many, one row, one word, odd words.
SHAPES = [(128, 256, 256), (77, 136, 264), (200, 1000, 520), (1, 40, 8), (65, 1, 24), (64, 301, 1032)]


def operands(shape: tuple[int, int, int], device: str, blocks: int = BLOCKS) -> list[tuple[Tensor, Tensor]]:
    """(dlogits, hidden) of each block. Words differ in size by 2^40, columns by 2^8; rows of dlogits are padded."""
    rows, words, columns = shape
    made = torch.Generator().manual_seed(words + columns)
    size = torch.exp2(torch.randint(-40, 1, (words,), generator=made).float())
    wide = torch.exp2(torch.randint(-8, 1, (columns,), generator=made).float())
    pairs = []
    for _ in range(blocks):
        dlogits = torch.zeros(rows, math.ceil(words / 8) * 8, dtype=torch.bfloat16)
        dlogits[:, :words] = torch.randn(rows, words, generator=made) * size
        hidden = (torch.randn(rows, columns, generator=made) * wide).bfloat16()
        pairs.append((dlogits.to(device)[:, :words], hidden.to(device)))
    return pairs


def summed(pairs: list[tuple[Tensor, Tensor]], finish: bool = True) -> tuple[Tensor, Tensor]:
    dlogits, hidden = pairs[0]
    if dlogits.is_cuda:
        load_cuda()
    dweight = hidden.new_full((dlogits.shape[1], hidden.shape[1]), math.nan)  # what was there does not matter
    exponents = weight_sum.exponents_of(dweight)
    for index, (own, rows) in enumerate(pairs):
        ends = {"first": index == 0, "last": finish and index == len(pairs) - 1}
        weight_sum.add(dweight, exponents, own, rows, **ends)
    return dweight, exponents


def truth(pairs: list[tuple[Tensor, Tensor]]) -> Tensor:
    return torch.stack([dlogits.double().t() @ hidden.double() for dlogits, hidden in pairs]).sum(0)


def row_errors(found: Tensor, right: Tensor) -> Tensor:
    """Of each word, the rms error beside its own size."""
    return ((found.double() - right).square().mean(1) / right.square().mean(1)).sqrt()


@on_each_device
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_row_is_as_exact_after_many_blocks_as_after_one_rounding(
    device: str, shape: tuple[int, int, int]
) -> None:
    pairs = operands(shape, device)
    right = truth(pairs)
    found, once = row_errors(summed(pairs)[0], right), row_errors(right.bfloat16(), right)
    # fp16 has three bits more: 15 roundings of it, of sums that are half as large in the mean square, add an eighth.
    assert found.square().mean().sqrt() <= 1.1 * once.square().mean().sqrt() + 1e-6
    assert found.max() <= 2 * once.max() + 1e-6


@on_each_device
def test_blocks_rounded_to_bf16_would_be_seen(device: str) -> None:
    pairs = operands((64, 128, 256), device)
    right, coarse = truth(pairs), torch.zeros(128, 256, device=device, dtype=torch.bfloat16)
    for dlogits, hidden in pairs:
        coarse = (coarse.float() + dlogits.float().t() @ hidden.float()).bfloat16()
    once = row_errors(right.bfloat16(), right)
    assert row_errors(coarse, right).square().mean() > (2 * once).square().mean()


@on_each_device
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_one_block_alone_is_rounded_once(device: str, shape: tuple[int, int, int]) -> None:
    pairs = operands(shape, device, blocks=1)
    right = truth(pairs)
    found, _ = summed(pairs)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), right, rtol=2**-8, atol=float(right.abs().max()) * 1e-6)


def test_the_plain_implementation_makes_some_words_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = operands((33, 301, 520), "cpu", blocks=3)
    found = [summed(pairs, finish) for finish in (False, True)]
    monkeypatch.setattr(weight_sum, "PLAIN_BYTES", 7 * 520 * 4)
    for before, finish in zip(found, (False, True), strict=True):
        for one, other in zip(before, summed(pairs, finish), strict=True):
            near = one.view(torch.int8).int() - other.view(torch.int8).int()
            assert (near == 0).float().mean() > 0.99  # a product of fewer words may add up in another order


@on_each_device
def test_words_without_a_gradient_stay_zero_and_extremes_stay_what_they_are(device: str) -> None:
    rows, words, columns = 16, 24, 256
    largest = 2.0**100
    dlogits = torch.ones(rows, words, dtype=torch.bfloat16, device=device)
    dlogits[:, 0], dlogits[:, 1], dlogits[:, 2] = 0.0, 2.0**-120, largest
    dlogits[0, 3] = math.nan
    hidden = torch.ones(rows, columns, dtype=torch.bfloat16, device=device)
    found, _ = summed([(dlogits, hidden)] * 3)
    assert torch.equal(found[0], torch.zeros_like(found[0]))
    assert torch.equal(found[1], torch.full_like(found[1], 48 * 2.0**-120))
    assert torch.equal(found[2], torch.full_like(found[2], 48 * largest))
    assert found[3].isnan().all()
    assert torch.equal(found[4:], torch.full_like(found[4:], 48.0))


@on_each_device
def test_an_infinity_stays_one(device: str) -> None:
    dlogits = torch.ones(8, 8, dtype=torch.bfloat16, device=device)
    hidden = torch.ones(8, 16, dtype=torch.bfloat16, device=device)
    hidden[0, 5] = math.inf
    found, exponents = summed([(dlogits, hidden)] * 2, finish=False)
    assert int(exponents.view(torch.int8).max()) == MOST_EXPONENT
    found, _ = summed([(dlogits, hidden)] * 2)
    assert found[:, 5].isinf().all()
    assert found.isfinite().sum() == 8 * 15


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_waits_between_blocks_is_what_the_plain_implementation_leaves(
    cuda: str, shape: tuple[int, int, int]
) -> None:
    pairs = operands(shape, cuda, blocks=3)
    found, exponents = (t.cpu() for t in summed(pairs, finish=False))
    plain, right = summed([(a.cpu(), b.cpu()) for a, b in pairs], finish=False)
    apart = (exponents.view(torch.int8).int() - right.view(torch.int8).int()).abs()
    assert apart.max() <= 1  # sums in another order may lie on the other side of a power of two
    assert (apart > 0).float().mean() <= 0.01
    same = torch.zeros(len(found), dtype=torch.bool)
    for word in range(len(found)):
        same[word] = bool((apart.view(len(exponents), -1, EXPONENTS_OF_WORD)[:, word] == 0).all())
    halves = (t.view(torch.float16)[same].float() for t in (found, plain))
    torch.testing.assert_close(*halves, rtol=2**-10, atol=32.0)  # of 2^14, whose neighbours are 16 apart
    assert int(exponents.view(torch.int8).min()) >= LEAST_EXPONENT


@pytest.mark.gpu
def test_the_kernel_gives_the_same_bits_each_time(cuda: str) -> None:
    pairs = operands((320, 3000, 1536), cuda, blocks=4)
    first = summed(pairs)[0]
    assert all(torch.equal(first, summed(pairs)[0]) for _ in range(3))


@pytest.mark.gpu
def test_nothing_beyond_the_tensors_is_written(cuda: str) -> None:
    rows, words, columns = 40, 130, 264  # the last tiles have two words and eight columns
    (dlogits, hidden), *_ = operands((rows, words, columns), cuda, blocks=1)
    load_cuda()
    around = torch.full((words + 300, columns), 7.0, dtype=torch.bfloat16, device=cuda)
    fences = torch.full((2 * 2 * words + 600,), 7, dtype=torch.int32, device=cuda)
    dweight, exponents = around[:words], fences[: 2 * words].view(2, words)
    for first, last in itertools.pairwise([True, False, False]):
        weight_sum.add(dweight, exponents, dlogits, hidden, first=first, last=last)
    assert (around[words:] == 7).all()
    assert (fences[2 * words :] == 7).all()


@pytest.mark.gpu
@pytest.mark.parametrize("wrong", ["dtype", "rows", "stride", "offset", "exponents"])
def test_the_launcher_refuses_what_the_copy_engine_cannot_read(cuda: str, wrong: str) -> None:
    (dlogits, hidden), *_ = operands((64, 128, 256), cuda, blocks=1)
    load_cuda()
    dweight = torch.zeros(128, 256, dtype=torch.bfloat16, device=cuda)
    exponents = weight_sum.exponents_of(dweight)
    if wrong == "dtype":
        dlogits = dlogits.float()
    elif wrong == "rows":
        hidden = hidden[:-1]
    elif wrong == "stride":
        dlogits = dlogits.new_zeros(64, 129)[:, :128]
    elif wrong == "offset":
        hidden = hidden.new_zeros(64 * 256 + 4)[4:].view(64, 256)
    else:
        exponents = exponents[:, :-1]
    with pytest.raises(RuntimeError, match="refused"):
        weight_sum.add(dweight, exponents, dlogits, hidden, first=True, last=True)


def test_it_serves_large_bf16_weights_of_whole_vectors_alone() -> None:
    def given(dtype: torch.dtype, width: int) -> tuple[Tensor, Tensor]:
        return torch.zeros(4, width, dtype=dtype), torch.zeros(16, width, dtype=dtype)

    assert weight_sum.serves(*given(torch.bfloat16, 64))
    assert not weight_sum.serves(*given(torch.bfloat16, 60))
    assert not weight_sum.serves(*given(torch.float16, 64))
    assert not weight_sum.serves(*given(torch.float32, 64))


@on_each_device
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("words", [1000, 1001])
def test_a_head_in_many_blocks_is_as_exact_as_in_one(device: str, reduction: str, words: int) -> None:
    made = torch.Generator().manual_seed(words)
    hidden = torch.randn(512, 256, generator=made).bfloat16().to(device)
    weight = (torch.randn(words, 256, generator=made) / 16).bfloat16().to(device).requires_grad_()
    targets = torch.randint(words, (512,), generator=made).to(device)

    def dweight(head: Tensor, rows: Tensor, **options: int) -> Tensor:
        losses = ops.linear_cross_entropy(rows, head, targets, reduction=reduction, **options)
        return torch.autograd.grad(losses.sum(), head)[0]

    exact = weight.detach().double().requires_grad_()
    losses = torch.nn.functional.cross_entropy(hidden.double() @ exact.t(), targets, reduction=reduction)
    right = torch.autograd.grad(losses.sum(), exact)[0]
    # Arrays of a block's size: logits, where they are not written over also their gradients, and on a CPU a product.
    each = (4 if reduction == "none" else 2) + (4 if device == "cpu" else 0)
    blocks, one = dweight(weight, hidden, max_bytes=each * 32 * 1001), dweight(weight, hidden)
    error = [float((found.double() - right).square().mean().sqrt()) for found in (blocks, one)]
    assert error[0] <= 1.1 * error[1]


def test_jax_keeps_the_same_format() -> None:
    jax = pytest.importorskip("jax")
    from fuselm.kernels.jax_ops import weight_sum as for_jax

    pairs = operands((33, 72, 520), "cpu", blocks=3)
    bits, exponents = summed(pairs, finish=False)
    ends, _ = summed(pairs)
    to_jax = lambda t: jax.numpy.asarray(t.float().numpy()).astype("bfloat16")  # noqa: E731
    dweight = jax.numpy.zeros(bits.shape, "bfloat16")
    waiting = for_jax.exponents_of(dweight)
    for index, (dlogits, hidden) in enumerate(pairs):
        last = index == 2
        given = (dlogits.contiguous(), hidden)
        if last:
            finished, _ = for_jax._plain_added(*map(to_jax, given), dweight, waiting, True)
        dweight, waiting = for_jax._plain_added(*map(to_jax, given), dweight, waiting, False)
    as_int = jax.lax.bitcast_convert_type(dweight, "int16")
    assert (torch.from_numpy(jax.device_get(waiting).copy()) == exponents).float().mean() > 0.99
    near = torch.from_numpy(jax.device_get(as_int).copy()).int() - bits.view(torch.int16).int()
    assert (near.abs() <= 1).float().mean() > 0.99  # sums are in another order
    ours = torch.from_numpy(jax.device_get(finished.astype("float32")).copy())
    torch.testing.assert_close(ours, ends.float(), rtol=2**-7, atol=float(ends.abs().max()) * 1e-6)
