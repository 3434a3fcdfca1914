"""Speculative decoding: a draft proposes k tokens, one pass of the model verifies them.

A step yields (1 − a^(k+1))/(1 − a) tokens on average when each drafted token is accepted with probability a, independently.
Source: Leviathan et al. 2023, arXiv 2211.17192 §3.1 (equation 1). The step takes k decode passes of the draft and one pass
of k + 1 queries per sequence of the model.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from kvcalc.errors import UserError
from kvcalc.layers.batch import Batch
from kvcalc.layers.ffn import Projections
from kvcalc.library.load import load_model
from kvcalc.model.drafts import check_vocabulary
from kvcalc.model.spec import Model
from kvcalc.serving.latency import verification
from kvcalc.timing.deployment import Deployment
from kvcalc.units import Num, parse_tokens

MOST_DRAFTED, MOST_SPECULATED = 16, 1024  # tokens a step: of which the best is looked for, and that may be asked for
ACCEPTANCE = 0.8  # of a drafted token, where nothing is said
MOST_BATCH = 1 << 14  # sequences to which it is looked for where speculation stops paying


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


class Drafting(NamedTuple):
    """How a server speculates: `drafted` tokens of `draft` a step, each accepted with probability `acceptance` (seeded)."""

    draft: Deployment
    drafted: int
    acceptance: float
    seed: int = 0

    @property
    def tokens_per_step(self) -> float:
        """That a step yields on average."""
        return expected_tokens(self.acceptance, self.drafted)

    def yields(self, chance: Any, count: int) -> Any:
        """Tokens of one step of `count` sequences: those accepted before the first rejection, and the verifying pass's own."""
        accepted = chance.random((count, self.drafted)) < self.acceptance
        return accepted.cumprod(axis=1).sum(axis=1) + 1


class StepTimes(NamedTuple):
    """Seconds of a plain decode pass, of the drafting passes and of the verifying one; arrays where the batch is one."""

    drafted: int
    plain_s: Any
    draft_s: Any
    verify_s: Any

    def per_token(self, acceptance: float) -> Any:
        """Seconds per token of each sequence."""
        return (self.draft_s + self.verify_s) / expected_tokens(acceptance, self.drafted)

    def speedup(self, acceptance: float) -> Any:
        """Over plain decode; below 1 where it costs more than it saves."""
        return self.plain_s / self.per_token(acceptance)


def step_times(target: Deployment, draft: Deployment, context: int, batch_size: Num, drafted: int) -> StepTimes:
    """What a step of speculative decoding at `context` takes, and a plain one."""
    plain = target.seconds(Batch.decode(context, batch_size))
    drafting = drafted * draft.seconds(Batch.decode(context, batch_size))
    return StepTimes(drafted, plain, drafting, target.seconds(verification(batch_size, drafted, context), all_positions=True))


def speculate(
    target: Deployment, draft: Deployment, context: int, batch_size: int, drafted: int, acceptance: float
) -> Speculation:
    """One step of speculative decoding at `context`, against plain decode. A speed-up below 1 is reported as such."""
    times, tokens = step_times(target, draft, context, batch_size, drafted), expected_tokens(acceptance, drafted)
    return Speculation(drafted, tokens, times.draft_s, times.verify_s, times.per_token(acceptance), times.speedup(acceptance))


def best_drafted(target: Deployment, draft: Deployment, context: int, batch_size: int, acceptance: float) -> Speculation:
    """The k from 1 to 16 with the least time per token; the passes that verify them are timed at once."""
    tokens = [expected_tokens(acceptance, k) for k in range(1, MOST_DRAFTED + 1)]
    every = float_array(range(1, MOST_DRAFTED + 1))
    drafting = draft.seconds(Batch.decode(context, batch_size))
    verifying = target.seconds(verification(batch_size, every, context), all_positions=True)
    each = (drafting * every + verifying) / float_array(tokens)
    return speculate(target, draft, context, batch_size, int(each.argmin()) + 1, acceptance)


def stops_paying(
    target: Deployment, draft: Deployment, context: int, drafted: int, acceptance: float, most: int = MOST_BATCH
) -> int | None:
    """The first power of two of sequences at which the speed-up is below 1; None if it pays up to `most`."""
    batches = [1 << n for n in range(most.bit_length())]
    return first_loss(batches, step_times(target, draft, context, float_array(batches), drafted), acceptance)


def first_loss(batches: Sequence[int], times: StepTimes, acceptance: float) -> int | None:
    """The first of `batches`, of which `times` are, at which the speed-up is below 1; None where there is none."""
    speedups = times.speedup(acceptance)
    return next((batch for batch, speedup in zip(batches, speedups, strict=True) if speedup < 1), None)


def float_array(values: Sequence[float]) -> Any:
    """Numbers as the array that formulas take."""
    import numpy as np

    return np.array(values, dtype=float)


def acceptance_rates(text: str) -> list[float | None]:
    """A list of acceptance rates as typed; None where nothing is. Raises UserError on what is no number from 0 to 1."""
    found: list[float | None] = []
    for word in text.split(",") if text else ():
        try:
            found.append(float(word))
        except ValueError:
            raise UserError(f"acceptance rate {word.strip()!r} is not a number", hint="Write 0.8, or 0.3,0.5,0.7,0.9") from None
        expected_tokens(found[-1] or 0.0, 1)
    return found or [None]


def speculative_tokens(text: str) -> list[int]:
    """A list of tokens drafted per step as typed; 0, the best, where nothing is."""
    return [parse_tokens(word, "number of speculative tokens", least=0) for word in text.split(",")] if text else [0]


def draft_model(target: Model, name: str) -> Model:
    """The draft called `name`: a model, `layers=N` (the target's first N), or `mtp` (its multi-token-prediction layers).

    Raises UserError where the target has no such layers, on another vocabulary, or as `load_model` does.
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
    draft = load_model(name)
    check_vocabulary(target, draft)
    return draft
