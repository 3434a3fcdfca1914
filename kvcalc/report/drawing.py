"""A chart on matplotlib's axes: lines labelled at their ends, points beside them, bars with their sums."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from kvcalc.report.bars import draw_bars, fit_names, past_limits
from kvcalc.report.boxes import Places, leader_boxes, marks_on, taken_places
from kvcalc.report.chart import Chart, Series
from kvcalc.report.grid import follow
from kvcalc.report.heads import Head, fit_heads, write_heads
from kvcalc.report.heat import draw_heat, fit_cells, is_heat
from kvcalc.report.labels import ILL, LINES_OF_NAME, LOST, Room, beside, fitting, ranged
from kvcalc.report.legends import area
from kvcalc.report.looks import DOTTED, colour, dashes, marker, unwrapped, wrapped
from kvcalc.report.scales import room, set_scales, thin_ticks

LINES = ("line", "solid", "dashed", "edge", "trail")
CROWD = 60  # points of a series, beyond which they are small
EARLY = 0.9  # of the width of the axes


class Panel(NamedTuple):
    """One chart's axes, its head, the labels at the ends of its lines, at its points and at its bars, to be put in place."""

    axes: Any
    head: Head
    ends: list[Any]
    points: list[Any]
    sums: list[Any]


def panel(axes: Any, chart: Chart, look: dict[str, Any], width: float, height: float) -> Panel:
    """Draw one chart on axes about so many inches wide and high."""
    from matplotlib.patheffects import withStroke

    head = Head(axes, chart, look, width)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[:].set_in_layout(False)  # ticks and their names reach further
    axes.grid(True, which="major", color=look["ink"], alpha=0.15, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=look["font"])
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set_fontsize(look["font"])
    if is_heat(chart):
        draw_heat(axes, chart, look, width)
        return Panel(axes, head, [], [], [])
    if chart.categories:
        sums = draw_bars(axes, chart, look, room(width, look, 7), height)
        for line in axes.get_lines():  # the levels, that they show on bars
            line.set_path_effects([withStroke(linewidth=0.4 * look["font"], foreground=look["paper"])])
        return Panel(axes, head, [], [], sums)
    set_scales(axes, chart, int(1.5 * room(width, look, 4)))
    axes.yaxis.label.set_text(wrapped(chart.y.title, max(12, int(height * 60 / look["font"])), 2, even=True))
    ends: list[Any] = []
    points: list[Any] = []
    looks = [(number if series.colour < 0 else series.colour, series) for number, series in enumerate(chart.series)]
    for at, series in looks:
        _draw(axes, series, at, look)
    last = max((_end(axes, s) for s in chart.series if s.kind in LINES), default=1.0)
    for at, series in looks:
        points += _point_labels(axes, series, look)
        named = points if series.kind in LINES and _end(axes, series) < EARLY else ends
        named += _end_label(axes, series, at, look, named is points, last)
    return Panel(axes, head, ends, points, [])


def _draw(axes: Any, series: Series, at: int, look: dict[str, Any]) -> None:
    """One series in the look of that number."""
    paint, wide = colour(at, look), look["font"] / 5
    match series.kind:
        case "limit":
            axes.axhline(series.ys[0], color=look["ink"], linestyle=DOTTED, linewidth=0.14 * look["font"])
        case "upright":
            axes.axvline(series.xs[0], color=look["ink"], linestyle=DOTTED, linewidth=0.14 * look["font"])
        case "points" | "hollow" | "quiet points":
            _scatter(axes, series, at, look)
        case "band":
            axes.fill_between(series.xs, series.lows, series.ys, color=paint, alpha=0.18, linewidth=0, zorder=1)
        case "trail":
            axes.plot(series.xs, series.ys, color=paint, linewidth=look["font"] / 4, alpha=0.3, zorder=2)
        case "span":
            broad = {"linewidth": look["font"], "solid_capstyle": "butt"}
            axes.plot(series.xs, series.ys, color=paint, alpha=0.3, zorder=1.6, **broad)
        case "quiet":
            axes.plot(
                series.xs, series.ys, color=look["ink"], linewidth=wide / 2, alpha=0.6 if series.label else 0.25, zorder=1.5
            )
        case kind:
            thin = 0.5 if kind in ("dashed", "edge") else 1.0
            axes.plot(series.xs, series.ys, linestyle=_dashes(series, at), color=paint, linewidth=thin * wide)


