"""fuselm: a small-language-model stack in Python on hand-written CUDA kernels.

This file knows the version and nothing else: importing it loads neither torch nor jax. `fuselm.ops`, `fuselm.text` and
the other public modules are imported when they are first named, so `import fuselm; fuselm.ops.rms_norm(x, weight)`
works and `fuselm --help` stays instant.
"""

from importlib import import_module
from types import ModuleType

__version__ = "0.1.0"

_PUBLIC_MODULES = ("data", "jax", "nn", "ops", "optim", "text")


def __getattr__(name: str) -> ModuleType:
    """Import a public module on first access (PEP 562)."""
    if name in _PUBLIC_MODULES:
        return import_module(f"fuselm.{name}")
    raise AttributeError(f"module 'fuselm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC_MODULES])
