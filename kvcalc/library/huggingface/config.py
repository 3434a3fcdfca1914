"""Read a config.json with typed look-ups; each records its key and names it in errors."""

from collections.abc import Mapping
from typing import Any

from kvcalc.errors import UserError

MOST_ITEMS = 10_000
MOST = 10**8  # widths, counts and vocabularies beyond this are broken files
_MISSING = object()


class Config:
    """The merged view of a file and the defaults of its type.

    A missing key has transformers' default for the type; an explicit null counts as null. A list
    with one entry per layer gives the entry of the current layer.

    Attributes:
        layer: Index of the layer being read.
        layer_type: Type of the layer being read.
    """

    def __init__(
        self, data: Mapping[str, Any], defaults: Mapping[str, Any], where: str, aliases: Mapping[str, tuple[str, ...]]
    ) -> None:
        self.file, self.defaults, self.where, self.aliases = data, defaults, where, aliases
        self.layer, self.layers, self.layer_type = 0, 0, "full_attention"
        self.outer: Mapping[str, Any] = data  # the whole file, if this is a part of it
        self.read: set[str] = set()
        self.inside: dict[str, set[str]] = {}  # keys read inside the mapping under each key
        self.defaulted: dict[str, Any] = {}
        self._sizes: dict[str, list[int]] = {}  # lists that have been checked
        self._overrides = self._per_layer_config()

    def _per_layer_config(self) -> dict[int, Mapping[str, Any]]:
        given = self.file.get("per_layer_config")
        if given is None:
            return {}
        self.read.add("per_layer_config")
        if not isinstance(given, dict):
            raise self.fail("per_layer_config", f"should be a mapping, not {show(given)}")
        for index, keys in given.items():
            if not (index.isascii() and index.isdigit() and len(index) <= 6 and isinstance(keys, dict)):
                raise self.fail("per_layer_config", f"{show(index)} should be a layer's number, and name a mapping of keys")
            if keys.get("skip"):
                raise self.fail("per_layer_config", f"layer {index} skips parts, which is not read")
        return {int(index): keys for index, keys in given.items()}

    def fail(self, key: str, text: str, hint: str = "") -> UserError:
        """Return an error about one key of this file."""
        return UserError(f"{key}: {text}", self.where, hint)

    def raw(self, key: str) -> Any:
        """Return the value of a key in any spelling, from the file or otherwise from the defaults.

        Returns _MISSING if neither has the key. A spelling with a value wins over a spelling with null.
        """
        names = (key, *self.aliases.get(key, ()))
        for source in (self._layer_overrides(), self.file):
            found = _MISSING
            for name in names:
                if name in source:
                    self.read.add(name)
                    found = source[name]
                    if found is not None:
                        return found
            if found is None:
                return None
        if key in self.defaults:
            self.defaulted[key] = self.defaults[key]
            return self.defaults[key]
        return _MISSING

    def _layer_overrides(self) -> Mapping[str, Any]:
        """Return the current layer's entry of `per_layer_config` (layer index → changed keys)."""
        return self._overrides.get(self.layer, {}) if self.layers and self._overrides else {}

    def in_file(self, key: str) -> bool:
        """Return whether the file itself has this key, in any spelling, with a value other than null."""
        return any(self.file.get(name) is not None for name in (key, *self.aliases.get(key, ())))

    def has(self, *keys: str) -> bool:
        """Return whether the file or the defaults have one of these keys with a value other than null."""
        return any(self.raw(key) not in (_MISSING, None) for key in keys)

    def get(self, key: str, default: Any = None) -> Any:
        """Return the unchecked value of a key for the current layer; `default` if missing or null."""
        value = self.raw(key)
        if isinstance(value, list) and self.layers and len(value) == self.layers and self.layer < self.layers:
            value = value[self.layer]
        return default if value is _MISSING or value is None else value

    def size(self, key: str, default: int | None = None, least: int = 1) -> int:
        """Return a whole number from `least` up.

        Raises:
            UserError: The value is anything else, or is missing and has no default.
        """
        value = self.get(key, default)
        if value is None:
            raise self.fail(key, "is missing")
        if isinstance(value, float) and value.is_integer() and abs(value) < MOST:
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.fail(key, f"should be a whole number, not {show(value)}")
        if not least <= value <= MOST:
            raise self.fail(key, f"{show(value)} is outside {least} to {MOST:,}")
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        """Return a boolean."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.fail(key, f"should be true or false, not {show(value)}")
        return value

    def outer_flag(self, key: str, default: bool) -> bool:
        """Return a flag of the whole file, ignoring its text part; `default` if the file lacks it."""
        if self.outer is self.file:
            return self.flag(key)
        value = self.outer.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.fail(key, f"should be true or false, not {show(value)}")
        return default if value is None else value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a positive number."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e12:
            raise self.fail(key, f"should be a positive number, not {show(value)}")
        return value

    def word(self, key: str, default: str = "") -> str:
        """Return a short text."""
        value = self.get(key, default)
        if not isinstance(value, str):
            raise self.fail(key, f"should be a text, not {show(value)}")
        return value

    def items(self, key: str, most: int = MOST_ITEMS) -> list[Any] | None:
        """Return a whole list of limited length, or None if it is missing or null."""
        value = self.raw(key)
        if value is _MISSING or value is None:
            return None
        if not isinstance(value, list):
            raise self.fail(key, f"should be a list, not {show(value)}")
        if len(value) > most:
            raise self.fail(key, f"has {len(value):,} entries; more than {most:,} are not read")
        return value

    def sizes(self, key: str) -> list[int]:
        """Return a list of whole numbers from 0 up; empty if it is missing or null."""
        found = self.items(key) or []
        if self._sizes.get(key) is found:
            return found
        for value in found:
            if isinstance(value, bool) or not isinstance(value, int) or not -1 <= value <= MOST:
                raise self.fail(key, f"holds {show(value)}, which is no whole number")
        self._sizes[key] = found
        return found

    def table(self, key: str) -> dict[str, Any]:
        """Return a mapping; empty if it is missing or null."""
        value = self.raw(key)
        if value is _MISSING or value is None:
            return {}
        if not isinstance(value, dict):
            raise self.fail(key, f"should be a mapping, not {show(value)}")
        return value

    def nested(self, key: str) -> "Config":
        """Return the mapping under a key as a Config."""
        default = self.defaults.get(key)
        inside = Config(self.table(key), default if isinstance(default, dict) else {}, f"{self.where}: {key}", {})
        inside.layer, inside.layers, inside.layer_type = self.layer, self.layers, self.layer_type
        inside.read = self.inside.setdefault(key, inside.read)
        return inside


def show(value: Any) -> str:
    """Return a short text of a value for an error message."""
    if isinstance(value, list | dict):
        return f"a {'list' if isinstance(value, list) else 'mapping'} of {len(value):,}"
    text = repr(value[:60] if isinstance(value, str) else value)
    return text if len(text) <= 40 else text[:39] + "…"
