"""A deployment whose readings are methods, for notebooks and scripts: what the commands answer, under their JSON keys."""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from kvcalc.errors import UserError, nearest
from kvcalc.gpu.spec import Gpu
from kvcalc.layers.ranks import Parallelism
from kvcalc.library.load import with_memory, with_rate_between
from kvcalc.library.words import check_known, from_words
from kvcalc.model.operators import MLA_FORMS
from kvcalc.model.precision import Precision
from kvcalc.model.spec import Model
from kvcalc.report.chart import Chart
from kvcalc.report.layout import Table
from kvcalc.report.lower import as_gpu, as_model, of_kind
from kvcalc.timing import deployment
from kvcalc.units import parse_tokens

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The fields of `CacheSize`, by the keys of `size`.
CACHE_SIZE = {
    "stored": "kv_cache_bytes",
    "read": "kv_cache_read_bytes",
    "allocated": "kv_cache_allocated_bytes",
    "fixed": "fixed_bytes",
    "slope": "bytes_per_token",
}


class Answer(msgspec.Struct, frozen=True, eq=False):
    """What a command answers. Attributes are the JSON keys of its chief record; printed, it is the command's table.

    The chief record is the first, of a pass its total. short: other names of keys.
    """

    _records: Sequence[dict[str, Any]]
    _tables: Callable[[], Sequence[Table]]
    _chart: Callable[[], Chart]
    _chief: int = 0
    _short: Mapping[str, str] = {}

    def records(self) -> list[dict[str, Any]]:
        """All records, flat, as `--format json` prints them."""
        return deepcopy(list(self._records))

    def plot(self, style: str = "light") -> "Figure":
        """The command's picture as a matplotlib figure; style: light, dark or slides. Raises UserError on another."""
        from kvcalc.report.plots import figure_of

        found: Figure = figure_of(self._chart(), style)
        return found

    def _repr_html_(self) -> str:
        from kvcalc.report.html import table_html

        return "".join(map(table_html, self._tables()))

    def __getattr__(self, name: str) -> Any:
        chief = self._records[self._chief]
        try:
            return chief[self._short.get(name, name)]
        except KeyError:
            raise AttributeError(f"no figure {name!r}. {nearest(name, [*chief, *self._short])}".rstrip()) from None

    def __dir__(self) -> list[str]:
        return ["records", "plot", *self._short, *self._records[self._chief]]

    def __repr__(self) -> str:
        return "".join(map(str, self._tables())).rstrip("\n")


class Deployment(deployment.Deployment, frozen=True):
    """A model on GPUs, as it is run. Each reading is the command of its name, and raises UserError as that refuses."""

    def size(self, context: int | str = 4096, batch_size: int | str = 1, block_size: int = 16) -> Answer:
        """How big is the cache: also `stored`, `read`, `allocated` bytes of a GPU, `fixed` and `slope` of one sequence."""
        from kvcalc.model.size import size_record
        from kvcalc.report.figures import cache_vs_context
        from kvcalc.report.sizes import size_table

        last = max(_context(context), 1024)
        record = size_record(self.model, _context(context), _batch(batch_size), self.precision, block_size, self.parallelism)
        return Answer(
            [record],
            lambda: [size_table([record], [(self.model, self.precision, self.parallelism)], block_size)],
            lambda: cache_vs_context([(self.model.name, self.model, self.precision)], self.gpu, _batch(batch_size), last),
            _short=CACHE_SIZE,
        )

    def fit(self, lengths: str = "", seed: int = 0, **options: Any) -> Answer:
        """What fits, and what an engine allocates. options: as of `FitOptions`, tokens and bytes in words or numbers."""
        from kvcalc.capacity import FitOptions, fit
        from kvcalc.capacity.fragmentation import read_lengths
        from kvcalc.capacity.record import fit_record
        from kvcalc.report.fit import fit_table, memory_chart

        check_known(options, FitOptions, also=("lengths", "seed"))
        of_kind(lengths, "file or distribution of lengths", str)
        found = fit(self, from_words(FitOptions, options))
        record = fit_record(found, read_lengths(lengths, seed) if lengths else [], seed)
        return Answer([record], lambda: [fit_table([record], [found])], lambda: memory_chart([record]))

    def latency(self, **options: Any) -> Answer:
        """One request. options: as of `LatencyOptions`."""
        from kvcalc.report.figures_latency import latency_chart
        from kvcalc.report.serving import latency_tables
        from kvcalc.serving.request_record import LatencyOptions, latency_record

        check_known(options, LatencyOptions)
        asked = from_words(LatencyOptions, options)
        record = latency_record(self, asked)
        return Answer([record], lambda: latency_tables([record]), lambda: latency_chart([self], [asked]))

    def roofline(self, phase: str = "decode", batch_size: int | str = 1, context: int | str = 4096, batch: str = "") -> Answer:
        """Where every operation of a pass lies; its figures are those of the total. batch: a mixed pass instead."""
        from kvcalc.report.passes import pass_table
        from kvcalc.report.roof import roofline_chart
        from kvcalc.timing.records import mixed_records, roofline_records

        mixed, asked = of_kind(batch, "mixed batch", str), (phase, _batch(batch_size), _context(context))
        records = mixed_records(self, mixed) if mixed else roofline_records(self, *asked)
        name = f"{self.model.name} {'mixed' if batch else phase}"
        return Answer(records, lambda: [pass_table(self, records)], lambda: roofline_chart([(name, records)], [self.gpu]), -1)

    def serve(self, policy: str = "continuous", cache: str = "paged", **options: Any) -> Answer:
        """A server under load, simulated. options: as of `Load` and `ServerSettings`."""
        from kvcalc.report.figures_serving import occupancy
        from kvcalc.report.serving import serve_table
        from kvcalc.serving.load import Load
        from kvcalc.serving.run import serve
        from kvcalc.serving.settings import ServerSettings

        check_known(options, Load, ServerSettings, also=("policy", "cache"))
        of_kind(cache, "cache of `serve`", str)
        load, settings = from_words(Load, options), from_words(ServerSettings, options)
        run = serve(self, load.drawn(), load, settings, policy, cache)
        return Answer([run.record], lambda: [serve_table([run.record])], lambda: occupancy(run))

    def compare(
        self,
        variants: str | Sequence[str] = "",
        context: int | str = 4096,
        batch_size: int | str = 1,
        block_size: int = 16,
    ) -> Answer:
        """The same with other attention, a record a variant; its figures are those of the first."""
        from kvcalc.planning.comparison import compare_records, usual_variants
        from kvcalc.planning.variants import variant
        from kvcalc.report.comparison import compare_chart, compare_tables

        given = variants or usual_variants(self.model)
        names = (
            given.split(",")
            if isinstance(given, str)
            else [of_kind(n, "variant", str) for n in of_kind(given, "list", list, tuple)]
        )
        chosen = [(name.strip(), variant(self.model, name)) for name in names]
        tokens, users = _context(context), _batch(batch_size)
        records = compare_records(chosen, self, [tokens], [users], block_size)
        chart = partial(compare_chart, self, chosen, records, max(tokens, 1024))
        return Answer(records, lambda: compare_tables([self], records, block_size), chart)

    def __repr__(self) -> str:
        ranks = " ".join(f"{name} {size}" for name, size in msgspec.structs.asdict(self.parallelism).items() if size > 1)
        where = f"{self.model.name} on {self.parallelism.gpus} × {self.gpu.name}{f' ({ranks})' if ranks else ''}"
        return f"{where}: weights {self.formats.weights_label}, cache {self.formats.kv_cache_dtype}; times: {self.basis}"


