"""Compressed attention (DeepSeek-V4 CSA and HCA): a short window plus one entry per block of
tokens.

Cached per sequence and layer: a window of `sliding_window` rows; one row per `compress_ratio`
tokens; the unfinished block as projected rows and gates; and the last finished block if blocks
overlap. With an indexer (CSA), each query reads only the top-k compressed rows. A row is both key
and value, for one KV head. Sources: DeepSeek-V4 technical report, section 2.3; transformers,
`deepseek_v4`.

In DeepSeek-V4.1 only some layers store compressed rows. Each other layer reads the rows of the last
such layer before it. Cached per sequence: in every layer a window of `sliding_window` rows; in a
storing layer, one row and one index key, computed from the row, per `compress_ratio` tokens, and
the unfinished block. A choosing layer scores the index keys; the other layers reuse its selection.
After the layer that marks candidates, a query scores at most `index_candidates` rows. Source: the
release's inference code (model.py), as deepseek-v41-delta.md of JustVugg/colibri describes it,
tensor by tensor.
"""

from msgspec.structs import replace

from kvcalc.arithmetic import Num, floor_div
from kvcalc.layers.cache import CacheEntries, CacheEntry, Span
from kvcalc.layers.cost import Operator, causal_pairs, compressed_pairs
from kvcalc.layers.part import Count, MhaSizes, Size, Sublayer, Tokens
from kvcalc.layers.passes import ROPE_FLOPS, Pass

# Weights that read x to compress blocks of tokens.
_COMPRESSORS = ("compress_kv", "compress_gate", "index_kv", "index_gate")
# Fields of a layer that stores only its window.
_WINDOW_FIELDS = """
    num_attention_heads head_dim qk_rope_head_dim q_lora_rank o_lora_rank o_groups
    sliding_window sinks
"""
# Weights of a layer that stores only its window.
_WINDOW_WEIGHTS = """
    q_down: D × rq
    q_norm: rq
    q_up: rq × H·d / H
    kv: D × d
    kv_norm: d
    o_down: hg × ro / g, copies g
    o_up: g·ro × D / g
    sinks: H / H, if sinks"""


