"""`serve` as a call: a load, a server's settings, and the record of what came of it."""

import math
from collections.abc import Callable
from functools import cache as cache_calls
from functools import partial
from typing import Any, NamedTuple

import msgspec

from kvcalc.capacity import FitOptions
from kvcalc.capacity.answer import Capacity
from kvcalc.capacity.options import options_for
from kvcalc.capacity.room import transfer_rate
from kvcalc.errors import UserError
from kvcalc.serving.door import Clients
from kvcalc.serving.handover import Handover
from kvcalc.serving.load import Load
from kvcalc.serving.pool import BLOCK, Pool, make_pool
from kvcalc.serving.prefixes import Kept, Prefixes, Shared
from kvcalc.serving.published import scheduling_of
from kvcalc.serving.replica import memory
from kvcalc.serving.requests import Prefixed, Requests
from kvcalc.serving.saturation import make_backlog, saturated_rate
from kvcalc.serving.scheduling import Limits, Scheduling
from kvcalc.serving.server_record import Asked, served_record
from kvcalc.serving.settings import ServerSettings
from kvcalc.serving.simulation import Served, simulate
from kvcalc.serving.speculation import ACCEPTANCE, Drafting, best_drafted, draft_model
from kvcalc.serving.steps import Steps
from kvcalc.serving.tables import Passes, Tables
from kvcalc.timing.deployment import Deployment
from kvcalc.timing.engine import Engine, engine_of

MOST_SEATS = 256  # sequences at the same time, without an engine


class Server(NamedTuple):
    """A server that is set up: what all runs of it have in common, whatever the rate.

    load: without its rate and number of requests. room: memory of the cache. handover: of prompts on replicas of their own.
    """

    deployment: Deployment
    load: Load
    settings: ServerSettings
    policy: str
    cache: str
    limits: Limits
    drafting: Drafting | None
    room: Capacity
    handover: Handover | None
    scheduling: Scheduling

    def is_of(self, deployment: Deployment, load: Load, settings: ServerSettings, policy: str, cache: str) -> bool:
        """Return whether the server is set up for these."""
        alike = (self.load, self.settings, self.policy, self.cache) == (load, settings, policy, cache)
        return alike and self.deployment is deployment

    def run(
        self, requests: Requests, clients: Clients, progress: Callable[[int], None] | None = None, before: Passes | None = None
    ) -> tuple[Served, Pool, Passes]:
        """Simulate requests. before: passes of another run, whose tables are used if they reach as far."""
        settings, limits, cache = self.settings, self.limits, self.cache
        most = int(requests.input_len.max() + requests.output_len.max())
        sizes = most, limits.max_num_batched_tokens, limits.max_num_seqs
        steps = _passes(self.deployment, self.drafting, self.policy, sizes, before)
        longest = settings.max_model_len or (most if cache == "paged" else self.deployment.model.max_context or most)
        plan, ahead = self.room.plan, steps.queries - 1
        pool = make_pool(plan, self.room.content, self.room.kv_budget, cache, longest, most, ahead)
        prefixes = _prefixes(self.load, requests, pool, plan.block_size or BLOCK)
        served = simulate(requests, pool, steps, limits, self.policy, clients, progress, self.scheduling, prefixes, self.handover)
        return served, pool, steps

    @property
    def max_num_seqs(self) -> int:
        """Sequences that run at the same time in the whole replica."""
        return self.settings.max_num_seqs or self.limits.max_num_seqs * self.deployment.parallelism.dp


class ReadyServer(NamedTuple):
    """A server, the requests per second at which it saturates (None if it serves none), and the times of its passes."""

    server: Server
    capacity: float | None
    steps: Passes


class Run(NamedTuple):
    """A simulated run: its record, logs, memory, limits, the passes that it was timed by, and the server for further runs."""

    record: dict[str, Any]
    served: Served
    pool: Pool
    limits: Limits
    steps: Passes | None = None
    ready: ReadyServer | None = None


def serve(
    deployment: Deployment,
    requests: Requests,
    load: Load,
    settings: ServerSettings,
    policy: str = "continuous",
    cache: str = "paged",
    progress: Callable[[int], None] | None = None,
    before: ReadyServer | None = None,
) -> Run:
    """Simulate `requests` on one replica. Raises UserError where the model does not fit, or an option cannot be met.

    before: the server of another run. Used is what is that of this run too; the result is the same.
    """
    ready = prepare(deployment, requests, load, settings, policy, cache, before)
    server = ready.server
    engine = engine_of(deployment.calibration.stack) if deployment.calibration else None
    clients = load.clients(engine)
    served, pool, steps = server.run(requests, clients, progress, ready.steps)
    cached = bool(load.prefix_hit_rate) or isinstance(requests, Prefixed)
    asked = Asked(deployment, load, clients, settings, policy, cache, cached, server.handover)
    kv_budget = server.room.kv_budget
    record = served_record(asked, served, steps, kv_budget, server.limits, ready.capacity)
    return Run(record, served, pool, server.limits, steps, ready)


def prepare(
    deployment: Deployment,
    requests: Requests,
    load: Load,
    settings: ServerSettings,
    policy: str = "continuous",
    cache: str = "paged",
    before: ReadyServer | None = None,
) -> ReadyServer:
    """Return a server with the rate at which it saturates, which is found by simulating a backlog of such requests."""
    common = msgspec.structs.replace(load, rate=math.inf, num_prompts=0)
    if before and before.server.is_of(deployment, common, settings, policy, cache):
        return before
    server = _server(deployment, requests, common, settings, policy, cache)
    backlog = make_backlog(common, requests, server.max_num_seqs)
    served, _, steps = server.run(backlog, Clients(), before=before.steps if before else None)
    return ReadyServer(server, saturated_rate(served, server.max_num_seqs), steps)


