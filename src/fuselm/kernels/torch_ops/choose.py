"""Which implementation of an op runs: the kernel, or plain torch.

Knows names and files, no op. A model takes all its ops from one `Ops`, so that a single op can be put back to plain
torch to find a bug:

    ops = choose("auto", {"rms_norm": "torch"})
    y = ops.rms_norm(x, weight)

| impl | an op with a kernel | an op without one yet |
|---|---|---|
| `auto` | the kernel on CUDA where it can be built, else plain torch | plain torch |
| `fused` | the kernel; refused where it cannot run | plain torch; refused when named in `overrides` |
| `torch` | torch's own formula, also on CUDA | plain torch |
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from fuselm.kernels.spec import op_names

IMPLS = ("auto", "fused", "torch")
HERE = Path(__file__).parent
NOT_OPS = ("__init__", "blocks", "choose", "pieces", "plain", "weight_sum")
# The ops of plain.py, so that naming them does not import torch.
PLAIN = (
    "add",
    "embedding",
    "geglu",
    "gelu",
    "mul",
    "relu2",
    "rope",
    "silu",
    "swiglu",
)


@cache
def torch_op_names() -> tuple[str, ...]:
    """Every op that PyTorch has, with a kernel or without."""
    own = {path.stem for path in HERE.glob("*.py")} - set(NOT_OPS)
    return tuple(sorted(own | set(PLAIN)))


def home(name: str) -> str:
    """The module an op is in: its own, or plain.py."""
    own = (HERE / f"{name}.py").exists() and name not in NOT_OPS
    return f"fuselm.kernels.torch_ops.{name if own else 'plain'}"


class Ops:
    """Functions by name of op, all chosen beforehand: a look-up costs what an attribute costs."""

    def __init__(self, functions: Mapping[str, Callable[..., Any]], impls: Mapping[str, str]) -> None:
        self.__dict__.update(functions)
        self.impls = dict(impls)  # what each op is run by on the device it was chosen for: "fused" or "torch"

    def __getattr__(self, name: str) -> Callable[..., Any]:  # only for a name that is not there
        raise AttributeError(f"fuselm has no op {name!r}; it has {', '.join(torch_op_names())}.")


def choose(impl: str = "auto", overrides: Mapping[str, str] | None = None, *, device: str = "cuda") -> Ops:
    """The implementation of every op: `impl` of all, `overrides` of single ones, for tensors on `device`."""
    overrides = overrides or {}
    kernels = set(op_names())
    for name, one in {"every op": impl, **overrides}.items():
        if one not in IMPLS:
            raise ValueError(f"An implementation is one of {', '.join(IMPLS)}; got {one!r} for {name}.")
    for name, one in overrides.items():
        if name not in torch_op_names():
            raise ValueError(f"There is no op {name!r} to choose for; there are {', '.join(torch_op_names())}.")
        if one == "fused" and name not in kernels:
            raise ValueError(
                f"'fused' is for an op that has a kernel; {name} has none yet, only {', '.join(sorted(kernels))}. "
                "Use 'auto'."
            )
    chosen = {name: overrides.get(name, impl) for name in torch_op_names()}
    if "fused" in chosen.values():
        _need_kernels(device)
    functions = {name: _function(name, one, name in kernels) for name, one in chosen.items()}
    fused = {name for name, one in chosen.items() if one != "torch" and name in kernels and device.startswith("cuda")}
    return Ops(functions, {name: "fused" if name in fused else "torch" for name in chosen})


def _function(name: str, impl: str, has_kernel: bool) -> Callable[..., Any]:
    suffix = "_reference" if impl == "torch" and has_kernel else ""
    function: Callable[..., Any] = getattr(importlib.import_module(home(name)), name + suffix)
    return function


def _need_kernels(device: str) -> None:
    """Whoever says `fused` wants an error now, not a slow run with a warning."""
    import torch

    from fuselm.kernels import torch_ops

    if not device.startswith("cuda") or not torch.cuda.is_available():
        where = device if not device.startswith("cuda") else "a machine without a GPU"
        raise ValueError(f"impl 'fused' runs kernels, which need a CUDA device; this is {where}. Use impl 'auto'.")
    torch_ops.load_cuda()
    if torch_ops.cuda_state() != "fused":
        raise ValueError("impl 'fused' needs the kernels built; they could not be. `fuselm doctor` says why.")
