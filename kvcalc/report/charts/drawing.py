"""Pictures of charts, drawn with matplotlib: the layout of the page, and files of each kind.

The same chart gives the same bytes for one matplotlib version. Text stays text in SVG and is never
parsed as mathematics.
"""

import io
import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from kvcalc.errors import UserError, printable
from kvcalc.library.files import destination, write_text
from kvcalc.records import Record
from kvcalc.report.charts.axes import (
    Panel,
    axis_values,
    marker_area,
    row_names,
    share_ticks,
    thin_ticks,
)
from kvcalc.report.charts.chart import Chart, drawable, in_multiples, legible
from kvcalc.report.charts.labels import (
    NAME_LETTERS,
    NAME_LINES,
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


def save(chart: Chart, target: str, style: str = "light") -> None:
    """Write a chart to a .png, .svg or .pdf file, or print it in characters if target is `-`.

    Raises:
        UserError: Unknown suffix or style, or a place that cannot be written.
    """
    _find_style(style)
    if target == "-":
        from kvcalc.report.charts.terminal import sketch

        print(sketch(legible(drawable(chart))))
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
    """Return a picture of each chart as bytes. Set up matplotlib once."""
    with _settings(style):
        return [_file_bytes(figure(chart, style), suffix) for chart in charts]


def _file_bytes(drawn: Any, suffix: str) -> bytes:
    backend, dated = {
        "svg": ("svg.FigureCanvasSVG", "Date"),
        "pdf": ("pdf.FigureCanvasPdf", "CreationDate"),
        "png": ("agg.FigureCanvasAgg", "Software"),
    }[suffix]
    module, kind = backend.split(".")
    canvas = getattr(import_module(f"matplotlib.backends.backend_{module}"), kind)(drawn)
    out = io.BytesIO()
    getattr(canvas, f"print_{suffix}")(out, metadata={dated: None})  # savefig would draw twice
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
    with _settings(look):
        drawn = figure(chart, look)
    drawn._repr_png_ = partial(_notebook_png, drawn, look)
    return drawn


def _notebook_png(drawn: Any, style: Style) -> bytes:
    out = io.BytesIO()
    with _settings(style):
        drawn.savefig(out, format="png", metadata={"Software": None})
    return out.getvalue()


@contextmanager
def _settings(style: Style) -> Iterator[None]:
    """Set matplotlib up for a style, whatever the user's own settings are."""
    mpl = _matplotlib()
    settings: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": "kvcalc",
        "text.parse_math": False,
        "axes.formatter.use_mathtext": False,
        "font.family": "DejaVu Sans",
        "font.size": style.font,
    }
    inked = (
        "text.color",
        "axes.labelcolor",
        "axes.edgecolor",
        "xtick.color",
        "ytick.color",
    )
    papered = ("axes.facecolor", "figure.facecolor", "savefig.facecolor")
    settings |= dict.fromkeys(inked, style.ink) | dict.fromkeys(papered, style.paper)
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(settings)
        yield


def _matplotlib() -> Any:
    """Import matplotlib without its remarks on stderr.

    Raises:
        UserError: The user's matplotlibrc keeps it from starting.
    """
    import logging

    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    backend = os.environ.pop("MPLBACKEND", "")  # an unknown backend would fail the import
    try:
        import matplotlib as mpl
    except (ValueError, OSError) as error:
        raise UserError(f"matplotlib cannot be imported: {error}") from None
    if backend:
        os.environ["MPLBACKEND"] = backend
        with suppress(ValueError):
            mpl.rcParams["backend"] = backend
    return mpl


