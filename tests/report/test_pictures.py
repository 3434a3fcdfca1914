"""Texts of a picture do not overlap each other, lines, points or edges, for any data and style."""

import itertools
import math
import random
from typing import Any

import pytest
from matplotlib.path import Path as MplPath
from matplotlib.transforms import Bbox
from test_plots import charts_of

from kvcalc import load_gpu, load_model
from kvcalc.gpu.gpu import Gpu
from kvcalc.planning.comparison import SHAPE, attention_records
from kvcalc.planning.sweeps import roofline_passes
from kvcalc.report.charts.chart import Axis, Chart, Series, bytes_tick, si_tick, tokens_tick
from kvcalc.report.charts.drawing import figure
from kvcalc.report.charts.labels import NEAR_DISTANCE, anchor, count_crossed, lines_on, markers_on, spread, text_box
from kvcalc.report.charts.roofline_plot import attention_chart, roofline_chart
from kvcalc.report.charts.series_styles import STYLES
from kvcalc.timing.deployment import TimedDeployment

LONG = "meta-llama/Llama-3.1-Nemotron-Ultra-253B"  # a name of 40 characters
GPUS = ("h100", "h200", "b200", "a100-80gb", "l40s", "l4", "mi300x", "gb200", "h100-pcie", "gb300", "l40", "b300")
COUNTS = (1, 2, 6, 12)
TOKENS, BYTES = Axis("context, tokens", tick=tokens_tick), Axis("KV cache", tick=bytes_tick)


def names(count: int) -> list[str]:
    return [f"{n}-{LONG}"[:40] for n in range(count)]


def lines(count: int, gap: float = 1.1) -> list[Chart]:
    """Return a chart of lines that end close together, and one line that ends early."""
    xs = tuple(float(1 << n) for n in range(7, 18))
    series = [Series(name, xs[: -3 if n == 1 else None], tuple(x * gap**n * 1e5 for x in xs[: -3 if n == 1 else None]))
              for n, name in enumerate(names(count))]  # fmt: skip
    series.append(Series("a limit", (), (1e9,), "limit"))
    return [Chart("KV cache against context", "stored bytes", TOKENS, BYTES, series)]


def points(count: int) -> list[Chart]:
    """Return a chart of named points that are close together, under a line."""
    rng = random.Random(count)
    roof = Series("the roof of h100-sxm", (1.0, 300.0, 4000.0), (3e12, 1e15, 1e15))
    found = [Series("", (x := rng.uniform(1, 280),), (x * 3.2e12,), "points", (0.1,), (name,)) for name in names(count)]
    return [
        Chart(f"Attention of {LONG}", "one layer " * 20, Axis("x", tick=bytes_tick), Axis("y", tick=bytes_tick), (roof, *found))
    ]


def bars(count: int) -> list[Chart]:
    parts = [Series(label, (), tuple(float(n + 1) * 2**30 for n in range(count)), "bar") for label in ("weights", "KV cache")]
    levels = [Series(f"memory of GPU {n}", (), (n * 2.0**30,), "limit") for n in (9, 10, 14)]
    axis = Axis("bytes", log=False, tick=bytes_tick)
    return [Chart("Where the memory goes", "batch 1", axis, axis, (*parts, *levels), tuple(names(count)))]


CHARTS = {
    **{f"{build.__name__} {n}": (build, n) for build in (lines, points, bars) for n in COUNTS},
    **{kind: (charts_of, kind) for kind in ("cache-vs-context", "cache-vs-parameters", "memory", "dsa-vs-mla")},
}


STYLED = [*((name, "slides") for name in CHARTS), ("memory", "light"), ("lines 16", "light")]


@pytest.mark.parametrize(("name", "style"), STYLED)
def test_texts_keep_apart_and_inside(name: str, style: str) -> None:
    kind, _, count = name.partition(" ")
    build, given = CHARTS.get(name) or ({"lines": lines, "points": points}[kind], int(count))
    check_apart(build(given), style)


def attention_of(gpus: list[Gpu], context: int) -> list[Chart]:
    records = attention_records(gpus[0], [context], [1])
    return [attention_chart(records, gpus, SHAPE)]


def test_attention_and_a_pass_under_the_roof() -> None:
    check_apart(attention_of([load_gpu("h100"), load_gpu("b200")], 4096), "slides")
    deployment = TimedDeployment(load_model("llama-3.1-8b"), load_gpu("h100")).with_calibration()
    check_apart(roofline_chart(roofline_passes(deployment, 4096, [1, 8, 64, 256]), [load_gpu("h100")]), "light")


