"""Sources of a specification field in a type's entry: a key, a condition, a rule or a literal."""

from collections.abc import Callable
from typing import Any

from kvcalc.library.huggingface.config import Config

Field = Any  # K, when(...), a rule of one Config, or a literal
Reader = Callable[[Config], tuple[Any, ...]]  # the parts that a layer gets from here


class K:
    """The value of the first of `keys` with a value, else `default`. `scale` multiplies a number."""

    def __init__(self, *keys: str, default: Any = None, scale: int = 1) -> None:
        self.keys, self.default, self.scale = keys, default, scale

    def __call__(self, c: Config) -> Any:
        for key in self.keys:
            value = c.get(key)
            if value is not None:
                return value * self.scale if self.scale != 1 and isinstance(value, int) else value
        return value_of(self.default, c)


def value_of(field: Field, c: Config) -> Any:
    """Return the value of a field in this config; rules and keys are looked up, literals returned."""
    return field(c) if callable(field) else field


def when(condition: Field, then: Field, otherwise: Field = None) -> Callable[[Config], Any]:
    """Return a rule that gives `then` if the condition is true, and `otherwise` if it is false."""
    return lambda c: value_of(then if value_of(condition, c) else otherwise, c)


def filled(fields: dict[str, Field], c: Config) -> dict[str, Any]:
    """Return every field with its value; a field with None keeps the specification's default."""
    found = {name: value_of(field, c) for name, field in fields.items()}
    return {name: value for name, value in found.items() if value is not None}
