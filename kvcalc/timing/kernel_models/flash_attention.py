"""Kernel models of attention over keys and values (MHA, GQA, MQA).

Decode (`DecodeAttention`): one new token of each sequence attends to its cached keys and values. A
tile is 64 query heads of one KV head of one sequence. It reads the cache in blocks of 128 tokens. A
launch may split the tile over s SMs and combine the parts. Tiles run in full waves. The memory time
is one read of the bytes that are not in the L2. The SMs limit the rate of the other bytes.

    n      = batch·kv_heads·⌈(q_heads/kv_heads)/64⌉,  blocks = ⌈L/128⌉,  L = min(kv_len, window)
    tile   = tau + ⌈blocks/s⌉·128·2·head_dim·bytes / r
    miss   = 1 / (1 + (cap·L2/B)^6),  B = bytes of the cache that is read
    memory = miss·(B / (reach·BW) + tramp)
    t      = t0 + min over s ≤ blocks of [pnorm_2(⌈n·s/SMs⌉·tile, memory) + (s > 1)·(2 + 0.05·s)]
             + 4·batch·q_heads·head_dim/BW

Decode with a documented number of splits along the cache (`FlashDecode`). The number of parts s
depends only on counts, never on a time, and is often not the fastest choice. The model ignores the
partial last wave and XQA's rounding of parts. Measurements have batches of powers of two, and the
model predicts them equally well without both. So another sequence never makes a step shorter.

    blocks = ⌈L/block⌉, block = the kernel's own at that head_dim, 80 to 160 tokens (XQA: 128)
    tile   = tau + ⌈blocks/s⌉·block·2·head_dim·bytes / r      (XQA: blocks/s)
    memory = miss·(B / (reach·BW) + 6)
    t      = t0 + tb·batch + pnorm_2(max(1, n·s/SMs)·tile, memory) + (s > 1)·0.8·√s
             + 4·batch·q_heads·head_dim/BW

Two constants are common to H100 and H200 under three stacks: 6 µs (ramp-up and tail of the memory
traffic) and 0.8·√s µs (combination of the parts of each row). Separate fits gave 0.1 to 13 and 0.7
to 1.5.

Prefill (`PrefillAttention`): causal self-attention of fresh prompts, with the write of their keys
and values. Queries are in tiles of 128 rows of one head, or of a packed KV group. Each tile reads
the keys that its queries see. A free SM takes the next tile, so the last SM ends after the mean by
part of the longest tile (list scheduling; Graham, SIAM J. Appl. Math. 17, 1969, bounds this part by
one). A separate kernel writes the cache, and its time is added: its memory traffic, and the wait of
thread blocks if each token has a block (vLLM's csrc/cache_kernels.cu: min(kv_heads·head_dim, 512)
threads). An SM runs 2,048 threads.

    tiles   = batch·⌈S/128⌉·q_heads, or, packed, at most batch·kv_heads·⌈S·(q_heads/kv_heads)/128⌉
    tile    = 4·128·head_dim·keys / (ec·e·P/SMs) + tau,  keys = pairs/S + 64 on average
    attend  = max(tiles/SMs·tile + tail·longest tile, longest tile)
    write   = 8·batch·S·kv_heads·head_dim/(ew·BW)
              + batch·S·min(kv_heads·head_dim, 512)/(2048·SMs)·block
    t       = t0 + attend + 4·batch·S·q_heads·head_dim/(em·BW) + write
"""

from typing import Literal

from kvcalc.arithmetic import ceil, is_any, maximum, minimum, select, sqrt, where
from kvcalc.timing.kernel_models.kernel_model import (
    Array,
    Arrays,
    GpuParameters,
    KernelModel,
    attended_tokens,
    missed_share,
    pnorm,
    width_factor,
)

SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
BLOCK = 128  # tokens of a step along the cache
ROWS = 64  # query heads of one tile
# µs of the kernel that combines a split, and for each part
COMBINE_US = 2.0
COMBINE_PART_US = 0.05
# query heads per KV head that tensor-core kernels take; some stacks use a kernel per head for more
MAX_GROUP = 32


