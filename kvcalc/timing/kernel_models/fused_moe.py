"""Kernel models of mixtures of experts and of all-reduces.

Load of one rank (`busiest_load`): pairs, reached experts, and tiles by their number of rows. A pair
is a token on one of its k experts, which is one row of the expert's product. T tokens and E experts
are on `ranks` ranks. Every rank waits for the busiest rank, so kernel models use its load.

    mean of an expert   n = T·k/E
    busiest rank        n' = n·(R + √(2·ln ranks)·√R)/R, R = n·E/ranks: the maximum of `ranks`
                        Gaussian draws, at most the pairs that T tokens can have; a single rank has
                        the mean
    touched             a = 1 − (1 − n'/T)^T for each expert
    tiles of m rows     a if n'/a ≤ m/2, else max(a, n'/m + a/2)

A mixture of experts on one rank (`FusedMoe`): top-k of the logits, sort, both products of the
experts, activation, weighted sum. T tokens of width H use k of E experts of width F. Experts are on
ep ranks, and tp divides their columns: I = F/tp, N1 = 2·I if gated, otherwise I. R pairs of a token
and an expert reach A of the E' = E/ep experts of a rank; tiles(m) = Σ over experts of ⌈pairs/m⌉. b
is the bytes of a weight. P is the peak of the dtype that computes.

    t       = t0 + product(N1, H) + product(H, I) + 2·X·(H + N1 + I)/(be·BW) + ts·T·k
    product(N, K) = pnorm_p(compute, (A·N·K·b + R·(K·b + 2·N)) / (em·BW))
    compute = min over tiles m × n of max(tiles(m)·⌈N/n⌉/SMs · full, (m + n)·K·b / r1)
    full    = max(2·m·n·K / (ec·P/SMs), (m + n)·K·b / r) + tau

X is the pairs that elementwise kernels move: T·k if a kernel has every pair, R if it permutes only
its own pairs. The time excludes communication, shared experts and the router.

A cell of experts is `format/kernel`, followed by `/ungated` if experts have no gate, because a
stack has different kernels for both. `moe_kind` returns the cell of measured rows, `expert_kinds`
the cells that may time the experts of a pass.

All-reduce inside one NVLink domain (`AllReduce`): every rank gets the sum of X bytes of n ranks.
One-shot: each rank reads the X of all others. Two-shot: reduce-scatter, then all-gather. Large
messages go to a ring of many channels, or, in a domain of eight, to the switches, which reduce on
the way. The minimum of the four is the time:

    one    = a1 + h·(n − 1) + (n − 1)·X/(e1·NV)
    two    = a2 + h·(n − 1) + 2·(n − 1)/n·X/(e2·g2^d·NV)
    ring   = a3 + h·(n − 1) + 2·(n − 1)/n·X/(e3·g3^d·NV)
    switch = a3 + h·(n − 1) + X/(es·NV), for n ≥ 8

d = log2(n) − 2 counts doublings from four ranks, up to the measured eight. The share of its links
that a rank uses depends on the number of peers.
"""

import math
from typing import Literal, NamedTuple

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
from kvcalc.storage.formats import first_words, read_shapes, table_rows
from kvcalc.storage.quantization import family
from kvcalc.timing.kernel_models.kernel_model import (
    Array,
    Arrays,
    GpuParameters,
    KernelModel,
    pnorm,
)

Candidates = tuple[tuple[type[KernelModel], Settings], ...]

