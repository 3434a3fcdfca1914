"""How many charts stand in each row of a picture, and what `compare` says once of several deployments."""

from itertools import pairwise

import pytest
from conftest import Run

from kvcalc.report import plots
from kvcalc.report.chart import Axis, Chart, Series, bar_chart, joined, tokens_tick
from kvcalc.report.grid import arranged
from kvcalc.report.plots import STYLES, figure

BARS = bar_chart("bars", "", ("a", "b"), (1.0, 2.0), str)
CELLS = Chart("cells", "", Axis(""), Axis(""), tuple(Series(f"GPU {n}", (), (0.0, 1.0), "cells", labels=("1 ms", "2 ms"))
                                                   for n in range(3)), ("a", "b"))  # fmt: skip


@pytest.mark.parametrize(
    ("charts", "style", "rows"),
    [
        ([BARS] * 2, "light", (2,)),
        ([BARS] * 3, "slides", (2, 1)),
        ([BARS] * 5, "light", (3, 2)),
        ([BARS] * 7, "light", (3, 2, 2)),
        ([BARS] * 8, "light", (3, 3, 2)),
        ([BARS] * 3 + [CELLS] + [BARS] * 2, "light", (3, 1, 2)),
        ([CELLS] * 2, "light", (2,)),
    ],
)
def test_rows_leave_no_cell_empty(charts: list[Chart], style: str, rows: tuple[int, ...]) -> None:
    """Each row is divided among its own charts, from edge to edge."""
    charts = [chart._replace(title=f"chart {n}") for n, chart in enumerate(charts)]
    grid = arranged(charts, STYLES[style])
    assert grid.rows == rows and sum(rows) == len(charts) == len([*grid.cells()])
    drawn = figure(joined(charts), STYLES[style])
    first = 0
    for count in rows:
        mine = [axes.get_position() for axes in drawn.axes[first : first + count]]
        assert all(one.x1 < other.x0 for one, other in pairwise(mine))
        assert mine[0].x0 < 0.2 and mine[-1].x1 > 0.9 and len({round(place.y1, 6) for place in mine}) == 1
        first += count


def test_charts_of_the_same_axes_keep_their_width() -> None:
    """So that they can be read against each other; the last row has a cell less."""
    lines = [Chart(f"{n}", "", Axis("x", tick=tokens_tick), Axis("y"), (Series("", (1.0, 2.0), (1.0, 3.0)),)) for n in range(5)]
    assert arranged(lines[:3], STYLES["slides"]).rows == (3,)
    grid = arranged(lines, STYLES["light"])
    assert grid.alike and grid.rows == (3, 2) and [*grid.cells()][-1] == (1, 1, 3)
    widths = {round(axes.get_position().width, 6) for axes in figure(joined(lines), STYLES["light"]).axes}
    assert len(widths) == 1


def test_deployments_are_rows_of_cells_and_share_a_curve(kvcalc: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step differs by GPU; what is cached and read does not, nor at the bound the share that a step has of MHA's."""
    drawn: list[Chart] = []
    monkeypatch.setattr(plots, "save", lambda chart, *_: drawn.append(chart))
    found = kvcalc("compare llama-7b --gpu h100,h200,a10,l4 --stack datasheet --variants mha,mqa --plot picture.png")
    assert found.code == 0, found.err
    stored, read, intensity, step, curves, heads = drawn[0].chain()
    assert drawn[0].over[0] == "llama-7b with mqa keeps 64.00 MiB for 4,096 tokens, 32× less than with mha"
    assert [c.series[0].kind for c in (stored, read, intensity, step)] == ["bar", "bar", "bar", "cells"]
    assert step.categories == ("mha", "mqa") and [s.label for s in step.series] == ["1× l4", "1× a10", "1× h200", "1× h100-sxm"]
    assert [s.label.partition(":")[0] for s in curves.series if s.kind == "limit"] == ["left on l4", "left on h200"]
    assert [s.label for s in heads.series if s.kind == "line"] == ["KV cache", "decode step"]
    slow = next(s for s in step.series if s.label == "1× l4")
    assert slow.ys[0] == 1.0 and min(y for s in step.series for y in s.ys) == 0.0  # the deepest and the faintest of all