def decode_launch(
    model: "DecodeAttention | FlashDecode", machine: GpuParameters, shape: Arrays
) -> Arrays:
    """Return the tiles, tokens, rates and bytes of one call of an attention kernel in decode.

    A tile is up to 64 query heads that read the keys and values of one KV head of one sequence.
    MHA, and models with many query heads per KV head, run other kernels than usual GQA. Their rates
    are the usual rates times the factors `rx` and `tx` of the kernel model.

    Args:
        model: Time model that gives the read rates and the form of the kernel.
        machine: Datasheet rates of the GPU.
        shape: Sizes of the call on one rank: sequences, query heads, KV heads, head width, cached
            tokens per sequence, and tokens of the sliding window (0 for none). Numbers or arrays.

    Returns:
        Number of tiles of all sequences together; cached tokens that each tile reads; rate at which
        one streaming multiprocessor (SM) reads the cache [bytes/µs]; time of a tile in addition to
        the time of its read [µs]; bytes of keys and values that are read for all sequences
        together; and the share of these bytes that comes from memory because it is not in the L2
        cache.
    """
    batch, q_heads, kv_heads, head_dim, kv_len, window = shape
    length = attended_tokens(kv_len, window)
    group = q_heads / kv_heads
    tiles = batch * kv_heads * ceil(group / ROWS)
    is_special = group > (MAX_GROUP if model.wide == "per_head" else 16)
    if model.wide == "windowed":
        is_special = (window > 0) & (group > 1)
    if model.wide != "grouped":
        tiles = where(is_special, batch * q_heads, tiles)
    is_special = is_special | (group == 1)
    rate = (
        model.r * width_factor(head_dim, model.r64, model.r256) * where(is_special, model.rx, 1)
    )
    tau = model.tau * where(is_special, model.tx, 1)
    read = 2 * batch * kv_heads * length * head_dim * model.bytes
    missed = missed_share(read, model.cap, machine.l2, model.cold)
    return tiles, length, rate, tau, read, missed


class DecodeAttention(KernelModel, frozen=True, tag="decode_attention"):
    """Time model of attention in one decode step, in one layer on one rank.

    It includes the write of the new token to the KV cache. The kernel may split the cache of a
    sequence into parts on several streaming multiprocessors (SMs), and then combines their results.

    The method `us` takes, in this order: sequences, query heads, KV heads, head width, cached
    tokens per sequence, and tokens of the sliding window (0 for none). A tile is up to 64 query
    heads of one KV head of one sequence. A wave is one tile on each SM.

    Attributes:
        t0: Launch, prologue and cache write [µs].
        tau: Load, softmax and store of a tile, once per wave [µs].
        r: Rate at which one SM reads the cache at head_dim 128 [bytes/µs].
        r64, r256: Factors on `r` at head_dim 64 and 256. At 192 the factor is √r256.
        cap: Fitted part of the L2 cache that repeated calls can use; 1 is the whole L2. If a call
            reads this many bytes, half of them come from memory.
        tramp: Ramp-up and tail of the memory traffic [µs].
        rx, tx: Factors on `r` and `tau` for MHA, and for the shapes that `wide` selects. Both have
            other kernels.
        reach: Share of the datasheet's bandwidth that a long read of the cache reaches.
        bytes: Bytes of one cached element.
        wide: Shapes with a special kernel. `grouped`: more than 16 query heads per KV head.
            `per_head`: more than 32, and each query head reads the cache separately. `windowed`:
            GQA under a sliding window, and each query head reads the cache separately.
        cold: Whether the KV cache is never in the L2, as in serving. In measurements it may be.
        parts: Maximum number of parts into which a kernel splits the cache of one sequence.
        RANGES: A line for each fitted parameter: its name, and its minimum and maximum in a fit.
        CHOICES: Forms of the model that a fit tries, each as values of fields that are not fitted.
    """

    RANGES = """
        t0 0.3 60
        tau 0.05 30
        r 5e3 1e6
        cap 0.05 1.5
        tramp 0.1 40
        r64 0.1 4
        r256 0.1 4
        rx 0.02 8
        tx 0.1 20
        reach 0.5 1.1
    """
    CHOICES = (
        *({"wide": wide} for wide in ("grouped", "per_head", "windowed")),
        *({"wide": wide, "parts": 1} for wide in ("grouped", "per_head")),
    )

    bytes: int = 2
    wide: Literal["grouped", "per_head", "windowed"] = "grouped"
    cold: bool = False
    parts: int = 128
    t0: float = 7
    tau: float = 2.5
    r: float = 1e5
    cap: float = 0.7
    tramp: float = 5
    r64: float = 0.8
    r256: float = 0.8
    rx: float = 1
    tx: float = 1
    reach: float = 0.95

    def us(self, machine: GpuParameters, *shape: Array) -> Array:
        batch, q_heads, _, head_dim, *_ = shape
        tiles, length, rate, tau, read, missed = decode_launch(self, machine, shape)
        memory = missed * (read / (self.reach * machine.memory) + self.tramp)
        block = BLOCK * 2 * head_dim * self.bytes / rate
        blocks = ceil(length / BLOCK)
        best = best_split(
            tiles / machine.sms, blocks, (tau, block), memory, COMBINE_US, self.parts
        )
        return self.t0 + best + 4 * batch * q_heads * head_dim / machine.memory


