"""Which op a source and a test belong to, what of a source counts, and how pytest is asked for an op's tests."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fuselm.bench import optimizer, owners
from fuselm.bench.owners import op_of_test
from fuselm.kernels import build
from fuselm.kernels.adamw import LIST_OPS
from fuselm.kernels.spec import op_names
from fuselm.kernels.torch_ops.choose import torch_op_names

NAMES = ["add", "cross_entropy", "linear_cross_entropy", "mul", "rms_norm", "rope", "silu", "softmax"]
REPOSITORY = Path(__file__).parents[2]
# Without other plugins, whose loading takes longer than these tests.
ENVIRONMENT = os.environ | {"PYTHONPATH": str(REPOSITORY / "src"), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}

# ---- sources -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "compiled"),
    [
        ("int a;  // one\n\n  // two\nint b;\n", "int a;\nint b;"),
        ("int a /* b\n c */ = 1;", "int a   = 1;"),
        ("a = 1; // goes on \\\n here too\nb = 2;", "a = 1;\nb = 2;"),
        ('s = "// no /* comment"; t = "\\"// nor this";', 's = "// no /* comment"; t = "\\"// nor this";'),
        ("c = '\"'; // a quote\nd = '\\''; /* b */", "c = '\"';\nd = '\\'';"),
        ("n = 1'000'000; // a million\nm = 0xff'ff;  // 'x", "n = 1'000'000;\nm = 0xff'ff;"),
        ('r = R"x(// ) " /* )x"; // raw', 'r = R"x(// ) " /* )x";'),
        ("a / b; c /* d */ / e;", "a / b; c   / e;"),
    ],
)
def test_what_is_compiled_is_all_but_comments(text: str, compiled: str) -> None:
    assert build.compiled_text(text) == compiled


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A kernels folder: two losses, one of which calls the other's launchers, and an add."""
    files = {
        "cross_entropy.cu": '#include <cmath>\n#include "rows.cuh"\nint loss;\n',
        "linear_cross_entropy.cu": '#include "fuselm.h"\n  #  include "common.cuh"\nint head;\n',
        "linear_cross_entropy_dweight.cu": '// #include "unused.cuh"\nint dweight;\n',
        "add.cu": '#include "rows.cuh"\nint add;\n',
        "copy.cu": "int copy;\n",
        "rows.cuh": '#include "common.cuh"\nint rows;\n',
        "common.cuh": '#include "fuselm.h"\nint common;\n',
        "unused.cuh": "int unused;\n",
        "fuselm.h": "int declared;\n",
        "bind_torch.cpp": "int bound;\n",
        "torch_ops/add.py": "from fuselm.kernels import cross_entropy\n",
        "torch_ops/cross_entropy.py": "import fuselm.kernels.torch_ops\n",
        "torch_ops/linear_cross_entropy.py": "from fuselm.kernels.torch_ops.pieces import Pieces\n",
        "torch_ops/pieces.py": "from fuselm.kernels.torch_ops import cross_entropy as loss, register\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    for op in ("add", "cross_entropy", "linear_cross_entropy"):
        (tmp_path / f"{op}.py").touch()
    return tmp_path


def needed(folder: Path) -> dict[str, set[str]]:
    return {op: {Path(path).name for path in paths} for op, paths in owners.sources(folder).needs.items()}


def test_an_op_is_made_of_its_files_of_what_they_include_and_of_what_it_calls(folder: Path) -> None:
    loss = {"cross_entropy.cu", "rows.cuh", "common.cuh"}
    assert needed(folder) == {
        "add": {"add.cu", "rows.cuh", "common.cuh"},
        "cross_entropy": loss,
        "linear_cross_entropy": loss | {"linear_cross_entropy.cu", "linear_cross_entropy_dweight.cu"},
    }


@pytest.mark.parametrize(
    ("name", "text", "changed"),
    [
        ("add.cu", '#include "rows.cuh"\nint other;\n', {"add"}),
        ("add.cu", '// Why.\n#include "rows.cuh"\n\nint add;  // how\n', set()),
        ("rows.cuh", "int other;\n", {"add", "cross_entropy", "linear_cross_entropy"}),
        ("linear_cross_entropy_dweight.cu", "int other;\n", {"linear_cross_entropy"}),
        ("fuselm.h", "int another;\n", set()),
        ("bind_torch.cpp", "int another;\n", set()),
        ("copy.cu", "int another;\n", set()),
    ],
)
def test_a_change_is_a_change_of_the_ops_that_are_made_of_it(
    folder: Path, name: str, text: str, changed: set[str]
) -> None:
    before = owners.sources(folder)
    (folder / name).write_text(text)
    after = owners.sources(folder)
    assert {op for op in before.needs if before.of(op) != after.of(op)} == changed
    assert (before.hashes == after.hashes) == text.startswith("//")  # tests are of every file, but not of comments


def test_an_op_over_lists_is_made_of_its_source_and_what_that_includes(folder: Path) -> None:
    (folder / "adamw_step.cu").write_text('#include "rows.cuh"\nint step;\n')
    assert needed(folder)["adamw"] == {"adamw_step.cu", "rows.cuh", "common.cuh"}
    here = owners.sources()
    needs = {Path(path).name for op in LIST_OPS for path in here.needs[op]}
    assert needs == set(optimizer.SOURCES)  # of which gpu/optimizer.json is


def test_every_op_that_torch_has_is_in_the_registry_or_over_lists() -> None:
    assert {*op_names(), *LIST_OPS} == set(torch_op_names())


def test_the_longest_name_that_fits_has_the_file() -> None:
    assert owners.op_of_source("linear_cross_entropy_dweight.cu", NAMES) == "linear_cross_entropy"
    assert owners.op_of_source("rms_norm_backward.cu", NAMES) == "rms_norm"
    assert owners.op_of_source("address.cu", NAMES) == owners.NO_OP


def test_every_op_here_is_made_of_its_own_files_and_headers_only() -> None:
    found = owners.sources()
    assert list(found.needs) == [*op_names(), *LIST_OPS]
    for op, paths in found.needs.items():
        assert f"src/fuselm/kernels/{LIST_OPS.get(op, f'{op}.cu')}" in paths
        assert {Path(path).suffix for path in paths} <= {".cu", ".cuh"}


# ---- tests ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("test", "op"),
    [
        ("tests/kernels/test_generic_torch.py::test_forward[softmax-one-row-cuda]", "softmax"),
        ("tests/kernels/test_generic_torch.py::test_forward[strided-cross_entropy-one-row-cuda]", "cross_entropy"),
        ("tests/kernels/test_generic_torch.py::test_forward[linear_cross_entropy-add-cuda]", "linear_cross_entropy"),
        ("tests/kernels/test_generic_torch_property.py::test_any_rows_on_cuda[mul]", "mul"),
        ("tests/kernels/test_norms.py::test_same_bits[264-torch.bfloat16-rms_norm]", "rms_norm"),
        ("tests/kernels/test_softmax.py::test_multi", "softmax"),
        ("tests/kernels/test_softmax.py::test_masks[add-5]", "softmax"),
        ("tests/kernels/test_linear_cross_entropy_dweight.py::test_bits[(128, 256)-cuda]", "linear_cross_entropy"),
        ("tests/kernels/test_add_mul.py::test_rows[mul-cuda]", "mul"),
        ("tests/kernels/test_add_mul.py::test_rows", "-"),
        ("tests/kernels/test_activations.py::test_large[silu-cuda]", "silu"),
        ("tests/kernels/test_activations.py::test_large[cuda]", "-"),
        ("tests/kernels/test_adding_an_op.py::test_the_new_op_passes", "-"),
        ("tests/kernels/test_generic_torch.py::test_x[multi-address-europe]", "-"),
        ("tests/torchlm/test_softmax.py::test_x", "-"),
    ],
)
def test_a_test_is_of_the_op_that_its_file_or_a_parameter_names(test: str, op: str) -> None:
    assert op_of_test(test, NAMES) == op


