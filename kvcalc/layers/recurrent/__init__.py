"""Mixers with a state of fixed size, which does not grow with the context. A new mixer is one file
here."""

from kvcalc.layers.recurrent.convolution import Convolutions, Engram, NgramMemory, ShortConv
from kvcalc.layers.recurrent.decay import Lightning, RgLru, Rwkv7
from kvcalc.layers.recurrent.delta_rule import GatedDeltaNet, KimiDeltaAttention
from kvcalc.layers.recurrent.mamba import Mamba, Mamba2

__all__ = [
    "Convolutions",
    "Engram",
    "GatedDeltaNet",
    "KimiDeltaAttention",
    "Lightning",
    "Mamba",
    "Mamba2",
    "NgramMemory",
    "RgLru",
    "Rwkv7",
    "ShortConv",
]
