"""MLA decode in the absorbed form: all heads attend to one latent of 512 and a RoPE key of 64.

As decode attention, with tiles of 64 heads and blocks of 64 tokens, and products that near the
tensor cores' rate:

    n      = batch·⌈q_heads/64⌉,  blocks = ⌈kv_len/64⌉
    tile   = tau + ⌈blocks/s⌉·max(64·576·bytes / r, 2·64·64·1088 / (ec·P/SMs)) / pace
    memory = that of decode attention / pace

MLA prefill, expanded (192/128 per head) or absorbed (576/512 per head, 3.4 times the FLOPs).

Query tiles have 128 rows of one head, or 64 rows into which heads are packed. If a prompt has fewer
than 64 tokens, such a tile covers max(1, 64/q_heads) of them.

    plain:  tiles = batch·q_heads·⌈S/128⌉            packed: tiles = batch·min(q_heads·⌈S/64⌉,
    ⌈S·q_heads/64⌉)
    t     = t0 + max(waves·tile, longest tile) + (bytes + cast·latents)/(em·BW),  tile =
    2·rows·width·keys / (ec·P/SMs) + tau
    waves = x + stair·(⌈x⌉ − x),  x = tiles/SMs

One decode step of a whole DeepSeek-sparse-attention module: projections, indexer, top-k, attention
over chosen latents.

b sequences, h heads of the rank, L cached tokens, H the residual stream; W: weights of the
projections in their own format (s bytes each), Wb: the two absorbed matrices, always in bf16. [i]:
1 where the layer has an indexer, else 0.

    W  = H·(q_rank + latent + rope) + q_rank·h·(nope + rope) + h·v·H + [i]·(q_rank·d·heads_i + H·(d
    + heads_i)), Wb = latent·h·(nope + v)
    t  = t0 + t1·log2(b + 1) + hypot((W·s + 2·Wb)/(em·BW), b·(2·W/P_s + 2·Wb/P_bf16)/0.6) + a1·b·(1
    + h/heads)
       + [i]·(ti + (d + 4)·b·L/(ei·BW) + [L > top]·max(1, b/SMs)·(kt + 10⁻⁴·L)) + max(1, x)·ta +
       walks·ts·min(L, top)
    x  = b·⌈h/64⌉/SMs, walks = max(1, x) where a tile is walked by one SM, x where all SMs share the
    walks t is at least he, and host·he with an indexer, where b exceeds what the engine's CUDA
    graphs hold: the host launches then

The indexer reads one key of d + 4 bytes a token, whatever the heads: engines keep them in fp8 with
a scale, whatever the format of the cache. Attention's tiles take 64 heads and walk at most `top`
tokens.

Decode step of a whole MLA module: its matrix products and its attention, and what the module takes
beyond these kernels.

    overhead = t0 + t1·log2(b) + th·h + b·(tb + tbh·h)        b tokens, h heads of the rank

The overhead is the small kernels between the products: norms, RoPE, quantisation, copies and the
write of the cache.
"""

from typing import Annotated, ClassVar, Literal

from kvcalc.arithmetic import ceil, clip, hypot, log2, maximum, minimum, select, where
from kvcalc.records import Settings
from kvcalc.timing.kernel_models.flash_attention import best_split, misses
from kvcalc.timing.kernel_models.kernel_model import (
    Array,
    GpuParameters,
    KernelModel,
    within,
)

ROWS, BLOCK, LATENT, ROPE = 64, 64, 512, 64
COMBINE = 2.5  # µs of the kernel that combines a split


