"""Multi-head latent attention (MLA): one compressed latent per token serves all keys and values.

Cached per token and layer: kv_lora_rank + qk_rope_head_dim elements, shared by all heads: the latent c_kv and the
decoupled RoPE key. Keys and values are W_UK·c_kv and W_UV·c_kv per head; in decode both matrices absorb into the query
and output projections, so that attention runs on the latents themselves. Source: DeepSeek-V2, arXiv 2405.04434 §2.1.
"""

from typing import Literal

from kvcalc.cache import CacheEntry
from kvcalc.part import Count, Part, Size, Tokens
from kvcalc.weights import Weight, matrix, vector


class Latent(Part, frozen=True, tag="latent"):
    """MLA of num_attention_heads heads, with keys of qk_nope_head_dim + qk_rope_head_dim and values of v_head_dim.

    q_lora_rank: the width that queries are compressed to, null for a plain query projection.
    qkv_bias: on the two down-projections. norms: RMS weights on the two latents. sinks: a logit per head.
    output_gate: a gate per channel ('full') or per head ('head') on the attention's output, projected from the input.
    q_up_size: the width from which queries and that gate are projected, where it is not q_lora_rank (A.X-K2: two of them).
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

    def weights(self, hidden_size: int) -> tuple[Weight, ...]:
        """q: [D, H·dqk] or its two factors; kv_down [D, r + dr]; kv_up [r, H·(dn + dv)]; o [H·dv, D]."""
        heads, rank = self.num_attention_heads, self.kv_lora_rank
        queries = heads * (self.qk_nope_head_dim + self.qk_rope_head_dim)
        found = []
        if self.q_lora_rank:
            found.append(matrix("q_down", hidden_size, self.q_lora_rank, self.qkv_bias))
            found.append(matrix("q_up", self.q_up_size or self.q_lora_rank, queries, shards=heads))
            found += [vector("q_norm", self.q_lora_rank)] if self.q_norm else []
        else:
            found.append(matrix("q", hidden_size, queries, shards=heads))
        found.append(matrix("kv_down", hidden_size, rank + self.qk_rope_head_dim, self.qkv_bias))
        found += [vector("kv_norm", rank)] if self.kv_norm else []
        found.append(matrix("kv_up", rank, heads * (self.qk_nope_head_dim + self.v_head_dim), shards=heads))
        found.append(matrix("o", heads * self.v_head_dim, hidden_size, self.o_bias, shards=heads, rows_in=True))
        if self.output_gate:
            units = self.v_head_dim if self.output_gate == "full" else 1
            found.append(matrix("gate", self.q_up_size or hidden_size, heads * units, shards=heads))
        found += [vector("sinks", heads, shards=heads)] if self.sinks else []
        return tuple(found)

    def cache(self) -> tuple[CacheEntry, ...]:
        """One latent of kv_lora_rank and one RoPE key of qk_rope_head_dim per token, for all heads together."""
        return self._latents(top=0)

    def _latents(self, top: int) -> tuple[CacheEntry, ...]:
        limit = self.sliding_window or 0
        latent = CacheEntry("latent", 1, self.kv_lora_rank, limit=limit, top=top)
        rope = CacheEntry("rope_key", 1, self.qk_rope_head_dim, limit=limit, top=top)
        return (latent, rope) if self.qk_rope_head_dim else (latent,)

    @property
    def label(self) -> str:
        return "MLA" + (f" window {self.sliding_window}" if self.sliding_window else "")

    def as_mha(self) -> tuple[int, int]:
        return self.num_attention_heads, self.v_head_dim
