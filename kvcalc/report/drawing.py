"""A chart on matplotlib's axes: lines labelled at their ends, points beside them, bars with their sums, keys outside."""

import itertools
import textwrap
from typing import Any, NamedTuple

from kvcalc.report.chart import Chart, Series, bytes_tick
from kvcalc.report.heat import draw_heat, is_heat
from kvcalc.report.labels import beside, spread, taken_places, text_box
from kvcalc.report.scales import room, set_scales, step_of

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F", "#B8A000")
LINES, MARKERS, HATCHES = ("-", "--", "-.", ":"), ("o", "s", "^", "D", "v", "P", "X", "*"), ("", "//", "..", "xx", "\\\\", "++")
DOTTED = (0, (1, 1))
NAME = 26  # characters of a line of a label or of a bar's name


class Panel(NamedTuple):
    """One chart's axes, the labels at the ends of its lines, at its points and at its bars, to be put in place."""

    axes: Any
    ends: list[Any]
    points: list[Any]
    sums: list[Any]


def panel(axes: Any, chart: Chart, look: dict[str, Any], width: float) -> Panel:
    """Draw one chart on axes that are about `width` inches wide."""
    title = _wrapped(chart.title, int(width * 95 / look["font"]), 2)
    lines = _wrapped(chart.subtitle, int(width * 120 / look["font"]), 3)
    pad = look["font"] * (0.9 + 1.1 * (lines.count("\n") + 1 if lines else 0))
    axes.set_title(title, loc="left", fontweight="bold", fontsize=look["font"] * 1.2, pad=pad)
    subtitle = axes.text(0, 1.015, lines, transform=axes.transAxes, fontsize=look["font"] * 0.8, va="bottom")
    subtitle.set_in_layout(False)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, which="major", color=look["ink"], alpha=0.15, linewidth=0.6)
    axes.set_axisbelow(True)
    if is_heat(chart):
        draw_heat(axes, chart, look)
        return Panel(axes, [], [], [])
    if chart.categories:
        return Panel(axes, [], [], _bars(axes, chart, look, room(width, look, 7)))
    set_scales(axes, chart, room(width, look, 4))
    ends: list[Any] = []
    points: list[Any] = []
    for number, series in enumerate(chart.series):
        _draw(axes, series, number, look)
        points += _point_labels(axes, series, look)
        ends += _end_label(axes, series, number, look)
    return Panel(axes, ends, points, [])


def _wrapped(text: str, width: int, most: int) -> str:
    return "\n".join(textwrap.wrap(text, max(width, 12), max_lines=most, placeholder=" …"))


def _colour(series: Series, number: int) -> tuple[int, str]:
    at = number if series.colour < 0 else series.colour
    return at, PALETTE[at % len(PALETTE)]


