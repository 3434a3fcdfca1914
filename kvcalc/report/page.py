"""The report page: sections with a sentence, a table, a picture and a command, and two sliders."""

import json
import shlex
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from importlib.resources import files
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from kvcalc.capacity import Fit, fit
from kvcalc.capacity.fit_options import options_for
from kvcalc.capacity.fit_records import fit_record, pass_with_memory
from kvcalc.errors import UserError
from kvcalc.layers.batch import Batch
from kvcalc.model.memory import size_record, stage_rows
from kvcalc.model.pipeline import stages
from kvcalc.model.precision import stored_as
from kvcalc.planning.comparison import compare_records
from kvcalc.planning.sweeps import comparison_sweep, decode_passes, latency_sweep
from kvcalc.planning.variants import variant
from kvcalc.question.serving_options import LatencyOptions
from kvcalc.report.charts.chart import Chart
from kvcalc.report.charts.comparison_plot import compare_chart
from kvcalc.report.charts.fit_plot import memory_chart
from kvcalc.report.charts.load_plot import latency_chart
from kvcalc.report.charts.roofline_plot import roofline_chart
from kvcalc.report.explain import explain_fit, explain_roofline, explain_size, explained
from kvcalc.report.text.compare_text import compare_tables, size_table
from kvcalc.report.text.fit_text import fit_table
from kvcalc.report.text.roofline_text import pass_table
from kvcalc.report.text.serving_text import latency_tables
from kvcalc.report.text.table_layout import Table, svgs_html, table_html, text_html
from kvcalc.serving.request_latency import latency_record
from kvcalc.timing.deployment import TimedDeployment, roofline_records

MAX_USERS = 512
VARIANTS = ("none", "mha", "gqa:8", "mqa", "mla", "window:4096")
PROMPT, OUTPUT = 2000, 500  # tokens of the request that the page times


class PageRequest(msgspec.Struct, frozen=True):
    """The subject of a page.

    Attributes:
        model: The model and how it is stored and sharded, as words of a command line.
        run: Its GPU and engine, as words of a command line.
        context: Tokens of each user.
        users: Concurrent users.
    """

    model: tuple[str, ...]
    run: tuple[str, ...]
    context: int
    users: int


class Section(NamedTuple):
    """A heading, its content, and the command that prints the same.

    Attributes:
        explain: Returns the figures as formulas, if the tables do not contain them all.
    """

    title: str
    command: str
    tables: list[Table]
    chart: Chart | None = None
    explain: Callable[[], str] | None = None


def slider_data(deployment: TimedDeployment, fitted: Fit) -> dict[str, object]:
    """Return the numbers with which the sliders compute.

    Returns:
        entries: [span, tokens of a row, limit, ranks that share tokens, bytes of a row of all
            layers] of each cache entry.
        longest: Longest context of 1, 2, … sequences on a data-parallel rank; null if no length
            is too long.
        dp: Data-parallel ranks.
        most: Sequences of a rank at the end of the slider.
        context: Maximum context of the model.
    """
    ranks = deployment.parallelism
    model = stored_as(deployment.model, deployment.precision)
    (stage,) = stages(model, ranks.pp)
    entries = []
    for row in stage_rows(model, stage, deployment.formats, ranks):
        if row.stored_layers:
            entry = row.entry
            row_bytes = row.row_bytes * row.stored_layers
            entries.append([entry.span.value, entry.ratio, entry.limit, row.spread, row_bytes])
    longest: list[int | None] = []
    if fitted.budget.weights_fit:
        for users in range(ranks.dp, (MAX_USERS + 1) * ranks.dp, ranks.dp):
            options = replace(fitted.options, users=users)
            tokens = replace(fitted, options=options).max_length(fitted.stage)
            if tokens == 0:
                break
            longest.append(tokens)
    context = model.max_context or 131_072
    sizes = {"dp": ranks.dp, "most": MAX_USERS, "context": context}
    return {"entries": entries, "longest": longest, **sizes}


def html_page(deployment: TimedDeployment, request: PageRequest) -> str:
    """Return the page as HTML.

    Raises:
        UserError: The model cannot run so, or has pipeline stages.
    """
    if deployment.parallelism.pp > 1:
        raise UserError(
            "the page's sliders know one pipeline stage",
            "Leave --pp out; `kvcalc fit` takes it",
        )
    fitted = fit(deployment, options_for(deployment, max_model_len=request.context))
    sections = _sections(deployment, request, fitted)
    charts = []
    for section in sections:
        chain = section.chart.chain() if section.chart else []
        charts.append([chart._replace(next_chart=None, over=("", "")) for chart in chain])
    pictures = iter(svgs_html([chart for chain in charts for chart in chain]))
    bodies = []
    for section, chain in zip(sections, charts, strict=True):
        bodies.append(_section_html(section, [next(pictures) for _ in chain]))
    data = {**slider_data(deployment, fitted), "asked": [request.context, request.users]}
    parts = {
        "title": text_html(
            f"{deployment.model.name} on {deployment.parallelism.gpus}× {deployment.gpu.name}"
        ),
        "sure": "".join(
            f"<li>{text_html(text)}</li>" for text in _accuracy(deployment, fitted)
        ),
        "data": json.dumps(data).replace("<", "\\u003c"),
        "sections": "".join(bodies),
    }
    page = files("kvcalc.report").joinpath("page.html").read_text(encoding="utf-8")
    for name, text in parts.items():
        page = page.replace(f"<!-- {name} -->", text)
    return page


