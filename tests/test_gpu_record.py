"""A change of the native code must have been run on a GPU: some record in gpu/ is of exactly the sources that are here.

It runs everywhere, GPU or not: it only reads the record. Python's side of an op is tested on every machine as it is.
"""

from __future__ import annotations

from pathlib import Path

from fuselm.bench import record
from fuselm.kernels import build
from fuselm.kernels.spec import ops

FOLDER = Path(__file__).resolve().parents[1] / "gpu"


def test_a_gpu_has_checked_these_native_sources() -> None:
    paths = sorted(FOLDER.glob("*.json"))
    assert paths, f"gpu/ has no record. {record.MAKE_ONE}"
    found = {path.name: record.problems(record.load(path) or {}, build.source_hashes(), list(ops())) for path in paths}
    listing = "\n".join(f"{name}: {problem}" for name, problems in found.items() for problem in problems)
    assert not all(found.values()), f"No record in gpu/ vouches for the native sources. {record.MAKE_ONE}\n{listing}"
