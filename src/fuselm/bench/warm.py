"""Fills the disk caches of torch.compile and Triton beforehand, many processes at once, so that no bench need wait.

A case costs torch.compile about eight seconds and leaves the GPU idle meanwhile. Here every case of the bench is called
once in each of its passes by the implementations that compile, through the same passes.py and peers.py: the bench, run
afterwards on the same machine, then finds its code on disk. Times nothing and compares nothing. A case that fails is
told and left out; the bench will meet it again and note it.

    python -m fuselm.bench.warm --jobs 12                  # then: python -m fuselm.bench.record --part bench
    python -m fuselm.bench.warm --jobs 12 --rest           # then: python -m fuselm.bench.record --part bench --rest
    python -m fuselm.bench.warm --jobs 2 --device cpu --ops softmax
"""

from __future__ import annotations

import argparse
import fcntl
import gc
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fuselm.bench.processes import Job, run_all
from fuselm.kernels.spec import Case, OpSpec, ops

IMPLEMENTATIONS = ("compile", "liger", "quack")
SECONDS = 500
# Cases above this many bytes, or that multiply matrices and so keep more than the fewest bytes, wait for one another:
# twelve processes with five tensors of 2 GiB each would not fit on a GPU.
HEAVY_BYTES, HEAVY_FLOPS, HEAVY_AT_ONCE = 1 << 30, 10**12, 4

Step = tuple[OpSpec, Case, tuple[str, ...]]


def steps(names: Sequence[str], device: str, done: frozenset[str] = frozenset()) -> list[Step]:
    """Everything that is compiled: an op, a case and its passes, in the order in which the bench will want them.

    The bench leaves out the labels in `done`.
    """
    from fuselm.bench.kernels import Plan, in_turn

    wanted = list(in_turn(Plan(tuple(names), device, done=done)))
    cases = [(op, case, op.passes) for op, case in wanted if case is not None]
    small = [(op, case, ("forward",)) for op, latencies in wanted if latencies is None for case in op.decode_cases]
    return cases + (small if device == "cuda" else [])


def measured(folder: Path) -> frozenset[str]:
    """The labels of what the record of this GPU has of the sources here."""
    from fuselm.bench import machine, merging, owners

    gpu = machine.describe("cuda")["gpu"]
    record = merging.load(folder / f"{machine.slug(gpu)}.json")
    return merging.measured_labels(merging.still_true(record, gpu, owners.sources()))


def warm(step: Step, device: str) -> list[str]:
    """Call every implementation that compiles once in each pass; returns what went wrong, in words."""
    import torch

    from fuselm.bench import peers
    from fuselm.bench.passes import make_call
    from fuselm.bench.tensors import as_tuple, make_inputs

    op, case, passes = step
    tensors, wrong = make_inputs(op, case, device), []
    with torch.no_grad():
        outputs = as_tuple(peers.reference(op.name)(**tensors, **case.options)) if "backward" in passes else ()
    cotangents = [torch.ones_like(output) for output in outputs]
    for name, peer in peers.implementations(op.name, case, device, IMPLEMENTATIONS).items():
        for which in passes if peer.call is not None else ():
            if which not in peer.passes:
                continue
            try:
                with torch.set_grad_enabled(which != "forward"):
                    make_call(which, op, case, tensors, peer, cotangents)()
            except Exception as error:
                wrong.append(
                    f"{name} {which}: {type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"
                )
    return wrong


def is_heavy(step: Step) -> bool:
    """Whether a case must wait for its turn among those that need much of the GPU's memory."""
    op, case, passes = step
    costs = [op.cost(case, which) for which in passes]
    return any(cost.bytes > HEAVY_BYTES or cost.flops > HEAVY_FLOPS for cost in costs)


@contextmanager
def turn(folder: Path, places: int) -> Iterator[None]:
    """Hold one of some places that processes share; the system frees the place of a process that dies."""
    files = [(folder / f"place-{place}").open("w") for place in range(places)]
    try:
        while not any(_lock(file.fileno()) for file in files):
            time.sleep(0.05)
        yield
    finally:
        for file in files:
            file.close()  # which unlocks it


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def work(
    names: Sequence[str], device: str, part: int, parts: int, locks: Path, done: frozenset[str] = frozenset()
) -> None:
    """One process's share of the steps: every `parts`-th."""
    import torch
    import torch._inductor.config

    from fuselm.bench import peers
    from fuselm.bench.kernels import case_label

    # Compiling here and not in a pool of its own: the processes side by side are the pool.
    torch._inductor.config.compile_threads = 1
    for step in steps(names, device, done)[part::parts]:
        began = time.monotonic()
        try:
            if is_heavy(step):
                with turn(locks, HEAVY_AT_ONCE):
                    wrong = warm(step, device)
                    _release(device)
            else:
                wrong = warm(step, device)
        except Exception as error:
            wrong = [f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"]
        _release(device)
        label = case_label(step[0].name, step[1])
        print(f"{time.monotonic() - began:5.1f} s  {label}", *(f"\n  failed: {words}" for words in wrong), flush=True)
    print("torch.compile:", peers.compile_cache())


def _sees_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _release(device: str) -> None:
    import torch

    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def main(arguments: Sequence[str] | None = None) -> None:
    """Start the processes, or be one of them; exit code 0 even when some case failed, for the bench goes on too."""
    parser = argparse.ArgumentParser(prog="python -m fuselm.bench.warm", description=__doc__.partition("\n")[0])
    parser.add_argument("--ops", default="", help="names separated by spaces or commas; all when empty")
    parser.add_argument("--jobs", type=int, default=12, help="processes side by side")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--seconds", type=float, default=SECONDS, help="after which what is left is not compiled")
    parser.add_argument("--rest", action="store_true", help="only what the record of this GPU lacks")
    parser.add_argument("--folder", type=Path, default=Path("gpu"), help="where records are kept")
    parser.add_argument("--part", type=int, help="be the process that does this part of the cases, counted from 0")
    parser.add_argument("--locks", type=Path, help="with --part: a folder that the processes share")
    given = parser.parse_args(arguments)
    known = list(ops())
    names = given.ops.replace(",", " ").split() or known
    if unknown := [name for name in names if name not in known]:
        parser.error(f"there is no op {unknown[0]!r}; there are: {', '.join(known)}")
    if given.jobs < 1:
        parser.error(f"--jobs is how many processes there are, at least 1; got {given.jobs}")
    if given.rest and given.device != "cuda":
        parser.error("--rest is of a GPU's record; a CPU has none: leave it out")
    if given.device == "cuda" and not _sees_cuda():
        parser.error("--device cuda needs a GPU, and torch sees none; pass --device cpu to compile for this machine")
    done = measured(given.folder) if given.rest else frozenset()
    if given.part is not None:
        work(names, given.device, given.part, given.jobs, given.locks, done)
        return
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as locks:
        again = [sys.executable, "-m", "fuselm.bench.warm", "--ops", " ".join(names), "--jobs", str(given.jobs)]
        again += ["--device", given.device, "--locks", locks, "--folder", str(given.folder)]
        again += ["--rest"] * given.rest
        jobs = {
            f"part {part}": Job([*again, "--part", str(part)], {"OMP_NUM_THREADS": "1"}) for part in range(given.jobs)
        }
        ended = run_all(jobs, began + given.seconds, at_once=given.jobs)
    failed = sum(result.code != 0 for result in ended.values())
    count = len(steps(names, given.device, done))
    took = time.monotonic() - began
    print(f"{count} cases in {given.jobs} processes, of which {failed} ended early, in {took:.0f} s")


if __name__ == "__main__":
    main()
