"""Every kernel model compared with its formula in plain arithmetic for one shape, for random shapes and parameters."""

import math
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcalc.timing.kernel_models.flash_attention import DecodeAttention, FlashDecode, PrefillAttention
from kvcalc.timing.kernel_models.fused_moe import AllReduce, FusedMoe
from kvcalc.timing.kernel_models.gemm import CutlassGemm, Gemm, QuantizedGemm, ResidentGemm, ResidentQuantizedGemm
from kvcalc.timing.kernel_models.kernel_model import GpuParameters, KernelModel
from kvcalc.timing.kernel_models.mla import MlaDecode, MlaPrefill, SparseDecode

M = GpuParameters(memory=3.35e6, bf16=989e6, fp8=1979e6, sms=132, l2=50e6, link=450e3, fp4=3958e6)
EDGES = [1, 2, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257, 1000, 4096, 8191, 20_000]
size = st.sampled_from(EDGES) | st.integers(1, 1 << 15)
batch = st.sampled_from([1, 2, 8, 33, 256]) | st.integers(1, 512)
width = st.sampled_from([32, 64, 65, 96, 128, 129, 192, 193, 256])
heads = st.sampled_from([(1, 1), (8, 8), (32, 8), (64, 1), (40, 2), (66, 2), (136, 2), (17, 1), (33, 1)])
window = st.sampled_from([0, 0, 1, 100, 4096])


def drawn(model: type[KernelModel], **fixed: Any) -> st.SearchStrategy[KernelModel]:
    """Return a kernel model with random parameters in their ranges, in one of its forms."""
    ranges = {name: st.floats(r.minimum, r.maximum) for name, r in model.ranges().items()}
    return st.tuples(st.sampled_from(model.CHOICES), st.fixed_dictionaries(ranges)).map(lambda x: model(**(x[0] | x[1] | fixed)))


def us(model: KernelModel, *shape: float) -> float:
    return float(model.us(M, *(np.array([float(x)]) for x in shape))[0])


def both(p: float, a: float, b: float) -> float:
    """Return the p-norm of two times, from the larger one."""
    return max(a, b) * (1 + (min(a, b) / max(a, b)) ** p) ** (1 / p)


def ceil(a: float, b: float = 1) -> int:
    return math.ceil(a / b)


TILES = [(64, 64), (64, 128), (128, 64), (64, 256), (256, 64), (128, 128), (128, 256), (256, 128)]
SMALLER = [(32, 64), (64, 32), (32, 128), (128, 32), (96, 128), (128, 96)]  # of bf16 products alone


def plan(
    model: KernelModel, m: float, n: float, k: float, split: int, rate: float, operands: float, pro: float, stair: float
) -> float:
    """Return the minimum time of tiles over `split` parts of k: waves of tiles, each limited by its products or its operands."""
    depth, found = max(k / split, 64), []
    for rows, columns in TILES + SMALLER * (not isinstance(model, QuantizedGemm)):
        tiles = ceil(m, rows) * ceil(n, columns) * split / M.sms
        waves = max(1, tiles + stair * (math.ceil(tiles) - tiles))
        found.append(waves * (depth * max(2 * rows * columns / rate, (rows + columns) / operands) + pro))
    return min(found)


def split_product(
    model: Any, m: float, n: float, k: float, memory: float, rate: float, operands: float, pro: float, sg: float
) -> float:
    times = []
    for split in (1, 2, 4, 8, 16):
        more = model.tr + 8 * split * m * n / 6e6 if split > 1 else 0
        times.append(both(model.p, plan(model, m, n, k, split, rate, operands, pro, sg), memory) + more)
    return min(times)


@given(
    st.one_of(
        drawn(Gemm), drawn(QuantizedGemm), drawn(ResidentQuantizedGemm), *(drawn(ResidentGemm, cold=c) for c in (False, True))
    ),
    size,
    size,
    size,
    st.sampled_from([0.5, 0.5625, 1.0, 2.0]),
)
def test_products(model: Any, m: int, n: int, k: int, stored: float) -> None:
    """A separate kernel writes quantised inputs. An L2 may contain the weights of resident products."""
    quantised = isinstance(model, QuantizedGemm)
    element = 1 if quantised else 2
    weights, others = stored * n * k, m * (element * k + 2 * n)
    memory = (weights + others) / (model.em * M.memory)
    if isinstance(model, ResidentGemm | ResidentQuantizedGemm):
        miss = 1.0 if model.cold else 1 / (1 + (model.cap * M.l2 / weights) ** 6)
        memory = max((weights * miss + others) / (model.em * M.memory), (weights + others) / model.l2)
    start, pro, stair = model.t0, 0.0, 0.0
    if quantised:
        start, pro, stair = model.t0 + 3 * m * k / (model.bq * M.memory), model.pro, model.sg
    rate = model.ec * (M.fp8 if quantised else M.bf16) / M.sms
    rest = split_product(model, m, n, k, memory, rate, model.r / element, pro, stair)
    assert us(model, m, n, k, stored) == pytest.approx(start + rest, rel=1e-9)
    assert us(model, m, n, k) == us(model, m, n, k, element)


