"""A head's weight gradient, summed over blocks of rows in 16 bits: the raw op of linear_cross_entropy_dweight.cu.

While there is more to come the sum waits in dweight's own memory as fp16, where 64 numbers of a row (in each 256
columns those whose number modulo 8 is 0 or 1, or 2 or 3, and so on) share a power of two, a byte in `exponents`. The
last block leaves bf16. Knows this format and nothing of losses or blocks.

    exponents = exponents_of(dweight)
    add(dweight, exponents, dlogits, rows, first=True, last=False)      # dweight = dlogits.T @ rows, in that format
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fuselm.kernels import linear_cross_entropy as contract
from fuselm.kernels.torch_ops import cuda_state, register

HOPPER = (9, 0)
PLAIN_BYTES = 16 << 20  # of fp32 sums that the plain implementation makes at a time


def serves(hidden: Tensor, weight: Tensor) -> bool:
    """Whether a sum over blocks of these can be taken so; rows of dlogits must begin at multiples of 16 bytes then."""
    if not hidden.dtype == weight.dtype == torch.bfloat16 or weight.shape[1] % 8:
        return False
    if hidden.is_cuda:
        return cuda_state() == "fused" and torch.cuda.get_device_capability(hidden.device) == HOPPER
    return hidden.is_cpu


def exponents_of(dweight: Tensor) -> Tensor:
    """Room for the exponents of a sum: four bytes for each word and tile of 256 columns."""
    vocabulary, width = dweight.shape
    return dweight.new_empty(contract.tiles_across(width), vocabulary, dtype=torch.int32)


def add(dweight: Tensor, exponents: Tensor, dlogits: Tensor, rows: Tensor, *, first: bool, last: bool) -> None:
    """Add dlogits [M, V] transposed times rows [M, D] to what is in dweight [V, D], or with `first` to nothing."""
    _dweight(dlogits, rows, dweight, exponents, first, last, 0)


def _plain_dweight(
    dlogits: Tensor, hidden: Tensor, dweight: Tensor, exponents: Tensor, first: bool, last: bool, outputs: int
) -> None:
    rows = hidden.float()
    step = max(1, PLAIN_BYTES // (4 * dweight.shape[1]))
    for start in range(0, len(dweight), step):
        words = slice(start, start + step)
        total = dlogits[:, words].t().float() @ rows  # [words, D]
        _add_words(total, dweight[words], exponents[:, words], first, last)


def _add_words(total: Tensor, dweight: Tensor, exponents: Tensor, first: bool, last: bool) -> None:
    tiles, shares = len(exponents), contract.EXPONENTS_OF_WORD
    halves = dweight.view(torch.float16)
    stored = exponents.view(torch.int8).view(tiles, -1, shares).transpose(0, 1)  # [words, tiles, 4]
    if not first:
        total += torch.ldexp(halves.float(), _by_column(stored, total) - contract.TOP_EXPONENT)
    if last:
        dweight.copy_(total)
        return
    finite = total.abs().nan_to_num(nan=0.0, posinf=torch.finfo(torch.float32).max)
    padded = F.pad(finite, (0, tiles * contract.TILE_COLUMNS - total.shape[1]))
    largest = padded.view(len(total), tiles, -1, shares, 2).amax((2, 4))  # [words, tiles, 4]
    exponent = (torch.frexp(largest).exponent - 1).masked_fill(largest == 0, contract.LEAST_EXPONENT)
    stored.copy_(exponent.clamp(contract.LEAST_EXPONENT, contract.MOST_EXPONENT))
    halves.copy_(torch.ldexp(total, contract.TOP_EXPONENT - _by_column(stored, total)))


def _by_column(stored: Tensor, like: Tensor) -> Tensor:
    """The exponent of each element of [words, D]."""
    column = torch.arange(like.shape[1], device=like.device)
    return stored[:, column // contract.TILE_COLUMNS, column % 8 // 2].int()


def _fake_dweight(
    dlogits: Tensor, hidden: Tensor, dweight: Tensor, exponents: Tensor, first: bool, last: bool, outputs: int
) -> None:
    return None


_dweight = register(
    "linear_cross_entropy_dweight(Tensor dlogits, Tensor hidden, Tensor(a!) dweight, Tensor(b!) exponents,"
    " bool first, bool last, int outputs) -> ()",
    _plain_dweight,
    _fake_dweight,
)
