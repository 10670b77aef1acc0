"""Every script in examples/ runs to its end, on whatever this machine has."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = sorted((ROOT / "examples").glob("*.py"))


@functools.cache
def run(script: Path) -> str:
    """What a script prints; two tests that read it start one process."""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-W", "error::RuntimeWarning", str(script)]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert finished.returncode == 0, finished.stderr[-3000:]
    return finished.stdout


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_example_runs(script: Path) -> None:
    assert run(script).strip()


def test_rms_norm_example_finds_no_difference_that_matters() -> None:
    lines = run(ROOT / "examples" / "rms_norm.py").splitlines()
    differences = [float(line.split()[-1]) for line in lines if "max difference" in line]
    assert len(differences) == 3
    assert max(differences) < 1e-3  # dweight sums 512 rows: about 20, so 1e-3 is a few hundred ulp
    assert any("to the bit, True" in line for line in lines)
    assert any(line.startswith("what ran: ") for line in lines)


def test_losses_example_finds_no_difference_that_matters() -> None:
    lines = run(ROOT / "examples" / "losses.py").splitlines()
    found = [re.findall(r"\d\.\d\de[-+]\d\d", line) for line in lines if "max difference" in line]
    assert [len(numbers) for numbers in found] == [3, 3, 3]
    assert max(float(number) for numbers in found for number in numbers) < 1e-5  # of fp32, relative to the largest
    assert any("128 of 256 losses are 0" in line for line in lines)
    assert any(line.startswith("what ran: ") for line in lines)


def test_decoder_example_learns_where_to_look() -> None:
    lines = run(ROOT / "examples" / "decoder.py").splitlines()
    found = re.fullmatch(r"loss fell from (\d\.\d\d) to (\d\.\d\d) in \d+ steps", lines[0])
    assert found, lines
    assert float(found[1]) > 2.5  # of 16 words: ln 16 is 2.8
    assert float(found[2]) < 0.7  # to guess among the three words of a text would be ln 3, 1.1
    assert lines[1].startswith("what ran: ")
