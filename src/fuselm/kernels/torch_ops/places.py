"""Whether tensors share places in memory, of which only one number may be written: asked before writing over them.

Knows sizes and strides, no op. A yes may be one too many, for views that wind around one another as nobody makes them;
a no is certain.

    shares_places(x)        # whether several elements of x may be one number
    share_places(q, k)      # whether an element of q may be one of k, as of views of one tensor
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_NEVER, _EXPANDED = 0, 1  # what torch sees at once; it leaves the rest open


def shares_places(x: Tensor) -> bool:
    """Whether there is a stride that does not step over all that shorter ones reach."""
    seen = torch._debug_has_internal_overlap(x)
    if seen in (_NEVER, _EXPANDED):
        return seen == _EXPANDED
    reach = 1
    for stride, size in sorted((x.stride(d), x.size(d)) for d in range(x.dim()) if x.size(d) > 1):
        if stride < reach:
            return True
        reach += stride * (size - 1)
    return False


def share_places(a: Tensor, b: Tensor) -> bool:
    """Whether any element of one may lie where one of the other does."""
    if not (a.numel() and b.numel()) or a.untyped_storage()._cdata != b.untyped_storage()._cdata:
        return False
    # Both step alike along some dimensions. Of these, from the longest step on: how far b's block of the others may
    # begin behind a's, for indices that differ by `more`, so that the two still touch.
    alike = [d for d in range(min(a.dim(), b.dim())) if a.stride(d) == b.stride(d) > 0]
    alike.sort(key=a.stride, reverse=True)
    apart = {b.storage_offset() - a.storage_offset()}
    for count, d in enumerate(alike, 1):
        step, of_a, of_b = a.stride(d), _extent(a, alike[:count]), _extent(b, alike[:count])
        apart = {
            begin + more * step
            for begin in apart
            for more in range(
                max(1 - a.size(d), -((begin + of_b - 1) // step)), min(b.size(d), (of_a - 1 - begin) // step + 1)
            )
        }
    return any(-_extent(b, alike) < begin < _extent(a, alike) for begin in apart)


def _extent(x: Tensor, fixed: Sequence[int]) -> int:
    """Elements from the first to the last, along all dimensions but some."""
    return 1 + sum(x.stride(d) * (x.size(d) - 1) for d in range(x.dim()) if d not in fixed)