def _server(deployment: Deployment, requests: Requests, load: Load, settings: ServerSettings, policy: str, cache: str) -> Server:
    """Set up a server. Raises UserError if options exclude each other."""
    drafting = _drafting(deployment, settings, requests, load.seed)
    longest = int(requests.input_len.max() + requests.output_len.max())
    room = memory(deployment, _fit_options(deployment, settings, drafting, longest))
    limits = _limits(deployment, settings, room, drafting)
    if (load.prefix_hit_rate or isinstance(requests, Prefixed)) and policy != "continuous":
        raise UserError("a prefix cache is simulated under continuous batching", hint="Leave --policy out")
    named = isinstance(requests, Prefixed) and not load.prefix_hit_rate
    if named and cache != "paged":
        raise UserError("prefixes that requests share need pages", hint="Leave --cache out")
    if named and deployment.parallelism.dp * (settings.prefill_replicas if settings.disaggregate else 1) > 1:
        raise UserError("prefixes of a trace are simulated on one data-parallel rank, and one replica for prompts")
    engine = engine_of(deployment.calibration.stack) if deployment.calibration else None
    handover, scheduling = _handover(deployment, settings, room), _scheduling(engine, settings)
    return Server(deployment, load, settings, policy, cache, limits, drafting, room, handover, scheduling)


def _fit_options(deployment: Deployment, settings: ServerSettings, drafting: Drafting | None, longest: int) -> FitOptions:
    """Return what `fit` is asked about this server."""
    return options_for(
        deployment,
        max_model_len=settings.max_model_len or longest,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        block_size=settings.block_size,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        kv_cache_memory_bytes=settings.kv_cache_memory_bytes,
        mtp=settings.draft == "mtp",
        draft=drafting.draft.model if drafting and settings.draft != "mtp" else None,
        num_speculative_tokens=drafting.drafted if drafting else 0,
    )


def _passes(
    deployment: Deployment, drafting: Drafting | None, policy: str, sizes: tuple[int, int, int], known: Passes | None
) -> Passes:
    """What passes take; sizes: the longest request, tokens of a pass, and sequences at once, that tables are made for."""
    if policy != "continuous" or drafting:
        is_known = isinstance(known, Steps) and known.deployment is deployment and known.drafting == drafting
        return known if known and is_known else Steps(deployment, drafting)
    if isinstance(known, Tables) and known.deployment is deployment and known.covers(*sizes):
        return known.again()
    return Tables(deployment, *sizes)


def _scheduling(engine: Engine | None, settings: ServerSettings) -> Scheduling:
    """How the engine fills its passes, with the settings that are its own."""
    if settings.scheduler_recv_interval > 1 and (engine is None or engine.stack != "sglang"):
        raise UserError("scheduler-recv-interval is SGLang's", hint="Add --engine sglang")
    return scheduling_of(engine)._replace(receive_interval=settings.scheduler_recv_interval)


def _handover(deployment: Deployment, settings: ServerSettings, room: Capacity) -> Handover | None:
    """Prompts on replicas like this one, their caches going over a GPU's link as in `plan`; None where they are not apart."""
    if not settings.disaggregate:
        return None
    rate, content = transfer_rate(deployment.gpu), room.content
    return Handover(settings.prefill_replicas, cache_calls(lambda tokens: content.needed(1, tokens) / rate))


def _prefixes(load: Load, requests: Requests, pool: Pool, block_size: int) -> Callable[[], Prefixes] | None:
    """Return what makes a prefix cache: of the given rate, or else of the prefixes that a trace names."""
    if load.prefix_hit_rate:
        return partial(Shared, load.prefix_hit_rate, pool, block_size)
    if not isinstance(requests, Prefixed):
        return None
    return partial(Kept, requests.prefix_id.tolist(), requests.prefix_len.tolist(), pool, block_size)


def _drafting(deployment: Deployment, settings: ServerSettings, requests: Requests, seed: int) -> Drafting | None:
    """How the server speculates: unless told, as many tokens as there are prediction layers, or as suit one request best."""
    context = max(1, round(float(requests.input_len.mean() + requests.output_len.mean() / 2)))
    if not settings.draft:
        return None
    draft = msgspec.structs.replace(deployment, model=draft_model(deployment.model, settings.draft))
    accepted = ACCEPTANCE if settings.acceptance_rate is None else settings.acceptance_rate
    drafted = settings.num_speculative_tokens
    if not drafted and settings.draft == "mtp" and deployment.model.mtp:
        drafted = deployment.model.mtp.layers
    return Drafting(draft, drafted or best_drafted(deployment, draft, context, 1, accepted).drafted, accepted, seed)


def _limits(deployment: Deployment, settings: ServerSettings, room: Capacity, drafting: Drafting | None) -> Limits:
    """Return the engine's limits of a rank, where the settings give none."""
    tokens = room.settings.max_num_batched_tokens
    seats = room.max_num_seqs if deployment.engine != "none" else MOST_SEATS
    if settings.max_num_seqs:
        seats = deployment.parallelism.sequences(settings.max_num_seqs)
    else:
        seats = max(1, min(seats, tokens // (drafting.drafted + 1 if drafting else 1)))
    rate = 0.0
    if settings.preemption == "swap":
        rate = deployment.gpu.host_rate(deployment.calibration is not None) or 0.0
        if not rate:
            raise UserError(
                f"{deployment.gpu.name} gives no host_link_bytes_per_s to swap over", hint="Preemption by recompute needs none"
            )
    return Limits(
        max_num_seqs=seats,
        max_num_batched_tokens=tokens,
        host_bytes_per_s=rate,
        batch_timeout=settings.batch_timeout,
    )
