"""What a model costs: parameters, arithmetic, memory, and how much of a GPU's arithmetic a run makes use of.

Pure functions of a ModelConfig. Knows the shapes of the model and which tensors a training step keeps; knows no
framework and measures nothing. Parameters, FLOPs and cache bytes are exact, activation bytes an estimate.

    config = preset("tinystories").model(vocab_size=10_000)
    parameters(config).total                              # 22_696_448
    flops_per_token(config).training                      # 108_589_056 at the config's context
    fits = training_state_bytes(config) + activation_bytes(config, 64, 256, dtype_bytes=2) < free
    mfu(config, tokens_per_second=2e6, peak=peak("NVIDIA H200", "bf16"))

Letters as everywhere in the house: B rows, T tokens of a row, D width, N query heads, K key and value heads, H head
dimension, F feed-forward width, V vocabulary, E experts; and R, the turned part of a head in latent attention.
"""

from __future__ import annotations

import re
from dataclasses import astuple, dataclass

from fuselm.config import ModelConfig

Matrices = list[tuple[int, int]]  # (inputs, outputs) of each
# What the fused loss works with: its bound on the logits held at a time, and how many rows its blocks are multiples of.
LOGITS_BYTES, LOGITS_TILE = 256 << 20, 128

# --- parameters ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parameters:
    """How many numbers are learned, by what they are for; biases count with their matrices."""

    embedding: int  # also the head where they are tied
    positions: int
    attention: int
    feed_forward: int  # of all experts
    norms: int
    head: int  # 0 where it is the embedding
    router: int
    idle: int  # of feed_forward, in the experts that one token does not visit

    @property
    def total(self) -> int:
        """What is trained, saved and kept in memory."""
        return sum(astuple(self)) - self.idle

    @property
    def active(self) -> int:
        """What one token's pass has to do with: all but the experts that it does not visit."""
        return self.total - self.idle


def parameters(config: ModelConfig) -> Parameters:
    """Counted from the shapes, to the last one."""
    layers, width, experts = config.num_layers, config.width, config.num_experts or 1
    expert = _numbers(_feed_forward_matrices(config), config.bias)
    norm = width * (2 if config.bias and config.norm == "layer" else 1)
    in_heads = 2 * config.head_width if config.qk_norm else 0
    in_latents = (config.kv_latent or 0) + (config.q_latent or 0)  # each latent vector has a norm
    return Parameters(
        embedding=config.vocab_size * width,
        positions=config.context * width if config.positions == "learned" else 0,
        attention=layers * _numbers(_attention_matrices(config), config.bias),
        feed_forward=layers * expert * (experts + config.shared_expert),
        norms=layers * (2 * norm + in_heads + in_latents) + norm,
        head=0 if config.tied else config.vocab_size * width,
        router=layers * width * config.num_experts,
        idle=layers * expert * (experts - _visits(config)),
    )


def _attention_matrices(config: ModelConfig) -> Matrices:
    """Of one layer: projections of x to queries, keys and values, and of what was seen back to x."""
    width, heads, size = config.width, config.num_heads, config.head_width
    out = (heads * size, width)
    if config.attention == "heads":
        return [(width, (heads + 2 * config.kv_heads) * size), out]
    latent, turned = config.kv_latent or 0, config.rope_head_dim or 0
    down = [(width, config.q_latent)] if config.q_latent else []
    queries = (config.q_latent or width, heads * (size + turned))
    return [*down, queries, (width, latent + turned), (latent, heads * 2 * size), out]


def _feed_forward_matrices(config: ModelConfig) -> Matrices:
    """Of one expert, or of the one feed-forward there is; gate and up are packed."""
    return [(config.width, config.ffn_width * (2 if config.gated else 1)), (config.ffn_width, config.width)]


def _numbers(matrices: Matrices, bias: bool = False) -> int:
    return sum(inputs * outputs + (outputs if bias else 0) for inputs, outputs in matrices)


def _visits(config: ModelConfig) -> int:
    """How many experts a token is sent to; a dense feed-forward counts as one."""
    return config.experts_per_token if config.num_experts else 1


# --- arithmetic ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Flops:
    """Matmul FLOPs of one token on its way forward; a multiplication and an addition are two."""

    projections: int  # queries, keys, values, and back
    attention: int  # scores, and values weighted by them
    feed_forward: int  # of the experts that are visited
    router: int
    head: int

    @property
    def forward(self) -> int:
        return self.projections + self.attention + self.feed_forward + self.router + self.head

    @property
    def training(self) -> int:
        """Forward and backward: a product has two gradients, each as large as itself."""
        return 3 * self.forward


