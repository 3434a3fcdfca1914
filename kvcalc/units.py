"""Parse and format quantities.

Internal units are bytes, FLOPs and seconds. GiB is 2^30 bytes and GB is 10^9 bytes. Bandwidth and
FLOP/s are decimal. Token counts accept binary suffixes: 4k = 4096.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from kvcalc.errors import UserError

UNITS = {
    "gib": (1024, "KiB MiB GiB TiB PiB EiB"),
    "si": (1000, "kB MB GB TB PB EB"),
    "bytes": (1, ""),
}
_BYTE_UNITS = ContextVar("units of bytes", default="gib")
MAX_TOKENS = 10**12  # longer contexts and larger batches than this are typing errors
_TOKENS = re.compile(r"(\d+(?:\.\d+)?)\s*([kmg]?)(?:i?b)?", re.IGNORECASE)
_BINARY = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_SECONDS = re.compile(r"(\d+(?:\.\d*)?(?:e-?\d+)?|\.\d+)\s*(us|µs|ms|s|min|)")
_SECOND = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "": 1.0}
_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)


def parse_tokens(text: str, noun: str = "length", minimum: int = 1) -> int:
    """Parse a number of tokens: `4096`, or `4k` with a binary suffix, which is 4096 too.

    The suffixes k, m and g stand for 2^10, 2^20 and 2^30. A part of a token after a suffix is
    dropped: 6.8k is 6963.

    Args:
        text: Text that a user typed.
        noun: Name of the quantity, such as `input length`, with which an error message begins.
        minimum: Smallest valid count.

    Raises:
        UserError: The text is not a whole number, or it is below the minimum or above 10^12.
    """
    match = _TOKENS.fullmatch(text.strip().replace("_", ""))
    if not match or len(text) > 40:
        raise UserError(
            f"{noun} {text!r} is not a whole number", "Write one number, 4096 or 4k"
        )
    value, remainder = _multiply(match[1], _BINARY[match[2].lower()])
    if remainder and not match[2]:
        raise UserError(f"{noun} {text!r} is not a whole number")
    if not minimum <= value <= MAX_TOKENS:
        raise UserError(f"{noun} {text!r} is outside {minimum} to {MAX_TOKENS:,}")
    return value


def plain(value: Any) -> Any:
    """Return a NumPy scalar as a Python number, and a float without a fraction as an int.

    So 3.0 gives 3, and JSON has no `3.0`. Other values are returned unchanged.
    """
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        value = value.item()
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _multiply(number: str, unit: int) -> tuple[int, int]:
    """Return the exact product of a decimal number and a unit: its whole part and its remainder.

    Example: 1.5 and 1024 give (1536, 0).
    """
    integer, _, decimals = number.partition(".")
    shift: int = 10 ** len(decimals)
    return divmod(int(integer + decimals) * unit, shift)


def parse_bytes(text: str, noun: str) -> int:
    """Parse a number of bytes: `42949672960`, `4.2e10`, decimal `40GB` or binary `40GiB`.

    Args:
        text: Text that a user typed.
        noun: Name of the quantity, such as `memory`, with which an error message begins.

    Raises:
        UserError: The text is not a size from 1 to 2^60 bytes.
    """
    if re.fullmatch(r"\s*\d+(\.\d+)?e\d\d?\s*", text.lower()):
        text = f"{float(text):.0f}"
    match = _BYTES.fullmatch(text.strip())
    if not match or len(text) > 40:
        raise UserError(
            f"{noun} {text!r} is not a number of bytes", "Write 42949672960, 40GiB or 40GB"
        )
    base = 1024 if match[3] else 1000
    value, _ = _multiply(match[1], base ** " kmgt".index(match[2].lower() or " "))
    if not 1 <= value < 2**60:
        raise UserError(f"{noun} {text!r} is outside 1 to 2^60 bytes")
    return value


def parse_rate(text: str, noun: str) -> int:
    """Parse a rate into whole bytes per second: `7GB/s`, or in bits `100Gb/s` or `100Gbps`.

    The suffix `/s` is optional for bytes.

    Args:
        text: Text that a user typed.
        noun: Name of the quantity, such as `rate`, with which an error message begins.

    Raises:
        UserError: The text is not a rate from 1 to 2^60 bytes per second.
    """
    if bits := re.fullmatch(r"(.+?)(?:(?<=[KMGT])b(?:/s)?|bps|bits?/s)", text.strip()):
        return parse_bytes(bits[1], noun) // 8
    return parse_bytes(text.strip().removesuffix("/s"), noun)


def parse_seconds(text: str, noun: str) -> float:
    """Parse a time, such as `50ms`, `0.05s`, `300us`, `2min` or `0.05`, into seconds.

    Args:
        text: Text that a user typed. A number without a unit is in seconds.
        noun: Name of the quantity, such as `time`, with which an error message begins.

    Raises:
        UserError: The text is not a time above 0.
    """
    match = _SECONDS.fullmatch(text.strip().lower())
    value = float(match[1]) * _SECOND[match[2]] if match and len(text) <= 40 else 0.0
    if not 0 < value < float("inf"):
        raise UserError(f"{noun} {text!r} is not a time above 0", "Write 50ms, 0.05s or 0.05")
    return value


@contextmanager
def bytes_shown_in(units: str) -> Iterator[None]:
    """Make `format_bytes` and `scale_of` use another unit system within a `with` block.

    Args:
        units: `gib` (binary units), `si` (decimal units) or `bytes` (whole bytes).
    """
    token = _BYTE_UNITS.set(units)
    try:
        yield
    finally:
        _BYTE_UNITS.reset(token)


def shown_in() -> str:
    """Return the name of the unit system that `format_bytes` uses at the moment.

    It is `gib` (binary units such as GiB), `si` (decimal units such as GB) or `bytes`.
    """
    return _BYTE_UNITS.get()


def format_bytes(count: float, digits: int = 2) -> str:
    """Return a number of bytes as text, such as '1.00 GiB' for 2^30.

    Units are binary by default: 1536 gives '1.50 KiB'. In a `bytes_shown_in` block, 2^30 gives
    '1.07 GB' (si) or '1,073,741,824 B' (bytes).

    Args:
        count: Number of bytes.
        digits: Digits after the decimal point.
    """
    if count < 0:
        return f"−{format_bytes(-count, digits)}"
    base, steps = UNITS[_BYTE_UNITS.get()]
    if not steps or count < base:
        return f"{count:,.0f} B"
    value, unit = float(count), ""
    for step in steps.split():
        value, unit = value / base, step
        if value < 999.995:
            break
    return f"{value:,.{digits}f} {unit}"


def scale_of(count: float) -> tuple[int, str]:
    """Return the unit in which `format_bytes` writes `count`, as (bytes of one unit, name).

    Example: 1536 gives (1024, 'KiB'). A table uses it to write all its cells in one unit.

    Args:
        count: Number of bytes that selects the unit.
    """
    base, steps = UNITS[_BYTE_UNITS.get()]
    name, names = format_bytes(count).rpartition(" ")[2], steps.split()
    return (base ** (names.index(name) + 1), name) if name in names else (1, "B")


def format_si(value: float, unit: str = "") -> str:
    """Return a value as text with a decimal prefix: 3.35e12 and 'B/s' give '3.35 TB/s'.

    Args:
        value: A number without a prefix, such as 3.35e12.
        unit: Unit that follows the prefix, such as `B/s`.
    """
    rounded = float(f"{abs(value):.3g}")  # 999.6 is 1 k to three digits
    for power, prefix in zip(range(18, 0, -3), "EPTGMk"):
        if rounded >= 10**power:
            return f"{value / 10**power:.3g} {prefix}{unit}".rstrip()
    return f"{value:.3g} {unit}".rstrip()


def format_seconds(value: float) -> str:
    """Return a number of seconds as text with three digits, such as 4.59 ms, 12.3 µs or 1,840 s."""
    rounded = float(f"{value:.3g}")  # 0.9996 ms is 1 ms
    if rounded >= 1000:
        return f"{rounded:,.0f} s"
    for step, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if rounded >= step:
            return f"{value / step:.3g} {unit}"
    return f"{value / 1e-9:.3g} ns"


def format_count(value: int) -> str:
    """Return a count of parameters as text: 8030261248 gives '8.03B', 124439808 gives '124.4M'."""
    for power, suffix, digits in ((12, "T", 3), (9, "B", 2), (6, "M", 1), (3, "K", 1)):
        if value >= 10**power:
            return f"{value / 10**power:.{digits}f}{suffix}"
    return str(value)
