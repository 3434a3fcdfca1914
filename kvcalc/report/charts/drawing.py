"""Draw charts with matplotlib: lay out the page, and write files of each kind.

The same chart gives the same bytes for one matplotlib version. Text in SVG files stays text, and is
never parsed as mathematics.
"""

import io
import logging
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvcalc.errors import UserError, printable
from kvcalc.library.files import destination, write_text
from kvcalc.report.charts.axes import Panel, row_names
from kvcalc.report.charts.chart import Charts, drawable
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
MAX_PAGE_CHARTS = 9  # on a page of a fixed size; a page with more charts grows


def save(charts: Charts, target: str, style: str = "light") -> None:
    """Write a picture to a .png, .svg or .pdf file, or print it with characters if target is `-`.

    Args:
        charts: The charts of the picture.
        target: Path of the file, or `-` for the terminal.
        style: One of STYLES: light, dark or slides.

    Raises:
        UserError: The suffix or style is unknown, or the file cannot be written.
    """
    check_picture(target, style)
    if target == "-":
        from kvcalc.report.charts.terminal import sketch

        print(sketch([*map(drawable, charts)]))
        return
    (picture,) = rendered([charts], Path(target).suffix.lower()[1:], STYLES[style])
    write_text(target, picture)
    print(f"wrote {printable(target)}", file=sys.stderr)


def check_picture(target: str, style: str) -> None:
    """Check that a picture can be written, so that a long computation does not end in an error.

    Args:
        target: Path of the file, or `-` for the terminal.
        style: Name of the style: light, dark or slides.

    Raises:
        UserError: The suffix or the style is unknown, or the file cannot be written.
    """
    _find_style(style)
    if target == "-":
        return
    if Path(target).suffix.lower() not in SUFFIXES:
        raise UserError(
            f"picture {target!r} should end in one of {', '.join(SUFFIXES)}, or be - for the "
            "terminal"
        )
    destination(target)


def _find_style(name: str) -> Style:
    if name not in STYLES:
        raise UserError(f"unknown style {name!r}", f"Known: {', '.join(STYLES)}")
    return STYLES[name]


def rendered(pictures: Iterable[Charts], suffix: str, style: Style) -> list[bytes]:
    """Draw pictures, and return the content of each file as bytes, one item per picture.

    Args:
        pictures: The charts of each picture.
        suffix: Format of the files: png, svg or pdf.
        style: Style of all pictures: fonts, colours and size.
    """
    with _settings(style):
        return [_file_bytes(figure(charts, style), suffix) for charts in pictures]


def _file_bytes(page: Any, suffix: str) -> bytes:
    out = io.BytesIO()
    date = {"svg": "Date", "pdf": "CreationDate", "png": "Software"}[suffix]
    page.savefig(out, format=suffix, metadata={date: None})
    return out.getvalue()


def figure_of(charts: Charts, style: str) -> Any:
    """Return a picture as a matplotlib figure that a notebook can show.

    Args:
        charts: The charts of the picture.
        style: One of STYLES: light, dark or slides.

    Raises:
        UserError: The style is unknown.
    """
    look = _find_style(style)

    def notebook_png() -> bytes:
        with _settings(look):
            return _file_bytes(page, "png")

    with _settings(look):
        page = figure(charts, look)
    page._repr_png_ = notebook_png
    return page


@contextmanager
def _settings(style: Style) -> Iterator[None]:
    """Set up matplotlib for a style, independent of the user's settings."""
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


