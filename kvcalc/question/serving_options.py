"""The questions of `latency` and `serve`: one request, the load of a server, and its settings."""

import math
from typing import Annotated

from kvcalc.errors import UserError
from kvcalc.question.options import (
    Question,
    Tokens,
    bytes_or_none,
    memory_share,
    seconds_or_none,
    tokens_or_none,
)

MAX_STEPS = 1 << 20  # passes of one request
MAX_STEPS_AGAIN = 1 << 18  # tokens of an answer without a cache
MAX_REQUESTS = 2_000_000  # of a trace
OPEN, CLOSED, INFERENCEX, AIPERF = CLIENTS = ("open", "closed", "inferencex", "aiperf")


def _as_typed(text: str, name: str) -> str:
    return text


def check_draft(draft: str, num_tokens: int, acceptance: float | None) -> None:
    """Raise UserError if options of speculative decoding are given without a draft."""
    if not draft and (num_tokens or acceptance is not None):
        raise UserError(
            "num-speculative-tokens and acceptance-rate are of a draft, and there is none"
        )


class LatencyOptions(Question, frozen=True):
    """A batch of equal requests.

    Attributes:
        num_speculative_tokens: Draft tokens per step; 0 for the best number. Needs a draft.
        acceptance_rate: Acceptance rate of a draft token; None for 0.8. Needs a draft.
    """

    input_len: Tokens = 2000
    output_len: Tokens = 500
    batch_size: Tokens = 1
    no_cache: bool = False
    head: str = "last"
    prefix_len: int = 0
    max_num_batched_tokens: int = 0
    draft: str = ""
    num_speculative_tokens: Annotated[int, tokens_or_none] = 0
    acceptance_rate: float | None = None
    cpu_offload_gb: float = 0.0
    price_per_hour: float = 0.0

    def __post_init__(self) -> None:
        check_draft(self.draft, self.num_speculative_tokens, self.acceptance_rate)
        if self.head != "last" and not self.no_cache:
            raise UserError(
                f"head {self.head} is of a generation without a cache", "Add --no-cache"
            )
        super().__post_init__()
        check_steps("tokens of an answer", self.output_len)
        check_steps("chunks of the prompt", self.chunks)
        if self.no_cache:
            check_steps("tokens of an answer without a cache", self.output_len, MAX_STEPS_AGAIN)

    @property
    def chunks(self) -> int:
        """Return the number of complete chunks of the prompt."""
        return self.input_len // (self.max_num_batched_tokens or self.input_len)

    @property
    def context(self) -> int:
        """Return the tokens of a sequence at its end, prompt and answer together."""
        return self.input_len + self.output_len

    @property
    def mid_length(self) -> int:
        """Return the tokens of a sequence half-way through its answer."""
        return self.input_len + max(1, self.output_len // 2)


def check_steps(name: str, count: int, max_count: int = MAX_STEPS) -> None:
    """Raise UserError if `count` is above `max_count`."""
    if count > max_count:
        raise UserError(f"{count:,} {name} are more than the {max_count:,} that are timed")


class Workload(Question, frozen=True):
    """The requests of a server: a trace, or requests drawn at a rate.

    Benchmark clients send prompts through the engine's front end, so the front end's time is part
    of TTFT. The clients send warm-up requests first. Default lengths have the mean and 99th
    percentile of Azure's conversation trace of 2023, with 19,366 requests
    (github.com/Azure/AzurePublicDataset, data/AzureLLMInferenceTrace_conv.csv).

    Attributes:
        requests: File of a trace; '' draws requests.
        rate: Requests per second. If infinite, all requests arrive at time 0.
        max_concurrency: Clients in a closed loop; 0 for an open loop.
        num_prompts: Number of requests; 0 for 1000, or for all requests of a trace.
        client: '' derives the client from the other options. `inferencex` sends 10 prompts per
            client, each after the previous answer, without a prefix cache. Lengths are uniform
            between 0.8 times the nominal length and the nominal length. `aiperf` differs from
            `inferencex` only in its lengths, which are exactly the nominal lengths.
        prefix_hit_rate: Share of each prompt that is already in a prefix cache. All prompts begin
            with one prefix, which is stored once.
    """

    requests: str = ""
    rate: float = math.inf
    burstiness: float = 1.0
    max_concurrency: Annotated[int, tokens_or_none] = 0
    num_prompts: int = 0
    input_len: Annotated[str, _as_typed] = "lognormal:1155,4142"
    output_len: Annotated[str, _as_typed] = "lognormal:211,601"
    seed: int = 0
    client: str = ""
    think_time: Annotated[float, seconds_or_none] = 0.0
    prefix_hit_rate: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.client == OPEN and self.max_concurrency:
            raise UserError(
                "client open has no max-concurrency",
                "A closed loop has: --client closed",
            )
        if self.client not in ("", OPEN) and not self.max_concurrency:
            raise UserError(
                f"client {self.client} needs max-concurrency: the number of concurrent requests"
            )
        if self.think_time and not self.max_concurrency:
            raise UserError("think-time is of clients in a closed loop: give max-concurrency")
        if self.is_benchmark and (self.requests or self.rate != math.inf):
            raise UserError(
                f"client {self.client} sends its own requests, without a trace and without a rate"
            )

    @property
    def kind(self) -> str:
        """Return the name of the client that sends the requests."""
        return self.client or (CLOSED if self.max_concurrency else OPEN)

    @property
    def is_open(self) -> bool:
        """Return whether requests arrive over time, independently of the server."""
        return not self.max_concurrency and (bool(self.requests) or self.rate != math.inf)

    @property
    def is_benchmark(self) -> bool:
        """Return whether the client is a benchmark that sends its own requests."""
        return self.client in (INFERENCEX, AIPERF)


class ServerSettings(Question, frozen=True):
    """The settings of a simulated server.

    Attributes:
        max_num_seqs: Concurrent sequences of the whole replica; None for the engine's default.
        max_num_batched_tokens: Tokens of a pass of one data-parallel rank; 0 for the engine's
            default.
        max_model_len: Tokens of a request; 0 for the longest request.
        kv_cache_memory_bytes: Bytes of the cache; None means the budget that `fit` computes.
        slo_ttft: Latency target in seconds; 0 sets no target.
        slo_tpot: Latency target in seconds per token; 0 sets no target.
        draft: Name of a draft, as in `draft_model`; '' for none.
        num_speculative_tokens: Draft tokens per step. 0 means the number of prediction layers, or
            for other drafts the number that is fastest for a single request.
        acceptance_rate: Acceptance rate of a draft token; None for 0.8.
    """

    max_num_seqs: int | None = None
    max_num_batched_tokens: int = 0
    max_model_len: Tokens = 0
    block_size: int = 0
    gpu_memory_utilization: Annotated[float, memory_share] = 0.0
    kv_cache_memory_bytes: Annotated[int | None, bytes_or_none] = None
    slo_ttft: Annotated[float, seconds_or_none] = 0.0
    slo_tpot: Annotated[float, seconds_or_none] = 0.0
    price_per_hour: float = 0.0
    draft: str = ""
    num_speculative_tokens: int = 0
    acceptance_rate: float | None = None
    disaggregate: bool = False
    prefill_replicas: int = 1

    def __post_init__(self) -> None:
        check_draft(self.draft, self.num_speculative_tokens, self.acceptance_rate)
        super().__post_init__()
        if self.prefill_replicas > 1 and not self.disaggregate:
            raise UserError(
                "prefill-replicas need separate replicas for the prompts",
                "Add --disaggregate",
            )


class SchedulingOptions(Question, frozen=True):
    """How a server batches and stores its cache."""

    policy: str = "continuous"
    cache: str = "paged"
