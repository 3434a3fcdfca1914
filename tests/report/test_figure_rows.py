"""What `compare` says once of several deployments, and how charts share a page."""

import pytest
from conftest import Run

from kvcalc.report.charts import drawing
from kvcalc.report.charts.chart import Chart


def test_deployments_are_rows_of_cells_and_share_a_curve(kvcalc: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step differs by GPU; what is cached and read does not."""
    drawn: list[Chart] = []
    monkeypatch.setattr(drawing, "save", lambda chart, *_: drawn.append(chart))
    found = kvcalc("compare llama-7b --gpu h100,h200,a10,l4 --stack datasheet --variants mha,mqa --plot picture.png")
    assert found.code == 0, found.err
    stored, read, intensity, step, curves = drawn[0].chain()
    assert drawn[0].over[0].startswith("llama-7b with mqa needs 64.00 MiB of KV cache")
    assert [c.series[0].kind for c in (stored, read, intensity, step)] == ["bar", "bar", "bar", "cells"]
    assert step.categories == ["mha", "mqa"] and [s.label for s in step.series] == ["1× l4", "1× a10", "1× h200", "1× h100-sxm"]
    assert [s.label.partition(":")[0] for s in curves.series if s.kind == "limit"] == ["l4", "a10", "h100-sxm", "h200"]
    slow = next(s for s in step.series if s.label == "1× l4")
    assert slow.ys[0] == 1.0 and min(y for s in step.series for y in s.ys) == 0.0  # the deepest and the faintest of all
