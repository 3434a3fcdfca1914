"""Records of `latency` and `serve`: one request, and a server under load."""

from typing import Annotated, NotRequired, TypedDict

from kvcalc.records.figures import Figure
from kvcalc.records.size import (
    DeploymentRecord,
    DraftRecord,
    MemoryRecord,
    TimeBasisRecord,
)


class LatencyRecord(DeploymentRecord, TimeBasisRecord, MemoryRecord):
    """A batch of equal requests."""

    batch_size: Annotated[int, Figure("batch", "equal concurrent sequences", unit="sequences")]
    input_len: Annotated[int, Figure("in", "tokens of the prompt")]
    output_len: Annotated[int, Figure("out", "tokens of the answer")]
    prefix_len: Annotated[
        int, Figure("", "leading tokens of the prompt that are already cached")
    ]
    ttft_s: Annotated[
        float | None,
        Figure(
            "TTFT",
            "until the first token; null if the GPU has no bound for a prompt",
            mark="time",
            is_noted=True,
            formula="Σ operators of the prefill of {input_len} − {prefix_len} cached tokens",
        ),
    ]
    uncached_ttft_s: Annotated[
        float | None,
        Figure(
            "TTFT uncached",
            "without the cached prefix; null without a prefix",
            mark="time",
            is_noted=True,
        ),
    ]
    tpot_s: Annotated[
        float | None,
        Figure(
            "TPOT",
            "from one token to the next; null for an answer of one token",
            mark="time",
            is_noted=True,
            formula="mean of {output_len} − 1 decode steps, {tpot_first_s} to {tpot_last_s}",
        ),
    ]
    tpot_first_s: Annotated[
        float | None,
        Figure(
            "TPOT first",
            "after the shortest cache; null for an answer of one token",
            mark="time",
            is_noted=True,
        ),
    ]
    tpot_last_s: Annotated[
        float | None,
        Figure(
            "TPOT last",
            "after the longest; null for an answer of one token",
            mark="time",
            is_noted=True,
        ),
    ]
    e2e_s: Annotated[
        float | None,
        Figure(
            "end to end",
            "TTFT + (out − 1) · TPOT; null without ttft_s",
            mark="time",
            is_noted=True,
            formula="{ttft_s} + ({output_len} − 1) · {tpot_s}",
        ),
    ]
    flops: Annotated[int, Figure("FLOP", "FLOPs of all passes")]
    bytes: Annotated[int, Figure("bytes", "traffic of all passes", format="si B")]
    speedup: Annotated[
        float | None,
        Figure(
            "cache saves",
            "time without a cache ÷ time with it; null unless both were requested",
            unit="ratio",
            formula="{no_cache_e2e_s} / {e2e_s}",
        ),
    ]
    tokens_per_step: Annotated[float, Figure("", "per decode step, more than 1 with a draft")]
    output_tokens_per_s: Annotated[
        float | None,
        Figure(
            "tokens/s",
            "rate of all sequences; null without e2e_s",
            format="{:,.1f}",
            mark="rate",
            formula="{batch_size} · {output_len} / {e2e_s}",
        ),
    ]
    cost_per_million_tokens: NotRequired[
        Annotated[
            float | None,
            Figure(
                "per 1M tokens",
                "currency of --price-per-hour; null without e2e_s",
                unit="money",
                mark="time",
                is_noted=True,
                formula=(
                    "price · {gpus} GPUs · {e2e_s} / 3600 s / ({batch_size} · {output_len}) · "
                    "10^6"
                ),
            ),
        ]
    ]
    energy_per_token_j: Annotated[
        float | None,
        Figure(
            "J/token",
            "all GPUs at full power all the time; null if the power or e2e_s is unknown",
            is_noted=True,
        ),
    ]
    cpu_offload_bytes: Annotated[int, Figure("", "bytes of a GPU's weights in CPU memory")]
    cpu_offload_s: Annotated[
        float | None,
        Figure(
            "", "time of these weights on the link in a decode step; null without such weights"
        ),
    ]


