"""Keys and values of tokens that a model has seen, so that the next one costs one token's work.

Memory for all positions is taken at once; nothing grows, so a step's shapes are known. It knows no model.

    cache = Cache(num_layers=4, batch=20, context=256)
    hidden = model.hidden(prompt, cache)       # [B, T, D], and the cache is T long
    hidden = model.hidden(next_ids, cache)     # [B, 1, D]
"""

from __future__ import annotations

from torch import Tensor


class LayerCache:
    """One layer's keys and values, [B, context, K, H] each, the first `length` of them in use."""

    def __init__(self, batch: int, context: int) -> None:
        self.batch, self.context, self.length = batch, context, 0
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keep those of the new tokens; returns those of all tokens so far."""
        end = self.length + keys.shape[1]
        if end > self.context or keys.shape[0] != self.batch:
            raise ValueError(
                f"This cache holds {self.context} tokens of {self.batch} rows; got tokens up to {end} of "
                f"{keys.shape[0]} rows. Make a larger one."
            )
        if self._keys is None or self._values is None:  # only now are dtype, device and widths known
            self._keys = keys.new_empty(self.batch, self.context, *keys.shape[2:])
            self._values = values.new_empty(self.batch, self.context, *values.shape[2:])
        self._keys[:, self.length : end] = keys
        self._values[:, self.length : end] = values
        self.length = end
        return self._keys[:, :end], self._values[:, :end]


class Cache:
    """A LayerCache for each layer."""

    def __init__(self, num_layers: int, batch: int, context: int) -> None:
        self.layers = [LayerCache(batch, context) for _ in range(num_layers)]

    @property
    def length(self) -> int:
        """How many tokens it has seen."""
        return self.layers[0].length
