"""What is named under a roof, and which roofs there are: points of sweeps, of products that lie together, of storage."""

from kvcalc import Parallelism, Precision, load_gpu, load_model
from kvcalc.planning.sweeps import decode_passes
from kvcalc.report.charts.chart import Chart, Series
from kvcalc.report.charts.roofline_plot import roofline_chart
from kvcalc.timing.deployment import TimedDeployment
from kvcalc.timing.operator_times import roofline_records

H100 = load_gpu("h100")


def named(chart: Chart) -> dict[str, Series]:
    return {s.label: s for s in chart.series if s.label}


def test_where_both_kinds_move_the_ends_of_their_ways_are_named() -> None:
    """A longer prompt moves attention and products; next to nothing of the time joins what lies near it, and has no point."""
    deployment = TimedDeployment(load_model("llama-3.1-8b"), H100)
    passes = [roofline_records(deployment, "prefill", 1, 256 << n) for n in range(6)]
    chart = roofline_chart(passes, [H100])
    told = {text for s in chart.series for text in s.labels if text}
    assert told == {"ridge point 295.2", "attention, context 256", "attention, context 8,192", "lm_head",
                    "o, qkv, down, gate_up, context 256", "o, qkv, down, gate_up, context 4,096, 8,192"}  # fmt: skip
    gated = TimedDeployment(load_model("qwen3-next-80b-a3b"), H100, parallelism=Parallelism(tp=2))
    chart = roofline_chart(decode_passes(gated, 4096, [1]), [H100])
    assert chart.title == "Roofline: qwen3-next-80b-a3b decode on h100-sxm tp 2"
    assert named(chart)["GEMMs with weights"].labels == ["GEMMs with weights", ""]  # the shared experts' gate among them


def test_each_axes_have_the_roofs_that_their_own_products_use() -> None:
    """Weights of four bits are multiplied in bf16, whatever another storage computes in."""
    model = load_model("llama-3.1-8b")
    stored = [TimedDeployment(model, H100, Precision(quantization=name)) for name in ("awq", "fp8")]
    four, eight = roofline_chart([one for d in stored for one in decode_passes(d, 4096, [1])], [H100]).chain()
    peaks = [{s.ys[-1] for s in chart.series if s.kind == "solid"} for chart in (four, eight)]
    assert peaks == [{989e12}, {989e12, 1978.9e12}]
