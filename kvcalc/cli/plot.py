"""`kvcalc plot`: the standing figures, on stated defaults when nothing else is given."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvcalc.cli import options as o
from kvcalc.cli.chosen import chosen_gpus, chosen_model
from kvcalc.cli.common import lengths, say
from kvcalc.errors import UserError
from kvcalc.model.precision import Precision

if TYPE_CHECKING:
    from kvcalc.gpu.spec import Gpu
    from kvcalc.model.spec import Model
    from kvcalc.report.chart import Chart


class FigureKind(StrEnum):
    cache_vs_context = "cache-vs-context"
    cache_vs_parameters = "cache-vs-parameters"
    no_cache = "no-cache"
    roofline = "roofline"
    memory = "memory"
    dsa_vs_mla = "dsa-vs-mla"
    cost_vs_context = "cost-vs-context"
    measured = "measured"


FIGURES = {
    FigureKind.cache_vs_context: "the cache over context, beside the weights",
    FigureKind.cache_vs_parameters: "the cache over parameters",
    FigureKind.no_cache: "generating with a cache and without",
    FigureKind.roofline: "decode and prefill under a GPU's roof",
    FigureKind.memory: "weights and cache in a GPU's memory",
    FigureKind.dsa_vs_mla: "sparse attention against dense",
    FigureKind.cost_vs_context: "what a token costs over context",
    FigureKind.measured: "measured rows (--input rows.csv)",
}
FORMULAS = {
    FigureKind.cache_vs_context: "stored = sequences · Σ layers: rows kept of a context · bytes of a row (`size --explain`)",
    FigureKind.cache_vs_parameters: "stored as `size --explain` adds it up, over the parameters of each model",
    FigureKind.no_cache: "with a cache FLOPs of decode steps 1 … n; without, of prefills of 1 … n tokens (`roofline --explain`)",
    FigureKind.roofline: "least time = max(FLOPs / peak, bytes / bandwidth) of each operator (`roofline --explain`)",
    FigureKind.memory: "weights + sequences · cache of the context, beside the GPU's memory (`size --explain`)",
    FigureKind.dsa_vs_mla: "bytes and FLOPs of attention in a decode step: the index keys and the top-k against all latents",
    FigureKind.measured: "ratio = measured seconds / the bound's",
    FigureKind.cost_vs_context: "cost = price an hour · GPUs · seconds a token / 3600 · 10^6 (`latency --explain`)",
}
GPT3 = [f"gpt-3-{size}" for size in ("small", "medium", "large", "xl", "2.7b", "6.7b", "13b", "175b")]
DEFAULT_MODELS = {
    FigureKind.cache_vs_context: ["llama-7b", "llama-3.1-8b", "mistral-7b-v0.1", "deepseek-v3", "gemma-3-27b", "gpt-oss-120b"],
    FigureKind.cache_vs_parameters: GPT3,
    FigureKind.no_cache: ["llama-2-7b"],
    FigureKind.roofline: ["llama-3.1-8b"],
    FigureKind.memory: ["llama-3.1-8b", "qwen3-8b", "llama-2-13b", "gpt-oss-20b", "gemma-3-27b"],
    FigureKind.dsa_vs_mla: ["deepseek-v3.2", "deepseek-v3"],
    FigureKind.cost_vs_context: ["llama-7b", "llama-3.1-8b", "mistral-7b-v0.1"],
}
DEFAULT_CONTEXT = {
    FigureKind.no_cache: "65536",
    FigureKind.cache_vs_parameters: "1024,2048",
    FigureKind.memory: "8192",
    FigureKind.roofline: "4096",
}


def run(
    kind: Annotated[
        FigureKind | None, typer.Argument(help="Which figure; without one, what there are.", show_default=False)
    ] = None,
    models: Annotated[list[str], typer.Argument(help="Models, instead of the figure's own.", show_default=False)] = [],  # noqa: B006
    plot: o.Plot = "-",
    style: o.Style = "light",
    gpu: Annotated[str, typer.Option("--gpu", help="GPU presets, comma-separated.")] = "h100",
    context: Annotated[str, typer.Option("--context", help="Tokens; the last one where the figure runs over context.")] = "",
    batch_size: o.Batches = "1",
    dtype: o.Dtype = "auto",
    kv_cache_dtype: o.CacheDtype = "auto",
    price_per_hour: o.Price = 0.0,
    input_: Annotated[str, typer.Option("--input", help="Measured rows, for the figure `measured`.")] = "",
    explain: o.Explain = False,
) -> None:
    """The standing figures."""
    if kind is None:
        for known, text in FIGURES.items():
            print(f"kvcalc plot {known.value:<22}{text}")
        return
    if kind is FigureKind.measured:
        if models:
            raise UserError(f"the figure 'measured' shows the rows of --input, and no model such as {models[0]!r}")
        _shown(kind, _measured(input_), plot, style, explain)
        return
    chosen = [chosen_model(name, []) for name in models or DEFAULT_MODELS[kind]]
    gpus = chosen_gpus(gpu) if gpu else []
    contexts = lengths(context or DEFAULT_CONTEXT.get(kind, "131072"), "context")
    precision = Precision(dtype, kv_cache_dtype)
    if kind is FigureKind.cost_vs_context:
        _shown(kind, _cost(chosen, gpus, max(contexts), precision, price_per_hour), plot, style, explain)
        return
    chart = _chart(kind, chosen, gpus, contexts, lengths(batch_size, "batch size"), precision)
    _shown(kind, chart, plot, style, explain)


def _shown(kind: FigureKind, chart: "Chart", plot: str, style: str, explain: bool) -> None:
    """The picture, or the formula of what it shows with the ends of its curves."""
    if explain:
        from kvcalc.report.formulas import charted

        say(f"{FORMULAS[kind]}\n\n{charted(chart)}")
        return
    from kvcalc.report.plots import save

    save(chart, plot, style)


def _cost(chosen: "list[Model]", gpus: "list[Gpu]", last: int, precision: Precision, price: float) -> "Chart":
    from kvcalc.report.figures_cost import cost_vs_context
    from kvcalc.timing.deployment import Deployment

    return cost_vs_context([Deployment(m, g, precision).under() for m in chosen for g in gpus], last, price)


def _chart(
    kind: FigureKind, chosen: "list[Model]", gpus: "list[Gpu]", contexts: list[int], batches: list[int], precision: Precision
) -> "Chart":
    from kvcalc.capacity.memory_record import pass_with_memory
    from kvcalc.layers.batch import Batch
    from kvcalc.report import figures
    from kvcalc.report.roof import decode_sweep, roofline_chart
    from kvcalc.timing.deployment import Deployment
    from kvcalc.timing.records import roofline_records

    named = [(m.name, m, precision) for m in chosen]
    last = contexts[-1]
    if kind is FigureKind.cache_vs_context:
        return figures.cache_vs_context(named, gpus, batches[0], max(contexts))
    if kind is FigureKind.cache_vs_parameters:
        return figures.cache_vs_parameters(chosen, contexts, precision)
    if kind is FigureKind.no_cache:
        if len(chosen) > 1:
            raise UserError("the figure 'no-cache' shows one model at a time", hint=f"Give {chosen[0].name} alone")
        return figures.no_cache(chosen[0], last, precision)
    if kind is FigureKind.memory:
        return figures.memory(named, gpus, last, batches[0])
    if kind is FigureKind.dsa_vs_mla:
        return figures.dsa_vs_mla(chosen, last, precision)
    if not gpus:
        raise UserError("the figure 'roofline' needs a GPU", hint="Give --gpu")
    swept = batches if batches != [1] else [1, 8, 64, 256]
    deployments = [Deployment(m, g, precision).under() for m in chosen for g in gpus]
    passes = [one for d in deployments for one in decode_sweep(d, last, swept)]
    if len(deployments) == 1:
        records = roofline_records(deployments[0], "prefill", 1, last)
        records = pass_with_memory(deployments[0], records, Batch.prefill(last))
        passes.append((f"{chosen[0].name} prefill", records))
    return roofline_chart(passes, gpus)


def _measured(rows: str) -> "Chart":
    from kvcalc.report.plots_timing import rows_chart

    if not rows:
        raise UserError("the figure 'measured' needs --input ROWS.csv", hint="`kvcalc measure --output` writes such rows")
    return rows_chart(Path(rows))