def deploy(
    model: str | Path | Model,
    gpu: str | Path | Gpu,
    tp: int = 1,
    pp: int = 1,
    dp: int = 1,
    ep: int = 1,
    dcp: int = 1,
    dtype: str = "auto",
    kv_cache_dtype: str = "auto",
    quantization: str = "",
    stack: str = "",
    mla_form: str = "auto",
    calibration_from: str = "",
    memory: str = "",
    nodes: int = 0,
    inter_node_bandwidth: str = "",
) -> Deployment:
    """A model on GPUs, by names or objects, with the options of the command line.

    stack: the calibration that times rest on, '' for vllm where the GPU has it, `datasheet` for none. memory: of each
    GPU or of the machine, where it is less than the preset's. nodes: 0 for the fewest; inter_node_bandwidth: of each GPU, as
    `50GB/s`. Raises UserError.
    """
    chosen, card = as_model(model), with_memory(as_gpu(gpu), of_kind(memory, "size of memory", str))
    precision = from_words(Precision, {"dtype": dtype, "kv_cache_dtype": kv_cache_dtype, "quantization": quantization})
    ranks = Parallelism(tp, pp, dp, ep, dcp)
    for given, what in ((stack, "stack"), (calibration_from, "GPU to calibrate from"), (inter_node_bandwidth, "rate")):
        of_kind(given, what, str)
    if mla_form not in MLA_FORMS:
        raise UserError(f"unknown MLA form {mla_form!r}", hint=f"Known: {', '.join(MLA_FORMS)}")
    card = with_rate_between(card, inter_node_bandwidth)
    found = Deployment(chosen, card, precision, ranks, mla_form, nodes=of_kind(nodes, "number of nodes", int))
    _ = found.ranks  # refused here where they cannot be placed
    return found.under(stack, calibration_from)


def plan(models: str | Path | Model | Sequence[str | Path | Model], **options: Any) -> Answer:
    """What do I need, and what is the best of it: the five best deployments, the chief of them the first.

    options: those of `kvcalc plan` by name, each a word, a number or a list. Raises UserError.
    """
    from kvcalc.planning.question import question_of
    from kvcalc.planning.records import answer_records
    from kvcalc.planning.search import searched
    from kvcalc.report.plans import front_chart, plan_tables

    given = [models] if isinstance(models, str | Path | Model) else models
    asked = question_of([as_model(one) for one in given], options)
    found = searched(asked.needs, asked.space, asked.prices)
    records = [answer_records(answer, found.space) for answer in found.answers]
    every = [record for part in records for record in part]
    return Answer(every, lambda: plan_tables(found, records), lambda: front_chart(found.answers[0]))


def _context(given: int | str) -> int:
    return parse_tokens(str(given), "context")


def _batch(given: int | str) -> int:
    return parse_tokens(str(given), "batch size")
