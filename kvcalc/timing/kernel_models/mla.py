"""Kernel models of multi-head latent attention (MLA) and of DeepSeek sparse attention.

MLA decode (`MlaDecode`) in the absorbed form: all heads attend to one latent of 512 and a RoPE key
of 64. The model is the model of decode attention, with tiles of 64 heads and blocks of 64 tokens.
Its products come near the tensor cores' rate:

    n      = batch·⌈q_heads/64⌉,  blocks = ⌈kv_len/64⌉
    tile   = tau + ⌈blocks/s⌉·max(64·576·bytes / r, 2·64·64·1088 / (ec·P/SMs)) / pace
    memory = the memory time of decode attention / pace

MLA prefill (`MlaPrefill`), expanded (192/128 per head) or absorbed (576/512 per head, 3.4 times the
FLOPs). Query tiles have 128 rows of one head, or 64 rows into which heads are packed. If a prompt
has fewer than 64 tokens, such a tile covers max(1, 64/q_heads) of them.

    plain:  tiles = batch·q_heads·⌈S/128⌉
    packed: tiles = batch·min(q_heads·⌈S/64⌉, ⌈S·q_heads/64⌉)
    tile  = 2·rows·width·keys / (ec·P/SMs) + tau
    waves = x + stair·(⌈x⌉ − x),  x = tiles/SMs
    t     = t0 + max(waves·tile, longest tile) + (bytes + cast·latents)/(em·BW)

Decode step of a whole DeepSeek-sparse-attention module (`SparseDecode`): projections, indexer,
top-k, attention over the selected latents. b sequences, h heads of the rank, L cached tokens, H the
residual stream; W: weights of the projections in their own format (s bytes each), Wb: the two
absorbed matrices, always in bf16. [i] is 1 if the layer has an indexer, else 0.

    W  = H·(q_rank + latent + rope) + q_rank·h·(nope + rope) + h·v·H
         + [i]·(q_rank·d·heads_i + H·(d + heads_i)),  Wb = latent·h·(nope + v)
    t  = t0 + t1·log2(b + 1)
         + hypot((W·s + 2·Wb)/(em·BW), b·(2·W/P_s + 2·Wb/P_bf16)/0.6) + a1·b·(1 + h/heads)
         + [i]·(ti + (d + 4)·b·L/(ei·BW) + [L > top]·max(1, b/SMs)·(kt + 10⁻⁴·L))
         + max(1, x)·ta + walks·ts·min(L, top)
    x  = b·⌈h/64⌉/SMs, walks = max(1, x) if one SM reads all tokens of a tile, x if all SMs share
         the tokens

If b exceeds the batches of the engine's CUDA graphs, the host launches the kernels. Then t is at
least he, or host·he with an indexer. The indexer reads one key of d + 4 bytes per token for all
heads: engines keep the keys in fp8 with a scale, in every format of the cache. Tiles of attention
have 64 heads and read at most `top` tokens.

Decode step of a whole MLA module (`MlaModule`): its matrix products and its attention, and an
overhead for b tokens and h heads of the rank. The overhead is the small kernels between the
products: norms, RoPE, quantisation, copies and the write of the cache.

    overhead = t0 + t1·log2(b) + th·h + b·(tb + tbh·h)
"""

from typing import Literal

from kvcalc.arithmetic import ceil, clip, hypot, log2, maximum, minimum, select, where
from kvcalc.timing.kernel_models.flash_attention import best_split
from kvcalc.timing.kernel_models.kernel_model import (
    Array,
    GpuParameters,
    KernelModel,
    missed_share,
)

ROWS = 64
BLOCK = 64
LATENT = 512
ROPE = 64
COMBINE_US = 2.5  # time of the kernel that combines a split


