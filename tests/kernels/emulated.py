"""The kernels' own sources, compiled for a CPU: a GPU is not needed to see whether they compute what they should.

g++ compiles the .cu files beside an emulator of threads (emulator/), with the words of PTX put into C++ here. The
library registers their launchers as the CPU's implementation of the raw ops, in place of the plain formulas. From then
on `fuselm.ops` runs kernels on the CPU tensors of this process, and a test of an op on a CPU is one of its kernels.
There is no way back: `pytest --emulated` does this at its start, for a whole process.

What it vouches for: indices, strides, launch configurations, barriers and exchanges within a cluster, whoever waits for
the copy engine and frees memory for it, the order of sums, refusals. What it cannot see: speed, whatever hangs on
several clusters at a time, tensor cores. That is what a GPU record is for.

Where libasan has been loaded before all else (`make memcheck`), each read and write of a kernel is looked at, too.

    load()                   # kernels from now on, as on sm_90; load(75), load(80): what older GPUs run instead
    use("small")             # as on a device so small that few rows are many
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
import re
import shutil
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import torch

from fuselm import compiler
from fuselm.files import cache_dir
from fuselm.kernels import build, toolchain
from fuselm.kernels.adamw import LIST_OPS
from fuselm.kernels.spec import op_names

EMULATOR = Path(__file__).with_name("emulator")
FLAGS = ("-O1", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fno-strict-aliasing", "-w")
# What finds reads and writes outside of a tensor and vectors that lie where none may: as slow as it sounds.
SANITIZERS = ("-fsanitize=address,alignment", "-fno-sanitize-recover=alignment", "-g1")
# Bsymbolic: a CUDA build of torch has a stream of its own to give, under the name of the emulator's.
LINK_FLAGS = ("-ltorch", "-ltorch_cpu", "-lc10", "-Wl,-z,defs", "-Wl,-Bsymbolic")

KEPT_DAYS = 7  # what is built of sources as they were, since it was last used; each takes some 60 MB

MULTIPROCESSORS = {"large": 132, "small": 2}  # of the devices that there are in fibers.cpp, in its order
ARCHITECTURES = (75, 80, 90)  # the least of each of the ways in which rows travel to shared memory
NOT_HERE = ("linear_cross_entropy_dweight", "overwrite_l2")  # which are made of tensor cores, or of caches

# What the assembler's words mean, by the template of an asm statement without its operands' places.
PTX = {
    "": "(void)0",
    "ld.global.v4.u32 {%0, %1, %2, %3}, [%4];": "emulated::load_words<4>(emulated::number(%4), %0, %1, %2, %3)",
    "ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];": "emulated::load_words<4>(emulated::number(%4), %0, %1, %2, %3)",
    "ld.global.v2.u32 {%0, %1}, [%2];": "emulated::load_words<2>(emulated::number(%2), %0, %1)",
    "ld.global.nc.v2.u32 {%0, %1}, [%2];": "emulated::load_words<2>(emulated::number(%2), %0, %1)",
    "ld.global.u32 %0, [%1];": "emulated::load_words<1>(emulated::number(%1), %0)",
    "st.shared.f32 [%0], %1;": "*static_cast<float*>(emulated::shared_pointer(%0)) = %1",
    "ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];": (
        "{ const float* four = static_cast<const float*>(emulated::shared_pointer(%4));"
        " %0 = four[0], %1 = four[1], %2 = four[2], %3 = four[3]; }"
    ),
    # What L2 does with lines is nothing that a result hangs on.
    "createpolicy.fractional.L2::evict_last.b64 %0, 1.0;": "%0 = 1",
    "createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;": "%0 = 0",
    "ld.global.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;": (
        "emulated::load_words<4>(emulated::number(%4), %0, %1, %2, %3)"
    ),
    "ld.global.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;": (
        "emulated::load_words<4>(emulated::number(%4), %0, %1, %2, %3)"
    ),
    "ld.global.L2::cache_hint.v2.u32 {%0, %1}, [%2], %3;": "emulated::load_words<2>(emulated::number(%2), %0, %1)",
    "ld.global.L2::cache_hint.u32 %0, [%1], %2;": "emulated::load_words<1>(emulated::number(%1), %0)",
    # The copy engine.
    "mbarrier.init.shared::cta.b64 [%0], %1;": "emulated::init_barrier(%0, %1)",
    "fence.mbarrier_init.release.cluster;": "(void)0",
    "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;": "emulated::expect_bytes(%0, %1)",
    "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }": (
        "%0 = emulated::is_passed(%1, %2)"
    ),
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;": (
        "emulated::copy_bulk(%0, %1, %2, %3)"
    ),
    r"cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n cp.async.bulk.commit_group;": (
        "emulated::store_bulk(const_cast<void*>(%0), %1, %2)"
    ),
    "cp.async.bulk.wait_group.read %0;": "emulated::wait_for_stores(%0)",
    "fence.proxy.async.shared::cta;": "(void)0",
    "cp.async.cg.shared.global [%0], [%1], 16;": "emulated::copy_async(%0, %1)",
    "cp.async.commit_group;": "emulated::commit_copies()",
    "cp.async.wait_group %0;": "emulated::wait_for_copies(%0)",
    # Clusters.
    r"barrier.cluster.arrive.aligned;\n barrier.cluster.wait.aligned;": (
        "emulated::cluster_arrive(), emulated::cluster_wait()"
    ),
    "barrier.cluster.arrive.relaxed.aligned;": "emulated::cluster_arrive()",
    "barrier.cluster.wait.acquire.aligned;": "emulated::cluster_wait()",
    "mapa.shared::cluster.u32 %0, %1, %2;": "%0 = emulated::far_number(%1, %2)",
    "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];": "emulated::send(%0, %1, %2)",
    # A launch is over when it returns.
    "griddepcontrol.launch_dependents;": "(void)0",
    "griddepcontrol.wait;": "(void)0",
    # In steps of 2^-23, toward 0: 2^x is 1 for what is nearly 0, as on a GPU.
    "ex2.approx.ftz.f32 %0, %1;": "%0 = std::exp2(std::trunc(%1 * 0x1p23f) * 0x1p-23f)",
    "rcp.approx.ftz.f32 %0, %1;": "%0 = 1.0f / (%1)",
}


def in_cpp(text: str) -> str:
    """CUDA C++ as g++ can compile it."""
    text = re.sub(
        r"extern __shared__ (?:__align__\(\d+\) )?(\w+) (\w+)\[\];",
        r"\1* \2 = static_cast<\1*>(emulated::dynamic_shared());",
        text,
    )
    text = re.sub(r"\b__shared__ ([^;]+);", _own_shared, text)
    text = re.sub(r"(\w+(?:<[^<>;]*>)?)<<<(.*?)>>>\(", r"emulated::chevrons(\1, \2)(", text)
    return _without_asm(text.replace("__cvta_generic_to_shared", "emulated::shared_number"))


def _own_shared(found: re.Match[str]) -> str:
    """A declaration of shared memory: a struct's members, of which every block has its own."""
    bare = found[1]
    for brackets in (r"\([^()]*\)", r"\[[^\[\]]*\]", r"<[^<>]*>"):  # what may have commas in it
        while bare != (bare := re.sub(brackets, "", bare)):
            pass
    names = [part.split()[-1] for part in bare.split(",")]
    own = f"shared_{names[0]}"
    members = "".join(f" auto& {name} = {own}.{name};" for name in names)
    return f"struct Of_{own} {{ {found[1]}; }}; auto& {own} = emulated::own_shared<Of_{own}>();{members}"


