"""Decode attention by kernels whose source says into how many parts they split the walk along the cache (flash decoding).

A tile is 64 query heads of one KV head of one sequence; it walks the cache in blocks, as in decode_attention.
Into how many parts s a walk is split follows from counts alone, never from a time, and is often not the fastest choice.
That the last wave is not full, and that XQA rounds its parts, is left out: the rows, whose batches are powers of two, are met
as well without it, and so another sequence never makes a step shorter.

    n      = batch·kv_heads·⌈(q_heads/kv_heads)/64⌉,  blocks = ⌈L/block⌉,  L = min(kv_len, window)
    tile   = tau + ⌈blocks/s⌉·block·2·head_dim·bytes / r      (XQA: blocks/s)
    block  = the kernel's own at that head_dim, 80 to 160 tokens (XQA: 128)
    miss   = 1 / (1 + (cap·L2/B)^6),  B = bytes of the cache that is read
    memory = miss·(B / (reach·BW) + 6)
    t      = t0 + tb·batch + pnorm_2(max(1, n·s/SMs)·tile, memory) + (s > 1)·0.8·√s + 4·batch·q_heads·head_dim/BW

What hits the L2 comes at the rate of the SMs. The 6 µs (ramp and tail of the memory) and the 0.8·√s µs (the parts of each row
combined) are what H100 and H200 agree on under three stacks; fitted to each they were 0.1 to 13 and 0.7 to 1.5.
"""

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from kvcalc.timing.decode_attention import ROWS, WIDEST_GROUP, misses
from kvcalc.timing.law import Array, Law, attended, by_width, pnorm, within

if TYPE_CHECKING:
    from kvcalc.timing.figures import Figures

RAMP = 6.0  # µs of a read from memory beside its bytes
PART = 128.0  # tokens of a part at least, of XQA
COMBINE = 0.8  # µs to combine a split walk, by the root of its parts
Rule = Literal["flash3", "flash3_bounded", "xqa"]
# Tokens of a block at head_dim 64, 128, 192, 256 (flash-attention, hopper/tile_size.h: paged caches, by bytes of an element).
BLOCKS = {1: (160.0, 160.0, 160.0, 128.0), 2: (128.0, 128.0, 96.0, 80.0)}


class FlashDecode(Law, frozen=True, tag="decode_attention_flash"):
    """One decode step of attention, the write of the new token and the combination of splits included.

    t0 [µs]: launch, prologue, cache write. tb [µs]: for each sequence, its place in the schedule. tau [µs]: a tile's load,
    softmax and store, paid in every wave. r [bytes/µs]: at what rate one SM streams the cache at head_dim 128; r64, r256:
    factors on it at other widths, √r256 at 192. rx, tx: factors on r and tau for MHA and wide groups, where stacks take other
    kernels. cap: the share of the L2 in which a cache stays between calls. reach: of the datasheet's bandwidth, by a long read.

    bytes: of one cached element. wide: `grouped` kernels for more than 16 query heads per KV head, or `per_head` beyond 32,
    which read once for each. cold: true where the cache is never in the L2, as in serving. rule: whose split (`split_parts`).
    parts: the most into which a kernel splits a walk.
    """

    CHOICES: ClassVar[tuple[dict[str, Any], ...]] = ({"wide": "grouped"}, {"wide": "per_head"})

    bytes: Literal[1, 2] = 2
    wide: Literal["grouped", "per_head"] = "grouped"
    cold: bool = False
    rule: Rule = "flash3"
    parts: int = 128
    t0: Annotated[float, within(0.3, 60)] = 7
    tb: Annotated[float, within(1e-4, 0.2)] = 0.01
    tau: Annotated[float, within(0.05, 30)] = 2
    r: Annotated[float, within(5e3, 1e6)] = 7e4
    r64: Annotated[float, within(0.1, 4)] = 0.8
    r256: Annotated[float, within(0.1, 4)] = 0.8
    rx: Annotated[float, within(0.02, 8)] = 1
    tx: Annotated[float, within(0.1, 20)] = 1
    cap: Annotated[float, within(0.05, 1.5)] = 0.7
    reach: Annotated[float, within(0.5, 1.1)] = 0.95

    def us(self, machine: "Figures", *shape: Array) -> Array:
        import numpy as np

        batch, q_heads, kv_heads, head_dim, kv_len, window = shape
        length = attended(kv_len, window)
        group = q_heads / kv_heads
        wide = group > (WIDEST_GROUP if self.wide == "per_head" else 16)
        n = batch * kv_heads * np.ceil(group / ROWS)
        if self.wide == "per_head":
            n = np.where(wide, batch * q_heads, n)
        apart = wide | (group == 1)
        rate = self.r * by_width(head_dim, self.r64, self.r256) * np.where(apart, self.rx, 1)
        tau = self.tau * np.where(apart, self.tx, 1)
        *usual, widest = (PART,) * 4 if self.rule == "xqa" else BLOCKS[self.bytes]
        block = np.select([head_dim <= 64, head_dim <= 128, head_dim <= 192], usual, widest)
        blocks = np.ceil(length / block)
        split = split_parts(self.rule, self.parts, n, blocks, length, machine.sms)
        part = blocks / split if self.rule == "xqa" else np.ceil(blocks / split)
        tile = tau + part * block * 2 * head_dim * self.bytes / rate
        read = 2 * batch * kv_heads * length * head_dim * self.bytes
        memory = misses(read, self.cap, machine.l2, self.cold) * (read / (self.reach * machine.memory) + RAMP)
        walked = pnorm(2.0, np.maximum(n * split / machine.sms, 1) * tile, memory)
        combined = np.where(split > 1, COMBINE * np.sqrt(split), 0.0)
        return self.t0 + self.tb * batch + walked + combined + 4 * batch * q_heads * head_dim / machine.memory


def split_parts(rule: Rule, parts: int, n: Array, blocks: Array, length: Array, sms: int) -> Array:
    """Into how many parts, at most `parts`, a kernel splits each of n walks of so many blocks or tokens over the SMs.

    flash3_bounded: as many blocks to a part as give each SM one part, with a tenth to spare (flash-attention,
    hopper/flash_prepare_scheduler.cu). flash3: four blocks or fewer not at all (hopper/heuristics.h), where the caller gives
    no bound. xqa: 128 tokens to a part, but no more than √(8·their number) parts, in at most eight waves (TensorRT-LLM,
    computeMultiBlockCount of decoderXQAImplCommon.h), unrounded.
    """
    import numpy as np

    if rule == "xqa":
        most = np.maximum(length / PART, 1)
        most = np.minimum(most, np.sqrt(8 * most))
        waves = n * most / (8 * sms)
        most = np.maximum(most / np.maximum(waves, 1), 1)
    else:
        each = np.maximum(np.ceil(11 * n * blocks / (10 * sms)), 1)
        most = np.ceil(blocks / each)
        if rule == "flash3":
            most = np.where(blocks > 4, most, 1)
    return np.minimum(most, parts)
