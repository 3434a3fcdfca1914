"""The records of `fit`: one configuration each, every figure under its own key.

Users × contexts: of each cell the verdict, and what is left on a GPU.

Whether a batch fits into the memory: the keys that records of times share.
"""

import shlex
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from kvcalc.capacity import Fit
from kvcalc.capacity.allocations import external, paged
from kvcalc.capacity.command_line import command_of
from kvcalc.capacity.deployment_fit import fit
from kvcalc.capacity.fit_options import FitOptions, options_for
from kvcalc.capacity.memory_budget import (
    ENDS,
    loading,
    offloaded_bytes,
    replicas,
)
from kvcalc.capacity.suggested_fixes import advice, small_cache, without_sharing
from kvcalc.errors import UserError
from kvcalc.layers.batch import Batch
from kvcalc.library.presets import preset_files
from kvcalc.records import Record
from kvcalc.timing.deployment import TimedDeployment


class Typed(NamedTuple):
    """The words in which a request named its model and its GPU, '' what they are called, and its
    options beside an engine's.

    all_experts: whether it has `--enable-expert-parallel`.
    """

    model: str = ""
    gpu: str = ""
    beside: tuple[str, ...] = ()
    all_experts: bool = False


AS_CALLED = Typed()


def fit_record(
    found: Fit, lengths: Sequence[int] = (), seed: int = 0, typed: Typed = AS_CALLED
) -> Record:
    """One configuration as a record; integers are exact bytes of one GPU. `breakpoints` is its one
    nested list.

    command: the engine's own command line. kvcalc_command: that, given back to `fit` with what it
    cannot tell beside it.
    """
    plan, requested, ranks = found.plan, found.options, found.ranks
    budget, cache = found.budget, found.kv_budget
    range_ = (
        {end: found.budget_at(end) for end in ENDS}
        if found.engine.ranged or found.given
        else {}
    )
    return {
        "model": found.model.name,
        "engine": requested.engine,
        "gpu": found.gpu.name,
        "gpus": ranks.gpus,
        "tensor_parallel_size": ranks.tp,
        "pipeline_parallel_size": ranks.pp,
        "data_parallel_size": ranks.dp,
        "dtype": found.formats.weights_label,
        "kv_cache_dtype": requested.cache_label(found.formats.kv_cache_dtype),
        "fits": found.fits,
        "weights_fit": budget.weights_fit,
        "memory_bytes": budget.memory,
        "gpu_memory_utilization": found.utilization,
        "utilization_of": found.of,
        "share_bytes": budget.share,
        "weight_bytes": budget.weights,
        "language_weight_bytes": found.terms.language,
        "extra_weight_bytes": budget.weights - found.terms.language,
        **({"host_weight_bytes": found.terms.host} if found.terms.host else {}),
        "mtp_weight_bytes": found.beside.get("mtp"),
        "draft_weight_bytes": found.beside.get("draft"),
        "activation_bytes": budget.activation,
        "overhead_bytes": budget.overhead,
        "kv_budget_bytes": found.budget_at("middle"),
        "kv_budget_low_bytes": range_.get("low"),
        "kv_budget_high_bytes": range_.get("high"),
        "budget": found.end,
        "shortage_bytes": found.shortage,
        **_advised(found, typed),
        "block_size": plan.block_size,
        "page_bytes": plan.page_bytes,
        "bytes_per_block": plan.bytes_per_block,
        "num_blocks": plan.num_blocks(cache),
        "blocks_per_request": plan.request_blocks(found.length),
        "kv_tokens": plan.tokens(cache, found.length),
        "max_concurrency": plan.concurrency(cache, found.length),
        "max_num_seqs": found.sequences,
        "max_model_len": found.longest,
        "requested_model_len": found.length,
        "requested_num_seqs": requested.wanted,
        "low_num_seqs": found.sequences_at("low") if range_ else None,
        **_inverse(found),
        "kv_cache_allocated_bytes": plan.allocated(cache, found.per_rank, found.length),
        **plan.parts(found.per_rank, found.length),
        "max_num_batched_tokens": found.settings.max_num_batched_tokens,
        **_moved(found),
        **_placed(found),
        **(_fragmentation(found, lengths, seed) if lengths else {}),
        **_commands(found, typed),
        "breakpoints": plan.breakpoints(),
    }


def _advised(found: Fit, typed: Typed) -> dict[str, str | None]:
    advised = advice(found, all_experts=typed.all_experts)
    if advised is None:
        return {"advice": None, "advice_quality": None}
    return {"advice": advised.said, "advice_quality": advised.quality or None}


def _inverse(found: Fit) -> Record:
    """What just holds what is asked for, the greatest settings, and sequences in a cache of 8 bits
    or without a shared prefix."""
    smaller, apart = small_cache(found), found.options.shared_prefix
    return {
        "unshared_num_seqs": without_sharing(found) if apart else None,
        "longest_context": found.longest_context,
        "capacity_sequences": found.capacity,
        "needed_utilization": found.needed.utilization,
        "needed_kv_cache_memory_bytes": found.needed.cache,
        "greatest_num_seqs": found.needed.sequences,
        "greatest_model_len": found.needed.length,
        "small_cache_num_seqs": smaller.sequences if smaller else None,
    }


