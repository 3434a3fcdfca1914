"""Bars on matplotlib's axes: stacked parts with a text at their ends, and limits whose names stand above them."""

import itertools
from collections.abc import Sequence
from typing import Any

from kvcalc.report.boxes import text_box
from kvcalc.report.chart import Chart, bytes_tick
from kvcalc.report.heat import is_heat, row_names
from kvcalc.report.looks import DOTTED, HATCHES, NAME, colour, wrapped
from kvcalc.report.scales import step_of

MANY = 10  # bars
APART = 1.15  # heights of a name from bar to bar, at least
LEAST = 0.65  # of its size, the smallest that a bar's name is written in
SMALLEST = 7.0  # points, likewise
OUTSIDE = 0.36  # of a panel's height, what stands above and below its axes
NEAR = 5  # points from a limit's line, within which a text seems to touch it


def height_for(chart: Chart, look: dict[str, Any], height: float) -> float:
    """Inches of a panel with the names of a chart's bars, points and lines legible; at least `height`."""
    points = [text for s in chart.series if s.kind not in ("bar", "cells") for text in s.labels if text]
    rows = [s.label for s in chart.series if s.kind == "cells"]
    names = [*(rows or _names(chart)), *(wrapped(text, NAME, 3) for text in points)]
    lines = [s for s in chart.series if s.kind not in ("bar", "cells", "points", "hollow")]
    ends = [s.label if chart.categories else wrapped(s.label, look["letters"], 5, even=True) for s in lines]
    least = min(1.0, max(LEAST, SMALLEST / (0.85 * look["font"])))
    needed: float = max(sum(name.count("\n") + 1 for name in texts if name) for texts in (names, ends)) * least
    inches: float = needed * look["font"] * 1.3 / 72
    return max(height, OUTSIDE * height + inches)


def widest(charts: Sequence[Chart], letters: int) -> float:
    """Characters that stand left and right of the axes of a chart, at least those of ticks; the most of any.

    letters: of a line of what stands right of them, at most.
    """
    return max(_beside(chart, letters) for chart in charts)


def _beside(chart: Chart, letters: int) -> float:
    left = [line for name in (row_names(chart) if is_heat(chart) else _names(chart)) for line in name.split("\n")]
    ends = [wrapped(s.label, letters, 3, even=True) for s in chart.series if s.kind not in ("bar", "points", "cells")]
    right = [line for text in ends for line in text.split("\n")]
    return max(map(len, left), default=10) + 0.85 * max(map(len, right), default=6)


def _names(chart: Chart) -> list[str]:
    """The names of the bars: those of many have a line each."""
    width = NAME if len(chart.categories) <= MANY else 2 * NAME
    return [wrapped(name, width, 3, even=True) for name in chart.categories]


def draw_bars(axes: Any, chart: Chart, look: dict[str, Any], ticks: int, height: float) -> list[Any]:
    """The texts at the ends of the bars: those of the last part, else the sums.

    ticks: as many as there is room for; height: of the panel, in inches.
    """
    base = [0.0] * len(chart.categories)
    parts = [s for s in chart.series if s.kind == "bar"]
    for number, series in enumerate(parts):
        hatch = HATCHES[number % len(HATCHES)] if series.label else ""
        axes.barh(range(len(base)), series.ys, left=base, height=min(0.8, 0.3 + 0.1 * len(base)), label=series.label,
                  color=colour(number if series.colour < 0 else series.colour, look), hatch=hatch, edgecolor=look["paper"],
                  linewidth=0.5)  # fmt: skip
        base = [b + y for b, y in zip(base, series.ys, strict=True)]
    limits = [s for s in chart.series if s.kind == "limit"]
    most = max([*base, *chart.y.shown, *(s.ys[0] for s in limits)])
    size = look["font"] * 0.85
    across = 0.8 * axes.get_window_extent().width * 72 / axes.figure.dpi / (0.6 * size)  # characters, before there is a layout
    back = all(s.ys[0] > max(0.5, len(s.label) / across) * most for s in limits)  # their names stand left of them
    limits.sort(key=lambda s: s.ys[0] if back else -s.ys[0])
    row = 0.0215 * max(len(base), 4) * look["font"] / height  # height of a limit's name, in bars
    for number, series in enumerate(limits):
        level, top = series.ys[0], -0.6 - row * (1.2 * number + 0.6)
        axes.plot((level, level), (top, len(base) - 0.5), color=look["ink"], linestyle=DOTTED, linewidth=0.16 * look["font"])
        side: dict[str, Any] = {"xytext": (-5, 0), "ha": "right"} if back else {"xytext": (4, 0)}
        axes.annotate(series.label, (level, top), textcoords="offset points", fontsize=size, va="center", **side)
    axes.set_yticks(range(len(base)), _names(chart))
    axes.set_ylim(len(base) - 0.5, -0.6 - row * (1.2 * len(limits) + 0.2) if limits else -0.5)
    axes.set_xlabel(chart.y.title)
    _scale(axes, chart, most, ticks)
    texts = parts[-1].labels or [chart.y.tick(total) for total in base]
    place = {"textcoords": "offset points", "xytext": (max(4, 0.4 * look["font"]), 0), "va": "center", "fontsize": size}
    return [axes.annotate(text, (total, i), **place) for i, (total, text) in enumerate(zip(base, texts, strict=True)) if text]


def _scale(axes: Any, chart: Chart, most: float, ticks: int) -> None:
    axes.xaxis.set_major_formatter(lambda v, _: chart.y.tick(v))
    axes.set_xlim(0, 1.04 * most or 1)
    if chart.y.tick is bytes_tick:
        step = step_of(most, min(ticks, 8))
        axes.set_xticks([n * step for n in range(int(1.04 * most / step) + 1)])
    else:
        axes.locator_params(axis="x", nbins=min(ticks, 5))
    axes.grid(False, axis="y")


def fit_names(axes: Any, ends: list[Any], renderer: Any) -> None:
    """The names of many bars, and the texts at their ends, are as small as the bars stand close, and keep a little apart."""
    if not ends and not axes.containers:
        return
    names = [t for t in axes.get_yticklabels() if t.get_text()]
    places = sorted(text_box(t, renderer).y0 + text_box(t, renderer).height / 2 for t in names)
    gap = min((b - a for a, b in itertools.pairwise(places)), default=0.0)
    for texts in (names, ends):
        tallest = APART * max((text_box(t, renderer).height for t in texts), default=0.0)
        if gap and tallest > gap:
            for text in texts:
                text.set_fontsize(text.get_fontsize() * gap / tallest)


def past_limits(axes: Any, ends: list[Any], renderer: Any) -> bool:
    """Texts at the ends of bars, through which a limit's line would run, stand right of that line; whether any was moved now."""
    levels = sorted(float(line.get_xdata()[0]) for line in axes.get_lines())
    near, moved = NEAR * axes.figure.dpi / 72, False
    for text in ends:
        text.update_positions(renderer)  # as the axes are laid out now
        box = text_box(text, renderer)
        for level in levels:
            if level > text.xy[0] and axes.transData.transform((level, 0))[0] <= box.x1 + near:
                text.xy, moved = (level, text.xy[1]), True
                text.set_position((NEAR + 2, 0))
                break
    return moved
