"""Records of `latency` and `serve`: one request, and a server under load."""

from typing import Annotated, NotRequired, TypedDict

from kvcalc.records.figures import FloatOrNull, Formula, IntOrNull, TextOrNull
from kvcalc.records.size import (
    DeploymentRecord,
    DraftRecord,
    HostWeightsRecord,
    MemoryRecord,
    TimeBasisRecord,
)


class LatencyRecord(DeploymentRecord, TimeBasisRecord, MemoryRecord, HostWeightsRecord):
    """Times of a batch of equal requests that start together, on one replica.

    `tpot_first_s` and `tpot_last_s` are the seconds of the first and the last decode step. FLOPs
    and bytes are of one GPU; with pipeline parallelism, they are sums over one GPU of each stage.
    Prices and energy are of all GPUs of the replica, per output token. After a key's meaning come
    the heading and the format of its table column.
    """

    batch_size: Annotated[int, "equal concurrent sequences", "batch"]
    input_len: Annotated[int, "tokens of the prompt", "in"]
    output_len: Annotated[int, "tokens of the answer", "out"]
    prefix_len: Annotated[int, "leading tokens of the prompt that are already cached"]
    ttft_s: Annotated[
        FloatOrNull,
        "until the first token; null if the GPU has no bound for a prompt",
        "TTFT",
        Formula("Σ operators of the prefill of {input_len} − {prefix_len} cached tokens"),
    ]
    uncached_ttft_s: Annotated[
        FloatOrNull, "without the cached prefix; null without a prefix", "TTFT uncached"
    ]
    tpot_s: Annotated[
        FloatOrNull,
        "from one token to the next; null for an answer of one token",
        "TPOT",
        Formula("mean of {output_len} − 1 decode steps, {tpot_first_s} to {tpot_last_s}"),
    ]
    tpot_first_s: Annotated[
        FloatOrNull, "after the shortest cache; null for an answer of one token", "TPOT first"
    ]
    tpot_last_s: Annotated[
        FloatOrNull, "after the longest; null for an answer of one token", "TPOT last"
    ]
    e2e_s: Annotated[
        FloatOrNull,
        "TTFT + (out − 1) · TPOT; null without ttft_s",
        "end to end",
        Formula("{ttft_s} + ({output_len} − 1) · {tpot_s}"),
    ]
    flops: Annotated[int, "FLOPs of all passes", "FLOP"]
    bytes: Annotated[int, "traffic of all passes", "bytes", "decimal bytes"]
    speedup: Annotated[
        FloatOrNull,
        "time without a cache ÷ time with it; null unless both were requested",
        "cache saves",
        Formula("{no_cache_e2e_s} / {e2e_s}"),
    ]
    max_tpot_s: Annotated[FloatOrNull, "option --max-tpot; null without it"]
    tokens_per_step: Annotated[float, "per decode step, more than 1 with a draft"]
    decode_tokens_per_s: Annotated[
        FloatOrNull,
        "rate of all sequences after the first token; null for an answer of one token",
        "tokens/s",
        "{:,.1f}",
        Formula("{batch_size} / {tpot_s}"),
    ]
    output_tokens_per_s: Annotated[
        FloatOrNull,
        "batch_size · output_len / e2e_s, or output_throughput; null without e2e_s",
        "end-to-end tokens/s",
        "{:,.1f}",
    ]
    output_throughput: NotRequired[
        Annotated[float, "option --output-throughput", "tokens/s", "{:,.1f}"]
    ]
    sequences_per_s: NotRequired[
        Annotated[
            FloatOrNull,
            "sequences that an embedder or reranker reads; null without e2e_s",
            "sequences/s",
            "{:,.1f}",
            Formula("{batch_size} / {e2e_s}"),
        ]
    ]
    cost_per_million_tokens: NotRequired[
        Annotated[
            FloatOrNull,
            "currency of --price-per-hour; null without e2e_s",
            "per 1M tokens",
            Formula("price · {gpus} GPUs / 3600 s / {output_tokens_per_s} · 10^6"),
        ]
    ]
    decode_cost_per_million_tokens: NotRequired[
        Annotated[
            float,
            "part of it for decode steps",
            "decoding per 1M",
            Formula("price · {gpus} GPUs / 3600 s / {decode_tokens_per_s} · 10^6"),
        ]
    ]
    energy_per_token_j: Annotated[
        FloatOrNull,
        "all GPUs at full power all the time; null if the power or e2e_s is unknown",
        "J/token",
    ]


