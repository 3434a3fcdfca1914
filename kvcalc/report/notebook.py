"""The Python API: the commands as functions and as methods of a deployment."""

import inspect
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from kvcalc.errors import UserError
from kvcalc.layers.batch import Parallelism
from kvcalc.library.choices import check_known, engine_choices, from_words
from kvcalc.library.load import with_memory, with_rate_between
from kvcalc.model.forward_pass import MLA_FORMS
from kvcalc.model.model import Model
from kvcalc.model.precision import Precision
from kvcalc.report.answer import Answer
from kvcalc.report.charts.chart import Chart
from kvcalc.report.python_functions import (
    GpuOrName,
    ModelOrName,
    as_gpu,
    as_model,
    as_tokens,
    of_kind,
)
from kvcalc.timing import deployment
from kvcalc.units import parse_list, parse_tokens, plain

# A number or a word such as `32k`, a list of them, or words between commas.
Counts: TypeAlias = int | str | Iterable[int | str]

# The fields of `CacheSize`, by the keys of `size`.
CACHE_SIZE = {
    "stored": "kv_cache_bytes",
    "read": "kv_cache_read_bytes",
    "allocated": "kv_cache_allocated_bytes",
    "fixed": "fixed_bytes",
    "slope": "bytes_per_token",
}


