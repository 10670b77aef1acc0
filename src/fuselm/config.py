"""What a model is and how it is trained, as frozen data: defaults written once, checked once, JSON in and out.

Stdlib only; knows no framework and no file. A rule about sizes has its one home in __post_init__ here: whoever holds a
config holds a valid one.

    model = ModelConfig(vocab_size=4096, context=256, num_layers=4, width=256, num_heads=4, ffn_width=768)
    wider = changed(model, width=512)
    to_json(model), from_json(ModelConfig, text)
    preset("tinylm").model(vocab_size=65)             # a preset knows all but the vocabulary

Letters as everywhere in the house: D width, N query heads, K key and value heads, H head dimension, F feed-forward
width, V vocabulary, E experts, T tokens of a row.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

Config = TypeVar("Config", bound="ModelConfig | TrainConfig")


class ConfigError(ValueError):
    """A config that describes nothing that can be built; the message is the rule, what arrived and the remedy."""


# --- the model -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelConfig:
    """A decoder: embedding, `num_layers` blocks of attention and feed-forward, norm, head."""

    vocab_size: int
    context: int  # the most tokens of a row
    num_layers: int
    width: int
    num_heads: int
    ffn_width: int  # of one expert where there are experts
    num_kv_heads: int | None = None  # None: as many as num_heads (MHA); fewer: GQA
    head_dim: int | None = None  # None: width / num_heads
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float = 1e-5
    positions: Literal["rope", "learned"] = "rope"
    rope_theta: float = 10_000.0
    # "latent" is MLA: keys and values come from one latent vector of kv_latent numbers a token, positions from
    # rope_head_dim numbers a head that are kept apart (decoupled RoPE).
    attention: Literal["heads", "latent"] = "heads"
    kv_latent: int | None = None
    q_latent: int | None = None  # None: queries straight from x
    rope_head_dim: int | None = None
    # "sdpa" is torch's fused attention; "written" is matmul, softmax, matmul, each of which can be swapped.
    attention_path: Literal["sdpa", "written"] = "sdpa"
    qk_norm: bool = False
    activation: Literal["swiglu", "geglu", "gelu", "silu", "relu2"] = "swiglu"
    num_experts: int = 0  # 0: dense
    experts_per_token: int = 2
    shared_expert: bool = False  # one more expert, of the same width, that every token visits
    balance_weight: float = 0.01  # of the load-balancing loss
    tied: bool = False  # the head is the embedding
    bias: bool = False
    softcap: float | None = None  # logits become softcap * tanh(logits / softcap)
    dropout: float = 0.0
    init_std: float | None = None  # of the weights at the start; None: 1 / sqrt(width)
    # Which implementation of each op: "auto" (the kernel where there is one), "fused" (the kernel or an error) or
    # "torch"; op_impl says otherwise for single ops, as {"softmax": "torch"}.
    impl: Literal["auto", "fused", "torch"] = "auto"
    op_impl: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_fields(self)
        object.__setattr__(self, "op_impl", dict(self.op_impl))  # ours, whatever becomes of the one we were given
        _check_model(self)

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    @property
    def head_width(self) -> int:
        """H: of a value, and of a key but for the part that holds positions in latent attention."""
        return self.head_dim or self.width // self.num_heads

    @property
    def gated(self) -> bool:
        """Whether the feed-forward multiplies a gate with an up-projection."""
        return self.activation in ("swiglu", "geglu")


POSITIVE = ("vocab_size", "context", "num_layers", "width", "num_heads", "ffn_width", "norm_eps", "rope_theta")
POSITIVE_OR_NONE = ("num_kv_heads", "head_dim", "kv_latent", "q_latent", "rope_head_dim", "softcap", "init_std")
LATENT = ("kv_latent", "q_latent", "rope_head_dim")


def _check_model(config: ModelConfig) -> None:
    for name in (*POSITIVE, *POSITIVE_OR_NONE):
        value = getattr(config, name)
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"{name} is a number above 0; got {value}. Give one.")
    _check_heads(config)
    _check_latent(config)
    _check_experts(config)
    if not 0 <= config.dropout < 1:
        raise ConfigError(f"dropout is a share of 0 or more and below 1; got {config.dropout}. 0 turns it off.")
    for name, impl in config.op_impl.items():
        if name not in ops_used(config):
            raise ConfigError(
                f"op_impl is for ops that the model calls, here {', '.join(ops_used(config))}; got {name}. "
                "Leave it out."
            )
        if impl not in ("auto", "fused", "torch"):
            raise ConfigError(f"op_impl says auto, fused or torch of an op; got {impl!r} of {name}. Choose one.")


def ops_used(config: ModelConfig) -> tuple[str, ...]:
    """The ops of fuselm.ops that a model of this config calls."""
    names = {"embedding", "linear_cross_entropy", config.activation}
    names |= {"rms_norm"} if config.norm == "rms" or config.attention == "latent" else {"layer_norm"}
    names |= {"layer_norm"} if config.norm == "layer" else set()
    names |= {"rope"} if config.positions == "rope" else {"rms_norm"} if config.qk_norm else set()
    names |= {"softmax"} if config.attention_path == "written" or config.num_experts else set()
    names |= {"mul"} if config.num_experts else set()
    names |= {"add"} if config.shared_expert else set()
    return tuple(sorted(names))


def _check_heads(config: ModelConfig) -> None:
    if config.head_dim is None and config.width % config.num_heads:
        raise ConfigError(
            f"num_heads divides width, unless head_dim is given; got width {config.width} and {config.num_heads} "
            f"heads. Take {_divisor_near(config.width, config.num_heads)} heads, or give head_dim."
        )
    if config.num_heads % config.kv_heads:
        raise ConfigError(
            f"num_kv_heads divides num_heads; got {config.kv_heads} for {config.num_heads}. "
            f"Take {_divisor_near(config.num_heads, config.kv_heads)}."
        )
    rotated = config.rope_head_dim if config.attention == "latent" else config.head_width
    if config.positions == "rope" and rotated is not None and rotated % 2:
        name = "rope_head_dim" if config.attention == "latent" else "head_dim"
        raise ConfigError(f"RoPE turns pairs, so what it turns is even; got a head of {rotated}. Use an even {name}.")


def _check_latent(config: ModelConfig) -> None:
    given = [name for name in LATENT if getattr(config, name) is not None]
    if config.attention != "latent":
        if given:
            raise ConfigError(f"{given[0]} is for attention='latent'; got {config.attention!r}. Leave it out.")
        return
    if config.kv_latent is None or config.rope_head_dim is None:
        raise ConfigError("attention='latent' needs kv_latent and rope_head_dim; got one of them missing. Give both.")
    if config.positions != "rope":
        raise ConfigError("attention='latent' keeps positions by RoPE; got positions='learned'. Use positions='rope'.")
    if config.kv_heads != config.num_heads:
        raise ConfigError("attention='latent' makes keys of every head; got num_kv_heads. Leave that out.")


def _check_experts(config: ModelConfig) -> None:
    if config.num_experts < 0:
        raise ConfigError(f"num_experts is 0 (dense) or more; got {config.num_experts}.")
    if config.num_experts and not 1 <= config.experts_per_token <= config.num_experts:
        raise ConfigError(
            f"experts_per_token is at least 1 and at most num_experts = {config.num_experts}; "
            f"got {config.experts_per_token}. Choose one of those."
        )
    if config.num_experts and (config.width % 8 or config.ffn_width % 8):
        raise ConfigError(
            "With experts, width and ffn_width are multiples of 8, as the grouped matmul wants them; got "
            f"{config.width} and {config.ffn_width}. Round them up."
        )
    if config.shared_expert and not config.num_experts:
        raise ConfigError("shared_expert stands beside experts; got num_experts 0. Give num_experts.")
    if not 0 <= config.balance_weight < math.inf:
        raise ConfigError(f"balance_weight is 0 or more; got {config.balance_weight}.")


def _divisor_near(number: int, wanted: int) -> int:
    return min((d for d in range(1, number + 1) if number % d == 0), key=lambda d: abs(d - wanted))


# --- training --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainConfig:
    """How a model is trained. A step reads `batch_size` rows; every number that ends in _every counts steps."""

    steps: int = 2000
    batch_size: int = 64  # rows of a step, over all micro-batches
    micro_batch: int | None = None  # rows at once; None: as many as fit the memory
    seed: int = 0
    rows: Literal["stream", "documents"] = "stream"
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"  # auto: bf16 on a GPU that has it, else fp32
    learning_rate: float = 1e-3
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    warmup: int = 100
    floor: float = 0.1  # of the learning rate, at the end
    decay_share: float = 0.2  # of the steps, at the end of wsd
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float = 1.0  # of the gradient's norm; 0: no clipping
    compile: bool = False
    # A step's gradients as one launch; None: on a GPU where what that keeps of its memory is little.
    cuda_graph: bool | None = None
    deterministic: bool = False  # on a GPU: bitwise the same run again
    eval_every: int = 250
    save_every: int | None = None  # None: as often as it evaluates
    sample_every: int | None = None  # None: as often as it evaluates; 0: never
    sample_tokens: int = 120
    log_every: int = 10
    patience: int = 0  # evaluations without a better loss after which it stops; 0: never
    # A loss this many times its running mean counts as a spike (0: none does); so many spikes or NaNs in a row end it.
    spike_factor: float = 3.0
    bad_steps: int = 10

    def __post_init__(self) -> None:
        _check_fields(self)
        _check_train(self)


def _check_train(config: TrainConfig) -> None:
    for name in ("steps", "batch_size", "eval_every", "log_every", "bad_steps", "eps", "learning_rate"):
        if not 0 < getattr(config, name) < math.inf:
            raise ConfigError(f"{name} is a number above 0; got {getattr(config, name)}. Give one.")
    for name in ("warmup", "clip", "weight_decay", "sample_tokens", "patience"):
        if not 0 <= getattr(config, name) < math.inf:
            raise ConfigError(f"{name} is 0 or more; got {getattr(config, name)}.")
    for name in ("micro_batch", "save_every"):
        if (value := getattr(config, name)) is not None and value < 1:
            raise ConfigError(f"{name} is at least 1, or left to fuselm; got {value}.")
    if config.sample_every is not None and config.sample_every < 0:
        raise ConfigError(f"sample_every is 0 (never) or more; got {config.sample_every}.")
    if config.micro_batch is not None and config.batch_size % config.micro_batch:
        raise ConfigError(
            f"micro_batch divides batch_size; got {config.micro_batch} for {config.batch_size}. "
            f"Take {_divisor_near(config.batch_size, config.micro_batch)}."
        )
    if config.warmup > config.steps:
        raise ConfigError(f"warmup is at most steps; got {config.warmup} of {config.steps}. Take fewer.")
    if not 0 <= config.floor <= 1 or not 0 < config.decay_share <= 1:
        raise ConfigError(
            f"floor is from 0 to 1, and decay_share above 0 and at most 1; got {config.floor} and {config.decay_share}."
        )
    if not all(0 <= beta < 1 for beta in config.betas):
        raise ConfigError(f"betas are 0 or more and below 1; got {config.betas}.")
    if not 0 <= config.seed < 2**63:
        raise ConfigError(f"seed is 0 or more and below 2**63; got {config.seed}.")
    if config.spike_factor and not 1 < config.spike_factor < math.inf:
        raise ConfigError(f"spike_factor is above 1, or 0 for no such rule; got {config.spike_factor}.")


# --- changing, JSON in and out ---------------------------------------------------------------------------------------


def changed(config: Config, **changes: Any) -> Config:
    """The config with some fields changed; a name that it does not have is refused."""
    names = [item.name for item in dataclasses.fields(config)]
    for name in changes:
        if name not in names:
            raise ConfigError(_unknown(f"{type(config).__name__} has no field", name, names))
    return dataclasses.replace(config, **changes)


def parsed(name: str, text: str) -> Any:
    """The value of a field of either config from what somebody typed: `4`, `true`, `none`, `rope`, `[0.9, 0.95]`."""
    names = [item.name for kind in (ModelConfig, TrainConfig) for item in dataclasses.fields(kind)]
    if name not in names:
        raise ConfigError(_unknown("There is no field", name, names).replace("it has", "there are"))
    try:
        value = json.loads(text.lower() if text.lower() in ("true", "false") else text)
    except ValueError:
        value = None if text.lower() == "none" else text
    return tuple(value) if isinstance(value, list) else value


def to_json(config: ModelConfig | TrainConfig) -> dict[str, Any]:
    """The config as plain data, every field named."""
    return {item.name: _plain(getattr(config, item.name)) for item in dataclasses.fields(config)}


def from_json(kind: type[Config], data: Mapping[str, Any]) -> Config:
    """The config of what `to_json` gave; an unknown field is refused, a missing one has its default."""
    fields = {item.name: item for item in dataclasses.fields(kind)}
    for name in data:
        if name not in fields:
            raise ConfigError(_unknown(f"{kind.__name__} has no field", name, fields))
    required = [n for n, f in fields.items() if f.default is f.default_factory is dataclasses.MISSING]
    if missing := [name for name in required if name not in data]:
        raise ConfigError(f"{kind.__name__} needs {', '.join(missing)}; the file does not say. Is it a config of ours?")
    values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in data.items()}
    return kind(**values)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, tuple) else value


def _check_fields(config: ModelConfig | TrainConfig) -> None:
    """Every value is of its field's type, and one of the choices where those are listed."""
    hints = typing.get_type_hints(type(config))
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        if not _fits(value, hints[item.name]):
            raise ConfigError(f"{item.name} is {_words(hints[item.name])}; got {value!r}.")


