"""Elementwise chains: norms, RoPE, activations, residual sums.

    t = t0 + bytes/(em·BW)

No rows are measured for them; the two parameters are assumed, as the calibrations say: a launch inside a CUDA graph, and
the share of the bandwidth that streaming kernels commonly reach.
"""

from typing import TYPE_CHECKING, Annotated

from kvcalc.timing.law import Array, Law, within

if TYPE_CHECKING:
    from kvcalc.timing.figures import Figures


class Elementwise(Law, frozen=True, tag="elementwise"):
    """One fused elementwise kernel. t0 [µs]: its launch. em: of the datasheet's bandwidth, what it reaches."""

    t0: Annotated[float, within(0.1, 20)] = 1.5
    em: Annotated[float, within(0.05, 1.1)] = 0.8

    def us(self, machine: "Figures", *shape: Array) -> Array:
        (moved,) = shape
        return self.t0 + moved / (self.em * machine.memory)