class MlaDecode(KernelModel, frozen=True, tag="mla_decode"):
    """Time model of absorbed latent attention (MLA) in one decode step, in one layer on one rank.

    In the absorbed form, all heads read the same cached latents. The method `us` takes, in this
    order: sequences, query heads of the rank, and cached tokens per sequence. A tile is up to 64
    heads of one sequence, on one streaming multiprocessor (SM).

    Attributes:
        t0: Launch, prologue and cache write [µs].
        tau: Time of a tile in addition to its read and products [µs].
        r: Rate at which one SM reads latents [bytes/µs].
        ec: Share of the datasheet's bf16 peak that the matrix products reach.
        cap: Fitted part of the L2 cache that repeated calls can use; 1 is the whole L2. If a call
            reads this many bytes, half of them come from memory.
        tramp: Ramp-up and tail of the memory traffic [µs].
        cast: Memory traffic before the attention, as a multiple of the bytes of the cached latents.
            Converting an fp8 cache to bf16 reads it once and writes twice its bytes. A bf16 cache
            needs almost none.
        reach: Share of the datasheet's bandwidth that a long read of the cache reaches.
        h32, h64: Factors on the speed of reads and products with 17 to 32 and with 33 to 64 heads
            of the rank. With fewer or more heads, the factor is 1.
        bytes: Bytes of one cached element.
        cold: Whether the KV cache is never in the L2, as in serving. In measurements it may be.
        RANGES: A line for each fitted parameter: its name, and its minimum and maximum in a fit.
    """

    RANGES = """
        t0 0.3 80
        tau 0.05 30
        r 5e3 2e6
        ec 0.05 1.2
        cap 0.05 1.5
        tramp 0.1 60
        cast 1e-3 40
        reach 0.5 1.1
        h32 0.3 1.5
        h64 0.3 1.5
    """

    bytes: int = 2
    cold: bool = False
    t0: float = 6.3
    tau: float = 5.5
    r: float = 3e5
    ec: float = 0.9
    cap: float = 0.4
    tramp: float = 7
    cast: float = 0.05
    reach: float = 0.95
    h32: float = 1
    h64: float = 1

    def us(self, machine: GpuParameters, *shape: Array) -> Array:
        batch, heads, length = shape
        read = batch * length * (LATENT + ROPE) * self.bytes
        pace = select([heads <= 16, heads <= 32, heads <= 64], [1.0, self.h32, self.h64], 1.0)
        missed = missed_share(read, self.cap, machine.l2, self.cold)
        memory = missed * (read / (self.reach * machine.memory) + self.tramp) / pace
        rate = self.ec * machine.bf16 / machine.sms
        read_us = BLOCK * (LATENT + ROPE) * self.bytes / self.r
        products_us = 2 * ROWS * BLOCK * (2 * LATENT + ROPE) / rate
        block = maximum(read_us, products_us) / pace
        tiles = batch * ceil(heads / ROWS) / machine.sms
        best = best_split(tiles, ceil(length / BLOCK), (self.tau, block), memory, COMBINE_US)
        moved = 2 * batch * heads * (2 * LATENT + ROPE) + self.cast * read
        return self.t0 + best + moved / machine.memory


PREFILL_ROWS = {"plain": 128, "packed": 64}
# Widths of a key and a value together.
WIDTHS_OF_FORMS = {"expanded": 192 + 128, "absorbed": 576 + 512}


