"""Group the requests of a list so that each group is timed in one call.

The contexts of all decode steps in a group fit into one block.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from kvcalc.model.spec import Model
from kvcalc.serving.latency import MOST_AGAIN, block_of, check_steps, passes_in_one

MOST_IN_ALL = 1 << 21  # passes of all requests; shared passes count once


class Asked(Protocol):
    """The fields of a request that determine its passes, named as in `LatencyOptions`."""

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
    """Requests whose steps are timed together.

    Attributes:
        numbers: Indices of the requests.
        ranges: Ranges (first, end) of the contexts of their steps. Empty for a request that is
            timed separately.
        heads: LM head positions of the requests that are also computed without a cache.
        several: Weight of one pass in the limits on passes. See `passes_in_one`.
    """

    numbers: list[int]
    ranges: list[tuple[int, int]]
    heads: set[str]
    several: int


def groups_of(requests: Mapping[int, Asked], model: Model) -> Iterator[Group]:
    """Yield groups of requests whose steps cover at most `block_of(model)` contexts.

    A request with more contexts than one block is a group by itself, without ranges.
    """
    most, several = block_of(model), passes_in_one(model)
    some: list[int] = []
    held: list[tuple[int, int]] = []

    def group(ranges: list[tuple[int, int]]) -> Group:
        return Group(some, ranges, {requests[number].head for number in some if requests[number].no_cache}, several)

    for number in sorted(requests, key=lambda n: (requests[n].input_len, requests[n].output_len)):
        more = requests[number].input_len + 1, requests[number].context + 1
        joined = _joined([*held, more])
        if some and sum(end - first for first, end in joined) > most:
            yield group(held)
            some, joined = [], [more]
        some, held = [*some, number], joined
        if more[1] - more[0] > most:
            yield group([])
            some, held = [], []
    if some:
        yield group(held)


def _joined(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the union of ranges (first, end) as the smallest number of disjoint ranges."""
    found: list[tuple[int, int]] = []
    for first, end in sorted(ranges):
        if found and first <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((first, end))
    return found


def check_work(requests: Sequence[Asked], groups: Sequence[Group]) -> None:
    """Check that the requests do not take more passes than the limits allow.

    Passes are counted as passes through a model with few kinds of layers.

    Raises:
        UserError: The requests take more than MOST_IN_ALL passes, or more than MOST_AGAIN passes
            without a cache.
    """
    passes = again = 0
    for group in groups:
        steps = group.several * (sum(end - first for first, end in group.ranges) or requests[group.numbers[0]].output_len)
        for asked in (requests[number] for number in group.numbers):
            passes += group.several * (asked.input_len // (asked.max_num_batched_tokens or asked.input_len))
        passes, again = passes + steps, again + len(group.heads) * steps
    check_steps("passes of all requests", passes, MOST_IN_ALL)
    check_steps("tokens of answers without a cache", again, MOST_AGAIN)