def _dashes(series: Series, at: int) -> Any:
    return {"dashed": "--", "solid": "-"}.get(series.kind) or dashes(at)


def _scatter(axes: Any, series: Series, at: int, look: dict[str, Any]) -> None:
    paint, crowd = colour(at, look), len(series.xs) > CROWD
    areas = [area(share, look) for share in series.sizes or (-0.02 if crowd else 0.02,)]
    above = 3.5 - max(series.sizes, default=0.0) / 2  # the small on the large
    faint = 0.85 if crowd or len(series.sizes) > 1 else 1.0  # where points may lie on each other
    filled: dict[str, Any] = {"color": paint, "edgecolors": look["paper"], "alpha": faint, "zorder": above}
    filled |= {"linewidths": 0.3} if crowd else {}
    if series.kind == "hollow":
        inside = "none" if series.sizes else look["paper"]  # of those on a line the line does not show through
        filled = {"facecolors": inside, "edgecolors": paint, "linewidths": 1.5, "alpha": faint, "zorder": above}
    elif series.kind == "quiet points":
        filled = {"color": look["ink"], "edgecolors": "none", "alpha": 0.15, "zorder": 1.5}
    told = any(text.startswith(series.label) for text in series.labels)  # at the points, so that no key needs to
    key = series.label if series.label and not told else None
    axes.scatter(series.xs, series.ys, s=areas, marker=marker(at), label=key, clip_on=False, **filled)


def _point_labels(axes: Any, series: Series, look: dict[str, Any]) -> list[Any]:
    """Texts to stand beside their points; an upright's begins at its top."""
    leader = {"arrowstyle": "-", "color": look["ink"], "linewidth": look["font"] / 16, "alpha": 0.7, "shrinkA": 1}
    radii = [math.sqrt(area(share, look)) / 2 for share in series.sizes] or [2.0] * len(series.labels)
    common = {"textcoords": "offset points", "xytext": (0, 0), "fontsize": look["font"] * 0.85, "zorder": 4, "va": "center"}
    texts = [(x, y, text, "data", r) for x, y, text, r in zip(series.xs, series.ys, series.labels, radii, strict=False)]
    if series.kind == "upright":
        texts = [(series.xs[0], 0.96, series.label, axes.get_xaxis_transform(), 0.0)]
    found = []
    for x, y, text, where, radius in texts:
        if text:
            lines, line = wrapped(text, look["letters"], LINES_OF_NAME, even=True), leader | {"shrinkB": radius}
            found.append(axes.annotate(lines, (x, y), xycoords=where, arrowprops=line, **common))
    for text in found:
        text.set_in_layout(False)  # they stand within the axes
    return found


def _end(axes: Any, series: Series) -> float:
    """Where a line ends, from the left edge of the axes, 0, to the right, 1."""
    low, high, end = axes.xaxis.get_transform().transform([*axes.get_xlim(), series.xs[-1]])
    return float((end - low) / (high - low))


def _end_label(axes: Any, series: Series, at: int, look: dict[str, Any], inside: bool, last: float) -> list[Any]:
    """The name of a line or level, joined to where the line ends: right of the axes, or beside the end.

    last: where lines end on these axes; joined to one that ends before, a line as its own would seem to be more of it.
    """
    if not series.label or series.kind not in (*LINES, "limit", "quiet"):
        return []
    if inside:
        return _point_labels(axes, series._replace(xs=series.xs[-1:], ys=series.ys[-1:], labels=(series.label,)), look)
    if series.kind == "limit":
        return [_outside(axes, series.label, (1.0, series.ys[0]), look["ink"], DOTTED, look)]
    end = series.xs[-1], series.ys[-1]
    if series.kind == "quiet" or _end(axes, series) < last - 0.01:
        return [_thin(_outside(axes, series.label, end, look["ink"], "-", look), look)]
    return [_outside(axes, series.label, end, colour(at, look), _dashes(series, at), look)]


def _thin(text: Any, look: dict[str, Any]) -> Any:
    """A text whose line is of no series."""
    text.arrow_patch.set(linewidth=look["font"] / 16, alpha=0.7)
    return text


