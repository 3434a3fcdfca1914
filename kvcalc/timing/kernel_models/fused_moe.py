"""Experts with tuned tiles in engines: (experts of a rank, columns of an expert on the rank), by
stack,
GPU and format.

Read off the file names `E=…,N=…,device_name=…` in the engines' wheels: vllm 0.24.0,
model_executor/layers/fused_moe/configs, and sglang 0.5.14,
srt/layers/moe/moe_runner/triton_utils/configs (all Triton versions: it falls back from one to
another).

Load of one rank of a mixture of experts: rows, reached experts, and tiles by their number of rows.

A pair is a token on one of its k experts, which is one row of the expert's product. With T tokens
and E experts over `ranks` ranks, every rank waits for the busiest rank. Kernel models use the
figures of the busiest rank.

    an expert's mean    n = T·k/E, or unequal shares of T·k under a skew
    the busiest rank    n' = n·(R + √(2·ln ranks)·σ)/R, R = Σ n on a rank, σ² = R + E/ranks·Var(n):
    the greatest of so many
                        Gaussian draws, within what T tokens can bring; one rank is its own mean
    touched             a = 1 − (1 − n'/T)^T, of each expert
    tiles of m rows     a where n'/a ≤ m/2, else max(a, n'/m + a/2)

A mixture of experts on one rank: top-k of the logits, sort, both products of the experts,
activation, weighted sum.

T tokens of width H use k of E experts of width F. Experts are on ep ranks, and tp divides their
columns: I = F/tp, N1 = 2·I if gated, otherwise I. R pairs of a token and an expert reach A of the
E' = E/ep experts of a rank; tiles(m) = Σ over experts of ⌈pairs/m⌉. b is the bytes of a weight. P
is
the peak of the dtype that computes.

    t       = t0 + product(N1, H) + product(H, I) + 2·X·(H + N1 + I)/(be·BW) + ts·T·k
    product(N, K) = pnorm_p(compute, (A·N·K·b + R·(K·b + 2·N)) / (em·BW)) compute = min over tiles m
    × n of max(tiles(m)·⌈N/n⌉/SMs · full, (m + n)·K·b / r1)
    full    = max(2·m·n·K / (ec·P/SMs), (m + n)·K·b / r) + tau

X is the pairs that elementwise kernels move: T·k if a kernel has every pair, R if it permutes only
its own pairs. The time excludes communication, shared experts and the router.

Cells of experts by format and kernel: the cell of a measured row, and the cell that times the
experts of a pass.

A cell is `format/kernel`, followed by `/ungated` if experts have no gate, because a stack has
different kernels for both.

All-reduce inside one NVLink domain: every rank gets the sum of X bytes of n ranks.

One-shot: each rank reads the others' X. Two-shot: reduce-scatter, then all-gather. Large messages
go to a ring of many channels, or, in a domain of eight, to the switches, which reduce on the way.
The minimum of the four is the time:

    one    = a1 + h·(n − 1) + (n − 1)·X/(e1·NV)
    two    = a2 + h·(n − 1) + 2·(n − 1)/n·X/(e2·g2^d·NV)
    ring   = a3 + h·(n − 1) + 2·(n − 1)/n·X/(e3·g3^d·NV)
    switch = a3 + h·(n − 1) + X/(es·NV), for n ≥ 8

d = log2(n) − 2 counts doublings from four ranks, up to the measured eight. The share of its links
that a rank uses depends on the number of peers.
"""

import math
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import msgspec

from kvcalc.arithmetic import (
    ceil,
    clip,
    expm1,
    is_any,
    log,
    log1p,
    log2,
    maximum,
    minimum,
    power,
    select,
    sqrt,
    where,
)
from kvcalc.layers.cost import ExpertsShape
from kvcalc.records import Settings
from kvcalc.storage.quantization import family
from kvcalc.timing.kernel_models.kernel_model import (
    Array,
    GpuParameters,
    KernelModel,
    pnorm,
    within,
)

