"""Pictures of charts, drawn with matplotlib: the layout of the page, and files of each kind.

The same chart gives the same bytes for one matplotlib version. Text stays text in SVG and is never
parsed as mathematics.
"""

import io
import logging
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from kvcalc.errors import UserError, printable
from kvcalc.library.files import destination, write_text
from kvcalc.report.charts.axes import Panel, axis_values, marker_area, row_names
from kvcalc.report.charts.chart import Chart, drawable, in_multiples
from kvcalc.report.charts.labels import (
    NAME_LETTERS,
    anchor,
    place_labels,
    spread,
    text_box,
    wrapped,
)
from kvcalc.report.charts.series_styles import STYLES, Style

SUFFIXES = (".png", ".svg", ".pdf")
MAX_WIDTH = 13.33  # inches of a page
MIN_FONT = 8.0  # points, unless the page is of a fixed size
MIN_SHARE = 0.59  # smallest font of a page of a fixed size, as a share of its usual font


def save(chart: Chart, target: str, style: str = "light") -> None:
    """Write a chart to a .png, .svg or .pdf file, or print it in characters if target is `-`.

    Raises:
        UserError: Unknown suffix or style, or a place that cannot be written.
    """
    _find_style(style)
    if target == "-":
        from kvcalc.report.charts.terminal import print_sketch

        print_sketch(drawable(chart))
        return
    suffix = Path(target).suffix.lower()
    if suffix not in SUFFIXES:
        raise UserError(
            f"picture {target!r} should end in one of {', '.join(SUFFIXES)}, or be - for the "
            "terminal"
        )
    destination(target)
    write_text(target, render(chart, suffix[1:], style))
    print(f"wrote {printable(target)}", file=sys.stderr)


def _find_style(name: str) -> Style:
    if name not in STYLES:
        raise UserError(f"unknown style {name!r}", hint=f"Known: {', '.join(STYLES)}")
    return STYLES[name]


def render(chart: Chart, suffix: str, style: str = "light") -> bytes:
    """Return a picture as bytes; `suffix` is png, svg or pdf."""
    return rendered([chart], suffix, STYLES[style])[0]


def rendered(charts: Sequence[Chart], suffix: str, style: Style) -> list[bytes]:
    """Return a picture of each chart as bytes; `suffix` is png, svg or pdf."""
    with _settings(style):
        return [_file_bytes(figure(chart, style), suffix) for chart in charts]


def _file_bytes(page: Any, suffix: str) -> bytes:
    out = io.BytesIO()
    date = {"svg": "Date", "pdf": "CreationDate", "png": "Software"}[suffix]
    page.savefig(out, format=suffix, metadata={date: None})
    return out.getvalue()


def in_style(svg: str, style: str) -> str:
    """Return an SVG picture of the style `light` in the colours of another style."""
    light, other = STYLES["light"], STYLES[style]
    for name in ("ink", "paper", "blue"):
        svg = svg.replace(getattr(light, name).lower(), getattr(other, name))
    return svg


def figure_of(chart: Chart, style: str = "light") -> Any:
    """Return a matplotlib figure, which notebooks show by `_repr_png_`.

    Raises:
        UserError: Unknown style.
    """
    look = _find_style(style)

    def notebook_png() -> bytes:
        with _settings(look):
            return _file_bytes(page, "png")

    with _settings(look):
        page = figure(chart, look)
    page._repr_png_ = notebook_png
    return page


@contextmanager
def _settings(style: Style) -> Iterator[None]:
    """Set matplotlib up for a style, independent of the user's settings."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # no remarks on stderr
    import matplotlib as mpl

    settings: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": "kvcalc",
        "text.parse_math": False,
        "font.family": "DejaVu Sans",
        "font.size": style.font,
    }
    inks = "text.color axes.labelcolor axes.edgecolor xtick.color ytick.color"
    papers = "axes.facecolor figure.facecolor savefig.facecolor"
    settings |= dict.fromkeys(inks.split(), style.ink)
    settings |= dict.fromkeys(papers.split(), style.paper)
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(settings)
        yield


def figure(chart: Chart, style: Style) -> Any:
    """Return the matplotlib figure of a picture, with every label in place."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    charts = in_multiples(drawable(chart).chain())
    count = len(charts)
    is_shared = count > 2 and len({*map(_axes_key, charts)}) == 1
    columns = min(count, 2 if count == 4 else 3)
    if is_shared and (count > 9 or count in (4, 8)):
        columns = 4
    rows = -(-count // columns)
    width = min(style.size[0] * columns, MAX_WIDTH)
    style, height = _fit_style(charts, style, width / columns, rows, is_shared)
    engine = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.08)
    page = Figure(figsize=(width, rows * height), dpi=style.dpi, layout=engine)
    FigureCanvasAgg(page)
    panels: list[Panel] = []
    for number, chart_part in enumerate(charts):
        first = panels[0].axes if panels and is_shared else None
        axes = page.add_subplot(rows, columns, number + 1, sharex=first, sharey=first)
        panels.append(Panel(axes, chart_part, style, width / columns, height))
        if is_shared and number % columns:
            axes.set_ylabel("")
            axes.tick_params(labelleft=False)
        if is_shared and number + columns < count:
            axes.set_xlabel("")
            axes.tick_params(labelbottom=False)
    _add_legend(page, charts, style)
    _settle(page, panels, columns, is_shared)
    page.set_layout_engine("none")
    return page


