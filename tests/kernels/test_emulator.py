"""The emulator that runs kernels on a CPU: threads, what they wait for, launches, and PTX in C++."""

from __future__ import annotations

import atexit
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import pytest

from tests.kernels import emulated

# Launches a kernel and prints what each launch has left in memory.
PROGRAM = """
#include <cuda_runtime.h>
#include <cstdio>
{kernel}
int main() {{
  for (int launch = 0; launch < {launches}; ++launch) {{
    alignas(16) int out[1000] = {{}};
    {launch}
    if (cudaGetLastError() != cudaSuccess) return 3;
    for (int one : out) std::printf("%d ", one);
  }}
}}
"""


def plainly(blocks: object, threads: object) -> str:
    """A launch without more ado."""
    return f"kernel<<<dim3({blocks}), dim3({threads})>>>(out);"


def in_clusters(size: int, blocks: int, threads: int, attribute: str = "") -> str:
    """A launch of clusters of so many blocks."""
    return f"""
    {attribute}
    cudaLaunchAttribute clusters = {{cudaLaunchAttributeClusterDimension, {{0, {{{size}, 1, 1}}}}}};
    const cudaLaunchConfig_t how = {{dim3({blocks}), dim3({threads}), 0, nullptr, &clusters, 1}};
    if (cudaLaunchKernelEx(&how, kernel, out) != cudaSuccess) return 3;
    """


def outcome(folder: Path, kernel: str, launch: str, launches: int = 1) -> subprocess.CompletedProcess[str]:
    """How a program ends that launches a kernel."""
    source, program = folder / "program.cpp", folder / "program"
    source.write_text(emulated.in_cpp(PROGRAM.format(kernel=kernel, launch=launch, launches=launches)))
    subprocess.run((*COMPILER, str(source), emulator(), "-o", str(program)), check=True)
    return subprocess.run((str(program),), capture_output=True, text=True, check=False)


COMPILER = ("g++", *emulated.of_architecture(90), "-w", f"-I{emulated.EMULATOR}")