class NoCacheRecord(LatencyRecord):
    """Times of a batch of equal requests, with and without a KV cache.

    Without a cache, each new token needs a forward pass over all earlier tokens. A token projection
    is one token that passes through all layers once; it is redundant if the token has passed
    before. "Null if it is null" means that the key of the same name without `no_cache_` is null.
    """

    no_cache_ttft_s: Annotated[
        FloatOrNull, "ttft_s without a cache; null if it is null", "first token"
    ]
    no_cache_tpot_s: Annotated[
        FloatOrNull, "tpot_s without a cache; null for an answer of one token"
    ]
    no_cache_tpot_first_s: Annotated[
        FloatOrNull, "tpot_first_s without a cache; null for an answer of one token"
    ]
    no_cache_tpot_last_s: Annotated[
        FloatOrNull,
        "tpot_last_s without a cache; null for an answer of one token",
        "last token",
    ]
    no_cache_e2e_s: Annotated[
        FloatOrNull, "e2e_s without a cache; null if it is null", "end to end"
    ]
    no_cache_flops: Annotated[int, "flops without a cache", "FLOP"]
    no_cache_bytes: Annotated[int, "bytes without a cache"]
    no_cache_head: Annotated[str, "positions of the LM head, last or all", "LM head on"]
    no_cache_redundant_flops_share: Annotated[
        float,
        "1 − FLOPs with the cache ÷ FLOPs without it; 0 if chunks of a prompt need more",
        "redundant",
    ]
    no_cache_token_projections: Annotated[
        int, "tokens that pass through the layers, for all sequences", "token projections"
    ]
    no_cache_redundant_projections: Annotated[
        int, "token projections beyond one per token", "redundant projections"
    ]
    tpot_last_bound_s: Annotated[float, "datasheet bound of the last step with the cache"]
    no_cache_doubles_from: Annotated[
        IntOrNull,
        "smallest context at which a step without the cache takes twice as long; null if "
        "there is none",
    ]


class SpeculationRecord(TypedDict):
    """One decode step with speculative decoding, when half of the output is generated.

    Times and bytes are for the whole batch; bytes are of one GPU. `draft_s` is the seconds in which
    the draft model proposes `num_speculative_tokens` tokens, and `verify_s` the seconds of the
    target model's pass over them. After a key's meaning come the heading and the format of its
    table column.
    """

    draft: Annotated[str, "draft model or method", "draft"]
    num_speculative_tokens: Annotated[int, "drafted per step", "drafted"]
    acceptance_rate: Annotated[float, "accepted part of drafted tokens", "accepted", "{:.0%}"]
    tokens_per_step: Annotated[
        float,
        "per decode step, more than 1 with a draft",
        "tokens/step",
        "{:.2f}",
        Formula("Σ {acceptance_rate}^i for i from 0 to {num_speculative_tokens}"),
    ]
    draft_s: Annotated[float, "time to draft the tokens", "drafting"]
    verify_s: Annotated[float, "time to verify the tokens", "verifying"]
    speculative_tpot_s: Annotated[
        float,
        "time per further token",
        "TPOT",
        Formula("({draft_s} + {verify_s}) / {tokens_per_step}"),
    ]
    speculative_e2e_s: Annotated[
        FloatOrNull,
        "TTFT + (out − 1) · TPOT with the draft; null without ttft_s",
        "end to end",
        Formula("{ttft_s} + ({output_len} − 1) · {speculative_tpot_s}"),
    ]
    speculative_speedup: Annotated[
        float, "tpot_s without the draft ÷ tpot_s with it", "TPOT speed-up", "{:.2f}×"
    ]
    stops_paying_at_batch: Annotated[
        IntOrNull,
        "smallest batch at which the draft costs more than it saves; null if there is none",
        "stops paying at batch",
    ]
    draft_weight_bytes: Annotated[int, "weights of the draft", "draft weights"]
    draft_cache_bytes: Annotated[int, "cache of the draft, for all sequences", "draft cache"]


