"""Drop-in torch modules over fuselm.ops: swap `torch.nn.X` for `fuselm.nn.X` and keep the checkpoint.

Knows torch and fuselm.ops, no kernel and no model. State dicts and arguments are torch's; what is added comes
after torch's own arguments, by name. What the op refuses (fp64, eps of 0) is refused here too.

    norm = fuselm.nn.RMSNorm(4096, eps=1e-6)
    y = norm(x)
    y, residual = norm(x, residual)
    y = fuselm.nn.LayerNorm(4096, bias=False)(x)
    loss = fuselm.nn.CrossEntropyLoss(softcap=30.0)(logits, targets)
    x = fuselm.nn.Embedding(50304, 768, out_dtype=torch.bfloat16)(ids)
    q, k = fuselm.nn.RotaryEmbedding(64)(q, k)
    y = fuselm.nn.SwiGLU()(packed)
"""

from __future__ import annotations

import math
import numbers
import operator
from typing import Any

import torch
from torch import Tensor

from fuselm import ops

CAST_MODES = ("gemma", "llama")
OUT_DTYPES = (None, torch.float32, torch.float16, torch.bfloat16, "float32", "float16", "bfloat16")
MAX_HEAD_DIM = 512  # of what rope turns


def _whole(given: Any) -> int | None:
    """What counts, as an int: numpy's whole numbers too, and no truth value."""
    try:
        return None if isinstance(given, bool) else operator.index(given)
    except TypeError:
        return None


def _number(given: Any) -> float:
    """What is a real number, as a float; NaN for anything else, truth values too."""
    try:
        return float(given) if isinstance(given, numbers.Real) and not isinstance(given, bool) else math.nan
    except OverflowError:
        return math.inf


class _OverTrailingDimensions:
    """The forward pass that norms share: what the op does to one dimension, done to all of normalized_shape."""

    normalized_shape: tuple[int, ...]
    weight: Any

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        """Norm of x, or (norm of x + residual, x + residual)."""
        dims = len(self.normalized_shape)
        try:
            fits = dims > 0 and x.shape[-dims:] == self.normalized_shape
        except AttributeError:  # no tensor: the op has the words
            return self._norm(x, None, residual)
        if not fits:
            raise self._mismatch(x)
        if dims == 1:
            return self._norm(x, self.weight, residual)
        if not all(isinstance(given, Tensor | None) for given in (x, residual)):
            return self._norm(x, None, residual)
        # Several normalised dimensions become one: the mean is over all of them.
        weight = None if self.weight is None else self.weight.flatten()
        if residual is not None and residual.shape != x.shape:
            raise ValueError(
                f"{type(self).__name__}: residual must have x's shape; got residual {list(residual.shape)} for x "
                f"{list(x.shape)}. Expand or reshape the residual."
            )
        flat = None if residual is None else residual.flatten(-dims)
        out = self._norm(x.flatten(-dims), weight, flat)
        return out.view(x.shape) if residual is None else tuple(t.view(x.shape) for t in out)

    def _norm(self, x: Tensor, weight: Tensor | None, residual: Tensor | None) -> Any:
        raise NotImplementedError

    def _mismatch(self, x: Tensor) -> RuntimeError:
        return RuntimeError(
            f"{type(self).__name__}: x must end in the normalized shape {list(self.normalized_shape)}; got "
            f"{list(x.shape)}. Reshape x, or build the module with the shape x has."
        )


class RMSNorm(_OverTrailingDimensions, torch.nn.RMSNorm):
    """torch.nn.RMSNorm on the fused kernel, with a residual, Gemma's offset and both cast modes.

    With `offset` the weight starts at 1 - offset, so that a fresh module scales by 1 whatever the offset. fp32,
    fp16 and bf16; for fp64 use torch's own.
    """

    def __init__(
        self,
        normalized_shape: int | list[int] | torch.Size,
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        offset: float = 0.0,
        cast_mode: str = "gemma",
    ) -> None:
        if isinstance(offset, bool) or not isinstance(offset, int | float):
            raise ValueError(f"RMSNorm: offset must be a Python number; got {offset!r}. Leave it out for 0.")
        if cast_mode not in CAST_MODES or (offset and not elementwise_affine):
            raise ValueError(
                f"RMSNorm: cast_mode must be one of {', '.join(CAST_MODES)}, and offset 0 without a weight; got "
                f"cast_mode={cast_mode!r}, offset={offset}, elementwise_affine={elementwise_affine}. Leave it out."
            )
        self.offset = offset
        self.cast_mode = cast_mode
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)

    def reset_parameters(self) -> None:
        if self.elementwise_affine:
            torch.nn.init.constant_(self.weight, 1.0 - self.offset)

    def _norm(self, x: Tensor, weight: Tensor | None, residual: Tensor | None) -> Any:
        return ops.rms_norm(x, weight, self.eps, residual=residual, offset=self.offset, cast_mode=self.cast_mode)

    def extra_repr(self) -> str:
        more = f", offset={self.offset}" if self.offset else ""
        return super().extra_repr() + more + (", cast_mode='llama'" if self.cast_mode == "llama" else "")


