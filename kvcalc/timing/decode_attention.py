"""Decode attention: one new token of each sequence against its cached keys and values (MHA, GQA, MQA).

A tile is 64 query heads of one KV head of one sequence; it walks the cache in blocks of 128 tokens. A launch may split the
walk over s SMs and combine. Its tiles run in whole waves; the memory side is one read of what the L2 does not hold, as the
rest comes at the rate of the SMs.

    n      = batch·kv_heads·⌈(q_heads/kv_heads)/64⌉,  blocks = ⌈L/128⌉,  L = min(kv_len, window)
    tile   = tau + ⌈blocks/s⌉·128·2·head_dim·bytes / r
    miss   = 1 / (1 + (cap·L2/B)^6),  B = bytes of the cache that is read
    memory = miss·(B / (reach·BW) + tramp)
    t      = t0 + min over s ≤ blocks of [pnorm_2(⌈n·s/SMs⌉·tile, memory) + (s > 1)·(2 + 0.05·s)] + 4·batch·q_heads·head_dim/BW
"""

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from kvcalc.timing.law import Array, Law, attended, by_width, pnorm, within

if TYPE_CHECKING:
    from kvcalc.timing.figures import Figures

SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
BLOCK = 128  # tokens of a step along the cache
ROWS = 64  # query heads of one tile
COMBINE, COMBINE_EACH = 2.0, 0.05  # µs of the kernel that combines a split, and for each part
WIDEST_GROUP = 32  # query heads per KV head that tensor-core kernels take; beyond, some stacks go head by head


def misses(read: Array, cap: float, l2: float, cold: bool) -> Array:
    """The share of a cache of so many bytes that is not in the L2 when the same call has just run; 1 where it is cold."""
    import numpy as np

    return np.ones_like(read) if cold else 1 / (1 + (cap * l2 / read) ** 6)


class DecodeAttention(Law, frozen=True, tag="decode_attention"):
    """One decode step of attention, the write of the new token and the combination of splits included.

    t0 [µs]: launch, prologue, cache write. tau [µs]: a tile's load, softmax and store, paid in every wave. r [bytes/µs]:
    at what rate one SM streams the cache at head_dim 128; r64, r256: factors on it at other widths, √r256 at 192. cap: the
    share of the L2 in which a cache stays between calls. tramp [µs]: ramp of HBM, and the tail. rx, tx: factors on r and tau for
    MHA and wide groups, where stacks take other kernels. reach: of the datasheet's bandwidth, by a long read of the cache.

    bytes: of one cached element. wide: `grouped` kernels for more than 16 query heads per KV head, or `per_head` beyond 32,
    which read once for each; `windowed`: kernels that go head by head under a window, for which rx and tx stand too. cold:
    true where the cache is never in the L2, as in serving. parts: the most into which a kernel splits a walk.
    """

    CHOICES: ClassVar[tuple[dict[str, Any], ...]] = (
        *({"wide": wide} for wide in ("grouped", "per_head", "windowed")),
        *({"wide": wide, "parts": 1} for wide in ("grouped", "per_head")),
    )

    bytes: int = 2
    wide: Literal["grouped", "per_head", "windowed"] = "grouped"
    cold: bool = False
    parts: int = 128
    t0: Annotated[float, within(0.3, 60)] = 7
    tau: Annotated[float, within(0.05, 30)] = 2.5
    r: Annotated[float, within(5e3, 1e6)] = 1e5
    cap: Annotated[float, within(0.05, 1.5)] = 0.7
    tramp: Annotated[float, within(0.1, 40)] = 5
    r64: Annotated[float, within(0.1, 4)] = 0.8
    r256: Annotated[float, within(0.1, 4)] = 0.8
    rx: Annotated[float, within(0.02, 8)] = 1
    tx: Annotated[float, within(0.1, 20)] = 1
    reach: Annotated[float, within(0.5, 1.1)] = 0.95

    def us(self, machine: "Figures", *shape: Array) -> Array:
        import numpy as np

        batch, q_heads, kv_heads, head_dim, kv_len, window = shape
        length = attended(kv_len, window)
        group = q_heads / kv_heads
        n = batch * kv_heads * np.ceil(group / ROWS)
        special = group > (WIDEST_GROUP if self.wide == "per_head" else 16)
        if self.wide == "windowed":
            special = (window > 0) & (group > 1)
        if self.wide != "grouped":
            n = np.where(special, batch * q_heads, n)
        special = special | (group == 1)
        rate = self.r * by_width(head_dim, self.r64, self.r256) * np.where(special, self.rx, 1)
        tau = self.tau * np.where(special, self.tx, 1)
        read = 2 * batch * kv_heads * length * head_dim * self.bytes
        miss = misses(read, self.cap, machine.l2, self.cold)
        memory = miss * (read / (self.reach * machine.memory) + self.tramp)
        block = BLOCK * 2 * head_dim * self.bytes / rate
        best = best_split(n / machine.sms, np.ceil(length / BLOCK), tau, block, memory, COMBINE, self.parts)
        return self.t0 + best + 4 * batch * q_heads * head_dim / machine.memory


def best_split(
    n: Array, blocks: Array, tau: Array, block: Array, memory: Array, combine: float, parts: int = SPLITS[-1]
) -> Array:
    """The least time over the number of parts, at most `parts`, into which each tile's walk is split; n: tiles per SM."""
    import numpy as np

    best = pnorm(2.0, np.ceil(n) * (tau + blocks * block), memory)
    most = min(float(blocks.max()), parts) if blocks.size else 1.0
    for split in SPLITS[1:]:
        if split > most:
            break
        compute = np.ceil(n * split) * (tau + np.ceil(blocks / split) * block)
        found = pnorm(2.0, compute, memory) + combine + COMBINE_EACH * split
        best = np.where(blocks >= split, np.minimum(best, found), best)
    return best
