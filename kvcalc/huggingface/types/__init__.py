"""Every model type that kvcalc reads exactly: one declarative entry each, in files by family of shape."""

from kvcalc.huggingface.types.berts import BERTS
from kvcalc.huggingface.types.composed import COMPOSED_TYPES
from kvcalc.huggingface.types.convolved import CONVOLVED_TYPES
from kvcalc.huggingface.types.decoders import DECODERS
from kvcalc.huggingface.types.dense import DENSE
from kvcalc.huggingface.types.entry import Type
from kvcalc.huggingface.types.experts import EXPERTS_TYPES
from kvcalc.huggingface.types.gemmas import GEMMAS
from kvcalc.huggingface.types.hybrids import HYBRIDS
from kvcalc.huggingface.types.latents import LATENTS
from kvcalc.huggingface.types.linear import LINEARS
from kvcalc.huggingface.types.older import OLDER
from kvcalc.huggingface.types.ordered import ORDERED_TYPES
from kvcalc.huggingface.types.qwen4 import QWEN4
from kvcalc.huggingface.types.seq2seq import SEQ2SEQ

TYPES: dict[str, Type] = {
    **DECODERS,
    **DENSE,
    **GEMMAS,
    **LATENTS,
    **HYBRIDS,
    **LINEARS,
    **QWEN4,
    **EXPERTS_TYPES,
    **ORDERED_TYPES,
    **COMPOSED_TYPES,
    **CONVOLVED_TYPES,
    **OLDER,
    **BERTS,
    **SEQ2SEQ,
}

__all__ = ["TYPES", "Type"]
