"""fuselm.cost against the model itself: its parameters, what torch counts, what a training step and a cache hold.

Knows torch and fuselm.torchlm. Memory is counted by Meter, on tensors without data where a dtype or a size asks for it.
"""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from fuselm import cost
from fuselm.config import PRESETS, ModelConfig, changed, preset
from fuselm.kernels import linear_cross_entropy as head_loss
from fuselm.kernels.torch_ops import linear_cross_entropy as torch_head_loss
from fuselm.optim import AdamW
from fuselm.torchlm.cache import Cache
from fuselm.torchlm.model import Transformer

SMALL: dict[str, Any] = {
    "vocab_size": 300,
    "context": 64,
    "num_layers": 3,
    "width": 32,
    "num_heads": 4,
    "ffn_width": 96,
}
GPT = {"norm": "layer", "bias": True, "positions": "learned", "activation": "gelu"}
LATENT = {"attention": "latent", "kv_latent": 16, "rope_head_dim": 4}
MIXTURE = {"num_experts": 4, "experts_per_token": 2}
ZOO: dict[str, dict[str, Any]] = {
    "dense": {},
    "tied": {"tied": True, "activation": "relu2", "softcap": 10.0},
    "grouped": {"num_kv_heads": 2, "head_dim": 16},
    "grouped, written, normed": {"num_kv_heads": 1, "attention_path": "written", "qk_norm": True},
    "normed": {"num_kv_heads": 2, "qk_norm": True, "bias": True},
    "learned, normed": {"positions": "learned", "qk_norm": True, "norm": "layer"},
    "gpt": GPT,
    "gpt, written": {**GPT, "attention_path": "written"},
    "gpt, written, dropout": {**GPT, "attention_path": "written", "dropout": 0.1},
    "latent": {**LATENT, "attention_path": "written"},
    "latent, fused": LATENT,
    "latent, everything": {**LATENT, "q_latent": 20, "qk_norm": True, "bias": True, "attention_path": "written"},
    "mixture": MIXTURE,
    "mixture, biases, shared expert": {**MIXTURE, "bias": True, "shared_expert": True, "norm": "layer"},
    "mixture, one visit": {"num_experts": 8, "experts_per_token": 1, "activation": "silu", "shared_expert": True},
}


def of_zoo(name: str) -> ModelConfig:
    return ModelConfig(**{**SMALL, **ZOO[name]})


def of_preset(name: str) -> ModelConfig:
    tokens = preset(name).tokens
    return preset(name).model(vocab_size=tokens if isinstance(tokens, int) else 80)


