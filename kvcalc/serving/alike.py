"""Requests of a list that are timed together: those whose steps are at contexts of which one call times all."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from kvcalc.serving.latency import BLOCK, MOST_AGAIN, check_steps

MOST_IN_ALL = 1 << 21  # passes of all requests, those that they share counted once


class Asked(Protocol):
    """What tells the passes of a request, by the names of `LatencyOptions`."""

    @property
    def input_len(self) -> int: ...

    @property
    def output_len(self) -> int: ...

    @property
    def max_num_batched_tokens(self) -> int: ...

    @property
    def context(self) -> int: ...

    @property
    def no_cache(self) -> bool: ...

    @property
    def head(self) -> str: ...


class Group(NamedTuple):
    """Requests by their numbers, the contexts of their steps in ranges, and the heads of those without a cache.

    ranges: none for a request that is timed by itself.
    """

    numbers: list[int]
    ranges: list[tuple[int, int]]
    heads: set[str]


def groups_of(requests: Mapping[int, Asked]) -> Iterator[Group]:
    """Requests whose steps are at no more than BLOCK contexts; by itself one whose own are more."""
    some: list[int] = []
    held: list[tuple[int, int]] = []

    def group(ranges: list[tuple[int, int]]) -> Group:
        return Group(some, ranges, {requests[number].head for number in some if requests[number].no_cache})

    for number in sorted(requests, key=lambda n: (requests[n].input_len, requests[n].output_len)):
        more = requests[number].input_len + 1, requests[number].context + 1
        joined = _joined([*held, more])
        if some and sum(end - first for first, end in joined) > BLOCK:
            yield group(held)
            some, joined = [], [more]
        some, held = [*some, number], joined
        if more[1] - more[0] > BLOCK:
            yield group([])
            some, held = [], []
    if some:
        yield group(held)


def _joined(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same numbers in as few ranges (first, end) as hold each once."""
    found: list[tuple[int, int]] = []
    for first, end in sorted(ranges):
        if found and first <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((first, end))
    return found


def check_work(requests: Sequence[Asked], groups: Sequence[Group]) -> None:
    """Raises UserError where requests in these groups take more passes than are timed."""
    passes = sum(r.input_len // (r.max_num_batched_tokens or r.input_len) for r in requests)
    again = 0
    for group in groups:
        steps = sum(end - first for first, end in group.ranges) or requests[group.numbers[0]].output_len
        passes, again = passes + steps, again + len(group.heads) * steps
    check_steps("passes of all requests", passes, MOST_IN_ALL)
    check_steps("tokens of answers without a cache", again, MOST_AGAIN)
