"""One replica set up to serve: the memory that its cache gets, and the load that it can carry at most."""

from typing import NamedTuple

from kvcalc.capacity import FitOptions, fit
from kvcalc.errors import UserError
from kvcalc.model.memory import LayerRows
from kvcalc.serving.pool import Pool
from kvcalc.serving.scheduling import Limits
from kvcalc.serving.tables import Passes
from kvcalc.timing.deployment import Deployment
from kvcalc.units import format_bytes


class Memory(NamedTuple):
    """budget: bytes for the cache on one GPU of the stage that holds the fewest sequences. rows: what is kept there."""

    budget: int
    rows: tuple[LayerRows, ...]


def memory(deployment: Deployment, asked: FitOptions) -> Memory:
    """What `fit` leaves for the cache: share − weights − activation peak − overhead. Raises UserError where that is nothing."""
    found = fit(deployment, asked)
    if not found.kv_budget:
        terms = f"{format_bytes(found.budget.share - found.budget.cache)} of {format_bytes(found.budget.share)}"
        names = f"{deployment.model.name} leaves no memory for a cache on {deployment.gpu.name}"
        what = f"{names}: weights, activations and overhead take {terms}"
        raise UserError(what, hint="Use more GPUs (tp), or a smaller dtype or quantization")
    return Memory(found.kv_budget, tuple(found.content.rows))


def capacity(
    steps: Passes, pool: Pool, limits: Limits, input_len: int, output_len: int, prefill_replicas: int = 0, found: int = 0
) -> float:
    """Requests per second that continuous batching can carry, all of one size: 1/(prefill + (out − 1)·decode(n)/n), times dp.

    n sequences decode at once: as many as have a seat, and as memory holds at their mean length. Prompts are processed as
    many in a pass as its tokens allow, apart from decodes; passes that both share read the weights once for both, so that a
    run may do better by some percent. found: tokens of each prompt that a prefix cache holds. With replicas for prompts alone
    it is what either kind carries, whichever is less.
    """
    held = pool.allocated[input_len : input_len + output_len].mean()
    count = int(min(limits.max_num_seqs, max(1, pool.budget // held)))
    chunk = limits.max_num_batched_tokens
    together = max(1, min(count, chunk // (input_len - found)))
    pieces = [((min(chunk, input_len - at), at),) for at in range(found, input_len, chunk)]
    prefill = sum(steps.prefill(piece, together) for piece in pieces) / together
    decode = steps.line(count, input_len + output_len / 2).first
    decode /= steps.drafting.tokens_per_step if steps.drafting else 1
    answer = (output_len - 1) * decode / count
    if prefill_replicas:
        return steps.ranks * min(prefill_replicas / prefill, 1 / answer if answer else float("inf"))
    return steps.ranks / (prefill + answer)