# Experts with tuned tiles in engines: stack, GPU, format, experts of a rank, and columns of an
# expert
# on the rank. They are in the file names `E=…,N=…,device_name=…` of the engines' wheels: vllm
# 0.24.0, model_executor/layers/fused_moe/configs, and sglang 0.5.14,
# srt/layers/moe/moe_runner/triton_utils/configs (all Triton versions: it falls back from one
# version to another).
TUNED_SIZES = """
vllm h100-sxm bfloat16 1: 3072
vllm h100-sxm bfloat16 8: 1792 2048 3584 4096 7168
vllm h100-sxm bfloat16 16: 1344 1792 2688
vllm h100-sxm bfloat16 32: 1792
vllm h100-sxm bfloat16 62: 256 512
vllm h100-sxm bfloat16 64: 320 640 1280 1536
vllm h100-sxm bfloat16 72: 384 768
vllm h100-sxm bfloat16 128: 192 384 512 928 1856 2880
vllm h100-sxm bfloat16 256: 512
vllm h100-sxm bfloat16 512: 128 256 512
vllm h100-sxm fp8_block 256: 128 384
vllm h100-sxm fp8_block 512: 128 256
vllm h200 bfloat16 8: 1792 2048 3584 4096 7168 14336
vllm h200 bfloat16 16: 1024 2048
vllm h200 bfloat16 64: 320 640 1280 2560
vllm h200 bfloat16 128: 96 192 384 512 768 1024
vllm h200 bfloat16 512: 64 128 256 512
vllm h200 fp8_block 8: 2048
vllm h200 fp8_block 16: 4096
vllm h200 fp8_block 32: 2048
vllm h200 fp8_block 128: 384 512 768
vllm h200 fp8_block 256: 256 512
vllm h200 fp8_block 384: 128
sglang h100-sxm bfloat16 1: 3072
sglang h100-sxm bfloat16 8: 1792 2048 3584 4096 7168
sglang h100-sxm bfloat16 16: 1024 1344 1856 2048 2688
sglang h100-sxm bfloat16 20: 2048
sglang h100-sxm bfloat16 24: 1024
sglang h100-sxm bfloat16 32: 224 448 896 928 1792 1856
sglang h100-sxm bfloat16 64: 192 320 384 464 640 768 928 1280 1536 1856 2688
sglang h100-sxm bfloat16 65: 1536
sglang h100-sxm bfloat16 128: 192 232 352 384 464 512 704 768 928 1344 1856 2688
sglang h100-sxm bfloat16 144: 512
sglang h100-sxm bfloat16 256: 672 1344 2688
sglang h100-sxm bfloat16 512: 64 128 336 672 1344 2688
sglang h100-sxm fp8_block 64: 1024
sglang h100-sxm fp8_block 128: 384
sglang h100-sxm fp8_block 256: 128 384
sglang h100-sxm fp8_block 257: 128
sglang h100-sxm fp8_block 272: 128
sglang h100-sxm fp8_block 512: 128 256
sglang h200 bfloat16 8: 1792 2048 3584 4096 7168 14336
sglang h200 bfloat16 16: 1024
sglang h200 bfloat16 20: 1536
sglang h200 bfloat16 64: 320 640 1280 2560
sglang h200 bfloat16 128: 192 384 704 768
sglang h200 bfloat16 129: 384
sglang h200 bfloat16 161: 192
sglang h200 bfloat16 512: 64 128 256
sglang h200 fp8_block 64: 512
sglang h200 fp8_block 80: 640
sglang h200 fp8_block 128: 384 768
sglang h200 fp8_block 160: 640
sglang h200 fp8_block 256: 256
sglang h200 fp8_block 257: 128 256 512
sglang h200 fp8_block 264: 256
sglang h200 fp8_block 384: 128
sglang h200 fp8_block 385: 128
sglang h200 fp8_block 513: 512
"""


TILE_ROWS = (8, 16, 32, 48, 64, 128)  # rows of the tiles that kernels use


class ExpertLoad(NamedTuple):
    """Expected work of the busiest expert-parallel rank in one mixture-of-experts (MoE) layer.

    A pair is a token on one of its experts, which is one row of the expert's product. A tile is a
    block of rows of one expert that a kernel computes at once.

    Attributes:
        rows: Expected number of pairs on the rank.
        touched: Expected number of experts of the rank with at least one pair, whose weights are
            read.
        tiles: Expected number of tiles of the rank if a tile has 8, 16, 32, 48, 64 or 128 rows: one
            number or array for each of these sizes.
    """

    rows: Array
    touched: Array
    tiles: Arrays


