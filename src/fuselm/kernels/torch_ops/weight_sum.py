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
    tiles, width = len(exponents), dweight.shape[1]
    shape = (len(dweight), tiles, -1, contract.EXPONENTS_OF_WORD, 2)
    halves = dweight.view(torch.float16)
    stored = exponents.view(torch.int8).view(tiles, -1, contract.EXPONENTS_OF_WORD).transpose(0, 1)  # [words, tiles, 4]

    def by_share(columns: Tensor) -> Tensor:  # [words, D] -> [words, tiles, 32, 4, 2], those past D being 0
        return F.pad(columns, (0, tiles * contract.TILE_COLUMNS - width)).view(shape)

    def powers(exponent: Tensor) -> Tensor:  # of two, for each share
        return torch.ldexp(torch.ones_like(exponent, dtype=torch.float32), exponent)[:, :, None, :, None]

    sums = by_share(total)
    if not first:
        sums = sums.addcmul(by_share(halves.float()), powers(stored.int() - contract.TOP_EXPONENT))
    if last:
        dweight.copy_(sums.flatten(1)[:, :width])
        return
    largest = sums.abs().amax((2, 4))  # [words, tiles, 4]
    if not largest.isfinite().all():  # what is no number has no size, and an infinity that of the largest number
        largest = sums.abs().nan_to_num(nan=0.0).amax((2, 4))
    exponent = (torch.frexp(largest).exponent - 1).masked_fill(largest == 0, contract.LEAST_EXPONENT)
    stored.copy_(exponent.clamp(contract.LEAST_EXPONENT, contract.MOST_EXPONENT))
    halves.copy_((sums * powers(contract.TOP_EXPONENT - stored.int())).flatten(1)[:, :width])


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
