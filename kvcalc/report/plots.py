"""Charts drawn with matplotlib, for slides and papers. The same chart gives the same bytes for one matplotlib version.

Text stays text in SVG and is never parsed as mathematics. Colours are Okabe and Ito's, told apart by the colour-blind;
line styles and markers tell them apart in grey.
"""

import io
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from kvcalc.errors import UserError, printable
from kvcalc.library.writing import destination, write_text
from kvcalc.report.chart import Chart, drawable, legible
from kvcalc.report.looks import PALETTE

SUFFIXES = (".png", ".svg", ".pdf")
# size: inches of one chart; whole: a page of that size, no higher whatever stands on it.
STYLES: dict[str, dict[str, Any]] = {
    "light": {"size": (8.0, 4.8), "font": 10, "ink": "#1a1a1a", "paper": "white", "blue": PALETTE[0], "dpi": 160, "whole": False},
    "dark": {"size": (8.0, 4.8), "font": 10, "ink": "#e8e8e8", "paper": "#15181d", "blue": "#2b8cd6", "dpi": 160, "whole": False},
    "slides": {
        "size": (13.33, 7.5),
        "font": 18,
        "ink": "#1a1a1a",
        "paper": "white",
        "blue": PALETTE[0],
        "dpi": 120,
        "whole": True,
    },
}


def save(chart: Chart, target: str, style: str = "light") -> None:
    """Write `chart` to a .png, .svg or .pdf file, whole or not at all, or sketch it in the terminal (`-`).

    Raises UserError on another suffix, an unknown style or a place that cannot be written.
    """
    _look(style)
    if target == "-":
        from kvcalc.report.terminal import sketch

        print(sketch(legible(drawable(chart))))
        return
    suffix = Path(target).suffix.lower()
    if suffix not in SUFFIXES:
        raise UserError(f"picture {target!r} should end in one of {', '.join(SUFFIXES)}, or be - for the terminal")
    destination(target)
    write_text(target, render(chart, suffix[1:], style))
    print(f"wrote {printable(target)}", file=sys.stderr)


def _look(style: str) -> dict[str, Any]:
    if style not in STYLES:
        raise UserError(f"unknown style {style!r}", hint=f"Known: {', '.join(STYLES)}")
    return STYLES[style]


# The module and the class that draw each suffix, and what would tell one run's bytes from another's.
_CANVASES = {
    "svg": ("svg", "FigureCanvasSVG", "Date"),
    "pdf": ("pdf", "FigureCanvasPdf", "CreationDate"),
    "png": ("agg", "FigureCanvasAgg", "Software"),
}


def render(chart: Chart, suffix: str, style: str = "light", size: tuple[float, float] | None = None) -> bytes:
    """The picture as bytes: `suffix` is png, svg or pdf. size: inches of one chart, instead of the style's."""
    return rendered([chart], suffix, style, size)[0]


def rendered(charts: Sequence[Chart], suffix: str, style: str = "light", size: tuple[float, float] | None = None) -> list[bytes]:
    """A picture of each, as `render` makes it; the settings are made once."""
    look = STYLES[style] | ({"size": size} if size else {})
    with _settings(look):
        return [_drawn(chart, suffix, look) for chart in charts]


def _drawn(chart: Chart, suffix: str, look: dict[str, Any]) -> bytes:
    backend, kind, dated = _CANVASES[suffix]
    out = io.BytesIO()
    # Not by `savefig`, which would draw it once more before, to lay it out.
    canvas = getattr(import_module(f"matplotlib.backends.backend_{backend}"), kind)(figure(chart, look))
    getattr(canvas, f"print_{suffix}")(out, metadata={dated: None})
    return out.getvalue()


def in_style(svg: str, style: str) -> str:
    """A picture of the style `light`, as SVG, in the colours of another as large; all else is alike."""
    colours = {"ink": STYLES["light"]["ink"], "paper": "#ffffff", "blue": PALETTE[0].lower()}
    for name, colour in colours.items():
        svg = svg.replace(colour, STYLES[style][name])
    return svg


def figure_of(chart: Chart, style: str = "light") -> Any:
    """A matplotlib figure to show, to change or to save. Raises UserError on an unknown style.

    Notebooks draw it by `_repr_png_`, as they know figures of pyplot alone, which is not imported.
    """
    look = _look(style)
    with _settings(look):
        drawn = figure(chart, look)
    drawn._repr_png_ = partial(_png, drawn, look)
    return drawn


def _png(drawn: Any, look: dict[str, Any]) -> bytes:
    out = io.BytesIO()
    with _settings(look):
        drawn.savefig(out, format="png", metadata={"Software": None})
    return out.getvalue()


@contextmanager
def _settings(look: dict[str, Any]) -> Iterator[None]:
    """matplotlib's settings for a style, whatever the user's own are."""
    mpl = _matplotlib()
    settings: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": "kvcalc",
        "text.parse_math": False,
        "axes.formatter.use_mathtext": False,
        "font.family": "DejaVu Sans",
        "font.size": look["font"],
        "text.color": look["ink"],
        "axes.labelcolor": look["ink"],
        "axes.edgecolor": look["ink"],
        "xtick.color": look["ink"],
        "ytick.color": look["ink"],
        "axes.facecolor": look["paper"],
        "figure.facecolor": look["paper"],
        "savefig.facecolor": look["paper"],
    }
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(settings)
        yield


def _matplotlib() -> Any:
    """matplotlib without its remarks on stderr. Raises UserError where the user's matplotlibrc keeps it from starting."""
    import logging

    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    backend = os.environ.pop("MPLBACKEND", "")
    try:
        import matplotlib as mpl
    except (ValueError, OSError) as error:
        raise UserError(f"matplotlib cannot be imported: {error}") from None
    if backend:  # an unknown one keeps matplotlib from starting, and we need none
        os.environ["MPLBACKEND"] = backend
        with suppress(ValueError):
            mpl.rcParams["backend"] = backend
    return mpl


def figure(chart: Chart, look: dict[str, Any]) -> Any:
    """The matplotlib figure of a chart and of what stands beside it, laid out: every label at its place."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from kvcalc.report.drawing import panel, settled
    from kvcalc.report.grid import arranged, engine, panels, shared, write_above
    from kvcalc.report.legends import legend
    from kvcalc.report.looks import letters
    from kvcalc.report.multiples import in_multiples

    charts = in_multiples(drawable(chart).chain())
    grid = arranged(charts, look)
    drawn = Figure(figsize=(grid.width, sum(grid.heights)), dpi=look["dpi"], layout=engine(grid))
    FigureCanvasAgg(drawn)
    each = [(grid.width / count, grid.heights[row]) for row, _, count in grid.cells()]
    look = look | {"font": grid.font, "alike": grid.alike}
    looks = [look | {"letters": letters(width, grid.font)} for width, _ in each]
    charted = [panel(at, *one) for at, *one in zip(panels(drawn, grid), charts, looks, *zip(*each, strict=True), strict=True)]
    if grid.alike:
        shared([one.axes for one in charted], grid)
    write_above(drawn, charts[0], look, grid.width)
    legend(drawn, charts, look)
    settled(drawn, charted, look)
    return drawn
