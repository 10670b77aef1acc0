"""DTensors, as FSDP2 makes of parameters: AdamW and the norm of two ranks are those of one, and other ops say no.

Two processes on this CPU, which gloo connects, do what is asked here one after another; each looks at its own results.
With --emulated they run kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from fuselm import ops
from fuselm.kernels.spec import RefusedInput
from fuselm.kernels.torch_ops.distributed import any_distributed
from fuselm.optim import AdamW, clip_scale, global_norm

RANKS = 2
TASKS: list[Callable[[Any], None]] = []


@pytest.mark.filterwarnings("default")
def test_two_ranks_do_what_one_does(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    given = (str(tmp_path / "meeting"), request.config.getoption("--emulated"))
    torch.multiprocessing.start_processes(run_tasks, given, nprocs=RANKS, start_method="spawn")


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
def test_kernels_step_what_a_rank_has(cuda: str, tmp_path: Path) -> None:
    torch.multiprocessing.start_processes(run_on_gpu, (str(tmp_path / "meeting"),), nprocs=1, start_method="spawn")


def run_on_gpu(rank: int, meeting: str) -> None:
    """One rank has all there is: as bits, what the whole comes to."""
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", init_method=f"file://{meeting}", rank=0, world_size=1)
    mesh = init_device_mesh("cuda", (1,))
    for dtype, masters in ((torch.float32, False), (torch.bfloat16, True)):
        learners = [model(dtype).cuda() for _ in range(2)]
        fully_shard(learners[0], mesh=mesh)
        for learner in learners:
            torch.manual_seed(3)
            for p in learner.parameters():
                grad = torch.randn(p.shape, device="cuda", dtype=dtype)
                p.grad = distribute_tensor(grad, mesh, p.placements) if isinstance(p, DTensor) else grad
            clip_in_the_step(learner, AdamW(learner.parameters(), lr=0.01, impl="fused", master_weights=masters))
        for mine, its in zip(*(learner.parameters() for learner in learners), strict=True):
            assert isinstance(mine, DTensor)
            assert torch.equal(mine.to_local(), its.detach())
    dist.destroy_process_group()


def run_tasks(rank: int, meeting: str, emulated: bool) -> None:
    torch.set_num_threads(1)
    if emulated:
        from tests.kernels import emulated as gpu

        gpu.load()
        gpu.use("small")
        facts = SimpleNamespace(multi_processor_count=gpu.MULTIPROCESSORS["small"])
        torch.cuda.get_device_properties = lambda device: facts  # type: ignore[assignment]
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    for task in TASKS:
        torch.manual_seed(0)
        task(mesh)
    dist.destroy_process_group()


def task(function: Callable[[Any], None]) -> Callable[[Any], None]:
    TASKS.append(function)
    return function


# ---- what the ranks do ----------------------------------------------------------------------------------------------


def model(dtype: torch.dtype) -> nn.Module:
    """Its second layer has more rows than two ranks can share alike, its last one fewer."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 5), nn.Linear(5, 1)).to(dtype)


def train(learner: nn.Module, optimizer: Any, own: slice, clip: Callable[[Any, Any], None]) -> nn.Module:
    generator = torch.Generator().manual_seed(2)
    for _ in range(4):
        x = torch.randn(4, 8, generator=generator)[own].to(next(learner.parameters()).dtype)
        optimizer.zero_grad()
        learner(x).float().square().mean().backward()
        clip(learner, optimizer)
    return learner


def clip_as_torch(learner: nn.Module, optimizer: Any) -> None:
    nn.utils.clip_grad_norm_(learner.parameters(), 0.1)
    optimizer.step()


def clip_in_the_step(learner: nn.Module, optimizer: Any) -> None:
    norm = global_norm([p.grad for p in learner.parameters() if p.grad is not None])
    assert type(norm) is torch.Tensor
    optimizer.step(grad_scale=clip_scale(norm, 0.1))


@task
def fsdp2_trains_as_one_process_does(mesh: Any) -> None:
    right = model(torch.float32)
    train(right, torch.optim.AdamW(right.parameters(), lr=0.01), slice(None), clip_as_torch)
    for impl in ("auto", "torch"):
        sharded = model(torch.float32)
        fully_shard(sharded, mesh=mesh)
        optimizer = AdamW(sharded.parameters(), lr=0.01, impl=impl)
        train(sharded, optimizer, slice(2 * mesh.get_rank(), 2 * mesh.get_rank() + 2), clip_in_the_step)
        for mine, its in zip(sharded.parameters(), right.parameters(), strict=True):
            assert isinstance(mine, DTensor)
            torch.testing.assert_close(mine.full_tensor(), its.detach(), rtol=1e-4, atol=1e-5)
            assert isinstance(optimizer.state[mine]["exp_avg"], DTensor)


@task
def masters_of_16_bit_shards_are_those_of_the_whole(mesh: Any) -> None:
    whole, sharded = model(torch.bfloat16), model(torch.bfloat16)
    fully_shard(sharded, mesh=mesh)
    optimizers = [AdamW(one.parameters(), lr=0.01, master_weights=True) for one in (whole, sharded)]
    for mine, its in zip(sharded.parameters(), whole.parameters(), strict=True):
        its.grad = torch.randn_like(its)
        mine.grad = distribute_tensor(its.grad, mesh, mine.placements)
    for optimizer in optimizers:
        optimizer.step()
    states = [[optimizer.state[p] for p in optimizer.param_groups[0]["params"]] for optimizer in optimizers]
    for right, found in zip(*states, strict=True):
        assert torch.equal(found["master"].full_tensor(), right["master"])


