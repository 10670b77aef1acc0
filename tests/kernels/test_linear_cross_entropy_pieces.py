"""The loss over logits in pieces: to the bit what it is over rows, and what its kernel does not take."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fuselm.kernels.torch_ops import cross_entropy as rows_loss
from fuselm.kernels.torch_ops import load_cuda, pieces
from fuselm.kernels.torch_ops.pieces import Pieces

ROWS, PIECE, WORDS = 8, 16_896, 33_000  # two pieces, the last one not full
PLAIN = (-100, 0.0, 0.0, 0.0)

Call = tuple[Tensor, Tensor, int]  # the first piece, the rest, and how many words they are


@pytest.fixture(autouse=True)
def kernels(cuda: str) -> None:
    """What a call of an op would see to: here raw ops are called."""
    load_cuda()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("words", "piece"), [(131_072, 16_384), (128_256, 19_968), (33_000, 16_896), (262_144, 65_536)]
)
@pytest.mark.parametrize(
    "scalars", [(-100, 0.0, 0.0, 0.0), (-100, 0.0, 1e-3, 0.0), (3, 0.1, 1e-3, 5.0)], ids=["plain", "z", "all"]
)
def test_a_loss_over_pieces_has_the_bits_of_one_over_rows(
    cuda: str, words: int, piece: int, scalars: tuple[Any, ...]
) -> None:
    made = torch.Generator(cuda).manual_seed(0)
    rows, count = 65, math.ceil(words / piece)
    logits = 3 * torch.randn(rows, words, device=cuda, generator=made)
    whole = logits.bfloat16()
    targets = torch.randint(words, (rows,), device=cuda, generator=made)
    targets[:count] = torch.arange(count, device=cuda) * piece  # the first word of every piece, and the last of the row
    targets[count], targets[count + 1], targets[count + 2] = words - 1, 3, -100
    dweight = torch.full((words, rows + 15), 7.0, dtype=torch.bfloat16, device=cuda)
    memory = torch.empty(Pieces.workspace_size(rows, piece, rows + 15), dtype=torch.bfloat16, device=cuda)
    parts = Pieces(memory, dweight, rows, piece)
    if torch.cuda.get_device_capability() < (9, 0):  # no clusters, and so nobody who would take a row in pieces
        with pytest.raises(RuntimeError, match="refused"):
            pieces.inplace(parts, targets, None, *scalars, True, 0b1111)
        return
    for mean, outputs in ((True, 0b1111), (False, 0b0111)):
        right_gradient = whole.clone()
        right = rows_loss._inplace(right_gradient, targets, None, *scalars, mean, outputs)
        for own, part in parts:
            part.copy_(whole[:, own])
        found = pieces.inplace(parts, targets, None, *scalars, mean, outputs)
        for a, b in zip(found, right, strict=True):
            assert (a is None and b is None) or torch.equal(a, b)
        for own, part in parts:
            assert torch.equal(part, right_gradient[:, own])
    assert (dweight[(count - 1) * piece :] == 7.0).all()  # the place of the last piece's gradient is nobody's


def call(rows: int = ROWS, piece: int = PIECE, words: int = WORDS, device: str = "cuda", **changed: int) -> Call:
    """What the kernel takes, but for what is changed: strides, and where the tensors begin."""
    count, room = math.ceil(words / piece), rows * piece + 64
    apart = changed.get("apart", room)
    memory = torch.ones((count + 1) * room, dtype=torch.bfloat16, device=device)
    strides = changed.get("row", piece), changed.get("step", 1)
    first = memory.as_strided((rows, piece), strides, changed.get("begin", 0))
    rest_strides = apart, piece, changed.get("rest_step", 1)
    rest = memory.as_strided((count - 1, rows, piece), rest_strides, room + changed.get("rest_begin", 0))
    return first, rest, words


def loss_of(first: Tensor, rest: Tensor, words: int) -> Any:
    targets = torch.zeros(len(first), dtype=torch.int64, device=first.device)
    return pieces._pieces(first, rest, targets, None, words, *PLAIN, True, 0b1111)


def changed(change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Callable[[], Call]:
    def made() -> Call:
        first, rest, words = call()
        return (*change(first, rest), words)

    return made


REFUSED: dict[str, Callable[[], Call]] = {
    "first in fp16": changed(lambda first, rest: (first.half(), rest)),
    "rest in fp32": changed(lambda first, rest: (first, rest.float())),
    "first with a dimension too many": changed(lambda first, rest: (first[..., None], rest)),
    "rest with a dimension too many": changed(lambda first, rest: (first, rest[..., None])),
    "rest of fewer rows": changed(lambda first, rest: (first, rest[:, :-1])),
    "rest of fewer words": changed(lambda first, rest: (first, rest[..., :-8])),
    "rows of first apart": lambda: call(row=PIECE + 8),
    "words of first apart": lambda: call(step=2),
    "rows of rest apart": changed(lambda first, rest: (first, rest.repeat_interleave(2, 1)[:, ::2])),
    "words of rest apart": lambda: call(rest_step=2),
    "pieces one over the other": lambda: call(apart=ROWS * PIECE - 8),
    "pieces that are no vectors apart": lambda: call(apart=ROWS * PIECE + 4),
    "first unaligned": lambda: call(begin=1),
    "rest unaligned": lambda: call(rest_begin=1),
    "a piece that is no vectors": lambda: call(piece=PIECE + 4),
    "words that are no vectors": lambda: (*call()[:2], WORDS + 4),
    "words too few": lambda: (*call()[:2], PIECE),
    "words too many": lambda: (*call()[:2], 2 * PIECE + 8),
    "a row of one part": lambda: call(piece=16_384, words=16_384),
    "a part larger than a piece": lambda: call(piece=8192, words=131_072),
    "a row that is too wide": lambda: call(piece=131_080, words=262_152),
}


@pytest.mark.gpu
@pytest.mark.parametrize("case", REFUSED)
def test_what_the_kernel_does_not_take_is_refused_before_anything_is_written(case: str) -> None:
    first, rest, words = REFUSED[case]()
    # For its dtype or its shape; on a GPU without clusters every call is, for the device.
    with pytest.raises(RuntimeError, match=r"refused, status [12]\b"):
        loss_of(first, rest, words)
    assert (first == 1).all()
    assert (rest == 1).all()


@pytest.mark.gpu
def test_what_is_changed_above_is_taken_as_it_was() -> None:
    first, rest, words = call()
    if torch.cuda.get_device_capability() < (9, 0):  # no clusters
        with pytest.raises(RuntimeError, match="a kernel was refused"):
            loss_of(first, rest, words)
        return
    loss = loss_of(first, rest, words)[0]
    torch.testing.assert_close(loss.item(), math.log(words), rtol=1e-5, atol=0)
    assert (rest[0, :, words - PIECE :] == 1).all()  # past the last word
    assert (rest[0, :, : words - PIECE] != 1).all()
    assert (first != 1).all()
