"""Compressed attention (DeepSeek-V4 CSA and HCA): a short window plus one entry per block of tokens.

Cached per sequence and layer: a window of `sliding_window` rows; one row per `compress_ratio` tokens; the
unfinished block as projected rows and gates; and the last finished block if blocks overlap. With an
indexer (CSA), each query reads only the top-k compressed rows. A row is both key and value, for one KV
head. Sources: DeepSeek-V4 technical report, section 2.3; transformers, `deepseek_v4`.
"""

import msgspec

from kvcalc.layers.cache import CacheEntry, Span
from kvcalc.layers.cost import Operator, causal_pairs, compressed_pairs
from kvcalc.layers.part import Count, Part, Size, Tokens
from kvcalc.layers.passes import Pass
from kvcalc.layers.weights import Weight, matrix, vector
from kvcalc.units import Num, floor_div


class Compressed(Part, frozen=True, tag="compressed"):
    """Attention of num_attention_heads heads over one shared row of head_dim, which is key and value.

    Attributes:
        qk_rope_head_dim: Rotated part of head_dim.
        compress_ratio: Tokens per compressed row; 0 for only a window.
        overlap: Whether each block is compressed together with the block before it, from two series (CSA).
        index_topk: Compressed rows that a query reads; 0 for all (HCA).
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
    sinks: bool = True

    @property
    def _series(self) -> int:
        return 2 if self.overlap else 1

    def weights(self, hidden_size: int) -> tuple[Weight, ...]:
        """Queries through q_lora_rank, one row projection [D, d], a grouped output projection, compressors."""
        heads, d, rank = self.num_attention_heads, self.head_dim, self.q_lora_rank
        found = [
            matrix("q_down", hidden_size, rank),
            vector("q_norm", rank),
            matrix("q_up", rank, heads * d, shards=heads),
            matrix("kv", hidden_size, d),
            vector("kv_norm", d),
            matrix("o_down", heads * d // self.o_groups, self.o_lora_rank, shards=self.o_groups, copies=self.o_groups),
            matrix("o_up", self.o_groups * self.o_lora_rank, hidden_size, shards=self.o_groups, rows_in=True),
        ]
        found += [vector("sinks", heads, shards=heads)] if self.sinks else []
        found += self._compressor("compress", hidden_size, d) if self.compress_ratio else []
        if self.index_topk:
            found += self._compressor("index", hidden_size, self.index_head_dim)
            found.append(matrix("index_q", rank, self.index_n_heads * self.index_head_dim))
            found.append(matrix("index_weights", hidden_size, self.index_n_heads))
        return tuple(found)

    def dims(self) -> dict[str, tuple[str, str]]:
        series = f"{self._series}·" if self._series > 1 else ""
        return {
            "q_down": ("D", "rq"), "q_up": ("rq", "H·d"), "kv": ("D", "d"), "o_down": ("H·d/g", "ro"), "o_up": ("g·ro", "D"),
            "compress_kv": ("D", f"{series}d"), "compress_gate": ("D", f"{series}d"), "index_kv": ("D", f"{series}di"),
            "index_gate": ("D", f"{series}di"), "index_q": ("rq", "Hi·di"), "index_weights": ("D", "Hi"),
        }  # fmt: skip

    def letters(self) -> dict[str, int]:
        return {
            "H": self.num_attention_heads, "d": self.head_dim, "rq": self.q_lora_rank, "ro": self.o_lora_rank,
            "g": self.o_groups, "Hi": self.index_n_heads, "di": self.index_head_dim,
        }  # fmt: skip

    def _compressor(self, name: str, hidden_size: int, width: int) -> list[Weight]:
        columns = self._series * width
        return [
            matrix(f"{name}_kv", hidden_size, columns),
            matrix(f"{name}_gate", hidden_size, columns),
            vector(f"{name}_position_bias", self.compress_ratio * columns),
            vector(f"{name}_norm", width),
        ]

    def cache(self) -> tuple[CacheEntry, ...]:
        """The window, the compressed rows with their index keys, and the buffers of the compressors."""
        plain, rope, ratio, top = (
            self.head_dim - self.qk_rope_head_dim,
            self.qk_rope_head_dim,
            self.compress_ratio,
            self.index_topk,
        )
        found = [
            CacheEntry("latent", 1, plain, limit=self.sliding_window),
            CacheEntry("rope_key", 1, rope, limit=self.sliding_window),
        ]
        if ratio:
            found.append(CacheEntry("latent", 1, plain, ratio, top=top))
            found.append(CacheEntry("rope_key", 1, rope, ratio, top=top))
        if top:
            found.append(CacheEntry("index_key", 1, self.index_head_dim, ratio))
        if ratio:
            width = self.head_dim + (self.index_head_dim if top else 0)  # key-values and gates are kept alike
            found.append(CacheEntry("compressor", 1, 2 * self._series * width, ratio, span=Span.PARTIAL))
            if self.overlap:
                found.append(CacheEntry("compressor", 1, 2 * width, ratio, span=Span.OVERLAP))
        return tuple(found)

    def operators(self, p: Pass) -> list[Operator]:
        """Projections of x in one product, queries, compressors, indexer, one attention over both parts, output."""
        w = p.local(self.weights(p.width))
        heads, d, ratio, top = p.heads(self.num_attention_heads), self.head_dim, self.compress_ratio, self.index_topk
        names = ("q_down", "kv", "compress_kv", "compress_gate", "index_kv", "index_gate", "index_weights")
        found = [p.gemm("qkv_down", *(w[n] for n in names if n in w)), p.gemm("q_up", w["q_up"])]
        rotated = (heads + 1) * self.qk_rope_head_dim * p.tokens
        found.append(p.vector("rope", rotated, rotated, p.ROPE_FLOPS * rotated))
        entries = self.cache()
        if ratio:
            width = sum(w[n].outputs for n in names[2:6] if n in w)  # key-values and gates, in each series
            columns = width * p.tokens
            finished = p.pairs(lambda new, past: floor_div(new + past, ratio) - floor_div(past, ratio))
            buffers = p.cache(e for e in entries if e.role == "compressor")
            compress = p.vector("compress", columns, finished * (width // (2 * self._series)), 4 * columns)
            found.append(msgspec.structs.replace(compress, cost=compress.cost + buffers))
        if top:
            keys = [e for e in entries if e.role == "index_key"]
            scored = p.pairs(lambda new, past: compressed_pairs(new, past, ratio))
            found.append(p.gemm("index_q", w["index_q"]))
            found += p.indexer(keys, scored, self.index_n_heads, self.index_head_dim, top)
        rows = [e for e in entries if e.role in ("latent", "rope_key")]
        found.append(p.attention(rows, self._visible, heads, d, d))
        return [*found, p.gemm("o_down", w["o_down"]), p.gemm("o_up", w["o_up"]), *p.all_reduce(p.width)]

    def _visible(self, new: Num, past: Num) -> Num:
        window = causal_pairs(new, past, self.sliding_window)
        return window + compressed_pairs(new, past, self.compress_ratio, self.index_topk) if self.compress_ratio else window

    @property
    def window_tokens(self) -> int:
        return 0 if self.compress_ratio else self.sliding_window

    def problem(self) -> str:
        if self.qk_rope_head_dim >= self.head_dim:
            return f"qk_rope_head_dim {self.qk_rope_head_dim} is not below head_dim {self.head_dim}"
        if self.num_attention_heads * self.head_dim % self.o_groups:
            return f"o_groups {self.o_groups} does not divide num_attention_heads · head_dim"
        if self.index_topk and not (self.compress_ratio and self.index_n_heads and self.index_head_dim):
            return "index_topk needs compress_ratio, index_n_heads and index_head_dim"
        return ""

    @property
    def label(self) -> str:
        if not self.compress_ratio:
            return f"MQA window {self.sliding_window}"
        return f"{'CSA' if self.index_topk else 'HCA'} 1:{self.compress_ratio}"

    def predicting(self) -> "Compressed":
        """Return this mixer in a prediction layer, which stores only its window.

        Source: vLLM, models/deepseek_v4/attention.py.
        """
        bare = {"compress_ratio": 0, "overlap": False, "index_topk": 0, "index_n_heads": 0, "index_head_dim": 0}
        return msgspec.structs.replace(self, **bare)

    def as_mha(self) -> tuple[int, int, int]:
        return self.num_attention_heads, self.head_dim, self.head_dim
