"""One request, or a batch of equal ones: time to the first token, time per token, and the same without a cache.

e2e = ttft + (output_len − 1) · tpot. The first output token comes from the prefill; the step that makes the j-th token
(j ≥ 2) runs at context input_len + j − 1.
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

BLOCK = 1 << 14  # passes that are timed at once: their arrays stay in the CPU's cache
FEW_KINDS, MANY = 4, 8  # of layers, of which a pass takes as long as any; times as many, from which blocks are shorter
MOST_STEPS, MOST_AGAIN = 1 << 20, 1 << 18  # passes of one request, and of all that take all their tokens again each time


class Latency(NamedTuple):
    """Seconds: to the first token, per further token (mean, first, last), end to end; matrix FLOPs and bytes of it all.

    ttft_s and e2e_s are None where the GPU gives no matrix peak, which a prefill needs.
    """

    ttft_s: float | None
    tpot_s: float | None
    tpot_first_s: float | None
    tpot_last_s: float | None
    e2e_s: float | None
    flops: int
    bytes: int


def prefill_passes(input_len: int, batch_size: int, cached: int = 0, chunk: int = 0, most: int = BLOCK) -> Iterator[Batch]:
    """The passes that process a prompt behind `cached` tokens of a shared prefix: one, or chunks of so many tokens.

    Several chunks of one size come as arrays, at most so many at a time.
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
    """A batch of equal requests with a cache. `cached` leading tokens are in the cache already (prefix hit).

    steps: of this deployment and batch size, at the contexts of this request among others; timed here where there are none.

    Raises UserError where the prefix is not shorter than the prompt, or the request takes more than MOST_STEPS passes.
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
    """The same generation recomputing all tokens at every step; the LM head on the last position, or on all of them.

    steps: as of `request`, with the same head. Raises UserError beyond MOST_AGAIN tokens.
    """
    check_steps("tokens of an answer without a cache", output_len, MOST_AGAIN)
    prompt = _spent(deployment, [Batch.prefill(input_len, batch_size)], all_positions)
    if steps and output_len > 1:
        return _latency(prompt, steps.over(input_len + 1, input_len + output_len))
    return _generation(deployment, prompt, Batch.prefill, input_len, output_len, batch_size, all_positions)


def check_steps(what: str, count: int, most: int = MOST_STEPS) -> None:
    """Raises UserError where more passes than that were to be timed."""
    if count > most:
        raise UserError(f"{count:,} {what} are more than the {most:,} that are timed")


def token_projections(input_len: int, output_len: int) -> tuple[int, int]:
    """Tokens of one sequence that pass through the layers: with a cache, and without, where every step takes all of them.

    n + m − 1 and Σ (n … n + m − 1) for n tokens in and m out: their difference is redundant work.
    """
    last = input_len + output_len - 1
    return last, (input_len + last) * output_len // 2


class _Spent(NamedTuple):
    """Passes one after the other: seconds of them all, of the first and of the last, how many, matrix FLOPs and bytes."""

    seconds: float
    first: float
    last: float
    passes: int
    flops: int
    bytes: int

    def then(self, later: "_Spent") -> "_Spent":
        """These passes, and later ones."""
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
    """The prompt and the steps after it, each at its context."""
    check_steps("tokens of an answer", output_len)
    each = blocks_of(input_len + 1, input_len + output_len, block_of(deployment.model))
    blocks = (step(contexts, batch_size) for contexts in each)
    return _latency(prompt, _spent(deployment, blocks, all_positions) if output_len > 1 else None)


def _latency(prompt: _Spent, steps: _Spent | None) -> Latency:
    """The prompt, and the steps after it where the answer has more than one token."""
    ttft = None if isnan(prompt.seconds) else prompt.seconds
    if steps is None:
        return Latency(ttft, None, None, None, ttft, prompt.flops, prompt.bytes)
    flops, moved = prompt.flops + steps.flops, prompt.bytes + steps.bytes
    whole = None if ttft is None else ttft + steps.seconds
    return Latency(ttft, steps.seconds / steps.passes, steps.first, steps.last, whole, flops, moved)


def passes_in_one(model: Model) -> int:
    """How many passes through a few kinds of layers take as long as one through this model's."""
    return max(1, len(model.kinds) // FEW_KINDS)


def block_of(model: Model) -> int:
    """Passes that are timed at once: fewer of a model of so many kinds of layers that their arrays would take much memory."""
    return BLOCK // max(1, passes_in_one(model) // MANY)


def blocks_of(first: int, end: int, most: int = BLOCK) -> Iterator[Any]:
    """Whole numbers from `first` to before `end`, as arrays of at most so many."""
    import numpy as np

    for at in range(first, end, most):
        yield np.arange(at, min(at + most, end), dtype=float)


def _spent(deployment: Deployment, batches: Iterable[Batch], all_positions: bool = False, timed: bool = True) -> _Spent:
    """The passes over `batches`, which may hold arrays of passes; seconds are NaN where they are not `timed`."""
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
    """So many passes: the seconds, FLOPs and bytes of each, or of all alike."""
    many = bool(getattr(each, "ndim", 0))  # one figure may be a scalar of NumPy's
    first, last = (float(each[0]), float(each[-1])) if many else (float(each), float(each))
    seconds = float(each.sum()) if many else count * first
    return _Spent(seconds, first, last, count, _exact_sum(flops, count), _exact_sum(moved, count))


class _Shared:
    """Passes at some contexts, timed at once for requests to share.

    Each figure is what the passes of a request by itself give, to the last bit. cost, seconds: of each pass, or of all alike.
    """

    def __init__(self, contexts: Any, cost: Cost, seconds: Any) -> None:
        self._contexts, self._figures = contexts, (seconds, cost.flops, cost.bytes)

    def over(self, first: int, end: int) -> _Spent:
        """The passes at these contexts, one after the other."""
        each, flops, moved = (self._of(figures, first, end) for figures in self._figures)
        return _summed(each, flops, moved, end - first)

    def _of(self, figures: Any, first: int, end: int) -> Any:
        at = int(self._contexts.searchsorted(first))
        return figures[at : at + end - first] if getattr(figures, "ndim", 0) else figures


class DecodeSteps(_Shared):
    """Decode steps of a deployment at one batch size and all contexts of some ranges, for requests to share.

    ranges: (first, end) of contexts, the end not among them; at most BLOCK contexts in all. longest: the last of the steps,
    for what is the same of all.
    """

    def __init__(self, deployment: Deployment, batch_size: int, ranges: Iterable[tuple[int, int]]) -> None:
        contexts = _all_of(ranges)
        self.longest = Batch.decode(int(contexts[-1]), batch_size)
        cost, seconds, self._share = deployment.spent_with_share(Batch.decode(contexts, batch_size))
        super().__init__(contexts, cost, seconds)

    def uncalibrated_share(self, context: int) -> float:
        """As of the deployment, of the step at this context."""
        share = self._of(self._share, context, context + 1)
        return float(share[0] if getattr(share, "ndim", 0) else share)


class StepsAgain(_Shared):
    """The same of steps without a cache, which take all tokens again, with the LM head on the last position or on all."""

    def __init__(self, deployment: Deployment, batch_size: int, ranges: Iterable[tuple[int, int]], all_positions: bool) -> None:
        contexts = _all_of(ranges)
        super().__init__(contexts, *deployment.spent(Batch.prefill(contexts, batch_size), all_positions))


def _all_of(ranges: Iterable[tuple[int, int]]) -> Any:
    """The whole numbers of (first, end), each once, in order."""
    import numpy as np

    return np.unique(np.concatenate([np.arange(*ends, dtype=float) for ends in ranges]))


def _exact_sum(values: Num, count: int) -> int:
    """Σ of `count` equal ints, or of an array of whole numbers below 2^53, which floats alone would round."""
    if isinstance(values, int):
        return values * count
    high, low = divmod(values, 1 << 26)
    return (int(high.sum()) << 26) + int(low.sum())


def cost_per_million(price_per_hour: float, gpus: int, seconds: float, tokens: int) -> float:
    """Money for 10^6 output tokens of a replica that makes `tokens` of them in `seconds`."""
    return price_per_hour * gpus * seconds / 3600 / tokens * 1e6


def verification(count: Num, drafted: Num, context: int) -> Batch:
    """The pass that verifies `drafted` tokens of each sequence: drafted + 1 queries, at `context` after the first."""
    return Batch((Sequences(count, drafted + 1, context - 1),))
