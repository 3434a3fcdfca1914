"""MLA and DSA: `Latent` and `Sparse` in torch.

MLA has two forms. Expanded: keys and values of all S tokens are projected from the latents again, and
attention runs per head. Absorbed: the queries are multiplied by W_UK and the outputs by W_UV, and all
heads attend to the latents. Decode uses the absorbed form and prefill the expanded form, unless `form`
says otherwise. Scores are scaled by 1/√(dn + dr) in both.

DSA is MLA in which each query reads only the latents that an indexer selects. The score of token s for
query t is the sum over index heads h of w[t, h] · ReLU(q[t, h] · k[s]), not one dot product. Decode
gathers the top-k latents and attends to them in the absorbed form. Prefill uses the expanded form with
a mask of the selection, as DeepSeek's inference code does. If top-k ≥ length, DSA equals MLA.
"""

import torch
from torch import Tensor

from kvcalc.layers.attention import Latent, Sparse
from kvcalc.measure.layers.base_layer import Mixer, join_heads, refuse, rms_norm, split_heads
from kvcalc.measure.layers.grouped_layer import attend, masked, visible
from kvcalc.measure.torch_cache import LayerCache

UNSUPPORTED = ("sliding_window", "output_gate", "q_up_size", "sinks")


class LatentLayer(Mixer):
    """MLA. r is kv_lora_rank; dn and dr are the key widths without and with positions; dv is v_head_dim."""

    def __init__(self, spec: Latent, hidden_size: int, rotates: bool = True) -> None:
        refuse(spec, *UNSUPPORTED)
        super().__init__(spec, hidden_size, rotates)
        self.spec, self.form = spec, "auto"
        self.scale = (spec.qk_nope_head_dim + spec.qk_rope_head_dim) ** -0.5

    def absorbs(self, new: int) -> bool:
        """Return whether a pass of `new` tokens uses the absorbed form."""
        return new == 1 if self.form == "auto" else self.form == "absorbed"

    def prepare(self, x: Tensor, past: int) -> tuple[Tensor, ...]:
        """Return two parts of the queries, [B, H, n, dn or r] and [B, H, n, dr], latent and RoPE key."""
        nope, rope = self._queries(self._query_latent(x), past)
        if self.absorbs(x.shape[1]):
            nope = self._heads_product(nope, self._up()[:, : self.spec.qk_nope_head_dim])
        return (nope, rope, *self._rows(x, past))

    def _query_latent(self, x: Tensor) -> Tensor:
        """Return the input of the query projection: [B, n, q_lora_rank], or x."""
        if not self.spec.q_lora_rank:
            return x
        down = self.weights.linear("q_down", x)
        return rms_norm(down, self.weights["q_norm"]) if self.spec.q_norm else down

    def _queries(self, source: Tensor, past: int) -> tuple[Tensor, Tensor]:
        q = self.weights.linear("q_up" if self.spec.q_lora_rank else "q", source)
        nope, rope = split_heads(q, self.spec.num_attention_heads).split(
            (self.spec.qk_nope_head_dim, self.spec.qk_rope_head_dim), -1
        )
        return nope, self._turned(rope, past)

    def _rows(self, x: Tensor, past: int) -> tuple[Tensor, Tensor]:
        """Return the cached rows of the new tokens: the normalised latent and the RoPE key."""
        latent, rope = self.weights.linear("kv_down", x)[:, None].split((self.spec.kv_lora_rank, self.spec.qk_rope_head_dim), -1)
        if self.spec.kv_norm:
            latent = rms_norm(latent, self.weights["kv_norm"])
        return latent, self._turned(rope, past)

    def _turned(self, rope: Tensor, past: int) -> Tensor:
        return self.rotary(rope, past) if self.rotary and rope.shape[-1] else rope

    def _up(self) -> Tensor:
        """Return W_UK and W_UV per head, [H, dn + dv, r]."""
        return self.weights["kv_up"].unflatten(0, (self.spec.num_attention_heads, -1))

    @staticmethod
    def _heads_product(x: Tensor, w: Tensor) -> Tensor:
        """Multiply x [B, H, n, a] by w [H, a, b], one product per head."""
        rows = x.transpose(0, 1).flatten(1, 2)  # [H, B·n, a]
        return (rows @ w).unflatten(1, (x.shape[0], x.shape[2])).transpose(0, 1)

    def _written(self, prepared: tuple[Tensor, ...], cache: LayerCache | None, past: int) -> tuple[Tensor, Tensor]:
        """Write the new rows and return all latents [B, 1, S, r] and RoPE keys [B, 1, S, dr]."""
        latent, rope = prepared[2:4]
        if cache is None:
            return latent, rope
        tokens = past + latent.shape[2]
        cache.rows[0].write(latent, past)
        if not self.spec.qk_rope_head_dim:
            return cache.rows[0].read(tokens), rope
        cache.rows[1].write(rope, past)
        return cache.rows[0].read(tokens), cache.rows[1].read(tokens)

    def core(self, prepared: tuple[Tensor, ...], cache: LayerCache | None, past: int) -> Tensor:
        latents, ropes = self._written(prepared, cache, past)
        n = prepared[0].shape[2]
        if self.absorbs(n):
            mask = None if n == 1 else visible(n, latents.shape[2], 0, latents.device)
            return self._absorbed(prepared[0], prepared[1], latents, ropes, mask)
        q, k, v = self._expanded(prepared[0], prepared[1], latents, ropes)
        return attend(q, k, v, 0, self.kernel, self.scale)

    def _absorbed(self, q: Tensor, q_rope: Tensor, latents: Tensor, ropes: Tensor, mask: Tensor | None) -> Tensor:
        """Attend to the shared rows with all heads in one product; return [B, H, n, r]."""
        heads, n = q.shape[1:3]
        scores = q.flatten(1, 2) @ latents[:, 0].transpose(1, 2)  # [B, H·n, S]
        if ropes.shape[-1]:
            scores = torch.baddbmm(scores, q_rope.flatten(1, 2), ropes[:, 0].transpose(1, 2))
        scores = scores * self.scale
        if mask is not None:
            scores = scores.unflatten(1, (heads, n)).masked_fill(~mask, float("-inf")).flatten(1, 2)
        return (scores.softmax(-1) @ latents[:, 0]).unflatten(1, (heads, n))

    def _expanded(self, q: Tensor, q_rope: Tensor, latents: Tensor, ropes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys [B, H, S, dn + dr] and values [B, H, S, dv] of every token."""
        up = split_heads(self.weights.linear("kv_up", latents[:, 0]), self.spec.num_attention_heads)
        k, v = up.split((self.spec.qk_nope_head_dim, self.spec.v_head_dim), -1)
        if not self.spec.qk_rope_head_dim:
            return q, k, v
        return torch.cat((q, q_rope), -1), torch.cat((k, ropes.expand(-1, k.shape[1], -1, -1)), -1), v

    def finish(self, mixed: Tensor, prepared: tuple[Tensor, ...]) -> Tensor:
        """Return [B, n, D]. In the absorbed form, `mixed` [B, H, n, r] is first multiplied by W_UV."""
        if self.absorbs(mixed.shape[2]):
            mixed = self._heads_product(mixed, self._up()[:, self.spec.qk_nope_head_dim :].transpose(1, 2))
        return self.weights.linear("o", join_heads(mixed))

    def _masked(self, prepared: tuple[Tensor, ...], latents: Tensor, ropes: Tensor, mask: Tensor) -> Tensor:
        """Return the expanded form under `mask` [B, 1, n, S]."""
        q, k, v = self._expanded(prepared[0], prepared[1], latents, ropes)
        return masked(q, k, v, mask, self.kernel, self.scale)


GATHERED = 1 << 26  # maximum elements gathered or scored in one operation


class SparseLayer(LatentLayer):
    """DSA. Hi is index_n_heads; di is index_head_dim."""

    spec: Sparse

    def __init__(self, spec: Sparse, hidden_size: int, rotates: bool = True) -> None:
        refuse(spec, "indexer", "index_pool")
        super().__init__(spec, hidden_size, rotates)

    def prepare(self, x: Tensor, past: int) -> tuple[Tensor, ...]:
        """Return the inputs of MLA and of the indexer.

        The indexer has queries [B, Hi, n, di], a key [B, 1, n, di] and head weights [B, n, Hi].
        """
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
        """Apply rotary positions to the first dr channels, if x has at least dr channels."""
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
        """Return attention of some queries to their selected tokens `chosen` [B, queries, k]."""
        if self.absorbs(n):
            return self._gathered(q, latents[:, 0], ropes[:, 0], chosen, seen)
        mask = torch.zeros(*chosen.shape[:2], latents.shape[2], dtype=torch.bool, device=chosen.device)
        mask.scatter_(2, chosen, True)
        return self._masked((q[0], q[1]), latents, ropes, (mask if seen is None else mask & seen)[:, None])

    def _gathered(self, q: list[Tensor], latents: Tensor, ropes: Tensor, chosen: Tensor, seen: Tensor | None) -> Tensor:
        """Return the absorbed form over the gathered rows of each query, [B, H, n, r]."""
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
    """Return the rows `chosen` [B, n, k] of x [B, S, w] as [B, n, k, w].

    If rows have one common stride, whole rows are copied. On a CPU this is much faster than indexing by
    sequence and row.
    """
    batch, step = torch.arange(x.shape[0], device=x.device)[:, None, None], x.stride(1)
    if not x.numel() or not step or x.stride(0) % step or x.stride(2) != 1:
        return x[batch, chosen]
    apart = x.stride(0) // step
    table = x.as_strided(((x.shape[0] - 1) * apart + x.shape[1], x.shape[2]), (step, 1))
    return table.index_select(0, (chosen + batch * apart).flatten()).unflatten(0, chosen.shape)


def index_scores(queries: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    """Return Σ_h weights[b, t, h] · ReLU(queries[b, h, t] · keys[b, s]) as [B, n, S]."""
    heads, n = queries.shape[1:3]
    dots = torch.relu_(queries.flatten(1, 2) @ keys.transpose(1, 2)).unflatten(1, (heads, n))  # [B, Hi, n, S]
    if n == 1:
        return weights @ dots[:, :, 0]
    return torch.einsum("bth,bhts->bts", weights, dots)


def top_tokens(scores: Tensor, top: int, seen: Tensor | None = None) -> Tensor:
    """Return the positions of the `top` best visible scores, [B, n, top], in any order.

    A query with fewer visible positions also gets hidden positions; the caller masks them.
    """
    if seen is not None:
        scores = scores.masked_fill(~seen, float("-inf"))
    return scores.topk(top, -1, sorted=False).indices
