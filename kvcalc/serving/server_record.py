"""The record of a simulated server: what was asked of it, what came of that, and how far off its figures may be."""

import math
from typing import Any, NamedTuple

from kvcalc.layers.batch import Batch
from kvcalc.serving.door import Clients
from kvcalc.serving.handover import Handover
from kvcalc.serving.latency import cost_per_million
from kvcalc.serving.load import Load
from kvcalc.serving.metrics import summary
from kvcalc.serving.scheduling import Limits
from kvcalc.serving.settings import ServerSettings
from kvcalc.serving.simulation import Served
from kvcalc.serving.speculation import Drafting
from kvcalc.serving.tables import Passes
from kvcalc.timing.deployment import Deployment
from kvcalc.timing.steps import mixes

FIGURES = {"tpot": "", "ttft": "_ttft", "throughput": "_throughput"}  # of a server, by how calibrations name their errors
FEW_REQUESTS = 10  # of a trace, which do not tell a rate


class Asked(NamedTuple):
    """Of a run: the server's deployment, its load and who asks, its settings, and how it is set up. cached: by prefix."""

    deployment: Deployment
    load: Load
    clients: Clients
    settings: ServerSettings
    policy: str
    cache: str
    cached: bool
    handover: Handover | None


def served_record(
    asked: Asked, served: Served, steps: Passes, kv_budget: int, limits: Limits, capacity: float | None
) -> dict[str, Any]:
    """The summary of a run, flat. capacity: requests per second at which the server saturates.

    total_gpus: of the replica and of those for prompts alone, whose price is paid too.
    """
    deployment, load, settings, requests = asked.deployment, asked.load, asked.settings, served.requests
    record: dict[str, Any] = deployment.named | {"time_basis": deployment.time_basis}
    record |= _load(asked, served)
    record |= {"policy": asked.policy, "cache": asked.cache, "rate": load.rate if load.rate != math.inf else None}
    record |= {
        "max_concurrency": load.max_concurrency or None,
        "max_num_seqs": settings.max_num_seqs or limits.max_num_seqs * deployment.parallelism.dp,
    }
    record |= {"max_num_batched_tokens": limits.max_num_batched_tokens, "seed": load.seed}
    record |= {"slo_ttft": settings.slo_ttft or None, "slo_tpot": settings.slo_tpot or None, "found_rate": None}
    record |= _drafted(steps.drafting, served)
    record["num_speculative_tokens_from"] = _chosen(settings)
    record |= _handed(asked, served, record["gpus"])
    record |= summary(served, kv_budget, settings.goals)
    record |= {"diverges": _diverges(load, served, capacity), "capacity_requests_per_s": capacity}
    typical = max(1, round(float(requests.input_len.mean()))), max(1, round(float(requests.output_len.mean())))
    record["cost_per_million_tokens"] = None
    if settings.price_per_hour and record["output_tokens"]:
        seconds, tokens = record["duration_s"], record["output_tokens"]
        record["cost_per_million_tokens"] = cost_per_million(settings.price_per_hour, record["total_gpus"], seconds, tokens)
    step = Batch.decode(sum(typical), max(1, round(record["mean_batch_size"] or 1)))
    record |= served_errors(deployment, step, apart=asked.handover is not None)
    record["uncalibrated_share"] = float(deployment.uncalibrated_share(step))
    record["fallback"] = deployment.fallback(Batch.prefill(typical[0]), Batch.decode(sum(typical)))
    return record


def _diverges(load: Load, served: Served, capacity: float | None) -> bool | None:
    """Return whether the queue grows without end: whether more requests come than the server serves at saturation.

    None if requests wait for answers, or if a trace has too few of them. Requests that are too long to be served do not count.
    """
    given_rate = load.rate != math.inf
    if not load.is_open or not capacity or not (given_rate or len(served.requests) > FEW_REQUESTS):
        return None
    rejected = sum(int(log.rejected.sum()) for log in served.logs)
    arriving = load.rate if given_rate else served.requests.rate
    return arriving * (1 - rejected / len(served.requests)) > capacity


def _load(asked: Asked, served: Served) -> dict[str, Any]:
    """Who asks. prefix_hit_share: of the prompts' tokens, those that a prefix cache held."""
    clients, lens = asked.clients, served.requests.input_len
    held = sum(log.found_tokens for log in (*served.logs, *served.prefill))
    return {
        "client": asked.load.kind,
        "think_time_s": asked.load.think_time or None,
        "front_end_s": clients.path_s + clients.path_s_per_token * float(lens.mean()) or None,
        "prefix_hit_rate": asked.load.prefix_hit_rate or None,
        "prefix_hit_share": held / int(lens.sum()) if asked.cached else None,
    }


def _handed(asked: Asked, served: Served, gpus: int) -> dict[str, Any]:
    """transfer_s: mean seconds that a prompt's cache takes the link to the replica that decodes."""
    if not asked.handover:
        return {"prefill_replicas": 0, "total_gpus": gpus, "transfer_s": None}
    lens = served.requests.input_len.tolist()
    seconds = sum(asked.handover.seconds(n) for n in lens) / len(lens)
    replicas = asked.handover.replicas
    return {"prefill_replicas": replicas, "total_gpus": gpus * (1 + replicas), "transfer_s": seconds}


def served_errors(deployment: Deployment, step: Batch, apart: bool) -> dict[str, float | None]:
    """The 90th percentile of the error of each kind of figure against measured servers; None where it is not known,
    as of prompts and decodes apart, and of steps of which `latency` knows none.

    time_p90_error: that of the time per output token, as `latency` has it.
    """
    laws = deployment.calibration
    if apart or not laws or deployment.p90_error(step) is None:
        return dict.fromkeys(("time_p90_error", "tpot_p90_error", "ttft_p90_error", "throughput_p90_error"))
    kind = "mixture" if mixes(deployment.operators(step)) else "dense"
    known = {name: laws.validation.get(key) for name, key in ((n, f"{kind}{tail}") for n, tail in FIGURES.items())}  # type: ignore[call-overload]
    found = {f"{name}_p90_error": v.p90_abs_error if v else None for name, v in known.items()}
    return {"time_p90_error": found["tpot_p90_error"], **found}


def _chosen(settings: ServerSettings) -> str | None:
    """Where the number of drafted tokens comes from if nobody gave it."""
    if not settings.draft or settings.num_speculative_tokens:
        return None
    return "one for each prediction layer" if settings.draft == "mtp" else "the best for one request at a time"


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
