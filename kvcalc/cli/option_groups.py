"""Groups of options that several commands share, and the models and GPUs that words name."""

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Annotated

import msgspec

from kvcalc.cli import options as o
from kvcalc.cli.options import (
    MAX_NAMES,
    Option,
    OptionGroup,
    check_number,
    emit,
    lengths,
    note,
    say,
)
from kvcalc.errors import UserError
from kvcalc.library.choices import ENGINE_NAMES, engine_choices, listed

if TYPE_CHECKING:
    from kvcalc.gpu.gpu import Gpu
    from kvcalc.layers.batch import Parallelism
    from kvcalc.library.choices import EngineChoice
    from kvcalc.model.model import Model
    from kvcalc.model.precision import Precision
    from kvcalc.report.charts.chart import Chart
    from kvcalc.report.export import Record
    from kvcalc.report.text.table_layout import Table
    from kvcalc.timing.deployment import TimedDeployment

AUTO_TP = (1, 2, 4, 8)  # sizes that `--tp auto` tries


def model_words(names: Sequence[str]) -> list[str]:
    """Return the items of lists of models. A file whose name has a comma is one item."""
    words = []
    for name in names:
        words += [name] if os.path.exists(name) else listed(name)  # noqa: PTH110
    return words


def chosen_models(names: Sequence[str], changes: list[str]) -> "list[Model]":
    """Return the models of words and lists, changed by `--set`."""
    words = model_words(names)
    check_number("models", MAX_NAMES, words)
    try:
        return _with_distinct_names([chosen_model(word, changes) for word in words], words)
    except UserError:
        if len(names) > 1 and (preset := _joined_name(names)):
            raise UserError(
                f"{' '.join(names)!r} are {len(names)} models",
                hint=f"Write {preset} for one",
            ) from None
        raise


def _with_distinct_names(models: "list[Model]", words: list[str]) -> "list[Model]":
    """Return the models; different ones that share a name get the words that were typed.

    Example: `a/m.json` and `b/m.json` are both called `m`, and answers are listed by name.
    """
    from msgspec.structs import replace

    from kvcalc.errors import printable

    plain = [replace(model, file="", notes=()) for model in models]
    shared = [any(m.name == other.name and m != other for other in plain) for m in plain]
    return [
        replace(model, name=printable(word, 80)) if is_shared else model
        for model, word, is_shared in zip(models, words, shared, strict=True)
    ]


def _joined_name(names: Sequence[str]) -> str:
    """Return the preset of a name with blanks, such as `llama 3 8b`; '' if there is none."""
    from kvcalc.library.load import locate

    try:
        place = locate("-".join(names), "models")
    except UserError:
        return ""
    return place.path.stem if place.preset else ""


def chosen_model(name: str, changes: list[str]) -> "Model":
    """Return the model called `name`, changed by `--set`."""
    from kvcalc.library.checkpoints import load_named
    from kvcalc.library.load import edited

    remaining = list(changes)
    model = load_named(name, remaining)  # takes the changes that an unknown type of file needs
    return edited(model, remaining)


def chosen_gpu(name: str, memory: str = "") -> "Gpu":
    """Return a GPU with the memory of `--memory`."""
    from kvcalc.library.load import load_gpu, with_memory

    preset = load_gpu(name.strip())
    gpu = with_memory(preset, memory)
    if memory and preset.usable_share and gpu.memory_bytes % 2**30:
        note(
            f"memory {memory} is {gpu.memory_bytes / 2**30:.2f} GiB; such machines are sold by GiB"
        )
    return gpu


def gpu_words(names: str) -> list[str]:
    """Return the items of a list of GPUs; `all` is every preset."""
    from kvcalc.library.load import all_gpus

    words = []
    for name in names.split(","):
        word = name.strip()
        words += [gpu.name for gpu in all_gpus()] if word.lower() == "all" else [word]
    return words


def chosen_gpus(names: str, memory: str = "") -> "list[Gpu]":
    """Return the GPUs of a comma-separated list."""
    words = gpu_words(names)
    check_number("GPUs", MAX_NAMES, words)
    return [chosen_gpu(name, memory) for name in words]


def timed_gpus(names: str, memory: str = "") -> "list[Gpu]":
    """Return the GPUs to predict times for. `all` leaves out GPUs without a matrix peak."""
    gpus = chosen_gpus(names, memory)
    return [gpu for gpu in gpus if gpu.knee] if names.strip().lower() == "all" else gpus


