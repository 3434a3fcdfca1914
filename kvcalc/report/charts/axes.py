"""One chart on matplotlib's axes: curves and points, bars, or a heat map, with scales and ticks."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

from kvcalc.records import Record
from kvcalc.report.charts.chart import (
    Axis,
    Chart,
    Series,
    bytes_tick,
    tokens_tick,
    whole_tick,
)
from kvcalc.report.charts.labels import NAME_LETTERS, NAME_LINES, text_box, wrapped
from kvcalc.report.charts.series_styles import (
    DOTTED,
    HATCHES,
    Style,
    colour,
    dashes,
    marker,
)
from kvcalc.units import shown_in

LINES = ("line", "solid", "dashed", "edge", "trail")
CROWD = 60  # points of a series, beyond which they are small
EARLY = 0.9  # share of the axes' width; a line that ends before it is labelled on the axes
FITS, FAILS = "#0072B2", "#D55E00"  # colours of cells
FEW_ROWS = 10  # up to which a name may take several lines
NEAR_LIMIT = 5  # points, the least distance of a text from a limit's line


def marker_area(share: float, style: Style) -> float:
    """Return the area of a marker in square points, for a share from 0 to 1."""
    return (style.font / 10) ** 2 * (30 + 600 * share)


def row_names(chart: Chart) -> list[str]:
    """Return the names of the rows of bars or cells."""
    names = [s.label for s in chart.series] if chart.is_heat else chart.categories
    width = NAME_LETTERS if len(names) <= FEW_ROWS else 2 * NAME_LETTERS
    return [wrapped(name, width, 3, even=True) for name in names]


class Panel:
    """The axes of one chart and the labels to place once the sizes are known.

    Attributes:
        ends: Labels of lines, right of the axes.
        points: Labels of points, on the axes.
        sums: Texts at the ends of bars.
        cells: Texts of a heat map.
    """

    def __init__(
        self, axes: Any, chart: Chart, style: Style, width: float, height: float
    ) -> None:
        """Draw a chart on axes about `width` by `height` inches large."""
        self.axes, self.chart, self.style = axes, chart, style
        self.width, self.height = width, height
        self.ends: list[Any] = []
        self.points: list[Any] = []
        self.sums: list[Any] = []
        self.cells: list[Any] = []
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[:].set_in_layout(False)
        axes.grid(
            True,
            which="major",
            color=style.ink,
            alpha=0.15,
            linewidth=0.6,
        )
        axes.set_axisbelow(True)
        axes.tick_params(labelsize=style.font)
        axes.set_xlabel(chart.x.title, fontsize=style.font)
        letters = max(12, int(height * 60 / style.font))
        axes.set_ylabel(wrapped(chart.y.title, letters, 2, even=True), fontsize=style.font)
        if chart.is_heat:
            self._draw_cells()
        elif chart.categories:
            self._draw_bars()
        else:
            self._draw_curves()

    def _draw_curves(self) -> None:
        axes, style = self.axes, self.style
        max_ticks = int(1.5 * self.max_ticks(4))
        set_scale(axes, self.chart, "x", min(max_ticks, 14))
        set_scale(axes, self.chart, "y", 14)
        line_ends = {}
        for number, series in enumerate(self.chart.series):
            number = number if series.colour < 0 else series.colour
            draw_series(axes, series, number, style)
            self._label_points(series)
            if series.kind in LINES:
                low, high, end = axes.xaxis.get_transform().transform(
                    [*axes.get_xlim(), series.xs[-1]]
                )
                line_ends[series] = (end - low) / (high - low)
        last = max(line_ends.values(), default=1.0)
        for number, series in enumerate(self.chart.series):
            if not series.label or series.kind not in (*LINES, "limit", "quiet"):
                continue
            end = line_ends.get(series, 1.0)
            place = (series.xs or (1.0,))[-1], series.ys[-1]
            if series.kind in LINES and end < EARLY:
                named = Series(
                    "",
                    place[:1],
                    place[1:],
                    "points",
                    labels=(series.label,),
                )
                self._label_points(named)
                continue
            paint, width = style.ink, style.font / 16
            dashed: Any = "-"
            if series.kind == "limit":
                dashed, width = DOTTED, style.font / 8
            elif series.kind in LINES and end > last - 0.01:
                number = number if series.colour < 0 else series.colour
                paint, dashed = colour(number, style), line_dashes(series, number)
                width = style.font / 8
            self._label_end(series, place, (paint, dashed, width))

    def _label_points(self, series: Series) -> None:
        """Add the labels of points, or of an upright line, to be placed later."""
        style = self.style
        radii = [math.sqrt(marker_area(share, style)) / 2 for share in series.sizes]
        radii = radii or [2.0] * len(series.labels)
        texts = list(
            zip(
                series.xs,
                series.ys,
                series.labels,
                radii,
                strict=False,
            )
        )
        system: Any = "data"
        if series.kind == "upright":
            texts = [(series.xs[0], 0.96, series.label, 0.0)]
            system = self.axes.get_xaxis_transform()
        for x, y, text, radius in texts:
            if not text:
                continue
            leader = {
                "arrowstyle": "-",
                "color": style.ink,
                "linewidth": style.font / 16,
            }
            label = self.axes.annotate(
                wrapped(text, style.letters, NAME_LINES, even=True),
                (x, y),
                xycoords=system,
                xytext=(0, 0),
                textcoords="offset points",
                fontsize=style.font * 0.85,
                zorder=4,
                va="center",
                arrowprops=leader | {"alpha": 0.7, "shrinkA": 1, "shrinkB": radius},
            )
            label.set_in_layout(False)
            label.kvcalc_text = text
            self.points.append(label)

    def move_out(self, text: Any) -> None:
        """Move the label of a point right of the axes."""
        self.points.remove(text)
        text.remove()
        line = self.style.ink, "-", self.style.font / 16
        self._label_end(Series(text.kvcalc_text, (), (), "points"), text.xy, line)

    def _label_end(
        self, series: Series, place: tuple[float, float], line: tuple[str, Any, float]
    ) -> None:
        """Add the name of a line or limit right of the axes, joined to the line's end."""
        from matplotlib.transforms import ScaledTranslation

        axes, font = self.axes, self.style.font
        gap = ScaledTranslation(1.8 * font / 72, 0, axes.figure.dpi_scale_trans)
        leader = dict(zip(("color", "linestyle", "linewidth"), line, strict=True))
        label = axes.annotate(
            wrapped(series.label, self.style.letters, NAME_LINES, even=True),
            place,
            xycoords=axes.get_yaxis_transform() if series.kind == "limit" else "data",
            xytext=(1, 0.5),
            textcoords=axes.transAxes + gap,
            fontsize=font * 0.85,
            va="center",
            ha="left",
            annotation_clip=False,
            arrowprops=leader
            | {"arrowstyle": "-", "relpos": (0, 0.5), "shrinkA": 2, "shrinkB": 0},
        )
        label.kvcalc_text = series.label
        self.ends.append(label)

    def max_ticks(self, characters: int) -> int:
        """Return how many ticks of so many characters fit on the x axis."""
        return max(3, int(self.width * 0.6 * 72 / (self.style.font * (0.6 * characters + 1))))

    def _draw_bars(self) -> None:
        axes, chart, style = self.axes, self.chart, self.style
        count, size = len(chart.categories), style.font * 0.85
        totals = [0.0] * count
        parts = [s for s in chart.series if s.kind == "bar"]
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
        limits = [s for s in chart.series if s.kind == "limit"]
        longest = max([*totals, *chart.y.shown, *(s.ys[0] for s in limits)])
        row = 0.0215 * max(count, 4) * style.font / self.height  # height of a name, in bars
        self._draw_limits(limits, longest, row)
        axes.set_yticks(range(count), row_names(chart))
        axes.set_ylim(count - 0.5, -0.6 - row * (1.2 * len(limits) + 0.2) if limits else -0.5)
        axes.set_ylabel("")
        axes.set_xlabel(chart.y.title)
        axes.grid(False, axis="y")
        axes.xaxis.set_major_formatter(lambda value, _: chart.y.tick(value))
        axes.set_xlim(0, 1.04 * longest or 1)
        max_ticks = self.max_ticks(7)
        if chart.y.tick is bytes_tick and shown_in() == "gib":
            step = 2 ** math.ceil(math.log2(longest / min(max_ticks, 8)))
            axes.set_xticks([n * step for n in range(int(1.04 * longest / step) + 1)])
        else:
            axes.locator_params(axis="x", nbins=min(max_ticks, 5))
        texts = parts[-1].labels or tuple(map(chart.y.tick, totals))
        for number, text in enumerate(texts):
            if text:
                label = axes.annotate(
                    text,
                    (totals[number], number),
                    xytext=(max(4, 0.4 * style.font), 0),
                    textcoords="offset points",
                    va="center",
                    fontsize=size,
                )
                self.sums.append(label)

    def _draw_limits(self, limits: list[Series], longest: float, row: float) -> None:
        """Draw limits through all bars, with their names above each other.

        Args:
            limits: The limits.
            longest: Length of the longest bar or limit.
            row: Height of a name, in bars.
        """
        from matplotlib.patheffects import withStroke

        axes, font = self.axes, self.style.font
        size, count = font * 0.85, len(self.chart.categories)
        letters = 0.8 * axes.get_window_extent().width * 72 / axes.figure.dpi / (0.6 * size)
        # names are left of their lines if all have room there
        is_left = all(s.ys[0] > max(0.5, len(s.label) / letters) * longest for s in limits)
        limits.sort(key=lambda s: s.ys[0] if is_left else -s.ys[0])
        for number, series in enumerate(limits):
            level = series.ys[0]
            top = -0.6 - row * (1.2 * number + 0.6)
            (line,) = axes.plot((level, level), (top, count - 0.5), color=self.style.ink)
            line.set(linestyle=DOTTED, linewidth=0.16 * font)
            line.set_path_effects(
                [withStroke(linewidth=0.4 * font, foreground=self.style.paper)]
            )
            axes.annotate(
                series.label,
                (level, top),
                xytext=(-5 if is_left else 4, 0),
                textcoords="offset points",
                ha="right" if is_left else "left",
                va="center",
                fontsize=size,
            )

    def _draw_cells(self) -> None:
        """Draw cells: 0 to 1 in shades of one colour, negative ones in another."""
        from matplotlib.colors import to_rgb

        axes, chart, style = self.axes, self.chart, self.style
        paper, count = to_rgb(style.paper), len(chart.categories)

        def shade(value: float) -> list[float]:
            depth = 0.3 + 0.65 * value
            if value < 0:
                depth = 0.15 if sum(paper) > 1.5 else 0.3
            ink = to_rgb(FAILS if value < 0 else FITS)
            return [p + (c - p) * depth for p, c in zip(paper, ink, strict=True)]

        shades = [[shade(value) for value in s.ys] for s in chart.series]
        axes.grid(False)
        axes.imshow(shades, aspect="auto", origin="lower", interpolation="nearest")
        for row, series in enumerate(chart.series):
            for column, text in enumerate(series.labels):
                ink = "white" if sum(shades[row][column]) < 1.5 else "#1a1a1a"
                cell = axes.text(
                    column,
                    row,
                    text,
                    color=ink,
                    ha="center",
                    va="center",
                )
                cell.set(fontsize=style.font * 0.85, in_layout=False)
                self.cells.append(cell)
        letters = max(6, int(0.85 * self.width * 72 / (count * 0.6 * style.font)))
        names = [wrapped(name, letters, 6, even=True) for name in chart.categories]
        axes.set_xlim(-0.5, count - 0.5)
        axes.set_xticks(range(count), names)
        axes.set_yticks(range(len(chart.series)), row_names(chart))

    def move_sums(self, renderer: Any) -> bool:
        """Move texts at bars past the limits that would run through them; return if any moved."""
        axes, has_moved = self.axes, False
        limits = sorted(float(line.get_xdata()[0]) for line in axes.get_lines())
        for text in self.sums:
            text.update_positions(renderer)
            right = text_box(text, renderer).x1 + NEAR_LIMIT * axes.figure.dpi / 72
            for limit in limits:
                if limit > text.xy[0] and axes.transData.transform((limit, 0))[0] <= right:
                    text.xy, has_moved = (limit, text.xy[1]), True
                    text.set_position((NEAR_LIMIT + 2, 0))
                    break
        return has_moved

    def fit_rows(self, renderer: Any) -> None:
        """Make the names of rows, and the texts of bars and cells, as small as rows are close."""
        (x0, y0), (x1, y1) = self.axes.transData.transform([(0, 0), (1, 1)])
        room = abs(y1 - y0)
        for texts in (self.axes.get_yticklabels(), self.sums):
            heights = [text_box(text, renderer).height for text in texts if text.get_text()]
            share = min(1.0, room / (1.15 * max(heights, default=1.0)))
            for text in texts:
                text.set_fontsize(text.get_fontsize() * share)
        if self.cells:
            boxes = [text_box(text, renderer) for text in self.cells]
            share = min(
                0.9 * room / max(box.height for box in boxes),
                0.9 * abs(x1 - x0) / max(box.width for box in boxes),
            )
            for text in self.cells:
                text.set_fontsize(text.get_fontsize() * min(1.0, share))
            names = self.axes.get_xticklabels()
            widest = max(text_box(name, renderer).width for name in names)
            for name in names:
                name.set_fontsize(name.get_fontsize() * min(1.0, 0.95 * abs(x1 - x0) / widest))