def _axes_key(chart: Chart) -> tuple[object, ...]:
    """Return a key that is equal for charts that can share ticks."""
    if chart.is_heat:
        return (*chart.categories, *(s.label for s in chart.series))
    if chart.categories:
        return (id(chart),)
    values = [axis_values(chart, name) for name in "xy"]
    return chart.x.title, chart.y.title, *map(min, values), *map(max, values)


def _fit_style(
    charts: Sequence[Chart], style: Style, width: float, rows: int, is_shared: bool
) -> tuple[Style, float]:
    """Return the style with its font and characters per label, and the inches of a row.

    Args:
        charts: Charts of the picture.
        style: Style of the picture.
        width: Width of a chart in inches.
        rows: Number of rows.
        is_shared: Whether all charts have equal axes.
    """
    smallest = MIN_SHARE * style.font if style.is_page else MIN_FONT
    ems = 22 if is_shared else 38  # widths of a letter m in a chart
    font = min(style.font * (0.8 if rows > 1 else 1.0), max(width * 72 / ems, smallest))
    num_lines = 0
    for chart in charts:
        letters = min(NAME_LETTERS, int(0.4 * width * 72 / (0.5 * font)))
        names = [line for name in row_names(chart) for line in name.split("\n")]
        texts = [s for s in chart.series if s.kind not in ("bar", "cells")]
        labels = [text for s in texts for text in (s.label, *s.labels) if text]
        ends = [line for text in labels for line in wrapped(text, letters).split("\n")]
        num_lines = max(num_lines, len(names), len(ends))
        sides = max(map(len, names), default=10) + 0.85 * max(map(len, ends), default=6)
        font = min(font, max(smallest, (width - 1.2) * 72 / (0.6 * sides)))
    height = style.size[1] / rows
    if rows > 1:
        height = max(height, 3.1 if is_shared else 3.75)
    share = min(1.0, max(0.65, 7.0 / (0.85 * font)))  # texts may be so much smaller
    height = max(height, 0.36 * height + num_lines * share * font * 1.3 / 72)
    if style.is_page:
        height = max(style.size[1] / rows, 0.6 * height) if rows > 1 else style.size[1]
    letters = min(NAME_LETTERS, int(0.4 * width * 72 / (0.5 * font)))
    return style._replace(font=font, letters=letters), height