@given(drawn(CutlassGemm), size, size, size, st.sampled_from([1.0, 0.5]))
def test_products_of_cutlass(model: CutlassGemm, m: int, n: int, k: int, stored: float) -> None:
    """Tiles are 64 × 64 up to 64 rows, 64 × 128 up to 128 rows, otherwise pairs of 128 × 128: rows are padded to 256."""
    rows, columns = (64, 64) if m <= 64 else (64, 128) if m <= 128 else (128, 128)
    down = 2 * ceil(m, 256) if m > 128 else ceil(m, 64)
    tiles = down * ceil(n, columns) / M.sms
    waves = max(1, tiles + model.sg * (math.ceil(tiles) - tiles))
    tile = 2 * rows * columns * k / (model.ec * M.fp8 / M.sms) + model.pro
    memory = (m * k + stored * n * k + 2 * m * n) / (model.em * M.memory)
    expected = model.t0 + model.row * m + 3 * m * k / (model.bq * M.memory) + both(model.p, waves * tile, memory)
    assert us(model, m, n, k, stored) == pytest.approx(expected, rel=1e-9)
    assert us(model, m, n, k) == us(model, m, n, k, 1.0)


PARTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)


def walked(tiles: float, blocks: int, tau: float, block: float, memory: float, combine: float, parts: int = 128) -> float:
    """Return the minimum time over the number of parts into which the blocks of a tile are split."""
    return min(
        both(2, ceil(tiles * s) * (tau + ceil(blocks, s) * block), memory) + (combine + 0.05 * s if s > 1 else 0)
        for s in PARTS
        if s <= min(blocks, parts)
    )


def from_memory(model: Any, read: float) -> float:
    """Return the time to read a cache from HBM. The share in the L2 is read at the rate of the SMs."""
    miss = 1.0 if model.cold else 1 / (1 + (model.cap * M.l2 / read) ** 6)
    return miss * (read / (model.reach * M.memory) + model.tramp)


@given(
    st.one_of(drawn(DecodeAttention, bytes=b, cold=c, parts=p) for b in (1, 2) for c in (False, True) for p in (8, 128)),
    batch,
    heads,
    width,
    size,
    window,
)
def test_decode_attention(
    model: DecodeAttention, batch: int, pair: tuple[int, int], width: int, length: int, window: int
) -> None:
    q, kv = pair
    seen = min(length, window) if window else length
    special = bool(window) and q > kv if model.wide == "windowed" else q / kv > (32 if model.wide == "per_head" else 16)
    tiles = batch * q if special and model.wide != "grouped" else batch * kv * ceil(q / kv, 64)
    factor = model.r64 if width <= 64 else 1 if width <= 128 else math.sqrt(model.r256) if width <= 192 else model.r256
    apart = special or q == kv
    rate, tau = model.r * factor * (model.rx if apart else 1), model.tau * (model.tx if apart else 1)
    block = 128 * 2 * width * model.bytes / rate
    memory = from_memory(model, 2 * batch * kv * seen * width * model.bytes)
    rest = walked(tiles / M.sms, ceil(seen, 128), tau, block, memory, 2.0, model.parts)
    expected = model.t0 + rest + 4 * batch * q * width / M.memory
    assert us(model, batch, q, kv, width, length, window) == pytest.approx(expected, rel=1e-9)


