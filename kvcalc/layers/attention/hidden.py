"""Attention that keeps the hidden states it read, and projects their keys and values again at every step.

Cached per token and layer: the layer's input, hidden_size elements, for all tokens or the last `memory` of them.
Sources: Yang et al. 2019, arXiv 1906.08237 §2.4 (XLNet's memory); Kitaev et al. 2020, arXiv 2001.04451 §2 (Reformer;
transformers keeps states there, and bucket numbers, which are not counted here).
"""

import msgspec

from kvcalc.layers.cache import CacheEntry
from kvcalc.layers.cost import Operator, Role, causal_pairs
from kvcalc.layers.part import Count, Part, Size
from kvcalc.layers.passes import Pass
from kvcalc.layers.weights import Weight, matrix, vector
from kvcalc.units import Num


class HiddenStates(Part, frozen=True, tag="hidden_states"):
    """Attention of num_attention_heads heads without biases over cached inputs of hidden_size.

    memory: tokens kept at most, 0 for all. cached: false where none are kept. shared_qk: queries are the keys (LSH).
    relative: XLNet's projection of positions, with three biases and two segments per head.
    """

    num_attention_heads: Size
    head_dim: Size
    hidden_size: Size
    memory: Count = 0
    cached: bool = True
    shared_qk: bool = False
    relative: bool = False

    def weights(self, hidden_size: int) -> tuple[Weight, ...]:
        """q, k and v [D, H·d] (k alone for q and k if shared), the positions' projection, o [H·d, D]."""
        heads, inner = self.num_attention_heads, self.num_attention_heads * self.head_dim
        names = (*(() if self.shared_qk else ("q",)), "k", "v", *(("r",) if self.relative else ()))
        return (
            *(matrix(name, hidden_size, inner, shards=heads) for name in names),
            matrix("o", inner, hidden_size, shards=heads, rows_in=True),
            *((vector("relative_biases", 5 * inner, shards=heads),) if self.relative else ()),
        )

    def dims(self) -> dict[str, tuple[str, str]]:
        return dict.fromkeys(("q", "k", "v", "r"), ("D", "H·d")) | {"o": ("H·d", "D")}

    def letters(self) -> dict[str, int]:
        return {"H": self.num_attention_heads, "d": self.head_dim}

    def cache(self) -> tuple[CacheEntry, ...]:
        """One row of hidden_size per token kept."""
        return (self._kept,) if self.cached else ()

    @property
    def _kept(self) -> CacheEntry:
        return CacheEntry("hidden", 1, self.hidden_size, limit=self.memory)

    def operators(self, p: Pass) -> list[Operator]:
        """q of the new tokens; k, v and positions of every token in reach, from its hidden state; attention, o."""
        w = p.local(self.weights(p.width))
        heads, d = p.heads(self.num_attention_heads), self.head_dim
        seen = p.pairs(self._kept.read_rows)
        up = p.gemm("kv", *(w[n] for n in ("k", "v", "r") if n in w), tokens=seen)
        moved = p.cache(self.cache())
        cost = up.cost._replace(cache_read_bytes=moved.cache_read_bytes, cache_write_bytes=moved.cache_write_bytes)
        if self.cached:  # the states come from the cache
            cost = cost._replace(activation_bytes=cost.activation_bytes - seen * self.hidden_size * p.element)
        return [
            *([p.gemm("q", w["q"])] if "q" in w else []),
            msgspec.structs.replace(up, cost=cost, role=Role.CORE),
            p.attention((), self._visible, heads, d, d, expanded=2 * seen * heads * d),
            p.gemm("o", w["o"]),
            *p.all_reduce(w["o"].outputs),
        ]

    def _visible(self, new: Num, past: Num) -> Num:
        return causal_pairs(new, past, self.memory)

    @property
    def label(self) -> str:
        return "hidden-state attention" + (f" memory {self.memory}" if self.memory else "")

    def as_mha(self) -> tuple[int, int, int]:
        return self.num_attention_heads, self.head_dim, self.head_dim
