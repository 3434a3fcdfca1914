"""Every feed-forward part. A new one is a file and a line here."""

from kvcalc.layers.ffn.dense import Dense as Dense
from kvcalc.layers.ffn.dense import Projections as Projections
from kvcalc.layers.ffn.moe import Moe as Moe
