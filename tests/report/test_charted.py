"""Pictures show the numbers of the records: series are compared with records, and drawn lines with series."""

from typing import Any

import pytest
from serving.servers import HandClock, asked, byte_pool, served

from kvcalc import Parallelism, Precision, UserError, cache_size, load_gpu, load_model
from kvcalc.capacity.allocations import AllocationStep, run_allocations
from kvcalc.model.memory import weight_bytes
from kvcalc.planning.sweeps import cache_curve, contexts_up_to, generation_work, latency_sweep, roofline_passes
from kvcalc.question.serving_options import LatencyOptions
from kvcalc.report.charts.chart import Axis, Chart, Series
from kvcalc.report.charts.comparison_plot import MAX_POINTS, generation_chart, measured_chart, predicted_against_measured
from kvcalc.report.charts.drawing import figure
from kvcalc.report.charts.fit_plot import allocations_chart
from kvcalc.report.charts.load_plot import latency_chart, load_chart, occupancy_chart
from kvcalc.report.charts.roofline_plot import roofline_chart, roofs
from kvcalc.report.charts.series_styles import PALETTE, STYLES
from kvcalc.report.charts.size_plot import cache_vs_context, cache_vs_parameters, generation_work_chart, weights_and_cache
from kvcalc.report.charts.terminal import sketch
from kvcalc.serving.batching import Limits
from kvcalc.serving.server import SimulationResult as ServedRun
from kvcalc.timing.deployment import TimedDeployment

PLAIN = Precision()
H100 = load_gpu("h100")


def named(chart: Chart) -> dict[str, Series]:
    return {s.label: s for s in chart.series if s.label}


def points(series: Series) -> list[tuple[float, float]]:
    return list(zip(series.xs, series.ys, strict=True))


def test_operators_lie_at_their_intensity_and_rate_and_weigh_their_share() -> None:
    """Matrix products read each weight once for 8 tokens, so they have equal intensities and are one point."""
    (rows,) = sweep = roofline_passes(TimedDeployment(load_model("llama-3.1-8b"), H100), 4096, [8])
    (chart,) = roofline_chart(sweep, [H100])
    for label, attends in (("attention", True), ("GEMMs with weights", False)):
        mine = [r for r in rows[:-1] if r["flops"] and r["intensity"] and (r["role"] == "core") == attends]
        flops, moved, least = (sum(r[key] for r in mine) for key in ("flops", "bytes", "roofline_s"))
        series = named(chart)[label]
        assert points(series) == [(flops / moved, flops / least)]
        assert series.sizes == pytest.approx([least / rows[-1]["roofline_s"]])
        assert series.ys[0] <= min(989e12, series.xs[0] * 3.35e12) * (1 + 1e-12)  # nothing lies above its roof
        assert series.labels == [label]
    assert chart.title == "Roofline: llama-3.1-8b decode on h100-sxm"
    assert chart.subtitle == "batch 8, context 4,096; 3.35 TB/s; points: at the datasheet bound; area: share of the pass"
    assert not [s for s in chart.series if s.kind in ("span", "hollow")]
    (chart,) = roofline_chart(roofline_passes(TimedDeployment(load_model("llama-3.1-8b"), H100), 4096, [1, 8, 64]), [H100])
    assert named(chart)["GEMMs with weights"].labels[1:] == ["batch 8", "batch 64"]  # attention stays at its place


