"""MLA prefill, expanded (192/128 per head) or absorbed (576/512 per head, 3.4 times the FLOPs).

tiles = batch·q_heads·⌈S/128⌉
t     = t0 + max((0.6·x + 0.4·⌈x⌉)·tile, longest tile) + bytes/(em·BW),  tile = 2·128·width·keys / (ec·P/SMs) + tau
"""

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from kvcalc.timing.law import Array, Law, within

if TYPE_CHECKING:
    from kvcalc.timing.figures import Figures

ROWS, STAIR = 128, 0.4
EXPANDED, ABSORBED = 192 + 128, 576 + 512  # widths of a key and a value together


class MlaPrefill(Law, frozen=True, tag="mla_prefill"):
    """Causal latent attention of `batch` prompts of seq_len tokens, with q_heads heads.

    t0 [µs]: launches. ec: of the datasheet's peak. em: of its bandwidth, by queries, keys, values, outputs. tau [µs]: what
    a tile pays beside its products. compute: bytes of the operands of the products. attends: which of the two forms.

    `us` takes two more arrays where there is a past, or other widths: the keys that a query sees on average, and the width of
    a key and a value together.
    """

    SHAPE: ClassVar[tuple[str, ...]] = ("batch", "q_heads", "seq_len")
    CHOICES: ClassVar[tuple[dict[str, str], ...]] = ({"attends": "expanded"}, {"attends": "absorbed"})

    compute: int = 2
    attends: Literal["expanded", "absorbed"] = "expanded"
    t0: Annotated[float, within(0.5, 120)] = 14
    ec: Annotated[float, within(0.02, 1.2)] = 0.65
    em: Annotated[float, within(0.05, 3)] = 0.8
    tau: Annotated[float, within(0.005, 30)] = 0.3

    def us(self, machine: "Figures", *shape: Array) -> Array:
        import numpy as np

        batch, heads, length, *seen = shape
        width: Array | int = EXPANDED if self.attends == "expanded" else ABSORBED
        keys, last = (length + ROWS) / 2, length
        if seen:
            keys, width, last = seen[0] + ROWS / 2, seen[1], seen[0] + length / 2
        tiles = batch * heads * np.ceil(length / ROWS) / machine.sms
        each = 2 * ROWS * width / (self.ec * machine.peak(self.compute) / machine.sms)
        waves = tiles + STAIR * (np.ceil(tiles) - tiles)
        moved = 2 * batch * length * heads * (2 * width)
        compute = np.maximum(waves * (each * keys + self.tau), each * last + self.tau)
        return self.t0 + compute + moved / (self.em * machine.memory)
