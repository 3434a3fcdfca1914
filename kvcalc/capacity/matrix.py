"""Users × contexts: of each cell the verdict, and what is left on a GPU."""

from collections.abc import Sequence
from typing import Any

import msgspec

from kvcalc.capacity.answer import Fit, fit
from kvcalc.capacity.options import FitOptions
from kvcalc.capacity.record import AS_CALLED, Typed, fit_record
from kvcalc.timing.deployment import Deployment

USERS = tuple(1 << n for n in range(8))
LEAST, MOST_COLUMNS = 4096, 8


def contexts_of(longest: int | None) -> list[int]:
    """Doubled lengths up to the model's own longest, at most MOST_COLUMNS of them, the longest kept."""
    most = longest or 131072
    doubled = [n for n in (LEAST << k for k in range(20)) if n < most]
    return [*doubled, most][-MOST_COLUMNS:]


def headroom(found: Fit) -> int:
    """Bytes of the cache's memory on a GPU that the users asked for do not take; negative where they take more than there is."""
    needed = found.plan.needed(found.per_rank, found.length, found.options.shared_prefix)
    return found.plan.pool(found.kv_budget) - found.shortage * (not found.given) - needed


def matrix_records(
    deployment: Deployment, options: FitOptions, users: Sequence[int], contexts: Sequence[int], typed: Typed = AS_CALLED
) -> list[dict[str, Any]]:
    """A record of `fit` for each number of users and each context (fastest), with what is left; the engine stays set up alike."""
    found = []
    for count in users:
        for length in contexts:
            cell = fit(deployment, msgspec.structs.replace(options, users=count, max_model_len=length))
            found.append({"users": count, "context": length, "headroom_bytes": headroom(cell)} | fit_record(cell, typed=typed))
    return found
