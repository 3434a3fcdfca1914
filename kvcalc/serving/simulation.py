"""A server under load, simulated pass by pass, with one log for each data-parallel rank.

Requests go to the ranks in turn. Each rank has its own queue and memory. A pass of one rank is
timed as if the other ranks ran an equal batch. Pipeline stages work on different micro-batches of a
pass.

Disaggregated prefill: separate replicas process prompts and decodes.

Prompts go to the prefill ranks in turn, decodes to the decode ranks in turn. Each prompt's cache
crosses the link once; transfers are not queued. The first token comes from the last pass of the
prompt and reaches the user when the cache has crossed the link. Then the request waits for
max_num_seqs and memory on its decode rank. The prompt's memory on the prefill rank is free as
soon as the prompt is computed. Preempted requests are recomputed on the decode rank.

The servers are simulated concurrently. The server that is furthest behind always runs next. It
never runs past the time at which another server may still send it a request.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from kvcalc.errors import UserError
from kvcalc.serving.batching import Continuous, Scheduling, ServerSetup, Static
from kvcalc.serving.cache_accounting import Log
from kvcalc.serving.requests import ArrivalQueue, Clients, Requests
from kvcalc.timing.calibration import EngineOverheads

Progress: TypeAlias = Callable[[int], None] | None  # receives numbers of further done requests


class KVTransfer(NamedTuple):
    """The prefill replicas of a disaggregated server, and their link to the decode replica.

    Attributes:
        replicas: Number of prefill replicas, in addition to the decode replica.
        seconds: Function of a prompt's tokens. It returns the seconds that the prompt's cache takes
            on the link.
    """

    replicas: int
    seconds: Callable[[int], float]


class DecodeArrivals(ArrivalQueue):
    """Arrivals at one decode rank: requests whose prompts were computed on prefill ranks.

    Attributes:
        senders: Arrivals of all prefill ranks. A sender learns of each completed request, so that
            its clients can send the next one.
    """

    is_computed = True
    senders: "list[PrefillArrivals]"

    def record_done(self, index: int, now: float) -> None:
        super().record_done(index, now)
        self.senders[self.request(index) % len(self.senders)].record_answer(now)


class PrefillArrivals(ArrivalQueue):
    """Arrivals at one prefill rank. After its first token, a request moves to a decode rank.

    Attributes:
        receivers: Arrivals of all decode ranks.
        transfer_s: Function of a prompt's tokens. It returns the seconds that the prompt's cache
            takes on the link.
    """

    receivers: list[DecodeArrivals]
    transfer_s: Callable[[int], float]

    def record_done(self, index: int, now: float) -> None:
        """Send a computed prompt to its decode rank.

        An answer of one token needs no decode rank. It is complete when this token reaches the
        user.

        Args:
            index: Index of the request on this prefill rank.
            now: Simulated time in seconds at which the prompt is computed.
        """
        arrival = now + self.transfer_s(self.inputs[index])
        self.log.first[index] = arrival
        position, rank = divmod(self.request(index), len(self.receivers))
        receiver = self.receivers[rank]
        if receiver.outputs[position] > 1:
            receiver.add_arrival(arrival, position, float(self.log.arrived[index]))
            return
        self.log.finished[index] = arrival
        self.record_answer(arrival)


class DisaggregatedServer:
    """All prefill ranks and decode ranks of a disaggregated deployment.

    The logs of prefill ranks and decode ranks write to one common log of the times of all requests.

    Attributes:
        is_closed: Whether clients wait for answers before they send new requests.
        senders: Arrivals at each prefill rank.
        prompts: The prefill ranks, which process prompts.
        decodes: The decode ranks, which generate answers.
    """

    def __init__(
        self,
        requests: Requests,
        setup: ServerSetup,
        clients: Clients,
        transfer: KVTransfer,
        times: Log,
    ) -> None:
        num_decode = setup.steps.ranks
        num_prefill = num_decode * transfer.replicas
        # whether answers trigger new requests, so that decode servers wait for each other
        self.is_closed = bool(clients.concurrency)
        receivers = [
            DecodeArrivals(requests, setup.pool, times, Clients(), rank, num_decode)
            for rank in range(min(num_decode, len(requests)))
        ]
        self.senders = [
            PrefillArrivals(requests, setup.pool, times, clients, rank, num_prefill)
            for rank in range(min(num_prefill, len(requests)))
        ]
        for receiver in receivers:
            receiver.coming = []
            receiver.senders = self.senders
            receiver.log.scheduled = receiver.log.decode_scheduled
        for sender in self.senders:
            sender.outputs = [1] * len(sender.outputs)
            sender.receivers = receivers
            sender.transfer_s = transfer.seconds
        self.prompts = [Continuous(queue, setup) for queue in self.senders]
        self.decodes = [Continuous(queue, setup) for queue in receivers]

    @property
    def done(self) -> int:
        return sum(sender.done for sender in self.senders)

    def run(self) -> bool:
        """Run the rank that is furthest behind in simulated time.

        Returns:
            False if all requests are done.
        """
        servers = [*self.prompts, *self.decodes]
        times = [server.next_pass_s() for server in servers]
        index = times.index(min(times))
        server = servers[index]
        if server.queue.is_computed:
            times[index] = math.inf
            server.horizon = min(times if self.is_closed else times[: len(self.prompts)])
        server.run()
        return any(sender.is_open for sender in self.senders)


def scheduling_of(engine: EngineOverheads | None) -> Scheduling:
    """Return how an engine fills its passes with prompts and decodes.

    Args:
        engine: Overheads of the engine. None gives vLLM's scheduling: prompts in chunks, together
            with decodes.
    """
    return (
        Scheduling(engine.decodes_wait, engine.whole, engine.reserve)
        if engine
        else Scheduling()
    )


PROGRESS_STEP = 100  # requests between two reports of progress


class Served(NamedTuple):
    """The result of a simulation.

    Attributes:
        requests: All requests.
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
    progress: Progress = None,
) -> Served:
    """Simulate a server until all requests are done. Ctrl-C ends it and keeps the requests done so
    far.

    Args:
        requests: Requests to serve.
        setup: Settings of the server.
        policy: Batching policy: `continuous` or `static`.
        clients: Clients that send the requests.
        transfer: Prefill replicas of a disaggregated server; None for a usual server.
        progress: Called from time to time with the number of requests done since its last call.

    Raises:
        UserError: The maximum tokens of a pass do not allow one token of every sequence.
    """
    if policy == "continuous":
        _check_tokens(setup)
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


def _check_tokens(setup: ServerSetup) -> None:
    """Raise UserError unless the maximum tokens of a pass allow one token of every sequence."""
    tokens, num_seqs = setup.limits.max_num_batched_tokens, setup.limits.max_num_seqs
    queries = setup.steps.queries
    if tokens < num_seqs * queries:
        message = f"{tokens:,} tokens of a pass are fewer than {num_seqs:,} sequences"
        message += f" of {queries} queries" if queries > 1 else ""
        raise UserError(message, "Raise max-num-batched-tokens, or lower max-num-seqs")
