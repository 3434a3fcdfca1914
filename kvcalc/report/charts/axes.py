"""One chart on matplotlib's axes: curves and points, bars, or a heat map, with scales and ticks."""

import itertools
import math
from typing import Any

from kvcalc.report.charts.chart import (
    LINES,
    MARKERS,
    Axis,
    Chart,
    Series,
    bytes_tick,
    tokens_tick,
    whole_tick,
)
from kvcalc.report.charts.labels import NAME_LETTERS, text_box, wrapped
from kvcalc.report.charts.series_styles import DOTTED, HATCHES, Style, colour, dashes, marker
from kvcalc.units import shown_in

CROWD = 60  # points of a series above which they are small
EARLY = 0.9  # share of the axes' width; a line that ends before it is labelled on the axes
FITS, FAILS = "#0072B2", "#D55E00"  # colours of cells
FEW_ROWS = 10  # rows whose names may have several lines
MAX_DECADES = 3.3  # the longest axis with ticks within decades
MIN_DECADES = math.log10(6)  # the shortest axis with logarithmic ticks


def marker_area(share: float, style: Style) -> float:
    """Return the area of a marker in square points, for a share from 0 to 1."""
    return (style.font / 10) ** 2 * (30 + 600 * share)


def row_names(chart: Chart) -> list[str]:
    """Return the names of the rows of bars or cells."""
    names = [s.label for s in chart.series] if chart.is_heat else chart.categories
    width = NAME_LETTERS if len(names) <= FEW_ROWS else 2 * NAME_LETTERS
    return [wrapped(name, width, 3) for name in names]


def axis_values(chart: Chart, name: str) -> list[float]:
    """Return all values on an axis, `x` or `y`."""
    axis = getattr(chart, name)
    values = [*axis.shown]
    for series in chart.series:
        if name == "x":
            values += series.xs
        elif series.kind != "upright":
            values += [*series.ys, *series.lows]
    return values


