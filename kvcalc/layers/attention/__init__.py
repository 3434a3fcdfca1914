"""All attention mixers. A new mixer is one file and one line here."""

from kvcalc.layers.attention.compressed import Compressed as Compressed
from kvcalc.layers.attention.compressed import SharedCompressed as SharedCompressed
from kvcalc.layers.attention.grouped import Grouped as Grouped
from kvcalc.layers.attention.latent import Latent as Latent
from kvcalc.layers.attention.sparse import BlockSparse as BlockSparse
from kvcalc.layers.attention.sparse import Sparse as Sparse
