"""Whether views share places in memory: by counting places, and for the views that people write over."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fuselm.kernels.torch_ops.places import share_places, shares_places

MEMORY = torch.arange(4000)
QKV = MEMORY[: 2 * 5 * 7 * 8].view(2, 5, 7, 8)  # q 3 heads, k and v 2 each

sizes = st.lists(st.integers(0, 4), min_size=1, max_size=4)
views = sizes.flatmap(
    lambda shape: st.builds(
        lambda strides, offset: MEMORY.as_strided(shape, strides, offset),
        st.lists(st.integers(0, 30), min_size=len(shape), max_size=len(shape)),
        st.integers(0, 60),
    )
)


def places(x: Tensor) -> list[int]:
    return x.flatten().tolist()  # each number of MEMORY says where it is


@settings(max_examples=300, deadline=None)
@given(views)
def test_a_view_said_to_share_no_places_has_one_for_each_element(x: Tensor) -> None:
    if not shares_places(x):
        assert len(set(places(x))) == x.numel()


@settings(max_examples=600, deadline=None)
@given(views, views)
def test_views_said_to_share_no_places_do_not(a: Tensor, b: Tensor) -> None:
    assert share_places(a, b) == share_places(b, a)
    if not share_places(a, b):
        assert not set(places(a)) & set(places(b))


@pytest.mark.parametrize(
    "x",
    [
        QKV,
        QKV[:, :, :3],
        QKV[:, :, 3:5].transpose(1, 2),
        QKV[..., ::2],
        QKV.permute(3, 0, 2, 1),
        QKV[:, 1:2].expand(2, 1, 7, 8),
        QKV[:0],
        MEMORY.as_strided((2, 5, 7, 8), (400, 70, 9, 1)),
    ],
    ids=range(8),
)
def test_views_that_people_make_are_not_said_to_share_places(x: Tensor) -> None:
    assert len(set(places(x))) == x.numel()
    assert not shares_places(x)


@pytest.mark.parametrize(
    "x",
    [MEMORY.as_strided((2, 3, 8, 8), (100, 20, 4, 1)), QKV[:, :, :1].expand(2, 5, 4, 8), MEMORY.unfold(0, 4, 2)],
    ids=["heads that overlap", "expanded", "windows"],
)
def test_views_whose_elements_meet_are_found(x: Tensor) -> None:
    assert len(set(places(x))) < x.numel()
    assert shares_places(x)


TURNED = QKV.transpose(1, 2)  # [B, N, T, H]
PADDED = MEMORY.as_strided((2, 5, 7, 8), (300, 57, 8, 1))  # between tokens and rows of the batch memory of others


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (QKV[:, :, :3], QKV[:, :, 3:5]),
        (QKV[:, :, 3:5], QKV[:, :, :3]),
        (TURNED[:, :3], TURNED[:, 3:5]),
        (PADDED[:, :, :3], PADDED[:, :, 3:5]),
        (QKV[..., 0::2], QKV[..., 1::2]),
        (QKV[:, :2], QKV[:, 2:]),
        (QKV[:, ::2], QKV[:, 1::2]),
        (QKV[:1], QKV[1:]),
        (QKV[:, 2:, :3], QKV[:, :3, 3:]),
        (QKV[:, :, :0], QKV),
        (QKV, QKV.clone()),
    ],
    ids=range(11),
)
def test_parts_that_people_make_are_not_said_to_meet(a: Tensor, b: Tensor) -> None:
    assert not share_places(a, b)


def test_views_that_step_otherwise_are_answered_at_once() -> None:
    """Other steps from row to row of a batch, and then a million distances: a yes, though they do not meet."""
    memory = torch.empty(4, 1024, 32, 256, device="meta")
    assert share_places(memory[:2, :, :20], memory[::2, :, 20:])


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (QKV, QKV),
        (QKV[:, :, :4], QKV[:, :, 2:6]),
        (QKV[:, 1:], QKV[:, :2]),
        (QKV[..., ::2], QKV[..., 2:]),
        (QKV[:1], QKV[:, 4:]),
    ],
    ids=range(5),
)
def test_parts_that_meet_are_found(a: Tensor, b: Tensor) -> None:
    assert set(places(a)) & set(places(b))
    assert share_places(a, b)
