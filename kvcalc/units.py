"""Quantities: parse what people type, format what they read, and arithmetic that serves ints and arrays alike.

Everything inside kvcalc is in bytes, FLOP and seconds. GiB is 2^30 bytes and GB is 10^9 bytes; bandwidth and FLOP/s are
decimal. A token count may be typed as `4k` or `1M`, which are binary: 4k = 4096.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from kvcalc.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Num: TypeAlias = int | NDArray[np.float64]
    Real: TypeAlias = Num | float
else:
    Num = Real = Any

UNITS = {
    "gib": (1024, ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB")),
    "si": (1000, ("kB", "MB", "GB", "TB", "PB", "EB")),
    "bytes": (1, ()),
}
_SHOWN = ContextVar("units of bytes", default="gib")
MOST_TOKENS = 10**12  # longer contexts and larger batches than this are typing errors
_TOKENS = re.compile(r"(\d+(?:\.\d+)?)\s*([kmg]?)(?:i?b)?", re.IGNORECASE)
_BROKEN = re.compile(r"0\d\d")  # behind a comma: of 8,000, not of a list
_BINARY = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_SECONDS = re.compile(r"(\d+(?:\.\d*)?(?:e-?\d+)?|\.\d+)\s*(us|µs|ms|s|min|)")
_SECOND = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "": 1.0}
_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)


def parse_tokens(text: str, what: str = "length", least: int = 1) -> int:
    """The token count in `text`: digits, or binary k/M/G (`4k` = 4096). Raises UserError outside least…10^12."""
    match = _TOKENS.fullmatch(text.strip().replace("_", ""))
    if not match or len(text) > 40:
        raise UserError(f"{what} {text!r} is not a whole number", hint="Write 4096, 4k, 128K or 1M")
    value, rest = _times(match[1], _BINARY[match[2].lower()])
    if rest:
        raise UserError(f"{what} {text!r} is not a whole number")
    if not least <= value <= MOST_TOKENS:
        raise UserError(f"{what} {text!r} is outside {least} to {MOST_TOKENS:,}")
    return value


def plain(value: Any) -> Any:
    """A NumPy number as Python's own, a float that is whole as an int; anything else as it is."""
    value = value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value
    return int(value) if isinstance(value, float) and value.is_integer() else value


def check_whole(words: Sequence[str], what: str) -> None:
    """Raises UserError where the words of a list are pieces of one number, as of 8,000."""
    if any(_BROKEN.fullmatch(word) for word in words[1:]):
        raise UserError(
            f"{what} {','.join(words)!r} is a list, as commas make one", hint=f"Write {''.join(words)} for one number"
        )


def parse_list(given: Any, what: str) -> list[int]:
    """Token counts of one number or word, of a list of them, or of words between commas. Raises UserError as `parse_tokens`."""
    given = given.split(",") if isinstance(given, str) else plain(given)
    parts = list(given) if hasattr(given, "__iter__") else [given]
    if not parts:
        raise UserError(f"{what}: the list is empty", hint="Write 4096, 4k or a list of such")
    check_whole([str(part) for part in parts], what)
    return [parse_tokens(str(plain(part)), what) for part in parts]


def _times(number: str, unit: int) -> tuple[int, int]:
    """A decimal number times a unit, exactly: the whole part, and whether there is more (not 0)."""
    whole, _, decimals = number.partition(".")
    shift: int = 10 ** len(decimals)
    return divmod(int(whole + decimals) * unit, shift)


def parse_bytes(text: str, what: str = "size") -> int:
    """A byte count, parts of a byte left off: plain digits, decimal `40GB` or binary `40GiB`. Raises UserError on others."""
    match = _BYTES.fullmatch(text.strip())
    if not match or len(text) > 40:
        raise UserError(f"{what} {text!r} is not a number of bytes", hint="Write 42949672960, 40GiB or 40GB")
    base = 1024 if match[3] else 1000
    value, _ = _times(match[1], base ** " kmgt".index(match[2].lower() or " "))
    if not 1 <= value < 2**60:
        raise UserError(f"{what} {text!r} is outside 1 to 2^60 bytes")
    return value


def parse_rate(text: str, what: str = "rate") -> int:
    """Bytes per second, as `parse_bytes` reads them, with or without `/s`: 7GB/s."""
    return parse_bytes(text.strip().removesuffix("/s"), what)


def parse_seconds(text: str, what: str = "time") -> float:
    """Seconds: `50ms`, `0.05s`, `300us`, `2min` or a bare number. Raises UserError on anything that is not above 0."""
    match = _SECONDS.fullmatch(text.strip().lower())
    value = float(match[1]) * _SECOND[match[2]] if match and len(text) <= 40 else 0.0
    if not 0 < value < float("inf"):
        raise UserError(f"{what} {text!r} is not a time above 0", hint="Write 50ms, 0.05s or 0.05")
    return value


