"""Every law against its own formula, written again for one shape in plain arithmetic, over drawn shapes and parameters."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcalc.timing.allreduce import AllReduce
from kvcalc.timing.decode_attention import DecodeAttention
from kvcalc.timing.elementwise import Elementwise
from kvcalc.timing.figures import Figures
from kvcalc.timing.gemm import Gemm, QuantizedGemm
from kvcalc.timing.law import Law
from kvcalc.timing.mla_decode import MlaDecode
from kvcalc.timing.mla_prefill import MlaPrefill
from kvcalc.timing.prefill_attention import PrefillAttention

M = Figures(memory=3.35e6, bf16=989e6, fp8=1979e6, sms=132, l2=50e6, link=450e3)
EDGES = [1, 2, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257, 1000, 4096, 8191, 20_000]
size = st.sampled_from(EDGES) | st.integers(1, 1 << 15)
batch = st.sampled_from([1, 2, 8, 33, 256]) | st.integers(1, 512)
width = st.sampled_from([32, 64, 65, 96, 128, 129, 192, 193, 256])
heads = st.sampled_from([(1, 1), (8, 8), (32, 8), (64, 1), (40, 2), (66, 2), (136, 2), (17, 1), (33, 1)])
window = st.sampled_from([0, 0, 1, 100, 4096])


def drawn(law: type[Law], **fixed: Any) -> st.SearchStrategy[Law]:
    """A law with parameters anywhere in their ranges, in one of its forms."""
    ranges = {name: st.floats(r.least, r.most) for name, r in law.ranges().items()}
    return st.tuples(st.sampled_from(law.CHOICES), st.fixed_dictionaries(ranges)).map(lambda x: law(**x[0], **x[1], **fixed))


def us(law: Law, *shape: float) -> float:
    return float(law.us(M, *(np.array([float(x)]) for x in shape))[0])


def both(p: float, a: float, b: float) -> float:
    """The p-norm of two times, by the larger."""
    return max(a, b) * (1 + (min(a, b) / max(a, b)) ** p) ** (1 / p)


def ceil(a: float, b: float = 1) -> int:
    return math.ceil(a / b)


TILES = [(64, 64), (64, 128), (128, 64), (64, 256), (256, 64), (128, 128), (128, 256), (256, 128)]


def plan(m: float, n: float, k: float, split: int, rate: float, operands: float, pro: float, stair: float) -> float:
    """The least time of tiles over `split` parts of k: waves of tiles, each bound by its products or its operands."""
    depth, found = max(k / split, 64), []
    for rows, columns in TILES:
        tiles = ceil(m, rows) * ceil(n, columns) * split / M.sms
        waves = max(1, tiles + stair * (math.ceil(tiles) - tiles))
        found.append(waves * (depth * max(2 * rows * columns / rate, (rows + columns) / operands) + pro))
    return min(found)


def split_product(
    law: Any, m: float, n: float, k: float, memory: float, rate: float, operands: float, pro: float, sg: float
) -> float:
    times = []
    for split in (1, 2, 4, 8, 16):
        more = law.tr + 8 * split * m * n / 6e6 if split > 1 else 0
        times.append(both(law.p, plan(m, n, k, split, rate, operands, pro, sg), memory) + more)
    return min(times)


@given(drawn(Gemm), size, size, size, st.sampled_from([2.0, 0.5625, 1.0]))
def test_products(law: Gemm, m: int, n: int, k: int, stored: float) -> None:
    memory = (2 * m * k + stored * n * k + 2 * m * n) / (law.em * M.memory)
    expected = law.t0 + split_product(law, m, n, k, memory, law.ec * M.bf16 / M.sms, law.r / 2, 0, 0)
    assert us(law, m, n, k, stored) == pytest.approx(expected, rel=1e-9)
    assert us(law, m, n, k) == us(law, m, n, k, 2.0)


@given(drawn(QuantizedGemm), size, size, size, st.sampled_from([1.0, 0.5]))
def test_quantised_products(law: QuantizedGemm, m: int, n: int, k: int, stored: float) -> None:
    memory = (m * k + stored * n * k + 2 * m * n) / (law.em * M.memory)
    rate, start = law.ec * M.fp8 / M.sms, law.t0 + 3 * m * k / (law.bq * M.memory)
    if law.tiles == "best":
        rest = split_product(law, m, n, k, memory, rate, law.r, law.pro, law.sg)
    else:
        rows = 64 if m <= 64 else 128
        tiles = ceil(m, rows) * ceil(n, 128) / M.sms
        waves = max(1, tiles + law.sg * (math.ceil(tiles) - tiles))
        rest = both(law.p, waves * (max(2 * rows * 128 * k / rate, (rows + 128) * k / law.r) + law.pro), memory)
    assert us(law, m, n, k, stored) == pytest.approx(start + rest, rel=1e-9)
    assert us(law, m, n, k) == us(law, m, n, k, 1.0)


PARTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)


def walked(tiles: float, blocks: int, tau: float, block: float, memory: float, combine: float) -> float:
    """The least time over the parts into which a walk of so many blocks is split."""
    return min(
        both(2, ceil(tiles * s) * (tau + ceil(blocks, s) * block), memory) + (combine + 0.05 * s if s > 1 else 0)
        for s in PARTS
        if s <= blocks
    )


def from_memory(law: Any, read: float) -> float:
    """A cache read from HBM, or the L2 where it stays there between calls."""
    miss = 1.0 if law.cold else 1 / (1 + (law.cap * M.l2 / read) ** 6)
    return max(read * miss / (0.95 * M.memory), read / 6e6) + law.tramp * miss


@given(
    st.one_of(drawn(DecodeAttention, bytes=b, cold=c) for b in (1, 2) for c in (False, True)), batch, heads, width, size, window
)
def test_decode_attention(law: DecodeAttention, batch: int, pair: tuple[int, int], width: int, length: int, window: int) -> None:
    q, kv = pair
    seen = min(length, window) if window else length
    special = q / kv > (32 if law.wide == "per_head" else 16)
    tiles = batch * q if special and law.wide == "per_head" else batch * kv * ceil(q / kv, 64)
    factor = law.r64 if width <= 64 else 1 if width <= 128 else law.r192 if width <= 192 else law.r256
    rate = law.r * factor * (law.rw if special else 1) * (law.rm if q == kv else 1)
    tau = law.tau * (law.tw if special else 1) * (law.tm if q == kv else 1)
    block = 128 * 2 * width * law.bytes / rate
    memory = from_memory(law, 2 * batch * kv * seen * width * law.bytes)
    rest = walked(tiles / M.sms, ceil(seen, 128), tau, block, memory, 2.0)
    expected = law.t0 + rest + 4 * batch * q * width / M.memory
    assert us(law, batch, q, kv, width, length, window) == pytest.approx(expected, rel=1e-9)


@given(st.one_of(drawn(MlaDecode, bytes=b, cold=c) for b in (1, 2) for c in (False, True)), batch, size, size)
def test_mla_decode(law: MlaDecode, batch: int, q: int, length: int) -> None:
    read = batch * length * 576 * law.bytes
    block = max(64 * 576 * law.bytes / law.r, 2 * 64 * 64 * 1088 / (law.ec * M.bf16 / M.sms))
    rest = walked(batch * ceil(q, 64) / M.sms, ceil(length, 64), law.tau, block, from_memory(law, read), 2.5)
    expected = law.t0 + rest + (2 * batch * q * 1088 + law.cast * read) / M.memory
    assert us(law, batch, q, length) == pytest.approx(expected, rel=1e-9)


def tiled(tiles: float, each: float, keys: float, tau: float, last: float) -> float:
    """Tiles that walk so many keys on average, the last wave partly; no less than the longest tile."""
    waves = 0.6 * tiles + 0.4 * math.ceil(tiles)
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
    law: PrefillAttention, batch: int, pair: tuple[int, int], width: int, length: int, window: int, past: int | None
) -> None:
    q, kv = pair
    limit = min(window, length) if window else length
    causal = (limit * (limit + 1) / 2 + (length - limit) * limit) / length
    tiles = ceil(length, 128) * q
    if law.rows == "packed":
        tiles = min(tiles, ceil(length * q / kv, 128) * kv)
    factor = law.a64 if width <= 64 else 1 if width <= 128 else law.a192 if width <= 192 else law.a256
    peak = (M.fp8 if law.compute == 1 else M.bf16) * law.ec * factor * (law.aw if limit < length else 1)
    each = 4 * 128 * width / (peak / M.sms)
    keys, last = (causal, limit) if past is None else (past, past + length / 2)
    moved = 4 * batch * length * width * (q + 2 * kv) / (law.em * M.memory)
    expected = law.t0 + tiled(tiles * batch / M.sms, each, keys + 64, law.tau, last) + moved
    more = () if past is None else (past,)
    assert us(law, batch, q, kv, width, length, window, *more) == pytest.approx(expected, rel=1e-9)


@given(st.one_of(drawn(MlaPrefill, compute=c) for c in (1, 2)), batch, size, size, st.none() | st.integers(1, 9999))
def test_mla_prefill(law: MlaPrefill, batch: int, q: int, length: int, past: int | None) -> None:
    width = 320 if law.attends == "expanded" else 1088
    keys, last = (length / 2, length) if past is None else (past, past + length / 2)
    width = width if past is None else 256
    each = 2 * 128 * width / (law.ec * (M.fp8 if law.compute == 1 else M.bf16) / M.sms)
    rest = tiled(batch * q * ceil(length, 128) / M.sms, each, keys + 64, law.tau, last)
    expected = law.t0 + rest + 2 * batch * length * q * 2 * width / (law.em * M.memory)
    more = () if past is None else (past, width)
    assert us(law, batch, q, length, *more) == pytest.approx(expected, rel=1e-9)


@given(drawn(AllReduce), st.sampled_from([1, 2, 4, 7, 8, 9, 72]), st.integers(1, 1 << 33))
def test_all_reduce(law: AllReduce, n: int, size: int) -> None:
    sent = size / M.link
    plans = [law.a1 + (n - 1) * sent / law.e1, law.a2 + 2 * (n - 1) / n * sent / law.e2, law.a3 + 2 * (n - 1) / n * sent / law.e3]
    if n >= 8:
        plans.append(law.a3 + sent / law.es)
    expected = min(plans) + law.h * (n - 1) if n > 1 else 0.0
    assert us(law, n, size) == pytest.approx(expected, rel=1e-9)


@given(drawn(Elementwise), st.integers(1, 1 << 33))
def test_elementwise(law: Elementwise, moved: int) -> None:
    assert us(law, moved) == pytest.approx(law.t0 + moved / (law.em * M.memory), rel=1e-12)
