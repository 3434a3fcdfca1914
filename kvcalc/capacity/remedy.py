"""What is missing where something does not fit, and the smallest change that mends it: each is run before it is named."""

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from kvcalc.capacity.answer import Fit, most_sequences
from kvcalc.capacity.options import FitOptions
from kvcalc.errors import UserError
from kvcalc.storage.quality import UNKNOWN, loss_of
from kvcalc.timing.deployment import Deployment
from kvcalc.units import format_bytes

LARGEST_TP = 64
LARGEST_SHARE = 0.97  # of the memory: what is above leaves nothing to other processes and to what terms leave out
EIGHT_BITS = ("fp8", "q8_0")  # a cache of half the bytes, by the names that engines have for it
FEWER_BITS = ("fp8", "int4")  # weights, the larger first


class Change(NamedTuple):
    """An option as it is typed, and the sequences that fit with it."""

    option: str
    sequences: int


def small_cache(found: Fit) -> Change | None:
    """The same with a cache of 8 bits; None where the GPU or the engine has none, or it holds no more.

    fp8 takes a GPU that has it.
    """
    dtype = next(name for name in EIGHT_BITS if found.engine.dtypes is None or name in found.engine.dtypes)
    if dtype == "fp8" and "fp8" not in found.gpu.flops_per_s:
        return None
    precision = msgspec.structs.replace(found.asked.precision, kv_cache_dtype=dtype)
    options = msgspec.structs.replace(found.options, cache_type_k="", cache_type_v="")
    held = _held(found, msgspec.structs.replace(found.asked, precision=precision), options)
    return Change(f"--kv-cache-dtype {dtype}", held) if held > found.sequences else None


def without_sharing(found: Fit) -> int:
    """Sequences that fit where each keeps all of its tokens."""
    return _held(found, found.asked, msgspec.structs.replace(found.options, shared_prefix=0))


def advice(found: Fit) -> str:
    """What is missing, what fits as it is, what fewer bits would cost, and what would hold all; '' where that fits."""
    if found.fits:
        return ""
    fits, mends = _fitting(found), [change.option for change in changes(found)]
    would = f"would fit with {' or '.join(mends) or f'no smaller cache or weights, nor --tp to {LARGEST_TP}'}"
    return "; ".join(filter(None, [_missing(found), fits, *filter(None, map(_cost, mends)), would]))


def _cost(option: str) -> str:
    """What is known of the quality under an option that stores something in fewer bits; '' of another."""
    name, _, value = option.partition(" ")
    stored = {"--kv-cache-dtype": "cache", "--quantization": "weights"}.get(name)
    return f"{stored} in {value}: {loss_of(stored, value)}" if stored else ""


def _missing(found: Fit) -> str:
    if found.shortage and not found.given:
        if found.budget.weights_fit:
            return f"weights, activations and overhead are {format_bytes(found.shortage)} over"
        return f"weights alone are {format_bytes(found.budget.weights - found.budget.share)} over"
    need, there = found.needed.cache, found.plan.pool(found.kv_budget)
    return f"{format_bytes(need)} of cache are needed, {format_bytes(need - there)} more than there is"


def _fitting(found: Fit) -> str:
    """Fewer of the same length that do fit, else as many that are shorter; '' where none do."""
    if found.sequences:
        return f"{found.sequences:,} × {found.length:,} fit{'s' * (found.sequences == 1)}"
    wanted = found.options.wanted
    held = f"{wanted:,} × {found.longest:,} fit{'s' * (wanted == 1)}"
    return f"{held}, longer prompts refused ({UNKNOWN})" if found.longest else ""


def changes(found: Fit) -> list[Change]:
    """What holds all that is asked for: the smallest change of settings or formats that does, and the fewest GPUs."""
    wanted = found.options.wanted
    small = next((change for change in _same_gpus(found) if change.sequences >= wanted), None)
    more = _more_gpus(found)
    return [change for change in (small, more) if change]


def _same_gpus(found: Fit) -> Iterator[Change]:
    """A share, a cache, weights: the smallest change first."""
    share = found.needed.utilization
    if share and found.utilization < share <= LARGEST_SHARE and not found.given:
        options = msgspec.structs.replace(found.options, gpu_memory_utilization=share)
        yield Change(f"--gpu-memory-utilization {share:g}", _held(found, found.asked, options))
    if cache := small_cache(found):
        yield cache
    for name in FEWER_BITS:
        if name != "fp8" or "fp8" in found.gpu.flops_per_s:
            precision = msgspec.structs.replace(found.asked.precision, dtype="auto", quantization=name)
            yield Change(f"--quantization {name}", _held(found, msgspec.structs.replace(found.asked, precision=precision)))


def _more_gpus(found: Fit) -> Change | None:
    """The fewest GPUs, those there are times a power of two, that hold what was asked; None where LARGEST_TP do not."""
    ranks, tp = found.ranks, found.ranks.tp
    while tp < LARGEST_TP:
        tp *= 2
        experts = tp * ranks.dp if 1 < ranks.ep == ranks.tp * ranks.dp else ranks.ep
        try:
            wider = msgspec.structs.replace(ranks, tp=tp, ep=experts)
        except UserError:
            return None
        held = _held(found, msgspec.structs.replace(found.asked, parallelism=wider))
        if held >= found.options.wanted:
            return Change(f"--tp {tp}", held)
    return None


def _held(found: Fit, deployment: Deployment, options: FitOptions | None = None) -> int:
    """Sequences that fit so; 0 where it is no possible request."""
    try:
        return most_sequences(deployment, options or found.options)
    except UserError:
        return 0
