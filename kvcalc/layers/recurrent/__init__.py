"""Mixers with a state of fixed size, which does not grow with the context. A new mixer is one file
here."""

from kvcalc.layers.recurrent.convolution import Convolutions as Convolutions
from kvcalc.layers.recurrent.convolution import Engram as Engram
from kvcalc.layers.recurrent.convolution import NgramMemory as NgramMemory
from kvcalc.layers.recurrent.convolution import ShortConv as ShortConv
from kvcalc.layers.recurrent.decay import Lightning as Lightning
from kvcalc.layers.recurrent.decay import RgLru as RgLru
from kvcalc.layers.recurrent.decay import Rwkv7 as Rwkv7
from kvcalc.layers.recurrent.delta_rule import GatedDeltaNet as GatedDeltaNet
from kvcalc.layers.recurrent.delta_rule import KimiDeltaAttention as KimiDeltaAttention
from kvcalc.layers.recurrent.mamba import Mamba as Mamba
from kvcalc.layers.recurrent.mamba import Mamba2 as Mamba2
