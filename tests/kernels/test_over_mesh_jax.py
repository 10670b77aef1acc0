"""Inside of JAX's shard_map: an op's gradients vary over the mesh as JAX's own do, on a GPU's path too.

Two devices on this CPU, which a process of its own must ask for. For a GPU there is no more than a look at whether what
XLA would be given can be traced, and AdamW's formula in its place.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

DEVICES = "--xla_force_host_platform_device_count=2"


@pytest.mark.parametrize("path", ["cpu", "gpu"])
def test_what_is_one_for_all_devices_learns_from_all_of_them(path: str, jax: ModuleType) -> None:
    environment = {**os.environ, "XLA_FLAGS": DEVICES, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", __name__, path]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def calls(jax: Any) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Ops of rows x [4, 6, 8], and of arguments that all devices have in common."""
    from fuselm import jax as fused

    jnp = jax.numpy
    key = jax.random.key(1)
    row, table = jax.random.normal(key, (8,)), jax.random.normal(key, (5, 8))
    heads, angles = (2, 4), jnp.linspace(-1.0, 1.0, 12).reshape(6, 2)
    ids = functools.partial(jnp.full, fill_value=1, dtype=jnp.int32)

    def turned(x: Any, weight: Any) -> Any:
        q = x.reshape(*x.shape[:2], *heads)
        return fused.rope(q, q, jnp.cos(angles), jnp.sin(angles), q_weight=weight, k_weight=weight)[0]

    def packed(x: Any, qkv: Any) -> Any:
        qkv = fused.mul(x.reshape(*x.shape[:2], 2, 4)[:, :, :1], qkv)
        return fused.rope_qkv(qkv, jnp.cos(angles), jnp.sin(angles))[0]

    return {
        "add": (lambda x, y: fused.add(x, y, scale=0.5), (row,)),
        "add of one for all": (fused.add, (jnp.ones((6, 8)),)),
        "mul": (fused.mul, (row,)),
        "swiglu": (lambda x, w: fused.swiglu(x * w, x), (row,)),
        "swiglu of one for all": (lambda x, up: fused.swiglu(x[:1], up), (jnp.ones((1, 6, 8)),)),
        "gelu": (lambda x, w: fused.gelu(x * w), (row,)),
        "rms_norm": (fused.rms_norm, (row,)),
        "layer_norm": (fused.layer_norm, (row, row)),
        "softmax": (lambda x, mask: fused.softmax(x, mask=mask), (jnp.ones((6, 8)),)),
        "cross_entropy": (lambda x, w: fused.cross_entropy(x * w, ids(x.shape[:-1])), (row,)),
        "linear_cross_entropy": (lambda x, w: fused.linear_cross_entropy(x, w, ids(x.shape[:-1])), (table,)),
        "embedding": (lambda x, w: x * fused.embedding((x[..., 0] > 0).astype(jnp.int32), w), (table,)),
        "rope": (turned, (jnp.ones(4),)),
        "rope_qkv": (packed, (jnp.ones((1, 6, 3, 4)),)),
    }


def main(path: str) -> None:
    import jax
    import numpy as np
    from jax.sharding import Mesh, PartitionSpec

    from fuselm import jax as fused
    from fuselm.kernels import jax_ops

    if path == "gpu":
        jax_ops._registered = lambda name: True  # type: ignore[assignment]
        jax_ops._workspace = lambda name, shape: 8
    mesh = Mesh(np.array(jax.devices()), ("rows",))
    everywhere, spread = PartitionSpec(), PartitionSpec("rows")
    x = jax.random.normal(jax.random.key(0), (4, 6, 8))
    for name, (function, shared) in calls(jax).items():

        def loss(x: Any, *shared: Any, function: Any = function) -> Any:
            return jax.numpy.square(function(x, *shared)).sum()

        own = functools.partial(jax.grad, argnums=tuple(range(len(shared) + 1)))(loss)
        specs = (spread, *(everywhere for _ in shared))
        found = jax.jit(jax.shard_map(own, mesh=mesh, in_specs=specs, out_specs=specs))
        assert ("ffi_call" in str(jax.make_jaxpr(found)(x, *shared))) == (path == "gpu"), name
        if path == "gpu":
            continue
        halves = [own(half, *shared) for half in np.split(np.asarray(x), 2)]
        summed = (a + b for a, b in zip(*(half[1:] for half in halves), strict=True))
        right = (np.concatenate([half[0] for half in halves]), *summed)
        for mine, its in zip(found(x, *shared), right, strict=True):
            np.testing.assert_allclose(mine, its, rtol=1e-5, atol=1e-5, err_msg=name)

    params = {"spread": x, "shared": x[:1]}
    places = {"spread": spread, "shared": everywhere}
    state = fused.adamw_init(params)
    state_places = type(state)(everywhere, places, places, None)
    step = functools.partial(fused.adamw, lr=0.1)
    over_mesh = jax.shard_map(
        step, mesh=mesh, in_specs=(places, places, state_places), out_specs=(places, state_places)
    )
    made = (jax.tree.leaves(run(params, params, state)) for run in (jax.jit(over_mesh), step))
    for mine, its in zip(*made, strict=True):
        np.testing.assert_allclose(mine, its, rtol=1e-5, atol=1e-6)


if __name__ == "__main__":
    main(sys.argv[1])
