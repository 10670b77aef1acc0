"""fuselm.optim.AdamW with master weights and a choice of implementation: updates, state dicts, calls, bad gradients.

Numbers, state dicts without masters and manners are in test_optim.py, skipped and compiled steps in test_optim_skip.py.
"""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import fuselm.optim
from fuselm import ops
from fuselm.optim import AdamW
from tests.test_optim import assert_equal, give, gradients, parameters, states, through_a_file, train

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
in_16_bits = pytest.mark.parametrize("dtype", [BF16, F16], ids=str)


def masters(optimizer: AdamW, params: list[Parameter]) -> list[Tensor]:
    return [optimizer.state[param]["master"] for param in params]


# ---- masters ---------------------------------------------------------------------------------------------------------


def after_small_steps(dtype: torch.dtype, steps: int = 1000, **options: Any) -> tuple[Parameter, AdamW]:
    """Each step takes 1e-4 off a parameter of 1: an eightieth of bf16's last digit."""
    param = Parameter(torch.ones(16, dtype=dtype))
    optimizer = AdamW([param], lr=1e-4, weight_decay=0.0, **options)
    param.grad = torch.ones(16, dtype=dtype)
    for _ in range(steps):
        optimizer.step()
    return param, optimizer


def test_updates_too_small_for_16_bits_land_where_fp32_does() -> None:
    exact = after_small_steps(F32)[0]
    assert exact.detach().tolist() == pytest.approx([0.9] * 16, abs=1e-4)
    for dtype in (BF16, F16):
        param, optimizer = after_small_steps(dtype, master_weights=True)
        assert torch.equal(optimizer.state[param]["master"], exact)
        assert torch.equal(param, exact.to(dtype))
    assert torch.equal(after_small_steps(BF16)[0], torch.ones(16, dtype=BF16))  # and without a master they are lost


@in_16_bits
def test_a_parameter_is_its_master_rounded_and_a_master_what_fp32_would_be(dtype: torch.dtype) -> None:
    params = parameters(dtype)
    wide = [Parameter(param.detach().float()) for param in params]
    optimizer, plain = AdamW(params, lr=0.01, master_weights=True), AdamW(wide, lr=0.01)
    for step in range(5):
        give(params, gradients(step, dtype))
        give(wide, [grad.float() for grad in gradients(step, dtype)])
        optimizer.step()
        plain.step()
    assert_equal(masters(optimizer, params), wide)
    assert_equal(params, [one.to(dtype) for one in wide])
    assert all(master.dtype == F32 for master in masters(optimizer, params))


def test_only_16_bit_parameters_of_groups_that_ask_have_a_master() -> None:
    first, second, third = parameters(BF16, [(4,), (5,), (6,)])
    single, double = parameters(F32, [(7,)])[0], parameters(torch.float64, [(8,)])[0]
    groups = [
        {"params": [first, single, double], "master_weights": True, "lr": 0.1},
        {"params": [second], "weight_decay": 0.3},
        {"params": [third], "master_weights": False},
    ]
    everyone = [first, second, third, single, double]
    for default, expected in ((False, [True, False, False]), (True, [True, True, False])):
        optimizer = AdamW(copy.deepcopy(groups), master_weights=default)
        now = [param for group in optimizer.param_groups for param in group["params"]]
        for param in now:
            param.grad = torch.ones_like(param)
        optimizer.step()
        has = {tuple(param.shape): "master" in optimizer.state[param] for param in now}
        assert [has[tuple(param.shape)] for param in everyone] == [*expected, False, False]


def test_steps_of_parameters_with_and_without_a_master_are_each_its_own() -> None:
    """In one call; the same bits as in optimizers apart."""
    together, apart = parameters(BF16), parameters(BF16)
    one = AdamW([{"params": together[:3], "master_weights": True}, {"params": together[3:], "lr": 0.1}])
    two = [AdamW(apart[:3], master_weights=True), AdamW(apart[3:], lr=0.1)]
    for step in range(3):
        for params in (together, apart):
            give(params, gradients(step, BF16))
        for optimizer in (one, *two):
            optimizer.step()
    assert_equal(together, apart)
    assert_equal(masters(one, together[:3]), masters(two[0], apart[:3]))


