"""Whether a batch fits into the memory: the keys that records of times share."""

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from kvcalc.capacity.answer import capacity_of
from kvcalc.capacity.options import FitOptions, options_for
from kvcalc.errors import UserError
from kvcalc.layers.batch import Batch
from kvcalc.timing.deployment import Deployment

KEYS = ("fits", "kv_budget_bytes", "kv_needed_bytes", "max_num_seqs", "memory_note")


def batch_memory(deployment: Deployment, groups: Sequence[tuple[int, int]], **options: Any) -> dict[str, Any]:
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
    asked = options_for(deployment, max_model_len=longest, users=sequences, **options)
    try:
        return _memory(deployment, asked, groups)
    except UserError as error:
        found: dict[str, Any] = dict.fromkeys(KEYS)
        return found | {"fits": _content_fits(deployment, asked, groups), "memory_note": str(error)}


def pass_with_memory(deployment: Deployment, records: list[dict[str, Any]], batch: Batch) -> list[dict[str, Any]]:
    """Return the records of `roofline`, with the keys of KEYS in the total of the pass."""
    groups = [(int(group.count), int(group.new + group.past)) for group in batch.groups]
    return [*records[:-1], records[-1] | batch_memory(deployment, groups)]


def _memory(deployment: Deployment, asked: FitOptions, groups: Sequence[tuple[int, int]]) -> dict[str, Any]:
    found = capacity_of(deployment, asked)
    needed, fits = found.needed, found.fits
    if len(groups) > 1:
        needed = found.plan.needed(0, found.length)
        for count, length in groups:
            of_rank = deployment.parallelism.sequences(count)
            needed += found.plan.needed(of_rank, length) - found.plan.needed(0, length)
        fits = not found.shortage and needed <= found.plan.pool(found.kv_budget)
    values = fits, found.kv_budget, needed, found.sequences, None
    return dict(zip(KEYS, values, strict=True))


def _content_fits(deployment: Deployment, asked: FitOptions, groups: Sequence[tuple[int, int]]) -> bool | None:
    """Return False if the content alone does not fit, else None: the engine is not known to fit."""
    content = FitOptions(engine="none", max_model_len=asked.max_model_len, users=asked.users)
    try:
        fits = _memory(replace(deployment, engine="none"), content, groups)["fits"]
    except UserError:
        return None
    return None if fits else False
