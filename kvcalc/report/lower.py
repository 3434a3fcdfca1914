"""The lower level of the Python API: a pass, its cache and its roof, with names where objects are, and clear refusals."""

from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

from kvcalc.errors import UserError
from kvcalc.gpu import roof
from kvcalc.gpu.roof import Placed
from kvcalc.gpu.spec import Gpu
from kvcalc.layers.batch import Batch
from kvcalc.layers.cost import Cost, Operator
from kvcalc.layers.ranks import ONE_GPU, Parallelism
from kvcalc.library import load
from kvcalc.library.named import load_named
from kvcalc.model import memory, operators
from kvcalc.model.memory import CacheSize
from kvcalc.model.operators import total as sum_of
from kvcalc.model.precision import PUBLISHED, Precision
from kvcalc.model.spec import Model
from kvcalc.units import parse_tokens, plain

Value = TypeVar("Value")
ModelOrName = Model | str | Path
GpuOrName = Gpu | str | Path


def load_model(name: str | Path) -> Model:
    """The model that a name stands for: a preset, a YAML or GGUF file, a config.json or its folder, `hf:org/name`.

    Raises UserError naming near matches, or the file, line and key that cannot be read.
    """
    return load_named(str(of_kind(name, "name of a model", str, Path)))


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
    """Bytes of the cache on the GPU that holds the most weights and cache: stored, read by a decode step, allocated, fixed, and
    the slope. Another pipeline stage may hold more of the cache, and less in all.

    context: tokens of each of batch_size sequences, a number or a word (`128k`). precision: its formats; block_size: tokens of
    a block, of which whole ones are allocated; parallelism: how GPUs share it. Raises UserError naming near matches.
    """
    how = (
        of_kind(precision, "Precision", Precision),
        as_tokens(block_size, "block size"),
        of_kind(parallelism, "Parallelism", Parallelism),
    )
    return memory.cache_size(as_model(model), as_tokens(context, "context"), as_tokens(batch_size, "batch size"), *how)


def weight_bytes(
    model: ModelOrName,
    precision: Precision = PUBLISHED,
    parallelism: Parallelism = ONE_GPU,
    context: int | str = 1,
    batch_size: int | str = 1,
) -> int:
    """Bytes of the weights on the fullest GPU, as they are stored, scales of quantised matrices among them.

    context, batch_size: tell which pipeline stage is the fullest, where there are several. Raises UserError.
    """
    how = of_kind(precision, "Precision", Precision), of_kind(parallelism, "Parallelism", Parallelism)
    return memory.weight_bytes(as_model(model), *how, as_tokens(context, "context"), as_tokens(batch_size, "batch size"))


def mha_ratio(model: ModelOrName, context: int | str, precision: Precision = PUBLISHED) -> float | None:
    """How many times as much plain multi-head attention would keep at this context; None where nothing attends."""
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
    """The operators of one pass on one GPU: the distinct layers once each, with how often they run (`count`).

    batch: `Batch.decode(context, batch_size)`, `Batch.prefill(…)` or a mixed one; arrays in it make arrays of every figure.
    mla_form: of latent attention, auto, absorbed or expanded. all_positions: the LM head sees every token, not the last
    alone. stage: a pipeline stage from 0; by default the fullest. Raises UserError on ranks that do not divide the model.
    """
    how = of_kind(precision, "Precision", Precision), of_kind(parallelism, "Parallelism", Parallelism)
    return operators.forward(as_model(model), of_kind(batch, "Batch", Batch), *how, mla_form, all_positions, stage)


def roofline(operators: Iterable[Operator], gpu: GpuOrName, memory_alone: bool = False) -> list[Placed]:
    """Each operator under the roof of a GPU: its `operator`, `seconds` of all its runs at least, `bound`, and `intensity`.

    memory_alone: by bytes alone, for a GPU without matrix peaks. Raises UserError where the GPU has no unit for a dtype that
    is needed.
    """
    return roof.roofline(_operators(operators), as_gpu(gpu), memory_alone)


def total(operators: Iterable[Operator]) -> Cost:
    """The cost of a pass: FLOPs and bytes of all its operators, as often as each runs."""
    return sum_of(_operators(operators))


def _operators(given: Iterable[Operator]) -> list[Operator]:
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise UserError(f"{given!r:.80} is no pass", hint="Give the operators that `forward` returns")
    return [of_kind(one, "Operator", Operator) for one in given]


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
    if isinstance(given, str):
        return parse_tokens(given, what)
    number: int = plain(given)
    return number


def of_kind(given: Value, what: str, *kinds: type) -> Value:
    """What is given, where it is of one of the kinds. Raises UserError where it is not."""
    if not isinstance(given, kinds):
        raise UserError(f"{given!r:.80} is no {what}")
    return given
