"""The lower level of the Python API: a pass, its cache and its bounds, with names or objects."""

from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

from kvcalc.errors import UserError
from kvcalc.gpu import roof
from kvcalc.gpu.gpu import Gpu
from kvcalc.gpu.roof import Placed
from kvcalc.layers.batch import ONE_GPU, Batch, Parallelism
from kvcalc.layers.cost import Cost, Operator
from kvcalc.library import load
from kvcalc.library.checkpoints import load_named
from kvcalc.model import forward_pass, memory
from kvcalc.model.memory import CacheSize
from kvcalc.model.model import Model
from kvcalc.model.precision import PUBLISHED, Precision
from kvcalc.units import parse_tokens, plain

Value = TypeVar("Value")
ModelOrName = Model | str | Path
GpuOrName = Gpu | str | Path


def load_model(name: str | Path) -> Model:
    """Return a model by preset name, YAML or GGUF file, config.json or its folder, or
    `hf:org/name`.

    Raises:
        UserError: The name is unknown, or the file cannot be read.
    """
    return load_named(str(of_kind(name, "name of a model", str, Path)))


def load_gpu(name: str | Path) -> Gpu:
    """Return a GPU by preset name, alias or YAML file.

    Raises:
        UserError: The name is unknown, or the file cannot be read.
    """
    return load.load_gpu(str(of_kind(name, "name of a GPU", str, Path)))


def cache_size(
    model: ModelOrName,
    context: int | str,
    batch_size: int | str = 1,
    precision: Precision = PUBLISHED,
    block_size: int = 16,
    parallelism: Parallelism = ONE_GPU,
) -> CacheSize:
    """Return bytes of the KV cache: stored, read by a decode step, allocated, fixed and slope.

    The bytes are those of the GPU with the most weights and cache. With pipeline stages, another
    GPU may store more cache, but less in total.

    Args:
        context: Tokens per sequence, such as 4096 or `128k`.
        block_size: Tokens per block. Allocation is in whole blocks.
    """
    return memory.cache_size(
        as_model(model),
        as_tokens(context, "context"),
        as_tokens(batch_size, "batch size"),
        of_kind(precision, "Precision", Precision),
        as_tokens(block_size, "block size"),
        of_kind(parallelism, "Parallelism", Parallelism),
    )


def weight_bytes(
    model: ModelOrName,
    precision: Precision = PUBLISHED,
    parallelism: Parallelism = ONE_GPU,
    context: int | str = 1,
    batch_size: int | str = 1,
) -> int:
    """Return bytes of the weights on the fullest GPU, with the scales of quantized matrices.

    With pipeline stages, context and batch_size decide which GPU is the fullest.
    """
    return memory.weight_bytes(
        as_model(model),
        of_kind(precision, "Precision", Precision),
        of_kind(parallelism, "Parallelism", Parallelism),
        as_tokens(context, "context"),
        as_tokens(batch_size, "batch size"),
    )


def mha_ratio(
    model: ModelOrName, context: int | str, precision: Precision = PUBLISHED
) -> float | None:
    """Return bytes of the equivalent MHA model ÷ bytes of this model; None without attention."""
    precision = of_kind(precision, "Precision", Precision)
    return memory.mha_ratio(as_model(model), as_tokens(context, "context"), precision)


def forward(
    model: ModelOrName,
    batch: Batch,
    precision: Precision = PUBLISHED,
    parallelism: Parallelism = ONE_GPU,
    mla_form: str = "auto",
    all_positions: bool = False,
    stage: int | None = None,
) -> tuple[Operator, ...]:
    """Return the operators of one pass on one GPU. Equal layers are one operator with a `count`.

    Args:
        batch: `Batch.decode(context, batch_size)`, `Batch.prefill(…)` or a mixed pass. Arrays in
            it make each figure an array.
        mla_form: Form of latent attention: auto, absorbed or expanded.
        all_positions: Whether the LM head computes every token, not only the last.
        stage: Pipeline stage from 0; the fullest by default.
    """
    return forward_pass.forward(
        as_model(model),
        of_kind(batch, "Batch", Batch),
        of_kind(precision, "Precision", Precision),
        of_kind(parallelism, "Parallelism", Parallelism),
        mla_form,
        all_positions,
        stage,
    )


def bounds(
    operators: Iterable[Operator], gpu: GpuOrName, memory_alone: bool = False
) -> list[Placed]:
    """Return the datasheet bound of each operator: `seconds`, `bound` and `intensity`.

    Args:
        memory_alone: Whether only bytes count, for a GPU without matrix peaks.

    Raises:
        UserError: The GPU has no unit for a data type.
    """
    return roof.roofline(_operators(operators), as_gpu(gpu), memory_alone)


def total(operators: Iterable[Operator]) -> Cost:
    """Return the cost of a pass: FLOPs and bytes of all operators times their counts."""
    return forward_pass.total(_operators(operators))


def _operators(values: Iterable[Operator]) -> list[Operator]:
    if isinstance(values, str) or not isinstance(values, Iterable):
        hint = "Give the operators that `forward` returns"
        raise UserError(f"{values!r:.80} is no pass", hint=hint)
    return [of_kind(value, "Operator", Operator) for value in values]


def as_model(value: ModelOrName) -> Model:
    """Return a model, or the model of a name."""
    return value if isinstance(value, Model) else load_model(_name(value, "model"))


def as_gpu(value: GpuOrName) -> Gpu:
    """Return a GPU, or the GPU of a name."""
    return value if isinstance(value, Gpu) else load_gpu(_name(value, "GPU"))


def _name(value: str | Path, noun: str) -> str:
    if not isinstance(value, str | Path):
        hint = f"Give a {noun}, or the name of one"
        raise UserError(f"{type(value).__name__} is no {noun}", hint=hint)
    return str(value)


def as_tokens(value: int | str, noun: str) -> int:
    """Return a number of tokens from an int or a text such as `4k`."""
    number: int = parse_tokens(value, noun) if isinstance(value, str) else plain(value)
    return number


def of_kind(value: Value, noun: str, *kinds: type) -> Value:
    """Return the value. Raise UserError if it has none of the types."""
    if not isinstance(value, kinds):
        raise UserError(f"{value!r:.80} is no {noun}")
    return value