_TUNED = {
    ("vllm", "h100-sxm", "bfloat16"): (
        "1: 3072; 8: 1792 2048 3584 4096 7168; 16: 1344 1792 2688; 32: 1792; 62: 256 512; 64: "
        "320 640 1280 1536; 72: "
        "384 768; 128: 192 384 512 928 1856 2880; 256: 512; 512: 128 256 512 "
    ),
    ("vllm", "h100-sxm", "fp8_block"): "256: 128 384; 512: 128 256",
    ("vllm", "h200", "bfloat16"): (
        "8: 1792 2048 3584 4096 7168 14336; 16: 1024 2048; 64: 320 640 1280 2560; 128: 96 192 "
        "384 512 768 1024; 512: 64 "
        "128 256 512 "
    ),
    (
        "vllm",
        "h200",
        "fp8_block",
    ): "8: 2048; 16: 4096; 32: 2048; 128: 384 512 768; 256: 256 512; 384: 128",
    ("sglang", "h100-sxm", "bfloat16"): (
        "1: 3072; 8: 1792 2048 3584 4096 7168; 16: 1024 1344 1856 2048 2688; 20: 2048; 24: "
        "1024; 32: 224 448 896 928 "
        "1792 1856; 64: 192 320 384 464 640 768 928 1280 1536 1856 2688; 65: 1536; 128: 192 232 "
        "352 384 464 512 704 768 "
        "928 1344 1856 2688; 144: 512; 256: 672 1344 2688; 512: 64 128 336 672 1344 2688 "
    ),
    (
        "sglang",
        "h100-sxm",
        "fp8_block",
    ): "64: 1024; 128: 384; 256: 128 384; 257: 128; 272: 128; 512: 128 256",
    ("sglang", "h200", "bfloat16"): (
        "8: 1792 2048 3584 4096 7168 14336; 16: 1024; 20: 1536; 64: 320 640 1280 2560; 128: 192 "
        "384 704 768; 129: 384; "
        "161: 192; 512: 64 128 256 "
    ),
    ("sglang", "h200", "fp8_block"): (
        "64: 512; 80: 640; 128: 384 768; 160: 640; 256: 256; 257: 128 256 512; 264: 256; 384: "
        "128; 385: 128; 513: 512 "
    ),
}


def tuned_sizes(stack: str, gpu: str, kind: str) -> tuple[tuple[int, int], ...]:
    """Return (experts, columns) that have a tuned file; none for an unknown stack, GPU or
    format."""
    results = []
    for group in _TUNED.get((stack, gpu, kind), "").split(";"):
        experts, _, columns = group.partition(":")
        results += [(int(experts), int(width)) for width in columns.split()]
    return tuple(results)


TILE_ROWS = (8, 16, 32, 48, 64, 128)  # the tiles that kernels take


class ExpertLoad(NamedTuple):
    """Load of the busiest rank: pairs, experts with at least one pair, and tiles for each of
    TILE_ROWS."""

    rows: Array
    touched: Array
    tiles: tuple[Array, ...]


