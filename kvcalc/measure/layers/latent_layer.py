"""MLA and DSA: `Latent` and `Sparse` in torch.

MLA has two forms. Expanded, for several new tokens: keys and values of all S tokens are projected
from the latents again, and attention runs per head. Absorbed, for one new token: the queries are
multiplied by W_UK and the outputs by W_UV, and all heads attend to the latents. Scores are scaled
by 1/√(dn + dr) in both.

Shapes: dn and dr are the key widths without and with positions, r is kv_lora_rank and dv is
v_head_dim.

DSA is MLA in which each query reads only the latents that an indexer selects. The score of token s
for query t is the sum over index heads h of w[t, h] · ReLU(q[t, h] · k[s]), not one dot product.
Decode gathers the top-k latents. Prefill uses the expanded form with a mask of the selection, as
DeepSeek's inference code does. If top-k ≥ length, DSA equals MLA.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from kvcalc.measure.layers.base_layer import (
    LayerCache,
    Mixer,
    Prepared,
    append_rows,
    split_heads,
)
from kvcalc.measure.layers.grouped_layer import attend, masked_attention, visible_mask

MAX_SCORED = 1 << 26  # elements of index scores in one operation


class LatentLayer(Mixer):
    """Multi-head latent attention (MLA) in torch.

    For several new tokens it uses the expanded form, which recomputes keys and values of all heads.
    For one new token it uses the absorbed form, which computes on the cached latents.

    Attributes:
        refused: Fields of a `Latent` that this class does not support. A layer that sets one of
            them cannot be measured.
    """

    refused = "sliding_window output_gate q_up_size sinks"

    @property
    def scale(self) -> float:
        return float(self.spec.qk_nope_head_dim + self.spec.qk_rope_head_dim) ** -0.5

    def prepare(self, x: Tensor, past: int) -> Prepared:
        """Return five tensors for the n new tokens of B sequences: queries, and rows to cache.

        H is the number of query heads and r is kv_lora_rank. dn and dr are the key widths without
        and with positions.

        - Queries without positions, [B, H, n, dn]. If there is one new token, they are already
          multiplied by W_UK, [B, H, 1, r].
        - Queries with positions, [B, H, n, dr].
        - Latents to cache, [B, 1, n, r].
        - RoPE keys to cache, [B, 1, n, dr].
        - Input of the query projection, [B, n, q_lora_rank], or x if there is no q_lora_rank.

        Args:
            x: Inputs of the new tokens [B, n, hidden size].
            past: Number of tokens before them.
        """
        spec = self.spec
        query_input, name = x, "q"
        if spec.q_lora_rank:
            query_input, name = self.weights.normed("q_norm", self.linear("q_down", x)), "q_up"
        q = split_heads(self.linear(name, query_input), spec.num_attention_heads)
        nope, rope = q.split((spec.qk_nope_head_dim, spec.qk_rope_head_dim), -1)
        if x.shape[1] == 1:
            nope = torch.einsum("bhnd,hdr->bhnr", nope, self._up()[:, : spec.qk_nope_head_dim])
        rows = self.linear("kv_down", x)[:, None]
        latent, key = rows.split((spec.kv_lora_rank, spec.qk_rope_head_dim), -1)
        latent = self.weights.normed("kv_norm", latent)
        return nope, self.rotated(rope, past), latent, self.rotated(key, past), query_input

    def _up(self) -> Tensor:
        """Return W_UK and W_UV per head, [H, dn + dv, r]."""
        return self.weights["kv_up"].unflatten(0, (self.spec.num_attention_heads, -1))

    def _append(self, prepared: Prepared, cache: LayerCache | None, past: int) -> Prepared:
        """Write the new rows and return all latents [B, 1, S, r] and RoPE keys [B, 1, S, dr]."""
        latents = append_rows(cache, 0, prepared[2], past)
        if not self.spec.qk_rope_head_dim:
            return latents, latents[..., :0]
        return latents, append_rows(cache, 1, prepared[3], past)

    def core(self, prepared: Prepared, cache: LayerCache | None, past: int) -> Tensor:
        latents, keys = self._append(prepared, cache, past)
        if prepared[0].shape[2] == 1:
            return self.absorbed(prepared, latents, keys)
        q, k, v = self.expanded(prepared, latents, keys)
        return attend(q, k, v, scale=self.scale)

    def absorbed(self, prepared: Prepared, latents: Tensor, keys: Tensor) -> Tensor:
        """Return attention of all heads over the shared latents, for one new token.

        The result is in latent space, before W_UV: [sequences, query heads, 1, kv_lora_rank].

        Args:
            prepared: Tensors that `prepare` returned.
            latents: Latents of all tokens, [sequences, 1, tokens, kv_lora_rank].
            keys: RoPE keys of all tokens, [sequences, 1, tokens, qk_rope_head_dim].
        """
        q, q_rope = prepared[:2]
        scores = q.transpose(1, 2) @ latents.transpose(2, 3)  # [B, 1, H, S]
        if keys.shape[-1]:
            scores = scores + q_rope.transpose(1, 2) @ keys.transpose(2, 3)
        return ((scores * self.scale).softmax(-1) @ latents).transpose(1, 2)

    def expanded(self, prepared: Prepared, latents: Tensor, keys: Tensor) -> Prepared:
        """Return (queries of the new tokens, keys of all tokens, values of all tokens), per head.

        Each is [sequences, query heads, tokens, width]. The values have width v_head_dim. Queries
        and keys have width qk_nope_head_dim + qk_rope_head_dim.

        Args:
            prepared: Tensors that `prepare` returned.
            latents: Latents of all tokens, [sequences, 1, tokens, kv_lora_rank].
            keys: RoPE keys of all tokens, [sequences, 1, tokens, qk_rope_head_dim].
        """
        spec = self.spec
        up = split_heads(self.linear("kv_up", latents[:, 0]), spec.num_attention_heads)
        k, v = up.split((spec.qk_nope_head_dim, spec.v_head_dim), -1)
        keys = keys.expand(-1, spec.num_attention_heads, -1, -1)
        return torch.cat(prepared[:2], -1), torch.cat((k, keys), -1), v

    def finish(self, mixed: Tensor, prepared: Prepared) -> Tensor:
        """Return the output of the layer, [batch, new tokens, hidden size].

        Args:
            mixed: Attention outputs that `core` returned. In the absorbed form they are in latent
                space, and are first multiplied by W_UV.
            prepared: Tensors that `prepare` returned.
        """
        if mixed.shape[2] == 1:
            values = self._up()[:, self.spec.qk_nope_head_dim :]
            mixed = torch.einsum("bhnr,hvr->bhnv", mixed, values)
        return super().finish(mixed, prepared)


class SparseLayer(LatentLayer):
    """DeepSeek sparse attention (DSA) in torch: MLA over the tokens that an indexer selects."""

    refused = f"{LatentLayer.refused} indexer index_pool"

    def prepare(self, x: Tensor, past: int) -> Prepared:
        """Return seven tensors for the new tokens: four of MLA, and three of the indexer.

        The first four are those of `LatentLayer.prepare`: queries without and with positions,
        latents and RoPE keys. The indexer has queries [B, Hi, n, di], keys [B, 1, n, di] and head
        weights [B, n, Hi]. B is the number of sequences and n of new tokens. Hi is index_n_heads
        and di is index_head_dim.

        Args:
            x: Inputs of the new tokens [batch, new tokens, hidden size].
            past: Number of tokens before them.
        """
        spec = self.spec
        *rows, query_input = super().prepare(x, past)
        queries = self.linear("index_q", x if spec.index_query_from_hidden else query_input)
        queries = self._partly_rotated(split_heads(queries, spec.index_n_heads), past)
        scale, shift = self.weights["index_k_norm"].chunk(2)
        key = F.layer_norm(self.linear("index_k", x), scale.shape, scale, shift)[:, None]
        weights = self.linear("index_weights", x)
        weights = weights * (spec.index_n_heads * spec.index_head_dim) ** -0.5
        return (*rows, queries, self._partly_rotated(key, past), weights)

    def _partly_rotated(self, x: Tensor, past: int) -> Tensor:
        """Apply rotary positions to the first dr channels, if x has at least dr channels."""
        width = self.spec.qk_rope_head_dim
        if width > x.shape[-1]:
            return x
        return torch.cat((self.rotated(x[..., :width], past), x[..., width:]), -1)

    def core(self, prepared: Prepared, cache: LayerCache | None, past: int) -> Tensor:
        latents, keys = self._append(prepared, cache, past)
        queries, index_key, weights = prepared[4:]
        index_keys = append_rows(cache, -1, index_key, past)[:, 0]
        n, tokens = queries.shape[2], index_keys.shape[1]
        top = min(self.spec.index_topk, tokens)
        if n == 1:
            positions = top_tokens(index_scores(queries, index_keys, weights), top)
            latents, keys = (gathered_rows(rows, positions) for rows in (latents, keys))
            return self.absorbed(prepared, latents, keys)
        q, k, v = self.expanded(prepared, latents, keys)
        visible_tokens = visible_mask(n, tokens, 0, q.device)
        size = max(1, MAX_SCORED // (queries.shape[0] * queries.shape[1] * tokens))
        mixed = []
        for start in range(0, n, size):
            part = slice(start, start + size)
            scores = index_scores(queries[:, :, part], index_keys, weights[:, part])
            positions = top_tokens(scores, top, visible_tokens[part])
            mask = torch.zeros_like(scores, dtype=torch.bool).scatter_(2, positions, True)
            mask = (mask & visible_tokens[part])[:, None]
            mixed.append(masked_attention(q[:, :, part], k, v, mask, self.scale))
        return torch.cat(mixed, 2)


def gathered_rows(x: Tensor, positions: Tensor) -> Tensor:
    """Return the rows of x at given positions, [B, 1, k, w]: the latents that a query reads.

    Args:
        x: Rows [B, 1, S, w] of B sequences of S tokens, with width w.
        positions: k positions of each sequence [B, 1, k].
    """
    sequences = zip(x[:, 0], positions[:, 0])
    return torch.stack([rows.index_select(0, indices) for rows, indices in sequences])[:, None]


def index_scores(queries: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    """Return the indexer's score of each token s for each query t, [B, n, S].

    The score is Σ_h weights[b, t, h] · ReLU(queries[b, h, t] · keys[b, s]), summed over the index
    heads h of sequence b.

    Args:
        queries: Index queries [B, Hi, n, di]: B sequences, Hi index heads, n queries, width di.
        keys: Index keys [B, S, di] of S tokens.
        weights: Weight of each head [B, n, Hi].
    """
    dots = torch.relu_(queries.flatten(1, 2) @ keys.transpose(1, 2))
    dots = dots.unflatten(1, queries.shape[1:3])  # [B, Hi, n, S]
    return torch.einsum("bth,bhts->bts", weights, dots)


def top_tokens(scores: Tensor, top: int, visible_tokens: Tensor | None = None) -> Tensor:
    """Return the positions of the tokens with each query's highest scores, [B, n, top], unsorted.

    A query with fewer than `top` visible tokens also gets hidden tokens. The caller masks them.

    Args:
        scores: Scores [B, n, S] of S tokens, for n queries of B sequences.
        top: Number of positions per query, at most S.
        visible_tokens: Boolean mask [n, S], true if a query may attend to a token; None if all
            queries may attend to all tokens.
    """
    if visible_tokens is not None:
        scores = scores.masked_fill(~visible_tokens, float("-inf"))
    return scores.topk(top, -1, sorted=False).indices