def tick_locator(axis: Axis, low: float, high: float, max_ticks: int) -> Any:
    """Return a locator of round ticks between two values."""
    from matplotlib.ticker import LogLocator, MaxNLocator, MultipleLocator

    is_bytes = axis.tick is bytes_tick and shown_in() == "gib"
    if axis.log and (is_bytes or axis.tick is tokens_tick):
        return LogLocator(base=2, numticks=2 * max_ticks // 3 if is_bytes else max_ticks)
    decades = math.log10(high / low) if axis.log else 0.0
    if decades >= MIN_DECADES:
        steps = (1, 2, 5) if decades < min(MAX_DECADES, max_ticks / 3) else (1,)
        return LogLocator(base=10, subs=steps, numticks=max_ticks)
    if is_bytes:
        return MultipleLocator(2 ** math.ceil(math.log2(2 * (high - low) / max_ticks)))
    is_whole = axis.tick in (whole_tick, tokens_tick)
    return MaxNLocator(max(2, 2 * max_ticks // 3), steps=[1, 2, 5, 10], integer=is_whole)


class Panel:
    """The axes of one chart, and the labels to place once the sizes are known.

    Attributes:
        axes: The matplotlib axes.
        chart: The chart.
        style: Style of the picture.
        width: Width of the axes with all texts, in inches.
        axis_specs: Axes with ticks, by matplotlib's name, `x` or `y`.
        title: Text of the title.
        ends: Labels of lines, right of the axes.
        points: Labels of points, on the axes.
        sums: Texts at the ends of bars.
        cells: Texts of a heat map.
    """

    def __init__(
        self, axes: Any, chart: Chart, style: Style, width: float, height: float
    ) -> None:
        """Draw a chart on axes that have `width` by `height` inches with all texts."""
        self.axes = axes
        self.chart = chart
        self.style = style
        self.width = width
        self.title: Any = None
        self.ends: list[Any] = []
        self.cells: list[Any] = []
        self.points: list[Any] = []
        self.sums: list[Any] = []
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[:].set_in_layout(False)
        axes.grid(True, which="major", color=style.ink, alpha=0.15, linewidth=0.6)
        axes.set_axisbelow(True)
        axes.tick_params(labelsize=style.font)
        axes.set_xlabel(chart.x.title, fontsize=style.font)
        letters = max(12, int(height * 60 / style.font))
        axes.set_ylabel(wrapped(chart.y.title, letters, 2), fontsize=style.font)
        self.axis_specs: dict[str, Axis] = {}
        if chart.is_heat:
            self._draw_cells()
        elif chart.categories:
            self.axis_specs = {"x": chart.y}
            self._draw_bars(height)
        else:
            self.axis_specs = {"x": chart.x, "y": chart.y}
            self._draw_curves()

    def _draw_curves(self) -> None:
        """Draw lines and markers, and add their labels."""
        self._set_limits("x")
        self._set_limits("y")
        style, series = self.style, self.chart.series
        ends = [self._end_of(part) if part.kind in LINES else 0.0 for part in series]
        for number, (part, end) in enumerate(zip(series, ends, strict=True)):
            number = number if part.colour < 0 else part.colour
            self._draw_series(part, number)
            sizes = part.sizes or [0.02] * len(part.labels)
            for x, y, text, size in zip(part.xs, part.ys, part.labels, sizes, strict=False):
                if text:
                    self._label_point(text, (x, y), math.sqrt(marker_area(size, style)) / 2)
            if not part.label or part.kind in (*MARKERS, "band", "span", "upright"):
                continue
            place = (part.xs or [1.0])[-1], part.ys[-1]
            leader = {"color": style.ink, "linewidth": style.font / 16}
            if part.kind == "limit":
                leader |= {"linestyle": DOTTED, "linewidth": style.font / 8}
                self._label_end(part.label, place, leader, self.axes.get_yaxis_transform())
            elif part.kind in LINES and end < EARLY:
                self._label_point(part.label, place, 2.0)
            else:
                if end and end > max(ends) - 0.01:  # otherwise it would look like data
                    leader |= self._line_style(part, number) | {"linewidth": style.font / 8}
                self._label_end(part.label, place, leader)

    def _set_limits(self, name: str) -> None:
        """Set the scale, limits, ticks and formatter of an axis, `x` or `y`."""
        from matplotlib.ticker import NullLocator

        spec = self.axis_specs[name]
        axis = getattr(self.axes, f"{name}axis")
        values = axis_values(self.chart, name)
        low, high = min(values), max(values)
        if spec.log:
            margin = max(1.15, min(1.7, (high / low) ** (1 / 12)))
            is_labelled = any(
                s.label and s.kind in (*LINES, "quiet") for s in self.chart.series
            )
            getattr(self.axes, f"set_{name}scale")("log")
            low /= min(margin, 1.4)
            high *= 1.05 if name == "x" and is_labelled else margin
            getattr(self.axes, f"set_{name}lim")(low, high)
            axis.set_minor_locator(NullLocator())
        elif name == "y" and low >= 0:
            self.axes.set_ylim(0, 1.08 * high or 1)
        self._set_ticks(name, 14)

    def _set_ticks(self, name: str, max_ticks: int) -> None:
        axis = getattr(self.axes, f"{name}axis")
        spec = self.axis_specs[name]
        low, high = axis.get_view_interval()
        axis.set_major_locator(tick_locator(spec, low, high, max_ticks))
        axis.set_major_formatter(lambda value, _: spec.tick(value))

    def fit_ticks(self, renderer: Any) -> None:
        """Reduce the number of ticks until their texts do not touch."""
        for name, gap in (("x", 0.5), ("y", 0.0)):
            axis = getattr(self.axes, f"{name}axis")
            low, high = sorted(axis.get_view_interval())
            side = int(name == "y")
            for max_ticks in (14, 12, 10, 8, 6, 5, 4, 3) if name in self.axis_specs else ():
                self._set_ticks(name, max_ticks)
                ticks = zip(axis.get_majorticklocs(), axis.get_ticklabels(), strict=False)
                boxes = [
                    t.get_window_extent(renderer) for value, t in ticks if low <= value <= high
                ]
                pairs = itertools.pairwise(boxes)
                if all(a.max[side] + gap * a.height < b.min[side] for a, b in pairs):
                    break

    def _end_of(self, series: Series) -> float:
        """Return the place of a line's end, as a fraction of the axes' width."""
        place = self.axes.transData.transform((series.xs[-1], series.ys[-1]))
        return float(self.axes.transAxes.inverted().transform(place)[0])

    def _line_style(self, series: Series, number: int) -> dict[str, Any]:
        """Return the colour and dashes of a line."""
        usual = {"dashed": "--", "solid": "-", "span": "-"}
        linestyle = usual.get(series.kind) or dashes(number)
        return {"color": colour(number, self.style), "linestyle": linestyle}

    def _draw_series(self, series: Series, number: int) -> None:
        """Draw one series in the style of that number."""
        axes, xs, ys = self.axes, series.xs, series.ys
        width = self.style.font / 5
        line = self._line_style(series, number) | {"linewidth": width}
        dotted = {"color": self.style.ink, "linestyle": DOTTED, "linewidth": 0.7 * width}
        grey = {"color": self.style.ink, "linestyle": "-", "zorder": 1.5}
        match series.kind:
            case "limit":
                axes.axhline(ys[0], **dotted)
            case "upright":
                axes.axvline(xs[0], **dotted, label=series.label)
            case "points" | "hollow":
                self._draw_markers(series, number)
            case "band":
                axes.fill_between(xs, series.lows, ys, color=line["color"], alpha=0.18, lw=0)
            case "span":
                line |= {"linewidth": 5 * width, "alpha": 0.3, "solid_capstyle": "butt"}
                axes.plot(xs, ys, **line, zorder=1.6)
            case "quiet":
                alpha = 0.6 if series.label else 0.25
                axes.plot(xs, ys, **line | grey | {"alpha": alpha, "linewidth": width / 2})
            case "dashed" | "edge":
                axes.plot(xs, ys, **line | {"linewidth": width / 2})
            case _:
                axes.plot(xs, ys, **line)

    def _draw_markers(self, series: Series, number: int) -> None:
        """Draw the markers of a series, small ones over large ones."""
        is_crowd = len(series.xs) > CROWD
        sizes = series.sizes or [-0.02 if is_crowd else 0.02]
        alpha = 0.85 if is_crowd or len(series.sizes) > 1 else 1.0
        paint = colour(number, self.style)
        look: dict[str, Any] = {"color": paint, "edgecolors": self.style.paper}
        if series.kind == "hollow":
            inside = "none" if series.sizes else self.style.paper  # hides the line below
            look = {"facecolors": inside, "edgecolors": paint, "linewidths": 1.5}
        is_named = any(text.startswith(series.label) for text in series.labels)
        self.axes.scatter(
            series.xs,
            series.ys,
            s=[marker_area(share, self.style) for share in sizes],
            marker=marker(number),
            label=None if is_named else series.label or None,
            clip_on=False,
            alpha=alpha,
            zorder=3.5 - max(sizes) / 2,
            **look,
        )

    def _label_point(self, text: str, place: tuple[float, float], radius: float) -> None:
        """Add the label of a marker with that radius in points, to be placed later."""
        leader = {"arrowstyle": "-", "color": self.style.ink, "linewidth": self.style.font / 16}
        label = self.axes.annotate(
            wrapped(text, self.style.letters),
            place,
            xytext=(0, 0),
            textcoords="offset points",
            fontsize=self.style.font * 0.85,
            zorder=4,
            va="center",
            arrowprops=leader | {"alpha": 0.7, "shrinkA": 1, "shrinkB": radius},
        )
        label.set_in_layout(False)
        self.points.append(label)

    def move_out(self, text: Any) -> None:
        """Move the label of a point right of the axes."""
        self.points.remove(text)
        text.remove()
        leader = {"color": self.style.ink, "linewidth": self.style.font / 16}
        self._label_end(text.get_text(), text.xy, leader)

    def _label_end(
        self,
        text: str,
        place: tuple[float, float],
        leader: dict[str, Any],
        system: Any = "data",
    ) -> None:
        """Add a label right of the axes, joined to a place."""
        from matplotlib.transforms import ScaledTranslation

        axes, font = self.axes, self.style.font
        gap = ScaledTranslation(1.8 * font / 72, 0, axes.figure.dpi_scale_trans)
        joint = {"arrowstyle": "-", "relpos": (0, 0.5), "shrinkA": 2, "shrinkB": 0}
        label = axes.annotate(
            wrapped(text, self.style.letters),
            place,
            xycoords=system,
            xytext=(1, 0.5),
            textcoords=axes.transAxes + gap,
            fontsize=font * 0.85,
            va="center",
            annotation_clip=False,
            arrowprops=leader | joint,
        )
        self.ends.append(label)

    def _draw_bars(self, height: float) -> None:
        """Draw stacked bars, with vertical lines for limits, on axes of that height in inches."""
        axes, chart, style = self.axes, self.chart, self.style
        count = len(chart.categories)
        totals = [0.0] * count
        parts = [s for s in chart.series if s.kind == "bar"]
        limits = [s for s in chart.series if s.kind == "limit"]
        for number, series in enumerate(parts):
            axes.barh(
                range(count),
                series.ys,
                left=totals,
                height=min(0.8, 0.3 + 0.1 * count),
                label=series.label,
                color=colour(number if series.colour < 0 else series.colour, style),
                hatch=HATCHES[number % len(HATCHES)] if series.label else "",
                edgecolor=style.paper,
                linewidth=0.5,
            )
            totals = [total + y for total, y in zip(totals, series.ys, strict=True)]
        longest = max([*totals, *chart.y.shown, *(s.ys[0] for s in limits)])
        row = 0.0215 * max(count, 4) * style.font / height  # height of a limit's name, in bars
        axes.set_yticks(range(count), row_names(chart))
        axes.set_ylim(count - 0.5, -0.6 - row * (1.2 * len(limits) + 0.2) if limits else -0.5)
        axes.set_ylabel("")
        axes.set_xlabel(chart.y.title)
        axes.grid(False, axis="y")
        axes.set_xlim(0, 1.04 * longest or 1)
        self._set_ticks("x", 8)
        self._draw_limits(limits, longest, row)
        texts = parts[-1].labels or [*map(chart.y.tick, totals)]
        for number, text in enumerate(texts):
            place = totals[number], number
            if text:
                self.sums.append(self._write_next_to(text, place, 0.5 * style.font))

    def _write_next_to(self, text: str, place: tuple[float, float], points: float) -> Any:
        """Write a text that many points right of a place, or left of it if negative."""
        label = self.axes.annotate(
            text,
            place,
            xytext=(points, 0),
            textcoords="offset points",
            ha="left" if points > 0 else "right",
            va="center",
            fontsize=self.style.font * 0.85,
        )
        hidden_line = {"facecolor": self.style.paper, "edgecolor": "none", "pad": 1}
        label.set_bbox(hidden_line)
        return label

    def _draw_limits(self, limits: list[Series], longest: float, row: float) -> None:
        """Draw limits through all bars, with their names above each other.

        Args:
            limits: The limits.
            longest: Length of the longest bar or limit.
            row: Height of a name, in bars.
        """
        font = self.style.font
        letters = self.width * 72 / font
        is_left = all(s.ys[0] > max(0.5, len(s.label) / letters) * longest for s in limits)
        limits.sort(key=lambda series: series.ys[0] if is_left else -series.ys[0])
        for number, series in enumerate(limits):
            place = series.ys[0], -0.6 - row * (1.2 * number + 0.6)
            ends = (place[1], len(self.chart.categories) - 0.5)
            line = {"color": self.style.ink, "linestyle": DOTTED, "linewidth": 0.16 * font}
            self.axes.plot((place[0], place[0]), ends, **line)
            self._write_next_to(series.label, place, -0.5 * font if is_left else 0.5 * font)

    def _draw_cells(self) -> None:
        """Draw a heat map: depths of 0 to 1 in shades of one colour, -1 in another colour."""
        from matplotlib.colors import to_rgb

        axes, chart, style = self.axes, self.chart, self.style
        paper = to_rgb(style.paper)

        def shade(depth: float) -> list[float]:
            share = 0.3 + 0.65 * depth if depth >= 0 else 0.2
            ink = to_rgb(FITS if depth >= 0 else FAILS)
            return [p + (i - p) * share for p, i in zip(paper, ink, strict=True)]

        shades = [[*map(shade, series.ys)] for series in chart.series]
        axes.grid(False)
        axes.imshow(shades, aspect="auto", origin="lower", interpolation="nearest")
        for row, series in enumerate(chart.series):
            for column, text in enumerate(series.labels):
                ink = "white" if sum(shades[row][column]) < 1.5 else "#1a1a1a"
                cell = axes.text(column, row, text, color=ink, ha="center", va="center")
                cell.set(fontsize=style.font * 0.85, in_layout=False)
                self.cells.append(cell)
        count = len(chart.categories)
        letters = max(6, int(0.85 * self.width * 72 / (count * 0.6 * style.font)))
        names = [wrapped(name, letters, 6) for name in chart.categories]
        axes.set_xlim(-0.5, count - 0.5)
        axes.set_xticks(range(count), names)
        axes.set_yticks(range(len(chart.series)), row_names(chart))

    def fit_rows(self, renderer: Any) -> None:
        """Reduce the font sizes of names, bars' texts and cells so that they do not touch."""
        (x0, y0), (x1, y1) = self.axes.transData.transform([(0, 0), (1, 1)])
        width, height = abs(x1 - x0), abs(y1 - y0)
        columns = self.axes.get_xticklabels() if self.cells else []
        for texts, max_width, max_height in (
            (self.axes.get_yticklabels(), math.inf, 0.87 * height),
            (self.sums, math.inf, 0.87 * height),
            (self.cells, 0.9 * width, 0.9 * height),
            (columns, 0.95 * width, math.inf),
        ):
            boxes = [text_box(text, renderer) for text in texts if text.get_text()]
            shares = [min(max_width / box.width, max_height / box.height) for box in boxes]
            for text in texts:
                text.set_fontsize(text.get_fontsize() * min(1.0, *shares, 1.0))
