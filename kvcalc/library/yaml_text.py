"""Parse YAML from users; every error names its line.

The parser reads PyYAML's event stream by the core schema of YAML 1.2: `989e12` is a number,
`no` is a string. Nesting is limited, and duplicate keys and aliases are refused. No object is
built that the text does not spell out.
"""

import re
from typing import Any

from kvcalc.errors import UserError
from kvcalc.records import JsonObject

MOST_DEPTH = 32
_INT = re.compile(r"[-+]?[0-9][0-9_]{0,30}")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9]*)?)([eE][-+]?[0-9]{1,4})?")
_WORDS = {
    "": None,
    "~": None,
    "null": None,
    "Null": None,
    "true": True,
    "True": True,
    "false": False,
    "False": False,
}

Lines = dict[tuple[str | int, ...], int]


def parse_yaml(text: str, file_name: str) -> tuple[JsonObject, Lines]:
    """Return the mapping in `text`, and the line of each key by its path.

    Raises:
        UserError: The text is invalid. The message names `where` and the line.
    """
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    builder = _Builder(file_name)
    try:
        for event in yaml.parse(text, Loader=loader):
            builder.take(event)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        problem = str(getattr(error, "problem", None) or error)
        too_deep = "nesting depth" in problem  # PyYAML 6.0.4 also has a limit
        text = (
            f"nests deeper than {MOST_DEPTH} levels" if too_deep else f"is not YAML: {problem}"
        )
        raise UserError(text, file_name + line) from None
    if not isinstance(builder.root, dict):
        raise UserError("holds no mapping of keys to values", file_name)
    return builder.root, builder.lines


class _Builder:
    """A builder of plain dicts, lists and scalars from YAML events."""

    def __init__(self, file_name: str) -> None:
        self.file_name, self.root = file_name, None
        self.lines: Lines = {}
        self.stack: list[Any] = []  # open containers
        self.paths: list[tuple[str | int, ...]] = []  # path of each open container
        self.keys: list[str | None] = []  # key without a value yet, per container
        self.documents = 0

    def fail(self, text: str, event: Any) -> UserError:
        return UserError(text, f"{self.file_name}, line {event.start_mark.line + 1}")

    def take(self, event: Any) -> None:
        name = type(event).__name__
        if name == "ScalarEvent":
            self._scalar(event)
        elif name in ("MappingStartEvent", "SequenceStartEvent"):
            if len(self.stack) >= MOST_DEPTH:
                raise self.fail(f"nests deeper than {MOST_DEPTH} levels", event)
            container: Any = {} if name == "MappingStartEvent" else []
            self.paths.append(self._add(container, event))
            self.stack.append(container)
            self.keys.append(None)
        elif name in ("MappingEndEvent", "SequenceEndEvent"):
            for pile in (self.stack, self.paths, self.keys):
                pile.pop()
        elif name == "AliasEvent":
            raise self.fail("uses an alias (*name); write the value out", event)
        elif name == "DocumentStartEvent":
            self.documents += 1
            if self.documents > 1:
                raise self.fail("holds a second document", event)

    def _scalar(self, event: Any) -> None:
        if self.stack and isinstance(self.stack[-1], dict) and self.keys[-1] is None:
            if event.value in self.stack[-1]:
                raise self.fail(f"key {event.value!r} occurs twice", event)
            self.keys[-1] = event.value
            self.lines[(*self.paths[-1], event.value)] = event.start_mark.line + 1
            return
        plain = event.implicit[0] and event.style in (None, "")
        try:
            self._add(scalar(event.value) if plain else event.value, event)
        except (ValueError, OverflowError):
            raise self.fail(f"{event.value[:40]!r} is not a usable number", event) from None

    def _add(self, value: Any, event: Any) -> tuple[str | int, ...]:
        """Add a value to the open container, record its line, and return its path."""
        if not self.stack:
            self.root = value
            return ()
        parent, key = self.stack[-1], self.keys[-1]
        if isinstance(parent, list):
            path: tuple[str | int, ...] = (*self.paths[-1], len(parent))
            parent.append(value)
        elif key is None:
            raise self.fail("a key must be a single word or number", event)
        else:
            path = (*self.paths[-1], key)
            parent[key] = value
            self.keys[-1] = None
        self.lines.setdefault(path, event.start_mark.line + 1)
        return path


def scalar(text: str) -> Any:
    """Return a plain scalar by YAML 1.2: null, a boolean, a number, or otherwise the text."""
    if text in _WORDS:
        return _WORDS[text]
    if _INT.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        value = float(text)
        if abs(value) == float("inf"):
            raise OverflowError
        return value
    return text
