"""Statements of `compare` that hold for several deployments, and charts that share a page."""

import pytest
from conftest import Run

from kvcalc.report.charts import drawing
from kvcalc.report.charts.chart import Chart


def test_deployments_have_their_own_steps_and_share_a_curve(kvcalc: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of a step depends on the GPU. Stored and read bytes do not."""
    drawn: list[list[Chart]] = []
    monkeypatch.setattr(drawing, "save", lambda charts, *_: drawn.append(charts))
    found = kvcalc(
        "compare llama-7b --gpu h100,h200,a10,l4 --stack datasheet --variants mha,mqa --context 4k,8k --plot picture.png"
    )
    assert found.code == 0, found.err
    stored, read, _, *steps, curves = drawn[0]
    assert stored.picture_head[0].startswith("llama-7b with mqa needs 64.00 MiB of KV cache")
    assert stored.picture_head[1].startswith("1 × 4,096 tokens, the first of 2 loads")
    assert [chart.categories for chart in (stored, read, *steps)] == [["mha", "mqa"]] * 6
    assert stored.series[0].ys == [2 << 30, 64 << 20]
    assert [chart.title for chart in steps] == [f"Decode step: 1× {gpu}" for gpu in ("h100-sxm", "h200", "a10", "l4")]
    assert [s.label.partition(":")[0] for s in curves.series if s.kind == "limit"] == ["l4", "a10", "h100-sxm", "h200"]
