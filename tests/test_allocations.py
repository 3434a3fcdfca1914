"""A typed sequence of allocations: slots, first fit and pages by hand, and rules for random sequences."""

from pathlib import Path

import pytest
from conftest import Run
from hypothesis import given
from hypothesis import strategies as st

from kvcalc.capacity.allocations import AllocationStep, FirstFitAllocator, PagedAllocator, run_allocations

SERIES = "memory 4144\nA 50\nB 2048\n\nfree A   # 50 tokens in front of B\nask 2049\n"


@pytest.fixture
def series(tmp_path: Path) -> str:
    path = tmp_path / "series.txt"
    path.write_text(SERIES)
    return str(path)


def test_a_request_fails_though_enough_is_free_in_pieces(kvcalc: Run, series: str) -> None:
    """4144 tokens, with B after A's 50: 50 + 2046 = 2096 are free, but no hole has 2049. 131 of 259 blocks are free."""
    records = kvcalc(f"fit llama-3.1-8b --allocations {series} --max-model-len 2048 --format json").records
    assert [r["request"] for r in records] == ["A 50", "B 2048", "free A", "ask 2049"]
    assert [r["line"] for r in records] == [2, 3, 5, 6]
    assert [r["first_fit"] for r in records] == [True, True, None, False]
    assert [r["first_fit_free_tokens"] for r in records] == [4094, 2046, 2096, 2096]
    assert [r["first_fit_largest_hole"] for r in records] == [4094, 2046, 2046, 2046]
    assert [r["contiguous"] for r in records] == [True, True, None, False]  # 2049 is more than a slot
    assert [r["contiguous_free_slots"] for r in records] == [1, 0, 1, 1]  # 4144 are two slots of 2048
    assert [r["paged"] for r in records] == [True, True, None, True]
    assert [r["paged_free_blocks"] for r in records] == [255, 127, 131, 131]  # 4144 = 259 · 16; ⌈50/16⌉ = 4, 2048/16 = 128
    assert records[0]["block_table"] == [0, 1, 2, 3]
    assert records[1]["block_table"] == list(range(4, 132))


@pytest.mark.parametrize("as_file", [True, False])
def test_the_lectures_sequence_can_be_typed(kvcalc: Run, tmp_path: Path, as_file: bool) -> None:
    """A reserves 1024 and stores 50: 974 are empty, with 4 pages 14. 3072 tokens are one slot of 2048, so B needs unequal
    slots.

    C waits for B's end. Then pages store 50 + 1024 tokens in 4 + 64 of 192, and 124 · 16 are free for 1025 more. The hole
    has 1024.
    """
    typed = "memory 3k; A 1024 50; B 2048; C 1024; free B; C 1024; ask 1025"
    (tmp_path / "a").write_text(typed.replace("; ", "\n"))
    steps = str(tmp_path / "a") if as_file else typed
    found = kvcalc("fit", "llama-3.1-8b", "--allocations", steps, "--format", "json").records
    assert [r["request"] for r in found][::3] == ["A 1024 50", "free B"]
    assert [r["first_fit"] for r in found] == [True, True, False, None, True, False]
    assert [r["contiguous"] for r in found] == [True, False, False, None, False, False]
    assert [r["paged_free_blocks"] for r in found] == [188, 60, 60, 188, 124, 124]
    assert [r["paged"] for r in found] == [True, True, False, None, True, True]
    assert {r["first_fit_wasted_tokens"] for r in found} == {974}
    assert {r["contiguous_wasted_tokens"] for r in found} == {2048 - 50}
    assert {r["paged_wasted_tokens"] for r in found} == {14}
    equal = kvcalc("fit", "gpt2", "--allocations", typed, "--max-model-len", "1k", "--format", "json").records
    assert [r["contiguous"] for r in equal] == [True, False, True, None, True, False]  # three slots of 1024
    assert {r["contiguous_wasted_tokens"] for r in equal} == {974}


def test_without_a_memory_line_it_is_the_caches(kvcalc: Run, tmp_path: Path) -> None:
    """16 MiB at 131,072 bytes per token are 128 tokens."""
    (tmp_path / "a").write_text("A 1k\n")
    line = f"fit llama-3.1-8b --allocations {tmp_path / 'a'} --kv-cache-memory-bytes 16MiB --max-model-len 64 --format json"
    (record,) = kvcalc(line).records
    assert record["memory_tokens"] == 128
    assert not (record["contiguous"] or record["first_fit"] or record["paged"])


