"""All attention mixers. A new mixer is one file, with its name in both places here."""

from kvcalc.layers.attention.compressed import Compressed, SharedCompressed
from kvcalc.layers.attention.grouped import Grouped
from kvcalc.layers.attention.latent import Latent
from kvcalc.layers.attention.sparse import BlockSparse, Sparse

__all__ = ["BlockSparse", "Compressed", "Grouped", "Latent", "SharedCompressed", "Sparse"]
