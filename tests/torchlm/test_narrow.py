"""Training by 16-bit copies of fp32 weights: the numbers are those by casts; who has copies; resuming; loading."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fuselm.torchlm.layers import Casting
from fuselm.torchlm.state import load_weights, weight_arrays
from fuselm.torchlm.train import Interrupted, Trainer
from tests.torchlm.runs import (
    LATENT,
    MOE,
    Records,
    assert_same_arrays,
    assert_same_state,
    begin,
    of_kind,
    prepared,
    stop_after,
)

BF16: dict[str, Any] = {"precision": "bf16", "micro_batch": 4}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared(tmp_path_factory.mktemp("data"))


def copies(trainer: Trainer) -> dict[str, Tensor]:
    return {
        f"{path}.{name}": copy
        for path, module in trainer.model.named_modules()
        if isinstance(module, Casting)
        for name, (_, copy) in module.narrowed.items()
    }


def losses(records: Records) -> list[float]:
    return [record["loss"] for record in records if record["kind"] in ("step", "eval")]


@pytest.mark.parametrize(
    "model",
    [
        {},
        {"tied": True, "bias": True, "norm": "layer", "positions": "learned", "activation": "gelu"},
        {**MOE, "shared_expert": True},
        {**MOE, "bias": True},
        LATENT,
    ],
    ids=["dense", "biases", "experts", "experts with biases", "latent"],
)
def test_a_run_by_copies_has_the_bits_of_one_by_casts(
    model: dict[str, Any], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for the norm of gradients, whose sums are in another order: so nothing is clipped here."""
    by_copies, told = begin(tmp_path / "copies", data, model=model, train={**BF16, "clip": 0.0})
    by_copies.train()
    assert len(copies(by_copies)) >= 4
    monkeypatch.setattr(Trainer, "_narrow", lambda self: list(self.parameters))
    by_casts, also_told = begin(tmp_path / "casts", data, model=model, train={**BF16, "clip": 0.0})
    by_casts.train()
    assert not copies(by_casts)
    assert losses(told) == losses(also_told)
    assert_same_state(by_copies.run, by_casts.run)