def busiest_load(tokens: Array, top: Array, experts: Array, ranks: Array) -> ExpertLoad:
    """Return the expected work of the busiest expert-parallel rank in one MoE layer.

    Each token is assumed to pick its experts uniformly at random.

    Args:
        tokens: New tokens of all ranks together.
        top: Experts per token.
        experts: Number of experts of the layer.
        ranks: Number of ranks over which whole experts are spread.
    """
    local_experts = experts / ranks
    rows = tokens * top / experts
    mean = local_experts * rows
    busiest = mean + sqrt(2 * log(ranks) * mean)
    factor = minimum(busiest, tokens * minimum(top, local_experts)) / maximum(mean, 1e-300)
    busy = minimum(rows * factor, tokens)
    share = minimum(busy / tokens, 1 - 1e-15)
    touched = -expm1(tokens * log1p(-share))
    tiles = []
    for m in TILE_ROWS:
        filled = maximum(touched, busy / m + touched / 2)
        tiles.append(local_experts * where(busy <= touched * m / 2, touched, filled))
    return ExpertLoad(local_experts * busy, local_experts * touched, tuple(tiles))


# tiles of autotuned grouped products
AUTOTUNED_TILES = read_shapes("16x128 32x128 64x128 128x128")
# Tiles if the engine ships a tuned file.
TUNED_TILES = read_shapes("16x64 16x128 32x128 64x128 128x128 128x256")
MARLIN_ROWS, OPENAI_ROWS = (8.0, 16.0, 32.0, 48.0), (16.0, 32.0, 64.0)  # of smaller tiles
MAX_TILE_FILL = 0.9  # Marlin: share of a tile's rows that an expert's mean pairs may fill
TilePlan = tuple[Array, Array, Array]  # number of tiles, and rows and columns of a tile


