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
    """The prefill replicas of a disaggregated server, and the time to send a KV cache from them.

    Attributes:
        replicas: Number of prefill replicas, in addition to the one decode replica.
        seconds: Function of the number of tokens of a prompt. It returns the seconds to send the
            prompt's KV cache to the decode replica.
    """

    replicas: int
    seconds: Callable[[int], float]


class DecodeArrivals(ArrivalQueue):
    """Requests on their way to one decode rank of a disaggregated server.

    Their prompts were computed on prefill ranks, which send the KV caches.

    Attributes:
        senders: The queues of all prefill ranks. The queue of a request's prefill rank learns when
            the request is complete, so that its client can send the next one.
    """

    is_computed = True
    senders: "list[PrefillArrivals]"

    def record_done(self, index: int, now: float) -> None:
        """Record that a request has its last token.

        The queue of its prefill rank learns it too, so that the client can send its next request.

        Args:
            index: Index of the request among the requests of this decode rank.
            now: Simulated time in seconds at which the request is done.
        """
        super().record_done(index, now)
        self.senders[self.request(index) % len(self.senders)].record_answer(now)


class PrefillArrivals(ArrivalQueue):
    """Requests on their way to one prefill rank of a disaggregated server.

    After its first token, a request moves to a decode rank.

    Attributes:
        receivers: The queues of all decode ranks, to which requests move.
        transfer_s: Function of the number of tokens of a prompt. It returns the seconds to send the
            prompt's KV cache to a decode rank.
    """

    receivers: list[DecodeArrivals]
    transfer_s: Callable[[int], float]

    def record_done(self, index: int, now: float) -> None:
        """Send a request whose prompt is computed to its decode rank.

        Its first token and its KV cache arrive there after the transfer time. A request with only
        one output token needs no decode rank. It is complete after the transfer time.

        Args:
            index: Index of the request among the requests of this prefill rank.
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
    """A simulated server with separate ranks for prompts and for decoding.

    Prefill ranks and decode ranks write the times of requests into one common log.

    Attributes:
        is_closed: Whether clients wait for answers before they send new requests.
        senders: For each prefill rank, the queue of the requests that have not reached it yet.
        prompts: The prefill ranks, which process prompts up to the first token.
        decodes: The decode ranks, which generate the further tokens.
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
        """Simulate the next passes of one rank: the rank whose next pass begins first.

        Returns:
            True if further requests have to be served, False if all are done.
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
    """Return how an engine fills its forward passes with prompts and decodes.

    Args:
        engine: Overheads and scheduling of the engine, from its preset. None gives vLLM's
            scheduling: prompts in chunks, in one pass with decodes.
    """
    return (
        Scheduling(engine.decodes_wait, engine.whole, engine.reserve)
        if engine
        else Scheduling()
    )


PROGRESS_STEP = 100  # requests between two reports of progress


class Served(NamedTuple):
    """The result of a simulation: the requests with their times, and a log of each rank.

    Attributes:
        requests: All requests, with arrivals and lengths.
        times: Log with the times of all requests, in the order of `requests`.
        logs: For each data-parallel rank, sums over its forward passes and its timeline. Rank r of
            n serves the requests r, r + n, r + 2n and so on.
        is_complete: False if Ctrl-C ended the simulation before all requests were done.
        prefill: Logs of the prefill ranks of a disaggregated server, in which case `logs` are those
            of the decode ranks; otherwise empty.
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
    """Return the result of simulating a server until all requests are done.

    Ctrl-C ends the simulation. The result then has the requests that are done so far.

    Args:
        requests: Requests to serve, with arrivals and lengths.
        setup: KV cache, timer of forward passes, limits and scheduling of the server.
        policy: Batching policy: `continuous` (as in vLLM) or `static`.
        clients: Clients that send the requests; by default requests do not wait for answers.
        transfer: Prefill replicas of a disaggregated server; None if each replica processes prompts
            and decodes.
        progress: Called from time to time with the number of requests done since its last call;
            None for no calls.

    Raises:
        UserError: Under continuous batching, `max_num_batched_tokens` is too small for one token of
            each of `max_num_seqs` sequences, or with a draft for its tokens.
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