def line_dashes(series: Series, number: int) -> Any:
    """Return the dashes of a line in the style of that number."""
    return {"dashed": "--", "solid": "-"}.get(series.kind) or dashes(number)


def draw_series(axes: Any, series: Series, number: int, style: Style) -> None:
    """Draw one series in the style of that number."""
    paint, width, xs, ys = colour(number, style), style.font / 5, series.xs, series.ys
    match series.kind:
        case "limit":
            axes.axhline(ys[0], color=style.ink, linestyle=DOTTED, linewidth=0.7 * width)
        case "upright":
            axes.axvline(xs[0], color=style.ink, linestyle=DOTTED, linewidth=0.7 * width)
        case "points" | "hollow" | "quiet points":
            _draw_markers(axes, series, number, style)
        case "band":
            axes.fill_between(
                xs,
                series.lows,
                ys,
                color=paint,
                alpha=0.18,
                linewidth=0,
                zorder=1,
            )
        case "trail":
            axes.plot(
                xs,
                ys,
                color=paint,
                alpha=0.3,
                linewidth=1.25 * width,
                zorder=2,
            )
        case "span":
            (line,) = axes.plot(
                xs,
                ys,
                color=paint,
                alpha=0.3,
                linewidth=style.font,
                zorder=1.6,
            )
            line.set_solid_capstyle("butt")
        case "quiet":
            alpha = 0.6 if series.label else 0.25
            axes.plot(
                xs,
                ys,
                color=style.ink,
                alpha=alpha,
                linewidth=width / 2,
                zorder=1.5,
            )
        case kind:
            thin = 0.5 if kind in ("dashed", "edge") else 1.0
            line = axes.plot(xs, ys, linestyle=line_dashes(series, number), color=paint)
            line[0].set_linewidth(thin * width)


