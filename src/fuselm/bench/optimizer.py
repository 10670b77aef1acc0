"""How fast AdamW steps a whole model, beside torch's own and a copy of as many bytes; and the norm of its gradients.

Knows the timer, torch's optimizers and one preset's parameters. ops.adamw and ops.global_norm work on lists of tensors,
so they are not among the registry's rows; these are theirs, in a record of their own that says which sources it is of.

    python -m fuselm.bench.optimizer --out gpu/optimizer.json       # half a minute, on a machine with a GPU
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fuselm import ops
from fuselm.bench import machine
from fuselm.bench.harness import Timer
from fuselm.bench.report import to_json
from fuselm.config import preset
from fuselm.files import write_whole
from fuselm.kernels import build
from fuselm.kernels.adamw import cost_bytes
from fuselm.torchlm.model import Transformer

PRESET = "gpt-124m"
SOURCES = ("adamw_step.cu", "global_norm.cu", "tensor_lists.cuh", "rows.cuh", "common.cuh")
FIELDS = ("op", "case", "impl", "gpu_us", "gpu_us_p10", "gpu_us_p90", "call_us", "bytes", "copy_us", "share_of_copy")
OPTIONS: dict[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8}
Call = Callable[[], Any]


def parameters(preset_name: str, device: str) -> list[Tensor]:
    """A preset's parameters, each with a gradient."""
    chosen = preset(preset_name)
    model = Transformer(chosen.model(int(chosen.tokens)), device=device)
    made: list[Tensor] = list(model.parameters())
    for parameter in made:
        parameter.grad = torch.randn_like(parameter)
    return made


def cases(params: Sequence[Tensor]) -> dict[tuple[str, str, str], tuple[Call, int]]:
    """What is timed, by op, case and implementation, and the fewest bytes it moves."""
    sizes = [parameter.numel() for parameter in params]
    wide, narrow = cost_bytes(sizes), cost_bytes(sizes, 2, 2, master=True)
    grads = [parameter.grad for parameter in params if parameter.grad is not None]
    halves = [parameter.detach().bfloat16() for parameter in params]
    half_grads = [grad.bfloat16() for grad in grads]
    masters = [parameter.detach().clone() for parameter in params]
    read = 4 * sum(sizes)

    def torch_norm() -> Tensor:
        return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))

    return {
        ("adamw", "fp32", "fused"): (_ours(params, grads, None), wide),
        ("adamw", "fp32", "torch"): (_torchs(params, fused=True), wide),
        ("adamw", "fp32", "torch, foreach"): (_torchs(params, foreach=True), wide),
        ("adamw", "bf16 with masters", "fused"): (_ours(halves, half_grads, masters), narrow),
        ("global_norm", "fp32", "fused"): (lambda: ops.global_norm(grads), read),
        ("global_norm", "fp32", "torch"): (torch_norm, read),
    }


def _ours(params: Sequence[Tensor], grads: list[Tensor], masters: list[Tensor] | None) -> Call:
    """As the trainer calls it: matrices decay, and clip factor and verdict are on the device."""
    averages = [[torch.zeros_like(p, dtype=torch.float32) for p in params] for _ in range(2)]
    scale = torch.full((), 0.5, device=params[0].device)
    skip = torch.zeros((), dtype=torch.bool, device=params[0].device)
    decays = [0.1 if parameter.dim() > 1 else 0.0 for parameter in params]
    own = [parameter.detach() for parameter in params]

    def step() -> None:
        ops.adamw(
            own, grads, *averages, step=7, weight_decay=decays, masters=masters, grad_scale=scale, skip=skip, **OPTIONS
        )

    return step


def _torchs(params: Sequence[Tensor], **which: bool) -> Call:
    decaying = [parameter for parameter in params if parameter.dim() > 1]
    others = [parameter for parameter in params if parameter.dim() <= 1]
    groups = [{"params": decaying, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    options: dict[str, Any] = OPTIONS | which
    step: Call = torch.optim.AdamW(groups, **options).step
    return step


def measure(timer: Timer, params: Sequence[Tensor]) -> list[dict[str, Any]]:
    """A row for each case."""
    rows = []
    for (op, case, impl), (call, nbytes) in cases(params).items():
        timing = timer.device_time(call, capture=impl == "fused")  # torch's counts its steps on the host
        copy_us = timer.copy_time(nbytes).us
        host = timer.call_time(call, gpu_us=timing.us)
        share = copy_us / timing.us
        row = (op, case, impl, timing.us, timing.p10, timing.p90, host, nbytes, copy_us, share)
        rows.append(dict(zip(FIELDS, row, strict=True)))
    return rows


def record(device: str, preset_name: str = PRESET) -> dict[str, Any]:
    """The rows, what they were measured on, and of which sources they are."""
    params = parameters(preset_name, device)
    rows = measure(Timer(device), params)
    hashes = {path: digest for path, digest in build.source_hashes().items() if path.rpartition("/")[2] in SOURCES}
    count = sum(parameter.numel() for parameter in params)
    about = {"preset": preset_name, "parameters": count, "tensors": len(params)}
    return {**machine.describe(device), **about, "sources": hashes, "rows": rows}


def problems(found: dict[str, Any], hashes: dict[str, str]) -> list[str]:
    """Why a record does not vouch for these sources; [] when it does."""
    wanted = {path: digest for path, digest in hashes.items() if path.rpartition("/")[2] in SOURCES}
    if found.get("sources") != wanted:
        return ["it is of other native sources"]
    measured = {(row["op"], row["impl"]) for row in found["rows"] if math.isfinite(row["gpu_us"])}
    return [f"{op} was not measured" for op in ("adamw", "global_norm") if (op, "fused") not in measured]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print a line for each row, and write the record."""
    parser = argparse.ArgumentParser(prog="python -m fuselm.bench.optimizer", description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("gpu/optimizer.json"))
    given = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        sys.exit("optimizer: a CUDA device is needed, and torch sees none here. Run it on a machine with a GPU.")
    found = record("cuda")
    for row in found["rows"]:
        print(
            f"{row['op']} {row['case']} {row['impl']}: {row['gpu_us']:.1f} us, {row['share_of_copy']:.3f} of a copy, "
            f"host {row['call_us']:.0f} us"
        )
    write_whole(given.out, to_json(found))


if __name__ == "__main__":
    main()
