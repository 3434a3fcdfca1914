"""The page itself: sections of a sentence, a table, a picture and the command that gives them, and the sliders."""

import json
import shlex
from collections.abc import Callable, Sequence
from functools import partial
from importlib.resources import files
from itertools import islice
from typing import Any

import msgspec

from kvcalc.capacity import Fit, fit
from kvcalc.capacity.memory_record import pass_with_memory
from kvcalc.capacity.options import options_for
from kvcalc.capacity.record import fit_record
from kvcalc.errors import UserError
from kvcalc.layers.batch import Batch
from kvcalc.model.size import size_record
from kvcalc.planning.comparison import compare_records
from kvcalc.planning.variants import variant
from kvcalc.report.chart import Chart
from kvcalc.report.comparison import compare_tables
from kvcalc.report.explain import explain_size
from kvcalc.report.explain_budget import explain_fit
from kvcalc.report.explain_pass import explain_roofline
from kvcalc.report.figures_compare import compare_chart
from kvcalc.report.figures_fit import memory_chart
from kvcalc.report.figures_latency import latency_curve
from kvcalc.report.fit import fit_table
from kvcalc.report.formulas import explained
from kvcalc.report.html import svgs_html, table_html, text_html
from kvcalc.report.layout import Table
from kvcalc.report.passes import pass_table
from kvcalc.report.roof import decode_sweep, roofline_chart
from kvcalc.report.serving import latency_tables
from kvcalc.report.sizes import size_table
from kvcalc.report.web.live import slider_data
from kvcalc.serving.request_record import LatencyOptions, latency_record
from kvcalc.timing.deployment import Deployment
from kvcalc.timing.records import roofline_records

VARIANTS = ("none", "mha", "gqa:8", "mqa", "mla", "window:4096")


class Asked(msgspec.Struct, frozen=True):
    """What the page is about. model: it and how it is stored and cut, as words of the command line; run: its GPU and the rest."""

    model: tuple[str, ...]
    run: tuple[str, ...]
    context: int
    users: int
    input_len: int = 2000
    output_len: int = 500

    def command(self, name: str, *words: object, run: bool = True) -> str:
        """A command about the same, with `words` of its own."""
        return shlex.join(["kvcalc", name, *self.model, *(self.run if run else ()), *map(str, words)])


class Section(msgspec.Struct, frozen=True):
    """A heading, what stands under it, and the command that prints the same."""

    title: str
    command: str
    tables: list[Table]
    chart: Chart | None = None
    worked: Callable[[], str] | None = None  # its figures as formulas, where the tables do not hold them all

    def explained(self) -> str:
        """The heading, the command, and the formulas with the numbers put in."""
        formulas = self.worked() if self.worked else "\n".join(map(explained, self.tables))
        return f"{self.title}\n{self.command} --explain\n\n{formulas}"


def html_page(deployment: Deployment, asked: Asked) -> str:
    """The whole page. Raises UserError where the model cannot be run so, or is cut into pipeline stages."""
    if deployment.parallelism.pp > 1:
        raise UserError("the page's sliders know one pipeline stage", hint="Leave --pp out; `kvcalc fit` takes it")
    found = fit(deployment, options_for(deployment, max_model_len=asked.context))
    record = fit_record(found, [], 0)
    sections = _sections(deployment, asked, found, record)
    charts = [[c._replace(beside=None, over=("", "")) for c in s.chart.chain()] if s.chart else [] for s in sections]
    pictures = iter(svgs_html([chart for those in charts for chart in those]))
    body = "".join(_section(s, [*islice(pictures, len(those))]) for s, those in zip(sections, charts, strict=True))
    data = json.dumps(slider_data(deployment, found) | {"asked": [asked.context, asked.users]}).replace("<", "\\u003c")
    frame = files("kvcalc.report.web").joinpath("page.html").read_text(encoding="utf-8")
    title = f"{deployment.model.name} on {deployment.parallelism.gpus}× {deployment.gpu.name}"
    for name, text in (("title", text_html(title)), ("sure", _sure(deployment, record)), ("data", data), ("sections", body)):
        frame = frame.replace(f"<!-- {name} -->", text)
    return frame


def page_explained(deployment: Deployment, asked: Asked) -> str:
    """Instead of the page the formulas of its figures, section by section. Raises UserError as `fit`."""
    found = fit(deployment, options_for(deployment, max_model_len=asked.context))
    sections = _sections(deployment, asked, found, fit_record(found, [], 0))
    return "\n".join(section.explained() for section in sections)


