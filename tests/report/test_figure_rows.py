"""What `compare` says once of several deployments, and how charts share a page."""

import pytest
from conftest import Run

from kvcalc.report.charts import drawing
from kvcalc.report.charts.chart import Axis, Chart, Series, joined, tokens_tick
from kvcalc.report.charts.drawing import figure
from kvcalc.report.charts.series_styles import STYLES


def test_charts_of_the_same_axes_keep_their_width() -> None:
    lines = [Chart(f"{n}", "", Axis("x", tick=tokens_tick), Axis("y"), (Series("", (1.0, 2.0), (1.0, 3.0)),)) for n in range(5)]
    drawn = [axes.get_position() for axes in figure(joined(lines), STYLES["light"]).axes]
    assert len({round(place.width, 6) for place in drawn}) == 1
    assert [round(drawn[n].x0 - drawn[n - 3].x0, 6) for n in (3, 4)] == [0, 0]


def test_deployments_are_rows_of_cells_and_share_a_curve(kvcalc: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step differs by GPU; what is cached and read does not, nor at the bound the share that a step has of MHA's."""
    drawn: list[Chart] = []
    monkeypatch.setattr(drawing, "save", lambda chart, *_: drawn.append(chart))
    found = kvcalc("compare llama-7b --gpu h100,h200,a10,l4 --stack datasheet --variants mha,mqa --plot picture.png")
    assert found.code == 0, found.err
    stored, read, intensity, step, curves, heads = drawn[0].chain()
    assert drawn[0].over[0].startswith("llama-7b with mqa needs 64.00 MiB of KV cache")
    assert [c.series[0].kind for c in (stored, read, intensity, step)] == ["bar", "bar", "bar", "cells"]
    assert step.categories == ["mha", "mqa"] and [s.label for s in step.series] == ["1× l4", "1× a10", "1× h200", "1× h100-sxm"]
    assert [s.label.partition(":")[0] for s in curves.series if s.kind == "limit"] == ["left on l4", "left on h200"]
    assert [s.label for s in heads.series if s.kind == "line"] == ["KV cache", "decode step"]
    slow = next(s for s in step.series if s.label == "1× l4")
    assert slow.ys[0] == 1.0 and min(y for s in step.series for y in s.ys) == 0.0  # the deepest and the faintest of all


def test_every_batch_and_context_is_a_row_of_cells(kvcalc: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """MHA of llama-7b keeps 2 × 32 × 4096 × 2 bytes a token; whatever the load, attention does as many FLOP a byte."""
    drawn: list[Chart] = []
    monkeypatch.setattr(drawing, "save", lambda chart, *_: drawn.append(chart))
    line = "compare llama-7b --variants mha,mqa --batch-size 1,8 --context 1k,4k --plot picture.png"
    found = kvcalc(line)
    assert found.code == 0, found.err
    stored, _, intensity, step, _, heads = drawn[0].chain()
    loads = ["1 × 1,024 tokens", "1 × 4,096 tokens", "8 × 1,024 tokens", "8 × 4,096 tokens"]
    assert drawn[0].over[1].startswith("Times are ") and heads.title == "Fewer KV heads, 1 × 1,024 tokens"
    assert [s.label for s in reversed(stored.series)] == [s.label for s in reversed(step.series)] == loads
    assert [s.labels for s in reversed(stored.series)] == [
        ["512 MiB", "16 MiB"], ["2 GiB", "64 MiB"], ["4 GiB", "128 MiB"], ["16 GiB", "512 MiB"],
    ]  # fmt: skip
    assert [s.kind for s in intensity.series] == ["bar"]
    found = kvcalc(line.replace("1k,4k", "1k,2k,3k,4k,5k,6k,7k,8k"))
    assert len(drawn[1].series) == 12 and drawn[1].over[1].startswith("the first 12 of 16 requested loads; ")
    kvcalc(line.replace("llama-7b", "llama-7b --tp 2"))
    assert drawn[2].chain()[4].subtitle.startswith("stored bytes of one GPU of 2, batch 1; ")
    assert [c.title for c in drawn[2].chain()[:2]] == ["KV cache stored per GPU", "Read by a decode step per GPU"]
    found = kvcalc("compare --layers 2 --heads 8 --kv-heads 8 --head-dim 64 --variants mha,mqa --plot picture.png")
    assert found.code == 0 and drawn[3].over[1] == "1 × 4,096 tokens", found.err  # of dimensions alone nothing is timed