class LayerNorm(_OverTrailingDimensions, torch.nn.LayerNorm):
    """torch.nn.LayerNorm on the fused kernel, with a residual. fp32, fp16 and bf16; for fp64 use torch's own."""

    def _norm(self, x: Tensor, weight: Tensor | None, residual: Tensor | None) -> Any:
        bias: Tensor | None = self.bias
        if bias is not None and len(self.normalized_shape) > 1:
            bias = bias.flatten()
        return ops.layer_norm(x, weight, bias, self.eps, residual=residual)


class CrossEntropyLoss(torch.nn.CrossEntropyLoss):
    """torch.nn.CrossEntropyLoss on the fused kernel, with z-loss, softcap and a gradient in the place of the logits.

    Classes are the second dimension, as in torch. What differs: the loss is fp32, the mean of no target is 0 instead of
    NaN, and a target outside of the classes counts as ignored (see ops.cross_entropy). Neither weights of classes nor
    targets that are probabilities: for those use torch's own.
    """

    def __init__(
        self,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        *,
        z_loss: float = 0.0,
        softcap: float | None = None,
        inplace: bool = False,
    ) -> None:
        if weight is not None:
            raise ValueError(
                f"CrossEntropyLoss: classes have no weights here; got weight {list(weight.shape)}. "
                f"Use torch.nn.CrossEntropyLoss for weighted classes."
            )
        super().__init__(weight, size_average, ignore_index, reduce, reduction, label_smoothing)
        self.z_loss = z_loss
        self.softcap = softcap
        self.inplace = inplace

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """Loss of logits (C), (N, C) or (N, C, d1, ...) and targets of that shape without C."""
        logits = input
        if input.dim() > 2:
            if isinstance(target, Tensor) and target.shape != input.shape[:1] + input.shape[2:]:
                raise ValueError(
                    "CrossEntropyLoss: target must have the input's shape without its second dimension, the classes; "
                    f"got input {list(input.shape)} and target {list(target.shape)}. "
                    "Where classes come last, as in fuselm.ops.cross_entropy, pass input.movedim(-1, 1)."
                )
            logits = input.movedim(1, -1)  # [N, d1, ..., C]
        loss: Tensor = ops.cross_entropy(
            logits,
            target,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            softcap=self.softcap,
            reduction=self.reduction,
            inplace=self.inplace,
        )
        return loss

    def extra_repr(self) -> str:
        own = {"z_loss": self.z_loss, "softcap": self.softcap, "inplace": self.inplace}
        return ", ".join(f"{name}={value}" for name, value in own.items() if value)


