"""The build: what is compiled again and what is not, what a failure says, and that the real sources compile."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fuselm.kernels import build, toolchain
from fuselm.kernels.build import BuildError, Unavailable

HOPPER = ("90a",)
needs_nvcc = pytest.mark.skipif(build.find_nvcc() is None, reason="needs nvcc")


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A source folder with two kernels, a header and both bindings, as small as they come."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "one.cu").write_text('#include "common.cuh"\nextern "C" EXPORT int one() { return ONE; }\n')
    (folder / "two.cu").write_text('#include "common.cuh"\n__global__ void two() {}\n')
    (folder / "common.cuh").write_text('#define ONE 1\n#define EXPORT __attribute__((visibility("default")))\n')
    (folder / "bind_torch.cpp").write_text("int torch_binding;\n")
    (folder / "bind_jax.cc").write_text(
        '#include "common.cuh"\nextern "C" int one();\nextern "C" EXPORT int jax_binding() { return one(); }\n'
    )
    return folder


@pytest.fixture
def torch_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A torch that has headers and no CUDA library, like a CPU build."""
    package = tmp_path / "torch"
    header = package / "include" / "torch" / "csrc" / "stable" / "library.h"
    header.parent.mkdir(parents=True)
    header.touch()
    for module in (build, toolchain):
        monkeypatch.setattr(module, "package_dir", lambda name: package)
    return package


def compiled(calls: list[str]) -> list[str]:
    """The source files of the compile commands among these calls."""
    return sorted(Path(match[1]).name for call in calls if (match := re.search(r" -c (\S+)", call)))


def test_second_call_compiles_nothing_and_says_nothing(pretend_compilers, sources, capsys) -> None:
    assert not build.is_built("core", HOPPER, source_dir=sources)
    first = build.library("core", HOPPER, source_dir=sources)
    assert "building kernels for sm_90a: 2 files" in capsys.readouterr().err
    number_of_calls = len(pretend_compilers.calls)
    assert build.library("core", HOPPER, source_dir=sources) == first
    assert len(pretend_compilers.calls) == number_of_calls == 3  # two compiles and a link
    assert capsys.readouterr().err == ""
    assert build.is_built("core", HOPPER, source_dir=sources)


def test_edited_source_is_compiled_alone_and_edited_header_compiles_all(pretend_compilers, sources) -> None:
    before = build.library("core", HOPPER, source_dir=sources)
    pretend_compilers.log.unlink()
    (sources / "two.cu").write_text("// edited\n")
    after = build.library("core", HOPPER, source_dir=sources)
    assert after != before
    assert compiled(pretend_compilers.calls) == ["two.cu"]
    pretend_compilers.log.unlink()
    (sources / "common.cuh").write_text("// edited\n")
    build.library("core", HOPPER, source_dir=sources)
    assert compiled(pretend_compilers.calls) == ["one.cu", "two.cu"]


def test_architecture_and_compiler_are_part_of_the_key(pretend_compilers, sources) -> None:
    paths = {build.library("core", HOPPER, source_dir=sources), build.library("core", ("80",), source_dir=sources)}
    assert build.library("core", ("90a", "80"), source_dir=sources) not in paths
    pretend_compilers.install("nvcc", version="Cuda compilation tools, release 13.1, V13.1.1")
    assert not build.is_built("core", HOPPER, source_dir=sources)


def test_order_of_architectures_is_no_part_of_the_key(pretend_compilers, sources) -> None:
    assert build.library("core", ("90a", "80"), source_dir=sources) == build.library(
        "core", ("80", "90a"), source_dir=sources
    )


def test_commands_ask_for_the_architectures_and_position_independent_code(pretend_compilers, sources) -> None:
    build.library("core", ("80", "ptx120"), source_dir=sources)
    for call in pretend_compilers.calls[:2]:
        assert "-gencode=arch=compute_80,code=sm_80 -gencode=arch=compute_120,code=compute_120" in call
        assert "-fPIC,-fvisibility=hidden" in call


def test_library_for_all_architectures_serves_the_gpu_here(pretend_compilers, sources, monkeypatch) -> None:
    monkeypatch.setattr(toolchain, "gpus", lambda: [toolchain.Gpu("H200", (9, 0))])
    everything = build.library("core", build.ALL_ARCHITECTURES, source_dir=sources)
    assert build.is_built("core", source_dir=sources)
    assert build.library("core", source_dir=sources) == everything