def _draw_markers(axes: Any, series: Series, number: int, style: Style) -> None:
    is_crowd = len(series.xs) > CROWD
    sizes = series.sizes or (-0.02 if is_crowd else 0.02,)
    alpha = 0.85 if is_crowd or len(series.sizes) > 1 else 1.0
    paint: Record = {"color": colour(number, style), "edgecolors": style.paper}
    if is_crowd:
        paint["linewidths"] = 0.3
    if series.kind == "hollow":
        inside = "none" if series.sizes else style.paper  # hides the line below
        paint = {"facecolors": inside, "edgecolors": paint["color"], "linewidths": 1.5}
    elif series.kind == "quiet points":
        paint, alpha = {"color": style.ink, "edgecolors": "none"}, 0.15
    is_named = any(text.startswith(series.label) for text in series.labels)
    axes.scatter(
        series.xs,
        series.ys,
        s=[marker_area(share, style) for share in sizes],
        marker=marker(number),
        label=series.label if series.label and not is_named else None,
        clip_on=False,
        alpha=alpha,
        zorder=3.5 - max(sizes) / 2,  # small markers over large ones
        **paint,
    )


# ticks within a decade, from the most to the fewest
DECADE_TICKS = (
    tuple(range(1, 10)),
    (1, 1.5, 2, 3, 4, 5, 6, 8),
    (1, 1.5, 2, 3, 5, 7),
    (1, 2, 3, 5),
    (1, 2, 5),
    (1, 3),
)


