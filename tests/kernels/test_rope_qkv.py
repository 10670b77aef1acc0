"""What rope_qkv promises beyond the generic suite: that it is rope of views, to the bit, in place and not, and that the
gradient of the packed tensor comes whole, whichever of the three results was used."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fuselm import ops
from fuselm.kernels.spec import RefusedInput
from tests.kernels.arrays import LAYOUTS, lay_out
from tests.kernels.problems import DEVICES

on_each_device = pytest.mark.parametrize("device", DEVICES, indirect=True)
in_each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
both_ways = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "neighbours"])
in_place_or_not = pytest.mark.parametrize("inplace", [False, True], ids=["apart", "inplace"])

Three = tuple[Tensor, Tensor, Tensor]


def drawn(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0) -> Tensor:
    return torch.randn(shape, device=device, generator=torch.Generator(device).manual_seed(seed)).to(dtype)


def tables(rows: int, width: int, device: str = "cpu") -> dict[str, Tensor]:
    """cos and sin of rows of positions, for heads of that width."""
    frequencies = 100.0 ** (-torch.arange(width // 2, dtype=torch.float64) / (width // 2))
    angles = torch.arange(rows, dtype=torch.float64)[:, None] * frequencies
    return {"cos": angles.cos().float().to(device), "sin": angles.sin().float().to(device)}


def parts(qkv: Tensor, kv_heads: int) -> Three:
    first = qkv.shape[2] - 2 * kv_heads
    return qkv[:, :, :first], qkv[:, :, first : first + kv_heads], qkv[:, :, first + kv_heads :]


def of_views(qkv: Tensor, kv_heads: int, **given: Any) -> Three:
    """What it stands for: rope of two views, and the third one."""
    q, k, v = parts(qkv, kv_heads)
    return *ops.rope(q, k, **given), v


def gradient(made: Three, sent: Three, source: Tensor) -> Tensor:
    pairs = [(y, g) for y, g in zip(made, sent, strict=True) if y.numel()]
    return torch.autograd.grad([y for y, _ in pairs], source, [g for _, g in pairs])[0]


# ---- what it computes ----------------------------------------------------------------------------------------------


@on_each_device
@in_each_dtype
@both_ways
@in_place_or_not
@pytest.mark.parametrize("positioned", [False, True], ids=["in-order", "positions"])
def test_it_is_rope_of_views_to_the_bit(
    dtype: torch.dtype, interleaved: bool, inplace: bool, positioned: bool, device: str
) -> None:
    for width, heads, kv_heads in ((64, 12, 4), (64, 7, 1), (40, 11, 3), (6, 5, 0), (100, 4, 2), (512, 3, 1)):
        leaf = drawn(2, 9, heads, width, dtype=dtype, device=device).requires_grad_()
        given: dict[str, Any] = {**tables(20, width, device), "interleaved": interleaved}
        if positioned:
            given["positions"] = torch.arange(18, device=device).view(2, 9)
        expected = of_views(leaf * 2, kv_heads, **given)
        sent = tuple(drawn(*y.shape, dtype=dtype, device=device, seed=3 + i) for i, y in enumerate(expected))
        right = gradient(expected, sent, leaf)
        found = ops.rope_qkv(leaf * 2, kv_heads=kv_heads, inplace=inplace, **given)
        assert all(map(torch.equal, found, expected)), (width, heads, kv_heads)
        assert torch.equal(gradient(found, sent, leaf), right), (width, heads, kv_heads)
        with torch.no_grad():
            again = ops.rope_qkv(leaf * 2, kv_heads=kv_heads, inplace=inplace, **given)
        assert all(map(torch.equal, again, expected)), (width, heads, kv_heads)


@on_each_device
def test_without_a_number_q_k_and_v_have_as_many_heads(device: str) -> None:
    qkv = drawn(2, 5, 6, 16, device=device)
    given = tables(5, 16, device)
    assert all(map(torch.equal, ops.rope_qkv(qkv, **given), of_views(qkv, 2, **given)))


@on_each_device
@pytest.mark.parametrize("used", ["q", "k", "v", "qk", "qv", "kv"])
def test_the_gradient_is_whole_whichever_results_are_used(used: str, device: str) -> None:
    leaf = drawn(2, 5, 8, 16, device=device).requires_grad_()
    given = tables(5, 16, device)
    results = []
    for made in (of_views(leaf * 2, 2, **given), ops.rope_qkv(leaf * 2, kv_heads=2, **given)):
        picked = [y for name, y in zip("qkv", made, strict=True) if name in used]
        results.append(torch.autograd.grad(sum((y * y).sum() for y in picked), leaf)[0])
    assert torch.equal(*results)
    assert results[0].count_nonzero()


@on_each_device
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_may_come_lying_anyhow(layout: str, device: str) -> None:
    leaf = drawn(2, 5, 8, 64, dtype=torch.bfloat16, device=device).requires_grad_()
    given = tables(5, 64, device)
    sent = tuple(drawn(*y.shape, dtype=y.dtype, device=device, seed=i) for i, y in enumerate(parts(leaf, 2)))
    right = gradient(ops.rope_qkv(leaf * 2, kv_heads=2, **given), sent, leaf)
    for which in range(3):
        mine = tuple(lay_out(g, layout) if i == which else g for i, g in enumerate(sent))
        assert torch.equal(gradient(ops.rope_qkv(leaf * 2, kv_heads=2, **given), mine, leaf), right)


# ---- in place ------------------------------------------------------------------------------------------------------


@on_each_device
@pytest.mark.parametrize("learns", [False, True])
def test_in_place_all_three_are_views(learns: bool, device: str) -> None:
    qkv = drawn(2, 5, 8, 16, device=device).requires_grad_(learns) * 1
    places = [part.data_ptr() for part in parts(qkv, 2)]
    before = qkv._version
    found = ops.rope_qkv(qkv, kv_heads=2, inplace=True, **tables(5, 16, device))
    assert [x.data_ptr() for x in found] == places
    assert qkv._version > before
    assert all(x.requires_grad == learns for x in found)


@on_each_device
def test_whoever_kept_what_was_written_over_hears_of_it(device: str) -> None:
    leaf = drawn(2, 5, 6, 16, device=device).requires_grad_()
    qkv = leaf * 2
    kept = qkv.square()  # wants qkv again
    q, k, v = ops.rope_qkv(qkv, inplace=True, **tables(5, 16, device))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (kept.sum() + q.sum() + k.sum() + v.sum()).backward()


def test_what_cannot_be_written_over_is_refused_and_left_as_it_was() -> None:
    leaf = drawn(2, 5, 6, 16).requires_grad_()
    before, given = leaf.detach().clone(), tables(5, 16)
    for qkv in (leaf, leaf.view(2, 5, 6, 16), leaf.expand(2, 5, 6, 16)):
        with pytest.raises(RefusedInput, match="a leaf that requires a gradient, nor over a view of one"):
            ops.rope_qkv(qkv, inplace=True, **given)
    overlapping = drawn(600).as_strided((2, 5, 6, 16), (150, 26, 5, 1))
    for qkv in (drawn(2, 5, 1, 16).expand(2, 5, 6, 16), overlapping):
        said = "^rope_qkv: inplace cannot write over a tensor of which several elements share a place in memory; got"
        with pytest.raises(
            RefusedInput, match=rf"{said} such a qkv, float32.* Pass qkv\.clone\(\), or leave inplace out\.$"
        ):
            ops.rope_qkv(qkv, inplace=True, **given)
    assert torch.equal(leaf, before)


def test_tensors_elsewhere_are_refused_by_their_names() -> None:
    with pytest.raises(
        RefusedInput, match=r"^rope_qkv: all tensors .* one device; got qkv on meta and cos on cpu\. Move"
    ):
        ops.rope_qkv(drawn(2, 5, 6, 16).to("meta"), **tables(5, 16))


def test_numpys_whole_numbers_count() -> None:
    qkv, given = drawn(2, 5, 6, 16), tables(5, 16)
    found = ops.rope_qkv(qkv, kv_heads=np.int64(2), **given)
    assert all(map(torch.equal, found, ops.rope_qkv(qkv, kv_heads=2, **given)))
    with pytest.raises(RefusedInput, match=r"kv_heads must be a whole number"):
        ops.rope_qkv(qkv, kv_heads=np.float32(2), **given)


# ---- refusals ------------------------------------------------------------------------------------------------------


def test_tables_that_want_a_gradient_are_refused() -> None:
    given = tables(5, 16)
    given["sin"].requires_grad_()
    with pytest.raises(RefusedInput, match=r"constants and have no gradient; got a sin that requires one"):
        ops.rope_qkv(drawn(2, 5, 6, 16).requires_grad_(), **given)


@pytest.mark.parametrize("wrong", [None, 1, "yes"])
def test_inplace_is_true_or_false(wrong: Any) -> None:
    for learns in (False, True):
        with pytest.raises(RefusedInput, match="inplace must be True or False"):
            ops.rope_qkv(drawn(2, 5, 6, 16).requires_grad_(learns), inplace=wrong, **tables(5, 16))


def test_a_cpu_refuses_positions_that_the_tables_lack() -> None:
    for learns in (False, True):
        qkv = drawn(2, 3, 6, 16).requires_grad_(learns)
        with pytest.raises(RefusedInput, match=r"position 9 at \[1\] for tables of 5 rows"):
            ops.rope_qkv(qkv, positions=torch.tensor([0, 9, 1]), **tables(5, 16))


def test_what_is_no_tensor_is_named() -> None:
    with pytest.raises(RefusedInput, match=r"qkv must be a torch.Tensor; got a list"):
        ops.rope_qkv([1.0], **tables(5, 16))  # type: ignore[arg-type]


# ---- CUDA ----------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_raw_calls_that_do_not_belong_together_are_refused(cuda: str) -> None:
    q, k, v = parts(drawn(2, 5, 8, 16, device=cuda), 2)
    cos, sin = tables(5, 16, cuda).values()
    raw = torch.ops.fuselm.rope_qkv_backward
    assert raw(q, k, v, cos, sin, None, False, 1).shape == (2, 5, 8, 16)
    wrong = [
        lambda: raw(q, k, v[:, :, :1], cos, sin, None, False, 1),
        lambda: raw(q, k, v.half(), cos, sin, None, False, 1),
        lambda: raw(q, k[:1], v[:1], cos, sin, None, False, 1),
        lambda: raw(q, k, v[..., :8], cos, sin, None, False, 1),
        lambda: raw(q, k, v, cos[:4], sin[:4], None, False, 1),
        lambda: raw(q, k, v, cos, sin.half(), None, False, 1),
        lambda: raw(q[0], k[0], v[0], cos, sin, None, False, 1),
        lambda: raw(q, k, v, cos, sin, torch.zeros(4, dtype=torch.int64, device=cuda), False, 1),
    ]
    for call in wrong:
        with pytest.raises(RuntimeError, match="a kernel was refused"):
            call()


@pytest.mark.gpu
@in_each_dtype
@both_ways
def test_vectors_and_elements_one_by_one_are_the_same_bits(cuda: str, dtype: torch.dtype, interleaved: bool) -> None:
    for width in (2, 6, 8, 16, 24, 40, 64, 96, 100, 128, 256, 510, 512):
        sent = tuple(drawn(2, 300, heads, width, dtype=dtype, device=cuda, seed=heads) for heads in (9, 2, 2))
        given = (*tables(300, width, cuda).values(), None, interleaved, 1)
        raw = torch.ops.fuselm.rope_qkv_backward
        apart = raw(*(lay_out(g, "columns") for g in sent), *given)
        assert torch.equal(raw(*sent, *given), apart), width
        expected = torch.ops.fuselm.rope_forward(*sent[:2], *given[:2], None, None, None, 1e-6, interleaved, True, 3)
        assert torch.equal(apart, torch.cat((*expected[:2], sent[2]), dim=2)), width


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["contiguous", "columns"])
def test_huge_gradients_of_more_elements_than_32_bits_can_count(cuda: str, layout: str) -> None:
    tokens, width = (1 << 31) // (3 * 512) + 5, 512
    cos, sin = tables(50, width, cuda).values()
    positions = torch.arange(tokens, device=cuda) % 50
    sent = []
    for seed in range(3):
        base = torch.empty(1, tokens, 1, width * (2 if layout == "columns" else 1), dtype=torch.bfloat16, device=cuda)
        base.normal_(generator=torch.Generator(cuda).manual_seed(seed))
        sent.append(base[..., ::2] if layout == "columns" else base)
    found = torch.ops.fuselm.rope_qkv_backward(*sent, cos, sin, positions, False, 1)
    for rows in (slice(0, 3), slice(tokens - 7, tokens)):
        few = tuple(g[:, rows].contiguous() for g in sent)
        right = torch.ops.fuselm.rope_qkv_backward(*few, cos, sin, positions[rows], False, 1)
        assert torch.equal(found[:, rows], right)
