"""Steps as CUDA graphs, with a host in the graph's place: what is copied where, what stays, and what is refused.

That a real graph gives these bits is tests/torchlm/test_train_gpu.py's.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fuselm import cost
from fuselm.config import ModelConfig, TrainConfig
from fuselm.torchlm import graph, memory
from fuselm.torchlm.checks import check_run
from fuselm.torchlm.graph import GraphedGradients, record
from fuselm.torchlm.model import Transformer
from fuselm.torchlm.step import Sums, gradients
from fuselm.torchlm.train import Interrupted, Trainer
from tests.torchlm.runs import (
    MODEL,
    MOE,
    Records,
    assert_same_arrays,
    assert_same_state,
    begin,
    bend_loss,
    prepared,
    stop_after,
)
from tests.torchlm.test_step import batch, model, same_bits


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared(tmp_path_factory.mktemp("data"))


def played_by_the_host(work: Callable[[], Sums], parameters: Sequence[Tensor]) -> tuple[Sums, Callable[[], None]]:
    """A recording as a graph keeps it: each replay writes over what the recording made, in its place."""
    state = torch.get_rng_state()
    sums = work()
    torch.set_rng_state(state)
    grads = [parameter.grad for parameter in parameters]

    def replay() -> None:
        kept = [parameter.grad for parameter in parameters]
        again = work()
        for there, new in zip(sums, again, strict=True):
            there.copy_(new)
        for parameter, grad in zip(parameters, grads, strict=True):
            assert (grad is None) == (parameter.grad is None)
            if grad is not None and parameter.grad is not None:
                grad.copy_(parameter.grad)
        for parameter, was in zip(parameters, kept, strict=True):  # a graph writes memory, and sets no attribute
            parameter.grad = was

    return sums, replay


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Graphs on a CPU; the list has an entry for each recording."""
    recordings: list[int] = []

    def counted(work: Callable[[], Sums], parameters: Sequence[Tensor]) -> tuple[Sums, Callable[[], None]]:
        recordings.append(1)
        return played_by_the_host(work, parameters)

    monkeypatch.setattr(graph, "record", counted)
    monkeypatch.setattr(graph, "has_graphs", lambda device: True)
    return recordings


def trained(folder: Path, data: Path, model: dict[str, Any], **options: Any) -> tuple[Trainer, Records]:
    trainer, records = begin(folder, data, model=model, train=options)
    trainer.train()
    return trainer, records


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ({}, {}),
        ({"dropout": 0.2}, {"micro_batch": 2}),
        (MOE, {"micro_batch": 1, "clip": 0.0}),
        ({"norm": "layer", "positions": "learned", "bias": True, "tied": True}, {}),
    ],
    ids=["plain", "parts-and-dropout", "experts", "learned-and-tied"],
)
def test_a_graphed_run_is_the_eager_run_to_the_bit(
    model: dict[str, Any], options: dict[str, Any], data: Path, tmp_path: Path, host: list[int]
) -> None:
    eager, told = trained(tmp_path / "eager", data, model, cuda_graph=False, **options)
    assert (host, eager.is_graphed) == ([], False)
    graphed, also_told = trained(tmp_path / "graphed", data, model, cuda_graph=True, **options)
    assert (host, graphed.is_graphed) == ([1], True)
    assert_same_state(graphed.run, eager.run)
    losses = [[record["loss"] for record in records if "loss" in record] for records in (told, also_told)]
    assert losses[0] == losses[1]


def test_a_graphed_run_that_was_stopped_goes_on_to_the_same_bits(data: Path, tmp_path: Path, host: list[int]) -> None:
    whole, _ = trained(tmp_path / "whole", data, {"dropout": 0.2}, cuda_graph=True)
    first, _ = begin(tmp_path / "parts", data, model={"dropout": 0.2}, train={"cuda_graph": True})
    stop_after(first, 5)
    with pytest.raises(Interrupted):
        first.train()
    second, _ = trained(tmp_path / "parts", data, {"dropout": 0.2}, cuda_graph=True)
    assert len(host) == 3
    assert_same_state(second.run, whole.run)