def _outside(axes: Any, text: str, place: tuple[float, float], paint: str, dashed: Any, look: dict[str, Any]) -> Any:
    """A text right of the axes, joined to a place on them; a level's place is where it meets the right edge."""
    from matplotlib.transforms import ScaledTranslation

    stub = {"arrowstyle": "-", "color": paint, "linewidth": look["font"] / 8, "linestyle": dashed}
    right = axes.transAxes + ScaledTranslation(1.8 * look["font"] / 72, 0, axes.figure.dpi_scale_trans)
    return axes.annotate(
        wrapped(text, look["letters"], LINES_OF_NAME, even=True), place, xytext=(1, 0.5), textcoords=right,
        xycoords=axes.get_yaxis_transform() if dashed is DOTTED else "data", fontsize=look["font"] * 0.85, va="center", ha="left",
        annotation_clip=False, arrowprops=stub | {"relpos": (0, 0.5), "shrinkA": 2, "shrinkB": 0},
    )  # fmt: skip


def settled(figure: Any, panels: list[Panel], look: dict[str, Any]) -> None:
    """Move every label to its place, once sizes are known; a point's label that finds none goes right of the axes."""
    heads = [one.head for one in panels]
    write_heads(heads)
    figure.get_layout_engine().execute(figure)
    renderer = figure.canvas.get_renderer()
    while (
        sum(past_limits(one.axes, one.sums, renderer) for one in panels)
        or fit_heads(heads, renderer)
        or _beside_lines(figure, panels, look)
    ):  # each turn moves texts out or makes one narrower, so that there is a last one
        figure.get_layout_engine().execute(figure)
    fit_cells([one.axes for one in panels if is_heat(one.head.chart)], renderer)
    for one in panels:
        if not is_heat(one.head.chart):  # whose ticks are names, as those of bars are upwards
            thin_ticks(one.axes.xaxis, renderer, 0.5)
        if not one.head.chart.categories:
            thin_ticks(one.axes.yaxis, renderer, 0.0)
        fit_names(one.axes, one.sums, renderer)
        one.head.align(renderer)
    follow([one.axes for one in panels if not is_heat(one.head.chart)])
    figure.set_layout_engine("none")


def _beside_lines(figure: Any, panels: list[Panel], look: dict[str, Any]) -> int:
    """Put the labels of lines at their ends, in all panels as large, and then those of points beside them; 0 where all have
    found their places, and none has other lines than it was laid out with."""
    renderer = figure.canvas.get_renderer()
    before, full = [text.get_text() for one in panels for text in one.ends], look["font"] * 0.85
    size = min(fitting(one.axes, one.ends, full, one.head.look["letters"], renderer) for one in panels)
    for one in panels:
        ranged(one.axes, one.ends, size, int(one.head.look["letters"] * full / size), renderer)
    if before != [text.get_text() for one in panels for text in one.ends]:
        return 1
    return sum(_beside_points(figure, one, one.head.look) for one in panels)


def _beside_points(figure: Any, one: Panel, look: dict[str, Any]) -> int:
    """The labels of the points of one panel."""
    renderer = figure.canvas.get_renderer()
    lost, ill = _placed(figure, one, one.points, renderer)
    if lost or ill:  # which may choose first
        first = [*lost, *ill]
        again = _placed(figure, one, [*first, *(text for text in one.points if text not in first)], renderer)
        better = (len(again[0]), len(again[1])) < (len(lost), len(ill))
        lost, _ = again if better else _placed(figure, one, one.points, renderer)
    for text in lost:
        one.points.remove(text)
        text.remove()
        if text.xycoords != "data":  # an upright line's, which has no end to be named at
            continue
        one.ends.append(_thin(_outside(one.axes, unwrapped(text.get_text()), text.xy, look["ink"], "-", look), look))
    return len(lost)


def _placed(figure: Any, one: Panel, order: Sequence[Any], renderer: Any) -> tuple[list[Any], list[Any]]:
    """Put the points' labels beside them, one after the other; those that find no place, and no good one."""
    room = Room(taken_places(figure, one.axes), Places.none(), Places.none(), not one.head.look.get("alike"))
    for text in one.ends:
        room.taken.take(leader_boxes(text))
        room.joints.take(leader_boxes(text))
    inside, marks = one.axes.get_window_extent(renderer), marks_on(figure, one.axes, one.points)
    found = [(beside(text, marks, room, inside, renderer), text) for text in order]
    return [text for how, text in found if how == LOST], [text for how, text in found if how == ILL]
