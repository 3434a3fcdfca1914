"""A deployment whose readings are methods, for notebooks and scripts: what the commands answer, under their JSON keys."""

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from kvcalc.errors import UserError
from kvcalc.gpu.spec import Gpu
from kvcalc.layers.ranks import Parallelism
from kvcalc.library.engine_choice import EngineChoice, engine_choices
from kvcalc.library.load import with_memory, with_rate_between
from kvcalc.library.words import check_known, from_words
from kvcalc.model.operators import MLA_FORMS
from kvcalc.model.precision import Precision
from kvcalc.model.spec import Model
from kvcalc.report.answer import Answer
from kvcalc.report.lower import as_gpu, as_model, as_tokens, of_kind
from kvcalc.timing import deployment
from kvcalc.units import parse_list, parse_tokens, plain

Counts: TypeAlias = int | str | Iterable[int | str]  # a number or a word such as `32k`, a list of them, or words between commas

# The fields of `CacheSize`, by the keys of `size`.
CACHE_SIZE = {
    "stored": "kv_cache_bytes",
    "read": "kv_cache_read_bytes",
    "allocated": "kv_cache_allocated_bytes",
    "fixed": "fixed_bytes",
    "slope": "bytes_per_token",
}


class Deployment(deployment.Deployment, frozen=True):
    """A model on GPUs, as it is run. Each reading is the command of its name, and raises UserError as that refuses."""

    def size(self, context: Counts = 4096, batch_size: Counts = 1, block_size: int = 16) -> Answer:
        """How big is the cache: also `stored`, `read`, `allocated` bytes of a GPU, `fixed` and `slope` of one sequence.

        context: tokens of each of batch_size sequences; lists make more records, contexts fastest. block_size: tokens of a
        block, of which whole ones are allocated.
        """
        from kvcalc.model.size import size_record
        from kvcalc.report.figures import cache_vs_context
        from kvcalc.report.sizes import size_table

        stored, block = (self.model, self.precision, self.parallelism), as_tokens(block_size, "block size")
        contexts, batches = parse_list(context, "context"), parse_list(batch_size, "batch size")
        records = [size_record(stored[0], c, b, stored[1], block, stored[2]) for b, c in product(batches, contexts)]
        drawn = [(self.model.name, *stored[:2])], [self.gpu], batches[0], max(*contexts, 1024), (), [self.parallelism]
        return Answer(
            records,
            lambda: [size_table(records, [stored], block)],
            lambda: cache_vs_context(*drawn),
            _short=CACHE_SIZE,
        )

    def fit(self, lengths: str = "", seed: int = 0, **options: Any) -> Answer:
        """What fits, and what an engine allocates: `fits`, `max_num_seqs` users, `max_model_len`, `kv_budget_bytes` ….

        options: those of `FitOptions`, max_model_len, users, engine (the deployment's by default)
        and gpu_memory_utilization among them; tokens (`32k`) and
        bytes (`40GiB`) in words or numbers. lengths: a file of lengths, or `lognormal:MEAN,P99`, for what allocation wastes,
        drawn by seed.
        """
        from kvcalc.capacity import FitOptions, fit
        from kvcalc.capacity.fragmentation import read_lengths
        from kvcalc.capacity.record import fit_record
        from kvcalc.report.figures_fit import memory_chart
        from kvcalc.report.fit import fit_table

        check_known(options, FitOptions, also=("lengths", "seed"))
        of_kind(lengths, "file or distribution of lengths", str)
        if options.get("engine", self.engine) == self.engine:
            options = {"engine": self.engine, "engine_version": self.engine_version} | options
        found = fit(self, from_words(FitOptions, options))
        record = fit_record(found, read_lengths(lengths, seed) if lengths else [], seed)
        return Answer([record], lambda: [fit_table([record], [found])], lambda: memory_chart([record]))

    def latency(self, **options: Any) -> Answer:
        """One request, or equal ones at once: `ttft_s`, `tpot_s`, `e2e_s`, `output_tokens_per_s`, `time_basis` ….

        options: input_len (2000) and output_len (500) tokens; batch_size (1); prefix_len, leading tokens that are cached
        already; max_num_batched_tokens, a chunk of the prefill; no_cache, also without a cache, its LM head on the `last`
        position or `all` (head); draft, a model, `layers=N` or `mtp`, with num_speculative_tokens and acceptance_rate (0 to
        1); cpu_offload_gb, GiB of weights in the host's memory; price_per_hour of one GPU.
        """
        from kvcalc.report.figures_latency import latency_chart
        from kvcalc.report.serving import latency_tables
        from kvcalc.serving.request_record import LatencyOptions, latency_record

        check_known(options, LatencyOptions)
        asked = from_words(LatencyOptions, options)
        record = latency_record(self, asked)
        return Answer([record], lambda: latency_tables([record]), lambda: latency_chart([self], [asked]))

    def roofline(self, phase: str = "decode", batch_size: int | str = 1, context: int | str = 4096, batch: str = "") -> Answer:
        """Where every operation of a pass lies, a record each; the figures are those of the total.

        phase: decode or prefill, of batch_size sequences of context tokens. batch: a mixed pass instead, as `500+4x1@4k`.
        """
        from kvcalc.capacity.memory_record import pass_with_memory
        from kvcalc.layers.batch import Batch
        from kvcalc.report.passes import pass_table
        from kvcalc.report.roof import roofline_chart
        from kvcalc.timing.records import mixed_records, roofline_records

        mixed, asked = of_kind(batch, "mixed batch", str), (phase, _batch(batch_size), _context(context))
        records = mixed_records(self, mixed) if mixed else roofline_records(self, *asked)
        one = Batch.parse(mixed) if mixed else Batch.of_phase(phase, asked[2], asked[1])
        records = pass_with_memory(self, records, one)
        name = f"{self.model.name} {'mixed' if batch else phase}"
        return Answer(records, lambda: [pass_table(self, records)], lambda: roofline_chart([(name, records)], [self.gpu]), -1)

    def serve(self, policy: str = "continuous", cache: str = "paged", **options: Any) -> Answer:
        """A server under load, simulated: `throughput_tokens_per_s`, `ttft_p50_s` … `ttft_p99_s`, `tpot_p50_s` ….

        policy: continuous or static; cache: paged or contiguous. options of the load: rate, requests a second (`inf`: all at
        once), or requests, a CSV of arrival_s, input_len, output_len; num_prompts (1000), input_len (1000) and
        output_len (200), numbers or `uniform:100,2000` or `lognormal:MEAN,P99`; burstiness, seed, prefix_hit_rate; client,
        max_concurrency and think_time of a closed loop. Without rate, requests and max_concurrency rates up to saturation are
        tried: the first record is that of the sustained rate, followed by one for each rate. Of the server: max_num_seqs
        (256), max_num_batched_tokens, max_model_len, preemption, gpu_memory_utilization, kv_cache_memory_bytes, slo_ttft and
        slo_tpot, price_per_hour, draft.
        """
        from kvcalc.report.figures_load import load_chart
        from kvcalc.report.figures_serving import occupancy
        from kvcalc.report.served import serve_table
        from kvcalc.serving.finding import sweep_rates
        from kvcalc.serving.load import Load
        from kvcalc.serving.run import serve
        from kvcalc.serving.settings import ServerSettings

        check_known(options, Load, ServerSettings, also=("policy", "cache"))
        of_kind(cache, "cache of `serve`", str)
        load, settings = from_words(Load, options), from_words(ServerSettings, options)
        if not (options.get("rate") or load.requests or load.max_concurrency):
            sweep = sweep_rates(self, load, settings, policy, cache)
            tried = [one.record for one in sweep.tried]
            records = [sweep.sustained.record, *tried]
            return Answer(records, lambda: [serve_table(records)], lambda: load_chart(tried))
        run = serve(self, load.drawn(), load, settings, policy, cache)
        return Answer([run.record], lambda: [serve_table([run.record])], lambda: occupancy(run))

    def compare(
        self,
        variants: str | Sequence[str] = "",
        context: Counts = 4096,
        batch_size: Counts = 1,
        block_size: int = 16,
    ) -> Answer:
        """The same with other attention, a record a variant; the figures are those of the first, the reference.

        variants: `mha,gqa:8,mla:512+64` or a list of such; the usual ones unless given. Lists of contexts and batch sizes make
        more records of each.
        """
        from kvcalc.planning.comparison import compare_records, usual_variants
        from kvcalc.planning.variants import variant
        from kvcalc.report.comparison import compare_tables
        from kvcalc.report.figures_compare import compare_chart

        given = variants or usual_variants(self.model)
        names = (
            given.split(",")
            if isinstance(given, str)
            else [of_kind(n, "variant", str) for n in of_kind(given, "list", list, tuple)]
        )
        chosen = [(name.strip(), variant(self.model, name)) for name in names]
        contexts, batches = parse_list(context, "context"), parse_list(batch_size, "batch size")
        block = as_tokens(block_size, "block size")
        records = compare_records(chosen, self, contexts, batches, block)
        chart = partial(compare_chart, [self], chosen, records, max(*contexts, 1024))
        return Answer(records, lambda: compare_tables([self], records, block), chart)

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
    engine: str = "vllm",
    engine_version: str = "",
    bounds: bool = False,
    calibration: str = "",
) -> Deployment:
    """A model on GPUs, by names or objects, with the options of the command line.

    tp, pp, dp, ep, dcp: GPUs by what they share, as of `Parallelism`. dtype, kv_cache_dtype, quantization: as of `Precision`.
    mla_form: of latent attention, auto, absorbed or expanded. calibration_from: a GPU whose calibration is scaled.
    memory: of each GPU or of the machine, where it is less than the preset's. nodes: 0 for the fewest; inter_node_bandwidth:
    of each GPU, as `50GB/s`. engine: vllm, sglang, trtllm, llama.cpp or none; it decides memory and times. bounds: datasheet
    bounds instead of predictions. calibration: your own, by name or file. stack: the former name of these three. Raises
    UserError.
    """
    chosen, card = as_model(model), with_memory(as_gpu(gpu), of_kind(memory, "size of memory", str))
    precision = from_words(Precision, {"dtype": dtype, "kv_cache_dtype": kv_cache_dtype, "quantization": quantization})
    ranks = Parallelism(*map(plain, (tp, pp, dp, ep, dcp)))
    for given, what in ((calibration_from, "GPU to calibrate from"), (inter_node_bandwidth, "rate")):
        of_kind(given, what, str)
    choice = _engine_choice(engine, calibration, bounds, stack)
    if mla_form not in MLA_FORMS:
        raise UserError(f"unknown MLA form {mla_form!r}", hint=f"Known: {', '.join(MLA_FORMS)}")
    card = with_rate_between(card, inter_node_bandwidth)
    found = Deployment(
        chosen,
        card,
        precision,
        ranks,
        mla_form,
        nodes=of_kind(plain(nodes), "number of nodes", int),
        engine=choice.engine,
        engine_version=of_kind(engine_version, "engine version", str),
    )
    _ = found.ranks  # refused here where they cannot be placed
    return found.under(choice.calibration, calibration_from)