@pytest.fixture
def seen_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the ops that the loss is made of visible to what watches ops: on a GPU they are what runs."""
    monkeypatch.setattr(torch_head_loss, "_forward", torch_head_loss._plain_forward)


CONFIGS = {**{f"preset {name}": of_preset(name) for name in PRESETS}, **{name: of_zoo(name) for name in ZOO}}


def without_data(config: ModelConfig, dtype: torch.dtype = torch.float32) -> Transformer:
    with torch.device("meta"):
        return Transformer(config, dtype=dtype, device="meta")


# --- parameters ------------------------------------------------------------------------------------------------------


def part_of(name: str) -> str:
    """Which part a parameter of the model counts to, by its name."""
    last = name.split(".")[-1]
    if "norm" in name:
        return "norms"
    if last in ("embedding", "positions"):
        return last
    owners = {"attention": "attention", "router": "router", "mlp": "feed_forward", "head": "head"}
    return next(part for owner, part in owners.items() if owner in name.split("."))


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_parameters_are_those_of_the_model_part_by_part(config: ModelConfig) -> None:
    count = cost.parameters(config)
    found = dict.fromkeys(("embedding", "positions", "attention", "feed_forward", "norms", "head", "router"), 0)
    idle = 0
    for name, parameter in without_data(config).named_parameters():
        found[part_of(name)] += parameter.numel()
        if config.num_experts and part_of(name) == "feed_forward" and "shared" not in name:
            assert parameter.shape[0] == config.num_experts
            idle += parameter.numel() // config.num_experts * (config.num_experts - config.experts_per_token)
    assert found == {part: getattr(count, part) for part in found}
    assert count.total == sum(found.values())
    assert count.active == count.total - idle


def test_a_mixture_that_visits_all_its_experts_leaves_nothing_idle() -> None:
    count = cost.parameters(ModelConfig(**SMALL, num_experts=4, experts_per_token=4))
    assert count.active == count.total


# --- arithmetic ------------------------------------------------------------------------------------------------------


def test_flops_of_tinystories_are_those_counted_by_hand() -> None:
    flops = cost.flops_per_token(of_preset("tinystories"))
    assert flops.projections == 4 * 2 * 4 * 512 * 512
    assert flops.feed_forward == 4 * 2 * 3 * 512 * 1344
    assert flops.head == 2 * 512 * 10_000
    assert flops.router == 0
    # Of 256 queries, the first sees one key, the last all 256; scores and values have 512 numbers over all heads.
    assert flops.attention * 256 == 4 * 2 * 2 * 512 * sum(range(1, 257))
    # Six per weight and half of full attention, as it is mostly told: a diagonal less than ours, 108.6 MFLOP both.
    told = 6 * (4 * (4 * 512 * 512 + 3 * 512 * 1344) + 512 * 10_000) + 3 * 4 * 4 * 512 * 128
    assert flops.training == told + 3 * 4 * 2 * 512 == 108_589_056


@pytest.mark.parametrize("name", [name for name in ZOO if "written" in ZOO[name].values()] + ["mixture"])
@pytest.mark.usefixtures("seen_inside")
def test_flops_are_those_that_torch_counts(name: str) -> None:
    config = changed(of_zoo(name), attention_path="written")
    model, ids = Transformer(config), torch.zeros(2, 48, dtype=torch.int64)
    with FlopCounterMode(display=False) as forward, torch.no_grad():  # with grad, the loss makes its gradients too
        model.loss(ids, ids)
    with FlopCounterMode(display=False) as training:
        loss, balance = model.loss(ids, ids)
        (loss + balance).backward()
    flops = cost.flops_per_token(config, context=48)
    full = flops.attention * 2 * 48 // 49  # written-out attention multiplies what it then hides
    counted = flops.forward - flops.attention + full
    counted -= flops.feed_forward if config.num_experts else 0  # torch does not count a grouped matmul
    assert forward.get_total_flops() == 2 * 48 * counted
    assert training.get_total_flops() == 3 * 2 * 48 * counted


def test_flops_of_a_mixture_are_those_of_a_dense_model_of_the_visited_width() -> None:
    mixture = cost.flops_per_token(of_zoo("mixture, biases, shared expert"))
    dense = cost.flops_per_token(ModelConfig(**{**SMALL, "ffn_width": 3 * 96}))  # two visits and the shared expert
    assert mixture.feed_forward == dense.feed_forward
    assert mixture.forward == dense.forward + 3 * 2 * 32 * 4


def test_a_longer_row_costs_more_attention_and_nothing_else() -> None:
    config = of_zoo("latent, everything")
    short, long = cost.flops_per_token(config, context=1), cost.flops_per_token(config, context=63)
    assert long.attention == 32 * short.attention  # a mean of 32 keys instead of one
    assert long.forward - long.attention == short.forward - short.attention


# --- memory of training ----------------------------------------------------------------------------------------------


class Meter(TorchDispatchMode):
    """Bytes of the storages that ops have made and nobody has let go of: how many at most."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self.live = self.most = 0
        self.seen = {tensor.untyped_storage()._cdata for tensor in known}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.addmm.dtype_out and kwargs["out"].is_meta:
            return kwargs["out"]  # torch 2.11 takes the dtype for beta where tensors have no data
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and (storage := tensor.untyped_storage())._cdata not in self.seen:
                self.seen.add(storage._cdata)
                self.live += storage.nbytes()
                weakref.finalize(storage, self.gone, storage._cdata, storage.nbytes())
        self.most = max(self.most, self.live)
        return out

    def gone(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.live -= size


def held(model: Transformer, batch: int, tokens: int) -> int:
    """The most that one step of a model holds besides weights and gradients, which are there before it."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    ids = torch.zeros(batch, tokens, dtype=torch.int64, device=model.embedding.device)
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    meter = Meter([ids, *model.parameters(), *model.buffers(), *gradients])
    with meter:
        loss, balance = model.loss(ids, ids)
        (loss + balance).backward()
        del loss, balance
    assert meter.live == 0  # it has seen everything go that it saw come
    return meter.most


def fused_attention(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Tensor:
    """As a GPU does it: tensors without data would be given the matrix of scores."""
    if q.shape[-1] != v.shape[-1]:
        out: Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, True)[0]
        return out
    out = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)[0]
    return out


# What torch has no fused attention for on a CPU, it writes out by itself.
ON_CPU = [name for name in ZOO if name != "latent, fused"]


@pytest.mark.parametrize("name", ON_CPU)
@pytest.mark.usefixtures("seen_inside")
def test_activation_bytes_hold_for_a_step_in_fp32(name: str) -> None:
    config = of_zoo(name)
    truth = held(Transformer(config), batch=8, tokens=64)
    assert truth <= cost.activation_bytes(config, 8, 64, dtype_bytes=4) <= 1.25 * truth


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.usefixtures("seen_inside")
def test_activation_bytes_hold_for_a_step_in_bf16(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F, "scaled_dot_product_attention", fused_attention)
    config = of_zoo(name)
    truth = held(without_data(config, torch.bfloat16), batch=8, tokens=64)
    assert truth <= cost.activation_bytes(config, 8, 64, dtype_bytes=2) <= 1.25 * truth


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.usefixtures("seen_inside")
def test_activation_bytes_are_close_for_presets(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F, "scaled_dot_product_attention", fused_attention)
    config = of_preset(name)
    truth = held(without_data(config, torch.bfloat16), batch=8, tokens=config.context)
    assert truth <= cost.activation_bytes(config, 8, config.context, dtype_bytes=2) <= 1.1 * truth


@pytest.mark.usefixtures("seen_inside")
@pytest.mark.parametrize("kib", [37, 100, 290])  # 16, 5 and 2 blocks of the 600 KiB that all logits take
def test_activation_bytes_hold_where_the_loss_works_in_blocks(kib: int) -> None:
    config = of_zoo("gpt")
    model = Transformer(config)
    model.logits_bytes = kib << 10
    truth = held(model, batch=8, tokens=64)
    assert truth <= cost.activation_bytes(config, 8, 64, 4, logits_bytes=kib << 10) <= 1.25 * truth


def test_the_blocks_of_the_loss_are_counted_as_it_makes_them() -> None:
    assert cost.LOGITS_BYTES == head_loss.DEFAULT_MAX_BYTES
    assert cost.LOGITS_TILE == head_loss.ROWS_OF_TILE


@pytest.mark.parametrize("name", ["dense", "tied", "gpt, written, dropout"])
def test_activation_bytes_hold_for_a_plain_loss_that_makes_all_logits(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(F, "scaled_dot_product_attention", fused_attention)
    config = changed(of_zoo(name), op_impl={"linear_cross_entropy": "torch"})
    for model, size in ((Transformer(config), 4), (without_data(config, torch.bfloat16), 2)):
        truth = held(model, batch=8, tokens=64)
        assert truth <= cost.activation_bytes(config, 8, 64, dtype_bytes=size) <= 1.25 * truth


def test_activation_bytes_have_room_for_every_tensor_saved_for_backward() -> None:
    config = of_zoo("gpt, written, dropout")
    model, ids, saved = Transformer(config), torch.zeros(8, 64, dtype=torch.int64), {}
    own = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss, _ = model.loss(ids, ids)
    truth = sum(storage.nbytes() for key, storage in saved.items() if key not in own)
    assert loss.requires_grad
    assert truth <= cost.activation_bytes(config, 8, 64, dtype_bytes=4) <= 1.25 * truth


def test_plain_rms_norm_is_counted_with_its_fp32_copy() -> None:
    kernel = ModelConfig(**SMALL)
    plain = changed(kernel, op_impl={"rms_norm": "torch"})
    extra = cost.activation_bytes(plain, 8, 64, 2) - cost.activation_bytes(kernel, 8, 64, 2)
    assert extra == pytest.approx(8 * 64 * 7 * 32 * 2, rel=0.04)  # 7 norms of 32 numbers, 4 bytes instead of 2
    assert cost.activation_bytes(plain, 8, 64, 4) == cost.activation_bytes(kernel, 8, 64, 4)


def test_training_state_is_what_a_model_with_its_optimiser_holds() -> None:
    config = of_zoo("mixture, biases, shared expert")
    model, ids = Transformer(config), torch.zeros(1, 8, dtype=torch.int64)
    optimizer = AdamW(model.parameters())
    loss, balance = model.loss(ids, ids)
    (loss + balance).backward()
    optimizer.step()
    averages = [tensor for state in optimizer.state.values() for tensor in state.values() if torch.is_tensor(tensor)]
    tensors = [*model.parameters(), *(p.grad for p in model.parameters()), *(t for t in averages if t.dim())]
    assert cost.training_state_bytes(config) == sum(tensor.nbytes for tensor in tensors if tensor is not None)
    assert cost.weight_bytes(config) == sum(tensor.nbytes for tensor in model.parameters())
    assert cost.weight_bytes(config, dtype_bytes=2) * 2 == cost.weight_bytes(config)


# --- memory of a cache -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dense", "grouped", "gpt", "latent, everything"])
def test_cache_bytes_are_those_of_the_cache(name: str) -> None:
    config = of_zoo(name)
    cache = Cache(config.num_layers, batch=3, context=40)
    Transformer(config).hidden(torch.zeros(3, 5, dtype=torch.int64), cache)
    tensors = [tensor for layer in cache.layers for tensor in (layer._keys, layer._values) if tensor is not None]
    assert len(tensors) == 2 * config.num_layers
    assert cost.cache_bytes(config, 3, 40, dtype_bytes=4) == sum(tensor.nbytes for tensor in tensors)


def test_a_latent_cache_has_one_latent_and_one_turned_key_a_token() -> None:
    assert cost.latent_cache_bytes(of_zoo("latent"), 2, 10, dtype_bytes=2) == 3 * 2 * 10 * (16 + 4) * 2
    with pytest.raises(ValueError, match="needs attention='latent'; got 'heads'"):
        cost.latent_cache_bytes(of_zoo("dense"), 2, 10, dtype_bytes=2)


# --- peaks, MFU, words -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "precision", "tera"),
    [
        ("NVIDIA H200", "bf16", 989),
        ("NVIDIA H200", "fp32", 67),
        ("NVIDIA H200 NVL", "bf16", 835),
        ("NVIDIA GH200 480GB", "bf16", 989),
        ("NVIDIA H100 80GB HBM3", "bf16", 989),
        ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA H100 NVL", "fp16", 835),
        ("NVIDIA B200", "bf16", 2250),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312),
        ("NVIDIA A100 80GB PCIe", "fp32", 19.5),
        ("NVIDIA A10", "bf16", 125),
        ("NVIDIA L4", "bf16", 121),
        ("NVIDIA L40S", "bf16", 362),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2),
        ("Tesla T4", "fp16", 65),
        ("Tesla V100-SXM2-16GB", "fp16", 125),
        ("Tesla V100-PCIE-32GB", "fp16", 112),
    ],
)
def test_a_peak_is_found_by_the_name_of_the_gpu(name: str, precision: str, tera: float) -> None:
    assert cost.peak(name, precision) == pytest.approx(tera * 1e12, rel=1e-12)


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA A10G",  # not an A10
        "NVIDIA GB200",  # not a B200
        "NVIDIA L40",
        "NVIDIA H100",  # which one?
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA GeForce GTX 1080",
        "",
    ],
)
def test_a_gpu_that_is_not_known_for_sure_has_no_peak(name: str) -> None:
    assert cost.peak(name, "bf16") is None


def test_a_dtype_that_a_gpu_cannot_multiply_has_no_peak() -> None:
    assert cost.peak("Tesla T4", "bf16") is None


def test_mfu_is_the_share_of_the_peak_that_the_model_needs() -> None:
    config = of_preset("tinystories")
    assert cost.mfu(config, 1e6, 989e12) == pytest.approx(1e6 * 108_589_056 / 989e12)
    assert cost.mfu(config, 1e6, 989e12, context=64) < cost.mfu(config, 1e6, 989e12)


def test_describe_tells_size_arithmetic_and_cache() -> None:
    assert cost.describe(of_preset("tinystories")).splitlines() == [
        "22.7 M parameters",
        "36.2 MFLOP/token, 108.6 in training (rows of 256)",
        "cache: 8,192 bytes a token in 16 bits",
    ]


def test_describe_tells_what_is_at_work_in_a_mixture_and_what_a_latent_saves() -> None:
    assert "62.2 M parameters, 24.1 M of them at work for a token" in cost.describe(of_preset("moe-60m"))
    assert "480 bytes a token in 16 bits (120 as latents)" in cost.describe(of_zoo("latent"))
