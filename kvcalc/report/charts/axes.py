"""Draw one chart on matplotlib's axes: curves and points, bars, or a heat map, with scales and
ticks."""

import math
from itertools import pairwise
from typing import Any

from kvcalc.records import Settings
from kvcalc.report.charts.chart import (
    MARKERS,
    Axis,
    Chart,
    Series,
    bytes_tick,
    si_tick,
    tokens_tick,
    whole_tick,
)
from kvcalc.report.charts.labels import NAME_LETTERS, text_box, wrapped
from kvcalc.report.charts.series_styles import DOTTED, HATCHES, Style, colour, dashes, marker
from kvcalc.units import shown_in

CROWD_POINTS = 60  # points of a series above which they are small
FITS, FAILS = "#0072B2", "#D55E00"  # colours of cells
FEW_ROWS = 10  # rows whose names may have several lines
MAX_DECADES = 3.3  # the longest axis with ticks within decades
MIN_DECADES = math.log10(6)  # the shortest axis with logarithmic ticks


def marker_area(share: float, style: Style) -> float:
    """Return the area of a marker in square points, matplotlib's unit for the size of markers.

    With a font of 10 points, `share` 0 gives 30 square points and 1 gives 630.

    Args:
        share: Relative size of the marker: 0 is the smallest and 1 the largest.
        style: Style of the picture. A larger font gives larger markers.
    """
    return (style.font / 10) ** 2 * (30 + 600 * share)


def row_names(chart: Chart) -> list[str]:
    """Return the names left of a chart's bars or of a heat map's rows.

    A long name contains line breaks. If the chart has more than 10 rows, lines may be twice as
    long, so that names need fewer of them.

    Args:
        chart: A bar chart or a heat map.
    """
    names = [s.label for s in chart.series] if chart.is_heat else chart.categories
    width = NAME_LETTERS if len(names) <= FEW_ROWS else 2 * NAME_LETTERS
    return [wrapped(name, width, 3) for name in names]


