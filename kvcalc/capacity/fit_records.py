"""The records of `fit`: one record per configuration, or per cell of users × contexts.

The keys of `batch_memory` tell whether a batch fits; records of times share them.
"""

import shlex
from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from kvcalc.capacity import Fit
from kvcalc.capacity.command_line import EngineCommand, command_of
from kvcalc.capacity.deployment_fit import fit
from kvcalc.capacity.engine_flags import DIALECTS
from kvcalc.capacity.fit_options import FitOptions, options_for
from kvcalc.capacity.memory_budget import ESTIMATES, offloaded_bytes, replicated_data
from kvcalc.capacity.suggested_fixes import ConfigChange, advice
from kvcalc.errors import UserError
from kvcalc.layers.batch import Batch
from kvcalc.library.presets import preset_files
from kvcalc.model.memory import weight_bytes
from kvcalc.question.fit_question import TypedWords
from kvcalc.records import Record
from kvcalc.records.fit import (
    CacheTransferRecord,
    CapacityRecord,
    FitMemoryRecord,
    ImageRecord,
    LoadingRecord,
    WasteRecord,
)
from kvcalc.timing.deployment import HostTransfer, TimedDeployment


def fit_record(
    result: Fit,
    lengths: Sequence[int] = (),
    seed: int = 0,
    words: TypedWords = TypedWords(),  # noqa: B008 (immutable)
) -> Record:
    """Return the JSON record (dict) of one configuration: its memory and the sequences that fit.

    `FitRecord` lists the keys. Sizes are exact bytes of one GPU. With `lengths`, the record also
    has the keys of `WasteRecord`.

    Args:
        result: The capacity of the configuration.
        lengths: Tokens of example requests, for the waste of memory allocators. () leaves out the
            keys of the waste.
        seed: Seed for the random order in which sequences of the simulated allocator end.
        words: The words that the user typed. They change only the commands and the advice.
    """
    waste: Record = _waste_keys(result, lengths, seed) if lengths else {}
    command, kvcalc_command = command_lines(result, words)
    return {
        **_memory_keys(result, words.has_all_experts),
        **_sequence_keys(result),
        **_transfer_keys(result),
        **_loading_keys(result),
        **waste,
        "command": command,
        "kvcalc_command": kvcalc_command,
        "breakpoints": result.plan.breakpoints(),
    }


def _memory_keys(result: Fit, all_experts: bool) -> FitMemoryRecord:
    """Return the record keys about the deployment, the memory of one GPU, and advice."""
    ranks, budget, terms = result.ranks, result.budget, result.terms
    has_range = _has_range(result)
    low, _, high = (result.budget_at(name) if has_range else None for name in ESTIMATES)
    advised = advice(result, all_experts)
    record: FitMemoryRecord = {
        "model": result.model.name,
        "engine": result.options.engine,
        "gpu": result.gpu.name,
        "gpus": ranks.gpus,
        "tensor_parallel_size": ranks.tp,
        "pipeline_parallel_size": ranks.pp,
        "data_parallel_size": ranks.dp,
        "dtype": result.formats.weights_label,
        "kv_cache_dtype": result.options.cache_label(result.formats.kv_cache_dtype),
        "fits": result.fits,
        "weights_fit": budget.weights_fit,
        "memory_bytes": budget.memory,
        "gpu_memory_utilization": result.utilization,
        "utilization_of": result.utilization_basis,
        "share_bytes": budget.share,
        "weight_bytes": terms.weights,
        "language_weight_bytes": terms.language,
        "extra_weight_bytes": terms.extra_bytes,
        "host_weight_bytes": terms.host,
        "mtp_weight_bytes": result.extra_weights.get("MTP weights"),
        "draft_weight_bytes": result.extra_weights.get("draft weights"),
        "activation_bytes": budget.activation,
        "overhead_bytes": budget.overhead,
        "kv_budget_bytes": result.budget_at("middle"),
        "kv_budget_low_bytes": low,
        "kv_budget_high_bytes": high,
        "budget": result.estimate,
        "shortage_bytes": result.shortage_bytes,
        "advice": advised and advised.text,
    }
    if not terms.host:
        del record["host_weight_bytes"]
    return record


def _has_range(result: Fit) -> bool:
    return result.engine.has_memory_range or result.has_given_cache


