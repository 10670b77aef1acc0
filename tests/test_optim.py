"""fuselm.optim and ops.adamw against torch.optim.AdamW: the same numbers, state dicts, groups and manners.

Knows torch, fuselm.optim and the op. Truth is torch's AdamW in float64, its plain loop over tensors.
"""

from __future__ import annotations

import copy
import io
import math
import shutil
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from fuselm.kernels.spec import Tolerance
from fuselm.kernels.torch_ops.adamw import adamw
from fuselm.optim import AdamW, clip_scale, decay_groups, global_norm
from tests.kernels.arrays import assert_same_bits, assert_within_rule, lay_out, to_numpy

# Below 2048 elements torch starts no threads, which on a busy machine take longer than all the rest.
SHAPES = [(44, 46), (48,), (), (0,), (3, 1, 5), (1000,)]


def parameters(dtype: torch.dtype = torch.float64, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


@cache
def gradients(step: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """The same numbers in every dtype from fp32 up, of sizes that differ from tensor to tensor."""
    generator = torch.Generator().manual_seed(100 + step)
    return [
        (torch.randn(shape, generator=generator) * 10.0 ** (-index)).to(dtype) for index, shape in enumerate(SHAPES)
    ]


def give(params: Sequence[Parameter], grads: Sequence[Tensor]) -> None:
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.clone()


def train(optimizer: torch.optim.Optimizer, params: list[Parameter], steps: range, **options: Any) -> None:
    for step in steps:
        give(params, gradients(step, params[0].dtype))
        optimizer.step(**options)


def assert_close(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.detach(), other.detach(), rtol=1e-12, atol=1e-14)


def assert_equal(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
    for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        assert_same_bits(f"tensor {index}", to_numpy(one), to_numpy(other))


def states(optimizer: torch.optim.Optimizer, params: Sequence[Tensor]) -> list[Tensor]:
    return [optimizer.state[param][name] for param in params for name in ("step", "exp_avg", "exp_avg_sq")]


# ---- numbers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lr": 0.1, "weight_decay": 0.0},
        {"betas": (0.0, 0.5), "eps": 1e-3},
        {"lr": 0.0, "betas": (0.9, 0.95), "weight_decay": 0.5},
    ],
)
def test_fifty_steps_in_float64_are_torchs(options: dict[str, Any]) -> None:
    ours, theirs = parameters(), parameters()
    our_optimizer, their_optimizer = AdamW(ours, **options), torch.optim.AdamW(theirs, foreach=False, **options)
    train(our_optimizer, ours, range(50))
    train(their_optimizer, theirs, range(50))
    assert_close(ours, theirs)
    assert_close(states(our_optimizer, ours), states(their_optimizer, theirs))


def test_groups_and_a_changing_learning_rate_are_torchs() -> None:
    def result(kind: Callable[..., torch.optim.Optimizer]) -> list[Parameter]:
        params = parameters()
        optimizer = kind([{"params": params[:2], "lr": 0.05, "weight_decay": 0.3}, {"params": params[2:]}], lr=0.01)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        for step in range(50):
            train(optimizer, params, range(step, step + 1))
            schedule.step()
        return params

    assert_close(result(AdamW), result(torch.optim.AdamW))


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("tensor_lr", [True, False])
def test_in_fp32_errors_are_no_larger_than_torchs(foreach: bool, tensor_lr: bool) -> None:
    start = parameters(torch.float32)
    ours, theirs, exact = (
        [Parameter(p.detach().to(d)) for p in start] for d in (torch.float32,) * 2 + (torch.float64,)
    )
    # A power of two, so that a learning rate in fp32 is the one in float64.
    lr = 2.0**-9
    optimizers = (
        AdamW(ours, lr=torch.tensor(lr) if tensor_lr else lr, weight_decay=0.1),
        torch.optim.AdamW(theirs, lr=lr, weight_decay=0.1, foreach=foreach),
        torch.optim.AdamW(exact, lr=lr, weight_decay=0.1, foreach=False),
    )
    for optimizer, params in zip(optimizers, (ours, theirs, exact), strict=True):
        train(optimizer, params, range(50))
    columns = []
    for optimizer, params in zip(optimizers, (ours, theirs, exact), strict=True):
        averages = [[optimizer.state[p][name] for p in params] for name in ("exp_avg", "exp_avg_sq")]
        columns.append([torch.cat([t.detach().flatten() for t in tensors]) for tensors in (params, *averages)])
    for what, actual, reference, truth in zip(("param", "exp_avg", "exp_avg_sq"), *columns, strict=True):
        assert_within_rule(what, to_numpy(actual), to_numpy(reference), to_numpy(truth), Tolerance())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_parameters_are_updated_in_fp32_and_rounded_once(dtype: torch.dtype) -> None:
    params = parameters(dtype)
    wide = [Parameter(p.detach().float()) for p in params]
    ours, plain = AdamW(params, lr=0.01), AdamW(wide, lr=0.01)
    for step in range(3):
        grads = gradients(step, dtype)
        give(params, grads)
        give(wide, [g.float() for g in grads])
        ours.step()
        plain.step()
        assert_equal(params, [p.to(dtype) for p in wide])
        with torch.no_grad():
            torch._foreach_copy_(wide, params)
    for param, other in zip(params, wide, strict=True):
        assert ours.state[param]["exp_avg"].dtype == torch.float32
        assert_equal([ours.state[param]["exp_avg_sq"]], [plain.state[other]["exp_avg_sq"]])


def test_step_and_lr_as_tensors_do_what_numbers_do() -> None:
    numbers, tensors = parameters(), parameters()
    averages = [[[torch.zeros_like(p) for p in numbers] for _ in range(2)] for _ in range(2)]
    step, lr = torch.tensor(0.0), torch.tensor(0.01, dtype=torch.float64)
    for number in range(1, 21):
        step += 1
        grads = gradients(number)
        adamw(numbers, grads, *averages[0], step=number, lr=0.01, betas=(0.0, 0.99))
        adamw(tensors, grads, *averages[1], step=step, lr=lr, betas=(0.0, 0.99))
    assert_close(tensors, numbers)


def test_bias_corrections_are_exact_in_fp32_too() -> None:
    """The first step's correction of the squares is 1 - beta2: in fp32 that difference has an error of 1e-4 or so."""
    first = []
    for step in (1, torch.tensor(1.0)):
        param = torch.zeros(1)
        adamw(
            [param],
            [torch.ones(1)],
            [torch.zeros(1)],
            [torch.zeros(1)],
            step=step,
            lr=1.0,
            betas=(0.9, 0.9999),
            eps=0.0,
        )
        first.append(param.item())
    np.testing.assert_allclose(first, -1.0, rtol=3e-7)


# ---- the op ----------------------------------------------------------------------------------------------------------


def after_one_call(layout: str, parts: list[list[int]]) -> list[Tensor]:
    """Params and averages after one step, called once for each part (indices of tensors)."""
    params = [lay_out(p.detach(), layout if index == 0 else "contiguous") for index, p in enumerate(parameters())]
    params = [p.to(torch.bfloat16) if index == 4 else p.float() for index, p in enumerate(params)]
    grads = gradients(1, torch.float32)
    averages = [[torch.zeros_like(p, dtype=torch.float32) for p in params] for _ in range(2)]
    scale = torch.tensor(0.37)
    for part in parts:
        lists = [[tensors[index] for index in part] for tensors in (params, grads, *averages)]
        adamw(*lists, step=7, lr=0.01, grad_scale=scale)
    return [*params, *averages[0], *averages[1]]


@pytest.mark.parametrize("layout", ["contiguous", "strided", "transposed"])
def test_bits_do_not_depend_on_the_company(layout: str) -> None:
    together = after_one_call(layout, [[0, 1, 2, 3, 4, 5]])
    assert_equal(after_one_call(layout, [[5, 3], [4, 0], [1, 2]]), together)
    assert_equal(after_one_call(layout, [[0], [1], [2], [3], [4], [5]]), together)
    assert_equal(after_one_call("contiguous", [[0, 1, 2, 3, 4, 5]]), together)


def test_a_scale_is_as_scaled_gradients_and_leaves_them_alone() -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        scaled, plain = parameters(dtype), parameters(dtype)
        grads = gradients(3, dtype)
        kept = [g.clone() for g in grads]
        scale = torch.tensor(0.25)
        give(scaled, grads)
        give(plain, [g * scale.to(dtype) for g in grads])  # a power of two, exact in every dtype
        AdamW(scaled).step(grad_scale=scale)
        AdamW(plain).step()
        assert_equal(scaled, plain)
        assert_equal([p.grad for p in scaled if p.grad is not None], kept)


def test_empty_lists_are_nothing_to_do() -> None:
    adamw([], [], [], [], step=1, lr=0.1)


def after_four_steps(function: Callable[..., None], dtype: torch.dtype) -> list[Tensor]:
    params = [p.detach() for p in parameters(dtype)]
    averages = [[torch.zeros_like(p, dtype=torch.float32) for p in params] for _ in range(2)]
    for number in range(1, 5):
        step, lr, scale = torch.tensor(float(number)), torch.tensor(0.1 / number), torch.tensor(1.0 - 0.1 * number)
        function(params, gradients(number, dtype), *averages, step=step, lr=lr, grad_scale=scale)
    return [*params, *averages[0], *averages[1]]


@pytest.mark.filterwarnings("default")  # the compiler's own deprecations
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiles_whole_and_once_for_all_steps_and_rates(dtype: torch.dtype) -> None:
    torch.compiler.reset()
    graphs = 0

    def counting(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    compiled = after_four_steps(torch.compile(adamw, fullgraph=True, backend=counting), dtype)
    ulp = {} if dtype == torch.float32 else {"rtol": torch.finfo(dtype).eps, "atol": 0.0}
    for one, other in zip(compiled, after_four_steps(adamw, dtype), strict=True):  # some releases write out a lerp
        torch.testing.assert_close(one, other, **(ulp if one.dtype == dtype else {}))
    assert graphs == 1


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="torch's compiler for CPU tensors calls g++")
@pytest.mark.filterwarnings("default")
def test_the_default_compiler_fuses_it_to_the_same_numbers() -> None:
    torch.compiler.reset()
    compiled = after_four_steps(torch.compile(adamw, fullgraph=True), torch.float32)
    for one, other in zip(compiled, after_four_steps(adamw, torch.float32), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"grads": []}, "one length; got 2 params, 0 grads, 2 exp_avgs, 2 exp_avg_sqs"),
        ({"exp_avgs": [torch.zeros(3)]}, "one length; got 2 params, 2 grads, 1 exp_avgs"),
        ({"grads": [torch.zeros(3), torch.zeros(2)]}, r"each of grads .*; got grads\[1\] \[2\] .* parameter \[1, 2\]"),
        ({"exp_avg_sqs": [torch.zeros(1), torch.zeros(1, 2)]}, r"each of exp_avg_sqs .* parameter's shape"),
        (
            {"params": [torch.zeros(3), torch.zeros(1, 2, device="meta")]},
            r"one device; got params\[0\] on cpu, .* meta",
        ),
        ({"grads": [torch.zeros(3, device="meta"), torch.zeros(1, 2)]}, "shape and device; got .* on meta"),
        ({"params": [torch.zeros(3).long(), torch.zeros(1, 2)]}, "must be float64, .*; got .* int64"),
        (
            {"params": [torch.zeros(3).double(), torch.zeros(1, 2)]},
            "float64 parameter must be .*; got .* float32",
        ),
        ({"exp_avgs": [torch.zeros(3).half(), torch.zeros(1, 2)]}, "must be float32; got .* float16"),
        ({"grads": [torch.zeros(3) * 1j, torch.zeros(1, 2)]}, "must be a real .*; got .* complex64"),
        ({"step": 0}, "step must be 1 or more; got 0"),
    ],
)
def test_the_op_refuses_with_a_reason_and_a_remedy(change: dict[str, Any], words: str) -> None:
    names = ("params", "grads", "exp_avgs", "exp_avg_sqs")
    call: dict[str, Any] = {name: [torch.zeros(3), torch.zeros(1, 2)] for name in names} | {"step": 1, **change}
    with pytest.raises(ValueError, match=words + r".*\. [A-Z].*\.$"):
        adamw(**call, lr=0.1)


