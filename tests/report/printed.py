"""Read printed output as numbers: tables as cells, and cells as values with their rounding."""

import re
from itertools import pairwise
from typing import Any, NamedTuple

BINARY = {unit: 1024**n for n, unit in enumerate(("B", "KiB", "MiB", "GiB", "TiB", "PiB"))}
DECIMAL = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
COUNTS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
SECONDS = {"s": 1.0, "ms": 1e-3, "µs": 1e-6, "ns": 1e-9}
NUMBER = re.compile(r"(-?[\d,]+(?:\.\d+)?(?:e[+-]\d+)?)\s?(.*)")


class Cell(NamedTuple):
    """A printed number, and half a unit of its last digit."""

    value: float
    half: float


def split(text: str) -> tuple[str, str]:
    """Return the digits and the unit of a cell."""
    match = NUMBER.fullmatch(text)
    assert match, f"{text!r} is no number"
    return match[1].replace(",", ""), match[2]


def by_decimals(text: str, units: dict[str, float | int]) -> Cell:
    """Return the value of a cell with its printed decimals, in one of these units."""
    digits, unit = split(text)
    scale = units[unit]
    return Cell(float(digits) * scale, 0.5 * 10.0 ** -len(digits.partition(".")[2]) * scale)


def by_digits(text: str, units: dict[str, float], suffix: str = "") -> Cell:
    """Return the value of a cell with three significant digits. Trailing zeros may be missing."""
    digits, unit = split(text)
    scale, value = units[unit.removesuffix(suffix)], float(digits)
    power = len(str(int(abs(value)))) - 1 if abs(value) >= 1 else -len(re.match(r"0?\.?(0*)", f"{abs(value):f}"[1:])[1]) - 1  # type: ignore[index]
    return Cell(value * scale, 0.5 * 10.0 ** (power - 2) * scale if value else 0.0)


def read(text: str, kind: str) -> Cell:
    """Return the value of a cell of a kind: whole, fixed, digits, percent, times, bytes, seconds, count, or si:UNIT."""
    name, _, unit = kind.partition(":")
    match name:
        case "whole":
            return Cell(int(text.replace(",", "")), 0)
        case "fixed":
            return by_decimals(text, {"": 1})
        case "digits":
            return by_digits(text, {"": 1})
        case "percent":
            return by_decimals(text, {"%": 0.01})
        case "times":
            return by_digits(text, {"×": 1}) if "." in text or len(text) < 4 else by_decimals(text, {"×": 1})
        case "decimal_times":
            return by_decimals(text, {"×": 1})
        case "bytes":
            return by_decimals(text, BINARY)
        case "seconds":
            return by_digits(text, SECONDS)
        case "count":
            digits = re.fullmatch(r"(?:≈ )?([\d.]+)([KMBT]?)", text)
            assert digits, text
            return by_decimals(f"{digits[1]} {digits[2]}".strip(), COUNTS)
        case "si":
            return by_digits(text, {p + unit: s for p, s in DECIMAL.items()})
    raise AssertionError(kind)


def holds(text: str, value: Any, kind: str) -> bool:
    """Return whether a cell shows a value: a dash for None, words unchanged, numbers to their last digit."""
    if value is None:
        return text == "–"
    if kind == "text":
        return text == str(value)
    if text == "< 1 µs":
        return 0 < float(value) < 1e-6
    value = 1 / value if text.endswith("× more") else value
    cell = read(re.sub("(?<=×) (less|more)$", "", text), kind)
    return abs(cell.value - value) <= cell.half * (1 + 1e-9) + 1e-12 * abs(value)


class Table(NamedTuple):
    """The headings of a table in order, and the cells of each row."""

    headings: list[str]
    rows: list[list[str]]

    def column(self, heading: str, number: int = 0) -> list[str]:
        """Return the cells below the `number`-th heading of this name."""
        at = [i for i, name in enumerate(self.headings) if name.partition(",")[0] == heading][number]
        return [row[at] for row in self.rows]


def table(out: str, first: str) -> Table:
    """Return the table whose first heading is `first`. Columns are separated by two blanks in all lines."""
    lines = out.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"{first}  "))
    end = next((i for i in range(start, len(lines)) if not lines[i].strip()), len(lines))
    body = lines[start:end]
    width = max(map(len, body))
    blank = [all(line[i : i + 1] in ("", " ") for line in body) for i in range(width)]
    edges = [0, *(i for i in range(2, width) if blank[i - 1] and blank[i - 2] and not blank[i]), width]
    cells = [[line[a:b].strip() for a, b in pairwise(edges)] for line in body]
    return Table(cells[0], cells[1:])


def piped(text: str, first: str) -> Table:
    """Return the Markdown table whose first heading is `first`."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {first} |"))
    end = next((i for i in range(start, len(lines)) if not lines[i].startswith("|")), len(lines))
    head, _, *rows = ([cell.strip() for cell in line[1:-1].split(" | ")] for line in lines[start:end])
    return Table(head, rows)
