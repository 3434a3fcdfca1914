"""The question of `plan`: the load and its targets, and the deployments to try."""

from functools import partial
from typing import Annotated

import msgspec

from kvcalc.errors import UserError
from kvcalc.question.deployment_options import (
    CACHE_DTYPE,
    CONTEXT_WORDS,
    DISAGGREGATE_WORDS,
    DRAFT_WORDS,
    DTYPE,
    GPUS,
    OUTPUT_WORDS,
    PREFIX_WORDS,
    PROMPT_WORDS,
    QUANTIZATION,
    RATE_WORDS,
    TPOT_WORDS,
    TTFT_WORDS,
    USER_WORDS,
    Bounds,
    Calibration,
    CalibrationGpu,
    Engine,
    EngineVersion,
    Mixed,
    NodeBandwidth,
    Nodes,
    Stack,
    gpu_count,
)
from kvcalc.question.options import (
    Option,
    Question,
    memory_share,
    parse_acceptance,
    parse_number,
    tokens_called,
)
from kvcalc.units import parse_seconds, parse_tokens

# sequences per replica that are tried if the users do not determine them
SEQUENCE_COUNTS = (
    1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024,
)  # fmt: skip
MAX_TARGET = 10**12
_load = partial(Option, panel="Workload")
_space = partial(Option, panel="Search space")
_target = partial(Option, takes="TIME", is_common=True, read=parse_seconds, max=MAX_TARGET)


