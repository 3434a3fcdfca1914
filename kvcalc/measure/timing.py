"""Times of a step: warmed up, repeated, as a median with its spread; events and graph replay on a GPU.

On a CPU with several threads the clock is the wall's. With one thread it is that thread's own CPU time, which does not run
while other work has the core: `clock` of a machine says which.

A step is a callable that runs `copies` equal calls on inputs of their own, so that none finds its data in the last-level
cache because the call before left it there; its time is divided by them.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from kvcalc.measure.device import Machine

LEAST, FEWEST, MOST = 5, 3, 100  # repeats: usually at least, where they are slow, at most


class Timing(NamedTuple):
    """Seconds of one call: median, and the 10th and 90th percentile of so many repeats. graph: replayed from a CUDA graph."""

    median: float
    low: float
    high: float
    repeats: int
    graph: bool = False

    @property
    def spread(self) -> float:
        """(90th − 10th percentile) / median."""
        return (self.high - self.low) / self.median


def timed(step: Callable[[], object], machine: Machine, copies: int = 1, seconds: float = 1.0, graphs: bool = True) -> Timing:
    """Times `step` for about `seconds`: five repeats at least, three where they take longer than three times that."""
    if machine.cuda:
        return _on_gpu(step, machine, copies, seconds, graphs)
    step()
    found: list[float] = []
    begun = time.perf_counter()
    while not _enough(len(found), time.perf_counter() - begun, seconds):
        start = machine.now()
        step()
        found.append((machine.now() - start) / copies)
    return summary(found)


def once(step: Callable[[], object], machine: Machine) -> float:
    """Seconds of one call as it comes, the wait for a GPU included."""
    machine.synchronize()
    begun = machine.now()
    step()
    machine.synchronize()
    return machine.now() - begun


def _enough(repeats: int, taken: float, seconds: float) -> bool:
    least = LEAST if taken < 3 * seconds else FEWEST
    return repeats >= MOST or (repeats >= least and taken >= seconds)


def summary(times: list[float], graph: bool = False) -> Timing:
    """The median and the 10th and 90th percentile of some times."""
    ordered = sorted(times)
    last = len(ordered) - 1
    middle = (ordered[last // 2] + ordered[(last + 1) // 2]) / 2
    return Timing(middle, ordered[round(last * 0.1)], ordered[round(last * 0.9)], len(ordered), graph)


def _on_gpu(step: Callable[[], object], machine: Machine, copies: int, seconds: float, graphs: bool) -> Timing:
    """Events around each repeat; a CUDA graph of the step where it can be captured, so that the host is out of the way."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    machine.synchronize()
    replay, captured = step, False
    if graphs:
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
            replay, captured = graph.replay, True
        except RuntimeError:
            machine.synchronize()
    replay()
    machine.synchronize()
    found: list[float] = []
    begun = time.perf_counter()
    while not _enough(len(found), time.perf_counter() - begun, seconds):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        replay()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) / 1000 / copies)
    return summary(found, captured)
