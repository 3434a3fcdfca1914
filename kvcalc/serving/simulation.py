"""A server under load, simulated pass by pass: one log for each data-parallel rank, and what they have in common.

Requests go to the ranks in turn. Each rank has its own queue and memory; a pass of one is timed as if the others ran the same
batch beside it. One pass is in flight at a time, also through a pipeline.
"""

from collections.abc import Callable
from typing import NamedTuple

from kvcalc.errors import UserError, nearest
from kvcalc.serving.continuous import Continuous, Limits
from kvcalc.serving.door import Door
from kvcalc.serving.log import Log
from kvcalc.serving.pool import Pool
from kvcalc.serving.requests import Requests
from kvcalc.serving.static import Static
from kvcalc.serving.steps import Steps

POLICIES: dict[str, type[Continuous] | type[Static]] = {"continuous": Continuous, "static": Static}


class Served(NamedTuple):
    """What was asked and what came of it, a log a rank: rank r of n took every n-th request from the r-th on."""

    requests: Requests
    logs: tuple[Log, ...]


def simulate(
    requests: Requests,
    pool: Pool,
    steps: Steps,
    limits: Limits,
    policy: str = "continuous",
    max_concurrency: int = 0,
    progress: Callable[[int], None] | None = None,
) -> Served:
    """Serve all requests. `progress` is told how many more are done, now and then.

    max_concurrency: clients in a closed loop, 0 for none. Raises UserError on an unknown policy, and where a pass could not
    hold a token of every sequence.
    """
    if policy not in POLICIES:
        raise UserError(f"unknown policy {policy!r}", hint=nearest(policy, POLICIES))
    if policy == "static" and steps.drafting:
        raise UserError("a draft is simulated under continuous batching alone", hint="Leave --policy static, or --draft, out")
    if policy == "continuous" and limits.max_num_batched_tokens < limits.max_num_seqs * steps.queries:
        what = f"{limits.max_num_batched_tokens:,} tokens of a pass are fewer than {limits.max_num_seqs:,} sequences"
        what += f" of {steps.queries} queries" if steps.drafting else ""
        raise UserError(what, hint="Raise max-num-batched-tokens, or lower max-num-seqs")
    ranks = steps.ranks
    logs = []
    for rank in range(min(ranks, len(requests))):
        share = requests.share(rank, ranks)
        log = Log(len(share), rank)
        clients = max(1, max_concurrency // ranks + (rank < max_concurrency % ranks)) if max_concurrency else 0
        door = Door(share, pool, log, clients)
        server = POLICIES[policy](door, pool, steps, limits, log)
        told = 0
        while server.run():
            if progress and door.done - told >= 100:
                progress(door.done - told)
                told = door.done
        if progress:
            progress(door.done - told)
        logs.append(log)
    return Served(requests, tuple(logs))