class Compressed(Sublayer, frozen=True, tag="compressed"):
    """Compressed attention of DeepSeek-V4: a sliding window plus one cached row per token block.

    All heads share the cached rows. A row is both key and value. The fields are the keys of such a
    layer in a model preset, which is a YAML file. Compressed sparse attention (CSA) reads selected
    rows, and heavily compressed attention (HCA) reads all of them.

    Attributes:
        WEIGHTS: A line per weight, such as `q: D × H·d / H`: matrix q has D inputs and H·d outputs,
            and tensor parallelism divides the outputs into H units. If a matrix has D outputs, the
            inputs are divided instead. `norm: d` is an undivided vector of d elements. `if` is the
            condition for the weight. `copies g` is g equal matrices.
        LETTERS: The field that each letter of a size stands for. D is the hidden size.
        num_attention_heads: Query heads.
        head_dim: Elements of a cached row.
        qk_rope_head_dim: Elements of a row that have rotary positions (RoPE).
        q_lora_rank: Width to which queries are compressed.
        o_lora_rank: Width to which each output group is compressed before the output projection.
        o_groups: Number of output groups. Each has an equal part of the heads.
        sliding_window: Uncompressed tokens that a query sees, including itself.
        compress_ratio: Tokens of a block, which become one compressed row; 0 if the layer has only
            the window.
        overlap: Whether a compressed row also uses the tokens of the block before its own (CSA).
        index_topk: Compressed rows that a query reads; 0 for all (HCA).
        index_n_heads: Heads of the indexer, which selects these rows; 0 without an indexer.
        index_head_dim: Elements of an index key; 0 without an indexer.
        index_candidates: Maximum compressed rows that the indexer scores for a query; 0 for all.
        sinks: Whether each head has a sink logit, a learned extra term of its softmax.
    """

    WEIGHTS = f"""{_WINDOW_WEIGHTS}
        compress_kv: D × s·d, if compress_ratio
        compress_gate: D × s·d, if compress_ratio
        compress_position_bias: c·s·d, if compress_ratio
        compress_norm: d, if compress_ratio
        index_kv: D × s·di, if index_topk
        index_gate: D × s·di, if index_topk
        index_position_bias: c·s·di, if index_topk
        index_norm: di, if index_topk
        index_q: rq × Hi·di, if index_topk
        index_weights: D × Hi, if index_topk
    """
    LETTERS = """
        H=num_attention_heads d=head_dim rq=q_lora_rank ro=o_lora_rank g=o_groups
        hg=output_group_width s=series c=compress_ratio Hi=index_n_heads
        di=index_head_dim
    """

    num_attention_heads: Size
    head_dim: Size
    qk_rope_head_dim: Size
    q_lora_rank: Size
    o_lora_rank: Size
    o_groups: Size
    sliding_window: Tokens
    compress_ratio: Count = 0
    overlap: bool = False
    index_topk: Count = 0
    index_n_heads: Count = 0
    index_head_dim: Count = 0
    index_candidates: Count = 0
    sinks: bool = True

    @property
    def series(self) -> int:
        """Return how many times each token is projected for compressed rows: 1 or 2.

        It is 2 with `overlap`, because a token then contributes to the row of its own block and to
        the row of the next block. The width of the compressor's matrices is multiplied by this
        number.
        """
        return 2 if self.overlap else 1

    @property
    def output_group_width(self) -> int:
        """Return the elements per token of one output group: query heads · head_dim / o_groups.

        The attention output is divided into `o_groups` groups, which are projected separately.
        """
        return self.num_attention_heads * self.head_dim // self.o_groups

    def _rows(
        self, ratio: int = 1, limit: int = 0, max_rows: int = 0, is_shared: bool = False
    ) -> list[CacheEntry]:
        """Return the cache entries of the two parts of a row: without positions, and rotated."""
        rope = self.qk_rope_head_dim
        widths = {"latent": self.head_dim - rope, "rope_key": rope}
        return [
            CacheEntry(
                role,
                1,
                width,
                ratio,
                limit=limit,
                max_rows_per_query=max_rows,
                is_stored_by_other_layer=is_shared,
            )
            for role, width in widths.items()
        ]

    def _index_key(self, is_shared: bool = False) -> CacheEntry:
        """Return the entry of the index keys, one for each compressed row."""
        return CacheEntry(
            "index_key",
            1,
            self.index_head_dim,
            self.compress_ratio,
            max_rows_per_query=self.index_candidates,
            is_stored_by_other_layer=is_shared,
        )

    def cache(self) -> CacheEntries:
        """Return what one layer caches for one sequence: one `CacheEntry` for each kind of row.

        The kinds are the rows of the window, the compressed rows, the index keys if there is an
        indexer, and buffers for tokens of blocks that are not yet compressed. If `compress_ratio`
        is 0, there are only the rows of the window.
        """
        ratio = self.compress_ratio
        max_rows = self.index_topk
        entries = self._rows(limit=self.sliding_window)
        if not ratio:
            return tuple(entries)
        entries += self._rows(ratio, max_rows=max_rows)
        if max_rows:
            entries.append(self._index_key())
        # key-values and gates are stored in the same way
        width = 2 * (self.head_dim + (self.index_head_dim if max_rows else 0))
        entries.append(
            CacheEntry("compressor", 1, self.series * width, ratio, span=Span.PARTIAL)
        )
        if self.overlap:
            entries.append(CacheEntry("compressor", 1, width, ratio, span=Span.OVERLAP))
        return tuple(entries)

    def operators(self, p: Pass) -> list[Operator]:
        """Return this attention's operators in a forward pass, with costs of one layer on one GPU.

        In order: one matrix product for all projections that read the layer's input, the query
        up-projection, RoPE, compression, indexer, attention, the two output projections and their
        all-reduce. One attention operator reads the window and the compressed rows.

        Args:
            p: The forward pass: sequences, storage formats, parallel ranks, number of such layers.
        """
        w = self.local_weights(p)
        heads = p.heads(self.num_attention_heads)
        d = self.head_dim
        ratio = self.compress_ratio
        entries = self.cache()
        compressors = [w[n] for n in _COMPRESSORS if n in w]
        first = [w["q_down"], w["kv"], *compressors]
        if "index_weights" in w:
            first.append(w["index_weights"])
        rotated = (heads + 1) * self.qk_rope_head_dim * p.tokens
        operators = [
            p.gemm("qkv_down", *first),
            p.gemm("q_up", w["q_up"]),
            p.vector("rope", rotated, rotated, ROPE_FLOPS * rotated),
        ]
        if compressors:
            columns = sum(matrix.outputs for matrix in compressors) * p.tokens
            finished = p.pairs(
                lambda new, past: floor_div(new + past, ratio) - floor_div(past, ratio)
            )
            row = d + (self.index_head_dim if "index_kv" in w else 0)
            buffers = p.cache(e for e in entries if e.role == "compressor")
            compress = p.vector("compress", columns, finished * row, 4 * columns)
            operators.append(replace(compress, cost=compress.cost + buffers))
            if "row_index_k" in w:
                operators.append(p.gemm("row_index_k", w["row_index_k"], tokens=finished))
        if "index_q" in w:
            scored = p.pairs(
                lambda new, past: compressed_pairs(new, past, ratio, self.index_candidates)
            )
            operators.append(p.gemm("index_q", w["index_q"]))
            operators += p.indexer(
                entries, scored, self.index_n_heads, self.index_head_dim, self.index_topk
            )
        rows = [e for e in entries if e.role in ("latent", "rope_key")]
        return [
            *operators,
            p.attention(rows, self._visible, heads, d, d),
            p.gemm("o_down", w["o_down"]),
            p.gemm("o_up", w["o_up"]),
            *p.all_reduce(p.width),
        ]

    def _visible(self, new: Num, past: Num) -> Num:
        window = causal_pairs(new, past, self.sliding_window)
        return (
            window + compressed_pairs(new, past, self.compress_ratio, self.index_topk)
            if self.compress_ratio
            else window
        )

    @property
    def window_tokens(self) -> int:
        return 0 if self.compress_ratio else self.sliding_window

    def problem(self) -> str:
        if self.qk_rope_head_dim >= self.head_dim:
            return f"qk_rope_head_dim {self.qk_rope_head_dim} is not below head_dim {self.head_dim}"
        if self.num_attention_heads * self.head_dim % self.o_groups:
            return f"o_groups {self.o_groups} does not divide num_attention_heads · head_dim"
        if self.index_topk and not (
            self.compress_ratio and self.index_n_heads and self.index_head_dim
        ):
            return "index_topk needs compress_ratio, index_n_heads and index_head_dim"
        return ""

    @property
    def label(self) -> str:
        if not self.compress_ratio:
            return f"MQA window {self.sliding_window}"
        return f"{'CSA' if self.index_topk else 'HCA'} 1:{self.compress_ratio}"

    def predicting(self) -> "Compressed":
        """Return the attention that a multi-token-prediction (MTP) layer has in place of this one.

        The result has the same heads and window, but no compressed rows and no indexer, so the
        layer caches only its window. Source: vLLM, models/deepseek_v4/attention.py.
        """
        return Compressed(**{name: getattr(self, name) for name in _WINDOW_FIELDS.split()})

    def as_mha(self) -> MhaSizes:
        return self.num_attention_heads, self.head_dim, self.head_dim


