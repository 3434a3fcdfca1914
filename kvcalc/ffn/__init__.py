"""Every feed-forward part, one file each."""

from kvcalc.ffn.dense import Dense, Projections
from kvcalc.ffn.moe import Moe

FeedForward = Dense | Moe | Projections

__all__ = ["Dense", "FeedForward", "Moe", "Projections"]
