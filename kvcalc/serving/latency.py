"""Latency of one request, or of a batch of equal requests, with and without a cache.

e2e = ttft + (output_len − 1) · tpot. The first output token comes from the prefill. The step that
makes the j-th token (j ≥ 2) runs at context input_len + j − 1.
"""

from collections.abc import Callable, Iterable, Iterator
from math import isnan, nan
from typing import Any, NamedTuple

from kvcalc.errors import UserError
from kvcalc.layers.batch import Batch, Sequences
from kvcalc.layers.cost import Cost
from kvcalc.model.spec import Model
from kvcalc.timing.deployment import Deployment
from kvcalc.units import Num

BLOCK = 1 << 14  # passes timed in one call, so that their arrays fit into the CPU's cache
FEW_KINDS, MANY = 4, 8  # kinds of layers of a pass of weight 1; weight from which blocks are smaller
MOST_STEPS, MOST_AGAIN = 1 << 20, 1 << 18  # passes of one request; passes of all requests without a cache


class Latency(NamedTuple):
    """Times in seconds, matrix FLOPs and bytes of a batch of equal requests.

    Attributes:
        ttft_s: Time to the first token. None if the GPU has no matrix peak, which a prefill needs.
        tpot_s: Mean time per further token.
        tpot_first_s: Time of the first decode step.
        tpot_last_s: Time of the last decode step.
        e2e_s: Time to the last token. None if ttft_s is None.
        flops: Matrix FLOPs of all passes.
        bytes: Bytes moved by all passes.
    """

    ttft_s: float | None
    tpot_s: float | None
    tpot_first_s: float | None
    tpot_last_s: float | None
    e2e_s: float | None
    flops: int
    bytes: int


def prefill_passes(input_len: int, batch_size: int, cached: int = 0, chunk: int = 0, most: int = BLOCK) -> Iterator[Batch]:
    """Yield the passes that process a prompt behind `cached` tokens of a shared prefix.

    There is one pass, or one pass per chunk of `chunk` tokens. Several chunks of equal size come as
    arrays of at most `most` passes.
    """
    whole, rest = divmod(input_len - cached, chunk or input_len)
    if whole == 1:
        yield Batch.prefill(chunk or input_len, batch_size, cached)
    elif whole:
        for places in blocks_of(0, whole, most):
            yield Batch.prefill(chunk, batch_size, cached + chunk * places)
    if rest:
        yield Batch.prefill(rest, batch_size, input_len - rest)


