"""Every op inside PyTorch's machinery: opcheck, compile, fake tensors, autocast, grad modes, streams and graphs.

Knows no op by name. What an op computes is tested in test_generic_torch.py; here the same call must give the same bits
when PyTorch traces, replays or schedules it. Raw ops are found by watching what the public call dispatches.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from fuselm.kernels import torch_ops
from fuselm.kernels.spec import Case
from tests.kernels.arrays import torch_tensor
from tests.kernels.problems import (
    DEVICES,
    OPS,
    Problem,
    Tensors,
    all_numpy,
    as_tuple,
    assert_all_same_bits,
    assert_gradients,
    assert_outputs,
    backward,
    each_case,
    each_kind,
    each_op,
    forward,
    op_of,
    problem_of,
    reference_run,
    run,
    small,
    torch_cotangents,
    torch_inputs,
)

on_each_device = pytest.mark.parametrize("device", DEVICES, indirect=True)
over_small_cases = pytest.mark.parametrize(("op_name", "case"), each_case(small))
over_kinds = pytest.mark.parametrize(("op_name", "case"), each_kind())
# For what takes a second each: on a CPU, how a tensor lies is torch's business.
over_kinds_of_each_device = pytest.mark.parametrize(
    ("op_name", "case", "device"),
    [
        *(pytest.param(*p.values, "cpu", id=f"{p.id}-cpu") for p in each_kind(layouts=False)),
        *(pytest.param(*p.values, "cuda", id=f"{p.id}-cuda", marks=pytest.mark.gpu) for p in each_kind()),
    ],
    indirect=["device"],
)
over_ops = pytest.mark.parametrize("op_name", each_op())
# What the compiler warns of (its own deprecations, TF32) is not this project's to fix.
compilers_may_warn = pytest.mark.filterwarnings("default")


def one_case(op_name: str) -> Case:
    """The case with the most inputs and outputs among the cheap ones that have rows."""
    cases = [case for case in OPS[op_name].cases if small(case) and not case.huge and case.size]
    return max(cases, key=lambda case: (len(OPS[op_name].outputs(case)), len(case.tensors), len(case.options)))


# ---- opcheck -------------------------------------------------------------------------------------------------------


class RawCalls(TorchDispatchMode):
    """Remembers every fuselm op that is dispatched, with its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "fuselm":
            assert not kwargs
            self.calls.append((func, tree_map_only(torch.Tensor, lambda t: t.detach().clone(), args)))
        return func(*args, **(kwargs or {}))


@compilers_may_warn
@over_kinds_of_each_device
def test_raw_ops_pass_opcheck(op_name: str, case: Case, device: str) -> None:
    problem = problem_of(op_name, case)
    run(op_of(op_name), problem, device)  # what is built or loaded on first use is there now
    with RawCalls() as watched:
        inputs = torch_inputs(problem, device, wanted=problem.differentiable)
        outputs = forward(op_of(op_name), problem, inputs)
        for _ in range(2):  # an op may do the first backward of a forward otherwise than those after it
            backward(outputs, torch_cotangents(problem, device), inputs, keep=True)
    seen = {func.name().removeprefix("fuselm::") for func, _ in watched.calls}
    # By their last word: a form of an op, as packed tensors are, may have raw ops of its own; and a backward may be
    # the forward, turned round.
    kinds = {name.rpartition("_")[2] for name in seen if name.startswith(f"{op_name}_")}
    assert kinds
    assert "forward" in kinds or f"{op_name}_forward" not in torch_ops._PLAIN
    for func, args in watched.calls:
        # Autograd sits above the raw ops, in an autograd.Function: there is no registration of it to check.
        checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
        torch.library.opcheck(func, args, test_utils=checks)


# ---- compile, fake and meta ----------------------------------------------------------------------------------------


def compiled_run(problem: Problem, device: str, backend: str) -> tuple[Tensors, Tensors]:
    torch.compiler.reset()
    return run(torch.compile(op_of(problem.op.name), fullgraph=True, backend=backend), problem, device)


