"""Types of the public names, for type checkers and editors."""

from kvcalc.answers.answer import Answer
from kvcalc.answers.notebook import (
    Deployment,
    compare,
    deploy,
    fit,
    latency,
    plan,
    roofline,
    serve,
    size,
)
from kvcalc.answers.python_functions import (
    bounds,
    cache_size,
    forward,
    load_gpu,
    load_model,
    mha_ratio,
    total,
    weight_bytes,
)
from kvcalc.capacity import Fit, FitOptions
from kvcalc.errors import UserError
from kvcalc.gpu.gpu import Gpu
from kvcalc.layers.batch import Batch, Parallelism, Sequences
from kvcalc.layers.cost import Cost, Operator
from kvcalc.model.memory import CacheSize
from kvcalc.model.model import Layer, Model
from kvcalc.model.precision import Precision
from kvcalc.report.export import record_keys

__version__: str

__all__ = [
    "Answer",
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
    "bounds",
    "cache_size",
    "compare",
    "deploy",
    "fit",
    "forward",
    "latency",
    "load_gpu",
    "load_model",
    "mha_ratio",
    "plan",
    "record_keys",
    "roofline",
    "serve",
    "size",
    "total",
    "weight_bytes",
]
