"""MHA, GQA, MQA, sliding windows and cross-layer attention: `Grouped` in torch.

Shapes: q [B, H, n, d], k [B, G, S, d], v [B, G, S, e] give [B, H, n, e]. Query i has position S − n + i.
It attends to the positions up to its own, within a window if there is one. Keys and values are never
copied to H heads: the query heads of a group are rows of one matrix product.

The cache of a window is a ring of W rows. One new token overwrites the oldest row and reads the whole
ring; the order of rows does not matter because keys include their positions. Several new tokens read
the last W − 1 rows of the ring and their own rows, and are written afterwards, because their first
queries still attend to rows that the last new tokens replace.

`SharedLayer` is cross-layer attention (CLA): it projects only queries and reads the cache of an
earlier layer. Source: Brandon et al. 2024, arXiv 2405.12981, section 3.
"""

import time
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from kvcalc.layers.attention import Grouped
from kvcalc.measure.layers.base_layer import Mixer, join_heads, refuse, rms_norm, split_heads
from kvcalc.measure.torch_cache import LayerCache

KERNELS = ("auto", "sdpa", "plain", "flex")
BLOCK = 1024  # minimum queries per block under a window


def attend(q: Tensor, k: Tensor, v: Tensor, window: int = 0, kernel: str = "sdpa", scale: float | None = None) -> Tensor:
    """Return causal attention of the last n positions with the kernel sdpa, plain or flex."""
    n, tokens = q.shape[2], k.shape[2]
    if n == 1:
        start = max(0, tokens - window) if window else 0
        return _single(q, k[:, :, start:], v[:, :, start:], kernel, scale)
    if window and tokens > 2 * max(window, BLOCK):
        return _windowed(q, k, v, window, kernel, scale)
    if kernel == "flex":
        return _flex(q, k, v, window, scale)
    if kernel == "sdpa" and n == tokens and not (window and window < tokens):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return masked(q, k, v, visible(n, tokens, window, q.device), kernel, scale)


def visible(n: int, tokens: int, window: int, device: torch.device) -> Tensor:
    """Return a mask [n, tokens]: query i attends to j if tokens − n + i − window < j ≤ tokens − n + i."""
    own = torch.arange(tokens - n, tokens, device=device)[:, None]
    seen = torch.arange(tokens, device=device)[None, :]
    mask = seen <= own
    return mask & (seen > own - window) if window else mask


def masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, kernel: str, scale: float | None = None) -> Tensor:
    """Return attention under `mask`, [n, S] or [B, 1, n, S]."""
    if kernel == "sdpa":
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    groups, n = k.shape[1], q.shape[2]
    rows = q.reshape(q.shape[0], groups, -1, q.shape[3])  # [B, G, H/G · n, d]
    scores = (rows * (q.shape[3] ** -0.5 if scale is None else scale)) @ k.transpose(2, 3)
    if mask is not None:
        scores.unflatten(2, (-1, n)).masked_fill_(~(mask if mask.dim() == 2 else mask[:, :, None]), float("-inf"))
    return (scores.softmax(-1) @ v).reshape(*q.shape[:3], v.shape[3])


def _single(q: Tensor, k: Tensor, v: Tensor, kernel: str, scale: float | None) -> Tensor:
    """Return attention of one query per sequence; the heads of a group are rows of one product."""
    rows = q.reshape(q.shape[0], k.shape[1], -1, q.shape[3])  # [B, G, H/G, d]
    if kernel == "plain":
        first = k.device.type == "cpu" and keys_first(rows.shape[2], k.dtype)
        scores = (k @ rows.transpose(2, 3)).transpose(2, 3) if first else rows @ k.transpose(2, 3)
        mixed = (scores * (q.shape[3] ** -0.5 if scale is None else scale)).softmax(-1) @ v
    else:
        mixed = F.scaled_dot_product_attention(rows, k, v, scale=scale)
    return mixed.reshape(q.shape[0], q.shape[1], 1, v.shape[3])


