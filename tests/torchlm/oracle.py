"""A decoder and its ops in numpy and float64, written from the formulas one head, token and expert at a time.

It knows a ModelConfig and weights by name; it knows neither torch's ops nor fuselm's. Where the model packs matrices
into one, they are taken apart here first. Gradients come from differences, of whatever function of arrays.

    model = stirred(config, seed=1)                           # the model under test, with no weight at a trivial value
    weights = weights_of(model)
    logits, balance = decode(config, weights, ids)            # [B, T, V], mean balance loss of the layers
    value = loss(config, weights, ids, targets)               # as training minimises it
    slope(lambda w: loss(config, w, ids, targets), weights, "embedding", direction)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from fuselm.config import ModelConfig
from fuselm.torchlm.model import Transformer

Array = np.ndarray
Weights = Mapping[str, Array]

_erf = np.vectorize(math.erf, otypes=[np.float64])


# --- parts -----------------------------------------------------------------------------------------------------------


def softmax(scores: Array) -> Array:
    """Over the last dimension; a row of nothing but -inf is zeros."""
    top = scores.max(-1, keepdims=True)
    powers = np.exp(scores - np.where(np.isfinite(top), top, 0.0))
    total = powers.sum(-1, keepdims=True)
    return powers / np.where(total == 0, 1.0, total)


def masked_softmax(x: Array, scale: float = 1.0, causal: bool = False, mask: Array | float = 0.0) -> Array:
    """Of scale * x + mask; with `causal` the T queries are the last of the S keys."""
    scores = x * scale + mask
    if causal:
        rows, columns = x.shape[-2:]
        unseen = np.arange(columns) > np.arange(rows)[:, None] + columns - rows
        scores = np.where(unseen, -np.inf, scores)
    return softmax(scores)


def gelu(x: Array) -> Array:
    return x * (1 + _erf(x / math.sqrt(2))) / 2


def tanh_gelu(x: Array) -> Array:
    """GPT-2's formula for gelu."""
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def relu2(x: Array) -> Array:
    return np.maximum(x, 0.0) ** 2


def rms_norm(x: Array, weight: Array | float, eps: float) -> Array:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def layer_norm(x: Array, weight: Array | float, bias: Array | float, eps: float) -> Array:
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps) * weight + bias


def turned(x: Array, positions: Array, theta: float) -> Array:
    """RoPE of [T, H]: number i and number i + H/2 are a complex number, turned by position * theta^(-2 i / H)."""
    half = x.shape[-1] // 2
    angles = np.outer(positions, theta ** (-np.arange(half) / half))  # [T, H/2]
    z = (x[:, :half] + 1j * x[:, half:]) * np.exp(1j * angles)
    return np.concatenate((z.real, z.imag), axis=-1)


def embedding(weight: Array, ids: Array, position_weight: Any = None, positions: Any = None) -> Array:
    """Rows of words [B, T], plus rows of places, which are [T] or [B, T]."""
    rows = np.stack([[weight[i] for i in row] for row in ids])
    if position_weight is None:
        return rows
    where = np.broadcast_to(np.arange(ids.shape[1]) if positions is None else positions, ids.shape)
    return rows + np.stack([[position_weight[p] for p in row] for row in where])


def rope(q: Array, k: Array, q_weight: Any = None, k_weight: Any = None, eps: float = 0.0, **rest: Any) -> Any:
    """One pair of q and k [B, T, heads, H] at a time: a complex number, times cos + i sin of its place."""
    results, half = [], q.shape[-1] // 2
    for x, weight in ((q, q_weight), (k, k_weight)):
        y = x if weight is None else rms_norm(x, weight, eps)
        out = np.zeros_like(y)
        places = np.broadcast_to(rest.get("positions", np.arange(y.shape[1])), y.shape[:2])
        for row, token, pair in np.ndindex(*y.shape[:2], half):
            real, imaginary = (2 * pair, 2 * pair + 1) if rest.get("interleaved") else (pair, pair + half)
            at = places[row, token], pair
            z = (y[row, token, :, real] + 1j * y[row, token, :, imaginary]) * (rest["cos"][at] + 1j * rest["sin"][at])
            out[row, token, :, real], out[row, token, :, imaginary] = z.real, z.imag
        results.append(out)
    return tuple(results)


def seen(q: Array, k: Array, v: Array) -> Array:
    """Causal attention of one head: queries [T, H], keys [T, H], values [T, H']."""
    scores = q @ k.T / math.sqrt(q.shape[-1])
    scores[np.triu_indices(len(q), 1)] = -np.inf
    return softmax(scores) @ v


