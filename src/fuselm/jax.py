"""The ops for JAX: `fuselm.jax.<op>`, each found in kernels/jax_ops/<op>.py the first time it is asked for.

Use:

    from fuselm import jax as fused
    y = fused.rms_norm(x, weight, eps=1e-6)
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from fuselm.kernels.spec import op_names

__all__ = op_names()


def __getattr__(name: str) -> Callable[..., Any]:
    if name not in __all__:
        raise AttributeError(f"fuselm.jax has no op {name!r}; it has {', '.join(__all__)}.")
    op: Callable[..., Any] = getattr(importlib.import_module(f"fuselm.kernels.jax_ops.{name}"), name)
    globals()[name] = op
    return op


def __dir__() -> list[str]:
    return __all__
