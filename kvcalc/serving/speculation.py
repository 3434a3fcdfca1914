"""Speculative decoding: a draft proposes k tokens, one pass of the model verifies them.

A step yields (1 − a^(k+1))/(1 − a) tokens on average when each drafted token is accepted with
probability a, independently. Source: Leviathan et al. 2023, arXiv 2211.17192 §3.1 (equation 1). The
step takes k decode passes of the draft and one pass of k + 1 queries per sequence of the model.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace

from kvcalc.arithmetic import Num
from kvcalc.errors import UserError
from kvcalc.layers.batch import Batch, Sequences
from kvcalc.layers.feed_forward import Projections
from kvcalc.library.load import load_model, with_changes
from kvcalc.model.model import Model, check_vocabulary
from kvcalc.timing.deployment import TimedDeployment

MAX_BEST_DRAFTED = 16  # draft tokens per step up to which the best number is searched
ACCEPTANCE = 0.8  # default acceptance rate of a draft token
MAX_BATCH = 1 << 14  # sequences up to which speculation is checked for a loss


def expected_tokens(acceptance: float, drafted: int) -> float:
    """Return the mean tokens of a step, (1 − a^(k+1))/(1 − a); k + 1 if every token is accepted."""
    if acceptance == 1:
        return float(drafted + 1)
    return (1 - acceptance ** (drafted + 1)) / (1 - acceptance)


class Drafting(NamedTuple):
    """Settings of speculative decoding.

    Attributes:
        draft: The draft model.
        drafted: Draft tokens per step.
        acceptance: Probability with which a draft token is accepted.
        seed: Seed of the accepted tokens.
    """

    draft: TimedDeployment
    drafted: int
    acceptance: float
    seed: int = 0

    def draw_tokens(self, rng: Any, count: int) -> Any:
        """Return how many tokens each of `count` sequences gains in one step, as an array.

        A sequence gains the tokens before the first rejection, and one token of the verification.
        """
        accepted = rng.random((count, self.drafted)) < self.acceptance
        return accepted.cumprod(axis=1).sum(axis=1) + 1


class StepTimes(NamedTuple):
    """Seconds of one step of speculative decoding. The times are arrays if the batch size is an
    array.

    Attributes:
        drafted: Draft tokens.
        plain_s: Seconds of a decode pass without a draft.
        draft_s: Seconds of the drafting passes.
        verify_s: Seconds of the verifying pass.
    """

    drafted: int
    plain_s: Any
    draft_s: Any
    verify_s: Any

    def per_token(self, acceptance: float) -> Any:
        """Return the seconds per token of each sequence."""
        return (self.draft_s + self.verify_s) / expected_tokens(acceptance, self.drafted)

    def speedup(self, acceptance: float) -> Any:
        """Return the speed-up over plain decode; below 1 if speculation costs more than it
        saves."""
        return self.plain_s / self.per_token(acceptance)


def verification(count: Num, drafted: Num, context: int) -> Batch:
    """Return the pass that verifies `drafted` tokens of each sequence.

    The pass has drafted + 1 queries per sequence. The context is `context` after the first query.
    """
    return Batch((Sequences(count, drafted + 1, context - 1),))


def step_times(
    target: TimedDeployment,
    draft: TimedDeployment,
    context: int,
    batch_size: Num,
    drafted: int,
) -> StepTimes:
    """Return the seconds of a step of speculative decoding at `context`, and of a plain step."""
    decode = Batch.decode(context, batch_size)
    verify = verification(batch_size, drafted, context)
    return StepTimes(
        drafted=drafted,
        plain_s=target.seconds(decode),
        draft_s=drafted * draft.seconds(decode),
        verify_s=target.seconds(verify, all_positions=True),
    )


def best_drafted(
    target: TimedDeployment,
    draft: TimedDeployment,
    context: int,
    batch_size: int,
    acceptance: float,
) -> StepTimes:
    """Return the times of the step with the fastest number of draft tokens, from 1 to 16."""
    numbers = range(1, MAX_BEST_DRAFTED + 1)
    drafted = float_array(numbers)
    tokens = float_array([expected_tokens(acceptance, number) for number in numbers])
    draft_s = draft.seconds(Batch.decode(context, batch_size))
    verify = verification(batch_size, drafted, context)
    verify_s = target.seconds(verify, all_positions=True)
    best = int(((draft_s * drafted + verify_s) / tokens).argmin()) + 1
    return step_times(target, draft, context, batch_size, best)


def break_even_batch(
    target: TimedDeployment,
    draft: TimedDeployment,
    context: int,
    drafted: int,
    acceptance: float,
) -> int | None:
    """Return the smallest batch size at which speculation is slower than plain decoding.

    Only powers of two are tried. Return None if speculation is faster up to MAX_BATCH.
    """
    batches = [1 << n for n in range(MAX_BATCH.bit_length())]
    times = step_times(target, draft, context, float_array(batches), drafted)
    speedups = times.speedup(acceptance)
    return next((n for n, speedup in zip(batches, speedups, strict=True) if speedup < 1), None)


def float_array(values: Sequence[float]) -> Any:
    """Return numbers as an array of floats."""
    import numpy as np

    return np.array(values, dtype=float)


def draft_model(target: Model, name: str) -> Model:
    """Return the draft called `name`.

    The name is a model, `layers=N` (the first N layers of the target), or `mtp` (the
    multi-token-prediction layers of the target).

    Raises:
        UserError: The target lacks these layers, the draft has another vocabulary, or the draft
            cannot be loaded.
    """
    if name.startswith("layers="):
        small = with_changes(target, [name])
        if small.layers > target.layers:
            raise UserError(
                f"draft {name}: {target.name} has {target.layers} layers to take the first of"
            )
        return replace(small, name=f"{target.name}[{name}]")
    if name == "mtp":
        if not target.mtp:
            raise UserError(
                f"{target.name} declares no multi-token-prediction layers",
                "Draft with a model, or layers=N",
            )
        size = target.hidden_size
        joint = Projections(matrices={"mtp_projection": (2 * size, size)})
        return replace(
            target,
            name=f"{target.name}[mtp]",
            layers=target.mtp.layers,
            pattern=(target.mtp.kind,),
            extra=(*target.extra, joint),
            mtp=None,
        )
    draft = load_model(name)
    check_vocabulary(target, draft)
    return draft