class RequestLengths(msgspec.Struct, frozen=True):
    """Tokens of a request.

    Attributes:
        prompt: Tokens before the first output token.
        context: Tokens at the end.
        output: Output tokens; 0 if unknown. A step is then timed at the end.
        cached: Tokens of the prompt that are a cached prefix.
    """

    prompt: int
    context: int
    output: int = 0
    cached: int = 0

    @property
    def middle(self) -> int:
        """Tokens half-way through the answer, or at the end if the output length is unknown."""
        return self.prompt + max(1, self.output // 2) if self.output else self.context


class Requirement(Question, frozen=True, kw_only=True):
    """The load and the targets of a plan. 0 leaves a figure out.

    Attributes:
        users: Concurrent sequences over all replicas.
        context: Tokens of each request. Alternative: input_len and output_len.
        rate: Requests per second, instead of users.
        max_ttft: Maximum seconds to the first token.
        max_tpot: Maximum seconds per further token.
        min_throughput: Minimum output tokens per second of all replicas.
        prefix_hit_rate: Share of each prompt that is cached.
    """

    users: Annotated[
        int,
        Option(
            "Concurrent users over all replicas; a list adds rows",
            is_common=True,
            called=USER_WORDS,
            read=tokens_called("number of users"),
            list_order=5,
        ),
    ] = 0
    context: Annotated[
        int,
        Option(
            "Tokens per user: 16k; or --input-len and --output-len",
            takes="TOKENS",
            is_common=True,
            called=CONTEXT_WORDS,
            read=parse_tokens,
            list_order=4,
        ),
    ] = 0
    input_len: Annotated[
        int,
        _load(
            "Prompt tokens; a list",
            "--input-len --isl",
            "TOKENS",
            called=PROMPT_WORDS,
            read=parse_tokens,
            list_order=3,
        ),
    ] = 0
    output_len: Annotated[
        int,
        _load(
            "Output tokens; a list",
            "--output-len --osl",
            "TOKENS",
            called=OUTPUT_WORDS,
            read=parse_tokens,
            list_order=2,
        ),
    ] = 0
    rate: Annotated[
        float,
        _load(
            "Requests per second, instead of --users",
            "--rate --request-rate",
            "R",
            called=RATE_WORDS,
            read=parse_number,
            list_order=1,
            max=MAX_TARGET,
        ),
    ] = 0.0
    max_ttft: Annotated[
        float,
        _target("Longest time to first token: 2s", "--max-ttft --slo-ttft", called=TTFT_WORDS),
    ] = 0.0
    max_tpot: Annotated[
        float,
        _target(
            "Longest time per output token: 50ms", "--max-tpot --slo-tpot", called=TPOT_WORDS
        ),
    ] = 0.0
    min_throughput: Annotated[
        float,
        Option(
            "Smallest output tokens per second of all replicas",
            panel="Targets",
            read=parse_number,
            max=MAX_TARGET,
        ),
    ] = 0.0
    prefix_hit_rate: Annotated[
        float,
        _load(
            "Share of each prompt that is cached, 0 to 1",
            called=PREFIX_WORDS,
            read=parse_number,
        ),
    ] = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        problems = (
            (
                self.context and (self.input_len or self.output_len),
                "context and input-len exclude each other",
                "A context is the end of input and output",
            ),
            (
                bool(self.input_len) != bool(self.output_len),
                "input-len and output-len go together",
                "Or give a context",
            ),
            (
                not self.context and not self.input_len,
                "a plan needs the tokens of a request",
                "Give --context, or --input-len and --output-len",
            ),
            (
                self.users and self.rate,
                "use either --users or --rate",
                "Users wait for their answers, requests at a rate do not",
            ),
            (
                not (self.users or self.rate or self.min_throughput),
                "a plan needs a load",
                "Give --users, --rate or --min-throughput",
            ),
            (
                not self.users and not self.output_len,
                "a rate needs requests with an end",
                "Give --input-len and --output-len",
            ),
        )
        for is_wrong, message, hint in problems:
            if is_wrong:
                raise UserError(message, hint=hint)
        if not 0 <= self.prefix_hit_rate < 1:
            raise UserError(f"prefix-hit-rate {self.prefix_hit_rate} is not from 0 to below 1")

    @property
    def lengths(self) -> RequestLengths:
        """The tokens of each request."""
        prompt = self.context or self.input_len
        return RequestLengths(
            prompt=prompt,
            context=self.context or self.input_len + self.output_len,
            output=self.output_len,
            cached=int(prompt * self.prefix_hit_rate),
        )

    def sequence_counts(self, max_replicas: int) -> set[int]:
        """Return the numbers of sequences per replica to try with at most `max_replicas`."""
        if not self.users:
            return set(SEQUENCE_COUNTS)
        replicas = range(1, min(max_replicas, self.users) + 1)
        return {-(-self.users // number) for number in replicas}


Sizes = tuple[int, ...]
Names = tuple[str, ...]
_sizes = partial(_space, takes="N", read=gpu_count)


class SpaceOptions(Question, frozen=True):
    """The deployments to try. Every combination of the tuples is one; () is every size."""

    gpu: Annotated[Names, GPUS] = ("all",)
    max_gpus: Annotated[
        int,
        Option(
            "Largest number of GPUs of all replicas together",
            is_common=True,
            min=1,
            max=4096,
        ),
    ] = 16
    tp: Annotated[
        Sizes,
        _sizes(
            "GPUs for tensor parallelism; a list; default: every size that fits",
            "--tensor-parallel-size --tp -tp",
        ),
    ] = ()
    pp: Annotated[
        Sizes,
        _sizes(
            "GPUs for pipeline parallelism; a list; default: every size",
            "--pipeline-parallel-size --pp -pp",
        ),
    ] = ()
    dp: Annotated[
        Sizes,
        _sizes(
            "Groups for data parallelism in a replica; a list; default: all",
            "--data-parallel-size --dp -dp",
        ),
    ] = ()
    ep: Annotated[
        Sizes,
        _sizes(
            "GPUs for expert parallelism; a list; default: every size",
            "--expert-parallel-size --ep",
        ),
    ] = ()
    nodes: Nodes = 0
    inter_node_bandwidth: NodeBandwidth = ""
    dtype: Annotated[Names, DTYPE] = ("auto",)
    kv_cache_dtype: Annotated[Names, CACHE_DTYPE] = ("auto",)
    quantization: Annotated[Names, QUANTIZATION] = ("",)
    engine: Engine = "vllm"
    engine_version: EngineVersion = ""
    bounds: Bounds = False
    calibration: Calibration = ""
    calibration_from: CalibrationGpu = ""
    mixed: Mixed = False
    stack: Stack = ""
    gpu_memory_utilization: Annotated[
        float,
        _space("Share of GPU memory for the engine; default: the engine's", read=memory_share),
    ] = 0.0
    max_num_batched_tokens: Annotated[
        int,
        _space(
            "Tokens of one forward pass; default: the engine's",
            takes="TOKENS",
            read=parse_tokens,
        ),
    ] = 0
    enforce_eager: Annotated[
        bool, _space("Run without CUDA graphs and compilation, as in vLLM")
    ] = False
    draft: Annotated[
        Names,
        _space(
            "Draft models to try: none, a model, layers=N or mtp; a list",
            takes="MODEL",
            words="models",
            called=DRAFT_WORDS,
        ),
    ] = ()
    num_speculative_tokens: Annotated[
        Sizes, _space("Draft tokens per step; a list", takes="N", read=parse_tokens)
    ] = ()
    acceptance_rate: Annotated[
        tuple[float, ...],
        _space(
            "Share of draft tokens that is accepted; default: 0.8",
            takes="X",
            read=parse_acceptance,
        ),
    ] = ()
    disaggregate: Annotated[
        bool, _space("Also try prefill on separate replicas", called=DISAGGREGATE_WORDS)
    ] = False
    price_per_hour: Annotated[
        Names,
        Option(
            "Price per GPU and hour: 2.5, h100=2.5,h200=3.1 or a YAML file",
            takes="MONEY",
            is_common=True,
            called="price cost cost-per-hour",
        ),
    ] = ()
