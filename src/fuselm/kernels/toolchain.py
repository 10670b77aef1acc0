"""What this machine has to build kernels with and for: GPUs, compilers, and the headers of PyTorch and JAX.

Everything is found on disk or asked of the driver: neither torch nor jax is imported. This file knows nothing of
sources, objects or the cache (build.py does). Whatever is missing is a BuildError that says how to get it.

    detect_architectures()        # ("90a",) on an H200, () without a GPU
    find_compilers(("90a",))      # nvcc and g++, new enough for these architectures
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from fuselm.compiler import BuildError, find_host_compiler, version_text

# What `--arch all` embeds. ptx120 is PTX, which the driver compiles for GPUs newer than any listed here.
ALL_ARCHITECTURES = ("75", "80", "86", "89", "90a", "100", "120", "ptx120")
OLDEST_NVCC = (12, 1)  # the first whose PTX has st.async, by which the blocks of a cluster meet
OLDEST_NVCC_FOR_BLACKWELL = (12, 8)  # the first with sm_100 and sm_120


class Unavailable(BuildError):
    """The machine lacks an optional part (a framework, or its CUDA build): nothing is broken."""


class Gpu(NamedTuple):
    """A visible GPU; capability is (major, minor)."""

    name: str
    capability: tuple[int, int]


@dataclass(frozen=True)
class Compilers:
    """nvcc, g++, and the text that tells one version of them from another."""

    nvcc: Path
    host: Path
    identity: str


# --- GPUs ------------------------------------------------------------------------------------------------------------


def gpus() -> list[Gpu]:
    """The GPUs this process may use, by the driver library, or by nvidia-smi where that library cannot be loaded."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return _gpus_by_nvidia_smi()
    count, name = ctypes.c_int(), ctypes.create_string_buffer(256)
    # A failing cuInit means no usable GPU (CUDA_VISIBLE_DEVICES may hide them): nvidia-smi would list hidden ones.
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return []
    found = []
    for device in range(count.value):
        major, minor = ctypes.c_int(), ctypes.c_int()
        driver.cuDeviceGetName(name, len(name), device)
        driver.cuDeviceGetAttribute(ctypes.byref(major), 75, device)  # COMPUTE_CAPABILITY_MAJOR
        driver.cuDeviceGetAttribute(ctypes.byref(minor), 76, device)  # COMPUTE_CAPABILITY_MINOR
        found.append(Gpu(name.value.decode(errors="replace"), (major.value, minor.value)))
    return found


def _gpus_by_nvidia_smi() -> list[Gpu]:
    command = ("nvidia-smi", "--query-gpu=compute_cap,name", "--format=csv,noheader")
    try:
        listing = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    rows = re.findall(r"^(\d+)\.(\d+), *(.*)$", listing, re.MULTILINE)
    return [Gpu(name, (int(major), int(minor))) for major, minor, name in rows]


def detect_architectures() -> tuple[str, ...]:
    """What to compile for the GPUs here: () without one, a refusal when every one is too old."""
    found = gpus()
    usable = {architecture_of(gpu.capability) for gpu in found if gpu.capability >= (7, 5)}
    if found and not usable:
        listed = ", ".join(f"{gpu.name} (sm_{gpu.capability[0]}{gpu.capability[1]})" for gpu in found)
        raise BuildError(
            f"fuselm's kernels need a GPU of compute capability 7.5 (Turing) or newer; found {listed}. "
            "Use a newer GPU, or run on the CPU, where every op has a fallback."
        )
    return tuple(sorted(usable, key=_sort_key))


def architecture_of(capability: tuple[int, int]) -> str:
    """The entry of ALL_ARCHITECTURES whose code runs on a GPU of this capability (at least 7.5)."""
    if capability == (9, 0):
        return "90a"  # wgmma and TMA are in the 'a' variant alone
    # Machine code runs on later minor versions of the same major one (8.7 runs sm_86); across majors only PTX does.
    number = capability[0] * 10 + capability[1]
    best = max((a for a in ALL_ARCHITECTURES if a.isdigit() and int(a) <= number), key=int)
    return best if int(best) // 10 == capability[0] else f"ptx{best}"


def parse_architectures(text: str) -> tuple[str, ...]:
    """'auto', 'all' or a list such as '75,90a,ptx120' as a tuple of architectures."""
    if text == "all":
        return ALL_ARCHITECTURES
    if text == "auto":
        return required_architectures()
    return check_architectures(part.strip().removeprefix("sm_") for part in text.split(","))


def check_architectures(architectures: Iterable[str]) -> tuple[str, ...]:
    """The architectures, sorted and each once, or a refusal of one that cannot be built."""
    # Every GPU of capability 9.0 runs sm_90a, and one kernel is in that alone.
    chosen = tuple(sorted({"90a" if a == "90" else a for a in architectures}, key=_sort_key))
    for architecture in chosen:
        if not re.fullmatch(r"(ptx)?\d{2,3}[af]?", architecture) or _sort_key(architecture)[1] < 75:
            raise BuildError(
                "An architecture is a compute capability of at least 75 without its dot, with 'ptx' before it for PTX; "
                f"got {architecture!r}. Choose from {', '.join(ALL_ARCHITECTURES)}."
            )
    return chosen


