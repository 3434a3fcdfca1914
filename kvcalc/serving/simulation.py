"""A server under load, simulated pass by pass, with one log for each data-parallel rank.

Requests go to the ranks in turn. Each rank has its own queue and memory; a pass of one is timed as
if the others ran an equal batch. Pipeline stages work on different micro-batches of a pass.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from kvcalc.errors import UserError, nearest
from kvcalc.serving.arrivals import ArrivalQueue, Clients
from kvcalc.serving.batching import Continuous, ServerSetup, Static
from kvcalc.serving.cache_accounting import Log
from kvcalc.serving.kv_transfer import DisaggregatedServer, KVTransfer
from kvcalc.serving.requests import Requests

POLICIES = ("continuous", "static")
PROGRESS_STEP = 100  # requests between two reports of progress


class Served(NamedTuple):
    """Simulated requests.

    Attributes:
        logs: Log of each rank. Rank r of n processes every n-th request from request r on.
        is_complete: False if Ctrl-C ended the simulation before all requests were done.
        prefill: Logs of the prefill ranks of a disaggregated server. `logs` are then from the
            decode ranks, and all logs share the times of the requests.
    """

    requests: Requests
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
    num_ranks = setup.steps.ranks
    servers: Iterator[Continuous | Static | DisaggregatedServer]
    prefill: tuple[Log, ...] = ()
    if transfer:
        pair = DisaggregatedServer(requests, setup, clients, transfer)
        logs = tuple(server.log for server in pair.decodes)
        prefill = tuple(server.log for server in pair.prompts)
        servers = iter((pair,))
    else:
        counts = [len(range(rank, len(requests), num_ranks)) for rank in range(num_ranks)]
        logs = tuple(Log(count, rank) for rank, count in enumerate(counts) if count)
        servers = (_rank_server(requests, setup, policy, clients, log) for log in logs)
    is_complete = True
    try:
        for server in servers:
            _run(server, progress)
    except KeyboardInterrupt:
        if not any((log.finished == log.finished).any() for log in logs):
            raise
        is_complete = False
    return Served(requests, logs, is_complete, prefill)


def _check(setup: ServerSetup, policy: str, transfer: KVTransfer | None) -> None:
    """Check that the settings of a server agree. Raises UserError otherwise."""
    if policy not in POLICIES:
        raise UserError(f"unknown policy {policy!r}", hint=nearest(policy, POLICIES))
    tokens, num_seqs = setup.limits.max_num_batched_tokens, setup.limits.max_num_seqs
    queries = setup.steps.queries
    if policy == "continuous" and tokens < num_seqs * queries:
        what = f"{tokens:,} tokens of a pass are fewer than {num_seqs:,} sequences"
        what += f" of {queries} queries" if queries > 1 else ""
        raise UserError(what, hint="Raise max-num-batched-tokens, or lower max-num-seqs")
    if transfer and policy != "continuous":
        raise UserError(
            "prompts apart from decodes are simulated under continuous batching",
            hint="Leave --policy out",
        )


def _rank_server(
    requests: Requests, setup: ServerSetup, policy: str, clients: Clients, log: Log
) -> Continuous | Static:
    """Return the server of one rank."""
    num_ranks = setup.steps.ranks
    part = requests.for_rank(log.rank, num_ranks)
    queue = ArrivalQueue(part, setup.pool, log, clients.for_rank(log.rank, num_ranks))
    if policy == "static":
        return Static(queue, setup, log)
    return Continuous(queue, setup, log)


def _run(
    server: Continuous | Static | DisaggregatedServer,
    progress: Callable[[int], None] | None,
) -> None:
    """Run a server until all requests are done."""
    reported = 0
    while server.run():
        if progress and server.done - reported >= PROGRESS_STEP:
            progress(server.done - reported)
            reported = server.done
    if progress:
        progress(server.done - reported)