def test_operators_that_lie_apart_are_points_of_their_own() -> None:
    """V3 at batch 64: each expert has few tokens, dense products have all 64. Hollow points below show the predictions."""
    deployment = TimedDeployment(load_model("deepseek-v3"), load_gpu("h200"), parallelism=Parallelism(tp=8)).with_calibration(
        "sglang"
    )
    (rows,) = sweep = roofline_passes(deployment, 4096, [64])
    (chart,) = roofline_chart(sweep, [deployment.gpu])
    filled = named(chart)["GEMMs with weights"]
    experts = next(r for r in rows if r["operator"] == "experts")
    assert points(filled)[0] == (experts["intensity"], experts["flops"] / experts["roofline_s"])
    assert filled.labels[0] == "experts" and filled.sizes == sorted(filled.sizes, reverse=True)
    assert len(filled.xs) == 2  # the dense products, from 50.8 to 122.4 FLOPs a byte: each within 1.4 times the one before
    hollow = next(s for s in chart.series if s.kind == "hollow" and s.colour == filled.colour)
    assert points(hollow)[0] == (experts["intensity"], experts["flops"] / experts["time_s"])


def test_roofs_bend_at_their_knees() -> None:
    found = roofs(H100, ["bf16", "fp16", "fp8"], (0.5, 4000.0))
    for label, peak in (("bf16, fp16 989", 989e12), ("fp8 1978.9", 1978.9e12)):
        roof = next(s for s in found if s.label == f"{label} TFLOP/s")
        knee = peak / 3.35e12
        assert points(roof) == [(0.5, 0.5 * 3.35e12), (knee, peak), (4000.0, peak)]
        (ridge,) = [s for s in found if s.kind == "points" and points(s) == [(knee, peak)]]
        assert (ridge.labels, ridge.sizes) == ([f"ridge point {knee:.1f}"], [0])  # the smallest point: no share of the pass
    assert {s.colour for s in found} == {6}  # grey: they are told apart by their names
    with pytest.raises(UserError, match="apple-m3-max has no matrix peak"):
        roofs(load_gpu("apple-m3-max"), [], (0.5, 4000.0))


def test_cache_over_context_is_size() -> None:
    models = [(n, load_model(n), Precision(kv_cache_dtype=d)) for n, d in (("llama-3.1-8b", "fp8"), ("gemma-3-27b", "auto"))]
    curves = [cache_curve(m, p, contexts_up_to(50_000), 3, label=label) for label, m, p in models]
    chart = cache_vs_context(curves, [3], [H100])
    for (label, model, precision), line in zip(models, chart.series, strict=False):
        xs = line.xs
        assert line.label.startswith(f"{label}: ") and (xs[0], xs[-1]) == (128, 50_000) and list(xs) == sorted(set(xs))
        assert points(line) == [(s, cache_size(model, int(s), 3, precision).stored) for s in xs]
    (limit,) = [s for s in chart.series if s.kind == "limit"]
    assert limit.ys == [H100.memory_bytes - weight_bytes(models[0][1], models[0][2])]
    assert "stored bytes, batch 3; cache dtype: fp8, bf16" in chart.subtitle
    large = cache_curve(load_model("llama-3.1-405b"), PLAIN, contexts_up_to(4096))
    assert not [s for s in cache_vs_context([large], [1], [H100]).series if s.kind == "limit"]  # no memory beside its weights


def test_cache_over_parameters_and_the_bars_of_memory_are_size() -> None:
    models = [load_model(n) for n in ("llama-3.1-70b", "gpt2", "deepseek-v3")]
    chart = cache_vs_parameters([cache_curve(m, PLAIN, [1024, 8192]) for m in models])
    ranked = sorted(models, key=lambda m: m.parameters)
    for label, context in (("1k tokens", 1024), ("8k tokens", 8192)):
        assert points(named(chart)[label]) == [(m.parameters, cache_size(m, context).stored) for m in ranked]
    first, second = (s for s in chart.series if s.kind == "points")
    assert first.labels == [m.name for m in ranked] and not second.labels  # at the lowest, below which there is room
    assert (second.xs, second.ys) == (named(chart)["8k tokens"].xs, named(chart)["8k tokens"].ys)
    assert len(chart.series) == 2  # no family, whose sizes a line would join
    sizes = [load_model(n) for n in ("gpt-3-small", "gpt-3-medium")]
    joined = cache_vs_parameters([cache_curve(m, PLAIN, [1024]) for m in sizes])
    line, dots, grown = joined.series
    assert points(line) == points(dots) == [(m.parameters, cache_size(m, 1024).stored) for m in sizes]
    assert grown.ys[-1] == pytest.approx(dots.ys[0] * sizes[1].parameters / sizes[0].parameters)
    assert (line.label, dots.label, grown.kind) == ("1k tokens", "", "quiet")
    assert joined.title == "From gpt-3-small to gpt-3-medium: 2.84× the parameters, 2.67× the KV cache"  # 24·1024 for 12·768
    with pytest.raises(UserError, match="two models or more"):
        cache_vs_parameters([cache_curve(models[0], PLAIN, [1024])])
    bars = named(weights_and_cache([cache_curve(m, PLAIN, [4096], 2) for m in models], [H100], 2))
    assert bars["weights"].ys == [weight_bytes(m) for m in models]
    assert bars["KV cache"].ys == [cache_size(m, 4096, 2).stored for m in models]


