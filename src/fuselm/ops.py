"""The ops for PyTorch: `fuselm.ops.<op>`, each found in kernels/torch_ops the first time it is asked for.

`choose` picks an implementation for each op.

Use:

    from fuselm import ops
    y = ops.rms_norm(x, weight, eps=1e-6)
    chosen = ops.choose("auto", {"softmax": "torch"})
    y = chosen.rms_norm(x, weight, eps=1e-6)
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from fuselm.kernels.torch_ops.choose import Ops, choose, home, torch_op_names

__all__ = ["Ops", "choose", *torch_op_names()]


def __getattr__(name: str) -> Callable[..., Any]:
    if name not in __all__:
        raise AttributeError(f"fuselm.ops has no op {name!r}; it has {', '.join(__all__[2:])}.")
    op: Callable[..., Any] = getattr(importlib.import_module(home(name)), name)
    globals()[name] = op
    return op


def __dir__() -> list[str]:
    return __all__
