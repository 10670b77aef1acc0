"""The decoder against a float64 oracle, for every kind of part a config can ask for, and what a decoder must never do.

Truth is tests/torchlm/oracle.py. Attention's paths and caches are in test_attention.py, mixtures in test_mlp.py.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fuselm.config import PRESETS, ModelConfig, TrainConfig, ops_used, preset
from fuselm.kernels.torch_ops.choose import GOES_WITH
from fuselm.kernels.torch_ops.rms_norm import rms_norm, rms_norm_reference
from fuselm.optim import AdamW, decay_groups
from fuselm.torchlm.model import Transformer
from fuselm.torchlm.step import gradients, update
from tests.torchlm import oracle

VOCAB, TOKENS = 13, 7
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "context": 9,
    "num_layers": 2,
    "width": 16,
    "num_heads": 4,
    "ffn_width": 24,
}
LATENT: dict[str, Any] = {"attention": "latent", "kv_latent": 8, "rope_head_dim": 6}
GPT2: dict[str, Any] = {"norm": "layer", "positions": "learned", "activation": "gelu", "bias": True, "tied": True}
ZOO: dict[str, dict[str, Any]] = {
    "mha": {},
    "gqa": {"num_kv_heads": 2},
    "mqa": {"num_kv_heads": 1, "bias": True},
    "head-dim-and-theta": {"head_dim": 6, "rope_theta": 50.0},
    "qk-norm": {"qk_norm": True, "norm_eps": 0.01},
    "qk-norm-learned": {"qk_norm": True, "positions": "learned", "num_kv_heads": 2},
    "mla": LATENT,
    "mla-q-latent": {**LATENT, "q_latent": 12, "bias": True},
    "mla-qk-norm": {**LATENT, "rope_head_dim": 2, "qk_norm": True, "rope_theta": 20.0},
    "gpt2": GPT2,
    "layer-norm-without-bias": {"norm": "layer", "norm_eps": 0.1},
    "geglu": {"activation": "geglu", "bias": True},
    "gelu": {"activation": "gelu"},
    "silu": {"activation": "silu"},
    "relu2": {"activation": "relu2"},
    "tied": {"tied": True},
    "softcap": {"softcap": 2.0},
    "moe": {"num_experts": 4, "balance_weight": 0.3},
    "moe-shared": {"num_experts": 4, "experts_per_token": 3, "shared_expert": True, "bias": True, "activation": "gelu"},
    "moe-one-expert": {"num_experts": 3, "experts_per_token": 1, "balance_weight": 1.0, "activation": "geglu"},
    "moe-all-experts": {"num_experts": 3, "experts_per_token": 3, "activation": "relu2", "tied": True},
    "moe-mla": {**LATENT, "num_experts": 4, "shared_expert": True},
}


def config_of(name: str, **more: Any) -> ModelConfig:
    return ModelConfig(**{**SMALL, **ZOO[name], **more})


def ids_and_targets(rows: int = 2, tokens: int = TOKENS, seed: int = 0) -> tuple[Tensor, Tensor]:
    ids, targets = oracle.some_ids(rows, tokens, VOCAB, seed), oracle.some_ids(rows, tokens, VOCAB, seed + 1)
    targets[0, 2] = -100  # one place that is not counted
    return ids, targets


# ---- against the oracle ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["sdpa", "written"])
@pytest.mark.parametrize("name", ZOO)
def test_logits_and_loss_are_the_oracles(name: str, path: str) -> None:
    config = config_of(name, attention_path=path)
    model, (ids, targets) = oracle.stirred(config, seed=3), ids_and_targets()
    weights = oracle.weights_of(model)
    logits, balance = oracle.decode(config, weights, ids.numpy())
    np.testing.assert_allclose(model(ids).detach().numpy(), logits, rtol=0, atol=2e-5)
    found, found_balance = model.loss(ids, targets)
    whole = found.item() + config.balance_weight * found_balance.item()
    assert whole == pytest.approx(oracle.loss(config, weights, ids.numpy(), targets.numpy()), abs=2e-6)
    assert found_balance.item() == pytest.approx(balance, abs=2e-6)


@pytest.mark.parametrize("name", ZOO)
def test_gradients_are_the_slopes_of_the_oracle(name: str) -> None:
    """Of every parameter, along a random direction: a gradient that is off anywhere is off along nearly every one."""
    # The paths of attention differ in their gradients too; each config takes one of them, the next the other.
    config = config_of(name, attention_path="written" if list(ZOO).index(name) % 2 else "sdpa")
    model, (ids, targets) = oracle.stirred(config, seed=4), ids_and_targets(seed=2)
    found, balance = model.loss(ids, targets)
    (found + config.balance_weight * balance).backward()
    weights, rng = oracle.weights_of(model), np.random.default_rng(0)

    def truth(arrays: oracle.Weights) -> float:
        return oracle.loss(config, arrays, ids.numpy(), targets.numpy())

    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None, parameter_name
        mine = parameter.grad.double().numpy()
        direction = rng.standard_normal(mine.shape)
        expected = oracle.slope(truth, weights, parameter_name, direction)
        allowed = 2e-5 * np.linalg.norm(mine) + 2e-8
        assert abs((mine * direction).sum() - expected) <= allowed, parameter_name


def test_the_loss_of_each_place_is_that_of_its_logits() -> None:
    model, (ids, targets) = oracle.stirred(config_of("softcap")), ids_and_targets()
    losses, _ = model.loss(ids, targets, reduction="none")
    expected = oracle.cross_entropy(model(ids).detach().double().numpy(), targets.numpy(), reduction="none")
    np.testing.assert_allclose(losses.detach().numpy(), expected, rtol=0, atol=2e-6)


def test_the_bound_on_logits_is_one_of_training() -> None:
    model, batch, bounds = Transformer(config_of("mha")), ids_and_targets(), []
    whole = model.ops.linear_cross_entropy

    def watched(*args: Any, **options: Any) -> Tensor:
        bounds.append(options["max_bytes"])
        found: Tensor = whole(*args, **options)
        return found

    model.ops.__dict__["linear_cross_entropy"] = watched
    expected, _ = model.loss(*batch)
    model.logits_bytes = 4 * VOCAB  # a row a block
    torch.testing.assert_close(model.loss(*batch)[0], expected)
    model.eval().loss(*batch)
    assert bounds == [None, 4 * VOCAB, None]


@pytest.mark.parametrize("name", ["mha", "mla", "gpt2", "moe"])
def test_plain_torch_and_auto_agree(name: str) -> None:
    (ids, targets), found = ids_and_targets(), []
    for options in ({"impl": "auto"}, {"impl": "torch"}, {"op_impl": {"embedding": "torch"}}):
        model = oracle.stirred(config_of(name, **options))
        loss, balance = model.loss(ids, targets)
        parameters = list(model.parameters())
        found.append((model(ids), *torch.autograd.grad(loss + balance, parameters)))
    for others in found[1:]:
        for one, other in zip(found[0], others, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("path", ["sdpa", "written"])
@pytest.mark.parametrize("name", ["qk-norm-learned", "mla-q-latent", "gpt2", "moe-shared"])
def test_a_model_takes_every_op_from_what_its_config_chooses(name: str, path: str) -> None:
    """Each op that is put in the place of another is called, by whatever part needs it."""
    model, used = oracle.stirred(config_of(name, attention_path=path)), set()

    def noting(op: str, function: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            used.add(GOES_WITH.get(op, op))
            return function(*arguments, **options)

        return call

    for op in model.ops.impls:
        setattr(model.ops, op, noting(op, getattr(model.ops, op)))
    model.loss(*ids_and_targets())
    config = model.config
    expected = {"embedding", "linear_cross_entropy"} | ({"rope"} if config.positions == "rope" else set())
    expected |= {"rms_norm"} if config.norm == "rms" or config.qk_norm or config.attention == "latent" else set()
    expected |= ({"layer_norm"} if config.norm == "layer" else set()) | ({"softmax"} if path == "written" else set())
    expected |= {"softmax", "mul"} if config.num_experts else set()  # the router's, and its weights
    expected |= {"add"} if config.shared_expert else set()
    # The activation was taken when the model was made.
    assert used - {config.activation} == expected
    assert set(ops_used(config)) == expected | {config.activation}


def test_an_op_that_is_put_back_is_put_back() -> None:
    model = oracle.stirred(config_of("mha", op_impl={"rms_norm": "torch"}))
    assert model.ops.rms_norm is rms_norm_reference
    assert oracle.stirred(config_of("mha")).ops.rms_norm is rms_norm


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", ["mha", "mla-q-latent", "gpt2", "moe-shared"])
def test_biases_are_there_if_they_are_asked_for(name: str, bias: bool) -> None:
    """Of every linear layer but the head and the router, of every expert, and of LayerNorm."""
    names = [key for key, _ in Transformer(config_of(name, bias=bias)).named_parameters()]
    without = {key.removesuffix(".weight") for key in names if not key.endswith("bias")}
    biased = {key.removesuffix(".bias").removesuffix("_bias") for key in names if key.endswith("bias")}
    norms = {key for key in without if key.endswith("norm")}
    never = {"embedding", "positions", "head", *(key for key in without if key.endswith("router"))}
    assert biased == (without - never - (norms if ZOO[name].get("norm") != "layer" else set()) if bias else set())


# ---- what a decoder never does --------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["sdpa", "written"])
@pytest.mark.parametrize("name", ["mha", "gqa", "mla", "gpt2", "moe"])
@torch.no_grad()
def test_a_token_changes_nothing_before_it(name: str, path: str) -> None:
    model = oracle.stirred(config_of(name, attention_path=path))
    ids = oracle.some_ids(2, TOKENS, VOCAB)
    before = model(ids)
    for place in range(TOKENS):
        other = ids.clone()
        other[:, place] = (other[:, place] + 1) % VOCAB
        after = model(other)
        torch.testing.assert_close(after[:, :place], before[:, :place], rtol=0, atol=2e-6)
        moved = (after - before).abs().amax(-1)[:, place:]  # every place from there on sees it
        assert moved.min() > 1e-4


@pytest.mark.parametrize("name", ["gqa", "mla", "gpt2", "moe"])
@torch.no_grad()
def test_a_row_does_not_depend_on_the_rows_beside_it(name: str) -> None:
    model = oracle.stirred(config_of(name))
    ids = oracle.some_ids(3, TOKENS, VOCAB)
    together = model(ids)
    for row in range(3):
        torch.testing.assert_close(model(ids[row : row + 1]), together[row : row + 1], rtol=0, atol=5e-6)
    assert (together[0] - together[1]).abs().max() > 0.1


@pytest.mark.parametrize("name", ["mha", "gpt2"])
def test_a_row_longer_than_the_context_is_refused(name: str) -> None:
    model = Transformer(config_of(name))
    assert torch.isfinite(model(oracle.some_ids(1, 9, VOCAB))).all()
    with pytest.raises(ValueError, match=r"at most context = 9 tokens; got 10. Cut it, or train"):
        model(oracle.some_ids(1, 10, VOCAB))


# ---- how weights begin ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "mla-q-latent", "moe-shared"])
def test_a_seed_decides_every_weight(name: str) -> None:
    state = torch.get_rng_state()
    one, twin, other = (Transformer(config_of(name), seed=seed).state_dict() for seed in (7, 7, 8))
    assert torch.equal(torch.get_rng_state(), state)  # a model takes nothing from the global generator
    for key, value in one.items():
        assert torch.equal(value, twin[key]), key
        constant = value.dim() < 2 or key.endswith("bias")
        assert torch.equal(value, other[key]) == constant, key


@pytest.mark.parametrize(("init_std", "std"), [(None, 1 / 8), (0.02, 0.02)])
@pytest.mark.parametrize("more", [{}, {"num_experts": 4, "shared_expert": True}])
def test_weights_begin_with_the_deviation_they_should(more: dict[str, Any], init_std: float | None, std: float) -> None:
    """Matrices that write to the residual stream begin smaller by the root of how many do; vectors begin at 1 or 0."""
    shape = {
        **SMALL,
        "width": 64,
        "num_layers": 8,
        "ffn_width": 128,
        "vocab_size": 64,
        "context": 64,
        "init_std": init_std,
    }
    model = Transformer(ModelConfig(**{**shape, **more, "positions": "learned", "norm": "layer", "bias": True}))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif parameter.dim() == 1:
            assert torch.equal(parameter, torch.ones_like(parameter)), name
        else:
            writes = name.removesuffix(".weight").split(".")[-1] in ("out", "down")
            expected = std / math.sqrt(16) if writes else std
            noise = 4 / math.sqrt(2 * parameter.numel())  # four standard deviations of a sample's deviation
            assert parameter.std().item() == pytest.approx(expected, rel=noise), name
            assert abs(parameter.mean().item()) < 4 * expected / math.sqrt(parameter.numel()), name


# ---- dropout --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["sdpa", "written"])
@pytest.mark.parametrize("name", ["mha", "mla", "moe"])
@torch.no_grad()
def test_dropout_acts_in_training_alone(name: str, path: str) -> None:
    ids = oracle.some_ids(2, TOKENS, VOCAB)
    with_dropout, without = (
        oracle.stirred(config_of(name, attention_path=path, dropout=share)) for share in (0.25, 0.0)
    )
    assert torch.equal(with_dropout.eval()(ids), without.eval()(ids))
    assert torch.equal(without.train()(ids), without.eval()(ids))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        first, second = with_dropout.train()(ids), with_dropout(ids)
        torch.manual_seed(0)
        assert torch.equal(with_dropout(ids), first)
    assert (first - second).abs().max() > 0.01


@torch.no_grad()
def test_both_halves_of_a_block_and_the_embedding_are_dropped() -> None:
    """A share of exactly what is dropped is 0: of what a block adds, and of the embedding that the first one reads."""
    config = config_of("mha", dropout=0.5, positions="learned")
    model = oracle.stirred(config).train()
    read: list[Tensor] = []
    block: Any = model.layers[0]
    block.register_forward_hook(lambda _block, inputs, outputs: read.extend((inputs[0], outputs[0])))
    block.mlp_norm.register_forward_hook(lambda _norm, inputs, _outputs: read.append(inputs[0]))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model(oracle.some_ids(8, 9, VOCAB))
    after_attention, embedded, after_mlp = read
    for x in (embedded, after_attention, after_mlp):
        # 1152 draws: five standard deviations are 0.074.
        assert (x == 0).double().mean().item() == pytest.approx(0.5, abs=0.074)


# ---- training -------------------------------------------------------------------------------------------------------


def trained(model: Transformer, plan: TrainConfig, batch: tuple[Tensor, Tensor], steps: int) -> list[float]:
    """Losses of steps on one batch that is given in two parts, the last one measured after the last step."""
    optimizer = AdamW(
        decay_groups(model.named_parameters(), plan.weight_decay), plan.learning_rate, plan.betas, plan.eps
    )
    parameters, losses = list(model.parameters()), []
    parts = list(zip(*(tensor.chunk(2) for tensor in batch), strict=True))
    for _ in range(steps + 1):
        found = gradients(model.loss, parameters, parts, parts=len(parts), balance_weight=model.config.balance_weight)
        losses.append(found.outcome().loss)
        if len(losses) <= steps:
            update(optimizer, found, learning_rate=plan.learning_rate, clip=plan.clip)
    return losses


@pytest.mark.parametrize("more", [{}, {"q_latent": 12, "qk_norm": True}])
def test_latent_attention_learns(more: dict[str, Any]) -> None:
    model = Transformer(config_of("mla", **more), seed=1)
    ids = oracle.some_ids(4, 9, VOCAB)
    losses = trained(model, TrainConfig(learning_rate=1e-2, weight_decay=0.0), (ids[:, :-1], ids[:, 1:]), steps=30)
    assert losses[0] > 0.9 * math.log(VOCAB)
    assert losses[-1] < 0.4 * losses[0]


def reduced(name: str) -> ModelConfig:
    """The preset's model with every kind of part it has, but fewer layers, narrower heads, fewer words and places."""
    full = preset(name)
    wide = full.model(vocab_size=64)
    width = wide.num_heads * (8 if wide.num_heads <= 8 else 4)
    ffn = 8 * round(wide.ffn_width * width / wide.width / 8)
    return full.model(
        vocab_size=64, width=width, ffn_width=ffn, num_layers=min(wide.num_layers, 2), context=min(wide.context, 16)
    )


