"""Fixtures of the kernel tests: the device a test runs on, and JAX.

Knows no op. Tests on a GPU carry the mark `gpu`; without a GPU they are skipped, not passed. With --emulated a CPU
takes the place of one.
"""

from __future__ import annotations

import os
from types import ModuleType

import pytest
import torch


@pytest.fixture
def device(request: pytest.FixtureRequest) -> str:
    """A torch device, "cpu" or "cuda": given by parametrizing `device` indirectly."""
    if request.config.getoption("--emulated"):
        return "cpu"
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    return request.param


@pytest.fixture
def cuda(request: pytest.FixtureRequest) -> str:
    """The device of a test that has a meaning on CUDA only."""
    if request.config.getoption("--emulated"):
        return "cpu"
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    return "cuda"


@pytest.fixture(scope="session")
def jax() -> ModuleType:
    """JAX, imported late: it must leave GPU memory to torch, and forking after its import is not safe."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    return pytest.importorskip("jax")