def figure(chart: Chart, style: Style) -> Any:
    """Return the matplotlib figure of a chart and all beside it, with every label in place."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    charts = in_multiples(drawable(chart).chain())
    is_shared = len(charts) > 2 and len({*map(_axes_key, charts)}) == 1
    columns = _num_columns(len(charts), is_shared)
    rows = -(-len(charts) // columns)
    width = min(style.size[0] * columns, MAX_WIDTH)
    style, height = _fit_style(charts, style, (width / columns, rows), is_shared)
    engine = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.08)
    drawn = Figure(figsize=(width, rows * height), dpi=style.dpi, layout=engine)
    FigureCanvasAgg(drawn)
    cells = drawn.add_gridspec(rows, columns)
    panels = []
    for number, one in enumerate(charts):
        axes = drawn.add_subplot(cells[number // columns, number % columns])
        panels.append(
            Panel(
                axes,
                one,
                style,
                width / columns,
                height,
            )
        )
        if is_shared and number % columns:
            axes.set_ylabel("")
            axes.tick_params(labelleft=False)
        if is_shared and number + columns < len(charts):
            axes.set_xlabel("")
            axes.tick_params(labelbottom=False)
    _write_common_title(drawn, charts[0].over, style, width)
    _add_legend(drawn, charts, style)
    _settle(drawn, panels, columns, is_shared)
    if is_shared and not charts[0].is_heat:
        share_ticks(panels)
    drawn.set_layout_engine("none")
    return drawn


def _axes_key(chart: Chart) -> tuple[object, ...]:
    """Return what two charts have in common if they can share ticks."""
    if chart.is_heat:
        return (chart.categories, *(s.label for s in chart.series))
    if chart.categories:
        return (id(chart),)
    ends = [(min(values), max(values)) for name in "xy" if (values := axis_values(chart, name))]
    return chart.x.title, chart.y.title, *ends


def _num_columns(count: int, is_shared: bool) -> int:
    if count < 3:
        return count
    if is_shared and (count > 9 or (count > 4 and count % 4 == 0)):
        return 4
    return 2 if count == 4 else 3


def _fit_style(
    charts: Sequence[Chart], style: Style, cell: tuple[float, int], is_shared: bool
) -> tuple[Style, float]:
    """Return the style with its font and letters per label, and the inches of a row.

    Args:
        cell: Inches of a chart's width, and the number of rows.
    """
    (width, rows), full = cell, style.font
    ems = 22 if is_shared else 38  # of a chart's width
    font = min(full * (0.8 if rows > 1 else 1.0), max(width * 72 / ems, 0.59 * full, MIN_FONT))
    sides = max(_side_letters(chart, _label_letters(width, font)) for chart in charts)
    smallest = 0.59 * full if style.is_page else MIN_FONT
    font = min(font, max(smallest, (width - 1.2) * 72 / (0.6 * sides)))
    style = style._replace(font=font, letters=_label_letters(width, font))
    height = style.size[1] / rows
    if rows > 1:
        height = max(height, 3.1 if is_shared else 3.75)
    for chart in charts:
        lines = max(
            _num_lines(row_names(chart)), _num_lines(_label_texts(chart, style.letters))
        )
        share = min(1.0, max(0.65, 7.0 / (0.85 * font)))  # names may be so much smaller
        height = max(height, 0.36 * height + lines * share * font * 1.3 / 72)
    if style.is_page:
        height = max(style.size[1] / rows, 0.6 * height) if rows > 1 else height
    return style, height


def _label_letters(width: float, font: float) -> int:
    """Return the characters of a label's line beside a chart: at most 0.4 of its width."""
    return min(NAME_LETTERS, int(0.4 * width * 72 / (0.5 * font)))


def _label_texts(chart: Chart, letters: int) -> list[str]:
    """Return the wrapped names of lines, points and limits."""
    texts = []
    for series in chart.series:
        if series.kind not in ("bar", "cells"):
            texts += [series.label, *series.labels]
    return [wrapped(text, letters, NAME_LINES, even=True) for text in texts if text]


def _num_lines(texts: Sequence[str]) -> int:
    return sum(text.count("\n") + 1 for text in texts)