def _sequence_keys(result: Fit) -> CapacityRecord:
    """Return the record keys about blocks, sequences and tokens that fit, and settings that would
    fit."""
    options, plan, needed = result.options, result.plan, result.needed
    cache, length, count = result.kv_budget, result.length, result.num_requested
    unshared = ConfigChange.of(result).changed(shared_prefix=0)
    return {
        "block_size": plan.block_size,
        "page_bytes": plan.page_bytes,
        "bytes_per_block": plan.bytes_per_block,
        "num_blocks": plan.num_blocks(cache),
        "blocks_per_request": plan.request_blocks(length),
        "kv_tokens": plan.tokens(cache, length),
        "max_concurrency": plan.concurrency(cache, length),
        "max_num_seqs": result.sequences,
        "max_model_len": result.longest_length,
        "requested_model_len": length,
        "requested_num_seqs": options.requested_num_seqs,
        "low_num_seqs": result.sequences_at("low") if _has_range(result) else None,
        "unshared_num_seqs": unshared.sequences if options.shared_prefix else None,
        "longest_context": result.longest_context,
        "capacity_sequences": result.capacity,
        "needed_utilization": needed.utilization,
        "needed_kv_cache_memory_bytes": needed.cache,
        "greatest_num_seqs": needed.sequences,
        "greatest_model_len": needed.length,
        "kv_cache_allocated_bytes": plan.allocated(cache, count, length),
        **plan.extra_buffers(count, length),
        "max_num_batched_tokens": result.settings.max_num_batched_tokens,
        **_image_keys(result),
    }


def _image_keys(result: Fit) -> ImageRecord:
    """Return the record keys about the tokens of an image and of a video frame; empty without a
    vision tower."""
    vision = result.model.vision
    if not vision:
        return {}
    tokens = vision.image_tokens(*result.options.image_size)
    frame = tokens // vision.frames if vision.frames > 1 else None
    return {"images": result.options.max_images, "image_tokens": tokens, "frame_tokens": frame}


def _loading_keys(result: Fit) -> LoadingRecord:
    """Return the record keys about weights in host memory, copies, and the time to load the
    weights."""
    options, ranks, link = result.options, result.ranks, result.gpu.host_link_bytes_per_s
    offloaded = offloaded_bytes(
        result.model, result.formats, ranks, result.stage, options.cpu_offload_gb
    )
    transfer = _host_transfer(result, offloaded) if link else HostTransfer(seconds=None)
    copied_weights, copies = replicated_data(result.model, result.formats, ranks)
    checkpoint = weight_bytes(result.model, result.deployment.precision)
    disk_s = checkpoint / options.disk_bandwidth if options.disk_bandwidth else None
    link_s = result.terms.language / link if link else None
    return {
        "machine_memory_bytes": result.gpu.memory_bytes,
        "startup_bytes": result.terms.startup_bytes,
        **transfer.record(offloaded),
        "replicated_weight_bytes": sum(copied_weights.values()),
        "kv_copies": max(copies.values(), default=1),
        "checkpoint_bytes": checkpoint,
        "load_disk_s": disk_s,
        "load_link_s": link_s,
        "load_s": max(filter(None, (disk_s, link_s)), default=None),  # loading overlaps both
    }


def _host_transfer(result: Fit, offloaded: int) -> HostTransfer:
    """Return the bytes and time in which a decode step reads weights from host memory."""
    deployment = replace(result.deployment, host_weights=offloaded)
    # as `latency` times this engine
    is_predicted = result.options.engine in preset_files(f"calibrations/{result.gpu.name}")
    return deployment.host_transfer(
        deployment.operators(Batch.decode(1)), measured=is_predicted
    )


def _transfer_keys(result: Fit) -> CacheTransferRecord:
    """Return the record keys about the transfer of one sequence to a decoding GPU, and about a step
    whose sequences have their cache in host memory."""
    gpu, length, content = result.gpu, result.length, result.content
    size, host_bytes = content.needed(1, length), result.options.kv_offloading_bytes
    keys: CacheTransferRecord = {
        "transfer_bytes": size,
        "transfer_s": size / gpu.link_bytes_per_s if gpu.link_bytes_per_s else None,
    }
    if not host_bytes:
        return keys
    sequences = result.plan.max_extra_sequences(host_bytes, length)
    read = sequences * content.step_read(length)
    link = gpu.host_link_bytes_per_s
    prefill = replace(result.deployment, parallelism=replace(result.ranks, dp=1, ep=1))
    try:
        recompute_s = float(prefill.seconds(Batch.prefill(length)))
    except UserError:  # a GPU without matrix peaks
        recompute_s = None
    return {
        **keys,
        "offload_num_seqs": sequences * result.ranks.dp,
        "offload_step_bytes": read,
        "offload_step_s": read / link if link else None,
        "offload_tokens": result.plan.tokens(host_bytes, length) * result.ranks.dp,
        "offload_return_s": size / link if link else None,
        "recompute_s": recompute_s,
    }


