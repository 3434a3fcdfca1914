"""The blocks of a grid, made by several processes: those of one, in the same order, so that every answer is the same.

Each process takes a part of the grid at a time; parts come back in order, a few ahead of what is being ranked and written.
"""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import NamedTuple

from kvcalc.errors import UserError
from kvcalc.planning.block import Block
from kvcalc.planning.grid import Grid, Part, Rows
from kvcalc.planning.need import Need
from kvcalc.planning.space import Space

AHEAD = 3  # parts for each process that are under way or wait to be taken
LEAST = 8  # parts for each process: GPUs are in one part, as they share layouts and operators, unless that makes fewer

Made = tuple[list[tuple[list[Block], str]], dict[str, None]]  # stretches with their rows, and remarks


def made_by(grid: Grid, jobs: int, rows: Rows | None = None) -> Iterator[tuple[list[Block], str]]:
    """Every stretch of blocks with what `rows` makes of it; the grid then has its remarks. Raises UserError as the grid does."""
    for found, remarks in _parts_made(grid, jobs, rows):
        grid.remarks |= remarks
        yield from found
    grid.note_links()


def _parts_made(grid: Grid, jobs: int, rows: Rows | None) -> Iterator[Made]:
    """What each part comes to, in order. No process outlives this, whatever ends it."""
    fresh = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(jobs, fresh, _begin, (grid.needs, grid.space, rows))
    waiting: deque[Future[Made]] = deque()
    try:
        for part in grid.parts(LEAST * jobs):
            with undisturbed():
                waiting.append(pool.submit(_make, part))
            if len(waiting) > AHEAD * jobs:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise UserError(f"one of {jobs} processes was killed", hint="Fewer --jobs take less memory") from None
    except BaseException:  # Ctrl-C, or nobody asks for more
        for worker in multiprocessing.active_children():
            worker.kill()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Ctrl-C waits while processes start, which never see it: it is this one's, whichever of its threads gets it."""
    ours = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(ours) or not hasattr(signal, "pthread_sigmask"):
        yield
        return
    typed: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: typed.append(number))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        signal.signal(signal.SIGINT, ours)
        if typed:
            ours(signal.SIGINT, None)


class _Mine(NamedTuple):
    """What a worker has: the grid anew, and what makes rows."""

    grid: Grid
    rows: Rows | None


_mine: list[_Mine] = []


def _begin(needs: Sequence[Need], space: Space, rows: Rows | None) -> None:
    """A worker's start: Ctrl-C is its parent's, without which it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # where it cannot wait
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _mine[:] = [_Mine(Grid(needs, space), rows)]


def _end_with_parent() -> None:
    if parent := multiprocessing.parent_process():
        parent.join()
    os._exit(1)


def _make(part: Part) -> Made:
    """A part's blocks and remarks."""
    ((grid, rows),) = _mine
    return [(stretch, grid.rows_of(stretch, rows)) for stretch in grid.stretches_of(part)], dict(grid.remarks)
