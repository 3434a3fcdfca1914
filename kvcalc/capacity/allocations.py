"""Waste of memory allocators: contiguous slots, first fit, and pages.

`fit --lengths` computes the waste for lengths of a file or of a log-normal distribution. `fit
--allocations` plays a file of allocations and releases to the three allocators.

Source of the allocators: Kwon et al. 2023, arXiv 2309.06180 §3.1 (slots of the longest length,
pieces of exact size) and §4.1–4.3 (blocks and their table). Blocks come from the head of a queue
that starts in order of their numbers. Released blocks join its end, the last block of a sequence
first (vLLM, `v1/core/kv_cache_utils.py`, FreeKVCacheBlockQueue). An entry of a block table is an
int32 (`v1/worker/block_table.py`).
"""

import random
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from math import exp, log, sqrt
from pathlib import Path
from typing import NamedTuple

from kvcalc.errors import UserError
from kvcalc.library.files import read_text
from kvcalc.records import Record
from kvcalc.units import parse_tokens

MAX_RUN = 128  # holes; a longer run is split


class FreeList:
    """Holes of a memory in order of their addresses, with first fit.

    The holes are in short runs. The largest size of each run is stored, so that a search reads only
    one run.

    Attributes:
        free: Free slots in all holes.
    """

    def __init__(self, capacity: int) -> None:
        self.free = capacity
        self._starts = [[0]]  # of the holes of each run
        self._sizes = [[capacity]]
        self._largest = [capacity]

    @property
    def largest(self) -> int:
        """Slots of the largest hole; 0 if there is none."""
        return max(self._largest)

    def take(self, size: int) -> int:
        """Cut slots off the first hole that is large enough. Return their start, or −1."""
        run = next((i for i, largest in enumerate(self._largest) if largest >= size), -1)
        if run < 0:
            return -1
        index = next(i for i, hole in enumerate(self._sizes[run]) if hole >= size)
        start = self._starts[run][index]
        self._cut(run, index, size)
        return start

    def take_from(self, start: int, size: int) -> bool:
        """Cut slots off the hole at `start`. Return False if it is not large enough."""
        run = self._run_of(start)
        starts, sizes = self._starts[run], self._sizes[run]
        index = bisect_left(starts, start)
        can_cut = index < len(starts) and starts[index] == start and sizes[index] >= size
        if can_cut:
            self._cut(run, index, size)
        return can_cut

    def release(self, start: int, size: int) -> None:
        """Free slots again, and join them with neighbouring holes."""
        self.free += size
        run = self._run_of(start)
        starts, sizes = self._starts[run], self._sizes[run]
        index = bisect_right(starts, start)
        if index and starts[index - 1] + sizes[index - 1] == start:
            index -= 1
            sizes[index] += size
        else:
            starts.insert(index, start)
            sizes.insert(index, size)
        self._join_next(run, index)
        self._update_run(run)

    def _run_of(self, start: int) -> int:
        """Return the run to which a hole at `start` belongs."""
        if not self._starts[0]:
            return 0
        return max(0, bisect_right(self._starts, start, key=lambda starts: starts[0]) - 1)

    def _cut(self, run: int, index: int, size: int) -> None:
        """Remove the first slots of a hole."""
        starts, sizes = self._starts[run], self._sizes[run]
        if sizes[index] > size:
            starts[index] += size
            sizes[index] -= size
        else:
            del starts[index], sizes[index]
        self.free -= size
        self._update_run(run)

    def _join_next(self, run: int, index: int) -> None:
        """Join a hole with the next one if they touch. The next hole can be in the next run."""
        end = self._starts[run][index] + self._sizes[run][index]
        next_run, next_index = run, index + 1
        if next_index == len(self._starts[run]):
            next_run, next_index = run + 1, 0
        if next_run < len(self._starts) and self._starts[next_run][next_index] == end:
            self._sizes[run][index] += self._sizes[next_run].pop(next_index)
            del self._starts[next_run][next_index]
            if next_run != run:
                self._update_run(next_run)

    def _update_run(self, run: int) -> None:
        """Update the largest size of a changed run. Remove an empty run and split a long one."""
        starts, sizes = self._starts[run], self._sizes[run]
        if not starts and len(self._starts) > 1:
            del self._starts[run], self._sizes[run], self._largest[run]
            return
        self._largest[run] = max(sizes, default=0)
        if len(starts) > MAX_RUN:
            middle = len(starts) // 2
            self._starts[run : run + 1] = [starts[:middle], starts[middle:]]
            self._sizes[run : run + 1] = [sizes[:middle], sizes[middle:]]
            self._largest[run : run + 1] = [max(sizes[:middle]), max(sizes[middle:])]