def _waste_keys(result: Fit, lengths: Sequence[int], seed: int) -> WasteRecord:
    """Return the record keys about the waste of three allocators for these lengths, cut at
    max_model_len."""
    from kvcalc.capacity.allocations import FragmentationResult, paged_waste, simulate_first_fit

    requests = [min(length, result.length) for length in lengths]
    slots = result.plan.tokens(result.kv_budget, result.length)
    contiguous = paged_waste(requests, result.length)
    pages = paged_waste(requests, result.plan.block_size or 16)
    pieces = FragmentationResult()  # null if not one piece fits
    if slots >= max(requests):
        pieces = simulate_first_fit(requests, slots, seed)
    return {
        "lengths": len(requests),
        "mean_length": sum(requests) / len(requests),
        "padding_waste": 1 - sum(requests) / (len(requests) * max(requests)),
        "contiguous_waste": contiguous.share,
        "contiguous_waste_tokens": contiguous.tokens,
        "contiguous_num_seqs": slots // result.length,
        "external_waste": pieces.free,
        "external_failures": pieces.failures,
        "external_requests": pieces.requests,
        "external_largest_hole": pieces.largest,
        "paged_waste": pages.share,
        "paged_waste_tokens": pages.tokens,
        "paged_num_seqs": slots * len(requests) // pages.slots,
    }


def command_lines(result: Fit, words: TypedWords) -> tuple[str | None, str | None]:
    """Return two commands of a configuration: the engine's, and the `kvcalc fit` that reads it.

    Example: `vllm serve MODEL --max-num-seqs 8`, and `kvcalc fit --gpu h100-sxm -- vllm serve …`.
    Both are None if no command line of the engine starts the configuration.

    Args:
        result: The capacity of the configuration.
        words: The words that the user typed. The commands repeat the names, options and flags.
    """
    names = words.names
    written = engine_command(result, names.get(result.model.name, ""))
    if not written:
        return None, None
    gpu = names.get(result.gpu.name, "")
    gpu = gpu if gpu.lower().endswith((".yaml", ".yml")) else result.gpu.name
    options_text = shlex.join(["--gpu", gpu, *words.extra_words, *written.options])
    line = f"{written.line} {words.flags}".rstrip()
    return line, f"kvcalc fit {options_text} -- {line}"


def engine_command(result: Fit, model_words: str = "") -> EngineCommand | None:
    """Return the engine's command line of a configuration; None if there is none.

    A server of llama.cpp gets one slot for each sequence that fits, unless the request states a
    number. Other servers get this number if it exceeds their default.

    Args:
        result: The capacity of the configuration.
        model_words: The user's word for the model; "" if unknown.
    """
    options, dialect = result.options, DIALECTS.get(result.options.engine)
    if dialect and result.fits and not options.max_num_seqs:
        users, limit = result.sequences, slot_limit(result)
        if dialect.max_slots:
            users = options.users or users
        default = max(result.max_num_seqs, dialect.default_slots) * result.ranks.dp
        if dialect.max_slots or users > default or options.require >= default:
            users = min(users, limit or users)
            options = replace(options, max_num_seqs=users, users=options.users or 1)
    return command_of(result.deployment, options, model_words)


def slot_limit(result: Fit) -> int:
    """Return the largest `max_num_seqs` of the replica that the engine accepts; 0 if unlimited.

    vLLM refuses more sequences than tokens of one forward pass (config/scheduler.py, 0.20).

    Args:
        result: The capacity of the configuration.
    """
    if result.options.engine == "vllm":
        return result.settings.max_num_batched_tokens * result.ranks.dp
    dialect = DIALECTS.get(result.options.engine)
    return dialect.max_slots if dialect else 0


def smallest_first(results: Sequence[Fit]) -> list[Fit]:
    """Return the configurations, with the smallest one that fits moved to the front.

    The smallest has the fewest GPUs, and among those the least total GPU memory. But configurations
    at the model's maximum length come before configurations with a requested length. The order of
    the others does not change. If none fits, the order of all does not change.
    """
    first = min(
        (result for result in results if result.fits),
        key=lambda result: (
            bool(result.options.max_model_len),
            result.ranks.gpus,
            result.ranks.gpus * result.gpu.memory_bytes,
        ),
        default=None,
    )
    return sorted(results, key=lambda result: result is not first)


USERS = tuple(1 << n for n in range(8))
MIN_CONTEXT, MIN_COLUMNS, MAX_COLUMNS = 4096, 6, 8


