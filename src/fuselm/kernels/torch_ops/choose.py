"""Which implementation of an op runs: the kernel, or plain torch.

Knows names and files, no op. A model takes all its ops from one `Ops`, so that a single op can be put back to plain
torch to find a bug:

    ops = choose("auto", {"rms_norm": "torch"})
    y = ops.rms_norm(x, weight)

| impl | what runs |
|---|---|
| `auto` | the kernel on CUDA where it can be built, else plain torch |
| `fused` | the kernel; refused where it cannot run |
| `torch` | torch's own formula, also on CUDA |
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

IMPLS = ("auto", "fused", "torch")
HERE = Path(__file__).parent
# What ops share; what one has besides.
SHARED = {"__init__", "choose", "activations", "elementwise", "places", "distributed"}
NOT_OPS = SHARED | {"blocks", "pieces", "weight_sum", "cross_entropy_plain"}

# An op that is another one of views, in a pass less, is what that one is unless somebody says otherwise.
GOES_WITH = {"rope_qkv": "rope"}


@cache
def torch_op_names() -> tuple[str, ...]:
    """Every op that PyTorch has."""
    return tuple(sorted({path.stem for path in HERE.glob("*.py")} - NOT_OPS))


def home(name: str) -> str:
    """The module an op is in."""
    return f"fuselm.kernels.torch_ops.{name}"


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
    for name, one in {"every op": impl, **overrides}.items():
        if one not in IMPLS:
            raise ValueError(f"An implementation is one of {', '.join(IMPLS)}; got {one!r} for {name}.")
    for name in overrides:
        if name not in torch_op_names():
            raise ValueError(f"There is no op {name!r} to choose for; there are {', '.join(torch_op_names())}.")
    chosen = {name: overrides.get(name, overrides.get(GOES_WITH.get(name, ""), impl)) for name in torch_op_names()}
    if "fused" in chosen.values():
        _need_kernels(device)
    functions = {name: _function(name, one) for name, one in chosen.items()}
    fused = {name for name, one in chosen.items() if one != "torch" and device.startswith("cuda")}
    return Ops(functions, {name: "fused" if name in fused else "torch" for name in chosen})


def _function(name: str, impl: str) -> Callable[..., Any]:
    suffix = "_reference" if impl == "torch" else ""
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
