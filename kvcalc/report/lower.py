"""The lower level of the Python API: a pass, its cache and its roof, with names where objects are, and clear refusals."""

from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

from kvcalc.errors import UserError
from kvcalc.gpu import roof
from kvcalc.gpu.roof import Placed
from kvcalc.gpu.spec import Gpu
from kvcalc.layers.batch import Batch
from kvcalc.layers.cost import Operator
from kvcalc.layers.ranks import ONE_GPU, Parallelism
from kvcalc.library import load
from kvcalc.model import memory, operators
from kvcalc.model.memory import CacheSize
from kvcalc.model.precision import PUBLISHED, Precision
from kvcalc.model.spec import Model
from kvcalc.units import parse_tokens

Value = TypeVar("Value")
ModelOrName = Model | str | Path
GpuOrName = Gpu | str | Path


def load_model(name: str | Path) -> Model:
    """The model that a name stands for: a preset, a YAML or GGUF file, a config.json or its folder, `hf:org/name`.

    Raises UserError naming near matches, or the file, line and key that cannot be read.
    """
    return load.load_model(str(of_kind(name, "name of a model", str, Path)))


def load_gpu(name: str | Path) -> Gpu:
    """The GPU that a name stands for: a preset, an alias of one, or a YAML file. Raises UserError naming near matches."""
    return load.load_gpu(str(of_kind(name, "name of a GPU", str, Path)))


def cache_size(
    model: ModelOrName,
    context: int | str,
    batch_size: int | str = 1,
    precision: Precision = PUBLISHED,
    block_size: int = 16,
    parallelism: Parallelism = ONE_GPU,
) -> CacheSize:
    """Bytes of the cache on the GPU that holds the most of it: stored, read by a decode step, allocated, fixed, and the slope."""
    how = of_kind(precision, "Precision", Precision), block_size, of_kind(parallelism, "Parallelism", Parallelism)
    return memory.cache_size(as_model(model), as_tokens(context, "context"), as_tokens(batch_size, "batch size"), *how)


def weight_bytes(
    model: ModelOrName,
    precision: Precision = PUBLISHED,
    parallelism: Parallelism = ONE_GPU,
    context: int | str = 1,
    batch_size: int | str = 1,
) -> int:
    """Bytes of the weights on the fullest GPU."""
    how = of_kind(precision, "Precision", Precision), of_kind(parallelism, "Parallelism", Parallelism)
    return memory.weight_bytes(as_model(model), *how, as_tokens(context, "context"), as_tokens(batch_size, "batch size"))


def mha_ratio(model: ModelOrName, context: int | str, precision: Precision = PUBLISHED) -> float | None:
    """How many times as much plain multi-head attention would keep; None where nothing attends."""
    return memory.mha_ratio(as_model(model), as_tokens(context, "context"), of_kind(precision, "Precision", Precision))


def forward(
    model: ModelOrName,
    batch: Batch,
    precision: Precision = PUBLISHED,
    parallelism: Parallelism = ONE_GPU,
    mla_form: str = "auto",
    all_positions: bool = False,
    stage: int | None = None,
) -> tuple[Operator, ...]:
    """The operators of one pass on one GPU: the distinct layers once each, with how often they run.

    stage: a pipeline stage; by default the fullest. Raises UserError on ranks that do not divide the model.
    """
    how = of_kind(precision, "Precision", Precision), of_kind(parallelism, "Parallelism", Parallelism)
    return operators.forward(as_model(model), of_kind(batch, "Batch", Batch), *how, mla_form, all_positions, stage)


def roofline(operators: Iterable[Operator], gpu: GpuOrName, memory_alone: bool = False) -> list[Placed]:
    """Each operator under the roof of a GPU. Raises UserError where the GPU has no unit for a dtype that is needed."""
    return roof.roofline([of_kind(o, "Operator", Operator) for o in operators], as_gpu(gpu), memory_alone)


def as_model(given: ModelOrName) -> Model:
    """A model, or the one that a name stands for."""
    return given if isinstance(given, Model) else load_model(_name(given, "model"))


def as_gpu(given: GpuOrName) -> Gpu:
    """A GPU, or the one that a name stands for."""
    return given if isinstance(given, Gpu) else load_gpu(_name(given, "GPU"))


def _name(given: object, what: str) -> str:
    if isinstance(given, str | Path):
        return str(given)
    raise UserError(f"{type(given).__name__} is no {what}", hint=f"Give a {what}, or the name of one")


def as_tokens(given: int | str, what: str) -> int:
    """A number, or one as people type it."""
    return parse_tokens(given, what) if isinstance(given, str) else given


def of_kind(given: Value, what: str, *kinds: type) -> Value:
    """What is given, where it is of one of the kinds. Raises UserError where it is not."""
    if not isinstance(given, kinds):
        raise UserError(f"{given!r:.80} is no {what}")
    return given
