"""A head's first rows all at once: their logits in pieces of the vocabulary, all but one of them in dweight's memory.

As long as there is no gradient of the weight [V, D], its memory is free, and has room for the logits of as many rows as
it has columns. Piece i, [rows, words], lies where the gradient of the words of piece i - 1 will be, and piece 0 in a
workspace of its own. So from the last piece to the first, each one's gradient is written where nothing is needed any
more. Knows where pieces lie and how a loss is taken over them; nothing of matmuls.

    pieces = Pieces(workspace, dweight, rows, words)
    for words, logits in pieces: ...                        # logits [rows, those words] are to be written
    loss, losses, lse, counted = inplace(pieces, targets, None, *scalars, mean, outputs)
    for words, dlogits in reversed(pieces): ...             # dweight[words] may be written, and is no piece's any more
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fuselm.kernels.torch_ops import cross_entropy as rows_loss
from fuselm.kernels.torch_ops import register


class Pieces:
    """The pieces, and in `total` room for an fp32 sum over them, [rows, D]."""

    def __init__(self, workspace: Tensor, dweight: Tensor, rows: int, words: int) -> None:
        vocabulary, width = dweight.shape
        self.rows, self.words, self.vocabulary = rows, words, vocabulary
        count = math.ceil(vocabulary / words)
        self.first = workspace[: rows * words].view(rows, words)
        self.rest = dweight.as_strided((count - 1, rows, words), (words * width, words, 1))
        self.total = workspace[rows * words :][: 2 * rows * width].view(torch.float32).view(rows, width)

    @staticmethod
    def workspace_size(rows: int, words: int, width: int) -> int:
        """Elements of 16 bits that the first piece and the sum take."""
        return rows * words + 2 * rows * width

    def _piece(self, index: int) -> tuple[slice, Tensor]:
        start = index * self.words
        words = slice(start, min(start + self.words, self.vocabulary))
        whole = self.first if index == 0 else self.rest[index - 1]
        return words, whole[:, : words.stop - start]

    def __iter__(self) -> Iterator[tuple[slice, Tensor]]:
        return map(self._piece, range(len(self.rest) + 1))

    def __reversed__(self) -> Iterator[tuple[slice, Tensor]]:
        return map(self._piece, reversed(range(len(self.rest) + 1)))


def inplace(pieces: Pieces, targets: Tensor, count: Tensor | None, *others: Any) -> Any:
    """What cross_entropy.py's raw op of this name gives for the logits as a whole: (loss, losses, lse, counted)."""
    return _pieces(pieces.first, pieces.rest, targets, count, pieces.vocabulary, *others)


def _plain_pieces(first: Tensor, rest: Tensor, targets: Tensor, count: Tensor | None, words: int, *others: Any) -> Any:
    logits = torch.cat((first, *rest), -1)[:, :words]
    made = rows_loss._plain_inplace(logits, targets, count, *others)
    for piece, gradient in zip((first, *rest), logits.split(first.shape[1], -1), strict=True):
        piece[:, : gradient.shape[1]] = gradient
    return made


def _fake_pieces(first: Tensor, rest: Tensor, *others: Any) -> Any:
    targets, count, words, *scalars = others
    return rows_loss._fake_inplace(first.new_empty(len(first), words), targets, count, *scalars)


_pieces = register(
    "cross_entropy_pieces(Tensor(a!) first, Tensor(b!) rest, Tensor targets, Tensor? count, int words,"
    f" {rows_loss._SCALARS}, bool mean, int outputs) -> (Tensor, Tensor, Tensor, Tensor)",
    _plain_pieces,
    _fake_pieces,
)