class ContextOptions(OptionGroup, frozen=True):
    """Contexts and batch sizes. In records, the context changes fastest."""

    context: Annotated[
        str,
        Option(
            "Cached tokens per sequence: 4096, 4k or 1k,8k,128k",
            takes="TOKENS",
            is_common=True,
            called=o.CONTEXT_WORDS + " " + o.PROMPT_WORDS,
        ),
    ] = "4096"
    batch_size: o.BatchSizes = "1"

    @property
    def contexts(self) -> list[int]:
        return lengths(self.context, "context")

    @property
    def batches(self) -> list[int]:
        return lengths(self.batch_size, "batch size")


class Precisions(OptionGroup, frozen=True):
    """Data types of weights, compute and cache. Each is a list."""

    dtype: o.Dtype = "auto"
    kv_cache_dtype: o.CacheDtype = "auto"
    quantization: o.Quantization = ""

    def precisions(self) -> "list[Precision]":
        """Return every combination. The data type of the cache changes fastest."""
        from kvcalc.model.precision import Precision

        words = (listed(text) for text in (self.dtype, self.quantization, self.kv_cache_dtype))
        return [Precision(dtype, cache, stored) for dtype, stored, cache in product(*words)]


_ranks = partial(Option, panel="Parallelism")


class Ranks(OptionGroup, frozen=True):
    """Sizes of parallelism. Tensor parallelism is a list."""

    tp: Annotated[
        str,
        Option(
            "GPUs for tensor parallelism; a list, or auto",
            "--tensor-parallel-size --tp -tp",
            takes="N",
            is_common=True,
            called="gpus num-gpus n-gpus ngpus devices num-devices tensor-parallel",
        ),
    ] = "1"
    pp: Annotated[
        int,
        _ranks("GPUs for pipeline parallelism", "--pipeline-parallel-size --pp -pp"),
    ] = 1
    dp: Annotated[
        int, _ranks("Groups for data parallelism", "--data-parallel-size --dp -dp")
    ] = 1
    ep: Annotated[int, _ranks("GPUs for expert parallelism", "--expert-parallel-size --ep")] = 1
    enable_expert_parallel: Annotated[
        bool, _ranks("Spread the experts over all tensor and data parallel GPUs")
    ] = False
    dcp: Annotated[
        int,
        _ranks(
            "GPUs for decode context parallelism",
            "--decode-context-parallel-size --dcp -dcp",
        ),
    ] = 1

    def parallelisms(self, models: "Sequence[Model]") -> "list[Parallelism]":
        """Return each size of tensor parallelism; of `auto` the sizes that divide all models."""
        from kvcalc.model.pipeline import check

        words = listed(self.tp, "tp")
        sizes = [
            self._with_tp(_number_of_gpus(word)) for word in words if word.lower() != "auto"
        ]
        if len(sizes) < len(words):
            for tp in AUTO_TP:
                parallelism = self._with_tp(tp)
                with suppress(UserError):
                    for model in models:
                        check(model, parallelism)
                    sizes.append(parallelism)
        return sizes

    def _with_tp(self, tp: int) -> "Parallelism":
        from kvcalc.layers.batch import Parallelism

        ep = self.ep
        if self.enable_expert_parallel:
            if ep > 1:
                raise UserError("use either --enable-expert-parallel or --expert-parallel-size")
            ep = tp * self.dp
        return Parallelism(tp, self.pp, self.dp, ep, self.dcp)


def _number_of_gpus(word: str) -> int:
    try:
        return int(word)
    except ValueError:
        hint = "Write a whole number from 1 up, or auto"
        raise UserError(f"tp {word!r} is not a number of GPUs", hint=hint) from None


_engine = partial(Option, panel="Engine")


class EngineOption(OptionGroup, frozen=True, kw_only=True):
    """The engine, which decides memory and times."""

    engine: Annotated[
        str,
        Option(
            f"Engine: {', '.join(ENGINE_NAMES)}",
            takes="NAME",
            panel="Engine",
            is_common=True,
            words=ENGINE_NAMES,
            called="backend framework",
        ),
    ] = "vllm"
    engine_version: Annotated[
        str, _engine("Version of the engine: 0.11, 0.11.2 or latest", takes="VERSION")
    ] = ""


class TimedEngine(EngineOption, frozen=True, kw_only=True):
    """The engine, and the source of times if it is not the engine's own calibration."""

    bounds: Annotated[bool, _engine("Answer with datasheet bounds instead of predictions")] = (
        False
    )
    calibration: Annotated[
        str,
        _engine("Your own calibration of times", takes="NAME|FILE", words=o.stack_names),
    ] = ""
    calibration_from: Annotated[
        str,
        _engine(
            "Scale another GPU's calibration by datasheets",
            takes="GPU",
            words=o.gpu_names,
        ),
    ] = ""
    mixed: Annotated[bool, Option(is_hidden=True)] = False  # without effect
    stack: Annotated[str, Option(is_hidden=True)] = ""

    def choices(self) -> "list[EngineChoice]":
        """Return each engine and calibration of the lists."""
        return engine_choices(self.engine, self.calibration, self.bounds, self.stack)