def test_a_dropped_master_is_made_anew_of_the_parameter() -> None:
    param, optimizer = after_small_steps(BF16, 10, master_weights=True)
    with torch.no_grad():
        param.fill_(3.0)
    del optimizer.state[param]["master"]
    optimizer.step()
    assert optimizer.state[param]["master"].tolist() == pytest.approx([3.0 - 1e-4] * 16, abs=1e-6)


def test_a_transposed_parameter_has_a_master_that_lies_as_it_does() -> None:
    param = Parameter(torch.randn(6, 5, generator=torch.Generator().manual_seed(0)).to(BF16).t())
    optimizer = AdamW([param], master_weights=True)
    param.grad = torch.ones(6, 5, dtype=BF16).t()
    optimizer.step()
    state = optimizer.state[param]
    assert {state[name].stride() for name in ("exp_avg", "exp_avg_sq", "master")} == {param.stride()}


# ---- state -----------------------------------------------------------------------------------------------------------


@in_16_bits
def test_a_state_dict_keeps_every_digit_of_a_master(dtype: torch.dtype) -> None:
    params, again = parameters(dtype), parameters(dtype)
    optimizer, fresh = AdamW(params, lr=1e-3, master_weights=True), AdamW(again)
    train(optimizer, params, range(3))
    fresh.load_state_dict(through_a_file(optimizer.state_dict()))
    with torch.no_grad():
        torch._foreach_copy_(again, params)
    assert_equal(masters(fresh, again), masters(optimizer, params))
    assert fresh.param_groups[0]["master_weights"] is True
    before = [master.clone() for master in masters(optimizer, params)]
    train(fresh, again, range(3, 6))
    assert_equal(masters(optimizer, params), before)  # they are copies
    train(optimizer, params, range(3, 6))
    assert_equal(again, params)
    assert_equal(masters(fresh, again), masters(optimizer, params))


def test_torchs_state_goes_into_one_with_masters_and_back() -> None:
    theirs, ours = parameters(BF16), parameters(BF16)
    torchs = torch.optim.AdamW(theirs, lr=0.01)
    train(torchs, theirs, range(3))
    optimizer = AdamW(ours, master_weights=True)
    optimizer.load_state_dict(through_a_file(torchs.state_dict()))
    assert optimizer.param_groups[0]["master_weights"] is True
    assert not any("master" in optimizer.state[param] for param in ours)
    with torch.no_grad():
        torch._foreach_copy_(ours, theirs)
    expected = parameters(F32)
    with torch.no_grad():
        torch._foreach_copy_(expected, theirs)
    plain = AdamW(expected, lr=0.01)
    plain.load_state_dict(through_a_file(torchs.state_dict()))
    give(ours, gradients(3, BF16))
    give(expected, [grad.float() for grad in gradients(3, BF16)])
    optimizer.step()
    plain.step()
    assert_equal(masters(optimizer, ours), expected)  # made of the parameter at its first step here
    back = torch.optim.AdamW(parameters(BF16))
    back.load_state_dict(through_a_file(optimizer.state_dict()))
    moved = back.param_groups[0]["params"]
    train(back, moved, range(4, 9))
    # What torch carried along while its parameters moved on is no master of theirs any more.
    home = AdamW(moved, lr=0.0, weight_decay=0.0, master_weights=True)
    home.load_state_dict(through_a_file(back.state_dict()))
    for group in home.param_groups:
        group["lr"] = group["weight_decay"] = 0.0
    before = [param.detach().clone() for param in moved]
    give(moved, gradients(9, BF16))
    home.step()
    assert_equal(moved, before)


def test_a_group_that_wants_no_masters_any_more_drops_them() -> None:
    params = parameters(BF16)
    optimizer = AdamW(params, master_weights=True)
    train(optimizer, params, range(1))
    assert "master" in optimizer.state[params[0]]
    optimizer.param_groups[0]["master_weights"] = False
    train(optimizer, params, range(1, 2))
    assert "master" not in optimizer.state[params[0]]


