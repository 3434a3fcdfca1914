"""`UserError`, the only error that a user can cause. Any other exception is a bug in kvcalc."""

from collections.abc import Iterable, Mapping, Sequence

TYPE_CHECKING = False  # importing typing takes as long as the rest of the start
if TYPE_CHECKING:
    from typing import Any


def printable(text: object, limit: int = 200) -> str:
    """Return `text` on one line, without control characters, so that it is safe to print.

    White space such as a line break becomes a space. Another control character becomes �.

    Args:
        text: A text, or another object, which is converted with `str`.
        limit: Maximum number of characters. A longer text is cut and ends in `…`.
    """
    clean = "".join(
        c if c.isprintable() else " " if c.isspace() else "\N{REPLACEMENT CHARACTER}"
        for c in str(text)
    )
    return clean if len(clean) <= limit else clean[: limit - 1] + "…"


def visible(text: str) -> str:
    """Return `text` with each control character replaced by �, so that it is safe to print.

    Line breaks and tabs are kept.
    """
    if all(line.isprintable() for line in text.split("\n")):
        return text
    return "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text
    )


def shown_briefly(value: object, printer: "Any", cycle: bool) -> None:
    """Write `str(value)` when an IPython notebook shows an object.

    A class with many fields uses this function as its `_repr_pretty_`. Otherwise its fields would
    fill the page.

    Args:
        value: Object to show.
        printer: IPython's `RepresentationPrinter`, which receives the text.
        cycle: Whether the object contains itself; unused.
    """
    printer.text(str(value))


class UserError(Exception):
    """A request that kvcalc cannot answer because of its input. It is printed without a traceback.

    Attributes:
        what: The problem, as a sentence without a full stop.
        hint: The text to type instead, or the nearest valid input; '' without a hint.
        where: The place of the problem, such as a file and a key; '' without a place.
        read_as: Name of a model that cannot be read, and the `Checkpoint` (a preset and its format)
            that this name means; None if there is none.
    """

    read_as: "Any" = None

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


def join_words(words: Sequence[str], link: str = " and ") -> str:
    """Return words as one text: `a, b and c`. The text before the last word is `link`."""
    return link.join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def list_few(names: Iterable[str]) -> str:
    """Return up to five names as text, or the first four, such as `a, b, c, d and 3 more`.

    Args:
        names: All names. A repeated name counts once.
    """
    distinct = list(dict.fromkeys(names))
    shown = distinct if len(distinct) <= 5 else distinct[:4]
    return ", ".join(shown) + (
        f" and {len(distinct) - len(shown)} more" if len(shown) < len(distinct) else ""
    )


def nearest(
    name: str,
    known: Iterable[str],
    max_names: int = 5,
    printed_names: Mapping[str, str] | None = None,
) -> str:
    """Return a hint with the valid names that are closest to an unknown name, for an error message.

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
    return "Known: " + ", ".join(names) if 0 < len(names) <= 24 else ""
