"""Waste of memory allocators: contiguous slots, first fit, and pages.

`fit --lengths` computes the waste for lengths of a file or of a log-normal distribution. `fit
--allocations` plays a file of allocations and releases to the three allocators.

Source of the allocators: Kwon et al. 2023, arXiv 2309.06180 §3.1 (slots of the longest length,
pieces of exact size) and §4.1–4.3 (blocks and the block table). Blocks come from the head of a
queue, at first in numerical order. Released blocks join the end of the queue, the last block of a
sequence first (vLLM, `v1/core/kv_cache_utils.py`, FreeKVCacheBlockQueue).
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

Z_99 = 2.3263478740408408  # 99th percentile of a standard normal distribution
# largest ratio of the 99th percentile to the mean
MAX_RATIO = exp(Z_99**2 / 2)


NUM_SAMPLES = 1000  # lengths from a distribution
MAX_LENGTHS, MAX_LENGTHS_FILE_BYTES = 1_000_000, 16 << 20
MAX_REQUESTS = 20_000  # in a simulation


class Waste(NamedTuple):
    """Token slots that an allocator has given to sequences, and how many of them store tokens.

    A token slot is memory for the keys and values of one token.

    Attributes:
        slots: Allocated token slots.
        used: Slots that store tokens.
    """

    slots: int
    used: int

    @property
    def tokens(self) -> int:
        """Return the number of allocated token slots that store nothing."""
        return self.slots - self.used

    @property
    def share(self) -> float:
        """Return the wasted share of the allocated token slots, from 0 to 1; 0 if none are."""
        return self.tokens / self.slots if self.slots else 0.0


class FragmentationResult(NamedTuple):
    """How often free memory is too fragmented for a request, from `simulate_first_fit`.

    The memory is the KV cache, counted in token slots. A hole is a free range between two
    sequences, or before or after all of them. A failure is an attempt to store a request that would
    fit in all holes together, but in no single hole. All fields are None if no simulation was run.

    Attributes:
        requests: Number of simulated requests.
        failures: Number of failures. One request may fail several times before it fits.
        free: Mean share of the memory that is free at a failure, from 0 to 1; 0 without failures.
        largest: Mean share of the memory that the largest hole has at a failure, from 0 to 1; 0
            without failures.
    """

    requests: Any = None
    failures: Any = None
    free: Any = None
    largest: Any = None


def paged_waste(lengths: Sequence[int], block: int) -> Waste:
    """Return the waste if each sequence gets whole blocks. Only its last block has empty slots.

    If `block` is the maximum length, this is the waste of an allocator that reserves the maximum
    length for each sequence. Example: 50 tokens in a block of 1024 waste 974 slots.

    Args:
        lengths: Tokens of each sequence.
        block: Tokens of a block.
    """
    return Waste(sum(-(-n // block) * block for n in lengths), sum(lengths))


def simulate_first_fit(
    lengths: Sequence[int], capacity: int, seed: int = 0
) -> FragmentationResult:
    """Compute how often free memory is large enough for a request, but split into small holes.

    This is the external fragmentation of an allocator without pages. Each request is one contiguous
    piece of memory, in the first hole of at least its length. If no hole is large enough, stored
    requests end in random order until one is. The lengths are repeated up to 20 times, for at most
    20,000 requests.

    Args:
        lengths: Tokens of each request. Longer requests than `capacity` are left out.
        capacity: Memory in token slots, one per token.
        seed: Seed of the random order in which stored requests end.
    """
    rng = random.Random(seed)
    fitting = [length for length in lengths if length <= capacity][:MAX_REQUESTS]
    requests = fitting * max(1, min(20, MAX_REQUESTS // max(1, len(fitting))))
    memory = FirstFitAllocator(capacity)
    running: list[str] = []
    free, largest = [], []
    for number, length in enumerate(requests):
        while not memory.store(str(number), length):
            if memory.free >= length:
                free.append(memory.free)
                largest.append(memory.largest)
            index = rng.randrange(len(running))
            running[index], running[-1] = running[-1], running[index]
            memory.remove(running.pop())
        running.append(str(number))
    count = max(1, len(free))
    shares = (sum(sizes) / count / capacity for sizes in (free, largest))
    return FragmentationResult(len(requests), len(free), *shares)


def read_lengths(text: str, seed: int = 0) -> list[int]:
    """Parse the option `--lengths` of `fit` into a list with the tokens of each example request.

    Args:
        text: Whole numbers separated by commas, the path of a file with such numbers on any number
            of lines, or `lognormal:MEAN,P99` for 1000 random lengths.
        seed: Seed of the samples from a log-normal distribution.

    Raises:
        UserError: A line of the file is wrong, or no log-normal distribution has this mean and
            percentile.
    """
    if text.startswith("lognormal:"):
        return sample_lengths(text, seed)
    if ":" in text and not Path(text).exists():
        raise UserError(
            f"unknown distribution {text!r}", "Write lognormal:MEAN,P99 or the name of a file"
        )
    lengths = []
    lines, place = [text], "--lengths"
    if not text[:1].isdigit() or Path(text).exists():
        lines, place = read_text(Path(text), MAX_LENGTHS_FILE_BYTES).splitlines(), text
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].replace(",", " ").split()
        # the heading of a CSV column, but not nan
        is_heading = len(words) == 1 and words[0].isidentifier() and words[0].lower() != "nan"
        for word in words if number > 1 or not is_heading else ():
            try:
                lengths.append(parse_tokens(word))
            except UserError as error:
                raise UserError(error.what, error.hint, f"{place}, line {number}") from None
    if not 0 < len(lengths) <= MAX_LENGTHS:
        raise UserError(
            f"holds {len(lengths):,} lengths, not 1 to {MAX_LENGTHS:,}", where=place
        )
    return lengths


def sample_lengths(text: str, seed: int = 0) -> list[int]:
    """Return 1000 request lengths in tokens, sampled from a log-normal distribution.

    Each length is at least 1 token.

    Args:
        text: `lognormal:MEAN,P99`, with mean and 99th percentile in tokens.
        seed: Seed of the samples.

    Raises:
        UserError: The text has another form, or no log-normal distribution has this mean and
            percentile.
    """
    words = text.removeprefix("lognormal:").split(",")
    if len(words) != 2:
        raise UserError(
            f"{text!r} should read lognormal:MEAN,P99", "For example lognormal:512,4k"
        )
    mean = parse_tokens(words[0], "mean")
    mu, sigma = lognormal(mean, parse_tokens(words[1], "99th percentile"))
    rng = random.Random(seed)
    return [max(1, round(rng.lognormvariate(mu, sigma))) for _ in range(NUM_SAMPLES)]


def lognormal(mean: int, p99: int) -> tuple[float, float]:
    """Return μ and σ of a log-normal distribution: mean and standard deviation of the logarithm.

    With z = 2.326, the 99th percentile of a standard normal distribution: ln(p99/mean) = z·σ −
    σ²/2. Its smaller root is σ = z − √(z² − 2·ln(p99/mean)), and μ = ln(mean) − σ²/2. If mean and
    p99 are equal, σ is 0.

    Args:
        mean: Mean length in tokens.
        p99: 99th percentile of the lengths in tokens.

    Raises:
        UserError: The percentile is below the mean, or too far above it for any σ.
    """
    if not mean <= p99 <= mean * MAX_RATIO:
        raise UserError(
            f"no log-normal distribution has mean {mean:,} and 99th percentile {p99:,}",
            f"The percentile is at least the mean and at most {MAX_RATIO:.1f} times it",
        )
    sigma = Z_99 - sqrt(max(0.0, Z_99**2 - 2 * log(p99 / mean)))
    return log(mean) - sigma**2 / 2, sigma


MAX_STEPS, MAX_SCRIPT_BYTES, MAX_SLOTS = 10_000, 1 << 20, 1 << 27
SCRIPT_FORMS = (
    "Write NAME TOKENS, NAME RESERVED USED, free NAME, ask TOKENS, or memory TOKENS first"
)


class AllocationStep(NamedTuple):
    """One line of a script of allocations and releases, which `run_allocations` executes.

    Attributes:
        line: Number of the line in the script's file, from 1. If the script is a text with
            semicolons, the number of the step.
        name: Name of the sequence. "" if the line only asks whether a new sequence of `tokens`
            tokens would fit.
        tokens: Reserved tokens of the sequence in total; 0 to release it.
        used: Stored tokens, if the sequence uses only a part of its reservation; else 0. The paged
            allocator reserves only the used tokens.
    """

    line: int
    name: str
    tokens: int
    used: int = 0

    @property
    def text(self) -> str:
        if not self.name:
            return f"ask {self.tokens}"
        if not self.tokens:
            return f"free {self.name}"
        return f"{self.name} {self.tokens}{f' {self.used}' * bool(self.used)}"


class FirstFitAllocator:
    """A memory allocator that gives each sequence one contiguous piece of its exact size.

    A new piece starts in the first hole (free range) that is large enough. A piece grows only into
    the hole directly after it. Sizes are token slots: memory for one token each.

    Attributes:
        memory: Size of the memory in token slots.
        holes: Pairs (start, size) of the free ranges in token slots, in order of their start.
        pieces: Pairs (start, size) in token slots, by name of the sequence.
        tokens: Stored tokens, by name of the sequence. A sequence may reserve more than it stores.
    """

    def __init__(self, memory: int) -> None:
        self.memory = memory
        self.holes = [(0, memory)]
        self.pieces: dict[str, tuple[int, int]] = {}
        self.tokens: dict[str, int] = {}

    @property
    def waste(self) -> Waste:
        """Return the token slots given to sequences, and how many of them store tokens."""
        return Waste(self.memory - self.free, sum(self.tokens.values()))

    @property
    def free(self) -> int:
        """Return the number of free token slots in all holes."""
        return sum(size for _, size in self.holes)

    @property
    def largest(self) -> int:
        """Return the number of token slots in the largest hole; 0 without a hole."""
        return max((size for _, size in self.holes), default=0)

    def can_start(self, tokens: int) -> bool:
        """Return whether one hole is large enough for a new sequence of `tokens` tokens.

        Nothing is stored.
        """
        return tokens <= self.largest

    def store(self, name: str, tokens: int) -> bool:
        """Give a new sequence memory, or let a stored one grow. Return False if it does not fit.

        If the result is False, nothing changes.

        Args:
            name: Name of the sequence.
            tokens: Total tokens of the sequence after the call.
        """
        start, size = self.pieces.get(name, (0, 0))
        more = tokens - size
        for index, (hole, hole_size) in enumerate(self.holes if more else ()):
            if hole_size >= more and (not size or hole == start + size):
                start = start if size else hole
                rest = hole_size - more
                self.holes[index : index + 1] = [(hole + more, rest)] if rest else []
                break
        else:
            if more:
                return False
        self.pieces[name] = start, tokens
        self.tokens[name] = tokens
        return True

    def remove(self, name: str) -> None:
        """Release a sequence, if it is stored, and join its slots with neighbouring holes.

        Args:
            name: Name of the sequence.
        """
        if name not in self.pieces:
            return
        del self.tokens[name]
        start, size = self.pieces.pop(name)
        first = last = bisect_left(self.holes, (start, 0))
        if last < len(self.holes) and self.holes[last][0] == start + size:
            size += self.holes[last][1]
            last += 1
        if first and sum(self.holes[first - 1]) == start:
            first -= 1
            start, size = self.holes[first][0], size + self.holes[first][1]
        self.holes[first:last] = [(start, size)]


class PagedAllocator:
    """A memory allocator that gives each sequence whole blocks from a queue of free blocks.

    It also models an allocator of contiguous slots: with `block` equal to the maximum length and
    `max_blocks` 1, each sequence gets one slot of the maximum length.

    Attributes:
        memory: Size of the memory in token slots, one per token.
        block: Tokens of a block.
        max_blocks: Maximum number of blocks of one sequence.
        queue: Numbers of the free blocks. Blocks are taken from the front.
        tables: Block numbers of each sequence, in order of its tokens, by name of the sequence.
        tokens: Stored tokens, by name of the sequence.
    """

    def __init__(self, memory: int, block: int, max_blocks: int | None = None) -> None:
        self.memory = memory
        self.block = block
        self.max_blocks = max_blocks or memory // block
        self.queue = deque(range(memory // block))
        self.tables: dict[str, list[int]] = {}
        self.tokens: dict[str, int] = {}

    def can_start(self, tokens: int) -> bool:
        """Return whether enough blocks are free for a new sequence of `tokens` tokens.

        Nothing is stored.
        """
        return -(-tokens // self.block) <= min(len(self.queue), self.max_blocks)

    def store(self, name: str, tokens: int) -> bool:
        """Give a new sequence blocks, or let a stored one grow. Return False if it does not fit.

        If the result is False, nothing changes.

        Args:
            name: Name of the sequence.
            tokens: Total tokens of the sequence after the call.
        """
        table, blocks = self.tables.get(name, []), -(-tokens // self.block)
        more = blocks - len(table)
        if more > len(self.queue) or blocks > self.max_blocks:
            return False
        self.tables[name] = table + [self.queue.popleft() for _ in range(more)]
        self.tokens[name] = tokens
        return True

    def remove(self, name: str) -> None:
        """Put the blocks of a sequence at the end of the free queue, its last block first.

        Args:
            name: Name of the sequence. If no such sequence is stored, nothing changes.
        """
        self.tokens.pop(name, None)
        self.queue.extend(reversed(self.tables.pop(name, [])))

    @property
    def free(self) -> int:
        """Return the number of token slots in free blocks."""
        return len(self.queue) * self.block

    @property
    def waste(self) -> Waste:
        """Return the token slots given to sequences, and how many of them store tokens."""
        return Waste(
            sum(map(len, self.tables.values())) * self.block, sum(self.tokens.values())
        )


class AllocationRun(NamedTuple):
    """The result of a script of allocations that three allocators have executed, to compare them.

    Attributes:
        records: One dict per line of the script (the keys of `AllocationRecord`): whether each
            allocator could do the line, and its free and wasted tokens after the line.
        slots: Allocator that reserves a slot of the longest length per sequence, after the last
            line.
        first_fit: First-fit allocator of contiguous pieces of exact size, after the last line.
        pages: Paged allocator, after the last line.
    """

    records: list[Record]
    slots: PagedAllocator
    first_fit: FirstFitAllocator
    pages: PagedAllocator

    @property
    def wastes(self) -> list[Waste]:
        """Return the token slots and the used ones after the last line of the script, a `Waste` for
        each allocator: contiguous slots, first fit, pages."""
        return [self.slots.waste, self.first_fit.waste, self.pages.waste]


def run_allocations(
    steps: Sequence[AllocationStep], memory: int, longest: int, block: int
) -> AllocationRun:
    """Run each line of a script in three allocators: slots, first fit and pages.

    Args:
        steps: The lines of the script from `read_script`, without its `memory` line.
        memory: Memory of each of the three allocators in token slots.
        longest: Tokens of the longest possible sequence. The first allocator reserves a slot of
            this size for each sequence, and cannot store a longer one.
        block: Tokens of a block of the paged allocator.

    Raises:
        UserError: `memory` exceeds 2^27 token slots.
    """
    if memory > MAX_SLOTS:
        raise UserError(
            f"{memory:,} token slots are too many to play allocations in",
            "Begin the file with memory TOKENS",
        )
    run = AllocationRun(
        records=[],
        slots=PagedAllocator(memory, longest, max_blocks=1),
        first_fit=FirstFitAllocator(memory),
        pages=PagedAllocator(memory, block),
    )
    for step in steps:
        record = {
            "line": step.line,
            "request": step.text,
            "tokens": step.tokens or None,
            "memory_tokens": memory,
        }
        allocators: dict[str, FirstFitAllocator | PagedAllocator] = {
            "contiguous": run.slots,
            "first_fit": run.first_fit,
            "paged": run.pages,
        }
        for name, allocator in allocators.items():
            if not step.name:
                record[name] = allocator.can_start(step.tokens)
            elif step.tokens:
                used = step.used or step.tokens
                reserved = used if name == "paged" else step.tokens
                record[name] = allocator.store(step.name, reserved)
                if record[name]:
                    allocator.tokens[step.name] = used
            else:
                record[name] = None
                allocator.remove(step.name)
            record[f"{name}_free_tokens"] = allocator.free
            record[f"{name}_wasted_tokens"] = allocator.waste.tokens
        record |= {
            "contiguous_free_slots": len(run.slots.queue),
            "first_fit_largest_hole": run.first_fit.largest,
            "paged_free_blocks": len(run.pages.queue),
            "block_table": run.pages.tables.get(step.name),
        }
        run.records.append(record)
    return run


def read_script(text: str) -> tuple[list[AllocationStep], int]:
    """Parse a script of allocations and releases.

    A script has these lines, in which text after # is skipped:

    - `memory TOKENS`: the size of the memory, only as the first line.
    - `NAME TOKENS`: a sequence starts or grows to this total.
    - `NAME RESERVED USED`: the same, but only USED of the reserved tokens are stored.
    - `free NAME`: the sequence ends.
    - `ask TOKENS`: would a new sequence of this length fit?

    Example: "memory 3k; A 1024 50; B 2048; C 1024; free B; C 1024", with 3k = 3072 tokens.

    Args:
        text: Path of a file with one step per line, or steps separated by semicolons.

    Returns:
        The steps, and the size of the memory in tokens, or 0 if the script states none.

    Raises:
        UserError: A step is invalid. The message names the line.
    """
    stored_tokens: dict[str, int] = {}
    steps = []
    memory = 0
    lines, place = text.split(";"), "--allocations"
    if len(lines) == 1:
        lines, place = read_text(Path(text), MAX_SCRIPT_BYTES).splitlines(), text
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            if words[0] != "memory":
                steps.append(AllocationStep(number, *_parse_step(words, stored_tokens)))
            elif len(words) == 2 and not steps and not memory:
                memory = parse_tokens(words[1], "memory")
            else:
                raise UserError(f"{' '.join(words)!r} is no step", SCRIPT_FORMS)
        except UserError as error:
            raise UserError(error.what, error.hint, f"{place}, line {number}") from None
    if not 0 < len(steps) <= MAX_STEPS:
        raise UserError(
            f"holds {len(steps):,} steps, not 1 to {MAX_STEPS:,}", SCRIPT_FORMS, place
        )
    return steps, memory


def _parse_step(words: list[str], stored_tokens: dict[str, int]) -> tuple[str, int, int]:
    """Return the name, the tokens and the used tokens of a line, and update the tokens of each
    sequence."""
    name, *amounts = words
    if len(amounts) not in (1, 1 + (name not in ("free", "ask"))):
        raise UserError(f"{' '.join(words)!r} is no step", SCRIPT_FORMS)
    if name == "free":
        if not stored_tokens.pop(amounts[0], 0):
            raise UserError(f"{amounts[0]!r} has no tokens to release")
        return amounts[0], 0, 0
    tokens, used = (parse_tokens(amount, "tokens") for amount in (amounts[0], amounts[-1]))
    if name == "ask":
        return "", tokens, 0
    if used > tokens:
        raise UserError(f"{name!r} uses {used:,} tokens and reserves only {tokens:,}")
    if tokens < stored_tokens.get(name, 0):
        raise UserError(
            f"{name!r} has {stored_tokens[name]:,} tokens and cannot shrink to {tokens:,}",
            f"Release it: free {name}",
        )
    stored_tokens[name] = tokens
    return name, tokens, used if len(amounts) == 2 else 0
