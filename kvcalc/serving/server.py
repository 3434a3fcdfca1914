"""Set up a server for a workload, and return the records of simulated runs.

A sweep simulates a server at several rates, and finds the highest rate that the server sustains.
"""

from collections.abc import Sequence
from functools import cache as remember
from math import inf
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace

from kvcalc.capacity import Fit, FitOptions, fit
from kvcalc.capacity.batched_fit import transfer_rate
from kvcalc.capacity.fit_options import options_for
from kvcalc.errors import UserError
from kvcalc.layers.batch import Batch
from kvcalc.question.serving_options import ServerSettings, Workload
from kvcalc.records import Record
from kvcalc.serving.batching import Limits, ServerSetup
from kvcalc.serving.cache_accounting import Log, Pool, make_pool
from kvcalc.serving.request_latency import MAX_SUSTAINED_SHARE, cost_per_million, prices_of
from kvcalc.serving.requests import Clients, Requests, clients_of, sample_workload
from kvcalc.serving.simulation import KVTransfer, Progress, Served, scheduling_of, simulate
from kvcalc.serving.speculation import (
    Drafting,
    best_drafted,
    draft_model,
    requested_speculation,
)
from kvcalc.serving.step_timers import InterpolatedStepTimer, SpeculativeStepTimer, StepTimer
from kvcalc.timing.calibration import find_engine_overheads
from kvcalc.timing.deployment import TimedDeployment
from kvcalc.timing.steps import is_mixture

PERCENTILES = (50, 90, 99)


def summary(
    served: Served, budget: int, slo_ttft: float = 0.0, slo_tpot: float = 0.0
) -> Record:
    """Return the metrics of a simulated run by JSON key, such as `ttft_p99_s` and `kv_peak`.

    Args:
        served: All requests with their times, and the sums over the passes of each rank.
        budget: Bytes for the KV cache on one GPU. `kv_peak` is the largest used share of them.
        slo_ttft, slo_tpot: Targets of TTFT and TPOT [s] for `slo_attainment`; 0 for no target.
    """
    requests, logs, times = served.requests, served.logs, served.times

    def total(name: str, logs: Sequence[Log] = (*logs, *served.prefill)) -> Any:
        return sum(getattr(log, name) for log in logs)

    is_done = ~np.isnan(times.finished)
    columns = times.arrived, times.scheduled, times.first, times.finished
    arrived, scheduled, first, finished = (column[is_done] for column in columns)
    out = requests.output_len[is_done]
    completed, out_tokens = len(out), int(out.sum())
    in_tokens = int(requests.input_len[is_done].sum())
    span = float(finished.max() - arrived.min()) if completed else 0.0
    ttft, e2e = first - arrived, finished - arrived
    # a request with a single token has no TPOT, so it cannot miss a TPOT target
    tpot = (finished - first) / (out - 1).clip(1)
    meets = (ttft <= (slo_ttft or np.inf)) & (tpot <= (slo_tpot or np.inf))
    has_target = bool(span and (slo_ttft or slo_tpot))
    decode_wait = times.decode_scheduled - times.first
    allocated = total("allocated_byte_s", logs)
    peak = max(log.peak for log in logs)
    return {
        "requests": len(requests),
        "completed": completed,
        "rejected": int(times.rejected.sum()),
        "input_tokens": in_tokens,
        "output_tokens": out_tokens,
        "duration_s": span,
        "throughput_tokens_per_s": _ratio(out_tokens, span),
        "total_tokens_per_s": _ratio(out_tokens + in_tokens, span),
        "requests_per_s": _ratio(completed, span),
        **mean_and_percentiles("ttft", ttft),
        **mean_and_percentiles("tpot", tpot[out > 1]),
        **mean_and_percentiles("e2e", e2e),
        "queueing_mean_s": mean(scheduled - arrived),
        "prefill_utilization": _utilization(served.prefill, span),
        "decode_queueing_mean_s": mean(decode_wait[~np.isnan(decode_wait)]),
        "goodput_requests_per_s": int(meets.sum()) / span if has_target else None,
        "slo_attainment": float(meets.mean()) if has_target else None,
        "padding_waste": _ratio(total("padded"), total("slots")),
        "padded_slots": total("padded"),
        "token_slots": total("slots"),
        "kv_waste": _ratio(allocated - total("stored_byte_s", logs), allocated),
        "kv_peak": _ratio(peak, budget),
        "kv_peak_bytes": peak,
        "kv_budget_bytes": budget,
        **{name: total(name) for name in ("preemptions", "recomputed_tokens", "passes")},
        "mean_batch_size": _ratio(total("sequences_s", logs), total("busy_s", logs)),
        "utilization": _utilization(logs, span),
        "mean_in_system": _ratio(float(e2e.sum()), span),
    }


