"""Attention with KV heads and the gated delta rule in torch: `Grouped` and `GatedDeltaNet`.

Shapes: q [B, H, n, d], k [B, G, S, d], v [B, G, S, e] give [B, H, n, e]. Query i has position S − n
+ i. It attends to the positions up to its own, within a window if there is one. Keys and values are
never copied to H heads: the query heads of a group are rows of one matrix product.

Cross-layer attention (CLA) projects only queries and reads the cache of an earlier layer. Source:
Brandon et al. 2024, arXiv 2405.12981, section 3.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kvcalc.measure.layers.base_layer import (
    LayerCache,
    Mixer,
    Prepared,
    append_rows,
    join_heads,
    rms_norm,
    split_heads,
)

CHUNK = 64
# Ranges of A and of the time step in an untrained model. Faster decays produce denormal numbers,
# which make a CPU many times slower.
A_RANGE = 1.0, 16.0
DT_RANGE = 1e-3, 1e-1


class GatedDeltaNetLayer(Mixer):
    """Gated delta net (Qwen3-Next) in torch: linear attention with a recurrent state.

    Several value heads may share one query head and one key head.
    """

    def __init__(self, *options: Any) -> None:
        super().__init__(*options)
        a_log, dt_bias = self.weights["a_dt"].chunk(2)
        a_log.uniform_(*A_RANGE).log_()
        dt_bias.uniform_(*map(math.log, DT_RANGE)).exp_().expm1_().log_()

    def prepare(self, x: Tensor, past: int) -> Prepared:
        """Return five tensors of the new tokens: the inputs of the convolution, and the gates.

        In shapes, B is the number of sequences and n of new tokens. There are hk key heads of width
        dk and hv value heads of width dv.

        - Queries and keys together, [B, hk, n, 2·dk].
        - Values, [B, hv, n, dv].
        - Step size β, [B, hv, n].
        - Logarithm of the decay, [B, hv, n].
        - Output gate, [B, hv, n, dv].

        Args:
            x: Inputs of the new tokens [batch, new tokens, hidden size].
            past: Number of tokens before them.
        """
        heads = self.spec.linear_num_value_heads
        qk = split_heads(self.linear("qk", x), self.spec.linear_num_key_heads)
        v, gate = (split_heads(part, heads) for part in self.linear("v_gate", x).chunk(2, -1))
        step, decay = self.linear("step_decay", x).transpose(1, 2).chunk(2, 1)
        a_log, dt_bias = self.weights["a_dt"][:, None].chunk(2)
        return qk, v, step.sigmoid(), -a_log.exp() * F.softplus(decay + dt_bias), gate

    def core(self, prepared: Prepared, cache: LayerCache | None, past: int) -> Tensor:
        """Run convolution and scan over the new tokens, and return the scan's output.

        The output is [sequences, value heads, new tokens, value width]. The cache has three states:
        of the two convolutions, and of the scan. The method advances them by the new tokens.
        Without a cache, all states start at zero.

        Args:
            prepared: Tensors that `prepare` returned.
            cache: States of the layer; None without a cache.
            past: Number of tokens before the new tokens.
        """
        spec = self.spec
        qk, v, step, decay, _ = prepared
        states = [rows.tensor for rows in cache] if cache is not None else [None] * 3
        qk = F.silu(self.convolved("conv_qk", qk, states[0]))
        v = F.silu(self.convolved("conv_v", v, states[1]))
        dtype = torch.promote_types(torch.float32, v.dtype)
        q, k = (F.normalize(part, dim=-1) for part in qk.to(dtype).chunk(2, -1))
        q = q * spec.linear_key_head_dim**-0.5
        shared = spec.linear_num_value_heads // spec.linear_num_key_heads
        if shared > 1:
            q, k = q.repeat_interleave(shared, 1), k.repeat_interleave(shared, 1)
        state = states[2]
        if state is None:
            state = q.new_zeros(*q.shape[:2], q.shape[3], v.shape[3])
        mixed, end = scan(q, k, v.to(dtype), step.to(dtype), decay.to(dtype), state.to(dtype))
        if states[2] is not None:
            states[2].copy_(end)
        return mixed.to(v.dtype)

    def convolved(self, name: str, x: Tensor, state: Tensor | None) -> Tensor:
        """Return the causal convolution of each channel over the tokens, in the shape of x.

        Args:
            name: Name of the weights that have the filter of each channel.
            x: Input [batch, heads, new tokens, width].
            state: Last inputs of earlier tokens, [batch, heads, kernel − 1, width]. It advances by
                the new tokens. None means zeros.
        """
        batch, heads, n, width = x.shape
        kernel = self.spec.linear_conv_kernel_dim
        columns = x.new_zeros(batch, heads, kernel - 1, width) if state is None else state
        columns = torch.cat((columns, x), 2)
        filters = self.weights[name].view(heads, 1, width, -1)
        out = torch.zeros_like(x)
        for i in range(kernel):
            out = out + columns[:, :, i : i + n] * filters[..., i]
        if state is not None and kernel > 1:
            state.copy_(columns[:, :, n:])
        return out + filters[..., kernel] if self.spec.conv_bias else out

    def finish(self, mixed: Tensor, prepared: Prepared) -> Tensor:
        gated = rms_norm(mixed, self.weights["norm"]) * F.silu(prepared[4])
        return self.linear("out", join_heads(gated))


def scan(
    q: Tensor, k: Tensor, v: Tensor, step: Tensor, decay: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the outputs [B, h, n, dv] of the gated delta rule, and the state after the last token.

    The tokens are processed in chunks of 64. B is the number of sequences, h the heads, n the new
    tokens, dk and dv the widths of keys and values.

    Args:
        q: Queries [B, h, n, dk].
        k: Keys [B, h, n, dk].
        v: Values [B, h, n, dv].
        step: Step size β of each token, from 0 to 1 [B, h, n].
        decay: Logarithm of the decay of each token, at most 0 [B, h, n].
        state: State before the first token [B, h, dk, dv].
    """
    outputs = []
    inputs = (tensor.split(CHUNK, 2) for tensor in (q, k, v, step, decay))
    for chunk in zip(*inputs):
        out, state = _chunk(chunk, state)
        outputs.append(out)
    return torch.cat(outputs, 2), state