@cache
def emulator() -> str:
    """The emulator, compiled once for all programs."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    objects = [folder / f"{unit.stem}.o" for unit in emulated.EMULATOR.glob("*.cpp")]
    for made in objects:
        subprocess.run((*COMPILER, "-c", str(emulated.EMULATOR / f"{made.stem}.cpp"), "-o", str(made)), check=True)
    subprocess.run(("ld", "-r", *map(str, objects), "-o", str(folder / "emulator.o")), check=True)
    return str(folder / "emulator.o")


def numbers(folder: Path, kernel: str, threads: int, blocks: int = 1) -> list[int]:
    """What a kernel leaves in memory, a number for each thread."""
    return of_launches(folder, kernel, plainly(blocks, threads), threads * blocks, 1)[0]


def of_launches(folder: Path, kernel: str, launch: str, count: int, launches: int = 4) -> list[list[int]]:
    """The first numbers that each launch leaves: copies are made at once in some, and as late as can be in others."""
    ended = outcome(folder, kernel, launch, launches)
    assert ended.returncode == 0, ended.stderr
    words = [int(word) for word in ended.stdout.split()]
    return [words[1000 * number :][:count] for number in range(launches)]


def told(folder: Path, kernel: str, launch: str, launches: int = 4) -> str:
    """What the emulator says of a kernel that it stops."""
    ended = outcome(folder, kernel, launch, launches)
    assert ended.returncode < 0
    return ended.stderr


REVERSED = """
__global__ void kernel(int* out) {{
  __shared__ int there[100];
  there[threadIdx.x] = 1000 * blockIdx.x + threadIdx.x;
  {barrier}
  out[blockIdx.x * 100 + threadIdx.x] = there[99 - threadIdx.x];
}}
"""


def test_threads_see_what_others_wrote_before_a_barrier(tmp_path: Path) -> None:
    found = numbers(tmp_path, REVERSED.format(barrier="__syncthreads();"), 100, 3)
    assert found == [1000 * block + 99 - i for block in range(3) for i in range(100)]


def test_a_missing_barrier_shows_from_block_to_block(tmp_path: Path) -> None:
    """Threads run the one way round in one block and the other way in the next."""
    found = numbers(tmp_path, REVERSED.format(barrier=""), 100, 3)
    right = [[found[100 * block + i] == 1000 * block + 99 - i for i in range(100)] for block in range(3)]
    assert not all(right[1])
    assert right[0] != right[1]
    assert right[0] == right[2]


def test_lanes_exchange_numbers_in_a_warp_that_is_not_whole_and_where_some_have_ended(tmp_path: Path) -> None:
    kernel = """
    __global__ void kernel(int* out) {
      const int i = threadIdx.x;
      if (i % 32 == 31) return;
      int sum = i;
      for (int step = 1; step < 8; step *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step, 8);
      out[i] = i % 32 < 24 ? sum : __shfl_up_sync(0xff000000u, i, 1, 8);
      __syncthreads();
    }
    """
    found = numbers(tmp_path, kernel, 40)
    eights = [sum(range(i // 8 * 8, i // 8 * 8 + 8)) for i in range(40)]
    assert found[:24] == eights[:24]
    assert found[24:32] == [24, 24, 25, 26, 27, 28, 29, 0]
    assert found[32:] == eights[32:]


def test_ballots_count_lanes_that_are_there(tmp_path: Path) -> None:
    kernel = """
    __global__ void kernel(int* out) {
      const int i = threadIdx.x;
      const uint32_t odd = __ballot_sync(0xffffffffu, i % 2), alike = __match_any_sync(0xffffffffu, i / 3);
      out[i] = 1000 * __popc(odd) + 10 * (__ffs(alike) - 1) + __any_sync(0xffffffffu, i == 2);
    }
    """
    assert numbers(tmp_path, kernel, 7) == [3001, 3001, 3001, 3031, 3031, 3031, 3061]


def test_threads_that_wait_for_one_another_forever_are_told(tmp_path: Path) -> None:
    kernel = """
    __global__ void kernel(int* out) {
      if (threadIdx.x == 0) __syncthreads();
      else __shfl_sync(0xffffffffu, 0, 0);
    }
    """
    assert "wait for one another forever" in told(tmp_path, kernel, plainly(1, 2))


def test_a_lane_that_is_not_in_its_own_mask_is_told(tmp_path: Path) -> None:
    kernel = "__global__ void kernel(int* out) { out[0] = __shfl_sync(0x2u, 5, 0); }"
    assert "whose mask it is not in, in block 0, 0, 0" in told(tmp_path, kernel, plainly(1, 2))


NOTHING = "__global__ void kernel(int* out) { out[0] = 1; }"


@pytest.mark.parametrize(
    "launch",
    [
        *(plainly(*given) for given in [("0", "32"), ("1, 65536", "1"), ("1", "1025"), ("1", "0")]),
        "kernel<<<1, 1, 49153>>>(out);",
        in_clusters(2, 3, 1),
        in_clusters(9, 9, 1),
        in_clusters(17, 17, 1, "cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);"),
    ],
)
def test_a_launch_that_a_gpu_refuses_is_refused(tmp_path: Path, launch: str) -> None:
    assert outcome(tmp_path, NOTHING, launch).returncode == 3


@pytest.mark.parametrize(
    "launch",
    [
        "cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 227 << 10);"
        "kernel<<<1, 1, 227 << 10>>>(out);",
        in_clusters(16, 16, 1, "cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);"),
    ],
)
def test_a_kernel_may_be_allowed_more(tmp_path: Path, launch: str) -> None:
    assert outcome(tmp_path, NOTHING, launch).returncode == 0


# ---- shared memory ---------------------------------------------------------------------------------------------------


def test_declarations_of_shared_memory_become_a_blocks_own() -> None:
    text = emulated.in_cpp("__shared__ float a[two(1, 2)][3], b;")
    assert text.startswith("struct Of_shared_a { float a[two(1, 2)][3], b; }; auto& shared_a = ")
    assert text.endswith(" auto& a = shared_a.a; auto& b = shared_a.b;")
    nested = "__shared__ std::conditional_t<(n > 1), Pair<int, 2>, char> both;"
    assert emulated.in_cpp(nested).endswith(" auto& both = shared_both.both;")


def test_a_block_finds_in_shared_memory_nothing_that_another_has_left(tmp_path: Path) -> None:
    kernel = """
    __global__ void kernel(int* out) {
      extern __shared__ int given[];
      __shared__ alignas(16) int own[4];
      out[2 * blockIdx.x] = own[threadIdx.x];
      out[2 * blockIdx.x + 1] = (emulated::number(own) % 16 == 0) + 2 * (emulated::number(given) % 128 == 0);
      own[threadIdx.x] = 7;
    }
    """
    assert numbers(tmp_path, kernel, 1, 4) == [-1, 3, -1, 3]


# ---- clusters and the copy engine ------------------------------------------------------------------------------------

# Each thread sends a number to the next block of its cluster, which waits for their bytes.
RING = """
__global__ void kernel(int* out) {{
  __shared__ float came[4];
  __shared__ uint64_t barrier;
  const uint32_t mine = emulated::shared_number(&barrier), slot = emulated::shared_number(&came[threadIdx.x]);
  const uint32_t next = (blockIdx.x + 1) % 3;
  if (threadIdx.x == 0) emulated::init_barrier(mine, 1), emulated::expect_bytes(mine, 16);
  {meet}
  emulated::send(emulated::far_number(slot, next), 10 * blockIdx.x + threadIdx.x, emulated::far_number(mine, next));
  {wait}
  out[4 * blockIdx.x + threadIdx.x] = came[threadIdx.x];
  {stay}
}}
"""
MEET = "emulated::cluster_arrive(), emulated::cluster_wait();"
WAIT = "while (!emulated::is_passed(mine, 0)) {}"


def test_blocks_of_a_cluster_send_each_other_numbers(tmp_path: Path) -> None:
    found = of_launches(tmp_path, RING.format(meet=MEET, wait=WAIT, stay=MEET), in_clusters(3, 6, 4), 24)
    assert found == [[10 * block + i for block in (2, 0, 1, 5, 3, 4) for i in range(4)]] * 4


def test_what_is_sent_and_never_waited_for_is_told(tmp_path: Path) -> None:
    words = told(tmp_path, RING.format(meet=MEET, wait="", stay=MEET), in_clusters(3, 3, 4))
    assert "a copy is under way to a block that has ended" in words


def test_a_number_that_is_sent_before_there_is_a_barrier_is_lost(tmp_path: Path) -> None:
    words = told(tmp_path, RING.format(meet="", wait=WAIT, stay=MEET), in_clusters(3, 3, 4))
    assert "wait for one another forever" in words


@pytest.mark.parametrize("wait", ["", WAIT])
def test_a_block_that_ends_while_others_may_send_to_it_is_told(wait: str, tmp_path: Path) -> None:
    kernel = RING.format(meet=MEET, wait=f"if (blockIdx.x != 1) {wait or ';'} else return;", stay="")
    assert "to a block that has ended" in told(tmp_path, kernel, in_clusters(3, 3, 4))


# A block's rows come by the copy engine, two stages at a time, are doubled and go back.
PIPELINE = """
__global__ void kernel(int* out) {{
  __shared__ alignas(16) int stage[2][4];
  __shared__ uint64_t there[2];
  const uint32_t at[] = {{emulated::shared_number(stage[0]), emulated::shared_number(stage[1])}};
  const uint32_t barrier[] = {{emulated::shared_number(&there[0]), emulated::shared_number(&there[1])}};
  int* rows = out + 100;
  if (threadIdx.x == 0) {{
    for (int i = 0; i < 20; ++i) rows[i] = i;
    emulated::init_barrier(barrier[0], 1), emulated::init_barrier(barrier[1], 1);
  }}
  __syncthreads();
  auto fetch = [&](int row) {{
    if (threadIdx.x != 0 || row >= 5) return;
    emulated::expect_bytes(barrier[row % 2], 16);
    emulated::copy_bulk(at[row % 2], rows + 4 * row, 16, barrier[row % 2]);
  }};
  fetch(0), fetch(1);
  for (int row = 0; row < 5; ++row) {{
    const int s = row % 2;
    {wait}
    out[4 * row + threadIdx.x] = stage[s][threadIdx.x];
    {barrier}
    fetch(row + 2);
  }}
}}
"""
THERE = "while (!emulated::is_passed(barrier[s], row / 2 % 2)) {}"


def test_rows_come_by_the_copy_engine(tmp_path: Path) -> None:
    kernel = PIPELINE.format(wait=THERE, barrier="__syncthreads();")
    assert of_launches(tmp_path, kernel, plainly(1, 4), 20) == [list(range(20))] * 4


@pytest.mark.parametrize(
    ("wait", "barrier"),
    [("", "__syncthreads();"), (THERE, ""), (THERE.replace("row / 2 % 2", "0"), "__syncthreads();")],
    ids=["nobody waits", "memory is filled while it is read", "a phase that is over"],
)
def test_what_is_wrong_with_copies_shows_in_some_launch(wait: str, barrier: str, tmp_path: Path) -> None:
    ended = outcome(tmp_path, PIPELINE.format(wait=wait, barrier=barrier), plainly(1, 4), 4)
    words = ended.stdout.split()
    found = [[int(word) for word in words[1000 * number :][:20]] for number in range(4)]
    assert ended.returncode != 0 or found != [list(range(20))] * 4


STORED = """
__global__ void kernel(int* out) {{
  __shared__ alignas(16) int row[4];
  if (threadIdx.x != 0) return;
  for (int i = 0; i < 4; ++i) row[i] = i;
  emulated::store_bulk(out, emulated::shared_number(row), 16);
  {first}
  row[0] = 9;
  emulated::store_bulk(out + 4, emulated::shared_number(row), 16);
  {last}
}}
"""


def test_rows_go_by_the_copy_engine_when_they_are_waited_for(tmp_path: Path) -> None:
    wait = "emulated::wait_for_stores(0);"
    right = [0, 1, 2, 3, 9, 1, 2, 3]
    assert of_launches(tmp_path, STORED.format(first=wait, last=wait), plainly(1, 2), 8) == [right] * 4
    overwritten = of_launches(tmp_path, STORED.format(first="", last=wait), plainly(1, 2), 8)
    assert right in overwritten
    assert [9, *right[1:]] in overwritten
    assert "ends before its stores have left" in told(tmp_path, STORED.format(first=wait, last=""), plainly(1, 2))


def test_the_copy_engine_moves_multiples_of_16_bytes(tmp_path: Path) -> None:
    kernel = STORED.format(first="emulated::store_bulk(out + 1, emulated::shared_number(row), 16);", last="")
    assert "multiples of 16 bytes" in told(tmp_path, kernel, plainly(1, 1), 1)


def test_groups_of_copies_are_there_when_they_are_waited_for(tmp_path: Path) -> None:
    """Those of sm_80, of which each thread makes its own."""
    kernel = """
    __global__ void kernel(int* out) {
      __shared__ alignas(16) int row[2][4];
      for (int i = 0; i < 8; ++i) out[100 + i] = i;
      for (int s = 0; s < 2; ++s) {
        emulated::copy_async(emulated::shared_number(row[s]), out + 100 + 4 * s);
        emulated::commit_copies();
      }
      for (int s = 0; s < 2; ++s) {
        emulated::wait_for_copies(1 - s);
        out[s] = row[s][3];
        out[2 + s] = s == 0 ? row[1][3] : 0;
      }
    }
    """
    found = of_launches(tmp_path, kernel, plainly(1, 1), 3)
    assert {tuple(one[:2]) for one in found} == {(3, 7)}
    assert {one[2] for one in found} == {7, -1}


def test_ptx_is_put_into_cpp_with_its_operands() -> None:
    text = 'asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(v[0]), "=r"(v[f(1)]) : "l"(from) : "memory");'
    assert emulated.in_cpp(text) == "emulated::load_words<2>(emulated::number((from)), (v[0]), (v[f(1)]));"
    assert emulated.in_cpp('asm volatile("" : "+r"(x));') == "(void)0;"
    assert "is_missing" in emulated.in_cpp('asm("mov.u32 %0, 1;" : "=r"(x));')