def test_bindings_lie_beside_their_core_and_find_it_there(pretend_compilers, sources, torch_on_disk) -> None:
    (torch_on_disk / "lib").mkdir()
    (torch_on_disk / "lib" / "libtorch_cuda.so").touch()
    binding = build.library("torch", HOPPER, source_dir=sources)
    core = build.library("core", HOPPER, source_dir=sources)
    assert binding.parent == core.parent
    link = pretend_compilers.calls[-1]
    assert f"-l:{core.name} -Wl,-rpath,$ORIGIN" in link
    assert f"-L{torch_on_disk / 'lib'} -ltorch -ltorch_cpu -ltorch_cuda -lc10" in link


def test_cpu_build_of_torch_compiles_the_binding_and_refuses_to_link_it(
    pretend_compilers, sources, torch_on_disk
) -> None:
    (compiled_object,) = build.compile_only("torch", HOPPER, source_dir=sources)
    assert compiled_object.exists()
    assert "-DTORCH_TARGET_VERSION=0x020a000000000000 -DUSE_CUDA" in pretend_compilers.calls[-1]
    pretend_compilers.log.unlink()
    with pytest.raises(Unavailable, match=r"libtorch_cuda\.so; .* is a CPU build .*Install a CUDA build"):
        build.library("torch", HOPPER, source_dir=sources)
    assert pretend_compilers.calls == []


def test_other_torch_version_gets_a_binding_of_its_own(pretend_compilers, sources, torch_on_disk, monkeypatch) -> None:
    (before,) = build.compile_only("torch", HOPPER, source_dir=sources)
    monkeypatch.setattr(build, "package_version", lambda package: "99.0")
    (after,) = build.compile_only("torch", HOPPER, source_dir=sources)
    assert before != after


def test_failed_compile_shows_the_first_errors_and_leaves_nothing_half_built(
    pretend_compilers, sources, build_cache
) -> None:
    pretend_compilers.install("nvcc", extra="echo 'one.cu(3): error: expected a ;'; echo 'noise'; exit 2")
    with pytest.raises(BuildError) as failure:
        build.library("core", HOPPER, source_dir=sources)
    message = str(failure.value)
    assert "did not compile" in message
    assert "one.cu(3): error: expected a ;" in message
    assert "noise" not in message
    log = Path(message.rpartition("Full log: ")[2])
    assert "noise" in log.read_text()
    assert list(build_cache.rglob("*.so*")) == list(build_cache.rglob("*.o*")) == []


def test_source_edited_during_its_compile_is_not_kept(pretend_compilers, sources) -> None:
    pretend_compilers.install("nvcc", extra=f"echo '// edited' >> {sources / 'one.cu'}")
    with pytest.raises(BuildError, match=r"edited while it was being compiled\. Build again"):
        build.compile_only("core", HOPPER, source_dir=sources)
    pretend_compilers.install("nvcc")
    assert all(path.exists() for path in build.compile_only("core", HOPPER, source_dir=sources))


def test_two_processes_compile_each_file_once(pretend_compilers, sources) -> None:
    pretend_compilers.install("nvcc", extra="sleep 0.3")
    program = "import sys, pathlib; from fuselm.kernels import build\n"
    program += f"print(build.library('core', ('90a',), source_dir=pathlib.Path({str(sources)!r})))"
    command = [sys.executable, "-c", program]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ)) for _ in range(2)]
    printed = {process.communicate(timeout=60)[0] for process in both}
    assert [process.returncode for process in both] == [0, 0]
    assert len(printed) == 1
    assert compiled(pretend_compilers.calls) == ["one.cu", "two.cu"]


