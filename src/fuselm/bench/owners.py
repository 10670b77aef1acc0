"""Which op a native source and a test belong to, by their names, and which sources an op's machine code is made of.

Knows file names, `#include` lines and imports; runs and measures nothing. record.py counts tests and keeps figures by
it, and tests/conftest.py chooses tests by it (`pytest --of-op softmax`), so that both mean the same.

    sources().of("softmax")                                            # {".../softmax.cu": "59103751...", ...}
    op_of_test("tests/kernels/test_norms.py::test_x[264-rms_norm]", ["rms_norm", "softmax"])          # "rms_norm"
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fuselm.kernels import build
from fuselm.kernels.adamw import LIST_OPS
from fuselm.kernels.spec import op_names

NO_OP = "-"  # what belongs to no op, or to several
TEST_FOLDER = "tests/kernels"
HUGE = "huge"  # in a test's id: it takes so much of a GPU's memory that few of its kind may run at a time
TORCH_OPS = "fuselm.kernels.torch_ops."


@dataclass(frozen=True)
class Sources:
    """The native files by hash, and of which of them each op's machine code is made."""

    hashes: Mapping[str, str]
    needs: Mapping[str, Sequence[str]]

    def of(self, op: str) -> dict[str, str]:
        """The files of an op by hash."""
        return {path: self.hashes[path] for path in self.needs[op]}

    def of_tests(self, op: str) -> dict[str, str]:
        """What the tests of an op go through: its files, and those that declare and register all launchers.

        Those of NO_OP, whole models among them, are of all files.
        """
        if op == NO_OP:
            return dict(self.hashes)
        shared = {path: text for path, text in self.hashes.items() if not path.endswith((".cu", ".cuh"))}
        return {**shared, **self.of(op)}


def sources(folder: Path = build.SOURCE_DIR) -> Sources:
    """The native sources of a kernels folder.

    An op's are its own .cu files and the headers that these include. fuselm.h and the bindings only declare and
    register launchers, so they are nobody's: another declaration changes no op's machine code. (Tests go through them:
    `of_tests`.) The ops over lists, which no registry knows, have a source of another name.
    """
    hashes = build.source_hashes(folder)
    paths = {Path(path).name: path for path in hashes}
    names = op_names(folder)
    needs = {}
    for op in names:
        launched = set(_launched(folder / "torch_ops", op, names))
        begun = [name for name in paths if name.endswith(".cu") and op_of_source(name, names) in launched]
        needs[op] = sorted(paths[name] for name in _included(folder, begun))
    for op, source in LIST_OPS.items():
        if source in paths:
            needs[op] = sorted(paths[name] for name in _included(folder, [source]))
    return Sources(hashes, needs)


def op_of_source(name: str, names: Sequence[str]) -> str:
    """The op that a .cu file belongs to: <op>.cu and <op>_*.cu, the longest name that fits."""
    return _longest(Path(name).stem, names)


def op_of_test(test: str, names: Sequence[str]) -> str:
    """The op that a test belongs to, by pytest's id of it; NO_OP when it belongs to none.

    tests/kernels/test_<op>.py and test_<op>_*.py are an op's. Elsewhere, and in a file that is named after two, the op
    is the parameter that is called like one: `test_forward[strided-softmax-one-row-cuda]`.
    """
    path, _, rest = test.partition("::")
    parameters = re.search(r"\[(.*)\]$", rest)
    words = parameters[1].split("-") if parameters else []
    return _op_of_file(path, names) or next((word for word in words if word in names), NO_OP)


def is_huge(test: str) -> bool:
    """Whether a test wants so much memory that few of its kind may run at a time."""
    return HUGE in test


def _op_of_file(path: str, names: Sequence[str]) -> str | None:
    folder, _, file = path.rpartition("/")
    stem = file.removesuffix(".py").removeprefix("test_")
    op = _longest(stem, names)
    second = stem.removeprefix(f"{op}_")  # of test_add_mul.py, say, which is for both
    return None if folder != TEST_FOLDER or op == NO_OP or (second != stem and second in names) else op


def _longest(stem: str, names: Sequence[str]) -> str:
    return max((op for op in names if stem == op or stem.startswith(f"{op}_")), key=len, default=NO_OP)


def _included(folder: Path, names: Sequence[str]) -> set[str]:
    """These files and every .cuh that they include, and that those include."""
    found, waiting = set[str](), list(names)
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        text = build.compiled_text((folder / name).read_text(encoding="utf-8"))
        included = re.findall(r'^\s*#\s*include\s*"([^"]+\.cuh)"', text, re.MULTILINE)
        waiting += [header for header in included if (folder / header).exists()]
    return found


def _launched(folder: Path, op: str, names: Sequence[str]) -> Iterator[str]:
    """The ops whose launchers an op calls: its own, and those of the torch files that its own imports.

    A head's loss is cross_entropy's kernel, so figures of linear_cross_entropy are of cross_entropy.cu as well.
    """
    found, waiting = set[str](), [op]
    while waiting:
        stem = waiting.pop()
        file = folder / f"{stem}.py"
        if stem in found or not (stem == op or file.exists()):
            continue
        found.add(stem)
        waiting += _imported(file) if file.exists() else []
    yield from (stem for stem in found if stem in names)


def _imported(file: Path) -> list[str]:
    """The files of the same folder that one imports."""
    dotted: list[str] = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            dotted += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            dotted += [alias.name for alias in node.names]
    return [name.removeprefix(TORCH_OPS).partition(".")[0] for name in dotted if name.startswith(TORCH_OPS)]
