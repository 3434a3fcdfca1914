"""A second scheduler, to hold the first against: every pass by itself, every sequence in a loop, no sums kept.

Rules as `kvcalc.serving.continuous` states them of vLLM's order, without a draft and without a prefix cache.
"""

import itertools
from typing import Any

import numpy as np

from kvcalc.serving.door import Door
from kvcalc.serving.ledger import Grown
from kvcalc.serving.log import Log
from kvcalc.serving.pool import Pool
from kvcalc.serving.scheduling import Limits


class One:
    """A request: tokens cached, tokens to cache before it makes one, tokens made; whether its cache lies on the host."""

    def __init__(self, index: int, prompt: int) -> None:
        self.index, self.cached, self.goal, self.made, self.turn, self.away = index, 0, prompt, 0, 0, False

    @property
    def decodes(self) -> bool:
        return self.cached >= self.goal


def run_plainly(door: Door, pool: Pool, limits: Limits, log: Log, seconds_of: Any) -> None:
    """Serves all; seconds_of(tokens of the pass) is its time."""
    queue: list[One] = []
    inside: list[One] = []
    now, turns = 0.0, itertools.count(1)

    def held(more: int) -> int:
        return sum(int(pool.allocated[s.cached + more if s.decodes else s.goal]) for s in inside)

    while door.open:
        if not (queue or inside):
            now = max(now, door.next_s)
        queue += [One(i, door.inputs[i]) for i in door.admit(now)]
        if not (queue or inside):
            continue
        moved, preempted = 0, False
        while held(1) > pool.budget:
            last = max(inside, key=lambda s: s.turn)
            inside.remove(last)
            preempted = True
            log.preemptions += 1
            if last.decodes and limits.host_bytes_per_s:
                last.away = True
                moved += int(pool.allocated[last.cached])
            else:
                last.goal = last.cached + 1 if last.decodes else last.goal
                log.recomputed_tokens += last.goal if last.made else last.cached
                last.cached = 0
            queue.insert(0, last)
        room = limits.max_num_batched_tokens - sum(s.decodes for s in inside)
        pieces: list[tuple[One, int]] = []
        decoding, returned = [s for s in inside if s.decodes], []
        for s in inside:
            if not s.decodes and room:
                pieces.append((s, min(room, s.goal - s.cached)))
                room -= pieces[-1][1]
        free = pool.budget - held(1)
        while queue and not preempted and room > 0 and len(inside) < limits.max_num_seqs:
            head = queue[0]
            need = int(pool.allocated[head.cached + 1 if head.away else head.goal])
            if need > free:
                break
            free -= need
            queue.pop(0)
            inside.append(head)
            if not head.turn:
                log.scheduled[head.index] = now
            head.turn = next(turns)
            if head.away:
                head.away = False
                moved += int(pool.allocated[head.cached])
                returned.append(head)
            else:
                pieces.append((head, min(room, head.goal)))
                room -= pieces[-1][1]
        prompt = sum(new for _, new in pieces)
        seconds = seconds_of(len(decoding) + prompt) if decoding or pieces else 0.0
        if moved:
            seconds += moved / limits.host_bytes_per_s
            log.swapped_bytes += moved
        ready = []
        for s, new in pieces:
            s.cached += new
            ready += [s] if s.decodes else []
        for s in decoding:
            s.cached += 1
            s.made += 1
        allocated = sum(int(pool.allocated[s.goal if s in dict(pieces) else s.cached]) for s in inside)
        stored = sum(int(pool.stored[s.cached]) for s in inside)
        grown = Grown(allocated, stored, allocated, allocated * seconds, stored * seconds)
        log.ran(now, seconds, 1, len(decoding) + len(pieces), len(decoding) + prompt, prompt, len(queue), grown)
        now += seconds
        door.pass_time(seconds)
        for s in ready:
            s.made += 1
            s.goal = s.cached
            if np.isnan(log.first[s.index]):
                log.first[s.index] = now
        for s in [s for s in inside if s.made == door.outputs[s.index] and s not in returned]:
            inside.remove(s)
            door.leave(s.index, now)