def test_cache_that_cannot_be_written_says_which_variable_moves_it(pretend_compilers, sources, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("FUSELM_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(BuildError, match=r"cannot be written.*Set FUSELM_CACHE_DIR"):
        build.library("core", HOPPER, source_dir=sources)


def test_cache_dir_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSELM_CACHE_DIR", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert build.cache_dir() == Path("/a")
    monkeypatch.delenv("FUSELM_CACHE_DIR")
    assert build.cache_dir() == Path("/b/fuselm")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert build.cache_dir() == Path.home() / ".cache" / "fuselm"


def test_clean_forgets_what_was_built(pretend_compilers, sources) -> None:
    build.library("core", HOPPER, source_dir=sources)
    build.clean()
    assert not build.is_built("core", HOPPER, source_dir=sources)


def test_machine_that_cannot_build_has_nothing_built(sources, build_cache, monkeypatch) -> None:
    monkeypatch.setattr(toolchain, "find_nvcc", lambda: None)
    assert not build.is_built("core", HOPPER, source_dir=sources)


def test_unknown_library_is_refused(build_cache) -> None:
    with pytest.raises(ValueError, match="one of core, torch, jax; got 'tensorflow'"):
        build.library("tensorflow", HOPPER)


def test_missing_source_is_named(pretend_compilers, tmp_path) -> None:
    with pytest.raises(BuildError, match=r"core library is made of \*\.cu; .* has none"):
        build.library("core", HOPPER, source_dir=tmp_path)


def test_source_hashes_cover_every_native_file() -> None:
    hashes = build.source_hashes()
    assert [Path(name).name for name in hashes] == [path.name for path in build.native_sources()]
    assert all(re.fullmatch(r"src/fuselm/kernels/[\w.]+", name) for name in hashes)
    assert all(re.fullmatch(r"[0-9a-f]{64}", digest) for digest in hashes.values())


@needs_nvcc
def test_real_compilers_make_a_core_that_loads_and_a_binding_that_finds_it(sources, build_cache) -> None:
    core = ctypes.CDLL(str(build.library("core", ("80", "90a"), source_dir=sources)))
    assert core.one() == 1
    pytest.importorskip("jaxlib")
    ctypes.CDLL(str(build.library("jax", ("80", "90a"), source_dir=sources)))


@needs_nvcc
def test_binding_gets_its_own_core_where_another_is_loaded(sources, build_cache) -> None:
    pytest.importorskip("jaxlib")
    for value in (1, 2):
        (sources / "common.cuh").write_text(
            f'#define ONE {value}\n#define EXPORT __attribute__((visibility("default")))\n'
        )
        binding = ctypes.CDLL(str(build.library("jax", HOPPER, source_dir=sources)))
        assert binding.jax_binding() == value


@needs_nvcc
def test_real_compiler_error_is_shown(sources, build_cache) -> None:
    (sources / "one.cu").write_text("int one() { return missing; }\n")
    with pytest.raises(BuildError, match=r'(?s)one\.cu did not compile.*identifier "missing" is undefined.*Full log'):
        build.library("core", HOPPER, source_dir=sources)


@pytest.fixture
def kept_cache(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A build cache that outlives the run: keys are of content, so unchanged kernels are not compiled at every run."""
    monkeypatch.setenv("FUSELM_CACHE_DIR", str(request.config.cache.mkdir("fuselm-kernels")))


@needs_nvcc
@pytest.mark.parametrize(("framework", "package"), [("torch", "torch"), ("jax", "jaxlib")])
def test_bindings_compile_and_name_launchers_that_are_defined(kept_cache, framework: str, package: str) -> None:
    pytest.importorskip(package)
    build.compile_only(framework, HOPPER)
    named = re.findall(r"FUSELM_OP\((\w+),", (build.SOURCE_DIR / build.BINDINGS[framework]).read_text())
    defined = "".join(path.read_text() for path in build.SOURCE_DIR.glob("*.cu"))
    assert len(named) > 5
    assert [name for name in named if f"\nStatus {name}(" not in defined] == ["name"]  # that of the macro itself


# Slow: half a minute a file. The GPU record vouches for the same sources, which were compiled where it was made.
@pytest.mark.slow
@needs_nvcc
def test_shipped_kernels_compile_and_both_bindings_fit_them(kept_cache) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("jaxlib")
    build.compile_only("torch", HOPPER)
    # Linked with -z defs, so a launcher that the binding names and no .cu defines is found here.
    ctypes.CDLL(str(build.library("jax", HOPPER)))


@pytest.mark.slow
@needs_nvcc
def test_shipped_kernels_compile_for_every_architecture(kept_cache) -> None:
    build.library("core", build.ALL_ARCHITECTURES)