# ---- state ---------------------------------------------------------------------------------------------------------


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": True}, {"amsgrad": False, "capturable": False}])
def test_state_dicts_go_to_torch_and_back(options: dict[str, Any]) -> None:
    ours, theirs = parameters(), parameters()
    our_optimizer = AdamW([{"params": ours[:2], "lr": 0.02}, {"params": ours[2:]}], betas=(0.8, 0.9))
    their_optimizer = torch.optim.AdamW([{"params": theirs[:3]}, {"params": theirs[3:]}], **options)
    train(our_optimizer, ours, range(5))
    train(their_optimizer, theirs, range(5))

    to_them, to_us = parameters(), parameters()
    fresh_theirs = torch.optim.AdamW([{"params": to_them[:2]}, {"params": to_them[2:]}])
    fresh_ours = AdamW([{"params": to_us[:3]}, {"params": to_us[3:]}])
    fresh_theirs.load_state_dict(through_a_file(our_optimizer.state_dict()))
    fresh_ours.load_state_dict(through_a_file(their_optimizer.state_dict()))
    with torch.no_grad():
        torch._foreach_copy_(to_them, ours)
        torch._foreach_copy_(to_us, theirs)
    for optimizer, params in ((fresh_theirs, to_them), (fresh_ours, to_us)):
        train(optimizer, params, range(5, 10))
    train(our_optimizer, ours, range(5, 10))
    train(their_optimizer, theirs, range(5, 10))
    assert_close(to_them, ours)
    assert_close(to_us, theirs)
    assert_close(states(fresh_theirs, to_them), states(our_optimizer, ours))
    assert set(fresh_ours.param_groups[0]) == set(our_optimizer.param_groups[0])


