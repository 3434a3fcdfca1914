"""A chart on matplotlib's axes: lines labelled at their ends, points beside them, bars with their sums, keys outside."""

from typing import Any, NamedTuple

from kvcalc.report.bars import draw_bars, fit_names, past_limits
from kvcalc.report.chart import Chart, Series
from kvcalc.report.heads import Head, fit_heads, write_heads
from kvcalc.report.heat import draw_heat, is_heat
from kvcalc.report.labels import Places, beside, leader_boxes, spread, taken_places, text_box
from kvcalc.report.looks import DOTTED, NAME, colour, dashes, marker, wrapped
from kvcalc.report.scales import room, set_scales, thin_ticks


class Panel(NamedTuple):
    """One chart's axes, its head, the labels at the ends of its lines, at its points and at its bars, to be put in place."""

    axes: Any
    head: Head
    ends: list[Any]
    points: list[Any]
    sums: list[Any]


def panel(axes: Any, chart: Chart, look: dict[str, Any], width: float, height: float) -> Panel:
    """Draw one chart on axes about so many inches wide and high."""
    head = Head(axes, chart, look, width)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, which="major", color=look["ink"], alpha=0.15, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=look["font"])
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set_fontsize(look["font"])
    if is_heat(chart):
        draw_heat(axes, chart, look)
        return Panel(axes, head, [], [], [])
    if chart.categories:
        return Panel(axes, head, [], [], draw_bars(axes, chart, look, room(width, look, 7), height))
    set_scales(axes, chart, int(1.5 * room(width, look, 4)))
    ends: list[Any] = []
    points: list[Any] = []
    for number, series in enumerate(chart.series):
        at = number if series.colour < 0 else series.colour
        _draw(axes, series, at, look)
        points += _point_labels(axes, series, look)
        ends += _end_label(axes, series, at, look)
    return Panel(axes, head, ends, points, [])


def _draw(axes: Any, series: Series, at: int, look: dict[str, Any]) -> None:
    """One series in the look of that number."""
    paint, wide = colour(at), look["font"] / 5
    match series.kind:
        case "limit":
            axes.axhline(series.ys[0], color=look["ink"], linestyle=DOTTED, linewidth=1.4)
        case "upright":
            axes.axvline(series.xs[0], color=look["ink"], linestyle=DOTTED, linewidth=1.4)
        case "points" | "hollow" | "quiet points":
            _scatter(axes, series, at, look)
        case "band":
            axes.fill_between(series.xs, series.lows, series.ys, color=paint, alpha=0.22, linewidth=0, zorder=1)
        case "trail":
            axes.plot(series.xs, series.ys, color=paint, linewidth=look["font"] / 4, alpha=0.3, zorder=2)
        case "quiet":
            axes.plot(series.xs, series.ys, color=look["ink"], linewidth=wide / 2, alpha=0.25, zorder=1.5)
        case kind:
            thin = 0.5 if kind in ("dashed", "edge") else 1.0
            axes.plot(series.xs, series.ys, linestyle=_dashes(series, at), color=paint, linewidth=thin * wide)


def _dashes(series: Series, at: int) -> Any:
    return {"dashed": "--", "solid": "-"}.get(series.kind) or dashes(at)


def _scatter(axes: Any, series: Series, at: int, look: dict[str, Any]) -> None:
    scale, paint = (look["font"] / 10) ** 2, colour(at)
    areas = [scale * (30 + 900 * s) for s in series.sizes] if series.sizes else scale * 50
    filled: dict[str, Any] = {"color": paint, "edgecolors": look["paper"], "alpha": 0.85, "zorder": 3}
    if series.kind == "hollow":
        filled = {"facecolors": "none", "edgecolors": paint, "linewidths": 1.5, "alpha": 0.85, "zorder": 3}
    elif series.kind == "quiet points":
        filled = {"color": look["ink"], "edgecolors": "none", "alpha": 0.15, "zorder": 1.5}
    axes.scatter(series.xs, series.ys, s=areas, marker=marker(at), label=series.label or None, **filled)


def _point_labels(axes: Any, series: Series, look: dict[str, Any]) -> list[Any]:
    """Texts to stand beside their points; an upright's begins at its top."""
    leader = {"arrowstyle": "-", "color": look["ink"], "linewidth": look["font"] / 16, "alpha": 0.7, "shrinkA": 1, "shrinkB": 2}
    common = {"textcoords": "offset points", "xytext": (0, 0), "fontsize": look["font"] * 0.85, "zorder": 4, "va": "center"}
    texts = [(x, y, text, "data") for x, y, text in zip(series.xs, series.ys, series.labels, strict=False)]
    if series.kind == "upright":
        texts = [(series.xs[0], 0.96, series.label, axes.get_xaxis_transform())]
    found = [
        axes.annotate(wrapped(text, NAME, 3, even=True), (x, y), xycoords=where, arrowprops=leader, **common)
        for x, y, text, where in texts
        if text
    ]
    for text in found:
        text.set_in_layout(False)  # they stand within the axes
    return found