def _without_asm(text: str) -> str:
    made, at = [], 0
    for found in re.finditer(r"\basm(?: volatile)?\s*\(", text):
        end = _closing(text, found.end())
        made += [text[at : found.start()], _meaning(text[found.end() : end])]
        at = end + 1
    return "".join([*made, text[at:]])


def _closing(text: str, start: int) -> int:
    """Where the bracket is closed that has been opened before `start`."""
    depth, quoted = 1, False
    for at in range(start, len(text)):
        quoted ^= text[at] == '"'
        depth += 0 if quoted else {"(": 1, ")": -1}.get(text[at], 0)
        if depth == 0:
            return at
    raise ValueError(f"a bracket must be closed: {text[start : start + 80]}")


def _meaning(statement: str) -> str:
    """One asm statement in C++: its template's meaning with its operands."""
    template = "".join(re.findall(r'"([^"]*)"', re.split(r'(?<=")\s*:', statement, maxsplit=1)[0]))
    given = _operands(statement)
    if template not in PTX:  # nothing that g++ knows either, should it come so far: most is for newer architectures
        return f'a_meaning_in_emulated_py_is_missing("{template}")'
    return re.sub(r"%(\d)", lambda found: f"({given[int(found[1])]})", PTX[template])


def _operands(statement: str) -> list[str]:
    """The expressions of what stands as "constraint"(expression), in order."""
    found = re.finditer(r'"[=+]?[rlfhn]"\s*\(', statement)
    return [statement[begin.end() : _closing(statement, begin.end())] for begin in found]


# ---- building ------------------------------------------------------------------------------------------------------


@functools.cache
def _flags() -> tuple[str, ...]:
    """FLAGS, with SANITIZERS in a process that the sanitizers' library has been loaded into before all others."""
    return (*FLAGS, *SANITIZERS) if "libasan" in os.environ.get("LD_PRELOAD", "") else FLAGS