class Embedding(torch.nn.Embedding):
    """torch.nn.Embedding on the fused kernel: rows of the weight, and a gradient that is the same bits every time.

    `out_dtype` gives the rows in another dtype than the weight's, as a model with fp32 weights and bf16 activations
    wants them: rounded on their way, without a pass of their own. An id outside of the table is refused on a CPU; on a
    GPU its row is NaN (see ops.embedding). No max_norm, scale_grad_by_freq or sparse gradient: for those use torch's.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        _weight: Tensor | None = None,
        _freeze: bool = False,
        device: Any = None,
        dtype: Any = None,
        *,
        out_dtype: torch.dtype | None = None,
    ) -> None:
        # A max_norm of 0 is one too: torch makes rows 0 by it.
        given = {"max_norm": max_norm is not None, "scale_grad_by_freq": scale_grad_by_freq, "sparse": sparse}
        if wanted := [name for name, value in given.items() if value]:
            raise ValueError(
                f"Embedding: max_norm, scale_grad_by_freq and sparse are not here; got {' and '.join(wanted)}. "
                f"Use torch.nn.Embedding."
            )
        row = _whole(padding_idx)
        if padding_idx is not None and row is None:
            raise ValueError(
                f"Embedding: padding_idx must be a whole number, a row of the table; got {padding_idx!r}. "
                f"Name such a row, or leave padding_idx out."
            )
        if not isinstance(out_dtype, torch.dtype | str | None) or out_dtype not in OUT_DTYPES:
            raise ValueError(
                f"Embedding: out_dtype must be torch.float32, torch.float16 or torch.bfloat16; got {out_dtype!r}. "
                f"Leave it out for the weight's own."
            )
        super().__init__(
            num_embeddings, embedding_dim, row, None, norm_type, False, False, _weight, _freeze, device, dtype
        )
        self.out_dtype = out_dtype

    def forward(self, input: Tensor) -> Tensor:
        """Rows for ids of any shape: [..., embedding_dim]. The row of padding_idx has no gradient."""
        rows: Tensor = ops.embedding(input, self.weight, padding_idx=self.padding_idx, dtype=self.out_dtype)
        return rows

    def extra_repr(self) -> str:
        return super().extra_repr() + (f", out_dtype={self.out_dtype}" if self.out_dtype else "")


class GELU(torch.nn.GELU):
    """torch.nn.GELU on the fused kernel, exact (erf) or approximate="tanh"."""

    def forward(self, input: Tensor) -> Tensor:
        y: Tensor = ops.gelu(input, approximate=self.approximate)
        return y


class SiLU(torch.nn.SiLU):
    """torch.nn.SiLU on the fused kernel."""

    def __init__(self, inplace: bool = False) -> None:
        if inplace:
            raise ValueError(
                "SiLU: the result has memory of its own, since backward needs x; got inplace=True. Leave it out."
            )
        super().__init__()

    def forward(self, input: Tensor) -> Tensor:
        y: Tensor = ops.silu(input)
        return y


class SwiGLU(torch.nn.Module):
    """silu(gate) * up: of two tensors, or of one whose last dimension is gate and up, one half each."""

    def forward(self, gate: Tensor, up: Tensor | None = None) -> Tensor:
        y: Tensor = ops.swiglu(gate, up)
        return y


class RotaryEmbedding(torch.nn.Module):
    """Turns queries and keys by the angles of their positions, in one launch.

    Pair i of a head turns by position * base ** (-2 i / head_dim). Tables are fp32 and stay so in a model that is cast
    to 16 bits: an angle of position 1000 has no bit left in bf16. They are no part of a state dict.

        q, k = RotaryEmbedding(64, max_positions=2048)(q, k)      # [B, T, N, 64], [B, T, K, 64]
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        head_dim: int,
        max_positions: int = 2048,
        base: float = 10000.0,
        *,
        interleaved: bool = False,
        device: Any = None,
    ) -> None:
        super().__init__()
        width, rows = _whole(head_dim) or 0, _whole(max_positions) or 0
        if not 2 <= width <= MAX_HEAD_DIM or width % 2 or rows < 1 or not 0 < _number(base) < math.inf:
            got = f"head_dim={head_dim!r}, max_positions={max_positions!r}, base={base!r}"
            raise ValueError(
                f"RotaryEmbedding: head_dim is even and 2 to {MAX_HEAD_DIM}, max_positions is whole and 1 or more and "
                f"base a finite number above 0; got {got}. Pairs of numbers are what turns."
            )
        self.head_dim, self.max_positions, self.base, self.interleaved = width, rows, float(base), interleaved
        for name, table in self._tables(torch.get_default_device() if device is None else device).items():
            self.register_buffer(name, table, persistent=False)

    def _tables(self, device: Any) -> dict[str, Tensor]:
        """cos and sin of every position's angles [S, H/2], in float64 until they are rounded."""
        pairs = torch.arange(0, self.head_dim, 2, dtype=torch.float64, device="cpu")  # [H/2]
        places = torch.arange(self.max_positions, dtype=torch.float64, device="cpu")  # [S]
        angles = places[:, None] * self.base ** (-pairs / self.head_dim)  # [S, H/2]
        return {"cos": angles.cos().float().to(device), "sin": angles.sin().float().to(device)}

    def forward(
        self, q: Tensor, k: Tensor, positions: Tensor | None = None, *, inplace: bool = False
    ) -> tuple[Tensor, Tensor]:
        """q [B, T, N, H] and k [B, T, K, H], turned; positions [T] or [B, T], 0 to T - 1 unless given."""
        turned: tuple[Tensor, Tensor] = ops.rope(
            q, k, self.cos, self.sin, positions=positions, interleaved=self.interleaved, inplace=inplace
        )
        return turned

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        # What .to, .half, .cuda and .to_empty go through: tables follow to another device, and keep their numbers.
        was_meta = self.cos.is_meta
        before = {name: getattr(self, name) for name in ("cos", "sin")}
        super()._apply(fn, recurse)
        if was_meta and not self.cos.is_meta:  # memory without numbers in it, that no state dict will fill
            before = self._tables(self.cos.device)
        for name, table in before.items():  # whatever became of them: .to_empty leaves memory without numbers
            setattr(self, name, table.to(getattr(self, name).device))
        return self

    def extra_repr(self) -> str:
        more = ", interleaved=True" if self.interleaved else ""
        return f"{self.head_dim}, max_positions={self.max_positions}, base={self.base}{more}"
