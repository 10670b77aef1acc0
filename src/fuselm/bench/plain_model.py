"""The yardstick for training speed: a transformer as most people write it, plain PyTorch and no op of fuselm.

bf16 autocast, torch.nn modules, SDPA as torch picks it, torch's fused AdamW; meant to be run under torch.compile. Same
shapes as a ModelConfig with RMSNorm, RoPE and SwiGLU, so that a step of one is the work of a step of the other.

    plain = PlainModel(model.config)
    plain.take(model)                                  # the weights of a Transformer
    loss = plain(ids, targets)
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuselm.config import ModelConfig
from fuselm.torchlm.model import Transformer


class PlainBlock(nn.Module):
    """Attention and SwiGLU behind norms, each added to x."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width, hidden = config.width, config.ffn_width
        self.heads = config.num_heads
        self.norm1, self.norm2 = nn.RMSNorm(width, config.norm_eps), nn.RMSNorm(width, config.norm_eps)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)  # [B, N, T, H]
        y = F.scaled_dot_product_attention(_turn(q, cos, sin), _turn(k, cos, sin), v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, tokens, width))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class PlainModel(nn.Module):
    """Embedding, blocks, head; forward gives the loss."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        if reason := unlike(config):
            raise ValueError(
                f"PlainModel has RMSNorm, RoPE, SwiGLU and heads of their own; got a config with {reason}."
            )
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.blocks = nn.ModuleList(PlainBlock(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.width, config.norm_eps)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
        if config.tied:
            self.head.weight = self.embedding.weight
        frequencies = config.rope_theta ** (-torch.arange(0, config.head_width, 2) / config.head_width)
        angles = torch.outer(torch.arange(config.context), frequencies)  # [T, H/2]
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    @torch.no_grad()
    def take(self, ours: Transformer) -> None:
        """The weights of a model of the same config."""
        self.embedding.weight.copy_(ours.embedding)
        self.head.weight.copy_(ours.head_weight)
        self.norm.weight.copy_(ours.norm.weight)
        for block, other in zip(self.blocks, ours.layers, strict=True):
            _copy_block(block, other)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]).float(), targets.view(-1))


def unlike(config: ModelConfig) -> str:
    """What a config has that the plain model has not; empty where they are the same model."""
    same = {"norm": "rms", "positions": "rope", "attention": "heads", "activation": "swiglu", "qk_norm": False}
    same |= {"num_experts": 0, "bias": False, "softcap": None, "dropout": 0.0, "kv_heads": config.num_heads}
    same |= {"head_width": config.width // config.num_heads}
    found = [f"{name} {getattr(config, name)}" for name, value in same.items() if getattr(config, name) != value]
    return ", ".join(found)


def _copy_block(plain: Any, ours: Any) -> None:
    gate, up = ours.mlp.up.weight.chunk(2)
    pairs = [
        (plain.norm1, ours.attention_norm.weight), (plain.norm2, ours.mlp_norm.weight),
        (plain.qkv, ours.attention.qkv.weight), (plain.out, ours.attention.out.weight),
        (plain.gate, gate), (plain.up, up), (plain.down, ours.mlp.down.weight),
    ]  # fmt: skip
    for module, weight in pairs:
        module.weight.copy_(weight)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(x.dtype)