class FusedMoe(KernelModel, frozen=True, tag="moe"):
    """Time model of the routed experts of one MoE layer in one call on one rank.

    The method `us` takes, in this order: tokens of all ranks, hidden width, intermediate width of
    an expert, experts per token, experts of the layer, and the tensor-parallel and expert-parallel
    sizes of the experts. Then it may take the load of the rank: pairs, experts with at least one
    pair, and numbers of tiles with 8, 16, 32, 48, 64 and 128 rows. If the load is missing or 0,
    tokens pick experts uniformly. A pair is a token on one of its experts. A tile is a block of
    rows of one expert that one streaming multiprocessor (SM) computes.

    Attributes:
        t0: Time of all launches [µs].
        ec: Share of the datasheet's peak that a full wave of tiles, one on each SM, reaches.
        em: Share of the datasheet's bandwidth that reading expert weights reaches.
        p: Exponent p of the overlap of compute and memory time, (compute^p + memory^p)^(1/p): 1
            adds both times, ∞ gives the longer time.
        r: Rate at which one SM reads operands if all SMs read [bytes/µs].
        r1: Rate at which a single tile reads its operands, which latency limits [bytes/µs].
        tau: Time of prologue and epilogue of a tile [µs].
        be: Share of the datasheet's bandwidth that permuting, activating, quantising and summing
            reach.
        ts: Time to sort each pair [µs].
        bytes: Bytes of one weight, including scales.
        compute: Bytes of one operand element of the products: 2 for bf16, 1 for fp8, 0.5 for fp4.
        gated: Whether an expert has a gate matrix in addition to its up matrix.
        tiles: Rule by which the kernel selects the tile of m rows and n columns. `menu` takes the
            fastest of four tiles. `vllm` and `sglang` are the rules of the engines' Triton kernels,
            and `vllm_block` and `sglang_block` their rules for fp8 weights with scales per block.
            `marlin` and `openai` are the rules of these kernels.
        tuned: Pairs (experts of a rank, intermediate width on a rank) of the layers for which the
            engine ships a file of tuned tiles.
        RANGES, CHOICES, SOFTNESS, PRIOR_DEVIATION: How `calibrate` fits the parameters; see
            `KernelModel`.
    """

    RANGES = """
        t0 1 150
        ec 0.05 1
        em 0.05 1
        p 1 10
        r 1e4 3e6
        r1 3e3 1e6
        tau 0.001 30
        be 0.02 100
        ts 1e-5 0.1
    """
    SOFTNESS = 0.06
    PRIOR_DEVIATION = 0.8
    CHOICES = tuple({"tiles": rule} for rule in ("menu", "vllm", "sglang", "marlin", "openai"))

    bytes: float = 2.0
    compute: float = 2
    gated: bool = True
    tiles: Literal[
        "menu", "vllm", "vllm_block", "sglang", "sglang_block", "marlin", "openai"
    ] = "menu"
    tuned: tuple[tuple[int, int], ...] = ()
    t0: float = 22
    ec: float = 0.8
    em: float = 0.9
    p: float = 1.4
    r: float = 1e5
    r1: float = 6e4
    tau: float = 1
    be: float = 0.3
    ts: float = 4e-4

    def us(self, machine: GpuParameters, *shape: Array) -> Array:
        tokens, hidden, inter, top, experts, tp, ep, *load = shape
        if not load or is_any(load[0] <= 0):
            uniform = busiest_load(tokens, top, experts, ep)
            columns = [uniform.rows, uniform.touched, *uniform.tiles]
            if load:
                columns = [where(load[0] > 0, a, b) for a, b in zip(load, columns)]
            load = columns
        rows, touched, *tiles = load
        width = inter / tp
        wide = width * (2 if self.gated else 1)
        pairs = tokens * top
        plans = self._plans(tokens, pairs, experts / ep, width, tiles)
        moved = rows if self.tiles == "menu" else pairs
        moved_us = 2 * moved * (hidden + wide + width) / (self.be * machine.memory)
        us = self.t0 + moved_us + self.ts * pairs
        rate = self.ec * machine.peak(self.compute) / machine.sms
        for n, k in ((wide, hidden), (hidden, width)):
            read = touched * n * k * self.bytes + rows * (k * self.bytes + 2 * n)
            memory = read / (self.em * machine.memory)
            compute = math.inf  # of the fastest plan
            for count, tile_rows, columns in plans:
                operands = (tile_rows + columns) * k * self.bytes
                products = 2 * tile_rows * columns * k / rate
                full = maximum(products, operands / self.r) + self.tau
                waves = count * ceil(n / columns) / machine.sms
                compute = minimum(compute, maximum(waves * full, operands / self.r1))
            us = us + pnorm(self.p, compute, memory)
        return us

    def _plans(
        self,
        tokens: Array,
        pairs: Array,
        local_experts: Array,
        width: Array,
        tiles: list[Array],
    ) -> list[TilePlan]:
        """Return the launch plans (tiles and waves) from which the kernel may select."""
        counts = dict(zip(TILE_ROWS, tiles))
        if self.tiles == "menu":
            return [(counts[m], m, n) for m, n in AUTOTUNED_TILES]
        rows, columns = self._tile(tokens, pairs / local_experts, local_experts)
        count = select([rows == m for m in TILE_ROWS], tiles, 0.0)
        is_tuned = False
        for tuned_experts, tuned_width in self.tuned:
            is_tuned = is_tuned | ((local_experts == tuned_experts) & (width == tuned_width))
        if not is_any(is_tuned):
            return [(count, rows, columns)]
        plans = []
        for m, n in TUNED_TILES:
            tuned_count = where(is_tuned, counts[m], count)
            plans.append((tuned_count, where(is_tuned, m, rows), where(is_tuned, n, columns)))
        return plans

    def tile_changes(self, top: int, experts: int, ranks: int) -> tuple[float, ...]:
        """Return the token counts beyond which the kernel changes to a larger tile, ascending.

        A tile is a block of rows of one expert. More tokens than a count use the larger tile, which
        may take less time. The caller corrects this, so that more tokens never take less time. The
        result is empty for kernels that try all tiles.

        Args:
            top: Experts per token.
            experts: Number of experts of the layer.
            ranks: Number of ranks over which whole experts are spread.
        """
        tokens_per_row = experts / top  # tokens that give each expert a row
        changes = {
            "vllm": (32, 64, 96, 512),
            "vllm_block": (64,),
            "sglang": (experts / ranks,),
            "marlin": tuple(MAX_TILE_FILL * m * tokens_per_row for m in MARLIN_ROWS),
            "openai": tuple(m * tokens_per_row for m in OPENAI_ROWS),
        }
        return changes.get(self.tiles, ())

    def _tile(self, tokens: Array, mean: Array, local_experts: Array) -> tuple[Array, Array]:
        """Return rows and columns of the tile that the kernel uses without a tuned file.

        Args:
            tokens: Tokens of all ranks.
            mean: Pairs of all ranks for each expert of the rank.
            local_experts: Experts of the rank.
        """
        match self.tiles:
            case "vllm":
                limits = tokens <= 32, tokens <= 96, tokens <= 512
                rows = select(limits, (16.0, 32.0, 64.0), 128.0)
                return rows, where(tokens <= 64, 64.0, 128.0)
            case "vllm_block":
                return where(tokens <= 64, 16.0, 64.0), 128.0
            case "sglang":
                is_small = tokens <= local_experts
                return where(is_small, 16.0, 64.0), where(is_small, 32.0, 64.0)
            case "sglang_block":
                return 64.0, 128.0
            case "marlin":
                fits = [mean < MAX_TILE_FILL * m for m in MARLIN_ROWS]
                return select(fits, MARLIN_ROWS, 64.0), 128.0
        fits = [mean <= m for m in OPENAI_ROWS]
        return select(fits, OPENAI_ROWS, 128.0), 128.0


