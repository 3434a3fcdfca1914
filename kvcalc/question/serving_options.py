"""The questions of `latency` and `serve`: one request, the load of a server, and its settings."""

import math
from functools import partial
from typing import Annotated

from kvcalc.errors import UserError
from kvcalc.question.deployment_options import (
    CONTEXT_WORDS,
    DISAGGREGATE_WORDS,
    MAX_OFFLOAD_GIB,
    OFFLOAD_WORDS,
    OUTPUT_WORDS,
    PREFIX_WORDS,
    PROMPT_WORDS,
    RATE_WORDS,
    TPOT_WORDS,
    TTFT_WORDS,
    USER_WORDS,
    Draft,
    Price,
    check_utilization,
)
from kvcalc.question.options import (
    Option,
    Question,
    bytes_or_none,
    memory_share,
    number_or_nan,
    parse_acceptance,
    seconds_or_none,
    tokens_called,
    tokens_or_none,
)
from kvcalc.question.size_options import BATCH_SIZE
from kvcalc.units import MAX_TOKENS, parse_tokens

MAX_STEPS = 1 << 20  # passes of one request
MAX_STEPS_AGAIN = 1 << 18  # tokens of an answer without a cache
MAX_DRAFT_TOKENS = 1024  # per step
MAX_SETTING = 1 << 20  # tokens, blocks or sequences of a server
MAX_SECONDS = 10**9
MAX_REQUESTS = 2_000_000
OPEN, CLOSED, INFERENCEX, AIPERF = CLIENTS = ("open", "closed", "inferencex", "aiperf")

_workload = partial(Option, panel="Workload")
_server = partial(Option, panel="Server")
_speculation = partial(Option, panel="Speculative decoding")
_prompt = partial(
    Option,
    names="--input-len --isl",
    takes="TOKENS",
    is_common=True,
    called=PROMPT_WORDS + " " + CONTEXT_WORDS,
)
_output = partial(
    Option,
    names="--output-len --osl",
    takes="TOKENS",
    is_common=True,
    called=OUTPUT_WORDS,
)


def _as_typed(text: str, name: str) -> str:
    return text


def _share(text: str, name: str) -> float:
    value = number_or_nan(text)
    if not 0 <= value <= 1:
        raise UserError(
            f"{name} {text.strip()} is not between 0 and 1",
            hint="Write 0.9 for 90 %, or 0,0.5,0.9",
        )
    return value


def parse_rate(text: str, name: str) -> float:
    """Return requests per second; `inf` sends all requests at time 0.

    Raises:
        UserError: The text is not a number above 0.
    """
    value = number_or_nan(text)
    if not value > 0:
        raise UserError(f"{name} {text!r} is not a number of requests per second above 0")
    return value


def check_draft(draft: str, num_tokens: int, acceptance: float | None) -> None:
    """Check the options of a draft: its name, tokens per step and acceptance rate.

    Raises:
        UserError: An option is out of range, or there is no draft.
    """
    if not draft and (num_tokens or acceptance is not None):
        raise UserError(
            "num-speculative-tokens and acceptance-rate are of a draft, and there is none"
        )
    parse_acceptance(str(acceptance or 0.0), "")