@compilers_may_warn
@over_kinds_of_each_device
def test_compiled_without_a_break_equals_eager(op_name: str, case: Case, device: str) -> None:
    problem = problem_of(op_name, case)
    for compiled, eager in zip(
        compiled_run(problem, device, "aot_eager"), run(op_of(op_name), problem, device), strict=True
    ):
        assert_all_same_bits(all_numpy(compiled), all_numpy(eager))


@compilers_may_warn
@on_each_device
@over_ops
def test_compiled_by_inductor_is_as_exact_as_torchs(op_name: str, device: str) -> None:
    if device == "cpu" and shutil.which("c++") is None and shutil.which("g++") is None:
        pytest.skip("inductor needs a C++ compiler")
    case = one_case(op_name)
    problem = problem_of(op_name, case)
    outputs, gradients = compiled_run(problem, device, "inductor")
    reference_outputs, reference_gradients = reference_run(op_name, case, device)
    assert_outputs(problem, all_numpy(outputs), reference_outputs)
    assert_gradients(problem, all_numpy(gradients), reference_gradients)


@compilers_may_warn
@on_each_device
@over_ops
def test_one_compilation_serves_other_numbers_of_rows(op_name: str, device: str) -> None:
    problem = problem_of(op_name, one_case(op_name))
    shape = problem.case.shape

    def grows(name: str) -> bool:  # with rows, or of the main shape but for dimensions that are broadcast
        own = problem.inputs[name].shape
        return name in problem.with_rows or (len(own) == len(shape) > 1 and own[0] == shape[0] > 1)

    torch.compiler.reset()
    counted = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda **tensors: op_of(op_name)(**tensors, **problem.case.options), backend=counted)
    for rows in (2, 3, 5):
        tensors = torch_inputs(problem, device)
        for name in filter(grows, tensors):
            tensors[name] = torch.cat([tensors[name]] * rows)
            torch._dynamo.mark_dynamic(tensors[name], 0)
        outputs = dict(zip(problem.op.outputs(problem.case), as_tuple(compiled(**tensors)), strict=True))
        assert_all_same_bits(all_numpy(outputs), all_numpy(forward(op_of(op_name), problem, tensors)))
    assert counted.frame_count == 1


@compilers_may_warn
@over_ops
def test_a_graph_of_dynamic_shapes_may_have_an_op_twice(op_name: str) -> None:
    problem = problem_of(op_name, one_case(op_name))
    op = op_of(op_name)

    def learning() -> dict[str, torch.Tensor]:
        tensors = torch_inputs(problem, "cpu")
        return {name: x.requires_grad_(name in problem.differentiable) for name, x in tensors.items()}

    for options in ({}, problem.case.options):  # the compiler looks later at numbers that nobody gave

        def twice(first: Any, second: Any, options: Any = options) -> Any:
            return op(**first, **options), op(**second, **options)

        torch.compiler.reset()
        compiled = torch.compile(twice, fullgraph=True, dynamic=True, backend="aot_eager")
        right = as_tuple(op(**learning(), **options))
        for found in compiled(learning(), learning()):
            assert all(torch.equal(*pair) for pair in zip(as_tuple(found), right, strict=True))


def assert_looks_like(actual: Tensors, real: Tensors, device: str) -> None:
    assert actual.keys() == real.keys()
    for name, tensor in actual.items():
        assert tensor.shape == real[name].shape
        assert tensor.dtype == real[name].dtype
        assert tensor.stride() == real[name].stride()
        assert tensor.device.type == device


@on_each_device
@over_small_cases
def test_fake_tensors_have_the_shapes_of_real_ones(op_name: str, case: Case, device: str) -> None:
    problem = problem_of(op_name, case)
    outputs, gradients = run(op_of(op_name), problem, device)
    inputs = torch_inputs(problem, device)
    cotangents = torch_cotangents(problem, device)
    with FakeTensorMode() as mode:
        fakes = {k: mode.from_tensor(v).requires_grad_(k in problem.differentiable) for k, v in inputs.items()}
        fake_outputs = forward(op_of(op_name), problem, fakes)
        fake_gradients = backward(fake_outputs, {k: mode.from_tensor(v) for k, v in cotangents.items()}, fakes)
    assert_looks_like(fake_outputs, outputs, device)
    assert_looks_like(fake_gradients, gradients, device)


