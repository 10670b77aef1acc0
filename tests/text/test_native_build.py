"""The build of bpe.cpp: what is compiled again and what is not, what a failure says, and that any machine may do it."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fuselm import compiler
from fuselm.compiler import BuildError
from fuselm.text import native, reference
from tests.text.samples import mixture, needs_compiler

HEADER = '#define EXPORT __attribute__((visibility("default")))\n#define SEVEN {seven}\n'


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source folder as small as they come."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "bpe.cpp").write_text('#include "split.h"\nextern "C" EXPORT int seven() { return SEVEN; }\n')
    (folder / "split.h").write_text(HEADER.format(seven=7))
    (folder / "bpe.py").write_text("# no source of the library\n")
    monkeypatch.setattr(native, "SOURCE_DIR", folder)
    return folder


def test_second_call_compiles_nothing(pretend_compilers, sources) -> None:
    first = native.build()
    assert native.build() == first
    assert first.exists()
    assert len(pretend_compilers.calls) == 1
    (call,) = pretend_compilers.calls
    assert f"{sources / 'bpe.cpp'}" in call
    assert all(flag in call.split() for flag in native.FLAGS)


@pytest.mark.parametrize("name", ["bpe.cpp", "split.h", "new.h"])
def test_edited_or_added_source_is_compiled(pretend_compilers, sources, name: str) -> None:
    before = native.build()
    (sources / name).write_text("// edited\n")
    after = native.build()
    assert after != before
    assert len(pretend_compilers.calls) == 2
    assert before.exists()


def test_other_files_and_times_are_no_part_of_the_key(pretend_compilers, sources) -> None:
    before = native.build()
    (sources / "bpe.py").write_text("# edited\n")
    os.utime(sources / "bpe.cpp", (1, 1))
    assert native.build() == before
    assert len(pretend_compilers.calls) == 1


def test_compiler_flags_and_machine_are_part_of_the_key(pretend_compilers, sources, monkeypatch) -> None:
    paths = [native.build()]
    pretend_compilers.install("g++", version="g++ 99.1")
    paths.append(native.build())
    monkeypatch.setattr(native, "FLAGS", ("-O0", *native.FLAGS))
    paths.append(native.build())
    monkeypatch.setattr(native.platform, "machine", lambda: "abacus")
    paths.append(native.build())
    assert len(set(paths)) == len(pretend_compilers.calls) == 4


def test_library_lies_in_the_cache_of_the_user(pretend_compilers, sources, build_cache) -> None:
    assert native.build().parent == build_cache / "text"


def test_failed_compile_shows_the_errors_and_leaves_nothing_half_built(pretend_compilers, sources, build_cache) -> None:
    pretend_compilers.install("g++", extra="echo 'split.h:3: error: expected a ;'; echo 'noise'; exit 2")
    with pytest.raises(BuildError) as failure:
        native.build()
    message = str(failure.value)
    assert "bpe.cpp did not compile" in message
    assert "split.h:3: error: expected a ;" in message
    assert "noise" not in message
    log = Path(message.rpartition("Full log: ")[2])
    assert "noise" in log.read_text()
    assert list(build_cache.rglob("*.so*")) == []
    pretend_compilers.install("g++", version="g++ 12.2.0")
    assert native.build().exists()


def test_missing_compiler_is_named_with_the_remedy(build_cache, monkeypatch) -> None:
    monkeypatch.setattr(compiler, "find_host_compiler", lambda: None)
    with pytest.raises(BuildError, match=r"compiled by g\+\+; it is not on PATH\. Install g\+\+"):
        native.build()


def test_cache_that_cannot_be_written_says_which_variable_moves_it(pretend_compilers, sources, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("FUSELM_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(BuildError, match=r"cannot be written.*Set FUSELM_CACHE_DIR"):
        native.build()


def test_two_processes_compile_once(pretend_compilers) -> None:
    pretend_compilers.install("g++", extra="sleep 0.3")
    program = "from fuselm.text import native; print(native.build())"
    command = [sys.executable, "-c", program]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ)) for _ in range(2)]
    printed = {process.communicate(timeout=60)[0] for process in both}
    assert [process.returncode for process in both] == [0, 0]
    assert len(printed) == 1
    assert len(pretend_compilers.calls) == 1


@needs_compiler
def test_real_compiler_makes_a_library_and_shows_its_errors(sources, build_cache) -> None:
    assert ctypes.CDLL(str(native.build())).seven() == 7
    (sources / "split.h").write_text(HEADER.format(seven="eight"))
    with pytest.raises(BuildError, match=r"(?s)bpe\.cpp did not compile.*.eight. was not declared.*Full log"):
        native.build()


@needs_compiler
def test_library_shows_the_functions_of_its_interface_and_nothing_else() -> None:
    library = native.library()
    for name in native._SIGNATURES:
        assert getattr(library, f"fuselm_{name}")
    exported = {line.split("fuselm_")[1].split("(")[0] for line in _exports()}
    assert exported == set(native._SIGNATURES)


def _exports() -> list[str]:
    lines = (native.SOURCE_DIR / "bpe.cpp").read_text().splitlines()
    return [line for line in lines if line.startswith("EXPORT ")]


@pytest.fixture
def kept_cache(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A build cache that outlives the run: keys are of content, so unchanged sources are not compiled at every run."""
    monkeypatch.setenv("FUSELM_CACHE_DIR", str(request.config.cache.mkdir("fuselm-text")))


@needs_compiler
def test_machine_without_vector_instructions_finds_the_same_words(kept_cache, monkeypatch) -> None:
    monkeypatch.setattr(native, "FLAGS", ("-O0", "-std=c++20", "-fPIC", "-shared", "-U__SSE2__"))
    library = native.library.__wrapped__()
    assert library._name != native.library()._name
    monkeypatch.setattr(native, "library", lambda: library)
    data = mixture(50_000, seed=13).encode()
    assert native.split(data) == reference.split(data)
    for length in range(1, 20):
        for behind in (b" ", "é".encode(), b"'s", b"9", b"Z[", b"{", b"@", b"`"):
            data = b"a" * length + behind + b" " * 40
            assert native.split(data) == reference.split(data)