def test_a_step_that_must_not_be_made_leaves_no_trace_with_graphs_either(
    data: Path, tmp_path: Path, host: list[int]
) -> None:
    trainer, records = begin(tmp_path / "run", data, train={"cuda_graph": True})
    for _ in range(2):
        trainer.advance()
    before = [parameter.detach().clone() for parameter in trainer.parameters]
    with torch.no_grad():  # a NaN that is there for one step
        weight = trainer.model.norm.weight
        kept, weight[0] = weight[0].clone(), float("nan")
    trainer.advance()
    trainer._settle()
    with torch.no_grad():
        weight[0] = kept
    assert same_bits([parameter.detach() for parameter in trainer.parameters], before)
    assert [record["kind"] for record in records] == ["skip"]
    trainer.advance()
    trainer._settle()
    assert (trainer.progress.updates, host) == (3, [1])


def parts_of(rows: int) -> Iterator[tuple[Tensor, Tensor]]:
    inputs, targets = batch()
    return zip(inputs.split(rows), targets.split(rows), strict=True)


def test_each_call_has_its_own_batch_and_its_own_scale(host: list[int]) -> None:
    ours, theirs = model(), model()
    graphed = GraphedGradients(ours.loss, list(ours.parameters()), parts=2)
    other = [(inputs.flip(0), targets.flip(1)) for inputs, targets in parts_of(2)]
    for batches, scale in ((list(parts_of(2)), 1.0), (other, 4096.0), (list(parts_of(2)), 64.0)):
        found = graphed(batches, scale)
        expected = gradients(theirs.loss, list(theirs.parameters()), batches, parts=2, scale=scale)
        assert found.outcome() == expected.outcome()
        grads = [[p.grad for p in one.parameters() if p.grad is not None] for one in (ours, theirs)]
        assert same_bits(*grads)
        assert not bool(found.is_bad(10.0))
    assert host == [1]


def test_another_number_of_parts_is_no_step_of_this_graph(host: list[int]) -> None:
    one = model()
    graphed = GraphedGradients(one.loss, list(one.parameters()), parts=2)
    graphed(parts_of(2))
    with pytest.raises(ValueError, match="zip"):
        graphed(parts_of(1))


# --- where nobody asks -----------------------------------------------------------------------------------------------


def test_a_step_that_can_be_a_graph_is_one_where_nobody_says(data: Path, tmp_path: Path, host: list[int]) -> None:
    eager, _ = trained(tmp_path / "eager", data, {}, cuda_graph=False)
    graphed, _ = trained(tmp_path / "graphed", data, {})
    assert (host, graphed.is_graphed) == ([1], True)
    assert_same_arrays(graphed.run.load("last").weights, eager.run.load("last").weights)


def test_on_a_cpu_steps_are_launched_one_by_one_where_nobody_says(data: Path, tmp_path: Path) -> None:
    assert not trained(tmp_path / "run", data, {})[0].is_graphed


@pytest.mark.parametrize("where", ["module", "output", "parameter", "accumulated"])
def test_hooks_are_called_at_each_step_where_nobody_says(
    where: str, data: Path, tmp_path: Path, host: list[int]
) -> None:
    trainer, _ = begin(tmp_path / "run", data)
    called: list[int] = []
    norm = trainer.model.norm
    hang: dict[str, Callable[[Any], Any]] = {
        "module": norm.register_forward_hook,
        "output": norm.register_full_backward_hook,
        "parameter": norm.weight.register_hook,
        "accumulated": norm.weight.register_post_accumulate_grad_hook,
    }
    hang[where](lambda *given: called.append(1))
    for _ in range(3):
        trainer.advance()
    assert (len(called), host) == (3, [])


Change = Callable[[Trainer, list[int]], contextlib.AbstractContextManager[Any]]


def hook_a_module(trainer: Trainer, called: list[int]) -> Any:
    return trainer.model.norm.register_forward_hook(lambda *given: called.append(1))


def hook_all_modules(trainer: Trainer, called: list[int]) -> Any:
    def hook(module: torch.nn.Module, *given: Any) -> None:
        called.extend([1] * (module is trainer.model.norm))

    return torch.nn.modules.module.register_module_forward_hook(hook)


def replace_the_loss(trainer: Trainer, called: list[int]) -> Any:
    def bend(step: int, value: Tensor) -> Tensor:
        called.append(step)
        return value

    bend_loss(trainer, bend)
    return contextlib.nullcontext()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("change", [hook_a_module, hook_all_modules, replace_the_loss])
def test_what_python_does_in_a_step_it_does_in_each_where_nobody_says(
    late: bool, change: Change, data: Path, tmp_path: Path, host: list[int]
) -> None:
    trainer, _ = begin(tmp_path / "run", data)
    if late:
        trainer.advance()
    called: list[int] = []
    with change(trainer, called):
        for _ in range(3):
            trainer.advance()
    assert (len(called), len(host), trainer.is_graphed) == (3, late, False)