def required_architectures() -> tuple[str, ...]:
    """What `detect_architectures` finds, or a refusal where that is nothing."""
    if detected := detect_architectures():
        return detected
    raise BuildError(
        "Building for 'auto' needs an NVIDIA GPU to build for; none is visible here (driver missing, or "
        "CUDA_VISIBLE_DEVICES hides it). Name the architectures instead: `fuselm build --arch 90a`, or `--arch all`."
    )


def _sort_key(architecture: str) -> tuple[bool, int, str]:
    digits = re.sub(r"\D", "", architecture)
    return architecture.startswith("ptx"), int(digits or 0), architecture


def gencode(architecture: str) -> str:
    """nvcc's flag for one architecture: machine code, or PTX for 'ptx120'."""
    if architecture.startswith("ptx"):
        number = architecture.removeprefix("ptx")
        return f"-gencode=arch=compute_{number},code=compute_{number}"
    return f"-gencode=arch=compute_{architecture},code=sm_{architecture}"


def label_of(architectures: Sequence[str]) -> str:
    """Architectures as people write them: sm_80, sm_90a."""
    return ", ".join(a if a.startswith("ptx") else f"sm_{a}" for a in architectures)


# --- compilers -------------------------------------------------------------------------------------------------------


def find_nvcc() -> Path | None:
    """nvcc of CUDA_HOME, CUDA_PATH, PATH or /usr/local/cuda, in that order."""
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        candidate = Path(os.environ.get(variable) or "/nonexistent") / "bin" / "nvcc"
        if os.access(candidate, os.X_OK):
            return candidate
    if on_path := shutil.which("nvcc"):
        return Path(on_path)
    usual = Path("/usr/local/cuda/bin/nvcc")
    return usual if os.access(usual, os.X_OK) else None


def nvcc_version(nvcc: Path) -> tuple[int, int]:
    """(major, minor) of the toolkit, (0, 0) when nvcc does not say."""
    match = re.search(r"release (\d+)\.(\d+)", version_text(nvcc))
    return (int(match[1]), int(match[2])) if match else (0, 0)


def find_compilers(architectures: Sequence[str]) -> Compilers:
    """nvcc and the host compiler, or a refusal when one is missing or too old for these architectures."""
    nvcc, host = find_nvcc(), find_host_compiler()
    if nvcc is None:
        raise BuildError(
            "Building the kernels needs nvcc; none was found in CUDA_HOME, CUDA_PATH, PATH or /usr/local/cuda. "
            "Install the CUDA toolkit (12.8 or newer serves every GPU) or set CUDA_HOME to where it is."
        )
    if host is None:
        raise BuildError(
            "Building the kernels needs the host compiler g++; it is not on PATH. Install g++ 11 or newer."
        )
    blackwell = any(_sort_key(a)[1] >= 100 for a in architectures)
    oldest, found = OLDEST_NVCC_FOR_BLACKWELL if blackwell else OLDEST_NVCC, nvcc_version(nvcc)
    if found < oldest:
        raise BuildError(
            f"Building for {label_of(architectures)} needs nvcc {oldest[0]}.{oldest[1]} or newer; {nvcc} is "
            f"{found[0]}.{found[1]}. Install a newer CUDA toolkit and set CUDA_HOME to it."
        )
    return Compilers(nvcc, host, version_text(nvcc) + version_text(host))


def package_dir(package: str) -> Path:
    """Where an installed package lies, without importing it."""
    # find_spec of a top-level name looks at the disk only: torch takes seconds to import, and jax would claim a GPU.
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise Unavailable(f"This binding is compiled against {package}'s headers; {package} is not installed here.")
    return Path(spec.submodule_search_locations[0])


def framework_include(which: str) -> Path:
    """The folder of headers that a binding is compiled against."""
    package, header = {"torch": ("torch", "torch/csrc/stable/library.h"), "jax": ("jaxlib", "xla/ffi/api/ffi.h")}[which]
    include = package_dir(package) / "include"
    if not (include / header).exists():
        raise BuildError(
            f"The {which} binding needs {header}; it is not in {include} ({package} {package_version(package)}). "
            f"Reinstall {package}, at a version that fuselm's package metadata allows."
        )
    return include


def package_version(package: str) -> str:
    """The installed version, by its metadata."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


def require_linkable(which: str) -> None:
    """Refuse a binding that could be compiled here but not linked."""
    if which == "torch" and not (package_dir("torch") / "lib" / "libtorch_cuda.so").exists():
        raise Unavailable(
            f"The torch binding links to libtorch_cuda.so; torch {package_version('torch')} is a CPU build without "
            "it. Install a CUDA build of torch to run fused kernels; on the CPU every op has a fallback."
        )
