"""kvcalc: how big is the KV cache, what does it cost to read, and what will this GPU do with it?

>>> import kvcalc
>>> kvcalc.deploy("llama-3.1-8b", "h100").size("128k").stored
17179869184
"""

# everything heavy, typing too, is loaded when it is used, so that the command line starts fast
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

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

# In each line, a module and its public names.
_HOMES = """
    capacity                  Fit FitOptions
    errors                    UserError
    gpu.gpu                   Gpu
    layers.batch              Batch Parallelism Sequences
    layers.cost               Cost Operator
    model.memory              CacheSize
    model.precision           Precision
    model.model               Layer Model
    answers.answer            Answer
    report.export             record_keys
    answers.python_functions  bounds cache_size forward load_gpu load_model
    answers.python_functions  mha_ratio total weight_bytes
    answers.notebook          Deployment compare deploy fit latency plan roofline serve size
"""


def __getattr__(name: str) -> "Any":
    """Return a public name of the package, and import its module if it is used for the first time.

    Args:
        name: Public name, such as `deploy`.
    """
    from importlib import import_module

    for home, *names in map(str.split, _HOMES.strip().splitlines()):
        if name in names:
            value = globals()[name] = getattr(import_module(f"kvcalc.{home}"), name)
            return value
    is_private = name.startswith("_")
    hint = "" if is_private else import_module("kvcalc.errors").nearest(name, __all__)
    raise AttributeError(
        f"module 'kvcalc' has no attribute {name!r}. {hint}".removesuffix(". ")
    )


def __dir__() -> list[str]:
    return ["__version__", *__all__]