@cache
def keys_first(rows: int, dtype: torch.dtype) -> bool:
    """Return whether keys times queries is faster than queries times keys on this CPU.

    Measured once per process, best of three.
    """
    q, k = torch.ones(4, rows, 64, dtype=dtype), torch.ones(4, 4096, 64, dtype=dtype)
    best = []
    for step in (lambda: k @ q.transpose(1, 2), lambda: q @ k.transpose(1, 2)):
        step()
        times = []
        for _ in range(3):
            begun = time.perf_counter()
            step()
            times.append(time.perf_counter() - begun)
        best.append(min(times))
    return best[0] < best[1]


def _windowed(q: Tensor, k: Tensor, v: Tensor, window: int, kernel: str, scale: float | None) -> Tensor:
    """Return windowed attention in blocks of queries: S · window scores instead of S²."""
    n, offset = q.shape[2], k.shape[2] - q.shape[2]
    size, found = max(window, BLOCK), []
    for start in range(0, n, size):
        end = min(start + size, n)
        low, high = max(0, offset + start - window + 1), offset + end
        mask = visible(end - start, high - low, window, q.device)
        found.append(
            masked(
                q[:, :, start:end], k[:, :, low:high], v[:, :, low:high], mask, "plain" if kernel == "plain" else "sdpa", scale
            )
        )
    return torch.cat(found, 2)


def _flex(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float | None) -> Tensor:
    """Return compiled FlexAttention. It runs only on CUDA and on request, because it compiles for minutes."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    n, tokens = q.shape[2], k.shape[2]

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        own = i + (tokens - n)
        return (j <= own) & (j > own - window) if window else j <= own

    mask = create_block_mask(seen, None, None, n, tokens, device=str(q.device))
    compiled = torch.compile(flex_attention) if q.device.type == "cuda" else flex_attention
    found: Tensor = compiled(q, k, v, block_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return found


UNSUPPORTED = (
    "attention_chunk_size", "cache_budget", "sink_tokens", "qk_norm_bias", "v_norm", "sinks", "output_gate", "k_is_v",
    "qo_projection", "input_size", "output_size", "cached",
)  # fmt: skip


class GroupedLayer(Mixer):
    """Attention of queries [B, H, n, d] over K and V of G heads."""

    def __init__(self, spec: Grouped, hidden_size: int, rotates: bool = True) -> None:
        refuse(spec, *UNSUPPORTED)
        super().__init__(spec, hidden_size, rotates)
        self.spec, self.window = spec, spec.sliding_window or 0

    def prepare(self, x: Tensor, past: int) -> tuple[Tensor, ...]:
        """Return q [B, H, n, d], k [B, G, n, d] with positions, and v [B, G, n, e]."""
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
        """Write the new rows to the cache and return attention over all stored rows, [B, H, n, e]."""
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


class SharedLayer(GroupedLayer):
    """Attention that reads the cache of an earlier layer and writes nothing.

    Without a cache, the inputs of the core are its queries, and the K and V of the earlier layer.
    """

    def __init__(self, spec: Grouped, hidden_size: int, rotates: bool = True) -> None:
        refuse(spec, "sliding_window")
        super().__init__(spec, hidden_size, rotates)

    def prepare(self, x: Tensor, past: int) -> tuple[Tensor, ...]:
        """Return only q [B, H, n, d]."""
        q = self._normed("q", split_heads(self.weights.linear("q", x), self.spec.num_attention_heads))
        return (self.rotary(q, past) if self.rotary else q,)

    def core(self, prepared: tuple[Tensor, ...], cache: LayerCache | None, past: int) -> Tensor:
        q = prepared[0]
        if cache is None:
            keys, values = prepared[1:]
        else:
            keys, values = (rows.read(past + q.shape[2]) for rows in cache.rows)
        return self._attend(q, keys, values, 0)
