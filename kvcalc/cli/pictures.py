"""`kvcalc plot`, which draws standard figures, and `kvcalc report`, which writes a page."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

from kvcalc.cli import options as o
from kvcalc.cli.option_groups import Deploying, chosen_gpus, chosen_model
from kvcalc.cli.options import Argument, Option, lengths, save_text, say
from kvcalc.errors import UserError
from kvcalc.library.choices import DATASHEET
from kvcalc.model.precision import Precision

if TYPE_CHECKING:
    from kvcalc.gpu.gpu import Gpu
    from kvcalc.model.model import Model
    from kvcalc.report.charts.chart import Chart


class FigureKind(StrEnum):
    cache_vs_context = "cache-vs-context"
    cache_vs_parameters = "cache-vs-parameters"
    no_cache = "no-cache"
    roofline = "roofline"
    memory = "memory"
    dsa_vs_mla = "dsa-vs-mla"
    cost_vs_context = "cost-vs-context"
    measured = "measured"


class Figure(NamedTuple):
    """What a figure shows.

    Attributes:
        summary: Text of the list of figures.
        formula: Text of `--explain`.
        models: Names of the models that it shows by default, separated by spaces.
        context: Tokens by default.
    """

    summary: str
    formula: str
    models: str = ""
    context: str = "131072"


GPT3 = (
    "gpt-3-small gpt-3-medium gpt-3-large gpt-3-xl gpt-3-2.7b gpt-3-6.7b gpt-3-13b gpt-3-175b"
)
FIGURES = {
    FigureKind.cache_vs_context: Figure(
        "the cache over context, beside the weights",
        "stored = sequences · Σ layers: rows kept of a context · bytes of a row (`size --explain`)",
        "llama-7b llama-3.1-8b mistral-7b-v0.1 deepseek-v3 gemma-3-27b gpt-oss-120b",
    ),
    FigureKind.cache_vs_parameters: Figure(
        "the cache over parameters",
        "stored as `size --explain` adds it up, over the parameters of each model",
        GPT3,
        "1024,2048",
    ),
    FigureKind.no_cache: Figure(
        "generating with a cache and without",
        "with a cache FLOPs of decode steps 1 … n; without, of prefills of 1 … n tokens "
        "(`roofline --explain`)",
        "llama-2-7b",
        "65536",
    ),
    FigureKind.roofline: Figure(
        "decode and prefill under a GPU's roof",
        "least time = max(FLOPs / peak, bytes / bandwidth) of each operator (`roofline --explain`)",
        "llama-3.1-8b",
        "4096",
    ),
    FigureKind.memory: Figure(
        "weights and cache in a GPU's memory",
        "weights + sequences · cache of the context, beside the GPU's memory (`size --explain`)",
        "llama-3.1-8b qwen3-8b llama-2-13b gpt-oss-20b gemma-3-27b",
        "8192",
    ),
    FigureKind.dsa_vs_mla: Figure(
        "sparse attention against dense",
        "bytes and FLOPs of attention in a decode step: the index keys and the top-k against "
        "all latents",
        "deepseek-v3.2 deepseek-v3",
    ),
    FigureKind.cost_vs_context: Figure(
        "what a token costs over context",
        "cost = price an hour · GPUs · seconds a token / 3600 · 10^6 (`latency --explain`)",
        "llama-7b llama-3.1-8b mistral-7b-v0.1",
    ),
    FigureKind.measured: Figure(
        "measured rows (--input rows.csv)", "ratio = measured seconds / the bound's"
    ),
}


def run_plot(
    kind: Annotated[
        FigureKind | None,
        Argument("Figure to draw; without one, kvcalc lists the figures", takes="FIGURE"),
    ] = None,
    models: Annotated[
        list[str],
        Argument(
            "Models to draw, instead of the figure's default models",
            takes="MODEL…",
            words=o.model_names,
        ),
    ] = [],  # noqa: B006
    plot: o.Plot = "-",
    style: o.Style = "light",
    gpu: o.Gpus = "h100",
    context: Annotated[
        str,
        Option(
            "Tokens per sequence, or the last context of the axis; a list",
            takes="TOKENS",
            called=o.CONTEXT_WORDS,
        ),
    ] = "",
    batch_size: o.BatchSizes = "1",
    dtype: o.Dtype = "auto",
    kv_cache_dtype: o.CacheDtype = "auto",
    price_per_hour: o.Price = 0.0,
    input_: Annotated[
        str,
        Option("CSV file of measured rows, for the figure `measured`", "--input", "FILE"),
    ] = "",
    explain: o.Explain = False,
) -> None:
    """Draw a standard figure."""
    if kind is None:
        for known, figure in FIGURES.items():
            print(f"kvcalc plot {known.value:<22}{figure.summary}")
        return
    if kind is FigureKind.measured:
        chart = _measured_chart(models, input_)
    else:
        figure = FIGURES[kind]
        loaded = [chosen_model(name, []) for name in models or figure.models.split()]
        gpus = chosen_gpus(gpu) if gpu else []
        contexts = lengths(context or figure.context, "context")
        batches = lengths(batch_size, "batch size")
        precision = Precision(dtype, kv_cache_dtype)
        if kind in (FigureKind.roofline, FigureKind.cost_vs_context):
            chart = _timed_chart(
                kind, (loaded, gpus, precision), contexts, batches, price_per_hour
            )
        else:
            chart = _chart(kind, loaded, gpus, (contexts, batches[0]), precision)
    if explain:
        from kvcalc.report.explain import charted

        say(f"{FIGURES[kind].formula}\n\n{charted(chart)}")
        return
    from kvcalc.report.charts.drawing import save

    save(chart, plot, style)


def _timed_chart(
    kind: FigureKind,
    deployed: "tuple[list[Model], list[Gpu], Precision]",
    contexts: list[int],
    batches: list[int],
    price_per_hour: float,
) -> "Chart":
    """Return costs over contexts; or decode, and the prefill of a single deployment, under
    roofs."""
    from kvcalc.planning.sweeps import cost_curves, decode_passes, prefill_pass
    from kvcalc.report.charts.latency_plot import cost_vs_context
    from kvcalc.report.charts.roofline_plot import roofline_chart
    from kvcalc.timing.deployment import TimedDeployment

    models, gpus, precision = deployed
    deployments = [TimedDeployment(m, g, precision).under() for m in models for g in gpus]
    if not deployments:
        raise UserError(f"the figure '{kind}' needs a GPU", hint="Give --gpu")
    if kind is FigureKind.cost_vs_context:
        curves = cost_curves(deployments, max(contexts), price_per_hour)
        return cost_vs_context(curves, price_per_hour)
    context, swept = contexts[-1], batches if batches != [1] else [1, 8, 64, 256]
    passes = [rows for d in deployments for rows in decode_passes(d, context, swept)]
    if len(deployments) == 1:
        passes.append(prefill_pass(deployments[0], context))
    return roofline_chart(passes, gpus)


def _chart(
    kind: FigureKind,
    models: "list[Model]",
    gpus: "list[Gpu]",
    load: tuple[list[int], int],
    precision: Precision,
) -> "Chart":
    """Return a figure about sizes; `load` is contexts and a batch size."""
    from kvcalc.planning import sweeps
    from kvcalc.report.charts import size_plot

    contexts, batch_size = load
    if kind is FigureKind.cache_vs_context:
        axis = sweeps.contexts_up_to(max(contexts))
        curves = [sweeps.cache_curve(m, precision, axis, batch_size) for m in models]
        return size_plot.cache_vs_context(curves, batch_size, gpus)
    if kind is FigureKind.cache_vs_parameters:
        return size_plot.cache_vs_parameters(
            [sweeps.cache_curve(m, precision, contexts) for m in models]
        )
    if kind is FigureKind.memory:
        curves = [sweeps.cache_curve(m, precision, contexts[-1:], batch_size) for m in models]
        return size_plot.weights_and_cache(curves, gpus, batch_size)
    if kind is FigureKind.dsa_vs_mla:
        reads = sweeps.sparse_reads(models, contexts[-1], precision)
        return size_plot.sparse_reads_chart(reads)
    if len(models) > 1:
        raise UserError(
            "the figure 'no-cache' shows one model at a time",
            hint=f"Give {models[0].name} alone",
        )
    work = sweeps.generation_work(models[0], contexts[-1], precision)
    return size_plot.generation_work_chart([work])


def _measured_chart(models: list[str], rows: str) -> "Chart":
    from kvcalc.planning.sweeps import measured_times
    from kvcalc.report.charts.measured_plot import measured_times_chart

    if models:
        raise UserError(
            f"the figure 'measured' shows the rows of --input, and no model such as {models[0]!r}"
        )
    if not rows:
        raise UserError(
            "the figure 'measured' needs --input ROWS.csv",
            hint="`kvcalc measure --output` writes such rows",
        )
    return measured_times_chart(Path(rows).name, measured_times(Path(rows)))


def run_report(
    model: o.OneModel,
    *,
    gpu: Annotated[
        str,
        Option("GPU preset or YAML file", takes="GPU", is_common=True, words=o.gpu_names),
    ] = "h100",
    output: Annotated[
        str,
        Option(
            "HTML file to write; - prints it",
            "--output -o",
            "FILE",
            is_common=True,
            is_output=True,
        ),
    ] = "report.html",
    context: Annotated[
        str,
        Option(
            "Tokens per user: 32k",
            takes="TOKENS",
            is_common=True,
            called=o.CONTEXT_WORDS,
        ),
    ] = "8192",
    users: Annotated[int, Option("Concurrent users", is_common=True, called=o.USER_WORDS)] = 8,
    deploying: Deploying,
    explain: o.Explain = False,
) -> None:
    """Write one self-contained HTML page."""
    from kvcalc.library.files import destination
    from kvcalc.report.web.page import PageRequest, html_page, page_explained

    if output != "-" and not explain:
        destination(output)
    deployments, contexts = (
        deploying.deployments([model], gpu),
        lengths(context, "context"),
    )
    if len(deployments) != 1 or len(contexts) != 1:
        raise UserError(
            "a page is about one deployment and one context",
            hint="Make a page of each; `kvcalc fit` takes lists",
        )
    stored, run_on = _words(deploying)
    requested = PageRequest((model, *stored), ("--gpu", gpu, *run_on), contexts[0], users)
    if explain:
        say(page_explained(deployments[0], requested))
        return
    save_text(output, html_page(deployments[0], requested))


def _words(deploying: Deploying) -> tuple[list[str], list[str]]:
    """Return the user's options: how the model is stored and sharded, and how it runs."""
    precisions, ranks, choice = (
        deploying.precisions,
        deploying.ranks,
        deploying.choices()[0],
    )
    stored = _changed(ranks, "tp dp ep dcp")
    stored += _changed(precisions, "dtype kv_cache_dtype quantization")
    if ranks.enable_expert_parallel:
        stored.append("--enable-expert-parallel")
    for change in deploying.set_:
        stored += ["--set", change]
    run_words = _changed(deploying, "mla_form memory")
    run_words += ["--engine", choice.engine] if choice.engine != "vllm" else []
    run_words += _changed(deploying, "engine_version")
    if choice.calibration == DATASHEET:
        return stored, [
            *run_words,
            *_changed(deploying, "calibration_from"),
            "--bounds",
        ]
    run_words += ["--calibration", choice.calibration] if choice.calibration else []
    return stored, run_words + _changed(deploying, "calibration_from")


def _changed(options: object, names: str) -> list[str]:
    """Return options without their default values, as words of a command line."""
    words = []
    for name in names.split():
        value = str(getattr(options, name))
        if value not in ("", "auto", "1"):
            words += [f"--{name.replace('_', '-')}", value]
    return words
