"""What the activations of JAX share: formulas in jnp, raw calls, and custom_vjp of one input or of gate and up.

Knows jax and no op of the family: each of its files passes its name and formulas, and has its own function for people
to call. On CUDA the raw calls run the launchers, the same machine code PyTorch runs, so the results are the same to the
bit; elsewhere they are jnp. vmap makes the mapped axis more rows: one launch, not many. `options` are the scalars of
the launcher: (tanh,), or none.

    run = unary("silu", silu, by_slope(silu_slope))
    y = run(x, ())
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fuselm.kernels.jax_ops import alike_over_mesh, call, once_differentiable
from fuselm.kernels.jax_ops.folding import in_front

Options = tuple[bool, ...]
Formula = Callable[..., Any]  # of fp32 arrays and the options

# ---- formulas, in fp32 ---------------------------------------------------------------------------------------------


def silu(x: Any) -> Any:
    """x / (1 + exp(-x))."""
    return x / (1 + jnp.exp(-x))


def silu_slope(x: Any) -> Any:
    """Its derivative."""
    share = 1 / (1 + jnp.exp(-x))
    return share * (1 + x * (1 - share))


def gelu(x: Any, tanh: bool = False) -> Any:
    """x times the normal distribution's share below x, or GPT-2's formula."""
    return x / (1 + jnp.exp(-_twice_u(x))) if tanh else x * _normal_share(x)


def gelu_slope(x: Any, tanh: bool = False) -> Any:
    """Its derivative."""
    if not tanh:
        return _normal_share(x) + x * (jnp.exp(-0.5 * x * x) / math.sqrt(2 * math.pi))
    # Of exp(-|2 u|), of which nothing cancels.
    power = jnp.exp(-jnp.abs(_twice_u(x)))
    larger = 1 / (1 + power)
    share = jnp.where(x < 0, power * larger, larger)
    return share + x * (power * larger * larger) * (math.sqrt(8 / math.pi) * (1 + 3 * 0.044715 * x * x))


def relu2(x: Any) -> Any:
    """The square of x where it is positive, else 0."""
    kept = jnp.where(x <= 0, 0.0, x)
    return kept * kept


def relu2_gradient(dy: Any, x: Any) -> Any:
    """0 where x is not positive, whatever dy is."""
    return jnp.where(x <= 0, 0.0, dy * (2 * x))


def by_slope(slope: Formula) -> Formula:
    """The gradient that is dy times a slope."""
    return lambda dy, x, *options: dy * slope(x, *options)


def _normal_share(x: Any) -> Any:
    return 0.5 * jax.lax.erfc(x * -math.sqrt(0.5))


def _twice_u(x: Any) -> Any:
    return math.sqrt(8 / math.pi) * (x + 0.044715 * x * x * x)


# ---- custom_vjp ----------------------------------------------------------------------------------------------------


def unary(op: str, value: Formula, gradient: Formula) -> Callable[[Any, Options], Any]:
    """(x, options) -> y = f(x)."""

    @functools.cache
    def forward(options: Options) -> Any:
        return _raw(op, f"{op}_forward", lambda x: (value(x, *options),), lambda x: (x,), options)

    @functools.cache
    def backward(options: Options) -> Any:
        def plain(dy: Any, x: Any) -> tuple[Any, ...]:
            return (gradient(dy, x, *options),)

        return _raw(op, f"{op}_backward", plain, lambda dy, x: (x,), options)

    run = _one_input(forward, backward)
    # A launcher takes rows: one number without dimensions goes as a row of one.
    return lambda x, options: run(x, options) if x.ndim else run(x.reshape(1), options).reshape(())


def gated(op: str, value: Formula, slope: Formula) -> Callable[[Any, Options], Any]:
    """(packed, options) -> y = f(gate) * up, the two being the halves of packed."""

    @functools.cache
    def forward(options: Options) -> Any:
        def plain(packed: Any) -> tuple[Any, ...]:
            gate, up = jnp.split(packed, 2, axis=-1)
            return (value(gate, *options) * up,)

        return _raw(op, f"{op}_packed_forward", plain, lambda packed: (_half(packed),), options)

    @functools.cache
    def backward(options: Options) -> Any:
        def plain(dy: Any, packed: Any) -> tuple[Any, ...]:
            gate, up = jnp.split(packed, 2, axis=-1)
            dgate, dup = dy * up * slope(gate, *options), dy * value(gate, *options)
            return (jnp.concatenate((dgate, dup), axis=-1),)

        return _raw(op, f"{op}_packed_backward", plain, lambda dy, packed: (packed,), options)

    return _one_input(forward, backward)


def _one_input(forward: Any, backward: Any) -> Callable[[Any, Options], Any]:
    @functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
    def run(x: Any, options: Options) -> Any:
        return forward(options)(x)[0]

    run.defvjp(
        lambda x, options: (forward(options)(x)[0], x),
        lambda options, x, dy: backward(options)(dy, x),
    )
    return run


def apart(op: str, value: Formula, slope: Formula) -> Callable[[Any, Any, Options], Any]:
    """(gate, up, options) -> y = f(gate) * up."""

    @functools.cache
    def forward(options: Options) -> Any:
        def plain(gate: Any, up: Any) -> tuple[Any, ...]:
            return (value(gate, *options) * up,)

        return _raw(op, f"{op}_forward", plain, lambda gate, up: (gate,), options)

    @functools.cache
    def backward(options: Options) -> Any:
        def plain(dy: Any, gate: Any, up: Any) -> tuple[Any, ...]:
            return dy * up * slope(gate, *options), dy * value(gate, *options)

        return _raw(op, f"{op}_backward", plain, lambda dy, gate, up: (gate, up), options)

    @functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
    def run(gate: Any, up: Any, options: Options) -> Any:
        return forward(options)(gate, up)[0]

    run.defvjp(
        lambda gate, up, options: (forward(options)(gate, up)[0], (gate, up)),
        lambda options, saved, dy: backward(options)(dy, *saved),
    )
    return lambda gate, up, options: run(*alike_over_mesh(gate, up), options)


# ---- raw calls -----------------------------------------------------------------------------------------------------


def _half(packed: Any) -> Any:
    return jax.ShapeDtypeStruct((*packed.shape[:-1], packed.shape[-1] // 2), packed.dtype)


def _raw(op: str, name: str, formula: Formula, like: Callable[..., tuple[Any, ...]], options: Options) -> Any:
    """A launcher, or its formula in fp32; `like` says which array each result looks like. Results are a tuple."""

    def plain(*arrays: Any) -> tuple[Any, ...]:
        made = formula(*(array.astype(jnp.float32) for array in arrays))
        return tuple(one.astype(arrays[0].dtype) for one in made)

    @jax.custom_batching.custom_vmap
    def raw(*arrays: Any) -> tuple[Any, ...]:
        results = [jax.ShapeDtypeStruct(one.shape, one.dtype) for one in like(*arrays)]
        return call(name, plain, arrays, results, options)

    @raw.def_vmap
    def fold(size: int, mapped: list[bool], *arrays: Any) -> tuple[Any, Any]:
        arrays = tuple(in_front(size, is_mapped, one) for is_mapped, one in zip(mapped, arrays, strict=True))
        before = arrays[0].shape[:-1]
        # Rows alone: with one axis more there may be more of them than a launcher takes.
        made = raw(*(one.reshape(math.prod(before), one.shape[-1]) for one in arrays))
        return tuple(one.reshape(*before, one.shape[-1]) for one in made), (True,) * len(made)

    return once_differentiable(op, raw)
