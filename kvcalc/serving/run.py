"""`serve` as a call: a load, a server's settings, and the record of what came of it."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from kvcalc.capacity.engines import ENGINES
from kvcalc.errors import UserError, nearest
from kvcalc.serving.continuous import Limits
from kvcalc.serving.draw import draw, parse_lengths
from kvcalc.serving.latency import cost_per_million
from kvcalc.serving.metrics import Goals, summary
from kvcalc.serving.pool import Pool, pool
from kvcalc.serving.replica import MemoryOptions, capacity, memory
from kvcalc.serving.requests import MOST_REQUESTS, Requests, read_requests
from kvcalc.serving.simulation import Served, simulate
from kvcalc.serving.steps import Steps
from kvcalc.timing.deployment import Deployment

PREEMPTIONS = ("recompute", "swap")
DEFAULT_PROMPTS = 1000
OVERLOAD = 1.15  # times the capacity: what sharing passes could win is less


class Load(NamedTuple):
    """What comes in: a trace, or requests drawn at a rate (infinite: all at once). max_concurrency 0 is no limit."""

    trace: str = ""
    rate: float = math.inf
    burstiness: float = 1.0
    max_concurrency: int = 0
    num_prompts: int = 0
    input_len: str = "1000"
    output_len: str = "200"
    seed: int = 0

    @property
    def is_open(self) -> bool:
        """Whether requests come over time, whatever the server does."""
        return not self.max_concurrency and (bool(self.trace) or self.rate != math.inf)

    def requests(self) -> Requests:
        """Read or drawn. Raises UserError on what contradicts itself or lies outside its range."""
        if not 0 <= self.num_prompts <= MOST_REQUESTS:
            raise UserError(f"--num-prompts {self.num_prompts} is outside 0 to {MOST_REQUESTS:,}")
        if not 0 <= self.max_concurrency <= MOST_REQUESTS:
            raise UserError(f"--max-concurrency {self.max_concurrency} is outside 0 to {MOST_REQUESTS:,}")
        if self.trace:
            if self.rate != math.inf:
                raise UserError("--requests and --rate exclude each other: a trace has its own times")
            return read_requests(Path(self.trace), self.num_prompts or MOST_REQUESTS)
        lengths = parse_lengths(self.input_len, "input length"), parse_lengths(self.output_len, "output length")
        return draw(self.num_prompts or DEFAULT_PROMPTS, *lengths, self.rate, self.burstiness, self.seed)


class ServerSettings(msgspec.Struct, frozen=True):
    """Of the server. max_num_seqs is the whole replica's, as --batch-size is; max_num_batched_tokens of one dp rank's pass.

    0 leaves max_num_batched_tokens to the GPU's memory, max_model_len to the model, kv_cache_memory_bytes to `fit`.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 0
    max_model_len: int = 0
    preemption: str = "recompute"
    batch_timeout: float = 0.0
    block_size: int = 16
    gpu_memory_utilization: float = 0.92
    kv_cache_memory_bytes: int = 0
    price_per_hour: float = 0.0
    goals: Goals = Goals()

    def __post_init__(self) -> None:
        for name, least in (("max_num_seqs", 1), ("max_num_batched_tokens", 0), ("block_size", 1)):
            if not least <= getattr(self, name) <= 1 << 20:
                raise UserError(f"--{name.replace('_', '-')} {getattr(self, name)} is outside {least} to {1 << 20:,}")
        for name, value in (
            ("--batch-timeout", self.batch_timeout), ("--price-per-hour", self.price_per_hour),
            ("--slo-ttft", self.goals.ttft), ("--slo-tpot", self.goals.tpot),
        ):  # fmt: skip
            if not 0 <= value <= 1e9:
                raise UserError(f"{name} {value} is outside 0 to 10^9")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise UserError(f"--gpu-memory-utilization {self.gpu_memory_utilization} is not above 0 and at most 1")
        if self.preemption not in PREEMPTIONS:
            raise UserError(f"unknown preemption {self.preemption!r}", hint=nearest(self.preemption, PREEMPTIONS))


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
    limits = _limits(deployment, settings)
    share, given = settings.gpu_memory_utilization, settings.kv_cache_memory_bytes or None
    asked = MemoryOptions(settings.max_num_seqs, limits.max_num_batched_tokens, share, given)
    room, steps = memory(deployment, asked), Steps(deployment)
    most = int(requests.input_len.max() + requests.output_len.max())
    longest = settings.max_model_len or (most if cache == "paged" else deployment.model.max_context or most)
    own = pool(room.rows, room.budget, cache, settings.block_size, longest, most)
    served = simulate(requests, own, steps, limits, policy, load.max_concurrency, progress)
    record: dict[str, Any] = {
        "model": deployment.model.name,
        "gpu": deployment.gpu.name,
        "gpus": deployment.parallelism.gpus,
        "basis": deployment.basis,
    }
    record |= {"policy": policy, "cache": cache, "rate": load.rate if load.rate != math.inf else None}
    record |= {"max_concurrency": load.max_concurrency or None, "max_num_seqs": settings.max_num_seqs}
    record |= {"max_num_batched_tokens": limits.max_num_batched_tokens, "seed": load.seed}
    record |= summary(served, room.budget, settings.goals, load.is_open)
    typical = max(1, round(float(requests.input_len.mean()))), max(1, round(float(requests.output_len.mean())))
    most_served = capacity(steps, own, limits, *typical)
    record["capacity_requests_per_s"] = most_served if policy == "continuous" else None
    if load.is_open and requests.rate > OVERLOAD * most_served:
        record["diverges"] = True  # too short a run for a queue to form, with a rate that no run could keep up with
    record["cost_per_million_tokens"] = None
    if settings.price_per_hour and record["output_tokens"]:
        seconds, tokens = record["duration_s"], record["output_tokens"]
        record["cost_per_million_tokens"] = cost_per_million(settings.price_per_hour, record["gpus"], seconds, tokens)
    return Run(record, served, own, limits)


def _limits(deployment: Deployment, settings: ServerSettings) -> Limits:
    rate = 0.0
    if settings.preemption == "swap":
        if not deployment.gpu.host_link_bytes_per_s:
            raise UserError(
                f"{deployment.gpu.name} gives no host_link_bytes_per_s to swap over", hint="Use --preemption recompute"
            )
        rate = deployment.gpu.host_link_bytes_per_s
    return Limits(
        max_num_seqs=deployment.parallelism.sequences(settings.max_num_seqs),
        max_num_batched_tokens=settings.max_num_batched_tokens or ENGINES["none"].batched_tokens(deployment.gpu),
        host_bytes_per_s=rate,
        batch_timeout=settings.batch_timeout,
    )
