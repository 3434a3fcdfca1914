"""How engines fill their passes, within which limits, a request on its way, and how long passes in a row take."""

from itertools import accumulate
from typing import NamedTuple

from kvcalc.serving.steps import Line


class Limits(NamedTuple):
    """Of one rank. max_num_seqs: sequences at once. max_num_batched_tokens: tokens of a pass.

    host_bytes_per_s: preempted caches are swapped to the host at this rate; 0 recomputes them. batch_timeout: seconds that a
    static batch waits to become full.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    host_bytes_per_s: float = 0.0
    batch_timeout: float = 0.0


class Scheduling(NamedTuple):
    """How an engine fills its passes.

    decodes_wait: passes of prompts hold no decodes, and come first (SGLang). whole: a prompt is processed in one pass, with as
    many others as its tokens allow (TensorRT-LLM); else in pieces (vLLM). reserve: of an answer, the share whose cache must be
    free when a request is admitted: 1 never preempts. wait_passes: decode passes that prompts wait for company, until theirs
    are the share wait_share of a pass. receive_interval: decode passes from one look at what has come to the next, where no pass
    of prompts is between (SGLang's scheduler-recv-interval).
    """

    decodes_wait: bool = False
    whole: bool = False
    reserve: float = 0.0
    wait_passes: int = 0
    wait_share: float = 0.0
    receive_interval: int = 1


MIXED = Scheduling()


class Live:
    """A request in the system: `target` tokens to cache before it decodes, of which `cached` are.

    began, ends: the steps at which it began to decode, with `target` tokens cached, and will be done. promised: bytes reserved
    for it. handed, swapped: its cache was computed elsewhere, or lies in the host's memory.
    """

    __slots__ = ("began", "cached", "decodes", "ends", "generated", "handed", "index", "order", "promised", "swapped", "target")

    def __init__(self, index: int, target: int, cached: int = 0) -> None:
        self.index, self.target, self.cached = index, target, cached
        self.generated = self.order = self.began = self.ends = self.promised = 0
        self.swapped = self.decodes = self.handed = False


def lasting(line: Line, passes: int) -> float:
    """Seconds of so many passes."""
    if line.each:
        return sum(line.each[:passes])
    return passes * line.first + line.rise * passes * (passes - 1) / 2


def passes_until(line: Line, most: int, seconds: float) -> int:
    """Of at most so many passes those that have begun after `seconds`: the least whose end is not before."""
    if line.each:
        ends = accumulate(line.each[:most])
        return next((many for many, end in enumerate(ends, 1) if end >= seconds), most)
    guess = int(seconds / line.first) + 1
    found = min(max(guess, 1), most)
    while found > 1 and lasting(line, found - 1) >= seconds:
        found -= 1
    while found < most and lasting(line, found) < seconds:
        found += 1
    return found
