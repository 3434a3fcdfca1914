"""Speculative decoding: a draft proposes k tokens, one pass of the model verifies them.

A step yields (1 − a^(k+1))/(1 − a) tokens on average when each drafted token is accepted with probability a, independently.
Source: Leviathan et al. 2023, arXiv 2211.17192 §3.1 (equation 1). The step takes k decode passes of the draft and one pass
of k + 1 queries per sequence of the model.
"""

from typing import NamedTuple

import msgspec

from kvcalc.errors import UserError
from kvcalc.layers.batch import Batch
from kvcalc.layers.ffn import Projections
from kvcalc.library.load import load_model
from kvcalc.model.spec import Model
from kvcalc.serving.latency import verification
from kvcalc.timing.deployment import Deployment

MOST_DRAFTED = 16


class Speculation(NamedTuple):
    """Of one step: tokens, seconds of drafting and verifying, seconds per token, and the speed-up over plain decode."""

    drafted: int
    tokens_per_step: float
    draft_s: float
    verify_s: float
    tpot_s: float
    speedup: float


def expected_tokens(acceptance: float, drafted: int) -> float:
    """(1 − a^(k+1))/(1 − a); k + 1 where every token is accepted. Raises UserError outside 0 ≤ a ≤ 1."""
    if not 0 <= acceptance <= 1:
        raise UserError(f"acceptance rate {acceptance} is not between 0 and 1")
    return float(drafted + 1) if acceptance == 1 else (1 - acceptance ** (drafted + 1)) / (1 - acceptance)


def speculate(
    target: Deployment, draft: Deployment, context: int, batch_size: int, drafted: int, acceptance: float
) -> Speculation:
    """One step of speculative decoding at `context`, against plain decode. A speed-up below 1 is reported as such."""
    tokens = expected_tokens(acceptance, drafted)
    plain = target.seconds(Batch.decode(context, batch_size))
    drafting = drafted * draft.seconds(Batch.decode(context, batch_size))
    verifying = target.seconds(verification(batch_size, drafted, context), all_positions=True)
    each = (drafting + verifying) / tokens
    return Speculation(drafted, tokens, drafting, verifying, each, plain / each)


def best_drafted(target: Deployment, draft: Deployment, context: int, batch_size: int, acceptance: float) -> Speculation:
    """The k from 1 to 16 with the least time per token."""
    tried = [speculate(target, draft, context, batch_size, k, acceptance) for k in range(1, MOST_DRAFTED + 1)]
    return min(tried, key=lambda s: s.tpot_s)


def stops_paying(
    target: Deployment, draft: Deployment, context: int, drafted: int, acceptance: float, most: int = 1 << 14
) -> int | None:
    """The first power of two of sequences at which the speed-up is below 1; None if it pays up to `most`."""
    batch = 1
    while batch <= most:
        if speculate(target, draft, context, batch, drafted, acceptance).speedup < 1:
            return batch
        batch *= 2
    return None


def draft_model(target: Model, name: str) -> Model:
    """The draft called `name`: a model, `layers=N` (the target's first N), or `mtp` (its multi-token-prediction layers).

    Raises UserError where the target has no such layers, or as `load_model` does.
    """
    if name.startswith("layers="):
        from kvcalc.library.edit import edited

        small = edited(target, [name])
        if small.layers > target.layers:
            raise UserError(f"draft {name}: {target.name} has {target.layers} layers to take the first of")
        return msgspec.structs.replace(small, name=f"{target.name}[{name}]")
    if name == "mtp":
        if not target.mtp:
            raise UserError(f"{target.name} declares no multi-token-prediction layers", hint="Draft with a model, or layers=N")
        joint = Projections(matrices={"mtp_projection": (2 * target.hidden_size, target.hidden_size)})
        changes = {"layers": target.mtp.layers, "pattern": (target.mtp.kind,), "extra": (*target.extra, joint), "mtp": None}
        return msgspec.structs.replace(target, name=f"{target.name}[mtp]", **changes)
    return load_model(name)
