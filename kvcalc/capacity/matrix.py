"""Users × contexts: of each cell the verdict, and what is left on a GPU."""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from kvcalc.capacity.answer import capacity_of, fit
from kvcalc.capacity.options import FitOptions
from kvcalc.capacity.record import AS_CALLED, Typed, fit_record
from kvcalc.timing.deployment import Deployment

USERS = tuple(1 << n for n in range(8))
LEAST, LEAST_COLUMNS, MOST_COLUMNS = 4096, 6, 8


def contexts_of(longest: int | None) -> list[int]:
    """Doubled lengths up to the model's own longest, which is the last; from LEAST, or lower where those were fewer columns than
    LEAST_COLUMNS, and at most MOST_COLUMNS."""
    most = longest or 131072
    doubled = [1 << k for k in range((most - 1).bit_length())]
    columns = max(LEAST_COLUMNS, sum(n >= LEAST for n in doubled) + 1)
    return [*doubled, most][-min(columns, MOST_COLUMNS) :]


def matrix_records(
    deployment: Deployment, options: FitOptions, users: Sequence[int], contexts: Sequence[int], typed: Typed = AS_CALLED
) -> list[dict[str, Any]]:
    """A record of `fit` for each number of users and each context (fastest), with what is left; the engine stays set up alike."""
    found = []
    for cell, asked in _cells(options, users, contexts):
        full = fit(deployment, asked)
        found.append(cell | {"headroom_bytes": full.headroom} | fit_record(full, typed=typed))
    return found


def matrix_verdicts(
    deployment: Deployment, options: FitOptions, users: Sequence[int], contexts: Sequence[int]
) -> list[dict[str, Any]]:
    """`users`, `context`, `fits` and `headroom_bytes` of those records alone, and the rest of the first one's in its own."""
    found: list[dict[str, Any]] = []
    for cell, asked in _cells(options, users, contexts):
        first = {} if found else fit_record(fit(deployment, asked))
        seen = capacity_of(deployment, asked)
        found.append(first | cell | {"fits": seen.fits, "headroom_bytes": seen.headroom})
    return found


def _cells(options: FitOptions, users: Sequence[int], contexts: Sequence[int]) -> Iterator[tuple[dict[str, int], FitOptions]]:
    for count in users:
        for length in contexts:
            asked = msgspec.structs.replace(options, users=count, max_model_len=length)
            yield {"users": count, "context": length}, asked
