"""What readers of logs share: numbers, arguments as Python wrote them, and rules of a line."""

import re
from collections.abc import Callable
from typing import Any

from kvcalc.capacity.dialects import DIALECTS, Flag
from kvcalc.errors import UserError
from kvcalc.planning.startup.boot import Boot

N = r"(-?\d[\d,]{0,14}(?:\.\d{1,12})?)(?!\d)"
Take = Callable[[Boot, re.Match[str]], None]
Rule = tuple[str, re.Pattern[str], Take]  # what a line holds at least, the pattern, and what is done with its match


def number(text: str) -> float:
    return float(text.replace(",", ""))


def rules(*given: tuple[str, str, Take]) -> list[Rule]:
    return [(anchor, re.compile(pattern), take) for anchor, pattern, take in given]


def arguments_of(engine: str) -> dict[str, Flag]:
    """The engine's flags by the names that its own code gives them."""
    spelled = ((spelling, flag) for flag in DIALECTS[engine].flags for spelling in flag.spellings)
    return {spelling.lstrip("-").replace("-", "_"): flag for spelling, flag in spelled if spelling.startswith("--")}


def unquoted(text: str) -> Any:
    """A value as Python wrote it: a string without its quotes, None, True, False, or the text itself."""
    return text[1:-1] if text[:1] in "'\"" else {"None": None, "True": True, "False": False}.get(text, text)


def tell(boot: Boot, flag: Flag | None, value: Any) -> None:
    """One argument, where it is one of ours and can be read."""
    if flag is None or value in (None, "") or flag.alone != isinstance(value, bool):
        return
    try:
        boot.tell(flag.name, value if flag.alone else flag.read(value))
    except UserError:
        return