class MlaPrefill(KernelModel, frozen=True, tag="mla_prefill"):
    """Time model of causal latent attention (MLA) in the prefill of equal prompts.

    It is for one layer on one rank.

    The method `us` takes, in this order: prompts, query heads of the rank, and tokens of a prompt.
    With cached tokens before the prompt, or with other widths than DeepSeek-V3's, it takes two more
    numbers: the mean number of keys that a query attends to, and the width of a key and a value
    together. A tile is a block of query rows that one streaming multiprocessor (SM) computes. A
    wave is one tile on each SM.

    Attributes:
        t0: Launches [µs].
        ec: Share of the datasheet's peak that the matrix products reach.
        em: Share of the datasheet's bandwidth that moving queries, keys, values and outputs
            reaches.
        tau: Time of a tile in addition to its products [µs].
        cast: Memory traffic for the latents of all tokens in addition to the attention, as a
            multiple of their bytes in bf16. It is the cache write, and conversions of an fp8 cache.
        compute: Bytes of one operand element of the products: 2 for bf16, 1 for fp8.
        attends: Form of the attention: `expanded` (each head has its own keys and values) or
            `absorbed` (all heads use the latents).
        tiles: Form of the query tiles: `plain` tiles have rows of one head, `packed` tiles of
            several.
        stair: Cost of a partial last wave, from 0 (its share of a wave) to 1 (a full wave).
        RANGES: A line for each fitted parameter: its name, and its minimum and maximum in a fit.
        CHOICES: Forms of the model that a fit tries, each as values of fields that are not fitted.
        PRIOR_DEVIATION: Scale, in natural logarithms, of a fit's penalty for a parameter's distance
            from its default value.
    """

    RANGES = """
        t0 0.5 120
        ec 0.02 1.2
        em 0.05 1.2
        tau 0.005 30
        cast 0.05 40
    """
    CHOICES = tuple(
        {"attends": form, "tiles": tiles, "stair": stair}
        for form in ("expanded", "absorbed")
        for tiles in ("plain", "packed")
        for stair in (0.4, 1.0)
    )
    PRIOR_DEVIATION = 0.8

    compute: int = 2
    attends: Literal["expanded", "absorbed"] = "expanded"
    tiles: Literal["plain", "packed"] = "plain"
    stair: float = 0.4
    t0: float = 14
    ec: float = 0.65
    em: float = 0.8
    tau: float = 1.2
    cast: float = 2

    def us(self, machine: GpuParameters, *shape: Array) -> Array:
        batch, heads, length, *past = shape
        rows = PREFILL_ROWS[self.tiles]
        count = heads * ceil(length / rows)
        tile_tokens = length * 0 + rows
        if self.tiles == "packed":
            tile_tokens = where(length < rows, maximum(1, rows / heads), rows)
            count = minimum(count, ceil(length * heads / rows))
        width = WIDTHS_OF_FORMS[self.attends]
        mean_keys = (length + tile_tokens) / 2
        last_keys = length
        if past:
            seen_keys, width = past
            mean_keys = seen_keys + tile_tokens / 2
            last_keys = seen_keys + length / 2
        tiles = batch * count / machine.sms
        waves = tiles + self.stair * (ceil(tiles) - tiles)
        rate = self.ec * machine.peak(self.compute) / machine.sms
        us_per_key = 2 * rows * width / rate
        tile = us_per_key * mean_keys + self.tau
        compute = maximum(waves * tile, us_per_key * last_keys + self.tau)
        # The absorbed form moves only queries and outputs.
        sides = 2 if self.attends == "expanded" else 1
        elements = heads * width * sides + self.cast * (LATENT + ROPE)
        moved = 2 * batch * length * elements
        return self.t0 + compute + moved / (self.em * machine.memory)


TILE_HEADS = 64  # heads of a tile
SCALE = 4  # bytes of an index key's scale
PRODUCT_SHARE = 0.6  # share of the peak that projections of many sequences reach
TOP_K_US = 1e-4  # time for each token of one sequence that the top-k reads
# default of SparseDecode.host, if no batch without CUDA graphs is measured
HOST_RATIO = 1.7