def flops_per_token(config: ModelConfig, context: int | None = None) -> Flops:
    """The FLOPs that the model needs for one token, the mean over rows of `context` tokens (None: the config's).

    Needed, not done: a query at place t sees t keys, (T + 1) / 2 in the mean, whether or not the code also multiplies
    what the mask then hides; an expert that is not visited costs nothing; nothing is computed twice. Not counted are
    the embedding (a look-up) and all that is no matmul of weights or of attention: norms, softmax, RoPE, activations,
    biases, residual sums, the loss, the optimiser.
    """
    layers, tokens = config.num_layers, config.context if context is None else context
    # 2 FLOPs x (T + 1) / 2 keys x the numbers of a key (H, and R in latent attention) and of a value (H).
    attention = (tokens + 1) * config.num_heads * (2 * config.head_width + (config.rope_head_dim or 0))
    return Flops(
        projections=layers * 2 * _numbers(_attention_matrices(config)),
        attention=layers * attention,
        feed_forward=layers * 2 * _numbers(_feed_forward_matrices(config)) * (_visits(config) + config.shared_expert),
        router=layers * 2 * config.width * config.num_experts,
        head=2 * config.vocab_size * config.width,
    )


# --- memory ----------------------------------------------------------------------------------------------------------


def weight_bytes(config: ModelConfig, dtype_bytes: int = 4) -> int:
    """The weights alone, in a dtype of so many bytes."""
    return parameters(config).total * dtype_bytes


def training_state_bytes(config: ModelConfig) -> int:
    """What training keeps from step to step, all fp32: weights, gradients and AdamW's two averages."""
    return 4 * weight_bytes(config)


def cache_bytes(config: ModelConfig, batch: int, context: int, dtype_bytes: int) -> int:
    """Keys and values of `context` tokens of each of `batch` rows, written out for every head, as Cache keeps them."""
    numbers = config.kv_heads * (2 * config.head_width + (config.rope_head_dim or 0))
    return config.num_layers * batch * context * numbers * dtype_bytes


def latent_cache_bytes(config: ModelConfig, batch: int, context: int, dtype_bytes: int) -> int:
    """The same as latent attention could keep it: the latent vector and one turned key of each token and layer."""
    if config.attention != "latent":
        raise ValueError(f"A latent cache needs attention='latent'; got {config.attention!r}. Use cache_bytes.")
    return config.num_layers * batch * context * ((config.kv_latent or 0) + (config.rope_head_dim or 0)) * dtype_bytes


def activation_bytes(
    config: ModelConfig, batch: int, context: int, dtype_bytes: int, logits_bytes: int | None = None
) -> int:
    """About what a training step on `batch` rows holds at its peak, on top of training_state_bytes.

    That is every tensor saved for the backward pass, with activations of `dtype_bytes` and the ops that the config
    chooses around torch's fused attention or the written-out one, plus what the most wasteful moment of the loss or of
    the backward pass adds; `logits_bytes` is what a fused loss may hold of logits, None its own bound. It is for
    choosing a micro-batch: not too little, and at most a quarter too much (more only for one or two layers with hardly
    a vocabulary). Not in it: fragments of the allocator, the CUDA context, matmul workspaces, and what a CPU, which has
    no kernels, needs in their place (up to four blocks of fp32 logits). Where torch has no fused attention for a model
    (on a CPU: dropout, latent attention), count attention_path="written".
    """
    size, tokens, count = dtype_bytes, batch * context, parameters(config)
    dropped = config.width * size if config.dropout else 0  # a mask, at the start and after each half of a block
    layer = _saved_by_attention(config, context, size) + _saved_by_feed_forward(config, size)
    layer += 2 * _saved_by_norm(config, size) + 2 * dropped
    saved = tokens * (8 + dropped + config.num_layers * layer + _saved_by_loss(config, size))
    if size < 4:  # weights are fp32, and the copies made for each matmul are needed again; not so a fused loss's
        head = 0 if _fused(config, "linear_cross_entropy") else config.vocab_size * config.width
        saved += size * (count.attention + count.feed_forward + head)
    # Of few tokens little is left beside the last thing of all: two gradients of a tied embedding, and their sum.
    passing = _passing_bytes(config, tokens, context, size, LOGITS_BYTES if logits_bytes is None else logits_bytes)
    held = max(saved + passing, 12 * count.embedding * config.tied)
    return held + held // 32  # the small tensors that are not listed


