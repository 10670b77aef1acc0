"""The plan of the house as a test: who may import whom, where framework headers may stand, how long a file may be.

TABLE is docs/architecture.md's table of rooms as data. A room is a folder or a file directly under src/fuselm, and the
two folders of framework ops under kernels. When a better plan is clear, change the table and the document together.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "fuselm"
KERNELS = PACKAGE / "kernels"

ANYTHING = frozenset({"*"})
FILES = frozenset({"numpy", "safetensors", "ml_dtypes", "rich", "regex", "zstandard", "pyarrow"})
BASICS = frozenset({"config", "cost", "plan", "checkpoint", "data", "text"})


class Rule(NamedTuple):
    """What a room may import besides itself and the standard library."""

    rooms: frozenset[str]
    third_party: frozenset[str]


def rule(rooms: str = "", third_party: str = "") -> Rule:
    return Rule(frozenset(rooms.split()), frozenset(third_party.split()))


TABLE = {
    "__init__": rule(),
    "__main__": rule("cli"),
    "files": rule(),
    "compiler": rule("files"),
    "config": rule("", "numpy"),
    "cost": rule("config", "numpy"),
    "plan": rule("config cost", "numpy"),
    "text": Rule(frozenset({"config", "files", "compiler"}), FILES),
    "data": Rule(frozenset({"config", "text", "files"}), FILES),
    "checkpoint": Rule(frozenset({"config", "text", "files"}), FILES),
    "kernels": rule("files compiler", "numpy"),
    "kernels/torch_ops": rule("kernels", "torch"),
    "ops": rule("kernels kernels/torch_ops", "torch"),
    "nn": rule("ops", "torch"),
    "optim": rule("ops", "torch"),
    "hf": rule("ops nn", "torch transformers"),
    "torchlm": Rule(BASICS | {"ops", "nn", "optim", "files"}, frozenset({"torch", "numpy", "tensorboard", "wandb"})),
    "kernels/jax_ops": rule("kernels", "jax numpy"),
    "jax": rule("kernels kernels/jax_ops", "jax"),
    "jaxlm": Rule(BASICS | {"kernels", "jax"}, frozenset({"jax"})),
    "engine": rule("config cost plan", "numpy"),
    "serve": rule("engine text config", "fastapi pydantic uvicorn prometheus_client"),
    "bench": Rule(ANYTHING, ANYTHING),
    "cli": Rule(ANYTHING, ANYTHING),
}

PYTHON_FILES = sorted(PACKAGE.rglob("*.py"))
NATIVE_FILES = sorted(path for path in PACKAGE.rglob("*") if path.suffix in (".cu", ".cuh", ".h", ".cpp", ".cc"))
FRAMEWORK_HEADERS = {"torch": "bind_torch.cpp", "ATen": "bind_torch.cpp", "c10": "bind_torch.cpp", "xla": "bind_jax.cc"}


def relative(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def room_of(path: str) -> str:
    """'kernels/torch_ops/rms_norm.py' -> 'kernels/torch_ops', 'nn.py' -> 'nn'."""
    parts = path.removesuffix(".py").split("/")
    pair = "/".join(parts[:2])
    return pair if pair in TABLE else parts[0]


def imported_names(tree: ast.AST) -> Iterator[str]:
    """Every absolute dotted name that is imported, wherever in the file; relative imports are refused elsewhere."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            # `from a import b` names the module a.b or something in a: both are looked at, the longer one first.
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room_of_module(dotted: str) -> str | None:
    """The room of a fuselm module or of a name in one; None for the package itself."""
    parts = dotted.split(".")[1:]
    while parts:
        base = PACKAGE.joinpath(*parts)
        if base.is_dir() or base.with_suffix(".py").exists():
            return room_of("/".join(parts))
        parts.pop()
    return None


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@pytest.mark.parametrize("path", PYTHON_FILES, ids=relative)
def test_imports_follow_the_table(path: Path) -> None:
    room = room_of(relative(path))
    assert room in TABLE, f"{relative(path)} is in no room: give {room!r} a line in TABLE and in docs/architecture.md"
    allowed = TABLE[room]
    for name in imported_names(parse(path)):
        top = name.partition(".")[0]
        if top == "fuselm":
            target = room_of_module(name)
            fine = target in (None, room) or target in allowed.rooms or allowed.rooms == ANYTHING
            assert fine, f"{relative(path)} imports {name}: {room} may import {sorted(allowed.rooms)}, not {target}"
        elif top not in sys.stdlib_module_names and allowed.third_party != ANYTHING:
            message = f"{relative(path)} imports {top}: {room} may use {sorted(allowed.third_party)}"
            assert top in allowed.third_party, message


@pytest.mark.parametrize("path", PYTHON_FILES, ids=relative)
def test_imports_are_absolute(path: Path) -> None:
    relative_ones = [n.lineno for n in ast.walk(parse(path)) if isinstance(n, ast.ImportFrom) and n.level]
    assert not relative_ones, f"{relative(path)} has relative imports in lines {relative_ones}: write fuselm.… in full"


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("cli/*.py")), ids=relative)
def test_verbs_import_what_they_need_inside(path: Path) -> None:
    statements = [node for node in parse(path).body if isinstance(node, ast.Import | ast.ImportFrom)]
    for name in imported_names(ast.Module(body=list(statements), type_ignores=[])):
        top = name.partition(".")[0]
        light = top in sys.stdlib_module_names or top in ("typer", "rich") or room_of_module(name) in (None, "cli")
        assert light or top == "__future__", f"{relative(path)} imports {name} at the top: import it inside the verb"