class LatencyOptions(Question, frozen=True):
    """A batch of equal requests.

    Attributes:
        num_speculative_tokens: Draft tokens per step; 0 for the best number. Needs a draft.
        acceptance_rate: Acceptance rate of a draft token; None for 0.8. Needs a draft.
    """

    input_len: Annotated[
        int,
        _prompt(
            "Prompt tokens; a list adds rows", read=tokens_called("input length"), list_order=4
        ),
    ] = 2000
    output_len: Annotated[
        int,
        _output(
            "Output tokens; a list adds rows", read=tokens_called("output length"), list_order=3
        ),
    ] = 500
    batch_size: Annotated[int, BATCH_SIZE] = 1
    no_cache: Annotated[bool, _workload("Add the same generation without a KV cache")] = False
    head: Annotated[
        str,
        _workload(
            "Positions of the LM head with --no-cache: last or all", choices=("last", "all")
        ),
    ] = "last"
    prefix_len: Annotated[
        int,
        _workload(
            "Leading prompt tokens that are cached already",
            takes="TOKENS",
            called=PREFIX_WORDS,
            max=MAX_TOKENS,
        ),
    ] = 0
    max_num_batched_tokens: Annotated[
        int,
        Option(
            "Tokens per prefill chunk; 0: the whole prompt",
            takes="TOKENS",
            panel="Engine",
            max=MAX_TOKENS,
        ),
    ] = 0
    draft: Draft = ""
    num_speculative_tokens: Annotated[
        int,
        _speculation(
            "Draft tokens per step; default: the fastest; a list",
            read=tokens_or_none,
            max=MAX_DRAFT_TOKENS,
            list_order=2,
        ),
    ] = 0
    acceptance_rate: Annotated[
        float | None,
        _speculation(
            "Share of draft tokens that is accepted; default: 0.8; a list",
            read=parse_acceptance,
            list_order=1,
        ),
    ] = None
    cpu_offload_gb: Annotated[
        float,
        Option(
            "GiB of weights per GPU in CPU memory",
            panel="Memory",
            called=OFFLOAD_WORDS,
            max=MAX_OFFLOAD_GIB,
        ),
    ] = 0.0
    price_per_hour: Price = 0.0

    def __post_init__(self) -> None:
        check_draft(self.draft, self.num_speculative_tokens, self.acceptance_rate)
        if self.head != "last" and not self.no_cache:
            raise UserError(
                f"head {self.head} is of a generation without a cache", hint="Add --no-cache"
            )
        super().__post_init__()
        check_steps("tokens of an answer", self.output_len)
        check_steps("chunks of the prompt", self.chunks)
        if self.no_cache:
            check_steps("tokens of an answer without a cache", self.output_len, MAX_STEPS_AGAIN)

    @property
    def chunks(self) -> int:
        """Whole chunks of the prompt."""
        return self.input_len // (self.max_num_batched_tokens or self.input_len)

    @property
    def context(self) -> int:
        """Tokens of a sequence at its end."""
        return self.input_len + self.output_len

    @property
    def mid_length(self) -> int:
        """Tokens of a sequence half-way through its answer."""
        return self.input_len + max(1, self.output_len // 2)


def check_steps(name: str, count: int, max_count: int = MAX_STEPS) -> None:
    """Check that `count` is at most `max_count`. Raises UserError otherwise."""
    if count > max_count:
        raise UserError(f"{count:,} {name} are more than the {max_count:,} that are timed")


class Workload(Question, frozen=True):
    """The requests of a server: a trace, or requests drawn at a rate.

    Benchmark clients send prompts through the engine's front end, so its time counts for users.
    Warm-up requests come before.

    Attributes:
        requests: File of a trace; '' draws requests.
        rate: Requests per second. If infinite, all requests arrive at time 0.
        max_concurrency: Clients in a closed loop; 0 for an open loop.
        num_prompts: Number of requests; 0 for 1000, or for all requests of a trace.
        client: '' derives the client from the other options. `inferencex` sends 10 prompts per
            client, the next when an answer comes, with lengths uniform from 0.8 of the nominal
            length, without a prefix cache. `aiperf` does the same with the given lengths.
        prefix_hit_rate: Share of each prompt that a prefix cache stores already. All prompts begin
            with one prefix, which is stored once.
    """

    requests: Annotated[
        str,
        _workload(
            "CSV file of arrival_s, input_len and output_len, or an Azure trace",
            takes="FILE",
            called="trace dataset dataset-path dataset-name requests-file file",
        ),
    ] = ""
    rate: Annotated[
        float,
        Option(
            "Requests per second, inf, or a list; default: a sweep of rates",
            "--rate --request-rate",
            "R",
            is_common=True,
            called=RATE_WORDS,
            read=parse_rate,
            list_order=2,
        ),
    ] = math.inf
    burstiness: Annotated[
        float, _workload("Burstiness of arrivals: 1 is Poisson, below 1 is burstier")
    ] = 1.0
    max_concurrency: Annotated[
        int,
        _workload(
            "Clients in a closed loop; a list adds rows",
            called=USER_WORDS,
            read=tokens_or_none,
            list_order=1,
            max=MAX_REQUESTS,
        ),
    ] = 0
    num_prompts: Annotated[
        int, _workload("Number of requests; 0: 1000, or the whole file", max=MAX_REQUESTS)
    ] = 0
    input_len: Annotated[
        str,
        _prompt("Prompt tokens: 1000, uniform:100,2000 or lognormal:MEAN,P99", read=_as_typed),
    ] = "1000"
    output_len: Annotated[
        str,
        _output("Output tokens: 200, uniform:50,400 or lognormal:MEAN,P99", read=_as_typed),
    ] = "200"
    seed: Annotated[int, _workload("Seed of random arrivals and lengths")] = 0
    client: Annotated[
        str,
        _workload(
            "Load generator to imitate: open, closed, inferencex or aiperf", choices=CLIENTS
        ),
    ] = ""
    think_time: Annotated[
        float,
        _workload(
            "Pause of a client between an answer and its next request: 2s",
            takes="TIME",
            read=seconds_or_none,
            max=MAX_SECONDS,
        ),
    ] = 0.0
    prefix_hit_rate: Annotated[
        float,
        _workload(
            "Share of each prompt that is cached, 0 to 1; a list adds rows",
            called=PREFIX_WORDS,
            read=_share,
            list_order=3,
        ),
    ] = 0.0

    def __post_init__(self) -> None:
        _share(str(self.prefix_hit_rate), "prefix-hit-rate")
        super().__post_init__()
        if self.client == OPEN and self.max_concurrency:
            raise UserError(
                "client open has no max-concurrency",
                hint="A closed loop has: --client closed",
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
        """Name of the client."""
        return self.client or (CLOSED if self.max_concurrency else OPEN)

    @property
    def is_open(self) -> bool:
        """Whether requests arrive over time, independently of the server."""
        return not self.max_concurrency and (bool(self.requests) or self.rate != math.inf)

    @property
    def is_benchmark(self) -> bool:
        """Whether the client is a benchmark that sends its own requests."""
        return self.client in (INFERENCEX, AIPERF)


class ServerSettings(Question, frozen=True):
    """The settings of a simulated server.

    Attributes:
        max_num_seqs: Concurrent sequences of the whole replica; None for the engine's default.
        max_num_batched_tokens: Tokens of a pass of one data-parallel rank; 0 for the engine's
            default.
        max_model_len: Tokens of a request; 0 for the longest request.
        kv_cache_memory_bytes: Bytes of the cache; None derives them as in `fit`.
        slo_ttft: Latency target in seconds; 0 sets no target.
        slo_tpot: Latency target in seconds per token; 0 sets no target.
        draft: '' or a draft for `draft_model`.
        num_speculative_tokens: Draft tokens per step; 0 for the number of prediction layers, or for
            the best number of one request.
        acceptance_rate: Acceptance rate of a draft token; None for 0.8.
    """

    max_num_seqs: Annotated[
        int | None,
        Option(
            "Concurrent sequences of the replica; default: the engine's",
            is_common=True,
            called=USER_WORDS,
            min=1,
            max=MAX_SETTING,
        ),
    ] = None
    max_num_batched_tokens: Annotated[
        int,
        _server(
            "Tokens of one forward pass; 0: the engine's default",
            takes="TOKENS",
            max=MAX_SETTING,
        ),
    ] = 0
    max_model_len: Annotated[
        int,
        _server(
            "Tokens per request; contiguous caches reserve them",
            takes="TOKENS",
            read=parse_tokens,
        ),
    ] = 0
    preemption: Annotated[
        str,
        _server(
            "Handling of preempted requests: recompute or swap",
            choices=("recompute", "swap"),
        ),
    ] = "recompute"
    batch_timeout: Annotated[
        float, _server("Seconds that a static batch waits for more requests", max=MAX_SECONDS)
    ] = 0.0
    block_size: Annotated[
        int, _server("Tokens per KV cache block; 0: the engine's default", max=MAX_SETTING)
    ] = 0
    gpu_memory_utilization: Annotated[
        float,
        _server("Share of GPU memory for the engine; default: the engine's", read=memory_share),
    ] = 0.0
    kv_cache_memory_bytes: Annotated[
        int | None,
        _server(
            "KV cache memory per GPU instead of the computed budget",
            takes="SIZE",
            read=bytes_or_none,
        ),
    ] = None
    slo_ttft: Annotated[
        float,
        Option(
            "Longest time to first token: 500ms",
            "--slo-ttft --max-ttft",
            "TIME",
            "Targets",
            called=TTFT_WORDS,
            read=seconds_or_none,
            max=MAX_SECONDS,
        ),
    ] = 0.0
    slo_tpot: Annotated[
        float,
        Option(
            "Longest time per output token: 50ms",
            "--slo-tpot --max-tpot",
            "TIME",
            "Targets",
            called=TPOT_WORDS,
            read=seconds_or_none,
            max=MAX_SECONDS,
        ),
    ] = 0.0
    price_per_hour: Price = 0.0
    draft: Draft = ""
    num_speculative_tokens: Annotated[
        int,
        _speculation(
            "Draft tokens per step; 0 selects the fastest number", max=MAX_DRAFT_TOKENS
        ),
    ] = 0
    acceptance_rate: Annotated[
        float | None,
        _speculation("Share of draft tokens that is accepted; default: 0.8"),
    ] = None
    scheduler_recv_interval: Annotated[
        int,
        _server("SGLang: decode steps between checks for new requests", min=1, max=MAX_SETTING),
    ] = 1
    disaggregate: Annotated[
        bool, _server("Prefill on separate replicas", called=DISAGGREGATE_WORDS)
    ] = False
    prefill_replicas: Annotated[
        int, _server("Number of prefill replicas with --disaggregate", min=1, max=1024)
    ] = 1

    def __post_init__(self) -> None:
        check_draft(self.draft, self.num_speculative_tokens, self.acceptance_rate)
        super().__post_init__()
        if self.prefill_replicas > 1 and not self.disaggregate:
            raise UserError(
                "prefill-replicas need separate replicas for the prompts",
                hint="Add --disaggregate",
            )
        check_utilization(self.gpu_memory_utilization)


class SchedulingOptions(Question, frozen=True):
    """How a server batches and stores its cache."""

    policy: Annotated[
        str,
        _server(
            "Batching: continuous or static; a list",
            choices=("continuous", "static"),
            list_order=2,
        ),
    ] = "continuous"
    cache: Annotated[
        str,
        _server(
            "KV cache memory: paged or contiguous; a list",
            choices=("paged", "contiguous"),
            list_order=1,
        ),
    ] = "paged"
