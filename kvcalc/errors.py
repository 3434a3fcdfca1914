"""The one error that a user can cause. Any other exception out of kvcalc is a bug in kvcalc."""

from collections.abc import Iterable


def printable(text: object, limit: int = 200) -> str:
    """`text` on one line, without control characters or terminal escapes, and cut after `limit` characters."""
    clean = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in str(text))
    return clean if len(clean) <= limit else clean[: limit - 1] + "…"


class UserError(Exception):
    """A request that cannot be met: `what` is wrong, `where` it stands, and a `hint` at the nearest right thing."""

    def __init__(self, what: str, where: str = "", hint: str = "") -> None:
        self.what, self.where, self.hint = printable(what, 600), printable(where, 400), printable(hint, 600)
        super().__init__(str(self))

    def __str__(self) -> str:
        head = f"{self.where}: {self.what}" if self.where else self.what
        return f"{head}. {self.hint}" if self.hint else head


def nearest(name: str, known: Iterable[str], most: int = 5) -> str:
    """A hint naming the known names closest to `name`, or all of them when they are few."""
    from difflib import get_close_matches

    names = sorted(set(known))
    close = get_close_matches(name[:100].lower(), names, n=most, cutoff=0.5)
    if close:
        return "Did you mean " + ", ".join(close) + "?"
    inside = [n for n in names if name.lower() in n][:most] if name else []
    if inside:
        return "Did you mean " + ", ".join(inside) + "?"
    return "Known: " + ", ".join(names) if len(names) <= 24 else ""