def best_split(
    tiles: Array,
    blocks: Array,
    tile_us: tuple[Array, Array],
    memory: Array,
    combine: float,
    max_parts: int = SPLITS[-1],
) -> Array:
    """Return the microseconds of a decode attention kernel with its fastest split of the cache.

    A tile is a group of query heads of one sequence, which reads the cached tokens in blocks. A
    split divides the blocks of each tile among several streaming multiprocessors (SMs), and a
    further kernel combines their results.

    Args:
        tiles: Number of tiles ÷ number of SMs.
        blocks: Number of blocks that each tile reads.
        tile_us: Two times in microseconds: the fixed time of each tile, and the time of each of its
            blocks.
        memory: Microseconds of the memory traffic of all tiles together, which overlaps with their
            other work.
        combine: Microseconds of the kernel that combines the results, without the time for each
            part.
        max_parts: Maximum number of parts of a tile.
    """
    tau, block = tile_us
    best = pnorm(2.0, ceil(tiles) * (tau + blocks * block), memory)
    for split in SPLITS[1:]:
        if split > max_parts or not is_any(blocks >= split):
            break
        compute = ceil(tiles * split) * (tau + ceil(blocks / split) * block)
        us = pnorm(2.0, compute, memory) + combine + COMBINE_PART_US * split
        best = where(blocks >= split, minimum(best, us), best)
    return best


RAMP_US = 6.0  # ramp of a read from memory, in addition to its bytes
MIN_PART_TOKENS = 128.0  # minimum tokens of a part under XQA
SPLIT_COMBINE_US = 0.8  # to combine a split, times the root of its parts
Rule = Literal["flash3", "flash3_bounded", "xqa"]
# Tokens of a block at head_dim 64, 128, 192, 256 (flash-attention, hopper/tile_size.h: paged
# caches, by bytes of an element).
BLOCKS = {1: (160.0, 160.0, 160.0, 128.0), 2: (128.0, 128.0, 96.0, 80.0)}


