"""Static batching: a batch starts when the server is free, and the server is not free until its longest answer is done.

A batch is what waits then, first come first served, up to max_num_seqs and as many as fit at their longest; never padded
in number. Prompts are padded to the longest one in the batch and processed in one pass; then every row decodes until the
last one is done. A row that is done holds its slot, and its padding is waste. Tokens reach their client as they are made.
"""

from collections import deque
from typing import Any

from kvcalc.serving.door import Door
from kvcalc.serving.log import Log
from kvcalc.serving.pool import Pool
from kvcalc.serving.scheduling import Limits
from kvcalc.serving.steps import Steps


class Static:
    """The server while it runs."""

    def __init__(self, door: Door, pool: Pool, steps: Steps, limits: Limits, log: Log) -> None:
        self.door, self.pool, self.steps, self.limits, self.log = door, pool, steps, limits, log
        self.now = 0.0
        self.waiting: deque[int] = deque()

    def run(self) -> bool:
        """One batch; False when all is done."""
        if not self.waiting:
            self.now = max(self.now, self.door.next_s)
        self._collect()
        if self.waiting:
            self._serve(self._batch())
        return self.door.open

    def _collect(self) -> None:
        """Take in what has come; wait for a fuller batch until the first request's patience ends."""
        self.waiting += self.door.admit(self.now)
        while self.waiting and len(self.waiting) < self.limits.max_num_seqs:
            ends = self.log.arrived[self.waiting[0]] + self.limits.batch_timeout
            coming = self.door.next_s
            if coming > ends:
                if coming < float("inf") and ends > self.now:
                    self._wait(ends)
                return
            self._wait(max(self.now, coming))
            self.waiting += self.door.admit(self.now)

    def _wait(self, until: float) -> None:
        self.door.pass_time(until - self.now)
        self.now = until

    def _batch(self) -> list[int]:
        """The longest head of the queue that fits when padded and grown to its end."""
        chosen: list[int] = []
        prompt = answer = 0
        while self.waiting and len(chosen) < self.limits.max_num_seqs:
            head = self.waiting[0]
            prompt, answer = max(prompt, self.door.inputs[head]), max(answer, self.door.outputs[head])
            end = prompt + answer - 1
            fits = (len(chosen) + 1) * int(self.pool.allocated[end]) <= self.pool.budget and end <= self.pool.longest
            if chosen and not fits:
                break
            chosen.append(self.waiting.popleft())
        return chosen

    def _serve(self, batch: list[int]) -> None:
        import numpy as np

        count, start = len(batch), self.now
        inputs = np.array([self.door.inputs[i] for i in batch])
        outputs = np.array([self.door.outputs[i] for i in batch])
        prompt, answer = int(inputs.max()), int(outputs.max())
        self.log.scheduled[batch] = start
        first = self.steps.prefill(((prompt, 0),), count)
        seconds = np.array([first, *self._decodes(count, prompt, answer - 1)])
        ends = start + seconds.cumsum()
        self.log.first[batch] = ends[0]
        self._note(seconds, inputs, outputs)
        self._release(batch, outputs, ends)
        self.now = float(ends[-1])

    def _decodes(self, count: int, prompt: int, steps: int) -> list[float]:
        found: list[float] = []
        while len(found) < steps:
            found += self.steps.decode(count, prompt + 1 + len(found), steps - len(found)).tolist()
        return found

    def _note(self, seconds: Any, inputs: Any, outputs: Any) -> None:
        """The prefill, then the decode passes; a row's own tokens are stored until it is done."""
        import numpy as np

        count, prompt, decodes = len(inputs), int(inputs.max()), len(seconds) - 1
        taken = count * self.pool.allocated[prompt : prompt + decodes + 1]
        kept = np.zeros(decodes + 1, dtype=np.int64)
        for i, o in zip(inputs.tolist(), outputs.tolist(), strict=True):
            kept[:o] += self.pool.stored[i : i + o]
        start, waiting, slots = self.now, len(self.waiting), count * prompt
        self.log.passed(start, seconds[:1], count, slots, slots, waiting, taken[:1], kept[:1], padded=slots - int(inputs.sum()))
        if decodes:
            padded = count * decodes - int((outputs - 1).sum())
            self.log.passed(start + seconds[0], seconds[1:], count, count, 0, waiting, taken[1:], kept[1:], padded=padded)

    def _release(self, batch: list[int], outputs: Any, ends: Any) -> None:
        """Each request leaves with its last token."""
        import numpy as np

        for place in np.argsort(outputs, kind="stable").tolist():
            at = float(ends[outputs[place] - 1])
            self._wait(at)
            self.door.leave(batch[place], at)