def test_a_loaded_state_of_16_bit_parameters_keeps_its_fp32_digits() -> None:
    params, again = parameters(torch.bfloat16), parameters(torch.bfloat16)
    optimizer, fresh = AdamW(params), AdamW(again)
    train(optimizer, params, range(3))
    fresh.load_state_dict(optimizer.state_dict())
    assert_equal(states(fresh, again), states(optimizer, params))
    before = [t.clone() for t in states(optimizer, params)]
    train(fresh, again, range(1))
    assert_equal(states(optimizer, params), before)


def test_hooks_may_make_the_state_that_is_loaded_and_see_it_whole() -> None:
    params, again = parameters(torch.bfloat16), parameters(torch.bfloat16)
    optimizer, fresh = AdamW(params, master_weights=True), AdamW(again, master_weights=True)
    train(optimizer, params, range(3))
    seen: list[Any] = []
    fresh.register_load_state_dict_pre_hook(lambda _, wrapped: wrapped["optimizer"])
    fresh.register_load_state_dict_post_hook(lambda one: seen.extend(t.clone() for t in states(one, again)))
    fresh.load_state_dict({"optimizer": optimizer.state_dict()})
    assert_equal(states(fresh, again), states(optimizer, params))
    assert_equal(seen, states(optimizer, params))
    assert_equal(*([one.state[p]["master"] for p in own] for one, own in ((fresh, again), (optimizer, params))))