class NoCacheRecord(LatencyRecord):
    """A batch of equal requests, also without a cache."""

    no_cache_ttft_s: Annotated[
        float | None,
        Figure("first token", "ttft_s without a cache; null if it is null", mark="time"),
    ]
    no_cache_tpot_s: Annotated[
        float | None, Figure("", "tpot_s without a cache; null for an answer of one token")
    ]
    no_cache_tpot_first_s: Annotated[
        float | None,
        Figure("", "tpot_first_s without a cache; null for an answer of one token"),
    ]
    no_cache_tpot_last_s: Annotated[
        float | None,
        Figure(
            "last token",
            "tpot_last_s without a cache; null for an answer of one token",
            mark="time",
        ),
    ]
    no_cache_e2e_s: Annotated[
        float | None,
        Figure("end to end", "e2e_s without a cache; null if it is null", mark="time"),
    ]
    no_cache_flops: Annotated[int, Figure("FLOP", "flops without a cache")]
    no_cache_bytes: Annotated[int, Figure("", "bytes without a cache")]
    no_cache_head: Annotated[str, Figure("head on", "positions of the LM head, last or all")]
    no_cache_redundant_flops_share: Annotated[
        float,
        Figure(
            "redundant",
            "1 − FLOPs with the cache ÷ FLOPs without it; 0 if chunks of a prompt need more",
            format="{:.1%}",
        ),
    ]
    no_cache_token_projections: Annotated[
        int,
        Figure("token projections", "tokens that pass through the layers, for all sequences"),
    ]
    no_cache_redundant_projections: Annotated[
        int, Figure("redundant", "token projections beyond one per token")
    ]
    tpot_last_bound_s: Annotated[
        float, Figure("", "datasheet bound of the last step with the cache")
    ]
    no_cache_doubles_from: Annotated[
        int | None,
        Figure(
            "",
            "smallest context at which a step without the cache takes twice as long; null if "
            "there is none",
            unit="tokens",
        ),
    ]


class SpeculationRecord(TypedDict):
    """One step of speculative decoding at mid length."""

    draft: Annotated[str, Figure("draft", "draft model or method")]
    num_speculative_tokens: Annotated[int, Figure("drafted", "drafted per step")]
    acceptance_rate: Annotated[
        float,
        Figure("accepted", "accepted part of drafted tokens", format="{:.0%}", unit="share"),
    ]
    tokens_per_step: Annotated[
        float,
        Figure(
            "tokens/step",
            "per decode step, more than 1 with a draft",
            format="{:.4f}",
            formula="Σ {acceptance_rate}^i for i from 0 to {num_speculative_tokens}",
        ),
    ]
    draft_s: Annotated[float, Figure("drafting", "time to draft the tokens", mark="time")]
    verify_s: Annotated[float, Figure("verifying", "time to verify the tokens", mark="time")]
    speculative_tpot_s: Annotated[
        float,
        Figure(
            "TPOT",
            "time per further token",
            mark="time",
            formula="({draft_s} + {verify_s}) / {tokens_per_step}",
        ),
    ]
    speculative_speedup: Annotated[
        float, Figure("speed-up", "tpot_s without the draft ÷ tpot_s with it", format="{:.2f}×")
    ]
    stops_paying_at_batch: Annotated[
        int | None,
        Figure(
            "stops paying at batch",
            "smallest batch at which the draft costs more than it saves; null if there is none",
            unit="sequences",
        ),
    ]
    draft_weight_bytes: Annotated[int, Figure("draft weights", "weights of the draft")]
    draft_cache_bytes: Annotated[
        int, Figure("draft cache", "cache of the draft, for all sequences")
    ]