def _ratio(part: float, total: float) -> float | None:
    return part / total if total else None


def _utilization(logs: Sequence[Log], span: float) -> float | None:
    """Return the share of `span` seconds in which the ranks work, at most 1; None without ranks."""
    return _ratio(min(sum(log.busy_s for log in logs), span * len(logs)), span * len(logs))


def mean(values: Any) -> float | None:
    """Return the mean of a NumPy array of numbers as a float; None if the array is empty."""
    return float(values.mean()) if values.size else None


def mean_and_percentiles(name: str, values: Any) -> dict[str, float | None]:
    """Return the mean and the percentiles 50, 90 and 99 of an array of seconds, by JSON key.

    All values are None if the array is empty. Percentiles are interpolated linearly between the two
    nearest values.

    Args:
        name: Beginning of the keys. `ttft` gives `ttft_mean_s`, `ttft_p50_s`, `ttft_p90_s` and
            `ttft_p99_s`.
        values: Array of seconds, one for each request.
    """
    figures = {f"{name}_mean_s": mean(values)}
    for percentile in PERCENTILES:
        figures[f"{name}_p{percentile}_s"] = (
            float(np.percentile(values, percentile)) if values.size else None
        )
    return figures


STEADY_REQUESTS = 3000  # requests of a backlog, in addition to the started requests
MAX_STARTED_REQUESTS = 2048  # requests of a backlog that had begun earlier
REQUESTS_PER_STARTED = 4  # further requests of a backlog, so that it outlasts its start
MAX_BACKLOG_TOKENS = 150_000_000  # so that long prompts take seconds, not minutes
MIN_BACKLOG = 500  # requests of a backlog, however long they are
DEFAULT_MAX_NUM_SEQS = 256  # without an engine
MIN_TRACE_REQUESTS = 10  # requests of a trace up to which no arrival rate is derived
# measured figures of a server, and how calibrations name their errors
ERRORS = {"tpot": "", "ttft": "_ttft", "throughput": "_throughput"}


def memory(deployment: TimedDeployment, options: FitOptions) -> Fit:
    """Return the KV cache budget of one GPU of a replica, and the cache's layout on it.

    The GPU is of the pipeline stage that fits the fewest sequences.

    Args:
        deployment: Model on one replica of GPUs.
        options: Options of the engine that affect its memory.

    Raises:
        UserError: Weights and buffers leave no memory for a KV cache.
    """
    capacity = fit(deployment, options)
    if not capacity.kv_budget:
        raise UserError(
            f"{deployment.model.name} leaves no memory for a cache on "
            f"{deployment.parallelism.gpus}× {deployment.gpu.name} under {deployment.engine}",
            "Use more GPUs (tp), or a smaller dtype or quantization",
        )
    return capacity