def tick_locator(axis: Axis, low: float, high: float, max_ticks: int) -> Any:
    """Return a matplotlib locator that puts round tick values on an axis.

    Args:
        axis: The axis. Its scale and its value format decide which values are round.
        low: Smallest value on the axis.
        high: Largest value on the axis.
        max_ticks: Maximum number of ticks.
    """
    from matplotlib.ticker import LogLocator, MaxNLocator, MultipleLocator

    is_bytes = axis.tick is bytes_tick and shown_in() == "gib"
    if axis.log and (is_bytes or axis.tick is tokens_tick):
        return LogLocator(base=2, numticks=2 * max_ticks // 3 if is_bytes else max_ticks)
    decades = math.log10(high / low) if axis.log and low > 0 else 0.0
    if decades >= MIN_DECADES:
        steps = (1, 2, 5) if decades < min(MAX_DECADES, max_ticks / 3) else (1,)
        return LogLocator(base=10, subs=steps, numticks=max_ticks)
    if is_bytes:
        return MultipleLocator(2 ** math.ceil(math.log2(2 * (high - low) / max_ticks)))
    is_whole = axis.tick in (whole_tick, tokens_tick)
    return MaxNLocator(max(2, 2 * max_ticks // 3), steps=[1, 2, 5, 10], integer=is_whole)


class Panel:
    """One chart drawn on matplotlib axes, and its labels, which move after all sizes are known.

    Attributes:
        axes: The matplotlib axes.
        chart: The data of the chart.
        style: Style of the picture: font, colours and size.
        axis_specs: The chart's axes that have ticks, by matplotlib's name, `x` or `y`.
        title: The matplotlib text of the title. The page layout sets it; before, it is None.
        end_labels: matplotlib texts right of the axes, which label the ends of lines.
        point_labels: matplotlib texts on the axes, which label points.
        value_texts: matplotlib texts at the ends of bars, or in cells of a heat map.
    """

    def __init__(
        self, axes: Any, chart: Chart, style: Style, width: float, height: float
    ) -> None:
        """Draw the curves, bars or cells of a chart on empty axes.

        Args:
            axes: The matplotlib axes.
            chart: The chart.
            style: Style of the picture.
            width: Inches that the axes and all texts around them may take horizontally.
            height: Inches that the axes and all texts around them may take vertically.
        """
        self.axes = axes
        self.chart = chart
        self.style = style
        self.title: Any = None
        self.end_labels: list[Any] = []
        self.value_texts: list[Any] = []
        self.point_labels: list[Any] = []
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[:].set_in_layout(False)
        axes.grid(True, which="major", color=style.ink, alpha=0.15, linewidth=0.6)
        axes.set_axisbelow(True)
        axes.tick_params(labelsize=style.font)
        self.axis_specs = {}
        if chart.is_heat:
            self._draw_cells(width)
            return
        if chart.categories:
            self.axis_specs = {"x": chart.y}
            self._draw_bars()
        else:
            self.axis_specs = {"x": chart.x, "y": chart.y}
            letters = max(12, int(height * 60 / style.font))
            axes.set_ylabel(wrapped(chart.y.title, letters, 2), fontsize=style.font)
            self._draw_curves()
        axes.set_xlabel(self.axis_specs["x"].title, fontsize=style.font)

    def _draw_curves(self) -> None:
        """Draw lines and markers, and add their labels."""
        axes, style, series = self.axes, self.style, self.chart.series
        for part in series:
            self._draw_series(part)
        axes.margins(x=0.04, y=0.08)
        for name, spec in self.axis_specs.items():
            for value in spec.shown:
                place = {"x": (value, axes.dataLim.y1), "y": (axes.dataLim.x1, value)}[name]
                axes.update_datalim([place])
            getattr(axes, f"set_{name}scale")("log" if spec.log else "linear")
        axes.autoscale_view()
        if not self.chart.y.log and axes.dataLim.y0 >= 0:
            axes.set_ylim(bottom=0)
        self._set_ticks("x", 14)
        self._set_ticks("y", 14)
        for part in series:
            sizes = part.sizes or [0.02] * len(part.labels)
            for x, y, text, size in zip(part.xs, part.ys, part.labels, sizes):
                if text:
                    self._label_point(text, (x, y), math.sqrt(marker_area(size, style)) / 2)
            if not part.label or part.kind in (*MARKERS, "upright"):
                continue
            place = (part.xs or [1.0])[-1], part.ys[-1]
            leaders = {"limit": {"linestyle": DOTTED, "linewidth": style.font / 8}, "quiet": {}}
            leader = leaders.get(part.kind, {"color": colour(part.colour, style)})
            system = axes.get_yaxis_transform() if part.kind == "limit" else "data"
            self._label_end(part.label, place, leader, system)

    def _set_ticks(self, name: str, max_ticks: int) -> None:
        from matplotlib.ticker import NullLocator

        axis = getattr(self.axes, f"{name}axis")
        spec = self.axis_specs[name]
        low, high = axis.get_view_interval()
        axis.set_major_locator(tick_locator(spec, low, high, max_ticks))
        axis.set_minor_locator(NullLocator())
        is_exact = spec.tick is bytes_tick and shown_in() == "bytes"
        tick = si_tick("B") if is_exact else spec.tick  # digits would overlap
        axis.set_major_formatter(lambda value, _: tick(value))

    def fit_ticks(self, renderer: Any) -> None:
        """Reduce the number of ticks on each axis until the tick texts do not touch.

        Args:
            renderer: The matplotlib renderer that measures texts.
        """
        for name in self.axis_specs:
            axis = getattr(self.axes, f"{name}axis")
            low, high = axis.get_view_interval()
            side, gap = (0, 0.5) if name == "x" else (1, 0.0)
            for max_ticks in (14, 12, 10, 8, 6, 5, 4, 3):
                self._set_ticks(name, max_ticks)
                ticks = zip(axis.get_majorticklocs(), axis.get_ticklabels())
                boxes = [
                    t.get_window_extent(renderer) for value, t in ticks if low <= value <= high
                ]
                if all(a.max[side] + gap * a.height < b.min[side] for a, b in pairwise(boxes)):
                    break

    def _draw_series(self, series: Series) -> None:
        """Draw one line, or the markers of a series."""
        axes, xs, ys = self.axes, series.xs, series.ys
        width = self.style.font / 5
        linestyle = {"dashed": "--", "solid": "-"}.get(series.kind) or dashes(series.colour)
        line = {"color": colour(series.colour, self.style), "linestyle": linestyle}
        dotted = {"color": self.style.ink, "linestyle": DOTTED, "linewidth": 0.7 * width}
        match series.kind:
            case "limit":
                axes.axhline(ys[0], **dotted)
                return
            case "upright":
                axes.axvline(xs[0], **dotted, label=series.label)
                return
            case "points" | "hollow":
                self._draw_markers(series)
                return
            case "quiet":
                alpha = 0.6 if series.label else 0.25
                line = {"color": self.style.ink, "zorder": 1.5, "alpha": alpha}
                width /= 2
            case "dashed" | "edge":
                width /= 2
        axes.plot(xs, ys, linewidth=width, **line)

    def _draw_markers(self, series: Series) -> None:
        """Draw the markers of a series, small markers over large markers."""
        is_crowd = len(series.xs) > CROWD_POINTS
        sizes = series.sizes or [-0.02 if is_crowd else 0.02]
        paint, paper = colour(series.colour, self.style), self.style.paper
        look: Settings = {"color": paint, "edgecolors": paper}
        if series.kind == "hollow":
            inside = "none" if series.sizes else paper  # hides the line below
            look = {"facecolors": inside, "edgecolors": paint, "linewidths": 1.5}
        is_named = any(text.startswith(series.label) for text in series.labels)
        self.axes.scatter(
            series.xs,
            series.ys,
            s=[marker_area(share, self.style) for share in sizes],
            marker=marker(series.colour),
            label=None if is_named else series.label or None,
            clip_on=False,
            alpha=0.85 if is_crowd or len(series.sizes) > 1 else 1.0,
            zorder=3.5 - max(sizes) / 2,
            **look,
        )

    def _annotate(self, text: str, place: Any, leader: Settings, **options: Any) -> Any:
        """Return a new label with a line to a place."""
        line = {"arrowstyle": "-", "color": self.style.ink, "linewidth": self.style.font / 16}
        return self.axes.annotate(
            wrapped(text, self.style.letters),
            place,
            fontsize=self.style.font * 0.85,
            va="center",
            arrowprops=line | leader,
            **options,
        )

    def _label_point(self, text: str, place: tuple[float, float], radius: float) -> None:
        """Add the label of a marker with a radius in points. It is placed later."""
        leader = {"alpha": 0.7, "shrinkA": 1, "shrinkB": radius}
        label = self._annotate(
            text, place, leader, xytext=(0, 0), textcoords="offset points", zorder=4
        )
        label.set_in_layout(False)
        self.point_labels.append(label)

    def move_out(self, text: Any) -> None:
        """Move the label of a point to the right of the axes, and join it to the point by a line.

        This is for labels that have no free position on the axes.

        Args:
            text: One of `point_labels`. It is removed, and the new label is added to `end_labels`.
        """
        self.point_labels.remove(text)
        text.remove()
        self._label_end(text.get_text(), text.xy, {})

    def _label_end(self, text: str, place: Any, leader: Settings, system: Any = "data") -> None:
        """Add a label right of the axes, with a line to a place."""
        from matplotlib.transforms import ScaledTranslation

        gap = ScaledTranslation(1.8 * self.style.font / 72, 0, self.axes.figure.dpi_scale_trans)
        label = self._annotate(
            text,
            place,
            leader | {"relpos": (0, 0.5), "shrinkA": 2, "shrinkB": 0},
            xycoords=system,
            xytext=(1, 0.5),
            textcoords=self.axes.transAxes + gap,
            annotation_clip=False,
        )
        self.end_labels.append(label)

    def _draw_bars(self) -> None:
        """Draw stacked bars, with vertical lines for limits."""
        axes, chart, style = self.axes, self.chart, self.style
        count = len(chart.categories)
        totals = [0.0] * count
        parts = chart.of_kind("bar")
        for number, series in enumerate(parts):
            bars = axes.barh(
                range(count),
                series.ys,
                left=totals,
                height=min(0.8, 0.3 + 0.1 * count),
                label=series.label,
                color=colour(series.colour, style),
                hatch=HATCHES[number % len(HATCHES)] if series.label else "",
                edgecolor=style.paper,
                linewidth=0.5,
            )
            totals = [total + y for total, y in zip(totals, series.ys)]
        limits = chart.of_kind("limit")
        for number, series in enumerate(limits):
            axes.axvline(
                series.ys[0],
                color=style.ink,
                linestyle=dashes(number) if number else DOTTED,
                linewidth=0.16 * style.font,
                label=series.label,
            )
        longest = max([*totals, *(s.ys[0] for s in limits)])
        axes.set_yticks(range(count), row_names(chart))
        axes.set_ylim(count - 0.5, -0.5)
        axes.grid(False, axis="y")
        axes.set_xlim(0, 1.04 * longest or 1)
        self._set_ticks("x", 8)
        texts = parts[-1].labels or [*map(chart.y.tick, totals)]
        padding, size = 0.5 * style.font, 0.85 * style.font
        self.value_texts = axes.bar_label(bars, texts, padding=padding, fontsize=size)
        for label in self.value_texts:  # hides the lines behind it
            label.set_bbox({"facecolor": style.paper, "edgecolor": "none", "pad": 1})

    def _draw_cells(self, width: float) -> None:
        """Draw a heat map: depths from 0 to 1 in shades of one colour, depth -1 in another
        colour."""
        from matplotlib.colors import LinearSegmentedColormap

        axes, chart, style = self.axes, self.chart, self.style
        shades: Any = LinearSegmentedColormap.from_list("shades", [style.paper, FITS])
        shades = shades.with_extremes(under=(FAILS, 0.2))
        axes.grid(False)
        axes.imshow(
            [series.ys for series in chart.series],
            cmap=shades,
            vmin=-0.45,
            vmax=1.1,
            aspect="auto",
            origin="lower",
        )
        for row, series in enumerate(chart.series):
            for column, (depth, text) in enumerate(zip(series.ys, series.labels)):
                ink = "white" if depth > 0.75 else style.ink
                cell = axes.text(column, row, text, color=ink, ha="center", va="center")
                cell.set(fontsize=style.font * 0.85, in_layout=False)
                self.value_texts.append(cell)
        count = len(chart.categories)
        letters = max(6, int(0.85 * width * 72 / (count * 0.6 * style.font)))
        axes.set_xticks(range(count), [wrapped(name, letters) for name in chart.categories])
        axes.set_yticks(range(len(chart.series)), row_names(chart))
        axes.set_xlabel(chart.x.title, fontsize=style.font)
        axes.set_ylabel(chart.y.title, fontsize=style.font)

    def fit_rows(self, renderer: Any) -> None:
        """Reduce the font sizes of row names, bar texts and cell texts so that they do not touch.

        Args:
            renderer: The matplotlib renderer that measures texts.
        """
        (x0, y0), (x1, y1) = self.axes.transData.transform([(0, 0), (1, 1)])
        width, height = abs(x1 - x0), abs(y1 - y0)
        for texts, max_width in (
            (self.axes.get_yticklabels(), math.inf),
            (self.value_texts, 0.9 * width if self.chart.is_heat else math.inf),
        ):
            boxes = [text_box(text, renderer) for text in texts if text.get_text()]
            shares = [min(max_width / box.width, 0.87 * height / box.height) for box in boxes]
            for text in texts:
                text.set_fontsize(text.get_fontsize() * min(1.0, *shares, 1.0))
