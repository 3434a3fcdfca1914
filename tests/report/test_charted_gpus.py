"""The pictures of `gpus` show what the presets say: memories at size and rate."""

from pathlib import Path

from conftest import Run

from kvcalc import load_gpu
from kvcalc.report.charts.fit_plot import hierarchy_chart


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


def test_the_command_draws_them(kvcalc: Run, tmp_path: Path) -> None:
    assert "HBM3: 79.2 GiB at 3.35 TB/s" in kvcalc("gpus h100 --plot -").out
    picture = tmp_path / "h100.svg"
    result = kvcalc(f"gpus h100 --plot {picture}")
    assert "# HBM3" in result.out and "rates and sizes" in picture.read_text(encoding="utf-8")
