"""What allocation wastes for sequences of given lengths: contiguous slots, pieces of exact size, and pages.

Source of the three kinds: Kwon et al. 2023, arXiv 2309.06180 §3.1 and §4.
"""

import random
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from kvcalc.capacity.distribution import lognormal
from kvcalc.capacity.holes import Holes
from kvcalc.errors import UserError
from kvcalc.library.files import read_text
from kvcalc.units import parse_tokens

DRAWN = 1000  # lengths that are drawn from a distribution
MOST_LENGTHS, MOST_FILE = 1_000_000, 16 << 20
REQUESTS = 20_000  # of a simulation, at most


class Waste(NamedTuple):
    """Token slots that an allocator gives, and those of them that hold tokens."""

    slots: int
    used: int

    @property
    def tokens(self) -> int:
        """Slots that hold nothing."""
        return self.slots - self.used

    @property
    def share(self) -> float:
        """The same as a share of all slots."""
        return self.tokens / self.slots if self.slots else 0.0


class External(NamedTuple):
    """A simulated allocator: failures that had enough free in pieces, and the mean share of memory free at those."""

    requests: int
    failures: int
    free: float
    largest: float


def contiguous(lengths: Sequence[int], longest: int) -> Waste:
    """A slot of the longest length for each sequence: Σ (longest − length) is empty. 50 tokens in 1024 slots waste 974."""
    return Waste(longest * len(lengths), sum(lengths))


def paged(lengths: Sequence[int], block: int) -> Waste:
    """Whole blocks: at most block − 1 slots a sequence are empty, and no block is too small for anyone."""
    return Waste(sum(-(-n // block) * block for n in lengths), sum(lengths))


def external(lengths: Sequence[int], capacity: int, seed: int = 0) -> External:
    """First fit of pieces of exactly the lengths' size in `capacity` slots, sequences ending in random order.

    A request that no hole holds waits until others end. It failed by fragmentation where the holes together would have held
    it; then everything free is out of its reach. free: the mean share of the memory that was, largest: its largest hole. Of
    more lengths than 20,000 the first are simulated.
    """
    chance = random.Random(seed)
    once = [n for n in lengths if n <= capacity][:REQUESTS]
    waiting = deque(once * max(1, min(REQUESTS, 20 * len(once)) // max(1, len(once))))
    holes, living = Holes(capacity), list[tuple[int, int]]()
    requests, failures, free_sum, largest_sum = len(waiting), 0, 0, 0
    while waiting:
        start = holes.take(waiting[0])
        if start >= 0:
            living.append((start, waiting.popleft()))
            continue
        if holes.free >= waiting[0]:
            failures, free_sum = failures + 1, free_sum + holes.free
            largest_sum += holes.largest
        at = chance.randrange(len(living))
        living[at], living[-1] = living[-1], living[at]
        holes.give(*living.pop())
    shares = (free_sum / failures / capacity, largest_sum / failures / capacity) if failures else (0.0, 0.0)
    return External(requests, failures, *shares)


def read_lengths(text: str, seed: int = 0) -> list[int]:
    """`--lengths`: a file of whole numbers, one a line or comma-separated, or `lognormal:mean,p99` drawn 1000 times.

    Raises UserError naming the file's line, or what is wrong with the distribution.
    """
    if text.startswith("lognormal:"):
        return drawn(text, seed)
    if ":" in text and not Path(text).exists():
        raise UserError(f"unknown distribution {text!r}", hint="Write lognormal:MEAN,P99 or the name of a file")
    found = []
    for number, line in enumerate(read_text(Path(text), MOST_FILE).splitlines(), 1):
        words = line.partition("#")[0].replace(",", " ").split()
        if number == 1 and len(words) == 1 and words[0].isidentifier() and not _is_number(words[0]):
            continue  # the heading of a CSV column
        for word in words:
            try:
                found.append(parse_tokens(word))
            except UserError as error:
                raise UserError(error.what, f"{text}, line {number}", error.hint) from None
    if not 0 < len(found) <= MOST_LENGTHS:
        raise UserError(f"holds {len(found):,} lengths, not 1 to {MOST_LENGTHS:,}", text)
    return found


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def drawn(text: str, seed: int = 0) -> list[int]:
    """1000 lengths of at least 1 token from `lognormal:MEAN,P99`. Raises UserError where no such distribution is."""
    words = text.removeprefix("lognormal:").split(",")
    if len(words) != 2:
        raise UserError(f"{text!r} should read lognormal:MEAN,P99", hint="For example lognormal:512,4k")
    mean, top = (parse_tokens(word, name) for word, name in zip(words, ("mean", "99th percentile"), strict=True))
    shape, chance = lognormal(mean, top), random.Random(seed)
    return [max(1, round(chance.lognormvariate(shape.mu, shape.sigma))) for _ in range(DRAWN)]
