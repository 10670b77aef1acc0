"""Attention: heads of their own or shared ones (MHA, GQA), and from a latent vector (MLA).

It knows shapes and ops; it does not know blocks, losses or where a cache's memory comes from. q, k and v are
[B, T, heads, H] until the last moment, so that projections need no copy.

    attention = Attention(config, ops)
    y = attention(x, angles)                          # x, y: [B, T, D]
    y = attention(x, angles, cache.layers[3])         # x: the new tokens; keys and values of the old ones are kept
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuselm.config import ModelConfig
from fuselm.ops import Ops
from fuselm.torchlm.cache import LayerCache
from fuselm.torchlm.layers import Linear


class Angles(NamedTuple):
    """Cosines and sines of the positions of x: [T, half of what is turned] each, fp32."""

    cos: Tensor
    sin: Tensor


def rope_tables(context: int, head_dim: int, theta: float) -> Angles:
    """The angles of every position: theta ** (-2 i / head_dim) times the position, in float64 until the last step."""
    frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)  # [H/2]
    angles = torch.arange(context, dtype=torch.float64)[:, None] * frequencies  # [context, H/2]
    return Angles(angles.cos().float(), angles.sin().float())


def attend(q: Tensor, k: Tensor, v: Tensor, *, ops: Ops, path: str, dropout: float) -> Tensor:
    """What each query [B, T, N, H] sees of keys and values [B, S, K, H], causally: the queries are the last T of S."""
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # [B, N or K, T or S, H]
    seen = _sdpa(q, k, v, dropout) if path == "sdpa" else _written(q, k, v, ops, dropout)
    return seen.transpose(1, 2)  # [B, T, N, H]


def _sdpa(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
    queries, keys = q.shape[2], k.shape[2]
    mask = None
    if 1 < queries < keys:  # some new tokens behind a cache; one alone sees everything, all of them are the plain case
        mask = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)  # [T, S]
    return F.scaled_dot_product_attention(
        q, k, v, mask, dropout_p=dropout, is_causal=queries == keys > 1, enable_gqa=q.shape[1] != k.shape[1]
    )


def _written(q: Tensor, k: Tensor, v: Tensor, ops: Ops, dropout: float) -> Tensor:
    """Matmul, softmax, matmul; query heads that share a key head are a dimension of their own."""
    batch, heads, queries, width = q.shape
    groups = k.shape[1]
    q = q.reshape(batch, groups, heads // groups, queries, width)  # [B, K, N/K, T, H]
    scores = q @ k.unsqueeze(2).transpose(-1, -2)  # [B, K, N/K, T, S]
    shares = ops.softmax(scores, scale=1 / math.sqrt(width), causal=True)
    shares = F.dropout(shares, dropout) if dropout else shares
    return (shares @ v.unsqueeze(2)).reshape(batch, heads, queries, v.shape[-1])  # [B, N, T, H]


class Attention(nn.Module):
    """Query heads, each with a key and value head of its own (MHA) or sharing one with others (GQA)."""

    def __init__(self, config: ModelConfig, ops: Ops) -> None:
        super().__init__()
        self.config, self.ops = config, ops
        heads, kv_heads, width = config.num_heads, config.kv_heads, config.head_width
        self.splits = (heads, kv_heads, kv_heads)
        self.qkv = Linear(config.width, sum(self.splits) * width, config.bias)
        self.out = Linear(heads * width, config.width, config.bias)
        self.q_norm = nn.Parameter(torch.ones(width)) if config.qk_norm else None
        self.k_norm = nn.Parameter(torch.ones(width)) if config.qk_norm else None

    def forward(self, x: Tensor, angles: Angles | None, cache: LayerCache | None = None) -> Tensor:
        config = self.config
        batch, tokens, _ = x.shape
        packed = self.qkv(x).view(batch, tokens, sum(self.splits), config.head_width)  # [B, T, N + 2 K, H]
        q, k, v = self._placed(packed, angles)
        if cache is not None:
            k, v = cache.append(k, v)  # [B, S, K, H]
        dropout = config.dropout if self.training else 0.0
        seen = attend(q, k, v, ops=self.ops, path=config.attention_path, dropout=dropout)
        y: Tensor = self.out(seen.reshape(batch, tokens, -1))
        return y

    def _placed(self, packed: Tensor, angles: Angles | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values; the first two normalised if the model does that, and turned to where they stand."""
        eps = self.config.norm_eps
        if angles is not None and self.q_norm is None:
            placed: tuple[Tensor, Tensor, Tensor] = self.ops.rope_qkv(
                packed, angles.cos, angles.sin, kv_heads=self.config.kv_heads, inplace=True
            )
            return placed
        q, k, v = packed.split(self.splits, dim=2)
        if angles is not None:
            norms = {"q_weight": self.q_norm, "k_weight": self.k_norm, "eps": eps}
            q, k = self.ops.rope(q, k, angles.cos, angles.sin, **norms)
        elif self.q_norm is not None:
            q, k = self.ops.rms_norm(q, self.q_norm, eps), self.ops.rms_norm(k, self.k_norm, eps)
        return q, k, v