class FlashDecode(KernelModel, frozen=True, tag="decode_attention_flash"):
    """Time model of attention in one decode step, for kernels with a documented split rule.

    It is for one layer on one rank. The rule states into how many parts the kernel splits the cache
    of a sequence. The parts run on several streaming multiprocessors (SMs).

    The time includes the write of the new token to the KV cache and the combination of the parts.
    The method `us` takes, in this order: sequences, query heads, KV heads, head width, cached
    tokens per sequence, and tokens of the sliding window (0 for none). A tile is up to 64 query
    heads of one KV head of one sequence. A wave is one tile on each SM.

    Attributes:
        t0: Launch, prologue and cache write [µs].
        tb: Time to schedule each sequence [µs].
        tau: Load, softmax and store of a tile, once per wave [µs].
        r: Rate at which one SM reads the cache at head_dim 128 [bytes/µs].
        r64, r256: Factors on `r` at head_dim 64 and 256. At 192 the factor is √r256.
        rx, tx: Factors on `r` and `tau` for MHA, and for the shapes that `wide` selects.
        cap: Fitted part of the L2 cache that repeated calls can use; 1 is the whole L2. If a call
            reads this many bytes, half of them come from memory.
        reach: Share of the datasheet's bandwidth that a long read of the cache reaches.
        bytes: Bytes of one cached element.
        wide: Shapes with a special kernel. `grouped`: more than 16 query heads per KV head.
            `per_head`: more than 32, and each query head reads the cache separately.
        cold: Whether the KV cache is never in the L2, as in serving. In measurements it may be.
        rule: Rule by which the kernel splits the cache: FlashAttention-3 (`flash3`, or
            `flash3_bounded` if the engine limits the parts) or TensorRT-LLM's `xqa`.
        parts: Maximum number of parts into which a kernel splits the cache of one sequence.
        RANGES: A line for each fitted parameter: its name, and its minimum and maximum in a fit.
        CHOICES: Forms of the model that a fit tries, each as values of fields that are not fitted.
    """

    RANGES = """
        t0 0.3 60
        tb 1e-4 0.2
        tau 0.05 30
        r 5e3 1e6
        r64 0.1 4
        r256 0.1 4
        rx 0.02 8
        tx 0.1 20
        cap 0.05 1.5
        reach 0.5 1.1
    """
    CHOICES = ({"wide": "grouped"}, {"wide": "per_head"})

    bytes: Literal[1, 2] = 2
    wide: Literal["grouped", "per_head"] = "grouped"
    cold: bool = False
    rule: Rule = "flash3"
    parts: int = 128
    t0: float = 7
    tb: float = 0.01
    tau: float = 2
    r: float = 7e4
    r64: float = 0.8
    r256: float = 0.8
    rx: float = 1
    tx: float = 1
    cap: float = 0.7
    reach: float = 0.95

    def us(self, machine: GpuParameters, *shape: Array) -> Array:
        batch, q_heads, _, head_dim, *_ = shape
        tiles, length, rate, tau, read, missed = decode_launch(self, machine, shape)
        is_xqa = self.rule == "xqa"
        *usual, widest = (MIN_PART_TOKENS,) * 4 if is_xqa else BLOCKS[self.bytes]
        block = select([head_dim <= 64, head_dim <= 128, head_dim <= 192], usual, widest)
        blocks = ceil(length / block)
        split = split_parts(self.rule, self.parts, tiles, blocks, length, machine.sms)
        part = blocks / split if is_xqa else ceil(blocks / split)
        tile = tau + part * block * 2 * head_dim * self.bytes / rate
        compute = maximum(tiles * split / machine.sms, 1) * tile

        memory = missed * (read / (self.reach * machine.memory) + RAMP_US)
        combine = where(split > 1, SPLIT_COMBINE_US * sqrt(split), 0.0)
        us = self.t0 + self.tb * batch + pnorm(2.0, compute, memory) + combine
        return us + 4 * batch * q_heads * head_dim / machine.memory


def split_parts(
    rule: Rule, max_parts: int, tiles: Array, blocks: Array, length: Array, sms: int
) -> Array:
    """Return into how many parts a decode attention kernel splits the cache of each tile.

    A tile is a group of query heads of one sequence. The parts run on several streaming
    multiprocessors (SMs) at the same time. The rules are:

    - flash3_bounded: a part has 1.1 · (blocks of all tiles ÷ SMs) blocks, rounded up, so that each
      SM gets about one part (flash-attention, hopper/flash_prepare_scheduler.cu).
    - flash3: as flash3_bounded, but four blocks or fewer are not split (hopper/heuristics.h, if the
      caller gives no bound).
    - xqa: a part has 128 tokens. But a tile has at most √(8 · number of such parts) parts, and all
      tiles have at most 8 · SMs parts. The result is not rounded (TensorRT-LLM,
      computeMultiBlockCount of decoderXQAImplCommon.h).

    Args:
        rule: Rule of the kernel, one of the three above.
        max_parts: Maximum number of parts of a tile.
        tiles: Number of tiles in the call of the kernel.
        blocks: Blocks of cached tokens that each tile reads.
        length: Cached tokens that each tile reads.
        sms: Number of SMs of the GPU.
    """
    if rule == "xqa":
        parts = maximum(length / MIN_PART_TOKENS, 1)
        parts = minimum(parts, sqrt(8 * parts))
        waves = tiles * parts / (8 * sms)
        parts = maximum(parts / maximum(waves, 1), 1)
    else:
        blocks_per_part = maximum(ceil(11 * tiles * blocks / (10 * sms)), 1)
        parts = ceil(blocks / blocks_per_part)
        if rule == "flash3":
            parts = where(blocks > 4, parts, 1)
    return minimum(parts, max_parts)