class Deploying(TimedEngine, frozen=True, kw_only=True):
    """How a model is deployed and how its times are predicted."""

    precisions: Precisions
    mla_form: Annotated[
        str,
        Option(
            "Form of latent attention: auto, absorbed or expanded",
            panel="Engine",
            words=("auto", "absorbed", "expanded"),
        ),
    ] = "auto"
    memory: o.Memory = ""
    nodes: o.Nodes = 0
    inter_node_bandwidth: o.NodeBandwidth = ""
    set_: o.Settings = []
    ranks: Ranks

    def of(self, model: "Model") -> "list[TimedDeployment]":
        """Return deployments of layers without a model. No figure depends on the GPU."""
        from kvcalc.library.load import load_gpu
        from kvcalc.timing.deployment import TimedDeployment

        combinations = product(self.precisions.precisions(), self.ranks.parallelisms([model]))
        return [
            TimedDeployment(model, load_gpu("h100"), precision, parallelism, self.mla_form)
            for precision, parallelism in combinations
        ]

    def deployments(self, models: Sequence[str], gpu: str) -> "list[TimedDeployment]":
        """Return each model on each GPU, with every item of the lists."""
        from kvcalc.library.load import with_rate_between
        from kvcalc.timing.deployment import TimedDeployment

        selected = chosen_models(models, self.set_)
        precisions = self.precisions.precisions()
        parallelisms = self.ranks.parallelisms(selected)
        gpus = [
            with_rate_between(one, self.inter_node_bandwidth)
            for one in timed_gpus(gpu, self.memory)
        ]
        deployments = []
        for model, one, precision, parallelism, choice in product(
            selected, gpus, precisions, parallelisms, self.choices()
        ):
            deployment = TimedDeployment(
                model,
                one,
                precision,
                parallelism,
                mla_form=self.mla_form,
                nodes=self.nodes,
                engine=choice.engine,
                engine_version=self.engine_version,
            )
            deployments.append(deployment.under(choice.calibration, self.calibration_from))
        return deployments


class Printing(OptionGroup, frozen=True):
    """How records are printed."""

    form: Annotated[
        o.OutputFormat,
        Option(
            "Format of the output",
            "--format",
            panel="Output",
            is_common=True,
            called="json csv markdown md",
        ),
    ] = o.OutputFormat.table
    wide: Annotated[
        bool,
        Option("Show all columns of the table", panel="Output", called="details all"),
    ] = False
    verbose: Annotated[
        bool, Option("Print all notes under the table", "--verbose -v", panel="Output")
    ] = False
    units: Annotated[
        o.ByteUnits,
        Option("Units of bytes: GiB (2^30), GB (10^9) or exact bytes", panel="Output"),
    ] = o.ByteUnits.gib
    explain: o.Explain = False

    @property
    def tells(self) -> bool:
        """Whether a table is printed, under its sentence."""
        return self.form in (o.OutputFormat.table, o.OutputFormat.markdown)

    def printed(self, records: "Iterable[Record]") -> bool:
        """Print records as JSON or CSV. Return False for tables and formulas."""
        return not self.explain and emit(records, self.form)

    def show(self, *tables: "Table") -> None:
        """Print tables, Markdown, or the formulas of the figures."""
        from kvcalc.report.text.tables import show

        if self.explain:
            from kvcalc.report.explain import explained

            say("\n".join(map(explained, tables)))
            return
        show(
            *(
                msgspec.structs.replace(table, wide=self.wide, verbose=self.verbose)
                for table in tables
            ),
            as_markdown=self.form is o.OutputFormat.markdown,
        )


class Output(Printing, frozen=True):
    """How records are printed and drawn."""

    plot: o.Plot = ""
    style: o.Style = "light"

    def __post_init__(self) -> None:
        if self.style != "light" and not self.plot:
            raise UserError(f"style {self.style!r} needs a picture", hint="Add --plot FILE")

    def picture(self, *charts: "Chart") -> None:
        """Save charts beside each other as one picture, or draw it in the terminal."""
        from kvcalc.report.charts.chart import joined
        from kvcalc.report.charts.drawing import save

        save(joined(charts), self.plot, self.style)

    def printed(self, records: "Iterable[Record]") -> bool:
        """Print records as JSON or CSV. A picture in the terminal replaces a table."""
        return not self.explain and (emit(records, self.form) or self.plot == "-")
