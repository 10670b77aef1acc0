"""Whether tensors share places in memory, of which only one number may be written: asked before writing over them.

Knows sizes and strides, no op. A yes may be one too many, for views that wind around one another as nobody makes them;
a no is certain, of views of one torch tensor (other storages over the same memory, as of an array twice, go unseen).

    shares_places(x)        # whether several elements of x may be one number
    share_places(q, k)      # whether an element of q may be one of k, as of views of one tensor
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_NEVER, _EXPANDED = 0, 1  # what torch sees at once; it leaves the rest open
_MOST = 64  # distances that are looked at: beyond it a yes costs less


def shares_places(x: Tensor) -> bool:
    """Whether there is a stride that does not step over all that shorter ones reach."""
    seen = torch._debug_has_internal_overlap(x)
    if seen in (_NEVER, _EXPANDED):
        return seen == _EXPANDED
    return not _steps_over(x.stride(), x.shape)


def _steps_over(strides: Sequence[int], sizes: Sequence[int]) -> bool:
    """Whether each stride steps over all that shorter ones reach: then no two elements share a place."""
    reach = 1
    for stride, size in sorted(zip(strides, sizes, strict=True)):
        if size > 1:
            if stride < reach:
                return False
            reach += stride * (size - 1)
    return True


def share_places(a: Tensor, b: Tensor) -> bool:
    """Whether any element of one may lie where one of the other does."""
    if not (a.numel() and b.numel()) or a.untyped_storage()._cdata != b.untyped_storage()._cdata:
        return False
    if _are_slices(a, b):
        return False
    # Both step alike along some dimensions. Of these, from the longest step on: how far b's block of the others may
    # begin behind a's, for indices that differ by `more`, so that the two still touch.
    alike = [d for d in range(min(a.dim(), b.dim())) if a.stride(d) == b.stride(d) > 0]
    alike.sort(key=a.stride, reverse=True)
    apart = [b.storage_offset() - a.storage_offset()]
    for count, d in enumerate(alike, 1):
        step, of_a, of_b = a.stride(d), _extent(a, alike[:count]), _extent(b, alike[:count])
        apart = [
            begin + more * step
            for begin in apart
            for more in range(
                max(1 - a.size(d), -((begin + of_b - 1) // step)), min(b.size(d), (of_a - 1 - begin) // step + 1)
            )
        ]
        if len(apart) > _MOST:
            return True
    return any(-_extent(b, alike) < begin < _extent(a, alike) for begin in apart)


def _are_slices(a: Tensor, b: Tensor) -> bool:
    """Whether they are parts of a view that follow one another along a dimension: the usual case, and quick to see."""
    strides = a.stride()
    if strides != b.stride():
        return False
    first, second = (a, b) if a.storage_offset() <= b.storage_offset() else (b, a)
    apart, sizes = second.storage_offset() - first.storage_offset(), list(first.shape)
    for d, (mine, its) in enumerate(zip(first.shape, second.shape, strict=True)):
        if strides[d] and apart % strides[d] == 0 and apart // strides[d] >= mine:
            sizes[d] = apart // strides[d] + its
            alike = all(one == other for e, (one, other) in enumerate(zip(sizes, second.shape, strict=True)) if e != d)
            if alike and _steps_over(strides, sizes):
                return True
            sizes[d] = mine
    return False


def _extent(x: Tensor, fixed: Sequence[int]) -> int:
    """Elements from the first to the last, along all dimensions but some."""
    return 1 + sum(x.stride(d) * (x.size(d) - 1) for d in range(x.dim()) if d not in fixed)
