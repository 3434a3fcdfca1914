"""Grouped-query attention with its special cases MHA (a KV head per query head) and MQA (one KV
head).

Cached per token and layer: num_key_value_heads · (head_dim + v_head_dim) elements, for all tokens
or for the tokens of a window, a chunk or a budget. Sources: Vaswani et al. 2017, section 3.2.2
(MHA); Shazeer 2019, arXiv 1911.02150 (MQA); Ainslie et al. 2023, arXiv 2305.13245, section 2.2
(GQA); Jiang et al. 2023, arXiv 2310.06825, section 2 (sliding window); Xiao et al. 2023, arXiv
2309.17453 (sink tokens); Zhang et al. 2023, arXiv 2306.14048 (H2O budget).

Eviction stores one score per stored token and KV head: the attention that the token has received,
summed over queries. H2O's code has `hh_score` [heads, tokens] in the dtype of its MHA
(FMInference/H2O, h2o_hf/utils_real_drop/modify_llama.py). Here, query heads that share a KV head
share one score, because their rows are evicted together.
"""

from typing import Literal

from msgspec.structs import replace

from kvcalc.arithmetic import Num, maximum
from kvcalc.layers.cache import CacheEntries, CacheEntry, EvictionRule, Span
from kvcalc.layers.cost import Operator, causal_pairs, chunk_pairs
from kvcalc.layers.part import Count, MhaSizes, Size, Sublayer, Tokens
from kvcalc.layers.passes import NORM_FLOPS, ROPE_FLOPS, Pass


