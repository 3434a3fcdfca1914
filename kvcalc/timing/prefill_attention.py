"""Prefill attention: causal self-attention of fresh prompts, the write of their keys and values included.

Queries are taken in tiles of 128 rows (of one head, or of a whole KV group packed together), each of which walks the keys
that it sees; the cache write is a kernel of its own, so its time adds.

    tiles   = batch·⌈S/128⌉·q_heads, or, packed, at most batch·kv_heads·⌈S·(q_heads/kv_heads)/128⌉
    tile    = 4·128·head_dim·keys / (ec·e·P/SMs) + tau,  keys = pairs/S + 64 on average
    t       = t0 + max((0.6·x + 0.4·⌈x⌉)·tile, longest tile) + (reads and writes)/(em·BW),  x = tiles/SMs
"""

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from kvcalc.timing.law import Array, Law, within

if TYPE_CHECKING:
    from kvcalc.timing.figures import Figures

ROWS = 128  # query rows of a tile
STAIR = 0.4  # how far the last wave counts as a whole one


def causal_keys(length: Array, limit: Array) -> Array:
    """The keys that a query sees on average, at most `limit` each."""
    return (limit * (limit + 1) / 2 + (length - limit) * limit) / length


class PrefillAttention(Law, frozen=True, tag="prefill_attention"):
    """Causal attention of `batch` prompts of seq_len tokens.

    t0 [µs]: launches, of attention and of the cache write. ec: of the datasheet's bf16 or fp8 peak at head_dim 128; a64,
    a192, a256: factors on it at other widths. em: of the datasheet's bandwidth, by queries, keys, values, outputs and the
    cache write. tau [µs]: what a tile pays beside its products. aw: a factor on ec under a window. compute: bytes of the
    operands of the products. rows: `packed` tiles hold the query heads of a KV group, `plain` ones hold one head.

    `us` takes one more array where there is a past: the keys that a query sees on average.
    """

    CHOICES: ClassVar[tuple[dict[str, str], ...]] = ({"rows": "packed"}, {"rows": "plain"})

    compute: int = 2
    rows: Literal["packed", "plain"] = "packed"
    t0: Annotated[float, within(0.5, 80)] = 10
    ec: Annotated[float, within(0.02, 1.1)] = 0.6
    em: Annotated[float, within(0.05, 3)] = 0.7
    tau: Annotated[float, within(0.02, 30)] = 1
    a64: Annotated[float, within(0.1, 3)] = 0.7
    a192: Annotated[float, within(0.1, 3)] = 0.9
    a256: Annotated[float, within(0.1, 3)] = 1.1
    aw: Annotated[float, within(0.1, 3)] = 0.9

    def us(self, machine: "Figures", *shape: Array) -> Array:
        import numpy as np

        batch, q_heads, kv_heads, head_dim, length, window, *seen = shape
        tiles = np.ceil(length / ROWS) * q_heads
        if self.rows == "packed":
            tiles = np.minimum(tiles, np.ceil(length * q_heads / kv_heads / ROWS) * kv_heads)
        tiles = tiles * batch / machine.sms
        limit = np.where(window > 0, np.minimum(np.maximum(window, 1), length), length)
        keys = (seen[0] if seen else causal_keys(length, limit)) + ROWS / 2
        last = seen[0] + length / 2 if seen else limit
        width = np.select([head_dim <= 64, head_dim <= 128, head_dim <= 192], [self.a64, 1.0, self.a192], self.a256)
        width = width * np.where(limit < length, self.aw, 1.0)
        rate = self.ec * machine.peak(self.compute) / machine.sms * width
        each = 4 * ROWS * head_dim / rate
        waves = tiles + STAIR * (np.ceil(tiles) - tiles)
        longest = each * last + self.tau
        moved = 4 * batch * length * head_dim * (q_heads + 2 * kv_heads)
        return self.t0 + np.maximum(waves * (each * keys + self.tau), longest) + moved / (self.em * machine.memory)
