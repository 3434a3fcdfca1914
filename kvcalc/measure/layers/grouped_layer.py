"""MHA, GQA, MQA, sliding windows and cross-layer attention: `Grouped` in torch.

Shapes: q [B, H, n, d], k [B, G, S, d], v [B, G, S, e] give [B, H, n, e]. Query i has position S − n
+ i. It attends to the positions up to its own, within a window if there is one. Keys and values are
never copied to H heads: the query heads of a group are rows of one matrix product.

The cache of a window is a ring of W rows. One new token overwrites the oldest row and reads the
whole ring; the order of rows does not matter because keys include their positions. Several new
tokens read the last W − 1 rows of the ring and their own rows, and are written afterwards, because
their first queries still attend to rows that the last new tokens replace.

`SharedLayer` is cross-layer attention (CLA): it projects only queries and reads the cache of an
earlier layer. Source: Brandon et al. 2024, arXiv 2405.12981, section 3.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from kvcalc.layers.attention import Grouped
from kvcalc.measure.layers.base_layer import Mixer, Prepared, split_heads, stored_rows
from kvcalc.measure.torch_cache import TorchLayerCache

KERNELS = ("auto", "sdpa", "plain")
BLOCK = 1024  # minimum queries per block under a window


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int = 0,
    kernel: str = "sdpa",
    scale: float | None = None,
) -> Tensor:
    """Return causal attention of the last n positions with the kernel sdpa or plain."""
    n, tokens = q.shape[2], k.shape[2]
    if n == 1:
        start = max(0, tokens - window) if window else 0
        return masked(q, k[:, :, start:], v[:, :, start:], None, kernel, scale)
    if window and tokens > 2 * max(window, BLOCK):
        return _windowed(q, k, v, window, kernel, scale)
    if kernel == "sdpa" and n == tokens and (not window or window >= tokens):
        shares_keys = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=shares_keys
        )
    return masked(q, k, v, visible(n, tokens, window, q.device), kernel, scale)


def visible(n: int, tokens: int, window: int, device: torch.device) -> Tensor:
    """Return a mask [n, tokens]: query i attends to j if tokens − n + i − window < j ≤ tokens − n +
    i."""
    own = torch.arange(tokens - n, tokens, device=device)[:, None]
    positions = torch.arange(tokens, device=device)[None, :]
    mask = positions <= own
    return mask & (positions > own - window) if window else mask


def masked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    kernel: str,
    scale: float | None = None,
) -> Tensor:
    """Return attention under `mask`, [n, S] or [B, 1, n, S], or of one query per sequence."""
    groups, n = k.shape[1], q.shape[2]
    if kernel != "plain" and n > 1:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=scale, enable_gqa=q.shape[1] != groups
        )
    rows = q.reshape(q.shape[0], groups, -1, q.shape[3])  # [B, G, H/G · n, d]
    if kernel != "plain":
        mixed = F.scaled_dot_product_attention(rows, k, v, scale=scale)
    else:
        rows = rows * (scale or q.shape[3] ** -0.5)
        # keys come first for one query, because CPUs then read them faster
        swapped = n == 1
        scores = k @ rows.transpose(2, 3) if swapped else rows @ k.transpose(2, 3)
        scores = scores.transpose(2, 3) if swapped else scores
        if mask is not None:
            hidden = ~(mask if mask.dim() == 2 else mask[:, :, None])
            scores.unflatten(2, (-1, n)).masked_fill_(hidden, float("-inf"))
        mixed = scores.softmax(-1) @ v
    return mixed.reshape(*q.shape[:3], v.shape[3])


def _windowed(
    q: Tensor, k: Tensor, v: Tensor, window: int, kernel: str, scale: float | None
) -> Tensor:
    """Return windowed attention in blocks of queries: S · window scores instead of S²."""
    past, blocks = k.shape[2] - q.shape[2], []
    start = past
    for queries in q.split(max(window, BLOCK), 2):
        end = start + queries.shape[2]
        rows_in_window = slice(max(0, start - window + 1), end)
        keys, values = k[:, :, rows_in_window], v[:, :, rows_in_window]
        mask = visible(end - start, keys.shape[2], window, q.device)
        blocks.append(masked(queries, keys, values, mask, kernel, scale))
        start = end
    return torch.cat(blocks, 2)


class GroupedLayer(Mixer):
    """Attention of queries [B, H, n, d] over K and V of G heads."""

    refused: tuple[str, ...] = (
        "attention_chunk_size",
        "cache_budget",
        "sink_tokens",
        "qk_norm_bias",
        "v_norm",
        "sinks",
        "output_gate",
        "k_is_v",
        "qo_projection",
        "input_size",
        "output_size",
        "cached",
    )

    def __init__(self, spec: Grouped, hidden_size: int, rotates: bool = True) -> None:
        super().__init__(spec, hidden_size, rotates)
        self.spec, self.window = spec, spec.sliding_window or 0

    def prepare(self, x: Tensor, past: int) -> Prepared:
        """Return q [B, H, n, d], k [B, G, n, d] with positions, and v [B, G, n, e]."""
        groups = self.spec.num_key_value_heads
        k = self._positioned("k", x, groups, past)
        return self._queries(x, past), k, split_heads(self.linear("v", x), groups)

    def _queries(self, x: Tensor, past: int) -> Tensor:
        return self._positioned("q", x, self.spec.num_attention_heads, past)

    def _positioned(self, name: str, x: Tensor, heads: int, past: int) -> Tensor:
        """Return queries or keys [B, heads, n, d] after their norm, with positions."""
        projected = self.linear(name, x)
        is_per_head = self.spec.qk_norm == "head"
        if not is_per_head:
            projected = self.weights.normed(f"{name}_norm", projected)
        split = split_heads(projected, heads)
        if is_per_head:
            split = self.weights.normed(f"{name}_norm", split)
        return self.rotated(split, past)

    def core(self, prepared: Prepared, cache: TorchLayerCache | None, past: int) -> Tensor:
        """Write the new rows to the cache and return attention over all stored rows, [B, H, n,
        e]."""
        q, k, v = prepared
        if cache is None:
            return attend(q, k, v, self.window, self.kernel)
        if not self.window or q.shape[2] == 1:
            keys, values = (stored_rows(cache, i, rows, past) for i, rows in enumerate((k, v)))
            return attend(q, keys, values, kernel=self.kernel)
        num_old = min(past, self.window - 1)
        rows_in_window = []
        for entry, rows in zip(cache.rows, (k, v), strict=True):
            rows_in_window.append(
                torch.cat((entry.last(past, num_old), rows), 2) if num_old else rows
            )
            entry.write(rows, past)
        return attend(q, rows_in_window[0], rows_in_window[1], self.window, self.kernel)


class SharedLayer(GroupedLayer):
    """Attention that reads the cache of an earlier layer and writes nothing.

    Without a cache, the inputs of the core are its queries, and the K and V of the earlier layer.
    """

    refused = (*GroupedLayer.refused, "sliding_window")

    def prepare(self, x: Tensor, past: int) -> Prepared:
        """Return only q [B, H, n, d]."""
        return (self._queries(x, past),)

    def core(self, prepared: Prepared, cache: TorchLayerCache | None, past: int) -> Tensor:
        q, *rows = prepared
        if cache is not None:
            rows = [entry.read(past + q.shape[2]) for entry in cache.rows]
        return attend(q, rows[0], rows[1], kernel=self.kernel)
