"""What the page's sliders compute with: the cache's rows as data, and how long each number of users may be."""

from itertools import takewhile
from typing import Any

from kvcalc.capacity.answer import Fit, longest_of
from kvcalc.model.memory import stage_rows
from kvcalc.model.pipeline import stages
from kvcalc.model.precision import stored_as
from kvcalc.timing.deployment import Deployment

MOST_USERS = 512


def slider_data(deployment: Deployment, found: Fit) -> dict[str, Any]:
    """Entries `[span, tokens a row, limit, ranks that share tokens, bytes a row of all layers]` of one pipeline stage, as
    `size` counts them; `longest[n − 1]`: the longest context of n sequences on a data-parallel rank, as `fit` has it, null
    where none is too long; dp; and the context that the model is made for.
    """
    ranks, model = deployment.parallelism, stored_as(deployment.model, deployment.precision)
    (stage,) = stages(model, ranks.pp)
    entries = [
        [r.entry.span.value, r.entry.ratio, r.entry.limit, r.spread, r.row_bytes * r.stored_layers]
        for r in stage_rows(model, stage, deployment.formats, ranks)
        if r.stored_layers
    ]
    users = range(ranks.dp, (MOST_USERS + 1) * ranks.dp, ranks.dp)
    longest = [*takewhile(lambda tokens: tokens != 0, longest_of(found, users))] if found.budget.weights_fit else []
    return {
        "entries": entries,
        "dp": ranks.dp,
        "longest": longest,
        "most": MOST_USERS,
        "context": model.max_context or 131_072,
    }
