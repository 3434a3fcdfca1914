"""The cache budget of one replica."""

from kvcalc.capacity import FitOptions
from kvcalc.capacity.answer import Capacity, capacity_of
from kvcalc.errors import UserError
from kvcalc.timing.deployment import Deployment


def memory(deployment: Deployment, asked: FitOptions) -> Capacity:
    """Return the cache budget of a replica, as in `fit`.

    Raises:
        UserError: No memory is left for a cache.
    """
    found = capacity_of(deployment, asked)
    if not found.kv_budget:
        where = f"{deployment.parallelism.gpus}× {deployment.gpu.name}"
        what = f"{deployment.model.name} leaves no memory for a cache on {where} under {deployment.engine}"
        raise UserError(what, hint="Use more GPUs (tp), or a smaller dtype or quantization")
    return found