class MlaDecode(KernelModel, frozen=True, tag="mla_decode"):
    """One decode step of latent attention.

    Attributes:
        t0: Launch, prologue and cache write [µs].
        tau: Time of a tile in addition to its read [µs].
        r: Rate at which one SM reads latents [bytes/µs].
        ec: Share of the datasheet's bf16 peak.
        cap: Share of the L2 in which a cache stays between calls.
        tramp: Ramp of the memory, and the tail [µs].
        cast: Passes over the whole cache before the attention, in its own bytes. Converting an fp8
            cache to bf16 reads one and writes two; a bf16 cache needs almost none.
        reach: Share of the datasheet's bandwidth that a long read reaches.
        h32, h64: Relative speed of kernels for 17 to 32 and for 33 to 64 heads, if they use several
            tiles for one cache.
        bytes: Bytes of one cached element.
    """

    bytes: int = 2
    cold: bool = False
    t0: Annotated[float, within(0.3, 80)] = 6.3
    tau: Annotated[float, within(0.05, 30)] = 5.5
    r: Annotated[float, within(5e3, 2e6)] = 3e5
    ec: Annotated[float, within(0.05, 1.2)] = 0.9
    cap: Annotated[float, within(0.05, 1.5)] = 0.4
    tramp: Annotated[float, within(0.1, 60)] = 7
    cast: Annotated[float, within(1e-3, 40)] = 0.05
    reach: Annotated[float, within(0.5, 1.1)] = 0.95
    h32: Annotated[float, within(0.3, 1.5)] = 1
    h64: Annotated[float, within(0.3, 1.5)] = 1

    def us(self, machine: GpuParameters, *shape: Array) -> Array:
        batch, heads, length = shape
        read = batch * length * (LATENT + ROPE) * self.bytes
        miss = misses(read, self.cap, machine.l2, self.cold)
        memory = miss * (read / (self.reach * machine.memory) + self.tramp)
        rate = self.ec * machine.bf16 / machine.sms
        pace = select([heads <= 16, heads <= 32, heads <= 64], [1.0, self.h32, self.h64], 1.0)
        memory = memory / pace
        block = (
            maximum(
                BLOCK * (LATENT + ROPE) * self.bytes / self.r,
                2 * ROWS * BLOCK * (2 * LATENT + ROPE) / rate,
            )
            / pace
        )
        tiles = batch * ceil(heads / ROWS) / machine.sms
        best = best_split(tiles, ceil(length / BLOCK), self.tau, block, memory, COMBINE)
        moved = 2 * batch * heads * (2 * LATENT + ROPE) + self.cast * read
        return self.t0 + best + moved / machine.memory


PREFILL_ROWS = {"plain": 128, "packed": 64}
KEY_WIDTH = 512 + 64
EXPANDED, ABSORBED = 192 + 128, 576 + 512  # widths of a key and a value together


