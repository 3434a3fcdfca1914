"""The load of a rank by a router: closed forms compared with counting, with simulation, and at their limits."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcalc.timing.kernel_models.fused_moe import TILE_ROWS, ExpertLoad, busiest_load


def load(tokens: int, top: int, experts: int, ranks: int = 1) -> ExpertLoad:
    return busiest_load(*(np.array(float(x)) for x in (tokens, top, experts, ranks)))


def test_many_tokens_fill_whole_tiles_and_half_of_one_more() -> None:
    """4,096 tokens on 8 of 128: 256 rows per expert. Tiles of 128: 128·256/128, and half a tile more per expert."""
    found = load(4096, 8, 128)
    assert (found.rows, found.touched) == pytest.approx((32_768, 128))
    assert found.tiles[TILE_ROWS.index(128)] == pytest.approx(256 + 64)


def test_every_rank_waits_for_the_busiest() -> None:
    """64 tokens on 8 of 256 over 8 ranks: 64 rows each. The busiest of eight has √(2·ln 8) = 2.039 deviations of √64 more."""
    found = load(64, 8, 256, 8)
    busiest = 64 + np.sqrt(2 * np.log(8)) * 8
    assert found.rows == pytest.approx(busiest)
    assert found.touched == pytest.approx(32 * (1 - (1 - busiest / 32 / 64) ** 64))


def simulated(rng: np.random.Generator, tokens: int, top: int, experts: int, ranks: int) -> tuple[float, float, float, float]:
    """Return pairs, reached experts, and tiles of 16 and of 64 on the busiest rank, for one random draw."""
    chosen = np.argsort(rng.random((tokens, experts)), axis=1)[:, :top]
    counts = np.bincount(chosen.ravel(), minlength=experts).reshape(ranks, -1)
    busiest = counts[counts.sum(axis=1).argmax()]
    tiles = [float(np.ceil(busiest / m).sum()) for m in (16, 64)]
    return float(busiest.sum()), float((busiest > 0).sum()), tiles[0], tiles[1]


@pytest.mark.parametrize(
    ("tokens", "top", "experts", "ranks"), [(1, 8, 128, 1), (16, 8, 256, 1), (64, 8, 256, 8), (512, 8, 128, 8)]
)
def test_the_closed_form_meets_a_simulated_router(tokens: int, top: int, experts: int, ranks: int) -> None:
    rng = np.random.default_rng(0)
    means = np.mean([simulated(rng, tokens, top, experts, ranks) for _ in range(400)], axis=0)
    found = load(tokens, top, experts, ranks)
    mine = [found.rows, found.touched, found.tiles[TILE_ROWS.index(16)], found.tiles[TILE_ROWS.index(64)]]
    assert np.allclose(mine[:3], means[:3], rtol=0.12)
    assert np.allclose(mine[3], means[3], rtol=0.12)


@given(st.integers(1, 20_000), st.integers(1, 8), st.sampled_from([8, 64, 128, 512]), st.sampled_from([1, 2, 4, 8]))
def test_a_load_is_one_that_can_be(tokens: int, top: int, experts: int, ranks: int) -> None:
    """An expert has at most one pair per token. Reached experts are at most the rank's experts and the pairs. Tiles are
    between both."""
    found = load(tokens, top, experts, ranks)
    held = experts / ranks
    assert 0 < found.rows <= min(held * tokens, tokens * top) * (1 + 1e-9)
    assert found.rows >= tokens * top / ranks * (1 - 1e-9)
    assert found.touched <= min(held, found.rows) * (1 + 1e-6)
    for m, tiles in zip(TILE_ROWS, found.tiles, strict=True):
        assert max(found.touched, found.rows / m) * (1 - 1e-9) <= tiles <= found.touched + found.rows / m + 1e-9


def test_arrays_are_many_scalars() -> None:
    tokens = np.array([1.0, 8, 300, 20_000])
    many = busiest_load(tokens, np.array(8.0), np.array(128.0), np.array(4.0))
    alone = [load(int(t), 8, 128, 4) for t in tokens]
    assert many.rows.tolist() == pytest.approx([float(a.rows) for a in alone])
    assert many.tiles[3].tolist() == pytest.approx([float(a.tiles[3]) for a in alone])
