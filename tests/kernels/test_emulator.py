"""The emulator that runs kernels on a CPU: threads, what they wait for, launches, and PTX in C++."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.kernels import emulated

# Launches a kernel and prints what it has left in memory.
PROGRAM = """
#include <cuda_runtime.h>
#include <cstdio>
{kernel}
int main() {{
  int out[1000] = {{}};
  kernel<<<dim3({blocks}), dim3({threads})>>>(out);
  for (int one : out) std::printf("%d ", one);
  return cudaGetLastError() == cudaSuccess ? 0 : 3;
}}
"""


def outcome(folder: Path, kernel: str, threads: str, blocks: str = "1") -> subprocess.CompletedProcess[str]:
    """How a program ends that launches a kernel."""
    source, program = folder / "program.cpp", folder / "program"
    source.write_text(emulated.in_cpp(PROGRAM.format(kernel=kernel, threads=threads, blocks=blocks)))
    units = (str(emulated.EMULATOR / "fibers.cpp"), str(source))
    flags = ("-std=c++20", "-w", f"-I{emulated.EMULATOR}")
    subprocess.run(("g++", *flags, *units, "-o", str(program)), check=True)
    return subprocess.run((str(program),), capture_output=True, text=True, check=False)


def numbers(folder: Path, kernel: str, threads: int, blocks: int = 1) -> list[int]:
    """What a kernel leaves in memory, a number for each thread."""
    ended = outcome(folder, kernel, str(threads), str(blocks))
    assert ended.returncode == 0, ended.stderr
    return [int(word) for word in ended.stdout.split()[: threads * blocks]]


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
    ended = outcome(tmp_path, kernel, "2")
    assert ended.returncode < 0
    assert "wait for one another forever" in ended.stderr


def test_a_lane_that_is_not_in_its_own_mask_is_told(tmp_path: Path) -> None:
    kernel = "__global__ void kernel(int* out) { out[0] = __shfl_sync(0x2u, 5, 0); }"
    ended = outcome(tmp_path, kernel, "2")
    assert ended.returncode < 0
    assert "whose mask 00000002 it is not in" in ended.stderr


@pytest.mark.parametrize(("blocks", "threads"), [("0", "32"), ("1, 65536", "1"), ("1", "1025"), ("1", "0")])
def test_a_launch_that_a_gpu_refuses_is_refused(tmp_path: Path, blocks: str, threads: str) -> None:
    kernel = "__global__ void kernel(int* out) { out[0] = 1; }"
    assert outcome(tmp_path, kernel, threads, blocks).returncode == 3


def test_ptx_is_put_into_cpp_with_its_operands() -> None:
    text = 'asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(v[0]), "=r"(v[f(1)]) : "l"(from) : "memory");'
    assert emulated.in_cpp(text) == "emulated::load_words<2>(emulated::number((from)), (v[0]), (v[f(1)]));"
    assert emulated.in_cpp('asm volatile("" : "+r"(x));') == "(void)0;"
    assert "is_missing" in emulated.in_cpp('asm("mov.u32 %0, 1;" : "=r"(x));')