def test_with_clipping_a_run_by_copies_learns_the_same(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, told = (trainer, _) = begin(tmp_path / "copies", data, train={**BF16, "clip": 0.1})
    trainer.train()
    monkeypatch.setattr(Trainer, "_narrow", lambda self: list(self.parameters))
    trainer, also_told = begin(tmp_path / "casts", data, train={**BF16, "clip": 0.1})
    trainer.train()
    assert losses(told) == pytest.approx(losses(also_told), rel=1e-3)
    assert of_kind(told, "step")[0]["gradient_norm"] == pytest.approx(
        of_kind(also_told, "step")[0]["gradient_norm"], rel=1e-6
    )


def test_weights_that_are_cast_at_each_use_have_twins_and_no_others(data: Path, tmp_path: Path) -> None:
    trainer, _ = begin(tmp_path / "run", data, model={**MOE, "bias": True}, train=BF16)
    assert not copies(trainer)  # before the first step weights may come from anywhere
    trainer.advance()
    found = copies(trainer)
    assert set(found) == {
        f"layers.0.{name}" for name in ("attention.qkv.weight", "attention.out.weight", "mlp.up", "mlp.down")
    }
    weights = dict(trainer.model.named_parameters())
    assert weights.keys() >= {"embedding", "head.weight", "layers.0.mlp.router.weight"}
    for name, copy in found.items():
        assert torch.equal(copy, weights[name].to(torch.bfloat16))
        assert weights[name].dtype == torch.float32
        assert weights[name].grad is None
        assert copy.grad is not None
        assert copy.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("options", [{"precision": "fp32", "micro_batch": 4}, {"precision": "bf16", "micro_batch": 2}])
def test_fp32_and_batches_in_parts_have_no_copies(options: dict[str, Any], data: Path, tmp_path: Path) -> None:
    trainer, _ = begin(tmp_path / "run", data, train=options)
    trainer.advance()
    assert not copies(trainer)


@pytest.mark.parametrize("model", [{"dropout": 0.1}, MOE])
def test_a_resumed_run_by_copies_has_the_bits_of_a_whole_one(model: dict[str, Any], data: Path, tmp_path: Path) -> None:
    whole, _ = begin(tmp_path / "whole", data, model=model, train=BF16)
    whole.train()
    first, _ = begin(tmp_path / "parts", data, model=model, train=BF16)
    stop_after(first, 5)
    with pytest.raises(Interrupted):
        first.train()
    second, _ = begin(tmp_path / "parts", data, model=model, train=BF16)
    second.train()
    assert_same_state(second.run, whole.run)


def test_weights_that_are_loaded_into_a_run_under_way_are_used(data: Path, tmp_path: Path) -> None:
    trainer, _ = begin(tmp_path / "run", data, train=BF16)
    trainer.advance()
    other, _ = begin(tmp_path / "other", data, train={**BF16, "seed": 8})
    load_weights(trainer.model, weight_arrays(other.model))
    trainer._gradients()
    weights = dict(trainer.model.named_parameters())
    for name, copy in copies(trainer).items():
        assert torch.equal(copy, weights[name].to(torch.bfloat16))
    assert_same_arrays(weight_arrays(trainer.model), weight_arrays(other.model))


def test_weights_that_are_loaded_are_evaluated_and_sampled_at_once(data: Path, tmp_path: Path) -> None:
    trainer, _ = begin(tmp_path / "run", data, train=BF16)
    for _ in range(3):
        trainer.advance()
    other, _ = begin(tmp_path / "other", data, train={**BF16, "seed": 8})
    load_weights(trainer.model, weight_arrays(other.model))
    assert trainer.evaluation().loss == other.evaluation().loss
    assert trainer.texts(2, 20, seed=1) == other.texts(2, 20, seed=1)


def test_a_copied_model_is_the_one_that_its_weights_say(data: Path, tmp_path: Path) -> None:
    trainer, _ = begin(tmp_path / "run", data, train=BF16)
    trainer.advance()
    copied, (other, _) = deepcopy(trainer.model), begin(tmp_path / "other", data, train={**BF16, "seed": 8})
    load_weights(copied, weight_arrays(other.model))
    ids = torch.arange(8)[None]
    assert torch.equal(copied(ids), other.model(ids))
    assert copies(trainer)  # which it has kept


def test_a_gradient_from_before_the_first_step_counts_for_nothing(data: Path, tmp_path: Path) -> None:
    (trainer, told), (plain, also_told) = (begin(tmp_path / name, data, train=BF16) for name in ("one", "other"))
    ids = torch.arange(8).view(1, 8)
    trainer.model.loss(ids, ids)[0].backward()
    for one in (trainer, plain):
        one.train()
    assert losses(told) == losses(also_told)


def test_a_gradient_that_somebody_asks_for_between_steps_counts_for_nothing(data: Path, tmp_path: Path) -> None:
    (trainer, told), (plain, also_told) = (begin(tmp_path / name, data, train=BF16) for name in ("one", "other"))
    ids = torch.arange(8).view(1, 8)
    for one in (trainer, plain):
        one.advance()
    trainer.model.eval()  # where the model computes with the weights themselves
    trainer.model.loss(ids, ids)[0].backward()
    trainer.model.train()
    for one in (trainer, plain):
        one.train()
    assert losses(told) == losses(also_told)


def test_an_evaluation_that_is_interrupted_leaves_a_model_in_training(data: Path, tmp_path: Path) -> None:
    trainer, _ = begin(tmp_path / "run", data, train=BF16)
    trainer.advance()

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    trainer.on_evaluation = interrupt
    with pytest.raises(KeyboardInterrupt):
        trainer.evaluation()
    assert trainer.model.training
    trainer.advance()


@pytest.mark.parametrize("micro_batch", [4, 2])
def test_a_frozen_weight_stays_in_a_run_by_copies_as_in_one_without(
    micro_batch: int, data: Path, tmp_path: Path
) -> None:
    trainer, _ = begin(tmp_path / "run", data, train={**BF16, "micro_batch": micro_batch})
    mlp, attention = trainer.model.layers[0].mlp, trainer.model.layers[0].attention
    frozen = [mlp.up.weight.requires_grad_(False), attention.out.weight]
    before = [weight.detach().clone() for weight in (*frozen, mlp.down.weight)]
    trainer.advance()
    assert torch.equal(frozen[0], before[0])
    assert not torch.equal(frozen[1], before[1])
    before[1] = frozen[1].requires_grad_(False).detach().clone()
    trainer.advance()
    assert [torch.equal(old, now) for old, now in zip(before, (*frozen, mlp.down.weight), strict=True)] == [
        True,
        True,
        False,
    ]


def test_weights_that_are_put_in_the_place_of_a_models_are_used(data: Path, tmp_path: Path) -> None:
    trainer, _ = begin(tmp_path / "run", data, train=BF16)
    trainer.advance()
    model, ids = trainer.model, torch.arange(8)[None]
    assert model.training
    others = {name: torch.full_like(weight, 0.01) for name, weight in model.named_parameters()}
    found = torch.func.functional_call(model, others, (ids,))
    other, _ = begin(tmp_path / "other", data, train=BF16)
    other.model.load_state_dict(others, assign=True)
    assert torch.equal(found, other.model(ids))
    model.load_state_dict(others, assign=True)
    assert torch.equal(model(ids), found)


def test_a_weight_whose_gradient_somebody_waits_for_has_no_copy(data: Path, tmp_path: Path) -> None:
    trainer, _ = begin(tmp_path / "run", data, train={**BF16, "weight_decay": 0.0})
    mlp = trainer.model.layers[0].mlp
    mlp.up.weight.register_hook(torch.zeros_like)
    before = mlp.up.weight.detach().clone()
    trainer.advance()
    assert torch.equal(mlp.up.weight, before)
    assert not mlp.up.narrowed
    assert mlp.down.narrowed


@pytest.mark.filterwarnings("default")  # the compiler's own
def test_a_compiled_loss_computes_with_copies(data: Path, tmp_path: Path) -> None:
    trainer, _ = begin(tmp_path / "run", data, train=BF16)
    trainer.advance()
    torch.compiler.reset()
    compiled = torch.compile(trainer.model.loss, backend="aot_eager", fullgraph=True)
    [(inputs, targets)] = trainer.feed.next(4)
    found = []
    for loss in (trainer.model.loss, compiled):
        for copy in copies(trainer).values():
            copy.grad = None
        loss(inputs, targets)[0].backward()
        found.append([copy.grad for copy in copies(trainer).values()])
    for one, other in zip(*found, strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)
