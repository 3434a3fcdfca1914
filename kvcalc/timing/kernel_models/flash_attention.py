"""Decode attention: one new token of each sequence against its cached keys and values (MHA, GQA,
MQA).

A tile is 64 query heads of one KV head of one sequence. It reads the cache in blocks of 128 tokens.
A launch may split the tile over s SMs and combine the parts. Tiles run in full waves. The memory
time is one read of the bytes that are not in the L2; the SMs limit the rate of the other bytes.

    n      = batch·kv_heads·⌈(q_heads/kv_heads)/64⌉,  blocks = ⌈L/128⌉,  L = min(kv_len, window)
    tile   = tau + ⌈blocks/s⌉·128·2·head_dim·bytes / r
    miss   = 1 / (1 + (cap·L2/B)^6),  B = bytes of the cache that is read
    memory = miss·(B / (reach·BW) + tramp)
    t      = t0 + min over s ≤ blocks of [pnorm_2(⌈n·s/SMs⌉·tile, memory) + (s > 1)·(2 + 0.05·s)] +
    4·batch·q_heads·head_dim/BW

Decode attention by kernels with a documented number of splits along the cache (flash decoding).

Tiles are those of `DecodeAttention`. The number of parts s depends only on counts, never on a time,
and is often not the fastest choice. The model ignores the partial last wave and XQA's rounding of
parts. Measurements have batches of powers of two, and the model predicts them equally well without
both. With this, another sequence never makes a step shorter.

    n      = batch·kv_heads·⌈(q_heads/kv_heads)/64⌉,  blocks = ⌈L/block⌉,  L = min(kv_len, window)
    tile   = tau + ⌈blocks/s⌉·block·2·head_dim·bytes / r      (XQA: blocks/s)
    block  = the kernel's own at that head_dim, 80 to 160 tokens (XQA: 128)
    miss   = 1 / (1 + (cap·L2/B)^6),  B = bytes of the cache that is read
    memory = miss·(B / (reach·BW) + 6)
    t      = t0 + tb·batch + pnorm_2(max(1, n·s/SMs)·tile, memory) + (s > 1)·0.8·√s +
    4·batch·q_heads·head_dim/BW

The SMs limit the rate of L2 hits. Two constants are common to H100 and H200 under three stacks:
6 µs (ramp and tail of the memory) and 0.8·√s µs (combination of the parts of each row). Separate
fits gave 0.1 to 13 and 0.7 to 1.5.

Prefill attention: causal self-attention of fresh prompts, the write of their keys and values
included.

Queries are in tiles of 128 rows, of one head or of a packed KV group. Each tile reads the keys that
its queries see. A free SM takes the next tile, so the last SM ends after the mean by part of the
longest tile (list scheduling; Graham, SIAM J. Appl. Math. 17, 1969, bounds this part by one). A
separate kernel writes the cache, and its time is added: its memory traffic, and the wait of thread
blocks if each token has a block (vLLM's csrc/cache_kernels.cu: min(kv_heads·head_dim, 512)
threads). An SM runs 2,048 threads.

    tiles   = batch·⌈S/128⌉·q_heads, or, packed, at most batch·kv_heads·⌈S·(q_heads/kv_heads)/128⌉
    tile    = 4·128·head_dim·keys / (ec·e·P/SMs) + tau,  keys = pairs/S + 64 on average
    attend  = max(tiles/SMs·tile + tail·longest tile, longest tile)
    write   = 8·batch·S·kv_heads·head_dim/(ew·BW) + batch·S·min(kv_heads·head_dim,
    512)/(2048·SMs)·block
    t       = t0 + attend + 4·batch·S·q_heads·head_dim/(em·BW) + write
"""

from typing import Annotated, ClassVar, Literal

from kvcalc.arithmetic import ceil, is_any, maximum, minimum, select, sqrt, where
from kvcalc.records import Settings
from kvcalc.timing.kernel_models.kernel_model import (
    Array,
    GpuParameters,
    KernelModel,
    attended,
    by_width,
    pnorm,
    within,
)

SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
BLOCK = 128  # tokens of a step along the cache
ROWS = 64  # query heads of one tile
COMBINE, COMBINE_EACH = (
    2.0,
    0.05,
)  # µs of the kernel that combines a split, and for each part
# query heads per KV head that tensor-core kernels take; beyond, some stacks go head by head
WIDEST_GROUP = 32


def misses(read: Array, cap: float, l2: float, cold: bool) -> Array:
    """Return the share of a cache of `read` bytes that the L2 does not hold after the same call;
    1 if the L2 is cold."""
    return 1.0 if cold else 1 / (1 + (cap * l2 / read) ** 6)


class DecodeAttention(KernelModel, frozen=True, tag="decode_attention"):
    """One decode step of attention, with the write of the new token and the combination of splits.

    Attributes:
        t0: Launch, prologue and cache write [µs].
        tau: Load, softmax and store of a tile, in every wave [µs].
        r: Rate at which one SM reads the cache at head_dim 128 [bytes/µs].
        r64, r256: Factors on `r` at other widths; √r256 at 192.
        cap: Share of the L2 in which a cache stays between calls.
        tramp: Ramp of the memory, and the tail [µs].
        rx, tx: Factors on `r` and `tau` for MHA and wide groups, which have other kernels.
        reach: Share of the datasheet's bandwidth that a long read of the cache reaches.
        bytes: Bytes of one cached element.
        wide: Kernels for more than 16 query heads per KV head: `grouped`, or `per_head` beyond 32,
            which read the cache once for each head. `windowed` kernels read it per head under a
            window, with `rx` and `tx`.
        cold: Whether the cache is never in the L2, as in serving.
        parts: Maximum number of parts into which a kernel splits the cache.
    """

    CHOICES: ClassVar[tuple[Settings, ...]] = (
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

    def us(self, machine: GpuParameters, *shape: Array) -> Array:
        batch, q_heads, kv_heads, head_dim, kv_len, window = shape
        length = attended(kv_len, window)
        group = q_heads / kv_heads
        n = batch * kv_heads * ceil(group / ROWS)
        special = group > (WIDEST_GROUP if self.wide == "per_head" else 16)
        if self.wide == "windowed":
            special = (window > 0) & (group > 1)
        if self.wide != "grouped":
            n = where(special, batch * q_heads, n)
        special = special | (group == 1)
        rate = self.r * by_width(head_dim, self.r64, self.r256) * where(special, self.rx, 1)
        tau = self.tau * where(special, self.tx, 1)
        read = 2 * batch * kv_heads * length * head_dim * self.bytes
        miss = misses(read, self.cap, machine.l2, self.cold)
        memory = miss * (read / (self.reach * machine.memory) + self.tramp)
        block = BLOCK * 2 * head_dim * self.bytes / rate
        best = best_split(
            n / machine.sms,
            ceil(length / BLOCK),
            tau,
            block,
            memory,
            COMBINE,
            self.parts,
        )
        return self.t0 + best + 4 * batch * q_heads * head_dim / machine.memory


def best_split(
    n: Array,
    blocks: Array,
    tau: Array,
    block: Array,
    memory: Array,
    combine: float,
    parts: int = SPLITS[-1],
) -> Array:
    """Return the least microseconds over the number of parts, at most `parts`, of each tile."""
    best = pnorm(2.0, ceil(n) * (tau + blocks * block), memory)
    for split in SPLITS[1:]:
        if split > parts or not is_any(blocks >= split):
            break
        compute = ceil(n * split) * (tau + ceil(blocks / split) * block)
        result = pnorm(2.0, compute, memory) + combine + COMBINE_EACH * split
        best = where(blocks >= split, minimum(best, result), best)
    return best


RAMP = 6.0  # µs of a read from memory beside its bytes
PART = 128.0  # tokens of a part at least, of XQA
SPLIT_COMBINE_US = 0.8  # µs to combine a split walk, by the root of its parts
Rule = Literal["flash3", "flash3_bounded", "xqa"]
# Tokens of a block at head_dim 64, 128, 192, 256 (flash-attention, hopper/tile_size.h: paged
# caches, by bytes of an element).
BLOCKS = {1: (160.0, 160.0, 160.0, 128.0), 2: (128.0, 128.0, 96.0, 80.0)}


class FlashDecode(KernelModel, frozen=True, tag="decode_attention_flash"):
    """One decode step of attention with a documented split, with the write of the new token and the
    combination of splits.

    Attributes:
        t0: Launch, prologue and cache write [µs].
        tb: Scheduling of each sequence [µs].
        tau: Load, softmax and store of a tile, in every wave [µs].
        r: Rate at which one SM reads the cache at head_dim 128 [bytes/µs].
        r64, r256: Factors on `r` at other widths; √r256 at 192.
        rx, tx: Factors on `r` and `tau` for MHA and wide groups, which have other kernels.
        cap: Share of the L2 in which a cache stays between calls.
        reach: Share of the datasheet's bandwidth that a long read reaches.
        bytes: Bytes of one cached element.
        wide: Kernels for more than 16 query heads per KV head: `grouped`, or `per_head` beyond 32,
            which read the cache once for each head.
        cold: Whether the cache is never in the L2, as in serving.
        rule: Rule of the split; see `split_parts`.
        parts: Maximum number of parts into which a kernel splits the cache.
    """

    CHOICES: ClassVar[tuple[Settings, ...]] = (
        {"wide": "grouped"},
        {"wide": "per_head"},
    )

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

    def us(self, machine: GpuParameters, *shape: Array) -> Array:
        batch, q_heads, kv_heads, head_dim, kv_len, window = shape
        length = attended(kv_len, window)
        group = q_heads / kv_heads
        wide = group > (WIDEST_GROUP if self.wide == "per_head" else 16)
        n = batch * kv_heads * ceil(group / ROWS)
        if self.wide == "per_head":
            n = where(wide, batch * q_heads, n)
        apart = wide | (group == 1)
        rate = self.r * by_width(head_dim, self.r64, self.r256) * where(apart, self.rx, 1)
        tau = self.tau * where(apart, self.tx, 1)
        *usual, widest = (PART,) * 4 if self.rule == "xqa" else BLOCKS[self.bytes]
        block = select([head_dim <= 64, head_dim <= 128, head_dim <= 192], usual, widest)
        blocks = ceil(length / block)
        split = split_parts(self.rule, self.parts, n, blocks, length, machine.sms)
        part = blocks / split if self.rule == "xqa" else ceil(blocks / split)
        tile = tau + part * block * 2 * head_dim * self.bytes / rate
        read = 2 * batch * kv_heads * length * head_dim * self.bytes
        memory = misses(read, self.cap, machine.l2, self.cold) * (
            read / (self.reach * machine.memory) + RAMP
        )
        walked = pnorm(2.0, maximum(n * split / machine.sms, 1) * tile, memory)
        combined = where(split > 1, SPLIT_COMBINE_US * sqrt(split), 0.0)
        return (
            self.t0
            + self.tb * batch
            + walked
            + combined
            + 4 * batch * q_heads * head_dim / machine.memory
        )


def split_parts(
    rule: Rule, parts: int, n: Array, blocks: Array, length: Array, sms: int
) -> Array:
    """Into how many parts, at most `parts`, a kernel splits each of n walks of so many blocks or
    tokens over the SMs.

    flash3_bounded: as many blocks to a part as give each SM one part, with a tenth to spare
    (flash-attention, hopper/flash_prepare_scheduler.cu). flash3: four blocks or fewer not at all
    (hopper/heuristics.h), where the caller gives no bound. xqa: 128 tokens to a part, but no more
    than √(8·their number) parts, in at most eight waves (TensorRT-LLM, computeMultiBlockCount of
    decoderXQAImplCommon.h), unrounded.
    """
    if rule == "xqa":
        most = maximum(length / PART, 1)
        most = minimum(most, sqrt(8 * most))
        waves = n * most / (8 * sms)
        most = maximum(most / maximum(waves, 1), 1)
    else:
        each = maximum(ceil(11 * n * blocks / (10 * sms)), 1)
        most = ceil(blocks / each)
        if rule == "flash3":
            most = where(blocks > 4, most, 1)
    return minimum(most, parts)


TILE_QUERY_ROWS = 128  # query rows of a tile
# threads of a block that writes a token at most, and that an SM holds
BLOCK_THREADS, SM_THREADS = 512, 2048


def causal_keys(length: Array, limit: Array) -> Array:
    """Return the mean number of keys that a query sees, at most `limit` for each query."""
    return (limit * (limit + 1) / 2 + (length - limit) * limit) / length


class PrefillAttention(KernelModel, frozen=True, tag="prefill_attention"):
    """Causal attention of `batch` prompts of seq_len tokens.

    Attributes:
        t0: Launches of attention and of the cache write [µs].
        ec: Share of the datasheet's bf16 or fp8 peak at head_dim 128.
        a64, wide: Factors on `ec` at widths up to 64, and over 128.
        aw: Factor on `ec` under a window.
        tau: Time of a tile in addition to its products [µs].
        tail: Part of the longest tile by which the last SM exceeds the mean.
        em: Share of the datasheet's bandwidth that queries and outputs reach; each moves once, in
            two bytes per element.
        ew: Share of the datasheet's bandwidth that the cache write reaches; keys and values are
            read and written in two bytes per element.
        block: Write of a token by a block of threads [µs].
        compute: Bytes of an operand of the products.
        rows: `packed` tiles have the query heads of a KV group, `plain` tiles have one head.

    `us` takes one more array, the mean keys that a query sees, if there is a past.
    """

    CHOICES: ClassVar[tuple[dict[str, str], ...]] = (
        {"rows": "packed"},
        {"rows": "plain"},
    )
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

    def us(self, machine: GpuParameters, *shape: Array) -> Array:
        batch, q_heads, kv_heads, head_dim, length, window, *seen = shape
        tiles = ceil(length / TILE_QUERY_ROWS) * q_heads
        if self.rows == "packed":
            tiles = minimum(
                tiles, ceil(length * q_heads / kv_heads / TILE_QUERY_ROWS) * kv_heads
            )
        tiles = tiles * batch / machine.sms
        limit = attended(length, window)
        keys = (seen[0] if seen else causal_keys(length, limit)) + TILE_QUERY_ROWS / 2
        last = seen[0] + length / 2 if seen else limit
        width = select([head_dim <= 64, head_dim <= 128], [self.a64, 1.0], self.wide)
        width = width * where(limit < length, self.aw, 1.0)
        rate = self.ec * machine.peak(self.compute) / machine.sms * width
        each = 4 * TILE_QUERY_ROWS * head_dim / rate
        longest = each * last + self.tau
        attend = maximum(tiles * (each * keys + self.tau) + self.tail * longest, longest)
        requested = 4 * batch * length * q_heads * head_dim / (self.em * machine.memory)
        return (
            self.t0
            + attend
            + requested
            + self._write(machine, batch * length, kv_heads * head_dim)
        )

    def _write(self, machine: GpuParameters, tokens: Array, width: Array) -> Array:
        """Return microseconds to write keys and values of `tokens` tokens, `width` elements each,
        into the cache."""
        blocks = tokens * minimum(width, BLOCK_THREADS) / (SM_THREADS * machine.sms)
        return 8 * tokens * width / (self.ew * machine.memory) + blocks * self.block
