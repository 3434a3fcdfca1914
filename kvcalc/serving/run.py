"""`serve` as a call: a load, a server's settings, and the record of what came of it."""

from collections.abc import Callable
from functools import cache as cache_calls
from typing import Any, NamedTuple

import msgspec

from kvcalc.capacity import FitOptions
from kvcalc.capacity.engines import ENGINES
from kvcalc.capacity.engines.content import Content
from kvcalc.capacity.room import transfer_rate
from kvcalc.errors import UserError
from kvcalc.serving.handover import Handover
from kvcalc.serving.load import Load
from kvcalc.serving.pool import Pool, make_pool
from kvcalc.serving.prefixes import Kept, Prefixes, Shared
from kvcalc.serving.published import scheduling_of
from kvcalc.serving.replica import Memory, memory
from kvcalc.serving.requests import Prefixed, Requests
from kvcalc.serving.scheduling import Limits, Scheduling
from kvcalc.serving.server_record import Asked, served_record
from kvcalc.serving.settings import ServerSettings
from kvcalc.serving.simulation import Served, simulate
from kvcalc.serving.speculation import ACCEPTANCE, Drafting, best_drafted, draft_model
from kvcalc.serving.steps import Steps
from kvcalc.serving.tables import Passes, Tables
from kvcalc.timing.deployment import Deployment
from kvcalc.timing.engine import Engine, engine_of


class Run(NamedTuple):
    """A simulated run: its record, logs, memory, limits, and the passes that it was timed by."""

    record: dict[str, Any]
    served: Served
    pool: Pool
    limits: Limits
    steps: Passes | None = None


def serve(
    deployment: Deployment,
    requests: Requests,
    load: Load,
    settings: ServerSettings,
    policy: str = "continuous",
    cache: str = "paged",
    progress: Callable[[int], None] | None = None,
    before: Run | None = None,
) -> Run:
    """Simulate `requests` on one replica. Raises UserError where the model does not fit, or an option cannot be met.

    before: a run whose tables of passes are taken where they are those of this one too; what comes of it is the same.
    """
    limits, drafting = _limits(deployment, settings), _drafting(deployment, settings, requests, load.seed)
    asked = FitOptions(
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        kv_cache_memory_bytes=settings.kv_cache_memory_bytes,
        mtp=settings.draft == "mtp",
        draft=drafting.draft.model if drafting and settings.draft != "mtp" else None,
    )
    room, most = memory(deployment, asked), int(requests.input_len.max() + requests.output_len.max())
    steps = _passes(deployment, drafting, policy, (most, limits.max_num_batched_tokens, limits.max_num_seqs), before)
    longest = settings.max_model_len or (most if cache == "paged" else deployment.model.max_context or most)
    own = make_pool(room.rows, room.budget, cache, settings.block_size, longest, most, steps.queries - 1)
    engine = engine_of(deployment.calibration.stack) if deployment.calibration else None
    clients, prefixes = load.clients(engine), _prefixes(load, requests, own, settings.block_size)
    if prefixes and policy != "continuous":
        raise UserError("a prefix cache is simulated under continuous batching", hint="Leave --policy out")
    if isinstance(prefixes, Kept) and cache != "paged":
        raise UserError("prefixes that requests share need pages", hint="Leave --cache out")
    if isinstance(prefixes, Kept) and steps.ranks * (settings.prefill_replicas if settings.disaggregate else 1) > 1:
        raise UserError("prefixes of a trace are simulated on one data-parallel rank, and one replica for prompts")
    apart = _handover(deployment, settings, room)
    how = _scheduling(engine, settings)
    served = simulate(requests, own, steps, limits, policy, clients, progress, how, prefixes, apart)
    so = Asked(deployment, load, clients, settings, policy, cache, prefixes is not None, apart)
    return Run(served_record(so, served, steps, own, limits), served, own, limits, steps)


def _passes(
    deployment: Deployment, drafting: Drafting | None, policy: str, sizes: tuple[int, int, int], before: Run | None
) -> Passes:
    """What passes take; sizes: the longest request, tokens of a pass, and sequences at once, that tables are made for."""
    if policy != "continuous" or drafting:
        return Steps(deployment, drafting)
    known = before.steps if before else None
    if isinstance(known, Tables) and known.deployment is deployment and known.sizes == sizes:
        return known.again()
    return Tables(deployment, *sizes)


def _scheduling(engine: Engine | None, settings: ServerSettings) -> Scheduling:
    """How the engine fills its passes, with the settings that are its own."""
    if settings.scheduler_recv_interval > 1 and (engine is None or engine.stack != "sglang"):
        raise UserError("scheduler-recv-interval is SGLang's", hint="Add --engine sglang")
    return scheduling_of(engine)._replace(receive_interval=settings.scheduler_recv_interval)


def _handover(deployment: Deployment, settings: ServerSettings, room: Memory) -> Handover | None:
    """Prompts on replicas like this one, their caches going over a GPU's link as in `plan`; None where they are not apart."""
    if not settings.disaggregate:
        return None
    rate, content = transfer_rate(deployment.gpu), Content(room.rows)
    return Handover(settings.prefill_replicas, cache_calls(lambda tokens: content.needed(1, tokens) / rate))


def _prefixes(load: Load, requests: Requests, pool: Pool, block_size: int) -> Prefixes | None:
    """What a prefix cache finds: by the rate asked for, else by the prefixes that a trace names."""
    if load.prefix_hit_rate:
        return Shared(load.prefix_hit_rate, block_size)
    if not isinstance(requests, Prefixed):
        return None
    return Kept(requests.prefix_id.tolist(), requests.prefix_len.tolist(), pool, block_size)


def _tokens_of_a_pass(deployment: Deployment) -> int:
    return ENGINES["none"].defaults(deployment.gpu, deployment.parallelism, None, 0, deployment.model, 0).tokens


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
