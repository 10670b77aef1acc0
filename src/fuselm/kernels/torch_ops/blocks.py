"""The logits of a head a block of rows at a time, and the sums over blocks: what linear_cross_entropy.py is made of.

Knows torch's matmul and how much memory may be held; nothing of losses.

    blocks = Blocks(hidden, weight, targets, bias, max_bytes, DHIDDEN | DWEIGHT)
    for block in blocks:
        logits = blocks.logits(block)           # in memory that the next block's will take; the first may be Pieces
        blocks.add(block, dlogits)
    dhidden, dweight, dbias = blocks.gradients(hidden.shape)
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fuselm.kernels import linear_cross_entropy as contract
from fuselm.kernels.torch_ops import weight_sum
from fuselm.kernels.torch_ops.pieces import Pieces

DHIDDEN, DWEIGHT, DBIAS = 1, 2, 4  # mask of gradients
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


class Blocks:
    """One call's tensors, flat and in hidden's dtype; one block's logits at a time; and the sums over blocks.

    `wanted` are the gradients to be made, `held` how many arrays of a block's size are there at once.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        bias: Tensor | None,
        max_bytes: int,
        wanted: int,
        held: int = 1,
    ) -> None:
        vocabulary, width = weight.shape
        self.hidden = _aligned(hidden.reshape(-1, width))  # [M, D]
        self.weight = _aligned(weight.to(hidden.dtype))  # [V, D]
        if not _multiplies(hidden):
            self.weight = self.weight.float()  # once for all blocks
        self.bias = None if bias is None else bias.to(hidden.dtype)
        self.targets = targets.reshape(-1).contiguous()  # [M]
        rows = len(self.targets)
        plan = plan_pieces(self.hidden, weight, max_bytes) if wanted & DWEIGHT and held == 1 else None
        self.begun = plan[0] if plan else 0  # rows that come first, in pieces
        logit_bytes = held * hidden.element_size() + (0 if _multiplies(hidden) else 4)
        self.size = contract.block_rows(rows - self.begun, vocabulary, logit_bytes, max_bytes)
        # Rows begin at multiples of 16 bytes, as the loads of tensor cores want it, also where the vocabulary is odd.
        across = math.ceil(vocabulary / 8) * 8
        blocks_take = self.size * across if self.begun < rows else 0
        pieces_take = Pieces.workspace_size(*plan, width) if plan else 0
        memory = hidden.new_empty(max(blocks_take, pieces_take))
        self.workspace = memory[:blocks_take].view(-1, across)[:, :vocabulary]
        self.dhidden = hidden.new_empty(self.hidden.shape) if wanted & DHIDDEN else None
        self.dweight: Tensor | None = None
        self.exponents: Tensor | None = None
        self.dbias: Tensor | None = None
        self.dweight_dtype = sum_dtype(hidden, weight)
        if wanted & DWEIGHT:
            self._begin_dweight(weight, max_bytes)
        self.pieces = Pieces(memory, self.dweight, *plan) if plan and self.dweight is not None else None
        if wanted & DBIAS:
            self.dbias = weight.new_zeros(vocabulary, dtype=torch.float32)

    @property
    def is_one(self) -> bool:
        """Whether a single block has all rows."""
        return len(self.targets) <= (self.begun or self.size)

    def _begin_dweight(self, weight: Tensor, max_bytes: int) -> None:
        """Choose what its sum waits in.

        One block of many tiles is a matmul in the gradient's dtype. Several have a kernel: the sum waits in 16 bits,
        with exponents, and no fp32 is written and read again. Fewer tiles, and many without the kernel, are summed in
        fp32, one block's too, unless that takes more memory than the logits may. Then several blocks have the kernel,
        or, without it, a sum that each block rounds to the gradient's dtype, as a step of micro-batches does; one block
        is a matmul. Where torch multiplies in fp32 alone, a block's share is in fp32 anyway, and so is the sum.
        """
        has_many = weight.is_cuda and contract.has_many_tiles(*weight.shape)
        is_small = 4 * weight.numel() <= max_bytes
        has_begun = self.begun > 0  # in dweight's memory
        direct = _multiplies(self.hidden)
        asks = has_begun or (direct and (has_many or not is_small))
        is_served = asks and not self.is_one and weight_sum.serves(self.hidden, weight)
        in_fp32 = not (is_served or has_begun or (has_many and self.is_one)) and (is_small or not direct)
        dtype = torch.float32 if in_fp32 else self.dweight_dtype
        has_rows = len(self.targets) > 0
        self.dweight = weight.new_empty(weight.shape, dtype=dtype) if has_rows else weight.new_zeros(weight.shape)
        if is_served:
            self.exponents = weight_sum.exponents_of(self.dweight)

    def __iter__(self) -> Iterator[slice]:
        if self.begun:
            yield slice(0, self.begun)
        for start in range(self.begun, len(self.targets), self.size):
            yield slice(start, min(start + self.size, len(self.targets)))

    def logits(self, block: slice) -> Tensor | Pieces:
        """Those of the rows of a block, [rows, V], in memory that the next block's will take."""
        rows = self.hidden[block]
        if self.pieces is not None and block.start == 0:
            for words, piece in self.pieces:
                _multiply(rows, self.weight[words].t(), piece, None if self.bias is None else self.bias[words])
            return self.pieces
        out = self.workspace[: len(rows)]
        _multiply(rows, self.weight.t(), out, self.bias)
        return out

    def add(self, block: slice, dlogits: Tensor | Pieces) -> None:
        """Carry the gradients of a block's logits on; the logits are not needed any more."""
        if isinstance(dlogits, Pieces):
            self._add_pieces(dlogits)
            return
        if self.exponents is not None and dlogits.stride(0) % 8:
            dlogits = self.workspace[: len(dlogits)].copy_(dlogits)
        if self.dhidden is not None:
            _multiply(dlogits, self.weight, self.dhidden[block])
        if self.dweight is not None and self.exponents is not None:
            ends = {"first": block.start == 0, "last": block.stop == len(self.targets)}
            weight_sum.add(self.dweight, self.exponents, dlogits, self.hidden[block], **ends)
        elif self.dweight is not None:
            _multiply(dlogits.t(), self.hidden[block], self.dweight, self.dweight if block.start else None)
        if self.dbias is not None:
            self.dbias += dlogits.sum(0, dtype=torch.float32)

    def _add_pieces(self, pieces: Pieces) -> None:
        """From the last to the first: the gradient of a piece's words takes the place of the piece after it."""
        rows = self.hidden[: pieces.rows]
        for words, dlogits in reversed(pieces):
            if self.dhidden is not None:
                is_last = words.stop == pieces.vocabulary
                _multiply(dlogits, self.weight[words], pieces.total, None if is_last else pieces.total)
            if self.dbias is not None:
                self.dbias[words] = dlogits.sum(0, dtype=torch.float32)
            assert self.dweight is not None
            own = self.dweight[words]
            if self.is_one and contract.has_many_tiles(*own.shape):
                _multiply(dlogits.t(), rows, own)
            else:
                sums = weight_sum.exponents_of(own) if self.exponents is None else self.exponents[:, words]
                weight_sum.add(own, sums, dlogits, rows, first=True, last=self.is_one)
        if self.dhidden is not None:
            self.dhidden[: pieces.rows] = pieces.total

    def gradients(self, shape: torch.Size) -> Gradients:
        """dhidden of hidden's shape, dweight and dbias."""
        dhidden = None if self.dhidden is None else self.dhidden.view(shape)
        dweight = None if self.dweight is None else self.dweight.to(self.dweight_dtype)
        return dhidden, dweight, self.dbias


