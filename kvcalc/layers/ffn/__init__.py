"""All FFNs. A new FFN is one file and one line here."""

from kvcalc.layers.ffn.dense import Dense as Dense
from kvcalc.layers.ffn.dense import Projections as Projections
from kvcalc.layers.ffn.moe import Moe as Moe