def parts_of(model: FlashDecode, walks: int, blocks: int, length: int) -> float:
    """Return the number of parts into which the kernel splits each tile: whole parts, or XQA's number before rounding."""
    most: float
    if model.rule == "xqa":
        most = max(length / 128, 1)
        most = min(most, math.sqrt(8 * most))
        waves = walks * most / M.sms
        most = max(most / (waves / 8), 1) if waves > 8 else most
    else:
        each = -(-11 * walks * blocks // (10 * M.sms))
        most = 1 if blocks <= 4 and model.rule == "flash3" else ceil(blocks, each)
    return min(most, model.parts)


RULES = ({"rule": "flash3"}, {"rule": "flash3_bounded", "parts": 32}, {"rule": "xqa"})
TILE = {1: (160, 160, 160, 128), 2: (128, 128, 96, 80)}  # tokens of a block by bytes of an element, then by width


@given(
    st.one_of(drawn(FlashDecode, bytes=b, cold=c, **rule) for b in (1, 2) for c in (False, True) for rule in RULES),
    batch,
    heads,
    width,
    size,
    window,
)
def test_flash_decode(model: FlashDecode, batch: int, pair: tuple[int, int], width: int, length: int, window: int) -> None:
    q, kv = pair
    seen = min(length, window) if window else length
    wide = q / kv > (32 if model.wide == "per_head" else 16)
    walks = batch * q if wide and model.wide == "per_head" else batch * kv * ceil(q / kv, 64)
    apart = wide or q == kv
    factor = model.r64 if width <= 64 else 1 if width <= 128 else math.sqrt(model.r256) if width <= 192 else model.r256
    rate = model.r * factor * (model.rx if apart else 1)
    tokens = 128 if model.rule == "xqa" else TILE[model.bytes][sum(width > w for w in (64, 128, 192))]
    blocks = ceil(seen, tokens)
    split = parts_of(model, walks, blocks, seen)
    part = blocks / split if model.rule == "xqa" else math.ceil(blocks / split)
    tile = model.tau * (model.tx if apart else 1) + part * tokens * 2 * width * model.bytes / rate
    read = 2 * batch * kv * seen * width * model.bytes
    miss = 1.0 if model.cold else 1 / (1 + (model.cap * M.l2 / read) ** 6)
    memory = miss * (read / (model.reach * M.memory) + 6)
    rest = both(2, max(1, walks * split / M.sms) * tile, memory) + (0.8 * math.sqrt(split) if split > 1 else 0)
    expected = model.t0 + model.tb * batch + rest + 4 * batch * q * width / M.memory
    assert us(model, batch, q, kv, width, length, window) == pytest.approx(expected, rel=1e-9)


@given(st.one_of(drawn(MlaDecode, bytes=b, cold=c) for b in (1, 2) for c in (False, True)), batch, size, size)
def test_mla_decode(model: MlaDecode, batch: int, q: int, length: int) -> None:
    read = batch * length * 576 * model.bytes
    pace = model.h32 if 16 < q <= 32 else model.h64 if 32 < q <= 64 else 1
    block = max(64 * 576 * model.bytes / model.r, 2 * 64 * 64 * 1088 / (model.ec * M.bf16 / M.sms)) / pace
    rest = walked(batch * ceil(q, 64) / M.sms, ceil(length, 64), model.tau, block, from_memory(model, read) / pace, 2.5)
    expected = model.t0 + rest + (2 * batch * q * 1088 + model.cast * read) / M.memory
    assert us(model, batch, q, length) == pytest.approx(expected, rel=1e-9)


def tiled(tiles: float, each: float, keys: float, tau: float, last: float, stair: float = 0.4) -> float:
    """Return the time of tiles with a mean number of keys and a partial last wave; at least the longest tile."""
    waves = (1 - stair) * tiles + stair * math.ceil(tiles)
    return max(waves * (each * keys + tau), each * last + tau)


@given(
    st.one_of(drawn(PrefillAttention, compute=c) for c in (1, 2)),
    batch,
    heads,
    width,
    size,
    window,
    st.none() | st.integers(1, 9999),
)
def test_prefill_attention(
    model: PrefillAttention, batch: int, pair: tuple[int, int], width: int, length: int, window: int, past: int | None
) -> None:
    q, kv = pair
    limit = min(window, length) if window else length
    causal = (limit * (limit + 1) / 2 + (length - limit) * limit) / length
    tiles = ceil(length, 128) * q
    if model.rows == "packed":
        tiles = min(tiles, ceil(length * q / kv, 128) * kv)
    factor = model.a64 if width <= 64 else 1 if width <= 128 else model.wide
    peak = (M.fp8 if model.compute == 1 else M.bf16) * model.ec * factor * (model.aw if limit < length else 1)
    each = 4 * 128 * width / (peak / M.sms)
    keys, last = (causal, limit) if past is None else (past, past + length / 2)
    longest = each * last + model.tau
    attend = max(tiles * batch / M.sms * (each * (keys + 64) + model.tau) + model.tail * longest, longest)
    tokens = batch * length
    moved = 4 * tokens * q * width / model.em + 8 * tokens * kv * width / model.ew
    blocks = tokens * min(kv * width, 512) / (2048 * M.sms)
    expected = model.t0 + attend + moved / M.memory + blocks * model.block
    more = () if past is None else (past,)
    assert us(model, batch, q, kv, width, length, window, *more) == pytest.approx(expected, rel=1e-9)


@given(st.one_of(drawn(MlaPrefill, compute=c) for c in (1, 2)), batch, size, size, st.none() | st.integers(1, 9999))
def test_mla_prefill(model: MlaPrefill, batch: int, q: int, length: int, past: int | None) -> None:
    width = 320 if model.attends == "expanded" else 1088
    width = width if past is None else 256
    rows, covered, tiles = 128, 128.0, q * ceil(length, 128)
    if model.tiles == "packed":  # 64 rows, of several heads where that makes fewer tiles
        rows, tiles = 64, min(q * ceil(length, 64), ceil(length * q, 64))
        covered = max(1, 64 / q) if length < 64 else 64
    keys, last = (length / 2, length) if past is None else (past, past + length / 2)
    each = 2 * rows * width / (model.ec * (M.fp8 if model.compute == 1 else M.bf16) / M.sms)
    rest = tiled(batch * tiles / M.sms, each, keys + covered / 2, model.tau, last, model.stair)
    token = q * width * (2 if model.attends == "expanded" else 1) + model.cast * 576
    expected = model.t0 + rest + 2 * batch * length * token / (model.em * M.memory)
    more = () if past is None else (past, width)
    assert us(model, batch, q, length, *more) == pytest.approx(expected, rel=1e-9)


TILE_ROWS = (8, 16, 32, 48, 64, 128)
tokens = st.sampled_from([1, 2, 16, 32, 33, 64, 65, 96, 97, 512, 513, 4096]) | st.integers(1, 20_000)
routed = st.sampled_from([(128, 8, 1), (128, 8, 8), (8, 2, 1), (256, 8, 4), (32, 4, 2)])  # experts, top-k, ranks


def tile_of(model: FusedMoe, t: int, held: float, mean: float, inner: float) -> list[tuple[int, int]]:
    """Return rows and columns of the tiles that a kernel may use by its rule."""
    if model.tiles == "menu":
        return [(16, 128), (32, 128), (64, 128), (128, 128)]
    if (held, inner) in model.tuned:
        return [(16, 64), (16, 128), (32, 128), (64, 128), (128, 128), (128, 256)]
    if model.tiles == "marlin":
        return [(next((m for m in (8, 16, 32, 48) if mean < 0.9 * m), 64), 128)]
    if model.tiles == "openai":
        return [(min(128, max(16, 2 ** math.ceil(math.log2(mean)))), 128)]
    small = {"vllm": (16 if t <= 32 else 32 if t <= 96 else 64 if t <= 512 else 128, 64 if t <= 64 else 128)}
    small["vllm_block"] = (16 if t <= 64 else 64, 128)
    small["sglang"] = (16, 32) if t <= held else (64, 64)
    small["sglang_block"] = (64, 128)
    return [small[model.tiles]]


rules = st.sampled_from(["menu", "vllm", "vllm_block", "sglang", "sglang_block", "marlin", "openai"])


@given(
    drawn(FusedMoe),
    rules,
    st.booleans(),
    st.sampled_from([(2.0, 2.0), (1.0, 1.0), (0.53, 2.0), (0.5625, 0.5)]),
    tokens,
    routed,
    st.integers(1, 8),
    st.data(),
)
def test_experts(
    model: FusedMoe,
    rule: str,
    gated: bool,
    stored: tuple[float, float],
    t: int,
    routed: tuple[int, int, int],
    tp: int,
    data: st.DataObject,
) -> None:
    experts, top, ranks = routed
    hidden, inter, held = 2048, 512 * tp, experts // ranks
    tuned = ((held, 512),) if data.draw(st.booleans()) else ((held, 511), (held + 1, 512))
    model = msgspec.structs.replace(model, tiles=rule, gated=gated, bytes=stored[0], compute=stored[1], tuned=tuned)
    rows = data.draw(st.integers(1, t * top))
    touched = data.draw(st.integers(1, min(rows, held)))
    count = {m: max(touched, ceil(rows, m)) for m in TILE_ROWS}
    inner, wide = 512, 1024 if gated else 512
    peak = {1.0: M.fp8, 2.0: M.bf16, 0.5: M.fp4}[stored[1]] * model.ec / M.sms
    expected = model.t0 + model.ts * t * top
    expected += 2 * (rows if rule == "menu" else t * top) * (hidden + wide + inner) / (model.be * M.memory)
    for n, k in ((wide, hidden), (hidden, inner)):
        times = []
        for m, columns in tile_of(model, t, held, t * top / held, inner):
            operands = (m + columns) * k * stored[0]
            full = max(2 * m * columns * k / peak, operands / model.r) + model.tau
            times.append(max(count[m] * ceil(n, columns) / M.sms * full, operands / model.r1))
        memory = (touched * n * k * stored[0] + rows * (k * stored[0] + 2 * n)) / (model.em * M.memory)
        expected += both(model.p, min(times), memory)
    load = (rows, touched, *count.values())
    assert us(model, t, hidden, inter, top, experts, tp, ranks, *load) == pytest.approx(expected, rel=1e-9)


def test_vllm_s_tiles_are_larger_from_33_97_and_513_tokens_on() -> None:
    """If four times as few tiles have twice as many rows, an expert takes less time from the limit on."""
    load = (8, 8, *(4.0 ** (12 - n) for n in range(len(TILE_ROWS))))
    times = {t: us(FusedMoe(tiles="vllm"), t, 2048, 512, 8, 128, 1, 1, *load) for t in (32, 33, 96, 97, 512, 513)}
    assert all(times[t] > 1.4 * times[t + 1] for t in (32, 96, 512))


@given(
    drawn(SparseDecode, bytes=1.0), st.sampled_from([1, 3, 132, 133, 256, 257, 1024]), st.sampled_from([1, 16, 64, 65, 128]),
    st.sampled_from([1, 2047, 2048, 2049, 100_000]), st.booleans(),
)  # fmt: skip
def test_sparse_modules(model: SparseDecode, b: int, h: int, length: int, indexer: bool) -> None:
    """DeepSeek-V3.2's sizes: width 7168, latents of 512 + 64 through 1536, keys of 128 + 64, values of 128, 64 index heads
    of 128."""
    weights = 7168 * (1536 + 576) + 1536 * h * 192 + h * 128 * 7168 + (1536 * 128 * 64 + 7168 * (128 + 64)) * indexer
    absorbed = 512 * h * 256
    products = b * (2 * weights / M.fp8 + 2 * absorbed / M.bf16) / 0.6
    expected = model.t0 + model.t1 * math.log2(b + 1) + model.a1 * b * (1 + h / model.heads)
    expected += math.hypot((weights + 2 * absorbed) / (model.em * M.memory), products)
    if indexer:
        expected += model.ti + 132 * b * length / (model.ei * M.memory)
        expected += max(1, b / M.sms) * (model.kt + 1e-4 * length) if length > 2048 else 0
    tiles = b * ceil(h, 64) / M.sms
    expected += max(1, tiles) * model.ta + (max(1, tiles) if model.walk == "whole" else tiles) * model.ts * min(length, 2048)
    host = model.he * (model.host if indexer else 1) if model.graphs and b > model.graphs else 0
    shape = (b, h, length, 7168, 1536, 512, 64, 128, 128, 64 * indexer, 128, 2048)
    assert us(model, *shape) == pytest.approx(max(expected, host), rel=1e-9)


@given(drawn(AllReduce), st.sampled_from([1, 2, 4, 7, 8, 9, 72]), st.integers(1, 1 << 33))
def test_all_reduce(model: AllReduce, n: int, size: int) -> None:
    sent = size / M.link
    doublings = math.log2(min(n, 8)) - 2
    halves = 2 * (n - 1) / n * sent
    two, ring = halves / (model.e2 * model.g2**doublings), halves / (model.e3 * model.g3**doublings)
    plans = [model.a1 + (n - 1) * sent / model.e1, model.a2 + two, model.a3 + ring]
    if n >= 8:
        plans.append(model.a3 + sent / model.es)
    expected = min(plans) + model.h * (n - 1) if n > 1 else 0.0
    assert us(model, n, size) == pytest.approx(expected, rel=1e-9)