def _saved_by_attention(config: ModelConfig, context: int, size: int) -> int:
    """Bytes of a token and layer: x, all between the projections, and what the last of them reads."""
    heads, keys, width, turned = config.num_heads, config.kv_heads, config.head_width, config.rope_head_dim or 0
    latents = normed = 0
    if config.attention == "latent":
        latents = 2 * (config.q_latent or 0) + 2 * (config.kv_latent or 0) + turned  # before and after their norms
        projected = heads * 2 * width  # keys and values
        changed = heads * 2 * (width + turned)  # queries and keys, put together of two parts
        normed = heads * (width + turned) * size if config.qk_norm else 0  # the queries before their norm
    else:
        projected = (heads + 2 * keys) * width
        over = config.positions == "rope" and not config.qk_norm and _fused(config, "rope")  # turned where they lie
        changed = (heads + keys) * width if (config.positions == "rope" or config.qk_norm) and not over else 0
        if config.qk_norm and config.positions == "rope" and not _fused(config, "rope"):  # fp32: copies of 16 bits
            normed = (heads + keys) * width * 4 * (2 if size < 4 else 1)
    if config.attention_path == "sdpa":
        between, scores = projected + changed, 4 * heads  # values are a view; the log-sum-exp of each row of scores
    else:
        # Each matmul makes its operands contiguous, keys and values once for every query head; a single row needs none.
        copies = heads * (3 * width + 2 * turned)
        between = copies + projected if config.qk_norm else max(copies, projected + changed)
        # What softmax made (plain torch, of fp32, made it twice), and what a mask left of it.
        shares = 1 + (2 if config.dropout else 0) + (size == 4 and not _fused(config, "softmax"))
        scores = context * heads * shares * size
    normed += 4 * (heads + keys) + 8  # statistics
    return (config.width + latents + between + heads * width) * size + normed + scores


def _saved_by_feed_forward(config: ModelConfig, size: int) -> int:
    """Bytes of a token and layer: x, both sides of the activation; a mixture has them for each visit.

    Plain torch keeps the activated gate, too.
    """
    sides = (3 if _fused(config, config.activation) else 4) if config.gated else 2
    width, hidden = config.width, config.ffn_width * sides
    if not config.num_experts:
        return (width + hidden) * size
    visit = (2 * width + hidden + 1 + (config.num_experts if config.bias else 0)) * size + 4 * 8  # sorted, and back
    shared = (hidden + (width if size < 4 else 0)) * size if config.shared_expert else 0
    return 4 * (width + config.num_experts) + 8 + config.experts_per_token * visit + shared  # the router reads fp32


def _fused(config: ModelConfig, op: str) -> bool:
    """Whether an op saves what its kernel needs, as it does on every device, and not what plain torch does."""
    return config.op_impl.get(op, config.impl) != "torch"


def _saved_by_norm(config: ModelConfig, size: int) -> int:
    """Bytes of a token: the sum that is normalised, in fp32 where plain torch does it, and its statistics."""
    fused = _fused(config, "layer_norm" if config.norm == "layer" else "rms_norm")
    return config.width * (size if fused else 4) + 8


def _saved_by_loss(config: ModelConfig, size: int) -> int:
    """Bytes of a token: the last norm, what the head reads and, if fused, its gradient, made already.

    Plain torch has log-softmax instead and, if they are bent, the logits; fp32.
    """
    if _fused(config, "linear_cross_entropy"):
        return _saved_by_norm(config, size) + 2 * config.width * size
    logits = config.vocab_size * (4 if config.softcap is None else 8)
    return _saved_by_norm(config, size) + config.width * size + logits


