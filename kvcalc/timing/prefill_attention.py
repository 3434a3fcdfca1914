"""Prefill attention: causal self-attention of fresh prompts, the write of their keys and values included.

Queries are taken in tiles of 128 rows (of one head, or of a whole KV group packed together), each of which walks the keys
that it sees. Tiles of unlike length are dealt to SMs as these come free, so that the last one to end outlasts the mean by part
of the longest tile (list scheduling; Graham, SIAM J. Appl. Math. 17, 1969, bounds that part by one). The write into the cache
is a kernel of its own, so its time adds: what it moves, and, where each token has a block of threads (vLLM's
csrc/cache_kernels.cu: min(kv_heads·head_dim, 512) of them), how long such blocks wait, of which an SM holds 2,048 threads.

    tiles   = batch·⌈S/128⌉·q_heads, or, packed, at most batch·kv_heads·⌈S·(q_heads/kv_heads)/128⌉
    tile    = 4·128·head_dim·keys / (ec·e·P/SMs) + tau,  keys = pairs/S + 64 on average
    attend  = max(tiles/SMs·tile + tail·longest tile, longest tile)
    write   = 8·batch·S·kv_heads·head_dim/(ew·BW) + batch·S·min(kv_heads·head_dim, 512)/(2048·SMs)·block
    t       = t0 + attend + 4·batch·S·q_heads·head_dim/(em·BW) + write
"""

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from kvcalc.timing.law import Array, Law, attended, within

if TYPE_CHECKING:
    from kvcalc.timing.figures import Figures

ROWS = 128  # query rows of a tile
BLOCK_THREADS, SM_THREADS = 512, 2048  # threads of a block that writes a token at most, and that an SM holds


def causal_keys(length: Array, limit: Array) -> Array:
    """The keys that a query sees on average, at most `limit` each."""
    return (limit * (limit + 1) / 2 + (length - limit) * limit) / length


class PrefillAttention(Law, frozen=True, tag="prefill_attention"):
    """Causal attention of `batch` prompts of seq_len tokens.

    t0 [µs]: launches, of attention and of the cache write. ec: of the datasheet's bf16 or fp8 peak at head_dim 128; a64,
    wide: factors on it at widths up to 64, and over 128. aw: a factor on ec under a window. tau [µs]: what a tile pays beside
    its products. tail: the part of the longest tile by which the last SM outlasts the mean. em: of the datasheet's bandwidth,
    by queries and outputs, each moved once in two bytes an element; ew: by keys and values, read and written in as many. block
    [µs]: how long a block of threads takes to write a token. compute: bytes of the operands of the products. rows: `packed`
    tiles hold the query heads of a KV group, `plain` ones hold one head.

    `us` takes one more array where there is a past: the keys that a query sees on average.
    """

    CHOICES: ClassVar[tuple[dict[str, str], ...]] = ({"rows": "packed"}, {"rows": "plain"})
    PULL: ClassVar[float] = 2.0

    compute: int = 2
    rows: Literal["packed", "plain"] = "packed"
    t0: Annotated[float, within(0.5, 80)] = 10
    ec: Annotated[float, within(0.02, 1.1)] = 0.6
    em: Annotated[float, within(0.05, 3)] = 0.7
    ew: Annotated[float, within(0.02, 3)] = 0.6
    block: Annotated[float, within(0.005, 20)] = 1
    tau: Annotated[float, within(0.02, 30)] = 1
    tail: Annotated[float, within(0.01, 1)] = 0.3
    a64: Annotated[float, within(0.1, 3)] = 0.7
    wide: Annotated[float, within(0.1, 3)] = 1.1
    aw: Annotated[float, within(0.1, 3)] = 0.9

    def us(self, machine: "Figures", *shape: Array) -> Array:
        import numpy as np

        batch, q_heads, kv_heads, head_dim, length, window, *seen = shape
        tiles = np.ceil(length / ROWS) * q_heads
        if self.rows == "packed":
            tiles = np.minimum(tiles, np.ceil(length * q_heads / kv_heads / ROWS) * kv_heads)
        tiles = tiles * batch / machine.sms
        limit = attended(length, window)
        keys = (seen[0] if seen else causal_keys(length, limit)) + ROWS / 2
        last = seen[0] + length / 2 if seen else limit
        width = np.select([head_dim <= 64, head_dim <= 128], [self.a64, 1.0], self.wide)
        width = width * np.where(limit < length, self.aw, 1.0)
        rate = self.ec * machine.peak(self.compute) / machine.sms * width
        each = 4 * ROWS * head_dim / rate
        longest = each * last + self.tau
        attend = np.maximum(tiles * (each * keys + self.tau) + self.tail * longest, longest)
        asked = 4 * batch * length * q_heads * head_dim / (self.em * machine.memory)
        return self.t0 + attend + asked + self._write(machine, batch * length, kv_heads * head_dim)

    def _write(self, machine: "Figures", tokens: Array, width: Array) -> Array:
        """µs to put the keys and values of so many tokens, each `width` elements, into the cache."""
        import numpy as np

        blocks = tokens * np.minimum(width, BLOCK_THREADS) / (SM_THREADS * machine.sms)
        return 8 * tokens * width / (self.ew * machine.memory) + blocks * self.block
