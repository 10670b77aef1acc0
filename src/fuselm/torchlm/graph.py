"""A step's gradients as one CUDA graph: recorded at the first step, replayed from then on.

A small model's step is hundreds of kernels of a few microseconds each, and the host takes longer to launch them one by
one than the GPU to run them; a graph is one launch. Batches and the loss scale are copied to where the graph reads
them; the gradients it writes are the parameters' own from then on. Knows a model, its loss and step.py, no optimiser:
the update stays outside, since whether and how far to step depends on numbers that the host reads meanwhile.

    graphed = GraphedGradients(model.loss, parameters, parts=4)
    found = graphed(feed.next(16), scale=scaler.scale)     # as step.gradients(...)
"""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import _has_any_global_hook

from fuselm.optim import global_norm
from fuselm.torchlm.layers import is_hooked
from fuselm.torchlm.memory import has_room_for_graph
from fuselm.torchlm.model import Transformer
from fuselm.torchlm.step import Found, Loss, Norm, Sums, accumulate

# Before a recording: libraries choose kernels, make handles and take workspaces at their first calls, and a graph may
# hold none of that.
WARM_UPS = 3

Replay = Callable[[], Any]


class NotRecordable(ValueError):
    """A step that a CUDA graph cannot hold. Nothing has come of it, and the same step can be made without one."""


def has_graphs(device: torch.device) -> bool:
    """Whether work on it can be recorded."""
    return device.type == "cuda"


def check_device(device: torch.device) -> None:
    """Refuse what has no CUDA graphs."""
    if not has_graphs(device):
        raise ValueError(f"A CUDA graph is of a GPU's work; the device is {device}. Leave --cuda-graph out.")


def is_for_graph(asked: bool | None, model: Transformer, rows: int, device: torch.device) -> bool:
    """Whether steps of so many rows at once are launched as a graph: as somebody has asked for, or where it is safe.

    That is where nothing in a step waits for the GPU, as far as can be told, and what a graph keeps is little.
    """
    if asked is not None or not has_graphs(device):
        return bool(asked) and has_graphs(device)
    return is_fixed(model, device) and has_room_for_graph(model.config, rows, device, model.dtype.itemsize)


def is_fixed(model: Transformer, device: torch.device) -> bool:
    """Whether a step of the model waits for nothing: the grouped matmul of experts asks the GPU how many rows each has,
    except where it is in bf16 on Hopper or later."""
    in_bf16 = model.dtype == torch.bfloat16
    return not model.config.num_experts or (in_bf16 and torch.cuda.get_device_capability(device) >= (9, 0))


class Watch:
    """Whether a graph that nobody has asked for does what each step would, as far as can be told.

    A graph calls no hook and no Python of somebody else's loss, and gives gradients to parameters that were frozen
    since. (Asked at each step, of 40 modules in 10 us: hooks come and go in dicts that stay.)
    """

    HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")

    def __init__(self, model: Transformer) -> None:
        self.model, self.parameters = model, list(model.parameters())
        self.hooks = [getattr(module, name) for module in model.modules() for name in self.HOOKS]
        self.learning = [parameter.requires_grad for parameter in self.parameters]

    def sees_nothing(self, loss: Loss) -> bool:
        """Whether a step of this loss is made of nothing but the model, as it was."""
        if getattr(loss, "_torchdynamo_orig_callable", loss) != self.model.loss or _has_any_global_hook():
            return False
        if any(self.hooks) or any(is_hooked(parameter) for parameter in self.parameters):
            return False
        return self.learning == [parameter.requires_grad for parameter in self.parameters]


