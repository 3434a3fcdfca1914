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

from kvcalc.serving.continuous import Continuous
from kvcalc.serving.door import NOBODY, Clients, Door
from kvcalc.serving.log import Log
from kvcalc.serving.pool import Pool
from kvcalc.serving.prefixes import Prefixes
from kvcalc.serving.requests import Requests
from kvcalc.serving.scheduling import Limits, Scheduling
from kvcalc.serving.tables import Passes

TIMES = ("arrived", "scheduled", "first", "finished", "rejected")


class Handover(NamedTuple):
    """The prefill replicas and their link.

    Attributes:
        replicas: Number of prefill replicas, in addition to the one that decodes.
        seconds: Returns the seconds that the cache of a prompt of `n` tokens takes on the link.
    """

    replicas: int
    seconds: Callable[[int], float]


class AnswersDoor(Door):
    """Admits requests whose prompts were computed on prefill ranks.

    Attributes:
        senders: Arrivals of the prefill ranks. They are notified of completed requests.
    """

    handed = True

    def __init__(self, requests: Requests, pool: Pool, log: Log, rank: int, ranks: int) -> None:
        super().__init__(requests, pool, log)
        self.line, self.head, self.next_s = iter(()), NOBODY, math.inf
        self.rank, self.ranks = rank, ranks
        self.senders: Sequence[PromptsDoor] = ()

    def leave(self, index: int, now: float) -> None:
        super().leave(index, now)
        self.senders[(self.rank + index * self.ranks) % len(self.senders)].answered(now)


class PromptsDoor(Door):
    """Admits requests for their first token, then sends them to a decode rank."""

    def __init__(
        self, requests: Requests, pool: Pool, log: Log, clients: Clients, rank: int, answers: Sequence[AnswersDoor],
        handover: Handover,
    ) -> None:  # fmt: skip
        super().__init__(requests, pool, log, clients)
        self.rank, self.answers, self.handover = rank, answers, handover
        self.answer_lens, self.outputs = self.outputs, [1] * len(self.outputs)

    def leave(self, index: int, now: float) -> None:
        """Send a computed prompt to its decode rank.

        An answer of one token is complete when its token arrives.
        """
        self.in_system -= 1
        there, whole = now + self.handover.seconds(self.inputs[index]), self.rank + index * self.handover.replicas
        self.log.first[index] = there
        sent = float(self.log.arrived[index])
        door = self.answers[whole % len(self.answers)]
        if self.answer_lens[index] > 1:
            door.come(there, whole // len(self.answers), sent)
            return
        self.log.finished[index] = there
        door.log.in_system_s += there - sent
        self.answered(there)

    def answered(self, at: float) -> None:
        """Note that a client has its whole answer."""
        self._free(at)


class Apart(NamedTuple):
    """The servers of prompts and the servers of decodes, by rank."""

    prompts: list[Continuous]
    decodes: list[Continuous]

    @property
    def open(self) -> bool:
        return any(server.door.open for server in self.prompts)

    @property
    def done(self) -> int:
        return sum(server.door.done for server in self.prompts)

    def run(self, closed: bool) -> None:
        """Run the server that is furthest behind.

        Args:
            closed: Whether answers trigger new requests. If so, decode servers wait for each other.
        """
        servers = [*self.prompts, *self.decodes]
        whens = [server.when() for server in servers]
        at = whens.index(min(whens))
        server = servers[at]
        if server.door.handed:
            whens[at] = math.inf
            server.horizon = min(whens if closed else whens[: len(self.prompts)])
        server.run()


def set_apart(
    requests: Requests, pool: Pool, steps: Passes, limits: Limits, clients: Clients, scheduling: Scheduling,
    make_prefixes: Callable[[], Prefixes] | None, handover: Handover,
) -> Apart:  # fmt: skip
    """Return servers whose logs share the times of the requests.

    A replica has as many ranks as `steps`.
    """
    count, many, whole = steps.ranks, steps.ranks * handover.replicas, Log(len(requests))
    decodes, prompts = [], []
    for rank in range(min(count, len(requests))):
        log = _shared(whole, rank, count)
        log.scheduled = log.scheduled.copy()  # here: when decoding may start; prompts log the start of work
        door = AnswersDoor(requests.share(rank, count), pool, log, rank, count)
        prefixes = make_prefixes() if make_prefixes else None
        decodes.append(Continuous(door, pool, steps, limits, log, scheduling, prefixes))
    doors = [server.door for server in decodes if isinstance(server.door, AnswersDoor)]
    for rank in range(min(many, len(requests))):
        log, asking = _shared(whole, rank, many), clients.share(rank, many)
        each = handover._replace(replicas=many)
        door_in = PromptsDoor(requests.share(rank, many), pool, log, asking, rank, doors, each)
        prefixes = make_prefixes() if make_prefixes else None
        prompts.append(Continuous(door_in, pool, steps, limits, log, scheduling, prefixes))
    for answers in doors:
        answers.senders = [server.door for server in prompts if isinstance(server.door, PromptsDoor)]
    return Apart(prompts, decodes)


def _shared(whole: Log, rank: int, ranks: int) -> Log:
    """Return the log of a rank. Its times are views of every `ranks`-th time of the whole log."""
    log = Log(0, rank)
    for name in TIMES:
        setattr(log, name, getattr(whole, name)[rank::ranks])
    return log