def test_huge_tests_are_known_by_their_names() -> None:
    assert owners.is_huge("tests/kernels/test_generic_torch_huge.py::test_more_elements[add-past]")
    assert owners.is_huge("tests/kernels/test_rope.py::test_huge_tables")
    assert not owners.is_huge("tests/kernels/test_generic_torch.py::test_x[softmax]")


GENERIC = """import os, time, pytest
@pytest.mark.parametrize("op_name", ["softmax", "rms_norm"])
def test_forward(op_name): pass
def test_none(): assert False
def test_skips(): pytest.skip("no GPU here")
@pytest.fixture
def broken():
    yield
    assert False
def test_breaks_at_its_end(broken): pass
def test_ends_the_process(): os._exit(7)
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree with the options of this one and a few tests."""
    (tmp_path / "tests" / "kernels").mkdir(parents=True)
    shutil.copy(REPOSITORY / "tests" / "conftest.py", tmp_path / "tests")
    (tmp_path / "tests" / "kernels" / "test_generic.py").write_text(GENERIC)
    (tmp_path / "tests" / "kernels" / "test_softmax.py").write_text("def test_one(): pass\n")
    return tmp_path


def run_pytest(tree: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, "tests"]
    return subprocess.run(command, cwd=tree, env=ENVIRONMENT, capture_output=True, text=True, check=False)