def _dashes(series: Series, at: int) -> Any:
    """No two of 32 lines look the same: where colours come round again, the dashes are others."""
    return "--" if series.kind == "dashed" else LINES[(at + at // len(PALETTE)) % len(LINES)]


def _draw(axes: Any, series: Series, number: int, look: dict[str, Any]) -> None:
    at, colour = _colour(series, number)
    if series.kind == "limit":
        axes.axhline(series.ys[0], color=look["ink"], linestyle=DOTTED, linewidth=1.4)
    elif series.kind in ("points", "hollow"):
        scale = (look["font"] / 10) ** 2
        areas = [scale * (30 + 900 * s) for s in series.sizes] if series.sizes else scale * 50
        filled = {"color": colour, "edgecolors": look["paper"]} if series.kind == "points" else {
            "facecolors": "none", "edgecolors": colour, "linewidths": 1.5,
        }  # fmt: skip
        marker = MARKERS[(at + at // len(PALETTE)) % len(MARKERS)]
        axes.scatter(series.xs, series.ys, s=areas, alpha=0.85, marker=marker, label=series.label or None, zorder=3, **filled)
    elif series.kind == "trail":
        axes.plot(series.xs, series.ys, color=colour, linewidth=look["font"] / 4, alpha=0.3, zorder=2)
    else:
        axes.plot(series.xs, series.ys, linestyle=_dashes(series, at), color=colour, linewidth=look["font"] / 5)


def _point_labels(axes: Any, series: Series, look: dict[str, Any]) -> list[Any]:
    texts = zip(series.xs, series.ys, series.labels, strict=False)
    size = look["font"] * 0.85
    return [
        axes.annotate(
            _wrapped(t, NAME, 3), (x, y), textcoords="offset points", xytext=(0, 0), fontsize=size, zorder=4, va="center"
        )
        for x, y, t in texts
        if t
    ]


def _end_label(axes: Any, series: Series, number: int, look: dict[str, Any]) -> list[Any]:
    """The name of a line or level, right of the axes, joined to where the line ends."""
    if not series.label or series.kind not in ("line", "dashed", "limit"):
        return []
    at, colour = _colour(series, number)
    if series.kind == "limit":
        return [_outside(axes, series.label, (1.0, series.ys[0]), look["ink"], DOTTED, look)]
    return [_outside(axes, series.label, (series.xs[-1], series.ys[-1]), colour, _dashes(series, at), look)]


def _outside(axes: Any, text: str, place: tuple[float, float], colour: str, dashes: Any, look: dict[str, Any]) -> Any:
    """A text right of the axes, joined to a place on them; a level's place is where it meets the right edge."""
    stub = {"arrowstyle": "-", "color": colour, "linewidth": look["font"] / 8, "linestyle": dashes}
    return axes.annotate(
        _wrapped(text, NAME, 3), place, xycoords=axes.get_yaxis_transform() if dashes is DOTTED else "data",
        textcoords="axes fraction", xytext=(1.03, 0.5), fontsize=look["font"] * 0.85, va="center", ha="left",
        annotation_clip=False, arrowprops=stub | {"relpos": (0, 0.5), "shrinkA": 2, "shrinkB": 0},
    )  # fmt: skip


def _bars(axes: Any, chart: Chart, look: dict[str, Any], ticks: int) -> list[Any]:
    """Stacked bars with their sums, and limits as lines that rise to their names above the bars."""
    base = [0.0] * len(chart.categories)
    for number, series in enumerate(s for s in chart.series if s.kind == "bar"):
        axes.barh(range(len(base)), series.ys, left=base, color=PALETTE[number % len(PALETTE)], label=series.label,
                  hatch=HATCHES[number % len(HATCHES)], edgecolor=look["paper"])  # fmt: skip
        base = [b + y for b, y in zip(base, series.ys, strict=True)]
    limits = sorted((s for s in chart.series if s.kind == "limit"), key=lambda s: -s.ys[0])
    size = look["font"] * 0.85
    row = 0.045 * max(len(base), 4) * size / 8.5  # height of a limit's name, in bars
    for number, series in enumerate(limits):
        level, top = series.ys[0], -0.6 - row * (1.2 * number + 0.6)
        axes.plot((level, level), (top, len(base) - 0.5), color=look["ink"], linestyle=DOTTED, linewidth=1.6)
        axes.annotate(series.label, (level, top), textcoords="offset points", xytext=(4, 0), fontsize=size, va="center")
    axes.set_yticks(range(len(base)), [_wrapped(name, NAME, 3) for name in chart.categories])
    axes.set_ylim(len(base) - 0.5, -0.6 - row * (1.2 * len(limits) + 0.2) if limits else -0.5)
    axes.set_xlabel(chart.y.title)
    axes.xaxis.set_major_formatter(lambda v, _: chart.y.tick(v))
    most = max([*base, *(s.ys[0] for s in limits)])
    if chart.y.tick is bytes_tick:
        step = step_of(most, min(ticks - 1, 8))
        axes.set_xticks([n * step for n in range(int(most / step) + 2)])
    else:
        axes.locator_params(axis="x", nbins=min(ticks, 5))
    axes.grid(False, axis="y")
    sums = enumerate(base) if not any(s.label == "left" for s in chart.series) else ()
    return [
        axes.annotate(chart.y.tick(total), (total, i), textcoords="offset points", xytext=(4, 0), fontsize=size, va="center")
        for i, total in sums
    ]


def legend(figure: Any, look: dict[str, Any]) -> None:
    """A key of points and of parts of bars, below the axes; lines need none."""
    found: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(_wrapped(label, 48, 2), handle)
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
    lost = 1
    while lost:  # each turn moves a label out, so that there are as many turns as labels at most
        figure.draw_without_rendering()
        lost = sum(_beside_points(figure, one, look) for one in panels)
    renderer = figure.canvas.get_renderer()
    for one in panels:
        _ranged(one, renderer)
        _named_bars(one, renderer)
        _past_limits(one, renderer)
    figure.set_layout_engine("none")


def _beside_points(figure: Any, one: Panel, look: dict[str, Any]) -> int:
    """Put the points' labels beside them; how many found no place and were moved out."""
    renderer = figure.canvas.get_renderer()
    taken = taken_places(figure, one.axes)
    inside = one.axes.get_window_extent(renderer)
    lost = [text for text in one.points if not beside(text, taken, inside, renderer)]
    for text in lost:
        one.points.remove(text)
        text.remove()
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
        text.set_position((1.03, (centre - frame.y0) / frame.height))


def _named_bars(one: Panel, renderer: Any) -> None:
    """The names of many bars are as small as the bars stand close."""
    if not one.sums and not one.axes.containers:
        return
    labels = [t for t in one.axes.get_yticklabels() if t.get_text()]
    places = sorted(text_box(t, renderer).y0 + text_box(t, renderer).height / 2 for t in labels)
    gap = min((b - a for a, b in itertools.pairwise(places)), default=0.0)
    tallest = max(text_box(t, renderer).height for t in labels)
    if gap and tallest > gap:
        for text in labels:
            text.set_fontsize(text.get_fontsize() * gap / tallest)


def _past_limits(one: Panel, renderer: Any) -> None:
    """Sums of bars stand behind a limit's line that would run through them."""
    axes = one.axes
    lines = sorted(axes.transData.transform((line.get_xdata()[0], 0))[0] for line in axes.get_lines())
    for text in one.sums:
        for x in lines:
            box = text_box(text, renderer)
            if box.x0 - 3 <= x <= box.x1 + 3:
                shift = (x + 4 - box.x0) * 72 / axes.figure.dpi
                text.set_position((text.get_position()[0] + shift, 0))