def test_loading_a_state_lets_go_of_the_one_before() -> None:
    params = parameters()
    optimizer = AdamW(params)
    train(optimizer, params, range(2))
    before = weakref.ref(optimizer.state[params[0]]["exp_avg"])
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert before() is None


def test_a_deep_copy_steps_as_the_original() -> None:
    params = parameters()
    optimizer = AdamW(params)
    train(optimizer, params, range(2))
    twin_params, twin = copy.deepcopy((params, optimizer))
    train(optimizer, params, range(2, 4))
    train(twin, twin_params, range(2, 4))
    assert_equal(twin_params, params)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (lambda params: torch.optim.AdamW(params, amsgrad=True), "without amsgrad, .*; got a group with amsgrad"),
        (lambda params: torch.optim.AdamW(params, maximize=True), "; got a group with maximize"),
        (lambda params: torch.optim.SGD(params, lr=0.1), "has lr, betas, eps .*; got one without betas, eps"),
    ],
)
def test_the_state_of_another_algorithm_is_refused_and_nothing_changes(
    other: Callable[[list[Parameter]], torch.optim.Optimizer], words: str
) -> None:
    params = parameters()
    optimizer = AdamW(params, lr=0.25)
    train(optimizer, params, range(1))
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=words):
        optimizer.load_state_dict(other(parameters()).state_dict())
    assert optimizer.state_dict()["param_groups"] == before["param_groups"]
    assert_equal(
        states(optimizer, params), [before["state"][i][n] for i in before["state"] for n in before["state"][i]]
    )


