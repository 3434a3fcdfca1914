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
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvcalc.serving.arrivals import ArrivalQueue, Clients
from kvcalc.serving.batching import Continuous, ServerSetup
from kvcalc.serving.cache_accounting import Log, Pool
from kvcalc.serving.requests import Requests

TIMES = ("arrived", "scheduled", "first", "finished", "rejected")


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

    def __init__(self, requests: Requests, pool: Pool, log: Log, num_ranks: int) -> None:
        super().__init__(requests, pool, log)
        self.coming = []
        self.num_ranks = num_ranks
        self.senders: Sequence[PrefillArrivals] = ()

    def leave(self, index: int, now: float) -> None:
        super().leave(index, now)
        self.senders[(self.log.rank + index * self.num_ranks) % len(self.senders)].answer(now)


class PrefillArrivals(ArrivalQueue):
    """Admits requests for their first token, then sends them to a decode rank.

    Args:
        receivers: Arrivals of the decode ranks.
        num_ranks: Number of prefill ranks of all replicas.
        transfer_s: As `KVTransfer.seconds`.
    """

    def __init__(
        self,
        requests: Requests,
        pool: Pool,
        log: Log,
        clients: Clients,
        receivers: Sequence[DecodeArrivals],
        num_ranks: int,
        transfer_s: Callable[[int], float],
    ) -> None:
        super().__init__(requests, pool, log, clients)
        self.receivers = receivers
        self.num_ranks = num_ranks
        self.transfer_s = transfer_s
        self.answer_lens = self.outputs
        self.outputs = [1] * len(self.outputs)

    def leave(self, index: int, now: float) -> None:
        """Send a computed prompt to its decode rank.

        An answer of one token is complete when its token arrives.
        """
        arrival = now + self.transfer_s(self.inputs[index])
        request = self.log.rank + index * self.num_ranks
        self.log.first[index] = arrival
        receiver = self.receivers[request % len(self.receivers)]
        if self.answer_lens[index] > 1:
            sent = float(self.log.arrived[index])
            receiver.come(arrival, request // len(self.receivers), sent)
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
    ) -> None:
        num_decode = setup.steps.ranks
        num_prefill = num_decode * transfer.replicas
        # whether answers trigger new requests, so that decode servers wait for each other
        self.is_closed = bool(clients.concurrency)
        times = Log(len(requests))
        receivers: list[DecodeArrivals] = []
        for rank in range(min(num_decode, len(requests))):
            log = _shared_log(times, rank, num_decode)
            # when decoding may start; logs of prompts have the start of work
            log.scheduled = log.scheduled.copy()
            part = requests.for_rank(rank, num_decode)
            receivers.append(DecodeArrivals(part, setup.pool, log, num_decode))
        senders = [
            PrefillArrivals(
                requests=requests.for_rank(rank, num_prefill),
                pool=setup.pool,
                log=_shared_log(times, rank, num_prefill),
                clients=clients.for_rank(rank, num_prefill),
                receivers=receivers,
                num_ranks=num_prefill,
                transfer_s=transfer.seconds,
            )
            for rank in range(min(num_prefill, len(requests)))
        ]
        for receiver in receivers:
            receiver.senders = senders
        self.senders = senders
        self.prompts = [Continuous(queue, setup, queue.log) for queue in senders]
        self.decodes = [Continuous(queue, setup, queue.log) for queue in receivers]

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


def _shared_log(times: Log, rank: int, num_ranks: int) -> Log:
    """Return the log of a rank, whose times are views of every `num_ranks`-th of `times`."""
    log = Log(0, rank)
    for name in TIMES:
        setattr(log, name, getattr(times, name)[rank::num_ranks])
    return log