def test_work_without_a_cache_is_quadratic_on_linear_axes() -> None:
    """A token needs 2 FLOPs per matrix element, and 4 per pair, head and element of attention."""
    model = load_model("gpt2")
    without, cached = generation_work_chart([generation_work(model, 128, PLAIN)])
    assert not any(axis.log for chart in (without, cached) for axis in (chart.x, chart.y))
    (again, pairs), (once, rows) = without.series, cached.series
    assert again.xs == rows.xs == list(range(2, 129, 2))
    inner, head = 2 * 12 * 12 * 768**2, 2 * 768 * 50_257
    assert rows.ys == [4 * 12 * s * 768 for s in once.xs]
    assert pairs.ys == [4 * 12 * s * (s + 1) / 2 * 768 for s in again.xs]
    assert once.ys == [inner + head + row for row in rows.ys]
    assert again.ys == [s * inner + head + pair for s, pair in zip(again.xs, pairs.ys, strict=True)]
    assert "8,256 token projections, 8,128 of them redundant" in without.subtitle


def test_latencies_that_rest_on_bounds_are_not_drawn_beside_predictions() -> None:
    def drawn(*gpus: str) -> tuple[set[str], str]:
        cards = [TimedDeployment(load_model("llama-3.1-8b"), load_gpu(name)).with_calibration() for name in gpus]
        chart, _ = latency_chart(latency_sweep(cards, [LatencyOptions()]), LatencyOptions())
        return set(named(chart)), chart.subtitle

    predicted, about = drawn("l4", "h100", "h200")
    assert predicted == {"1× h100-sxm", "1× h200"} and "l4" in about
    bounds, about = drawn("l4", "mi300x")
    assert bounds == {"1× l4", "1× mi300x"} and "from the datasheet" in about


def record(rate: float | None, **more: Any) -> dict[str, Any]:
    """Return a record of a server at `rate`. Percentile p of TTFT is rate · p seconds, of TPOT twice this time."""
    times = {f"{f}_p{p}_s": (rate or 9) * p * (2 if f == "tpot" else 1) for f in ("ttft", "tpot") for p in (50, 90, 99)}
    plain = {
        "gpu": "a", "gpus": 1, "policy": "continuous", "cache": "paged", "model": "m", "requests": 7, "basis": "datasheet",
        "time_basis": "bound",
    }  # fmt: skip
    load = {"rate": rate, "requests_per_s": 0.5, "completed": 1, "diverges": False, "capacity_requests_per_s": 3.0}
    return plain | load | times | more


def test_latency_over_load_is_the_records_in_order_of_rate() -> None:
    chart, second = load_chart([record(4.0), record(1.0), record(None)])
    assert {*named(chart)} == {"p50", "p90", "p99"} and {*named(second)} == {"p50", "p90", "p99"}
    assert points(named(chart)["p99"]) == [(0.5, 9 * 99), (1.0, 99.0), (4.0, 396.0)]
    assert points(named(second)["p50"]) == [(0.5, 900), (1.0, 100.0), (4.0, 400.0)]
    assert chart.subtitle == "m, 1× a, 7 requests, times: datasheet"
    assert chart.x.title == "requests per second" and not second.subtitle