def cross_entropy(
    logits: Array,
    targets: Array,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
) -> Array:
    """Of logits [..., V] and targets [...]; smoothing spreads a share of the target over all words alike."""
    if softcap is not None:
        logits = softcap * np.tanh(logits / softcap)
    losses, counted = np.zeros(targets.shape), 0
    for at in np.ndindex(*targets.shape):
        if targets[at] == ignore_index:
            continue
        row = logits[at]
        log_sum = np.log(np.exp(row).sum())
        wanted = np.full(len(row), label_smoothing / len(row))
        wanted[targets[at]] += 1 - label_smoothing
        losses[at] = (wanted * (log_sum - row)).sum() + z_loss * log_sum**2
        counted += 1
    if reduction == "none":
        return losses
    return np.asarray(losses.sum() / (max(counted, 1) if reduction == "mean" else 1))


# --- attention -------------------------------------------------------------------------------------------------------


def _linear(weights: Weights, name: str, x: Array) -> Array:
    return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0.0)


def _head_attention(config: ModelConfig, weights: Weights, prefix: str, x: Array) -> Array:
    """MHA or GQA of one row [T, D]; query heads share a key head in their order."""
    width, heads, kv_heads = config.head_width, config.num_heads, config.kv_heads
    packed = _linear(weights, f"{prefix}.qkv", x)  # [T, (N + 2 K) H]
    q, k, v = np.split(packed, (heads * width, (heads + kv_heads) * width), axis=-1)
    places = np.arange(len(x))

    def placed(vectors: Array, which: str) -> Array:
        if config.qk_norm:
            vectors = rms_norm(vectors, weights[f"{prefix}.{which}_norm"], config.norm_eps)
        return turned(vectors, places, config.rope_theta) if config.positions == "rope" else vectors

    out = []
    for head in range(heads):
        shared = head // (heads // kv_heads)
        part = slice(shared * width, (shared + 1) * width)
        query = placed(q[:, head * width : (head + 1) * width], "q")
        out.append(seen(query, placed(k[:, part], "k"), v[:, part]))
    return _linear(weights, f"{prefix}.out", np.concatenate(out, axis=-1))


def _latent_attention(config: ModelConfig, weights: Weights, prefix: str, x: Array) -> Array:
    """MLA of one row [T, D]: keys and values from a normed latent, positions on numbers of their own."""
    assert config.kv_latent is not None
    assert config.rope_head_dim is not None
    width, rotated, eps = config.head_width, config.rope_head_dim, config.norm_eps
    source = x
    if config.q_latent is not None:
        source = rms_norm(_linear(weights, f"{prefix}.q_down", x), weights[f"{prefix}.q_latent_norm"], eps)
    queries = _linear(weights, f"{prefix}.q", source)  # [T, N (H + rotated)]
    down = _linear(weights, f"{prefix}.kv_down", x)
    latent = rms_norm(down[:, : config.kv_latent], weights[f"{prefix}.kv_latent_norm"], eps)
    places = np.arange(len(x))
    shared_key = turned(down[:, config.kv_latent :], places, config.rope_theta)  # [T, rotated], of all heads
    up = _linear(weights, f"{prefix}.kv_up", latent)  # [T, N (key H, value H)]
    out = []
    for head in range(config.num_heads):
        both = queries[:, head * (width + rotated) : (head + 1) * (width + rotated)]
        q, q_rotated = both[:, :width], turned(both[:, width:], places, config.rope_theta)
        k, v = np.split(up[:, head * 2 * width : (head + 1) * 2 * width], 2, axis=-1)
        if config.qk_norm:
            q, k = rms_norm(q, weights[f"{prefix}.q_norm"], eps), rms_norm(k, weights[f"{prefix}.k_norm"], eps)
        out.append(seen(np.concatenate((q, q_rotated), -1), np.concatenate((k, shared_key), -1), v))
    return _linear(weights, f"{prefix}.out", np.concatenate(out, axis=-1))


# --- feed-forward ----------------------------------------------------------------------------------------------------


def activated(kind: str, x: Array) -> Array:
    """A gated activation halves the last dimension: the first half is the gate."""
    if kind in ("swiglu", "geglu"):
        gate, up = np.split(x, 2, axis=-1)
        return (silu if kind == "swiglu" else gelu)(gate) * up
    return {"gelu": gelu, "silu": silu, "relu2": relu2}[kind](x)


def _dense(config: ModelConfig, weights: Weights, prefix: str, x: Array) -> Array:
    return _linear(weights, f"{prefix}.down", activated(config.activation, _linear(weights, f"{prefix}.up", x)))


class Routing(NamedTuple):
    experts: list[list[int]]  # of each token, the likeliest first
    weights: list[list[float]]
    balance: float


def route(logits: Array, experts_per_token: int) -> Routing:
    """Token by token: the k likeliest experts, their probabilities made to sum to 1, and the load-balancing loss."""
    tokens, count = logits.shape
    probabilities = softmax(logits)
    chosen = [[int(e) for e in np.argsort(-row, kind="stable")[:experts_per_token]] for row in probabilities]
    weights = [
        [row[e] / sum(row[i] for i in mine) for e in mine] for row, mine in zip(probabilities, chosen, strict=True)
    ]
    visits = [sum(mine.count(e) for mine in chosen) / (tokens * experts_per_token) for e in range(count)]
    balance = count * sum(visits[e] * float(probabilities[:, e].mean()) for e in range(count))
    return Routing(chosen, weights, balance)


