"""MLA prefill, expanded (192/128 per head) or absorbed (576/512 per head, 3.4 times the FLOPs).

Query tiles have 128 rows of one head, or 64 rows into which heads are packed. If a prompt has fewer than 64 tokens, such a
tile covers max(1, 64/q_heads) of them.

    plain:  tiles = batch·q_heads·⌈S/128⌉            packed: tiles = batch·min(q_heads·⌈S/64⌉, ⌈S·q_heads/64⌉)
    t     = t0 + max(waves·tile, longest tile) + (bytes + cast·latents)/(em·BW),  tile = 2·rows·width·keys / (ec·P/SMs) + tau
    waves = x + stair·(⌈x⌉ − x),  x = tiles/SMs
"""

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from kvcalc.timing.law import Array, Law, within

if TYPE_CHECKING:
    from kvcalc.timing.figures import Figures

ROWS = {"plain": 128, "packed": 64}
LATENT = 512 + 64
EXPANDED, ABSORBED = 192 + 128, 576 + 512  # widths of a key and a value together


class MlaPrefill(Law, frozen=True, tag="mla_prefill"):
    """Causal latent attention of `batch` prompts of seq_len tokens, with q_heads heads.

    t0 [µs]: launches. ec: of the datasheet's peak. em: of its bandwidth, by queries, keys, values, outputs. tau [µs]: what
    a tile pays beside its products. cast: passes over the latents of all tokens, two bytes an element, beside the attention:
    the cache write, and conversions of an fp8 cache.

    compute: bytes of the operands of the products. attends: which of the two forms. tiles: as above. stair: how far the last
    wave counts as a whole one.

    `us` takes batch, q_heads, seq_len, and two more arrays where there is a past, or other widths: the keys that a query sees
    on average, and the width of a key and a value together.
    """

    CHOICES: ClassVar[tuple[dict[str, Any], ...]] = tuple(
        {"attends": form, "tiles": tiles, "stair": stair}
        for form in ("expanded", "absorbed")
        for tiles in ("plain", "packed")
        for stair in (0.4, 1.0)
    )
    PULL: ClassVar[float] = 0.8

    compute: int = 2
    attends: Literal["expanded", "absorbed"] = "expanded"
    tiles: Literal["plain", "packed"] = "plain"
    stair: float = 0.4
    t0: Annotated[float, within(0.5, 120)] = 14
    ec: Annotated[float, within(0.02, 1.2)] = 0.65
    em: Annotated[float, within(0.05, 1.2)] = 0.8
    tau: Annotated[float, within(0.005, 30)] = 1.2
    cast: Annotated[float, within(0.05, 40)] = 2

    def us(self, machine: "Figures", *shape: Array) -> Array:
        import numpy as np

        batch, heads, length, *seen = shape
        expanded, rows = self.attends == "expanded", ROWS[self.tiles]
        width: Array | int = EXPANDED if expanded else ABSORBED
        count, covered = heads * np.ceil(length / rows), length * 0 + rows
        if self.tiles == "packed":
            packed = np.ceil(length * heads / rows)
            covered = np.where(length < rows, np.maximum(1, rows / heads), rows)
            count = np.minimum(count, packed)
        keys, last = (length + covered) / 2, length
        if seen:
            keys, width, last = seen[0] + covered / 2, seen[1], seen[0] + length / 2
        tiles = batch * count / machine.sms
        each = 2 * rows * width / (self.ec * machine.peak(self.compute) / machine.sms)
        waves = tiles + self.stair * (np.ceil(tiles) - tiles)
        each_token = heads * width * (2 if expanded else 1) + self.cast * LATENT  # absorbed: queries and outputs alone
        moved = 2 * batch * length * each_token
        compute = np.maximum(waves * (each * keys + self.tau), each * last + self.tau)
        return self.t0 + compute + moved / (self.em * machine.memory)
