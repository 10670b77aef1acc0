"""A change of the native code must have been run on a GPU: some record in gpu/ is of what is compiled here.

What it says of an op is of the sources the op is made of, and its tests of those that launch all ops, too. It runs
everywhere, GPU or not: it only reads the record. Python's side of an op is tested on every machine as it is.
"""

from __future__ import annotations

import json
from pathlib import Path

from fuselm.bench import merging, optimizer, owners, record
from fuselm.kernels import build
from fuselm.kernels.spec import ops

FOLDER = Path(__file__).resolve().parents[1] / "gpu"
OTHERS = ("optimizer.json", "train.json")  # of all parameters, of whole models: other records


def test_a_gpu_has_checked_these_native_sources() -> None:
    paths = sorted(path for path in FOLDER.glob("*.json") if path.name not in OTHERS)
    assert paths, f"gpu/ has no record. {record.MAKE_ONE}"
    here = owners.sources()
    found = {path.name: merging.problems(merging.load(path) or {}, here, list(ops())) for path in paths}
    listing = "\n".join(f"{name}: {problem}" for name, problems in found.items() for problem in problems)
    assert not all(found.values()), f"No record in gpu/ vouches for the native sources. {record.MAKE_ONE}\n{listing}"


def test_a_gpu_has_measured_these_optimizer_sources() -> None:
    path = FOLDER / "optimizer.json"
    found = json.loads(path.read_text(encoding="utf-8"))
    assert not optimizer.problems(found, build.source_hashes()), "Run python -m fuselm.bench.optimizer on a GPU."
