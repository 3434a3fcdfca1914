"""RWKV-7: linear attention with a decay per channel, behind a mix of each token with the one before.

State per sequence and layer: a matrix head_dim × head_dim per head in fp32, and two last inputs as wide as the residual stream,
one for time mixing, one for the channel mixing after it. Source: Peng et al. 2025, arXiv 2503.14456 §4.
"""

from typing import ClassVar

from kvcalc.layers.cache import CacheEntry
from kvcalc.layers.part import Count, Part, Size, StateDtype
from kvcalc.layers.recurrent.state import conv_state, recurrent_state
from kvcalc.layers.weights import Weight, matrix, vector


class Rwkv7(Part, frozen=True, tag="rwkv7"):
    """Time mixing of num_heads heads of head_dim; decay, learning rate, value mix and gate through low ranks.

    v_low_rank_dim: 0 in the first layer, whose values are mixed with none. shift_size: width of the inputs
    that it and its FFN each keep.
    """

    STATE_FLOPS: ClassVar[int] = 6  # state·a and its outer product with b, the outer product of values and keys, state·r

    num_heads: Size
    head_dim: Size
    decay_low_rank_dim: Size
    a_low_rank_dim: Size
    v_low_rank_dim: Count
    gate_low_rank_dim: Size
    shift_size: Size
    state_dtype: StateDtype = "fp32"

    def weights(self, hidden_size: int) -> tuple[Weight, ...]:
        """receptance, key, value [D, H·d] and out [H·d, D]; four pairs [D, r] and [r, H·d]; mixes, scales and the norm."""
        heads = self.num_heads
        inner = heads * self.head_dim
        ranks = {"decay": self.decay_low_rank_dim, "a": self.a_low_rank_dim, "v": self.v_low_rank_dim}
        low = {**{name: rank for name, rank in ranks.items() if rank}, "gate": self.gate_low_rank_dim}
        return (
            *(matrix(name, hidden_size, inner, shards=heads) for name in ("receptance", "key", "value")),
            *(matrix(f"{name}_down", hidden_size, rank) for name, rank in low.items()),
            *(matrix(f"{name}_up", rank, inner, bias=name != "gate", shards=heads) for name, rank in low.items()),
            vector("time_mix", 6 * hidden_size),
            vector("scales", 3 * inner, shards=heads),
            vector("norm", 2 * inner, shards=heads),
            matrix("out", inner, hidden_size, shards=heads, rows_in=True),
        )

    def cache(self) -> tuple[CacheEntry, ...]:
        """Two last inputs, and d × d per head."""
        shift = conv_state(1, 2 * self.shift_size, kernel=2)
        return shift, recurrent_state(self.num_heads, self.head_dim, self.head_dim, self.state_dtype)

    @property
    def label(self) -> str:
        return "RWKV-7"