def _chunk(chunk: Prepared, state: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v, step, decay = chunk
    size = q.shape[2]
    total = decay.cumsum(-1)
    lower = torch.ones(size, size, dtype=torch.bool, device=q.device).tril()
    # [B, h, i, j]
    fading = (
        (total[..., :, None] - total[..., None, :]).masked_fill(~lower, float("-inf")).exp()
    )
    since_start = total.exp()[..., None]
    until_end = (total[..., -1:] - total).exp()[..., None]
    step = step[..., None]
    system = step * fading * (k @ k.transpose(2, 3))
    target = step * (v - since_start * (k @ state))
    change = torch.linalg.solve_triangular(system, target, upper=False, unitriangular=True)
    out = since_start * (q @ state) + (fading * (q @ k.transpose(2, 3))) @ change
    return out, state * since_start[..., -1:, :] + (until_end * k).transpose(2, 3) @ change


BLOCK = 1024  # minimum queries per block under a window


def attend(
    q: Tensor, k: Tensor, v: Tensor, window: int = 0, scale: float | None = None
) -> Tensor:
    """Return the output of causal attention for the last n of S tokens, [B, H, n, e].

    It uses torch's fused attention. For one token on a CPU it uses plain matrix products, which
    read the cache faster.

    Args:
        q: Queries [B, H, n, d]: B sequences, H query heads, head width d.
        k: Keys [B, G, S, d] of G KV heads.
        v: Values [B, G, S, e] of width e.
        window: Tokens of the sliding window; 0 for none.
        scale: Factor on the scores; None for 1/√d.
    """
    n, tokens = q.shape[2], k.shape[2]
    if n == 1:
        k, v = k[:, :, -window:], v[:, :, -window:]
        rows = q.reshape(q.shape[0], k.shape[1], -1, q.shape[3])  # [B, G, H/G, d]
        if q.is_cuda:
            mixed = F.scaled_dot_product_attention(rows, k, v, scale=scale)
        else:
            scores = k @ rows.transpose(2, 3) * (scale or q.shape[3] ** -0.5)
            mixed = scores.transpose(2, 3).softmax(-1) @ v
        return mixed.reshape(*q.shape[:3], v.shape[3])
    if window and tokens > 2 * max(window, BLOCK):
        return _windowed(q, k, v, window)
    if n == tokens and (not window or window >= tokens):
        return masked_attention(q, k, v, None, scale)
    return masked_attention(q, k, v, visible_mask(n, tokens, window, q.device), scale)


def visible_mask(n: int, tokens: int, window: int, device: torch.device) -> Tensor:
    """Return a boolean mask [n, tokens] that is true if a query attends to a key.

    Query i of the last n tokens has position p = tokens − n + i. It attends to key j if p − window
    < j ≤ p, or without a window if j ≤ p.

    Args:
        n: Number of queries.
        tokens: Number of keys.
        window: Tokens of the sliding window; 0 for none.
        device: Torch device.
    """
    own = torch.arange(tokens - n, tokens, device=device)[:, None]
    positions = torch.arange(tokens, device=device)[None, :]
    mask = positions <= own
    return mask & (positions > own - window) if window else mask


def masked_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None = None
) -> Tensor:
    """Return the attention output [B, H, n, e] of queries over keys and values under a mask.

    Without a mask the attention is causal, and n must equal S.

    Args:
        q: Queries [B, H, n, d]: B sequences, H query heads, n new tokens, head width d.
        k: Keys [B, G, S, d] of G KV heads and S tokens.
        v: Values [B, G, S, e] of width e.
        mask: True if a query attends to a key, [n, S] or [B, 1, n, S]; None for causal attention.
        scale: Factor on the scores; None for 1/√d.
    """
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )


def _windowed(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Return windowed attention in blocks of queries: S · window scores instead of S²."""
    blocks = []
    start = k.shape[2] - q.shape[2]
    for queries in q.split(max(window, BLOCK), 2):
        end = start + queries.shape[2]
        rows = slice(max(0, start - window + 1), end)
        mask = visible_mask(end - start, end - rows.start, window, q.device)
        blocks.append(masked_attention(queries, k[:, :, rows], v[:, :, rows], mask))
        start = end
    return torch.cat(blocks, 2)


class GroupedLayer(Mixer):
    """Grouped-query attention (GQA) in torch.

    Several query heads share the keys and values of a KV head.

    Attributes:
        refused: Fields of a `Grouped` that this class does not support. A layer that sets one of
            them cannot be measured.
    """

    refused = """
        attention_chunk_size cache_budget sink_tokens qk_norm_bias v_norm sinks output_gate
        k_is_v qo_projection input_size output_size cached
    """

    def prepare(self, x: Tensor, past: int) -> Prepared:
        """Return the queries, keys and values of the new tokens.

        If the layer reads another layer's cache, only the queries are returned. Queries are [batch,
        query heads, new tokens, width], keys and values [batch, KV heads, new tokens, width].
        Rotary positions are applied to queries and keys if the layer has them.

        Args:
            x: Inputs of the new tokens [batch, new tokens, hidden size].
            past: Number of tokens before them.
        """
        q = self._positioned("q", x, self.spec.num_attention_heads, past)
        if self.shares_cache:
            return (q,)
        groups = self.spec.num_key_value_heads
        return (
            q,
            self._positioned("k", x, groups, past),
            split_heads(self.linear("v", x), groups),
        )

    def _positioned(self, name: str, x: Tensor, heads: int, past: int) -> Tensor:
        """Return queries or keys [B, heads, n, d] after their norm, with positions."""
        projected, norm = self.linear(name, x), f"{name}_norm"
        if self.spec.qk_norm == "full":
            projected = self.weights.normed(norm, projected)
        split = split_heads(projected, heads)
        if self.spec.qk_norm == "head":
            split = self.weights.normed(norm, split)
        return self.rotated(split, past)

    def core(self, prepared: Prepared, cache: LayerCache | None, past: int) -> Tensor:
        """Write the new tokens' keys and values to the cache, and return the attention output.

        The new tokens attend to all stored tokens. A layer that shares a cache only reads it. The
        result is [batch, query heads, new tokens, value width].

        Args:
            prepared: Tensors that `prepare` returned.
            cache: Keys and values of the layer; None without a cache.
            past: Number of tokens before the new tokens.
        """
        q, *rows = prepared
        rows = (
            [entry.read(past + q.shape[2]) for entry in cache]
            if self.shares_cache and cache is not None
            else [append_rows(cache, i, new, past) for i, new in enumerate(rows)]
        )
        return attend(q, rows[0], rows[1], self.spec.sliding_window or 0)