def spread(*placements: Any, mesh: Any) -> list[Any]:
    return [distribute_tensor(torch.zeros(6, 4), mesh, [place]) for place in placements]


@task
def gradients_come_to_lie_as_their_parameters(mesh: Any) -> None:
    grad = torch.randn(6, 4)
    shares = DTensor.from_local(grad / RANKS, mesh, [Partial()])  # of each element on each rank, still to be added up
    params = spread(Shard(0), Replicate(), Shard(1), Shard(0), mesh=mesh)
    grads = [shares, shares, distribute_tensor(grad, mesh, [Shard(0)]), distribute_tensor(grad, mesh, [Replicate()])]
    params, grads = [*params, torch.zeros(6, 4)], [*grads, shares]
    averages, squares = ([torch.zeros_like(param) for param in params] for _ in range(2))
    scale = DTensor.from_local(torch.tensor(0.5), mesh, [Partial()])  # 1, on two ranks
    versions = [param._version for param in params]
    ops.adamw(params, grads, averages, squares, step=1, lr=0.1, grad_scale=scale)
    right = [torch.zeros(6, 4) for _ in range(3)]
    ops.adamw(*([tensor] for tensor in (right[0], grad, *right[1:])), step=1, lr=0.1)
    for param, version in zip(params, versions, strict=True):
        torch.testing.assert_close(param.full_tensor() if isinstance(param, DTensor) else param, right[0])
        assert param._version > version  # who kept it for a backward hears of it


@task
def what_lies_here_whole_is_clipped_by_a_norm_of_all_ranks(mesh: Any) -> None:
    """As where FSDP2 leaves some parameters alone, and torch's get_total_norm is of all."""
    scale = DTensor.from_local(torch.tensor(0.25), mesh, [Partial()])  # 0.5, on two ranks
    never = distribute_tensor(torch.tensor(False), mesh, [Replicate()])
    for step in (ops.adamw, ops.choose("torch").adamw):
        lists, right = ([[torch.full((3,), float(x))] for x in (0, 2, 0, 0)] for _ in range(2))
        step(*lists, step=1, lr=0.1, grad_scale=scale, skip=never)
        step(*right, step=1, lr=0.1, grad_scale=torch.tensor(0.5))
        assert torch.equal(lists[2][0], right[2][0])


@task
def a_norm_is_that_of_all_elements_once(mesh: Any) -> None:
    x, plain = torch.randn(5, 3), torch.randn(7)
    spread = [distribute_tensor(x, mesh, [place]) for place in (Shard(0), Shard(1), Replicate())]
    shares = DTensor.from_local(x / RANKS, mesh, [Partial()])
    for tensors, parts in ((spread, [x] * 3), ([plain, shares], [plain, x]), ([spread[0], plain], [x, plain])):
        for norm in (ops.global_norm, ops.choose("torch").global_norm):
            found = norm(tensors)
            assert type(found) is torch.Tensor
            assert found.dtype == torch.float32
            torch.testing.assert_close(found, torch.cat([part.flatten() for part in parts]).norm())


@task
def a_norm_of_shards_asks_for_one_sum(mesh: Any) -> None:
    shards, inner = spread(Shard(0), Shard(0), Shard(0), mesh=mesh), DTensor.redistribute
    asked: list[Any] = []

    def counted(tensor: Any, *given: Any, **options: Any) -> Any:
        asked.append(tensor)
        return inner(tensor, *given, **options)

    DTensor.redistribute = counted  # type: ignore[method-assign]
    try:
        ops.global_norm(shards)
    finally:
        DTensor.redistribute = inner  # type: ignore[method-assign]
    assert len(asked) == 1


@task
def what_is_made_of_a_dtensor_is_one(mesh: Any) -> None:
    class Own(DTensor):
        __slots__ = ()

    (x,) = spread(Shard(0), mesh=mesh)
    x.__class__ = Own
    assert any_distributed([torch.zeros(1), x])


@task
def what_is_written_over_must_be_spread_alike(mesh: Any) -> None:
    param, average, square = spread(Shard(0), Shard(1), Shard(0), mesh=mesh)
    for averages in ([average], [torch.zeros(6, 4)]):
        with pytest.raises(
            RefusedInput, match=r"exp_avgs must be spread over ranks .* got exp_avgs\[0\] spread otherw"
        ):
            ops.adamw([param], [param], averages, [square], step=1, lr=0.1)
    with pytest.raises(RefusedInput, match="four lists must have one length"):
        ops.adamw([param], [param, param], [square], [square], step=1, lr=0.1)


@task
def other_ops_say_that_they_take_no_dtensors(mesh: Any) -> None:
    (x,) = spread(Shard(0), mesh=mesh)
    ids = distribute_tensor(torch.zeros(4, dtype=torch.long), mesh, [Shard(0)])
    weight = torch.ones(4)
    calls: list[Callable[[], Any]] = [
        *(lambda op=op: getattr(ops, op)(x) for op in ("gelu", "silu", "relu2", "swiglu", "geglu", "softmax")),  # type: ignore[misc]
        *(lambda op=op: getattr(ops, op)(x, x) for op in ("add", "mul")),  # type: ignore[misc]
        lambda: ops.gelu(x.clone().requires_grad_()),
        lambda: ops.rms_norm(x, weight),
        lambda: ops.layer_norm(x, weight, weight),
        lambda: ops.embedding(ids, x),
        lambda: ops.cross_entropy(x, torch.zeros(6, dtype=torch.long)),
    ]
    for call in calls:
        with pytest.raises(
            RefusedInput, match=r"must be a tensor that lies here whole; got a DTensor. Pass .*to_local"
        ):
            call()