def figure(charts: Charts, style: Style) -> Any:
    """Return a picture as a matplotlib figure in which every label has its final position.

    Args:
        charts: The charts of the picture.
        style: Style of the picture: font, colours and size.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    charts = [*map(drawable, charts)]
    if len(charts) > MAX_PAGE_CHARTS:
        style = style._replace(is_page=False)
    columns = 2 if len(charts) == 4 else min(len(charts), 3 if len(charts) < 10 else 4)
    rows = -(-len(charts) // columns)
    width = min(style.size[0] * columns, MAX_WIDTH)
    style, height = _fit_style(charts, style, width / columns, rows)
    engine = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.08)
    page = Figure(figsize=(width, rows * height), dpi=style.dpi, layout=engine)
    FigureCanvasAgg(page)
    panels = [
        Panel(page.add_subplot(rows, columns, number), part, style, width / columns, height)
        for number, part in enumerate(charts, 1)
    ]
    _add_legend(page, style)
    _arrange_texts(page, panels, columns)
    page.set_layout_engine("none")
    return page


def _fit_style(charts: Charts, style: Style, width: float, rows: int) -> tuple[Style, float]:
    """Return the style with fitted font size and characters per label, and the height of a row in
    inches.

    Args:
        charts: Charts of the picture.
        style: Style of the picture.
        width: Width of a chart in inches.
        rows: Number of rows.
    """
    smallest = MIN_SHARE * style.font if style.is_page else MIN_FONT
    font = min(style.font * (0.8 if rows > 1 else 1.0), max(width * 72 / 38, smallest))
    num_lines = 0
    for chart in charts:
        letters = min(NAME_LETTERS, int(0.8 * width * 72 / font))
        names = "\n".join(row_names(chart) or [" " * 10]).split("\n")
        texts = [s for s in chart.series if s.kind not in ("bar", "cells")]
        labels = [
            wrapped(text, letters) for s in texts for text in (s.label, *s.labels) if text
        ]
        ends = "\n".join(labels).split("\n")
        num_lines = max(num_lines, len(names), len(ends))
        sides = max(map(len, names)) + 0.85 * max(6, *map(len, ends))
        font = min(font, max(smallest, (width - 1.2) * 72 / (0.6 * sides)))
    height = style.size[1] / rows
    if not style.is_page:
        height = max(height, 3.75 if rows > 1 else 0.0)
        share = min(1.0, max(0.65, 7.0 / (0.85 * font)))  # smallest share of the font
        height = max(height, 0.36 * height + num_lines * share * font * 1.3 / 72)
    return style._replace(
        font=font, letters=min(NAME_LETTERS, int(0.8 * width * 72 / font))
    ), height


def _add_legend(page: Any, style: Style) -> None:
    """Add the legend of points, limits and parts of bars below the axes."""
    handles: dict[str, Any] = {}
    for axes in page.axes:
        for handle, label in zip(*axes.get_legend_handles_labels()):
            handles.setdefault(wrapped(label, 42), handle)
    if not handles:
        return
    longest = max(len(line) for label in handles for line in label.split("\n"))
    columns = max(1, int(page.get_size_inches()[0] * 130 / style.font / (longest + 6)))
    legend = page.legend(
        handles.values(),
        handles,
        loc="outside lower center",
        ncols=min(columns, len(handles)),
        frameon=False,
        fontsize=style.font * 0.85,
    )
    for handle in legend.legend_handles:
        if hasattr(handle, "set_sizes"):
            handle.set_sizes([style.font * 4])


def _write_head(title: Any, texts: tuple[str, str], font: float, inches: float) -> Any:
    """Write a title and the assumptions below it, in lines about `inches` inches wide.

    Returns:
        The matplotlib text of the assumptions.
    """
    from matplotlib.text import Annotation

    letters = inches * 72 / font  # as wide as the font's size
    title.set(text=wrapped(texts[0], int(letters / 0.65), 3), fontsize=font, fontweight="bold")
    about = Annotation(
        wrapped(texts[1], int(letters / 0.42), 5),
        (0, 0),
        xycoords=title,
        xytext=(0, -0.25 * font),
        textcoords="offset points",
        fontsize=font * 0.75,
        va="top",
    )
    title.figure.add_artist(about)
    about.set_in_layout(False)
    return about


def _num_lines(text: Any) -> int:
    return len(text.get_text().splitlines())


def _arrange_texts(page: Any, panels: Sequence[Panel], columns: int) -> None:
    """Lay out the page, and move every text to its place."""
    font = panels[0].style.font
    renderer = page.canvas.get_renderer()
    inches = page.get_size_inches()[0]
    picture_head = panels[0].chart.picture_head
    if picture_head[0]:
        title = page.suptitle("", x=0.12 / inches, ha="left")
        about = _write_head(title, picture_head, font * 1.3, inches)
        title.set_text(title.get_text() + "\n" * _num_lines(about))
        about.set(va="bottom", position=(0, 0))
    abouts = []
    for panel in panels:
        panel.title = panel.axes.set_title("", loc="left", y=1.0)
        texts = panel.chart.title, panel.chart.subtitle
        abouts.append(_write_head(panel.title, texts, font * 1.2, inches / columns))
    pad = font * (0.9 + 1.1 * max(map(_num_lines, abouts)))
    for panel in panels:
        text, look = panel.title.get_text(), panel.title.get_fontproperties().copy()
        panel.axes.set_title(text, loc="left", pad=pad, fontproperties=look)
    for _ in range(6):  # texts that move change the layout
        page.get_layout_engine().execute(page)
        num_moved = 0
        for panel in panels:
            _place_end_labels(panel, renderer)
            for text in place_labels(
                panel.axes, panel.point_labels, panel.end_labels, renderer
            ):
                panel.move_out(text)
                num_moved += 1
        if not num_moved:
            break
    for panel in panels:
        if panel.chart.categories:
            panel.fit_rows(renderer)
        panel.fit_ticks(renderer)
        frame = panel.axes.get_window_extent(renderer)
        names = panel.axes.yaxis.get_tightbbox(renderer)
        left = min(frame.x0, names.x0) if names else frame.x0
        panel.title.set_x((left - frame.x0) / frame.width)


def _place_end_labels(panel: Panel, renderer: Any) -> None:
    """Move the labels right of the axes to the ends of their lines, and reduce their font until all
    fit."""
    frame = panel.axes.get_window_extent(renderer)
    heights = [1.1 * text_box(label, renderer).height for label in panel.end_labels]
    share = min(1.0, frame.height / (sum(heights) or 1.0))
    ends = [anchor(label)[1] for label in panel.end_labels]
    centres = spread(ends, [share * height for height in heights], frame.y0, frame.y1)
    for label, centre in zip(panel.end_labels, centres):
        label.set_fontsize(share * label.get_fontsize())
        label.set_position((1, (centre - frame.y0) / frame.height))