def test_pytest_runs_the_tests_of_an_op_and_tells_of_each_as_it_ends(tree: Path) -> None:
    def told(op: str) -> tuple[int, list[tuple[str, ...]]]:
        result = run_pytest(tree, f"--of-op={op}", f"--outcomes={op}.jsonl")
        lines = map(json.loads, (tree / f"{op}.jsonl").read_text().splitlines())
        return result.returncode, [(line["test"].partition("::")[2], *list(line.values())[1:]) for line in lines]

    assert told("softmax") == (
        0,
        [
            ("test_forward[softmax]", "begun"),
            ("test_forward[softmax]", "passed"),
            ("test_one", "begun"),
            ("test_one", "passed"),
        ],
    )
    assert told("-") == (
        7,
        [
            ("test_none", "begun"),
            ("test_none", "failed"),
            ("test_skips", "begun"),
            ("test_skips", "skipped", "no GPU here"),
            ("test_breaks_at_its_end", "begun"),
            ("test_breaks_at_its_end", "passed"),
            ("test_breaks_at_its_end", "failed"),
            ("test_ends_the_process", "begun"),
        ],
    )
    refused = run_pytest(tree, "--of-op", "softmacks")
    assert refused.returncode == 4
    assert "got 'softmacks'" in refused.stdout + refused.stderr


HUGE = """import os, time, pathlib
HERE = pathlib.Path({folder!r})
def test_one():
    mine = HERE / str(os.getpid())
    mine.touch()
    count = len(list(HERE.iterdir()))
    time.sleep(0.3)
    mine.unlink()
    assert count <= 2
"""


def test_only_two_processes_run_a_huge_test_at_a_time(tree: Path, tmp_path: Path) -> None:
    (tmp_path / "running").mkdir()
    (tree / "tests" / "kernels" / "test_huge.py").write_text(HUGE.format(folder=str(tmp_path / "running")))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/kernels/test_huge.py"]
    environment = ENVIRONMENT | {"TMPDIR": str(tmp_path)}
    started = [subprocess.Popen(command, cwd=tree, env=environment, stdout=subprocess.PIPE) for _ in range(3)]
    assert [process.communicate(timeout=60)[0] and process.returncode for process in started] == [0] * 3