def _side_letters(chart: Chart, letters: int) -> float:
    """Return the characters left and right of a chart's axes."""
    left = [line for name in row_names(chart) for line in name.split("\n")]
    lines = [s for s in chart.series if s.kind not in ("bar", "points", "cells")]
    ends = _label_texts(chart._replace(series=tuple(lines)), letters)
    right = [line for text in ends for line in text.split("\n")]
    return max(map(len, left), default=10) + 0.85 * max(map(len, right), default=6)


def _write_common_title(drawn: Any, over: tuple[str, str], style: Style, width: float) -> None:
    """Write what all charts of a picture have in common above them."""
    from matplotlib.text import Annotation

    if not over[0]:
        return
    font = style.font
    title = wrapped(over[0], int(width * 90 / font), 3, even=True)
    about = wrapped(over[1], int(width * 160 / font), 5, even=True)
    above = drawn.suptitle(
        title + "\n" * (about.count("\n") + 1),
        x=0.12 / width,
        ha="left",
        fontweight="bold",
        fontsize=font * 1.3,
    )
    text = Annotation(
        about,
        (0, 0),
        xycoords=above,
        fontsize=font * 0.9,
        va="bottom",
    )
    drawn.add_artist(text).set_in_layout(False)  # it is in the last lines of the title


