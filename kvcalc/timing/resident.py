"""Products whose weights may lie in the second-level cache: on GPUs where that is large beside what memory moves.

Rows are measured over some copies of the weights in turn. Where all copies fit into the L2, no call reads them from memory:

    miss = 1 / (1 + (cap·L2/W)^6),  W = bytes of the weights of one product
    memory = max((W·miss + inputs + outputs) / (em·BW), (W + inputs + outputs) / l2)

In serving other weights have passed through the cache in between: cold, miss = 1.
"""

from typing import TYPE_CHECKING, Annotated

from kvcalc.timing.gemm import Gemm, QuantizedGemm
from kvcalc.timing.law import Array, within

if TYPE_CHECKING:
    from kvcalc.timing.figures import Figures

LEAST_US = (
    50.0  # of memory traffic that the L2 holds on such a GPU: 12 to 20 on HBM, 84 and 116 on the GDDR of two with large L2s
)


def keeps_weights(machine: "Figures") -> bool:
    """Whether the L2 of this GPU is large enough beside its memory's rate that weights lie in it between measured calls."""
    return machine.l2 > LEAST_US * machine.memory


def _reading(machine: "Figures", weights: Array, others: Array, em: float, miss: Array | float, l2: float) -> Array:
    import numpy as np

    found: Array = np.maximum((weights * miss + others) / (em * machine.memory), (weights + others) / l2)
    return found


class ResidentGemm(Gemm, frozen=True, tag="gemm_resident"):
    """bf16 products whose weights the L2 may hold. t0, ec, em, p, tr, r: as of Gemm.

    cap: the share of the L2 that the weights of one product may fill and still be there at the next call. l2 [bytes/µs]: out
    of the second-level cache. cold: true where they never are, as in serving.
    """

    cold: bool = False
    cap: Annotated[float, within(0.02, 1.5)] = 0.17
    l2: Annotated[float, within(3e5, 6e7)] = 3e6

    def reading(self, machine: "Figures", weights: Array, others: Array) -> Array:
        miss = 1.0 if self.cold else 1 / (1 + (self.cap * machine.l2 / weights) ** 6)
        return _reading(machine, weights, others, self.em, miss, self.l2)


class ResidentQuantizedGemm(QuantizedGemm, frozen=True, tag="gemm_quantized_resident"):
    """fp8 and fp4 products whose weights the L2 may hold. t0, ec, em, p, tr, r, bq, sg: as of QuantizedGemm, pro is none.

    cap, l2, cold: as of ResidentGemm.
    """

    cold: bool = False
    pro: float = 0.0
    cap: Annotated[float, within(0.02, 1.5)] = 0.17
    l2: Annotated[float, within(3e5, 6e7)] = 3e6

    def reading(self, machine: "Figures", weights: Array, others: Array) -> Array:
        miss = 1.0 if self.cold else 1 / (1 + (self.cap * machine.l2 / weights) ** 6)
        return _reading(machine, weights, others, self.em, miss, self.l2)
