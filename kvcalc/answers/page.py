"""The report page: sections with a sentence, a table, a picture and a command."""

import shlex
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from importlib.resources import files
from typing import NamedTuple

from kvcalc.answers.answer import Answer
from kvcalc.answers.compare import compare_answer
from kvcalc.answers.fit import fit_answer
from kvcalc.answers.latency import latency_answer
from kvcalc.answers.roofline import PassOptions, roofline_answer
from kvcalc.answers.size import size_answer
from kvcalc.capacity import Fit, fit
from kvcalc.capacity.fit_options import options_for
from kvcalc.capacity.fit_records import fit_record
from kvcalc.errors import UserError
from kvcalc.question.fit_question import StudyOptions
from kvcalc.question.serving_options import LatencyOptions
from kvcalc.question.size_options import SizeOptions
from kvcalc.report.charts.chart import drawable
from kvcalc.report.text.table_layout import svgs_html, table_html, text_html
from kvcalc.timing.deployment import TimedDeployment
from kvcalc.units import format_bytes

PROMPT, OUTPUT = 2000, 500  # tokens of the request that the page times


class PageRequest(NamedTuple):
    """The subject of a report page: the words that its command lines repeat, and the load.

    Attributes:
        model: The model with its data types and parallelism, as words of a command line.
        run: The GPU and engine, as words of a command line.
        context: Tokens of each user.
        users: Concurrent users.
    """

    model: tuple[str, ...]
    run: tuple[str, ...]
    context: int
    users: int


class Section(NamedTuple):
    """A section of the report page.

    Attributes:
        title: Heading.
        command: Command line that prints the section's table.
        answer: The command's answer, with table and picture.
    """

    title: str
    command: str
    answer: Answer


def html_page(deployment: TimedDeployment, request: PageRequest) -> str:
    """Return the report page on a deployment as HTML, with tables, pictures and commands.

    The sections say whether the load fits, how big the cache is, and how long a decode step and a
    request take. One section compares other kinds of attention.

    Args:
        deployment: The deployment.
        request: The number of users and their contexts, and the command words that the page shows.

    Raises:
        UserError: The model cannot run in this deployment.
    """
    sections = page_sections(deployment, request)
    charts = []
    for section in sections:
        with suppress(UserError):  # a GPU without a compute peak has no roofline and no TTFT
            for chart in map(drawable, section.answer._charts()):
                charts.append((section.title, chart._replace(picture_head=("", ""))))
    pictures = defaultdict(list)
    for (title, _), picture in zip(charts, svgs_html([c for _, c in charts])):
        pictures[title].append(picture)
    fitted = fit(deployment, options_for(deployment, max_model_len=request.context))
    parts = {
        "title": text_html(
            f"{deployment.model.name} on {deployment.parallelism.gpus}× {deployment.gpu.name}"
        ),
        "sure": "".join(
            f"<li>{text_html(text)}</li>" for text in _accuracy(deployment, fitted)
        ),
        "sections": "".join(_section_html(s, pictures[s.title]) for s in sections),
    }
    page = files("kvcalc.report").joinpath("page.html").read_text(encoding="utf-8")
    for name, text in parts.items():
        page = page.replace(f"<!-- {name} -->", text)
    return page


def page_sections(deployment: TimedDeployment, request: PageRequest) -> list[Section]:
    """Return the sections of the report page: their titles, commands and answers.

    Args:
        deployment: The deployment.
        request: The number of users and their contexts, and the command words that the text shows.

    Raises:
        UserError: The model cannot run in this deployment.
    """
    context, users = request.context, request.users
    load = "--context", context, "--batch-size", users
    shape = SizeOptions(context, users)
    stored = deployment.model, deployment.precision, deployment.parallelism
    options = LatencyOptions(input_len=PROMPT, output_len=OUTPUT, batch_size=users)
    lengths = "--input-len", PROMPT, "--output-len", OUTPUT, "--batch-size", users

    def command(name: str, *words: object) -> str:
        run = () if name == "size" else request.run
        return shlex.join(["kvcalc", name, *request.model, *run, *map(str, words)])

    return [
        Section(
            "Does it fit",
            command("fit", "--max-model-len", context),
            fit_answer(
                [(deployment, options_for(deployment, max_model_len=context))], StudyOptions()
            ),
        ),
        Section("How big is the cache", command("size", *load), size_answer([stored], [shape])),
        Section(
            "How long a decode step takes",
            command("roofline", *load),
            roofline_answer([deployment], PassOptions(), [shape]),
        ),
        Section(
            "How other attention compares",
            command("compare", *load),
            compare_answer([deployment], (), [shape]),
        ),
        Section(
            "How long a request takes",
            command("latency", *lengths),
            latency_answer([deployment], [options]),
        ),
    ]


def _section_html(section: Section, pictures: Sequence[str]) -> str:
    tables = "".join(map(table_html, section.answer._tables()))
    # one span per word, so that no line ends within a word
    words = " ".join(f"<span>{text_html(word)}</span>" for word in section.command.split(" "))
    drawn = "".join(f'<div class="picture">{svg}</div>' for svg in pictures)
    if drawn:
        drawn = f'<div class="pictures{" one" * (len(pictures) == 1)}">{drawn}</div>'
    command = f'<p class="command"><code>{words}</code><button>copy</button></p>'
    return f"<section><h2>{text_html(section.title)}</h2>{tables}{drawn}{command}</section>"


def _accuracy(deployment: TimedDeployment, fitted: Fit) -> list[str]:
    """Return sentences on the accuracy of each kind of figure."""
    record = fit_record(fitted)
    low, high = record["kv_budget_low_bytes"], record["kv_budget_high_bytes"]
    memory = "Only the content counts against the memory, because no range is known."
    if low is not None:
        memory = (
            f"The KV cache budget follows the rules of {record['engine']}. 90% of starts are "
            f"between {format_bytes(low)} and {format_bytes(high)}."
        )
    times = "Times are datasheet bounds. Real steps take longer."
    if deployment.calibration:
        times = f"Times are predicted by the {deployment.basis}."
    return ["Bytes of the cache and of the weights are exact.", memory, times]
