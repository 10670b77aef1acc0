"""Arrays for the generic tests: made once in numpy, laid out for torch or JAX, measured against float64.

Knows torch and numpy, no op and no pytest. Every array is made by a seeded numpy generator in the dtype its `InputSpec`
names, so that every framework and every device gets the same bits, and float64 holds each of them exactly.

    arrays = make_arrays(op.inputs(case), seed=3)
    tensor = torch_tensor(arrays["x"], "cuda", layout="strided")
    assert_within_rule("y", to_numpy(y), to_numpy(reference), truth, op.tolerance, noise, groups=rows)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import torch

from fuselm.kernels.spec import InputSpec, Tolerance

LAYOUTS = ("contiguous", "strided", "offset", "transposed", "columns")
TORCH_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int32": torch.int32,
    "int64": torch.int64,
    "complex64": torch.complex64,
}

Arrays = dict[str, np.ndarray]


def numpy_dtype(name: str) -> np.dtype:
    """numpy's dtype of a name; bfloat16 comes from ml_dtypes."""
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


def make_array(spec: InputSpec, rng: np.random.Generator) -> np.ndarray:
    """Normal numbers of the spec's mean and scale, rounded to its dtype, or integers of its range."""
    if spec.integers is not None:
        return np.asarray(rng.integers(*spec.integers, spec.shape, dtype=numpy_dtype(spec.dtype)))
    values = spec.mean + spec.scale * rng.standard_normal(spec.shape)
    dtype = numpy_dtype(spec.dtype)
    return np.asarray(np.rint(values) if dtype.kind in "iu" else values).astype(dtype)


def make_arrays(specs: Mapping[str, InputSpec], seed: int) -> Arrays:
    """One array per spec, from one generator."""
    rng = np.random.default_rng(seed)
    return {name: make_array(spec, rng) for name, spec in specs.items()}


def float64(arrays: Mapping[str, np.ndarray]) -> Arrays:
    """The same numbers in float64; integers stay what they are."""
    return cast_floats(arrays, np.float64)


def cast_floats(arrays: Mapping[str, np.ndarray], dtype: Any) -> Arrays:
    """Floating-point arrays in another dtype; integers stay what they are. (ml_dtypes' kind is "V" or "f".)"""
    return {name: array if array.dtype.kind in "iu" else array.astype(dtype) for name, array in arrays.items()}


# ---- torch ---------------------------------------------------------------------------------------------------------


def torch_tensor(array: np.ndarray, device: str = "cpu", layout: str = "contiguous") -> torch.Tensor:
    """The array on a device, lying there as `layout` says (see `lay_out`)."""
    if array.dtype == ml_dtypes.bfloat16:
        tensor = torch.from_numpy(np.array(array).view(np.int16).reshape(array.shape)).view(torch.bfloat16)
    else:
        tensor = torch.from_numpy(np.array(array))
    return lay_out(tensor.to(device), layout)


