"""What the page's sliders compute with: the cache's rows as data, and how long each number of users
may be.

The page itself: sections of a sentence, a table, a picture and the command that gives them, and the
sliders.
"""

import json
import shlex
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from importlib.resources import files
from itertools import chain, islice, takewhile
from typing import NamedTuple

import msgspec

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
from kvcalc.records import Record
from kvcalc.report.charts.chart import Chart
from kvcalc.report.charts.comparison_plot import compare_chart
from kvcalc.report.charts.fit_plot import memory_chart
from kvcalc.report.charts.latency_plot import latency_chart
from kvcalc.report.charts.roofline_plot import roofline_chart
from kvcalc.report.explain import explain_size, explained
from kvcalc.report.explain_sums import explain_fit, explain_roofline
from kvcalc.report.text.compare_text import compare_tables
from kvcalc.report.text.fit_text import fit_table
from kvcalc.report.text.roofline_text import pass_table
from kvcalc.report.text.serving_text import latency_tables
from kvcalc.report.text.size_text import size_table
from kvcalc.report.text.table_layout import Table, svgs_html, table_html, text_html
from kvcalc.serving.request_record import latency_record
from kvcalc.timing.deployment import TimedDeployment
from kvcalc.timing.operator_times import roofline_records

MOST_USERS = 512


def slider_data(deployment: TimedDeployment, found: Fit) -> Record:
    """Entries `[span, tokens a row, limit, ranks that share tokens, bytes a row of all layers]` of
    one pipeline stage, as `size` counts them; `longest[n − 1]`: the longest context of n sequences
    on a data-parallel rank, as `fit` has it, null where none is too long; dp; and the context that
    the model is made for.
    """
    ranks, model = (
        deployment.parallelism,
        stored_as(deployment.model, deployment.precision),
    )
    (stage,) = stages(model, ranks.pp)
    entries = [
        [
            r.entry.span.value,
            r.entry.ratio,
            r.entry.limit,
            r.spread,
            r.row_bytes * r.stored_layers,
        ]
        for r in stage_rows(model, stage, deployment.formats, ranks)
        if r.stored_layers
    ]
    users = range(ranks.dp, (MOST_USERS + 1) * ranks.dp, ranks.dp)
    longest = (
        [*takewhile(lambda tokens: tokens != 0, found.max_lengths(users))]
        if found.budget.weights_fit
        else []
    )
    return {
        "entries": entries,
        "dp": ranks.dp,
        "longest": longest,
        "most": MOST_USERS,
        "context": model.max_context or 131_072,
    }


VARIANTS = ("none", "mha", "gqa:8", "mqa", "mla", "window:4096")
PROMPT, OUTPUT = 2000, 500  # tokens of the request that the page times


