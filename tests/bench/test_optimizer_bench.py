"""The rows of AdamW and the norm: they name what was measured, and the record knows of which sources it is.

On a CPU, with a few small parameters: what is timed is code that runs here too.
"""

from __future__ import annotations

import pytest
import torch

from fuselm.bench import optimizer
from fuselm.bench.harness import Timer
from fuselm.kernels import build


def few_parameters() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(shape, generator=generator, requires_grad=True) for shape in ((40, 30), (30,), (7, 5))]
    for parameter in made:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    return made


def test_every_case_has_a_row_with_its_bytes_and_its_share() -> None:
    params = few_parameters()
    rows = optimizer.measure(Timer("cpu"), params)
    assert [(row["op"], row["case"], row["impl"]) for row in rows] == list(optimizer.cases(params))
    count = sum(parameter.numel() for parameter in params)
    by_name = {(row["op"], row["case"], row["impl"]): row for row in rows}
    assert by_name["adamw", "fp32", "fused"]["bytes"] == 28 * count
    assert by_name["adamw", "bf16 with masters", "fused"]["bytes"] == 28 * count
    assert by_name["global_norm", "fp32", "fused"]["bytes"] == 4 * count
    for row in rows:
        assert set(row) == set(optimizer.FIELDS)
        assert row["share_of_copy"] == row["copy_us"] / row["gpu_us"]


def test_what_is_called_ours_changes_the_parameters() -> None:
    params = few_parameters()
    before = [parameter.detach().clone() for parameter in params]
    optimizer.cases(params)["adamw", "fp32", "fused"][0]()
    assert all(not torch.equal(old, new) for old, new in zip(before, params, strict=True))


def test_a_record_of_other_sources_vouches_for_nothing() -> None:
    hashes = build.source_hashes()
    own = {path: digest for path, digest in hashes.items() if path.rpartition("/")[2] in optimizer.SOURCES}
    assert len(own) == len(optimizer.SOURCES)
    rows = [{"op": op, "impl": "fused", "gpu_us": 1.0} for op in ("adamw", "global_norm")]
    assert optimizer.problems({"sources": own, "rows": rows}, hashes) == []
    assert optimizer.problems({"sources": own, "rows": rows[:1]}, hashes) == ["global_norm was not measured"]
    changed = own | {next(iter(own)): "another"}
    assert optimizer.problems({"sources": changed, "rows": rows}, hashes) == ["it is of other native sources"]


def test_without_a_gpu_the_command_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match=r"a CUDA device is needed, and torch sees none here"):
        optimizer.main([])