class Routing(msgspec.Struct, frozen=True):
    """How a router spreads tokens. skew: 0 is a uniform router.

    Above 0 the loads of the experts lie on a power law of that exponent, x^−skew from 1 to 0.8·T
    rows (from 0.01 to 2 where there are no more pairs than experts), as measured tables call
    `power_law_1.2`: their quantiles, one an expert, scaled to all pairs and cut off at T.
    """

    skew: Annotated[float, msgspec.Meta(ge=0, le=10)] = 0.0

    def load(self, tokens: Array, top: Array, experts: Array, ranks: Array) -> ExpertLoad:
        """Return the load of the busiest of `ranks` ranks for `tokens` tokens of the whole group.

        With a skew, all points must have the same number of experts.
        """
        if not self.skew:
            mean = tokens * top / experts
            return _busiest(tokens, tokens, mean, top, experts / ranks, ranks, 0.0, lambda x: x)
        import numpy as np

        tokens, count = np.asarray(tokens, float), int(np.max(experts))
        each = self._shares(tokens, top, count)
        variance = ((each - (tokens * top / count)[..., None]) ** 2).mean(-1)
        column = tokens[..., None]
        return _busiest(
            tokens,
            column,
            each,
            top,
            count / ranks,
            ranks,
            variance,
            lambda x: x.mean(-1),
        )

    def _shares(self, tokens: Array, top: Array, experts: int) -> Array:
        """Return the mean pairs of each expert, along a last axis, in increasing order."""
        import numpy as np

        many = tokens * top > experts
        low, high = (
            np.where(many, 1.0, 0.01),
            np.where(many, np.maximum(0.8 * tokens, 1.0), 2.0),
        )
        exponent = 1 - self.skew if self.skew != 1 else 1e-9
        quantile = (np.arange(experts) + 0.5) / experts
        first, last = (low**exponent)[..., None], (high**exponent)[..., None]
        drawn = (first + (last - first) * quantile) ** (1 / exponent)
        each = drawn / drawn.sum(-1, keepdims=True) * (tokens * top)[..., None]
        rows: Array = np.minimum(each, tokens[..., None])
        return rows


BALANCED = Routing()


def _busiest(
    tokens: Array,
    column: Array,
    each: Array,
    top: Array,
    local_experts: Array,
    ranks: Array,
    variance: Array,
    average: Callable[[Array], Array],
) -> ExpertLoad:
    """Return the load of the busiest rank.

    Args:
        column: The tokens, with the axes of `each`.
        each: Mean pairs of each expert; with a last axis of experts if they differ.
        local_experts: Experts on the rank.
        variance: Of the pairs among experts.
        average: The mean over the experts.
    """
    mean = local_experts * average(each)
    busiest = mean + sqrt(2 * log(ranks) * (mean + local_experts * variance))
    factor = minimum(busiest, tokens * minimum(top, local_experts)) / maximum(mean, 1e-300)
    if average(column) is not column:
        factor = factor[..., None]
    busy = minimum(each * factor, column)
    share = minimum(busy / column, 1 - 1e-15)
    touched = -expm1(column * log1p(-share))
    tiles = tuple(local_experts * average(_tiles(busy, touched, m)) for m in TILE_ROWS)
    return ExpertLoad(local_experts * average(busy), local_experts * average(touched), tiles)


def _tiles(rows: Array, touched: Array, m: int) -> Array:
    """Return the tiles of m rows of an expert."""
    return where(rows <= touched * m / 2, touched, maximum(touched, rows / m + touched / 2))


MENU = ((16, 128), (32, 128), (64, 128), (128, 128))  # of autotuned grouped products
# where the engine ships a tuned file
TUNED = ((16, 64), (16, 128), (32, 128), (64, 128), (128, 128), (128, 256))
FILLED = 0.9  # Marlin: the share of a tile's rows that an expert's mean pairs may fill


