"""The records of `latency`: one request, or a batch of equal ones, with what speculation and the lack of a cache make of it."""

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
    """What `latency` is asked.

    prefix_len: leading prompt tokens that are cached already. max_num_batched_tokens: chunk of the prefill, 0 for the whole.
    draft: '', or as `draft_model` takes it; num_speculative_tokens 0 for the best, acceptance_rate None for 0.8, and both
    refused without a draft. no_cache: also the same without a cache; head: the positions that its LM head sees, last or all.
    cpu_offload_gb: GiB of each GPU's weights that stay in the host's memory. price_per_hour: of one GPU; 0 for no cost.
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
    """What requests of one deployment and batch size share: their steps, those without a cache by head, where such a step
    takes twice as long, by head.
    """

    steps: DecodeSteps | None
    again: dict[str, StepsAgain]
    doubles: dict[str, int | None]


def latency_records(asked_for: Sequence[tuple[Deployment, LatencyOptions]]) -> list[dict[str, Any]]:
    """Each as its `latency_record`; steps that requests of one deployment have in common are timed once.

    Raises UserError where all requests take more than MOST_IN_ALL passes, or MOST_AGAIN without a cache.
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
    """One configuration as a flat record.

    uncached_ttft_s: without the cached prefix, where there is one. energy_per_token_j: all GPUs at their full power for the
    whole request, by generated tokens; None where the GPU's power is not known. fallback: what products are computed in, in
    words, where the GPU has no unit.
    """
    return latency_records([(deployment, asked)])[0]


def _record(deployment: Deployment, asked: LatencyOptions, known: _Known) -> dict[str, Any]:
    """Of a deployment with its weights where they are asked to be. Keeps in `known` where steps take twice as long."""
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
        if asked.head not in known.doubles:  # it hangs on neither length
            known.doubles[asked.head] = doubling_context(deployment, asked.batch_size, asked.head == "all")
        record["no_cache_doubles_from"] = known.doubles[asked.head]
    draft = drafting(deployment, asked)
    if draft:
        record |= _speculative(deployment, draft, asked)
    fallbacks = dict.fromkeys(d.fallback(*passes) for d in (deployment, draft) if d)
    return record | {"fallback": "; ".join(filter(None, fallbacks)) or None}


def _uncached(deployment: Deployment, asked: LatencyOptions) -> float | None:
    """Seconds to the first token where the prefix is not cached yet; None where there is none."""
    if not asked.prefix_len:
        return None
    return request(deployment, asked.input_len, 1, asked.batch_size, 0, asked.max_num_batched_tokens).ttft_s


def with_host_weights(deployment: Deployment, asked: LatencyOptions) -> Deployment:
    """The deployment with so many of its weights in the host's memory."""
    return msgspec.structs.replace(deployment, host_weights=offloaded(deployment.weight_bytes, asked.cpu_offload_gb))


def _offload(deployment: Deployment, decode: Batch) -> dict[str, Any]:
    """Bytes of a GPU's weights in the host's memory, and the seconds that they take its link in a decode pass."""
    away = deployment.host_weights
    return {"cpu_offload_bytes": away, "cpu_offload_s": deployment.host_seconds(deployment.operators(decode)) if away else None}


def drafting(deployment: Deployment, asked: LatencyOptions) -> Deployment | None:
    """The draft model, run as the model is; None where there is none."""
    if not asked.draft:
        return None
    return msgspec.structs.replace(deployment, model=draft_model(deployment.model, asked.draft), host_weights=0)


def _speculative(deployment: Deployment, draft: Deployment, asked: LatencyOptions) -> dict[str, Any]:
    """One step of speculative decoding at mid length."""
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
    """Return whether the requests fit, as `batch_memory`, with the draft beside the model."""
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
