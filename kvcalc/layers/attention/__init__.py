"""Every mixer that a layer can have, one file each."""

from kvcalc.layers.attention.compressed import Compressed
from kvcalc.layers.attention.grouped import Grouped
from kvcalc.layers.attention.hidden import HiddenStates
from kvcalc.layers.attention.latent import Latent
from kvcalc.layers.attention.sparse import BlockSparse, Sparse
from kvcalc.layers.recurrent import (
    Convolutions,
    GatedDeltaNet,
    KimiDeltaAttention,
    Lightning,
    Mamba,
    Mamba2,
    MatrixLstm,
    NgramMemory,
    RgLru,
    Rwkv,
    Rwkv7,
    ShortConv,
)

Mixer = (
    Grouped | Latent | Sparse | BlockSparse | Compressed | HiddenStates
    | Mamba | Mamba2 | GatedDeltaNet | KimiDeltaAttention | Lightning | MatrixLstm | NgramMemory
    | RgLru | Rwkv | Rwkv7 | ShortConv | Convolutions
)  # fmt: skip

__all__ = [
    "BlockSparse",
    "Compressed",
    "Convolutions",
    "GatedDeltaNet",
    "Grouped",
    "HiddenStates",
    "KimiDeltaAttention",
    "Latent",
    "Lightning",
    "Mamba",
    "Mamba2",
    "MatrixLstm",
    "Mixer",
    "NgramMemory",
    "RgLru",
    "Rwkv",
    "Rwkv7",
    "ShortConv",
    "Sparse",
]