TILE_QUERY_ROWS = 128  # query rows of a tile
# maximum threads of a block that writes a token, and threads of an SM
BLOCK_THREADS = 512
SM_THREADS = 2048


class PrefillAttention(KernelModel, frozen=True, tag="prefill_attention"):
    """Time model of causal attention in the prefill of equal prompts, in one layer on one rank.

    It includes the write of their keys and values to the KV cache.

    The method `us` takes, in this order: prompts, query heads, KV heads, head width, tokens of a
    prompt, and tokens of the sliding window (0 for none). If tokens are cached before the prompt,
    it also takes the mean number of keys that a query attends to. A tile is a block of 128 query
    rows that one streaming multiprocessor (SM) computes.

    Attributes:
        t0: Launches of attention and of the cache write [µs].
        ec: Share of the datasheet's bf16 or fp8 peak that the matrix products reach at head_dim
            128.
        a64, wide: Factors on `ec` at head_dim up to 64, and over 128.
        aw: Factor on `ec` under a sliding window.
        tau: Time of a tile in addition to its products [µs].
        tail: Time by which the last SM ends after the mean of all SMs, as a share of the longest
            tile's time.
        em: Share of the datasheet's bandwidth that reading queries and writing outputs reaches;
            each moves once, in two bytes per element.
        ew: Share of the datasheet's bandwidth that the cache write reaches; keys and values are
            read and written in two bytes per element.
        block: Time in which a block of threads writes one token [µs].
        compute: Bytes of one operand element of the products: 2 for bf16, 1 for fp8.
        rows: `packed` tiles contain the query heads of a KV group, `plain` tiles contain one head.
        RANGES: A line for each fitted parameter: its name, and its minimum and maximum in a fit.
        CHOICES: Forms of the model that a fit tries, each as values of fields that are not fitted.
        PRIOR_DEVIATION: Scale, in natural logarithms, of a fit's penalty for a parameter's distance
            from its default value.
    """

    RANGES = """
        t0 0.5 80
        ec 0.02 1.1
        em 0.05 3
        ew 0.02 3
        block 0.005 20
        tau 0.02 30
        tail 0.01 1
        a64 0.1 3
        wide 0.1 3
        aw 0.1 3
    """
    CHOICES = ({"rows": "packed"}, {"rows": "plain"})
    PRIOR_DEVIATION = 2.0

    compute: int = 2
    rows: Literal["packed", "plain"] = "packed"
    t0: float = 10
    ec: float = 0.6
    em: float = 0.7
    ew: float = 0.6
    block: float = 1
    tau: float = 1
    tail: float = 0.3
    a64: float = 0.7
    wide: float = 1.1
    aw: float = 0.9

    def us(self, machine: GpuParameters, *shape: Array) -> Array:
        batch, q_heads, kv_heads, head_dim, length, window, *past_keys = shape
        tiles = ceil(length / TILE_QUERY_ROWS) * q_heads
        if self.rows == "packed":
            packed_rows = length * q_heads / kv_heads
            tiles = minimum(tiles, ceil(packed_rows / TILE_QUERY_ROWS) * kv_heads)
        tiles = tiles * batch / machine.sms
        limit = attended_tokens(length, window)
        if past_keys:
            (mean_keys,) = past_keys
            last_keys = mean_keys + length / 2
        else:
            mean_keys = (limit * (limit + 1) / 2 + (length - limit) * limit) / length
            last_keys = limit
        width = select([head_dim <= 64, head_dim <= 128], [self.a64, 1.0], self.wide)
        width = width * where(limit < length, self.aw, 1.0)
        rate = self.ec * machine.peak(self.compute) / machine.sms * width
        us_per_key = 4 * TILE_QUERY_ROWS * head_dim / rate
        longest = us_per_key * last_keys + self.tau
        tile = us_per_key * (mean_keys + TILE_QUERY_ROWS / 2) + self.tau
        attend = maximum(tiles * tile + self.tail * longest, longest)
        moved = 4 * batch * length * q_heads * head_dim / (self.em * machine.memory)

        tokens = batch * length
        kv_width = kv_heads * head_dim
        blocks = tokens * minimum(kv_width, BLOCK_THREADS) / (SM_THREADS * machine.sms)
        write = 8 * tokens * kv_width / (self.ew * machine.memory) + blocks * self.block
        return self.t0 + attend + moved + write
