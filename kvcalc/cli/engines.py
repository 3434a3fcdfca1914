"""Engines by name, for help and completion: read from their files, since to import them takes longer than a shell waits."""

import re
from functools import cache
from pathlib import Path

_ENGINE = re.compile(r'^[A-Z_]+ = Engine\(\s*name="([^"]+)"', re.MULTILINE)


@cache
def engine_names() -> tuple[str, ...]:
    """Every engine, `none` first."""
    files = sorted((Path(__file__).parents[1] / "capacity" / "engines").glob("*.py"))
    found = (_ENGINE.search(file.read_text("utf-8")) for file in files)
    return tuple(sorted((match[1] for match in found if match), key=lambda name: (name != "none", name)))


def with_names(text: str) -> str:
    """A description with the engines' names for `{engines}`."""
    if "{engines}" not in text:
        return text
    *names, last = engine_names()[1:]
    return text.replace("{engines}", f"{', '.join(names)} or {last}")
