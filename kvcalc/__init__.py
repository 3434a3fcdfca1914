"""kvcalc: how big is the KV cache, what does it cost to read, and what will this GPU do with it?

>>> import kvcalc
>>> kvcalc.deploy("llama-3.1-8b", "h100").size("128k").stored
17179869184
"""

TYPE_CHECKING = False  # the command line is here in a moment: what is heavy, typing too, is loaded when it is asked for
if TYPE_CHECKING:
    from typing import Any

    from kvcalc.capacity import Fit, FitOptions, fit
    from kvcalc.errors import UserError
    from kvcalc.gpu.spec import Gpu
    from kvcalc.layers.batch import Batch, Sequences
    from kvcalc.layers.cost import Cost, Operator
    from kvcalc.layers.ranks import Parallelism
    from kvcalc.model.memory import CacheSize
    from kvcalc.model.precision import Precision
    from kvcalc.model.spec import Layer, Model
    from kvcalc.report.answer import Answer
    from kvcalc.report.keys import record_keys
    from kvcalc.report.lower import cache_size, forward, load_gpu, load_model, mha_ratio, roofline, total, weight_bytes
    from kvcalc.report.notebook import Deployment, deploy, plan

__version__ = "1.0.0"

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
    "cache_size",
    "deploy",
    "fit",
    "forward",
    "load_gpu",
    "load_model",
    "mha_ratio",
    "plan",
    "record_keys",
    "roofline",
    "total",
    "weight_bytes",
]

# Where each name stands.
_HOMES = {
    "capacity": ("Fit", "FitOptions", "fit"),
    "errors": ("UserError",),
    "gpu.spec": ("Gpu",),
    "layers.batch": ("Batch", "Sequences"),
    "layers.cost": ("Cost", "Operator"),
    "layers.ranks": ("Parallelism",),
    "model.memory": ("CacheSize",),
    "model.precision": ("Precision",),
    "model.spec": ("Layer", "Model"),
    "report.answer": ("Answer",),
    "report.keys": ("record_keys",),
    "report.lower": ("cache_size", "forward", "load_gpu", "load_model", "mha_ratio", "roofline", "total", "weight_bytes"),
    "report.notebook": ("Deployment", "deploy", "plan"),
}


def __getattr__(name: str) -> "Any":
    """A public name, loaded when it is first asked for."""
    from importlib import import_module

    for home, names in _HOMES.items():
        if name in names:
            value = globals()[name] = getattr(import_module(f"kvcalc.{home}"), name)
            return value
    hint = ""
    if not name.startswith("_"):
        near = import_module("kvcalc.errors").nearest(name, __all__)
        readings = ("size", "compare", "latency", "serve")
        hint = f'. Write kvcalc.deploy("llama-3.1-8b", "h100").{name}()' if name in readings else f". {near}"
    raise AttributeError(f"module 'kvcalc' has no attribute {name!r}{hint}".removesuffix(". "))


def __dir__() -> list[str]:
    return ["__version__", *__all__]
