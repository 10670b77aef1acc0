"""Builds the native libraries on first use and keeps them in a user cache.

Three shared libraries come from the files beside this one: `core` (every .cu, compiled by nvcc, no framework headers),
`torch` (bind_torch.cpp) and `jax` (bind_jax.cc), the last two compiled by the host compiler and linked to core. This
file knows sources, keys and the cache; what the machine has to build with is toolchain.py's to find, and no op is known
here. Stdlib only.

    path = library("torch")                     # builds when needed, then returns the .so to load
    compile_only("jax", architectures=("90a",)) # objects without a link: for machines that cannot link or load

The cache is `$FUSELM_CACHE_DIR`, else `$XDG_CACHE_HOME/fuselm`, else `~/.cache/fuselm`. Objects and libraries are named
by a hash of all that went into them, so nothing is ever stale and an edit rebuilds only what it touches.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from fuselm import compiler
from fuselm.compiler import BuildError
from fuselm.files import cache_dir
from fuselm.kernels.toolchain import (
    ALL_ARCHITECTURES,
    Compilers,
    Unavailable,
    check_architectures,
    detect_architectures,
    find_compilers,
    find_nvcc,
    framework_include,
    gencode,
    label_of,
    package_dir,
    package_version,
    require_linkable,
    required_architectures,
)

__all__ = [
    "BuildError",
    "Unavailable",
    "cache_dir",
    "clean",
    "compile_only",
    "compiled_text",
    "detect_architectures",
    "find_nvcc",
    "is_built",
    "library",
    "native_sources",
    "source_hashes",
]

SOURCE_DIR = Path(__file__).resolve().parent
LIBRARIES = ("core", "torch", "jax")
BINDINGS = {"torch": "bind_torch.cpp", "jax": "bind_jax.cc"}
NVCC_FLAGS = ("-O3", "-std=c++17", "-Xcompiler", "-fPIC,-fvisibility=hidden", "--expt-relaxed-constexpr")
HOST_FLAGS = ("-O2", "-fPIC", "-fvisibility=hidden")
# TORCH_TARGET_VERSION keeps to the stable ABI of torch 2.10; torch 2.13's own extension builder asks for C++20.
TORCH_FLAGS = ("-std=c++20", "-DTORCH_TARGET_VERSION=0x020a000000000000", "-DUSE_CUDA")
JAX_FLAGS = ("-std=c++17",)
TORCH_LINK_FLAGS = ("-ltorch", "-ltorch_cpu", "-ltorch_cuda", "-lc10")
# A comment, or what may hold the marks of one and is none: raw strings, strings, characters, and numbers, between whose
# digits a ' may stand.
_COMMENT_OR_NOT = re.compile(
    r'(?P<kept>R"(?P<mark>[^\s()\\]{0,16})\(.*?\)(?P=mark)"'
    r'|"(?:\\.|[^"\\\n])*"'
    r"|(?<!\w)\d(?:'?[\w.])*"
    r"|'(?:\\.|[^'\\\n])*')"
    r"|//(?:\\\n|[^\n])*|/\*.*?\*/",
    re.DOTALL,
)


@dataclass(frozen=True)
class Unit:
    """One source file, the command that compiles it (without input and output), and two hashes.

    `inputs` is of the source and every header beside it; `key` is of those, the command and the compilers.
    """

    source: Path
    command: tuple[str, ...]
    inputs: str
    key: str

    @property
    def object(self) -> Path:
        return _root() / "objects" / f"{self.source.stem}-{self.key[:20]}.o"


# --- sources and cache -----------------------------------------------------------------------------------------------


def native_sources(source_dir: Path = SOURCE_DIR) -> list[Path]:
    """Every native file of the kernels, headers too, sorted by name."""
    return sorted(p for p in source_dir.iterdir() if p.suffix in (".cu", ".cuh", ".h", ".cpp", ".cc"))


def source_hashes(source_dir: Path = SOURCE_DIR) -> dict[str, str]:
    """SHA-256 of what is compiled of every native file, under its path in the repository: comments do not count."""
    texts = {path.name: compiled_text(path.read_text(encoding="utf-8")) for path in native_sources(source_dir)}
    return {f"src/fuselm/kernels/{name}": _sha256(text.encode()) for name, text in texts.items()}


def compiled_text(text: str) -> str:
    """C++ without comments, blank lines and blanks at the ends of lines: what a compiler makes code of."""
    bare = _COMMENT_OR_NOT.sub(lambda found: found["kept"] or " ", text)
    return "\n".join(line.rstrip() for line in bare.splitlines() if line.strip())


def clean() -> None:
    """Forget every object, library and log; the next use builds anew."""
    with compiler.build_lock(_root()):
        for folder in ("objects", "lib", "logs"):
            shutil.rmtree(_root() / folder, ignore_errors=True)


def _root() -> Path:
    return cache_dir() / "kernels"


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _digest(*parts: object) -> str:
    return _sha256(json.dumps(parts, sort_keys=True).encode())


# --- what to compile -------------------------------------------------------------------------------------------------


def _units(which: str, architectures: Sequence[str], source_dir: Path, tools: Compilers) -> list[Unit]:
    if which == "core":
        sources = sorted(source_dir.glob("*.cu"))
        targets = tuple(gencode(a) for a in architectures)
        command = (str(tools.nvcc), "-ccbin", str(tools.host), *NVCC_FLAGS, *targets, "-c")
        version = ""
    else:
        sources = [source_dir / BINDINGS[which]]
        flags = TORCH_FLAGS if which == "torch" else JAX_FLAGS
        # -isystem: warnings in a framework's headers are not ours to read.
        command = (str(tools.host), *HOST_FLAGS, *flags, "-isystem", str(framework_include(which)), "-c")
        version = package_version("torch" if which == "torch" else "jaxlib")
    if missing := [source.name for source in sources if not source.exists()] or ([] if sources else ["*.cu"]):
        raise BuildError(f"The {which} library is made of {missing[0]}; {source_dir} has none. Reinstall fuselm.")
    inputs = [_inputs(source) for source in sources]
    return [
        Unit(source, command, digest, _digest(digest, command, version, tools.identity))
        for source, digest in zip(sources, inputs, strict=True)
    ]


def _inputs(source: Path) -> str:
    # Every header counts for every source: they are few, and a wrong guess at who includes whom is a stale build.
    headers = {p.name: _sha256(p.read_bytes()) for p in native_sources(source.parent) if p.suffix in (".cuh", ".h")}
    return _digest(source.name, _sha256(source.read_bytes()), headers)


def _library_path(which: str, architectures: Sequence[str], source_dir: Path, tools: Compilers) -> Path:
    """One folder for each core, its bindings beside it: their rpath is $ORIGIN, so a binding finds its own core."""
    core = _digest([unit.key for unit in _units("core", architectures, source_dir, tools)])
    folder = _root() / "lib" / core[:16]
    if which == "core":
        # The key is in the file's name too: the loader knows a library by its name alone, and would give a binding the
        # core of another build that the process has loaded.
        return folder / f"libfuselm_core-{core[:12]}.so"
    # Keyed further, because one core serves several environments, each with its own torch and jaxlib.
    (unit,) = _units(which, architectures, source_dir, tools)
    return folder / f"libfuselm_{which}-{unit.key[:12]}.so"


def _link_command(which: str, core_path: Path, units: Sequence[Unit], tools: Compilers) -> tuple[str, ...]:
    objects = tuple(str(unit.object) for unit in units)
    if which == "core":
        name = ("-Xlinker", f"-soname={core_path.name}")
        return (str(tools.nvcc), "-ccbin", str(tools.host), "-shared", *objects, *name)
    # -z defs: a launcher that is declared but not defined fails here, not when a user loads the library.
    core = ("-Wl,-z,defs", f"-L{core_path.parent}", f"-l:{core_path.name}", "-Wl,-rpath,$ORIGIN")
    framework = (f"-L{package_dir('torch') / 'lib'}", *TORCH_LINK_FLAGS) if which == "torch" else ()
    return (str(tools.host), "-shared", *objects, *core, *framework)


# --- running it ------------------------------------------------------------------------------------------------------


def library(
    which: str, architectures: Sequence[str] | None = None, *, source_dir: Path = SOURCE_DIR, verbose: bool = False
) -> Path:
    """The path of `core`, `torch` or `jax`, built first when it is not in the cache. None: for the GPUs here."""
    _check_name(which)
    if which != "core":
        require_linkable(which)
    chosen = _choose(which, architectures, source_dir)
    tools = find_compilers(chosen)
    path = _library_path(which, chosen, source_dir, tools)
    if path.exists():
        return path
    core_path = _library_path("core", chosen, source_dir, tools)
    units = {part: _units(part, chosen, source_dir, tools) for part in dict.fromkeys(("core", which))}
    with compiler.build_lock(_root()):
        _compile([unit for part in units.values() for unit in part], label_of(chosen), verbose)
        for part, part_units in units.items():
            target = _library_path(part, chosen, source_dir, tools)
            if not target.exists():  # another process may have built it while this one waited for the lock
                command = _link_command(part, core_path, part_units, tools)
                _run(command, target, f"link of {target.name}", verbose)
    return path


def compile_only(
    which: str, architectures: Sequence[str], *, source_dir: Path = SOURCE_DIR, verbose: bool = False
) -> list[Path]:
    """The object files of a library, compiled and not linked: a CPU build of torch has the headers but no CUDA part."""
    _check_name(which)
    chosen = check_architectures(architectures)
    units = _units(which, chosen, source_dir, find_compilers(chosen))
    with compiler.build_lock(_root()):
        _compile(units, label_of(chosen), verbose)
    return [unit.object for unit in units]


def is_built(which: str, architectures: Sequence[str] | None = None, *, source_dir: Path = SOURCE_DIR) -> bool:
    """Whether `library` would return at once. Never builds; a machine that cannot build has nothing built."""
    _check_name(which)
    try:
        chosen = _choose(which, architectures, source_dir)
        return _library_path(which, chosen, source_dir, find_compilers(chosen)).exists()
    except BuildError:
        return False


def _check_name(which: str) -> None:
    if which not in LIBRARIES:
        raise ValueError(f"A native library is one of {', '.join(LIBRARIES)}; got {which!r}.")


def _choose(which: str, architectures: Sequence[str] | None, source_dir: Path) -> tuple[str, ...]:
    if architectures is not None:
        return check_architectures(architectures)
    detected = required_architectures()
    # A library built for all architectures (in a container image, say) serves any GPU: do not build a second one.
    built = [chosen for chosen in (detected, ALL_ARCHITECTURES) if is_built(which, chosen, source_dir=source_dir)]
    return built[0] if built else detected


def _compile(units: Sequence[Unit], label: str, verbose: bool) -> None:
    todo = [unit for unit in units if not unit.object.exists()]
    if not todo:
        return
    progress = _Progress(label, len(todo))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        # Cores that have no file of their own help nvcc with the architectures of one.
        threads = max(1, (os.cpu_count() or 1) // len(todo))
        running: dict[Future[None], str] = {
            pool.submit(_compile_one, unit, threads, verbose): unit.source.name for unit in todo
        }
        try:
            while running:
                progress.show(list(running.values()))
                for done in wait(running, timeout=1, return_when=FIRST_COMPLETED).done:
                    running.pop(done)
                    done.result()
        finally:
            pool.shutdown(cancel_futures=True)
            progress.end()


def _compile_one(unit: Unit, threads: int, verbose: bool) -> None:
    extra = ("--threads", str(threads)) if unit.source.suffix == ".cu" else ()
    _run((*unit.command, str(unit.source), *extra), unit.object, unit.source.name, verbose)
    # nvcc reads a file once for each architecture: one saved meanwhile must not be kept under the key of its old text.
    if _inputs(unit.source) != unit.inputs:
        unit.object.unlink()
        raise BuildError(f"{unit.source} or a header was edited while it was being compiled. Build again.")


def _run(command: Sequence[str], output: Path, title: str, verbose: bool) -> None:
    compiler.run(command, output=output, log=_root() / "logs" / f"{output.stem}.log", title=title, verbose=verbose)


class _Progress:
    """One line on stderr: rewritten in place on a terminal, printed once elsewhere."""

    def __init__(self, label: str, total: int) -> None:
        self.head, self.total, self.start = f"fuselm: building kernels for {label}", total, time.monotonic()
        self.live = sys.stderr.isatty()
        if not self.live:
            print(f"{self.head}: {total} file{'s' * (total > 1)}", file=sys.stderr)

    def show(self, running: Sequence[str]) -> None:
        if self.live:
            state = f"{self.total - len(running)}/{self.total} {running[0]} ... {self._seconds()}"
            print(f"\r\x1b[K{self.head}: {state}", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        print(f"{chr(13) * self.live}{self.head}: {self._seconds()}", file=sys.stderr)

    def _seconds(self) -> str:
        return f"{time.monotonic() - self.start:.0f} s"