# ---- manners -------------------------------------------------------------------------------------------------------


def test_parameters_without_a_gradient_wait_and_keep_their_own_count() -> None:
    def result(kind: Callable[..., torch.optim.Optimizer]) -> tuple[list[Parameter], torch.optim.Optimizer]:
        params = parameters()
        optimizer = kind(params, lr=0.01)
        for step in range(9):
            optimizer.zero_grad()
            for index, grad in enumerate(gradients(step)):
                if step % (index + 1) == 0:
                    params[index].grad = grad
            optimizer.step()
        return params, optimizer

    ours, optimizer = result(AdamW)
    assert_close(ours, result(torch.optim.AdamW)[0])
    assert [int(optimizer.state[p]["step"]) for p in ours] == [9, 5, 3, 3, 2, 2]
    assert [p.grad is None for p in ours] == [False, False, True, False, True, True]


def test_a_step_without_gradients_makes_no_state() -> None:
    optimizer = AdamW(parameters())
    assert optimizer.step() is None
    assert optimizer.state_dict()["state"] == {}


def test_the_closure_is_called_with_gradients_and_its_loss_returned() -> None:
    (param,) = parameters(shapes=[(4,)])
    optimizer = AdamW([param])
    before = param.detach().clone()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = param.square().sum()
        loss.backward()
        return loss

    with torch.no_grad():
        assert optimizer.step(closure) == before.square().sum()
    assert torch.equal(param.detach().abs() < before.abs(), torch.ones(4, dtype=torch.bool))


def test_the_same_steps_give_the_same_bits() -> None:
    runs = []
    for _ in range(2):
        params = parameters(torch.float32)
        train(AdamW(params, lr=0.01), params, range(5), grad_scale=torch.tensor(0.3))
        runs.append(params)
    assert_equal(*runs)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lr": -1.0}, "lr is 0 or more; got -1.0"),
        ({"lr": math.nan}, "lr is 0 or more; got nan"),
        ({"lr": torch.zeros(2)}, r"0-dim tensor; got shape \[2\]"),
        ({"betas": (0.9, 1.0)}, r"betas are .* below 1; got \(0.9, 1.0\)"),
        ({"betas": (-0.1, 0.9)}, "betas are"),
        ({"betas": (0.9,)}, "betas are two numbers"),
        ({"betas": 0.9}, r"betas are two numbers, 0 or more and below 1; got 0\.9\."),
        ({"lr": "1e-3"}, "lr is a number; got '1e-3'"),
        ({"eps": None}, "eps is a number; got None"),
        ({"weight_decay": torch.tensor(0.1)}, r"weight_decay is a number; got tensor"),
        ({"eps": -1e-8}, "eps is 0 or more; got -1e-08"),
        ({"weight_decay": -0.1}, "weight_decay is 0 or more; got -0.1"),
        ({"amsgrad": True}, "without amsgrad"),
        ({"capturable": True}, "counts its steps on the host; got capturable=True"),
        ({"lr": True}, "lr is a number; got True"),
        ({"master_weights": "no"}, "master_weights is True or False; got 'no'"),
    ],
)
def test_options_out_of_range_are_refused_for_all_and_for_a_group(options: dict[str, Any], words: str) -> None:
    if "amsgrad" not in options:
        with pytest.raises(ValueError, match=words):
            AdamW(parameters(), **options)
    with pytest.raises(ValueError, match=words):
        AdamW([{"params": parameters(), **options}])


def test_complex_parameters_and_sparse_gradients_are_refused() -> None:
    optimizer = AdamW(parameters())
    with pytest.raises(ValueError, match=r"real parameters; got one of torch\.complex64"):
        optimizer.add_param_group({"params": [Parameter(torch.zeros(2, dtype=torch.complex64))]})
    assert len(optimizer.param_groups) == 1
    embedding = torch.nn.Embedding(5, 2, sparse=True)
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RuntimeError, match=r"dense gradients; got .*torch.sparse_coo"):
        AdamW(embedding.parameters()).step()


