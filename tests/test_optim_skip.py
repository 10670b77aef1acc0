"""fuselm.optim and ops.adamw where a step is skipped or compiled: no trace of the one, one graph of the other.

Numbers, state dicts and manners are in test_optim.py, whose parameters and gradients these are.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from fuselm.kernels.torch_ops.adamw import adamw
from fuselm.optim import AdamW, decay_groups
from tests.test_optim import assert_equal, give, gradients, parameters, states, train

# ---- the op ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("compiled", "dtype"),
    [(compiled, dtype) for compiled in (False, True) for dtype in (torch.float32, torch.bfloat16)]
    + [(False, torch.float64)],
)
@pytest.mark.filterwarnings("default")  # the compiler's own deprecations
def test_a_skipped_call_changes_no_bit_whatever_the_gradients(compiled: bool, dtype: torch.dtype) -> None:
    torch.compiler.reset()
    function: Any = torch.compile(adamw, fullgraph=True, backend="aot_eager") if compiled else adamw
    params = [p.detach() for p in parameters(dtype)]
    wide = torch.promote_types(dtype, torch.float32)
    averages = [[torch.rand(p.shape, dtype=wide) for p in params] for _ in range(2)]
    before = [t.clone() for t in (*params, *averages[0], *averages[1])]
    grads = [g.clone() for g in gradients(1, dtype)]
    grads[0][0, :3] = torch.tensor([math.nan, math.inf, -math.inf], dtype=dtype)
    for scale in (1.0, math.nan):
        call: dict[str, Any] = {"step": torch.tensor(3.0), "lr": torch.tensor(0.1), "grad_scale": torch.tensor(scale)}
        function(params, grads, *averages, skip=torch.tensor(True), **call)
        assert_equal([*params, *averages[0], *averages[1]], before)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.filterwarnings("default")
def test_a_call_that_is_not_skipped_is_as_without_the_word(compiled: bool) -> None:
    torch.compiler.reset()
    function: Any = torch.compile(adamw, fullgraph=True, backend="aot_eager") if compiled else adamw
    results = []
    for options in ({}, {"skip": torch.tensor(False)}):
        params = [p.detach() for p in parameters(torch.float32)]
        averages = [[torch.zeros_like(p) for p in params] for _ in range(2)]
        function(
            params, gradients(1, torch.float32), *averages, step=torch.tensor(1.0), lr=torch.tensor(0.1), **options
        )
        results.append([*params, *averages[0], *averages[1]])
    assert_equal(*results)


# ---- steps that are skipped, and compiled ones -----------------------------------------------------------------------


def run_with_skips(optimizer: AdamW, params: list[Parameter], skipped: set[int]) -> None:
    """Steps 0 to 5, some of them with gradients that are no numbers and told to be skipped."""
    for step in range(6):
        bad = step in skipped
        give(params, [grad * (math.nan if bad else 1) for grad in gradients(step, params[0].dtype)])
        optimizer.step(grad_scale=torch.tensor(0.5), skip=torch.tensor(bad))
        if bad:
            optimizer.uncount()


def test_a_skipped_step_that_is_uncounted_never_was() -> None:
    ours, plain = parameters(torch.float32), parameters(torch.float32)
    our_optimizer, plain_optimizer = AdamW(ours, lr=0.01), AdamW(plain, lr=0.01)
    run_with_skips(our_optimizer, ours, {0, 2, 3})
    for step in (1, 4, 5):
        train(plain_optimizer, plain, range(step, step + 1), grad_scale=torch.tensor(0.5))
    assert_equal(ours, plain)
    assert_equal(states(our_optimizer, ours), states(plain_optimizer, plain))


def test_a_skipped_step_counts_until_it_is_uncounted() -> None:
    (param,) = parameters(torch.float32, [(3,)])
    optimizer = AdamW([param])
    counts = []
    for skip in (False, True):
        param.grad = torch.ones(3)
        optimizer.step(skip=torch.tensor(skip))
        counts.append(float(optimizer.state[param]["step"]))
    optimizer.uncount()
    assert [*counts, float(optimizer.state[param]["step"])] == [1.0, 2.0, 1.0]


@pytest.mark.filterwarnings("default")
def test_compiled_steps_are_one_graph_a_group_and_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()
    graphs = 0
    whole = torch.compile

    def counting(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    monkeypatch.setattr(torch, "compile", lambda *args, **options: whole(*args, **options, backend=counting))
    ours, plain = parameters(torch.float32), parameters(torch.float32)
    optimizers = [AdamW([{"params": p[:2], "weight_decay": 0.1}, {"params": p[2:]}]) for p in (ours, plain)]
    optimizers[0].compile()
    for optimizer, params in zip(optimizers, (ours, plain), strict=True):
        for step in range(6):
            for group in optimizer.param_groups:
                group["lr"] = 0.01 * (step + 1)
            give(params, gradients(step, torch.float32))
            optimizer.step(grad_scale=torch.tensor(0.5), skip=torch.tensor(step == 3))
            if step == 3:
                optimizer.uncount()
    assert graphs == 2
    for one, other in zip((*ours, *states(optimizers[0], ours)), (*plain, *states(optimizers[1], plain)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)
    # Numbers still, for state dicts and schedules.
    assert [group["lr"] for group in optimizers[0].param_groups] == [0.06, 0.06]


@pytest.mark.filterwarnings("default")
def test_a_compiled_step_that_is_skipped_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()
    whole = torch.compile
    monkeypatch.setattr(torch, "compile", lambda *args, **options: whole(*args, **options, backend="aot_eager"))
    params = parameters(torch.float32)
    optimizer = AdamW(params, lr=0.01)
    optimizer.compile()
    train(optimizer, params, range(2), skip=torch.tensor(False))
    before = [tensor.detach().clone() for tensor in (*params, *states(optimizer, params))]
    give(params, [grad * math.inf for grad in gradients(2, torch.float32)])
    optimizer.step(skip=torch.tensor(True))
    optimizer.uncount()
    assert_equal([*params, *states(optimizer, params)], before)


def test_only_what_a_step_has_counted_is_taken_back() -> None:
    first, second = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = AdamW([first, second])
    first.grad = second.grad = torch.ones(2)
    optimizer.step()
    second.grad = None
    optimizer.step(skip=torch.tensor(True))
    optimizer.uncount()
    optimizer.uncount()  # there is nothing left to take back
    assert [int(optimizer.state[parameter]["step"]) for parameter in (first, second)] == [1, 1]


def test_biases_of_experts_do_not_decay() -> None:
    names = {"mlp.up": torch.ones(2, 3, 4), "mlp.up_bias": torch.ones(2, 4), "norm.weight": torch.ones(3)}
    decayed, kept = decay_groups(names.items(), 0.1)
    assert decayed["params"][0] is names["mlp.up"]
    assert len(decayed["params"]) == 1
    assert {id(one) for one in kept["params"]} == {id(names["mlp.up_bias"]), id(names["norm.weight"])}
