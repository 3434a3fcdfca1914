"""The pictures of `gpus` show what the presets say: memories at size and rate, GPUs at bandwidth and peak."""

from pathlib import Path

import pytest
from conftest import Run

from kvcalc import UserError, load_gpu
from kvcalc.report.charts.fit_plot import hierarchy_chart, peaks_chart


def test_memories_of_the_h100_from_the_smallest_rate_to_the_largest() -> None:
    """132 SMs of 256 and of 228 KiB; 1,900 GiB and 28,000 GiB in the server; NVLink leads to what has no size of its own."""
    chart = hierarchy_chart(load_gpu("h100"))
    points = {s.labels[0].split(":")[0]: (s.xs[0], s.ys[0]) for s in chart.series if s.kind == "points"}
    assert points == {
        "registers": (132 * 262_144, 6 * 66.9e12),
        "shared memory, L1": (132 * 233_472, 33.45e12),
        "L2": (50 << 20, 4.86e12),
        "HBM3": (85_017_755_648, 3.35e12),
        "the host's memory": (1900 << 30, 64e9),
        "disk": (28_000 << 30, 55.4e9),
    }
    assert [(s.label, s.ys) for s in chart.series if s.kind == "limit"] == [("another GPU's memory: 450 GB/s", [450e9])]
    assert chart.title == "h100-sxm: rates and sizes of its memories"
    assert chart.subtitle.endswith("25.4 ms; host and disk of Azure ND H100 v5: shared by 8 GPUs")


def test_gpus_lie_at_bandwidth_and_peak() -> None:
    """989 TFLOP/s over 3.35 TB/s is a knee of 295.2; diagonals are peaks in proportion to the bandwidth."""
    chart = peaks_chart([load_gpu("h100"), load_gpu("v100"), load_gpu("apple-m3-max")])
    (points,) = (s for s in chart.series if s.kind == "points")
    assert points.labels == ("v100: ridge point 139", "h100-sxm: ridge point 295")
    assert (points.xs, points.ys) == ((0.9e12, 3.35e12), pytest.approx((125e12, 989e12)))  # fp16, as V100 has no bf16
    assert chart.subtitle.endswith("; 1 without such a peak are left out")
    (line,) = [s for s in chart.series if s.label == "ridge point 200"]
    assert line.ys == [200 * x for x in line.xs]
    with pytest.raises(UserError, match="no matrix peak"):
        peaks_chart([load_gpu("apple-m3-max")])


def test_gpus_at_one_place_have_one_name() -> None:
    """B200 and B300 have one peak and bandwidth; knees of 206 to 295 lie around and between the diagonals of 200 and 400."""
    both = [s for s in peaks_chart([load_gpu("b200"), load_gpu("b300"), load_gpu("b200")]).series if s.kind == "points"]
    assert [s.labels for s in both] == [("b200, b300: ridge point 292",)]
    few = peaks_chart([load_gpu("h100"), load_gpu("h200")])
    assert few.title == "Peak over bandwidth: ridge points from 206 (h200) to 295 (h100-sxm) FLOP/B"
    assert [s.label for s in few.series if s.kind == "quiet"] == ["ridge point 200", "ridge point 400"]


def test_the_command_draws_them(kvcalc: Run, tmp_path: Path) -> None:
    assert "HBM3: 79.2 GiB at 3.35 TB/s" in kvcalc("gpus h100 --plot -").out
    assert "h200: ridge point 206" in kvcalc("gpus h100,h200 --plot -").out
    picture = tmp_path / "h100.svg"
    result = kvcalc(f"gpus h100 --plot {picture}")
    assert "# HBM3" in result.out and "rates and sizes" in picture.read_text(encoding="utf-8")
