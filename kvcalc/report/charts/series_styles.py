"""Colours, dashes and markers that distinguish series, and the styles of complete pictures."""

from typing import Any, NamedTuple

# Okabe and Ito's colours, which colour-blind readers can distinguish
_COLOURS = "#0072B2 #D55E00 #009E73 #CC79A7 #E69F00 #56B4E9 #7F7F7F #B8A000"
PALETTE = _COLOURS.split()
GREY = PALETTE.index("#7F7F7F")
MARKERS = "os^DvPX<"
HATCHES = ("", "//", "..", "xx", "\\\\", "++")
DASHES = (
    "-",
    "--",
    "-.",
    (0, (9, 2)),
    (0, (5, 1.5, 1, 1.5, 1, 1.5)),
    (0, (6, 1.5, 3, 1.5)),
    (0, (1, 2.5)),
    ":",
)
DOTTED = (0, (1, 1))  # dashes of limits


class Style(NamedTuple):
    """Size, font and colours of a picture.

    Attributes:
        size: Width and height in inches: of one chart, or of the page if `is_page`.
        font: Font size in points.
        ink: Colour of text, axes and limits.
        paper: Colour of the background.
        blue: First colour of the palette.
        dpi: Pixels per inch.
        is_page: Whether the picture is one page of the given size, such as a slide.
        letters: Characters per line of a label. The layout of the page sets it.
    """

    size: tuple[float, float]
    font: float
    ink: str
    paper: str
    blue: str
    dpi: int
    is_page: bool = False
    letters: int = 28


LIGHT = Style((8.0, 4.8), 10, "#1a1a1a", "#ffffff", PALETTE[0], 160)
STYLES = {
    "light": LIGHT,
    "dark": LIGHT._replace(ink="#e8e8e8", paper="#15181d", blue="#2b8cd6"),
    "slides": LIGHT._replace(size=(13.33, 7.5), font=18, dpi=120, is_page=True),
}


def colour(number: int, style: Style) -> str:
    """Return the hexadecimal colour of the series with index `number`.

    Index 0 has the style's own blue. Colours repeat after 8 series.

    Args:
        number: Index of the series in the chart, from 0 on.
        style: Style of the picture.
    """
    place = number % len(PALETTE)
    return PALETTE[place] if place else style.blue


def dashes(number: int) -> Any:
    """Return matplotlib's dash pattern for the line of the series with index `number`.

    The 9th line has the first line's colour again, but other dashes. So 64 lines can be
    distinguished.

    Args:
        number: Index of the series in the chart, from 0 on.
    """
    return DASHES[(number + number // len(PALETTE)) % len(DASHES)]


def marker(number: int) -> str:
    """Return matplotlib's marker symbol for the points of the series with index `number`.

    The 9th series has the first colour again, but another symbol, so that the two can be told
    apart.

    Args:
        number: Index of the series in the chart, from 0 on.
    """
    return MARKERS[(number + number // len(PALETTE)) % len(MARKERS)]