def make_backlog(load: Workload, requests: Requests, max_num_seqs: int) -> Requests:
    """Return many requests that all wait from the start, to measure a server's maximum rate.

    Their lengths are drawn like those of the workload, or taken from its trace. The first requests,
    at most `max_num_seqs`, need only a random part of their output tokens, as if they had begun
    earlier. Otherwise answers of equal length would all end in the same step, and the next answers
    would begin together, so the measured rate would be too high. Example: gpt-oss-20b on an H100
    would seem to serve 39.4 requests/s, but with Poisson arrivals it serves 35.9.

    Args:
        load: Workload that defines the lengths. Its rate and its number of requests do not matter.
        requests: Requests of the workload, which are repeated if they are from a trace.
        max_num_seqs: Maximum number of concurrent sequences of the server.
    """
    most = max(MIN_BACKLOG, MAX_BACKLOG_TOKENS // requests.max_tokens)
    started = min(max_num_seqs, MAX_STARTED_REQUESTS, most // REQUESTS_PER_STARTED)
    count = min(STEADY_REQUESTS + REQUESTS_PER_STARTED * started, most)
    if load.requests:
        backlog = requests.select(np.arange(count) % len(requests))
        backlog.arrival_s[:] = 0
    else:
        backlog = sample_workload(replace(load, rate=inf, num_prompts=count))
    parts_left = np.random.default_rng([load.seed, 3]).random(started)
    backlog.output_len[:started] = np.ceil(backlog.output_len[:started] * parts_left).clip(1)
    return backlog


def saturated_rate(served: Served, started: int) -> float | None:
    """Return the requests per second that a server completes while requests always wait.

    The beginning and the end of the simulated run are not counted, because the server is not in a
    steady state then.

    Let n be `started` plus the maximum number of concurrent sequences. Counting begins when request
    n of the backlog starts, or the middle request if that is earlier. Counting ends when the last
    request starts. If fewer than a tenth of the requests complete in this time, the whole run
    counts. The result is None if the server completed no request.

    Args:
        served: Simulated run of the requests that `make_backlog` returned.
        started: Number of these requests that need only a part of their answer, as if they had
            begun earlier.
    """
    finished = _sorted_times(served, "finished")
    if not len(finished):
        return None
    starts = _sorted_times(served, "scheduled")
    first = min(started + sum(log.largest for log in served.logs), len(starts) // 2)
    begin, end = float(starts[first]), float(starts[-1])
    completed = int(((finished > begin) & (finished <= end)).sum())
    if completed < len(finished) // 10:
        return len(finished) / float(finished[-1])
    return completed / (end - begin)


def _sorted_times(served: Served, name: str) -> Any:
    """Return the times `name` in the logs of all decoding ranks, sorted and without NaN."""
    times = np.sort(np.concatenate([getattr(log, name) for log in served.logs]))
    return times[times == times]


class SimulationResult(NamedTuple):
    """The simulation of a workload on a server: its metrics, and its times in detail.

    Attributes:
        record: Metrics and settings by JSON key, as the command `serve` prints them.
        served: Times of all requests, and for each rank a log of its forward passes.
        pool: Size of the KV cache of one data-parallel rank, and the bytes of a request in it.
        limits: Maximum sequences and maximum tokens per pass of one data-parallel rank.
    """

    record: Record
    served: Served
    pool: Pool
    limits: Limits


class Server:
    """A simulated server, set up once for workloads that differ only in their request rate.

    Args:
        deployment: Model on one replica of GPUs.
        requests: Requests of the workload at any rate, whose lengths size the tables of times.
        load: The workload: the trace, or lengths, clients and seed.
        settings: Settings of the engine, speculative decoding, and latency targets.
        policy: Batching policy: `continuous` (as in vLLM) or `static`.
        cache: Memory of a request's KV cache: `paged` in blocks, or `contiguous` at its maximum
            length.

    Attributes:
        drafting: Settings of speculative decoding; None without a draft.
        capacity: KV cache budget and layout, from `fit`.
        limits: Maximum sequences and maximum tokens per pass of one data-parallel rank.
        engine: Measured overheads of the engine; None for datasheet bounds or an unknown engine.
        scheduling: How the engine fills its forward passes with prompts and decodes.
        steps: Timer that returns the seconds of each forward pass.
        transfer: Prefill replicas of a disaggregated server; None if each replica processes prompts
            and decodes.
        saturation_rate: Requests per second that the server completes while requests always wait.
            None if it serves none of the requests.

    Raises:
        UserError: The model does not fit, or options exclude each other.
    """

    def __init__(
        self,
        deployment: TimedDeployment,
        requests: Requests,
        load: Workload,
        settings: ServerSettings,
        policy: str = "continuous",
        cache: str = "paged",
    ) -> None:
        self.deployment = deployment
        self.settings = settings
        self.price = prices_of(settings.price_per_hour, [deployment.gpu]).get(
            deployment.gpu.name
        )
        self.policy = policy
        self.cache = cache
        self.prefix_hit_rate = load.prefix_hit_rate
        for name, value in (
            ("a prefix cache", load.prefix_hit_rate),
            ("a draft", settings.draft),
            ("disaggregated prefill", settings.disaggregate),
        ):
            if value and policy != "continuous":
                text = f"{name} is simulated only under continuous batching"
                raise UserError(text, "Leave --policy out")
        self.drafting = self._make_drafting(requests, load.seed)
        self.capacity = memory(deployment, self._fit_options(requests.max_tokens))
        self.limits = self._choose_limits()
        calibration = deployment.calibration
        self.engine = find_engine_overheads(calibration.stack) if calibration else None
        self.scheduling = scheduling_of(self.engine)
        self.transfer = None
        if settings.disaggregate:
            # caches cross a GPU's link, as in `plan`
            rate, content = transfer_rate(deployment.gpu), self.capacity.content
            seconds = remember(lambda tokens: content.needed(1, tokens) / rate)
            self.transfer = KVTransfer(settings.prefill_replicas, seconds)

        backlog = make_backlog(load, requests, self.max_num_seqs)
        self.steps = self._make_timer(max(requests.max_tokens, backlog.max_tokens))
        served, _ = self._simulate(backlog, Clients())
        self.saturation_rate = saturated_rate(served, self.max_num_seqs)

    @property
    def max_num_seqs(self) -> int:
        """Return the maximum number of sequences that run at the same time on the whole replica.

        It is the sum over the data-parallel ranks.
        """
        return (
            self.settings.max_num_seqs
            or self.limits.max_num_seqs * self.deployment.parallelism.dp
        )

    def run(
        self, requests: Requests, load: Workload, progress: Progress = None
    ) -> SimulationResult:
        """Simulate the requests of a workload, and return metrics and times.

        Args:
            requests: Requests to serve, with arrivals and lengths.
            load: Workload from which the requests were drawn, which gives clients and rate for the
                record.
            progress: Called from time to time with the number of requests done since its last call;
                None for no calls.
        """
        clients = clients_of(load, self.engine)
        served, pool = self._simulate(requests, clients, progress)
        return SimulationResult(self._record(load, clients, served), served, pool, self.limits)

    def _simulate(
        self, requests: Requests, clients: Clients, progress: Progress = None
    ) -> tuple[Served, Pool]:
        max_tokens = requests.max_tokens
        max_model_len = self.settings.max_model_len
        if self.cache != "paged":
            max_model_len = max_model_len or self.deployment.model.max_context or 0
        pool = make_pool(
            capacity=self.capacity,
            cache=self.cache,
            max_model_len=max_model_len or max_tokens,
            max_tokens=max_tokens,
            draft_slots=self.drafting.drafted if self.drafting else 0,
        )
        self.steps.reset()
        setup = ServerSetup(
            pool, self.steps, self.limits, self.scheduling, self.prefix_hit_rate
        )
        return simulate(requests, setup, self.policy, clients, self.transfer, progress), pool

    def _make_drafting(self, requests: Requests, seed: int) -> Drafting | None:
        """Return the settings of speculative decoding. The default number of draft tokens is the
        number of prediction layers. For other drafts it is the number that is fastest for a single
        request.
        """
        settings, deployment = self.settings, self.deployment
        if not settings.draft:
            return None
        draft = replace(deployment, model=draft_model(deployment.model, settings.draft))
        drafted, accepted = requested_speculation(deployment.model, settings)
        if not drafted:
            context = max(1, round(requests.input_len.mean() + requests.output_len.mean() / 2))
            drafted = best_drafted(deployment, draft, context, 1, accepted).drafted
        return Drafting(draft, drafted, accepted, seed)

    def _fit_options(self, longest: int) -> FitOptions:
        """Return the options of `fit` for this server."""
        settings, drafting = self.settings, self.drafting
        names = (
            "max_num_seqs max_num_batched_tokens block_size gpu_memory_utilization "
            "kv_cache_memory_bytes"
        )
        is_mtp = settings.draft == "mtp"
        return options_for(
            self.deployment,
            **{name: getattr(settings, name) for name in names.split()},
            max_model_len=settings.max_model_len or longest,
            mtp=is_mtp,
            draft=drafting.draft.model if drafting and not is_mtp else None,
            num_speculative_tokens=drafting.drafted if drafting else 0,
        )

    def _choose_limits(self) -> Limits:
        """Return the limits of a rank, from the settings or from the engine's defaults."""
        settings, deployment = self.settings, self.deployment
        tokens = self.capacity.settings.max_num_batched_tokens
        if settings.max_num_seqs:
            num_seqs = deployment.parallelism.sequences(settings.max_num_seqs)
        else:
            num_seqs = self.capacity.max_num_seqs
            if deployment.engine == "none":
                num_seqs = DEFAULT_MAX_NUM_SEQS
            queries = self.drafting.drafted + 1 if self.drafting else 1
            num_seqs = max(1, min(num_seqs, tokens // queries))
        return Limits(num_seqs, tokens)

    def _make_timer(self, max_len: int) -> StepTimer:
        """Return the timer of passes with requests of up to `max_len` tokens."""
        limits, drafting = self.limits, self.drafting
        if self.policy != "continuous":
            return StepTimer(self.deployment)
        max_tokens = limits.max_num_batched_tokens * self.deployment.parallelism.pp
        sizes = max_len, max_tokens, limits.max_num_seqs
        if not drafting:
            return InterpolatedStepTimer(self.deployment, *sizes)
        queries = drafting.drafted + 1
        target = InterpolatedStepTimer(self.deployment, *sizes, queries=queries)
        draft = InterpolatedStepTimer(drafting.draft, *sizes)
        return SpeculativeStepTimer(target, draft, drafting)

    def _record(self, load: Workload, clients: Clients, served: Served) -> Record:
        """Return the record of a run.

        Fields: prefix_hit_share: Share of the prompt tokens that were found in a prefix cache.
        total_gpus: GPUs of the replica and of its prefill replicas. transfer_s: Mean seconds in
        which the cache of a prompt crosses the link.
        """
        deployment, settings, requests = self.deployment, self.settings, served.requests
        mean_input = float(requests.input_len.mean())
        cached_tokens = sum(log.found_tokens for log in (*served.logs, *served.prefill))
        replicas, transfer_s = 0, None
        if self.transfer:
            replicas = self.transfer.replicas
            seconds = [self.transfer.seconds(n) for n in requests.input_len.tolist()]
            transfer_s = sum(seconds) / len(seconds)
        record = {
            **deployment.identifying_keys,
            "time_basis": deployment.time_basis,
            "client": load.kind,
            "think_time_s": load.think_time or None,
            "front_end_s": clients.path_s + clients.path_s_per_token * mean_input or None,
            "prefix_hit_rate": load.prefix_hit_rate or None,
            "prefix_hit_share": cached_tokens / int(requests.input_len.sum())
            if self.prefix_hit_rate
            else None,
            "policy": self.policy,
            "cache": self.cache,
            "rate": load.rate if load.rate != inf else None,
            "max_concurrency": load.max_concurrency or None,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.limits.max_num_batched_tokens,
            "seed": load.seed,
            "slo_ttft": settings.slo_ttft or None,
            "slo_tpot": settings.slo_tpot or None,
            "found_rate": None,
            **self._draft_fields(served),
            "prefill_replicas": replicas,
            "total_gpus": deployment.parallelism.gpus * (1 + replicas),
            "transfer_s": transfer_s,
            **summary(served, self.capacity.kv_budget, settings.slo_ttft, settings.slo_tpot),
            "diverges": _queue_diverges(load, served, self.saturation_rate),
            "capacity_requests_per_s": self.saturation_rate,
            "cost_per_million_tokens": None,
        }
        if self.price and record["output_tokens"]:
            record["cost_per_million_tokens"] = cost_per_million(
                self.price,
                record["total_gpus"],
                record["throughput_tokens_per_s"],
            )
        prompt = max(1, round(mean_input))
        context = prompt + max(1, round(requests.output_len.mean()))
        step = Batch.decode(context, max(1, round(record["mean_batch_size"] or 1)))
        record |= server_errors(deployment, step, is_disaggregated=self.transfer is not None)
        record["uncalibrated_share"] = float(deployment.uncalibrated_share(step))
        record["fallback"] = deployment.fallback(Batch.prefill(prompt), Batch.decode(context))
        return record

    def _draft_fields(self, served: Served) -> Record:
        """Return the fields about speculative decoding; all None without a draft.

        Fields: tokens_per_step: Mean tokens per verification and sequence. Tokens beyond the end of
        an answer are not counted.
        """
        settings, drafting = self.settings, self.drafting
        verified = sum(log.verified for log in served.logs)
        yielded = sum(log.yielded for log in served.logs)
        source = None
        if settings.draft and not settings.num_speculative_tokens:
            source = "the best for one request at a time"
            if settings.draft == "mtp":
                source = "one for each prediction layer"
        return {
            "draft": drafting.draft.model.name if drafting else None,
            "num_speculative_tokens": drafting.drafted if drafting else None,
            "acceptance_rate": drafting.acceptance if drafting else None,
            "tokens_per_step": yielded / verified if verified else None,
            "num_speculative_tokens_from": source,
        }


def _queue_diverges(
    load: Workload, served: Served, saturation_rate: float | None
) -> bool | None:
    """Return whether the queue grows without end, because more requests arrive than the saturated
    server completes.

    Return None if clients wait for answers, or if a trace has too few requests. Requests that are
    too long to be served are not counted.
    """
    count = len(served.requests)
    has_rate = load.rate != inf
    if not load.is_open or not saturation_rate or not (has_rate or count > MIN_TRACE_REQUESTS):
        return None
    rejected = int(served.times.rejected.sum())
    rate = load.rate if has_rate else served.requests.rate
    return rate * (1 - rejected / count) > saturation_rate


def server_errors(
    deployment: TimedDeployment, step: Batch, is_disaggregated: bool
) -> dict[str, float | None]:
    """Return how far simulated server metrics were off on measured servers: 0.05 is 5%.

    Each value is the 90th percentile of the relative errors over the measured servers, so 90% of
    them have a smaller error.

    The measured servers ran models of the same type as the deployment: dense, or mixture of
    experts. The keys are `time_p90_error`, `tpot_p90_error`, `ttft_p90_error` and
    `throughput_p90_error`. The first two are equal: TPOT (time per output token) stands for the
    step time. TTFT is the time to the first token. A value is None if the error is unknown, for
    example for disaggregated servers or without a calibration.

    Args:
        deployment: Model on one replica of GPUs.
        step: A typical decode step of the server. The errors are unknown if its time is not fully
            calibrated.
        is_disaggregated: Whether separate replicas process prompts.
    """
    calibration = deployment.calibration
    errors = dict.fromkeys(("time", *ERRORS))
    if calibration and not is_disaggregated and deployment.p90_error(step) is not None:
        kind = "mixture" if is_mixture(deployment.operators(step)) else "dense"
        for name, suffix in ERRORS.items():
            validated = calibration.validation.get(f"{kind}{suffix}")  # type: ignore[call-overload]
            errors[name] = validated.p90_abs_error if validated else None
        errors["time"] = errors["tpot"]
    return {f"{name}_p90_error": error for name, error in errors.items()}


# shares of the saturation rate that are tried
TRIED_SHARES = (0.2, 0.4, 0.6, 0.8, MAX_SUSTAINED_SHARE, 1.1)
MIN_GOOD_SHARE = 0.99  # share of requests that must meet every goal
RATE_TOLERANCE = 1.02  # ratio of a rate that misses a goal to the sustained rate
MIN_RATE = 1e-3


class Sweep:
    """A search for the highest request rate that a simulated server sustains.

    The server is simulated at several rates up to saturation and beyond. The saturation rate is the
    number of requests per second that it completes while requests always wait. The server sustains
    a rate if 99% of the requests meet the latency targets in `settings`, and the rate is at most
    95% of the saturation rate. The result is exact to 2%. Each rate is rounded to three digits and
    simulated once. Ctrl-C ends the search and keeps the rates already tried.

    Args:
        deployment: Model on one replica of GPUs.
        load: Workload without a rate.
        settings: Settings of the engine, speculative decoding, and latency targets.
        policy: Batching policy: `continuous` (as in vLLM) or `static`.
        cache: Memory of a request's KV cache: `paged` in blocks, or `contiguous` at its maximum
            length.
        progress: Called from time to time with the number of requests done since its last call;
            None for no calls.

    Attributes:
        server: The simulated server.
        runs: The simulated runs, by rate in requests per second.
        sustained: The simulated run at the highest sustained rate. Its record has the rate as
            `found_rate`, which is 0 if not even single requests meet the targets.
        tried: The simulated run at each rate that was tried, from the lowest rate on.
        is_complete: Whether the search ended without Ctrl-C.

    Raises:
        UserError: The load already has arrival times or a rate, or its clients wait for answers.
    """

    def __init__(
        self,
        deployment: TimedDeployment,
        load: Workload,
        settings: ServerSettings,
        policy: str = "continuous",
        cache: str = "paged",
        progress: Progress = None,
    ) -> None:
        if load.rate != inf:
            raise UserError(
                "a rate is given, and the highest one is to be found",
                "Leave --rate out, or --find-rate",
            )
        if load.requests or load.max_concurrency:
            raise UserError(
                "a rate is found for requests drawn in an open loop, without --requests and "
                "--max-concurrency"
            )
        self.server = Server(deployment, sample_workload(load), load, settings, policy, cache)
        self.load = load
        self.progress = progress
        self.runs: dict[float, SimulationResult] = {}
        self.is_complete = True
        saturation_rate = self.server.saturation_rate or 0.0
        max_rate = _round_rate(MAX_SUSTAINED_SHARE * saturation_rate)
        try:
            self._search(saturation_rate, max_rate)
        except KeyboardInterrupt:
            if not self.runs:
                raise
            self.is_complete = False
        rate = self._sustained_rate(max_rate)
        self.tried = [self.runs[rate] for rate in sorted(self.runs)]
        run = self.runs[rate] if rate else self.tried[0]
        record = {**run.record, "rate": rate or None, "found_rate": rate}
        self.sustained = run._replace(record=record)

    def _meets_goals(self, rate: float) -> bool:
        """Return whether the required share of requests meets the goals at a rate. Without goals,
        return True.

        Raises:
            KeyboardInterrupt: Ctrl-C ended the simulation.
        """
        rate = _round_rate(rate)
        if rate not in self.runs:
            load = replace(self.load, rate=rate)
            run = self.server.run(sample_workload(load), load, self.progress)
            if not run.served.is_complete:
                raise KeyboardInterrupt
            self.runs[rate] = run
        record = self.runs[rate].record
        attainment = record["slo_attainment"]
        return bool(record["completed"]) and (
            attainment is None or attainment >= MIN_GOOD_SHARE
        )

    def _sustained_rate(self, max_rate: float) -> float:
        """Return the highest rate tried that meets the goals and is at most `max_rate`.

        The result is 0 if the server sustains no rate that was tried.
        """
        rates = [rate for rate in self.runs if rate <= max_rate and self._meets_goals(rate)]
        return max(rates, default=0.0)

    def _search(self, saturation_rate: float, max_rate: float) -> None:
        """Try all shares of the saturation rate, then rates next to the highest sustained rate."""
        for share in TRIED_SHARES if max_rate else ():
            self._meets_goals(share * saturation_rate)
        if not self._sustained_rate(max_rate):
            self._meets_goals(MIN_RATE)
        low = self._sustained_rate(max_rate)
        high = min((rate for rate in self.runs if rate > low), default=low)
        while low and low < max_rate and high > RATE_TOLERANCE * low:
            middle = _round_rate((low * high) ** 0.5 if low > high / 4 else high / 2)
            if self._meets_goals(middle):
                low = middle
            else:
                high = middle


def _round_rate(rate: float) -> float:
    """Return a rate rounded to the three digits that are printed."""
    return float(f"{rate:.3g}")