def _commands(found: Fit, typed: Typed) -> dict[str, str | None]:
    written = command_of(found.deployment, found.options, typed.model)
    if written is None:
        return {"command": None, "kvcalc_command": None}
    gpu = typed.gpu if typed.gpu.lower().endswith((".yaml", ".yml")) else found.gpu.name
    beside = shlex.join(["--gpu", gpu, *typed.beside, *written.beside])
    return {
        "command": written.line,
        "kvcalc_command": f"kvcalc fit {beside} -- {written.line}",
    }


def _recompute(found: Fit) -> float | None:
    """The bound of a prefill of one sequence on its dp rank, alone; None on a GPU without matrix
    peaks."""
    one = msgspec.structs.replace(
        found.deployment, parallelism=msgspec.structs.replace(found.ranks, dp=1, ep=1)
    )
    try:
        return float(one.seconds(Batch.prefill(found.length)))
    except UserError:
        return None


def _moved(found: Fit) -> Record:
    """What crosses links: one sequence to a decoding GPU, and a step over sequences whose cache
    lies in host memory."""
    gpu, length = found.gpu, found.length
    sent = found.content.needed(1, length)
    keys: Record = {
        "transfer_bytes": sent,
        "transfer_s": sent / gpu.link_bytes_per_s if gpu.link_bytes_per_s else None,
    }
    host = found.options.kv_offloading_bytes
    if host:
        stored = found.plan.most_beside(host, length)
        read = stored * found.content.step_read(length)
        link = gpu.host_link_bytes_per_s
        keys |= {
            "offload_num_seqs": stored * found.ranks.dp,
            "offload_step_bytes": read,
            "offload_step_s": read / link if link else None,
            "offload_tokens": stored * found.ranks.dp * length,
            "offload_return_s": sent / link if link else None,
            "recompute_s": _recompute(found),
        }
    return keys


def _placed(found: Fit) -> Record:
    """What stays in the host's memory and what it costs a pass, what stands on more than one GPU,
    and how weights get in."""
    resident, gpu, requested = found.terms.language, found.gpu, found.options
    away = offloaded_bytes(
        found.model, found.formats, found.ranks, found.stage, requested.cpu_offload_gb
    )
    twice = replicas(found.model, found.formats, found.ranks)
    host = msgspec.structs.replace(found.deployment, host_weights=away)
    # as `latency` times this engine
    predicted = found.options.engine in preset_files(f"calibrations/{gpu.name}")
    load = loading(
        found.model, found.deployment.precision, gpu, resident, requested.disk_bandwidth
    )
    return {
        "machine_memory_bytes": gpu.memory_bytes,
        "startup_bytes": found.terms.taken,
        "cpu_offload_bytes": away,
        "cpu_offload_s": _host_seconds(host, predicted) if gpu.host_link_bytes_per_s else None,
        "replicated_weight_bytes": sum(twice.weights.values()),
        "kv_copies": max((copies for *_, copies in twice.cache), default=1),
        "checkpoint_bytes": load.checkpoint_bytes,
        "load_disk_s": load.disk_s,
        "load_link_s": load.link_s,
        "load_s": load.min_s,
    }


def _host_seconds(deployment: TimedDeployment, predicted: bool) -> float:
    """Return the seconds that weights in the host's memory take to cross in a decode step of one
    sequence."""
    return float(
        deployment.host_seconds(deployment.operators(Batch.decode(1)), measured=predicted)
    )


def _fragmentation(found: Fit, lengths: Sequence[int], seed: int) -> Record:
    """The three kinds of waste for these lengths, cut at max_model_len, in as many token slots as
    the pool has."""
    cut = [min(n, found.length) for n in lengths]
    slots = found.plan.tokens(found.kv_budget, found.length)
    block = found.plan.block_size or 16
    whole, pages = paged(cut, found.length), paged(cut, block)
    pieces = external(cut, slots, seed) if slots >= max(cut) else None
    return {
        "lengths": len(cut),
        "mean_length": sum(cut) / len(cut),
        "contiguous_waste": whole.share,
        "contiguous_waste_tokens": whole.tokens,
        "contiguous_num_seqs": slots // found.length,
        "external_waste": pieces.free if pieces else None,
        "external_failures": pieces.failures if pieces else None,
        "external_requests": pieces.requests if pieces else None,
        "external_largest_hole": pieces.largest if pieces else None,
        "paged_waste": pages.share,
        "paged_waste_tokens": pages.tokens,
        "paged_num_seqs": slots * len(cut) // pages.slots,
    }


