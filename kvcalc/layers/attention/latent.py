"""Multi-head latent attention (MLA): one compressed latent per token gives all keys and values.

Cached per token and layer: kv_lora_rank + qk_rope_head_dim elements for all heads: the latent c_kv
and the decoupled RoPE key. Keys and values are W_UK·c_kv and W_UV·c_kv per head. In decode, both
matrices are absorbed into the query and output projections, so attention runs on the latents.
Source: DeepSeek-V2, arXiv 2405.04434, section 2.1.
"""

from typing import Literal

from msgspec.structs import replace

from kvcalc.arithmetic import Num, at_least
from kvcalc.layers.cache import CacheEntries, CacheEntry
from kvcalc.layers.cost import Operator, Role, causal_pairs
from kvcalc.layers.part import Count, MhaSizes, Size, Sublayer, Tokens
from kvcalc.layers.passes import NORM_FLOPS, ROPE_FLOPS, Pass
from kvcalc.layers.weights import Weight, WeightsByName


class Latent(Sublayer, frozen=True, tag="latent"):
    """Multi-head latent attention (MLA).

    A latent is the compressed row that a token caches. The keys and values of all heads are
    computed from it. The fields are the keys of such a layer in a model preset, a YAML file.

    Attributes:
        WEIGHTS: A line per weight, such as `q: D × H·d / H`: matrix q has D inputs and H·d outputs,
            and tensor parallelism divides the outputs into H units. If a matrix has D outputs, the
            inputs are divided instead. `norm: d` is an undivided vector of d elements. `bias f`
            adds a bias if field f is set. `if` is the condition for the weight.
        LETTERS: The field that each letter of a size stands for. D is the hidden size.
        num_attention_heads: Query heads.
        kv_lora_rank: Elements of the latent that a token caches for all heads.
        qk_nope_head_dim: Elements of a key of one head without rotary positions.
        qk_rope_head_dim: Elements of a key with rotary positions (RoPE), which all heads share.
        v_head_dim: Elements of a value of one head.
        q_lora_rank: Width to which queries are compressed; null if one matrix projects queries.
        qkv_bias: Whether the two down-projections, of queries and of latents, have biases.
        o_bias: Whether the output projection has a bias.
        q_norm: Whether the compressed query has an RMSNorm.
        kv_norm: Whether the cached latent has an RMSNorm.
        sliding_window: Tokens that a query sees, including itself; null for all tokens.
        output_gate: Gate on the attention output: 'full' (a gate per channel), 'head' (a gate per
            head), or null for none.
        q_up_size: Input width of the up-projection of queries, and of the gate, if it is not
            q_lora_rank. In A.X-K2 it is twice q_lora_rank.
        sinks: Whether each head has a sink logit, a learned extra term of its softmax.
        kv_projection: False in a layer that reads another layer's latents; it has no kv_down.
        heads_cached: True for a GGUF file whose kv_up is one tensor. llama.cpp then caches the keys
            and values of every head in place of latents.
    """

    WEIGHTS = """
        q_down: D × rq, bias qkv_bias, if q_lora_rank
        q_up: ru × H·dn + H·dr / H, if q_lora_rank and q_up_size
        q_up: rq × H·dn + H·dr / H, if q_lora_rank and not q_up_size
        q_norm: rq, if q_lora_rank and q_norm
        q: D × H·dn + H·dr / H, if not q_lora_rank
        kv_down: D × r + dr, bias qkv_bias, if kv_projection
        kv_norm: r, if kv_projection and kv_norm
        kv_up: r × H·dn + H·dv / H
        o: H·dv × D / H, bias o_bias
        gate: ru × H·dv / H, if output_gate=full and q_up_size
        gate: D × H·dv / H, if output_gate=full and not q_up_size
        gate: ru × H / H, if output_gate=head and q_up_size
        gate: D × H / H, if output_gate=head and not q_up_size
        sinks: H / H, if sinks
    """
    LETTERS = """
        H=num_attention_heads r=kv_lora_rank dn=qk_nope_head_dim dr=qk_rope_head_dim
        dv=v_head_dim rq=q_lora_rank ru=q_up_size
    """

    num_attention_heads: Size
    kv_lora_rank: Size
    qk_nope_head_dim: Size
    qk_rope_head_dim: Count
    v_head_dim: Size
    q_lora_rank: Size | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    q_norm: bool = True
    kv_norm: bool = True
    sliding_window: Tokens | None = None
    output_gate: Literal["full", "head"] | None = None
    q_up_size: Size | None = None
    sinks: bool = False
    kv_projection: bool = True
    heads_cached: bool = False

    def sides(self) -> dict[str, tuple[str, str]]:
        """Return the sizes (inputs, outputs) of each matrix as formulas, by matrix name.

        Example: {"kv_up": ("r", "H·dn + H·dv")}, with the letters of the class attribute LETTERS.
        `--explain` prints them as dimensions of matrix products. The halves of kv_up, by which
        absorbed attention multiplies, are also listed: `absorb_q` (keys) and `absorb_v` (values).
        """
        return super().sides() | {"absorb_q": ("dn", "H·r"), "absorb_v": ("r", "H·dv")}

    def expanded(self, value_width: int) -> CacheEntries:
        """Return what one layer caches in an engine that stores keys and values, not latents.

        Examples are llama.cpp with some GGUF files, and MiniCPM3 in vLLM. The result has two
        entries for one sequence: keys and values of every query head. Each has one row per token,
        or per token of the sliding window.

        Args:
            value_width: Elements that the engine stores for one head's value, including padding.
        """
        heads = self.num_attention_heads
        limit = self.window_tokens
        key = CacheEntry("k", heads, self.qk_nope_head_dim + self.qk_rope_head_dim, limit=limit)
        return key, CacheEntry("v", heads, value_width, limit=limit)

    def cache(self) -> CacheEntries:
        """Return what one layer caches for one sequence: one `CacheEntry` for each kind of row.

        The kinds are latents and, unless qk_rope_head_dim is 0, RoPE keys. Each token has one row
        of each kind, which all heads share.
        """
        return self._latents()

    def _latents(self, max_rows: int = 0) -> CacheEntries:
        latent = CacheEntry(
            "latent",
            1,
            self.kv_lora_rank,
            limit=self.window_tokens,
            max_rows_per_query=max_rows,
        )
        if not self.qk_rope_head_dim:
            return (latent,)
        return latent, replace(latent, role="rope_key", width=self.qk_rope_head_dim)

    @property
    def window_tokens(self) -> int:
        return self.sliding_window or 0

    def operators(self, p: Pass) -> list[Operator]:
        """Return this attention's operators in a forward pass, with costs of one layer on one GPU.

        In order: projections of queries and latents, RoPE and norms, attention, the output gate,
        and the output projection with its all-reduce. Absorbed attention computes on the latents.
        Expanded attention first recomputes the keys and values of all cached tokens. With the form
        `auto`, each group of equal sequences uses the form with fewer FLOPs.

        Args:
            p: The forward pass: sequences, storage formats, parallel ranks, number of such layers,
                and form of latent attention (absorbed, expanded or auto).
        """
        w = self.local_weights(p)
        first = [w[n] for n in ("q_down", "q", "kv_down") if n in w]
        results = [p.gemm("qkv_down" if "q_down" in w else "qkv", *first)]
        if "q_up" in w:
            results.append(p.gemm("q_up", w["q_up"]))
        heads = p.heads(self.num_attention_heads)
        rope = (heads + self.kv_projection) * self.qk_rope_head_dim * p.tokens
        norms = ((self.q_lora_rank or 0) + self.kv_lora_rank * self.kv_projection) * p.tokens
        results.append(
            p.vector("rope", rope + norms, rope + norms, ROPE_FLOPS * rope + NORM_FLOPS * norms)
        )
        results += self._extra(p, w)
        absorbed = p.select(lambda new, past: self._absorbs(p, new, past))
        expanded = p.select(lambda new, past: 1 - self._absorbs(p, new, past))
        if absorbed.groups:
            results += self._absorbed(absorbed, w["kv_up"])
        if expanded.groups:
            results += self._expanded(expanded, w, 1 - absorbed.present)
        if "gate" in w:
            results.append(p.gemm("gate", w["gate"]))
            results.append(p.activation("gating", p.tokens * heads * self.v_head_dim, 2))
        return [*results, p.gemm("o", w["o"]), *p.all_reduce(p.width)]

    def _visible(self, new: Num, past: Num) -> Num:
        return causal_pairs(new, past, self.window_tokens)

    def _seen(self, new: Num, past: Num) -> Num:
        """Return the number of tokens whose keys and values the expanded form recomputes, including
        new tokens."""
        return self._latents()[0].read_rows(new, past)

    def _absorbs(self, p: Pass, new: Num, past: Num) -> Num:
        """Return 1 if the absorbed form needs fewer FLOPs, or equal FLOPs and no more bytes;
        otherwise 0."""
        if p.mla_form != "auto":
            return int(p.mla_form == "absorbed")
        rank = self.kv_lora_rank
        both = self.qk_nope_head_dim + self.v_head_dim
        tokens = self._seen(new, past)
        # multiply-adds of a head
        fewer = (tokens - new) * rank * both - self._visible(new, past) * (2 * rank - both)
        if not (fewer == 0 if isinstance(fewer, int) else (fewer == 0).any()):
            return at_least(fewer, 1)
        activations = (
            2 * (tokens * both - 2 * rank * new) * p.heads(self.num_attention_heads) * p.element
        )
        rows = (e.read_rows(new, past) * p.formats.entry_bytes(e, 1) for e in self._attended())
        smaller = (
            activations
            + sum(p.formats.entry_bytes(e, 1) for e in self._latents()) * tokens
            - sum(rows)
        )
        return at_least(2 * fewer + at_least(smaller, 0), 1)

    def _attended(self) -> list[CacheEntry]:
        return [e for e in self.cache() if e.role in ("latent", "rope_key")]

    def _absorbed(self, p: Pass, up: Weight) -> list[Operator]:
        """Return the operators of the absorbed form: queries times W_UK, attention over shared
        latents, outputs times W_UV.

        W_UK and W_UV are halves of one stored matrix. They are read in its storage format,
        including scales.
        """
        heads = p.heads(self.num_attention_heads)
        rank = self.kv_lora_rank
        rope = self.qk_rope_head_dim
        key = self.qk_nope_head_dim
        value = self.v_head_dim
        into = p.gemm("absorb_q", Weight("kv_up", key, rank, copies=heads))
        back = p.gemm("absorb_v", Weight("kv_up", rank, value, copies=heads))
        core = p.attention(
            self._attended(), self._visible, heads, rank + rope, rank, form="absorbed"
        )
        stored = p.gemm("kv_up", up).cost.weight_bytes
        keys = stored * key // (key + value)
        return [_reading(into, keys), core, _reading(back, stored - keys)]

    def _expanded(self, p: Pass, w: WeightsByName, read: Num) -> list[Operator]:
        """Return the operators of the expanded form: keys and values of every cached token, then
        attention per head.
        """
        heads = p.heads(self.num_attention_heads)
        key = self.qk_nope_head_dim
        rope = self.qk_rope_head_dim
        value = self.v_head_dim
        entries = self._latents()
        tokens = p.pairs(self._seen)
        width = heads * (key + value)
        up = p.gemm("kv_up", w["kv_up"], tokens=tokens)
        moved = p.cache(e for e in entries if e.role == "latent")
        cost = up.cost._replace(
            weight_bytes=up.cost.weight_bytes * read,
            activation_bytes=tokens * width * p.element,
            cache_read_bytes=moved.cache_read_bytes,
            cache_write_bytes=moved.cache_write_bytes,
        )
        ropes = [e for e in entries if e.role == "rope_key"]
        core = p.attention(
            ropes,
            self._visible,
            heads,
            key + rope,
            value,
            expanded=tokens * width,
            form="expanded",
        )
        return [replace(up, cost=cost, role=Role.CORE), core]

    @property
    def label(self) -> str:
        return "MLA" + (f" window {self.sliding_window}" if self.sliding_window else "")

    def storing(self, own: bool) -> "Latent | None":
        return replace(self, kv_projection=own)

    def as_mha(self) -> MhaSizes:
        return self.num_attention_heads, self.v_head_dim, self.v_head_dim


def _reading(operator: Operator, weight_bytes: Num) -> Operator:
    """Return the operator with its weight bytes replaced by `weight_bytes`."""
    return replace(operator, cost=operator.cost._replace(weight_bytes=weight_bytes))
