"""The feed-forward half: the mixture's routing, its grouped matmul and its balance against loops in float64.

Truth is tests/torchlm/oracle.py. Mixtures inside a model, with their gradients, are in test_model.py too.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fuselm import ops
from fuselm.config import ModelConfig
from fuselm.optim import AdamW
from fuselm.torchlm.mlp import MLP, MoE, route
from fuselm.torchlm.model import Transformer
from tests.torchlm import oracle

OPS = ops.choose("auto", device="cpu")
WIDTH, EXPERTS = 8, 6
SMALL: dict[str, Any] = {
    "vocab_size": 13,
    "context": 8,
    "num_layers": 1,
    "width": WIDTH,
    "num_heads": 2,
    "ffn_width": 16,
    "num_experts": EXPERTS,
}


def vectors(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def mixture_of(seed: int = 0, **more: Any) -> MoE:
    """The mixture of a model all of whose weights are random."""
    mixture = oracle.stirred(ModelConfig(**{**SMALL, **more}), seed).layers[0].mlp
    assert isinstance(mixture, MoE)
    return mixture


def truth(mixture: MoE, x: Tensor) -> tuple[np.ndarray, float]:
    weights = {f"mlp.{name}": array for name, array in oracle.weights_of(mixture).items()}
    y, balance = oracle.mixture(mixture.config, weights, "mlp", x.detach().double().numpy().reshape(-1, WIDTH))
    return y.reshape(x.shape), balance


def send_to(mixture: MoE, experts: list[int]) -> None:
    """A router that prefers these experts for every token whose numbers are all above 0, the first one most."""
    with torch.no_grad():
        mixture.router.weight.fill_(-1.0)
        for rank, expert in enumerate(experts):
            mixture.router.weight[expert] = 1.0 - 0.1 * rank


# ---- routing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("experts_per_token", [1, 2, EXPERTS])
def test_tokens_go_where_a_loop_over_them_says(experts_per_token: int) -> None:
    logits = 2 * vectors(40, EXPERTS)
    found = route(logits, experts_per_token, OPS)
    expected = oracle.route(logits.double().numpy(), experts_per_token)
    assert found.experts.tolist() == expected.experts
    np.testing.assert_allclose(found.weights.numpy(), expected.weights, rtol=1e-6)
    assert found.balance.item() == pytest.approx(expected.balance, rel=1e-6)


@pytest.mark.parametrize("experts_per_token", [1, 2, 3])
def test_even_routing_has_a_balance_of_1(experts_per_token: int) -> None:
    """Token m likes expert m best, m + 1 next, and so on around."""
    row = torch.linspace(2.0, -2.0, EXPERTS)
    logits = torch.stack([row.roll(shift) for shift in range(EXPERTS)])
    assert route(logits, experts_per_token, OPS).balance.item() == pytest.approx(1.0, abs=1e-6)


def test_one_expert_that_does_it_all_has_the_worst_balance() -> None:
    logits = torch.full((10, EXPERTS), -50.0)
    logits[:, 4] = 50.0
    assert route(logits, 1, OPS).balance.item() == pytest.approx(EXPERTS, rel=1e-6)


def test_the_balance_pushes_down_what_is_visited_too_often() -> None:
    """Its gradient is that of the probabilities alone, the shares of visits being held: as differences say."""
    logits = vectors(12, EXPERTS)
    logits[:, 0] += 3.0
    leaf = logits.clone().requires_grad_()
    (found,) = torch.autograd.grad(route(leaf, 2, OPS).balance, leaf)

    def balance(arrays: oracle.Weights) -> float:
        return oracle.route(arrays["logits"], 2).balance

    expected = oracle.gradient(balance, {"logits": logits.double().numpy()}, "logits")
    np.testing.assert_allclose(found.numpy(), expected, rtol=0, atol=1e-7)
    assert (found[:, 0] > 0).all()  # a step against it visits expert 0 less


# ---- the mixture ----------------------------------------------------------------------------------------------------

KINDS: dict[str, dict[str, Any]] = {
    "swiglu": {},
    "one-expert": {"experts_per_token": 1},
    "all-experts": {"experts_per_token": EXPERTS, "activation": "silu"},
    "bias": {"bias": True, "activation": "gelu"},
    "gated-bias": {"bias": True, "activation": "geglu", "experts_per_token": 3},
    "shared": {"shared_expert": True, "bias": True, "activation": "relu2"},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(2, 7), (1, 1), (3, 40)], ids=str)
def test_no_token_is_dropped(kind: str, shape: tuple[int, int]) -> None:
    mixture, x = mixture_of(**KINDS[kind]), vectors(*shape, WIDTH)
    y, balance = mixture(x)
    expected, expected_balance = truth(mixture, x)
    np.testing.assert_allclose(y.detach().numpy(), expected, rtol=0, atol=1e-5)
    assert balance.item() == pytest.approx(expected_balance, rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_every_weight_and_of_the_tokens_are_the_oracles(kind: str) -> None:
    mixture, x, cotangent = mixture_of(**KINDS[kind]), vectors(2, 7, WIDTH), vectors(2, 7, WIDTH, seed=1)
    leaf = x.clone().requires_grad_()
    y, balance = mixture(leaf)
    ((y * cotangent).sum() + 0.5 * balance).backward()
    arrays = {f"mlp.{name}": array for name, array in oracle.weights_of(mixture).items()}
    arrays["x"] = x.double().numpy()
    rng = np.random.default_rng(0)

    def whole(given: oracle.Weights) -> float:
        out, loss = oracle.mixture(mixture.config, given, "mlp", given["x"].reshape(-1, WIDTH))
        return float((out * cotangent.double().numpy().reshape(-1, WIDTH)).sum() + 0.5 * loss)

    gradients = {f"mlp.{name}": parameter.grad for name, parameter in mixture.named_parameters()} | {"x": leaf.grad}
    for name, gradient in gradients.items():
        assert gradient is not None, name
        mine = gradient.double().numpy()
        for _ in range(3):
            direction = rng.standard_normal(mine.shape)
            expected = oracle.slope(whole, arrays, name, direction)
            assert abs((mine * direction).sum() - expected) <= 2e-5 * np.linalg.norm(mine) + 1e-7, name


@pytest.mark.parametrize("more", [{}, {"bias": True, "activation": "gelu"}])
def test_equal_experts_are_one_dense_layer(more: dict[str, Any]) -> None:
    """Shares sum to 1, so whoever is asked, the answer is that of the one expert they all are."""
    dense = MLP(ModelConfig(**{**SMALL, **more}), OPS)
    mixture = mixture_of(**more)
    with torch.no_grad():
        for seed, parameter in enumerate(dense.parameters()):
            parameter.copy_(vectors(*parameter.shape, seed=seed))
        mixture.up.copy_(dense.up.weight.T.expand_as(mixture.up))
        mixture.down.copy_(dense.down.weight.T.expand_as(mixture.down))
        for ours, theirs in ((mixture.up_bias, dense.up.bias), (mixture.down_bias, dense.down.bias)):
            if ours is not None and theirs is not None:
                ours.copy_(theirs.expand_as(ours))
    x = vectors(2, 7, WIDTH)
    torch.testing.assert_close(mixture(x)[0], dense(x), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("busy", [[0, 1], [2, 5], [5, 4]], ids=str)
@pytest.mark.parametrize("more", [{}, {"bias": True, "activation": "gelu"}])
def test_experts_that_nobody_visits_have_no_gradient(busy: list[int], more: dict[str, Any]) -> None:
    """The first, the last and whole runs of groups are empty: the others' numbers must not suffer."""
    mixture, x = mixture_of(**more), vectors(2, 7, WIDTH).abs()
    send_to(mixture, busy)
    y, _ = mixture(x)
    y.square().sum().backward()
    np.testing.assert_allclose(y.detach().numpy(), truth(mixture, x)[0], rtol=0, atol=1e-5)
    idle = [expert for expert in range(EXPERTS) if expert not in busy]
    for parameter in (mixture.up, mixture.down, mixture.up_bias, mixture.down_bias):
        if parameter is not None:
            assert parameter.grad is not None
            assert not parameter.grad[idle].any()
            assert all(parameter.grad[expert].any() for expert in busy)


