"""kvcalc: how big is the KV cache, what does it cost to read, and what will this GPU do with it?

>>> from kvcalc import cache_size, load_model
>>> cache_size(load_model("llama-3.1-8b"), context=131072).stored
17179869184
"""

from typing import TYPE_CHECKING, Any

from kvcalc.errors import UserError
from kvcalc.gpu.roof import roofline
from kvcalc.gpu.spec import Gpu
from kvcalc.layers.batch import Batch, Sequences
from kvcalc.layers.cost import Cost, Operator
from kvcalc.layers.ranks import Parallelism
from kvcalc.library.load import load_gpu, load_model
from kvcalc.model.memory import CacheSize, cache_size, mha_ratio, weight_bytes
from kvcalc.model.operators import forward, total
from kvcalc.model.precision import Precision
from kvcalc.model.spec import Layer, Model

if TYPE_CHECKING:
    from kvcalc.capacity import Fit, FitOptions, fit
    from kvcalc.timing.deployment import Deployment

__version__ = "0.1.0"

__all__ = [
    "Batch",
    "CacheSize",
    "Cost",
    "Deployment",
    "Fit",
    "FitOptions",
    "Gpu",
    "Layer",
    "Model",
    "Operator",
    "Parallelism",
    "Precision",
    "Sequences",
    "UserError",
    "cache_size",
    "fit",
    "forward",
    "load_gpu",
    "load_model",
    "mha_ratio",
    "roofline",
    "total",
    "weight_bytes",
]


def __getattr__(name: str) -> Any:
    """`fit` and what it takes and gives, loaded when first asked for."""
    if name == "Deployment":
        from kvcalc.timing.deployment import Deployment

        return Deployment
    if name in ("Fit", "FitOptions", "fit"):
        from kvcalc import capacity

        return getattr(capacity, name)
    raise AttributeError(f"module 'kvcalc' has no attribute {name!r}")