def library(architecture: int) -> Path:
    """The library of all sources but those of NOT_HERE, built where it is not there yet."""
    sources = [p for p in build.native_sources() if p.suffix == ".cu" and p.stem not in NOT_HERE]
    headers = [p for p in build.native_sources() if p.suffix in (".cuh", ".h")]
    own = sorted(EMULATOR.iterdir())
    binding = build.SOURCE_DIR / build.BINDINGS["torch"]
    about = (architecture, _flags(), LINK_FLAGS, torch.__version__, compiler.version_text(_host()), sources)
    key = sha256(repr(about).encode())
    for path in (*sources, *headers, *own, binding, Path(__file__)):
        key.update(path.read_bytes())
    folder = cache_dir() / "emulated" / key.hexdigest()[:20]
    made = folder / "libemulated.so"
    with compiler.build_lock(folder):
        if not made.exists():
            print(f"compiling {len(sources)} kernel sources for this CPU: about a minute, once", file=sys.stderr)
            _build(architecture, sources, headers, binding, made)
        os.utime(folder)
    _sweep(folder.parent)
    return made


def _sweep(root: Path) -> None:
    """Remove what nobody has used for long; a process that has loaded it keeps what it has."""
    for folder in root.iterdir():
        with suppress(FileNotFoundError):  # another process was faster
            if time.time() - folder.stat().st_mtime > KEPT_DAYS * 86400:
                shutil.rmtree(folder, ignore_errors=True)


def _build(architecture: int, sources: Sequence[Path], headers: Sequence[Path], binding: Path, made: Path) -> None:
    folder = made.parent
    texts = {path: in_cpp(path.read_text(encoding="utf-8")) for path in (*headers, *sources)}
    texts[binding] = _for_cpu(binding.read_text(encoding="utf-8"), "".join(texts[path] for path in sources))
    for path, text in texts.items():
        (folder / _name(path)).write_text(text)
    units = [*sorted(EMULATOR.glob("*.cpp")), *(folder / _name(path) for path in (*sources, binding))]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(lambda unit: _compile(unit, architecture, folder), units))
    link = (
        str(_host()),
        "-shared",
        *_flags(),
        *map(str, objects),
        f"-L{toolchain.package_dir('torch') / 'lib'}",
        *LINK_FLAGS,
    )
    compiler.run(link, output=made, log=folder / "link.log", title=made.name)
    for path in objects:
        path.unlink()


def _host() -> Path:
    found = compiler.find_host_compiler()
    if found is None:
        raise compiler.BuildError("Kernels are emulated by what g++ makes of them; there is none on PATH. Install it.")
    return found


def _name(path: Path) -> str:
    return f"{path.stem}.cpp" if path.suffix == ".cu" else path.name


def _for_cpu(text: str, launchers: str) -> str:
    """The binding, for the CPU and the launchers that are there."""
    there = set(re.findall(r"^(?:Status|int64_t) (\w+)\(", launchers, re.MULTILINE))
    lines = [
        line
        for line in text.splitlines()
        if not (found := re.match(r"\s*FUSELM_OP\((\w+), (?:fuselm::)?(\w+)\);", line)) or found[1] in there
    ]
    return "\n".join(lines).replace("(fuselm, CUDA, m)", "(fuselm, CPU, m)")


def _compile(unit: Path, architecture: int, folder: Path) -> Path:
    output = folder / f"{unit.stem}.o"
    include = ("-isystem", str(toolchain.framework_include("torch"))) if unit.stem.startswith("bind") else ()
    flags = build.TORCH_FLAGS if include else of_architecture(architecture)
    command = (str(_host()), *_flags(), *flags, f"-I{folder}", f"-I{EMULATOR}", *include, "-c", str(unit))
    compiler.run(command, output=output, log=folder / f"{unit.stem}.log", title=unit.name)
    return output


def of_architecture(architecture: int) -> tuple[str, ...]:
    """g++'s flags for what is CUDA, or the emulator's."""
    return "-std=c++20", f"-D__CUDA_ARCH__={10 * architecture}"


# ---- using it ------------------------------------------------------------------------------------------------------


_loaded: list[ctypes.CDLL] = []


def load(architecture: int = 90) -> None:
    """Run kernels on CPU tensors from now on, as a GPU of one of ARCHITECTURES does."""
    # Before the library: their plain formulas would take the place of kernels that are there first.
    modules = {name: importlib.import_module(f"fuselm.kernels.torch_ops.{name}") for name in (*op_names(), *LIST_OPS)}
    for name in LIST_OPS:
        modules[name].is_on_gpu = lambda tensor: tensor is not None and tensor.device.type == "cpu"  # type: ignore[attr-defined]
    path = str(library(architecture))
    torch.ops.load_library(path)
    emulator = ctypes.CDLL(path)
    emulator.emulated_speaks_to(os.dup(2))  # as it is now: what pytest catches is lost when a process is ended
    _loaded.append(emulator)


def use(size: str) -> None:
    """As on one of the devices of MULTIPROCESSORS."""
    _loaded[0].emulated_device(list(MULTIPROCESSORS).index(size))


def launches() -> int:
    """How many kernels have been launched."""
    count: int = _loaded[0].emulated_launches()
    return count
