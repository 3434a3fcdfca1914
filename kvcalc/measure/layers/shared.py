"""Cross-layer attention (CLA): a layer that projects queries alone and reads the cache of an earlier layer.

Source: Brandon et al. 2024, arXiv 2405.12981 §3.
"""

import torch
from torch import Tensor

from kvcalc.attention import Grouped
from kvcalc.measure.cache import LayerCache
from kvcalc.measure.layers.base import split_heads
from kvcalc.measure.layers.grouped import GroupedLayer
from kvcalc.measure.layers.kernels import attend


class SharedLayer(GroupedLayer):
    """Attention over keys and values that an earlier layer has written for the new tokens too.

    Without a cache the earlier layer's keys and values are handed over by `lend`.
    """

    def __init__(self, spec: Grouped, hidden_size: int, rotates: bool = True) -> None:
        super().__init__(spec, hidden_size, rotates)
        self.lent: tuple[Tensor, Tensor] | None = None

    def lend(self, keys: Tensor, values: Tensor) -> None:
        """The keys and values of this pass's tokens, as the layer that owns the cache has projected them."""
        self.lent = (keys, values)

    def prepare(self, x: Tensor, past: int) -> tuple[Tensor, ...]:
        q = self._normed("q", split_heads(self.weights.linear("q", x), self.spec.num_attention_heads))
        return (self.rotary(q, past) if self.rotary else q,)

    def core(self, prepared: tuple[Tensor, ...], cache: LayerCache | None, past: int) -> Tensor:
        """Reads the cache and writes nothing; under a window a pass of several tokens needs what its owner displaced."""
        (q,) = prepared
        n = q.shape[2]
        if cache is None or (self.window and n > 1):
            if self.lent is None:
                raise ValueError("a layer that shares a cache needs the layer that owns it to lend its keys and values")
            keys, values = self.lent
            return attend(q, keys, values, self.window, self.kernel)
        keys, values = (rows.read(past + n) for rows in cache.rows)
        return attend(q, keys, values, 0, self.kernel)


def window_view(k: Tensor, v: Tensor, cache: LayerCache, past: int, window: int) -> tuple[Tensor, Tensor]:
    """The keys and values that several new tokens see under a window, taken before they are written."""
    keys, values = cache.rows
    kept = min(past, window - 1)
    return torch.cat((keys.last(past, kept), k), 2), torch.cat((values.last(past, kept), v), 2)
