"""What the JAX ops share: calling a launcher through XLA's FFI on CUDA and a jnp function everywhere else.

Knows jax and build.py, no op and never torch. The library is built or loaded the first time a computation is lowered on
a machine where JAX sees a CUDA device; where it cannot be, the jnp function takes its place, with a warning.

    y, rstd = call("rms_norm_forward", plain, (x, weight), results=(spec_y, spec_rstd), scalars=(eps, 0.0))
"""

from __future__ import annotations

import ctypes
import functools
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fuselm.kernels import build
from fuselm.kernels.spec import DTYPE_BYTES, TensorInfo, refuse

# An absent tensor, going in or coming out: the bindings know it by this shape.
ABSENT = jax.ShapeDtypeStruct((0,), jnp.float32)
_MAX_RANK = 8  # fuselm.h's


def absent() -> jax.Array:
    """The buffer that stands for no tensor."""
    return jnp.zeros((0,), jnp.float32)


def is_absent(array: Any) -> bool:
    """Whether an array stands for no tensor."""
    return array is None or array.shape == (0,)


def is_array(value: Any) -> bool:
    """Whether this is what JAX computes with: a jax array, traced or not, or a numpy array."""
    return isinstance(value, jax.Array | np.ndarray)


def check_are_arrays(op: str, needed: Mapping[str, Any], optional: Mapping[str, Any]) -> None:
    """Refuse the first argument that is no array."""
    for name, given in {**needed, **optional}.items():
        if not is_array(given) and not (given is None and name in optional):
            rule = f"{op}: {name} must be a jax or numpy array"
            raise refuse(rule, f"a {type(given).__name__}", f"Pass jnp.asarray({name}).")


def alike_over_mesh(*arrays: Any) -> tuple[Any, ...]:
    """Arrays as they vary together over a mesh: inside of shard_map an argument's gradient must vary as it does.

    JAX's own ops do so by themselves, custom_vjp does not. What is one for all devices, as a weight beside rows that
    are spread over them, is said to vary, and then JAX adds up its gradient over the devices.
    """
    axes = axes_over_mesh(arrays)
    return tuple(_varying(array, axes) for array in arrays) if axes else arrays


def axes_over_mesh(arrays: Iterable[Any]) -> frozenset[Any]:
    """The axes of a mesh over which any of the arrays varies; none outside of shard_map."""
    found: frozenset[Any] = frozenset()
    for array in arrays:
        if isinstance(array, jax.Array):
            kind: Any = jax.typeof(array)
            found |= kind.vma if hasattr(kind, "vma") else kind.mat.varying  # in JAX 0.9, and since
    return found


def _varying(array: Any, axes: frozenset[Any]) -> Any:
    missing = () if array is None else tuple(sorted(axes - axes_over_mesh([array]), key=str))
    return jax.lax.pcast(array, missing, to="varying") if missing else array


def once_differentiable(op: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The raw call, which refuses to be differentiated: the op's custom_vjp stands above it.

    Left to itself JAX differentiates the batching rule inside, which calls itself, without end.
    """

    @jax.custom_jvp
    def raw(*arrays: Any) -> Any:
        return function(*arrays)

    @raw.defjvp
    def refuse_to(*_: Any) -> Any:
        raise TypeError(
            f"fuselm.jax.{op} has one derivative, in reverse, its backward being a kernel; got a double backward or a "
            f"forward-mode derivative. Write the formula in jnp where you need one."
        )

    return raw


@functools.cache
def native_library() -> ctypes.CDLL | None:
    """The JAX binding, built when needed; None where there is no CUDA device or it cannot be built."""
    if not any(device.platform == "gpu" for device in jax.devices()):
        return None
    try:
        return ctypes.CDLL(str(build.library("jax")))
    except (build.BuildError, OSError) as error:
        warnings.warn(f"fuselm: JAX on CUDA takes the plain jnp path: {error}", RuntimeWarning, stacklevel=2)
        return None


@functools.cache
def _registered(name: str) -> bool:
    library = native_library()
    if library is None:
        return False
    symbol = getattr(library, f"fuselm_{name}")
    jax.ffi.register_ffi_target(f"fuselm_{name}", jax.ffi.pycapsule(symbol), platform="CUDA")
    return True


def _workspace(name: str, shape: tuple[int, ...]) -> int:
    """Bytes of scratch memory the launcher wants for a first input of this shape."""
    function = getattr(native_library(), f"fuselm_{name}_workspace")
    function.restype = ctypes.c_int64
    return int(function(ctypes.c_int32(len(shape)), (ctypes.c_int64 * len(shape))(*shape)))


def call(
    name: str,
    plain: Callable[..., tuple[Any, ...]],
    tensors: Sequence[Any],
    results: Sequence[jax.ShapeDtypeStruct],
    scalars: Sequence[float],
    aliases: Mapping[int, int] | None = None,
) -> tuple[Any, ...]:
    """Run launcher `name` on CUDA and `plain(*tensors)` elsewhere; None goes in and comes out as an absent buffer.

    `aliases` are the tensors that a launcher writes over, {index in tensors: index in results}: such a result comes
    before all others, in the memory of its tensor, or in a copy where XLA still needs the tensor.
    """
    given = tuple(absent() if t is None else t for t in tensors)
    if not _registered(name):
        return plain(*given)

    scratch, axes = _workspace(name, given[0].shape), axes_over_mesh(given)
    given = alike_over_mesh(*given)

    def fused(*arrays: Any) -> tuple[Any, ...]:
        wanted = [*results, jax.ShapeDtypeStruct((scratch,), jnp.uint8)] if scratch else [*results]
        if axes:  # what is made of what varies does so, too
            wanted = jax.eval_shape(lambda: [_varying(jnp.zeros(one.shape, one.dtype), axes) for one in wanted])
        target = jax.ffi.ffi_call(
            f"fuselm_{name}", wanted, vmap_method="sequential", input_output_aliases=dict(aliases or {})
        )
        made = target(*arrays, scalars=np.asarray(scalars, np.float64))
        return tuple(made[: len(results)])

    def formula(*arrays: Any) -> tuple[Any, ...]:
        return tuple(_varying(one, axes) for one in plain(*arrays))

    chosen: tuple[Any, ...] = jax.lax.platform_dependent(*given, cuda=fused, default=formula)
    return chosen


def info(array: Any) -> TensorInfo | None:
    """What an op's check() needs to know of an array. Where it lies is JAX's own business, and JAX says so itself."""
    return None if array is None else TensorInfo(tuple(array.shape), str(array.dtype))


def as_listed(array: Any) -> Any:
    """An array as a launcher over lists takes it: not in float64, which a gradient may be, nor of many dimensions."""
    array = jnp.asarray(array, None if str(array.dtype) in DTYPE_BYTES else jnp.float32)
    return array if array.ndim <= _MAX_RANK else array.reshape(-1)
