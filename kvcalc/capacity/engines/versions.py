"""Versions of engines: as people type them, to the nearest older one whose rules are known."""

import re
from collections.abc import Sequence
from typing import Protocol, TypeVar

from kvcalc.errors import UserError


class Versioned(Protocol):
    """Rules that hold from version `since` on."""

    @property
    def since(self) -> tuple[int, ...]: ...


Rules = TypeVar("Rules", bound=Versioned)


def nearest_older(engine: str, releases: Sequence[Rules], text: str) -> tuple[Rules, str]:
    """The rules for `0.11`, `0.11.2`, `latest` or '', and a remark where they are another release's.

    releases: oldest first. Two numbers are the first release that is known of that kind; a version between known ones takes
    the nearest older. Raises UserError for what is no version.
    """
    asked = text.strip().lower().removeprefix("v")
    if asked in ("", "latest"):
        return releases[-1], ""
    if not re.fullmatch(r"\d{1,4}(\.\d{1,4}){1,3}(\.?(post|rc|dev)\d*)?", asked):
        raise UserError(f"unknown engine-version {text!r}", hint="Give one like 0.11, 0.11.2 or latest")
    version = tuple(map(int, re.findall(r"\d+", asked)[:3]))
    same = [r for r in releases if r.since[: len(version)] == version]
    if same:
        return same[0], ""
    older = [r for r in releases if r.since <= version]
    used = older[-1] if older else releases[0]
    which = "the nearest older version" if older else "the oldest version"
    return used, f"{engine} {asked}: by the rules of {'.'.join(map(str, used.since))}, {which} known"
