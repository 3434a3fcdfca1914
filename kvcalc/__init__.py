"""kvcalc: how big is the KV cache, what does it cost to read, and what will this GPU do with it?

>>> from kvcalc import cache_size, load_model
>>> cache_size(load_model("llama-3.1-8b"), context=131072).stored
17179869184
"""

from kvcalc.batch import Parallelism, Precision
from kvcalc.errors import UserError
from kvcalc.gpu import Gpu
from kvcalc.load import load_gpu, load_model
from kvcalc.memory import CacheSize, cache_size, mha_ratio, weight_bytes
from kvcalc.model import Layer, Model

__version__ = "0.1.0"

__all__ = [
    "CacheSize",
    "Gpu",
    "Layer",
    "Model",
    "Parallelism",
    "Precision",
    "UserError",
    "cache_size",
    "load_gpu",
    "load_model",
    "mha_ratio",
    "weight_bytes",
]
