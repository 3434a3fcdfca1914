"""Models whose layers recur, alone or beside attention, after transformers' modelling code."""

from math import ceil
from typing import Any

from kvcalc.attention import BlockSparse, GatedDeltaNet, Grouped, KimiDeltaAttention, Lightning, Mamba, Mamba2, RgLru, ShortConv
from kvcalc.attention.recurrent.ngram import ngram_rows
from kvcalc.attention import NgramMemory
from kvcalc.huggingface.config import Config
from kvcalc.huggingface.fields import Field, K, Reader, when
from kvcalc.huggingface.patterns import FULL, LINEAR, SLIDING, Order, after_first, by_type, cycle, every, full_at, pick, stepped, typed, uniform
from kvcalc.huggingface.shapes import both, dense, grouped, latent, mixer, moe, nothing, projections, shared_experts, state_dtype
from kvcalc.huggingface.types.entry import Type
