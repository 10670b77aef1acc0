"""What a user of torch writes for an op: the plain calls of it, without a reference's branches and its exactness.

Knows torch and the ops' signatures, no case and no clock. Without what a reference does for accuracy: people hand bf16
logits to torch's loss as they are, and turn bf16 heads by bf16 angles, which moves less than half of the bytes, so that
this and nothing slower is what an op competes with. A function here takes the options that people have for it; a call
with others is none of these.

    call = ready("rope", WRITTEN["rope"])
    q, k = call(q=q, k=k, cos=cos, sin=sin)      # the tables are made at the first call
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fuselm.bench.peer import Op
from fuselm.kernels.rms_norm import DEFAULT_EPS


def takes(op: str, names: Iterable[str]) -> bool:
    """Whether there is a function for an op that is called with arguments of these names."""
    if op not in WRITTEN:
        return False
    try:
        inspect.signature(ready(op, WRITTEN[op])).bind(**dict.fromkeys(names))
    except TypeError:
        return False
    return True


def ready(op: str, written: Op) -> Op:
    """What is written for an op, or that compiled, with the op's own arguments."""
    return _READY[op](written) if op in _READY else written


# ---- norms, softmax, losses ----------------------------------------------------------------------------------------


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Torch's own."""
    return F.rms_norm(x, (x.shape[-1],), weight)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Torch's own."""
    return F.layer_norm(x, (x.shape[-1],), weight, bias)


def softmax(x: Tensor) -> Tensor:
    """Torch's own."""
    return torch.softmax(x, -1)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Torch's own, in the dtype of the logits."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """A linear layer, and then the loss of all its logits."""
    return cross_entropy(F.linear(hidden, weight), targets)


# ---- activations, sums, products -----------------------------------------------------------------------------------


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """Torch's own."""
    return F.gelu(x, approximate=approximate)


def silu(x: Tensor) -> Tensor:
    """Torch's own."""
    return F.silu(x)


def relu2(x: Tensor) -> Tensor:
    """Two calls."""
    return F.relu(x).square()


def swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """Two calls, over the halves of one tensor where they are packed."""
    gate, up = gate.chunk(2, dim=-1) if up is None else (gate, up)
    return F.silu(gate) * up


def geglu(gate: Tensor, up: Tensor | None = None, approximate: str = "none") -> Tensor:
    """Two calls, as swiglu."""
    gate, up = gate.chunk(2, dim=-1) if up is None else (gate, up)
    return F.gelu(gate, approximate=approximate) * up


def add(x: Tensor, y: Tensor, scale: float = 1.0) -> Tensor:
    """Torch's own."""
    return torch.add(x, y, alpha=scale)


def mul(x: Tensor, y: Tensor) -> Tensor:
    """Torch's own."""
    return x * y


# ---- embedding, positions ------------------------------------------------------------------------------------------


def embedding(
    ids: Tensor,
    weight: Tensor,
    position_weight: Tensor | None = None,
    positions: Tensor | None = None,
    dtype: str | torch.dtype | None = None,
) -> Tensor:
    """Rows of a table, plus those of their positions, in another dtype if asked."""
    x = F.embedding(ids, weight)  # [B, T, D]
    if position_weight is not None:
        rows = position_weight[: ids.shape[-1]] if positions is None else F.embedding(positions, position_weight)
        x = x + rows
    return x if dtype is None else x.to(getattr(torch, dtype) if isinstance(dtype, str) else dtype)


def rope(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float | None,
) -> tuple[Tensor, Tensor]:
    """Heads turned in their own dtype, normalised before if there are weights; cos and sin are with_tables's."""
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)  # [T, 1, H] or [B, T, 1, H]
    eps = DEFAULT_EPS if eps is None else eps
    if q_weight is not None:
        q = F.rms_norm(q, (q.shape[-1],), q_weight, eps)
    if k_weight is not None:
        k = F.rms_norm(k, (k.shape[-1],), k_weight, eps)
    quarter = _quarter_turn_of_pairs if interleaved else _quarter_turn_of_halves
    return q * cos + quarter(q) * sin, k * cos + quarter(k) * sin


def rope_qkv(
    qkv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, kv_heads: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Three views, two of them turned; cos and sin are with_packed_tables's."""
    kv_heads = qkv.shape[2] // 3 if kv_heads is None else kv_heads
    q, k, v = qkv.split((qkv.shape[2] - 2 * kv_heads, kv_heads, kv_heads), dim=2)
    return *rope(q, k, cos, sin, interleaved, None, None, None), v


def _quarter_turn_of_halves(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def _quarter_turn_of_pairs(x: Tensor) -> Tensor:
    return torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)


def with_tables(turn: Op) -> Op:
    """A rope that is called as ours is, over one that wants an angle's cos and sin for each number of each token.

    A model makes those tables once and has them ready, in the dtype of its heads, in every layer. So here: they are
    made when cos, sin and positions are seen for the first time, which is never in a call that is timed.
    """
    tables = _Tables()

    def call(
        q: Tensor,
        k: Tensor,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor | None = None,
        interleaved: bool = False,
        q_weight: Tensor | None = None,
        k_weight: Tensor | None = None,
        eps: float | None = None,
    ) -> Any:
        return turn(q, k, *tables.of(q, cos, sin, positions, interleaved), interleaved, q_weight, k_weight, eps)

    return call


def with_packed_tables(turn: Op) -> Op:
    """The same for q, k and v in one tensor."""
    tables = _Tables()

    def call(
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor | None = None,
        interleaved: bool = False,
        kv_heads: int | None = None,
    ) -> Any:
        return turn(qkv, *tables.of(qkv, cos, sin, positions, interleaved), interleaved, kv_heads)

    return call


class _Tables:
    """Those made so far, by what they were made of."""

    def __init__(self) -> None:
        self.made: dict[tuple[int, ...], tuple[Any, ...]] = {}

    def of(
        self, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, interleaved: bool
    ) -> tuple[Tensor, Tensor]:
        key = (id(cos), id(sin), id(positions))
        if key not in self.made:
            with torch.no_grad():
                tables = tuple(_table(table, x, positions, interleaved) for table in (cos, sin))
            self.made[key] = (*tables, cos, sin, positions)  # which live as long as this: their ids are no one else's
        return self.made[key][0], self.made[key][1]


def _table(table: Tensor, q: Tensor, positions: Tensor | None, interleaved: bool) -> Tensor:
    chosen = (table[: q.shape[1]] if positions is None else table[positions]).to(q.dtype)  # [T, H/2] or [B, T, H/2]
    return chosen.repeat_interleave(2, dim=-1) if interleaved else torch.cat((chosen, chosen), dim=-1)


WRITTEN: dict[str, Op] = {
    "rms_norm": rms_norm,
    "layer_norm": layer_norm,
    "softmax": softmax,
    "cross_entropy": cross_entropy,
    "linear_cross_entropy": linear_cross_entropy,
    "gelu": gelu,
    "silu": silu,
    "relu2": relu2,
    "swiglu": swiglu,
    "geglu": geglu,
    "add": add,
    "mul": mul,
    "embedding": embedding,
    "rope": rope,
    "rope_qkv": rope_qkv,
}

_READY: dict[str, Callable[[Op], Op]] = {"rope": with_tables, "rope_qkv": with_packed_tables}
