"""Every feed-forward part, one file each."""

from kvcalc.layers.ffn.dense import Dense, Projections
from kvcalc.layers.ffn.moe import Moe

FeedForward = Dense | Moe | Projections

__all__ = ["Dense", "FeedForward", "Moe", "Projections"]
