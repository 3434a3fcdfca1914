"""The questions of `latency` and `serve`: one request, the load of a server, and its settings."""

import math
from typing import Annotated

from kvcalc.errors import UserError
from kvcalc.question.options import (
    MemoryShare,
    OptionalBytes,
    OptionalSeconds,
    OptionalTokens,
    Prices,
    Question,
    Tokens,
)

MAX_STEPS = 1 << 20  # passes of one request
MAX_STEPS_AGAIN = 1 << 18  # tokens of an answer without a cache
MAX_REQUESTS = 2_000_000  # of a trace
OPEN, CLOSED, INFERENCEX, AIPERF = ("open", "closed", "inferencex", "aiperf")


def _as_typed(text: str, name: str) -> str:
    return text


def check_draft(draft: str, num_tokens: int, acceptance: float | None) -> None:
    """Check that options of speculative decoding are given only with a draft.

    Args:
        draft: Draft: a model's name, `layers=N` or `mtp`; '' for none.
        num_tokens: Draft tokens per step; 0 if not given.
        acceptance: Share of draft tokens that is accepted, from 0 to 1; None if not given.

    Raises:
        UserError: One of the options is given without a draft.
    """
    if not draft and (num_tokens or acceptance is not None):
        raise UserError(
            "num-speculative-tokens and acceptance-rate are of a draft, and there is none"
        )