@pytest.mark.parametrize("module", ["fuselm", "fuselm.cli", "fuselm.kernels.build"])
def test_import_loads_neither_torch_nor_jax(module: str) -> None:
    program = f"import sys, {module}; print([m for m in ('torch', 'jax', 'jaxlib') if m in sys.modules])"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


@pytest.mark.parametrize("path", NATIVE_FILES, ids=relative)
def test_framework_headers_stand_in_their_binding_alone(path: Path) -> None:
    for header in re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', path.read_text(encoding="utf-8"), re.MULTILINE):
        home = FRAMEWORK_HEADERS.get(header.partition("/")[0])
        assert home in (None, path.name), f"{path.name} includes {header}: only {home} may"


@pytest.mark.parametrize("path", sorted(KERNELS.glob("*.cu")), ids=relative)
def test_ops_include_shared_headers_and_no_other_op(path: Path) -> None:
    included = set(re.findall(r'^\s*#\s*include\s*"([^"]+)"', path.read_text(encoding="utf-8"), re.MULTILINE))
    strangers = included - {header.name for header in KERNELS.glob("*.cuh")} - {"fuselm.h"}
    assert not strangers, (
        f"{path.name} includes {sorted(strangers)}: an op includes fuselm.h and .cuh headers, never another .cu"
    )


@pytest.mark.parametrize("path", sorted(KERNELS.glob("*.cuh")), ids=relative)
def test_shared_headers_are_whole_without_any_op(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    included = set(re.findall(r'^\s*#\s*include\s*"([^"]+)"', text, re.MULTILINE))
    assert included <= {header.name for header in KERNELS.glob("*.cuh")} | {"fuselm.h"}
    assert "#pragma once" in text.splitlines(), f"{path.name} is included by several files: it wants #pragma once"


@pytest.mark.parametrize("path", [*PYTHON_FILES, *sorted(PACKAGE.rglob("*.cu"))], ids=relative)
def test_files_keep_to_their_length(path: Path) -> None:
    limit = 900 if path.suffix == ".cu" else 500
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= limit, f"{relative(path)} has {lines} lines: over {limit} it wants splitting"


@pytest.mark.parametrize("path", PYTHON_FILES, ids=relative)
def test_functions_keep_to_their_length(path: Path) -> None:
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            assert lines <= 60, f"{relative(path)}: {node.name} has {lines} lines: over 60 it wants splitting"


def tracked_files() -> list[Path]:
    """Files that are, or are about to be, in the repository."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return [path for name in listing.split("\0") if name and (path := ROOT / name).is_file()]


def test_no_tracked_file_is_over_a_mebibyte() -> None:
    assert [path.name for path in tracked_files() if path.stat().st_size > 1 << 20] == []


def test_no_tracked_text_names_a_path_of_one_machine() -> None:
    machine_path = re.compile(r"(?<![\w.$}*])/(?:work|root|home/\w+)/")
    found = []
    for path in tracked_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # a picture or other data
        found += [f"{path.relative_to(ROOT)}: {match[0]}" for match in machine_path.finditer(text)]
    assert found == []


def tree_paths(readme: str) -> Iterator[str]:
    """The paths of the README's tree: a fenced block with a line that starts with src/.

    A line holds one or more names, then two spaces and what they are for; indentation (or drawn branches) puts it
    under the nearest less indented folder above. Names with a placeholder such as <op>.cu are skipped.
    """
    blocks = re.findall(r"^```[^\n]*\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    for block in (block for block in blocks if re.search(r"^src/", block, re.MULTILINE)):
        parents: list[tuple[int, str]] = []
        for line in block.splitlines():
            match = re.match(r"([\s│├└─]*)(.*)", line)
            assert match
            names, indent = re.split(r"\s{2,}|\s#", match[2])[0].split(), len(match[1])
            while parents and parents[-1][0] >= indent:
                parents.pop()
            above = parents[-1][1] if parents else ""
            paths = [above + name for name in names if "<" not in name]
            yield from paths
            if paths and paths[-1].endswith("/"):
                parents.append((indent, paths[-1]))


def test_tree_in_the_readme_is_the_tree() -> None:
    readme = ROOT / "README.md"
    if not readme.exists():
        pytest.skip("no README yet")
    assert [path for path in tree_paths(readme.read_text(encoding="utf-8")) if not (ROOT / path).exists()] == []


def test_tree_is_read_as_it_is_drawn() -> None:
    lines = [
        "LICENSE Makefile  the usual",
        "src/fuselm/",
        "  cli/  verbs",
        "    doctor.py  looks",
        "  <op>.cu  kernels",
    ]
    drawn = "\n".join(["```", *lines, "tests/", "```", ""])
    expected = ["LICENSE", "Makefile", "src/fuselm/", "src/fuselm/cli/", "src/fuselm/cli/doctor.py", "tests/"]
    assert list(tree_paths(drawn)) == expected
