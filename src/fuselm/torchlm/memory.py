"""How many rows go through the model at once: as many as fit the memory, decided before the first step.

It knows cost.py's estimates and what memory a device has free.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from fuselm import cost
from fuselm.config import ModelConfig, changed

SHARE = 0.85  # of what is free: estimates err, and allocators leave gaps
GRAPH_SHARE = 0.25  # of what is left: a graph keeps what its step needs, evaluations and checkpoints need theirs beside
LOGITS_SHARE = 128  # the part of a GPU's memory that the loss may hold of logits
CPU_TOKENS = 4096  # at once on a CPU: more are not faster once matmuls are large enough, and fall out of the caches


def free_bytes(device: torch.device) -> int:
    """Memory that could be allocated now."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    for line in _lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def logits_bytes(device: torch.device) -> int:
    """What the loss of a training step may hold of logits: more than its own bound where a GPU has much memory.

    The gradient of a head in fp32 is read and written for each block of logits, 0.08 ms each for GPT-2's on an H200.
    """
    if device.type != "cuda":
        return cost.LOGITS_BYTES
    return max(cost.LOGITS_BYTES, torch.cuda.get_device_properties(device).total_memory // LOGITS_SHARE)


def has_room_for_graph(config: ModelConfig, rows: int, device: torch.device, width: int) -> bool:
    """Whether what a CUDA graph of a step keeps, with so many rows at once, is little of the memory that is left when
    gradients and averages, which come with the first step, have theirs beside the weights.

    Where it is not, kernels are longer than their launches, and a graph has nothing to gain. `width` is the bytes of an
    activation's number.
    """
    need = cost.activation_bytes(config, rows, config.context, width, logits_bytes(device))
    left = free_bytes(device) - (cost.training_state_bytes(config) - cost.weight_bytes(config))
    return need <= left * GRAPH_SHARE


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii").splitlines()
    except OSError:
        return []


def pick_micro_batch(
    config: ModelConfig, batch_size: int, device: torch.device, precision: str, *, held: int = 0
) -> int:
    """The largest part of a batch, into equal parts, that fits beside weights, gradients and the optimiser's state.

    `held` is how many bytes of those are in memory already.
    """
    if device.type == "cpu" and (config.dropout or config.attention == "latent"):
        config = changed(config, attention_path="written")  # there SDPA makes whole matrices for these, as if written
    free = free_bytes(device) * SHARE - (cost.training_state_bytes(config) - held)
    width = 4 if precision == "fp32" else 2
    most_logits = logits_bytes(device)
    parts = (rows for rows in range(batch_size, 0, -1) if batch_size % rows == 0)
    most = batch_size if device.type == "cuda" else max(1, CPU_TOKENS // config.context)
    for rows in parts:
        if rows <= most and cost.activation_bytes(config, rows, config.context, width, most_logits) <= free:
            return rows
    need = cost.training_state_bytes(config) + cost.activation_bytes(config, 1, config.context, width, most_logits)
    raise ValueError(
        f"Training needs memory for the model and one row at least, about {need / 2**30:.1f} GiB; "
        f"{free_bytes(device) / 2**30:.1f} GiB are free on {device}. Use a smaller model or a shorter context."
    )
