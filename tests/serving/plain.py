"""A second scheduler for comparison: it simulates every pass separately, with loops over sequences and no stored
sums.

It follows vLLM's order as described in `kvcalc.serving.batching`, without a draft and without a prefix cache.
"""

import itertools
from typing import Any

import numpy as np

from kvcalc.serving.batching import Limits
from kvcalc.serving.cache_accounting import CacheGrowth, Log, PassRow, Pool, constant_growth
from kvcalc.serving.requests import ArrivalQueue


class One:
    """A request: its cached tokens, the tokens to cache before it generates, and the generated tokens."""

    def __init__(self, index: int, prompt: int) -> None:
        self.index, self.cached, self.goal, self.made, self.turn = index, 0, prompt, 0, 0

    @property
    def decodes(self) -> bool:
        return self.cached >= self.goal


def run_plainly(door: ArrivalQueue, pool: Pool, limits: Limits, log: Log, seconds_of: Any) -> None:
    """Serve all requests. `seconds_of(tokens of the pass)` is the time of a pass."""
    server = Plain(door, pool, limits, log)
    now = 0.0
    while door.is_open:
        if not (server.queue or server.inside):
            now = max(now, door.next_s)
        server.queue += [One(i, door.inputs[i]) for i in door.admit(now)]
        if server.queue or server.inside:
            now = server.passes(now, seconds_of)


class Plain:
    """The waiting and the running requests. A pass preempts, continues prompts, admits requests, and runs."""

    def __init__(self, door: ArrivalQueue, pool: Pool, limits: Limits, log: Log) -> None:
        self.door, self.pool, self.limits, self.log = door, pool, limits, log
        self.queue: list[One] = []
        self.inside: list[One] = []
        self.turns = itertools.count(1)

    def held(self) -> int:
        return sum(int(self.pool.allocated[s.cached + 1 if s.decodes else s.goal]) for s in self.inside)

    def passes(self, now: float, seconds_of: Any) -> float:
        """Run one pass and return its end."""
        preempted = self.preempt()
        room = self.limits.max_num_batched_tokens - sum(s.decodes for s in self.inside)
        decoding = [s for s in self.inside if s.decodes]
        pieces: list[tuple[One, int]] = []
        for s in self.inside:
            if not s.decodes and room:
                pieces.append((s, min(room, s.goal - s.cached)))
                room -= pieces[-1][1]
        if not preempted:
            self.let_in(now, room, pieces)
        prompt = sum(new for _, new in pieces)
        seconds = seconds_of(len(decoding) + prompt)
        ready = grow(pieces, decoding)
        grown = self.stands({s for s, _ in pieces}, seconds)
        sizes = len(decoding) + len(pieces), len(decoding) + prompt, prompt, len(self.queue)
        self.log.add(PassRow(0, now, seconds, 1, *sizes, grown.allocated, grown.stored_bytes), grown)
        self.finish(ready, now + seconds)
        return now + seconds

    def preempt(self) -> bool:
        """Preempt the request that was admitted last, if necessary. Return whether one was preempted."""
        preempted = False
        while self.held() > self.pool.budget:
            last = max(self.inside, key=lambda s: s.turn)
            self.inside.remove(last)
            preempted = True
            self.log.preemptions += 1
            last.goal = last.cached + 1 if last.decodes else last.goal
            self.log.recomputed_tokens += last.goal if last.made else last.cached
            last.cached = 0
            self.queue.insert(0, last)
        return preempted

    def let_in(self, now: float, room: int, pieces: list[tuple[One, int]]) -> None:
        """Admit requests while tokens, max_num_seqs and memory allow it, and add their chunks."""
        free = self.pool.budget - self.held()
        while self.queue and room > 0 and len(self.inside) < self.limits.max_num_seqs:
            head = self.queue[0]
            need = int(self.pool.allocated[head.goal])
            if need > free:
                break
            free -= need
            self.inside.append(self.queue.pop(0))
            if not head.turn:
                self.log.scheduled[head.index] = now
            head.turn = next(self.turns)
            pieces.append((head, min(room, head.goal)))
            room -= pieces[-1][1]

    def stands(self, prompts: set[One], seconds: float) -> CacheGrowth:
        allocated = sum(int(self.pool.allocated[s.goal if s in prompts else s.cached]) for s in self.inside)
        stored = sum(int(self.pool.stored_bytes[s.cached]) for s in self.inside)
        return constant_growth(allocated, stored, seconds)

    def finish(self, ready: list[One], now: float) -> None:
        """Add the first tokens of complete prompts, and remove requests that are done."""
        for s in ready:
            s.made += 1
            s.goal = s.cached
            if np.isnan(self.log.first[s.index]):
                self.log.first[s.index] = now
        for s in [s for s in self.inside if s.made == self.door.outputs[s.index]]:
            self.inside.remove(s)
            self.door.record_done(s.index, now)


def grow(pieces: list[tuple[One, int]], decoding: list[One]) -> list[One]:
    """Caches a piece of every prompt and a token of every decode; who has its prompt now."""
    for s, new in pieces:
        s.cached += new
    for s in decoding:
        s.cached += 1
        s.made += 1
    return [s for s, _ in pieces if s.decodes]