Z_99 = 2.3263478740408408  # 99th percentile of a standard normal distribution
MAX_RATIO = exp(Z_99**2 / 2)  # of the 99th percentile to the mean


class LogNormal(NamedTuple):
    """Mean and standard deviation of the logarithm of a length."""

    mu: float
    sigma: float


def lognormal(mean: int, p99: int) -> LogNormal:
    """Compute the log-normal distribution with this mean and 99th percentile.

    ln(p99/mean) = z·σ − σ²/2, of which the smaller root is σ = z − √(z² − 2·ln(p99/mean)); μ =
    ln(mean) − σ²/2. If both are equal, each length is the mean.

    Raises:
        UserError: The percentile is below the mean, or too far above it for any σ.
    """
    if not mean <= p99 <= mean * MAX_RATIO:
        raise UserError(
            f"no log-normal distribution has mean {mean:,} and 99th percentile {p99:,}",
            hint=f"The percentile is at least the mean and at most {MAX_RATIO:.1f} times it",
        )
    sigma = Z_99 - sqrt(max(0.0, Z_99**2 - 2 * log(p99 / mean)))
    return LogNormal(log(mean) - sigma**2 / 2, sigma)


NUM_SAMPLES = 1000  # lengths from a distribution
MAX_LENGTHS, MAX_LENGTHS_FILE_BYTES = 1_000_000, 16 << 20
MAX_REQUESTS = 20_000  # of a simulation


class Waste(NamedTuple):
    """Allocated token slots, and those that store tokens."""

    slots: int
    used: int

    @property
    def tokens(self) -> int:
        """Slots that store nothing."""
        return self.slots - self.used

    @property
    def share(self) -> float:
        """Share of the slots that store nothing."""
        return self.tokens / self.slots if self.slots else 0.0


class FragmentationResult(NamedTuple):
    """Result of a simulated allocator.

    Attributes:
        failures: Requests that no hole fits, but all holes together do.
        free: Mean share of the memory that is free at those failures.
        largest: Mean share of the memory in the largest hole then.
    """

    requests: int
    failures: int
    free: float
    largest: float