class Grouped(Sublayer, frozen=True, tag="grouped"):
    """Grouped-query attention (GQA), including MHA and MQA.

    The fields are the keys of such a layer in a model preset, which is a YAML file.

    Attributes:
        WEIGHTS: A line per weight, such as `q: D × H·d / H`: matrix q has D inputs and H·d outputs,
            and tensor parallelism divides the outputs into H units. If a matrix has D outputs, or
            `rows`, the inputs are divided instead. `norm: d` is an undivided vector of d elements.
            `bias f` adds a bias if field f is set. `if` is the condition for the weight.
        MULTIPLE: The first of these fields must be a multiple of the second.
        LETTERS: The field that each letter of a size stands for. D is the hidden size.
        num_attention_heads: Query heads.
        num_key_value_heads: KV heads. As many KV heads as query heads are MHA; one KV head is MQA.
        head_dim: Elements of a key of one head.
        v_head_dim: Elements of a value of one head; null if a value has `head_dim` elements.
        sliding_window: Tokens that a query sees, including itself; null for all. The cache stores
            only these tokens and the `sink_tokens`.
        sink_tokens: First tokens of a sequence, which stay in the cache in addition to the window.
        attention_chunk_size: Tokens of a chunk; a query sees only its own chunk. null for no
            chunks.
        cache_budget: Maximum tokens of a sequence in the cache. Beyond it, tokens with low
            attention scores are evicted (H2O); null for no eviction.
        q_bias: Whether the query projection has a bias.
        k_bias: Whether the key projection has a bias.
        v_bias: Whether the value projection has a bias.
        o_bias: Whether the output projection has a bias.
        qk_norm: 'head' if all heads share one norm vector of `head_dim` elements, 'full' if each
            head has its own; null for no norm of queries and keys.
        q_norm_only: Whether only queries have the norm of `qk_norm`.
        qk_norm_bias: Whether the norm of `qk_norm` has a bias vector.
        v_norm: Whether values have a norm.
        sinks: Whether each head has a sink logit, a learned extra term of its softmax.
        output_gate: Gate that the layer computes from its input and applies to the attention
            output: 'full' (a gate per channel), 'head' (a gate per head), or null for none.
        output_gate_bias: Whether the projection of the gate has a bias.
        k_is_v: Whether one projection gives both keys and values, so the layer has no matrix v.
        kv_projection: False in a layer that reads another layer's keys and values.
        qo_projection: False if experts project queries and outputs (JetMoE). The layer then has no
            matrices q and o.
        input_size: Input width of the projections; null for the hidden size.
        output_size: Output width of the output projection; null for the hidden size.
        cached: False for attention that is not causal, as in an encoder, which needs no cache. A
            token then sees sliding_window tokens in each direction, both including itself.
    """

    WEIGHTS = """
        q: Di × H·d / H, bias q_bias, if qo_projection and input_size
        q: D × H·d / H, bias q_bias, if qo_projection and not input_size
        k: Di × G·d / G, bias k_bias, if kv_projection and input_size
        k: D × G·d / G, bias k_bias, if kv_projection and not input_size
        v: Di × G·dv / G, bias v_bias, if kv_projection and input_size and not k_is_v
        v: D × G·dv / G, bias v_bias, if kv_projection and not input_size and not k_is_v
        o: H·dv × Do / H, rows, bias o_bias, if qo_projection and output_size
        o: H·dv × D / H, bias o_bias, if qo_projection and not output_size
        gate: Di × H·dv / H, bias output_gate_bias, if output_gate=full and input_size
        gate: D × H·dv / H, bias output_gate_bias, if output_gate=full and not input_size
        gate: Di × H / H, bias output_gate_bias, if output_gate=head and input_size
        gate: D × H / H, bias output_gate_bias, if output_gate=head and not input_size
        q_norm: d, if qk_norm=head and not qk_norm_bias
        q_norm: 2·d, if qk_norm=head and qk_norm_bias
        q_norm: H·d / H, if qk_norm=full and not qk_norm_bias
        q_norm: 2·H·d / H, if qk_norm=full and qk_norm_bias
        k_norm: d, if has_k_norm and qk_norm=head and not qk_norm_bias
        k_norm: 2·d, if has_k_norm and qk_norm=head and qk_norm_bias
        k_norm: G·d / G, if has_k_norm and qk_norm=full and not qk_norm_bias
        k_norm: 2·G·d / G, if has_k_norm and qk_norm=full and qk_norm_bias
        v_norm: dv, if v_norm
        sinks: H / H, if sinks
    """
    MULTIPLE = ("num_attention_heads", "num_key_value_heads")
    LETTERS = """
        H=num_attention_heads G=num_key_value_heads d=head_dim dv=value_width Di=input_size
        Do=output_size
    """

    num_attention_heads: Size
    num_key_value_heads: Size
    head_dim: Size
    v_head_dim: Size | None = None
    sliding_window: Tokens | None = None
    sink_tokens: Count = 0
    attention_chunk_size: Tokens | None = None
    cache_budget: Tokens | None = None
    q_bias: bool = False
    k_bias: bool = False
    v_bias: bool = False
    o_bias: bool = False
    qk_norm: Literal["head", "full"] | None = None
    q_norm_only: bool = False
    qk_norm_bias: bool = False
    v_norm: bool = False
    sinks: bool = False
    output_gate: Literal["full", "head"] | None = None
    output_gate_bias: bool = False
    k_is_v: bool = False
    kv_projection: bool = True
    qo_projection: bool = True
    input_size: Size | None = None
    output_size: Size | None = None
    cached: bool = True

    @property
    def value_width(self) -> int:
        """Return the elements of a value of one head: `v_head_dim`, or `head_dim` if it is null."""
        return self.v_head_dim or self.head_dim

    @property
    def max_tokens(self) -> int:
        """Return the maximum number of tokens that one sequence has in the cache; 0 for no limit.

        It is the smallest of `sliding_window` + `sink_tokens`, `attention_chunk_size` and
        `cache_budget`, of those that are set.
        """
        window = self.sliding_window + self.sink_tokens if self.sliding_window else 0
        return min(
            (n for n in (window, self.attention_chunk_size, self.cache_budget) if n), default=0
        )

    @property
    def has_k_norm(self) -> bool:
        """Return whether the norm of `qk_norm`, if the layer has one, also applies to keys.

        It does not if `q_norm_only` is set, or if the layer reads another layer's keys.
        """
        return self.kv_projection and not self.q_norm_only

    def cache(self) -> CacheEntries:
        """Return what one layer caches for one sequence: an entry for keys and one for values.

        A row belongs to one token, and has the keys (or the values) of all KV heads. The result is
        empty if `cached` is False.
        """
        if not self.cached:
            return ()
        has_sinks = self.sliding_window and self.sink_tokens
        rule = EvictionRule.SINKS if has_sinks else EvictionRule.LAST
        if self.cache_budget:
            rule = EvictionRule.SCORED
        key = CacheEntry(
            "k",
            self.num_key_value_heads,
            self.head_dim,
            limit=self.max_tokens,
            span=Span.CHUNK if self.attention_chunk_size else Span.TOKENS,
            eviction_rule=rule,
        )
        return key, replace(key, role="v", width=self.value_width)

    def eviction_scores(self) -> CacheEntries:
        """Return what one layer stores per sequence to select tokens to evict: a score per token.

        The tuple has one entry. Each stored token has one score per KV head: the attention that it
        has received so far, in the dtype of the model. The scores need memory in addition to keys
        and values. The tuple is empty if `cache_budget` is null or `cached` is False.
        """
        if not self.cache_budget or not self.cached:
            return ()
        groups = self.num_key_value_heads
        limit = self.max_tokens
        return (CacheEntry("score", groups, 1, limit=limit, eviction_rule=EvictionRule.SCORED),)

    @property
    def window_tokens(self) -> int:
        return self.sliding_window or 0

    def operators(self, p: Pass) -> list[Operator]:
        """Return this attention's operators in a forward pass, with costs of one layer on one GPU.

        In order: one matrix product for queries, keys and values, the output gate's projection,
        RoPE and norms, attention, the update of eviction scores, the gating, and the output
        projection with its all-reduce. Operators that the fields do not need are left out.

        Args:
            p: The forward pass: sequences, storage formats, parallel ranks, number of such layers.
        """
        w = self.local_weights(p)
        queries = p.heads(self.num_attention_heads)
        keys = self.num_key_value_heads
        values = self.value_width
        qkv = [w[n] for n in ("q", "k", "v") if n in w]
        result = [p.gemm("qkv", *qkv)] if qkv else []
        if "gate" in w:
            result.append(p.gemm("gate", w["gate"]))
        rotated = (queries + p.heads(keys) * self.kv_projection) * self.head_dim * p.tokens
        if p.rotates or self.qk_norm:
            flops = ROPE_FLOPS * p.rotates + NORM_FLOPS * bool(self.qk_norm)
            result.append(p.vector("rope", rotated, rotated, flops * rotated))
        result += self._extra(p, w)
        rows = [e for e in self.cache() if e.role != "index_key"]
        result.append(p.attention(rows, self._visible, queries, self.head_dim, values))
        result += [p.eviction(e, self._visible, queries) for e in self.eviction_scores()]
        if "gate" in w:
            result.append(p.activation("gating", p.tokens * queries * values, 2))
        if "o" not in w:
            return result
        return [*result, p.gemm("o", w["o"]), *p.all_reduce(w["o"].outputs)]

    def _visible(self, new: Num, past: Num) -> Num:
        """Return the number of (query, key) pairs of one sequence."""
        if not self.cached:
            unseen: Num = maximum(new - (self.sliding_window or new), 0)
            return new * (new + past) - unseen * (unseen + 1)
        if self.attention_chunk_size:
            return chunk_pairs(new, past, self.attention_chunk_size)
        return causal_pairs(new, past, self.max_tokens)

    def problem(self) -> str:
        if self.k_is_v and self.value_width != self.head_dim:
            return (
                f"k_is_v needs v_head_dim {self.v_head_dim} equal to head_dim {self.head_dim}"
            )
        if self.sliding_window and self.attention_chunk_size:
            return "sliding_window and attention_chunk_size exclude each other"
        if self.attention_chunk_size and self.cache_budget:
            return "attention_chunk_size and cache_budget exclude each other"
        return super().problem()

    @property
    def label(self) -> str:
        groups = self.num_key_value_heads
        name = (
            "MQA"
            if groups == 1
            else "MHA"
            if groups == self.num_attention_heads
            else f"GQA-{groups}"
        )
        limits = (
            ("window", self.sliding_window),
            ("chunk", self.attention_chunk_size),
            ("budget", self.cache_budget),
        )
        return name + "".join(f" {word} {n}" for word, n in limits if n)

    def storing(self, own: bool) -> "Grouped | None":
        return replace(self, kv_projection=own)

    def as_mha(self) -> MhaSizes:
        return self.num_attention_heads, self.head_dim, self.value_width
