"""Lightning attention: linear attention with a fixed decay per head (MiniMax-Text-01, MiniMax-M1).

State per sequence and layer: one matrix head_dim × head_dim per head; no convolution. Source: MiniMax-01,
arXiv 2501.08313, section 2.2.
"""

from kvcalc.layers.cache import CacheEntry
from kvcalc.layers.part import Part, Size, StateDtype
from kvcalc.layers.recurrent.state import recurrent_state
from kvcalc.layers.weights import Weight, matrix, vector


class Lightning(Part, frozen=True, tag="lightning"):
    """Linear attention of num_attention_heads heads, with norm and gate before the output projection."""

    num_attention_heads: Size
    head_dim: Size
    state_dtype: StateDtype = "fp32"

    def weights(self, hidden_size: int) -> tuple[Weight, ...]:
        """qkv [D, 3·H·d], gate [D, H·d], norm [H·d], out [H·d, D]."""
        heads = self.num_attention_heads
        inner = heads * self.head_dim
        return (
            matrix("qkv", hidden_size, 3 * inner, shards=heads),
            matrix("gate", hidden_size, inner, shards=heads),
            vector("norm", inner, shards=heads),
            matrix("out", inner, hidden_size, shards=heads, rows_in=True),
        )

    def cache(self) -> tuple[CacheEntry, ...]:
        """d × d per head."""
        return (recurrent_state(self.num_attention_heads, self.head_dim, self.head_dim, self.state_dtype),)

    @property
    def label(self) -> str:
        return "Lightning"