def _engine_choice(engine: str, calibration: str, bounds: bool, stack: str) -> EngineChoice:
    """Return the one engine and calibration that the arguments choose. Raises UserError on several."""
    for given, what in ((engine, "engine"), (calibration, "calibration"), (stack, "stack")):
        of_kind(given, what, str)
    choices = engine_choices(engine, calibration, bounds, stack)
    if len(choices) > 1:
        raise UserError("a deployment has one engine and one calibration", hint="Deploy once for each")
    return choices[0]


def plan(models: str | Path | Model | Sequence[str | Path | Model], **options: Any) -> Answer:
    """What do I need, and what is the best of it: the five best deployments, the chief of them the first.

    options: those of `kvcalc plan` by name, each a word, a number or a list: users and context, or rate, input_len and
    output_len; max_ttft, max_tpot (`50ms`), min_throughput; gpu, max_gpus (16), quantization, price_per_hour …. Raises UserError.
    """
    from kvcalc.planning.question import question_of
    from kvcalc.planning.records import answer_records
    from kvcalc.planning.search import searched
    from kvcalc.report.figures_plan import front_chart
    from kvcalc.report.plans import plan_tables

    given = [models] if isinstance(models, str | Path | Model) else of_kind(models, "list of models", list, tuple)
    if not given:
        raise UserError("a plan takes a model", hint='Write kvcalc.plan("llama-3.1-8b", users=64, context="16k")')
    asked = question_of([as_model(one) for one in given], options)
    found = searched(asked.needs, asked.space, asked.prices)
    records = [answer_records(answer, found.space) for answer in found.answers]
    every = [record for part in records for record in part]
    return Answer(every, lambda: plan_tables(found, records), lambda: front_chart(found.answers[0]))


def _context(given: int | str) -> int:
    return parse_tokens(str(given), "context")


def _batch(given: int | str) -> int:
    return parse_tokens(str(given), "batch size")