def contexts_of(max_context: int | None) -> list[int]:
    """Return the default contexts of `fit --matrix`, in tokens.

    They double up to the model's maximum, which is the last context. The contexts begin at 4096
    tokens, but there are at least 6 and at most 8 contexts. Example: a maximum of 131,072 gives
    4,096, 8,192, 16,384, 32,768, 65,536 and 131,072.

    Args:
        max_context: Maximum tokens of the model; None means 131,072.
    """
    longest = max_context or 131072
    doubled = [1 << k for k in range((longest - 1).bit_length())]
    columns = max(MIN_COLUMNS, sum(n >= MIN_CONTEXT for n in doubled) + 1)
    return [*doubled, longest][-min(columns, MAX_COLUMNS) :]


def matrix_records(
    deployment: TimedDeployment,
    options: FitOptions,
    users: Sequence[int],
    contexts: Sequence[int],
    only_verdicts: bool = False,
) -> list[Record]:
    """Return one record of `fit` for each number of users and each context (`fit --matrix`).

    The first number of users comes first, with all contexts. The key `headroom_bytes` has the bytes
    of KV cache per GPU that stay free; negative if memory is missing.

    Args:
        deployment: The deployment.
        options: The options of `fit`, without users and context.
        users: Numbers of concurrent users.
        contexts: Tokens of each user's sequence.
        only_verdicts: Whether records after the first have only the keys `users`, `context`, `fits`
            and `headroom_bytes`.
    """
    records: list[Record] = []
    for count in users:
        for length in contexts:
            result = fit(deployment, replace(options, users=count, max_model_len=length))
            is_brief = only_verdicts and records
            record = {
                "users": count,
                "context": length,
                "headroom_bytes": result.headroom_bytes,
                **({"fits": result.fits} if is_brief else fit_record(result)),
            }
            records.append(record)
    return records


MEMORY_KEYS = "fits kv_budget_bytes kv_needed_bytes max_num_seqs memory_note"


def batch_memory(
    deployment: TimedDeployment, groups: Sequence[tuple[int, int]], **options: Any
) -> Record:
    """Return whether a batch of sequences fits in the memory, as a record (dict) of five keys.

    The keys are `fits`; `kv_budget_bytes` and `kv_needed_bytes` of one GPU; `max_num_seqs`, the
    sequences of the batch's longest length that fit in the replica; and `memory_note`, which is
    None. If the engine cannot run the model, `memory_note` is the error message, and the other keys
    are None. But `fits` is then False if even the stored data exceeds the memory, without any
    engine's padding.

    Args:
        deployment: The deployment, with its engine.
        groups: Pairs (number of sequences, tokens of each) of the batch.
        options: Further options of `fit`, by name.

    Raises:
        UserError: An option is wrong.
    """
    users = sum(count for count, _ in groups)
    longest = max(length for _, length in groups)
    requested = options_for(deployment, max_model_len=longest, users=users, **options)
    try:
        return _batch_memory(deployment, requested, groups)
    except UserError as error:
        note = str(error)
    content = replace(deployment, engine="none")
    minimum = FitOptions(engine="none", max_model_len=longest, users=users)
    try:
        can_fit = _batch_memory(content, minimum, groups)["fits"]
    except UserError:
        can_fit = True
    fits = None if can_fit else False
    return dict.fromkeys(MEMORY_KEYS.split()) | {"fits": fits, "memory_note": note}


def pass_with_memory(
    deployment: TimedDeployment, records: list[Record], batch: Batch
) -> list[Record]:
    """Return the records of a forward pass; the last also tells whether the batch fits in memory.

    The last record is the total of the pass. It gets the keys of `batch_memory`, such as `fits`.

    Args:
        deployment: The deployment, with its engine.
        records: The records of `roofline`: one per operator, and the total.
        batch: The sequences of the forward pass.
    """
    groups = [(int(group.count), int(group.new + group.past)) for group in batch.groups]
    return [*records[:-1], {**records[-1], **batch_memory(deployment, groups)}]


def _batch_memory(
    deployment: TimedDeployment, options: FitOptions, groups: Sequence[tuple[int, int]]
) -> Record:
    result = fit(deployment, options)
    needed, fits = result.needed_bytes, result.fits
    if len(groups) > 1:
        plan = result.plan
        needed = plan.needed(0, result.length)
        for count, length in groups:
            sequences = result.ranks.sequences(count)
            needed += plan.needed(sequences, length) - plan.needed(0, length)
        has_memory = result.has_given_cache or not result.shortage_bytes
        fits = has_memory and needed <= int(plan.pool(result.kv_budget))
    values = fits, result.kv_budget, needed, result.sequences, None
    return dict(zip(MEMORY_KEYS.split(), values))