class SparseDecode(KernelModel, frozen=True, tag="dsa_decode_module"):
    """Time model of a DeepSeek-sparse-attention module in one decode step, on one rank.

    The module is the attention part of one layer: projections, indexer, top-k and attention over
    the selected latents.

    The method `us` takes, in this order: sequences, query heads of the rank, and cached tokens per
    sequence; then sizes of the layer: hidden size, q_lora_rank, kv_lora_rank, RoPE, NoPE and value
    widths, index heads (0 without an indexer), their width, and tokens that the top-k selects. A
    tile is up to 64 heads of one sequence, on one streaming multiprocessor (SM).

    Attributes:
        t0: Launches of projections and attention [µs].
        ti: Time of the launches of the indexer's kernels [µs].
        t1: Time of small kernels, for each doubling of the number of sequences [µs].
        em: Share of the datasheet's bandwidth that reading weights reaches.
        a1: Additional time of each sequence, of which more heads take more [µs]. A sequence takes
            a1 · (1 + query heads / `heads`).
        ei: Share of the datasheet's bandwidth that reading index keys reaches.
        kt: Time of the top-k in every wave, which is one sequence on each SM [µs].
        ta: Time of an attention tile in addition to its read [µs]. A tile is 64 heads of a
            sequence.
        ts: Time in which a tile reads one selected token [µs].
        he: Minimum time of a module without an indexer if the batch has no CUDA graph, because the
            CPU then launches each kernel [µs].
        bytes: Bytes of one weight of the projections, with scales.
        graphs: Maximum number of sequences for which the engine has a CUDA graph; 0 if it has one
            for every batch.
        heads: Number of query heads that add as much time to a sequence as `a1`.
        walk: `whole` if one SM reads all tokens of a tile, `shared` if all SMs share them.
        host: Factor on `he` if the module has an indexer.
        RANGES, CHOICES, SOFTNESS, PRIOR_DEVIATION: How `calibrate` fits the parameters; see
            `KernelModel`.
    """

    RANGES = """
        t0 1 400
        ti 0.1 150
        t1 0.05 60
        em 0.1 1.2
        a1 0.005 10
        ei 0.02 1.2
        kt 0.1 150
        ta 0.1 500
        ts 1e-5 0.5
        he 50 3000
    """
    CHOICES = tuple(
        {"graphs": graphs, "heads": heads, "walk": walk, "host": host}
        for graphs, host in (
            (0, HOST_RATIO),
            (256, HOST_RATIO),
            (512, HOST_RATIO),
            (256, 3.0),
            (512, 3.0),
        )
        for heads in (60, 500)
        for walk in ("whole", "shared")
    )
    SOFTNESS = 0.06
    PRIOR_DEVIATION = 0.8

    bytes: float = 2.0
    graphs: int = 0
    heads: int = 500
    walk: Literal["whole", "shared"] = "whole"
    host: float = HOST_RATIO
    t0: float = 40
    ti: float = 25
    t1: float = 3.5
    em: float = 0.85
    a1: float = 0.25
    ei: float = 0.6
    kt: float = 6
    ta: float = 20
    ts: float = 8e-3
    he: float = 600

    def us(self, machine: GpuParameters, *shape: Array) -> Array:
        batch, heads, length, *widths, top = shape
        *_, index_heads, index_width = widths
        has_indexer = index_heads > 0
        weights, absorbed = weights_of(heads, *widths)
        read = (weights * self.bytes + 2 * absorbed) / (self.em * machine.memory)
        peak = machine.peak(self.bytes)
        products = batch * (2 * weights / peak + 2 * absorbed / machine.bf16) / PRODUCT_SHARE
        launches = self.t0 + self.t1 * log2(batch + 1)
        us = launches + hypot(read, products) + self.a1 * batch * (1 + heads / self.heads)

        scores = self.scores_us(machine, batch, length, index_width)
        index_us = self.ti + (scores + self.top_k_us(machine, batch, length, top))
        us = us + where(has_indexer, index_us, 0.0)

        tiles = batch * ceil(heads / TILE_HEADS) / machine.sms
        waves = maximum(1.0, tiles)
        walks = tiles if self.walk == "shared" else waves
        us = us + waves * self.ta + walks * self.ts * minimum(length, top)
        if not self.graphs:
            return us
        host = self.he * where(has_indexer, self.host, 1.0) * (batch > self.graphs)
        return maximum(us, host)

    def scores_us(
        self, machine: GpuParameters, batch: Array, length: Array, width: Array
    ) -> Array:
        """Return the microseconds in which the indexer of one layer reads its cached index keys.

        The launches of the indexer's kernels are not included.

        Args:
            machine: Datasheet rates of the GPU.
            batch: Number of sequences.
            length: Cached tokens of each sequence.
            width: Elements of an index key of one token; each takes one byte.
        """
        return (width + SCALE) * batch * length / (self.ei * machine.memory)

    def top_k_us(
        self, machine: GpuParameters, batch: Array, length: Array, top: Array
    ) -> Array:
        """Return the microseconds in which one layer selects the tokens with the highest scores.

        They are 0 if every token is selected anyway.

        Args:
            machine: Datasheet rates and sizes of the GPU.
            batch: Number of sequences.
            length: Cached tokens of each sequence.
            top: Number of tokens that are selected per sequence.
        """
        waves = maximum(1.0, batch / machine.sms)
        return where(length > top, waves * (self.kt + TOP_K_US * length), 0.0)


