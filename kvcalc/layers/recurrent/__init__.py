"""Mixers whose memory is a state of fixed size: nothing grows with the context."""

from kvcalc.layers.recurrent.convolutions import Convolutions
from kvcalc.layers.recurrent.delta import GatedDeltaNet, KimiDeltaAttention
from kvcalc.layers.recurrent.lightning import Lightning
from kvcalc.layers.recurrent.mamba import Mamba, Mamba2
from kvcalc.layers.recurrent.mlstm import MatrixLstm
from kvcalc.layers.recurrent.ngram import NgramMemory
from kvcalc.layers.recurrent.rg_lru import RgLru
from kvcalc.layers.recurrent.rwkv import Rwkv, Rwkv7
from kvcalc.layers.recurrent.short_conv import ShortConv

__all__ = [
    "Convolutions",
    "GatedDeltaNet",
    "KimiDeltaAttention",
    "Lightning",
    "Mamba",
    "Mamba2",
    "MatrixLstm",
    "NgramMemory",
    "RgLru",
    "Rwkv",
    "Rwkv7",
    "ShortConv",
]