# ---- gradients and groups --------------------------------------------------------------------------------------------


def test_what_is_no_norm_and_no_named_parameter_is_refused_in_words() -> None:
    with pytest.raises(TypeError, match=r"takes a norm as a tensor; got a float\. Pass what global_norm gives\."):
        clip_scale(2.0, 1.0)  # type: ignore[arg-type]
    for wrong in (parameters(), torch.nn.Linear(2, 2).parameters()):
        with pytest.raises(TypeError, match=r"pairs of a name and a parameter; got a Parameter\. Pass model\.named_"):
            decay_groups(wrong, 0.1)  # type: ignore[arg-type]


@pytest.mark.parametrize("max_norm", [1e-3, 1.0, 1e6, math.inf])
def test_norm_and_clipping_are_torchs(max_norm: float) -> None:
    params, grads = parameters(torch.float32), gradients(2, torch.float32)
    give(params, grads)
    expected = torch.nn.utils.clip_grad_norm_(params, max_norm)
    norm = global_norm(grads)
    assert (norm.shape, norm.dtype) == ((), torch.float32)
    torch.testing.assert_close(norm, expected, rtol=2e-7, atol=0)
    for param, grad in zip(params, grads, strict=True):
        assert param.grad is not None
        torch.testing.assert_close(grad * clip_scale(norm, max_norm), param.grad, rtol=4e-7, atol=0)


def test_the_norm_of_mixed_dtypes_is_summed_in_fp32_or_better() -> None:
    tensors = [
        torch.full((301,), 1.0, dtype=torch.bfloat16),
        torch.ones(3),
        torch.full((5,), 1e30, dtype=torch.float64),
    ]
    # bf16 has no 301. The norm of norms is off by a last digit or not, by how torch takes two numbers.
    torch.testing.assert_close(global_norm(tensors[:2]), torch.tensor(304.0).sqrt(), rtol=2e-7, atol=0)
    assert global_norm(tensors) == torch.tensor(1e30 * math.sqrt(5))  # fp32 has no 1e60
    assert torch.equal(global_norm(tensors), global_norm(iter(tensors)))
    assert global_norm([]) == global_norm([torch.zeros(0)]) == 0


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_norm_that_is_not_finite_gives_a_scale_of_nan(bad: float) -> None:
    assert clip_scale(global_norm([torch.tensor([1.0, bad])]), 1.0).isnan()


def test_a_norm_may_be_an_integer() -> None:
    assert torch.equal(clip_scale(torch.tensor(5), 0.5), clip_scale(torch.tensor(5.0), 0.5))


def test_a_maximal_norm_may_be_a_number_on_the_host_in_any_form() -> None:
    for max_norm in (0.5, torch.tensor(0.5), torch.tensor(0.5, dtype=torch.float64)):
        assert clip_scale(torch.tensor(2.0), max_norm).item() == pytest.approx(0.25, rel=1e-6)  # type: ignore[arg-type]


def test_a_maximal_norm_must_be_positive() -> None:
    for max_norm in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match=r"max_norm is above 0; got .*\. To clip nothing"):
            clip_scale(torch.tensor(1.0), max_norm)


def test_matrices_decay_and_vectors_do_not() -> None:
    model = torch.nn.Sequential(torch.nn.Conv1d(2, 3, 4), torch.nn.LayerNorm(5), torch.nn.Linear(5, 2, bias=False))
    decaying, others = decay_groups(model.named_parameters(), 0.1)
    assert (decaying["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert [id(p) for p in decaying["params"]] == [id(model[0].weight), id(model[2].weight)]
    assert [id(p) for p in others["params"]] == [id(model[0].bias), id(model[1].weight), id(model[1].bias)]
    bare = torch.nn.Linear(5, 2, bias=False)
    optimizer = AdamW(decay_groups(bare.named_parameters(), 0.1))
    bare(torch.ones(1, 5)).sum().backward()
    optimizer.step()
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 0]