@pytest.mark.filterwarnings("default")  # the compiler's own deprecations
def test_a_compiled_loss_of_the_model_is_its_own() -> None:
    one, other = model(), model()
    assert graph.Watch(one).sees_nothing(torch.compile(one.loss, dynamic=False))
    assert not graph.Watch(one).sees_nothing(torch.compile(other.loss, dynamic=False))


def test_a_parameter_that_is_frozen_learns_no_more_where_nobody_says(
    data: Path, tmp_path: Path, host: list[int]
) -> None:
    trainer, _ = begin(tmp_path / "run", data)
    trainer.advance()
    weight = trainer.model.norm.weight.requires_grad_(False)
    before = weight.clone()
    trainer.advance()
    assert torch.equal(weight, before)


def test_a_graph_that_would_keep_much_of_the_memory_is_none(
    data: Path, tmp_path: Path, host: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, _ = begin(tmp_path / "run", data)
    need = cost.activation_bytes(trainer.run.model, 4, trainer.run.model.context, 4, cost.LOGITS_BYTES)
    to_come = 3 * cost.weight_bytes(trainer.run.model)  # gradients and two averages
    monkeypatch.setattr(memory, "free_bytes", lambda device: 4 * need + to_come - 4)
    trainer.advance()
    assert host == []
    other, _ = begin(tmp_path / "other", data)
    monkeypatch.setattr(memory, "free_bytes", lambda device: 4 * need + to_come)
    other.advance()
    assert host == [1]


@pytest.mark.parametrize(
    ("dtype", "capability", "waits"),
    [(torch.bfloat16, (9, 0), False), (torch.bfloat16, (8, 9), True), (torch.float16, (9, 0), True)],
)
def test_experts_that_ask_the_gpu_are_not_recorded(
    dtype: torch.dtype, capability: tuple[int, int], waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    device = torch.device("cuda")
    for changes, fixed in ((MOE, not waits), ({}, True)):
        config = ModelConfig(**{"vocab_size": 40, **MODEL, **changes})
        assert graph.is_fixed(Transformer(config, dtype=dtype), device) is fixed


def too_much(work: Callable[[], Sums], parameters: Sequence[Tensor]) -> Any:
    work()
    raise torch.OutOfMemoryError("out of memory")


@pytest.mark.parametrize("fails", ["waits", "memory"])
def test_where_nobody_says_a_step_that_cannot_be_recorded_is_made_without_a_word(
    fails: str, data: Path, tmp_path: Path, host: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    eager, _ = trained(tmp_path / "eager", data, {"dropout": 0.2}, cuda_graph=False)
    monkeypatch.setattr(graph, "record", {"waits": kept_random(cannot), "memory": kept_random(too_much)}[fails])
    run, _ = trained(tmp_path / "run", data, {"dropout": 0.2})
    assert not run.is_graphed
    assert_same_arrays(run.run.load("last").weights, eager.run.load("last").weights)


# --- refusals --------------------------------------------------------------------------------------------------------


def test_a_cpu_has_no_graphs_and_that_is_said_before_anything_is_made(data: Path, tmp_path: Path) -> None:
    words = r"A CUDA graph is of a GPU's work; the device is cpu. Leave --cuda-graph out."
    with pytest.raises(ValueError, match=words):
        begin(tmp_path / "run", data, train={"cuda_graph": True})
    trainer, _ = begin(tmp_path / "eager", data)
    with pytest.raises(ValueError, match=words):
        check_run(trainer.run.model, TrainConfig(cuda_graph=True), trainer.shards, "cpu")


def test_a_run_begun_with_graphs_goes_on_without_where_there_are_none(
    data: Path, tmp_path: Path, host: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, _ = trained(tmp_path / "whole", data, {"dropout": 0.2}, cuda_graph=True)
    first, _ = begin(tmp_path / "parts", data, model={"dropout": 0.2}, train={"cuda_graph": True})
    stop_after(first, 5)
    with pytest.raises(Interrupted):
        first.train()
    recorded = len(host)
    monkeypatch.undo()
    second, _ = trained(tmp_path / "parts", data, {"dropout": 0.2}, cuda_graph=True)
    assert len(host) == recorded
    assert_same_state(second.run, whole.run)


def kept_random(recording: Callable[..., Any]) -> Callable[..., Any]:
    """A recording that fails, and uses up no random number."""

    def record(*given: Any) -> Any:
        state = torch.get_rng_state()
        try:
            return recording(*given)
        finally:
            torch.set_rng_state(state)

    return record


def cannot(work: Callable[[], Sums], parameters: Sequence[Tensor]) -> Any:
    work()  # as a warm-up does: gradients are there
    raise graph.NotRecordable("this one cannot be recorded.")


def test_a_run_begun_with_graphs_goes_on_without_where_its_step_cannot_be_recorded(
    data: Path, tmp_path: Path, host: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, _ = trained(tmp_path / "whole", data, {}, cuda_graph=True, micro_batch=2)
    first, _ = begin(tmp_path / "parts", data, train={"cuda_graph": True, "micro_batch": 2})
    stop_after(first, 5)
    with pytest.raises(Interrupted):
        first.train()
    monkeypatch.setattr(graph, "record", cannot)
    with pytest.warns(RuntimeWarning, match=r"cannot be recorded\. This run goes on without one\.") as told:
        second, _ = trained(tmp_path / "parts", data, {}, cuda_graph=True, micro_batch=2)
    assert len(told) == 1
    assert_same_state(second.run, whole.run)


def test_a_run_that_begins_with_a_step_that_cannot_be_recorded_is_refused(
    data: Path, tmp_path: Path, host: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph, "record", cannot)
    with pytest.raises(graph.NotRecordable):
        trained(tmp_path / "run", data, {}, cuda_graph=True)


def test_a_graph_that_was_asked_for_and_does_not_fit_is_no_reason_to_go_on_without(
    data: Path, tmp_path: Path, host: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph, "record", too_much)
    with pytest.raises(torch.OutOfMemoryError):
        trained(tmp_path / "run", data, {}, cuda_graph=True)


def test_a_gradient_that_somebody_took_away_is_missed_at_once(host: list[int]) -> None:
    one = model()
    graphed = GraphedGradients(one.loss, list(one.parameters()), parts=2)
    graphed(parts_of(2))
    one.norm.weight.grad = None
    with pytest.raises(AssertionError):
        graphed(parts_of(2))


# --- recording -------------------------------------------------------------------------------------------------------


class FakeCuda:
    """torch's parts around a recording, each of which says that it was called; `trouble` happens when it ends."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.said: list[str] = []
        self.trouble: Exception | None = None
        said = self.said

        class Stream:
            def __init__(self, device: Any = None) -> None:
                pass

            def wait_stream(self, other: Any) -> None:
                said.append("wait")

        class Graph:
            def replay(self) -> None:
                said.append("replay")

        class Recording:
            def __init__(self, graph: Any, pool: str, stream: Any) -> None:
                assert pool == "a pool"

            def __enter__(self) -> None:
                said.append("recording")
                assert not gc.isenabled()

            def __exit__(recording, *about: Any) -> None:
                if self.trouble is not None:
                    raise self.trouble
                said.append("recorded")

        class Generator:
            def clone_state(self) -> str:
                return "a copy"

            def graphsafe_set_state(self, state: str) -> None:
                said.append(f"random numbers from {state}")

        for name, fake in {
            "Stream": Stream,
            "current_stream": Stream,
            "stream": lambda stream: contextlib.nullcontext(),
            "set_stream": lambda stream: said.append("back"),
            "CUDAGraph": Graph,
            "graph": Recording,
            "get_rng_state": lambda device: "as it was",
            "set_rng_state": lambda state, device: said.append(f"random numbers {state}"),
            "default_generators": {1: Generator()},
            "current_device": lambda: 1,
            "graph_pool_handle": lambda: "a pool",
            "empty_cache": lambda: said.append("memory given back"),
        }.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr(torch, "__version__", (2, 12))  # what older releases need has a test of its own
        for name in ("endAllocateToPool", "releasePool"):
            say = partial(lambda name, index, pool: said.append(f"{name} {index} {pool}"), name)
            monkeypatch.setattr(torch._C, f"_cuda_{name}", say, raising=False)


def test_what_warms_up_uses_no_random_number_and_leaves_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, parameter = FakeCuda(monkeypatch), torch.ones(2, requires_grad=True)

    def work() -> Sums:
        cuda.said.append("work" if parameter.grad is None else "work over a gradient")
        parameter.grad = torch.ones(2)
        return Sums(*torch.zeros(3))

    _, replay = record(work, [parameter])
    replay()
    warm = ["work", *["work over a gradient"] * (graph.WARM_UPS - 1)]
    expected = ["wait", *warm, "wait", "random numbers as it was", "recording", "work", "recorded", "replay"]
    assert cuda.said == expected


def test_what_is_out_of_memory_as_it_warms_up_uses_no_random_number(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)

    def work() -> Sums:
        raise FULL

    with pytest.raises(torch.OutOfMemoryError):
        record(work, [torch.ones(2, requires_grad=True)])
    assert cuda.said == ["wait", "random numbers as it was"]


WAITS = RuntimeError("CUDA error: operation not permitted when stream is capturing\nand advice")
FULL = torch.OutOfMemoryError("CUDA out of memory")


def failing_after_warm_up(error: Exception | None, made: list[int]) -> Callable[[], Sums]:
    def work() -> Sums:
        made[0] += 1
        if made[0] > graph.WARM_UPS and error is not None:
            raise error
        return Sums(*torch.zeros(3))

    return work


@pytest.mark.parametrize(
    ("inside", "outside", "kind", "says"),
    [
        (WAITS, None, ValueError, r"cannot be recorded \(CUDA error: .* capturing\)\. Train without a graph\."),
        (
            WAITS,
            RuntimeError("failed due to a previous error during capture"),
            ValueError,
            r"\(CUDA error: .* capturing",
        ),
        (None, RuntimeError("the graph is empty"), ValueError, r"cannot be recorded \(the graph is empty\)"),
        (FULL, None, torch.OutOfMemoryError, "out of memory"),
        (FULL, RuntimeError("failed due to a previous error"), torch.OutOfMemoryError, "out of memory"),
    ],
)
def test_a_step_that_cannot_be_recorded_is_refused_with_the_cause(
    inside: Exception | None, outside: Exception | None, kind: Any, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda, made = FakeCuda(monkeypatch), [0]
    cuda.trouble = outside
    with pytest.raises(kind, match=says):
        record(failing_after_warm_up(inside, made), [torch.ones(2, requires_grad=True)])
    assert cuda.said[-3:] == ["back", "random numbers from a copy", "memory given back"]
    assert gc.isenabled()


@pytest.mark.parametrize(("release", "ends"), [((2, 11), True), ((2, 12), False)])
@pytest.mark.parametrize("outside", [None, RuntimeError("failed due to a previous error during capture")])
def test_memory_that_a_recording_keeps_is_let_go_where_torch_does_not(
    release: tuple[int, int], ends: bool, outside: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda, made = FakeCuda(monkeypatch), [0]
    cuda.trouble = outside
    monkeypatch.setattr(torch, "__version__", release)
    with pytest.raises(ValueError, match="cannot be recorded"):
        record(failing_after_warm_up(WAITS, made), [torch.ones(2, requires_grad=True)])
    wanted = ["endAllocateToPool 1 a pool", "releasePool 1 a pool"] if ends and outside is not None else []
    assert [words for words in cuda.said if "a pool" in words] == wanted


def test_what_a_failed_step_was_made_of_is_gone_when_the_next_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its autograd graph takes part in the next, which torch warns of."""
    cuda, kept = FakeCuda(monkeypatch), list[Any]()
    cuda.trouble = RuntimeError("failed due to a previous error during capture")

    class Node:
        pass

    def work() -> Sums:
        node = Node()
        kept.append(weakref.ref(node))
        if len(kept) > graph.WARM_UPS:
            raise RuntimeError(*WAITS.args)
        return Sums(*torch.zeros(3))

    with pytest.raises(ValueError, match="cannot be recorded") as caught:
        record(work, [torch.ones(2, requires_grad=True)])
    assert caught.value.__cause__ is not None  # and with it the frames
    assert [node() for node in kept] == [None] * (graph.WARM_UPS + 1)


def test_the_first_error_is_told_when_a_gpu_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    cuda.trouble = RuntimeError("an illegal memory access")

    def lost() -> int:
        raise RuntimeError("and once more")

    monkeypatch.setattr(torch.cuda, "current_device", lost)
    with pytest.raises(ValueError, match=r"cannot be recorded \(an illegal memory access\)"):
        record(lambda: Sums(*torch.zeros(3)), [torch.ones(2, requires_grad=True)])


def test_what_goes_wrong_before_a_recording_is_not_blamed_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(monkeypatch)

    def work() -> Sums:
        raise RuntimeError("an illegal memory access")

    with pytest.raises(RuntimeError, match="an illegal memory access"):
        record(work, [torch.ones(2, requires_grad=True)])
