"""Cross-layer attention (CLA): a layer that projects queries alone and reads the cache of an earlier layer.

Source: Brandon et al. 2024, arXiv 2405.12981 §3.
"""

from torch import Tensor

from kvcalc.layers.attention import Grouped
from kvcalc.measure.cache import LayerCache
from kvcalc.measure.layers.base import refuse, split_heads
from kvcalc.measure.layers.grouped import GroupedLayer


class SharedLayer(GroupedLayer):
    """Attention over keys and values that an earlier layer has written, for the new tokens too; writes nothing.

    Without a cache, what its core takes are its queries and the keys and values that the earlier layer has just projected.
    """

    def __init__(self, spec: Grouped, hidden_size: int, rotates: bool = True) -> None:
        refuse(spec, "sliding_window")
        super().__init__(spec, hidden_size, rotates)

    def prepare(self, x: Tensor, past: int) -> tuple[Tensor, ...]:
        """q [B, H, n, d] alone."""
        q = self._normed("q", split_heads(self.weights.linear("q", x), self.spec.num_attention_heads))
        return (self.rotary(q, past) if self.rotary else q,)

    def core(self, prepared: tuple[Tensor, ...], cache: LayerCache | None, past: int) -> Tensor:
        q = prepared[0]
        if cache is None:
            keys, values = prepared[1:]
        else:
            keys, values = (rows.read(past + q.shape[2]) for rows in cache.rows)
        return self._attend(q, keys, values, 0)