class FusedMoe(KernelModel, frozen=True, tag="moe"):
    """One call of a fused MoE layer on one rank.

    Attributes:
        t0: All launches [µs].
        ec: Share of the datasheet's peak that a full wave of tiles reaches.
        em: Share of the bandwidth that reading expert weights reaches.
        p: Sharpness of the overlap of compute and memory; 1 means one after the other.
        r: Rate at which one SM reads operands if all SMs read [bytes/µs].
        r1: Rate of a single tile, which latency limits [bytes/µs].
        tau: Prologue and epilogue of a tile [µs].
        be: Share of the bandwidth that permuting, activating, quantising and summing reach.
        ts: Sorting of each pair of a token and an expert [µs].
        bytes: Bytes of one weight, including scales.
        compute: Bytes of an operand of the products.
        gated: Whether an expert has two wide matrices.
        tiles: Rule of the kernel for m × n.
        tuned: (experts of a rank, I) for which the engine ships tuned tiles.
    """

    SOFTNESS: ClassVar[float] = 0.06
    PULL: ClassVar[float] = 0.8
    CHOICES: ClassVar[tuple[Settings, ...]] = tuple(
        {"tiles": rule} for rule in ("menu", "vllm", "sglang", "marlin", "openai")
    )

    bytes: float = 2.0
    compute: float = 2
    gated: bool = True
    tiles: Literal[
        "menu", "vllm", "vllm_block", "sglang", "sglang_block", "marlin", "openai"
    ] = "menu"
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

    def us(self, machine: GpuParameters, *shape: Array) -> Array:
        """shape: tokens, hidden, inter, topk, experts, moe_tp, moe_ep; then what stands on the
        rank: pairs, experts touched, tiles of TILE_ROWS rows each. Where these are absent or 0, a
        uniform router's.
        """
        tokens, hidden, inter, top, experts, tp, ep, *given = shape
        rows, touched, *tiles = _loads(given, tokens, top, experts, ep)
        width, resident, pairs = inter / tp, experts / ep, tokens * top
        wide = width * (2 if self.gated else 1)
        plans = self._plans(tokens, pairs / resident, resident, width, tiles)
        moved = rows if self.tiles == "menu" else pairs
        us = (
            self.t0
            + 2 * moved * (hidden + wide + width) / (self.be * machine.memory)
            + self.ts * pairs
        )
        for n, k in ((wide, hidden), (hidden, width)):
            read = (touched * n * k * self.bytes + rows * (k * self.bytes + 2 * n)) / (
                self.em * machine.memory
            )
            us = us + pnorm(self.p, self._compute_us(machine, plans, n, k), read)
        return us

    def _compute_us(
        self,
        machine: GpuParameters,
        plans: list[tuple[Array, Array, Array]],
        n: Array,
        k: Array,
    ) -> Array:
        """Return the least microseconds of one product over the plans."""
        rate = self.ec * machine.peak(self.compute) / machine.sms
        best: Array = math.inf
        for count, rows, columns in plans:
            operands = (rows + columns) * k * self.bytes
            full = maximum(2 * rows * columns * k / rate, operands / self.r) + self.tau
            us = maximum(count * ceil(n / columns) / machine.sms * full, operands / self.r1)
            best = minimum(best, us)
        return best

    def _plans(
        self,
        tokens: Array,
        mean: Array,
        local_experts: Array,
        width: Array,
        tiles: list[Array],
    ) -> list[tuple[Array, Array, Array]]:
        """Return (tiles, rows, columns) of each plan that the kernel may take.

        Args:
            mean: Pairs of the group for each expert of the rank.
        """
        counts = dict(zip(TILE_ROWS, tiles, strict=True))
        if self.tiles == "menu":
            return [(counts[m], m, n) for m, n in MENU]
        rows, columns = self._tile(tokens, mean, local_experts)
        own = select([rows == m for m in TILE_ROWS], tiles, 0.0)
        is_tuned: Any = False
        for experts, columns_tuned in self.tuned:
            is_tuned = is_tuned | ((local_experts == experts) & (width == columns_tuned))
        if not is_any(is_tuned):
            return [(own, rows, columns)]
        return [
            (
                where(is_tuned, counts[m], own),
                where(is_tuned, m, rows),
                where(is_tuned, n, columns),
            )
            for m, n in TUNED
        ]

    def tile_changes(self, top: int, experts: int, ranks: int) -> tuple[float, ...]:
        """Return the numbers of tokens up to which `_tile` gives the same tile: the next tile may
        take less time."""
        each = experts / top  # tokens that give each expert a row
        results = {
            "vllm": (32, 64, 96, 512),
            "vllm_block": (64,),
            "sglang": (experts / ranks,),
            "marlin": tuple(FILLED * m * each for m in (8, 16, 32, 48)),
            "openai": (16 * each, 32 * each, 64 * each),
        }
        return results.get(self.tiles, ())

    def _tile(self, tokens: Array, mean: Array, local_experts: Array) -> tuple[Array, Array]:
        """Return rows and columns of the one tile that the kernel takes without a tuned file."""
        if self.tiles == "vllm":
            limits = tokens <= 32, tokens <= 96, tokens <= 512
            return select(limits, (16.0, 32.0, 64.0), 128.0), where(tokens <= 64, 64.0, 128.0)
        if self.tiles == "vllm_block":
            return where(tokens <= 64, 16.0, 64.0), 128.0
        if self.tiles == "sglang":
            is_small = tokens <= local_experts
            return where(is_small, 16.0, 64.0), where(is_small, 32.0, 64.0)
        if self.tiles == "sglang_block":
            return 64.0, 128.0
        if self.tiles == "marlin":
            fits = [mean < FILLED * m for m in (8, 16, 32, 48)]
            return select(fits, (8.0, 16.0, 32.0, 48.0), 64.0), 128.0
        fits = [mean <= 16, mean <= 32, mean <= 64]
        return select(fits, (16.0, 32.0, 64.0), 128.0), 128.0