def request(
    deployment: Deployment,
    input_len: int,
    output_len: int,
    batch_size: int = 1,
    cached: int = 0,
    chunk: int = 0,
    steps: "DecodeSteps | None" = None,
) -> Latency:
    """Return the latency of a batch of equal requests with a cache.

    Args:
        cached: Leading prompt tokens that are in the cache already (prefix hit).
        steps: Timed steps of this deployment and batch size that include the contexts of this
            request. If None, the steps are timed here.

    Raises:
        UserError: The prefix is not shorter than the prompt, or the request takes more than
            MOST_STEPS passes.
    """
    if not 0 <= cached < input_len:
        raise UserError(f"a cached prefix of {cached:,} tokens leaves no token of a prompt of {input_len:,}")
    check_steps("chunks of the prompt", (input_len - cached) // (chunk or input_len))
    most = block_of(deployment.model)
    timed = all(deployment.timed(p) for p in prefill_passes(input_len, batch_size, cached, chunk, most))
    prompt = _spent(deployment, prefill_passes(input_len, batch_size, cached, chunk, most), timed=timed)
    if steps and output_len > 1:
        return _latency(prompt, steps.over(input_len + 1, input_len + output_len))
    return _generation(deployment, prompt, Batch.decode, input_len, output_len, batch_size)


def without_cache(
    deployment: Deployment,
    input_len: int,
    output_len: int,
    batch_size: int = 1,
    all_positions: bool = False,
    steps: "StepsAgain | None" = None,
) -> Latency:
    """Return the latency of a generation that recomputes all tokens at every step.

    Args:
        all_positions: Whether the LM head runs on all positions instead of the last one.
        steps: As in `request`, with the same LM head positions.

    Raises:
        UserError: The answer has more than MOST_AGAIN tokens.
    """
    check_steps("tokens of an answer without a cache", output_len, MOST_AGAIN)
    prompt = _spent(deployment, [Batch.prefill(input_len, batch_size)], all_positions)
    if steps and output_len > 1:
        return _latency(prompt, steps.over(input_len + 1, input_len + output_len))
    return _generation(deployment, prompt, Batch.prefill, input_len, output_len, batch_size, all_positions)


def check_steps(what: str, count: int, most: int = MOST_STEPS) -> None:
    """Check that `count` is at most `most`. Raises UserError otherwise."""
    if count > most:
        raise UserError(f"{count:,} {what} are more than the {most:,} that are timed")


def token_projections(input_len: int, output_len: int) -> tuple[int, int]:
    """Return the tokens of one sequence that pass through the layers, with and without a cache.

    For n input and m output tokens they are n + m − 1 with a cache and Σ (n … n + m − 1) without.
    Their difference is redundant work.
    """
    last = input_len + output_len - 1
    return last, (input_len + last) * output_len // 2


class _Spent(NamedTuple):
    """Consecutive passes.

    Attributes:
        seconds: Seconds of all passes.
        first: Seconds of the first pass.
        last: Seconds of the last pass.
        passes: Number of passes.
        flops: Matrix FLOPs of all passes.
        bytes: Bytes of all passes.
    """

    seconds: float
    first: float
    last: float
    passes: int
    flops: int
    bytes: int

    def then(self, later: "_Spent") -> "_Spent":
        """Return these passes followed by later passes."""
        passes, seconds = self.passes + later.passes, self.seconds + later.seconds
        return _Spent(seconds, self.first, later.last, passes, self.flops + later.flops, self.bytes + later.bytes)


def _generation(
    deployment: Deployment,
    prompt: _Spent,
    step: Callable[[Any, int], Batch],
    input_len: int,
    output_len: int,
    batch_size: int,
    all_positions: bool = False,
) -> Latency:
    """Return the latency of the prompt and of the steps after it, each at its context."""
    check_steps("tokens of an answer", output_len)
    each = blocks_of(input_len + 1, input_len + output_len, block_of(deployment.model))
    blocks = (step(contexts, batch_size) for contexts in each)
    return _latency(prompt, _spent(deployment, blocks, all_positions) if output_len > 1 else None)


def _latency(prompt: _Spent, steps: _Spent | None) -> Latency:
    """Return the latency of the prompt and of the steps after it. steps is None for one output token."""
    ttft = None if isnan(prompt.seconds) else prompt.seconds
    if steps is None:
        return Latency(ttft, None, None, None, ttft, prompt.flops, prompt.bytes)
    flops, moved = prompt.flops + steps.flops, prompt.bytes + steps.bytes
    whole = None if ttft is None else ttft + steps.seconds
    return Latency(ttft, steps.seconds / steps.passes, steps.first, steps.last, whole, flops, moved)


def passes_in_one(model: Model) -> int:
    """Return how many passes of a model with few kinds of layers take as long as one pass of this model."""
    return max(1, len(model.kinds) // FEW_KINDS)


def block_of(model: Model) -> int:
    """Return the number of passes that are timed in one call.

    Models with many kinds of layers get smaller blocks, because their arrays need much memory.
    """
    return BLOCK // max(1, passes_in_one(model) // MANY)


def blocks_of(first: int, end: int, most: int = BLOCK) -> Iterator[Any]:
    """Yield the integers from `first` to before `end` as arrays of at most `most` elements."""
    import numpy as np

    for at in range(first, end, most):
        yield np.arange(at, min(at + most, end), dtype=float)


def _spent(deployment: Deployment, batches: Iterable[Batch], all_positions: bool = False, timed: bool = True) -> _Spent:
    """Return the total of the passes over `batches`, which may hold arrays of passes.

    Seconds are NaN if `timed` is False.
    """
    found = None
    for batch in batches:
        group = batch.groups[0]
        count = max(getattr(group.past, "size", 1), getattr(group.new, "size", 1))
        each: Any = nan
        cost, each = deployment.spent(batch, all_positions) if timed else (deployment.cost(batch), each)
        here = _summed(each, cost.flops, cost.bytes, count)
        found = found.then(here) if found else here
    assert found
    return found


def _summed(each: Any, flops: Num, moved: Num, count: int) -> _Spent:
    """Return the total of `count` passes from arrays of figures, or from figures equal for all passes."""
    many = bool(getattr(each, "ndim", 0))  # a single figure may be a NumPy scalar
    first, last = (float(each[0]), float(each[-1])) if many else (float(each), float(each))
    seconds = float(each.sum()) if many else count * first
    return _Spent(seconds, first, last, count, _exact_sum(flops, count), _exact_sum(moved, count))


class _Shared:
    """Passes at some contexts, timed in one call and shared by several requests.

    Each figure equals, to the last bit, the figure of a request that is timed separately.

    Args:
        contexts: Contexts of the passes, in order.
        cost: Cost of each pass, or the cost that is equal for all passes.
        seconds: Seconds of each pass, or the seconds that are equal for all passes.
    """

    def __init__(self, contexts: Any, cost: Cost, seconds: Any) -> None:
        self._contexts, self._figures = contexts, (seconds, cost.flops, cost.bytes)

    def over(self, first: int, end: int) -> _Spent:
        """Return the total of the passes at contexts from `first` to before `end`."""
        each, flops, moved = (self._of(figures, first, end) for figures in self._figures)
        return _summed(each, flops, moved, end - first)

    def _of(self, figures: Any, first: int, end: int) -> Any:
        at = int(self._contexts.searchsorted(first))
        return figures[at : at + end - first] if getattr(figures, "ndim", 0) else figures


class DecodeSteps(_Shared):
    """Decode steps of a deployment at one batch size, shared by several requests.

    Args:
        ranges: Ranges (first, end) of contexts without the end; at most BLOCK contexts in all.

    Attributes:
        longest: The step at the largest context, for properties that are equal for all steps.
    """

    def __init__(self, deployment: Deployment, batch_size: int, ranges: Iterable[tuple[int, int]]) -> None:
        contexts = _all_of(ranges)
        self.longest = Batch.decode(int(contexts[-1]), batch_size)
        cost, seconds, self._share = deployment.spent_with_share(Batch.decode(contexts, batch_size))
        super().__init__(contexts, cost, seconds)

    def uncalibrated_share(self, context: int) -> float:
        """Return the uncalibrated share of the step at this context, as the deployment defines it."""
        share = self._of(self._share, context, context + 1)
        return float(share[0] if getattr(share, "ndim", 0) else share)


class StepsAgain(_Shared):
    """Steps without a cache, which recompute all tokens, shared by several requests.

    Args:
        all_positions: Whether the LM head runs on all positions instead of the last one.
    """

    def __init__(self, deployment: Deployment, batch_size: int, ranges: Iterable[tuple[int, int]], all_positions: bool) -> None:
        contexts = _all_of(ranges)
        super().__init__(contexts, *deployment.spent(Batch.prefill(contexts, batch_size), all_positions))


def _all_of(ranges: Iterable[tuple[int, int]]) -> Any:
    """Return the distinct integers of the ranges (first, end), sorted."""
    import numpy as np

    return np.unique(np.concatenate([np.arange(*ends, dtype=float) for ends in ranges]))


def _exact_sum(values: Num, count: int) -> int:
    """Return the exact sum of `count` equal ints, or of an array of integers below 2^53.

    A sum of floats would round.
    """
    if isinstance(values, int):
        return values * count
    high, low = divmod(values, 1 << 26)
    return (int(high.sum()) << 26) + int(low.sum())


def cost_per_million(price_per_hour: float, gpus: int, seconds: float, tokens: int) -> float:
    """Return the price of 10^6 output tokens of a replica that makes `tokens` tokens in `seconds`."""
    return price_per_hour * gpus * seconds / 3600 / tokens * 1e6


def verification(count: Num, drafted: Num, context: int) -> Batch:
    """Return the pass that verifies `drafted` tokens of each sequence.

    The pass has drafted + 1 queries per sequence. The context is `context` after the first query.
    """
    return Batch((Sequences(count, drafted + 1, context - 1),))
