"""A layout: how one GPU's cache memory is divided, and what capacity follows from that.

A plan says what one pipeline stage's GPU allocates for so many sequences of a length. Capacity follows from it alone: the
most sequences, or the longest one, whose bytes are within a pool.
"""

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from kvcalc.units import MOST_TOKENS


class Term(NamedTuple):
    """A share of one sequence's bytes: unit · (⌈min(tokens, cap)/block⌉ + extra). cap −1 is no cap; cause names the cap."""

    unit: int
    block: int
    cap: int = -1
    extra: int = 0
    cause: str = ""

    def count(self, tokens: int) -> int:
        """Blocks of a sequence of so many tokens."""
        return -(-(min(tokens, self.cap) if self.cap >= 0 else tokens) // self.block) + self.extra


class Plan:
    """How one GPU's cache memory is laid out. Engines subclass it; figures that an engine has not are None."""

    block_size: int | None = None
    page_bytes: int | None = None
    bytes_per_block: int | None = None
    notes: tuple[str, ...] = ()

    def needed(self, sequences: int, length: int, shared: int = 0) -> int:
        """The least budget with which `sequences` sequences of `length` tokens fit, their first `shared` tokens common."""
        raise NotImplementedError

    def pool(self, budget: int) -> int:
        """The bytes that the engine takes of a budget."""
        return budget

    def allocated(self, budget: int, sequences: int, length: int) -> int:
        """The bytes that the engine allocates for the cache, given a budget and what it is to hold."""
        return self.pool(budget)

    def parts(self, sequences: int, length: int) -> dict[str, int]:
        """Buffers that the engine logs apart, by the record's key."""
        return {}

    def num_blocks(self, budget: int) -> int | None:
        """Blocks in the pool."""
        return None

    def request_blocks(self, length: int) -> int | None:
        """Blocks that one sequence of `length` tokens may hold."""
        return None

    def concurrency(self, budget: int, length: int) -> float:
        """Sequences of `length` tokens in the pool, as a fraction: pool ÷ what one needs."""
        one = self.needed(1, length)
        return self.pool(budget) / one if one else 0.0

    def tokens(self, budget: int, length: int) -> int:
        """Tokens in the pool, in sequences of `length`: int(concurrency · length)."""
        return int(self.concurrency(budget, length) * length)

    def terms(self) -> Sequence[Term]:
        """One sequence's bytes as a sum of terms."""
        return ()

    def request_pool(self, budget: int) -> int:
        """Return the bytes of the pool that requests may take."""
        return self.pool(budget) - self.needed(0, 0)

    def request_bytes(self, budget: int, tokens: Any) -> Any:
        """Return the pool's bytes that one request takes, for an array of its numbers of tokens."""
        import numpy as np

        taken = np.zeros(tokens.size, dtype=np.int64)
        for term in self.terms():
            counted = np.minimum(tokens, term.cap) if term.cap >= 0 else tokens
            taken += term.unit * (-(-counted // term.block) + term.extra)
        return taken

    def breakpoints(self) -> list[dict[str, Any]]:
        """One sequence's cost as fixed + slope·tokens, in whole blocks, from each breakpoint on."""
        return segments(self.terms())

    def describe(self, length: int) -> list[str]:
        """The layout with the numbers put in, a line each."""
        return []

    def most_sequences(self, budget: int, length: int, shared: int = 0) -> int:
        """The most sequences of `length` tokens whose bytes are within the pool."""
        return reached(lambda n: self.needed(n, length, shared), self.pool(budget))

    def many_sequences(self, budgets: Any, length: int, shared: int = 0) -> Any:
        """`most_sequences` of each of an array of budgets, as int64; of equal ones once."""
        import numpy as np

        each, at = np.unique(budgets, return_inverse=True)
        most = np.array([self.most_sequences(int(budget), length, shared) for budget in each], dtype=np.int64)
        return most[at].reshape(budgets.shape)

    def most_beside(self, memory: int, length: int) -> int:
        """Sequences of `length` tokens that `memory` bytes hold beside a pool that stands; 0 where they need none."""
        empty = self.needed(0, length)
        return largest(lambda n: self.needed(n, length) - empty <= memory) if self.needed(1, length) > empty else 0

    def longest(self, budget: int, sequences: int, shared: int = 0) -> int | None:
        """The longest context of `sequences` sequences at once within the pool; None where no length is too long."""
        found = reached(lambda s: self.needed(sequences, s, shared), self.pool(budget))
        return None if found == MOST_TOKENS else found


def largest(fits: Callable[[int], bool], most: int = MOST_TOKENS) -> int:
    """The largest number from 0 to `most` that fits, where whatever is below a number that fits does too."""
    low, high = 0, 1
    while high < most and fits(high):
        low, high = high, min(2 * high, most)
    if high == most and fits(most):
        return most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def reached(cost: Callable[[int], int], pool: int, most: int = MOST_TOKENS) -> int:
    """The largest number from 0 to `most` whose cost is within a pool, 0 where none is; a cost never falls.

    As `largest`, in few steps where the cost is nearly a line: on the line through both ends, and in the middle every third.
    """
    low, high, under, over = 0, most, cost(0), cost(most)
    if over <= pool:
        return most
    step = 0
    while high - low > 1:
        step += 1
        middle = low + (pool - under) * (high - low) // (over - under) if step % 3 and under <= pool else (low + high) // 2
        middle = min(max(middle, low + 1), high - 1)
        value = cost(middle)
        if value <= pool:
            low, under = middle, value
        else:
            high, over = middle, value
    return low


def segments(terms: Sequence[Term]) -> list[dict[str, Any]]:
    """Terms as pieces: from so many tokens on, bytes = fixed + slope · tokens (tokens in whole blocks).

    The slope is a whole number of bytes where it is one, else a fraction as a float.
    """
    caps: dict[int, str] = {0: ""}
    for term in terms:
        if term.cap > 0:
            caps[term.cap] = term.cause
    found = []
    for start, cause in sorted(caps.items()):
        growing = [t for t in terms if t.cap < 0 or t.cap > start]
        full = [t for t in terms if 0 <= t.cap <= start]
        slope = sum((Fraction(t.unit, t.block) for t in growing), Fraction(0))
        fixed = sum(t.unit * t.count(t.cap) for t in full) + sum(t.unit * t.extra for t in growing)
        found.append(
            {
                "from_tokens": start,
                "fixed_bytes": fixed,
                "bytes_per_token": int(slope) if slope.denominator == 1 else float(slope),
                "block_tokens": max((t.block for t in growing), default=1),
                "cause": cause,
            }
        )
    return found
