"""The reference pages of docs, made from the code: `records.md` of every key of every record, `options.md` of every option."""

from collections.abc import Iterable, Iterator
from typing import Any

from kvcalc.cli.commands import COMMANDS, parameters_of
from kvcalc.cli.help import meaning_of, names_of, panels, word_of
from kvcalc.report.keys import Key, kinds, parts

RECORDS = """\
# Records

What `--format json` prints, key by key: one array of flat records; `--format csv` has the same columns, `.records()` of the
Python API the same records, and `kvcalc.record_keys("fit")` this page. Integers are exact. A value is null only where the last
column says when; NaN and Infinity never stand in JSON. A share is a part of 1, and an error the factor by which a figure is off,
less 1. Which figures count what is in [counting.md](counting.md).

This page is made from the code, by `python tests/remake_docs.py`.
"""
OPTIONS = """\
# Options

Every option of every command, with its default; `kvcalc COMMAND --help` shows the same. Lists are comma-separated; lengths may
be written `4k`, `128K` or `1M`, bytes `40GiB` or `40GB`, times `50ms` or `0.05s`.

| exit status | meaning |
| --- | --- |
| 0 | The command is done. |
| 1 | The answer is no: nothing fits (`fit`), or a check failed (`fit --require`, `validate --fail-above`). |
| 2 | The request is wrong. One message names the problem. |

This page is made from the code, by `python tests/remake_docs.py`.
"""


def records_page() -> str:
    """Each part of records as a table, under the first command that has it."""
    lines, told = [RECORDS], set[str]()
    for kind, of in kinds().items():
        lines += [f"## {kind}", ""]
        known = [part for part in of if part in told]
        if known:
            lines += [f"The keys of {', '.join(f'[{part}](#keys-of-{part})' for part in known)}.", ""]
        for part in of:
            if part not in told:
                lines += [
                    f"### Keys of {part}",
                    "",
                    *_table(("key", "type", "unit", "meaning"), map(_key, parts()[part].values())),
                ]
        told |= set(of)
    return "\n".join(lines)


def _key(key: Key) -> tuple[str, ...]:
    unit = "" if key.unit in (key.type, "yes or no", "figures") else key.unit
    return f"`{key.name}`", key.type + (" or null" if key.nullable else ""), unit, key.meaning


def options_page() -> str:
    """Each command's arguments, then its options by panel."""
    lines = [OPTIONS]
    for command, about in COMMANDS.items():
        lines += [f"## {command}", "", about, ""]
        arguments = [p for p in parameters_of(command) if p.param_type_name == "argument"]
        options = [p for p in parameters_of(command) if p.param_type_name == "option"]
        if arguments:
            lines += _table(("argument", "meaning"), ((f"`{word_of(p)}`", p.help or "") for p in arguments))
        for panel, members in panels(options).items():
            title = "option" if panel == "Further" else panel
            lines += _table((title, "meaning"), ((f"`{names_of(p)}`", meaning_of(p)) for p in members))
    return "\n".join(lines)


def _table(head: Iterable[str], rows: Iterable[tuple[Any, ...]]) -> Iterator[str]:
    heads = list(head)
    for row in (heads, ["---"] * len(heads), *rows):
        yield "| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |"
    yield ""


PAGES = {"records.md": records_page, "options.md": options_page}