class MlaPrefill(KernelModel, frozen=True, tag="mla_prefill"):
    """Causal latent attention of `batch` prompts of seq_len tokens, with q_heads heads.

    Attributes:
        t0: Launches [µs].
        ec: Share of the datasheet's peak.
        em: Share of the bandwidth that queries, keys, values and outputs reach.
        tau: Time of a tile in addition to its products [µs].
        cast: Passes over the latents of all tokens, two bytes per element, in addition to the
            attention: the cache write, and conversions of an fp8 cache.
        compute: Bytes of an operand of the products.
        attends: Form of the attention: expanded or absorbed.
        tiles: Form of the tiles: plain or packed.
        stair: Part by which a partial last wave counts as a full wave.

    `us` takes batch, q_heads and seq_len. With a past or other widths it takes two more arrays: the
    mean keys that a query sees, and the width of a key and a value together.
    """

    CHOICES: ClassVar[tuple[Settings, ...]] = tuple(
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

    def us(self, machine: GpuParameters, *shape: Array) -> Array:
        batch, heads, length, *seen = shape
        expanded, rows = self.attends == "expanded", PREFILL_ROWS[self.tiles]
        width: Array | int = EXPANDED if expanded else ABSORBED
        count, covered = heads * ceil(length / rows), length * 0 + rows
        if self.tiles == "packed":
            packed = ceil(length * heads / rows)
            covered = where(length < rows, maximum(1, rows / heads), rows)
            count = minimum(count, packed)
        keys, last = (length + covered) / 2, length
        if seen:
            keys, width, last = seen[0] + covered / 2, seen[1], seen[0] + length / 2
        tiles = batch * count / machine.sms
        each = 2 * rows * width / (self.ec * machine.peak(self.compute) / machine.sms)
        waves = tiles + self.stair * (ceil(tiles) - tiles)
        # absorbed: queries and outputs alone
        each_token = heads * width * (2 if expanded else 1) + self.cast * KEY_WIDTH
        moved = 2 * batch * length * each_token
        compute = maximum(waves * (each * keys + self.tau), each * last + self.tau)
        return self.t0 + compute + moved / (self.em * machine.memory)


TILE_HEADS = 64  # heads of a tile
SCALE = 4  # bytes of an index key's scale
REACHED = 0.6  # of the peak, by projections of many sequences
CHOOSING = 1e-4  # µs a token that the top-k looks at, of one sequence
# launches of a module with an indexer for each of one without, where nothing else is known
HOST = 1.7


class SparseDecode(KernelModel, frozen=True, tag="dsa_decode_module"):
    """One decode step of one layer.

    Attributes:
        t0: Launches of projections and attention [µs].
        ti: Launches of the indexer [µs].
        t1: Small kernels, for each doubling of the sequences [µs].
        em: Share of the bandwidth that reading weights reaches.
        a1: Time of each sequence [µs].
        ei: Share of the bandwidth that reading index keys reaches.
        kt: A top-k, in every wave of sequences [µs].
        ta: Time of an attention tile in addition to its read [µs].
        ts: Read of one token by a tile [µs].
        he: Launches by the host, without an indexer [µs].
        bytes: Bytes of a weight of the projections.
        graphs: Maximum sequences in a CUDA graph; 0 if all batches use graphs.
        heads: Number of heads of a sequence that cost as much as the sequence.
        walk: `whole` if one SM reads all tokens of a tile, `shared` if all SMs share them.
        host: Launches of a module with an indexer ÷ launches without an indexer.
    """

    CHOICES: ClassVar[tuple[Settings, ...]] = tuple(
        {"graphs": graphs, "heads": heads, "walk": walk, "host": host}
        for graphs, host in (
            (0, HOST),
            (256, HOST),
            (512, HOST),
            (256, 3.0),
            (512, 3.0),
        )
        for heads in (60, 500)
        for walk in ("whole", "shared")
    )
    SOFTNESS: ClassVar[float] = 0.06
    PULL: ClassVar[float] = 0.8

    bytes: float = 2.0
    graphs: int = 0
    heads: int = 500
    walk: Literal["whole", "shared"] = "whole"
    host: float = HOST
    t0: Annotated[float, within(1, 400)] = 40
    ti: Annotated[float, within(0.1, 150)] = 25
    t1: Annotated[float, within(0.05, 60)] = 3.5
    em: Annotated[float, within(0.1, 1.2)] = 0.85
    a1: Annotated[float, within(0.005, 10)] = 0.25
    ei: Annotated[float, within(0.02, 1.2)] = 0.6
    kt: Annotated[float, within(0.1, 150)] = 6
    ta: Annotated[float, within(0.1, 500)] = 20
    ts: Annotated[float, within(1e-5, 0.5)] = 8e-3
    he: Annotated[float, within(50, 3000)] = 600

    def us(self, machine: GpuParameters, *shape: Array) -> Array:
        """shape: batch, q_heads of the rank, kv_len; then the layer's hidden size, q_lora_rank,
        kv_lora_rank, rope, nope and value widths, index heads (0: no indexer) and their width,
        top-k.
        """
        batch, heads, length, *_, width, top = shape
        indexed = shape[9] > 0
        weights, absorbed = weights_of(*shape[1:2], *shape[3:11])
        read = (weights * self.bytes + 2 * absorbed) / (self.em * machine.memory)
        peak = machine.peak(self.bytes)
        products = batch * (2 * weights / peak + 2 * absorbed / machine.bf16) / REACHED
        us = (
            self.t0
            + self.t1 * log2(batch + 1)
            + hypot(read, products)
            + self.a1 * batch * (1 + heads / self.heads)
        )
        chosen = self.scores_us(machine, batch, length, width) + self.top_k_us(
            machine, batch, length, top
        )
        us = us + where(indexed, self.ti + chosen, 0.0)
        tiles = batch * ceil(heads / TILE_HEADS) / machine.sms
        waves = maximum(1.0, tiles)
        us = (
            us
            + waves * self.ta
            + (tiles if self.walk == "shared" else waves) * self.ts * minimum(length, top)
        )
        host = (
            self.he * where(indexed, self.host, 1.0) * (batch > self.graphs)
            if self.graphs
            else 0.0
        )
        return maximum(us, host)

    def scores_us(
        self, machine: GpuParameters, batch: Array, length: Array, width: Array
    ) -> Array:
        """Return the microseconds in which the indexer reads the index keys, without its
        launches."""
        return (width + SCALE) * batch * length / (self.ei * machine.memory)

    def top_k_us(
        self, machine: GpuParameters, batch: Array, length: Array, top: Array
    ) -> Array:
        """Return the microseconds of the choice among the scores; 0 if all tokens are read
        anyway."""
        return where(
            length > top,
            maximum(1.0, batch / machine.sms) * (self.kt + CHOOSING * length),
            0.0,
        )


def weights_of(
    heads: Array,
    hidden: Array,
    rank: Array,
    latent: Array,
    rope: Array,
    nope: Array,
    value: Array,
    index: Array,
    width: Array,
) -> tuple[Array, Array]:
    """Return the elements of the projections of one rank, and of its two absorbed matrices."""
    projections = (
        hidden * (rank + latent + rope) + rank * heads * (nope + rope) + heads * value * hidden
    )
    indexer = where(index > 0, rank * width * index + hidden * (width + index), 0.0)
    return projections + indexer, latent * heads * (nope + value)


MAX_TOKENS = 1024  # of the measured modules
# Of DeepSeek-V3, whose modules were measured: hidden size, q_lora_rank, kv_lora_rank, RoPE, key and
# value widths.
WIDTHS = (7168, 1536, 512, 64, 128, 128)


class MlaModule(KernelModel, frozen=True, tag="mla_decode_module"):
    """The overhead of one module.

    Attributes:
        t0: Microseconds of each module.
        t1: Microseconds for each doubling of the tokens.
        th: Microseconds for each head.
        tb: Microseconds for each token.
        tbh: Microseconds for each head of each token.
    """

    SOFTNESS: ClassVar[float] = 0.06
    PULL: ClassVar[float] = 1.0

    t0: Annotated[float, within(0.1, 150)] = 10
    t1: Annotated[float, within(0.01, 40)] = 2
    th: Annotated[float, within(1e-3, 2)] = 0.05
    tb: Annotated[float, within(1e-4, 1)] = 0.02
    tbh: Annotated[float, within(1e-5, 0.05)] = 1e-3

    def overhead_us(self, tokens: Array, heads: Array) -> Array:
        """Return the microseconds in addition to the kernels. Tokens beyond the measured maximum
        count as the maximum."""
        counted = clip(tokens, 1, MAX_TOKENS)
        return (
            self.t0
            + self.t1 * log2(counted)
            + self.th * heads
            + counted * (self.tb + self.tbh * heads)
        )

    def us(self, machine: GpuParameters, *shape: Array) -> Array:
        """Return the microseconds of the module. shape: batch, q_heads, kv_len, and the
        microseconds of its kernels."""
        batch, heads, _, kernels = shape
        return kernels + self.overhead_us(batch, heads)
