"""Every mixer that a layer can have, one file each."""

from kvcalc.attention.compressed import Compressed
from kvcalc.attention.grouped import Grouped
from kvcalc.attention.hidden import HiddenStates
from kvcalc.attention.latent import Latent
from kvcalc.attention.recurrent import (
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
    ShortConv,
)
from kvcalc.attention.sparse import BlockSparse, Sparse

Mixer = (
    Grouped | Latent | Sparse | BlockSparse | Compressed | HiddenStates
    | Mamba | Mamba2 | GatedDeltaNet | KimiDeltaAttention | Lightning | MatrixLstm | NgramMemory
    | RgLru | Rwkv | ShortConv | Convolutions
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
    "ShortConv",
    "Sparse",
]