class LoadRecord(TypedDict):
    """Keys of a `serve` record about the load and the settings of the server.

    The server is one replica, or with disaggregated prefill one decode replica and
    `prefill_replicas`. Clients in an open loop send requests at `rate` per second; in a closed
    loop, each of `max_concurrency` clients waits for its answer. `client` is the load generator
    that is imitated; inferencex and aiperf are benchmark programs whose clients wait for answers.
    `slo_ttft` and `slo_tpot` are targets in seconds. Keys with `_s` are seconds. After a key's
    meaning come the heading and the format of its table column.
    """

    client: Annotated[str, "arrival process: open, closed, inferencex or aiperf"]
    think_time_s: Annotated[
        FloatOrNull, "from an answer to the client's next request; null in an open loop"
    ]
    front_end_s: Annotated[
        FloatOrNull, "time of a request before and after the engine; null if unknown"
    ]
    prefix_hit_rate: Annotated[
        FloatOrNull,
        "part of each prompt that begins with the cached prefix, as requested; null without "
        "a prefix",
        "prefix hits",
        "{:.3g}",
    ]
    prefix_hit_share: Annotated[
        FloatOrNull, "part of prompt tokens found in a prefix cache; null without a prefix"
    ]
    policy: Annotated[str, "static or continuous", "policy"]
    cache: Annotated[str, "contiguous or paged", "cache"]
    rate: Annotated[
        FloatOrNull,
        "offered requests; null if all arrive together or in a closed loop",
        "offered req/s",
        "{:.4g}",
    ]
    max_concurrency: Annotated[IntOrNull, "concurrent clients; null in an open loop", "clients"]
    max_num_seqs: Annotated[int, "setting of the engine", "max seqs"]
    max_num_batched_tokens: Annotated[int, "setting of the engine", "batched tokens"]
    seed: Annotated[int, "seed of random numbers"]
    slo_ttft: Annotated[FloatOrNull, "target; null without a target"]
    slo_tpot: Annotated[FloatOrNull, "target; null without a target"]
    found_rate: Annotated[
        FloatOrNull,
        "highest rate that is sustained and meets the targets; null unless requested",
    ]
    num_speculative_tokens_from: Annotated[
        TextOrNull,
        "source of a default num_speculative_tokens; null if it was given, or without a draft",
    ]
    prefill_replicas: Annotated[
        int, "replicas that process only prompts; 0 if prompts and decodes share a replica"
    ]
    total_gpus: Annotated[int, "GPUs of the replica and of prefill replicas"]
    transfer_s: Annotated[
        FloatOrNull,
        "mean time of a prompt's cache on the link to the decode replica; null without "
        "disaggregated prefill",
    ]
    tokens_per_step: Annotated[
        FloatOrNull, "per verification; null without a draft", "tokens/step", "{:.2f}"
    ]


