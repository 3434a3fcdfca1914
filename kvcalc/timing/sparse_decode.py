"""One decode step of a whole DeepSeek-sparse-attention module: projections, indexer, top-k, attention over chosen latents.

b sequences, h heads of the rank, L cached tokens, H the residual stream; W: weights of the projections in their own format
(s bytes each), Wb: the two absorbed matrices, always in bf16. [i]: 1 where the layer has an indexer, else 0.

    W  = H·(q_rank + latent + rope) + q_rank·h·(nope + rope) + h·v·H + [i]·(q_rank·d·heads_i + H·(d + heads_i)),
    Wb = latent·h·(nope + v)
    t  = t0 + t1·log2(b + 1) + hypot((W·s + 2·Wb)/(em·BW), b·(2·W/P_s + 2·Wb/P_bf16)/0.6) + a1·b·(1 + h/heads)
       + [i]·(ti + (d + 4)·b·L/(ei·BW) + [L > top]·max(1, b/SMs)·(kt + 10⁻⁴·L)) + max(1, x)·ta + walks·ts·min(L, top)
    x  = b·⌈h/64⌉/SMs, walks = max(1, x) where a tile is walked by one SM, x where all SMs share the walks
    t is at least he, and host·he with an indexer, where b exceeds what the engine's CUDA graphs hold: the host launches then

The indexer reads one key of d + 4 bytes a token, whatever the heads: engines keep them in fp8 with a scale, whatever the
format of the cache. Attention's tiles take 64 heads and walk at most `top` tokens.
"""

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from kvcalc.timing.law import Array, Law, within

if TYPE_CHECKING:
    from kvcalc.timing.figures import Figures

ROWS = 64  # heads of a tile
SCALE = 4  # bytes of an index key's scale
REACHED = 0.6  # of the peak, by projections of many sequences
CHOOSING = 1e-4  # µs a token that the top-k looks at, of one sequence
HOST = 1.7  # launches of a module with an indexer for each of one without, where nothing else is known


class SparseDecode(Law, frozen=True, tag="dsa_decode_module"):
    """One step of one layer.

    t0 [µs]: launches of projections and attention. ti [µs]: launches of the indexer. t1 [µs]: for each doubling of the
    sequences, in their small kernels. em: of the bandwidth, what streaming weights reaches. a1 [µs]: for each sequence. ei:
    of the bandwidth, what reading index keys reaches. kt [µs]: a top-k, in every wave of sequences. ta [µs]: a tile of
    attention beside its walk. ts [µs]: for each token that it walks. he [µs]: the host's launches, without an indexer.

    bytes: of a weight of the projections. graphs: the most sequences that CUDA graphs hold; 0 where all are in graphs.
    heads: as many of a sequence cost what the sequence itself does. walk: `whole` by one SM, or `shared` among all, as kernels do
    that split the walk. host: launches of a module with an indexer for each of one without.
    """

    CHOICES: ClassVar[tuple[dict[str, Any], ...]] = tuple(
        {"graphs": graphs, "heads": heads, "walk": walk, "host": host}
        for graphs, host in ((0, HOST), (256, HOST), (512, HOST), (256, 3.0), (512, 3.0))
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

    def us(self, machine: "Figures", *shape: Array) -> Array:
        """shape: batch, q_heads of the rank, kv_len; then the layer's hidden size, q_lora_rank, kv_lora_rank, rope, nope and
        value widths, index heads (0: no indexer) and their width, top-k.
        """
        import numpy as np

        batch, heads, length, *_, width, top = shape
        indexed = shape[9] > 0
        weights, absorbed = weights_of(*shape[1:2], *shape[3:11])
        read = (weights * self.bytes + 2 * absorbed) / (self.em * machine.memory)
        peak = machine.peak(self.bytes)
        products = batch * (2 * weights / peak + 2 * absorbed / machine.bf16) / REACHED
        us = self.t0 + self.t1 * np.log2(batch + 1) + np.hypot(read, products) + self.a1 * batch * (1 + heads / self.heads)
        chosen = self.scores_us(machine, batch, length, width) + self.top_k_us(machine, batch, length, top)
        us = us + np.where(indexed, self.ti + chosen, 0.0)
        tiles = batch * np.ceil(heads / ROWS) / machine.sms
        waves = np.maximum(1.0, tiles)
        us = us + waves * self.ta + (tiles if self.walk == "shared" else waves) * self.ts * np.minimum(length, top)
        host = self.he * np.where(indexed, self.host, 1.0) * (batch > self.graphs) if self.graphs else 0.0
        return np.maximum(us, host)

    def scores_us(self, machine: "Figures", batch: Array, length: Array, width: Array) -> Array:
        """Return the microseconds in which the indexer reads the index keys, without its launches."""
        return (width + SCALE) * batch * length / (self.ei * machine.memory)

    def top_k_us(self, machine: "Figures", batch: Array, length: Array, top: Array) -> Array:
        """Return the microseconds of the choice among the scores; 0 if all tokens are read anyway."""
        import numpy as np

        return np.where(length > top, np.maximum(1.0, batch / machine.sms) * (self.kt + CHOOSING * length), 0.0)


def weights_of(
    heads: Array, hidden: Array, rank: Array, latent: Array, rope: Array, nope: Array, value: Array, index: Array, width: Array
) -> tuple[Array, Array]:
    """Elements of the projections of one rank, and of its two absorbed matrices."""
    import numpy as np

    projections = hidden * (rank + latent + rope) + rank * heads * (nope + rope) + heads * value * hidden
    indexer = np.where(index > 0, rank * width * index + hidden * (width + index), 0.0)
    return projections + indexer, latent * heads * (nope + value)
