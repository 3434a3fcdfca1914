"""Compressed attention over rows that few layers store (DeepSeek-V4.1): the others read those of the last that did.

Cached per sequence: in every layer a window of sliding_window shared key-values; in the layers that lend, one key-value and one
index key, made of it, per compress_ratio tokens, and the unfinished block. A layer that chooses scores those index keys; the
others read what the last one chose. After the layer that marks candidates, a query scores index_candidates entries at most.
Source: the release's inference code (model.py) as deepseek-v41-delta.md of JustVugg/colibri describes it, tensor by tensor.
"""

import msgspec

from kvcalc.layers.attention.compressed import Compressed
from kvcalc.layers.cache import CacheEntry, Span
from kvcalc.layers.cost import Operator, compressed_pairs
from kvcalc.layers.part import Count
from kvcalc.layers.passes import Pass
from kvcalc.layers.weights import Weight, matrix, vector


class LentCompressed(Compressed, frozen=True, tag="lent_compressed"):
    """`Compressed` whose compressed rows are this layer's own (`lends`) or another's, chosen here (`chooses`) or before.

    index_candidates: entries that a query scores at most; 0 for all.
    """

    lends: bool = False
    chooses: bool = False
    index_candidates: Count = 0

    def weights(self, hidden_size: int) -> tuple[Weight, ...]:
        """Those of a window, and where this layer lends the compressor [D, d] and the index key [d, di], where it chooses
        the index queries. Single tokens are compressed without a gate.
        """
        d, width = self.head_dim, self.index_head_dim
        found = [*self.predicting().weights(hidden_size)]
        if self.lends:
            found.append(matrix("compress_kv", hidden_size, d))
            found += [matrix("compress_gate", hidden_size, d)] if self.compress_ratio > 1 else []
            found += [vector("compress_norm", d), matrix("row_index_k", d, width), vector("index_k_norm", width)]
        if self.chooses:
            found.append(matrix("index_q", self.q_lora_rank, self.index_n_heads * width))
            found.append(matrix("index_weights", hidden_size, self.index_n_heads))
        return tuple(found)

    def dims(self) -> dict[str, tuple[str, str]]:
        return {**super().dims(), "row_index_k": ("d", "di")}

    def cache(self) -> tuple[CacheEntry, ...]:
        """The window; the compressed rows and, where they are scored or stored, the index keys; an unfinished block."""
        ratio, lent = self.compress_ratio, not self.lends
        found = [*self.predicting().cache()]
        if ratio:
            for role, width in (("latent", self.head_dim - self.qk_rope_head_dim), ("rope_key", self.qk_rope_head_dim)):
                found.append(CacheEntry(role, 1, width, ratio, top=self.index_topk, lent=lent))
            if self.lends or self.chooses:
                found.append(CacheEntry("index_key", 1, self.index_head_dim, ratio, top=self.index_candidates, lent=lent))
            if self.lends and ratio > 1:
                found.append(CacheEntry("compressor", 1, 2 * self.head_dim, ratio, span=Span.PARTIAL))
        return tuple(found)

    def operators(self, p: Pass) -> list[Operator]:
        """As `Compressed`, but that index keys come of the compressed rows, and are scored where this layer
        chooses.
        """
        w, ratio = p.local(self.weights(p.width)), self.compress_ratio
        heads, d, entries = p.heads(self.num_attention_heads), self.head_dim, self.cache()
        names = ("q_down", "kv", "compress_kv", "compress_gate", "index_weights")
        found = [p.gemm("qkv_down", *(w[n] for n in names if n in w)), p.gemm("q_up", w["q_up"])]
        rotated = (heads + 1) * self.qk_rope_head_dim * p.tokens
        found.append(p.vector("rope", rotated, rotated, p.ROPE_FLOPS * rotated))
        if self.lends:
            finished = p.pairs(lambda new, past: (new + past) // ratio - past // ratio)
            columns = (2 if ratio > 1 else 1) * d * p.tokens
            compress = p.vector("compress", columns, finished * d, 4 * columns)
            buffers = p.cache(e for e in entries if e.role == "compressor")
            found.append(msgspec.structs.replace(compress, cost=compress.cost + buffers))
            found.append(p.gemm("row_index_k", w["row_index_k"], tokens=finished))
        if self.chooses:
            keys = [e for e in entries if e.role == "index_key"]
            scored = p.pairs(lambda new, past: compressed_pairs(new, past, ratio, self.index_candidates))
            found.append(p.gemm("index_q", w["index_q"]))
            found += p.indexer(keys, scored, self.index_n_heads, self.index_head_dim, self.index_topk)
        rows = [e for e in entries if e.role in ("latent", "rope_key")]
        found.append(p.attention(rows, self._visible, heads, d, d))
        return [*found, p.gemm("o_down", w["o_down"]), p.gemm("o_up", w["o_up"]), *p.all_reduce(p.width)]

    def problem(self) -> str:
        if (self.lends or self.chooses) and not self.compress_ratio:
            return "a layer without compress_ratio neither lends nor chooses"
        if self.compress_ratio and not (self.index_topk and self.index_n_heads and self.index_head_dim):
            return "compress_ratio needs index_topk, index_n_heads and index_head_dim"
        return super().problem()

    @property
    def label(self) -> str:
        return super().label + (" (lent)" if self.compress_ratio and not self.lends else "")

    def predicting(self) -> Compressed:
        """A prediction layer keeps its window alone."""
        names = ("num_attention_heads", "head_dim", "qk_rope_head_dim", "q_lora_rank", "o_lora_rank", "o_groups",
                 "sliding_window", "sinks")  # fmt: skip
        return Compressed(**{name: getattr(self, name) for name in names})
