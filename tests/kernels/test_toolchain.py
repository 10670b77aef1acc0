"""What is found on a machine to build with and for, and the words for what is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from fuselm.kernels import toolchain
from fuselm.kernels.toolchain import BuildError, Gpu, Unavailable


@pytest.mark.parametrize(
    ("capability", "expected"),
    [
        ((7, 5), "75"),
        ((8, 0), "80"),
        ((8, 6), "86"),
        ((8, 7), "86"),  # machine code of an earlier minor version runs
        ((8, 9), "89"),
        ((9, 0), "90a"),
        ((10, 0), "100"),
        ((10, 3), "100"),
        ((11, 0), "ptx100"),  # no code of its major version: PTX of the one before
        ((12, 0), "120"),
        ((12, 1), "120"),
        ((13, 0), "ptx120"),
    ],
)
def test_each_gpu_gets_code_that_runs_on_it(capability: tuple[int, int], expected: str) -> None:
    assert toolchain.architecture_of(capability) == expected


def test_detected_architectures_are_each_named_once_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [Gpu("B", (10, 0)), Gpu("H", (9, 0)), Gpu("A", (8, 0)), Gpu("H", (9, 0)), Gpu("old", (7, 0))]
    monkeypatch.setattr(toolchain, "gpus", lambda: found)
    assert toolchain.detect_architectures() == ("80", "90a", "100")


def test_without_a_gpu_nothing_is_detected_and_auto_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "gpus", list)
    assert toolchain.detect_architectures() == ()
    with pytest.raises(BuildError, match=r"none is visible.*--arch 90a"):
        toolchain.parse_architectures("auto")


def test_gpu_that_is_too_old_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "gpus", lambda: [Gpu("Tesla V100", (7, 0))])
    with pytest.raises(BuildError, match=r"7\.5.*Tesla V100 \(sm_70\).*CPU"):
        toolchain.detect_architectures()


def test_nvidia_smi_listing_is_read_where_the_driver_library_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "nvidia-smi"
    script.write_text("#!/bin/sh\necho '9.0, NVIDIA H200'\necho '12.0, NVIDIA RTX PRO 6000'\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    def no_library(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(toolchain.ctypes, "CDLL", no_library)
    assert toolchain.gpus() == [Gpu("NVIDIA H200", (9, 0)), Gpu("NVIDIA RTX PRO 6000", (12, 0))]


def test_architecture_lists_are_sorted_and_checked() -> None:
    assert toolchain.parse_architectures("sm_90a, 75,90a") == ("75", "90a")
    assert toolchain.parse_architectures("90,80") == ("80", "90a")  # what every GPU of capability 9.0 runs
    assert toolchain.parse_architectures("all") == toolchain.ALL_ARCHITECTURES
    for wrong in ("70", "hopper", "", "ptx"):
        with pytest.raises(BuildError, match=r"at least 75.*got.*Choose from"):
            toolchain.parse_architectures(wrong)


def test_flags_ask_for_machine_code_or_ptx() -> None:
    assert toolchain.gencode("90a") == "-gencode=arch=compute_90a,code=sm_90a"
    assert toolchain.gencode("ptx120") == "-gencode=arch=compute_120,code=compute_120"


def test_nvcc_of_cuda_home_comes_before_the_one_on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("home", "other"):
        (tmp_path / name / "bin").mkdir(parents=True)
        (tmp_path / name / "bin" / "nvcc").write_text("#!/bin/sh\n")
        (tmp_path / name / "bin" / "nvcc").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "other" / "bin"))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    assert toolchain.find_nvcc() == tmp_path / "home" / "bin" / "nvcc"
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "empty"))
    monkeypatch.delenv("CUDA_PATH", raising=False)
    assert toolchain.find_nvcc() == tmp_path / "other" / "bin" / "nvcc"


def test_missing_nvcc_is_named_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "find_nvcc", lambda: None)
    with pytest.raises(BuildError, match=r"needs nvcc; none was found.*Install the CUDA toolkit.*CUDA_HOME"):
        toolchain.find_compilers(("90a",))


def test_missing_host_compiler_is_named_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch, pretend_compilers: object
) -> None:
    monkeypatch.setattr(toolchain, "find_host_compiler", lambda: None)
    with pytest.raises(BuildError, match=r"g\+\+; it is not on PATH.*Install"):
        toolchain.find_compilers(("90a",))


@pytest.mark.parametrize(("release", "architecture"), [("11.8", "90a"), ("12.4", "100"), ("12.4", "ptx120")])
def test_nvcc_too_old_for_an_architecture_is_refused(pretend_compilers, release: str, architecture: str) -> None:
    pretend_compilers.install("nvcc", version=f"Cuda compilation tools, release {release}, V{release}.0")
    with pytest.raises(
        BuildError, match=rf"{architecture} needs nvcc .* or newer; .* is {release}.*newer CUDA toolkit"
    ):
        toolchain.find_compilers((architecture,))


def test_nvcc_serves_what_it_is_new_enough_for(pretend_compilers) -> None:
    pretend_compilers.install("nvcc", version="Cuda compilation tools, release 12.4, V12.4.0")
    assert toolchain.find_compilers(("75", "90a")).nvcc == pretend_compilers.folder / "bin" / "nvcc"


def test_framework_that_is_not_installed_is_unavailable_and_not_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Unavailable, match="jaxlib is not installed"):
        toolchain.framework_include("jax")


def test_framework_without_its_headers_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "package_dir", lambda package: tmp_path)
    with pytest.raises(BuildError, match=r"needs torch/csrc/stable/library.h; it is not in .*Reinstall torch"):
        toolchain.framework_include("torch")