class LoadRecord(TypedDict):
    """Load and settings of a server."""

    client: Annotated[str, Figure("", "arrival process: open, closed, inferencex or aiperf")]
    think_time_s: Annotated[
        float | None,
        Figure("", "from an answer to the client's next request; null in an open loop"),
    ]
    front_end_s: Annotated[
        float | None,
        Figure("", "time of a request before and after the engine; null if unknown"),
    ]
    prefix_hit_rate: Annotated[
        float | None,
        Figure(
            "prefix hits",
            "part of each prompt that begins with the cached prefix, as requested; null without "
            "a prefix",
            format="{:.3g}",
            unit="share",
        ),
    ]
    prefix_hit_share: Annotated[
        float | None,
        Figure("", "part of prompt tokens found in a prefix cache; null without a prefix"),
    ]
    policy: Annotated[str, Figure("policy", "static or continuous")]
    cache: Annotated[str, Figure("cache", "contiguous or paged")]
    rate: Annotated[
        float | None,
        Figure(
            "offered req/s",
            "offered requests; null if all arrive together or in a closed loop",
            format="{:.4g}",
            unit="requests a second",
        ),
    ]
    max_concurrency: Annotated[
        int | None, Figure("clients", "concurrent clients; null in an open loop")
    ]
    max_num_seqs: Annotated[int, Figure("", "setting of the engine")]
    max_num_batched_tokens: Annotated[int, Figure("", "setting of the engine")]
    seed: Annotated[int, Figure("", "seed of random numbers")]
    slo_ttft: Annotated[
        float | None, Figure("", "target; null without a target", unit="seconds")
    ]
    slo_tpot: Annotated[
        float | None, Figure("", "target; null without a target", unit="seconds")
    ]
    found_rate: Annotated[
        float | None,
        Figure(
            "",
            "highest rate that is sustained and meets the targets; null unless requested",
            unit="requests a second",
        ),
    ]
    num_speculative_tokens_from: Annotated[
        str | None,
        Figure(
            "",
            "source of a default num_speculative_tokens; null if it was given, or without a "
            "draft",
        ),
    ]
    prefill_replicas: Annotated[
        int,
        Figure(
            "", "replicas that process only prompts; 0 if prompts and decodes share a replica"
        ),
    ]
    total_gpus: Annotated[int, Figure("", "GPUs of the replica and of prefill replicas")]
    transfer_s: Annotated[
        float | None,
        Figure(
            "",
            "mean time of a prompt's cache on the link to the decode replica; null without "
            "disaggregated prefill",
        ),
    ]
    tokens_per_step: Annotated[
        float | None,
        Figure("tokens/step", "per verification; null without a draft", format="{:.2f}"),
    ]


