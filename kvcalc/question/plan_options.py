"""The question of `plan`: the load and its targets, and the deployments to try."""

from typing import Annotated

import msgspec

from kvcalc.errors import UserError
from kvcalc.question.deployment_options import EngineName, gpu_count
from kvcalc.question.options import MemoryShare, Prices, Question, Tokens
from kvcalc.units import parse_seconds, parse_tokens

# sequences per replica that are tried if the users do not determine them
_COUNTS = "1 2 4 8 12 16 24 32 48 64 96 128 192 256 384 512 768 1024"
SEQUENCE_COUNTS = [*map(int, _COUNTS.split())]


class RequestLengths(msgspec.Struct, frozen=True):
    """Numbers of tokens of one request.

    Attributes:
        prompt: Tokens before the first output token.
        context: Tokens of the sequence at the end of the request. It equals `prompt` if the output
            length is unknown.
        output: Output tokens; 0 if unknown. Decode steps are then timed at the full context.
        cached: Leading tokens of the prompt that are in a prefix cache.
    """

    prompt: int
    context: int
    output: int
    cached: int

    @property
    def middle(self) -> int:
        """Return the tokens of the sequence when half of the output is generated.

        Decode steps are timed at this length. If the output length is unknown, return `context`.
        """
        return self.prompt + max(1, self.output // 2) if self.output else self.context


class Requirement(Question, frozen=True, kw_only=True):
    """The load that `plan` must serve, and its targets for latency and throughput.

    0 means not given.

    Attributes:
        users: Concurrent sequences over all replicas.
        context: Tokens of each request; alternatively, input_len and output_len.
        input_len: Prompt tokens of each request.
        output_len: Output tokens of each request.
        rate: Requests per second over all replicas, instead of users.
        max_ttft: Maximum seconds to the first token (TTFT).
        max_tpot: Maximum seconds per further token (TPOT).
        min_throughput: Minimum output tokens per second of all replicas.
        prefix_hit_rate: Share of each prompt that is in a prefix cache, from 0 to below 1.
    """

    users: Tokens = 0
    context: Tokens = 0
    input_len: Tokens = 0
    output_len: Tokens = 0
    rate: float = 0.0
    max_ttft: Annotated[float, parse_seconds] = 0.0
    max_tpot: Annotated[float, parse_seconds] = 0.0
    min_throughput: float = 0.0
    prefix_hit_rate: float = 0.0

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
                not (self.users or self.rate or self.min_throughput),
                "a plan needs a load",
                "Give --users, --rate or --min-throughput",
            ),
            (
                not self.users and not self.output_len,
                "a load without --users needs the lengths of a request",
                "Give --input-len and --output-len instead of --context",
            ),
            (
                not self.context and not self.input_len,
                "a plan needs the tokens of a request",
                "Give --context, such as --context 8k, or --input-len and --output-len",
            ),
            (
                self.users and self.rate,
                "use either --users or --rate",
                "Users wait for their answers, requests at a rate do not",
            ),
        )
        for is_wrong, message, hint in problems:
            if is_wrong:
                raise UserError(message, hint)
        if not 0 <= self.prefix_hit_rate < 1:
            raise UserError(f"prefix-hit-rate {self.prefix_hit_rate} is not from 0 to below 1")

    @property
    def time_limits(self) -> dict[str, float]:
        """Return the latency targets in seconds, by name: `ttft` and `tpot`.

        `ttft` is the time to the first token, `tpot` the time per further output token. Targets
        that are not given are left out.
        """
        limits = {"ttft": self.max_ttft, "tpot": self.max_tpot}
        return {time: limit for time, limit in limits.items() if limit}

    @property
    def has_targets(self) -> bool:
        """Return whether a latency or a throughput is required."""
        return bool(self.time_limits or self.min_throughput)

    @property
    def lengths(self) -> RequestLengths:
        """Return the numbers of tokens of each request, such as its prompt and output tokens.

        They follow from `input_len` and `output_len`, or from `context`.
        """
        prompt = self.context or self.input_len
        return RequestLengths(
            prompt=prompt,
            context=self.context or self.input_len + self.output_len,
            output=self.output_len,
            cached=int(prompt * self.prefix_hit_rate),
        )

    def sequence_counts(self, max_replicas: int) -> set[int]:
        """Return the numbers of concurrent sequences per replica that `plan` tries.

        If `users` are given, they are divided by each number of replicas up to `max_replicas`.
        Example: 10 users and at most 3 replicas give 10, 5 and 4. Otherwise, 18 fixed numbers from
        1 to 1024 are tried.

        Args:
            max_replicas: Maximum number of replicas.
        """
        if not self.users:
            return set(SEQUENCE_COUNTS)
        return {
            -(-self.users // number) for number in range(1, min(max_replicas, self.users) + 1)
        }


Sizes = tuple[int, ...]
Names = tuple[str, ...]
GpuCounts = Annotated[Sizes, gpu_count]


class SpaceOptions(Question, frozen=True):
    """The deployments that `plan` tries: every combination of the items of the tuples.

    `price_per_hour` is not combined: it gives each GPU its price.

    Attributes:
        gpu: GPU presets or files; `all` for every preset.
        max_gpus: Maximum number of GPUs of all replicas together.
        tp, pp: GPUs for tensor parallelism, and pipeline stages; () for every possible number.
        dp: Data-parallel groups of a replica; () for every possible number, but 1 without experts.
        ep: GPUs over which experts are spread; () for 1 or tp · dp.
        nodes: Number of nodes of a replica; 0 for as few as the interconnect allows.
        inter_node_bandwidth: Bandwidth per GPU between nodes, such as `50GB/s`; '' for the
            preset's.
        dtype, kv_cache_dtype: Data types of weights and of the cache.
        quantization: Weight formats; '' is the checkpoint's own.
        engine: `vllm`, `sglang`, `trtllm`, `llama.cpp` or `none` (without an engine's rules).
        engine_version: Version of the engine; '' for the latest.
        bounds: Whether times are datasheet bounds (at the GPU's peak rates) instead of predictions.
        calibration: Name or file of a calibration (time models fitted to measurements); '' for the
            engine's own.
        calibration_from: GPU model whose calibration is scaled to the other GPUs; '' for none.
        mixed: Has no effect. Old scripts may use it.
        stack: Former option for engine or calibration; see `engine_choice`.
        gpu_memory_utilization: Share of GPU memory for the engine; 0 for the engine's default.
        max_num_batched_tokens: Tokens of one forward pass; 0 for the engine's default.
        enforce_eager: Whether the engine runs without CUDA graphs and compilation.
        draft: Drafts for speculative decoding: a model, `layers=N` (the model's own first N layers)
            or `mtp` (its prediction layers); () for none.
        num_speculative_tokens: Draft tokens per sequence and decode step; required with a draft.
        acceptance_rate: Shares of draft tokens that are accepted, from 0 to 1; () for 0.8.
        disaggregate: Whether to try prefill on separate replicas too.
        price_per_hour: Price of a GPU per hour, as `2.5`, or for each GPU model as `h100=2.5`.
    """

    gpu: Names = ("all",)
    max_gpus: int = 16
    tp: GpuCounts = ()
    pp: GpuCounts = ()
    dp: GpuCounts = ()
    ep: GpuCounts = ()
    nodes: int = 0
    inter_node_bandwidth: str = ""
    dtype: Names = ("auto",)
    kv_cache_dtype: Names = ("auto",)
    quantization: Names = ("",)
    engine: EngineName = "vllm"
    engine_version: str = ""
    bounds: bool = False
    calibration: str = ""
    calibration_from: str = ""
    mixed: bool = False
    stack: str = ""
    gpu_memory_utilization: MemoryShare = 0.0
    max_num_batched_tokens: Tokens = 0
    enforce_eager: bool = False
    draft: Names = ()
    num_speculative_tokens: Annotated[Sizes, parse_tokens] = ()
    acceptance_rate: tuple[float, ...] = ()
    disaggregate: bool = False
    price_per_hour: Prices = ()
