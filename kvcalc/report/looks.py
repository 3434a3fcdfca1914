"""What tells series apart on a picture: colours, dashes, markers, hatching; no two of them look the same, in grey neither."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F", "#B8A000")
GREY = PALETTE.index("#7F7F7F")
MARKERS, HATCHES = ("o", "s", "^", "D", "v", "P", "X", "<"), ("", "//", "..", "xx", "\\\\", "++")
DASHES: tuple[Any, ...] = (
    "-", "--", "-.", ":", (0, (9, 2)), (0, (5, 1.5, 1, 1.5, 1, 1.5)), (0, (6, 1.5, 3, 1.5)), (0, (1, 2.5)),
)  # fmt: skip
DOTTED = (0, (1, 1))  # of levels across
NAME = 28  # characters of a line of a label or of a bar's name
THIRD = 0.4  # of the width of axes and what stands beside them, for the names of lines
SHORT = 5  # characters that part of a word has at least, which stands on a line of its own


def colour(at: int, look: Mapping[str, Any]) -> str:
    """The colour of that number, in a style whose blue may be another."""
    place = at % len(PALETTE)
    return PALETTE[place] if place else str(look["blue"])


def loud(at: int) -> int:
    """The look of that number among those that are not grey, as what is not named and what stands behind is."""
    rounds, place = divmod(at, len(PALETTE) - 1)
    return rounds * len(PALETTE) + place + (place >= GREY)


def dashes(at: int) -> Any:
    """Of the eight colours each has its own; where they come round again, the dashes are others: 64 lines differ."""
    return DASHES[(at + at // len(PALETTE)) % len(DASHES)]


def marker(at: int) -> str:
    """Likewise."""
    return MARKERS[(at + at // len(PALETTE)) % len(MARKERS)]


def telling(parts: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Of each thing's words, in order of their weight, those that tell it from the others where the ones before do not."""
    told: list[int] = []
    for at in range(len(parts[0])):
        if len({tuple(p[n] for n in (*told, at)) for p in parts}) > len({tuple(p[n] for n in told) for p in parts}):
            told.append(at)
    return [tuple(p[n] for n in told) for p in parts]


def letters(width: float, font: float) -> int:
    """Characters of a line of a label beside axes in so many inches: of a third of them at most."""
    return min(NAME, int(THIRD * width * 72 / (0.5 * font)))


def wrapped(text: str, width: int, most: int, even: bool = False, whole: bool = False) -> str:
    """A text in lines of so many characters, at most so many of them; `even`: about as long as each other.

    Lines end at spaces, but not behind a number, a count (2×) or a sign (≥), and after one of /_- within words longer than half
    a line (`whole`: than a line); within a piece between such places only where it is longer than a line.
    """
    pieces = _pieces(text, width if whole else width / 2)
    lines, longest = _lines(pieces, width), max((len(piece.rstrip()) for piece in pieces), default=0)
    while even and len(lines) > 1 and longest < width and len(_lines(pieces, width - 1)) == len(lines):
        width -= 1
        lines = _lines(pieces, width)
    return "\n".join(lines if len(lines) <= most else [*lines[: most - 1], lines[most - 1] + " …"])


def unwrapped(text: str) -> str:
    """A text in lines of `wrapped` as it was, in one."""
    return re.sub(r"(?<=[/_-])\n", "", text).replace("\n", " ")


def _pieces(text: str, most: float) -> list[str]:
    """The parts of a text between the places where lines may end, within words of more characters than `most` too."""
    words = re.findall(r"(?:[≥≤~−]\s)?(?:\(?\d[\d.,]*(?:×\s|\s(?:×\s)?))?\S+\s*|\s+", text)
    return [p for w in words for p in (_parts(w) if len((w.split() or [w])[-1]) > most else [w])]


def _parts(word: str) -> list[str]:
    """The parts of a word, none at its ends too short for a line of its own."""
    parts = re.findall(r"[^/_-]*[/_-]+|[^/_-]+", word)
    while len(parts) > 1 and len(parts[0]) < SHORT:
        parts[:2] = ["".join(parts[:2])]
    while len(parts) > 1 and len(parts[-1].strip()) < SHORT:
        parts[-2:] = ["".join(parts[-2:])]
    return parts


def _lines(pieces: Sequence[str], width: int) -> list[str]:
    lines = [""]
    for piece in pieces:
        if len(lines[-1]) + len(piece.rstrip()) > width and lines[-1].strip():
            lines.append("")
        for part in range(0, len(piece), width):
            lines += [""] * (part > 0)
            lines[-1] += piece[part : part + width]
    return [line.strip() for line in lines]