class PageRequest(msgspec.Struct, frozen=True):
    """What a page is about.

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


def html_page(deployment: TimedDeployment, request: PageRequest) -> str:
    """Return the whole page.

    Raises:
        UserError: The model cannot run so, or has pipeline stages.
    """
    if deployment.parallelism.pp > 1:
        raise UserError(
            "the page's sliders know one pipeline stage",
            hint="Leave --pp out; `kvcalc fit` takes it",
        )
    capacity = fit(deployment, options_for(deployment, max_model_len=request.context))
    record = fit_record(capacity, [], 0)
    sections = _sections(deployment, request, capacity, record)
    charts = [
        [c._replace(beside=None, over=("", "")) for c in s.chart.chain()] if s.chart else []
        for s in sections
    ]
    pictures = iter(svgs_html(list(chain.from_iterable(charts))))
    body = "".join(
        _section_html(section, [*islice(pictures, len(drawn))])
        for section, drawn in zip(sections, charts, strict=True)
    )
    data = slider_data(deployment, capacity) | {"asked": [request.context, request.users]}
    title = f"{deployment.model.name} on {deployment.parallelism.gpus}× {deployment.gpu.name}"
    parts = {
        "title": text_html(title),
        "sure": _accuracy_html(deployment, record),
        "data": json.dumps(data).replace("<", "\\u003c"),
        "sections": body,
    }
    page = files("kvcalc.report.web").joinpath("page.html").read_text(encoding="utf-8")
    for name, text in parts.items():
        page = page.replace(f"<!-- {name} -->", text)
    return page


def page_explained(deployment: TimedDeployment, request: PageRequest) -> str:
    """Return the formulas of the page's figures, section by section.

    Raises:
        UserError: The model cannot run so.
    """
    capacity = fit(deployment, options_for(deployment, max_model_len=request.context))
    texts = []
    for section in _sections(deployment, request, capacity, fit_record(capacity, [], 0)):
        formulas = section.explain or partial("\n".join, map(explained, section.tables))
        texts.append(f"{section.title}\n{section.command} --explain\n\n{formulas()}")
    return "\n".join(texts)


def _sections(
    deployment: TimedDeployment,
    request: PageRequest,
    capacity: Fit,
    record: Record,
) -> list[Section]:
    model, context, users = deployment.model, request.context, request.users
    stored = model, context, users, deployment.precision, 16, deployment.parallelism
    size = size_record(*stored)
    sized = [(model, deployment.precision, deployment.parallelism)]
    step = Batch.decode(context, users)
    operators = roofline_records(deployment, "decode", users, context)
    operators = pass_with_memory(deployment, operators, step)
    roofline = None
    if deployment.gpu.flops_per_s:
        passes = decode_passes(deployment, context, sorted({1, 8, 64, users}))
        roofline = roofline_chart(passes, [deployment.gpu])
    variants = []
    for name in VARIANTS:
        with suppress(UserError):  # a model that this variant does not suit
            variants.append((name, variant(model, name)))
    names = ",".join(name for name, _ in variants)
    compared = compare_records(variants, deployment, [context], [users])
    sweep = comparison_sweep([deployment], variants, (users, context), max(context, 1024))
    options = LatencyOptions(input_len=PROMPT, output_len=OUTPUT, batch_size=users)

    def command(name: str, *words: object) -> str:
        run = () if name == "size" else request.run
        return shlex.join(["kvcalc", name, *request.model, *run, *map(str, words)])

    load = "--context", context, "--batch-size", users
    request_words = "--input-len", PROMPT, "--output-len", OUTPUT, "--batch-size", users
    return [
        Section(
            "Does it fit",
            command("fit", "--max-model-len", context),
            [fit_table([record], [capacity])],
            memory_chart([record]),
            partial(explain_fit, capacity, record),
        ),
        Section(
            "How big is the cache",
            command("size", *load),
            [size_table([size], sized, 16)],
            explain=partial(explain_size, size, *stored),
        ),
        Section(
            "Where a decode step's time goes",
            command("roofline", *load),
            [pass_table(deployment, operators)],
            roofline,
            partial(explain_roofline, deployment, step, deployment.placed(step)),
        ),
        Section(
            "What other attention would do",
            command("compare", "--variants", names, *load),
            compare_tables([deployment], compared, 16),
            compare_chart([deployment], compared, sweep),
        ),
        Section(
            "How long a request takes",
            command("latency", *request_words),
            latency_tables([latency_record(deployment, options)]),
            latency_chart(latency_sweep([deployment], [options]), options),
        ),
    ]


def _section_html(section: Section, pictures: Sequence[dict[str, str]]) -> str:
    tables = "".join(map(table_html, section.tables))
    # a span per word, so that no line ends within a word
    words = " ".join(f"<span>{text_html(word)}</span>" for word in section.command.split(" "))
    drawn = "".join(
        f'<div class="picture {style}">{svg}</div>'
        for picture in pictures
        for style, svg in picture.items()
    )
    if drawn:
        drawn = f'<div class="pictures{" one" * (len(pictures) == 1)}">{drawn}</div>'
    command = f'<p class="command"><code>{words}</code><button>copy</button></p>'
    return f"<section><h2>{text_html(section.title)}</h2>{tables}{drawn}{command}</section>"


def _accuracy_html(deployment: TimedDeployment, record: Record) -> str:
    """Return sentences on the accuracy of each kind of figure."""
    low, high = record["kv_budget_low_bytes"], record["kv_budget_high_bytes"]
    lines = ["Bytes of the cache and of the weights are exact counts."]
    lines.append(
        f"What {record['engine']} leaves for the cache follows its rules: nine of ten starts "
        f"between {low:,} and {high:,} bytes."
        if low is not None
        else "Nothing but the content is counted against the memory: no engine was named, or it "
        "states no range."
    )
    lines.append(
        f"Times rest on the {deployment.basis}."
        if deployment.calibration
        else "Times are the datasheet's bounds: full overlap, no launches. Real steps take longer."
    )
    return "".join(f"<li>{text_html(line)}</li>" for line in lines)
