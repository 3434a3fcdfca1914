"""Pictures: their texts, equal bytes for equal input, labels that do not overlap, and the sketch in the terminal."""

import itertools
import subprocess
import sys
import xml.etree.ElementTree as ET
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from conftest import Run

from kvcalc import Precision, UserError, load_gpu, load_model
from kvcalc.answers.pictures import FIGURES
from kvcalc.planning import sweeps
from kvcalc.planning.sweeps import cache_curve, contexts_up_to, measured_times, roofline_passes
from kvcalc.report.charts import size_plot
from kvcalc.report.charts.chart import Axis, Chart, Series, bytes_tick, si_tick, tokens_tick
from kvcalc.report.charts.comparison_plot import predicted_against_measured
from kvcalc.report.charts.drawing import figure, rendered, save
from kvcalc.report.charts.roofline_plot import roofline_chart
from kvcalc.report.charts.series_styles import STYLES
from kvcalc.report.charts.terminal import sketch
from kvcalc.timing.deployment import TimedDeployment

KINDS = ("cache-vs-context", "cache-vs-parameters", "no-cache", "roofline", "memory", "dsa-vs-mla")
PLAIN = Precision()


@cache
def charts_of(kind: str) -> list[Chart]:
    """Return the picture of `kvcalc plot KIND` with default options."""
    models = {k: v.models.split() for k, v in FIGURES.items()}[kind]
    chosen = [load_model(name) for name in models]
    card = load_gpu("h100")
    if kind == "cache-vs-context":
        return [size_plot.cache_vs_context([cache_curve(m, PLAIN, contexts_up_to(131_072)) for m in chosen], [1], [card])]
    if kind == "cache-vs-parameters":
        return [size_plot.cache_vs_parameters([cache_curve(m, PLAIN, [1024, 2048]) for m in chosen])]
    if kind == "no-cache":
        return size_plot.generation_work_chart([sweeps.generation_work(chosen[0], 4096, PLAIN)])
    if kind == "memory":
        return [size_plot.weights_and_cache([cache_curve(m, PLAIN, [8192]) for m in chosen], [card], 1)]
    if kind == "dsa-vs-mla":
        return [size_plot.sparse_reads_chart(sweeps.sparse_reads(chosen, 131_072, PLAIN))]
    return roofline_chart(
        roofline_passes(TimedDeployment(chosen[0], card, PLAIN).with_calibration(), 4096, [1, 8, 64, 256]), [card]
    )


def texts(svg: bytes) -> str:
    """Return all texts of an SVG, one per line."""
    found = [e for e in ET.fromstring(svg).iter() if e.tag.endswith("}text")]
    return "\n".join("".join(e.itertext()).strip() for e in found)


def test_latency_draws_the_passes_of_its_table(kvcalc: Run) -> None:
    """4,096 tokens after a prompt of 1 need passes of 1 to 4,096 tokens: 4096·4097/2, not 4097·4098/2."""
    shown = kvcalc("latency gpt2 --input-len 1 --output-len 4096 --no-cache --plot -").joined
    assert "8,390,656 token projections, 8,386,560 of them redundant" in shown


def test_size_draws_each_batch_up_to_the_context(kvcalc: Run) -> None:
    """1,000 tokens of 512 KiB are 500 MiB, and 64 sequences 31.25 GiB."""
    shown = kvcalc("size llama-7b --context 50,1000 --batch-size 1,64 --plot -").joined
    assert "llama-7b batch 1: 500 MiB" in shown and "llama-7b batch 64: 31.2 GiB" in shown


@pytest.mark.parametrize("suffix", ["svg", "png", "pdf"])
def test_same_input_same_bytes(suffix: str) -> None:
    series = Series("a", (1.0, 10.0), (2.0, 30.0)), Series("b", (3.0,), (4.0,), "points", labels=("here",))
    chart = Chart("t", "s", Axis("x", tick=si_tick()), Axis("y", tick=si_tick()), series)
    assert rendered([[chart]], suffix, STYLES["light"]) == rendered([[chart]], suffix, STYLES["light"])


def test_names_are_never_mathematics() -> None:
    series = Series("a_b^c $x$ \\frac <&>", (1.0, 2.0), (3.0, 4.0))
    chart = Chart("$\\alpha$ 100%", "50% & <b>", Axis("x $", tick=si_tick()), Axis("y", tick=si_tick()), (series,))
    shown = texts(rendered([[chart]], "svg", STYLES["light"])[0])
    for text in ("a_b^c $x$ \\frac <&>", "$\\alpha$ 100%", "50% & <b>"):
        assert text in shown


def coloured(axes: Any) -> list[tuple[str, str]]:
    """Return colour and dashes of all lines that are not grey."""
    ink = STYLES["light"].ink
    return [(line.get_color(), str(line._unscaled_dash_pattern)) for line in axes.get_lines() if line.get_color() != ink]


