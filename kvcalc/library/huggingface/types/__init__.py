"""Every model type that kvcalc reads exactly: one declarative entry each, in files by family of shape."""

from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module

from kvcalc.library.huggingface.types.entry import Type

# Module → the table in it. A look-up imports them in this order until one has the type: importing all takes longer than
# reading a config.
_TABLES = {
    "decoders": "DECODERS",
    "latents": "LATENTS",
    "gemmas": "GEMMAS",
    "dense": "DENSE",
    "experts": "EXPERTS_TYPES",
    "hybrids": "HYBRIDS",
    "linear": "LINEARS",
    "ordered": "ORDERED_TYPES",
    "composed": "COMPOSED_TYPES",
    "convolved": "CONVOLVED_TYPES",
    "qwen4": "QWEN4",
    "older": "OLDER",
    "seq2seq": "SEQ2SEQ",
    "berts": "BERTS",
}


@cache
def _table(module: str) -> dict[str, Type]:
    found: dict[str, Type] = getattr(import_module(f"{__name__}.{module}"), _TABLES[module])
    return found


class _Types(Mapping[str, Type]):
    """All tables as one mapping."""

    def __getitem__(self, name: str) -> Type:
        for module in _TABLES:
            if name in _table(module):
                return _table(module)[name]
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return (name for module in _TABLES for name in _table(module))

    def __len__(self) -> int:
        return sum(len(_table(module)) for module in _TABLES)


TYPES: Mapping[str, Type] = _Types()

__all__ = ["TYPES", "Type"]