def test_torchs_own_choices_are_taken_and_what_is_not_here_refused() -> None:
    AdamW(parameters(), 1e-3, (0.9, 0.99), 1e-8, 0.01, False, foreach=True, fused=False, maximize=False)
    for option in ("amsgrad", "maximize", "differentiable"):
        with pytest.raises(ValueError, match=rf"This AdamW is without .*; got a group with {option}"):
            AdamW(parameters(), **{option: True})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"its steps on the host; got capturable=True\. For a CUDA graph record"):
        AdamW(parameters(), capturable=True)


def test_groups_that_do_not_say_keep_their_own_masters() -> None:
    """Torch's state dicts say nothing of masters: each group stays what it was made as."""
    first, second = parameters(BF16, [(4,), (5,)])
    saved = torch.optim.AdamW([{"params": [first]}, {"params": [second], "lr": 0.5}]).state_dict()
    optimizer = AdamW([{"params": [first], "master_weights": True}, {"params": [second]}])
    optimizer.load_state_dict(saved)
    assert [group["master_weights"] for group in optimizer.param_groups] == [True, False]
    assert [group["lr"] for group in optimizer.param_groups] == [1e-3, 0.5]
    assert "master_weights" not in saved["param_groups"][0]
    with pytest.raises(ValueError, match="different number of parameter groups"):
        AdamW([first, second]).load_state_dict(saved)


def test_a_deep_copy_steps_as_the_original_with_masters_of_its_own() -> None:
    params = parameters(BF16)
    optimizer = AdamW(params, master_weights=True, impl="torch")
    train(optimizer, params, range(2))
    twin_params, twin = copy.deepcopy((params, optimizer))
    assert twin.impl == "torch"
    before = [master.clone() for master in masters(twin, twin_params)]
    train(optimizer, params, range(2, 4))
    assert_equal(masters(twin, twin_params), before)
    train(twin, twin_params, range(2, 4))
    assert_equal(twin_params, params)
    assert_equal(masters(twin, twin_params), masters(optimizer, params))


# ---- one call, by the implementation asked for -----------------------------------------------------------------------


@pytest.mark.parametrize("master", [False, True])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_both_implementations_give_the_same_bits_on_a_cpu(dtype: torch.dtype, master: bool) -> None:
    results = []
    for impl in ("auto", "torch"):
        params = parameters(dtype)
        optimizer = AdamW(params, lr=0.01, master_weights=master, impl=impl)
        train(optimizer, params, range(4), grad_scale=torch.tensor(0.3))
        results.append([*params, *states(optimizer, params)])
    assert_equal(*results)


def test_torchs_implementation_is_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(fuselm.optim, "_op", lambda impl: asked.append(impl) or ops.choose(impl).adamw)
    params = parameters(F32)
    train(AdamW(params, impl="torch"), params, range(1))
    assert set(asked) == {"torch"}
    assert ops.choose("torch").adamw.__name__ == "adamw_reference"


def test_a_word_for_no_implementation_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="one of auto, fused, torch; got 'fast'"):
        AdamW(parameters(), impl="fast")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match=r"which need a CUDA device; .* Use impl 'auto'"):
            AdamW(parameters(), impl="fused")