def paged(lengths: Sequence[int], block: int) -> Waste:
    """Return the waste of whole blocks: at most block − 1 slots of a sequence are empty.

    A contiguous slot is a block of the longest length: 50 tokens in 1024 slots waste 974.
    """
    return Waste(sum(-(-n // block) * block for n in lengths), sum(lengths))


def external(lengths: Sequence[int], capacity: int, seed: int = 0) -> FragmentationResult:
    """Simulate first fit of pieces of the exact lengths in `capacity` slots.

    A request that no hole fits waits until other sequences end, in random order. Lengths after the
    first 20,000 are not simulated.
    """
    rng = random.Random(seed)
    once = [length for length in lengths if length <= capacity][:MAX_REQUESTS]
    rounds = min(20, MAX_REQUESTS // max(1, len(once)))
    waiting = deque(once * max(1, rounds))
    holes = FreeList(capacity)
    running: list[tuple[int, int]] = []
    requests = len(waiting)
    failures = free_sum = largest_sum = 0
    while waiting:
        start = holes.take(waiting[0])
        if start >= 0:
            running.append((start, waiting.popleft()))
            continue
        if holes.free >= waiting[0]:
            failures += 1
            free_sum += holes.free
            largest_sum += holes.largest
        index = rng.randrange(len(running))
        running[index], running[-1] = running[-1], running[index]
        holes.release(*running.pop())
    count = max(1, failures)
    return FragmentationResult(
        requests, failures, free_sum / count / capacity, largest_sum / count / capacity
    )


def read_lengths(text: str, seed: int = 0) -> list[int]:
    """Read the lengths of `--lengths`.

    Args:
        text: A file of whole numbers, one a line or comma-separated, or `lognormal:MEAN,P99`.

    Raises:
        UserError: A line of the file is wrong, or there is no such distribution.
    """
    if text.startswith("lognormal:"):
        return drawn(text, seed)
    if ":" in text and not Path(text).exists():
        raise UserError(
            f"unknown distribution {text!r}",
            hint="Write lognormal:MEAN,P99 or the name of a file",
        )
    lengths = []
    for number, line in enumerate(
        read_text(Path(text), MAX_LENGTHS_FILE_BYTES).splitlines(), 1
    ):
        words = line.partition("#")[0].replace(",", " ").split()
        if (
            number == 1
            and len(words) == 1
            and words[0].isidentifier()
            and not _is_number(words[0])
        ):
            continue  # the heading of a CSV column
        for word in words:
            try:
                lengths.append(parse_tokens(word))
            except UserError as error:
                raise UserError(error.what, f"{text}, line {number}", error.hint) from None
    if not 0 < len(lengths) <= MAX_LENGTHS:
        raise UserError(f"holds {len(lengths):,} lengths, not 1 to {MAX_LENGTHS:,}", text)
    return lengths


def _is_number(word: str) -> bool:
    """Return whether a word is a number, as `nan` is."""
    try:
        float(word)
    except ValueError:
        return False
    return True


def drawn(text: str, seed: int = 0) -> list[int]:
    """Sample 1000 lengths of at least 1 token from `lognormal:MEAN,P99`. Raises UserError if there
    is no such distribution."""
    words = text.removeprefix("lognormal:").split(",")
    if len(words) != 2:
        raise UserError(
            f"{text!r} should read lognormal:MEAN,P99",
            hint="For example lognormal:512,4k",
        )
    mean, p99 = (
        parse_tokens(words[0], "mean"),
        parse_tokens(words[1], "99th percentile"),
    )
    shape, rng = lognormal(mean, p99), random.Random(seed)
    return [max(1, round(rng.lognormvariate(*shape))) for _ in range(NUM_SAMPLES)]


MAX_STEPS, MAX_SCRIPT_BYTES, MAX_SLOTS = 10_000, 1 << 20, 1 << 27
ENTRY_BYTES = 4
FORMS = "Write NAME TOKENS, free NAME, ask TOKENS, or memory TOKENS first"


class AllocationStep(NamedTuple):
    """One line of a script.

    Attributes:
        name: The sequence; "" if the line only asks whether a new sequence would fit.
        tokens: Tokens of the sequence; 0 to release it.
    """

    line: int
    name: str
    tokens: int

    @property
    def text(self) -> str:
        if not self.name:
            return f"ask {self.tokens}"
        return f"{self.name} {self.tokens}" if self.tokens else f"free {self.name}"


class AllocationScript(NamedTuple):
    """Steps of a file, and the tokens of memory that it names, or 0."""

    steps: tuple[AllocationStep, ...]
    memory: int


class FirstFitAllocator:
    """Pieces of exact size, each in the first hole that fits it. A piece grows only into the hole
    after it.

    Attributes:
        pieces: (start, size) by sequence.
    """

    def __init__(self, memory: int) -> None:
        self.memory = memory
        self.pieces: dict[str, tuple[int, int]] = {}
        self._holes = FreeList(memory)

    def holes(self) -> list[tuple[int, int]]:
        """Return (start, size) of the holes in order."""
        holes, end = [], 0
        for start, size in [*sorted(self.pieces.values()), (self.memory, 0)]:
            if start > end:
                holes.append((end, start - end))
            end = start + size
        return holes

    def can_start(self, tokens: int) -> bool:
        """Return whether a new sequence would fit."""
        return tokens <= self.largest

    def store(self, name: str, tokens: int) -> bool:
        """Store a sequence, or let it grow to `tokens`. Return False if it does not fit."""
        if name in self.pieces:
            start, size = self.pieces[name]
            fits = tokens == size or self._holes.take_from(start + size, tokens - size)
        else:
            start = self._holes.take(tokens)
            fits = start >= 0
        if fits:
            self.pieces[name] = (start, tokens)
        return fits

    def release(self, name: str) -> None:
        """Release a sequence, if it is stored."""
        if name in self.pieces:
            self._holes.release(*self.pieces.pop(name))

    @property
    def free(self) -> int:
        """Free token slots."""
        return self._holes.free

    @property
    def largest(self) -> int:
        """Tokens of the largest hole."""
        return self._holes.largest


class PagedAllocator:
    """Whole blocks from a queue. Contiguous slots are blocks of the longest length, one a sequence.

    Attributes:
        queue: Free blocks.
        tables: Blocks by sequence, in order of their tokens.
        tokens: Stored tokens by sequence.
    """

    def __init__(self, memory: int, block: int, max_blocks: int | None = None) -> None:
        self.memory = memory
        self.block = block
        self.max_blocks = max_blocks or memory // block
        self.queue = deque(range(memory // block))
        self.tables: dict[str, list[int]] = {}
        self.tokens: dict[str, int] = {}

    def can_start(self, tokens: int) -> bool:
        """Return whether a new sequence would fit."""
        return -(-tokens // self.block) <= min(len(self.queue), self.max_blocks)

    def store(self, name: str, tokens: int) -> bool:
        """Store a sequence, or let it grow to `tokens`. Return False if it does not fit."""
        table, blocks = self.tables.get(name, []), -(-tokens // self.block)
        more = blocks - len(table)
        if more > len(self.queue) or blocks > self.max_blocks:
            return False
        self.tables[name] = table + [self.queue.popleft() for _ in range(more)]
        self.tokens[name] = tokens
        return True

    def release(self, name: str) -> None:
        """Release a sequence, if it is stored."""
        self.tokens.pop(name, None)
        self.queue.extend(reversed(self.tables.pop(name, [])))

    @property
    def free(self) -> int:
        """Free token slots."""
        return len(self.queue) * self.block

    @property
    def waste(self) -> Waste:
        """Return the allocated slots, and those that store tokens."""
        allocated = sum(map(len, self.tables.values())) * self.block
        return Waste(allocated, sum(self.tokens.values()))


Allocator = FirstFitAllocator | PagedAllocator


class AllocationRun(NamedTuple):
    """One record a step, and the allocators after the last step."""

    records: list[Record]
    slots: PagedAllocator
    first_fit: FirstFitAllocator
    pages: PagedAllocator


def play(
    steps: Sequence[AllocationStep], memory: int, longest: int, block: int
) -> AllocationRun:
    """Run the steps with three allocators of `memory` token slots. Raises UserError if the memory
    is too large."""
    if memory > MAX_SLOTS:
        raise UserError(
            f"{memory:,} token slots are too many to play allocations in",
            hint="Begin the file with memory TOKENS",
        )
    slots, pages = (
        PagedAllocator(memory, longest, max_blocks=1),
        PagedAllocator(memory, block),
    )
    pieces = FirstFitAllocator(memory)
    records = []
    for step in steps:
        record: Record = {
            "line": step.line,
            "request": step.text,
            "tokens": step.tokens or None,
            "memory_tokens": memory,
        }
        allocators: dict[str, Allocator] = {
            "contiguous": slots,
            "first_fit": pieces,
            "paged": pages,
        }
        for name, allocator in allocators.items():
            record[name] = _run_step(allocator, step)
            record[f"{name}_free_tokens"] = allocator.free
        record |= {
            "contiguous_free_slots": len(slots.queue),
            "first_fit_largest_hole": pieces.largest,
            "paged_free_blocks": len(pages.queue),
            "block_table": pages.tables.get(step.name),
        }
        records.append(record)
    return AllocationRun(records, slots, pieces, pages)


def _run_step(allocator: Allocator, step: AllocationStep) -> bool | None:
    """Return whether the step is granted; None for a release."""
    if not step.name:
        return allocator.can_start(step.tokens)
    if step.tokens:
        return allocator.store(step.name, step.tokens)
    allocator.release(step.name)
    return None


def read_script(text: str) -> AllocationScript:
    """Read a file of `NAME TOKENS` (a sequence that starts or grows), `free NAME`, `ask TOKENS`,
    and first `memory TOKENS`.

    Blank lines and text after # are skipped. Raises UserError with the line.
    """
    stored_tokens: dict[str, int] = {}
    steps: list[AllocationStep] = []
    memory = 0
    for number, line in enumerate(read_text(Path(text), MAX_SCRIPT_BYTES).splitlines(), 1):
        words = line.partition("#")[0].split()
        try:
            if len(words) == 2 and words[0] == "memory" and not steps and not memory:
                memory = parse_tokens(words[1], "memory")
            elif words:
                steps.append(_parse_step(number, words, stored_tokens))
        except UserError as error:
            raise UserError(error.what, f"{text}, line {number}", error.hint) from None
    if not 0 < len(steps) <= MAX_STEPS:
        raise UserError(f"holds {len(steps):,} steps, not 1 to {MAX_STEPS:,}", text, FORMS)
    return AllocationScript(tuple(steps), memory)


def _parse_step(number: int, words: list[str], stored_tokens: dict[str, int]) -> AllocationStep:
    """Parse one line, and update the tokens of each sequence."""
    if len(words) != 2 or words[0] == "memory":
        raise UserError(f"{' '.join(words)!r} is no step", hint=FORMS)
    first, second = words
    if first == "free":
        if stored_tokens.pop(second, None) is None:
            raise UserError(f"{second!r} has no tokens to release")
        return AllocationStep(number, second, 0)
    tokens = parse_tokens(second, "tokens")
    if first == "ask":
        return AllocationStep(number, "", tokens)
    if tokens < stored_tokens.get(first, 0):
        raise UserError(
            f"{first!r} has {stored_tokens[first]:,} tokens and cannot shrink to {tokens:,}",
            hint=f"Release it: free {first}",
        )
    stored_tokens[first] = tokens
    return AllocationStep(number, first, tokens)
