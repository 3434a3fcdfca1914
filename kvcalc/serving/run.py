"""`serve` as a call: a load, a server's settings, and the record of what came of it."""

import math
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import msgspec

from kvcalc.capacity import FitOptions
from kvcalc.capacity.engines import ENGINES
from kvcalc.errors import UserError, nearest
from kvcalc.layers.batch import Batch
from kvcalc.library.words import BytesInstead, Tokens
from kvcalc.serving.latency import cost_per_million
from kvcalc.serving.load import Load, seconds_or_none, within
from kvcalc.serving.metrics import Goals, summary
from kvcalc.serving.pool import Pool, make_pool
from kvcalc.serving.prefixes import Kept, Prefixes, Shared
from kvcalc.serving.published import scheduling_of
from kvcalc.serving.replica import capacity, memory
from kvcalc.serving.requests import Prefixed, Requests
from kvcalc.serving.scheduling import Limits, Scheduling
from kvcalc.serving.simulation import Served, simulate
from kvcalc.serving.speculation import ACCEPTANCE, MOST_SPECULATED, Drafting, draft_model, expected_tokens
from kvcalc.serving.steps import Steps
from kvcalc.serving.tables import Passes, Tables
from kvcalc.timing.deployment import Deployment
from kvcalc.timing.engine import Engine, engine_of
from kvcalc.timing.steps import mixes

PREEMPTIONS = ("recompute", "swap")
FIGURES = {"tpot": "", "ttft": "_ttft", "throughput": "_throughput"}  # of a server, by how calibrations name their errors
OVERLOAD = 1.15  # times the capacity: what sharing passes could win is less