# Bytes of a stored weight, scales included, by the format that rows name: 16-bit scales per 32 for
# int4, one byte per 32 for mxfp4 and one per 16 for nvfp4.
STORED_BYTES = {
    "bfloat16": 2.0,
    "fp8": 1.0,
    "fp8_block": 1.0,
    "int4_wo": 0.5625,
    "w4a16_mxfp4": 0.53125,
    "nvfp4": 0.5625,
}
KERNELS = "triton oai marlin flashinfer cutlass"
TILE_RULES = first_words("""
    openai  oai
    marlin  marlin
    menu    flashinfer cutlass
""")
# SGLang's Triton kernel has no 4-bit form before Blackwell: it expands mxfp4 to bf16 when it loads
# the weights.
EXPANDED_TO_BF16 = ("sglang", "w4a16_mxfp4/triton")

# Weight format of a checkpoint → formats of measured rows; the first one in a calibration is used.
_ROW_FORMATS_TABLE = """
    bf16               bfloat16
    fp16               bfloat16
    fp8                fp8 fp8_block
    fp8_per_channel    fp8 fp8_block
    fp8_block128       fp8_block fp8
    int4               int4_wo
    awq                int4_wo
    gptq               int4_wo
    mxfp4              w4a16_mxfp4
    mxfp4_weight_only  w4a16_mxfp4
    nvfp4              nvfp4
"""
ROW_FORMATS = {stored: formats for stored, *formats in table_rows(_ROW_FORMATS_TABLE)}


def moe_kind(dtype: str, kernel: str) -> str:
    """Return the kind of data of measured MoE experts, such as `fp8_block/triton/ungated`.

    All rows of one kind get one time model. It consists of the weight format, the kernel if it is
    known, and `ungated` if experts have no gate matrix.

    Args:
        dtype: Weight format in the measured rows, such as `fp8_block`.
        kernel: Kernel in the measured rows: a family such as `triton`, or its full name.
    """
    words = kernel.replace("_", " ").split()
    parts = [dtype]
    parts += [name for name in KERNELS.split() if any(name in word for word in words)][:1]
    if {"ungated", "nongated"} & {*words}:
        parts.append("ungated")
    return "/".join(filter(None, parts))


def moe_candidates(kind: str, stack: str, gpu: str) -> Candidates:
    """Return the time model to fit to measured MoE experts, with the values of its other fields.

    The result is ((class, {field: value}),), or () if the weight format is unknown. The fields keep
    these values in the fit, such as bytes per weight and tile sizes.

    Args:
        kind: Kind of data from `moe_kind`, such as `fp8_block/triton`.
        stack: Name of the measured engine or kernel library, such as `vllm`.
        gpu: Preset name of the measured GPU, for which tuned tiles are looked up.
    """
    stored, *parts = kind.split("/")
    if stored not in STORED_BYTES:
        return ()
    is_expanded = (stack, kind) == EXPANDED_TO_BF16
    compute_bytes = 0.5 if stored == "nvfp4" else 1.0 if stored.startswith("fp8") else 2.0
    fields: Settings = {
        "bytes": 2.0 if is_expanded else STORED_BYTES[stored],
        "compute": compute_bytes,
        "gated": "ungated" not in parts,
    }
    if "triton" in parts:
        prefix = f"{stack} {gpu} {'bfloat16' if is_expanded else stored} "
        sizes = []
        for line in TUNED_SIZES.splitlines():
            if line.startswith(prefix):
                experts, *columns = line.removeprefix(prefix).replace(":", "").split()
                sizes += [(int(experts), int(width)) for width in columns]
        fields["tuned"] = tuple(sizes)
        if stack in ("vllm", "sglang"):
            fields["tiles"] = f"{stack}_block" if stored == "fp8_block" else stack
    elif parts and parts[0] in TILE_RULES:
        fields["tiles"] = TILE_RULES[parts[0]]
    return ((FusedMoe, fields),)