def _add_legend(page: Any, charts: Sequence[Chart], style: Style) -> None:
    """Add the legend of points, marker areas and parts of bars below the axes."""
    from matplotlib.lines import Line2D

    handles: dict[str, Any] = {}
    for axes in page.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(wrapped(label, 42, 3), handle)
    areas = next((chart.areas for chart in charts if chart.areas), "")
    for share, text in ((0.1, f"10% {areas}"), (0.5, "50%")) if areas else ():
        size = math.sqrt(marker_area(share, style))
        point = Line2D([], [], linestyle="", marker="o", markersize=size, color=style.ink)
        point.set(alpha=0.4, markeredgewidth=0)
        handles[text] = point
    if not handles:
        return
    longest = max(len(line) for label in handles for line in label.split("\n"))
    columns = max(1, int(page.get_size_inches()[0] * 130 / style.font / (longest + 6)))
    legend = page.legend(
        list(handles.values()),
        list(handles),
        loc="outside lower center",
        ncols=-(-len(handles) // -(-len(handles) // columns)),
        frameon=False,
        fontsize=style.font * 0.85,
    )
    for handle in legend.legend_handles:
        if hasattr(handle, "set_sizes"):
            handle.set_sizes([style.font * 4])


class _Head:
    """A title, and the assumptions below it.

    Attributes:
        title: Text of the title.
        about: Text of the assumptions, which follows the title.
    """

    def __init__(self, title: Any, texts: tuple[str, str], font: float, pixels: float) -> None:
        """Write both texts in lines of at most that many pixels."""
        from matplotlib.text import Annotation

        self.title = title
        self.about = Annotation(
            "",
            (0, 0),
            xycoords=title,
            xytext=(0, -0.25 * font),
            textcoords="offset points",
            fontsize=font * 0.75,
            va="top",
        )
        title.figure.add_artist(self.about)
        self.about.set_in_layout(False)
        title.set(fontsize=font, fontweight="bold")
        renderer = title.figure.canvas.get_renderer()
        for artist, text, max_lines in ((title, texts[0], 3), (self.about, texts[1], 5)):
            letters = len(text) or 1
            artist.set_text(text)
            while (width := text_box(artist, renderer).width) > pixels and letters > 12:
                letters = min(letters - 1, int(letters * pixels / width))
                artist.set_text(wrapped(text, letters, max_lines))

    @property
    def num_lines(self) -> int:
        """Number of lines of the assumptions."""
        text = self.about.get_text()
        return text.count("\n") + 1 if text else 0


def _settle(page: Any, panels: Sequence[Panel], columns: int, is_shared: bool) -> None:
    """Lay the page out and move every text to its place."""
    style = panels[0].style
    renderer = page.canvas.get_renderer()
    lay_out = partial(page.get_layout_engine().execute, page)
    if panels[0].chart.over[0]:
        title = page.suptitle("", x=0.12 / page.get_size_inches()[0], ha="left")
        pixels = page.bbox.width - 2 * style.font
        head = _Head(title, panels[0].chart.over, style.font * 1.3, pixels)
        title.set_text(title.get_text() + "\n" * head.num_lines)
        head.about.set(va="bottom", position=(0, 0))
    lay_out()
    lefts = [_left_of(panel, renderer) for panel in panels]
    heads = []
    for number, panel in enumerate(panels):
        is_last = number % columns == columns - 1 or panel is panels[-1]
        right = page.bbox.width if is_last else lefts[number + 1]
        title = panel.axes.set_title("", loc="left", y=1.0)
        texts = (panel.chart.title, panel.chart.subtitle)
        pixels = right - lefts[number] - style.font
        heads.append(_Head(title, texts, style.font * 1.2, pixels))
    for first in range(0, len(heads), columns):
        row = range(first, min(first + columns, len(heads)))
        num_lines = max(heads[number].num_lines for number in row)
        for number in row:
            panels[number].axes.set_title(
                heads[number].title.get_text(),
                loc="left",
                fontsize=style.font * 1.2,
                fontweight="bold",
                pad=style.font * (0.9 + 1.1 * num_lines),
            )
    for _ in range(6):  # texts that move change the layout
        lay_out()
        has_changed = False
        for panel in panels:
            _place_end_labels(panel, renderer)
            for text in place_labels(panel.axes, panel.points, panel.ends, renderer):
                if not is_shared:
                    panel.move_out(text)
                    has_changed = True
        if not has_changed:
            break
    for panel, head in zip(panels, heads, strict=True):
        if panel.chart.categories:
            panel.fit_rows(renderer)
        panel.fit_ticks(renderer)
        frame = panel.axes.get_window_extent(renderer)
        head.title.set_x((_left_of(panel, renderer) - frame.x0) / frame.width)


def _left_of(panel: Panel, renderer: Any) -> float:
    """Return the left end of a panel's axes with their texts, in pixels."""
    frame = panel.axes.get_window_extent(renderer)
    names = panel.axes.yaxis.get_tightbbox(renderer)
    return float(min(frame.x0, names.x0) if names else frame.x0)


def _place_end_labels(panel: Panel, renderer: Any) -> None:
    """Move the labels right of axes to the ends of their lines, so small that all fit."""
    frame = panel.axes.get_window_extent(renderer)
    heights = [1.1 * text_box(label, renderer).height for label in panel.ends]
    share = min(1.0, frame.height / (sum(heights) or 1.0))
    ends = [anchor(label)[1] for label in panel.ends]
    centres = spread(ends, [share * height for height in heights], frame.y0, frame.y1)
    for label, centre in zip(panel.ends, centres, strict=True):
        label.set_fontsize(share * label.get_fontsize())
        label.set_position((1, (centre - frame.y0) / frame.height))