class SharedCompressed(Compressed, frozen=True, tag="lent_compressed"):
    """Compressed attention of DeepSeek-V4.1, in which only some layers store compressed rows.

    The fields of `Compressed` also apply.

    Attributes:
        WEIGHTS: A line per weight, such as `q: D × H·d / H`: matrix q has D inputs and H·d outputs,
            and tensor parallelism divides the outputs into H units. If a matrix has D outputs, the
            inputs are divided instead. `norm: d` is an undivided vector of d elements. `if` is the
            condition for the weight. `copies g` is g equal matrices. D is the hidden size. d is
            head_dim, di index_head_dim, rq q_lora_rank and Hi index_n_heads, fields of
            `Compressed`.
        lends: Whether this layer stores the compressed rows that it reads. Otherwise it reads the
            rows of the last earlier layer that stores them.
        chooses: Whether this layer selects the rows that its queries read. Otherwise it reuses the
            selection of the last earlier layer that selects.
    """

    WEIGHTS = f"""{_WINDOW_WEIGHTS}
        compress_kv: D × d, if lends
        compress_gate: D × d, if lends and not compress_ratio=1
        compress_norm: d, if lends
        row_index_k: d × di, if lends
        index_k_norm: di, if lends
        index_q: rq × Hi·di, if chooses
        index_weights: D × Hi, if chooses
    """

    lends: bool = False
    chooses: bool = False

    def cache(self) -> CacheEntries:
        """Return what one layer reads for one sequence: one `CacheEntry` for each kind of row.

        The kinds are the rows of the window, the compressed rows, and the index keys if this layer
        selects rows or stores them. A layer that stores compressed rows also has a buffer for the
        block that is not yet compressed. If an earlier layer stores the compressed rows, their
        entries and the index keys have `is_stored_by_other_layer` set. They then need no memory in
        this layer.
        """
        ratio = self.compress_ratio
        is_shared = not self.lends
        entries = self._rows(limit=self.sliding_window)
        if ratio:
            entries += self._rows(ratio, max_rows=self.index_topk, is_shared=is_shared)
        if self.lends or self.chooses:
            entries.append(self._index_key(is_shared))
        if self.lends and ratio > 1:
            width = 2 * self.head_dim
            entries.append(CacheEntry("compressor", 1, width, ratio, span=Span.PARTIAL))
        return tuple(entries)

    def problem(self) -> str:
        if (self.lends or self.chooses) and not self.compress_ratio:
            return "a layer without compress_ratio neither lends nor chooses"
        if self.compress_ratio and not (
            self.index_topk and self.index_n_heads and self.index_head_dim
        ):
            return "compress_ratio needs index_topk, index_n_heads and index_head_dim"
        return super().problem()

    @property
    def label(self) -> str:
        return super().label + (" (lent)" if self.compress_ratio and not self.lends else "")
