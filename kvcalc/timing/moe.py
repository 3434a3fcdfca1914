"""A mixture of experts on one rank: top-k of given logits, sort, both products of the experts, activation, weighted sum.

T tokens of width H meet k of E experts of width F, spread over ep ranks and cut into tp columns: I = F/tp, N1 = 2·I where
gated, else I. Of a rank's E' = E/ep experts, A are touched, by R pairs of a token and an expert; tiles(m) = Σ over experts
of ⌈pairs/m⌉. b: bytes of a weight; P: the peak of what it computes in.

    t       = t0 + product(N1, H) + product(H, I) + 2·X·(H + N1 + I)/(be·BW) + ts·T·k
    product(N, K) = pnorm_p(compute, (A·N·K·b + R·(K·b + 2·N)) / (em·BW))
    compute = min over tiles m × n of max(tiles(m)·⌈N/n⌉/SMs · full, (m + n)·K·b / r1)
    full    = max(2·m·n·K / (ec·P/SMs), (m + n)·K·b / r) + tau

X: pairs that elementwise kernels move: all T·k where a kernel keeps every pair, R where it permutes its own. No
communication, no shared expert, no product with the gate: logits are given.
"""

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from kvcalc.timing.law import Array, Law, pnorm, within
from kvcalc.timing.routing import BALANCED, TILE_ROWS

if TYPE_CHECKING:
    from kvcalc.timing.figures import Figures

MENU = ((16, 128), (32, 128), (64, 128), (128, 128))  # of autotuned grouped products
TUNED = ((16, 64), (16, 128), (32, 128), (64, 128), (128, 128), (128, 256))  # where the engine ships a tuned file
FILLED = 0.9  # Marlin: the share of a tile's rows that an expert's mean pairs may fill


