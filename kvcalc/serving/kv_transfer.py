"""Disaggregated prefill: separate replicas process prompts and decodes.

Prompts go to the prefill ranks in turn, decodes to the decode ranks in turn. Each prompt's cache
crosses the link once; transfers are not queued. The first token comes from the last pass of the
prompt and reaches the user when the cache has crossed the link. Then the request waits for
max_num_seqs and memory on its decode rank. The prompt's memory on the prefill rank is free as
soon as the prompt is computed. Preempted requests are recomputed on the decode rank.

The servers are simulated concurrently. The server that is furthest behind always runs next. It
never runs past the time at which another server may still send it a request.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

from kvcalc.serving.batching import Continuous, ServerSetup
from kvcalc.serving.cache_accounting import Log
from kvcalc.serving.requests import ArrivalQueue, Clients, Requests


class KVTransfer(NamedTuple):
    """The prefill replicas and their link.

    Attributes:
        replicas: Number of prefill replicas, in addition to the one that decodes.
        seconds: Returns the seconds that the cache of a prompt of `n` tokens takes on the link.
    """

    replicas: int
    seconds: Callable[[int], float]


class DecodeArrivals(ArrivalQueue):
    """Admits requests whose prompts were computed on prefill ranks.

    Attributes:
        senders: Arrivals of the prefill ranks. They are notified of completed requests.
    """

    is_computed = True
    senders: "list[PrefillArrivals]"

    def leave(self, index: int, now: float) -> None:
        super().leave(index, now)
        self.senders[self.request(index) % len(self.senders)].answer(now)


class PrefillArrivals(ArrivalQueue):
    """Admits requests for their first token, then sends them to a decode rank.

    Attributes:
        receivers: Arrivals of the decode ranks.
        transfer_s: As `KVTransfer.seconds`.
    """

    receivers: list[DecodeArrivals]
    transfer_s: Callable[[int], float]

    def leave(self, index: int, now: float) -> None:
        """Send a computed prompt to its decode rank.

        An answer of one token is complete when its token arrives.
        """
        arrival = now + self.transfer_s(self.inputs[index])
        self.log.first[index] = arrival
        position, rank = divmod(self.request(index), len(self.receivers))
        receiver = self.receivers[rank]
        if receiver.outputs[position] > 1:
            receiver.come(arrival, position, float(self.log.arrived[index]))
            return
        self.log.finished[index] = arrival
        self.answer(arrival)


class DisaggregatedServer:
    """The servers of prompts and the servers of decodes, by rank.

    Their logs share the times of the requests. The timer gives the number of ranks of a replica.
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
        """Run the server that is furthest behind. Returns False if all requests are done."""
        servers = [*self.prompts, *self.decodes]
        times = [server.next_pass_s() for server in servers]
        index = times.index(min(times))
        server = servers[index]
        if server.queue.is_computed:
            times[index] = math.inf
            server.horizon = min(times if self.is_closed else times[: len(self.prompts)])
        server.run()
        return any(sender.is_open for sender in self.senders)
