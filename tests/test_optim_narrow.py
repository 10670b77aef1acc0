"""16-bit copies of fp32 parameters in fuselm.optim.AdamW: steps, states, who wrote over what, refusals."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from fuselm.optim import AdamW
from tests.test_optim import gradients, parameters

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
in_16_bits = pytest.mark.parametrize("dtype", [BF16, F16], ids=str)


@pytest.fixture
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    return str(request.param)


on_each_device = pytest.mark.parametrize("device", DEVICES, indirect=True)


def made(device: str) -> list[Parameter]:
    return [Parameter(param.detach().to(device)) for param in parameters(F32)]


def narrowed(
    device: str = "cpu", dtype: torch.dtype = BF16, **options: Any
) -> tuple[list[Parameter], AdamW, list[Tensor]]:
    """Parameters, all but the last of which have a narrow copy."""
    params = made(device)
    optimizer = AdamW(params, lr=0.01, **options)
    return params, optimizer, [optimizer.narrow(param, dtype) for param in params[:-1]]


def give(params: list[Parameter], copies: list[Tensor], step: int) -> None:
    """A gradient for each, that of a copy in its dtype."""
    leaves = [*copies, *params[len(copies) :]]
    for leaf, grad in zip(leaves, gradients(step, F32), strict=True):
        leaf.grad = grad.to(leaf.device, leaf.dtype)


@on_each_device
@in_16_bits
@pytest.mark.parametrize("impl", ["auto", "torch"])
def test_a_step_by_copies_is_the_step_by_their_gradients_in_fp32(device: str, dtype: torch.dtype, impl: str) -> None:
    params, optimizer, copies = narrowed(device, dtype, impl=impl)
    plain = made(device)
    usual = AdamW(plain, lr=0.01, impl=impl)
    for step in range(4):
        give(params, copies, step)
        for param, grad in zip(plain, gradients(step, F32), strict=True):
            param.grad = (grad.to(dtype).float() if param is not plain[-1] else grad).to(device)
        optimizer.step(grad_scale=torch.tensor(0.5, device=device))
        usual.step(grad_scale=torch.tensor(0.5, device=device))
        for param, other in zip(params, plain, strict=True):
            assert torch.equal(param, other)
            for name in ("step", "exp_avg", "exp_avg_sq"):
                assert torch.equal(optimizer.state[param][name], usual.state[other][name])
        for param, copy in zip(params, copies, strict=False):
            assert (copy.dtype, copy.is_leaf, copy.requires_grad) == (dtype, True, True)
            assert torch.equal(copy, param.to(dtype))
    assert all("master" not in optimizer.state[param] for param in params)


@on_each_device
def test_a_skipped_step_leaves_a_parameter_and_its_twin(device: str) -> None:
    params, optimizer, copies = narrowed(device)
    before = [tensor.detach().clone() for tensor in (*params, *copies)]
    give(params, copies, 0)
    optimizer.step(skip=torch.tensor(True, device=device))
    optimizer.uncount()
    for tensor, old in zip((*params, *copies), before, strict=True):
        assert torch.equal(tensor, old)
    optimizer.step(skip=torch.tensor(False, device=device))
    assert not torch.equal(copies[0], before[len(params)])


@on_each_device
def test_a_skipped_step_does_not_hide_that_somebody_has_written_over_a_parameter(device: str) -> None:
    params, optimizer, copies = narrowed(device)
    with torch.no_grad():
        params[0].mul_(3.0)
    give(params, copies, 0)
    optimizer.step(skip=torch.tensor(True, device=device))
    optimizer.refresh()
    assert torch.equal(copies[0], params[0].to(BF16))
    optimizer.step()  # and one that is made writes what it has made
    assert torch.equal(copies[0], params[0].to(BF16))


@on_each_device
def test_a_frozen_parameter_stays_and_so_does_its_twin(device: str) -> None:
    """Frozen before it has one, and after; with a gradient that was there already."""
    params = made(device)
    params[0].requires_grad_(False)
    optimizer = AdamW(params, lr=0.01)
    copies = [optimizer.narrow(param, BF16) for param in params[:-1]]
    assert [copy.requires_grad for copy in copies] == [param.requires_grad for param in params[:-1]]
    before = [tensor.detach().clone() for tensor in (*params, *copies)]
    give(params, copies, 0)
    params[1].requires_grad_(False)
    optimizer.step()
    moved = [not torch.equal(old, now) for old, now in zip(before, (*params, *copies), strict=True)]
    assert moved[:3] == moved[len(params) :][:3] == [False, False, True]
    optimizer.refresh()
    assert not copies[1].requires_grad
    params[1].requires_grad_(True)
    optimizer.refresh()
    assert copies[1].requires_grad
    give(params, copies, 1)
    optimizer.step()
    assert not torch.equal(params[1], before[1])


@on_each_device
def test_what_had_no_gradient_takes_no_step(device: str) -> None:
    params, optimizer, copies = narrowed(device)
    give(params, copies, 0)
    copies[0].grad = None
    before = params[0].detach().clone()
    optimizer.step()
    assert torch.equal(params[0], before)
    assert params[0] not in optimizer.state
    assert not torch.equal(params[1], made(device)[1])


@on_each_device
def test_a_copy_follows_a_parameter_that_was_written_over_when_it_is_told(device: str) -> None:
    params, optimizer, copies = narrowed(device)
    give(params, copies, 0)
    optimizer.step()
    kept = copies[1].detach().clone()
    versions = [copy._version for copy in copies]
    optimizer.refresh()
    assert [copy._version for copy in copies] == versions  # nobody had written
    with torch.no_grad():
        params[0].mul_(3.0)
    give(params, copies, 1)
    copies[0].grad = None  # so that the step writes other copies alone
    optimizer.step()
    assert not torch.equal(copies[0], params[0].to(BF16))
    optimizer.refresh()
    assert torch.equal(copies[0], params[0].to(BF16))
    assert not torch.equal(copies[1], kept)
    assert torch.equal(copies[1], params[1].to(BF16))


def test_a_copy_follows_a_parameter_that_was_put_elsewhere_and_any_other_when_asked_for_everything() -> None:
    params, optimizer, copies = narrowed()
    for _ in range(5):  # memory that is given back is handed out again
        params[0].data = params[0].detach() * 3.0
        params[0].data = params[0].detach() * 3.0
        optimizer.refresh()
        assert torch.equal(copies[0], params[0].to(BF16))
    params[0].data.mul_(3.0)  # of which torch counts nothing
    optimizer.refresh()
    assert not torch.equal(copies[0], params[0].to(BF16))
    optimizer.refresh(everything=True)
    assert torch.equal(copies[0], params[0].to(BF16))


def test_a_copy_that_was_made_in_inference_mode_is_stepped() -> None:
    params = parameters(F32)
    optimizer = AdamW(params, lr=0.01)
    with torch.inference_mode():
        copies = [optimizer.narrow(param, BF16) for param in params[:-1]]
    give(params, copies, 0)
    optimizer.step()
    assert all(torch.equal(copy, param.to(BF16)) for param, copy in zip(params, copies, strict=False))


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")  # a leak that is undone here
def test_a_gradient_with_a_graph_behind_it_loses_that_when_it_is_zeroed() -> None:
    param = Parameter(torch.ones(4))
    optimizer = AdamW([param])
    copy = optimizer.narrow(param, BF16)
    copy.float().square().sum().backward(create_graph=True)
    kept = copy.grad
    optimizer.zero_grad(set_to_none=False)
    assert copy.grad is kept
    assert kept is not None
    assert (kept.grad_fn, kept.requires_grad, bool(kept.any())) == (None, False, False)


def test_gradients_of_twins_are_forgotten_with_the_others() -> None:
    params, optimizer, copies = narrowed()
    give(params, copies, 0)
    optimizer.zero_grad(set_to_none=False)
    assert all(copy.grad is not None and not copy.grad.any() for copy in copies)
    optimizer.zero_grad()
    assert all(leaf.grad is None for leaf in (*copies, *params))


def test_states_know_nothing_of_twins_and_go_to_an_optimizer_without() -> None:
    params, optimizer, copies = narrowed()
    give(params, copies, 0)
    optimizer.step()
    plain = [Parameter(param.detach().clone()) for param in params]
    usual = AdamW(plain, lr=0.01)
    usual.load_state_dict(deepcopy(optimizer.state_dict()))
    give(params, copies, 1)
    for param, leaf in zip(plain, (*copies, params[-1]), strict=True):
        assert leaf.grad is not None
        param.grad = leaf.grad.float()
    optimizer.step()
    usual.step()
    assert all(map(torch.equal, params, plain))
    assert deepcopy(optimizer)._narrowed == {}


def test_a_copy_lies_as_its_parameter_does() -> None:
    param = Parameter(torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).T)
    copy = AdamW([param]).narrow(param, BF16)
    assert copy.stride() == param.stride()


@pytest.mark.filterwarnings("default")  # the compiler's own
def test_a_compiled_step_writes_twins_too(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()
    whole = torch.compile
    monkeypatch.setattr(torch, "compile", lambda *args, **options: whole(*args, **options, backend="aot_eager"))
    (params, optimizer, copies), (plain, usual, others) = narrowed(), narrowed()
    optimizer.compile()
    for step in range(2):
        give(params, copies, step)
        give(plain, others, step)
        optimizer.step()
        usual.step()
    for param, other in zip(params, plain, strict=True):
        torch.testing.assert_close(param, other, rtol=1e-5, atol=1e-7)
    assert all(torch.equal(copy, param.to(BF16)) for param, copy in zip(params, copies, strict=False))


def test_gradients_of_both_are_refused() -> None:
    params, optimizer, copies = narrowed()
    give(params, copies, 0)
    params[0].grad = torch.ones_like(params[0])
    with pytest.raises(RuntimeError, match=r"by the copy's gradient; got one of its own, .*\. Compute .* zero_grad"):
        optimizer.step()


@pytest.mark.parametrize(
    ("param", "dtype"),
    [(F32, F32), (F32, torch.float64), (F32, torch.int16), (BF16, BF16), (torch.float64, BF16)],
    ids=str,
)
def test_twins_in_16_bits_of_fp32_are_all_there_are(param: torch.dtype, dtype: torch.dtype) -> None:
    one = Parameter(torch.ones(4, dtype=param))
    with pytest.raises(ValueError, match=rf"makes 16-bit copies of fp32 parameters; got {param} and {dtype}\. Pass"):
        AdamW([one]).narrow(one, dtype)


@pytest.mark.parametrize("wrong", [None, [Parameter(torch.ones(4))], torch.nn.Linear(2, 2), "weight"])
def test_what_is_no_parameter_is_refused_in_words(wrong: Any) -> None:
    with pytest.raises(
        ValueError, match=rf"of fp32 parameters; got {type(wrong).__name__} and torch.bfloat16\. Pass one"
    ):
        AdamW([Parameter(torch.ones(4))]).narrow(wrong, BF16)
    one, dtype = Parameter(torch.ones(4)), "bfloat16"
    with pytest.raises(ValueError, match=r"got torch.float32 and 'bfloat16'\. Pass one parameter and torch\.bfloat16"):
        AdamW([one]).narrow(one, dtype)  # type: ignore[arg-type]


def test_a_parameter_has_one_copy_which_is_up_to_date_when_it_is_asked_for() -> None:
    one = Parameter(torch.ones(4))
    optimizer = AdamW([one])
    first = optimizer.narrow(one, BF16)
    with torch.no_grad():
        one.mul_(3.0)
    assert optimizer.narrow(one, BF16) is first
    assert torch.equal(first, one.to(BF16))
    with pytest.raises(ValueError, match=r"makes one copy of a parameter; got torch.float16 beside torch.bfloat16\. "):
        optimizer.narrow(one, F16)


def test_a_parameter_of_nobody_has_no_twin() -> None:
    with pytest.raises(ValueError, match=r"is for parameters that it steps; got another one, of shape \[4\]\. Add it"):
        AdamW([Parameter(torch.ones(4))]).narrow(Parameter(torch.ones(4)), BF16)
