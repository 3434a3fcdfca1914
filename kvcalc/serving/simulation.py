"""A server under load, simulated pass by pass: one log for each data-parallel rank, and what they have in common.

Requests go to the ranks in turn. Each rank has its own queue and memory; a pass of one is timed as if the others ran the same
batch beside it. One pass is in flight at a time, also through a pipeline.
"""

from collections.abc import Callable
from typing import NamedTuple

from kvcalc.errors import UserError, nearest
from kvcalc.serving.continuous import Continuous
from kvcalc.serving.door import Clients, Door
from kvcalc.serving.handover import Apart, Handover, set_apart
from kvcalc.serving.log import Log
from kvcalc.serving.pool import Pool
from kvcalc.serving.prefixes import Prefixes
from kvcalc.serving.requests import Requests
from kvcalc.serving.scheduling import MIXED, Limits, Scheduling
from kvcalc.serving.static import Static
from kvcalc.serving.steps import Steps
from kvcalc.serving.tables import Passes

POLICIES = ("continuous", "static")
TOLD = 100  # requests of which progress is told at once


class Served(NamedTuple):
    """What was asked and what came of it, a log a rank: rank r of n took every n-th request from the r-th on.

    whole: False where Ctrl-C ended it before all were done. prefill: logs of ranks for prompts alone, beside which `logs` are
    those of the ranks that decode; they share the times of the requests.
    """

    requests: Requests
    logs: tuple[Log, ...]
    whole: bool = True
    prefill: tuple[Log, ...] = ()


def simulate(
    requests: Requests,
    pool: Pool,
    steps: Passes,
    limits: Limits,
    policy: str = "continuous",
    clients: Clients | int = 0,
    progress: Callable[[int], None] | None = None,
    scheduling: Scheduling = MIXED,
    make_prefixes: Callable[[], Prefixes] | None = None,
    handover: Handover | None = None,
) -> Served:
    """Serve all requests. `progress` is told how many more are done, now and then; Ctrl-C keeps those that are.

    clients: who asks; a number of them in a closed loop, 0 for none. make_prefixes: makes a rank's prefix cache. Raises
    UserError on an unknown policy, and where a pass could not hold a token of every sequence.
    """
    if policy not in POLICIES:
        raise UserError(f"unknown policy {policy!r}", hint=nearest(policy, POLICIES))
    if policy == "static" and steps.drafting:
        raise UserError("a draft is simulated under continuous batching alone", hint="Leave --policy static, or --draft, out")
    if policy == "continuous" and limits.max_num_batched_tokens < limits.max_num_seqs * steps.queries:
        what = f"{limits.max_num_batched_tokens:,} tokens of a pass are fewer than {limits.max_num_seqs:,} sequences"
        what += f" of {steps.queries} queries" if steps.drafting else ""
        raise UserError(what, hint="Raise max-num-batched-tokens, or lower max-num-seqs")
    asking = Clients(clients) if isinstance(clients, int) else clients
    if handover:
        if policy != "continuous":
            raise UserError("prompts apart from decodes are simulated under continuous batching", hint="Leave --policy out")
        servers = set_apart(requests, pool, steps, limits, asking, scheduling, make_prefixes, handover)
        return _apart(servers, requests, bool(asking.concurrency), progress)
    ranks = min(steps.ranks, len(requests))
    logs = tuple(Log(len(range(rank, len(requests), steps.ranks)), rank) for rank in range(ranks))
    try:
        for log in logs:
            door = Door(requests.share(log.rank, steps.ranks), pool, log, asking.share(log.rank, steps.ranks))
            prefixes = make_prefixes() if make_prefixes else None
            _run(_server(door, pool, steps, limits, log, policy, scheduling, prefixes), progress)
    except KeyboardInterrupt:
        if not any((log.finished == log.finished).any() for log in logs):
            raise
        return Served(requests, logs, whole=False)
    return Served(requests, logs)


def _apart(servers: Apart, requests: Requests, closed: bool, progress: Callable[[int], None] | None) -> Served:
    """Prompts and decodes on replicas of their own, until all is done."""
    whole, told = True, 0
    try:
        while servers.open:
            servers.run(closed)
            if progress and servers.done - told >= TOLD:
                progress(servers.done - told)
                told = servers.done
        if progress:
            progress(servers.done - told)
    except KeyboardInterrupt:
        whole = False
    prompts, logs = (tuple(server.log for server in some) for some in servers)
    if not whole and not any((log.finished == log.finished).any() for log in logs):
        raise KeyboardInterrupt
    return Served(requests, logs, whole, prompts)


def _run(server: Continuous | Static, progress: Callable[[int], None] | None) -> None:
    """Until all is done."""
    door, told = server.door, 0
    while server.run():
        if progress and door.done - told >= TOLD:
            progress(door.done - told)
            told = door.done
    if progress:
        progress(door.done - told)


def _server(
    door: Door,
    pool: Pool,
    steps: Passes,
    limits: Limits,
    log: Log,
    policy: str,
    scheduling: Scheduling,
    prefixes: Prefixes | None,
) -> Continuous | Static:
    if policy == "static" and isinstance(steps, Steps):
        return Static(door, pool, steps, limits, log)
    return Continuous(door, pool, steps, limits, log, scheduling, prefixes)