class LatencyOptions(Question, frozen=True):
    """A batch of equal requests, which `latency` times.

    Attributes:
        input_len: Prompt tokens of each request.
        output_len: Output tokens of each request.
        batch_size: Number of concurrent requests.
        no_cache: Whether to time the same generation without a KV cache too, in which each step
            computes all tokens again.
        head: Tokens of a pass on which the LM head runs in the generation without a cache: `last`
            (of each sequence) or `all`.
        prefix_len: Leading prompt tokens that are cached already.
        max_num_batched_tokens: Tokens per prefill chunk; 0 for the whole prompt.
        draft: Draft for speculative decoding: a model, `layers=N` (the target's first N layers) or
            `mtp`; '' for none.
        num_speculative_tokens: Draft tokens per decode step; 0 for the fastest number. Needs a
            draft.
        acceptance_rate: Share of draft tokens that is accepted; None for 0.8. Needs a draft.
        cpu_offload_gb: GiB of each GPU's weights in CPU memory.
        price_per_hour: Price of a GPU per hour, as `2.5`, or for each GPU model as `h100=2.5`; ()
            if unknown.
        output_throughput: Measured output tokens per second of all GPUs together, for the cost
            per token; 0 to use the predicted rate.
        max_tpot: Maximum seconds per further token (TPOT). The batch size is then the largest that
            meets it and fits in memory. 0 for no maximum.
    """

    input_len: Tokens = 2000
    output_len: Tokens = 500
    batch_size: Tokens = 1
    no_cache: bool = False
    head: str = "last"
    prefix_len: OptionalTokens = 0
    max_num_batched_tokens: OptionalTokens = 0
    draft: str = ""
    num_speculative_tokens: OptionalTokens = 0
    acceptance_rate: float | None = None
    cpu_offload_gb: float = 0.0
    price_per_hour: Prices = ()
    output_throughput: float = 0.0
    max_tpot: OptionalSeconds = 0.0

    def __post_init__(self) -> None:
        check_draft(self.draft, self.num_speculative_tokens, self.acceptance_rate)
        if self.output_throughput and not self.price_per_hour:
            raise UserError("output-throughput needs a price", "Add --price-per-hour 2.5")
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
        """Return the number of full prefill chunks of the prompt, without a shorter last chunk.

        The constructor limits this number, because each chunk is a pass to time. It is `input_len`
        ÷ `max_num_batched_tokens`, rounded down. It is 1 if that option is 0, so that the prompt is
        not chunked, and 0 if the prompt is shorter than one chunk.
        """
        return self.input_len // (self.max_num_batched_tokens or self.input_len)

    @property
    def context(self) -> int:
        """Return the tokens of a sequence at the end: prompt and output together."""
        return self.input_len + self.output_len

    @property
    def mid_length(self) -> int:
        """Return the tokens of a sequence when half of its output is generated."""
        return self.input_len + max(1, self.output_len // 2)


def check_steps(name: str, count: int, max_count: int = MAX_STEPS) -> None:
    """Check that a request does not need too many forward passes to be timed in reasonable time.

    Args:
        name: Plural noun for the passes in the error message, such as `chunks of the prompt`.
        count: Number of passes.
        max_count: Maximum number of passes.

    Raises:
        UserError: `count` is above `max_count`.
    """
    if count > max_count:
        raise UserError(f"{count:,} {name} are more than the {max_count:,} that are timed")


class Workload(Question, frozen=True):
    """The requests that a simulated server receives: a trace, or random requests.

    Default lengths have the mean and 99th percentile of Azure's conversation trace of 2023, with
    19,366 requests (github.com/Azure/AzurePublicDataset, data/AzureLLMInferenceTrace_conv.csv).

    Attributes:
        requests: File of a trace; '' for random requests.
        rate: Requests per second. If infinite, all requests arrive at time 0.
        burstiness: Burstiness of random arrivals: 1 is Poisson, below 1 is burstier.
        max_concurrency: Number of clients, each of which waits for an answer before its next
            request. 0 for requests that do not wait.
        num_prompts: Number of requests; 0 for 1000, or for all requests of a trace.
        input_len, output_len: Prompt and output tokens: a number, or a distribution such as
            `uniform:100,2000` or `lognormal:MEAN,P99`.
        seed: Seed of random arrivals and lengths.
        client: Load generator to imitate. `open` does not wait for answers, `closed` does; '' is
            `closed` if `max_concurrency` is given, else `open`. `inferencex` and `aiperf` are
            benchmark clients. They send warm-up requests first. Their prompts pass the engine's
            front end, so its time is part of the time to the first token (TTFT). `inferencex` sends
            10 prompts per client, each after the previous answer, without a prefix cache. Lengths
            are uniform between 0.8 times the nominal length and the nominal length. `aiperf`
            differs from `inferencex` only in its lengths, which are exactly the nominal lengths.
        think_time: Seconds that a client waits between an answer and its next request.
        prefix_hit_rate: Share of each prompt that is already in a prefix cache, from 0 to 1. All
            prompts begin with one prefix, which is stored once.
    """

    requests: str = ""
    rate: float = math.inf
    burstiness: float = 1.0
    max_concurrency: OptionalTokens = 0
    num_prompts: int = 0
    input_len: Annotated[str, _as_typed] = "lognormal:1155,4142"
    output_len: Annotated[str, _as_typed] = "lognormal:211,601"
    seed: int = 0
    client: str = ""
    think_time: OptionalSeconds = 0.0
    prefix_hit_rate: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.client == OPEN and self.max_concurrency:
            raise UserError(
                "client open has no max-concurrency", "A closed loop has: --client closed"
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
        """Return which client sends the requests: `open`, `closed`, `inferencex` or `aiperf`.

        An open client sends requests without waiting for answers. A closed client waits for each
        answer before its next request. The other two are benchmark programs.
        """
        return self.client or (CLOSED if self.max_concurrency else OPEN)

    @property
    def is_open(self) -> bool:
        """Return whether requests arrive over time, without clients that wait for answers.

        Return False if clients wait for answers, or if all requests arrive at time 0.
        """
        return not self.max_concurrency and (bool(self.requests) or self.rate != math.inf)

    @property
    def is_benchmark(self) -> bool:
        """Return whether the client is a benchmark program, `inferencex` or `aiperf`."""
        return self.client in (INFERENCEX, AIPERF)


class ServerSettings(Question, frozen=True):
    """The settings of a simulated server.

    Attributes:
        max_num_seqs: Concurrent sequences of the whole replica; None for the engine's default.
        max_num_batched_tokens: Tokens of a forward pass of one data-parallel rank; 0 for the
            engine's default.
        max_model_len: Maximum tokens of a request; 0 for the tokens of the longest request.
        block_size: Tokens of a KV cache block; 0 for the engine's default.
        gpu_memory_utilization: Share of GPU memory for the engine; 0 for the engine's default.
        kv_cache_memory_bytes: Bytes of the cache per GPU; None for the budget that `fit` computes.
        slo_ttft: Target for the time to the first token (TTFT) in seconds; 0 sets no target.
        slo_tpot: Target for the time per further output token (TPOT) in seconds; 0 sets no target.
        price_per_hour: Price of a GPU per hour, as `2.5`, or for each GPU model as `h100=2.5`; ()
            if unknown.
        draft: Draft for speculative decoding: a model, `layers=N` (the target's first N layers) or
            `mtp`; '' for none.
        num_speculative_tokens: Draft tokens per decode step. 0 means the number of prediction
            layers, or for other drafts the number that is fastest for a single request.
        acceptance_rate: Share of draft tokens that is accepted; None for 0.8.
        disaggregate: Whether separate replicas compute the prompts.
        prefill_replicas: Number of these separate replicas; more than 1 needs `disaggregate`.
    """

    max_num_seqs: int | None = None
    max_num_batched_tokens: OptionalTokens = 0
    max_model_len: Tokens = 0
    block_size: int = 0
    gpu_memory_utilization: MemoryShare = 0.0
    kv_cache_memory_bytes: OptionalBytes = None
    slo_ttft: OptionalSeconds = 0.0
    slo_tpot: OptionalSeconds = 0.0
    price_per_hour: Prices = ()
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
                "prefill-replicas need separate replicas for the prompts", "Add --disaggregate"
            )


class SchedulingOptions(Question, frozen=True):
    """How a simulated server forms batches, and how it allocates its KV cache.

    Attributes:
        policy: `continuous` admits a request at any pass. `static` completes a batch before it
            admits the next.
        cache: `paged` allocates blocks as a sequence grows. `contiguous` reserves the maximum
            length for each sequence.
    """

    policy: str = "continuous"
    cache: str = "paged"
