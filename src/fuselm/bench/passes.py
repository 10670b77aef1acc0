"""What one call of a pass is: a case's tensors and an implementation become a function without arguments.

Knows torch, the registry's words and what a peer says of itself; neither times nor compares. kernels.py times these
calls and warm.py makes them once beforehand: since both ask here, what is compiled is what is timed.

    call = make_call("both", op, case, tensors, peer)
    gradients = named(op, case, "both", call())
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fuselm.bench.peers import Peer
from fuselm.bench.tensors import as_tuple
from fuselm.kernels.spec import Case, OpSpec

Call = Callable[[], Any]


def make_call(
    which: str, op: OpSpec, case: Case, tensors: Mapping[str, Tensor], peer: Peer, cotangents: Sequence[Tensor] = ()
) -> Call:
    """A pass as a call. "forward" is for a caller who has switched grad off; "backward" wants cotangents."""
    assert peer.call is not None
    if which == "forward":
        return _forward(case, peer.call, tensors)
    leaves = _leaves(op, case, tensors, peer)
    if which == "backward":
        return _backward(case, peer.call, leaves, cotangents)
    if which == "both":
        return _both(case, peer.call, leaves)
    raise ValueError(f"A pass is forward, backward or both; got {which!r}.")


def named(op: OpSpec, case: Case, which: str, result: Any) -> dict[str, Tensor]:
    """What a call returned, by the names the oracles use: outputs, or the gradients of the inputs that have one."""
    if which == "forward":
        return dict(zip(op.outputs(case), as_tuple(result), strict=True))
    return dict(zip((k for k, spec in op.inputs(case).items() if spec.differentiable), result, strict=True))


def _leaves(op: OpSpec, case: Case, tensors: Mapping[str, Tensor], peer: Peer) -> dict[str, Tensor]:
    """Leaves over the same memory; over memory of its own where the peer writes into its input."""
    specs, leaves = op.inputs(case), {}
    for name, tensor in tensors.items():
        own = tensor.detach().clone() if name in peer.overwrites else tensor.detach()
        leaves[name] = own.requires_grad_(specs[name].differentiable)
    return leaves


def _forward(case: Case, implementation: Callable[..., Any], tensors: Mapping[str, Tensor]) -> Call:
    return lambda: implementation(**tensors, **case.options)


def _backward(
    case: Case, implementation: Callable[..., Any], leaves: Mapping[str, Tensor], cotangents: Sequence[Tensor]
) -> Call:
    """The backward alone, over a graph that one forward has made and that is kept."""
    with torch.enable_grad():
        outputs = as_tuple(implementation(**leaves, **case.options))
    wanted = [leaf for leaf in leaves.values() if leaf.requires_grad]
    # Cotangents of its own: Liger writes dx over dy unless told otherwise.
    given = [cotangent.clone() for cotangent in cotangents]
    return lambda: torch.autograd.grad(outputs, wanted, given, retain_graph=True)


def _both(case: Case, implementation: Callable[..., Any], leaves: Mapping[str, Tensor]) -> Call:
    """A training step's view of a loss: forward with grad, then backward with an incoming gradient of exactly 1."""
    wanted = [leaf for leaf in leaves.values() if leaf.requires_grad]
    ones: list[Tensor] = []

    def call() -> Any:
        with torch.enable_grad():
            outputs = [output for output in as_tuple(implementation(**leaves, **case.options)) if output.requires_grad]
        if not ones:  # at the first call, which is never the timed one: before it nobody knows the loss's dtype
            ones.extend(torch.ones_like(output) for output in outputs)
        return torch.autograd.grad(outputs, wanted, ones)

    return call