class GraphedGradients:
    """`step.gradients` with everything but the batches and the scale fixed: shapes, parameters, parts, weights."""

    def __init__(
        self,
        loss: Loss,
        parameters: Sequence[Tensor],
        *,
        parts: int,
        balance_weight: float = 0.0,
        norm: Norm = global_norm,
    ) -> None:
        self.loss, self.parameters = loss, parameters
        self.fixed: dict[str, Any] = {"parts": parts, "balance_weight": balance_weight, "norm": norm}
        self._places: list[tuple[Tensor, Tensor]] = []  # inputs and targets of each part, [rows, T]
        self._scale = torch.ones((), device=parameters[0].device)
        self._scale_there = 1.0
        self._recorded: tuple[Sums, Replay] | None = None
        self._gradients: list[Tensor | None] = []

    def __call__(self, batches: Iterable[tuple[Tensor, Tensor]], scale: float = 1.0) -> Found:
        """The gradients of these micro-batches. Those of the call before are overwritten, and its sums too."""
        self._bring(batches)
        if scale != self._scale_there:
            self._scale.fill_(scale)
            self._scale_there = scale
        if self._recorded is None:
            self._recorded = record(self._work, self.parameters)
            self._gradients = [parameter.grad for parameter in self.parameters]
        sums, replay = self._recorded
        replay()
        # Whoever takes a gradient away takes it from all steps to come: the graph goes on writing it elsewhere.
        assert all(own.grad is there for own, there in zip(self.parameters, self._gradients, strict=True))
        return Found(*sums, scale)

    def _bring(self, batches: Iterable[tuple[Tensor, Tensor]]) -> None:
        if not self._places:
            self._places = [(inputs.clone(), targets.clone()) for inputs, targets in batches]
            return
        for place, batch in zip(self._places, batches, strict=True):
            for there, new in zip(place, batch, strict=True):
                there.copy_(new)

    def _work(self) -> Sums:
        return accumulate(self.loss, self.parameters, self._places, scale=self._scale, **self.fixed)


def record(work: Callable[[], Sums], parameters: Sequence[Tensor]) -> tuple[Sums, Replay]:
    """What `work` returns, which every replay writes anew in its place, and the replay. No random number is used up."""
    device = parameters[0].device
    random_state = torch.cuda.get_rng_state(device)
    # One stream for all: a parameter's gradient is accumulated on the stream that autograd first saw it on.
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    try:
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                work()
        torch.cuda.current_stream(device).wait_stream(stream)
    finally:  # whoever is out of memory makes the same step without a graph
        torch.cuda.set_rng_state(random_state, device)
    for parameter in parameters:  # what the graph makes is to lie in the graph's own memory
        parameter.grad = None
    graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    before, inside = torch.cuda.current_stream(device), None
    try:
        with _nothing_collected(), torch.cuda.graph(graph, pool=pool, stream=stream):
            try:
                sums = work()
            except RuntimeError as error:  # torch will complain that the recording cannot be ended, and hide this
                inside = error
                raise
    except RuntimeError as error:
        torch.cuda.set_stream(before)  # which torch leaves undone then
        # Its frames keep what the step was made of, which would take part in the next one, on the recording's stream.
        traceback.clear_frames((inside or error).__traceback__)
        gc.collect()
        with suppress(RuntimeError):  # a GPU that is lost says so again: the first error is the one to be told
            _end_recording(device, None if error is inside else pool)
        raise _refusal(inside or error) from error
    return sums, graph.replay


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """A graph of an earlier run that the collector finds would be destroyed inside the recording, which ends it."""
    gc.collect()
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _end_recording(device: torch.device, pool: tuple[int, int] | None) -> None:
    """Undo what torch leaves of a recording that failed. `pool` is its memory, if it could not be ended either.

    The generator takes itself for recorded still, and would refuse every dropout: a copy of its state stands at the
    same number, and is of no recording. Memory is a matter of releases before 2.12: the allocator would go on as while
    it is recorded, give nothing back to anyone, and keep all that the step had taken.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    generator = torch.cuda.default_generators[index]
    generator.graphsafe_set_state(generator.clone_state())
    if pool is not None and torch.__version__ < (2, 12):  # type: ignore[operator]
        torch._C._cuda_endAllocateToPool(index, pool)
        torch._C._cuda_releasePool(index, pool)
    torch.cuda.empty_cache()


def _refusal(cause: RuntimeError) -> Exception:
    if isinstance(cause, torch.OutOfMemoryError):
        return cause
    said = str(cause).strip().partition("\n")[0]
    return NotRecordable(
        f"A CUDA graph holds a step that never waits for the GPU; this one cannot be recorded ({said}). Train without "
        "a graph."
    )