@pytest.mark.parametrize("name", PRESETS)
def test_ten_steps_of_every_preset_bring_the_loss_down(name: str) -> None:
    """With the preset's own optimiser and dropout; the full sizes are for a GPU."""
    config, plan = reduced(name), preset(name).train()
    model = Transformer(config, seed=1)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    ids = oracle.some_ids(8, config.context + 1, 64)
    batch = ids[:, :-1], ids[:, 1:]
    start = model.eval().loss(*batch)[0].item()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        losses = trained(model.train(), plan, batch, steps=10)
    assert all(math.isfinite(loss) for loss in losses)
    assert model.eval().loss(*batch)[0].item() < start - 0.3
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.any(), f"{key} has no gradient"  # decay alone would move it too
        assert torch.isfinite(parameter).all(), key
        assert not torch.equal(parameter, before[key]), f"{key} did not move"


def test_latent_projections_begin_as_other_matrices_do() -> None:
    shape = {**SMALL, **LATENT, "width": 64, "num_layers": 8, "q_latent": 32, "kv_latent": 32}
    for name, parameter in Transformer(ModelConfig(**shape)).named_parameters():
        if name.endswith(("q_down.weight", "kv_down.weight")):
            within = 4 / math.sqrt(2 * parameter.numel())
            assert parameter.std().item() == pytest.approx(1 / 8, rel=within), name
