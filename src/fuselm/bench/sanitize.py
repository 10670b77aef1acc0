"""Runs every small case of an op once, forward and backward, on the GPU: what compute-sanitizer is put around.

Knows the registry, the ops over lists and fuselm.ops; compares nothing, since tests do that. Inputs are made on the CPU
and copied, so that the kernels that run are fuselm's and a report is about them. record.py starts it; by hand:

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python -m fuselm.bench.sanitize --ops rms_norm
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from fuselm.kernels.adamw import LIST_OPS, NORM_CHUNK, STATE_DTYPES
from fuselm.kernels.spec import DTYPE_BYTES, Case, OpSpec, RefusedInput, ops

if TYPE_CHECKING:
    from torch import Tensor

# A sanitizer slows a kernel down a hundredfold; larger cases would add time and no other path.
MAX_ELEMENTS = 300_000
# Of an op over lists. Nothing; less than a vector of four; around a chunk of a step, 1024; several chunks of a norm.
SHAPES = ((0,), (3, 0), (), (1,), (5,), (1023,), (1025,), (33, 20), (2, 3, 8), (3 * NORM_CHUNK + 5,))
KINDS = (("float32", False), ("bfloat16", False), ("bfloat16", True), ("float16", False), ("float16", True))
LAYOUTS = ("contiguous", "offset", "transposed")  # without gaps, which a kernel wants
# One more than a launch takes: tensors, by the room that a step has for them, groups of a step, tensors of a norm.
STEP_COUNTS, STEP_GROUPS, NORM_COUNT = (65, 591), 9, 1301


def small_cases(op: OpSpec) -> list[Case]:
    """The cases that are run, those without any element included."""
    return [case for case in op.cases if not case.huge and case.size <= MAX_ELEMENTS]


def run_case(op: OpSpec, case: Case, device: str) -> None:
    """One forward and two backwards over it, an op being free to do the second otherwise; in place too, if it can."""
    import inspect

    import torch

    from fuselm import ops as public
    from fuselm.bench.tensors import as_tuple, make_cotangents, make_inputs

    function = getattr(public, op.name)
    tensors = make_inputs(op, case, device, grad=True)
    wanted = [tensor for tensor in tensors.values() if tensor.requires_grad]
    outputs = as_tuple(function(**tensors, **case.options))
    for keep in (True, False):
        torch.autograd.grad(outputs, wanted, make_cotangents(outputs, case), retain_graph=keep)
    if "inplace" in inspect.signature(function).parameters and "inplace" not in case.options:
        copies = {name: tensor.clone() for name, tensor in tensors.items()}  # a leaf cannot be written over
        try:
            outputs = as_tuple(function(**copies, **case.options, inplace=True))
            torch.autograd.grad(outputs, wanted, make_cotangents(outputs, case))
        except RefusedInput:  # what it does in place it may do without a gradient only
            with torch.no_grad():
                function(**copies, **case.options, inplace=True)
    if device == "cuda":
        torch.cuda.synchronize()


# ---- ops over lists -------------------------------------------------------------------------------------------------

Call = tuple[tuple[Any, ...], dict[str, Any]]


def run_lists(name: str, device: str) -> int:
    """Every call of an op over lists once; how many there were."""
    import torch

    from fuselm import ops as public

    count = 0
    for lists, options in list_calls(name, device):
        getattr(public, name)(*lists, **options)
        if device == "cuda":
            torch.cuda.synchronize()
        count += 1
    return count


def list_calls(name: str, device: str) -> Iterator[Call]:
    """The arguments of every call of an op over lists."""
    return {"adamw": _steps, "global_norm": _norms}[name](device)


def _steps(device: str) -> Iterator[Call]:
    """Steps of fp32 alone, which has a kernel of its own, and of all kinds together; of many groups, and of many."""
    import torch

    step, rate, scale, no, yes = (torch.tensor(value).to(device) for value in (2.0, 1e-3, 0.5, False, True))
    numbers = {"step": 2, "lr": 1e-3}
    ways: list[dict[str, Any]] = [
        numbers,
        {"step": step, "lr": rate, "grad_scale": scale, "skip": no},
        {"step": step, "lr": rate, "skip": yes},
    ]
    wide, mixed = ([(shape, *kind) for shape in SHAPES for kind in kinds] for kinds in (KINDS[:1], KINDS))
    for members, layout, way in itertools.product((wide, mixed), LAYOUTS, ways):
        yield _lists(members, layout, device, way)
    for grad_dtype in DTYPE_BYTES:
        yield _lists(mixed, "contiguous", device, numbers, grad_dtype)
    groups = {"weight_decay": [0.1 * (index % STEP_GROUPS) for index in range(len(mixed))]}
    for way in ways:
        yield _lists(mixed, "contiguous", device, way | groups)
    for kinds, count in itertools.product((KINDS[:1], KINDS), STEP_COUNTS):
        many = [((1 + index % 9,), *kinds[index % len(kinds)]) for index in range(count)]
        yield _lists(many, "contiguous", device, numbers)


def _lists(
    members: Sequence[tuple[tuple[int, ...], str, bool]],
    layout: str,
    device: str,
    options: dict[str, Any],
    grad_dtype: str = "",
) -> Call:
    """A step's arguments; a member is a parameter's shape and dtype, and whether it has a master."""
    lists: tuple[list[Tensor], ...] = ([], [], [], [], [])
    for shape, dtype, has_master in members:
        state = STATE_DTYPES[dtype]
        shapes = (shape, shape, shape, shape, shape if has_master else (0,))
        dtypes = (dtype, grad_dtype or dtype, state, state, state)
        for place, own_shape, own_dtype in zip(lists, shapes, dtypes, strict=True):
            place.append(_ones(own_shape, own_dtype, layout, device))
    return lists[:4], options | ({"masters": lists[4]} if any(member[2] for member in members) else {})


def _norms(device: str) -> Iterator[Call]:
    """Norms of tensors of one dtype, of all together, and of many."""
    for dtypes, layout in itertools.product([*([dtype] for dtype in DTYPE_BYTES), [*DTYPE_BYTES]], LAYOUTS):
        yield ([_ones(shape, dtype, layout, device) for shape in SHAPES for dtype in dtypes],), {}
    yield ([_ones((1 + index % 9,), "float32", "contiguous", device) for index in range(NORM_COUNT)],), {}


def _ones(shape: tuple[int, ...], dtype: str, layout: str, device: str) -> Tensor:
    import torch

    from fuselm.bench.tensors import lay_out

    return lay_out(torch.ones(shape, dtype=getattr(torch, dtype)), layout, device)


# ---- the command ----------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the cases of the ops named, or of all; exit code 1 when the kernels are not there."""
    parser = argparse.ArgumentParser(prog="python -m fuselm.bench.sanitize", description=__doc__.partition("\n")[0])
    parser.add_argument("--ops", default="", help="names separated by spaces or commas; all when empty")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    given = parser.parse_args(arguments)
    known, both = ops(), [*ops(), *LIST_OPS]
    names = given.ops.replace(",", " ").split() or both
    if unknown := [name for name in names if name not in both]:
        parser.error(f"there is no op {unknown[0]!r}; there are: {', '.join(both)}")
    if given.device == "cuda":
        from fuselm import ops as public
        from fuselm.kernels.torch_ops import cuda_state, load_cuda

        for name in names:
            getattr(public, name)  # its schema first, then the library that implements it
        load_cuda()
        if cuda_state() != "fused":
            sys.exit("The kernels are not built here, so there is nothing to look at; `fuselm doctor` says why.")
    for name in names:
        if name in LIST_OPS:
            print(f"{name}: {run_lists(name, given.device)} cases ran")
            continue
        cases = small_cases(known[name])
        for case in cases:
            run_case(known[name], case, given.device)
        print(f"{name}: {len(cases)} cases ran forward and backward")


if __name__ == "__main__":
    main()
