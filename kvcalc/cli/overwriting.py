"""What a command reads is not what it writes."""

import os
from collections.abc import Iterator, Sequence

from kvcalc.errors import UserError

_WRITTEN = ("--output", "-o", "--plot", "--points", "--predictions", "--save", "--timeline")
_FREE = ("--stack", "--origin", "--commit", "--license", "--date")  # words of people's own, that name no file


def check_outputs(words: Sequence[str]) -> None:
    """Raises UserError where a file that is to be written is one that another word of the command line names."""
    own = words[: words.index("--")] if "--" in words else words
    pairs = list(_options(own))
    for target in (value for name, value in pairs if name in _WRITTEN):
        for name, value in pairs:
            if name not in (*_WRITTEN, *_FREE) and any(_same(target, one) for one in {value, *value.split(",")}):
                raise UserError("is read by this command, and cannot be what it writes", target, "Name another file")


def _options(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Each word that may name a file, with the option that stands before it."""
    before = ""
    for word in words:
        name, _, value = word.partition("=") if word.startswith("--") else (before, "", word)
        if value:
            yield name, value
        before = word


def _same(one: str, other: str) -> bool:
    try:
        return os.path.isfile(one) and os.path.samefile(one, other)  # noqa: PTH113, PTH121 (of words, which may be no path)
    except (OSError, ValueError):
        return False