def test_servers_that_take_one_load_are_bars_up_to_the_99th_percentile() -> None:
    chart, second = load_chart([record(1.0), record(1.0, cache="b")])
    assert chart.categories == second.categories == ["paged cache", "b cache"]
    assert [s.ys for s in chart.series] == [[99.0, 99.0]]
    assert [c.title for c in (chart, second)] == ["Time to first token, p99", "Time per output token, p99"]
    more = {"throughput_tokens_per_s": 7.0, "kv_waste": 0.25, "padding_waste": 0.0, "cost_per_million_tokens": None}
    sides = load_chart([record(1.0, **more), record(1.0, cache="b", **more | {"padding_waste": 0.5})])[2:]
    assert {c.title: c.series[0].ys for c in sides} == {
        "Output tokens per second": [7.0, 7.0], "Allocated cache without a token": [0.25, 0.25],
        "Token slots with padding": [0.0, 0.5],
    }  # fmt: skip


def test_occupancy_is_the_seats_and_the_share_of_memory_over_time() -> None:
    """Two of four sequences run for two seconds, then one more. Blocks have 4 of 40 bytes, and stored tokens grow."""
    pool = byte_pool(40, block=4)
    run = served(asked((0, 3, 2), (0, 3, 3)), pool=pool, deployment=HandClock(1.0), max_num_seqs=4)
    (log,) = run.logs
    about = {"model": "m", "gpus": 1, "gpu": "g", "policy": "p", "cache": "c", "completed": 2, "basis": "b"}
    charts = occupancy_chart(ServedRun(about, run, pool, Limits(max_num_seqs=4)))
    found = named(charts[0]) | {"sequences": charts[1].series[0]}
    seconds = [(log.rows[0].start_s, 1.0, 2), (1.0, 1.0, 2), (2.0, 1.0, 1)]
    assert [(r.start_s, r.duration_s, r.sequences) for r in log.rows] == seconds

    def mean_over(label: str, start: float, end: float) -> float:
        inside = [y for x, y in points(found[label]) if start < x < end]
        return sum(inside) / len(inside)

    for start, sequences, allocated, used in ((0, 2, 8, 6), (1, 2, 8, 8), (2, 1, 8, 5)):
        assert mean_over("sequences", start, start + 1) == pytest.approx(sequences)
        assert mean_over("cache allocated", start, start + 1) == pytest.approx(allocated / 40)
        assert mean_over("cache used", start, start + 1) == pytest.approx(used / 40)
    with pytest.raises(UserError, match="no request was served"):
        occupancy_chart(ServedRun(about, served(asked((0, 99, 1)), pool=pool), pool, Limits()))


def test_idle_time_of_a_server_is_drawn_empty() -> None:
    pool = byte_pool(10)
    run = served(asked((0, 1, 1), (9, 1, 1)), pool=pool)
    about = {"model": "m", "gpus": 1, "gpu": "g", "policy": "p", "cache": "c", "completed": 2, "basis": "b"}
    series = occupancy_chart(ServedRun(about, run, pool, Limits(max_num_seqs=1)))[1].series[0]
    width = 10 / len(series.xs)
    assert sum(series.ys) * width == pytest.approx(2)  # one of one seat for two seconds of ten
    assert all(y == pytest.approx(0) for x, y in points(series) if 1 + width < x < 9 - width)


def layer(variant: str, phase: str, flops: float, moved: float, seconds: float) -> dict[str, Any]:
    about = {"device": "cpu", "dtype": "fp32", "bandwidth_bytes_per_s": 10e9, "flops_per_s": 200e9, "variant": variant}
    about |= {"batch_size": 1, "context": 512}
    return about | {
        "phase": phase, "attention_flops": flops, "attention_bytes": moved, "attention_measured_s": seconds,
        "attention_predicted_s": 2 * seconds,
    }  # fmt: skip