def _logits_held(config: ModelConfig, tokens: int, size: int, most: int) -> int:
    """Bytes of the logits that a fused loss holds: one block of those of all rows, which are about equal."""
    row = config.vocab_size * size
    blocks = -(-tokens * row // most)
    return max(row, min(most, tokens * row // blocks + (LOGITS_TILE * row if blocks > 1 else 0)))


def _passing_bytes(config: ModelConfig, tokens: int, context: int, size: int, logits_bytes: int) -> int:
    """What comes and goes while nearly all that is saved is still there, at the worst of four moments."""
    width, heads, of_weight = config.width, config.num_heads, 4 + (size if size < 4 else 0)
    if _fused(config, "linear_cross_entropy"):
        loss = _logits_held(config, tokens, size, logits_bytes) + 8 * tokens  # and two statistics of each row
        head = loss + config.vocab_size * width * of_weight  # its gradient and its copy are there at the same time
    else:
        loss = tokens * 8 * config.vocab_size  # two fp32 gradients of the logits
        head = config.vocab_size * (width * of_weight - tokens * (4 - size))  # its gradient, when those are gone
    # In the last block, what the loss had saved is free; a tied head's gradient waits for the embedding's.
    weights = width * (of_weight * config.ffn_width * (config.num_experts or 1) + 4 * config.vocab_size * config.tied)
    hidden = config.ffn_width * (2 if config.activation == "relu2" else 1)
    feed_forward = 3 * _saved_by_norm(config, size) + _visits(config) * (hidden + 2 * width) * size
    attention = heads * (4 * config.head_width + 2 * (config.rope_head_dim or 0)) * size  # queries, keys, values, seen
    if config.attention_path == "written":
        attention = heads * context * (2 * size if _fused(config, "softmax") else 8)  # gradients of shares and scores
    half = max(feed_forward, attention - _saved_by_feed_forward(config, size))
    return max(loss, head, weights + tokens * (half - _saved_by_loss(config, size)))


# --- of a GPU's arithmetic -------------------------------------------------------------------------------------------

# Dense matmul peaks in FLOP/s, from NVIDIA's datasheets and architecture whitepapers; a figure with sparsity is halved.
# "fp32" is without TF32; GeForce cards run at half their rate when they add up in fp32, as every matmul of ours does. A
# GPU is known by words in the name that torch gives it; those of OTHER_CHIPS say that it is a part or a variant.
PEAKS: dict[str, dict[str, float]] = {
    "B200": {"bf16": 2250e12, "fp16": 2250e12},
    "GH200": {"bf16": 989e12, "fp16": 989e12, "fp32": 67e12},
    "H200": {"bf16": 989e12, "fp16": 989e12, "fp32": 67e12},
    "H200 NVL": {"bf16": 835e12, "fp16": 835e12, "fp32": 60e12},
    "H100 HBM3": {"bf16": 989e12, "fp16": 989e12, "fp32": 67e12},  # SXM: "NVIDIA H100 80GB HBM3"
    "H100 PCIe": {"bf16": 756e12, "fp16": 756e12, "fp32": 51e12},
    "H100 NVL": {"bf16": 835e12, "fp16": 835e12, "fp32": 60e12},
    "A100": {"bf16": 312e12, "fp16": 312e12, "fp32": 19.5e12},
    "A10": {"bf16": 125e12, "fp16": 125e12, "fp32": 31.2e12},
    "L40S": {"bf16": 362e12, "fp16": 362e12, "fp32": 91.6e12},
    "L4": {"bf16": 121e12, "fp16": 121e12, "fp32": 30.3e12},
    "RTX 5090": {"bf16": 209.5e12, "fp16": 209.5e12, "fp32": 104.8e12},
    "RTX 4090": {"bf16": 165.2e12, "fp16": 165.2e12, "fp32": 82.6e12},
    "RTX 3090": {"bf16": 71e12, "fp16": 71e12, "fp32": 35.6e12},
    "T4": {"fp16": 65e12, "fp32": 8.1e12},
    "V100 SXM2": {"fp16": 125e12, "fp32": 15.7e12},
    "V100 PCIE": {"fp16": 112e12, "fp32": 14e12},
}
OTHER_CHIPS = frozenset({"MIG", "Laptop", "Ti", "D", "Max"})


def peak(name: str, precision: str) -> float | None:
    """FLOP/s of matmuls at best, of a GPU by its name; None where that is not known, and then no MFU can be told."""
    words = set(re.split("[ -]", name))
    known = [] if words & OTHER_CHIPS else [key for key in PEAKS if words.issuperset(key.split())]
    return PEAKS[max(known, key=len)].get(precision) if known else None


def mfu(config: ModelConfig, tokens_per_second: float, peak: float, context: int | None = None) -> float:
    """Model FLOPs utilisation of training: the share of `peak` that goes into what flops_per_token counts."""
    return tokens_per_second * flops_per_token(config, context).training / peak


def describe(config: ModelConfig) -> str:
    """Three lines for a person: size, arithmetic and cache."""
    count, flops = parameters(config), flops_per_token(config)
    active = f", {count.active / 1e6:,.1f} M of them at work for a token" if count.idle else ""
    latent = f" ({latent_cache_bytes(config, 1, 1, 2):,} as latents)" if config.attention == "latent" else ""
    return (
        f"{count.total / 1e6:,.1f} M parameters{active}\n"
        f"{flops.forward / 1e6:,.1f} MFLOP/token, {flops.training / 1e6:,.1f} in training (rows of {config.context})\n"
        f"cache: {cache_bytes(config, 1, 1, 2):,} bytes a token in 16 bits{latent}"
    )