def random_tensor(spec: InputSpec, generator: torch.Generator) -> torch.Tensor:
    """A tensor made where it is used: for shapes that numpy would take seconds to fill."""
    dtype, device = TORCH_DTYPES[spec.dtype], generator.device
    if spec.integers is not None:
        return torch.randint(*spec.integers, spec.shape, generator=generator, device=device, dtype=dtype)
    return torch.empty(spec.shape, dtype=dtype, device=device).normal_(spec.mean, spec.scale, generator=generator)


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """A tensor's numbers in its own dtype."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def lay_out(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """The same numbers and shape in other memory; what lies between them is NaN, so that a stray read shows.

    contiguous   as it is
    strided      rows of a wider buffer, each starting at a multiple of 16 bytes
    offset       contiguous, but starting one element into its buffer: no row is aligned
    transposed   the two dimensions before the last (of a matrix: both) swapped in memory
    columns      every second column of a buffer: the last stride is 2
    """
    return _LAYOUTS[layout](tensor) if tensor.dim() else tensor


def _blank(tensor: torch.Tensor, *shape: int) -> torch.Tensor:
    filler = math.nan if tensor.is_floating_point() else 0
    return torch.full(shape, filler, dtype=tensor.dtype, device=tensor.device)


def _strided(tensor: torch.Tensor) -> torch.Tensor:
    width = tensor.shape[-1]
    buffer = _blank(tensor, *tensor.shape[:-1], (width // 16 + 1) * 16)
    return buffer[..., :width].copy_(tensor)


def _offset(tensor: torch.Tensor) -> torch.Tensor:
    return _blank(tensor, tensor.numel() + 1)[1:].view(tensor.shape).copy_(tensor)


def _transposed(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dim() < 2:
        return tensor
    first, second = (-3, -2) if tensor.dim() > 2 else (-2, -1)
    return tensor.transpose(first, second).contiguous().transpose(first, second)


def _columns(tensor: torch.Tensor) -> torch.Tensor:
    return _blank(tensor, *tensor.shape[:-1], 2 * tensor.shape[-1])[..., ::2].copy_(tensor)


_LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda tensor: tensor,
    "strided": _strided,
    "offset": _offset,
    "transposed": _transposed,
    "columns": _columns,
}


# ---- errors --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Error:
    """Distance from the truth: root of the mean square, and the largest."""

    rms: float
    max: float


def error(actual: np.ndarray, truth: np.ndarray) -> Error:
    """How far `actual` is from `truth`; NaN and infinity count as infinitely far."""
    if truth.size == 0:
        return Error(0.0, 0.0)
    distance = np.atleast_1d(np.abs(actual.astype(np.float64) - truth))  # a scalar loss has no dimensions
    distance[~np.isfinite(distance)] = np.inf
    return Error(float(np.sqrt(np.mean(distance**2))), float(distance.max()))


def ulp(truth: np.ndarray, dtype: np.dtype) -> float:
    """The step of `dtype` at the largest magnitude in `truth`."""
    return float(np.spacing(np.asarray(np.abs(truth).max(initial=0.0)).astype(dtype)))


NO_NOISE = Error(0.0, 0.0)


def assert_within_rule(
    what: str,
    actual: np.ndarray,
    reference: np.ndarray,
    truth: np.ndarray,
    tolerance: Tolerance,
    noise: Error = NO_NOISE,
    groups: int = 1,
) -> None:
    """The house's rule: rms error at most 1.05 x, max error at most 1.5 x (+ 1 ulp) that of the reference.

    Taken literally it would ask for luck, so three things are allowed for, none of which matters to a 16-bit result of
    ordinary size:
    - The truth itself must be rounded to the dtype: a reference that happens to be exact (one element, powers of two)
      does not oblige a kernel to be, so the reference's rms error counts as at least that of the rounded truth.
    - fp32 arithmetic is what every kernel computes in. Errors of one row's sum are shared by the whole row, so of two
      equally good fp32 kernels either may win by chance; chance shrinks with the number of independent sums
      (`groups`). Three standard deviations of it are allowed, with `noise`, the error that the op's own formulas make
      in plain fp32, as its scale.
    - Where a result cancels (a row of one number) the fp32 noise is larger than the result, and a max error of 1.5 x
      that noise is allowed.
    """
    assert actual.shape == truth.shape, f"{what}: shape {actual.shape}, the truth has {truth.shape}"
    assert actual.dtype == reference.dtype, f"{what}: dtype {actual.dtype}, the reference has {reference.dtype}"
    ours, theirs = error(actual, truth), error(reference, truth)
    rounding = error(truth.astype(actual.dtype), truth)
    limit = Error(
        tolerance.rms * max(theirs.rms, rounding.rms)
        + 3 * noise.rms / math.sqrt(max(groups, 1))
        + tolerance.rms_ulps * ulp(truth, actual.dtype),
        tolerance.max * max(theirs.max, noise.max) + tolerance.ulps * ulp(truth, actual.dtype),
    )
    assert ours.rms <= limit.rms, (
        f"{what}: rms error {ours.rms:.4g}, allowed {limit.rms:.4g} (reference {theirs.rms:.4g})"
    )
    assert ours.max <= limit.max, (
        f"{what}: max error {ours.max:.4g}, allowed {limit.max:.4g} (reference {theirs.max:.4g})"
    )


def assert_same_bits(what: str, actual: np.ndarray, expected: np.ndarray) -> None:
    """Equal to the last bit, NaN and the sign of zero included."""
    assert actual.dtype == expected.dtype, f"{what}: dtype {actual.dtype}, expected {expected.dtype}"
    assert actual.shape == expected.shape, f"{what}: shape {actual.shape}, expected {expected.shape}"
    same = np.ascontiguousarray(actual).tobytes() == np.ascontiguousarray(expected).tobytes()
    assert same, f"{what}: {np.count_nonzero(actual != expected)} of {actual.size} elements differ"
