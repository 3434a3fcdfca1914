"""Options that stand together, declared once: a command takes a group as one parameter, and shows it as its options."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from kvcalc.cli import options as o
from kvcalc.cli.chosen import chosen_models, listed, timed_gpus
from kvcalc.cli.common import emit, lengths, say
from kvcalc.units import bytes_shown_in

if TYPE_CHECKING:
    from kvcalc.layers.ranks import Parallelism
    from kvcalc.library.engine_choice import EngineChoice
    from kvcalc.model.precision import Precision
    from kvcalc.model.spec import Model
    from kvcalc.report.chart import Chart
    from kvcalc.report.export import Record
    from kvcalc.report.layout import Table
    from kvcalc.timing.deployment import Deployment

Value = TypeVar("Value")
AUTO = (1, 2, 4, 8)  # what `--tp auto` tries


class Group(msgspec.Struct, frozen=True):
    """Its fields are options, as a command's parameters are, or groups of them."""


def grouped(run: Callable[..., Value]) -> Callable[..., Value]:
    """The command `run` with each of its groups written out, in the group's place, as the options that it holds."""
    parameters = list(inspect.signature(run).parameters.values())

    def command(**values: Any) -> Value:
        with bytes_shown_in(values.get("units", o.ByteUnits.gib)):
            return run(**_gathered(parameters, values))

    flat = list(_written_out(parameters))
    command.__signature__ = inspect.Signature(flat)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in flat}
    command.__name__, command.__doc__ = run.__name__, run.__doc__
    command.__wrapped__ = run  # type: ignore[attr-defined]
    return command


def arguments_of(name: str, words: Sequence[str]) -> dict[str, Any]:
    """What a command would be called with, for words that are typed behind its name. Raises UserError as its parser does."""
    from importlib import import_module

    from typer.main import get_command

    from kvcalc.cli.commands import build
    from kvcalc.cli.unknown import said_of
    from kvcalc.errors import UserError

    group: Any = get_command(build(name))
    try:
        context = group.commands[name].make_context(name, list(words), resilient_parsing=False)
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        raise UserError(said_of(error, name)) from None
    run = import_module(f"kvcalc.cli.{name}").run
    return _gathered(list(inspect.signature(run.__wrapped__).parameters.values()), context.params)


def _is_group(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Group)


def _fields(group: type[Group]) -> Iterable[inspect.Parameter]:
    for field in msgspec.structs.fields(group):
        default = [] if field.default_factory is list else inspect.Parameter.empty if field.required else field.default
        yield inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=field.type)


def _written_out(parameters: Iterable[inspect.Parameter]) -> Iterable[inspect.Parameter]:
    for parameter in parameters:
        if _is_group(parameter.annotation):
            yield from _written_out(_fields(parameter.annotation))
        else:
            yield parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)