def test_measured_layers_lie_at_the_rate_that_they_reached() -> None:
    rows = [
        layer("gqa", "decode", 4e6, 2e6, 1e-3),
        layer("mha", "prefill", 9e9, 1e8, 0.1),
        layer("scan", "decode", 5.0, 0.0, 1.0),
    ]
    found = named(measured_chart(rows))
    assert points(found["decode"]) == [(2.0, 4e9)]
    assert points(found["prefill"]) == [(90.0, 9e10)]
    assert points(found["decode, predicted"]) == [(2.0, 2e9)]  # in twice the time
    assert (found["decode"].labels, found["prefill"].labels) == (["gqa"], ["mha"])
    assert points(found["measured ceilings"]) == [(1.0, 10e9), (20.0, 200e9), (180.0, 200e9)]  # 2/2; knee; 90·2 above 20·8


def test_a_generation_is_drawn_token_by_token() -> None:
    plain = {"model": "m", "device": "cpu", "dtype": "fp32", "prompt_len": 5, "new_tokens": 2, "head": "last", "variant": ""}
    rows = [
        plain | {"mode": "cached", "token_s": [0.5, 0.25], "predicted_token_s": [0.1, 0.2]},
        plain | {"mode": "uncached", "token_s": [1, 2], "predicted_token_s": [3, 4], "speedup": 4.0, "predicted_speedup": 23.3},
        plain | {"mode": "cat", "token_s": [5, 6], "predicted_token_s": [7, 8], "variant": "mqa"},
    ]
    chart = generation_chart(rows)
    assert {label: points(s) for label, s in named(chart).items()} == {
        "cached": [(6, 0.5), (7, 0.25)],
        "cached: predicted": [(6, 0.1), (7, 0.2)],
        "uncached": [(6, 1), (7, 2)],
        "uncached: predicted": [(6, 3), (7, 4)],
        "mqa cat": [(6, 5), (7, 6)],
        "mqa cat: predicted": [(6, 7), (7, 8)],
    }


def test_predicted_stands_over_measured() -> None:
    nan = float("nan")
    (chart,) = predicted_against_measured([("gemm", [1.0, 2.0, 3.0], [10.0, nan, 30.0]), ("moe", [5.0], [nan])], "held out")
    assert [points(series) for series in chart.series] == [[(1, 10), (3, 30)], [(1, 1), (30, 30)]]
    assert chart.title == "gemm"
    five = predicted_against_measured([(name, [1.0, 4.0, 9.0], [2.0, 4.0, 3.0]) for name in "abcde"], "held out")
    assert [(c.title, c.subtitle) for c in five] == [(name, "3 rows, median error 100.0%") for name in "abcde"]
    assert five[0].picture_head == ("Predicted against measured", "held out; the line: exact")
    assert all(c.series[1].xs == [1.0, 9.0] for c in five)
    (many,) = predicted_against_measured([("a", range(1, 2 * MAX_POINTS + 2), range(1, 2 * MAX_POINTS + 2))], "")
    assert points(many.series[0])[:2] == [(1, 1), (4, 4)]  # every third of 4,001
    with pytest.raises(UserError, match="nothing to draw"):
        predicted_against_measured([("moe", [5.0], [nan])], "")


