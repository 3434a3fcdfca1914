"""Attention itself: torch's fused kernel, and the plain one that every form can be checked with.

Shapes: q [B, H, n, d], k [B, G, S, d], v [B, G, S, e] → [B, H, n, e]. Query i is position S − n + i and sees the positions
up to its own, within a window if there is one. Keys and values are never copied out to H heads: the heads of a group are
rows of one product.
"""

import time
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

KERNELS = ("auto", "sdpa", "plain", "flex")
BLOCK = 1024  # queries at once under a window, at least


def attend(q: Tensor, k: Tensor, v: Tensor, window: int = 0, kernel: str = "sdpa", scale: float | None = None) -> Tensor:
    """Causal attention of the last n positions; kernel: sdpa, plain or flex."""
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
    """[n, tokens]: whether query i sees position j: j ≤ tokens − n + i, and j > tokens − n + i − window."""
    own = torch.arange(tokens - n, tokens, device=device)[:, None]
    seen = torch.arange(tokens, device=device)[None, :]
    mask = seen <= own
    return mask & (seen > own - window) if window else mask


def masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, kernel: str, scale: float | None = None) -> Tensor:
    """Attention to what `mask` ([n, S] or [B, 1, n, S]) shows."""
    if kernel == "sdpa":
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    groups, n = k.shape[1], q.shape[2]
    rows = q.reshape(q.shape[0], groups, -1, q.shape[3])  # [B, G, H/G · n, d]
    scores = (rows * (q.shape[3] ** -0.5 if scale is None else scale)) @ k.transpose(2, 3)
    if mask is not None:
        scores.unflatten(2, (-1, n)).masked_fill_(~(mask if mask.dim() == 2 else mask[:, :, None]), float("-inf"))
    return (scores.softmax(-1) @ v).reshape(*q.shape[:3], v.shape[3])


def _single(q: Tensor, k: Tensor, v: Tensor, kernel: str, scale: float | None) -> Tensor:
    """One query per sequence: all it has is visible, and the heads of a group are the rows of one product."""
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
    """Whether scores of so few queries are faster as keys times queries on this CPU; tried once a process, best of three."""
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
    """Blocks of queries, each with the keys that its window reaches: S · window scores rather than S²."""
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
    """FlexAttention, compiled: on CUDA and on request only, since it compiles for minutes."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    n, tokens = q.shape[2], k.shape[2]

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        own = i + (tokens - n)
        return (j <= own) & (j > own - window) if window else j <= own

    mask = create_block_mask(seen, None, None, n, tokens, device=str(q.device))
    compiled = torch.compile(flex_attention) if q.device.type == "cuda" else flex_attention
    found: Tensor = compiled(q, k, v, block_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return found
