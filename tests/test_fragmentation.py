"""The waste of contiguous slots, pieces and pages, by hand and by simulation."""

import itertools
import random
import statistics
from pathlib import Path

import pytest
from conftest import Run
from hypothesis import given
from hypothesis import strategies as st

from kvcalc import UserError
from kvcalc.capacity.allocations import paged_waste, read_lengths, sample_lengths, simulate_first_fit


def test_a_slot_of_the_longest_length() -> None:
    """1024 slots for 50 tokens waste 974."""
    waste = paged_waste([50], 1024)
    assert (waste.slots, waste.used, waste.tokens, waste.share) == (1024, 50, 974, 974 / 1024)


def test_pages_waste_less_than_a_block_a_sequence() -> None:
    assert paged_waste([1, 16, 17], 16).tokens == 15 + 0 + 15
    assert paged_waste([1, 16, 17], 1).share == 0


def test_pieces_fail_though_enough_is_free() -> None:
    """Four pieces of 25 fill 100 slots. After one ends, 50 tokens find 25 free. After two that are not adjacent, 50 are free
    in pieces.

    With pieces of 25 and requests of 50, some failures must occur with enough free memory.
    """
    found = simulate_first_fit([25, 25, 25, 25, 50, 25, 50, 25, 50, 25], 100, seed=1)
    assert found.failures > 0
    assert 0.5 <= found.free < 1
    assert 0.25 <= found.largest < 0.5


def test_equal_pieces_never_fail_by_fragmentation() -> None:
    found = simulate_first_fit([10] * 50, 100)
    assert (found.failures, found.free, found.largest) == (0, 0.0, 0.0)


def test_a_simulation_is_drawn_from_its_seed() -> None:
    lengths = sample_lengths("lognormal:512,4k", seed=3)
    assert simulate_first_fit(lengths, 20_000, 7) == simulate_first_fit(lengths, 20_000, 7)
    assert simulate_first_fit(lengths, 20_000, 7) != simulate_first_fit(lengths, 20_000, 8)
    assert simulate_first_fit([50], 10).requests == 0  # longer than the memory: never asked for


def test_a_log_normal_distribution() -> None:
    """Mean and 99th percentile of the samples equal the given values, within the accuracy of 1000 samples."""
    lengths = sample_lengths("lognormal:512,4k")
    assert len(lengths) == 1000
    assert statistics.mean(lengths) == pytest.approx(512, rel=0.15)
    assert sorted(lengths)[989] == pytest.approx(4096, rel=0.35)
    assert sample_lengths("lognormal:512,4k", 1) == sample_lengths("lognormal:512,4k", 1) != lengths


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("tokens\n50, 100 # a comment\n\n4k\n")
    assert read_lengths(str(path)) == [50, 100, 4096]


def test_a_typed_list_pads_5_3_and_4_to_15_slots(kvcalc: Run) -> None:
    """(3, 5) has 15 slots, 3 of them without a token."""
    (record,) = kvcalc("fit llama-7b --lengths 5,3,4 --format json").records
    assert (record["lengths"], record["padding_waste"]) == (3, pytest.approx(3 / 15))
    assert record["paged_waste_tokens"] == 3 * 16 - 12
    assert "--lengths, line 1: length 'x'" in kvcalc("fit llama-7b --lengths 5,3,x").err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("12\nx7\n", "line 2"),
        ("-4\n", "line 1"),
        ("0\n", "outside"),
        ("", "holds 0 lengths"),
        ("1.5\n", "whole number"),
        ("12 foo\n", "line 1: length 'foo'"),
        ("foo 12\n", "line 1: length 'foo'"),
        ("input,output\n1\n", "line 1: length 'input'"),
        ("nan\n1\n", "line 1: length 'nan'"),
        ("1e3\n1\n", "line 1: length '1e3'"),
        ("tokens\ntokens\n", "line 2"),
    ],
)
def test_a_file_of_something_else(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text(text)
    with pytest.raises(UserError, match=said):
        read_lengths(str(path))


@pytest.mark.parametrize("text", ["lognormal:", "lognormal:5", "lognormal:5,4", "lognormal:1,1M", "lognormal:a,b"])
def test_distributions_that_there_are_not(text: str) -> None:
    with pytest.raises(UserError):
        read_lengths(text)


def first_fit(lengths: list[int], capacity: int, seed: int) -> tuple[int, list[int], list[int]]:
    """Return the number of requests, and at each failure the total free memory and the largest hole. A map has every slot."""
    chance, memory = random.Random(seed), [0] * capacity
    living: list[tuple[int, int]] = []
    waiting = [n for n in lengths if n <= capacity] * (20 if lengths else 1)
    requests, free, largest = len(waiting), [], []
    while waiting:
        holes = [(len(list(run)), taken) for taken, run in itertools.groupby(memory)]
        places = list(itertools.accumulate((size for size, _ in holes), initial=0))
        start = next((at for at, (size, taken) in zip(places, holes, strict=False) if not taken and size >= waiting[0]), -1)
        if start >= 0:
            living.append((start, waiting.pop(0)))
            memory[start : start + living[-1][1]] = [1] * living[-1][1]
            continue
        sizes = [size for size, taken in holes if not taken]
        if sum(sizes) >= waiting[0]:
            free.append(sum(sizes))
            largest.append(max(sizes))
        at = chance.randrange(len(living))
        living[at], living[-1] = living[-1], living[at]
        start, size = living.pop()
        memory[start : start + size] = [0] * size
    return requests, free, largest


@given(st.lists(st.integers(1, 60), max_size=12), st.integers(1, 100), st.integers(0, 5))
def test_the_simulated_allocator_slot_by_slot(lengths: list[int], capacity: int, seed: int) -> None:
    found, (requests, free, largest) = simulate_first_fit(lengths, capacity, seed), first_fit(lengths, capacity, seed)
    assert (found.requests, found.failures) == (requests, len(free))
    assert found.free * capacity * len(free) == pytest.approx(sum(free))
    assert found.largest * capacity * len(free) == pytest.approx(sum(largest))