def _loads(
    given: list[Array], tokens: Array, top: Array, experts: Array, ranks: Array
) -> list[Array]:
    """Return pairs, touched experts and tiles on the rank: a uniform router's if none are given, or
    if they are 0."""
    if given and not is_any(given[0] <= 0):
        return given
    load = BALANCED.load(tokens, top, experts, ranks)
    uniform = [load.rows, load.touched, *load.tiles]
    if not given:
        return uniform
    return [where(given[0] > 0, g, u) for g, u in zip(given, uniform, strict=True)]


# Bytes of a stored weight, scales included, by the format that rows name: 16-bit scales per 32 for
# int4, one byte for mxfp4.
BYTES = {
    "bfloat16": 2.0,
    "fp8": 1.0,
    "fp8_block": 1.0,
    "int4_wo": 0.5625,
    "w4a16_mxfp4": 0.53125,
    "nvfp4": 0.5625,
}
KERNELS = ("triton", "oai", "marlin", "flashinfer", "cutlass")
TILES = {"oai": "openai", "marlin": "marlin", "flashinfer": "menu", "cutlass": "menu"}
# SGLang's Triton kernel has no 4-bit form before Blackwell: it expands mxfp4 to bf16 when it loads
# the weights.
EXPANDED = (("sglang", "w4a16_mxfp4/triton"),)

# Cells with rows slower than the stack, and the note that is printed with their times.
_UNTUNED = "experts measured without FlashInfer's autotuning: a tuned engine is faster"
NOTES = {
    ("vllm", "fp8/flashinfer"): _UNTUNED,
    ("sglang", "bfloat16/flashinfer/ungated"): _UNTUNED,
}

# Weight format of a checkpoint → formats of measured rows; the first one in a calibration is used.
STORED = {
    "bf16": ("bfloat16",),
    "fp16": ("bfloat16",),
    "fp8": ("fp8", "fp8_block"),
    "fp8_per_channel": ("fp8", "fp8_block"),
    "fp8_block128": ("fp8_block", "fp8"),
    "int4": ("int4_wo",),
    "awq": ("int4_wo",),
    "gptq": ("int4_wo",),
    "mxfp4": ("w4a16_mxfp4",),
    "mxfp4_weight_only": ("w4a16_mxfp4",),
    "nvfp4": ("nvfp4",),
}


def moe_kind(dtype: str, kernel: str) -> str:
    """Return the cell of rows with this data type and kernel family, or recorded kernel."""
    words = kernel.replace("_", " ").split()
    name = next((k for k in KERNELS if any(k in word for word in words)), "")
    bare = "ungated" in words or "nongated" in words
    return "/".join(part for part in (dtype, name, "ungated" if bare else "") if part)


