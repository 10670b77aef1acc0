"""Runs every small case of an op once, forward and backward, on the GPU: what compute-sanitizer is put around.

Knows the registry and fuselm.ops; compares nothing, since tests do that. Inputs are made on the CPU and copied, so
that the kernels that run are fuselm's and a report is about them. record.py starts it; by hand:

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python -m fuselm.bench.sanitize --ops rms_norm
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from fuselm.kernels.spec import Case, OpSpec, RefusedInput, ops

# A sanitizer slows a kernel down a hundredfold; larger cases would add time and no other path.
MAX_ELEMENTS = 300_000


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


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the cases of the ops named, or of all; exit code 1 when the kernels are not there."""
    parser = argparse.ArgumentParser(prog="python -m fuselm.bench.sanitize", description=__doc__.partition("\n")[0])
    parser.add_argument("--ops", default="", help="names separated by spaces or commas; all when empty")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    given = parser.parse_args(arguments)
    known = ops()
    names = given.ops.replace(",", " ").split() or list(known)
    if unknown := [name for name in names if name not in known]:
        parser.error(f"there is no op {unknown[0]!r}; there are: {', '.join(known)}")
    if given.device == "cuda":
        from fuselm import ops as public
        from fuselm.kernels.torch_ops import cuda_state, load_cuda

        for name in names:
            getattr(public, name)  # its schema first, then the library that implements it
        load_cuda()
        if cuda_state() != "fused":
            sys.exit("The kernels are not built here, so there is nothing to look at; `fuselm doctor` says why.")
    for name in names:
        cases = small_cases(known[name])
        for case in cases:
            run_case(known[name], case, given.device)
        print(f"{name}: {len(cases)} cases ran forward and backward")


if __name__ == "__main__":
    main()