def _fits(value: Any, hint: Any) -> bool:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return any(_fits(value, one) for one in arguments)
    if origin is Literal:
        return value in arguments and isinstance(value, str)
    if origin is tuple:
        pairs = zip(value, arguments, strict=False) if isinstance(value, tuple) else ()
        return isinstance(value, tuple) and len(value) == len(arguments) and all(_fits(v, a) for v, a in pairs)
    if origin is not None:  # Mapping[str, str]
        return isinstance(value, Mapping) and all(isinstance(k, str) and isinstance(v, str) for k, v in value.items())
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def _words(hint: Any) -> str:
    """A type as a person would say it."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_words(one) for one in arguments)
    if origin is Literal:
        return "one of " + ", ".join(arguments)
    if origin is tuple:
        return f"{len(arguments)} numbers"
    if origin is not None:
        return "a table of ops and implementations"
    names = {int: "a whole number", float: "a number", bool: "true or false", type(None): "none", str: "a text"}
    return names.get(hint, str(hint))


def _unknown(sentence: str, name: str, known: Iterable[str]) -> str:
    known = list(known)
    near = difflib.get_close_matches(name, known, n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    return f"{sentence} {name!r}; it has {', '.join(known)}.{hint}"


# --- presets ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Preset:
    """A model, a way to train it and the corpus it was made for; `tokens` says how that corpus becomes tokens."""

    about: str
    corpus: str
    tokens: str | int  # "characters", or the size of a BPE vocabulary
    shape: Mapping[str, Any]  # the fields of ModelConfig that differ from its defaults
    training: Mapping[str, Any]
    limit_mb: float | None = None  # of the corpus, unless somebody says otherwise
    vocab_multiple: int = 1  # the head has rows for a multiple of this, which matmuls like

    def model(self, vocab_size: int, **changes: Any) -> ModelConfig:
        """The model of this preset for a tokenizer's vocabulary."""
        rows = -(-vocab_size // self.vocab_multiple) * self.vocab_multiple
        return ModelConfig(**{"vocab_size": rows, **self.shape, **changes})

    def train(self, **changes: Any) -> TrainConfig:
        return TrainConfig(**{**self.training, **changes})


def _naive(**more: Any) -> dict[str, Any]:
    """What the naive models share: everything as the first GPTs had it, and attention one op at a time."""
    return {"norm": "layer", "positions": "learned", "activation": "gelu", "bias": True} | more


# Heads, widths and contexts are what the names stand for elsewhere; learning rates and steps were found by trying, see
# docs/training.md.
PRESETS: dict[str, Preset] = {
    "demo": Preset(
        "built-in stories from a small world, three to five minutes on two CPU cores",
        "little-stories",
        1024,
        {"context": 256, "num_layers": 3, "width": 128, "num_heads": 4, "ffn_width": 352, "tied": True},
        {"steps": 2200, "batch_size": 4, "learning_rate": 6e-3, "warmup": 50, "schedule": "linear", "floor": 0.03}
        | {"eval_every": 550, "sample_tokens": 200},
        limit_mb=8,
    ),
    "tinylm": Preset(
        "TinyShakespeare by characters, 10.7 M parameters",
        "tinyshakespeare",
        "characters",
        {"context": 256, "num_layers": 6, "width": 384, "num_heads": 6, "ffn_width": 1536, "activation": "silu"}
        | {"dropout": 0.3},
        {"steps": 2500, "batch_size": 64, "learning_rate": 2e-3, "patience": 5, "eval_every": 100},
    ),
    "naive-char": Preset(
        "the Wizard of Oz by characters, written-out attention",
        "wizard-of-oz",
        "characters",
        _naive(context=64, num_layers=4, width=128, num_heads=4, ffn_width=512, attention_path="written", dropout=0.2),
        {"steps": 5000, "batch_size": 128, "learning_rate": 2e-3, "eval_every": 200, "patience": 5},
    ),
    "naive-768": Preset(
        "12 x 768, 8 heads, LayerNorm and GELU",
        "wizard-of-oz",
        "characters",
        _naive(context=256, num_layers=12, width=768, num_heads=8, ffn_width=3072, dropout=0.2),
        {"steps": 1000, "batch_size": 64, "learning_rate": 3e-4},
    ),
    "naive-768-moe": Preset(
        "naive-768 with 8 experts, of which a token visits 2",
        "wizard-of-oz",
        "characters",
        _naive(context=256, num_layers=12, width=768, num_heads=8, ffn_width=3072, dropout=0.2, num_experts=8),
        {"steps": 1000, "batch_size": 64, "learning_rate": 3e-4},
    ),
    "tiny": Preset(
        "4 x 128, SwiGLU: the smallest of the modern kind",
        "stories",
        4096,
        {"context": 256, "num_layers": 4, "width": 128, "num_heads": 4, "ffn_width": 512},
        {"steps": 2000, "batch_size": 64, "learning_rate": 3e-3},
    ),
    "small": Preset(
        "12 x 768, SwiGLU 3072",
        "tinystories",
        10_000,
        {"context": 512, "num_layers": 12, "width": 768, "num_heads": 12, "ffn_width": 3072},
        {"steps": 10_000, "batch_size": 64, "learning_rate": 6e-4, "warmup": 500},
    ),
    "gpt-124m": Preset(
        "the size of GPT-2, SwiGLU, tied head",
        "tinystories",
        50_304,
        {"context": 1024, "num_layers": 12, "width": 768, "num_heads": 12, "ffn_width": 2048, "tied": True},
        {"steps": 10_000, "batch_size": 32, "learning_rate": 6e-4, "warmup": 500},
        vocab_multiple=64,
    ),
    "tinystories": Preset(
        "4 x 512, 16 heads: 22.7 M parameters for TinyStories",
        "tinystories",
        10_000,
        {"context": 256, "num_layers": 4, "width": 512, "num_heads": 16, "ffn_width": 1344},
        {"steps": 5000, "batch_size": 256, "learning_rate": 6e-3, "warmup": 100, "floor": 0.0, "eval_every": 500},
    ),
    "moe-60m": Preset(
        "8 experts, of which a token visits 2: 62 M parameters, 24 M at work",
        "tinystories",
        10_000,
        {"context": 512, "num_layers": 6, "width": 512, "num_heads": 8, "ffn_width": 688, "num_experts": 8}
        | {"tied": True},
        {"steps": 5000, "batch_size": 128, "learning_rate": 2e-3, "warmup": 200},
    ),
}


def preset(name: str) -> Preset:
    """The preset of a name; an unknown one is refused with the known."""
    if name not in PRESETS:
        raise ConfigError(_unknown("There is no preset", name, PRESETS).replace("it has", "the presets are"))
    return PRESETS[name]
