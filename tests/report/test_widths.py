"""Tables of all commands at every width: no line is too long, from 40 characters on no table becomes a list, and
left-out columns are named."""

import re
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from conftest import Run

from kvcalc.report.text import tables
from kvcalc.report.text.table_layout import MAX_COLUMNS, WIDTH, Column, Table, cell_text, choose_columns, filled_columns, lay_out

WIDTHS = (40, 60, 80, 100, 120, 160, 200)
LINES = {
    "models": 1, "gpus": 1, "size llama-3.1-8b": 1,
    "size llama-3.1-8b deepseek-v3.2 gemma-3-27b gpt-oss-120b --context 128k": 1,
    "size gpt2 llama-7b gemma-3-27b --context 1k,128k --batch-size 1,16": 1,
    "compare llama-7b --variants mha,gqa:8,mqa,mla:512+64,gqa:8/window:4096/int8/evict:4096 --context 32k": 1,
    "compare llama-2-70b --gpu l40s --context 1k,64k": 1, "roofline llama-3.1-8b --gpu h100 --batch-size 8": 1,
    "roofline gemma-3-27b --gpu mi300x --phase prefill": 1, "roofline --gpu h100,mi300x": 1,
    "fit llama-3.1-70b --gpu h100 --tp 2 --max-model-len 32k --engine vllm --dtype fp8": 1,
    "fit llama-3.1-70b --gpu h100,h200 --tp 2,4,8 --max-model-len 32k --engine vllm": 1,
    "latency llama-3.1-8b --gpu h100 --input-len 2000 --output-len 500": 1,
    "latency llama-3.1-70b --batch-size 1,8,64 --draft llama-3.2-1b --acceptance-rate 0.6,0.8 --no-cache": 3,
    "serve llama-3.1-8b --rate 5 --num-prompts 20 --osl 40 --price-per-hour 2": 1,
    "serve llama-3.1-8b --rate 1,2 --num-prompts 20 --osl 40 --policy static,continuous --cache paged,contiguous": 1,
}  # fmt: skip


def shown(kvcalc: Run, monkeypatch: pytest.MonkeyPatch, line: str) -> list[Table]:
    """Return the tables that a command prints, before they get a width."""
    found: list[Table] = []
    monkeypatch.setattr(tables, "show", lambda given, as_markdown: found.extend(given))
    assert kvcalc(line).code == 0
    return [msgspec.structs.replace(table, verbose=True) for table in found]


def held(table: Table, head: Sequence[str], rows: Sequence[str], columns: Sequence[Column]) -> list[Column]:
    """Return the columns in the laid out rows. They must be in order and complete; only words may be shortened."""
    upright = head[0].strip().startswith(columns[0].title) and len(rows) == len(table.records)
    if upright and all(c.title in head[0] for c in columns[:2]):
        kept = next(n for n in range(len(columns), 0, -1) if head[0].split() == " ".join(c.title for c in columns[:n]).split())
        for row, record in zip(rows, table.records, strict=True):
            at = 0
            for column in columns[:kept]:
                cell = cell_text(column, record)
                whole = row.find(cell, at)
                assert whole >= 0 or (not column.right and "…" in row and row.find(cell[:5], at) >= 0), (cell, row)
                at = whole + len(cell) if whole >= 0 else row.index("…", at) + 1
        return list(columns[:kept])
    for line, column in zip([*head, *rows], columns, strict=True):
        assert line.startswith(column.title)
        assert column.right is False or all(cell_text(column, r) in line for r in table.records)
    return list(columns)


@pytest.mark.parametrize("line", LINES)
def test_every_table_in_every_width(kvcalc: Run, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    found = shown(kvcalc, monkeypatch, line)
    assert len(found) == LINES[line]
    for table in (msgspec.structs.replace(one, verbose=True) for one in found):
        told = filled_columns(table)
        columns = choose_columns(table).shown
        for width in WIDTHS:
            laid = lay_out(table, width)
            title, head, rows, below = laid.title, laid.head, laid.rows, laid.below
            assert max(map(len, [*title, *head, *rows, *below])) <= width
            assert " ".join(title).split() == table.title.split()
            kept = held(table, head, rows, columns)
            assert len(kept) >= min(2, len(columns))
            assert len(kept) <= MAX_COLUMNS
            lost = [c.title for c in told if c in columns[len(kept) :] or c.wide]
            named = f"{len(lost)} more column{'s' * (len(lost) > 1)} with --wide: {', '.join(lost)}"
            assert (named in " ".join(" ".join(below).split())) == bool(lost)


@pytest.mark.parametrize("line", LINES)
def test_all_columns_in_bands_on_a_terminal(kvcalc: Run, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    """Every figure in the bands is complete. A table that fits in one band equals the table in a pipe."""
    for table in shown(kvcalc, monkeypatch, f"{line} --wide"):
        one = lay_out(table, WIDTH)
        for width in WIDTHS:
            laid = lay_out(table, width, bands=True)
            lines = [*laid.head, *laid.rows]
            assert max(map(len, lines)) <= width
            assert max(map(len, [*one.head, *one.rows])) > width or lines == [*one.head, *one.rows]
            words = set(" ".join(lines).split())
            assert {
                w
                for c in filled_columns(table)
                if c.right and not c.is_optional
                for r in table.records
                for w in cell_text(c, r).split()
            } <= words


WORDS = Column("name", "name", right=False)


def rows_at(width: int, columns: Sequence[Column], *records: dict[str, Any]) -> list[str]:
    laid = lay_out(Table(records, columns), width)
    return [*laid.head, *laid.rows]


def test_figures_are_never_cut() -> None:
    columns = [WORDS, *(Column(f"f{n}", f"figure {n}") for n in range(8))]
    record = {"name": "x" * 90} | {f"f{n}": 10**30 + n for n in range(8)}
    for width in WIDTHS:
        for rows in (rows_at(width, columns, record), rows_at(width, columns, *[record] * 9)):
            assert max(map(len, rows)) <= width
            for row in rows[1:]:
                assert all(len(word) == 31 for word in re.findall(r"1\d+", row))