class Deployment(deployment.TimedDeployment, frozen=True):
    """A model on GPUs. Each method is the command of its name and raises the same UserError."""

    def size(
        self, context: Counts = 4096, batch_size: Counts = 1, block_size: int = 16
    ) -> Answer:
        """Compute KV cache size; `stored`, `read` and `allocated` bytes per GPU.

        `fixed` and `slope` are bytes of one sequence: without its tokens, and per token.

        Args:
            context: Tokens per sequence. A list gives more records.
            batch_size: Number of sequences. A list gives more records.
            block_size: Tokens per KV cache block.
        """
        from kvcalc.model.memory import size_record
        from kvcalc.report.charts.size_plot import cache_vs_context
        from kvcalc.report.text.size_text import size_table

        block = as_tokens(block_size, "block size")
        contexts, batches = (
            parse_list(context, "context"),
            parse_list(batch_size, "batch size"),
        )
        records = [
            size_record(self.model, c, b, self.precision, block, self.parallelism)
            for b, c in product(batches, contexts)
        ]

        def draw() -> Chart:
            from kvcalc.planning.sweeps import cache_curve, contexts_up_to

            axis = contexts_up_to(max(*contexts, 1024))
            curve = cache_curve(self.model, self.precision, axis, batches[0], self.parallelism)
            return cache_vs_context([curve], batches[0], [self.gpu])

        return Answer(
            records,
            lambda: [
                size_table(records, [(self.model, self.precision, self.parallelism)], block)
            ],
            draw,
            _short=CACHE_SIZE,
        )

    def fit(self, lengths: str = "", seed: int = 0, **options: Any) -> Answer:
        """Compute what fits: `fits`, `max_num_seqs`, `max_model_len`, `kv_budget_bytes` and more.

        Without max_model_len, the length is the model's maximum, or the longest that fits.

        Args:
            lengths: File of lengths, or `lognormal:MEAN,P99`, for the waste of allocation.
            seed: Seed of the lengths.
            options: Fields of `FitOptions`, such as max_model_len, users and
                gpu_memory_utilization. The engine is the deployment's by default.
        """
        from kvcalc.capacity import FitOptions, fit
        from kvcalc.capacity.allocations import read_lengths
        from kvcalc.capacity.deployment_fit import shortened
        from kvcalc.capacity.fit_records import fit_record
        from kvcalc.report.charts.fit_plot import memory_chart
        from kvcalc.report.text.fit_text import fit_table

        check_known(options, FitOptions, also=("lengths", "seed"))
        of_kind(lengths, "file or distribution of lengths", str)
        if options.get("engine", self.engine) == self.engine:
            options = {
                "engine": self.engine,
                "engine_version": self.engine_version,
            } | options
        result = shortened(fit(self, from_words(FitOptions, options)))
        record = fit_record(result, read_lengths(lengths, seed) if lengths else [], seed)
        return Answer(
            [record],
            lambda: [fit_table([record], [result])],
            lambda: memory_chart([record]),
        )

    def latency(self, **options: Any) -> Answer:
        """Predict one request: `ttft_s`, `tpot_s`, `e2e_s`, `output_tokens_per_s` and more.

        Args:
            options: input_len (2000) and output_len (500) tokens; batch_size (1) equal requests;
                prefix_len, leading tokens that are cached; max_num_batched_tokens, a prefill
                chunk; no_cache, also without a cache, with the LM head on the `last` position or
                `all` (head); draft, a model, `layers=N` or `mtp`, with num_speculative_tokens and
                acceptance_rate (0 to 1); cpu_offload_gb, GiB of weights in CPU memory;
                price_per_hour of one GPU.
        """
        from kvcalc.planning.sweeps import latency_sweep
        from kvcalc.report.charts.latency_plot import latency_chart
        from kvcalc.report.text.serving_text import latency_tables
        from kvcalc.serving.request_record import LatencyOptions, latency_record

        check_known(options, LatencyOptions)
        request = from_words(LatencyOptions, options)
        record = latency_record(self, request)
        return Answer(
            [record],
            lambda: latency_tables([record]),
            lambda: latency_chart(latency_sweep([self], [request]), request),
        )

    def roofline(
        self,
        phase: str = "decode",
        batch_size: int | str = 1,
        context: int | str = 4096,
        batch: str = "",
    ) -> Answer:
        """Compute FLOPs, bytes and bound of each operator. Attributes are keys of the total.

        Args:
            phase: decode or prefill.
            batch_size: Number of sequences.
            context: Tokens per sequence.
            batch: A mixed pass instead of these, such as `500+4x1@4k`.
        """
        from kvcalc.capacity.fit_records import pass_with_memory
        from kvcalc.layers.batch import Batch
        from kvcalc.report.charts.roofline_plot import roofline_chart
        from kvcalc.report.text.roofline_text import pass_table
        from kvcalc.timing.operator_times import mixed_records, roofline_records

        sequences = parse_tokens(str(batch_size), "batch size")
        tokens = parse_tokens(str(context), "context")
        if of_kind(batch, "mixed batch", str):
            phase, records, one = (
                "mixed",
                mixed_records(self, batch),
                Batch.parse(batch),
            )
        else:
            records = roofline_records(self, phase, sequences, tokens)
            one = Batch.of_phase(phase, tokens, sequences)
        records = pass_with_memory(self, records, one)
        return Answer(
            records,
            lambda: [pass_table(self, records)],
            lambda: roofline_chart([records], [self.gpu]),
            -1,
        )

    def serve(self, policy: str = "continuous", cache: str = "paged", **options: Any) -> Answer:
        """Simulate a server: `throughput_tokens_per_s`, `ttft_p50_s`, `tpot_p99_s` and more.

        Without rate, requests and max_concurrency, the first record is the sustained rate. One
        record for each rate that was tried follows.

        Args:
            policy: continuous or static.
            cache: paged or contiguous.
            options: The load: rate (requests per second) or requests (a CSV file), num_prompts
                (1000), input_len (1000) and output_len (200), numbers or `lognormal:MEAN,P99`,
                burstiness, seed, prefix_hit_rate, client, max_concurrency, think_time. The server:
                max_num_seqs, max_num_batched_tokens, max_model_len, preemption,
                gpu_memory_utilization, kv_cache_memory_bytes, slo_ttft, slo_tpot, price_per_hour,
                draft.
        """
        from kvcalc.report.charts.load_plot import load_chart, occupancy_chart
        from kvcalc.report.text.serving_text import serve_table
        from kvcalc.serving.arrivals import Workload
        from kvcalc.serving.rate_search import sweep_rates
        from kvcalc.serving.server import serve
        from kvcalc.serving.server_settings import ServerSettings

        check_known(options, Workload, ServerSettings, also=("policy", "cache"))
        of_kind(cache, "cache of `serve`", str)
        load, settings = (
            from_words(Workload, options),
            from_words(ServerSettings, options),
        )
        if not (options.get("rate") or load.requests or load.max_concurrency):
            sweep = sweep_rates(self, load, settings, policy, cache)
            tried = [run.record for run in sweep.tried]
            records = [sweep.sustained.record, *tried]
            return Answer(records, lambda: [serve_table(records)], lambda: load_chart(tried))
        run = serve(self, load, settings, policy, cache)
        return Answer(
            [run.record],
            lambda: [serve_table([run.record])],
            lambda: occupancy_chart(run),
        )

    def compare(
        self,
        variants: str | Sequence[str] = "",
        context: Counts = 4096,
        batch_size: Counts = 1,
        block_size: int = 16,
    ) -> Answer:
        """Compare variants of the attention, one record each. The first is the reference.

        Args:
            variants: `mha,gqa:8,mla:512+64` or a list; the usual variants by default.
            context: Tokens per sequence. A list gives more records.
            batch_size: Number of sequences. A list gives more records.
            block_size: Tokens per KV cache block.
        """
        from kvcalc.planning.comparison import compare_records, usual_variants
        from kvcalc.planning.sweeps import comparison_sweep
        from kvcalc.planning.variants import variant
        from kvcalc.report.charts.comparison_plot import compare_chart
        from kvcalc.report.text.compare_text import compare_tables

        names: Any = variants or usual_variants(self.model)
        if isinstance(names, str):
            names = names.split(",")
        words = [of_kind(name, "variant", str) for name in of_kind(names, "list", list, tuple)]
        models = [(word.strip(), variant(self.model, word)) for word in words]
        contexts, batches = (
            parse_list(context, "context"),
            parse_list(batch_size, "batch size"),
        )
        block = as_tokens(block_size, "block size")
        records = compare_records(models, self, contexts, batches, block)

        def draw() -> Chart:
            load, last = (batches[0], contexts[0]), max(*contexts, 1024)
            return compare_chart([self], records, comparison_sweep([self], models, load, last))

        return Answer(
            records,
            lambda: compare_tables([self], records, block),
            draw,
        )

    def __repr__(self) -> str:
        sizes = msgspec.structs.asdict(self.parallelism).items()
        ranks = " ".join(f"{name} {size}" for name, size in sizes if size > 1)
        gpus = f"{self.parallelism.gpus} × {self.gpu.name}{f' ({ranks})' if ranks else ''}"
        formats = self.formats
        return (
            f"{self.model.name} on {gpus}: weights {formats.weights_label}, "
            f"cache {formats.kv_cache_dtype}; times: {self.basis}"
        )