def test_no_two_of_16_lines_look_the_same_and_more_are_refused() -> None:
    lines = [Series(f"{n}", (1.0, 2.0), (n + 1.0, n + 2.0)) for n in range(17)]
    chart = Chart("t", "s", Axis("x", log=False), Axis("y", log=False), lines[:16])
    (axes,) = figure([chart], STYLES["light"]).axes
    assert len(set(coloured(axes))) == 16
    assert [t.get_text() for t in axes.texts] == [line.label for line in lines[:16]]
    with pytest.raises(UserError, match="17 curves are more than the 16"):
        figure([chart._replace(series=lines)], STYLES["light"])


@pytest.mark.parametrize(
    ("line", "suffix"), [("roofline llama-2-7b --batch-size 1,8 --format json", "PNG"), ("compare llama-7b --format json", "pdf")]
)
def test_commands_with_a_picture_write_it_beside_their_answer(kvcalc: Run, tmp_path: Path, line: str, suffix: str) -> None:
    target = tmp_path / f"picture.{suffix}"
    result = kvcalc(line, "--plot", str(target))
    assert result.records and target.stat().st_size > 5000


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--plot", "out.gif"], "should end in one of .png, .svg, .pdf"),
        (["--plot", "out"], "should end in one of"),
        (["--plot", ".png"], "should end in one of"),
        (["--plot", "no/such/folder/out.png"], "no such folder"),
        (["--plot", "out.png", "--style", "neon"], "unknown style 'neon'. Known: dark, light, slides"),
        (["--plot", "folder.png"], "cannot be written"),
        (["--plot", "out.svg", "--gpu", "apple-m3-max"], "no matrix peak"),
    ],
)
def test_a_picture_that_cannot_be_is_one_clear_line_and_no_file(
    kvcalc: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.png").mkdir()
    code, _, err = kvcalc("roofline llama-2-7b", *words)
    assert code == 2
    assert said in err and err.count("\n") == 1
    assert [p.name for p in tmp_path.rglob("*")] == ["folder.png"]


@pytest.mark.parametrize("width", [40, 60, 80, 120])
@pytest.mark.parametrize("kind", KINDS)
def test_sketch_fits_the_width(kind: str, width: int) -> None:
    charts = charts_of(kind)
    lines = sketch(charts, width).splitlines()
    assert max(map(len, lines)) <= width
    words = " ".join(" ".join(lines).split())
    for chart in charts:
        assert chart.title in words
        assert all(series.label in words for series in chart.series)
    assert all(line.isprintable() for line in lines)


def test_sketch_draws_each_series_where_it_lies() -> None:
    """One line rises from corner to corner, one is level at half the height."""
    tick = si_tick()
    series = (Series("rising", (1.0, 100.0), (1.0, 10_000.0)), Series("level", (), (100.0,), "limit"))
    lines = sketch([Chart("t", "s", Axis("x", tick=tick), Axis("y", tick=tick), series)], 60).splitlines()
    grid = [line.partition("│")[2] for line in lines if "│" in line]
    assert len(grid) == 20
    assert "\u2800" < grid[-1][0] <= "\u28ff" and grid[0].rstrip().endswith("●")
    dots = [[x for x, c in enumerate(row) if "\u2800" < c <= "\u28ff" or c == "●"] for row in grid]
    assert all(below[-1] < above[-1] for above, below in itertools.pairwise(dots))
    assert sum("·" in row for row in grid) == 1
    assert lines[-2:] == ["  ● rising", "  · level"]


def test_names_in_a_sketch_control_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    axis, name = Axis("y", log=False, tick=si_tick()), "\x1b[2J"
    bars = Chart(name, name, axis, axis, (Series(name, (), (8.0,), "bar", labels=(name,)),), (name,), picture_head=(name, name))
    save([bars, bars], "-")
    said = capsys.readouterr().out
    assert "\x1b" not in said and said.count("\ufffd[2J") == 14


def test_ticks() -> None:
    assert [tokens_tick(v) for v in (1, 1000, 1024, 4096, 131_072, 1 << 20)] == ["1", "1000", "1k", "4k", "128k", "1M"]
    assert [bytes_tick(v) for v in (512, 1 << 20, 3 << 29)] == ["512 B", "1 MiB", "1.5 GiB"]
    assert si_tick("FLOP/s")(9.89e14) == "989 TFLOP/s"


@pytest.mark.parametrize("line", ["roofline llama-2-7b", "compare llama-7b", "plot dsa-vs-mla --plot -", "size gpt2"])
def test_matplotlib_is_imported_only_for_a_picture(line: str) -> None:
    program = (
        f"import sys\nfrom kvcalc.cli.app import build\nbuild({line.split()!r})({line.split()!r}, standalone_mode=False)\n"
        "assert not {m for m in sys.modules if m.partition('.')[0] in ('matplotlib', 'torch')}"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_measured_rows_of_any_machine_are_drawn(kvcalc: Run, tmp_path: Path) -> None:
    """Rows without a preset are compared with the bound in the file. Rows without a bound are not drawn."""
    rows, target = tmp_path / "gemm.csv", tmp_path / "measured.svg"
    rows.write_text("gpu,framework,version,dtype,m,n,k,time_us,bound_us\n" "my CPU,torch,2,float32,64,4096,4096,20,10\n"
                    "my CPU,torch,2,float32,64,4096,2048,20,\n")  # fmt: skip
    (chart,) = predicted_against_measured(*measured_times(rows))
    assert chart.title == "gemm" and (chart.series[0].xs, chart.series[0].ys) == ((20.0,), (10.0,))
    assert (
        chart.picture_head[1]
        == "gemm.csv: 1 of 2 rows, of my CPU, predicted by a calibration, else by the bound; the line: exact"
    )
    assert kvcalc(f"plot measured --input {rows} --plot {target}").code == 0
    rows.write_text("op,gpu,framework,num_gpus,bytes,dtype,time_us\nallreduce,nosuch,nccl,2,1024,bfloat16,20.0\n")
    code, _, err = kvcalc(f"plot measured --input {rows} --plot {tmp_path / 'none.svg'}")
    assert code == 2 and "nosuch" in err and not (tmp_path / "none.svg").exists()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("dsa-vs-mla llama-7b llama-2-7b", "such as deepseek-v3.2 and deepseek-v3; llama-7b has MHA, llama-2-7b has MHA"),
        ("dsa-vs-mla recurrentgemma-2b deepseek-v3", "recurrentgemma-2b has 18× RG-LRU, 8× MQA window 2048, deepseek-v3 has MLA"),
        ("dsa-vs-mla deepseek-v3 kimi-k2", "one with DSA and one with MLA"),
        ("cache-vs-parameters deepseek-v3.2", "two models or more, best the sizes of one family"),
        ("measured", "needs --input ROWS.csv"),
        ("measured gpt2 --input rows.csv", "the rows of --input, and no model such as 'gpt2'"),
    ],
)
def test_a_figure_refuses_models_that_it_does_not_suit(kvcalc: Run, line: str, said: str) -> None:
    code, out, err = kvcalc(f"plot {line}")
    assert (code, out) == (2, "") and err.startswith("kvcalc: ") and said in err and err.count("\n") == 1