@over_small_cases
def test_meta_tensors_have_the_shapes_of_real_ones(op_name: str, case: Case) -> None:
    problem = problem_of(op_name, case)
    outputs, gradients = run(op_of(op_name), problem, "cpu")
    meta = {k: v.to("meta") for k, v in torch_inputs(problem, "cpu").items()}
    meta = {k: v.requires_grad_(k in problem.differentiable) for k, v in meta.items()}
    meta_outputs = forward(op_of(op_name), problem, meta)
    cotangents = {k: v.to("meta") for k, v in torch_cotangents(problem, "cpu").items()}
    assert_looks_like(backward(meta_outputs, cotangents, meta), gradients, "meta")
    for found in (meta_outputs, outputs):  # views are of inputs that lie otherwise
        found |= {name: found[name].new_empty(found[name].shape) for name in problem.op.views}
    assert_looks_like(meta_outputs, outputs, "meta")


# ---- modes ---------------------------------------------------------------------------------------------------------


@on_each_device
@over_small_cases
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_grad_the_outputs_are_the_same(op_name: str, case: Case, device: str, mode: Callable[[], Any]) -> None:
    problem = problem_of(op_name, case)
    inputs = torch_inputs(problem, device, wanted=problem.differentiable)
    with mode():
        without = forward(op_of(op_name), problem, inputs)
    with_grad = forward(op_of(op_name), problem, inputs)
    assert not any(output.requires_grad for output in without.values())
    assert all(output.requires_grad for output in with_grad.values())
    assert_all_same_bits(all_numpy(without), all_numpy(with_grad))


@on_each_device
@over_small_cases
def test_autocast_changes_nothing(op_name: str, case: Case, device: str) -> None:
    """An op sums in fp32 and keeps its input's dtype anyway; fp32 weights beside bf16 rows are allowed."""
    problem = problem_of(op_name, case)
    plain_outputs, plain_gradients = run(op_of(op_name), problem, device)
    with torch.autocast(device, dtype=torch.bfloat16):
        outputs, gradients = run(op_of(op_name), problem, device)
    assert_all_same_bits(all_numpy(outputs), all_numpy(plain_outputs))
    assert_all_same_bits(all_numpy(gradients), all_numpy(plain_gradients))


