"""The records of `latency`: a batch of equal requests, with speculation and without a cache."""

from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import msgspec

from kvcalc.capacity.memory_record import batch_memory
from kvcalc.capacity.placement import offloaded
from kvcalc.errors import UserError
from kvcalc.layers.batch import Batch
from kvcalc.library.words import spelled, tokens_called
from kvcalc.serving.alike import check_work, groups_of
from kvcalc.serving.latency import DecodeSteps, StepsAgain, check_steps, cost_per_million, request
from kvcalc.serving.redundancy import doubling_context, no_cache_fields
from kvcalc.serving.speculation import ACCEPTANCE, MOST_SPECULATED, best_drafted, draft_model, speculate, stops_paying
from kvcalc.timing.deployment import Deployment

NO_CACHE_HEADS = ("last", "all")


class LatencyOptions(msgspec.Struct, frozen=True):
    """The options of `latency`.

    Attributes:
        no_cache: Whether to compute the same request also without a cache.
        head: Positions of the LM head without a cache, `last` or `all`.
        prefix_len: Leading prompt tokens that are cached already.
        max_num_batched_tokens: Tokens per chunk of the prefill; 0 for the whole prompt.
        draft: '' or a draft for `draft_model`.
        num_speculative_tokens: Draft tokens per step; 0 for the best number. Needs a draft.
        acceptance_rate: Acceptance rate of a draft token; None for 0.8. Needs a draft.
        cpu_offload_gb: GiB of each GPU's weights that stay in host memory.
        price_per_hour: Price of one GPU; 0 for no cost.
    """

    input_len: Annotated[int, tokens_called("input length")] = 2000
    output_len: Annotated[int, tokens_called("output length")] = 500
    batch_size: Annotated[int, tokens_called("batch size")] = 1
    no_cache: bool = False
    head: str = "last"
    prefix_len: int = 0
    max_num_batched_tokens: int = 0
    draft: str = ""
    num_speculative_tokens: int = 0
    acceptance_rate: float | None = None
    cpu_offload_gb: float = 0.0
    price_per_hour: float = 0.0

    def __post_init__(self) -> None:
        if not self.draft and (self.num_speculative_tokens or self.acceptance_rate is not None):
            raise UserError("num-speculative-tokens and acceptance-rate are of a draft, and there is none")
        if self.head not in NO_CACHE_HEADS:
            raise UserError(f"unknown head {self.head!r}", hint=f"Known: {', '.join(NO_CACHE_HEADS)}")
        if self.head != "last" and not self.no_cache:
            raise UserError(f"head {self.head} is of a generation without a cache", hint="Add --no-cache")
        for name in ("prefix_len", "max_num_batched_tokens"):
            if getattr(self, name) < 0:
                raise UserError(f"{spelled(name)} {getattr(self, name)} is below 0")
        check_steps("tokens of an answer", self.output_len)
        check_steps("chunks of the prompt", self.input_len // (self.max_num_batched_tokens or self.input_len))
        if not 0 <= self.cpu_offload_gb <= 1 << 20:
            raise UserError(f"cpu-offload-gb {self.cpu_offload_gb} is not a number of GiB")
        if not 0 <= self.num_speculative_tokens <= MOST_SPECULATED or not 0 <= self.price_per_hour < 1e9:
            raise UserError(f"num-speculative-tokens should be 0 to {MOST_SPECULATED} and price-per-hour 0 or more")

    @property
    def context(self) -> int:
        """Tokens of a sequence at its end."""
        return self.input_len + self.output_len

    @property
    def mid_length(self) -> int:
        """Tokens of a sequence half-way through its answer."""
        return self.input_len + max(1, self.output_len // 2)


class _Known(NamedTuple):
    """Results that requests of one deployment and batch size share.

    Attributes:
        steps: Decode steps with a cache.
        again: Steps without a cache, by LM head positions.
        doubles: Contexts at which a step without a cache takes twice as long, by LM head positions.
    """

    steps: DecodeSteps | None
    again: dict[str, StepsAgain]
    doubles: dict[str, int | None]


def latency_records(asked_for: Sequence[tuple[Deployment, LatencyOptions]]) -> list[dict[str, Any]]:
    """Return the `latency_record` of each request. Steps common to several requests are timed once.

    Raises:
        UserError: All requests take more than MOST_IN_ALL passes, or more than MOST_AGAIN passes
            without a cache.
    """
    alike: dict[tuple[int, int, float], dict[int, LatencyOptions]] = {}
    for number, (deployment, asked) in enumerate(asked_for):
        alike.setdefault((id(deployment), asked.batch_size, asked.cpu_offload_gb), {})[number] = asked
    models = {id(deployment): deployment.model for deployment, _ in asked_for}
    together = {some: [*groups_of(requests, models[some[0]])] for some, requests in alike.items()}
    check_work([asked for _, asked in asked_for], [group for groups in together.values() for group in groups])
    records: dict[int, dict[str, Any]] = {}
    for (_, batch_size, _), groups in together.items():
        deployment, doubles = with_host_weights(*asked_for[groups[0].numbers[0]]), dict[str, int | None]()
        for group in groups:
            known = _Known(None, {}, doubles)
            if group.ranges:
                again = {head: StepsAgain(deployment, batch_size, group.ranges, head == "all") for head in group.heads}
                known = _Known(DecodeSteps(deployment, batch_size, group.ranges), again, doubles)
            records |= {number: _record(deployment, asked_for[number][1], known) for number in group.numbers}
    return [records[number] for number in range(len(asked_for))]


def latency_record(deployment: Deployment, asked: LatencyOptions) -> dict[str, Any]:
    """Return one configuration as a flat record.

    Fields:
        uncached_ttft_s: TTFT without the cached prefix; None without a prefix.
        energy_per_token_j: Energy per output token, with all GPUs at full power for the whole request.
            None if the GPU's power is unknown.
        fallback: Sentence with the data type of GEMMs if the GPU has no unit for the chosen one.
    """
    return latency_records([(deployment, asked)])[0]


def _record(deployment: Deployment, asked: LatencyOptions, known: _Known) -> dict[str, Any]:
    """Return the record of a deployment whose host weights are already set.

    Contexts at which steps take twice as long are stored in `known`.
    """
    prompt = asked.batch_size, asked.prefix_len, asked.max_num_batched_tokens
    found = request(deployment, asked.input_len, asked.output_len, *prompt, known.steps)
    at_end = known.steps or DecodeSteps(deployment, asked.batch_size, [(asked.context, asked.context + 1)])
    passes = Batch.prefill(asked.input_len, asked.batch_size), at_end.longest
    tokens = asked.batch_size * asked.output_len
    record: dict[str, Any] = deployment.named | {"batch_size": asked.batch_size}
    record |= {"input_len": asked.input_len, "output_len": asked.output_len}
    record |= {"prefix_len": asked.prefix_len, **found._asdict(), "uncached_ttft_s": _uncached(deployment, asked)}
    record |= {"speedup": None, "tokens_per_step": 1.0}
    record |= {"time_basis": deployment.time_basis, "time_p90_error": deployment.p90_error(passes[1])}
    record["uncalibrated_share"] = at_end.uncalibrated_share(asked.context)
    whole = found.e2e_s
    record["output_tokens_per_s"] = tokens / whole if whole else None
    if asked.price_per_hour:
        cost = cost_per_million(asked.price_per_hour, record["gpus"], whole, tokens) if whole else None
        record["cost_per_million_tokens"] = cost
    power = deployment.gpu.power_w
    record["energy_per_token_j"] = power * record["gpus"] * whole / tokens if power and whole else None
    record |= _offload(deployment, passes[1])
    record |= request_memory(deployment, asked)
    if asked.no_cache:
        lengths = asked.input_len, asked.output_len, asked.batch_size
        record |= no_cache_fields(deployment, *lengths, asked.head, found, known.again.get(asked.head))
        if asked.head not in known.doubles:  # the context depends on neither length
            known.doubles[asked.head] = doubling_context(deployment, asked.batch_size, asked.head == "all")
        record["no_cache_doubles_from"] = known.doubles[asked.head]
    draft = drafting(deployment, asked)
    if draft:
        record |= _speculative(deployment, draft, asked)
    fallbacks = dict.fromkeys(d.fallback(*passes) for d in (deployment, draft) if d)
    return record | {"fallback": "; ".join(filter(None, fallbacks)) or None}


def _uncached(deployment: Deployment, asked: LatencyOptions) -> float | None:
    """Return the TTFT in seconds without the cached prefix; None without a prefix."""
    if not asked.prefix_len:
        return None
    return request(deployment, asked.input_len, 1, asked.batch_size, 0, asked.max_num_batched_tokens).ttft_s


def with_host_weights(deployment: Deployment, asked: LatencyOptions) -> Deployment:
    """Return the deployment with the offloaded part of its weights in host memory."""
    return msgspec.structs.replace(deployment, host_weights=offloaded(deployment.weight_bytes, asked.cpu_offload_gb))


def _offload(deployment: Deployment, decode: Batch) -> dict[str, Any]:
    """Return the offloaded bytes of a GPU's weights, and their seconds on its link per decode pass."""
    away = deployment.host_weights
    return {"cpu_offload_bytes": away, "cpu_offload_s": deployment.host_seconds(deployment.operators(decode)) if away else None}


def drafting(deployment: Deployment, asked: LatencyOptions) -> Deployment | None:
    """Return the deployment of the draft model, configured as the target; None without a draft."""
    if not asked.draft:
        return None
    return msgspec.structs.replace(deployment, model=draft_model(deployment.model, asked.draft), host_weights=0)


def _speculative(deployment: Deployment, draft: Deployment, asked: LatencyOptions) -> dict[str, Any]:
    """Return the fields of one step of speculative decoding at mid length."""
    context, drafted = asked.mid_length, asked.num_speculative_tokens
    step = deployment, draft, context, asked.batch_size
    accepted = ACCEPTANCE if asked.acceptance_rate is None else asked.acceptance_rate
    found = speculate(*step, drafted, accepted) if drafted else best_drafted(*step, accepted)
    return {
        "draft": draft.model.name,
        "num_speculative_tokens": found.drafted,
        "acceptance_rate": accepted,
        "tokens_per_step": found.tokens_per_step,
        "draft_s": found.draft_s,
        "verify_s": found.verify_s,
        "speculative_tpot_s": found.tpot_s,
        "speculative_speedup": found.speedup,
        "stops_paying_at_batch": stops_paying(deployment, draft, context, found.drafted, accepted),
        "draft_weight_bytes": draft.weight_bytes,
        "draft_cache_bytes": draft.cache_size(asked.context, asked.batch_size).stored,
    }


def request_memory(deployment: Deployment, asked: LatencyOptions) -> dict[str, Any]:
    """Return whether the requests fit, as in `batch_memory`, with the draft loaded too."""
    options: dict[str, Any] = {
        "max_num_batched_tokens": asked.max_num_batched_tokens,
        "cpu_offload_gb": asked.cpu_offload_gb,
        "shared_prefix": asked.prefix_len,
    }
    if asked.draft == "mtp":
        options["mtp"] = True
    elif asked.draft:
        options["draft"] = draft_model(deployment.model, asked.draft)
    if asked.draft:
        options["num_speculative_tokens"] = asked.num_speculative_tokens
    return batch_memory(deployment, [(asked.batch_size, asked.context)], **options)