def test_memory_stands_beside_every_gpu_and_counts_those_of_one(kvcalc: Run) -> None:
    """Llama-2-13B at 16 × 8,192: 26.03 GB of weights and 800 KiB per token, 107.4 GB: 133.4 GB are 2 of 85.0 GB."""
    one = charts_of("memory")[0].series
    assert [s.label for s in one if s.kind == "limit"] == ["h100-sxm: 79.2 GiB"]
    curves = [cache_curve(load_model(name), PLAIN, [8192], 16) for name in ("llama-2-13b", "gpt2")]
    one_gpu = size_plot.weights_and_cache(curves, [load_gpu("h100")], 16)
    assert one_gpu.series[1].labels == ["124.2 GiB, 2 GPUs", "4.7 GiB, 1 GPU"]
    several = size_plot.weights_and_cache(curves, [load_gpu(name) for name in ("h100", "h200", "h200")], 16).series
    assert several[1].labels == ["124.2 GiB", "4.7 GiB"] and [s.label.split(":")[0] for s in several[2:]] == [
        "h100-sxm", "h200, h200",
    ]  # fmt: skip


def test_several_deployments_stand_under_roofs_of_their_own_on_the_same_axes() -> None:
    cards = [load_gpu("h100"), load_gpu("l4")]
    both = [TimedDeployment(load_model("llama-3.1-8b"), card).with_calibration("datasheet") for card in cards]
    passes = [one for d in both for one in roofline_passes(d, 4096, [1])]
    first, second = roofline_chart(passes, cards)
    assert (first.picture_head[0], first.title, second.title) == ("Roofline: llama-3.1-8b decode", "h100-sxm", "l4")
    least = min(row["intensity"] for rows in passes for row in rows[:-1] if row["flops"] and row["intensity"])
    assert (
        first.y.shown == second.y.shown == [least / 3 * 300e9, 2 * 989e12]
    )  # the foot of L4's slope, and room above H100's flat roof
    for chart, peak, other in ((first, 989e12, 121e12), (second, 121e12, 989e12)):
        assert {s.kind: s.ys[-1] for s in chart.series if s.kind in ("solid", "quiet")} == {"solid": peak, "quiet": other}
        texts = [text for s in chart.series if s.kind == "points" and s.label for text in s.labels if text]
        assert sorted(texts) == ["GEMMs with weights", "attention"]
        assert not [s for s in chart.series if s.kind in ("span", "hollow")]  # no sweep, no calibration
