"""The inverse of a budget: what just holds the sequences asked for, and the greatest settings that an engine could be given."""

from collections.abc import Sequence
from typing import NamedTuple

from kvcalc.capacity.engines import Plan
from kvcalc.capacity.engines.layout import largest
from kvcalc.capacity.request import Request
from kvcalc.units import MOST_TOKENS

STEPS = 10_000  # of a utilization
SORTED_APART = 128  # requests from which vLLM's sampler takes fewer bytes for each: on either side more requests take more
CUT_APART = 32_768  # tokens beyond which vLLM's V0 cuts prompts: on either side longer ones take more


class Needed(NamedTuple):
    """The inverse, at the end that answers: what just holds the sequences asked for, and the greatest settings that hold.

    cache: bytes on the GPU that needs most. utilization: the least share, in ten thousandths; None where it is above 1.
    sequences: the greatest max_num_seqs of which all fit; length: the greatest max_model_len, max_num_seqs being what is asked
    for, the engine's own where none is. Both with the terms that an engine has under that setting; None without such a bound.
    """

    cache: int
    utilization: float | None
    sequences: int
    length: int | None


def needed(request: Request, plans: Sequence[Plan]) -> Needed:
    """For the plans of the pipeline stages, in order."""
    count, length, shared = request.wanted, request.length, request.options.shared_prefix
    caches = [plan.needed(count, length, shared) for plan in plans]
    return Needed(max(caches), _utilization(request, caches), _sequences(request, plans), _length(request, plans))


def _utilization(request: Request, caches: Sequence[int]) -> float | None:
    """The least share with which every stage has its bytes."""
    terms = [request.terms(request.start(stage), request.end) for stage in range(len(caches))]

    def short(steps: int) -> bool:
        return any(request.left(t, steps / STEPS) < cache for t, cache in zip(terms, caches, strict=True))

    least = largest(short, STEPS) + 1
    return None if least > STEPS else least / STEPS


def held(request: Request, plans: Sequence[Plan], end: str, most: int) -> int:
    """Of so many sequences on a rank, which a cache holds at an end of the range, those that hold once asked for.

    An engine that is set up for more of them takes more beside its cache.
    """
    if _holds(request, plans, end, most):
        return most
    fewer = largest(lambda count: _holds(request, plans, end, count), most)
    return max(fewer, min(most, request.wanted))


def _holds(request: Request, plans: Sequence[Plan], end: str, count: int) -> bool:
    """Whether every stage holds so many sequences on a rank, set up for as many."""
    length, shared = request.length, request.options.shared_prefix
    return all(
        plan.needed(count, length, shared) <= plan.pool(_left(request, stage, plan, count, end))
        for stage, plan in enumerate(plans)
    )


def _left(request: Request, stage: int, plan: Plan, sequences: int, end: str) -> int:
    """Bytes for the cache of a stage that is set up for, and asked for, so many sequences on a rank; 0: as it is asked."""
    terms = request.terms(request.start(stage, sequences), end)
    return request.cache(plan, request.left(terms))


def _sequences(request: Request, plans: Sequence[Plan]) -> int:
    def holds(count: int) -> bool:
        return _holds(request, plans, request.end, count)

    most = largest(holds) if holds(SORTED_APART) else largest(holds, SORTED_APART - 1)
    return most * request.run.parallelism.dp


def _length(request: Request, plans: Sequence[Plan]) -> int | None:
    asked = request.options
    set_up = request.wanted if asked.max_num_seqs or asked.users or asked.require else 0  # 0: the engine's own number
    found = (longest(request, stage, plan, set_up) for stage, plan in enumerate(plans))
    return min((length for length in found if length is not None), default=None)


def longest(request: Request, stage: int, plan: Plan, set_up: int = 0) -> int | None:
    """Tokens of the longest sequences of which those asked for fit on a stage; None where no length is too long.

    With the terms, the pass and the layout that the engine has of that length, set up for so many sequences; 0: as it is asked.
    """
    count, shared, end = request.wanted, request.options.shared_prefix, request.end
    if not request.options.rules.grows and request.at(CUT_APART).settings == request.at(CUT_APART + 1).settings:
        return plan.longest(_left(request, stage, plan, set_up, end), count, shared)

    def holds(length: int) -> bool:
        then = request.at(length)
        laid = plan if then.settings == request.settings else then.plan(stage)
        return laid.needed(count, length, shared) <= laid.pool(_left(then, stage, laid, set_up, end))

    def beyond(tokens: int) -> bool:
        return holds(CUT_APART + tokens)

    most = CUT_APART + largest(beyond, MOST_TOKENS - CUT_APART) if beyond(1) else largest(holds, CUT_APART)
    return None if most == MOST_TOKENS else most
