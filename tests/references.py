"""Make the generated pages: all record keys, all options, and the guides for agents."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from kvcalc.cli.commands import COMMANDS, parameters_of
from kvcalc.cli.help import EXAMPLES, meaning, panels, spelling
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
| 1 | Nothing fits, no plan meets the targets, or a check failed. |
| 2 | The request is wrong. One message names the problem. |

This page is generated from the code: `python tests/remake_docs.py --references`.
"""


def records_page() -> str:
    """Return a page with a table of keys for each kind of records."""
    lines = [RECORDS]
    for kind, figures in kinds().items():
        lines += [f"## {kind}", "", *_table(("key", "type", "unit", "meaning"), map(_key, figures.values()))]
    return "\n".join(lines)


def _key(figure: Figure) -> tuple[str, ...]:
    unit = "" if figure.unit in (figure.type, "yes or no", "figures") else figure.unit
    return f"`{figure.name}`", figure.type + (" or null" if figure.nullable else ""), unit, figure.meaning


def options_page() -> str:
    """Return a page with each command's arguments and its options by panel."""
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


SKILL = """\
---
name: kvcalc
description: Computes the KV cache of a language model, the users that fit on a GPU, latency, server load and the smallest
  deployment. Use it for questions about GPU memory or speed of LLM inference, and for start-up logs of vLLM, SGLang, TensorRT-LLM or llama.cpp.
---

# kvcalc

Install it with `pip install kvcalc`. It needs no GPU and no weights.

- Add `--json` for an array of flat records. `kvcalc schema COMMAND` describes their keys.
- MODEL is a preset (`kvcalc models llama`), `org/name` from the Hugging Face Hub, a `config.json` or a GGUF file.
- GPU is a preset (`kvcalc gpus`). Lengths are `4096`, `4k` or `1M`. Commas make lists: `--context 8k,128k`.
- Times without a mark are predictions. `~` marks scaled times, `≥` marks datasheet bounds. Repeat the mark in your answer.
- Exit status: 0 done; 1 nothing fits, no plan meets the targets, or a check failed; 2 the request is wrong, and stderr names the text to type.
- `kvcalc COMMAND --help-all` lists every option.
- `kvcalc mcp` serves size, fit, plan, latency, compare and diagnose as MCP tools.
"""
LLMS = """\
# kvcalc

> KV cache size, users per GPU, latency and server load of LLM inference, from the command line and Python.

Run `pip install kvcalc`, then `kvcalc fit llama-3.1-70b --gpu h100 --tp 4`. `--json` prints records.
"""
SITE = "https://github.com/kvcalc/kvcalc/blob/main/docs"
DOCS = Path(__file__).parent.parent / "docs"


def skill_page() -> str:
    """Return the guide for agents: each command with its purpose, examples and common options."""
    lines = [SKILL]
    for command, about in COMMANDS.items():
        common = [f"`{p.names[0]}`" for p in parameters_of(command) if p.option.is_common]
        options = f" Options: {', '.join(common)}." * bool(common)
        lines += [f"## {command}", "", about + options, "", *(f"    {line}" for line in EXAMPLES[command][:2]), ""]
    return "\n".join(lines).rstrip() + "\n"


def llms_page() -> str:
    """Return a list of all pages of the documents with their titles, by folder."""
    lines = [LLMS]
    for folder in ("tutorials", "how-to", "explanation", "reference"):
        lines += [f"## {folder.capitalize()}", ""]
        for path in sorted((DOCS / folder).rglob("*.md")):
            title = path.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")
            lines.append(f"- [{title}]({SITE}/{path.relative_to(DOCS).as_posix()})")
        lines.append("")
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


PAGES = {
    "reference/generated/records.md": records_page,
    "reference/generated/options.md": options_page,
    "SKILL.md": skill_page,
    "llms.txt": llms_page,
}
