"""All-reduce inside one NVLink domain: every rank gets the sum of X bytes of n ranks.

One-shot: each rank reads the others' X. Two-shot: reduce-scatter, then all-gather. Large messages go to a ring of many
channels, or, in a domain of eight, to the switches, which reduce on the way. The least of the four counts:

    one    = a1 + h·(n − 1) + (n − 1)·X/(e1·NV)
    two    = a2 + h·(n − 1) + 2·(n − 1)/n·X/(e2·g2^d·NV)
    ring   = a3 + h·(n − 1) + 2·(n − 1)/n·X/(e3·g3^d·NV)
    switch = a3 + h·(n − 1) + X/(es·NV), for n ≥ 8

d = log2(n) − 2 counts doublings from four ranks, up to the eight that were measured: with the peers changes how much of its
links a rank keeps busy.
"""

from typing import TYPE_CHECKING, Annotated

from kvcalc.timing.law import Array, Law, within

if TYPE_CHECKING:
    from kvcalc.timing.figures import Figures

SWITCH_RANKS = 8
MEASURED_RANKS = 8


class AllReduce(Law, frozen=True, tag="allreduce"):
    """The sum of `bytes` bytes over num_gpus ranks.

    a1, a2, a3 [µs]: launch and barriers of the one-shot, the two-shot, and the ring or switch kernel. h [µs]: for each further
    rank. e1, e2, e3, es: what each reaches of the link's datasheet rate in one direction, e2 and e3 with four ranks. g2, g3:
    factors on those two for each doubling of the ranks.
    """

    h: Annotated[float, within(0.005, 10)] = 0.1
    a1: Annotated[float, within(0.3, 60)] = 4
    e1: Annotated[float, within(0.02, 1.5)] = 0.5
    a2: Annotated[float, within(0.3, 120)] = 10
    e2: Annotated[float, within(0.02, 1.5)] = 0.6
    a3: Annotated[float, within(3, 300)] = 40
    e3: Annotated[float, within(0.1, 1.5)] = 0.75
    es: Annotated[float, within(0.1, 1.5)] = 0.6
    g2: Annotated[float, within(0.7, 1.4)] = 1
    g3: Annotated[float, within(0.7, 1.4)] = 1

    def us(self, machine: "Figures", *shape: Array) -> Array:
        import numpy as np

        ranks, size = shape
        others, sent = ranks - 1, size / machine.link
        halves = 2 * others / np.maximum(ranks, 1) * sent
        doublings = np.log2(np.clip(ranks, 1, MEASURED_RANKS) / 4)
        ring = halves / (self.e3 * np.power(self.g3, doublings))
        large = np.where(ranks >= SWITCH_RANKS, np.minimum(ring, sent / self.es), ring)
        two = halves / (self.e2 * np.power(self.g2, doublings))
        plans = (self.a1 + others * sent / self.e1, self.a2 + two, self.a3 + large)
        return np.where(ranks > 1, np.minimum(np.minimum(plans[0], plans[1]), plans[2]) + self.h * others, 0.0)
