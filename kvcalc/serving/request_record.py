"""Time that a KV cache saves for one request, and why it may save almost nothing.

Without a cache, every step passes all tokens through the layers again. All of this work, except
the work of a run with a cache, is redundant. It may still cost no time: a pass over few tokens
takes as long as its launches and the reading of the weights, for any number of tokens. A cache
saves time only if a pass over all tokens takes longer than a pass over a single token.

The records of `latency`: a batch of equal requests, with speculation and without a cache.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from kvcalc.capacity.fit_records import batch_memory
from kvcalc.capacity.memory_budget import offloaded_bytes
from kvcalc.gpu.gpu import roofline, total_seconds
from kvcalc.layers.batch import Batch
from kvcalc.model.memory import fullest_stage
from kvcalc.model.precision import stored_as
from kvcalc.question.serving_options import LatencyOptions, check_steps
from kvcalc.records import Record
from kvcalc.serving.request_latency import (
    Latency,
    cost_per_million,
    passes_in_one,
    request,
    token_projections,
    without_cache,
)
from kvcalc.serving.speculation import (
    ACCEPTANCE,
    best_drafted,
    draft_model,
    expected_tokens,
    step_times,
    stops_paying,
)
from kvcalc.timing.deployment import TimedDeployment

MAX_CONTEXT = 1 << 20  # context up to which a step without the cache is searched
MAX_PASSES = 1 << 23  # passes of all requests
MAX_POINTS = 512  # steps of a request up to which NumPy is not imported


def doubling_context(
    deployment: TimedDeployment, batch_size: int = 1, all_positions: bool = False
) -> int | None:
    """Return the smallest context at which a step without the cache takes twice as long as with it.

    None if there is no such context up to 2^20 tokens or the positions of the model.
    """

    def doubled(context: int) -> bool:
        again = deployment.seconds(Batch.prefill(context, batch_size), all_positions)
        return bool(again >= 2 * deployment.seconds(Batch.decode(context, batch_size)))

    low, high = 1, min(MAX_CONTEXT, deployment.model.position_embeddings or MAX_CONTEXT)
    if not doubled(high):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if doubled(middle) else (middle + 1, high)
    return high


def latency_records(
    requests: Sequence[tuple[TimedDeployment, LatencyOptions]],
) -> list[Record]:
    """Return the `latency_record` of each request.

    Raises:
        UserError: All requests together take more than MAX_PASSES passes. A pass through a model
            with many kinds of layers counts as several.
    """
    passes = 0
    for deployment, options in requests:
        runs = 2 if options.no_cache else 1
        own_passes = runs * options.output_len + options.chunks
        passes += own_passes * passes_in_one(deployment.model)
    check_steps("passes of all requests", passes, MAX_PASSES)
    doubling: dict[Any, int | None] = {}  # shared, because no length matters
    records: list[Record] = []
    for requested_deployment, options in requests:
        deployment = with_host_weights(requested_deployment, options)
        record = _record(deployment, options)
        if options.no_cache:
            size, head = options.batch_size, options.head
            key = id(requested_deployment), size, options.cpu_offload_gb, head
            if key not in doubling:
                doubling[key] = doubling_context(deployment, size, head == "all")
            record = {**record, "no_cache_doubles_from": doubling[key]}
        records.append(record)
    return records


def latency_record(deployment: TimedDeployment, options: LatencyOptions) -> Record:
    """Return one configuration as a flat record.

    Fields:
        uncached_ttft_s: TTFT without the cached prefix; None without a prefix.
        energy_per_token_j: Energy per output token, with all GPUs at full power for the whole
            request. None if the GPU's power is unknown.
        fallback: Sentence with the data type of GEMMs if the GPU has no unit for the chosen one.
    """
    return latency_records([(deployment, options)])[0]


def _record(deployment: TimedDeployment, options: LatencyOptions) -> Record:
    """Return the record of a deployment whose host weights are already set."""
    input_len, batch_size = options.input_len, options.batch_size
    shape = input_len, options.output_len, batch_size
    chunk = options.max_num_batched_tokens
    latency = request(deployment, *shape, options.prefix_len, chunk, MAX_POINTS)
    uncached_ttft = None
    if options.prefix_len:
        uncached_ttft = request(deployment, input_len, 1, batch_size, chunk=chunk).ttft_s
    pooling = deployment.model.pooling
    last_step = Batch.decode(options.context, batch_size)
    if pooling:
        last_step = Batch.prefill(input_len, batch_size)
    record: dict[str, Any] = {
        **deployment.named,
        "batch_size": batch_size,
        "input_len": input_len,
        "output_len": options.output_len,
        "prefix_len": options.prefix_len,
        **latency._asdict(),
        "uncached_ttft_s": uncached_ttft,
        "speedup": None,
        "tokens_per_step": 1.0,
        "time_basis": deployment.time_basis,
        # no embedder was measured
        "time_p90_error": None if pooling else deployment.p90_error(last_step),
        "uncalibrated_share": float(deployment.uncalibrated_share(last_step)),
    }
    record |= _per_token(deployment, options, latency.e2e_s)
    host_bytes = deployment.host_weights
    record["cpu_offload_bytes"] = host_bytes
    record["cpu_offload_s"] = None
    if host_bytes:
        record["cpu_offload_s"] = deployment.host_seconds(deployment.operators(last_step))
    record |= request_memory(deployment, options)
    if options.no_cache:
        record |= _no_cache_fields(deployment, options, latency)
    draft = drafting(deployment, options)
    if draft:
        record |= _speculative(deployment, draft, options)
    passes = Batch.prefill(input_len, batch_size), last_step
    fallbacks = dict.fromkeys(d.fallback(*passes) for d in (deployment, draft) if d)
    return record | {"fallback": "; ".join(filter(None, fallbacks)) or None}


def _per_token(
    deployment: TimedDeployment, options: LatencyOptions, e2e_s: float | None
) -> Record:
    """Return rate, cost and energy of the output tokens, which take `e2e_s` seconds.

    An embedder has input tokens only.
    """
    gpus, power = deployment.parallelism.gpus, deployment.gpu.power_w
    size = options.batch_size
    tokens = size * options.output_len
    record: dict[str, Any] = {"output_tokens_per_s": tokens / e2e_s if e2e_s else None}
    if deployment.model.pooling:
        tokens = size * options.input_len
        record = {
            "output_tokens_per_s": None,
            "sequences_per_s": size / e2e_s if e2e_s else None,
        }
    if options.price_per_hour:
        record["cost_per_million_tokens"] = (
            cost_per_million(options.price_per_hour, gpus, e2e_s, tokens) if e2e_s else None
        )
    energy_j = power * gpus * e2e_s / tokens if power and e2e_s else None
    return record | {"energy_per_token_j": energy_j}


def _no_cache_fields(
    deployment: TimedDeployment, options: LatencyOptions, cached: Latency
) -> Record:
    """Return the fields of the same request without a cache, compared with the `cached` request.

    Fields:
        no_cache_redundant_flops_share: 1 − FLOPs with the cache / FLOPs without. 0 if chunks of a
            prompt, each with its LM head, take more FLOPs.
        no_cache_token_projections: Tokens of all sequences that pass through the layers.
        tpot_last_bound_s: Lower bound of the last step with the cache, from the datasheet only. It
            is mostly the reading of the weights; the remaining time of the step is launches.
        no_cache_doubles_from: Set by `latency_records`.
    """
    lengths, size = (options.input_len, options.output_len), options.batch_size
    plain = without_cache(deployment, *lengths, size, options.head == "all", MAX_POINTS)
    needed, processed = token_projections(*lengths)
    last = deployment.operators(Batch.decode(needed, size))
    return {f"no_cache_{key}": value for key, value in plain._asdict().items()} | {
        "speedup": plain.e2e_s / cached.e2e_s if plain.e2e_s and cached.e2e_s else None,
        "no_cache_head": options.head,
        "no_cache_redundant_flops_share": max(0.0, 1 - cached.flops / plain.flops),
        "no_cache_token_projections": size * processed,
        "no_cache_redundant_projections": size * (processed - needed),
        "tpot_last_bound_s": float(total_seconds(roofline(last, deployment.gpu))),
        "no_cache_doubles_from": None,
    }


def with_host_weights(deployment: TimedDeployment, options: LatencyOptions) -> TimedDeployment:
    """Return the deployment with the offloaded part of its weights in host memory."""
    if not options.cpu_offload_gb:
        return msgspec.structs.replace(deployment, host_weights=0)
    model = stored_as(deployment.model, deployment.precision)
    formats, ranks = deployment.formats, deployment.parallelism
    stage = fullest_stage(model, formats, ranks, 1, 1).number
    away = offloaded_bytes(model, formats, ranks, stage, options.cpu_offload_gb)
    return msgspec.structs.replace(deployment, host_weights=away)


def drafting(deployment: TimedDeployment, options: LatencyOptions) -> TimedDeployment | None:
    """Return the deployment of the draft model, configured as the target; None without a draft."""
    if not options.draft:
        return None
    return msgspec.structs.replace(
        deployment, model=draft_model(deployment.model, options.draft), host_weights=0
    )


def _speculative(
    deployment: TimedDeployment, draft: TimedDeployment, options: LatencyOptions
) -> Record:
    """Return the fields of one step of speculative decoding at mid length."""
    context = options.mid_length
    drafted = options.num_speculative_tokens
    accepted = ACCEPTANCE if options.acceptance_rate is None else options.acceptance_rate
    shape = deployment, draft, context, options.batch_size
    times = step_times(*shape, drafted) if drafted else best_drafted(*shape, accepted)
    return {
        "draft": draft.model.name,
        "num_speculative_tokens": times.drafted,
        "acceptance_rate": accepted,
        "tokens_per_step": expected_tokens(accepted, times.drafted),
        "draft_s": times.draft_s,
        "verify_s": times.verify_s,
        "speculative_tpot_s": times.per_token(accepted),
        "speculative_speedup": times.speedup(accepted),
        "stops_paying_at_batch": stops_paying(
            deployment, draft, context, times.drafted, accepted
        ),
        "draft_weight_bytes": draft.weight_bytes,
        "draft_cache_bytes": draft.cache_size(options.context, options.batch_size).stored,
    }


def request_memory(deployment: TimedDeployment, options: LatencyOptions) -> Record:
    """Return whether the requests fit, as in `batch_memory`, with the draft loaded too."""
    memory_options: dict[str, Any] = {
        "max_num_batched_tokens": options.max_num_batched_tokens,
        "cpu_offload_gb": options.cpu_offload_gb,
        "shared_prefix": options.prefix_len,
    }
    if options.draft == "mtp":
        memory_options["mtp"] = True
    elif options.draft:
        memory_options["draft"] = draft_model(deployment.model, options.draft)
    if options.draft:
        memory_options["num_speculative_tokens"] = options.num_speculative_tokens
    return batch_memory(deployment, [(options.batch_size, options.context)], **memory_options)
