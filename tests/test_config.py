"""Configs: every rule with its sentence, JSON there and back, what somebody types, and what the presets promise."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest

from fuselm.config import PRESETS, ConfigError, ModelConfig, TrainConfig, changed, from_json, parsed, preset, to_json

SMALL: dict[str, Any] = {
    "vocab_size": 100,
    "context": 32,
    "num_layers": 2,
    "width": 48,
    "num_heads": 6,
    "ffn_width": 64,
}
LATENT: dict[str, Any] = {"attention": "latent", "kv_latent": 16, "rope_head_dim": 4}


def model(**changes: Any) -> ModelConfig:
    return ModelConfig(**{**SMALL, **changes})


def training(**changes: Any) -> TrainConfig:
    return TrainConfig(**changes)


# ---- rules of a model -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        # heads
        ({"num_heads": 5}, "num_heads divides width, unless head_dim is given; got width 48 and 5 heads. Take 4 heads"),
        ({"num_heads": 7}, "got width 48 and 7 heads. Take 6 heads, or give head_dim"),
        ({"num_kv_heads": 4}, "num_kv_heads divides num_heads; got 4 for 6. Take 3"),
        ({"num_kv_heads": 12}, "num_kv_heads divides num_heads; got 12 for 6. Take 6"),
        ({"head_dim": 5}, "RoPE turns pairs, so what it turns is even; got a head of 5. Use an even"),
        ({"num_heads": 16}, "so what it turns is even; got a head of 3"),
        # latent attention
        ({**LATENT, "rope_head_dim": 3}, "so what it turns is even; got a head of 3"),
        (
            {**LATENT, "kv_latent": None},
            "attention='latent' needs kv_latent and rope_head_dim; got one of them missing",
        ),
        ({**LATENT, "rope_head_dim": None}, "attention='latent' needs kv_latent and rope_head_dim; got one"),
        ({**LATENT, "positions": "learned"}, "keeps positions by RoPE; got positions='learned'. Use positions='rope'"),
        ({**LATENT, "num_kv_heads": 3}, "makes keys of every head; got num_kv_heads. Leave that out"),
        ({"kv_latent": 16}, "kv_latent is for attention='latent'; got 'heads'. Leave it out"),
        ({"q_latent": 16}, "q_latent is for attention='latent'; got 'heads'. Leave it out"),
        ({"rope_head_dim": 4}, "rope_head_dim is for attention='latent'; got 'heads'. Leave it out"),
        # experts
        ({"num_experts": -1}, r"num_experts is 0 \(dense\) or more; got -1"),
        ({"num_experts": 4, "experts_per_token": 5}, "at least 1 and at most num_experts = 4; got 5. Choose one"),
        ({"num_experts": 4, "experts_per_token": 0}, "at least 1 and at most num_experts = 4; got 0"),
        ({"shared_expert": True}, "shared_expert stands beside experts; got num_experts 0. Give num_experts"),
        ({"balance_weight": -0.1}, "balance_weight is 0 or more; got -0.1"),
        ({"balance_weight": math.nan}, "balance_weight is 0 or more; got nan"),
        ({"balance_weight": math.inf}, "balance_weight is 0 or more; got inf"),
        # dropout, ops
        ({"dropout": 1.0}, "dropout is a share of 0 or more and below 1; got 1.0. 0 turns it off"),
        ({"dropout": -0.1}, "dropout is a share of 0 or more and below 1; got -0.1"),
        ({"dropout": math.nan}, "dropout is a share of 0 or more and below 1; got nan"),
        ({"op_impl": {"rope": "fast"}}, "auto, fused or torch of an op; got 'fast' of rope. Choose one"),
        ({"op_impl": {"add": "torch"}}, "ops that the model calls, here .*, rope, .*; got add. Leave it out"),
    ],
)
def test_a_model_that_cannot_be_built_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        model(**changes)


@pytest.mark.parametrize("name", [*SMALL, "num_kv_heads", "head_dim"])
@pytest.mark.parametrize("value", [0, -2])
def test_sizes_are_above_0(name: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"^{name} is a number above 0; got {value}. Give one.$"):
        model(**{name: value})


@pytest.mark.parametrize("name", ["kv_latent", "q_latent", "rope_head_dim"])
def test_sizes_of_latents_are_above_0(name: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name} is a number above 0; got -4"):
        model(**{**LATENT, name: -4})


@pytest.mark.parametrize("name", ["norm_eps", "rope_theta", "softcap", "init_std"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_numbers_of_a_model_are_above_0_and_finite(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"^{name} is a number above 0; got {value}. Give one.$"):
        model(**{name: value})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"width": "48"}, "^width is a whole number; got '48'.$"),
        ({"num_layers": True}, "^num_layers is a whole number; got True.$"),
        ({"num_layers": 2.0}, "^num_layers is a whole number; got 2.0.$"),
        ({"context": None}, "^context is a whole number; got None.$"),
        ({"num_kv_heads": "2"}, "^num_kv_heads is a whole number or none; got '2'.$"),
        ({"num_kv_heads": True}, "^num_kv_heads is a whole number or none; got True.$"),
        ({"dropout": "0.1"}, "^dropout is a number; got '0.1'.$"),
        ({"dropout": False}, "^dropout is a number; got False.$"),
        ({"softcap": "30"}, "^softcap is a number or none; got '30'.$"),
        ({"tied": 1}, "^tied is true or false; got 1.$"),
        ({"bias": "yes"}, "^bias is true or false; got 'yes'.$"),
        ({"norm": "batch"}, "^norm is one of rms, layer; got 'batch'.$"),
        ({"positions": "alibi"}, "^positions is one of rope, learned; got 'alibi'.$"),
        ({"attention": None}, "^attention is one of heads, latent; got None.$"),
        ({"attention_path": "flash"}, "^attention_path is one of sdpa, written; got 'flash'.$"),
        ({"activation": "relu"}, "^activation is one of swiglu, geglu, gelu, silu, relu2; got 'relu'.$"),
        ({"impl": "cuda"}, "^impl is one of auto, fused, torch; got 'cuda'.$"),
        ({"op_impl": ["softmax"]}, "^op_impl is a table of ops and implementations; got "),
        ({"op_impl": {"softmax": 1}}, "^op_impl is a table of ops and implementations; got "),
    ],
)
def test_a_value_of_another_kind_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        model(**changes)


def test_what_is_allowed_at_the_edge_is_allowed() -> None:
    assert model(num_heads=5, head_dim=8).head_width == 8
    assert model(num_heads=16, positions="learned").head_width == 3
    assert model(num_kv_heads=6).kv_heads == model().kv_heads == 6
    assert model(**LATENT, head_dim=5).head_width == 5  # only what RoPE turns is even
    assert model(**LATENT, num_kv_heads=6, q_latent=8).attention == "latent"
    assert model(num_experts=4, experts_per_token=4, balance_weight=0).num_experts == 4
    assert model(experts_per_token=2, num_experts=0).num_experts == 0
    assert model(dropout=0, softcap=30).softcap == 30  # a whole number is a number


@pytest.mark.parametrize(
    ("kind", "gated"), [("swiglu", True), ("geglu", True), ("gelu", False), ("silu", False), ("relu2", False)]
)
def test_gated_activations_are_known(kind: str, gated: bool) -> None:
    assert model(activation=kind).gated is gated


def test_a_config_is_frozen() -> None:
    config = model()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.width = 64  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        TrainConfig().steps = 1  # type: ignore[misc]


# ---- rules of training ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["steps", "batch_size", "eval_every", "log_every", "bad_steps", "eps", "learning_rate"]
)
@pytest.mark.parametrize("value", [0, -1])
def test_numbers_of_training_are_above_0(name: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"^{name} is a number above 0; got {value}. Give one.$"):
        training(warmup=0, **{name: value})


@pytest.mark.parametrize("name", ["warmup", "clip", "weight_decay", "sample_tokens", "patience"])
def test_numbers_that_may_be_0_are_not_below(name: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name} is 0 or more; got -1.$"):
        training(**{name: -1})
    assert getattr(training(**{name: 0}), name) == 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"learning_rate": math.inf}, "learning_rate is a number above 0; got inf"),
        ({"learning_rate": math.nan}, "learning_rate is a number above 0; got nan"),
        ({"clip": math.inf}, "clip is 0 or more; got inf"),
        ({"weight_decay": math.nan}, "weight_decay is 0 or more; got nan"),
        ({"micro_batch": 0}, "micro_batch is at least 1, or left to fuselm; got 0"),
        ({"save_every": 0}, "save_every is at least 1, or left to fuselm; got 0"),
        ({"sample_every": -1}, r"sample_every is 0 \(never\) or more; got -1"),
        ({"batch_size": 64, "micro_batch": 24}, "micro_batch divides batch_size; got 24 for 64. Take 16"),
        ({"batch_size": 64, "micro_batch": 100}, "micro_batch divides batch_size; got 100 for 64. Take 64"),
        ({"steps": 10, "warmup": 11}, "warmup is at most steps; got 11 of 10. Take fewer"),
        ({"floor": 1.1}, "floor is from 0 to 1, and decay_share above 0 and at most 1; got 1.1 and 0.2"),
        ({"floor": -0.1}, "floor is from 0 to 1, .* got -0.1 and 0.2"),
        ({"floor": math.nan}, "floor is from 0 to 1, .* got nan and 0.2"),
        ({"decay_share": 0}, "decay_share above 0 and at most 1; got 0.1 and 0"),
        ({"decay_share": 1.5}, "decay_share above 0 and at most 1; got 0.1 and 1.5"),
        ({"betas": (0.9, 1.0)}, r"betas are 0 or more and below 1; got \(0.9, 1.0\)"),
        ({"betas": (-0.1, 0.9)}, r"betas are 0 or more and below 1; got \(-0.1, 0.9\)"),
        ({"betas": (0.9, math.nan)}, "betas are 0 or more and below 1; got"),
        ({"spike_factor": 1.0}, "spike_factor is above 1, or 0 for no such rule; got 1.0"),
        ({"spike_factor": math.nan}, "spike_factor is above 1, or 0 for no such rule; got nan"),
        ({"seed": -1}, r"seed is 0 or more and below 2\*\*63; got -1"),
        ({"seed": 2**63}, r"seed is 0 or more and below 2\*\*63; got 9223372036854775808"),
        # kinds
        ({"steps": "10"}, "^steps is a whole number; got '10'.$"),
        ({"seed": True}, "^seed is a whole number; got True.$"),
        ({"steps": 10.0}, "^steps is a whole number; got 10.0.$"),
        ({"compile": 0}, "^compile is true or false; got 0.$"),
        ({"betas": 0.9}, "^betas is 2 numbers; got 0.9.$"),
        ({"betas": (0.9,)}, r"^betas is 2 numbers; got \(0.9,\).$"),
        ({"betas": (0.9, 0.95, 0.99)}, "^betas is 2 numbers; got"),
        ({"betas": (0.9, "0.95")}, "^betas is 2 numbers; got"),
        ({"betas": [0.9, 0.95]}, "^betas is 2 numbers; got"),
        ({"schedule": "step"}, "^schedule is one of cosine, linear, wsd, constant; got 'step'.$"),
        ({"precision": "fp8"}, "^precision is one of auto, fp32, bf16, fp16; got 'fp8'.$"),
        ({"rows": "lines"}, "^rows is one of stream, documents; got 'lines'.$"),
    ],
)
def test_training_that_cannot_be_done_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        TrainConfig(**changes)


def test_what_training_allows_at_the_edge_is_allowed() -> None:
    assert TrainConfig(steps=10, warmup=10).warmup == 10
    assert TrainConfig(batch_size=64, micro_batch=64).micro_batch == 64
    assert TrainConfig(floor=0, decay_share=1).decay_share == 1
    assert TrainConfig(floor=1.0, betas=(0, 0.0), sample_every=0).sample_every == 0
    assert TrainConfig(seed=2**63 - 1).seed == 2**63 - 1


# ---- changes, JSON, what is typed -----------------------------------------------------------------------------------


def test_a_changed_config_is_checked_again() -> None:
    before = model(dropout=0.1)
    after = changed(before, width=96, tied=True)
    assert after == model(dropout=0.1, width=96, tied=True)
    assert before == model(dropout=0.1)
    with pytest.raises(ConfigError, match="num_heads divides width"):
        changed(before, width=50)


@pytest.mark.parametrize(
    ("name", "near"),
    [("num_head", "num_heads"), ("widht", "width"), ("droput", "dropout"), ("rope_tetha", "rope_theta")],
)
def test_an_unknown_name_is_refused_with_a_near_one(name: str, near: str) -> None:
    words = rf"^ModelConfig has no field '{name}'; it has vocab_size, .*op_impl\. Did you mean {near}\?$"
    with pytest.raises(ConfigError, match=words):
        changed(model(), **{name: 1})
    with pytest.raises(ConfigError, match=words):
        from_json(ModelConfig, {**to_json(model()), name: 1})
    with pytest.raises(
        ConfigError, match=rf"^There is no field '{name}'; there are vocab_size, .*, steps, .*{near}\?$"
    ):
        parsed(name, "1")


def test_a_name_that_is_near_to_none_gets_no_suggestion() -> None:
    with pytest.raises(ConfigError, match=r"^TrainConfig has no field 'xyzzy'; it has steps, .*bad_steps\.$"):
        changed(TrainConfig(), xyzzy=1)


EVERY_MODEL = model(
    **{**LATENT, "q_latent": 8, "head_dim": 10, "qk_norm": True, "num_experts": 4, "shared_expert": True},
    softcap=30.0,
    init_std=0.02,
    op_impl={"softmax": "torch"},
    impl="torch",
    rope_theta=1e6,
)
EVERY_TRAINING = TrainConfig(betas=(0.8, 0.9), micro_batch=8, save_every=7, sample_every=0, eps=1e-12)


@pytest.mark.parametrize("config", [EVERY_MODEL, EVERY_TRAINING, model(), TrainConfig()])
def test_json_there_and_back_is_the_same_config(config: Any) -> None:
    assert_comes_back(config)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_comes_back_from_json(name: str) -> None:
    assert_comes_back(preset(name).model(vocab_size=65))
    assert_comes_back(preset(name).train())


def assert_comes_back(config: Any) -> None:
    data = to_json(config)
    assert list(data) == [item.name for item in dataclasses.fields(config)]
    back = from_json(type(config), json.loads(json.dumps(data, allow_nan=False)))
    assert back == config
    assert to_json(back) == data
    assert {name: type(getattr(back, name)) for name in data} == {name: type(getattr(config, name)) for name in data}


def test_what_a_file_leaves_out_has_its_default_and_what_it_must_say_is_asked_for() -> None:
    assert from_json(ModelConfig, SMALL) == model()
    assert from_json(TrainConfig, {}) == TrainConfig()
    short = {name: value for name, value in SMALL.items() if name not in ("width", "context")}
    with pytest.raises(ConfigError, match=r"^ModelConfig needs context, width; the file does not say"):
        from_json(ModelConfig, short)


def test_a_file_with_a_wrong_value_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^width is a whole number; got '48'"):
        from_json(ModelConfig, {**SMALL, "width": "48"})


def test_json_is_a_copy() -> None:
    config = model(op_impl={"rope": "torch"})
    to_json(config)["op_impl"]["rope"] = "auto"
    assert config.op_impl == {"rope": "torch"}


@pytest.mark.parametrize(
    ("kind", "name", "text", "value"),
    [
        (ModelConfig, "num_heads", "4", 4),
        (ModelConfig, "dropout", "0.25", 0.25),
        (TrainConfig, "learning_rate", "3e-4", 3e-4),
        (ModelConfig, "tied", "true", True),
        (ModelConfig, "tied", "True", True),
        (ModelConfig, "tied", "FALSE", False),
        (ModelConfig, "num_kv_heads", "none", None),
        (ModelConfig, "num_kv_heads", "None", None),
        (ModelConfig, "num_kv_heads", "null", None),
        (ModelConfig, "positions", "rope", "rope"),
        (ModelConfig, "positions", '"rope"', "rope"),
        (TrainConfig, "betas", "[0.9, 0.99]", (0.9, 0.99)),
        (ModelConfig, "op_impl", '{"rope": "torch"}', {"rope": "torch"}),
    ],
)
def test_what_is_typed_becomes_the_value_of_the_field(kind: Any, name: str, text: str, value: Any) -> None:
    found = parsed(name, text)
    assert (type(found), found) == (type(value), value)
    whole = model() if kind is ModelConfig else TrainConfig()
    assert getattr(changed(whole, **{name: found}), name) == value


def test_what_is_typed_for_the_wrong_kind_of_field_is_refused_when_it_is_used() -> None:
    with pytest.raises(ConfigError, match="num_heads is a whole number; got 'four'"):
        changed(model(), num_heads=parsed("num_heads", "four"))


# ---- presets --------------------------------------------------------------------------------------------------------

NAIVE: dict[str, Any] = {"norm": "layer", "positions": "learned", "activation": "gelu", "bias": True}
MODERN: dict[str, Any] = {
    "norm": "rms",
    "positions": "rope",
    "activation": "swiglu",
    "bias": False,
    "attention": "heads",
}
PROMISES: dict[str, tuple[dict[str, Any], dict[str, Any], Any]] = {
    "demo": ({"num_experts": 0}, {}, preset("demo").tokens),  # small, and free to change
    "tinylm": (
        {"num_layers": 6, "width": 384, "num_heads": 6, **MODERN, "activation": "silu", "num_experts": 0},
        {},
        "characters",
    ),
    "naive-char": (
        {"num_layers": 4, "width": 128, "num_heads": 4, "context": 64, "attention_path": "written", **NAIVE},
        {},
        "characters",
    ),
    "naive-768": ({"num_layers": 12, "width": 768, "num_heads": 8, "num_experts": 0, **NAIVE}, {}, "characters"),
    "naive-768-moe": (
        {"num_layers": 12, "width": 768, "num_heads": 8, "num_experts": 8, "experts_per_token": 2, **NAIVE},
        {},
        "characters",
    ),
    "tiny": ({"num_layers": 4, "width": 128, "num_heads": 4, "ffn_width": 512, **MODERN}, {}, 4096),
    "small": ({"num_layers": 12, "width": 768, "num_heads": 12, "ffn_width": 3072, **MODERN}, {}, 10_000),
    "gpt-124m": (
        {"num_layers": 12, "width": 768, "num_heads": 12, "ffn_width": 2048, "tied": True, "context": 1024, **MODERN},
        {"batch_size": 32},
        50_304,
    ),
    "tinystories": (
        {"num_layers": 4, "width": 512, "num_heads": 16, "ffn_width": 1344, "tied": False, "context": 256, **MODERN},
        {},
        10_000,
    ),
    "moe-60m": ({"num_experts": 8, "experts_per_token": 2, **MODERN}, {}, 10_000),
}


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_sizes_they_promise(name: str) -> None:
    shape, plan_says, tokens = PROMISES[name]
    found = preset(name)
    config, plan = found.model(vocab_size=65), found.train()
    assert {key: getattr(config, key) for key in shape} == shape
    assert {key: getattr(plan, key) for key in plan_says} == plan_says
    assert found.tokens == tokens


def test_a_preset_takes_changes_to_its_model_and_its_training() -> None:
    assert preset("tiny").model(vocab_size=4096) == preset("tiny").model(vocab_size=4096, **preset("tiny").shape)
    config = preset("tiny").model(vocab_size=4096, width=64, qk_norm=True)
    assert (config.vocab_size, config.width, config.qk_norm, config.num_layers) == (4096, 64, True, 4)
    assert preset("tiny").train(steps=500).steps == 500
    assert preset("tiny").train().steps == 2000
    with pytest.raises(ConfigError, match="num_heads divides width"):
        preset("tiny").model(vocab_size=4096, width=66)


@pytest.mark.parametrize("tokens", [50_257, 50_304])
def test_the_124m_model_has_a_padded_head(tokens: int) -> None:
    assert preset("gpt-124m").model(vocab_size=tokens).vocab_size == 50_304


def test_other_heads_have_a_row_for_each_token() -> None:
    assert {preset(name).model(vocab_size=65).vocab_size for name in PRESETS if name != "gpt-124m"} == {65}


def test_a_step_of_tinystories_reads_65536_tokens() -> None:
    found = preset("tinystories")
    config = found.model(vocab_size=10_000)
    assert config.vocab_size == 10_000
    assert found.train().batch_size * config.context == 65_536


def parameters(config: ModelConfig, experts: int) -> int:
    """Of a model without biases, with so many experts to a layer."""
    width, vectors = config.width, 2 * config.num_layers + 1
    attention = width * config.head_width * 2 * (config.num_heads + config.kv_heads)
    ffn = (3 if config.gated else 2) * width * config.ffn_width
    layer = attention + max(experts, 1) * ffn + config.num_experts * width
    return config.num_layers * layer + vectors * width + config.vocab_size * width * (1 if config.tied else 2)


@pytest.mark.parametrize(
    ("name", "vocab_size", "millions"),
    [("tinylm", 65, 10.7), ("tinystories", 10_000, 22.7), ("gpt-124m", 50_257, 124)],
)
def test_presets_have_as_many_parameters_as_they_say(name: str, vocab_size: int, millions: float) -> None:
    digits = 1 if isinstance(millions, float) else 0
    found = preset(name)
    assert round(parameters(found.model(vocab_size=vocab_size), 0) / 1e6, digits) == millions
    assert f"{millions} M" in found.about or f"{millions}m" in name


def test_the_mixture_has_as_many_parameters_at_work_as_it_says() -> None:
    found = preset("moe-60m")
    config = found.model(vocab_size=10_000)
    numbers = [round(parameters(config, experts) / 1e6) for experts in (config.num_experts, config.experts_per_token)]
    assert f"{numbers[0]} M parameters, {numbers[1]} M at work" in found.about


def test_an_unknown_preset_is_refused_with_the_known() -> None:
    with pytest.raises(ConfigError) as caught:
        preset("tinylmm")
    words = str(caught.value)
    assert words.startswith("There is no preset 'tinylmm'; the presets are demo, ")
    assert all(name in words for name in PRESETS)
    assert words.endswith("Did you mean tinylm?")
