"""How many charts stand in each row of a picture, and what `compare` says once of several deployments."""

from itertools import pairwise

import pytest
from conftest import Run

from kvcalc.report import plots
from kvcalc.report.chart import Axis, Chart, Series, bar_chart, joined, tokens_tick
from kvcalc.report.grid import arranged
from kvcalc.report.heat import column_names
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
    """So that they can be read against each other; a last row of fewer stands in the middle."""
    lines = [Chart(f"{n}", "", Axis("x", tick=tokens_tick), Axis("y"), (Series("", (1.0, 2.0), (1.0, 3.0)),)) for n in range(5)]
    assert arranged(lines[:3], STYLES["slides"]).rows == (3,)
    grid = arranged(lines, STYLES["light"])
    assert grid.alike and grid.rows == (3, 2) and [*grid.cells()][-1] == (1, 1, 3)
    drawn = [axes.get_position() for axes in figure(joined(lines), STYLES["light"]).axes]
    assert len({round(place.width, 6) for place in drawn}) == 1
    assert [drawn[n].x0 - drawn[n - 3].x0 for n in (3, 4)] == pytest.approx([(drawn[1].x0 - drawn[0].x0) / 2] * 2)


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


def test_every_batch_and_context_is_a_row_of_cells(kvcalc: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """MHA of llama-7b keeps 2 × 32 × 4096 × 2 bytes a token; whatever the load, attention does as many FLOP a byte."""
    drawn: list[Chart] = []
    monkeypatch.setattr(plots, "save", lambda chart, *_: drawn.append(chart))
    line = "compare llama-7b --variants mha,mqa --batch-size 1,8 --context 1k,4k --plot picture.png"
    found = kvcalc(line)
    assert found.code == 0, found.err
    stored, _, intensity, step, _, heads = drawn[0].chain()
    loads = ["1 × 1,024 tokens", "1 × 4,096 tokens", "8 × 1,024 tokens", "8 × 4,096 tokens"]
    assert drawn[0].over[1].startswith("times: ") and heads.title == "Fewer KV heads, 1 × 1,024 tokens"
    assert [s.label for s in reversed(stored.series)] == [s.label for s in reversed(step.series)] == loads
    assert [s.labels for s in reversed(stored.series)] == [
        ("512 MiB", "16 MiB"), ("2 GiB", "64 MiB"), ("4 GiB", "128 MiB"), ("16 GiB", "512 MiB")
    ]  # fmt: skip
    assert [s.kind for s in intensity.series] == ["bar"]
    found = kvcalc(line.replace("1k,4k", "1k,2k,3k,4k,5k,6k,7k,8k"))
    assert len(drawn[1].series) == 12 and drawn[1].over[1].startswith("the first 12 of 16 loads asked for; ")
    kvcalc(line.replace("llama-7b", "llama-7b --tp 2"))
    assert drawn[2].chain()[4].subtitle.startswith("stored bytes of one GPU of 2, batch 1; ")
    assert [c.title for c in drawn[2].chain()[:2]] == ["KV cache stored per GPU", "Read by a decode step per GPU"]
    found = kvcalc("compare --layers 2 --heads 8 --kv-heads 8 --head-dim 64 --variants mha,mqa --plot picture.png")
    assert found.code == 0 and drawn[3].over[1] == "1 × 4,096 tokens", found.err  # of dimensions alone nothing is timed


def test_names_of_columns_are_smaller_before_a_word_of_them_is_broken() -> None:
    """Twelve in 13 inches leave 9 characters at 10 points: 11 take less of a size, and 43 three lines where there are but six."""
    look = STYLES["slides"] | {"font": 10.6}
    row = Series("", (), (0.5,) * 12, "cells")
    short = Chart("", "", Axis(""), Axis(""), (row,), ("1× h100-sxm",) * 12)
    names, size = column_names(short, look, 13.33)
    assert names == ["1× h100-sxm"] * 12 and 0.85 * 10.6 <= size < 10.6
    long = short._replace(categories=("1× 0-nvidia-h100-superpod-liquid-cooled-80g",) * 6, series=(row._replace(ys=(0.5,) * 6),))
    names, size = column_names(long, look, 13.33)
    assert size == 10.6 and {name.count("\n") for name in names} == {2}
