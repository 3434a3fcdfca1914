"""One request, or a batch of equal ones: time to the first token, time per token, and the same without a cache.

e2e = ttft + (output_len − 1) · tpot. The first output token comes from the prefill; the step that makes the j-th token
(j ≥ 2) runs at context input_len + j − 1.
"""

from typing import Any, NamedTuple

from kvcalc.errors import UserError
from kvcalc.layers.batch import Batch, Sequences
from kvcalc.layers.cost import Cost
from kvcalc.model.operators import total
from kvcalc.timing.deployment import Deployment
from kvcalc.units import Num


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


def prefill_passes(input_len: int, batch_size: int, cached: int = 0, chunk: int = 0) -> list[Batch]:
    """The passes that process a prompt behind `cached` tokens of a shared prefix: one, or chunks of so many tokens."""
    size = chunk or input_len
    return [Batch.prefill(min(size, input_len - at), batch_size, at) for at in range(cached, input_len, size)]


def request(
    deployment: Deployment, input_len: int, output_len: int, batch_size: int = 1, cached: int = 0, chunk: int = 0
) -> Latency:
    """A batch of equal requests with a cache. `cached` leading tokens are in the cache already (prefix hit).

    Raises UserError where the prefix is not shorter than the prompt.
    """
    if not 0 <= cached < input_len:
        raise UserError(f"a cached prefix of {cached:,} tokens leaves no token of a prompt of {input_len:,}")
    passes = prefill_passes(input_len, batch_size, cached, chunk)
    ttft = sum(deployment.seconds(p) for p in passes) if all(deployment.timed(p) for p in passes) else None
    work = sum((deployment.cost(p) for p in passes), Cost())
    if output_len == 1:
        return Latency(ttft, None, None, None, ttft, int(work.flops), int(work.bytes))
    steps, spent = _steps(deployment, Batch.decode(_contexts(input_len, output_len), batch_size))
    return _summed(ttft, work, steps, spent)


def without_cache(
    deployment: Deployment, input_len: int, output_len: int, batch_size: int = 1, all_positions: bool = False
) -> Latency:
    """The same generation recomputing all tokens at every step; the LM head on the last position, or on all of them."""
    first = Batch.prefill(input_len, batch_size)
    ttft, work = deployment.seconds(first, all_positions), total(deployment.operators(first, all_positions))
    if output_len == 1:
        return Latency(ttft, None, None, None, ttft, int(work.flops), int(work.bytes))
    steps, spent = _steps(deployment, Batch.prefill(_contexts(input_len, output_len), batch_size), all_positions)
    return _summed(ttft, work, steps, spent)


def token_projections(input_len: int, output_len: int) -> tuple[int, int]:
    """Tokens of one sequence that pass through the layers: with a cache, and without, where every step takes all of them.

    n + m − 1 and Σ (n … n + m − 1) for n tokens in and m out: their difference is redundant work.
    """
    last = input_len + output_len - 1
    return last, (input_len + last) * output_len // 2


def _contexts(input_len: int, output_len: int) -> Any:
    import numpy as np

    return np.arange(input_len + 1, input_len + output_len, dtype=float)


def _steps(deployment: Deployment, batch: Batch, all_positions: bool = False) -> tuple[Any, tuple[int, int]]:
    """Seconds of every step, and the matrix FLOPs and bytes of all of them."""
    import numpy as np

    group = batch.groups[0]
    many = max(np.size(group.past), np.size(group.new))
    seconds = np.broadcast_to(np.asarray(deployment.seconds(batch, all_positions), dtype=float), (many,))
    cost = total(deployment.operators(batch, all_positions))
    flops = np.broadcast_to(np.asarray(cost.flops, dtype=float), (many,))
    moved = np.broadcast_to(np.asarray(cost.bytes, dtype=float), (many,))
    return seconds, (int(flops.sum()), int(moved.sum()))


def _summed(ttft: float | None, work: Cost, steps: Any, spent: tuple[int, int]) -> Latency:
    total = float(steps.sum())
    flops, moved = int(work.flops) + spent[0], int(work.bytes) + spent[1]
    whole = None if ttft is None else ttft + total
    return Latency(ttft, total / len(steps), float(steps[0]), float(steps[-1]), whole, flops, moved)


def cost_per_million(price_per_hour: float, gpus: int, seconds: float, tokens: int) -> float:
    """Money for 10^6 output tokens of a replica that makes `tokens` of them in `seconds`."""
    return price_per_hour * gpus * seconds / 3600 / tokens * 1e6


def verification(count: Num, drafted: int, context: int) -> Batch:
    """The pass that verifies `drafted` tokens of each sequence: drafted + 1 queries, at `context` after the first."""
    return Batch((Sequences(count, drafted + 1, context - 1),))
