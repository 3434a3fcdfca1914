"""One replica set up to serve: the memory that its cache gets, and the load that it can carry at most."""

from typing import NamedTuple

from kvcalc.capacity import FitOptions, fit
from kvcalc.errors import UserError
from kvcalc.model.memory import LayerRows
from kvcalc.timing.deployment import Deployment
from kvcalc.units import format_bytes


class Memory(NamedTuple):
    """budget: bytes for the cache on one GPU of the stage that holds the fewest sequences. rows: what is kept there."""

    budget: int
    rows: tuple[LayerRows, ...]


def memory(deployment: Deployment, asked: FitOptions) -> Memory:
    """What `fit` leaves for the cache: share − weights − activation peak − overhead. Raises UserError where that is nothing."""
    found = fit(deployment, asked)
    if not found.kv_budget:
        terms = f"{format_bytes(found.budget.share - found.budget.cache)} of {format_bytes(found.budget.share)}"
        names = f"{deployment.model.name} leaves no memory for a cache on {deployment.gpu.name}"
        what = f"{names}: weights, activations and overhead take {terms}"
        raise UserError(what, hint="Use more GPUs (tp), or a smaller dtype or quantization")
    return Memory(found.kv_budget, tuple(found.content.rows))
