"""Tables and pictures as HTML, for notebooks and for a page to send. Everything that comes from files is escaped."""

import re
from collections.abc import Sequence
from html import escape

from kvcalc.errors import printable
from kvcalc.report.chart import Chart
from kvcalc.report.layout import Table, parts

SIZE = 6.0, 4.4  # inches of a chart on a page: its texts are legible on a phone, and two stand beside each other on a desk


def text_html(text: str) -> str:
    """A text as HTML: no markup, no control characters."""
    return escape(printable(text, 10_000))


def table_html(table: Table) -> str:
    """A table under its sentence, the notes as lines below."""
    found = parts(table)
    right = [' class="right"' if c.right else "" for c in found.columns]
    head = "".join(f"<th{r}>{text_html(c.title)}</th>" for c, r in zip(found.columns, right, strict=True))
    rows = [
        "<tr>" + "".join(f"<td{r}>{text_html(cell)}</td>" for cell, r in zip(row, right, strict=True)) + "</tr>"
        for row in found.rows
    ]
    title = f"<p><strong>{text_html(found.title)}</strong></p>" if found.title else ""
    notes = "".join(f"<li>{text_html(note)}</li>" for note in found.notes)
    body = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    return f'{title}<div class="wide">{body}</div>' + (f'<ul class="notes">{notes}</ul>' if notes else "")


def svgs_html(charts: Sequence[Chart]) -> list[dict[str, str]]:
    """Each of the charts of a page as an inline SVG, its text as text, by style: light and dark; names in it are its own."""
    from kvcalc.report.plots import rendered

    return [_inline(svg.decode(), number) for number, svg in enumerate(rendered(charts, "svg", size=SIZE))]


def _inline(text: str, number: int) -> dict[str, str]:
    from kvcalc.report.plots import in_style

    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1), count=1)
    return {
        style: _named(in_style(text, style) if style == "dark" else text, f"{style[0]}{number}") for style in ("light", "dark")
    }


def _named(svg: str, prefix: str) -> str:
    return re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{prefix}-", svg)
