"""The ops for JAX: `fuselm.jax.<op>`, each found in kernels/jax_ops/<op>.py the first time it is asked for.

Use:

    from fuselm import jax as fused
    y = fused.rms_norm(x, weight, eps=1e-6)
    params, state = fused.adamw(params, grads, state, lr=3e-4)
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from fuselm.kernels.spec import op_names

# Over whole pytrees: no functions of tensors with a gradient, so not in the registry. adamw_init is in adamw.py.
OVER_TREES = ("adamw", "adamw_init", "global_norm")

__all__ = [*op_names(), *OVER_TREES]


def __getattr__(name: str) -> Callable[..., Any]:
    if name not in __all__:
        raise AttributeError(f"fuselm.jax has no op {name!r}; it has {', '.join(__all__)}.")
    try:
        module = importlib.import_module(f"fuselm.kernels.jax_ops.{name.removesuffix('_init')}")
    except ModuleNotFoundError as error:
        if error.name not in ("jax", "jaxlib"):
            raise
        raise ModuleNotFoundError(
            f"fuselm.jax.{name} needs JAX; there is no module {error.name} here. Install fuselm with its extra jax, in "
            "a clone of it: pip install -e '.[jax]'.",
            name=error.name,
        ) from None
    op: Callable[..., Any] = getattr(module, name)
    globals()[name] = op
    return op


def __dir__() -> list[str]:
    return __all__