def deploy(
    model: ModelOrName,
    gpu: GpuOrName = "h100",
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
    """Return a model on GPUs, by names or objects, with the options of the command line.

    Args:
        tp, pp, dp, ep, dcp: Sizes of parallelism, as in `Parallelism`.
        dtype, kv_cache_dtype, quantization: Data types, as in `Precision`.
        stack: Former name of engine, bounds and calibration.
        mla_form: Form of latent attention: auto, absorbed or expanded.
        calibration_from: GPU whose calibration is scaled.
        memory: Usable memory of the GPU or machine, if less than its preset.
        nodes: Number of nodes; 0 uses as few as the interconnect allows.
        inter_node_bandwidth: Bandwidth per GPU between nodes, such as `50GB/s`.
        engine: vllm, sglang, trtllm, llama.cpp or none. It decides memory and times.
        bounds: Datasheet bounds instead of predictions.
        calibration: Your own calibration, by name or file.
    """
    for value, what in (
        (memory, "size of memory"),
        (calibration_from, "GPU to calibrate from"),
        (inter_node_bandwidth, "rate"),
        (engine, "engine"),
        (engine_version, "engine version"),
        (calibration, "calibration"),
        (stack, "stack"),
    ):
        of_kind(value, what, str)
    formats = {
        "dtype": dtype,
        "kv_cache_dtype": kv_cache_dtype,
        "quantization": quantization,
    }
    choices = engine_choices(engine, calibration, bounds, stack)
    if len(choices) > 1:
        hint = "Call deploy once for each"
        raise UserError("a deployment has one engine and one calibration", hint=hint)
    if mla_form not in MLA_FORMS:
        raise UserError(f"unknown MLA form {mla_form!r}", hint=f"Known: {', '.join(MLA_FORMS)}")
    result = Deployment(
        as_model(model),
        with_rate_between(with_memory(as_gpu(gpu), memory), inter_node_bandwidth),
        from_words(Precision, formats),
        Parallelism(*map(plain, (tp, pp, dp, ep, dcp))),
        mla_form,
        nodes=of_kind(plain(nodes), "number of nodes", int),
        engine=choices[0].engine,
        engine_version=engine_version,
    )
    _ = result.ranks  # raises UserError if the ranks cannot be placed
    return result.under(choices[0].calibration, calibration_from)


DEPLOYING = frozenset(inspect.signature(deploy).parameters) - {"model"}


def _command(name: str) -> Callable[..., Answer]:
    """Return a function that deploys a model and calls the method `name` of the deployment."""

    def run(model: ModelOrName | Deployment, **options: Any) -> Answer:
        deploying = DEPLOYING & options.keys()
        if not isinstance(model, Deployment):
            model = deploy(model, **{key: options.pop(key) for key in deploying})
        elif fixed := deploying - {"engine", "engine_version"}:
            raise UserError(
                f"the deployment already has {', '.join(sorted(fixed))}",
                hint="Give these options to deploy",
            )
        answer: Answer = getattr(model, name)(**options)
        return answer

    run.__name__ = name
    run.__doc__ = f"""{getattr(Deployment, name).__doc__}
    The first argument is a model or a Deployment. A model also takes the options of `deploy`.
    """
    return run


size, fit, latency, roofline, serve, compare = map(
    _command, ("size", "fit", "latency", "roofline", "serve", "compare")
)


def plan(models: ModelOrName | Sequence[ModelOrName], **options: Any) -> Answer:
    """Find the five best deployments. Attributes are keys of the best.

    Args:
        models: A model or a list.
        options: Options of `kvcalc plan`, each a word, a number or a list: users and context, or
            rate, input_len and output_len; max_ttft, max_tpot (`50ms`), min_throughput; gpu,
            max_gpus (16), quantization, price_per_hour and more.
    """
    from kvcalc.planning.best_configs import answer_records
    from kvcalc.planning.question import question_of
    from kvcalc.planning.search import run_search
    from kvcalc.planning.sweeps import front_curve
    from kvcalc.report.charts.comparison_plot import front_chart
    from kvcalc.report.text.plan_text import plan_tables

    if isinstance(models, str | Path | Model):
        models = [models]
    if not of_kind(models, "list of models", list, tuple):
        raise UserError(
            "a plan takes a model",
            hint='Write kvcalc.plan("llama-3.1-8b", users=64, context="16k")',
        )
    question = question_of([as_model(model) for model in models], options)
    result = run_search(question.needs, question.space, question.prices)
    records = [answer_records(answer, result.space) for answer in result.answers]
    return Answer(
        [record for part in records for record in part],
        lambda: plan_tables(result, records),
        lambda: front_chart(front_curve(result.answers[0])),
    )
