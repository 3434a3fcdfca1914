"""Sparse attention with an indexer: DeepSeek sparse attention over latents, and block-sparse
attention over keys.

Both store more and read less than dense attention. An indexer scores small index keys of every
token, and attention reads only the top-k. Sources: DeepSeek-V3.2-Exp technical report §2 (indexer
of index_n_heads heads, weighted ReLU scores, top-k tokens); GLM-5.2's config (indexers in some
layers, whose choice the others reuse); MiniMax-M3's modelling code in transformers (scores per
block of index_block_size tokens, top-k blocks).
"""

from msgspec.structs import replace

from kvcalc.arithmetic import Num
from kvcalc.layers.attention.grouped import Grouped
from kvcalc.layers.attention.latent import Latent
from kvcalc.layers.cache import CacheEntries, CacheEntry
from kvcalc.layers.cost import Operator, SparseShape, causal_pairs
from kvcalc.layers.part import Count, Size, Tokens
from kvcalc.layers.passes import Pass
from kvcalc.layers.weights import WeightsByName


class Sparse(Latent, frozen=True, kw_only=True, tag="sparse"):
    """DeepSeek sparse attention (DSA): MLA in which an indexer selects the latents of each query.

    An indexer scores a small index key of each cached token, and each query attends only to the
    `index_topk` tokens with the highest scores. The fields of `Latent` (MLA) also apply.

    Attributes:
        WEIGHTS: The lines of `Latent`, and a line per weight of the indexer. `q: D × H·d / H` is a
            matrix with D inputs and H·d outputs. Tensor parallelism divides the outputs into H
            units. If a matrix has D outputs, the inputs are divided instead. `norm: d` is an
            undivided vector of d elements. `if` is the condition for the weight.
        LETTERS: The field that each letter of a size stands for. D is the hidden size.
        index_topk: Cached tokens that each query reads.
        index_n_heads: Heads of the indexer.
        index_head_dim: Elements of an index key.
        indexer: False in a layer that reuses an earlier layer's selection; it has no index weights
            and no index keys.
        index_query_from_hidden: Whether index queries are projected from the hidden states, not
            from the compressed query.
        index_pool: Tokens that share one pooled index key (GLM-5.3); 0 for one key per token. If it
            is not 0, the layer still caches one index row per token, for pooling: the token's index
            key, its pooling gates and a padding flag.
    """

    WEIGHTS = f"""{Latent.WEIGHTS}
        index_gate: D × di, if indexer and index_pool
        index_position_bias: ip·di, if indexer and index_pool
        index_q: rq × Hi·di, if indexer and q_lora_rank and not index_query_from_hidden
        index_q: D × Hi·di, if indexer and q_lora_rank and index_query_from_hidden
        index_q: D × Hi·di, if indexer and not q_lora_rank
        index_k: D × di, if indexer
        index_k_norm: 2·di, if indexer
        index_weights: D × Hi, if indexer
    """
    LETTERS = f"{Latent.LETTERS} Hi=index_n_heads di=index_head_dim ip=index_pool"

    index_topk: Tokens
    index_n_heads: Size
    index_head_dim: Size
    indexer: bool = True
    index_query_from_hidden: bool = False
    index_pool: Count = 0

    def cache(self) -> CacheEntries:
        """Return what one layer caches for one sequence: one `CacheEntry` for each kind of row.

        The kinds are latents, RoPE keys and, if the layer has an indexer, index keys. The entries
        also state what a query reads: at most index_topk latents, but all index keys.
        """
        latents = self._latents(max_rows=self.index_topk)
        width = 2 * self.index_head_dim + 1 if self.index_pool else self.index_head_dim
        return (*latents, CacheEntry("index_key", 1, width)) if self.indexer else latents

    def operators(self, p: Pass) -> list[Operator]:
        """Return this attention's operators in a forward pass, with costs of one layer on one GPU.

        They are the operators of MLA and of the indexer. Measured times exist only for the whole
        attention module: projections, indexer and attention together. Each operator except
        collectives therefore has the module's shape in its field `module`. The field is None if the
        measured module differs: without `q_lora_rank`, or with `index_pool`,
        `index_query_from_hidden`, an output gate or a sliding window.

        Args:
            p: The forward pass: sequences, storage formats, parallel ranks, number of such layers.
        """
        result = super().operators(p)
        if (
            not self.q_lora_rank
            or self.index_pool
            or self.index_query_from_hidden
            or self.output_gate
            or self.sliding_window
        ):
            return result
        rows = self._latents()
        up = next(w for w in self.weights(p.width) if w.name == "q_up")
        module = SparseShape(
            heads=p.heads(self.num_attention_heads),
            hidden=p.width,
            q_lora_rank=self.q_lora_rank,
            kv_lora_rank=self.kv_lora_rank,
            rope=self.qk_rope_head_dim,
            nope=self.qk_nope_head_dim,
            value=self.v_head_dim,
            index_heads=self.index_n_heads if self.indexer else 0,
            index_width=self.index_head_dim,
            top_k=self.index_topk,
            cached=tuple(p.formats.cache_format(row).name for row in rows),
            format=p.format_of(up),
            groups=tuple((g.count, g.new, g.past) for g in p.groups),
        )
        return [o if o.kind == "network" else replace(o, module=module) for o in result]

    def _visible(self, new: Num, past: Num) -> Num:
        return causal_pairs(
            new, past, min(self.index_topk, self.sliding_window or self.index_topk)
        )

    def _extra(self, p: Pass, w: WeightsByName) -> list[Operator]:
        """Return the indexer's projections, its scores over every index key, and the top-k
        selection."""
        if not self.indexer:
            return []
        hidden = [w[n] for n in ("index_k", "index_weights", "index_gate") if n in w]
        scored = p.indexer(
            self.cache(),
            p.pairs(causal_pairs),
            self.index_n_heads,
            self.index_head_dim,
            self.index_topk,
        )
        return [p.gemm("index_q", w["index_q"]), p.gemm("index_k", *hidden), *scored]

    @property
    def pooled_tokens(self) -> int:
        return self.index_pool

    def storing(self, own: bool) -> "Sparse | None":
        """Return this attention for a layer with its own cache; None for one that reads another's.

        The comparison of attention variants uses it to let several layers share one cache. If the
        result is None, it reports an error: no source says whether a layer that reads another
        layer's latents has an indexer.

        Args:
            own: Whether the layer stores its own latents.
        """
        return replace(self, kv_projection=True) if own else None

    @property
    def label(self) -> str:
        return f"DSA top-{self.index_topk}" + ("" if self.indexer else " (shared index)")


