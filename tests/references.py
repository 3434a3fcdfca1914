"""The generated reference pages: `records.md` lists every key of every record, `options.md` every option."""

import re
from collections.abc import Iterable, Iterator
from typing import Any

from kvcalc.cli.commands import COMMANDS, parameters_of
from kvcalc.cli.help import meaning, panels, spelling
from kvcalc.records.figures import Figure
from kvcalc.report.export import kinds

RECORDS = """\
# Which keys do the records have?

`--format json` prints one array of flat records. `--format csv` has the same columns, and `.records()` of the Python API
returns the same records. `kvcalc.record_keys("fit")` returns this page's rows for `fit`.

- Integers are exact.
- A value is null only under the condition in the last column. JSON never contains NaN or Infinity.
- A share is a part of 1. An error is the factor between prediction and measurement, minus 1.
- [What does each figure count?](../counting.md) defines the figures.

This page is generated from the code: `python tests/remake_docs.py --references`.
"""
OPTIONS = """\
# Which options does each command have?

This page lists every option with its default. `kvcalc COMMAND --help-all` prints the same text.

- Separate the items of a list with commas.
- Write lengths as `4k`, `128K` or `1M`, bytes as `40GiB` or `40GB`, and times as `50ms` or `0.05s`.

| exit status | meaning |
| --- | --- |
| 0 | The command is done. |
| 1 | The answer is no, or a check failed. |
| 2 | The request is wrong. One message names the problem. |

This page is generated from the code: `python tests/remake_docs.py --references`.
"""


def records_page() -> str:
    """Each kind of records as a table of its keys."""
    lines = [RECORDS]
    for kind, figures in kinds().items():
        lines += [f"## {kind}", "", *_table(("key", "type", "unit", "meaning"), map(_key, figures.values()))]
    return "\n".join(lines)


def _key(figure: Figure) -> tuple[str, ...]:
    unit = "" if figure.unit in (figure.type, "yes or no", "figures") else figure.unit
    return f"`{figure.name}`", figure.type + (" or null" if figure.nullable else ""), unit, figure.meaning


def options_page() -> str:
    """Each command's arguments, then its options by panel."""
    lines = [OPTIONS]
    for command, about in COMMANDS.items():
        lines += [f"## {command}", "", about, ""]
        arguments = [p for p in parameters_of(command) if p.is_argument]
        options = [p for p in parameters_of(command) if not p.is_argument]
        if arguments:
            lines += _table(("argument", "meaning"), ((f"`{p.placeholder}`", p.option.help) for p in arguments))
        for panel, members in panels(options).items():
            lines += _table((panel, "meaning"), ((f"`{spelling(p)}`", meaning(p)) for p in members))
    return "\n".join(lines)


def _table(head: Iterable[str], rows: Iterable[tuple[Any, ...]]) -> Iterator[str]:
    heads = list(head)
    for row in (heads, ["---"] * len(heads), *rows):
        yield "| " + " | ".join(_cell(str(cell)) for cell in row) + " |"
    yield ""


def _cell(text: str) -> str:
    """Return a table cell in which no `|` ends the cell, neither on GitHub nor on the site."""
    text = re.sub(r"`([^`]*\|[^`]*)`", lambda code: f"<code>{code[1].replace('|', '&#124;')}</code>", text)
    return text.replace("|", "&#124;")


PAGES = {"records.md": records_page, "options.md": options_page}
