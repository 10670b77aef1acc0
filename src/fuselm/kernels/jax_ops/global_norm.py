"""The Euclidean norm of all elements of all leaves of a pytree, for JAX: what gradients are clipped by.

On CUDA two launches of global_norm.cu, however many leaves there are; elsewhere it is jnp.

    norm = global_norm(grads)
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from fuselm.kernels.adamw import NORM_CHUNK
from fuselm.kernels.jax_ops import as_listed, call, check_are_arrays
from fuselm.kernels.spec import refuse


def global_norm(tree: Any) -> Any:
    """The Euclidean norm of all elements of all leaves: a 0-dim fp32 array; 0 of none."""
    leaves = jax.tree.leaves(tree)
    for index, leaf in enumerate(leaves):
        check_are_arrays("global_norm", {f"leaf {index}": leaf}, {})
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            rule = "global_norm: leaves must be of a real floating-point dtype"
            raise refuse(rule, f"number {index} of {leaf.dtype}", "Leave it out.")
    leaves = [as_listed(leaf) for leaf in leaves if leaf.size]
    if not leaves:
        return jnp.zeros((), jnp.float32)
    chunks = sum(-(-leaf.size // NORM_CHUNK) for leaf in leaves)
    partial = jnp.zeros((chunks,), jnp.float32)
    results = (jax.ShapeDtypeStruct((chunks,), jnp.float32), jax.ShapeDtypeStruct((), jnp.float32))
    scalars = [float(len(leaves))]
    return call("global_norm", _plain_norm, [*leaves, partial], results, scalars, {len(leaves): 0})[1]


def _plain_norm(*tensors: Any) -> tuple[Any, ...]:
    squares = [jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in tensors[:-1]]
    return tensors[-1], jnp.sqrt(sum(squares))
