"""Costs are values, and every closed form over tokens equals a loop."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcalc import Cost, Operator
from kvcalc.layers.cost import causal_pairs, chunk_pairs, compressed_pairs, product_flops, reached_fraction

SMALL = list(itertools.product((1, 2, 3, 7, 16, 33), (0, 1, 2, 5, 16, 40)))  # (new, past)


def queries(new: int, past: int) -> range:
    """Return the positions of the new tokens, counted from 1: the maximum number of tokens that each may see."""
    return range(past + 1, past + new + 1)


@pytest.mark.parametrize(("new", "past"), SMALL)
def test_causal_pairs(new: int, past: int) -> None:
    assert causal_pairs(new, past) == sum(queries(new, past))
    for limit in (1, 2, 5, 16, 17, 100):
        assert causal_pairs(new, past, limit) == sum(min(j, limit) for j in queries(new, past))


@pytest.mark.parametrize(("new", "past"), SMALL)
def test_chunk_pairs(new: int, past: int) -> None:
    for chunk in (1, 2, 5, 16, 100):
        seen = [[k for k in range(j) if k // chunk == (j - 1) // chunk] for j in queries(new, past)]
        assert chunk_pairs(new, past, chunk) == sum(map(len, seen))


@pytest.mark.parametrize(("new", "past"), SMALL)
def test_compressed_pairs(new: int, past: int) -> None:
    for ratio in (1, 2, 4, 5):
        assert compressed_pairs(new, past, ratio) == sum(j // ratio for j in queries(new, past))
        for top in (1, 2, 3, 50):
            assert compressed_pairs(new, past, ratio, top) == sum(min(j // ratio, top) for j in queries(new, past))


lengths = st.tuples(st.integers(1, 5000), st.integers(0, 5000))
limits = st.integers(1, 6000)


@given(st.lists(lengths, min_size=1, max_size=20), limits, st.integers(1, 200), st.integers(1, 200))
def test_arrays_give_the_same_pairs(each: list[tuple[int, int]], limit: int, ratio: int, top: int) -> None:
    new, past = (np.array(column, dtype=float) for column in zip(*each, strict=True))
    for form in (
        causal_pairs,
        lambda n, p: causal_pairs(n, p, limit),
        lambda n, p: chunk_pairs(n, p, limit),
        lambda n, p: compressed_pairs(n, p, ratio),
        lambda n, p: compressed_pairs(n, p, ratio, top),
    ):
        assert list(form(new, past)) == [form(n, p) for n, p in each]


@given(st.integers(1, 10**9), st.integers(1, 10**9), st.integers(0, 10**9), limits)
def test_passes_that_follow_one_another_add_up(first: int, second: int, past: int, limit: int) -> None:
    for form in (
        causal_pairs,
        lambda n, p: causal_pairs(n, p, limit),
        lambda n, p: chunk_pairs(n, p, limit),
        lambda n, p: compressed_pairs(n, p, limit, 7),
    ):
        assert form(first + second, past) == form(first, past) + form(second, past + first)


def test_ints_stay_exact_at_any_size() -> None:
    n = 10**12 - 1
    assert causal_pairs(n, 0) == n * (n + 1) // 2 > 2**53
    assert product_flops(n, n, 3) == 6 * n * n
    assert product_flops(n, 128, 64) == 2 * n * 128 * 64


def test_costs_add_and_scale() -> None:
    one, two = Cost(1, 2, 3, 4, 5, 6, 7), Cost(10, 20, 30, 40, 50, 60, 70)
    assert one + two == Cost(11, 22, 33, 44, 55, 66, 77)
    assert one * 3 == one + one + one
    assert (one.cache_bytes, one.bytes) == (4 + 5, 3 + 4 + 5 + 6)  # the network is not the GPU's memory
    assert Operator("o", "full", 32, "gemm", one).total == one * 32


def test_distinct_experts_under_uniform_routing() -> None:
    """All ways of choosing 2 of 4 experts for each of 3 tokens, counted: the closed form holds exactly."""
    choices = list(itertools.combinations(range(4), 2))
    reached = [len({e for choice in routing for e in choice}) for routing in itertools.product(choices, repeat=3)]
    assert 4 * reached_fraction(3, 2, 4) == sum(reached) / len(reached) == 4 * (1 - 0.5**3)