def _end_label(axes: Any, series: Series, at: int, look: dict[str, Any]) -> list[Any]:
    """The name of a line or level, right of the axes, joined to where the line ends."""
    if not series.label or series.kind not in ("line", "solid", "dashed", "edge", "trail", "limit"):
        return []
    if series.kind == "limit":
        return [_outside(axes, series.label, (1.0, series.ys[0]), look["ink"], DOTTED, look)]
    return [_outside(axes, series.label, (series.xs[-1], series.ys[-1]), colour(at), _dashes(series, at), look)]


def _outside(axes: Any, text: str, place: tuple[float, float], paint: str, dashed: Any, look: dict[str, Any]) -> Any:
    """A text right of the axes, joined to a place on them; a level's place is where it meets the right edge."""
    from matplotlib.transforms import ScaledTranslation

    stub = {"arrowstyle": "-", "color": paint, "linewidth": look["font"] / 8, "linestyle": dashed}
    right = axes.transAxes + ScaledTranslation(1.8 * look["font"] / 72, 0, axes.figure.dpi_scale_trans)
    return axes.annotate(
        wrapped(text, NAME, 3, even=True), place, xycoords=axes.get_yaxis_transform() if dashed is DOTTED else "data",
        textcoords=right, xytext=(1, 0.5), fontsize=look["font"] * 0.85, va="center", ha="left",
        annotation_clip=False, arrowprops=stub | {"relpos": (0, 0.5), "shrinkA": 2, "shrinkB": 0},
    )  # fmt: skip


def legend(figure: Any, look: dict[str, Any]) -> None:
    """A key of points and of parts of bars, below the axes; lines need none."""
    found: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(wrapped(label, 48, 2), handle)
    if not found:
        return
    longest = max(len(line) for label in found for line in label.split("\n"))
    columns = max(1, int(figure.get_size_inches()[0] * 130 / look["font"] / (longest + 6)))
    key = figure.legend(
        list(found.values()), list(found), loc="outside lower center", ncols=min(columns, len(found)), frameon=False,
        fontsize=look["font"] * 0.85,
    )  # fmt: skip
    for handle in key.legend_handles:
        if hasattr(handle, "set_sizes"):
            handle.set_sizes([look["font"] * 4])


def settled(figure: Any, panels: list[Panel], look: dict[str, Any]) -> None:
    """Move every label to its place, once sizes are known; a point's label that finds none goes right of the axes."""
    heads = [one.head for one in panels]
    write_heads(heads)
    figure.draw_without_rendering()
    if fit_heads(heads, figure.canvas.get_renderer()):
        figure.draw_without_rendering()
    while sum(_beside_points(figure, one, look) for one in panels):  # each turn moves a label out, so that there is a last one
        figure.draw_without_rendering()
    renderer = figure.canvas.get_renderer()
    for one in panels:
        if not is_heat(one.head.chart):  # whose ticks are names, as those of bars are upwards
            thin_ticks(one.axes.xaxis, renderer, 0.5)
        if not one.head.chart.categories:
            thin_ticks(one.axes.yaxis, renderer, 0.0)
        fit_names(one.axes, one.sums, renderer)
        past_limits(one.axes, one.sums, renderer)
    figure.set_layout_engine("none")


def _beside_points(figure: Any, one: Panel, look: dict[str, Any]) -> int:
    """Put the points' labels beside them, apart from those right of the axes; how many found no place and were moved out."""
    renderer = figure.canvas.get_renderer()
    _ranged(one, renderer)
    taken, texts = taken_places(figure, one.axes), Places.none()
    for text in one.ends:
        taken.take(leader_boxes(text))
    inside = one.axes.get_window_extent(renderer)
    lost = [text for text in one.points if not beside(text, taken, texts, inside, renderer)]
    for text in lost:
        one.points.remove(text)
        text.remove()
        if text.xycoords != "data":  # an upright line's, which has no end to be named at
            continue
        one.ends.append(_outside(one.axes, text.get_text().replace("\n", " "), text.xy, look["ink"], (0, (1, 3)), look))
    return len(lost)


def _ranged(one: Panel, renderer: Any) -> None:
    """Labels right of the axes, each as near to the height of its line's end as the others leave room."""
    axes, labels = one.axes, one.ends
    if not labels:
        return
    frame = axes.get_window_extent(renderer)
    wanted = [axes.transData.transform((0.0 if axes.get_xscale() == "linear" else 1.0, t.xy[1]))[1] for t in labels]
    heights = [text_box(t, renderer).height * 1.12 for t in labels]
    shrink = min(1.0, frame.height / sum(heights))
    for text in labels:
        text.set_fontsize(text.get_fontsize() * shrink)
    centres = spread(wanted, [h * shrink for h in heights], frame.y0, frame.y1)
    for text, centre in zip(labels, centres, strict=True):
        text.set_position((1, (centre - frame.y0) / frame.height))
