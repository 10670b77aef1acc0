"""Fixtures of the kernel tests: the device a test runs on, and JAX.

Knows no op. Tests on a GPU carry the mark `gpu`; without a GPU they are skipped, not passed. With --emulated a CPU
takes the place of one: half of the tests run as on a large GPU and half as on a small one. Tests with the mark
`emulated` are there then and not otherwise.
"""

from __future__ import annotations

import os
import zlib
from types import ModuleType, SimpleNamespace

import pytest
import torch

from tests.kernels import emulated


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--emulated"):
        emulated.load()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--emulated"):
        return
    there = [item for item in items if "emulated" not in item.keywords]
    config.hook.pytest_deselected(items=[item for item in items if "emulated" in item.keywords])
    items[:] = there


@pytest.fixture(autouse=True)
def emulated_size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which device is emulated, by the test's name: the kernels for few rows and for many both have their tests."""
    if request.config.getoption("--emulated"):
        sizes = list(emulated.MULTIPROCESSORS)
        size = sizes[zlib.crc32(request.node.nodeid.encode()) % len(sizes)]
        emulated.use(size)
        facts = SimpleNamespace(multi_processor_count=emulated.MULTIPROCESSORS[size])
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)


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
