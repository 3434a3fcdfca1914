"""DSA: `kvcalc.layers.attention.Sparse` in torch. MLA of which each query reads the latents that an indexer chose.

The score of token s for query t is Σ_h w[t, h] · ReLU(q[t, h] · k[s]) over the index heads: a weighted sum, not one dot
product. Decode gathers the top-k latents and attends to them in the absorbed form; prefill attends in the expanded form
under a mask of the choice, as DeepSeek's own inference code does. With top-k ≥ length both are MLA.
"""

import torch
from torch import Tensor

from kvcalc.layers.attention import Sparse
from kvcalc.measure.cache import LayerCache
from kvcalc.measure.layers.base import refuse, split_heads
from kvcalc.measure.layers.kernels import visible
from kvcalc.measure.layers.latent import LatentLayer

GATHERED = 1 << 26  # elements gathered, or scored, at once


class SparseLayer(LatentLayer):
    """Hi: index_n_heads, di: index_head_dim."""

    spec: Sparse

    def __init__(self, spec: Sparse, hidden_size: int, rotates: bool = True) -> None:
        refuse(spec, "indexer", "index_pool")
        super().__init__(spec, hidden_size, rotates)

    def prepare(self, x: Tensor, past: int) -> tuple[Tensor, ...]:
        """MLA's four, then index queries [B, Hi, n, di], index key [B, 1, n, di] and head weights [B, n, Hi]."""
        spec, source = self.spec, self._query_latent(x)
        nope, rope = self._queries(source, past)
        if self.absorbs(x.shape[1]):
            nope = self._heads_product(nope, self._up()[:, : spec.qk_nope_head_dim])
        asked = self.weights.linear("index_q", x if spec.index_query_from_hidden else source)
        scale, shift = self.weights["index_k_norm"].chunk(2)
        key = torch.nn.functional.layer_norm(self.weights.linear("index_k", x), (spec.index_head_dim,), scale, shift)
        weights = self.weights.linear("index_weights", x) * (spec.index_n_heads * spec.index_head_dim) ** -0.5
        queries = self._partly_turned(split_heads(asked, spec.index_n_heads), past)
        return (nope, rope, *self._rows(x, past), queries, self._partly_turned(key[:, None], past), weights)

    def _partly_turned(self, x: Tensor, past: int) -> Tensor:
        """Positions on the first dr channels, where that many there are."""
        dr = self.spec.qk_rope_head_dim
        if not self.rotary or not 0 < dr <= x.shape[-1]:
            return x
        return torch.cat((self.rotary(x[..., :dr], past), x[..., dr:]), -1)

    def core(self, prepared: tuple[Tensor, ...], cache: LayerCache | None, past: int) -> Tensor:
        latents, ropes = self._written(prepared, cache, past)
        queries, key, weights = prepared[4:]
        if cache is None:
            keys = key
        else:
            cache.rows[-1].write(key, past)
            keys = cache.rows[-1].read(past + key.shape[2])
        n = key.shape[2]
        mask = visible(n, keys.shape[2], 0, keys.device) if n > 1 else None
        top = min(self.spec.index_topk, keys.shape[2])
        size = max(1, GATHERED // (queries.shape[0] * max(queries.shape[1] * keys.shape[2], top * latents.shape[3])))
        found = []
        for start in range(0, n, size):
            part = slice(start, start + size)
            seen = mask[part] if mask is not None else None
            scores = index_scores(queries[:, :, part], keys[:, 0], weights[:, part])
            chosen = top_tokens(scores, top, seen)
            found.append(self._chosen(n, [t[:, :, part] for t in prepared[:2]], latents, ropes, chosen, seen))
        return found[0] if len(found) == 1 else torch.cat(found, 2)

    def _chosen(self, n: int, q: list[Tensor], latents: Tensor, ropes: Tensor, chosen: Tensor, seen: Tensor | None) -> Tensor:
        """Attention of some of a pass's n queries to the tokens `chosen` [B, queries, k] for each."""
        if self.absorbs(n):
            return self._gathered(q, latents[:, 0], ropes[:, 0], chosen, seen)
        mask = torch.zeros(*chosen.shape[:2], latents.shape[2], dtype=torch.bool, device=chosen.device)
        mask.scatter_(2, chosen, True)
        return self._masked((q[0], q[1]), latents, ropes, (mask if seen is None else mask & seen)[:, None])

    def _gathered(self, q: list[Tensor], latents: Tensor, ropes: Tensor, chosen: Tensor, seen: Tensor | None) -> Tensor:
        """The absorbed form over rows gathered for each query: [B, H, n, r]."""
        rows, keys = gathered_rows(latents, chosen), gathered_rows(ropes, chosen)  # [B, n, k, r], [B, n, k, dr]
        scores = q[0].transpose(1, 2) @ rows.transpose(2, 3)  # [B, n, H, k]
        if keys.shape[-1]:
            scores = scores + q[1].transpose(1, 2) @ keys.transpose(2, 3)
        scores = scores * self.scale
        if seen is not None:
            hidden = ~seen.expand(chosen.shape[0], -1, -1).gather(2, chosen)
            scores = scores.masked_fill(hidden[:, :, None], float("-inf"))
        return (scores.softmax(-1) @ rows).transpose(1, 2)


def gathered_rows(x: Tensor, chosen: Tensor) -> Tensor:
    """Of x [B, S, w] the rows `chosen` [B, n, k] of each sequence: [B, n, k, w]. Whole rows are copied where they lie apart
    by one stride, which is much faster on a CPU than indexing by sequence and row."""
    batch, step = torch.arange(x.shape[0], device=x.device)[:, None, None], x.stride(1)
    if not x.numel() or not step or x.stride(0) % step or x.stride(2) != 1:
        return x[batch, chosen]
    apart = x.stride(0) // step
    table = x.as_strided(((x.shape[0] - 1) * apart + x.shape[1], x.shape[2]), (step, 1))
    return table.index_select(0, (chosen + batch * apart).flatten()).unflatten(0, chosen.shape)


def index_scores(queries: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    """Σ_h weights[b, t, h] · ReLU(queries[b, h, t] · keys[b, s]) → [B, n, S]."""
    heads, n = queries.shape[1:3]
    dots = torch.relu_(queries.flatten(1, 2) @ keys.transpose(1, 2)).unflatten(1, (heads, n))  # [B, Hi, n, S]
    if n == 1:
        return weights @ dots[:, :, 0]
    return torch.einsum("bth,bhts->bts", weights, dots)


def top_tokens(scores: Tensor, top: int, seen: Tensor | None = None) -> Tensor:
    """The positions of the `top` best scores that a query may see, [B, n, top], in no particular order.

    A query that sees fewer gets hidden positions too, for the caller to mask.
    """
    if seen is not None:
        scores = scores.masked_fill(~seen, float("-inf"))
    return scores.topk(top, -1, sorted=False).indices
