"""Mixers whose memory is a state of fixed size: nothing grows with the context."""

from kvcalc.attention.recurrent.convolutions import Convolutions
from kvcalc.attention.recurrent.delta import GatedDeltaNet, KimiDeltaAttention
from kvcalc.attention.recurrent.lightning import Lightning
from kvcalc.attention.recurrent.mamba import Mamba, Mamba2
from kvcalc.attention.recurrent.mlstm import MatrixLstm
from kvcalc.attention.recurrent.ngram import NgramMemory
from kvcalc.attention.recurrent.rg_lru import RgLru
from kvcalc.attention.recurrent.rwkv import Rwkv
from kvcalc.attention.recurrent.short_conv import ShortConv

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
    "ShortConv",
]
