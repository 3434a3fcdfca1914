"""Mixers with a state of fixed size, which does not grow with the context. A new mixer is one file here."""

from kvcalc.layers.recurrent.convolutions import Convolutions as Convolutions
from kvcalc.layers.recurrent.delta import GatedDeltaNet as GatedDeltaNet
from kvcalc.layers.recurrent.delta import KimiDeltaAttention as KimiDeltaAttention
from kvcalc.layers.recurrent.lightning import Lightning as Lightning
from kvcalc.layers.recurrent.mamba import Mamba as Mamba
from kvcalc.layers.recurrent.mamba import Mamba2 as Mamba2
from kvcalc.layers.recurrent.ngram import Engram as Engram
from kvcalc.layers.recurrent.ngram import NgramMemory as NgramMemory
from kvcalc.layers.recurrent.rg_lru import RgLru as RgLru
from kvcalc.layers.recurrent.rwkv import Rwkv7 as Rwkv7
from kvcalc.layers.recurrent.short_conv import ShortConv as ShortConv
