"""Latency of one request, or of a batch of equal requests, with and without a cache.

e2e = ttft + (output_len − 1) · tpot. The first output token comes from the prefill. The step that
makes the j-th token (j ≥ 2) runs at context input_len + j − 1.

A KV cache may save almost no time for one request. Without a cache, every step passes all tokens
through the layers again. All work beyond the work of a run with a cache is redundant. It may still
cost no time, because a pass over few tokens takes as long as its launches and the reads of the
weights. A cache saves time only if a pass over all tokens takes longer than a pass over a single
token.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from math import fsum, isnan, nan
from typing import Any, NamedTuple

from msgspec.structs import replace

from kvcalc.arithmetic import Num, Points
from kvcalc.capacity.fit_records import batch_memory
from kvcalc.capacity.memory_budget import offloaded_bytes
from kvcalc.errors import UserError
from kvcalc.gpu.gpu import Gpu, roofline, total_seconds
from kvcalc.layers.batch import Batch
from kvcalc.library.load import load_gpu
from kvcalc.model.memory import fullest_stage
from kvcalc.model.model import Model
from kvcalc.model.precision import stored_as
from kvcalc.question.options import parse_number
from kvcalc.question.serving_options import LatencyOptions, check_steps
from kvcalc.records import Record
from kvcalc.serving.speculation import (
    best_drafted,
    break_even_batch,
    draft_model,
    expected_tokens,
    requested_speculation,
    step_times,
)
from kvcalc.timing.deployment import HostTransfer, TimedDeployment

BLOCK = 1 << 14  # passes timed in one call, so that their arrays fit into the CPU's cache
# kinds of layers of a pass of weight 1; weight from which blocks are smaller
FEW_KINDS, SMALL_BLOCK_WEIGHT = 4, 8
# Maximum share of the saturation rate, so that the queue empties after a burst. With random
# arrivals, the wait is ρ / (2 · (1 − ρ)) service times (M/D/1 queue): 9.5 at 0.95, 500 at 0.999.
MAX_SUSTAINED_SHARE = 0.95


class Latency(NamedTuple):
    """Times, matrix FLOPs and bytes of a batch of equal requests that start together.

    A decode step is a forward pass that gives each sequence one more token after its first output
    token. FLOPs and bytes are of one GPU of each pipeline stage, summed over the stages.

    Attributes:
        ttft_s: Seconds to the first output token. None if the GPU has no matrix peak, without which
            a prefill has no time.
        tpot_s: Mean seconds per output token after the first. None if there is only one output
            token.
        tpot_first_s: Seconds of the first decode step; None without a decode step.
        tpot_last_s: Seconds of the last decode step, at the longest context; None without a decode
            step.
        e2e_s: Seconds to the last output token. None if `ttft_s` is None.
        flops: Matrix FLOPs of all passes: prefill and decode steps.
        bytes: Bytes that all passes read and write in GPU memory: prefill and decode steps.
    """

    ttft_s: float | None
    tpot_s: float | None
    tpot_first_s: float | None
    tpot_last_s: float | None
    e2e_s: float | None
    flops: int
    bytes: int


def prefill_passes(
    input_len: int,
    batch_size: int,
    cached: int,
    chunk: int = 0,
    block: int = BLOCK,
    max_points: int = 0,
) -> Iterator[Batch]:
    """Yield the forward passes that process the prompts of a batch of equal sequences.

    There is one pass for the whole prompts, or one pass per chunk. A yielded `Batch` describes one
    pass. For chunks of equal size it describes up to `block` passes, as arrays of the cached tokens
    before each chunk.

    Args:
        input_len: Prompt tokens of each sequence, including `cached`.
        batch_size: Number of sequences.
        cached: Leading prompt tokens that are in the cache already (prefix hit).
        chunk: New tokens of each sequence per pass; 0 for the whole prompt.
        block: Maximum number of passes in one `Batch`.
        max_points: Up to this many passes, the arrays are `Points`, which need no NumPy.
    """
    chunk = chunk or input_len
    chunks, remainder = divmod(input_len - cached, chunk)
    if chunks == 1:
        yield Batch.prefill(chunk, batch_size, cached)
    else:
        for numbers in blocks_of(0, chunks, block, max_points):
            yield Batch.prefill(chunk, batch_size, cached + chunk * numbers)
    if remainder:
        yield Batch.prefill(remainder, batch_size, input_len - remainder)


def request(
    deployment: TimedDeployment,
    input_len: int,
    output_len: int,
    batch_size: int = 1,
    cached: int = 0,
    chunk: int = 0,
    max_points: int = 0,
    no_cache: bool = False,
    all_positions: bool = False,
) -> Latency:
    """Return times, FLOPs and bytes of a batch of equal requests that start together.

    Args:
        deployment: Model on one replica of GPUs.
        input_len: Prompt tokens of each request.
        output_len: Output tokens of each request.
        batch_size: Number of requests.
        cached: Leading prompt tokens of each request that are in the KV cache already (prefix hit).
        chunk: Prompt tokens of each request per forward pass of the prefill; 0 for the whole prompt
            in one pass.
        max_points: If there are at most this many passes, they are timed without NumPy, which
            saves its import. It does not change the result.
        no_cache: Whether there is no KV cache, so that each decode step computes all tokens again.
        all_positions: Whether the LM head runs on all tokens of a pass instead of the last token of
            each sequence.

    Raises:
        UserError: `cached` is not smaller than `input_len`.
    """
    if not 0 <= cached < input_len:
        raise UserError(
            f"a cached prefix of {cached:,} tokens leaves no token of a prompt of {input_len:,}"
        )
    # smaller blocks for models with 64 kinds of layers or more, whose arrays need much memory
    block = BLOCK // max(1, passes_in_one(deployment.model) // SMALL_BLOCK_WEIGHT)
    prompt = [*prefill_passes(input_len, batch_size, cached, chunk, block, max_points)]
    is_timed = all(deployment.has_time(batch) for batch in prompt)
    step = Batch.prefill if no_cache else Batch.decode
    steps = (
        step(contexts, batch_size)
        for contexts in blocks_of(input_len + 1, input_len + output_len, block, max_points)
    )
    prefill = _spent(deployment, prompt, all_positions, is_timed)
    decode = _spent(deployment, steps, all_positions)
    ttft = None if isnan(prefill.seconds) else prefill.seconds
    has_steps = decode.passes > 0
    return Latency(
        ttft_s=ttft,
        tpot_s=decode.seconds / decode.passes if has_steps else None,
        tpot_first_s=decode.first if has_steps else None,
        tpot_last_s=decode.last if has_steps else None,
        e2e_s=None if ttft is None else ttft + decode.seconds,
        flops=prefill.flops + decode.flops,
        bytes=prefill.bytes + decode.bytes,
    )


def token_projections(input_len: int, output_len: int) -> tuple[int, int]:
    """Return how many tokens of one sequence run through the layers, as (with, without cache).

    For n input and m output tokens, n + m − 1 tokens run through the layers with a KV cache.
    Without a cache, each step computes all tokens again, which gives n + (n + 1) + … + (n + m − 1).
    The difference is redundant work.

    Args:
        input_len: Prompt tokens n.
        output_len: Output tokens m.
    """
    last = input_len + output_len - 1
    return last, (input_len + last) * output_len // 2


class _Spent(NamedTuple):
    """Time and work of consecutive passes.

    Attributes:
        seconds: Seconds of all passes.
        first: Seconds of the first pass.
        last: Seconds of the last pass.
        passes: Number of passes.
        flops: Matrix FLOPs of all passes.
        bytes: Bytes of all passes.
    """

    seconds: float
    first: float
    last: float
    passes: int
    flops: int
    bytes: int


def passes_in_one(model: Model) -> int:
    """Return the number of usual passes that take kvcalc as long to predict as one of this model.

    A command that predicts the times of many passes multiplies their number by this factor before
    it compares it with its limit. A kind of layer is a set of equal layers. The factor is the
    number of kinds ÷ 4, rounded down, but at least 1. Example: 8 kinds of layers give 2.

    Args:
        model: The model whose forward passes are timed.
    """
    return max(1, len(model.kinds) // FEW_KINDS)


def blocks_of(first: int, end: int, block: int = BLOCK, max_points: int = 0) -> Iterator[Any]:
    """Yield the integers from `first` to `end` − 1 in arrays of at most `block` elements.

    Each integer is, for example, a context at which a decode step is timed. Blocks limit the memory
    that kvcalc needs.

    Args:
        first: First integer.
        end: Last integer, plus one.
        block: Maximum length of an array.
        max_points: If there are at most this many integers, one `Points` object with all of them is
            yielded, which needs no NumPy.
    """
    if 0 < end - first <= max_points:
        yield Points(range(first, end))
        return
    for start in range(first, end, block):
        import numpy as np

        yield np.arange(start, min(start + block, end), dtype=float)


def _spent(
    deployment: TimedDeployment,
    batches: Iterable[Batch],
    all_positions: bool,
    timed: bool = True,
) -> _Spent:
    """Return the total of the passes over `batches`, which may have arrays of passes.

    Seconds are NaN if `timed` is False, because the GPU has no time for these passes.
    """
    block_seconds, ends = [], []
    passes = flops = moved = 0
    for batch in batches:
        group = batch.groups[0]
        count = max(getattr(value, "shape", (1,))[0] for value in (group.past, group.new))
        cost = deployment.cost(batch, all_positions)
        seconds: Any = deployment.seconds(batch, all_positions) if timed else nan
        is_array = bool(getattr(seconds, "ndim", 0))
        ends += [float(seconds[n] if is_array else seconds) for n in (0, -1)]
        # an exact sum, so that a list gives the same as one request
        block_seconds.append(fsum(seconds) if is_array else count * ends[-1])
        passes += count
        flops += _exact_sum(cost.flops, count)
        moved += _exact_sum(cost.bytes, count)
    first, last = (ends[0], ends[-1]) if ends else (0.0, 0.0)
    return _Spent(sum(block_seconds), first, last, passes, flops, moved)


def _exact_sum(values: Num, count: int) -> int:
    """Return the exact sum of `count` equal ints, or of an array of integers below 2^53.

    A sum of floats would round.
    """
    if isinstance(values, int):
        return values * count
    if isinstance(values, Points):
        return sum(map(int, values))
    high, low = divmod(values, 1 << 26)
    return (int(high.sum()) << 26) + int(low.sum())


def prices_of(words: Sequence[str], gpus: Sequence[Gpu]) -> dict[str, float]:
    """Parse the option `--price-per-hour` into prices per GPU and hour, by name of the GPU model.

    Args:
        words: Prices in any currency, such as ("h100=2.5", "h200=3"), or one number for one GPU
            model. () gives no prices.
        gpus: The GPU models of the question.

    Raises:
        UserError: A GPU is unknown, a price is wrong, or one number is for several GPU models.
    """
    text = ",".join(words)
    if text and "=" not in text:
        is_list = {*text} & {":", ","}
        if is_list or len(gpus) != 1:
            problem = "not a price" if is_list else f"one price for {len(gpus)} GPU models"
            raise UserError(f"price-per-hour {text!r} is {problem}", "Write h100=2.5,h200=3.1")
        words = [f"{gpus[0].name}={text}"]
    known = {gpu.name: gpu for gpu in gpus}
    prices = {}
    for word in words:
        name, _, number = word.partition("=")
        gpu = known.get(name.strip()) or load_gpu(name)
        prices[gpu.name] = parse_number(number, f"price of {gpu.name}")
        if not prices[gpu.name]:
            raise UserError(f"price of {gpu.name} {number!r} is not above 0")
    return prices


def cost_per_million(price_per_hour: float, gpus: int, tokens_per_s: float) -> float:
    """Return the price of 10^6 output tokens, in the currency of `price_per_hour`.

    Args:
        price_per_hour: Price of one GPU per hour.
        gpus: Number of GPUs.
        tokens_per_s: Output tokens per second of all GPUs together.
    """
    return price_per_hour * gpus / 3600 / tokens_per_s * 1e6


MAX_CONTEXT = 1 << 20  # context up to which a step without the cache is searched
MAX_PASSES = 1 << 23  # passes of all requests
MAX_POINTS = 512  # steps of a request up to which NumPy is not imported


def doubling_context(
    deployment: TimedDeployment, batch_size: int, all_positions: bool
) -> int | None:
    """Return the smallest context at which a decode step without the cache takes twice as long.

    It is compared with a decode step with the KV cache. The context is in tokens per sequence. None
    means that there is no such context up to 2^20 tokens or up to the model's maximum.

    Args:
        deployment: Model on one replica of GPUs.
        batch_size: Number of sequences in the step.
        all_positions: Whether the LM head of the step without the cache runs on all tokens instead
            of the last token of each sequence.
    """

    def doubled(context: int) -> bool:
        again = deployment.seconds(Batch.prefill(context, batch_size), all_positions)
        return bool(again >= 2 * deployment.seconds(Batch.decode(context, batch_size)))

    last = min(MAX_CONTEXT, deployment.model.position_embeddings or MAX_CONTEXT)
    if not doubled(last):
        return None
    return bisect_left(range(last), True, lo=1, key=doubled)


def largest_batch(deployment: TimedDeployment, options: LatencyOptions) -> LatencyOptions:
    """Return the options with the largest batch that fits and meets `max_tpot`, at least 1.

    Args:
        deployment: The model on one replica of GPUs.
        options: Input and output length of the requests, and the maximum TPOT.

    Raises:
        UserError: The options have a draft or a batch size.
    """
    if options.draft or options.batch_size > 1:
        raise UserError("max-tpot finds the batch size", "Leave out --batch-size and --draft")

    def is_slower(size: int) -> bool:
        tpot = request(deployment, options.input_len, options.output_len, size).tpot_s
        return (tpot or 0) > options.max_tpot

    deployment = with_host_weights(deployment, options)
    largest = request_memory(deployment, options)["max_num_seqs"] or 1
    size = bisect_left(range(largest + 1), True, lo=2, key=is_slower) - 1
    return replace(options, batch_size=size)


def latency_records(requests: Sequence[tuple[TimedDeployment, LatencyOptions]]) -> list[Record]:
    """Return the latency of batches of equal requests as flat JSON records.

    The keys are in `LatencyRecord`. Some of them need an explanation:

    - `uncached_ttft_s` is the time to first token if no prefix were cached; None without a prefix.
    - `energy_per_token_j` assumes that all GPUs run at full power for the whole request. It is None
      if the GPU's power or the time of the prefill is unknown.
    - `fallback` is a note if the GPU lacks a matrix unit, such as "computed in bf16: rtx-3090 has
      no fp8 unit"; otherwise None.

    Args:
        requests: One pair for each record: the model on one replica of GPUs, and the options of its
            batch, such as input length, output length and batch size.

    Raises:
        UserError: All requests together take more than 2^23 forward passes. A pass of a model with
            many kinds of layers counts several times.
    """
    passes = 0
    for deployment, options in requests:
        own_passes = (1 + options.no_cache) * options.output_len + options.chunks
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
    record = {
        **deployment.identifying_keys,
        "batch_size": batch_size,
        "input_len": input_len,
        "output_len": options.output_len,
        "max_tpot_s": options.max_tpot or None,
        "prefix_len": options.prefix_len,
        **latency._asdict(),
        "uncached_ttft_s": uncached_ttft,
        "decode_tokens_per_s": latency.tpot_s and batch_size / latency.tpot_s,
        "speedup": None,
        "tokens_per_step": 1.0,
        "time_basis": deployment.time_basis,
        # no embedder was measured
        "time_p90_error": None if pooling else deployment.p90_error(last_step),
        "uncalibrated_share": float(deployment.uncalibrated_share(last_step)),
    }
    record |= _per_token(deployment, options, latency.e2e_s, record["decode_tokens_per_s"])
    host_bytes = deployment.host_weights
    transfer = HostTransfer(seconds=None)
    if host_bytes:
        transfer = deployment.host_transfer(deployment.operators(last_step))
    record |= transfer.record(host_bytes)
    record |= request_memory(deployment, options)
    if options.no_cache:
        record |= _no_cache_fields(deployment, options, latency)
    draft = drafting(deployment, options)
    if draft:
        record |= _speculative(deployment, draft, options)
        decode_s = (options.output_len - 1) * record["speculative_tpot_s"]
        record["speculative_e2e_s"] = latency.ttft_s and latency.ttft_s + decode_s
    passes = Batch.prefill(input_len, batch_size), last_step
    fallback_sentence = dict.fromkeys(d.fallback(*passes) for d in (deployment, draft) if d)
    return record | {"fallback": "; ".join(filter(None, fallback_sentence)) or None}


def _per_token(
    deployment: TimedDeployment,
    options: LatencyOptions,
    e2e_s: float | None,
    decode_rate: float | None,
) -> Record:
    """Return rate, cost and energy per output token, or per input token of an embedder. All tokens
    take `e2e_s` seconds, and decode steps generate `decode_rate` tokens per second.
    """
    gpus, power = deployment.parallelism.gpus, deployment.gpu.power_w
    size, given_rate = options.batch_size, options.output_throughput
    rate = given_rate or (size * options.output_len / e2e_s if e2e_s else None)
    record = {"output_tokens_per_s": rate}
    if deployment.model.pooling:
        rate = size * options.input_len / e2e_s if e2e_s else None
        record = {
            "output_tokens_per_s": None,
            "sequences_per_s": rate and rate / options.input_len,
        }
    if price := prices_of(options.price_per_hour, [deployment.gpu]).get(deployment.gpu.name):
        record["cost_per_million_tokens"] = rate and cost_per_million(price, gpus, rate)
        if given_rate and record["output_tokens_per_s"]:
            record["output_throughput"] = given_rate
        elif decode_rate:
            record["decode_cost_per_million_tokens"] = cost_per_million(
                price, gpus, decode_rate
            )
    return record | {"energy_per_token_j": power * gpus / rate if power and rate else None}


def _no_cache_fields(
    deployment: TimedDeployment, options: LatencyOptions, cached: Latency
) -> Record:
    """Return the fields of the same request without a cache, compared with the `cached` request.

    Fields: no_cache_redundant_flops_share: 1 − FLOPs with the cache / FLOPs without. 0 if chunks of
    a prompt, each with its LM head, take more FLOPs. no_cache_token_projections: Tokens of all
    sequences that pass through the layers. tpot_last_bound_s: Lower bound of the last step with the
    cache, from the datasheet only. It consists mostly of reads of the weights. Launches take the
    remaining time of the step. no_cache_doubles_from: None; `latency_records` sets it.
    """
    lengths, size = (options.input_len, options.output_len), options.batch_size
    plain = request(
        deployment,
        *lengths,
        size,
        max_points=MAX_POINTS,
        no_cache=True,
        all_positions=options.head == "all",
    )
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
    """Return the deployment with the weights that `cpu_offload_gb` moves to CPU memory.

    The field `host_weights` of the result has their bytes on one GPU, in the pipeline stage with
    the most bytes. Without `cpu_offload_gb` it is 0.

    Args:
        deployment: Model on one replica of GPUs.
        options: Options of the request; only `cpu_offload_gb` is used. It has the meaning of vLLM's
            option of the same name.
    """
    if not options.cpu_offload_gb:
        return replace(deployment, host_weights=0)
    model = stored_as(deployment.model, deployment.precision)
    formats, ranks = deployment.formats, deployment.parallelism
    stage = fullest_stage(model, formats, ranks, 1, 1).number
    away = offloaded_bytes(model, formats, ranks, stage, options.cpu_offload_gb)
    return replace(deployment, host_weights=away)


def drafting(deployment: TimedDeployment, options: LatencyOptions) -> TimedDeployment | None:
    """Return the draft model for speculative decoding as a deployment on the target's GPUs.

    The result is None if the options name no draft model. All weights of the draft model are on the
    GPUs.

    Args:
        deployment: The deployment of the target, which is the model whose output the draft
            proposes.
        options: Options of the request; `options.draft` names the draft model.
    """
    if not options.draft:
        return None
    return replace(
        deployment, model=draft_model(deployment.model, options.draft), host_weights=0
    )


def _speculative(
    deployment: TimedDeployment, draft: TimedDeployment, options: LatencyOptions
) -> Record:
    """Return the fields about a step of speculative decoding in the middle of the answer."""
    context = options.mid_length
    drafted, accepted = requested_speculation(deployment.model, options)
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
        "stops_paying_at_batch": break_even_batch(
            deployment, draft, context, times.drafted, accepted
        ),
        "draft_weight_bytes": draft.weight_bytes,
        "draft_cache_bytes": draft.cache_size(options.context, options.batch_size).stored,
    }


def request_memory(deployment: TimedDeployment, options: LatencyOptions) -> Record:
    """Return whether a batch of requests fits in GPU memory, as five JSON keys with values.

    The keys are `fits`; `kv_budget_bytes` and `kv_needed_bytes` of one GPU; `max_num_seqs`, the
    sequences of this length that fit in the replica; and `memory_note`. If the engine cannot run
    the model, `memory_note` is its message, and the other keys are None. But `fits` is False if the
    data exceed the memory even without the engine's padding.

    Args:
        deployment: The target model on one replica of GPUs.
        options: Lengths, batch size, draft and memory options of the batch.
    """
    is_mtp = options.draft == "mtp"
    draft = draft_model(deployment.model, options.draft) if options.draft else None
    return batch_memory(
        deployment,
        [(options.batch_size, options.context)],
        max_num_batched_tokens=options.max_num_batched_tokens,
        cpu_offload_gb=options.cpu_offload_gb,
        shared_prefix=options.prefix_len,
        mtp=is_mtp,
        draft=None if is_mtp else draft,
        num_speculative_tokens=options.num_speculative_tokens,
    )