class ServerSettings(msgspec.Struct, frozen=True):
    """Of the server. max_num_seqs is the whole replica's, as a batch size is; max_num_batched_tokens of one dp rank's pass.

    0 leaves max_num_batched_tokens to the GPU's memory and max_model_len to the model, None kv_cache_memory_bytes to `fit`.
    slo_ttft, slo_tpot: seconds that users accept; 0 sets no goal. draft: as `draft_model` takes it, '' for none; it proposes
    num_speculative_tokens a step, each accepted with acceptance_rate (None: 0.8). scheduler_recv_interval: SGLang's, decode
    passes from one look at what has come to the next.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 0
    max_model_len: Tokens = 0
    preemption: str = "recompute"
    batch_timeout: float = 0.0
    block_size: int = 16
    gpu_memory_utilization: float = 0.92
    kv_cache_memory_bytes: BytesInstead = None
    slo_ttft: Annotated[float, seconds_or_none] = 0.0
    slo_tpot: Annotated[float, seconds_or_none] = 0.0
    price_per_hour: float = 0.0
    draft: str = ""
    num_speculative_tokens: int = 0
    acceptance_rate: float | None = None
    scheduler_recv_interval: int = 1

    def __post_init__(self) -> None:
        _check_draft(self.draft, self.num_speculative_tokens, self.acceptance_rate)
        for name, least in (
            ("max_num_seqs", 1),
            ("max_num_batched_tokens", 0),
            ("block_size", 1),
            ("scheduler_recv_interval", 1),
        ):
            within(name, getattr(self, name), least, 1 << 20)
        for name in ("batch_timeout", "price_per_hour", "slo_ttft", "slo_tpot"):
            within(name, getattr(self, name), 0, 10**9)
        if not 0 < self.gpu_memory_utilization <= 1:
            raise UserError(f"gpu-memory-utilization {self.gpu_memory_utilization} is not above 0 and at most 1")
        if self.preemption not in PREEMPTIONS:
            raise UserError(f"unknown preemption {self.preemption!r}", hint=nearest(self.preemption, PREEMPTIONS))

    @property
    def goals(self) -> Goals:
        return Goals(self.slo_ttft, self.slo_tpot)


def _check_draft(draft: str, drafted: int, acceptance: float | None) -> None:
    if not draft and (drafted or acceptance is not None):
        raise UserError("num-speculative-tokens and acceptance-rate are of a draft, and there is none")
    if draft and not drafted:
        raise UserError("a server's draft needs num-speculative-tokens", hint="`kvcalc latency --draft` finds the best")
    within("num_speculative_tokens", drafted, 0, MOST_SPECULATED)
    expected_tokens(acceptance or 0.0, drafted)


class Run(NamedTuple):
    """A simulated run: its record, logs, memory and limits."""

    record: dict[str, Any]
    served: Served
    pool: Pool
    limits: Limits


def serve(
    deployment: Deployment,
    requests: Requests,
    load: Load,
    settings: ServerSettings,
    policy: str = "continuous",
    cache: str = "paged",
    progress: Callable[[int], None] | None = None,
) -> Run:
    """Simulate `requests` on one replica. Raises UserError where the model does not fit, or an option cannot be met."""
    limits, drafting = _limits(deployment, settings), _drafting(deployment, settings, load.seed)
    asked = FitOptions(
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        kv_cache_memory_bytes=settings.kv_cache_memory_bytes,
        mtp=settings.draft == "mtp",
        draft=drafting.draft.model if drafting and settings.draft != "mtp" else None,
    )
    room, most = memory(deployment, asked), int(requests.input_len.max() + requests.output_len.max())
    steps: Passes = Steps(deployment, drafting)
    if policy == "continuous" and not drafting:
        steps = Tables(deployment, most, limits.max_num_batched_tokens, limits.max_num_seqs)
    longest = settings.max_model_len or (most if cache == "paged" else deployment.model.max_context or most)
    own = make_pool(room.rows, room.budget, cache, settings.block_size, longest, most, steps.queries - 1)
    engine = engine_of(deployment.calibration.stack) if deployment.calibration else None
    clients, prefixes = load.clients(engine), _prefixes(load, requests, own, settings.block_size)
    if prefixes and (policy != "continuous" or drafting or (isinstance(prefixes, Kept) and steps.ranks > 1)):
        raise UserError("a prefix cache is simulated under continuous batching, without a draft and on one data-parallel rank")
    served = simulate(requests, own, steps, limits, policy, clients, progress, _scheduling(engine, settings), prefixes)
    record: dict[str, Any] = deployment.named | {"time_basis": deployment.time_basis}
    record |= {"client": load.kind, "think_time_s": load.think_time or None}
    record["front_end_s"] = clients.path_s + clients.path_s_per_token * float(requests.input_len.mean()) or None
    found = sum(log.found_tokens for log in served.logs)
    record["prefix_hit_share"] = found / int(requests.input_len.sum()) if prefixes else None
    record |= {"policy": policy, "cache": cache, "rate": load.rate if load.rate != math.inf else None}
    record |= {"max_concurrency": load.max_concurrency or None, "max_num_seqs": settings.max_num_seqs}
    record |= {"max_num_batched_tokens": limits.max_num_batched_tokens, "seed": load.seed}
    record |= {"slo_ttft": settings.slo_ttft or None, "slo_tpot": settings.slo_tpot or None, "found_rate": None}
    record |= _drafted(drafting, served)
    record |= summary(served, room.budget, settings.goals, load.is_open)
    typical = max(1, round(float(requests.input_len.mean()))), max(1, round(float(requests.output_len.mean())))
    most_served = capacity(steps, own, limits, *typical)
    record["capacity_requests_per_s"] = most_served if policy == "continuous" else None
    if record["diverges"] is not None and requests.rate > OVERLOAD * most_served:
        record["diverges"] = True  # too short a run for a queue to form, with a rate that no run could keep up with
    record["cost_per_million_tokens"] = None
    if settings.price_per_hour and record["output_tokens"]:
        seconds, tokens = record["duration_s"], record["output_tokens"]
        record["cost_per_million_tokens"] = cost_per_million(settings.price_per_hour, record["gpus"], seconds, tokens)
    step = Batch.decode(sum(typical), max(1, round(record["mean_batch_size"] or 1)))
    record |= served_errors(deployment, step)
    record["uncalibrated_share"] = float(deployment.uncalibrated_share(step))
    record["fallback"] = deployment.fallback(Batch.prefill(typical[0]), Batch.decode(sum(typical)))
    return Run(record, served, own, limits)


def served_errors(deployment: Deployment, step: Batch) -> dict[str, float | None]:
    """The 90th percentile of the error of each kind of figure against measured servers; None where it is not known.

    time_p90_error: that of the time per output token, as `latency` has it.
    """
    laws = deployment.calibration
    if not laws or deployment.time_basis != "calibrated":
        return dict.fromkeys(("time_p90_error", "tpot_p90_error", "ttft_p90_error", "throughput_p90_error"))
    kind = "mixture" if mixes(deployment.operators(step)) else "dense"
    known = {name: laws.validation.get(key) for name, key in ((n, f"{kind}{tail}") for n, tail in FIGURES.items())}  # type: ignore[call-overload]
    found = {f"{name}_p90_error": v.p90_abs_error if v else None for name, v in known.items()}
    return {"time_p90_error": found["tpot_p90_error"], **found}


def _scheduling(engine: Engine | None, settings: ServerSettings) -> Scheduling:
    """How the engine fills its passes, with the settings that are its own."""
    if settings.scheduler_recv_interval > 1 and (engine is None or engine.stack != "sglang"):
        raise UserError("scheduler-recv-interval is SGLang's", hint="Add --stack sglang")
    return scheduling_of(engine)._replace(receive_interval=settings.scheduler_recv_interval)


def _prefixes(load: Load, requests: Requests, pool: Pool, block_size: int) -> Prefixes | None:
    """What a prefix cache finds: by the rate asked for, else by the prefixes that a trace names."""
    if load.prefix_hit_rate:
        return Shared(load.prefix_hit_rate, block_size)
    if not isinstance(requests, Prefixed):
        return None
    return Kept(requests.prefix_id.tolist(), requests.prefix_len.tolist(), pool, block_size)


def _tokens_of_a_pass(deployment: Deployment) -> int:
    return ENGINES["none"].defaults(deployment.gpu, deployment.parallelism, None, 0, deployment.model).tokens


def _drafting(deployment: Deployment, settings: ServerSettings, seed: int) -> Drafting | None:
    if not settings.draft:
        return None
    draft = msgspec.structs.replace(deployment, model=draft_model(deployment.model, settings.draft))
    accepted = ACCEPTANCE if settings.acceptance_rate is None else settings.acceptance_rate
    return Drafting(draft, settings.num_speculative_tokens, accepted, seed)


def _drafted(drafting: Drafting | None, served: Served) -> dict[str, Any]:
    """tokens_per_step: of the verifications that were run, the last of an answer cut at its end."""
    if not drafting:
        return dict.fromkeys(("draft", "num_speculative_tokens", "acceptance_rate", "tokens_per_step"))
    verified = sum(log.verified for log in served.logs)
    return {
        "draft": drafting.draft.model.name,
        "num_speculative_tokens": drafting.drafted,
        "acceptance_rate": drafting.acceptance,
        "tokens_per_step": sum(log.yielded for log in served.logs) / verified if verified else None,
    }


def _limits(deployment: Deployment, settings: ServerSettings) -> Limits:
    rate = 0.0
    if settings.preemption == "swap":
        if not deployment.gpu.host_link_bytes_per_s:
            raise UserError(
                f"{deployment.gpu.name} gives no host_link_bytes_per_s to swap over", hint="Preemption by recompute needs none"
            )
        rate = deployment.gpu.host_link_bytes_per_s
    return Limits(
        max_num_seqs=deployment.parallelism.sequences(settings.max_num_seqs),
        max_num_batched_tokens=settings.max_num_batched_tokens or _tokens_of_a_pass(deployment),
        host_bytes_per_s=rate,
        batch_timeout=settings.batch_timeout,
    )