def axis_values(chart: Chart, name: str) -> list[float]:
    """Return all values on an axis, `x` or `y`."""
    axis = getattr(chart, name)
    values: list[float] = []
    for series in chart.series:
        if name == "x":
            values += series.xs
        elif series.kind != "upright":
            values += [*series.ys, *series.lows]
    return [value for value in values if value > 0 or not axis.log] + [*axis.shown]


def set_scale(axes: Any, chart: Chart, name: str, max_ticks: int) -> None:
    """Set the scale, limits and ticks of an axis, `x` or `y`."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

    spec: Axis = getattr(chart, name)
    axis, values = getattr(axes, f"{name}axis"), axis_values(chart, name)
    low, high = min(values), max(values)
    if not spec.log:
        axis.set_major_formatter(lambda value, _: spec.tick(value))
        if name == "x":
            is_whole = all(value == int(value) for value in values)
            axes.locator_params(axis="x", nbins=min(max_ticks, 9), integer=is_whole)
        elif low >= 0:
            axes.set_ylim(0, 1.08 * high or 1)
            axes.locator_params(axis="y", integer=spec.tick is whole_tick)
        return
    beyond = max(1.15, min(1.7, (high / low) ** (1 / 12)))
    has_end_labels = any(s.kind in (*LINES, "quiet") and s.label for s in chart.series)
    low /= min(beyond, 1.4)
    high *= 1.05 if name == "x" and has_end_labels else beyond
    is_binary = spec.tick is tokens_tick or (spec.tick is bytes_tick and shown_in() == "gib")
    base = 10
    steps: tuple[float, ...] = (1.0,)
    if is_binary:
        base = 2 if high / low < 2**12 else 8 if high / low < 2**24 else 32
    elif high / low >= 2.6:
        steps = _decade_ticks(low, high, max_ticks)
    getattr(axes, f"set_{name}scale")("log", base=base)
    getattr(axes, f"set_{name}lim")(low, high)
    if is_binary or high / low >= 2.6:
        axis.set_major_locator(LogLocator(base=base, subs=steps, numticks=max_ticks))
    else:
        axis.set_major_locator(MaxNLocator(min(max_ticks, 6), steps=[1, 2, 5, 10]))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(lambda value, _: spec.tick(value))


def _decade_ticks(low: float, high: float, max_ticks: int) -> tuple[float, ...]:
    """Return the most ticks per decade that leave room for `max_ticks`.

    Ticks that leave more than 0.4 of the axis empty lose to ticks that leave less.
    """
    decades, candidates = math.log10(high / low), []
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in DECADE_TICKS if decades < 3.3 else ():
        places = [math.log10(step * 10.0**p / low) / decades for p in powers for step in steps]
        ticks = [place for place in places if 0 <= place <= 1]
        gaps = [b - a for a, b in itertools.pairwise((0.0, *ticks, 1.0))]
        if len(ticks) > 1 and min(gaps[1:-1]) >= 1 / max_ticks:
            candidates.append((max(gaps), tuple(map(float, steps))))
    fine = [steps for gap, steps in candidates if gap <= 0.4]
    return fine[0] if fine else min(candidates, default=(0.0, (1.0,)))[1]


def thin_ticks(axis: Any, renderer: Any, gap: float) -> None:
    """Remove every other tick until their texts are at least `gap` heights apart."""
    across = int(axis.axis_name == "y")
    low, high = sorted(axis.get_view_interval())
    while axis.get_ticklabels():
        ticks = zip(axis.get_majorticklocs(), axis.get_ticklabels(), strict=True)
        boxes = {at: t.get_window_extent(renderer) for at, t in ticks if low <= at <= high}
        order = sorted(boxes)
        pairs = list(itertools.pairwise(boxes[at] for at in order))
        if len(order) < 3 or all(
            a.max[across] + gap * a.height < b.min[across] for a, b in pairs
        ):
            return
        axis.set_ticks(order[::2])


def share_ticks(panels: Sequence[Panel]) -> None:
    """Give equal axes the ticks of the panel that has the fewest."""
    for name in ("xaxis", "yaxis"):
        axes = [getattr(panel.axes, name) for panel in panels]
        fewest: Any = None
        for axis in axes:
            low, high = sorted(axis.get_view_interval())
            ticks = [at for at in axis.get_majorticklocs() if low <= at <= high]
            if fewest is None or len(ticks) < len(fewest):
                fewest = ticks
        for axis in axes:
            axis.set_ticks(fewest)