def test_every_series_is_drawn_where_it_lies() -> None:
    series = (
        Series("line", (1.0, 10.0), (2.0, 20.0)),
        Series("dots", (3.0,), (4.0,), "points", (0.25,), ("here",)),
        Series("level", (), (7.0,), "limit"),
        Series("", (1.0, 2.0), (5.0, 6.0), colour=1),
        Series("dash", (1.0, 2.0), (8.0, 9.0), "dashed"),
    )
    (axes,) = figure([Chart("t", "s", Axis("x"), Axis("y"), series)], STYLES["light"]).axes
    drawn = [[tuple(map(float, p)) for p in line.get_xydata()] for line in axes.get_lines()]
    assert drawn == [[(1, 2), (10, 20)], [(0, 7), (1, 7)], [(1, 5), (2, 6)], [(1, 8), (2, 9)]]
    (dots,) = axes.collections
    assert dots.get_offsets().tolist() == [[3, 4]] and dots.get_sizes().tolist() == [30 + 600 * 0.25]
    assert {t.get_text(): t.xy for t in axes.texts if t.get_text() != "s"} == {
        "here": (3, 4), "line": (10, 20), "level": (1, 7), "dash": (2, 9),
    }  # fmt: skip
    assert axes.get_lines()[0].get_color() == PALETTE[0]
    assert axes.get_lines()[2].get_color() == PALETTE[1]


def test_bars_stack_in_order() -> None:
    series = (Series("a", (), (1.0, 2.0), "bar"), Series("b", (), (3.0, 4.0), "bar"), Series("most", (), (9.0,), "limit"))
    (axes,) = figure([Chart("t", "s", Axis(""), Axis("bytes"), series, ("one", "two"))], STYLES["light"]).axes
    spans = [[(bar.get_x(), bar.get_width()) for bar in stack] for stack in axes.containers]
    assert spans == [[(0, 1), (0, 2)], [(1, 3), (2, 4)]]
    assert [t.get_text() for t in axes.get_yticklabels()] == ["one", "two"]
    assert [line.get_xdata()[0] for line in axes.get_lines()] == [9]


def test_bars_of_a_sketch_say_what_the_picture_says_and_show_their_limit() -> None:
    """40 of 60 columns represent 4, so the limit of 2 is at column 20."""
    axis = Axis("", log=False, tick=lambda v: f"{v:g}")
    series = (Series("a", (), (1.0, 4.0), "bar", labels=("1 GPU", "2 GPUs")), Series("memory", (), (2.0,), "limit"))
    drawn = sketch([Chart("t", "s", axis, axis, series, ("x", "yy"))], 60).splitlines()[2:]
    assert drawn == ["x       " + "●" * 10 + " 1 GPU", "yy      " + "●" * 40 + " 2 GPUs", "memory  " + "·" * 20, "  ● a"]


def test_each_axes_have_the_roofs_that_their_own_products_use() -> None:
    """Weights of four bits are multiplied in bf16, for any other storage format in the picture."""
    model = load_model("llama-3.1-8b")
    stored = [TimedDeployment(model, H100, Precision(quantization=name)) for name in ("awq", "fp8")]
    four, eight = roofline_chart([one for d in stored for one in roofline_passes(d, 4096, [1])], [H100])
    peaks = [{s.ys[-1] for s in chart.series if s.kind == "solid"} for chart in (four, eight)]
    assert peaks == [{989e12}, {989e12, 1978.9e12}]


def test_allocators_at_the_end_fill_the_memory_and_answer_the_last_request() -> None:
    """Contiguous: two slots of 400 of 1,000 tokens, one used by A; C did not fit, and 200 tokens make no slot.
    Pieces: A, B's hole of 300, C, and 590 free.

    Pages of 16: 4 pages each for A and C, 128 tokens for 110. 62 pages of 16 are 992 tokens, so 8 make no
    page.
    """
    asked_for = (("A", 50), ("B", 300), ("C", 60), ("B", 0), ("", 700))
    steps = [AllocationStep(number, name, tokens) for number, (name, tokens) in enumerate(asked_for)]
    chart = allocations_chart(run_allocations(steps, 1000, 400, 16))
    rows = dict(zip(chart.categories, zip(*(s.ys for s in chart.series), strict=True), strict=True))
    assert rows == {
        "slots of 400": (50, 350, 400, 200), "pieces, first fit": (110, 0, 590, 300), "pages of 16": (110, 18, 864, 8),
    }  # fmt: skip
    assert chart.series[-1].labels == ["ask 700: no", "ask 700: no", "ask 700: yes"]