def page_explained(deployment: TimedDeployment, request: PageRequest) -> str:
    """Return the formulas of the page's figures, section by section.

    Raises:
        UserError: The model cannot run so.
    """
    fitted = fit(deployment, options_for(deployment, max_model_len=request.context))
    texts = []
    for section in _sections(deployment, request, fitted):
        formulas = section.explain or partial("\n".join, map(explained, section.tables))
        texts.append(f"{section.title}\n{section.command} --explain\n\n{formulas()}")
    return "\n".join(texts)


def _sections(deployment: TimedDeployment, request: PageRequest, fitted: Fit) -> list[Section]:
    model, context, users = deployment.model, request.context, request.users
    record = fit_record(fitted, [], 0)
    ranks, precision = deployment.parallelism, deployment.precision
    stored = model, context, users, precision, 16, ranks
    size = size_record(*stored)
    step = Batch.decode(context, users)
    operators = roofline_records(deployment, "decode", users, context)
    roofline = None
    if deployment.gpu.flops_per_s:
        passes = decode_passes(deployment, context, sorted({1, 8, 64, users}))
        roofline = roofline_chart(passes, [deployment.gpu])
    variants = []
    for name in VARIANTS:
        with suppress(UserError):  # the variant does not suit the model
            variants.append((name, variant(model, name)))
    names = ",".join(name for name, _ in variants)
    compared = compare_records(variants, deployment, [context], [users])
    sweep = comparison_sweep([deployment], variants, users, max(context, 1024))
    options = LatencyOptions(input_len=PROMPT, output_len=OUTPUT, batch_size=users)

    def command(name: str, *words: object) -> str:
        run = () if name == "size" else request.run
        return shlex.join(["kvcalc", name, *request.model, *run, *map(str, words)])

    load = "--context", context, "--batch-size", users
    lengths = "--input-len", PROMPT, "--output-len", OUTPUT, "--batch-size", users
    return [
        Section(
            "Does it fit",
            command("fit", "--max-model-len", context),
            [fit_table([record], [fitted])],
            memory_chart([record]),
            partial(explain_fit, fitted, record),
        ),
        Section(
            "How big is the cache",
            command("size", *load),
            [size_table([size], [(model, precision, ranks)], 16)],
            explain=partial(explain_size, size, *stored),
        ),
        Section(
            "How long a decode step takes",
            command("roofline", *load),
            [pass_table(deployment, pass_with_memory(deployment, operators, step))],
            roofline,
            partial(explain_roofline, deployment, step, deployment.placed(step)),
        ),
        Section(
            "How other attention compares",
            command("compare", "--variants", names, *load),
            compare_tables([deployment], compared, 16),
            compare_chart([deployment], compared, sweep),
        ),
        Section(
            "How long a request takes",
            command("latency", *lengths),
            latency_tables([latency_record(deployment, options)]),
            latency_chart(latency_sweep([deployment], [options]), options),
        ),
    ]


def _section_html(section: Section, pictures: Sequence[dict[str, str]]) -> str:
    tables = "".join(map(table_html, section.tables))
    # one span per word, so that no line ends within a word
    words = " ".join(f"<span>{text_html(word)}</span>" for word in section.command.split(" "))
    drawn = ""
    for picture in pictures:
        for style, svg in picture.items():
            drawn += f'<div class="picture {style}">{svg}</div>'
    if drawn:
        drawn = f'<div class="pictures{" one" * (len(pictures) == 1)}">{drawn}</div>'
    command = f'<p class="command"><code>{words}</code><button>copy</button></p>'
    return f"<section><h2>{text_html(section.title)}</h2>{tables}{drawn}{command}</section>"


def _accuracy(deployment: TimedDeployment, fitted: Fit) -> list[str]:
    """Return sentences on the accuracy of each kind of figure."""
    record = fit_record(fitted, [], 0)
    low, high = record["kv_budget_low_bytes"], record["kv_budget_high_bytes"]
    memory = "Only the content counts against the memory, because no range is known."
    if low is not None:
        memory = (
            f"The KV cache budget follows the rules of {record['engine']}. 90% of starts are "
            f"between {low:,} and {high:,} bytes."
        )
    times = "Times are datasheet bounds. Real steps take longer."
    if deployment.calibration:
        times = f"Times are predicted by the {deployment.basis}."
    return ["Bytes of the cache and of the weights are exact.", memory, times]
