"""docs/adding-an-op.md, followed to the letter in a copy of the tree: what it says must be all there is to do.

Knows the two kinds of instruction the document gives before a fenced block, and no op: the op is the one whose .cu the
document creates.

    File: `src/fuselm/kernels/scaled_add.py`                                the block is a new file
    Add to `src/fuselm/kernels/fuselm.h`, before `}  // namespace fuselm`:  the block goes before that line
                                                                            (or `after` it, or `at the end`)
Blocks of shell commands and of plain text are for people; any other block without an instruction is an error.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from fuselm.kernels import build

REPOSITORY = Path(__file__).parents[2]
DOCUMENT = REPOSITORY / "docs" / "adding-an-op.md"
FOR_PEOPLE = ("", "sh", "bash", "console", "text")
CREATE = re.compile(r"File: `?(?P<path>[\w./-]+)`?:?")
ADD = re.compile(
    r"Add to `?(?P<path>[\w./-]+?)`?, (?:(?P<where>before|after) `(?P<marker>[^`]+)`|(?P<end>at the end)):?"
)


@dataclass(frozen=True)
class Step:
    """Create a file (`where` is ""), or put text before or after a line of one, or at its end."""

    path: str
    text: str
    where: str = ""
    marker: str = ""

    def follow(self, root: Path) -> None:
        target = root / self.path
        if not self.where:
            assert not target.exists(), f"{self.path} is there already: the document should add to it"
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(self.text)
            return
        lines = target.read_text().splitlines(keepends=True)
        at = len(lines) if self.where == "end" else self._line(lines)
        target.write_text("".join([*lines[:at], self.text, *lines[at:]]))

    def _line(self, lines: list[str]) -> int:
        found = [i for i, line in enumerate(lines) if line.strip() == self.marker.strip()]
        assert len(found) == 1, f"{self.path} has {len(found)} lines `{self.marker}`; an instruction needs one"
        return found[0] + (self.where == "after")


def parse(document: str) -> list[Step]:
    """The steps of a document, in order."""
    steps, before, lines = [], "", iter(document.splitlines())
    for line in lines:
        if fence := re.fullmatch(r"(```+)(\w*).*", line):
            block = []
            for inner in lines:
                if inner.rstrip() == fence[1]:
                    break
                block.append(inner + "\n")
            if fence[2] not in FOR_PEOPLE:
                steps.append(_step(before, "".join(block)))
        elif line.strip():
            before = line.strip()
    return steps


def _step(instruction: str, text: str) -> Step:
    if create := CREATE.fullmatch(instruction):
        return Step(create["path"], text)
    add = ADD.fullmatch(instruction)
    assert add, f"a block follows {instruction!r}, which says neither `File: path` nor `Add to path, before ...`"
    return Step(add["path"], text, add["where"] or "end", add["marker"] or "")


# ---- the parser ----------------------------------------------------------------------------------------------------

EXAMPLE = """# Adding

File: `a/new.py`
```python
x = 1
```
Some words.

Add to a/old.h, before `}  // end`:

```cpp
  added;
```
Run it:
```sh
make test
```
"""


def test_instructions_are_read_in_order() -> None:
    assert parse(EXAMPLE) == [
        Step("a/new.py", "x = 1\n"),
        Step("a/old.h", "  added;\n", "before", "}  // end"),
    ]


def test_a_block_without_an_instruction_is_an_error() -> None:
    with pytest.raises(AssertionError, match="says neither"):
        parse("Look at this:\n```python\nx = 1\n```\n")


@pytest.mark.parametrize(
    ("where", "expected"), [("before", "a\nNEW\nb\nc\n"), ("after", "a\nb\nNEW\nc\n"), ("end", "a\nb\nc\nNEW\n")]
)
def test_text_goes_where_it_is_told(tmp_path: Path, where: str, expected: str) -> None:
    (tmp_path / "old").write_text("a\nb\nc\n")
    Step("old", "NEW\n", where, "b").follow(tmp_path)
    assert (tmp_path / "old").read_text() == expected


def test_a_marker_that_is_not_one_line_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("b\nb\n")
    for marker, count in (("b", 2), ("c", 0)):
        with pytest.raises(AssertionError, match=f"has {count} lines"):
            Step("old", "NEW\n", "before", marker).follow(tmp_path)


# ---- the document --------------------------------------------------------------------------------------------------


@pytest.fixture
def followed(tmp_path: Path) -> tuple[Path, str]:
    """A copy of the tree in which the document has been followed, and the name of the op it adds."""
    leave = shutil.ignore_patterns("__pycache__", "*.so", "*.o")
    for part in ("src", "tests"):
        shutil.copytree(REPOSITORY / part, tmp_path / part, ignore=leave)
    shutil.copy(REPOSITORY / "pyproject.toml", tmp_path)
    steps = parse(DOCUMENT.read_text())
    for step in steps:
        step.follow(tmp_path)
    (op_name,) = {Path(step.path).stem for step in steps if step.path.endswith(".cu")}
    return tmp_path, op_name


def generic_suite(root: Path, op_name: str, marks: str) -> subprocess.CompletedProcess[str]:
    """The generic tests of one op, run where the document was followed."""
    suites = sorted(str(path) for path in (root / "tests" / "kernels").glob("test_generic_*.py"))
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-k", op_name, "-m", marks, *suites],
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root / "src")},
        capture_output=True,
        text=True,
        check=False,
    )


def assert_passed(result: subprocess.CompletedProcess[str], op_name: str) -> None:
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    frameworks = ["torch", *(["jax"] if importlib.util.find_spec("jax") else [])]
    for framework in frameworks:
        passed = re.findall(rf"test_generic_{framework}\.py::\w+\[.*{op_name}.*\] PASSED", result.stdout)
        assert len(passed) > 5, f"{len(passed)} tests of {op_name} in {framework} passed:\n{result.stdout[-3000:]}"


def test_the_new_op_passes_the_generic_suite_on_the_cpu(followed: tuple[Path, str]) -> None:
    root, op_name = followed
    assert_passed(generic_suite(root, op_name, "not gpu"), op_name)


@pytest.mark.gpu
def test_the_new_op_passes_the_generic_suite_on_a_gpu(followed: tuple[Path, str]) -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    root, op_name = followed
    assert_passed(generic_suite(root, op_name, "gpu"), op_name)


@pytest.mark.slow
def test_the_new_kernels_and_bindings_compile(
    followed: tuple[Path, str], build_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, op_name = followed
    if build.find_nvcc() is None or shutil.which("g++") is None:
        pytest.skip("no nvcc or no g++")
    kernels = root / "src" / "fuselm" / "kernels"
    for other in kernels.glob("*.cu"):
        if other.stem != op_name:  # compiled by other tests, and slowly
            other.unlink()
    objects = build.compile_only("core", ["90a"], source_dir=kernels)
    assert [path.name.startswith(op_name) for path in objects] == [True]
    for framework, package in (("torch", "torch"), ("jax", "jaxlib")):
        if importlib.util.find_spec(package):
            (made,) = build.compile_only(framework, ["90a"], source_dir=kernels)
            assert f"{op_name}_forward" in symbols(made)


def symbols(path: Path) -> str:
    return subprocess.run(["nm", "--demangle", str(path)], capture_output=True, text=True, check=True).stdout
