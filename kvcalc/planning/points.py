"""Every point of a plan in a file, as it is made: CSV, or JSON lines. Nothing but the blocks at hand is held.

Rows gather in a neighbour of the file, which takes its place at the end, and when Ctrl-C ends the search too: the file then
holds all blocks that were done, whole; before the first of them the file stays as it was.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self

from kvcalc.errors import UserError
from kvcalc.library.growing import Growing
from kvcalc.planning.block import Block
from kvcalc.planning.records import block_records

SUFFIXES = (".csv", ".jsonl")


class Points:
    """A file of points; '' only counts them, `-` is standard output as JSON lines. Raises UserError on another suffix."""

    def __init__(self, path: str, prices: Mapping[str, float]) -> None:
        if path and path != "-" and not path.lower().endswith(SUFFIXES):
            raise UserError(f"points {path!r} should end in {' or '.join(SUFFIXES)}")
        self.path, self.prices, self.count = path, dict(prices), 0
        self._file = Growing(path) if path else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._file:
            self._file.close(keep=kind is None or (kind is KeyboardInterrupt and self.count > 0))

    @property
    def rows(self) -> Callable[[Block], str] | None:
        """What makes the rows of a block, here or in another process; None where none are written."""
        return partial(_csv if self._commas else _json, prices=self.prices) if self._file else None

    @property
    def _commas(self) -> bool:
        return self.path.lower().endswith(".csv")

    def take(self, blocks: Sequence[Block], rows: str) -> None:
        """Count the points of some blocks, and write what `rows` made of them."""
        if self._file:
            head = next(block_records(blocks[0], self.prices)) if self._commas and blocks and not self.count else ()
            self._file.write((",".join(head) + "\n" if head else "") + rows)
        self.count += sum(len(block.counts) for block in blocks)


def _json(block: Block, prices: Mapping[str, float]) -> str:
    rows = block_records(block, prices)
    return "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows)


def _csv(block: Block, prices: Mapping[str, float]) -> str:
    return "".join(",".join(map(_cell, row.values())) + "\n" for row in block_records(block, prices))


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return '"' + value.replace('"', '""') + '"' if set(value) & set(',"\n') else value
    return repr(value)
