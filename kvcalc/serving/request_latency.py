"""Latency of one request, or of a batch of equal requests, with and without a cache.

e2e = ttft + (output_len − 1) · tpot. The first output token comes from the prefill. The step that
makes the j-th token (j ≥ 2) runs at context input_len + j − 1.
"""

from collections.abc import Iterable, Iterator
from math import fsum, isnan, nan
from typing import Any, NamedTuple

from kvcalc.arithmetic import Num, Points
from kvcalc.errors import UserError
from kvcalc.layers.batch import Batch, Sequences
from kvcalc.model.model import Model
from kvcalc.timing.deployment import TimedDeployment

BLOCK = 1 << 14  # passes timed in one call, so that their arrays fit into the CPU's cache
# kinds of layers of a pass of weight 1; weight from which blocks are smaller
FEW_KINDS, SMALL_BLOCK_WEIGHT = 4, 8


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


def prefill_passes(
    input_len: int,
    batch_size: int,
    cached: int = 0,
    chunk: int = 0,
    block: int = BLOCK,
    max_points: int = 0,
) -> Iterator[Batch]:
    """Yield the passes that process a prompt behind `cached` tokens of a shared prefix.

    There is one pass, or one pass per chunk of `chunk` tokens. Chunks of equal size come as arrays
    of at most `block` passes.
    """
    chunk = chunk or input_len
    chunks, remainder = divmod(input_len - cached, chunk)
    if chunks == 1:
        yield Batch.prefill(chunk, batch_size, cached)
    else:
        for numbers in blocks_of(0, chunks, block, max_points):
            yield Batch.prefill(chunk, batch_size, cached + chunk * numbers)
    if remainder:
        yield Batch.prefill(remainder, batch_size, input_len - remainder)


def request(
    deployment: TimedDeployment,
    input_len: int,
    output_len: int,
    batch_size: int = 1,
    cached: int = 0,
    chunk: int = 0,
    max_points: int = 0,
) -> Latency:
    """Return the latency of a batch of equal requests with a cache.

    Args:
        cached: Leading prompt tokens that are in the cache already (prefix hit).
        chunk: Tokens per pass of the prefill; 0 for the whole prompt.
        max_points: As in `blocks_of`.

    Raises:
        UserError: The prefix is not shorter than the prompt.
    """
    if not 0 <= cached < input_len:
        raise UserError(
            f"a cached prefix of {cached:,} tokens leaves no token of a prompt of {input_len:,}"
        )
    block = block_of(deployment.model)
    prompt = [*prefill_passes(input_len, batch_size, cached, chunk, block, max_points)]
    is_timed = all(deployment.timed(batch) for batch in prompt)
    steps = (
        Batch.decode(contexts, batch_size)
        for contexts in blocks_of(input_len + 1, input_len + output_len, block, max_points)
    )
    return _latency(_spent(deployment, prompt, timed=is_timed), _spent(deployment, steps))


def without_cache(
    deployment: TimedDeployment,
    input_len: int,
    output_len: int,
    batch_size: int = 1,
    all_positions: bool = False,
    max_points: int = 0,
) -> Latency:
    """Return the latency of a generation that recomputes all tokens at every step.

    Args:
        all_positions: Whether the LM head runs on all positions instead of the last one.
        max_points: As in `blocks_of`.
    """
    block = block_of(deployment.model)
    steps = (
        Batch.prefill(contexts, batch_size)
        for contexts in blocks_of(input_len + 1, input_len + output_len, block, max_points)
    )
    prompt = [Batch.prefill(input_len, batch_size)]
    return _latency(
        _spent(deployment, prompt, all_positions),
        _spent(deployment, steps, all_positions),
    )


def token_projections(input_len: int, output_len: int) -> tuple[int, int]:
    """Return the tokens of one sequence that pass through the layers, with and without a cache.

    For n input and m output tokens they are n + m − 1 with a cache and Σ (n … n + m − 1) without.
    Their difference is redundant work.
    """
    last = input_len + output_len - 1
    return last, (input_len + last) * output_len // 2


