"""The decoder: one small transformer that a ModelConfig makes dense or a mixture, with MHA, GQA or MLA.

It knows how blocks are put together and how weights begin; attention.py and mlp.py know the rest. It does not know
data, optimisers or files. Shapes: B rows, T tokens, D width, V vocabulary.

    model = Transformer(preset("tinylm").model(vocab_size=65), seed=1)
    logits = model(ids)                              # [B, T, V]
    loss, balance = model.loss(ids, targets)         # balance is 0 without experts
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuselm import ops as public_ops
from fuselm.config import ModelConfig
from fuselm.ops import Ops
from fuselm.torchlm.attention import Angles, Attention, LatentAttention, rope_tables
from fuselm.torchlm.cache import Cache, LayerCache
from fuselm.torchlm.layers import Linear, Norm
from fuselm.torchlm.mlp import MLP, MoE


class Block(nn.Module):
    """Attention, then feed-forward, each behind a norm and added to the residual stream.

    A sum is made where it is next needed, inside the norm: x is what the half before gave, residual what came before.
    """

    def __init__(self, config: ModelConfig, ops: Ops) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.attention_norm = Norm(config, ops)
        self.attention = LatentAttention(config, ops) if config.attention == "latent" else Attention(config, ops)
        self.mlp_norm = Norm(config, ops)
        self.mlp = MoE(config, ops) if config.num_experts else MLP(config, ops)

    def forward(
        self, x: Tensor, residual: Tensor | None, angles: Angles | None, cache: LayerCache | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        y, residual = self.attention_norm(x, residual)
        x = F.dropout(self.attention(y, angles, cache), self.dropout, self.training)
        y, residual = self.mlp_norm(x, residual)
        out = self.mlp(y)
        x, balance = out if isinstance(self.mlp, MoE) else (out, None)
        return F.dropout(x, self.dropout, self.training), residual, balance


class Transformer(nn.Module):
    """Embedding, blocks, norm and head; fp32 weights, activations of `dtype`."""

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.config, self.dtype = config, dtype
        self.logits_bytes: int | None = None  # what the loss may hold of logits in training; None: its own bound
        self.ops = public_ops.choose(config.impl, config.op_impl, device=str(device))
        self.embedding = nn.Parameter(torch.empty(config.vocab_size, config.width))
        learned = config.positions == "learned"
        self.positions = nn.Parameter(torch.empty(config.context, config.width)) if learned else None
        self.layers = nn.ModuleList(Block(config, self.ops) for _ in range(config.num_layers))
        self.norm = Norm(config, self.ops)
        self.head = None if config.tied else Linear(config.width, config.vocab_size, casts=False)
        if not learned:
            turned = config.rope_head_dim or config.head_width
            angles = rope_tables(config.context, turned, config.rope_theta)
            self.register_buffer("cos", angles.cos, persistent=False)
            self.register_buffer("sin", angles.sin, persistent=False)
        initialise(self, seed)
        self.to(device)

    def hidden(self, ids: Tensor, cache: Cache | None = None) -> tuple[Tensor, Tensor]:
        """What the head reads, [B, T, D], and the mean balance loss; with a cache, ids are what follows it."""
        start = 0 if cache is None else cache.length
        end = start + ids.shape[1]
        self._check_length(end)
        places = None if self.positions is None else self.positions[start:end]
        x = self.ops.embedding(ids, self.embedding, position_weight=places, dtype=self.dtype)  # [B, T, D]
        x = F.dropout(x, self.config.dropout, self.training)
        angles = None if self.positions is not None else Angles(self.cos[start:end], self.sin[start:end])
        residual: Tensor | None = None
        balances = []
        for index, block in enumerate(self.layers):
            x, residual, balance = block(x, residual, angles, None if cache is None else cache.layers[index])
            balances += [] if balance is None else [balance]
        y, _ = self.norm(x, residual)
        return y, torch.stack(balances).mean() if balances else x.new_zeros((), dtype=torch.float32)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of the next token at every place: [B, T, V]."""
        return self.logits(self.hidden(ids)[0])

    def logits(self, hidden: Tensor) -> Tensor:
        """Of hidden states [..., D]: [..., V]."""
        logits = F.linear(hidden, self.head_weight.to(hidden.dtype))
        cap = self.config.softcap
        return logits if cap is None else cap * torch.tanh(logits.float() / cap).to(logits.dtype)

    def loss(self, ids: Tensor, targets: Tensor, reduction: str = "mean") -> tuple[Tensor, Tensor]:
        """Cross-entropy of targets [B, T] (-100 is not counted), in fp32, and the balance loss, not yet weighted."""
        hidden, balance = self.hidden(ids)
        cap, most = self.config.softcap, self.logits_bytes if self.training else None
        loss = self.ops.linear_cross_entropy(
            hidden, self.head_weight, targets, softcap=cap, reduction=reduction, max_bytes=most
        )
        return loss, balance

    @property
    def head_weight(self) -> Tensor:
        """[V, D]: the head's, or the embedding where they are tied."""
        return self.embedding if self.head is None else self.head.weight

    def _check_length(self, tokens: int) -> None:
        if tokens > self.config.context:
            raise ValueError(
                f"A row has at most context = {self.config.context} tokens; got {tokens}. Cut it, or train a model "
                "with a longer context."
            )


@torch.no_grad()
def initialise(model: Transformer, seed: int) -> None:
    """Normal weights of one standard deviation, on the CPU from a seed, so that every device begins alike.

    What is added to the residual stream begins smaller the more layers add to it. Norms and biases are set already.
    """
    generator = torch.Generator().manual_seed(seed)
    std = model.config.init_std or 1 / math.sqrt(model.config.width)
    smaller = std / math.sqrt(2 * model.config.num_layers)
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2 or name.endswith("bias"):
            continue
        adds = name.endswith((".out.weight", ".down.weight", "mlp.down"))
        parameter.normal_(0.0, smaller if adds else std, generator=generator)