@pytest.mark.slow
@pytest.mark.parametrize(("count", "style"), [(1, "light"), (6, "slides"), (12, "light"), (12, "slides")])
def test_lines_to_points_cross_no_roof(count: int, style: str) -> None:
    """Outside the marker and its own line, they cross no roof, for any GPUs after the first."""
    cards = [load_gpu(name) for name in GPUS[:count]]
    drawn = figure(attention_of(cards, 4096 if count == 1 else 32_768), STYLES[style])
    drawn.draw_without_rendering()
    (axes,), renderer = drawn.axes, drawn.canvas.get_renderer()
    joined = 0
    for text in axes.texts:
        if getattr(text, "arrow_patch", None) and text.arrow_patch.get_visible() and text.anncoords == "offset points":
            (x0, y0), (x1, y1) = leader(text, renderer).vertices
            marker = (
                (NEAR_DISTANCE * text.get_fontsize() + text.arrowprops["shrinkB"]) * drawn.dpi / 72 / math.hypot(x1 - x0, y1 - y0)
            )
            free = MplPath([(x0, y0), (x1 + marker * (x0 - x1), y1 + marker * (y0 - y1))])
            assert not any(free.intersects_path(path, filled=False) for path, _ in lines_on(axes)), text
            joined += 1
    assert joined or count > 1  # of one GPU some are joined, so that there is something to hold


def check_apart(charts: list[Chart], style: str) -> None:
    """Check that no text covers another text, a line, a marker, a bar or an edge, and that every text is on the page."""
    drawn = figure(charts, STYLES[style])
    drawn.draw_without_rendering()
    renderer, page = drawn.canvas.get_renderer(), drawn.bbox
    artists = {id(t): t for t in (*drawn.texts, *(t for axes in drawn.axes for t in shown(drawn, axes)))}
    places = [(t.get_text(), text_box(t, renderer).padded(-1)) for t in artists.values()]
    for (one, first), (two, second) in itertools.combinations(places, 2):
        assert not first.overlaps(second), (one, two)
    for text, box in places:
        assert page.x0 <= box.x0 and box.x1 <= page.x1 and page.y0 <= box.y0 and box.y1 <= page.y1, text
    for axes in drawn.axes:
        texts = shown(drawn, axes)
        frame = axes.get_window_extent(renderer)
        edges = [Bbox.from_extents(frame.x0, frame.y0, frame.x0 + 1, frame.y1), Bbox.from_bounds(*frame.min, frame.width, 1)]
        bars = [bar.get_window_extent() for container in axes.containers for bar in container]
        for text in texts:
            box = text_box(text, renderer).padded(-1)
            assert not box.count_overlaps([*markers_on(axes), *edges, *bars]), text
            if not getattr(text, "get_bbox_patch", lambda: None)():  # texts of bars hide the lines behind them
                assert not count_crossed([(path, 0) for path, _ in lines_on(axes)], box), text
        for text in texts:
            if getattr(text, "arrow_patch", None) and text.arrow_patch.get_visible():
                others = [text_box(other, renderer).padded(-1) for other in texts if other is not text]
                assert not any(leader(text, renderer).intersects_bbox(other) for other in others), text
    written = "".join("".join(text.split()) for text, _ in places)
    for series in charts[0].series:
        for word in filter(None, (*series.labels, series.label)):
            assert "".join(word.split()) in written, word


def leader(text: Any, renderer: Any) -> MplPath:
    """Return the path from a text to its point, from the place at which it leaves the text."""
    box = text_box(text, renderer)
    x = (box.x0 + box.x1) / 2 if text.anncoords == "offset points" else box.x0
    return MplPath([(x, (box.y0 + box.y1) / 2), anchor(text)])


def shown(drawn: Any, axes: Any) -> list[Any]:
    keys = [t for legend in drawn.legends for t in legend.get_texts()]
    ticks = []
    for axis in (axes.xaxis, axes.yaxis):
        low, high = sorted(axis.get_view_interval())
        names = axis.get_ticklabels() or [axis.label] * len(axis.get_majorticklocs())  # of the axes at the edges alone
        ticks += [t for at, t in zip(axis.get_majorticklocs(), names, strict=True) if low <= at <= high]
    found = [*axes.texts, axes._left_title, axes.xaxis.label, axes.yaxis.label, *ticks, *keys]
    return [t for t in found if t.get_visible() and t.get_text()]


