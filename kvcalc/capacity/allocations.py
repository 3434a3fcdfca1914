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
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from math import exp, log, sqrt
from pathlib import Path
from typing import Any, NamedTuple

from kvcalc.errors import UserError
from kvcalc.library.files import read_text
from kvcalc.records import Record
from kvcalc.units import parse_tokens


class FreeList:
    """Holes of a memory in order of their addresses, with first fit.

    Attributes:
        free: Free slots in all holes.
    """

    def __init__(self, capacity: int) -> None:
        self.free = capacity
        self._starts = [0]
        self._sizes = [capacity]

    @property
    def largest(self) -> int:
        """Slots of the largest hole; 0 if there is none."""
        return max(self._sizes, default=0)

    @property
    def holes(self) -> list[tuple[int, int]]:
        """Start and size of each hole, in order."""
        return [*zip(self._starts, self._sizes, strict=True)]

    def take(self, size: int) -> int:
        """Cut slots off the first hole that is large enough. Return their start, or −1."""
        if size > self.largest:
            return -1
        index = next(i for i, hole in enumerate(self._sizes) if hole >= size)
        start = self._starts[index]
        self._cut(index, size)
        return start

    def take_from(self, start: int, size: int) -> bool:
        """Cut slots off the hole at `start`. Return False if it is not large enough."""
        index = bisect_left(self._starts, start)
        is_hole = index < len(self._starts) and self._starts[index] == start
        if not is_hole or self._sizes[index] < size:
            return False
        self._cut(index, size)
        return True

    def release(self, start: int, size: int) -> None:
        """Free slots again, and join them with neighbouring holes."""
        self.free += size
        index = bisect_left(self._starts, start)
        if index < len(self._starts) and self._starts[index] == start + size:
            size += self._sizes.pop(index)
            del self._starts[index]
        if index and self._starts[index - 1] + self._sizes[index - 1] == start:
            self._sizes[index - 1] += size
        else:
            self._starts.insert(index, start)
            self._sizes.insert(index, size)

    def _cut(self, index: int, size: int) -> None:
        """Remove the first slots of a hole."""
        self.free -= size
        if self._sizes[index] > size:
            self._starts[index] += size
            self._sizes[index] -= size
        else:
            del self._starts[index], self._sizes[index]


Z_99 = 2.3263478740408408  # 99th percentile of a standard normal distribution
# largest ratio of the 99th percentile to the mean
MAX_RATIO = exp(Z_99**2 / 2)


class LogNormal(NamedTuple):
    """Mean and standard deviation of the logarithm of a length."""

    mu: float
    sigma: float


def lognormal(mean: int, p99: int) -> LogNormal:
    """Compute the log-normal distribution with this mean and 99th percentile.

    ln(p99/mean) = z·σ − σ²/2 has the smaller root σ = z − √(z² − 2·ln(p99/mean)); μ = ln(mean) −
    σ²/2. If both are equal, each length is the mean.

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
MAX_REQUESTS = 20_000  # in a simulation


class Waste(NamedTuple):
    """Allocated token slots and the slots that store tokens."""

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
        free: Mean share of the memory that is free at these failures.
        largest: Mean share of the memory in the largest hole then.
    """

    requests: Any = None
    failures: Any = None
    free: Any = None
    largest: Any = None


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
    fitting = [length for length in lengths if length <= capacity][:MAX_REQUESTS]
    requests = fitting * max(1, min(20, MAX_REQUESTS // max(1, len(fitting))))
    holes = FreeList(capacity)
    running: list[tuple[int, int]] = []
    failures = free_sum = largest_sum = 0
    for length in requests:
        while (start := holes.take(length)) < 0:
            if holes.free >= length:
                failures += 1
                free_sum += holes.free
                largest_sum += holes.largest
            index = rng.randrange(len(running))
            running[index], running[-1] = running[-1], running[index]
            holes.release(*running.pop())
        running.append((start, length))
    count = max(1, failures)
    return FragmentationResult(
        requests=len(requests),
        failures=failures,
        free=free_sum / count / capacity,
        largest=largest_sum / count / capacity,
    )


def read_lengths(text: str, seed: int = 0) -> list[int]:
    """Read the lengths of `--lengths`.

    Args:
        text: A file of whole numbers, one a line or comma-separated, or `lognormal:MEAN,P99`.

    Raises:
        UserError: A line of the file is wrong, or there is no such distribution.
    """
    if text.startswith("lognormal:"):
        return sample_lengths(text, seed)
    if ":" in text and not Path(text).exists():
        raise UserError(
            f"unknown distribution {text!r}",
            hint="Write lognormal:MEAN,P99 or the name of a file",
        )
    lengths = []
    lines = read_text(Path(text), MAX_LENGTHS_FILE_BYTES).splitlines()
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].replace(",", " ").split()
        # the heading of a CSV column, but not nan
        is_heading = len(words) == 1 and words[0].isidentifier() and words[0].lower() != "nan"
        for word in words if number > 1 or not is_heading else ():
            try:
                lengths.append(parse_tokens(word))
            except UserError as error:
                raise UserError(error.what, f"{text}, line {number}", error.hint) from None
    if not 0 < len(lengths) <= MAX_LENGTHS:
        raise UserError(f"holds {len(lengths):,} lengths, not 1 to {MAX_LENGTHS:,}", text)
    return lengths


def sample_lengths(text: str, seed: int = 0) -> list[int]:
    """Sample 1000 lengths of at least 1 token from `lognormal:MEAN,P99`. Raises UserError if there
    is no such distribution."""
    words = text.removeprefix("lognormal:").split(",")
    if len(words) != 2:
        raise UserError(
            f"{text!r} should read lognormal:MEAN,P99", hint="For example lognormal:512,4k"
        )
    mean = parse_tokens(words[0], "mean")
    shape = lognormal(mean, parse_tokens(words[1], "99th percentile"))
    rng = random.Random(seed)
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


class FirstFitAllocator(FreeList):
    """Pieces of exact size, each in the first hole that fits it. A piece grows only into the hole
    after it.

    Attributes:
        pieces: (start, size) by sequence.
    """

    def __init__(self, memory: int) -> None:
        super().__init__(memory)
        self.pieces: dict[str, tuple[int, int]] = {}

    def can_start(self, tokens: int) -> bool:
        """Return whether a new sequence would fit."""
        return tokens <= self.largest

    def store(self, name: str, tokens: int) -> bool:
        """Store a sequence, or let it grow to `tokens`. Return False if it does not fit."""
        if name in self.pieces:
            start, size = self.pieces[name]
            fits = tokens == size or self.take_from(start + size, tokens - size)
        else:
            start = self.take(tokens)
            fits = start >= 0
        if fits:
            self.pieces[name] = (start, tokens)
        return fits

    def remove(self, name: str) -> None:
        """Release a sequence, if it is stored."""
        if name in self.pieces:
            self.release(*self.pieces.pop(name))


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

    def remove(self, name: str) -> None:
        """Release a sequence, if it is stored."""
        self.tokens.pop(name, None)
        self.queue.extend(reversed(self.tables.pop(name, [])))

    @property
    def free(self) -> int:
        """Free token slots."""
        return len(self.queue) * self.block

    @property
    def waste(self) -> Waste:
        """Return the allocated slots and the slots that store tokens."""
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
    records: list[Record] = []
    for step in steps:
        record: dict[str, Any] = {
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
    allocator.remove(step.name)
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
