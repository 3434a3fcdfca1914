"""Every model type that kvcalc reads exactly: one declarative entry each, in files by family of
shape, under `TYPES`."""

from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module

from kvcalc.library.huggingface.types.entry import Type

# A look-up imports them in this order until one has the type: importing all takes longer than
# reading a config.
_MODULES = (
    "llama",
    "deepseek",
    "gemma",
    "mixtures",
    "hybrids",
    "qwen",
    "mixed_layers",
    "gpt",
    "encoders",
    "drafts",
    "remote_code",
    "searched_layers",
)


@cache
def _table(module: str) -> dict[str, Type]:
    """Return the types of a module. A key of its table may name several types."""
    table = import_module(f"{__name__}.{module}").TYPES
    return {name: entry for names, entry in table.items() for name in names.split()}


class _Types(Mapping[str, Type]):
    """All tables as one mapping."""

    def __getitem__(self, name: str) -> Type:
        for module in _MODULES:
            if name in _table(module):
                return _table(module)[name]
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return (name for module in _MODULES for name in _table(module))

    def __len__(self) -> int:
        return sum(len(_table(module)) for module in _MODULES)


TYPES: Mapping[str, Type] = _Types()

__all__ = ["TYPES", "Type"]
