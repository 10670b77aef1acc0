"""Emptying the L2 cache before a call is timed: the raw op of overwrite_l2.cu.

Where the kernels cannot be built the buffer is filled with zeros, which leaves what was marked to stay.

    buffer = l2_buffer(torch.device("cuda"))
    empty_l2(buffer)
"""

from __future__ import annotations

import torch
from torch import Tensor

from fuselm.kernels.torch_ops import load_cuda, register

FLUSH_BYTES = 256 << 20


def l2_buffer(device: torch.device) -> Tensor:
    """Memory that covers the device's L2, and more than once."""
    load_cuda()
    l2 = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)
    return torch.empty(max(FLUSH_BYTES, 2 * l2) // 128 * 32, dtype=torch.int32, device=device)


def empty_l2(buffer: Tensor) -> None:
    """Leave nothing in L2 but lines of the buffer, not even what a kernel has marked to leave last."""
    _overwrite(buffer, 0)


def _plain_overwrite(buffer: Tensor, outputs: int) -> None:
    buffer.zero_()


def _fake_overwrite(buffer: Tensor, outputs: int) -> None:
    return None


_overwrite = register("overwrite_l2(Tensor(a!) buffer, int outputs) -> ()", _plain_overwrite, _fake_overwrite)
