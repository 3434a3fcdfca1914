"""A plan from its question to its answers: every block of the grid goes by once, and what is asked for is kept of it."""

import re
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from typing import NamedTuple

import msgspec

from kvcalc.errors import UserError, few
from kvcalc.planning.best import Answer, Tally
from kvcalc.planning.block import Block
from kvcalc.planning.grid import Grid, Rows
from kvcalc.planning.need import Need
from kvcalc.planning.space import Space

MOST_JOBS = 256


class Plan(NamedTuple):
    """Answers by model and need (fastest). remarks: what was left out, and why."""

    space: Space
    answers: list[Answer]
    remarks: list[str]


def searched(
    needs: Sequence[Need],
    space: Space,
    prices: Mapping[str, float] | None = None,
    seen: Callable[[list[Block], str], None] | None = None,
    rows: Rows | None = None,
    jobs: int = 1,
) -> Plan:
    """Look through a space. prices: of an hour of a GPU, by its name. seen: told of every stretch of blocks and its rows.

    jobs: processes that do the work; the answers are those of one. Raises UserError where there is nothing to look through.
    """
    if not 1 <= jobs <= MOST_JOBS:
        raise UserError(f"jobs {jobs} is outside 1 to {MOST_JOBS}")
    known, remarks = prices or {}, []
    if known:
        priced = tuple(gpu for gpu in space.gpus if gpu.name in known)
        if not priced:
            raise UserError(f"prices of {', '.join(known)}, and none of these GPUs is looked at")
        if len(priced) < len(space.gpus):
            remarks.append(f"left out, as no price is given: {few([g.name for g in space.gpus if g not in priced])}")
        space = msgspec.structs.replace(space, gpus=priced)
    grid = Grid(needs, space)
    tallies = {(model.name, need): Tally(need, space.max_gpus, known) for model in space.models for need in needs}
    with closing(_made(grid, rows, jobs)) as made:
        for stretch, text in made:
            for block in stretch:
                tallies[block.deployment.model.name, block.need].take(block)
            if seen:
                seen(stretch, text)
    answers = [tally.answer() for tally in tallies.values()]
    if not any(answer.looked for answer in answers):
        refused = next(iter(grid.remarks), "")
        raise UserError(refused or f"nothing to look at with {space.max_gpus} GPUs", hint="" if refused else "Raise --max-gpus")
    return Plan(space, answers, [*remarks, *_folded(grid.remarks)])


def _folded(remarks: Iterable[str]) -> list[str]:
    """Remarks that differ in their numbers alone as the first of them, and how many more there are."""
    alike: dict[str, list[str]] = {}
    for text in remarks:
        alike.setdefault(re.sub(r"\d[\d,.]*", "0", text), []).append(text)
    return [first + (f" (and {len(more)} more like this)" if more else "") for first, *more in alike.values()]


def _made(grid: Grid, rows: Rows | None, jobs: int) -> Generator[tuple[list[Block], str]]:
    """Every stretch of blocks with what `rows` makes of it."""
    if jobs > 1:
        from kvcalc.planning.workers import made_by  # what starts processes takes as long to import as a small plan

        yield from made_by(grid, jobs, rows)
    else:
        yield from ((stretch, grid.rows_of(stretch, rows)) for stretch in grid.stretches())
