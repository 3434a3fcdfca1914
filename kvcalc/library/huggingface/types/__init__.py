"""Every model type that kvcalc reads exactly: one declarative entry each, in files by family of shape, under `TYPES`."""

from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module

from kvcalc.library.huggingface.types.entry import Type

# A look-up imports them in this order until one has the type: importing all takes longer than reading a config.
_MODULES = (
    "decoders", "latents", "compressed", "gemmas", "dense", "experts", "hybrids", "linear", "ordered", "composed", "convolved",
    "qwen4", "older", "seq2seq", "berts", "drafts", "released", "released_experts", "released_others",
    "searched", "looped",
)  # fmt: skip


@cache
def _table(module: str) -> dict[str, Type]:
    found: dict[str, Type] = import_module(f"{__name__}.{module}").TYPES
    return found


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