def test_blocks_come_back_in_the_order_of_a_queue() -> None:
    """Six blocks of 16: A has 0 and 1, B has 2. After A ends, its last block joins the queue first, behind 3, 4, 5: C takes
    3, 4, 5, 1."""
    pages = PagedAllocator(96, 16)
    assert pages.store("A", 32) and pages.store("B", 1)
    pages.remove("A")
    assert pages.store("C", 50)
    assert pages.tables == {"B": [2], "C": [3, 4, 5, 1]}
    assert pages.free == 16 and not pages.can_start(17) and pages.can_start(16)


def test_sequences_grow_where_they_stand() -> None:
    """A grows from 20 to 40 tokens in its slot, in a third block, and as a piece only if B does not follow it."""
    slots, pieces, pages = PagedAllocator(200, 100, max_blocks=1), FirstFitAllocator(200), PagedAllocator(208, 16)
    for allocator in (slots, pieces, pages):
        assert allocator.store("A", 20) and allocator.store("A", 40)
    assert (slots.free, pieces.free, pages.free) == (100, 160, 208 - 48)
    for allocator in (slots, pieces, pages):
        assert allocator.store("B", 30)
    assert slots.store("A", 100) and not slots.store("A", 101)
    assert not pieces.store("A", 41) and pieces.pieces["A"] == (0, 40)
    assert pieces.store("A", 40) and pieces.free == 130  # what it has already takes nothing more
    assert pages.store("A", 49) and pages.tables["A"] == [0, 1, 2, 5]


def test_the_first_hole_that_fits_is_taken() -> None:
    pieces = FirstFitAllocator(100)
    for name, size in (("a", 30), ("b", 10), ("c", 20), ("d", 40)):
        assert pieces.store(name, size)
    pieces.remove("a")
    pieces.remove("c")
    assert pieces.holes == [(0, 30), (40, 20)]
    assert pieces.store("e", 20) and pieces.pieces["e"] == (0, 20)  # not the hole of exactly 20
    pieces.remove("b")
    assert pieces.holes == [(20, 40)]  # neighbours are one


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 90)), min_size=1, max_size=40), st.sampled_from([1, 7, 16]))
def test_nothing_is_given_twice_and_pages_refuse_least(asked: list[tuple[str, int]], block: int) -> None:
    """Every token slot has one owner. Pages of one token accept every new request that first fit accepts."""
    memory, longest = 210, 70
    steps = [AllocationStep(number, name, tokens) for number, (name, tokens) in enumerate(asked)]
    played = run_allocations(steps, memory, longest, block)
    owned = [block for table in played.pages.tables.values() for block in table]
    assert len(owned) == len(set(owned)) and sorted([*owned, *played.pages.queue]) == list(range(memory // block))
    spans = sorted([*played.first_fit.pieces.values(), *played.first_fit.holes])
    assert [start for start, _ in spans] == [sum(size for _, size in spans[:n]) for n in range(len(spans))]
    assert sum(size for _, size in spans) == memory
    holes = [size for _, size in played.first_fit.holes]
    assert (played.first_fit.free, played.first_fit.largest) == (sum(holes), max(holes, default=0))
    for tokens in (1, 40, 80):
        if block == 1 and sum(size for _, size in played.first_fit.holes) <= played.pages.free:
            assert played.pages.can_start(tokens) or not played.first_fit.can_start(tokens)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("A 50\nfree B\n", "line 2: 'B' has no tokens to release"),
        ("A 50\nA 40\n", "line 2: 'A' has 50 tokens and cannot shrink to 40"),
        ("A fifty\n", "line 1: tokens 'fifty' is not a whole number"),
        ("A 50\nmemory 100\n", "line 2: 'memory 100' is no step"),
        ("A 5 6\n", "line 1: 'A' uses 6 tokens and reserves only 5"),
        ("A 5 6 7\n", "line 1: 'A 5 6 7' is no step"),
        ("A 9 5\nfree A 5\n", "line 2: 'free A 5' is no step"),
        ("A\n", "line 1: 'A' is no step. Write NAME TOKENS"),
        ("# nothing\n", "holds 0 steps, not 1 to 10,000"),
        ("memory 10G\nA 1\n", "are too many to play allocations in"),
    ],
)
def test_a_broken_file_is_refused_by_line(kvcalc: Run, tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "file"
    path.write_text(content)
    result = kvcalc(f"fit llama-3.1-8b --allocations {path}")
    assert result.code == 2 and said in result.err and len(result.err.splitlines()) == 1
