"""What tells series apart on a picture: colours, dashes, markers, hatching; no two of them look the same, in grey neither."""

import re
from typing import Any

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F", "#B8A000")
GREY = PALETTE.index("#7F7F7F")
MARKERS, HATCHES = ("o", "s", "^", "D", "v", "P", "X", "*"), ("", "//", "..", "xx", "\\\\", "++")
DASHES: tuple[Any, ...] = (
    "-", "--", "-.", ":", (0, (9, 2)), (0, (5, 1.5, 1, 1.5, 1, 1.5)), (0, (6, 1.5, 3, 1.5)), (0, (1, 2.5)),
)  # fmt: skip
DOTTED = (0, (1, 1))  # of levels across
NAME = 28  # characters of a line of a label or of a bar's name


def colour(at: int) -> str:
    return PALETTE[at % len(PALETTE)]


def dashes(at: int) -> Any:
    """Of the eight colours each has its own; where they come round again, the dashes are others: 64 lines differ."""
    return DASHES[(at + at // len(PALETTE)) % len(DASHES)]


def marker(at: int) -> str:
    """Likewise."""
    return MARKERS[(at + at // len(PALETTE)) % len(MARKERS)]


def wrapped(text: str, width: int, most: int, even: bool = False) -> str:
    """A text in lines of so many characters, at most so many of them; `even`: about as long as each other.

    Lines end at spaces, but not behind a number, and after one of /_- within words longer than half a line; within a piece
    between such places only where it is longer than a line.
    """
    lines = _lines(text, width)
    while even and len(lines) > 1 and len(_lines(text, width - 1)) == len(lines) and _longest(text, width - 1) < width:
        width -= 1
        lines = _lines(text, width)
    return "\n".join(lines if len(lines) <= most else [*lines[: most - 1], lines[most - 1] + " …"])


def _pieces(text: str, width: int) -> list[str]:
    """The parts of a text between the places where lines of so many characters may end."""
    words = re.findall(r"(?:\(?\d[\d.,]*\s(?:×\s)?)?\S+\s*|\s+", text)
    parts = r"[^/_-]*[/_-]+|[^/_-]+"
    return [p for w in words for p in (re.findall(parts, w) if len(w) > width / 2 and " " not in w.strip() else [w])]


def _longest(text: str, width: int) -> int:
    return max(len(piece.rstrip()) for piece in _pieces(text, width))


def _lines(text: str, width: int) -> list[str]:
    lines = [""]
    for piece in _pieces(text, width):
        if len(lines[-1]) + len(piece.rstrip()) > width and lines[-1].strip():
            lines.append("")
        for part in range(0, len(piece), width):
            lines += [""] * (part > 0)
            lines[-1] += piece[part : part + width]
    return [line.strip() for line in lines]