def _sections(deployment: Deployment, asked: Asked, found: Fit, record: dict[str, Any]) -> list[Section]:
    parts = (_size, _pass, _variants, _latency)
    return [_fit(asked, found, record), *(part(deployment, asked) for part in parts)]


def _fit(asked: Asked, found: Fit, record: dict[str, Any]) -> Section:
    command = asked.command("fit", "--max-model-len", asked.context)
    tables = [fit_table([record], [found])]
    return Section("Does it fit", command, tables, memory_chart([record]), partial(explain_fit, found, record))


def _size(deployment: Deployment, asked: Asked) -> Section:
    d = deployment
    stored = d.model, asked.context, asked.users, d.precision, 16, d.parallelism
    record = size_record(*stored)
    command = asked.command("size", "--context", asked.context, "--batch-size", asked.users, run=False)
    tables = [size_table([record], [(d.model, d.precision, d.parallelism)], 16)]
    return Section("How big is the cache", command, tables, worked=partial(explain_size, record, *stored))


def _pass(deployment: Deployment, asked: Asked) -> Section:
    step = Batch.decode(asked.context, asked.users)
    records = roofline_records(deployment, "decode", asked.users, asked.context)
    records = pass_with_memory(deployment, records, step)
    batches = sorted({1, 8, 64, asked.users})
    chart = (
        roofline_chart(decode_sweep(deployment, asked.context, batches), [deployment.gpu]) if deployment.gpu.flops_per_s else None
    )
    command = asked.command("roofline", "--context", asked.context, "--batch-size", asked.users)
    worked = partial(explain_roofline, deployment, step, deployment.placed(step))
    return Section("Where a decode step's time goes", command, [pass_table(deployment, records)], chart, worked)


def _variants(deployment: Deployment, asked: Asked) -> Section:
    chosen = []
    for name in VARIANTS:
        try:
            chosen.append((name, variant(deployment.model, name)))
        except UserError:
            continue  # a model that this variant does not suit
    records = compare_records(chosen, deployment, [asked.context], [asked.users])
    names = ",".join(name for name, _ in chosen)
    command = asked.command("compare", "--variants", names, "--context", asked.context, "--batch-size", asked.users)
    chart = compare_chart([deployment], chosen, records, max(asked.context, 1024))
    return Section("What other attention would do", command, compare_tables([deployment], records, 16), chart)


def _latency(deployment: Deployment, asked: Asked) -> Section:
    options = LatencyOptions(input_len=asked.input_len, output_len=asked.output_len, batch_size=asked.users)
    words = ("--input-len", asked.input_len, "--output-len", asked.output_len, "--batch-size", asked.users)
    record = latency_record(deployment, options)
    return Section(
        "How long a request takes",
        asked.command("latency", *words),
        latency_tables([record]),
        latency_curve([deployment], [options]),
    )


def _section(section: Section, pictures: Sequence[dict[str, str]]) -> str:
    tables = "".join(table_html(table) for table in section.tables)
    words = " ".join(f"<span>{text_html(word)}</span>" for word in section.command.split(" "))  # no line ends within one
    command = f'<p class="command"><code>{words}</code><button>copy</button></p>'
    drawn = "".join(f'<div class="picture {style}">{svg}</div>' for one in pictures for style, svg in one.items())
    picture = f'<div class="pictures{" one" * (len(pictures) == 1)}">{drawn}</div>' if drawn else ""
    return f"<section><h2>{text_html(section.title)}</h2>{tables}{picture}{command}</section>"


def _sure(deployment: Deployment, record: dict[str, Any]) -> str:
    """How sure each kind of figure is, in sentences."""
    low, high = record["kv_budget_low_bytes"], record["kv_budget_high_bytes"]
    lines = ["Bytes of the cache and of the weights are exact counts."]
    lines.append(
        f"What {record['engine']} leaves for the cache follows its rules: nine of ten starts between {low:,} and {high:,} bytes."
        if low is not None
        else "Nothing but the content is counted against the memory: no engine was named, or it states no range."
    )
    lines.append(
        f"Times rest on the {deployment.basis}."
        if deployment.calibration
        else "Times are the datasheet's bounds: full overlap, no launches. Real steps take longer."
    )
    return "".join(f"<li>{text_html(line)}</li>" for line in lines)