def _gathered(parameters: Iterable[inspect.Parameter], values: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that `parameters` stand for, groups built again from the values of their options."""
    return {
        p.name: p.annotation(**_gathered(_fields(p.annotation), values)) if _is_group(p.annotation) else values[p.name]
        for p in parameters
    }


class Grid(Group, frozen=True):
    """Contexts and batch sizes; records run over contexts fastest."""

    context: o.Contexts = "4096"
    batch_size: o.Batches = "1"

    @property
    def contexts(self) -> list[int]:
        return lengths(self.context, "context")

    @property
    def batches(self) -> list[int]:
        return lengths(self.batch_size, "batch size")


class Precisions(Group, frozen=True):
    """How a model is stored and computed; each a list, whose items make more rows."""

    dtype: o.Dtype = "auto"
    kv_cache_dtype: o.CacheDtype = "auto"
    quantization: o.Quant = ""

    def precisions(self) -> "list[Precision]":
        """Every combination, the cache's dtype fastest."""
        from kvcalc.model.precision import Precision

        words = (listed(text) for text in (self.dtype, self.quantization, self.kv_cache_dtype))
        return [Precision(dtype, cache, stored) for dtype, stored, cache in product(*words)]


class FurtherRanks(Group, frozen=True):
    """GPUs beside those of tensor parallelism."""

    pp: o.Pp = 1
    dp: o.Dp = 1
    ep: o.Ep = 1
    enable_expert_parallel: o.ExpertParallel = False
    dcp: o.Dcp = 1

    def beside(self, tp: int) -> "Parallelism":
        """The ranks of a replica; `--enable-expert-parallel` spreads the experts over all tp·dp GPUs."""
        from kvcalc.errors import UserError
        from kvcalc.layers.ranks import Parallelism

        if self.enable_expert_parallel and self.ep > 1:
            raise UserError("--enable-expert-parallel and --expert-parallel-size exclude each other")
        return Parallelism(tp, self.pp, self.dp, tp * self.dp if self.enable_expert_parallel else self.ep, self.dcp)


class Ranks(Group, frozen=True, kw_only=True):
    """GPUs by what they share; tensor parallelism is a list, whose sizes make more rows."""

    tp: o.Tp = "1"
    further: FurtherRanks

    def parallelisms(self, models: "Sequence[Model]") -> "list[Parallelism]":
        """Each size of the list; `auto`: every one of AUTO that all these models divide into."""
        words = listed(self.tp, "tp")
        fixed = [self.further.beside(_gpus(word)) for word in words if word.lower() != "auto"]
        return fixed if len(fixed) == len(words) else [*fixed, *self._dividing(models)]

    def _dividing(self, models: "Sequence[Model]") -> "list[Parallelism]":
        from kvcalc.errors import UserError
        from kvcalc.model.pipeline import check

        found = []
        for tp in AUTO:
            ranks = self.further.beside(tp)
            with suppress(UserError):
                for model in models:
                    check(model, ranks)
                found.append(ranks)
        return found


def _gpus(word: str) -> int:
    from kvcalc.errors import UserError

    try:
        return int(word)
    except ValueError:
        raise UserError(f"tp {word!r} is not a number of GPUs", hint="Give a whole number from 1 up, or auto") from None


class EngineOption(Group, frozen=True, kw_only=True):
    """The engine, which decides memory and times."""

    engine: o.Engine = "vllm"
    engine_version: o.EngineVersion = ""


class TimedEngine(EngineOption, frozen=True, kw_only=True):
    """The engine, and the source of times if it is not the engine's own calibration."""

    bounds: o.Bounds = False
    calibration: o.Calibration = ""
    calibration_from: o.CalibrationFrom = ""
    mixed: o.Mixed = False
    stack: o.Stack = ""

    def choices(self) -> "list[EngineChoice]":
        """Return each engine and calibration of the lists."""
        from kvcalc.library.engine_choice import engine_choices

        return engine_choices(self.engine, self.calibration, self.bounds, self.stack)


class Deploying(TimedEngine, frozen=True, kw_only=True):
    """How a model is run, and what its times rest on."""

    precisions: Precisions
    mla_form: o.MlaForm = "auto"
    memory: o.Memory = ""
    nodes: o.Nodes = 0
    inter_node_bandwidth: o.InterNode = ""
    set_: o.Sets = []
    ranks: Ranks

    def of(self, model: "Model") -> "list[Deployment]":
        """Layers whose dimensions alone are known, in every format and cut of the lists: what they keep is of no GPU."""
        from kvcalc.library.load import load_gpu
        from kvcalc.timing.deployment import Deployment

        how = product(self.precisions.precisions(), self.ranks.parallelisms([model]))
        return [Deployment(model, load_gpu("h100"), precision, ranks, self.mla_form) for precision, ranks in how]

    def deployments(self, models: Sequence[str], gpu: str) -> "list[Deployment]":
        """Each model on each GPU, in every format, cut and engine of the lists."""
        from kvcalc.library.load import with_rate_between
        from kvcalc.timing.deployment import Deployment

        chosen = chosen_models(models, self.set_)
        how = self.precisions.precisions(), self.ranks.parallelisms(chosen)
        cards = timed_gpus(gpu, self.memory)
        gpus = [with_rate_between(card, self.inter_node_bandwidth) for card in cards]
        run = partial(Deployment, mla_form=self.mla_form, nodes=self.nodes, engine_version=self.engine_version)
        return [
            run(m, card, p, r, engine=engine).under(calibration, self.calibration_from)
            for m, card, p, r, (engine, calibration) in product(chosen, gpus, *how, self.choices())
        ]


class Printing(Group, frozen=True):
    """How records are printed."""

    form: o.PrintedAs = o.OutputFormat.table
    wide: o.Wide = False
    units: o.Units = o.ByteUnits.gib
    explain: o.Explain = False

    @property
    def tells(self) -> bool:
        """Whether a table is printed, under its sentence."""
        return self.form in (o.OutputFormat.table, o.OutputFormat.markdown)

    def printed(self, records: "Iterable[Record]") -> bool:
        """Print records in the format asked for; False where that is a table, or formulas are."""
        return not self.explain and emit(records, self.form)

    def show(self, *tables: "Table") -> None:
        """Print tables, or what they hold as Markdown, or the formulas of their figures."""
        from kvcalc.report.tables import show

        if self.explain:
            from kvcalc.report.formulas import explained

            say("\n".join(map(explained, tables)))
            return
        show(*(msgspec.structs.replace(t, wide=self.wide) for t in tables), as_markdown=self.form is o.OutputFormat.markdown)


class Output(Printing, frozen=True):
    """A picture, and how records are printed."""

    plot: o.Plot = ""
    style: o.Style = "light"

    def __post_init__(self) -> None:
        if self.style != "light" and not self.plot:
            from kvcalc.errors import UserError

            raise UserError(f"style {self.style!r} is of a picture, and none is asked for", hint="Add --plot FILE")

    def picture(self, *charts: "Chart") -> None:
        """Save a picture of charts beside each other, or draw it in the terminal."""
        from kvcalc.report.chart import joined
        from kvcalc.report.plots import save

        save(joined(charts), self.plot, self.style)

    def printed(self, records: "Iterable[Record]") -> bool:
        """As any records; a picture in the terminal stands for a table."""
        return not self.explain and (emit(records, self.form) or self.plot == "-")
