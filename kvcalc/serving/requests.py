"""What a server is asked: requests from a trace, or drawn.

A trace is a CSV with the columns `arrival_s, input_len, output_len`, or those of the public Azure LLM inference traces,
`TIMESTAMP, ContextTokens, GeneratedTokens` (github.com/Azure/AzurePublicDataset), whose times count from the first row. With
`prefix_id, prefix_len` prompts begin with so many tokens of a prefix that they share. Clients of a closed loop take requests in
their order, so that theirs need no arrival_s.
"""

import csv
import io
import math
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from kvcalc.errors import UserError
from kvcalc.library.files import read_text

MOST_BYTES, MOST_REQUESTS, MOST_SECONDS = 256 << 20, 2_000_000, 1e12
MOST_LEN = 1 << 20  # tokens of a prompt or of an answer: the simulator keeps tables over tokens
PLAIN = ("arrival_s", "input_len", "output_len")
PREFIX = ("prefix_id", "prefix_len")  # beside them, where prompts share prefixes
AZURE = ("timestamp", "contexttokens", "generatedtokens")


class Requests(NamedTuple):
    """Arrays of one length: seconds of arrival in order (float64), tokens of the prompt and of the answer (int64)."""

    arrival_s: Any
    input_len: Any
    output_len: Any

    def __len__(self) -> int:
        return self.arrival_s.size  # type: ignore[no-any-return]

    @property
    def rate(self) -> float:
        """Arrivals per second, from the first to the last; 0 where they all come at once."""
        span = float(self.arrival_s[-1] - self.arrival_s[0])
        return (len(self) - 1) / span if span else 0.0

    def share(self, rank: int, ranks: int) -> "Requests":
        """Every `ranks`-th request: those that one of so many ranks takes in turn."""
        return Requests(*(column[rank::ranks] for column in self))


class Prefixed(Requests):
    """Requests whose prompts share prefixes: of each the prefix (a number, −1 for none) and its tokens."""

    prefix_id: Any
    prefix_len: Any

    def beginning(self, prefix_id: Any, prefix_len: Any) -> "Prefixed":
        """These requests with their prefixes."""
        self.prefix_id, self.prefix_len = prefix_id, prefix_len
        return self


def read_requests(path: Path, most: int = MOST_REQUESTS, timed: bool = True) -> Requests:
    """The first `most` requests of a trace. Raises UserError naming the file and the line of what is wrong.

    timed: whether arrivals have to be given; else those of a file without them are 0.
    """
    import numpy as np

    rows: list[tuple[float, int, int, str, int]] = []
    for row in _rows(read_text(path, MOST_BYTES), str(path), timed):
        if len(rows) == most:
            break
        rows.append(row)
    if not rows:
        raise UserError("holds no requests", str(path))
    columns = list(zip(*rows, strict=True))
    inputs, outputs = (np.array(columns[at], dtype=np.int64) for at in (1, 2))
    if not any(columns[3]):
        return Requests(np.array(columns[0]), inputs, outputs)
    numbers = {name: number for number, name in enumerate(dict.fromkeys(filter(None, columns[3])))}
    names = np.array([numbers.get(name, -1) for name in columns[3]], dtype=np.int64)
    return Prefixed(np.array(columns[0]), inputs, outputs).beginning(names, np.array(columns[4], dtype=np.int64))


def _rows(text: str, where: str, timed: bool) -> Iterator[tuple[float, int, int, str, int]]:
    if not text.strip():
        raise UserError("is empty", where)
    reader = csv.reader(io.StringIO(text))
    try:
        header = [name.strip().lower() for name in next(reader)]
        places, timestamps = _columns(header, where, timed)
        start, last = None, 0.0
        for cells in reader:
            if not any(cell.strip() for cell in cells):
                continue
            line = f"{where}, line {reader.line_num}"
            if len(cells) <= max(places):
                raise UserError(f"has {len(cells)} cells, and the header names {len(header)}", line)
            first, prompt, answer = (cells[i].strip() if i >= 0 else "0" for i in places)
            if timestamps:
                stamp = _timestamp(first, line)
                start = start or stamp
                at = _between(stamp, start, first, line)
            else:
                at = _seconds(first, line)
            if at < last:
                raise UserError(f"arrival {first} comes before that of the request above: the trace is not sorted", line)
            last = at
            name, length = (_cell(cells, header, column) for column in PREFIX)
            shared = _tokens("prefix_len", length, line) if name else 0
            yield at, _tokens("input_len", prompt, line), _tokens("output_len", answer, line), name, shared
    except csv.Error as error:
        raise UserError(f"is not CSV: {error}", f"{where}, line {reader.line_num}") from None


def _cell(cells: list[str], header: list[str], column: str) -> str:
    """What stands in a column that need not be there."""
    at = header.index(column) if column in header else len(cells)
    return cells[at].strip() if at < len(cells) else ""


def _columns(header: list[str], where: str, timed: bool) -> tuple[list[int], bool]:
    """Where the three columns stand (−1: arrivals that need not be there), and whether the first holds timestamps."""
    names = AZURE if AZURE[0] in header and PLAIN[0] not in header else PLAIN
    missing = [name for name in names if name not in header]
    if missing == [PLAIN[0]] and not timed:
        missing = []
    if missing:
        hint = "A trace has arrival_s, input_len, output_len, or TIMESTAMP, ContextTokens, GeneratedTokens"
        hint += "; without arrival_s, say with --max-concurrency how many ask at once" if missing == [PLAIN[0]] else ""
        raise UserError(f"lacks the column{'s' * (len(missing) > 1)} {', '.join(missing)}", f"{where}, line 1", hint)
    twice = [name for name in names if header.count(name) > 1]
    if twice:
        raise UserError(f"names the column {twice[0]} twice", f"{where}, line 1")
    return [header.index(name) if name in header else -1 for name in names], names is AZURE


def _seconds(text: str, line: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= MOST_SECONDS:
        raise UserError(f"arrival_s {text!r} is not a number of seconds from 0 up", line)
    return value


def _timestamp(text: str, line: str) -> datetime:
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        raise UserError(f"TIMESTAMP {text!r} is not a date and time", line, "Write 2023-11-16 18:17:03.979") from None


def _between(stamp: datetime, start: datetime, text: str, line: str) -> float:
    try:
        return (stamp - start).total_seconds()
    except TypeError:
        raise UserError(f"TIMESTAMP {text!r}: some have a time zone and some have none", line) from None


def _tokens(name: str, text: str, line: str) -> int:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 1 <= value <= MOST_LEN or value != int(value):
        raise UserError(f"{name} {text!r} is not a whole number from 1 to {MOST_LEN:,}", line)
    return int(value)