class ServeRecord(DeploymentRecord, DraftRecord, LoadRecord, TimeBasisRecord):
    """A server under load."""

    requests: Annotated[int, Figure("", "arrived requests")]
    completed: Annotated[int, Figure("done", "answered requests")]
    rejected: Annotated[int, Figure("rejected", "requests that can never fit")]
    input_tokens: Annotated[int, Figure("", "tokens of answered requests")]
    output_tokens: Annotated[int, Figure("", "tokens of answered requests")]
    duration_s: Annotated[float, Figure("", "from the first arrival to the last token")]
    throughput_tokens_per_s: Annotated[
        float | None,
        Figure(
            "tokens/s",
            "output tokens; null without an answer",
            mark="rate",
            is_noted=True,
            formula="{output_tokens} tokens / {duration_s}",
        ),
    ]
    total_tokens_per_s: Annotated[
        float | None, Figure("", "input and output tokens; null without an answer")
    ]
    requests_per_s: Annotated[
        float | None,
        Figure(
            "req/s",
            "answered requests; null without an answer",
            mark="rate",
            formula="{completed} requests / {duration_s}",
        ),
    ]
    ttft_mean_s: Annotated[
        float | None, Figure("", "from arrival to first token; null without an answer")
    ]
    ttft_p50_s: Annotated[
        float | None,
        Figure(
            "TTFT p50",
            "until the first token, for half of the requests; null without an answer",
            mark="time",
            is_noted=True,
        ),
    ]
    ttft_p90_s: Annotated[float | None, Figure("", "90th percentile; null without an answer")]
    ttft_p99_s: Annotated[
        float | None, Figure("TTFT p99", "99th percentile; null without an answer", mark="time")
    ]
    tpot_mean_s: Annotated[
        float | None,
        Figure("", "time after the first token ÷ further tokens; null without further tokens"),
    ]
    tpot_p50_s: Annotated[
        float | None,
        Figure(
            "TPOT p50",
            "from one token to the next; null without further tokens",
            mark="time",
            is_noted=True,
        ),
    ]
    tpot_p90_s: Annotated[
        float | None, Figure("", "90th percentile; null without further tokens")
    ]
    tpot_p99_s: Annotated[
        float | None,
        Figure("TPOT p99", "99th percentile; null without further tokens", mark="time"),
    ]
    e2e_mean_s: Annotated[
        float | None, Figure("", "from arrival to last token; null without an answer")
    ]
    e2e_p50_s: Annotated[
        float | None,
        Figure(
            "end to end p50",
            "until the last token, median; null without an answer",
            mark="time",
            is_noted=True,
        ),
    ]
    e2e_p90_s: Annotated[float | None, Figure("", "90th percentile; null without an answer")]
    e2e_p99_s: Annotated[float | None, Figure("", "99th percentile; null without an answer")]
    queueing_mean_s: Annotated[
        float | None,
        Figure(
            "queueing",
            "mean until work begins; null without an answer",
            mark="time",
            is_noted=True,
        ),
    ]
    prefill_utilization: Annotated[
        float | None,
        Figure(
            "", "busy time of prefill replicas; null without prefill replicas", unit="share"
        ),
    ]
    decode_queueing_mean_s: Annotated[
        float | None,
        Figure(
            "",
            "from first token to the first pass on the decode replica; null without "
            "disaggregated prefill",
        ),
    ]
    goodput_requests_per_s: Annotated[
        float | None, Figure("", "requests that meet every target; null without a target")
    ]
    slo_attainment: Annotated[
        float | None,
        Figure(
            "within SLO",
            "answered requests that meet every target; null without a target",
            format="{:.1%}",
            unit="share",
            mark="rate",
        ),
    ]
    padding_waste: Annotated[
        float | None,
        Figure(
            "padding",
            "padded slots ÷ all token slots; null without a pass",
            format="{:.1%}",
            formula="{padded_slots} / {token_slots}",
        ),
    ]
    padded_slots: Annotated[int, Figure("", "token slots with padding")]
    token_slots: Annotated[int, Figure("", "token slots of all passes")]
    kv_waste: Annotated[
        float | None,
        Figure(
            "KV waste",
            "allocated, but no token in it; null without an allocation",
            format="{:.1%}",
            is_noted=True,
        ),
    ]
    kv_peak: Annotated[
        float | None,
        Figure(
            "KV peak",
            "maximum allocated part of the budget; null without a budget",
            format="{:.1%}",
            unit="share",
            formula="{kv_peak_bytes} / {kv_budget_bytes}",
        ),
    ]
    kv_peak_bytes: Annotated[int, Figure("", "maximum allocated bytes")]
    kv_budget_bytes: Annotated[int, Figure("", "KV cache budget")]
    preemptions: Annotated[int, Figure("preempted", "preempted requests")]
    recomputed_tokens: Annotated[int, Figure("", "tokens of preempted requests")]
    passes: Annotated[int, Figure("", "executed passes")]
    mean_batch_size: Annotated[
        float | None,
        Figure(
            "batch",
            "sequences per pass, weighted by time; null without a pass",
            format="{:.1f}",
        ),
    ]
    utilization: Annotated[
        float | None, Figure("", "busy time of the GPU; null without an answer", unit="share")
    ]
    mean_in_system: Annotated[
        float | None,
        Figure("", "waiting and running requests, weighted by time; null without an answer"),
    ]
    diverges: Annotated[
        bool | None,
        Figure(
            "queue",
            "whether the rate exceeds capacity_requests_per_s; null in a closed loop, or with "
            "too few requests",
            format="queue",
        ),
    ]
    capacity_requests_per_s: Annotated[
        float | None,
        Figure("", "maximum rate if requests always wait; null if the server serves none"),
    ]
    cost_per_million_tokens: Annotated[
        float | None,
        Figure(
            "per 1M tokens",
            "currency of --price-per-hour; null without a price",
            unit="money",
            mark="time",
            is_noted=True,
            formula="price · {gpus} GPUs · {duration_s} / 3600 s / {output_tokens} tokens · 10^6",
        ),
    ]
    tpot_p90_error: Annotated[
        float | None,
        Figure("", "90th percentile of the error of TPOT on measured servers; null if unknown"),
    ]
    ttft_p90_error: Annotated[
        float | None, Figure("", "90th percentile of the error of TTFT; null if unknown")
    ]
    throughput_p90_error: Annotated[
        float | None, Figure("", "90th percentile of the error of tokens/s; null if unknown")
    ]


class PassRecord(TypedDict):
    """Consecutive passes of a timeline over the same sequences."""

    rank: Annotated[int, Figure("", "data-parallel rank; prefill replicas come last")]
    start_s: Annotated[
        float, Figure("", "start of the first pass of this line, from the first arrival")
    ]
    duration_s: Annotated[float, Figure("", "time of all passes of this line")]
    passes: Annotated[int, Figure("", "consecutive passes with the same sequences")]
    sequences: Annotated[int, Figure("", "per pass", unit="sequences")]
    tokens: Annotated[int, Figure("", "per pass")]
    prefill_tokens: Annotated[int, Figure("", "prompt tokens per pass")]
    waiting: Annotated[int, Figure("", "requests that are not admitted")]
    kv_allocated_bytes: Annotated[int, Figure("", "at the end")]
    kv_stored_bytes: Annotated[int, Figure("", "at the end")]
