"""What a figure was measured on: GPU, driver, versions, commit, date. Looks, and changes nothing.

A part that cannot be found out is left out or "unknown": a figure with a gap in its description is still a figure.

    header = describe("cuda")      # {"gpu": "NVIDIA H200", "driver": ..., "versions": {...}, "date": ...}
"""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fuselm.kernels import toolchain

# Distribution names of what a figure may depend on, under the name they get in a record.
PACKAGES = {"torch": "torch", "jax": "jax", "triton": "triton", "liger": "liger_kernel", "quack": "quack_kernels"}
PEER_TITLES = {"liger": "Liger", "quack": "QuACK"}


def describe(device: str) -> dict[str, Any]:
    """The header of a file of figures; `gpu` is None on a CPU."""
    return {
        "gpu": gpu_name() if device == "cuda" else None,
        "cpu": cpu_name(),
        "driver": driver_version() if device == "cuda" else None,
        "versions": versions(),
        "date": today(),
        "commit": commit(),
    }


def sentence(record: Mapping[str, Any]) -> str:
    """A header as a reader wants it: NVIDIA H200, torch 2.11.0+cu130, CUDA 13.0, Liger 0.8.5, 2026-11-16."""
    found = record["versions"]
    parts = [f"torch {found.get('torch', '?')}", f"CUDA {found.get('cuda', '?')}"]
    parts += [f"{title} {found[name]}" for name, title in PEER_TITLES.items() if name in found]
    return f"{record['gpu']}, {', '.join(parts)}, {record['date']}"


def today() -> str:
    """The date in UTC."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")


def gpu_name() -> str:
    """The name of the GPU that torch uses."""
    import torch

    return torch.cuda.get_device_name()


def cpu_name() -> str:
    """The processor's model, or its architecture where the system does not say."""
    try:
        match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        match = None
    return match[1] if match else platform.machine()


def driver_version() -> str:
    """The NVIDIA driver's version, or "unknown"."""
    answer = _output(("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")).split()
    if answer:
        return answer[0]
    try:  # containers often come without nvidia-smi
        match = re.search(r"Kernel Module.*?(\d+\.\d+(?:\.\d+)?)", Path("/proc/driver/nvidia/version").read_text())
    except OSError:
        match = None
    return match[1] if match else "unknown"


def versions() -> dict[str, str]:
    """Versions of everything that is installed of what figures depend on."""
    import torch

    found = {"python": platform.python_version()}
    for name, distribution in PACKAGES.items():
        try:
            found[name] = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    found["torch"] = str(torch.__version__)
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    if nvcc := toolchain.find_nvcc():
        found["nvcc"] = ".".join(map(str, toolchain.nvcc_version(nvcc)))
    return found


def commit() -> str:
    """The commit checked out here, with "+" when tracked files differ from it; "unknown" outside a repository."""
    head = _output(("git", "rev-parse", "--short=12", "HEAD")).strip()
    if not head:
        return "unknown"
    return head + ("+" if _output(("git", "status", "--porcelain", "--untracked-files=no")).strip() else "")


def slug(name: str) -> str:
    """A GPU's name as a file name: NVIDIA H200 is h200."""
    words = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return words.removeprefix("nvidia-")


def _output(command: Sequence[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