class ServeRecord(DeploymentRecord, DraftRecord, LoadRecord, TimeBasisRecord):
    """A simulated server under one load: latencies, rates and use of the KV cache.

    Counts and rates are of the whole replica. Percentiles are over requests. Shares and
    utilizations are from 0 to 1. A token slot is one position in the batch of a forward pass;
    static batching pads short sequences. `kv_peak_bytes` and `kv_budget_bytes` are of one GPU. If
    `diverges` is true, requests arrive faster than the server completes them, so that the queue
    grows without end. `…_error` of 0.1 means that 90% of predictions are within 10% of measured
    servers. After a key's meaning come the heading and the format of its table column.
    """

    requests: Annotated[int, "arrived requests"]
    completed: Annotated[int, "answered requests", "done"]
    rejected: Annotated[int, "requests that can never fit", "rejected"]
    input_tokens: Annotated[int, "tokens of answered requests"]
    output_tokens: Annotated[int, "tokens of answered requests"]
    duration_s: Annotated[float, "from the first arrival to the last token"]
    throughput_tokens_per_s: Annotated[
        FloatOrNull,
        "output tokens; null without an answer",
        "tokens/s",
        Formula("{output_tokens} tokens / {duration_s}"),
    ]
    total_tokens_per_s: Annotated[
        FloatOrNull, "input and output tokens; null without an answer"
    ]
    requests_per_s: Annotated[
        FloatOrNull,
        "answered requests; null without an answer",
        "req/s",
        Formula("{completed} requests / {duration_s}"),
    ]
    ttft_mean_s: Annotated[FloatOrNull, "from arrival to first token; null without an answer"]
    ttft_p50_s: Annotated[
        FloatOrNull,
        "until the first token, for half of the requests; null without an answer",
        "TTFT p50",
    ]
    ttft_p90_s: Annotated[FloatOrNull, "90th percentile; null without an answer"]
    ttft_p99_s: Annotated[FloatOrNull, "99th percentile; null without an answer", "TTFT p99"]
    tpot_mean_s: Annotated[
        FloatOrNull, "time after the first token ÷ further tokens; null without further tokens"
    ]
    tpot_p50_s: Annotated[
        FloatOrNull, "from one token to the next; null without further tokens", "TPOT p50"
    ]
    tpot_p90_s: Annotated[FloatOrNull, "90th percentile; null without further tokens"]
    tpot_p99_s: Annotated[
        FloatOrNull, "99th percentile; null without further tokens", "TPOT p99"
    ]
    e2e_mean_s: Annotated[FloatOrNull, "from arrival to last token; null without an answer"]
    e2e_p50_s: Annotated[
        FloatOrNull, "until the last token, median; null without an answer", "end to end p50"
    ]
    e2e_p90_s: Annotated[FloatOrNull, "90th percentile; null without an answer"]
    e2e_p99_s: Annotated[FloatOrNull, "99th percentile; null without an answer"]
    queueing_mean_s: Annotated[
        FloatOrNull, "mean until work begins; null without an answer", "queueing"
    ]
    prefill_utilization: Annotated[
        FloatOrNull, "busy time of prefill replicas; null without prefill replicas"
    ]
    decode_queueing_mean_s: Annotated[
        FloatOrNull,
        "from first token to the first pass on the decode replica; null without "
        "disaggregated prefill",
    ]
    goodput_requests_per_s: Annotated[
        FloatOrNull, "requests that meet every target; null without a target"
    ]
    slo_attainment: Annotated[
        FloatOrNull,
        "answered requests that meet every target; null without a target",
        "within SLO",
    ]
    padding_waste: Annotated[
        FloatOrNull,
        "padded slots ÷ all token slots; null without a pass",
        "padding",
        Formula("{padded_slots} / {token_slots}"),
    ]
    padded_slots: Annotated[int, "token slots with padding"]
    token_slots: Annotated[int, "token slots of all passes"]
    kv_waste: Annotated[
        FloatOrNull, "allocated, but no token in it; null without an allocation", "KV waste"
    ]
    kv_peak: Annotated[
        FloatOrNull,
        "maximum allocated part of the budget; null without a budget",
        "KV peak",
        Formula("{kv_peak_bytes} / {kv_budget_bytes}"),
    ]
    kv_peak_bytes: Annotated[int, "maximum allocated bytes"]
    kv_budget_bytes: Annotated[int, "KV cache budget"]
    preemptions: Annotated[int, "preempted requests", "preempted"]
    recomputed_tokens: Annotated[int, "tokens of preempted requests"]
    passes: Annotated[int, "executed passes"]
    mean_batch_size: Annotated[
        FloatOrNull,
        "sequences per pass, weighted by time; null without a pass",
        "batch",
        "{:.1f}",
    ]
    utilization: Annotated[FloatOrNull, "busy time of the GPU; null without an answer"]
    mean_in_system: Annotated[
        FloatOrNull, "waiting and running requests, weighted by time; null without an answer"
    ]
    diverges: Annotated[
        bool | None,
        "whether the rate exceeds capacity_requests_per_s; null in a closed loop, or with "
        "too few requests",
        "queue",
        "queue",
    ]
    capacity_requests_per_s: Annotated[
        FloatOrNull, "maximum rate if requests always wait; null if the server serves none"
    ]
    cost_per_million_tokens: Annotated[
        FloatOrNull,
        "currency of --price-per-hour; null without a price",
        "per 1M tokens",
        Formula("price · {gpus} GPUs · {duration_s} / 3600 s / {output_tokens} tokens · 10^6"),
    ]
    tpot_p90_error: Annotated[
        FloatOrNull, "90th percentile of the error of TPOT on measured servers; null if unknown"
    ]
    ttft_p90_error: Annotated[
        FloatOrNull, "90th percentile of the error of TTFT; null if unknown"
    ]
    throughput_p90_error: Annotated[
        FloatOrNull, "90th percentile of the error of tokens/s; null if unknown"
    ]


class PassRecord(TypedDict):
    """One line of a server's timeline: consecutive forward passes over the same sequences.

    Bytes are of one GPU of the rank: allocated for the KV cache, and filled with tokens, when the
    last of these passes ends.
    """

    rank: Annotated[int, "data-parallel rank; prefill replicas come last"]
    start_s: Annotated[float, "start of the first pass of this line, from the first arrival"]
    duration_s: Annotated[float, "time of all passes of this line"]
    passes: Annotated[int, "consecutive passes with the same sequences"]
    sequences: Annotated[int, "per pass"]
    tokens: Annotated[int, "per pass"]
    prefill_tokens: Annotated[int, "prompt tokens per pass"]
    waiting: Annotated[int, "requests that are not admitted"]
    kv_allocated_bytes: Annotated[int, "at the end"]
    kv_stored_bytes: Annotated[int, "at the end"]