def plan_pieces(hidden: Tensor, weight: Tensor, max_bytes: int) -> tuple[int, int] | None:
    """Rows and words, by the contract, where there are kernels for it: on Hopper, of weights of many tiles."""
    vocabulary, width = weight.shape
    if not hidden.is_cuda or not contract.has_many_tiles(vocabulary, width) or not weight_sum.serves(hidden, weight):
        return None
    processors = torch.cuda.get_device_properties(hidden.device).multi_processor_count
    return contract.first_pieces(len(hidden), vocabulary, width, max_bytes, processors)


def sum_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """What a gradient of the weight leaves the raw ops in: bf16 among bf16, which has fp32's range, else fp32.

    An fp16 sum over many rows could overflow before backward divides it by their number.
    """
    return torch.bfloat16 if hidden.dtype == weight.dtype == torch.bfloat16 else torch.float32


def _aligned(matrix: Tensor) -> Tensor:
    """Contiguous, from a multiple of 16 bytes on: elsewhere a matmul may take another kernel and round differently."""
    matrix = matrix.contiguous()
    return matrix if matrix.device.type == "meta" or matrix.data_ptr() % 16 == 0 else matrix.clone()


def _multiplies(tensor: Tensor) -> bool:
    """Whether torch multiplies this dtype here and returns fp32 if asked: not every CPU does so with 16 bits."""
    return tensor.dtype == torch.float32 or tensor.device.type in ("cuda", "meta")


def _multiply(a: Tensor, b: Tensor, out: Tensor, plus: Tensor | None = None) -> None:
    """out = a @ b + plus, summed in fp32 and rounded to out's dtype; plus may be out itself."""
    if not _multiplies(a):
        a, b = a.float(), b.float()
        if out.dtype != torch.float32:
            product = a @ b
            out.copy_(product if plus is None else product.add_(plus))
            return
    more: dict[str, Any] = {} if out.dtype == a.dtype else {"out_dtype": out.dtype}
    if plus is None:
        torch.mm(a, b, out=out, **more)
    else:
        torch.addmm(plus, a, b, out=out, **more)