class _Spent(NamedTuple):
    """Time and work of consecutive passes.

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


def _latency(prompt: _Spent, steps: _Spent) -> Latency:
    """Return the latency of the prompt and of the steps after it."""
    ttft = None if isnan(prompt.seconds) else prompt.seconds
    if not steps.passes:
        return Latency(ttft, None, None, None, ttft, prompt.flops, prompt.bytes)
    return Latency(
        ttft_s=ttft,
        tpot_s=steps.seconds / steps.passes,
        tpot_first_s=steps.first,
        tpot_last_s=steps.last,
        e2e_s=None if ttft is None else ttft + steps.seconds,
        flops=prompt.flops + steps.flops,
        bytes=prompt.bytes + steps.bytes,
    )


def passes_in_one(model: Model) -> int:
    """Return how many passes of a model with few kinds of layers take as long to compute as one
    pass of this model."""
    return max(1, len(model.kinds) // FEW_KINDS)


def block_of(model: Model) -> int:
    """Return the number of passes that are timed in one call.

    Models with many kinds of layers get smaller blocks, because their arrays need much memory.
    """
    return BLOCK // max(1, passes_in_one(model) // SMALL_BLOCK_WEIGHT)


def blocks_of(first: int, end: int, block: int = BLOCK, max_points: int = 0) -> Iterator[Any]:
    """Yield the integers from `first` to before `end` as arrays of at most `block` elements.

    Args:
        max_points: Number of integers up to which they are `Points`, which do without NumPy.
    """
    if 0 < end - first <= max_points:
        yield Points(range(first, end))
        return
    for start in range(first, end, block):
        import numpy as np

        yield np.arange(start, min(start + block, end), dtype=float)


def _spent(
    deployment: TimedDeployment,
    batches: Iterable[Batch],
    all_positions: bool = False,
    timed: bool = True,
) -> _Spent:
    """Return the total of the passes over `batches`, which may have arrays of passes.

    Seconds are NaN if `timed` is False.
    """
    block_seconds, ends = [], []
    passes = flops = moved = 0
    for batch in batches:
        group = batch.groups[0]
        count = max(getattr(value, "shape", (1,))[0] for value in (group.past, group.new))
        seconds: Any = nan
        if timed:
            cost, seconds = deployment.spent(batch, all_positions)
        else:
            cost = deployment.cost(batch)
        is_array = bool(getattr(seconds, "ndim", 0))
        ends += [float(seconds[n] if is_array else seconds) for n in (0, -1)]
        # an exact sum, so that a list gives the same as one request
        block_seconds.append(fsum(seconds) if is_array else count * ends[-1])
        passes += count
        flops += _exact_sum(cost.flops, count)
        moved += _exact_sum(cost.bytes, count)
    first, last = (ends[0], ends[-1]) if ends else (0.0, 0.0)
    return _Spent(sum(block_seconds), first, last, passes, flops, moved)


def _exact_sum(values: Num, count: int) -> int:
    """Return the exact sum of `count` equal ints, or of an array of integers below 2^53.

    A sum of floats would round.
    """
    if isinstance(values, int):
        return values * count
    if isinstance(values, Points):
        return sum(map(int, values))
    high, low = divmod(values, 1 << 26)
    return (int(high.sum()) << 26) + int(low.sum())


def cost_per_million(price_per_hour: float, gpus: int, seconds: float, tokens: int) -> float:
    """Return the price of 10^6 output tokens of a replica that makes `tokens` tokens in
    `seconds`."""
    return price_per_hour * gpus * seconds / 3600 / tokens * 1e6


def verification(count: Num, drafted: Num, context: int) -> Batch:
    """Return the pass that verifies `drafted` tokens of each sequence.

    The pass has drafted + 1 queries per sequence. The context is `context` after the first query.
    """
    return Batch((Sequences(count, drafted + 1, context - 1),))