class Counted:
    """ops.adamw that notes how many tensors it is called with."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[int] = []
        monkeypatch.setattr(fuselm.optim, "_op", lambda impl: self)

    def __call__(self, params: list[Tensor], *lists: Any, **options: Any) -> None:
        self.calls.append(len(params))
        ops.adamw(params, *lists, **options)


def test_all_groups_and_steps_of_a_device_are_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch)
    params = parameters(F32)
    groups = [{"params": params[:2], "lr": 0.1}, {"params": params[2:4], "betas": (0.5, 0.9)}, {"params": params[4:]}]
    optimizer = AdamW(groups)
    train(optimizer, params, range(1))
    params[0].grad = params[5].grad = None
    optimizer.step()
    train(optimizer, params, range(2, 3))  # now two of them are at another step
    assert counted.calls == [6, 4, 6]
    optimizer.zero_grad()
    optimizer.step()
    assert len(counted.calls) == 3


@pytest.mark.filterwarnings("default")  # the compiler's own deprecations
def test_a_compiled_step_with_masters_does_the_same_and_can_be_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()
    whole = torch.compile
    monkeypatch.setattr(torch, "compile", lambda *args, **options: whole(*args, **options, backend="aot_eager"))
    ours, plain = parameters(BF16), parameters(BF16)
    optimizers = [AdamW(params, lr=0.01, master_weights=True) for params in (ours, plain)]
    optimizers[0].compile()
    for optimizer, params in zip(optimizers, (ours, plain), strict=True):
        for step in range(4):
            give(params, [grad * (math.nan if step == 2 else 1) for grad in gradients(step, BF16)])
            optimizer.step(skip=torch.tensor(step == 2))
            if step == 2:
                optimizer.uncount()
    for one, other in zip(masters(optimizers[0], ours), masters(optimizers[1], plain), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
    assert_equal(ours, [one.to(BF16) for one in masters(optimizers[0], ours)])


def test_a_compiled_step_counts_past_256_whatever_torchs_default_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """bf16 has no 257: a step and a rate of that dtype would be others."""
    told: list[Any] = []
    monkeypatch.setattr(torch, "compile", lambda *_, **__: lambda *_, **options: told.append(options))
    param = Parameter(torch.ones(3))
    optimizer = AdamW([param], lr=1e-3)
    optimizer.compile()
    param.grad = torch.ones(3)
    torch.set_default_dtype(BF16)
    try:
        for _ in range(257):
            optimizer.step()
    finally:
        torch.set_default_dtype(F32)
    assert (float(told[-1]["step"]), float(told[-1]["lr"])) == (257.0, pytest.approx(1e-3, rel=1e-6))


# ---- gradients that are no numbers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("master", [False, True])
def test_a_gradient_that_is_no_number_makes_its_element_nan_as_in_torch(bad: float, master: bool) -> None:
    ours, theirs = parameters(BF16, [(6,)]), parameters(BF16, [(6,)])
    grad = torch.ones(6, dtype=BF16)
    grad[2] = bad
    for optimizer, params in ((AdamW(ours, master_weights=master), ours), (torch.optim.AdamW(theirs), theirs)):
        for number in range(2):
            params[0].grad = grad if number == 0 else torch.ones(6, dtype=BF16)
            optimizer.step()
    for param in (ours[0], theirs[0]):
        assert param.isnan().tolist() == [False, False, True, False, False, False]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_skipped_step_with_masters_that_is_uncounted_never_was(bad: float) -> None:
    ours, plain = parameters(BF16), parameters(BF16)
    optimizer, other = AdamW(ours, master_weights=True), AdamW(plain, master_weights=True)
    for step in range(4):
        spoiled = step in (0, 2)
        give(ours, [grad * (bad if spoiled else 1) for grad in gradients(step, BF16)])
        optimizer.step(skip=torch.tensor(spoiled))
        if spoiled:
            optimizer.uncount()
        else:
            train(other, plain, range(step, step + 1))
    assert_equal(ours, plain)
    assert_equal(states(optimizer, ours), states(other, plain))
    assert_equal(masters(optimizer, ours), masters(other, plain))


# ---- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_on_a_gpu_masters_land_where_fp32_does_and_the_host_waits_for_nothing() -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    found = []
    for dtype in (F32, BF16):
        param = Parameter(torch.ones(5000, dtype=dtype, device="cuda"))
        bias = Parameter(torch.ones(5, dtype=dtype, device="cuda"))
        groups = [{"params": [param]}, {"params": [bias], "weight_decay": 0.5}]
        optimizer = AdamW(groups, lr=1e-4, weight_decay=0.0, master_weights=True)
        for one in (param, bias):
            one.grad = torch.ones_like(one)
        optimizer.step()  # states are made, kernels loaded
        torch.cuda.synchronize()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that the mode itself is a prototype
                torch.cuda.set_sync_debug_mode("error")
                for _ in range(299):
                    optimizer.step(skip=torch.zeros((), dtype=torch.bool, device="cuda"))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        state = optimizer.state[param]
        found.append([state.get("master", param.detach()), optimizer.state[bias].get("master", bias.detach())])
        assert torch.equal(param, found[-1][0].to(dtype))
    assert_equal(found[1], found[0])
