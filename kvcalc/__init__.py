"""kvcalc: how big is the KV cache, what does it cost to read, and what will this GPU do with it?

>>> import kvcalc
>>> kvcalc.deploy("llama-3.1-8b", "h100").size("128k").stored
17179869184
"""

__version__ = "1.0.0"

# In each line, a module and its public names. It is imported when a name is used, so that the
# command line starts fast. Type checkers read __init__.pyi.
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
_HOME_OF = {
    name: home for home, *names in map(str.split, _HOMES.strip().splitlines()) for name in names
}
__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> object:
    """Return a public name of the package, and import its module if it is used for the first time.

    Args:
        name: Public name, such as `deploy`.
    """
    from importlib import import_module

    if home := _HOME_OF.get(name):
        value = globals()[name] = getattr(import_module(f"kvcalc.{home}"), name)
        return value
    is_private = name.startswith("_")
    hint = "" if is_private else import_module("kvcalc.errors").nearest(name, __all__)
    raise AttributeError(
        f"module 'kvcalc' has no attribute {name!r}. {hint}".removesuffix(". ")
    )


def __dir__() -> list[str]:
    return ["__version__", *__all__]