class Moe(Law, frozen=True, tag="moe"):
    """One call of a fused MoE layer on one rank.

    t0 [µs]: all launches. ec: of the datasheet's peak, what a full wave of tiles reaches. em: of the bandwidth, what
    streaming expert weights reaches. p: how sharply compute and memory overlap (1: one after the other). r [bytes/µs]: at
    what rate one SM takes in operands when all are at it; r1 [bytes/µs]: a lone tile, bound by latency. tau [µs]: prologue
    and epilogue of a tile. be: of the bandwidth, what permuting, activating, quantising and summing reach. ts [µs]: sorting,
    for each pair of a token and an expert.

    bytes: of one weight, scales included. compute: bytes of the operands of the products. gated: two matrices wide, or one.
    tiles: the kernel's rule for m × n. tuned: (experts of a rank, I) for which the engine ships tuned tiles.
    """

    SOFTNESS: ClassVar[float] = 0.06
    PULL: ClassVar[float] = 0.8
    CHOICES: ClassVar[tuple[dict[str, Any], ...]] = tuple(
        {"tiles": rule} for rule in ("menu", "vllm", "sglang", "marlin", "openai")
    )

    bytes: float = 2.0
    compute: float = 2
    gated: bool = True
    tiles: Literal["menu", "vllm", "vllm_block", "sglang", "sglang_block", "marlin", "openai"] = "menu"
    tuned: tuple[tuple[int, int], ...] = ()
    t0: Annotated[float, within(1, 150)] = 22
    ec: Annotated[float, within(0.05, 1)] = 0.8
    em: Annotated[float, within(0.05, 1)] = 0.9
    p: Annotated[float, within(1, 10)] = 1.4
    r: Annotated[float, within(1e4, 3e6)] = 1e5
    r1: Annotated[float, within(3e3, 1e6)] = 6e4
    tau: Annotated[float, within(0.001, 30)] = 1
    be: Annotated[float, within(0.02, 100)] = 0.3
    ts: Annotated[float, within(1e-5, 0.1)] = 4e-4

    def us(self, machine: "Figures", *shape: Array) -> Array:
        """shape: tokens, hidden, inter, topk, experts, moe_tp, moe_ep; then what stands on the rank: pairs, experts touched,
        tiles of TILE_ROWS rows each. Where these are absent or 0, a uniform router's.
        """
        tokens, hidden, inter, top, experts, tp, ep, *given = shape
        rows, touched, *tiles = _given(given, tokens, top, experts, ep)
        width, held, pairs = inter / tp, experts / ep, tokens * top
        wide = width * (2 if self.gated else 1)
        plans = self._plans(tokens, pairs / held, held, width, tiles)
        moved = rows if self.tiles == "menu" else pairs
        us = self.t0 + 2 * moved * (hidden + wide + width) / (self.be * machine.memory) + self.ts * pairs
        for n, k in ((wide, hidden), (hidden, width)):
            read = (touched * n * k * self.bytes + rows * (k * self.bytes + 2 * n)) / (self.em * machine.memory)
            us = us + pnorm(self.p, self._compute(machine, plans, n, k), read)
        return us

    def _compute(self, machine: "Figures", plans: list[tuple[Array, Array, Array]], n: Array, k: Array) -> Array:
        import numpy as np

        rate = self.ec * machine.peak(self.compute) / machine.sms
        best: Array | None = None
        for count, rows, columns in plans:
            operands = (rows + columns) * k * self.bytes
            full = np.maximum(2 * rows * columns * k / rate, operands / self.r) + self.tau
            time = np.maximum(count * np.ceil(n / columns) / machine.sms * full, operands / self.r1)
            best = time if best is None else np.minimum(best, time)
        assert best is not None
        return best

    def _plans(
        self, tokens: Array, mean: Array, held: Array, width: Array, tiles: list[Array]
    ) -> list[tuple[Array, Array, Array]]:
        """(tiles, rows, columns) of each plan that the kernel may take. mean: pairs of the group to an expert of the rank."""
        import numpy as np

        count = dict(zip(TILE_ROWS, tiles, strict=True))
        if self.tiles == "menu":
            return [(count[m], tokens * 0 + m, tokens * 0 + n) for m, n in MENU]
        rows, columns = self._tile(tokens, mean, held)
        own = np.select([rows == m for m in TILE_ROWS], tiles)
        known = np.zeros(np.shape(own), bool)
        for e, i in self.tuned:
            known |= (held == e) & (width == i)
        if not known.any():
            return [(own, rows, columns)]
        return [(np.where(known, count[m], own), np.where(known, m, rows), np.where(known, n, columns)) for m, n in TUNED]

    def tile_changes(self, top: int, experts: int, ranks: int) -> tuple[float, ...]:
        """Return the numbers of tokens up to which `_tile` gives the same tile: the next tile may take less time."""
        each = experts / top  # tokens that give each expert a row
        found = {
            "vllm": (32, 64, 96, 512), "vllm_block": (64,), "sglang": (experts / ranks,),
            "marlin": tuple(FILLED * m * each for m in (8, 16, 32, 48)), "openai": (16 * each, 32 * each, 64 * each),
        }  # fmt: skip
        return found.get(self.tiles, ())

    def _tile(self, tokens: Array, mean: Array, held: Array) -> tuple[Array, Array]:
        """Rows and columns of the one tile that the kernel takes without a tuned file."""
        import numpy as np

        if self.tiles == "vllm":
            rows = np.select([tokens <= 32, tokens <= 96, tokens <= 512], [16.0, 32.0, 64.0], 128.0)
            return rows, np.where(tokens <= 64, 64.0, 128.0)
        if self.tiles == "vllm_block":
            return np.where(tokens <= 64, 16.0, 64.0), tokens * 0 + 128
        if self.tiles == "sglang":
            return np.where(tokens <= held, 16.0, 64.0), np.where(tokens <= held, 32.0, 64.0)
        if self.tiles == "sglang_block":
            return tokens * 0 + 64, tokens * 0 + 128
        if self.tiles == "marlin":
            fits = [mean < FILLED * m for m in (8, 16, 32, 48)]
            return np.select(fits, [8.0, 16.0, 32.0, 48.0], 64.0), tokens * 0 + 128
        return np.select([mean <= 16, mean <= 32, mean <= 64], [16.0, 32.0, 64.0], 128.0), tokens * 0 + 128


def _given(given: list[Array], tokens: Array, top: Array, experts: Array, ranks: Array) -> list[Array]:
    """Pairs, experts touched and tiles on the rank: those given, a uniform router's where they are absent or 0."""
    import numpy as np

    if given and bool((given[0] > 0).all()):
        return given
    load = BALANCED.load(tokens, top, experts, ranks)
    uniform = [load.rows, load.touched, *load.tiles]
    return [np.where(given[0] > 0, g, u) for g, u in zip(given, uniform, strict=True)] if given else uniform
