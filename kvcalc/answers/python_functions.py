"""The lower level of the Python API: a pass, its cache and its bounds, with names or objects."""

import inspect
from collections.abc import Callable, Iterable
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

from kvcalc.errors import UserError
from kvcalc.gpu.gpu import Gpu
from kvcalc.gpu.gpu import roofline as bounds_of_operators
from kvcalc.layers.batch import Batch, Parallelism
from kvcalc.layers.cost import Operator
from kvcalc.library import load
from kvcalc.library.checkpoints import load_named
from kvcalc.model import forward_pass, memory
from kvcalc.model.model import Model
from kvcalc.model.precision import Precision
from kvcalc.units import parse_tokens, plain

Value = TypeVar("Value")
ModelOrName = Model | str | Path
GpuOrName = Gpu | str | Path


def load_model(name: str | Path) -> Model:
    """Return a model by name.

    Args:
        name: Preset name, YAML or GGUF file, config.json or its folder, or `hf:org/name`.

    Raises:
        UserError: The name is unknown, or the file cannot be read.
    """
    return load_named(str(of_kind(name, "name of a model", str, Path)))


def load_gpu(name: str | Path) -> Gpu:
    """Return a GPU by name.

    Args:
        name: Preset name, its alias, or YAML file.

    Raises:
        UserError: The name is unknown, or the file cannot be read.
    """
    return load.load_gpu(str(of_kind(name, "name of a GPU", str, Path)))


def _operators(values: Iterable[Operator]) -> list[Operator]:
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise UserError(
            f"{values!r:.80} is no pass", "Give the operators that `forward` returns"
        )
    return [of_kind(value, "Operator", Operator) for value in values]


def as_model(value: ModelOrName) -> Model:
    """Return `value` if it is a model. If it is a name or a file, return the model it names."""
    return value if isinstance(value, Model) else load_model(value)


def as_gpu(value: GpuOrName) -> Gpu:
    """Return `value` if it is a GPU. If it is a name or a file, return the GPU it names."""
    return value if isinstance(value, Gpu) else load_gpu(value)


def as_tokens(value: int | str, noun: str) -> int:
    """Return a number of tokens from an integer or a text such as `4k`, which is 4096.

    Args:
        value: The integer or text.
        noun: Name of the value in an error message, such as `context`.

    Raises:
        UserError: The text is not a number of tokens.
    """
    return parse_tokens(value, noun) if isinstance(value, str) else plain(value)


def of_kind(value: Value, noun: str, *kinds: type) -> Value:
    """Return the value unchanged if it has one of the allowed types, otherwise raise UserError.

    Args:
        value: The value.
        noun: Kind of value that is expected, for the message `VALUE is no NOUN`.
        kinds: The allowed types.

    Raises:
        UserError: The value has another type.
    """
    if not isinstance(value, kinds):
        raise UserError(f"{value!r:.80} is no {noun}")
    return value


READERS = {
    "model": as_model,
    "gpu": as_gpu,
    "context": lambda value: as_tokens(value, "context"),
    "batch_size": lambda value: as_tokens(value, "batch size"),
    "block_size": lambda value: as_tokens(value, "block size"),
    "batch": lambda value: of_kind(value, "Batch", Batch),
    "precision": lambda value: of_kind(value, "Precision", Precision),
    "parallelism": lambda value: of_kind(value, "Parallelism", Parallelism),
    "operators": _operators,
}


def accepts_names(function: Callable[..., Value]) -> Callable[..., Value]:
    """Return `function` so that callers may give names of models and GPUs instead of objects.

    The arguments `model` and `gpu` may be names or files. The arguments `context`, `batch_size` and
    `block_size` may be texts such as `4k`. The arguments `batch`, `precision`, `parallelism` and
    `operators` are only checked for their type.

    Args:
        function: Function whose arguments have some of these names. Other arguments are passed on.

    Raises:
        UserError: When the function is called, an argument has a wrong type or an unknown name.
    """
    signature = inspect.signature(function)

    @wraps(function)
    def run(*values: Any, **options: Any) -> Value:
        bound = signature.bind(*values, **options)
        for name in READERS.keys() & bound.arguments.keys():
            bound.arguments[name] = READERS[name](bound.arguments[name])
        return function(*bound.args, **bound.kwargs)

    return run


cache_size = accepts_names(memory.cache_size)
weight_bytes = accepts_names(memory.weight_bytes)
mha_ratio = accepts_names(memory.mha_ratio)
forward = accepts_names(forward_pass.forward)
total = accepts_names(forward_pass.total)
bounds = accepts_names(bounds_of_operators)