def smallest_first(found: Sequence[Fit]) -> list[Fit]:
    """Return the answers with the smallest that fits in front: fewest GPUs, then least memory, then
    in the order of the request. Those with the model's maximum come before shorter ones."""
    good = [f for f in found if f.fits]
    if not good:
        return list(found)

    def size(found: Fit) -> tuple[bool, int, int]:
        gpus = found.ranks.gpus
        return bool(found.options.max_model_len), gpus, gpus * found.gpu.memory_bytes

    best = min(good, key=size)
    return [best, *(f for f in found if f is not best)]


USERS = tuple(1 << n for n in range(8))
LEAST, LEAST_COLUMNS, MOST_COLUMNS = 4096, 6, 8


def contexts_of(longest: int | None) -> list[int]:
    """Doubled lengths up to the model's own longest, which is the last; from LEAST, or lower where
    those were fewer columns than LEAST_COLUMNS, and at most MOST_COLUMNS."""
    most = longest or 131072
    doubled = [1 << k for k in range((most - 1).bit_length())]
    columns = max(LEAST_COLUMNS, sum(n >= LEAST for n in doubled) + 1)
    return [*doubled, most][-min(columns, MOST_COLUMNS) :]


def matrix_records(
    deployment: TimedDeployment,
    options: FitOptions,
    users: Sequence[int],
    contexts: Sequence[int],
    typed: Typed = AS_CALLED,
) -> list[Record]:
    """A record of `fit` for each number of users and each context (fastest), with what is left; the
    engine stays set up alike."""
    results = []
    for cell, requested in _cells(options, users, contexts):
        full = fit(deployment, requested)
        results.append(cell | {"headroom_bytes": full.headroom} | fit_record(full, typed=typed))
    return results


def matrix_verdicts(
    deployment: TimedDeployment,
    options: FitOptions,
    users: Sequence[int],
    contexts: Sequence[int],
) -> list[Record]:
    """`users`, `context`, `fits` and `headroom_bytes` of those records alone, and the rest of the
    first one's in its own."""
    results: list[Record] = []
    for cell, requested in _cells(options, users, contexts):
        first = {} if results else fit_record(fit(deployment, requested))
        seen = fit(deployment, requested)
        results.append(first | cell | {"fits": seen.fits, "headroom_bytes": seen.headroom})
    return results


def _cells(
    options: FitOptions, users: Sequence[int], contexts: Sequence[int]
) -> Iterator[tuple[dict[str, int], FitOptions]]:
    for count in users:
        for length in contexts:
            requested = msgspec.structs.replace(options, users=count, max_model_len=length)
            yield {"users": count, "context": length}, requested


KEYS = ("fits", "kv_budget_bytes", "kv_needed_bytes", "max_num_seqs", "memory_note")


def batch_memory(
    deployment: TimedDeployment, groups: Sequence[tuple[int, int]], **options: Any
) -> Record:
    """Return the keys of KEYS for a batch. They are `fit`'s figures for the same settings.

    If the engine refuses the model, `memory_note` is its refusal and the other keys are None.
    `fits` is then False if even the content of the cache does not fit.

    Args:
        deployment: The deployment, with its engine.
        groups: (sequences, tokens of each) of the batch.
        options: Further options of `fit`.

    Raises:
        UserError: An option is wrong.
    """
    sequences = sum(count for count, _ in groups)
    longest = max(length for _, length in groups)
    requested = options_for(deployment, max_model_len=longest, users=sequences, **options)
    try:
        return _memory(deployment, requested, groups)
    except UserError as error:
        matches: Record = dict.fromkeys(KEYS)
        return matches | {
            "fits": _content_fits(deployment, requested, groups),
            "memory_note": str(error),
        }


def pass_with_memory(
    deployment: TimedDeployment, records: list[Record], batch: Batch
) -> list[Record]:
    """Return the records of `roofline`, with the keys of KEYS in the total of the pass."""
    groups = [(int(group.count), int(group.new + group.past)) for group in batch.groups]
    return [*records[:-1], records[-1] | batch_memory(deployment, groups)]


def _memory(
    deployment: TimedDeployment, asked: FitOptions, groups: Sequence[tuple[int, int]]
) -> Record:
    result = fit(deployment, asked)
    needed, fits = result.needed_bytes, result.fits
    if len(groups) > 1:
        needed = result.plan.needed(0, result.length)
        for count, length in groups:
            of_rank = deployment.parallelism.sequences(count)
            needed += result.plan.needed(of_rank, length) - result.plan.needed(0, length)
        fits = (result.given or not result.shortage) and needed <= result.plan.pool(
            result.kv_budget
        )
    values = fits, result.kv_budget, needed, result.sequences, None
    return dict(zip(KEYS, values, strict=True))


def _content_fits(
    deployment: TimedDeployment, asked: FitOptions, groups: Sequence[tuple[int, int]]
) -> bool | None:
    """Return False if the content alone does not fit, else None: the engine is not known to fit."""
    content = FitOptions(engine="none", max_model_len=asked.max_model_len, users=asked.users)
    try:
        fits = _memory(replace(deployment, engine="none"), content, groups)["fits"]
    except UserError:
        return None
    return None if fits else False
