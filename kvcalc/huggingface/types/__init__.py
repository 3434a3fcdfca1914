"""Every model type that kvcalc reads exactly: one declarative entry each, in files by family of shape."""

from kvcalc.huggingface.types.decoders import DECODERS
from kvcalc.huggingface.types.dense import DENSE
from kvcalc.huggingface.types.entry import Type
from kvcalc.huggingface.types.experts import EXPERTS_TYPES
from kvcalc.huggingface.types.gemmas import GEMMAS
from kvcalc.huggingface.types.latents import LATENTS
from kvcalc.huggingface.types.ordered import ORDERED_TYPES

TYPES: dict[str, Type] = {**DECODERS, **DENSE, **GEMMAS, **LATENTS, **EXPERTS_TYPES, **ORDERED_TYPES}

__all__ = ["TYPES", "Type"]
