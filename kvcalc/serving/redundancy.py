"""Time that a KV cache saves for one request, and why it may save almost nothing.

Without a cache, every step passes all tokens through the layers again. All of this work, except
the work of a run with a cache, is redundant. It may still cost no time: a pass over few tokens
takes as long as its launches and the reading of the weights, for any number of tokens. A cache
saves time only if a pass over all tokens takes longer than a pass over a single token.
"""

from typing import Any

from kvcalc.gpu.roof import roofline, total_seconds
from kvcalc.layers.batch import Batch
from kvcalc.serving.latency import Latency, StepsAgain, token_projections, without_cache
from kvcalc.timing.deployment import Deployment

MOST_CONTEXT = 1 << 20


def no_cache_fields(
    deployment: Deployment,
    input_len: int,
    output_len: int,
    batch_size: int,
    head: str,
    cached: Latency,
    steps: StepsAgain | None = None,
) -> dict[str, Any]:
    """Return the fields of the same request without a cache, compared with the `cached` request.

    Fields:
        no_cache_redundant_flops_share: 1 − FLOPs with the cache / FLOPs without. 0 if chunks of a
            prompt, each with its LM head, take more FLOPs.
        no_cache_token_projections: Tokens of all sequences that pass through the layers.
        tpot_last_bound_s: Lower bound of the last step with the cache, from the datasheet only. It is
            mostly the reading of the weights; the remaining time of the step is launches.

    Args:
        head: Positions of the LM head without a cache, `last` or `all`.
        steps: As in `without_cache`.
    """
    plain = without_cache(deployment, input_len, output_len, batch_size, head == "all", steps)
    needed, processed = token_projections(input_len, output_len)
    last = deployment.operators(Batch.decode(needed, batch_size))
    return {f"no_cache_{key}": value for key, value in plain._asdict().items()} | {
        "speedup": plain.e2e_s / cached.e2e_s if plain.e2e_s and cached.e2e_s else None,
        "no_cache_head": head,
        "no_cache_redundant_flops_share": max(0.0, 1 - cached.flops / plain.flops),
        "no_cache_token_projections": batch_size * processed,
        "no_cache_redundant_projections": batch_size * (processed - needed),
        "tpot_last_bound_s": float(total_seconds(roofline(last, deployment.gpu))),
    }


def doubling_context(deployment: Deployment, batch_size: int = 1, all_positions: bool = False) -> int | None:
    """Return the smallest context at which a step without the cache takes twice as long as with it.

    None if there is no such context up to 2^20 tokens or the positions of the model.
    """

    def doubled(context: int) -> bool:
        again = deployment.seconds(Batch.prefill(context, batch_size), all_positions)
        return bool(again >= 2 * deployment.seconds(Batch.decode(context, batch_size)))

    low, high = 1, min(MOST_CONTEXT, deployment.model.position_embeddings or MOST_CONTEXT)
    if not doubled(high):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if doubled(middle) else (middle + 1, high)
    return high