def mixture(config: ModelConfig, weights: Weights, prefix: str, x: Array) -> tuple[Array, float]:
    """Tokens [M, D] through their experts one visit at a time, and the balance loss."""
    routing = route(x @ weights[f"{prefix}.router.weight"].T, config.experts_per_token)
    out = np.zeros_like(x)
    for token, (mine, shares) in enumerate(zip(routing.experts, routing.weights, strict=True)):
        for expert, share in zip(mine, shares, strict=True):
            hidden = x[token] @ weights[f"{prefix}.up"][expert]
            if config.bias:
                hidden = hidden + weights[f"{prefix}.up_bias"][expert]
            y = activated(config.activation, hidden) @ weights[f"{prefix}.down"][expert]
            out[token] += share * (y + weights[f"{prefix}.down_bias"][expert] if config.bias else y)
    if config.shared_expert:
        out += _dense(config, weights, f"{prefix}.shared", x)
    return out, routing.balance


# --- the whole -------------------------------------------------------------------------------------------------------


def _norm(config: ModelConfig, weights: Weights, name: str, x: Array) -> Array:
    weight = weights[f"{name}.weight"]
    if config.norm == "rms":
        return rms_norm(x, weight, config.norm_eps)
    return layer_norm(x, weight, weights.get(f"{name}.bias", 0.0), config.norm_eps)


def decode(config: ModelConfig, weights: Weights, ids: Array) -> tuple[Array, float]:
    """Logits [B, T, V] of ids [B, T], and the mean of the layers' balance losses (0 without experts)."""
    x = weights["embedding"][ids]  # [B, T, D]
    if config.positions == "learned":
        x = x + weights["positions"][: ids.shape[1]]
    attention = _latent_attention if config.attention == "latent" else _head_attention
    balances = [0.0] if not config.num_experts else []
    for index in range(config.num_layers):
        layer = f"layers.{index}"
        y = _norm(config, weights, f"{layer}.attention_norm", x)
        x = x + np.stack([attention(config, weights, f"{layer}.attention", row) for row in y])
        y = _norm(config, weights, f"{layer}.mlp_norm", x)
        if config.num_experts:
            flat, balance = mixture(config, weights, f"{layer}.mlp", y.reshape(-1, config.width))
            x = x + flat.reshape(x.shape)
            balances.append(balance)
        else:
            x = x + _dense(config, weights, f"{layer}.mlp", y)
    head = weights["embedding"] if config.tied else weights["head.weight"]
    logits = _norm(config, weights, "norm", x) @ head.T
    if config.softcap is not None:
        logits = config.softcap * np.tanh(logits / config.softcap)
    return logits, sum(balances) / len(balances)


def loss(config: ModelConfig, weights: Weights, ids: Array, targets: Array) -> float:
    """Mean cross-entropy of the targets that are not -100, plus the weighted balance loss."""
    logits, balance = decode(config, weights, ids)
    return float(cross_entropy(logits, targets)) + config.balance_weight * balance


# --- derivatives -----------------------------------------------------------------------------------------------------


def slope(
    function: Callable[[Weights], float], arrays: Weights, name: str, direction: Array, step: float = 1e-6
) -> float:
    """How fast the function changes as one array moves along a direction: a central difference, good to 1e-8 or so."""
    ahead, behind = (function({**arrays, name: arrays[name] + sign * step * direction}) for sign in (1, -1))
    return (ahead - behind) / (2 * step)


def gradient(function: Callable[[Weights], float], arrays: Weights, name: str) -> Array:
    """The slope along every single element: for small arrays."""
    found = np.zeros_like(arrays[name])
    for at in np.ndindex(*found.shape):
        direction = np.zeros_like(found)
        direction[at] = 1.0
        found[at] = slope(function, arrays, name, direction)
    return found


# --- the model under test --------------------------------------------------------------------------------------------


def stirred(config: ModelConfig, seed: int = 0) -> Transformer:
    """A model whose norms are not 1 and whose biases are not 0, so that forgetting one shows."""
    model = Transformer(config, seed=seed)
    generator = torch.Generator().manual_seed(seed + 1000)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


def weights_of(module: torch.nn.Module) -> dict[str, Array]:
    """Every parameter by name, in float64."""
    return {name: parameter.detach().double().numpy() for name, parameter in module.named_parameters()}


def some_ids(rows: int, tokens: int, vocab_size: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, vocab_size, (rows, tokens), generator=torch.Generator().manual_seed(seed))  # [B, T]
