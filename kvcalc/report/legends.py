"""The key of a picture below its axes: points, what their areas mean, and parts of bars."""

import math
from collections.abc import Sequence
from typing import Any

from kvcalc.report.chart import Chart
from kvcalc.report.looks import wrapped

AREAS = (0.1, 0.5)  # shares whose points stand in the key


def legend(figure: Any, charts: Sequence[Chart], look: dict[str, Any]) -> None:
    """A key of points, of what their areas mean and of parts of bars, below the axes; lines need none."""
    found: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(wrapped(label, 42, 3), handle)
    for share, what in zip(AREAS, next(([f" {c.areas}", ""] for c in charts if c.areas), []), strict=False):
        found[f"{share:.0%}{what}"] = _sized(share, look)
    if not found:
        return
    longest = max(len(line) for label in found for line in label.split("\n"))
    columns = max(1, int(figure.get_size_inches()[0] * 130 / look["font"] / (longest + 6)))
    rows = -(-len(found) // columns)
    key = figure.legend(
        list(found.values()), list(found), loc="outside lower center", ncols=-(-len(found) // rows), frameon=False,
        fontsize=look["font"] * 0.85,
    )  # fmt: skip
    for handle in key.legend_handles:
        if hasattr(handle, "set_sizes"):
            handle.set_sizes([look["font"] * 4])


def _sized(share: float, look: dict[str, Any]) -> Any:
    """A point as large as those of a share are."""
    from matplotlib.lines import Line2D

    size = math.sqrt(area(share, look))
    return Line2D([], [], linestyle="", marker="o", markersize=size, color=look["ink"], alpha=0.4, markeredgewidth=0)


def area(share: float, look: dict[str, Any]) -> float:
    """Square points of the marker of a share."""
    return float((look["font"] / 10) ** 2 * (30 + 600 * share))
