"""Makes the tensors of a case: inputs in the layout it asks for, and cotangents for its outputs.

Knows torch and the registry's words (InputSpec, Case, layout); knows no op. Values come from a seeded generator on the
CPU, or, for shapes where that would take longer than the measurement, on the device itself.

    tensors = make_inputs(op, case, "cuda")
    outputs = as_tuple(ops.rms_norm(**tensors, **case.options))
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fuselm.kernels.spec import Case, InputSpec, OpSpec

# Above this many elements numbers are drawn on the device.
HOST_ELEMENTS = 1 << 20


def make_inputs(op: OpSpec, case: Case, device: str | torch.device, *, grad: bool = False) -> dict[str, Tensor]:
    """Every tensor argument of a case by name; with `grad`, leaves that want a gradient where they have one."""
    specs = op.inputs(case)
    # Of a head or an embedding the table is what is large, even where the case has one row.
    generator = _generator(case, device, max(math.prod(spec.shape) for spec in specs.values()))
    with_rows = op.row_inputs(case)
    made = {}
    for name, spec in specs.items():
        values = _values(spec, generator)
        # The layout is that of the main input, and of whatever has its rows.
        tensor = lay_out(values, case.layout if name in with_rows else "contiguous", device)
        made[name] = tensor.requires_grad_(grad and spec.differentiable)
    return made


def make_cotangents(outputs: tuple[Tensor, ...], case: Case) -> tuple[Tensor, ...]:
    """One cotangent for each output, in its shape and dtype."""
    made = []
    for output in outputs:
        spec = InputSpec(tuple(output.shape), str(output.dtype).removeprefix("torch."))
        made.append(_values(spec, _generator(case, output.device, output.numel(), seed=1)).to(output.device))
    return tuple(made)


def as_tuple(result: Any) -> tuple[Tensor, ...]:
    """An op's result, one tensor or several, as a tuple."""
    return (result,) if isinstance(result, Tensor) else tuple(result)


def lay_out(values: Tensor, layout: str, device: str | torch.device) -> Tensor:
    """The same values on the device, lying in memory as asked; only copies reach the device, no kernel runs."""
    if layout == "contiguous" or values.dim() == 0:
        return values.to(device)
    if layout == "strided":  # rows further apart than they are long
        base = torch.zeros(*values.shape[:-1], values.shape[-1] + 8, dtype=values.dtype)
        base[..., : values.shape[-1]] = values
        return base.to(device)[..., : values.shape[-1]]
    if layout == "columns":  # neighbours in a row are not neighbours in memory
        base = torch.zeros(*values.shape, 2, dtype=values.dtype)
        base[..., 0] = values
        return base.to(device)[..., 0]
    if layout == "offset":  # the first element is not where a vector load may start
        flat = torch.cat([torch.zeros(1, dtype=values.dtype), values.reshape(-1)])
        return flat.to(device)[1:].view(values.shape)
    if layout == "transposed":  # two dimensions before the last have changed places; of a matrix, both
        if values.dim() < 2:
            return values.to(device)
        first, second = (-3, -2) if values.dim() > 2 else (-2, -1)
        return values.transpose(first, second).contiguous().to(device).transpose(first, second)
    raise ValueError(f"A layout is contiguous, strided, columns, offset or transposed; got {layout!r}.")


def _generator(case: Case, device: str | torch.device, elements: int, seed: int = 0) -> torch.Generator:
    where = device if elements > HOST_ELEMENTS and case.layout == "contiguous" else "cpu"
    return torch.Generator(where).manual_seed(seed)


def _values(spec: InputSpec, generator: torch.Generator) -> Tensor:
    if spec.integers is not None:
        dtype = getattr(torch, spec.dtype)
        return torch.randint(*spec.integers, spec.shape, generator=generator, device=generator.device, dtype=dtype)
    drawn = torch.randn(spec.shape, generator=generator, device=generator.device)
    return drawn.mul_(spec.scale).add_(spec.mean).to(getattr(torch, spec.dtype))
