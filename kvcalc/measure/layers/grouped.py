"""MHA, GQA, MQA and sliding windows: `kvcalc.layers.attention.Grouped` in torch.

The window's cache is a ring of W rows. One new token overwrites the oldest row and reads the whole ring: keys carry their
positions already, so their order does not matter. Several new tokens read the last W − 1 rows of the ring and themselves,
and are written afterwards, since their first queries still see rows that the last ones displace.
"""

import torch
from torch import Tensor

from kvcalc.layers.attention import Grouped
from kvcalc.measure.cache import LayerCache
from kvcalc.measure.layers.base import Mixer, join_heads, refuse, rms_norm, split_heads
from kvcalc.measure.layers.kernels import attend

UNSUPPORTED = (
    "attention_chunk_size", "cache_budget", "sink_tokens", "qk_norm_bias", "v_norm", "sinks", "output_gate", "k_is_v",
    "qo_projection", "input_size", "output_size", "prefix_tokens", "cached",
)  # fmt: skip


class GroupedLayer(Mixer):
    """Queries [B, H, n, d] over keys and values of G heads. A spec without `kv_projection` is `SharedLayer`'s."""

    def __init__(self, spec: Grouped, hidden_size: int, rotates: bool = True) -> None:
        refuse(spec, *UNSUPPORTED)
        super().__init__(spec, hidden_size, rotates)
        self.spec, self.window = spec, spec.sliding_window or 0

    def prepare(self, x: Tensor, past: int) -> tuple[Tensor, ...]:
        """q [B, H, n, d], k [B, G, n, d] with positions, v [B, G, n, e]."""
        q = self._normed("q", split_heads(self.weights.linear("q", x), self.spec.num_attention_heads))
        k = self._normed("k", split_heads(self.weights.linear("k", x), self.spec.num_key_value_heads))
        v = split_heads(self.weights.linear("v", x), self.spec.num_key_value_heads)
        return (self.rotary(q, past), self.rotary(k, past), v) if self.rotary else (q, k, v)

    def _normed(self, name: str, x: Tensor) -> Tensor:
        if f"{name}_norm" not in self.weights:
            return x
        weight = self.weights[f"{name}_norm"]
        if self.spec.qk_norm == "head":
            return rms_norm(x, weight)
        return split_heads(rms_norm(join_heads(x), weight), x.shape[1])

    def core(self, prepared: tuple[Tensor, ...], cache: LayerCache | None, past: int) -> Tensor:
        """The new rows into the cache, and attention over what it keeps: [B, H, n, e]."""
        q, k, v = prepared
        n = q.shape[2]
        if cache is None:
            return self._attend(q, k, v, self.window)
        keys, values = cache.rows
        if self.window and n > 1:
            kept = min(past, self.window - 1)
            all_k = torch.cat((keys.last(past, kept), k), 2) if kept else k
            all_v = torch.cat((values.last(past, kept), v), 2) if kept else v
            mixed = self._attend(q, all_k, all_v, self.window)
        keys.write(k, past)
        values.write(v, past)
        if self.window and n > 1:
            return mixed
        return self._attend(q, keys.read(past + n), values.read(past + n), 0)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
        shared = q.shape[1] // k.shape[1]
        if self.repeats and shared > 1:
            k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
        return attend(q, k, v, window, self.kernel)

    def finish(self, mixed: Tensor, prepared: tuple[Tensor, ...]) -> Tensor:
        return self.weights.linear("o", join_heads(mixed))
