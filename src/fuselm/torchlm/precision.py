"""The numbers a run computes with: which device, which dtype, how fp16 is kept from underflow, what determinism needs.

It knows torch's switches and no model.

    device = pick_device("auto")
    precision = pick_precision("auto", device)         # "bf16" on a GPU that has it
    scaler = LossScaler(enabled=precision == "fp16")
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def pick_device(name: str = "auto") -> torch.device:
    """A device that is there: "auto" is the first GPU, or the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"A device is auto, cpu, cuda or cuda:1; got {name!r}.") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"fuselm trains on cpu and cuda; got {name!r}. Use one of those.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"This machine has {torch.cuda.device_count()} CUDA devices; got {name!r}. Use cpu or auto.")
    return device


def pick_precision(name: str, device: torch.device) -> str:
    """fp32, bf16 or fp16; "auto" is bf16 where the GPU computes with it, else fp32."""
    has_bf16 = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    if name == "auto":
        return "bf16" if has_bf16 else "fp32"
    if name == "fp16" and device.type == "cpu":
        raise ValueError("fp16 trains on a GPU; the device is the CPU. Use --precision fp32, or bf16.")
    if name == "bf16" and device.type == "cuda" and not has_bf16:
        raise ValueError("bf16 needs a GPU from Ampere (8.0) on; this one is older. Use --precision fp16, or fp32.")
    return name


@dataclass
class LossScaler:
    """Dynamic loss scaling: small fp16 gradients are lifted out of underflow; an overflow halves the lift.

    A step whose gradients are not finite is skipped. After `patience` good steps in a row the scale doubles.
    """

    enabled: bool
    scale: float = 65536.0
    good_steps: int = 0
    patience: int = 2000

    def __post_init__(self) -> None:
        if not self.enabled:
            self.scale = 1.0

    def update(self, finite: bool) -> None:
        """What the step that was just made, or skipped, means for the next one."""
        if not self.enabled:
            return
        if not finite:
            self.scale, self.good_steps = max(self.scale / 2, 1.0), 0
            return
        self.good_steps += 1
        if self.good_steps == self.patience:
            self.scale, self.good_steps = min(self.scale * 2, 2.0**24), 0


def make_deterministic() -> None:
    """Ask torch for kernels that give the same bits each time; costs speed on a GPU, nothing on a CPU."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what torch asks for before it trusts cuBLAS
    torch.use_deterministic_algorithms(True)
    # A debugging aid that costs a pass over every tensor. (Torch makes a module of properties here; mypy sees none.)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


@contextmanager
def attention_backends(deterministic: bool) -> Iterator[None]:
    """cuDNN first: on Hopper it is 1.3 to 1.8 times as fast as the flash kernels that torch would take.

    Its backward adds up in no fixed order, so a deterministic run takes flash, which has one that does.
    """
    order = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(order if deterministic else [SDPBackend.CUDNN_ATTENTION, *order], set_priority=True):
        yield