def test_the_router_learns_from_the_result_alone() -> None:
    """Nothing else may change, and 0 is wanted: the router comes to prefer the one expert that says 0."""
    mixture, x = mixture_of(experts_per_token=3), vectors(4, 16, WIDTH)
    with torch.no_grad():
        mixture.down[3] = 0.0
    optimizer = AdamW([mixture.router.weight], lr=0.05, weight_decay=0.0)
    losses = []
    for _ in range(30):
        mixture.zero_grad()
        loss = mixture(x)[0].square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_mixture_that_starts_unbalanced_is_balanced_by_training(seed: int) -> None:
    model = Transformer(ModelConfig(**{**SMALL, "experts_per_token": 1, "balance_weight": 0.1}), seed=seed)
    block: Any = model.layers[0]
    with torch.no_grad():  # one number that every token has, and one expert that goes by it
        model.embedding[:, 0] = 2.0
        block.mlp.router.weight[0, 0] = 2.0
    ids, targets = oracle.some_ids(8, 8, 13), oracle.some_ids(8, 8, 13, seed=1)
    optimizer = AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    balances = []
    for _ in range(30):
        model.zero_grad()
        loss, balance = model.loss(ids, targets)
        (loss + model.config.balance_weight * balance).backward()
        optimizer.step()
        balances.append(balance.item())
    assert balances[0] > 3.0
    assert balances[-1] < 1.5


# ---- dense ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["swiglu", "geglu", "gelu", "silu", "relu2"])
@pytest.mark.parametrize("bias", [False, True])
def test_the_dense_layer_is_its_formula(name: str, bias: bool) -> None:
    layer = MLP(ModelConfig(**{**SMALL, "num_experts": 0, "activation": name, "bias": bias}), OPS)
    with torch.no_grad():
        for seed, parameter in enumerate(layer.parameters()):
            parameter.copy_(vectors(*parameter.shape, seed=seed))
    x = vectors(2, 7, WIDTH, seed=9)
    weights = oracle.weights_of(layer)
    hidden = oracle.activated(name, x.double().numpy() @ weights["up.weight"].T + weights.get("up.bias", 0.0))
    expected = hidden @ weights["down.weight"].T + weights.get("down.bias", 0.0)
    np.testing.assert_allclose(layer(x).detach().numpy(), expected, rtol=1e-5, atol=1e-4)