def expert_kinds(shape: ExpertsShape) -> tuple[str, ...]:
    """Return the kinds of data whose time models may time the experts of a layer, best first.

    A kind is a weight format with a kernel, such as `fp8_block/triton`. The first kind in the
    calibration is used.

    If a stack has two kernels for a format, it uses the permuting kernel (FlashInfer, CUTLASS) for
    experts that are spread over ranks. OpenAI's mxfp4 kernels are for experts with biases; experts
    without biases use Marlin.

    Args:
        shape: Sizes and weight format of the experts of one layer.
    """
    kernels = "triton oai marlin cutlass flashinfer"
    if shape.ranks > 1:
        kernels = "flashinfer cutlass triton oai marlin"
    if shape.format.startswith("mxfp4"):
        kernels = "oai triton" if shape.bias else "marlin"
    suffix = "" if shape.gated else "/ungated"
    # int4 has groups of any size
    name = "int4" if shape.format.startswith("int4_g") else shape.format
    endings = [f"/{kernel}{suffix}" for kernel in kernels.split()] + [suffix]
    formats = ROW_FORMATS.get(family(name), [])
    return tuple(f"{stored}{ending}" for stored in formats for ending in endings)


SWITCH_RANKS = 8
MEASURED_RANKS = 8


class AllReduce(KernelModel, frozen=True, tag="allreduce"):
    """Time model of one all-reduce, which sums equal arrays of all ranks in one NVLink domain.

    It is the least time of four kernels: one-shot, two-shot, ring, and from 8 ranks on the
    reduction in the NVLink switches. The method `us` takes the number of ranks and the bytes of one
    rank's array.

    Attributes:
        h: Additional time of each rank after the first [µs].
        a1, a2, a3: Launch and barriers of the one-shot, the two-shot, and the ring or switch kernel
            [µs].
        e1, e2, e3, es: Share of the link's datasheet rate in one direction that the one-shot, the
            two-shot, the ring and the switch kernel reach. e2 and e3 are the shares with four
            ranks.
        g2, g3: Factors on e2 and e3 for each doubling of the ranks.
        RANGES: A line for each fitted parameter: its name, and its minimum and maximum in a fit.
    """

    RANGES = """
        h 0.005 10
        a1 0.3 60
        e1 0.02 1.5
        a2 0.3 120
        e2 0.02 1.5
        a3 3 300
        e3 0.1 1.5
        es 0.1 1.5
        g2 0.7 1.4
        g3 0.7 1.4
    """

    h: float = 0.1
    a1: float = 4
    e1: float = 0.5
    a2: float = 10
    e2: float = 0.6
    a3: float = 40
    e3: float = 0.75
    es: float = 0.6
    g2: float = 1
    g3: float = 1

    def us(self, machine: GpuParameters, *shape: Array) -> Array:
        ranks, size = shape
        peers = ranks - 1
        sent = size / machine.link
        halves = 2 * peers / maximum(ranks, 1) * sent
        doublings = log2(clip(ranks, 1, MEASURED_RANKS) / 4)
        ring = halves / (self.e3 * power(self.g3, doublings))
        large = where(ranks >= SWITCH_RANKS, minimum(ring, sent / self.es), ring)
        one_shot = self.a1 + peers * sent / self.e1
        two_shot = self.a2 + halves / (self.e2 * power(self.g2, doublings))
        best = minimum(minimum(one_shot, two_shot), self.a3 + large)
        return where(ranks > 1, best + self.h * peers, 0.0)