def moe_laws(kind: str, stack: str, gpu: str) -> tuple[tuple[type[KernelModel], Settings], ...]:
    """Return the kernel model of a cell with its fixed fields; none for a format without rows."""
    stored, *rest = kind.split("/")
    if stored not in BYTES:
        return ()
    expanded = (stack, kind) in EXPANDED
    given: Settings = {
        "bytes": 2.0 if expanded else BYTES[stored],
        "compute": 1.0 if stored.startswith("fp8") else 0.5 if stored == "nvfp4" else 2.0,
    }
    given["gated"] = "ungated" not in rest
    if "triton" in rest:
        block = "_block" if stored == "fp8_block" else ""
        given["tuned"] = tuned_sizes(stack, gpu, "bfloat16" if expanded else stored)
        given |= {"tiles": f"{stack}{block}"} if stack in ("vllm", "sglang") else {}
    elif rest and rest[0] in TILES:
        given["tiles"] = TILES[rest[0]]
    return ((FusedMoe, given),)


def cells_of(shape: ExpertsShape) -> tuple[str, ...]:
    """The cells that may time these experts, best first.

    Where a stack has two kernels for a format, it takes the permuting one (FlashInfer, CUTLASS)
    once experts are spread over ranks. Experts with biases are what OpenAI's mxfp4 kernels were
    made for; the others go through Marlin.
    """
    permuting, others = ("flashinfer", "cutlass"), ("triton", "oai", "marlin")
    order: tuple[str, ...] = (
        (*permuting, *others)
        if shape.ranks > 1
        else ("triton", "oai", "marlin", "cutlass", "flashinfer")
    )
    if shape.format.startswith("mxfp4"):
        order = ("oai", "triton") if shape.bias else ("marlin",)
    kernels = (*(f"/{kernel}" for kernel in order), "")
    tail = "" if shape.gated else "/ungated"
    name = (
        "int4" if shape.format.startswith("int4_g") else shape.format
    )  # in groups of any size
    return tuple(
        f"{stored}{kernel}{tail}"
        for stored in STORED.get(family(name), ())
        for kernel in kernels
    )


SWITCH_RANKS = 8
MEASURED_RANKS = 8


class AllReduce(KernelModel, frozen=True, tag="allreduce"):
    """The sum of `bytes` bytes over num_gpus ranks.

    a1, a2, a3 [µs]: launch and barriers of the one-shot, the two-shot, and the ring or switch
    kernel. h [µs]: for each further rank. e1, e2, e3, es: what each reaches of the link's datasheet
    rate in one direction, e2 and e3 with four ranks. g2, g3: factors on those two for each doubling
    of the ranks.
    """

    h: Annotated[float, within(0.005, 10)] = 0.1
    a1: Annotated[float, within(0.3, 60)] = 4
    e1: Annotated[float, within(0.02, 1.5)] = 0.5
    a2: Annotated[float, within(0.3, 120)] = 10
    e2: Annotated[float, within(0.02, 1.5)] = 0.6
    a3: Annotated[float, within(3, 300)] = 40
    e3: Annotated[float, within(0.1, 1.5)] = 0.75
    es: Annotated[float, within(0.1, 1.5)] = 0.6
    g2: Annotated[float, within(0.7, 1.4)] = 1
    g3: Annotated[float, within(0.7, 1.4)] = 1

    def us(self, machine: GpuParameters, *shape: Array) -> Array:
        ranks, size = shape
        others, sent = ranks - 1, size / machine.link
        halves = 2 * others / maximum(ranks, 1) * sent
        doublings = log2(clip(ranks, 1, MEASURED_RANKS) / 4)
        ring = halves / (self.e3 * power(self.g3, doublings))
        large = where(ranks >= SWITCH_RANKS, minimum(ring, sent / self.es), ring)
        two = halves / (self.e2 * power(self.g2, doublings))
        plans = (self.a1 + others * sent / self.e1, self.a2 + two, self.a3 + large)
        return where(
            ranks > 1,
            minimum(minimum(plans[0], plans[1]), plans[2]) + self.h * others,
            0.0,
        )
