"""`kvcalc plot`, which draws standard figures, and `kvcalc report`, which writes a page."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec

from kvcalc.answers.answer import save_text, say
from kvcalc.answers.deployments import deployments_of, gpu_words, models_of
from kvcalc.errors import UserError
from kvcalc.question.deployment_options import DeploymentOptions, ShardingOptions
from kvcalc.question.options import Parameter, Question, Tokens, parameters_in
from kvcalc.units import parse_tokens

if TYPE_CHECKING:
    from kvcalc.report.charts.chart import Chart


class StandardFigure(msgspec.Struct):
    """A picture that `kvcalc plot` can draw.

    Attributes:
        summary: Description in the list of pictures that `kvcalc plot` prints.
        formula: How the drawn values are computed; the first line of `--explain`.
        models: Names of the models that it shows by default, separated by spaces.
        context: Default context in tokens, or a comma-separated list.
    """

    summary: str
    formula: str
    models: str = ""
    context: str = "131072"


FIGURES = msgspec.json.decode(
    Path(__file__).with_name("figures.json").read_bytes(), type=dict[str, StandardFigure]
)


class FigureOptions(Question, frozen=True):
    """The GPUs, contexts, batch sizes and data types in a picture of `kvcalc plot`.

    Attributes:
        gpu: GPUs whose roofline or memory is drawn. Other pictures do not use them.
        context: Tokens per sequence. `cache-vs-parameters` draws all of them, and the axis of
            `cache-vs-context` ends at the largest. Other pictures use the last. () for the
            picture's default.
        batch_size: Numbers of sequences. `roofline` draws all of them, and 1, 8, 64 and 256 by
            default. Other pictures use the first, or one sequence.
        dtype: Data type of the weights. Only the first is used.
        kv_cache_dtype: Data type of the cache. Only the first is used.
    """

    gpu: tuple[str, ...] = ("h100",)
    context: Annotated[tuple[int, ...], parse_tokens] = ()
    batch_size: Annotated[tuple[int, ...], parse_tokens] = (1,)
    dtype: tuple[str, ...] = ("auto",)
    kv_cache_dtype: tuple[str, ...] = ("auto",)


def run_plot(
    kind: str = "",
    models: list[str] = [],  # noqa: B006 (no function changes the list)
    *,
    figure: FigureOptions,
    plot: str = "-",
    style: str = "light",
    input_: str = "",
    explain: bool = False,
) -> None:
    """Draw a standard picture, such as the KV cache over context, to a file or the terminal.

    Args:
        kind: Name of the picture, a key of FIGURES; '' prints the list of pictures.
        models: Models; empty for the picture's default models.
        figure: GPUs, contexts, batch sizes and data types.
        plot: File to write; `-` draws in the terminal.
        style: light, dark or slides.
        input_: CSV file with measured kernel times, needed only by the picture `measured`.
        explain: Whether to print the drawn values and their formula instead.
    """
    if not kind:
        for name, shown_figure in FIGURES.items():
            print(f"kvcalc plot {name:<22}{shown_figure.summary}")
        return
    charts = (
        _measured_chart(models, input_) if kind == "measured" else _figure(kind, models, figure)
    )
    if explain:
        from kvcalc.report.explain import explain_chart

        say("\n".join([FIGURES[kind].formula, "", *map(explain_chart, charts)]))
        return
    from kvcalc.report.charts.drawing import save

    save(charts, plot, style)


def _figure(kind: str, names: list[str], options: FigureOptions) -> "list[Chart]":
    """Return a figure about models."""
    from kvcalc.library.load import load_gpu
    from kvcalc.model.precision import Precision
    from kvcalc.planning import sweeps
    from kvcalc.report.charts import size_plot
    from kvcalc.report.charts.roofline_plot import roofline_chart
    from kvcalc.timing.deployment import TimedDeployment

    figure, batch_size = FIGURES[kind], options.batch_size[0]
    models = models_of(names or figure.models.split())
    gpus = [load_gpu(word) for word in gpu_words(",".join(options.gpu))]
    contexts = options.context or [parse_tokens(word) for word in figure.context.split(",")]
    last = contexts[-1]
    precision = Precision(options.dtype[0], options.kv_cache_dtype[0])
    if kind == "cache-vs-context":
        axis = sweeps.contexts_up_to(max(contexts))
        curves = [sweeps.cache_curve(model, precision, axis, batch_size) for model in models]
        return [size_plot.cache_vs_context(curves, [batch_size], gpus)]
    if kind == "cache-vs-parameters":
        curves = [sweeps.cache_curve(model, precision, contexts) for model in models]
        return [size_plot.cache_vs_parameters(curves)]
    if kind == "memory":
        curves = [sweeps.cache_curve(model, precision, [last], batch_size) for model in models]
        return [size_plot.weights_and_cache(curves, gpus, batch_size)]
    if kind == "dsa-vs-mla":
        return [size_plot.sparse_reads_chart(sweeps.sparse_reads(models, last, precision))]
    if kind == "no-cache":
        works = [sweeps.generation_work(model, last, precision) for model in models]
        return size_plot.generation_work_chart(works)
    deployments = [
        TimedDeployment(model, gpu, precision).with_calibration()
        for model in models
        for gpu in gpus
    ]
    batches = options.batch_size if options.batch_size != (1,) else (1, 8, 64, 256)
    passes = [rows for d in deployments for rows in sweeps.roofline_passes(d, last, batches)]
    if len(deployments) == 1:
        passes += sweeps.roofline_passes(deployments[0], last, [1], "prefill")
    return roofline_chart(passes, gpus)


def _measured_chart(models: list[str], rows: str) -> "list[Chart]":
    from kvcalc.planning.sweeps import measured_times
    from kvcalc.report.charts.comparison_plot import predicted_against_measured

    if models:
        raise UserError(
            f"the figure 'measured' shows the rows of --input, and no model such as {models[0]!r}"
        )
    if not rows:
        raise UserError(
            "the figure 'measured' needs --input ROWS.csv",
            "`kvcalc measure --output` writes such rows",
        )
    return predicted_against_measured(*measured_times(Path(rows)))


class PageOptions(Question, frozen=True):
    """The load for which the report page is written.

    Attributes:
        context: Tokens of each user.
        users: Concurrent users.
    """

    context: Tokens = 8192
    users: int = 8


def run_report(
    model: str,
    *,
    output: str = "report.html",
    deploying: list[DeploymentOptions],
    page: PageOptions,
    explain: bool = False,
) -> None:
    """Write a report page on one deployment as a single HTML file.

    The page shows whether the load fits, how big the cache is, and how long a step and a request
    take.

    Args:
        model: Name or file of the model.
        output: HTML file to write; `-` prints it.
        deploying: The deployment, in a list of one.
        page: The number of users and their contexts.
        explain: Whether to print how the page's values are computed instead.
    """
    from kvcalc.answers.page import PageRequest, html_page, page_sections
    from kvcalc.library.files import destination

    if output != "-" and not explain:
        destination(output)
    deployments = deployments_of([model], deploying)
    if len(deployments) != 1:
        raise UserError(
            "a page is about one deployment and one context",
            "Make a page of each; `kvcalc fit` takes lists",
        )
    deployments[0].model.check_generates()
    stored = parameters_in(ShardingOptions)
    placed = [
        p for p in parameters_in(DeploymentOptions) if p not in stored and p.name != "gpu"
    ]
    request = PageRequest(
        (model, *_typed_words(deploying[0], stored)),
        ("--gpu", deploying[0].gpu, *_typed_words(deploying[0], placed)),
        page.context,
        page.users,
    )
    if explain:
        for title, command, answer in page_sections(deployments[0], request):
            say(f"{title}\n{command} --explain\n\n{answer._explanation()}")
        return
    save_text(output, html_page(deployments[0], request))


def _typed_words(options: DeploymentOptions, parameters: list[Parameter]) -> list[str]:
    """Return the options that differ from their defaults, as words of a command line."""
    words = []
    for parameter in parameters:
        value = getattr(options, parameter.name)
        name = min((name for name in parameter.names if name.startswith("--")), key=len)
        if value == parameter.default:
            continue
        for item in value if parameter.is_list else [value]:
            words += [name] if parameter.is_flag else [name, str(item)]
    return words