class LatentAttention(nn.Module):
    """MLA: keys and values of all heads are made of one short vector for each token.

    Positions would spoil that (a turned key is no longer a fixed matrix times the latent), so each head has some more
    numbers for them: turned queries of its own, and one turned key that all heads share.
    """

    def __init__(self, config: ModelConfig, ops: Ops) -> None:
        super().__init__()
        assert config.kv_latent  # ModelConfig has checked
        assert config.rope_head_dim
        self.config, self.ops = config, ops
        heads, width, turned = config.num_heads, config.head_width, config.rope_head_dim
        if config.q_latent:
            self.q_down = Linear(config.width, config.q_latent, config.bias)
            self.q_latent_norm = nn.Parameter(torch.ones(config.q_latent))
        self.q = Linear(config.q_latent or config.width, heads * (width + turned), config.bias)
        self.kv_down = Linear(config.width, config.kv_latent + turned, config.bias)
        self.kv_latent_norm = nn.Parameter(torch.ones(config.kv_latent))
        self.kv_up = Linear(config.kv_latent, heads * 2 * width, config.bias)
        self.out = Linear(heads * width, config.width, config.bias)
        self.q_norm = nn.Parameter(torch.ones(width)) if config.qk_norm else None
        self.k_norm = nn.Parameter(torch.ones(width)) if config.qk_norm else None

    def forward(self, x: Tensor, angles: Angles | None, cache: LayerCache | None = None) -> Tensor:
        config, eps = self.config, self.config.norm_eps
        assert angles is not None
        assert config.kv_latent
        assert config.rope_head_dim
        batch, tokens, _ = x.shape
        heads, width, turned = config.num_heads, config.head_width, config.rope_head_dim

        source = self.ops.rms_norm(self.q_down(x), self.q_latent_norm, eps) if config.q_latent else x
        q, q_turned = self.q(source).view(batch, tokens, heads, width + turned).split((width, turned), dim=-1)
        latent, k_turned = self.kv_down(x).split((config.kv_latent, turned), dim=-1)
        latent = self.ops.rms_norm(latent, self.kv_latent_norm, eps)  # [B, T, latent]
        k, v = self.kv_up(latent).view(batch, tokens, heads, 2 * width).split((width, width), dim=-1)  # [B, T, N, H]
        if self.q_norm is not None:
            q, k = self.ops.rms_norm(q, self.q_norm, eps), self.ops.rms_norm(k, self.k_norm, eps)

        q_turned, k_turned = self.ops.rope(q_turned, k_turned.unsqueeze(2), angles.cos, angles.sin)
        q = torch.cat((q, q_turned), dim=-1)  # [B, T, N, H + turned]
        k = torch.cat((k, k_turned.expand(-1, -1, heads, -1)), dim=-1)
        if cache is not None:
            k, v = cache.append(k, v)
        dropout = config.dropout if self.training else 0.0
        seen = attend(q, k, v, ops=self.ops, path=config.attention_path, dropout=dropout)  # [B, T, N, H]
        y: Tensor = self.out(seen.reshape(batch, tokens, -1))
        return y
