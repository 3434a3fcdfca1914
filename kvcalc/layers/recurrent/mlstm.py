"""The matrix memory of xLSTM (mLSTM): a matrix per head with exponential input and forget gates.

State per sequence, layer and head: a matrix qk_head_dim × v_head_dim, a normaliser of qk_head_dim and a stabiliser, in
the model's dtype (what transformers keeps between steps). Sources: Beck et al. 2024, arXiv 2405.04517 §2.3; Beck et al.
2025, arXiv 2503.13427 §3.
"""

from kvcalc.layers.cache import CacheEntry
from kvcalc.layers.part import Part, Size, StateDtype
from kvcalc.layers.recurrent.state import recurrent_state
from kvcalc.layers.weights import Weight, matrix, vector


class MatrixLstm(Part, frozen=True, tag="mlstm"):
    """num_heads memories. qk_size, v_size: widths of the projections; qk_head_dim, v_head_dim: of one head's memory.

    bias: on the projections and the norm; the two gates always have one. state_dtype: the model's unless given.
    """

    num_heads: Size
    qk_size: Size
    v_size: Size
    qk_head_dim: Size
    v_head_dim: Size
    bias: bool = False
    state_dtype: StateDtype | None = None

    def weights(self, hidden_size: int) -> tuple[Weight, ...]:
        """q and k [D, dqk], v and output gate [D, dv], two gates [D, H], a norm [dv], out [dv, D]."""
        heads, bias = self.num_heads, self.bias
        return (
            *(matrix(name, hidden_size, self.qk_size, bias, shards=heads) for name in ("q", "k")),
            *(matrix(name, hidden_size, self.v_size, bias, shards=heads) for name in ("v", "gate")),
            matrix("input_forget", hidden_size, 2 * heads, bias=True, shards=heads),
            vector("norm", self.v_size * (1 + bias), shards=heads),
            matrix("out", self.v_size, hidden_size, bias, shards=heads, rows_in=True),
        )

    def cache(self) -> tuple[CacheEntry, ...]:
        """dqk × dv per head, and beside it dqk + 1 numbers."""
        heads, dtype = self.num_heads, self.state_dtype or ""
        return (
            recurrent_state(heads, self.qk_head_dim, self.v_head_dim, dtype),
            recurrent_state(heads, 1, self.qk_head_dim + 1, dtype),
        )

    def problem(self) -> str:
        for name in ("qk_size", "v_size"):
            if getattr(self, name) % self.num_heads:
                return f"num_heads {self.num_heads} does not divide {name} {getattr(self, name)}"
        return ""

    @property
    def label(self) -> str:
        return "mLSTM"
