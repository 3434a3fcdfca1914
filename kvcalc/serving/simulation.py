"""A server under load, simulated pass by pass, with one log for each data-parallel rank.

Requests go to the ranks in turn. Each rank has its own queue and memory; a pass of one is timed as
if the others ran an equal batch. Pipeline stages work on different micro-batches of a pass.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from kvcalc.errors import UserError, nearest
from kvcalc.serving.batching import Continuous, ServerSetup, Static
from kvcalc.serving.cache_accounting import Log
from kvcalc.serving.decoding import Scheduling
from kvcalc.serving.kv_transfer import DisaggregatedServer, KVTransfer
from kvcalc.serving.requests import ArrivalQueue, Clients, Requests
from kvcalc.timing.calibration import EngineOverheads


def scheduling_of(engine: EngineOverheads | None) -> Scheduling:
    """Return how an engine fills its passes."""
    return (
        Scheduling(engine.decodes_wait, engine.whole, engine.reserve)
        if engine
        else Scheduling()
    )


POLICIES = ("continuous", "static")
PROGRESS_STEP = 100  # requests between two reports of progress


class Served(NamedTuple):
    """Simulated requests.

    Attributes:
        times: Log with the times of all requests.
        logs: Log of each rank. Rank r of n processes every n-th request from request r on.
        is_complete: False if Ctrl-C ended the simulation before all requests were done.
        prefill: Logs of the prefill ranks of a disaggregated server. `logs` are then from the
            decode ranks.
    """

    requests: Requests
    times: Log
    logs: tuple[Log, ...]
    is_complete: bool = True
    prefill: tuple[Log, ...] = ()


def simulate(
    requests: Requests,
    setup: ServerSetup,
    policy: str = "continuous",
    clients: Clients = Clients(),  # noqa: B008
    transfer: KVTransfer | None = None,
    progress: Callable[[int], None] | None = None,
) -> Served:
    """Serve all requests. Ctrl-C keeps the requests that are done.

    Args:
        transfer: Prefill replicas of a disaggregated server.
        progress: Called from time to time with the number of further requests that are done.

    Raises:
        UserError: The policy is unknown or contradicts other settings, or a pass could not hold a
            token of every sequence.
    """
    _check(setup, policy, transfer)
    times = Log(len(requests))
    servers: Sequence[Continuous | Static | DisaggregatedServer]
    prefill: tuple[Log, ...] = ()
    if transfer:
        pair = DisaggregatedServer(requests, setup, clients, transfer, times)
        logs = tuple(server.log for server in pair.decodes)
        prefill = tuple(server.log for server in pair.prompts)
        servers = (pair,)
    else:
        num_ranks = setup.steps.ranks
        batching = Static if policy == "static" else Continuous
        servers = ranks = [
            batching(ArrivalQueue(requests, setup.pool, times, clients, rank, num_ranks), setup)
            for rank in range(min(num_ranks, len(requests)))
        ]
        logs = tuple(server.log for server in ranks)
    is_complete = True
    try:
        for server in servers:
            reported = 0
            while server.run():
                if progress and server.done - reported >= PROGRESS_STEP:
                    progress(server.done - reported)
                    reported = server.done
            if progress:
                progress(server.done - reported)
    except KeyboardInterrupt:
        if np.isnan(times.finished).all():
            raise
        is_complete = False
    return Served(requests, times, logs, is_complete, prefill)


def _check(setup: ServerSetup, policy: str, transfer: KVTransfer | None) -> None:
    """Check that the settings of a server agree. Raises UserError otherwise."""
    if policy not in POLICIES:
        raise UserError(f"unknown policy {policy!r}", hint=nearest(policy, POLICIES))
    tokens, num_seqs = setup.limits.max_num_batched_tokens, setup.limits.max_num_seqs
    queries = setup.steps.queries
    if policy == "continuous" and tokens < num_seqs * queries:
        message = f"{tokens:,} tokens of a pass are fewer than {num_seqs:,} sequences"
        message += f" of {queries} queries" if queries > 1 else ""
        raise UserError(message, hint="Raise max-num-batched-tokens, or lower max-num-seqs")
    if transfer and policy != "continuous":
        raise UserError(
            "prompts apart from decodes are simulated under continuous batching",
            hint="Leave --policy out",
        )
