"""`kvcalc plot`: the standing figures, on stated defaults when nothing else is given."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvcalc.cli import options as o
from kvcalc.cli.common import lengths
from kvcalc.model.precision import Precision

if TYPE_CHECKING:
    from kvcalc.report.chart import Chart


class FigureKind(StrEnum):
    cache_vs_context = "cache-vs-context"
    cache_vs_parameters = "cache-vs-parameters"
    no_cache = "no-cache"
    roofline = "roofline"
    memory = "memory"
    dsa_vs_mla = "dsa-vs-mla"
    measured = "measured"


GPT3 = [f"gpt-3-{size}" for size in ("small", "medium", "large", "xl", "2.7b", "6.7b", "13b", "175b")]
DEFAULT_MODELS = {
    FigureKind.cache_vs_context: ["llama-7b", "llama-3.1-8b", "mistral-7b-v0.1", "deepseek-v3", "gemma-3-27b", "gpt-oss-120b"],
    FigureKind.cache_vs_parameters: GPT3,
    FigureKind.no_cache: ["llama-2-7b"],
    FigureKind.roofline: ["llama-3.1-8b"],
    FigureKind.memory: ["llama-3.1-8b", "qwen3-8b", "llama-2-13b", "gpt-oss-20b", "gemma-3-27b"],
    FigureKind.dsa_vs_mla: ["deepseek-v3.2", "deepseek-v3"],
}
DEFAULT_CONTEXT = {
    FigureKind.no_cache: "65536",
    FigureKind.cache_vs_parameters: "1024,2048",
    FigureKind.memory: "8192",
    FigureKind.roofline: "4096",
}


def run(
    kind: Annotated[FigureKind, typer.Argument(help="Which figure.", show_default=False)],
    models: Annotated[list[str], typer.Argument(help="Models, instead of the figure's own.", show_default=False)] = [],  # noqa: B006
    plot: o.Plot = "-",
    style: o.Style = "light",
    gpu: Annotated[str, typer.Option("--gpu", help="GPU presets, comma-separated.")] = "h100",
    context: Annotated[str, typer.Option("--context", help="Tokens; the last one where the figure runs over context.")] = "",
    batch_size: o.Batches = "1",
    dtype: o.Dtype = "auto",
    kv_cache_dtype: o.CacheDtype = "auto",
    input_: Annotated[str, typer.Option("--input", help="Measured rows, for the figure `measured`.")] = "",
) -> None:
    """The standing figures."""
    from kvcalc.errors import UserError
    from kvcalc.library.load import load_gpu, load_model
    from kvcalc.report import figures
    from kvcalc.report.plots import save

    if kind is FigureKind.measured:
        if not input_:
            raise UserError("the figure 'measured' needs --input ROWS.csv", hint="`kvcalc measure --output` writes such rows")
        save(_measured(input_), plot, style)
        return
    chosen = [load_model(name) for name in models or DEFAULT_MODELS[kind]]
    gpus = [load_gpu(name.strip()) for name in gpu.split(",")] if gpu else []
    contexts = lengths(context or DEFAULT_CONTEXT.get(kind, "131072"), "context")
    batches = lengths(batch_size, "batch size")
    precision = Precision(dtype, kv_cache_dtype)
    named = [(m.name, m, precision) for m in chosen]
    first_gpu = gpus[0] if gpus else None
    if kind is FigureKind.cache_vs_context:
        chart = figures.cache_vs_context(named, first_gpu, batches[0], max(contexts))
    elif kind is FigureKind.cache_vs_parameters:
        chart = figures.cache_vs_parameters(chosen, contexts, precision)
    elif kind is FigureKind.no_cache:
        chart = figures.no_cache(chosen[0], contexts[-1], precision)
    elif kind is FigureKind.memory:
        chart = figures.memory(named, first_gpu, contexts[-1], batches[0])
    elif kind is FigureKind.dsa_vs_mla:
        if len(chosen) != 2:
            raise UserError("the figure 'dsa-vs-mla' compares two models: the sparse one first")
        chart = figures.dsa_vs_mla(chosen[0], chosen[1], contexts[-1], Precision(dtype, kv_cache_dtype))
    else:
        from kvcalc.report.roof import decode_sweep, roofline_chart

        batches = batches if batches != [1] else [1, 8, 64, 256]
        chart = roofline_chart([p for m in chosen for p in decode_sweep(m, gpus[0], contexts[-1], batches, precision)], gpus)
    save(chart, plot, style)


def _measured(path: str) -> "Chart":
    """Measured rows against the calibrated time, or the datasheet bound where no calibration applies, by operation."""
    import numpy as np

    from kvcalc.errors import UserError
    from kvcalc.report.plots_timing import predicted_against_measured
    from kvcalc.timing.validation import validate

    (found,) = validate([Path(path)])
    predicted = np.where(np.isnan(found.calibrated), found.bound, found.calibrated)
    if not (predicted > 0).any():
        raise UserError("no row has a prediction to stand beside it", path, "; ".join(found.remarks))
    series: dict[str, tuple[list[float], list[float]]] = {}
    for row, value in zip(found.table.rows, predicted, strict=True):
        measured, expected = series.setdefault(row.op, ([], []))
        measured.append(row.time_us)
        expected.append(float(value))
    calibrated = int((found.calibrated > 0).sum())
    what = f"{Path(path).name}; predicted by a calibration in {calibrated:,} of {len(predicted):,} rows, else the bound"
    return predicted_against_measured([(op, *both) for op, both in series.items()], what)
