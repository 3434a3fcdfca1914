"""`UserError`, the only error that a user can cause. Any other exception is a bug in kvcalc."""

from collections.abc import Iterable, Mapping, Sequence

TYPE_CHECKING = False  # importing typing takes as long as the rest of the start
if TYPE_CHECKING:
    from typing import Any


def printable(text: object, limit: int = 200) -> str:
    """Return `text` on one line. Each control character is replaced by a space or by �.

    Args:
        text: Text, or an object that is converted to text.
        limit: Maximum number of characters, after which the text is cut.
    """
    clean = "".join(
        c if c.isprintable() else " " if c.isspace() else "\N{REPLACEMENT CHARACTER}"
        for c in str(text)
    )
    return clean if len(clean) <= limit else clean[: limit - 1] + "…"


def visible(text: str) -> str:
    """Return `text` with its line breaks and tabs. Each other control character is replaced by
    �.
    """
    if all(line.isprintable() for line in text.split("\n")):
        return text
    return "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text
    )


def shown_briefly(value: object, printer: "Any", cycle: bool) -> None:
    """Write `str(value)` in an IPython notebook, because all fields of the object would fill the
    page.

    A class uses this function as its `_repr_pretty_`.

    Args:
        value: Object to show.
        printer: IPython's printer, which receives the text.
        cycle: Whether the object contains itself; unused.
    """
    printer.text(str(value))


class UserError(Exception):
    """A request that kvcalc cannot answer because of its input. It is printed without a traceback.

    Attributes:
        what: The problem, as a sentence without a full stop.
        hint: The text to type instead, or the nearest valid input; '' without a hint.
        where: The place of the problem, such as a file and a key; '' without a place.
    """

    def __init__(self, what: str, hint: str = "", where: str = "") -> None:
        self.what, self.where, self.hint = (
            printable(what, 600),
            printable(where, 400),
            printable(hint, 600),
        )
        super().__init__(str(self))

    def __str__(self) -> str:
        head = f"{self.where}: {self.what}" if self.where else self.what
        return f"{head}. {self.hint}" if self.hint else head


def list_few(names: Sequence[str], max_names: int = 4) -> str:
    """Return the first names of a list as text, such as `a, b, c, d and 3 more`.

    Args:
        names: All names.
        max_names: Number of names to write. One more name is written if only one name would remain.
    """
    shown = names if len(names) <= max_names + 1 else names[:max_names]
    return ", ".join(shown) + (
        f" and {len(names) - len(shown)} more" if len(shown) < len(names) else ""
    )


def nearest(
    name: str,
    known: Iterable[str],
    max_names: int = 5,
    printed_names: Mapping[str, str] | None = None,
) -> str:
    """Return a hint with the valid names that are closest to an unknown name.

    Example: `Did you mean h100-sxm?` If no valid name is close, the hint lists all valid names, or
    is '' if they are more than 24.

    Args:
        name: The unknown name.
        known: All valid names.
        max_names: Maximum number of close names in the hint.
        printed_names: Maps an alias in `known` to the name to print; None if all names are printed
            as they are.
    """
    from difflib import get_close_matches

    names = sorted(set(known))
    close = get_close_matches(
        name[:100].lower(), names, n=max_names * (4 if printed_names else 1), cutoff=0.5
    )
    result = close or ([n for n in names if name.lower() in n] if name else [])
    if result:
        printed = dict.fromkeys((printed_names or {}).get(n, n) for n in result)
        return f"Did you mean {', '.join([*printed][:max_names])}?"
    return "Known: " + ", ".join(names) if len(names) <= 24 else ""