class BlockSparse(Grouped, frozen=True, kw_only=True, tag="block_sparse"):
    """Grouped attention in which each query reads only blocks of tokens that an indexer selects.

    An indexer scores a small index key of each token, and each query attends only to the
    `index_topk_blocks` blocks with the highest scores. The fields of `Grouped` (GQA) also apply.

    Attributes:
        WEIGHTS: The lines of `Grouped`, and a line per weight of the indexer. `q: D × H·d / H` is a
            matrix with D inputs and H·d outputs. Tensor parallelism divides the outputs into H
            units. If a matrix has D outputs, the inputs are divided instead. `norm: d` is an
            undivided vector of d elements. `if` is the condition for the weight.
        LETTERS: The field that each letter of a size stands for. D is the hidden size.
        index_block_size: Tokens of a block.
        index_topk_blocks: Blocks that each query reads.
        index_n_heads: Heads of the indexer.
        index_head_dim: Elements of an index key.
        index_norm: Whether index queries and index keys have norms.
        index_key_cached: Whether the layer caches an index key per token. If not, it caches only
            keys and values.
        index_pooled: Whether the indexer scores a finished block by the mean of its index keys, so
            an engine may store only this mean.
    """

    WEIGHTS = f"""{Grouped.WEIGHTS}
        index_q: D × Hi·di
        index_k: D × di
        index_q_norm: di, if index_norm
        index_k_norm: di, if index_norm
    """
    LETTERS = f"{Grouped.LETTERS} Hi=index_n_heads di=index_head_dim"

    index_block_size: Tokens
    index_topk_blocks: Size
    index_n_heads: Size
    index_head_dim: Size
    index_norm: bool = True
    index_key_cached: bool = True
    index_pooled: bool = False

    @property
    def pooled_tokens(self) -> int:
        return self.index_block_size if self.index_pooled else 0

    def cache(self) -> CacheEntries:
        """Return what one layer caches for one sequence: one `CacheEntry` for each kind of row.

        The kinds are keys, values and, if `index_key_cached` is set, index keys, with one row per
        token. The entries also state what a query reads: keys and values of at most
        index_topk_blocks · index_block_size tokens.
        """
        max_rows = self.index_topk_blocks * self.index_block_size
        key = CacheEntry(
            "k", self.num_key_value_heads, self.head_dim, max_rows_per_query=max_rows
        )
        rows = key, replace(key, role="v", width=self.value_width)
        if not self.index_key_cached:
            return rows
        return (*rows, CacheEntry("index_key", 1, self.index_head_dim))

    def storing(self, own: bool) -> "BlockSparse | None":
        """Return this attention for a layer with its own cache; None for one that reads another's.

        The comparison of attention variants uses it to let several layers share one cache. If the
        result is None, it reports an error: no source says whether a layer that reads another
        layer's keys has an indexer.

        Args:
            own: Whether the layer stores its own keys and values.
        """
        return replace(self, kv_projection=True) if own else None

    def _visible(self, new: Num, past: Num) -> Num:
        return causal_pairs(new, past, self.index_topk_blocks * self.index_block_size)

    def _extra(self, p: Pass, w: WeightsByName) -> list[Operator]:
        """Return the indexer's projections, its scores over every index key, and the top-k
        blocks."""
        scored = p.indexer(
            self.cache(),
            p.pairs(causal_pairs),
            self.index_n_heads,
            self.index_head_dim,
            self.index_topk_blocks,
        )
        return [p.gemm("index_qk", w["index_q"], w["index_k"]), *scored]

    @property
    def label(self) -> str:
        return f"{super().label} top-{self.index_topk_blocks} blocks of {self.index_block_size}"
