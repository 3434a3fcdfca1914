"""Cells beside and below each other: upright, on their side, as a list, or in bands; none knows what the cells mean.

right: of each column, whether it stands to the right, as figures do; those are never cut. The first row is the heading.
"""

from collections.abc import Sequence

CUT = 16  # characters that are left of long words where there is little room

Cells = Sequence[Sequence[str]]


def short(text: str, limit: int) -> str:
    """A text cut to so many characters."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


def sizes_of(cells: Cells) -> list[int]:
    """Characters of each column."""
    return [max(map(len, column)) for column in zip(*cells, strict=True)]


def upright(right: Sequence[bool], cells: Cells) -> list[str]:
    """One line a row."""
    sides = [str.rjust if figures else str.ljust for figures in right]
    sizes = sizes_of(cells)
    return ["  ".join(side(cell, w) for side, cell, w in zip(sides, row, sizes, strict=True)).rstrip() for row in cells]


def turned(right: Sequence[bool], cells: Cells, width: int) -> list[str]:
    """One line a column and one column a row; nothing where the figures alone are too wide for that."""
    label, figures = max(map(len, cells[0])), [at for at, figure in enumerate(right) if figure]
    room = (width - label) // max(1, len(cells) - 1) - 2
    rows = [[short(c, max(room, CUT)) if at not in figures else c for at, c in enumerate(row)] for row in cells[1:]]
    sizes = [max(map(len, row)) for row in rows]
    if label + sum(2 + size for size in sizes) > width:
        return []
    lines = []
    for at, name in enumerate(cells[0]):
        shown = "".join("  " + row[at].rjust(size) for row, size in zip(rows, sizes, strict=True))
        lines.append((name.ljust(label) + shown).rstrip())
    return lines


def banded(right: Sequence[bool], cells: Cells, width: int, names: int) -> list[str]:
    """All columns, as many beside each other as there is room for, an empty line and then the next of them.

    names: columns that stand in each band; fewer where they would take more than half of the width, or a figure's room.
    """
    sizes = sizes_of(cells)
    most = min(width // 2, width - 2 - max((size for size, figures in zip(sizes, right, strict=True) if figures), default=0))
    while names > 1 and sum(sizes[:names]) + 2 * (names - 1) > most:
        names -= 1
    label = min(sizes[0], most) if names == 1 else sum(sizes[:names]) + 2 * (names - 1)
    room = width - label - 2
    limits = [label if at < names == 1 else size if right[at] else min(size, room) for at, size in enumerate(sizes)]
    cut = [[short(cell, limit) for cell, limit in zip(row, limits, strict=True)] for row in cells]
    lines: list[str] = []
    at = names
    while at < len(right):
        end = at + 1
        while end < len(right) and sum(limits[at : end + 1]) + 2 * (end - at) <= room:
            end += 1
        band = [*range(names), *range(at, end)]
        shown = upright([right[i] for i in band], [[row[i] for i in band] for row in cut])
        lines += ["", *shown] if lines else shown
        at = end
    return lines
