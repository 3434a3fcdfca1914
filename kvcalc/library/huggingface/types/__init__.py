"""Every model type that kvcalc reads exactly, in YAML tables by family."""

from kvcalc.library.huggingface.types.model_type import TYPES, Type

__all__ = ["TYPES", "Type"]
