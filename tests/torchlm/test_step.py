"""One step of training: gradients in parts, the loss scale, clipping, and a step that must leave no trace."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fuselm.config import ModelConfig
from fuselm.optim import AdamW, decay_groups
from fuselm.torchlm.model import Transformer
from fuselm.torchlm.step import Found, gradients, update
from tests.torchlm.runs import LATENT, MODEL, MOE

ROWS, VOCAB = 4, 40


def model(dtype: torch.dtype = torch.float32, **changes: Any) -> Transformer:
    # Kernels, and what stands in for them on a CPU, have no float64; torch's own formulas have.
    impl = "torch" if dtype == torch.float64 else "auto"
    config = ModelConfig(**{"vocab_size": VOCAB, **MODEL, "num_layers": 2, "impl": impl, **changes})
    return Transformer(config, dtype=dtype, seed=1).to(dtype)


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCAB, (ROWS, MODEL["context"] + 1), generator=generator)
    return ids[:, :-1], ids[:, 1:]


def found_with(model: Transformer, rows: int = ROWS, **options: Any) -> tuple[Found, list[Tensor]]:
    inputs, targets = batch()
    parameters = list(model.parameters())
    parts = zip(inputs.split(rows), targets.split(rows), strict=True)
    found = gradients(model.loss, parameters, parts, parts=ROWS // rows, **options)
    assert all(parameter.grad is not None for parameter in parameters)
    return found, [parameter.grad for parameter in parameters if parameter.grad is not None]


def optimizer_of(model: Transformer) -> AdamW:
    return AdamW(decay_groups(model.named_parameters(), 0.1), betas=(0.9, 0.95))


def everything(model: Transformer, optimizer: AdamW) -> list[Tensor]:
    averages = [optimizer.state[p][name] for p in model.parameters() for name in ("step", "exp_avg", "exp_avg_sq")]
    return [tensor.detach().clone() for tensor in (*model.parameters(), *averages)]


def same_bits(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


# --- gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize(
    ("dtype", "close", "changes"),
    [
        (torch.float32, 2e-6, {}),
        (torch.float32, 2e-6, LATENT),
        (torch.float64, 1e-13, {}),
        (torch.float64, 1e-13, {"norm": "layer", "attention_path": "written"}),
        (torch.float64, 1e-13, {"norm": "layer", "bias": True, "tied": True, "positions": "learned"}),
    ],
)
def test_parts_give_the_gradients_of_the_whole_batch(
    rows: int, dtype: torch.dtype, close: float, changes: dict[str, Any]
) -> None:
    whole, expected = found_with(model(dtype, **changes))
    found, grads = found_with(model(dtype, **changes), rows)
    assert found.outcome().loss == pytest.approx(whole.outcome().loss, rel=1e-6)
    assert found.outcome().norm == pytest.approx(whole.outcome().norm, rel=1e-6)
    largest = max(float(grad.abs().max()) for grad in expected)
    for ours, theirs in zip(grads, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=close * largest)


def test_the_gradients_are_those_of_the_mean_loss_by_finite_differences() -> None:
    """In float64 throughout (turning by angles is fp32): a short way along the gradient is exact to 7 digits."""
    one = model(torch.float64, positions="learned")
    found, grads = found_with(one, rows=1)
    norm, reach = found.outcome().norm, 1e-4
    values = []
    with torch.no_grad():
        for sign in (1, -1):
            for parameter, grad in zip(one.parameters(), grads, strict=True):
                # There, and then as far on the other side.
                parameter.add_(grad, alpha=(1 if sign == 1 else -2) * reach / norm)
            values.append(float(one.loss(*batch())[0]))
    assert (values[0] - values[1]) / (2 * reach) == pytest.approx(norm, rel=1e-6)


def test_gradients_of_an_earlier_batch_are_not_added() -> None:
    one = model()
    _, first = found_with(one)
    kept = [grad.clone() for grad in first]
    _, again = found_with(one)
    assert same_bits(again, kept)


def test_the_balance_loss_of_experts_counts_by_its_weight() -> None:
    _, plain = found_with(model(**MOE))
    _, weighted = found_with(model(**MOE), balance_weight=0.5)
    one = model(**MOE)
    loss, balance = one.loss(*batch())
    (loss + 0.5 * balance).backward()
    names = [name for name, _ in one.named_parameters()]
    for name, ours, theirs in zip(names, weighted, (p.grad for p in one.parameters()), strict=True):
        assert theirs is not None
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7, msg=name)
    router = next(index for index, name in enumerate(names) if "router" in name)
    assert not torch.allclose(plain[router], weighted[router], rtol=1e-2)


def test_loss_balance_and_norm_are_told_without_the_weights_and_the_scale() -> None:
    outcome = found_with(model(**MOE), rows=2, scale=4096.0, balance_weight=0.25)[0].outcome()
    one = model(**MOE)
    with torch.no_grad():
        inputs, targets = batch()
        parts = [one.loss(inputs[first : first + 2], targets[first : first + 2]) for first in (0, 2)]
    assert outcome.loss == pytest.approx(sum(float(loss) for loss, _ in parts) / 2, rel=1e-6)
    assert outcome.balance == pytest.approx(sum(float(balance) for _, balance in parts) / 2, rel=1e-6)
    unscaled = found_with(model(**MOE), rows=2, balance_weight=0.25)[0].outcome()
    assert outcome == unscaled  # a power of two changes no digit


# --- the update ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [0.0, 0.5, 1e3])
def test_a_loss_scale_changes_no_bit_of_the_step(clip: float) -> None:
    results = []
    for scale in (1.0, 65536.0):
        one = model()
        optimizer = optimizer_of(one)
        for _ in range(3):
            update(optimizer, found_with(one, rows=2, scale=scale)[0], learning_rate=1e-2, clip=clip)
        results.append(everything(one, optimizer))
    assert same_bits(*results)


@pytest.mark.parametrize(("clip", "share"), [(0.0, 1.0), (0.25, 0.25), (1e3, 1.0)])
def test_the_norm_is_cut_to_the_clip_and_left_alone_below_it(clip: float, share: float) -> None:
    one = model()
    optimizer = optimizer_of(one)
    found = found_with(one, scale=8.0)[0]
    norm = found.outcome().norm
    assert 1 < norm < 1e3
    update(optimizer, found, learning_rate=1e-2, clip=clip)
    averages = torch.cat([optimizer.state[p]["exp_avg"].flatten() for p in one.parameters()])
    seen = float(averages.double().norm()) / (1 - 0.9)  # the first average is a tenth of the first gradient
    assert seen == pytest.approx(share if clip == 0.25 else norm, rel=1e-4)


def test_the_learning_rate_is_every_groups() -> None:
    one = model()
    optimizer = optimizer_of(one)
    update(optimizer, found_with(one)[0], learning_rate=0.125, clip=1.0)
    assert [group["lr"] for group in optimizer.param_groups] == [0.125, 0.125]


def bad_gradients(one: Transformer, fault: str, scale: float) -> Found:
    """A batch in which something is wrong."""
    factor = {"nan loss": math.nan, "inf loss": math.inf, "spike": 100.0}.get(fault, 1.0)

    def loss(inputs: Tensor, targets: Tensor) -> Any:
        value, balance = one.loss(inputs, targets)
        return value * factor, balance

    handle = None
    if fault == "inf gradient":
        handle = one.embedding.register_hook(lambda grad: grad.index_fill(0, torch.tensor([3]), math.inf))
    found = gradients(loss, list(one.parameters()), [batch()], parts=1, scale=scale)
    if handle is not None:
        handle.remove()
    return found


@pytest.mark.parametrize("clip", [0.0, 1.0])
@pytest.mark.parametrize("scale", [1.0, 1024.0])
@pytest.mark.parametrize("fault", ["nan loss", "inf loss", "inf gradient", "spike"])
def test_a_bad_step_leaves_no_trace(fault: str, scale: float, clip: float) -> None:
    one = model()
    optimizer = optimizer_of(one)
    for _ in range(2):
        update(optimizer, found_with(one, scale=scale)[0], learning_rate=1e-2, clip=clip)
    before = everything(one, optimizer)
    found = bad_gradients(one, fault, scale)
    assert found.outcome().finite == (fault == "spike")
    update(optimizer, found, learning_rate=1e-2, clip=clip, limit=20.0)
    optimizer.uncount()
    assert same_bits(everything(one, optimizer), before)
    update(optimizer, found_with(one, scale=scale)[0], learning_rate=1e-2, clip=clip)
    assert not same_bits(everything(one, optimizer), before)


def test_a_first_step_that_is_bad_leaves_averages_of_zero_and_a_count_of_none() -> None:
    one = model()
    optimizer = optimizer_of(one)
    update(optimizer, bad_gradients(one, "nan loss", 1.0), learning_rate=1e-2, clip=1.0)
    optimizer.uncount()
    assert same_bits(list(one.parameters()), list(model().parameters()))
    for state in optimizer.state.values():
        assert (float(state["step"]), bool(state["exp_avg"].any()), bool(state["exp_avg_sq"].any())) == (
            0,
            False,
            False,
        )


@pytest.mark.parametrize(
    ("loss", "norm", "limit", "bad"),
    [
        (2.0, 1.0, 2.0, False),  # at the limit is not above it
        (2.0000002, 1.0, 2.0, True),
        (2.0, 1.0, 3.0e38, False),
        (math.nan, 1.0, 3.0e38, True),
        (math.inf, 1.0, 3.0e38, True),
        (-math.inf, math.nan, 3.0e38, True),
        (2.0, math.inf, 3.0e38, True),
        (2.0, math.nan, 3.0e38, True),
    ],
)
def test_what_makes_a_step_bad(loss: float, norm: float, limit: float, bad: bool) -> None:
    found = Found(torch.tensor(loss), torch.tensor(0.0), torch.tensor(norm), scale=1.0)
    assert bool(found.is_bad(limit)) is bad


class Launches(TorchDispatchMode):
    """The ops that a GPU would launch something for: those that make or change a tensor."""

    QUIET = frozenset({"detach", "empty", "lift_fresh"})  # what gives a view, or no number

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (name := func.overloadpacket.__name__) not in self.QUIET:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_a_gradient_begins_and_is_clipped_by_few_launches(scale: float) -> None:
    """Each takes a GPU two microseconds and leaves it idle for some more, in a small model's step of a millisecond."""
    weight, nothing, one = torch.ones((), requires_grad=True), torch.zeros(()), torch.ones(())
    optimizer, batches = AdamW([weight]), [batch()]
    stepped: list[dict[str, Any]] = []
    optimizer.step = lambda **given: stepped.append(given)  # type: ignore[method-assign, assignment]
    unscaled = ["div"] * (scale != 1)
    with Launches() as launches:
        found = gradients(
            lambda ids, targets: (weight.exp(), nothing), [weight], batches, parts=1, scale=scale, norm=lambda _: one
        )
    assert launches.names == ["exp", "full_like", "mul", *unscaled, "stack"]
    with Launches() as launches:
        update(optimizer, found, learning_rate=1e-3, clip=0.5)
    assert launches.names == ["add", "div", "clamp", "add", *unscaled, "add", "le", "bitwise_not"]
    assert not stepped[0]["skip"]
    assert stepped[0]["grad_scale"].item() == pytest.approx(min(0.5, 1 / scale) if scale == 1 else 1 / scale, rel=1e-5)


def test_numbers_have_arrived_when_their_own_gpu_has_sent_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """With --device cuda:1 the current device is cuda:0, whose stream knows nothing of them."""

    class OnGpu:
        is_cuda, device = True, torch.device("cuda:1")

    class OnHost:
        def copy_(self, numbers: Any, non_blocking: bool) -> OnHost:
            return self

    class Event:
        def record(self, stream: Any = "the current device's") -> None:
            recorded.append(stream)

    recorded: list[Any] = []
    monkeypatch.setattr(torch, "stack", lambda tensors: OnGpu())
    monkeypatch.setattr(torch, "empty", lambda size, pin_memory: OnHost())
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"that of {device}")
    Found(*torch.zeros(3), scale=1.0)
    assert recorded == ["that of cuda:1"]