def test_a_label_is_not_read_as_that_of_another_point() -> None:
    """If points are close together, a label without a line is nearest to its own point, and no line crosses another label."""
    places = {f"{n}-{LONG}": at for n, at in enumerate([(7.25, 256.0), (8.03, 256.0), (8.19, 288.0), (4.0, 288.0)])}
    named = Series("", *zip(*places.values(), strict=True), "points", labels=tuple(places))  # type: ignore[misc]
    drawn = figure([Chart("KV cache against parameters", "", Axis("x"), Axis("y"), (named,))], STYLES["light"])
    drawn.draw_without_rendering()
    (axes,), renderer, joined = drawn.axes, drawn.canvas.get_renderer(), 0
    labels = [t for t in axes.texts if getattr(t, "arrow_patch", None)]
    for text in labels:
        others = [anchor(t) for t in labels if t is not text]
        if text.arrow_patch.get_visible():
            markers = [Bbox.from_extents(x - 2, y - 2, x + 2, y + 2) for x, y in others]
            assert not any(leader(text, renderer).intersects_bbox(marker) for marker in markers), text
            joined += 1
        else:
            box = text_box(text, renderer)
            assert min(outside(box, at) for at in others) > outside(box, anchor(text)), text
    assert len(labels) == 4 and joined


def test_the_label_of_a_lone_point_is_four_fifths_of_its_height_right_of_it() -> None:
    drawn = figure([Chart("x", "", Axis("x"), Axis("y"), (Series("", [1], [1], "points", labels=(LONG,)),))], STYLES["light"])
    drawn.draw_without_rendering()
    (text,) = (t for t in drawn.axes[0].texts if getattr(t, "arrow_patch", None))
    gap = text_box(text, drawn.canvas.get_renderer()).x0 - anchor(text)[0]
    assert gap == pytest.approx(0.8 * text.get_fontsize() * drawn.dpi / 72, abs=0.1)


def outside(box: Any, at: tuple[float, float]) -> float:
    """Return the pixels from a box to a place."""
    return math.hypot(max(box.x0 - at[0], at[0] - box.x1, 0), max(box.y0 - at[1], at[1] - box.y1, 0))


def test_labels_are_spread_as_little_as_they_need_to_be() -> None:
    assert spread([1, 5, 9], [2, 2, 2], 0, 10) == [1, 5, 9]
    assert spread([5, 5], [2, 2], 0, 10) == [4, 6]
    assert spread([9, 5, 9.5], [2, 2, 2], 0, 10) == [7, 5, 9]
    assert spread([0, 0, 0], [2, 2, 2], 0, 10) == [1, 3, 5]
    rng = random.Random(1)
    for _ in range(200):
        sizes = [rng.uniform(0.5, 2) for _ in range(rng.randint(1, 6))]
        wanted = [rng.uniform(0, 12) for _ in sizes]
        found = sorted(zip(spread(wanted, sizes, 0, 12), sizes, wanted, strict=True))
        assert all(b - a >= (s + t) / 2 - 1e-9 for (a, s, _), (b, t, _) in itertools.pairwise(found))
        assert found[0][0] >= found[0][1] / 2 - 1e-9 and found[-1][0] <= 12 - found[-1][1] / 2 + 1e-9
        assert [w for *_, w in found] == sorted(wanted)


@pytest.mark.parametrize(
    ("least", "most", "ticks"),
    [
        (2, 30, [2, 5, 10, 20]),
        (2, 900, [2, 5, 10, 20, 50, 100, 200, 500, 1000]),
        (5, 16, [6, 8, 10, 12, 14, 16]),
        (20, 39, [20, 25, 30, 35, 40]),
    ],
    ids=str,
)
def test_a_logarithmic_axis_has_round_ticks_at_some_distance(least: float, most: float, ticks: list[float]) -> None:
    """The axis goes 8% of its length beyond the values. If they differ by less than 6 times, steps are even."""
    axis = Axis("tokens/s", tick=si_tick(""))
    axes = figure([Chart("t", "", axis, axis, (Series("", (1.0, 2.0), (least, most)),))], STYLES["light"]).axes[0]
    low, high = axes.get_ylim()
    beyond = (most / least) ** 0.08
    assert [low, high] == pytest.approx([least / beyond, beyond * most])
    assert [at for at in axes.yaxis.get_majorticklocs() if low <= at <= high] == pytest.approx(ticks)