@contextmanager
def bytes_shown_in(units: str) -> Iterator[None]:
    """While it lasts `format_bytes` writes binary units (`gib`), decimal ones (`si`), or whole bytes (`bytes`)."""
    token = _SHOWN.set(units)
    try:
        yield
    finally:
        _SHOWN.reset(token)


def shown_in() -> str:
    """The units that bytes are written in now: gib, si or bytes."""
    return _SHOWN.get()


def format_bytes(count: float, digits: int = 2) -> str:
    """`count` bytes in binary units: 1536 → '1.50 KiB', 2^30 → '1.00 GiB'. Whole bytes below 1 KiB.

    Under `bytes_shown_in` decimal, 2^30 → '1.07 GB', or exact, '1,073,741,824 B'.
    """
    base, steps = UNITS[_SHOWN.get()]
    if not steps or abs(count) < base:
        return f"{count:,.0f} B"
    value, unit = float(count), ""
    for step in steps:
        value, unit = value / base, step
        if abs(value) < 999.995:
            break
    return f"{value:,.{digits}f} {unit}"


def scale_of(count: float) -> tuple[int, str]:
    """The bytes of the unit in which `format_bytes` writes so many, and its name."""
    base, steps = UNITS[_SHOWN.get()]
    name = format_bytes(count).rpartition(" ")[2]
    return (base ** (steps.index(name) + 1), name) if name in steps else (1, "B")


def format_si(value: float, unit: str = "", digits: int = 3) -> str:
    """`value` with a decimal prefix and `digits` significant digits: 3.35e12, 'B/s' → '3.35 TB/s'."""
    shown = float(f"{abs(value):.{digits}g}")  # 999.6 is 1 k to three digits
    for power, prefix in ((18, "E"), (15, "P"), (12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if shown >= 10**power:
            return f"{value / 10**power:.{digits}g} {prefix}{unit}".rstrip()
    return f"{value:.{digits}g} {unit}".rstrip()


def format_seconds(value: float) -> str:
    """A duration with its own unit, to three digits: 4.59 ms, 12.3 µs, 1,840 s."""
    shown = float(f"{value:.3g}")  # 0.9996 ms is 1 ms
    if shown >= 1000:
        return f"{shown:,.0f} s"
    step, unit = next(((s, u) for s, u in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")) if shown >= s), (1e-9, "ns"))
    return f"{value / step:.3g} {unit}"


def format_count(value: int) -> str:
    """A parameter count as people say it: 8030261248 → '8.03B', 124439808 → '124.4M'."""
    for power, suffix, digits in ((12, "T", 3), (9, "B", 2), (6, "M", 1), (3, "K", 1)):
        if value >= 10**power:
            return f"{value / 10**power:.{digits}f}{suffix}"
    return str(value)


def _elementwise(scalar: Callable[[int, int], int], vector: str) -> "Callable[[Num, Num], Num]":
    def apply(a: Num, b: Num) -> Num:
        if isinstance(a, int) and isinstance(b, int):
            return scalar(a, b)
        import numpy as np

        return cast("NDArray[np.float64]", getattr(np, vector)(a, b))

    return apply


minimum = _elementwise(min, "minimum")
maximum = _elementwise(max, "maximum")


def floor_div(a: Num, b: int) -> Num:
    """⌊a/b⌋ for an int or an array of whole numbers."""
    if b == 1 or isinstance(a, int):
        return a // b if b > 1 else a
    import numpy as np

    return np.floor(a / b)  # exact below 2^53, and several times as fast as // on floats


def ceil_div(a: Num, b: int) -> Num:
    """⌈a/b⌉ for an int or an array of whole numbers."""
    return -floor_div(-a, b)


def rounded_up(a: Any) -> Any:
    """⌈a⌉ as an int, or as int64 of each of an array."""
    return math.ceil(a) if isinstance(a, int | float) else -rounded_down(-a)


def rounded_down(a: Any) -> Any:
    """⌊a⌋ as an int, or as int64 of each of an array."""
    if isinstance(a, int | float):
        return math.floor(a)
    import numpy as np

    return np.floor(a).astype(np.int64)


def doublings(n: int) -> int:
    """⌈log2 n⌉."""
    return (n - 1).bit_length()


def by_number(a: Num, rule: Callable[[int], int]) -> Num:
    """What `rule` says of an int, or of each whole number of an array: each asked once."""
    if isinstance(a, int):
        return rule(a)
    import numpy as np

    found = {n: rule(int(n)) for n in set(a.ravel().tolist())}
    return np.array([found[n] for n in a.ravel().tolist()], dtype=float).reshape(a.shape)


def at_least(a: Num, bound: int) -> Num:
    """1 where a ≥ bound, else 0."""
    return int(a >= bound) if isinstance(a, int) else cast("Num", (a >= bound).astype(float))


def array_of(value: Num) -> Num:
    """An int as it is; an array as float64, in which whole numbers to 2^53 are exact."""
    return value if isinstance(value, int) else value.astype("float64", copy=False)