def weights_of(heads: Array, *widths: Array) -> tuple[Array, Array]:
    """Return two counts of weights of one layer's latent attention (MLA) on one rank.

    They give the bytes and FLOPs of the projections. The first is the number of weights in the
    projections, including the indexer's. The second is the number of weights in the two absorbed
    matrices, W_UK and W_UV.

    Args:
        heads: Query heads on the rank.
        widths: Hidden size, q_lora_rank, kv_lora_rank, RoPE, NoPE and value widths, index heads (0
            without an indexer), and the width of an index key.
    """
    hidden, rank, latent, rope, nope, value, index_heads, index_width = widths
    down = hidden * (rank + latent + rope)
    projections = down + rank * heads * (nope + rope) + heads * value * hidden
    indexer = rank * index_width * index_heads + hidden * (index_width + index_heads)
    return projections + where(index_heads > 0, indexer, 0.0), latent * heads * (nope + value)


MAX_TOKENS = 1024  # maximum tokens of the measured modules
# Sizes of DeepSeek-V3, which has the measured modules: hidden size, q_lora_rank, kv_lora_rank,
# RoPE, NoPE and value widths.
WIDTHS = (7168, 1536, 512, 64, 128, 128)


class MlaModule(KernelModel, frozen=True, tag="mla_decode_module"):
    """Time model of latent attention (MLA) with all its kernels in one decode step of one layer.

    The time is that of the GEMMs and the attention, which other models predict, plus an overhead
    for the small kernels between them. The small kernels are norms, RoPE, quantisation, copies and
    the cache write. Only their overhead is fitted. The method `us` takes, in this order: sequences,
    query heads of the rank, cached tokens per sequence, and the microseconds of the GEMMs and the
    attention.

    Attributes:
        t0: Fixed overhead [µs].
        t1: Overhead for each doubling of the number of new tokens [µs].
        th: Overhead for each head [µs].
        tb: Overhead for each new token [µs].
        tbh: Overhead for each head of each new token [µs].
        RANGES, SOFTNESS, PRIOR_DEVIATION: How `calibrate` fits the parameters; see `KernelModel`.
    """

    RANGES = """
        t0 0.1 150
        t1 0.01 40
        th 1e-3 2
        tb 1e-4 1
        tbh 1e-5 0.05
    """
    SOFTNESS = 0.06
    PRIOR_DEVIATION = 1.0

    t0: float = 10
    t1: float = 2
    th: float = 0.05
    tb: float = 0.02
    tbh: float = 1e-3

    def overhead_us(self, tokens: Array, heads: Array) -> Array:
        """Return the microseconds of the small kernels of one layer's MLA in one decode step.

        They are norms, RoPE, quantisation, copies and the cache write.

        Args:
            tokens: New tokens of all sequences together. More than 1,024 count as 1,024.
            heads: Query heads on the rank.
        """
        tokens = clip(tokens, 1, MAX_TOKENS)
        fixed = self.t0 + self.t1 * log2(tokens) + self.th * heads
        return fixed + tokens * (self.tb + self.tbh * heads)

    def us(self, machine: GpuParameters, *shape: Array) -> Array:
        batch, heads, _, kernels = shape
        return kernels + self.overhead_us(batch, heads)
