"""Drop-in torch modules over fuselm.ops: swap `torch.nn.X` for `fuselm.nn.X` and keep the checkpoint.

Knows torch and fuselm.ops, no kernel and no model. State dicts and arguments are torch's; what is added comes
after torch's own arguments, by name. What the op refuses (fp64, eps of 0) is refused here too.

    norm = fuselm.nn.RMSNorm(4096, eps=1e-6)
    y = norm(x)
    y, residual = norm(x, residual)
    y = fuselm.nn.LayerNorm(4096, bias=False)(x)
    loss = fuselm.nn.CrossEntropyLoss(softcap=30.0)(logits, targets)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fuselm import ops

CAST_MODES = ("gemma", "llama")


class _OverTrailingDimensions:
    """The forward pass that norms share: what the op does to one dimension, done to all of normalized_shape."""

    normalized_shape: tuple[int, ...]
    weight: Any

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        """Norm of x, or (norm of x + residual, x + residual)."""
        dims = len(self.normalized_shape)
        if dims == 0 or x.shape[-dims:] != self.normalized_shape:
            raise self._mismatch(x)
        if dims == 1:
            return self._norm(x, self.weight, residual)
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