@on_each_device
@over_ops
def test_a_second_derivative_is_refused_with_a_remedy(op_name: str, device: str) -> None:
    problem = problem_of(op_name, one_case(op_name))
    inputs = torch_inputs(problem, device, wanted=problem.differentiable)
    outputs = forward(op_of(op_name), problem, inputs)
    wanted = [inputs[name] for name in problem.differentiable]
    first = torch.autograd.grad([out.float().square().sum() for out in outputs.values()], wanted, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative") as caught:
        torch.autograd.grad(first[0].float().square().sum(), wanted)
    assert op_name in str(caught.value)
    assert f"{op_name}_reference" in str(caught.value)  # what to use instead


@on_each_device
@over_ops
def test_create_graph_alone_changes_no_gradient(op_name: str, device: str) -> None:
    problem = problem_of(op_name, one_case(op_name))
    _, plain = run(op_of(op_name), problem, device)
    inputs = torch_inputs(problem, device, wanted=problem.differentiable)
    outputs = forward(op_of(op_name), problem, inputs)
    wanted = [inputs[name] for name in problem.differentiable]
    sent = list(torch_cotangents(problem, device).values())
    kept = torch.autograd.grad(list(outputs.values()), wanted, sent, create_graph=True)
    assert_all_same_bits(all_numpy(dict(zip(plain, kept, strict=True))), all_numpy(plain))


@on_each_device
@over_ops
def test_gradients_accumulate_over_two_backwards(op_name: str, device: str) -> None:
    problem = problem_of(op_name, one_case(op_name))
    _, gradients = run(op_of(op_name), problem, device)
    inputs = torch_inputs(problem, device, wanted=problem.differentiable)
    cotangents = torch_cotangents(problem, device)
    for _ in range(2):
        outputs = forward(op_of(op_name), problem, inputs)
        torch.autograd.backward(list(outputs.values()), [cotangents[name] for name in outputs])
    twice = {name: 2 * gradients[name] for name in problem.differentiable}
    assert_all_same_bits(all_numpy({name: inputs[name].grad for name in twice}), all_numpy(twice))


@on_each_device
@over_kinds
def test_accumulated_gradients_share_no_memory(op_name: str, case: Case, device: str) -> None:
    """Two inputs may have equal gradients (a sum's); an optimizer that scales one in place must not scale both."""
    problem = problem_of(op_name, case)
    inputs = torch_inputs(problem, device, wanted=problem.differentiable)
    outputs = forward(op_of(op_name), problem, inputs)
    cotangents = torch_cotangents(problem, device)
    torch.autograd.backward(list(outputs.values()), [cotangents[name] for name in outputs])
    kept = [inputs[name].grad for name in problem.differentiable] + list(cotangents.values())
    places = [tensor.untyped_storage().data_ptr() for tensor in kept if tensor.numel()]
    assert len(set(places)) == len(places)


# ---- CUDA: graphs and streams --------------------------------------------------------------------------------------


def on_side_stream(work: Callable[[], None], times: int = 1) -> None:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(times):
            work()
    torch.cuda.current_stream().wait_stream(stream)


# The warm-up runs on a side stream, as capture wants it; autograd remarks on it once per process.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node")
@pytest.mark.gpu
@pytest.mark.parametrize(("op_name", "case"), [param for param in each_kind() if param.values[1].size])
def test_a_captured_graph_follows_its_inputs(op_name: str, case: Case, cuda: str) -> None:
    problem = problem_of(op_name, case)
    inputs = torch_inputs(problem, cuda, wanted=problem.differentiable)
    cotangents = torch_cotangents(problem, cuda)
    results: list[Tensors] = []

    def work() -> None:
        outputs = forward(op_of(op_name), problem, inputs)
        gradients = backward(outputs, cotangents, inputs)
        results[:] = [outputs, gradients]

    on_side_stream(work, times=3)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    captured = results[:]
    for factor in (1.0, -0.5, 3.0):
        with torch.no_grad():
            for name, array in problem.inputs.items():
                inputs[name].copy_(torch_tensor(array, cuda) * (factor if inputs[name].is_floating_point() else 1))
        graph.replay()
        replayed = [all_numpy(tensors) for tensors in captured]
        work()
        for again, eager in zip(replayed, results, strict=True):
            assert_all_same_bits(again, all_numpy(eager))


@pytest.mark.gpu
@over_kinds
def test_work_goes_to_the_current_stream(op_name: str, case: Case, cuda: str) -> None:
    """The inputs arrive late on a side stream: an op that ran on another stream would see what was there before."""
    problem = problem_of(op_name, case)
    expected_outputs, expected_gradients = run(op_of(op_name), problem, cuda)
    real = torch_inputs(problem, cuda)
    inputs = torch_inputs(problem, cuda, wanted=problem.differentiable)  # laid out as the real ones
    with torch.no_grad():
        for tensor in inputs.values():
            tensor.zero_()
    cotangents = torch_cotangents(problem, cuda)
    late: dict[str, Tensors] = {}

    def work() -> None:
        torch.cuda._sleep(20_000_000)  # about 10 ms
        with torch.no_grad():
            for name, tensor in inputs.items():
                tensor.copy_(real[name])
        late["outputs"] = forward(op_of(op_name), problem, inputs)
        late["gradients"] = backward(late["outputs"], cotangents, inputs)

    torch.cuda.synchronize()
    on_side_stream(work)
    torch.cuda.synchronize()
    assert_all_same_bits(all_numpy(late["outputs"]), all_numpy(expected_outputs))
    assert_all_same_bits(all_numpy(late["gradients"]), all_numpy(expected_gradients))