def _add_legend(drawn: Any, charts: Sequence[Chart], style: Style) -> None:
    """Add the legend of points, marker areas and parts of bars below the axes."""
    from matplotlib.lines import Line2D

    handles: Record = {}
    for axes in drawn.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(wrapped(label, 42, 3), handle)
    areas = next((chart.areas for chart in charts if chart.areas), "")
    for share, text in ((0.1, f"10% {areas}"), (0.5, "50%")) if areas else ():
        size = math.sqrt(marker_area(share, style))
        point = Line2D(
            [],
            [],
            linestyle="",
            marker="o",
            markersize=size,
            color=style.ink,
        )
        point.set(alpha=0.4, markeredgewidth=0)
        handles[text] = point
    if not handles:
        return
    longest = max(len(line) for label in handles for line in label.split("\n"))
    columns = max(1, int(drawn.get_size_inches()[0] * 130 / style.font / (longest + 6)))
    rows = -(-len(handles) // columns)
    legend = drawn.legend(
        list(handles.values()),
        list(handles),
        loc="outside lower center",
        ncols=-(-len(handles) // rows),
        frameon=False,
        fontsize=style.font * 0.85,
    )
    for handle in legend.legend_handles:
        if hasattr(handle, "set_sizes"):
            handle.set_sizes([style.font * 4])


class _Head:
    """The title and subtitle of a panel, each with the characters of its lines."""

    def __init__(self, panel: Panel) -> None:
        self.panel, font = panel, panel.style.font
        self.letters = [int(panel.width * 90 / font), int(panel.width * 160 / font)]
        self.subtitle = panel.axes.annotate(
            "",
            (0, 1),
            xycoords="axes fraction",
            xytext=(0, font * 0.5),
            textcoords="offset points",
            fontsize=font * 0.85,
            va="bottom",
        )
        self.subtitle.set_in_layout(False)

    def lines(self) -> list[str]:
        text = wrapped(self.panel.chart.subtitle, self.letters[1], 5, even=True)
        return text.split("\n") if text else []

    def write(self, num_lines: int) -> None:
        """Write both texts, with room for so many lines of subtitle."""
        font, lines = self.panel.style.font, self.lines()
        self.subtitle.set_text("\n".join(lines + [""] * (num_lines - len(lines))))
        self.title = self.panel.axes.set_title(
            wrapped(self.panel.chart.title, self.letters[0], 3, even=True),
            loc="left",
            fontweight="bold",
            fontsize=font * 1.2,
            pad=font * (0.9 + 1.1 * num_lines),
            y=1.0,
        )

    def align(self, renderer: Any) -> float:
        """Begin where the texts left of the axes begin; return this place in pixels."""
        axes = self.panel.axes
        frame, names = (
            axes.get_window_extent(renderer),
            axes.yaxis.get_tightbbox(renderer),
        )
        left = min(frame.x0, names.x0) if names else frame.x0
        share = (left - frame.x0) / frame.width
        self.title.set_x(share)
        self.subtitle.xy = (share, 1)
        return float(left)

    def narrow(self, room: float, renderer: Any) -> bool:
        """Reduce the characters per line of a text wider than `room` pixels."""
        is_narrower = False
        for number, text in enumerate((self.title, self.subtitle)):
            width = text_box(text, renderer).width
            if width > room:
                longest = max(map(len, text.get_text().split("\n")))
                self.letters[number] = max(12, int(longest * room / width) - 1)
                is_narrower = True
        return is_narrower


def _settle(drawn: Any, panels: Sequence[Panel], columns: int, is_shared: bool) -> None:
    """Lay the page out and move every text to its place."""
    style = panels[0].style
    renderer, heads = drawn.canvas.get_renderer(), [_Head(panel) for panel in panels]
    for _ in range(10):  # texts that move or break into lines change the layout
        for first in range(0, len(heads), columns):
            row = heads[first : first + columns]
            num_lines = max(len(head.lines()) for head in row)
            for head in row:
                head.write(num_lines)
        drawn.get_layout_engine().execute(drawn)
        has_changed = False
        for panel in panels:
            has_changed |= panel.move_sums(renderer)
        lefts = [head.align(renderer) for head in heads]
        for number, head in enumerate(heads):
            is_last = number % columns == columns - 1 or number + 1 == len(heads)
            right = drawn.bbox.x1 if is_last else lefts[number + 1]
            has_changed |= head.narrow(right - lefts[number] - style.font, renderer)
        has_changed |= _place_end_labels(panels, style, renderer)
        if has_changed:
            continue
        for panel in panels:
            texts = place_labels(panel.axes, panel.points, panel.ends, renderer)
            for text in texts if not is_shared else ():
                if text.xycoords == "data":
                    panel.move_out(text)
                    has_changed = True
        if not has_changed:
            break
    for panel in panels:
        if panel.chart.categories:
            panel.fit_rows(renderer)
        else:
            thin_ticks(panel.axes.yaxis, renderer, 0.0)
        if not panel.chart.is_heat:
            thin_ticks(panel.axes.xaxis, renderer, 0.5)
    for head in heads:
        head.align(renderer)


def _place_end_labels(panels: Sequence[Panel], style: Style, renderer: Any) -> bool:
    """Place the labels of lines near the lines' ends, equally large in all panels.

    Returns:
        Whether a label has other line breaks than before.
    """
    labels = [label for panel in panels for label in panel.ends]
    before = [label.get_text() for label in labels]
    for share in (n / 20 for n in range(20, 5, -1)):
        size = share * style.font * 0.85
        gap = 0.3 * size * style.dpi / 72
        for label in labels:
            text = wrapped(label.kvcalc_text, int(style.letters / share), NAME_LINES, even=True)
            label.set(fontsize=size, text=text)
        rooms = []
        for panel in panels:
            heights = [text_box(label, renderer).height + gap for label in panel.ends]
            rooms.append(panel.axes.get_window_extent(renderer).height - sum(heights))
        if min(rooms) >= 0:
            break
    for panel in panels:
        frame = panel.axes.get_window_extent(renderer)
        heights = [text_box(label, renderer).height + gap for label in panel.ends]
        ends = [anchor(label)[1] for label in panel.ends]
        centres = spread(ends, heights, frame.y0, frame.y1)
        for label, centre in zip(panel.ends, centres, strict=True):
            label.set_position((1, (centre - frame.y0) / frame.height))
    return before != [label.get_text() for label in labels]
