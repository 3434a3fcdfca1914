"""How a type's entry says where a field of a spec comes from: a key, a condition, a rule, or a plain value."""

from collections.abc import Callable
from typing import Any

from kvcalc.library.huggingface.config import Config

Field = Any  # K, when(...), a rule of one Config, or a literal
Reader = Callable[[Config], tuple[Any, ...]]  # the parts that a layer gets from here


class K:
    """The value of the first of `keys` that is set, else `default`. `scale` multiplies a number."""

    def __init__(self, *keys: str, default: Any = None, scale: int = 1) -> None:
        self.keys, self.default, self.scale = keys, default, scale

    def __call__(self, c: Config) -> Any:
        for key in self.keys:
            value = c.get(key)
            if value is not None:
                return value * self.scale if self.scale != 1 and isinstance(value, int) else value
        return value_of(self.default, c)


def value_of(field: Field, c: Config) -> Any:
    """What a field amounts to in this config: rules and keys are looked up, anything else stands for itself."""
    return field(c) if callable(field) else field


def when(condition: Field, then: Field, otherwise: Field = None) -> Callable[[Config], Any]:
    """`then` where the condition holds, else `otherwise`."""
    return lambda c: value_of(then if value_of(condition, c) else otherwise, c)


def filled(fields: dict[str, Field], c: Config) -> dict[str, Any]:
    """Every field looked up; those that amount to None are left to the spec's own default."""
    found = {name: value_of(field, c) for name, field in fields.items()}
    return {name: value for name, value in found.items() if value is not None}
